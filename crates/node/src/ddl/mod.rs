//! Statements that change the schema, for other nodes (`braid.ddl_replication`): captured where
//! they are executed. Run by every session of a server that has the library preloaded, and by the
//! appliers, which pass statements on.
//!
//! A statement is captured after it has succeeded, in its transaction: it inserts a row into
//! `braid.ddl_message`, which the output plugin sends at its place among the changes. So it is
//! rolled back with its transaction, or its savepoint. No user may write that table, so no user can
//! have another node run a statement with other rights than the statement's node did.
//!
//! Statements that a captured statement runs, for example in event triggers, follow it. Parts of a
//! statement (such as the sequence of a `serial` column) are not captured. CREATE TABLE AS is
//! captured when its table is created, so that its rows follow.
//!
//! Not for: which statements are captured (`braid_postgres::schema_statement`), and how other nodes
//! run them (`braid_apply`).

mod columns;
mod facts;
pub mod intent;
mod open;
pub mod roles;
mod store;
mod tables;

use std::sync::atomic::Ordering;

use braid_bgworker::sql_text::explained;
use braid_postgres::catalog::{Rights, query, with_rights};
use braid_postgres::hook::Utility;
use braid_postgres::schema_statement::Form;
use braid_postgres::transaction::{self, End, PartEnd};
use braid_postgres::{compat, plain, schema_statement, server, worker};
use pgrx::pg_sys;

use crate::settings::{self, DdlReplication};
use crate::{registry, standing};

pub use columns::{ColumnNames, ColumnPlace, OWN_VALUES, column_place, note_given, note_rewritten};
pub use facts::{add_publications, lock, oids_of, shape_of};
pub(crate) use facts::{owners_query, owners_work};
pub use store::{
    Entry, is_a_node, is_known, join_subscriptions, last_of, leave_subscriptions, note,
    pass_on as hand_on, rename_in_subscription, run_everywhere,
};
pub use tables::{not_run, note_renames, numbered, renamed, renames, table_without};

/// Starts to follow transactions. Called once, while the postmaster loads its libraries: every
/// session inherits it.
pub(crate) fn install() {
    transaction::on_end(at_end);
    transaction::on_part_end(at_part_end);
}

/// Whether a statement may have to be captured. Raises nothing.
pub(crate) fn may_capture(statement: Utility<'_>) -> bool {
    settings::ddl_replication() != DdlReplication::Off && !statement.is_part() && is_own_work()
}

/// Whether this session works for a user: it is none of Braid's workers, applies nothing that
/// another node has sent, and is not inside of an extension's script.
pub(crate) fn is_own_work() -> bool {
    !worker::is_worker()
        && compat::session_origin() == 0
        && !plain::creating_extension()
        && !server::is_in_recovery()
}

/// Whether this database is a member of a group. In a transaction with a snapshot. The catalog is
/// read only if nobody has looked since the server started: that keeps a lock until the end.
pub(crate) fn is_member() -> bool {
    let known = registry::my_manager().map(|entry| entry.membership.load(Ordering::Acquire));
    match known {
        Some(registry::MEMBER | registry::READ_ONLY) => return true,
        Some(registry::NO_MEMBER) => return false,
        _ => {}
    }
    standing::has_extension()
        && with_rights(Rights::ExtensionOwner, || {
            !query("select 1 from braid.group_self", &[]).is_empty()
        })
}

/// A statement that may have to be captured begins. Returns whether it is captured.
pub(crate) fn before(statement: Utility<'_>) -> bool {
    let Some(node) = statement.node() else {
        return false;
    };
    let Some(found) = schema_statement::look(node) else {
        return false;
    };
    if settings::ddl_replication() == DdlReplication::Auto && !is_member() {
        return false;
    }
    let text = match &found.form {
        Form::Refresh if !settings::replicate_refresh() => return false,
        Form::Role(role) if !(settings::replicate_roles() && roles::is_ours(role)) => return false,
        Form::Role(role) if store::is_a_node() => {
            let text = statement.text_with(&role.edits);
            text.unwrap_or_else(|error| error.raise())
        }
        _ if schema_statement::explained(node).is_some() => explained(&statement.text()).to_owned(),
        _ => statement.text(),
    };
    open::begin(found, text)
}

/// A statement that is captured has succeeded.
pub(crate) fn after() {
    open::finish();
}

/// A relation was created.
pub(crate) fn relation_created(relation: pg_sys::Oid) {
    if open::awaits_table() {
        open::table_created(relation);
    }
}

fn at_end(end: End) {
    match end {
        // A statement that commits on its way goes on.
        End::Committed => open::keep_alone(),
        End::RolledBack | End::Prepared => open::clear(),
        _ => {}
    }
}

fn at_part_end(part: PartEnd) {
    if part.stays {
        open::level_committed();
    } else {
        open::level_aborted();
    }
}
