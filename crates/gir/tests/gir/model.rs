//! Owned records, strategies that generate any of them, and a function to write them.

use braid_gir::{
    Abort, BeforeKind, Begin, Change, Column, ColumnFlags, Commit, DateTime, DateTimeKind, Decimal,
    Image, ImageWriter, Message, Operation, Prepared, Record, ReplicaIdentity, Result,
    RollbackPrepared, SchemaKeyColumn, SchemaNumber, SegmentStart, StreamHeader, StreamedCommit,
    Value, Writer,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};

/// Settings of a property test. The seed is new each time and printed (the harness shows it if the
/// test fails). GIR_SEED repeats a run.
pub fn config(cases: u32) -> Config {
    let seed = seed();
    Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..Config::default()
    }
}

pub fn seed() -> u64 {
    let given = std::env::var("GIR_SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        u64::try_from(now.as_nanos() & u128::from(u64::MAX)).unwrap()
    });
    println!("GIR_SEED={seed}");
    seed
}

#[derive(Debug, Clone)]
pub enum OwnedValue {
    Null,
    None,
    Integer(i64),
    BigInteger(Vec<u8>),
    Double(u64),
    Single(u32),
    Decimal(Vec<u8>),
    UnixTimestamp(i64),
    DateTime(DateTime),
    String(Vec<u8>),
    Binary(Vec<u8>),
    BinaryText(Vec<u8>),
}

impl OwnedValue {
    pub fn borrow(&self) -> Value<'_> {
        match self {
            Self::Null => Value::Null,
            Self::None => Value::None,
            Self::Integer(value) => Value::Integer(*value),
            Self::BigInteger(bytes) => Value::BigInteger(bytes),
            Self::Double(bits) => Value::Double(f64::from_bits(*bits)),
            Self::Single(bits) => Value::Single(f32::from_bits(*bits)),
            Self::Decimal(bytes) => Value::Decimal(Decimal::new(bytes).unwrap()),
            Self::UnixTimestamp(micros) => Value::UnixTimestamp(*micros),
            Self::DateTime(value) => Value::DateTime(*value),
            Self::String(bytes) => Value::String(bytes),
            Self::Binary(bytes) => Value::Binary(bytes),
            Self::BinaryText(bytes) => Value::BinaryText(bytes),
        }
    }

    /// Compares the parts bit by bit, without the crate's own PartialEq.
    pub fn is_exactly(&self, value: &Value<'_>) -> bool {
        match (self, value) {
            (Self::Null, Value::Null) | (Self::None, Value::None) => true,
            (Self::Integer(a), Value::Integer(b))
            | (Self::UnixTimestamp(a), Value::UnixTimestamp(b)) => a == b,
            (Self::Double(a), Value::Double(b)) => *a == b.to_bits(),
            (Self::Single(a), Value::Single(b)) => *a == b.to_bits(),
            (Self::Decimal(a), Value::Decimal(b)) => a == b.as_bytes(),
            (Self::DateTime(a), Value::DateTime(b)) => {
                (a.kind, a.days, a.micros, a.offset) == (b.kind, b.days, b.micros, b.offset)
            }
            (Self::BigInteger(a), Value::BigInteger(b))
            | (Self::String(a), Value::String(b))
            | (Self::Binary(a), Value::Binary(b))
            | (Self::BinaryText(a), Value::BinaryText(b)) => a == b,
            _ => false,
        }
    }
}

#[derive(Debug, Clone)]
pub struct OwnedColumn {
    pub flags: u8,
    pub type_oid: u32,
    pub type_modifier: i32,
    pub names: [String; 3],
}

#[derive(Debug, Clone)]
pub struct OwnedChange {
    pub operation: Operation,
    pub schema: u32,
    pub kind: BeforeKind,
    pub barrier: bool,
    pub keys: Vec<u64>,
    pub before: Vec<OwnedValue>,
    pub after: Vec<OwnedValue>,
}

/// Whether nulls are equal, and the columns.
type OwnedKey = (bool, Vec<(u16, String)>);

fn borrow_key((nulls, columns): &OwnedKey) -> (bool, Vec<SchemaKeyColumn<'_>>) {
    let columns = columns.iter().map(|(column, comparison)| SchemaKeyColumn {
        column: *column,
        comparison,
    });
    (*nulls, columns.collect())
}

