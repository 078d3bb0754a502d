//! Background workers: registering, starting and stopping them, and their initialization.

use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pgrx::{PgSqlErrorCode, pg_sys};

use crate::{compat, encoding, latch, plain};

/// The arguments of a worker: `bgw_extra`, 128 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extra(pub [u8; 128]);

impl Extra {
    /// Pack small numbers.
    #[must_use]
    pub fn pack(words: &[u64]) -> Self {
        let mut bytes = [0_u8; 128];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Self(bytes)
    }

    /// Pack `N` small numbers and a text, which is cut where it does not fit.
    #[must_use]
    pub fn pack_with_text<const N: usize>(words: [u64; N], text: &str) -> Self {
        let mut packed = Self::pack(&words);
        let room = packed.0.iter_mut().skip(N * 8);
        for (place, byte) in room.zip(text.bytes()) {
            *place = byte;
        }
        packed
    }

    /// The text behind `N` numbers.
    #[must_use]
    pub fn text<const N: usize>(&self) -> String {
        let bytes: Vec<u8> = self
            .0
            .iter()
            .skip(N * 8)
            .copied()
            .take_while(|byte| *byte != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Number `index` of those that were packed.
    #[must_use]
    pub fn word(&self, index: usize) -> u64 {
        self.0
            .as_chunks::<8>()
            .0
            .get(index)
            .map_or(0, |raw| u64::from_le_bytes(*raw))
    }

    /// The arguments of this process.
    #[must_use]
    pub fn mine() -> Self {
        let mut bytes = [0_u8; 128];
        if let Some(entry) = entry() {
            for (place, byte) in bytes.iter_mut().zip(entry.bgw_extra) {
                *place = byte.cast_unsigned();
            }
        }
        Self(bytes)
    }
}

/// A worker to start.
#[derive(Debug, Clone, Copy)]
pub struct Worker<'a> {
    /// Shown in process lists and logs.
    pub name: &'a str,
    /// Shown as `backend_type` in pg_stat_activity.
    pub kind: &'a str,
    /// Exported function of this library.
    pub function: &'a str,
    /// `bgw_main_arg`.
    pub argument: u32,
    /// `bgw_extra`.
    pub extra: Extra,
}

fn copy_text(to: &mut [c_char], text: &str) {
    let room = to.len().saturating_sub(1);
    for (place, byte) in to.iter_mut().zip(text.bytes().take(room)) {
        *place = byte.cast_signed();
    }
}

fn registration(worker: &Worker<'_>, restart: i32) -> pg_sys::BackgroundWorker {
    let mut raw = pg_sys::BackgroundWorker::default();
    copy_text(&mut raw.bgw_name, worker.name);
    copy_text(&mut raw.bgw_type, worker.kind);
    copy_text(&mut raw.bgw_library_name, "braid");
    copy_text(&mut raw.bgw_function_name, worker.function);
    let flags = pg_sys::BGWORKER_SHMEM_ACCESS | pg_sys::BGWORKER_BACKEND_DATABASE_CONNECTION;
    raw.bgw_flags = i32::try_from(flags).unwrap_or(0);
    raw.bgw_start_time = pg_sys::BgWorkerStartTime::BgWorkerStart_RecoveryFinished;
    raw.bgw_restart_time = restart;
    raw.bgw_main_arg = pg_sys::Datum::from(worker.argument);
    for (place, byte) in raw.bgw_extra.iter_mut().zip(worker.extra.0) {
        *place = byte.cast_signed();
    }
    raw
}

/// Register a worker that the postmaster starts and restarts. Only while libraries are preloaded.
pub fn register_static(worker: &Worker<'_>) {
    let mut raw = registration(worker, 1);
    // SAFETY: called from _PG_init in the postmaster; PostgreSQL copies the struct.
    unsafe { pg_sys::RegisterBackgroundWorker(&raw mut raw) };
}

/// A worker that this process started.
#[derive(Debug)]
pub struct Handle {
    raw: *mut pg_sys::BackgroundWorkerHandle,
}

/// The state of a worker, as the postmaster has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Not started yet.
    NotYet,
    /// Runs under this process id.
    Running(i32),
    /// Has ended.
    Ended,
}

/// Start a worker. `None` when all of `max_worker_processes` are in use.
#[must_use]
pub fn start(worker: &Worker<'_>) -> Option<Handle> {
    // BGW_NEVER_RESTART: the process that starts a worker also decides when to start it again.
    let mut raw = registration(worker, -1);
    raw.bgw_notify_pid = plain::MyProcPid();
    let mut handle = std::ptr::null_mut();
    // The handle is allocated in the current context and must live as long as this process may ask.
    // SAFETY: TopMemoryContext always exists; the struct is copied; `handle` is an out parameter.
    let started = unsafe {
        let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        let started = pg_sys::RegisterDynamicBackgroundWorker(&raw mut raw, &raw mut handle);
        pg_sys::MemoryContextSwitchTo(before);
        started
    };
    (started && !handle.is_null()).then_some(Handle { raw: handle })
}

impl Handle {
    /// PostgreSQL's own handle, which lives as long as this process.
    pub fn raw(&self) -> *mut pg_sys::BackgroundWorkerHandle {
        self.raw
    }

