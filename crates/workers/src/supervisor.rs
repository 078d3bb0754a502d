//! The supervisor process: one for the server, started by `shared_preload_libraries`. It sees to it
//! that each database that has the extension has a manager. It is connected to no database.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::sqlstate::SqlState;
use braid_node::registry;
use braid_node::settings::timers;
use braid_postgres::error::{self, PgError};
use braid_postgres::{latch, process, server, worker};
use pgrx::pg_sys;

/// A manager that ended is not started again sooner.
const PAUSE: Duration = Duration::from_secs(1);
/// A manager that has not found out by then whether its database has the extension holds up no
/// other: it may wait for a lock.
const PROBE_LIMIT: Duration = Duration::from_secs(5);

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
    worker::connect_to_no_database();
    registry::register_supervisor();
    let mut managers: HashMap<u32, Manager> = HashMap::new();
    // Databases whose manager has ended by itself: they do not have the extension.
    let mut without: HashSet<u32> = HashSet::new();
    loop {
        worker::reload_settings();
        let wait = match error::catch(server::databases) {
            Ok(databases) => tend(&databases, &mut managers, &mut without),
            Err(failure) => {
                error::abort();
                failure.log("braid supervisor");
                PAUSE
            }
        };
        latch::wait(Some(wait));
    }
}

/// Start managers that are missing. Returns how long to wait.
///
/// Only a process that is connected to a database can find out whether it has the extension, so
/// each database gets a manager. They are started one after the other: all of a server's databases
/// at once would take the worker processes that others need. If a session has asked for a manager,
/// there is no wait.
fn tend(
    databases: &[u32],
    managers: &mut HashMap<u32, Manager>,
    without: &mut HashSet<u32>,
) -> Duration {
    let mut wait = timers::supervisor();
    without.retain(|database| databases.contains(database));
    let mut is_probing = managers.iter().any(is_finding_out);
    for database in databases {
        let poked = registry::find_manager(*database)
            .is_some_and(|entry| entry.poked.swap(0, Ordering::SeqCst) != 0);
        let keep_poked = || {
            if poked && let Some(entry) = registry::find_manager(*database) {
                entry.poked.store(1, Ordering::SeqCst);
            }
        };
        if let Some(manager) = managers.get(database) {
            if manager.handle.status() != worker::Status::Ended {
                // A manager without a process id is still finding out. If it has found no
                // extension, it ends without seeing the request: the request is kept for then.
                if poked && let Some(entry) = registry::find_manager(*database) {
                    if entry.pid.load(Ordering::SeqCst) > 0 {
                        process::set_latch(entry.latch.load(Ordering::Acquire));
                    } else {
                        keep_poked();
                    }
                }
                continue;
            }
            let left = registry::find_manager(*database)
                .is_some_and(|entry| entry.pid.load(Ordering::SeqCst) == NO_EXTENSION);
            if !left && manager.started.elapsed() < PAUSE {
                keep_poked();
                wait = wait.min(PAUSE);
                continue;
            }
            managers.remove(database);
            if left {
                without.insert(*database);
                keep_poked();
                registry::release_manager(*database);
            }
        }
        if let Some(entry) = registry::find_manager(*database)
            && entry.pid.load(Ordering::SeqCst) > 0
        {
            // Of a supervisor before this one; nobody says when it ends.
            if poked {
                process::set_latch(entry.latch.load(Ordering::Acquire));
            }
            wait = wait.min(PAUSE);
            continue;
        }
        if (is_probing || without.contains(database)) && !poked {
            continue;
        }
        without.remove(database);
        let Some(entry) = registry::manager(*database) else {
            PgError::new(
                SqlState::ConfigurationLimitExceeded,
                format!(
                    "more than {} databases of this server have the extension",
                    registry::MAX_DATABASES
                ),
            )
            .with_hint("Drop it where it is not used.")
            .log("braid supervisor");
            break;
        };
        entry.pid.store(0, Ordering::SeqCst);
        match start(*database) {
            Some(handle) => {
                is_probing = true;
                managers.insert(
                    *database,
                    Manager {
                        handle,
                        started: Instant::now(),
                    },
                );
            }
            None => {
                keep_poked();
                PgError::new(
                    SqlState::ConfigurationLimitExceeded,
                    "no background worker is free for a manager",
                )
                .with_hint("Increase max_worker_processes and restart the server.")
                .log("braid supervisor");
                wait = wait.min(Duration::from_secs(10));
                break;
            }
        }
    }
    // One whose database can't be connected to any more may still run: it is not to be given a
    // second.
    managers.retain(|database, manager| {
        databases.contains(database) || manager.handle.status() != worker::Status::Ended
    });
    registry::release_databases(databases);
    if is_probing {
        wait = wait.min(PROBE_LIMIT);
    }
    wait
}

/// A manager sets its process id once it has found the extension.
fn is_finding_out((database, manager): (&u32, &Manager)) -> bool {
    manager.started.elapsed() < PROBE_LIMIT
        && manager.handle.status() != worker::Status::Ended
        && registry::find_manager(*database)
            .is_none_or(|entry| entry.pid.load(Ordering::SeqCst) == 0)
}

fn start(database: u32) -> Option<worker::Handle> {
    worker::start(&worker::Worker {
        name: &format!("braid manager of database {database}"),
        kind: "braid manager",
        function: "braid_manager_main",
        argument: database,
        extra: worker::Extra::pack(&[]),
    })
}

/// The process id that a manager leaves when it ends because its database lacks the extension.
pub const NO_EXTENSION: i32 = -1;
