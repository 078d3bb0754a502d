//! The format `wal2json`: what `braid_decoder::wal2json` says, over tuples and catalogs.
//!
//! Version 1 gathers a transaction in one message, up to what a message can hold, and goes on in another beyond that; all else
//! is one message each. `outgoing` sees to both.

use std::collections::HashMap;
use std::ffi::CStr;

use braid_decoder::wal2json::{
    ChangeKind, Document, Image, MessageText, State, TransactionText, Version, Wal2JsonOptions,
};
use braid_decoder::{OriginPolicy, Publication, Selection};
use braid_gir::Operation;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::column::Tools;
use super::format::{Change, Context, Format, LogicalMessage, Truncation};
use super::json_table::Table;
use super::outgoing::Outgoing;
use super::paced::Pacing;
use super::report::{self, or_raise};
use super::row_change;
use super::stream::{Progress, no_origin, small_context};
use super::tuple::{Field, Row};
use super::{invalidation, publications};

/// How many relations are remembered. Beyond it all are forgotten and compiled anew when they come.
const REMEMBERED_RELATIONS: usize = 16_384;

/// A relation, compiled or known to be of no interest.
#[derive(Default)]
struct Entry {
    stale: bool,
    table: Option<Table>,
}

/// A stream in this format.
pub(super) struct Wal2Json {
    options: Box<Wal2JsonOptions>,
    selection: Selection,
    document: Document,
    outgoing: Outgoing,
    /// Loaded with the first change, and again after an invalidation.
    publications: Option<Vec<Publication>>,
    relations: HashMap<u32, Entry>,
    tools: Tools,
    old: Row,
    new: Row,
    /// Something of the transaction in hand was written.
    sent: bool,
    progress: Progress,
    /// Parent of every memory context of the format.
    context: pg_sys::MemoryContext,
}

impl Wal2Json {
    /// A stream that has sent nothing. `parent` is the decoding context's memory.
    ///
    /// # Safety
    /// `parent` is valid, and outlives the stream.
    pub(super) unsafe fn new(
        selection: Selection,
        options: Box<Wal2JsonOptions>,
        parent: pg_sys::MemoryContext,
    ) -> Self {
        // SAFETY: as the caller says.
        let (context, scratch) = unsafe {
            let context = small_context(parent, c"braid output plugin");
            (context, small_context(context, c"braid change"))
        };
        Self {
            document: Document::new(&options),
            outgoing: Outgoing::new(options.max_message_bytes),
            options,
            selection,
            publications: None,
            relations: HashMap::new(),
            tools: Tools::new(scratch),
            old: Row::default(),
            new: Row::default(),
            sent: false,
            progress: Progress::default(),
            context,
        }
    }

    /// Pieces of a transaction go into one message.
    fn gathers(&self) -> bool {
        self.options.version == Version::One && !self.options.chunks
    }

    /// What was appended since the last time is whole.
    unsafe fn finish_piece(&mut self, ctx: Context) {
        self.sent = true;
        // SAFETY: as the caller of all methods says.
        unsafe {
            if self.gathers() {
                self.outgoing.keep(ctx);
            } else {
                self.outgoing.queue(ctx);
            }
        }
    }

    fn absorb_invalidations(&mut self) {
        let Some(notes) = invalidation::take() else {
            return;
        };
        if notes.enums {
            self.tools.labels.borrow_mut().clear();
        }
        if notes.everything {
            self.publications = None;
        }
        for (relation, entry) in &mut self.relations {
            entry.stale |= notes.everything
                || notes.relations.contains(relation)
                || entry
                    .table
                    .as_ref()
                    .is_some_and(|table| table.is_touched(&notes));
        }
    }

    /// Bring the relation's entry up to date. Returns its OID.
    #[inline]
    unsafe fn refresh(&mut self, relation: pg_sys::Relation) -> u32 {
        self.absorb_invalidations();
        // SAFETY: the relation is valid.
        unsafe {
            let oid = (*relation).rd_id.to_u32();
            if self.relations.get(&oid).is_none_or(|entry| entry.stale) {
                self.compile(relation, oid);
            }
            oid
        }
    }

    #[cold]
    unsafe fn compile(&mut self, relation: pg_sys::Relation, oid: u32) {
        if self.relations.len() >= REMEMBERED_RELATIONS {
            let tables = self.relations.drain().filter_map(|(_, entry)| entry.table);
            tables.for_each(Table::release);
        }
        let Self {
            publications,
            relations,
            tools,
            options,
            selection,
            context,
            ..
        } = self;
        // SAFETY: in a transaction with a historic snapshot; what is allocated on the way is in the scratch memory.
        let table = tools.scratch.run(|| unsafe {
            let publications = selection.publications.as_ref().map(|names| {
                &**publications.get_or_insert_with(|| or_raise(publications::load(names)))
            });
            Table::new(relation, publications, options, *context)
        });
        let entry = relations.entry(oid).or_default();
        entry.stale = false;
        if let Some(before) = std::mem::replace(&mut entry.table, table) {
            before.release();
        }
    }

