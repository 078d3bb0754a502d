//! `braid.parked_transaction` and `braid.parked_record`: transactions that are parked because they
//! can't be applied (`on_error => 'park'`), and those that have to follow them.
//! `braid_bgworker::parked` decides which transaction follows which. Written and read by the
//! appliers; the functions show them, request another attempt, and give them up.
//!
//! The stored transaction can be read without the provider: part 0 is the header of its stream and
//! the schemas of its relations. The other parts are its records as they arrived.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use braid_bgworker::parked::{Parked, Touch};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{JsonOptions, JsonWriter, Reader, Record, SchemaDetail, Tag, lsn_text, parse_lsn};
use braid_postgres::encoding::{self, json_in_ascii};
use braid_postgres::error::PgError;
use braid_postgres::process::{self, blocking_pids};

use crate::subscription::{Subscription, execute, execute_counting, rows};
use crate::{registry, settings};

/// A part has at most so many bytes: a larger frame is stored in several.
const PART: usize = 1 << 20;
/// Class of the advisory lock of a session that requests another attempt.
pub const RETRY_LOCK: i32 = 0xb41e;

/// The parked transactions of a subscription, as its appliers know them.
#[derive(Debug, Default)]
pub struct Known {
    /// The tables and keys that each of them holds.
    pub parked: Parked,
    /// Transactions that are retried automatically.
    pub waiting: HashSet<i64>,
    /// The subset of `waiting` that waits for a lock at another node.
    pub by_lock: HashSet<i64>,
}

/// Why a transaction is parked.
#[derive(Debug, Clone, Copy)]
pub enum Why<'a> {
    /// The transaction can't be applied.
    Error(&'a PgError, u32),
    /// The transaction has to follow this one.
    Waits(i64),
    /// The transaction waits for a lock at another node, with this error. A commit that waits for
    /// this subscription may hold that lock.
    Lock(&'a PgError),
}

/// The stored facts about a transaction, beside its records.
#[derive(Debug, Clone, Default)]
pub struct Note {
    /// Transaction id at the provider.
    pub xid: u32,
    /// Remote LSN of the commit record.
    pub commit_lsn: u64,
    /// Remote LSN behind the commit record.
    pub end_lsn: u64,
    /// Node where it was first committed.
    pub origin: String,
    /// Microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// How many changes it has.
    pub changes: u64,
    /// Length of its records, in bytes.
    pub bytes: u64,
    /// Changes before these that are committed, in chunks.
    pub committed: u64,
}

fn cell(row: &[Option<String>], place: usize) -> String {
    row.get(place).cloned().flatten().unwrap_or_default()
}

fn list(text: &str) -> impl Iterator<Item = String> {
    text.split('\x01')
        .filter(|part| !part.is_empty())
        .map(str::to_owned)
}

impl Known {
    /// Whether some are to be tried now.
    #[must_use]
    pub fn has_due(&self) -> bool {
        self.waiting
            .iter()
            .any(|id| self.parked.holder_of(*id).is_none())
    }

    /// Updates it. In the caller's transaction.
    ///
    /// # Errors
    /// Those of SPI; XX001.
    pub fn read(&mut self, subscription_id: u32) -> Result<(), PgError> {
        let found = rows(
            "select parked_id::text, (state = 'waiting')::text, \
                 (state = 'waiting' and waits_for is null and error_sqlstate = $2)::text \
             from braid.parked_transaction where subscription_id = $1 and state <> 'skipped' order by parked_id",
            &[
                i64::from(subscription_id).into(),
                SqlState::LockNotAvailable.to_string().as_str().into(),
            ],
        )?;
        let mut here = HashSet::new();
        self.waiting.clear();
        self.by_lock.clear();
        for row in &found {
            let id = cell(row, 0).parse().map_err(|_| corrupt())?;
            here.insert(id);
            if cell(row, 1) == "true" {
                self.waiting.insert(id);
            }
            if cell(row, 2) == "true" {
                self.by_lock.insert(id);
            }
            if !self.parked.contains(id)
                && let Some(touch) = read_touch(id)?
            {
                self.parked.insert(id, touch);
            }
        }
        let gone: Vec<i64> = self.parked.ids().filter(|id| !here.contains(id)).collect();
        for id in gone {
            self.parked.remove(id);
        }
        Ok(())
    }
}

fn corrupt() -> PgError {
    PgError::new(
        SqlState::DataCorrupted,
        "a row of braid.parked_transaction is corrupt",
    )
}

fn read_touch(id: i64) -> Result<Option<Touch>, PgError> {
    let found = rows(
        "select array_to_string(barred_tables, E'\\x01'), array_to_string(other_tables, E'\\x01'), array_to_string(keys, ',') \
         from braid.parked_transaction where parked_id = $1",
        &[id.into()],
    )?;
    let Some(row) = found.first() else {
        return Ok(None);
    };
    let keys: Result<Vec<u64>, PgError> = cell(row, 2)
        .split(',')
        .filter(|key| !key.is_empty())
        .map(|key| {
            key.parse::<i64>()
                .map(i64::cast_unsigned)
                .map_err(|_| corrupt())
        })
        .collect();
    Ok(Some(Touch::stored(
        list(&cell(row, 0)),
        list(&cell(row, 1)),
        keys?,
    )))
}

/// Checks that one more transaction of this size may be parked. In the caller's transaction.
///
/// # Errors
/// 53400; those of SPI.
pub fn check_limits(subscription: &Subscription, bytes: u64, why: Why<'_>) -> Result<(), PgError> {
    let found = rows(
        "select count(*)::text, coalesce(sum(bytes), 0)::text from braid.parked_transaction \
         where subscription_id = $1 and state <> 'skipped'",
        &[i64::from(subscription.id).into()],
    )?;
    let number = |place: usize| -> u64 {
        found
            .first()
            .map_or(0, |row| cell(row, place).parse().unwrap_or(0))
    };
    let (count, size) = (number(0), number(1));
    let setting = if count >= settings::max_parked() {
        "braid.max_parked"
    } else if size.saturating_add(bytes) > settings::max_parked_bytes() {
        "braid.max_parked_size"
    } else {
        return Ok(());
    };
    let why = match why {
        Why::Error(error, _) | Why::Lock(error) => {
            format!("The transaction failed: {}.", error.message)
        }
        Why::Waits(id) => format!("The transaction has to follow parked transaction {id}."),
    };
    Err(PgError::new(
        SqlState::ConfigurationLimitExceeded,
        format!("a transaction cannot be parked: {setting} is reached"),
    )
    .with_detail(format!(
        "{why} {count} transactions of {size} bytes are parked."
    ))
    .with_hint(format!(
        "Remove the causes and run braid.retry_parked, or give transactions up with braid.skip_parked, or raise {setting}; then run \
         braid.enable_subscription. The view braid.parked_transactions lists them."
    )))
}

/// A number for the transaction that is parked next. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn next_id() -> Result<i64, PgError> {
    crate::subscription::rows_written(
        "select nextval(pg_get_serial_sequence('braid.parked_transaction', 'parked_id'))::text",
        &[],
    )?
    .first()
    .and_then(|row| cell(row, 0).parse().ok())
    .ok_or_else(corrupt)
}

