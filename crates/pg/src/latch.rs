//! Waiting: on this process's latch, a socket, the postmaster and the clock, with interrupts served.

use std::time::Duration;

use pgrx::pg_sys;

use crate::libpq::{Interest, Woken};

/// Wait class that PostgreSQL shows for extensions before version 17.
pub const WAIT_EVENT_EXTENSION: u32 = pg_sys::PG_WAIT_EXTENSION;

fn timeout_ms(timeout: Option<Duration>) -> i64 {
    timeout.map_or(-1, |time| {
        i64::try_from(time.as_millis().max(1)).unwrap_or(i64::MAX)
    })
}

/// Wait for `socket` (or only the latch, when it is negative), the latch or the time to pass. The process exits when the
/// postmaster dies. Interrupts are processed, so this may raise a PostgreSQL error or end the process.
pub fn wait_for_socket(socket: i32, interest: Interest, timeout: Option<Duration>) -> Woken {
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
    // SAFETY: MyLatch is this process's own latch and lives as long as the process; a socket that is not open is an error
    // that PostgreSQL raises, not undefined behaviour.
    let woken = unsafe {
        let woken = pg_sys::WaitLatchOrSocket(
            pg_sys::MyLatch,
            i32::try_from(events).unwrap_or(i32::MAX),
            socket,
            timeout_ms(timeout),
            WAIT_EVENT_EXTENSION,
        );
        u32::try_from(woken).unwrap_or(0)
    };
    let latch = woken & pg_sys::WL_LATCH_SET != 0;
    if latch {
        // SAFETY: as above.
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
