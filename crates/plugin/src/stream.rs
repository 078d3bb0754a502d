//! The format `gir`: the relations that a stream has met, what it has announced, the transaction in hand; and what a change
//! makes of it. How finished frames leave is a [`Delivery`]'s.
//!
//! It belongs to the decoding context: it is dropped when that context's memory goes, also after an error, for which there
//! is no callback.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char};
use std::ops::ControlFlow;

use braid_decoder::{
    FrameSink, Options, OriginPolicy, Outbox, Publication, REPLACED_PREFIX, RULE_PREFIX,
    SchemaBook, Shape, Source, classify, to_unix_micros,
};
use braid_gir::{Message, Operation, SchemaNumber};
use braid_postgres::table_scan::{self, Sees, low};
use braid_postgres::{compat, encoding};
use pgrx::{PgSqlErrorCode, pg_sys};

use super::bulk::{self, Body, LARGE_BYTES};
use super::column::Tools;
use super::displacement;
use super::format::{Author, Change, Context, Format, LogicalMessage, Preparation, Truncation};
use super::held::{self, Held};
use super::invalidation;
use super::node::Identity;
use super::own_table::{self, OwnTable};
use super::relation::{Compiled, Hashed};
use super::replaced::ReplacedRows;
use super::report::{self, or_raise};
use super::row_change::RowChange;
use super::running::{Unwatched, watch};
use super::session::{ServerEncoding, Session};
use super::tuple::Row;
use super::unfound::{self, Unfound};
use super::{publications, version};

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
    /// It is one of the extension, and tells something.
    own: Option<OwnTable>,
}

/// Reports progress within a large transaction of which nothing is sent, where the reorder buffer does not do it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    silent: u32,
}

impl Progress {
    /// A change is done with.
    #[inline]
    pub(super) fn note(&mut self, ctx: Context, written: bool) {
        if written {
            self.silent = 0;
        } else if !compat::REPORTS_PROGRESS {
            self.silent += 1;
            if self.silent >= SILENT_CHANGES {
                self.silent = 0;
                // SAFETY: in a callback of this context.
                unsafe { pg_sys::OutputPluginUpdateProgress(ctx, false) };
            }
        }
    }
}

/// What a stream knows and has in hand.
pub struct Stream {
    pub(super) options: Options,
    pub(super) outbox: Outbox,
    pub(super) delivery: Box<dyn Delivery>,
    /// Types without a portable form are written in their text form.
    text_forms: bool,
    /// Loaded with the first change, and again after an invalidation.
    publications: Option<Vec<Publication>>,
    relations: HashMap<u32, Entry>,
    book: SchemaBook,
    /// Relations were forgotten for want of room.
    forgot: bool,
    origins: HashMap<u16, String>,
    tools: Tools,
    old: Row,
    new: Row,
    keys: Vec<u64>,
    /// Nothing of this transaction is sent.
    skip: bool,
    /// The transaction in hand is prepared and may be rolled back while it is decoded, as those in segments.
    unsettled: bool,
    /// The end of the transaction in hand, which was prepared before that was to be told, and is sent now that it has committed.
    whole: Option<u64>,
    progress: Progress,
    /// Parent of every memory context of the plugin.
    context: pg_sys::MemoryContext,
    session: Option<Session>,
    pub(super) held: Held,
    /// Which rows of other nodes the changes to come have replaced, if the reader wants to know.
    replaced: Option<ReplacedRows>,
    /// Version of that which the change in hand has replaced, as it is sent: Unix microseconds and node. Empty if none is.
    replaced_now: Vec<u8>,
}

/// How the frames of a stream leave: as they are, or as something else that says the same.
pub(super) trait Delivery {
    /// Whether it is text in the server's encoding that leaves.
    fn is_text(&self) -> bool;

    /// Send a frame: whole records, at most of one transaction.
    ///
    /// # Safety
    /// `ctx` is valid and may be written to; in a transaction with a historic snapshot, unless the frame is a lone message or of a
    /// transaction that came in segments or is prepared.
    unsafe fn deliver(&mut self, ctx: Context, frame: &[u8]);

