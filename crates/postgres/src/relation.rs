//! Open relations.

use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::NonNull;

use crate::owned::frees;
use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::compat;
use crate::encoding;
use crate::error::PgError;
use crate::lock::LockMode;
use crate::memory;
use crate::plain;
use crate::pointee;
use crate::slot::{Slot, Visible};
use crate::syscache::{self, ColumnOperators, oids};
use crate::tuple_desc::TupleDesc;

/// An open relation. It closes when dropped, and its lock stays until the transaction ends. If the
/// process unwinds, the rollback closes it.
#[derive(Debug)]
pub struct Relation(NonNull<pg_sys::RelationData>);

/// A column of an open relation that is not dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// The column's name, in UTF-8.
    pub name: String,
    /// The column's name, in the server's encoding.
    pub raw_name: CString,
    /// The column's values are computed from others.
    pub is_generated: bool,
}

impl Relation {
    /// Opens a relation and takes a lock. `None` if it does not exist. Run in a transaction.
    #[must_use]
    pub fn try_open(oid: pg_sys::Oid, mode: LockMode) -> Option<Self> {
        // The current transaction has a resource owner, which holds the reference and the lock.
        NonNull::new(plain::try_relation_open(oid, mode.as_raw())).map(Self)
    }

    /// Opens a relation that this transaction has locked, or locks it. If it does not exist,
    /// PostgreSQL raises an error.
    #[must_use]
    pub fn open(oid: pg_sys::Oid, mode: LockMode) -> Self {
        // The current transaction has a resource owner, which holds the reference and the lock.
        let relation = NonNull::new(plain::relation_open(oid, mode.as_raw()));
        Self(relation.unwrap_or_else(|| {
            PgError::new(SqlState::InternalError, "a relation was not opened").raise()
        }))
    }

    /// Closes it, and gives a lock of this mode back before the transaction ends.
    pub fn close(self, mode: LockMode) {
        let relation = std::mem::ManuallyDrop::new(self);
        // SAFETY: the value has opened it, and closes it once, as it is not dropped.
        unsafe { pg_sys::relation_close(relation.as_ptr(), mode.as_raw()) };
    }

    /// PostgreSQL's own pointer, valid as long as `self` is.
    #[must_use]
    pub fn as_ptr(&self) -> pg_sys::Relation {
        self.0.as_ptr()
    }

    /// The relation, for reading its description.
    #[inline]
    #[must_use]
    pub fn view(&self) -> RelationRef<'_> {
        // The relation is open as long as `self` is.
        RelationRef {
            raw: self.0,
            lives: PhantomData,
        }
    }

    /// OID of the relation.
    #[must_use]
    pub fn oid(&self) -> pg_sys::Oid {
        self.view().oid()
    }

    /// Name of the relation, in UTF-8.
    #[must_use]
    pub fn name(&self) -> String {
        self.view().name()
    }

    /// Name of the relation's schema, in UTF-8; `None` if it was dropped.
    #[must_use]
    pub fn namespace(&self) -> Option<String> {
        self.view().namespace()
    }

    /// Owner of the relation.
    #[must_use]
    pub fn owner(&self) -> pg_sys::Oid {
        self.view().owner()
    }

    /// Whether it is a partitioned table.
    #[must_use]
    pub fn is_partitioned(&self) -> bool {
        self.view().kind() == b'p'
    }

    /// The columns, without those that were dropped.
    #[must_use]
    pub fn columns(&self) -> Vec<Column> {
        let columns = self.view().descriptor().iter();
        columns
            .filter(|attribute| !attribute.is_dropped())
            .map(|attribute| Column {
                name: attribute.name(),
                raw_name: attribute.raw_name().to_owned(),
                is_generated: attribute.is_generated(),
            })
            .collect()
    }
}

/// The indexes of a relation, by their OIDs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Indexes {
    /// All of them.
    pub all: Vec<pg_sys::Oid>,
    /// The replica identity; invalid for none.
    pub identity: pg_sys::Oid,
    /// The primary key; invalid for none.
    pub primary: pg_sys::Oid,
}

/// A relation that somebody holds open for `'a`.
#[derive(Debug, Clone, Copy)]
pub struct RelationRef<'a> {
    raw: NonNull<pg_sys::RelationData>,
    lives: PhantomData<&'a Relation>,
}

impl<'a> RelationRef<'a> {
    /// A view of an open relation; `None` for a null pointer.
    ///
    /// # Safety
    /// The relation is open, and locked, for `'a`.
    #[inline]
    #[must_use]
    pub unsafe fn from_ptr(relation: pg_sys::Relation) -> Option<Self> {
        NonNull::new(relation).map(|raw| Self {
            raw,
            lives: PhantomData,
        })
    }

