//! Random histories of a group, and the smallest one that fails as a given one does.

use std::fmt;

use super::group::{Group, KEYS, Kind, NAMES, Topology};
use crate::random::Random;

/// Steps of a history, but for what is delivered at its end.
const LENGTH: u64 = 80;
/// What each test goes through: writes, deliveries, restarts and cuts, with what is delivered when
/// all links are healed.
const STEPS: u64 = 1_500_000;

/// What happens in a group. Any sequence of steps can be carried out, so that any of them may be
/// left out.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// A node commits a change of a key, which one by the choice and whether the row is there.
    Write {
        /// Of the nodes.
        node: usize,
        /// Of the row.
        key: u64,
        /// Update or delete.
        deletes: bool,
        /// All rows instead.
        truncates: bool,
    },
    /// Time goes on by one.
    Tick,
    /// A node's clock is this far ahead from now on.
    Clock {
        /// Of the nodes.
        node: usize,
        /// Of the time.
        ahead: i64,
    },
    /// A link brings its next change, unless it is cut.
    Deliver(usize),
    /// A link begins anew: the last so many changes that it brought come again.
    Again(usize, usize),
    /// Nodes of this set (bit by bit) and those outside of it are cut off from each other.
    Cut(u32),
}

/// What a test is about.
#[derive(Debug, Clone, Copy)]
pub struct Course {
    /// Who sends what to whom.
    pub topology: Topology,
    /// Clocks are set, forth and back, while it runs.
    pub clocks: bool,
    /// All rows are deleted at once, now and then.
    pub truncates: bool,
    /// Commits wait until their version is newer than what their node has seen (I4).
    pub waits: bool,
    /// Nodes that forward pass on what finds nothing.
    pub passes_on: bool,
}

impl Course {
    /// Clocks that go differently, no truncates.
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

/// A history of a group of so many nodes.
#[derive(Clone)]
pub struct History {
    pub course: Course,
    pub nodes: usize,
    pub steps: Vec<Step>,
    /// Of the order in which what is left is delivered.
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

    /// Carry it out, deliver what is left, and compare. How many steps it took, or what differs.
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
                    // Only what the node itself committed in the same microsecond may have the
                    // same.
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

/// A history from which no step can be taken without its ceasing to fail: pieces of it are left
/// out, large ones first.
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

/// Some million steps of random histories; what fails is shown as its smallest form.
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

/// The smallest history of a course that fails.
pub fn failing(course: Course, random: &mut Random) -> History {
    loop {
        let history = History::random(course, random);
        if history.run().is_err() {
            return shrunk(history);
        }
    }
}
