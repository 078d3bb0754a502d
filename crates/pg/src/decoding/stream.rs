//! The state of a stream: the relations that it has met, what it has announced, the transaction in hand; and what a change
//! makes of it.
//!
//! It belongs to the decoding context: it is dropped when that context's memory goes, also after an error, for which there
//! is no callback.

use std::collections::HashMap;
use std::ffi::CStr;

use braid_decoder::{FrameSink, Options, Outbox, Publication, SchemaBook, Shape};
use braid_gir::{Operation, SchemaNumber};
use pgrx::{PgSqlErrorCode, pg_sys};

use super::column::Tools;
use super::invalidation;
use super::node::Identity;
use super::relation::{Compiled, Hashed};
use super::report::{self, or_raise};
use super::row_change::RowChange;
use super::session::{ServerEncoding, Session};
use super::tuple::Row;
use super::{names, publications};
use crate::compat;

/// How many relations are remembered. Beyond it all are forgotten and compiled anew when they come, which costs a schema
/// record each.
const REMEMBERED_RELATIONS: usize = 16_384;
/// After how many changes that are not sent progress is reported where the reorder buffer does not do it.
const SILENT_CHANGES: u32 = 100;

/// A relation, compiled or known not to be published.
#[derive(Default)]
struct Entry {
    stale: bool,
    compiled: Option<Compiled>,
    /// Under which number the shape was sent.
    number: Option<SchemaNumber>,
    /// What the hashes of the last changes were made of.
    hashed: Option<Hashed>,
    /// The relation has other keys than before, so hashes from before and after do not meet: the next change is a barrier.
    fence: bool,
}

/// What a stream knows and has in hand.
pub struct Stream {
    pub options: Options,
    pub outbox: Outbox,
    /// Loaded with the first change, and again after an invalidation.
    publications: Option<Vec<Publication>>,
    relations: HashMap<u32, Entry>,
    book: SchemaBook,
    /// Relations were forgotten for want of room.
    forgot: bool,
    origins: HashMap<u16, String>,
    pub tools: Tools,
    pub old: Row,
    pub new: Row,
    keys: Vec<u64>,
    /// Nothing of this transaction is sent.
    pub skip: bool,
    silent: u32,
    /// Parent of every memory context of the plugin.
    context: pg_sys::MemoryContext,
    pub session: Option<Session>,
}

/// Sends a frame through the decoding context.
pub struct Sink(pub *mut pg_sys::LogicalDecodingContext);

impl FrameSink for Sink {
    fn send(&mut self, frame: &[u8]) {
        let Ok(len) = i32::try_from(frame.len()) else {
            report::fail(
                PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
                "row is too large to be replicated".to_owned(),
                None,
            );
        };
        // SAFETY: called in a callback that may write; the output buffer is the context's.
        unsafe {
            pg_sys::OutputPluginPrepareWrite(self.0, true);
            pg_sys::appendBinaryStringInfo((*self.0).out, frame.as_ptr().cast(), len);
            pg_sys::OutputPluginWrite(self.0, true);
        }
    }
}

unsafe fn small_context(
    parent: pg_sys::MemoryContext,
    name: &'static CStr,
) -> pg_sys::MemoryContext {
    // SAFETY: `parent` is valid, and the name is a constant, as PostgreSQL wants it.
    unsafe {
        pg_sys::AllocSetContextCreateInternal(
            parent,
            name.as_ptr(),
            pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
            pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
            pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
        )
    }
}

/// `InvalidRepOriginId`: first committed here.
pub fn no_origin() -> pg_sys::RepOriginId {
    pg_sys::RepOriginId::try_from(pg_sys::InvalidRepOriginId).unwrap_or_default()
}

impl Stream {
    /// A stream that has sent nothing. `parent` is the decoding context's memory.
    ///
    /// # Safety
    /// `parent` is valid, and outlives the stream.
    pub unsafe fn new(options: Options, parent: pg_sys::MemoryContext) -> Self {
        // SAFETY: as the caller says.
        let (context, scratch) = unsafe {
            let context = small_context(parent, c"braid output plugin");
            (context, small_context(context, c"braid change"))
        };
        Self {
            options,
            outbox: Outbox::new(),
            publications: None,
            relations: HashMap::new(),
            book: SchemaBook::default(),
            forgot: false,
            origins: HashMap::new(),
            tools: Tools::new(scratch),
            old: Row::default(),
            new: Row::default(),
            keys: Vec::new(),
            skip: false,
            silent: 0,
            context,
            session: None,
        }
    }

