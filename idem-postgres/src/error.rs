//! What went wrong in Postgres, as the contract's kinds and classes: by SQLSTATE, never by text.

use idem_core::{ErrorClass, ErrorKind, Operation, StoreError};
use sqlx::Error as Sqlx;
use sqlx::postgres::{PgDatabaseError, PgSeverity};

/// The name of this store in errors.
pub(crate) const STORE: &str = "postgres";

/// Why this crate itself could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresError {
    /// A schema name that this crate does not accept.
    #[error("a schema name has 1 to 40 bytes, begins with a letter or an underscore and goes on with these and digits")]
    SchemaName,
    /// The schema has no tables of idem.
    #[error("the schema has not been migrated: call migrate()")]
    NotMigrated,
    /// The tables are of a version that this crate does not know.
    #[error("the schema has version {found}, and this crate knows versions up to {known}")]
    NewerSchema {
        /// The version found.
        found: i32,
        /// The newest version that this crate knows.
        known: i32,
    },
    /// A transaction in which the functions do not see what others have committed meanwhile.
    #[error("the transaction's isolation has to be read committed")]
    Isolation,
    /// A prepared statement was not there, or not the one that was prepared.
    #[error(
        "a prepared statement was missing or another one, as happens behind pgbouncer in transaction mode: turn them off \
         with Config::with_prepared_statements(false)"
    )]
    PreparedStatements(#[source] Sqlx),
    /// Bytes in a column that this crate did not write.
    #[error("the record's {0} cannot be read")]
    Column(&'static str),
}

/// Where a call was when it met an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It had no connection yet: nothing was sent.
    Acquire,
    /// It may have been sent, and committed.
    Execute,
}

/// Classifies an error of the driver's.
pub(crate) fn classify(error: &Sqlx, stage: Stage) -> (ErrorKind, ErrorClass) {
    match error {
        Sqlx::Database(database) => match database.code() {
            Some(code) => match (by_code(&code), stage) {
                ((kind, ErrorClass::Unknown), Stage::Acquire) => (kind, ErrorClass::Retryable),
                (classified, _) => classified,
            },
            None => (ErrorKind::Other, ErrorClass::Unknown),
        },
        Sqlx::PoolTimedOut => (ErrorKind::Timeout, ErrorClass::Retryable),
        Sqlx::PoolClosed | Sqlx::WorkerCrashed => (ErrorKind::Unavailable, ErrorClass::Retryable),
        Sqlx::Io(_) | Sqlx::Tls(_) | Sqlx::Protocol(_) => (ErrorKind::Unavailable, unless_sent(stage)),
        Sqlx::Configuration(_) => (ErrorKind::Misconfigured, ErrorClass::Permanent),
        // The call was answered, and the answer could not be read: it has had its effect.
        Sqlx::RowNotFound
        | Sqlx::TypeNotFound { .. }
        | Sqlx::ColumnIndexOutOfBounds { .. }
        | Sqlx::ColumnNotFound(_)
        | Sqlx::ColumnDecode { .. }
        | Sqlx::Decode(_) => (ErrorKind::Unreadable, ErrorClass::Unknown),
        _ => (ErrorKind::Other, unless_sent(stage)),
    }
}

fn unless_sent(stage: Stage) -> ErrorClass {
    match stage {
        Stage::Acquire => ErrorClass::Retryable,
        Stage::Execute => ErrorClass::Unknown,
    }
}

