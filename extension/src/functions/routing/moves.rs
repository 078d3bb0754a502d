//! move_shard and add_node_set.
//!
//! A shard moves from set F to set T in these steps. A call that failed is made again, and goes on
//! where the group's log says that the move is.
//!
//! | step | what happens | who has the rows | who answers, takes writes |
//! |---|---|---|---|
//! | `Begin` | F sends changes of the shard to T as well | F, some T | F |
//! | touch | F writes each row of the shard again, block by block, so that it is sent | F, T | F |
//! | `Switch` | clients go to T; F takes writes of those that do not know it yet | F, T | T |
//! | exchange | F and T each receive the last changes of the other one | F, T | T |
//! | `Finish` | F refuses the shard's rows | F, T | T |
//! | drop | F waits for its older transactions, and deletes the rows, for itself alone | T | T |
//!
//! A row that is written during the move reaches T twice: with the touch and by itself. At T the
//! newer version wins, as in any conflict.

use std::time::{Duration, Instant};

use braid_bgworker::sql_text::quote_literal;
use braid_group::Command;
use braid_node::routing::Known;
use braid_postgres::catalog::current_role;
use braid_postgres::encoding::Text;
use braid_postgres::latch;
use braid_routing::{
    Entry, MoveStep, NodeId, NodeSet, Phase, RoutedTable, SetId, Shard, TableName,
};
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome};
use super::super::group::ask;
use super::super::options::texts;
use super::super::{required, run};
use super::look::known;
use super::table::{Member, connect_all, exchange, not_routed, table_to_change};
use super::umbrella;

/// Blocks that are written or cleared in one transaction.
const BLOCKS: i64 = 1_024;
/// How long older transactions are waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// braid.add_node_set(relation regclass, nodes text[]) returns integer
#[pg_extern(sql = false)]
fn add_node_set(relation: Option<pg_sys::Oid>, nodes: Option<Vec<Option<Text>>>) -> i32 {
    let caller = current_role();
    run(|| {
        let (_, name) = table_to_change(caller, relation)?;
        let names = required(texts(nodes, "nodes")?, "nodes")?;
        let known = known()?;
        let table = known.table(&name).ok_or_else(|| not_routed(&name))?;
        let nodes = names
            .iter()
            .map(|node| {
                known.agreed.member_named(node).ok_or_else(|| {
                    Failure::undefined(format!("the group has no node \"{node}\""))
                        .hint("The view braid.group_nodes lists its nodes.")
                })
            })
            .collect::<Outcome<Vec<NodeId>>>()?;
        let last = table.map().sets().iter().map(|set| set.id.0).max();
        let id = SetId(last.unwrap_or(0).saturating_add(1));
        let mut members = connect_all(caller)?;
        check_nodes(&mut members, &name, &nodes)?;
        ask(Command::Route(Entry::AddSet {
            table: name.clone(),
            set: NodeSet { id, nodes },
        }))?;
        umbrella::follow(&mut members, &name, caller, true)?;
        Ok(i32::try_from(id.0).unwrap_or(i32::MAX))
    })
}

/// Checks that these nodes have data, and sees to the guards of their tables.
fn check_nodes(members: &mut [Member], name: &TableName, nodes: &[NodeId]) -> Outcome<()> {
    for node in nodes {
        let Some(member) = members.iter_mut().find(|member| member.id == node.0) else {
            return Err(Failure::state("a node of the set has no data")
                .hint("A witness has no rows. Name nodes that have joined with data."));
        };
        member.ask(&format!(
            "select braid.group_route_guard({})",
            quote_literal(&name.to_string())
        ))?;
    }
    Ok(())
}

/// braid.move_shard(relation regclass, shard integer, node_set integer)
#[pg_extern(sql = false)]
fn move_shard(relation: Option<pg_sys::Oid>, shard: Option<i32>, node_set: Option<i32>) {
    let caller = current_role();
    run(|| {
        let (_, name) = table_to_change(caller, relation)?;
        let number = |value: i32, what: &str| {
            u32::try_from(value)
                .map_err(|_| Failure::parameter(format!("{what} must not be negative")))
        };
        let shard = Shard(number(required(shard, "shard")?, "shard")?);
        let to = SetId(number(required(node_set, "node_set")?, "node_set")?);
        let mut moving = Moving {
            text: quote_literal(&name.to_string()),
            name,
            shard,
            to,
            members: connect_all(caller)?,
            former: None,
        };
        moving.begin()?;
        moving.copy()?;
        moving.switch()?;
        moving.finish()?;
        moving.drop_rows()?;
        umbrella::follow(&mut moving.members, &moving.name, caller, false)
    });
}

/// Where a move is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not begun.
    Away,
    Copying,
    Switched,
    /// Done, but for rows that are left at other nodes.
    AtHome,
}

struct Moving {
    name: TableName,
    /// The name, as a literal of SQL.
    text: String,
    shard: Shard,
    to: SetId,
    members: Vec<Member>,
    /// The members of the set that had the shard before, if this call has ended the move.
    former: Option<Vec<usize>>,
}

impl Moving {
    fn with_table<T>(&self, look: impl FnOnce(&Known, &RoutedTable) -> T) -> Outcome<T> {
        let known = known()?;
        let table = known
            .table(&self.name)
            .ok_or_else(|| not_routed(&self.name))?;
        Ok(look(&known, table))
    }

