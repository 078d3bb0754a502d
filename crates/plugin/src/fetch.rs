//! Values that are not in WAL, asked of the table as it is now.
//!
//! Logical decoding reads catalogs as they were; tables it cannot read at all: a snapshot of that
//! time does not exist, rows and files of it may be gone. So a worker looks them up, a background
//! process of its own with ordinary snapshots, connected to the same database. The user of the
//! stream has to have the right to read the table. It is read as its owner: to plan a query runs
//! code of the owner. Works in a walsender as in a backend that calls an SQL function, and needs no
//! connection string.
//!
//! [`Fetcher`] is the asking side, in the process that decodes; [`worker_main`] the other. Between
//! them are two message queues in a segment of shared memory: a question is a schema record and a
//! change, as they are in the stream; an answer is a record that has the row, or `E`, an SQLSTATE
//! and a message. The worker ends when the segment is let go, so with the stream.
//!
//! The row is found by the operators of its key (`braid_bgworker::key_columns`). A value of the key
//! may not be readable any more, as a `regclass` whose table was dropped since; then the row is
//! looked for by the text of its key.

use std::collections::HashMap;

use braid_bgworker::key_columns::{self, KeyColumn};
use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{
    Change, Column, Image, Reader, Record, ReplicaIdentity, Schema, SchemaNumber, Value, Writer,
};
use braid_postgres::catalog::{Rights, with_rights};
use braid_postgres::error::{self, PgError};
use braid_postgres::memory::Context;
use braid_postgres::message_queue::Channel;
use braid_postgres::setting::{self, As};
use braid_postgres::syscache::{self, AttributeRow};
use braid_postgres::worker::{self, Extra, Worker};
use braid_postgres::{catalog, encoding, plain, process, table_rights, value as postgres};
use pgrx::{PgSqlErrorCode, pg_sys};

use super::column::{Encoder, Tools};
use super::report;
use super::scratch::StreamMemory;
use super::session::Session;
use super::type_facts::TypeFacts;

/// How long the worker waits for a lock on the table, in milliseconds: the caller of an SQL
/// function may hold it.
const LOCK_TIMEOUT: &std::ffi::CStr = c"1000";
/// The first byte of an error; no record's tag.
const ERROR: u8 = b'E';

/// Asks a worker, which it starts with the first question.
#[derive(Debug, Default)]
pub(super) struct Fetcher {
    channel: Option<Channel>,
}

impl Fetcher {
    /// The record that has the row of `change` as it is now, as far as it was found; `schema` is
    /// its schema record.
    pub(super) fn ask(&mut self, schema: &[u8], change: &[u8]) -> Option<Vec<u8>> {
        let channel = self.channel.get_or_insert_with(open);
        let user = plain::GetUserId().to_u32();
        let question = [&user.to_le_bytes()[..], schema, change].concat();
        let answer = channel
            .send(&question)
            .and_then(|()| channel.receive())
            .unwrap_or_else(|| {
                report::fail(
                    PgSqlErrorCode::ERRCODE_CONNECTION_FAILURE,
                    "worker that looks up unchanged values has ended".to_owned(),
                    Some("Start the stream again; the server's log may say why."),
                )
            });
        match answer.split_first() {
            None => None,
            Some((&ERROR, failure)) => {
                let (sqlstate, message) = failure.split_first_chunk::<5>()?;
                let mut failure = PgError::new(
                    SqlState::from_code(*sqlstate),
                    format!(
                        "could not look up unchanged values: {}",
                        String::from_utf8_lossy(message)
                    ),
                );
                if failure.sqlstate == SqlState::InsufficientPrivilege {
                    failure = failure.with_hint(
                        "Values that are not in WAL are read from the table as the user of the stream. Grant SELECT on it, or leave out the option \"include-unchanged-toast\".",
                    );
                }
                failure.raise()
            }
            Some(_) => Some(answer),
        }
    }
}

