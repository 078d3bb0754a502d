//! gir-json: written records are read back unchanged and satisfy the published schema; any other
//! text is an error that names the place.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use braid_gir::{
    BeforeKind, Detail, Error, Image, JsonOptions, JsonReader, JsonWriter, Operation, Reader,
    Record, ReplicaIdentity, SchemaDetail, SchemaNumber, Schemas, Value, Writer, render_frame,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::model::{OwnedChange, OwnedColumn, OwnedRecord, OwnedValue, Step, config, record, seed};

pub const KEYS: JsonOptions = JsonOptions {
    schema: SchemaDetail::Each,
    keys: true,
    complete: false,
};

pub fn lines(frame: &[u8], options: JsonOptions) -> Result<Vec<String>, Error> {
    let mut writer = JsonWriter::new(options);
    let mut reader = Reader::new(frame);
    let mut lines = Vec::new();
    while let Some(record) = reader.next_record()? {
        let mut line = String::new();
        writer.record(&record, &mut line)?;
        lines.push(line);
    }
    Ok(lines)
}

pub fn read(lines: &[String]) -> Writer {
    let mut reader = JsonReader::new();
    let mut out = Writer::new();
    for line in lines {
        reader
            .read(line.as_bytes(), &mut out)
            .unwrap_or_else(|error| panic!("{error}: {line}"));
    }
    reader.finish(&mut out).unwrap();
    out
}

/// A stream's records: a header, transactions whose changes have an announced schema, segments,
/// prepared transactions.
fn stream() -> impl Strategy<Value = Vec<OwnedRecord>> {
    vec(record(), 0..40).prop_map(in_order)
}

/// The open transaction or segment, as the order of records requires.
#[derive(Clone, Copy)]
enum Open {
    Nothing,
    Transaction(u64),
    Prepared(u64),
    Segment,
}

/// Transactions of which segments came. Ids are few, so that they repeat.
#[derive(Default)]
struct Running(BTreeSet<u32>);

impl Running {
    fn start(&mut self, xid: u32) -> OwnedRecord {
        let xid = xid % 3;
        OwnedRecord::SegmentStart(self.0.insert(xid), xid)
    }

    fn any(&self, number: u32) -> Option<u32> {
        let count = u32::try_from(self.0.len()).unwrap();
        let index = number.checked_rem(count)?;
        self.0.iter().nth(usize::try_from(index).unwrap()).copied()
    }

    fn take(&mut self, number: u32) -> Option<u32> {
        self.any(number).inspect(|xid| {
            self.0.remove(xid);
        })
    }
}

fn in_order(records: Vec<OwnedRecord>) -> Vec<OwnedRecord> {
    let mut stream = vec![OwnedRecord::StreamHeader {
        node_id: [0x1f; 16],
        numbers: (u64::MAX, 180_004),
        names: ["tokyo".to_owned(), "sh\"op".to_owned(), "UTF8".to_owned()],
    }];
    let mut widths = Vec::new();
    let mut open = Open::Nothing;
    let mut running = Running::default();
    for record in records {
        let is_open = !matches!(open, Open::Nothing);
        match record {
            OwnedRecord::StreamHeader { .. } => {}
            OwnedRecord::Schema {
                numbers,
                identity,
                names,
                mut columns,
                keys,
            } => {
                for (index, column) in columns.iter_mut().enumerate() {
                    column.names[0].push_str(&index.to_string());
                    if column.type_oid % 4 == 0 {
                        column.type_oid = 16;
                    }
                }
                widths.push(columns.len());
                stream.push(OwnedRecord::Schema {
                    numbers: (u32::try_from(widths.len()).unwrap() * 7, numbers.1),
                    identity,
                    names,
                    columns,
                    keys,
                });
            }
            OwnedRecord::Change(mut change) => {
                if is_open && !widths.is_empty() {
                    let index = usize::try_from(change.schema).unwrap() % widths.len();
                    change.schema = u32::try_from(index + 1).unwrap() * 7;
                    if change.kind == BeforeKind::Absent {
                        change.before.clear();
                    } else {
                        change.before.resize(widths[index], OwnedValue::None);
                    }
                    change.after.resize(widths[index], OwnedValue::None);
                    stream.push(OwnedRecord::Change(change));
                }
            }
            OwnedRecord::Truncate { flags, schemas } => {
                if is_open && !widths.is_empty() {
                    let schemas = schemas
                        .iter()
                        .map(|n| (n % u32::try_from(widths.len()).unwrap() + 1) * 7)
                        .collect();
                    stream.push(OwnedRecord::Truncate { flags, schemas });
                }
            }
            OwnedRecord::Message { transactional, .. } => {
                if is_open || !transactional {
                    stream.push(record);
                }
            }
            boundary => stream.extend(boundary_in_order(boundary, &mut open, &mut running)),
        }
    }
    stream.extend(match open {
        Open::Nothing => None,
        Open::Transaction(lsn) => Some(OwnedRecord::Commit {
            lsns: (lsn, 2),
            timestamp: 3,
        }),
        Open::Prepared(lsn) => Some(OwnedRecord::Prepare {
            lsns: (lsn, 2),
            timestamp: 3,
        }),
        Open::Segment => Some(OwnedRecord::SegmentStop),
    });
    stream
}

