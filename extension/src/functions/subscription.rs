//! Enabling, disabling, renaming and dropping subscriptions, and skipping transactions that cannot
//! be applied. Changes take effect at commit.

use std::cell::RefCell;
use std::ffi::CStr;
use std::time::{Duration, Instant};

use braid_gir::{lsn_text, parse_lsn};
use braid_node::{connection_string, crash, owners, wake};
use braid_postgres::catalog::{current_role, is_superuser, query};
use braid_postgres::{libpq, transaction};
use braid_workers::away;
use pgrx::{pg_extern, pg_sys};

use super::failure::{Failure, Outcome, notice};
use super::local;
use super::node::check_name;
use super::provider;
use super::{required, required_name, run, server, wake_manager};

/// braid.enable_subscription(subscription_name name, after_away boolean)
#[pg_extern(sql = false)]
fn enable_subscription(subscription_name: Option<&CStr>, after_away: Option<bool>) {
    run(|| {
        local::require_node()?;
        server::check_for_subscription()?;
        let subscription =
            local::lock_subscription(&required_name(subscription_name, "subscription_name")?)?;
        super::group::check_no_former_member(&subscription)?;
        let given_up = query(
            "select provider_name from braid.subscription where subscription_id = $1::integer and given_up_at is not null",
            &[Some(&subscription.id)],
        );
        if let (Some(provider), false) = (given_up.get(0, 0), after_away.unwrap_or(false)) {
            return Err(Failure::state(format!(
                "provider \"{provider}\" of subscription \"{}\" was away for longer than braid.peer_away_limit",
                subscription.name
            ))
            .detail("What was deleted here is no longer remembered for its sake: changes that it made meanwhile can bring deleted rows back.")
            .hint(away::HINT));
        }
        query(
            "update braid.subscription set enabled = true, error_sqlstate = null, error_message = null, \
                    error_detail = null, error_hint = null, error_context = null, error_lsn = null, error_at = null, error_attempts = 0, error_retry_at = null, \
                    connected_at = case when given_up_at is null then connected_at else now() end, given_up_at = null \
              where subscription_id = $1::integer",
            &[Some(&subscription.id)],
        );
        forget_crashes(&subscription);
        wake_manager();
        Ok(())
    });
}

/// Begins the count of crashes anew.
fn forget_crashes(subscription: &local::Subscription) {
    if let Ok(id) = subscription.id.parse() {
        crash::forget(id);
    }
}

/// braid.disable_subscription(subscription_name name)
#[pg_extern(sql = false)]
fn disable_subscription(subscription_name: Option<&CStr>) {
    run(|| {
        let subscription =
            local::lock_subscription(&required_name(subscription_name, "subscription_name")?)?;
        query(
            "update braid.subscription set enabled = false where subscription_id = $1::integer",
            &[Some(&subscription.id)],
        );
        wake_manager();
        Ok(())
    });
}

/// braid.rename_subscription(subscription_name name, new_name name)
#[pg_extern(sql = false)]
fn rename_subscription(subscription_name: Option<&CStr>, new_name: Option<&CStr>) {
    run(|| {
        let new_name = required_name(new_name, "new_name")?;
        check_name(&new_name, "subscription")?;
        // One at a time with those that create or rename a subscription: so the name that they take
        // is seen.
        local::check_node(local::lock_node())?;
        let subscription =
            local::lock_subscription(&required_name(subscription_name, "subscription_name")?)?;
        let taken = query(
            "select 1 from braid.subscription where subscription_name = $1::name",
            &[Some(&new_name)],
        );
        if !taken.is_empty() {
            return Err(
                Failure::duplicate(format!("subscription \"{new_name}\" already exists"))
                    .hint("Choose another name."),
            );
        }
        query(
            "update braid.subscription set subscription_name = $2::name where subscription_id = $1::integer",
            &[Some(&subscription.id), Some(&new_name)],
        );
        query(
            "update braid.parked_transaction set subscription_name = $2::name where subscription_id = $1::integer",
            &[Some(&subscription.id), Some(&new_name)],
        );
        wake_manager();
        Ok(())
    });
}

