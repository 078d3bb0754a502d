//! The collector: one process for a database to which several nodes send changes. It decodes this server's own WAL for what local
//! transactions delete, and writes tombstones; which columns they write, where that is to be known (`braid_node::column_write`); and which rows they take out of tables without a key
//! (`braid_node::taken_row`).
//!
//! Its replication slot holds two things: the WAL from where it has come to, as each logical slot does, and dead rows, by its `xmin`.
//! Until a deletion is collected its dead row tells of it, so nobody has to wait for this process. How `xmin` moves:
//!
//! 1. Take the oldest transaction that runs, then the end of WAL. What is older than the one has ended, and its commit record lies
//!    before the other.
//! 2. Decode up to that end, write what was deleted, commit, and have it flushed.
//! 3. Now `xmin` may be that transaction. Go to 1.
//!
//! After a crash the slot is as it was last written to disk, which is no later than it was: what is collected again is there twice.
//! The process ends with any error; the manager starts it again.

mod deletions;
mod taken_rows;

use std::collections::HashSet;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use braid_bgworker::slot_name;
use braid_node::column_write;
use braid_node::registry::{self, ManagerEntry};
use braid_node::subscription::rows;
use braid_node::tombstone::store;
use braid_plugin::page_read;
use braid_postgres::error::{self, PgError};
use braid_postgres::names::find_table;
use braid_postgres::{compat, ffi, latch, process, worker};
use pgrx::pg_sys;

use deletions::{Taken, Wanted};
use taken_rows::{Collection, Removal};

/// Pause between two looks at WAL: dead rows are kept for about as long.
const PAUSE: Duration = Duration::from_millis(100);
/// The same after nothing has come for a while.
const LONG_PAUSE: Duration = Duration::from_secs(1);
/// Looks without anything new until then.
const IDLE: u32 = 10;
/// The slot is written to disk this often, so that old WAL can go.
const SAVE: Duration = Duration::from_secs(5);
/// The list of tables is read again after this, in case a wake-up was lost.
const LIST: Duration = Duration::from_secs(10);
/// WAL is decoded for this long before what it gave is written.
const STRETCH: Duration = Duration::from_millis(500);

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = u32::try_from(argument.value()).unwrap_or(0);
    worker::connect(database);
    let Some(entry) = registry::find_manager(database) else {
        return;
    };
    entry
        .collector_latch
        .store(process::my_latch(), Ordering::SeqCst);
    entry
        .collector_pid
        .store(process::my_pid(), Ordering::SeqCst);
    // SAFETY: the callback only touches shared memory, which outlives the process.
    unsafe {
        let address = std::ptr::from_ref(entry).addr();
        pg_sys::before_shmem_exit(Some(on_exit), pg_sys::Datum::from(address));
    }
    worker::report_activity("collecting deletions");
    let slot = slot_name::of_collector(database);
    if let Err(failure) = error::transaction(|| ensure_slot(&slot, entry)) {
        failure.log("braid collector of deletions");
        return;
    }
    deletions::gather();
    collect(&slot, entry);
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: i32, argument: pg_sys::Datum) {
    // SAFETY: the argument is the address of the manager's entry in the registry.
    let entry = unsafe { &*std::ptr::with_exposed_provenance::<ManagerEntry>(argument.value()) };
    if entry.collector_pid.load(Ordering::SeqCst) == process::my_pid() {
        entry.collector_latch.store(0, Ordering::SeqCst);
        entry.collector_pid.store(0, Ordering::SeqCst);
    }
}

/// Make the slot, unless it is there. One that has lost its WAL is made anew.
fn ensure_slot(slot: &str, entry: &ManagerEntry) -> Result<(), PgError> {
    let found = rows(
        "select (wal_status = 'lost')::text from pg_catalog.pg_replication_slots where slot_name = $1::name",
        &[slot.into()],
    )?;
    match found.first().map(|row| row.first().cloned().flatten()) {
        Some(Some(lost)) if lost == "true" => {
            PgError::new("55000", "WAL with local deletions was removed before they were collected")
                .with_detail(
                    "An older change from another node can bring back a row that was deleted here meanwhile.",
                )
                .with_hint("Increase max_slot_wal_keep_size, or let it be unlimited.")
                .log("braid collector of deletions");
            rows(
                "select pg_catalog.pg_drop_replication_slot($1::name)::text",
                &[slot.into()],
            )?;
        }
        Some(_) => return Ok(()),
        None => {}
    }
    // To make one waits for all transactions that run: none of them is to wait for this process meanwhile.
    entry.collected_lsn.store(0, Ordering::SeqCst);
    // Not as a statement that writes, which would give the transaction an id: a slot is only made in one without.
    rows(
        "select pg_catalog.pg_create_logical_replication_slot($1::name, 'braid')::text",
        &[slot.into()],
    )
    .map(|_| ())
}

