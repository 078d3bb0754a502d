//! Bytes of the algorithm's messages and entries, in a codec of ours, and the checks that keep a
//! bad one from it.
//!
//! The library panics on messages that no correct peer sends, and its protobuf reader has no limit
//! on nesting. So neither sees bytes from the network: this module reads them, [`check`] compares
//! them with the log, and only then the algorithm gets the message.

use raft::eraftpb::{ConfState, Entry, EntryType, Message, MessageType, Snapshot};

use crate::command::ENTRY_LIMIT;
use crate::member::NodeNumber;
use braid_codec::{Malformed, Reader, Writer};

/// Terms and indexes stay below this, so that adding to one can't overflow.
pub(crate) const NUMBER_LIMIT: u64 = 1 << 62;
/// The longest snapshot, in bytes.
pub(crate) const SNAPSHOT_LIMIT: usize = 64 << 20;
/// The most entries in one message.
const ENTRIES_LIMIT: usize = 4096;

/// The kinds that go between members, with their tags.
const KINDS: [(u8, MessageType); 10] = [
    (1, MessageType::MsgAppend),
    (2, MessageType::MsgAppendResponse),
    (3, MessageType::MsgRequestVote),
    (4, MessageType::MsgRequestVoteResponse),
    (5, MessageType::MsgSnapshot),
    (6, MessageType::MsgHeartbeat),
    (7, MessageType::MsgHeartbeatResponse),
    (8, MessageType::MsgRequestPreVote),
    (9, MessageType::MsgRequestPreVoteResponse),
    (10, MessageType::MsgTimeoutNow),
];

/// The message's bytes; none for kinds that stay within a member.
pub(crate) fn encode(message: &Message) -> Option<Vec<u8>> {
    let kind = message.get_msg_type();
    let tag = KINDS.iter().find(|known| known.1 == kind)?.0;
    let mut w = Writer::new();
    w.u8(tag)
        .u64(message.term)
        .u64(message.log_term)
        .u64(message.index)
        .u64(message.commit)
        .u64(message.commit_term)
        .u64(message.request_snapshot)
        .bool(message.reject)
        .u64(message.reject_hint)
        .bytes(&message.context);
    w.count(message.entries.len());
    for entry in &message.entries {
        write_entry(entry, &mut w);
    }
    let snapshot = message.get_snapshot();
    w.bool(!snapshot.is_empty());
    if !snapshot.is_empty() {
        let metadata = snapshot.get_metadata();
        w.u64(metadata.index).u64(metadata.term);
        for members in [
            &metadata.get_conf_state().voters,
            &metadata.get_conf_state().learners,
        ] {
            w.count(members.len());
            for member in members {
                w.u64(*member);
            }
        }
        w.bytes(snapshot.get_data());
    }
    Some(w.done())
}

/// The message of these bytes, from one member to another.
pub(crate) fn decode(bytes: &[u8], from: u64, to: u64) -> Result<Message, Malformed> {
    let mut r = Reader::new(bytes, "message of the group");
    let tag = r.u8()?;
    let known = KINDS.iter().find(|known| known.0 == tag);
    let kind = known.ok_or_else(|| r.unknown(tag))?.1;
    let mut message = Message::default();
    message.set_msg_type(kind);
    message.from = from;
    message.to = to;
    message.term = number(&mut r)?;
    message.log_term = number(&mut r)?;
    message.index = number(&mut r)?;
    message.commit = number(&mut r)?;
    message.commit_term = number(&mut r)?;
    message.request_snapshot = number(&mut r)?;
    message.reject = r.bool()?;
    message.reject_hint = number(&mut r)?;
    message.context = r.bytes(64)?.to_vec().into();
    let entries = r.count(ENTRIES_LIMIT)?;
    let entries: Result<Vec<_>, _> = (0..entries).map(|_| read_entry(&mut r)).collect();
    message.set_entries(entries?.into());
    if r.bool()? {
        let mut snapshot = Snapshot::default();
        snapshot.mut_metadata().index = number(&mut r)?;
        snapshot.mut_metadata().term = number(&mut r)?;
        let mut configuration = ConfState::default();
        configuration.set_voters(members(&mut r)?);
        configuration.set_learners(members(&mut r)?);
        snapshot.mut_metadata().set_conf_state(configuration);
        snapshot.set_data(r.bytes(SNAPSHOT_LIMIT)?.to_vec().into());
        message.set_snapshot(snapshot);
    }
    r.end()?;
    check_alone(&message)?;
    Ok(message)
}

