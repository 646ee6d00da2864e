//! What operators see: a decision for every request, and never a body or a key in clear.

use std::fmt::Write;
use std::sync::{Arc, Mutex};

use idem_http::{IdempotencyLayer, KeysInLogs};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::support::{layer, request, send, service};

/// All spans and events, as text.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<String>>);

impl Lines {
    fn add(&self, visit: impl FnOnce(&mut Text)) {
        let mut text = Text(String::new());
        visit(&mut text);
        let mut lines = self.0.lock().unwrap();
        lines.push_str(&text.0);
        lines.push('\n');
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Lines {
    fn on_new_span(&self, attributes: &tracing::span::Attributes<'_>, _: &tracing::span::Id, _: Context<'_, S>) {
        self.add(|text| {
            text.0.push_str(attributes.metadata().name());
            attributes.record(text);
        });
    }

    fn on_record(&self, _: &tracing::span::Id, values: &tracing::span::Record<'_>, _: Context<'_, S>) {
        self.add(|text| values.record(text));
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        self.add(|text| {
            write!(text.0, "{}", event.metadata().level()).unwrap();
            event.record(text);
        });
    }
}

async fn told(layer: IdempotencyLayer) -> String {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    let guard = tracing::subscriber::set_default(subscriber);
    let (router, _) = service(&layer, |_| "the secret response");
    for body in ["the secret request", "the secret request", "another secret"] {
        send(&router, request("/", "secret-order-4242", body)).await;
    }
    send(&router, request("/", "secret, key", "")).await;
    drop(guard);
    let lines = lines.0.lock().unwrap();
    lines.clone()
}

#[tokio::test]
async fn every_decision_is_told_and_no_body() {
    let text = told(layer()).await;
    for decision in ["fresh", "replayed", "mismatch", "key-invalid"] {
        assert!(text.contains(&format!("decision=\"{decision}\"")), "{decision}: {text}");
    }
    assert!(
        text.contains("INFO") && text.contains("DEBUG") && text.contains("idempotency") && text.contains("attempt=1")
    );
    assert!(!text.contains("secret"), "{text}");
}

#[tokio::test]
async fn keys_are_told_as_chosen() {
    let shortened = told(layer().with_keys_in_logs(KeysInLogs::Shortened)).await;
    assert!(shortened.contains("key=secret-o…") && !shortened.contains("4242"), "{shortened}");
    let hidden = told(layer().with_keys_in_logs(KeysInLogs::Hidden)).await;
    assert!(hidden.contains("key=-") && !hidden.contains("secret"), "{hidden}");
}

#[cfg(feature = "metrics")]
#[test]
fn requests_are_counted_and_timed_by_decision() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    let recorder = DebuggingRecorder::new();
    let snapshots = recorder.snapshotter();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let (router, _) = service(&layer(), |run| run.to_string());
            for body in ["a", "a", "a", "b"] {
                send(&router, request("/", "k", body)).await;
            }
        });
    });
    let found = snapshots.snapshot().into_vec();
    let of = |name: &str, decision: &str| {
        let matches = |key: &metrics::Key| {
            key.name() == name && key.labels().any(|label| (label.key(), label.value()) == ("decision", decision))
        };
        found.iter().find(|(key, ..)| matches(key.key())).map(|(.., value)| match value {
            DebugValue::Counter(count) => *count,
            DebugValue::Histogram(values) => values.len() as u64,
            DebugValue::Gauge(_) => panic!("there is no gauge"),
        })
    };
    for (decision, count) in [("fresh", 1), ("replayed", 2), ("mismatch", 1)] {
        assert_eq!(of("idem_http_requests_total", decision), Some(count), "{decision}");
        assert_eq!(of("idem_http_request_seconds", decision), Some(count), "{decision}");
    }
    assert_eq!(of("idem_http_requests_total", "taken-over"), None);
}
