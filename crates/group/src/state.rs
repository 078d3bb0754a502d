//! The agreed state of a group: what all entries up to an index have made of it.
//!
//! Deterministic: equal entries give equal states and equal outcomes at all members, so `apply`
//! knows no clock, no random number and nothing of the member that it runs at. A snapshot is the
//! whole state in a versioned codec.
//!
//! Invariants: member numbers, node numbers and blocks are given once; a lock has one holder; a
//! proposal takes effect once, and a repeat of it gets the first answer, or a refusal where that is
//! not kept any more. Who receives the log and who votes is derived from the members
//! ([`State::configuration`]), so the algorithm's configuration can't differ.
//!
//! Not for: who leads, what is not committed yet, when a lease ends (`lease.rs`).

use std::collections::{BTreeMap, BTreeSet};

use crate::command::{
    Command, KEY_LIMIT, LEASE_LIMIT, Proposal, ProposalId, Token, VALUE_LIMIT, key,
};
use crate::member::{
    GroupId, Member, MemberId, MemberState, NAME_LIMIT, NewMember, NodeNumber, Role, Version,
};
use crate::outcome::{Outcome, Refusal, Value, read_outcome, write_outcome};
use crate::versioned::{Phase, Sequencing, Versioned};
use braid_codec::{Malformed, Reader, Writer};
use braid_routing::{NodeId, Routing};
use braid_versions::{Cut, TableName, TableNumber};

/// Format 2 has sections behind the answers. It is written only if there is one, so that a Braid
/// that does not know of sections reads the state as long as it has none.
const FORMAT: u8 = 2;
const WITHOUT_SECTIONS: u8 = 1;
/// The longest section, in bytes, and how many there can be.
const SECTION_LIMIT: usize = 1 << 30;
const SECTIONS_LIMIT: usize = 64;
/// The section of routing.
const ROUTING: u16 = 48;
/// The section of versioned tables.
const VERSIONED: u16 = 56;
/// The section of what groups of several nodes with data have beside; after that one.
const SHARED_VERSIONS: u16 = 57;
/// How many answers are kept for each member; no member has more proposals under way.
pub(crate) const ANSWERS: usize = 64;
/// How many locks, leases, options and sequences a group can have, each.
pub const TABLE_LIMIT: usize = 65_536;
/// The last number of a sequence.
const LAST_NUMBER: u64 = i64::MAX.unsigned_abs();

/// A lock that is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lock {
    /// The member that holds it.
    pub holder: MemberId,
    /// The proposal that took it.
    pub proposal: ProposalId,
    /// The grant.
    pub token: Token,
}

/// A lease's newest grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The member that holds it; none once it is released or the holder is removed.
    pub holder: Option<MemberId>,
    /// The grant.
    pub token: Token,
    /// How long the lease runs after each renewal, in microseconds.
    pub duration: u64,
    /// How long holders of earlier grants may still act when this one is applied, in microseconds.
    pub wait: u64,
}

/// A member's newest answers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Answers {
    boot: u64,
    newest: u64,
    kept: BTreeMap<u64, Outcome>,
}

/// The agreed state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    id: GroupId,
    name: String,
    index: u64,
    term: u64,
    /// The newest version of Braid that an entry so far needed.
    needs: Version,
    next_member: MemberId,
    next_number: u16,
    members: BTreeMap<MemberId, Member>,
    locks: BTreeMap<Vec<u8>, Lock>,
    sequences: BTreeMap<Vec<u8>, u64>,
    options: BTreeMap<String, String>,
    leases: BTreeMap<Vec<u8>, Lease>,
    answers: BTreeMap<MemberId, Answers>,
    routing: Routing,
    versioned: Versioned,
}

