//! Waits of leaders and appliers, under names of our own: in pg_stat_activity from PostgreSQL 17
//! on, in braid.apply_workers everywhere.
//!
//! A process says once where its waits are to be shown (`show_in`); each wait then costs two
//! stores.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::compat;

/// The event that a process waits for. Each is set by the process itself while it sleeps; none is
/// durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Wait {
    /// The leader: for something to come from the provider.
    Provider = 1,
    /// The leader: for appliers to make room in the apply buffer.
    Appliers = 2,
    /// The leader: for tables to be copied.
    Tables = 3,
    /// The leader, and workers that copy: held back by the rate limit.
    RateLimit = 4,
    /// An applier: for something to apply.
    Work = 5,
    /// An applier: for a transaction that its own depends on.
    Dependency = 6,
    /// An applier: for its turn to commit.
    Turn = 7,
    /// An applier: for the rest of a transaction that it applies as it comes.
    Rest = 8,
    /// An applier: for a pause between two attempts to be over.
    Retry = 9,
    /// Any session: at a commit, for the clock to be past the newest version that this node has
    /// seen.
    Clock = 10,
    /// An applier: for a node's answer about a row.
    Querier = 11,
    /// The leader: for this node's clock to come near the time of a transaction.
    Ahead = 12,
    /// Any session: for the group to agree up to the time of a routed table's row.
    Routing = 13,
    /// A session: for the versions of tables that its transaction is to see.
    Versions = 14,
}

const ALL: [Wait; 14] = [
    Wait::Provider,
    Wait::Appliers,
    Wait::Tables,
    Wait::RateLimit,
    Wait::Work,
    Wait::Dependency,
    Wait::Turn,
    Wait::Rest,
    Wait::Retry,
    Wait::Clock,
    Wait::Querier,
    Wait::Ahead,
    Wait::Routing,
    Wait::Versions,
];

static EVENTS: [AtomicU32; ALL.len()] = [const { AtomicU32::new(0) }; ALL.len()];
/// Where the waits of this process are shown.
static SHOWN: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

impl Wait {
    /// The wait's name in the views.
    #[must_use]
    pub fn name(self) -> &'static CStr {
        match self {
            Self::Provider => c"BraidLeaderProvider",
            Self::Appliers => c"BraidLeaderAppliers",
            Self::Tables => c"BraidLeaderTables",
            Self::RateLimit => c"BraidRateLimit",
            Self::Work => c"BraidApplierWork",
            Self::Dependency => c"BraidApplierDependency",
            Self::Turn => c"BraidApplierTurn",
            Self::Rest => c"BraidApplierRest",
            Self::Retry => c"BraidApplierRetry",
            Self::Clock => c"BraidClock",
            Self::Querier => c"BraidApplierQuerier",
            Self::Ahead => c"BraidLeaderClock",
            Self::Routing => c"BraidRouting",
            Self::Versions => c"BraidVersions",
        }
    }

    /// The wait with a number in shared memory; `None` for 0, and for unknown numbers.
    #[must_use]
    pub fn from_u32(raw: u32) -> Option<Self> {
        ALL.into_iter().find(|wait| *wait as u32 == raw)
    }

    /// PostgreSQL's number for it.
    fn event(self) -> u32 {
        let Some(place) = EVENTS.get((self as usize).saturating_sub(1)) else {
            return compat::wait_event(self.name());
        };
        let known = place.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        let event = compat::wait_event(self.name());
        place.store(event, Ordering::Relaxed);
        event
    }
}

/// Has the waits of this process shown at this place from now on.
pub fn show_in(place: &'static AtomicU32) {
    SHOWN.store(std::ptr::from_ref(place).cast_mut(), Ordering::Relaxed);
}

fn shown() -> Option<&'static AtomicU32> {
    let place = SHOWN.load(Ordering::Relaxed);
    // SAFETY: null, or what `show_in` was given, which is never freed.
    (!place.is_null()).then(|| unsafe { &*place })
}

/// Show `wait`, if it has a name, while `sleep` runs, which is given PostgreSQL's number for it.
/// When that raises an error the process shows it until its next wait, or its end.
pub(crate) fn during<T>(wait: Option<Wait>, sleep: impl FnOnce(u32) -> T) -> T {
    let Some(wait) = wait else {
        return sleep(pgrx::pg_sys::PG_WAIT_EXTENSION);
    };
    let shown = shown();
    if let Some(place) = shown {
        place.store(wait as u32, Ordering::Relaxed);
    }
    let value = sleep(wait.event());
    if let Some(place) = shown {
        place.store(0, Ordering::Relaxed);
    }
    value
}
