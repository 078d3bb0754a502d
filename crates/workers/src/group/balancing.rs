//! The balancer of routing in the group worker (`braid_routing::Balancer`).
//!
//! Each member takes the counts of its walsenders (`braid_node::tenant_load`) four times in a
//! period, and sends them to the group's leader. The leader adds them up and decides. No process
//! does anything for a table whose balancer is off, and nothing is sent or written while a table is
//! not written to.
//!
//! How a decision becomes a rule, if leaders come and go:
//!
//! 1. Leader A decides, and proposes the decision as an entry of the log. All members apply it:
//!    each writes it into `braid.balancer_decision`, and remembers the rule as owed.
//! 2. A proposes the rule, from a time on that nobody has proposed to close. If it is closed
//!    nevertheless, A proposes the rule again half a second later.
//! 3. A ends before the log has the rule. B becomes the leader, owes the rule, and proposes it.
//! 4. The log has the rule. No member owes it any more. If A's proposal comes as well, it widens
//!    nobody's spread, and has no effect.
//!
//! A rule that is owed, or advised, counts as if it were there: it is not decided on again.
//!
//! Not for: which tenants get which rule, which is `crates/routing`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use braid_bgworker::hex;
use braid_bgworker::sqlstate::SqlState;
use braid_group::{Applied, Command, GroupId, MemberId, MemberState, State};
use braid_node::registry::ManagerEntry;
use braid_node::routing;
use braid_node::settings;
use braid_node::subscription::{execute, rows};
use braid_node::tenant_load::{LoadRow, LoadTable, Loads, TABLES, VIEW};
use braid_postgres::error::{self, PgError};
use braid_postgres::timestamp;
use braid_routing::{
    Balanced, Balancer, Decided, Entry, Mode, NodeId, Report, RoutedTable, Rule, RuleList,
    Settings, Sketch, Spread, TableName, Tenant, Time,
};

/// Reports in a period: a node whose report comes late changes shares by as little.
const REPORTS: u32 = 4;
/// A rule that is owed is proposed again after this.
const AGAIN: Duration = Duration::from_millis(500);
/// A rule that has not come so long after its decision is given up, in microseconds.
const GIVEN_UP: i64 = 60_000_000;
/// Tenants of each node and table that are shown.
const SHOWN: usize = 50;
/// Decisions that are kept, one for each tenant.
const KEPT: i64 = 10_000;

/// Whether an entry changes which tables have a balancer.
pub(super) fn concerns(entry: &Applied) -> bool {
    match &entry.proposal.command {
        Command::SetOption { name, .. } => Balanced::is_option(name),
        Command::Route(Entry::Open { .. } | Entry::Unroute { .. }) => true,
        _ => false,
    }
}

/// Messages to send and entries to propose now.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) send: Vec<(MemberId, Vec<u8>)>,
    pub(super) propose: Vec<Command>,
}

/// How this process stands to the group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Standing {
    pub(super) me: MemberId,
    pub(super) leader: Option<MemberId>,
    pub(super) leads: bool,
}

/// A rule that was decided on and that the log may not have yet.
#[derive(Debug)]
struct Owed {
    decided: Time,
    spread: Spread,
    tenants: Vec<Tenant>,
    proposed: Option<Instant>,
}

impl Owed {
    fn is_there(&self, rules: &RuleList) -> bool {
        let has = |tenant: &Tenant| rules.largest_spread(tenant.tenant_hash()) >= self.spread;
        self.tenants.iter().all(has)
    }

    fn rule(&self) -> Rule {
        Rule {
            time: Time(0),
            spread: self.spread,
            tenants: self.tenants.iter().map(Tenant::tenant_hash).collect(),
        }
    }
}

/// The writes of one node.
#[derive(Debug)]
struct Share {
    /// In the present period.
    counts: Sketch,
    /// In the last one, and how long it was.
    last: Option<(Sketch, Duration)>,
}

/// A table with a balancer.
#[derive(Debug)]
struct Table {
    balanced: Balanced,
    load: LoadTable,
    /// At the leader, if its settings fit the table.
    balancer: Option<Balancer>,
    /// The server's log has that they do not fit.
    is_misfit: bool,
    /// The rules that were advised.
    advised: RuleList,
    owed: Vec<Owed>,
    /// By node: at the leader of all nodes, elsewhere of this one.
    shares: BTreeMap<NodeId, Share>,
}

impl Table {
    fn share(&mut self, node: NodeId, counters: usize) -> &mut Share {
        self.shares.entry(node).or_insert_with(|| Share {
            counts: Sketch::new(counters),
            last: None,
        })
    }

