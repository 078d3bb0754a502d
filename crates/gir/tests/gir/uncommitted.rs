//! gir-json of transactions that still run, and of prepared ones: the form of their objects, and
//! their allowed places.

use braid_gir::{JsonOptions, JsonReader, SchemaDetail, Writer};

use crate::json::{KEYS, error_of, frame, is_published, lines, read, sample};
use crate::model::{OwnedPrepared, OwnedRecord, Step};

/// Returns an error without its byte position: the position is tested with the other objects.
fn without_byte(error: &str) -> String {
    let Some((kind, place)) = error.split_once(", at byte ") else {
        return error.to_owned();
    };
    let member = place.trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{kind}{member}")
}

/// Returns the sample's schema and a change of it, in a transaction that came in segments, was
/// prepared, and has committed, with records of other transactions in between.
fn uncommitted() -> Vec<OwnedRecord> {
    let sample = sample();
    let insert = || sample[3].clone();
    let note = |transactional| OwnedRecord::Message {
        transactional,
        lsn: 1,
        prefix: "p".to_owned(),
        content: b"c".to_vec(),
    };
    let prepared = |xid| OwnedPrepared {
        lsns: (0x0156_18a0, 0x1_0000_3000, 0x0156_18d0),
        timestamp: 1_709_209_800_000_000,
        xid,
        origin: "paris".to_owned(),
        gid: "t\"wo".to_owned(),
    };
    vec![
        sample[0].clone(),
        OwnedRecord::SegmentStart(true, 7),
        sample[1].clone(),
        insert(),
        OwnedRecord::Subtransaction(8),
        insert(),
        sample[6].clone(),
        note(true),
        note(false),
        OwnedRecord::Subtransaction(7),
        insert(),
        OwnedRecord::SegmentStop,
        OwnedRecord::Abort(7, 8),
        OwnedRecord::Prepared(Step::Begin, prepared(751)),
        insert(),
        sample[6].clone(),
        note(true),
        OwnedRecord::Prepare {
            lsns: (0x0156_18a0, 0x0156_18d0),
            timestamp: 1_709_209_800_000_000,
        },
        OwnedRecord::SegmentStart(false, 7),
        insert(),
        OwnedRecord::SegmentStop,
        OwnedRecord::StreamedCommit {
            lsns: (0x0156_18a0, 0x1_0000_3000, 0x0156_18d0),
            timestamp: 1_709_209_800_000_000,
            xid: 7,
            origin: String::new(),
        },
        OwnedRecord::SegmentStart(true, 9),
        OwnedRecord::SegmentStop,
        OwnedRecord::Prepared(Step::Streamed, prepared(9)),
        OwnedRecord::Prepared(Step::Commit, prepared(9)),
        OwnedRecord::RollbackPrepared(prepared(751), 0x0156_1800, 1_709_209_800_500_000),
        OwnedRecord::SegmentStart(true, 10),
        OwnedRecord::SegmentStop,
        OwnedRecord::Abort(10, 10),
    ]
}