    /// PostgreSQL's own pointer, valid for `'a`.
    #[inline]
    #[must_use]
    pub fn as_ptr(self) -> pg_sys::Relation {
        self.raw.as_ptr()
    }

    #[inline]
    fn data(self) -> &'a pg_sys::RelationData {
        // SAFETY: the relation is open for `'a`. PostgreSQL changes it only in calls, during which
        // nobody holds the returned reference.
        unsafe { self.raw.as_ref() }
    }

    #[inline]
    fn form(self) -> &'a pg_sys::FormData_pg_class {
        pointee::class(self.data())
    }

    /// The shape of its rows.
    #[inline]
    #[must_use]
    pub fn descriptor(self) -> TupleDesc<'a> {
        pointee::shape(self.data())
    }

    /// The relation's OID.
    #[inline]
    #[must_use]
    pub fn oid(self) -> pg_sys::Oid {
        self.data().rd_id
    }

    /// The relation's name, in UTF-8.
    #[must_use]
    pub fn name(self) -> String {
        encoding::name(&self.form().relname)
    }

    /// The relation's name, in the server's encoding.
    #[must_use]
    pub fn raw_name(self) -> &'a CStr {
        encoding::raw_name(&self.form().relname)
    }

    /// OID of its schema.
    #[must_use]
    pub fn namespace_oid(self) -> pg_sys::Oid {
        self.form().relnamespace
    }

    /// Name of its schema, in UTF-8; `None` if that was dropped.
    #[must_use]
    pub fn namespace(self) -> Option<String> {
        syscache::namespace_name(self.namespace_oid()).map(|name| encoding::utf8(&name))
    }

    /// Schema and name, in UTF-8.
    #[must_use]
    pub fn qualified_name(self) -> (String, String) {
        (self.namespace().unwrap_or_default(), self.name())
    }

    /// The relation's owner.
    #[must_use]
    pub fn owner(self) -> pg_sys::Oid {
        self.form().relowner
    }

    /// `relkind` of pg_class.
    #[inline]
    #[must_use]
    pub fn kind(self) -> u8 {
        self.form().relkind.cast_unsigned()
    }

    /// `relpersistence` of pg_class.
    #[must_use]
    pub fn persistence(self) -> u8 {
        self.form().relpersistence.cast_unsigned()
    }

    /// `relreplident` of pg_class.
    #[must_use]
    pub fn replica_identity(self) -> u8 {
        self.form().relreplident.cast_unsigned()
    }

    /// Whether it is a partition.
    #[must_use]
    pub fn is_partition(self) -> bool {
        self.form().relispartition
    }

    /// Whether its rows are stored by the access method `heap`.
    #[inline]
    #[must_use]
    pub fn is_heap(self) -> bool {
        self.form().relam == pg_sys::HEAP_TABLE_AM_OID
    }

    /// Whether it has a table access method, so that rows can be looked at by their places.
    #[inline]
    #[must_use]
    pub fn has_storage(self) -> bool {
        !self.data().rd_tableam.is_null()
    }

    /// The composite type of its rows.
    #[must_use]
    pub fn row_type(self) -> pg_sys::Oid {
        self.form().reltype
    }

    /// The relation's row of pg_index, and the operators that compare its key columns; `None` if it
    /// is no index.
    #[must_use]
    pub fn index(self) -> Option<IndexRef<'a>> {
        let form = pointee::index(self.data())?;
        Some(IndexRef {
            relation: self,
            form,
        })
    }

    /// The expression of its CHECK constraint of this name, as it is stored (`pg_node_tree`).
    /// Evaluates nothing of it.
    #[must_use]
    pub fn check_constraint(self, name: &CStr) -> Option<CString> {
        // SAFETY: the descriptor's constraints are null or exist as long as the relation is open;
        // it has as many checks as it says, each with a name and an expression.
        unsafe {
            let constraints = (*self.descriptor().as_ptr()).constr.as_ref()?;
            let checks = (0..usize::from(constraints.num_check))
                .filter_map(|place| constraints.check.add(place).as_ref());
            let found = checks
                .filter(|check| !check.ccname.is_null() && !check.ccbin.is_null())
                .find(|check| CStr::from_ptr(check.ccname) == name)?;
            Some(CStr::from_ptr(found.ccbin).to_owned())
        }
    }

    /// Whether a user's table may be read under a historic snapshot:
    /// `RelationIsUsedAsCatalogTable` of src/include/utils/rel.h, 15 to 18.
    #[must_use]
    pub fn is_user_catalog(self) -> bool {
        if self.kind() != pg_sys::RELKIND_RELATION {
            return false;
        }
        // SAFETY: the options of a table are null or StdRdOptions, which exist as long as it is
        // open.
        let options = unsafe {
            self.data()
                .rd_options
                .cast::<pg_sys::StdRdOptions>()
                .as_ref()
        };
        options.is_some_and(|options| options.user_catalog_table)
    }

    /// Number of the file that it is in.
    #[must_use]
    pub fn file(self) -> u32 {
        compat::relation_file(self.data())
    }

    /// The relation's indexes. In a transaction.
    #[must_use]
    pub fn indexes(self) -> Indexes {
        // SAFETY: the relation is open. The list is a copy, and the function fills in which of them
        // are of a kind.
        let all = unsafe { oids(pg_sys::RelationGetIndexList(self.as_ptr())) };
        Indexes {
            all,
            identity: self.data().rd_replidindex,
            primary: self.data().rd_pkindex,
        }
    }

    /// Whether it is stored in this file.
    #[must_use]
    pub fn is_in_file(self, file: &compat::FileLocator) -> bool {
        compat::is_in_file(self.data(), file)
    }

    /// Whether it has triggers.
    #[must_use]
    pub fn has_triggers(self) -> bool {
        !self.data().trigdesc.is_null()
    }

    /// Deletes the row at a place, which no other session can change, if this transaction sees one
    /// at it. Returns whether it did. In a transaction.
    pub fn delete_at(self, mut place: pg_sys::ItemPointerData) -> bool {
        if !self.is_heap() || !self.with_slot(|slot| slot.fetch(self, place, Visible::ToItself)) {
            return false;
        }
        // SAFETY: the relation is an open heap, and there is a row at the place.
        unsafe { pg_sys::simple_heap_delete(self.as_ptr(), &raw mut place) };
        true
    }

    /// Runs `work` with a slot for rows of the relation. The slot is dropped behind it, and must
    /// not be kept. In a transaction.
    pub fn with_slot<T>(self, work: impl FnOnce(&Slot) -> T) -> T {
        // SAFETY: dropped in this function, while the memory context that is current now exists.
        let slot = unsafe { Slot::of(self) };
        let done = work(&slot);
        if slot.is_shared() {
            PgError::new(SqlState::InternalError, "a slot is kept").raise();
        }
        done
    }

    /// How many blocks it has.
    #[must_use]
    pub fn blocks(self) -> pg_sys::BlockNumber {
        let fork = pg_sys::ForkNumber::MAIN_FORKNUM;
        if !self.has_storage() {
            return 0;
        }
        // SAFETY: the relation is open, and has storage.
        unsafe { pg_sys::RelationGetNumberOfBlocksInFork(self.as_ptr(), fork) }
    }
}

