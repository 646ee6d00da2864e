//! What lies in Redis: the name of a key, and the bytes of a record.
//!
//! **Name.** `{prefix}:{bytes of the scope}:{scope}:{id}`, such as `idem:8:tenant-7:order-42`. The scope's length fixes
//! the border between scope and id. Where the key holds a `{`, the prefix is followed by `{}`: an empty hash tag, with
//! which a cluster takes the whole name for its slot, so that no client can choose the slot of its keys.
//!
//! **Record.** One string. Times are microseconds, as IEEE 754 doubles, big-endian: what Lua has, exact up to the year
//! 2255. All but the creation count from it, so that a client can make all of a fresh record but the time.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version, now 209 |
//! | 8 | created, since the Unix epoch |
//! | 8 × 3 | updated, end of lease, expiry, since the creation |
//! | 8 | retention |
//! | 8 | started, since the creation |
//! | 4 + 16 | attempt (not 0), token |
//! | 1 | bit 0: a fingerprint follows; bits 1-2: origin (0 fresh, 1 retry, 2 take-over) |
//! | 32 | fingerprint, if there is one |
//! | 16 + 4 + 8 | previous attempt's token, number and start, if taken over |
//! | 1 | `P` in progress, `F` failed, `C` completed |
//! | n | failure note, if failed |
//! | 2 + 2 + lines + 1 + body | if completed: code, number of header lines, each (1 + name, 4 + value), the reason it was withheld or 0, and where 0 the body |
//!
//! It measures faster than [`idem_core::codec`], whose nanoseconds a double does not hold, and is about as long. The scripts
//! know all of it but what follows the state.

use std::time::{Duration, SystemTime};

use bytes::{Buf, BufMut, Bytes};
use idem_core::limits::{MAX_FAILURE_BYTES, MAX_HEADERS};
use idem_core::{
    Body, Failure, Fingerprint, Header, Headers, Key, Origin, Outcome, PreviousAttempt, Record, Reserve, State, Token,
    Withheld,
};

use crate::config::Prefix;

const VERSION: u8 = 209;
const FINGERPRINT: u8 = 1;
/// The longest that [`fresh`] makes.
pub(crate) const MAX_FRESH: usize = 94;
/// How much longer than its record's life the server keeps a key, in milliseconds. A record's life is judged by the
/// scripts alone; the server only has to come later, also where its clock for expiry lags behind that for scripts.
const SPARE: u64 = 1_000;
/// Microseconds up to here are exact in a double.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Bytes that are no record of this layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Written by a newer version of this crate, or by something else altogether.
    #[error("the value is no record of a version known here")]
    Version,
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

/// Whole microseconds; a part of one counts as one, so that a lease never ends early.
pub(crate) fn micros(duration: Duration) -> u64 {
    let part = u128::from(!duration.subsec_nanos().is_multiple_of(1_000));
    u64::try_from(duration.as_micros() + part).unwrap_or(u64::MAX)
}

/// How long the server has to keep a record that lives for so long, in milliseconds.
pub(crate) fn kept(life: Duration) -> u64 {
    micros(life).div_ceil(1_000) + SPARE
}

/// The bytes of a key's name.
pub(crate) fn name_len(prefix: &Prefix, key: &Key) -> usize {
    prefix.as_str().len() + 7 + key.size()
}

/// Writes a key's name.
pub(crate) fn put_name(out: &mut impl BufMut, prefix: &Prefix, key: &Key) {
    let (scope, id) = (key.scope(), key.id());
    out.put_slice(prefix.as_str().as_bytes());
    if scope.as_bytes().contains(&b'{') || id.as_bytes().contains(&b'{') {
        out.put_slice(b"{}");
    }
    out.put_u8(b':');
    let length = scope.len();
    if length >= 10 {
        out.put_u8(b'0' + (length / 10) as u8);
    }
    out.put_u8(b'0' + (length % 10) as u8);
    out.put_u8(b':');
    out.put_slice(scope.as_bytes());
    out.put_u8(b':');
    out.put_slice(id.as_bytes());
}

/// A key's name.
pub(crate) fn name(prefix: &Prefix, key: &Key) -> Vec<u8> {
    let mut out = Vec::with_capacity(name_len(prefix, key));
    put_name(&mut out, prefix, key);
    out
}

