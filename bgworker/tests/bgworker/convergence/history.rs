//! Random histories of a group, and reduction of a failing one to its smallest form.

use std::fmt;

use super::group::{Group, KEYS, Kind, NAMES, Topology};
use crate::random::Random;

/// Steps of a history, without the deliveries at its end.
const LENGTH: u64 = 80;
/// Steps of each test: writes, deliveries, restarts and cuts, including the deliveries after all
/// links are healed.
const STEPS: u64 = 1_500_000;

/// A step of a history. Any sequence of steps is valid, so that any step may be left out.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// A node commits a change of a key; the kind depends on the choice and on whether the row
    /// exists.
    Write {
        /// Index of the node.
        node: usize,
        /// Key of the row.
        key: u64,
        /// Delete instead of update.
        deletes: bool,
        /// Truncate all rows instead.
        truncates: bool,
    },
    /// Time advances by one.
    Tick,
    /// A node's clock is this far ahead from now on.
    Clock {
        /// Index of the node.
        node: usize,
        /// Distance to the time.
        ahead: i64,
    },
    /// A link delivers its next change, unless it is cut.
    Deliver(usize),
    /// A link restarts: its last changes, this many, are delivered again.
    Again(usize, usize),
    /// Nodes of this set (one bit each) are cut off from all others.
    Cut(u32),
}

/// Setup of a test.
#[derive(Debug, Clone, Copy)]
pub struct Course {
    /// Senders and receivers, and the changes that are sent.
    pub topology: Topology,
    /// Clocks are set, forward and back, during the history.
    pub clocks: bool,
    /// Tables are truncated now and then.
    pub truncates: bool,
    /// Commits wait until their version is newer than what their node has seen (I4).
    pub waits: bool,
    /// Nodes that forward also forward changes that find no row.
    pub passes_on: bool,
}

impl Course {
    /// Returns a setup with different clocks and without truncates.
    pub const fn new(topology: Topology) -> Self {
        Self {
            topology,
            clocks: false,
            truncates: false,
            waits: true,
            passes_on: true,
        }
    }
}

/// A history of a group of `nodes` nodes.
#[derive(Clone)]
pub struct History {
    pub course: Course,
    pub nodes: usize,
    pub steps: Vec<Step>,
    /// Seed of the order of the final deliveries.
    pub seed: u64,
}

impl History {
    fn random(course: Course, random: &mut Random) -> Self {
        let nodes = 2 + random.index(NAMES.len() - 1);
        let links = Group::new(nodes, course.topology).links.len();
        let keys = 1 + random.below(KEYS);
        let mut steps = Vec::new();
        for node in 0..nodes {
            let ahead = random.below(4).cast_signed();
            steps.push(Step::Clock { node, ahead });
        }
        for _ in 0..random.below(LENGTH) {
            if random.one_in(3) {
                steps.push(Step::Tick);
            }
            if course.clocks && random.one_in(4) {
                let ahead = random.below(20).cast_signed() - 10;
                let node = random.index(nodes);
                steps.push(Step::Clock { node, ahead });
            }
            steps.push(match random.below(20) {
                0..=8 => Step::Write {
                    node: random.index(nodes),
                    key: random.below(keys),
                    deletes: random.one_in(2),
                    truncates: course.truncates && random.one_in(6),
                },
                9..=16 => Step::Deliver(random.index(links)),
                17 | 18 => Step::Again(random.index(links), 1 + random.index(20)),
                _ => Step::Cut(u32::try_from(random.below(1 << nodes)).unwrap_or(0)),
            });
        }
        Self {
            course,
            nodes,
            steps,
            seed: random.next(),
        }
    }

