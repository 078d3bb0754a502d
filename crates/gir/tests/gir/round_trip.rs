//! Written values and records are read back bit for bit, and have only one encoding.

use crate::model::{OwnedChange, OwnedRecord, OwnedValue, config, record, value};
use braid_gir::{
    BeforeKind, DateTime, DateTimeKind, Error, ImageWriter, Operation, Reader, Record, Result,
    SchemaNumber, Value, Writer,
};
use proptest::collection::vec;
use proptest::prelude::*;

proptest! {
    #![proptest_config(config(1500))]

    #[test]
    fn any_record_round_trips(expected in record()) {
        let frame = expected.frame();
        let mut reader = Reader::new(&frame);
        let record = reader.next_record().unwrap().unwrap();
        prop_assert!(expected.is_same(&record), "read {record:?}");
        prop_assert_eq!(reader.next_record().unwrap(), None);
        prop_assert!(reader.is_empty());
    }

    #[test]
    fn any_value_round_trips_bit_for_bit(row in vec(value(), 1..12)) {
        let expected = OwnedRecord::Change(OwnedChange {
            operation: Operation::Insert,
            schema: 0,
            kind: BeforeKind::Absent,
            barrier: false,
            keys: Vec::new(),
            before: Vec::new(),
            after: row,
        });
        let frame = expected.frame();
        let record = Reader::new(&frame).next_record().unwrap().unwrap();
        prop_assert!(expected.is_same(&record), "read {record:?}");
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn frames_of_many_records_round_trip(expected in vec(record(), 0..12)) {
        let mut writer = Writer::new();
        for record in &expected {
            record.write(&mut writer).unwrap();
        }
        let mut reader = Reader::new(writer.frame());
        for record in &expected {
            let read = reader.next_record().unwrap().unwrap();
            prop_assert!(record.is_same(&read), "read {read:?}");
        }
        prop_assert_eq!(reader.next_record().unwrap(), None);
    }

    #[test]
    fn a_copied_record_has_the_same_bytes(expected in record()) {
        let frame = expected.frame();
        let mut copy = Writer::new();
        copy.copy(&Reader::new(&frame).next_record().unwrap().unwrap()).unwrap();
        prop_assert_eq!(copy.frame(), frame.as_slice());
    }

    #[test]
    fn the_header_alone_says_what_the_whole_change_says(expected in record()) {
        let frame = expected.frame();
        let (_, body) = Reader::new(&frame).next_raw().unwrap().unwrap();
        if let Record::Change(change) = Reader::new(&frame).next_record().unwrap().unwrap() {
            prop_assert_eq!(Record::read_change_header(body).unwrap(), change.header);
        }
    }
}

fn insert_of(keys: &[u64], value: &Value<'_>) -> Writer {
    let mut writer = Writer::new();
    writer
        .insert(
            SchemaNumber(0),
            false,
            keys,
            |row: &mut ImageWriter<'_>| -> Result<()> {
                row.put(value);
                Ok(())
            },
        )
        .unwrap();
    writer
}

fn read_change(writer: &Writer) -> braid_gir::Change<'_> {
    match Reader::new(writer.frame()).next_record().unwrap() {
        Some(Record::Change(change)) => change,
        other => panic!("read {other:?}"),
    }
}

#[test]
fn null_none_and_the_empty_ones_stay_apart() {
    let values = [
        OwnedValue::Null,
        OwnedValue::None,
        OwnedValue::String(Vec::new()),
        OwnedValue::Binary(Vec::new()),
        OwnedValue::BinaryText(Vec::new()),
        OwnedValue::BigInteger(Vec::new()),
        OwnedValue::Integer(0),
        OwnedValue::UnixTimestamp(0),
        OwnedValue::Double(0),
        OwnedValue::Double((-0.0_f64).to_bits()),
    ];
    for (at, written) in values.iter().enumerate() {
        let writer = insert_of(&[], &written.borrow());
        let read = read_change(&writer)
            .after
            .unwrap()
            .values()
            .next()
            .unwrap()
            .unwrap();
        for (other, value) in values.iter().enumerate() {
            assert_eq!(
                value.is_exactly(&read),
                at == other,
                "{value:?} and {read:?}"
            );
            assert_eq!(
                value.borrow() == read,
                at == other,
                "{value:?} and {read:?}"
            );
        }
    }
}

