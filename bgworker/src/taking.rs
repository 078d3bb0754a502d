//! How much an applier takes at once, and whether transactions are joined into one: by the
//! subscription's way of applying.

pub use braid_ring::Grain;

use crate::subscription_option::ApplyMode;

/// Small transactions are taken many at a time: to hand each to another process mostly costs more
/// than to apply it. Larger ones are taken one by one, so that they are applied side by side. Where
/// the leader has found that all appliers are faster than one, so are small ones.
const GRAIN: Grain = Grain { run: 128, small: 2 };

/// Batch mode joins transactions that are small beside the cost of a commit, and not so many that
/// readers wait for it, or locks are held, for longer than some milliseconds.
const BATCH: Grain = Grain {
    run: 1024,
    small: 128,
};

/// Batch mode where all appliers together are faster than one: the more changes two batches have,
/// the sooner they have a key in common, and one waits for the whole of the other. A quarter of
/// them still saves nearly all that a commit costs.
const SHARED_BATCH: Grain = Grain {
    run: 256,
    small: 128,
};

/// Batch mode where changes of a row are made one, and one applier has it: the more are joined, the
/// fewer are left to be applied. The leader's list of transactions is to hold twice as many, as
/// below.
const CONSOLIDATE: Grain = Grain {
    run: 4096,
    small: 128,
};

/// Aggregate mode regroups changes: the more, the longer the runs of a table. The leader's list of
/// transactions is to hold twice as many, so that it goes on meanwhile.
const AGGREGATE: Grain = Grain {
    run: 2048,
    small: 1024,
};

/// How transactions become local ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One by one.
    Single,
    /// Small ones are joined.
    Batch,
    /// As that, and many changes of a row become one: the more are joined, the more of them.
    Consolidate,
    /// As that, and their changes are regrouped by table.
    Aggregate,
}

impl Mode {
    /// The mode of a subscription with these options.
    #[must_use]
    pub fn of(apply_mode: ApplyMode, consolidate: bool) -> Self {
        match apply_mode {
            ApplyMode::Batch if consolidate => Self::Consolidate,
            ApplyMode::Batch => Self::Batch,
            ApplyMode::Aggregate => Self::Aggregate,
            ApplyMode::Parallel | ApplyMode::Serial => Self::Single,
        }
    }

    /// Whether transactions are committed together: the more, the less each costs.
    #[must_use]
    pub fn joins(self) -> bool {
        self != Self::Single
    }

    /// Returns how much is taken at once. `singly`: one by one, or what comes near it in this mode.
    /// `relaxed`: commits may overtake each other. Then whatever is taken together with a
    /// transaction that waits for a lock would wait for nothing.
    #[must_use]
    pub fn grain(self, relaxed: bool, singly: bool) -> Grain {
        match self {
            Self::Single if singly || relaxed => Grain::ONE,
            Self::Single => GRAIN,
            Self::Batch | Self::Consolidate if singly => SHARED_BATCH,
            Self::Batch => BATCH,
            Self::Consolidate => CONSOLIDATE,
            Self::Aggregate => AGGREGATE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_are_taken_one_by_one_where_others_could_take_them() {
        assert_eq!(Mode::Single.grain(false, true), Grain::ONE);
        assert_eq!(Mode::Single.grain(true, false), Grain::ONE);
        assert!(Mode::Single.grain(false, false).run > 1);
        for mode in [Mode::Batch, Mode::Consolidate] {
            let (alone, shared) = (mode.grain(false, false), mode.grain(false, true));
            assert!(shared.run < alone.run && shared.run > 1);
        }
    }

    #[test]
    fn a_transaction_that_is_not_small_fills_a_run() {
        let grain = Grain { run: 8, small: 2 };
        assert_eq!(
            [0, 1, 2, 3].map(|changes| grain.weight(changes)),
            [1, 1, 2, 8]
        );
    }
}