    /// Frames to come refer to no other schemas than these and new ones.
    fn keep_schemas(&mut self, _in_use: &HashSet<SchemaNumber>) {}
}

/// Each frame as one message.
pub(super) struct Frames;

impl Delivery for Frames {
    fn is_text(&self) -> bool {
        false
    }

    unsafe fn deliver(&mut self, ctx: Context, frame: &[u8]) {
        // SAFETY: as the caller says.
        unsafe { write_message(ctx, frame, true) };
    }
}

/// Send `bytes` through the decoding context; `last` if its buffer holds the whole of what belongs together.
///
/// # Safety
/// `ctx` is valid, in a callback that may write.
pub(super) unsafe fn write_message(ctx: Context, bytes: &[u8], last: bool) {
    let Ok(len) = i32::try_from(bytes.len()) else {
        report::fail(
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            "row is too large to be replicated".to_owned(),
            None,
        );
    };
    // SAFETY: as the caller says; the output buffer is the context's.
    unsafe {
        pg_sys::OutputPluginPrepareWrite(ctx, last);
        if bytes.len() > LARGE_BYTES && bulk::is_possible(ctx) {
            bulk::write(ctx, Body::Bytes(bytes), last);
            return;
        }
        pg_sys::appendBinaryStringInfo((*ctx).out, bytes.as_ptr().cast(), len);
        pg_sys::OutputPluginWrite(ctx, last);
    }
}

/// The outbox's way out.
pub(super) struct Sink<'s> {
    pub(super) ctx: Context,
    pub(super) delivery: &'s mut dyn Delivery,
}

impl FrameSink for Sink<'_> {
    fn send(&mut self, frame: &[u8]) {
        // SAFETY: made in callbacks that may write, from their context.
        unsafe { self.delivery.deliver(self.ctx, frame) };
    }
}

