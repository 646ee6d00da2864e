//! The key in a request's header.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::header::{AsHeaderName, HeaderMap};
use idem_core::limits::MAX_KEY_ID_BYTES;
use sfv::{BareItem, Item, Parser};

/// The longest line that is looked into: a key whose every character is escaped, its quotes, and some parameters. What is
/// longer is refused unread.
const MAX_LINE_BYTES: usize = 4 * MAX_KEY_ID_BYTES;

/// Why a header gives no key. It carries nothing of what the client has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvalidKey {
    /// There is no such header.
    Missing,
    /// There are several lines of it, be they equal.
    Several,
    /// It holds bytes that are no printable ASCII.
    NotAscii,
    /// It is no String of Structured Fields and no bare key: a list, a bad escape, a missing quote.
    Malformed,
    /// The key is empty.
    Empty,
    /// The key is longer than 255 bytes.
    TooLong,
}

impl fmt::Display for InvalidKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "the header is missing",
            Self::Several => "there is more than one line of the header",
            Self::NotAscii => "the key must be printable ASCII",
            Self::Malformed => "the header must be one quoted string, or one bare key without , ; \" \\ ( ) and spaces",
            Self::Empty => "the key is empty",
            Self::TooLong => "the key is longer than 255 bytes",
        })
    }
}

impl std::error::Error for InvalidKey {}

/// The key in that header: for handlers that are outside of the layer.
///
/// It is a String of Structured Fields (RFC 9651), whose parameters are ignored. A bare value is taken too, as many clients
/// send one, and is the same key as the quoted one: printable ASCII without `,` `;` `"` `\` `(` `)` and spaces.
///
/// ```
/// use http::{HeaderMap, HeaderValue};
/// use idem_http::{InvalidKey, parse_key};
///
/// let key = |line: &'static str| {
///     let mut headers = HeaderMap::new();
///     headers.append("idempotency-key", HeaderValue::from_static(line));
///     parse_key(&headers, "idempotency-key").map(|key| key.into_owned())
/// };
/// assert_eq!(key("\"order-1\"").as_deref(), Ok("order-1"));
/// assert_eq!(key("order-1").as_deref(), Ok("order-1"));
/// assert_eq!(key("order-1, order-2"), Err(InvalidKey::Malformed));
/// ```
///
/// # Errors
/// [`InvalidKey`].
pub fn parse_key(headers: &HeaderMap, name: impl AsHeaderName) -> Result<Cow<'_, str>, InvalidKey> {
    let mut lines = headers.get_all(name).iter();
    let line = lines.next().ok_or(InvalidKey::Missing)?;
    if lines.next().is_some() {
        return Err(InvalidKey::Several);
    }
    parse_line(line.as_bytes())
}

fn parse_line(line: &[u8]) -> Result<Cow<'_, str>, InvalidKey> {
    if line.len() > MAX_LINE_BYTES {
        return Err(InvalidKey::TooLong);
    }
    if !line.iter().all(|byte| matches!(byte, b' '..=b'~')) {
        return Err(InvalidKey::NotAscii);
    }
    let text = std::str::from_utf8(line).map_err(|_| InvalidKey::NotAscii)?.trim_matches(' ');
    let key = if text.starts_with('"') { quoted(text)? } else { Cow::Borrowed(bare(text)?) };
    match key.len() {
        0 => Err(InvalidKey::Empty),
        1..=MAX_KEY_ID_BYTES => Ok(key),
        _ => Err(InvalidKey::TooLong),
    }
}

fn quoted(text: &str) -> Result<Cow<'_, str>, InvalidKey> {
    // Nearly every key: nothing to undo, nothing behind it.
    if let Some(inner) = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'))
        && !inner.contains(['"', '\\'])
    {
        return Ok(Cow::Borrowed(inner));
    }
    match Parser::new(text).parse_item::<Item>().map_err(|_| InvalidKey::Malformed)?.bare_item {
        BareItem::String(key) => Ok(Cow::Owned(key.into())),
        _ => Err(InvalidKey::Malformed),
    }
}