    /// Append a row's change, unless it is not wanted. Returns whether there is something.
    unsafe fn put_row(&mut self, change: &Change) -> bool {
        // SAFETY: the relation is valid.
        let oid = unsafe { self.refresh(change.relation) };
        let Some(Entry {
            table: Some(table), ..
        }) = self.relations.get(&oid)
        else {
            return false;
        };
        let (kind, wanted) = match change.action {
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT => {
                (ChangeKind::Insert, table.actions.insert)
            }
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_UPDATE => {
                (ChangeKind::Update, table.actions.update)
            }
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE => {
                (ChangeKind::Delete, table.actions.delete)
            }
            _ => return false,
        };
        if !wanted {
            return false;
        }
        let has_old = !change.old.is_null() && kind != ChangeKind::Insert;
        let has_new = !change.new.is_null() && kind != ChangeKind::Delete;
        if kind != ChangeKind::Insert && !has_old && !table.layout.has_identity() {
            warn_of_missing_identity(self.options.version, kind, table);
            return false;
        }
        if (kind == ChangeKind::Delete) == has_new || !(has_old || has_new) {
            return false;
        }
        // SAFETY: the tuples are valid for the time of the change, and the rows are cleared at its end.
        let filled = unsafe {
            (!has_old || self.old.fill(change.old, &table.attributes).is_ok())
                && (!has_new || self.new.fill(change.new, &table.attributes).is_ok())
        };
        if !filled {
            report::fail(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                "decoded tuple is not valid".to_owned(),
                None,
            );
        }
        let (old, new) = (has_old.then_some(&self.old), has_new.then_some(&self.new));
        let Some(passed) = passes(table, kind, old, new) else {
            return false;
        };
        let image = |row, fallback| Columns {
            table,
            tools: &self.tools,
            row,
            fallback,
        };
        // A row that enters a row filter has to be whole: what did not change comes from the old one as far as that has it.
        let fallback = old.filter(|_| passed == ChangeKind::Insert);
        let (old, new) = (
            old.map(|row| image(row, None)),
            new.map(|row| image(row, fallback)),
        );
        self.document.change(
            self.outgoing.buffer(),
            &table.layout,
            passed,
            change.lsn,
            (old.as_ref(), new.as_ref()),
        );
        true
    }
}

/// As what a change passes the row filters, if it does.
#[inline]
fn passes(
    table: &Table,
    kind: ChangeKind,
    old: Option<&Row>,
    new: Option<&Row>,
) -> Option<ChangeKind> {
    let Some(filters) = &table.filters else {
        return Some(kind);
    };
    let operation = match kind {
        ChangeKind::Insert => Operation::Insert,
        ChangeKind::Update => Operation::Update,
        ChangeKind::Delete => Operation::Delete,
    };
    match row_change::passes(filters, operation, old, new)? {
        Operation::Insert => Some(ChangeKind::Insert),
        Operation::Update => Some(ChangeKind::Update),
        Operation::Delete => Some(ChangeKind::Delete),
    }
}

/// In wal2json's words.
#[cold]
fn warn_of_missing_identity(version: Version, kind: ChangeKind, table: &Table) {
    let text = |bytes| String::from_utf8_lossy(bytes);
    let (schema, name) = (text(table.layout.schema()), text(table.layout.table()));
    let word = if kind == ChangeKind::Update {
        "UPDATE"
    } else {
        "DELETE"
    };
    let message = match version {
        Version::One => {
            format!("table \"{name}\" without primary key or replica identity is nothing")
        }
        Version::Two => format!("no tuple identifier for {word} in table \"{schema}\".\"{name}\""),
    };
    pgrx::warning!("{message}");
}

/// A row, by the columns of a layout.
struct Columns<'c> {
    table: &'c Table,
    tools: &'c Tools,
    row: &'c Row,
    fallback: Option<&'c Row>,
}

impl Columns<'_> {
    #[inline]
    fn field(&self, column: usize) -> Field<'_> {
        let Some(column) = self.table.columns.get(column) else {
            return Field::Null;
        };
        let field = self.row.field(column.attribute);
        match (field, self.fallback) {
            (Field::Unavailable, Some(fallback)) => match fallback.field(column.attribute) {
                stored @ Field::Stored(_) => stored,
                _ => field,
            },
            _ => field,
        }
    }
}

