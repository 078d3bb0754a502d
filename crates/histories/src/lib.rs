//! Finds anomalies in histories of transactions. For tests alone; no part of the product.
//!
//! A test runs transactions against nodes and records its requests and the results. [`check`]
//! infers the order in which the transactions must have run, and reports where that order
//! contradicts itself. README.md says how, and which anomalies are found and which are not.
//!
//! | module | holds |
//! |---|---|
//! | `history`, `value` | operations, steps, keys and values |
//! | `format`, `edn` | Elle's text form: reader and writer |
//! | `transactions` | invocations with their completions |
//! | `list_append`, `register` | what is inferred from lists, and from registers |
//! | `graph`, `cycles` | dependencies, components, cycles and their classes |
//! | `anomaly`, `report` | kinds of anomalies, models, results |
//! | `workload` | random transactions, and a recorder of their outcomes |
#![forbid(unsafe_code)]

mod anomaly;
mod cycles;
mod edn;
mod error;
mod format;
mod graph;
mod history;
mod keys;
mod list_append;
mod register;
mod report;
mod transactions;
mod value;
mod workload;

pub use anomaly::{Anomaly, Cycle, MODELS, Model, Orders, UnknownModel};
pub use edn::{EdnError, MAX_DEPTH};
pub use error::HistoryError;
pub use format::{read, write};
pub use history::{History, Kind, MicroOp, Operation, Seen};
pub use report::{Finding, Relation, Report, Step};
pub use value::Value;
pub use workload::{Executor, Generator, Objects, Outcome, Recorder, Workload, run};

use list_append::Lists;
use register::{KeyOrders, Registers};
use report::Findings;
use transactions::{Status, Transactions};

/// Options of a check: the model, and how much is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The model, which says what is forbidden and which orders count.
    pub model: Model,
    /// How many anomalies of each kind the report describes. All are counted.
    pub limit: u64,
    /// Registers only: each process sees the versions of a key in their order.
    pub sequential_keys: bool,
    /// Registers only: a transaction sees the version of a key from before it began, or a later
    /// one.
    pub linearizable_keys: bool,
}

impl Options {
    /// Returns the options for a model: eight findings of each kind, no orders of single keys.
    #[must_use]
    pub fn new(model: Model) -> Self {
        Self {
            model,
            limit: 8,
            sequential_keys: false,
            linearizable_keys: false,
        }
    }
}

/// Checks a history against a model.
///
/// # Errors
///
/// [`HistoryError`] if the history was not recorded as it must be.
pub fn check(history: &History, model: Model) -> Result<Report, HistoryError> {
    check_with(history, Options::new(model))
}

/// Checks a history with options.
///
/// # Errors
///
/// [`HistoryError`] if the history was not recorded as it must be.
pub fn check_with(history: &History, options: Options) -> Result<Report, HistoryError> {
    let transactions = Transactions::of(history)?;
    let mut findings = Findings::new(options.limit);
    let orders = options.model.orders();
    let live = if of_registers(&transactions)? {
        let keys = KeyOrders {
            sequential: options.sequential_keys,
            linearizable: options.linearizable_keys,
        };
        let registers = Registers::analyze(&transactions, keys, &mut findings)?;
        let graph = registers.graph(orders)?;
        cycles::find(&graph, orders, &transactions, &registers, &mut findings);
        registers.live
    } else {
        let lists = Lists::analyze(&transactions, &mut findings)?;
        let graph = lists.graph(orders)?;
        cycles::find(&graph, orders, &transactions, &lists, &mut findings);
        lists.live
    };
    let count = |status| {
        let of = transactions.all.iter();
        of.filter(|t| t.status == status).count()
    };
    let seen = transactions.all.iter().zip(&live);
    let seen = seen.filter(|(t, live)| t.status == Status::Indeterminate && **live);
    let mut kept = findings.kept;
    kept.sort_by_key(|finding| finding.anomaly);
    Ok(Report {
        model: options.model,
        committed: count(Status::Committed),
        indeterminate: (count(Status::Indeterminate), seen.count()),
        aborted: count(Status::Aborted),
        totals: findings.totals,
        findings: kept,
    })
}

/// Whether the history is of registers, and not of lists.
fn of_registers(transactions: &Transactions<'_>) -> Result<bool, HistoryError> {
    let (mut lists, mut registers) = (false, false);
    for transaction in &transactions.all {
        for step in transaction.steps {
            match step {
                MicroOp::Append { .. } => lists = true,
                MicroOp::Read {
                    seen: Seen::List(_),
                    ..
                } => lists = true,
                MicroOp::Write { .. } => registers = true,
                MicroOp::Read {
                    seen: Seen::Value(_),
                    ..
                } => registers = true,
                MicroOp::Read { .. } => {}
            }
        }
        if lists && registers {
            let index = transaction.index;
            return Err(HistoryError::Mixed { index });
        }
    }
    Ok(registers)
}
