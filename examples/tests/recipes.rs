//! The recipes for operations with a key of their own, against a server that is killed meanwhile.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

use std::process::{Command, ExitCode};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_examples::natural_key::{self, Order, PlaceError, Placed};
use idem_examples::versioned_append::{self, AppendError, Appended, Event, VersionConflict};
use idem_postgres::is_unique_violation;
use idem_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use idem_postgres::sqlx::types::Uuid;
use idem_postgres::sqlx::{self, AssertSqlSafe, Connection, PgConnection, PgPool};
use idem_testkit::Missing;
use idem_testkit::servers::PostgresServer;
use tokio::task::JoinSet;

static SERVER: LazyLock<Result<PostgresServer, String>> =
    LazyLock::new(|| PostgresServer::start(&[]).map_err(|error| error.to_string()));

macro_rules! tests {
    ($($name:ident,)+) => {
        fn main() -> ExitCode {
            let missing = SERVER.as_ref().err().map(|reason| Missing { server: "postgres", reason: reason.clone() });
            idem_testkit::run_tests(missing.as_ref(), &[$((stringify!($name), || block_on($name()))),+])
        }
    };
}

tests! {
    of_many_who_place_an_order_one_is_new,
    another_order_under_the_number_is_told_from_the_same,
    an_order_under_way_is_waited_for,
    a_row_that_vanishes_before_the_read_is_placed_anew,
    a_row_that_cannot_be_read_ends_in_an_error,
    a_row_newer_than_the_snapshot_ends_in_an_error,
    another_constraint_is_not_taken_for_the_number,
    the_callers_transaction_goes_on,
    an_order_whose_reply_was_lost_is_placed_once,
    of_many_who_append_at_a_version_one_is_first,
    an_event_that_is_there_is_told_from_another,
    writers_that_read_and_append_lose_no_event,
    an_append_whose_reply_was_lost_is_there_once,
    the_program_runs,
}

fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

async fn run(connection: &mut PgConnection, sql: &str) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.map(drop)
}

/// A pool in a schema of its own, with both tables.
async fn pool_at(server: &PostgresServer, schema: &str) -> PgPool {
    let options: PgConnectOptions = server.url().parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(40).connect_with(options.options([("search_path", schema)]));
    let pool = pool.await.unwrap();
    let mut connection = pool.acquire().await.unwrap();
    run(&mut connection, &format!("CREATE SCHEMA IF NOT EXISTS {schema}")).await.unwrap();
    run(&mut connection, natural_key::TABLE).await.unwrap();
    run(&mut connection, versioned_append::TABLE).await.unwrap();
    drop(connection);
    pool
}

async fn fresh() -> PgPool {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    pool_at(SERVER.as_ref().unwrap(), &format!("recipes_{}", NUMBER.fetch_add(1, Ordering::Relaxed))).await
}

async fn count(pool: &PgPool, table: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(format!("SELECT count(*) FROM {table}"))).fetch_one(pool).await.unwrap()
}

fn order(number: &str, cents: i64) -> Order {
    Order { number: number.to_owned(), customer: "alice".to_owned(), cents }
}

fn event(body: &str) -> Event {
    Event { id: Uuid::from_u128(rand::random()), kind: "deposited".to_owned(), body: body.to_owned() }
}

/// By either form, in a transaction.
async fn place(pool: &PgPool, order: &Order, catching: bool) -> Result<Placed, PlaceError> {
    let mut transaction = pool.begin().await?;
    let placed = match catching {
        true => natural_key::place_catching(&mut transaction, order).await?,
        false => natural_key::place(&mut transaction, order).await?,
    };
    transaction.commit().await?;
    Ok(placed)
}

async fn append(pool: &PgPool, version: i64, event: &Event) -> Result<Appended, AppendError> {
    let mut transaction = pool.begin().await?;
    let appended = versioned_append::append(&mut transaction, "account", version, event).await?;
    transaction.commit().await?;
    Ok(appended)
}

