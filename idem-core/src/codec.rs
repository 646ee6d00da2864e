//! A compact, versioned, binary form of a [`Record`], for stores that keep opaque values.
//!
//! The key is not part of it: it is what the value is stored under. Integers are little-endian, times are nanoseconds
//! since the Unix epoch, and texts and bytes stand behind their length.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version, now 1 |
//! | 1 | bits 0-1: state (0 in progress, 1 failed, 2 completed); bits 2-3: origin (0 fresh, 1 retry, 2 take-over); bit 4: a fingerprint follows; others 0 |
//! | 4 + 16 | attempt (not 0), token |
//! | 8 × 6 | retention, created, started, updated, end of lease, expiry |
//! | 32 | fingerprint, if there is one |
//! | 16 + 4 + 8 | previous attempt's token, number and start, if taken over |
//! | 2 + n | failure note, if failed |
//! | 2 + 2 + lines + 1 + body | if completed: code, number of header lines, each (1 + name, 4 + value), the reason it was withheld or 0, and where 0 the body (4 + n) |
//!
//! Decoding is strict: an unknown version, an unknown bit, a length beyond the end or a byte too many is an error, and
//! nothing is allocated for a length that the input does not hold. Header values and body are slices of the input, not
//! copies.

use std::time::{Duration, SystemTime};

use bytes::{Buf, BufMut, Bytes};

use crate::fingerprint::Fingerprint;
use crate::key::Key;
use crate::limits::{MAX_FAILURE_BYTES, MAX_HEADERS};
use crate::outcome::{Body, Failure, Header, Headers, Outcome, Withheld};
use crate::record::{Record, State};
use crate::request::{Origin, PreviousAttempt};
use crate::token::Token;

const VERSION: u8 = 1;
const STATE: u8 = 0b0000_0011;
const ORIGIN: u8 = 0b0000_1100;
const FINGERPRINT: u8 = 0b0001_0000;

/// Stored bytes that are no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Written by a version of this format that is not known here, or by something else altogether.
    #[error("unknown record version {0}")]
    Version(u8),
    /// The bytes end too early.
    #[error("the record ends too early")]
    Truncated,
    /// There are bytes behind the record's end.
    #[error("{0} bytes behind the end of the record")]
    Trailing(usize),
    /// A field holds what it cannot hold.
    #[error("the record's {0} is invalid")]
    Field(&'static str),
}

/// The bytes of a record, without its key and without `read_at`.
///
/// The record must be one that a store has validated: where it breaks one of the [limits](crate::limits), the bytes are
/// not those of this record, and may not be those of any.
#[must_use]
pub fn encode(record: &Record) -> Vec<u8> {
    let content = match &record.state {
        State::InProgress => 0,
        State::Failed(failure) => failure.note().len(),
        State::Completed(outcome) => outcome.size() + 5 * outcome.headers.len(),
    };
    let mut out = Vec::with_capacity(144 + content);
    let state = match &record.state {
        State::InProgress => 0,
        State::Failed(_) => 1,
        State::Completed(_) => 2,
    };
    let origin = match record.origin {
        Origin::Fresh => 0,
        Origin::Retry => 1,
        Origin::Takeover(_) => 2,
    };
    let fingerprint = if record.fingerprint.is_some() { FINGERPRINT } else { 0 };
    out.put_u8(VERSION);
    out.put_u8(state | origin << 2 | fingerprint);
    out.put_u32_le(record.attempt);
    out.put_slice(record.token.as_bytes());
    out.put_u64_le(nanos(record.retention));
    for time in [record.created_at, record.started_at, record.updated_at, record.lease_until, record.expires_at] {
        put_time(&mut out, time);
    }
    if let Some(fingerprint) = &record.fingerprint {
        out.put_slice(fingerprint.as_bytes());
    }
    if let Origin::Takeover(previous) = &record.origin {
        out.put_slice(previous.token.as_bytes());
        out.put_u32_le(previous.attempt);
        put_time(&mut out, previous.started_at);
    }
    match &record.state {
        State::InProgress => {}
        State::Failed(failure) => {
            out.put_u16_le(failure.note().len() as u16);
            out.put_slice(failure.note().as_bytes());
        }
        State::Completed(outcome) => put_outcome(&mut out, outcome),
    }
    out
}

fn put_outcome(out: &mut Vec<u8>, outcome: &Outcome) {
    out.put_u16_le(outcome.code);
    out.put_u16_le(outcome.headers.len() as u16);
    for line in &outcome.headers {
        out.put_u8(line.name.len() as u8);
        out.put_slice(line.name.as_bytes());
        out.put_u32_le(line.value.len() as u32);
        out.put_slice(&line.value);
    }
    match &outcome.body {
        Body::Stored(bytes) => {
            out.put_u8(0);
            out.put_u32_le(bytes.len() as u32);
            out.put_slice(bytes);
        }
        Body::Withheld(reason) => out.put_u8(reason.code()),
    }
}

