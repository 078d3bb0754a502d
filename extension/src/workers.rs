//! Main functions of the background workers, by the names under which they are registered.

use pgrx::pg_sys;

/// One for the server; started by `shared_preload_libraries`.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_supervisor_main(argument: pg_sys::Datum) {
    braid_workers::supervisor::main(argument);
}

/// One for each database that has the extension; started by the supervisor.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_manager_main(argument: pg_sys::Datum) {
    braid_workers::manager::main(argument);
}

/// One for each subscription that runs; started by the manager.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_leader_main(argument: pg_sys::Datum) {
    braid_workers::leader::main(argument);
}

/// `braid.appliers_per_subscription` for each leader; started by it.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_applier_main(argument: pg_sys::Datum) {
    braid_workers::applier::main(argument);
}

/// Started by the manager if rows have got values on this node that the other nodes have not
/// received yet.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_values_main(argument: pg_sys::Datum) {
    braid_workers::own_values::main(argument);
}

/// Started by the manager when slots of dropped subscriptions are left at providers.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_cleanup_main(argument: pg_sys::Datum) {
    braid_workers::cleanup::main(argument);
}

/// One for each database to which several nodes send changes; started by the manager.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_collector_main(argument: pg_sys::Datum) {
    braid_workers::collector::main(argument);
}

/// One for each table that is copied; started by the leader.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_copy_main(argument: pg_sys::Datum) {
    braid_workers::copy::worker_main(argument);
}

/// One for each stream that asks for values which are not in WAL; started by the process that
/// decodes.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_fetch_main(argument: pg_sys::Datum) {
    braid_plugin::fetch_worker_main(argument);
}

/// Started by the manager every `braid.orphan_check_interval` where there are rules for foreign
/// keys.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_orphans_main(argument: pg_sys::Datum) {
    braid_workers::orphan::main(argument);
}

/// Started by the manager when a statement is due that this node runs by itself.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_intent_main(argument: pg_sys::Datum) {
    braid_workers::intent::main(argument);
}

/// One for each database that is a member of a group; started by the manager.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_group_main(argument: pg_sys::Datum) {
    braid_workers::group::main(argument);
}

/// Started by the manager while a node is not in line with its group.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_group_steps_main(argument: pg_sys::Datum) {
    braid_workers::group::steps::main(argument);
}

/// One for each database that has versioned tables; started by the manager.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_versions_main(argument: pg_sys::Datum) {
    braid_workers::versions::main(argument);
}

/// One for each database that is a member of a group; started by the manager.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub extern "C-unwind" fn braid_sequences_main(argument: pg_sys::Datum) {
    braid_workers::group::sequences::main(argument);
}
