//! Every limit of the contract, and the typed error for input that breaks one (rule R12).
//!
//! Sizes are bytes everywhere. All limits are checked before a store sends anything, so a refused call has changed
//! nothing.

use std::time::Duration;

/// The longest key id, in bytes of UTF-8. The shortest is one byte.
pub const MAX_KEY_ID_BYTES: usize = 255;
/// The longest scope, in bytes of UTF-8. A scope may be empty.
pub const MAX_SCOPE_BYTES: usize = 64;
/// The shortest lease and the shortest retention.
pub const MIN_DURATION: Duration = Duration::from_millis(1);
/// The longest lease, and the most that one [`renew`](crate::KeyStore::renew) may ask for.
pub const MAX_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest retention that any store accepts; a store may state a shorter one in its
/// [`Capabilities`](crate::Capabilities).
pub const MAX_RETENTION: Duration = Duration::from_secs(366 * 24 * 60 * 60);
/// The lease that [`Reserve::new`](crate::Reserve::new) asks for.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// The retention that [`Reserve::new`](crate::Reserve::new) asks for.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// The outcome limit that a store has unless it is configured otherwise: 1 MiB.
pub const DEFAULT_OUTCOME_LIMIT: usize = 1024 * 1024;
/// The largest outcome limit that a store can be configured to: 8 MiB, which every backend can hold in one write.
pub const MAX_OUTCOME_LIMIT: usize = 8 * 1024 * 1024;
/// The most header lines that an outcome can hold.
pub const MAX_HEADERS: usize = 1024;
/// The longest name of a header line, in bytes. The shortest is one byte.
pub const MAX_HEADER_NAME_BYTES: usize = 255;
/// The longest failure note, in bytes of UTF-8.
pub const MAX_FAILURE_BYTES: usize = 1024;

/// Input that breaks a limit or a rule of form. Nothing was sent and nothing was stored.
///
/// No variant carries the offending text, so the error can be logged although the input is not trusted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidInput {
    /// The key id is empty.
    #[error("the key id is empty")]
    KeyIdEmpty,
    /// The key id is longer than [`MAX_KEY_ID_BYTES`].
    #[error("the key id has {bytes} bytes, the most is {MAX_KEY_ID_BYTES}")]
    KeyIdTooLong {
        /// The length found.
        bytes: usize,
    },
    /// The scope is longer than [`MAX_SCOPE_BYTES`].
    #[error("the scope has {bytes} bytes, the most is {MAX_SCOPE_BYTES}")]
    ScopeTooLong {
        /// The length found.
        bytes: usize,
    },
    /// A control character (NUL among them) or one that changes the direction of text, which could disguise the key in
    /// a log.
    #[error("the {field} holds the forbidden character U+{:04X} at byte {at}", u32::from(*character))]
    ForbiddenCharacter {
        /// The text concerned: "key id", "scope", "header name" or "failure note".
        field: &'static str,
        /// The character.
        character: char,
        /// Its offset in bytes.
        at: usize,
    },
    /// The lease (or the extension that a renewal asks for) is shorter than [`MIN_DURATION`]; zero is zero, never
    /// "none given".
    #[error("the lease of {lease:?} is shorter than {MIN_DURATION:?}")]
    LeaseTooShort {
        /// The lease asked for.
        lease: Duration,
    },
    /// The lease (or the extension that a renewal asks for) is longer than [`MAX_LEASE`].
    #[error("the lease of {lease:?} is longer than {MAX_LEASE:?}")]
    LeaseTooLong {
        /// The lease asked for.
        lease: Duration,
    },
    /// The retention is shorter than [`MIN_DURATION`].
    #[error("the retention of {retention:?} is shorter than {MIN_DURATION:?}")]
    RetentionTooShort {
        /// The retention asked for.
        retention: Duration,
    },
    /// The retention is longer than the store keeps records.
    #[error("the retention of {retention:?} is longer than the store's {max:?}")]
    RetentionTooLong {
        /// The retention asked for.
        retention: Duration,
        /// The longest that this store accepts.
        max: Duration,
    },
    /// The record would expire while its lease still runs, and the key could be run twice.
    #[error("the retention of {retention:?} is shorter than the lease of {lease:?}")]
    RetentionShorterThanLease {
        /// The retention asked for.
        retention: Duration,
        /// The lease asked for.
        lease: Duration,
    },
    /// The outcome is larger than the store's limit. Store [`Body::Withheld`](crate::Body::Withheld) instead, so that
    /// the operation is not run again (rule R11).
    #[error("the outcome has {bytes} bytes, the store's limit is {limit}")]
    OutcomeTooLarge {
        /// The size found, see [`Outcome::size`](crate::Outcome::size).
        bytes: usize,
        /// The store's limit.
        limit: usize,
    },
    /// More header lines than [`MAX_HEADERS`].
    #[error("the outcome has {count} header lines, the most is {MAX_HEADERS}")]
    TooManyHeaders {
        /// The number found.
        count: usize,
    },
    /// A header name is empty or longer than [`MAX_HEADER_NAME_BYTES`].
    #[error("a header name has {bytes} bytes, it must have 1 to {MAX_HEADER_NAME_BYTES}")]
    HeaderNameLength {
        /// The length found.
        bytes: usize,
    },
    /// The failure note is longer than [`MAX_FAILURE_BYTES`].
    #[error("the failure note has {bytes} bytes, the most is {MAX_FAILURE_BYTES}")]
    FailureTooLong {
        /// The length found.
        bytes: usize,
    },
}

/// Refuses control characters and the characters that change the direction of text (Unicode's `Bidi_Control`).
pub(crate) fn check_text(field: &'static str, text: &str) -> Result<(), InvalidInput> {
    // The common case, without an early exit, so that it is done many bytes at a time.
    if text.bytes().fold(true, |plain, byte| plain & matches!(byte, b' '..=b'~')) {
        return Ok(());
    }
    let forbidden = |character: char| {
        character.is_control()
            || matches!(
                character,
                '\u{061C}' | '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}'
            )
    };
    match text.char_indices().find(|(_, character)| forbidden(*character)) {
        Some((at, character)) => Err(InvalidInput::ForbiddenCharacter { field, character, at }),
        None => Ok(()),
    }
}

/// Checks a lease, or what a renewal asks for.
///
/// # Errors
/// [`InvalidInput::LeaseTooShort`] or [`InvalidInput::LeaseTooLong`].
pub fn check_lease(lease: Duration) -> Result<(), InvalidInput> {
    if lease < MIN_DURATION {
        return Err(InvalidInput::LeaseTooShort { lease });
    }
    if lease > MAX_LEASE {
        return Err(InvalidInput::LeaseTooLong { lease });
    }
    Ok(())
}

/// Checks a retention against the longest that a store keeps records.
///
/// # Errors
/// [`InvalidInput::RetentionTooShort`] or [`InvalidInput::RetentionTooLong`].
pub fn check_retention(retention: Duration, max: Duration) -> Result<(), InvalidInput> {
    let max = max.min(MAX_RETENTION);
    if retention < MIN_DURATION {
        return Err(InvalidInput::RetentionTooShort { retention });
    }
    if retention > max {
        return Err(InvalidInput::RetentionTooLong { retention, max });
    }
    Ok(())
}