#[derive(Debug, Clone)]
pub enum OwnedRecord {
    StreamHeader {
        node_id: [u8; 16],
        numbers: (u64, u32),
        names: [String; 3],
    },
    Schema {
        numbers: (u32, u32),
        identity: ReplicaIdentity,
        names: [String; 2],
        columns: Vec<OwnedColumn>,
        keys: Vec<OwnedKey>,
    },
    Begin {
        lsns: (u64, u64),
        timestamp: i64,
        xid: u32,
        origin: String,
    },
    Commit {
        lsns: (u64, u64),
        timestamp: i64,
    },
    Change(OwnedChange),
    Truncate {
        flags: (bool, bool),
        schemas: Vec<u32>,
    },
    Message {
        transactional: bool,
        lsn: u64,
        prefix: String,
        content: Vec<u8>,
    },
    SegmentStart(bool, u32),
    SegmentStop,
    Subtransaction(u32),
    Abort(u32, u32),
    StreamedCommit {
        lsns: (u64, u64, u64),
        timestamp: i64,
        xid: u32,
        origin: String,
    },
    Prepared(Step, OwnedPrepared),
    Prepare {
        lsns: (u64, u64),
        timestamp: i64,
    },
    RollbackPrepared(OwnedPrepared, u64, i64),
}

/// Records of a prepared transaction that have the same fields.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    Begin,
    Streamed,
    Commit,
}

#[derive(Debug, Clone)]
pub struct OwnedPrepared {
    pub lsns: (u64, u64, u64),
    pub timestamp: i64,
    pub xid: u32,
    pub origin: String,
    pub gid: String,
}

impl OwnedPrepared {
    fn borrow(&self) -> Prepared<'_> {
        Prepared {
            begin: Begin {
                commit_lsn: self.lsns.0,
                commit_timestamp: self.timestamp,
                xid: self.xid,
                origin: &self.origin,
                origin_lsn: self.lsns.1,
            },
            end_lsn: self.lsns.2,
            gid: &self.gid,
        }
    }
}

fn put_row(row: &[OwnedValue], image: &mut ImageWriter<'_>) -> Result<()> {
    for value in row {
        image.put(&value.borrow());
    }
    Ok(())
}

fn is_row(row: &[OwnedValue], image: Option<Image<'_>>) -> bool {
    let image = image.unwrap();
    let read: Vec<_> = image.values().map(|value| value.unwrap()).collect();
    usize::from(image.columns()) == row.len()
        && read.len() == row.len()
        && row
            .iter()
            .zip(&read)
            .all(|(expected, value)| expected.is_exactly(value))
}

impl OwnedChange {
    fn write(&self, writer: &mut Writer) -> Result<()> {
        let schema = SchemaNumber(self.schema);
        let before = |image: &mut ImageWriter<'_>| put_row(&self.before, image);
        let after = |image: &mut ImageWriter<'_>| put_row(&self.after, image);
        match self.operation {
            Operation::Insert => writer.insert(schema, self.barrier, &self.keys, after),
            Operation::Update => {
                writer.update(schema, self.kind, self.barrier, &self.keys, before, after)
            }
            Operation::Delete => writer.delete(schema, self.kind, self.barrier, &self.keys, before),
        }
    }

    fn is_same(&self, change: &Change<'_>) -> bool {
        let header = change.header;
        let listed: &[u64] = if self.keys.len() > 255 {
            &[]
        } else {
            &self.keys
        };
        change.operation == self.operation
            && header.schema.0 == self.schema
            && header.before == self.kind
            && header.barrier == (self.barrier || self.keys.len() > 255)
            && header.writeset.len() == listed.len()
            && header.writeset.hashes().eq(listed.iter().copied())
            && match self.kind {
                BeforeKind::Absent => change.before.is_none(),
                _ => is_row(&self.before, change.before),
            }
            && match self.operation {
                Operation::Delete => change.after.is_none(),
                _ => is_row(&self.after, change.after),
            }
    }
}

