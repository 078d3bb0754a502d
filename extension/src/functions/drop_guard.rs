//! The event trigger that keeps the extension from being dropped while subscriptions exist: their
//! slots would stay at the providers and hold back WAL for ever.
//!
//! PostgreSQL calls it before DROP EXTENSION and DROP OWNED, of whatever; all but ours pass at
//! once. DROP SCHEMA braid needs no guard: PostgreSQL refuses it, the schema being the extension's.

use braid_postgres::catalog::query;
use braid_postgres::drop_command::{DropCommand, from_event_trigger};
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::{local, run, wake_manager};

/// braid.guard_drop() returns event_trigger
#[pg_extern(sql = false)]
fn guard_drop(fcinfo: pg_sys::FunctionCallInfo) {
    // SAFETY: PostgreSQL's own call, passed on as it came.
    let command = unsafe { from_event_trigger(fcinfo) };
    run(|| guard(command));
}

fn guard(command: Option<DropCommand>) -> Outcome<()> {
    let drops_extension = match command {
        None => {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_E_R_I_E_EVENT_TRIGGER_PROTOCOL_VIOLATED,
                "braid.guard_drop can only be called as an event trigger",
            )
            .hint("There is no need to call it."));
        }
        Some(DropCommand::Extensions(names)) => names.iter().any(|name| name == "braid"),
        Some(DropCommand::OwnedBy(roles)) => owns_extension(&roles),
        Some(DropCommand::Other) => false,
    };
    if drops_extension {
        check_nothing_left()?;
        // Once it is dropped, the manager has nothing to do in this database and ends.
        wake_manager();
    }
    Ok(())
}

fn owns_extension(roles: &[pg_sys::Oid]) -> bool {
    let rows = query(
        "select extowner::oid from pg_extension where extname = 'braid'",
        &[],
    );
    let owner = rows.get(0, 0).and_then(|oid| oid.parse::<u32>().ok());
    roles.iter().any(|role| Some(role.to_u32()) == owner)
}

fn check_nothing_left() -> Outcome<()> {
    let subscriptions = local::column(&query(
        "select subscription_name from braid.subscription order by 1",
        &[],
    ));
    let is_copy = local::find_node().is_some_and(|node| !node.identity_valid);
    if !subscriptions.is_empty() && !is_copy {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST,
            "cannot drop extension braid because this node still has subscriptions",
        )
        .detail(format!("Subscriptions: {}.", subscriptions.join(", ")))
        .hint("Drop them first, each with braid.drop_subscription(subscription_name), so that their slots at the providers go too."));
    }
    let slots = query(
        "select slot_name, provider_name from braid.slot_cleanup order by 1",
        &[],
    );
    for row in slots.iter() {
        if let [Some(slot), Some(provider)] = row {
            Failure::new(
                PgSqlErrorCode::ERRCODE_WARNING,
                format!("replication slot \"{slot}\" of a dropped subscription is left at node \"{provider}\""),
            )
            .hint(format!("Run select pg_drop_replication_slot('{slot}') there."))
            .warn();
        }
    }
    Ok(())
}
