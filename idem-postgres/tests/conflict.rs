//! What is a unique violation of a named constraint, and what only looks like one.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    the_named_constraint_is_told_from_everything_else,
    it_is_seen_through_what_wraps_it,
    constraints_of_one_name_are_told_apart_by_table_and_schema,
    a_partition_reports_its_own_index,
    a_deferred_constraint_is_reported_by_the_commit,
    a_long_name_arrives_cut,
}

use std::error::Error;
use std::io;
use std::sync::Arc;

use idem_core::{ErrorKind, Operation, StoreError};
use idem_postgres::sqlx::{self, AssertSqlSafe, Connection, PgConnection};
use idem_postgres::{UniqueViolation, is_unique_violation};
use stores::{SERVER, fresh_config};

/// A connection with a schema of its own.
async fn connection() -> (PgConnection, String) {
    let schema = fresh_config().schema.as_str().to_owned();
    let mut connection = PgConnection::connect(&SERVER.url()).await.unwrap();
    run(&mut connection, &format!("CREATE SCHEMA {schema}; SET search_path = {schema}")).await.unwrap();
    (connection, schema)
}

async fn run(connection: &mut PgConnection, sql: &str) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.map(drop)
}

const ORDERS: &str = "CREATE TABLE customers (name text PRIMARY KEY);
    INSERT INTO customers VALUES ('alice');
    CREATE TABLE orders (
        number text CONSTRAINT orders_number_key UNIQUE,
        invoice text,
        customer text REFERENCES customers,
        cents int CHECK (cents > 0),
        span int4range,
        EXCLUDE USING gist (span WITH &&)
    );
    CREATE UNIQUE INDEX orders_by_invoice ON orders (invoice);
    INSERT INTO orders VALUES ('o1', 'i1', 'alice', 1, '[1,2]')";

async fn the_named_constraint_is_told_from_everything_else() {
    let (mut connection, schema) = connection().await;
    run(&mut connection, ORDERS).await.unwrap();
    for (values, code, constraint) in [
        ("'o1', 'i2', 'alice', 1", "23505", Some("orders_number_key")),
        ("'o2', 'i1', 'alice', 1", "23505", Some("orders_by_invoice")),
        ("'o2', 'i2', 'nobody', 1", "23503", None),
        ("'o2', 'i2', 'alice', 0", "23514", None),
        ("'o2', 'i2', 'alice', 1, '[2,3]'", "23P01", None),
        ("'o2', 'i2', 'alice', 99999999999", "22003", None),
    ] {
        let error = run(&mut connection, &format!("INSERT INTO orders VALUES ({values})")).await.unwrap_err();
        assert_eq!(error.as_database_error().unwrap().code().unwrap(), code, "{error}");
        let found = UniqueViolation::find(&error);
        assert_eq!(found.and_then(|found| found.constraint()), constraint, "{error}");
        for name in ["orders_number_key", "orders_by_invoice", "orders_customer_fkey", "orders_cents_check", ""] {
            assert_eq!(is_unique_violation(&error, name), constraint == Some(name), "{name}: {error}");
        }
        if let Some(found) = found {
            assert_eq!((found.schema(), found.table()), (Some(&*schema), Some("orders")));
            assert!(!format!("{found:?}").contains("o1"), "{found:?}");
        }
    }
    // Pitfall 47: a text that says so, another language, a code without a name, a serialization failure with one.
    for (raise, (of_some, of_this)) in [
        ("'duplicate key value violates unique constraint \"orders_number_key\"'", (false, false)),
        ("'doppelt' USING ERRCODE = 'unique_violation', CONSTRAINT = 'orders_number_key'", (true, true)),
        ("'x' USING ERRCODE = 'unique_violation'", (true, false)),
        ("'x' USING ERRCODE = 'serialization_failure', CONSTRAINT = 'orders_number_key'", (false, false)),
    ] {
        let error = run(&mut connection, &format!("DO $$BEGIN RAISE {raise}; END$$")).await.unwrap_err();
        let found = (UniqueViolation::find(&error).is_some(), is_unique_violation(&error, "orders_number_key"));
        assert_eq!(found, (of_some, of_this), "{error}");
    }
    for error in [sqlx::Error::PoolTimedOut, sqlx::Error::RowNotFound, sqlx::Error::Io(io::ErrorKind::Other.into())] {
        assert!(UniqueViolation::find(&error).is_none());
    }
}

