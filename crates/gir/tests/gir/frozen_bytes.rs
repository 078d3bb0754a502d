//! The bytes of version 1, written out. A change of format fails here, and at the place where
//! docs/PROTOCOL.md shows the same bytes.

use braid_gir::{
    Abort, BeforeKind, Begin, Column, ColumnFlags, Commit, DateTime, DateTimeKind, Decimal,
    ImageWriter, Message, Prepared, Reader, ReplicaIdentity, Result, RollbackPrepared,
    SchemaKeyColumn, SchemaNumber, SegmentStart, StreamHeader, StreamedCommit, Value, Writer,
};

use crate::model::decimal_bytes;

/// The frame of the worked example in docs/PROTOCOL.md, record by record.
const EXAMPLE: [&str; 9] = [
    // Stream header
    "48 32000000
     4749520a 0100 00112233445566778899aabbccddeeff efcdab8967452301 f8490200
     05746f6b796f 047368 6f70 0455544638",
    // Begin
    "42 22000000
     a018560100000000 00c2f96a84120600 ef020000 057061726973 0030000001000000",
    // Schema
    "53 59000000
     00000000 0b400000 64 067075626c6963 056974656d73 0200
     07 17000000 ffffffff 026964 0a70675f636174616c6f67 04696e7434
     00 19000000 ffffffff 046e6f7465 0a70675f636174616c6f67 0474657874
     01 00 0100 0000 00",
    // Insert
    "49 19000000
     00000000 00 01 8877665544332211 0200 0202 090568c3a97921",
    // Update
    "55 20000000
     00000000 01 02 8877665544332211 1032547698badcfe 0200 0202 01 0200 0204 01",
    // Delete
    "44 13000000
     00000000 01 01 1032547698badcfe 0200 0204 01",
    // Truncate
    "54 07000000
     03 0100 00000000",
    // Message
    "4d 10000000
     01 7017560100000000 03617564 02ff00",
    // Commit
    "43 18000000
     a018560100000000 d018560100000000 00c2f96a84120600",
];

/// A prepared transaction, or its end, without the tag.
const PREPARED: &str = "2e000000
     a018560100000000 00c2f96a84120600 ef020000 057061726973 0030000001000000
     d018560100000000 0374776f";

/// The values of `every_value_has_the_frozen_bytes`, in its order.
const VALUES: [&str; 25] = [
    "00",
    "01",
    "0200",
    "0201",
    "02d804",
    "02feffffffffffffffff01",
    "02ffffffffffffffffff01",
    "0309000000000000000001",
    "04000000000000f83f",
    "04010000000000f87f",
    "0500000080",
    "060e0003000140000002000109291a2c",
    "060800000000c0000000",
    "060800000000d0000020",
    "0700c2f96a84120600",
    "07ffffffffffffffff",
    "08008cb50201",
    "0810efde5900b0b502",
    "08000080c0ddeec102",
    "0801",
    "081200",
    "0900",
    "0903616263",
    "0a02ff00",
    "0b0528312c3229",
];

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex
        .bytes()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect();
    let pairs = digits
        .chunks(2)
        .map(|pair| std::str::from_utf8(pair).unwrap());
    pairs
        .map(|pair| u8::from_str_radix(pair, 16).unwrap())
        .collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn row<'v>(values: &'v [Value<'v>]) -> impl FnOnce(&mut ImageWriter<'_>) -> Result<()> + 'v {
    move |image| {
        for value in values {
            image.put(value);
        }
        Ok(())
    }
}

