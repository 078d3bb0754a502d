//! Values that contain a time, a node and a count, and how the next one is found. Run by sessions.
//!
//! A node's values come from successive ticks. A tick contains a time and a count. No tick is used
//! twice: the next one is the clock's or the one after the last, whichever is later. So a clock
//! that steps back repeats nothing, and a burst borrows from the future.
//!
//! | layout | time | node | count |
//! |---|---|---|---|
//! | [`LONG`] | 41 bits of 1 ms | 10 bits | 12 bits |
//! | [`SAFE`] | 40 bits of 2 ms | 8 bits | 5 bits |
//!
//! The time counts from 2025-01-01 UTC; both layouts last for 69 years. Values are positive, and
//! those of [`SAFE`] are below 2^53, so that a double represents them exactly.
//!
//! Not for: where ticks are kept (`node/snowflake.rs`).

/// 2025-01-01 00:00:00 UTC in milliseconds since 1970.
pub const EPOCH_MS: u64 = 1_735_689_600_000;
/// Milliseconds of ticks that are reserved durably ahead of use.
const AHEAD_MS: u64 = 2_000;

/// Bits of the parts of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    unit_ms: u64,
    time_bits: u32,
    node_bits: u32,
    count_bits: u32,
}

/// 63 bits.
pub const LONG: Layout = Layout {
    unit_ms: 1,
    time_bits: 41,
    node_bits: 10,
    count_bits: 12,
};

/// 53 bits.
pub const SAFE: Layout = Layout {
    unit_ms: 2,
    time_bits: 40,
    node_bits: 8,
    count_bits: 5,
};

impl Layout {
    /// Returns the largest node number.
    #[must_use]
    pub const fn most_nodes(self) -> u16 {
        (1 << self.node_bits) - 1
    }

    /// Returns the first tick at a time, in milliseconds since 1970.
    #[must_use]
    pub const fn floor(self, now_ms: u64) -> u64 {
        (now_ms.saturating_sub(EPOCH_MS) / self.unit_ms) << self.count_bits
    }

    /// Returns the tick after `last` at a time.
    #[must_use]
    pub const fn next(self, last: u64, now_ms: u64) -> u64 {
        let (after, floor) = (last.saturating_add(1), self.floor(now_ms));
        if floor > after { floor } else { after }
    }

    /// Returns the tick up to which ticks must be reserved durably before `tick` is used.
    #[must_use]
    pub const fn ahead(self, tick: u64) -> u64 {
        tick.saturating_add((AHEAD_MS / self.unit_ms) << self.count_bits)
    }

    /// Returns the value of a tick on a node. `None` if the time or the node number has too many
    /// bits.
    #[must_use]
    pub const fn value(self, tick: u64, node: u16) -> Option<i64> {
        let time = tick >> self.count_bits;
        if time >> self.time_bits != 0 || node == 0 || node > self.most_nodes() {
            return None;
        }
        let count = tick & ((1 << self.count_bits) - 1);
        let value = (time << (self.node_bits + self.count_bits))
            | ((node as u64) << self.count_bits)
            | count;
        Some(value.cast_signed())
    }

    /// Returns the time of a value, in milliseconds since 1970.
    #[must_use]
    pub const fn time_ms(self, value: i64) -> u64 {
        (value.cast_unsigned() >> (self.node_bits + self.count_bits)) * self.unit_ms + EPOCH_MS
    }

    /// Returns the node number of a value.
    #[must_use]
    pub fn node(self, value: i64) -> u16 {
        let bits = (value.cast_unsigned() >> self.count_bits) & u64::from(self.most_nodes());
        u16::try_from(bits).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const LAYOUTS: [Layout; 2] = [LONG, SAFE];
    const YEAR_MS: u64 = 365 * 24 * 3600 * 1000;

    #[test]
    fn bits_of_the_layouts() {
        let all = |layout: Layout| layout.time_bits + layout.node_bits + layout.count_bits;
        assert_eq!((all(LONG), all(SAFE)), (63, 53));
        assert_eq!((LONG.most_nodes(), SAFE.most_nodes()), (1023, 255));
        for layout in LAYOUTS {
            let in_use = EPOCH_MS + 69 * YEAR_MS;
            assert!(layout.value(layout.floor(in_use), 1).is_some());
            let over = EPOCH_MS + 70 * YEAR_MS;
            assert_eq!(layout.value(layout.floor(over), 1), None);
        }
        let last = SAFE.value(SAFE.floor(EPOCH_MS + 69 * YEAR_MS), 255);
        assert!(last.is_some_and(|value| value < 1 << 53));
    }

    #[test]
    fn nodes_that_do_not_fit_are_refused() {
        assert_eq!(SAFE.value(1, 256), None);
        assert_eq!(LONG.value(1, 1024), None);
        assert_eq!(LONG.value(1, 0), None);
    }

    #[test]
    fn a_burst_borrows_from_the_time_to_come() {
        for layout in LAYOUTS {
            let (mut last, mut seen) = (0, HashSet::new());
            for _ in 0..100_000 {
                last = layout.next(last, EPOCH_MS + 1000);
                assert!(seen.insert(layout.value(last, 7)));
            }
        }
    }

    proptest! {
        #[test]
        fn values_rise_whatever_the_clock_does(clock in proptest::collection::vec(0_u64..1 << 38, 1..200)) {
            for layout in LAYOUTS {
                let (mut last, mut value) = (0, 0);
                for ms in &clock {
                    last = layout.next(last, EPOCH_MS + ms);
                    let next = layout.value(last, 200).unwrap_or_default();
                    prop_assert!(next > value);
                    value = next;
                }
            }
        }

        #[test]
        fn a_value_tells_its_time_and_node(ms in 0_u64..1 << 41, node in 1_u16..256) {
            for layout in LAYOUTS {
                let value = layout.value(layout.floor(EPOCH_MS + ms), node).unwrap_or_default();
                prop_assert_eq!(layout.node(value), node);
                prop_assert_eq!(layout.time_ms(value), EPOCH_MS + ms / layout.unit_ms * layout.unit_ms);
            }
        }

        #[test]
        fn nodes_never_meet(a in 1_u16..256, b in 1_u16..256, one in 0_u64..1 << 44, other in 0_u64..1 << 44) {
            for layout in LAYOUTS {
                if a != b {
                    prop_assert_ne!(layout.value(one, a), layout.value(other, b));
                }
            }
        }

        #[test]
        fn what_is_written_down_ahead_covers_the_tick(tick in 0_u64..1 << 52) {
            for layout in LAYOUTS {
                prop_assert!(layout.ahead(tick) > tick);
            }
        }
    }
}
