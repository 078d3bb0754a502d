//! Bytes that are not valid GIR lead to an error that says what is wrong.

use crate::model::{config, decimal_bytes, record};
use braid_gir::{
    BeforeKind, Begin, Column, ColumnFlags, DateTime, DateTimeKind, Decimal, Error, ImageWriter,
    MAGIC, Message, PROTOCOL_VERSION, Reader, ReplicaIdentity, Result, SchemaKeyColumn,
    SchemaNumber, StreamHeader, Value, Writer,
};
use proptest::prelude::*;

/// Reads all records of a frame. Returns their number, or the first error.
fn read(frame: &[u8]) -> Result<usize> {
    let mut reader = Reader::new(frame);
    let mut count = 0;
    while reader.next_record()?.is_some() {
        count += 1;
    }
    Ok(count)
}

/// Returns a record with this body.
fn record_of(tag: u8, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap();
    [&[tag][..], &len.to_le_bytes(), body].concat()
}

/// Returns an insert of one column with `value` as the value's encoding.
fn insert_of(value: &[u8]) -> Vec<u8> {
    record_of(b'I', &[&[0, 0, 0, 0, 0, 0, 1, 0], value].concat())
}

fn body(frame: &[u8]) -> &[u8] {
    &frame[5..]
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn every_proper_prefix_is_an_error(expected in record()) {
        let frame = expected.frame();
        for len in 1..frame.len() {
            let cut = read(&frame[..len]);
            prop_assert!(matches!(cut, Err(Error::Truncated(_))), "{len} bytes: {cut:?}");
        }
    }

    /// Like the previous test, but with a length that fits: the fields themselves detect the
    /// truncation.
    #[test]
    fn every_proper_prefix_of_a_body_is_an_error(expected in record()) {
        let frame = expected.frame();
        for len in 0..body(&frame).len() {
            let cut = read(&record_of(frame[0], &body(&frame)[..len]));
            prop_assert!(matches!(cut, Err(Error::Truncated(_))), "{len} bytes: {cut:?}");
        }
    }

    #[test]
    fn bytes_left_over_are_an_error(expected in record(), extra in 1_usize..9) {
        let frame = expected.frame();
        let longer = [body(&frame), &vec![0; extra][..]].concat();
        let refused = read(&record_of(frame[0], &longer));
        prop_assert!(
            matches!(refused, Err(Error::TrailingBytes { count, .. }) if count == extra),
            "{refused:?}"
        );
    }
}

/// Checks that each byte at `at` that is not in `known` leads to an unknown tag.
fn check_tag(frame: &[u8], at: usize, what: &'static str, known: &[u8]) {
    for tag in 0..=u8::MAX {
        let mut changed = frame.to_vec();
        changed[at] = tag;
        let result = read(&changed);
        if known.contains(&tag) {
            let unknown = matches!(&result, Err(Error::UnknownTag { what: w, .. }) if *w == what);
            assert!(!unknown, "{what} tag {tag} is known: {result:?}");
        } else {
            assert_eq!(result, Err(Error::UnknownTag { what, tag }));
            let message = Error::UnknownTag { what, tag }.to_string();
            assert_eq!(message, format!("unknown {what} tag 0x{tag:02x}"));
        }
    }
}

