//! A sentinel makes the replica the master: what is lost without waiting for replicas, and what is not with.
#![allow(clippy::panic, clippy::unwrap_used, clippy::print_stdout, reason = "the helpers of tests are tests")]

mod stores;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, Outcome, Reservation, Reserve};
use idem_redis::{Acknowledge, Config, RedisStore, RedisStoreError};
use idem_testkit::servers::{RedisFailover, RedisServer};
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Time};
use stores::{acquire, fresh_config, persist, persist_reserve};

stores::tests! {
    a_store_follows_the_sentinels_to_the_new_master,
    without_wait_acknowledged_writes_are_lost_in_a_failover,
    with_wait_what_the_replica_has_not_is_not_acknowledged,
    a_repeat_waits_for_what_an_earlier_call_has_written,
    histories_through_failovers_with_wait_have_a_legal_order,
}

const KEYS: usize = 100;

/// Just behind a failover, the sentinel does not yet tell the new master.
async fn opened(servers: &RedisFailover, config: Config) -> RedisStore {
    persist(|| RedisStore::connect_sentinel([servers.sentinel_url()], RedisFailover::MASTER, config.clone())).await
}

fn request(scope: &str, at: usize) -> Reserve {
    Reserve::new(Key::new(scope, &at.to_string()).unwrap()).with_lease(Duration::from_secs(3_600))
}