impl OwnedRecord {
    pub fn write(&self, writer: &mut Writer) -> Result<()> {
        match self {
            Self::StreamHeader {
                node_id,
                numbers,
                names: [node_name, database, charset],
            } => writer.stream_header(&StreamHeader {
                node_id: *node_id,
                system_identifier: numbers.0,
                server_version: numbers.1,
                node_name,
                database,
                charset,
            }),
            Self::Schema {
                numbers,
                identity,
                names,
                columns,
                keys,
            } => {
                let columns: Vec<_> = columns.iter().map(borrow_column).collect();
                let names = (names[0].as_str(), names[1].as_str());
                let keys: Vec<_> = keys.iter().map(borrow_key).collect();
                let keys: Vec<_> = keys
                    .iter()
                    .map(|(nulls, columns)| (*nulls, columns.as_slice()))
                    .collect();
                writer.schema(
                    SchemaNumber(numbers.0),
                    numbers.1,
                    *identity,
                    names,
                    (&columns, &keys),
                )
            }
            Self::Begin {
                lsns,
                timestamp,
                xid,
                origin,
            } => writer.begin(&Begin {
                commit_lsn: lsns.0,
                commit_timestamp: *timestamp,
                xid: *xid,
                origin,
                origin_lsn: lsns.1,
            }),
            Self::Commit { lsns, timestamp } => writer.commit(&Commit {
                commit_lsn: lsns.0,
                end_lsn: lsns.1,
                commit_timestamp: *timestamp,
            }),
            Self::Change(change) => change.write(writer),
            Self::Truncate { flags, schemas } => {
                let schemas: Vec<_> = schemas.iter().map(|number| SchemaNumber(*number)).collect();
                writer.truncate(flags.0, flags.1, &schemas)
            }
            Self::Message {
                transactional,
                lsn,
                prefix,
                content,
            } => writer.message(&Message {
                transactional: *transactional,
                lsn: *lsn,
                prefix,
                content,
            }),
            Self::SegmentStart(first, xid) => writer.segment_start(SegmentStart {
                first: *first,
                xid: *xid,
            }),
            Self::SegmentStop => writer.segment_stop(),
            Self::Subtransaction(xid) => writer.subtransaction(*xid),
            Self::Abort(xid, subxid) => writer.abort(Abort {
                xid: *xid,
                subxid: *subxid,
            }),
            Self::StreamedCommit {
                lsns,
                timestamp,
                xid,
                origin,
            } => writer.streamed_commit(&StreamedCommit {
                begin: Begin {
                    commit_lsn: lsns.0,
                    commit_timestamp: *timestamp,
                    xid: *xid,
                    origin,
                    origin_lsn: lsns.1,
                },
                end_lsn: lsns.2,
            }),
            Self::Prepared(..) | Self::Prepare { .. } | Self::RollbackPrepared(..) => {
                self.write_prepared(writer)
            }
        }
    }

    fn write_prepared(&self, writer: &mut Writer) -> Result<()> {
        match self {
            Self::Prepared(step, prepared) => {
                let prepared = prepared.borrow();
                match step {
                    Step::Begin => writer.begin_prepared(&prepared),
                    Step::Streamed => writer.streamed_prepare(&prepared),
                    Step::Commit => writer.commit_prepared(&prepared),
                }
            }
            Self::Prepare { lsns, timestamp } => writer.prepare(&Commit {
                commit_lsn: lsns.0,
                end_lsn: lsns.1,
                commit_timestamp: *timestamp,
            }),
            Self::RollbackPrepared(prepared, prepare_end_lsn, prepare_timestamp) => writer
                .rollback_prepared(&RollbackPrepared {
                    prepared: prepared.borrow(),
                    prepare_end_lsn: *prepare_end_lsn,
                    prepare_timestamp: *prepare_timestamp,
                }),
            _ => Ok(()),
        }
    }

    pub fn frame(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        self.write(&mut writer).unwrap();
        writer.frame().to_vec()
    }

