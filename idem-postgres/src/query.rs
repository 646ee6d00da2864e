//! A statement and its values, sent as a prepared statement or as one message of text.
//!
//! A prepared statement lives in the server's session and takes two messages, so it needs a session of its own. Behind a
//! pooler that gives the session to somebody else after each transaction, the statement has to be one simple message, in
//! which the values stand as literals.
//!
//! These hold nothing that could end them or mean something else, whatever the session's settings (`client_encoding`,
//! `standard_conforming_strings`, `backslash_quote`): between their quotes are hexadecimal digits, numbers, `NULL`, commas
//! and braces.

use std::fmt::Write;
use std::sync::Arc;

use sqlx::postgres::{PgArguments, PgRow, Postgres};
use sqlx::query::Query as Prepared;
use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, Encode, Executor, Type};

/// A statement with the values for its `$1`, `$2`, … so far.
pub(crate) enum Query {
    Prepared(Prepared<'static, Postgres, PgArguments>),
    /// The text, with each value in the place of its number.
    Simple(Arc<str>, Vec<String>),
}

impl Query {
    pub(crate) fn new(text: &Arc<str>, prepared: bool) -> Self {
        match prepared {
            true => Self::Prepared(sqlx::query(AssertSqlSafe(Arc::clone(text)))),
            false => Self::Simple(Arc::clone(text), Vec::new()),
        }
    }

    pub(crate) fn bind<'v, V>(self, value: V) -> Self
    where
        V: Literal + Encode<'v, Postgres> + Type<Postgres>,
    {
        match self {
            Self::Prepared(query) => Self::Prepared(query.bind(value)),
            Self::Simple(text, mut values) => {
                let mut literal = String::new();
                value.write(&mut literal);
                values.push(literal);
                Self::Simple(text, values)
            }
        }
    }

    pub(crate) async fn fetch_all<'e>(
        self,
        executor: impl Executor<'e, Database = Postgres>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        match self {
            Self::Prepared(query) => query.fetch_all(executor).await,
            Self::Simple(text, values) => {
                sqlx::raw_sql(AssertSqlSafe(filled(&text, &values))).fetch_all(executor).await
            }
        }
    }

    pub(crate) async fn fetch_optional<'e>(
        self,
        executor: impl Executor<'e, Database = Postgres>,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        match self {
            Self::Prepared(query) => query.fetch_optional(executor).await,
            Self::Simple(text, values) => {
                sqlx::raw_sql(AssertSqlSafe(filled(&text, &values))).fetch_optional(executor).await
            }
        }
    }
}

/// The text with the literals in the places of their numbers.
fn filled(text: &str, values: &[String]) -> String {
    let mut filled = String::with_capacity(text.len() + values.iter().map(String::len).sum::<usize>());
    let mut parts = text.split('$');
    filled.extend(parts.next());
    for part in parts {
        let digits = part.len() - part.trim_start_matches(|digit: char| digit.is_ascii_digit()).len();
        let number: usize = part[..digits].parse().unwrap_or_default();
        // A number without a value is left as it is, and refused by the server.
        match number.checked_sub(1).and_then(|place| values.get(place)) {
            Some(value) => filled.push_str(value),
            None => filled.extend(["$", &part[..digits]]),
        }
        filled.push_str(&part[digits..]);
    }
    filled
}

/// A value as SQL has it.
pub(crate) trait Literal {
    fn write(&self, out: &mut String);
}

