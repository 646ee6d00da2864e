//! What an operation is named by: an id within a scope.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::limits::{InvalidInput, MAX_KEY_ID_BYTES, MAX_SCOPE_BYTES, check_text};

/// The name space of a [`Key`]: a tenant, a user, a consumer group, a queue.
///
/// The same id in two scopes is two keys (rule R16). Choose the scope from what the server knows of the caller, never
/// from what the caller sends alone: a constant scope lets one user read another's answer by guessing the id.
///
/// 0 to 64 bytes of UTF-8 without control characters or characters that change the direction of text.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Scope(Arc<str>);

impl Scope {
    /// A scope of that name.
    ///
    /// # Errors
    /// [`InvalidInput::ScopeTooLong`] or [`InvalidInput::ForbiddenCharacter`].
    pub fn new(name: &str) -> Result<Self, InvalidInput> {
        check_scope(name)?;
        Ok(Self(name.into()))
    }

    /// The scope's name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key of that id in this scope.
    ///
    /// # Errors
    /// As [`Key::new`].
    pub fn key(&self, id: &str) -> Result<Key, InvalidInput> {
        check_id(id)?;
        Ok(Key::join(&self.0, id))
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Scope").field(&self.as_str()).finish()
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An idempotency key: the name under which an operation takes effect once.
///
/// Compared byte for byte: no case folding, no Unicode normalisation. Cheap to make and to clone: up to 61 bytes of scope
/// and id are held in place (a UUID and 25 bytes of scope), beyond that behind a reference count.
///
/// ```
/// use idem_core::Key;
///
/// let key = Key::new("tenant-7", "8e03978e-40d5-43dd-bc93-6894a57f9324")?;
/// assert_eq!(key.scope(), "tenant-7");
/// assert!(Key::new("tenant-7", "").is_err());
/// # Ok::<(), idem_core::InvalidInput>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Text);

/// The scope's length in one byte, then scope and id: "ab" + "c" and "a" + "bc" are two keys.
///
/// In one piece, so that a key is hashed and compared by one call each. In place where it fits, so that a look-up
/// follows one pointer less and repeats do not contend for a count; what is left behind the text is zero, so that
/// equal keys have equal bytes.
#[derive(Clone, PartialEq, Eq)]
enum Text {
    Inline { bytes: [u8; 1 + INLINE], len: u8 },
    Shared(Arc<[u8]>),
}

/// As many bytes of scope and id as make a key 64 bytes.
const INLINE: usize = 61;

impl Key {
    /// The key of that id in that scope.
    ///
    /// The id has 1 to 255 bytes of UTF-8 and the scope 0 to 64; neither holds control characters (NUL among them) or
    /// characters that change the direction of text.
    ///
    /// # Errors
    /// [`InvalidInput::KeyIdEmpty`], [`InvalidInput::KeyIdTooLong`], [`InvalidInput::ScopeTooLong`] or
    /// [`InvalidInput::ForbiddenCharacter`].
    pub fn new(scope: &str, id: &str) -> Result<Self, InvalidInput> {
        check_scope(scope)?;
        check_id(id)?;
        Ok(Self::join(scope, id))
    }

    /// Both parts have been checked: the scope's length fits a byte.
    fn join(scope: &str, id: &str) -> Self {
        let border = scope.len() as u8;
        let len = 1 + scope.len() + id.len();
        let mut bytes = [0; 1 + INLINE];
        match bytes.get_mut(1..len) {
            Some(place) => {
                let (before, behind) = place.split_at_mut(scope.len());
                before.copy_from_slice(scope.as_bytes());
                behind.copy_from_slice(id.as_bytes());
                bytes[0] = border;
                Self(Text::Inline { bytes, len: len as u8 })
            }
            None => Self(Text::Shared([&[border], scope.as_bytes(), id.as_bytes()].concat().into())),
        }
    }

    /// The scope's length, scope and id.
    fn whole(&self) -> &[u8] {
        match &self.0 {
            Text::Inline { bytes, len } => &bytes[..usize::from(*len)],
            Text::Shared(bytes) => bytes,
        }
    }

    /// Scope and id.
    fn parts(&self) -> (&[u8], &[u8]) {
        match self.whole() {
            [border, text @ ..] => text.split_at(usize::from(*border)),
            [] => (&[], &[]),
        }
    }

    /// The scope's name.
    #[must_use]
    pub fn scope(&self) -> &str {
        text(self.parts().0)
    }

    /// The id within the scope.
    #[must_use]
    pub fn id(&self) -> &str {
        text(self.parts().1)
    }

    /// Bytes of scope and id together.
    #[must_use]
    pub fn size(&self) -> usize {
        self.whole().len() - 1
    }
}

/// What was text when the key was made.
fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap_or_default()
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(self.whole());
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.scope(), self.id()).cmp(&(other.scope(), other.id()))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("scope", &self.scope()).field("id", &self.id()).finish()
    }
}

