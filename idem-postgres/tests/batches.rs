//! What goes out together, and what does not.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    batches_are_bounded_in_calls_and_in_bytes,
    a_key_that_a_transaction_holds_holds_up_nobody_else,
    calls_that_wait_for_a_transaction_give_up_in_time,
    plans_made_while_there_was_nothing_read_no_more_than_is_asked_for,
}

use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, Lease, Outcome, Reservation, Reserve};
use idem_postgres::sqlx::{self, AssertSqlSafe, PgPool};
use idem_postgres::{Batching, Config, PostgresStore};
use stores::{fresh_config, pool};
use tokio::task::JoinSet;

async fn opened(config: &Config) -> (PgPool, Arc<PostgresStore>) {
    let pool = pool(config, 12).await.unwrap();
    PostgresStore::migrate(&pool, config).await.unwrap();
    (pool.clone(), Arc::new(PostgresStore::open(pool, config.clone()).await.unwrap()))
}

fn request(id: &str) -> Reserve {
    Reserve::new(Key::new("batches", id).unwrap())
}

async fn acquire(store: &PostgresStore, id: &str) -> Lease {
    match store.reserve(&request(id)).await.unwrap() {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

/// Rows of one statement have one xmin.
async fn batches_are_bounded_in_calls_and_in_bytes() {
    let largest = async |batching: Batching| {
        let config = fresh_config().with_batching(batching);
        let (pool, store) = opened(&config).await;
        let mut callers = JoinSet::new();
        for caller in 0..200 {
            let store = store.clone();
            callers.spawn(async move {
                for at in 0..5 {
                    let lease = acquire(&store, &format!("{caller}-{at}")).await;
                    store.complete(&lease, &Outcome::new(200, vec![7; 1_000])).await.unwrap();
                }
            });
        }
        callers.join_all().await;
        let by_statement = format!(
            "SELECT max(calls), max(bytes) FILTER (WHERE calls > 1) FROM (SELECT count(*) AS calls, sum(length(body)) AS bytes \
             FROM \"{}\".records WHERE state = 'completed' GROUP BY xmin::text) statements",
            config.schema.as_str()
        );
        let (calls, bytes): (i64, Option<i64>) =
            sqlx::query_as(AssertSqlSafe(by_statement)).fetch_one(&pool).await.unwrap();
        (calls, bytes.unwrap_or_default())
    };
    let (calls, bytes) = largest(Batching::default()).await;
    assert!(calls > 16 && bytes > 16_000, "{calls} calls, {bytes} bytes: nothing is gathered");
    let (calls, _) = largest(Batching::default().with_calls(8)).await;
    assert!((2..=8).contains(&calls), "{calls} calls");
    let (_, bytes) = largest(Batching::default().with_bytes(8_000)).await;
    assert!((2_000..=8_000).contains(&bytes), "{bytes} bytes");
    let (calls, _) = largest(Batching::off(4)).await;
    assert_eq!(calls, 1);
}

/// One reserves in a transaction of its own and takes its time, one has completed in such a transaction.
async fn a_key_that_a_transaction_holds_holds_up_nobody_else() {
    let (pool, store) = opened(&fresh_config()).await;
    let completed = acquire(&store, "completed").await;
    let mut transaction = pool.begin().await.unwrap();
    store.reserve_in(&mut transaction, &request("held")).await.unwrap();
    store.complete_in(&mut transaction, &completed, &Outcome::new(201, "in the transaction")).await.unwrap();

    let mut waiting = JoinSet::new();
    let mut others = JoinSet::new();
    let begun = Instant::now();
    for at in 0..1_000 {
        let store = store.clone();
        if at % 100 == 50 {
            let id = if at % 200 == 50 { "held" } else { "completed" };
            waiting.spawn(async move { store.reserve(&request(id)).await.unwrap() });
        } else {
            others.spawn(async move {
                let lease = acquire(&store, &at.to_string()).await;
                store.complete(&lease, &Outcome::new(200, "")).await.unwrap();
                begun.elapsed()
            });
        }
    }
    let slowest = others.join_all().await.into_iter().max().unwrap();
    assert!(slowest < Duration::from_secs(5), "the others took {slowest:?}");
    // And those who come later are not held up at all, while the ten wait.
    let begun = Instant::now();
    for at in 0..20 {
        let mut burst = JoinSet::new();
        for caller in 0..20 {
            let store = store.clone();
            burst.spawn(async move { acquire(&store, &format!("later-{at}-{caller}")).await });
        }
        burst.join_all().await;
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "those who came later took {:?}", begun.elapsed());
    assert!(waiting.try_join_next().is_none(), "somebody did not wait");

    transaction.commit().await.unwrap();
    let mut replays = 0;
    for answer in waiting.join_all().await {
        match answer {
            Reservation::Completed(record) => {
                assert_eq!(record.outcome(), Some(&Outcome::new(201, "in the transaction")));
                replays += 1;
            }
            Reservation::InProgress { attempt: 1, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(replays, 5);
}

async fn calls_that_wait_for_a_transaction_give_up_in_time() {
    let config = fresh_config().with_call_timeout(Duration::from_millis(2_500));
    let (pool, store) = opened(&config).await;
    let mut transaction = pool.begin().await.unwrap();
    store.reserve_in(&mut transaction, &request("held")).await.unwrap();
    let mut waiting = JoinSet::new();
    for _ in 0..20 {
        let store = store.clone();
        waiting.spawn(async move {
            let begun = Instant::now();
            let error = store.reserve(&request("held")).await.unwrap_err();
            (error, begun.elapsed())
        });
    }
    for (error, took) in waiting.join_all().await {
        // It is certain that nothing has happened.
        assert_eq!((error.kind(), error.class()), (ErrorKind::Conflict, ErrorClass::Retryable), "{error}");
        assert!(took < Duration::from_secs(4), "after {took:?}");
    }
    transaction.rollback().await.unwrap();
    assert_eq!(acquire(&store, "held").await.attempt, 1);
}

/// A vacuum tells the planner that a table is empty, and a statement's plan stays: reading all of a table that has grown since
/// would make a batch slower with every record.
async fn plans_made_while_there_was_nothing_read_no_more_than_is_asked_for() {
    const RECORDS: usize = 5_000;
    const BATCH: usize = 50;
    let config = fresh_config();
    let schema = config.schema.as_str().to_owned();
    // One session, which keeps its plans, and tells what it has read when it ends.
    let pool = pool(&config, 1).await.unwrap();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("VACUUM ANALYZE \"{schema}\".records"))).execute(&pool).await.unwrap();
    let store = PostgresStore::open(pool.clone(), config.clone()).await.unwrap();
    let requests: Vec<Reserve> = (0..RECORDS).map(|at| request(&format!("{at:05}"))).collect();
    let run = async |requests: &[Reserve]| {
        let answers = store.reserve_many(requests).await;
        let acquired = |answer| match answer {
            Ok(Reservation::Acquired(lease)) => (lease, Outcome::new(200, "done")),
            other => panic!("{other:?}"),
        };
        let calls: Vec<_> = answers.into_iter().map(acquired).collect();
        store.complete_many(&calls).await.into_iter().for_each(Result::unwrap);
    };
    let replay = async |requests: &[Reserve]| {
        for answer in store.reserve_many(requests).await {
            assert!(matches!(answer, Ok(Reservation::Completed(_))), "{answer:?}");
        }
    };
    run(&requests[..2]).await;
    replay(&requests[..2]).await;
    run(&requests[2..]).await;
    for batch in requests.chunks(BATCH) {
        replay(batch).await;
    }
    // The next day's looks for new keys among these.
    let change_day = format!("SELECT \"{schema}\".change_day(\"{schema}\".today() + 1)");
    sqlx::raw_sql(AssertSqlSafe(change_day)).execute(&pool).await.unwrap();
    let later: Vec<Reserve> = (0..RECORDS).map(|at| request(&format!("later-{at}"))).collect();
    for batch in later.chunks(BATCH) {
        run(batch).await;
    }
    drop(store);
    pool.close().await;
    let pool = stores::pool(&config, 1).await.unwrap();
    let read = format!(
        "SELECT coalesce(sum(idx_tup_read), 0)::bigint FROM pg_stat_user_indexes WHERE schemaname = '{schema}'"
    );
    let read: i64 = sqlx::query_scalar(AssertSqlSafe(read)).fetch_one(&pool).await.unwrap();
    let calls = i64::try_from(5 * RECORDS).unwrap();
    assert!((calls / 5..=2 * calls).contains(&read), "{calls} calls have read {read} index entries");
}
