//! Routed tables are known by their guard: a CHECK constraint `braid_routing` that is a call of
//! `braid.is_here` for the table itself. This module finds guards. It also refuses users'
//! statements about things on which all nodes must agree. Run by every session of a server that has
//! the library preloaded.
//!
//! Example: nodes A and B have different rows of `orders`. A user truncates it at A. The truncation
//! replicates, and empties the table at B, too: rows that A never had are gone.
//!
//! A member of a group refuses, for its routed tables:
//!
//! - TRUNCATE, also by CASCADE and of a table that it inherits from;
//! - whatever drops or alters the guard. PostgreSQL drops it with its table, with the schema, and
//!   with a column that it uses; if the type of such a column changes, PostgreSQL makes the guard
//!   anew;
//! - unique indexes that lack a column of the guard: rows with one key could be at different nodes;
//! - foreign keys that refer to the table: the row can be at another node;
//! - SET UNLOGGED: rows that move to another node would be lost;
//! - other names of the table, of its umbrella, of its schema, and of a column of the guard.
//!
//! Only sessions are refused: Braid's processes, and statements from other nodes, pass. So do
//! functions of Braid's inside of [`allowed`], and a DROP that takes the extension along.
//!
//! A table without a guard costs a look-up of its constraint by name, where something is refused at
//! all. A copy of a table, made by LIKE, has a guard that calls for the other table: it is not
//! routed.
//!
//! Not for: the decision of a guard.

use std::cell::Cell;
use std::ffi::CStr;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::check_constraint::CheckCall;
use braid_postgres::drop_command::{self, DropCommand};
use braid_postgres::error::PgError;
use braid_postgres::hook::Utility;
use braid_postgres::schema_statement::{RelationName, Renamed, made_unlogged, renamed};
use braid_postgres::transaction::{self, End};
use braid_postgres::{encoding, syscache, table_scan};
use pgrx::pg_sys;

use crate::ddl::{self, owners_query};
use crate::umbrella;

/// The name of a guard.
pub const GUARD: &CStr = c"braid_routing";
/// The schema of the function that a guard calls.
const SCHEMA: &CStr = c"braid";
/// The function.
const FUNCTION: &CStr = c"is_here";

const UNROUTE: &str = "Call braid.unroute_table for the table first.";

thread_local! {
    /// How many tasks of Braid's own, one inside of the other, this session is in.
    static ALLOWED: Cell<u32> = const { Cell::new(0) };
    /// The statement that runs drops the extension, and with it the guards.
    static EXTENSION_GOES: Cell<bool> = const { Cell::new(false) };
}

/// Starts to follow transactions. Called once, while the postmaster loads its libraries: every
/// session inherits it.
pub(crate) fn install() {
    transaction::on_end(|end| {
        if matches!(end, End::Committed | End::RolledBack | End::Prepared) {
            EXTENSION_GOES.set(false);
        }
    });
    transaction::on_part_end(|part| {
        if !part.stays {
            EXTENSION_GOES.set(false);
        }
    });
}

/// Does Braid's own work, which may set and remove guards.
pub fn allowed<T>(work: impl FnOnce() -> T) -> T {
    struct Inside;
    impl Drop for Inside {
        fn drop(&mut self) {
            ALLOWED.set(ALLOWED.get().saturating_sub(1));
        }
    }
    ALLOWED.set(ALLOWED.get() + 1);
    let _inside = Inside;
    work()
}

/// The guard of a table, if it is routed. In a transaction.
#[must_use]
pub fn guard_of(table: pg_sys::Oid) -> Option<CheckCall> {
    CheckCall::of_table(table, GUARD).filter(is_guard)
}

/// Whether a table is routed. In a transaction.
#[must_use]
pub fn is_routed(table: pg_sys::Oid) -> bool {
    guard_of(table).is_some()
}

fn is_guard(call: &CheckCall) -> bool {
    *call.schema == *SCHEMA && *call.function == *FUNCTION && call.relation == Some(call.table)
}