#[test]
fn a_writeset_lists_up_to_255_keys_and_is_a_barrier_beyond() {
    for count in [0_u64, 1, 255, 256, 1000] {
        let keys: Vec<u64> = (0..count)
            .map(|key| key.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .collect();
        let writer = insert_of(&keys, &Value::Integer(1));
        let header = read_change(&writer).header;
        if count <= 255 {
            assert!(!header.barrier);
            assert_eq!(header.writeset.hashes().collect::<Vec<_>>(), keys);
        } else {
            assert!(header.barrier);
            assert!(header.writeset.is_empty());
        }
        assert_eq!(
            header.writeset.len(),
            if count > 255 { 0 } else { keys.len() }
        );
    }
}

#[test]
fn a_row_that_cannot_be_counted_is_refused_and_leaves_nothing() {
    let mut writer = insert_of(&[], &Value::Null);
    let before = writer.frame().to_vec();
    let refused = writer.insert(SchemaNumber(0), false, &[], |row: &mut ImageWriter<'_>| {
        for _ in 0..=u16::MAX {
            row.put(&Value::Null);
        }
        Ok::<_, Error>(())
    });
    assert_eq!(refused, Err(Error::TooLarge("column count")));
    assert_eq!(writer.frame(), before);
    let columns = vec![model_column(); usize::from(u16::MAX) + 1];
    let refused = writer.schema(
        SchemaNumber(0),
        1,
        braid_gir::ReplicaIdentity::Full,
        ("n", "t"),
        (&columns, &[]),
    );
    assert_eq!(refused, Err(Error::TooLarge("column count")));
    assert_eq!(writer.frame(), before);
}

fn model_column() -> braid_gir::Column<'static> {
    braid_gir::Column {
        flags: braid_gir::ColumnFlags(0),
        type_oid: 23,
        type_modifier: -1,
        name: "c",
        type_namespace: "pg_catalog",
        type_name: "int4",
        mark: 0,
    }
}

#[test]
fn what_no_reader_takes_is_refused_when_written() {
    let mut writer = Writer::new();
    for micros in [-1, DateTime::MAX_MICROS + 1, i64::MIN, i64::MAX] {
        let value = DateTime {
            kind: DateTimeKind::Finite,
            days: 0,
            micros,
            offset: None,
        };
        let refused = writer.insert(SchemaNumber(0), false, &[], |row: &mut ImageWriter<'_>| {
            row.put(&Value::DateTime(value));
            Ok::<_, Error>(())
        });
        let what = "microseconds of the day";
        assert_eq!(
            refused,
            Err(Error::OutOfRange {
                what,
                value: micros
            })
        );
    }
    let refused = writer.delete(
        SchemaNumber(0),
        BeforeKind::Absent,
        false,
        &[],
        |_: &mut ImageWriter<'_>| Ok::<_, Error>(()),
    );
    assert_eq!(
        refused,
        Err(Error::OutOfRange {
            what: "before image of a delete",
            value: 0
        })
    );
    let refused = writer.message(&braid_gir::Message {
        transactional: false,
        lsn: 0,
        prefix: "a\0b",
        content: b"\0",
    });
    assert_eq!(refused, Err(Error::NulInName("message prefix")));
    let column = braid_gir::Column {
        flags: braid_gir::ColumnFlags(16),
        ..model_column()
    };
    let refused = writer.schema(
        SchemaNumber(0),
        1,
        braid_gir::ReplicaIdentity::Full,
        ("n", "t"),
        (&[column], &[]),
    );
    assert_eq!(
        refused,
        Err(Error::UnknownTag {
            what: "column flags",
            tag: 16
        })
    );
    let key = braid_gir::SchemaKeyColumn {
        column: 1,
        comparison: "",
    };
    let refused = writer.schema(
        SchemaNumber(0),
        1,
        braid_gir::ReplicaIdentity::Full,
        ("n", "t"),
        (&[model_column()], &[(false, &[key])]),
    );
    let what = "key column";
    assert_eq!(refused, Err(Error::OutOfRange { what, value: 1 }));
    assert!(writer.is_empty());
    assert_eq!(writer.frame(), b"");
}

#[test]
fn a_closure_that_fails_or_unwinds_leaves_whole_records_only() {
    let mut writer = insert_of(&[7], &Value::Integer(1));
    let before = writer.frame().to_vec();
    let failed = writer.insert(SchemaNumber(0), false, &[], |row: &mut ImageWriter<'_>| {
        row.put(&Value::Integer(2));
        Err(Error::NotUtf8("the caller's own error"))
    });
    assert_eq!(failed, Err(Error::NotUtf8("the caller's own error")));
    assert_eq!(writer.frame(), before);
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        writer.insert(
            SchemaNumber(0),
            false,
            &[],
            |row: &mut ImageWriter<'_>| -> Result<()> {
                row.put(&Value::Integer(3));
                std::panic::resume_unwind(Box::new("as a PostgreSQL error does"));
            },
        )
    }));
    assert!(unwound.is_err());
    assert_eq!(writer.frame(), before);
    assert_eq!(writer.len(), before.len());
    writer.truncate(true, false, &[SchemaNumber(0)]).unwrap();
    let mut reader = Reader::new(writer.frame());
    assert!(matches!(reader.next_record(), Ok(Some(Record::Change(_)))));
    assert!(matches!(
        reader.next_record(),
        Ok(Some(Record::Truncate(_)))
    ));
    assert_eq!(reader.next_record(), Ok(None));
    writer.truncate_to(before.len());
    assert_eq!(writer.frame(), before);
    writer.clear(16);
    assert!(writer.is_empty());
}