/// By the codes of the manual's appendix A. Where the server has answered with an error, it has rolled back, but for the
/// few codes with which it may have lost sight of a commit.
fn by_code(code: &str) -> (ErrorKind, ErrorClass) {
    match code {
        // statement_completion_unknown; the connection broke.
        "40003" => (ErrorKind::Unavailable, ErrorClass::Unknown),
        _ if code.starts_with("08") => (ErrorKind::Unavailable, ErrorClass::Unknown),
        // admin_shutdown, crash_shutdown, idle_session_timeout: a commit that waited for a replica may stand.
        "57P01" | "57P02" | "57P05" => (ErrorKind::Unavailable, ErrorClass::Unknown),
        // cannot_connect_now, too_many_connections, and what pgbouncer says of its own.
        "57P03" | "53300" => (ErrorKind::Unavailable, ErrorClass::Retryable),
        // query_canceled: by a statement_timeout or somebody's hand.
        "57014" => (ErrorKind::Timeout, ErrorClass::Retryable),
        // disk_full, and the other resources.
        "53100" => (ErrorKind::Full, ErrorClass::Retryable),
        _ if code.starts_with("53") => (ErrorKind::Unavailable, ErrorClass::Retryable),
        // serialization_failure, deadlock_detected, lock_not_available.
        _ if code.starts_with("40") => (ErrorKind::Conflict, ErrorClass::Retryable),
        "55P03" => (ErrorKind::Conflict, ErrorClass::Retryable),
        // read_only_sql_transaction: a replica, or a former primary. Another server may take the call.
        "25006" => (ErrorKind::Misconfigured, ErrorClass::Retryable),
        // invalid_sql_statement_name, duplicate_prepared_statement.
        "26000" | "42P05" => (ErrorKind::Misconfigured, ErrorClass::Permanent),
        // No such table, function, column, type, schema, database or role; no rights; no password.
        "42P01" | "42883" | "42703" | "42704" | "3F000" | "3D000" | "42501" => {
            (ErrorKind::Misconfigured, ErrorClass::Permanent)
        }
        _ if code.starts_with("28") => (ErrorKind::Misconfigured, ErrorClass::Permanent),
        // data_corrupted, index_corrupted.
        _ if code.starts_with("XX") => (ErrorKind::Unreadable, ErrorClass::Permanent),
        _ => (ErrorKind::Other, ErrorClass::Permanent),
    }
}

/// Whether the server has met another prepared statement than the one that was meant, or none.
fn is_of_prepared_statements(error: &Sqlx) -> bool {
    let Some(error) = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>()) else {
        return false;
    };
    match error.code() {
        "26000" | "42P05" => true,
        // protocol_violation: from the server, values that do not fit the statement. pgbouncer gives this code to whatever
        // it has to say, and closes the connection then.
        "08P01" => !matches!(error.severity(), PgSeverity::Fatal | PgSeverity::Panic),
        _ => false,
    }
}

/// The contract's error for one of the driver's.
pub(crate) fn store_error(error: Sqlx, stage: Stage, operation: Operation) -> StoreError {
    if is_of_prepared_statements(&error) {
        return own_error(PostgresError::PreparedStatements(error), operation)
            .with_context("behind pgbouncer in transaction mode, Config::with_prepared_statements(false) is needed");
    }
    let (kind, class) = classify(&error, stage);
    let code = error.as_database_error().and_then(|error| error.code());
    let refused = stage == Stage::Acquire && code.is_some_and(|code| code == "08P01");
    let answer = StoreError::new(kind, STORE, operation).with_class(class).with_source(error);
    if refused {
        return answer.with_context(
            "a pooler refused the connection; to pgbouncer, a pool must not send the setting extra_float_digits: see \
             Config::prepared_statements",
        );
    }
    answer
}

/// The contract's error for one of this crate's.
pub(crate) fn own_error(error: PostgresError, operation: Operation) -> StoreError {
    let kind = match error {
        PostgresError::Column(_) => ErrorKind::Unreadable,
        _ => ErrorKind::Misconfigured,
    };
    StoreError::new(kind, STORE, operation).with_source(error)
}

/// Time was over before the call was sent.
pub(crate) fn too_late(operation: Operation) -> StoreError {
    StoreError::new(ErrorKind::Timeout, STORE, operation).with_class(ErrorClass::Retryable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_server_rolled_back_did_not_happen() {
        for code in ["40001", "40P01", "55P03", "57014", "53100", "53300", "57P03", "25006"] {
            assert_eq!(by_code(code).1, ErrorClass::Retryable, "{code}");
        }
        for code in ["42P01", "42501", "28P01", "23514", "22P02", "26000", "42P05", "XX001"] {
            assert_eq!(by_code(code).1, ErrorClass::Permanent, "{code}");
        }
        for code in ["08006", "40003", "57P01", "57P02"] {
            assert_eq!(by_code(code).1, ErrorClass::Unknown, "{code}");
        }
    }

    #[test]
    fn what_was_not_sent_did_not_happen() {
        let broken = || Sqlx::Io(std::io::ErrorKind::ConnectionReset.into());
        assert_eq!(classify(&broken(), Stage::Acquire).1, ErrorClass::Retryable);
        assert_eq!(classify(&broken(), Stage::Execute).1, ErrorClass::Unknown);
        assert_eq!(classify(&Sqlx::PoolTimedOut, Stage::Acquire), (ErrorKind::Timeout, ErrorClass::Retryable));
    }
}
