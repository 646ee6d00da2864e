//! Environment variables that change a run.

use std::ops::Range;

/// `IDEM_SEED`: the one seed to run again.
pub(crate) fn seed() -> Option<u64> {
    std::env::var("IDEM_SEED").ok()?.trim().parse().ok()
}

/// The seeds of the random histories: the one of `IDEM_SEED`, or as many as `IDEM_SEEDS` says.
pub(crate) fn seeds(default: u64) -> Range<u64> {
    match seed() {
        Some(seed) => seed..seed.saturating_add(1),
        None => 0..asked_seeds().unwrap_or(default),
    }
}

/// `IDEM_SEEDS`: how many random histories are asked for.
pub(crate) fn asked_seeds() -> Option<u64> {
    std::env::var("IDEM_SEEDS").ok()?.trim().parse().ok()
}

/// Whether `IDEM_REQUIRE` names that server.
pub(crate) fn required(server: &str) -> bool {
    std::env::var("IDEM_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name.trim().eq_ignore_ascii_case(server)))
}