    /// Returns the state of the worker, as the postmaster has it.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut pid = 0;
        // SAFETY: the handle came from RegisterDynamicBackgroundWorker and lives in
        // TopMemoryContext.
        match unsafe { pg_sys::GetBackgroundWorkerPid(self.raw, &raw mut pid) } {
            pg_sys::BgwHandleStatus::BGWH_STARTED => Status::Running(pid),
            pg_sys::BgwHandleStatus::BGWH_NOT_YET_STARTED => Status::NotYet,
            _ => Status::Ended,
        }
    }

    /// Ask it to end (SIGTERM), and never to be started if it was not yet.
    pub fn terminate(&self) {
        // SAFETY: RegisterDynamicBackgroundWorker gave the handle, which lives in TopMemoryContext.
        unsafe { pg_sys::TerminateBackgroundWorker(self.raw) };
    }

    /// Wait until it has ended, at most `limit`. True when it has.
    #[must_use]
    pub fn wait_ended(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.status() != Status::Ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            latch::wait(Some(left.min(Duration::from_millis(20))));
        }
        true
    }
}

/// Ask a process to end by its id, if there still is one.
pub fn terminate_pid(pid: i32) {
    if pid > 0 {
        // The id came from shared memory that the process itself clears as it ends.
        libc_kill(pid, 15);
    }
}

unsafe extern "C" {
    /// Sends a signal; with a positive id, to nothing but that process.
    #[link_name = "kill"]
    safe fn libc_kill(pid: i32, signal: i32) -> i32;
}

/// This process is one of the extension's workers.
static IS_WORKER: AtomicBool = AtomicBool::new(false);

/// Whether this process is one of the extension's workers.
pub fn is_worker() -> bool {
    IS_WORKER.load(Ordering::Relaxed)
}

/// Reports the end of a worker that was asked to end, by another one or with the server, as a LOG
/// message and not as FATAL: nothing is wrong. Runs in the middle of PostgreSQL's error reporting:
/// the level is only that of the server's log.
pub fn calm(error: &mut pg_sys::ErrorData) {
    if is_worker()
        && error.elevel == pgrx::PgLogLevel::FATAL as i32
        && error.sqlerrcode == PgSqlErrorCode::ERRCODE_ADMIN_SHUTDOWN as i32
    {
        error.elevel = pgrx::PgLogLevel::LOG as i32;
    }
}

/// Prepares a worker, before anything else: handlers for SIGTERM (end at the next interrupt check)
/// and SIGHUP (read the settings again).
pub fn initialize() {
    IS_WORKER.store(true, Ordering::Relaxed);
    // SAFETY: called once at the start of a worker's main function, before signals are unblocked.
    unsafe {
        compat::handle_as_backend();
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

/// Connects this worker to a database as the bootstrap superuser, with nothing but pg_catalog in
/// its search_path, whatever the database's settings are: its owner could otherwise have own
/// functions and operators called with these rights. Its commits wait for this server's disk, and
/// for no standby: that may be a subscription at a node which waits for this worker.
pub fn connect(database: u32) {
    begin_connection(pg_sys::Oid::from(database));
    for (name, value) in [
        ("search_path", ""),
        ("default_transaction_isolation", "read committed"),
        ("default_transaction_read_only", "off"),
        ("synchronous_commit", "local"),
        ("standard_conforming_strings", "on"),
        ("transform_null_equals", "off"),
        ("array_nulls", "on"),
        ("quote_all_identifiers", "off"),
        ("xmloption", "content"),
        ("lock_timeout", "0"),
    ] {
        set(name, value);
    }
}

/// Connects this worker to a database, or to none, as the bootstrap superuser.
fn begin_connection(database: pg_sys::Oid) {
    // SAFETY: once, at the start of a worker, before it does anything else with the server.
    unsafe {
        pg_sys::BackgroundWorkerInitializeConnectionByOid(database, pg_sys::InvalidOid, 0);
    }
    // It is meant for sessions of users. Other limits of time only count in sessions, but for
    // lock_timeout.
    if compat::HAS_TRANSACTION_TIMEOUT {
        set("transaction_timeout", "0");
    }
}

/// Connects this worker to no database: it sees shared catalogs only.
pub fn connect_to_no_database() {
    begin_connection(pg_sys::InvalidOid);
}

/// Returns the name that this worker was started with; empty in a process that is none.
#[must_use]
pub fn my_name() -> String {
    let Some(entry) = entry() else {
        return String::new();
    };
    let name = encoding::until_zero(&entry.bgw_name);
    name.to_string_lossy().into_owned()
}

/// This worker's registration.
fn entry() -> Option<&'static pg_sys::BackgroundWorker> {
    // SAFETY: null, or this worker's own registration for as long as it runs.
    unsafe { pg_sys::MyBgworkerEntry.cast_const().as_ref() }
}

/// Read the configuration files again if SIGHUP came. True when they were read.
pub fn reload_settings() -> bool {
    // SAFETY: process-local flag set by the signal handler; PostgreSQL's own workers call
    // ProcessConfigFile in this way.
    unsafe {
        let pending = std::ptr::read_volatile(&raw const pg_sys::ConfigReloadPending) != 0;
        if pending {
            pg_sys::ConfigReloadPending = 0;
            pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
        }
        pending
    }
}

/// Set a setting of this process, whatever the database and the role say of it.
pub fn set(name: &str, value: &str) {
    let c = |text: &str| std::ffi::CString::new(text).unwrap_or_default();
    let (name, value) = (c(name), c(value));
    // SAFETY: NUL-terminated strings; PostgreSQL copies them.
    unsafe {
        pg_sys::SetConfigOption(
            name.as_ptr(),
            value.as_ptr(),
            pg_sys::GucContext::PGC_SUSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
    }
}

/// Show `activity` for this process in pg_stat_activity.query.
pub fn report_activity(activity: &str) {
    if let Ok(text) = std::ffi::CString::new(activity) {
        // SAFETY: copies the text into this process's own status entry.
        unsafe {
            pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, text.as_ptr())
        };
    }
}
