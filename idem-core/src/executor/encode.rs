//! Results as outcomes: JSON under code 0 for a success, under code 1 for a final error.

use std::io;

use serde::Serialize;
use serde::de::{DeserializeOwned, Error as _};

use super::detach::caught;
use crate::outcome::{Outcome, Withheld};

/// The code of an operation that returned `Ok`.
pub(super) const SUCCESS: u16 = 0;
/// The code of one that returned an error which is final.
pub(super) const ERROR: u16 = 1;

pub(super) fn success<T: Serialize>(value: &T, limit: usize) -> Outcome {
    encode(SUCCESS, value, limit)
}

pub(super) fn error<E: Serialize>(error: &E, limit: usize) -> Outcome {
    encode(ERROR, error, limit)
}

/// What cannot be kept is withheld: the operation was executed, and that must be known in any case.
fn encode<T: Serialize>(code: u16, value: &T, limit: usize) -> Outcome {
    let mut body = Bounded { bytes: Vec::new(), limit };
    match caught(|| serde_json::to_writer(&mut body, value)) {
        Ok(Ok(())) => Outcome::new(code, body.bytes),
        Ok(Err(error)) if error.is_io() => Outcome::withheld(code, Withheld::TooLarge),
        Ok(Err(_)) | Err(_) => Outcome::withheld(code, Withheld::Unserializable),
    }
}

/// A buffer that refuses to grow beyond what can be stored.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes).map(|()| bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > self.limit - self.bytes.len() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(body)
}

/// The error for an outcome that this call has no type for.
pub(super) fn unreadable(reason: &'static str) -> serde_json::Error {
    serde_json::Error::custom(reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Body;

    #[test]
    fn the_limit_is_exact() {
        // Two quotes and four letters.
        assert_eq!(success(&"four", 6), Outcome::new(SUCCESS, "\"four\""));
        assert_eq!(success(&"four", 5), Outcome::withheld(SUCCESS, Withheld::TooLarge));
        assert_eq!(error(&"four", 0), Outcome::withheld(ERROR, Withheld::TooLarge));
    }

    #[test]
    fn what_has_no_json_is_withheld() {
        let map = std::collections::HashMap::from([((1, 2), 3)]);
        assert_eq!(success(&map, 99).body, Body::Withheld(Withheld::Unserializable));

        struct Panics;
        impl Serialize for Panics {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                panic!("no JSON of this")
            }
        }
        assert_eq!(success(&Panics, 99).body, Body::Withheld(Withheld::Unserializable));
    }
}
