//! What a server may be, and what is told about one that cannot be used or may lose records.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use idem_core::executor::Executor;
use idem_core::{ErrorClass, ErrorKind, Failure, Key, KeyStore, Outcome, Reservation, Reserve, StoreError};
use idem_redis::redis::{Client, cmd};
use idem_redis::{
    Acknowledge, Batching, Config, Finding, Fsync, Policy, Prefix, RedisStore, RedisStoreError, ServerReport,
};
use idem_testkit::servers::{RedisFailover, RedisServer, Reply};
use stores::{acquire, fresh_config, persist};

stores::tests! {
    a_wrong_password_is_told,
    a_user_without_rights_is_told_so,
    a_replica_is_refused,
    a_cluster_given_as_a_server_and_the_other_way_round_are_told,
    a_server_below_6_2_is_refused,
    a_server_that_is_not_there_is_told_in_time,
    a_server_that_never_answers_is_told_in_time,
    a_url_that_is_none_is_told_without_its_password,
    pitfall_43_a_server_that_evicts_is_refused,
    pitfall_43_what_a_server_may_lose_is_reported,
    what_the_server_does_not_tell_is_said,
    a_full_server_takes_nothing_new_and_keeps_what_it_has,
    a_full_server_does_not_let_the_operation_run,
    a_full_queue_refuses_and_does_nothing,
    waiting_for_a_disk_needs_a_server_that_can,
    many_stores_open_at_once,
}

fn own(error: &StoreError) -> &RedisStoreError {
    error.source().unwrap().downcast_ref().unwrap_or_else(|| panic!("{error:?}"))
}

fn is_permanent(error: &StoreError) {
    assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Permanent), "{error:?}");
    assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
}

fn key(id: &str) -> Key {
    Key::new("setup", id).unwrap()
}

async fn a_wrong_password_is_told() {
    let server = RedisServer::start(&[("requirepass", "right")]).unwrap();
    let address = format!("127.0.0.1:{}", server.port());
    RedisStore::connect(&format!("redis://:right@{address}"), fresh_config()).await.unwrap();
    for url in
        [format!("redis://:secret@{address}"), format!("redis://nobody:secret@{address}"), format!("redis://{address}")]
    {
        is_permanent(&RedisStore::connect(&url, fresh_config()).await.unwrap_err());
    }
    // The password changes while a store is open: an error of the right class, and never "absent".
    let store = RedisStore::connect(&format!("redis://:right@{address}"), fresh_config()).await.unwrap();
    let client = Client::open(format!("redis://:right@{address}")).unwrap();
    let mut admin = client.get_multiplexed_async_connection().await.unwrap();
    cmd("CONFIG").arg("SET").arg("requirepass").arg("other").query_async::<()>(&mut admin).await.unwrap();
    cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal").query_async::<i64>(&mut admin).await.unwrap();
    let error = store.reserve(&Reserve::new(key("a"))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
}

async fn a_user_without_rights_is_told_so() {
    let server = RedisServer::start(&[]).unwrap();
    let address = format!("127.0.0.1:{}", server.port());
    let config = fresh_config();
    let keys = format!("~{}*", config.prefix.as_str());
    for (user, rights) in [
        ("noscripts", &["-@all", "+info", "+get", "+set", "+time"][..]),
        ("nowrites", &["-@all", "+info", "+evalsha", "+eval", "+get", "+time"]),
        ("nokeys", &["resetkeys", "-@all", "+info", "+evalsha", "+eval", "+get", "+set", "+time"]),
    ] {
        let words = [&["ACL", "SETUSER", user, "on", "nopass", &keys], rights].concat();
        server.must(&words).unwrap();
        let url = format!("redis://{user}:secret@{address}");
        is_permanent(&RedisStore::connect(&url, config.clone()).await.unwrap_err());
    }
    let words = [&["ACL", "SETUSER", "enough", "on", ">secret", &keys], stores::RIGHTS].concat();
    server.must(&words).unwrap();
    let store = RedisStore::connect(&format!("redis://enough:secret@{address}"), config.clone()).await.unwrap();
    acquire(&store, &Reserve::new(key("a"))).await;
    // They are taken away while a store is open.
    server.must(&["ACL", "SETUSER", "enough", "-evalsha"]).unwrap();
    is_permanent(&store.reserve(&Reserve::new(key("b"))).await.unwrap_err());
    is_permanent(&store.fetch(&key("a")).await.unwrap_err());
}

async fn a_replica_is_refused() {
    let servers = RedisFailover::start(&[]).unwrap();
    let [master, replica] = servers.servers();
    let error = RedisStore::connect(&replica.url(), fresh_config()).await.unwrap_err();
    is_permanent(&error);
    assert!(matches!(own(&error), RedisStoreError::Replica));
    // The master becomes a replica while a store is open: the call had no effect, and another server may take it.
    let config = fresh_config().with_call_timeout(Duration::from_millis(600));
    let store = RedisStore::connect(&master.url(), config).await.unwrap();
    master.must(&["REPLICAOF", "127.0.0.1", &replica.port().to_string()]).unwrap();
    let error = store.reserve(&Reserve::new(key("a"))).await.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Retryable), "{error:?}");
}