fn members(r: &mut Reader<'_>) -> Result<Vec<u64>, Malformed> {
    let count = r.count(NodeNumber::LAST.into())?;
    (0..count).map(|_| r.u64()).collect()
}

fn number(r: &mut Reader<'_>) -> Result<u64, Malformed> {
    let number = r.u64()?;
    if number < NUMBER_LIMIT {
        Ok(number)
    } else {
        Err(Malformed::Invalid("term or index"))
    }
}

/// Checks a message without the log.
fn check_alone(message: &Message) -> Result<(), Malformed> {
    if message.term == 0 {
        return Err(Malformed::Invalid("term"));
    }
    let kind = message.get_msg_type();
    if !message.entries.is_empty() && kind != MessageType::MsgAppend {
        return Err(Malformed::Invalid("message with entries"));
    }
    if message.get_snapshot().is_empty() == (kind == MessageType::MsgSnapshot) {
        return Err(Malformed::Invalid("message with a snapshot"));
    }
    let (mut index, mut term) = (message.index, message.log_term);
    for entry in &message.entries {
        index += 1;
        if entry.index != index || entry.term < term || entry.term > message.term {
            return Err(Malformed::Invalid("run of entries"));
        }
        term = entry.term;
    }
    let snapshot = message.get_snapshot().get_metadata();
    if snapshot.term > message.term {
        return Err(Malformed::Invalid("snapshot's term"));
    }
    Ok(())
}

/// Compares a message with a member's term and the end of its log, so that the algorithm has no
/// reason to panic.
pub(crate) fn check(message: &Message, term: u64, last: u64) -> Result<(), Malformed> {
    // Nobody is so far ahead; following would use up the terms.
    if message.term > term + (1 << 32) {
        return Err(Malformed::Invalid("term"));
    }
    // A member acknowledges no entry that the leader of its term does not have. What was meant for
    // an earlier term comes late, and may be of entries that this member has lost since.
    let acknowledges = message.get_msg_type() == MessageType::MsgAppendResponse && !message.reject;
    if acknowledges && message.term == term && message.index > last {
        return Err(Malformed::Invalid("index beyond the log"));
    }
    Ok(())
}

fn write_entry(entry: &Entry, w: &mut Writer) {
    w.u64(entry.index).u64(entry.term);
    w.bool(entry.get_entry_type() == EntryType::EntryConfChange);
    w.bytes(content(entry));
}

fn read_entry(r: &mut Reader<'_>) -> Result<Entry, Malformed> {
    let index = number(r)?;
    let term = number(r)?;
    let reconfigures = r.bool()?;
    let content = r.bytes(ENTRY_LIMIT)?.to_vec();
    let mut entry = self::entry(content, reconfigures);
    entry.index = index;
    entry.term = term;
    Ok(entry)
}

/// An entry's bytes for the durable log; its index and term are kept beside them.
pub(crate) fn encode_entry(entry: &Entry) -> Vec<u8> {
    let mut w = Writer::new();
    w.u8(1);
    write_entry(entry, &mut w);
    w.done()
}

pub(crate) fn decode_entry(bytes: &[u8]) -> Result<Entry, Malformed> {
    let mut r = Reader::versioned(bytes, "entry of the log", 1)?;
    let entry = read_entry(&mut r)?;
    r.end()?;
    Ok(entry)
}

/// An entry of a proposal. For one that changes the configuration the proposal is the context: the
/// library reads `data` as a change of its own when it is proposed, and the change that counts is
/// derived from the state.
pub(crate) fn entry(content: Vec<u8>, reconfigures: bool) -> Entry {
    let mut entry = Entry::default();
    if reconfigures {
        entry.set_entry_type(EntryType::EntryConfChange);
        entry.context = content.into();
    } else {
        entry.data = content.into();
    }
    entry
}

/// The proposal's bytes in an entry; empty for the one with which a leader begins.
pub(crate) fn content(entry: &Entry) -> &[u8] {
    if entry.get_entry_type() == EntryType::EntryConfChange {
        &entry.context
    } else {
        &entry.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_acknowledgement_of_an_earlier_term_is_no_bad_message() {
        let mut message = Message::default();
        message.set_msg_type(MessageType::MsgAppendResponse);
        (message.term, message.index) = (3, 9);
        assert_eq!(check(&message, 5, 4), Ok(()));
        let beyond = Malformed::Invalid("index beyond the log");
        assert_eq!(check(&message, 3, 4), Err(beyond));
        assert_eq!(check(&message, 3, 9), Ok(()));
    }
}
