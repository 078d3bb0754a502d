//! join_group and add_witness.

use std::ffi::CStr;

use braid_bgworker::hex;
use braid_group::{Command, GroupId, MemberId, Role};
use braid_node::{connection_string, secrecy};
use braid_postgres::catalog::{Rights, current_role, glance, query};
use braid_postgres::encoding::Text;
use braid_postgres::rows::Rows;
use braid_workers::group::{WITNESS, request};
use pgrx::{pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome, notice};
use super::super::{local, required, run, text, wake_manager};
use super::create::{become_node, give_rights, new_member};
use super::{check_no_group, check_rights, insert_self, source as member};

/// The steps of joining, in their order: as `braid_workers::group::steps` carries them out.
const STEPS: [&str; 10] = [
    "receive the group's log",
    "copy the schema",
    "create publications",
    "create slots here for the other nodes",
    "create slots for this node at the other nodes",
    "have the source apply what came before these slots",
    "copy the rows",
    "catch up with the other nodes",
    "have the other nodes subscribe to this one",
    "become active",
];

/// Findings of braid.check that keep a node from voting.
const OF_WITNESS: [&str; 15] = [
    "preload",
    "recovery",
    "node_standing",
    "check_failed",
    "peer_connection",
    "peer_fact",
    "peer_itself",
    "peer_copy",
    "peer_recovery",
    "peer_name",
    "peer_standing",
    "peer_extension",
    "peer_version",
    "peer_role",
    "peer_replication",
];

/// braid.join_group(member_dsn text, node_name name, dsn text, mode text)
#[pg_extern(sql = false)]
fn join_group(
    member_dsn: Option<Text>,
    node_name: Option<&CStr>,
    dsn: Option<Text>,
    mode: Option<Text>,
) {
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        let mode = required(text(mode), "mode")?;
        become_member(
            caller,
            text(member_dsn),
            node_name,
            text(dsn).as_deref(),
            &mode,
        )
    });
}

/// braid.add_witness(member_dsn text, node_name name, dsn text)
#[pg_extern(sql = false)]
fn add_witness(member_dsn: Option<Text>, node_name: Option<&CStr>, dsn: Option<Text>) {
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        become_member(
            caller,
            text(member_dsn),
            node_name,
            text(dsn).as_deref(),
            WITNESS,
        )
    });
}

/// Has the group of the node at `member_dsn` add this database, and notes the steps to come.
fn become_member(
    caller: pg_sys::Oid,
    member_dsn: Option<String>,
    node_name: Option<&CStr>,
    dsn: Option<&str>,
    mode: &str,
) -> Outcome<()> {
    check_rights(caller)?;
    let member_dsn = member_dsn.ok_or_else(|| {
        Failure::null_argument("member_dsn")
            .hint("Give the connection string of any member of the group.")
    })?;
    if !["empty", "schema", "adopt", WITNESS].contains(&mode) {
        return Err(Failure::parameter(format!("invalid mode \"{mode}\"")).hint(
            "Use empty for a database without tables, schema for one that has them without rows, adopt for one that was set up by hand, witness for one that only votes.",
        ));
    }
    check_no_group()?;
    check_contents(mode)?;
    member::check_elsewhere(&member_dsn)?;
    let (node, dsn) = become_node(node_name, dsn)?;
    member::check_own(&dsn)?;
    let rights = give_rights(&dsn);
    let mut source = member::open_named(&member_dsn, caller)?;
    if source.name == node.name && source.id != node.id {
        return Err(Failure::duplicate(format!(
            "the group has a node \"{}\" already",
            node.name
        ))
        .hint("Give this node another name. If it is a node already, drop it first with braid.drop_node."));
    }
    source.check_identity(&node)?;
    source.check_server(true)?;
    check_both(&member_dsn, mode)?;
    // Over the connections that the other members will use: one that fails now would fail later.
    let contacts = source.ask(
        "select group_id, group_name, publications, member_id, node_number, node_name, node_id, role, state, dsn, braid_version, \
                postgres_version, since_index, is_self from braid.group_contacts()",
    )?;
    if contacts.is_empty() {
        return Err(Failure::state(format!(
            "node \"{}\" is not a member of a group",
            source.name
        ))
        .hint("Create a group there with braid.create_group, or name another node."));
    }
    member::check_version(&contacts)?;
    let publications = local::column(&query(
        "select unnest($1::text[])",
        &[Some(contacts.get(0, 2).unwrap_or("{braid}"))],
    ));
    let role = if mode == WITNESS {
        Role::Witness
    } else {
        member::check(&contacts, &source, mode, &publications, caller)?;
        Role::Data
    };
    let joiner = new_member(&node, &dsn, role)?;
    let question = request::question(Command::AddMember(joiner))?;
    let added = source.ask(&format!(
        "select braid.group_add('\\x{}'::pg_catalog.bytea)",
        hex::encode(&question)
    ))?;
    let id = added
        .get(0, 0)
        .and_then(|words| words.split(' ').next()?.parse().ok())
        .and_then(MemberId::new)
        .ok_or_else(|| {
            Failure::state("the group did not give this node a number").hint("Try again.")
        })?;
    let group = contacts
        .get(0, 0)
        .and_then(hex::decode)
        .and_then(|bytes| bytes.try_into().ok())
        .map(GroupId)
        .ok_or_else(|| Failure::state("the group's identity cannot be read"))?;
    let name = contacts.get(0, 1).unwrap_or_default().to_owned();
    insert_self(&group, &name, id, &publications, Some(&source.name), mode);
    store_contacts(&contacts)?;
    store_steps(role);
    wake_manager();
    rights.into_iter().for_each(notice);
    notice(format!(
        "node \"{}\" joins group \"{name}\"; braid.wait_for_group() waits for it, braid.join_progress shows how far it is",
        node.name
    ));
    Ok(())
}

