//! What an operation leaves behind: a result to replay, or a note on why it failed.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::limits::{
    InvalidInput, MAX_FAILURE_BYTES, MAX_HEADER_NAME_BYTES, MAX_HEADERS, MAX_OUTCOME_LIMIT, check_text,
};

/// The final result of an operation, given back bit for bit to every repeat (rule R7).
///
/// Cheap to clone: header lines and body are shared, so a replay copies no body. `Debug` shows sizes, never contents.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// A status of the caller's choosing: an HTTP status, an exit code, 0.
    pub code: u16,
    /// Header lines in their order.
    pub headers: Headers,
    /// The result itself.
    pub body: Body,
}

impl Outcome {
    /// An outcome whose body is kept.
    pub fn new(code: u16, body: impl Into<Bytes>) -> Self {
        Self { code, headers: Headers::default(), body: Body::Stored(body.into()) }
    }

    /// "It was executed, and its result is not kept" (rule R11): the operation is never run again, and a repeat learns
    /// why it gets no body.
    #[must_use]
    pub fn withheld(code: u16, reason: Withheld) -> Self {
        Self { code, headers: Headers::default(), body: Body::Withheld(reason) }
    }

    /// Adds a header line behind those there are. Repeated names stay separate lines.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<Box<str>>, value: impl Into<Bytes>) -> Self {
        self.headers.push(name, value);
        self
    }

    /// What the outcome limit counts: the bytes of the body and of the names and values of the header lines.
    #[must_use]
    pub fn size(&self) -> usize {
        self.body.size() + self.headers.iter().map(|line| line.name.len() + line.value.len()).sum::<usize>()
    }

    /// Checks the outcome against a store's limit, in bytes (rule R12). Every store does this before it sends anything.
    ///
    /// # Errors
    /// [`InvalidInput::OutcomeTooLarge`], [`InvalidInput::TooManyHeaders`], [`InvalidInput::HeaderNameLength`] or
    /// [`InvalidInput::ForbiddenCharacter`].
    pub fn validate(&self, limit: usize) -> Result<(), InvalidInput> {
        let limit = limit.min(MAX_OUTCOME_LIMIT);
        if self.headers.len() > MAX_HEADERS {
            return Err(InvalidInput::TooManyHeaders { count: self.headers.len() });
        }
        for line in self.headers.iter() {
            if line.name.is_empty() || line.name.len() > MAX_HEADER_NAME_BYTES {
                return Err(InvalidInput::HeaderNameLength { bytes: line.name.len() });
            }
            check_text("header name", &line.name)?;
        }
        let bytes = self.size();
        if bytes > limit {
            return Err(InvalidInput::OutcomeTooLarge { bytes, limit });
        }
        Ok(())
    }
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("code", &self.code)
            .field("headers", &self.headers.len())
            .field("body", &self.body)
            .finish()
    }
}

/// The body of an [`Outcome`].
#[derive(Clone, PartialEq, Eq)]
pub enum Body {
    /// The bytes, any bytes: binary, cut UTF-8, none at all.
    Stored(Bytes),
    /// There is a result, but it is not kept.
    Withheld(Withheld),
}

impl Body {
    /// Bytes kept.
    #[must_use]
    pub fn size(&self) -> usize {
        match self {
            Self::Stored(bytes) => bytes.len(),
            Self::Withheld(_) => 0,
        }
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored(bytes) => write!(f, "Stored({} bytes)", bytes.len()),
            Self::Withheld(reason) => write!(f, "Withheld({reason:?})"),
        }
    }
}

/// Why the result of an executed operation is not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Withheld {
    /// It is larger than the outcome limit.
    TooLarge,
    /// It was streamed to the caller and never held as a whole.
    Streamed,
    /// It must not be at rest in the store.
    Secret,
    /// It could not be turned into bytes.
    Unserializable,
}

impl Withheld {
    /// The number that stores keep for it.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::TooLarge => 1,
            Self::Streamed => 2,
            Self::Secret => 3,
            Self::Unserializable => 4,
        }
    }

    /// The reason of that number; `None` for a number that this version does not know.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::TooLarge),
            2 => Some(Self::Streamed),
            3 => Some(Self::Secret),
            4 => Some(Self::Unserializable),
            _ => None,
        }
    }
}

impl fmt::Display for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooLarge => "the result is larger than the outcome limit",
            Self::Streamed => "the result was streamed",
            Self::Secret => "the result is secret",
            Self::Unserializable => "the result could not be serialized",
        })
    }
}

/// One header line of an [`Outcome`]. The value is bytes, not text.
#[derive(Clone, PartialEq, Eq)]
pub struct Header {
    /// The name, 1 to 255 bytes without control characters, kept as given.
    pub name: Box<str>,
    /// The value, any bytes.
    pub value: Bytes,
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} bytes", self.name, self.value.len())
    }
}

/// Header lines in their order, repeated names and all. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Headers(Option<Arc<Vec<Header>>>);

