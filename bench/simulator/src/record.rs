//! Traces from recorded frames of a provider's output plugin.

use braid_gir::{Operation as Kind, Reader, Record};

use crate::workload::{Change, Operation, Transaction};

/// Returns the transactions of these frames, each of which is a line of hexadecimal digits, as
/// `pg_logical_slot_peek_binary_changes` returns them.
///
/// # Errors
/// A message with the line that is no frame, or that has something that a trace can't have:
/// truncates, and transactions that come before they have committed, or were prepared.
pub fn transactions(frames: impl Iterator<Item = String>) -> Result<Vec<Transaction>, String> {
    let mut trace = Vec::new();
    let mut in_hand: Option<Transaction> = None;
    for (number, line) in frames.enumerate() {
        let wrong = |what: &str| format!("line {}: {what}", number + 1);
        let frame = bytes(&line).ok_or_else(|| wrong("not hexadecimal"))?;
        let mut reader = Reader::new(&frame);
        while let Some((tag, body)) = reader
            .next_raw()
            .map_err(|error| wrong(&error.to_string()))?
        {
            let record = Record::read(tag, body).map_err(|error| wrong(&error.to_string()))?;
            if matches!(record, Record::Begin(_)) {
                in_hand = Some(Transaction::default());
            }
            if let Some(transaction) = in_hand.as_mut() {
                let size = u32::try_from(5 + body.len()).unwrap_or(u32::MAX);
                transaction.bytes = transaction.bytes.saturating_add(size);
            }
            match record {
                Record::Change(change) => {
                    let transaction = in_hand
                        .as_mut()
                        .ok_or_else(|| wrong("a change outside of a transaction"))?;
                    transaction.changes.push(Change {
                        table: change.header.schema.0,
                        operation: match change.operation {
                            Kind::Insert => Operation::Insert,
                            Kind::Update => Operation::Update,
                            Kind::Delete => Operation::Delete,
                        },
                        barrier: change.header.barrier,
                        hashes: change.header.writeset.hashes().collect(),
                    });
                }
                Record::Commit(_) => trace.extend(in_hand.take()),
                Record::StreamHeader(_)
                | Record::Schema(_)
                | Record::Begin(_)
                | Record::Message(_) => {}
                _ => return Err(wrong("a record that no trace has")),
            }
        }
    }
    Ok(trace)
}

fn bytes(digits: &str) -> Option<Vec<u8>> {
    let (pairs, []) = digits.as_bytes().as_chunks::<2>() else {
        return None;
    };
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.iter().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use braid_gir::{BeforeKind, Begin, Commit, Error, ImageWriter, SchemaNumber, Writer};

    use super::*;

    fn hexadecimal(frame: &[u8]) -> String {
        frame.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns three frames: an update of a row of one table, and an insert into another.
    fn frames() -> Vec<Vec<u8>> {
        let none = |_: &mut ImageWriter<'_>| Ok::<(), Error>(());
        let mut begin = Writer::new();
        begin
            .begin(&Begin {
                commit_lsn: 16,
                commit_timestamp: 1,
                xid: 7,
                origin: "",
                origin_lsn: 0,
            })
            .unwrap();
        let mut changes = Writer::new();
        let (orders, lines) = (SchemaNumber(0), SchemaNumber(1));
        changes
            .update(orders, BeforeKind::Absent, false, &[10, 11], none, none)
            .unwrap();
        changes.insert(lines, true, &[], none).unwrap();
        let mut commit = Writer::new();
        commit
            .commit(&Commit {
                commit_lsn: 16,
                end_lsn: 24,
                commit_timestamp: 1,
            })
            .unwrap();
        [begin, changes, commit]
            .map(|writer| writer.frame().to_vec())
            .to_vec()
    }

    #[test]
    fn frames_become_transactions() {
        let frames = frames();
        let bytes: usize = frames.iter().map(Vec::len).sum();
        let change = |table, operation, barrier, hashes: &[u64]| Change {
            table,
            operation,
            barrier,
            hashes: hashes.to_vec(),
        };
        let one = Transaction {
            changes: vec![
                change(0, Operation::Update, false, &[10, 11]),
                change(1, Operation::Insert, true, &[]),
            ],
            bytes: u32::try_from(bytes).unwrap(),
        };
        let twice = frames.iter().chain(&frames);
        let read = transactions(twice.map(|frame| hexadecimal(frame)));
        assert_eq!(read, Ok(vec![one.clone(), one]));
        // A transaction without a commit is left out; a change without a begin is an error.
        let read = transactions(frames[..2].iter().map(|frame| hexadecimal(frame)));
        assert_eq!(read, Ok(Vec::new()));
        assert_eq!(
            transactions(frames[1..].iter().map(|frame| hexadecimal(frame))),
            Err("line 1: a change outside of a transaction".to_owned())
        );
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let of = |lines: &[&str]| transactions(lines.iter().map(|line| (*line).to_owned()));
        assert_eq!(of(&[]), Ok(Vec::new()));
        assert_eq!(of(&["", "0"]), Err("line 2: not hexadecimal".to_owned()));
        assert_eq!(of(&["0g"]), Err("line 1: not hexadecimal".to_owned()));
        assert!(of(&["00"]).unwrap_err().starts_with("line 1: "));
    }
}
