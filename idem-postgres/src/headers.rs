//! Header lines as bytes: for each line the name's length in one byte, the name, the value's length in four bytes
//! (little-endian), the value.

use bytes::{Buf, BufMut, Bytes};
use idem_core::{Header, Headers};

use crate::error::PostgresError;

/// `None` for no lines.
pub(crate) fn encode(headers: &Headers) -> Option<Vec<u8>> {
    if headers.is_empty() {
        return None;
    }
    let mut out = Vec::with_capacity(headers.iter().map(|line| 5 + line.name.len() + line.value.len()).sum());
    for line in headers {
        out.put_u8(line.name.len() as u8);
        out.put_slice(line.name.as_bytes());
        out.put_u32_le(line.value.len() as u32);
        out.put_slice(&line.value);
    }
    Some(out)
}

pub(crate) fn decode(mut input: Bytes) -> Result<Headers, PostgresError> {
    const BROKEN: PostgresError = PostgresError::Column("headers");
    let mut lines = Vec::new();
    while input.has_remaining() {
        let len = usize::from(input.get_u8());
        let name = take(&mut input, len).ok_or(BROKEN)?;
        let name = std::str::from_utf8(&name).map_err(|_| BROKEN)?.into();
        let len = take(&mut input, 4).ok_or(BROKEN)?.get_u32_le();
        let value = usize::try_from(len).ok().and_then(|len| take(&mut input, len)).ok_or(BROKEN)?;
        lines.push(Header { name, value });
    }
    Ok(Headers::from(lines))
}

fn take(input: &mut Bytes, len: usize) -> Option<Bytes> {
    (len <= input.len()).then(|| input.split_to(len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use idem_core::Outcome;

    #[test]
    fn lines_come_back_and_damage_is_noticed() {
        let headers =
            Outcome::new(0, "").with_header("a", "1").with_header("A", &b"\xff\0"[..]).with_header("a", "").headers;
        let bytes = encode(&headers).unwrap();
        assert_eq!(decode(bytes.clone().into()).unwrap(), headers);
        assert_eq!(encode(&Headers::default()), None);
        for cut in 1..bytes.len() {
            // A cut between two lines leaves fewer lines.
            if let Ok(fewer) = decode(bytes[..cut].to_vec().into()) {
                assert!(fewer.len() < headers.len());
            }
        }
        assert!(decode(Bytes::from_static(&[1, 0xff, 0, 0, 0, 0])).is_err());
    }
}