/// Lets the replica fall behind: it may not ask for the master's writes any more.
fn cut_off(master: &RedisServer) {
    master.must(&["ACL", "SETUSER", "default", "-psync", "-sync"]).unwrap();
    master.must(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
}

async fn a_store_follows_the_sentinels_to_the_new_master() {
    let servers = RedisFailover::start(&[]).unwrap();
    let config = fresh_config();
    let waiting = opened(&servers, config.clone().with_acknowledge(Acknowledge::replicas(1))).await;
    let before = request("before", 0);
    let Reservation::Acquired(lease) = persist(|| waiting.reserve(&before)).await else { panic!() };
    let store = opened(&servers, config).await;
    tokio::task::block_in_place(|| servers.fail_over()).unwrap();
    let outcome = Outcome::new(200, "after the failover");
    persist(|| store.complete(&lease, &outcome)).await;
    let again = Reserve::new(before.key);
    assert!(matches!(persist(|| store.reserve(&again)).await, Reservation::Completed(_)));
    // And back again, once the other has the record.
    tokio::task::block_in_place(|| rejoin(&servers)).unwrap();
    persist(|| waiting.reserve(&again)).await;
    tokio::task::block_in_place(|| servers.fail_over()).unwrap();
    assert!(matches!(persist(|| store.reserve(&again)).await, Reservation::Completed(_)));
}

/// Starts what was the master, and waits until it follows the new one. The sentinel does its part, and closes connections.
fn rejoin(servers: &RedisFailover) -> std::io::Result<()> {
    let master = servers.master()?;
    let other = &servers.servers()[1 - master];
    other.up()?;
    let port = servers.servers()[master].port().to_string();
    let end = std::time::Instant::now() + Duration::from_secs(20);
    let follow = || {
        let told = other.must(&["INFO", "replication"])?;
        if told.text().contains("role:master") {
            other.must(&["REPLICAOF", "127.0.0.1", &port])?;
        }
        Ok::<_, std::io::Error>(told.text().contains("master_link_status:up"))
    };
    while !follow().unwrap_or(false) {
        if std::time::Instant::now() > end {
            return Err(std::io::Error::other("it does not follow the new master"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// That is what the documentation says is lost.
async fn without_wait_acknowledged_writes_are_lost_in_a_failover() {
    let servers = RedisFailover::start(&[]).unwrap();
    let store = opened(&servers, fresh_config()).await;
    cut_off(&servers.servers()[0]);
    for at in 0..KEYS {
        let lease = acquire(&store, &request("lost", at)).await;
        store.complete(&lease, &Outcome::new(200, "charged")).await.unwrap();
    }
    tokio::task::block_in_place(|| servers.fail_over()).unwrap();
    let mut lost = 0;
    for at in 0..KEYS {
        // Another caller, with the same key: it would charge once more.
        if let Reservation::Acquired(_) = persist_reserve(&store, &request("lost", at)).await {
            lost += 1;
        }
    }
    println!("{lost} of {KEYS} completed keys were lost in the failover");
    assert_eq!(lost, KEYS);
}

async fn with_wait_what_the_replica_has_not_is_not_acknowledged() {
    let servers = RedisFailover::start(&[]).unwrap();
    let acknowledge = Acknowledge::replicas(1).with_timeout(Duration::from_millis(200));
    let config = fresh_config();
    let store = opened(&servers, config.clone().with_acknowledge(acknowledge)).await;
    let safe: Vec<usize> = (0..KEYS).collect();
    for at in &safe {
        let (request, outcome) = (request("safe", *at), Outcome::new(200, "charged"));
        let Reservation::Acquired(lease) = persist(|| store.reserve(&request)).await else { panic!() };
        persist(|| store.complete(&lease, &outcome)).await;
    }
    cut_off(&servers.servers()[0]);
    let mut unknown = 0;
    for at in 0..5 {
        let error = store.reserve(&request("unsafe", at)).await.unwrap_err();
        assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Unknown), "{error:?}");
        let source = error.source().unwrap().downcast_ref().unwrap();
        assert!(matches!(source, RedisStoreError::TooFewAcknowledged { found: 0, wanted: 1, .. }), "{error:?}");
        unknown += 1;
    }
    // A replay would tell a caller of what the failover takes back: it is not acknowledged either, nor is a batch.
    assert_eq!(store.reserve(&request("safe", 0)).await.unwrap_err().class(), ErrorClass::Unknown);
    let answers = store.reserve_many(&[request("unsafe", 5), request("unsafe", 6)]).await;
    assert!(answers.iter().all(|answer| answer.as_ref().is_err_and(|error| error.class() == ErrorClass::Unknown)));
    unknown += answers.len();
    tokio::task::block_in_place(|| servers.fail_over()).unwrap();
    // Without a replica of its own, the new master has nobody to wait for.
    let store = opened(&servers, config).await;
    for at in safe {
        let answer = persist_reserve(&store, &request("safe", at)).await;
        assert!(matches!(answer, Reservation::Completed(_)), "{at}: {answer:?}");
    }
    println!("{KEYS} acknowledged keys are there, {unknown} were not acknowledged");
}

/// The master has the record, written by a call that was not acknowledged: the same call again, on another connection,
/// must wait for that write, and not only for its own, which there is none of.
async fn a_repeat_waits_for_what_an_earlier_call_has_written() {
    let servers = RedisFailover::start(&[]).unwrap();
    let acknowledge = Acknowledge::replicas(1).with_timeout(Duration::from_millis(100));
    let config = fresh_config().with_acknowledge(acknowledge);
    let store = opened(&servers, config.clone()).await;
    let [master, replica] = servers.servers();
    let before = request("repeat", 0);
    let Reservation::Acquired(lease) = persist(|| store.reserve(&before)).await else { panic!() };
    cut_off(master);
    let held = request("repeat", 1);
    assert_eq!(store.reserve(&held).await.unwrap_err().class(), ErrorClass::Unknown);
    let outcome = Outcome::new(200, "once");
    assert_eq!(store.complete(&lease, &outcome).await.unwrap_err().class(), ErrorClass::Unknown);
    let other = opened(&servers, config).await;
    for store in [&store, &other] {
        assert_eq!(store.reserve(&held).await.unwrap_err().class(), ErrorClass::Unknown);
        assert_eq!(store.complete(&lease, &outcome).await.unwrap_err().class(), ErrorClass::Unknown);
        assert_eq!(store.fetch(&lease.key).await.unwrap_err().class(), ErrorClass::Unknown);
    }
    // The replica comes back, and everything is acknowledged. It may not fall back to SYNC between the two commands: a
    // replica of that kind acknowledges nothing.
    master.must(&["ACL", "SETUSER", "default", "+psync"]).unwrap();
    let port = master.port().to_string();
    replica.must(&["REPLICAOF", "127.0.0.1", &port]).unwrap();
    let Reservation::Acquired(again) = persist(|| other.reserve(&held)).await else { panic!() };
    assert_eq!(again.attempt, 1);
    persist(|| other.complete(&lease, &outcome)).await;
}

struct FailedOver;

struct Fresh {
    servers: Arc<RedisFailover>,
    config: Config,
    store: Arc<RedisStore>,
}

#[async_trait]
impl Harness for FailedOver {
    fn name(&self) -> String {
        "redis, failed over".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_disturb()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let servers = tokio::task::spawn_blocking(|| RedisFailover::start(&[])).await??;
        let config = fresh_config().with_acknowledge(Acknowledge::replicas(1));
        let sentinels = [servers.sentinel_url()];
        let store = RedisStore::connect_sentinel(sentinels, RedisFailover::MASTER, config.clone()).await?;
        Ok(Box::new(Fresh { servers: Arc::new(servers), config, store: Arc::new(store) }))
    }
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.store.clone()
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        self.config.clock_shift.advance(by);
        Ok(())
    }

    async fn disturb(&self) -> Result<(), HarnessError> {
        let servers = self.servers.clone();
        Ok(tokio::task::spawn_blocking(move || servers.switch()).await??)
    }
}

async fn histories_through_failovers_with_wait_have_a_legal_order() {
    let ran = tokio::task::spawn_blocking(|| idem_testkit::run_disturbed_histories(&FailedOver, 1)).await.unwrap();
    println!("{} histories", ran.unwrap_or_else(|report| panic!("{report}")));
}
