//! Checks of a database that joins against the member that it is to copy. If a step of the join
//! would fail for good, the call is refused before the group hears of it.
//!
//! The member is asked over its own connection string, as the steps will ask it.
//!
//! Not for: the findings of `braid.check`, which `join.rs` asks for.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::subscription_option::array_literal;
use braid_group::{MemberId, NewMember, Version};
use braid_postgres::catalog::query;
use braid_postgres::libpq::{self, Connection, Mode};
use braid_postgres::rows::Rows;
use braid_workers::group::steps::{publication, schema};
use braid_workers::group::version;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::super::failure::{Failure, Outcome};
use super::super::local;
use super::super::provider::Provider;

/// A server that does not answer for so long does not count as one that the string leads to.
const PATIENCE: Duration = Duration::from_secs(5);
/// Differences that an error names.
const NAMED: usize = 5;

/// Checks that a database can take the place of a member by this mode.
pub(super) fn check(
    contacts: &Rows,
    source: &Provider,
    mode: &str,
    publications: &[String],
    caller: pg_sys::Oid,
) -> Outcome<()> {
    check_subscriptions(contacts, mode)?;
    let mut member = open(contacts, source, caller)?;
    check_encoding(&mut member)?;
    if mode == "empty" {
        let major = member.server_version() / 10_000;
        schema::check_program(u16::try_from(major).unwrap_or(u16::MAX))?;
    }
    check_publications(&mut member, mode, publications)?;
    if mode != "adopt" {
        member.published_tables(publications, false)?;
        check_tables(&mut member, mode, publications)?;
    }
    if mode == "empty" {
        check_roles(&mut member)?;
    }
    Ok(())
}

/// Connects to the node at the string that the caller names.
pub(super) fn open_named(member_dsn: &str, caller: pg_sys::Oid) -> Outcome<Provider> {
    Provider::open_if_node(member_dsn, caller)?.ok_or_else(|| {
        Failure::state("the database at member_dsn is not a member of a group")
            .hint("In member_dsn, give the connection string of a member. The first one comes by braid.create_group.")
    })
}

/// Checks that this Braid knows all that may be in the group's log: a kind of entry is used once
/// all members have a version that knows it.
pub(super) fn check_version(contacts: &Rows) -> Outcome<()> {
    let version_of = |text: &str| {
        let mut parts = text.split('.').map(|part| part.parse().ok());
        Some(Version::new(parts.next()??, parts.next()??, parts.next()??))
    };
    let oldest = contacts
        .iter()
        .filter_map(|row| version_of(row.get(10)?.as_deref()?))
        .min();
    match (version(), oldest) {
        (own, Some(oldest)) if own < oldest => Err(Failure::state(format!(
            "Braid {own} is too old for this group"
        ))
        .detail(format!("Its members have Braid {oldest} or newer."))
        .hint("Install that version on this server, then run alter extension braid update.")),
        _ => Ok(()),
    }
}

/// Asks which server and which database it is.
const FACTS: &str = "select c.system_identifier::text, d.oid::text, d.datname::text \
      from pg_catalog.pg_control_system() c cross join pg_catalog.pg_database d \
     where d.datname = pg_catalog.current_database()";

/// Checks that a connection string leads to this database, as far as this server can find out:
/// other members may be able to reach it although this server is not.
pub(super) fn check_own(dsn: &str) -> Outcome<()> {
    let there = match facts(dsn) {
        Ok(there) => there,
        Err(error) => {
            Failure::new(
                PgSqlErrorCode::ERRCODE_WARNING,
                "this server could not connect by the node's own connection string",
            )
            .detail(error.to_string())
            .hint("Other members have to reach this database by it. If it is wrong, change it with braid.alter_node once this node is a member.")
            .warn();
            return Ok(());
        }
    };
    let here = query(FACTS, &[]);
    let is_same = |column| there.get(0, column) == here.get(0, column);
    if is_same(0) && is_same(1) {
        return Ok(());
    }
    let database = there.get(0, 2).unwrap_or_default();
    let whose = if is_same(0) { "this" } else { "another" };
    Err(
        Failure::parameter("the connection string in dsn does not lead to this database")
            .detail(format!(
                "It leads to database \"{database}\" of {whose} server."
            ))
            .hint("In dsn, give the connection string by which other members reach this database."),
    )
}

