//! What is stored where, and calls within the caller's transaction.

mod absent;
#[cfg(fdb_client)]
mod stores;

absent::tests! { cases:
    bodies_of_every_size_come_back,
    a_smaller_outcome_leaves_no_piece_of_a_larger_one,
    a_record_lives_on_one_day,
    a_day_that_is_over_is_cleared_at_once,
    no_day_is_cleared_that_a_slow_clock_takes_for_today,
    two_subspaces_are_two_stores,
    a_directory_holds_a_store,
    the_longest_retention_counts_for_every_process,
    a_transaction_that_began_before_the_retention_was_raised_begins_anew,
    a_store_that_is_not_set_up_refuses,
    what_a_newer_version_has_stored_is_refused,
    record_and_data_are_committed_together_or_not_at_all,
    an_unknown_commit_of_the_callers_is_recognised_by_the_token,
    a_wrapped_error_of_the_database_is_not_retried_and_ours_is,
    a_transaction_of_more_than_five_seconds_fails_clearly,
    no_key_is_held_twice_while_days_change,
}

#[cfg(fdb_client)]
mod cases {
    #![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

    use std::error::Error;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    use std::time::{Duration, SystemTime};

    use idem_core::clock::ManualClock;
    use idem_core::{ErrorClass, ErrorKind, Failure, Key, KeyStore, Outcome, PurgeBudget, Reservation, Reserve, State};
    use idem_fdb::foundationdb::directory::{Directory, DirectoryLayer};
    use idem_fdb::foundationdb::tuple::Subspace;
    use idem_fdb::foundationdb::{FdbBindingError, FdbError};
    use idem_fdb::{CallError, Config, FdbStore, FdbStoreError, Records};

    use super::stores::{acquire, fresh_config, open, stored};

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn key(id: &str) -> Key {
        Key::new("scope", id).unwrap()
    }