    /// # Safety
    /// With a historic snapshot.
    pub unsafe fn ensure_header(&mut self) {
        if !self.outbox.wants_header() {
            return;
        }
        // SAFETY: as the caller says.
        let identity = self.tools.scratch.run(|| unsafe { Identity::read() });
        or_raise(self.outbox.writer().stream_header(&identity.header()));
        self.outbox.header_written();
    }

    /// Send what has gathered, or say that nothing does.
    pub fn end_of_change(&mut self, ctx: *mut pg_sys::LogicalDecodingContext, written: bool) {
        if written {
            self.silent = 0;
            self.outbox.flush_if_large(&mut Sink(ctx));
        } else if !compat::REPORTS_PROGRESS {
            self.silent += 1;
            if self.silent >= SILENT_CHANGES {
                self.silent = 0;
                // SAFETY: in a callback of this context.
                unsafe { pg_sys::OutputPluginUpdateProgress(ctx, false) };
            }
        }
    }

    /// Name of a replication origin; empty for none, for one that is not known any more, and for what was marked as not to be
    /// replicated.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot.
    pub unsafe fn origin_name(&mut self, origin: pg_sys::RepOriginId) -> String {
        let unnamed = u32::from(origin) == pg_sys::DoNotReplicateId;
        if origin == no_origin() || unnamed {
            return String::new();
        }
        if let Some(name) = self.origins.get(&origin) {
            return name.clone();
        }
        // SAFETY: as the caller says; the name is in the scratch memory.
        let name = self.tools.scratch.run(|| unsafe {
            let mut name = std::ptr::null_mut();
            pg_sys::replorigin_by_oid(origin, true, &raw mut name);
            names::from_server(name)
        });
        self.origins.insert(origin, name.clone());
        name
    }

    #[inline]
    pub fn absorb_invalidations(&mut self) {
        if let Some(notes) = invalidation::take() {
            self.forget(&notes);
        }
    }

    #[cold]
    fn forget(&mut self, notes: &invalidation::Notes) {
        if notes.enums {
            self.tools.labels.borrow_mut().clear();
        }
        if notes.origins {
            self.origins.clear();
        }
        if notes.everything {
            self.publications = None;
        }
        for (relation, entry) in &mut self.relations {
            let concerns = |compiled: &Compiled| {
                notes
                    .relations
                    .iter()
                    .any(|changed| compiled.depends_on(*changed))
                    || notes.types.iter().any(|hash| compiled.has_type(*hash))
            };
            entry.stale |= notes.everything
                || notes.relations.contains(relation)
                || entry.compiled.as_ref().is_some_and(concerns);
        }
    }

