//! Stores that are wrong on purpose, each in one way. The cases must catch them, or they prove nothing.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use idem_core::clock::{Clock, ManualClock};
use idem_core::decision::{self, Change, Decision};
use idem_core::limits::{DEFAULT_OUTCOME_LIMIT, MAX_RETENTION, check_lease, check_retention};
use idem_core::{
    Body, Capabilities, ErrorClass, ErrorKind, Failure, Header, Headers, InvalidInput, Key, KeyStore, Lease,
    OnAbandoned, Operation, Origin, Outcome, PurgeBudget, Purged, Record, Reservation, Reserve, State, StoreError,
    Token,
};
use tokio::sync::Semaphore;

use crate::harness::{Abilities, Fixture, Harness, HarnessError, Time};

/// Every fault, with what is wrong and the case named for it.
macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident => $case:literal;)+) => {
        /// What is wrong with a broken store.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Fault {
            $($(#[$doc])* $fault,)+
        }

        impl Fault {
            /// All faults.
            pub const ALL: &[Self] = &[$(Self::$fault),+];

            /// The case that must catch it.
            #[must_use]
            pub fn caught_by(self) -> &'static str {
                match self {
                    $(Self::$fault => $case,)+
                }
            }
        }
    };
}

faults! {
    /// Looks, decides, and writes later: two callers see the key absent.
    CheckThenWrite => "r01_exactly_one_of_many_callers_acquires_an_absent_key";
    /// Checks then writes when it takes over.
    TakeoverNotAtomic => "r01_exactly_one_of_many_callers_takes_an_abandoned_key_over";
    /// A key twice in a batch is given out twice.
    BatchNotAtomic => "r01_a_key_twice_in_a_batch_is_acquired_once";
    /// A duplicate is an error.
    DuplicateIsError => "r02_a_duplicate_is_an_answer_and_never_an_error";
    /// A result is given away once, and then forgotten.
    ReplaysOnce => "r02_every_caller_of_a_completed_key_gets_the_outcome";
    /// A batch takes a request that is in it twice for two rivals.
    BatchNotSelfRecognising => "r04_a_request_twice_in_a_batch_is_one_attempt";
    /// A takeover in a batch looks like a fresh run.
    BatchTakeoverLooksFresh => "r05_a_batch_takes_over_as_a_single_reserve_does";
    /// The last outcome for a key in a batch replaces the ones before, and all are told that they were stored.
    BatchLastOutcomeWins => "r07_a_key_twice_in_a_batch_of_completes_gets_one_outcome";
    /// A batch takes expired records for live ones.
    BatchSeesExpired => "r09_expired_records_are_absent_for_a_batch";
    /// A batch finds out by the tokens which of its requests were given their keys.
    BatchGoesByToken => "r06_a_batch_goes_by_its_keys_and_not_by_its_tokens";
    /// Answers of a batch are in another order than its requests.
    BatchOutOfOrder => "r02_a_batch_of_reserves_answers_each_on_its_own";
    /// The fingerprint is compared once the record is completed, not before.
    MismatchOnlyWhenCompleted => "r03_mismatch_while_in_progress";
    /// The replay path skips the fingerprint.
    MismatchNotWhenCompleted => "r03_mismatch_when_completed";
    /// The same token passes whatever it asks for.
    MismatchAfterToken => "r03_mismatch_under_the_same_token";
    /// The fingerprint is lost at complete.
    FingerprintLostAtComplete => "r03_mismatch_when_completed";
    /// The fingerprint is lost at fail.
    FingerprintLostAtFail => "r03_mismatch_when_failed";
    /// A later reserve's fingerprint replaces the first one's.
    FingerprintAdopted => "r03_absent_fingerprint_matches_and_is_not_adopted";
    /// Another key with the same fingerprint is taken for a duplicate.
    FingerprintIsKey => "r03_equal_fingerprints_of_two_keys_have_nothing_to_do_with_each_other";
    /// A repeated reserve meets its own record as a rival.
    NotSelfRecognising => "r04_a_repeated_reserve_meets_itself_and_no_rival";
    /// Compares fingerprints, not tokens, to recognise itself.
    SelfByFingerprint => "r01_exactly_one_of_many_callers_acquires_an_absent_key";
    /// A repeated takeover is told that the key was fresh.
    OriginForgotten => "r04_a_repeated_takeover_keeps_its_origin";
    /// A repeated complete is refused.
    CompleteNotRepeatable => "r04_a_repeated_complete_changes_nothing";
    /// A repeated complete starts the retention anew.
    RepeatMovesExpiry => "r04_a_repeated_complete_changes_nothing";
    /// A repeated fail is refused.
    FailNotRepeatable => "r04_a_repeated_fail_changes_nothing";
    /// A late reserve of a failed attempt gets the key once more, under the same token.
    LateReserveRevives => "r04_a_late_reserve_of_a_failed_attempt_is_refused";
    /// A token that held the key before a takeover is taken for the holder's.
    OldTokenRecognised => "r04_a_late_reserve_of_an_attempt_that_was_taken_over_is_a_rival";
    /// A late reserve of a completed attempt gets the key once more.
    CompletedReserveRevives => "r04_a_late_reserve_of_a_completed_attempt_is_a_replay";
    /// The lease is written in seconds and compared in milliseconds: it does not end.
    LeaseInWrongUnit => "r05_a_key_can_be_taken_over_once_the_lease_is_over";
    /// The lease ends a thousand times too early.
    LeaseTooShort => "r05_a_key_is_refused_until_the_lease_ends";
    /// The last millisecond of the lease counts as over.
    TakeoverEarly => "r05_a_key_is_refused_until_the_lease_ends";
    /// At the lease's end the key is still refused.
    TakeoverLate => "r05_a_key_can_be_taken_over_once_the_lease_is_over";
    /// Takes over although it was told to refuse.
    RefuseIgnored => "r05_an_abandoned_key_is_reported_once_the_lease_is_over";
    /// `retry_after` is always the whole lease.
    RetryAfterConstant => "r05_retry_after_is_what_is_left_of_the_lease";
    /// `retry_after` is zero.
    RetryAfterZero => "r05_retry_after_is_what_is_left_of_the_lease";
    /// A takeover looks like a fresh run.
    TakeoverLooksFresh => "r05_a_takeover_tells_the_previous_attempt";
    /// A renewal changes nothing.
    RenewIgnored => "r05_a_renewed_lease_holds_until_its_new_end";
    /// Deadlines are judged by the client's clock.
    ClientClock => "r10_deadlines_follow_the_stores_clock";
    /// complete does not compare the token.
    NoFencing => "r06_complete_after_a_takeover_is_refused";
    /// fail does not compare the token: a late fail frees another's key.
    FailNotFenced => "r06_fail_after_a_takeover_is_refused";
    /// A late renewal takes the key back.
    RenewNotFenced => "r06_renew_after_a_takeover_does_not_take_the_key_back";
    /// A result that comes after the lease's end is thrown away though nobody took over.
    LateCompleteRefused => "r06_a_late_complete_that_nobody_overtook_is_kept";
    /// A renewal sets the lease's end, also to an earlier one.
    RenewShortens => "r06_renew_never_shortens_a_lease";
    /// Checks the token, and completes later what may be another's by then.
    CompleteNotAtomic => "r06_a_late_complete_and_a_takeover_exclude_each_other";
    /// Checks the token, and renews later what may be another's by then.
    RenewNotAtomic => "r06_a_late_renew_and_a_takeover_exclude_each_other";
    /// complete on an absent key makes a record.
    CompleteInserts => "r06_calls_under_a_lease_on_an_absent_key_are_refused";
    /// A failed attempt can still complete.
    FailedMayComplete => "r06_after_a_fail_the_attempt_is_over";
    /// The attempt is not counted.
    AttemptNotCounted => "r06_the_attempt_grows_with_every_acquire";
    /// Another outcome under the same token replaces the first.
    CompleteOverwrites => "r07_another_outcome_under_the_same_token_is_refused";
    /// Looks for an outcome, and writes its own later.
    CompletesRace => "r07_of_many_outcomes_at_once_one_is_kept";
    /// Codes are kept in a byte.
    CodeInByte => "r07_every_code_comes_back";
    /// A result lives no longer than the lease under which it was made.
    ResultExpiresWithLease => "r07_a_completed_key_stays_completed_when_its_lease_is_over";
    /// Bodies are kept as text.
    BodyAsText => "r07_bodies_come_back_bit_for_bit";
    /// Bodies are cut at 64 KiB.
    BodyCut => "r07_bodies_come_back_bit_for_bit";
    /// Header lines of one name collapse into one.
    HeadersMerged => "r07_header_lines_come_back_in_order_with_repeats_and_raw_values";
    /// A full store drops the oldest records.
    Evicts => "r07_no_live_record_is_evicted";
    /// What was acknowledged is gone with the process.
    NotDurable => "r07_acknowledged_outcomes_survive_the_process";
    /// fail deletes the record, and attempt and note with it.
    FailDeletes => "r08_fail_keeps_note_attempt_and_fingerprint";
    /// A failed key is held until its lease ends.
    FailHolds => "r08_fail_frees_the_key_for_a_retry_at_once";
    /// The mark of a run in progress has the retention of a result.
    OneDuration => "r09_a_crash_blocks_a_key_for_its_lease_and_not_for_its_retention";
    /// fetch shows records that have expired.
    ExpiredVisible => "r09_an_expired_record_is_absent_for_every_call";
    /// An expired record can still be completed.
    ExpiredCompletes => "r09_an_expired_record_is_absent_for_every_call";
    /// The retention counts from the first acquire.
    RetentionFromAcquire => "r09_retention_counts_from_the_complete";
    /// A late fail writes a record with the old expiry.
    FailKeepsOldExpiry => "r09_a_late_fail_counts_its_retention_from_then";
    /// A renewal extends the lease beyond the record's life.
    RenewForgetsExpiry => "r09_a_record_outlives_its_renewed_lease";
    /// A withheld result is replayed as an empty one.
    WithheldAsEmpty => "r11_withheld_is_an_outcome_of_its_own";
    /// Keys are folded to lower case.
    KeyFolded => "r12_keys_of_every_allowed_form_are_keys_of_their_own";
    /// Keys are cut at 200 bytes.
    KeyCut => "r12_keys_of_every_allowed_form_are_keys_of_their_own";
    /// An outcome over the limit is cut instead of refused.
    OverLimitCut => "r12_an_outcome_over_the_limit_is_refused_and_the_key_still_held";
    /// Failure notes are cut at 1,000 bytes.
    NoteCut => "r12_the_longest_note_and_the_most_header_lines_are_kept";
    /// Header lines are not checked.
    HeadersUnchecked => "r12_an_outcome_over_the_limit_is_refused_and_the_key_still_held";
    /// Durations are not checked.
    DurationsUnchecked => "r12_leases_and_retentions_beyond_the_limits_are_refused";
    /// One bad call fails its whole batch.
    BatchFailsTogether => "r12_one_bad_call_in_a_batch_does_not_touch_its_neighbours";
    /// An error of the backend is taken for an absent record.
    ErrorAsAbsent => "r13_trouble_is_never_taken_for_an_absent_record";
    /// Trouble that passes is called permanent.
    TroubleIsPermanent => "r13_trouble_is_never_taken_for_an_absent_record";
    /// A reply that was lost is told as a call that had no effect.
    LostReplyIsRetryable => "r13_a_retryable_error_means_that_nothing_happened";
    /// What cannot be read is taken for an absent record.
    UnreadableAsAbsent => "r13_what_cannot_be_read_is_an_error_of_every_call";
    /// A purge removes what cannot be read.
    PurgesUnreadable => "r13_what_cannot_be_read_is_an_error_of_every_call";
    /// Acknowledges before it has written; trouble loses it.
    AcknowledgesEarly => "r13_what_was_acknowledged_survives_trouble";
    /// A failover: what the old server acknowledged while the new one took its place is gone.
    FailsOverToThePast => "histories_under_disturbance_have_a_legal_order";
    /// A reserve dropped half-way leaves a record that nobody holds.
    TwoSteps => "r14_a_dropped_call_is_done_or_not_done";
    /// Calls that are under way together are sent by the first of them, and wait for ever when it is dropped.
    DroppedLeaderStrands => "r14_a_dropped_call_does_not_hold_its_neighbours_up";
    /// A dropped call does not give its connection back.
    LeaksConnections => "r14_dropped_calls_leak_nothing";
    /// A purge removes records whose lease is over.
    PurgesAbandoned => "r15_purge_removes_nothing_that_lives";
    /// A purge removes failed records.
    PurgesFailed => "r15_purge_removes_nothing_that_lives";
    /// A purge goes by an index of expiry times and does not look at the record again.
    PurgesByStaleIndex => "r15_purge_spares_the_successor_of_an_expired_record";
    /// A purge says that it is done and has removed nothing.
    PurgesNothing => "r15_purge_removes_what_has_expired_within_its_budget";
    /// The scope is not part of the key.
    ScopeIgnored => "r16_the_same_id_in_two_scopes_is_two_keys";
    /// Scope and id are joined by a colon.
    ScopeJoined => "r16_the_border_between_scope_and_id_cannot_be_moved";
}

