//! Settings that exist for tests and measurements: they switch off, or limit, what users have no
//! reason to change.
//!
//! They are in no list of settings ([`HIDDEN`]); `SHOW` and `ALTER SYSTEM` know them by name.
//! `CONTRIBUTING.md` lists them.

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};

use super::{Int, size};

/// Keeps a setting out of `pg_settings` and `SHOW ALL`. `\dconfig` of psql reads `pg_settings`, so
/// `GUC_NOT_IN_SAMPLE` alone does not hide a setting from it; pgrx sets both flags.
pub(super) const HIDDEN: GucFlags = GucFlags::NO_SHOW_ALL;

static MAX_TABLE_COUNTERS: GucSetting<i32> = GucSetting::<i32>::new(32_768);
static MAX_TRANSACTION_CRASHES: GucSetting<i32> = GucSetting::<i32>::new(3);
static LEADER_APPLIES: GucSetting<bool> = GucSetting::<bool>::new(true);
static PARALLEL_APPLY: GucSetting<ParallelApply> =
    GucSetting::<ParallelApply>::new(ParallelApply::Auto);

/// `braid.parallel_apply`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub enum ParallelApply {
    /// One applier takes transactions where all of them are not faster.
    #[name = c"auto"]
    Auto,
    /// Each applier takes transactions.
    #[name = c"always"]
    Always,
}

/// The numbers of this module.
pub(super) fn all() -> [Int; 2] {
    [
        Int {
            name: c"braid.max_table_counters",
            short: c"Number of tables whose changes are counted by table, over all subscriptions of this server.",
            long: c"Each takes 108 bytes of shared memory. Further tables of a subscription are counted together.",
            setting: &MAX_TABLE_COUNTERS,
            range: (0, 10_000_000),
            context: GucContext::Postmaster,
            flags: HIDDEN,
        },
        Int {
            name: c"braid.max_transaction_crashes",
            short: c"Number of times in a row that the server may crash at one transaction before its subscription stops.",
            long: c"Counts where a process of the subscription died by a signal while it applied the transaction, or copied a table. 0 turns \
                this off. Takes effect when a subscription's workers start.",
            setting: &MAX_TRANSACTION_CRASHES,
            range: (0, 1000),
            context: GucContext::Sighup,
            flags: HIDDEN,
        },
    ]
}

/// Registers the others.
pub(super) fn register() {
    GucRegistry::define_bool_guc(
        c"braid.leader_applies",
        c"Have a small transaction that comes alone applied by the leader itself, without waking an applier.",
        c"It does so only if no other transaction is in flight. It never waits: a transaction that would have to wait goes to an applier.",
        &LEADER_APPLIES,
        GucContext::Sighup,
        HIDDEN,
    );
    GucRegistry::define_enum_guc(
        c"braid.parallel_apply",
        c"Whether all appliers of a subscription take transactions.",
        c"With auto, one of them does while all together are not faster, which is tried now and then as long as transactions wait. Where \
          commits need no order all always do.",
        &PARALLEL_APPLY,
        GucContext::Sighup,
        HIDDEN,
    );
}

/// `braid.max_table_counters`.
#[must_use]
pub(crate) fn max_table_counters() -> usize {
    size(MAX_TABLE_COUNTERS.get())
}

/// `braid.max_transaction_crashes`; 0 for no limit.
#[must_use]
pub(crate) fn max_crashes() -> u64 {
    u64::try_from(MAX_TRANSACTION_CRASHES.get()).unwrap_or(0)
}

/// `braid.leader_applies`.
#[must_use]
pub fn leader_applies() -> bool {
    LEADER_APPLIES.get()
}

/// `braid.parallel_apply`.
#[must_use]
pub fn parallel_apply() -> ParallelApply {
    PARALLEL_APPLY.get()
}
