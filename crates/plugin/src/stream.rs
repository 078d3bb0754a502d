//! The format `gir`: the relations and announced schemas of a stream, its current transaction, and
//! the records of a change. How finished frames leave is a [`Delivery`]'s.
//!
//! It belongs to the decoding context: it is dropped when that context's memory goes, also after an
//! error, for which there is no callback.

use braid_decoder::{Options, OriginPolicy, Outbox, Source, classify, to_unix_micros};
use braid_gir::Message;
use braid_postgres::compat::ReplOriginId;
use braid_postgres::decoding::{Context, Transaction};
use braid_postgres::relation::RelationRef;
use pgrx::pg_sys;

use super::column::Tools;
use super::delivery::{Delivery, Progress, Sink};
use super::format::{Author, Change, Format, LogicalMessage, Preparation, Truncation};
use super::held::{self, Held};
use super::invalidation;
use super::node::Identity;
use super::origin_names::{OriginNames, no_origin};
use super::relations::Relations;
use super::replaced::ReplacedRows;
use super::report::or_raise;
use super::running::watch;
use super::scratch::StreamMemory;
use super::session::Session;
use super::tally::Tally;
use super::transaction::name_outside;
use super::tuple::Slots;
use super::version;

/// The state of a stream.
pub struct GirStream {
    pub(super) options: Options,
    pub(super) outbox: Outbox,
    pub(super) delivery: Box<dyn Delivery>,
    pub(super) relations: Relations,
    origins: OriginNames,
    pub(super) tools: Tools,
    pub(super) old: Slots,
    pub(super) new: Slots,
    pub(super) keys: Vec<u64>,
    /// Nothing of this transaction is sent.
    skip: bool,
    /// The current transaction is prepared and may be rolled back while it is decoded, like those
    /// in segments.
    unsettled: bool,
    /// The end of the current transaction, which was prepared before prepared transactions were to
    /// be sent, and is sent now that it has committed.
    whole: Option<u64>,
    progress: Progress,
    session: Option<Session>,
    pub(super) held: Held,
    /// The rows of other nodes that the following changes have replaced, if the reader wants to
    /// know.
    pub(super) replaced: Option<ReplacedRows>,
    /// Version of the row that the current change has replaced, as it is sent: Unix microseconds
    /// and node. Empty if none is.
    pub(super) replaced_now: Vec<u8>,
    /// Writes by tenant of transactions that have not ended.
    pub(super) tally: Tally,
}

