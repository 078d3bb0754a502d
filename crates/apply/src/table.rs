//! A table that is open for applying: its executor state, its indexes, the look-up by key. Run by the appliers.
//!
//! To set one up costs as much as to write a row. So the state of an ordinary table outlives the transaction, suspended: it
//! then holds no lock, no reference and no buffer, only memory. It is taken up again under new locks if no invalidation
//! came in between: the relation cache frees or changes an entry only with one, so until then its pointers are good.
//!
//! A table is ordinary ([`OpenTable::is_plain`]) when nothing but its columns, NOT NULL and plain indexes have a say in a
//! write: no trigger that fires here, no CHECK, no generated column or default, no partition bound, no expression. What
//! those prepare may refer to the transaction that they were prepared in; such a table is set up for each transaction.

use braid_postgres::compat;
use braid_postgres::error::PgError;
use braid_postgres::ffi::raw;
use braid_postgres::heap_page::{self, Place};
use pgrx::pg_sys;

use super::constraint::Unchecked;
use super::lookup::{Found, IndexLookup, Purpose, Refine};
use super::partition::Router;
use super::relation::LocalRelation;
use super::scan::{self, Likeness};

/// A table, open for writing.
#[derive(Debug)]
pub struct OpenTable {
    pub(super) relation: pg_sys::Relation,
    /// Everything of it that PostgreSQL allocates.
    context: pg_sys::MemoryContext,
    pub(super) estate: *mut pg_sys::EState,
    pub(super) target: *mut pg_sys::ResultRelInfo,
    pub(super) epq: Box<pg_sys::EPQState>,
    /// The row to be written.
    pub(super) new_slot: *mut pg_sys::TupleTableSlot,
    /// The row that is there.
    pub(super) local_slot: *mut pg_sys::TupleTableSlot,
    pub(super) lookup: Option<IndexLookup>,
    pub(super) has_triggers: bool,
    /// One of its constraints may be deferred.
    pub(super) deferrable: bool,
    /// Rows of this transaction that met others under one.
    pub(super) unchecked: Vec<Unchecked>,
    /// The index in which each of the rows was met that were last found in the way.
    pub(super) met: Vec<(*mut pg_sys::TupleTableSlot, pg_sys::Oid)>,
    plain: bool,
    suspended: bool,
    /// Whether updates, and deletes, may be published from here as far as the replica identity goes.
    pub(super) checked: [bool; 2],
    /// The rights (ACL_INSERT and so on) that the user whom this process works as was seen to have in this transaction.
    pub(super) granted: u32,
    router: Option<Router>,
    /// While rows are inserted in bulk; of this transaction.
    pub(super) bulk_state: Option<*mut pg_sys::BulkInsertStateData>,
    /// Chunks of rows whose range of keys is not to be looked at as a whole.
    pub(super) unprobed: u32,
    /// Default expressions of columns that the stream lacks: (column from 0, prepared expression).
    pub(super) defaults: Option<Vec<(usize, *mut pg_sys::ExprState)>>,
    /// Values of such columns, by position, of the row that the change in hand inserts, where they are known already; in the memory of that change.
    pub(super) given: Option<Vec<(usize, Option<pg_sys::Datum>)>>,
}

/// Values for a row's columns: `None` leaves a column as it is (or to its default), `Some(None)` is null.
pub type RowValues = Vec<Option<Option<pg_sys::Datum>>>;

fn lock_mode(mode: u32) -> i32 {
    i32::try_from(mode).unwrap_or(3)
}

/// The mode in which a table that is written, and its indexes, are locked.
pub fn write_lock() -> i32 {
    lock_mode(pg_sys::RowExclusiveLock)
}

/// `TriggerEnabled` of src/backend/commands/trigger.c, 15 to 18, for session_replication_role = replica.
unsafe fn fires(trigger: &pg_sys::Trigger) -> bool {
    matches!(trigger.tgenabled.cast_unsigned(), b'R' | b'A')
}

