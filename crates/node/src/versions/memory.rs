//! Shared memory of versioned transactions: slots, and what the versions process shows.
//!
//! Everything is an atomic. Parts of more than one word are read and written under the registry's
//! lock, or by one process at a time as the slot's state says. A slot's tables are the session's
//! until it is *asked*, and then nobody's but for the marks of early release. Its waits are the
//! versions process's.

use std::sync::atomic::{
    AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

use braid_postgres::process;
use braid_versions::{Access, TABLES_LIMIT};

use crate::registry::{self, locked};

/// Versioned transactions of a server at one time.
pub const SLOTS: usize = 512;
/// Waits that a slot shows.
pub const WAITS: usize = 8;
/// The longest note of versions that a slot holds, in bytes: of about 100 tables.
pub const NOTE_LIMIT: usize = 2048;
/// Versioned tables that are shown, of all databases.
const SHOWN: usize = 1024;

/// States of a slot: see the module's head.
pub mod state {
    /// See the module's head, as of all others.
    pub const FREE: u32 = 0;
    /// The session fills it.
    pub const CLAIMED: u32 = 1;
    /// The session waits for numbers.
    pub const ASKED: u32 = 2;
    /// The session waits for earlier writes.
    pub const WAITING: u32 = 3;
    /// The session may take its snapshot.
    pub const READY: u32 = 4;
    /// The transaction runs.
    pub const RUNNING: u32 = 5;
    /// The session waits before its commit.
    pub const COMMIT_ASKED: u32 = 6;
    /// The session may commit.
    pub const MAY_COMMIT: u32 = 7;
    /// The transaction can't go on.
    pub const REFUSED: u32 = 8;
    /// The commit is visible.
    pub const COMMITTED: u32 = 9;
    /// Nothing was written, or nothing stays.
    pub const ENDED: u32 = 10;
}

/// Why a transaction can't go on.
pub mod problem {
    /// The versions process has started anew: numbers of the earlier one are void.
    pub const STARTED_ANEW: u32 = 1;
    /// Too many transactions wait.
    pub const TOO_MANY: u32 = 2;
    /// The numbers contradict each other: an error of ours.
    pub const INTERNAL: u32 = 3;
    /// The group has given up what an applier is to apply, or it is here already.
    pub const GIVEN_UP: u32 = 4;
    /// The transaction's versions are of too many tables to be shipped.
    pub const TOO_LONG: u32 = 5;
    /// This node has writes that the group has given up.
    pub const DIVERGED: u32 = 6;
}

/// A table in a slot: its number, and these marks.
pub mod mark {
    /// The transaction may write it.
    pub const WRITES: u32 = 1 << 31;
    /// The session uses the table no more.
    pub const RELEASED: u32 = 1 << 30;
    /// The session has used the table before.
    pub const USED: u32 = 1 << 29;
    /// The number's bits.
    pub const NUMBER: u32 = USED - 1;
}

/// A write that a transaction waits for.
#[repr(C)]
#[derive(Debug)]
pub struct WaitCell {
    table: AtomicU32,
    holder: AtomicI32,
    version: AtomicU64,
    node: AtomicU32,
}

/// A write that a transaction waits for, as it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waited {
    /// The table's number.
    pub table: u32,
    /// The number of the write.
    pub version: u64,
    /// The process whose transaction has it; 0: not known.
    pub holder: i32,
    /// The number of the node that has it; 0: this one, or not known.
    pub node: u16,
}

/// A versioned transaction, or a single read.
#[repr(C)]
#[derive(Debug)]
pub struct Slot {
    /// One of [`state`].
    pub state: AtomicU32,
    /// The session's process.
    pub pid: AtomicI32,
    /// Its database.
    pub database: AtomicU32,
    /// One of [`problem`], if refused.
    pub problem: AtomicU32,
    /// Address of the session's latch.
    latch: AtomicUsize,
    /// The start of the versions process that has said *ready*.
    pub start: AtomicU64,
    /// Since when it waits (TimestampTz).
    pub since: AtomicI64,
    /// Until when (TimestampTz).
    pub deadline: AtomicI64,
    /// The session only waits for known writes of one table, and takes no number.
    pub reads_current: AtomicU32,
    /// An applier waits for what a remote transaction had seen.
    pub applies: AtomicU32,
    /// The bytes of the transaction's note: set by the versions process for a session, by an
    /// applier for itself. None: nothing is shipped.
    note_length: AtomicU32,
    note: [AtomicU8; NOTE_LIMIT],
    table_count: AtomicU32,
    wait_count: AtomicU32,
    tables: [AtomicU32; TABLES_LIMIT],
    waits: [WaitCell; WAITS],
}

