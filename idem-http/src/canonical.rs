//! JSON in one form, whatever the order of its members and the space between its tokens.
//!
//! Not by way of numbers: `1.10` and `1.1` stay two texts, and no digit is lost, so that two amounts are never one.

use std::borrow::Cow;

/// As deep as serde_json reads.
const MAX_DEPTH: u32 = 128;

/// The canonical form: no space, members in the order of their names, texts unescaped and escaped again. `None` for what
/// is no JSON, nests too deep, or has a member twice, which everybody reads in another way.
pub(crate) fn canonical(json: &[u8]) -> Option<Vec<u8>> {
    let json = std::str::from_utf8(json).ok()?;
    let mut reader = Reader { left: json, out: Vec::with_capacity(json.len()) };
    reader.value(0)?;
    reader.space();
    reader.left.is_empty().then_some(reader.out)
}

struct Reader<'a> {
    left: &'a str,
    out: Vec<u8>,
}

impl<'a> Reader<'a> {
    fn space(&mut self) {
        self.left = self.left.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    /// The next token, if it is this one.
    fn eat(&mut self, token: char) -> bool {
        self.space();
        match self.left.strip_prefix(token) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: u32) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.space();
        match self.left.bytes().next()? {
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => {
                let text = self.text()?;
                self.write_text(&text)
            }
            _ => self.atom(),
        }
    }

    fn object(&mut self, depth: u32) -> Option<()> {
        self.eat('{').then_some(())?;
        // The member's name, and where its value is written.
        let mut members: Vec<(Cow<'a, str>, Vec<u8>)> = Vec::new();
        if !self.eat('}') {
            loop {
                self.space();
                let name = self.text()?;
                self.eat(':').then_some(())?;
                let start = self.out.len();
                self.value(depth + 1)?;
                members.push((name, self.out.split_off(start)));
                if self.eat('}') {
                    break;
                }
                self.eat(',').then_some(())?;
            }
        }
        members.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        if members.windows(2).any(|pair| matches!(pair, [(one, _), (other, _)] if one == other)) {
            return None;
        }
        self.out.push(b'{');
        for (at, (name, value)) in members.iter().enumerate() {
            if at > 0 {
                self.out.push(b',');
            }
            self.write_text(name)?;
            self.out.push(b':');
            self.out.extend_from_slice(value);
        }
        self.out.push(b'}');
        Some(())
    }

    fn array(&mut self, depth: u32) -> Option<()> {
        self.eat('[').then_some(())?;
        self.out.push(b'[');
        if !self.eat(']') {
            loop {
                self.value(depth + 1)?;
                if self.eat(']') {
                    break;
                }
                self.eat(',').then_some(())?;
                self.out.push(b',');
            }
        }
        self.out.push(b']');
        Some(())
    }

    /// A number or a word, as it is written.
    fn atom(&mut self) -> Option<()> {
        let end = self.left.find([',', ']', '}', ' ', '\t', '\n', '\r', ':', '"', '[', '{']);
        let (atom, left) = self.left.split_at(end.unwrap_or(self.left.len()));
        serde_json::from_str::<serde::de::IgnoredAny>(atom).ok()?;
        self.left = left;
        self.out.extend_from_slice(atom.as_bytes());
        Some(())
    }

    /// A text, unescaped.
    fn text(&mut self) -> Option<Cow<'a, str>> {
        let inner = self.left.strip_prefix('"')?;
        let mut escaped = false;
        let end = inner.bytes().position(|byte| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        })?;
        let (quoted, left) = self.left.split_at(end + 2);
        self.left = left;
        let plain = !inner[..end].contains('\\') && !inner[..end].bytes().any(|byte| byte < b' ');
        if plain {
            return Some(Cow::Borrowed(&inner[..end]));
        }
        serde_json::from_str(quoted).ok().map(Cow::Owned)
    }

    fn write_text(&mut self, text: &str) -> Option<()> {
        serde_json::to_writer(&mut self.out, text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn of(json: &str) -> Option<String> {
        canonical(json.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn order_and_space_do_not_count() {
        let wanted = r#"{"a":[1,2,{}],"b":{"c":null,"d":"x"}}"#;
        assert_eq!(of(wanted).as_deref(), Some(wanted));
        assert_eq!(of(" { \"b\" : {\"d\":\"x\",\n\"c\":null}, \"\\u0061\":[1, 2,{ }] } ").as_deref(), Some(wanted));
        assert_eq!(of(r#""A\/é\n""#), of("\"\\u0041/\\u00e9\\u000a\""));
    }

    #[test]
    fn what_differs_stays_different() {
        for (one, other) in [
            ("1", "1.0"),
            ("1.1", "1.10"),
            ("18446744073709551616", "18446744073709551617"),
            ("0.1000000000000000055", "0.1"),
            ("[1,2]", "[2,1]"),
            ("1", "\"1\""),
            (r#"{"a":null}"#, "{}"),
            (r#"["a","b"]"#, r#"["a,b"]"#),
        ] {
            assert!(of(one).is_some() && of(other).is_some() && of(one) != of(other), "{one} {other}");
        }
    }

    #[test]
    fn what_is_no_json_has_no_form() {
        for no in [
            "",
            " ",
            "{",
            "[1",
            "[1,]",
            "{,}",
            "{\"a\"}",
            "{\"a\":1,}",
            "nul",
            "01",
            "1 2",
            "\"a",
            "\"\\x\"",
            "\"\n\"",
            "'a'",
            "[1}",
            "{\"a\":1,\"a\":2}",
            "{\"a\":1,\"\\u0061\":1}",
            "NaN",
            "-",
            "\u{feff}1",
            "\"\\ud800\"",
            "[\"a\"\"b\"]",
        ] {
            assert_eq!(of(no), None, "{no}");
        }
        assert_eq!(canonical(b"\"\xff\""), None);
        assert!(of(&format!("{}1{}", "[".repeat(128), "]".repeat(128))).is_some());
        assert!(of(&format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000))).is_none());
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec((".{0,3}", inner), 0..5).prop_map(|members| members.into_iter().collect()),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn the_form_is_the_same_json(value in values()) {
            let (plain, pretty) = (value.to_string(), serde_json::to_string_pretty(&value).unwrap());
            let form = of(&plain).unwrap();
            prop_assert_eq!(of(&pretty), Some(form.clone()));
            prop_assert_eq!(serde_json::from_str::<Value>(&form).unwrap(), serde_json::from_str::<Value>(&plain).unwrap());
        }

        #[test]
        fn any_bytes_are_borne(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Some(form) = canonical(&bytes) {
                prop_assert!(serde_json::from_slice::<Value>(&form).is_ok());
            }
        }

        #[test]
        fn what_has_a_form_is_json(text in "[\\[\\]{}:,\"0-2.e\\\\a \\-]{0,24}") {
            if of(&text).is_some() {
                prop_assert!(serde_json::from_str::<Value>(&text).is_ok(), "{}", text);
            }
        }
    }
}
