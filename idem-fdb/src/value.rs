//! The bytes of a record, in pieces that fit into a value.
//!
//! FoundationDB's values have 100,000 bytes at most. The first value is the version of this form (1), the number of further
//! pieces, and the first 90,000 bytes of the record in [`codec`]'s encoding; every piece but the last has 90,000 bytes.
//! Reading is strict: a missing piece, one too many or one of another length is an error.

use std::time::SystemTime;

use bytes::Bytes;
use idem_core::codec::{self, DecodeError};
use idem_core::{Key, Record};

const VERSION: u8 = 1;
/// The bytes of a record in one value.
pub(crate) const PIECE: usize = 90_000;

/// Why stored values are no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The first value is empty or of a form that this version does not know.
    #[error("the value is no record's, or one of a newer version")]
    Version,
    /// There are fewer or more pieces than the first value says.
    #[error("the record has {found} further pieces instead of {wanted}")]
    Pieces {
        /// How many there are.
        found: usize,
        /// How many there should be.
        wanted: usize,
    },
    /// A piece has another length than its place in the record demands.
    #[error("a piece of the record has another length than it should")]
    PieceLength,
    /// The bytes are no record.
    #[error("{0}")]
    Decode(#[from] DecodeError),
}

/// A record's values: the first, and the further pieces, of which `n` stands under number `n + 1`.
pub(crate) struct Values {
    pub(crate) first: Vec<u8>,
    pub(crate) further: Vec<Vec<u8>>,
}

/// The values of a record, which keeps the limits of the contract.
pub(crate) fn split(record: &Record) -> Values {
    let bytes = codec::encode(record);
    let (first, rest) = bytes.split_at(bytes.len().min(PIECE));
    let further: Vec<Vec<u8>> = rest.chunks(PIECE).map(<[u8]>::to_vec).collect();
    // 8 MiB are 94 pieces.
    let first = [&[VERSION, further.len() as u8], first].concat();
    Values { first, further }
}

/// How many further pieces belong to a first value.
pub(crate) fn further(first: &[u8]) -> Result<usize, ValueError> {
    match first {
        [VERSION, further, ..] => Ok(usize::from(*further)),
        _ => Err(ValueError::Version),
    }
}

/// The record of these values, the pieces in their order.
pub(crate) fn join<'v>(
    key: &Key,
    first: &[u8],
    pieces: impl ExactSizeIterator<Item = &'v [u8]>,
    now: SystemTime,
) -> Result<Record, ValueError> {
    let wanted = further(first)?;
    if pieces.len() != wanted {
        return Err(ValueError::Pieces { found: pieces.len(), wanted });
    }
    let mut bytes = first[2..].to_vec();
    for piece in pieces {
        // All before the last are full, and none is empty.
        if !bytes.len().is_multiple_of(PIECE) || bytes.is_empty() || piece.is_empty() || piece.len() > PIECE {
            return Err(ValueError::PieceLength);
        }
        bytes.extend_from_slice(piece);
    }
    if wanted == 0 && bytes.len() > PIECE {
        return Err(ValueError::PieceLength);
    }
    Ok(codec::decode(key, Bytes::from(bytes), now)?)
}