/// A table's numbers, as they are shown.
#[repr(C)]
#[derive(Debug)]
struct ShownCell {
    database: AtomicU32,
    number: AtomicU32,
    assigned: AtomicU64,
    reached: AtomicU64,
}

/// A table's numbers, as they are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown {
    /// The table's number.
    pub number: u32,
    /// The last number of a write that was given.
    pub assigned: u64,
    /// All writes up to this one are visible here or void.
    pub reached: u64,
}

/// The whole.
#[repr(C)]
#[derive(Debug)]
pub struct Memory {
    slots: [Slot; SLOTS],
    shown: [ShownCell; SHOWN],
}

fn memory() -> Option<&'static Memory> {
    registry::versions()
}

/// All slots; none without shared memory.
#[must_use]
pub fn slots() -> &'static [Slot] {
    memory().map_or(&[], |memory| &memory.slots)
}

/// The slots of this database that are not free.
pub fn own_slots() -> impl Iterator<Item = &'static Slot> {
    let database = process::my_database();
    slots().iter().filter(move |slot| {
        slot.state() != state::FREE && slot.database.load(Ordering::Acquire) == database
    })
}

impl Slot {
    /// One of [`state`].
    #[must_use]
    pub fn state(&self) -> u32 {
        self.state.load(Ordering::SeqCst)
    }

    /// Moves it on. False if it has another state than `from` by now.
    #[must_use]
    pub fn advance(&self, from: u32, to: u32) -> bool {
        let moved = self
            .state
            .compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
        moved.is_ok()
    }

    /// Wakes the session.
    pub fn wake_session(&self) {
        process::set_latch(self.latch.load(Ordering::Acquire));
    }

    /// The tables, with their marks.
    pub fn tables(&self) -> impl Iterator<Item = &AtomicU32> {
        let count = usize::try_from(self.table_count.load(Ordering::Acquire)).unwrap_or(0);
        self.tables.iter().take(count)
    }

    /// Sets the bytes of its note. False if they are too many.
    pub fn set_note(&self, note: &[u8]) -> bool {
        let Ok(length) = u32::try_from(note.len()) else {
            return false;
        };
        if note.len() > NOTE_LIMIT {
            return false;
        }
        for (cell, byte) in self.note.iter().zip(note) {
            cell.store(*byte, Ordering::Relaxed);
        }
        self.note_length.store(length, Ordering::Release);
        true
    }

    /// The bytes of its note; none if nothing is shipped.
    #[must_use]
    pub fn note(&self) -> Vec<u8> {
        let length = usize::try_from(self.note_length.load(Ordering::Acquire)).unwrap_or(0);
        let cells = self.note.iter().take(length);
        cells.map(|cell| cell.load(Ordering::Relaxed)).collect()
    }

    /// Shows what it waits for: as many as there is room for.
    pub fn show_waits(&self, waits: &[Waited]) {
        locked(|| {
            for (cell, wait) in self.waits.iter().zip(waits) {
                cell.table.store(wait.table, Ordering::Relaxed);
                cell.holder.store(wait.holder, Ordering::Relaxed);
                cell.version.store(wait.version, Ordering::Relaxed);
                cell.node.store(wait.node.into(), Ordering::Relaxed);
            }
            let count = u32::try_from(waits.len().min(WAITS)).unwrap_or(0);
            self.wait_count.store(count, Ordering::Relaxed);
        });
    }

