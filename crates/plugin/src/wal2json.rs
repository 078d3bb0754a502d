//! The format `wal2json`: carries out `braid_decoder::wal2json`, over tuples and catalogs.
//!
//! Version 1 gathers a transaction in one message, up to what a message can hold, and goes on in
//! another beyond that; all else is one message each. `outgoing` sees to both.

use std::ffi::CString;

use braid_decoder::wal2json::{
    ChangeKind, Document, Image, MessageText, State, TransactionText, Version, Wal2JsonOptions,
};
use braid_decoder::{OriginPolicy, Selection};
use braid_gir::Operation;
use braid_postgres::compat::ReplOriginId;
use braid_postgres::decoding::{Context, Transaction};
use braid_postgres::relation::RelationRef;
use braid_postgres::timestamp;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::column::Tools;
use super::delivery::Progress;
use super::format::{Change, Format, LogicalMessage, Truncation};
use super::invalidation;
use super::json_table::Table;
use super::origin_names::no_origin;
use super::outgoing::Outgoing;
use super::paced::Pacing;
use super::relation_cache::{Entry, RelationCache};
use super::report;
use super::row_change;
use super::scratch::StreamMemory;
use super::tuple::{Field, Row, Slots};

/// A stream in this format.
pub(super) struct Wal2Json {
    options: Box<Wal2JsonOptions>,
    selection: Selection,
    document: Document,
    outgoing: Outgoing,
    relations: RelationCache<Table>,
    tools: Tools,
    old: Slots,
    new: Slots,
    /// Something of the current transaction was written.
    sent: bool,
    progress: Progress,
    /// Parent of every memory context of the format.
    context: StreamMemory,
}

impl Wal2Json {
    /// A stream that has sent nothing. In the startup callback.
    pub(super) fn new(
        selection: Selection,
        options: Box<Wal2JsonOptions>,
        ctx: Context<'_>,
    ) -> Self {
        let context = StreamMemory::new(ctx, c"braid output plugin");
        let scratch = context.below(c"braid change");
        Self {
            document: Document::new(&options),
            outgoing: Outgoing::new(options.max_message_bytes),
            options,
            selection,
            relations: RelationCache::new(),
            tools: Tools::new(scratch),
            old: Slots::default(),
            new: Slots::default(),
            sent: false,
            progress: Progress::default(),
            context,
        }
    }

    /// Pieces of a transaction go into one message.
    fn gathers(&self) -> bool {
        self.options.version == Version::One && !self.options.chunks
    }

    /// Ends a piece: the bytes appended since the last call are whole.
    fn finish_piece(&mut self, ctx: Context<'_>) {
        self.sent = true;
        if self.gathers() {
            self.outgoing.keep(ctx);
        } else {
            self.outgoing.queue(ctx);
        }
    }

    fn absorb_invalidations(&mut self) {
        let Some(notes) = invalidation::take() else {
            return;
        };
        if notes.enums {
            self.tools.labels.borrow_mut().clear();
        }
        self.relations.forget(&notes);
    }

    /// Bring the relation's entry up to date. Returns its OID.
    #[inline]
    fn refresh(&mut self, relation: RelationRef<'_>) -> u32 {
        self.absorb_invalidations();
        let oid = relation.oid().to_u32();
        if !self.relations.is_current(oid) {
            self.compile(relation, oid);
        }
        oid
    }

    #[cold]
    fn compile(&mut self, relation: RelationRef<'_>, oid: u32) {
        self.relations.make_room();
        let Self {
            relations,
            tools,
            options,
            selection,
            context,
            ..
        } = self;
        // Temporary allocations are in the scratch memory.
        let table = tools.scratch.run(|| {
            let names = selection.publications.as_ref();
            let publications = names.map(|names| relations.publications(names));
            Table::new(relation, publications, options, *context)
        });
        relations.remember(oid, table);
    }

