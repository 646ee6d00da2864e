//! A server that speaks another language: errors are told apart by their codes, so nothing changes.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

use std::error::Error;
use std::process::{Command, ExitCode};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, Reservation, Reserve, StoreError};
use idem_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use idem_postgres::sqlx::{self, AssertSqlSafe, Connection, PgConnection, PgPool, Row};
use idem_postgres::{Config, PostgresStore};
use idem_testkit::Missing;
use idem_testkit::servers::PostgresServer;
use stores::{block_on, fresh_config, pool_of};

/// As `locale -a` writes it, and in `IDEM_REQUIRE`.
const LOCALE: &str = "de_DE.utf8";

static GERMAN: LazyLock<PostgresServer> = LazyLock::new(|| PostgresServer::start(&[("lc_messages", LOCALE)]).unwrap());

fn missing() -> Option<Missing> {
    if let Err(error) = PostgresServer::find() {
        return Some(Missing { server: "postgres", reason: error.to_string() });
    }
    let output = Command::new("locale").arg("-a").output().ok()?;
    let known = String::from_utf8_lossy(&output.stdout).lines().any(|name| name == LOCALE);
    (!known).then(|| Missing { server: LOCALE, reason: "`locale -a` does not list it".to_owned() })
}

fn main() -> ExitCode {
    let tests: [(&str, fn()); 7] = [
        ("the_server_speaks_german", || block_on(the_server_speaks_german())),
        ("a_missing_schema_is_told", || block_on(a_missing_schema_is_told())),
        ("missing_rights_are_told", || block_on(missing_rights_are_told())),
        ("a_unique_violation_is_no_duplicate", || block_on(a_unique_violation_is_no_duplicate())),
        ("a_lock_timeout_is_retryable", || block_on(a_lock_timeout_is_retryable())),
        ("a_read_only_server_is_told", || block_on(a_read_only_server_is_told())),
        ("a_connection_that_is_shut_down_leaves_the_answer_unknown", || {
            block_on(a_connection_that_is_shut_down_leaves_the_answer_unknown());
        }),
    ];
    idem_testkit::run_tests(missing().as_ref(), &tests)
}

fn request(id: &str) -> Reserve {
    Reserve::new(Key::new("sprache", id).unwrap())
}

async fn opened(options: &[(&str, &str)]) -> (PgPool, Arc<PostgresStore>, Config) {
    let config = fresh_config();
    let owner = pool_of(&GERMAN.url(), &config, 2).await.unwrap();
    PostgresStore::migrate(&owner, &config).await.unwrap();
    // As a process has that may write: the first one notes its longest retention.
    PostgresStore::open(owner.clone(), config.clone()).await.unwrap();
    let connect: PgConnectOptions = GERMAN.url().parse().unwrap();
    let connect = connect.application_name(config.schema.as_str()).options(options.iter().copied());
    let pool = PgPoolOptions::new().max_connections(4).connect_with(connect).await.unwrap();
    let store = PostgresStore::open(pool, config.clone()).await.unwrap();
    (owner, Arc::new(store), config)
}

async fn sql(pool: &PgPool, config: &Config, text: &str) {
    let text = text.replace("{schema}", config.schema.as_str());
    sqlx::raw_sql(AssertSqlSafe(text)).execute(pool).await.unwrap();
}

/// The server's error behind one of the store's: its code, and its German text.
fn told(error: &StoreError) -> (String, String) {
    let source = error.source().unwrap().downcast_ref::<sqlx::Error>().unwrap();
    let database = source.as_database_error().unwrap();
    (database.code().unwrap().into_owned(), database.message().to_owned())
}

/// Wants that error, in those words.
fn expect(error: &StoreError, kind: ErrorKind, class: ErrorClass, code: &str, german: &str) {
    assert_eq!((error.kind(), error.class()), (kind, class), "{error:?}");
    let (found, text) = told(error);
    assert_eq!(found, code, "{text}");
    assert!(text.contains(german), "not the German text of {code}: {text}");
}

async fn the_server_speaks_german() {
    let mut connection = PgConnection::connect(&GERMAN.url()).await.unwrap();
    let row = sqlx::raw_sql("SHOW lc_messages").fetch_one(&mut connection).await.unwrap();
    assert_eq!(row.get::<String, _>(0), LOCALE);
    let error = sqlx::raw_sql("SELECT 1/0").fetch_one(&mut connection).await.unwrap_err();
    assert!(error.to_string().contains("Division durch Null"), "the server has no German messages: {error}");
}

