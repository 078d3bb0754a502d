//! The deletions of local transactions, for the collector (`super`). It decodes in its own process
//! and fetches what this module has gathered, so nothing is sent. Also the columns that local
//! transactions write, if these are registers of their own (`braid_node::column_write`), and the
//! rows that they remove from keyless tables, as far as WAL has them (`braid_node::taken_row`).
//!
//! The table of rules, as visible when the process looks, and WAL say which columns are registers.
//! A rule counts for what is committed after it.

use std::collections::HashMap;
use std::rc::Rc;

use braid_apply::{KeyHashes, KeyPart, identity_key, key_hashes_of_row, table_hash};
use braid_bgworker::column_rule::ColumnRule;
use braid_plugin::{Change, Format, LogicalMessage, Truncation, version_of};
use braid_postgres::compat::ReplOriginId;
use braid_postgres::decoding::{Context, Transaction};
use braid_postgres::relation::RelationRef;
use braid_postgres::schema_statement::is_own;
use braid_postgres::syscache;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::value::Value;
use pgrx::pg_sys;

use super::gathered::{self, Gone, InHand, registers_of};

/// Makes this process gather deletions from now on, instead of sending changes.
pub(crate) fn gather() {
    gathered::begin();
    braid_plugin::set_format(format);
}

/// A stream that has gathered nothing.
fn format() -> Box<dyn Format> {
    Box::new(Deletions {
        keys: HashMap::new(),
        generation: 0,
        in_hand: InHand::default(),
        version: None,
    })
}

/// How the rows of a relation are identified.
#[derive(Debug, Clone)]
enum Looked {
    /// The columns of their key, and the numbers of those that are registers of their own.
    Key(Rc<[KeyPart]>, Rc<[i16]>),
    /// There is no key, and changes say whole rows.
    Row,
}

/// The stream of nothing.
#[derive(Debug)]
struct Deletions {
    /// By relation; `None`: nothing of it is wanted, or its rows are not known by anything.
    keys: HashMap<u32, Option<Looked>>,
    generation: u64,
    in_hand: InHand,
    /// The version of the current transaction, if it differs from the time of its commit.
    version: Option<i64>,
}

impl Deletions {
    /// Returns how the rows of a relation are identified.
    fn look(&mut self, relation: RelationRef<'_>) -> Option<Looked> {
        let generation = gathered::generation();
        if self.generation != generation {
            self.keys.clear();
            self.generation = generation;
        }
        let oid = relation.oid().to_u32();
        self.keys
            .entry(oid)
            .or_insert_with(|| {
                let registers = registers_of(oid);
                if registers.is_empty() && !is_wanted(relation) {
                    return None;
                }
                match identity_key(relation) {
                    Some(key) => Some(Looked::Key(key.into(), registers.into())),
                    None => (relation.replica_identity() == b'f').then_some(Looked::Row),
                }
            })
            .clone()
    }
}

impl Deletions {
    /// Gathers the columns that a new or updated row of a table with registers has written.
    fn note_written(
        &mut self,
        change: &Change<'_>,
        registers: &[i16],
        gone: Option<KeyHashes>,
        here: Option<KeyHashes>,
    ) {
        use pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE;
        let Some(hashes) = here.or(gone) else { return };
        if change.action() == REORDER_BUFFER_CHANGE_DELETE || !change.has_new() {
            return;
        }
        let moved = gone.is_some_and(|gone| gone.equal != hashes.equal);
        // A new row, or one under a new key, or one whose old values are not known.
        let columns = if !change.has_old() || moved {
            None
        } else {
            let written = changed(change, registers);
            if written.is_empty() {
                return;
            }
            Some(written)
        };
        let relation = change.relation().oid().to_u32();
        for hash in hashes.each() {
            self.in_hand
                .push_written(relation, hash, columns.as_deref());
        }
    }
}

/// A rule for a column is set: `braid.column_rule` has its table, its number, and the rule first.
fn note_rule(change: &Change<'_>) {
    if !gathered::is_table_of_rules(change.relation().oid().to_u32()) {
        return;
    }
    let values = change.new_values().unwrap_or_default();
    let [Some(table), Some(number), Some(rule), ..] = values.as_slice() else {
        return;
    };
    let (Some(table), Some(number)) = (table.low(), number.low()) else {
        return;
    };
    if rule.text().as_deref() == Some(ColumnRule::LastUpdateWins.name()) {
        // A smallint.
        let [low, high, ..] = number.to_le_bytes();
        gathered::add_register(table, i16::from_le_bytes([low, high]));
    }
}