/// Checks that the connection string of a member leads to a database with Braid, and not back to
/// this one.
pub(super) fn check_elsewhere(member_dsn: &str) -> Outcome<()> {
    libpq::check_connection_string(member_dsn).map_err(|error| Failure::malformed_dsn(&error))?;
    let unreachable = |error: libpq::Error| {
        Failure::provider("could not connect to the member", &error).hint(
            "Check member_dsn, that the server runs, and that its pg_hba.conf lets this connection in.",
        )
    };
    let mut connection = Connection::open(member_dsn, "braid", Mode::Sql).map_err(unreachable)?;
    let there = connection.query(FACTS).map_err(unreachable)?;
    let extension = connection
        .query("select 1 from pg_catalog.pg_extension where extname = 'braid'")
        .map_err(unreachable)?;
    if extension.is_empty() {
        return Err(Failure::undefined(format!(
            "the member's database \"{}\" does not have extension braid",
            there.get(0, 2).unwrap_or_default()
        ))
        .hint(
            "In member_dsn, give the connection string of a member of the group. Check its dbname.",
        ));
    }
    let here = query(FACTS, &[]);
    if (0..2).any(|column| there.get(0, column) != here.get(0, column)) {
        return Ok(());
    }
    Err(
        Failure::parameter("the connection string in member_dsn leads back to this database")
            .hint("In member_dsn, give the connection string of a member of the group."),
    )
}

/// Checks that this node, a member, can reach a database which is to become a member by its
/// connection string: an address such as localhost would lead to another server.
pub fn check_reached(new: &NewMember) -> Outcome<()> {
    let name = &new.name;
    let facts = facts(new.connection.expose()).map_err(|error| {
        Failure::new(
            PgSqlErrorCode::ERRCODE_CONNECTION_FAILURE,
            format!("it cannot connect to node \"{name}\" by the connection string in dsn"),
        )
        .detail(error.to_string())
        .hint(format!(
            "In dsn, give a connection string that leads to node \"{name}\" from all members. Its pg_hba.conf has to let them in."
        ))
    })?;
    let system = new.identity.system.to_string();
    if facts.get(0, 0) == Some(system.as_str()) {
        return Ok(());
    }
    Err(Failure::parameter(format!(
        "from there the connection string in dsn does not lead to node \"{name}\""
    ))
    .detail(format!(
        "It leads to database \"{}\" of another server.",
        facts.get(0, 2).unwrap_or_default()
    ))
    .hint(format!(
        "In dsn, give a connection string that leads to node \"{name}\" from all members: no localhost, and no socket directory."
    )))
}

/// Checks that a connection string leads from this node to a member that takes part: not to a copy
/// of it, nor to a standby.
pub fn check_leads_to(member: MemberId, name: &str, dsn: &str) -> Outcome<()> {
    let unreachable = |error: &libpq::Error| {
        Failure::provider(
            format!("could not connect to node \"{name}\" by the connection string in dsn"),
            error,
        )
        .hint("Check that it is right, that the server runs, and that its pg_hba.conf lets the members in.")
    };
    let elsewhere = |where_to: String| {
        Failure::parameter(format!(
            "the connection string in dsn does not lead to node \"{name}\""
        ))
        .detail(format!("It leads to {where_to}."))
        .hint(format!(
            "In dsn, give a connection string that leads to node \"{name}\" from all members."
        ))
    };
    let mut connection = Connection::open_within(dsn, "braid", Mode::Sql, PATIENCE)
        .map_err(|error| unreachable(&error))?;
    let facts = connection
        .query(FACTS)
        .map_err(|error| unreachable(&error))?;
    let here = query(FACTS, &[]);
    if (0..2).all(|column| facts.get(0, column) == here.get(0, column)) {
        return Err(elsewhere("this node itself".to_owned()));
    }
    let extension = connection
        .query("select 1 from pg_catalog.pg_extension where extname = 'braid'")
        .map_err(|error| unreachable(&error))?;
    let database = facts.get(0, 2).unwrap_or_default();
    if extension.is_empty() {
        return Err(elsewhere(format!(
            "database \"{database}\", which does not have extension braid"
        )));
    }
    let found = connection
        .query(
            "select n.node_name, n.node_id, n.identity_valid, pg_catalog.pg_is_in_recovery(), c.group_id, c.member_id \
               from braid.node_info() n left join braid.group_contacts() c on c.is_self",
        )
        .map_err(|error| {
            Failure::provider(
                format!("node \"{name}\" could not be asked who it is"),
                &error,
            )
            .hint("The role in dsn needs the REPLICATION attribute there, and braid_monitor.")
        })?;
    let there = |column| found.get(0, column);
    let Some(node) = there(0) else {
        return Err(elsewhere(format!(
            "database \"{database}\", which is not a node"
        )));
    };
    let known = query(
        "select m.node_id, encode(s.group_id, 'hex') from braid.group_self s cross join braid.group_member m \
          where m.member_id = $1::bigint",
        &[Some(&member.to_string())],
    );
    if there(1) != known.get(0, 0) {
        return Err(elsewhere(format!("node \"{node}\"")));
    }
    if there(2) != Some("t") {
        return Err(elsewhere(format!("a copy of node \"{node}\"")));
    }
    if there(3) == Some("t") {
        return Err(elsewhere(format!("a standby of node \"{node}\"")));
    }
    let number = member.to_string();
    if there(4) != known.get(0, 1) || there(5) != Some(number.as_str()) {
        return Err(elsewhere(format!(
            "node \"{node}\", which takes no part in the group any more"
        )));
    }
    Ok(())
}

