//! The collector: one process for a database to which several nodes send changes. It decodes this
//! server's own WAL for deletions of local transactions, and writes tombstones. If needed, it also
//! records which columns they write (`braid_node::column_write`), and which rows they remove from
//! keyless tables (`braid_node::taken_row`).
//!
//! Its replication slot keeps two things: the WAL from the decoded position on, as each logical
//! slot does, and dead rows, by its `xmin`. Until a deletion is collected, its dead row version is
//! there to be found, so no process has to wait for the collector. How `xmin` moves:
//!
//! 1. Read the id of the oldest running transaction, then the end of WAL. Each older transaction
//!    has ended, and its commit record lies before that end.
//! 2. Decode up to that end, write the deletions, commit, and have the commit flushed.
//! 3. Now `xmin` may be that id. Go to 1.
//!
//! After a crash the slot has the state that was last written to disk, which may be older. Then
//! some deletions are collected twice, which is harmless. The process ends with any error; the
//! manager starts it again.

mod deletions;
mod gathered;
mod taken_rows;

use std::collections::HashSet;
use std::ffi::CString;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::slot_name;
use braid_bgworker::sqlstate::SqlState;
use braid_node::column_write;
use braid_node::registry::{self, ManagerEntry};
use braid_node::settings::timers;
use braid_node::subscription::rows;
use braid_node::tombstone::store;
use braid_postgres::error::{self, PgError};
use braid_postgres::names::find_table;
use braid_postgres::slot_decoder::SlotDecoder;
use braid_postgres::{latch, lock, process, wal, worker};
use pgrx::pg_sys;

use gathered::{Taken, Wanted};
use taken_rows::{Collection, Removal};

/// Pause between two looks at WAL: dead rows are kept for about as long.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause between two looks after a while without new WAL.
const LONG_PAUSE: Duration = Duration::from_secs(1);
/// Looks without anything new until then.
const IDLE: u32 = 10;
/// WAL is decoded for this long before the result is written.
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
    process::before_exit(move || leave(entry));
    worker::report_activity("collecting deletions");
    let slot = slot_name::of_collector(database);
    if let Err(failure) = error::transaction(|| ensure_slot(&slot, entry)) {
        failure.log("braid collector of deletions");
        return;
    }
    // DROP EXTENSION may come at any time. The lock is taken only after the slot exists: creating a
    // slot waits for all transactions, also for one that is about to drop the extension.
    lock::extension_first(c"braid");
    deletions::gather();
    collect(&slot, entry);
}

/// The collector's process ends.
fn leave(entry: &ManagerEntry) {
    if entry.collector_pid.load(Ordering::SeqCst) == process::my_pid() {
        entry.collector_latch.store(0, Ordering::SeqCst);
        entry.collector_pid.store(0, Ordering::SeqCst);
    }
}

/// Creates the slot, if it is missing. A slot that has lost its WAL is replaced.
fn ensure_slot(slot: &str, entry: &ManagerEntry) -> Result<(), PgError> {
    let found = rows(
        "select (wal_status = 'lost')::text from pg_catalog.pg_replication_slots where slot_name = $1::name",
        &[slot.into()],
    )?;
    match found.first().map(|row| row.first().cloned().flatten()) {
        Some(Some(lost)) if lost == "true" => {
            PgError::new(SqlState::ObjectNotInPrerequisiteState, "WAL with local deletions was removed before they were collected")
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
    // To make one waits for all transactions that run: none of them is to wait for this process
    // meanwhile.
    entry.collected_lsn.store(0, Ordering::SeqCst);
    // Not as a statement that writes, which would give the transaction an id: a slot is only made
    // in one without.
    rows(
        "select pg_catalog.pg_create_logical_replication_slot($1::name, 'braid')::text",
        &[slot.into()],
    )
    .map(|_| ())
}

/// Drop the slot of this database's collector, if there is one that nobody uses. In a transaction
/// of the caller's.
///
/// # Errors
/// Those of SPI.
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
    let listed = rows(
        "select schema_name::text, table_name::text from braid.subscription_table",
        &[],
    )?;
    let name = |row: Vec<Option<String>>| {
        let [schema, table] = <[_; 2]>::try_from(row).ok()?;
        Some((schema?, table?))
    };
    let publications = rows(
        "select 1::text from pg_catalog.pg_publication where puballtables limit 1",
        &[],
    )?;
    Ok(Wanted {
        tables: wanted_tables()?,
        names: listed.into_iter().filter_map(name).collect(),
        publishes_all: !publications.is_empty(),
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

fn collect(slot: &str, entry: &ManagerEntry) {
    let name = CString::new(slot).unwrap_or_default();
    let mut decoder = match error::transaction(|| Ok(SlotDecoder::open(&name))) {
        Ok(decoder) => decoder,
        Err(failure) => return failure.log("braid collector of deletions"),
    };
    if !decoder.holds_dead_rows() {
        // From the first moment on, the slot keeps rows that die from now on; also if the server is
        // killed before the slot is saved next.
        decoder.hold_dead_rows(wal::horizon().0);
        decoder.save();
    }
    let mut aim = wal::horizon();
    let mut listed: Option<Instant> = None;
    let mut saved = Instant::now();
    let mut seen = 0;
    let mut idle = 0;
    loop {
        worker::reload_settings();
        // Processes that wait for the collector set its latch, too. That says nothing about tables.
        let is_old = entry.collector_list_is_old.swap(false, Ordering::AcqRel);
        if is_old || listed.is_none_or(|at| at.elapsed() > timers::collector_list()) {
            listed = Some(Instant::now());
            match decoder.apart(wanted) {
                Ok(wanted) => gathered::want(wanted),
                Err(failure) => return failure.log("braid collector of deletions"),
            }
        }
        let done = decoder.read_up_to(wal::flushed(), STRETCH);
        let taken = gathered::take();
        if !taken.is_empty()
            && let Err(failure) = decoder.apart(|| write(taken))
        {
            return failure.log("braid collector of deletions");
        }
        // The results were flushed with their commit: this process does not commit asynchronously.
        entry
            .collected_lsn
            .store(decoder.position(), Ordering::Release);
        if decoder.position() >= aim.1 {
            decoder.hold_dead_rows(aim.0);
            entry
                .collected_before
                .store(aim.0.into_inner(), Ordering::Release);
            aim = wal::horizon();
        }
        if saved.elapsed() > timers::collector_save() {
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
    // The commit of this transaction flushes (`worker::connect`), before the slot moves on.
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