pub(super) unsafe fn small_context(
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
pub(super) fn no_origin() -> pg_sys::RepOriginId {
    pg_sys::RepOriginId::try_from(pg_sys::InvalidRepOriginId).unwrap_or_default()
}

impl Stream {
    /// A stream that has sent nothing. `parent` is the decoding context's memory.
    ///
    /// # Safety
    /// `parent` is valid, and outlives the stream; in the startup callback.
    pub(super) unsafe fn new(
        options: Options,
        delivery: Box<dyn Delivery>,
        parent: pg_sys::MemoryContext,
    ) -> Self {
        // SAFETY: as the caller says.
        let (context, scratch) = unsafe {
            let context = small_context(parent, c"braid output plugin");
            (context, small_context(context, c"braid change"))
        };
        let replaced = options.replaced_versions;
        // SAFETY: as the caller says.
        let replaced = replaced.then(|| unsafe { ReplacedRows::new() });
        Self {
            options,
            outbox: Outbox::new(),
            text_forms: delivery.is_text(),
            delivery,
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
            unsettled: false,
            whole: None,
            progress: Progress::default(),
            context,
            session: Some(Session::enter()),
            held: Held::default(),
            replaced,
            replaced_now: Vec::new(),
        }
    }

    /// Forget the rows of the change in hand.
    fn clear_change(&mut self) {
        self.old.clear();
        self.new.clear();
        self.tools.scratch.reset();
    }

    /// # Safety
    /// With a historic snapshot.
    unsafe fn ensure_header(&mut self) {
        if !self.outbox.wants_header() {
            return;
        }
        // SAFETY: as the caller says.
        let identity = self.tools.scratch.run(|| unsafe { Identity::read() });
        or_raise(self.outbox.writer().stream_header(&identity.header()));
        self.outbox.header_written();
    }

    /// Send what has gathered, or say that nothing does.
    fn end_of_change(&mut self, ctx: Context, written: bool) {
        if written {
            let delivery = &mut *self.delivery;
            self.outbox.flush_if_large(&mut Sink { ctx, delivery });
            self.keep_schemas();
        }
        self.progress.note(ctx, written);
    }

    /// Once in a while tell the delivery which schemas may come again, when nothing waits for it that refers to others.
    #[inline]
    fn keep_schemas(&mut self) {
        if self.book.has_many_new() && self.outbox.writer().is_empty() {
            let numbers = self.relations.values().filter_map(|entry| entry.number);
            let in_use = self.book.in_use(numbers);
            self.delivery.keep_schemas(&in_use);
        }
    }

    /// Name of a replication origin; empty for none, for one that is not known any more, and for what was marked as not to be
    /// replicated.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot.
    unsafe fn origin_name(&mut self, origin: pg_sys::RepOriginId) -> String {
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
            if pg_sys::replorigin_by_oid(origin, true, &raw mut name) {
                return encoding::from_server(name);
            }
            origin_of_any_time(origin).unwrap_or_default()
        });
        self.origins.insert(origin, name.clone());
        name
    }

    /// Whether a change is none of the reader's. What a transaction is as a whole its commit says; of one that still runs each change
    /// says itself where it comes from.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot.
    #[inline]
    unsafe fn leaves_out(&mut self, author: Author) -> bool {
        if !self.outbox.in_segment() {
            return self.skip;
        }
        if author.origin == no_origin() || self.options.node.is_none() {
            return false;
        }
        // SAFETY: as the caller says.
        let origin = unsafe { self.origin_name(author.origin) };
        classify(&origin).is_node(self.options.node.as_deref())
    }

    /// Notes the version of the row of another node that the change at `lsn` has replaced, if it has.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot.
    #[inline]
    unsafe fn note_replaced(&mut self, lsn: u64) {
        self.replaced_now.clear();
        let Some((timestamp, origin)) = self.replaced.as_mut().and_then(|rows| rows.take(lsn))
        else {
            return;
        };
        // SAFETY: as the caller says.
        let name = unsafe { self.origin_name(origin) };
        if let Source::Node(node) = classify(&name) {
            let micros = to_unix_micros(timestamp).to_le_bytes();
            self.replaced_now.extend_from_slice(&micros);
            self.replaced_now.extend_from_slice(node.as_bytes());
        }
    }

    /// As [`Stream::origin_name`], where there may be no transaction.
    unsafe fn origin_name_outside(&mut self, origin: pg_sys::RepOriginId) -> String {
        // SAFETY: as the caller says; what is known already is not looked up.
        unsafe {
            if origin == no_origin() || self.origins.contains_key(&origin) {
                return self.origin_name(origin);
            }
            in_transaction(|| self.origin_name(origin))
        }
    }

    /// Tell the outbox of a transaction that has committed. Returns whether it is none of the reader's.
    fn start_transaction(&mut self, txn: &pg_sys::ReorderBufferTXN, origin: &str) -> bool {
        // SAFETY: the member of the union that is set for a transaction that committed.
        let time = unsafe { txn.xact_time.commit_time };
        let source = classify(origin);
        let transaction = self.outbox.start();
        transaction.commit_lsn = txn.final_lsn;
        transaction.commit_timestamp = to_unix_micros(time);
        transaction.prepared = None;
        transaction.xid = txn.xid.into_inner();
        transaction.origin.clear();
        transaction.origin.push_str(source.name());
        transaction.origin_lsn = if source.name().is_empty() {
            0
        } else {
            txn.origin_lsn
        };
        source.is_node(self.options.node.as_deref())
    }

    /// Tell the outbox of a transaction that is, or was, prepared. Returns whether it is none of the reader's.
    ///
    /// # Safety
    /// `txn` is valid and has a name.
    unsafe fn start_prepared(
        &mut self,
        txn: &pg_sys::ReorderBufferTXN,
        preparation: Preparation,
        origin: &str,
    ) -> bool {
        let left_out = self.start_transaction(txn, origin);
        // SAFETY: as the caller says.
        let (gid, version) = unsafe {
            let is_sent = !left_out && !matches!(preparation, Preparation::Now);
            let version = is_sent.then(|| version::written_down(txn)).flatten();
            (name_outside(txn.gid), version)
        };
        let transaction = self.outbox.start();
        match preparation {
            Preparation::Now => {
                transaction.prepared = Some((txn.end_lsn, gid));
                self.whole = None;
            }
            Preparation::Before {
                commit_lsn,
                end_lsn,
                commit_time,
            } => {
                transaction.commit_lsn = commit_lsn;
                transaction.commit_timestamp = version.unwrap_or(to_unix_micros(commit_time));
                self.whole = Some(end_lsn);
            }
        }
        left_out
    }

    #[inline]
    fn absorb_invalidations(&mut self) {
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
            text_forms,
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
            Compiled::new(relation, publications, *text_forms, *context)
        });
        let entry = relations.entry(oid).or_default();
        entry.stale = false;
        // SAFETY: as for `refresh`.
        entry.own = match compiled {
            Some(_) => None,
            None => unsafe { OwnTable::of(relation) },
        };
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
    unsafe fn put_row(&mut self, change: &Change) -> bool {
        let &Change {
            relation,
            action,
            old,
            new,
            lsn,
            author,
        } = change;
        // SAFETY: as the caller says.
        let oid = unsafe { self.refresh(relation) };
        // Filters, hashes and output functions may ask the type cache.
        let _unwatched = (self.outbox.in_segment() || self.unsettled).then(Unwatched::enter);
        let Self {
            outbox,
            book,
            relations,
            tools,
            old: old_row,
            new: new_row,
            keys,
            replaced_now,
            ..
        } = self;
        let Some(entry) = relations.get_mut(&oid) else {
            return false;
        };
        if let Some(own) = entry.own {
            // An own table's row says nothing of the version of the row that it tells of.
            replaced_now.clear();
            // SAFETY: as the caller says.
            return unsafe {
                match own {
                    OwnTable::Displacement => self.put_displacement(change),
                    OwnTable::RuleChange => self.put_rule_change(change),
                    OwnTable::Unfound => self.put_unfound(change),
                }
            };
        }
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
        let barrier = change.collect_keys(keys) | entry.fence;
        // SAFETY: as the caller says.
        if outbox.wants_header() {
            let identity = tools.scratch.run(|| unsafe { Identity::read() });
            or_raise(outbox.writer().stream_header(&identity.header()));
            outbox.header_written();
        }
        let schema = announce(outbox, book, &mut entry.number, &compiled.shape);
        or_raise(outbox.ensure_begun(author.xid));
        if operation != Operation::Insert {
            tell_replaced(outbox, lsn, replaced_now);
        }
        let _encoding = if compiled.sends_text {
            ServerEncoding::enter()
        } else {
            None
        };
        change.write(operation, outbox, schema, barrier, keys);
        // Not before: of a transaction that is rolled back while it is decoded, this may have ended in an error that is none.
        entry.fence = false;
        true
    }

    /// Write the deletion that one of a row of `braid.displacement` tells of, as of the version that stands there: the transaction has nothing
    /// else. Returns whether something was written.
    ///
    /// # Safety
    /// As for `put_row`; the change is one of that table.
    #[cold]
    unsafe fn put_displacement(&mut self, change: &Change) -> bool {
        if change.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE
            || change.old.is_null()
        {
            return false;
        }
        // SAFETY: as the caller says; the row is in the scratch memory, which is kept until the end of the change.
        unsafe {
            let read = || displacement::read(change.relation, change.old);
            let Some(mut displaced) = self.tools.scratch.run(read) else {
                return false;
            };
            let relation = pg_sys::RelationIdGetRelation(displaced.relation);
            if relation.is_null() {
                // Dropped since, with all of its rows.
                return false;
            }
            if !self.outbox.begun() && !self.outbox.in_segment() {
                let transaction = self.outbox.transaction();
                transaction.commit_timestamp = displaced.timestamp;
                transaction.origin = displaced.origin;
            }
            let written = self.put_row(&Change {
                relation,
                old: &raw mut displaced.row,
                ..*change
            });
            // It points to what is on this function's stack.
            self.old.clear();
            pg_sys::RelationClose(relation);
            written
        }
    }

    /// Write the message that a new row of `braid.rule_change` is, to another node. Returns whether something was written.
    ///
    /// # Safety
    /// As for `put_row`; the change is one of that table.
    #[cold]
    unsafe fn put_rule_change(&mut self, change: &Change) -> bool {
        if change.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT
            || change.new.is_null()
            || self.options.node.is_none()
        {
            return false;
        }
        // SAFETY: as the caller says.
        let read = || unsafe { own_table::message(change.relation, change.new) };
        let Some(content) = self.tools.scratch.run(read) else {
            return false;
        };
        // SAFETY: as the caller says.
        unsafe { self.ensure_header() };
        or_raise(self.outbox.ensure_begun(change.author.xid));
        or_raise(self.outbox.writer().message(&Message {
            transactional: true,
            lsn: change.lsn,
            prefix: RULE_PREFIX,
            content: content.as_bytes(),
        }));
        true
    }

    /// Write the deletion, or the truncate, that a new row of `braid.unfound` tells of, to a node that wants what others wrote. Returns whether
    /// something was written.
    ///
    /// # Safety
    /// As for `put_row`; the change is one of that table.
    #[cold]
    unsafe fn put_unfound(&mut self, change: &Change) -> bool {
        if change.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT
            || change.new.is_null()
            || self.options.node.is_none()
            || self.options.origin != OriginPolicy::Any
        {
            return false;
        }
        // SAFETY: as the caller says; the row is in the scratch memory, which is kept until the end of the change.
        unsafe {
            let read = || unfound::read(change.relation, change.new);
            match self.tools.scratch.run(read) {
                None => false,
                Some(Unfound::Deletion(oid, mut row)) => {
                    let relation = pg_sys::RelationIdGetRelation(oid);
                    if relation.is_null() {
                        // Dropped since, with all of its rows.
                        return false;
                    }
                    let written = self.put_row(&Change {
                        relation,
                        action: pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE,
                        old: &raw mut row,
                        new: std::ptr::null_mut(),
                        ..*change
                    });
                    // It points to what is on this function's stack.
                    self.old.clear();
                    pg_sys::RelationClose(relation);
                    written
                }
                Some(Unfound::Truncate {
                    relations,
                    restart_identity,
                }) => {
                    let opened = relations.into_iter();
                    let opened = opened.map(|oid| pg_sys::RelationIdGetRelation(oid));
                    let opened: Vec<_> = opened.filter(|relation| !relation.is_null()).collect();
                    let written = self.put_truncation(&Truncation {
                        relations: &opened,
                        cascade: false,
                        restart_identity,
                        lsn: change.lsn,
                        author: change.author,
                    });
                    for relation in opened {
                        pg_sys::RelationClose(relation);
                    }
                    written
                }
            }
        }
    }

    /// Write a truncate of those relations that are published. Returns whether there is one.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot; the relations are valid.
    unsafe fn put_truncation(&mut self, truncation: &Truncation<'_>) -> bool {
        let mut numbers = Vec::new();
        for relation in truncation.relations {
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
        or_raise(self.outbox.ensure_begun(truncation.author.xid));
        let (cascade, restart) = (truncation.cascade, truncation.restart_identity);
        or_raise(self.outbox.writer().truncate(cascade, restart, &numbers));
        true
    }
}

