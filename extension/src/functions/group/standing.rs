//! set_read_only, begin_maintenance and end_maintenance: states of a member that the group agrees
//! on and that stays a member.

use std::ffi::CStr;

use braid_group::{Command, MemberId, MemberState};
use braid_postgres::catalog::{current_role, query, utf8_string};
use pgrx::pg_extern;

use super::super::failure::{Failure, Outcome};
use super::super::{required, run, wake_manager};
use super::{ask, check_goes_on, check_rights, find_member, require_own};

/// braid.set_read_only(read_only boolean, node_name name)
#[pg_extern(sql = false)]
fn set_read_only(read_only: Option<bool>, node_name: Option<&CStr>) {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let read_only = required(read_only, "read_only")?;
        let member = wanted(node_name)?;
        ask(Command::SetReadOnly { member, read_only })?;
        wake_manager();
        Ok(())
    });
}

/// braid.begin_maintenance(node_name name)
#[pg_extern(sql = false)]
fn begin_maintenance(node_name: Option<&CStr>) {
    set_state(node_name, MemberState::Maintenance);
}

/// braid.end_maintenance(node_name name)
#[pg_extern(sql = false)]
fn end_maintenance(node_name: Option<&CStr>) {
    set_state(node_name, MemberState::Active);
}

fn set_state(node_name: Option<&CStr>, state: MemberState) {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let member = wanted(node_name)?;
        let now = query(
            "select node_name, state from braid.group_member where member_id = $1::bigint",
            &[Some(&member.to_string())],
        );
        let name = now.get(0, 0).unwrap_or_default();
        match now.get(0, 1) {
            Some("active" | "in maintenance") => {}
            other => {
                let other = other.unwrap_or("unknown");
                return Err(Failure::state(format!("node \"{name}\" is {other}"))
                    .hint("Only a member that has joined, and does not leave, can rest."));
            }
        }
        ask(Command::SetState { member, state })?;
        wake_manager();
        Ok(())
    });
}

/// The member that is meant: this one unless another one is named.
fn wanted(node_name: Option<&CStr>) -> Outcome<MemberId> {
    let (me, group) = require_own()?;
    check_goes_on()?;
    match node_name {
        Some(name) => find_member(&utf8_string(name), &group),
        None => Ok(me),
    }
}