#[test]
fn the_form_of_what_has_not_committed() {
    let transaction = |xid: u32| {
        format!(
            r#""transaction":{{"xid":{xid},"lsn":"0/15618A0","commit_time":"2024-02-29T12:30:00Z","node":"tokyo","origin":"paris","origin_lsn":"1/3000"}}"#
        )
    };
    let own = r#""running":{"xid":7,"subxid":7,"node":"tokyo"}"#;
    let inner = r#""running":{"xid":7,"subxid":8,"node":"tokyo"}"#;
    let prepared = format!(r#"{},"prepared":"t\"wo""#, transaction(751));
    let schema = r#"{"number":0,"database":"shop","namespace":"public","table":"items"}"#;
    let insert = |of: &str| {
        format!(
            r#"{{"operation":"insert",{of},"schema":{schema},"before":null,"after":{{"id":{{"integer":"9007199254740992"}},"note":"héy \"\\\n\u0001"}}}}"#
        )
    };
    let truncate = |of: &str| {
        format!(
            r#"{{"operation":"truncate",{of},"schemas":[{schema}],"cascade":true,"restart_identity":false}}"#
        )
    };
    let note = |of: &str, transactional: bool| {
        format!(
            r#"{{"operation":"message"{of},"transactional":{transactional},"lsn":"0/1","prefix":"p","content":"c"}}"#
        )
    };
    let step = |operation: &str, xid: u32| {
        format!(
            r#"{{"operation":"{operation}",{},"end_lsn":"0/15618D0","gid":"t\"wo""#,
            transaction(xid)
        )
    };
    let expected = [
        r#"{"operation":"segment_start","xid":7,"first":true}"#.to_owned(),
        insert(own),
        r#"{"operation":"subtransaction","xid":8}"#.to_owned(),
        insert(inner),
        truncate(inner),
        note(&format!(",{inner}"), true),
        note("", false),
        r#"{"operation":"subtransaction","xid":7}"#.to_owned(),
        insert(own),
        r#"{"operation":"segment_end"}"#.to_owned(),
        r#"{"operation":"abort","xid":7,"subxid":8}"#.to_owned(),
        step("begin_prepared", 751) + "}",
        insert(&prepared),
        truncate(&prepared),
        note(&format!(",{prepared}"), true),
        r#"{"operation":"prepare","lsn":"0/15618A0","end_lsn":"0/15618D0","prepare_time":"2024-02-29T12:30:00Z"}"#.to_owned(),
        r#"{"operation":"segment_start","xid":7,"first":false}"#.to_owned(),
        insert(own),
        r#"{"operation":"segment_end"}"#.to_owned(),
        r#"{"operation":"streamed_commit","transaction":{"xid":7,"lsn":"0/15618A0","commit_time":"2024-02-29T12:30:00Z","node":"tokyo","origin":null,"origin_lsn":"1/3000"},"end_lsn":"0/15618D0"}"#.to_owned(),
        r#"{"operation":"segment_start","xid":9,"first":true}"#.to_owned(),
        r#"{"operation":"segment_end"}"#.to_owned(),
        step("streamed_prepare", 9) + "}",
        step("commit_prepared", 9) + "}",
        step("rollback_prepared", 751) + r#","prepare_end_lsn":"0/1561800","prepare_time":"2024-02-29T12:30:00.5Z"}"#,
        r#"{"operation":"segment_start","xid":10,"first":true}"#.to_owned(),
        r#"{"operation":"segment_end"}"#.to_owned(),
        r#"{"operation":"abort","xid":10,"subxid":10}"#.to_owned(),
    ];
    let frame = frame(&uncommitted());
    let once = JsonOptions {
        schema: SchemaDetail::Once,
        ..JsonOptions::default()
    };
    let mut found = lines(frame.frame(), once).unwrap();
    for line in &found {
        assert_eq!(is_published(line), Ok(()), "{line}");
    }
    assert!(
        found
            .remove(2)
            .starts_with(r#"{"operation":"schema","schema":"#)
    );
    assert!(found.remove(0).starts_with(r#"{"operation":"stream""#));
    assert_eq!(found, expected);
    let keys = lines(frame.frame(), KEYS).unwrap();
    assert_eq!(read(&keys).frame(), frame.frame());
    // Inside a transaction, a change may omit which transaction it belongs to.
    let short: Vec<_> = keys
        .iter()
        .map(|line| {
            line.replace(&format!(r#"insert",{own}"#), "insert\"")
                .replace(&format!(r#"insert",{inner}"#), "insert\"")
                .replace(&format!(r#"insert",{prepared}"#), "insert\"")
        })
        .collect();
    assert_ne!(short, keys);
    assert_eq!(read(&short).frame(), frame.frame());
}

/// A transaction with the required members only.
const TRANSACTION: &str = r#""transaction":{"lsn":"0/1","commit_time":"2024-02-29T12:30:00Z"}"#;

/// The objects of [`uncommitted`].
fn objects() -> Vec<String> {
    let once = JsonOptions {
        schema: SchemaDetail::Once,
        ..JsonOptions::default()
    };
    lines(frame(&uncommitted()).frame(), once).unwrap()
}

fn refusal(lines: &[String]) -> String {
    without_byte(&error_of(lines))
}

/// Index of the object, the text in it, its replacement, and the resulting error.
#[rustfmt::skip]
const REPLACED: &[(usize, &str, &str, &str)] = &[
    // Members that are missing, or that do not belong to this object.
    (1, r#","first":true"#, "", r#"member "first" is missing"#),
    (1, r#""xid":7,"#, "", r#"member "xid" is missing"#),
    (1, "7", "4294967296", "transaction id is out of range (/xid)"),
    (4, r#","xid":8"#, "", r#"member "xid" is missing"#),
    (11, "}", r#","xid":7}"#, r#"unknown member "xid""#),
    (12, r#","subxid":8"#, "", r#"member "subxid" is missing"#),
    (13, r#","gid":"t\"wo""#, "", r#"member "gid" is missing"#),
    (13, r#""end_lsn":"0/15618D0","#, "", r#"member "end_lsn" is missing"#),
    (17, "prepare_time", "commit_time", r#"unknown member "commit_time""#),
    (21, r#","end_lsn":"0/15618D0""#, "", r#"member "end_lsn" is missing"#),
    (26, r#""prepare_end_lsn":"0/1561800","#, "", r#"member "prepare_end_lsn" is missing"#),
    (26, r#","prepare_time":"2024-02-29T12:30:00.5Z""#, "", r#"member "prepare_time" is missing"#),
    // Records of another transaction.
    (3, r#""subxid":7"#, r#""subxid":8"#, "record is of another transaction (/running)"),
    (5, r#""xid":7"#, r#""xid":8"#, "record is of another transaction (/running)"),
    (6, r#""subxid":8,"#, "", r#"member "subxid" is missing (/running)"#),
    (7, r#""running":{"xid":7,"subxid":8,"node":"tokyo"}"#, TRANSACTION, "record is inside a segment (/transaction)"),
    (8, r#""message""#, r#""message","transaction":{}"#, "message is not transactional (/transaction)"),
    (8, r#""message""#, r#""message","prepared":"x""#, "message is not transactional (/prepared)"),
    (8, r#""message""#, r#""message","running":{"xid":7,"subxid":7}"#, "message is not transactional (/running)"),
    (14, r#""xid":751"#, r#""xid":752"#, "record is of another transaction (/transaction)"),
    (14, r#""prepared":"t\"wo""#, r#""prepared":"two""#, "record is of another transaction (/prepared)"),
    (14, r#""prepared":"t\"wo","#, "", r#"member "prepared" is missing"#),
    (14, r#""prepared":"t\"wo""#, r#""running":{"xid":1,"subxid":1}"#, "record is outside of a segment (/running)"),
    (17, r#""lsn":"0/15618A0""#, r#""lsn":"0/1""#, "prepare is of another transaction (/lsn)"),
    // Segments that came, or did not.
    (18, "false", "true", "segments of this transaction came before (/first)"),
    (1, "true", "false", "no segment of this transaction came before (/first)"),
    (12, r#""xid":7"#, r#""xid":8"#, "no segment of this transaction came before"),
    (12, r#""xid":7"#, r#""xid":6"#, "no segment of this transaction came before"),
    (21, r#""xid":7"#, r#""xid":8"#, "no segment of this transaction came before"),
    (24, r#""xid":9"#, r#""xid":8"#, "no segment of this transaction came before"),
];

#[test]
fn what_is_wrong_in_objects_of_what_has_not_committed() {
    let good = objects();
    assert_eq!(error_of(&good), "accepted");
    for (index, from, to, expected) in REPLACED {
        let mut lines = good.clone();
        let changed = lines[*index].replacen(from, to, 1);
        assert_ne!(changed, lines[*index], "{from}");
        lines[*index] = changed;
        assert_eq!(refusal(&lines), *expected);
    }
}

#[test]
fn what_has_not_committed_stands_in_its_order() {
    let good = objects();
    let begin = format!(r#"{{"operation":"begin",{TRANSACTION}}}"#);
    for (index, expected) in [
        (11, "segment ends that has not started"),
        (4, "subtransaction outside of a segment"),
        (17, "prepare outside of a prepared transaction"),
        (3, "record is outside of a segment (/running)"),
        (
            14,
            "record is outside of a prepared transaction (/prepared)",
        ),
    ] {
        let alone = [&good[0], &good[2], &good[index]].map(Clone::clone);
        assert_eq!(refusal(&alone), expected);
    }
    for (index, expected) in [
        (1, "segment starts inside a transaction or another segment"),
        (12, "abort stands inside a transaction or segment"),
        (13, "transaction begins inside another"),
        (21, "commit stands inside a transaction or segment"),
        (24, "prepare stands inside a transaction or segment"),
        (25, "commit stands inside a transaction or segment"),
        (26, "rollback stands inside a transaction or segment"),
    ] {
        assert_eq!(refusal(&[begin.clone(), good[index].clone()]), expected);
    }
    for (index, expected) in [
        (11, "abort stands inside a transaction or segment"),
        (17, "segment starts inside a transaction or another segment"),
    ] {
        let mut without = good.clone();
        without.remove(index);
        assert_eq!(refusal(&without), expected);
    }
    for (end, expected) in [
        (2, "segment has no end"),
        (15, "transaction has no end"),
        (12, "accepted"),
    ] {
        assert_eq!(refusal(&good[..end]), expected);
    }
    // A finished transaction is forgotten, wherever its segments came from.
    let twice = [1, 11, 21, 21].map(|index| good[index].clone());
    let expected = "no segment of this transaction came before";
    assert_eq!(refusal(&twice), expected);
    let again = [1, 11, 25, 1].map(|index| good[index].replace(r#""xid":9"#, r#""xid":7"#));
    assert_eq!(refusal(&again), "segment has no end");
}

#[test]
fn what_has_not_committed_can_be_refused() {
    let refused = |texts: &[String]| {
        let (mut reader, mut out) = (JsonReader::of_committed(), Writer::new());
        texts
            .iter()
            .find_map(|text| reader.read(text.as_bytes(), &mut out).err())
            .map(|error| without_byte(&error.to_string()))
    };
    let objects = lines(frame(&uncommitted()).frame(), JsonOptions::default()).unwrap();
    let why = "transactions that have not committed are not taken here";
    for (index, line) in objects.iter().enumerate() {
        let place = match index {
            0 | 2 | 8 => continue,
            3 | 5 | 10 | 19 => "(/running)",
            6 => "(/running)",
            7 => "(/running)",
            14 => "(/prepared)",
            15 => "(/prepared)",
            16 => "(/prepared)",
            _ => "(/operation)",
        };
        let expected = Some(format!("{why} {place}"));
        assert_eq!(refused(std::slice::from_ref(line)), expected, "{line}");
    }
    let sample = frame(&sample());
    let committed = lines(sample.frame(), KEYS).unwrap();
    assert_eq!(refused(&committed), None);
}
