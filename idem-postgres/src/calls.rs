//! The two statements that every call becomes, and how their rows are read.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use idem_core::decision::Refusal;
use idem_core::{
    Body, ErrorKind, Failure, Fingerprint, Key, Lease, OnAbandoned, Operation, Origin, Outcome, PreviousAttempt,
    Record, Reservation, Reserve, State, StoreError, Token, Withheld,
};
use sqlx::error::BoxDynError;
use sqlx::postgres::types::PgInterval;
use sqlx::postgres::{PgRow, PgValueFormat, PgValueRef, Postgres};
use sqlx::types::Uuid;
use sqlx::{Decode, Executor, Row};

use crate::config::Config;
use crate::error::{PostgresError, STORE, Stage, own_error, store_error};
use crate::headers;
use crate::query::Query;

/// A call under a lease.
#[derive(Debug, Clone)]
pub(crate) enum Settle {
    Complete(Outcome),
    Fail(Failure),
    Renew(Duration),
}

impl Settle {
    pub(crate) fn operation(&self) -> Operation {
        match self {
            Self::Complete(_) => Operation::Complete,
            Self::Fail(_) => Operation::Fail,
            Self::Renew(_) => Operation::Renew,
        }
    }
}

/// How long a statement waits for a transaction that holds one of its keys: much longer than a commit takes, much shorter
/// than a call may take.
pub(crate) const PATIENCE: Duration = Duration::from_millis(200);

/// Whether a statement waits no longer than [`PATIENCE`], or as the caller's transaction does.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patience {
    Short,
    OfTheTransaction,
}

impl Patience {
    /// A value of the server's setting `lock_timeout`, in milliseconds.
    fn setting(self) -> Option<String> {
        match self {
            Self::Short => Some(PATIENCE.as_millis().to_string()),
            Self::OfTheTransaction => None,
        }
    }
}

/// The texts of the statements, with the schema's name in them.
#[derive(Debug)]
pub(crate) struct Statements {
    reserve: Arc<str>,
    settle: Arc<str>,
    fetch: Arc<str>,
    /// Whether they are prepared in the server's session.
    prepared: bool,
}

/// A record's columns, of the row of that name. What is not prepared is answered in text, in which times, intervals and
/// bytes look as the session's settings say: they are written out here, times and intervals as microseconds.
fn columns(of: &str, prepared: bool) -> String {
    let bytes = |column: &str| match prepared {
        true => format!("{of}.{column}"),
        false => format!("chr(92) || 'x' || encode({of}.{column}, 'hex')"),
    };
    let micros = |column: &str| time_column(&format!("{of}.{column}"), prepared);
    format!(
        "{of}.state::text, {of}.attempt, {of}.token, {}, {of}.origin::text, {of}.previous_token, \
         {of}.previous_attempt, {}, {}, {}, {}, {}, {}, {}, {of}.failure, {of}.code, {of}.withheld, {}, {}",
        bytes("fingerprint"),
        micros("previous_started_at"),
        micros("retention"),
        micros("created_at"),
        micros("started_at"),
        micros("updated_at"),
        micros("lease_until"),
        micros("expires_at"),
        bytes("headers"),
        bytes("body"),
    )
}

/// A time or an interval, as [`Time`] and [`Span`] read it.
fn time_column(value: &str, prepared: bool) -> String {
    match prepared {
        true => value.to_owned(),
        false => format!("(extract(epoch from {value}) * 1000000)::bigint"),
    }
}

impl Statements {
    pub(crate) fn new(config: &Config) -> Self {
        let (schema, prepared) = (config.schema.quoted(), config.prepared_statements);
        // As it is: for so many columns, a projection that the server has to set up costs as much as the insert.
        let answer = match prepared {
            true => "a.*".to_owned(),
            false => {
                let now = time_column("a.now", prepared);
                format!("a.acquired, a.place, a.verdict, {now}, {}", columns("a", prepared))
            }
        };
        Self {
            reserve: format!("SELECT {answer} FROM {schema}.reserve($1, $2, $3, $4, $5, $6, $7, $8) a").into(),
            settle: format!("SELECT {schema}.settle($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)").into(),
            // One snapshot and one time, which is before it: a record that is extended meanwhile is not missed.
            fetch: format!(
                "SELECT {}, {} FROM {schema}.records r, {schema}.epoch e \
                 WHERE r.scope = $1 AND r.id = $2 AND r.expires_at > statement_timestamp() + e.shift",
                time_column("statement_timestamp() + e.shift", prepared),
                columns("r", prepared),
            )
            .into(),
            prepared,
        }
    }

    fn query(&self, text: &Arc<str>) -> Query {
        Query::new(text, self.prepared)
    }

