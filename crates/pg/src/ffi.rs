//! Functions that the server exports and that pgrx's bindings leave out or wrap where the plain address is needed.

use std::ffi::c_int;

unsafe extern "C-unwind" {
    /// Handler for SIGTERM (src/backend/tcop/postgres.c, 15 to 18).
    pub fn die(signal: c_int);
    /// Handler for SIGHUP (src/backend/postmaster/interrupt.c, 15 to 18).
    pub fn SignalHandlerForConfigReload(signal: c_int);
}