async fn of_many_who_place_an_order_one_is_new() {
    let pool = fresh().await;
    for round in 0..20 {
        let number = format!("order-{round}");
        let mut callers = JoinSet::new();
        for caller in 0..32 {
            let (pool, order) = (pool.clone(), order(&number, 100 + caller % 2));
            // Two orders under one number, by both forms.
            callers.spawn(async move { (order.cents, place(&pool, &order, caller % 3 == 0).await) });
        }
        let answers = callers.join_all().await;
        let new: Vec<_> =
            answers.iter().filter(|(_, answer)| matches!(answer, Ok(Placed { repeated: false, .. }))).collect();
        let [(cents, Ok(Placed { invoice, .. }))] = new[..] else { panic!("{new:?}") };
        for (of, answer) in &answers {
            match answer {
                Ok(placed) => assert_eq!((of, &placed.invoice), (cents, invoice)),
                Err(PlaceError::AnotherOrder) => assert_ne!(of, cents),
                Err(error) => panic!("{error:?}"),
            }
        }
    }
    assert_eq!(count(&pool, "orders").await, 20);
}

async fn another_order_under_the_number_is_told_from_the_same() {
    let pool = fresh().await;
    for catching in [false, true] {
        let order = order(if catching { "a" } else { "b" }, 100);
        let first = place(&pool, &order, catching).await.unwrap();
        assert!(!first.repeated);
        assert_eq!(place(&pool, &order, catching).await.unwrap(), Placed { repeated: true, ..first });
        let others = [Order { cents: 101, ..order.clone() }, Order { customer: "bob".to_owned(), ..order }];
        for other in &others {
            let refused = place(&pool, other, catching).await;
            assert!(matches!(refused, Err(PlaceError::AnotherOrder)), "{refused:?}");
        }
    }
}

