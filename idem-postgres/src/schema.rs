//! Making the tables, and looking whether they are there.

use std::time::Duration;

use idem_core::{Operation, StoreError};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, Row};

use crate::config::Schema;
use crate::error::{PostgresError, Stage, own_error, store_error};

/// By version, from 1 on. A version that was released is not changed: another follows it.
const MIGRATIONS: &[&str] = &[include_str!("../migrations/0001_records.sql")];

fn failed(error: sqlx::Error) -> StoreError {
    store_error(error, Stage::Execute, Operation::Setup)
}

fn known() -> i32 {
    MIGRATIONS.len() as i32
}

/// Brings the schema to the version of this crate. Safe in many processes at once: one does the work, the others wait.
pub(crate) async fn migrate(pool: &PgPool, schema: &Schema) -> Result<(), StoreError> {
    let quoted = schema.quoted();
    let mut connection = pool.acquire().await.map_err(|error| store_error(error, Stage::Acquire, Operation::Setup))?;
    let mut transaction = connection.begin().await.map_err(failed)?;
    let run = |sql: String| sqlx::raw_sql(AssertSqlSafe(sql));
    // Another lock than that of the day: callers go on meanwhile.
    run(format!("SELECT pg_advisory_xact_lock({})", schema.lock() ^ 1))
        .execute(&mut *transaction)
        .await
        .map_err(failed)?;
    // Whose name needs no escapes.
    let exists = run(format!("SELECT to_regclass('{quoted}.version') IS NOT NULL"))
        .fetch_one(&mut *transaction)
        .await
        .and_then(|row| row.try_get::<bool, _>(0))
        .map_err(failed)?;
    if !exists {
        run(format!(
            "CREATE SCHEMA IF NOT EXISTS {quoted}; \
             CREATE TABLE {quoted}.version (only_row bool PRIMARY KEY DEFAULT true CHECK (only_row), version int NOT NULL); \
             INSERT INTO {quoted}.version (version) VALUES (0)"
        ))
        .execute(&mut *transaction)
        .await
        .map_err(failed)?;
    }
    let found = version(&mut transaction, schema).await?;
    if found > known() {
        return Err(own_error(PostgresError::NewerSchema { found, known: known() }, Operation::Setup));
    }
    for migration in MIGRATIONS.iter().skip(usize::try_from(found).unwrap_or_default()) {
        let sql = migration.replace("{schema}", &quoted).replace("{lock}", &schema.lock().to_string());
        run(sql).execute(&mut *transaction).await.map_err(failed)?;
    }
    if found < known() {
        run(format!("UPDATE {quoted}.version SET version = {}", known()))
            .execute(&mut *transaction)
            .await
            .map_err(failed)?;
    }
    transaction.commit().await.map_err(failed)
}

async fn version(connection: &mut PgConnection, schema: &Schema) -> Result<i32, StoreError> {
    sqlx::raw_sql(AssertSqlSafe(format!("SELECT version FROM {}.version", schema.quoted())))
        .fetch_one(connection)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(failed)
}

/// Whether the schema has the version of this crate. Notes the longest retention, by which it is known when a day's records
/// have all expired: before the first of them is written.
pub(crate) async fn check(pool: &PgPool, schema: &Schema, max_retention: Duration) -> Result<(), StoreError> {
    let mut connection = pool.acquire().await.map_err(|error| store_error(error, Stage::Acquire, Operation::Setup))?;
    let found = match version(&mut connection, schema).await {
        Ok(found) => found,
        Err(error) => {
            let absent = std::error::Error::source(&error)
                .and_then(|source| source.downcast_ref::<sqlx::Error>())
                .and_then(sqlx::Error::as_database_error)
                .and_then(|error| error.code())
                .is_some_and(|code| code == "42P01" || code == "3F000");
            return Err(if absent { own_error(PostgresError::NotMigrated, Operation::Setup) } else { error });
        }
    };
    match found {
        found if found > known() => {
            Err(own_error(PostgresError::NewerSchema { found, known: known() }, Operation::Setup))
        }
        found if found < known() => Err(own_error(PostgresError::NotMigrated, Operation::Setup)),
        _ => note_retention(&mut connection, schema, max_retention).await,
    }
}

/// Writes only where it is the longest so far, so that a store can be opened on a server that is read-only for a while.
async fn note_retention(
    connection: &mut PgConnection,
    schema: &Schema,
    max_retention: Duration,
) -> Result<(), StoreError> {
    let (schema, retention) = (schema.quoted(), format!("interval '{} us'", max_retention.as_micros()));
    let run = |sql: String| sqlx::raw_sql(AssertSqlSafe(sql));
    let noted = run(format!("SELECT bool_and(longest >= {retention}) FROM {schema}.epoch"))
        .fetch_one(&mut *connection)
        .await
        .and_then(|row| row.try_get::<Option<bool>, _>(0))
        .map_err(failed)?;
    if noted != Some(true) {
        run(format!("UPDATE {schema}.epoch SET longest = greatest(longest, {retention})"))
            .execute(connection)
            .await
            .map_err(failed)?;
    }
    Ok(())
}
