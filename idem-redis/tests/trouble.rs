//! A server that is slow, is killed, or whose slots move, under load.
#![allow(clippy::panic, clippy::unwrap_used, clippy::print_stdout, reason = "the helpers of tests are tests")]

mod stores;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, Lease, Outcome, Reservation, Reserve};
use idem_redis::redis::Client;
use idem_redis::redis::aio::{ConnectionManager, ConnectionManagerConfig};
use idem_redis::redis::cluster_routing::Slot;
use idem_redis::{Batching, Config, RedisStore, RedisStoreError};
use idem_testkit::servers::{RedisCluster, RedisServer, Reply};
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Time};
use stores::{acquire, fresh_config, name, persist, persist_reserve};

stores::tests! {
    no_acknowledged_write_is_lost_in_histories_when_the_server_is_killed,
    nothing_acknowledged_is_lost_when_the_server_is_killed_under_load,
    pitfall_42_slots_move_under_load,
    a_master_of_a_cluster_is_killed_under_load,
    a_master_of_a_cluster_that_hangs_holds_up_its_own_keys_only,
    calls_to_a_cluster_wait_for_their_turn_and_are_refused_beyond_the_queue,
    a_server_that_is_paused_is_told_in_time_and_no_key_is_lost,
    the_callers_own_connection_manager_is_enough,
    dropped_calls_leave_no_job_and_no_connection,
    one_caller_takes_the_short_way_again_when_the_others_have_gone,
}

const DURABLE: &[(&str, &str)] = &[("appendonly", "yes"), ("appendfsync", "always")];

/// A server that is killed as often as it is disturbed.
struct Killed;

struct Fresh {
    server: Arc<RedisServer>,
    config: Config,
    store: Arc<RedisStore>,
}

#[async_trait]
impl Harness for Killed {
    fn name(&self) -> String {
        "redis, killed".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_disturb()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let server = tokio::task::spawn_blocking(|| RedisServer::start(DURABLE)).await??;
        let config = fresh_config();
        let store = Arc::new(RedisStore::connect(&server.url(), config.clone()).await?);
        Ok(Box::new(Fresh { server: Arc::new(server), config, store }))
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
        let server = self.server.clone();
        Ok(tokio::task::spawn_blocking(move || server.crash_and_restart()).await??)
    }
}

async fn no_acknowledged_write_is_lost_in_histories_when_the_server_is_killed() {
    let ran = tokio::task::spawn_blocking(|| idem_testkit::run_disturbed_histories(&Killed, 10)).await.unwrap();
    println!("{} histories", ran.unwrap_or_else(|report| panic!("{report}")));
}

/// Callers at work, two for each key, until they are told to end; what they completed is theirs alone and is there.
struct Load {
    over: Arc<AtomicBool>,
    callers: Vec<tokio::task::JoinHandle<Vec<(Lease, Outcome)>>>,
    store: Arc<RedisStore>,
}

impl Load {
    fn start(store: Arc<RedisStore>, scope: &str, callers: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let callers = (0..callers)
            .map(|caller| {
                let (store, over, scope) = (store.clone(), over.clone(), scope.to_owned());
                tokio::spawn(async move {
                    let mut completed: Vec<(Lease, Outcome)> = Vec::new();
                    for number in 0.. {
                        if over.load(Ordering::Relaxed) {
                            break;
                        }
                        let key = Key::new(&scope, &format!("{}-{number}", caller / 2)).unwrap();
                        let request = Reserve::new(key).with_lease(Duration::from_secs(3_600));
                        if let Reservation::Acquired(lease) = persist(|| store.reserve(&request)).await {
                            let outcome = Outcome::new(201, format!("by {caller}"));
                            persist(|| store.complete(&lease, &outcome)).await;
                            completed.push((lease, outcome));
                        }
                    }
                    completed
                })
            })
            .collect();
        Self { over, callers, store }
    }

    /// How many keys were completed, all by one caller and all still there.
    async fn end(self) -> usize {
        self.over.store(true, Ordering::Relaxed);
        let mut keys = HashSet::new();
        for caller in self.callers {
            for (lease, outcome) in caller.await.unwrap() {
                assert_eq!(lease.attempt, 1);
                assert!(keys.insert(lease.key.clone()), "{:?} was run twice", lease.key);
                let record = persist(|| self.store.fetch(&lease.key)).await;
                let record = record.unwrap_or_else(|| panic!("{:?} is gone", lease.key));
                assert_eq!(record.outcome(), Some(&outcome), "{:?}", lease.key);
            }
        }
        keys.len()
    }
}

async fn nothing_acknowledged_is_lost_when_the_server_is_killed_under_load() {
    let server = RedisServer::start(DURABLE).unwrap();
    let store = Arc::new(RedisStore::connect(&server.url(), fresh_config()).await.unwrap());
    let load = Load::start(store, "killed", 64);
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(400)).await;
        tokio::task::block_in_place(|| server.crash_and_restart()).unwrap();
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let keys = load.end().await;
    println!("{keys} keys");
    assert!(keys > 200, "only {keys} keys");
}

