//! A table that is open for applying: its executor state, its indexes, the look-up by key. Run by
//! the appliers.
//!
//! Setting a table up costs as much as writing a row. So the state of a plain table outlives the
//! transaction, suspended: it then holds no lock, no reference and no buffer, only memory. It is
//! resumed under new locks if no invalidation has come since. The relation cache frees or changes
//! an entry only with an invalidation, so until then its pointers are valid.
//!
//! A table is plain ([`OpenTable::is_plain`]) if a write depends only on its columns, NOT NULL and
//! plain indexes. It has no trigger that fires here, no CHECK, no generated column or default, no
//! partition bound, no expression. The prepared state of those may refer to the transaction in
//! which it was prepared. So other tables are set up for each transaction.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::compat;
use braid_postgres::error::PgError;
use braid_postgres::ffi::raw;
use braid_postgres::heap_page::{self, Place};
use braid_postgres::lock::LockMode;
use braid_postgres::memory::Scratch;
use braid_postgres::relation::RelationRef;
use braid_postgres::slot::{Slot, Visible};
use braid_postgres::target::TargetIndex;
use braid_postgres::tuple_desc::Attribute;
use braid_postgres::value::Value;
use pgrx::pg_sys;

use super::constraint::Unchecked;
use super::lookup::{Found, IndexLookup, Purpose, Refine};
use super::partition::Router;
use super::relation::LocalRelation;
use super::scan::{self, Likeness};
use super::slot::slot_of;
use super::user::AsOwner;

/// A table, open for writing.
#[derive(Debug)]
pub struct OpenTable {
    pub(super) relation: pg_sys::Relation,
    /// Memory of all that PostgreSQL allocates for it.
    context: Scratch,
    pub(super) estate: *mut pg_sys::EState,
    pub(super) target: *mut pg_sys::ResultRelInfo,
    pub(super) epq: Box<pg_sys::EPQState>,
    /// Slot for the row to be written.
    pub(super) new_slot: Slot,
    /// Slot for the row that was found.
    pub(super) local_slot: Slot,
    pub(super) lookup: Option<IndexLookup>,
    pub(super) has_triggers: bool,
    /// Whether one of its constraints is deferrable.
    pub(super) deferrable: bool,
    /// Rows of this transaction that conflicted with others under one.
    pub(super) unchecked: Vec<Unchecked>,
    /// Blocking rows that the last look-up found, each with the index in which it was found.
    pub(super) met: Vec<(*mut pg_sys::TupleTableSlot, pg_sys::Oid)>,
    plain: bool,
    suspended: bool,
    /// Whether its replica identity lets updates, and deletes, be published from this node.
    pub(super) checked: [bool; 2],
    /// Rights (ACL_INSERT and so on) that the user whom this process works as was found to have in
    /// this transaction.
    pub(super) granted: u32,
    router: Option<Router>,
    /// State of bulk inserts in this transaction.
    pub(super) bulk_state: Option<*mut pg_sys::BulkInsertStateData>,
    /// Number of chunks of rows whose range of keys is not looked up as a whole.
    pub(super) unprobed: u32,
    /// Default expressions of columns that the stream lacks: (column from 0, prepared expression).
    pub(super) defaults: Option<Vec<(usize, *mut pg_sys::ExprState)>>,
    /// Known values of such columns, by position, for the row that the current change inserts; in
    /// the memory of that change.
    pub(super) given: Option<Vec<(usize, Option<pg_sys::Datum>)>>,
}

/// Values for a row's columns: `None` leaves a column unchanged (or at its default), `Some(None)`
/// is null.
pub type RowValues = Vec<Option<Option<pg_sys::Datum>>>;

/// The mode in which a table that is written, and its indexes, are locked.
pub fn write_lock() -> LockMode {
    LockMode::RowExclusive
}

/// Whether a trigger fires for replicated changes: `TriggerEnabled` of
/// src/backend/commands/trigger.c, 15 to 18, for session_replication_role = replica.
///
/// # Safety
/// `target` is that of an open table.
unsafe fn has_firing_trigger(target: *mut pg_sys::ResultRelInfo) -> bool {
    // SAFETY: as the caller says; there are as many triggers as are said.
    unsafe {
        let Some(all) = (*target).ri_TrigDesc.cast_const().as_ref() else {
            return false;
        };
        let count = usize::try_from(all.numtriggers).unwrap_or(0);
        (0..count).any(|place| {
            let trigger = &*all.triggers.add(place);
            matches!(trigger.tgenabled.cast_unsigned(), b'R' | b'A')
        })
    }
}

