//! The tables that the group has versioned: their numbers and names. A part of the agreed state.
//!
//! | state of a table | moved by |
//! |---|---|
//! | not versioned | [`crate::Command::UnversionTable`] |
//! | versioned, with a number | [`crate::Command::VersionTable`] |
//!
//! Numbers are given once. A table that is versioned again gets another number, so a grant of its
//! earlier life can't be taken for one of the later.
//!
//! Not for: versions themselves (`braid_versions`), which are no entries of the log.

use std::collections::BTreeMap;

use braid_codec::{Malformed, Reader, Writer};
use braid_versions::{TABLES_LIMIT, TableName, TableNumber};

use crate::command::KEY_LIMIT;
use crate::outcome::Refusal;

/// The versioned tables of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Versioned {
    last: u32,
    tables: BTreeMap<TableNumber, TableName>,
}

impl Versioned {
    /// The tables, by number.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (TableNumber, &TableName)> {
        self.tables.iter().map(|(number, name)| (*number, name))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    pub(crate) fn add(&mut self, table: &TableName) -> Result<(), Refusal> {
        if self.tables.values().any(|known| known == table) {
            return Err(Refusal::AlreadyVersioned(table.to_string()));
        }
        let next = self.last.checked_add(1);
        let Some(next) = next.filter(|_| self.tables.len() < TABLES_LIMIT) else {
            return Err(Refusal::Full {
                limit: TABLES_LIMIT as u64,
            });
        };
        self.last = next;
        self.tables.insert(TableNumber(next), table.clone());
        Ok(())
    }

    pub(crate) fn remove(&mut self, number: TableNumber) -> Result<(), Refusal> {
        match self.tables.remove(&number) {
            Some(_) => Ok(()),
            None => Err(Refusal::NotVersioned(number.0)),
        }
    }

    pub(crate) fn write(&self, w: &mut Writer) {
        w.u32(self.last).count(self.tables.len());
        for (number, name) in &self.tables {
            w.u32(number.0);
            write_name(name, w);
        }
    }

    pub(crate) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut versioned = Self {
            last: r.u32()?,
            tables: BTreeMap::new(),
        };
        for _ in 0..r.count(TABLES_LIMIT)? {
            let number = TableNumber(r.u32()?);
            if number.0 > versioned.last {
                return Err(Malformed::Invalid("number of a versioned table"));
            }
            versioned.tables.insert(number, read_name(r)?);
        }
        Ok(versioned)
    }
}

/// Writes a table's name: its schema, empty for none, and its own.
pub(crate) fn write_name(name: &TableName, w: &mut Writer) {
    w.text(name.schema.as_deref().unwrap_or_default())
        .text(&name.table);
}

pub(crate) fn read_name(r: &mut Reader<'_>) -> Result<TableName, Malformed> {
    let schema = r.text(KEY_LIMIT)?;
    let table = r.text(KEY_LIMIT)?;
    if table.is_empty() {
        return Err(Malformed::Invalid("name of a versioned table"));
    }
    Ok(TableName {
        schema: (!schema.is_empty()).then_some(schema),
        table,
    })
}

#[cfg(test)]
mod tests {
    use braid_versions::{TableName, TableNumber};

    use crate::cluster::{GROUP, id, new_member};
    use crate::{Command, Outcome, Proposal, ProposalId, Refusal, Role, State, Value};

    fn stock() -> TableName {
        TableName {
            schema: Some("public".to_owned()),
            table: "stock".to_owned(),
        }
    }

    fn apply(state: &mut State, command: Command) -> Outcome {
        let index = state.index() + 1;
        let proposal = Proposal {
            id: ProposalId {
                member: id(1),
                boot: 1,
                counter: index,
            },
            command,
        };
        state.apply(index, 1, &proposal)
    }

    #[test]
    fn a_table_is_versioned_once_under_a_number_of_its_own() {
        let mut state = State::create(GROUP, "shop", new_member(1)).unwrap();
        let version = || Command::VersionTable { table: stock() };
        let unversion = |number| Command::UnversionTable {
            table: TableNumber(number),
        };
        assert_eq!(apply(&mut state, version()), Ok(Value::Done));
        assert_eq!(
            apply(&mut state, version()),
            Err(Refusal::AlreadyVersioned("public.stock".to_owned()))
        );
        assert_eq!(
            apply(&mut state, unversion(2)),
            Err(Refusal::NotVersioned(2))
        );
        assert_eq!(apply(&mut state, unversion(1)), Ok(Value::Done));
        assert_eq!(apply(&mut state, version()), Ok(Value::Done));
        let tables: Vec<_> = state.versioned_tables().collect();
        assert_eq!(tables, [(TableNumber(2), &stock())]);
        assert_eq!(State::decode(&state.encode()).unwrap(), state);
    }

    /// Until versions are shipped, a group with versioned tables has one node with data.
    #[test]
    fn versioned_tables_and_several_nodes_exclude_each_other() {
        let mut witness = new_member(2);
        witness.role = Role::Witness;
        let version = || Command::VersionTable { table: stock() };
        let mut state = State::create(GROUP, "shop", new_member(1)).unwrap();
        assert!(apply(&mut state, Command::AddMember(witness)).is_ok());
        assert_eq!(apply(&mut state, version()), Ok(Value::Done));
        let join = || Command::AddMember(new_member(3));
        assert_eq!(apply(&mut state, join()), Err(Refusal::HasVersionedTables));
        let unversion = Command::UnversionTable {
            table: TableNumber(1),
        };
        assert_eq!(apply(&mut state, unversion), Ok(Value::Done));
        assert!(apply(&mut state, join()).is_ok());
        assert_eq!(apply(&mut state, version()), Err(Refusal::SeveralNodes));
    }
}
