//! Creating, changing and dropping subscriptions. What is done here takes effect at commit.

use std::ffi::CStr;

use braid_pg::catalog::{current_role, is_superuser, query, utf8_string};
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::failure::{Failure, Outcome, notice};
use super::local::{self, LocalNode};
use super::node::check_name;
use super::provider::{self, Provider};
use super::{required, required_name, run, table_set, wake_manager};

/// Options that alter_subscription can change too; what is not there stays, or has its default.
#[derive(Debug, Default)]
struct Options {
    publications: Option<Vec<String>>,
    slot_name: Option<String>,
    origin: Option<String>,
    synchronous_commit: Option<String>,
    apply_mode: Option<String>,
    run_as_owner: Option<bool>,
    disable_on_error: Option<bool>,
}

impl Options {
    fn check(&self) -> Outcome<()> {
        if let Some(publications) = &self.publications {
            check_publication_names(publications)?;
        }
        one_of("origin", self.origin.as_deref(), &["none", "any"])?;
        one_of(
            "apply_mode",
            self.apply_mode.as_deref(),
            &["parallel", "serial"],
        )?;
        one_of(
            "synchronous_commit",
            self.synchronous_commit.as_deref(),
            &["off", "local", "on", "remote_write", "remote_apply"],
        )?;
        self.slot_name.as_deref().map_or(Ok(()), check_slot_name)
    }
}

fn one_of(option: &str, value: Option<&str>, allowed: &[&str]) -> Outcome<()> {
    match value {
        Some(value) if !allowed.contains(&value) => Err(Failure::parameter(format!(
            "unrecognized value for {option}: \"{value}\""
        ))
        .hint(format!("Use one of: {}.", allowed.join(", ")))),
        _ => Ok(()),
    }
}

fn check_publication_names(names: &[String]) -> Outcome<()> {
    let hint = "Name the publications as an array, like '{braid}'.";
    if names.is_empty() || names.iter().any(String::is_empty) {
        return Err(
            Failure::parameter("publications must name at least one publication").hint(hint),
        );
    }
    let mut sorted = names.to_vec();
    sorted.sort();
    sorted.dedup();
    if sorted.len() == names.len() {
        return Ok(());
    }
    Err(Failure::duplicate("a publication is named twice").hint(hint))
}

fn check_slot_name(name: &str) -> Outcome<()> {
    let valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if !name.is_empty() && name.len() < 64 && name.bytes().all(valid) {
        return Ok(());
    }
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_INVALID_NAME,
        format!("replication slot name \"{name}\" is not valid"),
    )
    .hint("Replication slot names have up to 63 lower case letters, digits and underscores."))
}

/// Elements of a text array argument; null elements are an error.
fn texts(array: Option<Vec<Option<String>>>, argument: &str) -> Outcome<Option<Vec<String>>> {
    let Some(array) = array else { return Ok(None) };
    let elements: Option<Vec<String>> = array.into_iter().collect();
    elements
        .map(Some)
        .ok_or_else(|| Failure::null_argument(argument))
}

/// What create_subscription is asked for.
struct Request {
    name: String,
    dsn: String,
    options: Options,
    copy_data: bool,
    enabled: bool,
    create_slot: bool,
}

/// braid.create_subscription(...): see the install script for the names and defaults.
#[pg_extern(sql = false)]
#[expect(clippy::too_many_arguments, reason = "the SQL function's arguments")]
fn create_subscription(
    subscription_name: Option<&CStr>,
    dsn: Option<String>,
    publications: Option<Vec<Option<String>>>,
    copy_data: Option<bool>,
    enabled: Option<bool>,
    create_slot: Option<bool>,
    slot_name: Option<&CStr>,
    origin: Option<String>,
    synchronous_commit: Option<String>,
    run_as_owner: Option<bool>,
    disable_on_error: Option<bool>,
    apply_mode: Option<String>,
    streaming: Option<String>,
    two_phase: Option<bool>,
) -> i32 {
    let caller = current_role();
    run(|| {
        let request = Request {
            name: required_name(subscription_name, "subscription_name")?,
            dsn: required(dsn, "dsn")?,
            options: Options {
                publications: Some(required(
                    texts(publications, "publications")?,
                    "publications",
                )?),
                slot_name: slot_name.map(utf8_string),
                origin: Some(required(origin, "origin")?),
                synchronous_commit: Some(required(synchronous_commit, "synchronous_commit")?),
                apply_mode: Some(required(apply_mode, "apply_mode")?),
                run_as_owner: Some(required(run_as_owner, "run_as_owner")?),
                disable_on_error: Some(required(disable_on_error, "disable_on_error")?),
            },
            copy_data: required(copy_data, "copy_data")?,
            enabled: required(enabled, "enabled")?,
            create_slot: required(create_slot, "create_slot")?,
        };
        check_unsupported(
            &required(streaming, "streaming")?,
            required(two_phase, "two_phase")?,
        )?;
        let id = create(&request, caller)?;
        id.parse()
            .map_err(|_| Failure::state("the subscription was not stored").hint("Try again."))
    })
}