/// braid.set_rate_limit(subscription_name name, rows_per_second bigint, bytes_per_second bigint)
#[pg_extern(sql = false)]
fn set_rate_limit(
    subscription_name: Option<&CStr>,
    rows_per_second: Option<i64>,
    bytes_per_second: Option<i64>,
) {
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        let limit = |argument: &str, value: Option<i64>| match value {
            Some(..0) => Err(
                Failure::parameter(format!("{argument} must not be negative"))
                    .hint("Use null or 0 for no limit."),
            ),
            limit => Ok(limit.filter(|limit| *limit > 0)),
        };
        let rows = limit("rows_per_second", rows_per_second)?;
        let bytes = limit("bytes_per_second", bytes_per_second)?;
        local::require_node()?;
        let subscription = local::lock_subscription(&name)?;
        query(
            "update braid.subscription set rows_per_second = $2::bigint, bytes_per_second = $3::bigint \
              where subscription_id = $1::integer",
            &[
                Some(&subscription.id),
                rows.map(|rows| rows.to_string()).as_deref(),
                bytes.map(|bytes| bytes.to_string()).as_deref(),
            ],
        );
        let number = |limit: Option<i64>| limit.unwrap_or(0).unsigned_abs();
        wake_manager();
        if let Ok(id) = subscription.id.parse() {
            wake::limit_at_commit(id, number(rows), number(bytes));
        }
        Ok(())
    });
}

/// Has PostgreSQL refuse to drop the roles that own subscriptions, and no others.
pub fn tie_owners() -> Outcome<()> {
    owners::tie().map_err(|error| Failure::state(error.message))
}

/// braid.set_subscription_owner(subscription_name name, new_owner name)
#[pg_extern(sql = false)]
fn set_subscription_owner(subscription_name: Option<&CStr>, new_owner: Option<&CStr>) {
    let caller = current_role();
    run(|| {
        local::require_node()?;
        let subscription =
            local::lock_subscription(&required_name(subscription_name, "subscription_name")?)?;
        set_owner(
            &subscription,
            &required_name(new_owner, "new_owner")?,
            caller,
        )
    });
}

fn set_owner(subscription: &local::Subscription, role: &str, caller: pg_sys::Oid) -> Outcome<()> {
    let name = &subscription.name;
    let found = query(
        "select r.oid, pg_has_role($2::oid, r.oid, 'MEMBER') from pg_roles r where r.rolname = $1::name",
        &[Some(role), Some(&caller.to_u32().to_string())],
    );
    let Some(owner) = found.get(0, 0).and_then(|oid| oid.parse::<u32>().ok()) else {
        return Err(
            Failure::undefined(format!("role \"{role}\" does not exist"))
                .hint("Create the role, or name another one."),
        );
    };
    let refused = |detail: &str| {
        Err(Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("permission denied to change the owner of subscription \"{name}\""),
        )
        .detail(detail)
        .hint("Ask a superuser."))
    };
    if !is_superuser(caller) {
        // An owner that is gone may have been one.
        if !owners::exists(subscription.owner)
            || is_superuser(pg_sys::Oid::from_u32(subscription.owner))
        {
            return refused("Its owner is a superuser, or does not exist any more.");
        }
        if found.get(0, 1) != Some("t") {
            return refused("Only a member of a role can make it the owner.");
        }
    }
    let new = pg_sys::Oid::from_u32(owner);
    if !is_superuser(new) {
        // Connections of such an owner have to use a password.
        provider::connect(subscription.dsn()?, new)?;
    }
    query(
        "update braid.subscription set subscription_owner = $2::oid where subscription_id = $1::integer",
        &[Some(&subscription.id), Some(&owner.to_string())],
    );
    tie_owners()?;
    wake_manager();
    Ok(())
}

