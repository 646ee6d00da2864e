//! What lies in the server: its life, its bytes, and the ways to look at it.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    ErrorClass, ErrorKind, Failure, Fingerprint, Key, KeyStore, OnAbandoned, Origin, Outcome, Reservation, Reserve,
    State, Withheld,
};
use idem_redis::redis::aio::MultiplexedConnection;
use idem_redis::redis::{Client, cmd};
use idem_redis::{Config, Prefix, RedisStore};
use idem_testkit::servers::RedisServer;
use stores::{SERVER, acquire, fresh_config, name};

stores::tests! {
    pitfall_7_every_key_has_a_life_after_every_script,
    pitfall_2_and_44_a_reserve_whose_reply_is_lost_meets_itself,
    pitfall_3_two_callers_of_one_fingerprint_are_two,
    pitfall_5_foreign_values_are_errors_of_every_call,
    pitfall_11_a_lease_of_no_time_is_refused,
    pitfall_14_an_older_attempt_of_the_same_worker_is_refused,
    pitfall_18_a_late_call_counts_its_deadlines_from_now,
    damaged_records_are_errors_or_read_as_they_are,
    a_redis_that_forgets_its_scripts_is_told_them_again,
    records_survive_a_rename_and_a_move_to_another_server,
    operators_go_through_the_records,
    hash_tags_of_clients_mean_nothing,
    a_key_can_be_looked_up_with_the_inspection_script,
}

async fn opened() -> (Config, RedisStore, MultiplexedConnection) {
    let config = fresh_config();
    let store = RedisStore::connect(&SERVER.url(), config.clone()).await.unwrap();
    let admin = Client::open(SERVER.url()).unwrap().get_multiplexed_async_connection().await.unwrap();
    (config, store, admin)
}

fn key(id: &str) -> Key {
    Key::new("records", id).unwrap()
}

