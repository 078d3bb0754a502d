//! wait_for_group, and how the group looks from this member.

use braid_node::mailbox;
use braid_postgres::catalog::query;
use braid_postgres::encoding::Text;
use pgrx::datum::Interval;
use pgrx::iter::TableIterator;
use pgrx::{name, pg_extern};

use super::super::failure::{Failure, Outcome};
use super::super::waiting::{Progress, wait_with_hint};
use super::super::{run, server};
use super::require_own;

/// braid.wait_for_group(timeout interval)
#[pg_extern(sql = false)]
fn wait_for_group(timeout: Option<Interval>) {
    run(|| {
        require_own()?;
        let hint = "See braid.join_progress, braid.group_nodes and braid.subscription_status.";
        wait_with_hint(timeout, "the group", hint, look)
    });
}

fn look() -> Outcome<Progress> {
    let own = query(
        "select s.stopped, s.stopped_hint, m.state, s.xmin = pg_current_xact_id_if_assigned()::xid, s.leave_message \
           from braid.group_self s left join braid.group_member m on m.member_id = s.member_id",
        &[],
    );
    if own.is_empty() {
        return Ok(Progress::Reached);
    }
    if own.get(0, 3) == Some("t") {
        return Err(Failure::state("the group was joined in this transaction")
            .detail("Workers do not see it before the transaction commits.")
            .hint("Commit first, then wait."));
    }
    server::check_workers_run()?;
    if let Some(why) = own.get(0, 0) {
        return Err(Failure::state(why).hint(own.get(0, 1).unwrap_or_default()));
    }
    let step = query(
        "select format('Step %s of %s, %s%s%s.', j.step, j.steps, j.name, ': waits for ' || j.waits_for, ': ' || j.last_error) \
           from braid.join_progress j where j.state <> 'done' order by j.step limit 1",
        &[],
    );
    if let Some(words) = step.get(0, 0) {
        return Ok(Progress::Waiting(words.to_owned()));
    }
    if own.get(0, 2) == Some("leaving") {
        return Ok(Progress::Waiting(match own.get(0, 4) {
            Some(message) => format!("The node is leaving: {message}."),
            None => "The node is leaving.".to_owned(),
        }));
    }
    // Not for data: a group that has just been made answers nobody yet.
    let leader = query(
        "select coalesce(min(a.view), 'the group worker starts') from braid.group_activity() a having count(a.leader_id) = 0",
        &[],
    );
    if let Some(words) = leader.get(0, 0) {
        return Ok(Progress::Waiting(format!("The agreement: {words}.")));
    }
    // Readers are seen as of the first look in a transaction otherwise.
    query("select pg_stat_clear_snapshot()", &[]);
    let missing = query(
        "select n.name, coalesce(n.subscription_state, 'none'), n.reachable from braid.group_nodes n \
          where not n.is_local and n.role = 'data' and (n.state = 'active' or n.state = 'joining' and n.reachable) \
            and not exists (select from braid.group_nodes own where own.is_local and (own.state = 'in maintenance' or own.role = 'witness')) \
            and (n.subscription_state is distinct from 'streaming' or n.lag_to_bytes is null)",
        &[],
    );
    if let (Some(name), Some(state)) = (missing.get(0, 0), missing.get(0, 1)) {
        if missing.get(0, 2) == Some("f") {
            return Ok(Progress::Waiting(format!(
                "Node \"{name}\" cannot be reached from here."
            )));
        }
        return Ok(Progress::Waiting(format!(
            "The streams from and to node \"{name}\"; the subscription to it: {state}."
        )));
    }
    let joining = query(
        "select n.name from braid.group_nodes n where n.state = 'joining' and n.reachable limit 1",
        &[],
    );
    Ok(match joining.get(0, 0) {
        Some(name) => Progress::Waiting(format!("Node \"{name}\" joins.")),
        None => Progress::Reached,
    })
}

/// braid.group_activity()
#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn group_activity() -> TableIterator<
    'static,
    (
        name!(view, Text),
        name!(leader_id, Option<i64>),
        name!(term, i64),
        name!(committed, i64),
        name!(majority, bool),
        name!(member_id, i64),
        name!(reachable, bool),
        name!(silent, Interval),
        name!(applied, i64),
        name!(reachable_since, Option<i64>),
        name!(problem, Option<Text>),
    ),
> {
    // Without a worker there is nothing to see, which is no error of a view.
    let shown = mailbox::view().unwrap_or_default();
    let shown = String::from_utf8_lossy(&shown).into_owned();
    let mut lines = shown.split('\n');
    let mut next = || lines.next().unwrap_or_default().to_owned();
    let (view, leader, term, committed, majority) = (next(), next(), next(), next(), next());
    let rest: Vec<String> = lines.map(str::to_owned).collect();
    let rows = rest.into_iter().filter_map(move |line| {
        let mut words = line.splitn(6, ' ');
        let id = words.next()?.parse().ok()?;
        let reachable = words.next()? == "true";
        let silent = Interval::from_micros(words.next()?.parse().ok()?);
        let applied = words.next()?.parse().ok()?;
        let since = words.next().and_then(|since| since.parse().ok());
        let problem = words.next().filter(|words| !words.is_empty());
        Some((
            Text(view.clone()),
            leader.parse().ok(),
            term.parse().unwrap_or(0),
            committed.parse().unwrap_or(0),
            majority == "true",
            id,
            reachable,
            silent,
            applied,
            since,
            problem.map(|words| Text(words.to_owned())),
        ))
    });
    TableIterator::new(rows)
}
