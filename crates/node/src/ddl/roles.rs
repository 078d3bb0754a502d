//! Statements about roles (`braid.replicate_roles`): captured, sent and run as those that change
//! tables. Run by sessions, and by appliers.
//!
//! **Contents.** The statement's text as it was written, so that only its own options are sent; its
//! password is cut out. For each role that it names, a `StatementTable` with an empty schema: the
//! lines of the role's shape (`known`) that it removes and adds. Its settings have the rest:
//!
//! | setting | |
//! |---|---|
//! | `braid.role` | the role of the password; all statements about roles have it |
//! | `braid.role_server` | the server that has run it, and since when that runs |
//! | `braid.password` | the password as `pg_authid` has it after the statement; empty: none |
//! | `braid.from_current` | name and value of the setting of `SET ... FROM CURRENT` |
//!
//! Only the format `gir` has `braid.password` (`Statement::shown`). The applier puts it into the
//! parse tree (`braid_postgres::role_statement`), never into a text.
//!
//! **Decisions.** `braid_bgworker::ddl` decides by the shapes, as with tables: *run*, *merge*,
//! *done* or *conflict*. This module decides two things. A database of the same server needs to do
//! nothing (`is_run_by_this_server`). A password is in no shape, since each node has another salt:
//! the statement with the largest id sets it (`is_superseded`). So all nodes end with one password.
//!
//! States are those of `braid.ddl_entry`: `sent` by the session; `applied`, `merged`,
//! `done already` or `failed` by the applier, in the transaction that runs the statement.

use std::ffi::CStr;

use braid_bgworker::ddl::Shape;
use braid_bgworker::sql_text::quote_identifier;
use braid_bgworker::subscription_option::array_literal;
use braid_gir::{PASSWORD_SETTING, Statement, TableState};
use braid_postgres::error::PgError;
use braid_postgres::role_statement::{self, RoleStatement};
use braid_postgres::{catalog, encoding, plain, setting};
use pgrx::pg_sys;

use super::facts::{Known, list, owners_query, parts, publications_of_all_tables};
use super::intent;

const ROLE: &str = "braid.role";
const SERVER: &str = "braid.role_server";
const FROM_CURRENT: &str = "braid.from_current";

const SELF_GRANT: &CStr = c"createrole_self_grant";

/// This server, since it was started: a copy of its data is another one.
const THIS_SERVER: &str = "select system_identifier || ' ' || extract(epoch from pg_postmaster_start_time()) from pg_control_system()";

/// The shapes of roles, by name or OID. Memberships and settings are parts of a role; settings of
/// other databases are not.
const SHAPES: &str = "\
    select r.oid, r.rolname, array_to_string(s.lines, E'\\x01'), md5(array_to_string(s.lines, E'\\n')) \
    from pg_roles r, lateral (select array(select key || E'\\t' || value from ( \
        select * from (values ('superuser', rolsuper::text), ('inherit', rolinherit::text), ('createrole', rolcreaterole::text), \
            ('createdb', rolcreatedb::text), ('login', rolcanlogin::text), ('replication', rolreplication::text), \
            ('bypassrls', rolbypassrls::text), ('connection limit', rolconnlimit::text), \
            ('valid until', coalesce(extract(epoch from rolvaliduntil)::text, ''))) attribute \
        union all \
        select 'member of ' || quote_ident(g.rolname) || coalesce(' by ' || quote_ident(b.rolname), ''), \
            m.admin_option::text || case to_jsonb(m) ->> 'set_option' when 'false' then ' no set' else '' end \
              || case when (to_jsonb(m) ->> 'inherit_option')::boolean <> r.rolinherit then ' other inherit' else '' end \
          from pg_auth_members m join pg_roles g on g.oid = m.roleid left join pg_roles b on b.oid = m.grantor where m.member = r.oid \
        union all \
        select case setdatabase when 0 then '' else 'database ' end || 'setting ' || split_part(c, '=', 1), substr(c, strpos(c, '=') + 1) \
          from pg_db_role_setting, unnest(setconfig) c where setrole = r.oid \
            and setdatabase in (0, (select oid from pg_database where datname = current_database())) \
      ) part (key, value) order by (key || E'\\t' || value) collate \"C\")) s (lines) \
    where r.rolname = any ($1::name[]) or r.oid = any ($2::oid[]) order by r.oid";

/// Whether a state among those of a statement is that of a role.
#[must_use]
pub fn is_role(state: &TableState) -> bool {
    state.namespace.is_empty()
}

/// The words that `braid.ddl_entry` has in place of a table's name.
pub(super) fn label(role: &str) -> String {
    format!("role {}", quote_identifier(role))
}

/// A statement's own name for the password that it sets.
pub(super) fn label_of_password(statement: &Statement) -> Option<String> {
    value(statement, PASSWORD_SETTING)?;
    Some(format!("password of {}", label(value(statement, ROLE)?)))
}

/// Whether a statement about roles is the group's. Settings for another database are the server's
/// own matter.
pub(super) fn is_ours(statement: &RoleStatement) -> bool {
    let database = &statement.database;
    database.is_none() || *database == plain::get_database_name(plain::MyDatabaseId())
}

/// The names of the roles of a statement.
pub(super) fn names(statement: &RoleStatement) -> Vec<String> {
    let names = statement.roles.iter();
    names.map(|name| encoding::utf8(name)).collect()
}