fn example() -> Writer {
    let mut writer = Writer::new();
    let header = StreamHeader {
        node_id: bytes("00112233445566778899aabbccddeeff")
            .try_into()
            .unwrap(),
        system_identifier: 0x0123_4567_89ab_cdef,
        server_version: 150_008,
        node_name: "tokyo",
        database: "shop",
        charset: "UTF8",
    };
    writer.stream_header(&header).unwrap();
    let begin = Begin {
        commit_lsn: 0x0156_18a0,
        commit_timestamp: 1_709_209_800_000_000,
        xid: 751,
        origin: "paris",
        origin_lsn: 0x1_0000_3000,
    };
    writer.begin(&begin).unwrap();
    let column = |flags, type_oid, name, type_name| Column {
        flags: ColumnFlags(flags),
        type_oid,
        type_modifier: -1,
        name,
        type_namespace: "pg_catalog",
        type_name,
        mark: 0,
    };
    let key = ColumnFlags::IDENTITY | ColumnFlags::PRIMARY_KEY | ColumnFlags::NOT_NULL;
    let columns = [column(key, 23, "id", "int4"), column(0, 25, "note", "text")];
    let items = SchemaNumber(0);
    let names = ("public", "items");
    let id = SchemaKeyColumn {
        column: 0,
        comparison: "",
    };
    writer
        .schema(
            items,
            16_395,
            ReplicaIdentity::Default,
            names,
            (&columns, &[(false, &[id])]),
        )
        .unwrap();
    let (first, second) = (0x1122_3344_5566_7788, 0xfedc_ba98_7654_3210);
    let after = [Value::Integer(1), Value::String("héy!".as_bytes())];
    writer.insert(items, false, &[first], row(&after)).unwrap();
    let before = [Value::Integer(1), Value::None];
    let after = [Value::Integer(2), Value::None];
    let keys = [first, second];
    writer
        .update(
            items,
            BeforeKind::Key,
            false,
            &keys,
            row(&before),
            row(&after),
        )
        .unwrap();
    writer
        .delete(items, BeforeKind::Key, false, &[second], row(&after))
        .unwrap();
    writer.truncate(true, true, &[items]).unwrap();
    let message = Message {
        transactional: true,
        lsn: 0x0156_1770,
        prefix: "aud",
        content: b"\xff\0",
    };
    writer.message(&message).unwrap();
    let commit = Commit {
        commit_lsn: 0x0156_18a0,
        end_lsn: 0x0156_18d0,
        commit_timestamp: 1_709_209_800_000_000,
    };
    writer.commit(&commit).unwrap();
    writer
}

#[test]
fn the_example_has_the_frozen_bytes() {
    let writer = example();
    let mut reader = Reader::new(writer.frame());
    for expected in EXAMPLE {
        let (tag, body) = reader.next_raw().unwrap().unwrap();
        let len = u32::try_from(body.len()).unwrap();
        let found = [&[tag as u8][..], &len.to_le_bytes(), body].concat();
        assert_eq!(hex(&found), hex(&bytes(expected)), "{tag:?}");
    }
    assert!(reader.is_empty());
}

#[test]
fn the_protocol_document_shows_the_same_bytes() {
    let document = include_str!("../../../../docs/PROTOCOL.md");
    let shown: Vec<String> = document
        .split("```hex\n")
        .skip(1)
        .map(|block| hex(&bytes(block.split("```").next().unwrap())))
        .collect();
    let mut frozen: Vec<String> = EXAMPLE.iter().map(|record| hex(&bytes(record))).collect();
    frozen.push(hex(&bytes(&format!("4b {PREPARED}"))));
    assert_eq!(shown, frozen);
    let (_, values) = document.split_once("Single values:").unwrap();
    let rows = values.lines().filter(|line| line.starts_with("| `"));
    let shown: Vec<String> = rows
        .map(|row| hex(&bytes(row.split('`').nth(1).unwrap())))
        .collect();
    assert!(shown.len() > 10);
    for value in shown {
        assert!(VALUES.contains(&value.as_str()), "{value} is not frozen");
    }
}