/// A harness for a store with a fault, or with none.
#[derive(Debug, Clone, Copy)]
pub struct Broken(pub Option<Fault>);

#[async_trait]
impl Harness for Broken {
    fn name(&self) -> String {
        match self.0 {
            Some(fault) => format!("broken ({fault:?})"),
            None => "sound".to_owned(),
        }
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Manual).with_reopen().with_disturb().with_garble()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let clock = Arc::new(ManualClock::default());
        Ok(Box::new(Clocked { store: Arc::new(BrokenStore::new(self.0, clock.clone())), clock }))
    }
}

struct Clocked {
    store: Arc<BrokenStore>,
    clock: Arc<ManualClock>,
}

#[async_trait]
impl Fixture for Clocked {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.store.clone()
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        self.clock.advance(by);
        Ok(())
    }

    async fn reopen(&self) -> Result<Arc<dyn KeyStore>, HarnessError> {
        if self.store.has(Fault::NotDurable) {
            self.store.records().clear();
        }
        Ok(self.store.clone())
    }

    async fn disturb(&self) -> Result<(), HarnessError> {
        if self.store.has(Fault::AcknowledgesEarly) {
            let mut records = self.store.records();
            let latest = records.iter().max_by_key(|(_, record)| record.updated_at).map(|(at, _)| at.clone());
            if let Some(latest) = latest {
                records.remove(&latest);
            }
        }
        if self.store.has(Fault::FailsOverToThePast) {
            let successor = self.store.records().clone();
            tokio::time::sleep(Duration::from_millis(2)).await;
            *self.store.records() = successor;
        }
        self.store.trouble.store(12, Ordering::SeqCst);
        Ok(())
    }

    async fn garble(&self, key: &Key) -> Result<(), HarnessError> {
        self.store.garbled().insert(key.clone());
        Ok(())
    }
}

