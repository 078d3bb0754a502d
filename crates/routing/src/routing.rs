//! What the group's log has made of routing: the last `Close`, and each routed table's rules and
//! map. Every node applies the same entries in the same order to this state.

use std::collections::BTreeMap;
use std::sync::Arc;

use braid_codec::{Malformed, Reader, Writer};
use thiserror::Error;

use crate::entry::{self, Entry, Expressions, MoveStep, TableName};
use crate::hash::{RecordHash, Tenant, TenantHash};
use crate::map::{MoveError, NodeId, SetId, ShardMap};
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
    /// The table takes rows still.
    #[error("routed table takes rows")]
    TakesRows,
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
    /// A step of a move is not possible.
    #[error("{0}")]
    Move(MoveError, Shard),
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
            Self::TakesRows => "End the routing with braid.unroute_table.",
            Self::TooManyTables => "At most 1024 tables can be routed.",
            Self::Closed { .. } | Self::ClosedLater => "Try again: the next time is chosen anew.",
            Self::Invalid(invalid) => invalid.hint(),
            Self::Move(error, _) => error.hint(),
        }
    }
}

impl Refusal {
    /// Writes the refusal's bytes.
    pub fn write(&self, w: &mut Writer) {
        match self {
            Self::NotRouted => w.u8(1),
            Self::RoutedAlready => w.u8(2),
            Self::OpenAlready => w.u8(3),
            Self::TooManyTables => w.u8(4),
            Self::Closed { next } => w.u8(5).i64(next.0),
            Self::ClosedLater => w.u8(6),
            Self::TakesRows => w.u8(8),
            Self::Move(error, shard) => {
                let (number, set) = match error {
                    MoveError::NoShard(_) => (1, 0),
                    MoveError::NoSet(set) => (2, set.0),
                    MoveError::AtHome { set, .. } => (3, set.0),
                    MoveError::Moving(_) => (4, 0),
                    MoveError::OtherPhase(_) => (5, 0),
                };
                w.u8(9).u8(number).u32(shard.0).u32(set)
            }
            Self::Invalid(invalid) => {
                w.u8(7);
                invalid.write(w);
                w
            }
        };
    }

    /// Reads a refusal.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match r.u8()? {
            1 => Self::NotRouted,
            2 => Self::RoutedAlready,
            3 => Self::OpenAlready,
            4 => Self::TooManyTables,
            5 => Self::Closed {
                next: entry::time(r)?,
            },
            6 => Self::ClosedLater,
            7 => Self::Invalid(Invalid::read(r)?),
            8 => Self::TakesRows,
            9 => {
                let number = r.u8()?;
                let (shard, set) = (Shard(r.u32()?), SetId(r.u32()?));
                let error = match number {
                    1 => MoveError::NoShard(shard),
                    2 => MoveError::NoSet(set),
                    3 => MoveError::AtHome { shard, set },
                    4 => MoveError::Moving(shard),
                    5 => MoveError::OtherPhase(shard),
                    other => return Err(r.unknown(other)),
                };
                Self::Move(error, shard)
            }
            other => return Err(r.unknown(other)),
        })
    }
}

/// What an entry has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// A table is routed, and prepared for its rows.
    Routed,
    /// A table takes rows.
    Opened,
    /// A table takes no rows any more.
    Shut,
    /// A table is not routed any more.
    Unrouted,
    /// A set was added, or a shard's move has come a step further.
    Moved,
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
    pub(crate) expressions: Expressions,
    pub(crate) open: bool,
    pub(crate) closed: Time,
    pub(crate) rules: RuleList,
    /// The tenants that rules list.
    pub(crate) tenants: BTreeMap<TenantHash, Tenant>,
    pub(crate) map: ShardMap,
}

impl RoutedTable {
    /// Whether the table takes rows. Before that its first rules are added, from any time on; after
    /// [`Entry::Shut`] from the last time on that was closed while it took rows.
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

    /// The table's tenant, record and creation.
    #[must_use]
    pub const fn expressions(&self) -> &Expressions {
        &self.expressions
    }

    /// A tenant that a rule lists, by its hash.
    #[must_use]
    pub fn tenant(&self, hash: TenantHash) -> Option<&Tenant> {
        self.tenants.get(&hash)
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
        if widened > 0 {
            for tenant in tenants {
                let hash = tenant.tenant_hash();
                // An earlier rule with a larger spread may count for this one.
                if self.rules.largest_spread(hash) > Spread::ONE {
                    self.tenants.entry(hash).or_insert_with(|| tenant.clone());
                }
            }
        }
        Ok(Applied::Rule { widened })
    }
}

/// The state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    closed: Time,
    /// Shared with copies of the state, which are made often.
    tables: BTreeMap<TableName, Arc<RoutedTable>>,
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
        self.tables.get(name).map(Arc::as_ref)
    }

    /// A routed table, for moves of its map.
    pub fn table_mut(&mut self, name: &TableName) -> Option<&mut RoutedTable> {
        self.tables.get_mut(name).map(Arc::make_mut)
    }

    /// All routed tables.
    pub fn tables(&self) -> impl Iterator<Item = (&TableName, &RoutedTable)> {
        let tables = self.tables.iter();
        tables.map(|(name, table)| (name, table.as_ref()))
    }

    /// The first routed table of which this node alone has shards.
    #[must_use]
    pub fn only_home(&self, node: NodeId) -> Option<&TableName> {
        let found = self
            .tables()
            .find(|(_, table)| table.map.is_only_home(node));
        found.map(|(name, _)| name)
    }

    /// Applies an entry of the log.
    ///
    /// # Errors
    /// [`Refusal`]; then nothing has changed.
    pub fn apply(&mut self, entry: &Entry) -> Result<Applied, Refusal> {
        match entry {
            Entry::Route {
                table,
                expressions,
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
                    expressions: expressions.clone(),
                    open: false,
                    closed: Time::MIN,
                    rules: RuleList::new(),
                    tenants: BTreeMap::new(),
                    map: ShardMap::distribute(*shards, sets.clone())?,
                };
                self.tables.insert(table.clone(), Arc::new(routed));
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
            Entry::Shut { table } => {
                self.routed(table)?.open = false;
                Ok(Applied::Shut)
            }
            Entry::Unroute { table } => {
                if self.routed(table)?.open {
                    return Err(Refusal::TakesRows);
                }
                self.tables.remove(table);
                Ok(Applied::Unrouted)
            }
            Entry::AddSet { table, set } => {
                self.routed(table)?.map.add_set(set.clone())?;
                Ok(Applied::Moved)
            }
            Entry::Move { table, shard, step } => {
                let map = &mut self.routed(table)?.map;
                match step {
                    MoveStep::Begin(to) => map.begin_move(*shard, *to),
                    MoveStep::Switch => map.switch(*shard),
                    MoveStep::Finish => map.finish_move(*shard),
                    MoveStep::Cancel => map.cancel_move(*shard),
                }
                .map_err(|error| Refusal::Move(error, *shard))?;
                Ok(Applied::Moved)
            }
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
        self.tables.insert(name, Arc::new(table));
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
            Arc::make_mut(table).closed = time;
        }
        Ok(Applied::Closed(time))
    }

    fn routed(&mut self, table: &TableName) -> Result<&mut RoutedTable, Refusal> {
        self.table_mut(table).ok_or(Refusal::NotRouted)
    }
}
