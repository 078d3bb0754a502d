//! Costs of each step, measured on a machine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Price of a step, in microseconds of a processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// Per transaction.
    pub transaction: f64,
    /// Per row.
    pub row: f64,
    /// Per byte that is sent.
    #[serde(default)]
    pub byte: f64,
}

/// Prices of an applier, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Apply {
    /// Of beginning, checking a transaction, and cleaning up.
    pub transaction: f64,
    /// How long a waiting applier checks its condition before it sleeps; counted as if it used no
    /// processor.
    pub spin: f64,
    /// Of sleeping and being woken.
    pub wake: f64,
    /// Time from being woken to running, without a processor.
    pub latency: f64,
}

/// A row's prices in one workload: they depend on indexes and on whether pages are in a processor's
/// cache.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rows {
    /// Per inserted row.
    pub insert: f64,
    /// Per updated row.
    pub update: f64,
    /// Per deleted row.
    pub delete: f64,
    /// Waiting per row, without a processor (for WAL buffers, for pages), in microseconds.
    pub wait: f64,
    /// Price of a row in a batch, as a multiple of its price otherwise.
    pub batch: f64,
    /// Price of an applier's work if there are several appliers, as a multiple of its price with
    /// one: pages that one has written are in another processor's cache.
    pub shared: f64,
    /// As `shared`, in batches.
    pub batch_shared: f64,
    /// Price of a transaction in the walsender, if it was measured; replaces [`Costs::decode`].
    #[serde(default)]
    pub decode: Option<f64>,
    /// Price of a transaction in the leader, if it was measured; replaces [`Costs::dispatch`].
    #[serde(default)]
    pub dispatch: Option<f64>,
}

/// Prices in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// Per transaction of the batch. [`Apply::transaction`] is paid once for the batch.
    pub transaction: f64,
    /// Per change that is checked for consolidation.
    pub consolidate: f64,
}

/// Prices of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commit {
    /// Per transaction, in microseconds of a processor.
    pub transaction: f64,
    /// Duration of a flush, in microseconds; the processor is free meanwhile.
    pub flush: f64,
    /// Interval in microseconds at which a leader flushes.
    pub interval: f64,
}

/// All costs of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Place, time and method of the measurement.
    pub about: String,
    /// Of the walsender.
    pub decode: Price,
    /// Of the leader, with the dependency tracker.
    pub dispatch: Price,
    /// Of an applier.
    pub apply: Apply,
    /// Of rows, by workload; the entry `""` is for all others.
    pub rows: BTreeMap<String, Rows>,
    /// Of batches.
    pub batch: Batch,
    /// Of commits.
    pub commit: Commit,
    /// Largest number of transactions in flight.
    pub in_flight: u64,
    /// Largest number of bytes on the way from decoder to leader.
    pub pipe: u64,
}

impl Price {
    /// Returns the price of a transaction with these rows and bytes.
    #[must_use]
    pub fn of(self, rows: f64, bytes: f64) -> f64 {
        self.transaction + self.row * rows + self.byte * bytes
    }
}

impl Costs {
    /// Sets the prices of walsender and leader to 0.
    pub fn leave_out_decoder(&mut self) {
        self.decode = Price::default();
        self.dispatch = Price::default();
        for rows in self.rows.values_mut() {
            rows.decode = None;
            rows.dispatch = None;
        }
    }

    /// Returns a row's prices in a workload.
    #[must_use]
    pub fn rows_of(&self, workload: &str) -> Rows {
        let any = || self.rows.get("").copied();
        let found = self.rows.get(workload).copied().or_else(any);
        found.unwrap_or(Rows {
            insert: 0.0,
            update: 0.0,
            delete: 0.0,
            wait: 0.0,
            batch: 1.0,
            shared: 1.0,
            batch_shared: 1.0,
            decode: None,
            dispatch: None,
        })
    }

    /// Reads costs from JSON.
    ///
    /// # Errors
    /// A message, if the JSON is invalid.
    pub fn read(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}