fn facts(dsn: &str) -> libpq::Result<Rows> {
    Connection::open_within(dsn, "braid", Mode::Sql, PATIENCE)?.query(FACTS)
}

/// Checks that no subscription to a member exists, which the join would take for one of its own.
fn check_subscriptions(contacts: &Rows, mode: &str) -> Outcome<()> {
    let members: Vec<String> = contacts
        .iter()
        .filter_map(|row| row.get(6).cloned().flatten())
        .collect();
    let found = local::column(&query(
        "select subscription_name from braid.subscription \
          where former_member or $2::boolean and provider_id = any ($1::uuid[]) order by 1",
        &[
            Some(&array_literal(&members)),
            Some(if mode == "adopt" { "false" } else { "true" }),
        ],
    ));
    if found.is_empty() {
        return Ok(());
    }
    Err(
        Failure::state("this node has subscriptions to members of the group")
            .detail(format!("Subscriptions: {}.", found.join(", ")))
            .hint(
                "Drop those of a former membership with braid.drop_subscription. Join with mode => 'adopt' to go on with those that were made by hand.",
            ),
    )
}

/// Connects to the member as the steps of the join will.
fn open(contacts: &Rows, source: &Provider, caller: pg_sys::Oid) -> Outcome<Provider> {
    let own = contacts
        .iter()
        .find(|row| row.get(13).and_then(Option::as_deref) == Some("t"));
    let dsn = own.and_then(|row| row.get(9)?.clone()).ok_or_else(|| {
        Failure::state(format!("node \"{}\" has no connection string", source.name))
            .hint("Name another member in member_dsn.")
    })?;
    let mut member = Provider::open(&dsn, caller).map_err(|failure| {
        let hint = failure.hint_words().unwrap_or_default();
        Failure::state(format!(
            "node \"{}\" cannot be reached by the connection string that it has in the group",
            source.name
        ))
        .detail(failure.words())
        .hint(format!(
            "{hint} If that string is wrong, change it at node \"{}\" with braid.alter_node. Or name another member in member_dsn.",
            source.name
        ))
    })?;
    if member.id != source.id {
        return Err(Failure::state(format!(
            "the connection string that node \"{}\" has in the group leads to node \"{}\"",
            source.name, member.name
        ))
        .detail("From this server that string leads to another node than from where it was given.")
        .hint(format!(
            "At node \"{}\", call braid.alter_node with a connection string that leads to it from all members: no localhost. Or name another member in member_dsn.",
            source.name
        )));
    }
    member.check_server(true)?;
    Ok(member)
}

