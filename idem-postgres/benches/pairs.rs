//! Pairs (reserve + complete) a second: `cargo bench -p idem-postgres --bench pairs`.
//!
//! Distinct keys, outcomes of 256 bytes, `fsync` and `synchronous_commit` on, client and server on one machine: a private
//! server, or the one of `IDEM_POSTGRES_URL`. Beside the store, in the same run, turn by turn:
//!
//! - *by hand*, through the same pool: what a team would write, one `INSERT … ON CONFLICT` and one `UPDATE` for each
//!   request, on one plain table;
//! - *pingless*: the same on as many connections that are lent without the two pings of sqlx's pool, each of which is a round
//!   trip: the least that two statements cost;
//! - *unprepared*: the store as it works through pgbouncer in transaction mode, without the pooler itself;
//! - *many*: `reserve_many` and `complete_many` of 512 by as many callers as the store has statements: what its functions and
//!   the driver make without the queue;
//! - *pgbench*, where it is installed: the same SQL functions, called by the server's own load generator in batches of 512
//!   that lie ready in a table, so that it has next to nothing to do itself.
//!
//! `IDEM_BENCH_SECONDS` (default 6) is how long each figure is measured, `IDEM_BENCH_CALLERS` (default 1,64,1024) with how
//! many callers.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic, reason = "a program for the terminal")]

mod load;

use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use idem_core::{Key, KeyStore, Outcome, Reservation, Reserve};
use idem_postgres::sqlx::postgres::{PgConnection, PgPool, PgPoolOptions};
use idem_postgres::sqlx::{self, AssertSqlSafe, Connection};
use idem_postgres::{Config, PostgresStore};
use idem_testkit::servers::PostgresServer;
use load::{BODY, Measured, by_store, id, is_smoke, measure, setting};
use tokio::sync::Semaphore;

const ROUNDS: u32 = 6;
const BATCH: u32 = 512;
const CONNECTIONS: u32 = 16;
const INSERT: &str =
    "INSERT INTO by_hand (id, state, expires_at) VALUES ($1, 1, now() + interval '1 day') ON CONFLICT (id) DO NOTHING";
const UPDATE: &str = "UPDATE by_hand SET state = 2, code = 201, body = $2 WHERE id = $1 AND state = 1";

async fn by_hand(pool: PgPool, number: u64) {
    let id = id(number);
    sqlx::query(INSERT).bind(&id).execute(&pool).await.unwrap();
    sqlx::query(UPDATE).bind(&id).bind(&BODY[..]).execute(&pool).await.unwrap();
}

/// Connections that are lent as they are.
struct Pingless {
    idle: Mutex<Vec<PgConnection>>,
    turns: Semaphore,
}

impl Pingless {
    async fn open(url: &str) -> Self {
        let mut idle = Vec::new();
        for _ in 0..CONNECTIONS {
            idle.push(PgConnection::connect(url).await.unwrap());
        }
        Self { idle: Mutex::new(idle), turns: Semaphore::new(CONNECTIONS as usize) }
    }

    async fn pair(&self, number: u64) {
        let id = id(number);
        self.execute(sqlx::query(INSERT).bind(&id)).await;
        self.execute(sqlx::query(UPDATE).bind(&id).bind(&BODY[..])).await;
    }

    async fn execute(&self, query: sqlx::query::Query<'_, sqlx::Postgres, sqlx::postgres::PgArguments>) {
        let _turn = self.turns.acquire().await.unwrap();
        let mut connection = self.idle.lock().unwrap().pop().unwrap();
        assert_eq!(query.execute(&mut connection).await.unwrap().rows_affected(), 1);
        self.idle.lock().unwrap().push(connection);
    }
}

async fn by_pingless(connections: Arc<Pingless>, number: u64) {
    connections.pair(number).await;
}

fn line(callers: usize, name: &str, measured: &mut Measured) {
    println!(
        "{callers:>8} {name:>10} {:>10.0} {:>10.2?} {:>10.2?} {:>10.2?}",
        measured.rate(),
        measured.mean(),
        measured.percentile(0.5),
        measured.percentile(0.99)
    );
}

