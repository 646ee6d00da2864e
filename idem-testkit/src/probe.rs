//! The store as the cases see it: every call is recorded, repeated until it is answered, and on demand delivered twice.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use idem_core::{
    Capabilities, ErrorClass, ErrorKind, Failure, Key, KeyStore, Lease, Operation, Outcome, PurgeBudget, Purged,
    Record, Reservation, Reserve, StoreError,
};

/// The last operations of a case, for its report.
#[derive(Debug)]
pub(crate) struct Log {
    start: Instant,
    lines: Mutex<VecDeque<String>>,
}

impl Log {
    const LINES: usize = 40;

    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { start: Instant::now(), lines: Mutex::default() })
    }

    pub(crate) fn add(&self, line: &str) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == Self::LINES {
            lines.pop_front();
        }
        lines.push_back(format!("{:>9.3} ms  {line}", self.start.elapsed().as_secs_f64() * 1e3));
    }

    pub(crate) fn text(&self) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(|line| format!("    {line}\n")).collect()
    }
}

/// A call under way: one that is dropped before it was answered is recorded too.
struct Pending<'a> {
    log: &'a Log,
    shown: Option<&'a str>,
}

impl Pending<'_> {
    fn answered(mut self, answer: &(impl fmt::Debug + ?Sized)) {
        if let Some(shown) = self.shown.take() {
            self.log.add(&format!("{shown} -> {answer:?}"));
        }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let Some(shown) = self.shown {
            self.log.add(&format!("{shown} -> dropped without an answer"));
        }
    }
}

/// How often a call that was not answered is sent again.
const REPEATS: u32 = 200;

/// A store around the store under test.
///
/// A call that met an error of class retryable or unknown is sent again as it was, as the contract tells a caller to.
#[derive(Debug)]
pub(crate) struct Probe {
    pub(crate) store: Arc<dyn KeyStore>,
    pub(crate) log: Arc<Log>,
    /// Deliver every call once more after it was answered, and want the same answer (rule R4).
    pub(crate) twice: bool,
}

impl Probe {
    async fn call<T, F>(
        &self,
        operation: Operation,
        shown: String,
        call: impl Fn() -> F + Send + Sync,
        alike: impl Fn(&T, &T) -> bool + Send,
    ) -> Result<T, StoreError>
    where
        T: fmt::Debug + Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let first = self.persist(&shown, &call).await;
        if !self.twice {
            return first;
        }
        let second = self.persist(&shown, &call).await;
        let same = match (&first, &second) {
            (Ok(first), Ok(second)) => alike(first, second),
            (Err(first), Err(second)) => first.kind() == second.kind(),
            _ => false,
        };
        if same {
            return second;
        }
        Err(StoreError::new(ErrorKind::Other, "kit", operation)
            .with_class(ErrorClass::Permanent)
            .with_context(format!("delivered twice, answered first {first:?} and then {second:?}")))
    }

    async fn persist<T, F>(&self, shown: &str, call: impl Fn() -> F + Send) -> Result<T, StoreError>
    where
        T: fmt::Debug + Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let mut repeats = 0;
        loop {
            let pending = Pending { log: &self.log, shown: Some(shown) };
            let answer = call().await;
            pending.answered(&answer);
            match answer {
                Err(error) if error.class() != ErrorClass::Permanent && repeats < REPEATS => {
                    repeats += 1;
                    tokio::time::sleep(Duration::from_millis(u64::from(repeats.min(50)))).await;
                }
                answer => return answer,
            }
        }
    }
}

/// Whether two answers say the same, but for the time that passed between them.
pub(crate) fn alike(first: &Reservation, second: &Reservation) -> bool {
    match (first, second) {
        (Reservation::InProgress { attempt: first, .. }, Reservation::InProgress { attempt: second, .. }) => {
            first == second
        }
        (Reservation::Completed(first), Reservation::Completed(second))
        | (Reservation::Abandoned(first), Reservation::Abandoned(second)) => *first == second.read(first.read_at),
        (first, second) => first == second,
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl KeyStore for Probe {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.call(Operation::Reserve, show(request), || self.store.reserve(request), alike).await
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        let shown = format!("complete {} with {outcome:?}", shown(lease));
        self.call(Operation::Complete, shown, || self.store.complete(lease, outcome), |(), ()| true).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        let shown = format!("fail {} with {failure:?}", shown(lease));
        self.call(Operation::Fail, shown, || self.store.fail(lease, failure), |(), ()| true).await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        let shown = format!("renew {} by {extend_by:?}", shown(lease));
        self.call(Operation::Renew, shown, || self.store.renew(lease, extend_by), |(), ()| true).await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        let shown = format!("fetch {}/{}", key.scope(), short(key.id()));
        self.call(
            Operation::Fetch,
            shown,
            || self.store.fetch(key),
            |first, second| first.is_some() == second.is_some(),
        )
        .await
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        self.persist(&format!("purge {}", budget.records), || self.store.purge_expired(budget)).await
    }

    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        let mut answers = self.store.reserve_many(requests).await;
        self.log.add(&format!("reserve {} keys in a batch -> {answers:?}", requests.len()));
        for (answer, request) in answers.iter_mut().zip(requests) {
            let unanswered = answer.as_ref().is_err_and(|error| error.class() != ErrorClass::Permanent);
            if unanswered || self.twice {
                *answer = self.reserve(request).await;
            }
        }
        answers
    }

    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        let mut answers = self.store.complete_many(calls).await;
        self.log.add(&format!("complete {} keys in a batch -> {answers:?}", calls.len()));
        for (answer, (lease, outcome)) in answers.iter_mut().zip(calls) {
            let unanswered = answer.as_ref().is_err_and(|error| error.class() != ErrorClass::Permanent);
            if unanswered || self.twice {
                *answer = self.complete(lease, outcome).await;
            }
        }
        answers
    }
}

/// A request in few words.
pub(crate) fn show(request: &Reserve) -> String {
    format!(
        "reserve {}/{} as {:?}, {:?}, lease {:?}, retention {:?}, {:?}",
        request.key.scope(),
        short(request.key.id()),
        request.token,
        request.fingerprint,
        request.lease,
        request.retention,
        request.on_abandoned
    )
}

/// A lease in few words.
pub(crate) fn shown(lease: &Lease) -> String {
    format!("{}/{} as {:?} (attempt {})", lease.key.scope(), short(lease.key.id()), lease.token, lease.attempt)
}

fn short(id: &str) -> String {
    match id.char_indices().nth(40) {
        Some((at, _)) => format!("{}… ({} bytes)", &id[..at], id.len()),
        None => id.to_owned(),
    }
}

/// Polls a call a few times and drops it, as a time-out or a client that hangs up does.
pub(crate) async fn dropped<T>(call: impl Future<Output = T>, polls: u32) -> Option<T> {
    let mut call = pin!(call);
    let mut left = polls;
    let polled = poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        call.as_mut().poll(cx).map(Some)
    });
    tokio::time::timeout(Duration::from_millis(u64::from(polls)), polled).await.ok().flatten()
}