    /// Reserves, in one statement. The requests are in the order of their keys. An answer each.
    pub(crate) async fn reserve<'e>(
        &self,
        executor: impl Executor<'e, Database = Postgres>,
        requests: &[Reserve],
        patience: Patience,
    ) -> Result<Vec<Result<Reservation, StoreError>>, StoreError> {
        let of = |part: fn(&Reserve) -> &str| requests.iter().map(part).collect::<Vec<_>>();
        let micros = |part: fn(&Reserve) -> Duration| requests.iter().map(|request| micros(part(request))).collect();
        let leases: Vec<i64> = micros(|request| request.lease);
        let retentions: Vec<i64> = micros(|request| request.retention);
        let tokens: Vec<Uuid> = requests.iter().map(|request| uuid(request.token)).collect();
        let fingerprints: Vec<Option<&[u8]>> =
            requests.iter().map(|request| request.fingerprint.as_ref().map(|print| &print.as_bytes()[..])).collect();
        let refusals: Vec<bool> = requests.iter().map(|request| request.on_abandoned == OnAbandoned::Refuse).collect();
        let rows = self
            .query(&self.reserve)
            .bind(of(|request| request.key.scope()))
            .bind(of(|request| request.key.id()))
            .bind(tokens)
            .bind(fingerprints)
            .bind(leases)
            .bind(retentions)
            .bind(refusals)
            .bind(patience.setting().as_deref())
            .fetch_all(executor)
            .await
            .map_err(|error| store_error(error, Stage::Execute, Operation::Reserve))?;
        if rows.is_empty() {
            return Err(own_error(PostgresError::Isolation, Operation::Reserve));
        }
        let mut answers: Vec<Option<Result<Reservation, StoreError>>> = requests.iter().map(|_| None).collect();
        for row in &rows {
            read_answers(row, requests, &mut answers)
                .map_err(|error| store_error(error, Stage::Execute, Operation::Reserve))?;
        }
        let missing = || Err(own_error(PostgresError::Column("answer"), Operation::Reserve));
        Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect())
    }

    /// Completes, fails and renews, in one statement. The calls are in the order of their keys. An answer each.
    pub(crate) async fn settle<'e>(
        &self,
        executor: impl Executor<'e, Database = Postgres>,
        calls: &[(Lease, Settle)],
        patience: Patience,
    ) -> Result<Vec<Result<(), StoreError>>, StoreError> {
        let mut kinds: Vec<i8> = Vec::with_capacity(calls.len());
        let mut durations = Vec::with_capacity(calls.len());
        let (mut codes, mut withhelds, mut lines) = (Vec::new(), Vec::new(), Vec::new());
        let (mut bodies, mut failures) = (Vec::new(), Vec::new());
        for (lease, call) in calls {
            let (kind, duration, outcome, failure) = match call {
                Settle::Complete(outcome) => (b'c', lease.retention, Some(outcome), None),
                Settle::Fail(failure) => (b'f', lease.retention, None, Some(failure.note())),
                Settle::Renew(extend_by) => (b'r', *extend_by, None, None),
            };
            kinds.push(kind.cast_signed());
            durations.push(micros(duration));
            codes.push(outcome.map(|outcome| i32::from(outcome.code)));
            lines.push(outcome.and_then(|outcome| headers::encode(&outcome.headers)));
            let (withheld, body) = match outcome.map(|outcome| &outcome.body) {
                Some(Body::Stored(body)) => (None, Some(&body[..])),
                Some(Body::Withheld(reason)) => (Some(i16::from(reason.code())), None),
                None => (None, None),
            };
            withhelds.push(withheld);
            bodies.push(body);
            failures.push(failure);
        }
        let operation = calls.first().map_or(Operation::Complete, |(_, call)| call.operation());
        let row = self
            .query(&self.settle)
            .bind(kinds)
            .bind(calls.iter().map(|(lease, _)| lease.key.scope()).collect::<Vec<_>>())
            .bind(calls.iter().map(|(lease, _)| lease.key.id()).collect::<Vec<_>>())
            .bind(calls.iter().map(|(lease, _)| uuid(lease.token)).collect::<Vec<_>>())
            .bind(durations)
            .bind(codes)
            .bind(withhelds)
            .bind(lines)
            .bind(bodies)
            .bind(failures)
            .bind(patience.setting().as_deref())
            .fetch_optional(executor)
            .await
            .map_err(|error| store_error(error, Stage::Execute, operation))?;
        let verdicts: Option<&str> = match &row {
            Some(row) => row.try_get(0).map_err(|error| store_error(error, Stage::Execute, operation))?,
            None => None,
        };
        let Some(verdicts) = verdicts else { return Err(own_error(PostgresError::Isolation, operation)) };
        let verdict = |place: usize, operation| match verdicts.as_bytes().get(place) {
            Some(b'o') => Ok(()),
            Some(b'l') => Err(StoreError::refused(Refusal::LeaseLost, STORE, operation)),
            Some(b'c') => Err(StoreError::refused(Refusal::AlreadyCompleted, STORE, operation)),
            _ => Err(own_error(PostgresError::Column("verdict"), operation)),
        };
        Ok(calls.iter().enumerate().map(|(place, (_, call))| verdict(place, call.operation())).collect())
    }

    pub(crate) async fn fetch<'e>(
        &self,
        executor: impl Executor<'e, Database = Postgres>,
        key: &Key,
    ) -> Result<Option<Record>, StoreError> {
        let failed = |error| store_error(error, Stage::Execute, Operation::Fetch);
        let row =
            self.query(&self.fetch).bind(key.scope()).bind(key.id()).fetch_optional(executor).await.map_err(failed)?;
        let Some(row) = row else { return Ok(None) };
        let Time(now) = row.try_get_unchecked(0).map_err(failed)?;
        match read_record(&row, 1, key, now).map_err(failed)? {
            Ok(record) => Ok(Some(record)),
            Err(error) => Err(own_error(error, Operation::Fetch)),
        }
    }
}

