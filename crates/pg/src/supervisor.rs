//! The supervisor process: one for the server, started by `shared_preload_libraries`. It sees to it that each database that has
//! the extension has a manager. It is connected to no database.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pgrx::pg_sys;

use crate::error::{self, PgError};
use crate::{latch, registry, worker};

/// Databases are looked at again after this, in case nobody said that something changed.
const INTERVAL: Duration = Duration::from_secs(30);
/// A manager that ended is not started again sooner.
const PAUSE: Duration = Duration::from_secs(1);

/// Register the supervisor. Called while the postmaster loads its libraries.
pub fn register() {
    worker::register_static(&worker::Worker {
        name: "braid supervisor",
        kind: "braid supervisor",
        function: "braid_supervisor_main",
        argument: 0,
        extra: worker::Extra::pack(&[]),
    });
}

struct Manager {
    handle: worker::Handle,
    started: Instant,
}

/// The process's main function.
pub fn main(_argument: pg_sys::Datum) {
    worker::initialize();
    // SAFETY: once, at the start; no database: only shared catalogs can be read.
    unsafe {
        pg_sys::BackgroundWorkerInitializeConnection(std::ptr::null(), std::ptr::null(), 0);
    }
    registry::register_supervisor();
    let mut managers: HashMap<u32, Manager> = HashMap::new();
    // Databases whose manager has ended by itself: they do not have the extension.
    let mut without: HashSet<u32> = HashSet::new();
    loop {
        worker::reload_settings();
        let wait = match error::catch(databases) {
            Ok(Ok(databases)) => tend(&databases, &mut managers, &mut without),
            Ok(Err(failure)) | Err(failure) => {
                error::abort();
                failure.log("braid supervisor");
                PAUSE
            }
        };
        latch::wait(Some(wait));
    }
}

/// Start managers that are missing. Returns how long to wait.
fn tend(
    databases: &[u32],
    managers: &mut HashMap<u32, Manager>,
    without: &mut HashSet<u32>,
) -> Duration {
    let mut wait = INTERVAL;
    without.retain(|database| databases.contains(database));
    for database in databases {
        let poked = registry::manager(*database)
            .is_some_and(|entry| entry.poked.swap(0, Ordering::SeqCst) != 0);
        if let Some(manager) = managers.get(database) {
            if manager.handle.status() != worker::Status::Ended {
                if poked {
                    // Somebody asked while it was about to end, or before it listened.
                    if let Some(entry) = registry::manager(*database) {
                        registry::set_latch(entry.latch.load(Ordering::Acquire));
                    }
                }
                continue;
            }
            if manager.started.elapsed() < PAUSE {
                if poked && let Some(entry) = registry::manager(*database) {
                    entry.poked.store(1, Ordering::SeqCst);
                }
                wait = wait.min(PAUSE);
                continue;
            }
            managers.remove(database);
            let left = registry::manager(*database)
                .is_some_and(|entry| entry.pid.load(Ordering::SeqCst) == NO_EXTENSION);
            if left {
                without.insert(*database);
            }
        }
        if without.contains(database) && !poked {
            continue;
        }
        without.remove(database);
        let started = worker::start(&worker::Worker {
            name: &format!("braid manager of database {database}"),
            kind: "braid manager",
            function: "braid_manager_main",
            argument: *database,
            extra: worker::Extra::pack(&[]),
        });
        match started {
            Some(handle) => {
                managers.insert(
                    *database,
                    Manager {
                        handle,
                        started: Instant::now(),
                    },
                );
            }
            None => {
                PgError::new("53400", "no background worker is free for a manager")
                    .with_hint("Increase max_worker_processes and restart the server.")
                    .log("braid supervisor");
                wait = wait.min(Duration::from_secs(10));
            }
        }
    }
    managers.retain(|database, _| databases.contains(database));
    registry::release_managers(databases);
    wait
}

/// What a manager leaves as its process id when it ends because its database lacks the extension.
pub const NO_EXTENSION: i32 = -1;

/// OIDs of the databases that can be connected to.
fn databases() -> Result<Vec<u32>, PgError> {
    let mut found = Vec::new();
    // SAFETY: a scan of pg_database as the autovacuum launcher does it (src/backend/postmaster/autovacuum.c, 15 to 18), in a
    // transaction of its own; each tuple is read before the next is fetched.
    unsafe {
        pg_sys::StartTransactionCommand();
        let _ = pg_sys::GetTransactionSnapshot();
        let lock = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
        let relation = pg_sys::table_open(pg_sys::DatabaseRelationId, lock);
        let scan = pg_sys::table_beginscan_catalog(relation, 0, std::ptr::null_mut());
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_database>();
            if (*form).datallowconn && (*form).datconnlimit != -2 {
                found.push((*form).oid.to_u32());
            }
        }
        pg_sys::heap_endscan(scan);
        pg_sys::table_close(relation, lock);
        pg_sys::CommitTransactionCommand();
    }
    Ok(found)
}