impl State {
    /// The state of a new group: its first member is active. Stands for the log's first entry, of
    /// index 1 and term 1.
    ///
    /// # Errors
    /// If a name is empty or too long.
    pub fn create(id: GroupId, name: &str, first: NewMember) -> Result<Self, Malformed> {
        for name in [name, &first.name] {
            if name.is_empty() || name.len() > NAME_LIMIT || name.contains('\0') {
                return Err(Malformed::Invalid("name"));
            }
        }
        let number = NodeNumber::new(1).ok_or(Malformed::Invalid("node number"))?;
        let member = Member {
            id: MemberId::FIRST,
            number,
            about: first,
            state: MemberState::Active,
            read_only: false,
            since: 1,
        };
        Ok(Self {
            id,
            name: name.to_owned(),
            index: 1,
            term: 1,
            needs: Version::new(0, 0, 0),
            next_member: MemberId::FIRST.next(),
            next_number: 2,
            members: BTreeMap::from([(MemberId::FIRST, member)]),
            locks: BTreeMap::new(),
            sequences: BTreeMap::new(),
            options: BTreeMap::new(),
            leases: BTreeMap::new(),
            answers: BTreeMap::new(),
            routing: Routing::new(),
            versioned: Versioned::default(),
        })
    }

    /// The group's identity.
    #[must_use]
    pub const fn id(&self) -> GroupId {
        self.id
    }

    /// The group's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The index of the newest entry that is in the state.
    #[must_use]
    pub const fn index(&self) -> u64 {
        self.index
    }

    /// The term of that entry.
    #[must_use]
    pub const fn term(&self) -> u64 {
        self.term
    }

    /// All members that there are and were, by number.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// A member, removed ones included.
    #[must_use]
    pub fn member(&self, id: MemberId) -> Option<&Member> {
        self.members.get(&id)
    }

    /// The member of this name that is not removed.
    #[must_use]
    pub fn member_named(&self, name: &str) -> Option<&Member> {
        self.present().find(|member| member.about.name == name)
    }

    /// The member's name, or its number in words.
    #[must_use]
    pub fn name_of(&self, id: MemberId) -> String {
        self.members.get(&id).map_or_else(
            || format!("member {id}"),
            |member| member.about.name.clone(),
        )
    }

    /// Whether a number was given to no member yet.
    #[must_use]
    pub fn is_ahead(&self, id: MemberId) -> bool {
        id >= self.next_member
    }

    /// The lock on a key.
    #[must_use]
    pub fn lock(&self, key: &[u8]) -> Option<&Lock> {
        self.locks.get(key)
    }

    /// All locks that are held.
    pub fn locks(&self) -> impl Iterator<Item = (&[u8], &Lock)> {
        self.locks.iter().map(|(key, lock)| (key.as_slice(), lock))
    }

    /// The first number of a sequence that is in no block.
    #[must_use]
    pub fn next_number_of(&self, sequence: &[u8]) -> u64 {
        self.sequences.get(sequence).copied().unwrap_or(1)
    }