impl Headers {
    /// Adds a line behind those there are.
    pub fn push(&mut self, name: impl Into<Box<str>>, value: impl Into<Bytes>) {
        let line = Header { name: name.into(), value: value.into() };
        Arc::make_mut(self.0.get_or_insert_default()).push(line);
    }

    /// The number of lines.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there is no line.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.as_slice().is_empty()
    }

    /// The lines.
    #[must_use]
    pub fn as_slice(&self) -> &[Header] {
        self.0.as_ref().map_or(&[], |lines| lines.as_slice())
    }

    /// The lines, one by one.
    pub fn iter(&self) -> std::slice::Iter<'_, Header> {
        self.as_slice().iter()
    }
}

impl PartialEq for Headers {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Headers {}

impl From<Vec<Header>> for Headers {
    fn from(lines: Vec<Header>) -> Self {
        Self((!lines.is_empty()).then(|| Arc::new(lines)))
    }
}

impl<'a> IntoIterator for &'a Headers {
    type Item = &'a Header;
    type IntoIter = std::slice::Iter<'a, Header>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Why an attempt ended without a result: a note for operators, kept until the key is acquired again or expires
/// (rule R8). At most 1,024 bytes of UTF-8.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Failure(Box<str>);

impl Failure {
    /// A note of that text, which may have several lines but no NUL.
    ///
    /// # Errors
    /// [`InvalidInput::FailureTooLong`] or [`InvalidInput::ForbiddenCharacter`].
    pub fn new(note: impl Into<Box<str>>) -> Result<Self, InvalidInput> {
        let note = note.into();
        if note.len() > MAX_FAILURE_BYTES {
            return Err(InvalidInput::FailureTooLong { bytes: note.len() });
        }
        if let Some(at) = note.find('\0') {
            return Err(InvalidInput::ForbiddenCharacter { field: "failure note", character: '\0', at });
        }
        Ok(Self(note))
    }

    /// A note of as much of that text as fits, cut between characters; for texts of foreign origin such as error
    /// messages. A NUL becomes U+FFFD, since not every store can hold it in a text.
    #[must_use]
    pub fn truncated(note: &str) -> Self {
        let mut text = note.replace('\0', "\u{FFFD}");
        text.truncate(text.floor_char_boundary(MAX_FAILURE_BYTES));
        Self(text.into())
    }

    /// The note.
    #[must_use]
    pub fn note(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::DEFAULT_OUTCOME_LIMIT;

    #[test]
    fn the_limit_counts_bytes_of_body_and_headers() {
        let outcome = Outcome::new(200, "four").with_header("ab", "cde");
        assert_eq!(outcome.size(), 9);
        assert_eq!(outcome.validate(9), Ok(()));
        assert_eq!(outcome.validate(8), Err(InvalidInput::OutcomeTooLarge { bytes: 9, limit: 8 }));
        assert_eq!(Outcome::new(200, vec![0; DEFAULT_OUTCOME_LIMIT]).validate(DEFAULT_OUTCOME_LIMIT), Ok(()));
        assert_eq!(Outcome::withheld(200, Withheld::TooLarge).validate(0), Ok(()));
    }

    #[test]
    fn header_names_and_counts_are_checked() {
        let long = "n".repeat(256);
        assert_eq!(
            Outcome::new(0, "").with_header(long, "").validate(9999),
            Err(InvalidInput::HeaderNameLength { bytes: 256 })
        );
        assert_eq!(
            Outcome::new(0, "").with_header("", "v").validate(9),
            Err(InvalidInput::HeaderNameLength { bytes: 0 })
        );
        assert!(Outcome::new(0, "").with_header("a\r\nb", "v").validate(99).is_err());
        let mut many = Outcome::new(0, "");
        for _ in 0..=MAX_HEADERS {
            many = many.with_header("a", "");
        }
        assert_eq!(many.validate(usize::MAX), Err(InvalidInput::TooManyHeaders { count: MAX_HEADERS + 1 }));
    }

    #[test]
    fn contents_stay_out_of_debug_output() {
        let outcome = Outcome::new(200, "card 4242").with_header("set-cookie", "secret");
        let shown = format!("{outcome:?} {:?} {:?}", outcome.headers, outcome.body);
        assert!(!shown.contains("4242") && !shown.contains("secret"), "{shown}");
    }

    #[test]
    fn a_note_is_limited_in_bytes_and_cut_between_characters() {
        assert!(Failure::new("x".repeat(1024)).is_ok());
        assert_eq!(Failure::new("x".repeat(1025)), Err(InvalidInput::FailureTooLong { bytes: 1025 }));
        assert!(Failure::new("a\0").is_err());
        let cut = Failure::truncated(&"日".repeat(400));
        assert_eq!(cut.note().len(), 1023);
        assert_eq!(Failure::truncated("a\0b").note(), "a\u{FFFD}b");
    }

    #[test]
    fn every_reason_has_a_code_of_its_own() {
        for code in 0..=u8::MAX {
            if let Some(reason) = Withheld::from_code(code) {
                assert_eq!(reason.code(), code);
            }
        }
    }
}