async fn an_order_under_way_is_waited_for() {
    let pool = fresh().await;
    for (catching, commit) in [(false, true), (false, false), (true, true), (true, false)] {
        let order = order(&format!("{catching} {commit}"), 100);
        let mut holder = pool.begin().await.unwrap();
        natural_key::place(&mut holder, &order).await.unwrap();
        let waiting = tokio::spawn({
            let (pool, order) = (pool.clone(), order.clone());
            async move { place(&pool, &order, catching).await }
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!waiting.is_finished(), "it did not wait");
        if commit {
            holder.commit().await.unwrap();
        } else {
            holder.rollback().await.unwrap();
        }
        assert_eq!(waiting.await.unwrap().unwrap().repeated, commit);
    }
    assert_eq!(count(&pool, "orders").await, 4);
}

/// A trigger deletes the row that an insert has met, once.
async fn a_row_that_vanishes_before_the_read_is_placed_anew() {
    let pool = fresh().await;
    let mut connection = pool.acquire().await.unwrap();
    let trigger = "CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF current_setting('test.vanish', true) = 'on' THEN
                DELETE FROM orders;
                PERFORM set_config('test.vanish', 'off', false);
            END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER vanish AFTER INSERT ON orders FOR EACH STATEMENT EXECUTE FUNCTION vanish()";
    run(&mut connection, trigger).await.unwrap();
    let order = order("a", 100);
    let first = natural_key::place(&mut connection, &order).await.unwrap();
    run(&mut connection, "SET test.vanish = 'on'").await.unwrap();
    let second = natural_key::place(&mut connection, &order).await.unwrap();
    assert!(!second.repeated && second.invoice != first.invoice, "{second:?}");
    assert_eq!(count(&pool, "orders").await, 1);
}

/// A policy hides what is in the way: rows of another customer, events of another kind.
async fn a_row_that_cannot_be_read_ends_in_an_error() {
    let pool = fresh().await;
    place(&pool, &Order { customer: "bob".to_owned(), ..order("a", 100) }, false).await.unwrap();
    append(&pool, 1, &Event { kind: "hidden".to_owned(), ..event("x") }).await.unwrap();
    let mut connection = pool.acquire().await.unwrap();
    let schema: String = sqlx::query_scalar("SELECT current_schema()::text").fetch_one(&mut *connection).await.unwrap();
    let policies = "CREATE ROLE alice;
        GRANT ALL ON orders, events TO alice;
        ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
        CREATE POLICY own ON orders USING (customer = 'alice');
        ALTER TABLE events ENABLE ROW LEVEL SECURITY;
        CREATE POLICY own ON events USING (kind = 'deposited')";
    run(&mut connection, &format!("{policies}; GRANT USAGE ON SCHEMA {schema} TO alice")).await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    run(&mut transaction, "SET LOCAL ROLE alice").await.unwrap();
    let placed = natural_key::place(&mut transaction, &order("a", 100)).await;
    assert!(matches!(placed, Err(PlaceError::Unsettled)), "{placed:?}");
    let placed = natural_key::place_catching(&mut transaction, &order("a", 100)).await;
    assert!(matches!(placed, Err(PlaceError::Unsettled)), "{placed:?}");
    let appended = versioned_append::append(&mut transaction, "account", 1, &event("y")).await;
    assert!(matches!(appended, Err(AppendError::Gap { .. } | AppendError::Unsettled)), "{appended:?}");
}

async fn a_row_newer_than_the_snapshot_ends_in_an_error() {
    let pool = fresh().await;
    for (version, level) in (1..).zip(["REPEATABLE READ", "SERIALIZABLE"]) {
        let (order, own) = (order(level, 100), event("x"));
        let mut transactions = Vec::new();
        for _ in 0..3 {
            let mut transaction = pool.begin().await.unwrap();
            let sql = format!("SET TRANSACTION ISOLATION LEVEL {level}; SELECT 1 FROM orders, events");
            run(&mut transaction, &sql).await.unwrap();
            transactions.push(transaction);
        }
        place(&pool, &order, false).await.unwrap();
        append(&pool, version, &own).await.unwrap();
        let refused = |error: &sqlx::Error| error.as_database_error().unwrap().code().unwrap() == "40001";
        let placed = natural_key::place(&mut transactions[0], &order).await;
        assert!(matches!(&placed, Err(PlaceError::Database(error)) if refused(error)), "{placed:?}");
        let placed = natural_key::place_catching(&mut transactions[1], &order).await;
        match &placed {
            Err(PlaceError::Unsettled) => {}
            Err(PlaceError::Database(error)) => assert!(refused(error), "{placed:?}"),
            _ => panic!("{placed:?}"),
        }
        let appended = versioned_append::append(&mut transactions[2], "account", version, &own).await;
        assert!(matches!(&appended, Err(AppendError::Database(error)) if refused(error)), "{appended:?}");
    }
}

async fn another_constraint_is_not_taken_for_the_number() {
    let pool = fresh().await;
    let index = "CREATE UNIQUE INDEX one_each ON orders (customer)";
    run(&mut pool.acquire().await.unwrap(), index).await.unwrap();
    place(&pool, &order("a", 100), false).await.unwrap();
    for catching in [false, true] {
        let refused = place(&pool, &order("b", 100), catching).await.unwrap_err();
        assert!(matches!(refused, PlaceError::Database(_)) && is_unique_violation(&refused, "one_each"), "{refused:?}");
    }
    assert_eq!(count(&pool, "orders").await, 1);
}

async fn the_callers_transaction_goes_on() {
    let pool = fresh().await;
    let (first, other) = (order("a", 100), order("a", 200));
    place(&pool, &first, false).await.unwrap();
    append(&pool, 1, &event("first")).await.unwrap();
    let mut transaction = pool.begin().await.unwrap();
    for order in [&first, &other] {
        let placed = natural_key::place(&mut transaction, order).await;
        assert_eq!(placed.is_ok(), order == &first);
        let placed = natural_key::place_catching(&mut transaction, order).await;
        assert_eq!(placed.is_ok(), order == &first);
    }
    for version in [0, 1, 3] {
        versioned_append::append(&mut transaction, "account", version, &event("second")).await.unwrap_err();
    }
    let own = natural_key::place(&mut transaction, &order("own", 1)).await.unwrap();
    assert!(!own.repeated);
    transaction.commit().await.unwrap();
    assert_eq!((count(&pool, "orders").await, count(&pool, "events").await), (2, 1));
}

/// Where the caller's commit is when its reply is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    Before,
    During,
    After,
    /// It is committed, and the connection breaks.
    Connection,
}