/// Reads a row of `reserve`: the places of all keys that were absent, or the answer for one of the others.
fn read_answers(
    row: &PgRow,
    requests: &[Reserve],
    answers: &mut [Option<Result<Reservation, StoreError>>],
) -> Result<(), sqlx::Error> {
    let slot = |place: i32| usize::try_from(place - 1).unwrap_or(usize::MAX);
    if let Some(acquired) = row.try_get::<Option<Vec<i32>>, _>(0)? {
        for place in acquired.into_iter().map(slot) {
            if let (Some(request), Some(answer)) = (requests.get(place), answers.get_mut(place)) {
                let retention = micro_precise(request.retention);
                let lease = Lease::new(request.key.clone(), request.token, 1, Origin::Fresh, retention);
                *answer = Some(Ok(Reservation::Acquired(lease)));
            }
        }
        return Ok(());
    }
    let place = slot(row.try_get(1)?);
    let (Some(request), Some(answer)) = (requests.get(place), answers.get_mut(place)) else { return Ok(()) };
    let verdict: &str = row.try_get(2)?;
    let record = |row| -> Result<Result<Record, PostgresError>, sqlx::Error> {
        let Time(now) = PgRow::try_get_unchecked(row, 3)?;
        read_record(row, 4, &request.key, now)
    };
    let unreadable = |error| own_error(error, Operation::Reserve);
    *answer = Some(match verdict {
        "acquired" => record(row)?.map(|record| Reservation::Acquired(record.lease())).map_err(unreadable),
        "completed" => record(row)?.map(Reservation::Completed).map_err(unreadable),
        "abandoned" => record(row)?.map(Reservation::Abandoned).map_err(unreadable),
        "in progress" => record(row)?
            .map(|record| Reservation::InProgress {
                attempt: record.attempt,
                retry_after: record.lease_remaining().max(Duration::from_micros(1)),
            })
            .map_err(unreadable),
        "mismatch" => Ok(Reservation::Mismatch),
        "lease lost" => Err(StoreError::new(ErrorKind::LeaseLost, STORE, Operation::Reserve)),
        _ => Err(own_error(PostgresError::Column("verdict"), Operation::Reserve)),
    });
    Ok(())
}

