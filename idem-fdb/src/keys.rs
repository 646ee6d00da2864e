//! Where things lie: the layout, version 1.
//!
//! All keys are tuples (in FoundationDB's [encoding](https://github.com/apple/foundationdb/blob/main/design/tuple.md)) within
//! the subspace of the configuration.
//!
//! | key | value |
//! |---|---|
//! | `(1, "settings")` | what all processes have to agree on: see `settings.rs` |
//! | `(1, "records", day, scope, id)` | a record, or its beginning: see `value.rs` |
//! | `(1, "records", day, scope, id, n)` | its n-th further piece, from 1 |
//!
//! The first element is the version of this layout. `day` is the day of the Unix epoch **on which the record expires**,
//! margin included: so all of a day's records have expired when it is over, and one `clear_range` removes them. A record
//! lives on one day: where a write changes the day, the same transaction clears the other place.

use std::time::{Duration, SystemTime};

use foundationdb_tuple::Subspace;
use idem_core::Key;

/// The version of the layout.
const VERSION: u32 = 1;
/// The seconds of a day.
pub(crate) const DAY: u64 = 24 * 60 * 60;

/// The keys of a store.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    records: Subspace,
    settings: Vec<u8>,
}

impl Keys {
    pub(crate) fn new(subspace: &Subspace) -> Self {
        let records = subspace.subspace(&(VERSION, "records"));
        Self { records, settings: subspace.pack(&(VERSION, "settings")) }
    }

    /// What all processes have to agree on.
    pub(crate) fn settings(&self) -> &[u8] {
        &self.settings
    }

    /// A record that expires on that day.
    pub(crate) fn record(&self, day: u64, key: &Key) -> Vec<u8> {
        self.records.pack(&(day, key.scope(), key.id()))
    }

    /// All records that expire before that day.
    pub(crate) fn before(&self, day: u64) -> (Vec<u8>, Vec<u8>) {
        (self.records.range().0, self.records.pack(&day))
    }
}

/// A further piece of a record.
pub(crate) fn piece(record: &[u8], number: u8) -> Vec<u8> {
    let mut key = record.to_vec();
    foundationdb_tuple::pack_into(&u32::from(number), &mut key);
    key
}

/// The range of all further pieces of a record.
pub(crate) fn pieces(record: &[u8]) -> (Vec<u8>, Vec<u8>) {
    ([record, &[0x00]].concat(), [record, &[0xff]].concat())
}

/// The day of a time, from the epoch.
pub(crate) fn day(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs() / DAY
}