/// Drop the slot of this database's collector, if there is one that nobody uses. In a transaction of the caller's.
///
/// # Errors
/// Whatever SPI says.
pub fn drop_slot(database: u32) -> Result<(), PgError> {
    rows(
        "select pg_catalog.pg_drop_replication_slot(slot_name)::text from pg_catalog.pg_replication_slots \
         where slot_name = $1::name and not active",
        &[slot_name::of_collector(database).as_str().into()],
    )
    .map(|_| ())
}

fn wanted() -> Result<Wanted, PgError> {
    let found = rows(
        "select relation::oid::text, column_number::text from braid.column_rule where rule = 'last_update_wins'",
        &[],
    )?;
    let register = |row: Vec<Option<String>>| {
        let [table, number] = <[_; 2]>::try_from(row).ok()?;
        Some((table?.parse().ok()?, number?.parse().ok()?))
    };
    Ok(Wanted {
        tables: wanted_tables()?,
        registers: found.into_iter().filter_map(register).collect(),
        rules: find_table("braid", "column_rule")?.map_or(0, pg_sys::Oid::to_u32),
    })
}

fn wanted_tables() -> Result<HashSet<u32>, PgError> {
    let found = rows(
        "select relation::oid::text from braid.subscription_table \
         union select c.oid::text from pg_catalog.pg_class c, pg_catalog.pg_namespace n \
         where n.oid = c.relnamespace and c.relkind in ('r', 'p') and c.oid >= 16384 and n.nspname <> 'braid' \
         and exists (select from braid.ingest_source)",
        &[],
    )?;
    Ok(found
        .into_iter()
        .filter_map(|row| row.into_iter().next().flatten()?.parse().ok())
        .collect())
}

/// Decoding of this server's WAL.
struct Decoder {
    context: *mut pg_sys::LogicalDecodingContext,
    /// Catalogs were read as they are now since it decoded last.
    mixed: bool,
}

impl Decoder {
    /// Take the slot up, and decode from where it is. To be called in a transaction.
    ///
    /// Outside of one PostgreSQL would mark the process as one that decodes and nothing else (`PROC_IN_LOGICAL_DECODING`), and leave it out of
    /// all snapshots: whoever met a tombstone before its transaction had committed would take it for one that was rolled back, and
    /// mark it so, for everybody and for good.
    fn open(slot: &CStr) -> Self {
        // SAFETY: in a transaction of a process that is connected to the slot's database; the functions are those that the
        // SQL functions over slots read WAL with. The context lives as long as the process.
        let context = unsafe {
            pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            compat::acquire_slot(slot);
            let mut routine = pg_sys::XLogReaderRoutine {
                page_read: Some(read_page),
                segment_open: Some(ffi::wal_segment_open),
                segment_close: Some(ffi::wal_segment_close),
            };
            let context = pg_sys::CreateDecodingContext(
                0,
                std::ptr::null_mut(),
                false,
                &raw mut routine,
                None,
                None,
                None,
            );
            let start = (*pg_sys::MyReplicationSlot).data.restart_lsn;
            pg_sys::XLogBeginRead((*context).reader, start);
            context
        };
        Self {
            context,
            mixed: true,
        }
    }

    fn position(&self) -> u64 {
        // SAFETY: the context lives as long as the process.
        unsafe { (*(*self.context).reader).EndRecPtr }
    }

    /// Decode up to `end`, which is flushed, or for some time. True when it is done.
    fn read_up_to(&mut self, end: u64) -> bool {
        if self.position() >= end {
            return true;
        }
        if std::mem::take(&mut self.mixed) {
            // What was read of catalogs as they are now is not what they were.
            // SAFETY: outside of a transaction.
            unsafe { pg_sys::InvalidateSystemCaches() };
        }
        let started = Instant::now();
        while self.position() < end {
            // SAFETY: the context and its reader are valid; outside of a transaction.
            unsafe {
                let reader = (*self.context).reader;
                let mut message = std::ptr::null_mut();
                let record = pg_sys::XLogReadRecord(reader, &raw mut message);
                if !message.is_null() {
                    let message = CStr::from_ptr(message).to_string_lossy().into_owned();
                    pgrx::error!("could not read WAL for deletions: {message}");
                }
                if !record.is_null() {
                    ffi::logical_decoding_process_record(self.context, reader);
                }
            }
            pgrx::check_for_interrupts!();
            if started.elapsed() > STRETCH {
                return false;
            }
        }
        true
    }

    /// Everything up to where it has come is written and flushed.
    fn confirm(&self) {
        // SAFETY: the slot is this process's.
        unsafe { pg_sys::LogicalConfirmReceivedLocation(self.position()) };
    }

    /// Run `work` in a transaction of its own, with catalogs as they are now.
    fn apart<T>(&mut self, work: impl FnOnce() -> Result<T, PgError>) -> Result<T, PgError> {
        if !std::mem::replace(&mut self.mixed, true) {
            // SAFETY: outside of a transaction.
            unsafe { pg_sys::InvalidateSystemCaches() };
        }
        error::transaction(work)
    }
}

