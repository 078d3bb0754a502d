//! How many transactions an applier claims at once, and whether they are joined into one, depending
//! on the subscription's options.

pub use braid_ring::Grain;

use crate::subscription_option::ApplyMode;

/// Small transactions are claimed many at a time: handing each to another process mostly costs more
/// than applying it. Larger ones are claimed one by one, so that they are applied in parallel. If
/// the leader has found that all appliers are faster than one, so are small ones.
const GRAIN: Grain = Grain { run: 128, small: 2 };

/// Batch mode joins transactions that are small compared with the cost of a commit. Their number is
/// limited, so that readers do not wait for the commit, nor are locks held, for longer than some
/// milliseconds.
const BATCH: Grain = Grain {
    run: 1024,
    small: 128,
};

/// Batch mode if all appliers together are faster than one. The more changes two batches have, the
/// sooner they have a key in common, and one waits for all of the other. A quarter of them still
/// saves nearly the whole cost of commits.
const SHARED_BATCH: Grain = Grain {
    run: 256,
    small: 128,
};

/// Batch mode that consolidates the changes of a row, with one applier: the more transactions are
/// joined, the fewer changes are left. The leader's list of transactions must hold twice as many,
/// as for [`AGGREGATE`].
const CONSOLIDATE: Grain = Grain {
    run: 4096,
    small: 128,
};

/// Aggregate mode regroups changes: the more there are, the longer the runs of a table. The
/// leader's list of transactions must hold twice as many, so that it can continue in the meantime.
const AGGREGATE: Grain = Grain {
    run: 2048,
    small: 1024,
};

/// How remote transactions become local ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Each becomes one.
    Single,
    /// Small transactions are joined.
    Batch,
    /// As `Batch`, and several changes of a row become one.
    Consolidate,
    /// As `Batch`, and changes are regrouped by table.
    Aggregate,
}

impl Mode {
    /// Returns the mode of a subscription with these options.
    #[must_use]
    pub fn of(apply_mode: ApplyMode, consolidate: bool) -> Self {
        match apply_mode {
            ApplyMode::Batch if consolidate => Self::Consolidate,
            ApplyMode::Batch => Self::Batch,
            ApplyMode::Aggregate => Self::Aggregate,
            ApplyMode::Parallel | ApplyMode::Serial => Self::Single,
        }
    }

    /// Returns whether transactions are committed together, which saves the cost of commits.
    #[must_use]
    pub fn joins(self) -> bool {
        self != Self::Single
    }

    /// Returns how many transactions are claimed at once. `singly`: one by one, or the closest to
    /// it in this mode. `relaxed`: commits may overtake each other; then a run of several would
    /// wait with its first transaction that waits for a lock.
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
