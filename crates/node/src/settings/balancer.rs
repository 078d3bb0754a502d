//! The settings of the balancer of routing. The settings of the group leader's server count.

use std::time::Duration;

use braid_routing::{Settings, Spread};
use pgrx::{GucContext, GucFlags, GucSetting};

use super::{Int, milliseconds};
use crate::tenant_load::COUNTERS;

static PERIOD: GucSetting<i32> = GucSetting::<i32>::new(1_000);
static PAUSE: GucSetting<i32> = GucSetting::<i32>::new(5_000);
static PERIODS: GucSetting<i32> = GucSetting::<i32>::new(2);
static THRESHOLD: GucSetting<i32> = GucSetting::<i32>::new(50);
static LEAST_WRITES: GucSetting<i32> = GucSetting::<i32>::new(1_000);
static LARGEST_SPREAD: GucSetting<i32> = GucSetting::<i32>::new(64);

/// The settings of this module.
pub(super) fn all() -> [Int; 6] {
    let int = |name, short, long, setting, range, flags| Int {
        name,
        short,
        long,
        setting,
        range,
        context: GucContext::Sighup,
        flags,
    };
    [
        int(
            c"braid.balancer_period",
            c"How often the balancer of routing looks at the writes of tenants.",
            c"The setting of the group's leader counts, as for all settings of the balancer.",
            &PERIOD,
            (200, 3_600_000),
            GucFlags::UNIT_MS,
        ),
        int(
            c"braid.balancer_pause",
            c"Least time between two decisions of the balancer for one table.",
            c"At least as long as braid.balancer_period.",
            &PAUSE,
            (200, 86_400_000),
            GucFlags::UNIT_MS,
        ),
        int(
            c"braid.balancer_periods",
            c"For how many periods one after the other a tenant has to be hot before it gets a rule.",
            c"",
            &PERIODS,
            (1, 1_000),
            GucFlags::empty(),
        ),
        int(
            c"braid.balancer_threshold",
            c"Share of the writes of a table from which a tenant is hot, in percent of the even part of one shard.",
            c"With 64 shards and 50, a tenant is hot from 0.78 % of all writes on.",
            &THRESHOLD,
            (1, 1_000_000),
            GucFlags::empty(),
        ),
        int(
            c"braid.balancer_least_writes",
            c"Number of writes of a table in a period below which nothing is decided.",
            c"",
            &LEAST_WRITES,
            (1, i32::MAX),
            GucFlags::empty(),
        ),
        int(
            c"braid.balancer_largest_spread",
            c"Largest number of shards over which the balancer spreads a tenant.",
            c"Rounded down to a power of two.",
            &LARGEST_SPREAD,
            (2, 32_768),
            GucFlags::empty(),
        ),
    ]
}

/// The settings of the balancer, as its crate has them.
#[must_use]
pub fn balancer() -> Settings {
    let defaults = Settings::default();
    let number = |setting: &GucSetting<i32>| u32::try_from(setting.get()).unwrap_or(1);
    let period = milliseconds(PERIOD.get()).max(Duration::from_millis(1));
    let threshold = number(&THRESHOLD).saturating_mul(10);
    let largest = number(&LARGEST_SPREAD).max(1);
    Settings {
        period,
        pause: milliseconds(PAUSE.get()).max(period),
        threshold,
        part: defaults.part.min(threshold),
        confirm: number(&PERIODS),
        least_writes: number(&LEAST_WRITES).into(),
        largest: Spread::new(1 << largest.ilog2()).unwrap_or(defaults.largest),
        counters: COUNTERS,
        ..defaults
    }
}