async fn a_cluster_given_as_a_server_and_the_other_way_round_are_told() {
    let node = RedisServer::start(&[("cluster-enabled", "yes")]).unwrap();
    let error = RedisStore::connect(&node.url(), fresh_config()).await.unwrap_err();
    is_permanent(&error);
    assert!(matches!(own(&error), RedisStoreError::IsCluster));
    let single = RedisServer::start(&[("requirepass", "right")]).unwrap();
    let url = |password: &str| format!("redis://:{password}@127.0.0.1:{}", single.port());
    let error = RedisStore::connect_cluster([url("right")], fresh_config()).await.unwrap_err();
    is_permanent(&error);
    assert!(matches!(own(&error), RedisStoreError::IsNoCluster));
    is_permanent(&RedisStore::connect_cluster([url("secret")], fresh_config()).await.unwrap_err());
    let none: [&str; 0] = [];
    is_permanent(&RedisStore::connect_cluster(none, fresh_config()).await.unwrap_err());
}

/// No such server is at hand: this one says that it is 6.0, and nothing else.
async fn a_server_below_6_2_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(2) {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while let Some(Ok(line)) = lines.next() {
                let answer = match line.as_str() {
                    "CLIENT" => "-ERR unknown subcommand\r\n".to_owned(),
                    "INFO" => {
                        let told = "redis_version:6.0.16\r\nrole:master\r\n";
                        format!("${}\r\n{told}\r\n", told.len())
                    }
                    _ => continue,
                };
                stream.write_all(answer.as_bytes()).unwrap();
            }
        }
    });
    let error = RedisStore::connect(&format!("redis://127.0.0.1:{port}"), fresh_config()).await.unwrap_err();
    is_permanent(&error);
    assert!(matches!(own(&error), RedisStoreError::ServerTooOld { found } if found == "6.0.16"));
}

async fn a_server_that_is_not_there_is_told_in_time() {
    let config = fresh_config().with_call_timeout(Duration::from_millis(500));
    let begun = Instant::now();
    let one = RedisStore::connect("redis://app:secret@127.0.0.1:1", config.clone()).await.unwrap_err();
    let cluster = RedisStore::connect_cluster(["redis://app:secret@127.0.0.1:1"], config.clone()).await.unwrap_err();
    let sentinel = RedisStore::connect_sentinel(["redis://app:secret@127.0.0.1:1"], "m", config).await.unwrap_err();
    for error in [one, cluster, sentinel] {
        assert_eq!(error.class(), ErrorClass::Retryable, "{error:?}");
        assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // It goes away while a store is open.
    let server = RedisServer::start(&[]).unwrap();
    let config = fresh_config().with_call_timeout(Duration::from_millis(700));
    let store = RedisStore::connect(&server.url(), config).await.unwrap();
    let lease = acquire(&store, &Reserve::new(key("a"))).await;
    server.crash().unwrap();
    let begun = Instant::now();
    let error = store.complete(&lease, &Outcome::new(200, "")).await.unwrap_err();
    assert_ne!(error.class(), ErrorClass::Permanent, "{error:?}");
    let error = store.fetch(&key("a")).await.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Retryable), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
}

