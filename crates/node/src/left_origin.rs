//! Replication origins, and notes of crashes, that nobody needs any more. Run by managers, and by
//! the session that drops a database.
//!
//! All databases of a server share one list of origins, and few of them can have a position
//! (`max_replication_slots`, from 18 on `max_active_replication_origins`). Each is dropped as soon
//! as its database is gone, its node was taken down, or the extension was dropped:
//!
//! | gone object | dropped by | `braid.origin` |
//! |---|---|---|
//! | the database | the session that drops it; else any database's manager | gone with it |
//! | the node, with its subscriptions | the database's manager | stays: rows refer to it |
//! | the extension | the database's manager, when it ends or looks for it | gone with it |
//!
//! PostgreSQL forgets an origin's position at once, even if the transaction rolls back. So no
//! origin is dropped before the transaction has committed that makes it superfluous: otherwise a
//! subscription that still exists would start again from the beginning. `DROP DATABASE` has removed
//! the files by then.
//!
//! Not for: origins of a subscription that was dropped. The next one from the same node uses them.

use std::cell::Cell;
use std::ffi::CString;
use std::time::{Duration, Instant};

use braid_bgworker::origin_name::{is_left_behind, is_of_database};
use braid_postgres::catalog::{Rights, query, with_rights};
use braid_postgres::error::{self, PgError};
use braid_postgres::{encoding, latch, plain, process, subtransaction};
use pgrx::pg_sys;

use crate::crash;
use crate::subscription::{execute, rows};

/// How long the processes that use an origin are waited for.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause before an origin that is in use is tried again.
const PAUSE: Duration = Duration::from_millis(100);

thread_local! {
    /// The database that the current statement drops; 0: none.
    static DROPPED: Cell<u32> = const { Cell::new(0) };
}

/// A statement begins that drops a database, if it succeeds.
pub(crate) fn statement_begins() {
    // An earlier one may have failed.
    DROPPED.set(0);
}

/// Notes that a statement is about to drop a database.
pub(crate) fn database_dropped(database: pg_sys::Oid) {
    DROPPED.set(database.to_u32());
}

/// The statement that may have dropped a database has succeeded.
pub(crate) fn after_drop() {
    let database = DROPPED.take();
    if database == 0 {
        return;
    }
    crash::forget_databases(|other| other == database);
    let done = subtransaction::attempt(|| {
        plain::CommandCounterIncrement();
        drop_orphans().map(|left| (left, true))
    });
    // A manager tries again.
    if let Err(failure) = done {
        failure.log("could not drop replication origins of a dropped database");
    }
}

/// The names of all origins, as they are stored.
fn names() -> Vec<String> {
    // Only names that no user's search path can change.
    let found = query("select roname from pg_catalog.pg_replication_origin", &[]);
    found
        .iter()
        .filter_map(|row| row.first()?.clone())
        .collect()
}

/// The OIDs of all databases, those included that take no connections.
fn databases() -> Vec<u32> {
    let found = query("select oid::text from pg_catalog.pg_database", &[]);
    found
        .iter()
        .filter_map(|row| row.first()?.as_ref()?.parse().ok())
        .collect()
}

/// Drops an origin unless a process uses it. Returns whether it is gone.
fn drop_one(name: &str) -> bool {
    let Ok(name) = CString::new(encoding::statement(name).into_bytes()) else {
        return true;
    };
    let dropped = subtransaction::attempt(|| {
        plain::replorigin_drop_by_name(&name, true, true);
        Ok(((), true))
    });
    dropped.is_ok()
}

/// Drops the origins of databases that are gone. Returns how many are in use.
///
/// # Errors
/// Those of SPI.
fn drop_orphans() -> Result<usize, PgError> {
    // The origins first: one whose database is missing from a later list has outlived it. A
    // database that is made in between, with its origins, is in none of the two.
    let names = names().into_iter();
    let databases = databases();
    if databases.is_empty() {
        return Ok(0);
    }
    let left = names.filter(|name| is_left_behind(name, &databases));
    Ok(left.filter(|name| !drop_one(name)).count())
}

/// Drops the origins of databases that are gone, and removes their notes of crashes. To be called
/// by a manager, outside of a transaction.
pub fn sweep() {
    let swept = error::transaction(|| {
        let databases = databases();
        if !databases.is_empty() {
            crash::forget_databases(|database| !databases.contains(&database));
        }
        drop_orphans()
    });
    if let Err(failure) = swept {
        failure.log("could not drop replication origins of dropped databases");
    }
}

/// Drops this database's origins if it is no node and has no subscription and no source. Rows of
/// `braid.origin` stay. To be called by the manager, outside of a transaction.
pub fn drop_of_no_node() {
    let dropped = error::transaction(|| {
        // A process that needs an origin waits, and then finds that it is gone.
        execute("lock table braid.origin in share row exclusive mode", &[])?;
        let found = rows(
            "select 'braid/' || o.node_name || '/' || d.oid || lpad(o.number::text, greatest(4, length(o.number::text)), '0') \
               from braid.origin o, pg_catalog.pg_database d \
              where d.datname = current_database() and braid.is_own_origin(o.origin_id, o.node_name, o.number) \
                and not exists (select from braid.node where is_local) and not exists (select from braid.subscription) \
                and not exists (select from braid.ingest_source)",
            &[],
        )?;
        let names = found.into_iter().filter_map(|row| row.into_iter().next()?);
        Ok(names.filter(|name| !drop_one(name)).count())
    });
    if let Err(failure) = dropped {
        failure.log("could not drop replication origins of a node that was taken down");
    }
}

/// Drops this database's origins if it does not have the extension, and removes its notes of
/// crashes. Waits a while for processes that use them. To be called by the manager, outside of a
/// transaction.
pub fn drop_without_extension() {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = error::transaction(|| {
            let database = process::my_database();
            // One statement: an origin that an extension created again has made is not seen without
            // this extension.
            let found = query(
                "select roname from pg_catalog.pg_replication_origin \
                 where not exists (select from pg_catalog.pg_extension where extname = 'braid')",
                &[],
            );
            let names = found.iter().filter_map(|row| row.first()?.clone());
            let own = names.filter(|name| is_of_database(name, database));
            Ok(own.filter(|name| !drop_one(name)).count())
        });
        match left {
            Ok(0) => break,
            Ok(_) if Instant::now() < deadline => {
                latch::wait(Some(PAUSE));
            }
            Ok(_) => break,
            Err(failure) => {
                failure.log("could not drop replication origins of a dropped extension");
                break;
            }
        }
    }
    crash::forget_others(&[]);
}

/// The node that an origin stood for that was dropped, as long as this database knows it. In a
/// transaction.
#[must_use]
pub fn node_of_dropped(origin: u16) -> Option<String> {
    let number = origin.to_string();
    let found = with_rights(Rights::ExtensionOwner, || {
        query(
            "select node_name from braid.origin where origin_id = $1::oid",
            &[Some(&number)],
        )
    });
    found.get(0, 0).map(str::to_owned)
}