#[tokio::main]
async fn main() {
    let (_server, url) = load::server();
    let time = Duration::from_secs(setting("IDEM_BENCH_SECONDS", if is_smoke() { "1" } else { "6" })[0]);
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect(&url).await.unwrap();
    sqlx::raw_sql(
        "DROP TABLE IF EXISTS by_hand; \
         CREATE TABLE by_hand (id text PRIMARY KEY, state int, code int, body bytea, expires_at timestamptz)",
    )
    .execute(&pool)
    .await
    .unwrap();
    let config = Config::default();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let unprepared = config.clone().with_prepared_statements(false);
    let unprepared = Arc::new(PostgresStore::open(pool.clone(), unprepared).await.unwrap());
    let store = Arc::new(PostgresStore::open(pool.clone(), config).await.unwrap());
    let pingless = Arc::new(Pingless::open(&url).await);
    println!("{:>8} {:>10} {:>10} {:>10} {:>10} {:>10}", "callers", "", "pairs/s", "mean", "p50", "p99");
    let mut fastest = 0.0_f64;
    for callers in setting("IDEM_BENCH_CALLERS", if is_smoke() { "8" } else { "1,64,1024" }) {
        let [mut hand, mut least, mut idem, mut simple] = [(); 4].map(|()| Measured::default());
        for _ in 0..ROUNDS {
            let by_hand_pool = pool.clone();
            let turn = time / ROUNDS;
            hand.add(measure(callers, turn, move |number| by_hand(by_hand_pool.clone(), number)).await);
            let pingless = pingless.clone();
            least.add(measure(callers, turn, move |number| by_pingless(pingless.clone(), number)).await);
            let store = store.clone();
            idem.add(measure(callers, turn, move |number| by_store(store.clone(), number)).await);
            let store = unprepared.clone();
            simple.add(measure(callers, turn, move |number| by_store(store.clone(), number)).await);
        }
        line(callers, "by hand", &mut hand);
        line(callers, "pingless", &mut least);
        line(callers, "unprepared", &mut simple);
        line(callers, "idem", &mut idem);
        println!(
            "{callers:>8} {:>10} {:>10.2} {:>10.2} {:>10.2} {:>10.2}",
            "ratio",
            idem.rate() / hand.rate(),
            idem.mean().as_secs_f64() / hand.mean().as_secs_f64(),
            idem.percentile(0.5).as_secs_f64() / hand.percentile(0.5).as_secs_f64(),
            idem.percentile(0.99).as_secs_f64() / hand.percentile(0.99).as_secs_f64(),
        );
        println!(
            "{callers:>8} {:>10} {:>10.2} {:>10.2} {:>10.2} {:>10.2}",
            "pingless",
            idem.rate() / least.rate(),
            idem.mean().as_secs_f64() / least.mean().as_secs_f64(),
            idem.percentile(0.5).as_secs_f64() / least.percentile(0.5).as_secs_f64(),
            idem.percentile(0.99).as_secs_f64() / least.percentile(0.99).as_secs_f64(),
        );
        fastest = fastest.max(idem.rate());
    }
    let many = by_many(&store, time).await;
    println!("{:>8} {:>10} {many:>10.0}   idem's best is {:.2} of it", "", "many", fastest / many);
    match by_pgbench(&pool, &url, time).await {
        Ok(rate) => println!("{:>8} {:>10} {rate:>10.0}   idem's best is {:.2} of it", "", "pgbench", fastest / rate),
        Err(reason) => println!("{:>8} {:>10} not measured: {reason}", "", "pgbench"),
    }
}

