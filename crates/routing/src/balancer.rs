//! Which tenants get which spread: ESDB's load balancer (SIGMOD 2022, section 4.1, algorithm 1).
//!
//! It decides from storage shares at the start, then from write rates, and only decides. The
//! caller gives counts and times, and appends the rules to the group's log. One node of a group
//! runs it at a time: the leader. It has no clock and no randomness.
//!
//! # A scenario
//!
//! Table `orders` has 512 shards. A shard's even part is 1/512 of all writes: 0.195 %. The
//! threshold is half of it: 0.098 %. A balancer that looks at one second only gets this wrong:
//! tenant 7 has 0.09 % of all writes, in one second of 40,000 writes by chance 0.12 %. It would
//! get a rule, and so would, one after the other, all tenants a little below the threshold. Rules
//! only grow: each of these tenants would be read from several nodes for ever.
//!
//! 1. At 12:00:00 tenant 42 begins a sale: 8 % of all writes.
//! 2. At 12:00:01 the leader ends a period. It has the counts of all nodes ([`Balancer::absorb`]).
//!    42 has 9,600 of 120,000 writes. Three standard deviations less are still above the
//!    threshold. Tenant 7 has 144: three less are 108, below it.
//! 3. Tenant 42 is above eight times the threshold, so one period is enough. A shard may get an
//!    eighth of its even part from one tenant, so 42 needs 328 shards. It gets the largest spread
//!    of the settings: 64.
//! 4. At 12:00:02 tenant 9, with 0.3 %, is above the threshold in the second period one after the
//!    other, and gets a rule. Nothing else is decided for five seconds. By then the log has the
//!    rule, or the balancer proposes it again. A rule that comes twice has no effect.
//! 5. Later 42 has 9 %, or 4 %. It has the largest spread, so no rule is added.
//!
//! # What rules cost
//!
//! A tenant has at most as many rules as its spread has doublings: six at 64. A period has at most
//! `512 / 0.5` tenants above the threshold.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::hash::{Tenant, TenantHash};
use crate::rules::{RuleList, Shards, Spread};
use crate::sketch::{COUNTERS_LIMIT, Sketch};

/// The most bytes of tenants in one rule: an entry of the log has room for them.
const NAMES_LIMIT: usize = 40 * 1024;
/// What a tenant takes in an entry, besides its bytes, at most.
const NAME_OVERHEAD: usize = 8;

/// When and how the balancer decides. Shares are thousandths of a shard's even part, which is 1/N.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// How often write rates are looked at.
    pub period: Duration,
    /// The least time between two decisions. Longer than the log needs to bring a rule back.
    pub pause: Duration,
    /// The share from which a tenant on one shard gets a rule, in thousandths.
    pub threshold: u32,
    /// The share of one shard that a tenant with a rule should have at most, in thousandths.
    pub part: u32,
    /// By how many percent a tenant with a rule has to exceed `part` before it gets a larger one.
    pub margin: u32,
    /// For how many periods one after the other a tenant has to be hot.
    pub confirm: u32,
    /// From how many times the threshold on one period is enough; 0: never. Chance and single
    /// statements make no tenant so hot, and its rows pile up on one shard meanwhile.
    pub urgent: u32,
    /// The least number of writes in a period from which anything is decided.
    pub least_writes: u64,
    /// The largest spread.
    pub largest: Spread,
    /// The number of counters of the sketch.
    pub counters: usize,
}

impl Default for Settings {
    /// Each second; two periods; half of a shard's even part; spreads up to 64.
    fn default() -> Self {
        Self {
            period: Duration::from_secs(1),
            pause: Duration::from_secs(5),
            threshold: 500,
            part: 125,
            margin: 25,
            confirm: 2,
            urgent: 8,
            least_writes: 1_000,
            largest: Spread::new(64).unwrap_or(Spread::ONE),
            counters: 2_048,
        }
    }
}

/// Why settings do not fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadSettings {
    /// The period is zero.
    #[error("period of the balancer is zero")]
    Period,
    /// The pause is shorter than the period.
    #[error("pause of the balancer is shorter than its period")]
    Pause,
    /// A share is zero, or the threshold is below the part.
    #[error("threshold and part of the balancer do not fit together")]
    Shares,
    /// No period has to confirm a hot tenant.
    #[error("balancer decides without a period")]
    Confirm,
    /// The number of counters is out of range, or too small for the threshold.
    #[error("number of counters {0} does not fit the balancer's threshold")]
    Counters(usize),
}

