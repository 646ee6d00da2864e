//! The published policy.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::{Method, Request, StatusCode};
use idem_core::MemoryStore;
use idem_core::executor::Executor;
use idem_http::{IdempotencyLayer, KeyFormat, Reason, SingleTenant};

use crate::support::{layer, request, send};

/// The draft, section 2.5.2: format, expiry and errors.
#[tokio::test]
async fn it_says_what_clients_have_to_know() {
    let executor = Executor::builder(MemoryStore::new()).retention(Duration::from_secs(3600)).build().unwrap();
    let layer = IdempotencyLayer::new(executor, SingleTenant)
        .with_key_format(KeyFormat::Uuid)
        .with_status(Reason::InProgress, StatusCode::LOCKED)
        .with_methods([Method::POST])
        .with_body_limit(1_000);
    let router = Router::new().route_service("/idempotency", layer.policy());
    let answer = send(&router, Request::get("/idempotency").body(Body::empty()).unwrap()).await;
    assert_eq!((answer.status, &answer.headers["content-type"]), (200, &"application/json".parse().unwrap()));
    let policy: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    let expected = serde_json::json!({
        "header": "idempotency-key",
        "required": true,
        "methods": ["POST"],
        "key_format": "a UUID in its hyphenated form",
        "key_max_bytes": 255,
        "retention_seconds": 3600,
        "request_max_bytes": 1_000,
        "response_max_bytes": 1024 * 1024,
        "kept_responses": "all responses but 405, 408, 413, 415, 425, 429 and 5xx",
        "replayed_header": "idempotent-replayed",
        "problems": policy["problems"],
    });
    assert_eq!(policy, expected);
    let problems = policy["problems"].as_array().unwrap();
    assert_eq!(problems.len(), Reason::ALL.len());
    assert!(problems.contains(&serde_json::json!({
        "type": "urn:idem:problem:in-progress",
        "status": 423,
        "title": "A request with this key is in progress",
    })));
    assert_eq!(answer.body, layer.policy().to_json());
}

#[tokio::test]
async fn it_is_read_only() {
    let router = Router::new().route_service("/idempotency", layer().policy());
    let head = send(&router, Request::head("/idempotency").body(Body::empty()).unwrap()).await;
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.headers["content-length"], layer().policy().to_json().len().to_string());
    let post = send(&router, request("/idempotency", "k", "")).await;
    assert_eq!((post.status, &post.headers["allow"]), (405, &"GET, HEAD".parse().unwrap()));
}