/// Checks that each text of the member can be stored on this node. That holds within one encoding,
/// and for a database in UTF8.
fn check_encoding(member: &mut Provider) -> Outcome<()> {
    let there = member.ask("select pg_catalog.current_setting('server_encoding')")?;
    let there = there.get(0, 0).unwrap_or_default().to_owned();
    let found = query(
        "select current_setting('server_encoding'), \
                exists (select from pg_conversion c where c.condefault and c.conforencoding = pg_char_to_encoding($1) \
                           and c.contoencoding = pg_char_to_encoding(current_setting('server_encoding')))",
        &[Some(&there)],
    );
    let here = found.get(0, 0).unwrap_or_default();
    if here == there {
        return Ok(());
    }
    if here == "UTF8" && found.get(0, 1) == Some("t") {
        Failure::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            format!("node \"{}\" has encoding {there}, this one {here}", member.name),
        )
        .detail(format!(
            "A text that is written here and that {there} does not have stops the subscriptions of such nodes."
        ))
        .hint(format!("Write only texts that {there} has."))
        .warn();
        return Ok(());
    }
    Err(Failure::state(format!(
        "rows of node \"{}\" cannot be converted from encoding {there} to {here}",
        member.name
    ))
    .detail(format!(
        "Texts that {there} has and {here} does not would stop the copy, or the subscription later."
    ))
    .hint(match there.as_str() {
        "UTF8" | "SQL_ASCII" => format!("Create this database anew with encoding {there}."),
        _ => format!("Create this database anew with encoding {there} or UTF8."),
    }))
}

/// Checks that the group's publications exist and can be created on this node, and that existing
/// local ones are equal.
fn check_publications(member: &mut Provider, mode: &str, publications: &[String]) -> Outcome<()> {
    let question = publication::question(&array_literal(publications));
    let there = publication::read(member.ask(&question)?.iter());
    let here = publication::read(query(&question, &[]).iter());
    for name in publications {
        let Some(theirs) = there.iter().find(|p| p.name == *name) else {
            return Err(Failure::undefined(format!(
                "node \"{}\" does not have publication \"{name}\" of the group",
                member.name
            ))
            .hint("Create it there, as the other members have it, or name another member."));
        };
        let Some(ours) = here.iter().find(|p| p.name == *name) else {
            if let Some(problem) = theirs.problem {
                return Err(Failure::state(format!(
                    "publication \"{name}\" of node \"{}\" cannot be created here",
                    member.name
                ))
                .detail(problem)
                .hint("Create it here by hand with what is to be published, or change it there."));
            }
            continue;
        };
        if ours.statement == theirs.statement {
            continue;
        }
        let failure = Failure::state(format!(
            "publication \"{name}\" differs from that of node \"{}\"",
            member.name
        ))
        .detail(format!(
            "Here: {}. There: {}.",
            ours.statement, theirs.statement
        ))
        .hint("Drop it here: the join creates it as it is there. Or change one of the two.");
        if mode != "adopt" {
            return Err(failure);
        }
        // An administrator who set the nodes up by hand may have meant it.
        failure
            .into_warning(format!(
                "publication \"{name}\" differs from that of node \"{}\"",
                member.name
            ))
            .warn();
    }
    Ok(())
}

/// Checks that the copy may read each published table of the member, and that an existing local
/// table has the same shape.
fn check_tables(member: &mut Provider, mode: &str, publications: &[String]) -> Outcome<()> {
    let shape = query("select braid.shape_query()", &[]);
    let shape = shape.get(0, 0).unwrap_or_default();
    let there = member.ask(&format!(
        "select pg_catalog.format('%I.%I', n.nspname, c.relname), s.lines, current_user, \
                has_schema_privilege(n.oid, 'USAGE') and has_any_column_privilege(c.oid, 'SELECT'), row_security_active(c.oid) \
           from (select distinct g.relid from pg_publication p cross join lateral pg_get_publication_tables(p.pubname) g \
                  where p.pubname = any ({}::name[])) t \
           join pg_class c on c.oid = t.relid join pg_namespace n on n.oid = c.relnamespace \
          cross join lateral ({shape}) s \
          where n.nspname <> 'braid' order by 1",
        quote_literal(&array_literal(publications))
    ))?;
    let mut shapes = BTreeMap::new();
    let (mut unreadable, mut filtered) = (Vec::new(), Vec::new());
    for row in there.iter() {
        let cell = |place: usize| row.get(place).and_then(Option::as_deref);
        let Some(table) = cell(0) else { continue };
        if cell(3) != Some("t") {
            unreadable.push(table.to_owned());
        } else if cell(4) == Some("t") {
            filtered.push(table.to_owned());
        }
        shapes.insert(table.to_owned(), cell(1).unwrap_or_default().to_owned());
    }
    let role = there.get(0, 2).unwrap_or_default();
    let refused = |what: String, tables: &[String], hint: String| {
        Err(
            Failure::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, what)
                .detail(format!("Tables: {}.", list(tables)))
                .hint(hint),
        )
    };
    if !unreadable.is_empty() {
        return refused(
            format!(
                "role \"{role}\" may not copy tables of node \"{}\"",
                member.name
            ),
            &unreadable,
            format!(
                "There, run grant pg_read_all_data to {role}, or grant it USAGE on the schemas and SELECT on the tables."
            ),
        );
    }
    if !filtered.is_empty() {
        return refused(
            format!(
                "row-level security hides rows of node \"{}\" from role \"{role}\"",
                member.name
            ),
            &filtered,
            format!("There, run alter role {role} bypassrls."),
        );
    }
    if mode == "schema" {
        check_shapes(member, shape, &shapes)?;
    }
    Ok(())
}

