//! Applies a stream's changes to this database: finds a row, decides which version wins, writes,
//! and stores versions and deletions. Appliers run it, and `braid.ingest` in any session, one
//! transaction at a time ([`Session`]). Writes happen only in the transaction that carries the
//! source's origin, position and timestamp (I1, I3). `braid_bgworker::conflict` alone decides,
//! about a locked row (I2). The crate must not know the plugin, nor processes: who sends changes,
//! who waits for them.

#![allow(unsafe_code)]

mod aggregate;
mod ahead;
mod attach;
mod attempt;
mod batch;
mod bulk;
mod change;
mod column_rules;
mod consolidate;
mod constraint;
mod content;
mod copied;
mod counts;
mod decode;
mod deferred;
mod deleted_parent;
mod deletion;
mod doing;
mod eviction;
mod freed;
mod function;
mod generation;
mod held_removals;
mod history;
mod image;
mod in_the_way;
mod index_walk;
mod kept_out;
mod key_hash;
mod key_order;
mod lookup;
pub mod meanwhile;
mod merge;
pub mod missing;
mod number_map;
mod open_table;
mod partition;
mod peer;
mod places;
mod querier;
mod relation;
mod removal;
mod rewrite;
mod rights;
mod route;
mod row_context;
mod row_version;
mod rules;
mod savepoint;
mod scan;
mod session;
mod slot;
mod statement;
mod table;
mod target;
mod transaction;
mod truncate;
mod unfound;
pub mod user;
mod version;
mod window;
mod write;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;

use slot::any_snapshot;
use target::Target;
use transaction::Current;

pub use attach::Versions;
pub use batch::{KEEP_MERGED, store as store_versions};
pub use column_rules::{adds_up, has_order};
pub use consolidate::Item;
pub use copied::{
    DeadRows, RowVersion, are_first_states, has_merged_rows, key_hashes_at, row_version,
};
pub use counts::Counts;
pub use eviction::tell as tell_displacements;
pub use image::{row_image, with_fixed_settings};
pub use in_the_way::is_in_the_way;
pub use key_hash::{KeyHashes, KeyPart, copied_hash, identity_key, key_hashes_of_row, table_hash};
pub use missing::RULE as MISSING_COLUMN_RULE;
pub use open_table::{check_target, key_of, may_insert};
pub use relation::takes_changes;
pub use rewrite::table_is_rewritten;
pub use route::NOT_KNOWN;
pub use rules::{announce as announce_rules, is_rule, is_versions, take_rule};
pub use savepoint::Savepoint;
pub use session::{Identity, Session};
pub use statement::{StatementInHand, content_of_statement, is_statement, role_of, tables_of};
pub use version::OriginNames;

/// Id of no subscription: the changes were passed to `braid.ingest`, and may go to any table of
/// users.
pub const NO_SUBSCRIPTION: u32 = 0;
/// FirstNormalObjectId of src/include/access/transam.h.
const FIRST_NORMAL_OBJECT: u32 = 16384;

/// Returns the warning about a table that changes are applied to and that a crash empties: it, or a
/// partition of it, is unlogged.
#[must_use]
pub fn unlogged(table: &str) -> PgError {
    PgError::new(SqlState::Warning, format!("table \"{table}\" is unlogged here"))
        .with_detail("After a crash of this server it is empty, and its rows do not come again.")
        .with_hint(
            "Run ALTER TABLE ... SET LOGGED for it or its partitions. After a crash, copy it again with braid.resync_table.",
        )
}
