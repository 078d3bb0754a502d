//! What the group's log has made of routing: the last `Close`, and each routed table's rules and
//! map. Every node applies the same entries in the same order to this state.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::entry::{Entry, TableName};
use crate::hash::{RecordHash, Tenant, TenantHash};
use crate::map::ShardMap;
use crate::rules::{Invalid, Rule, RuleList, Run, Shard, Spread, Time};
use crate::window::{Admission, ReadBound, Window};

/// The largest number of routed tables.
pub const TABLES_LIMIT: usize = 1_024;

/// Why an entry has no effect. Every node refuses it alike.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The table is not routed.
    #[error("table is not routed")]
    NotRouted,
    /// The table is routed already.
    #[error("table is routed already")]
    RoutedAlready,
    /// The table is open already.
    #[error("routed table takes rows already")]
    OpenAlready,
    /// Too many tables are routed.
    #[error("too many tables are routed")]
    TooManyTables,
    /// The rule's time is closed: rows created after it may have their place.
    #[error("routing rule comes too late for its time")]
    Closed {
        /// The first time from which a rule can count.
        next: Time,
    },
    /// A later time is closed already. Harmless: a leader's clock is behind, or two leaders closed.
    #[error("a later time is closed already")]
    ClosedLater,
    /// A value is not valid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

impl Refusal {
    /// The hint for the user: a sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::NotRouted => "Route the table with braid.route_table first.",
            Self::RoutedAlready | Self::OpenAlready => {
                "Look at the table's shards in braid.shards."
            }
            Self::TooManyTables => "At most 1024 tables can be routed.",
            Self::Closed { .. } | Self::ClosedLater => "Try again: the next time is chosen anew.",
            Self::Invalid(invalid) => invalid.hint(),
        }
    }
}

/// What an entry has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// A table is routed, and prepared for its rows.
    Routed,
    /// A table takes rows.
    Opened,
    /// A table is not routed any more.
    Unrouted,
    /// Times up to this one are closed.
    Closed(Time),
    /// A rule was added.
    Rule {
        /// How many of its tenants have a larger spread than before.
        widened: usize,
    },
}

/// A routed table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedTable {
    open: bool,
    closed: Time,
    rules: RuleList,
    map: ShardMap,
}

impl RoutedTable {
    /// Whether the table takes rows. Before that its first rules are added, from any time on.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.open
    }

    /// The last time that is closed: no rule counts from a time at or before it. `-infinity` while
    /// the table is not open.
    #[must_use]
    pub const fn closed(&self) -> Time {
        self.closed
    }

    /// The table's rules.
    #[must_use]
    pub const fn rules(&self) -> &RuleList {
        &self.rules
    }

    /// The table's map.
    #[must_use]
    pub const fn map(&self) -> &ShardMap {
        &self.map
    }

    /// The map, for its moves.
    pub const fn map_mut(&mut self) -> &mut ShardMap {
        &mut self.map
    }

    /// The first time from which a new rule can count. A proposer takes this.
    #[must_use]
    pub const fn next_rule_time(&self) -> Time {
        self.closed.plus(1)
    }

    /// Whether this node, whose clock shows `now`, may create a row dated `created`. Only then is
    /// the row's [`Self::placement`] the same on all nodes, for ever.
    #[must_use]
    pub const fn may_create(&self, window: &Window, created: Time, now: Time) -> Admission {
        if self.open {
            window.admission(created, now, self.closed)
        } else {
            Admission::WaitForClose
        }
    }

    /// Whether the node knows the place of rows that were created at this time: no later entry
    /// changes it. A node that finds a row by its own values, to update or delete it, asks this.
    #[must_use]
    pub const fn is_final(&self, created: Time) -> bool {
        created.0 <= self.closed.0
    }

    /// What a read on this node, whose clock shows `now`, may rely on. `upto`: it asks only for
    /// rows created at or before it.
    #[must_use]
    pub const fn read_bound(&self, window: &Window, upto: Option<Time>, now: Time) -> ReadBound {
        if self.open {
            window.read_bound(upto, now, self.closed)
        } else {
            ReadBound::Everywhere
        }
    }

    /// The shard of a row. Another node can place it elsewhere unless [`Self::is_final`].
    #[must_use]
    pub fn placement(&self, tenant: TenantHash, record: RecordHash, created: Time) -> Shard {
        self.rules
            .placement(self.map.shards(), tenant, record, created)
    }

    /// The shards that a read of a tenant's rows has to ask.
    #[must_use]
    pub fn candidates(&self, tenant: TenantHash, bound: ReadBound) -> Run {
        let shards = self.map.shards();
        match bound {
            ReadBound::Upto(upto) => self.rules.candidates(shards, tenant, Some(upto)),
            ReadBound::Known => self.rules.candidates(shards, tenant, None),
            ReadBound::Everywhere => Run::all(shards),
        }
    }

    pub(crate) const fn stored(open: bool, closed: Time, rules: RuleList, map: ShardMap) -> Self {
        Self {
            open,
            closed,
            rules,
            map,
        }
    }

    fn add_rule(
        &mut self,
        time: Time,
        spread: Spread,
        tenants: &[Tenant],
    ) -> Result<Applied, Refusal> {
        if time <= self.closed {
            return Err(Refusal::Closed {
                next: self.next_rule_time(),
            });
        }
        self.map.shards().check(spread)?;
        let widened = self.rules.add(&Rule {
            time,
            spread,
            tenants: tenants.iter().map(Tenant::tenant_hash).collect(),
        })?;
        Ok(Applied::Rule { widened })
    }
}