/// Checks that the database has the contents that the mode asks for.
fn check_contents(mode: &str) -> Outcome<()> {
    let tables = "select c.oid::regclass::text, c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace \
                   where c.relkind in ('r', 'p') and n.nspname not in ('pg_catalog', 'information_schema', 'braid') \
                     and n.nspname !~ '^pg_(toast|temp)' \
                     and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e')";
    match mode {
        "empty" => {
            let found = local::column(&query(&format!("{tables} order by 1 limit 5"), &[]));
            if !found.is_empty() {
                return Err(Failure::state("this database has tables already")
                    .detail(format!("Tables: {}.", found.join(", ")))
                    .hint("Join with mode => 'schema' to keep them and copy rows into them, or start with an empty database."));
            }
        }
        "schema" => {
            let found = query(&format!("{tables} and c.relkind = 'r'"), &[]);
            for row in found.iter() {
                let cell = |place: usize| row.get(place).and_then(Option::as_deref);
                let oid = cell(1).and_then(|oid| oid.parse::<u32>().ok());
                let (Some(table), Some(oid)) = (cell(0), oid) else {
                    continue;
                };
                let question = format!("select 1 from only {table} limit 1");
                // The copy of the table locks it, and checks again.
                if !glance(Rights::OwnerOf(oid.into()), &question).is_empty() {
                    return Err(Failure::state(format!("table {table} has rows"))
                        .detail("They would not reach the other nodes, and would conflict with the rows that are copied.")
                        .hint("Save them, empty the tables, join, and insert them again."));
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// All that can be known before: the errors of braid.check, for a node that joins.
fn check_both(member_dsn: &str, mode: &str) -> Outcome<()> {
    // The publications come with the join, and the tables where there are none.
    let mut to_come = vec!["publication", "publication_empty", "peer_publication"];
    if mode == "empty" {
        to_come.push("peer_table_extra");
    }
    let counts = |code: &str| {
        if mode == WITNESS {
            OF_WITNESS.contains(&code)
        } else {
            !to_come.contains(&code)
        }
    };
    let found = query(
        "select format('%s: %s', c.subject, c.finding), c.remedy, c.code from braid.check($1) c where c.severity = 'error'",
        &[Some(member_dsn)],
    );
    let errors: Vec<&[Option<String>]> = found
        .iter()
        .filter(|row| {
            let code = row.get(2).cloned().flatten().unwrap_or_default();
            counts(&code)
        })
        .collect();
    let Some(first) = errors.first() else {
        return Ok(());
    };
    let words: Vec<String> = errors
        .iter()
        .filter_map(|row| row.first().cloned().flatten())
        .collect();
    Err(Failure::state("this node cannot join the group")
        .detail(words.join("\n"))
        .hint(format!(
            "{}\nAll findings: select * from braid.check(member_dsn).",
            first.get(1).cloned().flatten().unwrap_or_default()
        )))
}

/// Stores the members as another member has sent them: they count until the group's log has
/// arrived.
fn store_contacts(contacts: &Rows) -> Outcome<()> {
    for row in contacts.iter() {
        let text = |index: usize| row.get(index).cloned().flatten();
        let dsn = text(9).unwrap_or_default();
        let connection = connection_string::store(&dsn)?;
        query(
            "insert into braid.group_member (member_id, node_number, node_name, node_id, role, state, connection_id, braid_version, \
                 postgres_version, since_index) \
             values ($1::bigint, $2::integer, $3::name, $4::uuid, $5, $6, $7::bigint, $8, $9::integer, $10::bigint)",
            &[
                text(3).as_deref(),
                text(4).as_deref(),
                text(5).as_deref(),
                text(6).as_deref(),
                text(7).as_deref(),
                text(8).as_deref(),
                Some(&connection),
                text(10).as_deref(),
                text(11).as_deref(),
                text(12).as_deref(),
            ],
        );
    }
    Ok(())
}

/// A witness has no data: it takes the first step and the last one.
fn store_steps(role: Role) {
    let last = STEPS.len();
    let steps = (1..).zip(STEPS);
    for (number, name) in
        steps.filter(|(number, _)| role == Role::Data || [1, last].contains(number))
    {
        query(
            "insert into braid.join_step (step, name) values ($1::integer, $2)",
            &[Some(&number.to_string()), Some(name)],
        );
    }
}
