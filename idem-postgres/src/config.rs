//! Settings.

use std::time::Duration;

use idem_core::limits::{DEFAULT_OUTCOME_LIMIT, MAX_OUTCOME_LIMIT, MAX_RETENTION};

use crate::error::PostgresError;

/// Settings of a [`PostgresStore`](crate::PostgresStore).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The schema that holds the tables. Default: `idem`.
    pub schema: Schema,
    /// The longest retention that a reserve may ask for: a day's partition is dropped that long after its day, so each
    /// day more is a partition more to look through. Default: 24 hours.
    pub max_retention: Duration,
    /// The largest outcome, in bytes. Default: 1 MiB; 8 MiB at most.
    pub outcome_limit: usize,
    /// How long a call may take in all, waiting for its turn and a connection included. Default: 10 s.
    pub call_timeout: Duration,
    /// How calls are gathered. Default: [`Batching::default`].
    pub batching: Batching,
    /// Whether statements are prepared in the server's session. Default: true.
    ///
    /// **Turn it off where connections lead through pgbouncer in transaction mode**, or another pooler that gives the
    /// server's session to somebody else after each transaction. A prepared statement would be missing in the next session,
    /// or be another client's of the same name. Each call, a batch too, is then one message of the simple protocol, with the
    /// values as literals that cannot be taken for anything else. The functions and round trips are the same; a call
    /// takes the server somewhat longer, and an outcome twice its bytes on the wire.
    ///
    /// - pgbouncer 1.21 and later can keep prepared statements in transaction mode where its `max_prepared_statements` is
    ///   above 0. This crate's tests do not cover that; turned off works with every version.
    /// - pgbouncer refuses to open a connection with the setting `extra_float_digits` unless it is told to ignore it, and
    ///   sqlx sends it. A pool that [`connect`](crate::PostgresStore::connect) makes does not. For a pool of your own, say
    ///   [`PgConnectOptions::extra_float_digits(None)`](sqlx::postgres::PgConnectOptions::extra_float_digits), and
    ///   [`disable_statement_logging`](sqlx::ConnectOptions::disable_statement_logging): the text of the statements holds
    ///   keys and outcomes, in hexadecimal digits. So does the server's log, where it is set to log statements.
    /// - [`statement_cache_capacity(0)`](sqlx::postgres::PgConnectOptions::statement_cache_capacity) does not help in place
    ///   of this: the statement is prepared anew then, but in a message of its own, and the next one may meet another
    ///   session.
    /// - Your own queries in a transaction with [`complete_in`](crate::PostgresStore::complete_in) are yours to adapt:
    ///   `.persistent(false)` is enough there, since a transaction stays in one session.
    pub prepared_statements: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            schema: Schema::default(),
            max_retention: Duration::from_secs(24 * 60 * 60),
            outcome_limit: DEFAULT_OUTCOME_LIMIT,
            call_timeout: Duration::from_secs(10),
            batching: Batching::default(),
            prepared_statements: true,
        }
    }
}

impl Config {
    /// With that schema.
    #[must_use]
    pub fn with_schema(self, schema: Schema) -> Self {
        Self { schema, ..self }
    }

    /// With that longest retention; 366 days at most.
    #[must_use]
    pub fn with_max_retention(self, max_retention: Duration) -> Self {
        Self { max_retention: max_retention.min(MAX_RETENTION), ..self }
    }

    /// With that outcome limit.
    #[must_use]
    pub fn with_outcome_limit(self, bytes: usize) -> Self {
        Self { outcome_limit: bytes.min(MAX_OUTCOME_LIMIT), ..self }
    }

    /// With that bound on a call.
    #[must_use]
    pub fn with_call_timeout(self, call_timeout: Duration) -> Self {
        Self { call_timeout, ..self }
    }

    /// With statements that are prepared, or, where connections lead through pgbouncer in transaction mode, are not.
    #[must_use]
    pub fn with_prepared_statements(self, prepared_statements: bool) -> Self {
        Self { prepared_statements, ..self }
    }

