//! The library's actions when a session executes statements, in their order. Run by every session
//! of a server that has the library preloaded.

use braid_postgres::hook::{self, ObjectWatch, Utility, Watch};
use pgrx::pg_sys::{self, ObjectAccessType};

use crate::tombstone::drop_database;
use crate::{clock, ddl, left_origin, read_only, rewrite, routing_guard, umbrella, versions};

static WATCH: Watch = Watch {
    begins: read_only::statement_begins,
    wants: |statement| {
        ddl::may_capture(statement)
            || clock::is_of_transaction(statement)
            || is_drop_database(statement)
            || rewrite::may_be(statement)
            || routing_guard::may_be(statement)
            || versions::may_concern(statement)
    },
    before,
    after,
    objects: &[
        ObjectWatch {
            access: ObjectAccessType::OAT_POST_CREATE,
            class: pg_sys::RelationRelationId,
            handler: ddl::relation_created,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_POST_CREATE,
            class: pg_sys::RelationRelationId,
            handler: rewrite::relation_created,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_POST_CREATE,
            class: pg_sys::RelationRelationId,
            handler: routing_guard::relation_created,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_POST_CREATE,
            class: pg_sys::ConstraintRelationId,
            handler: routing_guard::constraint_created,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_TRUNCATE,
            class: pg_sys::RelationRelationId,
            handler: routing_guard::truncated,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_DROP,
            class: pg_sys::ConstraintRelationId,
            handler: routing_guard::constraint_changed,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_POST_ALTER,
            class: pg_sys::ConstraintRelationId,
            handler: routing_guard::constraint_changed,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_DROP,
            class: pg_sys::DatabaseRelationId,
            handler: drop_database::end_collector_of,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_DROP,
            class: pg_sys::DatabaseRelationId,
            handler: left_origin::database_dropped,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_DROP,
            class: pg_sys::RelationRelationId,
            handler: versions::dropped,
        },
        ObjectWatch {
            access: ObjectAccessType::OAT_TRUNCATE,
            class: pg_sys::RelationRelationId,
            handler: versions::truncated,
        },
    ],
};

/// Bit of `before`: the statement is captured.
const CAPTURED: u8 = 1;
/// Bit of `before`: the statement may rewrite tables.
const REWRITES: u8 = 2;
/// Bit of `before`: the statement drops a database.
const DROPS_DATABASE: u8 = 4;
/// Bit of `before`: the statement drops the extension.
const DROPS_EXTENSION: u8 = 32;

fn is_drop_database(statement: Utility<'_>) -> bool {
    let node = statement.node();
    node.is_some_and(|node| node.tag() == pg_sys::NodeTag::T_DropdbStmt)
}

/// Starts to watch statements and commits; `rewrites` is called with each table that is rewritten.
/// Called once, while the postmaster loads its libraries: every session inherits it.
pub fn install(rewrites: rewrite::Handler) {
    versions::install();
    clock::install();
    ddl::install();
    rewrite::install(rewrites);
    routing_guard::install();
    umbrella::install();
    hook::install(&WATCH);
}

/// Returns what `after` is to do.
fn before(statement: Utility<'_>) -> u8 {
    let mut followed = versions::before(statement);
    if routing_guard::may_be(statement) && routing_guard::before(statement) {
        followed |= DROPS_EXTENSION;
    }
    if ddl::may_capture(statement) && ddl::before(statement) {
        followed |= CAPTURED;
    }
    clock::before(statement);
    if rewrite::may_be(statement) {
        rewrite::before();
        followed |= REWRITES;
    }
    if is_drop_database(statement) {
        left_origin::statement_begins();
        followed |= DROPS_DATABASE;
    }
    followed
}

fn after(followed: u8) {
    versions::after(followed);
    if followed & DROPS_EXTENSION != 0 {
        routing_guard::after();
    }
    // The captured statement is sent with the tables as they are now, with the versions of their
    // rows.
    if followed & REWRITES != 0 {
        rewrite::after();
    }
    if followed & CAPTURED != 0 {
        ddl::after();
    }
    if followed & DROPS_DATABASE != 0 {
        left_origin::after_drop();
    }
}