#[test]
fn every_unknown_tag_is_an_error_that_names_it() {
    check_tag(
        &record_of(b'C', &[0; 24]),
        0,
        "record",
        b"HSBCIUDTMGEXAFPQJKR",
    );
    let one_integer = insert_of(&[2, 0]);
    check_tag(
        &one_integer,
        13,
        "value",
        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    );
    let kinds = [0x00, 0x01, 0x02, 0x10, 0x11, 0x12];
    check_tag(&insert_of(&[8, 0, 0, 0]), 14, "date and time", &kinds);
    check_tag(&one_integer, 9, "change flags", &[0, 1, 2, 4, 5, 6]);
    check_tag(&record_of(b'M', &[0; 11]), 5, "message flags", &[0, 1]);
    check_tag(&record_of(b'G', &[0; 5]), 5, "segment flags", &[0, 1]);
    check_tag(
        &record_of(b'T', &[0; 3]),
        5,
        "truncate flags",
        &[0, 1, 2, 3],
    );
    let mut writer = Writer::new();
    let column = Column {
        flags: ColumnFlags(0),
        type_oid: 23,
        type_modifier: -1,
        name: "c",
        type_namespace: "n",
        type_name: "t",
        mark: 0,
    };
    let names = ("n", "t");
    let key = SchemaKeyColumn {
        column: 0,
        comparison: "",
    };
    writer
        .schema(
            SchemaNumber(0),
            1,
            ReplicaIdentity::Full,
            names,
            (&[column], &[(false, &[key])]),
        )
        .unwrap();
    check_tag(writer.frame(), 5 + 8, "replica identity", b"difn");
    // Number, OID, identity, two names of one letter, count.
    let flags_at = 5 + 4 + 4 + 1 + 2 + 2 + 2;
    check_tag(
        writer.frame(),
        flags_at,
        "column flags",
        &(0..32).collect::<Vec<_>>(),
    );
    // Flags, number of columns, column, comparison.
    let end = writer.frame().len();
    check_tag(writer.frame(), end - 6, "key flags", &[0, 1]);
    let mut frame = writer.frame().to_vec();
    frame[end - 3] = 1;
    let what = "key column";
    assert_eq!(read(&frame), Err(Error::OutOfRange { what, value: 1 }));
}

fn header_frame() -> Vec<u8> {
    let mut writer = Writer::new();
    let header = StreamHeader {
        node_id: [1; 16],
        system_identifier: 2,
        server_version: 150_020,
        node_name: "a",
        database: "b",
        charset: "UTF8",
    };
    writer.stream_header(&header).unwrap();
    writer.frame().to_vec()
}

#[test]
fn another_version_is_an_error_that_names_it() {
    for found in (0..=u16::MAX).filter(|found| *found != PROTOCOL_VERSION) {
        let mut frame = header_frame();
        frame[9..11].copy_from_slice(&found.to_le_bytes());
        let supported = PROTOCOL_VERSION;
        assert_eq!(
            read(&frame),
            Err(Error::UnsupportedVersion { found, supported })
        );
    }
    let message = Error::UnsupportedVersion {
        found: 7,
        supported: 1,
    }
    .to_string();
    assert_eq!(
        message,
        "unsupported GIR version 7, this build reads version 1"
    );
}

#[test]
fn another_signature_is_an_error() {
    for at in 0..MAGIC.len() {
        for flip in 1..=u8::MAX {
            let mut frame = header_frame();
            frame[5 + at] ^= flip;
            assert_eq!(read(&frame), Err(Error::BadMagic));
        }
    }
}

#[test]
fn an_insert_has_no_before_image_and_a_delete_has_one() {
    for (flags, value) in [(1, 1), (2, 2), (5, 1), (6, 2)] {
        let mut frame = insert_of(&[0]);
        frame[9] = flags;
        let what = "before image of an insert";
        assert_eq!(read(&frame), Err(Error::OutOfRange { what, value }));
    }
    for flags in [0, 4] {
        let frame = record_of(b'D', &[0, 0, 0, 0, flags, 0]);
        let what = "before image of a delete";
        assert_eq!(read(&frame), Err(Error::OutOfRange { what, value: 0 }));
    }
    let mut writer = Writer::new();
    writer
        .delete(
            SchemaNumber(0),
            BeforeKind::Key,
            false,
            &[],
            |_: &mut ImageWriter<'_>| Ok::<_, Error>(()),
        )
        .unwrap();
    assert_eq!(read(writer.frame()), Ok(1));
}

