//! Positions in WAL as users see them: `sync_event` on this node, `wait_for_event` at the
//! subscribers.

use std::ffi::CStr;

use braid_gir::lsn_text;
use braid_postgres::catalog::{flush_wal, query};
use pgrx::datum::Interval;
use pgrx::pg_extern;

use super::failure::Failure;
use super::waiting::{Progress, wait_until};
use super::{local, required, required_name, run};

/// braid.sync_event() returns pg_lsn
///
/// The message is not transactional, so it is in WAL at once, behind every commit that this session
/// could have seen; its end is the position. It gives subscribers something to receive. It is
/// flushed because walsenders only send flushed WAL.
#[pg_extern(sql = false)]
fn sync_event() -> i64 {
    run(|| {
        local::require_node()?;
        let rows = query(
            "select pg_logical_emit_message(false, 'braid.sync_event', '') - '0/0'::pg_lsn",
            &[],
        );
        let position = rows
            .get(0, 0)
            .and_then(|text| text.parse::<u64>().ok())
            .ok_or_else(|| Failure::state("no position was returned").hint("Try again."))?;
        flush_wal(position);
        Ok(position.cast_signed())
    })
}

/// braid.wait_for_event(origin_node name, "position" pg_lsn, timeout interval)
#[pg_extern(sql = false)]
fn wait_for_event(origin_node: Option<&CStr>, position: Option<i64>, timeout: Option<Interval>) {
    run(|| {
        let node = required_name(origin_node, "origin_node")?;
        let position = lsn_text(required(position, "position")?.cast_unsigned());
        local::require_node()?;
        let what = format!("position {position} of node \"{node}\"");
        wait_until(timeout, &what, || {
            let rows = query(
                "select s.subscription_name, s.enabled, s.error_message, \
                        coalesce(greatest(a.applied_lsn, \
                            (select max(p.remote_lsn) from braid.origin o \
                               join pg_replication_origin_status p on p.local_id = o.origin_id \
                              where o.subscription_id = s.subscription_id and o.node_name = s.provider_name)) \
                            >= $2::pg_lsn, false) \
                   from braid.subscription s \
                   left join braid.subscription_activity() a on a.subscription_id = s.subscription_id \
                  where s.provider_name = $1::name order by 4, 1",
                &[Some(&node), Some(&position)],
            );
            let Some(name) = rows.get(0, 0) else {
                return Err(Failure::undefined(format!("there is no subscription from node \"{node}\""))
                    .hint("The view braid.subscription_status lists the subscriptions of this node and their providers."));
            };
            // The least advanced is first.
            if rows.get(0, 3) == Some("t") {
                return Ok(Progress::Reached);
            }
            super::waiting::check_running(name, rows.get(0, 1), rows.get(0, 2))?;
            Ok(Progress::Waiting(format!(
                "Subscription \"{name}\" has not applied everything up to there."
            )))
        })
    });
}