/// A correct store over a map, and one fault.
struct BrokenStore {
    fault: Option<Fault>,
    clock: Arc<ManualClock>,
    records: Mutex<HashMap<Key, Record>>,
    /// When records expire, as of their acquire, for the fault that goes by it.
    index: Mutex<Vec<(SystemTime, Key)>>,
    /// Keys whose record cannot be read.
    garbled: Mutex<HashSet<Key>>,
    connections: Semaphore,
    /// Whether a call sends for others, for the fault that has it so.
    leading: AtomicBool,
    /// Calls that will meet trouble.
    trouble: AtomicU32,
}

const STORE: &str = "broken";

fn error(kind: ErrorKind, operation: Operation) -> StoreError {
    StoreError::new(kind, STORE, operation)
}

impl BrokenStore {
    fn new(fault: Option<Fault>, clock: Arc<ManualClock>) -> Self {
        Self {
            fault,
            clock,
            records: Mutex::default(),
            index: Mutex::default(),
            garbled: Mutex::default(),
            leading: AtomicBool::new(false),
            connections: Semaphore::new(8),
            trouble: AtomicU32::new(0),
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn records(&self) -> MutexGuard<'_, HashMap<Key, Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> SystemTime {
        if self.has(Fault::ClientClock) { SystemTime::now() } else { self.clock.now() }
    }

    fn garbled(&self) -> MutexGuard<'_, HashSet<Key>> {
        self.garbled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the record of that key can be read.
    fn readable(&self, key: &Key, operation: Operation) -> Result<(), StoreError> {
        if !self.garbled().contains(key) {
            return Ok(());
        }
        if self.has(Fault::UnreadableAsAbsent) {
            self.garbled().remove(key);
            self.records().remove(key);
            return Ok(());
        }
        Err(error(ErrorKind::Unreadable, operation))
    }

    /// Meets trouble, if there is some.
    fn trouble(&self, operation: Operation) -> Result<(), StoreError> {
        let one_less = |left: u32| left.checked_sub(1);
        match self.trouble.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less) {
            Ok(_) if self.has(Fault::TroubleIsPermanent) => {
                Err(error(ErrorKind::Unavailable, operation).with_class(ErrorClass::Permanent))
            }
            Ok(_) => Err(error(ErrorKind::Unavailable, operation).with_class(ErrorClass::Retryable)),
            Err(_) => Ok(()),
        }
    }