/// It accepts connections, and that is all.
async fn a_server_that_never_answers_is_told_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://127.0.0.1:{}", listener.local_addr().unwrap().port());
    let config =
        fresh_config().with_call_timeout(Duration::from_millis(900)).with_response_timeout(Duration::from_millis(300));
    let begun = Instant::now();
    let error = RedisStore::connect(&url, config).await.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Timeout, ErrorClass::Retryable), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
}

async fn a_url_that_is_none_is_told_without_its_password() {
    for url in ["", "localhost", "http://app:secret@localhost", "redis://app:secret@localhost:x"] {
        is_permanent(&RedisStore::connect(url, fresh_config()).await.unwrap_err());
    }
    assert!(matches!(Prefix::new("a*"), Err(RedisStoreError::Prefix)));
    let store = RedisStore::connect(&stores::SERVER.url(), fresh_config()).await.unwrap();
    assert!(!format!("{store:?}").contains("127.0.0.1"), "{store:?}");
}

async fn pitfall_43_a_server_that_evicts_is_refused() {
    for policy in ["allkeys-lru", "volatile-ttl", "allkeys-random"] {
        let server = RedisServer::start(&[("maxmemory", "8mb"), ("maxmemory-policy", policy)]).unwrap();
        let config = Config::default().with_on_data_loss(Policy::Ignore);
        let error = RedisStore::connect(&server.url(), config.clone()).await.unwrap_err();
        is_permanent(&error);
        let found = [Finding::Evicts { policy: policy.to_owned() }];
        assert!(matches!(own(&error), RedisStoreError::Unsafe(findings) if *findings == found), "{error:?}");
        RedisStore::connect(&server.url(), config.with_on_eviction(Policy::Warn)).await.unwrap();
    }
    // What the check is there for: with eviction, a held key is held by somebody else soon.
    let server = RedisServer::start(&[("maxmemory", "3mb"), ("maxmemory-policy", "allkeys-lru")]).unwrap();
    let store = RedisStore::connect(&server.url(), fresh_config().with_on_eviction(Policy::Ignore)).await.unwrap();
    let mut lost = 0;
    let requests: Vec<Reserve> = (0..20_000).map(|at| Reserve::new(key(&at.to_string()))).collect();
    for part in requests.chunks(1_000) {
        store.reserve_many(part).await;
    }
    for part in requests.chunks(1_000) {
        let again: Vec<Reserve> = part.iter().map(|request| Reserve::new(request.key.clone())).collect();
        let answers = store.reserve_many(&again).await;
        lost += answers.iter().filter(|answer| matches!(answer, Ok(Reservation::Acquired(_)))).count();
    }
    assert!(lost > 100, "only {lost} of 20,000 keys were given out twice: the server does not evict");
}

async fn report(settings: &[(&str, &str)], config: Config) -> ServerReport {
    let server = RedisServer::start(settings).unwrap();
    let store = RedisStore::connect(&server.url(), config).await.unwrap();
    let mut reports = store.check_server().await.unwrap();
    assert_eq!(reports.len(), 1);
    reports.remove(0)
}