fn hex(bytes: &[u8], out: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    out.reserve(2 * bytes.len());
    for byte in bytes {
        out.push(char::from(DIGITS[usize::from(byte >> 4)]));
        out.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
}

/// An array of what these write, without quotes.
fn array<T>(elements: &[T], of: &str, out: &mut String, element: impl Fn(&T, &mut String)) {
    out.push_str("'{");
    for (at, value) in elements.iter().enumerate() {
        if at > 0 {
            out.push(',');
        }
        element(value, out);
    }
    out.push_str("}'::");
    out.push_str(of);
    out.push_str("[]");
}

/// An array of texts or bytes, of their digits.
fn hex_array<'a, T>(elements: &'a [T], each: &str, out: &mut String, bytes: impl Fn(&'a T) -> Option<&'a [u8]>) {
    // In their order, whatever the planner makes of it.
    out.push_str("ARRAY(SELECT ");
    out.push_str(each);
    out.push_str(" FROM unnest(");
    out.push_str("'{");
    for (at, value) in elements.iter().enumerate() {
        if at > 0 {
            out.push(',');
        }
        match bytes(value) {
            None => out.push_str("NULL"),
            Some([]) => out.push_str("\"\""),
            Some(bytes) => hex(bytes, out),
        }
    }
    out.push_str("}'::text[]) WITH ORDINALITY AS v(digits, place) ORDER BY v.place)");
}

const BYTES: &str = "decode(v.digits, 'hex')";
const TEXT: &str = "convert_from(decode(v.digits, 'hex'), 'UTF8')";

fn number<T: std::fmt::Display>(value: &Option<T>, out: &mut String) {
    // Writing to a string does not fail.
    let _ = match value {
        Some(value) => write!(out, "{value}"),
        None => out.write_str("NULL"),
    };
}

impl Literal for &str {
    fn write(&self, out: &mut String) {
        out.push_str("convert_from(decode('");
        hex(self.as_bytes(), out);
        out.push_str("', 'hex'), 'UTF8')");
    }
}

impl Literal for Option<&str> {
    fn write(&self, out: &mut String) {
        match self {
            Some(text) => text.write(out),
            None => out.push_str("NULL::text"),
        }
    }
}

impl Literal for Vec<&str> {
    fn write(&self, out: &mut String) {
        hex_array(self, TEXT, out, |text| Some(text.as_bytes()));
    }
}

impl Literal for Vec<Option<&str>> {
    fn write(&self, out: &mut String) {
        hex_array(self, TEXT, out, |text| text.map(str::as_bytes));
    }
}

impl Literal for Vec<Option<&[u8]>> {
    fn write(&self, out: &mut String) {
        hex_array(self, BYTES, out, |bytes| *bytes);
    }
}

impl Literal for Vec<Option<Vec<u8>>> {
    fn write(&self, out: &mut String) {
        hex_array(self, BYTES, out, |bytes| bytes.as_deref());
    }
}

impl Literal for Vec<i64> {
    fn write(&self, out: &mut String) {
        array(self, "bigint", out, |value, out| number(&Some(value), out));
    }
}

impl Literal for Vec<Option<i32>> {
    fn write(&self, out: &mut String) {
        array(self, "int", out, number);
    }
}

impl Literal for Vec<Option<i16>> {
    fn write(&self, out: &mut String) {
        array(self, "smallint", out, number);
    }
}

/// Values of the type `"char"`.
impl Literal for Vec<i8> {
    fn write(&self, out: &mut String) {
        array(self, "int", out, |value, out| number(&Some(value), out));
        out.push_str("::\"char\"[]");
    }
}

impl Literal for Vec<bool> {
    fn write(&self, out: &mut String) {
        array(self, "bool", out, |value, out| out.push(if *value { 't' } else { 'f' }));
    }
}

impl Literal for Vec<Uuid> {
    fn write(&self, out: &mut String) {
        array(self, "uuid", out, |value, out| hex(value.as_bytes(), out));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "the tests are easier to read")]
    fn literal(value: impl Literal) -> String {
        let mut out = String::new();
        value.write(&mut out);
        out
    }

    /// What is between quotes.
    fn quoted(sql: &str) -> Vec<&str> {
        assert!(!sql.contains("''") && sql.matches('\'').count().is_multiple_of(2), "{sql}");
        sql.split('\'').skip(1).step_by(2).collect()
    }

    #[test]
    fn nothing_of_a_value_stands_in_its_literal() {
        for nasty in ["'; DROP TABLE x; --", "\\'", "E'\\''", "$1", "{a,\"b\"}", "NULL", "\u{0}é\u{10ffff}", "%s"] {
            let all = [
                literal(nasty),
                literal(Some(nasty)),
                literal(vec![nasty, nasty]),
                literal(vec![Some(nasty), None]),
                literal(vec![Some(nasty.as_bytes()), None]),
                literal(vec![Some(nasty.as_bytes().to_vec()), None]),
            ];
            for sql in all {
                for part in quoted(&sql) {
                    let allowed = |letter: char| letter.is_ascii_hexdigit() || "{},\"".contains(letter);
                    let fixed = ["hex", "UTF8"].contains(&part) || part.replace("NULL", "").chars().all(allowed);
                    assert!(fixed, "{part} in {sql}");
                }
            }
        }
    }

    #[test]
    fn literals_are_as_sql_has_them() {
        assert_eq!(literal("aé"), "convert_from(decode('61c3a9', 'hex'), 'UTF8')");
        assert_eq!(literal(vec![1_i64, -2]), "'{1,-2}'::bigint[]");
        assert_eq!(literal(vec![Some(7_i32), None]), "'{7,NULL}'::int[]");
        assert_eq!(literal(vec![true, false]), "'{t,f}'::bool[]");
        assert_eq!(literal(vec![99_i8]), "'{99}'::int[]::\"char\"[]");
        assert_eq!(literal(None::<&str>), "NULL::text");
        assert!(literal(vec![Some(&b""[..]), None]).contains("'{\"\",NULL}'::text[]"));
    }

    #[test]
    fn every_number_is_filled_once() {
        let values: Vec<String> = (1..=11).map(|at| format!("<{at}$1>")).collect();
        assert_eq!(filled("f($1, $11,$2) $x", &values), "f(<1$1>, <11$1>,<2$1>) $x");
        assert_eq!(filled("none", &values), "none");
        assert_eq!(filled("$12", &values), "$12");
    }
}