    /// A call takes a connection and gives it back, also when it is dropped.
    async fn connection(&self) {
        let permit = self.connections.acquire().await;
        if self.has(Fault::LeaksConnections) {
            if let Ok(permit) = permit {
                permit.forget();
            }
            tokio::task::yield_now().await;
            self.connections.add_permits(1);
        } else {
            tokio::task::yield_now().await;
        }
    }

    /// Waits for the call that sends for all, or is that call.
    async fn lead(&self) {
        while self.leading.swap(true, Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::task::yield_now().await;
        self.leading.store(false, Ordering::SeqCst);
    }

    /// Where the record of that key is.
    fn at(&self, key: &Key) -> Key {
        let (scope, id) = (key.scope(), key.id());
        let key = match self.fault {
            Some(Fault::ScopeIgnored) => Key::new("", id),
            Some(Fault::ScopeJoined) => Key::new("", &format!("{scope}:{id}").chars().take(255).collect::<String>()),
            Some(Fault::KeyFolded) => Key::new(scope, &id.to_lowercase()),
            Some(Fault::KeyCut) => Key::new(scope, &id[..id.floor_char_boundary(200)]),
            _ => return key.clone(),
        };
        // Each of these is a shorter form of a valid key.
        key.unwrap_or_else(|_| unreachable!("a part of a valid key is valid"))
    }

    fn invalid(&self, operation: Operation, checked: Result<(), InvalidInput>) -> Result<(), StoreError> {
        match checked {
            Err(InvalidInput::OutcomeTooLarge { .. }) if self.has(Fault::OverLimitCut) => Ok(()),
            Err(InvalidInput::TooManyHeaders { .. } | InvalidInput::HeaderNameLength { .. })
                if self.has(Fault::HeadersUnchecked) =>
            {
                Ok(())
            }
            Err(
                InvalidInput::LeaseTooShort { .. }
                | InvalidInput::LeaseTooLong { .. }
                | InvalidInput::RetentionTooShort { .. }
                | InvalidInput::RetentionTooLong { .. }
                | InvalidInput::RetentionShorterThanLease { .. },
            ) if self.has(Fault::DurationsUnchecked) => Ok(()),
            checked => checked.map_err(|input| StoreError::invalid(input, STORE, operation)),
        }
    }

    /// The decision, bent by the fault.
    fn decide(&self, record: Option<&Record>, request: &Reserve, now: SystemTime) -> Decision {
        let mut request = request.clone();
        let record = record.filter(|record| !record.is_expired(now));
        match (self.fault, record) {
            (Some(Fault::MismatchOnlyWhenCompleted), Some(record)) if record.outcome().is_none() => {
                request.fingerprint = None;
            }
            (Some(Fault::MismatchNotWhenCompleted), Some(record)) if record.outcome().is_some() => {
                request.fingerprint = None;
            }
            (Some(Fault::MismatchAfterToken), Some(record)) if record.token == request.token => {
                request.fingerprint = None;
            }
            (Some(Fault::NotSelfRecognising), Some(record)) if record.state == State::InProgress => {
                request.token = Token::random();
            }
            (Some(Fault::SelfByFingerprint), Some(record)) if record.fingerprint == request.fingerprint => {
                request.token = record.token;
            }
            (Some(Fault::OldTokenRecognised), Some(record))
                if record.state == State::InProgress
                    && matches!(record.origin, Origin::Takeover(previous) if previous.token == request.token) =>
            {
                return Decision::Answer(Reservation::Acquired(record.lease()));
            }
            (Some(Fault::CompletedReserveRevives), Some(record))
                if record.token == request.token && record.outcome().is_some() =>
            {
                return Decision::Answer(Reservation::Acquired(record.lease()));
            }
            (Some(Fault::LateReserveRevives), Some(record)) if matches!(record.state, State::Failed(_)) => {
                let token = request.token;
                request.token = Token::random();
                return match decision::decide(Some(record), &request, now) {
                    Decision::Acquire(record) => Decision::Acquire(Record { token, ..record }),
                    other => other,
                };
            }
            (Some(Fault::TakeoverEarly), Some(record)) if record.state == State::InProgress => {
                return decision::decide(Some(record), &request, now + Duration::from_millis(1));
            }
            (Some(Fault::TakeoverLate), Some(record)) if now == record.lease_until => {
                return decision::decide(Some(record), &request, now - Duration::from_nanos(1));
            }
            (Some(Fault::RefuseIgnored), _) => request.on_abandoned = OnAbandoned::TakeOver,
            _ => {}
        }
        decision::decide(record, &request, now)
    }

    /// What is written, bent by the fault.
    fn bend(&self, record: &mut Record, before: Option<&Record>, request: &Reserve, now: SystemTime) {
        match self.fault {
            Some(Fault::LeaseInWrongUnit) => {
                record.lease_until = now + request.lease * 1_000;
                record.expires_at = record.expires_at.max(record.lease_until);
            }
            Some(Fault::LeaseTooShort) => record.lease_until = now + request.lease / 1_000,
            Some(Fault::OneDuration) => record.lease_until = record.expires_at,
            Some(Fault::TakeoverLooksFresh) => record.origin = Origin::Fresh,
            Some(Fault::AttemptNotCounted) => record.attempt = before.map_or(1, |before| before.attempt),
            Some(Fault::FingerprintAdopted) => record.fingerprint = request.fingerprint.or(record.fingerprint),
            _ => {}
        }
    }

    fn bend_answer(&self, request: &Reserve, answer: Reservation) -> Result<Reservation, StoreError> {
        Ok(match (self.fault, answer) {
            (Some(Fault::DuplicateIsError), Reservation::InProgress { .. }) => {
                return Err(error(ErrorKind::Conflict, Operation::Reserve).with_class(ErrorClass::Permanent));
            }
            (Some(Fault::RetryAfterConstant), Reservation::InProgress { attempt, .. }) => {
                Reservation::InProgress { attempt, retry_after: request.lease }
            }
            (Some(Fault::RetryAfterZero), Reservation::InProgress { attempt, .. }) => {
                Reservation::InProgress { attempt, retry_after: Duration::ZERO }
            }
            (Some(Fault::OriginForgotten), Reservation::Acquired(lease)) => {
                Reservation::Acquired(Lease::new(lease.key, lease.token, lease.attempt, Origin::Fresh, lease.retention))
            }
            (_, answer) => answer,
        })
    }

    /// The outcome, bent by the fault on its way into the record.
    fn bend_outcome(&self, outcome: &Outcome) -> Outcome {
        let mut outcome = outcome.clone();
        if self.has(Fault::CodeInByte) {
            outcome.code %= 256;
        }
        match (self.fault, &outcome.body) {
            (Some(Fault::BodyAsText), Body::Stored(bytes)) => {
                outcome.body = Body::Stored(String::from_utf8_lossy(bytes).into_owned().into());
            }
            (Some(Fault::BodyCut), Body::Stored(bytes)) => {
                outcome.body = Body::Stored(bytes.slice(..bytes.len().min(65_536)));
            }
            (Some(Fault::OverLimitCut), Body::Stored(bytes)) => {
                outcome.body = Body::Stored(bytes.slice(..bytes.len().min(DEFAULT_OUTCOME_LIMIT / 2)));
            }
            (Some(Fault::WithheldAsEmpty), Body::Withheld(_)) => outcome.body = Body::Stored(bytes::Bytes::new()),
            (Some(Fault::HeadersMerged), _) => {
                let mut lines: Vec<Header> = Vec::new();
                for line in &outcome.headers {
                    match lines.iter_mut().find(|found| found.name == line.name) {
                        Some(found) => found.value = line.value.clone(),
                        None => lines.push(line.clone()),
                    }
                }
                outcome.headers = Headers::from(lines);
            }
            _ => {}
        }
        outcome
    }

    fn reserve_now(&self, records: &mut HashMap<Key, Record>, request: &Reserve) -> Result<Reservation, StoreError> {
        let (now, at) = (self.now(), self.at(&request.key));
        if self.has(Fault::FingerprintIsKey)
            && let Some(twin) = records.values().find(|record| {
                record.fingerprint.is_some() && record.fingerprint == request.fingerprint && record.key != request.key
            })
        {
            return Ok(match twin.outcome() {
                Some(_) => Reservation::Completed(twin.read(now)),
                None => Reservation::InProgress { attempt: twin.attempt, retry_after: request.lease },
            });
        }
        let before = records.get(&at);
        match self.decide(before, request, now) {
            Decision::Acquire(mut record) => {
                self.bend(&mut record, before, request, now);
                let lease = record.lease();
                if self.has(Fault::Evicts)
                    && records.len() >= 64
                    && let Some(oldest) = records.keys().next().cloned()
                {
                    records.remove(&oldest);
                }
                if self.has(Fault::PurgesByStaleIndex) {
                    let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
                    index.push((record.expires_at, at.clone()));
                }
                records.insert(at, record);
                Ok(Reservation::Acquired(lease))
            }
            Decision::Answer(answer) => {
                if self.has(Fault::ReplaysOnce) && matches!(answer, Reservation::Completed(_)) {
                    records.remove(&at);
                }
                self.bend_answer(request, answer)
            }
            Decision::LeaseLost => Err(error(ErrorKind::LeaseLost, Operation::Reserve)),
        }
    }

    /// Reads now and writes later what it then decides.
    async fn reserve_later(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        let at = self.at(&request.key);
        let before = self.records().get(&at).cloned();
        let decided = self.decide(before.as_ref(), request, self.now());
        tokio::task::yield_now().await;
        match decided {
            Decision::Acquire(record) => {
                let lease = record.lease();
                self.records().insert(at, record);
                Ok(Reservation::Acquired(lease))
            }
            Decision::Answer(answer) => Ok(answer),
            Decision::LeaseLost => Err(error(ErrorKind::LeaseLost, Operation::Reserve)),
        }
    }

    /// A call under a lease: with the lease as the fault sees it.
    fn change(
        &self,
        lease: &Lease,
        operation: Operation,
        unfenced: Fault,
        call: impl FnOnce(Option<&mut Record>, &Lease, SystemTime) -> Result<Change, decision::Refusal>,
    ) -> Result<(), StoreError> {
        self.trouble(operation)?;
        self.readable(&lease.key, operation)?;
        let (mut now, at) = (self.now(), self.at(&lease.key));
        let mut records = self.records();
        let record = records.get_mut(&at);
        let mut lease = lease.clone();
        if let Some(record) = &record
            && self.has(unfenced)
        {
            lease.token = record.token;
        }
        if self.has(Fault::ExpiredCompletes)
            && let Some(record) = &record
        {
            now = now.min(record.expires_at - Duration::from_nanos(1));
        }
        call(record, &lease, now).map(drop).map_err(|refusal| StoreError::refused(refusal, STORE, operation))
    }
}

impl BrokenStore {
    /// Reads now and writes later what comes of it.
    async fn change_later(
        &self,
        lease: &Lease,
        operation: Operation,
        call: impl FnOnce(Option<&mut Record>, SystemTime) -> Result<Change, decision::Refusal>,
    ) -> Result<(), StoreError> {
        let at = self.at(&lease.key);
        let mut record = self.records().get(&at).cloned();
        let change =
            call(record.as_mut(), self.now()).map_err(|refusal| StoreError::refused(refusal, STORE, operation))?;
        tokio::task::yield_now().await;
        if let (Change::Write, Some(record)) = (change, record) {
            self.records().insert(at, record);
        }
        Ok(())
    }
}

impl fmt::Debug for BrokenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BrokenStore").field("fault", &self.fault).finish_non_exhaustive()
    }
}