async fn pitfall_43_what_a_server_may_lose_is_reported() {
    let findings = async |settings: &[(&str, &str)]| report(settings, fresh_config()).await.findings;
    assert_eq!(findings(&[]).await, [Finding::NoPersistence]);
    assert_eq!(findings(&[("save", "60 1")]).await, [Finding::SnapshotsOnly]);
    let aof = |sync| [("appendonly", "yes"), ("appendfsync", sync)];
    assert_eq!(findings(&aof("no")).await, [Finding::NeverSyncs]);
    assert_eq!(findings(&aof("everysec")).await, [Finding::SyncsEverySecond]);
    assert_eq!(findings(&aof("always")).await, []);

    let told = report(&aof("always"), fresh_config().with_on_data_loss(Policy::Refuse)).await;
    assert!(told.version.split('.').count() >= 3 && told.node.is_none(), "{told:?}");
    let server = RedisServer::start(&[]).unwrap();
    let refused = RedisStore::connect(&server.url(), fresh_config().with_on_data_loss(Policy::Refuse)).await;
    let error = refused.unwrap_err();
    is_permanent(&error);
    assert!(matches!(own(&error), RedisStoreError::Unsafe(findings) if *findings == [Finding::NoPersistence]));

    let servers = RedisFailover::start(&aof("always")).unwrap();
    let url = servers.servers()[0].url();
    let found = async |acknowledge| {
        let config = fresh_config().with_acknowledge(acknowledge);
        RedisStore::connect(&url, config).await.unwrap().check_server().await.unwrap().remove(0).findings
    };
    assert_eq!(found(Acknowledge::default()).await, [Finding::ReplicasNotAwaited { replicas: 1 }]);
    assert_eq!(found(Acknowledge::replicas(1)).await, []);
    assert_eq!(found(Acknowledge::replicas(2)).await, [Finding::TooFewReplicas { replicas: 1, wanted: 2 }]);
}

/// As by most providers, who forbid `CONFIG`.
async fn what_the_server_does_not_tell_is_said() {
    let server = RedisServer::start(&[("appendonly", "yes")]).unwrap();
    server.must(&["ACL", "SETUSER", "default", "-config"]).unwrap();
    let store = RedisStore::connect(&server.url(), fresh_config()).await.unwrap();
    let report = store.check_server().await.unwrap().remove(0);
    assert_eq!(report.findings, [Finding::NotTold { setting: "appendfsync" }]);
}

/// Fills a server with what is nobody's.
fn fill(server: &RedisServer) {
    server.must(&["CONFIG", "SET", "maxmemory", "1"]).unwrap();
    assert!(matches!(server.command(&["SET", "x", "y"]).unwrap(), Reply::Error(error) if error.starts_with("OOM")));
}

async fn a_full_server_takes_nothing_new_and_keeps_what_it_has() {
    let server = RedisServer::start(&[]).unwrap();
    let store = RedisStore::connect(&server.url(), fresh_config()).await.unwrap();
    let outcome = Outcome::new(200, vec![b'x'; 10_000]);
    let [held, failing, renewed, done] = ["held", "failing", "renewed", "done"].map(|id| Reserve::new(key(id)));
    let lease = acquire(&store, &held).await;
    let (failing, renewed) = (acquire(&store, &failing).await, acquire(&store, &renewed).await);
    store.complete(&acquire(&store, &done).await, &outcome).await.unwrap();
    fill(&server);

    let refused = store.reserve(&Reserve::new(key("new"))).await.unwrap_err();
    assert_eq!((refused.kind(), refused.class()), (ErrorKind::Full, ErrorClass::Retryable), "{refused:?}");
    assert_eq!(store.fetch(&key("new")).await.unwrap(), None);
    // What runs is not run again: its result is taken, its lease renewed, its failure recorded.
    assert_eq!(acquire(&store, &held).await, lease);
    store.complete(&lease, &outcome).await.unwrap();
    store.renew(&renewed, Duration::from_secs(3_600)).await.unwrap();
    store.fail(&failing, &Failure::truncated("no")).await.unwrap();
    for id in ["held", "done"] {
        let Reservation::Completed(record) = store.reserve(&Reserve::new(key(id))).await.unwrap() else {
            panic!("{id}")
        };
        assert_eq!(record.outcome(), Some(&outcome));
    }
    let left = store.fetch(&key("renewed")).await.unwrap().unwrap().lease_remaining();
    assert!(left > Duration::from_secs(3_500), "{left:?}");
    server.must(&["CONFIG", "SET", "maxmemory", "0"]).unwrap();
    acquire(&store, &Reserve::new(key("new"))).await;
}