fn bare(text: &str) -> Result<&str, InvalidKey> {
    if text.contains([',', ';', '"', '\\', '(', ')', ' ']) { Err(InvalidKey::Malformed) } else { Ok(text) }
}

/// Which keys are admitted, beyond what every key has to be (1 to 255 bytes of printable ASCII).
///
/// Keys are compared byte for byte: the same UUID in capitals is another key.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum KeyFormat {
    /// Every key.
    #[default]
    Any,
    /// A UUID in its hyphenated form, of any version.
    Uuid,
    /// A ULID: 26 characters of Crockford's base 32.
    Ulid,
    /// What a function says; see [`custom`](Self::custom).
    Custom {
        /// In words, for clients: "an order number".
        description: Cow<'static, str>,
        /// Whether the key is admitted.
        admits: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    },
}

impl KeyFormat {
    /// The keys that the function admits. The description tells clients in words what they are.
    pub fn custom(
        description: impl Into<Cow<'static, str>>,
        admits: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::Custom { description: description.into(), admits: Arc::new(admits) }
    }

    /// In words, for clients.
    #[must_use]
    pub fn description(&self) -> &str {
        match self {
            Self::Any => "1 to 255 characters of printable ASCII",
            Self::Uuid => "a UUID in its hyphenated form",
            Self::Ulid => "a ULID",
            Self::Custom { description, .. } => description,
        }
    }

    pub(crate) fn admits(&self, key: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Uuid => is_uuid(key.as_bytes()),
            Self::Ulid => is_ulid(key.as_bytes()),
            Self::Custom { admits, .. } => admits(key),
        }
    }
}

impl fmt::Debug for KeyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyFormat({})", self.description())
    }
}

