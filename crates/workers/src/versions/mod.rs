//! The versions process: one for each database that has versioned tables; started by the manager.
//!
//! It numbers the writes of versioned transactions, says when each may take its snapshot, and when
//! it may commit. Sessions reach it through slots of shared memory (`braid_node::versions` has
//! their states); each state that a session has left is moved on here, in turns:
//!
//! 1. New requests go to the sequencer, and so do ends of transactions.
//! 2. What has become possible is allowed: a snapshot, a commit.
//! 3. As long as a turn has changed something, another one follows.
//!
//! A group with versioned tables has one node with data, so the process has both parts of the
//! rules: the sequencer and the node ([`braid_versions::Sequencer`], [`braid_versions::Local`]).
//! Both live in its memory and begin anew with it. Then numbers of the process before are void, in
//! this order:
//!
//! 1. The start's number is shown. A session with an older one can't ask to commit any more.
//! 2. Transactions that ran, or had asked to commit, are refused when they do so.
//! 3. Those that were already allowed to commit are waited for, before a number is given.
//!
//! Example of what 3 protects from: T1 may commit its write of `stock` when the process ends. The
//! next one starts T2, which reads `stock`, before T1 is visible. T2 would miss T1, and T3 on the
//! same table would see it.
//!
//! Not for: what a session may do (`braid_node::versions`), the rules themselves.

mod keeper;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_node::registry::{self, ManagerEntry};
use braid_node::versions::{memory, tables};
use braid_postgres::error;
use braid_postgres::{latch, process, timestamp, worker};
use pgrx::pg_sys;

use keeper::Keeper;

/// Between two looks without a wake-up: whether tables are versioned.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = crate::connect(argument);
    let Some(entry) = registry::manager(database) else {
        pgrx::log!("braid versions: too many databases");
        return;
    };
    // No other start has the same microsecond: this one waits for the one before.
    let start = timestamp::now().cast_unsigned().max(1);
    entry.versions_start.store(start, Ordering::SeqCst);
    entry
        .versions_latch
        .store(process::my_latch(), Ordering::SeqCst);
    entry
        .versions_pid
        .store(process::my_pid(), Ordering::SeqCst);
    process::before_exit(move || leave(entry));
    worker::report_activity("giving versions to transactions");
    let Some(mut keeper) = Keeper::new(start) else {
        pgrx::log!("braid versions: the first sequencer could not begin");
        return;
    };
    let mut looked: Option<Instant> = None;
    loop {
        worker::reload_settings();
        keeper.work();
        let is_idle = memory::own_slots().next().is_none();
        if is_idle && looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY) {
            looked = Some(Instant::now());
            match error::transaction(|| Ok(tables::all())) {
                Ok(found) if found.is_empty() => return,
                Ok(_) => {}
                Err(failure) => failure.log("braid versions"),
            }
        }
        latch::wait(Some(LOOK_EVERY));
    }
}

/// The process ends.
fn leave(entry: &ManagerEntry) {
    if entry.versions_pid.load(Ordering::SeqCst) == process::my_pid() {
        memory::show(process::my_database(), &[]);
        entry.versions_latch.store(0, Ordering::SeqCst);
        entry.versions_pid.store(0, Ordering::SeqCst);
    }
}
