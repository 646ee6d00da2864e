//! What has become of each key, as its callers have seen it: enough to notice an operation that took effect twice, and a
//! replay of another outcome.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use idem_core::{Body, Fingerprint, InvalidInput, Key, Outcome, Record};

/// The scope of the keys of a run.
const SCOPE: &str = "load";
/// The scope of the keys that are there before.
const PRELOADED: &str = "preloaded";
/// The status of all outcomes.
const CODE: u16 = 201;
/// The bytes by which an outcome is told from every other: the key's number and the attempt's tag.
pub const SMALLEST_BODY: usize = 16;

const STATES: u32 = 2;

/// What a key's callers know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nobody has held it, or those who did have failed: no effect.
    Free,
    /// The attempt of that tag runs: its effect has happened.
    Held(u64),
    /// The attempt of that tag was acknowledged.
    Completed(u64),
}

impl State {
    fn pack(self) -> u64 {
        match self {
            Self::Free => 0,
            Self::Held(tag) => (tag << STATES) | 1,
            Self::Completed(tag) => (tag << STATES) | 2,
        }
    }

    fn unpack(word: u64) -> Self {
        match word & 3 {
            0 => Self::Free,
            1 => Self::Held(word >> STATES),
            _ => Self::Completed(word >> STATES),
        }
    }
}

/// The keys of a run, by number: those that were there before it come first.
#[derive(Debug)]
pub struct Effects {
    /// Distinguishes the keys of this run from those of earlier ones.
    run: u32,
    preloaded: u64,
    /// What all bodies end in.
    padding: Bytes,
    fingerprint: Fingerprint,
    keys: Box<[AtomicU64]>,
}

impl Effects {
    /// A table for so many keys, the first of which are preloaded, with outcomes of that many bytes.
    #[must_use]
    pub fn new(run: u32, preloaded: u64, keys: u64, body: usize) -> Self {
        let all = (0..preloaded + keys).map(|number| {
            let state = if number < preloaded { State::Completed(preloaded_tag(number)) } else { State::Free };
            AtomicU64::new(state.pack())
        });
        let padding = crate::workloads::body(body.saturating_sub(SMALLEST_BODY));
        Self { run, preloaded, padding, fingerprint: Fingerprint::of("POST /charges"), keys: all.collect() }
    }

    /// The number of keys.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.keys.len() as u64
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The number of keys that were there before.
    #[must_use]
    pub fn preloaded(&self) -> u64 {
        self.preloaded
    }

    /// The fingerprint of all requests.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The key of that number.
    ///
    /// # Errors
    /// None, but for a mistake here.
    pub fn key(&self, number: u64) -> Result<Key, InvalidInput> {
        let scattered = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if number < self.preloaded {
            Key::new(PRELOADED, &format!("{scattered:016x}-{number}"))
        } else {
            Key::new(SCOPE, &format!("{scattered:016x}-{}-{number}", self.run))
        }
    }

    /// What is known of a key.
    #[must_use]
    pub fn state(&self, number: u64) -> State {
        State::unpack(self.keys[number as usize].load(Ordering::SeqCst))
    }

    /// An attempt has acquired the key, and its effect happens.
    ///
    /// # Errors
    /// That another one's has: what is said of the fault.
    pub fn begin(&self, number: u64, tag: u64) -> Result<(), String> {
        let held = State::Held(tag).pack();
        self.keys[number as usize]
            .compare_exchange(State::Free.pack(), held, Ordering::SeqCst, Ordering::SeqCst)
            .map(drop)
            .map_err(|word| format!("key {number} took effect twice: it was {:?}", State::unpack(word)))
    }

    /// The attempt gives up without an effect. Said before the store is told: another may acquire the key before the store's
    /// answer is here.
    pub fn give_up(&self, number: u64) {
        self.keys[number as usize].store(State::Free.pack(), Ordering::SeqCst);
    }

    /// The store has acknowledged the attempt's outcome.
    pub fn complete(&self, number: u64, tag: u64) {
        self.keys[number as usize].store(State::Completed(tag).pack(), Ordering::SeqCst);
    }

    /// The outcome of an attempt.
    #[must_use]
    pub fn outcome(&self, number: u64, tag: u64) -> Outcome {
        let mut body = Vec::with_capacity(SMALLEST_BODY + self.padding.len());
        body.extend_from_slice(&number.to_le_bytes());
        body.extend_from_slice(&tag.to_le_bytes());
        body.extend_from_slice(&self.padding);
        Outcome::new(CODE, body)
    }

    /// Checks what the store has answered with as the record of a completed key.
    ///
    /// # Errors
    /// What is said of the fault.
    pub fn check_replay(&self, number: u64, record: &Record) -> Result<(), String> {
        // After the answer: an attempt is noted here before its outcome can be in the store.
        let (State::Held(tag) | State::Completed(tag)) = self.state(number) else {
            return Err(format!("key {number} is told to be completed, and nobody has completed it"));
        };
        let wanted = (number, tag);
        let is_it = record.outcome().is_some_and(|outcome| match &outcome.body {
            Body::Stored(bytes) => {
                bytes.get(..8) == Some(&wanted.0.to_le_bytes()[..])
                    && bytes.get(8..SMALLEST_BODY) == Some(&wanted.1.to_le_bytes()[..])
                    && bytes.get(SMALLEST_BODY..) == Some(&self.padding[..])
                    && outcome.code == CODE
            }
            Body::Withheld(_) => false,
        });
        if is_it { Ok(()) } else { Err(format!("key {number} was replayed with another outcome")) }
    }

    /// How many keys have taken effect in the run, whether that was acknowledged or not.
    #[must_use]
    pub fn count(&self) -> u64 {
        (self.preloaded..self.len()).filter(|number| self.state(*number) != State::Free).count() as u64
    }
}

/// The tag of a preloaded key's attempt.
#[must_use]
pub fn preloaded_tag(number: u64) -> u64 {
    number.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> STATES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_effect_is_noticed() {
        let effects = Effects::new(0, 2, 3, 64);
        assert_eq!((effects.len(), effects.state(1)), (5, State::Completed(preloaded_tag(1))));
        effects.begin(2, 7).unwrap();
        assert!(effects.begin(2, 8).is_err());
        effects.give_up(2);
        effects.begin(2, 9).unwrap();
        effects.complete(2, 9);
        assert!(effects.begin(2, 10).is_err() && effects.begin(0, 1).is_err());
        assert_eq!((effects.state(2), effects.count()), (State::Completed(9), 1));
    }
}