    /// Append a row's change, unless it is not wanted. Returns whether there is something.
    fn put_row(&mut self, change: &Change<'_>) -> bool {
        let oid = self.refresh(change.relation);
        let Some(Entry {
            compiled: Some(table),
            ..
        }) = self.relations.get(oid)
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
        let old = change.old.filter(|_| kind != ChangeKind::Insert);
        let new = change.new.filter(|_| kind != ChangeKind::Delete);
        let (has_old, has_new) = (old.is_some(), new.is_some());
        if kind != ChangeKind::Insert && !has_old && !table.layout.has_identity() {
            warn_of_missing_identity(self.options.version, kind, table);
            return false;
        }
        if (kind == ChangeKind::Delete) == has_new || !(has_old || has_new) {
            return false;
        }
        let (Ok(old), Ok(new)) = (
            self.old.fill_any(old, &table.attributes),
            self.new.fill_any(new, &table.attributes),
        ) else {
            report::fail(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                "decoded tuple is not valid".to_owned(),
                None,
            );
        };
        let Some(passed) = passes(table, kind, old, new) else {
            return false;
        };
        let image = |row, fallback| Columns {
            table,
            tools: &self.tools,
            row,
            fallback,
        };
        // A row that enters a row filter has to be whole: unchanged values are taken from the old
        // row, as far as that has them.
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
    old: Option<Row<'_>>,
    new: Option<Row<'_>>,
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
    row: Row<'c>,
    fallback: Option<Row<'c>>,
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

/// The document's description of a transaction. The text of the time is only made if it is wanted.
fn with_transaction<T>(
    txn: Transaction<'_>,
    wants_time: bool,
    f: impl FnOnce(&TransactionText<'_>) -> T,
) -> T {
    let timestamp = if wants_time {
        timestamp::text(txn.time())
    } else {
        CString::default()
    };
    f(&TransactionText {
        xid: txn.id(),
        timestamp: timestamp.as_bytes(),
        origin: u32::from(txn.origin_id),
        commit_lsn: txn.final_lsn,
        end_lsn: txn.end_lsn,
    })
}

impl Format for Wal2Json {
    fn is_text(&self) -> bool {
        true
    }

    fn refuses_origin(&self, origin: ReplOriginId) -> bool {
        origin != no_origin()
            && (self.selection.origin == OriginPolicy::Local
                || self.options.filter_origins.contains(&u32::from(origin)))
    }

    fn paced(&mut self) -> Option<&mut Pacing> {
        Some(&mut self.outgoing.pacing)
    }

    fn begin(&mut self, ctx: Context<'_>, txn: Transaction<'_>) {
        self.sent = false;
        self.outgoing.pacing.release_before(txn);
        let wants_time = self.options.timestamp;
        let buffer = self.outgoing.buffer();
        with_transaction(txn, wants_time, |text| self.document.begin(buffer, text));
        if self.options.version == Version::One || self.options.transaction {
            self.finish_piece(ctx);
        } else {
            self.outgoing.buffer().clear();
        }
    }

    fn row_changed(&mut self, ctx: Context<'_>, _txn: Transaction<'_>, change: &Change<'_>) {
        let written = self.put_row(change);
        self.tools.scratch.reset();
        if written {
            self.finish_piece(ctx);
        }
        self.progress.note(ctx, written);
    }

    fn truncated(&mut self, ctx: Context<'_>, _txn: Transaction<'_>, truncation: &Truncation<'_>) {
        if self.options.version == Version::One {
            return;
        }
        for relation in truncation.relations {
            let oid = self.refresh(*relation);
            if let Some(Entry {
                compiled: Some(table),
                ..
            }) = self.relations.get(oid)
                && table.actions.truncate
            {
                let buffer = self.outgoing.buffer();
                self.document
                    .truncate(buffer, &table.layout, truncation.lsn);
                self.finish_piece(ctx);
            }
        }
        self.tools.scratch.reset();
    }

    fn message(
        &mut self,
        ctx: Context<'_>,
        _txn: Option<Transaction<'_>>,
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
        if message.transactional {
            self.finish_piece(ctx);
        } else {
            self.outgoing.queue(ctx);
        }
    }

    fn commit(&mut self, ctx: Context<'_>, txn: Transaction<'_>) {
        let wants_time = self.options.timestamp;
        if self.options.version == Version::One || self.options.transaction {
            let buffer = self.outgoing.buffer();
            with_transaction(txn, wants_time, |text| self.document.commit(buffer, text));
            self.outgoing.queue(ctx);
        }
        ctx.update_progress(!self.sent);
    }

    fn leave(&mut self) {}
}
