//! Nodes that apply the log late, over random rules, clocks and rows.
//!
//! The nodes share a log and a store of rows by shard. Each applies the log as late as it likes,
//! and restarts. Clocks are ahead of the true time by up to the skew, differently each time. A
//! model knows all rows. Each node later finds, updates and deletes what any node has inserted, by
//! the row's own tenant, record and creation. Each read has exactly the model's rows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_testing::Random;

use crate::{
    Admission, Applied, Entry, Expressions, Key, NodeId, NodeSet, Pacer, ReadBound, RecordHash,
    Refusal, RoutedTable, Routing, SetId, Shard, Shards, Spread, TableName, Tenant, TenantHash,
    Time, Window,
};

const NODES: usize = 4;
const TENANTS: u64 = 5;
const MILLISECOND: i64 = 1_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    tenant: u64,
    record: u64,
    created: Time,
}

#[derive(Debug, Default)]
struct Counts {
    inserted: usize,
    waited: usize,
    refused: usize,
    changed: usize,
    few: usize,
    everywhere: usize,
    rules: usize,
    late_rules: usize,
}

struct Node {
    applied: usize,
    routing: Routing,
}

struct Cluster {
    random: Random,
    window: Window,
    skew: u64,
    now: i64,
    log: Vec<Entry>,
    nodes: Vec<Node>,
    pacer: Pacer,
    store: BTreeMap<Shard, BTreeMap<Row, u64>>,
    model: BTreeMap<Row, u64>,
    counts: Counts,
}

fn name() -> TableName {
    TableName::new(b"public.orders").unwrap()
}

fn tenant(number: u64) -> Tenant {
    Tenant::new(&Key::Integer(number.try_into().unwrap())).unwrap()
}

fn record(row: Row) -> RecordHash {
    RecordHash::of(&Key::Uuid(u128::from(row.record).to_be_bytes()))
}

fn placement(table: &RoutedTable, row: Row) -> Shard {
    table.placement(tenant(row.tenant).tenant_hash(), record(row), row.created)
}

impl Cluster {
    fn new(seed: u64) -> Self {
        let mut random = Random::from_seed(seed);
        let shards = Shards::new(u32::try_from(random.below(100)).unwrap() + 32).unwrap();
        let sets = (0..4)
            .map(|id| NodeSet {
                id: SetId(id),
                nodes: vec![NodeId(id.into())],
            })
            .collect();
        let log = vec![
            Entry::Route {
                table: name(),
                expressions: Expressions::of_orders(),
                shards,
                sets,
            },
            // A rule of the time before the table takes rows.
            Entry::Rule {
                table: name(),
                time: Time(-1_000_000_000),
                spread: Spread::new(2).unwrap(),
                tenants: vec![tenant(0)],
            },
            Entry::Open { table: name() },
        ];
        let window = Window::default();
        Self {
            random,
            window,
            skew: 500_000,
            now: 0,
            log,
            nodes: (0..NODES)
                .map(|_| Node {
                    applied: 0,
                    routing: Routing::new(),
                })
                .collect(),
            pacer: Pacer::new(window),
            store: BTreeMap::new(),
            model: BTreeMap::new(),
            counts: Counts::default(),
        }
    }

    fn clock(&mut self) -> Time {
        Time(self.now + i64::try_from(self.random.below(self.skew + 1)).unwrap())
    }