fn check_unsupported(streaming: &str, two_phase: bool) -> Outcome<()> {
    let unsupported = |option: &str, hint: &str| {
        Err(Failure::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("{option} is not supported yet"),
        )
        .hint(hint))
    };
    one_of("streaming", Some(streaming), &["off", "on", "parallel"])?;
    if streaming != "off" {
        return unsupported(
            "streaming",
            "Use streaming => 'off': transactions are sent once they have committed.",
        );
    }
    if two_phase {
        return unsupported(
            "two_phase",
            "Use two_phase => false: prepared transactions are sent once they have committed.",
        );
    }
    Ok(())
}

fn create(request: &Request, caller: pg_sys::Oid) -> Outcome<String> {
    let name = &request.name;
    check_name(name, "subscription")?;
    request.options.check()?;
    let node = local::require_node()?;
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
    let slot = choose_slot(request, &node, &mut provider)?;
    let tables = provider.published_tables(publications, request.copy_data)?;
    let targets = table_set::find_targets(&tables, request.copy_data)?;
    check_room()?;
    if targets.is_empty() {
        Failure::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            "the publications have no tables yet",
        )
        .hint("Once they have, run braid.refresh_subscription.")
        .warn();
    }
    provider.record(&request.dsn);
    let id = insert(request, &provider, &slot, caller);
    for target in &targets {
        table_set::add(&id, target, request.copy_data);
    }
    wake_manager();
    Ok(id)
}

/// The slot that a new subscription is to read, and from where if it is there already.
struct ChosenSlot {
    name: String,
    start_lsn: Option<String>,
}

fn choose_slot(
    request: &Request,
    node: &LocalNode,
    provider: &mut Provider,
) -> Outcome<ChosenSlot> {
    let provider_name = provider.name.clone();
    let used_here = local::column(&query(
        "select slot_name from braid.subscription where provider_name = $1::name \
         union select slot_name from braid.slot_cleanup where provider_name = $1::name",
        &[Some(&provider_name)],
    ));
    let wanted = match &request.options.slot_name {
        Some(name) => name.clone(),
        None => default_slot_name(&node.name, &request.name, 1),
    };
    let is_used_here = |name: &String| used_here.contains(name);
    if !request.create_slot {
        if is_used_here(&wanted) {
            return Err(slot_in_use(&wanted));
        }
        let slot = provider.require_slot(&wanted)?;
        return Ok(ChosenSlot {
            name: wanted,
            start_lsn: slot.confirmed_flush_lsn,
        });
    }
    let there = provider.slot_names()?;
    if request.options.slot_name.is_none() {
        let name = (1..)
            .map(|attempt| default_slot_name(&node.name, &request.name, attempt))
            .find(|name| !is_used_here(name) && !there.contains(name))
            .unwrap_or(wanted);
        return Ok(ChosenSlot {
            name,
            start_lsn: None,
        });
    }
    if is_used_here(&wanted) {
        return Err(slot_in_use(&wanted));
    }
    if there.contains(&wanted) {
        return Err(Failure::duplicate(format!("replication slot \"{wanted}\" already exists at the provider"))
            .hint("Choose another slot_name, drop the slot there, or use create_slot => false to read from it."));
    }
    Ok(ChosenSlot {
        name: wanted,
        start_lsn: None,
    })
}

fn slot_in_use(name: &str) -> Failure {
    Failure::duplicate(format!("replication slot \"{name}\" belongs to another subscription of this node"))
        .hint("Choose another slot_name. Slots of dropped subscriptions are listed in braid.pending_cleanup until they are gone.")
}

/// braid_NODE_SUBSCRIPTION, with other characters folded, and with a number from the second attempt on.
fn default_slot_name(node: &str, subscription: &str, attempt: usize) -> String {
    let folded: String = format!("braid_{node}_{subscription}")
        .chars()
        .map(|letter| letter.to_ascii_lowercase())
        .map(|letter| {
            if letter.is_ascii_alphanumeric() {
                letter
            } else {
                '_'
            }
        })
        .collect();
    let suffix = if attempt == 1 {
        String::new()
    } else {
        format!("_{attempt}")
    };
    let stem: String = folded.chars().take(63 - suffix.len()).collect();
    format!("{stem}{suffix}")
}

