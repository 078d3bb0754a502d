//! The intervals of the periodic work of Braid's processes.
//!
//! These settings exist for tests, which would else wait for a minute until something old is
//! removed. They are in no list of settings (`HIDDEN`); `SHOW` and `ALTER SYSTEM` know them by
//! name. A process reads its settings again at SIGHUP.

use std::time::Duration;

use pgrx::{GucContext, GucFlags, GucSetting};

use super::for_tests::HIDDEN;
use super::{Int, milliseconds};

static SUPERVISOR: GucSetting<i32> = GucSetting::<i32>::new(30_000);
static MANAGER: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static PURGE: GucSetting<i32> = GucSetting::<i32>::new(60_000);
static COLLECTOR: GucSetting<i32> = GucSetting::<i32>::new(5_000);
static CLOCK: GucSetting<i32> = GucSetting::<i32>::new(10_000);

/// The settings of this module.
pub(super) fn all() -> [Int; 5] {
    let timer = |name, short, setting| Int {
        name,
        short,
        long: c"For tests.",
        setting,
        range: (100, 3_600_000),
        context: GucContext::Sighup,
        flags: GucFlags::UNIT_MS | HIDDEN,
    };
    [
        timer(
            c"braid.supervisor_interval",
            c"Pause between two looks at the databases of the server.",
            &SUPERVISOR,
        ),
        timer(
            c"braid.manager_interval",
            c"Pause between two looks at what runs in a database.",
            &MANAGER,
        ),
        timer(
            c"braid.purge_interval",
            c"Pause between two removals of what is old.",
            &PURGE,
        ),
        timer(
            c"braid.collector_interval",
            c"Pause after which the collector of deletions saves its position; twice as long for its list of tables.",
            &COLLECTOR,
        ),
        timer(
            c"braid.clock_interval",
            c"Pause between two comparisons with the clock of the provider.",
            &CLOCK,
        ),
    ]
}

/// `braid.supervisor_interval`.
#[must_use]
pub fn supervisor() -> Duration {
    milliseconds(SUPERVISOR.get())
}

/// `braid.manager_interval`.
#[must_use]
pub fn manager() -> Duration {
    milliseconds(MANAGER.get())
}

/// `braid.purge_interval`.
#[must_use]
pub fn purge() -> Duration {
    milliseconds(PURGE.get())
}

/// The pause after which a removal is tried again that could not be done yet: a twelfth of
/// `braid.purge_interval`.
#[must_use]
pub fn purge_again() -> Duration {
    purge() / 12
}

/// `braid.collector_interval`: after it the collector of deletions saves its position.
#[must_use]
pub fn collector_save() -> Duration {
    milliseconds(COLLECTOR.get())
}

/// The pause after which the collector of deletions reads the list of tables again: twice
/// `braid.collector_interval`.
#[must_use]
pub fn collector_list() -> Duration {
    collector_save() * 2
}

/// `braid.clock_interval`, in microseconds.
#[must_use]
pub fn clock_micros() -> i64 {
    i64::from(CLOCK.get()) * 1000
}
