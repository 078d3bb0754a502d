//! The settings `braid.*`, registered once, when the library is loaded; and those of PostgreSQL
//! that Braid goes by.

use std::ffi::CStr;
use std::time::Duration;

use braid_postgres::plain;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};

mod balancer;
mod for_tests;
pub mod timers;

pub use balancer::balancer;
pub use for_tests::{ParallelApply, leader_applies, parallel_apply};
pub(crate) use for_tests::{max_crashes, max_table_counters};

/// The action at a commit if the node's clock is too far behind the versions that it has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub enum BehindAction {
    /// The transaction commits, with a warning. The default.
    #[name = c"warning"]
    Warning,
    /// The commit fails.
    #[name = c"error"]
    Error,
}

/// The action for a transaction that was committed too far ahead of this node's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub enum SkewAction {
    /// The transaction is applied, with a warning in the server's log. The default.
    #[name = c"warning"]
    Warning,
    /// The subscription waits until this node's clock has come near.
    #[name = c"pause"]
    Pause,
}

static APPLIERS: GucSetting<i32> = GucSetting::<i32>::new(2);
static MIN_APPLIERS: GucSetting<i32> = GucSetting::<i32>::new(0);
static ROWS_PER_APPLIER: GucSetting<i32> = GucSetting::<i32>::new(0);
static COPY_WORKERS: GucSetting<i32> = GucSetting::<i32>::new(2);
static APPLY_BUFFER_MB: GucSetting<i32> = GucSetting::<i32>::new(16);
static MAX_SUBSCRIPTIONS: GucSetting<i32> = GucSetting::<i32>::new(64);
static DDL_REPLICATION: GucSetting<DdlReplication> =
    GucSetting::<DdlReplication>::new(DdlReplication::Auto);

/// `braid.ddl_replication`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub enum DdlReplication {
    /// Statements are sent if the database is a member of a group. The default.
    #[name = c"auto"]
    Auto,
    /// Statements are sent.
    #[name = c"on"]
    On,
    /// Statements stay on their node.
    #[name = c"off"]
    Off,
}
static REPLICATE_REFRESH: GucSetting<bool> = GucSetting::<bool>::new(false);
static REPLICATE_ROLES: GucSetting<bool> = GucSetting::<bool>::new(false);
static ORPHAN_CHECK_INTERVAL_MS: GucSetting<i32> = GucSetting::<i32>::new(60_000);
static CONFLICT_HISTORY: GucSetting<ConflictHistory> =
    GucSetting::<ConflictHistory>::new(ConflictHistory::On);

/// `braid.conflict_history`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub enum ConflictHistory {
    /// Conflicts are recorded, but for those whose writer is known to have seen the local row.
    #[name = c"on"]
    On,
    /// None is recorded.
    #[name = c"off"]
    Off,
    /// All are recorded.
    #[name = c"all"]
    All,
}
static CONFLICT_HISTORY_RETENTION_MIN: GucSetting<i32> = GucSetting::<i32>::new(30 * 24 * 60);
static CONFLICT_FUNCTION_TIMEOUT_MS: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static QUERIER_TIMEOUT_MS: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static PEER_AWAY_LIMIT_S: GucSetting<i32> = GucSetting::<i32>::new(0);
static KEEP_COMMITS_OLDER_THAN: GucSetting<i32> = GucSetting::<i32>::new(10_000_000);
static MAX_CLOCK_WAIT_MS: GucSetting<i32> = GucSetting::<i32>::new(500);
static CLOCK_BEHIND_ACTION: GucSetting<BehindAction> =
    GucSetting::<BehindAction>::new(BehindAction::Warning);
static CLOCK_SKEW_WARNING_MS: GucSetting<i32> = GucSetting::<i32>::new(500);
static ROUTING_WAIT_MS: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static CLOCK_SKEW_LIMIT_MS: GucSetting<i32> = GucSetting::<i32>::new(0);
static CLOCK_SKEW_ACTION: GucSetting<SkewAction> =
    GucSetting::<SkewAction>::new(SkewAction::Warning);
