//! An operation with a key of its own: an event at a version of its aggregate.
//!
//! A writer that has read an aggregate up to version 6 appends its event at version 7. The unique key
//! `(aggregate, version)` lets one event be there. Which one it is has to be looked at: the writer's own, whose reply was
//! lost, or a rival's. So an event has an **id**, made before it is first sent: two writers may well append events of the
//! same content, and both are meant.

use idem_postgres::sqlx::types::Uuid;
use idem_postgres::sqlx::{self, PgConnection};

/// An event is there once, also when a writer that has lost a reply reads the aggregate anew and goes on behind its own
/// event: hence the second constraint.
pub const TABLE: &str = "CREATE TABLE IF NOT EXISTS events (
    aggregate text NOT NULL,
    version bigint NOT NULL CHECK (version > 0),
    id uuid NOT NULL CONSTRAINT events_id_key UNIQUE,
    kind text NOT NULL,
    body text NOT NULL,
    CONSTRAINT events_aggregate_version_key PRIMARY KEY (aggregate, version)
)";

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Made once per event, and the same with every repeat.
    pub id: Uuid,
    /// Such as `deposited`.
    pub kind: String,
    /// Its content.
    pub body: String,
}

/// The event is there, once, at that version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Appended {
    /// By this call.
    Now,
    /// By an earlier one.
    Before,
}

/// Another event is at that version: read the aggregate, decide anew, append at a later one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("version {version} is taken by event {taken_by}")]
pub struct VersionConflict {
    /// The version wanted.
    pub version: i64,
    /// The event that is there.
    pub taken_by: Uuid,
}

/// Why an event was not appended.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// Another event is there.
    #[error(transparent)]
    Conflict(#[from] VersionConflict),
    /// An event of this id is there, with another content or in another place.
    #[error("an event of this id is at version {version} of {aggregate}")]
    IdUsed {
        /// Where it is.
        aggregate: String,
        /// Where it is.
        version: i64,
    },
    /// The version before is not there.
    #[error("the latest version is {latest}, and {version} would leave a gap")]
    Gap {
        /// The latest version there is; 0 where there is none.
        latest: i64,
        /// The version wanted.
        version: i64,
    },
    /// Versions begin at 1.
    #[error("{0} is no version")]
    NoVersion(i64),
    /// What is in the way of the insert cannot be read, again and again.
    #[error("events come and go, or a row-level policy hides them")]
    Unsettled,
    /// Everything else.
    #[error("the database failed")]
    Database(#[from] sqlx::Error),
}

/// An event that was in the way may be gone at the look, or the one before may have come. Events are not deleted, so this
/// is seldom more than one round.
const ROUNDS: usize = 10;

/// Appends an event at that version, in the caller's transaction or in none. No answer aborts the transaction; a rival that
/// is under way at the same version is waited for, so bound that by `lock_timeout`.
pub async fn append(
    connection: &mut PgConnection,
    aggregate: &str,
    version: i64,
    event: &Event,
) -> Result<Appended, AppendError> {
    if version < 1 {
        return Err(AppendError::NoVersion(version));
    }
    for _ in 0..ROUNDS {
        let inserted = sqlx::query(
            "INSERT INTO events (aggregate, version, id, kind, body) SELECT $1, $2::bigint, $3, $4, $5
             WHERE $2 = 1 OR EXISTS (SELECT FROM events WHERE aggregate = $1 AND version = $2 - 1)
             ON CONFLICT DO NOTHING",
        )
        .bind(aggregate)
        .bind(version)
        .bind(event.id)
        .bind(&event.kind)
        .bind(&event.body)
        .execute(&mut *connection)
        .await?;
        if inserted.rows_affected() == 1 {
            return Ok(Appended::Now);
        }
        // Statements of their own: the insert does not see the row that it has waited for.
        let found: Vec<(String, i64, Uuid, String, String)> = sqlx::query_as(
            "SELECT aggregate, version, id, kind, body FROM events
             WHERE (aggregate = $1 AND version = $2) OR id = $3 ORDER BY id = $3 DESC",
        )
        .bind(aggregate)
        .bind(version)
        .bind(event.id)
        .fetch_all(&mut *connection)
        .await?;
        if let Some((at, at_version, id, kind, body)) = found.into_iter().next() {
            return match id == event.id {
                false => Err(VersionConflict { version, taken_by: id }.into()),
                true if (&*at, at_version, &kind, &body) == (aggregate, version, &event.kind, &event.body) => {
                    Ok(Appended::Before)
                }
                true => Err(AppendError::IdUsed { aggregate: at, version: at_version }),
            };
        }
        let latest: i64 = sqlx::query_scalar("SELECT coalesce(max(version), 0) FROM events WHERE aggregate = $1")
            .bind(aggregate)
            .fetch_one(&mut *connection)
            .await?;
        if latest < version - 1 {
            return Err(AppendError::Gap { latest, version });
        }
    }
    Err(AppendError::Unsettled)
}
