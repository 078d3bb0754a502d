//! `braid.ingest`: records in gir-json, applied in the caller's transaction. Run by the session
//! that calls it.
//!
//! Invariants: a source's position moves in `braid.ingest_source`, in the transaction that applies
//! its records. So both are stored or neither is, also if a savepoint is rolled back (I1). A
//! replication origin of this node marks the transaction as the source's. Its own position only
//! follows, since PostgreSQL would move it at an abort too. The mark is removed at the
//! transaction's end, or with the savepoint that set it (I8). One transaction has one origin.
//!
//! Not for: the format of records, which is `braid_gir`'s.

pub(crate) mod rows;
pub(crate) mod stamp;

use std::cell::RefCell;

use braid_apply::{Identity, NO_SUBSCRIPTION, Session};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{Begin, JsonErrorKind, JsonReader, Reader, Record, Writer, lsn_text, parse_lsn};
use braid_node::subscription::{execute, rows_written};
use braid_node::{origin, wake};
use braid_postgres::catalog::with_settings;
use braid_postgres::error::{self, PgError};
use braid_postgres::jsonb::Jsonb;
use braid_postgres::{memory, transaction};
use pgrx::pg_sys;

/// Microseconds since 1970 of the year 9999: later times are treated like this one.
const LAST_SECOND: i64 = 253_370_764_800_000_000;

/// The arguments of a call.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// A jsonb value.
    pub gir: Jsonb,
    /// Name of the source; `None`: the stream object says it.
    pub source: Option<&'a str>,
    /// This node.
    pub local_node: &'a str,
}

/// The counts of a call, in changes: rows and truncations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Handed to the apply path.
    pub applied: u64,
    /// Left out: they had been applied before, or were first committed on this node.
    pub skipped: u64,
}

thread_local! {
    /// The session of the running call. If a call finds one that is already set, an error has left
    /// it behind.
    static SESSION: RefCell<Option<Session>> = const { RefCell::new(None) };
}

/// The records of a call, and which element of the array each came from.
struct Input {
    writer: Writer,
    /// End of each element's records.
    ends: Vec<usize>,
    is_array: bool,
}

impl Input {
    /// The element that the record at `offset` came from.
    fn place(&self, offset: usize) -> String {
        let index = self.ends.partition_point(|end| *end <= offset);
        if self.is_array {
            format!("/{}", index.min(self.ends.len().saturating_sub(1)))
        } else {
            String::new()
        }
    }
}

/// Apply records in the transaction that is open.
///
/// # Errors
/// 22023 if the argument is not gir-json, or if records are out of order. 0A000 in a transaction
/// that can't take them, and for records of transactions that have not committed. Otherwise the
/// errors of applying a subscription's change. After any error the transaction, or its savepoint,
/// must be rolled back.
pub fn ingest(request: &Request<'_>) -> Result<Done, PgError> {
    check_transaction()?;
    if let Some(left) = SESSION.take() {
        left.discard();
    }
    let input = read(request.gir)?;
    let done = memory::keep_current(|| settings_for(|| apply(request, &input)))?;
    if let Some(session) = SESSION.take() {
        session.discard();
    }
    Ok(done)
}

fn check_transaction() -> Result<(), PgError> {
    if transaction::is_read_only() {
        return Err(PgError::new(
            SqlState::ReadOnlySqlTransaction,
            "cannot apply records in a read-only transaction",
        )
        .with_hint("Begin a read-write transaction."));
    }
    if transaction::keeps_its_snapshot() {
        return Err(PgError::new(
            SqlState::FeatureNotSupported,
            "records can only be applied at isolation level read committed",
        )
        .with_hint("Begin the transaction with isolation level read committed."));
    }
    Ok(())
}

/// Run `work` under the settings that an applier has, and put the session's own back. An error
/// leaves that to the abort.
fn settings_for<T>(work: impl FnOnce() -> Result<T, PgError>) -> Result<T, PgError> {
    with_settings(
        &[
            ("session_replication_role", "replica"),
            ("search_path", ""),
            ("datestyle", "ISO"),
            ("intervalstyle", "postgres"),
            ("lc_monetary", "C"),
            ("xmloption", "content"),
            ("array_nulls", "on"),
            ("client_encoding", "UTF8"),
        ],
        work,
    )
}

