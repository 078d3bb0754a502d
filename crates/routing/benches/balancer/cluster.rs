//! Clients, nodes, the log and the balancer, in steps of 5 ms.

use std::collections::VecDeque;
use std::time::Duration;

use braid_routing::{
    Admission, Balancer, Decision, Entry, Expressions, Key, NodeId, NodeSet, Pacer, ReadBound,
    RecordHash, Routing, SetId, Settings, Shards, Sketch, Spread, TableName, Tenant, TenantHash,
    Time, Window,
};
use braid_testing::Random;

const NODES: usize = 8;
const SHARDS: u32 = 512;
const TENANTS: usize = 100_000;
const STEP: i64 = 5_000;
/// Writes that a node does in a step: 17,500 a second.
const CAPACITY: f64 = 87.5;
/// Writes that wait at a node, at most.
const QUEUE: usize = 2_000;
/// Microseconds until an entry is applied.
const AGREED: i64 = 50_000;

/// How rows are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Spread 1 for all.
    Hashing,
    /// Spread 8 for all.
    Double,
    /// As the balancer decides.
    Dynamic,
}

/// What is simulated.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// How rows are placed.
    pub policy: Policy,
    /// Skew: tenant k has a share proportional to `1 / k^theta`.
    pub theta: f64,
    /// Generated writes a second.
    pub rate: u64,
    /// How long.
    pub seconds: usize,
    /// Whether the balancer knows the storage at the start.
    pub known: bool,
    /// Seconds at which the shares are given to other tenants.
    pub hotspots: &'static [usize],
}

/// What came out.
#[derive(Debug)]
pub struct Outcome {
    /// Writes a second.
    pub throughput: f64,
    /// Mean seconds from generation to the end of a write.
    pub delay: f64,
    /// Simulated seconds.
    pub seconds: f64,
    /// Writes by node.
    pub by_node: Vec<u64>,
    /// Writes by shard.
    pub by_shard: Vec<u64>,
    /// Writes by second.
    pub by_second: Vec<f64>,
    /// For each tenant by rank: shards and nodes that a query asks at the end.
    pub fanout: Vec<(u32, u32)>,
    /// Tenants of rules.
    pub steps: usize,
    /// Writes that had to wait for a `Close`.
    pub waits: u64,
}

struct Write {
    tenant: u32,
    shard: u32,
    node: u8,
    made: i64,
}

/// Draws ranks in proportion to their weights, in constant time.
struct Draw(Vec<(f64, u32)>);

impl Draw {
    fn new(weights: &[f64]) -> Self {
        let mean = weights.iter().sum::<f64>() / weights.len() as f64;
        let mut parts: Vec<f64> = weights.iter().map(|weight| weight / mean).collect();
        let mut table: Vec<(f64, u32)> = (0..weights.len() as u32).map(|at| (1.0, at)).collect();
        let (mut small, mut large): (Vec<usize>, Vec<usize>) =
            (0..parts.len()).partition(|at| parts[*at] < 1.0);
        while let (Some(below), Some(above)) = (small.pop(), large.last().copied()) {
            table[below] = (parts[below], above as u32);
            parts[above] -= 1.0 - parts[below];
            if parts[above] < 1.0 {
                large.pop();
                small.push(above);
            }
        }
        Self(table)
    }

    fn next(&self, random: &mut Random) -> usize {
        let bits = random.next();
        let at = (bits >> 32) as usize % self.0.len();
        let (part, other) = self.0[at];
        if f64::from(bits as u32) < part * f64::from(u32::MAX) {
            at
        } else {
            other as usize
        }
    }
}

fn tenant(number: usize) -> Tenant {
    Tenant::new(&Key::Integer(number as i64)).unwrap()
}

fn entries(table: &TableName, decision: &Decision, time: Time) -> Vec<Entry> {
    let rules = decision.rules.iter().map(|rule| Entry::Rule {
        table: table.clone(),
        time,
        spread: rule.spread,
        tenants: rule.tenants(),
    });
    rules.collect()
}

