//! Result of a check.

use std::collections::BTreeMap;
use std::fmt;

use crate::anomaly::{Anomaly, Model};
use crate::transactions::Transactions;
use crate::value::Value;

/// Why one transaction of a cycle comes before the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// The second wrote a later version of a key that the first wrote.
    WriteWrite,
    /// The second read a version that the first wrote.
    WriteRead,
    /// The second wrote a later version of a key that the first read.
    ReadWrite,
    /// The process of both began the second after the first.
    Process,
    /// The first was over before the second began.
    Realtime,
}

/// A step of a cycle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The index of the operation that completes (or began) the earlier transaction.
    pub from: u64,
    /// The index of the operation of the later transaction.
    pub to: u64,
    /// The relation.
    pub relation: Relation,
    /// The key, for relations through data.
    pub key: Option<Value>,
    /// The reason, as a sentence without its end.
    pub reason: String,
}

/// One anomaly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Kind of the anomaly.
    pub anomaly: Anomaly,
    /// The indices of the operations of the transactions in it.
    pub operations: Vec<u64>,
    /// The steps of a cycle, the last of which leads to the first. Empty for other kinds.
    pub steps: Vec<Step>,
    /// The explanation: lines without the last line's end.
    pub explanation: String,
}

/// The outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The model that was checked.
    pub model: Model,
    /// How many transactions are known to be committed.
    pub committed: usize,
    /// How many transactions may be committed, and of how many of these a write was read.
    pub indeterminate: (usize, usize),
    /// How many transactions are known to be aborted.
    pub aborted: usize,
    /// How many anomalies of each kind were found.
    pub totals: BTreeMap<Anomaly, u64>,
    /// The first anomalies of each kind, as many as [`Options::limit`](crate::Options) allows.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Returns whether the history has no anomaly that the model forbids.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.violations().next().is_none()
    }

    /// Returns the kinds of anomalies that were found and that the model forbids.
    pub fn violations(&self) -> impl Iterator<Item = Anomaly> + '_ {
        let found = self.totals.keys().copied();
        found.filter(|anomaly| self.model.forbids(*anomaly))
    }

    /// Returns the kinds of anomalies that were found, allowed ones too.
    #[must_use]
    pub fn anomalies(&self) -> Vec<Anomaly> {
        self.totals.keys().copied().collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_valid() {
            "no violation of"
        } else {
            "VIOLATION of"
        };
        writeln!(f, "{verdict} {}", self.model)?;
        writeln!(
            f,
            "transactions: {} committed, {} aborted, {} indeterminate ({} of these seen)",
            self.committed, self.aborted, self.indeterminate.0, self.indeterminate.1
        )?;
        for (anomaly, count) in &self.totals {
            let allowed = if self.model.forbids(*anomaly) {
                ""
            } else {
                ", allowed"
            };
            writeln!(f, "{anomaly}: {count}{allowed}")?;
        }
        for finding in &self.findings {
            writeln!(f, "\n{}\n{}", finding.anomaly, finding.explanation)?;
        }
        Ok(())
    }
}

/// Collects findings, and keeps the first of each kind.
pub(crate) struct Findings {
    limit: u64,
    pub totals: BTreeMap<Anomaly, u64>,
    pub kept: Vec<Finding>,
}

impl Findings {
    pub fn new(limit: u64) -> Self {
        Self {
            limit,
            totals: BTreeMap::new(),
            kept: Vec::new(),
        }
    }

    /// Counts an anomaly. `finding` is called only if the finding is kept.
    pub fn add(&mut self, anomaly: Anomaly, finding: impl FnOnce() -> Finding) {
        let total = self.totals.entry(anomaly).or_default();
        *total += 1;
        if *total <= self.limit {
            self.kept.push(finding());
        }
    }
}

/// Returns a finding that is no cycle: its transactions, and a sentence that calls them T1, T2.
pub(crate) fn finding(
    all: &Transactions<'_>,
    anomaly: Anomaly,
    transactions: &[u32],
    text: impl FnOnce(&[String]) -> String,
) -> Finding {
    let names: Vec<String> = (1..=transactions.len()).map(|n| format!("T{n}")).collect();
    let mut explanation = String::new();
    for (name, transaction) in names.iter().zip(transactions) {
        explanation.push_str(&format!("  {name} = {}\n", all.describe(*transaction)));
    }
    explanation.push_str("  ");
    explanation.push_str(&text(&names));
    Finding {
        anomaly,
        operations: transactions.iter().map(|t| all.index(*t)).collect(),
        steps: Vec::new(),
        explanation,
    }
}
