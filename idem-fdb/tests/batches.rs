//! Calls that share transactions.

mod absent;
#[cfg(fdb_client)]
mod stores;

absent::tests! { cases:
    many_callers_share_transactions,
    a_hot_key_does_not_hold_its_neighbours_up,
    a_full_queue_refuses_and_has_done_nothing,
    more_than_a_transaction_holds_is_several,
    a_runtime_that_ends_leaves_the_store_usable,
    one_caller_takes_the_short_way_again_when_the_others_have_gone,
}

#[cfg(fdb_client)]
mod cases {
    #![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

    use std::error::Error;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, Outcome, Reservation, Reserve};
    use idem_fdb::{Batching, FdbStore, FdbStoreError};
    use tokio::task::JoinSet;

    use super::stores::{CLUSTER, acquire, fresh_config, open};

    fn request(id: &str) -> Reserve {
        Reserve::new(Key::new("scope", id).unwrap())
    }

    /// The transactions that the cluster has started and committed, of all clients.
    async fn committed(store: &FdbStore) -> i64 {
        // The proxies' counters are told once in a while.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let transaction = store.database().create_trx().unwrap();
        let status = transaction.get(b"\xff\xff/status/json", true).await.unwrap().unwrap();
        let status = String::from_utf8_lossy(&status).into_owned();
        let transactions = status.split_once("\"transactions\":").unwrap().1;
        let committed = transactions.split_once("\"committed\":").unwrap().1;
        let counter = committed.split_once("\"counter\":").unwrap().1;
        counter.trim_start().chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    }

    pub(crate) async fn many_callers_share_transactions() {
        const CALLERS: usize = 500;
        let store = Arc::new(open(fresh_config()).await);
        let before = committed(&store).await;
        let mut tasks = JoinSet::new();
        for at in 0..CALLERS {
            let store = store.clone();
            tasks.spawn(async move {
                let lease = acquire(&*store, &request(&at.to_string())).await;
                store.complete(&lease, &Outcome::new(200, at.to_string())).await.unwrap();
            });
        }
        tasks.join_all().await;
        let used = committed(&store).await - before;
        println!("{} calls in {used} transactions, other tests' among them", 2 * CALLERS);
        assert!(used < CALLERS as i64, "{used}");
        for at in 0..CALLERS {
            let record = store.fetch(&request(&at.to_string()).key).await.unwrap().unwrap();
            assert_eq!(record.outcome(), Some(&Outcome::new(200, at.to_string())));
        }
    }

    /// Another process is at one key all the time.
    pub(crate) async fn a_hot_key_does_not_hold_its_neighbours_up() {
        let config = fresh_config().with_batching(Batching::default().with_alone(0));
        let (store, other) = (Arc::new(open(config.clone()).await), Arc::new(open(config).await));
        let lease = acquire(&*other, &request("hot")).await;
        let hot = tokio::spawn(async move {
            loop {
                other.renew(&lease, Duration::from_secs(3_600)).await.unwrap();
            }
        });
        let began = Instant::now();
        for round in 0..40 {
            let mut tasks = JoinSet::new();
            for at in 0..50 {
                let store = store.clone();
                let id = if at == 25 { "hot".to_owned() } else { format!("{round}-{at}") };
                tasks.spawn(async move { (at, store.reserve(&request(&id)).await.unwrap()) });
            }
            for (at, answer) in tasks.join_all().await {
                assert_eq!(matches!(answer, Reservation::Acquired(_)), at != 25, "{answer:?}");
            }
        }
        println!("2000 calls beside a hot key took {:.1?}", began.elapsed());
        assert!(!hot.is_finished());
        hot.abort();
    }

    pub(crate) async fn a_full_queue_refuses_and_has_done_nothing() {
        let batching = Batching::default().with_alone(0).with_transactions(1).with_queue(10);
        let store = Arc::new(open(fresh_config().with_batching(batching)).await);
        let mut tasks = JoinSet::new();
        for at in 0..200 {
            let store = store.clone();
            tasks.spawn(async move { (at, store.reserve(&request(&at.to_string())).await) });
        }
        let (mut held, mut refused) = (0, 0);
        for (at, answer) in tasks.join_all().await {
            match answer {
                Ok(Reservation::Acquired(_)) => held += 1,
                Ok(answer) => panic!("{answer:?}"),
                Err(error) => {
                    assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Retryable));
                    let source = error.source().unwrap().downcast_ref().unwrap();
                    assert!(matches!(source, FdbStoreError::QueueFull));
                    assert!(store.fetch(&request(&at.to_string()).key).await.unwrap().is_none());
                    refused += 1;
                }
            }
        }
        assert!(held >= 10 && refused > 0, "{held} held, {refused} refused");
    }

    pub(crate) async fn more_than_a_transaction_holds_is_several() {
        let store = open(fresh_config()).await;
        let requests: Vec<_> = (0..2_500).map(|at| request(&at.to_string())).collect();
        let answers = store.reserve_many(&requests).await;
        let leases = answers.into_iter().map(|answer| match answer.unwrap() {
            Reservation::Acquired(lease) => lease,
            other => panic!("{other:?}"),
        });
        // 25 MB of outcomes, which no transaction holds.
        let calls: Vec<_> = leases.map(|lease| (lease, Outcome::new(200, vec![b'x'; 10_000]))).collect();
        for answer in store.complete_many(&calls).await {
            answer.unwrap();
        }
        for answer in store.reserve_many(&requests).await {
            assert!(matches!(answer.unwrap(), Reservation::Completed(_)));
        }
        let large: Vec<_> = (0..12).map(|at| request(&format!("large-{at}"))).collect();
        let mut calls = Vec::new();
        for request in &large {
            calls.push((acquire(&store, request).await, Outcome::new(200, vec![b'x'; 1_000_000])));
        }
        for answer in store.complete_many(&calls).await {
            answer.unwrap();
        }
    }

    pub(crate) async fn a_runtime_that_ends_leaves_the_store_usable() {
        let batching = Batching::default().with_alone(0);
        let file = CLUSTER.file();
        let config = fresh_config().with_batching(batching);
        let store = Arc::new(FdbStore::open(Some(&file), config).await.unwrap());
        let used = store.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            // It ends while calls are under way.
            runtime.block_on(async {
                for at in 0..50 {
                    let used = used.clone();
                    tokio::spawn(async move { drop(used.reserve(&request(&format!("gone-{at}"))).await) });
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            });
        })
        .join()
        .unwrap();
        acquire(&*store, &request("later")).await;
    }

    /// A sender that waited for its only caller's next call would keep it on the long way for ever.
    pub(crate) async fn one_caller_takes_the_short_way_again_when_the_others_have_gone() {
        let crowd_and_one = || async {
            let store = open(fresh_config()).await;
            let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
            let before = tasks();
            let reserve = async |name: &str| acquire(&store, &request(name)).await;
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
}