/// Whether this session is kept from it.
fn is_kept() -> bool {
    ALLOWED.get() == 0 && !EXTENSION_GOES.get() && ddl::is_own_work() && ddl::is_member()
}

fn shown(table: pg_sys::Oid) -> String {
    let (schema, name) = syscache::relation_name(table);
    format!("\"{schema}.{name}\"")
}

fn refuse(message: String) -> PgError {
    PgError::new(SqlState::FeatureNotSupported, message)
}

/// Whether a statement may give other names, or drop the extension. Raises nothing.
pub(crate) fn may_be(statement: Utility<'_>) -> bool {
    let Some(node) = statement.node() else {
        return false;
    };
    matches!(
        node.tag(),
        pg_sys::NodeTag::T_RenameStmt
            | pg_sys::NodeTag::T_AlterObjectSchemaStmt
            | pg_sys::NodeTag::T_DropOwnedStmt
    ) || made_unlogged(node).is_some()
        || drop_command::may_drop_extension(node)
}

/// Such a statement begins. Returns whether [`after`] is to be called.
pub(crate) fn before(statement: Utility<'_>) -> bool {
    let Some(node) = statement.node() else {
        return false;
    };
    if let Some(names) = renamed(node) {
        check_names(&names);
    }
    if let Some(relation) = made_unlogged(node) {
        check_unlogged(&relation);
    }
    let goes = match drop_command::of_statement(node) {
        DropCommand::Extensions(names) => names.iter().any(|name| name == "braid"),
        DropCommand::OwnedBy(roles) => ddl::is_member() && owns_extension(&roles),
        DropCommand::Other => false,
    };
    if goes {
        EXTENSION_GOES.set(true);
    }
    goes
}

/// The statement has succeeded.
pub(crate) fn after() {
    EXTENSION_GOES.set(false);
}

/// Whether one of these roles owns the extension.
fn owns_extension(roles: &[pg_sys::Oid]) -> bool {
    let rows = owners_query(
        "select extowner::oid from pg_extension where extname = 'braid'",
        &[],
    );
    let owner = rows.get(0, 0).and_then(|oid| oid.parse::<u32>().ok());
    roles.iter().any(|role| Some(role.to_u32()) == owner)
}

fn check_names(names: &Renamed) {
    match names {
        Renamed::Relation(relation) | Renamed::Moved(relation) => {
            let Some(table) = relation.find() else {
                return;
            };
            let what = if matches!(names, Renamed::Moved(_)) {
                "move"
            } else {
                "rename"
            };
            if umbrella::plain_of(table).is_some() && is_kept() {
                refuse(format!("cannot {what} umbrella {}", shown(table)))
                    .with_detail("An umbrella is known by the name of its table.")
                    .with_hint("Call braid.remove_umbrella for the table first.")
                    .raise();
            }
            if is_routed(table) && is_kept() {
                refuse(format!("cannot {what} routed table {}", shown(table)))
                    .with_detail("The group has agreed on the table by its name.")
                    .with_hint(UNROUTE)
                    .raise();
            }
        }
        Renamed::Column(relation, column) => {
            let Some(table) = relation.find() else {
                return;
            };
            // The statement renames the columns of partitions, too.
            let table = umbrella::plain_of(table).unwrap_or(table);
            let number = syscache::column_number(table, column);
            let uses = guard_of(table).is_some_and(|guard| guard.columns.contains(&number));
            if uses && is_kept() {
                refuse(format!(
                    "cannot rename column \"{}\" of routed table {}",
                    encoding::utf8(column),
                    shown(table)
                ))
                .with_detail("The group has agreed on expressions that use the column.")
                .with_hint(UNROUTE)
                .raise();
            }
        }
        Renamed::Schema(schema) => {
            if let Some(table) = routed_in(schema)
                && is_kept()
            {
                refuse(format!(
                    "cannot rename schema \"{}\", which has routed table {}",
                    encoding::utf8(schema),
                    shown(table)
                ))
                .with_detail("The group has agreed on the table by its name.")
                .with_hint(UNROUTE)
                .raise();
            }
        }
    }
}

