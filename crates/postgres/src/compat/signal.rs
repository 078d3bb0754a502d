//! Signal handlers: `pqsignal`, since 18 a macro for `pqsignal_be`. From 19 on, handlers receive
//! the sender of the signal.

use std::ffi::c_int;
use std::sync::OnceLock;

use pgrx::pg_sys;

const SIGHUP: c_int = 1;
const SIGQUIT: c_int = 3;
const SIGTERM: c_int = 15;

#[cfg(not(feature = "pg19"))]
unsafe extern "C-unwind" {
    /// Handler for SIGTERM (src/backend/tcop/postgres.c, 15 to 18).
    fn die(signal: c_int);
    /// Handler for SIGHUP (src/backend/postmaster/interrupt.c, 15 to 18).
    fn SignalHandlerForConfigReload(signal: c_int);
}

#[cfg(feature = "pg19")]
unsafe extern "C-unwind" {
    /// Handler for SIGTERM (src/backend/tcop/postgres.c, 19).
    fn die(signal: c_int, info: *const pg_sys::pg_signal_info);
    /// Handler for SIGHUP (src/backend/postmaster/interrupt.c, 19).
    fn SignalHandlerForConfigReload(signal: c_int, info: *const pg_sys::pg_signal_info);
}

/// Sets the handler of a signal.
///
/// # Safety
/// The handler does only what a signal handler may, and is never unloaded.
unsafe fn pqsignal(signal: c_int, handler: pg_sys::pqsigfunc) {
    // SAFETY: as the caller says.
    unsafe {
        #[cfg(not(any(feature = "pg18", feature = "pg19")))]
        pg_sys::pqsignal(signal, handler);
        #[cfg(any(feature = "pg18", feature = "pg19"))]
        pg_sys::pqsignal_be(signal, handler);
    }
}

/// Handles SIGTERM (end at the next interrupt check) and SIGHUP (read the settings again) as a
/// backend does.
///
/// # Safety
/// At the start of a worker, before signals are unblocked.
pub(crate) unsafe fn handle_as_backend() {
    // SAFETY: PostgreSQL's own handlers.
    unsafe {
        pqsignal(SIGTERM, Some(die));
        pqsignal(SIGHUP, Some(SignalHandlerForConfigReload));
    }
}

static ON_QUIT: OnceLock<fn()> = OnceLock::new();

#[cfg(not(feature = "pg19"))]
unsafe extern "C-unwind" fn quit(_signal: c_int) {
    call();
}

#[cfg(feature = "pg19")]
unsafe extern "C-unwind" fn quit(_signal: c_int, _info: *const pg_sys::pg_signal_info) {
    call();
}

fn call() {
    if let Some(handler) = ON_QUIT.get() {
        handler();
    }
}

/// Has SIGQUIT call `handler`. The first handler of a process stays.
///
/// # Safety
/// The handler does only what a signal handler may.
pub unsafe fn on_quit(handler: fn()) {
    ON_QUIT.get_or_init(|| handler);
    // SAFETY: as the caller says. A read of an initialised cell is one of an atomic variable.
    unsafe { pqsignal(SIGQUIT, Some(quit)) };
}