/// Roles as they are now, by name or OID. In a transaction.
pub(super) fn known(names: &[String], oids: &[pg_sys::Oid]) -> Vec<Known> {
    let found = owners_query(SHAPES, &[Some(&array_literal(names)), Some(&list(oids))]);
    let publications = publications_of_all_tables();
    (0..found.len())
        .filter_map(|row| {
            Some(Known {
                oid: pg_sys::Oid::from(found.get(row, 0)?.parse::<u32>().ok()?),
                state: TableState {
                    namespace: String::new(),
                    name: found.get(row, 1)?.to_owned(),
                    digest: found.get(row, 3)?.to_owned(),
                },
                lines: parts(found.get(row, 2)),
                publications: publications.clone(),
                is_unlogged: false,
            })
        })
        .collect()
}

/// The shape that a table or a role of this server has, or will have when intents are done; `None`
/// if none has the name. In a transaction.
#[must_use]
pub fn expected(state: &TableState) -> Option<Shape> {
    if !is_role(state) {
        return intent::expected(state);
    }
    let role = known(std::slice::from_ref(&state.name), &[]);
    role.into_iter().next().map(|role| Shape {
        digest: role.state.digest,
        lines: role.lines,
    })
}

/// The settings by which a statement that has succeeded says more than its text. In its
/// transaction.
pub(super) fn settings(statement: &RoleStatement) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut add = |name: &str, value: String| all.push((name.to_owned(), value));
    let role = statement.roles.first();
    let role = role.map_or_else(String::new, |name| encoding::utf8(name));
    if statement.has_password {
        let found = owners_query(
            "select coalesce(rolpassword, '') from pg_authid where rolname = $1::name",
            &[Some(&role)],
        );
        add(
            PASSWORD_SETTING,
            found.get(0, 0).unwrap_or_default().to_owned(),
        );
    }
    add(ROLE, role);
    // Settings for a database are still to be made for the others of the server.
    if statement.database.is_none() {
        let found = owners_query(THIS_SERVER, &[]);
        add(SERVER, found.get(0, 0).unwrap_or_default().to_owned());
    }
    if let Some(name) = &statement.from_current
        && let Some(value) = setting::find(name)
    {
        let pair = format!("{}={}", encoding::utf8(name), encoding::utf8(&value));
        add(FROM_CURRENT, pair);
    }
    // From PostgreSQL 16 on: memberships that CREATE ROLE gives its user.
    if let Some(granted) = setting::find(SELF_GRANT).filter(|granted| !granted.is_empty()) {
        add(&encoding::utf8(SELF_GRANT), encoding::utf8(&granted));
    }
    all
}

fn value<'s>(statement: &'s Statement, name: &str) -> Option<&'s str> {
    let mut settings = statement.settings.iter();
    let found = settings.find(|(known, _)| known == name);
    found.map(|(_, value)| value.as_str())
}

/// Whether a statement is about roles.
#[must_use]
pub fn is_about(statement: &Statement) -> bool {
    value(statement, ROLE).is_some()
}

/// Whether a database of this server has run the statement, for all of them. In a transaction.
fn is_run_by_this_server(statement: &Statement) -> bool {
    let server = value(statement, SERVER);
    server.is_some_and(|server| owners_query(THIS_SERVER, &[]).get(0, 0) == Some(server))
}

/// Whether the statement sets a password, and a later one that this node knows has set it. In a
/// transaction.
fn is_superseded(statement: &Statement) -> bool {
    label_of_password(statement).is_some_and(|label| {
        !owners_query(
            "select 1 from braid.ddl_entry where ddl_id > $1::uuid and $2 = any (table_names) and state <> 'failed' limit 1",
            &[Some(&statement.uuid()), Some(&label)],
        )
        .is_empty()
    })
}

/// Whether the statement sets a password on this node. In a transaction.
#[must_use]
pub fn sets_password(statement: &Statement) -> bool {
    value(statement, PASSWORD_SETTING).is_some() && !is_superseded(statement)
}

/// Why a statement about roles is not run, whatever shapes the roles have; `None` if the shapes
/// decide. In a transaction.
#[must_use]
pub fn passed_over(statement: &Statement) -> Option<&'static str> {
    if is_run_by_this_server(statement) {
        return Some("a database of this server has run it");
    }
    let mut tables = statement.tables.iter();
    let changes_shape = tables.any(|table| {
        table.before.is_none() || !(table.added.is_empty() && table.removed.is_empty())
    });
    (!changes_shape && is_superseded(statement)).then_some("a later statement has set the password")
}

/// Runs a statement under the session's settings and rights, with its password unless a later one
/// has set that. In a transaction. Raises the errors of the statement.
///
/// # Errors
/// 42601 or 08P01 for a statement that is none about roles.
pub fn run(statement: &Statement) -> Result<(), PgError> {
    let password = value(statement, PASSWORD_SETTING).filter(|_| !is_superseded(statement));
    let password = password.map(|stored| (!stored.is_empty()).then_some(stored));
    let current = value(statement, FROM_CURRENT).and_then(|pair| pair.split_once('='));
    let settings: Vec<(&str, &str)> = current.into_iter().collect();
    catalog::with_settings(&settings, || role_statement::run(&statement.text, password))
}

/// Sets the password of a statement whose role exists already, as [`run`] does.
///
/// # Errors
/// Those of [`run`].
pub fn set_password(statement: &Statement) -> Result<(), PgError> {
    let role = value(statement, ROLE).unwrap_or_default();
    run(&Statement {
        text: format!("ALTER ROLE {}", quote_identifier(role)),
        ..statement.clone()
    })
}
