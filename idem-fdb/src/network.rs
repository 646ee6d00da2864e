//! FoundationDB's network thread, started once for the process: the only place with unsafe code.
#![allow(unsafe_code, reason = "the client library's start and stop are functions of C")]

use std::sync::{Mutex, Once, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use foundationdb::FdbError;
use foundationdb_sys as sys;
use idem_core::{Operation, StoreError};

use crate::error::{FdbStoreError, fdb_error, own_error};

/// `api_version_already_set`
const ALREADY_SET: i32 = 2201;
/// `api_version_not_supported`
const NOT_SUPPORTED: i32 = 2203;

#[derive(Clone, Copy)]
enum Failed {
    Fdb(i32),
    TooOld { found: i32, wanted: i32 },
    Thread,
}

static STARTED: OnceLock<Result<(), Failed>> = OnceLock::new();
static THREAD: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);

/// Starts FoundationDB's network thread, unless it runs already, and stops it when the process exits.
///
/// The client library allows one start in a process. [`FdbStore::open`](crate::FdbStore::open) calls this, so most programs
/// need not. It may be called any number of times, and your own code may use the thread as well:
///
/// - call this in place of `foundationdb::boot`, which panics where this was first;
/// - or boot by yourself before any store is opened: this finds that out and leaves the network to you.
///
/// Options of the network, such as a directory for trace files or external client libraries, come from the environment
/// variables `FDB_NETWORK_OPTION_…`, which the library reads by itself, or from a boot of your own.
///
/// # Errors
/// [`ErrorKind::Misconfigured`](idem_core::ErrorKind::Misconfigured), for good, where the installed library is
/// [too old](FdbStoreError::ClientTooOld) or refuses.
pub fn boot() -> Result<(), StoreError> {
    let own = |error| own_error(error, Operation::Setup);
    STARTED.get_or_init(start).map_err(|failed| match failed {
        Failed::Fdb(code) => fdb_error(FdbError::from_code(code), Operation::Setup),
        Failed::TooOld { found, wanted } => own(FdbStoreError::ClientTooOld { found, wanted }),
        Failed::Thread => own(FdbStoreError::NetworkThread),
    })
}

fn start() -> Result<(), Failed> {
    // A small number of three digits.
    let wanted = sys::FDB_API_VERSION as i32;
    // SAFETY: takes two numbers, and may be called at any time.
    match unsafe { sys::fdb_select_api_version_impl(wanted, wanted) } {
        0 => {}
        // Somebody else has begun, who starts the network too.
        ALREADY_SET => return Ok(()),
        NOT_SUPPORTED => {
            // SAFETY: takes nothing, and may be called at any time.
            return Err(Failed::TooOld { found: unsafe { sys::fdb_get_max_api_version() }, wanted });
        }
        code => return Err(Failed::Fdb(code)),
    }
    // SAFETY: the version is selected, and nobody else sets the network up: who wants to must select the version first.
    let code = unsafe { sys::fdb_setup_network() };
    if code != 0 {
        return Err(Failed::Fdb(code));
    }
    // SAFETY: the network is set up, and this runs once. It is stopped before the process exits, by the function below.
    let run = || match unsafe { sys::fdb_run_network() } {
        0 => {}
        code => tracing::error!(code, "FoundationDB's network thread has ended"),
    };
    let spawned = thread::Builder::new().name("fdb-network".to_owned()).spawn(run).map_err(|_| Failed::Thread)?;
    *THREAD.lock().unwrap_or_else(PoisonError::into_inner) = Some(spawned);
    if !stop_at_exit() {
        // A network that would not be stopped may not go on.
        stop();
        return Err(Failed::Thread);
    }
    Ok(())
}

/// To be called when the network has been used, and whether the cluster has answered. Handlers of the exit run in the reverse
/// order of their registration, and so do the destructors of the library's values, some of which it makes when it is first
/// used: they have to come after the network's stop.
pub(crate) fn used(answered: bool) {
    static ONCE: [Once; 2] = [const { Once::new() }; 2];
    if STARTED.get().is_some_and(Result::is_ok) {
        // Where there is no room for it, the one before is still there.
        ONCE[usize::from(answered)].call_once(|| _ = stop_at_exit());
    }
}

fn stop_at_exit() -> bool {
    // SAFETY: registers a function that neither unwinds nor takes anything.
    unsafe { libc::atexit(stop) == 0 }
}

extern "C" fn stop() {
    let network = THREAD.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(network) = network else { return };
    // In a thread of its own: this one's thread-local values are gone already, the library's among them.
    // SAFETY: the network is set up and may be stopped once, from any thread.
    let stopping = thread::Builder::new().name("fdb-stop".to_owned()).spawn(|| unsafe { sys::fdb_stop_network() });
    if let Ok(Ok(0)) = stopping.map(JoinHandle::join) {
        drop(network.join());
    }
}