/// Times before the epoch become the epoch, durations beyond 584 years become that.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn put_time(out: &mut Vec<u8>, time: SystemTime) {
    out.put_u64_le(nanos(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()));
}

/// The record in these bytes, stored under that key and read at that time of the store's clock.
///
/// # Errors
/// [`DecodeError`] on anything but what [`encode`] makes: answer with
/// [`ErrorKind::Unreadable`](crate::ErrorKind::Unreadable) then, never with "absent".
pub fn decode(key: &Key, bytes: Bytes, read_at: SystemTime) -> Result<Record, DecodeError> {
    let mut input = Input(bytes);
    let version = input.u8()?;
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    let flags = input.u8()?;
    if flags & !(STATE | ORIGIN | FINGERPRINT) != 0 {
        return Err(DecodeError::Field("flags"));
    }
    let attempt = input.attempt()?;
    let token = Token::from_bytes(input.array()?);
    let retention = Duration::from_nanos(input.u64()?);
    let [created_at, started_at, updated_at, lease_until, expires_at] =
        [input.time()?, input.time()?, input.time()?, input.time()?, input.time()?];
    let fingerprint = match flags & FINGERPRINT {
        0 => None,
        _ => Some(Fingerprint::from_bytes(input.array()?)),
    };
    let origin = match (flags & ORIGIN) >> 2 {
        0 => Origin::Fresh,
        1 => Origin::Retry,
        2 => Origin::Takeover(PreviousAttempt {
            token: Token::from_bytes(input.array()?),
            attempt: input.attempt()?,
            started_at: input.time()?,
        }),
        _ => return Err(DecodeError::Field("origin")),
    };
    let state = match flags & STATE {
        0 => State::InProgress,
        1 => State::Failed(input.failure()?),
        2 => State::Completed(input.outcome()?),
        _ => return Err(DecodeError::Field("state")),
    };
    match input.0.len() {
        0 => Ok(Record {
            key: key.clone(),
            state,
            fingerprint,
            attempt,
            token,
            origin,
            retention,
            created_at,
            started_at,
            updated_at,
            lease_until,
            expires_at,
            read_at,
        }),
        rest => Err(DecodeError::Trailing(rest)),
    }
}

/// What is left to read. Every read checks first that there is enough.
struct Input(Bytes);

impl Input {
    fn take(&mut self, count: usize) -> Result<Bytes, DecodeError> {
        if count > self.0.len() {
            return Err(DecodeError::Truncated);
        }
        Ok(self.0.split_to(count))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let array = *self.0.first_chunk::<N>().ok_or(DecodeError::Truncated)?;
        self.0.advance(N);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn length(&mut self) -> Result<usize, DecodeError> {
        usize::try_from(self.u32()?).map_err(|_| DecodeError::Truncated)
    }

    fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn attempt(&mut self) -> Result<u32, DecodeError> {
        match self.u32()? {
            0 => Err(DecodeError::Field("attempt")),
            attempt => Ok(attempt),
        }
    }

    fn time(&mut self) -> Result<SystemTime, DecodeError> {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_nanos(self.u64()?)).ok_or(DecodeError::Field("time"))
    }

    fn text(&mut self, count: usize, field: &'static str) -> Result<Box<str>, DecodeError> {
        let bytes = self.take(count)?;
        std::str::from_utf8(&bytes).map(Into::into).map_err(|_| DecodeError::Field(field))
    }

    fn failure(&mut self) -> Result<Failure, DecodeError> {
        let bytes = usize::from(self.u16()?);
        if bytes > MAX_FAILURE_BYTES {
            return Err(DecodeError::Field("failure note"));
        }
        Failure::new(self.text(bytes, "failure note")?).map_err(|_| DecodeError::Field("failure note"))
    }