    /// Returns whether `record` has exactly this content.
    pub fn is_same(&self, record: &Record<'_>) -> bool {
        match (self, record) {
            (
                Self::StreamHeader {
                    node_id,
                    numbers,
                    names,
                },
                Record::StreamHeader(header),
            ) => {
                header.node_id == *node_id
                    && (header.system_identifier, header.server_version) == *numbers
                    && [header.node_name, header.database, header.charset] == *names
            }
            (
                Self::Schema {
                    numbers,
                    identity,
                    names,
                    columns,
                    keys,
                },
                Record::Schema(schema),
            ) => {
                (schema.number.0, schema.relation_oid) == *numbers
                    && schema.replica_identity == *identity
                    && [schema.namespace, schema.name] == *names
                    && usize::from(schema.column_count()) == columns.len()
                    && schema.columns().eq(columns.iter().map(borrow_column))
                    && schema.keys().count() == keys.len()
                    && schema.keys().zip(keys).all(|(read, written)| {
                        let (nulls, columns) = borrow_key(written);
                        read.nulls_equal == nulls && read.columns().eq(columns)
                    })
            }
            (
                Self::Begin {
                    lsns,
                    timestamp,
                    xid,
                    origin,
                },
                Record::Begin(begin),
            ) => {
                (begin.commit_lsn, begin.origin_lsn) == *lsns
                    && begin.commit_timestamp == *timestamp
                    && begin.xid == *xid
                    && begin.origin == origin
            }
            (Self::Commit { lsns, timestamp }, Record::Commit(commit)) => {
                (commit.commit_lsn, commit.end_lsn) == *lsns
                    && commit.commit_timestamp == *timestamp
            }
            (Self::Change(expected), Record::Change(change)) => expected.is_same(change),
            (Self::Truncate { flags, schemas }, Record::Truncate(truncate)) => {
                (truncate.cascade, truncate.restart_identity) == *flags
                    && truncate
                        .schemas()
                        .map(|number| number.0)
                        .eq(schemas.iter().copied())
            }
            (
                Self::Message {
                    transactional,
                    lsn,
                    prefix,
                    content,
                },
                Record::Message(message),
            ) => {
                message.transactional == *transactional
                    && message.lsn == *lsn
                    && message.prefix == prefix
                    && message.content == content
            }
            (Self::SegmentStart(first, xid), Record::SegmentStart(start)) => {
                (start.first, start.xid) == (*first, *xid)
            }
            (Self::SegmentStop, Record::SegmentStop) => true,
            (Self::Subtransaction(xid), Record::Subtransaction(read)) => xid == read,
            (Self::Abort(xid, subxid), Record::Abort(abort)) => {
                (abort.xid, abort.subxid) == (*xid, *subxid)
            }
            (
                Self::StreamedCommit {
                    lsns,
                    timestamp,
                    xid,
                    origin,
                },
                Record::StreamedCommit(commit),
            ) => {
                let begin = &commit.begin;
                (begin.commit_lsn, begin.origin_lsn, commit.end_lsn) == *lsns
                    && begin.commit_timestamp == *timestamp
                    && begin.xid == *xid
                    && begin.origin == origin
            }
            _ => self.is_same_prepared(record),
        }
    }

    fn is_same_prepared(&self, record: &Record<'_>) -> bool {
        match (self, record) {
            (Self::Prepared(Step::Begin, expected), Record::BeginPrepared(read))
            | (Self::Prepared(Step::Streamed, expected), Record::StreamedPrepare(read))
            | (Self::Prepared(Step::Commit, expected), Record::CommitPrepared(read)) => {
                expected.borrow() == *read
            }
            (Self::Prepare { lsns, timestamp }, Record::Prepare(read)) => {
                (read.commit_lsn, read.end_lsn) == *lsns && read.commit_timestamp == *timestamp
            }
            (Self::RollbackPrepared(expected, lsn, timestamp), Record::RollbackPrepared(read)) => {
                expected.borrow() == read.prepared
                    && (read.prepare_end_lsn, read.prepare_timestamp) == (*lsn, *timestamp)
            }
            _ => false,
        }
    }
}

fn borrow_column(column: &OwnedColumn) -> Column<'_> {
    let [name, type_namespace, type_name] = &column.names;
    Column {
        flags: ColumnFlags(column.flags),
        type_oid: column.type_oid,
        type_modifier: column.type_modifier,
        name,
        type_namespace,
        type_name,
        mark: u64::from(column.type_oid).saturating_sub(1 << 20),
    }
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        "[a-z_]{1,12}",
        vec(prop::char::range('\u{1}', '\u{10ffff}'), 0..8).prop_map(String::from_iter),
    ]
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(Vec::new()),
        Just((0..=255).collect::<Vec<u8>>()),
        vec(any::<u8>(), 1..20),
        // Around the lengths where the length itself takes one byte more.
        (126_usize..130).prop_map(|count| vec![b'x'; count]),
    ]
}

fn integer() -> impl Strategy<Value = i64> {
    let edges = vec![
        i64::MIN,
        i64::MIN + 1,
        -65,
        -64,
        -1,
        0,
        1,
        63,
        64,
        i64::MAX - 1,
        i64::MAX,
    ];
    prop_oneof![
        prop::sample::select(edges),
        any::<i64>(),
        -10_000_i64..10_000
    ]
}

