//! The group's agreement about versions, as the group worker shows it in tables.

use std::collections::{BTreeMap, BTreeSet};

use braid_bgworker::hex;
use braid_bgworker::sqlstate::SqlState;
use braid_node::mailbox;
use braid_node::subscription::rows;
use braid_node::versions::tables::{self, Table};
use braid_postgres::error::PgError;
use braid_versions::{Agreement, Boot, Bytes, Cut, Local, NodeNumber, Note, Record};

/// A member with data.
#[derive(Debug, Clone)]
pub(super) struct Node {
    /// The number as a member.
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) dsn: Option<String>,
}

/// The whole.
#[derive(Debug, Clone)]
pub(super) struct Agreed {
    pub(super) me: NodeNumber,
    /// The members with data, this one included.
    pub(super) nodes: BTreeMap<NodeNumber, Node>,
    /// In their order.
    pub(super) cuts: Vec<Cut>,
    /// The member whose versions process gives versions, and that process's start.
    holder: Option<(u64, u64)>,
    pub(super) tables: Vec<Table>,
}

fn damaged() -> PgError {
    PgError::new(
        SqlState::DataCorrupted,
        "what is stored of table versions cannot be read",
    )
}

fn number<T: std::str::FromStr>(row: &[Option<String>], at: usize) -> Result<T, PgError> {
    let text = row.get(at).and_then(Option::as_deref);
    text.and_then(|text| text.parse().ok()).ok_or_else(damaged)
}

fn bytes<T: Bytes>(row: &[Option<String>], at: usize) -> Result<T, PgError> {
    let digits = row.get(at).and_then(Option::as_deref);
    let bytes = digits.and_then(hex::decode).ok_or_else(damaged)?;
    T::decode(&bytes).map_err(|_| damaged())
}

/// Reads it. `None` if this node is no member with data. In a transaction.
pub(super) fn load() -> Result<Option<Agreed>, PgError> {
    let own = rows("select member_id::text from braid.group_self", &[])?;
    let Some(own) = own.first() else {
        return Ok(None);
    };
    let own: u64 = number(own, 0)?;
    let found = rows(
        "select m.node_number::text, m.member_id::text, c.dsn, m.node_name::text \
           from braid.group_member m left join braid.connection c using (connection_id) \
          where m.role = 'data' and m.state <> 'removed'",
        &[],
    )?;
    let mut nodes = BTreeMap::new();
    let mut me = None;
    for row in &found {
        let node = NodeNumber(number(row, 0)?);
        let id = number(row, 1)?;
        if id == own {
            me = Some(node);
        }
        let dsn = row.get(2).cloned().flatten();
        let name = row.get(3).cloned().flatten().unwrap_or_default();
        nodes.insert(node, Node { id, name, dsn });
    }
    let Some(me) = me else {
        return Ok(None);
    };
    let found = rows(
        "select encode(content, 'hex'), holder_id::text, holder_boot::text from braid.version_cut order by term",
        &[],
    )?;
    let mut cuts = Vec::new();
    let mut holder = None;
    for row in &found {
        cuts.push(bytes(row, 0)?);
        holder = Some((number(row, 1)?, number(row, 2)?));
    }
    Ok(Some(Agreed {
        me,
        nodes,
        cuts,
        holder,
        tables: tables::all(),
    }))
}

impl Agreed {
    /// Whether nothing is shipped: one node has data, and no sequencer was agreed on.
    pub(super) fn is_alone(&self) -> bool {
        self.nodes.len() < 2 && self.cuts.is_empty()
    }

    /// The part that the rules of rounds use.
    pub(super) fn agreement(&self) -> Agreement {
        // Not if it is no member any more.
        let holder = self.holder.and_then(|(id, boot)| {
            let node = self.nodes.iter().find(|(_, node)| node.id == id)?.0;
            Some((*node, Boot(boot)))
        });
        Agreement {
            nodes: self.nodes.keys().copied().collect(),
            cuts: self.cuts.clone(),
            holder,
        }
    }

    /// The node that is to give versions next: the member that leads the group, if it has data.
    /// Nothing depends on all nodes seeing the same one.
    pub(super) fn candidate(&self) -> Option<NodeNumber> {
        let view = mailbox::view().unwrap_or_default();
        let leader = String::from_utf8_lossy(&view)
            .lines()
            .nth(1)
            .and_then(|id| id.parse::<u64>().ok());
        let leads = |(_, node): &(&NodeNumber, &Node)| Some(node.id) == leader;
        let leader = self.nodes.iter().find(leads).map(|(number, _)| *number);
        leader.or_else(|| self.nodes.keys().next().copied())
    }
}

fn notes(tag: &str) -> Result<Vec<Note>, PgError> {
    let found = rows(
        "select content from braid.version_record where left(content, 4) = $1",
        &[tag.into()],
    )?;
    found.iter().map(|row| bytes(row, 0)).collect()
}

/// The records of all transactions that are committed here, but for superseded ones.
pub(super) fn records() -> Result<Vec<Record>, PgError> {
    let record = |note| match note {
        Note::Versions(record) => Some(record),
        Note::Drained { .. } => None,
    };
    // The format, and the tag.
    Ok(notes("0101")?.into_iter().filter_map(record).collect())
}

/// The nodes whose word is here that nobody writes a table any more as before.
pub(super) fn drained(of: &Table) -> Result<BTreeSet<NodeNumber>, PgError> {
    let drained = |note| match note {
        Note::Drained { node, table, ends }
            if table.0 == of.number && ends == (of.phase == tables::ENDS) =>
        {
            Some(node)
        }
        _ => None,
    };
    Ok(notes("0102")?.into_iter().filter_map(drained).collect())
}

/// Removes notes that say nothing any more: all that a transaction wrote was written again since,
/// or is no versioned table. In a transaction.
pub(super) fn prune(local: &Local, agreed: &Agreed) -> Result<(), PgError> {
    let is_there = |number: u32| agreed.tables.iter().any(|table| table.number == number);
    let mut old = Vec::new();
    let found = rows("select content from braid.version_record", &[])?;
    for row in &found {
        let is_old = match bytes(row, 0)? {
            Note::Versions(record) => local.is_superseded(&record, |table| is_there(table.0)),
            Note::Drained { table, .. } => !is_there(table.0),
        };
        if is_old && let Some(Some(content)) = row.first() {
            old.push(format!("'{content}'"));
        }
    }
    for some in old.chunks(500) {
        let sql = format!(
            "delete from braid.version_record where content in ({})",
            some.join(", ")
        );
        braid_node::subscription::execute(&sql, &[])?;
    }
    Ok(())
}

/// Counts this start of the process. In a transaction, whose commit is on disk before the number is
/// used.
pub(super) fn next_boot() -> Result<u64, PgError> {
    braid_node::subscription::execute("set local synchronous_commit = local", &[])?;
    let found = braid_node::subscription::rows_written(
        "insert into braid.version_boot (boot) values (1) \
         on conflict (is_self) do update set boot = version_boot.boot + 1 returning boot::text",
        &[],
    )?;
    number(found.first().ok_or_else(damaged)?, 0)
}
