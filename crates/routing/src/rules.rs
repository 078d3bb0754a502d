//! Routing rules and the placement of a row by them. Every node uses them for each row it writes.
//!
//! `shard = (h1(tenant) + h2(record) mod L) mod N`. N is the number of shards. L is the largest
//! spread of the rules that list the tenant and whose time is before the row's creation; without
//! such a rule L is 1 (ESDB, SIGMOD 2022, equation 2 and algorithm 2).
//!
//! Two facts keep reads small and right:
//! - Rules are only added, and L only grows with time. A row's place never changes.
//! - Spreads are powers of two. So the shards of a smaller spread are the first ones of a larger
//!   one, and the shards up to a time are one run of L shards.

use std::fmt;

use braid_codec::{Malformed, Reader, Writer};
use thiserror::Error;

use crate::hash::{RecordHash, TenantHash};

/// The largest number of shards of a table.
pub const SHARDS_LIMIT: u32 = 32_768;

/// How many steps the rules of one table may have: 24 MB.
pub const STEPS_LIMIT: usize = 1_000_000;

/// Why a value of a routed table or of a rule is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Invalid {
    /// The number of shards is out of range.
    #[error("number of shards {0} is out of range")]
    ShardCount(u32),
    /// The spread is not a power of two.
    #[error("spread {0} is not a power of two")]
    SpreadNotPowerOfTwo(u32),
    /// The spread is larger than the number of shards.
    #[error("spread {spread} is larger than the table's {shards} shards")]
    SpreadTooLarge {
        /// The spread.
        spread: u32,
        /// The table's number of shards.
        shards: u32,
    },
    /// A rule lists no tenant.
    #[error("routing rule lists no tenant")]
    NoTenants,
    /// A rule's time is infinite.
    #[error("time of a routing rule is infinite")]
    InfiniteTime,
    /// The rules have too many steps.
    #[error("routing rules of the table are too many")]
    TooManySteps,
    /// Sets and nodes of a map do not fit together.
    #[error("node sets of a routed table are not valid: {0}")]
    Sets(&'static str),
    /// The times of a window do not fit together.
    #[error("times of the routing window do not fit together")]
    Window,
}

/// What can be wrong with sets, in the order of their numbers in bytes. Only added to.
const SETS: [&str; 6] = [
    "no set",
    "too many sets",
    "a set without a node",
    "too many nodes in a set",
    "a set comes twice",
    "a node comes twice",
];

impl Invalid {
    pub(crate) fn write(&self, w: &mut Writer) {
        match self {
            Self::ShardCount(count) => w.u8(1).u32(*count),
            Self::SpreadNotPowerOfTwo(spread) => w.u8(2).u32(*spread),
            Self::SpreadTooLarge { spread, shards } => w.u8(3).u32(*spread).u32(*shards),
            Self::NoTenants => w.u8(4),
            Self::InfiniteTime => w.u8(5),
            Self::TooManySteps => w.u8(6),
            Self::Sets(what) => {
                let number = SETS.iter().position(|known| known == what);
                w.u8(7)
                    .u8(number.and_then(|n| n.try_into().ok()).unwrap_or(u8::MAX))
            }
            Self::Window => w.u8(8),
        };
    }

    pub(crate) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match r.u8()? {
            1 => Self::ShardCount(r.u32()?),
            2 => Self::SpreadNotPowerOfTwo(r.u32()?),
            3 => Self::SpreadTooLarge {
                spread: r.u32()?,
                shards: r.u32()?,
            },
            4 => Self::NoTenants,
            5 => Self::InfiniteTime,
            6 => Self::TooManySteps,
            7 => {
                let what = SETS.get(usize::from(r.u8()?));
                Self::Sets(what.ok_or(Malformed::Invalid("node sets"))?)
            }
            8 => Self::Window,
            other => return Err(r.unknown(other)),
        })
    }

    /// The hint for the user: a sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::ShardCount(_) => "Choose between 1 and 32768 shards.",
            Self::SpreadNotPowerOfTwo(_) => "Choose 1, 2, 4, 8 or a further power of two.",
            Self::SpreadTooLarge { .. } => {
                "Choose a power of two up to the table's number of shards."
            }
            Self::NoTenants => "List the values of the tenant column that the rule is for.",
            Self::InfiniteTime => {
                "Leave the time to the group, which chooses the next possible one."
            }
            Self::TooManySteps => "Give rules to large tenants only.",
            Self::Sets(_) => "Give each set at least one node, and each node to one set.",
            Self::Window => {
                "The window must be longer than its period, the slack and the clock skew together."
            }
        }
    }
}

/// A time in microseconds since 2000-01-01 00:00 UTC, as PostgreSQL's `timestamptz`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub i64);

impl Time {
    /// `-infinity`.
    pub const MIN: Self = Self(i64::MIN);
    /// `infinity`.
    pub const MAX: Self = Self(i64::MAX);