    /// With that way of gathering calls.
    #[must_use]
    pub fn with_batching(self, batching: Batching) -> Self {
        Self { batching, ..self }
    }
}

/// How concurrent calls are gathered into one statement.
///
/// A call goes out at once while a connection of the batcher's is idle; those that come while all are busy go out
/// together as soon as one is done. So nobody waits for a timer, and a caller that is alone pays nothing.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Batching {
    /// The most calls in one statement; 1 turns batching off.
    pub calls: usize,
    /// The most bytes of keys and outcomes in one statement; a single call may have more.
    pub bytes: usize,
    /// Statements from the queue that are under way at once, for reserves, and as many for the other calls. As many again
    /// may be sent by callers who found the queue idle: so four times this is the most connections that are used.
    pub statements: usize,
    /// The most calls that wait for their turn; more are refused, with nothing done.
    pub queue: usize,
}

impl Default for Batching {
    /// 512 calls, 4 MiB, 2 statements, 65,536 in the queue.
    fn default() -> Self {
        Self { calls: 512, bytes: 4 * 1024 * 1024, statements: 2, queue: 65_536 }
    }
}

impl Batching {
    /// A statement for each call, at most so many at once.
    #[must_use]
    pub fn off(statements: usize) -> Self {
        Self { calls: 1, statements, ..Self::default() }
    }

    /// With so many calls in one statement at most.
    #[must_use]
    pub fn with_calls(self, calls: usize) -> Self {
        Self { calls, ..self }
    }

    /// With so many bytes in one statement at most.
    #[must_use]
    pub fn with_bytes(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// With so many statements under way at once.
    #[must_use]
    pub fn with_statements(self, statements: usize) -> Self {
        Self { statements, ..self }
    }

    /// With so many calls waiting at most.
    #[must_use]
    pub fn with_queue(self, queue: usize) -> Self {
        Self { queue, ..self }
    }
}

/// The name of a schema: 1 to 40 ASCII letters, digits and underscores, not beginning with a digit.
///
/// It is quoted wherever it is used; it is nonetheless limited to what needs no quotes, so that it can be typed in psql.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schema(String);

impl Schema {
    /// A schema of that name.
    ///
    /// # Errors
    /// [`PostgresError::SchemaName`].
    pub fn new(name: impl Into<String>) -> Result<Self, PostgresError> {
        let name = name.into();
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let first = name.bytes().next().is_some_and(|byte| allowed(byte) && !byte.is_ascii_digit());
        if !first || name.len() > 40 || !name.bytes().all(allowed) {
            return Err(PostgresError::SchemaName);
        }
        Ok(Self(name))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name as SQL has it.
    pub(crate) fn quoted(&self) -> String {
        format!("\"{}\"", self.0)
    }

    /// The number of the advisory lock of this schema: of its name, the same in every process.
    pub(crate) fn lock(&self) -> i64 {
        // FNV-1a, in the number space of bigint locks; a collision with another lock costs waiting, not correctness.
        let hash = self
            .0
            .bytes()
            .chain(*b"/idem")
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        hash.cast_signed()
    }
}

impl Default for Schema {
    fn default() -> Self {
        Self("idem".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_need_quotes_are_refused() {
        for name in ["", "1a", "a\"b", "a b", "a;drop", "a-b", "schéma", &"a".repeat(41)] {
            assert!(Schema::new(name).is_err(), "{name}");
        }
        for name in ["idem", "_x", "A1", &"a".repeat(40)] {
            assert!(Schema::new(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn every_schema_has_a_lock_of_its_own() {
        let lock = |name: &str| Schema::new(name).map(|schema| schema.lock()).ok();
        assert_ne!(lock("idem"), lock("idem2"));
        assert_eq!(lock("idem"), lock("idem"));
    }
}