/// That one more subscription fits into what this server has set aside.
fn check_room() -> Outcome<()> {
    let full = |message: &str, setting: &str, needed: i64| {
        Err(Failure::new(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            message,
        )
        .hint(format!(
            "Set {setting} to at least {needed} in postgresql.conf and restart the server."
        )))
    };
    let counts = query(
        "select (select count(*) from braid.subscription), (select count(*) from pg_subscription)",
        &[],
    );
    let count = |column| {
        counts
            .get(0, column)
            .and_then(|text| text.parse::<i64>().ok())
            .unwrap_or(0)
    };
    let subscriptions = count(0).saturating_add(1);
    if subscriptions > local::number_setting("braid.max_subscriptions", 64) {
        return full(
            "this node has no room for another subscription",
            "braid.max_subscriptions",
            subscriptions,
        );
    }
    // Each applier has a replication origin of its own in use. Before version 18, max_replication_slots limits these.
    let appliers = local::number_setting("braid.appliers_per_subscription", 2);
    let origins = subscriptions
        .saturating_mul(appliers)
        .saturating_add(count(1));
    let slots = local::number_setting("max_replication_slots", 0);
    let (setting, limit) = match local::number_setting("max_active_replication_origins", -1) {
        -1 => ("max_replication_slots", slots),
        limit => ("max_active_replication_origins", limit),
    };
    if origins > limit {
        return full(
            "not enough replication origins for another subscription",
            setting,
            origins,
        );
    }
    Ok(())
}

fn flag(value: bool) -> &'static str {
    if value { "t" } else { "f" }
}

fn insert(
    request: &Request,
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
        "insert into braid.subscription (subscription_name, subscription_owner, dsn, provider_name, provider_id, \
             publications, origin, slot_name, create_slot, copy_data, enabled, synchronous_commit, run_as_owner, \
             disable_on_error, apply_mode, phase, start_lsn) \
         values ($1::name, $2::oid, $3, $4::name, $5::uuid, $6::text[], $7, $8::name, $9::boolean, $10::boolean, $11::boolean, \
             $12, $13::boolean, $14::boolean, $15, $16, $17::pg_lsn) returning subscription_id",
        &[
            Some(&request.name),
            Some(&owner),
            Some(&request.dsn),
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
        ],
    );
    rows.get(0, 0).unwrap_or_default().to_owned()
}

/// braid.alter_subscription(...): null leaves an option as it is.
#[pg_extern(sql = false)]
#[expect(clippy::too_many_arguments, reason = "the SQL function's arguments")]
fn alter_subscription(
    subscription_name: Option<&CStr>,
    dsn: Option<String>,
    publications: Option<Vec<Option<String>>>,
    slot_name: Option<&CStr>,
    origin: Option<String>,
    synchronous_commit: Option<String>,
    run_as_owner: Option<bool>,
    disable_on_error: Option<bool>,
    apply_mode: Option<String>,
) {
    let caller = current_role();
    run(|| {
        let name = required_name(subscription_name, "subscription_name")?;
        let options = Options {
            publications: texts(publications, "publications")?,
            slot_name: slot_name.map(utf8_string),
            origin,
            synchronous_commit,
            apply_mode,
            run_as_owner,
            disable_on_error,
        };
        alter(&name, dsn.as_deref(), &options, caller)
    });
}