/// Each script is about one key, so it runs wherever the key's slot is. Slots go from master to master and back.
async fn pitfall_42_slots_move_under_load() {
    let cluster = RedisCluster::start(&[]).unwrap();
    let config = fresh_config();
    let store = Arc::new(RedisStore::connect_cluster(cluster.urls(), config.clone()).await.unwrap());
    // Slots of the first master that the load uses.
    let slots: Vec<u16> = (0..16_384)
        .filter(|slot| *slot < 5_461)
        .filter(|slot| {
            (0..32).flat_map(|caller| (0..40).map(move |number| (caller, number))).any(|(caller, number)| {
                let key = Key::new("moved", &format!("{caller}-{number}")).unwrap();
                Slot::for_key(name(&config, &key)) == Slot::new(*slot).unwrap()
            })
        })
        .take(150)
        .collect();
    assert!(slots.len() >= 100);
    let load = Load::start(store, "moved", 64);
    tokio::task::block_in_place(|| {
        for round in 0..2 {
            for slot in &slots {
                cluster.move_slot(*slot, round, round + 1).unwrap();
            }
        }
    });
    let keys = load.end().await;
    println!("{keys} keys, {} slots moved twice", slots.len());
    assert!(keys > 100, "only {keys} keys");
}

/// Nothing waits for replicas here, so what was acknowledged in the last moment may be lost; and the callers go on.
async fn a_master_of_a_cluster_is_killed_under_load() {
    let cluster = RedisCluster::start(&[]).unwrap();
    let store = Arc::new(RedisStore::connect_cluster(cluster.urls(), fresh_config()).await.unwrap());
    for at in 0..200 {
        acquire(&*store, &Reserve::new(Key::new("before", &at.to_string()).unwrap())).await;
    }
    // They are on the replicas before the master goes.
    tokio::task::block_in_place(|| {
        for master in cluster.masters() {
            master.must(&["WAIT", "1", "5000"]).unwrap();
        }
        std::thread::sleep(Duration::from_millis(200));
        cluster.nodes()[0].crash().unwrap();
    });
    let begun = Instant::now();
    for at in 0..200 {
        let key = Key::new("before", &at.to_string()).unwrap();
        let answer = persist_reserve(&store, &Reserve::new(key.clone())).await;
        assert!(matches!(answer, Reservation::InProgress { attempt: 1, .. }), "{answer:?}");
    }
    println!("the replica has taken over after {:?}", begun.elapsed());
    let lease = persist_reserve(&store, &Reserve::new(Key::new("after", "1").unwrap())).await;
    assert!(matches!(lease, Reservation::Acquired(_)));
}

async fn calls_to_a_cluster_wait_for_their_turn_and_are_refused_beyond_the_queue() {
    let cluster = RedisCluster::start(&[]).unwrap();
    for (queue, calls) in [(10_000, 3_000_usize), (4, 3_000)] {
        let config = fresh_config().with_batching(Batching::default().with_queue(queue));
        let store = Arc::new(persist(|| RedisStore::connect_cluster(cluster.urls(), config.clone())).await);
        let mut tasks = tokio::task::JoinSet::new();
        for at in 0..calls {
            let (store, key) = (store.clone(), Key::new("queued", &at.to_string()).unwrap());
            tasks.spawn(async move { (store.reserve(&Reserve::new(key.clone())).await, key) });
        }
        let mut refused = 0;
        for (answer, key) in tasks.join_all().await {
            if let Err(error) = answer {
                assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Retryable), "{error:?}");
                let own = std::error::Error::source(&error).and_then(|source| source.downcast_ref());
                assert!(matches!(own, Some(RedisStoreError::QueueFull)), "{error:?}");
                assert_eq!(persist(|| store.fetch(&key)).await, None);
                refused += 1;
            }
        }
        assert!(if queue > calls { refused == 0 } else { (100..calls - 100).contains(&refused) }, "{refused} refused");
    }
}