/// The key of that name; `None` for a name that is not one of [`name`]'s.
pub(crate) fn parse_name(prefix: &Prefix, found: &[u8]) -> Option<Key> {
    let rest = std::str::from_utf8(found).ok()?.strip_prefix(prefix.as_str())?;
    let rest = rest.strip_prefix("{}").unwrap_or(rest).strip_prefix(':')?;
    let (length, rest) = rest.split_once(':')?;
    let (scope, id) = rest.split_at_checked(length.parse().ok()?)?;
    let key = Key::new(scope, id.strip_prefix(':')?).ok()?;
    (name(prefix, &key) == found).then_some(key)
}

/// Writes what follows the time of creation in a fresh record.
pub(crate) fn put_fresh(out: &mut impl BufMut, request: &Reserve) {
    let (lease, retention) = (micros(request.lease) as f64, micros(request.retention) as f64);
    for number in [0.0, lease, retention, retention, 0.0] {
        out.put_f64(number);
    }
    out.put_u32(1);
    out.put_slice(request.token.as_bytes());
    match &request.fingerprint {
        Some(fingerprint) => {
            out.put_u8(FINGERPRINT);
            out.put_slice(fingerprint.as_bytes());
        }
        None => out.put_u8(0),
    }
    out.put_u8(b'P');
}

pub(crate) fn outcome_len(outcome: &Outcome) -> usize {
    6 + outcome.size() + 5 * outcome.headers.len()
}

/// Writes the state of a completed record and what belongs to it. The outcome has been validated.
pub(crate) fn put_outcome(out: &mut impl BufMut, outcome: &Outcome) {
    out.put_u8(b'C');
    out.put_u16(outcome.code);
    out.put_u16(outcome.headers.len() as u16);
    for line in &outcome.headers {
        out.put_u8(line.name.len() as u8);
        out.put_slice(line.name.as_bytes());
        out.put_u32(line.value.len() as u32);
        out.put_slice(&line.value);
    }
    match &outcome.body {
        Body::Stored(bytes) => {
            out.put_u8(0);
            out.put_slice(bytes);
        }
        Body::Withheld(reason) => out.put_u8(reason.code()),
    }
}

/// Writes the state of a failed record and what belongs to it.
pub(crate) fn put_failure(out: &mut impl BufMut, failure: &Failure) {
    out.put_u8(b'F');
    out.put_slice(failure.note().as_bytes());
}

/// Whether a record is of the first attempt at its key, and of another's. Anything but a record is not.
pub(crate) fn is_first_of_another(record: &[u8], token: Token) -> bool {
    let of = |bytes: std::ops::Range<usize>| record.get(bytes).unwrap_or_default();
    of(49..53) == 1_u32.to_be_bytes() && of(53..69).len() == 16 && of(53..69) != token.as_bytes()
}

/// The time of so many microseconds since the epoch, if it is one.
pub(crate) fn time(micros: f64) -> Option<SystemTime> {
    if !(0.0..=EXACT).contains(&micros) || micros.fract() != 0.0 {
        return None;
    }
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(micros as u64))
}

/// The record in these bytes, stored under that key and read at that time of the server's clock.
///
/// Strict: every byte has to be what a script would have written. Header values and body are slices of the input.
pub(crate) fn decode(key: &Key, bytes: Bytes, read_at: SystemTime) -> Result<Record, LayoutError> {
    let mut input = Input(bytes);
    if input.u8().map_err(|_| LayoutError::Version)? != VERSION {
        return Err(LayoutError::Version);
    }
    let created = input.number("time of creation")?;
    let since = |micros: f64, field| time(created + micros).ok_or(LayoutError::Field(field));
    let [updated_at, lease_until, expires_at] = [
        since(input.number("time of update")?, "time of update")?,
        since(input.number("end of lease")?, "end of lease")?,
        since(input.number("expiry")?, "expiry")?,
    ];
    let retention = input.number("retention")?;
    if !(0.0..=EXACT).contains(&retention) {
        return Err(LayoutError::Field("retention"));
    }
    let started_at = since(input.number("start")?, "start")?;
    let attempt = input.attempt()?;
    let token = Token::from_bytes(input.array()?);
    let flags = input.u8()?;
    let fingerprint = match flags & FINGERPRINT {
        0 => None,
        _ => Some(Fingerprint::from_bytes(input.array()?)),
    };
    let origin = match flags >> 1 {
        0 => Origin::Fresh,
        1 => Origin::Retry,
        2 => Origin::Takeover(PreviousAttempt {
            token: Token::from_bytes(input.array()?),
            attempt: input.attempt()?,
            started_at: since(input.number("previous start")?, "previous start")?,
        }),
        _ => return Err(LayoutError::Field("origin")),
    };
    let state = match input.u8()? {
        b'P' => State::InProgress,
        b'F' => State::Failed(input.failure()?),
        b'C' => State::Completed(input.outcome()?),
        _ => return Err(LayoutError::Field("state")),
    };
    if !input.0.is_empty() {
        return Err(LayoutError::Trailing(input.0.len()));
    }
    Ok(Record {
        key: key.clone(),
        state,
        fingerprint,
        attempt,
        token,
        origin,
        retention: Duration::from_micros(retention as u64),
        created_at: since(0.0, "time of creation")?,
        started_at,
        updated_at,
        lease_until,
        expires_at,
        read_at,
    })
}

