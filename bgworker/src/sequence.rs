//! Numbers of sequences that several nodes draw from: which node has which block, and when the
//! next block is needed. Run by sessions that create sequences, by appliers, and by the sequences
//! process of a group.
//!
//! A sequence's numbers are counted from 1, which stands for its START value. Each node has a first
//! block by its node number alone, so no agreement is needed for it. Further blocks lie behind all
//! first blocks, and are assigned by the group's log. No number is in two blocks.
//!
//! Not for: values that hold a time (`snowflake.rs`).

use std::fmt;

/// Nodes that a group can have had: the largest node number.
pub const NODES: u64 = 1023;
/// The largest number that can be assigned.
const LAST_NUMBER: u64 = i64::MAX.unsigned_abs();
/// The largest standard block: a billion, so that a value tells its block.
const LARGEST_BLOCK: u64 = 1_000_000_000;
/// Blocks into which the numbers of a narrow type are divided.
const PARTS: u64 = 64;
/// Node numbers below have first blocks of full size where numbers are scarce.
const FEW: u64 = 15;
/// Node numbers below have smaller ones; all others have the smallest.
const MANY: u64 = 127;
/// Blocks below this size have a reserve from the start.
const SMALL: u64 = 100_000;
/// Values that other nodes are told of ahead of use.
const AHEAD_VALUES: i64 = 1000;
/// Seconds of use that are left when the next block is taken.
const AHEAD: f64 = 10.0;

/// A sequence's kind: how nodes come to different values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Each node has blocks of its own.
    Range,
    /// Each node has every so many-th number.
    Step,
    /// Values of 64 bits hold a time, the node and a count.
    Snowflake,
    /// Values of 53 bits hold a time, the node and a count.
    Snowflake53,
    /// Values travel in the stream; one node draws at a time.
    Follow,
    /// Nobody changes the sequence.
    Local,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Range,
        Self::Step,
        Self::Snowflake,
        Self::Snowflake53,
        Self::Follow,
        Self::Local,
    ];

    /// Its name.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Range => "range",
            Self::Step => "step",
            Self::Snowflake => "snowflake",
            Self::Snowflake53 => "snowflake53",
            Self::Follow => "follow",
            Self::Local => "local",
        }
    }

    /// The kind of this name.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// Whether a sequence can have it from its creation on, without a change of a column.
    #[must_use]
    pub const fn is_native(self) -> bool {
        !matches!(self, Self::Snowflake | Self::Snowflake53)
    }
}

/// The group's agreement on a sequence, or what came with the statement that created it: a kind, a
/// size, a base and a span, in words that are separated by spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The kind.
    pub kind: Kind,
    /// Size of a block, or of a step; 0: the standard one.
    pub size: u64,
    /// Numbers up to this one are in no block.
    pub base: u64,
    /// How many numbers there are; 0: as the sequence was created.
    pub span: u64,
}

impl Setting {
    /// The setting of a sequence that stays as it is.
    pub const LOCAL: Self = Self {
        kind: Kind::Local,
        size: 0,
        base: 0,
        span: 0,
    };

    /// The setting of these words; `None` for others.
    #[must_use]
    pub fn parse(words: &str) -> Option<Self> {
        let mut words = words.split(' ');
        let setting = Self {
            kind: Kind::parse(words.next()?)?,
            size: words.next()?.parse().ok()?,
            base: words.next()?.parse().ok()?,
            span: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(setting)
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, base, span) = (self.size, self.base, self.span);
        write!(f, "{} {size} {base} {span}", self.kind.word())
    }
}

/// Numbers that one node has: from `start` to `end`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The first number.
    pub start: u64,
    /// The last number.
    pub end: u64,
}

impl Block {
    /// How many numbers it has.
    #[must_use]
    pub const fn size(self) -> u64 {
        (self.end - self.start).saturating_add(1)
    }