/// The elements of the value as records.
fn read(gir: Jsonb) -> Result<Input, PgError> {
    let (elements, is_array, nested) = pgrx::Spi::connect(|client| {
        let table = client.select(
            "select convert_to(e::text, 'UTF8'), jsonb_typeof($1) = 'array', jsonb_typeof(e) = 'array' \
             from jsonb_array_elements(case jsonb_typeof($1) when 'array' then $1 else jsonb_build_array($1) end) e",
            None,
            &[gir.argument()],
        )?;
        let mut elements: Vec<Vec<u8>> = Vec::with_capacity(table.len());
        let mut is_array = true;
        let mut nested = None;
        for row in table {
            if nested.is_none() && row.get::<bool>(3)?.unwrap_or(false) {
                nested = Some(elements.len());
            }
            elements.push(row.get::<Vec<u8>>(1)?.unwrap_or_default());
            is_array = row.get::<bool>(2)?.unwrap_or(true);
        }
        Ok((elements, is_array, nested))
    })
    .map_err(|error: pgrx::spi::SpiError| {
        PgError::new(SqlState::InternalError, format!("could not read the records: {error}"))
    })?;
    if let Some(index) = nested {
        return Err(PgError::new(
            SqlState::InvalidParameterValue,
            "invalid gir-json: an array within an array",
        )
        .with_detail(format!("At /{index}."))
        .with_hint("Give one record, or an array of records."));
    }
    let mut input = Input {
        writer: Writer::new(),
        ends: Vec::with_capacity(elements.len()),
        is_array,
    };
    let mut reader = JsonReader::of_committed();
    let invalid = |error: &braid_gir::JsonError, index: usize| {
        let element = if is_array {
            format!("/{index}")
        } else {
            String::new()
        };
        let place = match format!("{element}{}", error.path) {
            path if path.is_empty() => "In the record as a whole.".to_owned(),
            path => format!("At {path}."),
        };
        if error.kind == JsonErrorKind::Uncommitted {
            return uncommitted().with_detail(place);
        }
        PgError::new(
            SqlState::InvalidParameterValue,
            format!("invalid gir-json: {}", error.kind),
        )
        .with_detail(place)
        .with_hint("docs/gir.schema.json says what records look like.")
    };
    for (index, element) in elements.iter().enumerate() {
        reader
            .read(element, &mut input.writer)
            .map_err(|error| invalid(&error, index))?;
        input.ends.push(input.writer.len());
    }
    let last = elements.len().saturating_sub(1);
    reader
        .finish(&mut input.writer)
        .map_err(|error| invalid(&error, last))?;
    Ok(input)
}

/// A source's records are of transactions that have committed. The outcome of others would have to
/// be tracked, and a position only covers transactions that have ended.
fn uncommitted() -> PgError {
    PgError::new(
        SqlState::FeatureNotSupported,
        "records of transactions that have not committed cannot be applied",
    )
    .with_hint("Take them from a stream without the options \"streaming\" and \"two_phase\", in which each transaction comes as a whole once it has committed.")
}

/// The running call.
struct Call<'a> {
    request: &'a Request<'a>,
    source: String,
    /// Everything before this position was applied before this call.
    from: u64,
    /// Everything before this position has been applied.
    position: u64,
    /// Positions of the transactions that this call has brought, upwards.
    brought: Vec<u64>,
    /// The origin's node, once something is applied.
    node: Option<String>,
    in_transaction: bool,
    skipping: bool,
    /// Position and time of the last transaction that this call brought.
    last: Option<(u64, i64)>,
    newest: i64,
    /// The newest of all that came, whether applied or not.
    seen: i64,
    done: Done,
}

fn apply(request: &Request<'_>, input: &Input) -> Result<Done, PgError> {
    let source = source_name(request, input)?;
    if source == request.local_node {
        return Err(PgError::new(
            SqlState::InvalidParameterValue,
            format!("origin \"{source}\" is this node"),
        )
        .with_hint("Name the system that the records come from."));
    }
    let position = lock_source(&source)?;
    let identity = Identity {
        subscription_id: NO_SUBSCRIPTION,
        subscription: source.clone(),
        run_as: None,
        local_node: request.local_node.to_owned(),
        provider: source.clone(),
        charset: i32::try_from(pg_sys::pg_enc::PG_UTF8).unwrap_or(6),
        ignores_missing: false,
    };
    SESSION.set(Some(Session::new(identity)));
    let mut call = Call {
        request,
        source,
        from: position,
        position,
        brought: Vec::new(),
        node: None,
        in_transaction: false,
        skipping: false,
        last: None,
        newest: i64::MIN,
        seen: i64::MIN,
        done: Done::default(),
    };
    let frame = input.writer.frame();
    let mut reader = Reader::new(frame);
    loop {
        let offset = frame.len().saturating_sub(reader.remaining());
        let Some(record) = reader.next_record()? else {
            break;
        };
        match error::catch(|| call.record(&record)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) | Err(error) => {
                let doing =
                    SESSION.with_borrow(|session| session.as_ref().map(|session| session.doing(0)));
                let error = error.with_hint_of_cause("Then give the records again.");
                let error = match doing {
                    Some(doing) => error.with_context(&doing),
                    None => error,
                };
                return Err(placed(error, &input.place(offset)));
            }
        }
    }
    call.finish()
}

