//! What went wrong in Redis, as the contract's kinds and classes: by the code of the server's error, never by its text.

use std::sync::Arc;
use std::time::Duration;

use idem_core::{ErrorClass, ErrorKind, Operation, StoreError};
use redis::{ErrorKind as Driver, RedisError, ServerError};

use crate::check::Finding;
use crate::layout::LayoutError;

/// The name of this store in errors.
pub(crate) const STORE: &str = "redis";

/// Why this crate itself could not go on.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RedisStoreError {
    /// A prefix that this crate does not accept.
    #[error("a prefix has 1 to 64 ASCII letters, digits and the characters _ - . / :")]
    Prefix,
    /// The server is older than 6.2.
    #[error("the server has version {found}, and version 6.2 or later is needed")]
    ServerTooOld {
        /// The version found.
        found: String,
    },
    /// The server is a replica: it takes no writes, and what it answers may be out of date.
    #[error("the server is a replica, which takes no writes")]
    Replica,
    /// The server is a node of a cluster and was given as a single server.
    #[error("the server is a node of a cluster: open it as one, with RedisStore::connect_cluster")]
    IsCluster,
    /// The server is a single one and was given as a node of a cluster.
    #[error("the server is no node of a cluster: open it by RedisStore::connect")]
    IsNoCluster,
    /// `WAITAOF` is configured, and the server does not have it, or has no append-only file to wait for.
    #[error("the server cannot wait for its disk: that needs Redis 7.2 or Valkey, and appendonly yes")]
    NoWaitAof,
    /// [`Acknowledge::timeout`](crate::Acknowledge::timeout) is not less than
    /// [`Config::response_timeout`](crate::Config::response_timeout).
    #[error("the time to wait for replicas has to be less than the response timeout")]
    AcknowledgeTimeout,
    /// The server is set up to lose records, and the configuration refuses that.
    #[error("the server may lose records: {}", list(.0))]
    Unsafe(Vec<Finding>),
    /// The write has happened on the server, and too few others have confirmed it in time.
    #[error("the write has happened, and {found} of {wanted} have confirmed it within {waited:?}")]
    TooFewAcknowledged {
        /// How many have.
        found: i64,
        /// How many should have.
        wanted: i64,
        /// How long was waited.
        waited: Duration,
    },
    /// The value under a key is no record that this crate can read.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// A script found that the value under a key is no record that this crate can read.
    #[error("the value under the key is no record")]
    NoRecord,
    /// An answer that no script gives.
    #[error("the server's answer has an unknown form")]
    Answer,
    /// Too many calls wait for their turn.
    #[error("too many calls wait for their turn")]
    QueueFull,
}