    /// Bring the relation's entry up to date. Returns its OID.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot; `relation` is valid.
    #[inline]
    unsafe fn refresh(&mut self, relation: pg_sys::Relation) -> u32 {
        self.absorb_invalidations();
        // SAFETY: as the caller says.
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
            self.book.forget();
            self.forgot = true;
            self.relations
                .drain()
                .filter_map(|(_, entry)| entry.compiled)
                .for_each(Compiled::release);
        }
        let Self {
            publications,
            relations,
            forgot,
            tools,
            options,
            context,
            ..
        } = self;
        // SAFETY: as for `refresh`; what is allocated on the way is in the scratch memory.
        let compiled = tools.scratch.run(|| unsafe {
            if !pg_sys::is_publishable_relation(relation) {
                return None;
            }
            let publications = match publications {
                Some(publications) => publications,
                None => publications.insert(or_raise(publications::load(&options.publications))),
            };
            Compiled::new(relation, publications, *context)
        });
        let entry = relations.entry(oid).or_default();
        entry.stale = false;
        if let Some(before) = std::mem::replace(&mut entry.compiled, compiled) {
            before.release();
        }
        entry.number = None;
        let hashed = entry.compiled.as_ref().map(Compiled::hashed);
        if hashed.is_some() && entry.hashed != hashed {
            // What was forgotten may have had any keys.
            entry.fence |= entry.hashed.is_some() || *forgot;
            entry.hashed = hashed;
        }
    }

    /// Write a row's change, unless nothing of it is published. Returns whether something was written.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot; the pointers are valid, the tuples may be null.
    pub unsafe fn row_changed(
        &mut self,
        relation: pg_sys::Relation,
        action: pg_sys::ReorderBufferChangeType::Type,
        old: pg_sys::HeapTuple,
        new: pg_sys::HeapTuple,
    ) -> bool {
        // SAFETY: as the caller says.
        let oid = unsafe { self.refresh(relation) };
        let Self {
            outbox,
            book,
            relations,
            tools,
            old: old_row,
            new: new_row,
            keys,
            ..
        } = self;
        let Some(entry) = relations.get_mut(&oid) else {
            return false;
        };
        let Some(compiled) = &entry.compiled else {
            return false;
        };
        let (operation, published) = match action {
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT => {
                (Operation::Insert, compiled.actions.insert)
            }
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_UPDATE => {
                (Operation::Update, compiled.actions.update)
            }
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE => {
                (Operation::Delete, compiled.actions.delete)
            }
            _ => return false,
        };
        // A delete without an old row can't be identified: PostgreSQL refuses such a delete when the table is published at that
        // moment, so it was not, and pgoutput leaves it out as well. An update or insert always has its new row.
        let has_old = !old.is_null() && operation != Operation::Insert;
        let has_new = !new.is_null() && operation != Operation::Delete;
        if !published || (operation == Operation::Delete) == has_new || !(has_old || has_new) {
            return false;
        }
        // SAFETY: the tuples are valid for the time of the change, and the rows are cleared at its end.
        let filled = unsafe {
            (!has_old || old_row.fill(old, &compiled.attributes).is_ok())
                && (!has_new || new_row.fill(new, &compiled.attributes).is_ok())
        };
        if !filled {
            report::fail(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!(
                    "decoded tuple of table \"{}\" is not valid",
                    compiled.shape.name
                ),
                None,
            );
        }
        let change = RowChange {
            compiled,
            tools,
            operation,
            old: has_old.then_some(&*old_row),
            new: has_new.then_some(&*new_row),
        };
        let Some(operation) = change.passes() else {
            return false;
        };
        let barrier = change.collect_keys(keys) | std::mem::take(&mut entry.fence);
        // SAFETY: as the caller says.
        if outbox.wants_header() {
            let identity = tools.scratch.run(|| unsafe { Identity::read() });
            or_raise(outbox.writer().stream_header(&identity.header()));
            outbox.header_written();
        }
        let schema = announce(outbox, book, &mut entry.number, &compiled.shape);
        or_raise(outbox.ensure_begun());
        let _encoding = if compiled.sends_text {
            ServerEncoding::enter()
        } else {
            None
        };
        change.write(operation, outbox, schema, barrier, keys);
        true
    }

    /// Write a truncate of those relations that are published. Returns whether there is one.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot; the relations are valid.
    pub unsafe fn truncated(
        &mut self,
        relations: &[pg_sys::Relation],
        cascade: bool,
        restart: bool,
    ) -> bool {
        let mut numbers = Vec::new();
        for relation in relations {
            // SAFETY: as the caller says.
            let oid = unsafe { self.refresh(*relation) };
            let concerned = self
                .relations
                .get(&oid)
                .and_then(|entry| entry.compiled.as_ref());
            // An ancestor under whose name changes are sent is in the list itself if it was truncated.
            if !concerned.is_some_and(|compiled| compiled.actions.truncate && !compiled.by_ancestor)
            {
                continue;
            }
            // SAFETY: as the caller says.
            unsafe { self.ensure_header() };
            if let Some(Entry {
                compiled: Some(compiled),
                number,
                ..
            }) = self.relations.get_mut(&oid)
            {
                numbers.push(announce(
                    &mut self.outbox,
                    &mut self.book,
                    number,
                    &compiled.shape,
                ));
            }
        }
        if numbers.is_empty() {
            return false;
        }
        or_raise(self.outbox.ensure_begun());
        or_raise(self.outbox.writer().truncate(cascade, restart, &numbers));
        true
    }
}

/// The number of the relation's schema, announced before its first use.
#[inline]
fn announce(
    outbox: &mut Outbox,
    book: &mut SchemaBook,
    number: &mut Option<SchemaNumber>,
    shape: &Shape,
) -> SchemaNumber {
    *number.get_or_insert_with(|| or_raise(book.announce(shape, outbox.writer())))
}
