//! Rules for single columns (`braid_bgworker::column_rule`), carried out: read with a table's plan,
//! and asked whenever a change meets a row, whoever wins. Run by the appliers.
//!
//! A row into which a losing change has added something is written by that change's transaction,
//! but keeps its version: that is written down as for rows that a conflict function has made
//! (`batch.rs`).
//!
//! Columns that are registers of their own have who wrote them in `braid.column_write`
//! (`braid_node::column_write`). A change is compared with that only where something newer may have
//! written the row: its version is not known to be the oldest. Then the row is locked, and what
//! local sessions have written to it is waited for.

mod cells;
mod load;
mod merging;

use braid_bgworker::column_rule::ColumnRule;
use pgrx::pg_sys;

pub use cells::{adds_up, has_order};
pub use load::load;

type Datum = pg_sys::Datum;

/// A column that has a rule.
#[derive(Debug, Clone)]
pub struct RuledColumn {
    /// Position in the local row, from 0.
    pub local: usize,
    rule: ColumnRule,
    name: String,
    type_id: pg_sys::Oid,
    type_modifier: i32,
    collation: pg_sys::Oid,
    by_value: bool,
    length: i16,
}

/// Those of one table.
#[derive(Debug, Default)]
pub struct ColumnRules {
    columns: Vec<RuledColumn>,
    /// The table has rules, or had some: rows may be there that are of several changes.
    pub were_set: bool,
}

impl ColumnRules {
    /// Whether there are any.
    #[must_use]
    pub fn any(&self) -> bool {
        !self.columns.is_empty()
    }

    /// Whether a column is a sum.
    #[must_use]
    pub fn has_sums(&self) -> bool {
        self.columns
            .iter()
            .any(|column| column.rule == ColumnRule::Delta)
    }

    /// Whether a column is a register of its own.
    #[must_use]
    pub fn has_registers(&self) -> bool {
        self.columns.iter().any(RuledColumn::is_register)
    }

    /// The rule that needs the rows as the writers of updates saw them, if there is one.
    fn needs_before(&self) -> Option<ColumnRule> {
        [ColumnRule::Delta, ColumnRule::LastUpdateWins]
            .into_iter()
            .find(|rule| self.columns.iter().any(|column| column.rule == *rule))
    }
}

impl RuledColumn {
    fn is_register(&self) -> bool {
        self.rule == ColumnRule::LastUpdateWins
    }

    /// Its number, from 1.
    fn number(&self) -> i16 {
        i16::try_from(self.local + 1).unwrap_or(i16::MAX)
    }
}