/// Records that a transaction is parked. In the caller's transaction.
///
/// # Errors
/// 53400 if there are too many; those of SPI.
pub fn insert(
    subscription: &Subscription,
    id: i64,
    note: &Note,
    touch: &Touch,
    why: Why<'_>,
) -> Result<(), PgError> {
    check_limits(subscription, note.bytes, why)?;
    let tables = |wanted: bool| {
        let names: Vec<&str> = touch
            .tables()
            .filter(|(_, barred)| *barred == wanted)
            .map(|(name, _)| name)
            .collect();
        names.join("\x01")
    };
    let keys: Vec<String> = touch
        .keys()
        .iter()
        .map(|key| key.cast_signed().to_string())
        .collect();
    let (error, attempts, waits_for) = match why {
        Why::Error(error, attempts) => (Some(error), attempts, None),
        Why::Waits(id) => (None, 0, Some(id)),
        Why::Lock(error) => (Some(error), 1, None),
    };
    let state = match why {
        Why::Error(..) => "failed",
        Why::Waits(_) | Why::Lock(_) => "waiting",
    };
    let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    execute(
        "insert into braid.parked_transaction (parked_id, subscription_id, subscription_name, state, xid, commit_lsn, end_lsn, origin_name, \
             committed_at, changes, bytes, barred_tables, other_tables, keys, waits_for, error_sqlstate, error_message, error_detail, \
             error_hint, attempts, committed_changes, error_context, tried_at) \
         overriding system value values ($19, $1, $2::name, $22, $3::text::xid, $4::pg_lsn, $5::pg_lsn, \
             $6::name, 'epoch'::timestamptz + $7 * interval '1 microsecond', $8, $9, string_to_array($10, E'\\x01'), \
             string_to_array($11, E'\\x01'), string_to_array($12, ',')::bigint[], $14, $15, $16, $17, $18, $13, $20, $21, \
             case when $13 > 0 then clock_timestamp() end)",
        &[
            i64::from(subscription.id).into(),
            subscription.name.as_str().into(),
            note.xid.to_string().into(),
            lsn_text(note.commit_lsn).into(),
            lsn_text(note.end_lsn).into(),
            note.origin.as_str().into(),
            note.timestamp.into(),
            signed(note.changes).into(),
            signed(note.bytes).into(),
            tables(true).into(),
            tables(false).into(),
            keys.join(",").into(),
            i64::from(attempts).into(),
            waits_for.into(),
            error.map(|error| error.sqlstate.to_string()).into(),
            error.map(|error| error.message.clone()).into(),
            error.and_then(|error| error.detail.clone()).into(),
            error.and_then(|error| error.hint.clone()).into(),
            id.into(),
            signed(note.committed).into(),
            error.and_then(|error| error.context()).into(),
            state.into(),
        ],
    )
}