/// With the place of the record that the error is about.
fn placed(mut error: PgError, place: &str) -> PgError {
    if matches!(
        error.sqlstate,
        SqlState::UndefinedTable | SqlState::UndefinedColumn
    ) {
        error.hint =
            Some("Create what is missing here, or leave it out of the records.".to_owned());
    }
    if error.sqlstate == SqlState::UndefinedColumn
        && let Some(hint) = &mut error.hint
    {
        hint.push_str(
            " Columns of no key can be left out here with braid.set_missing_column_rule.",
        );
    }
    if place.is_empty() {
        return error;
    }
    let place = format!("Record at {place}.");
    let detail = match error.detail.take() {
        Some(detail) => format!("{detail} {place}"),
        None => place,
    };
    error.with_detail(detail)
}

/// The name that the caller gives, or that of the node in the stream object.
fn source_name(request: &Request<'_>, input: &Input) -> Result<String, PgError> {
    if let Some(source) = request.source {
        return Ok(source.to_owned());
    }
    match Reader::new(input.writer.frame()).next_record()? {
        Some(Record::StreamHeader(header)) if !header.node_name.is_empty() => {
            Ok(header.node_name.to_owned())
        }
        _ => Err(PgError::new(
            SqlState::InvalidParameterValue,
            "origin of the records is not known",
        )
        .with_hint(
            "Name it as the second argument, or begin with a stream object that names its node.",
        )),
    }
}

/// Where a source stands, which nobody else moves until this transaction ends.
fn lock_source(source: &str) -> Result<u64, PgError> {
    let found = rows_written(
        "insert into braid.ingest_source as s (source_name) values ($1::name) \
         on conflict (source_name) do update set last_at = s.last_at returning \"position\"::text, (last_at is null)::text",
        &[source.into()],
    )?;
    let row = found.into_iter().next().unwrap_or_default();
    if row.get(1).is_some_and(|new| new.as_deref() == Some("true")) {
        // Rows may have one more writer now.
        wake::manager_at_commit();
    }
    row.into_iter()
        .next()
        .flatten()
        .and_then(|text| parse_lsn(&text))
        .ok_or_else(|| PgError::new(SqlState::InternalError, "position of the source is missing"))
}

/// Forgets a source: later records under its name are new, whatever their positions. Returns false
/// if there is no such source.
///
/// Its origins stay, and stand for their nodes: the versions of rows that came from it refer to
/// them.
///
/// # Errors
/// Those of SPI.
pub fn forget(source: &str) -> Result<bool, PgError> {
    // A transaction that ingests records of the source has locked this row.
    let found = rows_written(
        "delete from braid.ingest_source where source_name = $1::name returning 1::text",
        &[source.into()],
    )?;
    execute(
        "delete from braid.missing_column where source_name = $1::name",
        &[source.into()],
    )?;
    execute(
        "update braid.origin set source_name = null where source_name = $1::name",
        &[source.into()],
    )?;
    Ok(!found.is_empty())
}

fn with_session<T>(work: impl FnOnce(&mut Session) -> Result<T, PgError>) -> Result<T, PgError> {
    // An error that unwinds ends the borrow; the session is left for the next call to throw away.
    SESSION.with(|cell| {
        let mut place = cell.try_borrow_mut().map_err(|_| {
            PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "records are being applied already",
            )
        })?;
        let session = place
            .as_mut()
            .ok_or_else(|| PgError::new(SqlState::InternalError, "no session to apply with"))?;
        work(session)
    })
}

