//! The registry's shared memory: its layout, the hooks that ask for it and set it up, and numbers
//! of the whole server.

use std::ffi::c_void;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

use braid_postgres::layout::ADDIN_SHMEM_INIT_LOCK;
use braid_postgres::timestamp::now;
use pgrx::pg_sys;

use super::deletions::TOMBSTONE_GROUPS;
use super::managers::{MAX_DATABASES, ManagerEntry};
use super::subscriptions::SubscriptionEntry;
use super::table_counters;
use crate::{settings, versions};

/// Number of replication slots whose readers can be known; a slot that finds no place is never
/// known.
const READERS: usize = 4096;
const MAGIC: u64 = 0x6272_6169_6472_670a;

#[repr(C)]
pub(super) struct Shared {
    pub(super) magic: AtomicU64,
    pub(super) supervisor_latch: AtomicUsize,
    pub(super) supervisor_pid: AtomicI32,
    pub(super) subscriptions: AtomicU32,
    /// Tables whose counters are kept, over all subscriptions.
    pub(super) max_tables: AtomicU32,
    /// Tables that have an entry.
    pub(super) tables_taken: AtomicU32,
    /// When this memory was set up: another time after each crash.
    pub(super) life: AtomicI64,
    /// Batches that were committed since the server was started.
    pub(super) batches: AtomicU64,
    /// Tables that statements have rewritten since the server was started.
    pub(super) rewrites: AtomicU64,
    /// Grows whenever a database gets a manager's entry or loses it.
    pub(super) manager_generation: AtomicU64,
    /// Time of the newest deletion in each group of keys, microseconds since 1970-01-01 UTC; 0:
    /// none.
    pub(super) tombstones: [AtomicI64; TOMBSTONE_GROUPS],
    /// The wishes of the readers of slots, by the slot's place: `crate::readers`.
    pub(super) readers: [AtomicU32; READERS],
    pub(super) managers: [ManagerEntry; MAX_DATABASES],
    /// Versioned transactions: `crate::versions`.
    pub(super) versions: versions::memory::Memory,
    // SubscriptionEntry × subscriptions follows, then what `table_counters` has.
}

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());
static LOADED: AtomicBool = AtomicBool::new(false);
static PREVIOUS_REQUEST: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static PREVIOUS_STARTUP: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Hook = unsafe extern "C-unwind" fn();

fn shared_bytes() -> usize {
    size_of::<Shared>().next_multiple_of(64)
        + settings::max_subscriptions() * size_of::<SubscriptionEntry>()
        + table_counters::bytes()
}

/// Calls another library's hook without a guard: an error of it passes by a long jump, as it is.
fn call_previous(hook: &AtomicPtr<c_void>) {
    let previous = hook.load(Ordering::Relaxed);
    if !previous.is_null() {
        // SAFETY: the pointer was a hook that another library had installed, stored by `install`.
        unsafe { std::mem::transmute::<*mut c_void, Hook>(previous)() };
    }
}

unsafe extern "C-unwind" fn request() {
    call_previous(&PREVIOUS_REQUEST);
    request_ours();
}

#[pgrx::pg_guard]
extern "C-unwind" fn request_ours() {
    // SAFETY: called by PostgreSQL at the one moment when shared memory may be requested.
    unsafe {
        pg_sys::RequestAddinShmemSpace(shared_bytes());
        pg_sys::RequestNamedLWLockTranche(c"braid".as_ptr(), 1);
    }
}

unsafe extern "C-unwind" fn startup() {
    call_previous(&PREVIOUS_STARTUP);
    set_up_ours();
}

#[pgrx::pg_guard]
extern "C-unwind" fn set_up_ours() {
    // SAFETY: called by PostgreSQL when shared memory is set up. The main array has
    // the lock at that place.
    unsafe {
        let lock = &raw mut (*pg_sys::MainLWLockArray.add(ADDIN_SHMEM_INIT_LOCK)).lock;
        pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let mut found = false;
        let bytes = shared_bytes();
        let raw = pg_sys::ShmemInitStruct(c"braid registry".as_ptr(), bytes, &raw mut found);
        if !found {
            raw.cast::<u8>().write_bytes(0, bytes);
            let shared = &*raw.cast::<Shared>();
            let subscriptions = u32::try_from(settings::max_subscriptions()).unwrap_or(1);
            shared.subscriptions.store(subscriptions, Ordering::Relaxed);
            let tables = u32::try_from(settings::max_table_counters()).unwrap_or(0);
            shared.max_tables.store(tables, Ordering::Relaxed);
            shared.life.store(now(), Ordering::Relaxed);
            shared.magic.store(MAGIC, Ordering::Release);
        }
        SHARED.store(raw.cast(), Ordering::Release);
        pg_sys::LWLockRelease(lock);
    }
}

/// Ask for the shared memory. Called while the postmaster loads its libraries.
pub fn install() {
    LOADED.store(true, Ordering::Relaxed);
    // SAFETY: the hooks are plain function pointers that are set in the postmaster before it has
    // children.
    unsafe {
        if let Some(previous) = pg_sys::shmem_request_hook {
            PREVIOUS_REQUEST.store(previous as *mut c_void, Ordering::Relaxed);
        }
        pg_sys::shmem_request_hook = Some(request);
        if let Some(previous) = pg_sys::shmem_startup_hook {
            PREVIOUS_STARTUP.store(previous as *mut c_void, Ordering::Relaxed);
        }
        pg_sys::shmem_startup_hook = Some(startup);
    }
}

/// Whether the library was loaded by `shared_preload_libraries`.
#[must_use]
pub fn is_preloaded() -> bool {
    LOADED.load(Ordering::Relaxed)
}

pub(super) fn shared() -> Option<&'static Shared> {
    let raw = SHARED.load(Ordering::Acquire);
    // SAFETY: set by `startup` to memory that lives as long as the server; children inherit the
    // mapping. Atomics only.
    (!raw.is_null()).then(|| unsafe { &*raw })
}

/// Returns the words of the readers of slots.
#[must_use]
pub(crate) fn readers() -> Option<&'static [AtomicU32]> {
    shared().map(|shared| shared.readers.as_slice())
}

/// Versioned transactions.
#[must_use]
pub(crate) fn versions() -> Option<&'static versions::memory::Memory> {
    shared().map(|shared| &shared.versions)
}

/// A number of its own for each time that shared memory was set up: when the server was started,
/// and after each crash.
#[must_use]
pub fn life() -> u64 {
    shared().map_or(0, |shared| {
        shared.life.load(Ordering::Relaxed).cast_unsigned()
    })
}

/// Batches that appliers of this server have committed since it was started.
#[must_use]
pub fn batches() -> u64 {
    shared().map_or(0, |shared| shared.batches.load(Ordering::Acquire))
}

/// Tables that statements have rewritten since the server was started, whether they have committed
/// or not.
#[must_use]
pub fn rewrites() -> u64 {
    shared().map_or(0, |shared| shared.rewrites.load(Ordering::Acquire))
}

/// The current transaction has recorded that it has rewritten a table.
pub fn count_rewrite() {
    if let Some(shared) = shared() {
        shared.rewrites.fetch_add(1, Ordering::AcqRel);
    }
}

/// An applier is about to commit a batch.
pub fn count_batch() {
    if let Some(shared) = shared() {
        shared.batches.fetch_add(1, Ordering::AcqRel);
    }
}