/// Returns the columns, out of `columns`, to which an update has given another value.
fn changed(change: &Change<'_>, columns: &[i16]) -> Vec<i16> {
    let old = change.old_values().unwrap_or_default();
    let new = change.new_values().unwrap_or_default();
    let mut changed = Vec::new();
    for number in columns {
        let Ok(position) = usize::try_from(*number - 1) else {
            continue;
        };
        let (Some(old), Some(new)) = (old.get(position), new.get(position)) else {
            continue;
        };
        // Values that are not in WAL are not looked at; the others are in memory, whole or
        // compressed.
        let is_same = match (*old, *new) {
            // Left as it was, and so not in WAL.
            (_, Some(new)) if new.is_in_toast_table() => true,
            (Some(old), Some(new)) => !old.is_in_toast_table() && old.is_same(new),
            (old, new) => old.is_none() && new.is_none(),
        };
        if !is_same {
            changed.push(*number);
        }
    }
    changed
}

/// Whether deletions of a table are wanted: it is one that a subscription is about.
///
/// Or it may become one before this process learns of it, and then an older change of a deleted row
/// may arrive. This concerns a table under the name of such a table, which replaces it, and a table
/// that this node publishes, as is usual for tables that several nodes write.
fn is_wanted(relation: RelationRef<'_>) -> bool {
    let all = syscache::with_ancestors(relation.oid());
    all.iter().any(|oid| gathered::is_listed(oid.to_u32()))
        || (relation.is_publishable()
            && !is_own(relation.oid())
            && all.into_iter().any(|oid| {
                gathered::is_awaited(&syscache::relation_name(oid))
                    || !syscache::publications_of_table(oid).is_empty()
                    || !syscache::publications_of_schema(oid).is_empty()
            }))
}

/// Hashes of the key of a row of a change.
fn hashes_of(
    relation: RelationRef<'_>,
    key: &[KeyPart],
    values: Option<Vec<Option<Value<'_>>>>,
) -> Option<KeyHashes> {
    key_hashes_of_row(relation.oid(), key, &values?)
}

impl Format for Deletions {
    fn is_text(&self) -> bool {
        false
    }

    fn refuses_origin(&self, origin: ReplOriginId) -> bool {
        // Appliers record their own deletions.
        origin != 0
    }

    fn begin(&mut self, ctx: Context<'_>, txn: Transaction<'_>) {
        self.in_hand.clear();
        self.version = version_of(ctx, txn);
    }

    fn row_changed(&mut self, _ctx: Context<'_>, _txn: Transaction<'_>, change: &Change<'_>) {
        use pg_sys::ReorderBufferChangeType::{
            REORDER_BUFFER_CHANGE_DELETE, REORDER_BUFFER_CHANGE_INSERT,
            REORDER_BUFFER_CHANGE_UPDATE,
        };
        if ![
            REORDER_BUFFER_CHANGE_DELETE,
            REORDER_BUFFER_CHANGE_INSERT,
            REORDER_BUFFER_CHANGE_UPDATE,
        ]
        .contains(&change.action())
            || change.author().origin != 0
        {
            return;
        }
        note_rule(change);
        let relation = change.relation();
        let oid = relation.oid().to_u32();
        // Nothing has left its key: it is of interest for its columns only.
        if !change.has_old() && change.has_new() && registers_of(oid).is_empty() {
            return;
        }
        let (key, registers) = match self.look(relation) {
            Some(Looked::Key(key, registers)) => (key, registers),
            Some(Looked::Row) => {
                if change.has_old() {
                    self.in_hand.push(oid, Gone::Row(change.lsn()));
                }
                return;
            }
            None => return,
        };
        let gone = hashes_of(relation, &key, change.old_values());
        let here = hashes_of(relation, &key, change.new_values());
        if !registers.is_empty() {
            self.note_written(change, &registers, gone, here);
        }
        let here = here.map(|here| here.equal);
        // A row that has another form of the same key has not left it.
        if let Some(gone) = gone.filter(|gone| here != Some(gone.equal)) {
            for hash in gone.each() {
                self.in_hand.push(oid, Gone::Key(hash));
            }
        }
    }

    fn truncated(&mut self, _ctx: Context<'_>, _txn: Transaction<'_>, truncation: &Truncation<'_>) {
        if truncation.author.origin != 0 {
            return;
        }
        for relation in truncation.relations {
            // The rows of a partitioned table are in its partitions, which are named too.
            if relation.kind() == b'r' && is_wanted(*relation) {
                let oid = relation.oid().to_u32();
                self.in_hand.push(oid, Gone::Key(table_hash(oid)));
            }
        }
    }

    fn message(
        &mut self,
        _ctx: Context<'_>,
        _txn: Option<Transaction<'_>>,
        _message: &LogicalMessage<'_>,
    ) {
    }

    fn commit(&mut self, _ctx: Context<'_>, txn: Transaction<'_>) {
        let time = txn.time();
        let timestamp = self
            .version
            .take()
            .unwrap_or_else(|| time.saturating_add(EPOCH_DIFFERENCE));
        self.in_hand
            .commit(timestamp, txn.end_lsn)
            .unwrap_or_else(|error| error.raise());
    }

    fn leave(&mut self) {}
}
