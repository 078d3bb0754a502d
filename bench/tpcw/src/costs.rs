//! Costs of each step, measured on a machine; those of a network are assumed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Microseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Where they are from.
    pub about: String,
    /// Processor time of an interaction without versions, by name.
    pub statements: BTreeMap<String, f64>,
    /// Processor time of an applier and its leader for an interaction that writes, by name.
    pub apply: BTreeMap<String, f64>,
    /// Processor time that a session needs more for a versioned transaction.
    pub session: f64,
    /// Processor time of the versions process, for one step of one transaction.
    pub keeper: f64,
    /// Processor time of the sequencer's process for a message of another node, with its answer.
    pub ask: f64,
    /// Processor time of the sequencer's process for each request in a message.
    pub request: f64,
    /// Processor time of a versions process to ask, and to hear the answer.
    pub answer: f64,
    /// Processor time of the sequencer's process to tell one node what is decided.
    pub announce: f64,
    /// Processor time of a walsender for a transaction that it sends.
    pub decode: f64,
    /// Processor time of a walsender for a transaction that it does not send.
    pub skip: f64,
    /// Time of a flush of WAL.
    pub flush: f64,
    /// Time from a wake-up until the process is runnable.
    pub wake: f64,
    /// Time of a message from one node to another, and from a client to a node.
    pub network: f64,
}

impl Costs {
    /// Returns the costs in the file beside this crate.
    pub fn measured() -> Self {
        serde_json::from_str(include_str!("../costs.json")).expect("costs.json fits")
    }
}