fn alter(name: &str, dsn: Option<&str>, options: &Options, caller: pg_sys::Oid) -> Outcome<()> {
    options.check()?;
    local::require_node()?;
    let mut subscription = local::lock_subscription(name)?;
    if options.slot_name.is_some() && subscription.enabled {
        return Err(
            Failure::state("cannot change the slot of an enabled subscription")
                .hint(format!("Run braid.disable_subscription('{name}') first.")),
        );
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
    if dsn.is_some() || options.publications.is_some() || options.slot_name.is_some() {
        // A new connection string is the caller's; the one that is there is the owner's.
        let mut provider = match dsn {
            Some(dsn) => Provider::open(dsn, caller)?,
            None => Provider::open(&subscription.dsn, owner)?,
        };
        provider.check_is(&subscription)?;
        if let Some(dsn) = dsn {
            provider.record(dsn);
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
            provider.require_slot(slot)?;
        }
        if let Some(publications) = &options.publications {
            provider.check_publications(publications)?;
            subscription.publications.clone_from(publications);
            table_set::refresh(&subscription, &mut provider, subscription.copy_data)?;
        }
    }
    let publications = options.publications.as_deref().map(local::array_literal);
    query(
        "update braid.subscription set dsn = coalesce($2, dsn), publications = coalesce($3::text[], publications), \
                slot_name = coalesce($4::name, slot_name), origin = coalesce($5, origin), \
                synchronous_commit = coalesce($6, synchronous_commit), run_as_owner = coalesce($7::boolean, run_as_owner), \
                disable_on_error = coalesce($8::boolean, disable_on_error), apply_mode = coalesce($9, apply_mode) \
          where subscription_id = $1::integer",
        &[
            Some(&subscription.id),
            dsn,
            publications.as_deref(),
            options.slot_name.as_deref(),
            options.origin.as_deref(),
            options.synchronous_commit.as_deref(),
            options.run_as_owner.map(flag),
            options.disable_on_error.map(flag),
            options.apply_mode.as_deref(),
        ],
    );
    wake_manager();
    Ok(())
}

/// braid.enable_subscription(subscription_name name)
#[pg_extern(sql = false)]
fn enable_subscription(subscription_name: Option<&CStr>) {
    run(|| {
        local::require_node()?;
        let subscription =
            local::lock_subscription(&required_name(subscription_name, "subscription_name")?)?;
        query(
            "update braid.subscription set enabled = true, error_sqlstate = null, error_message = null, \
                    error_detail = null, error_hint = null, error_lsn = null, error_at = null \
              where subscription_id = $1::integer",
            &[Some(&subscription.id)],
        );
        wake_manager();
        Ok(())
    });
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
        local::require_node()?;
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
        wake_manager();
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
    let slot = &subscription.slot_name;
    if !node.is_some_and(|node| node.identity_valid) {
        notice(format!(
            "replication slot \"{slot}\" belongs to the node that this database is a copy of and stays at node \"{}\"",
            subscription.provider_name
        ));
    } else if drop_slot {
        leave_slot_to_manager(&subscription);
    } else {
        notice(format!(
            "replication slot \"{slot}\" stays at node \"{}\"",
            subscription.provider_name
        ));
    }
    query(
        "delete from braid.subscription where subscription_id = $1::integer",
        &[Some(&subscription.id)],
    );
    wake_manager();
    Ok(())
}

/// Note the slot down for the manager, which drops it after commit: even if it was still to be created, for a worker may be at it.
fn leave_slot_to_manager(subscription: &local::Subscription) {
    let (slot, provider) = (&subscription.slot_name, &subscription.provider_name);
    query(
        "insert into braid.slot_cleanup (slot_name, dsn, provider_name) values ($1::name, $2, $3::name) \
         on conflict (slot_name, provider_name) do update set dsn = excluded.dsn, attempts = 0, last_error = null",
        &[Some(slot), Some(&subscription.dsn), Some(provider)],
    );
    // Whoever drops the subscription need not be who created it: the owner is who connects.
    if let Err(failure) =
        provider::connect(&subscription.dsn, pg_sys::Oid::from_u32(subscription.owner))
    {
        failure
            .into_warning(format!("could not reach node \"{provider}\" to drop replication slot \"{slot}\""))
            .hint(format!(
                "It will be dropped once the node can be reached; until then it holds back WAL there. To drop it by hand, run \
                 select pg_drop_replication_slot('{slot}') there."
            ))
            .warn();
    }
}

/// braid.skip_transaction(subscription_name name, lsn pg_lsn)
#[pg_extern(sql = false)]
fn skip_transaction(subscription_name: Option<&CStr>, lsn: Option<i64>) {
    run(|| {
        local::require_node()?;
        let subscription =
            local::lock_subscription(&required_name(subscription_name, "subscription_name")?)?;
        let lsn = super::position::lsn_text(required(lsn, "lsn")?);
        let Some(error_lsn) = &subscription.error_lsn else {
            return Err(Failure::state(format!(
                "subscription \"{}\" has no transaction that could not be applied",
                subscription.name
            ))
            .hint("Only the transaction that stopped a subscription can be skipped: see last_error and error_lsn in braid.subscription_status."));
        };
        if *error_lsn != lsn {
            return Err(Failure::parameter(format!(
                "subscription \"{}\" did not stop at the transaction that ends at {lsn}",
                subscription.name
            ))
            .hint(format!(
                "The transaction that could not be applied ends at {error_lsn}."
            )));
        }
        query(
            "update braid.subscription set skip_lsn = $2::pg_lsn, enabled = enabled or disable_on_error, error_sqlstate = null, error_message = null, \
                    error_detail = null, error_hint = null, error_lsn = null, error_at = null \
              where subscription_id = $1::integer",
            &[Some(&subscription.id), Some(&lsn)],
        );
        wake_manager();
        Ok(())
    });
}
