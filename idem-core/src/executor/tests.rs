//! Tests of what cannot be seen from outside: that nothing is left behind.

use std::convert::Infallible;
use std::time::Duration;

use tokio::task::{JoinSet, yield_now};
use tokio::time::timeout;

use super::{Executor, RunError, Waiting, waiters};
use crate::{Key, MemoryStore};

fn key(id: &str) -> Key {
    Key::new("executor-unit", id).unwrap()
}

/// Pitfall 9.
#[tokio::test(start_paused = true)]
async fn a_caller_that_stops_waiting_leaves_nothing() {
    let executor =
        Executor::builder(MemoryStore::new()).waiting(Waiting::UpTo(Duration::from_secs(60))).build().unwrap();
    let id = key("waits");
    let holder = executor.clone();
    let held = id.clone();
    let holder =
        tokio::spawn(
            async move { holder.run(&held, None, |_| std::future::pending::<Result<(), Infallible>>()).await },
        );
    yield_now().await;
    {
        let mut waiting: Vec<_> = (0..3)
            .map(|_| {
                Box::pin(timeout(
                    Duration::from_secs(5),
                    executor.run(&id, None, |_| async { Ok::<_, Infallible>(()) }),
                ))
            })
            .collect();
        for call in &mut waiting {
            std::future::poll_fn(|context| std::task::Poll::Ready(call.as_mut().poll(context).is_ready())).await;
        }
        assert_eq!(waiters::waiting_for(&id), Some(3));
        drop(waiting.pop());
        assert_eq!(waiters::waiting_for(&id), Some(2));
        for call in waiting {
            assert!(call.await.is_err());
        }
    }
    assert_eq!(waiters::waiting_for(&id), None);
    assert_eq!((executor.running(), executor.0.keeper.kept()), (1, 1));
    holder.abort();
}

/// After a load with failures, panics, waits and callers that go away.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_left_after_a_load() {
    let lease = Duration::from_millis(1200);
    let executor = Executor::builder(MemoryStore::new())
        .lease(lease)
        .waiting(Waiting::UpTo(Duration::from_secs(20)))
        .build()
        .unwrap();
    let mut callers = JoinSet::new();
    for caller in 0..400_u64 {
        let executor = executor.clone();
        callers.spawn(async move {
            let operation = move |_| async move {
                tokio::time::sleep(Duration::from_millis(caller % 7)).await;
                match caller % 4 {
                    0 => panic!("one of four"),
                    1 => Err("another of four"),
                    _ => Ok(caller),
                }
            };
            let id = key(&format!("load-{}", caller % 20));
            let call = executor.run(&id, None, operation);
            if caller % 5 == 0 {
                drop(timeout(Duration::from_millis(3), call).await);
            } else if let Err(error @ (RunError::Store(_) | RunError::InProgress { .. })) = call.await {
                panic!("{error:?}");
            }
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    executor.drain().await;
    assert_eq!((executor.running(), executor.0.keeper.kept()), (0, 0));
    for id in 0..20 {
        assert_eq!(waiters::waiting_for(&key(&format!("load-{id}"))), None);
    }
    // The ticker ends when it finds nothing to keep.
    timeout(Duration::from_secs(10), async {
        while executor.0.keeper.tickers() > 0 {
            tokio::time::sleep(lease / 12).await;
        }
    })
    .await
    .unwrap();
}

/// One ticker, however many operations; the next operation after an idle time starts another.
#[tokio::test(start_paused = true)]
async fn there_is_one_ticker_while_there_is_something_to_keep() {
    let executor = Executor::builder(MemoryStore::new()).lease(Duration::from_secs(12)).build().unwrap();
    assert_eq!(executor.0.keeper.tickers(), 0);
    for round in 0..3 {
        for id in 0..100 {
            executor.run(&key(&format!("{round}-{id}")), None, |_| async { Ok::<_, Infallible>(()) }).await.unwrap();
        }
        assert_eq!(executor.0.keeper.tickers(), 1);
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert_eq!(executor.0.keeper.tickers(), 0);
    }
}

/// An executor that is dropped is not kept alive by its ticker.
#[tokio::test(start_paused = true)]
async fn a_dropped_executor_is_gone() {
    let store = std::sync::Arc::new(MemoryStore::new());
    let executor = Executor::new(std::sync::Arc::clone(&store));
    executor.run(&key("dropped"), None, |_| async { Ok::<_, Infallible>(()) }).await.unwrap();
    drop(executor);
    assert_eq!(std::sync::Arc::strong_count(&store), 1);
}
