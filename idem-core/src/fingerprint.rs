//! What a request asks for, boiled down to 32 bytes.

use std::fmt;
use std::sync::LazyLock;

use serde::Serialize;
use serde_json::Value;

/// A digest of what a request asks for. The same key with another fingerprint is a
/// [`Mismatch`](crate::Reservation::Mismatch): another request under a used key, never replayed and never run.
///
/// Two records with equal fingerprints under different keys have nothing to do with each other.
///
/// ```
/// use idem_core::Fingerprint;
///
/// let of = |method: &str, path: &str, body: &[u8]| {
///     Fingerprint::builder().field(method).field(path).field(body).finish()
/// };
/// assert_eq!(of("POST", "/charges", b"{}"), of("POST", "/charges", b"{}"));
/// // Fields are framed by their length: nothing collides by moving a border.
/// assert_ne!(of("POST", "/a", b"b"), of("POST", "/ab", b""));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Starts a fingerprint of several fields.
    #[must_use]
    pub fn builder() -> FingerprintBuilder {
        // To copy it costs less than to derive the key again.
        static DERIVED: LazyLock<blake3::Hasher> =
            LazyLock::new(|| blake3::Hasher::new_derive_key("idem fingerprint v1"));
        FingerprintBuilder(DERIVED.clone())
    }

    /// The fingerprint of one run of bytes: a builder with one field.
    #[must_use]
    pub fn of(bytes: impl AsRef<[u8]>) -> Self {
        Self::builder().field(bytes).finish()
    }

    /// The fingerprint of a value in canonical form: a builder with one [`value`](FingerprintBuilder::value).
    ///
    /// # Errors
    /// As [`FingerprintBuilder::value`].
    pub fn of_value(value: &(impl Serialize + ?Sized)) -> Result<Self, serde_json::Error> {
        Ok(Self::builder().value(value)?.finish())
    }

    /// A fingerprint from stored bytes, or from a digest of the caller's own.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes to store.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second, third, fourth, ..] = self.0;
        write!(f, "Fingerprint({first:02x}{second:02x}{third:02x}{fourth:02x}…)")
    }
}

/// What stands before every piece that is hashed, so that no two different inputs are the same bytes.
#[derive(Clone, Copy)]
enum Tag {
    Field = 1,
    Value = 2,
    Null = 3,
    False = 4,
    True = 5,
    Number = 6,
    Text = 7,
    Array = 8,
    Object = 9,
}

/// Gathers the fields of a [`Fingerprint`]. The order of the calls counts.
#[derive(Clone)]
pub struct FingerprintBuilder(blake3::Hasher);

impl FingerprintBuilder {
    /// Adds a field, framed by its length. An empty field is a field.
    #[must_use]
    pub fn field(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.framed(Tag::Field, bytes.as_ref());
        self
    }

    /// Adds a value in canonical form, by way of JSON's data model: the order of an object's keys does not matter,
    /// the order of an array's items does. An absent key differs from a null, `1` from `1.0` and from `"1"`.
    ///
    /// A NaN or an infinity counts as null, as JSON has neither.
    ///
    /// # Errors
    /// When the value does not fit JSON's data model: a map whose keys are no texts or numbers, an integer beyond 64
    /// bits, or an error of the value's own `Serialize`.
    pub fn value(mut self, value: &(impl Serialize + ?Sized)) -> Result<Self, serde_json::Error> {
        let value = serde_json::to_value(value)?;
        self.tag(Tag::Value);
        self.canonical(&value);
        Ok(self)
    }

    /// The fingerprint of the fields so far.
    #[must_use]
    pub fn finish(self) -> Fingerprint {
        Fingerprint(*self.0.finalize().as_bytes())
    }

    fn tag(&mut self, tag: Tag) {
        self.0.update(&[tag as u8]);
    }

    fn count(&mut self, count: usize) {
        self.0.update(&(count as u64).to_le_bytes());
    }

    fn framed(&mut self, tag: Tag, bytes: &[u8]) {
        self.tag(tag);
        self.count(bytes.len());
        self.0.update(bytes);
    }

    /// Values nest no deeper than their `Serialize` recursed to make them.
    fn canonical(&mut self, value: &Value) {
        match value {
            Value::Null => self.tag(Tag::Null),
            Value::Bool(false) => self.tag(Tag::False),
            Value::Bool(true) => self.tag(Tag::True),
            Value::Number(number) => self.framed(Tag::Number, number.to_string().as_bytes()),
            Value::String(text) => self.framed(Tag::Text, text.as_bytes()),
            Value::Array(items) => {
                self.tag(Tag::Array);
                self.count(items.len());
                for item in items {
                    self.canonical(item);
                }
            }
            Value::Object(map) => {
                self.tag(Tag::Object);
                self.count(map.len());
                // The map keeps insertion order where any crate in the build turns on serde_json's `preserve_order`.
                let mut entries: Vec<_> = map.iter().collect();
                entries.sort_unstable_by_key(|(key, _)| *key);
                for (key, item) in entries {
                    self.framed(Tag::Text, key.as_bytes());
                    self.canonical(item);
                }
            }
        }
    }
}

impl fmt::Debug for FingerprintBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FingerprintBuilder").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn of(fields: &[Vec<u8>]) -> Fingerprint {
        fields.iter().fold(Fingerprint::builder(), |builder, field| builder.field(field)).finish()
    }

    #[test]
    fn object_keys_are_unordered_and_arrays_ordered() {
        let of = |text: &str| Fingerprint::of_value(&serde_json::from_str::<Value>(text).unwrap()).unwrap();
        assert_eq!(of(r#"{"a":1,"b":{"c":2,"d":3}}"#), of(r#"{ "b":{"d":3,"c":2}, "a":1 }"#));
        assert_ne!(of("[1,2]"), of("[2,1]"));
        assert_ne!(of(r#"{"a":null}"#), of("{}"));
        assert_ne!(of("1"), of("1.0"));
        assert_ne!(of("1"), of(r#""1""#));
        assert_ne!(of("[[],[]]"), of("[[[]]]"));
        assert_ne!(of(r#"["a","b"]"#), of(r#"["ab"]"#));
        assert_ne!(of(r#"[{"a":1},2]"#), of(r#"[{"a":1,"b":2}]"#));
        assert_ne!(of("18446744073709551615"), of("18446744073709551614"));
    }

    #[test]
    fn a_value_and_a_field_of_the_same_bytes_differ() {
        assert_ne!(Fingerprint::of_value("a").unwrap(), Fingerprint::of("a"));
        assert_eq!(Fingerprint::of_value(&json!({"a": 1})).unwrap(), Fingerprint::of_value(&json!({"a": 1})).unwrap());
        assert!(Fingerprint::of_value(&u128::MAX).is_err());
    }

    /// Stored fingerprints outlive a release: a change here is a change of the stored format.
    #[test]
    fn the_digest_is_stable() {
        let stable = Fingerprint::builder().field("POST").field("/charges").value(&json!({"amount": 1200})).unwrap();
        let hex: String = stable.finish().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "41d321418ec14dccea123da62b5662a835c29f94dda41f4f916e12909c70b99b");
    }

    proptest! {
        #[test]
        fn fields_collide_only_when_equal(
            a in prop::collection::vec(prop::collection::vec(0u8..3, 0..4), 0..4),
            b in prop::collection::vec(prop::collection::vec(0u8..3, 0..4), 0..4),
        ) {
            prop_assert_eq!(a == b, of(&a) == of(&b));
        }
    }
}
