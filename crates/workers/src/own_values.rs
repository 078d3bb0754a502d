//! Values that this node has computed for rows of its own. A statement of another node has added a
//! column with a volatile default, and was run on this node (`apply/statement.rs`): each row got a
//! value. The other node sends its rows again, so these have its values by the end of the
//! transaction. It did not know the rows that were written on this node, or had arrived on it,
//! before. Run by a process of its own, which the manager starts when `braid.own_value` has
//! something, and which ends when nothing is left.
//!
//! Such a row is updated, as this node's own change. So each node sends a version of it that is
//! newer than the row, and the newest one of all wins, as with other updates. The stored rows
//! themselves say which are left: the transaction that has rewritten the table has written them,
//! and no later change has replaced them.
//!
//! A row that a session has locked is left out, and checked again later: if it is updated
//! meanwhile, that sends its values.

use braid_apply::are_first_states;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::array_literal;
use braid_node::subscription::{execute, execute_counting, rows};
use braid_node::{ddl, standing};
use braid_postgres::catalog::{Rights, with_rights};
use braid_postgres::error::{self, PgError};
use braid_postgres::heap_page::tid_of;
use braid_postgres::worker;
use pgrx::pg_sys;

/// Rows that are looked at in a transaction.
const STEP: usize = 1_000;

/// A table, and the transaction that has rewritten it.
struct Written {
    relation: String,
    xid: String,
    /// The relation's name, and that of some column, in SQL.
    name: String,
    column: String,
    /// The relation's file: in another file, rows have other places.
    file: String,
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    crate::connect(argument);
    // Does not wait for a session that has locked a table.
    worker::set("lock_timeout", "1s");
    worker::set("row_security", "off");
    // No trigger sees it, as none sees the statement that has computed the values.
    worker::set("session_replication_role", "replica");
    // Rows are looked at in the order of their places, and those behind one without those before
    // it.
    worker::set("synchronize_seqscans", "off");
    worker::set("enable_seqscan", "off");
    worker::set("max_parallel_workers_per_gather", "0");
    let found = error::transaction(|| {
        if standing::refusal()?.is_some() {
            return Ok(Vec::new());
        }
        written()
    });
    match found {
        Ok(found) => {
            for one in found {
                if let Err(failure) = send_all(&one) {
                    failure.log(&format!(
                        "could not send the values that table {} has got here",
                        one.name
                    ));
                }
            }
        }
        Err(failure) => failure.log("could not send values that tables have got here"),
    }
}

/// Tables that are left, and forgets those that are gone.
fn written() -> Result<Vec<Written>, PgError> {
    execute(
        "delete from braid.own_value o where not exists (select from pg_catalog.pg_class c where c.oid = o.relation)",
        &[],
    )?;
    let found = rows(ddl::OWN_VALUES, &[])?;
    Ok(found
        .into_iter()
        .filter_map(|row| {
            let [relation, xid, name, column, file] = <[_; 5]>::try_from(row).ok()?;
            Some(Written {
                relation: relation?,
                xid: xid?,
                name: name?,
                column: column?,
                file: file.unwrap_or_default(),
            })
        })
        .collect())
}

/// Updates all rows of a table that are left, in the order of their places.
fn send_all(written: &Written) -> Result<(), PgError> {
    let mut after = "(0,0)".to_owned();
    let mut all = true;
    loop {
        pgrx::check_for_interrupts!();
        let step = error::transaction(|| send_some(written, &after))?;
        all &= step.all;
        match step.last {
            Some(last) => after = last,
            None => break,
        }
    }
    if all {
        error::transaction(|| {
            // `VACUUM FULL` may have moved rows to places that were looked at.
            execute(
                "delete from braid.own_value o using pg_catalog.pg_class c \
                 where o.relation = $1::oid and o.xid = $2::bigint and c.oid = o.relation and c.relfilenode = $3::oid",
                &[
                    written.relation.as_str().into(),
                    written.xid.as_str().into(),
                    written.file.as_str().into(),
                ],
            )
        })?;
    }
    Ok(())
}

struct Step {
    /// The last row that was looked at; `None` if there was none.
    last: Option<String>,
    /// Whether none of them is left.
    all: bool,
}

/// Looks at the first rows behind a place. In a transaction.
fn send_some(written: &Written, after: &str) -> Result<Step, PgError> {
    let Written { name, column, .. } = written;
    let relation = pg_sys::Oid::from(written.relation.parse::<u32>().unwrap_or(0));
    let owner = Rights::OwnerOf(relation);
    let of_transaction = with_rights(owner, || {
        rows(
            &format!(
                "select ctid::text from only {name} where ctid > $1::tid and xmin = $2::xid limit {STEP}"
            ),
            &[after.into(), written.xid.as_str().into()],
        )
    })?;
    let places: Vec<String> = of_transaction.into_iter().flatten().flatten().collect();
    let at: Option<Vec<_>> = places.iter().map(|place| parsed(place)).collect();
    let at =
        at.ok_or_else(|| PgError::new(SqlState::InternalError, "a row's place cannot be read"))?;
    let first_states = are_first_states(relation, &at)?;
    let left: Vec<String> = places
        .iter()
        .zip(first_states)
        .filter(|(_, is_first)| *is_first)
        .map(|(place, _)| place.clone())
        .collect();
    let sent = if left.is_empty() {
        0
    } else {
        with_rights(owner, || {
            execute_counting(
                &format!(
                    "update only {name} set {column} = {column} where ctid = any (array( \
                       select ctid from only {name} where ctid = any ($1::tid[]) and xmin = $2::xid for update skip locked))"
                ),
                &[
                    array_literal(&left).as_str().into(),
                    written.xid.as_str().into(),
                ],
            )
        })?
    };
    Ok(Step {
        all: sent == left.len(),
        last: places.into_iter().last(),
    })
}

/// A row's place, from how PostgreSQL writes it.
fn parsed(place: &str) -> Option<pg_sys::ItemPointerData> {
    let (block, item) = place
        .strip_prefix('(')?
        .strip_suffix(')')?
        .split_once(',')?;
    Some(tid_of((block.parse().ok()?, item.parse().ok()?)))
}
