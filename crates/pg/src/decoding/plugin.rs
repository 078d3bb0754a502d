//! The callbacks of the output plugin and the state between them.
//!
//! The state belongs to the decoding context: it is dropped when that context's memory goes, also after an error, for which
//! there is no callback.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};

use braid_decoder::{
    FrameSink, Images, Options, OriginPolicy, Outbox, Passed, Publication, SchemaBook, Shape,
    classify, collect, to_unix_micros, transform,
};
use braid_gir::{
    BeforeKind, ImageWriter, Message, Operation, ReplicaIdentity, SchemaNumber, Value,
};
use pgrx::{PgSqlErrorCode, pg_sys};

use super::column::Tools;
use super::invalidation;
use super::key::RowKeys;
use super::node::Identity;
use super::relation::{Compiled, Hashed, SentColumn};
use super::report::{self, or_raise};
use super::row_filter::Of;
use super::session::{ServerEncoding, Session};
use super::tuple::{Field, Row};
use super::{names, publications};
use crate::compat;

/// How many relations are remembered. Beyond it all are forgotten and compiled anew when they come, which costs a schema
/// record each.
const REMEMBERED_RELATIONS: usize = 16_384;
/// After how many changes that are not sent progress is reported where the reorder buffer does not do it.
const SILENT_CHANGES: u32 = 100;

/// Fill in the table of callbacks. In-progress and prepared transactions have none yet: they are decoded when they commit.
///
/// # Safety
/// `callbacks` is the table that PostgreSQL hands to `_PG_output_plugin_init`.
pub unsafe fn install(callbacks: *mut c_void) {
    // SAFETY: as the caller says.
    let callbacks = unsafe { &mut *callbacks.cast::<pg_sys::OutputPluginCallbacks>() };
    callbacks.startup_cb = Some(startup);
    callbacks.begin_cb = Some(begin);
    callbacks.change_cb = Some(change);
    callbacks.truncate_cb = Some(truncate);
    callbacks.commit_cb = Some(commit);
    callbacks.message_cb = Some(message);
    callbacks.filter_by_origin_cb = Some(filter_by_origin);
    callbacks.shutdown_cb = Some(shutdown);
}

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

/// The state of a stream.
struct Plugin {
    options: Options,
    outbox: Outbox,
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
    silent: u32,
    /// Parent of every memory context of the plugin.
    context: pg_sys::MemoryContext,
    session: Option<Session>,
}

/// Sends a frame through the decoding context.
struct Sink(*mut pg_sys::LogicalDecodingContext);

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