fn check_scope(scope: &str) -> Result<(), InvalidInput> {
    if scope.len() > MAX_SCOPE_BYTES {
        return Err(InvalidInput::ScopeTooLong { bytes: scope.len() });
    }
    check_text("scope", scope)
}

fn check_id(id: &str) -> Result<(), InvalidInput> {
    match id.len() {
        0 => Err(InvalidInput::KeyIdEmpty),
        bytes if bytes > MAX_KEY_ID_BYTES => Err(InvalidInput::KeyIdTooLong { bytes }),
        _ => check_text("key id", id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_are_counted_in_bytes() {
        assert_eq!(Key::new("", ""), Err(InvalidInput::KeyIdEmpty));
        assert!(Key::new("", &"k".repeat(255)).is_ok());
        assert_eq!(Key::new("", &"k".repeat(256)), Err(InvalidInput::KeyIdTooLong { bytes: 256 }));
        // 128 characters of two bytes each are 256 bytes.
        assert_eq!(Key::new("", &"é".repeat(128)), Err(InvalidInput::KeyIdTooLong { bytes: 256 }));
        assert!(Key::new(&"s".repeat(64), "k").is_ok());
        assert_eq!(Key::new(&"s".repeat(65), "k"), Err(InvalidInput::ScopeTooLong { bytes: 65 }));
        assert_eq!(Scope::new(&"s".repeat(65)), Err(InvalidInput::ScopeTooLong { bytes: 65 }));
    }

    /// Pitfall 40.
    #[test]
    fn characters_that_disguise_a_key_are_refused_at_the_edge() {
        for character in ['\0', '\n', '\r', '\t', '\u{7f}', '\u{85}', '\u{061c}', '\u{200f}', '\u{202e}', '\u{2067}'] {
            let id = format!("ab{character}c");
            let refused = InvalidInput::ForbiddenCharacter { field: "key id", character, at: 2 };
            assert_eq!(Key::new("", &id), Err(refused.clone()));
            assert!(!refused.to_string().contains(character), "the error must not carry the character itself");
            assert!(Scope::new(&id).is_err());
        }
        assert!(Key::new("größe", "naïve-日本-🙂").is_ok());
    }

    #[test]
    fn the_border_between_scope_and_id_is_part_of_the_key() {
        assert_ne!(Key::new("ab", "c").unwrap(), Key::new("a", "bc").unwrap());
        assert_eq!(Scope::new("ab").unwrap().key("c").unwrap(), Key::new("ab", "c").unwrap());
    }

    #[test]
    fn long_and_short_keys_behave_alike() {
        assert_eq!(size_of::<Key>(), 64);
        for len in 1..=255 {
            let id = "k".repeat(len);
            let (key, same) = (Key::new("scope", &id).unwrap(), Key::new("scope", &id).unwrap());
            assert_eq!((key.scope(), key.id(), key.size()), ("scope", id.as_str(), 5 + len));
            assert_eq!(key, same.clone());
            assert_ne!(key, Key::new("scop", &format!("e{id}")).unwrap_or_else(|_| Key::new("", "x").unwrap()));
            assert!(key < Key::new("scope", &format!("{}l", &id[1..])).unwrap());
        }
    }

    proptest! {
        #[test]
        fn any_text_gives_a_key_or_an_error(scope in ".{0,70}", id in ".{0,260}") {
            if let Ok(key) = Key::new(&scope, &id) {
                prop_assert_eq!(key.scope(), scope.as_str());
                prop_assert_eq!(key.id(), id.as_str());
            }
        }
    }
}