impl GirStream {
    /// A stream that has sent nothing. In the startup callback.
    pub(super) fn new(options: Options, delivery: Box<dyn Delivery>, ctx: Context<'_>) -> Self {
        let context = StreamMemory::new(ctx, c"braid output plugin");
        let scratch = context.below(c"braid change");
        let replaced = options.replaced_versions;
        let replaced = replaced.then(ReplacedRows::new);
        Self {
            options,
            outbox: Outbox::new(),
            relations: Relations::new(delivery.is_text(), context),
            delivery,
            origins: OriginNames::default(),
            tools: Tools::new(scratch),
            old: Slots::default(),
            new: Slots::default(),
            keys: Vec::new(),
            skip: false,
            unsettled: false,
            whole: None,
            progress: Progress::default(),
            session: Some(Session::enter()),
            held: Held::default(),
            replaced,
            replaced_now: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// Forgets the memory of the current change.
    fn clear_change(&mut self) {
        self.tools.scratch.reset();
    }

    /// With a historic snapshot.
    pub(super) fn ensure_header(&mut self) {
        if !self.outbox.wants_header() {
            return;
        }
        let identity = self.tools.scratch.run(Identity::read);
        or_raise(self.outbox.writer().stream_header(&identity.header()));
        self.outbox.header_written();
    }

    /// Sends the gathered bytes, or reports progress if there are none.
    fn end_of_change(&mut self, ctx: Context<'_>, written: bool) {
        if written {
            let delivery = &mut *self.delivery;
            self.outbox.flush_if_large(&mut Sink { ctx, delivery });
            self.keep_schemas();
        }
        self.progress.note(ctx, written);
    }

    /// The current transaction may be rolled back while it is decoded.
    #[inline]
    pub(super) fn may_be_rolled_back(&self) -> bool {
        self.outbox.in_segment() || self.unsettled
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
        self.relations.forget(notes);
    }

    /// Brings the relation's entry up to date. Returns its OID.
    #[inline]
    pub(super) fn refresh(&mut self, relation: RelationRef<'_>) -> u32 {
        self.absorb_invalidations();
        let Self {
            relations,
            options,
            tools,
            ..
        } = self;
        relations.refresh(relation, options, &tools.scratch)
    }

    /// Reports to the delivery which schemas may be used again.
    #[inline]
    fn keep_schemas(&mut self) {
        if let Some(in_use) = self.relations.schemas_in_use(&mut self.outbox) {
            self.delivery.keep_schemas(&in_use);
        }
    }

    /// Whether the reader does not get a change. For a committed transaction, its commit decides
    /// for all changes. In an in-progress transaction, each change has its own origin.
    #[inline]
    fn leaves_out(&mut self, author: Author) -> bool {
        if !self.outbox.in_segment() {
            return self.skip;
        }
        if author.origin == no_origin() || self.options.node.is_none() {
            return false;
        }
        let origin = self.origins.get(author.origin, &self.tools.scratch);
        classify(&origin).is_node(self.options.node.as_deref())
    }

    /// Notes the version of the row of another node that the change at `lsn` has replaced, if it
    /// has.
    #[inline]
    fn note_replaced(&mut self, lsn: u64) {
        self.replaced_now.clear();
        let Some((timestamp, origin)) = self.replaced.as_mut().and_then(|rows| rows.take(lsn))
        else {
            return;
        };
        let name = self.origins.get(origin, &self.tools.scratch);
        if let Source::Node(node) = classify(&name) {
            let micros = to_unix_micros(timestamp).to_le_bytes();
            self.replaced_now.extend_from_slice(&micros);
            self.replaced_now.extend_from_slice(node.as_bytes());
        }
    }

    /// Begins a transaction that has committed, in the outbox. Returns whether the reader does not
    /// get it.
    fn start_transaction(&mut self, txn: Transaction<'_>, origin: &str) -> bool {
        let time = txn.time();
        let source = classify(origin);
        let transaction = self.outbox.start();
        transaction.commit_lsn = txn.final_lsn;
        transaction.commit_timestamp = to_unix_micros(time);
        transaction.prepared = None;
        transaction.xid = txn.id();
        transaction.origin.clear();
        transaction.origin.push_str(source.name());
        transaction.origin_lsn = if transaction.origin.is_empty() {
            0
        } else {
            txn.origin_lsn
        };
        let origin_lsn = transaction.origin_lsn;
        source.is_node(self.options.node.as_deref())
            || (self.options.only.as_ref()).is_some_and(|only| only.leaves_out(&source, origin_lsn))
    }

    /// Begins a transaction that is, or was, prepared, in the outbox. Returns whether the reader
    /// does not get it.
    fn start_prepared(
        &mut self,
        txn: Transaction<'_>,
        preparation: Preparation,
        origin: &str,
    ) -> bool {
        let left_out = self.start_transaction(txn, origin);
        let is_sent = !left_out && !matches!(preparation, Preparation::Now);
        let version = is_sent.then(|| version::written_down(txn)).flatten();
        let gid = txn.name().map_or_else(String::new, name_outside);
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
}

impl Format for GirStream {
    fn is_text(&self) -> bool {
        self.delivery.is_text()
    }

    fn refuses_origin(&self, origin: ReplOriginId) -> bool {
        self.options.origin == OriginPolicy::Local && origin != no_origin()
    }

    fn record_read(&mut self, ctx: Context<'_>) {
        if let Some(replaced) = self.replaced.as_mut() {
            replaced.note(ctx);
        }
    }

    fn joined(&mut self) -> Option<&mut GirStream> {
        Some(self)
    }

    fn begin(&mut self, ctx: Context<'_>, txn: Transaction<'_>) {
        held::release_before(ctx, self, txn);
        self.absorb_invalidations();
        let origin = self.origins.get(txn.origin_id, &self.tools.scratch);
        self.skip = self.start_transaction(txn, &origin);
        self.tally.begin(Some(txn.final_lsn));
        if let Some(version) = version::of(ctx, txn) {
            self.outbox.transaction().commit_timestamp = version;
        }
    }

    fn prepares(&self) -> bool {
        self.options.two_phase
    }

    fn refuses_prepared(&self, xid: u32) -> bool {
        self.options.unprepared.contains(&xid)
    }

    fn begin_prepared(&mut self, ctx: Context<'_>, txn: Transaction<'_>, preparation: Preparation) {
        held::release_before(ctx, self, txn);
        self.absorb_invalidations();
        self.clear_change();
        let origin = self.origins.get(txn.origin_id, &self.tools.scratch);
        self.skip = self.start_prepared(txn, preparation, &origin);
        self.unsettled = matches!(preparation, Preparation::Now);
        self.tally.begin(None);
        if self.unsettled && !self.skip {
            self.ensure_header();
            or_raise(self.outbox.ensure_begun(txn.id()));
        }
    }

    fn prepared(&mut self, ctx: Context<'_>, txn: Transaction<'_>) {
        self.tally.prepare(txn.id());
        // The last change may have ended in an error that is none: its transaction was rolled back
        // meanwhile.
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
        ctx.update_progress(!sent);
    }

    fn segments_prepared(
        &mut self,
        ctx: Context<'_>,
        txn: Transaction<'_>,
        preparation: Preparation,
    ) {
        let origin = self.origins.get_outside(txn.origin_id, &self.tools.scratch);
        let left_out = self.start_prepared(txn, preparation, &origin);
        if !left_out && self.whole.is_none() {
            self.ensure_header();
        }
        self.tools.scratch.reset();
        let delivery = &mut *self.delivery;
        let sink = &mut Sink { ctx, delivery };
        let sent = match self.whole {
            _ if left_out => {
                let xid = txn.id();
                or_raise(self.outbox.abort(xid, xid, sink))
            }
            Some(end_lsn) => or_raise(self.outbox.commit_streamed(end_lsn, sink)),
            None => {
                or_raise(self.outbox.prepare_streamed(sink));
                true
            }
        };
        ctx.update_progress(!sent);
    }

    fn prepared_finished(
        &mut self,
        ctx: Context<'_>,
        txn: Transaction<'_>,
        rolled_back: Option<(u64, pg_sys::TimestampTz)>,
    ) {
        self.absorb_invalidations();
        if rolled_back.is_some() {
            self.tally.abort(txn.id(), txn.id());
        } else {
            self.tally.commit_parts(txn.id(), txn.final_lsn);
        }
        // A transaction that was sent whole a moment ago needs no end. PostgreSQL calls no begin
        // for a transaction without decoded changes.
        let sent_whole = self.whole.take() == Some(txn.end_lsn);
        let mut sent = false;
        if !sent_whole && !txn.base_snapshot.is_null() {
            let origin = self.origins.get_outside(txn.origin_id, &self.tools.scratch);
            let left_out = self.start_prepared(txn, Preparation::Now, &origin);
            if !left_out {
                self.ensure_header();
                if rolled_back.is_none()
                    && let Some(version) = version::written_down(txn)
                {
                    self.outbox.transaction().commit_timestamp = version;
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
        ctx.update_progress(!sent);
    }

    fn streams(&self) -> bool {
        self.options.streaming
    }

    fn segment_started(&mut self, ctx: Context<'_>, txn: Transaction<'_>) {
        held::release_before(ctx, self, txn);
        self.absorb_invalidations();
        self.clear_change();
        self.skip = false;
        self.tally.begin_segment(txn.id());
        self.outbox.start_segment(txn.id());
    }

    fn segment_stopped(&mut self, ctx: Context<'_>) {
        // The last change may have ended in an error that is none: its transaction was rolled back
        // meanwhile.
        self.clear_change();
        let delivery = &mut *self.delivery;
        or_raise(self.outbox.stop_segment(&mut Sink { ctx, delivery }));
    }

    fn segments_aborted(&mut self, ctx: Context<'_>, xid: u32, subxid: u32) {
        self.tally.abort(xid, subxid);
        let delivery = &mut *self.delivery;
        or_raise(self.outbox.abort(xid, subxid, &mut Sink { ctx, delivery }));
    }

    fn segments_committed(&mut self, ctx: Context<'_>, txn: Transaction<'_>) {
        self.tally.commit_parts(txn.id(), txn.final_lsn);
        let origin = self.origins.get_outside(txn.origin_id, &self.tools.scratch);
        let left_out = self.start_transaction(txn, &origin);
        if let Some(version) = version::written_down(txn) {
            self.outbox.transaction().commit_timestamp = version;
        }
        self.tools.scratch.reset();
        let delivery = &mut *self.delivery;
        let sink = &mut Sink { ctx, delivery };
        let sent = or_raise(if left_out {
            let xid = txn.id();
            self.outbox.abort(xid, xid, sink)
        } else {
            self.outbox.commit_streamed(txn.end_lsn, sink)
        });
        ctx.update_progress(!sent);
    }

    fn row_changed(&mut self, ctx: Context<'_>, _txn: Transaction<'_>, change: &Change<'_>) {
        let running = self.may_be_rolled_back();
        let Author { xid, origin } = change.author;
        self.tally.turn(xid, origin == no_origin());
        let mut put = || {
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

    fn truncated(&mut self, ctx: Context<'_>, _txn: Transaction<'_>, truncation: &Truncation<'_>) {
        let written = !self.leaves_out(truncation.author) && self.put_truncation(truncation);
        self.tools.scratch.reset();
        self.end_of_change(ctx, written);
    }

    fn message(
        &mut self,
        ctx: Context<'_>,
        _txn: Option<Transaction<'_>>,
        message: &LogicalMessage<'_>,
    ) {
        if !self.options.messages || (message.transactional && self.skip) {
            return;
        }
        let prefix = name_outside(message.prefix);
        let record = Message {
            transactional: message.transactional,
            lsn: message.lsn,
            prefix: &prefix,
            content: message.content,
        };
        self.ensure_header();
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

    fn commit(&mut self, ctx: Context<'_>, txn: Transaction<'_>) {
        self.tally.commit(txn.final_lsn);
        let delivery = &mut *self.delivery;
        let sent = or_raise(self.outbox.commit(txn.end_lsn, &mut Sink { ctx, delivery }));
        if sent {
            held::release_at_end(ctx, self, txn.end_lsn);
        }
        self.keep_schemas();
        // Keeps feedback and synchronous replication going over transactions of which nothing is
        // sent.
        ctx.update_progress(!sent);
    }

    fn leave(&mut self) {
        if let Some(session) = self.session.take() {
            session.leave();
        }
    }
}