/// The stream's state, if it has one: creating a slot has none.
unsafe fn state<'c>(ctx: *mut pg_sys::LogicalDecodingContext) -> Option<&'c mut Plugin> {
    // SAFETY: set by `startup` to null or a box that lives as long as the context; callbacks do not nest.
    unsafe { (*ctx).output_plugin_private.cast::<Plugin>().as_mut() }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn startup(
    ctx: *mut pg_sys::LogicalDecodingContext,
    opt: *mut pg_sys::OutputPluginOptions,
    is_init: bool,
) {
    // SAFETY: PostgreSQL calls this once for a context, with valid pointers; the box is dropped with the context's memory.
    unsafe {
        (*opt).output_type = pg_sys::OutputPluginOutputType::OUTPUT_PLUGIN_BINARY_OUTPUT;
        (*opt).receive_rewrites = false;
        (*ctx).output_plugin_private = std::ptr::null_mut();
        if is_init {
            return;
        }
        let options = or_raise(Options::parse(given_options(ctx), split_identifiers));
        let context = small_context((*ctx).context, c"braid output plugin");
        let scratch = small_context(context, c"braid change");
        invalidation::listen();
        // What was noted before this stream has no one to concern.
        invalidation::take();
        let plugin = Box::new(Plugin {
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
        });
        let callback = pg_sys::MemoryContextAllocZero(
            (*ctx).context,
            size_of::<pg_sys::MemoryContextCallback>(),
        )
        .cast::<pg_sys::MemoryContextCallback>();
        let plugin = Box::into_raw(plugin);
        (*callback).func = Some(drop_state);
        (*callback).arg = plugin.cast();
        pg_sys::MemoryContextRegisterResetCallback((*ctx).context, callback);
        (*ctx).output_plugin_private = plugin.cast();
        (*plugin).session = Some(Session::enter());
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

/// Called when the context's memory goes, after its children's went.
unsafe extern "C-unwind" fn drop_state(state: *mut c_void) {
    // SAFETY: the pointer is that of `startup`'s box, and this is called once.
    drop(unsafe { Box::from_raw(state.cast::<Plugin>()) });
}

/// The options of the decoding context.
unsafe fn given_options(ctx: *mut pg_sys::LogicalDecodingContext) -> Vec<(String, Option<String>)> {
    // SAFETY: the list is null or one of DefElem whose arguments are null or strings.
    unsafe {
        let list = (*ctx).output_plugin_options;
        if list.is_null() {
            return Vec::new();
        }
        let len = usize::try_from((*list).length).unwrap_or_default();
        let cells = std::slice::from_raw_parts((*list).elements, len);
        cells
            .iter()
            .map(|cell| {
                let element = &*cell.ptr_value.cast::<pg_sys::DefElem>();
                let value = (!element.arg.is_null()
                    && (*element.arg).type_ == pg_sys::NodeTag::T_String)
                    .then(|| (*element.arg.cast::<pg_sys::String>()).sval);
                let value = value.map(|text| names::from_server(text));
                (names::from_server(element.defname), value)
            })
            .collect()
    }
}

/// A list of identifiers, as SQL reads it.
fn split_identifiers(list: &str) -> Option<Vec<String>> {
    let text = names::to_server(list)?;
    let mut parts = std::ptr::null_mut();
    // SAFETY: the function writes into its copy of the text; the list's cells point into that.
    unsafe {
        let text = pg_sys::pstrdup(text.as_ptr());
        let separator = c_char::try_from(b',').ok()?;
        if !pg_sys::SplitIdentifierString(text, separator, &raw mut parts) {
            return None;
        }
        if parts.is_null() {
            return Some(Vec::new());
        }
        let len = usize::try_from((*parts).length).unwrap_or_default();
        let cells = std::slice::from_raw_parts((*parts).elements, len);
        Some(
            cells
                .iter()
                .map(|cell| names::from_server(cell.ptr_value.cast()))
                .collect(),
        )
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn shutdown(ctx: *mut pg_sys::LogicalDecodingContext) {
    // SAFETY: a valid context; the state itself goes with the context's memory.
    if let Some(session) = unsafe { state(ctx) }.and_then(|plugin| plugin.session.take()) {
        session.leave();
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn filter_by_origin(
    ctx: *mut pg_sys::LogicalDecodingContext,
    origin: pg_sys::RepOriginId,
) -> bool {
    // Called while WAL is read, outside of transactions: an origin's name can't be looked up yet.
    // SAFETY: a valid context.
    let plugin = unsafe { state(ctx) };
    plugin
        .is_some_and(|plugin| plugin.options.origin == OriginPolicy::Local && origin != no_origin())
}

/// `InvalidRepOriginId`: first committed here.
fn no_origin() -> pg_sys::RepOriginId {
    pg_sys::RepOriginId::try_from(pg_sys::InvalidRepOriginId).unwrap_or_default()
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn begin(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
) {
    // SAFETY: valid pointers, in a transaction with a historic snapshot. The commit time is the member of the union that is
    // set for a transaction that committed.
    unsafe {
        let Some(plugin) = state(ctx) else { return };
        let txn = &*txn;
        plugin.absorb_invalidations();
        let origin = plugin.origin_name(txn.origin_id);
        let source = classify(&origin);
        plugin.skip = source.is_node(plugin.options.node.as_deref());
        let transaction = plugin.outbox.start();
        transaction.commit_lsn = txn.final_lsn;
        transaction.commit_timestamp = to_unix_micros(txn.xact_time.commit_time);
        transaction.xid = txn.xid.into_inner();
        transaction.origin.clear();
        transaction.origin.push_str(source.name());
        transaction.origin_lsn = if source.name().is_empty() {
            0
        } else {
            txn.origin_lsn
        };
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn commit(
    ctx: *mut pg_sys::LogicalDecodingContext,
    txn: *mut pg_sys::ReorderBufferTXN,
    _commit_lsn: pg_sys::XLogRecPtr,
) {
    // SAFETY: valid pointers, in a callback that may write.
    unsafe {
        let Some(plugin) = state(ctx) else { return };
        let sent = or_raise(plugin.outbox.commit((*txn).end_lsn, &mut Sink(ctx)));
        // Keeps feedback and synchronous replication going over transactions of which nothing is sent.
        pg_sys::OutputPluginUpdateProgress(ctx, !sent);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn change(
    ctx: *mut pg_sys::LogicalDecodingContext,
    _txn: *mut pg_sys::ReorderBufferTXN,
    relation: pg_sys::Relation,
    change: *mut pg_sys::ReorderBufferChange,
) {
    // SAFETY: valid pointers, in a transaction with a historic snapshot, in a callback that may write. The tuples of the union
    // are the member that is set for a row's change.
    unsafe {
        let Some(plugin) = state(ctx) else { return };
        let written = !plugin.skip && {
            let action = (*change).action;
            let tuples = (*change).data.tp;
            plugin.row_changed(
                relation,
                action,
                compat::change_tuple(tuples.oldtuple),
                compat::change_tuple(tuples.newtuple),
            )
        };
        plugin.old.clear();
        plugin.new.clear();
        plugin.tools.scratch.reset();
        plugin.end_of_change(ctx, written);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn truncate(
    ctx: *mut pg_sys::LogicalDecodingContext,
    _txn: *mut pg_sys::ReorderBufferTXN,
    count: c_int,
    relations: *mut pg_sys::Relation,
    change: *mut pg_sys::ReorderBufferChange,
) {
    // SAFETY: as for `change`; there are `count` relations.
    unsafe {
        let Some(plugin) = state(ctx) else { return };
        let mut written = false;
        if !plugin.skip {
            let count = usize::try_from(count).unwrap_or_default();
            let relations = std::slice::from_raw_parts(relations, count);
            let flags = (*change).data.truncate;
            written = plugin.truncated(relations, flags.cascade, flags.restart_seqs);
        }
        plugin.tools.scratch.reset();
        plugin.end_of_change(ctx, written);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn message(
    ctx: *mut pg_sys::LogicalDecodingContext,
    _txn: *mut pg_sys::ReorderBufferTXN,
    lsn: pg_sys::XLogRecPtr,
    transactional: bool,
    prefix: *const c_char,
    size: pg_sys::Size,
    content: *const c_char,
) {
    // SAFETY: valid pointers; the content has `size` bytes. A message that is not transactional comes outside of any
    // transaction, and never between a transaction's changes.
    unsafe {
        let Some(plugin) = state(ctx) else { return };
        if !plugin.options.messages || (transactional && plugin.skip) {
            return;
        }
        let prefix = names::from_server(prefix);
        let content = if size == 0 {
            &[][..]
        } else {
            std::slice::from_raw_parts(content.cast::<u8>(), size)
        };
        let message = Message {
            transactional,
            lsn,
            prefix: &prefix,
            content,
        };
        plugin.ensure_header();
        if transactional {
            or_raise(plugin.outbox.ensure_begun());
            or_raise(plugin.outbox.writer().message(&message));
            plugin.end_of_change(ctx, true);
        } else {
            or_raise(plugin.outbox.lone_message(&message, &mut Sink(ctx)));
        }
    }
}

impl Plugin {
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
    fn end_of_change(&mut self, ctx: *mut pg_sys::LogicalDecodingContext, written: bool) {
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
            pg_sys::replorigin_by_oid(origin, true, &raw mut name);
            names::from_server(name)
        });
        self.origins.insert(origin, name.clone());
        name
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
    unsafe fn row_changed(
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
    unsafe fn truncated(
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

/// One change of a row that was taken apart.
struct RowChange<'c> {
    compiled: &'c Compiled,
    tools: &'c Tools,
    operation: Operation,
    old: Option<&'c Row>,
    new: Option<&'c Row>,
}

impl RowChange<'_> {
    /// As which operation the change passes the row filters, if it does.
    #[inline]
    fn passes(&self) -> Option<Operation> {
        let Some(filters) = &self.compiled.filters else {
            return Some(self.operation);
        };
        match (self.operation, self.old, self.new) {
            (Operation::Insert, _, Some(new)) => filters
                .matches(Of::Insert, new, None)
                .then_some(Operation::Insert),
            (Operation::Delete, Some(old), _) => filters
                .matches(Of::Delete, old, None)
                .then_some(Operation::Delete),
            (Operation::Update, old, Some(new)) => {
                let old_matches = old.map(|old| filters.matches(Of::Update, old, None));
                let new_matches = filters.matches(Of::Update, new, old);
                match transform(old_matches, new_matches) {
                    Passed::As(operation) => Some(operation),
                    Passed::Nothing => None,
                }
            }
            _ => None,
        }
    }

    fn kind(&self) -> BeforeKind {
        match (self.old, self.compiled.shape.identity) {
            (None, _) => BeforeKind::Absent,
            (Some(_), ReplicaIdentity::Full) => BeforeKind::Row,
            (Some(_), _) => BeforeKind::Key,
        }
    }

    /// The writeset, of the change as it was made: what the row filter made of it locks no fewer keys.
    #[inline]
    fn collect_keys(&self, keys: &mut Vec<u64>) -> bool {
        let of = |row| RowKeys {
            row,
            columns: &self.compiled.key_columns,
            tools: self.tools,
        };
        let (mut before, mut after) = (self.old.map(of), self.new.map(of));
        let images = Images {
            operation: self.operation,
            kind: self.kind(),
            before: before.as_mut(),
            after: after.as_mut(),
        };
        collect(&self.compiled.keys, images, keys)
    }

    #[inline]
    fn write(
        &self,
        operation: Operation,
        outbox: &mut Outbox,
        schema: SchemaNumber,
        barrier: bool,
        keys: &[u64],
    ) {
        let (kind, writer) = (self.kind(), outbox.writer());
        let before = |image: &mut ImageWriter<'_>| self.put_old(image);
        // A row that enters a filter has to be whole: what did not change comes from the old one as far as that has it.
        let fallback = if operation == Operation::Insert {
            self.old
        } else {
            None
        };
        let after = |image: &mut ImageWriter<'_>| self.put_new(image, fallback);
        or_raise(match operation {
            Operation::Insert => writer.insert(schema, barrier, keys, after),
            Operation::Update => writer.update(schema, kind, barrier, keys, before, after),
            Operation::Delete => writer.delete(schema, kind, barrier, keys, before),
        });
    }

    fn put_old(&self, image: &mut ImageWriter<'_>) -> braid_gir::Result<()> {
        let whole = self.kind() == BeforeKind::Row;
        for column in &self.compiled.columns {
            match self.old {
                Some(old) if whole || column.in_identity => {
                    self.put(column, old.field(column.attribute), image);
                }
                _ => image.put(&Value::None),
            }
        }
        Ok(())
    }

    #[inline]
    fn put_new(
        &self,
        image: &mut ImageWriter<'_>,
        fallback: Option<&Row>,
    ) -> braid_gir::Result<()> {
        let Some(new) = self.new else { return Ok(()) };
        for column in &self.compiled.columns {
            let mut field = new.field(column.attribute);
            if let (Field::Unavailable, Some(fallback)) = (field, fallback)
                && let stored @ Field::Stored(_) = fallback.field(column.attribute)
            {
                field = stored;
            }
            self.put(column, field, image);
        }
        Ok(())
    }

    #[inline]
    fn put(&self, column: &SentColumn, field: Field<'_>, image: &mut ImageWriter<'_>) {
        match field {
            Field::Null => image.put(&Value::Null),
            Field::Unavailable => image.put(&Value::None),
            Field::Stored(bytes) => column.encoder.put(bytes, image, self.tools),
        }
    }
}
