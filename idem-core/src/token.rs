//! The secret of one attempt.

use std::fmt;

/// 128 random bits that name one attempt at one key.
///
/// The caller makes it before the first send and sends it again with every repeat of the same call: that is how a store
/// tells a repeat from a rival (rule R4), and how a late call of an older attempt is refused (rule R6). Whoever knows
/// it can complete the attempt, so `Debug` shows the first two bytes only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; 16]);

impl Token {
    /// A new token from the thread's cryptographically secure generator, which the operating system seeds.
    ///
    /// A process that forks after its first token must not go on in both halves: they would draw the same tokens.
    #[must_use]
    pub fn random() -> Self {
        // Drawn as a whole: byte by byte, the generator is asked sixteen times.
        Self(rand::random::<u128>().to_le_bytes())
    }

    /// A token from stored bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes to store.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second, ..] = self.0;
        write!(f, "Token({first:02x}{second:02x}…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_hides_most_of_it() {
        assert_eq!(format!("{:?}", Token::from_bytes([0xab; 16])), "Token(abab…)");
    }

    #[test]
    fn tokens_differ() {
        let tokens: std::collections::HashSet<_> = (0..10_000).map(|_| Token::random()).collect();
        assert_eq!(tokens.len(), 10_000);
    }
}
