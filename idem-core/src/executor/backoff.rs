//! Pauses between tries.

use std::time::Duration;

/// Pauses that double up to a most, each shortened at random by up to a half, so that callers that met at one moment
/// do not meet again.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
    most: Duration,
}

impl Backoff {
    pub(super) fn new(first: Duration, most: Duration) -> Self {
        Self { next: first.min(most), most }
    }

    /// The pause to make now.
    pub(super) fn pause(&mut self) -> Duration {
        let pause = self.next.mul_f64(rand::random_range(0.5..=1.0));
        self.next = self.next.saturating_mul(2).min(self.most);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_most_and_vary() {
        let first = Duration::from_millis(25);
        let most = Duration::from_secs(1);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..50 {
            let mut backoff = Backoff::new(first, most);
            seen.insert(backoff.pause());
            for doubled in [50, 100, 200, 400, 800, 1000, 1000] {
                let pause = backoff.pause();
                let full = Duration::from_millis(doubled);
                assert!(pause >= full / 2 && pause <= full, "{pause:?} is not within {full:?}");
            }
        }
        assert!(seen.len() > 40, "only {} different pauses of 50", seen.len());
    }

    #[test]
    fn the_first_pause_is_no_longer_than_the_most() {
        let most = Duration::from_millis(2);
        assert!(Backoff::new(Duration::from_secs(1), most).pause() <= most);
    }
}
