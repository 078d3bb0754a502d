//! The start of an applier's process: its arguments, the catalog rows that it reads, and the
//! settings that it applies under.

use std::sync::atomic::{Ordering, fence};

use braid_bgworker::applied::Applied;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::ApplyMode;
use braid_node::applied::AppliedRow;
use braid_node::crash;
use braid_node::group::Group;
use braid_node::registry::{self, ApplierEntry};
use braid_node::subscription;
use braid_postgres::error::{self, PgError};
use braid_postgres::{process, wait, worker};
use pgrx::pg_sys;

use super::ahead::Ahead;
use super::{Applier, fail};

/// The arguments with which the leader starts an applier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arguments {
    /// Subscription.
    pub subscription_id: u32,
    /// Number of the applier, from 0.
    pub number: usize,
    /// The group's shared memory.
    pub handle: u32,
    /// The process applies the transaction that is in progress at the provider, and no other.
    pub running: bool,
}

impl Arguments {
    /// For `bgw_extra`.
    #[must_use]
    pub fn pack(self) -> worker::Extra {
        worker::Extra::pack(&[
            u64::from(self.subscription_id),
            self.number as u64,
            u64::from(self.handle),
            u64::from(self.running),
        ])
    }

    fn unpack(extra: worker::Extra) -> Self {
        let small = |index| u32::try_from(extra.word(index)).unwrap_or(0);
        Self {
            subscription_id: small(0),
            number: usize::try_from(extra.word(1)).unwrap_or(0),
            handle: small(2),
            running: small(3) == 1,
        }
    }
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = u32::try_from(argument.value()).unwrap_or(0);
    let arguments = Arguments::unpack(worker::Extra::mine());
    worker::connect(database);
    let Some(entry) = registry::subscription(arguments.subscription_id) else {
        return;
    };
    let Some(own) = entry.appliers.get(arguments.number) else {
        return;
    };
    let group = match Group::attach(arguments.handle) {
        Ok(group) => group,
        Err(error) => {
            error.log("applier");
            return;
        }
    };
    if arguments.number == 0 {
        entry
            .first_applier_latch
            .store(process::my_latch(), Ordering::Release);
    }
    enter(own);
    group
        .ring
        .register_applier(arguments.number, process::my_pid(), process::my_latch());
    prepare_settings();
    let ring = group.ring;
    // Pairs with the fence in the leader's `wait_for_old_appliers`. Either a newer leader than the
    // one that started this process waits for it, or this process sees the newer leader.
    fence(Ordering::SeqCst);
    if entry.leader_pid.load(Ordering::Acquire) != ring.leader().0 {
        return;
    }
    let relaxed = ring.is_relaxed();
    let applied_row = AppliedRow::new(arguments.subscription_id, arguments.number);
    let started = error::transaction(|| {
        let subscription = subscription::load(arguments.subscription_id)?
            .ok_or_else(|| PgError::new(SqlState::UndefinedObject, "subscription is gone"))?;
        let local_node = subscription::local_node()?.ok_or_else(|| {
            PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "this database has no node",
            )
        })?;
        let applied = if relaxed {
            applied_row.read(ring.mark().1)?
        } else {
            Applied::default()
        };
        Ok((subscription, local_node, applied))
    });
    let (subscription, local_node, applied) = match started {
        Ok(started) => started,
        Err(error) => {
            fail(ring, &error, 0);
            return;
        }
    };
    // The leader waits for the durability that the subscription demands, once for many commits,
    // before it confirms them. In mode `serial` each commit waits by itself.
    worker::set(
        "synchronous_commit",
        if subscription.options.apply_mode == ApplyMode::Serial {
            subscription.options.synchronous_commit.name()
        } else {
            "off"
        },
    );
    worker::report_activity(&format!(
        "applying changes of subscription {}",
        subscription.name
    ));
    crash::enter(arguments.subscription_id, Some(arguments.number));
    let mut applier = Applier::new(
        arguments.number,
        group,
        subscription,
        local_node,
        entry,
        own,
    );
    applier.ahead = Ahead::new(applied, applied_row);
    if arguments.running {
        applier.apply_running();
    } else {
        applier.run();
    }
}

/// Show this process in its entry, until it ends.
fn enter(own: &'static ApplierEntry) {
    own.pid.store(process::my_pid(), Ordering::Release);
    own.start();
    own.wait.store(0, Ordering::Relaxed);
    wait::show_in(&own.wait);
    process::before_exit(move || leave(own));
}

/// The applier's process ends.
fn leave(own: &ApplierEntry) {
    if own.pid.load(Ordering::Acquire) == process::my_pid() {
        own.state.store(0, Ordering::Relaxed);
        own.pid.store(0, Ordering::Release);
    }
}

/// Settings that make the effect of changes independent of this server's and the roles' own: those
/// of PostgreSQL's apply worker.
pub fn prepare_settings() {
    for (name, value) in [
        ("session_replication_role", "replica"),
        ("search_path", ""),
        ("datestyle", "ISO"),
        ("intervalstyle", "postgres"),
        ("lc_monetary", "C"),
        ("xmloption", "content"),
        ("default_transaction_isolation", "read committed"),
        ("default_transaction_read_only", "off"),
        ("statement_timeout", "0"),
        ("idle_in_transaction_session_timeout", "0"),
    ] {
        worker::set(name, value);
    }
}