    fn stage(&self) -> Outcome<Stage> {
        let (source, moving) = self.with_table(|_, table| {
            (
                table.map().source(self.shard),
                table.map().moving(self.shard),
            )
        })?;
        match (source, moving) {
            (None, _) => Err(Failure::undefined(format!(
                "table {} has no shard {}",
                self.name, self.shard
            ))
            .hint("The view braid.shards lists its shards.")),
            (_, Some(moving)) if moving.to != self.to => Err(Failure::state(format!(
                "shard {} is being moved to node set {}",
                self.shard, moving.to.0
            ))
            .hint("End that move first: call braid.move_shard with that set.")),
            (_, Some(moving)) if moving.phase == Phase::Copying => Ok(Stage::Copying),
            (_, Some(_)) => Ok(Stage::Switched),
            (Some(source), None) if source == self.to => Ok(Stage::AtHome),
            (Some(_), None) => Ok(Stage::Away),
        }
    }

    fn step(&mut self, step: MoveStep) -> Outcome<()> {
        ask(Command::Route(Entry::Move {
            table: self.name.clone(),
            shard: self.shard,
            step,
        }))?;
        // Each member shows the step: from now on it decides which rows are sent and refused.
        for member in &mut self.members {
            member.ask(&format!(
                "select braid.group_route_moved({}, {}, '{}')",
                self.text,
                self.shard,
                match step {
                    MoveStep::Begin(_) => "copying",
                    MoveStep::Switch => "switched",
                    MoveStep::Finish | MoveStep::Cancel => "home",
                }
            ))?;
        }
        Ok(())
    }

    fn begin(&mut self) -> Outcome<()> {
        if self.stage()? != Stage::Away {
            return Ok(());
        }
        let nodes = self.with_table(|_, table| table.map().nodes(self.to).to_vec())?;
        check_nodes(&mut self.members, &self.name, &nodes)?;
        self.step(MoveStep::Begin(self.to))
    }

    /// Indexes of the members of the set from which the shard moves. None if all of them have been
    /// removed: then there are no rows to be had.
    fn sources(&self) -> Outcome<Vec<usize>> {
        let nodes = self.with_table(|_, table| {
            let source = table.map().source(self.shard);
            source
                .map(|set| table.map().nodes(set).to_vec())
                .unwrap_or_default()
        })?;
        let is_source = |member: &Member| nodes.contains(&NodeId(member.id));
        let places = self.members.iter().enumerate();
        Ok(places
            .filter(|(_, member)| is_source(member))
            .map(|(place, _)| place)
            .collect())
    }

    /// Has one node of the former set write all rows of the shard again, and waits until the new
    /// set has them.
    fn copy(&mut self) -> Outcome<()> {
        if self.stage()? != Stage::Copying {
            return Ok(());
        }
        if let Some(source) = self.sources()?.first().copied() {
            // The changes that nodes of the former set have from each other have reached the node
            // that writes.
            exchange(&mut self.members)?;
            self.by_blocks(source, "touch")?;
            exchange(&mut self.members)?;
        }
        Ok(())
    }

    fn by_blocks(&mut self, place: usize, what: &str) -> Outcome<()> {
        let Some(member) = self.members.get_mut(place) else {
            return Ok(());
        };
        let blocks: i64 = member
            .ask(&format!("select braid.group_route_blocks({})", self.text))?
            .and_then(|blocks| blocks.parse().ok())
            .unwrap_or(1);
        let mut from = 0;
        while from < blocks {
            let to = (from + BLOCKS).min(blocks);
            member.ask(&format!(
                "select braid.group_route_{what}({}, {}, {from}, {to})",
                self.text, self.shard
            ))?;
            from = to;
        }
        Ok(())
    }

    fn switch(&mut self) -> Outcome<()> {
        if self.stage()? != Stage::Copying {
            return Ok(());
        }
        self.step(MoveStep::Switch)
    }

    fn finish(&mut self) -> Outcome<()> {
        if self.stage()? != Stage::Switched {
            return Ok(());
        }
        exchange(&mut self.members)?;
        self.former = Some(self.sources()?);
        self.step(MoveStep::Finish)
    }

    /// Has the former nodes of the shard delete its rows. If these are not known, because an
    /// earlier call has ended the move, all nodes of other sets.
    fn drop_rows(&mut self) -> Outcome<()> {
        let others = match self.former.take() {
            Some(former) => former,
            None => {
                let nodes = self.with_table(|_, table| table.map().nodes(self.to).to_vec())?;
                let places = self.members.iter().enumerate();
                places
                    .filter(|(_, member)| !nodes.contains(&NodeId(member.id)))
                    .map(|(place, _)| place)
                    .collect()
            }
        };
        for place in &others {
            if let Some(member) = self.members.get_mut(*place) {
                wait_for_older(member)?;
            }
        }
        // The writes of these transactions have reached the new set.
        exchange(&mut self.members)?;
        for place in others {
            self.by_blocks(place, "drop")?;
        }
        Ok(())
    }
}

/// Waits until no transaction of a member is left that began before now.
fn wait_for_older(member: &mut Member) -> Outcome<()> {
    let next = member
        .ask("select pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())")?
        .unwrap_or_default();
    let since = Instant::now();
    loop {
        let is_over = member.ask(&format!(
            "select pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()) >= '{next}'::pg_catalog.xid8"
        ))?;
        if is_over.as_deref() == Some("t") {
            return Ok(());
        }
        if since.elapsed() > PATIENCE {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE,
                format!("old transactions are open on node \"{}\"", member.name),
            )
            .detail("The shard has moved; its rows on that node are deleted once these transactions have ended.")
            .hint("End them, and call braid.move_shard again."));
        }
        latch::wait(Some(Duration::from_millis(50)));
    }
}
