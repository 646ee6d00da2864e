//! Who waits for which key, in this process: a holder that ends wakes them, so that they need not wait for a back-off.
//!
//! One table for all executors of the process, whatever their stores: a key of the same name in another store costs a
//! waiter one look in vain. A key has an entry only while somebody waits for it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::key::Key;

/// All who wait: what a holder looks at first, and all it looks at where nobody waits.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static TABLE: LazyLock<Mutex<HashMap<Key, Waiters>>> = LazyLock::new(Mutex::default);

struct Waiters {
    wake: Arc<Notify>,
    count: usize,
}

fn table() -> MutexGuard<'static, HashMap<Key, Waiters>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Somebody who waits for a key, until dropped.
///
/// To lose no wake-up: take [`woken`](Self::woken), then look whether the key is held, then await.
pub(super) struct Waiter {
    key: Key,
    wake: Arc<Notify>,
}

impl Waiter {
    pub(super) fn new(key: &Key) -> Self {
        // Before the caller's next look at the store: a holder that ends after that look sees it.
        WAITING.fetch_add(1, Ordering::SeqCst);
        let mut table = table();
        let waiters = table.entry(key.clone()).or_insert_with(|| Waiters { wake: Arc::new(Notify::new()), count: 0 });
        waiters.count += 1;
        Self { key: key.clone(), wake: Arc::clone(&waiters.wake) }
    }

    /// Ends at the first [`wake`] after this call, whenever it is polled.
    pub(super) fn woken(&self) -> Notified<'_> {
        self.wake.notified()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entry) = table().entry(self.key.clone()) {
            entry.get_mut().count -= 1;
            if entry.get().count == 0 {
                entry.remove();
            }
        }
        WAITING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Wakes all who wait for the key.
pub(super) fn wake(key: &Key) {
    if WAITING.load(Ordering::SeqCst) == 0 {
        return;
    }
    let wake = table().get(key).map(|waiters| Arc::clone(&waiters.wake));
    if let Some(wake) = wake {
        wake.notify_waiters();
    }
}

/// How many wait for the key.
#[cfg(test)]
pub(super) fn waiting_for(key: &Key) -> Option<usize> {
    table().get(key).map(|waiters| waiters.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_lasts_as_long_as_somebody_waits() {
        let key = Key::new("waiters", "entry").unwrap();
        assert_eq!(waiting_for(&key), None);
        let first = Waiter::new(&key);
        let second = Waiter::new(&key);
        assert_eq!(waiting_for(&key), Some(2));
        drop(first);
        assert_eq!(waiting_for(&key), Some(1));
        drop(second);
        assert_eq!(waiting_for(&key), None);
    }

    #[tokio::test]
    async fn a_wake_between_the_look_and_the_sleep_is_not_lost() {
        let key = Key::new("waiters", "wake").unwrap();
        let other = Key::new("waiters", "other").unwrap();
        let waiter = Waiter::new(&key);
        let bystander = Waiter::new(&other);
        let (woken, not) = (waiter.woken(), bystander.woken());
        wake(&key);
        woken.await;
        assert!(tokio::time::timeout(std::time::Duration::from_millis(1), not).await.is_err());
    }
}
