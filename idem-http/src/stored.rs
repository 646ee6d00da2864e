//! Responses as outcomes, and outcomes as responses.

use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::response::Parts;
use http::{Method, Response, StatusCode};
use idem_core::limits::{MAX_HEADER_NAME_BYTES, MAX_HEADERS};
use idem_core::{Header, Headers, Outcome};

/// Headers that are not kept, beside those that `Connection` names.
///
/// - of one connection or one message, and made anew by the server: hop-by-hop and framing headers, `Date`;
/// - of one client's session or exchange: cookies, challenges, and what proves an authentication.
fn is_kept(name: &HeaderName) -> bool {
    !matches!(
        *name,
        header::CONNECTION
            | header::TRANSFER_ENCODING
            | header::TE
            | header::TRAILER
            | header::UPGRADE
            | header::CONTENT_LENGTH
            | header::DATE
            | header::AGE
            | header::SET_COOKIE
            | header::WWW_AUTHENTICATE
            | header::PROXY_AUTHENTICATE
            | header::ALT_SVC
    ) && !matches!(
        name.as_str(),
        "keep-alive"
            | "proxy-connection"
            | "set-cookie2"
            | "authentication-info"
            | "proxy-authentication-info"
            | "clear-site-data"
    )
}

/// The lines that are kept, in their order, and their bytes as the outcome limit counts them; `None` where no outcome can
/// hold them.
pub(crate) fn kept_headers(headers: &HeaderMap, unstored: &[HeaderName], method: &Method) -> Option<(Headers, usize)> {
    let named: Vec<&str> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|line| line.to_str().ok())
        .flat_map(|line| line.split(',').map(str::trim))
        .collect();
    let kept = |name: &HeaderName| {
        // The length that a HEAD is told is not the body's, so that it cannot be made anew.
        (is_kept(name) || (name == header::CONTENT_LENGTH && method == Method::HEAD))
            && !unstored.contains(name)
            && !named.iter().any(|named| name.as_str().eq_ignore_ascii_case(named))
    };
    let (mut count, mut name_bytes, mut value_bytes) = (0, 0, 0);
    for (name, value) in headers.iter().filter(|(name, _)| kept(name)) {
        if name.as_str().len() > MAX_HEADER_NAME_BYTES {
            return None;
        }
        count += 1;
        name_bytes += name.as_str().len();
        value_bytes += value.len();
    }
    if count > MAX_HEADERS {
        return None;
    }
    // One allocation for all values.
    let mut values = BytesMut::with_capacity(value_bytes);
    let mut lines = Vec::with_capacity(count);
    for (name, value) in headers.iter().filter(|(name, _)| kept(name)) {
        values.extend_from_slice(value.as_bytes());
        lines.push(Header { name: name.as_str().into(), value: values.split().freeze() });
    }
    Some((lines.into(), name_bytes + value_bytes))
}

/// A response as the layer stores it, with its status, the headers that are kept, and its body: for handlers that commit
/// their own rows together with the completion of the key, and for reconcile hooks.
///
/// A handler returns the very same response afterwards. It gets the key as an [`Attempt`](crate::Attempt) in the
/// extensions of its request.
#[must_use]
pub fn outcome(response: &Response<Bytes>) -> Outcome {
    let mut outcome = Outcome::new(response.status().as_u16(), response.body().clone());
    if let Some((headers, _)) = kept_headers(response.headers(), &[], &Method::POST) {
        outcome.headers = headers;
    }
    outcome
}

/// Status and headers of a stored outcome, made by this layer or by a reconciler; `None` where they are not HTTP's.
pub(crate) fn head(outcome: &Outcome) -> Option<Parts> {
    let (mut parts, ()) = Response::new(()).into_parts();
    parts.status = StatusCode::from_u16(outcome.code).ok().filter(|status| !status.is_informational())?;
    parts.headers.try_reserve(outcome.headers.len() + 1).ok()?;
    for line in &outcome.headers {
        let name = HeaderName::from_bytes(line.name.as_bytes()).ok()?;
        let value = HeaderValue::from_maybe_shared(line.value.clone()).ok()?;
        parts.headers.try_append(name, value).ok()?;
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(lines: &[(&'static str, &[u8])]) -> Vec<(String, Vec<u8>)> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_bytes(value).unwrap());
        }
        let (kept, size) = kept_headers(&headers, &[HeaderName::from_static("x-request-id")], &Method::POST).unwrap();
        assert_eq!(size, kept.iter().map(|line| line.name.len() + line.value.len()).sum::<usize>());
        kept.iter().map(|line| (line.name.to_string(), line.value.to_vec())).collect()
    }

    /// Pitfalls 31 and 34.
    #[test]
    fn what_belongs_to_one_exchange_is_not_kept() {
        for name in [
            "connection",
            "keep-alive",
            "proxy-connection",
            "te",
            "trailer",
            "transfer-encoding",
            "upgrade",
            "content-length",
            "date",
            "age",
            "set-cookie",
            "set-cookie2",
            "www-authenticate",
            "proxy-authenticate",
            "authentication-info",
            "proxy-authentication-info",
            "alt-svc",
            "clear-site-data",
            "x-request-id",
        ] {
            assert_eq!(kept(&[(name, b"1")]), [], "{name}");
        }
        assert_eq!(kept(&[("connection", b"close, X-Hop"), ("x-hop", b"1"), ("x", b"2")]), [("x".into(), b"2".into())]);
    }

    /// Pitfalls 32 and 33.
    #[test]
    fn lines_are_kept_as_they_are_in_their_order() {
        let lines: [(&str, &[u8]); 7] = [
            ("location", b"/charges/1"),
            ("etag", b"\"1\""),
            ("link", b"<a>; rel=\"next\", <b>"),
            ("link", b"<c>"),
            ("x-bytes", b"\x80\xff"),
            ("x-empty", b""),
            ("cache-control", b"no-store"),
        ];
        let wanted: Vec<_> = lines.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect();
        assert_eq!(kept(&lines), wanted);
    }

    #[test]
    fn what_no_outcome_can_hold_is_told() {
        let mut headers = HeaderMap::new();
        for _ in 0..MAX_HEADERS {
            headers.append("x", HeaderValue::from_static("1"));
        }
        assert!(kept_headers(&headers, &[], &Method::POST).is_some());
        headers.append("x", HeaderValue::from_static("1"));
        assert!(kept_headers(&headers, &[], &Method::POST).is_none());
        let mut headers = HeaderMap::new();
        headers.append(HeaderName::from_bytes("x".repeat(256).as_bytes()).unwrap(), HeaderValue::from_static("1"));
        assert!(kept_headers(&headers, &[], &Method::POST).is_none());
    }

    #[test]
    fn an_outcome_that_is_no_response_is_told() {
        let response = Response::builder().status(201).header("location", "/1").body(Bytes::from("x")).unwrap();
        let parts = head(&outcome(&response)).unwrap();
        assert_eq!((parts.status, &parts.headers), (StatusCode::CREATED, response.headers()));
        for code in [0, 1, 99, 100, 101, 1000] {
            assert!(head(&Outcome::new(code, "")).is_none(), "{code}");
        }
        assert!(head(&Outcome::new(200, "").with_header("a b", "")).is_none());
        assert!(head(&Outcome::new(200, "").with_header("a", "b\r\nc: d")).is_none());
    }
}