    /// The rules that count, with those that are advised or owed.
    fn rules(&self, routed: &RoutedTable) -> RuleList {
        let mut rules = routed.rules().clone();
        let more = self.advised.rules().into_iter();
        for rule in more.chain(self.owed.iter().map(Owed::rule)) {
            // Rules that are too many are not decided on either.
            let _ = rules.add(&rule);
        }
        rules
    }

    fn note(&mut self, decided: &Decided) {
        let Some(rule) = decided.rule() else { return };
        let owed = Owed {
            decided: decided.time,
            spread: rule.spread,
            tenants: rule.tenants(),
            proposed: None,
        };
        if decided.adds {
            self.owed.push(owed);
        } else {
            let _ = self.advised.add(&owed.rule());
        }
    }
}

/// The balancer in the group worker.
pub(super) struct Balancing {
    entry: &'static ManagerEntry,
    loads: Option<Loads>,
    started: Instant,
    settings: Settings,
    tables: BTreeMap<TableName, Table>,
    reported: Instant,
    period_began: Instant,
    /// Whether anything is shown.
    shows: bool,
}

impl Balancing {
    pub(super) fn new(entry: &'static ManagerEntry) -> Self {
        Self {
            entry,
            loads: None,
            started: Instant::now(),
            settings: settings::balancer(),
            tables: BTreeMap::new(),
            reported: Instant::now(),
            period_began: Instant::now(),
            shows: false,
        }
    }

    /// Keeps to the tables that have a balancer.
    ///
    /// # Errors
    /// 53200 and the like from PostgreSQL.
    pub(super) fn follow(&mut self, state: &State) -> Result<(), PgError> {
        let balanced = |name: &TableName| {
            let value = state.option(&Balanced::option(name))?;
            Balanced::read(value)
        };
        let wanted: BTreeMap<TableName, Balanced> = state
            .routing()
            .tables()
            .filter_map(|(name, _)| Some((name.clone(), balanced(name)?)))
            .collect();
        self.tables
            .retain(|name, table| wanted.get(name) == Some(&table.balanced));
        for (name, balanced) in wanted {
            if self.tables.contains_key(&name) {
                continue;
            }
            let advised = error::transaction(|| advised(&name, balanced))?;
            let table = Table {
                balanced,
                load: LoadTable::of(&name),
                balancer: None,
                is_misfit: false,
                advised,
                owed: Vec::new(),
                shares: BTreeMap::new(),
            };
            self.tables.insert(name, table);
        }
        self.keep_loads()
    }

    fn keep_loads(&mut self) -> Result<(), PgError> {
        if self.tables.is_empty() && self.loads.is_none() {
            return Ok(());
        }
        let loads = match self.loads {
            Some(loads) => loads,
            None => *self.loads.insert(Loads::open(self.entry)?),
        };
        let tables: Vec<LoadTable> = self.tables.values().map(|table| table.load).collect();
        let left = loads.keep(&tables);
        if left > 0 {
            PgError::new(
                SqlState::ProgramLimitExceeded,
                format!("writes of {left} routed tables are not counted"),
            )
            .with_hint(format!(
                "At most {TABLES} tables of a database can have a balancer: turn others off with braid.set_balancer."
            ))
            .log("braid group");
        }
        Ok(())
    }

    /// Notes a decision that the group's log has.
    pub(super) fn note(&mut self, decided: &Decided) {
        if let Some(table) = self.tables.get_mut(&decided.table)
            && table.balanced.since <= decided.time
        {
            table.note(decided);
        }
    }

    /// Takes a report of another member, if this one leads.
    pub(super) fn receive(
        &mut self,
        message: &[u8],
        group: &GroupId,
        state: &State,
        standing: Standing,
    ) {
        let Ok(report) = Report::decode(message, self.settings.counters) else {
            return;
        };
        let is_member = MemberId::new(report.from.0)
            .and_then(|member| state.member(member))
            .is_some_and(|member| member.state != MemberState::Removed);
        if report.group == group.0 && is_member && standing.leads {
            self.absorb(&report.table, report.from, &report.counts);
        }
    }

    fn absorb(&mut self, name: &TableName, node: NodeId, counts: &Sketch) {
        if let Some(table) = self.tables.get_mut(name) {
            if let Some(balancer) = &mut table.balancer {
                balancer.absorb(counts);
            }
            let share = table.share(node, self.settings.counters);
            share.counts.absorb(counts);
        }
    }