impl fmt::Display for BrokenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STORE)
    }
}

#[async_trait]
impl KeyStore for BrokenStore {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.durable = true;
        capabilities
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.invalid(Operation::Reserve, request.validate(MAX_RETENTION))?;
        self.connection().await;
        if self.has(Fault::DroppedLeaderStrands) {
            self.lead().await;
        }
        let takes_over = || self.records().get(&self.at(&request.key)).is_some();
        match (self.fault, self.trouble(Operation::Reserve)) {
            (Some(Fault::ErrorAsAbsent), Err(_)) => {
                let lease = Lease::new(request.key.clone(), request.token, 1, Origin::Fresh, request.retention);
                return Ok(Reservation::Acquired(lease));
            }
            (Some(Fault::LostReplyIsRetryable), trouble) => {
                let answer = self.reserve_now(&mut self.records(), request)?;
                return trouble.map(|()| answer);
            }
            (_, trouble) => trouble?,
        }
        self.readable(&request.key, Operation::Reserve)?;
        match self.fault {
            Some(Fault::CheckThenWrite) => self.reserve_later(request).await,
            Some(Fault::TakeoverNotAtomic) if takes_over() => self.reserve_later(request).await,
            Some(Fault::TwoSteps) if !takes_over() => {
                let anonymous = request.clone().with_token(Token::random());
                let at = self.at(&request.key);
                self.reserve_now(&mut self.records(), &anonymous)?;
                tokio::task::yield_now().await;
                if let Some(record) = self.records().get_mut(&at) {
                    record.token = request.token;
                }
                self.reserve_now(&mut self.records(), request)
            }
            _ => self.reserve_now(&mut self.records(), request),
        }
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.invalid(Operation::Complete, check_retention(lease.retention, MAX_RETENTION))?;
        self.invalid(Operation::Complete, outcome.validate(DEFAULT_OUTCOME_LIMIT))?;
        self.connection().await;
        if self.has(Fault::CompleteInserts) {
            let request = Reserve::new(lease.key.clone()).with_token(lease.token);
            self.reserve_now(&mut self.records(), &request)?;
        }
        if let Some(Fault::CompleteNotAtomic | Fault::CompletesRace) = self.fault {
            return self
                .change_later(lease, Operation::Complete, |record, now| decision::complete(record, lease, outcome, now))
                .await;
        }
        self.change(lease, Operation::Complete, Fault::NoFencing, |record, lease, now| {
            let outcome = self.bend_outcome(outcome);
            let Some(record) = record else { return decision::complete(None, lease, &outcome, now) };
            let before = record.clone();
            match (self.fault, &record.state) {
                (Some(Fault::LateCompleteRefused), State::InProgress) if now >= record.lease_until => {
                    return Err(decision::Refusal::LeaseLost);
                }
                (Some(Fault::CompleteNotRepeatable), State::Completed(_)) => return Err(decision::Refusal::LeaseLost),
                (Some(Fault::CompleteOverwrites), State::Completed(_))
                | (Some(Fault::FailedMayComplete), State::Failed(_))
                    if record.token == lease.token =>
                {
                    record.state = State::InProgress;
                }
                _ => {}
            }
            let change = decision::complete(Some(record), lease, &outcome, now)?;
            match self.fault {
                Some(Fault::FingerprintLostAtComplete) => record.fingerprint = None,
                Some(Fault::ResultExpiresWithLease) => record.expires_at = record.lease_until,
                Some(Fault::RetentionFromAcquire) => record.expires_at = before.expires_at,
                Some(Fault::RepeatMovesExpiry) => record.expires_at = now + lease.retention,
                _ => {}
            }
            Ok(change)
        })
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.invalid(Operation::Fail, check_retention(lease.retention, MAX_RETENTION))?;
        self.connection().await;
        let mut delete = false;
        self.change(lease, Operation::Fail, Fault::FailNotFenced, |record, lease, now| {
            let cut = Failure::truncated(&failure.note()[..failure.note().floor_char_boundary(1_000)]);
            let failure = if self.has(Fault::NoteCut) { &cut } else { failure };
            let Some(record) = record else { return decision::fail(None, lease, failure, now) };
            let before = record.clone();
            if self.has(Fault::FailNotRepeatable) && matches!(record.state, State::Failed(_)) {
                return Err(decision::Refusal::LeaseLost);
            }
            let change = decision::fail(Some(record), lease, failure, now)?;
            match self.fault {
                Some(Fault::FingerprintLostAtFail) => record.fingerprint = None,
                Some(Fault::FailKeepsOldExpiry) => record.expires_at = before.expires_at,
                Some(Fault::FailHolds) => record.state = State::InProgress,
                Some(Fault::FailDeletes) => delete = true,
                _ => {}
            }
            Ok(change)
        })?;
        if delete {
            self.records().remove(&self.at(&lease.key));
        }
        Ok(())
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        self.invalid(Operation::Renew, check_lease(extend_by))?;
        self.connection().await;
        if self.has(Fault::RenewNotAtomic) {
            return self
                .change_later(lease, Operation::Renew, |record, now| decision::renew(record, lease, extend_by, now))
                .await;
        }
        self.change(lease, Operation::Renew, Fault::RenewNotFenced, |record, lease, now| {
            let Some(record) = record else { return decision::renew(None, lease, extend_by, now) };
            let before = record.clone();
            let change = decision::renew(Some(record), lease, extend_by, now)?;
            match self.fault {
                Some(Fault::RenewIgnored) => *record = before,
                Some(Fault::RenewShortens) => record.lease_until = now + extend_by,
                Some(Fault::RenewForgetsExpiry) => record.expires_at = before.expires_at,
                _ => {}
            }
            Ok(change)
        })
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        self.connection().await;
        match (self.fault, self.trouble(Operation::Fetch)) {
            (Some(Fault::ErrorAsAbsent), Err(_)) => return Ok(None),
            (_, trouble) => trouble?,
        }
        self.readable(key, Operation::Fetch)?;
        let now = self.now();
        let visible = |record: &&Record| self.has(Fault::ExpiredVisible) || !record.is_expired(now);
        Ok(self.records().get(&self.at(key)).filter(visible).map(|record| record.read(now)))
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        self.trouble(Operation::Purge)?;
        if self.has(Fault::PurgesUnreadable) {
            for key in self.garbled().drain() {
                self.records().remove(&key);
            }
        }
        let now = self.now();
        let mut records = self.records();
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        let due = |record: &Record| match self.fault {
            Some(Fault::PurgesAbandoned) => now >= record.lease_until && record.state == State::InProgress,
            Some(Fault::PurgesFailed) => record.is_expired(now) || matches!(record.state, State::Failed(_)),
            Some(Fault::PurgesByStaleIndex) => index.iter().any(|(expiry, at)| now >= *expiry && *at == record.key),
            Some(Fault::PurgesNothing) => false,
            _ => record.is_expired(now),
        };
        let expired: Vec<Key> = records.iter().filter(|(_, record)| due(record)).map(|(at, _)| at.clone()).collect();
        let removed = expired.iter().take(budget.records).filter(|at| records.remove(*at).is_some()).count();
        Ok(Purged::new(removed as u64, removed < expired.len()))
    }

    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        let mut answers = Vec::with_capacity(requests.len());
        if self.has(Fault::BatchFailsTogether)
            && let Some(Err(input)) =
                requests.iter().map(|request| request.validate(MAX_RETENTION)).find(Result::is_err)
        {
            let fail = || Err(StoreError::invalid(input.clone(), STORE, Operation::Reserve));
            return requests.iter().map(|_| fail()).collect();
        }
        if self.has(Fault::BatchNotAtomic) {
            let seen = self.records().clone();
            for request in requests {
                answers.push(self.reserve_now(&mut seen.clone(), request));
            }
        }
        for (at, request) in requests.iter().enumerate().skip(answers.len()) {
            let mut request = request.clone();
            if self.has(Fault::BatchSeesExpired)
                && let Some(record) = self.records().get_mut(&self.at(&request.key))
            {
                record.expires_at = record.expires_at.max(self.now() + request.retention);
            }
            if self.has(Fault::BatchNotSelfRecognising) && requests[..at].contains(&request) {
                request.token = Token::random();
            }
            answers.push(match self.reserve(&request).await {
                Ok(Reservation::Acquired(lease)) if self.has(Fault::BatchTakeoverLooksFresh) => {
                    Ok(Reservation::Acquired(Lease::new(
                        lease.key,
                        lease.token,
                        lease.attempt,
                        Origin::Fresh,
                        lease.retention,
                    )))
                }
                answer => answer,
            });
        }
        if self.has(Fault::BatchOutOfOrder) {
            answers.reverse();
        }
        if self.has(Fault::BatchGoesByToken) {
            // The tokens of those that were acquired, matched with the requests in their order.
            let acquired = answers.iter().filter(|answer| matches!(answer, Ok(Reservation::Acquired(_)))).count();
            for (answer, request) in answers.iter_mut().zip(requests).take(acquired) {
                if request.token == requests[0].token {
                    let origin = Origin::Fresh;
                    let lease = Lease::new(request.key.clone(), request.token, 1, origin, request.retention);
                    *answer = Ok(Reservation::Acquired(lease));
                }
            }
        }
        answers
    }

    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        let mut answers = Vec::with_capacity(calls.len());
        for (lease, outcome) in calls {
            if self.has(Fault::BatchLastOutcomeWins)
                && let Some(record) = self.records().get_mut(&self.at(&lease.key))
                && record.token == lease.token
            {
                record.state = State::InProgress;
            }
            answers.push(self.complete(lease, outcome).await);
        }
        answers
    }
}