impl BadSettings {
    /// The hint for the user: a sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Period => "Choose a period of one second, for example.",
            Self::Pause => "Choose a pause of several periods.",
            Self::Shares => "Choose a part above zero, and a threshold at or above it.",
            Self::Confirm => "Choose one period at least.",
            Self::Counters(_) => {
                "Choose up to 65536 counters, and at least the number of shards divided by the threshold."
            }
        }
    }
}

impl Settings {
    /// Checks the settings for a table with so many shards.
    ///
    /// # Errors
    /// [`BadSettings`].
    pub fn check(&self, shards: Shards) -> Result<(), BadSettings> {
        // With fewer counters than tenants can be hot, the error hides hot tenants.
        let hot = u64::from(shards.get()) * 1_000 / u64::from(self.threshold.max(1));
        let counters = u64::try_from(self.counters).unwrap_or(u64::MAX);
        if self.period.is_zero() {
            Err(BadSettings::Period)
        } else if self.pause < self.period {
            Err(BadSettings::Pause)
        } else if self.part == 0 || self.threshold < self.part {
            Err(BadSettings::Shares)
        } else if self.confirm == 0 {
            Err(BadSettings::Confirm)
        } else if counters <= hot || self.counters > COUNTERS_LIMIT {
            Err(BadSettings::Counters(self.counters))
        } else {
            Ok(())
        }
    }
}

/// From which shares a decision was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Rows or bytes that each tenant has.
    Storage,
    /// Writes in a period.
    Writes,
}

impl Basis {
    /// The word for users.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Storage => "storage",
            Self::Writes => "writes",
        }
    }
}

/// A tenant that gets a larger spread, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The tenant.
    pub tenant: Tenant,
    /// Its writes in the period, or its storage. It can be too large by `error`.
    pub amount: u64,
    /// By how much `amount` can be too large.
    pub error: u64,
    /// For how many periods one after the other the tenant has been hot; 0 for storage.
    pub periods: u32,
    /// The spread that the tenant has.
    pub had: Spread,
}

/// A rule to be added. The caller gives it the first time that is not closed
/// ([`crate::RoutedTable::next_rule_time`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    /// The spread.
    pub spread: Spread,
    /// Its tenants, by their hashes.
    pub findings: Vec<Finding>,
}

impl Proposal {
    /// The tenants, as an entry of the log lists them.
    #[must_use]
    pub fn tenants(&self) -> Vec<Tenant> {
        let tenants = self.findings.iter().map(|finding| finding.tenant.clone());
        tenants.collect()
    }
}

/// Rules to be added at one time, with all that they were decided from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// When, on the caller's clock.
    pub at: Duration,
    /// From which shares.
    pub basis: Basis,
    /// Writes of all tenants in the period, or all storage.
    pub total: u64,
    /// The most that a tenant without a counter can have.
    pub floor: u64,
    /// The share from which a tenant gets a rule, in thousandths of a shard's even part.
    pub threshold: u32,
    /// The number of shards.
    pub shards: Shards,
    /// One rule for each spread; several only if the tenants are too long for one entry.
    pub rules: Vec<Proposal>,
}

impl Decision {
    /// Why a tenant gets a rule, in words for a view. Has no value of a row.
    #[must_use]
    pub fn reason(&self, finding: &Finding) -> String {
        let what = self.basis.word();
        let least = finding.amount.saturating_sub(finding.error);
        let mut words = format!("{} of all {what}", Share(finding.amount, self.total));
        if finding.error > 0 {
            words += &format!(" (at least {})", Share(least, self.total));
        }
        if self.basis == Basis::Writes {
            words += &match finding.periods {
                1 => " in 1 period".to_owned(),
                periods => format!(" for {periods} periods"),
            };
        }
        let threshold = Share(
            u64::from(self.threshold),
            u64::from(self.shards.get()) * 1_000,
        );
        words + &format!(", threshold {threshold}")
    }