/// A third of the calls hang, more than may be under way at once.
async fn a_master_of_a_cluster_that_hangs_holds_up_its_own_keys_only() {
    const CALLS: usize = 3_000;
    let cluster = RedisCluster::start(&[]).unwrap();
    let store = Arc::new(RedisStore::connect_cluster(cluster.urls(), fresh_config()).await.unwrap());
    cluster.masters()[0].must(&["CLIENT", "PAUSE", "3000"]).unwrap();
    let answered = Arc::new(AtomicUsize::new(0));
    let mut calls = tokio::task::JoinSet::new();
    for at in 0..CALLS {
        let (store, answered) = (Arc::clone(&store), Arc::clone(&answered));
        calls.spawn(async move {
            persist_reserve(&store, &Reserve::new(Key::new("hung", &at.to_string()).unwrap())).await;
            answered.fetch_add(1, Ordering::SeqCst);
        });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (answered, all) = (answered.load(Ordering::SeqCst), CALLS);
    assert!((all / 2..all * 3 / 4).contains(&answered), "{answered} of {all} are answered while a master hangs");
    calls.join_all().await;
}

async fn a_server_that_is_paused_is_told_in_time_and_no_key_is_lost() {
    let server = RedisServer::start(&[]).unwrap();
    let config =
        fresh_config().with_response_timeout(Duration::from_millis(200)).with_call_timeout(Duration::from_millis(800));
    let store = Arc::new(RedisStore::connect(&server.url(), config).await.unwrap());
    let held = acquire(&*store, &Reserve::new(Key::new("paused", "held").unwrap())).await;
    let sleeper = std::thread::spawn({
        let (port, url) = (server.port(), server.url());
        move || {
            drop(url);
            let client = Client::open(("127.0.0.1", port)).unwrap();
            let mut connection = client.get_connection().unwrap();
            // Nothing else is answered meanwhile.
            idem_redis::redis::cmd("DEBUG").arg("SLEEP").arg(2).query::<()>(&mut connection).unwrap();
        }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let begun = Instant::now();
    let requests: Vec<Reserve> =
        (0..100).map(|at| Reserve::new(Key::new("paused", &at.to_string()).unwrap())).collect();
    let calls: Vec<_> = requests
        .iter()
        .map(|request| {
            let (store, request) = (store.clone(), request.clone());
            tokio::spawn(async move { store.reserve(&request).await })
        })
        .collect();
    for call in calls {
        let error = call.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
        assert_ne!(error.class(), ErrorClass::Permanent, "{error:?}");
    }
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(700) && took < Duration::from_millis(1_800), "{took:?}");
    // The same requests tell, once it is awake: nobody else got in between.
    for request in &requests {
        let Reservation::Acquired(lease) = persist(|| store.reserve(request)).await else { panic!() };
        assert_eq!(lease.attempt, 1);
    }
    store.complete(&held, &Outcome::new(200, "")).await.unwrap();
    sleeper.join().unwrap();
}

async fn the_callers_own_connection_manager_is_enough() {
    let server = RedisServer::start(&[]).unwrap();
    let client = Client::open(server.url()).unwrap();
    let settings = ConnectionManagerConfig::new().set_min_delay(Duration::from_millis(10));
    let manager = ConnectionManager::new_with_config(client, settings).await.unwrap();
    let store = Arc::new(RedisStore::open(manager.clone(), fresh_config()).await.unwrap());
    let load = Load::start(store.clone(), "manager", 32);
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        server.must(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap();
    }
    let keys = load.end().await;
    assert!(keys > 100, "only {keys} keys");
    // The connection is still the caller's.
    let mut manager = manager;
    assert_eq!(idem_redis::redis::cmd("PING").query_async::<String>(&mut manager).await.unwrap(), "PONG");
}

async fn dropped_calls_leave_no_job_and_no_connection() {
    let server = RedisServer::start(&[]).unwrap();
    let store = Arc::new(RedisStore::connect(&server.url(), fresh_config()).await.unwrap());
    let connections = || match server.must(&["INFO", "clients"]).unwrap() {
        Reply::Text(told) => {
            let line = told.lines().find_map(|line| line.strip_prefix("connected_clients:").map(str::to_owned));
            line.unwrap().trim().parse::<u32>().unwrap()
        }
        other => panic!("{other:?}"),
    };
    let before = connections();
    for round in 0..50 {
        let calls: Vec<_> = (0..200)
            .map(|at| {
                let store = store.clone();
                tokio::spawn(async move {
                    let key = Key::new("dropped", &format!("{round}-{at}")).unwrap();
                    store.reserve(&Reserve::new(key)).await.map(drop)
                })
            })
            .collect();
        tokio::task::yield_now().await;
        calls.iter().filter(|_| rand_bool()).for_each(tokio::task::JoinHandle::abort);
        for call in calls {
            if let Ok(answer) = call.await {
                answer.unwrap();
            }
        }
    }
    assert_eq!(connections(), before);
    let begun = Instant::now();
    for at in 0..100 {
        acquire(&*store, &Reserve::new(Key::new("after", &at.to_string()).unwrap())).await;
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
}

fn rand_bool() -> bool {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0).is_multiple_of(2)
}

/// A sender that waited for its only caller's next call would keep it on the long way for ever.
async fn one_caller_takes_the_short_way_again_when_the_others_have_gone() {
    let server = RedisServer::start(&[]).unwrap();
    let crowd_and_one = || async {
        let store = RedisStore::connect(&server.url(), fresh_config()).await.unwrap();
        let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
        let before = tasks();
        let reserve = async |name: &str| acquire(&store, &Reserve::new(Key::new("crowd", name).unwrap())).await;
        tokio::join!(reserve("a"), reserve("b"), reserve("c"), reserve("d"), reserve("e"), reserve("f"));
        for name in ["g", "h", "i"] {
            reserve(name).await;
        }
        assert_eq!(tasks(), before, "a sender is at work");
    };
    // On one thread, so that nothing runs between an answer and what its caller does next.
    let alone =
        || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(crowd_and_one());
    std::thread::scope(|scope| scope.spawn(alone).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