    /// A store whose clock stands at noon.
    async fn at_noon(config: Config) -> (FdbStore, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::default());
        clock.advance(DAY / 2);
        (open(config.with_clock(clock.clone())).await, clock)
    }

    /// How many records and pieces there are.
    async fn count(store: &FdbStore) -> usize {
        // Beside them, the settings.
        stored(store).await.len() - 1
    }

    fn source(error: &idem_core::StoreError) -> &FdbStoreError {
        error.source().unwrap().downcast_ref().unwrap()
    }

    pub(crate) async fn bodies_of_every_size_come_back() {
        let limit = 8 * 1024 * 1024;
        let store = open(fresh_config().with_outcome_limit(limit)).await;
        assert_eq!(store.capabilities().max_outcome_bytes, limit);
        for bytes in [0, 1, 89_999, 90_001, 100_001, limit] {
            let request = Reserve::new(key(&bytes.to_string()));
            let lease = acquire(&store, &request).await;
            let body: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            let outcome = Outcome::new(200, body);
            store.complete(&lease, &outcome).await.unwrap();
            // Once more, and by another caller.
            store.complete(&lease, &outcome).await.unwrap();
            let Reservation::Completed(record) = store.reserve(&Reserve::new(request.key.clone())).await.unwrap()
            else {
                panic!("{bytes}")
            };
            assert_eq!(record.outcome(), Some(&outcome), "{bytes}");
            let mut other = outcome.clone();
            other.code = 201;
            assert_eq!(store.complete(&lease, &other).await.unwrap_err().kind(), ErrorKind::AlreadyCompleted);
        }
        let lease = acquire(&store, &Reserve::new(key("too large"))).await;
        let error = store.complete(&lease, &Outcome::new(200, vec![0; limit + 1])).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }

    pub(crate) async fn a_smaller_outcome_leaves_no_piece_of_a_larger_one() {
        let (store, clock) = at_noon(fresh_config().with_max_clock_skew(Duration::ZERO)).await;
        let hour = Duration::from_secs(3_600);
        for bytes in [300_000, 100, 200_000, 0] {
            let request = Reserve::new(key("k")).with_retention(hour);
            let lease = acquire(&store, &request).await;
            assert_eq!(count(&store).await, 1, "an expired record's pieces are left");
            store.complete(&lease, &Outcome::new(200, vec![b'x'; bytes])).await.unwrap();
            assert_eq!(count(&store).await, 1 + bytes / 90_000);
            clock.advance(hour);
        }
    }

    pub(crate) async fn a_record_lives_on_one_day() {
        let (store, clock) = at_noon(fresh_config()).await;
        let request = Reserve::new(key("k"));
        let lease = acquire(&store, &request).await;
        let first = stored(&store).await;
        // The next day, and a record that expires a day later.
        clock.advance(DAY * 3 / 4);
        let outcome = Outcome::new(200, vec![b'x'; 200_000]);
        store.complete(&lease, &outcome).await.unwrap();
        let second = stored(&store).await;
        assert_eq!((first.len(), second.len()), (2, 4));
        assert!(second.iter().all(|(place, _)| *place != first[0].0), "it has not moved");
        assert_eq!(store.fetch(&request.key).await.unwrap().unwrap().outcome(), Some(&outcome));
        store.complete(&lease, &outcome).await.unwrap();
        // A take-over moves it too.
        let (held, other) = (Reserve::new(key("held")), Reserve::new(key("held")));
        acquire(&store, &held).await;
        clock.advance(DAY * 3 / 4);
        assert_eq!(acquire(&store, &other).await.attempt, 2);
        let places = stored(&store).await;
        assert_eq!(places.iter().filter(|(place, _)| place.windows(4).any(|part| part == b"held")).count(), 1);
    }

    pub(crate) async fn a_day_that_is_over_is_cleared_at_once() {
        let (store, clock) = at_noon(fresh_config()).await;
        for at in 0..300 {
            let lease = acquire(&store, &Reserve::new(key(&at.to_string()))).await;
            let bytes = if at == 0 { 500_000 } else { 10 };
            store.complete(&lease, &Outcome::new(200, vec![b'x'; bytes])).await.unwrap();
        }
        clock.advance(DAY);
        acquire(&store, &Reserve::new(key("later"))).await;
        store.purge_expired(PurgeBudget::records(1)).await.unwrap();
        assert_eq!(count(&store).await, 306, "their day is not over");
        clock.advance(DAY / 2 + Duration::from_secs(5));
        store.purge_expired(PurgeBudget::records(1)).await.unwrap();
        assert_eq!(count(&store).await, 1);
        assert!(store.fetch(&key("later")).await.unwrap().is_some());
        // The settings are there.
        acquire(&store, &Reserve::new(key("and later"))).await;
    }

    pub(crate) async fn no_day_is_cleared_that_a_slow_clock_takes_for_today() {
        let config = fresh_config();
        let (slow, clock) = at_noon(config.clone()).await;
        let ahead = Arc::new(ManualClock::default());
        ahead.advance(DAY / 2 + Duration::from_secs(5));
        let fast = open(config.with_clock(ahead.clone())).await;
        // Expires one second before midnight by the slow clock.
        let retention = DAY / 2 - Duration::from_secs(6);
        let lease = acquire(&slow, &Reserve::new(key("k")).with_retention(retention)).await;
        slow.complete(&lease, &Outcome::new(200, "done")).await.unwrap();
        clock.advance(DAY / 2 - Duration::from_secs(2));
        ahead.advance(DAY / 2 - Duration::from_secs(2));
        fast.purge_expired(PurgeBudget::records(1)).await.unwrap();
        let answer = slow.reserve(&Reserve::new(key("k"))).await.unwrap();
        assert!(matches!(answer, Reservation::Completed(_)), "{answer:?}");
    }

    pub(crate) async fn two_subspaces_are_two_stores() {
        let (one, other) = (open(fresh_config()).await, open(fresh_config()).await);
        let request = Reserve::new(key("k"));
        acquire(&one, &request).await;
        acquire(&other, &Reserve::new(key("k"))).await;
        assert!(matches!(one.reserve(&Reserve::new(key("k"))).await.unwrap(), Reservation::InProgress { .. }));
    }

    pub(crate) async fn a_directory_holds_a_store() {
        let database = open(fresh_config()).await.database().clone();
        let path = ["idem-kit".to_owned(), format!("{:?}", SystemTime::now())];
        let transaction = database.create_trx().unwrap();
        let directory = DirectoryLayer::default().create_or_open(&transaction, &path, None, None).await.unwrap();
        let prefix = directory.bytes().unwrap().to_vec();
        transaction.commit().await.unwrap();
        let config = Config::default().with_subspace(Subspace::from_bytes(prefix.clone()));
        let store = FdbStore::with_database(database, config).await.unwrap();
        let lease = acquire(&store, &Reserve::new(key("k"))).await;
        store.complete(&lease, &Outcome::new(200, "done")).await.unwrap();
        assert_eq!(count(&store).await, 1);
        assert!(stored(&store).await.iter().all(|(place, _)| place.starts_with(&prefix)));
    }

    /// A process that was opened with a day looks as far ahead as one that was opened with a month, from the moment at which
    /// that one is open.
    pub(crate) async fn the_longest_retention_counts_for_every_process() {
        let config = fresh_config();
        let day = open(config.clone()).await;
        acquire(&day, &Reserve::new(key("warm"))).await;
        let month = open(config.clone().with_max_retention(30 * DAY)).await;
        let lease = acquire(&month, &Reserve::new(key("k")).with_retention(30 * DAY)).await;
        let answer = day.reserve(&Reserve::new(key("k"))).await.unwrap();
        assert!(matches!(answer, Reservation::InProgress { .. }), "{answer:?}");
        month.complete(&lease, &Outcome::new(200, "done")).await.unwrap();
        // Also one that is opened later, with a shorter one: it does not lower what is stored.
        for store in [&day, &open(config.clone()).await] {
            let answer = store.reserve(&Reserve::new(key("k"))).await.unwrap();
            assert!(matches!(answer, Reservation::Completed(_)), "{answer:?}");
            // What it accepts itself is as it was configured.
            let longer = Reserve::new(key("longer")).with_retention(2 * DAY);
            assert_eq!(store.reserve(&longer).await.unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }

    pub(crate) async fn a_transaction_that_began_before_the_retention_was_raised_begins_anew() {
        let config = fresh_config();
        let day = open(config.clone()).await;
        acquire(&day, &Reserve::new(key("warm"))).await;
        let transaction = day.database().create_trx().unwrap();
        let answer = day.records().reserve(&transaction, &Reserve::new(key("k"))).await.unwrap();
        assert!(matches!(answer, Reservation::Acquired(_)), "{answer:?}");
        let month = open(config.with_max_retention(30 * DAY)).await;
        acquire(&month, &Reserve::new(key("k")).with_retention(30 * DAY)).await;
        let error = transaction.commit().await.unwrap_err();
        assert_eq!(error.code(), 1020, "it was committed beside the other: {error:?}");
    }

    pub(crate) async fn a_store_that_is_not_set_up_refuses() {
        let store = open(fresh_config()).await;
        let nobodys = Records::new(fresh_config());
        let transaction = store.database().create_trx().unwrap();
        let Err(CallError::Store(error)) = nobodys.reserve(&transaction, &Reserve::new(key("k"))).await else {
            panic!()
        };
        assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Permanent));
        assert!(matches!(source(&error), FdbStoreError::NotSetUp));
    }

    pub(crate) async fn what_a_newer_version_has_stored_is_refused() {
        let config = fresh_config();
        let store = open(config.clone()).await;
        let settings = stored(&store).await.remove(0).0;
        let transaction = store.database().create_trx().unwrap();
        transaction.set(&settings, b"\x02newer");
        transaction.commit().await.unwrap();
        let error = FdbStore::with_database(store.database().clone(), config).await.unwrap_err();
        assert_eq!((error.kind(), error.class()), (ErrorKind::Unreadable, ErrorClass::Permanent));
        assert!(matches!(source(&error), FdbStoreError::Settings));
    }

    /// Charges by a key, in one transaction with the balance.
    async fn charge(store: &FdbStore, request: &Reserve, balance: &[u8]) -> Result<Reservation, FdbBindingError> {
        let records = store.records();
        store
            .database()
            .run(|transaction, _| async move {
                let answer = records.reserve(&transaction, request).await?;
                if let Reservation::Acquired(lease) = &answer {
                    let before = transaction.get(balance, false).await?;
                    let before = before.map_or(0, |bytes| u64::from_le_bytes((*bytes).try_into().unwrap()));
                    transaction.set(balance, &(before + 1).to_le_bytes());
                    records.complete(&transaction, lease, &Outcome::new(201, "charged")).await?;
                }
                Ok(answer)
            })
            .await
    }

    async fn number(store: &FdbStore, place: &[u8]) -> u64 {
        let value = store.database().create_trx().unwrap().get(place, true).await.unwrap();
        value.map_or(0, |bytes| u64::from_le_bytes((*bytes).try_into().unwrap()))
    }

    fn balance_of(config: &Config) -> Vec<u8> {
        config.subspace.subspace(&"business").bytes().to_vec()
    }

    pub(crate) async fn record_and_data_are_committed_together_or_not_at_all() {
        let config = fresh_config();
        let store = Arc::new(open(config.clone()).await);
        let balance = balance_of(&config);
        // Not committed: neither is there.
        let transaction = store.database().create_trx().unwrap();
        let request = Reserve::new(key("dropped"));
        let Reservation::Acquired(lease) = store.records().reserve(&transaction, &request).await.unwrap() else {
            panic!()
        };
        transaction.set(&balance, &1_u64.to_le_bytes());
        store.records().complete(&transaction, &lease, &Outcome::new(200, "")).await.unwrap();
        drop(transaction);
        assert!(store.fetch(&request.key).await.unwrap().is_none());
        assert_eq!(number(&store, &balance).await, 0);
        // A failure in the transaction, and an answer that is read from it before it is committed.
        let transaction = store.database().create_trx().unwrap();
        let request = Reserve::new(key("failed"));
        let Reservation::Acquired(lease) = store.records().reserve(&transaction, &request).await.unwrap() else {
            panic!()
        };
        store.records().renew(&transaction, &lease, Duration::from_secs(60)).await.unwrap();
        store.records().fail(&transaction, &lease, &Failure::new("no").unwrap()).await.unwrap();
        let record = store.records().fetch(&transaction, &request.key).await.unwrap().unwrap();
        assert!(matches!(record.state, State::Failed(_)));
        transaction.commit().await.unwrap();
        assert_eq!(acquire(&*store, &Reserve::new(key("failed"))).await.attempt, 2);
        // Many callers with few keys: one charge for each.
        let charged = Arc::new(AtomicU64::default());
        let tasks: Vec<_> = (0..200)
            .map(|at| {
                let (store, balance, charged) = (store.clone(), balance.clone(), charged.clone());
                tokio::spawn(async move {
                    let request = Reserve::new(key(&format!("charge-{}", at % 20)));
                    if let Reservation::Acquired(_) = charge(&store, &request, &balance).await.unwrap() {
                        charged.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!((charged.load(Ordering::Relaxed), number(&store, &balance).await), (20, 20));
    }

    /// The caller does not learn of the commit, and runs the whole again with the same request.
    pub(crate) async fn an_unknown_commit_of_the_callers_is_recognised_by_the_token() {
        let config = fresh_config();
        let store = open(config.clone()).await;
        let balance = balance_of(&config);
        let request = Reserve::new(key("k"));
        assert!(matches!(charge(&store, &request, &balance).await.unwrap(), Reservation::Acquired(_)));
        assert!(matches!(charge(&store, &request, &balance).await.unwrap(), Reservation::Completed(_)));
        assert_eq!(number(&store, &balance).await, 1);
        // Where only the reserve was committed, its repeat holds the key still.
        let request = Reserve::new(key("held"));
        let first = acquire(&store, &request).await;
        let again = acquire(&store, &request).await;
        assert_eq!((first.token, first.attempt, again.attempt), (again.token, 1, 1));
    }

    /// Why [`CallError`] is to be returned by `?`.
    pub(crate) async fn a_wrapped_error_of_the_database_is_not_retried_and_ours_is() {
        #[derive(Debug)]
        struct Wrapped(#[expect(dead_code, reason = "it is what is wrapped")] CallError);
        impl std::fmt::Display for Wrapped {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("wrapped")
            }
        }
        impl Error for Wrapped {}
        let store = open(fresh_config()).await;
        let conflict = || CallError::Fdb(FdbError::from_code(1020));
        let tries = &AtomicUsize::new(0);
        let wrapped = store.database().run(|_, _| async move {
            tries.fetch_add(1, Ordering::Relaxed);
            Err::<(), _>(FdbBindingError::CustomError(Box::new(Wrapped(conflict()))))
        });
        assert!(wrapped.await.is_err());
        assert_eq!(tries.load(Ordering::Relaxed), 1);
        let ours = store.database().run(|_, _| async move {
            if tries.fetch_add(1, Ordering::Relaxed) < 4 { Err(conflict().into()) } else { Ok(()) }
        });
        ours.await.unwrap();
        assert_eq!(tries.load(Ordering::Relaxed), 5);
    }

    pub(crate) async fn a_transaction_of_more_than_five_seconds_fails_clearly() {
        let store = open(fresh_config()).await;
        let transaction = store.database().create_trx().unwrap();
        let request = Reserve::new(key("k"));
        let Reservation::Acquired(lease) = store.records().reserve(&transaction, &request).await.unwrap() else {
            panic!()
        };
        tokio::time::sleep(Duration::from_secs(6)).await;
        // A storage server forgets a version when it has learned of later ones, which takes it a moment.
        let mut answer = Ok(None);
        for at in 0..100 {
            acquire(&store, &Reserve::new(key(&format!("other-{at}")))).await;
            answer = store.records().reserve(&transaction, &Reserve::new(key(&format!("late-{at}")))).await.map(Some);
            if answer.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let Err(CallError::Fdb(error)) = answer else { panic!("{answer:?}") };
        assert_eq!(error.code(), 1007, "transaction_too_old");
        assert!(error.is_retryable_not_committed());
        let text = CallError::Fdb(error).to_string();
        assert!(text.contains("1007"), "{text}");
        // A call that reads only what the transaction has written itself finds out at the commit.
        drop(store.records().complete(&transaction, &lease, &Outcome::new(200, "late")).await);
        assert_eq!(transaction.commit().await.unwrap_err().code(), 1007);
        assert!(store.fetch(&request.key).await.unwrap().is_none());
    }

    /// Many callers, few keys, processes whose clocks differ by what is allowed, and a day of a few hundred milliseconds.
    pub(crate) async fn no_key_is_held_twice_while_days_change() {
        const PROCESSES: usize = 4;
        const KEYS: u32 = 60;
        const ROUNDS: u32 = 12;
        let config = fresh_config();
        let mut processes = Vec::new();
        for at in 0..PROCESSES {
            let clock = Arc::new(ManualClock::default());
            // Two seconds before midnight, and up to the bound behind or ahead.
            clock.advance(DAY - Duration::from_secs(2));
            clock.set(clock_time(&clock) + Duration::from_millis(5_000 * at as u64 / (PROCESSES as u64 - 1)));
            processes.push((Arc::new(open(config.clone().with_clock(clock.clone())).await), clock));
        }
        let (mut held, mut replays) = (0, 0);
        for round in 0..ROUNDS {
            let won: Arc<Vec<AtomicU32>> = Arc::new((0..KEYS).map(|_| AtomicU32::new(0)).collect());
            let seen = Arc::new(AtomicU32::new(0));
            let mut tasks = Vec::new();
            for (store, _) in &processes {
                for _ in 0..4 {
                    let (store, won, seen) = (store.clone(), won.clone(), seen.clone());
                    tasks.push(tokio::spawn(async move {
                        for at in 0..KEYS {
                            let request = Reserve::new(key(&format!("{round}-{at}")));
                            match store.reserve(&request).await.unwrap() {
                                Reservation::Acquired(lease) => {
                                    won[at as usize].fetch_add(1, Ordering::SeqCst);
                                    tokio::time::sleep(Duration::from_millis(2)).await;
                                    store.complete(&lease, &Outcome::new(200, "done")).await.unwrap();
                                }
                                Reservation::Completed(_) => drop(seen.fetch_add(1, Ordering::SeqCst)),
                                Reservation::InProgress { .. } => {}
                                other => panic!("{other:?}"),
                            }
                        }
                    }));
                }
            }
            // Midnight, for one after the other; and a purge by each.
            let clocks: Vec<_> = processes.iter().map(|(_, clock)| clock.clone()).collect();
            let stores: Vec<_> = processes.iter().map(|(store, _)| store.clone()).collect();
            let time = tokio::spawn(async move {
                for _ in 0..8 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    for clock in &clocks {
                        clock.advance(Duration::from_millis(500));
                    }
                    for store in &stores {
                        store.purge_expired(PurgeBudget::records(1)).await.unwrap();
                    }
                }
            });
            for task in tasks {
                task.await.unwrap();
            }
            time.await.unwrap();
            for (at, won) in won.iter().enumerate() {
                assert_eq!(won.load(Ordering::SeqCst), 1, "key {at} of round {round} was held that often");
            }
            held += KEYS;
            replays += seen.load(Ordering::SeqCst);
            // To just before the next midnight.
            for (_, clock) in &processes {
                clock.advance(DAY - Duration::from_secs(4));
            }
        }
        println!("{held} keys held once each over {ROUNDS} changes of day, {replays} replays");
        assert!(replays > 0);
    }

    fn clock_time(clock: &ManualClock) -> SystemTime {
        use idem_core::clock::Clock;
        clock.now()
    }
}
