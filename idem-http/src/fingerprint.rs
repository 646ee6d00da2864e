//! What a request asks for.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderName;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use idem_core::Fingerprint;

use crate::canonical::canonical;

/// What of a request has to be the same in a repeat. By default: method, path, query and body, byte for byte, each framed by
/// its length, so that nothing collides by moving a border. With the feature `axum` the path is the whole one, also where
/// the layer is within a nested router.
///
/// The host is not part of it: a service of several hosts puts it into the scope. Trailers of a request are not either.
///
/// A key that was freed keeps its fingerprint: a client that corrects its request needs a new key.
#[derive(Clone, Default)]
pub struct Fingerprinting {
    canonical_json: bool,
    sorted_query: bool,
    without_body: bool,
    headers: Arc<[HeaderName]>,
    custom: Option<Arc<Custom>>,
}

type Custom = dyn Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync;

impl Fingerprinting {
    /// The function says it all.
    pub fn custom(fingerprint: impl Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync + 'static) -> Self {
        Self { custom: Some(Arc::new(fingerprint)), ..Self::default() }
    }

    /// JSON bodies (`application/json` and `…+json`) are compared in a canonical form: neither the order of members nor
    /// space between tokens counts. Numbers are compared as they are written: `1.0` is not `1`. What is no JSON, or has a
    /// member twice, is compared byte for byte.
    #[must_use]
    pub fn with_canonical_json(self) -> Self {
        Self { canonical_json: true, ..self }
    }

    /// The order of the query's parameters does not count; that of the values of one name does. Without this,
    /// `?a=1&b=2` and `?b=2&a=1` are two requests.
    #[must_use]
    pub fn with_sorted_query(self) -> Self {
        Self { sorted_query: true, ..self }
    }

    /// These headers count too, with all their lines: for a content type or a language that changes what is done.
    #[must_use]
    pub fn with_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        Self { headers: names.into_iter().collect(), ..self }
    }

    /// The body does not count: for bodies that differ in every repeat, such as signed ones. Then another order under a
    /// used key is not noticed, and gets the answer of the first.
    #[must_use]
    pub fn without_body(self) -> Self {
        Self { without_body: true, ..self }
    }

    pub(crate) fn of(&self, request: &Parts, body: &Bytes) -> Fingerprint {
        if let Some(custom) = &self.custom {
            return custom(request, body);
        }
        // All but the body is one field: a builder is large, and is moved with every field.
        let mut head = Head(Vec::with_capacity(192));
        head.field("http 1");
        head.field(request.method.as_str());
        head.field(path(request));
        match request.uri.query() {
            None => head.field("no query"),
            Some(query) if self.sorted_query => {
                let mut pairs: Vec<&str> = query.split('&').collect();
                // Stable: the values of one name keep their order.
                pairs.sort_by_key(|pair| pair.split_once('=').map_or(*pair, |(name, _)| name));
                head.field("sorted query");
                head.count(pairs.len());
                pairs.iter().for_each(|pair| head.field(pair));
            }
            Some(query) => {
                head.field("query");
                head.field(query);
            }
        }
        for name in self.headers.iter() {
            let lines = request.headers.get_all(name);
            head.field(name);
            head.count(lines.iter().count());
            lines.iter().for_each(|line| head.field(line));
        }
        if self.without_body {
            head.field("no body");
            return Fingerprint::of(head.0);
        }
        if self.canonical_json
            && is_json(request)
            && let Some(form) = canonical(body)
        {
            head.field("json");
            return Fingerprint::builder().field(head.0).field(form).finish();
        }
        head.field("body");
        Fingerprint::builder().field(head.0).field(body).finish()
    }
}

/// Fields, each framed by its length.
struct Head(Vec<u8>);

impl Head {
    fn count(&mut self, count: usize) {
        self.0.extend_from_slice(&(count as u64).to_le_bytes());
    }

    fn field(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.count(bytes.len());
        self.0.extend_from_slice(bytes);
    }
}

impl fmt::Debug for Fingerprinting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fingerprinting")
            .field("canonical_json", &self.canonical_json)
            .field("sorted_query", &self.sorted_query)
            .field("without_body", &self.without_body)
            .field("headers", &self.headers)
            .field("custom", &self.custom.is_some())
            .finish()
    }
}

#[cfg(feature = "axum")]
fn path(request: &Parts) -> &str {
    // A nested router shortens the path, and two of them may have the same rest.
    request.extensions.get::<axum::extract::OriginalUri>().map_or(request.uri.path(), |original| original.0.path())
}

#[cfg(not(feature = "axum"))]
fn path(request: &Parts) -> &str {
    request.uri.path()
}

