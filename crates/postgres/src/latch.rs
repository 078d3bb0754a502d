//! Waiting: on this process's latch, a socket, the postmaster and the clock, with interrupts
//! served.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::error::PgError;
use crate::wait::{self, Wait};

/// The events to wait for on a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Something to read.
    Read,
    /// Room to write.
    Write,
    /// Either.
    Both,
}

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Woken {
    /// The socket is ready.
    pub socket: bool,
    /// The latch was set.
    pub latch: bool,
}

/// This process must not wait now.
static REFUSES: AtomicBool = AtomicBool::new(false);

/// Have every wait of this process be an error from now on, or none.
pub fn refuse_waits(refuse: bool) {
    REFUSES.store(refuse, Ordering::Relaxed);
}

/// To be called before an action that may take long.
///
/// # Errors
/// 55P03 if this process must not wait.
pub fn may_wait() -> Result<(), PgError> {
    if REFUSES.load(Ordering::Relaxed) {
        return Err(PgError::new(
            SqlState::LockNotAvailable,
            "this process must not wait",
        ));
    }
    Ok(())
}

fn timeout_ms(timeout: Option<Duration>) -> i64 {
    timeout.map_or(-1, |time| {
        i64::try_from(time.as_millis().max(1)).unwrap_or(i64::MAX)
    })
}

/// Wait for `socket` (or only the latch, when it is negative), the latch or the time to pass. The
/// process exits when the postmaster dies. Interrupts are processed, so this may raise a PostgreSQL
/// error or end the process.
pub(crate) fn wait_for_socket(socket: i32, interest: Interest, timeout: Option<Duration>) -> Woken {
    wait_for(socket, interest, timeout, None)
}

/// Waits for a socket; the wait is shown as `what`.
pub(crate) fn wait_for_socket_as(
    socket: i32,
    interest: Interest,
    timeout: Duration,
    what: Wait,
) -> Woken {
    wait_for(socket, interest, Some(timeout), Some(what))
}

fn wait_for(
    socket: i32,
    interest: Interest,
    timeout: Option<Duration>,
    shown: Option<Wait>,
) -> Woken {
    if let Err(refused) = may_wait() {
        refused.raise();
    }
    let mut events = pg_sys::WL_LATCH_SET | pg_sys::WL_EXIT_ON_PM_DEATH;
    if timeout.is_some() {
        events |= pg_sys::WL_TIMEOUT;
    }
    let wanted = match interest {
        Interest::Read => pg_sys::WL_SOCKET_READABLE,
        Interest::Write => pg_sys::WL_SOCKET_WRITEABLE,
        Interest::Both => pg_sys::WL_SOCKET_READABLE | pg_sys::WL_SOCKET_WRITEABLE,
    };
    if socket >= 0 {
        events |= wanted;
    }
    // SAFETY: MyLatch is this process's own latch and lives as long as the process; a socket that
    // is not open is an error that PostgreSQL raises, not undefined behaviour.
    let woken = wait::during(shown, |event| unsafe {
        let events = i32::try_from(events).unwrap_or(i32::MAX);
        // For the latch alone PostgreSQL keeps its wait event set; for a socket it creates one each
        // time.
        let woken = if socket < 0 {
            pg_sys::WaitLatch(pg_sys::MyLatch, events, timeout_ms(timeout), event)
        } else {
            pg_sys::WaitLatchOrSocket(pg_sys::MyLatch, events, socket, timeout_ms(timeout), event)
        };
        u32::try_from(woken).unwrap_or(0)
    });
    let latch = woken & pg_sys::WL_LATCH_SET != 0;
    if latch {
        // SAFETY: MyLatch is this process's own latch and lives as long as the process.
        unsafe { pg_sys::ResetLatch(pg_sys::MyLatch) };
    }
    pgrx::check_for_interrupts!();
    Woken {
        socket: woken & wanted != 0,
        latch,
    }
}

/// Wait for the latch or the time to pass.
pub fn wait(timeout: Option<Duration>) -> bool {
    wait_for_socket(-1, Interest::Read, timeout).latch
}