fn list(findings: &[Finding]) -> String {
    findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Why a command has no answer. Cheap to clone: those who travel together share it.
#[derive(Debug, Clone)]
pub(crate) enum Trouble {
    /// There was no connection: nothing was sent.
    Connect(RedisError),
    /// The connection broke, and the command may have been executed.
    Lost(RedisError),
    /// No answer in time.
    Timeout {
        sent: bool,
    },
    /// The server has answered with an error.
    Server(ServerError),
    /// The answer is there, and too few others have confirmed it.
    TooFew(Arc<RedisStoreError>),
    QueueFull,
    /// The runtime that was to send it has gone.
    Gone,
}

impl Trouble {
    /// What it means, on a cluster or not.
    pub(crate) fn classify(&self, cluster: bool) -> (ErrorKind, ErrorClass) {
        match self {
            Self::Connect(error) => match by_driver(error, cluster) {
                // Nothing was sent.
                (kind, ErrorClass::Unknown) => (kind, ErrorClass::Retryable),
                known => known,
            },
            Self::Lost(error) => match by_driver(error, cluster) {
                // Of several commands, of which one was refused.
                (kind, ErrorClass::Retryable) => (kind, ErrorClass::Unknown),
                known => known,
            },
            Self::Timeout { sent } => {
                (ErrorKind::Timeout, if *sent { ErrorClass::Unknown } else { ErrorClass::Retryable })
            }
            Self::Server(error) => by_code(error.code(), cluster),
            Self::TooFew(_) | Self::Gone => (ErrorKind::Unavailable, ErrorClass::Unknown),
            Self::QueueFull => (ErrorKind::Unavailable, ErrorClass::Retryable),
        }
    }

    /// Whether it may pass while a caller waits: then the call is repeated.
    pub(crate) fn may_pass(&self, cluster: bool) -> bool {
        match self {
            Self::Connect(_) | Self::Lost(_) | Self::Timeout { .. } | Self::Gone => {
                self.classify(cluster).1 != ErrorClass::Permanent
            }
            Self::Server(error) => {
                let code = error.code();
                matches!(code, "READONLY" | "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "BUSY")
                    || (cluster && matches!(code, "MOVED" | "ASK"))
            }
            Self::TooFew(_) | Self::QueueFull => false,
        }
    }

    pub(crate) fn into_error(self, class: ErrorClass, cluster: bool, operation: Operation) -> StoreError {
        let error = StoreError::new(self.classify(cluster).0, STORE, operation).with_class(class);
        match self {
            Self::Connect(source) | Self::Lost(source) => error.with_source(source),
            Self::Server(server) if matches!(server.code(), "MOVED" | "ASK") && !cluster => {
                error.with_source(RedisStoreError::IsCluster)
            }
            Self::Server(source) => error.with_source(without_arguments(source)),
            Self::TooFew(source) => error.with_source(Arc::unwrap_or_clone(source)),
            Self::QueueFull => error.with_source(RedisStoreError::QueueFull),
            Self::Timeout { .. } | Self::Gone => error,
        }
    }
}

/// The server's error without what it quotes of a command: a key, a token, a body. Its text is cut and nothing is decided
/// by it.
fn without_arguments(error: ServerError) -> RedisError {
    match error.details().and_then(|details| details.split_once(", with args")) {
        Some((before, _)) => redis::make_extension_error(error.code().to_owned(), Some(before.to_owned())),
        None => error.into(),
    }
}

fn by_driver(error: &RedisError, cluster: bool) -> (ErrorKind, ErrorClass) {
    if let Some(code) = error.code() {
        return by_code(code, cluster);
    }
    match error.kind() {
        Driver::AuthenticationFailed | Driver::InvalidClientConfig | Driver::RESP3NotSupported => {
            (ErrorKind::Misconfigured, ErrorClass::Permanent)
        }
        Driver::EmptySentinelList | Driver::Client => (ErrorKind::Misconfigured, ErrorClass::Permanent),
        // While a failover goes on there may be none.
        Driver::MasterNameNotFoundBySentinel | Driver::NoValidReplicasFoundBySentinel => {
            (ErrorKind::Unavailable, ErrorClass::Retryable)
        }
        _ if error.is_timeout() => (ErrorKind::Timeout, ErrorClass::Unknown),
        _ => (ErrorKind::Unavailable, ErrorClass::Unknown),
    }
}

/// By the first word of the server's error. Where a script ends with one, it has written nothing that counts.
fn by_code(code: &str, cluster: bool) -> (ErrorKind, ErrorClass) {
    // Before version 7, the error of a command in a script brought its dash with it.
    match code.trim_start_matches('-') {
        "OOM" => (ErrorKind::Full, ErrorClass::Retryable),
        // A key that holds something else than a string.
        "WRONGTYPE" => (ErrorKind::Unreadable, ErrorClass::Permanent),
        // A replica, or what was the master: another server may take the call.
        "READONLY" => (ErrorKind::Misconfigured, ErrorClass::Retryable),
        // Starting, failing over, moving a slot, busy with somebody's script, unable to write its disk or to reach its replicas.
        "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "BUSY" | "MISCONF" | "NOREPLICAS" | "NOSCRIPT"
        | "UNKILLABLE" => (ErrorKind::Unavailable, ErrorClass::Retryable),
        "MOVED" | "ASK" if cluster => (ErrorKind::Unavailable, ErrorClass::Retryable),
        // A cluster that was given as a single server.
        "MOVED" | "ASK" | "CROSSSLOT" => (ErrorKind::Misconfigured, ErrorClass::Permanent),
        // No password, a wrong one, no right to the command or the key; a server in protected mode.
        "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED" | "NOPROTO" => (ErrorKind::Misconfigured, ErrorClass::Permanent),
        _ => (ErrorKind::Other, ErrorClass::Unknown),
    }
}

/// The contract's error for one of this crate's.
pub(crate) fn own_error(error: RedisStoreError, operation: Operation) -> StoreError {
    let kind = match error {
        RedisStoreError::Layout(_) | RedisStoreError::NoRecord => ErrorKind::Unreadable,
        RedisStoreError::Answer => ErrorKind::Other,
        _ => ErrorKind::Misconfigured,
    };
    StoreError::new(kind, STORE, operation).with_source(error)
}

/// The contract's error for one that the driver met while a store was opened.
pub(crate) fn setup_error(error: RedisError) -> StoreError {
    let trouble = Trouble::Connect(error);
    let class = trouble.classify(false).1;
    trouble.into_error(class, false, Operation::Setup)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_server_refused_did_not_happen() {
        for code in ["OOM", "-OOM", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "BUSY", "MISCONF", "NOREPLICAS"]
        {
            assert_eq!(by_code(code, false).1, ErrorClass::Retryable, "{code}");
        }
        for code in ["WRONGTYPE", "NOPERM", "NOAUTH", "WRONGPASS", "MOVED", "CROSSSLOT"] {
            assert_eq!(by_code(code, false).1, ErrorClass::Permanent, "{code}");
        }
        assert_eq!(by_code("MOVED", true).1, ErrorClass::Retryable);
        assert_eq!(by_code("SOMETHING", false).1, ErrorClass::Unknown);
    }

    /// A server of which somebody has renamed a command quotes what it was sent.
    #[test]
    fn no_key_and_no_token_goes_into_an_error() {
        let answered = b"-ERR unknown command 'EVALSHA', with args beginning with: '1' 'idem:1:a:secret' \r\n";
        let Ok(redis::Value::ServerError(error)) = redis::parse_redis_value(answered) else { panic!() };
        let error = Trouble::Server(error).into_error(ErrorClass::Unknown, false, Operation::Reserve);
        assert_eq!(error.kind(), ErrorKind::Other);
        let shown = format!("{error} {error:?}");
        assert!(shown.contains("unknown command") && !shown.contains("secret"), "{shown}");
    }

    #[test]
    fn what_was_not_sent_did_not_happen() {
        let broken = || RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        assert_eq!(Trouble::Connect(broken()).classify(false).1, ErrorClass::Retryable);
        assert_eq!(Trouble::Lost(broken()).classify(false).1, ErrorClass::Unknown);
        assert_eq!(Trouble::Timeout { sent: false }.classify(false).1, ErrorClass::Retryable);
        assert_eq!(Trouble::Timeout { sent: true }.classify(false).1, ErrorClass::Unknown);
        let wrong = RedisError::from((Driver::AuthenticationFailed, "no"));
        assert_eq!(Trouble::Connect(wrong).classify(false), (ErrorKind::Misconfigured, ErrorClass::Permanent));
    }
}