    /// Whether it has a number.
    #[must_use]
    pub const fn has(self, number: u64) -> bool {
        self.start <= number && number <= self.end
    }
}

/// The values of a sequence as numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Values {
    /// The value of number 1: the sequence's own START.
    pub first: i64,
    /// Its own INCREMENT. Its sign says the direction.
    pub increment: i64,
    /// Its own MINVALUE.
    pub least: i64,
    /// Its own MAXVALUE.
    pub most: i64,
}

impl Values {
    /// How many numbers there are.
    #[must_use]
    pub fn span(&self) -> u64 {
        let far = if self.increment < 0 {
            i128::from(self.first) - i128::from(self.least)
        } else {
            i128::from(self.most) - i128::from(self.first)
        };
        u64::try_from(far + 1).unwrap_or(0).min(LAST_NUMBER)
    }

    /// The values with another span.
    #[must_use]
    pub fn with_span(self, span: u64) -> Self {
        let far = Self {
            least: i64::MIN,
            most: i64::MAX,
            ..self
        }
        .value(span);
        match (span, self.increment < 0) {
            (0, _) => self,
            (_, true) => Self { least: far, ..self },
            (_, false) => Self { most: far, ..self },
        }
    }

    /// The value of a number.
    #[must_use]
    pub fn value(&self, number: u64) -> i64 {
        let far = i128::from(number) - 1;
        let value = if self.increment < 0 {
            i128::from(self.first) - far
        } else {
            i128::from(self.first) + far
        };
        i64::try_from(value.clamp(i64::MIN.into(), i64::MAX.into())).unwrap_or(i64::MAX)
    }

    /// The number of a value; 0 for one before the first.
    #[must_use]
    pub fn number(&self, value: i64) -> u64 {
        let far = if self.increment < 0 {
            i128::from(self.first) - i128::from(value)
        } else {
            i128::from(value) - i128::from(self.first)
        };
        u64::try_from(far + 1).unwrap_or(0)
    }
}

/// The standard size of a block for a span of numbers: 1, 2 or 5 times a power of ten.
#[must_use]
pub fn standard_block(span: u64) -> u64 {
    let most = (span / PARTS).clamp(1, LARGEST_BLOCK);
    let power = 10_u64.pow(most.ilog10());
    power
        * match most / power {
            5.. => 5,
            2..=4 => 2,
            _ => 1,
        }
}

/// The standard step for a span of numbers: more than there will ever be nodes, where numbers
/// suffice.
#[must_use]
pub const fn standard_step(span: u64) -> u64 {
    if span > 1 << 32 {
        1024
    } else if span > 1 << 16 {
        64
    } else {
        16
    }
}

/// How blocks of a sequence lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// How many numbers the sequence has.
    pub span: u64,
    /// Size of a full block.
    pub size: u64,
    /// Numbers up to this one are in no block.
    pub base: u64,
}

impl Plan {
    /// Sizes of first blocks: of few nodes, of further ones, and of all others.
    fn sizes(&self) -> [u64; 3] {
        let size = self.size.max(1);
        if size.saturating_mul(NODES) <= self.span / 4 {
            return [size; 3];
        }
        [size, (size / 20).max(1), (size / 200).max(1)]
    }

    /// Numbers in first blocks of nodes up to this number.
    fn before(&self, nodes: u64) -> u64 {
        let [few, many, all] = self.sizes();
        let of = |from: u64, to: u64, size: u64| {
            (nodes.min(to).saturating_sub(from)).saturating_mul(size)
        };
        of(0, FEW, few)
            .saturating_add(of(FEW, MANY, many))
            .saturating_add(of(MANY, NODES, all))
    }

    /// The last number of all first blocks.
    #[must_use]
    pub fn first_area(&self) -> u64 {
        self.base.saturating_add(self.before(NODES))
    }