impl Format for Stream {
    fn is_text(&self) -> bool {
        self.delivery.is_text()
    }

    fn refuses_origin(&self, origin: pg_sys::RepOriginId) -> bool {
        self.options.origin == OriginPolicy::Local && origin != no_origin()
    }

    unsafe fn record_read(&mut self, ctx: Context) {
        if let Some(replaced) = self.replaced.as_mut() {
            // SAFETY: as the caller says.
            unsafe { replaced.note((*ctx).reader) };
        }
    }

    fn joined(&mut self) -> Option<&mut Stream> {
        Some(self)
    }

    unsafe fn begin(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN) {
        // SAFETY: as the caller says.
        unsafe { held::release_before(ctx, self, txn) };
        self.absorb_invalidations();
        // SAFETY: as the caller says.
        let origin = unsafe { self.origin_name(txn.origin_id) };
        self.skip = self.start_transaction(txn, &origin);
        // SAFETY: as the caller says.
        if let Some(version) = unsafe { version::of(ctx, txn) } {
            self.outbox.transaction().commit_timestamp = version;
        }
    }

    fn prepares(&self) -> bool {
        self.options.two_phase
    }

    fn refuses_prepared(&self, xid: u32) -> bool {
        self.options.unprepared.contains(&xid)
    }

    unsafe fn begin_prepared(
        &mut self,
        ctx: Context,
        txn: &pg_sys::ReorderBufferTXN,
        preparation: Preparation,
    ) {
        // SAFETY: as the caller says.
        unsafe { held::release_before(ctx, self, txn) };
        self.absorb_invalidations();
        self.clear_change();
        // SAFETY: as the caller says.
        unsafe {
            let origin = self.origin_name(txn.origin_id);
            self.skip = self.start_prepared(txn, preparation, &origin);
            self.unsettled = matches!(preparation, Preparation::Now);
            if self.unsettled && !self.skip {
                self.ensure_header();
                or_raise(self.outbox.ensure_begun(txn.xid.into_inner()));
            }
        }
    }