    /// Says what is to be done now. Called in each tick of the worker.
    pub(super) fn tick(&mut self, group: &GroupId, state: &State, standing: Standing) -> Step {
        let mut step = Step::default();
        if self.tables.is_empty() && !self.shows {
            return step;
        }
        self.take_settings(state, standing);
        if self.reported.elapsed() >= self.settings.period / REPORTS {
            self.reported = Instant::now();
            self.report(group, standing, &mut step);
        }
        let at = self.started.elapsed();
        let now = Time(timestamp::now());
        let closed = state.routing().closed();
        for (name, table) in &mut self.tables {
            let Some(routed) = state.routing().table(name) else {
                continue;
            };
            table.owed.retain(|owed| {
                !owed.is_there(routed.rules()) && now.0.saturating_sub(owed.decided.0) < GIVEN_UP
            });
            if !standing.leads {
                continue;
            }
            for owed in &mut table.owed {
                if owed.proposed.is_none_or(|at| at.elapsed() > AGAIN) {
                    owed.proposed = Some(Instant::now());
                    step.propose.push(Command::Route(Entry::Rule {
                        table: name.clone(),
                        time: routing::window().rule_time(now, closed),
                        spread: owed.spread,
                        tenants: owed.tenants.clone(),
                    }));
                }
            }
            let rules = table.rules(routed);
            let decision = table
                .balancer
                .as_mut()
                .and_then(|balancer| balancer.tick(at, &rules));
            if let Some(decision) = decision {
                let adds = table.balanced.mode == Mode::On;
                let entries = Decided::of(name, now, adds, self.settings.period, &decision);
                step.propose
                    .extend(entries.into_iter().map(Command::Decide));
            }
        }
        if self.period_began.elapsed() >= self.settings.period {
            self.end_period();
        }
        step
    }

    /// Has balancers where this member leads, with the settings as they are now.
    fn take_settings(&mut self, state: &State, standing: Standing) {
        let settings = settings::balancer();
        if settings != self.settings {
            self.settings = settings;
            for table in self.tables.values_mut() {
                table.balancer = None;
                table.is_misfit = false;
            }
        }
        for (name, table) in &mut self.tables {
            if !standing.leads {
                table.balancer = None;
                let me = NodeId(standing.me.get());
                table.shares.retain(|node, _| *node == me);
            } else if table.balancer.is_none()
                && let Some(routed) = state.routing().table(name)
            {
                match Balancer::new(settings, routed.map().shards()) {
                    Ok(balancer) => table.balancer = Some(balancer),
                    Err(error) if !table.is_misfit => {
                        table.is_misfit = true;
                        let message =
                            format!("the balancer of table {name} decides nothing: {error}");
                        PgError::new(SqlState::InvalidParameterValue, message)
                            .with_hint(error.hint())
                            .log("braid group");
                    }
                    Err(_) => {}
                }
            }
        }
    }

    /// Takes what was counted here, and sends it to the leader.
    fn report(&mut self, group: &GroupId, standing: Standing, step: &mut Step) {
        let Some(loads) = self.loads else { return };
        let me = NodeId(standing.me.get());
        let tables = self.tables.iter();
        let taken: Vec<(TableName, Sketch)> = tables
            .filter_map(|(name, table)| Some((name.clone(), loads.take(table.load)?)))
            .collect();
        for (table, counts) in taken {
            self.absorb(&table, me, &counts);
            if let Some(leader) = standing.leader.filter(|_| !standing.leads) {
                let report = Report {
                    group: group.0,
                    from: me,
                    table,
                    counts,
                };
                step.send.push((leader, report.encode()));
            }
        }
    }

    /// Ends the period of what is shown, which is not the balancers' own.
    fn end_period(&mut self) {
        let span = self.period_began.elapsed();
        self.period_began = Instant::now();
        let counters = self.settings.counters;
        for table in self.tables.values_mut() {
            for share in table.shares.values_mut() {
                let counts = std::mem::replace(&mut share.counts, Sketch::new(counters));
                share.last = (counts.total() > 0).then_some((counts, span));
            }
            table.shares.retain(|_, share| share.last.is_some());
        }
        let view = self.view();
        // The first look after a pause shows that nothing is written; later ones change nothing.
        if let Some(loads) = self.loads
            && (self.shows || !view.is_empty())
        {
            self.shows = !view.is_empty();
            loads.show(&view);
        }
    }

