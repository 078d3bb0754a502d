//! Blocks of a sequence's numbers, for sequences that several nodes use: which node has which
//! block, and when the next block is needed. Run by sessions that create sequences, by appliers,
//! and by the sequences process of a group.
//!
//! A sequence's numbers are counted from 1, which stands for its START value. Each node has a first
//! block by its node number alone, so no agreement is needed for it. Further blocks lie behind all
//! first blocks, and are assigned by the group's log. No number is in two blocks.
//!
//! Not for: values that contain a time (`snowflake.rs`).

use std::fmt;

/// Most nodes that a group can ever have: the largest node number.
pub const NODES: u64 = 1023;
/// The largest number that can be assigned.
const LAST_NUMBER: u64 = i64::MAX.unsigned_abs();
/// Largest standard block: a billion, so that the digits of a value show its block.
const LARGEST_BLOCK: u64 = 1_000_000_000;
/// Blocks into which the numbers of a narrow type are divided.
const PARTS: u64 = 64;
/// If numbers are scarce, node numbers up to this have first blocks of full size.
const FEW: u64 = 15;
/// Node numbers up to this have smaller first blocks; all others have the smallest.
const MANY: u64 = 127;
/// Blocks below this size have a reserve from the start.
const SMALL: u64 = 100_000;
/// Fewest values by which an announced value is ahead of the last used one.
const AHEAD_VALUES: i64 = 1000;
/// The next block is taken when this many seconds of use are left.
const AHEAD: f64 = 10.0;

/// How nodes get different values from a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Each node has its own blocks.
    Range,
    /// Each node has every n-th number.
    Step,
    /// Values of 64 bits contain a time, the node and a count.
    Snowflake,
    /// Values of 53 bits contain a time, the node and a count.
    Snowflake53,
    /// Values are announced in the stream; one node draws at a time.
    Follow,
    /// The sequence is not coordinated.
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

    /// Returns the kind's name.
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

    /// Returns the kind with this name.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// Returns whether a sequence can have this kind from its creation on, without a change of a
    /// column.
    #[must_use]
    pub const fn is_native(self) -> bool {
        !matches!(self, Self::Snowflake | Self::Snowflake53)
    }
}

/// The group's agreement on a sequence, or the setting in the statement that created it. As text: a
/// kind, a size, a base and a span, separated by spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The kind.
    pub kind: Kind,
    /// Size of a block, or of a step; 0: the standard one.
    pub size: u64,
    /// Numbers up to this one are in no block.
    pub base: u64,
    /// How many numbers there are; 0: as given by the sequence's definition.
    pub span: u64,
}

impl Setting {
    /// The setting of an uncoordinated sequence.
    pub const LOCAL: Self = Self {
        kind: Kind::Local,
        size: 0,
        base: 0,
        span: 0,
    };

    /// Parses a setting; `None` for anything else.
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

/// Numbers of one node: from `start` to `end`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The first number.
    pub start: u64,
    /// The last number.
    pub end: u64,
}

impl Block {
    /// Returns how many numbers the block has.
    #[must_use]
    pub const fn size(self) -> u64 {
        (self.end - self.start).saturating_add(1)
    }

    /// Returns whether the block contains a number.
    #[must_use]
    pub const fn has(self, number: u64) -> bool {
        self.start <= number && number <= self.end
    }
}

/// Maps the values of a sequence to numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Values {
    /// The value of number 1: the sequence's START.
    pub first: i64,
    /// The sequence's INCREMENT. Its sign is the direction.
    pub increment: i64,
    /// The sequence's MINVALUE.
    pub least: i64,
    /// The sequence's MAXVALUE.
    pub most: i64,
}

impl Values {
    /// Returns how many numbers there are.
    #[must_use]
    pub fn span(&self) -> u64 {
        let far = if self.increment < 0 {
            i128::from(self.first) - i128::from(self.least)
        } else {
            i128::from(self.most) - i128::from(self.first)
        };
        u64::try_from(far + 1).unwrap_or(0).min(LAST_NUMBER)
    }

    /// Returns the values with another span; 0 keeps it.
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

    /// Returns the value of a number.
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