    unsafe fn prepared(&mut self, ctx: Context, _txn: &pg_sys::ReorderBufferTXN) {
        // The last change may have ended in an error that is none: its transaction was rolled back meanwhile.
        self.clear_change();
        self.unsettled = false;
        let delivery = &mut *self.delivery;
        let sink = &mut Sink { ctx, delivery };
        let sent = match self.whole {
            Some(end_lsn) => or_raise(self.outbox.commit(end_lsn, sink)),
            None => {
                or_raise(self.outbox.prepare(sink));
                !self.skip
            }
        };
        // SAFETY: as the caller says.
        unsafe { pg_sys::OutputPluginUpdateProgress(ctx, !sent) };
    }

    unsafe fn segments_prepared(
        &mut self,
        ctx: Context,
        txn: &pg_sys::ReorderBufferTXN,
        preparation: Preparation,
    ) {
        // SAFETY: as the caller says.
        let left_out = unsafe {
            let origin = self.origin_name_outside(txn.origin_id);
            self.start_prepared(txn, preparation, &origin)
        };
        if !left_out && self.whole.is_none() {
            // SAFETY: as the caller says.
            unsafe { self.ensure_header() };
        }
        self.tools.scratch.reset();
        let delivery = &mut *self.delivery;
        let sink = &mut Sink { ctx, delivery };
        let sent = match self.whole {
            _ if left_out => {
                let xid = txn.xid.into_inner();
                or_raise(self.outbox.abort(xid, xid, sink))
            }
            Some(end_lsn) => or_raise(self.outbox.commit_streamed(end_lsn, sink)),
            None => {
                or_raise(self.outbox.prepare_streamed(sink));
                true
            }
        };
        // SAFETY: as the caller says.
        unsafe { pg_sys::OutputPluginUpdateProgress(ctx, !sent) };
    }

