//! The payments API as a user runs it: the program itself, over HTTP.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use reqwest::{Client, Response};
use serde_json::{Value, json};

/// The program, killed when dropped.
struct Api {
    process: Child,
    base: String,
    client: Client,
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Api {
    fn start() -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_payments"))
            .args(["--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let base = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self { process, base, client: Client::builder().no_proxy().build().unwrap() }
    }

    async fn send(&self, keys: &[&str], account: Option<&str>, body: impl Into<reqwest::Body>) -> Response {
        let mut request = self.client.post(format!("{}/charges", self.base)).header("content-type", "application/json");
        for key in keys {
            request = request.header("idempotency-key", *key);
        }
        if let Some(account) = account {
            request = request.bearer_auth(account);
        }
        request.body(body).send().await.unwrap()
    }

    async fn charge(&self, key: &str, account: &str, amount: u32, card: &str) -> Response {
        self.send(&[key], Some(account), json!({ "amount": amount, "card": card }).to_string()).await
    }

    async fn account(&self, account: &str) -> Value {
        let request = self.client.get(format!("{}/balance", self.base)).bearer_auth(account);
        request.send().await.unwrap().json().await.unwrap()
    }
}

fn replayed(response: &Response) -> bool {
    response.headers().contains_key("idempotent-replayed")
}

#[test]
fn the_demo_runs_to_its_end() {
    let output = Command::new(env!("CARGO_BIN_EXE_payments")).arg("--demo").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 x 201") && text.contains("alice was charged 1x"), "{text}");
    assert!(text.ends_with("Every order took effect once.\n"), "{text}");
}

#[tokio::test]
async fn a_replay_is_the_first_answer() {
    let api = Api::start();
    let first = api.charge("order-1", "alice", 1_200, "visa").await;
    assert_eq!((first.status().as_u16(), replayed(&first)), (201, false));
    let location = first.headers()["location"].clone();
    let body = first.bytes().await.unwrap();
    // Quoted, it is the same key.
    for key in ["order-1", "\"order-1\""] {
        let again = api.charge(key, "alice", 1_200, "visa").await;
        assert_eq!((again.status().as_u16(), replayed(&again)), (201, true));
        assert_eq!(again.headers()["location"], location);
        assert_eq!(again.bytes().await.unwrap(), body);
    }
    // The order of the body's members does not matter, its content does.
    let again = api.send(&["order-1"], Some("alice"), r#"{"card":"visa","amount":1200}"#).await;
    assert_eq!(again.status(), 201);
    assert_eq!(api.charge("order-1", "alice", 1_201, "visa").await.status(), 422);
    assert_eq!(api.account("alice").await, json!({ "balance": 1_200, "charges": 1, "calls": 1 }));
    // Another account, another order.
    assert!(!replayed(&api.charge("order-1", "bob", 1_200, "visa").await));
}

#[tokio::test]
async fn a_repeat_while_it_runs_is_told_when_to_come_back() {
    let api = Api::start();
    let (first, second) = tokio::join!(api.charge("order-1", "alice", 100, "slow"), async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        api.charge("order-1", "alice", 100, "slow").await
    });
    assert_eq!(first.status(), 201);
    assert_eq!(second.status(), 409);
    assert_eq!(second.headers()["content-type"], "application/problem+json");
    let wait: u64 = second.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=30).contains(&wait), "{wait}");
    assert_eq!(second.json::<Value>().await.unwrap()["retryable"], true);
    assert_eq!(api.account("alice").await["charges"], 1);
}

#[tokio::test]
async fn a_declined_card_is_final_and_a_time_out_is_not() {
    let api = Api::start();
    for replay in [false, true] {
        let declined = api.charge("order-1", "alice", 100, "declined").await;
        assert_eq!((declined.status().as_u16(), replayed(&declined)), (402, replay));
    }
    assert_eq!(api.account("alice").await["calls"], 1);
    let statuses = [
        api.charge("order-2", "alice", 100, "flaky").await.status().as_u16(),
        api.charge("order-2", "alice", 100, "flaky").await.status().as_u16(),
    ];
    assert_eq!(statuses, [504, 201]);
    assert_eq!(api.account("alice").await, json!({ "balance": 100, "charges": 1, "calls": 3 }));
}

#[tokio::test]
async fn bad_requests_are_refused_before_anything_is_reserved() {
    let api = Api::start();
    let order = r#"{"amount":1,"card":"visa"}"#;
    let (long, limit) = ("k".repeat(256), "k".repeat(255));
    for keys in [&[][..], &[""], &["a", "b"], &["a, b"], &["a\"b"], &[&long], &["tab\tkey"]] {
        let response = api.send(keys, Some("alice"), order).await;
        assert_eq!(response.status(), 400, "{keys:?}");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
    }
    assert_eq!(api.send(&["k"], None, order).await.status(), 401);
    assert_eq!(api.send(&["k"], Some(&"a".repeat(65)), order).await.status(), 401);
    for body in ["", "{", r#"{"amount":-1,"card":"visa"}"#, r#"{"amount":1}"#] {
        assert!(api.send(&["k"], Some("alice"), body).await.status().is_client_error(), "{body}");
    }
    assert_eq!(api.account("alice").await["calls"], 0);
    // None of these used the key up, and the longest key is a key.
    assert_eq!(api.send(&["k"], Some("alice"), order).await.status(), 201);
    assert_eq!(api.send(&[&limit], Some("alice"), order).await.status(), 201);
}

/// Pitfall 28: a method, a type or a form that is refused before the operation ran does not use the key up.
#[tokio::test]
async fn what_is_refused_before_it_ran_is_not_stored() {
    let api = Api::start();
    let order = json!({ "amount": 5, "card": "visa" }).to_string();
    let request = |method: reqwest::Method, content_type: &str, body: String| {
        let request = api.client.request(method, format!("{}/charges", api.base)).bearer_auth("alice");
        request.header("idempotency-key", "k").header("content-type", content_type).body(body).send()
    };
    let mut statuses = Vec::new();
    for (method, content_type, body) in [
        (reqwest::Method::PUT, "application/json", order.clone()),
        (reqwest::Method::POST, "text/plain", order.clone()),
        (reqwest::Method::POST, "application/json", json!({ "amount": "five", "card": "visa" }).to_string()),
    ] {
        let response = request(method, content_type, body).await.unwrap();
        assert!(!replayed(&response));
        statuses.push(response.status().as_u16());
    }
    assert_eq!(statuses, [405, 415, 422]);
    assert_eq!(api.account("alice").await["calls"], 0);
    let corrected = request(reqwest::Method::POST, "application/json", order).await.unwrap();
    assert_eq!((corrected.status().as_u16(), replayed(&corrected)), (201, false));
}
