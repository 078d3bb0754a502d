//! The tables that the group has versioned: their numbers and names; and the cuts of their
//! versions. A part of the agreed state.
//!
//! | state of a table | moved by | next |
//! |---|---|---|
//! | not versioned | | begins; counts, if one member has data |
//! | begins: nobody writes it | [`crate::Command::VersionTable`] | counts, not versioned |
//! | counts: in versioned transactions | the last member's `DrainTable` | ends, not versioned |
//! | ends: nobody writes it | [`crate::Command::UnversionTable`] | not versioned |
//!
//! A member has drained a table once it has all that every other member wrote to it before. Example
//! of what goes wrong otherwise: A writes `stock`, which is on its way to B. B begins the first
//! versioned transaction, reads `stock` without that write, and writes.
//!
//! Numbers are given once. A table that is versioned again gets another number, so a grant of its
//! earlier life can't be taken for one of the later.
//!
//! Not for: versions themselves (`braid_versions`), which are no entries of the log.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use braid_codec::{Malformed, Reader, Writer};
use braid_versions::{Bytes, CUTS_LIMIT, Cut, Scope, TABLES_LIMIT, TableName, TableNumber, Term};

use crate::command::KEY_LIMIT;
use crate::member::{MemberId, NodeNumber};
use crate::outcome::Refusal;

/// Whether a versioned table is written. See the module's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nobody writes it: it is about to count.
    Begins,
    /// Written in versioned transactions.
    Counts,
    /// Nobody writes it: it is about to be an ordinary table.
    Ends,
}

impl Phase {
    /// The phase in a word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Begins => "begins",
            Self::Counts => "counts",
            Self::Ends => "ends",
        }
    }
}

/// The member with the sequencer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequencing {
    /// The member that has proposed the last cut over everyone.
    pub holder: MemberId,
    /// The start of its versions process. Another start has no sequencer.
    pub boot: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Table {
    name: TableName,
    phase: Phase,
    /// The members that have drained it in this phase.
    drained: BTreeSet<MemberId>,
}

/// The versioned tables of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Versioned {
    last: u32,
    tables: BTreeMap<TableNumber, Table>,
    cuts: VecDeque<Cut>,
    sequencing: Option<Sequencing>,
}