/// Simulates.
pub fn run(setup: &Setup) -> Outcome {
    let shards = Shards::new(SHARDS).unwrap();
    let table = TableName::new(b"public.orders").unwrap();
    let sets = (0..NODES as u32).map(|id| NodeSet {
        id: SetId(id),
        nodes: vec![NodeId(u64::from(id))],
    });
    let mut routing = Routing::default();
    let expressions = Expressions {
        tenant: "t".into(),
        record: "r".into(),
        created: "c".into(),
    };
    routing
        .apply(&Entry::Route {
            table: table.clone(),
            expressions,
            shards,
            sets: sets.collect(),
        })
        .unwrap();

    let names: Vec<Tenant> = (0..TENANTS).map(tenant).collect();
    let hashes: Vec<TenantHash> = names.iter().map(Tenant::tenant_hash).collect();
    let weights: Vec<f64> = (1..=TENANTS)
        .map(|k| (k as f64).powf(-setup.theta))
        .collect();
    let sum: f64 = weights.iter().sum();
    let draw = Draw::new(&weights);
    let mut random = Random::from_seed(7);
    let mut balancer = Balancer::new(Settings::default(), shards).unwrap();
    if setup.policy == Policy::Dynamic && setup.known {
        let storage = (0..TENANTS).map(|at| (names[at].clone(), (weights[at] / sum * 4e7) as u64));
        let rules = routing.table(&table).unwrap().rules().clone();
        if let Some(decision) = balancer.start(Duration::ZERO, storage, 40_000_000, &rules) {
            for entry in entries(&table, &decision, Time(-1)) {
                routing.apply(&entry).unwrap();
            }
        }
    }
    let window = Window::default();
    routing
        .apply(&Entry::Close {
            time: Time(1_000_000),
        })
        .unwrap();
    routing
        .apply(&Entry::Open {
            table: table.clone(),
        })
        .unwrap();
    let mut pacer = Pacer::new(window);
    let mut log: VecDeque<(i64, Entry)> = VecDeque::new();

    let mut counts: Vec<Sketch> = (0..NODES).map(|_| Sketch::new(2_048)).collect();
    let mut queues: Vec<VecDeque<Write>> = (0..NODES).map(|_| VecDeque::new()).collect();
    let mut clients: VecDeque<Write> = VecDeque::new();
    let mut credit = [0.0_f64; NODES];
    let mut outcome = Outcome {
        throughput: 0.0,
        delay: 0.0,
        seconds: setup.seconds as f64,
        by_node: vec![0; NODES],
        by_shard: vec![0; SHARDS as usize],
        by_second: vec![0.0; setup.seconds],
        fanout: Vec::new(),
        steps: 0,
        waits: 0,
    };
    let (mut record, mut done, mut shift) = (0_u64, 0_u64, 0_usize);
    let per_step = setup.rate * STEP as u64 / 1_000_000;
    for step in 0..setup.seconds as i64 * 1_000_000 / STEP {
        let now = step * STEP;
        let at = Duration::from_micros(now as u64);
        let second = (now / 1_000_000) as usize;
        if now % 1_000_000 == 0 && setup.hotspots.contains(&second) {
            shift += 30_011;
        }
        pacer.note_use(at);
        if let Some(time) = pacer.tick(Time(now), at, routing.table(&table).unwrap().closed()) {
            log.push_back((now + AGREED, Entry::Close { time }));
        }
        if balancer.next().is_none_or(|next| next <= at) {
            for count in &mut counts {
                balancer.absorb(count);
                count.clear();
            }
        }
        if setup.policy == Policy::Dynamic {
            let routed = routing.table(&table).unwrap();
            if let Some(decision) = balancer.tick(at, routed.rules()) {
                // After the last `Close` that is proposed, so that no rule is refused.
                let closed = log.iter().filter_map(|(_, entry)| match entry {
                    Entry::Close { time } => Some(*time),
                    _ => None,
                });
                let time = closed.max().unwrap_or(routed.closed()).plus(1);
                log.extend(
                    entries(&table, &decision, time)
                        .into_iter()
                        .map(|entry| (now + AGREED, entry)),
                );
            }
        }
        while log.front().is_some_and(|(due, _)| *due <= now) {
            routing.apply(&log.pop_front().unwrap().1).unwrap();
        }
        let routed = routing.table(&table).unwrap();
        let waits = routed.may_create(&window, Time(now), Time(now)) != Admission::Now;
        for _ in 0..per_step {
            let tenant = (draw.next(&mut random) + shift) % TENANTS;
            record += 1;
            let hash = RecordHash::of(&Key::Integer(record as i64));
            let shard = match setup.policy {
                Policy::Double => shards.place(hashes[tenant], hash, Spread::new(8).unwrap()),
                _ => routed.placement(hashes[tenant], hash, Time(now)),
            };
            let node = routed.map().route(shard).unwrap().nodes[0].0 as u8;
            outcome.waits += u64::from(waits);
            clients.push_back(Write {
                tenant: tenant as u32,
                shard: shard.0,
                node,
                made: now,
            });
        }
        while let Some(write) = clients.front() {
            let queue = &mut queues[usize::from(write.node)];
            if queue.len() >= QUEUE {
                break;
            }
            queue.push_back(clients.pop_front().unwrap());
        }
        for node in 0..NODES {
            credit[node] = (credit[node] + CAPACITY).min(2.0 * CAPACITY);
            while credit[node] >= 1.0 {
                let Some(write) = queues[node].pop_front() else {
                    break;
                };
                credit[node] -= 1.0;
                done += 1;
                outcome.delay += (now + STEP - write.made) as f64 / 1e6;
                outcome.by_node[node] += 1;
                outcome.by_shard[write.shard as usize] += 1;
                outcome.by_second[second] += 1.0;
                if setup.policy == Policy::Dynamic {
                    let tenant = write.tenant as usize;
                    counts[node].add(hashes[tenant], 1, || names[tenant].clone());
                }
            }
        }
    }
    outcome.throughput = done as f64 / outcome.seconds;
    outcome.delay /= done.max(1) as f64;
    let routed = routing.table(&table).unwrap();
    outcome.steps = routed.rules().len();
    outcome.fanout = (0..TENANTS)
        .map(|rank| {
            let hash = hashes[(rank + shift) % TENANTS];
            let run = match setup.policy {
                Policy::Double => shards.run(hash, Spread::new(8).unwrap()),
                _ => routed.candidates(hash, ReadBound::Known),
            };
            (run.count(), routed.map().route_query(run).len() as u32)
        })
        .collect();
    outcome
}
