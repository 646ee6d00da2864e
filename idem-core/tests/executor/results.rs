//! Results that cannot be stored or read.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;

use idem_core::executor::{Executor, OnError, RunError};
use idem_core::{ErrorKind, KeyStore, Operation, Outcome, Reservation, Reserve, Withheld};

use super::support::{Effects, Fault, Faulty, key};

/// Pitfall 25.
#[tokio::test(start_paused = true)]
async fn a_result_over_the_limit_is_withheld_and_the_first_caller_gets_all_of_it() {
    let executor = Executor::new(Arc::new(Faulty::build(false, 100)));
    for (bytes, fits) in [(98, true), (99, false), (5000, false)] {
        let id = key(&format!("{bytes}"));
        let effects = Effects::default();
        let run = || {
            let (executor, effects, id) = (executor.clone(), effects.clone(), id.clone());
            async move {
                let operation = move |_| async move {
                    effects.happen();
                    Ok::<_, Infallible>("x".repeat(bytes))
                };
                executor.run(&id, None, operation).await
            }
        };
        assert_eq!(run().await.unwrap().value.len(), bytes);
        match run().await {
            Ok(replay) => assert_eq!((replay.value.len(), fits), (bytes, true)),
            Err(RunError::Withheld { attempt: 1, code: 0, reason: Withheld::TooLarge }) => assert!(!fits),
            Err(other) => panic!("{other:?}"),
        }
        assert_eq!(effects.count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_final_error_over_the_limit_is_withheld_under_its_code() {
    let executor = Executor::new(Arc::new(Faulty::build(false, 10)));
    let id = key("k");
    let run = || executor.run_with(&id, None, |_| OnError::Final, |_| async { Err::<u32, _>("y".repeat(50)) });
    assert!(matches!(run().await, Err(RunError::Failed { error, is_final: true, .. }) if error.len() == 50));
    assert!(matches!(run().await, Err(RunError::Withheld { code: 1, reason: Withheld::TooLarge, .. })));
}

/// A store that finds the outcome too large although its capabilities say otherwise.
#[tokio::test(start_paused = true)]
async fn an_outcome_that_the_store_refuses_for_its_size_is_withheld() {
    use async_trait::async_trait;
    use idem_core::{Capabilities, Failure, Key, Lease, PurgeBudget, Purged, Record, StoreError};
    use std::fmt;
    use std::time::Duration;

    #[derive(Debug)]
    struct Boasting(Faulty);
    impl fmt::Display for Boasting {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("boasting")
        }
    }
    #[async_trait]
    impl KeyStore for Boasting {
        fn capabilities(&self) -> Capabilities {
            Capabilities::default()
        }
        async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
            self.0.reserve(request).await
        }
        async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
            self.0.complete(lease, outcome).await
        }
        async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
            self.0.fail(lease, failure).await
        }
        async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
            self.0.renew(lease, extend_by).await
        }
        async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
            self.0.fetch(key).await
        }
        async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
            self.0.purge_expired(budget).await
        }
    }
    let executor = Executor::new(Boasting(Faulty::build(false, 10)));
    let id = key("k");
    let run = || executor.run(&id, None, |_| async { Ok::<_, Infallible>("z".repeat(50)) });
    assert_eq!(run().await.unwrap().value.len(), 50);
    assert!(matches!(run().await, Err(RunError::Withheld { code: 0, reason: Withheld::TooLarge, .. })));
}

#[tokio::test(start_paused = true)]
async fn a_result_without_json_is_withheld() {
    let executor = Executor::new(Faulty::new());
    let id = key("k");
    let run = || executor.run(&id, None, |_| async { Ok::<_, Infallible>(BTreeMap::from([((1, 2), 3)])) });
    assert_eq!(run().await.unwrap().value[&(1, 2)], 3);
    assert!(matches!(run().await, Err(RunError::Withheld { code: 0, reason: Withheld::Unserializable, .. })));
}

#[tokio::test(start_paused = true)]
async fn a_stored_result_of_another_type_is_an_error_that_does_not_quote_it() {
    let executor = Executor::new(Faulty::new());
    executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>("card 4242".to_owned()) }).await.unwrap();
    let effects = Effects::default();
    let operation = {
        let effects = effects.clone();
        |_| async move { Ok::<_, Infallible>(effects.happen() as u32) }
    };
    let error = executor.run(&key("k"), None, operation).await.unwrap_err();
    let RunError::Undecodable(within) = &error else { panic!("{error:?}") };
    assert!(within.is_data());
    assert!(!format!("{error:?} {error}").contains("4242") && error.source().is_none());
    assert_eq!(effects.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_outcome_of_somebody_elses_code_is_an_error() {
    let store = Faulty::new();
    let Reservation::Acquired(lease) = store.reserve(&Reserve::new(key("k"))).await.unwrap() else { panic!() };
    store.complete(&lease, &Outcome::new(201, "7")).await.unwrap();
    let result = Executor::new(store).run(&key("k"), None, |_| async { Ok::<_, Infallible>(7) }).await;
    assert!(matches!(result, Err(RunError::Undecodable(_))));
}

#[tokio::test(start_paused = true)]
async fn values_stay_out_of_debug_output_and_errors_keep_their_source() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    let executed = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>("card 4242".to_owned()) }).await;
    assert!(!format!("{executed:?}").contains("4242"));
    store.inject(Operation::Reserve, &[], Fault::Refuse(ErrorKind::Misconfigured));
    let error = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(()) }).await.unwrap_err();
    assert_eq!(error.source().unwrap().to_string(), "faulty: reserve: the store is not set up for this");
    assert!(format!("{executor:?}").contains("lease"));
}