impl Versioned {
    /// The tables, by number.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (TableNumber, &TableName)> {
        let tables = self.tables.iter();
        tables.map(|(number, table)| (*number, &table.name))
    }

    /// The phase of a table, and the members that have drained it in this phase.
    pub(crate) fn phase(&self, number: TableNumber) -> Option<(Phase, &BTreeSet<MemberId>)> {
        let table = self.tables.get(&number)?;
        Some((table.phase, &table.drained))
    }

    pub(crate) fn cuts(&self) -> impl Iterator<Item = &Cut> {
        self.cuts.iter()
    }

    pub(crate) const fn sequencing(&self) -> Option<Sequencing> {
        self.sequencing
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    pub(crate) fn add(&mut self, table: &TableName, phase: Phase) -> Result<(), Refusal> {
        if self.tables.values().any(|known| known.name == *table) {
            return Err(Refusal::AlreadyVersioned(table.to_string()));
        }
        let next = self.last.checked_add(1);
        let Some(next) = next.filter(|_| self.tables.len() < TABLES_LIMIT) else {
            return Err(Refusal::Full {
                limit: TABLES_LIMIT as u64,
            });
        };
        self.last = next;
        let table = Table {
            name: table.clone(),
            phase,
            drained: BTreeSet::new(),
        };
        self.tables.insert(TableNumber(next), table);
        Ok(())
    }

    /// Ends the versions of a table: at once if `alone`, or if it does not count yet.
    pub(crate) fn remove(&mut self, number: TableNumber, alone: bool) -> Result<(), Refusal> {
        let Some(table) = self.tables.get_mut(&number) else {
            return Err(Refusal::NotVersioned(number.0));
        };
        match table.phase {
            Phase::Counts if !alone => {
                table.phase = Phase::Ends;
                table.drained.clear();
            }
            // Some members may write it as an ordinary table already, as far as they know.
            Phase::Ends if !alone => {}
            _ => {
                self.tables.remove(&number);
            }
        }
        Ok(())
    }

    /// A member has drained a table.
    pub(crate) fn drain(
        &mut self,
        number: TableNumber,
        member: MemberId,
        ends: bool,
    ) -> Result<(), Refusal> {
        let table = self.tables.get_mut(&number);
        let table = table.filter(|table| match table.phase {
            Phase::Begins => !ends,
            Phase::Counts => false,
            Phase::Ends => ends,
        });
        let Some(table) = table else {
            return Err(Refusal::NotVersioned(number.0));
        };
        table.drained.insert(member);
        Ok(())
    }

    /// Moves on the tables that all members with data have drained.
    pub(crate) fn settle(&mut self, with_data: &BTreeSet<MemberId>) {
        self.tables.retain(|_, table| {
            if table.phase == Phase::Counts || !with_data.is_subset(&table.drained) {
                return true;
            }
            let stays = table.phase == Phase::Begins;
            table.phase = Phase::Counts;
            table.drained.clear();
            stays
        });
    }

    /// The last term.
    pub(crate) fn term(&self) -> Term {
        self.cuts.back().map_or(Term(0), |cut| cut.term)
    }

    /// A cut over everyone: its proposer begins as sequencer.
    pub(crate) fn cut(&mut self, cut: &Cut, holder: MemberId, boot: u64) -> Result<(), Refusal> {
        if cut.follows != self.term() || !matches!(cut.scope, Scope::Everyone { .. }) {
            return Err(Refusal::OtherCut {
                term: self.term().0,
            });
        }
        if self.cuts.len() >= CUTS_LIMIT {
            self.cuts.pop_front();
        }
        self.cuts.push_back(cut.clone());
        self.sequencing = Some(Sequencing { holder, boot });
        Ok(())
    }

    pub(crate) fn write(&self, w: &mut Writer) {
        w.u32(self.last).count(self.tables.len());
        for (number, table) in &self.tables {
            w.u32(number.0);
            write_name(&table.name, w);
        }
    }

    pub(crate) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut versioned = Self {
            last: r.u32()?,
            ..Self::default()
        };
        for _ in 0..r.count(TABLES_LIMIT)? {
            let number = TableNumber(r.u32()?);
            if number.0 > versioned.last {
                return Err(Malformed::Invalid("number of a versioned table"));
            }
            let table = Table {
                name: read_name(r)?,
                phase: Phase::Counts,
                drained: BTreeSet::new(),
            };
            versioned.tables.insert(number, table);
        }
        Ok(versioned)
    }

    /// Whether there is more than [`Versioned::write`] writes.
    pub(crate) fn is_shared(&self) -> bool {
        let counts = |table: &Table| table.phase == Phase::Counts;
        !self.cuts.is_empty() || !self.tables.values().all(counts)
    }

    /// Writes what a group of several nodes with data has beside.
    pub(crate) fn write_shared(&self, w: &mut Writer) {
        let moving = |table: &&Table| table.phase != Phase::Counts;
        w.count(self.tables.values().filter(moving).count());
        for (number, table) in &self.tables {
            if !moving(&table) {
                continue;
            }
            w.u32(number.0).bool(table.phase == Phase::Ends);
            w.count(table.drained.len());
            for member in &table.drained {
                w.u64(member.get());
            }
        }
        w.count(self.cuts.len());
        for cut in &self.cuts {
            w.bytes(&cut.encode());
        }
        let sequencing = self.sequencing;
        w.u64(sequencing.map_or(0, |of| of.holder.get()));
        w.u64(sequencing.map_or(0, |of| of.boot));
    }

    pub(crate) fn read_shared(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let invalid = || Malformed::Invalid("versioned tables");
        for _ in 0..r.count(TABLES_LIMIT)? {
            let number = TableNumber(r.u32()?);
            let ends = r.bool()?;
            let table = self.tables.get_mut(&number).ok_or_else(invalid)?;
            table.phase = if ends { Phase::Ends } else { Phase::Begins };
            for _ in 0..r.count(NodeNumber::LAST.into())? {
                table.drained.insert(MemberId::read(r)?);
            }
        }
        for _ in 0..r.count(CUTS_LIMIT)? {
            let cut = Cut::decode(r.bytes(CUT_LIMIT)?)?;
            if !self.cuts.is_empty() && cut.follows != self.term() {
                return Err(invalid());
            }
            self.cuts.push_back(cut);
        }
        let (holder, boot) = (MemberId::new(r.u64()?), r.u64()?);
        self.sequencing = holder.map(|holder| Sequencing { holder, boot });
        Ok(())
    }
}

