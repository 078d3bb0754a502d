//! Rows of another node, decided about in a transaction of this node's own. Run by the steps
//! process of a group's member ([`crate::group`]).
//!
//! The rows conflict with local ones like inserts of a subscription: they are decided by their
//! versions and the table's rules, with losers in `braid.conflict_history`. But the written rows
//! are this node's own change, and go to all others as such.
//!
//! Not for: the version of the transaction, which the caller sets.

use braid_apply::{Identity, NO_SUBSCRIPTION, Session};
use braid_gir::{
    Begin, Column, ColumnFlags, Reader, Record, ReplicaIdentity, SchemaNumber, Value, Writer,
};
use braid_node::subscription::rows;
use braid_postgres::error::PgError;
use braid_postgres::memory;
use pgrx::pg_sys;

use super::{SESSION, settings_for, with_session};

/// Local rows of unknown version count as this old (Unix microseconds): older than any known
/// version.
const UNKNOWN_HERE: i64 = 1;
/// Incoming rows of unknown version are older still.
pub(crate) const UNKNOWN_THERE: i64 = 0;

/// A row that comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Incoming {
    /// The node that wrote it last. Never empty.
    pub(crate) node: String,
    /// When, Unix microseconds.
    pub(crate) timestamp: i64,
    /// Texts of the columns.
    pub(crate) values: Vec<Option<String>>,
}

/// The table that rows come for.
#[derive(Debug)]
pub(crate) struct Into<'a> {
    /// OID of the table.
    pub(crate) relation: u32,
    /// The columns of the rows.
    pub(crate) columns: &'a [String],
    /// The primary key's columns.
    pub(crate) key: &'a [String],
    /// The time of the version that rows get, Unix microseconds.
    pub(crate) time: i64,
    /// This node.
    pub(crate) local_node: &'a str,
    /// The name under which conflicts are recorded.
    pub(crate) subscription: &'a str,
}

/// Decides about each of the rows, and writes the winning ones, in the current transaction. The
/// rows are ordered by node, then by time.
///
/// # Errors
/// The errors of applying a subscription's change; 40001 if it is to be tried again. After an error
/// the transaction must be rolled back.
pub(crate) fn decide(into: &Into<'_>, incoming: &[Incoming]) -> Result<(), PgError> {
    if let Some(left) = SESSION.take() {
        left.discard();
    }
    let frame = schema(into)?;
    for run in incoming.chunk_by(|one, other| one.node == other.node) {
        memory::keep_current(|| settings_for(|| decide_run(into, &frame, run)))?;
        if let Some(session) = SESSION.take() {
            session.discard();
        }
    }
    Ok(())
}

/// The schema record of the rows.
fn schema(into: &Into<'_>) -> Result<Writer, PgError> {
    let found = rows(
        "select n.nspname::text, c.relname::text, a.attname::text, t.typname::text, tn.nspname::text, \
                (case when t.oid < 16384 then t.oid else 0 end)::text, a.atttypmod::text \
           from pg_attribute a join pg_class c on c.oid = a.attrelid join pg_namespace n on n.oid = c.relnamespace \
           join pg_type t on t.oid = a.atttypid join pg_namespace tn on tn.oid = t.typnamespace \
          where a.attrelid = $1::oid and a.attnum > 0 and not a.attisdropped",
        &[i64::from(into.relation).into()],
    )?;
    let text = |row: &'_ [Option<String>], index: usize| row.get(index).cloned().flatten();
    let mut columns = Vec::with_capacity(into.columns.len());
    for name in into.columns {
        let row = found
            .iter()
            .find(|row| row.get(2).and_then(Option::as_ref) == Some(name))
            .map_or(&[][..], Vec::as_slice);
        let flags = if into.key.contains(name) {
            ColumnFlags::IDENTITY | ColumnFlags::PRIMARY_KEY | ColumnFlags::NOT_NULL
        } else {
            0
        };
        let number = |index| text(row, index);
        columns.push(Column {
            flags: ColumnFlags(flags),
            type_oid: number(5).and_then(|oid| oid.parse().ok()).unwrap_or(0),
            type_modifier: number(6).and_then(|text| text.parse().ok()).unwrap_or(-1),
            name,
            type_namespace: row.get(4).and_then(Option::as_deref).unwrap_or_default(),
            type_name: row.get(3).and_then(Option::as_deref).unwrap_or_default(),
            mark: 0,
        });
    }
    let name = |index: usize| {
        found
            .first()
            .and_then(|row| row.get(index)?.as_deref())
            .unwrap_or_default()
    };
    let mut writer = Writer::new();
    writer.schema(
        SchemaNumber(0),
        into.relation,
        ReplicaIdentity::Default,
        (name(0), name(1)),
        (&columns, &[]),
    )?;
    Ok(writer)
}

/// Rows of one node.
fn decide_run(into: &Into<'_>, schema: &Writer, run: &[Incoming]) -> Result<(), PgError> {
    let mut session = Session::new(Identity {
        subscription_id: NO_SUBSCRIPTION,
        subscription: into.subscription.to_owned(),
        run_as: None,
        local_node: into.local_node.to_owned(),
        // Nobody: a row's node is said with it.
        provider: String::new(),
        charset: i32::try_from(pg_sys::pg_enc::PG_UTF8).unwrap_or(6),
        ignores_missing: false,
    });
    session.decide_alone(into.time, UNKNOWN_HERE);
    SESSION.set(Some(session));
    if let Some(Record::Schema(schema)) = Reader::new(schema.frame()).next_record()? {
        with_session(|session| {
            session.learn(&schema);
            Ok(())
        })?;
    }
    let mut writer = Writer::new();
    let mut at = None;
    for row in run {
        let begin = Begin {
            commit_lsn: 0,
            commit_timestamp: row.timestamp,
            xid: 0,
            origin: &row.node,
            origin_lsn: 0,
        };
        if at.is_none() {
            with_session(|session| {
                session.attach(&begin);
                Ok(())
            })?;
        } else if at != Some(row.timestamp) {
            with_session(|session| Ok(session.join(&begin)))?;
        }
        at = Some(row.timestamp);
        writer.clear(0);
        writer.insert(SchemaNumber(0), true, &[], |image| {
            for value in &row.values {
                image.put(&match value {
                    Some(text) => Value::BinaryText(text.as_bytes()),
                    None => Value::Null,
                });
            }
            Ok::<(), braid_gir::Error>(())
        })?;
        if let Some(Record::Change(change)) = Reader::new(writer.frame()).next_record()? {
            with_session(|session| session.change(&change))?;
        }
    }
    // The versions of the rows are not kept: they have that of the transaction.
    with_session(Session::detach).map(drop)
}