#[test]
fn integers_have_their_shortest_form_only() {
    let bad = Err(Error::BadVarint("integer"));
    assert_eq!(read(&insert_of(&[2, 0x7f])), Ok(1));
    assert_eq!(read(&insert_of(&[2, 0x80, 0x01])), Ok(1));
    for value in [0_u8, 1, 0x7f] {
        for padding in 0..12 {
            let mut bytes = vec![2, value | 0x80];
            bytes.extend(std::iter::repeat_n(0x80, padding));
            bytes.push(0);
            assert_eq!(
                read(&insert_of(&bytes)),
                bad,
                "{value} with {padding} bytes of padding"
            );
        }
    }
    let nine = [0xff_u8; 9];
    let ten = |last: u8| insert_of(&[&[2][..], &nine, &[last]].concat());
    assert_eq!(read(&ten(1)), Ok(1));
    for last in 2..=u8::MAX {
        assert_eq!(read(&ten(last)), bad, "last byte {last}");
    }
    // Lengths have such a limit, too.
    assert_eq!(
        read(&insert_of(&[9, 0x80, 0])),
        Err(Error::BadVarint("string"))
    );
}

#[test]
fn a_length_beyond_the_record_is_an_error_however_large() {
    assert_eq!(
        read(&[b'C', 0xff, 0xff, 0xff, 0xff]),
        Err(Error::Truncated("record"))
    );
    let huge = [&[9][..], &[0xff; 9], &[1]].concat();
    assert_eq!(read(&insert_of(&huge)), Err(Error::Truncated("string")));
    // Counts of columns, keys and relations that the body cannot hold.
    let columns = record_of(b'I', &[0, 0, 0, 0, 0, 0, 0xff, 0xff]);
    assert_eq!(read(&columns), Err(Error::Truncated("value tag")));
    let keys = record_of(b'I', &[0, 0, 0, 0, 0, 0xff]);
    assert_eq!(read(&keys), Err(Error::Truncated("writeset")));
    let relations = record_of(b'T', &[0, 0xff, 0xff]);
    assert_eq!(read(&relations), Err(Error::Truncated("schema numbers")));
}

#[test]
fn a_mark_is_not_zero() {
    let mut writer = Writer::new();
    let column = Column {
        flags: ColumnFlags(0),
        type_oid: 23,
        type_modifier: -1,
        name: "c",
        type_namespace: "n",
        type_name: "t",
        mark: 0x0102_0304_0506_0708,
    };
    let identity = ReplicaIdentity::Full;
    writer
        .schema(SchemaNumber(0), 1, identity, ("n", "t"), (&[column], &[]))
        .unwrap();
    let mut frame = writer.frame().to_vec();
    let mark = column.mark.to_le_bytes();
    let at = frame.windows(8).position(|bytes| bytes == mark).unwrap();
    frame[at..at + 8].fill(0);
    let what = "column mark";
    assert_eq!(read(&frame), Err(Error::OutOfRange { what, value: 0 }));
}

#[test]
fn names_are_utf8_without_zero_bytes() {
    let mut writer = Writer::new();
    let message = Message {
        transactional: true,
        lsn: 1,
        prefix: "ab",
        content: b"\0\xff",
    };
    writer.message(&message).unwrap();
    assert_eq!(read(writer.frame()), Ok(1));
    let prefix_at = 5 + 1 + 8 + 1;
    let mut frame = writer.frame().to_vec();
    frame[prefix_at] = 0xff;
    assert_eq!(read(&frame), Err(Error::NotUtf8("message prefix")));
    frame[prefix_at] = 0;
    assert_eq!(read(&frame), Err(Error::NulInName("message prefix")));
    let begin = Begin {
        commit_lsn: 1,
        commit_timestamp: 2,
        xid: 3,
        origin: "\0",
        origin_lsn: 4,
    };
    assert_eq!(writer.begin(&begin), Err(Error::NulInName("origin")));
}