/// Whether only columns, NOT NULL and plain indexes have a say in a write.
///
/// # Safety
/// `target` is that of the open `relation`, its indexes opened.
unsafe fn is_plain(
    relation: pg_sys::Relation,
    target: *mut pg_sys::ResultRelInfo,
    local: &LocalRelation,
) -> bool {
    // SAFETY: the relation is open, so its form, descriptor, constraints, triggers and indexes are there.
    unsafe {
        let form = &*(*relation).rd_rel;
        if form.relkind.cast_unsigned() != b'r'
            || form.relispartition
            || form.relam != pg_sys::HEAP_TABLE_AM_OID
            || !local.defaults.is_empty()
        {
            return false;
        }
        let descriptor = (*relation).rd_att;
        let natts = usize::try_from((*descriptor).natts).unwrap_or(0);
        let generated =
            (0..natts).any(|index| (*compat::TupleDescAttr(descriptor, index)).attgenerated != 0);
        let constraints = (*descriptor).constr;
        if generated || (!constraints.is_null() && (*constraints).num_check > 0) {
            return false;
        }
        let triggers = (*target).ri_TrigDesc;
        if !triggers.is_null() {
            let count = usize::try_from((*triggers).numtriggers).unwrap_or(0);
            if (0..count).any(|index| fires(&*(*triggers).triggers.add(index))) {
                return false;
            }
        }
        let indexes = usize::try_from((*target).ri_NumIndices).unwrap_or(0);
        (0..indexes).all(|position| {
            let index = *(*target).ri_IndexRelationDescs.add(position);
            let info = *(*target).ri_IndexRelationInfo.add(position);
            let method = (*(*index).rd_rel).relam;
            (method == pg_sys::BTREE_AM_OID || method == pg_sys::HASH_AM_OID)
                && (*info).ii_Expressions.is_null()
                && (*info).ii_Predicate.is_null()
                && (*info).ii_ExclusionOps.is_null()
                && (!(*info).ii_Unique || (*(*index).rd_index).indimmediate)
        })
    }
}