/// A routed table in a schema.
fn routed_in(schema: &CStr) -> Option<pg_sys::Oid> {
    let schema = syscache::namespace(schema)?;
    let rows = owners_query(
        "select k.conrelid::oid from pg_constraint k join pg_class c on c.oid = k.conrelid \
          where k.contype = 'c' and k.conname = 'braid_routing' and c.relnamespace = $1::oid order by 1",
        &[Some(&schema.to_u32().to_string())],
    );
    let mut tables = rows
        .iter()
        .filter_map(|row| row.first()?.as_ref()?.parse::<u32>().ok());
    tables.find_map(|table| is_routed(table.into()).then(|| table.into()))
}

/// A table is about to be truncated.
pub(crate) fn truncated(table: pg_sys::Oid) {
    if is_routed(table) && is_kept() {
        refuse(format!("cannot truncate routed table {}", shown(table)))
            .with_detail("TRUNCATE would remove the rows that other nodes have, too.")
            .with_hint("Delete rows with DELETE, at the node that has them; or call braid.unroute_table for the table first.")
            .raise();
    }
}

/// A constraint is about to be dropped, or is altered.
pub(crate) fn constraint_changed(constraint: pg_sys::Oid) {
    let Some(guard) = CheckCall::find(constraint, GUARD).filter(is_guard) else {
        return;
    };
    if is_kept() {
        refuse(format!(
            "cannot drop or alter the guard of routed table {}",
            shown(guard.table)
        ))
        .with_detail("The statement drops the table, its schema or a column that the guard uses, changes the type of such a column, or is about constraint \"braid_routing\" itself.")
        .with_hint(UNROUTE)
        .raise();
    }
}

fn check_unlogged(relation: &RelationName) {
    let Some(table) = relation.find() else {
        return;
    };
    if is_routed(table) && is_kept() {
        refuse(format!("cannot set routed table {} unlogged", shown(table)))
            .with_detail("Changes of an unlogged table are not sent to other nodes, so rows that move would be lost.")
            .with_hint(UNROUTE)
            .raise();
    }
}

/// A constraint was created.
pub(crate) fn constraint_created(constraint: pg_sys::Oid) {
    let Some(table) = table_scan::new_foreign_key(constraint) else {
        return;
    };
    if is_routed(table) && is_kept() {
        refuse(format!("a foreign key cannot refer to routed table {}", shown(table)))
            .with_detail("The row that it refers to can be at another node.")
            .with_hint("Check the reference in the application; or call braid.unroute_table for the table first.")
            .raise();
    }
}

/// A relation was created.
pub(crate) fn relation_created(created: pg_sys::Oid) {
    if !table_scan::is_new_index(created) {
        return;
    }
    let Some(index) = table_scan::new_index(created).filter(|index| index.is_unique) else {
        return;
    };
    let Some(guard) = guard_of(index.table) else {
        return;
    };
    let lacks = |column: &&i16| !index.columns.contains(column);
    let missing: Vec<String> = guard
        .columns
        .iter()
        .filter(lacks)
        .map(|column| column_name(index.table, *column))
        .collect();
    if (missing.is_empty() && !index.is_special) || !is_kept() {
        return;
    }
    let shown = shown(index.table);
    let refused = if index.is_special {
        refuse(format!("cannot create a unique index of some rows or of expressions, or an exclusion constraint, on routed table {shown}"))
            .with_hint("Create a unique index of plain columns for all rows; or call braid.unroute_table for the table first.")
    } else {
        refuse(format!(
            "unique index on routed table {shown} must have all columns that routing uses"
        ))
        .with_hint(format!(
            "Add {} to its key; or call braid.unroute_table for the table first.",
            missing.join(", ")
        ))
    };
    refused
        .with_detail("Two rows with one key could be at different nodes.")
        .raise();
}

fn column_name(table: pg_sys::Oid, number: i16) -> String {
    let row = syscache::AttributeRow::find(table, number);
    row.map_or_else(String::new, |row| {
        format!("\"{}\"", encoding::name(&row.attname))
    })
}