/// braid.forget_slot(slot_name name, provider name)
#[pg_extern(sql = false)]
fn forget_slot(slot_name: Option<&CStr>, provider: Option<&CStr>) {
    run(|| {
        let slot = required_name(slot_name, "slot_name")?;
        let provider = required_name(provider, "provider")?;
        let forgotten = query(
            "delete from braid.slot_cleanup where slot_name = $1::name and provider_name = $2::name returning 1",
            &[Some(&slot), Some(&provider)],
        );
        connection_string::forget_unused();
        if forgotten.is_empty() {
            return Err(Failure::undefined(format!(
                "replication slot \"{slot}\" at node \"{provider}\" is not to be dropped"
            ))
            .hint("The view braid.pending_cleanup lists the slots that are."));
        }
        Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            format!("replication slot \"{slot}\" stays at node \"{provider}\""),
        )
        .hint(format!(
            "If the node comes back, the slot holds back WAL there until you run select pg_drop_replication_slot('{slot}') there."
        ))
        .notice();
        Ok(())
    });
}

/// braid.drop_subscription(subscription_name name, drop_slot boolean)
#[pg_extern(sql = false)]
fn drop_subscription(subscription_name: Option<&CStr>, drop_slot: Option<bool>) {
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        drop(&name, required(drop_slot, "drop_slot")?)
    });
}

fn drop(name: &str, drop_slot: bool) -> Outcome<()> {
    let node = local::find_node();
    let subscription = local::lock_subscription(name)?;
    super::parked::check_none_left(&subscription)?;
    super::group::check_not_needed(&subscription)?;
    let slot = &subscription.options.slot_name;
    if !node.is_some_and(|node| node.identity_valid) {
        notice(format!(
            "replication slot \"{slot}\" belongs to the node that this database is a copy of and stays at node \"{}\"",
            subscription.provider_name
        ));
    } else if drop_slot {
        // A slot that no worker has tried to create does not exist, or belongs to somebody else.
        if subscription.has_slot {
            leave_slot_to_manager(&subscription);
        }
    } else {
        notice(format!(
            "replication slot \"{slot}\" stays at node \"{}\"",
            subscription.provider_name
        ));
    }
    warn_of_prepared(&subscription);
    for table in ["missing_column", "subscription"] {
        query(
            &format!("delete from braid.{table} where subscription_id = $1::integer"),
            &[Some(&subscription.id)],
        );
    }
    connection_string::forget_unused();
    tie_owners()?;
    wake_manager();
    Ok(())
}

/// Transactions that are prepared on this node for a subscription, by name.
pub fn prepared_for(subscription: &local::Subscription) -> Vec<String> {
    let id = subscription.id.parse().unwrap_or(0);
    local::column(&query(
        "select gid from pg_prepared_xacts where database = current_database() and starts_with(gid, $1) order by gid",
        &[Some(&braid_node::prepared::prefix(id))],
    ))
}

/// Prepared transactions stay prepared, as their outcome is not known.
fn warn_of_prepared(subscription: &local::Subscription) {
    let gids = prepared_for(subscription);
    if gids.is_empty() {
        return;
    }
    Failure::new(
        pgrx::PgSqlErrorCode::ERRCODE_WARNING,
        format!(
            "transactions that subscription \"{}\" has prepared stay prepared and keep their locks",
            subscription.name
        ),
    )
    .detail(format!("Their names are {}.", gids.join(", ")))
    .hint(
        "Run COMMIT PREPARED or ROLLBACK PREPARED for each, as it ends at the provider. The number at the end of a name is the \
         transaction's id there.",
    )
    .warn();
}