/// What is left to read. Every read checks first that there is enough.
struct Input(Bytes);

impl Input {
    fn take(&mut self, count: usize) -> Result<Bytes, LayoutError> {
        if count > self.0.len() {
            return Err(LayoutError::Truncated);
        }
        Ok(self.0.split_to(count))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LayoutError> {
        let array = *self.0.first_chunk::<N>().ok_or(LayoutError::Truncated)?;
        self.0.advance(N);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, LayoutError> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    fn u16(&mut self) -> Result<u16, LayoutError> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, LayoutError> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    /// A whole number of microseconds, which may be negative: a clock can have gone back.
    fn number(&mut self, field: &'static str) -> Result<f64, LayoutError> {
        let number = f64::from_be_bytes(self.array()?);
        // One form of zero only, so that what decodes is what would be written.
        let whole = number.abs() <= EXACT && number.fract() == 0.0 && !(number == 0.0 && number.is_sign_negative());
        if whole { Ok(number) } else { Err(LayoutError::Field(field)) }
    }

    fn attempt(&mut self) -> Result<u32, LayoutError> {
        match self.u32()? {
            0 => Err(LayoutError::Field("attempt")),
            attempt => Ok(attempt),
        }
    }

    fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.0)
    }

    fn failure(&mut self) -> Result<Failure, LayoutError> {
        let bytes = self.rest();
        if bytes.len() > MAX_FAILURE_BYTES {
            return Err(LayoutError::Field("failure note"));
        }
        let note = std::str::from_utf8(&bytes).map_err(|_| LayoutError::Field("failure note"))?;
        Failure::new(note).map_err(|_| LayoutError::Field("failure note"))
    }