/// Returns the record if it may follow, possibly of another transaction.
fn boundary_in_order(
    record: OwnedRecord,
    open: &mut Open,
    running: &mut Running,
) -> Option<OwnedRecord> {
    let (record, next) = match (record, *open) {
        (record @ OwnedRecord::Subtransaction(_), Open::Segment) => (record, Open::Segment),
        (OwnedRecord::SegmentStop, Open::Segment) => (OwnedRecord::SegmentStop, Open::Nothing),
        (OwnedRecord::Commit { lsns, timestamp }, Open::Transaction(lsn)) => {
            let lsns = (lsn, lsns.1);
            (OwnedRecord::Commit { lsns, timestamp }, Open::Nothing)
        }
        (OwnedRecord::Prepare { lsns, timestamp }, Open::Prepared(lsn)) => {
            let lsns = (lsn, lsns.1);
            (OwnedRecord::Prepare { lsns, timestamp }, Open::Nothing)
        }
        (OwnedRecord::SegmentStart(_, xid), Open::Nothing) => (running.start(xid), Open::Segment),
        (OwnedRecord::Abort(xid, subxid), Open::Nothing) => {
            let record = if subxid % 2 == 0 {
                let xid = running.take(xid)?;
                OwnedRecord::Abort(xid, xid)
            } else {
                OwnedRecord::Abort(running.any(xid)?, subxid.max(3))
            };
            (record, Open::Nothing)
        }
        (mut record, Open::Nothing) => {
            let mut next = Open::Nothing;
            match &mut record {
                OwnedRecord::Begin { lsns, .. } => next = Open::Transaction(lsns.0),
                OwnedRecord::StreamedCommit { xid, .. } => *xid = running.take(*xid)?,
                OwnedRecord::Prepared(Step::Begin, prepared) => {
                    next = Open::Prepared(prepared.lsns.0);
                }
                OwnedRecord::Prepared(Step::Streamed, prepared) => {
                    prepared.xid = running.take(prepared.xid)?;
                }
                OwnedRecord::Prepared(Step::Commit, prepared)
                | OwnedRecord::RollbackPrepared(prepared, ..) => {
                    running.0.remove(&prepared.xid);
                }
                _ => return None,
            }
            (record, next)
        }
        _ => return None,
    };
    *open = next;
    Some(record)
}

pub fn frame(records: &[OwnedRecord]) -> Writer {
    let mut writer = Writer::new();
    for record in records {
        record.write(&mut writer).unwrap();
    }
    writer
}

fn validator() -> &'static jsonschema::Validator {
    static VALIDATOR: OnceLock<jsonschema::Validator> = OnceLock::new();
    VALIDATOR.get_or_init(|| {
        let text = include_str!("../../../../docs/gir.schema.json");
        let schema: serde_json::Value = serde_json::from_str(text).unwrap();
        jsonschema::draft202012::meta::validate(&schema).unwrap();
        jsonschema::draft202012::new(&schema).unwrap()
    })
}

/// Checks a line against the published schema.
pub(crate) fn is_published(line: &str) -> Result<(), String> {
    let value: serde_json::Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
    validator()
        .validate(&value)
        .map_err(|error| format!("{error} at {}", error.instance_path()))
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn records_come_back_as_they_were(records in stream(), once in any::<bool>()) {
        let frame = frame(&records);
        let schema = if once { SchemaDetail::Once } else { SchemaDetail::Each };
        let lines = lines(frame.frame(), JsonOptions { schema, ..KEYS }).unwrap();
        prop_assert_eq!(lines.len(), records.len());
        let again = read(&lines);
        prop_assert_eq!(again.frame(), frame.frame());
    }

    #[test]
    fn every_object_is_one_line_that_the_published_schema_takes(records in stream(), once in any::<bool>(), keys in any::<bool>()) {
        let schema = if once { SchemaDetail::Once } else { SchemaDetail::Each };
        for line in lines(frame(&records).frame(), JsonOptions { schema, keys, complete: false }).unwrap() {
            prop_assert!(!line.contains(|c: char| c < ' '));
            prop_assert_eq!(is_published(&line), Ok(()), "{}", line);
        }
    }

    #[test]
    fn one_array_is_as_good_as_many_objects(records in stream()) {
        let frame = frame(&records);
        let text = format!(" [ {} ]\n", lines(frame.frame(), KEYS).unwrap().join(" ,\n\t"));
        let mut out = Writer::new();
        JsonReader::new().read(text.as_bytes(), &mut out).unwrap();
        prop_assert_eq!(out.frame(), frame.frame());
    }

    #[test]
    fn changes_alone_are_enough(records in stream()) {
        // Without the objects that only announce: the same changes, each transaction with an
        // invented end.
        let frame = frame(&records);
        let mut wanted = Writer::new();
        let mut source = Reader::new(frame.frame());
        let (mut changes, mut committed) = (Vec::new(), false);
        for line in lines(frame.frame(), KEYS).unwrap() {
            match source.next_record().unwrap().unwrap() {
                Record::Begin(_) => committed = true,
                Record::Commit(_) => committed = false,
                record @ Record::Change(_) if committed => {
                    wanted.copy(&record).unwrap();
                    changes.push(line);
                }
                _ => {}
            }
        }
        let read = read(&changes);
        let (mut found, mut open, mut announced) = (Writer::new(), false, Vec::new());
        let mut reader = Reader::new(read.frame());
        while let Some(record) = reader.next_record().unwrap() {
            match record {
                Record::Begin(_) => { prop_assert!(!open); open = true; }
                Record::Commit(_) => { prop_assert!(open); open = false; }
                Record::Schema(schema) => { prop_assert!(!announced.contains(&schema.number)); announced.push(schema.number); }
                Record::Change(change) => {
                    prop_assert!(open && announced.contains(&change.header.schema));
                    found.copy(&record).unwrap();
                }
                _ => prop_assert!(false, "{record:?}"),
            }
        }
        prop_assert!(!open);
        prop_assert_eq!(found.frame(), wanted.frame());
    }
}