fn request(id: &str) -> Reserve {
    Reserve::new(key(id)).with_lease(Duration::from_secs(10)).with_retention(Duration::from_secs(100))
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Through every change of state that there is, under both policies, with and without a fingerprint: the key has an expiry,
/// which comes later than the record's own, and not much later.
async fn pitfall_7_every_key_has_a_life_after_every_script() {
    let (config, store, mut admin) = opened().await;
    let mut looked = 0;
    let mut look = async |id: &str, what: &str| {
        let left: i64 = cmd("PTTL").arg(name(&config, &key(id))).query_async(&mut admin).await.unwrap();
        assert!(left > 0, "{what}: PTTL {left}");
        let left = Duration::from_millis(left.unsigned_abs());
        if let Some(record) = store.fetch(&key(id)).await.unwrap() {
            let life = record.expires_in();
            assert!(left >= life, "{what}: the server's {left:?} end before the record's {life:?}");
            assert!(left <= life + Duration::from_secs(60), "{what}: {left:?} for {life:?}");
        }
        looked += 1;
    };
    for print in [None, Some(Fingerprint::of("print"))] {
        let id = &format!("{}", print.is_some());
        let request = || request(id).with_fingerprint(print);
        let first = acquire(&store, &request()).await;
        look(id, "reserved").await;
        store.renew(&first, Duration::from_secs(20)).await.unwrap();
        look(id, "renewed within its retention").await;
        store.renew(&first, Duration::from_secs(1)).await.unwrap();
        look(id, "renewed by less than it has").await;
        store.renew(&first, DAY).await.unwrap();
        look(id, "renewed beyond its retention").await;
        store.fail(&first, &Failure::truncated("no")).await.unwrap();
        look(id, "failed").await;
        store.fail(&first, &Failure::truncated("no")).await.unwrap();
        look(id, "failed again").await;
        let second = acquire(&store, &request()).await;
        assert_eq!(second.origin, Origin::Retry);
        look(id, "retried").await;
        config.clock_shift.advance(Duration::from_secs(11));
        let refused = store.reserve(&request().with_on_abandoned(OnAbandoned::Refuse)).await.unwrap();
        assert!(matches!(refused, Reservation::Abandoned(_)));
        look(id, "abandoned").await;
        let third = acquire(&store, &request()).await;
        assert!(matches!(third.origin, Origin::Takeover(_)));
        look(id, "taken over").await;
        assert!(store.complete(&second, &Outcome::new(200, "late")).await.is_err());
        store.complete(&third.clone().with_retention(DAY), &Outcome::new(200, "done")).await.unwrap();
        look(id, "completed").await;
        store.reserve(&request()).await.unwrap();
        look(id, "replayed").await;
        config.clock_shift.advance(DAY);
        assert_eq!(store.fetch(&key(id)).await.unwrap(), None);
        look(id, "expired").await;
        acquire(&store, &request()).await;
        look(id, "reserved after it expired").await;
    }
    assert_eq!(looked, 2 * 13);
    // The server's own expiry, in real time.
    let short =
        Reserve::new(key("short")).with_lease(Duration::from_millis(1)).with_retention(Duration::from_millis(5));
    acquire(&store, &short).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let exists: bool = cmd("EXISTS").arg(name(&config, &short.key)).query_async(&mut admin).await.unwrap();
    assert!(!exists, "the server keeps it");
}

/// The answer is lost on its way, again and again: the caller holds the key all the same, as its first attempt.
async fn pitfall_2_and_44_a_reserve_whose_reply_is_lost_meets_itself() {
    let server = RedisServer::start(&[]).unwrap();
    let config =
        fresh_config().with_response_timeout(Duration::from_millis(100)).with_call_timeout(Duration::from_secs(10));
    let store = Arc::new(RedisStore::connect(&server.url(), config).await.unwrap());
    for round in 0..5 {
        let key = Key::new("lost", &round.to_string()).unwrap();
        // The server executes the call, and answers when the caller has long since hung up and asked again.
        server.must(&["CLIENT", "PAUSE", "250", "ALL"]).unwrap();
        let lease = acquire(&*store, &Reserve::new(key.clone())).await;
        assert_eq!((lease.attempt, lease.origin), (1, Origin::Fresh));
        server.must(&["CLIENT", "PAUSE", "250", "ALL"]).unwrap();
        store.complete(&lease, &Outcome::new(200, "once")).await.unwrap();
        let Reservation::Completed(record) = store.reserve(&Reserve::new(key)).await.unwrap() else { panic!() };
        assert_eq!(record.attempt, 1);
    }
    // The driver's connection breaks behind the send.
    let calls: Vec<_> = (0..200)
        .map(|at| {
            let store = store.clone();
            tokio::spawn(
                async move { acquire(&*store, &Reserve::new(Key::new("broken", &at.to_string()).unwrap())).await },
            )
        })
        .collect();
    for _ in 0..20 {
        server.must(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap();
    }
    for call in calls {
        assert_eq!(call.await.unwrap().attempt, 1);
    }
}

async fn pitfall_3_two_callers_of_one_fingerprint_are_two() {
    let (_, store, _) = opened().await;
    let request = request("same").with_fingerprint(Fingerprint::of("same"));
    let other = Reserve::new(request.key.clone()).with_fingerprint(Fingerprint::of("same"));
    acquire(&store, &request).await;
    assert!(matches!(store.reserve(&other).await.unwrap(), Reservation::InProgress { attempt: 1, .. }));
}

/// Values of other programs, and other types of value: an error of every call, counted, and left as they are.
async fn pitfall_5_foreign_values_are_errors_of_every_call() {
    let (config, store, mut admin) = opened().await;
    let lease = acquire(&store, &request("lease")).await;
    let record: Vec<u8> = cmd("GET").arg(name(&config, &lease.key)).query_async(&mut admin).await.unwrap();
    let mut newer = record.clone();
    newer[0] = 210;
    let mut longer = record.clone();
    longer.push(b'x');
    let mut state = record.clone();
    *state.last_mut().unwrap() = b'Q';
    let mut flags = record.clone();
    flags[69] = 6;
    let not_a_number = [&record[..25], &f64::NAN.to_be_bytes(), &record[33..]].concat();
    let infinite = [&record[..1], &f64::NEG_INFINITY.to_be_bytes(), &record[9..]].concat();
    let lease_for_ever = [&record[..17], &f64::INFINITY.to_be_bytes(), &record[25..]].concat();
    let strings = [
        b"".to_vec(),
        b"1".to_vec(),
        b"{\"state\":\"done\",\"status\":200}".to_vec(),
        vec![209],
        vec![209; 200],
        newer,
        longer,
        state,
        flags,
        not_a_number,
        infinite,
        lease_for_ever,
        record[..record.len() - 1].to_vec(),
    ];
    let mut met = 0;
    let mut look = async |key: &Key, what: &str| {
        let lease = idem_core::Lease::new(key.clone(), lease.token, 1, Origin::Fresh, lease.retention);
        let errors = [
            store.reserve(&Reserve::new(key.clone())).await.map(|_| ()),
            store.reserve(&Reserve::new(key.clone()).with_token(lease.token)).await.map(|_| ()),
            store.complete(&lease, &Outcome::new(200, "")).await,
            store.fail(&lease, &Failure::default()).await,
            store.renew(&lease, Duration::from_secs(60)).await,
            store.fetch(key).await.map(|_| ()),
            store.reserve_many(&[Reserve::new(key.clone())]).await.remove(0).map(|_| ()),
            store.complete_many(&[(lease, Outcome::new(200, ""))]).await.remove(0),
        ];
        for (call, error) in errors.into_iter().enumerate() {
            let error = error.err().unwrap_or_else(|| panic!("{what}: call {call} was answered"));
            assert_eq!(
                (error.kind(), error.class()),
                (ErrorKind::Unreadable, ErrorClass::Permanent),
                "{what}: {error:?}"
            );
            met += 1;
        }
    };
    for (at, value) in strings.iter().enumerate() {
        let key = key(&format!("string-{at}"));
        let place = name(&config, &key);
        cmd("SET").arg(&place).arg(value).arg("PX").arg(60_000).query_async::<()>(&mut admin).await.unwrap();
        look(&key, &format!("string {at}")).await;
        let kept: Vec<u8> = cmd("GET").arg(&place).query_async(&mut admin).await.unwrap();
        assert_eq!(&kept, value, "string {at} was changed");
    }
    for (at, write) in ["RPUSH", "SADD", "HSET", "ZADD"].into_iter().enumerate() {
        let key = key(&format!("type-{at}"));
        let mut command = cmd(write);
        command.arg(name(&config, &key)).arg(1);
        if matches!(write, "HSET" | "ZADD") {
            command.arg(1);
        }
        command.query_async::<()>(&mut admin).await.unwrap();
        look(&key, write).await;
    }
    assert_eq!(met, (strings.len() + 4) * 8);
    assert_eq!(store.unreadable(), met as u64);
}

async fn pitfall_11_a_lease_of_no_time_is_refused() {
    let (_, store, _) = opened().await;
    let error = store.reserve(&request("none").with_lease(Duration::ZERO)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let lease = acquire(&store, &request("none")).await;
    assert_eq!(store.renew(&lease, Duration::ZERO).await.unwrap_err().kind(), ErrorKind::InvalidInput);
}

async fn pitfall_14_an_older_attempt_of_the_same_worker_is_refused() {
    let (config, store, _) = opened().await;
    let older = acquire(&store, &request("worker")).await;
    config.clock_shift.advance(Duration::from_secs(11));
    let newer = acquire(&store, &request("worker")).await;
    // Pitfalls 13 and 15: neither does a late fail free the key, nor a late renewal take it back.
    for late in [
        store.complete(&older, &Outcome::new(200, "")).await,
        store.fail(&older, &Failure::default()).await,
        store.renew(&older, Duration::from_secs(60)).await,
    ] {
        assert_eq!(late.unwrap_err().kind(), ErrorKind::LeaseLost);
    }
    store.complete(&newer, &Outcome::new(200, "newer")).await.unwrap();
}

async fn pitfall_18_a_late_call_counts_its_deadlines_from_now() {
    let (config, store, _) = opened().await;
    let lease = acquire(&store, &request("late")).await;
    config.clock_shift.advance(Duration::from_secs(90));
    store.complete(&lease, &Outcome::new(200, "late")).await.unwrap();
    let record = store.fetch(&lease.key).await.unwrap().unwrap();
    assert!(record.expires_in() > Duration::from_secs(98), "{:?}", record.expires_in());
}

/// Every single byte of a record is changed: no call panics, none takes the key for free, and what the scripts accept is
/// what the client reads.
async fn damaged_records_are_errors_or_read_as_they_are() {
    let (config, store, mut admin) = opened().await;
    let lease = acquire(&store, &request("damaged").with_fingerprint(Fingerprint::of("x"))).await;
    let place = name(&config, &lease.key);
    let record: Vec<u8> = cmd("GET").arg(&place).query_async(&mut admin).await.unwrap();
    let mut refused = 0;
    for at in 0..record.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = record.clone();
            damaged[at] ^= flip;
            cmd("SET").arg(&place).arg(damaged).arg("PX").arg(60_000).query_async::<()>(&mut admin).await.unwrap();
            let fetched = store.fetch(&lease.key).await;
            let reserved = store.reserve(&Reserve::new(lease.key.clone()).with_on_abandoned(OnAbandoned::Refuse)).await;
            match fetched {
                // A time of another day makes another record of it, and an honest one.
                Ok(Some(record)) if record.state == State::InProgress => {
                    assert!(!matches!(reserved, Ok(Reservation::Acquired(_))), "byte {at}: {reserved:?}");
                }
                Ok(Some(record)) => panic!("byte {at}: {record:?}"),
                Ok(None) => {}
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unreadable, "byte {at}");
                    assert!(!matches!(reserved, Ok(Reservation::Completed(_))), "byte {at}: {reserved:?}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 20, "{refused}");
}

async fn a_redis_that_forgets_its_scripts_is_told_them_again() {
    let server = RedisServer::start(&[]).unwrap();
    let store = Arc::new(RedisStore::connect(&server.url(), fresh_config()).await.unwrap());
    for round in 0..10 {
        server.must(&["SCRIPT", "FLUSH"]).unwrap();
        let calls: Vec<_> = (0..64)
            .map(|at| {
                let store = store.clone();
                tokio::spawn(async move {
                    let lease = acquire(&*store, &Reserve::new(key(&format!("{round}-{at}")))).await;
                    store.renew(&lease, Duration::from_secs(60)).await.unwrap();
                    store.complete(&lease, &Outcome::new(200, "")).await.unwrap();
                    store.fetch(&lease.key).await.unwrap().unwrap();
                })
            })
            .collect();
        for call in calls {
            call.await.unwrap();
        }
        server.must(&["SCRIPT", "FLUSH"]).unwrap();
        let requests: Vec<Reserve> = (0..64).map(|at| Reserve::new(key(&format!("many-{round}-{at}")))).collect();
        for answer in store.reserve_many(&requests).await {
            assert!(matches!(answer.unwrap(), Reservation::Acquired(_)));
        }
    }
}

async fn records_survive_a_rename_and_a_move_to_another_server() {
    let (config, store, mut admin) = opened().await;
    let lease = acquire(&store, &request("moving").with_fingerprint(Fingerprint::of("x"))).await;
    store.complete(&lease, &Outcome::new(201, "kept").with_header("a", "b")).await.unwrap();
    let before = store.fetch(&lease.key).await.unwrap().unwrap();
    let renamed = fresh_config();
    let (from, to) = (name(&config, &lease.key), name(&renamed, &lease.key));
    cmd("RENAME").arg(&from).arg(&to).query_async::<()>(&mut admin).await.unwrap();
    let moved = RedisStore::connect(&SERVER.url(), renamed.clone()).await.unwrap();
    assert_eq!(store.fetch(&lease.key).await.unwrap(), None);
    assert_eq!(moved.fetch(&lease.key).await.unwrap().unwrap().read(before.read_at), before);
    let other = RedisServer::start(&[]).unwrap();
    cmd("MIGRATE")
        .arg("127.0.0.1")
        .arg(other.port())
        .arg(&to)
        .arg(0)
        .arg(5_000)
        .query_async::<()>(&mut admin)
        .await
        .unwrap();
    let there = RedisStore::connect(&other.url(), renamed).await.unwrap();
    let record = there.fetch(&lease.key).await.unwrap().unwrap();
    assert_eq!(record.read(before.read_at), before);
    assert!(matches!(other.must(&["PTTL", &to]).unwrap(), idem_testkit::servers::Reply::Number(left) if left > 0));
}

async fn operators_go_through_the_records() {
    let (config, store, mut admin) = opened().await;
    let mut expected = BTreeSet::new();
    for at in 0..1_300 {
        let key = Key::new(if at % 3 == 0 { "a" } else { "b{x}:" }, &format!("id:{at}")).unwrap();
        expected.insert(key.clone());
        if at % 3 == 0 {
            let lease = acquire(&store, &Reserve::new(key)).await;
            store.complete(&lease, &Outcome::withheld(200, Withheld::Secret)).await.unwrap();
        } else {
            acquire(&store, &Reserve::new(key)).await;
        }
    }
    // Somebody else's keys under a longer prefix of the same beginning, and what cannot be read.
    let other = Prefix::new(format!("{}-other", config.prefix.as_str())).unwrap();
    let neighbour = RedisStore::connect(&SERVER.url(), Config::default().with_prefix(other)).await.unwrap();
    acquire(&neighbour, &request("neighbour")).await;
    let garbled = Key::new("a", "garbled").unwrap();
    cmd("SET").arg(name(&config, &garbled)).arg("x").arg("PX").arg(60_000).query_async::<()>(&mut admin).await.unwrap();

    let (mut found, mut unreadable) = (BTreeSet::new(), Vec::new());
    let mut scan = store.scan(None);
    while let Some(page) = scan.next().await.unwrap() {
        for scanned in page {
            match scanned.record {
                Ok(record) => {
                    assert_eq!(record.key, scanned.key);
                    assert_eq!(record.outcome().is_some(), scanned.key.scope() == "a");
                    found.insert(scanned.key);
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unreadable);
                    unreadable.push(scanned.key);
                }
            }
        }
    }
    found.retain(|key| key.id() != "idem-probe");
    assert_eq!(found, expected);
    unreadable.dedup();
    assert_eq!(unreadable, [garbled]);
    let mut of_a = BTreeSet::new();
    let mut scan = store.scan(Some("a"));
    while let Some(page) = scan.next().await.unwrap() {
        of_a.extend(page.into_iter().filter(|scanned| scanned.record.is_ok()).map(|scanned| scanned.key));
    }
    expected.retain(|key| key.scope() == "a");
    assert_eq!(of_a, expected);
}

async fn hash_tags_of_clients_mean_nothing() {
    use idem_redis::redis::cluster_routing::Slot;
    let config = fresh_config();
    let slots: BTreeSet<String> = (0..50)
        .map(|at| {
            let key = Key::new("{tenant}", &format!("{{hot}}{at}")).unwrap();
            format!("{:?}", Slot::for_key(name(&config, &key)))
        })
        .collect();
    assert!(slots.len() > 40, "{slots:?}");
}

async fn a_key_can_be_looked_up_with_the_inspection_script() {
    let (config, store, mut admin) = opened().await;
    let lease = acquire(&store, &request("looked-up").with_fingerprint(Fingerprint::of("x"))).await;
    let script = include_str!("../src/scripts/inspect.lua");
    let mut look = async || {
        let mut eval = cmd("EVAL");
        eval.arg(script).arg(1).arg(name(&config, &lease.key));
        eval.query_async::<Vec<String>>(&mut admin).await.unwrap().join("\n")
    };
    let held = look().await;
    assert!(held.contains("in progress") && held.contains("attempt 1") && held.contains("fingerprint"), "{held}");
    assert!(held.contains("lease ends in "), "{held}");
    store.complete(&lease, &Outcome::new(201, "charged").with_header("a", "b")).await.unwrap();
    let done = look().await;
    assert!(done.contains("completed, code 201, 1 header lines") && done.contains("expires in "), "{done}");
}