impl Image for Columns<'_> {
    #[inline]
    fn state(&self, column: usize) -> State {
        match self.field(column) {
            Field::Null => State::Null,
            Field::Unavailable => State::Unavailable,
            Field::Stored(_) => State::Present,
        }
    }

    #[inline]
    fn put(&self, column: usize, out: &mut Vec<u8>) {
        if let (Some(known), Field::Stored(bytes)) =
            (self.table.columns.get(column), self.field(column))
        {
            known.renderer.put(bytes, out, self.tools);
        }
    }
}

/// What the document says of a transaction. The text of the time is only made if it is wanted.
unsafe fn with_transaction<T>(
    txn: &pg_sys::ReorderBufferTXN,
    wants_time: bool,
    f: impl FnOnce(&TransactionText<'_>) -> T,
) -> T {
    let timestamp = if wants_time {
        // SAFETY: the commit time is the member of the union that is set for a transaction that committed; the text is static.
        unsafe { CStr::from_ptr(pg_sys::timestamptz_to_str(txn.xact_time.commit_time)).to_bytes() }
    } else {
        &[]
    };
    f(&TransactionText {
        xid: txn.xid.into_inner(),
        timestamp,
        origin: u32::from(txn.origin_id),
        commit_lsn: txn.final_lsn,
        end_lsn: txn.end_lsn,
    })
}

impl Format for Wal2Json {
    fn is_text(&self) -> bool {
        true
    }

    fn refuses_origin(&self, origin: pg_sys::RepOriginId) -> bool {
        origin != no_origin()
            && (self.selection.origin == OriginPolicy::Local
                || self.options.filter_origins.contains(&u32::from(origin)))
    }

    fn paced(&mut self) -> Option<&mut Pacing> {
        Some(&mut self.outgoing.pacing)
    }

    unsafe fn begin(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN) {
        self.sent = false;
        self.outgoing.pacing.release_before(txn);
        let wants_time = self.options.timestamp;
        let buffer = self.outgoing.buffer();
        // SAFETY: as the caller says.
        unsafe {
            with_transaction(txn, wants_time, |text| self.document.begin(buffer, text));
            if self.options.version == Version::One || self.options.transaction {
                self.finish_piece(ctx);
            } else {
                self.outgoing.buffer().clear();
            }
        }
    }

    unsafe fn row_changed(
        &mut self,
        ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        change: &Change,
    ) {
        // SAFETY: as the caller says.
        let written = unsafe { self.put_row(change) };
        self.old.clear();
        self.new.clear();
        self.tools.scratch.reset();
        if written {
            // SAFETY: as the caller says.
            unsafe { self.finish_piece(ctx) };
        }
        self.progress.note(ctx, written);
    }

    unsafe fn truncated(
        &mut self,
        ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        truncation: &Truncation<'_>,
    ) {
        if self.options.version == Version::One {
            return;
        }
        for relation in truncation.relations {
            // SAFETY: as the caller says.
            let oid = unsafe { self.refresh(*relation) };
            if let Some(Entry {
                table: Some(table), ..
            }) = self.relations.get(&oid)
                && table.actions.truncate
            {
                let buffer = self.outgoing.buffer();
                self.document
                    .truncate(buffer, &table.layout, truncation.lsn);
                // SAFETY: as the caller says.
                unsafe { self.finish_piece(ctx) };
            }
        }
        self.tools.scratch.reset();
    }

    unsafe fn message(
        &mut self,
        ctx: Context,
        _txn: Option<&pg_sys::ReorderBufferTXN>,
        message: &LogicalMessage<'_>,
    ) {
        let prefix = message.prefix.to_bytes();
        if !self.options.wants_prefix(prefix) {
            return;
        }
        // wal2json takes the content for a C string.
        let len = message.content.iter().position(|byte| *byte == 0);
        let text = MessageText {
            transactional: message.transactional,
            lsn: message.lsn,
            prefix,
            content: message
                .content
                .get(..len.unwrap_or(message.content.len()))
                .unwrap_or_default(),
        };
        self.document.message(self.outgoing.buffer(), &text);
        // SAFETY: as the caller says.
        unsafe {
            if message.transactional {
                self.finish_piece(ctx);
            } else {
                self.outgoing.queue(ctx);
            }
        }
    }

    unsafe fn commit(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN) {
        let wants_time = self.options.timestamp;
        // SAFETY: as the caller says.
        unsafe {
            if self.options.version == Version::One || self.options.transaction {
                let buffer = self.outgoing.buffer();
                with_transaction(txn, wants_time, |text| self.document.commit(buffer, text));
                self.outgoing.queue(ctx);
            }
            pg_sys::OutputPluginUpdateProgress(ctx, !self.sent);
        }
    }

    fn leave(&mut self) {}
}