    fn apply(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        if let Some(entry) = self.log.get(node.applied) {
            node.applied += 1;
            match node.routing.apply(entry) {
                Ok(_) | Err(Refusal::ClosedLater | Refusal::Closed { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
    }

    fn table(&self, at: usize) -> Option<&RoutedTable> {
        self.nodes[at].routing.table(&name())
    }

    fn add_rule(&mut self) {
        let at = self.random.index(NODES);
        let Some(table) = self.table(at) else { return };
        let time = table.next_rule_time();
        let later = i64::try_from(self.random.below(2)).unwrap() * 700 * MILLISECOND;
        let spread = Spread::new(1 << self.random.below(6)).unwrap();
        let listed = self.random.below(3) + 1;
        let rule = Entry::Rule {
            table: name(),
            time: time.plus(later),
            spread,
            tenants: (0..listed)
                .map(|_| tenant(self.random.below(TENANTS)))
                .collect(),
        };
        self.log.push(rule);
        // What becomes of it, as a node sees it that has applied all of the log.
        let mut routing = Routing::new();
        let last = self.log.iter().map(|entry| routing.apply(entry)).last();
        match last {
            Some(Ok(Applied::Rule { .. })) => self.counts.rules += 1,
            Some(Err(Refusal::Closed { next })) => {
                assert!(next > time.plus(later));
                self.counts.late_rules += 1;
            }
            other => panic!("{other:?}"),
        }
    }

    fn insert(&mut self) {
        let at = self.random.index(NODES);
        let now = self.clock();
        let offset = match self.random.below(6) {
            0 => -3_000,
            1 => 240,
            2 => 1_500,
            3 => 2_500,
            _ => 0,
        };
        let row = Row {
            tenant: self.random.below(TENANTS),
            record: self.random.next(),
            created: now.plus(offset * MILLISECOND),
        };
        let (window, value) = (self.window, self.random.next());
        let Some(table) = self.table(at) else { return };
        match table.may_create(&window, row.created, now) {
            Admission::Now => {
                let shard = placement(table, row);
                self.store.entry(shard).or_default().insert(row, value);
                self.model.insert(row, value);
                self.counts.inserted += 1;
            }
            Admission::WaitForClose | Admission::WaitUntil(_) => self.counts.waited += 1,
            Admission::TooFarAhead => self.counts.refused += 1,
        }
    }

    /// A node updates or deletes a row that any node has inserted under any rule.
    fn change(&mut self) {
        let at = self.random.index(NODES);
        let count = self.model.len().max(1);
        let Some(row) = self.model.keys().nth(self.random.index(count)).copied() else {
            return;
        };
        self.change_row(at, row);
    }

    fn change_row(&mut self, at: usize, row: Row) {
        let Some(table) = self.table(at) else { return };
        if !table.is_final(row.created) {
            return;
        }
        let shard = placement(table, row);
        let rows = self.store.entry(shard).or_default();
        let found = rows.get(&row).copied();
        assert_eq!(found, self.model.get(&row).copied(), "{row:?} on {shard}");
        if self.random.one_in(3) {
            rows.remove(&row);
            self.model.remove(&row);
        } else {
            let value = self.random.next();
            rows.insert(row, value);
            self.model.insert(row, value);
        }
        self.counts.changed += 1;
    }

    /// In the end all nodes have the whole log, and change all rows in turn until none is left.
    fn end(&mut self) {
        let time = Time(self.now + 60_000 * MILLISECOND);
        self.log.push(Entry::Close { time });
        for at in 0..NODES {
            for _ in 0..self.log.len() {
                self.apply(at);
            }
        }
        for at in (0..NODES).cycle() {
            for row in self.model.keys().copied().collect::<Vec<_>>() {
                self.change_row(at, row);
            }
            if self.model.is_empty() {
                break;
            }
        }
        assert!(self.store.values().all(BTreeMap::is_empty));
    }

    fn read(&mut self) {
        let at = self.random.index(NODES);
        let now = self.clock();
        let number = self.random.below(TENANTS);
        let upto = self
            .random
            .one_in(2)
            .then(|| now.plus((3_000 - i64::try_from(self.random.below(6_000)).unwrap()) * 1_000));
        let window = self.window;
        let Some(table) = self.table(at) else { return };
        let hash: TenantHash = tenant(number).tenant_hash();
        let bound = table.read_bound(&window, upto, now);
        let asked = table.candidates(hash, bound);
        let is_wanted =
            |row: &Row| row.tenant == number && upto.is_none_or(|upto| row.created <= upto);
        // Each set is asked for its shards.
        let mut found = Vec::new();
        let mut sets = BTreeSet::new();
        for route in table.map().route_query(asked) {
            assert!(sets.insert(route.set));
            for rows in route
                .shards
                .iter()
                .filter_map(|shard| self.store.get(shard))
            {
                found.extend(rows.iter().filter(|(row, _)| is_wanted(row)));
            }
        }
        found.sort();
        let expected: Vec<_> = self
            .model
            .iter()
            .filter(|(row, _)| is_wanted(row))
            .collect();
        assert_eq!(found, expected, "{bound:?} at {now:?} of node {at}");
        if bound == ReadBound::Everywhere {
            self.counts.everywhere += 1;
        } else {
            self.counts.few += 1;
        }
    }

    fn step(&mut self) {
        self.now += i64::try_from(self.random.below(40)).unwrap() * MILLISECOND;
        let at = Duration::from_micros(self.now.unsigned_abs());
        match self.random.below(100) {
            0 => self.add_rule(),
            // A restart.
            1 if self.random.one_in(4) => {
                let which = self.random.index(NODES);
                self.nodes[which] = Node {
                    applied: 0,
                    routing: Routing::new(),
                };
            }
            2..40 => {
                // The last node is late.
                let which = self.random.index(NODES);
                if which < NODES - 1 || self.random.one_in(6) {
                    for _ in 0..=self.random.below(4) {
                        self.apply(which);
                    }
                }
            }
            40..60 => self.insert(),
            60..75 => self.change(),
            _ => self.read(),
        }
        self.pacer.note_use(at);
        let now = self.clock();
        let closed = self.nodes[0].routing.closed();
        if let Some(time) = self.pacer.tick(now, at, closed) {
            self.log.push(Entry::Close { time });
        }
    }
}

#[test]
fn every_node_finds_every_row_whatever_rules_are_added() {
    let mut random = Random::new("routing simulation");
    let mut sum = Counts::default();
    for _ in 0..40 {
        let mut cluster = Cluster::new(random.next());
        for _ in 0..1_500 {
            cluster.step();
        }
        cluster.end();
        let counts = cluster.counts;
        sum.inserted += counts.inserted;
        sum.waited += counts.waited;
        sum.refused += counts.refused;
        sum.changed += counts.changed;
        sum.few += counts.few;
        sum.everywhere += counts.everywhere;
        sum.rules += counts.rules;
        sum.late_rules += counts.late_rules;
    }
    println!("{sum:?}");
    // Each kind of outcome has happened often.
    for count in [
        sum.inserted,
        sum.waited,
        sum.refused,
        sum.changed,
        sum.few,
        sum.everywhere,
        sum.rules,
    ] {
        assert!(count > 100, "{sum:?}");
    }
    assert!(sum.late_rules > 0, "{sum:?}");
}

/// Three nodes under full load that apply each entry 300 ms after it was proposed.
#[test]
fn nobody_waits_and_reads_ask_few_while_the_log_is_quick() {
    let window = Window::default();
    let mut pacer = Pacer::new(window);
    let mut routing = Routing::new();
    let mut under_way: Vec<(i64, Time)> = Vec::new();
    let (mut proposals, mut closed_once) = (0, false);
    for now in (0..60_000).step_by(5) {
        let at = Duration::from_millis(now);
        let now = i64::try_from(now).unwrap() * MILLISECOND;
        pacer.note_use(at);
        if let Some(time) = pacer.tick(Time(now), at, routing.closed()) {
            under_way.push((now, time));
            proposals += 1;
        }
        under_way.retain(|(proposed, time)| {
            let due = now >= proposed + 300 * MILLISECOND;
            if due {
                routing.apply(&Entry::Close { time: *time }).unwrap();
                closed_once = true;
            }
            !due
        });
        if closed_once {
            // A node whose clock is 200 ms ahead of the leader's.
            let clock = Time(now + 200 * MILLISECOND);
            let admission = window.admission(clock, clock, routing.closed());
            assert_eq!(admission, Admission::Now);
            let bound = window.read_bound(None, clock, routing.closed());
            assert_eq!(bound, ReadBound::Known);
        }
    }
    assert_eq!(proposals, 120);
}

#[test]
fn the_pacer_rests_while_nothing_is_used() {
    let mut pacer = Pacer::new(Window::default());
    let ms = Duration::from_millis;
    let time = |ms: i64| Time(ms * MILLISECOND);
    assert_eq!(pacer.next(ms(0)), None);
    assert_eq!(pacer.tick(time(0), ms(0), Time::MIN), None);
    // The first use is answered at once, the next Close a period later.
    pacer.note_use(ms(10_000));
    assert_eq!(pacer.next(ms(10_000)), Some(ms(10_000)));
    assert_eq!(
        pacer.tick(time(500), ms(10_000), Time::MIN),
        Some(time(2_500))
    );
    assert_eq!(pacer.tick(time(999), ms(10_499), time(2_500)), None);
    assert_eq!(pacer.next(ms(10_499)), Some(ms(10_500)));
    // A proposal that was lost is followed by another.
    assert_eq!(
        pacer.tick(time(1_000), ms(10_500), Time::MIN),
        Some(time(3_000))
    );
    // The clock was set back: nothing, and at once again when it has caught up.
    assert_eq!(pacer.tick(time(-5_000), ms(11_000), time(3_000)), None);
    assert_eq!(
        pacer.tick(time(1_001), ms(11_500), time(3_000)),
        Some(time(3_001))
    );
    // Use is over after a window.
    assert_eq!(pacer.next(ms(12_000)), Some(ms(12_000)));
    assert_eq!(pacer.next(ms(12_001)), None);
    assert_eq!(pacer.tick(time(9_000), ms(20_000), time(3_001)), None);
    pacer.note_use(ms(20_000));
    assert_eq!(
        pacer.tick(time(9_000), ms(20_000), time(3_001)),
        Some(time(11_000))
    );
}

#[test]
fn times_of_a_window_have_to_fit_together() {
    assert!(Window::new(4, 1, 1, 1).is_ok());
    for (ahead, period, slack, skew) in [
        (3, 1, 1, 1),
        (4, 0, 1, 1),
        (4, 1, -1, 1),
        (4, 1, 1, -1),
        (i64::MAX, i64::MAX, 1, 1),
    ] {
        assert!(Window::new(ahead, period, slack, skew).is_err());
    }
}

/// The state of 100,000 tenants with rules, and what a rule more costs, are bounded.
#[test]
fn a_hundred_thousand_tenants_have_rules() {
    let mut list = crate::RuleList::new();
    let hash = |number: u64| tenant(number).tenant_hash();
    for chunk in 0..10 {
        let rule = crate::Rule {
            time: Time(i64::try_from(chunk).unwrap()),
            spread: Spread::new(4).unwrap(),
            tenants: (chunk * 10_000..(chunk + 1) * 10_000).map(hash).collect(),
        };
        assert_eq!(list.add(&rule), Ok(10_000));
    }
    assert_eq!(list.len(), 100_000);
    let spread = |number: u64, created: i64| list.spread(hash(number), Time(created)).get();
    assert_eq!((spread(99_999, 9), spread(99_999, 10)), (1, 4));
    assert_eq!((spread(100_000, 10), spread(0, 0), spread(0, 1)), (1, 1, 4));
}