/// Make the queues and start the worker.
fn open() -> Channel {
    if plain::RecoveryInProgress() {
        report::fail(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "unchanged values cannot be looked up during recovery".to_owned(),
            Some("Decode at the primary, or leave out the option \"include-unchanged-toast\"."),
        );
    }
    let started = Channel::create().and_then(|channel| {
        let worker = worker::start(&Worker {
            name: "braid fetcher",
            kind: "braid fetcher",
            function: "braid_fetch_main",
            argument: process::my_database(),
            extra: Extra::pack(&[u64::from(channel.number())]),
        })?;
        // So that waiting ends when the worker does.
        channel.end_with(&worker);
        Some(channel)
    });
    started.unwrap_or_else(|| {
        report::fail(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            "no background worker is left to look up unchanged values".to_owned(),
            Some(
                "Raise max_worker_processes, or leave out the option \"include-unchanged-toast\".",
            ),
        )
    })
}

/// The worker's main function; `argument` is the OID of the database.
pub fn worker_main(argument: pg_sys::Datum) {
    worker::initialize();
    worker::connect(u32::try_from(argument.value()).unwrap_or(0));
    let handle = u32::try_from(Extra::mine().word(0)).unwrap_or(0);
    if let Err(failure) = error::catch(|| serve(handle)) {
        error::abort();
        failure.log("looking up unchanged values failed");
    }
}

fn serve(number: u32) {
    // SAFETY: the asking side has given the number of its queues.
    let Some(channel) = (unsafe { Channel::attach(number) }) else {
        return;
    };
    // Values have the text that the stream gives them.
    let _session = Session::enter();
    setting::set_for_session(c"lock_timeout", LOCK_TIMEOUT, As::User);
    let mut keys = Keys::default();
    while let Some(question) = channel.receive() {
        let mut answer = error::transaction(|| answer(&question, &mut keys, Form::OfType));
        if answer.as_ref().is_err_and(is_of_statement) {
            keys.known.clear();
            answer = error::transaction(|| self::answer(&question, &mut keys, Form::AsText));
        }
        let answer = answer.unwrap_or_else(|failure| {
            // The table is locked: the value is left out.
            if failure.sqlstate == SqlState::LockNotAvailable {
                return Vec::new();
            }
            let sqlstate = failure.sqlstate.code();
            [&[ERROR], sqlstate.as_slice(), failure.message.as_bytes()].concat()
        });
        if channel.send(&answer).is_none() {
            return;
        }
    }
}

/// How the row is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// By values of the key's types.
    OfType,
    /// By the texts that these types write.
    AsText,
}

/// Returns whether a statement failed for a name, a type or a value in it, and not for lack of
/// rights.
fn is_of_statement(failure: &PgError) -> bool {
    let of = |class| failure.sqlstate.is_of(class);
    (of("0A") || of("22") || of("3F") || of("42"))
        && failure.sqlstate != SqlState::InsufficientPrivilege
}

/// How the columns of keys are compared, by the record of the table's schema. It comes anew when
/// the table is another one.
#[derive(Debug, Default)]
struct Keys {
    known: HashMap<Vec<u8>, Vec<KeyColumn>>,
}

/// More tables are forgotten, so that memory is bounded.
const MOST_KEYS: usize = 1_000;

impl Keys {
    /// The key columns of a table. In a transaction.
    fn of(&mut self, record: &[u8], schema: &Schema<'_>) -> &[KeyColumn] {
        if self.known.len() >= MOST_KEYS {
            self.known.clear();
        }
        self.known.entry(record.to_vec()).or_insert_with(|| {
            let identity = schema.columns().filter(|column| column.flags.is_identity());
            let names: Vec<String> = identity.map(|column| quote_literal(column.name)).collect();
            let relation = format!("{}::oid", schema.relation_oid);
            let names = format!("array[{}]::text[]", names.join(", "));
            let rows = catalog::query(&key_columns::query(&relation, &names), &[]);
            rows.iter()
                .filter_map(|row| KeyColumn::read(|place| row.get(place)?.as_deref()))
                .collect()
        })
    }
}