impl Call<'_> {
    fn record(&mut self, record: &Record<'_>) -> Result<(), PgError> {
        match record {
            Record::Schema(schema) => with_session(|session| {
                session.learn(schema);
                Ok(())
            }),
            Record::Begin(begin) => self.begin(begin),
            Record::Commit(_) => {
                self.in_transaction = false;
                self.skipping = false;
                Ok(())
            }
            Record::Change(_) | Record::Truncate(_) if self.skipping => {
                self.done.skipped += 1;
                Ok(())
            }
            Record::Change(_) | Record::Truncate(_) if !self.in_transaction => Err(PgError::new(
                SqlState::InvalidParameterValue,
                "change outside of a transaction",
            )
            .with_hint("Give it a member \"transaction\", or a begin object before it.")),
            Record::Change(change) => {
                self.done.applied += 1;
                with_session(|session| session.change(change))
            }
            Record::Truncate(truncate) => {
                self.done.applied += 1;
                with_session(|session| session.truncate(truncate))
            }
            Record::StreamHeader(_) | Record::Message(_) => Ok(()),
            // The reader has refused them, where they are.
            Record::SegmentStart(_)
            | Record::SegmentStop
            | Record::Subtransaction(_)
            | Record::Abort(_)
            | Record::StreamedCommit(_)
            | Record::BeginPrepared(_)
            | Record::Prepare(_)
            | Record::StreamedPrepare(_)
            | Record::CommitPrepared(_)
            | Record::RollbackPrepared(_) => Err(uncommitted()),
        }
    }

    fn begin(&mut self, begin: &Begin<'_>) -> Result<(), PgError> {
        self.in_transaction = true;
        if begin.commit_lsn == 0 {
            return Err(PgError::new(
                SqlState::InvalidParameterValue,
                "transaction has no position",
            )
            .with_hint("Number the transactions of a source in \"lsn\", upwards from 0/1."));
        }
        let node = if begin.origin.is_empty() {
            self.source.as_str()
        } else {
            begin.origin
        };
        self.skipping = begin.commit_lsn <= self.position;
        if self.skipping {
            // Sent again, unless it is another one than the one just seen.
            return match self.last {
                Some((lsn, time)) if lsn == begin.commit_lsn && time != begin.commit_timestamp => {
                    Err(PgError::new(
                        SqlState::InvalidParameterValue,
                        format!("two transactions have the position {}", lsn_text(lsn)),
                    )
                    .with_hint(
                        "Each transaction of a source needs a higher \"lsn\" than the one before.",
                    ))
                }
                // A transaction that neither this call nor an earlier one has brought would be left
                // out for good.
                Some((lsn, _))
                    if begin.commit_lsn > self.from
                        && self.brought.binary_search(&begin.commit_lsn).is_err() =>
                {
                    Err(PgError::new(
                        SqlState::InvalidParameterValue,
                        format!(
                            "records are out of order: the transaction at {} comes after that at {}",
                            lsn_text(begin.commit_lsn),
                            lsn_text(lsn)
                        ),
                    )
                    .with_hint("Give the transactions of a source in the order of their \"lsn\"."))
                }
                _ => Ok(()),
            };
        }
        self.position = begin.commit_lsn;
        self.brought.push(begin.commit_lsn);
        self.last = Some((begin.commit_lsn, begin.commit_timestamp));
        self.seen = self.seen.max(begin.commit_timestamp);
        if node == self.request.local_node {
            self.skipping = true;
            return Ok(());
        }
        self.newest = self.newest.max(begin.commit_timestamp);
        if self.node.is_some() {
            let joined = with_session(|session| Ok(session.join(begin)))?;
            return if joined { Ok(()) } else { Err(stamp::mixed()) };
        }
        let node = node.to_owned();
        let origin = origin::ensure_for_source(&self.source, &node)?;
        stamp::take(origin)?;
        self.node = Some(node);
        with_session(|session| {
            session.attach(begin);
            Ok(())
        })
    }

    fn finish(self) -> Result<Done, PgError> {
        if self.node.is_some() {
            let versions = with_session(Session::detach)?;
            stamp::written(versions, self.newest, self.position);
        }
        execute(
            // A source whose clock is ahead has not come further than now.
            "update braid.ingest_source set \"position\" = $2::pg_lsn, last_at = now(), \
             newest_at = greatest(newest_at, least(now(), timestamptz 'epoch' + $3 * interval '1 us')) \
             where source_name = $1::name and \"position\" < $2::pg_lsn",
            &[
                self.source.as_str().into(),
                lsn_text(self.position).into(),
                self.seen.clamp(0, LAST_SECOND).into(),
            ],
        )?;
        Ok(self.done)
    }
}
