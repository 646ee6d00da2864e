//! Servers that die, networks that are cut, clocks that differ, clusters that are not there.

mod absent;
#[cfg(fdb_client)]
mod stores;

absent::tests! { cases:
    histories_while_the_server_is_killed_have_a_legal_order,
    histories_while_the_network_is_cut_have_a_legal_order,
    a_cluster_goes_on_when_one_of_its_processes_dies,
    a_cluster_that_does_not_answer_costs_no_more_than_the_bound,
    what_is_not_a_cluster_is_refused_clearly,
    clocks_within_the_bound_never_take_over_early,
    beyond_the_bound_a_take_over_comes_early_by_the_rest_and_is_fenced,
    a_locked_database_is_an_error_and_not_an_absent_record,
    few_tries_are_an_error_of_its_own,
}

#[cfg(fdb_client)]
mod cases {
    #![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

    use std::collections::HashMap;
    use std::error::Error;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use async_trait::async_trait;
    use idem_core::clock::ManualClock;
    use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, OnAbandoned, Outcome, Reservation, Reserve};
    use idem_fdb::{Config, FdbStore, FdbStoreError};
    use idem_testkit::servers::FdbCluster;
    use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Time};
    use tokio::io::copy_bidirectional;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::watch;
    use tokio::task::{block_in_place, spawn_blocking};

    use super::stores::{CLUSTER, Cluster, acquire, fresh_config, open, persist};

    fn key(id: &str) -> Key {
        Key::new("scope", id).unwrap()
    }

    /// A cluster of one process that is killed again and again.
    struct Killed;

    struct Fresh<T> {
        trouble: T,
        clock: Arc<ManualClock>,
        store: Arc<FdbStore>,
    }

    #[async_trait]
    impl Harness for Killed {
        fn name(&self) -> String {
            "fdb, killed".to_owned()
        }

        fn abilities(&self) -> Abilities {
            Abilities::default().with_time(Time::Manual).with_disturb()
        }

        async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
            let cluster = spawn_blocking(FdbCluster::start).await??;
            let clock = Arc::new(ManualClock::default());
            let config = fresh_config().with_clock(clock.clone()).with_max_clock_skew(Duration::ZERO);
            let store = Arc::new(FdbStore::open(Some(&cluster.cluster_file()), config).await?);
            Ok(Box::new(Fresh { trouble: Arc::new(cluster), clock, store }))
        }
    }

    #[async_trait]
    impl Fixture for Fresh<Arc<FdbCluster>> {
        fn store(&self) -> Arc<dyn KeyStore> {
            self.store.clone()
        }

        async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
            self.clock.advance(by);
            Ok(())
        }

        async fn disturb(&self) -> Result<(), HarnessError> {
            let cluster = self.trouble.clone();
            Ok(spawn_blocking(move || {
                cluster.crash(0)?;
                cluster.up(0)?;
                cluster.wait()
            })
            .await??)
        }
    }

    async fn run_disturbed(harness: impl Harness, histories: u64) {
        let ran = spawn_blocking(move || idem_testkit::run_disturbed_histories(&harness, histories)).await.unwrap();
        println!("{} histories", ran.unwrap_or_else(|report| panic!("{report}")));
    }

    pub(crate) async fn histories_while_the_server_is_killed_have_a_legal_order() {
        run_disturbed(Killed, 2).await;
    }

    /// A network between the client and a cluster of one process, which can be cut.
    struct Network {
        cut: watch::Sender<bool>,
        connections: Arc<AtomicU64>,
    }

    impl Network {
        /// Leads connections to that port on to the other one.
        fn start(listener: TcpListener, to: u16) -> Self {
            let (cut, seen) = watch::channel(false);
            let connections = Arc::new(AtomicU64::new(0));
            let counted = connections.clone();
            tokio::spawn(async move {
                while let Ok((mut client, _)) = listener.accept().await {
                    let mut cut = seen.clone();
                    if *cut.borrow() {
                        continue;
                    }
                    counted.fetch_add(1, Ordering::Relaxed);
                    tokio::spawn(async move {
                        let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)).await else { return };
                        tokio::select! {
                            _ = copy_bidirectional(&mut client, &mut server) => {}
                            _ = cut.wait_for(|cut| *cut) => {}
                        }
                    });
                }
            });
            Self { cut, connections }
        }

        fn set(&self, cut: bool) {
            self.cut.send_replace(cut);
        }
    }

    /// A cluster of one process behind a network that can be cut.
    async fn behind_a_network() -> Result<(Arc<FdbCluster>, Network), HarnessError> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let cluster = Arc::new(spawn_blocking(move || FdbCluster::start_behind(port)).await??);
        let network = Network::start(listener, cluster.port());
        let configured = cluster.clone();
        spawn_blocking(move || configured.configure("single")).await??;
        Ok((cluster, network))
    }

    struct Cut;

    #[async_trait]
    impl Harness for Cut {
        fn name(&self) -> String {
            "fdb, cut off".to_owned()
        }

        fn abilities(&self) -> Abilities {
            Abilities::default().with_time(Time::Manual).with_disturb()
        }

        async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
            let (cluster, network) = behind_a_network().await?;
            let clock = Arc::new(ManualClock::default());
            let config = fresh_config().with_clock(clock.clone()).with_max_clock_skew(Duration::ZERO);
            let store = Arc::new(FdbStore::open(Some(&cluster.cluster_file()), config).await?);
            Ok(Box::new(Fresh { trouble: (cluster, network), clock, store }))
        }
    }

    #[async_trait]
    impl Fixture for Fresh<(Arc<FdbCluster>, Network)> {
        fn store(&self) -> Arc<dyn KeyStore> {
            self.store.clone()
        }

        async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
            self.clock.advance(by);
            Ok(())
        }

        async fn disturb(&self) -> Result<(), HarnessError> {
            let (_cluster, network) = &self.trouble;
            network.set(true);
            tokio::time::sleep(Duration::from_millis(300)).await;
            network.set(false);
            Ok(())
        }
    }

    pub(crate) async fn histories_while_the_network_is_cut_have_a_legal_order() {
        run_disturbed(Cut, 2).await;
    }

    pub(crate) async fn a_cluster_goes_on_when_one_of_its_processes_dies() {
        let cluster = Arc::new(spawn_blocking(|| FdbCluster::start_double(4)).await.unwrap().unwrap());
        let config = fresh_config();
        let store = Arc::new(FdbStore::open(Some(&cluster.cluster_file()), config).await.unwrap());
        let acknowledged: Arc<Mutex<HashMap<String, u32>>> = Arc::default();
        let over = Arc::new(AtomicBool::new(false));
        let tasks: Vec<_> = (0..32)
            .map(|caller| {
                let (store, acknowledged, over) = (store.clone(), acknowledged.clone(), over.clone());
                tokio::spawn(async move {
                    let mut at = 0;
                    while !over.load(Ordering::Relaxed) {
                        let id = format!("{caller}-{at}");
                        let request = Reserve::new(key(&id));
                        let Reservation::Acquired(lease) = persist(|| store.reserve(&request)).await else {
                            panic!("{id}")
                        };
                        assert_eq!(lease.attempt, 1, "{id}");
                        let outcome = Outcome::new(200, id.clone());
                        persist(|| store.complete(&lease, &outcome)).await;
                        acknowledged.lock().unwrap().insert(id, at);
                        at += 1;
                    }
                })
            })
            .collect();
        let count = || acknowledged.lock().unwrap().len();
        for process in [1, 3] {
            tokio::time::sleep(Duration::from_secs(2)).await;
            let before = count();
            block_in_place(|| cluster.crash(process)).unwrap();
            // It goes on without the process.
            let begun = Instant::now();
            while count() < before + 200 {
                assert!(begun.elapsed() < Duration::from_secs(60), "it does not go on");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            println!("process {process} killed after {before} pairs, 200 more after {:.1?}", begun.elapsed());
            block_in_place(|| cluster.up(process)).unwrap();
            block_in_place(|| cluster.wait()).unwrap();
            // The copies that the process had are there again.
            let tolerant = |line: &str| line.trim_start().starts_with("Fault Tolerance") && line.contains("- 1 ");
            let healed = || block_in_place(|| cluster.cli("status")).is_ok_and(|told| told.lines().any(tolerant));
            let begun = Instant::now();
            while !healed() {
                assert!(begun.elapsed() < Duration::from_secs(120), "{}", cluster.cli("status").unwrap());
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
        over.store(true, Ordering::Relaxed);
        for task in tasks {
            task.await.unwrap();
        }
        let all: Vec<String> = acknowledged.lock().unwrap().keys().cloned().collect();
        for id in &all {
            let request = Reserve::new(key(id));
            let answer = persist(|| store.reserve(&request)).await;
            let Reservation::Completed(record) = answer else { panic!("{id}: {answer:?}") };
            assert_eq!(record.outcome(), Some(&Outcome::new(200, id.clone())));
        }
        println!("{} acknowledged pairs, all there", all.len());
    }

    pub(crate) async fn a_cluster_that_does_not_answer_costs_no_more_than_the_bound() {
        let (cluster, network) = behind_a_network().await.unwrap();
        let bound = Duration::from_secs(2);
        let config = fresh_config().with_call_timeout(bound);
        let store = FdbStore::open(Some(&cluster.cluster_file()), config.clone()).await.unwrap();
        let held = acquire(&store, &Reserve::new(key("held"))).await;
        network.set(true);
        let timed = async |call: &str, answered: Option<idem_core::StoreError>, begun: Instant| {
            let error = answered.unwrap_or_else(|| panic!("{call}"));
            assert!(begun.elapsed() < bound + Duration::from_secs(1), "{call}: {:?}", begun.elapsed());
            assert_eq!(error.kind(), ErrorKind::Timeout, "{call}: {error:?}");
            error.class()
        };
        let begun = Instant::now();
        let answered = store.reserve(&Reserve::new(key("k"))).await.err();
        // It was cut before anything was committed.
        assert_eq!(timed("reserve", answered, begun).await, ErrorClass::Retryable);
        let begun = Instant::now();
        assert_eq!(timed("fetch", store.fetch(&held.key).await.err(), begun).await, ErrorClass::Retryable);
        let begun = Instant::now();
        let answered = FdbStore::open(Some(&cluster.cluster_file()), config).await.err();
        timed("open", answered, begun).await;
        // Cut while commits are under way: what was not answered may have happened.
        network.set(false);
        persist(|| store.fetch(&held.key)).await;
        let store = Arc::new(store);
        let requests: Vec<_> = (0..400).map(|at| Reserve::new(key(&format!("many-{at}")))).collect();
        let calls: Vec<_> = requests
            .iter()
            .cloned()
            .map(|request| {
                let store = store.clone();
                tokio::spawn(async move { store.reserve(&request).await })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(15)).await;
        network.set(true);
        let mut answers = Vec::new();
        for call in calls {
            answers.push(call.await.unwrap());
        }
        network.set(false);
        let (mut known, mut unknown) = (0, 0);
        for (answer, request) in answers.iter().zip(&requests) {
            let again = persist(|| store.reserve(request)).await;
            let Reservation::Acquired(lease) = again else { panic!("{again:?}") };
            assert_eq!(lease.attempt, 1, "the repeat did not recognise itself");
            match answer {
                Ok(_) => known += 1,
                Err(error) => {
                    assert_ne!(error.class(), ErrorClass::Permanent, "{error:?}");
                    unknown += u32::from(error.class() == ErrorClass::Unknown);
                }
            }
        }
        println!(
            "{known} answered, {unknown} of unknown effect, {} connections",
            network.connections.load(Ordering::Relaxed)
        );
    }

    pub(crate) async fn what_is_not_a_cluster_is_refused_clearly() {
        let directory = std::env::temp_dir().join(format!("idem-fdb-files-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let garbage = directory.join("garbage.cluster");
        std::fs::write(&garbage, "this is no cluster file\n").unwrap();
        let config = || fresh_config().with_call_timeout(Duration::from_secs(2));
        for path in [&*directory.join("missing.cluster"), &*garbage, Path::new("a\0b")] {
            let error = FdbStore::open(Some(path), config()).await.unwrap_err();
            println!("{}: {error} {:?}", path.display(), error.source().map(ToString::to_string));
            assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Permanent), "{path:?}");
        }
        // A file of a cluster that is not there: it may come.
        let nobody = directory.join("nobody.cluster");
        std::fs::write(&nobody, "a:b@127.0.0.1:1\n").unwrap();
        let error = FdbStore::open(Some(&nobody), config()).await.unwrap_err();
        assert_eq!((error.kind(), error.class()), (ErrorKind::Timeout, ErrorClass::Retryable));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// Two handles whose clocks differ by that, and the bound that both are told.
    async fn two_clocks(apart: Duration, bound: Duration) -> [(FdbStore, Arc<ManualClock>); 2] {
        let config = fresh_config().with_max_clock_skew(bound);
        let handle = async |config: &Config, ahead: Duration| {
            let clock = Arc::new(ManualClock::default());
            clock.advance(ahead);
            (open(config.clone().with_clock(clock.clone())).await, clock)
        };
        [handle(&config, Duration::ZERO).await, handle(&config, apart).await]
    }

    const LEASE: Duration = Duration::from_secs(30);
    const RETENTION: Duration = Duration::from_secs(3_600);

    fn request(id: &str) -> Reserve {
        Reserve::new(key(id)).with_lease(LEASE).with_retention(RETENTION)
    }

    /// Reserves by one handle, lets time pass, and asks by the other: whether that one takes over, or finds it expired.
    async fn acquired_after(
        [(one, clock), (other, ahead)]: &[(FdbStore, Arc<ManualClock>); 2],
        id: &str,
        passes: Duration,
    ) -> Option<u32> {
        acquire(one, &request(id)).await;
        clock.advance(passes);
        ahead.advance(passes);
        match other.reserve(&request(id)).await.unwrap() {
            Reservation::Acquired(lease) => Some(lease.attempt),
            Reservation::InProgress { retry_after, .. } => {
                assert!(retry_after <= LEASE && retry_after > Duration::ZERO, "{retry_after:?}");
                None
            }
            answer => panic!("{answer:?}"),
        }
    }

    pub(crate) async fn clocks_within_the_bound_never_take_over_early() {
        let (bound, moment) = (Duration::from_secs(5), Duration::from_millis(1));
        let clocks = two_clocks(bound, bound).await;
        assert_eq!(acquired_after(&clocks, "a", LEASE - moment).await, None);
        assert_eq!(acquired_after(&clocks, "b", LEASE).await, Some(2), "by the fast clock, the margin is over");
        // Nor is it found expired early.
        let (one, clock) = &clocks[0];
        let lease = acquire(one, &request("c")).await;
        one.complete(&lease, &Outcome::new(200, "done")).await.unwrap();
        clock.advance(RETENTION - moment);
        clocks[1].1.advance(RETENTION - moment);
        assert!(matches!(clocks[1].0.reserve(&request("c")).await.unwrap(), Reservation::Completed(_)));
        // By the slow one it comes late, by twice the bound at most.
        let [fast, slow] = two_clocks(bound, bound).await;
        let turned = [slow, fast];
        assert_eq!(acquired_after(&turned, "d", LEASE + 2 * bound - moment).await, None);
        assert_eq!(acquired_after(&turned, "e", LEASE + 2 * bound).await, Some(2));
    }

    pub(crate) async fn beyond_the_bound_a_take_over_comes_early_by_the_rest_and_is_fenced() {
        let (bound, apart) = (Duration::from_secs(1), Duration::from_secs(5));
        let clocks = two_clocks(apart, bound).await;
        let [(one, clock), (other, ahead)] = &clocks;
        let lease = acquire(one, &request("k")).await;
        // Four seconds before the lease's end: the difference, less the bound.
        let early = apart - bound;
        clock.advance(LEASE - early);
        ahead.advance(LEASE - early);
        let refusing = request("k").with_on_abandoned(OnAbandoned::Refuse);
        assert!(matches!(other.reserve(&refusing).await.unwrap(), Reservation::Abandoned(_)));
        let taken = acquire(other, &request("k")).await;
        assert_eq!(taken.attempt, 2);
        // The one that was overtaken stores nothing: its token is not the holder's any more.
        let error = one.complete(&lease, &Outcome::new(200, "late")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LeaseLost);
        other.complete(&taken, &Outcome::new(200, "in time")).await.unwrap();
    }

    pub(crate) async fn a_locked_database_is_an_error_and_not_an_absent_record() {
        // Not the one that other tests use.
        let Cluster::Own(_) = &*CLUSTER else { return println!("not in a cluster that was given") };
        let cluster = spawn_blocking(FdbCluster::start).await.unwrap().unwrap();
        let config = fresh_config().with_call_timeout(Duration::from_secs(2));
        let store = FdbStore::open(Some(&cluster.cluster_file()), config).await.unwrap();
        let lease = acquire(&store, &Reserve::new(key("k"))).await;
        let locked = block_in_place(|| cluster.cli("lock")).unwrap();
        for error in [
            store.reserve(&Reserve::new(key("new"))).await.unwrap_err(),
            store.fetch(&lease.key).await.unwrap_err(),
            store.complete(&lease, &Outcome::new(200, "")).await.unwrap_err(),
        ] {
            assert_eq!(error.class(), ErrorClass::Retryable, "{locked}: {error:?}");
        }
    }

    pub(crate) async fn few_tries_are_an_error_of_its_own() {
        let store = Arc::new(open(fresh_config().with_max_tries(1)).await);
        let mut conflicts = 0;
        for round in 0..50 {
            let calls: Vec<_> = (0..16)
                .map(|_| {
                    let store = store.clone();
                    let request = Reserve::new(key(&round.to_string()));
                    tokio::spawn(async move { store.reserve(&request).await })
                })
                .collect();
            let mut won = 0;
            for call in calls {
                match call.await.unwrap() {
                    Ok(Reservation::Acquired(_)) => won += 1,
                    Ok(Reservation::InProgress { .. }) => {}
                    Ok(answer) => panic!("{answer:?}"),
                    Err(error) => {
                        assert_eq!((error.kind(), error.class()), (ErrorKind::Conflict, ErrorClass::Retryable));
                        let source = error.source().unwrap().downcast_ref().unwrap();
                        assert!(matches!(source, FdbStoreError::TooManyTries { tries: 1 }), "{error:?}");
                        conflicts += 1;
                    }
                }
            }
            assert_eq!(won, 1);
        }
        assert!(conflicts > 0, "nobody met another");
    }
}
