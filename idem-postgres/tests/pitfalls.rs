//! Faults that others have shipped, and where each would be noticed here. The cases of the kit (`r…`) run on Postgres in
//! `conformance`, `unbatched` and `pgbouncer`.
//!
//! | a fault | is noticed by |
//! |---|---|
//! | 2: the reply is lost, and the repeat meets its own row as a rival | `r04_a_repeated_reserve_meets_itself_and_no_rival`, and with real crashes `crashes` |
//! | 4: a duplicate surfaces as an error | `r02_…`, `transactions::no_answer_aborts_the_transaction` |
//! | 6: the row goes between the conflict and the read | `a_record_that_goes_meanwhile_is_no_lease_for_two` here |
//! | 10: the lease in one unit, compared in another | `r05_a_key_is_refused_until_the_lease_ends`, `r05_a_key_can_be_taken_over_once_the_lease_is_over` |
//! | 11: a remaining time of zero read as none | `r05_retry_after_is_what_is_left_of_the_lease` |
//! | 12: a crash blocks the key for the retention | `r09_a_crash_blocks_a_key_for_its_lease_and_not_for_its_retention` |
//! | 13, 14: a late call of an attempt that is over | `r06_…`; tokens, not owners: `r06_a_batch_goes_by_its_keys_and_not_by_its_tokens` |
//! | 15: a late renewal takes the lease back | `r06_renew_after_a_takeover_does_not_take_the_key_back` |
//! | 16: the renewal dies of its first error | `a_lease_is_kept_through_the_loss_of_every_connection` here |
//! | 17: deadlines of one clock judged by another | `r10_deadlines_follow_the_stores_clock` |
//! | 18: a late release expires at once | `r09_a_late_fail_counts_its_retention_from_then` |
//! | 26: bodies as text | `r07_bodies_come_back_bit_for_bit` |
//! | 45: unique per partition only | `days::no_key_is_held_twice_while_the_day_changes` |
//! | 46: retention by DELETE | `days::a_day_that_is_over_is_dropped_and_nothing_before` |
//! | 47: duplicates told by English text | `languages` |
//! | 48: a unique violation aborts the caller's transaction | `transactions::no_answer_aborts_the_transaction` |
//! | 49: a lock held while the handler runs | `no_lock_is_held_while_a_lease_is` here |
//! | 50: a connection for each waiter | `waiters_take_no_connections` here |
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    a_record_that_goes_meanwhile_is_no_lease_for_two,
    a_lease_is_kept_through_the_loss_of_every_connection,
    no_lock_is_held_while_a_lease_is,
    waiters_take_no_connections,
}

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_core::executor::{Executor, Waiting};
use idem_core::{Key, KeyStore, Reservation, Reserve};
use idem_postgres::sqlx::{self, AssertSqlSafe, PgPool};
use idem_postgres::{Config, PostgresStore};
use stores::{fresh_config, pool};
use tokio::task::JoinSet;
use tokio::time::sleep;

async fn opened(config: &Config) -> (PgPool, Arc<PostgresStore>) {
    let pool = pool(config, 8).await.unwrap();
    PostgresStore::migrate(&pool, config).await.unwrap();
    (pool.clone(), Arc::new(PostgresStore::open(pool, config.clone()).await.unwrap()))
}

async fn number(sql: &str, pool: &PgPool) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(pool).await.unwrap()
}

