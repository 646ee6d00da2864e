//! A payments API that charges once, however often the request is repeated.
//!
//! `payments --demo` starts it on a free port, drives it over HTTP and prints what happens. `payments --listen
//! 127.0.0.1:8080` serves it:
//!
//! ```text
//! curl -i localhost:8080/charges -H 'Authorization: Bearer alice' -H 'Idempotency-Key: order-1' \
//!      -H 'Content-Type: application/json' -d '{"amount": 1200, "card": "visa"}'
//! curl localhost:8080/balance -H 'Authorization: Bearer alice'
//! ```
//!
//! The cards: `visa` is charged at once, `slow` after a while, `declined` is declined, and `flaky` makes the provider
//! time out at the first attempt. With a ledger, `POST /charges-on-account` charges without a card, so that nobody is
//! asked.
//!
//! With `--same-transaction`, charges and balances are tables in the database of the keys, and all three are committed
//! together: see `ledger.rs`.

mod api;
mod demo;
mod ledger;
mod problem;
mod provider;

use std::error::Error;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use idem_core::executor::Executor;
use idem_core::{KeyStore, MemoryStore};
use idem_postgres::{Config, Maintenance, PostgresStore};
use idem_redis::RedisStore;
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::ledger::Ledger;
use crate::provider::Provider;

/// How long a stop waits for charges that run.
const LONGEST_STOP: Duration = Duration::from_secs(30);

/// A payments API that charges once.
#[derive(Debug, Parser)]
struct Arguments {
    /// Drive the API over real HTTP and print what happens.
    #[arg(long, conflicts_with = "listen")]
    demo: bool,
    /// Where to listen; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Where the idempotency keys are kept: memory, a URL (postgres://user@host/database, redis://host), or the cluster file of
    /// a FoundationDB (fdb:/etc/foundationdb/fdb.cluster), for which the feature `fdb` has to be built in.
    #[arg(long, default_value = "memory")]
    store: String,
    /// Keep charges and balances in the database of the keys, and commit all three together. Needs a postgres store.
    #[arg(long)]
    same_transaction: bool,
    /// For how many seconds a key stays held whose process has died.
    #[arg(long, default_value = "30", value_name = "SECONDS")]
    lease: u64,
    /// The store's URL leads through pgbouncer in transaction mode. (Not with --same-transaction, whose own statements are
    /// prepared ones, to stay as they would be in most services.)
    #[arg(long, conflicts_with = "same_transaction")]
    pgbouncer: bool,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let config = Config::default().with_prepared_statements(!arguments.pgbouncer);
    let store = Store::open(&arguments.store, config).await?;
    let ledger = match (arguments.same_transaction, &store.postgres) {
        (false, _) => None,
        (true, Some(postgres)) => Some(Arc::new(Ledger::open(postgres.clone()).await?)),
        (true, None) => return Err("--same-transaction needs a postgres store".into()),
    };
    let executor = Executor::builder(store.keys.clone()).lease(Duration::from_secs(arguments.lease)).build()?;
    let provider = Arc::new(Provider::default());
    let listen = if arguments.demo { SocketAddr::from(([127, 0, 0, 1], 0)) } else { arguments.listen };
    let listener = TcpListener::bind(listen).await?;
    let address = listener.local_addr()?;
    let server = axum::serve(listener, api::router(executor.clone(), provider, ledger));
    if arguments.demo {
        let server = tokio::spawn(server.into_future());
        let result = demo::run(address, &store.shown(), arguments.same_transaction).await;
        server.abort();
        return result;
    }
    say(&format!("listening on http://{address}"));
    server.with_graceful_shutdown(stop()).await?;
    // Clients may have hung up while their charge runs: it is finished and recorded all the same.
    if timeout(LONGEST_STOP, executor.drain()).await.is_err() {
        say(&format!("stopped, although {} charges still run", executor.running()));
    }
    Ok(())
}

/// Needs the client library to link, so only where that is asked for.
#[cfg(feature = "fdb")]
async fn foundationdb(file: &str) -> Result<Arc<dyn KeyStore>, Box<dyn Error>> {
    Ok(Arc::new(idem_fdb::FdbStore::open(Some(file.as_ref()), idem_fdb::Config::default()).await?))
}

#[cfg(not(feature = "fdb"))]
async fn foundationdb(_: &str) -> Result<Arc<dyn KeyStore>, Box<dyn Error>> {
    Err("this was built without FoundationDB: cargo run -p idem-examples --features fdb --bin payments".into())
}

/// Where the keys are kept, and what keeps it going.
struct Store {
    keys: Arc<dyn KeyStore>,
    postgres: Option<Arc<PostgresStore>>,
    _maintenance: Option<Maintenance>,
}

impl Store {
    async fn open(name: &str, config: Config) -> Result<Self, Box<dyn Error>> {
        if name == "memory" {
            return Ok(Self { keys: Arc::new(MemoryStore::new()), postgres: None, _maintenance: None });
        }
        if name.starts_with("postgres://") || name.starts_with("postgresql://") {
            let store = Arc::new(PostgresStore::connect_and_migrate(name, config).await?);
            let maintenance = store.spawn_maintenance();
            return Ok(Self { keys: store.clone(), postgres: Some(store), _maintenance: Some(maintenance) });
        }
        if ["redis://", "rediss://", "valkey://"].iter().any(|scheme| name.starts_with(scheme)) {
            let store = RedisStore::connect(name, idem_redis::Config::default()).await?;
            return Ok(Self { keys: Arc::new(store), postgres: None, _maintenance: None });
        }
        if let Some(file) = name.strip_prefix("fdb:") {
            return Ok(Self { keys: foundationdb(file).await?, postgres: None, _maintenance: None });
        }
        // Not the name itself: it may hold a password.
        Err("there is no such store: say memory, postgres://…, redis://…, or fdb:PATH".into())
    }

    /// In words, without a password.
    fn shown(&self) -> String {
        self.keys.to_string()
    }
}

async fn stop() {
    if tokio::signal::ctrl_c().await.is_err() {
        // Without signals, the server runs until it is killed.
        std::future::pending::<()>().await;
    }
}

/// The one place that prints. Whoever has stopped reading, such as `head`, misses nothing.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
