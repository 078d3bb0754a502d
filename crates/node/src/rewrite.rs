//! Tables that a statement rewrites (`ALTER TABLE` with another type of a column, say). Run by
//! every session of a server that has the library preloaded, and by the appliers.
//!
//! The statement writes each row anew, by its own transaction. The versions of the rows would go
//! with those that wrote them before. So the layer above notes them before and writes them down
//! after.
//!
//! PostgreSQL creates the table that receives the rows under a name of its own, `pg_temp_OID`, at a
//! moment when the rows are still in the old one. An event trigger on `table_rewrite` would come at
//! the same moment, but a setting and any superuser can turn event triggers off.
//!
//! `VACUUM FULL`, `CLUSTER` and `REPACK` create such a table, too, and keep the writers of its
//! rows: only `ALTER TABLE` counts.
//!
//! Not for: the format of versions (`braid_apply`).

use std::cell::RefCell;
use std::sync::OnceLock;

use braid_postgres::hook::Utility;
use braid_postgres::lock::LockMode;
use braid_postgres::relation::Relation;
use braid_postgres::setting::{As, Level};
use braid_postgres::transaction::{self, End, PartEnd};
use pgrx::pg_sys;

use crate::registry;

/// Called with a table that is about to be rewritten. Returns the action that follows when that has
/// succeeded.
pub type Handler = fn(pg_sys::Oid) -> Option<Box<dyn FnOnce()>>;

/// The prefix of the names of tables that receive the rows of another one.
const TRANSIENT: &str = "pg_temp_";

static HANDLER: OnceLock<Handler> = OnceLock::new();

/// A statement that is being executed.
struct Altering {
    /// The nest level of its transaction.
    level: i32,
    /// The settings that it runs under.
    settings: Level,
    /// Actions for the tables that it has rewritten.
    rewritten: Vec<Box<dyn FnOnce()>>,
}

thread_local! {
    /// The statements, the outermost first. A failed statement is removed with its subtransaction.
    static ALTERING: RefCell<Vec<Altering>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn install(handler: Handler) {
    if HANDLER.set(handler).is_ok() {
        transaction::on_end(at_end);
        transaction::on_part_end(at_part_end);
    }
}

/// Whether a statement may rewrite tables, and anybody wants to know. Raises nothing.
pub(crate) fn may_be(statement: Utility<'_>) -> bool {
    registry::my_manager().is_some()
        && statement
            .node()
            .is_some_and(|node| node.cast::<pg_sys::AlterTableStmt>().is_some())
}

/// Such a statement begins. Synchronized scans are turned off: the scans of the statement, and of
/// the actions after it, begin at the first row.
pub(crate) fn before() {
    let altering = Altering {
        level: transaction::nest_level(),
        settings: Level::begin(),
        rewritten: Vec::new(),
    };
    let settings = &altering.settings;
    settings.set(c"synchronize_seqscans", c"off", As::User);
    ALTERING.with_borrow_mut(|all| all.push(altering));
}

/// The innermost of them has succeeded. The settings of a statement that has failed, or that has
/// committed on its way, are put back with its transaction.
pub(crate) fn after() {
    let Some(done) = ALTERING.with_borrow_mut(Vec::pop) else {
        return;
    };
    for finish in done.rewritten {
        finish();
    }
    done.settings.end(true);
}

/// A relation was created.
pub(crate) fn relation_created(created: pg_sys::Oid) {
    let Some(handler) = HANDLER.get() else {
        return;
    };
    if ALTERING.with_borrow(Vec::is_empty) {
        return;
    }
    // Nobody else sees it yet, and it is in no index of the catalog.
    let relation = Relation::open(created, LockMode::AccessShare);
    let name = relation.name();
    relation.close(LockMode::None);
    let old = name
        .strip_prefix(TRANSIENT)
        .and_then(|oid| oid.parse::<u32>().ok());
    if let Some(finish) = old.and_then(|oid| handler(oid.into())) {
        ALTERING.with_borrow_mut(|altering| {
            if let Some(innermost) = altering.last_mut() {
                innermost.rewritten.push(finish);
            }
        });
    }
}

fn at_end(end: End) {
    if matches!(end, End::Committed | End::RolledBack | End::Prepared) {
        ALTERING.with_borrow_mut(Vec::clear);
    }
}

fn at_part_end(part: PartEnd) {
    if !part.stays {
        let level = transaction::nest_level();
        ALTERING.with_borrow_mut(|altering| altering.retain(|one| one.level < level));
    }
}
