//! What happens to a store in its life, made to happen in a run: a change of day, a day that is dropped, a purge.

use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_core::{KeyStore, PurgeBudget};
use idem_postgres::PostgresStore;
use idem_postgres::sqlx::{self, AssertSqlSafe};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::sleep_until;

use super::report::Event;
use crate::backends::Opened;
use crate::subject::{Store, Subject};
use crate::{Failed, fdb, id};

/// How long a Postgres may take to change its day or to drop one.
const PATIENCE: Duration = Duration::from_secs(60);

/// How far a store's clock is moved on, so that the old records are of a day that is over.
const AHEAD: Duration = Duration::from_secs(3 * 24 * 60 * 60);

/// How soon the maintenance task looks again. Each try holds callers up for a tenth of a second at most.
const AGAIN: Duration = Duration::from_secs(2);

/// What is going to happen, and to what.
#[derive(Debug)]
pub struct Events {
    postgres: Option<(Arc<PostgresStore>, String)>,
    fdb: Option<fdb::Open>,
    store: Arc<dyn KeyStore>,
    old: u64,
    /// When the last of the old records is over.
    over: Instant,
}

impl Events {
    /// Gives the store so many records that are over, or will be before a third of that time has passed. In Postgres and
    /// FoundationDB they are of a day that is long over; the store's clock is three days ahead from here on.
    ///
    /// # Errors
    /// The server's trouble.
    pub async fn prepare(opened: &Opened, old: u64, time: Duration) -> Result<Self, Failed> {
        let subject = Arc::new(Store::new(opened.store.clone()));
        let has_days = opened.postgres.is_some() || opened.fdb.is_some();
        let life = if has_days { Duration::from_secs(1) } else { time / 3 };
        let tasks: Vec<_> = (0..64)
            .map(|task| {
                let subject = subject.clone();
                let ids: Vec<String> = (task..old).step_by(64).map(id).collect();
                tokio::spawn(async move { subject.make_short(&ids, life).await })
            })
            .collect();
        for task in tasks {
            task.await??;
        }
        let over = Instant::now() + life;
        let postgres = opened.postgres.clone().map(|store| (store, opened.namespace.clone()));
        if let Some((store, schema)) = &postgres {
            // The day of the old records is over, and is not to be dropped yet.
            run(store, &format!("UPDATE {schema}.epoch SET shift = shift + interval '{} seconds'", AHEAD.as_secs()))
                .await?;
            let begun = Instant::now();
            while !store.maintain().await?.day_changed {
                if begun.elapsed() > PATIENCE {
                    return Err("the day does not change".into());
                }
            }
        }
        if let Some(fdb) = &opened.fdb {
            fdb.move_on(AHEAD);
        }
        Ok(Self { postgres, fdb: opened.fdb.clone(), store: opened.store.clone(), old, over })
    }

    /// Lets it happen: the first after a third of that time, the second after two.
    pub(crate) fn start(
        self,
        runtime: &Handle,
        from: Instant,
        time: Duration,
    ) -> JoinHandle<Result<Vec<Event>, Failed>> {
        runtime.spawn(async move {
            let mut events = Vec::new();
            for turn in [1, 2] {
                // Where the server removes what has expired, it does so when it has.
                let expires = self.postgres.is_none() && self.fdb.is_none() && !self.store.capabilities().purges;
                let at = if expires { self.over.max(from) } else { from + time * turn / 3 };
                sleep_until(at.into()).await;
                let begun = Instant::now();
                if let Some(what) = self.happen(turn).await? {
                    let seconds = (begun - from).as_secs_f64();
                    events.push(Event { seconds, lasted: begun.elapsed().as_secs_f64(), what });
                }
            }
            Ok(events)
        })
    }

    async fn happen(&self, turn: u32) -> Result<Option<String>, Failed> {
        if let Some(fdb) = &self.fdb {
            // A new day is made by nobody.
            return if turn == 1 { Ok(None) } else { self.clear_day(fdb).await.map(Some) };
        }
        let Some((store, schema)) = &self.postgres else {
            return match (Store::new(self.store.clone()).purge().await.transpose()?, turn) {
                (Some(removed), _) => Ok(Some(format!("purge of {removed} records"))),
                (None, 1) => Ok(Some(format!("{} records expire, and the server removes them", self.old))),
                (None, _) => Ok(None),
            };
        };
        if turn == 1 {
            // Midnight.
            let shift = "(day + 1)::timestamp AT TIME ZONE 'UTC' - clock_timestamp()";
            run(store, &format!("UPDATE {schema}.epoch SET shift = {shift}")).await?;
        } else {
            let first = format!("day = (SELECT min(day) FROM {schema}.partitions)");
            run(store, &format!("UPDATE {schema}.partitions SET expires_at = '-infinity' WHERE {first}")).await?;
        }
        let begun = Instant::now();
        loop {
            let done = store.maintain().await?;
            if turn == 1 && done.day_changed {
                return Ok(Some("the day changes".to_owned()));
            }
            if turn == 2 && done.dropped > 0 {
                return Ok(Some(format!("a day of {} records is dropped", self.old)));
            }
            if begun.elapsed() > PATIENCE {
                return Err("the day neither changes nor is dropped".into());
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn clear_day(&self, fdb: &fdb::Open) -> Result<String, Failed> {
        let first = fdb.first().await?;
        self.store.purge_expired(PurgeBudget::default()).await?;
        if self.old > 0 && fdb.first().await? == first {
            return Err("the oldest record is still there".into());
        }
        Ok(format!("a day of {} records is cleared", self.old))
    }
}

async fn run(store: &PostgresStore, sql: &str) -> Result<(), Failed> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(store.pool()).await?;
    Ok(())
}