/// Returns a decimal in the form of `numeric_send`.
pub fn decimal_bytes(weight: i16, sign: u16, scale: u16, digits: &[u16]) -> Vec<u8> {
    let count = u16::try_from(digits.len()).unwrap();
    let mut fields = vec![count, weight.cast_unsigned(), sign, scale];
    fields.extend_from_slice(digits);
    fields
        .iter()
        .flat_map(|field| field.to_be_bytes())
        .collect()
}

fn decimal() -> impl Strategy<Value = Vec<u8>> {
    let finite = (
        prop_oneof![-3_i16..4, any::<i16>()],
        prop::sample::select(vec![0x0000_u16, 0x4000]),
        prop_oneof![0_u16..10, Just(Decimal::MAX_SCALE)],
        vec(prop_oneof![0_u16..10_000, Just(0), Just(9_999)], 0..6),
    )
        .prop_map(|(weight, sign, scale, digits)| decimal_bytes(weight, sign, scale, &digits));
    let special = prop::sample::select(vec![(0xC000_u16, 0_u16), (0xD000, 32), (0xF000, 32)])
        .prop_map(|(sign, scale)| decimal_bytes(0, sign, scale, &[]));
    prop_oneof![4 => finite, 1 => special]
}

fn date_time() -> impl Strategy<Value = DateTime> {
    let kind = prop::sample::select(vec![
        DateTimeKind::Finite,
        DateTimeKind::Finite,
        DateTimeKind::Infinity,
        DateTimeKind::MinusInfinity,
    ]);
    // BC, the first and the last day of PostgreSQL's date, and any other day.
    let edges = vec![
        i32::MIN,
        -2_440_588,
        -719_529,
        -1,
        0,
        2_145_042_905,
        i32::MAX,
    ];
    let days = prop_oneof![prop::sample::select(edges), any::<i32>(), -30_000..30_000];
    let micros = prop_oneof![
        Just(0),
        Just(DateTime::MAX_MICROS),
        0..=DateTime::MAX_MICROS
    ];
    let offset = prop::option::of(prop_oneof![any::<i32>(), -57_599..57_599]);
    (kind, days, micros, offset).prop_map(|(kind, days, micros, offset)| {
        let (days, micros) = if kind == DateTimeKind::Finite {
            (days, micros)
        } else {
            (0, 0)
        };
        DateTime {
            kind,
            days,
            micros,
            offset,
        }
    })
}

pub fn value() -> impl Strategy<Value = OwnedValue> {
    let doubles = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -0.0,
        f64::MIN_POSITIVE,
        f64::MAX,
    ]
    .map(f64::to_bits);
    // A NaN with the sign set and a payload, a signalling NaN, the smallest subnormal.
    let doubles = [
        &doubles[..],
        &[0xfff8_0000_dead_beef, 0x7ff0_0000_0000_0001, 1],
    ]
    .concat();
    let singles = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0].map(f32::to_bits);
    let singles = [&singles[..], &[0xffc0_beef, 0x7f80_0001, 1]].concat();
    prop_oneof![
        Just(OwnedValue::Null),
        Just(OwnedValue::None),
        integer().prop_map(OwnedValue::Integer),
        bytes().prop_map(OwnedValue::BigInteger),
        prop_oneof![prop::sample::select(doubles), any::<u64>()].prop_map(OwnedValue::Double),
        prop_oneof![prop::sample::select(singles), any::<u32>()].prop_map(OwnedValue::Single),
        decimal().prop_map(OwnedValue::Decimal),
        integer().prop_map(OwnedValue::UnixTimestamp),
        date_time().prop_map(OwnedValue::DateTime),
        bytes().prop_map(OwnedValue::String),
        bytes().prop_map(OwnedValue::Binary),
        bytes().prop_map(OwnedValue::BinaryText),
    ]
}

fn change() -> impl Strategy<Value = OwnedRecord> {
    let kinds = prop::sample::select(vec![
        (Operation::Insert, BeforeKind::Absent),
        (Operation::Update, BeforeKind::Absent),
        (Operation::Update, BeforeKind::Key),
        (Operation::Update, BeforeKind::Row),
        (Operation::Delete, BeforeKind::Key),
        (Operation::Delete, BeforeKind::Row),
    ]);
    let keys = prop_oneof![12 => vec(any::<u64>(), 0..4), 1 => vec(any::<u64>(), 254..258)];
    let row = || vec(value(), 0..7);
    (kinds, any::<u32>(), any::<bool>(), keys, row(), row()).prop_map(
        |((operation, kind), schema, barrier, keys, before, after)| {
            OwnedRecord::Change(OwnedChange {
                operation,
                schema,
                kind,
                barrier,
                keys,
                before,
                after,
            })
        },
    )
}

