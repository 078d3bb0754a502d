//! alter_subscription.

use std::ffi::CStr;

use braid_node::{connection_string, secrecy};
use braid_postgres::catalog::{current_role, is_superuser, query, utf8_string};
use braid_postgres::encoding::Text;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::local;
use super::options::{Options, check_on_error, check_two_phase_with, flag, texts};
use super::provider::Provider;
use super::slot::slot_in_use;
use super::subscription::{leave_slot_to_manager, prepared_for};
use super::{required_name, run, table_set, text, wake_manager};

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
) {
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        let options = Options {
            publications: texts(publications, "publications")?,
            slot_name: slot_name.map(utf8_string),
            origin: text(origin),
            synchronous_commit: text(synchronous_commit),
            apply_mode: text(apply_mode),
            consolidate,
            commit_order: text(commit_order),
            streaming: text(streaming),
            run_as_owner,
            disable_on_error,
            split_transactions_above,
            on_error: text(on_error),
            on_missing_column: text(on_missing_column),
        };
        alter(&name, text(dsn).as_deref(), &options, two_phase, caller)
    });
}

/// That no transaction is committed in part: the rest would come otherwise. The subscription's row is locked, so none will be until the
/// caller's transaction ends.
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

/// That what is to become of an error is said once, by what changes and what stays.
fn check_errors(subscription: &local::Subscription, options: &Options) -> Outcome<()> {
    let stays = if subscription.parks { "park" } else { "stop" };
    let any = options
        .disable_on_error
        .unwrap_or(subscription.disable_on_error);
    check_on_error(options.on_error.as_deref().or(Some(stays)), Some(any))
}

/// That it stays whether transactions are prepared here: what is prepared at this moment would come neither way, or both.
fn check_two_phase(
    subscription: &local::Subscription,
    two_phase: Option<bool>,
    options: &Options,
) -> Outcome<()> {
    if subscription.two_phase {
        check_two_phase_with(options)?;
        // Another slot would send it whole, with its locks held here; another origin might not send its end.
        if (options.slot_name.is_some() || options.origin.is_some())
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
    if two_phase.is_none_or(|wanted| wanted == subscription.two_phase) {
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

fn alter(
    name: &str,
    dsn: Option<&str>,
    options: &Options,
    two_phase: Option<bool>,
    caller: pg_sys::Oid,
) -> Outcome<()> {
    options.check()?;
    local::check_node(local::lock_node())?;
    let mut subscription = local::lock_subscription(name)?;
    check_two_phase(&subscription, two_phase, options)?;
    if options.slot_name.is_some() && subscription.enabled {
        return Err(
            Failure::state("cannot change the slot of an enabled subscription")
                .hint(format!("Run braid.disable_subscription('{name}') first.")),
        );
    }
    check_errors(&subscription, options)?;
    if options.publications.is_some() || options.origin.is_some() {
        check_nothing_half_applied(&subscription)?;
    }
    let owner = pg_sys::Oid::from_u32(subscription.owner);
    if (dsn.is_some() || options.run_as_owner.is_some())
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
    // Of a slot that is there and takes the place of one that was still to be created.
    let mut start_lsn = None;
    if dsn.is_some() || options.publications.is_some() || options.slot_name.is_some() {
        // A new connection string is the caller's; the one that is there is the owner's.
        let mut provider = match dsn {
            Some(dsn) => Provider::open(dsn, caller)?,
            None => Provider::open(subscription.dsn()?, owner)?,
        };
        provider.check_is(&subscription)?;
        if let Some(dsn) = dsn {
            provider.record(dsn)?;
        }
        if let Some(slot) = &options.slot_name {
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
        if let Some(publications) = &options.publications {
            provider.check_publications(publications)?;
            subscription.publications.clone_from(publications);
            if let Some(on_missing_column) = &options.on_missing_column {
                subscription.ignores_missing = on_missing_column == "ignore";
            }
            table_set::refresh(&subscription, &mut provider, subscription.copy_data)?;
        }
    }
    let connection = dsn.map(connection_string::store).transpose()?;
    store(
        &subscription.id,
        connection.as_deref(),
        options,
        start_lsn.as_deref(),
    );
    connection_string::forget_unused();
    wake_manager();
    Ok(())
}

/// Write down what is to change of the subscription with this id. `connection`: number of its new connection string. `start_lsn`: where its new slot starts.
fn store(id: &str, connection: Option<&str>, options: &Options, start_lsn: Option<&str>) {
    let publications = options.publications.as_deref().map(local::array_literal);
    query(
        "update braid.subscription set connection_id = coalesce($2::bigint, connection_id), publications = coalesce($3::text[], publications), \
                slot_name = coalesce($4::name, slot_name), origin = coalesce($5, origin), \
                synchronous_commit = coalesce($6, synchronous_commit), run_as_owner = coalesce($7::boolean, run_as_owner), \
                disable_on_error = coalesce($8::boolean, disable_on_error), apply_mode = coalesce($9, apply_mode), \
                phase = case when $10::pg_lsn is null then phase when copy_data then 'copy' else 'stream' end, \
                consolidate = coalesce($11::boolean, consolidate), commit_order = coalesce($12, commit_order), \
                streaming = coalesce($13, streaming), \
                split_transactions_above = nullif(coalesce($14::integer, split_transactions_above), 0), \
                on_error = coalesce($15, on_error), on_missing_column = coalesce($16, on_missing_column), \
                create_slot = create_slot and $10::pg_lsn is null, start_lsn = coalesce($10::pg_lsn, start_lsn) \
          where subscription_id = $1::integer",
        &[
            Some(id),
            connection,
            publications.as_deref(),
            options.slot_name.as_deref(),
            options.origin.as_deref(),
            options.synchronous_commit.as_deref(),
            options.run_as_owner.map(flag),
            options.disable_on_error.map(flag),
            options.apply_mode.as_deref(),
            start_lsn,
            options.consolidate.map(flag),
            options.commit_order.as_deref(),
            options.streaming.as_deref(),
            options
                .split_transactions_above
                .map(|most| most.to_string())
                .as_deref(),
            options.on_error.as_deref(),
            options.on_missing_column.as_deref(),
        ],
    );
}