/// Returns a stream with one of everything, for the tests below.
pub fn sample() -> Vec<OwnedRecord> {
    let column = |name: &str, type_name: &str, type_oid, flags, type_modifier| OwnedColumn {
        flags,
        type_oid,
        type_modifier,
        names: [
            name.to_owned(),
            "pg_catalog".to_owned(),
            type_name.to_owned(),
        ],
    };
    let change = |operation, kind, before: Vec<OwnedValue>, after: Vec<OwnedValue>| {
        OwnedRecord::Change(OwnedChange {
            operation,
            schema: 0,
            kind,
            barrier: false,
            keys: vec![0x1122_3344_5566_7788],
            before,
            after,
        })
    };
    let text = |text: &str| OwnedValue::String(text.as_bytes().to_vec());
    vec![
        OwnedRecord::StreamHeader {
            node_id: *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff",
            numbers: (0x0123_4567_89ab_cdef, 150_008),
            names: ["tokyo".to_owned(), "shop".to_owned(), "UTF8".to_owned()],
        },
        OwnedRecord::Schema {
            numbers: (0, 16_395),
            identity: ReplicaIdentity::Default,
            names: ["public".to_owned(), "items".to_owned()],
            columns: vec![
                column("id", "int8", 20, 7, -1),
                column("note", "varchar", 1043, 0, 24),
            ],
            keys: vec![
                (false, vec![(0, String::new())]),
                (true, vec![(1, "nocase".to_owned()), (0, String::new())]),
            ],
        },
        OwnedRecord::Begin {
            lsns: (0x0156_18a0, 0x1_0000_3000),
            timestamp: 1_709_209_800_000_000,
            xid: 751,
            origin: "paris".to_owned(),
        },
        change(
            Operation::Insert,
            BeforeKind::Absent,
            vec![],
            vec![OwnedValue::Integer(1 << 53), text("héy \"\\\n\u{1}")],
        ),
        change(
            Operation::Update,
            BeforeKind::Key,
            vec![OwnedValue::Integer(1), OwnedValue::None],
            vec![OwnedValue::Integer(2), OwnedValue::None],
        ),
        change(
            Operation::Delete,
            BeforeKind::Row,
            vec![OwnedValue::Integer(2), OwnedValue::Null],
            vec![],
        ),
        OwnedRecord::Truncate {
            flags: (true, false),
            schemas: vec![0],
        },
        OwnedRecord::Message {
            transactional: false,
            lsn: 0x0156_1770,
            prefix: "aud".to_owned(),
            content: vec![0xff, 0],
        },
        OwnedRecord::Commit {
            lsns: (0x0156_18a0, 0x0156_18d0),
            timestamp: 1_709_209_800_000_000,
        },
    ]
}

