//! What each step costs, measured on a machine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A step's price in microseconds of a processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// For each transaction.
    pub transaction: f64,
    /// For each row.
    pub row: f64,
    /// For each byte that is sent.
    #[serde(default)]
    pub byte: f64,
}

/// An applier's prices.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Apply {
    /// To begin, to look at a transaction, and to clean up.
    pub transaction: f64,
    /// How long one that waits looks for itself, before it sleeps; as if that took no processor.
    pub spin: f64,
    /// To sleep and be woken.
    pub wake: f64,
    /// From being woken to running, without a processor.
    pub latency: f64,
}

/// A row's prices in one workload: they depend on indexes and on whether pages are in a processor's
/// cache.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rows {
    /// For an inserted row.
    pub insert: f64,
    /// For an updated row.
    pub update: f64,
    /// For a deleted row.
    pub delete: f64,
    /// For each of them: microseconds of waiting, without a processor (for WAL buffers, for pages).
    pub wait: f64,
    /// A row's price in a batch, in parts of what it costs otherwise.
    pub batch: f64,
    /// All that an applier does, in parts of what it costs where it is alone, where there are
    /// several: the pages that one has written are in another processor's cache.
    pub shared: f64,
    /// The same in batches.
    pub batch_shared: f64,
    /// A transaction's price in the walsender, where it was measured, instead of [`Costs::decode`].
    #[serde(default)]
    pub decode: Option<f64>,
    /// The same in the leader, instead of [`Costs::dispatch`].
    #[serde(default)]
    pub dispatch: Option<f64>,
}

/// What a batch saves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// For each transaction of it, instead of [`Apply::transaction`], which is paid once.
    pub transaction: f64,
    /// To look at a change for consolidation.
    pub consolidate: f64,
}

/// A commit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commit {
    /// In microseconds of a processor.
    pub transaction: f64,
    /// A flush, in microseconds; the processor is free meanwhile.
    pub flush: f64,
    /// A leader that flushes does so once in this many microseconds.
    pub interval: f64,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Where, when and how it was measured.
    pub about: String,
    /// In the walsender.
    pub decode: Price,
    /// In the leader, with the dependency tracker.
    pub dispatch: Price,
    /// In an applier.
    pub apply: Apply,
    /// Of each workload; that of `""` for any other.
    pub rows: BTreeMap<String, Rows>,
    /// Of it.
    pub batch: Batch,
    /// Of it.
    pub commit: Commit,
    /// Transactions in flight at most.
    pub in_flight: u64,
    /// Bytes on the way from decoder to leader at most.
    pub pipe: u64,
}

impl Price {
    /// Of a transaction.
    #[must_use]
    pub fn of(self, rows: f64, bytes: f64) -> f64 {
        self.transaction + self.row * rows + self.byte * bytes
    }
}

impl Costs {
    /// As though somebody else decoded and handed out.
    pub fn leave_out_decoder(&mut self) {
        self.decode = Price::default();
        self.dispatch = Price::default();
        for rows in self.rows.values_mut() {
            rows.decode = None;
            rows.dispatch = None;
        }
    }

    /// A row's prices in a workload.
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

    /// From JSON.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}
