//! alter_subscription.

use std::ffi::CStr;

use braid_bgworker::subscription_option::{DESCRIPTIONS, Request, Value};
use braid_node::{connection_string, secrecy, wake};
use braid_postgres::catalog::{current_role, is_superuser, query, utf8_string};
use braid_postgres::encoding::Text;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::local;
use super::options::{
    check_publication_names, check_slot_name, check_together, choice, limit, texts,
};
use super::provider::Provider;
use super::slot::slot_in_use;
use super::subscription::{leave_slot_to_manager, prepared_for};
use super::{required_name, run, table_set, text};

/// braid.alter_subscription(...): null leaves an option as it is.
#[pg_extern(sql = false)]
#[expect(clippy::too_many_arguments, reason = "the SQL function's arguments")]
fn alter_subscription(
    subscription_name: Option<&CStr>,
    dsn: Option<Text>,
    publications: Option<Vec<Option<Text>>>,
    slot_name: Option<&CStr>,
    origin: Option<Text>,
    synchronous_commit: Option<Text>,
    run_as_owner: Option<bool>,
    disable_on_error: Option<bool>,
    apply_mode: Option<Text>,
    consolidate: Option<bool>,
    commit_order: Option<Text>,
    streaming: Option<Text>,
    split_transactions_above: Option<i32>,
    on_error: Option<Text>,
    two_phase: Option<bool>,
    on_missing_column: Option<Text>,
    replicate_ddl: Option<bool>,
) {
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        let request = Request {
            publications: texts(publications, "publications")?,
            copy_data: None,
            enabled: None,
            create_slot: None,
            slot_name: slot_name.map(utf8_string),
            origin: chosen("origin", origin)?,
            synchronous_commit: chosen("synchronous_commit", synchronous_commit)?,
            run_as_owner,
            disable_on_error,
            apply_mode: chosen("apply_mode", apply_mode)?,
            consolidate,
            commit_order: chosen("commit_order", commit_order)?,
            streaming: chosen("streaming", streaming)?,
            two_phase,
            split_transactions_above: limit(split_transactions_above)?,
            on_error: chosen("on_error", on_error)?,
            on_missing_column: chosen("on_missing_column", on_missing_column)?,
            replicate_ddl,
        };
        alter(&name, text(dsn).as_deref(), &request, caller)
    });
}

/// The value of an option, if one is given.
fn chosen<T: Value>(option: &str, given: Option<Text>) -> Outcome<Option<T>> {
    text(given).map(|text| choice(option, &text)).transpose()
}

/// Checks that no transaction is committed in part: its rest would arrive differently. The
/// subscription's row is locked, so none will be until the caller's transaction ends.
fn check_nothing_half_applied(subscription: &local::Subscription) -> Outcome<()> {
    let name = &subscription.name;
    let outstanding = query(
        "select commit_lsn from braid.split_progress where subscription_id = $1::integer",
        &[Some(&subscription.id)],
    );
    let Some(lsn) = outstanding.get(0, 0) else {
        return Ok(());
    };
    Err(Failure::state(format!(
        "cannot change publications or origin of subscription \"{name}\" while a part of a transaction is applied"
    ))
    .detail(format!(
        "The rest of the transaction that commits at {lsn} would come otherwise."
    ))
    .hint(format!(
        "Wait until it is applied. If the subscription has stopped, run braid.enable_subscription('{name}') or braid.skip_transaction."
    )))
}

/// Checks that the option two_phase does not change: transactions that are prepared now would
/// arrive neither way, or both ways.
fn check_two_phase(subscription: &local::Subscription, request: &Request) -> Outcome<()> {
    let is_two_phase = subscription.options.two_phase;
    if is_two_phase {
        // Another slot would send the transaction whole, while its locks are held on this node;
        // another origin might not send its end.
        if (request.slot_name.is_some() || request.origin.is_some())
            && let Some(gid) = prepared_for(subscription).first()
        {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
                format!(
                    "transaction \"{gid}\" of subscription \"{}\" is prepared here",
                    subscription.name
                ),
            )
            .hint("Wait until it is committed or rolled back at the provider."));
        }
    }
    if request
        .two_phase
        .is_none_or(|wanted| wanted == is_two_phase)
    {
        return Ok(());
    }
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!(
            "two_phase of subscription \"{}\" cannot be changed",
            subscription.name
        ),
    )
    .hint("Drop the subscription and create it anew."))
}