    /// What a rule changes for a tenant, in words for a view.
    #[must_use]
    pub fn effect(&self, finding: &Finding, spread: Spread) -> String {
        let on = |spread: Spread| {
            let total = self.total.saturating_mul(u64::from(spread.get()));
            let shards = if spread == Spread::ONE {
                "on 1 shard".to_owned()
            } else {
                format!("on each of {} shards", spread.get())
            };
            format!("{} {shards}", Share(finding.amount, total))
        };
        format!("{}, before {}", on(spread), on(finding.had))
    }
}

/// A part of a total, in percent with two digits that count.
struct Share(u64, u64);

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.1 == 0 {
            return f.write_str("0 %");
        }
        // Hundred thousandths of a percent.
        let parts = u128::from(self.0) * 10_000_000 / u128::from(self.1);
        let digits = match parts {
            1_000_000.. => 0,
            100_000.. => 1,
            10_000.. => 2,
            1_000.. => 3,
            _ => 5,
        };
        let unit = 10_u128.pow(5 - digits);
        let scale = 10_u128.pow(digits);
        let rounded = (parts + unit / 2) / unit;
        let width = usize::try_from(digits).unwrap_or(0);
        match width {
            0 => write!(f, "{rounded} %"),
            _ => write!(f, "{}.{:0width$} %", rounded / scale, rounded % scale),
        }
    }
}

/// A condition without which rules would be added that should not be. Tests leave each out once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guard {
    /// The tenant's share is above the threshold.
    Threshold,
    /// It still is if the sketch's error is subtracted.
    Error,
    /// It still is if three standard deviations are subtracted.
    Noise,
    /// It was in the periods before.
    Confirm,
    /// The last decision is long ago.
    Pause,
    /// A tenant with a rule exceeds its part by a margin.
    Margin,
    /// The spread is larger than the one that the tenant has.
    Grows,
    /// The spread is at most the largest one.
    Largest,
    /// The period has enough writes.
    Enough,
}

/// Decides on rules for one table.
#[derive(Debug, Clone)]
pub struct Balancer {
    settings: Settings,
    shards: Shards,
    sketch: Sketch,
    /// When the period began.
    began: Option<Duration>,
    decided: Option<Duration>,
    /// For how many periods one after the other a tenant has been hot. Hot tenants only.
    hot: BTreeMap<TenantHash, u32>,
    #[cfg(test)]
    without: Option<Guard>,
}

impl Balancer {
    /// A balancer that has counted nothing.
    ///
    /// # Errors
    /// [`BadSettings`].
    pub fn new(settings: Settings, shards: Shards) -> Result<Self, BadSettings> {
        settings.check(shards)?;
        Ok(Self {
            sketch: Sketch::new(settings.counters),
            settings,
            shards,
            began: None,
            decided: None,
            hot: BTreeMap::new(),
            #[cfg(test)]
            without: None,
        })
    }

    /// Counts writes of a tenant in the present period. `name` is called only if the tenant gets a
    /// counter.
    pub fn note(&mut self, tenant: TenantHash, writes: u64, name: impl FnOnce() -> Tenant) {
        self.sketch.add(tenant, writes, name);
    }

    /// Adds what another node has counted in the present period.
    pub fn absorb(&mut self, counts: &Sketch) {
        self.sketch.absorb(counts);
    }

    /// The counts of the present period, for views.
    #[must_use]
    pub const fn counts(&self) -> &Sketch {
        &self.sketch
    }