    /// A block within the span.
    fn within(&self, start: u64, end: u64) -> Option<Block> {
        let end = end.min(self.span);
        (start > 0 && start <= end).then_some(Block { start, end })
    }

    /// The first block of the node with this number. `None` if the sequence has too few numbers.
    #[must_use]
    pub fn first_block(&self, node: u16) -> Option<Block> {
        let node = u64::from(node);
        if node == 0 || node > NODES {
            return None;
        }
        let start = self.base.saturating_add(self.before(node - 1));
        let end = self.base.saturating_add(self.before(node));
        self.within(start.saturating_add(1), end)
    }

    /// A block that the group has assigned, as far as the sequence has its numbers.
    #[must_use]
    pub fn assigned(&self, start: u64, size: u64) -> Option<Block> {
        self.within(start, start.saturating_add(size).saturating_sub(1))
    }

    /// How many numbers to ask the group for, if it has assigned all below `next`. Blocks become
    /// smaller when numbers become scarce, so that no node takes all of the rest. `None` if no
    /// number is left.
    #[must_use]
    pub fn next_size(&self, next: u64) -> Option<u64> {
        let left = self.span.checked_sub(next.checked_sub(1)?)?;
        (left > 0).then(|| self.size.min(left / 16).max(1))
    }
}

/// Whether a reserve is to be there: if the block is small, or an eighth of it is used.
#[must_use]
pub const fn wants_reserve(block: Block, left: u64) -> bool {
    let size = block.size();
    size < SMALL || left <= size - size / 8
}

/// Whether the next block is to be taken, at a rate in numbers a second.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a rough measure")]
pub fn is_due(block: Block, left: u64, rate: f64) -> bool {
    left <= block.size() / 16 || (left as f64) < rate * AHEAD && left <= block.size() / 2
}

/// Milliseconds until the sequence is looked at again: soon, if all that is left could be used up
/// by then.
#[must_use]
pub const fn look_after_ms(left: u64) -> u64 {
    // Two million a second is more than a server gives.
    let ms = left / 2_000 / 4;
    if ms < 200 {
        200
    } else if ms > 10_000 {
        10_000
    } else {
        ms
    }
}

/// Whether a value comes at or after another one, in the direction of the increment.
#[must_use]
pub const fn has_come_to(value: i64, other: i64, increment: i64) -> bool {
    if increment < 0 {
        value <= other
    } else {
        value >= other
    }
}

/// The value that other nodes are told, if a node has used values up to `last`, has told them of
/// values up to `told`, and has moved to `taken` itself, as another node had said. `None` if they
/// know enough: ten times what was used since they were told.
#[must_use]
pub fn follow_up(last: i64, increment: i64, told: Option<i64>, taken: Option<i64>) -> Option<i64> {
    let least = increment.saturating_mul(AHEAD_VALUES);
    // Values before the one that came from elsewhere are not this node's use.
    let told = told.filter(|told| taken.is_none_or(|taken| has_come_to(*told, taken, increment)));
    let lead = match told {
        Some(told) if has_come_to(told, last.saturating_add(least / 2), increment) => return None,
        // All that was told before was used within a second or two.
        Some(told) => last
            .saturating_sub(told)
            .saturating_add(least)
            .saturating_mul(10),
        None => least,
    };
    let lead = if increment < 0 {
        lead.min(least)
    } else {
        lead.max(least)
    };
    Some(last.saturating_add(lead))
}

