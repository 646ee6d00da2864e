//! The primary goes away and its synchronous standby takes its place behind the same address.
#![allow(clippy::panic, clippy::unwrap_used, clippy::print_stdout, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    nothing_acknowledged_is_lost_in_a_failover_to_a_synchronous_standby,
    a_standby_refuses_writes_and_the_primary_takes_them_later,
}

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, Outcome, Reservation, Reserve};
use idem_postgres::sqlx::postgres::PgPoolOptions;
use idem_postgres::sqlx::{self, AssertSqlSafe, Connection, PgConnection, Row};
use idem_postgres::{Config, PostgresStore};
use idem_testkit::servers::PostgresServer;
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Time, run_disturbed_histories};
use stores::{Fresh, fresh_config, pool_of};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, watch};
use tokio::task::spawn_blocking;

/// One address, behind which is now this server and now that.
struct Switch {
    address: SocketAddr,
    port: watch::Sender<u16>,
    task: tokio::task::JoinHandle<()>,
}

impl Switch {
    async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, ports) = watch::channel(port);
        let task = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut ports = ports.clone();
                tokio::spawn(async move {
                    let port = *ports.borrow_and_update();
                    let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
                    // Cut in the middle of whatever is under way when the address changes hands.
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        _ = ports.changed() => {}
                    }
                });
            }
        });
        Self { address, port: sender, task }
    }

    fn switch(&self, port: u16) {
        self.port.send_replace(port);
    }

    fn url(&self) -> String {
        format!("postgres://postgres@{}/postgres", self.address)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Lets every commit on the primary wait for the standby from now on, and sees that it does.
async fn follow(primary: &PostgresServer) -> Result<(), sqlx::Error> {
    let mut connection = PgConnection::connect(&primary.url()).await?;
    for sql in ["ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"] {
        sqlx::raw_sql(sql).execute(&mut connection).await?;
    }
    loop {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'";
        if sqlx::raw_sql(sql).fetch_one(&mut connection).await?.try_get::<i64, _>(0)? == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Waits for the standby, and so for whatever was committed before it.
    let table = "CREATE TABLE IF NOT EXISTS followed (at timestamptz)";
    for sql in [table, "INSERT INTO followed VALUES (clock_timestamp())"] {
        sqlx::raw_sql(sql).execute(&mut connection).await?;
    }
    connection.close().await
}

/// A primary and its standby behind one address.
struct Pair {
    address: Switch,
    servers: Mutex<(Arc<PostgresServer>, Arc<PostgresServer>)>,
    failovers: AtomicU64,
}

impl Pair {
    async fn start() -> Self {
        // Processes die here, and no machine: what they have written is safe with the system.
        let primary = Arc::new(PostgresServer::start(&[("fsync", "off")]).unwrap());
        let standby = Arc::new(primary.start_standby(&[]).unwrap());
        follow(&primary).await.unwrap();
        let address = Switch::to(primary.port()).await;
        Self { address, servers: Mutex::new((primary, standby)), failovers: AtomicU64::new(0) }
    }

    /// The standby takes over; then it gets a standby of its own.
    async fn fail_over(&self) -> Result<(), HarnessError> {
        let mut servers = self.servers.lock().await;
        let (old, new) = servers.clone();
        let killed_first = self.failovers.fetch_add(1, Ordering::SeqCst).is_multiple_of(2);
        if killed_first {
            let old = old.clone();
            spawn_blocking(move || old.crash()).await??;
        }
        let successor = new.clone();
        spawn_blocking(move || successor.promote()).await??;
        // Otherwise the old one lives on in the belief that it is the primary, and is cut off.
        self.address.switch(new.port());
        let primary = new.clone();
        let standby = Arc::new(spawn_blocking(move || primary.start_standby(&[])).await??);
        follow(&new).await?;
        spawn_blocking(move || drop(old)).await?;
        *servers = (new, standby);
        Ok(())
    }
}

struct FailingOver(Arc<Pair>);

struct FailedOver(Fresh, Arc<Pair>);

#[async_trait]
impl Harness for FailingOver {
    fn name(&self) -> String {
        "postgres, failing over to a synchronous standby".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_disturb()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        // A commit that waits for a standby which has gone is given up before the history's patience is.
        let config = fresh_config().with_call_timeout(Duration::from_secs(5));
        let pool = pool_of(&self.0.address.url(), &config, 8).await?;
        Ok(Box::new(FailedOver(Fresh::over(pool, config).await?, self.0.clone())))
    }
}

#[async_trait]
impl Fixture for FailedOver {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.0.store()
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        self.0.advance(by).await
    }

    async fn disturb(&self) -> Result<(), HarnessError> {
        self.1.fail_over().await
    }
}

/// The stores are opened once each, and go on through every failover.
async fn nothing_acknowledged_is_lost_in_a_failover_to_a_synchronous_standby() {
    let pair = Arc::new(Pair::start().await);
    let harness = FailingOver(pair.clone());
    spawn_blocking(move || {
        let histories = run_disturbed_histories(&harness, 3).unwrap_or_else(|report| panic!("{report}"));
        println!("{histories} histories");
    })
    .await
    .unwrap();
    println!("{} failovers", pair.failovers.load(Ordering::SeqCst));
    assert!(pair.failovers.load(Ordering::SeqCst) >= 3);
}

/// A load balancer that has not noticed yet which one is the primary.
async fn a_standby_refuses_writes_and_the_primary_takes_them_later() {
    let pair = Pair::start().await;
    let config = Config::default();
    let pool = PgPoolOptions::new().max_connections(4).connect(&pair.address.url()).await.unwrap();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let store = PostgresStore::open(pool.clone(), config).await.unwrap();
    let request = |id: &str| Reserve::new(Key::new("standby", id).unwrap());
    let Reservation::Acquired(held) = store.reserve(&request("held")).await.unwrap() else { panic!() };

    let (primary, standby) = pair.servers.lock().await.clone();
    pair.address.switch(standby.port());
    // Connections that were cut are replaced.
    while store.fetch(&held.key).await.is_err() {}
    let mut in_recovery = pool.acquire().await.unwrap();
    let row = sqlx::raw_sql(AssertSqlSafe("SELECT pg_is_in_recovery()")).fetch_one(&mut *in_recovery).await.unwrap();
    assert!(row.get::<bool, _>(0), "this is about a standby");
    drop(in_recovery);
    let outcome = Outcome::new(200, "done");
    let refused = [
        store.reserve(&request("new")).await.unwrap_err(),
        store.reserve(&request("held")).await.unwrap_err(),
        store.complete(&held, &outcome).await.unwrap_err(),
        store.fail(&held, &idem_core::Failure::default()).await.unwrap_err(),
        store.renew(&held, Duration::from_secs(60)).await.unwrap_err(),
        store.maintain().await.unwrap_err(),
    ];
    for error in refused {
        // Nothing has happened, and another server may take it.
        assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Retryable), "{error:?}");
    }

    pair.address.switch(primary.port());
    while store.fetch(&held.key).await.is_err() {}
    assert_eq!(store.fetch(&request("new").key).await.unwrap(), None);
    store.complete(&held, &outcome).await.unwrap();
}