/// Declares PostgreSQL's answers about an open relation.
macro_rules! facts {
    ($($(#[doc = $doc:literal])* $vis:vis fn $name:ident() -> $type:ty = $function:path;)*) => {
        impl RelationRef<'_> {$(
            $(#[doc = $doc])*
            #[must_use]
            $vis fn $name(self) -> $type {
                // SAFETY: the relation is open.
                unsafe { $function(self.as_ptr()) }
            }
        )*}
    };
}

facts! {
    /// Whether changes of it can be published.
    pub fn is_publishable() -> bool = pg_sys::is_publishable_relation;
    /// The index that is its replica identity, or its primary key if that is so by default.
    /// Invalid if it has none. In a transaction.
    pub fn replica_index() -> pg_sys::Oid = pg_sys::RelationGetReplicaIndex;
    /// The index of its primary key; invalid if it has none. In a transaction.
    pub fn primary_key_index() -> pg_sys::Oid = compat::primary_key_index;
    /// The kind of slots that its access method puts rows into.
    pub(crate) fn slot_kind() -> *const pg_sys::TupleTableSlotOps = pg_sys::table_slot_callbacks;
}

/// An open index.
#[derive(Debug, Clone, Copy)]
pub struct IndexRef<'a> {
    relation: RelationRef<'a>,
    form: &'a pg_sys::FormData_pg_index,
}

impl<'a> IndexRef<'a> {
    /// The index's OID.
    #[must_use]
    pub fn oid(self) -> pg_sys::Oid {
        self.relation.oid()
    }

    /// Whether it is a B-tree.
    #[must_use]
    pub fn is_btree(self) -> bool {
        self.relation.form().relam == pg_sys::BTREE_AM_OID
    }

    /// Whether it is a hash index.
    #[must_use]
    pub fn is_hash(self) -> bool {
        self.relation.form().relam == pg_sys::HASH_AM_OID
    }

    /// PostgreSQL's own pointer, valid for `'a`.
    #[must_use]
    pub fn as_ptr(self) -> pg_sys::Relation {
        self.relation.as_ptr()
    }

