//! Marks of columns, for a reader that is sent statements: they distinguish the rows of a column
//! from those of an earlier one that had its name. Run by the walsender when it compiles a
//! relation.

use std::ops::ControlFlow;

use braid_postgres::encoding::utf8;
use braid_postgres::names::find_table;
use braid_postgres::table_scan::{self, Sees, int8, low};
use pgrx::pg_sys;

/// Columns of `braid.given_column`.
const COLUMNS: usize = 4;

/// A name that a statement has given to a column.
#[derive(Debug)]
pub(super) struct Mark {
    /// Attribute number.
    pub(super) number: i16,
    /// The name.
    pub(super) name: String,
    /// Mark of the statement.
    pub(super) mark: u64,
}

/// Marks of a relation's columns. In a transaction with a historic snapshot.
///
/// The table is one that may be read then (`user_catalog_table`). Its index is not, so all rows are
/// looked at: one for each column that a statement has named.
pub(super) fn of(relation: u32) -> Vec<Mark> {
    let mut marks = Vec::new();
    // The extension may be older than the library, or than the moment in WAL.
    let Ok(Some(table)) = find_table("braid", "given_column") else {
        return marks;
    };
    table_scan::find::<COLUMNS>(table, pg_sys::InvalidOid, &[], Sees::Catalog, |row| {
        let [of, number, _, mark] = row.values;
        if low(of) == relation
            && let Some(name) = row.name(2)
        {
            marks.push(Mark {
                number: i16::try_from(low(number) & 0xFFFF).unwrap_or(0),
                name: utf8(name),
                mark: int8(mark).cast_unsigned(),
            });
        }
        ControlFlow::Continue(())
    });
    marks
}
