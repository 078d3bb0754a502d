//! Rules for single columns (`braid_bgworker::column_rule`), carried out. They are read with a
//! table's plan, and applied whenever a change conflicts with a row, whichever version wins. Run by
//! the appliers.
//!
//! If a losing change adds something to a row, the row is written in that change's transaction, but
//! keeps its version. Its version is stored as for rows that a conflict function has made
//! (`batch.rs`).
//!
//! For columns that are registers of their own, `braid.column_write` has who wrote them
//! (`braid_node::column_write`). A change is compared with these records only if a newer change may
//! have written the row. Then the row is locked, and the applier waits for the records of local
//! sessions that have written it.

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

/// The column rules of one table.
#[derive(Debug, Default)]
pub struct ColumnRules {
    columns: Vec<RuledColumn>,
    /// Whether the table has rules, or had some: its rows may be merged from several changes.
    pub were_set: bool,
}

impl ColumnRules {
    /// Whether there are rules.
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

    /// Returns the rule that needs whole old rows with updates, if there is one.
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

    /// Number of the column, from 1.
    fn number(&self) -> i16 {
        i16::try_from(self.local + 1).unwrap_or(i16::MAX)
    }
}
