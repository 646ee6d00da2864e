//! Whether the rate depends on what the planner knows of a partition, and on how full it is:
//! `cargo bench -p idem-postgres --bench growth`.
//!
//! Random keys make every index slower as it grows: more levels, fewer pages in the cache, more pages written whole to the
//! log. So beside it stands a plain table of the same growth with the same batches: `INSERT … ON CONFLICT` and `UPDATE` over
//! arrays, without partitions, functions or leases.
//!
//! `IDEM_BENCH_RECORDS` (default 1000000,5000000): how full. `IDEM_BENCH_SECONDS` (default 6): for each figure.
//! `IDEM_BENCH_CALLERS` (default 1024).
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic, reason = "a program for the terminal")]

mod load;

use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_postgres::sqlx::postgres::{PgPool, PgPoolOptions};
use idem_postgres::sqlx::{self, AssertSqlSafe};
use idem_postgres::{Config, PostgresStore, Schema};
use load::{Measured, by_store, is_smoke, measure, setting};

const ROUNDS: u32 = 3;

async fn run(pool: &PgPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap();
}

/// A store whose partitions the server neither vacuums nor analyses by itself.
async fn fresh(pool: &PgPool, schema: &str) -> Arc<PostgresStore> {
    run(pool, &format!("DROP SCHEMA IF EXISTS {schema} CASCADE")).await;
    let config = Config::default().with_schema(Schema::new(schema).unwrap());
    PostgresStore::migrate(pool, &config).await.unwrap();
    run(
        pool,
        &format!(
            "DO $$ DECLARE t regclass; BEGIN FOR t IN SELECT inhrelid::regclass FROM pg_inherits \
             WHERE inhparent = '{schema}.records'::regclass LOOP \
             EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', t); END LOOP; END $$"
        ),
    )
    .await;
    Arc::new(PostgresStore::open(pool.clone(), config).await.unwrap())
}

/// Pairs a second of plain batches on a table, by as many connections as the store uses.
async fn plain_rate(pool: &PgPool, table: &'static str, time: Duration) -> f64 {
    const BATCH: usize = 256;
    let insert = format!(
        "INSERT INTO {table} (id, state, expires_at) SELECT id, 1, now() + interval '1 day' FROM unnest($1::text[]) id \
         ON CONFLICT (id) DO NOTHING"
    );
    let update = format!(
        "UPDATE {table} t SET state = 2, code = 201, body = b.body FROM unnest($1::text[], $2::bytea[]) AS b(id, body) \
         WHERE t.id = b.id AND t.state = 1"
    );
    let begun = Instant::now();
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (pool, insert, update) = (pool.clone(), insert.clone(), update.clone());
            tokio::spawn(async move {
                let mut pairs = 0;
                while begun.elapsed() < time {
                    let mut ids: Vec<String> = (0..BATCH).map(|_| load::id(load::next())).collect();
                    ids.sort_unstable();
                    let bodies = vec![&load::BODY[..]; BATCH];
                    sqlx::query(AssertSqlSafe(insert.clone())).bind(&ids).execute(&pool).await.unwrap();
                    sqlx::query(AssertSqlSafe(update.clone())).bind(&ids).bind(bodies).execute(&pool).await.unwrap();
                    pairs += BATCH;
                }
                pairs
            })
        })
        .collect();
    let mut pairs = 0;
    for task in tasks {
        pairs += task.await.unwrap();
    }
    pairs as f64 / begun.elapsed().as_secs_f64()
}

async fn plain_table(pool: &PgPool, table: &str) {
    run(
        pool,
        &format!(
            "DROP TABLE IF EXISTS {table}; CREATE TABLE {table} (id text COLLATE \"C\" PRIMARY KEY, state int, code int, \
             body bytea, expires_at timestamptz) WITH (fillfactor = 30, autovacuum_enabled = off)"
        ),
    )
    .await;
}

async fn rate(store: &Arc<PostgresStore>, callers: usize, time: Duration) -> Measured {
    let store = store.clone();
    measure(callers, time, move |number| by_store(store.clone(), number)).await
}