    /// The value of an option.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<&str> {
        self.options.get(name).map(String::as_str)
    }

    /// All options that are set.
    pub fn options(&self) -> impl Iterator<Item = (&str, &str)> {
        self.options
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Where rows of routed tables live.
    #[must_use]
    pub const fn routing(&self) -> &Routing {
        &self.routing
    }

    /// The newest grant of a lease.
    #[must_use]
    pub fn lease(&self, name: &[u8]) -> Option<&Lease> {
        self.leases.get(name)
    }

    /// All leases that were ever granted.
    pub fn leases(&self) -> impl Iterator<Item = (&[u8], &Lease)> {
        self.leases
            .iter()
            .map(|(name, lease)| (name.as_slice(), lease))
    }

    /// The versioned tables, by number.
    pub fn versioned_tables(&self) -> impl Iterator<Item = (TableNumber, &TableName)> {
        self.versioned.tables()
    }

    /// The phase of a versioned table, and the members that have drained it in this phase.
    #[must_use]
    pub fn phase_of(&self, table: TableNumber) -> Option<(Phase, &BTreeSet<MemberId>)> {
        self.versioned.phase(table)
    }

    /// The last decisions about versioned writes, in their order.
    pub fn cuts(&self) -> impl Iterator<Item = &Cut> {
        self.versioned.cuts()
    }

    /// The member with the sequencer of table versions.
    #[must_use]
    pub fn sequencing(&self) -> Option<Sequencing> {
        self.versioned.sequencing()
    }

    /// The members with a vote, and those that only receive the log; by number.
    #[must_use]
    pub fn configuration(&self) -> (Vec<u64>, Vec<u64>) {
        let of = |wanted: fn(MemberState) -> bool| {
            let members = self.members.values();
            members
                .filter(|m| wanted(m.state))
                .map(|m| m.id.get())
                .collect()
        };
        (
            of(MemberState::votes),
            of(|state| state == MemberState::Joining),
        )
    }

    /// The members whose Braid is older than `version`.
    pub fn lacking(&self, version: Version) -> impl Iterator<Item = &Member> {
        self.present()
            .filter(move |member| member.about.braid < version)
    }

    /// The answer to a proposal, while it is kept.
    #[must_use]
    pub fn answer(&self, id: ProposalId) -> Option<&Outcome> {
        let answers = self.answers.get(&id.member)?;
        (answers.boot == id.boot).then(|| answers.kept.get(&id.counter))?
    }

    fn present(&self) -> impl Iterator<Item = &Member> {
        self.members
            .values()
            .filter(|member| member.state != MemberState::Removed)
    }

    /// Notes an entry without content, with which each leader begins.
    pub fn pass(&mut self, index: u64, term: u64) {
        self.index = index;
        self.term = term;
    }

    /// Applies the entry of this index and term.
    ///
    /// # Errors
    /// The refusal, if the entry has no effect. All members get the same one.
    pub fn apply(&mut self, index: u64, term: u64, proposal: &Proposal) -> Outcome {
        self.pass(index, term);
        match self.repeated(proposal.id) {
            Some(Repeat::Answered(outcome)) => return outcome,
            // The answer is not kept: the first proposal's may be, under the same counter.
            Some(Repeat::Refused(refusal)) => return Err(refusal),
            None => {}
        }
        let outcome = self.take_effect(&proposal.command, proposal.id, Token { term, index });
        let answers = self.answers.entry(proposal.id.member).or_default();
        if answers.boot != proposal.id.boot {
            *answers = Answers {
                boot: proposal.id.boot,
                ..Answers::default()
            };
        }
        answers.newest = answers.newest.max(proposal.id.counter);
        answers.kept.insert(proposal.id.counter, outcome.clone());
        while answers.kept.len() > ANSWERS {
            answers.kept.pop_first();
        }
        outcome
    }

    /// Forgets what keeps a rule, so that a test sees it broken.
    #[cfg(test)]
    pub(crate) fn break_rule(&mut self, mutation: crate::mutation::Mutation, proposal: &Proposal) {
        use crate::mutation::Mutation;
        match (mutation, &proposal.command) {
            (Mutation::ApplyRepeats, _) => {
                self.answers.remove(&proposal.id.member);
            }
            (Mutation::LockTwice, Command::TakeLock { key, .. }) => {
                self.locks.remove(key);
            }
            (Mutation::BlockTwice, Command::AssignBlock { sequence, .. }) => {
                self.sequences.remove(sequence);
            }
            _ => {}
        }
    }

    fn repeated(&self, id: ProposalId) -> Option<Repeat> {
        if !self.members.contains_key(&id.member) {
            return Some(Repeat::Refused(Refusal::NoSuchMember(id.member)));
        }
        let answers = self.answers.get(&id.member)?;
        if id.boot < answers.boot {
            return Some(Repeat::Refused(Refusal::Superseded));
        }
        if id.boot > answers.boot {
            return None;
        }
        if let Some(outcome) = answers.kept.get(&id.counter) {
            return Some(Repeat::Answered(outcome.clone()));
        }
        // Every counter above the window's start is kept once it is applied.
        let oldest = answers.newest.saturating_sub(ANSWERS as u64);
        (id.counter <= oldest).then_some(Repeat::Refused(Refusal::Forgotten))
    }

    fn take_effect(&mut self, command: &Command, id: ProposalId, token: Token) -> Outcome {
        let needs = command.since();
        if let Some(member) = self.lacking(needs).next() {
            return Err(Refusal::KindTooNew {
                needs,
                lacking: member.about.name.clone(),
            });
        }
        self.needs = self.needs.max(needs);
        // A removed member's proposals that were under way have no effect, but for its own
        // removal's repeats.
        self.present_member(id.member)?;
        match command {
            Command::AddMember(new) => self.add(new, token.index),
            Command::Activate { member } => self.activate(*member),
            Command::SetState { member, state } => {
                let from = self.present_member(*member)?.state;
                if !from.votes() || !state.votes() {
                    return Err(Refusal::State { from, to: *state });
                }
                if *state == MemberState::Leaving {
                    self.check_no_home(*member)?;
                }
                self.change(*member, |m| m.state = *state)
            }
            Command::SetReadOnly { member, read_only } => {
                self.present_member(*member)?;
                self.change(*member, |m| m.read_only = *read_only)
            }
            Command::SetConnection { member, connection } => {
                self.present_member(*member)?;
                self.change(*member, |m| m.about.connection = connection.clone())
            }
            Command::SetVersion {
                member,
                braid,
                postgres,
            } => {
                self.present_member(*member)?;
                self.old_enough(*braid)?;
                self.change(*member, |m| {
                    m.about.braid = *braid;
                    m.about.postgres = *postgres;
                })
            }
            Command::RemoveMember { member } => self.remove(*member),
            Command::TakeLock { key, holder } => self.take_lock(key, *holder, id, token),
            Command::ReleaseLock { key, token } => {
                if self.locks.get(key).is_none_or(|lock| lock.token != *token) {
                    return Err(Refusal::LockNotHeld);
                }
                self.locks.remove(key);
                Ok(Value::Done)
            }
            Command::AssignBlock {
                sequence,
                holder,
                size,
                at_least,
            } => {
                self.present_member(*holder)?;
                self.assign(sequence, *size, *at_least)
            }
            Command::SetOption { name, value } => self.set_option(name, value.as_deref()),
            Command::GrantLease {
                name,
                holder,
                duration,
                instead_of,
            } => self.grant(name, *holder, *duration, *instead_of, token),
            Command::Route(entry) => self.route(entry),
            Command::Decide(decided) => match self.routing.table(&decided.table) {
                Some(_) => Ok(Value::Done),
                None => Err(Refusal::Routing(braid_routing::Refusal::NotRouted)),
            },
            Command::RenewLease {
                name,
                token,
                acting,
            } => {
                let lease = self.granted(name, *token)?;
                if *acting {
                    lease.wait = 0;
                }
                Ok(Value::Done)
            }
            Command::ReleaseLease { name, token } => {
                let lease = self.granted(name, *token)?;
                // Its holder has stopped; holders before it may not have, if it never came to act.
                lease.holder = None;
                lease.duration = 0;
                Ok(Value::Done)
            }
            Command::VersionTable { .. }
            | Command::UnversionTable { .. }
            | Command::CutVersions { .. }
            | Command::DrainTable { .. } => self.change_versions(command, id),
        }
    }

    fn change_versions(&mut self, command: &Command, id: ProposalId) -> Outcome {
        match command {
            Command::VersionTable { table } => {
                let state = |member: &&Member| member.state != MemberState::Active;
                if let Some(member) = self.with_data().find(state) {
                    return Err(Refusal::NotActive(member.about.name.clone()));
                }
                let phase = if self.is_alone() {
                    Phase::Counts
                } else {
                    Phase::Begins
                };
                self.versioned.add(table, phase)?;
            }
            Command::UnversionTable { table } => {
                let alone = self.is_alone();
                self.versioned.remove(*table, alone)?;
            }
            Command::CutVersions { cut, boot } => self.versioned.cut(cut, id.member, *boot)?,
            Command::DrainTable {
                table,
                member,
                ends,
            } => {
                self.present_member(*member)?;
                self.versioned.drain(*table, *member, *ends)?;
                self.settle_versions();
            }
            _ => {}
        }
        Ok(Value::Done)
    }

    fn activate(&mut self, member: MemberId) -> Outcome {
        let from = self.present_member(member)?.state;
        if from != MemberState::Joining {
            let to = MemberState::Active;
            return Err(Refusal::State { from, to });
        }
        self.change(member, |member| member.state = MemberState::Active)
    }

    fn route(&mut self, entry: &braid_routing::Entry) -> Outcome {
        match self.routing.apply(entry) {
            Ok(_) => Ok(Value::Done),
            Err(refusal) => Err(Refusal::Routing(refusal)),
        }
    }

    /// Checks that no rows are on this member alone.
    fn check_no_home(&self, id: MemberId) -> Result<(), Refusal> {
        match self.routing.only_home(NodeId(id.get())) {
            None => Ok(()),
            Some(table) => Err(Refusal::HasShards {
                table: table.to_string(),
            }),
        }
    }

    /// The members with data, joining ones included.
    pub fn with_data(&self) -> impl Iterator<Item = &Member> {
        self.present()
            .filter(|member| member.about.role == Role::Data)
    }

    /// Whether no versions are shipped: one member has data, and no sequencer was agreed on.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.with_data().count() < 2 && self.versioned.sequencing().is_none()
    }

    fn settle_versions(&mut self) {
        let with_data = self.with_data().map(|member| member.id).collect();
        self.versioned.settle(&with_data);
    }

    fn present_member(&self, id: MemberId) -> Result<&Member, Refusal> {
        match self.members.get(&id) {
            None => Err(Refusal::NoSuchMember(id)),
            Some(member) if member.state == MemberState::Removed => {
                Err(Refusal::Removed(member.about.name.clone()))
            }
            Some(member) => Ok(member),
        }
    }

    fn change(&mut self, id: MemberId, change: impl FnOnce(&mut Member)) -> Outcome {
        match self.members.get_mut(&id) {
            Some(member) => {
                change(member);
                Ok(Value::Done)
            }
            None => Err(Refusal::NoSuchMember(id)),
        }
    }

    fn old_enough(&self, has: Version) -> Result<(), Refusal> {
        let needs = self.needs;
        if has < needs {
            return Err(Refusal::TooOld { has, needs });
        }
        Ok(())
    }

    fn add(&mut self, new: &NewMember, index: u64) -> Outcome {
        self.old_enough(new.braid)?;
        // A group's only node with data may have been removed.
        if new.role == Role::Data && !self.versioned.is_empty() && self.with_data().next().is_some()
        {
            return Err(Refusal::HasVersionedTables);
        }
        for member in self.present() {
            if member.about.name == new.name {
                return Err(Refusal::NameTaken(new.name.clone()));
            }
            if member.about.identity.node == new.identity.node {
                return Err(Refusal::IdentityTaken(member.about.name.clone()));
            }
        }
        let number = NodeNumber::new(self.next_number).ok_or(Refusal::NumbersExhausted)?;
        let id = self.next_member;
        self.next_number += 1;
        self.next_member = id.next();
        let member = Member {
            id,
            number,
            about: new.clone(),
            state: MemberState::Joining,
            read_only: false,
            since: index,
        };
        self.members.insert(id, member);
        Ok(Value::Member { id, number })
    }

    fn remove(&mut self, id: MemberId) -> Outcome {
        let state = self.present_member(id)?.state;
        if state.votes() && self.configuration().0.len() == 1 {
            return Err(Refusal::LastVoter);
        }
        self.locks.retain(|_, lock| lock.holder != id);
        for lease in self.leases.values_mut() {
            // The removed member may act on until its lease is over, so the next holder waits as
            // ever.
            if lease.holder == Some(id) {
                lease.holder = None;
            }
        }
        let outcome = self.change(id, |member| member.state = MemberState::Removed);
        self.settle_versions();
        outcome
    }

    fn take_lock(&mut self, key: &[u8], holder: MemberId, id: ProposalId, token: Token) -> Outcome {
        self.present_member(holder)?;
        if let Some(lock) = self.locks.get(key) {
            return Err(Refusal::LockHeld {
                holder: self.name_of(lock.holder),
                token: lock.token,
            });
        }
        room(self.locks.len(), false)?;
        let lock = Lock {
            holder,
            proposal: id,
            token,
        };
        self.locks.insert(key.to_vec(), lock);
        Ok(Value::Lock { token })
    }

    fn assign(&mut self, sequence: &[u8], size: u64, at_least: u64) -> Outcome {
        let start = self.next_number_of(sequence).max(at_least);
        // The number after the block must be one too, or at most one beyond the last.
        let Some(next) = start
            .checked_add(size)
            .filter(|next| size > 0 && *next <= LAST_NUMBER + 1)
        else {
            return Err(Refusal::BlockSize);
        };
        room(self.sequences.len(), self.sequences.contains_key(sequence))?;
        self.sequences.insert(sequence.to_vec(), next);
        Ok(Value::Block { start, size })
    }

    fn set_option(&mut self, name: &str, value: Option<&str>) -> Outcome {
        if let Some(value) = value {
            room(self.options.len(), self.options.contains_key(name))?;
            self.options.insert(name.to_owned(), value.to_owned());
        } else {
            self.options.remove(name);
        }
        Ok(Value::Done)
    }

    fn grant(
        &mut self,
        name: &[u8],
        holder: MemberId,
        duration: u64,
        instead_of: Option<Token>,
        token: Token,
    ) -> Outcome {
        self.present_member(holder)?;
        if duration == 0 || duration > LEASE_LIMIT {
            return Err(Refusal::LeaseDuration);
        }
        let before = self.leases.get(name);
        let current = before
            .filter(|lease| lease.duration > 0)
            .map(|lease| lease.token);
        if current != instead_of {
            return Err(Refusal::LeaseChanged);
        }
        // A grant that never came to act leaves the leases before it to be waited for.
        let wait = before.map_or(0, |lease| lease.wait.max(lease.duration));
        room(self.leases.len(), before.is_some())?;
        let lease = Lease {
            holder: Some(holder),
            token,
            duration,
            wait,
        };
        self.leases.insert(name.to_vec(), lease);
        Ok(Value::Lease { token, wait })
    }

    fn granted(&mut self, name: &[u8], token: Token) -> Result<&mut Lease, Refusal> {
        match self.leases.get_mut(name) {
            Some(lease) if lease.token == token && lease.holder.is_some() => Ok(lease),
            _ => Err(Refusal::LeaseLost),
        }
    }

    /// The state's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        let sections = self.sections();
        let format = if sections.is_empty() {
            WITHOUT_SECTIONS
        } else {
            FORMAT
        };
        w.u8(format).raw(&self.id.0).text(&self.name);
        w.u64(self.index).u64(self.term);
        self.needs.write(&mut w);
        w.u64(self.next_member.get()).u16(self.next_number);
        w.count(self.members.len());
        for member in self.members.values() {
            member.write(&mut w);
        }
        w.count(self.locks.len());
        for (key, lock) in &self.locks {
            w.bytes(key).u64(lock.holder.get());
            write_proposal(lock.proposal, &mut w);
            lock.token.write(&mut w);
        }
        w.count(self.sequences.len());
        for (sequence, next) in &self.sequences {
            w.bytes(sequence).u64(*next);
        }
        w.count(self.options.len());
        for (name, value) in &self.options {
            w.text(name).text(value);
        }
        w.count(self.leases.len());
        for (name, lease) in &self.leases {
            w.bytes(name).u64(lease.holder.map_or(0, MemberId::get));
            lease.token.write(&mut w);
            w.u64(lease.duration).u64(lease.wait);
        }
        w.count(self.answers.len());
        for (member, answers) in &self.answers {
            w.u64(member.get()).u64(answers.boot).u64(answers.newest);
            w.count(answers.kept.len());
            for (counter, outcome) in &answers.kept {
                w.u64(*counter);
                write_outcome(outcome, &mut w);
            }
        }
        if format == FORMAT {
            w.count(sections.len());
            for (tag, bytes) in sections {
                w.u16(tag).bytes(&bytes);
            }
        }
        w.done()
    }

    /// The parts that only some groups have, each with its tag.
    fn sections(&self) -> Vec<(u16, Vec<u8>)> {
        let mut sections = Vec::new();
        if self.routing != Routing::new() {
            sections.push((ROUTING, self.routing.encode()));
        }
        if self.versioned != Versioned::default() {
            let mut w = Writer::new();
            self.versioned.write(&mut w);
            sections.push((VERSIONED, w.done()));
        }
        if self.versioned.is_shared() {
            let mut w = Writer::new();
            self.versioned.write_shared(&mut w);
            sections.push((SHARED_VERSIONS, w.done()));
        }
        sections
    }

    fn read_section(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let tag = r.u16()?;
        let bytes = r.bytes(SECTION_LIMIT)?;
        match tag {
            ROUTING => self.routing = Routing::decode(bytes)?,
            VERSIONED => {
                let mut section = Reader::new(bytes, "versioned tables");
                self.versioned = Versioned::read(&mut section)?;
                section.end()?;
            }
            SHARED_VERSIONS => {
                let mut section = Reader::new(bytes, "versions of a group");
                self.versioned.read_shared(&mut section)?;
                section.end()?;
            }
            other => return Err(r.unknown(other)),
        }
        Ok(())
    }

    /// The state of these bytes.
    ///
    /// # Errors
    /// [`Malformed::UnknownVersion`] if a newer Braid wrote them; others for bad bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::versioned(bytes, "snapshot of the group", FORMAT)?;
        // `versioned` has read it.
        let format = bytes.first().copied().unwrap_or(FORMAT);
        let mut state = Self {
            id: GroupId(r.array()?),
            name: r.text(NAME_LIMIT)?,
            index: r.u64()?,
            term: r.u64()?,
            needs: Version::read(&mut r)?,
            next_member: MemberId::read(&mut r)?,
            next_number: r.u16()?,
            members: BTreeMap::new(),
            locks: BTreeMap::new(),
            sequences: BTreeMap::new(),
            options: BTreeMap::new(),
            leases: BTreeMap::new(),
            answers: BTreeMap::new(),
            routing: Routing::new(),
            versioned: Versioned::default(),
        };
        for _ in 0..r.count(NodeNumber::LAST.into())? {
            let member = Member::read(&mut r)?;
            if member.id >= state.next_member || member.number.get() >= state.next_number {
                return Err(Malformed::Invalid("member number"));
            }
            state.members.insert(member.id, member);
        }
        for _ in 0..r.count(TABLE_LIMIT)? {
            let key = key(&mut r)?;
            let lock = Lock {
                holder: MemberId::read(&mut r)?,
                proposal: read_proposal(&mut r)?,
                token: Token::read(&mut r)?,
            };
            state.locks.insert(key, lock);
        }
        for _ in 0..r.count(TABLE_LIMIT)? {
            state.sequences.insert(key(&mut r)?, r.u64()?);
        }
        for _ in 0..r.count(TABLE_LIMIT)? {
            state
                .options
                .insert(r.text(KEY_LIMIT)?, r.text(VALUE_LIMIT)?);
        }
        for _ in 0..r.count(TABLE_LIMIT)? {
            let name = key(&mut r)?;
            let lease = Lease {
                holder: MemberId::new(r.u64()?),
                token: Token::read(&mut r)?,
                duration: r.u64()?,
                wait: r.u64()?,
            };
            state.leases.insert(name, lease);
        }
        for _ in 0..r.count(NodeNumber::LAST.into())? {
            let member = MemberId::read(&mut r)?;
            let mut answers = Answers {
                boot: r.u64()?,
                newest: r.u64()?,
                kept: BTreeMap::new(),
            };
            for _ in 0..r.count(ANSWERS)? {
                answers.kept.insert(r.u64()?, read_outcome(&mut r)?);
            }
            state.answers.insert(member, answers);
        }
        if format == FORMAT {
            for _ in 0..r.count(SECTIONS_LIMIT)? {
                state.read_section(&mut r)?;
            }
        }
        r.end()?;
        Ok(state)
    }
}

enum Repeat {
    Answered(Outcome),
    Refused(Refusal),
}

fn room(len: usize, present: bool) -> Result<(), Refusal> {
    if present || len < TABLE_LIMIT {
        return Ok(());
    }
    Err(Refusal::Full {
        limit: TABLE_LIMIT as u64,
    })
}

fn write_proposal(id: ProposalId, w: &mut Writer) {
    w.u64(id.member.get()).u64(id.boot).u64(id.counter);
}

fn read_proposal(r: &mut Reader<'_>) -> Result<ProposalId, Malformed> {
    Ok(ProposalId {
        member: MemberId::read(r)?,
        boot: r.u64()?,
        counter: r.u64()?,
    })
}