    fn outcome(&mut self) -> Result<Outcome, DecodeError> {
        let code = self.u16()?;
        let count = usize::from(self.u16()?);
        // A line takes six bytes at least: no room is made for lines that cannot be there.
        if count > MAX_HEADERS || count * 6 > self.0.len() {
            return Err(DecodeError::Field("number of header lines"));
        }
        let mut lines = Vec::with_capacity(count);
        for _ in 0..count {
            let bytes = usize::from(self.u8()?);
            if bytes == 0 {
                return Err(DecodeError::Field("header name"));
            }
            let name = self.text(bytes, "header name")?;
            let bytes = self.length()?;
            lines.push(Header { name, value: self.take(bytes)? });
        }
        let body = match self.u8()? {
            0 => {
                let bytes = self.length()?;
                Body::Stored(self.take(bytes)?)
            }
            code => Body::Withheld(Withheld::from_code(code).ok_or(DecodeError::Field("reason withheld"))?),
        };
        Ok(Outcome { code, headers: Headers::from(lines), body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> Key {
        Key::new("scope", "id").unwrap()
    }

    prop_compose! {
        fn any_time()(nanos in any::<u64>()) -> SystemTime {
            SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos)
        }
    }

    fn any_origin() -> impl Strategy<Value = Origin> {
        prop_oneof![
            Just(Origin::Fresh),
            Just(Origin::Retry),
            (any::<[u8; 16]>(), 1u32.., any_time()).prop_map(|(token, attempt, started_at)| {
                Origin::Takeover(PreviousAttempt { token: Token::from_bytes(token), attempt, started_at })
            }),
        ]
    }

    fn any_state() -> impl Strategy<Value = State> {
        let body = prop_oneof![
            prop::collection::vec(any::<u8>(), 0..300).prop_map(|bytes| Body::Stored(bytes.into())),
            (1u8..=4).prop_map(|code| Body::Withheld(Withheld::from_code(code).unwrap())),
        ];
        let headers = prop::collection::vec(("[a-z]{1,20}", prop::collection::vec(any::<u8>(), 0..40)), 0..5);
        prop_oneof![
            Just(State::InProgress),
            "[^\0]{0,200}".prop_map(|note| State::Failed(Failure::truncated(&note))),
            (any::<u16>(), headers, body).prop_map(|(code, lines, body)| {
                let mut outcome = Outcome::new(code, "");
                for (name, value) in lines {
                    outcome = outcome.with_header(name, value);
                }
                outcome.body = body;
                State::Completed(outcome)
            }),
        ]
    }

    prop_compose! {
        fn any_record()(
            state in any_state(),
            origin in any_origin(),
            fingerprint in any::<Option<[u8; 32]>>(),
            attempt in 1u32..,
            token in any::<[u8; 16]>(),
            retention in any::<u64>(),
            times in prop::array::uniform5(any_time()),
        ) -> Record {
            Record {
                key: key(),
                state,
                origin,
                fingerprint: fingerprint.map(Fingerprint::from_bytes),
                attempt,
                token: Token::from_bytes(token),
                retention: Duration::from_nanos(retention),
                created_at: times[0],
                started_at: times[1],
                updated_at: times[2],
                lease_until: times[3],
                expires_at: times[4],
                read_at: SystemTime::UNIX_EPOCH,
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn a_record_comes_back_as_it_was(record in any_record()) {
            let bytes = Bytes::from(encode(&record));
            prop_assert_eq!(decode(&key(), bytes, record.read_at), Ok(record));
        }

        /// What decodes is what would be encoded: there is one form only.
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Ok(record) = decode(&key(), bytes.clone().into(), SystemTime::UNIX_EPOCH) {
                prop_assert_eq!(encode(&record), bytes);
            }
        }

        #[test]
        fn damage_never_panics_and_a_cut_is_noticed(record in any_record(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let bytes = encode(&record);
            let at = at.index(bytes.len());
            let mut damaged = bytes.clone();
            damaged[at] = byte;
            if let Ok(record) = decode(&key(), damaged.clone().into(), SystemTime::UNIX_EPOCH) {
                prop_assert_eq!(encode(&record), damaged);
            }
            let cut = Bytes::copy_from_slice(&bytes[..at]);
            prop_assert!(decode(&key(), cut, record.read_at).is_err());
            let mut longer = bytes;
            longer.push(0);
            prop_assert_eq!(decode(&key(), longer.into(), record.read_at), Err(DecodeError::Trailing(1)));
        }
    }

    /// Stored records outlive a release: a change here is a change of the stored format and wants a new version.
    #[test]
    fn the_format_is_stable() {
        let record = Record {
            key: key(),
            state: State::Completed(Outcome::new(201, "ok").with_header("a", "b")),
            fingerprint: None,
            attempt: 2,
            token: Token::from_bytes([7; 16]),
            origin: Origin::Retry,
            retention: Duration::from_nanos(1),
            created_at: SystemTime::UNIX_EPOCH + Duration::from_nanos(2),
            started_at: SystemTime::UNIX_EPOCH + Duration::from_nanos(3),
            updated_at: SystemTime::UNIX_EPOCH + Duration::from_nanos(4),
            lease_until: SystemTime::UNIX_EPOCH + Duration::from_nanos(5),
            expires_at: SystemTime::UNIX_EPOCH + Duration::from_nanos(6),
            read_at: SystemTime::UNIX_EPOCH,
        };
        let mut expected = vec![1, 0b0110, 2, 0, 0, 0];
        expected.extend([7; 16]);
        for number in 1..=6 {
            expected.extend([number, 0, 0, 0, 0, 0, 0, 0]);
        }
        expected.extend([201, 0, 1, 0, 1, b'a', 1, 0, 0, 0, b'b', 0, 2, 0, 0, 0, b'o', b'k']);
        assert_eq!(encode(&record), expected);
    }

    #[test]
    fn an_unknown_version_is_an_error_of_its_own() {
        assert_eq!(
            decode(&key(), Bytes::from_static(b"\x02rest"), SystemTime::UNIX_EPOCH),
            Err(DecodeError::Version(2))
        );
        assert_eq!(decode(&key(), Bytes::new(), SystemTime::UNIX_EPOCH), Err(DecodeError::Truncated));
    }
}