    /// This time and so many microseconds; at most the largest finite time.
    #[must_use]
    pub const fn plus(self, micros: i64) -> Self {
        let sum = self.0.saturating_add(micros);
        Self(if sum == i64::MAX { sum - 1 } else { sum })
    }

    /// Whether the time is neither of the infinities.
    #[must_use]
    pub const fn is_finite(self) -> bool {
        self.0 != i64::MIN && self.0 != i64::MAX
    }
}

/// One shard of a table, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard(pub u32);

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A power of two: over how many shards the rows of a tenant are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spread(u32);

impl Spread {
    /// The spread of tenants without a rule.
    pub const ONE: Self = Self(1);

    /// A spread.
    ///
    /// # Errors
    /// [`Invalid::SpreadNotPowerOfTwo`].
    pub const fn new(spread: u32) -> Result<Self, Invalid> {
        if spread.is_power_of_two() {
            Ok(Self(spread))
        } else {
            Err(Invalid::SpreadNotPowerOfTwo(spread))
        }
    }

    /// The number of shards.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// The number of shards of a table: N, from 1 to [`SHARDS_LIMIT`]. It never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shards(u32);

impl Shards {
    /// So many shards.
    ///
    /// # Errors
    /// [`Invalid::ShardCount`].
    pub const fn new(count: u32) -> Result<Self, Invalid> {
        if count >= 1 && count <= SHARDS_LIMIT {
            Ok(Self(count))
        } else {
            Err(Invalid::ShardCount(count))
        }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// All shards.
    pub fn all(self) -> impl Iterator<Item = Shard> {
        (0..self.0).map(Shard)
    }

    /// Whether the table has this shard.
    #[must_use]
    pub const fn has(self, shard: Shard) -> bool {
        shard.0 < self.0
    }

    /// Checks that a spread is not larger than the number of shards.
    ///
    /// # Errors
    /// [`Invalid::SpreadTooLarge`].
    pub const fn check(self, spread: Spread) -> Result<(), Invalid> {
        if spread.0 <= self.0 {
            Ok(())
        } else {
            Err(Invalid::SpreadTooLarge {
                spread: spread.0,
                shards: self.0,
            })
        }
    }

    /// The shard of a row whose tenant has this spread.
    #[must_use]
    pub fn place(self, tenant: TenantHash, record: RecordHash, spread: Spread) -> Shard {
        let offset = below(record.0, spread.0);
        self.run(tenant, spread).nth(offset)
    }

    /// All shards on which a tenant with this spread has rows.
    #[must_use]
    pub fn run(self, tenant: TenantHash, spread: Spread) -> Run {
        Run {
            first: below(tenant.0, self.0),
            count: spread.0.min(self.0),
            shards: self.0,
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the remainder is below the divisor"
)]
fn below(hash: u64, divisor: u32) -> u32 {
    (hash % u64::from(divisor)) as u32
}

/// Shards one after the other; the first follows the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    first: u32,
    count: u32,
    shards: u32,
}

impl Run {
    /// All shards of a table.
    #[must_use]
    pub const fn all(shards: Shards) -> Self {
        Self {
            first: 0,
            count: shards.0,
            shards: shards.0,
        }
    }

    fn nth(self, at: u32) -> Shard {
        Shard((self.first + at) % self.shards)
    }

    /// The number of shards, each of which is another one.
    #[must_use]
    pub const fn count(self) -> u32 {
        self.count
    }

    /// Whether the shard is one of them.
    #[must_use]
    pub const fn contains(self, shard: Shard) -> bool {
        shard.0 < self.shards && (shard.0 + self.shards - self.first) % self.shards < self.count
    }

    /// The shards, from the first on.
    pub fn iter(self) -> impl Iterator<Item = Shard> {
        (0..self.count).map(move |at| self.nth(at))
    }
}

/// A rule: rows of these tenants that are created after `time` are spread over `spread` shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The rule counts for rows created after this time, not at it.
    pub time: Time,
    /// The spread.
    pub spread: Spread,
    /// The tenants, sorted.
    pub tenants: Vec<TenantHash>,
}

/// A spread that counts for a tenant from a time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    tenant: TenantHash,
    time: Time,
    spread: Spread,
}

/// The rules of a table: append-only.
///
/// Kept as one sorted array of steps with 24 bytes each, a step for each tenant of each rule that
/// widens the tenant's spread. So 100,000 tenants with a rule take 2.4 MB, and finding a row's
/// spread is one binary search. Names of tenants are not kept here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleList {
    /// By tenant, then time; the spread grows from step to step of a tenant.
    steps: Vec<Step>,
}