/// Waits for the latch; the wait is shown as `what`.
pub fn wait_as(what: Wait, timeout: Duration) -> bool {
    wait_for(-1, Interest::Read, Some(timeout), Some(what)).latch
}

/// Waits for the latch, one of these sockets, or the time to pass. As [`wait()`].
pub fn wait_for_any(sockets: &[(i32, Interest)], timeout: Duration) {
    if sockets.is_empty() {
        wait(Some(timeout));
        return;
    }
    if let Err(refused) = may_wait() {
        refused.raise();
    }
    let count = i32::try_from(sockets.len() + 2).unwrap_or(i32::MAX);
    let mut event = pg_sys::WaitEvent::default();
    // SAFETY: the latch is this process's own; sockets are open as long as their owners are
    // borrowed by the caller; there is room for one event. The set is freed; if an error passes,
    // it stays until the process ends, as the process does then.
    unsafe {
        let set = crate::compat::create_wait_event_set(count);
        let none = std::ptr::null_mut::<std::ffi::c_void>();
        let no_latch = std::ptr::null_mut();
        pg_sys::AddWaitEventToSet(set, pg_sys::WL_EXIT_ON_PM_DEATH, -1, no_latch, none);
        pg_sys::AddWaitEventToSet(set, pg_sys::WL_LATCH_SET, -1, pg_sys::MyLatch, none);
        for (socket, interest) in sockets {
            let wanted = match interest {
                Interest::Read => pg_sys::WL_SOCKET_READABLE,
                Interest::Write => pg_sys::WL_SOCKET_WRITEABLE,
                Interest::Both => pg_sys::WL_SOCKET_READABLE | pg_sys::WL_SOCKET_WRITEABLE,
            };
            pg_sys::AddWaitEventToSet(set, wanted, *socket, no_latch, none);
        }
        wait::during(None, |shown| {
            pg_sys::WaitEventSetWait(set, timeout_ms(Some(timeout)), &raw mut event, 1, shown)
        });
        pg_sys::ResetLatch(pg_sys::MyLatch);
        pg_sys::FreeWaitEventSet(set);
    }
    pgrx::check_for_interrupts!();
}

/// Waits for one socket to be readable again and again, for the life of the process.
#[derive(Debug)]
pub struct SocketWait(*mut pg_sys::WaitEventSet);

impl SocketWait {
    /// Wait for this socket, which stays open for as long as this is used.
    #[must_use]
    pub fn new(socket: i32) -> Self {
        // SAFETY: the latch is this process's own; the set is freed with the process.
        unsafe {
            let set = crate::compat::create_wait_event_set(3);
            let none = std::ptr::null_mut();
            let add = |events, socket, latch| {
                pg_sys::AddWaitEventToSet(set, events, socket, latch, none);
            };
            add(pg_sys::WL_EXIT_ON_PM_DEATH, -1, std::ptr::null_mut());
            add(pg_sys::WL_LATCH_SET, -1, pg_sys::MyLatch);
            add(pg_sys::WL_SOCKET_READABLE, socket, std::ptr::null_mut());
            Self(set)
        }
    }

    /// Wait until the socket can be read, the latch is set, or the time has passed. As
    /// `wait_for_socket`; shown as `what`.
    pub fn wait(&self, what: Wait, timeout: Duration) {
        let mut events = [pg_sys::WaitEvent::default(); 3];
        // SAFETY: the set exists as long as `self`, and there is room for all of its events.
        unsafe {
            let count = wait::during(Some(what), |event| {
                pg_sys::WaitEventSetWait(
                    self.0,
                    timeout_ms(Some(timeout)),
                    events.as_mut_ptr(),
                    3,
                    event,
                )
            });
            let count = usize::try_from(count).unwrap_or(0);
            if events
                .iter()
                .take(count)
                .any(|event| event.events & pg_sys::WL_LATCH_SET != 0)
            {
                pg_sys::ResetLatch(pg_sys::MyLatch);
            }
        }
        pgrx::check_for_interrupts!();
    }
}