impl OpenTable {
    /// Prepare an open table for writing, and open its indexes.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    ///
    /// # Safety
    /// `relation` is open with RowExclusiveLock in this transaction. Before that ends, the table is suspended or closed; when
    /// it is rolled back, the table is discarded.
    pub unsafe fn open(relation: pg_sys::Relation, local: &LocalRelation) -> Result<Self, PgError> {
        // SAFETY: everything is opened in this transaction and closed in `suspend` or `close`, or by the transaction's abort.
        unsafe {
            let context = super::memory_context(c"braid table");
            let before = pg_sys::MemoryContextSwitchTo(context);
            let estate = pg_sys::CreateExecutorState();
            pg_sys::MemoryContextSwitchTo((*estate).es_query_cxt);
            let entry = make_node::<pg_sys::RangeTblEntry>(pg_sys::NodeTag::T_RangeTblEntry);
            (*entry).rtekind = pg_sys::RTEKind::RTE_RELATION;
            (*entry).relid = local.oid;
            (*entry).relkind = (*(*relation).rd_rel).relkind;
            (*entry).rellockmode = lock_mode(pg_sys::AccessShareLock);
            // A conflict function gives whole rows.
            let whole = if local.rules.asks() { local.width } else { 0 };
            let sent = local.columns.iter().map(|column| column.local);
            let attributes = (0..whole)
                .chain(sent)
                .filter_map(|place| i32::try_from(place + 1).ok());
            compat::init_range_table(estate, entry, attributes);
            let target = make_node::<pg_sys::ResultRelInfo>(pg_sys::NodeTag::T_ResultRelInfo);
            pg_sys::InitResultRelInfo(target, relation, 1, std::ptr::null_mut(), 0);
            // Where AFTER triggers look for it; they would open the table once more, for good.
            (*estate).es_opened_result_relations =
                pg_sys::lappend(std::ptr::null_mut(), target.cast());
            (*estate).es_output_cid = pg_sys::GetCurrentCommandId(true);
            // Where triggers look for it, instead of opening the table once more, which nobody would close.
            (*estate).es_opened_result_relations =
                pg_sys::lappend((*estate).es_opened_result_relations, target.cast());
            pg_sys::ExecOpenIndices(target, false);
            // A descriptor of our own: slots would hold a reference to the relation's, which has to end with the transaction.
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
            // A partitioned index has nothing to scan; rows are looked for in their partitions.
            let key = local.key.as_ref().filter(|_| !local.partitioned);
            let lookup = key.and_then(|key| {
                let count = usize::try_from((*target).ri_NumIndices).unwrap_or(0);
                (0..count)
                    .map(|position| *(*target).ri_IndexRelationDescs.add(position))
                    .find(|index| (**index).rd_id == key.index)
                    .map(|index| IndexLookup::new(relation, index, key))
            });
            if (*estate).es_per_tuple_exprcontext.is_null() {
                pg_sys::MakePerTupleExprContext(estate);
            }
            let has_triggers = !(*target).ri_TrigDesc.is_null();
            pg_sys::MemoryContextSwitchTo(before);
            Ok(Self {
                deferrable: Self::has_deferrable(target),
                unchecked: Vec::new(),
                met: Vec::new(),
                plain: is_plain(relation, target, local),
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

    /// Whether only columns, NOT NULL and plain indexes have a say in a write.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether rows can collide under the key that finds them only.
    #[must_use]
    pub fn has_one_key(&self) -> bool {
        // SAFETY: to be called while it is open.
        let unique = unsafe {
            (0..usize::try_from((*self.target).ri_NumIndices).unwrap_or(0))
                .filter(|position| (**(*self.target).ri_IndexRelationInfo.add(*position)).ii_Unique)
                .count()
        };
        unique == 1 && self.lookup.is_some()
    }

    /// The index by which rows are found.
    #[must_use]
    pub(super) fn key_index(&self) -> Option<pg_sys::Relation> {
        // SAFETY: to be called while it is open, and so is its scan.
        let index = |lookup: &IndexLookup| unsafe { (*lookup.scan()).indexRelation };
        self.lookup.as_ref().map(index)
    }

    /// Whether it was suspended and not resumed.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// Let go of everything that must not outlive the transaction. Only a plain table can be resumed.
    pub fn suspend(&mut self) {
        self.granted = 0;
        self.end_bulk();
        let (relation, target) = (self.relation, self.target);
        let (new_slot, local_slot) = (self.new_slot, self.local_slot);
        let scan = self.lookup.as_mut().map(|lookup| {
            lookup.end_transaction();
            lookup.restart()
        });
        // SAFETY: the references were taken in `open` or `resume` by this transaction: one for the table, one for each index, one
        // more for the index that is scanned. Locks stay until commit.
        unsafe {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                for slot in [new_slot, local_slot] {
                    if let Some(clear) = (*(*slot).tts_ops).clear {
                        clear(slot);
                    }
                }
                if let Some((scan, keys, count)) = scan {
                    // Lets go of pages. The keys' values may be gone; nobody looks at them before they are given anew.
                    raw::index_rescan(scan, keys, count, std::ptr::null_mut(), 0);
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

    /// Take the locks for a suspended table. Whether the table may then be resumed is the caller's to find out: invalidations
    /// are processed by this.
    ///
    /// # Safety
    /// In a transaction. No invalidation has come since it was suspended, as far as is known: the index's OIDs are read.
    pub unsafe fn lock(table: pg_sys::Oid, indexes: &[pg_sys::Oid]) {
        let mode = write_lock();
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

    /// The same, without waiting for anybody. False where somebody would have to be waited for.
    ///
    /// # Safety
    /// As [`OpenTable::lock`].
    pub(super) unsafe fn lock_if_free(table: pg_sys::Oid, indexes: &[pg_sys::Oid]) -> bool {
        let mode = write_lock();
        // SAFETY: as above.
        unsafe {
            pg_sys::ConditionalLockRelationOid(table, mode)
                && indexes
                    .iter()
                    .all(|index| pg_sys::ConditionalLockRelationOid(*index, mode))
        }
    }

    /// OIDs of its indexes.
    #[must_use]
    pub fn index_oids(&self) -> Vec<pg_sys::Oid> {
        // SAFETY: to be called while it is open.
        unsafe {
            (0..usize::try_from((*self.target).ri_NumIndices).unwrap_or(0))
                .map(|position| (**(*self.target).ri_IndexRelationDescs.add(position)).rd_id)
                .collect()
        }
    }

    /// Take a suspended table up again.
    ///
    /// # Safety
    /// In a transaction that holds the locks of [`OpenTable::lock`]; no invalidation has come since it was set up.
    pub unsafe fn resume(&mut self) {
        let (relation, target) = (self.relation, self.target);
        let scan = self.lookup.as_ref().map(IndexLookup::scan);
        // SAFETY: without an invalidation the cache has kept the entries; the counterparts of `suspend`.
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

    /// Close an open table. To be called before the transaction commits.
    pub fn close(mut self) {
        self.end_bulk();
        if let Some(lookup) = self.lookup.take() {
            lookup.end();
        }
        if let Some(router) = self.router.take() {
            router.end();
        }
        // SAFETY: the counterparts of `open`, in the order of PostgreSQL's own apply worker. The lock stays until commit.
        unsafe {
            pg_sys::EvalPlanQualEnd(&raw mut *self.epq);
            pg_sys::ExecCloseIndices(self.target);
            pg_sys::ExecResetTupleTable((*self.estate).es_tupleTable, false);
            pg_sys::FreeExecutorState(self.estate);
            pg_sys::relation_close(self.relation, lock_mode(pg_sys::NoLock));
            pg_sys::MemoryContextDelete(self.context);
        }
    }

    /// Free the memory of a suspended table, or of one whose transaction was rolled back and took everything else.
    pub fn discard(self) {
        // SAFETY: nothing refers to it any more.
        unsafe { pg_sys::MemoryContextDelete(self.context) };
    }

    /// The open relation.
    #[must_use]
    pub fn relation(&self) -> pg_sys::Relation {
        self.relation
    }

    /// The slot with the row that [`OpenTable::find`] found.
    #[must_use]
    pub fn local_slot(&self) -> *mut pg_sys::TupleTableSlot {
        self.local_slot
    }

    /// The slot with the row that is written.
    #[must_use]
    pub fn new_slot(&self) -> *mut pg_sys::TupleTableSlot {
        self.new_slot
    }

    /// Value of a column, from 0, of the row that was found; `None` for null.
    #[must_use]
    pub fn local_value(&self, column: usize) -> Option<pg_sys::Datum> {
        // SAFETY: the slot holds a row; the arrays are filled up to `natts` below, and `column` is checked.
        unsafe {
            let natts = (*(*self.local_slot).tts_tupleDescriptor).natts;
            if column >= usize::try_from(natts).unwrap_or(0) {
                return None;
            }
            if i32::from((*self.local_slot).tts_nvalid) < natts {
                pg_sys::slot_getsomeattrs_int(self.local_slot, natts);
            }
            let is_null = *(*self.local_slot).tts_isnull.add(column);
            (!is_null).then(|| *(*self.local_slot).tts_values.add(column))
        }
    }

    /// Whether rows are found by an index.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.lookup.is_some()
    }

    /// Find the row with this key for a purpose, and lock it unless that is not wanted: then it may change until it is written, which
    /// [`OpenTable::update`] and [`OpenTable::delete`] notice.
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
        let slot = self.local_slot;
        match self.lookup.as_mut() {
            Some(lookup) => lookup.find(values, key, slot, how, refine),
            None => Ok(Found::Missing(None)),
        }
    }

    /// Look where the row with this key is, so that it is found sooner when it is wanted. False where that is known.
    pub(super) fn look_ahead(
        &mut self,
        values: &RowValues,
        key: &super::relation::Key,
        purpose: Purpose,
    ) -> bool {
        let slot = self.local_slot;
        self.lookup
            .as_mut()
            .is_some_and(|lookup| lookup.look_ahead(values, key, slot, purpose))
    }

    /// Whether the version of a row that is in this slot, which this transaction has locked, is the row still.
    pub(super) fn is_there(&self, slot: *mut pg_sys::TupleTableSlot) -> bool {
        let relation = self.relation;
        // SAFETY: the table is open, and both slots are of it; its access method's function is called behind pgrx's guard.
        unsafe {
            let mut tid = (*slot).tts_tid;
            let tid = &raw mut tid;
            let callbacks = pg_sys::table_slot_callbacks(relation);
            let other = pg_sys::MakeSingleTupleTableSlot((*relation).rd_att, callbacks);
            let there = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                let fetch = (*(*relation).rd_tableam).tuple_fetch_row_version;
                fetch.is_some_and(|fetch| {
                    fetch(relation, tid, &raw mut pg_sys::SnapshotSelfData, other)
                })
            });
            pg_sys::ExecDropSingleTupleTableSlot(other);
            there
        }
    }

    /// Where the row in the local slot is.
    #[must_use]
    pub fn found_at(&self) -> Place {
        // SAFETY: the slot is valid as long as the table is open.
        heap_page::place_of(unsafe { (*self.local_slot).tts_tid })
    }

    /// Find and lock a row that has these very values, but none of those at `passed_over`; else one
    /// that equals them, by scans of the whole table.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn find_by_scan(
        &mut self,
        values: &RowValues,
        passed_over: &[Place],
    ) -> Result<Found, PgError> {
        // SAFETY: the local slot is of the table's own kind.
        let find = |likeness| unsafe {
            scan::find_like(
                self.relation,
                self.local_slot,
                values,
                passed_over,
                likeness,
            )
        };
        let mut found = find(Likeness::Identical)?;
        if found.is_none() && passed_over.is_empty() {
            found = find(Likeness::Equal)?;
        }
        Ok(found.map_or(Found::Missing(None), Found::Row))
    }

    /// The partition below this table that a row with these values belongs to.
    pub fn partition_for(&mut self, values: &RowValues) -> pg_sys::Oid {
        // SAFETY: the slot is this table's.
        unsafe { self.fill(self.new_slot, values) };
        self.partition()
    }

    /// The partition below this table that the row in the new slot belongs to.
    pub(super) fn partition(&mut self) -> pg_sys::Oid {
        // SAFETY: the slot is this table's, and holds a row; routing ends before the executor state does.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo((*self.estate).es_query_cxt);
            let router = self
                .router
                .get_or_insert_with(|| Router::new(self.estate, self.target, self.relation));
            let oid = router.find(self.estate, self.new_slot);
            pg_sys::MemoryContextSwitchTo(before);
            // The value of a key that is an expression.
            let context = (*self.estate).es_per_tuple_exprcontext;
            pg_sys::MemoryContextReset((*context).ecxt_per_tuple_memory);
            oid
        }
    }

    /// Put values into a virtual slot; what is not given is null.
    ///
    /// # Safety
    /// `slot` is a virtual slot of this table's shape.
    pub(super) unsafe fn fill(&self, slot: *mut pg_sys::TupleTableSlot, values: &RowValues) {
        // SAFETY: the arrays have as many places as the table has columns, and `values` has no more.
        unsafe {
            super::clear_slot(slot);
            let natts = usize::try_from((*(*slot).tts_tupleDescriptor).natts).unwrap_or(0);
            for position in 0..natts {
                let value = values.get(position).copied().flatten().flatten();
                *(*slot).tts_values.add(position) = value.unwrap_or_else(pg_sys::Datum::null);
                *(*slot).tts_isnull.add(position) = value.is_none();
            }
            super::store_virtual(slot);
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
