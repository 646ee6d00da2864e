//! Where a store without a server gets the time from.

use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant, SystemTime};

/// A clock. Stores with a server use the server's instead (rule R10).
pub trait Clock: Debug + Send + Sync + 'static {
    /// The time. Need not be right, but must not be far behind what it was before.
    fn now(&self) -> SystemTime;
}

/// The process's own clock: the wall clock's time at creation, moved on by the monotonic clock. It never jumps when
/// somebody sets the machine's clock, and it may stand still while the machine sleeps: a lease then ends later, never
/// earlier.
#[derive(Debug, Clone, Copy)]
pub struct MonotonicClock {
    wall: SystemTime,
    start: Instant,
}

impl MonotonicClock {
    /// A clock that starts from the wall clock's time.
    #[must_use]
    pub fn new() -> Self {
        Self { wall: SystemTime::now(), start: Instant::now() }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> SystemTime {
        after(self.wall, self.start.elapsed())
    }
}

/// The machine's wall clock as it is. It jumps when somebody sets it, and it is the only one that several machines can keep
/// together.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A clock that moves only when told to, for tests.
#[derive(Debug)]
pub struct ManualClock(Mutex<SystemTime>);

impl ManualClock {
    /// A clock that stands at that time.
    #[must_use]
    pub fn new(now: SystemTime) -> Self {
        Self(Mutex::new(now))
    }

    /// Moves the clock on.
    pub fn advance(&self, by: Duration) {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *now = after(*now, by);
    }

    /// Sets the clock, back if need be.
    pub fn set(&self, now: SystemTime) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }
}

impl Default for ManualClock {
    /// A clock that stands at the beginning of the year 2024.
    fn default() -> Self {
        Self::new(SystemTime::UNIX_EPOCH + Duration::from_secs(1_704_067_200))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> SystemTime {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// That time later; a time beyond what can be expressed stays where it is.
pub(crate) fn after(time: SystemTime, by: Duration) -> SystemTime {
    time.checked_add(by).unwrap_or(time)
}