#[test]
fn every_value_has_the_frozen_bytes() {
    let decimal = decimal_bytes(1, 0x4000, 2, &[1, 2345, 6700]);
    let nan = decimal_bytes(0, 0xC000, 0, &[]);
    let infinity = decimal_bytes(0, 0xD000, 32, &[]);
    let date_time = |kind, days, micros, offset| {
        Value::DateTime(DateTime {
            kind,
            days,
            micros,
            offset,
        })
    };
    use DateTimeKind::{Finite, Infinity, MinusInfinity};
    let known = [
        Value::Null,
        Value::None,
        Value::Integer(0),
        Value::Integer(-1),
        Value::Integer(300),
        Value::Integer(i64::MAX),
        Value::Integer(i64::MIN),
        Value::BigInteger(&[0, 0, 0, 0, 0, 0, 0, 0, 1]),
        Value::Double(1.5),
        Value::Double(f64::from_bits(0x7ff8_0000_0000_0001)),
        Value::Single(-0.0),
        Value::Decimal(Decimal::new(&decimal).unwrap()),
        Value::Decimal(Decimal::new(&nan).unwrap()),
        Value::Decimal(Decimal::new(&infinity).unwrap()),
        Value::UnixTimestamp(1_709_209_800_000_000),
        Value::UnixTimestamp(-1),
        date_time(Finite, 19_782, 1, None),
        date_time(Finite, -735_160, 0, Some(19_800)),
        date_time(Finite, 0, DateTime::MAX_MICROS, None),
        date_time(Infinity, 0, 0, None),
        date_time(MinusInfinity, 0, 0, Some(0)),
        Value::String(b""),
        Value::String(b"abc"),
        Value::Binary(&[0xff, 0]),
        Value::BinaryText(b"(1,2)"),
    ];
    assert_eq!(known.len(), VALUES.len());
    for (value, expected) in known.iter().zip(VALUES) {
        let mut out = Vec::new();
        value.write(&mut out);
        assert_eq!(hex(&out), expected, "{value:?}");
    }
    let long = vec![b'x'; 200];
    let mut out = Vec::new();
    Value::String(&long).write(&mut out);
    assert_eq!(hex(&out[..4]), "09c80178");
}

#[test]
fn running_transactions_have_the_frozen_bytes() {
    let mut writer = Writer::new();
    writer
        .segment_start(SegmentStart {
            first: true,
            xid: 751,
        })
        .unwrap();
    writer.subtransaction(752).unwrap();
    writer.segment_stop().unwrap();
    writer
        .abort(Abort {
            xid: 751,
            subxid: 752,
        })
        .unwrap();
    let begin = Begin {
        commit_lsn: 0x0156_18a0,
        commit_timestamp: 1_709_209_800_000_000,
        xid: 751,
        origin: "paris",
        origin_lsn: 0x1_0000_3000,
    };
    let end_lsn = 0x0156_18d0;
    writer
        .streamed_commit(&StreamedCommit { begin, end_lsn })
        .unwrap();
    let expected = "47 05000000 01 ef020000
        58 04000000 f0020000
        45 00000000
        41 08000000 ef020000 f0020000
        46 2a000000 a018560100000000 00c2f96a84120600 ef020000 057061726973 0030000001000000 d018560100000000";
    assert_eq!(hex(writer.frame()), hex(&bytes(expected)));
}

#[test]
fn prepared_transactions_have_the_frozen_bytes() {
    let mut writer = Writer::new();
    let begin = Begin {
        commit_lsn: 0x0156_18a0,
        commit_timestamp: 1_709_209_800_000_000,
        xid: 751,
        origin: "paris",
        origin_lsn: 0x1_0000_3000,
    };
    let prepared = Prepared {
        begin,
        end_lsn: 0x0156_18d0,
        gid: "two",
    };
    writer.begin_prepared(&prepared).unwrap();
    writer.prepare(&prepared.commit()).unwrap();
    writer.streamed_prepare(&prepared).unwrap();
    writer.commit_prepared(&prepared).unwrap();
    writer
        .rollback_prepared(&RollbackPrepared {
            prepared,
            prepare_end_lsn: 0x0156_1000,
            prepare_timestamp: 1_709_209_799_000_000,
        })
        .unwrap();
    let expected = format!(
        "50 {PREPARED}
        51 18000000 a018560100000000 d018560100000000 00c2f96a84120600
        4a {PREPARED}
        4b {PREPARED}
        52 3e000000 {} 0010560100000000 c07fea6a84120600",
        &PREPARED[9..]
    );
    assert_eq!(hex(writer.frame()), hex(&bytes(&expected)));
}