/// The state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    closed: Time,
    tables: BTreeMap<TableName, RoutedTable>,
}

impl Default for Routing {
    fn default() -> Self {
        Self::new()
    }
}

impl Routing {
    /// The state before the first entry: nothing is routed, no time is closed.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            closed: Time::MIN,
            tables: BTreeMap::new(),
        }
    }

    /// The last time that is closed, for all open tables.
    #[must_use]
    pub const fn closed(&self) -> Time {
        self.closed
    }

    /// A routed table.
    #[must_use]
    pub fn table(&self, name: &TableName) -> Option<&RoutedTable> {
        self.tables.get(name)
    }

    /// A routed table, for moves of its map.
    pub fn table_mut(&mut self, name: &TableName) -> Option<&mut RoutedTable> {
        self.tables.get_mut(name)
    }

    /// All routed tables.
    pub fn tables(&self) -> impl Iterator<Item = (&TableName, &RoutedTable)> {
        self.tables.iter()
    }

    /// Applies an entry of the log.
    ///
    /// # Errors
    /// [`Refusal`]; then nothing has changed.
    pub fn apply(&mut self, entry: &Entry) -> Result<Applied, Refusal> {
        match entry {
            Entry::Route {
                table,
                shards,
                sets,
            } => {
                if self.tables.contains_key(table) {
                    return Err(Refusal::RoutedAlready);
                }
                if self.tables.len() >= TABLES_LIMIT {
                    return Err(Refusal::TooManyTables);
                }
                let routed = RoutedTable {
                    open: false,
                    closed: Time::MIN,
                    rules: RuleList::new(),
                    map: ShardMap::distribute(*shards, sets.clone())?,
                };
                self.tables.insert(table.clone(), routed);
                Ok(Applied::Routed)
            }
            Entry::Open { table } => {
                let closed = self.closed;
                let table = self.routed(table)?;
                if table.open {
                    return Err(Refusal::OpenAlready);
                }
                table.open = true;
                table.closed = closed;
                Ok(Applied::Opened)
            }
            Entry::Unroute { table } => match self.tables.remove(table) {
                Some(_) => Ok(Applied::Unrouted),
                None => Err(Refusal::NotRouted),
            },
            Entry::Close { time } => self.close(*time),
            Entry::Rule {
                table,
                time,
                spread,
                tenants,
            } => self.routed(table)?.add_rule(*time, *spread, tenants),
        }
    }

    pub(crate) const fn closed_at(closed: Time) -> Self {
        Self {
            closed,
            tables: BTreeMap::new(),
        }
    }

    pub(crate) fn put(&mut self, name: TableName, table: RoutedTable) {
        self.tables.insert(name, table);
    }

    fn close(&mut self, time: Time) -> Result<Applied, Refusal> {
        if !time.is_finite() {
            return Err(Invalid::InfiniteTime.into());
        }
        if time <= self.closed {
            return Err(Refusal::ClosedLater);
        }
        self.closed = time;
        for table in self.tables.values_mut().filter(|table| table.open) {
            table.closed = time;
        }
        Ok(Applied::Closed(time))
    }

    fn routed(&mut self, table: &TableName) -> Result<&mut RoutedTable, Refusal> {
        self.tables.get_mut(table).ok_or(Refusal::NotRouted)
    }
}
