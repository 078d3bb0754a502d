//! alter_node and retry_membership: a member that has moved, and one whose agreement has failed.

use std::ffi::CStr;

use braid_bgworker::hex;
use braid_bgworker::sqlstate::SqlState;
use braid_group::{Command, ConnectionString, MemberId};
use braid_node::secrecy;
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::libpq;
use braid_workers::group::request;
use pgrx::{pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome, notice};
use super::super::{provider, required, required_name, run, text, wake_manager};
use super::create::give_rights;
use super::source::{check_leads_to, check_own};
use super::{ask, check_goes_on, check_rights, find_member, require_own};

/// braid.alter_node(node_name name, dsn text)
#[pg_extern(sql = false)]
fn alter_node(node_name: Option<&CStr>, dsn: Option<Text>) {
    secrecy::note_call();
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let name = required_name(node_name, "node_name")?;
        let dsn = required(text(dsn), "dsn")?;
        libpq::check_connection_string(&dsn).map_err(|error| Failure::malformed_dsn(&error))?;
        let (me, group) = require_own()?;
        check_goes_on()?;
        let member = find_member(&name, &group)?;
        let connection = ConnectionString::new(dsn.as_str())
            .ok_or_else(|| Failure::parameter("the connection string is too long"))?;
        let command = Command::SetConnection { member, connection };
        if member == me {
            check_own(&dsn)?;
            let rights = give_rights(&dsn);
            move_self(me, command, caller)?;
            rights.into_iter().for_each(notice);
        } else {
            check_leads_to(member, &name, &dsn)?;
            ask(command)?;
        }
        wake_manager();
        Ok(())
    });
}

/// Has another member check this node's new connection string, and the group agree on it. The
/// others may have lost their way to this node, so that this one alone gets nothing agreed.
fn move_self(me: MemberId, command: Command, caller: pg_sys::Oid) -> Outcome<()> {
    let others = query(
        "select m.node_name, c.dsn from braid.group_member m join braid.connection c using (connection_id) \
          where m.member_id <> $1::bigint and m.state not in ('joining', 'removed') order by m.member_id",
        &[Some(&me.to_string())],
    );
    if others.is_empty() {
        return ask(command).map(drop);
    }
    let question = hex::encode(&request::question(command)?);
    let mut last = None;
    for row in others.iter() {
        let [Some(other), Some(dsn)] = row else {
            continue;
        };
        let asked = provider::connect_member(other, dsn, caller).map(|mut connection| {
            connection.query(&format!(
                "select braid.group_alter('\\x{question}'::pg_catalog.bytea)"
            ))
        });
        let error = match asked {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => error,
            Err(failure) => {
                last = Some(failure);
                continue;
            }
        };
        let failure = Failure::provider(
            format!("node \"{other}\" could not have the group agree on the connection string"),
            &error,
        );
        let is_wrong = error.sqlstate() == SqlState::InvalidParameterValue;
        let failure = match error {
            libpq::Error::Server {
                message,
                detail,
                hint,
                ..
            } => {
                let words = detail.map_or(message.clone(), |more| format!("{message}: {more}"));
                failure.detail(words).hint(hint.unwrap_or_default())
            }
            _ => failure,
        };
        if is_wrong {
            return Err(failure);
        }
        last = Some(failure);
    }
    last.map_or(Ok(()), Err)
}

/// braid.retry_membership()
#[pg_extern(sql = false)]
fn retry_membership() {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        require_own()?;
        let given_up = query(
            "update braid.group_self set stopped = null, stopped_hint = null, failures = 0 \
              where stopped is not null and failures > 0 returning 1",
            &[],
        );
        if given_up.is_empty() {
            return Err(
                Failure::state("this node's membership was not given up for failures")
                    .hint("The view braid.group_nodes says how the node takes part."),
            );
        }
        wake_manager();
        Ok(())
    });
}
