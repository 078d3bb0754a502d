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
//! If one node of the group has data, the process has both parts of the rules: the sequencer and
//! the node ([`braid_versions::Sequencer`], [`braid_versions::Local`]). Both live in its memory
//! and begin anew with it. If several have, `shared` says who has the sequencer, and what a node
//! has is stored (`braid_node::versions::note`). When the process starts, numbers of the process
//! before are void, in this order:
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

mod agreed;
mod keeper;
mod shared;
pub mod suited;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_node::registry::{self, ManagerEntry};
use braid_node::versions::{memory, tables};
use braid_postgres::error::{self, PgError};
use braid_postgres::{process, timestamp, worker};
use pgrx::pg_sys;

use keeper::Keeper;
use shared::Shared;

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
    if let Err(failure) = run(entry, start) {
        failure.log("braid versions");
    }
}

fn run(entry: &'static ManagerEntry, start: u64) -> Result<(), PgError> {
    // Read first: a change from after it is looked at again.
    let change = entry.versioned_changes.load(Ordering::Acquire);
    let agreed = error::transaction(agreed::load)?;
    let mut keeper = match agreed {
        Some(agreed) if !agreed.is_alone() => {
            Keeper::shared(start, Shared::new(entry, agreed, change)?)
        }
        _ => match Keeper::alone(start) {
            Some(keeper) => keeper,
            None => return Ok(()),
        },
    };
    let mut looked: Option<Instant> = None;
    loop {
        worker::reload_settings();
        if !keeper.work()? {
            return Ok(());
        }
        let is_idle = memory::own_slots().next().is_none();
        if is_idle && looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY) {
            looked = Some(Instant::now());
            let found = error::transaction(|| Ok((tables::all(), agreed::load()?)));
            match found {
                Ok((tables, _)) if tables.is_empty() => return Ok(()),
                Ok((_, agreed)) if keeper.is_out_of_date(agreed.as_ref()) => return Ok(()),
                Ok(_) => {}
                Err(failure) => failure.log("braid versions"),
            }
        }
        keeper.wait(LOOK_EVERY);
    }
}

/// The process ends.
fn leave(entry: &ManagerEntry) {
    if entry.versions_pid.load(Ordering::SeqCst) == process::my_pid() {
        memory::show(process::my_database(), &[]);
        entry.versions_mailbox.store(0, Ordering::SeqCst);
        entry.versions_latch.store(0, Ordering::SeqCst);
        entry.versions_pid.store(0, Ordering::SeqCst);
    }
}
