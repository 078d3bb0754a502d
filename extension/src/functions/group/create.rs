//! create_group, and what a database needs that becomes a member.

use std::ffi::CStr;

use braid_bgworker::hex;
use braid_bgworker::subscription_option::array_literal;
use braid_group::{ConnectionString, GroupId, Identity, MemberId, NewMember, Role, Stored, Work};
use braid_node::secrecy;
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::libpq;
use braid_postgres::server as postgres;
use braid_workers::group::{store, version};
use pgrx::pg_extern;

use super::super::failure::{Failure, Outcome, notice};
use super::super::options::texts;
use super::super::{local, node, required, required_name, run, text, wake_manager};
use super::source::check_own;
use super::{check_no_group, check_rights, insert_self};

/// braid.create_group(group_name name, node_name name, dsn text, publications text[], adopt
/// boolean)
#[pg_extern(sql = false)]
fn create_group(
    group_name: Option<&CStr>,
    node_name: Option<&CStr>,
    dsn: Option<Text>,
    publications: Option<Vec<Option<Text>>>,
    adopt: Option<bool>,
) {
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let name = required_name(group_name, "group_name")?;
        node::check_name(&name, "group")?;
        let publications = required(texts(publications, "publications")?, "publications")?;
        let adopt = required(adopt, "adopt")?;
        check_no_group()?;
        let (node, dsn) = become_node(node_name, text(dsn).as_deref())?;
        check_own(&dsn)?;
        let rights = give_rights(&dsn);
        let subscriptions = local::column(&query(
            "select subscription_name from braid.subscription order by 1",
            &[],
        ));
        if !adopt && !subscriptions.is_empty() {
            return Err(Failure::state("this node has subscriptions already")
                .detail(format!("Subscriptions: {}.", subscriptions.join(", ")))
                .hint(
                    "Use adopt => true to have the group go on with those between its members.",
                ));
        }
        create_publications(&publications);
        let id = random_id()?;
        let stored = Stored::create(id, &name, new_member(&node, &dsn, Role::Data)?)
            .map_err(|error| Failure::parameter(error.to_string()))?;
        // Sequences that were set up by hand stay so.
        let mode = if adopt { "adopt" } else { "first" };
        insert_self(&id, &name, MemberId::FIRST, &publications, None, mode);
        let work = Work {
            flush: true,
            core: stored.core,
            snapshot: stored.snapshot,
            ..Work::default()
        };
        store::write(&work)?;
        if let Some(snapshot) = &work.snapshot
            && let Ok(state) = braid_group::State::decode(&snapshot.bytes)
        {
            store::show(&state)?;
        }
        wake_manager();
        rights.into_iter().for_each(notice);
        Ok(())
    });
}

/// Makes this database a node, if it is none.
pub(super) fn become_node(
    name: Option<&CStr>,
    dsn: Option<&str>,
) -> Outcome<(local::LocalNode, String)> {
    let wanted = name.map(braid_postgres::catalog::utf8_string);
    if local::find_node().is_none() {
        let name = wanted.clone().ok_or_else(|| {
            Failure::null_argument("node_name")
                .hint("This database is no node yet: give it a name.")
        })?;
        let dsn = dsn.ok_or_else(|| {
            Failure::null_argument("dsn")
                .hint("Give the connection string by which other members reach this database.")
        })?;
        node::create(&name, dsn)?;
    }
    let node = local::check_node(local::lock_node())?;
    if wanted.is_some_and(|wanted| wanted != node.name) {
        return Err(
            Failure::duplicate(format!("this database already is node \"{}\"", node.name))
                .hint("Leave node_name out, or drop the node first."),
        );
    }
    let known = query(
        "select c.dsn from braid.node n join braid.connection c using (connection_id) where n.is_local",
        &[],
    );
    let known = known.get(0, 0).map(str::to_owned).ok_or_else(|| {
        Failure::state("this node has no connection string")
            .hint("Drop the node and create it anew with one.")
    })?;
    if dsn.is_some_and(|dsn| dsn != known) {
        return Err(
            Failure::state("this node has another connection string").hint(
                "Leave dsn out to have the other members connect by the node's own, or drop the node first.",
            ),
        );
    }
    Ok((node, known))
}

/// Gives the role in this node's connection string the rights that other members need. If there is
/// no such role, or none in the string, it does nothing: then the connecting member finds out what
/// is missing. Returns a notice for the user if the call goes well.
pub(super) fn give_rights(dsn: &str) -> Option<String> {
    let role = libpq::connection_keyword(dsn, "user")?;
    let missing = query(
        "select w.word, format(w.statement, r.rolname) \
           from pg_roles r cross join lateral (values \
                ('REPLICATION', 'alter role %I replication', r.rolreplication), \
                ('braid_monitor', 'grant braid_monitor to %I', pg_has_role(r.oid, 'braid_monitor', 'usage')), \
                ('pg_read_all_data', 'grant pg_read_all_data to %I', pg_has_role(r.oid, 'pg_read_all_data', 'usage'))) \
                w (word, statement, is_there) \
          where r.rolname = $1::name and not r.rolsuper and not w.is_there",
        &[Some(&role)],
    );
    let mut given = Vec::new();
    for row in missing.iter() {
        if let [Some(word), Some(statement)] = row {
            query(statement, &[]);
            given.push(word.clone());
        }
    }
    (!given.is_empty()).then(|| format!("role \"{role}\" was given {}", given.join(", ")))
}

/// This node as it asks to be a member.
pub(super) fn new_member(node: &local::LocalNode, dsn: &str, role: Role) -> Outcome<NewMember> {
    let digits = node.id.replace('-', "");
    let id = hex::decode(&digits)
        .and_then(|bytes| <[u8; 16]>::try_from(bytes).ok())
        .ok_or_else(|| Failure::state("the node's identity cannot be read"))?;
    Ok(NewMember {
        name: node.name.clone(),
        role,
        identity: Identity {
            system: postgres::system_identifier(),
            node: id,
        },
        braid: version(),
        postgres: postgres::major(),
        connection: ConnectionString::new(dsn)
            .ok_or_else(|| Failure::parameter("the connection string is too long"))?,
    })
}

/// Publications that are missing become ones of all tables.
fn create_publications(wanted: &[String]) {
    let missing = query(
        "select format('create publication %I for all tables', p) from unnest($1::text[]) p \
          where not exists (select from pg_publication where pubname = p)",
        &[Some(&array_literal(wanted))],
    );
    for statement in local::column(&missing) {
        query(&statement, &[]);
    }
}

fn random_id() -> Outcome<GroupId> {
    let drawn = query("select encode(uuid_send(gen_random_uuid()), 'hex')", &[]);
    drawn
        .get(0, 0)
        .and_then(hex::decode)
        .and_then(|bytes| bytes.try_into().ok())
        .map(GroupId)
        .ok_or_else(|| Failure::state("no identity could be drawn").hint("Try again."))
}