/// Note the slot down for the manager, which drops it after commit.
pub fn leave_slot_to_manager(subscription: &local::Subscription) {
    let (slot, provider) = (&subscription.options.slot_name, &subscription.provider_name);
    query(
        "insert into braid.slot_cleanup (slot_name, connection_id, provider_name, provider_id) \
         select $1::name, s.connection_id, $3::name, s.provider_id from braid.subscription s where s.subscription_id = $2::integer \
         on conflict (slot_name, provider_name) do update set connection_id = excluded.connection_id, provider_id = excluded.provider_id, attempts = 0, last_error = null",
        &[Some(slot), Some(&subscription.id), Some(provider)],
    );
    // The role that drops the subscription need not be the one that created it: the connection is
    // the owner's.
    let owner = pg_sys::Oid::from_u32(subscription.owner);
    let connected = subscription.dsn().and_then(|dsn| reach(dsn, owner));
    if let Err(failure) = connected {
        failure
            .into_warning(format!("could not reach node \"{provider}\" to drop replication slot \"{slot}\""))
            .hint(format!(
                "It will be dropped once the node can be reached; until then it holds back WAL there. To drop it by hand, run \
                 select pg_drop_replication_slot('{slot}') there."
            ))
            .warn();
    }
}

/// A server that takes so long to refuse a connection is silent.
const SILENCE: Duration = Duration::from_secs(1);

thread_local! {
    /// Addresses that were silent in the transaction that has begun at this time.
    static SILENT: RefCell<(i64, Vec<String>)> = const { RefCell::new((0, Vec::new())) };
}

/// Finds out whether a provider can be reached. A silent server is asked once in a transaction,
/// however many of its subscriptions are dropped.
fn reach(dsn: &str, owner: pg_sys::Oid) -> Outcome<()> {
    let address: Vec<String> = ["service", "host", "hostaddr", "port"]
        .iter()
        .map(|keyword| libpq::connection_keyword(dsn, keyword).unwrap_or_default())
        .collect();
    let address = address.join(" ");
    let now = transaction::start_time();
    let was_silent = SILENT.with_borrow_mut(|(since, addresses)| {
        if *since != now {
            (*since, *addresses) = (now, Vec::new());
        }
        addresses.contains(&address)
    });
    if was_silent {
        return Err(Failure::new(
            pgrx::PgSqlErrorCode::ERRCODE_CONNECTION_FAILURE,
            "could not connect to the provider",
        )
        .detail("Its server was silent when it was last asked in this transaction."));
    }
    let began = Instant::now();
    let outcome = provider::connect(dsn, owner).map(|_| ());
    if outcome.is_err() && began.elapsed() >= SILENCE {
        SILENT.with_borrow_mut(|(_, addresses)| addresses.push(address));
    }
    outcome
}

/// braid.skip_transaction(subscription_name name, lsn pg_lsn)
#[pg_extern(sql = false)]
fn skip_transaction(subscription_name: Option<&CStr>, lsn: Option<i64>) {
    run(|| {
        local::require_node()?;
        let subscription =
            local::lock_subscription(&required_name(subscription_name, "subscription_name")?)?;
        let position = required(lsn, "lsn")?.cast_unsigned();
        let lsn = lsn_text(position);
        let Some(error_lsn) = subscription.error_lsn.as_deref().and_then(parse_lsn) else {
            return Err(Failure::state(format!(
                "subscription \"{}\" has no transaction that could not be applied",
                subscription.name
            ))
            .hint("Only the transaction that stopped a subscription can be skipped: see last_error and error_lsn in braid.subscription_status."));
        };
        if error_lsn != position {
            return Err(Failure::parameter(format!(
                "subscription \"{}\" did not stop at the transaction that ends at {lsn}",
                subscription.name
            ))
            .hint(format!(
                "The transaction that could not be applied ends at {}.",
                lsn_text(error_lsn)
            )));
        }
        query(
            "update braid.subscription set skip_lsn = $2::pg_lsn, enabled = enabled or disable_on_error, error_sqlstate = null, error_message = null, \
                    error_detail = null, error_hint = null, error_context = null, error_lsn = null, error_at = null, error_attempts = 0, error_retry_at = null \
              where subscription_id = $1::integer",
            &[Some(&subscription.id), Some(&lsn)],
        );
        forget_crashes(&subscription);
        wake_manager();
        Ok(())
    });
}