const LOSSES: [Loss; 4] = [Loss::Before, Loss::During, Loss::After, Loss::Connection];

/// Ends the transaction so that its caller does not learn how, and has the server up again.
async fn lose(server: &'static PostgresServer, transaction: sqlx::Transaction<'static, sqlx::Postgres>, loss: Loss) {
    let crash = || server.crash().unwrap();
    match loss {
        Loss::Before => {
            crash();
            transaction.commit().await.unwrap_err();
        }
        Loss::During => {
            let crashing = tokio::task::spawn_blocking(crash);
            drop(transaction.commit().await);
            crashing.await.unwrap();
        }
        Loss::After => {
            transaction.commit().await.unwrap();
            crash();
        }
        Loss::Connection => transaction.commit().await.unwrap(),
    }
    if loss != Loss::Connection {
        server.up().unwrap();
    }
}

/// A server of the test's own, to be killed.
fn own_server() -> &'static PostgresServer {
    Box::leak(Box::new(PostgresServer::start(&[]).unwrap()))
}

async fn an_order_whose_reply_was_lost_is_placed_once() {
    let server = own_server();
    for (place_in, loss) in LOSSES.into_iter().flat_map(|loss| [(false, loss), (true, loss)]) {
        let pool = pool_at(server, "lost").await;
        let order = order(&format!("{place_in} {loss:?}"), 100);
        let mut transaction = pool.begin().await.unwrap();
        let first = match place_in {
            true => natural_key::place_catching(&mut transaction, &order).await.unwrap(),
            false => natural_key::place(&mut transaction, &order).await.unwrap(),
        };
        lose(server, transaction, loss).await;
        pool.close().await;

        let pool = pool_at(server, "lost").await;
        let again = place(&pool, &order, place_in).await.unwrap();
        match loss {
            Loss::Before => assert!(!again.repeated),
            Loss::During => assert!(!again.repeated || again.invoice == first.invoice),
            Loss::After | Loss::Connection => assert_eq!(again, Placed { repeated: true, ..first }),
        }
        let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM orders WHERE number = $1")
            .bind(&order.number)
            .fetch_one(&pool)
            .await
            .unwrap();
        assert_eq!(rows, 1, "{loss:?}");
    }
}

async fn of_many_who_append_at_a_version_one_is_first() {
    let pool = fresh().await;
    let mut winners = Vec::new();
    for version in 1..=20 {
        let events: Vec<_> = (0..8).map(|_| event("the same content")).collect();
        let mut callers = JoinSet::new();
        for caller in 0..32 {
            let (pool, event) = (pool.clone(), events[caller % events.len()].clone());
            callers.spawn(async move { (event.id, append(&pool, version, &event).await) });
        }
        let answers = callers.join_all().await;
        let first: Vec<_> = answers.iter().filter(|(_, answer)| matches!(answer, Ok(Appended::Now))).collect();
        let [(winner, _)] = first[..] else { panic!("{first:?}") };
        for (id, answer) in &answers {
            match answer {
                Ok(_) => assert_eq!(id, winner),
                Err(AppendError::Conflict(conflict)) => {
                    assert_ne!(id, winner);
                    assert_eq!(conflict, &VersionConflict { version, taken_by: *winner });
                }
                Err(error) => panic!("{error:?}"),
            }
        }
        winners.push(*winner);
    }
    let ids: Vec<Uuid> = sqlx::query_scalar("SELECT id FROM events ORDER BY version").fetch_all(&pool).await.unwrap();
    assert_eq!(ids, winners);
}