    unsafe fn prepared_finished(
        &mut self,
        ctx: Context,
        txn: &pg_sys::ReorderBufferTXN,
        rolled_back: Option<(u64, pg_sys::TimestampTz)>,
    ) {
        self.absorb_invalidations();
        // What was sent whole a moment ago needs no end, and of what has changed nothing that is decoded PostgreSQL shows no beginning.
        let sent_whole = self.whole.take() == Some(txn.end_lsn);
        let mut sent = false;
        if !sent_whole && !txn.base_snapshot.is_null() {
            // SAFETY: as the caller says.
            let left_out = unsafe {
                let origin = self.origin_name_outside(txn.origin_id);
                self.start_prepared(txn, Preparation::Now, &origin)
            };
            if !left_out {
                // SAFETY: as the caller says.
                unsafe {
                    self.ensure_header();
                    if rolled_back.is_none()
                        && let Some(version) = version::written_down(txn)
                    {
                        self.outbox.transaction().commit_timestamp = version;
                    }
                }
                let delivery = &mut *self.delivery;
                or_raise(self.outbox.finish_prepared(
                    rolled_back.map(|(end_lsn, time)| (end_lsn, to_unix_micros(time))),
                    &mut Sink { ctx, delivery },
                ));
                sent = true;
            }
        }
        self.tools.scratch.reset();
        // SAFETY: as the caller says.
        unsafe { pg_sys::OutputPluginUpdateProgress(ctx, !sent) };
    }