fn check_shapes(member: &Provider, shape: &str, there: &BTreeMap<String, String>) -> Outcome<()> {
    let names: Vec<String> = there.keys().cloned().collect();
    let here = query(
        &format!(
            "select t.name, s.lines from unnest($1::text[]) as t (name) join pg_class c on c.oid = to_regclass(t.name) \
              cross join lateral ({shape}) s"
        ),
        &[Some(&array_literal(&names))],
    );
    let here: BTreeMap<&str, &str> = here
        .iter()
        .filter_map(|row| Some((row.first()?.as_deref()?, row.get(1)?.as_deref()?)))
        .collect();
    let missing: Vec<String> = names
        .iter()
        .filter(|name| !here.contains_key(name.as_str()))
        .cloned()
        .collect();
    if !missing.is_empty() {
        return Err(Failure::state(format!(
            "tables of node \"{}\" are not in this database",
            member.name
        ))
        .detail(format!("Tables: {}.", list(&missing)))
        .hint("Create them here, or join with mode => 'empty' and an empty database."));
    }
    let differing: Vec<String> = there
        .iter()
        .filter_map(|(table, theirs)| {
            let ours = here.get(table.as_str())?;
            let only = |one: &str, other: &str| {
                let lines: Vec<&str> = one
                    .lines()
                    .filter(|line| !other.lines().any(|other| other == *line))
                    .collect();
                lines.join(", ")
            };
            (theirs != ours).then(|| {
                format!(
                    "Table {table} has here: {}; there: {}.",
                    only(ours, theirs),
                    only(theirs, ours)
                )
            })
        })
        .collect();
    if differing.is_empty() {
        return Ok(());
    }
    let more = match differing.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" And {more} more."),
    };
    let first: Vec<String> = differing.into_iter().take(NAMED).collect();
    Err(Failure::state(format!(
        "tables differ from those of node \"{}\"",
        member.name
    ))
    .detail(format!("{}{more}", first.join(" ")))
    .hint("Change them here so that both are alike, or join with mode => 'empty' and an empty database."))
}

/// Some of these, and how many more there are.
fn list(all: &[String]) -> String {
    let mut words = all
        .iter()
        .take(NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    if let Some(more) = all.len().checked_sub(NAMED).filter(|more| *more > 0) {
        words.push_str(&format!(", and {more} more"));
    }
    words
}

/// Checks that the roles exist on this node which own something in the member's schema, or have
/// rights on it.
fn check_roles(member: &mut Provider) -> Outcome<()> {
    let named = member.ask(
        "select distinct r.rolname from pg_shdepend d join pg_roles r on r.oid = d.refobjid \
          where d.refclassid = 'pg_authid'::regclass and d.deptype in ('o', 'a') \
            and d.dbid = (select b.oid from pg_database b where b.datname = current_database()) \
            and d.classid in ('pg_class'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass, 'pg_namespace'::regclass) \
            and not exists (select from pg_depend e where e.classid = d.classid and e.objid = d.objid and e.deptype = 'e') \
          order by 1",
    )?;
    let missing = local::column(&query(
        "select quote_ident(r) from unnest($1::text[]) r where not exists (select from pg_roles where rolname = r) order by 1",
        &[Some(&array_literal(&local::column(&named)))],
    ));
    let Some(first) = missing.first() else {
        return Ok(());
    };
    Err(Failure::undefined(format!(
        "roles that the schema of node \"{}\" names are missing here",
        member.name
    ))
    .detail(format!("Roles: {}.", list(&missing)))
    .hint(format!(
        "Create them, for example with create role {first}."
    )))
}
