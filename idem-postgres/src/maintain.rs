//! Changing the day, making partitions ahead, and dropping those that are over.
//!
//! Nothing depends on the server's session, which behind a pooler is another client's a moment later. Who does the
//! maintenance stands in a row, for a while; each step is one message, with the settings that hold for its transaction only.
//! `DETACH … CONCURRENTLY` alone runs in no transaction, and so without settings: see [`Round::detach`].

use std::sync::Arc;
use std::time::Duration;

use idem_core::{Operation, StoreError};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgRow, Postgres};
use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, PgPool, Row};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::error::{Stage, store_error};
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
/// How long a step waits that holds nobody up.
const LONG_PATIENCE: &str = "5s";
/// How long others leave the maintenance to a process that was at it, where that one has said nothing more.
const LEAD: &str = "30 s";
/// Neither the change of day nor a detach is begun while a transaction stands in its way that is older: it would wait for it.
const OLD: &str = "1 s";
/// How long a detach may wait for those that have begun to use the table just before. Shorter than [`LEAD`].
const DETACH: Duration = Duration::from_secs(10);

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
    /// until the next round where that is not enough; it is not tried while one is open that is older than a second. So a
    /// transaction that the user holds open delays the change of day and nobody else. A partition is detached when no
    /// transaction of more than a second uses the table; callers do not wait for that.
    ///
    /// # Errors
    /// The store's own trouble; the next round goes on.
    ///
    /// # Cancellation
    /// Every step is done or not done; the next round goes on, half a minute later at the latest.
    ///
    /// # Cost
    /// One round trip where another process does the work; some six otherwise, and as many for each partition dropped.
    pub async fn maintain(&self) -> Result<Maintained, StoreError> {
        let connection =
            self.pool.acquire().await.map_err(|error| store_error(error, Stage::Acquire, Operation::Purge))?;
        let mut round = Round {
            pool: &self.pool,
            connection: Some(connection),
            schema: self.config.schema.quoted(),
            lock: self.config.schema.lock(),
            // One for each round: two of this process are no better than two of two.
            leader: Uuid::from_bytes(rand::random()),
            done: Maintained::default(),
        };
        let result = match round.lead().await {
            Ok(true) => {
                let result = round.work().await;
                if result.is_err() {
                    // It may be broken.
                    round.connection = None;
                }
                // So that another can go on at once. Where it cannot be said, it will be known in a while.
                drop(round.leave().await);
                result
            }
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        result.map(|()| round.done).map_err(|error| store_error(error, Stage::Execute, Operation::Purge))
    }
}

/// How it stands with the day.
enum Day {
    Lasts,
    /// It is over, and a transaction that has written has lasted for a while.
    IsHeld,
    IsOver,
}

/// One round of maintenance, of the process that does it.
struct Round<'a> {
    pool: &'a PgPool,
    /// `None` after one that was left behind in the middle of a statement.
    connection: Option<PoolConnection<Postgres>>,
    schema: String,
    /// The number of the lock that writers share.
    lock: i64,
    leader: Uuid,
    done: Maintained,
}