impl RuleList {
    /// No rules: each tenant is on one shard.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a rule. Returns for how many tenants it widens the spread; for others an earlier rule
    /// with at least this spread counts.
    ///
    /// The order in which rules are added does not matter. Takes time linear in the steps of all.
    ///
    /// # Errors
    /// [`Invalid::NoTenants`], [`Invalid::InfiniteTime`], [`Invalid::TooManySteps`]; then nothing
    /// has changed.
    pub fn add(&mut self, rule: &Rule) -> Result<usize, Invalid> {
        if rule.tenants.is_empty() {
            return Err(Invalid::NoTenants);
        }
        if !rule.time.is_finite() {
            return Err(Invalid::InfiniteTime);
        }
        let mut tenants = rule.tenants.clone();
        tenants.sort_unstable();
        tenants.dedup();
        let after = rule.time.plus(1);
        tenants.retain(|tenant| self.spread(*tenant, after) < rule.spread);
        let gained = tenants.len();
        if self.steps.len() + gained > STEPS_LIMIT {
            return Err(Invalid::TooManySteps);
        }
        if gained == 0 {
            return Ok(0);
        }
        let mut steps = std::mem::take(&mut self.steps);
        steps.extend(tenants.into_iter().map(|tenant| Step {
            tenant,
            time: rule.time,
            spread: rule.spread,
        }));
        self.steps = widening(steps);
        Ok(gained)
    }

    /// The list of these rules, which need not be in order.
    ///
    /// # Errors
    /// [`Invalid::InfiniteTime`], [`Invalid::TooManySteps`].
    pub fn of(rules: &[Rule]) -> Result<Self, Invalid> {
        let count = rules.iter().map(|rule| rule.tenants.len()).sum::<usize>();
        if count > STEPS_LIMIT {
            return Err(Invalid::TooManySteps);
        }
        if !rules.iter().all(|rule| rule.time.is_finite()) {
            return Err(Invalid::InfiniteTime);
        }
        let steps = rules.iter().flat_map(|rule| {
            rule.tenants.iter().map(|tenant| Step {
                tenant: *tenant,
                time: rule.time,
                spread: rule.spread,
            })
        });
        Ok(Self {
            steps: widening(steps.collect()),
        })
    }

    /// L: the spread of a tenant's row that is created at this time.
    #[must_use]
    pub fn spread(&self, tenant: TenantHash, created: Time) -> Spread {
        self.last(tenant, |step| (step.tenant, step.time) < (tenant, created))
    }

    /// The largest spread of all rules that list the tenant.
    #[must_use]
    pub fn largest_spread(&self, tenant: TenantHash) -> Spread {
        self.last(tenant, |step| step.tenant <= tenant)
    }

    fn last(&self, tenant: TenantHash, is_before: impl Fn(&Step) -> bool) -> Spread {
        let count = self.steps.partition_point(is_before);
        self.steps
            .get(..count)
            .and_then(<[Step]>::last)
            .filter(|step| step.tenant == tenant)
            .map_or(Spread::ONE, |step| step.spread)
    }

    /// The number of steps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether no tenant has a rule.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The rules that count, by time and spread. A tenant is left out of a rule that does not widen
    /// its spread.
    #[must_use]
    pub fn rules(&self) -> Vec<Rule> {
        let mut steps = self.steps.clone();
        steps.sort_by_key(|step| (step.time, step.spread, step.tenant));
        let mut rules: Vec<Rule> = Vec::new();
        for step in steps {
            match rules.last_mut() {
                Some(rule) if (rule.time, rule.spread) == (step.time, step.spread) => {
                    rule.tenants.push(step.tenant);
                }
                _ => rules.push(Rule {
                    time: step.time,
                    spread: step.spread,
                    tenants: vec![step.tenant],
                }),
            }
        }
        rules
    }

    /// The shard of a row.
    #[must_use]
    pub fn placement(
        &self,
        shards: Shards,
        tenant: TenantHash,
        record: RecordHash,
        created: Time,
    ) -> Shard {
        shards.place(tenant, record, self.spread(tenant, created))
    }

    /// The shards that can hold rows of a tenant created at or before `upto`: all of these, and no
    /// other. Without a bound, those of the largest spread. A lower bound would not narrow them.
    #[must_use]
    pub fn candidates(&self, shards: Shards, tenant: TenantHash, upto: Option<Time>) -> Run {
        let spread = match upto {
            Some(upto) => self.spread(tenant, upto),
            None => self.largest_spread(tenant),
        };
        shards.run(tenant, spread)
    }
}

/// Sorts the steps, and leaves out those that do not widen their tenant's spread.
fn widening(mut steps: Vec<Step>) -> Vec<Step> {
    // Runs that are sorted already are merged.
    steps.sort_by_key(|step| (step.tenant, step.time, std::cmp::Reverse(step.spread)));
    let mut widest: Option<Step> = None;
    steps.retain(|step| {
        let before = widest
            .filter(|before| before.tenant == step.tenant)
            .map_or(Spread::ONE, |before| before.spread);
        let widens = before < step.spread;
        if widens {
            widest = Some(*step);
        }
        widens
    });
    steps
}

const _: () = assert!(size_of::<Step>() == 24);