/// Whether a write depends only on columns, NOT NULL and plain indexes, if no trigger fires.
fn is_plain(relation: RelationRef<'_>, indexes: &[TargetIndex<'_>], local: &LocalRelation) -> bool {
    let shape = relation.descriptor();
    relation.kind() == b'r'
        && !relation.is_partition()
        && relation.is_heap()
        && local.defaults.is_empty()
        && !shape.has_checks()
        && !shape.iter().any(Attribute::is_generated)
        && indexes.iter().all(|index| index.is_plain())
}

impl OpenTable {
    /// Prepares a relation for writing, and opens its indexes. PostgreSQL then evaluates constants
    /// in the indexes' expressions, so this is done as the table's owner.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    ///
    /// # Safety
    /// The relation is open with RowExclusiveLock in this transaction. Before that ends, the table
    /// is suspended or closed; when it is rolled back, the table is discarded.
    pub unsafe fn open(as_owner: &AsOwner<'_>, local: &LocalRelation) -> Result<Self, PgError> {
        let relation = as_owner.relation().as_ptr();
        // SAFETY: everything is opened in this transaction and closed in `suspend` or `close`, or
        // by the transaction's abort.
        unsafe {
            let context = Scratch::new(c"braid table");
            let before = pg_sys::CurrentMemoryContext;
            context.context().enter();
            let estate = pg_sys::CreateExecutorState();
            pg_sys::MemoryContextSwitchTo((*estate).es_query_cxt);
            let entry = make_node::<pg_sys::RangeTblEntry>(pg_sys::NodeTag::T_RangeTblEntry);
            (*entry).rtekind = pg_sys::RTEKind::RTE_RELATION;
            (*entry).relid = local.oid;
            (*entry).relkind = (*(*relation).rd_rel).relkind;
            (*entry).rellockmode = LockMode::AccessShare.as_raw();
            // A conflict function gives whole rows.
            let whole = if local.rules.asks() { local.width } else { 0 };
            let sent = local.columns.iter().map(|column| column.local);
            let attributes = (0..whole)
                .chain(sent)
                .filter_map(|place| i32::try_from(place + 1).ok());
            compat::init_range_table(estate, entry, attributes);
            let target = make_node::<pg_sys::ResultRelInfo>(pg_sys::NodeTag::T_ResultRelInfo);
            pg_sys::InitResultRelInfo(target, relation, 1, std::ptr::null_mut(), 0);
            (*estate).es_output_cid = pg_sys::GetCurrentCommandId(true);
            // Triggers look the relation up there. Otherwise they would open the table again, and
            // nothing would close it.
            (*estate).es_opened_result_relations =
                pg_sys::lappend(std::ptr::null_mut(), target.cast());
            pg_sys::ExecOpenIndices(target, false);
            // A descriptor of our own: slots would hold a reference to the relation's descriptor,
            // which must end with the transaction.
            let descriptor = pg_sys::CreateTupleDescCopyConstr((*relation).rd_att);
            let new_slot = pg_sys::ExecInitExtraTupleSlot(
                estate,
                descriptor,
                &raw const pg_sys::TTSOpsVirtual,
            );
            let local_slot = pg_sys::ExecInitExtraTupleSlot(
                estate,
                descriptor,
                pg_sys::table_slot_callbacks(relation),
            );
            let mut epq: Box<pg_sys::EPQState> = Box::default();
            compat::eval_plan_qual_init(&raw mut *epq, estate);
            epq.origslot = new_slot;
            // A partitioned index can't be scanned; rows are looked up in the partitions.
            let key = local.key.as_ref().filter(|_| !local.partitioned);
            let indexes = TargetIndex::all(target);
            let lookup = key.and_then(|key| {
                let index = indexes.iter().find(|one| one.index().oid() == key.index)?;
                Some(IndexLookup::of_key(relation, index.index().as_ptr(), key))
            });
            if (*estate).es_per_tuple_exprcontext.is_null() {
                pg_sys::MakePerTupleExprContext(estate);
            }
            let has_triggers = !(*target).ri_TrigDesc.is_null();
            pg_sys::MemoryContextSwitchTo(before);
            let slots = (Slot::borrowed(new_slot), Slot::borrowed(local_slot));
            let (Some(new_slot), Some(local_slot)) = slots else {
                return Err(PgError::new(
                    SqlState::InternalError,
                    "a table has no slots for rows",
                ));
            };
            let deferrable = indexes
                .iter()
                .any(|index| index.is_constraint() && !index.is_immediate());
            let view = RelationRef::from_ptr(relation);
            let plain = view.is_some_and(|relation| is_plain(relation, &indexes, local))
                && !has_firing_trigger(target);
            Ok(Self {
                deferrable,
                unchecked: Vec::new(),
                met: Vec::new(),
                plain,
                suspended: false,
                checked: [false; 2],
                granted: 0,
                relation,
                context,
                estate,
                target,
                epq,
                new_slot,
                local_slot,
                lookup,
                has_triggers,
                router: None,
                bulk_state: None,
                unprobed: 0,
                defaults: None,
                given: None,
            })
        }
    }