fn is_json(request: &Parts) -> bool {
    let Some(value) = request.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()) else { return false };
    let essence = value.split(';').next().unwrap_or_default().trim();
    let Some((kind, subtype)) = essence.split_once('/') else { return false };
    let ends = |suffix: &str| {
        subtype.len() > suffix.len()
            && subtype.as_bytes()[subtype.len() - suffix.len()..].eq_ignore_ascii_case(suffix.as_bytes())
    };
    kind.eq_ignore_ascii_case("application") && subtype.eq_ignore_ascii_case("json") || ends("+json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn of(how: &Fingerprinting, method: &str, uri: &str, headers: &[(&str, &str)], body: &'static [u8]) -> Fingerprint {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        how.of(&request.body(()).unwrap().into_parts().0, &Bytes::from_static(body))
    }

    /// Pitfall 30.
    #[test]
    fn everything_that_is_asked_for_counts() {
        let how = Fingerprinting::default();
        let all = [
            ("POST", "/a", &b"b"[..]),
            ("POST", "/a", b""),
            ("PATCH", "/a", b"b"),
            ("POST", "/ab", b""),
            ("POST", "/a?b", b""),
            ("POST", "/a?", b"b"),
            ("POST", "/a?x=1", b"b"),
            ("POST", "/A", b"b"),
        ];
        for (at, (method, uri, body)) in all.iter().enumerate() {
            for (other, (other_method, other_uri, other_body)) in all.iter().enumerate() {
                let same = of(&how, method, uri, &[], body) == of(&how, other_method, other_uri, &[], other_body);
                assert_eq!(same, at == other, "{uri} {other_uri}");
            }
        }
        // Headers do not, unless they are named.
        assert_eq!(of(&how, "POST", "/a", &[("x", "1")], b""), of(&how, "POST", "/a", &[], b""));
    }

    /// Pitfall 39.
    #[test]
    fn the_order_of_the_query_counts_unless_it_is_sorted() {
        let (plain, sorted) = (Fingerprinting::default(), Fingerprinting::default().with_sorted_query());
        let same = |how: &Fingerprinting, one: &str, other: &str| {
            of(how, "POST", one, &[], b"") == of(how, "POST", other, &[], b"")
        };
        assert!(!same(&plain, "/?a=1&b=2", "/?b=2&a=1"));
        assert!(same(&sorted, "/?a=1&b=2", "/?b=2&a=1"));
        assert!(same(&sorted, "/?a=2&b=0&a=1", "/?b=0&a=2&a=1"));
        for (one, other) in [("/?a=1&a=2", "/?a=2&a=1"), ("/?a=1&b=2", "/?a=1&b=3"), ("/?a=1", "/?a=1&"), ("/?", "/")] {
            assert!(!same(&sorted, one, other), "{one} {other}");
        }
    }

    #[test]
    fn json_is_compared_by_its_members_where_that_is_asked_for() {
        let (plain, by_form) = (Fingerprinting::default(), Fingerprinting::default().with_canonical_json());
        let json = &[("content-type", "application/json; charset=utf-8")][..];
        let same = |how: &Fingerprinting, headers: &[(&str, &str)], one: &'static [u8], other: &'static [u8]| {
            of(how, "POST", "/", headers, one) == of(how, "POST", "/", headers, other)
        };
        let (one, other) = (br#"{"a":1,"b":2}"#, br#"{ "b": 2, "a": 1 }"#);
        assert!(!same(&plain, json, one, other));
        assert!(same(&by_form, json, one, other));
        assert!(same(&by_form, &[("content-type", "application/merge-patch+JSON")], one, other));
        for other_type in [&[][..], &[("content-type", "text/plain")], &[("content-type", "application/jsonx")]] {
            assert!(!same(&by_form, other_type, one, other));
        }
        // No JSON: byte for byte.
        assert!(!same(&by_form, json, b"{", b"{ ") && same(&by_form, json, b"{", b"{"));
        assert!(!same(&by_form, json, br#"{"a":1,"a":2}"#, br#"{"a":2,"a":1}"#));
    }

    #[test]
    fn headers_and_bodies_count_as_chosen() {
        let language = Fingerprinting::default().with_headers([http::header::ACCEPT_LANGUAGE]);
        let lines = |lines: &[(&str, &str)]| of(&language, "POST", "/", lines, b"");
        assert_ne!(lines(&[("accept-language", "de")]), lines(&[("accept-language", "en")]));
        assert_ne!(lines(&[("accept-language", "de")]), lines(&[]));
        assert_ne!(lines(&[("accept-language", "a, b")]), lines(&[("accept-language", "a"), ("accept-language", "b")]));
        let no_body = Fingerprinting::default().without_body();
        assert_eq!(of(&no_body, "POST", "/", &[], b"1"), of(&no_body, "POST", "/", &[], b"2"));
        let own = Fingerprinting::custom(|parts, _| Fingerprint::of(parts.uri.path()));
        assert_eq!(of(&own, "POST", "/", &[], b"1"), of(&own, "PATCH", "/", &[], b"2"));
        assert_ne!(of(&own, "POST", "/a", &[], b"1"), of(&own, "POST", "/b", &[], b"1"));
    }
}