    /// Runs the history, delivers what is left, and compares. Returns the number of steps, or the
    /// difference.
    pub fn run(&self) -> Result<u64, String> {
        let mut group = Group::new(self.nodes, self.course.topology);
        if !self.course.passes_on {
            group.forgets_unfound();
        }
        let mut ahead = vec![0; self.nodes];
        let mut time = 1;
        let mut cut = 0_u32;
        for step in &self.steps {
            match *step {
                Step::Tick => time += 1,
                Step::Clock { node, ahead: by } => ahead[node] = by,
                Step::Cut(set) => cut = set,
                Step::Deliver(link) => {
                    let (from, to) = (group.links[link].from, group.links[link].to);
                    if (cut >> from) & 1 == (cut >> to) & 1 {
                        group.deliver(link);
                    }
                }
                Step::Again(link, back) => {
                    let position = &mut group.links[link].position;
                    *position = position.saturating_sub(back);
                }
                Step::Write {
                    node,
                    key,
                    deletes,
                    truncates,
                } => {
                    let mut timestamp = time + ahead[node];
                    // Only what the node itself committed in the same microsecond may have the same
                    // time.
                    let newest = group.nodes[node].newest;
                    let mine = newest.1 == node && !group.forwards;
                    while self.course.waits
                        && ((timestamp, node) < newest || ((timestamp, node) == newest && !mine))
                    {
                        timestamp += 1;
                    }
                    let kind = match (group.nodes[node].has(key), deletes) {
                        _ if truncates => Kind::Truncate,
                        (false, _) => Kind::Insert,
                        (true, false) => Kind::Update,
                        (true, true) => Kind::Delete,
                    };
                    group.write(node, kind, key, timestamp);
                }
            }
        }
        group.deliver_all(&mut Random::from_seed(self.seed))?;
        let model = group.model();
        for (node, state) in group.nodes.iter().enumerate() {
            let rows = state.rows();
            if rows != model {
                return Err(format!(
                    "node {} has {rows:?}, the register {model:?}",
                    NAMES[node]
                ));
            }
        }
        Ok(self.steps.len() as u64 + group.deliveries)
    }
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes = self.nodes;
        writeln!(
            f,
            "{nodes} nodes, {:?}, at the end {:#x}",
            self.course, self.seed
        )?;
        let links = Group::new(nodes, self.course.topology).links;
        for step in &self.steps {
            match step {
                Step::Deliver(link) | Step::Again(link, _) => {
                    let (from, to) = (NAMES[links[*link].from], NAMES[links[*link].to]);
                    writeln!(f, "  {step:?}: {from} to {to}")?;
                }
                Step::Write { node, .. } | Step::Clock { node, .. } => {
                    writeln!(f, "  {step:?}: {}", NAMES[*node])?;
                }
                Step::Tick | Step::Cut(_) => writeln!(f, "  {step:?}")?,
            }
        }
        Ok(())
    }
}

/// Reduces a failing history: leaves out parts, large ones first, as long as it still fails. The
/// result does not fail any more if one more step is left out.
pub fn shrunk(mut history: History) -> History {
    let mut piece = history.steps.len().div_ceil(2).max(1);
    loop {
        let mut taken = false;
        let mut at = 0;
        while at < history.steps.len() {
            let mut less = history.clone();
            let end = history.steps.len().min(at + piece);
            less.steps.drain(at..end);
            if less.run().is_err() {
                history = less;
                taken = true;
            } else {
                at = end;
            }
        }
        if piece == 1 && !taken {
            return history;
        }
        piece = piece.div_ceil(2);
    }
}

/// Runs some million steps of random histories, and reports a failure in its smallest form.
pub fn converges(test: &str, course: Course) {
    let mut random = Random::new(test);
    let (mut steps, mut histories) = (0, 0_u64);
    while steps < STEPS {
        let history = History::random(course, &mut random);
        match history.run() {
            Ok(ran) => steps += ran,
            Err(_) => {
                let history = shrunk(history);
                let error = history.run().err().unwrap_or_default();
                panic!("after {histories} histories: {error} after {history:?}");
            }
        }
        histories += 1;
    }
    println!("{test}: {steps} steps in {histories} histories");
}

/// Returns the smallest failing history of a setup.
pub fn failing(course: Course, random: &mut Random) -> History {
    loop {
        let history = History::random(course, random);
        if history.run().is_err() {
            return shrunk(history);
        }
    }
}