/// The first number after `base` that a node has in steps of `size`. `None` if another node's
/// number would be the same.
#[must_use]
pub fn step_start(base: u64, size: u64, node: u16) -> Option<u64> {
    let node = u64::from(node);
    if node == 0 || node > size {
        return None;
    }
    let rounds = base.div_ceil(size);
    rounds.checked_mul(size)?.checked_add(node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BIGINT: u64 = i64::MAX.unsigned_abs();
    const INTEGER: u64 = i32::MAX.unsigned_abs() as u64;
    const SMALLINT: u64 = i16::MAX.unsigned_abs() as u64;

    fn plan(span: u64, size: u64, base: u64) -> Plan {
        Plan { span, size, base }
    }

    #[test]
    fn standard_blocks_of_types() {
        assert_eq!(standard_block(BIGINT), 1_000_000_000);
        assert_eq!(standard_block(INTEGER), 20_000_000);
        assert_eq!(standard_block(SMALLINT), 500);
        assert_eq!(standard_block(10), 1);
    }

    #[test]
    fn first_blocks_are_told_by_the_node_number() {
        let of = |span: u64, node| plan(span, standard_block(span), 0).first_block(node);
        let block = |start, end| Some(Block { start, end });
        assert_eq!(of(BIGINT, 1), block(1, 1_000_000_000));
        assert_eq!(of(BIGINT, 3), block(2_000_000_001, 3_000_000_000));
        assert_eq!(of(INTEGER, 2), block(20_000_001, 40_000_000));
        assert_eq!(of(INTEGER, 16), block(300_000_001, 301_000_000));
        assert_eq!(of(INTEGER, 1023), block(501_500_001, 501_600_000));
        assert_eq!(of(SMALLINT, 2), block(501, 1000));
        assert_eq!(of(SMALLINT, 0), None);
        assert_eq!(of(SMALLINT, 1024), None);
    }

    #[test]
    fn first_blocks_of_javascript() {
        let plan = plan(BIGINT, standard_block(BIGINT), 0);
        assert!(plan.first_area() < 1 << 53);
    }

    #[test]
    fn a_setting_is_read_as_it_is_written() {
        let setting = Setting {
            kind: Kind::Step,
            size: 64,
            base: 7,
            span: 1000,
        };
        assert_eq!(Setting::parse(&setting.to_string()), Some(setting));
        assert_eq!(Setting::parse("range 1 2"), None);
        assert_eq!(Setting::parse("range 1 2 3 4"), None);
        assert_eq!(Setting::parse("wild 1 2 3"), None);
    }

    #[test]
    fn values_of_either_direction() {
        let down = Values {
            first: -1,
            increment: -1,
            least: i64::MIN,
            most: -1,
        };
        assert_eq!(down.value(1), -1);
        assert_eq!(down.value(500), -500);
        assert_eq!(down.number(-500), 500);
        assert_eq!(down.number(7), 0);
        assert_eq!(down.span(), BIGINT);
        let up = Values {
            first: 100,
            increment: 10,
            least: 1,
            most: 32767,
        };
        assert_eq!((up.value(1), up.number(100), up.span()), (100, 1, 32668));
    }

    #[test]
    fn steps_are_kept_apart_by_the_node_number() {
        assert_eq!(step_start(0, 64, 1), Some(1));
        assert_eq!(step_start(0, 64, 64), Some(64));
        assert_eq!(step_start(100, 64, 3), Some(131));
        assert_eq!(step_start(128, 64, 3), Some(131));
        assert_eq!(step_start(0, 64, 65), None);
        assert_eq!(step_start(0, 64, 0), None);
    }

    #[test]
    fn those_that_follow_are_told_ahead_of_use() {
        assert_eq!(follow_up(1, 1, None, None), Some(1001));
        assert_eq!(follow_up(400, 1, Some(1001), None), None);
        assert_eq!(follow_up(900, 1, Some(1001), None), Some(900 + 8_990));
        assert_eq!(
            follow_up(50_000, 1, Some(1001), None),
            Some(50_000 + 499_990)
        );
        assert_eq!(follow_up(-1, -1, None, None), Some(-1001));
        assert_eq!(follow_up(-400, -1, Some(-1001), None), None);
        assert_eq!(follow_up(-900, -1, Some(-1001), None), Some(-900 - 8_990));
        assert_eq!(follow_up(10, 10, None, None), Some(10_010));
    }

    #[test]
    fn values_that_another_node_has_used_are_not_counted_as_used_here() {
        assert_eq!(follow_up(50_001, 1, Some(1001), Some(50_000)), Some(51_001));
        assert_eq!(
            follow_up(-50_001, -1, Some(-1001), Some(-50_000)),
            Some(-51_001)
        );
        assert_eq!(follow_up(400, 1, Some(1001), Some(300)), None);
    }

    #[test]
    fn values_come_in_the_direction_of_the_increment() {
        assert!(has_come_to(5, 5, 1) && has_come_to(6, 5, 1) && !has_come_to(4, 5, 1));
        assert!(has_come_to(-5, -5, -1) && has_come_to(-6, -5, -1) && !has_come_to(-4, -5, -1));
    }

    #[test]
    fn the_next_block_comes_in_time() {
        let block = Block {
            start: 1,
            end: 1600,
        };
        assert!(!is_due(block, 1600, 0.0));
        assert!(is_due(block, 100, 0.0));
        assert!(is_due(block, 500, 60.0));
        assert!(!is_due(block, 1500, 1e9));
        assert!(wants_reserve(block, 1600));
        let large = Block {
            start: 1,
            end: 1_000_000,
        };
        assert!(!wants_reserve(large, 1_000_000));
        assert!(wants_reserve(large, 800_000));
        assert_eq!(look_after_ms(500), 200);
        assert_eq!(look_after_ms(20_000_000), 2_500);
        assert_eq!(look_after_ms(u64::MAX), 10_000);
    }

    proptest! {
        #[test]
        fn no_number_is_in_two_blocks(
            span in 1_u64..=BIGINT, size in 1_u64..=10_000_000_000, base in 0_u64..1 << 40,
        ) {
            let plan = plan(span, size, base);
            let mut last = base;
            for node in 1..=1023 {
                if let Some(block) = plan.first_block(node) {
                    prop_assert!(block.start > last && block.end >= block.start);
                    prop_assert!(block.end <= span);
                    last = block.end;
                }
            }
            prop_assert!(last <= plan.first_area());
            // Those that the group assigns begin behind.
            let mut next = plan.first_area() + 1;
            for _ in 0..50 {
                let Some(size) = plan.next_size(next) else { break };
                let block = plan.assigned(next, size);
                prop_assert!(block.is_some_and(|block| block.start > last && block.end <= span));
                last = block.map_or(last, |block| block.end);
                next += size;
            }
        }

        #[test]
        fn first_blocks_leave_half_of_the_numbers(span in 4_000_u64..=BIGINT) {
            let plan = plan(span, standard_block(span), 0);
            prop_assert!(plan.first_area() <= span / 2);
        }

        #[test]
        fn steps_never_meet(base in 0_u64..1 << 40, size in 1_u64..2000, a in 1_u16..1024, b in 1_u16..1024) {
            if let (Some(one), Some(other)) = (step_start(base, size, a), step_start(base, size, b)) {
                prop_assert!(one > base && other > base);
                prop_assert_eq!(a == b, one % size == other % size);
            }
        }

        #[test]
        fn a_number_is_that_of_its_value(first in any::<i64>(), down in any::<bool>(), number in 1_u64..=BIGINT) {
            let values = Values { first, increment: if down { -1 } else { 1 }, least: i64::MIN, most: i64::MAX };
            if number <= values.span() {
                prop_assert_eq!(values.number(values.value(number)), number);
                prop_assert_eq!(values.with_span(number).span(), number);
                prop_assert_eq!(values.with_span(0), values);
            }
        }

        #[test]
        fn all_numbers_are_used_in_the_end(span in 1_u64..3_000, size in 1_u64..500) {
            let plan = plan(span, size, 0);
            let mut next = 1;
            while let Some(size) = plan.next_size(next) {
                next += size;
            }
            prop_assert_eq!(next, span + 1);
        }
    }
}
