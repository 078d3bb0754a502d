//! Values that are not in WAL, asked of the table as it is now.
//!
//! Logical decoding reads catalogs as they were; tables it cannot read at all: a snapshot of that time does not exist, rows and files
//! of it may be gone. So a worker looks them up, a background process of its own with ordinary snapshots, connected to the same
//! database. It works as the user of the stream: who may not read the table is told so. Works in a walsender as in a
//! backend that calls an SQL function, and needs no connection string.
//!
//! [`Fetcher`] is the asking side, in the process that decodes; [`worker_main`] the other. Between them are two message queues in
//! a segment of shared memory: a question is a schema record and a change, as they are in the stream; an answer is a record
//! that has the row, or `E`, an SQLSTATE and a message. The worker ends when the segment is let go, so with the stream.

use braid_bgworker::sql_text::quote_identifier;
use braid_gir::{
    Change, Column, Image, Reader, Record, ReplicaIdentity, Schema, SchemaNumber, Value, Writer,
};
use braid_postgres::encoding;
use braid_postgres::error::{self, LOCK_NOT_AVAILABLE, PgError};
use braid_postgres::worker::{self, Extra, Worker};
use pgrx::{PgSqlErrorCode, pg_sys};

use super::column::{Encoder, Tools, varlena_at};
use super::report;
use super::session::Session;
use super::type_facts::TypeFacts;

/// Bytes of each queue. Longer messages go through in pieces.
const QUEUE_BYTES: usize = 64 * 1024;
/// How long the worker waits for a lock on the table, in milliseconds: the caller of an SQL function may hold it.
const LOCK_TIMEOUT: &std::ffi::CStr = c"1000";
/// What an error begins with; no record's tag.
const ERROR: u8 = b'E';

/// Asks a worker, which it starts with the first question.
#[derive(Debug, Default)]
pub(super) struct Fetcher {
    channel: Option<Channel>,
}

/// Both queues, and the segment in which they are.
#[derive(Debug)]
struct Channel {
    segment: *mut pg_sys::dsm_segment,
    outgoing: *mut pg_sys::shm_mq_handle,
    incoming: *mut pg_sys::shm_mq_handle,
}