    /// The writes that the session waits for.
    #[must_use]
    pub fn waits(&self) -> Vec<Waited> {
        locked(|| {
            let count = usize::try_from(self.wait_count.load(Ordering::Relaxed)).unwrap_or(0);
            let cells = self.waits.iter().take(count);
            cells
                .map(|cell| Waited {
                    table: cell.table.load(Ordering::Relaxed),
                    version: cell.version.load(Ordering::Relaxed),
                    holder: cell.holder.load(Ordering::Relaxed),
                    node: u16::try_from(cell.node.load(Ordering::Relaxed)).unwrap_or(0),
                })
                .collect()
        })
    }
}

/// Claims a free slot for this session, with these tables. `None` if all are taken.
pub(super) fn claim(
    tables: &[(u32, Access)],
    reads_current: bool,
    since: i64,
    deadline: i64,
) -> Option<&'static Slot> {
    let claimed = |slot: &&Slot| slot.advance(state::FREE, state::CLAIMED);
    let slot = slots().iter().find(claimed).or_else(|| {
        // Ended when the database had no versions process.
        let left = |slot: &&Slot| {
            matches!(slot.state(), state::ENDED | state::COMMITTED)
                && registry::find_manager(slot.database.load(Ordering::Acquire))
                    .is_none_or(|entry| entry.versions_pid.load(Ordering::Acquire) == 0)
                && slot.advance(slot.state(), state::FREE)
                && slot.advance(state::FREE, state::CLAIMED)
        };
        slots().iter().find(left)
    })?;
    slot.pid.store(process::my_pid(), Ordering::Release);
    slot.latch.store(process::my_latch(), Ordering::Release);
    slot.problem.store(0, Ordering::Release);
    slot.start.store(0, Ordering::Release);
    slot.since.store(since, Ordering::Release);
    slot.deadline.store(deadline, Ordering::Release);
    slot.reads_current
        .store(u32::from(reads_current), Ordering::Release);
    slot.applies.store(0, Ordering::Release);
    slot.note_length.store(0, Ordering::Release);
    slot.wait_count.store(0, Ordering::Release);
    for (cell, (number, access)) in slot.tables.iter().zip(tables) {
        let writes = if *access == Access::Write {
            mark::WRITES
        } else {
            0
        };
        cell.store(number & mark::NUMBER | writes, Ordering::Release);
    }
    let count = u32::try_from(tables.len().min(TABLES_LIMIT)).unwrap_or(0);
    slot.table_count.store(count, Ordering::Release);
    slot.database
        .store(process::my_database(), Ordering::Release);
    Some(slot)
}

/// Shows the numbers of a database's tables, and no others of it.
pub fn show(database: u32, tables: &[Shown]) {
    let Some(memory) = memory() else { return };
    locked(|| {
        for cell in &memory.shown {
            let is_own = cell.database.load(Ordering::Relaxed) == database;
            let number = cell.number.load(Ordering::Relaxed);
            if is_own && !tables.iter().any(|table| table.number == number) {
                cell.database.store(0, Ordering::Relaxed);
            }
        }
        for table in tables {
            let of = |cell: &&ShownCell| {
                cell.database.load(Ordering::Relaxed) == database
                    && cell.number.load(Ordering::Relaxed) == table.number
            };
            let free = |cell: &&ShownCell| cell.database.load(Ordering::Relaxed) == 0;
            let cells = || memory.shown.iter();
            if let Some(cell) = cells().find(of).or_else(|| cells().find(free)) {
                cell.number.store(table.number, Ordering::Relaxed);
                cell.assigned.store(table.assigned, Ordering::Relaxed);
                cell.reached.store(table.reached, Ordering::Relaxed);
                cell.database.store(database, Ordering::Relaxed);
            }
        }
    });
}

/// The numbers of this database's tables.
#[must_use]
pub fn shown() -> Vec<Shown> {
    let Some(memory) = memory() else {
        return Vec::new();
    };
    let database = process::my_database();
    locked(|| {
        let cells = memory.shown.iter();
        cells
            .filter(|cell| cell.database.load(Ordering::Relaxed) == database)
            .map(|cell| Shown {
                number: cell.number.load(Ordering::Relaxed),
                assigned: cell.assigned.load(Ordering::Relaxed),
                reached: cell.reached.load(Ordering::Relaxed),
            })
            .collect()
    })
}