static MAX_PARKED: GucSetting<i32> = GucSetting::<i32>::new(1000);
static MAX_PARKED_SIZE_MB: GucSetting<i32> = GucSetting::<i32>::new(256);
static RETRY_INTERVAL_MS: GucSetting<i32> = GucSetting::<i32>::new(1000);
static RETRY_INTERVAL_MAX_MS: GucSetting<i32> = GucSetting::<i32>::new(60_000);
static STOPPED_RETRY_INTERVAL_MS: GucSetting<i32> = GucSetting::<i32>::new(10_000);

static REMEMBER_DELETIONS: GucSetting<RememberDeletions> =
    GucSetting::<RememberDeletions>::new(RememberDeletions::Auto);

/// `braid.remember_deletions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub enum RememberDeletions {
    /// Where changes of the same row may come from several nodes.
    #[name = c"auto"]
    Auto,
    /// Always.
    #[name = c"on"]
    On,
    /// Never.
    #[name = c"off"]
    Off,
}

struct Int {
    name: &'static CStr,
    short: &'static CStr,
    long: &'static CStr,
    setting: &'static GucSetting<i32>,
    range: (i32, i32),
    context: GucContext,
    flags: GucFlags,
}

/// How many appliers there are.
fn of_appliers() -> [Int; 3] {
    [
        Int {
            name: c"braid.appliers_per_subscription",
            short: c"Largest number of processes that apply the changes of one subscription.",
            long: c"Takes effect when a subscription's workers start. Each needs one of max_worker_processes and a \
                replication origin.",
            setting: &APPLIERS,
            range: (1, 64),
            context: GucContext::Sighup,
            flags: GucFlags::empty(),
        },
        Int {
            name: c"braid.min_appliers_per_subscription",
            short: c"Smallest number of processes that apply the changes of one subscription.",
            long: c"Between this and braid.appliers_per_subscription the number follows the load: it doubles at 90 % and halves at 50 %. With 0 it is always the largest.",
            setting: &MIN_APPLIERS,
            range: (0, 64),
            context: GucContext::Sighup,
            flags: GucFlags::empty(),
        },
        Int {
            name: c"braid.rows_per_applier",
            short: c"Rows per second that one applier is taken to carry, when their number follows the load.",
            long: c"With 0 only the part of their time counts in which appliers have something to do.",
            setting: &ROWS_PER_APPLIER,
            range: (0, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::empty(),
        },
    ]
}

/// Settings of conflicts: room in the history, time limits of functions, and of commits that must
/// be newer than the versions that they have read.
fn of_conflicts() -> [Int; 6] {
    [
        Int {
            name: c"braid.conflict_history_retention",
            short: c"Time after which recorded conflicts are removed.",
            long: c"0 keeps them for ever.",
            setting: &CONFLICT_HISTORY_RETENTION_MIN,
            range: (0, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MIN,
        },
        Int {
            name: c"braid.conflict_function_timeout",
            short: c"Longest time that a conflict function may take for one conflict.",
            long: c"0 sets no limit. One that takes longer counts as failed.",
            setting: &CONFLICT_FUNCTION_TIMEOUT_MS,
            range: (0, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MS,
        },
        Int {
            name: c"braid.querier_timeout",
            short: c"Longest time that an applier waits for another node's answer about a row.",
            long: c"It asks for large values that a change has left as they were and that are not known here. When the time is over the \
                transaction is applied again.",
            setting: &QUERIER_TIMEOUT_MS,
            range: (100, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MS,
        },
        Int {
            name: c"braid.peer_away_limit",
            short: c"Time after which nothing is remembered any more for the sake of a provider that is not connected.",
            long: c"Its subscription stops then. 0: deletions and versions are remembered for as long as it takes.",
            setting: &PEER_AWAY_LIMIT_S,
            range: (0, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_S,
        },
        Int {
            name: c"braid.keep_commits_older_than",
            short: c"Age, in transactions, from which commit timestamps are kept while older changes may arrive from other nodes.",
            long: c"PostgreSQL forgets them when rows are frozen. Half of vacuum_freeze_min_age counts where that is less.",
            setting: &KEEP_COMMITS_OLDER_THAN,
            range: (0, 1_000_000_000),
            context: GucContext::Sighup,
            flags: GucFlags::empty(),
        },
        Int {
            name: c"braid.max_clock_wait",
            short: c"Longest time that a commit waits until this node's clock is past the newest change that was applied here.",
            long: c"0 never waits. Where it would have to wait for longer it does not wait, but does what braid.clock_behind_action says.",
            setting: &MAX_CLOCK_WAIT_MS,
            range: (0, 60_000),
            context: GucContext::Suset,
            flags: GucFlags::UNIT_MS,
        },
    ]
}

/// How far apart clocks may be, and how long rows wait for the group.
fn of_clocks() -> [Int; 3] {
    [
        Int {
            name: c"braid.routing_wait",
            short: c"Longest time that a row of a routed table waits until its group has agreed up to the time of its creation.",
            long: c"Rows wait after a pause in which no routed table was written, and without a majority. Then the row is refused.",
            setting: &ROUTING_WAIT_MS,
            range: (0, i32::MAX),
            context: GucContext::Userset,
            flags: GucFlags::UNIT_MS,
        },
        Int {
            name: c"braid.clock_skew_warning",
            short: c"The server's log has a warning when a provider's clock is apart from this node's by more than this.",
            long: c"0 never warns. The error of what is measured is taken off first.",
            setting: &CLOCK_SKEW_WARNING_MS,
            range: (0, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MS,
        },
        Int {
            name: c"braid.clock_skew_limit",
            short: c"How far ahead of this node's clock a transaction may have been committed elsewhere that is to be applied here.",
            long: c"0 sets no limit. Past it, braid.clock_skew_action says what is done.",
            setting: &CLOCK_SKEW_LIMIT_MS,
            range: (0, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MS,
        },
    ]
}

/// How much may be parked.
fn of_parking() -> [Int; 2] {
    [
        Int {
            name: c"braid.max_parked",
            short: c"Largest number of parked transactions of one subscription.",
            long: c"A subscription that would have to park another one stops.",
            setting: &MAX_PARKED,
            range: (1, 1_000_000),
            context: GucContext::Sighup,
            flags: GucFlags::empty(),
        },
        Int {
            name: c"braid.max_parked_size",
            short: c"Largest size of the parked transactions of one subscription.",
            long: c"A subscription that would have to park more stops.",
            setting: &MAX_PARKED_SIZE_MB,
            range: (1, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MB,
        },
    ]
}

/// Settings that choose one of several actions.
fn register_choices() {
    GucRegistry::define_enum_guc(
        c"braid.clock_behind_action",
        c"What becomes of a commit when this node's clock is further behind than braid.max_clock_wait.",
        c"warning commits, under a version that is newer than the clock says; error does not.",
        &CLOCK_BEHIND_ACTION,
        GucContext::Suset,
        GucFlags::empty(),
    );
    GucRegistry::define_enum_guc(
        c"braid.clock_skew_action",
        c"What becomes of a transaction that was committed ahead of this node's clock by more than braid.clock_skew_limit.",
        c"warning applies it, and says so in the server's log; pause holds the subscription until this node's clock has come near.",
        &CLOCK_SKEW_ACTION,
        GucContext::Sighup,
        GucFlags::empty(),
    );
    GucRegistry::define_enum_guc(
        c"braid.ddl_replication",
        c"Send statements that change the schema to the nodes that receive from this one.",
        c"auto sends them in a database that is a member of a group. Subscriptions with replicate_ddl run them. Off in a session, its statements stay on this node.",
        &DDL_REPLICATION,
        GucContext::Suset,
        GucFlags::empty(),
    );
    GucRegistry::define_enum_guc(
        c"braid.conflict_history",
        c"Record conflicts with both rows in braid.conflict_history.",
        c"on leaves out those whose writer is known to have seen the row that is here; all records them too; off records none. \
          Conflicts are counted in any case. With off, a value that loses is lost.",
        &CONFLICT_HISTORY,
        GucContext::Sighup,
        GucFlags::empty(),
    );
    GucRegistry::define_enum_guc(
        c"braid.remember_deletions",
        c"Remember which rows were deleted, so that older changes from other nodes do not bring them back.",
        c"With auto, where changes of the same row can come from several nodes. It takes a worker process and a replication slot, \
          and local WAL is read once more.",
        &REMEMBER_DELETIONS,
        GucContext::Sighup,
        GucFlags::empty(),
    );
}

/// Statements that are sent beside those that change the schema.
fn register_ddl_options() {
    GucRegistry::define_bool_guc(
        c"braid.replicate_refresh",
        c"Send REFRESH MATERIALIZED VIEW as statements that change the schema are sent.",
        c"Each node runs it at its place among the changes. Off, each node refreshes its views by itself.",
        &REPLICATE_REFRESH,
        GucContext::Suset,
        GucFlags::empty(),
    );
    GucRegistry::define_bool_guc(
        c"braid.replicate_roles",
        c"Send statements about roles as statements that change the schema are sent.",
        c"A password is sent in the form in which it is stored. Statements that are run in other databases are not sent.",
        &REPLICATE_ROLES,
        GucContext::Suset,
        GucFlags::empty(),
    );
}

/// Settings of retries.
fn of_retries() -> [Int; 3] {
    [
        Int {
            name: c"braid.retry_interval",
            short: c"Pause before a subscription's workers are started again after a failure.",
            long: c"Doubles with each failure in a row, up to braid.retry_interval_max.",
            setting: &RETRY_INTERVAL_MS,
            range: (10, 3_600_000),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MS,
        },
        Int {
            name: c"braid.retry_interval_max",
            short: c"Longest pause before a subscription's workers are started again after a failure.",
            long: c"",
            setting: &RETRY_INTERVAL_MAX_MS,
            range: (10, 86_400_000),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MS,
        },
        Int {
            name: c"braid.stopped_retry_interval",
            short: c"Pause before a subscription that has stopped with an error is tried again, if a change here or at the provider may have cured it.",
            long: c"Doubles with each stop in a row, up to 32 times. 0 leaves it to braid.enable_subscription.",
            setting: &STOPPED_RETRY_INTERVAL_MS,
            range: (0, 86_400_000),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MS,
        },
    ]
}

/// Register all settings.
pub fn register() {
    let ints = [
        Int {
            name: c"braid.copy_workers_per_subscription",
            short: c"Number of tables that one subscription copies at the same time.",
            long: c"Each needs one of max_worker_processes and a connection to the provider.",
            setting: &COPY_WORKERS,
            range: (1, 64),
            context: GucContext::Sighup,
            flags: GucFlags::empty(),
        },
        Int {
            name: c"braid.apply_buffer_size",
            short: c"Shared memory for received changes that are not applied yet, for each subscription.",
            long: c"Larger transactions are applied while they are received. Takes effect when a subscription's \
                workers start.",
            setting: &APPLY_BUFFER_MB,
            range: (1, 65_536),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MB,
        },
        Int {
            name: c"braid.max_subscriptions",
            short: c"Number of subscriptions that can run in this server at the same time.",
            long: c"",
            setting: &MAX_SUBSCRIPTIONS,
            range: (1, 1000),
            context: GucContext::Postmaster,
            flags: GucFlags::empty(),
        },
        Int {
            name: c"braid.orphan_check_interval",
            short: c"Pause between two looks for rows whose referenced row is missing.",
            long: c"In tables for which braid.set_foreign_key_rule was called. 0: they are not looked for.",
            setting: &ORPHAN_CHECK_INTERVAL_MS,
            range: (0, i32::MAX),
            context: GucContext::Sighup,
            flags: GucFlags::UNIT_MS,
        },
    ];
    let preloading = plain::process_shared_preload_libraries_in_progress();
    for int in of_appliers()
        .into_iter()
        .chain(of_conflicts())
        .chain(of_retries())
        .chain(of_clocks())
        .chain(of_parking())
        .chain(for_tests::all())
        .chain(timers::all())
        .chain(balancer::all())
        .chain(ints)
    {
        // Too late for it when a session loads the library by itself: create_node then gives a
        // hint.
        if matches!(int.context, GucContext::Postmaster) && !preloading {
            continue;
        }
        GucRegistry::define_int_guc(
            int.name,
            int.short,
            int.long,
            int.setting,
            int.range.0,
            int.range.1,
            int.context,
            int.flags,
        );
    }
    for_tests::register();
    crate::versions::register();
    register_choices();
    register_ddl_options();
    // A misspelled name is an error then, and not a setting of its own that nothing reads.
    plain::MarkGUCPrefixReserved(c"braid");
}

fn size(value: i32) -> usize {
    usize::try_from(value).unwrap_or(1)
}

fn milliseconds(value: i32) -> Duration {
    Duration::from_millis(u64::try_from(value).unwrap_or(1000))
}

/// Of milliseconds where 0 stands for none.
fn micros(milliseconds: i32) -> Option<i64> {
    (milliseconds > 0).then(|| i64::from(milliseconds) * 1000)
}

/// `braid.appliers_per_subscription`.
#[must_use]
pub fn appliers_per_subscription() -> usize {
    size(APPLIERS.get())
}

/// `braid.min_appliers_per_subscription`; `None` when their number does not follow the load.
#[must_use]
pub fn min_appliers_per_subscription() -> Option<usize> {
    usize::try_from(MIN_APPLIERS.get())
        .ok()
        .filter(|least| *least > 0)
}

/// `braid.rows_per_applier`; `None` when it does not count.
#[must_use]
pub fn rows_per_applier() -> Option<f64> {
    Some(f64::from(ROWS_PER_APPLIER.get())).filter(|rows| *rows > 0.0)
}

/// `braid.copy_workers_per_subscription`.
#[must_use]
pub fn copy_workers_per_subscription() -> usize {
    size(COPY_WORKERS.get())
}

/// `braid.apply_buffer_size` in bytes.
#[must_use]
pub fn apply_buffer_bytes() -> u64 {
    u64::try_from(APPLY_BUFFER_MB.get()).unwrap_or(16) * 1024 * 1024
}

/// `braid.max_subscriptions`.
#[must_use]
pub fn max_subscriptions() -> usize {
    size(MAX_SUBSCRIPTIONS.get())
}

/// `braid.ddl_replication`.
#[must_use]
pub fn ddl_replication() -> DdlReplication {
    DDL_REPLICATION.get()
}

/// `braid.replicate_refresh`.
#[must_use]
pub(crate) fn replicate_refresh() -> bool {
    REPLICATE_REFRESH.get()
}

/// `braid.replicate_roles`.
#[must_use]
pub(crate) fn replicate_roles() -> bool {
    REPLICATE_ROLES.get()
}

/// `braid.conflict_history`.
#[must_use]
pub fn conflict_history() -> ConflictHistory {
    CONFLICT_HISTORY.get()
}

/// `braid.remember_deletions`.
#[must_use]
pub fn remember_deletions() -> RememberDeletions {
    REMEMBER_DELETIONS.get()
}

/// `braid.conflict_history_retention`; `None` for ever.
#[must_use]
pub fn conflict_history_retention_minutes() -> Option<i32> {
    Some(CONFLICT_HISTORY_RETENTION_MIN.get()).filter(|minutes| *minutes > 0)
}

/// `braid.conflict_function_timeout` in milliseconds; `None` for no limit.
#[must_use]
pub fn conflict_function_timeout_ms() -> Option<i32> {
    Some(CONFLICT_FUNCTION_TIMEOUT_MS.get()).filter(|limit| *limit > 0)
}

/// `braid.querier_timeout`.
#[must_use]
pub fn querier_timeout() -> Duration {
    milliseconds(QUERIER_TIMEOUT_MS.get())
}

/// `braid.routing_wait`.
#[must_use]
pub(crate) fn routing_wait() -> Duration {
    milliseconds(ROUTING_WAIT_MS.get())
}

/// `braid.peer_away_limit` in seconds; `None` for no limit.
#[must_use]
pub fn peer_away_limit() -> Option<i32> {
    let limit = PEER_AWAY_LIMIT_S.get();
    (limit > 0).then_some(limit)
}

/// `braid.keep_commits_older_than`, in transactions.
#[must_use]
pub fn keep_commits_older_than() -> i32 {
    KEEP_COMMITS_OLDER_THAN.get()
}

/// `braid.max_clock_wait`; `None` for never.
#[must_use]
pub(crate) fn max_clock_wait() -> Option<Duration> {
    let limit = MAX_CLOCK_WAIT_MS.get();
    (limit > 0).then(|| milliseconds(limit))
}

/// `braid.clock_behind_action`.
#[must_use]
pub(crate) fn clock_behind_action() -> BehindAction {
    CLOCK_BEHIND_ACTION.get()
}

/// `braid.clock_skew_warning` in microseconds; `None` for never.
#[must_use]
pub fn clock_skew_warning() -> Option<i64> {
    micros(CLOCK_SKEW_WARNING_MS.get())
}

/// `braid.clock_skew_limit` in microseconds; `None` for no limit.
#[must_use]
pub fn clock_skew_limit() -> Option<i64> {
    micros(CLOCK_SKEW_LIMIT_MS.get())
}

/// `braid.clock_skew_action`.
#[must_use]
pub fn clock_skew_action() -> SkewAction {
    CLOCK_SKEW_ACTION.get()
}

/// `braid.max_parked`.
#[must_use]
pub(crate) fn max_parked() -> u64 {
    u64::try_from(MAX_PARKED.get()).unwrap_or(1)
}

/// `braid.max_parked_size` in bytes.
#[must_use]
pub(crate) fn max_parked_bytes() -> u64 {
    u64::try_from(MAX_PARKED_SIZE_MB.get()).unwrap_or(1) * 1024 * 1024
}

/// `braid.orphan_check_interval`; `None` for never.
#[must_use]
pub fn orphan_check_interval() -> Option<Duration> {
    Some(ORPHAN_CHECK_INTERVAL_MS.get())
        .filter(|interval| *interval > 0)
        .map(milliseconds)
}

/// `braid.retry_interval`.
#[must_use]
pub fn retry_interval() -> Duration {
    milliseconds(RETRY_INTERVAL_MS.get())
}

/// `braid.retry_interval_max`.
#[must_use]
pub fn retry_interval_max() -> Duration {
    milliseconds(RETRY_INTERVAL_MAX_MS.get())
}

/// `braid.stopped_retry_interval`; `None` when it is 0.
#[must_use]
pub fn stopped_retry_interval() -> Option<Duration> {
    Some(milliseconds(STOPPED_RETRY_INTERVAL_MS.get())).filter(|pause| !pause.is_zero())
}

/// `wal_receiver_status_interval`; `None` when it is 0.
#[must_use]
pub fn status_interval() -> Option<Duration> {
    let seconds = plain::wal_receiver_status_interval();
    u64::try_from(seconds)
        .ok()
        .filter(|seconds| *seconds > 0)
        .map(Duration::from_secs)
}
