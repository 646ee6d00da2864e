//! What is told to operators: a span and an event for each request with a key, and figures by its decision. Never a body,
//! and a key only in the form that is chosen.

use std::fmt;
use std::time::Instant;

use idem_core::{Fingerprint, Key};
use tracing::field::Empty;
use tracing::{Level, Span, debug, enabled, info, warn};

use crate::decision::{Decision, Recorded};
use crate::refusal::Reason;
use crate::settings::Settings;

/// How keys are shown in logs. They come from clients, who may put anything into them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KeysInLogs {
    /// 16 digits of a hash of scope and key, the same for the same key: enough to find all lines of a key that is known. A
    /// key that can be guessed can be found from its hash.
    #[default]
    Hashed,
    /// The first eight characters of the key.
    Shortened,
    /// Not at all.
    Hidden,
}

struct Shown<'a>(KeysInLogs, &'a Key);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(how, key) = self;
        match how {
            KeysInLogs::Hashed => {
                let hash = Fingerprint::builder().field(key.scope()).field(key.id()).finish();
                hash.as_bytes().iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
            }
            KeysInLogs::Shortened => {
                let id = key.id();
                match id.char_indices().nth(8) {
                    Some((at, _)) => write!(f, "{}…", id.get(..at).unwrap_or_default()),
                    None => f.write_str(id),
                }
            }
            KeysInLogs::Hidden => f.write_str("-"),
        }
    }
}

/// One request with a key, or without one that is required.
pub(crate) struct Watch {
    started: Instant,
}

impl Watch {
    pub(crate) fn start() -> Self {
        Self { started: Instant::now() }
    }

    pub(crate) fn span(settings: &Settings, key: &Key) -> Span {
        let span = tracing::debug_span!("idempotency", key = Empty, decision = Empty);
        if !span.is_disabled() {
            span.record("key", tracing::field::display(Shown(settings.keys_in_logs, key)));
        }
        span
    }

    pub(crate) fn refused(&self, key: Option<&Key>, settings: &Settings, reason: Reason) {
        self.tell(key, settings, Decision::Refused(reason));
    }

    pub(crate) fn decided(&self, span: &Span, key: &Key, settings: &Settings, decision: Decision) {
        if !span.is_disabled() {
            span.record("decision", decision.as_str());
        }
        self.tell(Some(key), settings, decision);
    }

    fn tell(&self, key: Option<&Key>, settings: &Settings, decision: Decision) {
        let elapsed = self.started.elapsed();
        #[cfg(feature = "metrics")]
        {
            let label = decision.as_str();
            metrics::counter!("idem_http_requests_total", "decision" => label).increment(1);
            metrics::histogram!("idem_http_request_seconds", "decision" => label).record(elapsed);
        }
        let level = level(decision);
        if level == Level::DEBUG && !enabled!(Level::DEBUG) {
            return;
        }
        let shown = key.map(|key| Shown(settings.keys_in_logs, key));
        let (key, attempt) = (shown.as_ref().map(tracing::field::display), attempt(decision));
        let decision = decision.as_str();
        match level {
            Level::WARN => warn!(key, attempt, decision, ?elapsed, "a request with an idempotency key"),
            Level::INFO => info!(key, attempt, decision, ?elapsed, "a request with an idempotency key"),
            _ => debug!(key, attempt, decision, ?elapsed, "a request with an idempotency key"),
        }
    }
}

fn attempt(decision: Decision) -> Option<u32> {
    match decision {
        Decision::Ran { attempt, .. } | Decision::Replayed { attempt } => Some(attempt),
        Decision::Refused(_) | Decision::Rejected | Decision::Unprotected => None,
    }
}

/// What somebody may have to look into is a warning, and what clients do wrong is not.
fn level(decision: Decision) -> Level {
    match decision {
        Decision::Ran { recorded: Recorded::Failed, .. } | Decision::Unprotected => Level::WARN,
        Decision::Ran { took_over: true, .. } => Level::WARN,
        Decision::Refused(
            Reason::Abandoned
            | Reason::OutcomeUnknown
            | Reason::Unreadable
            | Reason::Panicked
            | Reason::StoreUnavailable
            | Reason::Interrupted,
        ) => Level::WARN,
        Decision::Refused(Reason::Mismatch | Reason::Withheld) => Level::INFO,
        Decision::Ran { .. } | Decision::Replayed { .. } | Decision::Rejected | Decision::Refused(_) => Level::DEBUG,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_shown_as_chosen() {
        let shown = |how, id: &str| Shown(how, &Key::new("tenant", id).unwrap()).to_string();
        let hash = shown(KeysInLogs::Hashed, "order-4242-4242");
        assert!(hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{hash}");
        assert_eq!(hash, shown(KeysInLogs::Hashed, "order-4242-4242"));
        assert_ne!(hash, shown(KeysInLogs::Hashed, "order-4242-4243"));
        assert_eq!(shown(KeysInLogs::Shortened, "order-4242-4242"), "order-42…");
        assert_eq!(shown(KeysInLogs::Shortened, "order-42"), "order-42");
        assert_eq!(shown(KeysInLogs::Hidden, "order-42"), "-");
    }
}