#[test]
fn decimals_have_the_form_of_numeric_send() {
    let bytes = decimal_bytes(0, 0, 2, &[1, 5000]);
    assert_eq!(Decimal::new(&bytes).unwrap().as_bytes(), bytes);
    for len in 0..bytes.len() {
        assert_eq!(
            Decimal::new(&bytes[..len]),
            Err(Error::Truncated("decimal")),
            "{len} bytes"
        );
    }
    let longer = [&bytes[..], &[0]].concat();
    let trailing = Error::TrailingBytes {
        what: "decimal",
        count: 1,
    };
    assert_eq!(Decimal::new(&longer), Err(trailing));
    for sign in (0..=u16::MAX).filter(|sign| !matches!(sign, 0 | 0x4000 | 0xC000 | 0xD000 | 0xF000))
    {
        let refused = Error::OutOfRange {
            what: "decimal sign",
            value: i64::from(sign),
        };
        assert_eq!(Decimal::new(&decimal_bytes(0, sign, 0, &[])), Err(refused));
    }
    let digit = Error::OutOfRange {
        what: "decimal digit",
        value: 10_000,
    };
    assert_eq!(
        Decimal::new(&decimal_bytes(0, 0, 0, &[1, 10_000])),
        Err(digit)
    );
    let scale = Error::OutOfRange {
        what: "decimal scale",
        value: 0x4000,
    };
    assert_eq!(Decimal::new(&decimal_bytes(0, 0, 0x4000, &[])), Err(scale));
    for sign in [0xC000, 0xD000, 0xF000] {
        let what = "number of digits of a decimal that is not finite";
        let refused = Error::OutOfRange { what, value: 1 };
        assert_eq!(Decimal::new(&decimal_bytes(0, sign, 0, &[1])), Err(refused));
    }
    // Reading a record makes this check, too: NaN with one digit.
    let nan = [&[6, 10][..], &decimal_bytes(0, 0xC000, 0, &[1])].concat();
    assert!(matches!(
        read(&insert_of(&nan)),
        Err(Error::OutOfRange { .. })
    ));
}

#[test]
fn dates_and_times_stay_in_their_ranges() {
    // Days beyond 32 bits: zigzag of 2^31.
    let days = [8, 0, 0x80, 0x80, 0x80, 0x80, 0x10, 0];
    let what = "days";
    assert_eq!(
        read(&insert_of(&days)),
        Err(Error::OutOfRange {
            what,
            value: 1 << 31
        })
    );
    // 24:00:00 is the last time of day; one microsecond more is not.
    let last = DateTime::MAX_MICROS.cast_unsigned();
    for (micros, valid) in [(last, true), (last + 1, false), (u64::MAX, false)] {
        let mut value = vec![8, 0, 0];
        let mut rest = micros;
        while rest >= 0x80 {
            value.push(u8::try_from(rest & 0x7f).unwrap() | 0x80);
            rest >>= 7;
        }
        value.push(u8::try_from(rest).unwrap());
        let result = read(&insert_of(&value));
        if valid {
            assert_eq!(result, Ok(1));
        } else {
            let what = "microseconds of the day";
            let value = i64::try_from(micros).unwrap_or(i64::MAX);
            assert_eq!(result, Err(Error::OutOfRange { what, value }));
        }
    }
    let offset = [8, 0x11, 0x80, 0x80, 0x80, 0x80, 0x10];
    let refused = Error::OutOfRange {
        what: "offset",
        value: 1 << 31,
    };
    assert_eq!(read(&insert_of(&offset)), Err(refused));
    // Infinities carry no day: what follows the kind would be left over.
    assert_eq!(read(&insert_of(&[8, 1])), Ok(1));
    assert!(matches!(
        read(&insert_of(&[8, 1, 0])),
        Err(Error::TrailingBytes { .. })
    ));
    let mut writer = Writer::new();
    let infinity = DateTime {
        kind: DateTimeKind::Infinity,
        days: 0,
        micros: 0,
        offset: Some(0),
    };
    writer
        .insert(SchemaNumber(0), false, &[], |row: &mut ImageWriter<'_>| {
            row.put(&Value::DateTime(infinity));
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!(writer.frame(), insert_of(&[8, 0x11, 0]));
}