/// Appends a frame to the records of a parked transaction; `part` is the next part's number. In the
/// caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn add(id: i64, part: &mut i32, frame: &[u8]) -> Result<(), PgError> {
    let mut rest = frame;
    loop {
        let (now, later) = rest.split_at(rest.len().min(PART));
        execute(
            "insert into braid.parked_record (parked_id, part, ends, records) values ($1, $2, $3, $4)",
            &[
                id.into(),
                i64::from(*part).into(),
                later.is_empty().into(),
                now.into(),
            ],
        )?;
        *part += 1;
        rest = later;
        if rest.is_empty() {
            return Ok(());
        }
    }
}

/// The frame that starts with part `part`, which becomes the number of the part behind it; `None`
/// when there is none. In a transaction.
///
/// # Errors
/// Those of SPI; XX001 when a part is missing.
pub fn frame(id: i64, part: &mut i32) -> Result<Option<Vec<u8>>, PgError> {
    let mut frame = Vec::new();
    loop {
        let found = pgrx::Spi::connect(|client| {
            let table = client.select(
                "select records, ends from braid.parked_record where parked_id = $1 and part = $2",
                Some(1),
                &[id.into(), i64::from(*part).into()],
            )?;
            match table.into_iter().next() {
                Some(row) => Ok(Some((row.get::<Vec<u8>>(1)?, row.get::<bool>(2)?))),
                None => Ok(None),
            }
        })
        .map_err(|error: pgrx::spi::SpiError| {
            PgError::new(
                SqlState::InternalError,
                format!("could not read parked records: {error}"),
            )
        })?;
        match found {
            Some((Some(records), Some(ends))) => {
                frame.extend_from_slice(&records);
                *part += 1;
                if ends {
                    return Ok(Some(frame));
                }
            }
            _ if frame.is_empty() => return Ok(None),
            _ => {
                return Err(PgError::new(
                    SqlState::DataCorrupted,
                    "parked records are incomplete",
                ));
            }
        }
    }
}

/// Removes a parked transaction that the current transaction applies. Returns false if it was given
/// up meanwhile; then the current transaction must not be committed.
///
/// # Errors
/// Those of SPI.
pub fn remove(id: i64) -> Result<bool, PgError> {
    let removed = execute_counting(
        "delete from braid.parked_transaction where parked_id = $1 and state <> 'skipped'",
        &[id.into()],
    )?;
    execute(
        "delete from braid.parked_record where parked_id = $1",
        &[id.into()],
    )?;
    Ok(removed == 1)
}

/// Records that it has failed once more. In the caller's transaction.
///
/// # Errors
/// Those of SPI.
pub fn failed_again(id: i64, error: &PgError) -> Result<(), PgError> {
    note_attempt(id, error, "failed")
}

/// Records that it was tried once more and still waits for a lock at another node. In the caller's
/// transaction.
///
/// # Errors
/// Those of SPI.
pub fn still_waits(id: i64, error: &PgError) -> Result<(), PgError> {
    note_attempt(id, error, "waiting")
}

