//! Operations with a key of their own, on a Postgres of yours: `recipes postgres://user@host/database`. It works in
//! temporary tables and leaves nothing behind.

use std::error::Error;
use std::io::Write;

use clap::Parser;
use idem_examples::natural_key::{self, Order};
use idem_examples::versioned_append::{self, Event};
use idem_postgres::sqlx::types::Uuid;
use idem_postgres::sqlx::{self, AssertSqlSafe, Connection, PgConnection};

/// A natural unique key, and a versioned append.
#[derive(Debug, Parser)]
struct Arguments {
    /// The database.
    url: String,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut connection = PgConnection::connect(&Arguments::parse().url).await?;
    for table in [natural_key::TABLE, versioned_append::TABLE] {
        let temporary = table.replacen("CREATE TABLE", "CREATE TEMPORARY TABLE", 1);
        sqlx::raw_sql(AssertSqlSafe(temporary)).execute(&mut connection).await?;
    }

    say("Orders, by their number");
    let order = Order { number: "4711".to_owned(), customer: "alice".to_owned(), cents: 1_200 };
    let other = Order { cents: 9_900, ..order.clone() };
    for (what, order) in [("the order", &order), ("the same again", &order), ("another, the same number", &other)] {
        show(what, natural_key::place(&mut connection, order).await);
    }
    let mut transaction = connection.begin().await?;
    show("the same, by a caught violation", natural_key::place_catching(&mut transaction, &order).await);
    transaction.commit().await?;

    say("Events, by aggregate and version");
    let event =
        |kind: &str| Event { id: Uuid::from_u128(rand::random()), kind: kind.to_owned(), body: "100".to_owned() };
    let (deposited, withdrawn) = (event("deposited"), event("withdrawn"));
    for (what, version, event) in [
        ("version 1", 1, &deposited),
        ("the same again", 1, &deposited),
        ("another event at version 1", 1, &withdrawn),
        ("version 3 before version 2", 3, &withdrawn),
        ("the first event as version 2", 2, &deposited),
        ("version 2", 2, &withdrawn),
    ] {
        show(what, versioned_append::append(&mut connection, "account-7", version, event).await);
    }
    Ok(())
}

fn show<T: std::fmt::Debug, E: Error>(what: &str, result: Result<T, E>) {
    match result {
        Ok(done) => say(&format!("  {what:<34} {done:?}")),
        Err(error) => say(&format!("  {what:<34} refused: {error}")),
    }
}

fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