async fn a_full_server_does_not_let_the_operation_run() {
    let server = RedisServer::start(&[]).unwrap();
    let store = RedisStore::connect(&server.url(), fresh_config()).await.unwrap();
    fill(&server);
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    let result = Executor::new(store)
        .run(&key("charge"), None, move |_| async move {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok::<_, std::io::Error>("charged".to_owned())
        })
        .await;
    assert!(result.is_err());
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

async fn a_full_queue_refuses_and_does_nothing() {
    let server = RedisServer::start(&[]).unwrap();
    let config = fresh_config().with_batching(Batching::default().with_queue(4).with_calls(2).with_pipelines(1));
    let store = Arc::new(RedisStore::connect(&server.url(), config).await.unwrap());
    server.must(&["CLIENT", "PAUSE", "400"]).unwrap();
    let calls: Vec<_> = (0..40)
        .map(|at| {
            let store = store.clone();
            tokio::spawn(async move { store.reserve(&Reserve::new(key(&at.to_string()))).await })
        })
        .collect();
    let (mut reserved, mut refused) = (0, 0);
    for (at, call) in calls.into_iter().enumerate() {
        match call.await.unwrap() {
            Ok(_) => reserved += 1,
            Err(error) => {
                assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Retryable), "{error:?}");
                assert!(matches!(own(&error), RedisStoreError::QueueFull));
                let key = key(&at.to_string());
                assert_eq!(persist(|| store.fetch(&key)).await, None);
                refused += 1;
            }
        }
    }
    assert!(reserved >= 4 && refused >= 10, "{reserved} reserved, {refused} refused");
}

async fn waiting_for_a_disk_needs_a_server_that_can() {
    let aof = [("appendonly", "yes"), ("appendfsync", "everysec")];
    let server = RedisServer::start(&aof).unwrap();
    let waits = |fsync| fresh_config().with_acknowledge(Acknowledge::default().with_fsync(fsync));
    let opened = RedisStore::connect(&server.url(), waits(Fsync::Server)).await;
    let knows = server.command(&["WAITAOF", "0", "0", "1"]).unwrap() != Reply::Nil
        && !matches!(server.command(&["WAITAOF", "0", "0", "1"]).unwrap(), Reply::Error(_));
    if !knows {
        // Before version 7.2.
        let error = opened.unwrap_err();
        is_permanent(&error);
        assert!(matches!(own(&error), RedisStoreError::NoWaitAof), "{error:?}");
        return;
    }
    let store = opened.unwrap();
    let lease = acquire(&store, &Reserve::new(key("a"))).await;
    store.complete(&lease, &Outcome::new(200, "synced")).await.unwrap();
    // Written, and not synced in time: it has happened, and may be lost.
    let strict = Acknowledge::replicas(1).with_fsync(Fsync::ServerAndReplicas).with_timeout(Duration::from_millis(50));
    let store = RedisStore::connect(&server.url(), fresh_config().with_acknowledge(strict)).await.unwrap();
    let error = store.reserve(&Reserve::new(key("b"))).await.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Unknown), "{error:?}");
    assert!(matches!(own(&error), RedisStoreError::TooFewAcknowledged { wanted: 2, .. }), "{error:?}");
    assert!(store.fetch(&key("b")).await.is_err(), "a fetch tells of nothing that is not acknowledged");
}

async fn many_stores_open_at_once() {
    let server = RedisServer::start(&[]).unwrap();
    let mut opened = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let url = server.url();
        opened.spawn(async move { RedisStore::connect(&url, fresh_config()).await.map(drop) });
    }
    for result in opened.join_all().await {
        result.unwrap();
    }
    let config = fresh_config().with_acknowledge(Acknowledge::replicas(1).with_timeout(Duration::from_secs(1)));
    let error = RedisStore::connect(&server.url(), config).await.unwrap_err();
    assert!(matches!(own(&error), RedisStoreError::AcknowledgeTimeout));
}