    /// The rows that sessions see.
    fn view(&self) -> Vec<u8> {
        let mut view = Vec::new();
        for (name, table) in &self.tables {
            for (node, share) in &table.shares {
                let Some((counts, span)) = &share.last else {
                    continue;
                };
                for counter in counts.largest(SHOWN) {
                    let row = LoadRow {
                        table: name.clone(),
                        node: *node,
                        tenant: counter.tenant.clone(),
                        count: counter.count,
                        error: counter.error,
                        total: counts.total(),
                        micros: u64::try_from(span.as_micros()).unwrap_or(u64::MAX),
                    }
                    .encode();
                    if view.len() + row.len() > VIEW {
                        return view;
                    }
                    view.extend(row);
                }
            }
        }
        view
    }

    /// Nothing is counted or shown any more.
    pub(super) fn hide(&mut self) {
        self.tables.clear();
        if let Some(loads) = self.loads {
            let _ = loads.keep(&[]);
            loads.show(&[]);
        }
    }
}

/// The rules that were advised for a table since its balancer has been what it is.
fn advised(name: &TableName, balanced: Balanced) -> Result<RuleList, PgError> {
    let mut advised = RuleList::new();
    if balanced.mode != Mode::Advise {
        return Ok(advised);
    }
    let found = rows(
        "select encode(tenant_key, 'hex'), max(spread)::text from braid.balancer_decision \
          where relation = $1 and mode = 'advise' and decided_at >= timestamptz '2000-01-01 00:00 UTC' + $2 * interval '1 microsecond' \
          group by tenant_key",
        &[name.to_string().into(), balanced.since.0.into()],
    )?;
    for row in found {
        let Ok([Some(key), Some(spread)]) = <[Option<String>; 2]>::try_from(row) else {
            continue;
        };
        let tenant = hex::decode(&key).and_then(|key| Tenant::from_canonical(&key).ok());
        let spread = spread
            .parse()
            .ok()
            .and_then(|spread| Spread::new(spread).ok());
        if let (Some(tenant), Some(spread)) = (tenant, spread) {
            let _ = advised.add(&Rule {
                time: Time(0),
                spread,
                tenants: vec![tenant.tenant_hash()],
            });
        }
    }
    Ok(advised)
}

/// Writes a decision that the group's log has at this index. After a restart some come again, and
/// count once.
///
/// # Errors
/// [`PgError`] if the table is not there.
pub(super) fn write(index: u64, proposer: MemberId, decided: &Decided) -> Result<(), PgError> {
    let Some(rule) = decided.rule() else {
        return Ok(());
    };
    let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let decision = &decided.decision;
    for (place, finding) in (1_i32..).zip(&rule.findings) {
        execute(
            "insert into braid.balancer_decision (log_index, place, decided_at, proposer_id, relation, mode, basis, tenant, tenant_key, amount, \
                    error, total, floor, period, periods, threshold, shards, spread_before, spread, reason, effect) \
             values ($1, $2, timestamptz '2000-01-01 00:00 UTC' + $3 * interval '1 microsecond', $4, $5, $6, $7, $8, decode($9, 'hex'), $10, \
                    $11, $12, $13, $14 * interval '1 microsecond', $15, $16, $17, $18, $19, $20, $21) \
             on conflict (log_index, place) do nothing",
            &[
                signed(index).into(),
                place.into(),
                decided.time.0.into(),
                signed(proposer.get()).into(),
                decided.table.to_string().into(),
                if decided.adds { "on" } else { "advise" }.into(),
                decision.basis.word().into(),
                finding.tenant.to_string().into(),
                hex::encode(finding.tenant.canonical()).into(),
                signed(finding.amount).into(),
                signed(finding.error).into(),
                signed(decision.total).into(),
                signed(decision.floor).into(),
                signed(decided.period).into(),
                i32::try_from(finding.periods).unwrap_or(i32::MAX).into(),
                i32::try_from(decision.threshold).unwrap_or(i32::MAX).into(),
                i32::try_from(decision.shards.get())
                    .unwrap_or(i32::MAX)
                    .into(),
                i32::try_from(finding.had.get()).unwrap_or(i32::MAX).into(),
                i32::try_from(rule.spread.get()).unwrap_or(i32::MAX).into(),
                decision.reason(finding).into(),
                decision.effect(finding, rule.spread).into(),
            ],
        )?;
    }
    execute(
        "delete from braid.balancer_decision d where d.log_index < \
             (select o.log_index from braid.balancer_decision o order by o.log_index desc, o.place desc offset $1 limit 1)",
        &[KEPT.into()],
    )
}