    fn streams(&self) -> bool {
        self.options.streaming
    }

    unsafe fn segment_started(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN) {
        // SAFETY: as the caller says.
        unsafe { held::release_before(ctx, self, txn) };
        self.absorb_invalidations();
        self.clear_change();
        self.skip = false;
        self.outbox.start_segment(txn.xid.into_inner());
    }

    unsafe fn segment_stopped(&mut self, ctx: Context) {
        // The last change may have ended in an error that is none: its transaction was rolled back meanwhile.
        self.clear_change();
        let delivery = &mut *self.delivery;
        or_raise(self.outbox.stop_segment(&mut Sink { ctx, delivery }));
    }

    unsafe fn segments_aborted(&mut self, ctx: Context, xid: u32, subxid: u32) {
        let delivery = &mut *self.delivery;
        or_raise(self.outbox.abort(xid, subxid, &mut Sink { ctx, delivery }));
    }

    unsafe fn segments_committed(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN) {
        // SAFETY: as the caller says.
        let origin = unsafe { self.origin_name_outside(txn.origin_id) };
        let left_out = self.start_transaction(txn, &origin);
        // SAFETY: as the caller says.
        if let Some(version) = unsafe { version::written_down(txn) } {
            self.outbox.transaction().commit_timestamp = version;
        }
        self.tools.scratch.reset();
        let delivery = &mut *self.delivery;
        let sink = &mut Sink { ctx, delivery };
        let sent = or_raise(if left_out {
            let xid = txn.xid.into_inner();
            self.outbox.abort(xid, xid, sink)
        } else {
            self.outbox.commit_streamed(txn.end_lsn, sink)
        });
        // SAFETY: as the caller says.
        unsafe { pg_sys::OutputPluginUpdateProgress(ctx, !sent) };
    }

    unsafe fn row_changed(
        &mut self,
        ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        change: &Change,
    ) {
        let running = self.outbox.in_segment() || self.unsettled;
        // SAFETY: as the caller says.
        let mut put = || unsafe {
            self.note_replaced(change.lsn);
            !self.leaves_out(change.author) && self.put_row(change)
        };
        let written = if running {
            watch(change.author.xid, put)
        } else {
            put()
        };
        self.clear_change();
        self.end_of_change(ctx, written);
    }

    unsafe fn truncated(
        &mut self,
        ctx: Context,
        _txn: &pg_sys::ReorderBufferTXN,
        truncation: &Truncation<'_>,
    ) {
        // SAFETY: as the caller says.
        let written =
            unsafe { !self.leaves_out(truncation.author) && self.put_truncation(truncation) };
        self.tools.scratch.reset();
        self.end_of_change(ctx, written);
    }