async fn an_event_that_is_there_is_told_from_another() {
    let pool = fresh().await;
    let (first, second) = (event("100"), event("100"));
    assert!(matches!(append(&pool, 2, &first).await, Err(AppendError::Gap { latest: 0, version: 2 })));
    assert!(matches!(append(&pool, 0, &first).await, Err(AppendError::NoVersion(0))));
    assert_eq!(append(&pool, 1, &first).await.unwrap(), Appended::Now);
    assert_eq!(append(&pool, 1, &first).await.unwrap(), Appended::Before);
    // The same content, and not the same event.
    let conflict = append(&pool, 1, &second).await.unwrap_err();
    let AppendError::Conflict(conflict) = conflict else { panic!("{conflict:?}") };
    assert_eq!(conflict, VersionConflict { version: 1, taken_by: first.id });
    assert!(matches!(append(&pool, 3, &second).await, Err(AppendError::Gap { latest: 1, version: 3 })));
    // The same id, and not the same event; the same event, and not the same place.
    let changed = Event { body: "101".to_owned(), ..first.clone() };
    for (version, event) in [(1, &changed), (2, &first)] {
        let used = append(&pool, version, event).await.unwrap_err();
        assert!(matches!(&used, AppendError::IdUsed { aggregate, version: 1 } if aggregate == "account"), "{used:?}");
    }
    assert_eq!(append(&pool, 2, &second).await.unwrap(), Appended::Now);
    assert_eq!(count(&pool, "events").await, 2);
}

/// Each writer appends its own events, at whatever version comes next: all are there once, without a gap.
async fn writers_that_read_and_append_lose_no_event() {
    const WRITERS: usize = 8;
    const EACH: usize = 15;
    let pool = fresh().await;
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        let pool = pool.clone();
        writers.spawn(async move {
            for _ in 0..EACH {
                let event = event("100");
                loop {
                    let latest: i64 = sqlx::query_scalar("SELECT coalesce(max(version), 0) FROM events")
                        .fetch_one(&pool)
                        .await
                        .unwrap();
                    match append(&pool, latest + 1, &event).await {
                        Ok(appended) => break assert_eq!(appended, Appended::Now),
                        Err(AppendError::Conflict(_)) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                }
            }
        });
    }
    writers.join_all().await;
    let versions: Vec<i64> =
        sqlx::query_scalar("SELECT version FROM events ORDER BY version").fetch_all(&pool).await.unwrap();
    assert_eq!(versions, (1..=(WRITERS * EACH) as i64).collect::<Vec<_>>());
}

async fn an_append_whose_reply_was_lost_is_there_once() {
    let server = own_server();
    for (version, loss) in (1..).zip(LOSSES) {
        let pool = pool_at(server, "lost").await;
        let mine = event("mine");
        let mut transaction = pool.begin().await.unwrap();
        versioned_append::append(&mut transaction, "account", version, &mine).await.unwrap();
        lose(server, transaction, loss).await;
        pool.close().await;

        let pool = pool_at(server, "lost").await;
        let again = append(&pool, version, &mine).await.unwrap();
        match loss {
            Loss::Before => assert_eq!(again, Appended::Now),
            Loss::During => {}
            Loss::After | Loss::Connection => assert_eq!(again, Appended::Before),
        }
        assert_eq!(count(&pool, "events").await, version);
        // A rival is told so.
        assert!(matches!(append(&pool, version, &event("other")).await, Err(AppendError::Conflict(_))));
    }
}

async fn the_program_runs() {
    let output = Command::new(env!("CARGO_BIN_EXE_recipes")).arg(SERVER.as_ref().unwrap().url()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    for line in [
        "the same again                     Placed { invoice: 1, repeated: true }",
        "another, the same number           refused: another order has this number",
        "the same, by a caught violation    Placed { invoice: 1, repeated: true }",
        "another event at version 1         refused: version 1 is taken by event ",
        "version 3 before version 2         refused: the latest version is 1, and 3 would leave a gap",
        "version 2                          Now",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}