/// Read a page of WAL, up to `length` bytes of it: the next record may begin on one that is still to be written.
///
/// PostgreSQL's own function waits for that without noticing that the postmaster is gone. Then this process would go on for ever, and with
/// it the shared memory, so that the server could not be started again.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn read_page(
    reader: *mut pg_sys::XLogReaderState,
    page: pg_sys::XLogRecPtr,
    length: c_int,
    record: pg_sys::XLogRecPtr,
    buffer: *mut c_char,
) -> c_int {
    while !page_read::is_there(page, length) {
        latch::wait(Some(PAUSE));
    }
    // SAFETY: called by the reader, with what it gives.
    unsafe { ffi::read_local_xlog_page(reader, page, length, record, buffer) }
}

/// Dead rows that transactions from this one on have left stay.
fn hold(horizon: pg_sys::TransactionId) {
    // SAFETY: the slot is this process's, which alone writes these two words; others read them, each in one piece.
    unsafe {
        let slot = pg_sys::MyReplicationSlot;
        let held = (*slot).data.xmin;
        if held != pg_sys::InvalidTransactionId && !pg_sys::TransactionIdPrecedes(held, horizon) {
            return;
        }
        for place in [&raw mut (*slot).data.xmin, &raw mut (*slot).effective_xmin] {
            AtomicU32::from_ptr(place.cast()).store(horizon.into_inner(), Ordering::Release);
        }
        pg_sys::ReplicationSlotMarkDirty();
        pg_sys::ReplicationSlotsComputeRequiredXmin(false);
    }
}

/// The oldest transaction that runs, and then the end of WAL.
fn horizon() -> (pg_sys::TransactionId, u64) {
    // SAFETY: reads of shared memory.
    unsafe {
        let oldest = pg_sys::GetOldestActiveTransactionId();
        (oldest, pg_sys::GetXLogInsertRecPtr())
    }
}

fn collect(slot: &str, entry: &ManagerEntry) {
    let name = CString::new(slot).unwrap_or_default();
    let mut decoder = match error::transaction(|| Ok(Decoder::open(&name))) {
        Ok(decoder) => decoder,
        Err(failure) => return failure.log("braid collector of deletions"),
    };
    // SAFETY: reads the slot that is this process's.
    let is_new = unsafe { (*pg_sys::MyReplicationSlot).data.xmin == pg_sys::InvalidTransactionId };
    if is_new {
        // From the first moment on, what dies after it is told of; also when the server is killed before the slot is saved next.
        hold(horizon().0);
        // SAFETY: the slot is this process's.
        unsafe { pg_sys::ReplicationSlotSave() };
    }
    let mut aim = horizon();
    let mut listed: Option<Instant> = None;
    let mut saved = Instant::now();
    let mut seen = 0;
    let mut idle = 0;
    loop {
        worker::reload_settings();
        // Whoever waits for this process wakes it up, too: that says nothing about tables.
        let is_old = entry.collector_list_is_old.swap(false, Ordering::AcqRel);
        if is_old || listed.is_none_or(|at| at.elapsed() > LIST) {
            listed = Some(Instant::now());
            match decoder.apart(wanted) {
                Ok(wanted) => deletions::want(wanted),
                Err(failure) => return failure.log("braid collector of deletions"),
            }
        }
        // SAFETY: a read of shared memory.
        let flushed = unsafe { pg_sys::GetFlushRecPtr(std::ptr::null_mut()) };
        let done = decoder.read_up_to(flushed);
        let taken = deletions::take();
        if !taken.is_empty()
            && let Err(failure) = decoder.apart(|| write(taken))
        {
            return failure.log("braid collector of deletions");
        }
        // What was written is flushed with its commit: this process does not commit asynchronously.
        entry
            .collected_lsn
            .store(decoder.position(), Ordering::Release);
        if decoder.position() >= aim.1 {
            hold(aim.0);
            entry
                .collected_before
                .store(aim.0.into_inner(), Ordering::Release);
            aim = horizon();
        }
        if saved.elapsed() > SAVE {
            saved = Instant::now();
            decoder.confirm();
        }
        if !done {
            continue;
        }
        idle = if decoder.position() == seen {
            idle + 1
        } else {
            0
        };
        seen = decoder.position();
        latch::wait(Some(if idle > IDLE { LONG_PAUSE } else { PAUSE }));
    }
}

fn write(taken: Taken) -> Result<(), PgError> {
    // Its commit flushes (`worker::connect`), before the slot moves on.
    store(&taken.deleted)?;
    column_write::store(&taken.written)?;
    let mut collection = None;
    collect_rows(&mut collection, &taken.removed)?;
    for large in taken.large {
        large.each(|deleted, removed| {
            store(deleted)?;
            collect_rows(&mut collection, removed)
        })?;
    }
    if let Some(collection) = collection {
        collection.end()?;
    }
    let mut large = taken.large_written.into_iter();
    large.try_for_each(|large| large.each(column_write::store))
}

fn collect_rows(collection: &mut Option<Collection>, removed: &[Removal]) -> Result<(), PgError> {
    if removed.is_empty() {
        return Ok(());
    }
    let collection = match collection {
        Some(collection) => collection,
        None => collection.insert(Collection::begin()?),
    };
    collection.add(removed)
}