    unsafe fn message(
        &mut self,
        ctx: Context,
        _txn: Option<&pg_sys::ReorderBufferTXN>,
        message: &LogicalMessage<'_>,
    ) {
        if !self.options.messages || (message.transactional && self.skip) {
            return;
        }
        // SAFETY: as the caller says.
        let prefix = unsafe { name_outside(message.prefix.as_ptr()) };
        let record = Message {
            transactional: message.transactional,
            lsn: message.lsn,
            prefix: &prefix,
            content: message.content,
        };
        // SAFETY: as the caller says.
        unsafe { self.ensure_header() };
        if message.transactional {
            or_raise(self.outbox.ensure_begun(message.xid));
            or_raise(self.outbox.writer().message(&record));
            self.end_of_change(ctx, true);
        } else {
            let delivery = &mut *self.delivery;
            or_raise(
                self.outbox
                    .lone_message(&record, &mut Sink { ctx, delivery }),
            );
        }
    }

    unsafe fn commit(&mut self, ctx: Context, txn: &pg_sys::ReorderBufferTXN) {
        let delivery = &mut *self.delivery;
        let sent = or_raise(self.outbox.commit(txn.end_lsn, &mut Sink { ctx, delivery }));
        if sent {
            // SAFETY: as the caller says.
            unsafe { held::release_at_end(ctx, self, txn.end_lsn) };
        }
        self.keep_schemas();
        // Keeps feedback and synchronous replication going over transactions of which nothing is sent.
        // SAFETY: as the caller says.
        unsafe { pg_sys::OutputPluginUpdateProgress(ctx, !sent) };
    }

    fn leave(&mut self) {
        if let Some(session) = self.session.take() {
            session.leave();
        }
    }
}

/// Says which version of a row the change that comes next has replaced, if that is known.
fn tell_replaced(outbox: &mut Outbox, lsn: u64, content: &[u8]) {
    if content.is_empty() {
        return;
    }
    or_raise(outbox.writer().message(&Message {
        transactional: true,
        lsn,
        prefix: REPLACED_PREFIX,
        content,
    }));
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

/// Name of a replication origin that the historic snapshot does not show: the transaction in hand has made it, as the first one of a source of
/// `braid.ingest` does. What came from elsewhere must not go out as this node's own.
///
/// # Safety
/// In a transaction.
unsafe fn origin_of_any_time(origin: pg_sys::RepOriginId) -> Option<String> {
    let mut found = None;
    // SAFETY: as the caller says; the catalog has two columns, number and name.
    unsafe {
        table_scan::each::<2>(
            pg_sys::ReplicationOriginRelationId,
            None,
            Sees::Any,
            |row| {
                let [number, name] = row.values;
                if low(number) != u32::from(origin) {
                    return ControlFlow::Continue(());
                }
                // The number of one that was dropped may have been given anew: what is not deleted counts, else what came last.
                let name = pg_sys::text_to_cstring(name.cast_mut_ptr());
                found = Some(encoding::from_server(name));
                if row.is_live() {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            },
        );
    }
    found
}

/// A name as UTF-8, where there may be no transaction: for a conversion there has to be one.
///
/// # Safety
/// `name` is null or a C string; in a callback of the decoding context.
unsafe fn name_outside(name: *const c_char) -> String {
    // SAFETY: as the caller says.
    unsafe {
        if name.is_null() || CStr::from_ptr(name).to_bytes().is_ascii() || encoding::is_utf8() {
            return encoding::from_server(name);
        }
        in_transaction(|| encoding::from_server(name))
    }
}

/// Do something in a transaction: the one there is, or one that is left by aborting it as the reorder buffer does, for it writes nothing.
///
/// # Safety
/// In a callback of the decoding context.
pub(super) unsafe fn in_transaction<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: as the caller says.
    unsafe {
        if pg_sys::IsTransactionState() {
            return work();
        }
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::StartTransactionCommand();
        let made = work();
        pg_sys::AbortCurrentTransaction();
        pg_sys::CurrentMemoryContext = context;
        pg_sys::CurrentResourceOwner = owner;
        made
    }
}