/// Reads [`columns`], from that index on.
fn read_record(
    row: &PgRow,
    first: usize,
    key: &Key,
    read_at: SystemTime,
) -> Result<Result<Record, PostgresError>, sqlx::Error> {
    let time = |at: usize| row.try_get_unchecked(first + at).map(|Time(time)| time);
    let state: &str = row.try_get(first)?;
    let attempt: i32 = row.try_get(first + 1)?;
    let token: Uuid = row.try_get(first + 2)?;
    // Bytes, or their digits as text.
    let fingerprint: Option<Vec<u8>> = row.try_get_unchecked(first + 3)?;
    let origin: &str = row.try_get(first + 4)?;
    let previous: (Option<Uuid>, Option<i32>, Option<Time>) =
        (row.try_get(first + 5)?, row.try_get(first + 6)?, row.try_get_unchecked(first + 7)?);
    let Span(retention) = row.try_get_unchecked(first + 8)?;
    let failure: Option<&str> = row.try_get(first + 14)?;
    let code: Option<i32> = row.try_get(first + 15)?;
    let withheld: Option<i16> = row.try_get(first + 16)?;
    let lines: Option<Vec<u8>> = row.try_get_unchecked(first + 17)?;
    let body: Option<Vec<u8>> = row.try_get_unchecked(first + 18)?;
    let number = |number: i32| u32::try_from(number).map_err(|_| PostgresError::Column("attempt"));
    let content = || -> Result<(State, Option<Fingerprint>, Origin), PostgresError> {
        let fingerprint = match fingerprint.as_deref().map(<[u8; 32]>::try_from) {
            None => None,
            Some(Ok(bytes)) => Some(Fingerprint::from_bytes(bytes)),
            Some(Err(_)) => return Err(PostgresError::Column("fingerprint")),
        };
        let origin = match (origin, previous) {
            ("fresh", _) => Origin::Fresh,
            ("retry", _) => Origin::Retry,
            ("takeover", (Some(token), Some(attempt), Some(Time(started_at)))) => Origin::Takeover(PreviousAttempt {
                token: Token::from_bytes(token.into_bytes()),
                attempt: number(attempt)?,
                started_at,
            }),
            _ => return Err(PostgresError::Column("origin")),
        };
        let state = match (state, failure, code) {
            ("in progress", ..) => State::InProgress,
            ("failed", Some(note), _) => {
                State::Failed(Failure::new(note).map_err(|_| PostgresError::Column("failure"))?)
            }
            ("completed", _, Some(code)) => {
                let code = u16::try_from(code).map_err(|_| PostgresError::Column("code"))?;
                let reason = withheld.map(|code| u8::try_from(code).ok().and_then(Withheld::from_code));
                let mut outcome = match (body, reason) {
                    (Some(body), None) => Outcome::new(code, Bytes::from(body)),
                    (None, Some(Some(reason))) => Outcome::withheld(code, reason),
                    _ => return Err(PostgresError::Column("body")),
                };
                if let Some(lines) = lines {
                    outcome.headers = headers::decode(Bytes::from(lines))?;
                }
                State::Completed(outcome)
            }
            _ => return Err(PostgresError::Column("state")),
        };
        Ok((state, fingerprint, origin))
    };
    let (state, fingerprint, origin) = match content() {
        Ok(content) => content,
        Err(error) => return Ok(Err(error)),
    };
    let attempt = match number(attempt) {
        Ok(attempt) => attempt,
        Err(error) => return Ok(Err(error)),
    };
    Ok(Ok(Record {
        key: key.clone(),
        state,
        fingerprint,
        attempt,
        token: Token::from_bytes(token.into_bytes()),
        origin,
        retention,
        created_at: time(9)?,
        started_at: time(10)?,
        updated_at: time(11)?,
        lease_until: time(12)?,
        expires_at: time(13)?,
        read_at,
    }))
}

fn uuid(token: Token) -> Uuid {
    Uuid::from_bytes(*token.as_bytes())
}

/// Whole microseconds, the finest that Postgres has; a part of one counts as one, so that a lease never ends early.
fn micros(duration: Duration) -> i64 {
    let part = u128::from(!duration.subsec_nanos().is_multiple_of(1_000));
    i64::try_from(duration.as_micros() + part).unwrap_or(i64::MAX)
}

fn micro_precise(duration: Duration) -> Duration {
    Duration::from_micros(micros(duration).unsigned_abs())
}

/// A time as the server sends it, in microseconds since the year 2000 (the manual's "Date/Time Types"); in text, the
/// microseconds since 1970 that are asked for in its place.
struct Time(SystemTime);

impl<'r> Decode<'r, Postgres> for Time {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        const YEAR_2000: i64 = 946_684_800_000_000;
        let since_1970 = match value.format() {
            PgValueFormat::Binary => <i64 as Decode<Postgres>>::decode(value)?.saturating_add(YEAR_2000),
            PgValueFormat::Text => <i64 as Decode<Postgres>>::decode(value)?,
        };
        let since = Duration::from_micros(since_1970.unsigned_abs());
        let time = match since_1970 {
            ..0 => SystemTime::UNIX_EPOCH.checked_sub(since),
            0.. => SystemTime::UNIX_EPOCH.checked_add(since),
        };
        Ok(Self(time.unwrap_or(SystemTime::UNIX_EPOCH)))
    }
}

/// An interval as the server sends it, or in text the microseconds that are asked for in its place.
struct Span(Duration);

impl<'r> Decode<'r, Postgres> for Span {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        let micros = match value.format() {
            PgValueFormat::Binary => {
                let PgInterval { months, days, microseconds } = PgInterval::decode(value)?;
                let days = i64::from(months) * 30 + i64::from(days);
                microseconds.saturating_add(days.saturating_mul(24 * 60 * 60 * 1_000_000))
            }
            PgValueFormat::Text => <i64 as Decode<Postgres>>::decode(value)?,
        };
        Ok(Self(Duration::from_micros(u64::try_from(micros).unwrap_or_default())))
    }
}