impl Fetcher {
    /// The record that has the row of `change` as it is now, as far as it was found; `schema` is its schema record.
    pub(super) fn ask(&mut self, schema: &[u8], change: &[u8]) -> Option<Vec<u8>> {
        let channel = self.channel.get_or_insert_with(open);
        // SAFETY: reads a variable.
        let user = unsafe { pg_sys::GetUserId() }.to_u32();
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
                let (sqlstate, message) = failure.split_at_checked(5)?;
                let mut failure = PgError::new(
                    &String::from_utf8_lossy(sqlstate),
                    format!(
                        "could not look up unchanged values: {}",
                        String::from_utf8_lossy(message)
                    ),
                );
                if sqlstate == b"42501" {
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

impl Drop for Channel {
    fn drop(&mut self) {
        // Runs when the stream's memory goes, with or without an error; none of these raises one.
        // SAFETY: queues and segment are this process's own and let go once.
        unsafe {
            pg_sys::shm_mq_detach(self.outgoing);
            pg_sys::shm_mq_detach(self.incoming);
            pg_sys::dsm_detach(self.segment);
        }
    }
}

/// Make the queues and start the worker.
fn open() -> Channel {
    // SAFETY: the segment is mapped until it is detached, and has room for both queues, each of which has one sender and one
    // receiver. The handles outlive transactions because TopMemoryContext does.
    unsafe {
        if pg_sys::RecoveryInProgress() {
            report::fail(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                "unchanged values cannot be looked up during recovery".to_owned(),
                Some("Decode at the primary, or leave out the option \"include-unchanged-toast\"."),
            );
        }
        let segment = pg_sys::dsm_create(2 * QUEUE_BYTES, 0);
        pg_sys::dsm_pin_mapping(segment);
        let base = pg_sys::dsm_segment_address(segment).cast::<u8>();
        let outgoing = pg_sys::shm_mq_create(base.cast(), QUEUE_BYTES);
        let incoming = pg_sys::shm_mq_create(base.add(QUEUE_BYTES).cast(), QUEUE_BYTES);
        pg_sys::shm_mq_set_sender(outgoing, pg_sys::MyProc);
        pg_sys::shm_mq_set_receiver(incoming, pg_sys::MyProc);
        let handle = pg_sys::dsm_segment_handle(segment);
        let (outgoing, incoming) = super::scratch::within(pg_sys::TopMemoryContext, || {
            let none = std::ptr::null_mut();
            (
                pg_sys::shm_mq_attach(outgoing, segment, none),
                pg_sys::shm_mq_attach(incoming, segment, none),
            )
        });
        let channel = Channel {
            segment,
            outgoing,
            incoming,
        };
        let started = worker::start(&Worker {
            name: "braid fetcher",
            kind: "braid fetcher",
            function: "braid_fetch_main",
            argument: pg_sys::MyDatabaseId.to_u32(),
            extra: Extra::pack(&[u64::from(handle)]),
        });
        let Some(worker) = started else {
            drop(channel);
            report::fail(
                PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
                "no background worker is left to look up unchanged values".to_owned(),
                Some(
                    "Raise max_worker_processes, or leave out the option \"include-unchanged-toast\".",
                ),
            );
        };
        // So that waiting ends when the worker does.
        pg_sys::shm_mq_set_handle(channel.outgoing, worker.raw());
        pg_sys::shm_mq_set_handle(channel.incoming, worker.raw());
        channel
    }
}

impl Channel {
    /// `None` when the other end is gone.
    fn send(&self, message: &[u8]) -> Option<()> {
        // SAFETY: the queue is attached, and the bytes stay while they are copied.
        let sent = unsafe {
            let bytes = message.as_ptr().cast();
            pg_sys::shm_mq_send(self.outgoing, message.len(), bytes, false, true)
        };
        (sent == pg_sys::shm_mq_result::SHM_MQ_SUCCESS).then_some(())
    }

    /// `None` when the other end is gone.
    fn receive(&self) -> Option<Vec<u8>> {
        let (mut len, mut data) = (0, std::ptr::null_mut());
        // SAFETY: the queue is attached; it gives `len` bytes that stay until the next call.
        unsafe {
            let received =
                pg_sys::shm_mq_receive(self.incoming, &raw mut len, &raw mut data, false);
            (received == pg_sys::shm_mq_result::SHM_MQ_SUCCESS)
                .then(|| std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec())
        }
    }
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

fn serve(handle: u32) {
    // SAFETY: the asking side laid the segment out; a handle that is not known any more gives null.
    let channel = unsafe {
        let segment = pg_sys::dsm_attach(handle);
        if segment.is_null() {
            return;
        }
        pg_sys::dsm_pin_mapping(segment);
        let base = pg_sys::dsm_segment_address(segment).cast::<u8>();
        let (incoming, outgoing) = (base.cast(), base.add(QUEUE_BYTES).cast());
        pg_sys::shm_mq_set_receiver(incoming, pg_sys::MyProc);
        pg_sys::shm_mq_set_sender(outgoing, pg_sys::MyProc);
        super::scratch::within(pg_sys::TopMemoryContext, || {
            let none = std::ptr::null_mut();
            Channel {
                segment,
                incoming: pg_sys::shm_mq_attach(incoming, segment, none),
                outgoing: pg_sys::shm_mq_attach(outgoing, segment, none),
            }
        })
    };
    // Values have the text that the stream gives them.
    let _session = Session::enter();
    // SAFETY: name and value are C strings, and every user may set it.
    unsafe {
        pg_sys::SetConfigOption(
            c"lock_timeout".as_ptr(),
            LOCK_TIMEOUT.as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_SESSION,
        );
    }
    while let Some(question) = channel.receive() {
        let answer = error::transaction(|| answer(&question)).unwrap_or_else(|failure| {
            // A table that is locked, or a key that has no usual equality: then there is no value to be had.
            if matches!(failure.sqlstate.as_str(), LOCK_NOT_AVAILABLE | "42883") {
                return Vec::new();
            }
            let sqlstate = format!("{:5.5}", failure.sqlstate);
            [&[ERROR], sqlstate.as_bytes(), failure.message.as_bytes()].concat()
        });
        if channel.send(&answer).is_none() {
            return;
        }
    }
}

/// A record with the values that were found; nothing when there are none.
fn answer(question: &[u8]) -> Result<Vec<u8>, PgError> {
    let Some((user, records)) = question.split_first_chunk::<4>() else {
        return Ok(Vec::new());
    };
    let mut reader = Reader::new(records);
    let (Some(Record::Schema(schema)), Some(Record::Change(change))) =
        (reader.next_record()?, reader.next_record()?)
    else {
        return Ok(Vec::new());
    };
    let user = pg_sys::Oid::from(u32::from_le_bytes(*user));
    // SAFETY: in a transaction; user and flags are put back below, or by its abort.
    unsafe {
        let (mut before, mut flags) = (pg_sys::InvalidOid, 0);
        pg_sys::GetUserIdAndSecContext(&raw mut before, &raw mut flags);
        let limits = pg_sys::SECURITY_LOCAL_USERID_CHANGE | pg_sys::SECURITY_RESTRICTED_OPERATION;
        pg_sys::SetUserIdAndSecContext(user, flags | limits.cast_signed());
        pg_sys::SPI_connect();
        let found = look_up(&schema, &change);
        pg_sys::SPI_finish();
        pg_sys::SetUserIdAndSecContext(before, flags);
        found
    }
}

/// # Safety
/// In a transaction, connected to SPI.
unsafe fn look_up(schema: &Schema<'_>, change: &Change<'_>) -> Result<Vec<u8>, PgError> {
    // SAFETY: as the caller says; names are copied, the relation may be gone.
    let relation = pg_sys::Oid::from(schema.relation_oid);
    let (name, namespace, kind) = unsafe {
        let name = pg_sys::get_rel_name(relation);
        if name.is_null() {
            return Ok(Vec::new());
        }
        let namespace = pg_sys::get_namespace_name(pg_sys::get_rel_namespace(relation));
        (
            encoding::from_server(name),
            encoding::from_server(namespace),
            pg_sys::get_rel_relkind(relation).cast_unsigned(),
        )
    };
    let (Some(condition), Some(after)) = (condition(schema, change), &change.after) else {
        return Ok(Vec::new());
    };
    let wanted: Vec<_> = schema
        .columns()
        .zip(after.values())
        .map(|(column, value)| {
            if matches!(value, Ok(Value::None)) {
                // SAFETY: as the caller says.
                unsafe { Wanted::new(relation, &column) }
            } else {
                None
            }
        })
        .collect();
    let list: Vec<_> = wanted.iter().flatten().map(|w| w.quoted.as_str()).collect();
    if list.is_empty() {
        return Ok(Vec::new());
    }
    // Rows of tables that inherit from this one are not its own; a partitioned table's are its partitions'.
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
    // SAFETY: a C string; reads only. What SPI returns stays until SPI is left, after the values were written.
    unsafe {
        pg_sys::SPI_execute(statement.as_ptr(), true, 2);
        if pg_sys::SPI_processed != 1 || pg_sys::SPI_tuptable.is_null() {
            return Ok(Vec::new());
        }
        let table = &*pg_sys::SPI_tuptable;
        row(*table.vals, table.tupdesc, &wanted)
    }
}

/// A column whose value is wanted.
struct Wanted {
    quoted: String,
    encoder: Encoder,
}

impl Wanted {
    /// `None` when the relation has no such column any more, or one of another type.
    ///
    /// # Safety
    /// In a transaction.
    unsafe fn new(relation: pg_sys::Oid, column: &Column<'_>) -> Option<Self> {
        let name = encoding::to_server(column.name)?;
        // SAFETY: as the caller says; the encoder is used in this transaction only.
        unsafe {
            let number = pg_sys::get_attnum(relation, name.as_ptr());
            if number <= 0 {
                return None;
            }
            let (mut declared, mut modifier, mut collation) =
                (pg_sys::InvalidOid, -1, pg_sys::InvalidOid);
            pg_sys::get_atttypetypmodcoll(
                relation,
                number,
                &raw mut declared,
                &raw mut modifier,
                &raw mut collation,
            );
            let facts = TypeFacts::look_up(declared, modifier);
            if facts.oid.to_u32() != column.type_oid || pg_sys::get_typlen(facts.oid) != -1 {
                return None;
            }
            Some(Self {
                quoted: quoted(column.name),
                encoder: Encoder::new(&facts, false, true, pg_sys::CurTransactionContext),
            })
        }
    }
}

/// # Safety
/// The tuple has a value for each column that is wanted.
unsafe fn row(
    tuple: pg_sys::HeapTuple,
    shape: pg_sys::TupleDesc,
    wanted: &[Option<Wanted>],
) -> Result<Vec<u8>, PgError> {
    // SAFETY: lives as long as the transaction.
    let tools = Tools::new(unsafe { pg_sys::CurTransactionContext });
    let mut writer = Writer::new();
    let mut number = 0;
    writer.insert::<PgError>(SchemaNumber(0), false, &[], |image| {
        for wanted in wanted {
            let Some(wanted) = wanted else {
                image.put(&Value::None);
                continue;
            };
            number += 1;
            let mut is_null = false;
            // SAFETY: as the caller says; the types have variable length, so a value that is not null points to one.
            unsafe {
                let value = pg_sys::SPI_getbinval(tuple, shape, number, &raw mut is_null);
                if is_null {
                    image.put(&Value::Null);
                } else {
                    let start = value.cast_mut_ptr::<u8>().cast_const();
                    wanted.encoder.put(varlena_at(start), image, &tools);
                }
            }
        }
        Ok(())
    })?;
    Ok(writer.frame().to_vec())
}

/// What finds the row by its replica identity, in the server's encoding; `None` where it can't be said.
fn condition(schema: &Schema<'_>, change: &Change<'_>) -> Option<Vec<u8>> {
    let after = change.after.as_ref()?;
    // With the whole row as identity the before image has what there is.
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
            // What stands for a character is a number.
            Value::Integer(_) if column.type_oid == pg_sys::CHAROID.to_u32() => return None,
            Value::Binary(bytes) if column.type_oid == pg_sys::BYTEAOID.to_u32() => {
                hex_literal(bytes)
            }
            value => value.to_text()?.into_owned(),
        };
        if !condition.is_empty() {
            condition.extend_from_slice(b" and ");
        }
        condition.extend_from_slice(encoding::to_server(&quoted(column.name))?.to_bytes());
        condition.extend_from_slice(b" = ");
        push_literal(&mut condition, &text);
    }
    (!condition.is_empty()).then_some(condition)
}

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