    /// Returns the number of a value; 0 for one before the first.
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

/// Returns the standard size of a block for a span of numbers: 1, 2 or 5 times a power of ten.
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

/// Returns the standard step for a span of numbers: more than the group will ever have nodes, if
/// there are enough numbers.
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

/// Layout of a sequence's blocks.
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
    /// Returns the sizes of first blocks: of the first nodes, of further ones, and of all others.
    fn sizes(&self) -> [u64; 3] {
        let size = self.size.max(1);
        if size.saturating_mul(NODES) <= self.span / 4 {
            return [size; 3];
        }
        [size, (size / 20).max(1), (size / 200).max(1)]
    }

    /// Returns how many numbers are in the first blocks of nodes up to this number.
    fn before(&self, nodes: u64) -> u64 {
        let [few, many, all] = self.sizes();
        let of = |from: u64, to: u64, size: u64| {
            (nodes.min(to).saturating_sub(from)).saturating_mul(size)
        };
        of(0, FEW, few)
            .saturating_add(of(FEW, MANY, many))
            .saturating_add(of(MANY, NODES, all))
    }

    /// Returns the last number of all first blocks.
    #[must_use]
    pub fn first_area(&self) -> u64 {
        self.base.saturating_add(self.before(NODES))
    }

    /// Returns the part of a block that lies within the span.
    fn within(&self, start: u64, end: u64) -> Option<Block> {
        let end = end.min(self.span);
        (start > 0 && start <= end).then_some(Block { start, end })
    }

    /// Returns the first block of the node with this number. `None` if the sequence has too few
    /// numbers.
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

    /// Returns the part of an assigned block that the sequence has numbers for.
    #[must_use]
    pub fn assigned(&self, start: u64, size: u64) -> Option<Block> {
        self.within(start, start.saturating_add(size).saturating_sub(1))
    }

    /// Returns how many numbers to request from the group, if it has assigned all below `next`.
    /// Blocks become smaller when numbers become scarce, so that no node takes all of the rest.
    /// `None` if no number is left.
    #[must_use]
    pub fn next_size(&self, next: u64) -> Option<u64> {
        let left = self.span.checked_sub(next.checked_sub(1)?)?;
        (left > 0).then(|| self.size.min(left / 16).max(1))
    }
}

/// Returns whether a reserve is needed: if the block is small, or an eighth of it is used.
#[must_use]
pub const fn wants_reserve(block: Block, left: u64) -> bool {
    let size = block.size();
    size < SMALL || left <= size - size / 8
}

/// Returns whether the next block is to be taken; `rate` is in numbers per second.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a rough measure")]
pub fn is_due(block: Block, left: u64, rate: f64) -> bool {
    left <= block.size() / 16 || (left as f64) < rate * AHEAD && left <= block.size() / 2
}

/// Returns the milliseconds until the sequence is checked again: soon, if the remaining numbers
/// could be used up by then.
#[must_use]
pub const fn look_after_ms(left: u64) -> u64 {
    // No server draws more than two million numbers a second.
    let ms = left / 2_000 / 4;
    if ms < 200 {
        200
    } else if ms > 10_000 {
        10_000
    } else {
        ms
    }
}

/// Returns whether a value is at or after another one, in the direction of the increment.
#[must_use]
pub const fn has_come_to(value: i64, other: i64, increment: i64) -> bool {
    if increment < 0 {
        value <= other
    } else {
        value >= other
    }
}

/// Returns the value to announce to other nodes. This node has used values up to `last` and has
/// announced `told`. `taken` is the value to which it has moved because another node announced it.
/// `None` if the last announcement is still far enough ahead. The lead grows to ten times the use
/// since the last announcement.
#[must_use]
pub fn follow_up(last: i64, increment: i64, told: Option<i64>, taken: Option<i64>) -> Option<i64> {
    let least = increment.saturating_mul(AHEAD_VALUES);
    // Values before the one that another node announced were not used by this node.
    let told = told.filter(|told| taken.is_none_or(|taken| has_come_to(*told, taken, increment)));
    let lead = match told {
        Some(told) if has_come_to(told, last.saturating_add(least / 2), increment) => return None,
        // Everything that was announced before was used within a second or two.
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

/// Returns the first number after `base` that a node has in steps of `size`. `None` if it would be
/// another node's number.
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
            // Blocks that the group assigns begin behind the first blocks.
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
