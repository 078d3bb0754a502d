//! Entries of the log in words, for users: `braid.group_log`.
//!
//! A connection string is never among the words, as it may hold a password. Not for: errors, which
//! have their own words ([`crate::Refusal`]).

use crate::command::Command;
use crate::member::{MemberId, Role};
use crate::outcome::{Outcome, Value};
use crate::state::State;
use braid_routing::{Entry, MoveStep};

/// Says what an entry is about: a member, a lock, a sequence, an option or a lease.
///
/// Names of members are those of `state`, which has the entry applied.
#[must_use]
pub fn subject(command: &Command, state: &State) -> String {
    let name = |id: &MemberId| state.name_of(*id);
    match command {
        Command::AddMember(new) => match new.role {
            Role::Data => new.name.clone(),
            Role::Witness => format!("{}, a witness", new.name),
        },
        Command::Activate { member }
        | Command::RemoveMember { member }
        | Command::SetConnection { member, .. } => name(member),
        Command::SetState { member, state } => format!("{}: {}", name(member), state.word()),
        Command::SetReadOnly { member, read_only } => {
            format!(
                "{}: {}",
                name(member),
                if *read_only { "on" } else { "off" }
            )
        }
        Command::SetVersion {
            member,
            braid,
            postgres,
        } => format!("{}: Braid {braid}, PostgreSQL {postgres}", name(member)),
        Command::TakeLock { key, holder } => format!("{}, for {}", text(key), name(holder)),
        Command::ReleaseLock { key, .. } => text(key),
        Command::AssignBlock {
            sequence, holder, ..
        } => format!("{}, for {}", text(sequence), name(holder)),
        Command::SetOption { name, value } => match value {
            Some(value) => format!("{name} = {value}"),
            None => format!("{name}, no more"),
        },
        Command::GrantLease {
            name: lease,
            holder,
            ..
        } => {
            format!("{}, for {}", text(lease), name(holder))
        }
        Command::RenewLease { name, .. } | Command::ReleaseLease { name, .. } => text(name),
        Command::VersionTable { table } => table.to_string(),
        Command::UnversionTable { table } => format!("versioned table {table}"),
        Command::CutVersions { cut, .. } => format!("term {}", cut.term.0),
        Command::DrainTable {
            table,
            member,
            ends,
        } => {
            let what = if *ends { "last" } else { "first" };
            format!(
                "versioned table {table}: {what} writes, at {}",
                name(member)
            )
        }
        Command::Route(entry) => routing(entry),
        Command::Decide(decided) => {
            let rule = decided.rule();
            format!(
                "{} for {}: spread {}, {} tenants",
                if decided.adds { "rule" } else { "advice" },
                decided.table,
                rule.map_or(1, |rule| rule.spread.get()),
                rule.map_or(0, |rule| rule.findings.len())
            )
        }
    }
}

fn routing(entry: &Entry) -> String {
    match entry {
        Entry::Route {
            table,
            shards,
            sets,
            ..
        } => format!(
            "route {table}: {} shards on {} node sets",
            shards.get(),
            sets.len()
        ),
        Entry::Open { table } => format!("open {table}"),
        Entry::Shut { table } => format!("shut {table}"),
        Entry::AddSet { table, set } => {
            format!("{table}: node set {}, {} nodes", set.id.0, set.nodes.len())
        }
        Entry::Move { table, shard, step } => {
            let step = match step {
                MoveStep::Begin(to) => format!("begins to move to node set {}", to.0),
                MoveStep::Switch => "is at its new node set".to_owned(),
                MoveStep::Finish => "has moved".to_owned(),
                MoveStep::Cancel => "stays".to_owned(),
            };
            format!("{table}: shard {shard} {step}")
        }
        Entry::Unroute { table } => format!("unroute {table}"),
        Entry::Close { .. } => "close".to_owned(),
        Entry::Rule {
            table,
            spread,
            tenants,
            ..
        } => format!(
            "rule for {table}: spread {}, {} tenants",
            spread.get(),
            tenants.len()
        ),
    }
}

/// Says what an entry came to: the numbers that it gave, `done`, or why it was refused.
#[must_use]
pub fn result(outcome: &Outcome) -> String {
    match outcome {
        Ok(Value::Done) => "done".to_owned(),
        Ok(Value::Member { number, .. }) => format!("node number {}", number.get()),
        Ok(Value::Block { start, size }) => {
            format!(
                "numbers {start} to {}",
                start.saturating_add(*size).saturating_sub(1)
            )
        }
        Ok(Value::Lock { .. } | Value::Lease { .. }) => "granted".to_owned(),
        Err(refusal) => format!("refused: {refusal}"),
    }
}

fn text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).into_owned()
}

#[cfg(test)]
mod tests {
    use super::{result, subject};
    use crate::cluster::{GROUP, id, new_member};
    use crate::{Command, ConnectionString, MemberState, Proposal, ProposalId, Role, State};

    /// Applies commands one after the other; what each is about, and what it came to.
    fn told(commands: Vec<Command>) -> Vec<String> {
        let mut state = State::create(GROUP, "shop", new_member(1)).unwrap();
        (2..)
            .zip(commands)
            .map(|(index, command)| {
                let proposal = Proposal {
                    id: ProposalId {
                        member: id(1),
                        boot: 1,
                        counter: index,
                    },
                    command,
                };
                let outcome = state.apply(index, 1, &proposal);
                let command = &proposal.command;
                format!(
                    "{}: {}: {}",
                    command.name(),
                    subject(command, &state),
                    result(&outcome)
                )
            })
            .collect()
    }

    #[test]
    fn entries_are_told_in_words() {
        let secret = || ConnectionString::new("host=n2 password=secret".to_owned()).unwrap();
        let mut second = new_member(2);
        second.connection = secret();
        let mut third = new_member(3);
        third.role = Role::Witness;
        let block = |size| Command::AssignBlock {
            sequence: b"item_id_seq".to_vec(),
            holder: id(2),
            size,
            at_least: 1,
        };
        let words = told(vec![
            Command::AddMember(second),
            Command::AddMember(third),
            Command::Activate { member: id(2) },
            Command::SetConnection {
                member: id(2),
                connection: secret(),
            },
            Command::SetState {
                member: id(2),
                state: MemberState::Maintenance,
            },
            Command::SetReadOnly {
                member: id(2),
                read_only: true,
            },
            block(100),
            block(0),
            Command::SetOption {
                name: "sequence_kind".to_owned(),
                value: Some("step".to_owned()),
            },
            Command::SetOption {
                name: "sequence_kind".to_owned(),
                value: None,
            },
            Command::RemoveMember { member: id(2) },
            Command::RemoveMember { member: id(2) },
        ]);
        assert_eq!(
            words,
            [
                "add member: n2: node number 2",
                "add member: n3, a witness: node number 3",
                "activate member: n2: done",
                "set connection: n2: done",
                "set state: n2: in maintenance: done",
                "set read only: n2: on: done",
                "assign block: item_id_seq, for n2: numbers 1 to 100",
                "assign block: item_id_seq, for n2: refused: the sequence has no block of this size",
                "set option: sequence_kind = step: done",
                "set option: sequence_kind, no more: done",
                "remove member: n2: done",
                "remove member: n2: refused: node \"n2\" was removed from the group",
            ]
        );
    }
}