fn alter(name: &str, dsn: Option<&str>, request: &Request, caller: pg_sys::Oid) -> Outcome<()> {
    if let Some(publications) = &request.publications {
        check_publication_names(publications)?;
    }
    request
        .slot_name
        .as_deref()
        .map_or(Ok(()), check_slot_name)?;
    local::check_node(local::lock_node())?;
    let mut subscription = local::lock_subscription(name)?;
    // The new options, from the changed and the unchanged ones. Whether transactions are prepared
    // on this node does not change.
    let mut options = subscription.options.clone();
    options.change(request);
    options.two_phase = subscription.options.two_phase;
    check_together(&options)?;
    let changes_rows = request.publications.is_some() || request.origin.is_some();
    if changes_rows || options.parks() || options.split_transactions_above > 0 {
        super::versions::check_none(
            "change publications or origin, park transactions, or commit them in pieces",
        )?;
    }
    check_two_phase(&subscription, request)?;
    if request.slot_name.is_some() && subscription.options.enabled {
        return Err(
            Failure::state("cannot change the slot of an enabled subscription")
                .hint(format!("Run braid.disable_subscription('{name}') first.")),
        );
    }
    if request.publications.is_some() || request.origin.is_some() {
        check_nothing_half_applied(&subscription)?;
    }
    let owner = pg_sys::Oid::from_u32(subscription.owner);
    if (dsn.is_some() || request.run_as_owner.is_some())
        && is_superuser(owner)
        && !is_superuser(caller)
    {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("permission denied to change dsn or run_as_owner of subscription \"{name}\""),
        )
        .detail("Its owner is a superuser, whose rights another connection string could lend to somebody else.")
        .hint("Ask a superuser, or drop the subscription and create one of your own."));
    }
    // The position of an existing slot that replaces one that was still to be created.
    let mut start_lsn = None;
    if dsn.is_some() || request.publications.is_some() || request.slot_name.is_some() {
        // A new connection string is the caller's; the stored one is the owner's.
        let mut provider = match dsn {
            Some(dsn) => Provider::open(dsn, caller)?,
            None => Provider::open(subscription.dsn()?, owner)?,
        };
        provider.check_is(&subscription)?;
        if let Some(dsn) = dsn {
            provider.record(dsn)?;
        }
        if let Some(slot) = &request.slot_name {
            let used = query(
                "select 1 from braid.subscription where provider_name = $1::name and slot_name = $2::name \
                    and subscription_id <> $3::integer",
                &[
                    Some(&subscription.provider_name),
                    Some(slot),
                    Some(&subscription.id),
                ],
            );
            if !used.is_empty() {
                return Err(slot_in_use(slot));
            }
            let slot = provider.require_slot(slot)?;
            if subscription.awaits_slot {
                start_lsn = slot.confirmed_flush_lsn;
                if subscription.has_slot {
                    leave_slot_to_manager(&subscription);
                }
            }
        }
        if let Some(publications) = &request.publications {
            provider.check_publications(publications)?;
            subscription.options = options;
            table_set::refresh(&subscription, &mut provider, subscription.options.copy_data)?;
        }
    }
    let connection = dsn.map(connection_string::store).transpose()?;
    store(
        &subscription.id,
        connection.as_deref(),
        request,
        start_lsn.as_deref(),
    );
    connection_string::forget_unused();
    if let Ok(id) = subscription.id.parse() {
        wake::alter_at_commit(id);
    }
    Ok(())
}

/// Stores the changes of the subscription with this id. `connection`: number of its new connection
/// string. `start_lsn`: where its new slot starts.
fn store(id: &str, connection: Option<&str>, request: &Request, start_lsn: Option<&str>) {
    let mut arguments = vec![Some(id), connection, start_lsn];
    let texts = request.texts();
    let mut assignments = Vec::new();
    for (option, text) in DESCRIPTIONS.iter().zip(&texts) {
        if option.is_alterable {
            arguments.push(text.as_deref());
            assignments.push(option.assignment(arguments.len()));
        }
    }
    query(
        &format!(
            "update braid.subscription set connection_id = coalesce($2::bigint, connection_id), {}, \
                phase = case when $3::pg_lsn is null then phase when copy_data then 'copy' else 'stream' end, \
                create_slot = create_slot and $3::pg_lsn is null, start_lsn = coalesce($3::pg_lsn, start_lsn) \
              where subscription_id = $1::integer",
            assignments.join(", ")
        ),
        &arguments,
    );
}