    /// When the present period ends; `None` before the first [`Self::tick`].
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        Some(self.began?.saturating_add(self.settings.period))
    }

    /// Decides from the storage of the tenants, before the table takes rows or when the balancer is
    /// turned on: the first phase of algorithm 1. `total` has all tenants, `storage` at least the
    /// large ones.
    pub fn start(
        &mut self,
        at: Duration,
        storage: impl IntoIterator<Item = (Tenant, u64)>,
        total: u64,
        rules: &RuleList,
    ) -> Option<Decision> {
        let mut found = Vec::new();
        for (tenant, amount) in storage {
            let had = rules.largest_spread(tenant.tenant_hash());
            if let Some(spread) = self.wider(amount, amount, total, had) {
                let finding = Finding {
                    tenant,
                    amount,
                    error: 0,
                    periods: 0,
                    had,
                };
                found.push((spread, finding));
            }
        }
        self.decide(at, Basis::Storage, total, 0, found)
    }

    /// Ends the period if it is over, and decides from its counts: the second phase of algorithm 1.
    /// `rules` are those that the log has by now. Times are of one monotonic clock.
    ///
    /// A late call makes the period longer, not wrong: shares count, not rates.
    pub fn tick(&mut self, at: Duration, rules: &RuleList) -> Option<Decision> {
        let Some(began) = self.began else {
            self.began = Some(at);
            self.sketch.clear();
            return None;
        };
        if at < began.saturating_add(self.settings.period) {
            return None;
        }
        self.began = Some(at);
        let (total, floor) = (self.sketch.total(), self.sketch.floor());
        let mut hot = BTreeMap::new();
        let (mut found, mut is_confirmed) = (Vec::new(), false);
        if self.fits(Guard::Enough, total >= self.settings.least_writes) {
            for (hash, counter) in self.sketch.counters() {
                let certain = if self.fits(Guard::Error, false) {
                    counter.count
                } else {
                    counter.certain()
                };
                let least = if self.fits(Guard::Noise, false) {
                    certain
                } else {
                    certain.saturating_sub(3 * certain.isqrt())
                };
                let had = rules.largest_spread(hash);
                let Some(spread) = self.wider(least, certain, total, had) else {
                    continue;
                };
                let before = self.hot.get(&hash).copied().unwrap_or(0);
                let periods = before.saturating_add(1);
                hot.insert(hash, periods);
                let is_urgent = self.is_hot(least, total, self.settings.urgent);
                let confirmed = periods >= self.settings.confirm;
                is_confirmed |= confirmed;
                if self.fits(Guard::Confirm, confirmed || is_urgent) {
                    let finding = Finding {
                        tenant: counter.tenant.clone(),
                        amount: counter.count,
                        error: counter.error,
                        periods,
                        had,
                    };
                    found.push((spread, finding));
                }
            }
        }
        self.hot = hot;
        self.sketch.clear();
        let rested = self
            .decided
            .is_none_or(|decided| at >= decided.saturating_add(self.settings.pause));
        if !self.fits(Guard::Pause, rested) {
            return None;
        }
        let before = self.decided;
        let decision = self.decide(at, Basis::Writes, total, floor, found);
        if !is_confirmed {
            // The others are hot in a second period, and must not wait for the pause to end.
            self.decided = before;
        }
        decision
    }

    /// Whether a tenant has so many times the threshold; not if that is 0.
    fn is_hot(&self, least: u64, total: u64, times: u32) -> bool {
        let least = u128::from(least) * u128::from(self.shards.get());
        let threshold = u128::from(self.settings.threshold) * u128::from(times);
        times > 0 && least * 1_000 >= u128::from(total) * threshold
    }

    /// The larger spread that a tenant should have, if it should. `least` is for the question
    /// whether, `amount` for which one.
    fn wider(&self, least: u64, amount: u64, total: u64, had: Spread) -> Option<Spread> {
        let shards = u128::from(self.shards.get());
        let part = u128::from(self.settings.part);
        if total == 0 {
            return None;
        }
        if !self.fits(Guard::Threshold, self.is_hot(least, total, 1)) {
            return None;
        }
        let (least, amount) = (u128::from(least) * shards, u128::from(amount) * shards);
        let total = u128::from(total);
        let allowed = total * part * u128::from(had.get());
        let exceeds = least * 100_000 > allowed * (100 + u128::from(self.settings.margin));
        if had != Spread::ONE && !self.fits(Guard::Margin, exceeds) {
            return None;
        }
        let needed = (amount * 1_000).div_ceil(total * part).max(2);
        let most = u128::from(self.largest().get());
        let needed = if self.fits(Guard::Largest, false) {
            needed
        } else {
            needed.min(most)
        };
        let needed = u32::try_from(needed).unwrap_or(u32::MAX);
        let spread = Spread::new(needed.checked_next_power_of_two()?).ok()?;
        self.fits(Guard::Grows, spread > had).then_some(spread)
    }

    /// The largest spread of the settings that the table has the shards for.
    fn largest(&self) -> Spread {
        let shards = self.shards.get();
        let fitting = 1 << shards.ilog2();
        Spread::new(fitting)
            .unwrap_or(Spread::ONE)
            .min(self.settings.largest)
    }

    fn decide(
        &mut self,
        at: Duration,
        basis: Basis,
        total: u64,
        floor: u64,
        mut found: Vec<(Spread, Finding)>,
    ) -> Option<Decision> {
        if found.is_empty() {
            return None;
        }
        self.decided = Some(at);
        found.sort_by_cached_key(|(spread, finding)| {
            (std::cmp::Reverse(*spread), finding.tenant.tenant_hash())
        });
        let mut rules: Vec<Proposal> = Vec::new();
        let mut bytes = 0;
        for (spread, finding) in found {
            let more = finding.tenant.canonical().len() + NAME_OVERHEAD;
            match rules.last_mut() {
                Some(rule) if rule.spread == spread && bytes + more <= NAMES_LIMIT => {
                    bytes += more;
                    rule.findings.push(finding);
                }
                _ => {
                    bytes = more;
                    rules.push(Proposal {
                        spread,
                        findings: vec![finding],
                    });
                }
            }
        }
        Some(Decision {
            at,
            basis,
            total,
            floor,
            threshold: self.settings.threshold,
            shards: self.shards,
            rules,
        })
    }

    /// Whether a guard's condition holds; always, if a test leaves the guard out.
    fn fits(&self, guard: Guard, holds: bool) -> bool {
        #[cfg(test)]
        if self.without == Some(guard) {
            return true;
        }
        let _ = guard;
        holds
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::{BadSettings, Balancer, Decision, Guard, NAMES_LIMIT, Settings};
    use crate::entry::{ENTRY_LIMIT, Entry, TableName};
    use crate::hash::{TENANT_LIMIT, Tenant};
    use crate::key::Key;
    use crate::rules::{Rule, RuleList, Shards, Spread, Time};
    use crate::sketch::Sketch;

    const SHARDS: u32 = 512;

    fn tenant(number: u64) -> Tenant {
        Tenant::new(&Key::Integer(i64::try_from(number).unwrap())).unwrap()
    }

    fn spread(spread: u32) -> Spread {
        Spread::new(spread).unwrap()
    }

    fn balancer(settings: Settings) -> Balancer {
        Balancer::new(settings, Shards::new(SHARDS).unwrap()).unwrap()
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Adds a decision's rules to those of the log.
    fn add(rules: &mut RuleList, decision: &Decision) {
        for proposal in &decision.rules {
            let tenants = proposal.tenants();
            rules
                .add(&Rule {
                    time: Time(i64::try_from(decision.at.as_micros()).unwrap()),
                    spread: proposal.spread,
                    tenants: tenants.iter().map(Tenant::tenant_hash).collect(),
                })
                .unwrap();
        }
    }

    /// Counts writes of a period: those of some tenants, the rest by tenants below the threshold.
    fn period(balancer: &mut Balancer, writes: &[(u64, u64)], total: u64) {
        for (number, count) in writes {
            let name = tenant(*number);
            balancer.note(name.tenant_hash(), *count, || name);
        }
        let rest = total - writes.iter().map(|(_, count)| count).sum::<u64>();
        // Each of them has 0.05 % at most.
        let each = (total / 2_000).max(1);
        for number in 0..rest.div_ceil(each) {
            let name = tenant(1_000_000 + number);
            let writes = each.min(rest - number * each);
            balancer.note(name.tenant_hash(), writes, || name);
        }
    }

    /// Tenants and spreads of the decisions of periods of one second, in order.
    fn run(
        balancer: &mut Balancer,
        rules: &RuleList,
        periods: &[&[(u64, u64)]],
        total: u64,
    ) -> Vec<(u64, Tenant, u32)> {
        let mut found = Vec::new();
        balancer.tick(seconds(0), rules);
        for (second, writes) in (1..).zip(periods) {
            period(balancer, writes, total);
            let decision = balancer.tick(seconds(second), rules);
            for proposal in decision.into_iter().flat_map(|decision| decision.rules) {
                for name in proposal.tenants() {
                    found.push((second, name, proposal.spread.get()));
                }
            }
        }
        found
    }

    /// A guard; what the log has; periods after which a rule comes only without the guard.
    type Case = (
        Guard,
        Settings,
        Option<(u64, u32)>,
        Vec<&'static [(u64, u64)]>,
        u64,
    );

    fn cases() -> Vec<Case> {
        let usual = Settings {
            confirm: 1,
            ..Settings::default()
        };
        vec![
            // 0.05 % of the writes; the threshold is 0.098 %.
            (Guard::Threshold, usual, None, vec![&[(1, 500)]], 1_000_000),
            // The scenario's tenant 7, by chance in one period.
            (Guard::Noise, usual, None, vec![&[(7, 50)]], 40_000),
            (
                Guard::Confirm,
                Settings {
                    urgent: 0,
                    ..Settings::default()
                },
                None,
                vec![&[(1, 9_600)], &[(2, 9_600)], &[(1, 9_600)]],
                120_000,
            ),
            (
                Guard::Margin,
                usual,
                // 2.1 % need 86 shards; 64 with the margin are enough for 1.95 %.
                Some((1, 32)),
                vec![&[(1, 45_00)]],
                480_000,
            ),
            (
                Guard::Grows,
                usual,
                Some((1, 64)),
                vec![&[(1, 30_000)]],
                120_000,
            ),
            (Guard::Enough, usual, None, vec![&[(1, 900)]], 990),
        ]
    }

    #[test]
    fn each_guard_keeps_a_rule_away() {
        for (guard, settings, rule, periods, total) in cases() {
            let mut rules = RuleList::new();
            if let Some((number, had)) = rule {
                rules
                    .add(&Rule {
                        time: Time(0),
                        spread: spread(had),
                        tenants: vec![tenant(number).tenant_hash()],
                    })
                    .unwrap();
            }
            let mut with = balancer(settings);
            assert_eq!(run(&mut with, &rules, &periods, total), [], "{guard:?}");
            let mut without = balancer(settings);
            without.without = Some(guard);
            assert_ne!(run(&mut without, &rules, &periods, total), [], "{guard:?}");
        }
    }

    #[test]
    fn after_a_decision_nothing_is_decided_for_a_while() {
        let hot: &[(u64, u64)] = &[(1, 9_600)];
        let times = |without| {
            let mut balancer = balancer(Settings::default());
            balancer.without = without;
            // The rule never reaches the log.
            balancer.settings.urgent = 0;
            run(&mut balancer, &RuleList::new(), &[hot; 12], 20_000)
                .into_iter()
                .map(|(second, ..)| second)
                .collect::<Vec<_>>()
        };
        assert_eq!(times(None), [2, 7, 12]);
        assert_eq!(times(Some(Guard::Pause)).len(), 11);
    }

    #[test]
    fn a_spread_is_at_most_the_largest() {
        let hot: &[(u64, u64)] = &[(1, 9_600)];
        let largest = |without, shards| {
            let settings = Settings {
                confirm: 1,
                ..Settings::default()
            };
            let mut balancer = Balancer::new(settings, Shards::new(shards).unwrap()).unwrap();
            balancer.without = without;
            run(&mut balancer, &RuleList::new(), &[hot], 20_000)[0].2
        };
        assert_eq!(largest(None, SHARDS), 64);
        assert_eq!(largest(None, 48), 32);
        assert!(largest(Some(Guard::Largest), SHARDS) > 64);
    }

    #[test]
    fn the_error_of_a_count_is_no_reason() {
        let settings = Settings {
            confirm: 1,
            counters: 1_100,
            ..Settings::default()
        };
        let found = |without| {
            let mut balancer = balancer(settings);
            balancer.without = without;
            balancer.tick(seconds(0), &RuleList::new());
            // 1,100 tenants take all counters; the next 50 get their counts as an error.
            for number in 0..1_150 {
                let name = tenant(number);
                let writes = if number < 1_100 { 20_000 } else { 4_000 };
                balancer.note(name.tenant_hash(), writes, || name);
            }
            balancer.tick(seconds(1), &RuleList::new()).is_some()
        };
        assert!(!found(None));
        assert!(found(Some(Guard::Error)));
    }

    #[test]
    fn the_scenario_in_words() {
        let mut balancer = balancer(Settings::default());
        let mut rules = RuleList::new();
        assert_eq!(balancer.next(), None);
        balancer.tick(seconds(0), &rules);
        assert_eq!(balancer.next(), Some(seconds(1)));
        period(&mut balancer, &[(42, 9_600), (9, 360), (7, 144)], 120_000);
        assert_eq!(balancer.tick(Duration::from_millis(999), &rules), None);
        let decision = balancer.tick(seconds(1), &rules).unwrap();
        assert_eq!(decision.rules.len(), 1);
        let rule = &decision.rules[0];
        assert_eq!((rule.spread.get(), rule.tenants()), (64, vec![tenant(42)]));
        let finding = &rule.findings[0];
        assert_eq!(
            decision.reason(finding),
            "8.0 % of all writes in 1 period, threshold 0.098 %"
        );
        assert_eq!(
            decision.effect(finding, rule.spread),
            "0.13 % on each of 64 shards, before 8.0 % on 1 shard"
        );
        add(&mut rules, &decision);
        period(&mut balancer, &[(42, 9_600), (9, 360), (7, 144)], 120_000);
        let decision = balancer.tick(seconds(2), &rules).unwrap();
        assert_eq!(decision.rules.len(), 1);
        assert_eq!(decision.rules[0].tenants(), [tenant(9)]);
        add(&mut rules, &decision);
        period(&mut balancer, &[(43, 9_600)], 120_000);
        assert_eq!(balancer.tick(seconds(3), &rules), None, "a pause");
        for (second, writes) in (8..20).zip([10_800, 4_800].into_iter().cycle()) {
            period(&mut balancer, &[(42, writes)], 120_000);
            assert_eq!(balancer.tick(seconds(second), &rules), None);
        }
    }

    #[test]
    fn counts_of_nodes_are_added() {
        let mut balancer = balancer(Settings::default());
        let rules = RuleList::new();
        balancer.tick(seconds(0), &rules);
        let mut decisions = Vec::new();
        for second in 1..3 {
            // Each node has 0.06 % of its own writes, and tenant 1 on both.
            for node in 0..2 {
                let mut counts = Sketch::new(2_048);
                counts.add(tenant(1).tenant_hash(), 300, || tenant(1));
                for number in 0..49_000 {
                    let name = tenant(10 + node * 49_000 + number);
                    counts.add(name.tenant_hash(), 1, || name);
                }
                balancer.absorb(&counts);
            }
            assert_eq!(balancer.counts().total(), 98_600);
            decisions.extend(balancer.tick(seconds(second), &rules));
        }
        assert_eq!(decisions.len(), 1);
        assert_eq!(decisions[0].rules[0].tenants(), [tenant(1)]);
        assert!(decisions[0].floor > 0);
    }

    #[test]
    fn storage_gives_the_first_rules() {
        let mut balancer = balancer(Settings::default());
        let storage = [(tenant(1), 100_000), (tenant(2), 2_000), (tenant(3), 900)];
        let decision = balancer
            .start(seconds(0), storage, 1_000_000, &RuleList::new())
            .unwrap();
        let spreads: Vec<_> = decision
            .rules
            .iter()
            .map(|rule| (rule.spread.get(), rule.tenants()))
            .collect();
        assert_eq!(spreads, [(64, vec![tenant(1)]), (16, vec![tenant(2)])]);
        assert_eq!(
            decision.reason(&decision.rules[1].findings[0]),
            "0.20 % of all storage, threshold 0.098 %"
        );
        let none = balancer.start(seconds(9), [(tenant(1), 5)], 0, &RuleList::new());
        assert_eq!(none, None);
    }

    #[test]
    fn a_rule_fits_into_an_entry() {
        let long = |number: u32| Tenant::new(&Key::Text(&format!("{number:0>500}"))).unwrap();
        let storage = (0..400).map(|number| (long(number), 1_000));
        let mut balancer = balancer(Settings::default());
        let decision = balancer
            .start(seconds(0), storage, 400_000, &RuleList::new())
            .unwrap();
        assert!(decision.rules.len() > 1);
        let mut tenants = 0;
        for rule in &decision.rules {
            assert_eq!(rule.spread, decision.rules[0].spread);
            tenants += rule.findings.len();
            let entry = Entry::Rule {
                table: TableName::new(&[b'x'; 100]).unwrap(),
                time: Time(0),
                spread: rule.spread,
                tenants: rule.tenants(),
            };
            assert!(entry.encode().unwrap().len() <= ENTRY_LIMIT);
        }
        assert_eq!(tenants, 400);
        const { assert!(NAMES_LIMIT + 2 * TENANT_LIMIT < ENTRY_LIMIT) };
    }

    #[test]
    fn settings_that_do_not_fit_are_refused() {
        let shards = Shards::new(SHARDS).unwrap();
        let usual = Settings::default();
        let refused = |settings: Settings| settings.check(shards).unwrap_err();
        assert_eq!(usual.check(shards), Ok(()));
        let zero = Duration::ZERO;
        assert_eq!(
            refused(Settings {
                period: zero,
                ..usual
            }),
            BadSettings::Period
        );
        assert_eq!(
            refused(Settings {
                pause: zero,
                ..usual
            }),
            BadSettings::Pause
        );
        assert_eq!(refused(Settings { part: 0, ..usual }), BadSettings::Shares);
        assert_eq!(
            refused(Settings {
                threshold: 100,
                ..usual
            }),
            BadSettings::Shares
        );
        assert_eq!(
            refused(Settings {
                confirm: 0,
                ..usual
            }),
            BadSettings::Confirm
        );
        let few = refused(Settings {
            counters: 1_024,
            ..usual
        });
        assert_eq!(few, BadSettings::Counters(1_024));
        assert!(few.hint().ends_with('.'));
    }

    /// Hot tenants of a random stream, by number: their writes of 100,000.
    fn hot() -> impl Strategy<Value = Vec<(u64, u64)>> {
        vec((0..12_u64, 0..6_000_u64), 0..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        /// Rules only grow, each tenant comes once, and a decision is the same twice.
        #[test]
        fn no_rule_is_smaller_than_the_one_before(periods in vec(hot(), 1..12)) {
            let settings = Settings { confirm: 1, pause: seconds(1), ..Settings::default() };
            let (mut one, mut two) = (balancer(settings), balancer(settings));
            let mut rules = RuleList::new();
            one.tick(seconds(0), &rules);
            two.tick(seconds(0), &rules);
            for (second, writes) in (1..).zip(&periods) {
                period(&mut one, writes, 100_000);
                period(&mut two, writes, 100_000);
                let decision = one.tick(seconds(second), &rules);
                prop_assert_eq!(&decision, &two.tick(seconds(second), &rules));
                let Some(decision) = decision else { continue };
                let mut seen = Vec::new();
                for rule in &decision.rules {
                    for finding in &rule.findings {
                        let had = rules.largest_spread(finding.tenant.tenant_hash());
                        prop_assert_eq!(had, finding.had);
                        prop_assert!(rule.spread > had);
                        prop_assert!(rule.spread.get() <= 64);
                        prop_assert!(!seen.contains(&finding.tenant));
                        seen.push(finding.tenant.clone());
                    }
                }
                let spreads: Vec<_> = decision.rules.iter().map(|rule| rule.spread).collect();
                prop_assert!(spreads.windows(2).all(|pair| pair[0] > pair[1]));
                add(&mut rules, &decision);
            }
        }

        /// Each tenant that is well above the threshold is found after two periods, and none below.
        #[test]
        fn hot_tenants_are_found(writes in hot()) {
            let mut balancer = balancer(Settings::default());
            let mut sums = std::collections::BTreeMap::<u64, u64>::new();
            for (number, count) in &writes {
                *sums.entry(*number).or_default() += count;
            }
            let found = run(&mut balancer, &RuleList::new(), &[&writes, &writes], 100_000);
            for (number, count) in sums {
                let is_found = found.iter().any(|(_, name, _)| *name == tenant(number));
                // The threshold is 98 of 100,000; the error is at most 49.
                if count >= 98 + 49 + 3 * 14 {
                    prop_assert!(is_found, "{} with {}", number, count);
                }
                if count < 97 {
                    prop_assert!(!is_found, "{} with {}", number, count);
                }
            }
        }
    }
}
