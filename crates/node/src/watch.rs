//! What the library does when a session executes statements, in the order in which it does it. Run
//! by every session of a server that has the library preloaded.

use braid_postgres::hook::{self, ObjectWatch, Utility, Watch};
use pgrx::pg_sys::{self, ObjectAccessType};

use crate::tombstone::drop_database;
use crate::{clock, ddl, read_only, rewrite};

static WATCH: Watch = Watch {
    begins: read_only::statement_begins,
    wants: |statement| {
        ddl::may_capture(statement)
            || clock::is_of_transaction(statement)
            || rewrite::may_be(statement)
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
            access: ObjectAccessType::OAT_DROP,
            class: pg_sys::DatabaseRelationId,
            handler: drop_database::end_collector_of,
        },
    ],
};

/// What `before` says of a statement: it is captured.
const CAPTURED: u8 = 1;
/// It may rewrite tables.
const REWRITES: u8 = 2;

/// Starts to watch statements and commits; `rewrites` is what is done about a table that is
/// rewritten. Called once, while the postmaster loads its libraries: every session inherits it.
pub fn install(rewrites: rewrite::Handler) {
    clock::install();
    ddl::install();
    rewrite::install(rewrites);
    hook::install(&WATCH);
}

/// Returns what `after` is to do.
fn before(statement: Utility<'_>) -> u8 {
    let mut followed = 0;
    if ddl::may_capture(statement) && ddl::before(statement) {
        followed |= CAPTURED;
    }
    clock::before(statement);
    if rewrite::may_be(statement) {
        rewrite::before();
        followed |= REWRITES;
    }
    followed
}

fn after(followed: u8) {
    // What is captured reads the tables anew, by then with the versions of their rows.
    if followed & REWRITES != 0 {
        rewrite::after();
    }
    if followed & CAPTURED != 0 {
        ddl::after();
    }
}
