//! add_umbrella, remove_umbrella, and the users of umbrellas.
//!
//! The umbrella of `public.orders` is the partitioned table `everywhere.orders`. It shows the rows
//! of all nodes at each node: the plain table is attached for the node's own set, and a foreign
//! table for each other set.
//!
//! The session that calls a function connects to each member, which then makes its own umbrella
//! (`umbrella_member.rs`). Each part can be repeated: a call that failed is made again.

use braid_bgworker::sql_text::quote_literal;
use braid_node::routing::Known;
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_routing::TableName;
use pgrx::{pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome};
use super::super::group::{check_goes_on, check_rights, require_own};
use super::super::{required_name, run, text};
use super::look::known;
use super::table::{Member, connect_all, not_routed, table_to_change};
use super::umbrella_member::{Umbrella, check_table};

/// braid.add_umbrella(relation regclass)
#[pg_extern(sql = false)]
fn add_umbrella(relation: Option<pg_sys::Oid>) {
    let caller = current_role();
    run(|| {
        let (relation, name) = table_to_change(caller, relation)?;
        if known()?.table(&name).is_none() {
            return Err(not_routed(&name));
        }
        check_table(relation)?;
        make(&mut connect_all(caller)?, &name, caller)
    });
}

/// braid.remove_umbrella(relation regclass)
#[pg_extern(sql = false)]
fn remove_umbrella(relation: Option<pg_sys::Oid>) {
    let caller = current_role();
    run(|| {
        let (_, name) = table_to_change(caller, relation)?;
        remove(&mut connect_all(caller)?, &name)
    });
}

/// Has all members make the umbrella of a table, or bring theirs in step.
pub(super) fn make(members: &mut [Member], name: &TableName, caller: pg_sys::Oid) -> Outcome<()> {
    let call = format!(
        "select braid.group_umbrella_make({}, {})",
        quote_literal(&name.to_string()),
        quote_literal(&users(caller))
    );
    for member in members {
        member.ask(&call)?;
    }
    Ok(())
}

/// Has all members bring the umbrella of a table in step, if there is one at this node that is not.
pub(super) fn follow(
    members: &mut [Member],
    name: &TableName,
    caller: pg_sys::Oid,
    must: bool,
) -> Outcome<()> {
    let Some(umbrella) = Umbrella::find(name)? else {
        return Ok(());
    };
    let known: Known = known()?;
    if must || !umbrella.is_in_step(&known) {
        make(members, name, caller)?;
    }
    Ok(())
}

/// Has all members drop the umbrella of a table.
pub(super) fn remove(members: &mut [Member], name: &TableName) -> Outcome<()> {
    let call = format!(
        "select braid.group_umbrella_drop({})",
        quote_literal(&name.to_string())
    );
    for member in members {
        member.ask(&call)?;
    }
    Ok(())
}

/// The roles that have a user mapping on this node for the other nodes, with its options, and the
/// caller: as JSON. A node that lacks a mapping gets it.
fn users(caller: pg_sys::Oid) -> String {
    let found = query(
        "select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object('role', k.role, 'options', pg_catalog.to_jsonb(k.options)))::text \
           from (select distinct on (r.rolname) r.rolname as role, m.options \
                   from (select u.umuser as role, coalesce(u.umoptions, '{}') as options, 0 as place, s.srvname as server \
                           from pg_catalog.pg_user_mapping u join pg_catalog.pg_foreign_server s on s.oid = u.umserver \
                          where s.srvname like 'everywhere\\_%' \
                         union all \
                         select $1::oid, array['user=' || o.rolname], 1, '' from pg_catalog.pg_roles o where o.oid = $1::oid) m \
                   join pg_catalog.pg_roles r on r.oid = m.role \
                  order by r.rolname, m.place, m.server) k",
        &[Some(&caller.to_u32().to_string())],
    );
    found.get(0, 0).unwrap_or("[]").to_owned()
}

/// braid.add_umbrella_user(role name, password text)
#[pg_extern(sql = false)]
fn add_umbrella_user(role: Option<&std::ffi::CStr>, password: Option<Text>) {
    let caller = current_role();
    run(|| {
        let role = role_to_change(caller, role)?;
        let password = text(password);
        let password = password.as_deref().map(quote_literal);
        let call = format!(
            "select braid.group_umbrella_user({}, {})",
            quote_literal(&role),
            password.as_deref().unwrap_or("null")
        );
        for member in &mut connect_all(caller)? {
            member.ask(&call)?;
        }
        Ok(())
    });
}

/// braid.remove_umbrella_user(role name)
#[pg_extern(sql = false)]
fn remove_umbrella_user(role: Option<&std::ffi::CStr>) {
    let caller = current_role();
    run(|| {
        let role = role_to_change(caller, role)?;
        let call = format!(
            "select braid.group_umbrella_forget({})",
            quote_literal(&role)
        );
        for member in &mut connect_all(caller)? {
            member.ask(&call)?;
        }
        Ok(())
    });
}

fn role_to_change(caller: pg_sys::Oid, role: Option<&std::ffi::CStr>) -> Outcome<String> {
    check_rights(caller)?;
    require_own()?;
    check_goes_on()?;
    let role = required_name(role, "role")?;
    let found = query(
        "select 1 from pg_catalog.pg_roles where rolname = $1::name",
        &[Some(&role)],
    );
    if found.is_empty() {
        return Err(
            Failure::undefined(format!("role \"{role}\" does not exist"))
                .hint("Create the role on all nodes first."),
        );
    }
    Ok(role)
}
