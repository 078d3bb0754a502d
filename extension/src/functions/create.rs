//! create_subscription.

use std::ffi::CStr;

use braid_node::{connection_string, secrecy};
use braid_postgres::catalog::{current_role, query, utf8_string};
use braid_postgres::encoding::Text;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::local;
use super::node::check_name;
use super::options::{Options, check_on_error, check_two_phase_with, flag, texts};
use super::provider::Provider;
use super::slot::{ChosenSlot, choose_slot};
use super::subscription::tie_owners;
use super::{required, required_name, run, server, table_set, text, wake_manager};

/// What create_subscription is asked for.
struct Request {
    name: String,
    dsn: String,
    options: Options,
    copy_data: bool,
    enabled: bool,
    create_slot: bool,
    two_phase: bool,
}

/// braid.create_subscription(...): see the install script for the names and defaults.
#[pg_extern(sql = false)]
#[expect(clippy::too_many_arguments, reason = "the SQL function's arguments")]
fn create_subscription(
    subscription_name: Option<&CStr>,
    dsn: Option<Text>,
    publications: Option<Vec<Option<Text>>>,
    copy_data: Option<bool>,
    enabled: Option<bool>,
    create_slot: Option<bool>,
    slot_name: Option<&CStr>,
    origin: Option<Text>,
    synchronous_commit: Option<Text>,
    run_as_owner: Option<bool>,
    disable_on_error: Option<bool>,
    apply_mode: Option<Text>,
    consolidate: Option<bool>,
    commit_order: Option<Text>,
    streaming: Option<Text>,
    two_phase: Option<bool>,
    split_transactions_above: Option<i32>,
    on_error: Option<Text>,
    on_missing_column: Option<Text>,
) -> i32 {
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        let request = Request {
            name: required_name(subscription_name, "subscription_name")?,
            dsn: required(text(dsn), "dsn")?,
            options: Options {
                publications: Some(required(
                    texts(publications, "publications")?,
                    "publications",
                )?),
                slot_name: slot_name.map(utf8_string),
                origin: Some(required(text(origin), "origin")?),
                synchronous_commit: Some(required(text(synchronous_commit), "synchronous_commit")?),
                apply_mode: Some(required(text(apply_mode), "apply_mode")?),
                consolidate: Some(required(consolidate, "consolidate")?),
                commit_order: Some(required(text(commit_order), "commit_order")?),
                streaming: Some(required(text(streaming), "streaming")?),
                run_as_owner: Some(required(run_as_owner, "run_as_owner")?),
                disable_on_error: Some(required(disable_on_error, "disable_on_error")?),
                split_transactions_above,
                on_error: Some(required(text(on_error), "on_error")?),
                on_missing_column: Some(required(text(on_missing_column), "on_missing_column")?),
            },
            copy_data: required(copy_data, "copy_data")?,
            enabled: required(enabled, "enabled")?,
            create_slot: required(create_slot, "create_slot")?,
            two_phase: required(two_phase, "two_phase")?,
        };
        let id = create(&request, caller)?;
        id.parse()
            .map_err(|_| Failure::state("the subscription was not stored").hint("Try again."))
    })
}

fn create(request: &Request, caller: pg_sys::Oid) -> Outcome<String> {
    let name = &request.name;
    check_name(name, "subscription")?;
    request.options.check()?;
    check_on_error(
        request.options.on_error.as_deref(),
        request.options.disable_on_error,
    )?;
    if request.two_phase {
        check_two_phase_with(&request.options)?;
    }
    server::check_for_subscription()?;
    if request.two_phase {
        server::check_for_two_phase()?;
    }
    let node = local::check_node(local::lock_node())?;
    let taken = query(
        "select 1 from braid.subscription where subscription_name = $1::name",
        &[Some(name)],
    );
    if !taken.is_empty() {
        return Err(
            Failure::duplicate(format!("subscription \"{name}\" already exists"))
                .hint("Choose another name, or change that one with braid.alter_subscription."),
        );
    }
    let publications = request.options.publications.as_deref().unwrap_or_default();
    let mut provider = Provider::open(&request.dsn, caller)?;
    provider.check_identity(&node)?;
    provider.check_server(request.create_slot)?;
    provider.check_publications(publications)?;
    let slot = choose_slot(
        name,
        request.options.slot_name.as_deref(),
        request.create_slot,
        &node,
        &mut provider,
    )?;
    let tables = provider.published_tables(publications, request.copy_data)?;
    let ignores = request.options.on_missing_column.as_deref() == Some("ignore");
    let targets = table_set::find_targets(&tables, request.copy_data, ignores)?;
    server::check_room(request.enabled.then(|| server::Workers {
        apply_mode: request.options.apply_mode.as_deref().unwrap_or_default(),
        copy_data: request.copy_data,
    }))?;
    if targets.is_empty() {
        Failure::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            "the publications have no tables yet",
        )
        .hint("Once they have, run braid.refresh_subscription.")
        .warn();
    }
    provider.record(&request.dsn)?;
    let connection = connection_string::store(&request.dsn)?;
    let id = insert(request, &connection, &provider, &slot, caller);
    connection_string::forget_unused();
    tie_owners()?;
    for target in &targets {
        table_set::add(&id, target, request.copy_data);
    }
    wake_manager();
    Ok(id)
}

fn insert(
    request: &Request,
    connection: &str,
    provider: &Provider,
    slot: &ChosenSlot,
    caller: pg_sys::Oid,
) -> String {
    let options = &request.options;
    let phase = match (request.create_slot, request.copy_data) {
        (true, _) => "slot",
        (false, true) => "copy",
        (false, false) => "stream",
    };
    let owner = caller.to_u32().to_string();
    let publications = local::array_literal(options.publications.as_deref().unwrap_or_default());
    let rows = query(
        "insert into braid.subscription (subscription_name, subscription_owner, connection_id, provider_name, provider_id, \
             publications, origin, slot_name, create_slot, copy_data, enabled, synchronous_commit, run_as_owner, \
             disable_on_error, apply_mode, phase, start_lsn, consolidate, commit_order, streaming, split_transactions_above, on_error, two_phase, on_missing_column) \
         values ($1::name, $2::oid, $3::bigint, $4::name, $5::uuid, $6::text[], $7, $8::name, $9::boolean, $10::boolean, $11::boolean, \
             $12, $13::boolean, $14::boolean, $15, $16, $17::pg_lsn, $18::boolean, $19, $20, nullif($21::integer, 0), $22, $23::boolean, $24) returning subscription_id",
        &[
            Some(&request.name),
            Some(&owner),
            Some(connection),
            Some(&provider.name),
            Some(&provider.id),
            Some(&publications),
            options.origin.as_deref(),
            Some(&slot.name),
            Some(flag(request.create_slot)),
            Some(flag(request.copy_data)),
            Some(flag(request.enabled)),
            options.synchronous_commit.as_deref(),
            options.run_as_owner.map(flag),
            options.disable_on_error.map(flag),
            options.apply_mode.as_deref(),
            Some(phase),
            slot.start_lsn.as_deref(),
            options.consolidate.map(flag),
            options.commit_order.as_deref(),
            options.streaming.as_deref(),
            options
                .split_transactions_above
                .map(|most| most.to_string())
                .as_deref(),
            options.on_error.as_deref(),
            Some(flag(request.two_phase)),
            options.on_missing_column.as_deref(),
        ],
    );
    rows.get(0, 0).unwrap_or_default().to_owned()
}
