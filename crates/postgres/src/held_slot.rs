//! The replication slot that a process holds. Run by workers that call PostgreSQL's functions for
//! slots and go on after an error.
//!
//! Example: `pg_create_logical_replication_slot` fails. PostgreSQL's sessions release the slot
//! after every error; a transaction that rolls back does not. A worker would hold the unfinished
//! slot: the view shows it, as active, until the worker ends. Then it is gone.

use pgrx::pg_sys;

/// Releases the slot that this process holds, if it holds one. A slot that was not finished is
/// dropped. Outside of transactions.
///
/// Raises PostgreSQL's error if files of the slot can't be removed.
pub fn release() {
    // SAFETY: reads a variable of this process; the function is for a process that holds a slot.
    unsafe {
        if !pg_sys::MyReplicationSlot.is_null() {
            pg_sys::ReplicationSlotRelease();
        }
    }
}