/// Somebody deletes rows all the time, as a purge of another kind would, while many callers reserve: whoever has acquired
/// finds its own record, or none, and nobody is told that it holds what another holds.
async fn a_record_that_goes_meanwhile_is_no_lease_for_two() {
    let config = fresh_config();
    let (pool, store) = opened(&config).await;
    let schema = config.schema.as_str();
    let over = Arc::new(AtomicU32::new(0));
    let deleter = {
        let (pool, over) = (pool.clone(), over.clone());
        let sql = format!("WITH gone AS (DELETE FROM \"{schema}\".records RETURNING token) SELECT count(*) FROM gone");
        tokio::spawn(async move {
            let mut deleted = 0;
            while over.load(Ordering::Relaxed) == 0 {
                deleted += number(&sql, &pool).await;
                sleep(Duration::from_millis(1)).await;
            }
            deleted + number(&sql, &pool).await
        })
    };
    let mut callers = JoinSet::new();
    for _ in 0..16 {
        let store = store.clone();
        callers.spawn(async move {
            let mut acquired = 0;
            for at in 0..150 {
                let request = Reserve::new(Key::new("goes", &(at % 3).to_string()).unwrap());
                match store.reserve(&request).await.unwrap() {
                    Reservation::Acquired(lease) => {
                        assert_eq!((lease.token, lease.attempt), (request.token, 1));
                        acquired += 1;
                    }
                    Reservation::InProgress { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
            acquired
        });
    }
    let acquired: i64 = callers.join_all().await.into_iter().sum();
    over.store(1, Ordering::Relaxed);
    // Every lease that was given out had a row of its own, which was deleted once.
    assert_eq!(deleter.await.unwrap(), acquired);
    assert!(acquired > 10, "only {acquired}");
}

/// Every connection is killed again and again while an operation runs for three times its lease.
async fn a_lease_is_kept_through_the_loss_of_every_connection() {
    let config = fresh_config();
    let (pool, store) = opened(&config).await;
    let others = stores::pool(&fresh_config(), 1).await.unwrap();
    let kill = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{}'",
        config.schema.as_str()
    );
    let lease = Duration::from_millis(1_500);
    let executor = Executor::builder(store.clone()).lease(lease).build().unwrap();
    let key = Key::new("kept", "a").unwrap();
    let run = executor.run(&key, None, move |attempt| async move {
        let mut kills = 0;
        for _ in 0..9 {
            sleep(lease / 3).await;
            kills += number(&kill, &others).await;
            assert!(!attempt.is_lease_lost(), "after {kills} kills");
        }
        Ok::<_, Infallible>(kills)
    });
    let rival = async {
        let mut taken = 0;
        for _ in 0..40 {
            sleep(lease / 13).await;
            if let Ok(Reservation::Acquired(_)) = store.reserve(&Reserve::new(key.clone())).await {
                taken += 1;
            }
        }
        taken
    };
    let (done, taken) = tokio::join!(run, rival);
    assert!(done.unwrap().value > 5, "hardly a connection was killed");
    assert_eq!(taken, 0, "the lease was taken over while its operation ran");
    drop(pool);
}

async fn no_lock_is_held_while_a_lease_is() {
    let config = fresh_config();
    let (pool, store) = opened(&config).await;
    let Reservation::Acquired(lease) = store.reserve(&Reserve::new(Key::new("locks", "a").unwrap())).await.unwrap()
    else {
        panic!()
    };
    let schema = config.schema.as_str();
    let locked = format!("SELECT id FROM \"{schema}\".records FOR UPDATE NOWAIT");
    sqlx::query(AssertSqlSafe(locked)).fetch_one(&pool).await.unwrap();
    let locks = format!(
        "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) \
         WHERE a.application_name = '{schema}' AND a.pid <> pg_backend_pid()"
    );
    assert_eq!(number(&locks, &pool).await, 0);
    let idle = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{schema}' AND state LIKE 'idle in transaction%'"
    );
    assert_eq!(number(&idle, &pool).await, 0);
    store.renew(&lease, Duration::from_secs(60)).await.unwrap();
}

/// Hundreds wait for one key, in processes of their own as it were: none needs a connection while it waits.
async fn waiters_take_no_connections() {
    let config = fresh_config();
    let (pool, store) = opened(&config).await;
    let key = Key::new("waiters", "a").unwrap();
    let holder = Executor::builder(store.clone()).build().unwrap();
    let (started, has_started) = tokio::sync::oneshot::channel();
    let running = {
        let key = key.clone();
        tokio::spawn(async move {
            let operation = |_| async move {
                started.send(()).unwrap();
                sleep(Duration::from_secs(2)).await;
                Ok::<_, Infallible>(7)
            };
            holder.run(&key, None, operation).await.unwrap()
        })
    };
    has_started.await.unwrap();
    let mut waiters = JoinSet::new();
    for _ in 0..300 {
        let waiter = Executor::builder(store.clone()).waiting(Waiting::UpTo(Duration::from_secs(20))).build().unwrap();
        let key = key.clone();
        waiters.spawn(async move { waiter.run(&key, None, |_| async { Ok::<_, Infallible>(0) }).await.unwrap() });
    }
    sleep(Duration::from_secs(1)).await;
    // Others get a connection at once, though the pool has eight.
    tokio::time::timeout(Duration::from_millis(500), sqlx::query("SELECT 1").execute(&pool)).await.unwrap().unwrap();
    assert_eq!(running.await.unwrap().value, 7);
    for done in waiters.join_all().await {
        assert!(done.value == 7 && done.replayed);
    }
    assert!(pool.size() <= 8);
}