    /// Whether a write depends only on columns, NOT NULL and plain indexes.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether rows can only conflict under the key by which they are found.
    #[must_use]
    pub fn has_one_key(&self) -> bool {
        let indexes = self.indexes().into_iter();
        indexes.filter(|index| index.is_unique()).count() == 1
            && self.lookup.as_ref().is_some_and(IndexLookup::has_whole_key)
    }

    /// Returns the table's indexes. Called while the table is open.
    pub(super) fn indexes(&self) -> Vec<TargetIndex<'_>> {
        // Those of a suspended table are not locked.
        let _ = self.relation();
        // SAFETY: `open` has opened them, and they stay open as long as the table.
        unsafe { TargetIndex::all(self.target) }
    }

    /// Returns the index by which rows are found.
    #[must_use]
    pub(super) fn key_index(&self) -> Option<pg_sys::Relation> {
        self.lookup.as_ref().map(IndexLookup::index)
    }

    /// Whether the table is suspended.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// Releases everything that must not outlive the transaction. Only a plain table can be
    /// resumed.
    pub fn suspend(&mut self) {
        self.granted = 0;
        self.end_bulk();
        let (relation, target) = (self.relation, self.target);
        let (new_slot, local_slot) = (self.new_slot.as_ptr(), self.local_slot.as_ptr());
        let scan = self.lookup.as_mut().map(|lookup| {
            lookup.end_transaction();
            lookup.restart()
        });
        // SAFETY: the references were taken in `open` or `resume` by this transaction: one for the
        // table, one for each index, one more for the index that is scanned. Locks stay until
        // commit.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                for slot in [new_slot, local_slot] {
                    if let Some(clear) = (*(*slot).tts_ops).clear {
                        clear(slot);
                    }
                }
                if let Some((scan, keys, count)) = scan {
                    // The keys' values may be freed; new ones are set before they are used.
                    compat::rescan_without_pages(scan, keys, count);
                    raw::RelationDecrementReferenceCount((*scan).indexRelation);
                }
                for position in 0..usize::try_from((*target).ri_NumIndices).unwrap_or(0) {
                    let index = *(*target).ri_IndexRelationDescs.add(position);
                    raw::RelationDecrementReferenceCount(index);
                }
                raw::RelationDecrementReferenceCount(relation);
            });
        }
        self.suspended = true;
    }

    /// Locks a suspended table. The locks process invalidations, so the caller then checks whether
    /// it may be resumed. In a transaction.
    pub fn lock(table: pg_sys::Oid, indexes: &[pg_sys::Oid]) {
        let mode = write_lock().as_raw();
        // SAFETY: locks by OID; nothing has to exist.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                raw::LockRelationOid(table, mode);
                for index in indexes {
                    raw::LockRelationOid(*index, mode);
                }
            });
        }
    }

    /// As [`OpenTable::lock`], without waiting. Returns false if another session would have to be
    /// waited for.
    pub(super) fn lock_if_free(table: pg_sys::Oid, indexes: &[pg_sys::Oid]) -> bool {
        let mode = write_lock();
        let mut all = std::iter::once(&table).chain(indexes);
        all.all(|relation| mode.try_on_relation(*relation))
    }

    /// Returns the OIDs of the table's indexes.
    #[must_use]
    pub fn index_oids(&self) -> Vec<pg_sys::Oid> {
        let indexes = self.indexes().into_iter();
        indexes.map(|index| index.index().oid()).collect()
    }

    /// Resumes a suspended table.
    ///
    /// # Safety
    /// In a transaction that holds the locks of [`OpenTable::lock`]; no invalidation has come since
    /// it was set up.
    pub unsafe fn resume(&mut self) {
        let (relation, target) = (self.relation, self.target);
        let scan = self.lookup.as_ref().map(IndexLookup::scan);
        // SAFETY: without an invalidation the cache has kept the entries; the counterparts of
        // `suspend`.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                raw::RelationIncrementReferenceCount(relation);
                for position in 0..usize::try_from((*target).ri_NumIndices).unwrap_or(0) {
                    let index = *(*target).ri_IndexRelationDescs.add(position);
                    raw::RelationIncrementReferenceCount(index);
                }
                if let Some(scan) = scan {
                    raw::RelationIncrementReferenceCount((*scan).indexRelation);
                }
            });
        }
        self.suspended = false;
    }

    /// Closes an open table. Called before the transaction commits.
    pub fn close(mut self) {
        self.end_bulk();
        if let Some(lookup) = self.lookup.take() {
            lookup.end();
        }
        if let Some(router) = self.router.take() {
            router.end();
        }
        // A slot that is still referenced keeps the memory.
        let is_held = self.new_slot.is_shared() || self.local_slot.is_shared();
        // SAFETY: the counterparts of `open`, in the order of PostgreSQL's own apply worker. The
        // lock stays until commit.
        unsafe {
            self.new_slot.clear();
            self.local_slot.clear();
            pg_sys::EvalPlanQualEnd(&raw mut *self.epq);
            pg_sys::ExecCloseIndices(self.target);
            pg_sys::ExecResetTupleTable((*self.estate).es_tupleTable, false);
            if !is_held {
                pg_sys::FreeExecutorState(self.estate);
            }
            pg_sys::relation_close(self.relation, LockMode::None.as_raw());
        }
        self.let_go(is_held);
    }

    /// Frees the memory, unless a slot is still referenced.
    fn let_go(self, is_held: bool) {
        if is_held {
            std::mem::forget(self.context);
        }
    }

    /// Frees the memory of a suspended table, or of one whose transaction was rolled back and has
    /// freed everything else.
    pub fn discard(self) {
        // A slot that is still referenced keeps the memory.
        let is_held = self.new_slot.is_shared() || self.local_slot.is_shared();
        self.let_go(is_held);
    }

    /// Returns the relation. Called while the table is open.
    #[must_use]
    pub fn relation(&self) -> RelationRef<'_> {
        if self.suspended {
            PgError::new(SqlState::InternalError, "a suspended table is used").raise();
        }
        // SAFETY: `open` was given a relation, which this value holds open as it is not suspended.
        unsafe { RelationRef::from_ptr(self.relation).unwrap_unchecked() }
    }

    /// Returns the slot with the row that [`OpenTable::find`] found.
    #[must_use]
    pub fn local_slot(&self) -> Slot {
        self.local_slot.clone()
    }

    /// Returns the slot with the row that is written.
    #[must_use]
    pub fn new_slot(&self) -> Slot {
        self.new_slot.clone()
    }

    /// Returns the value of a column, from 0, of the row that was found; `None` for null.
    #[must_use]
    pub fn local_value(&self, column: usize) -> Option<pg_sys::Datum> {
        self.local_slot.value(column)
    }

    /// Whether rows are found by an index.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.lookup.is_some()
    }

    /// Finds the row with this key for a purpose, and locks it if that is asked for. A row that is
    /// not locked may change until it is written; [`OpenTable::update`] and [`OpenTable::delete`]
    /// notice that.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn find(
        &mut self,
        values: &RowValues,
        key: &super::relation::Key,
        how: (Purpose, bool),
        refine: Refine<'_>,
    ) -> Result<Found, PgError> {
        let slot = &self.local_slot;
        match self.lookup.as_mut() {
            Some(lookup) => lookup.find(values, key, slot, how, refine),
            None => Ok(Found::Missing(None)),
        }
    }

    /// Looks up the place of the row with this key, so that it is found faster later. Returns false
    /// if the place is known.
    pub(super) fn look_ahead(
        &mut self,
        values: &RowValues,
        key: &super::relation::Key,
        purpose: Purpose,
    ) -> bool {
        let slot = &self.local_slot;
        self.lookup
            .as_mut()
            .is_some_and(|lookup| lookup.look_ahead(values, key, slot, purpose))
    }

    /// Returns a new slot for a row of the table, in the memory of the current change.
    pub(super) fn make_slot(&self) -> Slot {
        slot_of(self.relation())
    }

    /// Whether the row version in this slot, which this transaction has locked, is still the
    /// latest.
    pub(super) fn is_there(&self, slot: &Slot) -> bool {
        self.make_slot()
            .fetch(self.relation(), slot.tid(), Visible::ToItself)
    }

    /// Returns the place of the row in the local slot.
    #[must_use]
    pub fn found_at(&self) -> Place {
        heap_page::place_of(self.local_slot.tid())
    }

    /// Finds and locks a row that has these very values, other than those at `passed_over`; if
    /// there is none, one that is equal to them. Scans the whole table.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn find_by_scan(
        &mut self,
        values: &RowValues,
        passed_over: &[Place],
    ) -> Result<Found, PgError> {
        let (relation, slot) = (self.relation(), &self.local_slot);
        let cells: Vec<_> = (0..values.len())
            .map(|column| self.cell(values, column))
            .collect();
        let find = |likeness| scan::find_like(relation, slot, &cells, passed_over, likeness);
        let mut found = find(Likeness::Identical)?;
        if found.is_none() && passed_over.is_empty() {
            found = find(Likeness::Equal)?;
        }
        Ok(found.map_or(Found::Missing(None), Found::Row))
    }

    /// Returns the partition below this table that a row with these values belongs to.
    pub fn partition_for(&mut self, values: &RowValues) -> pg_sys::Oid {
        self.fill(&self.new_slot, values);
        self.partition()
    }

    /// Returns the partition below this table that the row in the new slot belongs to.
    pub(super) fn partition(&mut self) -> pg_sys::Oid {
        let (estate, target, relation) = (self.estate, self.target, self.relation);
        // SAFETY: the executor state, the target and the relation belong together, and are there
        // until the router ends.
        let new = || unsafe { Router::new(estate, target, relation) };
        self.router.get_or_insert_with(new).find(&self.new_slot)
    }

    /// Returns the value in a column of this table, from 0, among values for a row of it. Returns
    /// `None` if it is not given, `Some(None)` for null.
    #[inline]
    pub(super) fn cell<'v>(
        &self,
        values: &'v RowValues,
        column: usize,
    ) -> Option<Option<Value<'v>>> {
        let given = (*values.get(column)?)?;
        let Some(value) = given else {
            return Some(None);
        };
        let attribute = self.relation().descriptor().get(column)?;
        // SAFETY: values for a row of this table, as its plan's decoders made them or its slots had
        // them, have one of the column there. They are in memory that is there as long as they are
        // used.
        Some(Some(unsafe { Value::new(attribute, value) }))
    }

    /// Puts values into a virtual slot; missing ones are null.
    pub(super) fn fill(&self, slot: &Slot, values: &RowValues) {
        self.fill_with(slot, values, |_| None);
    }

    /// Puts values into a virtual slot; missing ones are what `otherwise` returns for the column.
    #[inline]
    pub(super) fn fill_with(
        &self,
        slot: &Slot,
        values: &RowValues,
        otherwise: impl Fn(usize) -> Option<pg_sys::Datum>,
    ) {
        // SAFETY: a virtual slot of this table's shape. The values are the table's, in the memory
        // of the current change, of rows that are held back, or of the row in the local slot, which
        // stays there until this one is written.
        unsafe {
            slot.fill(|column| {
                let given = values.get(column).copied().flatten();
                given.unwrap_or_else(|| otherwise(column))
            });
        }
    }
}

/// PostgreSQL's makeNode.
///
/// # Safety
/// `tag` is the tag of `T`, a node type that starts with it and for which zeros are a valid start.
pub unsafe fn make_node<T>(tag: pg_sys::NodeTag) -> *mut T {
    // SAFETY: fresh zeroed memory of T's size, which starts with a NodeTag.
    unsafe {
        let node = pg_sys::palloc0(size_of::<T>());
        node.cast::<pg_sys::NodeTag>().write(tag);
        node.cast()
    }
}