#[derive(Debug, thiserror::Error)]
enum ShopError {
    #[error("the order could not be placed")]
    Source(#[from] sqlx::Error),
    #[error(transparent)]
    Transparent(sqlx::Error),
    #[error("shared")]
    Shared(#[source] Arc<sqlx::Error>),
    #[error(transparent)]
    Nested(Box<ShopError>),
}

async fn it_is_seen_through_what_wraps_it() {
    let (mut connection, _) = connection().await;
    run(&mut connection, ORDERS).await.unwrap();
    let mut violation = async || run(&mut connection, "INSERT INTO orders VALUES ('o1')").await.unwrap_err();
    let wrapped: Vec<Box<dyn Error + Send + Sync>> = vec![
        violation().await.into(),
        ShopError::from(violation().await).into(),
        ShopError::Transparent(violation().await).into(),
        ShopError::Shared(Arc::new(violation().await)).into(),
        ShopError::Nested(Box::new(ShopError::Transparent(violation().await))).into(),
        ShopError::Nested(Box::new(violation().await.into())).into(),
        io::Error::other(violation().await).into(),
        io::Error::other(ShopError::Source(violation().await)).into(),
        StoreError::new(ErrorKind::Other, "postgres", Operation::Complete).with_source(violation().await).into(),
        sqlx::Error::Decode(violation().await.into()).into(),
        violation().await.into_database_error().unwrap().into_error(),
    ];
    for (place, error) in wrapped.iter().enumerate() {
        assert!(is_unique_violation(&**error, "orders_number_key"), "{place}: {error:?}");
        assert!(!is_unique_violation(&**error, "orders_by_invoice"), "{place}: {error:?}");
    }
}

async fn constraints_of_one_name_are_told_apart_by_table_and_schema() {
    let (mut connection, schema) = connection().await;
    let other = fresh_config().schema.as_str().to_owned();
    run(&mut connection, &format!("CREATE SCHEMA {other}")).await.unwrap();
    // Within a schema no two indexes have one name; in two schemas they can.
    for (of, table) in [(&schema, "orders"), (&other, "orders"), (&other, "refunds")] {
        let name = if table == "refunds" { "refunds_number_key" } else { "number_key" };
        let sql = format!("CREATE TABLE {of}.{table} (number text CONSTRAINT {name} UNIQUE)");
        run(&mut connection, &sql).await.unwrap();
        run(&mut connection, &format!("INSERT INTO {of}.{table} VALUES ('1')")).await.unwrap();
        let error = run(&mut connection, &format!("INSERT INTO {of}.{table} VALUES ('1')")).await.unwrap_err();
        assert_eq!(is_unique_violation(&error, "number_key"), table == "orders");
        let found = UniqueViolation::find(&error).unwrap();
        assert_eq!((found.schema(), found.table()), (Some(&**of), Some(table)));
    }
}

async fn a_partition_reports_its_own_index() {
    let (mut connection, _) = connection().await;
    let sql = "CREATE TABLE orders (number text, day int, CONSTRAINT orders_number_key UNIQUE (number, day))
            PARTITION BY RANGE (day);
        CREATE TABLE orders_d1 PARTITION OF orders FOR VALUES FROM (1) TO (2);
        CREATE TABLE orders_d2 (number text, day int, CONSTRAINT own_name UNIQUE (number, day));
        ALTER TABLE orders ATTACH PARTITION orders_d2 FOR VALUES FROM (2) TO (3);
        INSERT INTO orders VALUES ('1', 1), ('1', 2)";
    run(&mut connection, sql).await.unwrap();
    for (day, table, constraint) in [(1, "orders_d1", "orders_d1_number_day_key"), (2, "orders_d2", "own_name")] {
        let error = run(&mut connection, &format!("INSERT INTO orders VALUES ('1', {day})")).await.unwrap_err();
        assert!(is_unique_violation(&error, constraint), "{error}");
        assert!(!is_unique_violation(&error, "orders_number_key"), "{error}");
        assert_eq!(UniqueViolation::find(&error).unwrap().table(), Some(table));
        // By columns, it is the parent's.
        let sql = format!("INSERT INTO orders VALUES ('1', {day}) ON CONFLICT (number, day) DO NOTHING");
        run(&mut connection, &sql).await.unwrap();
    }
}

async fn a_deferred_constraint_is_reported_by_the_commit() {
    let (mut connection, _) = connection().await;
    let sql = "CREATE TABLE orders (number text CONSTRAINT orders_number_key UNIQUE DEFERRABLE INITIALLY DEFERRED);
        INSERT INTO orders VALUES ('1')";
    run(&mut connection, sql).await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    run(&mut transaction, "INSERT INTO orders VALUES ('1')").await.unwrap();
    let error = transaction.commit().await.unwrap_err();
    assert!(is_unique_violation(&error, "orders_number_key"), "{error}");
}

async fn a_long_name_arrives_cut() {
    let (mut connection, _) = connection().await;
    let name = "n".repeat(70);
    let sql = format!("CREATE TABLE t (a int CONSTRAINT {name} UNIQUE); INSERT INTO t VALUES (1)");
    run(&mut connection, &sql).await.unwrap();
    let error = run(&mut connection, "INSERT INTO t VALUES (1)").await.unwrap_err();
    assert!(!is_unique_violation(&error, &name) && is_unique_violation(&error, &name[..63]));
}
