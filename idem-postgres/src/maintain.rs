//! Changing the day, making partitions ahead, and dropping those that are over.

use std::sync::Arc;
use std::time::Duration;

use idem_core::{Operation, StoreError};
use sqlx::{AssertSqlSafe, Connection, Row};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::error::{Stage, store_error};
use crate::schema::failed;
use crate::store::PostgresStore;

/// What one round of maintenance did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Maintained {
    /// Partitions made.
    pub made: u32,
    /// Whether the day was changed.
    pub day_changed: bool,
    /// Whether the day is over and could not be changed yet, since a transaction that has written lasts.
    pub day_delayed: bool,
    /// Partitions dropped.
    pub dropped: u32,
}

/// How long the change of day waits for those who write, and so the longest for which it holds up those who come after.
const PATIENCE: &str = "100ms";

/// How often a maintenance task looks.
const INTERVAL: Duration = Duration::from_secs(60);
/// How soon it looks again after something went wrong or a change of day was delayed.
const SOON: Duration = Duration::from_secs(2);

/// A maintenance task, which ends when this is dropped.
#[derive(Debug)]
#[must_use = "the task ends when this is dropped"]
pub struct Maintenance(JoinHandle<()>);

impl Drop for Maintenance {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl PostgresStore {
    /// Starts a task that does a round of [`maintain`](Self::maintain) every minute or so, and sooner where one could not
    /// be finished. In how many processes it runs does not matter.
    ///
    /// Without maintenance the day does not change: records go on into the last day's partition, correctly, and nothing is
    /// dropped.
    pub fn spawn_maintenance(self: &Arc<Self>) -> Maintenance {
        let store = Arc::downgrade(self);
        Maintenance(tokio::spawn(async move {
            // So that many processes do not look at one moment.
            let jitter = || rand::random_range(0.8..1.2);
            let mut pause = Duration::ZERO;
            loop {
                sleep(pause.mul_f64(jitter())).await;
                let Some(store) = store.upgrade() else { return };
                pause = match store.maintain().await {
                    Ok(done) => {
                        if done != Maintained::default() {
                            debug!(?done, "maintenance of day partitions");
                        }
                        if done.day_delayed { SOON } else { INTERVAL }
                    }
                    Err(error) => {
                        warn!(%error, "maintenance of day partitions failed, to be tried again");
                        SOON
                    }
                };
            }
        }))
    }

    /// One round of maintenance: makes the partitions of today and tomorrow, changes the day when it is over, and drops
    /// the partitions whose records have all expired. Call it every minute or so, in any number of processes: one does
    /// the work, the others return at once. [`spawn_maintenance`](Self::spawn_maintenance) does that.
    ///
    /// Callers hardly notice. The change of day waits at most 100 ms for transactions that have written, and gives up
    /// until the next round where that is not enough: a transaction that the user holds open delays the change of day and
    /// nobody else.
    ///
    /// # Errors
    /// The store's own trouble; the next round goes on.
    ///
    /// # Cancellation
    /// Every step is done or not done; the next round goes on.
    pub async fn maintain(&self) -> Result<Maintained, StoreError> {
        let schema = self.config.schema.quoted();
        let mut connection = self
            .pool
            .acquire()
            .await
            .map_err(|error| store_error(error, Stage::Acquire, Operation::Purge))?
            // Closed at the end: it holds settings and a lock of the session.
            .detach();
        let run = |sql: String| sqlx::raw_sql(AssertSqlSafe(sql));
        let lock = self.config.schema.lock() ^ 2;
        let alone = run(format!("SELECT pg_try_advisory_lock({lock})"))
            .fetch_one(&mut connection)
            .await
            .and_then(|row| row.try_get::<bool, _>(0))
            .map_err(failed)?;
        let mut done = Maintained::default();
        if !alone {
            return Ok(done);
        }
        run(format!("SET lock_timeout = '{PATIENCE}'")).execute(&mut connection).await.map_err(failed)?;
        for ahead in 0..2 {
            let sql = format!("SELECT {schema}.make_partition({schema}.today() + {ahead})");
            let made = run(sql).fetch_one(&mut connection).await.and_then(|row| row.try_get::<bool, _>(0));
            done.made += u32::from(made.map_err(failed)?);
        }
        let micros = self.config.max_retention.as_micros();
        let change = format!("SELECT {schema}.change_day({schema}.today(), {micros} * interval '1 us')");
        match run(change).fetch_one(&mut connection).await.and_then(|row| row.try_get(0)) {
            Ok(changed) => done.day_changed = changed,
            Err(error) if is_lock_timeout(&error) => done.day_delayed = true,
            Err(error) => return Err(failed(error)),
        }
        // Detaching waits for transactions that use the table, and holds up nobody meanwhile.
        run("SET lock_timeout = '5s'".to_owned()).execute(&mut connection).await.map_err(failed)?;
        let over = run(format!(
            "SELECT p.name::text, i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false) \
             FROM {schema}.partitions p \
             LEFT JOIN pg_catalog.pg_class c ON c.relname = p.name AND c.relnamespace = '{schema}'::regnamespace \
             LEFT JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid \
             WHERE p.expires_at < clock_timestamp() + (SELECT e.shift FROM {schema}.epoch e) ORDER BY p.day"
        ))
        .fetch_all(&mut connection)
        .await
        .map_err(failed)?;
        for row in over {
            let name: String = row.try_get(0).map_err(failed)?;
            let (attached, pending): (bool, bool) = (row.try_get(1).map_err(failed)?, row.try_get(2).map_err(failed)?);
            // Looked at rather than trusted: another process may allow longer retentions than the one that closed the day.
            let longest = run(format!("SELECT max(expires_at)::text FROM {schema}.\"{name}\""))
                .fetch_one(&mut connection)
                .await
                .and_then(|row| row.try_get::<Option<String>, _>(0))
                .map_err(failed)?;
            if let Some(longest) = longest {
                let lives = run(format!(
                    "UPDATE {schema}.partitions p SET expires_at = '{longest}' WHERE p.name = '{name}' \
                     AND '{longest}'::timestamptz > clock_timestamp() + (SELECT e.shift FROM {schema}.epoch e)"
                ))
                .execute(&mut connection)
                .await
                .map_err(failed)?;
                if lives.rows_affected() > 0 {
                    continue;
                }
            }
            if attached {
                let how = if pending { "FINALIZE" } else { "CONCURRENTLY" };
                let detach = format!("ALTER TABLE {schema}.records DETACH PARTITION {schema}.\"{name}\" {how}");
                match run(detach).execute(&mut connection).await {
                    Ok(_) => {}
                    // The next round finalizes it.
                    Err(error) if is_lock_timeout(&error) => continue,
                    Err(error) => return Err(failed(error)),
                }
            }
            run(format!(
                "BEGIN; DROP TABLE IF EXISTS {schema}.\"{name}\"; DELETE FROM {schema}.partitions WHERE name = '{name}'; COMMIT"
            ))
            .execute(&mut connection)
            .await
            .map_err(failed)?;
            done.dropped += 1;
        }
        // What is not closed properly ends with the connection all the same.
        drop(connection.close().await);
        Ok(done)
    }
}

/// lock_not_available
fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}