/// A record with the values that were found; nothing when there are none.
fn answer(question: &[u8], keys: &mut Keys, form: Form) -> Result<Vec<u8>, PgError> {
    let Some((user, records)) = question.split_first_chunk::<4>() else {
        return Ok(Vec::new());
    };
    let mut reader = Reader::new(records);
    let Some(Record::Schema(schema)) = reader.next_record()? else {
        return Ok(Vec::new());
    };
    let record = records.get(..records.len() - reader.remaining());
    let Some(Record::Change(change)) = reader.next_record()? else {
        return Ok(Vec::new());
    };
    let user = pg_sys::Oid::from(u32::from_le_bytes(*user));
    // SAFETY: the look-up is done before the transaction ends.
    let memory = unsafe { Context::of_transaction() };
    let relation = pg_sys::Oid::from(schema.relation_oid);
    let columns = keys.of(record.unwrap_or_default(), &schema);
    let condition = condition(&schema, &change, columns, form);
    with_rights(Rights::OwnerOf(relation), || {
        if syscache::raw_relation_name(relation).is_none()
            || table_rights::has_policies(user, relation)
        {
            return Ok(Vec::new());
        }
        check_right(user, relation, &schema)?;
        look_up(&schema, &change, condition, StreamMemory::over(memory))
    })
}

/// Checks that a role may read the columns of the stream in their table.
fn check_right(
    user: pg_sys::Oid,
    relation: pg_sys::Oid,
    schema: &Schema<'_>,
) -> Result<(), PgError> {
    let numbers: Vec<i16> = schema
        .columns()
        .filter_map(|column| encoding::to_server(column.name))
        .map(|name| syscache::column_number(relation, &name))
        .filter(|number| *number > 0)
        .collect();
    if table_rights::may_read(user, relation, &numbers) {
        return Ok(());
    }
    let (_, name) = syscache::relation_name(relation);
    Err(PgError::new(
        SqlState::InsufficientPrivilege,
        format!("permission denied for table {name}"),
    ))
}

/// In a transaction, whose memory is given.
fn look_up(
    schema: &Schema<'_>,
    change: &Change<'_>,
    condition: Option<Vec<u8>>,
    memory: StreamMemory,
) -> Result<Vec<u8>, PgError> {
    let relation = pg_sys::Oid::from(schema.relation_oid);
    let (namespace, name) = syscache::relation_name(relation);
    let kind = syscache::relation_kind(relation);
    let (Some(condition), Some(after)) = (condition, &change.after) else {
        return Ok(Vec::new());
    };
    let wanted: Vec<_> = schema
        .columns()
        .zip(after.values())
        .map(|(column, value)| {
            if matches!(value, Ok(Value::None)) {
                Wanted::new(relation, &column, memory)
            } else {
                None
            }
        })
        .collect();
    let list: Vec<_> = wanted.iter().flatten().map(|w| w.quoted.as_str()).collect();
    if list.is_empty() {
        return Ok(Vec::new());
    }
    // Rows of tables that inherit from this one are not its own; a partitioned table's are its
    // partitions'.
    let only = if kind == pg_sys::RELKIND_PARTITIONED_TABLE {
        ""
    } else {
        "only "
    };
    let statement = format!(
        "select {} from {only}{}.{} where ",
        list.join(", "),
        quoted(&namespace),
        quoted(&name)
    );
    let Some(statement) = encoding::to_server(&statement) else {
        return Ok(Vec::new());
    };
    let mut statement = statement.into_bytes();
    statement.extend_from_slice(&condition);
    let Ok(statement) = std::ffi::CString::new(statement) else {
        return Ok(Vec::new());
    };
    catalog::only_row(&statement, |found| row(found, &wanted, memory))
        .unwrap_or_else(|| Ok(Vec::new()))
}

/// A column whose value is wanted.
struct Wanted {
    quoted: String,
    encoder: Encoder,
}

impl Wanted {
    /// `None` when the relation has no such column any more, or one of another type. In a
    /// transaction, in which the encoder is used.
    fn new(relation: pg_sys::Oid, column: &Column<'_>, memory: StreamMemory) -> Option<Self> {
        let name = encoding::to_server(column.name)?;
        let number = syscache::column_number(relation, &name);
        let attribute = AttributeRow::find(relation, number).filter(|_| number > 0)?;
        let facts = TypeFacts::look_up(attribute.atttypid, attribute.atttypmod);
        if facts.oid.to_u32() != column.type_oid || syscache::length_of(facts.oid).0 != -1 {
            return None;
        }
        Some(Self {
            quoted: quoted(column.name),
            encoder: Encoder::new(&facts, false, true, memory),
        })
    }
}