async fn a_missing_schema_is_told() {
    let config = fresh_config();
    let pool = pool_of(&GERMAN.url(), &config, 2).await.unwrap();
    let error = PostgresStore::open(pool.clone(), config).await.unwrap_err();
    assert!(error.to_string().contains("not set up") && error.class() == ErrorClass::Permanent, "{error:?}");

    let (owner, store, config) = opened(&[]).await;
    sql(&owner, &config, "DROP TABLE {schema}.records CASCADE").await;
    let error = store.fetch(&request("a").key).await.unwrap_err();
    expect(&error, ErrorKind::Misconfigured, ErrorClass::Permanent, "42P01", "existiert nicht");
    let error = store.reserve(&request("a")).await.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Permanent), "{error:?}");
}

async fn missing_rights_are_told() {
    let (owner, store, config) = opened(&[("role", "postgres")]).await;
    let role = format!("rolle_{}", config.schema.as_str());
    sql(&owner, &config, &format!("CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {{schema}} TO {role}")).await;
    let connect: PgConnectOptions = GERMAN.url().parse().unwrap();
    let pool = PgPoolOptions::new().connect_with(connect.username(&role)).await.unwrap();
    let error = PostgresStore::open(pool, config.clone()).await.unwrap_err();
    expect(&error, ErrorKind::Misconfigured, ErrorClass::Permanent, "42501", "keine Berechtigung");
    drop(store);
}

/// Not one of the store's: it raises none. One that somebody's index raises is an error, and not taken for a duplicate.
async fn a_unique_violation_is_no_duplicate() {
    let (owner, store, config) = opened(&[]).await;
    sql(&owner, &config, "CREATE UNIQUE INDEX fremd ON {schema}.records (scope, day)").await;
    store.reserve(&request("a")).await.unwrap();
    let error = store.reserve(&request("b")).await.unwrap_err();
    expect(&error, ErrorKind::Other, ErrorClass::Permanent, "23505", "doppelter Schlüsselwert");
    assert!(matches!(store.reserve(&request("a")).await.unwrap(), Reservation::InProgress { .. }));
}

async fn a_lock_timeout_is_retryable() {
    let (owner, store, config) = opened(&[("lock_timeout", "100ms")]).await;
    let mut holder = owner.begin().await.unwrap();
    let lock = format!("LOCK TABLE {}.epoch IN ACCESS EXCLUSIVE MODE", config.schema.as_str());
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut *holder).await.unwrap();
    let error = store.reserve(&request("a")).await.unwrap_err();
    expect(&error, ErrorKind::Conflict, ErrorClass::Retryable, "55P03", "Sperre");
    holder.rollback().await.unwrap();
    assert!(matches!(store.reserve(&request("a")).await.unwrap(), Reservation::Acquired(_)));

    // And so is the change of day.
    let mut writer = owner.begin().await.unwrap();
    store.reserve_in(&mut writer, &request("b")).await.unwrap();
    stores::advance(&owner, &config, Duration::from_secs(24 * 60 * 60)).await.unwrap();
    assert!(store.maintain().await.unwrap().day_delayed);
}

async fn a_read_only_server_is_told() {
    let (_owner, store, _) = opened(&[("default_transaction_read_only", "on")]).await;
    let error = store.reserve(&request("a")).await.unwrap_err();
    expect(&error, ErrorKind::Misconfigured, ErrorClass::Retryable, "25006", "Read-Only-Transaktion");
}

async fn a_connection_that_is_shut_down_leaves_the_answer_unknown() {
    let (owner, store, config) = opened(&[]).await;
    let mut holder = owner.begin().await.unwrap();
    let lock = format!("LOCK TABLE {}.epoch IN ACCESS EXCLUSIVE MODE", config.schema.as_str());
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut *holder).await.unwrap();
    let caller = store.clone();
    let call = tokio::spawn(async move { caller.reserve(&request("a")).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                WHERE application_name = $1 AND wait_event_type = 'Lock'";
    sqlx::query(kill).bind(config.schema.as_str()).execute(&mut *holder).await.unwrap();
    let error = call.await.unwrap().unwrap_err();
    expect(&error, ErrorKind::Unavailable, ErrorClass::Unknown, "57P01", "Anweisung des Administrators");
    holder.rollback().await.unwrap();
    assert!(matches!(store.reserve(&request("a")).await.unwrap(), Reservation::Acquired(_)));
}