/// The longest cut, in bytes.
pub(crate) const CUT_LIMIT: usize = 16 * 1024;

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
    use std::collections::BTreeMap;

    use braid_versions::{CUTS_LIMIT, Cut, Scope, TableName, TableNumber, Term};

    use super::{Phase, Sequencing};
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

    const ONE: TableNumber = TableNumber(1);

    fn version() -> Command {
        Command::VersionTable { table: stock() }
    }

    fn unversion() -> Command {
        Command::UnversionTable { table: ONE }
    }

    fn drain(member: u64, ends: bool) -> Command {
        Command::DrainTable {
            table: ONE,
            member: id(member),
            ends,
        }
    }

    fn phase(state: &State) -> Option<Phase> {
        state.phase_of(ONE).map(|(phase, _)| phase)
    }

    /// A group of two members with data and a witness.
    fn of_two() -> State {
        let mut witness = new_member(2);
        witness.role = Role::Witness;
        let mut state = State::create(GROUP, "shop", new_member(1)).unwrap();
        assert!(apply(&mut state, Command::AddMember(witness)).is_ok());
        assert!(apply(&mut state, Command::AddMember(new_member(3))).is_ok());
        assert_eq!(
            apply(&mut state, version()),
            Err(Refusal::NotActive("n3".to_owned()))
        );
        assert!(apply(&mut state, Command::Activate { member: id(3) }).is_ok());
        state
    }

    #[test]
    fn a_node_with_data_joins_only_without_versioned_tables() {
        let mut state = State::create(GROUP, "shop", new_member(1)).unwrap();
        assert_eq!(apply(&mut state, version()), Ok(Value::Done));
        assert_eq!(phase(&state), Some(Phase::Counts));
        let join = || Command::AddMember(new_member(3));
        assert_eq!(apply(&mut state, join()), Err(Refusal::HasVersionedTables));
        assert_eq!(apply(&mut state, unversion()), Ok(Value::Done));
        assert!(apply(&mut state, join()).is_ok());
    }

    #[test]
    fn a_table_counts_once_all_with_data_have_drained_it() {
        let mut state = of_two();
        assert_eq!(apply(&mut state, version()), Ok(Value::Done));
        assert_eq!(phase(&state), Some(Phase::Begins));
        assert_eq!(
            apply(&mut state, drain(1, true)),
            Err(Refusal::NotVersioned(1))
        );
        assert_eq!(apply(&mut state, drain(1, false)), Ok(Value::Done));
        assert_eq!(apply(&mut state, drain(1, false)), Ok(Value::Done));
        assert_eq!(phase(&state), Some(Phase::Begins));
        assert_eq!(State::decode(&state.encode()).unwrap(), state);
        assert_eq!(apply(&mut state, drain(3, false)), Ok(Value::Done));
        assert_eq!(phase(&state), Some(Phase::Counts));
        assert_eq!(apply(&mut state, unversion()), Ok(Value::Done));
        assert_eq!(phase(&state), Some(Phase::Ends));
        assert_eq!(
            apply(&mut state, drain(3, false)),
            Err(Refusal::NotVersioned(1))
        );
        assert_eq!(apply(&mut state, drain(3, true)), Ok(Value::Done));
        assert_eq!(State::decode(&state.encode()).unwrap(), state);
        // The other one is gone: nobody waits for it.
        assert!(apply(&mut state, Command::RemoveMember { member: id(1) }).is_ok());
        assert_eq!(phase(&state), None);
    }

    #[test]
    fn cuts_follow_each_other() {
        let mut state = of_two();
        let cut = |term: u64| Command::CutVersions {
            cut: Cut {
                term: Term(term),
                follows: Term(term - 1),
                scope: Scope::Everyone {
                    ends: BTreeMap::new(),
                },
            },
            boot: term + 10,
        };
        assert_eq!(state.sequencing(), None);
        assert_eq!(
            apply(&mut state, cut(2)),
            Err(Refusal::OtherCut { term: 0 })
        );
        for term in 1..100 {
            assert_eq!(apply(&mut state, cut(term)), Ok(Value::Done));
        }
        // Of two equal ones, one counts.
        assert_eq!(
            apply(&mut state, cut(99)),
            Err(Refusal::OtherCut { term: 99 })
        );
        let (holder, boot) = (id(1), 109);
        assert_eq!(state.sequencing(), Some(Sequencing { holder, boot }));
        assert_eq!(state.cuts().count(), CUTS_LIMIT);
        assert_eq!(State::decode(&state.encode()).unwrap(), state);
    }
}