/// The row has a value for each column that is wanted, of variable length. In a transaction.
fn row(
    found: &[Option<postgres::Value<'_>>],
    wanted: &[Option<Wanted>],
    memory: StreamMemory,
) -> Result<Vec<u8>, PgError> {
    let tools = Tools::new(memory);
    let mut found = found.iter();
    let mut writer = Writer::new();
    writer.insert::<PgError>(SchemaNumber(0), false, &[], |image| {
        for wanted in wanted {
            let Some(wanted) = wanted else {
                image.put(&Value::None);
                continue;
            };
            let value = found.next().copied().flatten();
            match value.and_then(postgres::Value::stored_bytes) {
                Some(bytes) => wanted.encoder.put(bytes, image, &tools),
                None => image.put(&Value::Null),
            }
        }
        Ok(())
    })?;
    Ok(writer.frame().to_vec())
}

/// The condition that finds the row by its replica identity, in the server's encoding; `None` if it
/// can't be expressed.
fn condition(
    schema: &Schema<'_>,
    change: &Change<'_>,
    keys: &[KeyColumn],
    form: Form,
) -> Option<Vec<u8>> {
    let after = change.after.as_ref()?;
    // With the whole row as identity the before image has all values that WAL has.
    if !matches!(
        schema.replica_identity,
        ReplicaIdentity::Default | ReplicaIdentity::Index
    ) {
        return None;
    }
    let mut before = change.before.iter().flat_map(Image::values);
    let mut condition = Vec::new();
    for (column, value) in schema.columns().zip(after.values()) {
        let old = before.next();
        if !column.flags.is_identity() {
            continue;
        }
        // A key's value that did not change may be in the old key only.
        let value = match (value.ok()?, old) {
            (Value::None, Some(Ok(old))) => old,
            (value, _) => value,
        };
        let text = match value {
            // A value of type "char" comes as a number, which is no literal of that type.
            Value::Integer(_) if column.type_oid == pg_sys::CHAROID.to_u32() => return None,
            Value::Binary(bytes) if column.type_oid == pg_sys::BYTEAOID.to_u32() => {
                hex_literal(bytes)
            }
            value => value.to_text()?.into_owned(),
        };
        if !condition.is_empty() {
            condition.extend_from_slice(b" and ");
        }
        // A column that is gone finds nothing.
        let known = keys.iter().find(|key| key.name == column.name)?;
        let name = quoted(column.name);
        let equal = match form {
            Form::OfType => known.equals(&name, PLACE),
            Form::AsText => KeyColumn::equals_as_text(&name, PLACE),
        };
        let equal = encoding::to_server(&equal)?;
        let mut around = equal.to_bytes().rsplitn(2, |byte| *byte == PLACE_BYTE);
        let (after, before) = (around.next()?, around.next()?);
        condition.extend_from_slice(before);
        push_literal(&mut condition, &text);
        condition.extend_from_slice(after);
    }
    (!condition.is_empty()).then_some(condition)
}

/// Placeholder for a value's literal, which is in the server's encoding already.
const PLACE: &str = "\u{1}";
const PLACE_BYTE: u8 = 1;

fn hex_literal(bytes: &[u8]) -> Vec<u8> {
    let digits = bytes.iter().flat_map(|byte| {
        [byte >> 4, byte & 15].map(|nibble| b"0123456789abcdef".get(usize::from(nibble)).copied())
    });
    b"\\x".iter().copied().chain(digits.flatten()).collect()
}

fn quoted(name: &str) -> String {
    quote_identifier(name)
}

/// Server encodings keep ASCII to itself, so bytes can be looked at one by one.
fn push_literal(out: &mut Vec<u8>, text: &[u8]) {
    out.extend_from_slice(b"E'");
    for byte in text {
        if matches!(byte, b'\'' | b'\\') {
            out.push(*byte);
        }
        out.push(*byte);
    }
    out.push(b'\'');
}
