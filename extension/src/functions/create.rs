//! create_subscription.

use std::ffi::CStr;

use braid_bgworker::subscription_option::{ApplyMode, DESCRIPTIONS, Options, Value};
use braid_node::{connection_string, secrecy};
use braid_postgres::catalog::{current_role, query, utf8_string};
use braid_postgres::encoding::Text;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome};
use super::local;
use super::node::check_name;
use super::options::{
    check_publication_names, check_slot_name, check_together, choice, limit, texts,
};
use super::provider::Provider;
use super::slot::choose_slot;
use super::subscription::tie_owners;
use super::{required, required_name, run, server, table_set, text, versions, wake_manager};

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
    replicate_ddl: Option<bool>,
) -> i32 {
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        let dsn = required(text(dsn), "dsn")?;
        let options = Options {
            publications: required(texts(publications, "publications")?, "publications")?,
            copy_data: required(copy_data, "copy_data")?,
            enabled: required(enabled, "enabled")?,
            create_slot: required(create_slot, "create_slot")?,
            // Chosen below.
            slot_name: String::new(),
            origin: chosen("origin", origin)?,
            synchronous_commit: chosen("synchronous_commit", synchronous_commit)?,
            run_as_owner: required(run_as_owner, "run_as_owner")?,
            disable_on_error: required(disable_on_error, "disable_on_error")?,
            apply_mode: chosen("apply_mode", apply_mode)?,
            consolidate: required(consolidate, "consolidate")?,
            commit_order: chosen("commit_order", commit_order)?,
            streaming: chosen("streaming", streaming)?,
            two_phase: required(two_phase, "two_phase")?,
            split_transactions_above: limit(split_transactions_above)?.unwrap_or(0),
            on_error: chosen("on_error", on_error)?,
            on_missing_column: chosen("on_missing_column", on_missing_column)?,
            replicate_ddl: required(replicate_ddl, "replicate_ddl")?,
        };
        let slot_name = slot_name.map(utf8_string);
        let id = create(&name, &dsn, options, slot_name.as_deref(), caller)?;
        id.parse()
            .map_err(|_| Failure::state("the subscription was not stored").hint("Try again."))
    })
}

/// The value of an option that create_subscription has a default for.
fn chosen<T: Value>(option: &str, given: Option<Text>) -> Outcome<T> {
    choice(option, &required(text(given), option)?)
}

/// Creates a subscription; `slot_name` is the one asked for, if any. Returns its number as text.
fn create(
    name: &str,
    dsn: &str,
    mut options: Options,
    slot_name: Option<&str>,
    caller: pg_sys::Oid,
) -> Outcome<String> {
    check_name(name, "subscription")?;
    check_publication_names(&options.publications)?;
    slot_name.map_or(Ok(()), check_slot_name)?;
    check_together(&options)?;
    server::check_for_subscription()?;
    if options.two_phase {
        server::check_for_two_phase()?;
    }
    let node = local::check_node(local::lock_node())?;
    // A session that versions a table waits, and then finds the subscription.
    query("lock table braid.subscription in row exclusive mode", &[]);
    versions::check_none("subscribe")?;
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
    let publications = &options.publications;
    let mut provider = Provider::open(dsn, caller)?;
    provider.check_identity(&node)?;
    provider.check_server(options.create_slot)?;
    provider.check_publications(publications)?;
    let slot = choose_slot(name, slot_name, options.create_slot, &node, &mut provider)?;
    let tables = provider.published_tables(publications, options.copy_data)?;
    let targets = table_set::find_targets(&tables, options.copy_data, options.ignores_missing())?;
    server::check_room(options.enabled.then_some(server::Workers {
        is_serial: options.apply_mode == ApplyMode::Serial,
        copy_data: options.copy_data,
    }))?;
    if targets.is_empty() {
        Failure::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            "the publications have no tables yet",
        )
        .hint("Once they have, run braid.refresh_subscription.")
        .warn();
    }
    provider.record(dsn)?;
    let connection = connection_string::store(dsn)?;
    options.slot_name.clone_from(&slot.name);
    let id = insert(
        name,
        &connection,
        &options,
        &provider,
        slot.start_lsn.as_deref(),
        caller,
    );
    connection_string::forget_unused();
    tie_owners()?;
    for target in &targets {
        table_set::add(&id, target, options.copy_data);
    }
    wake_manager();
    Ok(id)
}

/// Writes the row of a subscription. `connection`: number of its connection string. `start_lsn`:
/// where its slot starts, if that is known. Returns its number as text.
fn insert(
    name: &str,
    connection: &str,
    options: &Options,
    provider: &Provider,
    start_lsn: Option<&str>,
    caller: pg_sys::Oid,
) -> String {
    let phase = match (options.create_slot, options.copy_data) {
        (true, _) => "slot",
        (false, true) => "copy",
        (false, false) => "stream",
    };
    let owner = caller.to_u32().to_string();
    let mut arguments = vec![
        Some(name),
        Some(&owner),
        Some(connection),
        Some(&provider.name),
        Some(&provider.id),
        Some(phase),
        start_lsn,
    ];
    let first = arguments.len() + 1;
    let texts = options.texts();
    arguments.extend(texts.iter().map(|text| Some(text.as_str())));
    let (columns, values): (Vec<_>, Vec<_>) = DESCRIPTIONS
        .iter()
        .zip(first..)
        .map(|(option, number)| (option.name, option.parameter(number)))
        .unzip();
    let rows = query(
        &format!(
            "insert into braid.subscription (subscription_name, subscription_owner, connection_id, provider_name, provider_id, \
                phase, start_lsn, {}) \
             values ($1::name, $2::oid, $3::bigint, $4::name, $5::uuid, $6, $7::pg_lsn, {}) returning subscription_id",
            columns.join(", "),
            values.join(", ")
        ),
        &arguments,
    );
    rows.get(0, 0).unwrap_or_default().to_owned()
}