#[tokio::main]
async fn main() {
    let (_server, url) = load::server();
    let time = Duration::from_secs(setting("IDEM_BENCH_SECONDS", if is_smoke() { "1" } else { "6" })[0]);
    let sizes: Vec<i64> = setting("IDEM_BENCH_RECORDS", if is_smoke() { "2000" } else { "1000000,5000000" });
    let callers: usize = setting("IDEM_BENCH_CALLERS", "1024")[0];
    let pool = PgPoolOptions::new().max_connections(16).connect(&url).await.unwrap();

    // Turn by turn: one whose statistics say that it is empty, one that is analysed.
    let (unanalysed, analysed) = (fresh(&pool, "unanalysed").await, fresh(&pool, "analysed").await);
    let (mut without, mut with) = (Measured::default(), Measured::default());
    for _ in 0..ROUNDS {
        without.add(rate(&unanalysed, callers, time / ROUNDS).await);
        run(&pool, "ANALYZE analysed.records").await;
        with.add(rate(&analysed, callers, time / ROUNDS).await);
    }
    println!("fresh, unanalysed: {:>8.0} pairs/s", without.rate());
    println!(
        "fresh, analysed:   {:>8.0} pairs/s   unanalysed is {:.2} of it",
        with.rate(),
        without.rate() / with.rate()
    );

    // And beside an empty one, one that fills up.
    let (empty, growing) = (fresh(&pool, "empty").await, fresh(&pool, "growing").await);
    for table in ["plain_empty", "plain_growing"] {
        plain_table(&pool, table).await;
    }
    let mut filled = 0;
    for size in sizes {
        let day = "(SELECT day FROM growing.epoch)";
        load::fill(&pool, "growing", day, filled + 1..=size, "now()").await;
        run(
            &pool,
            &format!(
                "INSERT INTO plain_growing SELECT md5(i::text), 1 FROM generate_series({filled} + 1, {size}) i; \
                 UPDATE plain_growing SET state = 2, code = 201, body = '\\x{}' WHERE state = 1; CHECKPOINT",
                "07".repeat(load::BODY.len())
            ),
        )
        .await;
        filled = size;
        let (mut small, mut large) = (Measured::default(), Measured::default());
        let (mut plain_small, mut plain_large) = (0.0, 0.0);
        // The first round warms up.
        for round in 0..=ROUNDS {
            run(&pool, "TRUNCATE empty.records; TRUNCATE plain_empty").await;
            let turn = time / ROUNDS;
            let (of_empty, of_growing) = (rate(&empty, callers, turn).await, rate(&growing, callers, turn).await);
            let plain = (plain_rate(&pool, "plain_empty", turn).await, plain_rate(&pool, "plain_growing", turn).await);
            if round > 0 {
                small.add(of_empty);
                large.add(of_growing);
                plain_small += plain.0;
                plain_large += plain.1;
            }
        }
        let depths = |schema: &str| {
            format!(
                "SELECT level::bigint FROM {schema}.epoch e, \
                 bt_metap('{schema}.records_' || to_char(e.day, 'YYYYMMDD') || '_pkey')"
            )
        };
        // The index's levels below its root, where the extension is there that tells.
        let depth = match sqlx::raw_sql("CREATE EXTENSION IF NOT EXISTS pageinspect").execute(&pool).await {
            Ok(_) => {
                let level = async |schema| -> i64 {
                    sqlx::query_scalar(AssertSqlSafe(depths(schema))).fetch_one(&pool).await.unwrap()
                };
                format!("; levels of the index: {} and {}", level("empty").await, level("growing").await)
            }
            Err(_) => String::new(),
        };
        println!(
            "from empty: {:>8.0} pairs/s, from {size} records: {:>8.0} pairs/s   {:.2} of it{depth}",
            small.rate(),
            large.rate(),
            large.rate() / small.rate()
        );
        println!("{:>76.2} of it for plain batches", plain_large / plain_small);
    }
}