impl Round<'_> {
    async fn connection(&mut self) -> Result<&mut PoolConnection<Postgres>, sqlx::Error> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.pool.acquire().await?,
        };
        Ok(self.connection.insert(connection))
    }

    /// Sends statements as one message, which is one transaction, and gives the first row.
    async fn ask(&mut self, sql: String) -> Result<Option<PgRow>, sqlx::Error> {
        sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(&mut **self.connection().await?).await
    }

    /// Whether this process does the maintenance, from now on for a while.
    async fn lead(&mut self) -> Result<bool, sqlx::Error> {
        let sql =
            format!("SET LOCAL lock_timeout = '{PATIENCE}'; SELECT {}.lead('{}', '{LEAD}')", self.schema, self.leader);
        match self.ask(sql).await {
            Ok(row) => row.ok_or(sqlx::Error::RowNotFound)?.try_get(0),
            // Another is in the middle of a step.
            Err(error) if has_code(&error, &[LOCK_TIMEOUT]) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn leave(&mut self) -> Result<(), sqlx::Error> {
        let (schema, leader) = (&self.schema, self.leader);
        let sql = format!("UPDATE {schema}.maintenance SET until = '-infinity' WHERE leader = '{leader}'");
        self.ask(sql).await.map(drop)
    }

    /// A step that a function takes, while this process does the maintenance: `None` where it does no more.
    async fn step(&mut self, patience: &str, call: &str) -> Result<Option<bool>, sqlx::Error> {
        let (schema, leader) = (&self.schema, self.leader);
        let sql = format!(
            "SET LOCAL lock_timeout = '{patience}'; \
             SELECT {schema}.{call} WHERE {schema}.lead('{leader}', '{LEAD}')"
        );
        self.ask(sql).await?.map(|row| row.try_get(0)).transpose()
    }

    async fn work(&mut self) -> Result<(), sqlx::Error> {
        let schema = self.schema.clone();
        for ahead in 0..2 {
            let make = format!("make_partition({schema}.today() + {ahead})");
            let Some(made) = self.step(LONG_PATIENCE, &make).await? else { return Ok(()) };
            self.done.made += u32::from(made);
        }
        match self.day().await? {
            Day::Lasts => {}
            Day::IsHeld => self.done.day_delayed = true,
            Day::IsOver => match self.step(PATIENCE, &format!("change_day({schema}.today())")).await {
                Ok(Some(changed)) => self.done.day_changed = changed,
                Ok(None) => return Ok(()),
                Err(error) if has_code(&error, &[LOCK_TIMEOUT]) => self.done.day_delayed = true,
                Err(error) => return Err(error),
            },
        }
        for name in self.expired().await? {
            if !self.lead().await? {
                return Ok(());
            }
            if self.detach(&name).await? {
                let dropped = self.step(LONG_PATIENCE, &format!("drop_partition('{name}')")).await;
                match dropped {
                    Ok(dropped) => self.done.dropped += u32::from(dropped == Some(true)),
                    // Somebody reads it by its name.
                    Err(error) if has_code(&error, &[LOCK_TIMEOUT]) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Whether the day can be changed. The change waits for those who have written, and all who come after wait for it: so
    /// it is not tried while there is one that it would wait for in vain.
    async fn day(&mut self) -> Result<Day, sqlx::Error> {
        let (schema, lock) = (&self.schema, self.lock.cast_unsigned());
        let held = held_for_long(&format!(
            "l.locktype = 'advisory' AND l.classid = {} AND l.objid = {} AND l.objsubid = 1",
            lock >> 32,
            lock & u64::from(u32::MAX),
        ));
        let sql = format!("SELECT e.day < {schema}.today(), {held} FROM {schema}.epoch e");
        let row = self.ask(sql).await?.ok_or(sqlx::Error::RowNotFound)?;
        Ok(match (row.try_get(0)?, row.try_get(1)?) {
            (false, _) => Day::Lasts,
            (true, true) => Day::IsHeld,
            (true, false) => Day::IsOver,
        })
    }

    /// The partitions whose records have all expired, the oldest first.
    async fn expired(&mut self) -> Result<Vec<String>, sqlx::Error> {
        let schema = self.schema.clone();
        let now = format!("clock_timestamp() + (SELECT e.shift FROM {schema}.epoch e)");
        let closed =
            format!("SELECT p.name::text FROM {schema}.partitions p WHERE p.expires_at < {now} ORDER BY p.day");
        let rows = sqlx::raw_sql(AssertSqlSafe(closed)).fetch_all(&mut **self.connection().await?).await?;
        rows.iter().map(|row| row.try_get(0)).collect()
    }

    /// Detaches a partition, and tells whether it is detached.
    ///
    /// It first becomes *pending*: new queries do not see it any more. The server then waits for every transaction that
    /// uses the table, holding up nobody, and finishes. If that is interrupted, it stays pending, and is finished by a
    /// later round. Two processes at it at once end in an error for one of them, and one detached partition.
    ///
    /// The first part runs in no transaction, so no setting can limit the wait. So it is not begun while an older
    /// transaction uses the table; and where it waits for too long all the same, it is cancelled.
    async fn detach(&mut self, name: &str) -> Result<bool, sqlx::Error> {
        let schema = self.schema.clone();
        let state = format!(
            "SELECT i.inhdetachpending FROM pg_catalog.pg_inherits i \
             JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid \
             WHERE c.relname = '{name}' AND c.relnamespace = '{schema}'::regnamespace"
        );
        let Some(row) = self.ask(state).await? else { return Ok(true) };
        let detach = format!("ALTER TABLE {schema}.records DETACH PARTITION {schema}.\"{name}\"");
        let done = if row.try_get(0)? {
            self.ask(format!("SET LOCAL lock_timeout = '{LONG_PATIENCE}'; {detach} FINALIZE")).await.map(|_| true)
        } else if self.in_use().await? {
            Ok(false)
        } else {
            self.detach_concurrently(format!("{detach} CONCURRENTLY")).await
        };
        match done {
            // Others are at it, or use it.
            Err(error) if has_code(&error, LEFT_TO_A_LATER_ROUND) => Ok(false),
            done => done,
        }
    }

    /// Whether a transaction uses the table that has lasted for a while, or one that was prepared for a two-phase commit.
    async fn in_use(&mut self) -> Result<bool, sqlx::Error> {
        let of_the_table = format!("l.locktype = 'relation' AND l.relation = '{}.records'::regclass", self.schema);
        let sql = format!("SELECT {}", held_for_long(&of_the_table));
        self.ask(sql).await?.ok_or(sqlx::Error::RowNotFound)?.try_get(0)
    }

    async fn detach_concurrently(&mut self, sql: String) -> Result<bool, sqlx::Error> {
        let detach = sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(&mut **self.connection().await?);
        let Ok(done) = timeout(DETACH, detach).await else {
            // Not to be used by others: it waits still.
            drop(self.connection.take().map(PoolConnection::detach));
            // Whichever session it was given. What is waited for holds nobody up, but takes a connection of the pooler's.
            let cancel = format!(
                "SELECT count(pg_cancel_backend(a.pid)) FROM pg_catalog.pg_stat_activity a \
                 WHERE a.query = $sql${sql}$sql$ AND a.state = 'active' AND a.datname = current_database() \
                 AND a.usename = current_user"
            );
            self.ask(cancel).await?;
            return Ok(false);
        };
        done.map(|_| true)
    }
}

/// Whether a transaction that is older than [`OLD`], or was prepared for a two-phase commit, holds such a lock.
fn held_for_long(lock: &str) -> String {
    format!(
        "EXISTS (SELECT FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid \
         WHERE {lock} AND l.granted \
         AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database()) \
         AND (l.pid IS NULL OR a.xact_start < clock_timestamp() - interval '{OLD}'))"
    )
}

/// lock_not_available
const LOCK_TIMEOUT: &str = "55P03";
/// undefined_table
const UNDEFINED_TABLE: &str = "42P01";
/// And object_not_in_prerequisite_state, deadlock_detected, query_canceled: another is detaching the partition or has just
/// done so, or it is in use.
const LEFT_TO_A_LATER_ROUND: &[&str] = &[LOCK_TIMEOUT, UNDEFINED_TABLE, "55000", "40P01", "57014"];

fn has_code(error: &sqlx::Error, codes: &[&str]) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| codes.contains(&&*code))
}