    fn outcome(&mut self) -> Result<Outcome, LayoutError> {
        let code = self.u16()?;
        let count = usize::from(self.u16()?);
        // A line takes six bytes at least: no room is made for lines that cannot be there.
        if count > MAX_HEADERS || count * 6 > self.0.len() {
            return Err(LayoutError::Field("number of header lines"));
        }
        let mut lines = Vec::with_capacity(count);
        for _ in 0..count {
            let length = usize::from(self.u8()?);
            let name = self.take(length)?;
            let name = std::str::from_utf8(&name).ok().filter(|name| !name.is_empty());
            let name = name.ok_or(LayoutError::Field("header name"))?.into();
            let length = usize::try_from(self.u32()?).map_err(|_| LayoutError::Truncated)?;
            lines.push(Header { name, value: self.take(length)? });
        }
        let mut outcome = match self.u8()? {
            0 => Outcome::new(code, self.rest()),
            reason => {
                let reason = Withheld::from_code(reason).ok_or(LayoutError::Field("reason withheld"))?;
                Outcome::withheld(code, reason)
            }
        };
        outcome.headers = Headers::from(lines);
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> Key {
        Key::new("scope", "id").unwrap()
    }

    /// What the scripts would write for a record of that state.
    fn bytes(state: &State, fingerprint: Option<[u8; 32]>, previous: Option<u32>) -> Vec<u8> {
        let mut out = vec![VERSION];
        for number in [1.7e15, 5.0, 30e6, 86_400e6, 86_400e6, -7.0] {
            out.put_f64(number);
        }
        out.put_u32(3);
        out.put_slice(&[7; 16]);
        out.put_u8(u8::from(fingerprint.is_some()) | if previous.is_some() { 4 } else { 2 });
        out.put_slice(fingerprint.as_ref().map_or(&[], |bytes| &bytes[..]));
        if let Some(attempt) = previous {
            out.put_slice(&[8; 16]);
            out.put_u32(attempt);
            out.put_f64(9.0);
        }
        match state {
            State::InProgress => out.put_u8(b'P'),
            State::Failed(failure) => put_failure(&mut out, failure),
            State::Completed(outcome) => put_outcome(&mut out, outcome),
        }
        out
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn what_is_written_comes_back(
            state in any_state(),
            fingerprint in any::<Option<[u8; 32]>>(),
            previous in prop::option::of(1u32..),
            at in any::<prop::sample::Index>(),
        ) {
            let bytes = bytes(&state, fingerprint, previous);
            let record = decode(&key(), bytes.clone().into(), SystemTime::UNIX_EPOCH).unwrap();
            prop_assert_eq!(&record.state, &state);
            prop_assert_eq!(record.fingerprint.map(|print| *print.as_bytes()), fingerprint);
            prop_assert_eq!(matches!(record.origin, Origin::Takeover(_)), previous.is_some());
            prop_assert_eq!(record.started_at, record.created_at - Duration::from_micros(7));
            // A cut record is noticed, unless it is cut in what runs to the end: a note or a body.
            let head = bytes.len() - match &state {
                State::InProgress => 0,
                State::Failed(failure) => failure.note().len(),
                State::Completed(outcome) => outcome.body.size(),
            };
            let cut = Bytes::copy_from_slice(&bytes[..at.index(head)]);
            prop_assert!(decode(&key(), cut, SystemTime::UNIX_EPOCH).is_err());
        }

        #[test]
        fn damage_never_panics(state in any_state(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = bytes(&state, None, Some(1));
            let at = at.index(bytes.len());
            bytes[at] = byte;
            drop(decode(&key(), bytes.into(), SystemTime::UNIX_EPOCH));
        }

        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            drop(decode(&key(), bytes.clone().into(), SystemTime::UNIX_EPOCH));
            if let Some(first) = bytes.first_mut() {
                *first = VERSION;
            }
            drop(decode(&key(), bytes.into(), SystemTime::UNIX_EPOCH));
        }

        #[test]
        fn every_name_tells_its_key(scope in "[a-z:{}0-9é]{0,20}", id in "[a-z:{}0-9é]{1,40}") {
            let (prefix, key) = (Prefix::default(), Key::new(&scope, &id).unwrap());
            let name = name(&prefix, &key);
            prop_assert!(name.len() <= name_len(&prefix, &key));
            prop_assert_eq!(parse_name(&prefix, &name), Some(key));
        }
    }

    /// Stored records outlive a release: a change here is a change of the stored format and wants a new version.
    #[test]
    fn the_format_is_stable() {
        let request = Reserve::new(key())
            .with_token(Token::from_bytes([7; 16]))
            .with_lease(Duration::from_micros(1))
            .with_retention(Duration::from_micros(2));
        let mut out = Vec::new();
        put_fresh(&mut out, &request);
        let (one, two) = ([0x3f, 0xf0, 0, 0, 0, 0, 0, 0], [0x40, 0, 0, 0, 0, 0, 0, 0]);
        let expected = [&[0; 8][..], &one, &two, &two, &[0; 8], &[0, 0, 0, 1], &[7; 16], &[0, b'P']].concat();
        assert_eq!(out, expected);
        let mut longest = Vec::new();
        put_fresh(&mut longest, &request.with_fingerprint(Fingerprint::of("x")));
        assert_eq!(longest.len(), MAX_FRESH);

        let mut out = Vec::new();
        let outcome = Outcome::new(201, "ok").with_header("a", "b");
        put_outcome(&mut out, &outcome);
        assert_eq!(out, b"C\0\xc9\0\x01\x01a\0\0\0\x01b\0ok");
        assert_eq!(out.len(), outcome_len(&outcome));
    }

    /// Pitfall 10: durations are rounded up, and the server's own expiry comes after the record's.
    #[test]
    fn the_server_keeps_a_key_for_longer_than_its_record_lives() {
        assert_eq!(micros(Duration::from_nanos(1_001)), 2);
        assert_eq!(kept(Duration::from_millis(1)), 1_001);
        assert_eq!(kept(Duration::from_micros(1_001)), 1_002);
    }

    /// A client must not choose the slot of its keys in a cluster, nor the border between scope and id.
    #[test]
    fn names_are_readable_and_cannot_be_steered() {
        let prefix = Prefix::default();
        let name = |scope: &str, id: &str| String::from_utf8(name(&prefix, &Key::new(scope, id).unwrap())).unwrap();
        assert_eq!(name("tenant-7", "order-42"), "idem:8:tenant-7:order-42");
        assert_eq!(name("", "a:b"), "idem:0::a:b");
        assert_eq!(name("", "{x}1"), "idem{}:0::{x}1");
        assert_ne!(name("a:", "b"), name("a", ":b"));
        for foreign in ["idem:8:tenant:order", "idem:x:a:b", "other:1:a:b", "idem:01:a:b", "idem{}:1:a:b", "idem:1:a"] {
            assert_eq!(parse_name(&prefix, foreign.as_bytes()), None, "{foreign}");
        }
    }
}