#[test]
fn the_form_of_each_record() {
    let transaction = concat!(
        r#""transaction":{"xid":751,"lsn":"0/15618A0","commit_time":"2024-02-29T12:30:00Z","#,
        r#""node":"tokyo","origin":"paris","origin_lsn":"1/3000"}"#
    );
    let schema = concat!(
        r#"{"number":0,"database":"shop","namespace":"public","table":"items","oid":16395,"identity":"default","columns":["#,
        r#"{"name":"id","type":"int8","type_oid":20,"identity":true,"primary_key":true,"not_null":true},"#,
        r#"{"name":"note","type":"varchar","type_oid":1043,"type_modifier":24}]}"#
    );
    let expected = [
        r#"{"operation":"stream","version":1,"node_id":"00112233-4455-6677-8899-aabbccddeeff","system_identifier":"81985529216486895","server_version":150008,"node":"tokyo","database":"shop","charset":"UTF8"}"#.to_owned(),
        format!(r#"{{"operation":"schema","schema":{schema}}}"#),
        format!(r#"{{"operation":"begin",{transaction}}}"#),
        format!(r#"{{"operation":"insert",{transaction},"schema":{schema},"before":null,"after":{{"id":{{"integer":"9007199254740992"}},"note":"héy \"\\\n\u0001"}}}}"#),
        format!(r#"{{"operation":"update",{transaction},"schema":{schema},"before_kind":"key","before":{{"id":1}},"after":{{"id":2}}}}"#),
        format!(r#"{{"operation":"delete",{transaction},"schema":{schema},"before_kind":"row","before":{{"id":2,"note":null}},"after":null}}"#),
        format!(r#"{{"operation":"truncate",{transaction},"schemas":[{schema}],"cascade":true,"restart_identity":false}}"#),
        r#"{"operation":"message","transactional":false,"lsn":"0/1561770","prefix":"aud","content":{"binary":"ff00"}}"#.to_owned(),
        r#"{"operation":"commit","lsn":"0/15618A0","end_lsn":"0/15618D0","commit_time":"2024-02-29T12:30:00Z"}"#.to_owned(),
    ];
    let frame = frame(&sample());
    assert_eq!(
        lines(frame.frame(), JsonOptions::default()).unwrap(),
        expected
    );
    let once = JsonOptions {
        schema: SchemaDetail::Once,
        keys: true,
        complete: false,
    };
    assert_eq!(
        lines(frame.frame(), once).unwrap()[4],
        format!(
            r#"{{"operation":"update",{transaction},"schema":{{"number":0,"database":"shop","namespace":"public","table":"items"}},"before_kind":"key","before":{{"id":1}},"after":{{"id":2}},"keys":["1122334455667788"],"barrier":false}}"#
        )
    );
}

#[test]
fn hashed_keys_are_named() {
    let lines = lines(frame(&sample()).frame(), KEYS).unwrap();
    let keys = r#"],"unique_keys":[{"columns":["id"]},{"nulls_equal":true,"columns":[{"column":"note","comparison":"nocase"},"id"]}]}"#;
    assert!(lines[1].contains(keys), "{}", lines[1]);
    let mut wrong = lines.clone();
    wrong[1] = lines[1].replace(r#""columns":["id"]"#, r#""columns":["ID"]"#);
    assert!(error_of(&wrong).ends_with("(/schema/unique_keys/0/columns/0)"));
}

#[test]
fn without_hashes_a_change_is_a_barrier() {
    let lines = lines(frame(&sample()).frame(), JsonOptions::default()).unwrap();
    let text = render_frame(read(&lines).frame(), &mut Schemas::new(), Detail::Stable).unwrap();
    assert_eq!(
        text[4],
        "UPDATE 0 public.items keys=0 barrier before key(id=1) after(id=2, note=<none>)"
    );
}

fn value_json(value: &Value<'_>) -> String {
    let mut frame = Writer::new();
    let column = braid_gir::Column {
        flags: braid_gir::ColumnFlags(0),
        type_oid: 0,
        type_modifier: -1,
        name: "v",
        type_namespace: "pg_catalog",
        type_name: "x",
        mark: 0,
    };
    let names = ("n", "t");
    frame
        .schema(
            SchemaNumber(0),
            0,
            ReplicaIdentity::Nothing,
            names,
            (&[column], &[]),
        )
        .unwrap();
    // In an insert, an unavailable column would be named.
    frame
        .update::<Error>(
            SchemaNumber(0),
            BeforeKind::Absent,
            true,
            &[],
            |_| Ok(()),
            |image| {
                image.put(value);
                Ok(())
            },
        )
        .unwrap();
    let line = lines(frame.frame(), JsonOptions::default())
        .unwrap()
        .pop()
        .unwrap();
    let (_, image) = line.split_once(r#""after":{"#).unwrap();
    image
        .strip_prefix(r#""v":"#)
        .unwrap_or(image)
        .strip_suffix("}}")
        .unwrap()
        .to_owned()
}

#[test]
fn the_form_of_each_value() {
    let decimal = crate::model::decimal_bytes(1, 0x4000, 2, &[1, 2345, 6700]);
    let padded = crate::model::decimal_bytes(1, 0, 0, &[0, 1]);
    let zeros = crate::model::decimal_bytes(500, 0, 0, &[1]);
    let moment = braid_gir::DateTime {
        kind: braid_gir::DateTimeKind::Finite,
        days: -735_160,
        micros: 1,
        offset: Some(19_800),
    };
    for (value, json) in [
        (Value::None, ""),
        (Value::Null, "null"),
        (Value::Integer(-9_007_199_254_740_991), "-9007199254740991"),
        (
            Value::Integer(i64::MIN),
            r#"{"integer":"-9223372036854775808"}"#,
        ),
        (
            Value::BigInteger(&[0; 8]),
            r#"{"big_integer_bytes":"0000000000000000"}"#,
        ),
        (
            Value::BigInteger(&[0, 0, 0, 0, 0, 0, 0, 0, 1]),
            r#"{"big_integer":"18446744073709551616"}"#,
        ),
        (Value::Double(1.0), r#"{"double":1.0}"#),
        (Value::Double(-0.0), r#"{"double":"-0"}"#),
        (Value::Double(1e300), r#"{"double":1e300}"#),
        (Value::Double(f64::NAN), r#"{"double":"NaN"}"#),
        (
            Value::Double(f64::from_bits(0x7ff0_0000_0000_0001)),
            r#"{"double_bits":"7ff0000000000001"}"#,
        ),
        (Value::Single(0.1), r#"{"single":0.1}"#),
        (
            Value::Single(f32::NEG_INFINITY),
            r#"{"single":"-Infinity"}"#,
        ),
        (
            Value::Decimal(braid_gir::Decimal::new(&decimal).unwrap()),
            r#"{"decimal":"-12345.67"}"#,
        ),
        (
            Value::Decimal(braid_gir::Decimal::new(&padded).unwrap()),
            r#"{"decimal_bytes":"000200010000000000000001"}"#,
        ),
        (
            Value::Decimal(braid_gir::Decimal::new(&zeros).unwrap()),
            r#"{"decimal_bytes":"000101f4000000000001"}"#,
        ),
        (
            Value::UnixTimestamp(-1),
            r#"{"timestamp":"1969-12-31T23:59:59.999999Z"}"#,
        ),
        (
            Value::DateTime(moment),
            r#"{"datetime":"0044-03-15T00:00:00.000001+05:30 BC"}"#,
        ),
        (Value::String(b"a/\xc3\xa9\x7f"), "\"a/é\u{7f}\""),
        (Value::String(b"\xff"), r#"{"string_bytes":"ff"}"#),
        (Value::String(b"a\0"), r#"{"string_bytes":"6100"}"#),
        (Value::Binary(&[0xde, 0xad]), r#"{"binary":"dead"}"#),
        (Value::BinaryText(b"(1,2)"), r#"{"text":"(1,2)"}"#),
        (Value::BinaryText(b"\x80"), r#"{"text_bytes":"80"}"#),
    ] {
        assert_eq!(value_json(&value), json, "{value:?}");
    }
}

#[test]
fn truth_has_words_in_columns_of_its_type() {
    let mut records = sample();
    if let OwnedRecord::Schema { columns, .. } = &mut records[1] {
        columns[0].type_oid = 16;
    }
    let lines = lines(frame(&records).frame(), KEYS).unwrap();
    assert!(lines[3].contains(r#""after":{"id":{"integer":"9007199254740992"},"#));
    assert!(lines[4].contains(r#""before":{"id":true},"after":{"id":2}"#));
    assert_eq!(read(&lines).frame(), frame(&records).frame());
}

#[test]
fn a_charset_that_is_not_utf8() {
    let with = |charset: &str, decoder: Option<braid_gir::Decoder>| {
        let mut records = sample();
        if let OwnedRecord::StreamHeader { names, .. } = &mut records[0] {
            charset.clone_into(&mut names[2]);
        }
        if let OwnedRecord::Change(change) = &mut records[3] {
            // Valid UTF-8 by chance.
            change.after[1] = OwnedValue::String(b"\xc3\xa9".to_vec());
        }
        let mut writer = match decoder {
            Some(decoder) => JsonWriter::with_decoder(JsonOptions::default(), decoder),
            None => JsonWriter::new(JsonOptions::default()),
        };
        let frame = frame(&records);
        let mut reader = Reader::new(frame.frame());
        let mut out = String::new();
        for _ in 0..4 {
            let record = reader.next_record().unwrap().unwrap();
            writer.record(&record, &mut out).unwrap();
        }
        let charset = out.split_once(r#""charset":"#).unwrap().1;
        let note = out.rsplit_once(r#""note":"#).unwrap().1;
        (
            charset.split_once('}').unwrap().0.to_owned(),
            note.strip_suffix("}}").unwrap().to_owned(),
        )
    };
    let latin1: braid_gir::Decoder =
        |bytes| Some(bytes.iter().map(|byte| char::from(*byte)).collect());
    let pair = |charset: &str, note: &str| (charset.to_owned(), note.to_owned());
    assert_eq!(with("UTF8", Some(latin1)), pair(r#""UTF8""#, "\"é\""));
    assert_eq!(with("SQL_ASCII", None), pair(r#""SQL_ASCII""#, "\"é\""));
    assert_eq!(
        with("LATIN1", None),
        pair(r#""LATIN1""#, r#"{"string_bytes":"c3a9"}"#)
    );
    assert_eq!(with("LATIN1", Some(latin1)), pair(r#""UTF8""#, "\"Ã©\""));
}

#[test]
fn values_that_were_fetched_or_are_in_the_before_image() {
    let mut frame = Writer::new();
    let mut records = sample();
    records.truncate(3);
    for record in &records {
        record.write(&mut frame).unwrap();
    }
    let update = |kind, before: Vec<OwnedValue>| {
        OwnedRecord::Change(OwnedChange {
            operation: Operation::Update,
            schema: 0,
            kind,
            barrier: true,
            keys: vec![],
            before,
            after: vec![OwnedValue::Integer(2), OwnedValue::None],
        })
    };
    let old = OwnedValue::String(b"old".to_vec());
    update(BeforeKind::Absent, vec![])
        .write(&mut frame)
        .unwrap();
    update(BeforeKind::Row, vec![OwnedValue::Integer(1), old])
        .write(&mut frame)
        .unwrap();
    let mut other = Writer::new();
    other
        .insert::<Error>(SchemaNumber(0), false, &[], |image| {
            image.put(&Value::Integer(77));
            image.put(&Value::String(b"current"));
            Ok(())
        })
        .unwrap();
    let Ok(Some(Record::Change(fetched))) = Reader::new(other.frame()).next_record() else {
        panic!("no change");
    };
    let fetched: Image<'_> = fetched.after.unwrap();
    let all: Vec<_> = {
        let mut reader = Reader::new(frame.frame());
        std::iter::from_fn(|| reader.next_record().unwrap()).collect()
    };
    let after = |complete: bool, index: usize, fetched: Option<&Image<'_>>| {
        let mut writer = JsonWriter::new(JsonOptions {
            complete,
            ..JsonOptions::default()
        });
        let mut out = String::new();
        for record in all.iter().take(3) {
            writer.record(record, &mut out).unwrap();
        }
        out.clear();
        writer.record_with(&all[index], fetched, &mut out).unwrap();
        is_published(&out).unwrap();
        out.rsplit_once(r#""after":"#).unwrap().1.to_owned()
    };
    assert_eq!(after(false, 3, None), r#"{"id":2}}"#);
    assert_eq!(
        after(false, 3, Some(&fetched)),
        r#"{"id":2,"note":{"fetched":"current"}}}"#
    );
    assert_eq!(after(false, 4, None), r#"{"id":2}}"#);
    assert_eq!(after(true, 4, Some(&fetched)), r#"{"id":2,"note":"old"}}"#);

    // A fetched value is not part of the record.
    let line = after(false, 3, Some(&fetched));
    let mut lines = lines(frame.frame(), KEYS).unwrap();
    let logged = lines[3].clone();
    lines[3] = logged.replace(
        r#""after":{"id":2}"#,
        &format!(r#""after":{}"#, line.strip_suffix('}').unwrap()),
    );
    assert_ne!(lines[3], logged);
    lines.push(r#"{"operation":"commit","lsn":"0/15618A0","end_lsn":"0/15618D0","commit_time":"2024-01-01T00:00:00Z"}"#.to_owned());
    let again = read(&lines);
    assert_eq!(&again.frame()[..frame.len()], frame.frame());
}

#[test]
fn an_insert_names_what_it_lacks_and_is_read_with_what_was_fetched() {
    let mut frame = Writer::new();
    let mut records = sample();
    records.truncate(3);
    records.push(OwnedRecord::Change(OwnedChange {
        operation: Operation::Insert,
        schema: 0,
        kind: BeforeKind::Absent,
        barrier: true,
        keys: vec![],
        before: vec![],
        after: vec![OwnedValue::Integer(2), OwnedValue::None],
    }));
    for record in &records {
        record.write(&mut frame).unwrap();
    }
    let mut lines = lines(frame.frame(), KEYS).unwrap();
    let lacking = r#""after":{"id":2},"unavailable":["note"],"#;
    assert!(lines[3].contains(lacking), "{}", lines[3]);
    is_published(&lines[3]).unwrap();
    lines.push(r#"{"operation":"commit","lsn":"0/15618A0","end_lsn":"0/15618D0","commit_time":"2024-01-01T00:00:00Z"}"#.to_owned());
    let again = read(&lines);
    assert_eq!(&again.frame()[..frame.len()], frame.frame());

    // A value that was fetched for an insert is the column's value.
    lines[3] = lines[3].replace(lacking, r#""after":{"id":2,"note":{"fetched":"current"}},"#);
    is_published(&lines[3]).unwrap();
    let again = read(&lines);
    let mut reader = Reader::new(again.frame());
    let values = std::iter::from_fn(|| reader.next_record().unwrap()).find_map(|record| {
        let Record::Change(change) = record else {
            return None;
        };
        let values: Result<Vec<_>, _> = change.after.unwrap().values().collect();
        Some(values.unwrap())
    });
    assert_eq!(
        values,
        Some(vec![Value::Integer(2), Value::String(b"current")])
    );
}

#[test]
fn what_can_not_be_written_is_said_and_leaves_nothing() {
    let all = frame(&sample());
    let mut writer = JsonWriter::new(KEYS);
    let mut out = "before".to_owned();
    let mut reader = Reader::new(all.frame());
    let mut refused = 0;
    while let Some(record) = reader.next_record().unwrap() {
        if matches!(record, Record::Schema(_)) {
            continue;
        }
        let needs_schema = matches!(record, Record::Change(_) | Record::Truncate(_));
        let start = out.len();
        let written = writer.record(&record, &mut out);
        if needs_schema {
            assert_eq!(written, Err(Error::UnknownSchema(0)));
            assert_eq!(out.len(), start);
            refused += 1;
        } else {
            written.unwrap();
        }
    }
    assert_eq!(refused, 4);

    let mut records = sample();
    if let OwnedRecord::Change(change) = &mut records[3] {
        change.after.push(OwnedValue::Null);
    }
    let wide = lines(frame(&records).frame(), KEYS);
    assert_eq!(
        wide,
        Err(Error::ColumnCount {
            found: 3,
            expected: 2
        })
    );
    let mut records = sample();
    if let OwnedRecord::Schema { columns, .. } = &mut records[1] {
        columns[1].names[0] = "id".to_owned();
    }
    let twice = lines(frame(&records).frame(), KEYS);
    assert_eq!(twice, Err(Error::RepeatedColumn("id".to_owned())));
}

/// Returns the error of reading lines.
pub fn error_of(lines: &[String]) -> String {
    let mut reader = JsonReader::new();
    let mut out = Writer::new();
    for line in lines {
        let before = out.len();
        if let Err(error) = reader.read(line.as_bytes(), &mut out) {
            assert_eq!(out.len(), before);
            assert!(error.offset <= line.len());
            return error.to_string();
        }
    }
    reader
        .finish(&mut out)
        .map_or_else(|error| error.to_string(), |()| "accepted".to_owned())
}

#[test]
fn errors_name_what_and_where() {
    // Without the keys, so that the positions below are smaller.
    let mut records = sample();
    if let OwnedRecord::Schema { keys, .. } = &mut records[1] {
        keys.clear();
    }
    let good: Vec<_> = lines(frame(&records).frame(), KEYS)
        .unwrap()
        .iter()
        .map(|line| line.replace(r#","unique_keys":[]"#, ""))
        .collect();
    assert_eq!(error_of(&good), "accepted");
    let with = |index: usize, from: &str, to: &str| {
        let mut lines = good.clone();
        let changed = lines[index].replacen(from, to, 1);
        assert_ne!(changed, lines[index], "{from}");
        lines[index] = changed;
        lines
    };
    for (lines, expected) in [
        (vec![String::new()], "a JSON value expected, at byte 0"),
        (vec!["{\"a\":1".to_owned()], "\",\" or \"}\" expected, at byte 6"),
        (vec!["[1 2]".to_owned()], "\",\" or \"]\" expected, at byte 3"),
        (vec!["{} x".to_owned()], "end of the text expected, at byte 3"),
        (vec!["{}".to_owned()], "member \"operation\" is missing, at byte 0"),
        (vec!["7".to_owned()], "an object expected here, at byte 0"),
        (vec!["\"\\ud800\"".to_owned()], "malformed escape in a string, at byte 1"),
        (vec!["\"\\x\"".to_owned()], "malformed escape in a string, at byte 1"),
        (vec!["\"\t\"".to_owned()], "an escape for a control character expected, at byte 1"),
        (vec!["-".to_owned()], "a digit expected, at byte 1"),
        (vec!["01".to_owned()], "end of the text expected, at byte 1"),
        (vec!["[".repeat(17)], "nested too deeply, at byte 16"),
        (vec!["{\"operation\":\"merge\"}".to_owned()], "unknown operation \"merge\", at byte 13 (/operation)"),
        (with(0, "\"version\":1", "\"version\":2"), "unsupported GIR version 2, this build reads version 1, at byte 32 (/version)"),
        (with(0, "\"charset\":\"UTF8\"", "\"charset\":null"), "a string expected here, at byte 190 (/charset)"),
        (with(0, "00112233", "0011223"), "malformed UUID, at byte 44 (/node_id)"),
        (with(0, "8198", "x"), "malformed system identifier, at byte 103 (/system_identifier)"),
        (with(1, "\"identity\":\"default\"", "\"identity\":\"d\""), "unknown replica identity \"d\", at byte 121 (/schema/identity)"),
        (with(1, "\"type_oid\":20", "\"type_oid\":4294967296"), "type_oid is out of range, at byte 180 (/schema/columns/0/type_oid)"),
        (with(1, "\"name\":\"note\"", "\"name\":\"id\""), "column name \"id\" is there twice, at byte 31 (/schema)"),
        (with(1, "\"table\":\"items\"", "\"table\":\"i\\u0000\""), "relation name contains a zero byte, at byte 31 (/schema)"),
        (with(2, "0/15618A0", "0/15618A0/1"), "malformed LSN, at byte 52 (/transaction/lsn)"),
        (with(2, "\"xid\":751", "\"xid\":-1"), "xid is out of range, at byte 42 (/transaction/xid)"),
        (with(2, "2024-02-29", "2023-02-29"), "malformed timestamp, at byte 78 (/transaction/commit_time)"),
        (with(3, "\"before\":null", "\"before\":{}"), "this operation has no such image, at byte 449 (/before)"),
        (with(3, "\"after\":{", "\"after\":{\"x/~y\":1,"), "unknown member \"x/~y\", at byte 470 (/after/x~1~0y)"),
        (with(3, "\"note\":", "\"id\":"), "member \"id\" is there twice, at byte 504 (/after/id)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "9007199254740992"), "integer is out of range, at byte 468 (/after/id)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "1.5"), "malformed integer, at byte 468 (/after/id)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "[1]"), "null, true, false, a number, a string or an object expected here, at byte 468 (/after/id)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "{}"), "an object of one member expected here, at byte 468 (/after/id)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "{\"fetched\":{\"fetched\":1}}"), "nested too deeply, at byte 479 (/after/id/fetched)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "{\"money\":1}"), "unknown kind of value \"money\", at byte 468 (/after/id/money)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "{\"double\":1e999}"), "malformed float, at byte 478 (/after/id/double)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "{\"double\":\"inf\"}"), "malformed float, at byte 478 (/after/id/double)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "{\"binary\":\"abc\"}"), "malformed hexadecimal bytes, at byte 478 (/after/id/binary)"),
        (with(3, "{\"integer\":\"9007199254740992\"}", "{\"decimal_bytes\":\"00\"}"), "record ends inside decimal, at byte 485 (/after/id/decimal_bytes)"),
        (with(3, "\"keys\":[\"1122", "\"keys\":[\"112"), "malformed key hash, at byte 535 (/keys/0)"),
        (with(3, "\"xid\":751", "\"xid\":752"), "record is of another transaction, at byte 36 (/transaction)"),
        (with(3, "\"oid\":16395", "\"oid\":16396"), "schema 0 is not the one that was announced under this number, at byte 166 (/schema)"),
        (with(4, "\"before_kind\":\"key\"", "\"before_kind\":\"old\""), "unknown kind of before image \"old\", at byte 454 (/before_kind)"),
        (with(5, "\"after\":null", "\"after\":{}"), "this operation has no such image, at byte 498 (/after)"),
        (with(6, "\"cascade\":true", "\"cascade\":1"), "true or false expected here, at byte 455 (/cascade)"),
        (with(7, "\"ff00\"", "1"), "a string expected here, at byte 98 (/content/binary)"),
        (with(7, "\"transactional\"", "\"transactional\":true,\"transactional\""), "member \"transactional\" is there twice, at byte 60 (/transactional)"),
        (with(8, "commit\"", "begin\""), "unknown member \"lsn\""),
        (vec![good[0].clone(), good[0].clone()], "stream object is not the first one, at byte 0"),
        (vec![good[2].clone(), good[2].clone()], "transaction begins inside another, at byte 0"),
        (vec![good[2].clone()], "transaction has no end, at byte 0"),
        (with(8, r#""lsn":"0/15618A0""#, r#""lsn":"0/15618A1""#), "commit is of another transaction, at byte 28 (/lsn)"),
        (vec![good[8].clone()], "commit outside of a transaction, at byte 0"),
        (vec![r#"{"operation":"insert","schema":{"number":3,"namespace":"a","table":"b"},"after":{}}"#.to_owned()], "schema 3 was not announced, at byte 31 (/schema)"),
        (vec![r#"{"operation":"insert","schema":{"namespace":"a","table":"b"},"after":{}}"#.to_owned()], "member \"columns\" is missing, at byte 31 (/schema)"),
        (vec![r#"{"operation":"insert","schema":{"namespace":"a","table":"b","columns":[]},"after":{}}"#.to_owned()], "member \"transaction\" is missing, at byte 0"),
        (vec![format!("[{},{}]", good[1], good[8])], "commit outside of a transaction, at byte 307 (/1)"),
    ] {
        assert!(error_of(&lines).starts_with(expected), "{expected}: {}", error_of(&lines));
    }
}

#[test]
fn records_from_elsewhere_may_say_little() {
    let text = r#"[
      {"operation":"insert","transaction":{"lsn":"0/10","commit_time":"2024-02-29T12:30:00Z"},
       "schema":{"namespace":"public","table":"t","columns":[{"name":"id","type":"int4","identity":true},{"name":"v","type":"text"}]},
       "after":{"v":"x","id":1}},
      {"after":{"id":2},"schema":{"table":"t","columns":[{"name":"id","identity":true,"type":"int4"},{"type":"text","name":"v"}],"namespace":"public"},
       "operation":"update","before":{"id":1},"transaction":{"lsn":"0/10","commit_time":"2024-02-29T12:30:00Z"}},
      {"operation":"delete","schema":{"number":0,"namespace":"public","table":"t"},"before":{"id":2},"transaction":{"lsn":"0/20","commit_time":"2024-02-29T12:30:01Z","origin":"erp"}}
    ]"#;
    let mut out = Writer::new();
    let mut reader = JsonReader::new();
    reader.read(text.as_bytes(), &mut out).unwrap();
    reader.finish(&mut out).unwrap();
    let lines = render_frame(out.frame(), &mut Schemas::new(), Detail::Stable).unwrap();
    assert_eq!(
        lines,
        [
            "SCHEMA 0 public.t identity=d (id pg_catalog.int4 key, v pg_catalog.text)",
            "BEGIN",
            "INSERT 0 public.t keys=0 barrier after(id=1, v='x')",
            "UPDATE 0 public.t keys=0 barrier before key(id=1) after(id=2, v=<none>)",
            "COMMIT",
            "BEGIN origin='erp'",
            "DELETE 0 public.t keys=0 barrier before key(id=2)",
            "COMMIT",
        ]
    );
}

#[test]
fn a_number_that_is_too_wide_for_columns() {
    let columns = |count: usize| {
        let columns: Vec<_> = (0..count)
            .map(|n| format!(r#"{{"name":"c{n}","type":"x"}}"#))
            .collect();
        format!(
            r#"{{"operation":"schema","schema":{{"namespace":"a","table":"b","columns":[{}]}}}}"#,
            columns.join(",")
        )
    };
    assert_eq!(error_of(&[columns(1664)]), "accepted");
    assert!(error_of(&[columns(1665)]).starts_with("number of columns is out of range"));
}

/// No text panics. An accepted text is written as another one that is read as the same records.
#[test]
fn mutated_texts_never_panic() {
    use proptest::strategy::ValueTree;
    let seed = seed();
    let mut runner = proptest::test_runner::TestRunner::new(proptest::test_runner::Config {
        rng_seed: proptest::test_runner::RngSeed::Fixed(seed),
        ..proptest::test_runner::Config::default()
    });
    let mut random = crate::mutation::Random(seed | 1);
    let texts: Vec<String> = (0..100)
        .map(|_| {
            let records = stream().new_tree(&mut runner).unwrap().current();
            let lines = lines(frame(&records).frame(), KEYS).unwrap();
            format!("[{}]", lines.join(","))
        })
        .collect();
    let start = std::time::Instant::now();
    let (mut accepted, mut refused) = (0, 0);
    while start.elapsed() < std::time::Duration::from_secs(4) {
        let mut text = texts[random.below(texts.len())].clone().into_bytes();
        for _ in 0..=random.below(3) {
            let at = random.below(text.len());
            match random.below(4) {
                0 => text[at] = random.byte(),
                1 => text[at] = b"{}[]\",:0123456789e.-\\u"[random.below(22)],
                2 => text.truncate(at.max(1)),
                _ => {
                    let to = (at + random.below(40)).min(text.len());
                    text.drain(at..to);
                    if text.is_empty() {
                        text.push(b' ');
                    }
                }
            }
        }
        let mut out = Writer::new();
        let mut reader = JsonReader::new();
        match reader
            .read(&text, &mut out)
            .and_then(|()| reader.finish(&mut out))
        {
            Ok(()) => {
                accepted += 1;
                let again = read(&lines(out.frame(), KEYS).unwrap());
                assert_eq!(again.frame(), out.frame());
            }
            Err(error) => {
                refused += 1;
                assert!(error.offset <= text.len());
            }
        }
    }
    println!("{accepted} accepted, {refused} refused");
    assert!(accepted > 0 && refused > 0);
}

#[test]
fn a_text_that_is_cut_anywhere_is_refused() {
    let text = lines(frame(&sample()).frame(), KEYS).unwrap()[..7].join(",");
    let text = format!("[{text}]");
    for end in (0..text.len()).filter(|end| text.is_char_boundary(*end)) {
        let cut = text.get(..end).unwrap();
        let error = JsonReader::new()
            .read(cut.as_bytes(), &mut Writer::new())
            .unwrap_err();
        assert!(error.offset <= end, "{error}");
    }
}

#[test]
fn schemas_that_are_not_used_again_are_forgotten() {
    let shape = |number: u32| OwnedRecord::Schema {
        numbers: (number, 1),
        identity: ReplicaIdentity::Default,
        names: ["public".to_owned(), "items".to_owned()],
        columns: Vec::new(),
        keys: Vec::new(),
    };
    let truncate = |number: u32| OwnedRecord::Truncate {
        flags: (false, false),
        schemas: vec![number],
    };
    let mut writer = JsonWriter::new(KEYS);
    let mut write = |record: &OwnedRecord, forgets: bool| {
        if forgets {
            writer.keep_schemas(|number| number == SchemaNumber(7));
        }
        let frame = frame(std::slice::from_ref(record));
        let record = Reader::new(frame.frame()).next_record().unwrap().unwrap();
        writer.record(&record, &mut String::new())
    };
    write(&shape(7), false).unwrap();
    write(&shape(8), false).unwrap();
    write(&truncate(8), false).unwrap();
    write(&truncate(7), true).unwrap();
    assert_eq!(write(&truncate(8), false), Err(Error::UnknownSchema(8)));
    write(&shape(8), false).unwrap();
    write(&truncate(8), false).unwrap();
}
