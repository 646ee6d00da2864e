//! What all processes of a store have to agree on: how far ahead records may expire.
//!
//! A reserve that looks at fewer days than another process writes to would miss a record. So the longest retention that any
//! store was opened with is stored, and only ever grows. To read it in every call would make its key hot. Instead, whoever
//! raises it also changes FoundationDB's
//! [metadata version](https://apple.github.io/foundationdb/special-keys.html), which comes with every transaction's read
//! version for nothing: a call reads the settings again where that has changed. And every call has a read conflict with the
//! settings' key, which costs no read: one that commits behind a change has to begin anew.
//!
//! The value: the version of its form (1), and the longest retention in seconds, big-endian, in 8 bytes.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use foundationdb::options::{ConflictRangeType, TransactionOption};
use foundationdb::{FdbResult, Transaction};

use crate::error::{FdbStoreError, Stop};

const VERSION: u8 = 1;
/// A metadata version that there is not.
const NONE: i64 = -1;

/// What this process knows of the settings.
#[derive(Debug)]
pub(crate) struct Settings {
    /// The metadata version with which they were read.
    read_with: AtomicI64,
    /// The longest retention in seconds. Only grows.
    longest: AtomicU64,
}

/// What a call begins with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    read_with: i64,
    pub(crate) longest: Duration,
}

impl Settings {
    pub(crate) fn new(longest: Duration) -> Self {
        // Up, so that no record lives longer than it.
        let seconds = longest.as_secs() + u64::from(longest.subsec_nanos() > 0);
        Self { read_with: AtomicI64::new(i64::MIN), longest: AtomicU64::new(seconds) }
    }

    pub(crate) fn known(&self) -> Known {
        // In this order: what belongs to that version, or something newer.
        let read_with = self.read_with.load(Ordering::Acquire);
        Known { read_with, longest: Duration::from_secs(self.longest.load(Ordering::Acquire)) }
    }

    /// Asks for the metadata version, which comes with the read version.
    pub(crate) fn version(
        transaction: &Transaction,
    ) -> FdbResult<impl Future<Output = FdbResult<Option<i64>>> + Send + '_> {
        transaction.set_option(TransactionOption::ReadSystemKeys)?;
        // A snapshot: others may change it without this call's having to begin anew.
        Ok(transaction.get_metadata_version(true))
    }

    /// Makes sure that the transaction commits only where the settings are as it knows them; or what they are by now.
    pub(crate) async fn check(
        &self,
        transaction: &Transaction,
        key: &[u8],
        known: Known,
        version: Option<i64>,
    ) -> Result<Option<Known>, Stop> {
        transaction.add_conflict_range(key, &[key, &[0]].concat(), ConflictRangeType::Read)?;
        let version = version.unwrap_or(NONE);
        if version == known.read_with {
            return Ok(None);
        }
        let value = transaction.get(key, true).await?.ok_or(FdbStoreError::NotSetUp)?;
        self.longest.fetch_max(decode(&value)?, Ordering::AcqRel);
        // An older one, of a transaction that began earlier, is found to differ by the next call.
        self.read_with.store(version, Ordering::Release);
        Ok(Some(self.known()).filter(|now| now.longest > known.longest))
    }

    /// Stores this process's longest retention, where a shorter one or none is stored.
    pub(crate) async fn raise(&self, transaction: &Transaction, key: &[u8]) -> Result<(), Stop> {
        let own = self.longest.load(Ordering::Acquire);
        let stored = transaction.get(key, false).await?.map(|value| decode(&value)).transpose()?;
        if stored.is_some_and(|stored| stored >= own) {
            self.longest.fetch_max(stored.unwrap_or_default(), Ordering::AcqRel);
            return Ok(());
        }
        transaction.set_option(TransactionOption::AccessSystemKeys)?;
        transaction.set(key, &[&[VERSION][..], &own.to_be_bytes()].concat());
        transaction.update_metadata_version();
        Ok(())
    }
}

fn decode(value: &[u8]) -> Result<u64, FdbStoreError> {
    let seconds = match value {
        [VERSION, seconds @ ..] => seconds.try_into().ok(),
        _ => None,
    };
    seconds.map(u64::from_be_bytes).ok_or(FdbStoreError::Settings)
}