/// 8-4-4-4-12 hexadecimal digits.
fn is_uuid(key: &[u8]) -> bool {
    key.len() == 36
        && key.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

/// 26 digits of base 32 without I, L, O and U, the first of which holds three bits.
fn is_ulid(key: &[u8]) -> bool {
    key.len() == 26
        && matches!(key.first(), Some(b'0'..=b'7'))
        && key
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() && !matches!(byte.to_ascii_uppercase(), b'I' | b'L' | b'O' | b'U'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use proptest::prelude::*;

    fn key(line: &str) -> Result<String, InvalidKey> {
        parse_line(line.as_bytes()).map(Cow::into_owned)
    }

    /// Pitfall 38.
    #[test]
    fn quoted_and_bare_are_one_key() {
        for (line, found) in [
            ("abc", "abc"),
            ("\"abc\"", "abc"),
            ("  \"abc\"  ", "abc"),
            ("\"abc\";p=1;q", "abc"),
            ("8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
            ("\"with space, comma; and \\\"quotes\\\" \\\\\"", "with space, comma; and \"quotes\" \\"),
            ("*a/b:c=d+e@f", "*a/b:c=d+e@f"),
            ("123", "123"),
            ("\"123\"", "123"),
            ("?1", "?1"),
        ] {
            assert_eq!(key(line).as_deref(), Ok(found), "{line}");
        }
    }

    /// Pitfalls 38, 40 and 41.
    #[test]
    fn what_is_no_single_key_is_refused() {
        use InvalidKey::{Empty, Malformed, NotAscii, TooLong};
        for (line, error) in [
            ("", Empty),
            ("   ", Empty),
            ("\"\"", Empty),
            ("a, b", Malformed),
            ("a,b", Malformed),
            ("\"a\", \"b\"", Malformed),
            ("\"a\",", Malformed),
            ("\"a", Malformed),
            ("\"a\\\"", Malformed),
            ("\"a\\n\"", Malformed),
            ("\"a\" b", Malformed),
            ("\"a\"b", Malformed),
            ("\"a\";", Malformed),
            ("a\"b", Malformed),
            ("a b", Malformed),
            ("a;b=1", Malformed),
            ("(a)", Malformed),
            ("%\"a\"", Malformed),
            ("tab\tkey", NotAscii),
            ("\"tab\tkey\"", NotAscii),
            ("nul\0", NotAscii),
            ("größe", NotAscii),
            ("\"größe\"", NotAscii),
            ("\u{202e}abc", NotAscii),
        ] {
            assert_eq!(key(line), Err(error), "{line:?}");
        }
        let line = |length: usize| "k".repeat(length);
        assert_eq!(key(&line(255)), Ok(line(255)));
        assert_eq!(key(&line(256)), Err(TooLong));
        assert_eq!(key(&format!("\"{}\"", line(255))), Ok(line(255)));
        assert_eq!(key(&format!("\"{}\"", line(256))), Err(TooLong));
        assert_eq!(key(&format!("\"{}\"", "\\\"".repeat(255))), Ok("\"".repeat(255)));
        assert_eq!(key(&format!("\"{}\"", "\\\"".repeat(256))), Err(TooLong));
        assert_eq!(key(&line(100_000)), Err(TooLong));
    }

    /// Pitfall 38.
    #[test]
    fn several_lines_are_refused_although_they_are_equal() {
        let mut headers = HeaderMap::new();
        assert_eq!(parse_key(&headers, "idempotency-key"), Err(InvalidKey::Missing));
        headers.append("idempotency-key", HeaderValue::from_static("a"));
        assert_eq!(parse_key(&headers, "idempotency-key").as_deref(), Ok("a"));
        headers.append("idempotency-key", HeaderValue::from_static("a"));
        assert_eq!(parse_key(&headers, "idempotency-key"), Err(InvalidKey::Several));
    }

    #[test]
    fn formats_admit_what_they_name() {
        let uuid = "8e03978e-40d5-43dd-bc93-6894a57f9324";
        let ulid = "01ARZ3NDEKTSV4RRFFQ69G5FAV";
        assert!(KeyFormat::Uuid.admits(uuid) && KeyFormat::Uuid.admits(&uuid.to_uppercase()));
        for no in ["", ulid, "8e03978e40d543ddbc936894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f932g", "{8e0}"] {
            assert!(!KeyFormat::Uuid.admits(no), "{no}");
        }
        assert!(KeyFormat::Ulid.admits(ulid) && KeyFormat::Ulid.admits(&ulid.to_lowercase()));
        for no in ["", uuid, "81ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAU", "01ARZ3NDEKTSV4RRFFQ69G5FA"] {
            assert!(!KeyFormat::Ulid.admits(no), "{no}");
        }
        let orders = KeyFormat::custom("an order number", |key| key.starts_with("order-"));
        assert!(orders.admits("order-1") && !orders.admits("1"));
        assert!(KeyFormat::Any.admits("1"));
    }

    /// As a String and nothing else, by the parser of Structured Fields.
    fn by_the_book(line: &str) -> Option<String> {
        match Parser::new(line).parse_item::<Item>().ok()?.bare_item {
            BareItem::String(key) => Some(key.into()),
            _ => None,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn any_bytes_give_a_key_or_an_error(line in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(key) = parse_line(&line) {
                prop_assert!((1..=255).contains(&key.len()));
                prop_assert!(key.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
                prop_assert!(idem_core::Key::new("", &key).is_ok());
            }
        }

        #[test]
        fn quoted_lines_are_read_by_the_book(line in "\"[ab\\\\\", ;=é\t]{0,12}\"?[;, a=1]{0,4}") {
            let found = by_the_book(&line).filter(|key| !key.is_empty());
            prop_assert_eq!(key(&line).ok(), found);
        }

        #[test]
        fn every_key_can_be_sent_quoted(text in "[ -~]{1,255}") {
            let quoted = format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(key(&quoted), Ok(text));
        }
    }
}