    /// Whether the index covers only some rows, or has expressions. Evaluates none of them, as
    /// `RelationGetIndexExpressions` and `RelationGetIndexPredicate` would: they fold constants,
    /// with whatever function the owner of the index has used.
    #[must_use]
    pub fn has_conditions_or_expressions(self) -> bool {
        let columns = [
            pg_sys::Anum_pg_index_indexprs,
            pg_sys::Anum_pg_index_indpred,
        ];
        // SAFETY: an open index has its row of pg_index, whose columns have these numbers.
        columns.into_iter().any(|column| unsafe {
            let row = (*self.as_ptr()).rd_indextuple;
            !pg_sys::heap_attisnull(row, column.cast_signed(), std::ptr::null_mut())
        })
    }

    /// How many of its columns are the key.
    #[must_use]
    pub fn key_length(self) -> usize {
        usize::try_from(self.form.indnkeyatts).unwrap_or(0)
    }

    /// Numbers of its key columns in the table, 0 for an expression.
    #[must_use]
    pub fn key_columns(self) -> &'a [i16] {
        pointee::key_columns(self.form)
    }

    /// Operators that compare the key column at a position, from 0.
    #[must_use]
    pub fn operator(self, position: usize) -> Option<ColumnOperators> {
        if position >= self.key_length() {
            return None;
        }
        let index = self.relation.data();
        // SAFETY: an open index has as many of each as key columns.
        unsafe {
            Some(ColumnOperators {
                family: *index.rd_opfamily.add(position),
                input: *index.rd_opcintype.add(position),
                collation: *index.rd_indcollation.add(position),
            })
        }
    }

    /// Operators that compare its key columns.
    pub fn operators(self) -> impl Iterator<Item = ColumnOperators> + 'a {
        (0..self.key_length()).filter_map(move |position| self.operator(position))
    }
}

impl Deref for IndexRef<'_> {
    type Target = pg_sys::FormData_pg_index;

    fn deref(&self) -> &Self::Target {
        self.form
    }
}

/// A relation that decoding looks at, without a lock: WAL is decoded under the catalogs of its
/// time. It is closed when dropped. If the process unwinds, the rollback closes it.
#[derive(Debug)]
pub struct Described(NonNull<pg_sys::RelationData>);

impl Described {
    /// Finds a relation by its OID; `None` if there is none. In a transaction.
    #[must_use]
    pub fn find(oid: pg_sys::Oid) -> Option<Self> {
        // The current transaction has a resource owner, which holds the reference.
        NonNull::new(plain::RelationIdGetRelation(oid)).map(Self)
    }

    /// The relation, for reading its description.
    #[inline]
    #[must_use]
    pub fn view(&self) -> RelationRef<'_> {
        // The relation is held until `self` is dropped.
        RelationRef {
            raw: self.0,
            lives: PhantomData,
        }
    }
}

frees! {
    Described: |value| pg_sys::RelationClose(value.0.as_ptr());
}

frees! {
    Relation: |value| pg_sys::relation_close(value.as_ptr(), LockMode::None.as_raw());
}

/// Empties tables, which are locked against everybody, as TRUNCATE does. In a transaction.
/// `restart_identity` has their sequences start anew, and `as_owner` has triggers run as each
/// table's owner, where PostgreSQL can.
pub fn truncate(tables: &[&Relation], restart_identity: bool, as_owner: bool) {
    memory::in_top_transaction(|| {
        let none = std::ptr::null_mut();
        let (mut relations, mut all, mut logged) = (none, none, none);
        // SAFETY: the relations are open. The lists live as long as the transaction.
        unsafe {
            for table in tables {
                relations = pg_sys::lappend(relations, table.as_ptr().cast());
                all = pg_sys::lappend_oid(all, table.oid());
                if table.view().persistence() == b'p' {
                    logged = pg_sys::lappend_oid(logged, table.oid());
                }
            }
            compat::execute_truncate(relations, all, logged, restart_identity, as_owner);
        }
    });
}

/// Has every process read a relation's description again, once the current transaction has
/// committed.
pub fn invalidate(oid: u32) {
    plain::CacheInvalidateRelcacheByRelid(pg_sys::Oid::from(oid));
}

/// Has this process call `handler` whenever a relation may have another description than before,
/// from now on: the relation, or invalid for all of them.
pub fn on_invalidation(handler: fn(pg_sys::Oid)) {
    let address = (handler as *const ()).expose_provenance();
    // SAFETY: the callback belongs to this library, which is never unloaded; it takes the address
    // of a `fn(Oid)`.
    unsafe {
        pg_sys::CacheRegisterRelcacheCallback(Some(at_invalidation), pg_sys::Datum::from(address));
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_invalidation(handler: pg_sys::Datum, relation: pg_sys::Oid) {
    let address = std::ptr::with_exposed_provenance::<()>(handler.value());
    // SAFETY: `on_invalidation` has registered the address of a `fn(Oid)`.
    let handler = unsafe { std::mem::transmute::<*const (), fn(pg_sys::Oid)>(address) };
    handler(relation);
}