fn schema() -> impl Strategy<Value = OwnedRecord> {
    let identity = prop::sample::select(vec![
        ReplicaIdentity::Default,
        ReplicaIdentity::Index,
        ReplicaIdentity::Full,
        ReplicaIdentity::Nothing,
    ]);
    let column = (
        0_u8..16,
        any::<u32>(),
        any::<i32>(),
        [name(), name(), name()],
    )
        .prop_map(|(flags, type_oid, type_modifier, names)| OwnedColumn {
            flags,
            type_oid,
            type_modifier,
            names,
        });
    (
        any::<(u32, u32)>(),
        identity,
        [name(), name()],
        vec(column, 0..5),
        vec((any::<bool>(), vec((any::<u16>(), name()), 0..4)), 0..4),
    )
        .prop_map(|(numbers, identity, names, columns, mut keys)| {
            // A key's columns are the schema's.
            let count = u16::try_from(columns.len()).unwrap();
            for (_, key) in &mut keys {
                if count == 0 {
                    key.clear();
                }
                for (column, _) in key {
                    *column %= count;
                }
            }
            OwnedRecord::Schema {
                numbers,
                identity,
                names,
                columns,
                keys,
            }
        })
}

fn prepared() -> impl Strategy<Value = OwnedPrepared> {
    (
        any::<(u64, u64, u64)>(),
        integer(),
        any::<u32>(),
        [name(), name()],
    )
        .prop_map(|(lsns, timestamp, xid, [origin, gid])| OwnedPrepared {
            lsns,
            timestamp,
            xid,
            origin,
            gid,
        })
}

pub fn record() -> impl Strategy<Value = OwnedRecord> {
    prop_oneof![
        1 => (any::<[u8; 16]>(), any::<(u64, u32)>(), [name(), name(), name()])
            .prop_map(|(node_id, numbers, names)| OwnedRecord::StreamHeader { node_id, numbers, names }),
        2 => schema(),
        1 => (any::<(u64, u64)>(), integer(), any::<u32>(), name())
            .prop_map(|(lsns, timestamp, xid, origin)| OwnedRecord::Begin { lsns, timestamp, xid, origin }),
        1 => (any::<(u64, u64)>(), integer())
            .prop_map(|(lsns, timestamp)| OwnedRecord::Commit { lsns, timestamp }),
        6 => change(),
        1 => (any::<(bool, bool)>(), vec(any::<u32>(), 0..6))
            .prop_map(|(flags, schemas)| OwnedRecord::Truncate { flags, schemas }),
        1 => (any::<bool>(), any::<u64>(), name(), bytes()).prop_map(
            |(transactional, lsn, prefix, content)| OwnedRecord::Message { transactional, lsn, prefix, content }
        ),
        1 => any::<(bool, u32)>().prop_map(|(first, xid)| OwnedRecord::SegmentStart(first, xid)),
        1 => Just(OwnedRecord::SegmentStop),
        1 => any::<u32>().prop_map(OwnedRecord::Subtransaction),
        1 => any::<(u32, u32)>().prop_map(|(xid, subxid)| OwnedRecord::Abort(xid, subxid)),
        1 => (any::<(u64, u64, u64)>(), integer(), any::<u32>(), name())
            .prop_map(|(lsns, timestamp, xid, origin)| OwnedRecord::StreamedCommit { lsns, timestamp, xid, origin }),
        1 => (prop::sample::select(vec![Step::Begin, Step::Streamed, Step::Commit]), prepared())
            .prop_map(|(step, prepared)| OwnedRecord::Prepared(step, prepared)),
        1 => (any::<(u64, u64)>(), integer())
            .prop_map(|(lsns, timestamp)| OwnedRecord::Prepare { lsns, timestamp }),
        1 => (prepared(), any::<u64>(), integer())
            .prop_map(|(prepared, lsn, timestamp)| OwnedRecord::RollbackPrepared(prepared, lsn, timestamp)),
    ]
}