fn note_attempt(id: i64, error: &PgError, state: &str) -> Result<(), PgError> {
    execute(
        "update braid.parked_transaction set state = $7, waits_for = null, error_sqlstate = $2, error_message = $3, \
             error_detail = $4, error_hint = $5, error_context = $6, attempts = attempts + 1, tried_at = clock_timestamp() \
          where parked_id = $1 and state <> 'skipped'",
        &[
            id.into(),
            error.sqlstate.to_string().into(),
            error.message.as_str().into(),
            error.detail.clone().into(),
            error.hint.clone().into(),
            error.context().into(),
            state.into(),
        ],
    )
}

/// Where a parked transaction ends at the provider, and whether its first chunks are committed. In
/// a transaction.
///
/// # Errors
/// Those of SPI; 42704 if it does not exist.
pub fn end_of(id: i64) -> Result<(u64, bool), PgError> {
    rows(
        "select end_lsn::text, (committed_changes > 0)::text from braid.parked_transaction where parked_id = $1 and state <> 'skipped'",
        &[id.into()],
    )?
    .first()
    .and_then(|row| Some((parse_lsn(&cell(row, 0))?, cell(row, 1) == "true")))
    .ok_or_else(|| PgError::new(SqlState::UndefinedObject, "the transaction is not parked any more"))
}

/// The changes of a parked transaction as JSON objects, one a record. In a transaction, with the
/// rights of the tables' owner.
///
/// # Errors
/// Those of SPI; XX001 for records that can't be read.
pub fn records_as_json(id: i64) -> Result<Vec<String>, PgError> {
    let mut writer = JsonWriter::new(JsonOptions {
        schema: SchemaDetail::Once,
        ..JsonOptions::default()
    });
    let mut lines = Vec::new();
    let mut part = 0;
    let mut first = true;
    while let Some(frame) = frame(id, &mut part)? {
        let corrupt = |error: braid_gir::Error| {
            PgError::new(
                SqlState::DataCorrupted,
                format!("parked records are corrupt: {error}"),
            )
        };
        let mut reader = Reader::new(&frame);
        while let Some((tag, body)) = reader.next_raw().map_err(corrupt)? {
            let known = matches!(tag, Tag::StreamHeader | Tag::Schema);
            if known && !first {
                continue;
            }
            let record = Record::read(tag, body).map_err(corrupt)?;
            let is_content = match record {
                Record::Change(_) | Record::Truncate(_) | Record::Message(_) => true,
                _ if known => false,
                Record::Begin(_) | Record::Commit(_) => false,
                // A transaction that arrived in segments, or was prepared, is parked as the
                // ordinary transaction that it has become.
                other => {
                    let kind = other.tag().name();
                    return Err(PgError::new(
                        SqlState::DataCorrupted,
                        format!("parked records are corrupt: unexpected {kind}"),
                    ));
                }
            };
            let mut line = String::new();
            writer.record(&record, &mut line).map_err(corrupt)?;
            if is_content {
                lines.push(if encoding::is_utf8() {
                    line
                } else {
                    json_in_ascii(&line)
                });
            }
        }
        first = false;
    }
    Ok(lines)
}

/// A request for another attempt at parked transactions.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    subscription_id: u32,
    number: u64,
}

impl Request {
    /// Ask for an attempt at one parked transaction, or at all; `None` when the subscription has no
    /// workers. The caller holds the subscription's advisory lock for this.
    #[must_use]
    pub fn make(subscription_id: u32, id: Option<i64>) -> Option<Self> {
        let entry = registry::subscription(subscription_id)?;
        entry.retry.id.store(id.unwrap_or(0), Ordering::Relaxed);
        let number = entry.retry.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let request = Self {
            subscription_id,
            number,
        };
        request.remind();
        Some(request)
    }

    /// Wakes the applier that serves it: the applier may have been started just now.
    pub fn remind(&self) {
        if let Some(entry) = registry::subscription(self.subscription_id) {
            process::set_latch(entry.first_applier_latch.load(Ordering::Acquire));
        }
    }

    /// How many transactions were applied, once it is served.
    #[must_use]
    pub fn outcome(&self) -> Option<u64> {
        let entry = registry::subscription(self.subscription_id)?;
        (entry.retry.done.load(Ordering::Acquire) >= self.number)
            .then(|| entry.retry.applied.load(Ordering::Relaxed))
    }

    /// Whether the applier that serves it waits for a lock that this process holds.
    #[must_use]
    pub fn is_blocked_by_me(&self) -> bool {
        let pid = registry::subscription(self.subscription_id)
            .and_then(|entry| entry.appliers.first())
            .map_or(0, |applier| applier.pid.load(Ordering::Acquire));
        pid != 0 && blocking_pids(pid).contains(&process::my_pid())
    }
}