/// Pairs a second of callers that gather for themselves.
async fn by_many(store: &Arc<PostgresStore>, time: Duration) -> f64 {
    let begun = Instant::now();
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut pairs = 0;
                while begun.elapsed() < time {
                    let requests: Vec<_> =
                        (0..BATCH).map(|_| Reserve::new(Key::new("bench", &id(load::next())).unwrap())).collect();
                    let mut completes = Vec::with_capacity(requests.len());
                    for answer in store.reserve_many(&requests).await {
                        let Reservation::Acquired(lease) = answer.unwrap() else { panic!("not new") };
                        completes.push((lease, Outcome::new(201, &BODY[..])));
                    }
                    for answer in store.complete_many(&completes).await {
                        answer.unwrap();
                        pairs += 1;
                    }
                }
                pairs
            })
        })
        .collect();
    let mut pairs = 0;
    for task in tasks {
        pairs += task.await.unwrap();
    }
    f64::from(pairs) / begun.elapsed().as_secs_f64()
}

/// Pairs a second that pgbench makes with the same functions, by as many connections as the store uses.
async fn by_pgbench(pool: &PgPool, url: &str, time: Duration) -> Result<f64, String> {
    let beside = PostgresServer::find().map_err(|error| error.to_string())?.join("pgbench");
    let program = if beside.is_file() { beside } else { "pgbench".into() };
    let batches = time.as_secs() * 250;
    let tables = format!(
        "DROP TABLE IF EXISTS batches; \
         CREATE UNLOGGED TABLE batches (n int PRIMARY KEY, ids text[], tokens uuid[]); \
         ALTER TABLE batches ALTER ids SET STORAGE EXTERNAL, ALTER tokens SET STORAGE EXTERNAL; \
         INSERT INTO batches SELECT n, array_agg(id ORDER BY id COLLATE \"C\"), array_agg(gen_random_uuid()) \
             FROM (SELECT n, md5(n || '/' || i) AS id FROM generate_series(1, {batches}) n, generate_series(1, {BATCH}) i) ids \
             GROUP BY n; \
         DROP SEQUENCE IF EXISTS batch; CREATE SEQUENCE batch CACHE 10"
    );
    sqlx::raw_sql(AssertSqlSafe(tables)).execute(pool).await.map_err(|error| error.to_string())?;
    let filled = |value: &str| format!("array_fill({value}, ARRAY[{BATCH}])");
    let script = format!(
        "SELECT nextval('batch') AS n \\gset\n\
         SELECT a.acquired FROM batches b, idem.reserve({}, b.ids, b.tokens, {}, {}, {}, {}, '200ms') a WHERE b.n = :n;\n\
         SELECT idem.settle({}, {}, b.ids, b.tokens, {}, {}, {}, {}, {}, {}, '200ms') FROM batches b WHERE b.n = :n;\n",
        filled("'pgbench'::text"),
        filled("NULL::bytea"),
        filled("30000000::bigint"),
        filled("86400000000::bigint"),
        filled("false"),
        filled("'c'::\"char\""),
        filled("'pgbench'::text"),
        filled("86400000000::bigint"),
        filled("201"),
        filled("NULL::smallint"),
        filled("NULL::bytea"),
        filled(&format!("'\\x{}'::bytea", "07".repeat(BODY.len()))),
        filled("NULL::text"),
    );
    let file = std::env::temp_dir().join(format!("idem-pgbench-{}.sql", std::process::id()));
    std::fs::write(&file, script).map_err(|error| error.to_string())?;
    let output = Command::new(program)
        .args(["-n", "-M", "prepared", "-c", "4", "-j", "1", "-T", &time.as_secs().to_string(), "-f"])
        .arg(&file)
        .arg(url)
        .output()
        .map_err(|error| error.to_string())?;
    std::fs::remove_file(&file).map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    let rate = said.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse::<f64>().ok());
    let completed: i64 =
        sqlx::query_scalar("SELECT count(*) FROM idem.records WHERE scope = 'pgbench' AND state = 'completed'")
            .fetch_one(pool)
            .await
            .map_err(|error| error.to_string())?;
    match rate {
        Some(rate) if output.status.success() && completed > 0 => Ok(rate * f64::from(BATCH)),
        _ => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}
