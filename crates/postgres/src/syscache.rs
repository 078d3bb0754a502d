//! Look-ups in PostgreSQL's caches of its catalogs: rows of catalogs, types, partitions.
//!
//! All of this runs in a transaction; while WAL is decoded, the catalogs are those of the change.
//! An object that is gone is no error, unless a function says so.

use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::NonNull;

use pgrx::pg_sys;

use crate::encoding;
use crate::lock::LockMode;
use crate::pointee;
use crate::relation::Described;
use crate::{compat, ffi, plain};

/// The fixed part of a catalog's rows, which a cache finds by their OIDs.
pub trait CatalogForm: form::Sealed {}

mod form {
    use pgrx::pg_sys;

    use crate::compat;

    /// Implemented for the forms below only: each belongs to its cache.
    pub trait Sealed {
        const CACHE: i32;
    }

    impl Sealed for pg_sys::FormData_pg_class {
        const CACHE: i32 = compat::cache_number(pg_sys::SysCacheIdentifier::RELOID);
    }

    impl Sealed for pg_sys::FormData_pg_proc {
        const CACHE: i32 = compat::cache_number(pg_sys::SysCacheIdentifier::PROCOID);
    }

    impl Sealed for pg_sys::FormData_pg_type {
        const CACHE: i32 = compat::cache_number(pg_sys::SysCacheIdentifier::TYPEOID);
    }

    impl Sealed for pg_sys::FormData_pg_index {
        const CACHE: i32 = compat::cache_number(pg_sys::SysCacheIdentifier::INDEXRELID);
    }

    impl Sealed for pg_sys::FormData_pg_opclass {
        const CACHE: i32 = compat::cache_number(pg_sys::SysCacheIdentifier::CLAOID);
    }

    impl Sealed for pg_sys::FormData_pg_collation {
        const CACHE: i32 = compat::cache_number(pg_sys::SysCacheIdentifier::COLLOID);
    }

    impl Sealed for pg_sys::FormData_pg_constraint {
        const CACHE: i32 = compat::cache_number(pg_sys::SysCacheIdentifier::CONSTROID);
    }

    /// By the relation's OID and the attribute's number.
    impl Sealed for pg_sys::FormData_pg_attribute {
        const CACHE: i32 = compat::cache_number(pg_sys::SysCacheIdentifier::ATTNUM);
    }
}

impl CatalogForm for pg_sys::FormData_pg_class {}
impl CatalogForm for pg_sys::FormData_pg_proc {}
impl CatalogForm for pg_sys::FormData_pg_type {}
impl CatalogForm for pg_sys::FormData_pg_index {}
impl CatalogForm for pg_sys::FormData_pg_opclass {}
impl CatalogForm for pg_sys::FormData_pg_collation {}
impl CatalogForm for pg_sys::FormData_pg_constraint {}

/// The forms above, but for that of pg_attribute, whose cache takes two keys.
pub trait FoundByOid: CatalogForm {}

impl FoundByOid for pg_sys::FormData_pg_class {}
impl FoundByOid for pg_sys::FormData_pg_proc {}
impl FoundByOid for pg_sys::FormData_pg_type {}
impl FoundByOid for pg_sys::FormData_pg_index {}
impl FoundByOid for pg_sys::FormData_pg_opclass {}
impl FoundByOid for pg_sys::FormData_pg_collation {}
impl FoundByOid for pg_sys::FormData_pg_constraint {}
impl CatalogForm for pg_sys::FormData_pg_attribute {}

/// A row of a catalog, held in the cache until this is dropped. If the process unwinds, the
/// rollback lets go of it.
#[derive(Debug)]
pub struct CatalogRow<T: CatalogForm> {
    tuple: NonNull<pg_sys::HeapTupleData>,
    form: PhantomData<T>,
}

/// A row of pg_class.
pub type ClassRow = CatalogRow<pg_sys::FormData_pg_class>;
/// A row of pg_proc.
pub type FunctionRow = CatalogRow<pg_sys::FormData_pg_proc>;
/// A row of pg_type.
pub type TypeRow = CatalogRow<pg_sys::FormData_pg_type>;
/// A row of pg_opclass.
pub type OperatorClassRow = CatalogRow<pg_sys::FormData_pg_opclass>;
/// A row of pg_collation.
pub type CollationRow = CatalogRow<pg_sys::FormData_pg_collation>;
/// A row of pg_constraint.
pub type ConstraintRow = CatalogRow<pg_sys::FormData_pg_constraint>;
/// A row of pg_attribute.
pub type AttributeRow = CatalogRow<pg_sys::FormData_pg_attribute>;
/// A row of pg_index.
pub type IndexRow = CatalogRow<pg_sys::FormData_pg_index>;

impl<T: FoundByOid> CatalogRow<T> {
    /// Finds a row by its OID, or that of its index.
    #[must_use]
    pub fn find(oid: pg_sys::Oid) -> Option<Self> {
        Self::search(oid.into(), pg_sys::Datum::null())
    }
}

impl AttributeRow {
    /// Finds a relation's column by its number.
    #[must_use]
    pub fn find(relation: pg_sys::Oid, number: i16) -> Option<Self> {
        Self::search(relation.into(), number.into())
    }
}

impl<T: CatalogForm> CatalogRow<T> {
    /// Finds a row by the keys of its cache, of which there are one or two.
    fn search(first: pg_sys::Datum, second: pg_sys::Datum) -> Option<Self> {
        let none = pg_sys::Datum::null();
        // SAFETY: the caches of these forms exist. Their keys are OIDs and numbers, so any word is
        // one; a cache of one key does not look at the second.
        let tuple = unsafe { pg_sys::SearchSysCache(T::CACHE, first, second, none, none) };
        Some(Self {
            tuple: NonNull::new(tuple)?,
            form: PhantomData,
        })
    }

    fn tuple(&self) -> &pg_sys::HeapTupleData {
        // SAFETY: the cache holds the tuple until this is dropped.
        unsafe { self.tuple.as_ref() }
    }

    /// The transaction that wrote the row; `None` if that is long ago.
    #[must_use]
    pub fn writer(&self) -> Option<pg_sys::TransactionId> {
        let frozen = pg_sys::HEAP_XMIN_COMMITTED | pg_sys::HEAP_XMIN_INVALID;
        let header = pointee::header(self.tuple())?;
        let (writer, mask) = (pointee::writer(header), header.t_infomask);
        let is_normal = writer.into_inner() >= pg_sys::FirstNormalTransactionId.into_inner();
        (is_normal && u32::from(mask) & frozen != frozen).then_some(writer)
    }
}

impl<T: CatalogForm> Deref for CatalogRow<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the cache holds the tuple until this is dropped, and its rows have this form.
        unsafe { &*pg_sys::GETSTRUCT(self.tuple.as_ptr()).cast::<T>() }
    }
}

impl<T: CatalogForm> Drop for CatalogRow<T> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: found by `find`, and released once.
            unsafe { pg_sys::ReleaseSysCache(self.tuple.as_ptr()) };
        }
    }
}

impl FunctionRow {
    /// Types of its arguments.
    #[must_use]
    pub fn arguments(&self) -> &[pg_sys::Oid] {
        pointee::arguments(self)
    }
}

impl TypeRow {
    /// The type's name, in the server's encoding.
    #[must_use]
    pub fn raw_name(&self) -> &CStr {
        encoding::raw_name(&self.typname)
    }
}

impl ConstraintRow {
    /// The tree of a CHECK constraint's expression, as PostgreSQL writes trees down; `None` for
    /// another constraint.
    #[must_use]
    pub fn expression(&self) -> Option<CString> {
        let cache = <pg_sys::FormData_pg_constraint as form::Sealed>::CACHE;
        let column = i16::try_from(pg_sys::Anum_pg_constraint_conbin).ok()?;
        let mut is_null = true;
        // SAFETY: the cache holds the tuple until this is dropped. The column is a text, whose copy
        // ends with a zero byte.
        unsafe {
            let tuple = self.tuple.as_ptr();
            let value = pg_sys::SysCacheGetAttr(cache, tuple, column, &raw mut is_null);
            if is_null {
                return None;
            }
            let text = pg_sys::text_to_cstring(value.cast_mut_ptr());
            let copy = CStr::from_ptr(text).to_owned();
            pg_sys::pfree(text.cast());
            Some(copy)
        }
    }
}

impl IndexRow {
    /// Numbers of its key columns in the table, 0 for an expression.
    #[must_use]
    pub fn key_columns(&self) -> &[i16] {
        pointee::key_columns(self)
    }
}

/// Operators that compare the columns of an index.
#[derive(Debug, Clone)]
pub struct IndexOperators(Vec<ColumnOperators>);

/// Operators that compare a key column of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnOperators {
    /// The column's operator family.
    pub family: pg_sys::Oid,
    /// The input type of its operator class.
    pub input: pg_sys::Oid,
    /// The column's collation; invalid for none.
    pub collation: pg_sys::Oid,
}

impl IndexOperators {
    /// The operators of an index, by its OID; `None` if it is gone.
    #[must_use]
    pub fn of(index: pg_sys::Oid) -> Option<Self> {
        let relation = Described::find(index)?;
        Some(Self(relation.view().index()?.operators().collect()))
    }

    /// The operators of the key column at a position, from 0.
    #[must_use]
    pub fn get(&self, position: usize) -> Option<ColumnOperators> {
        self.0.get(position).copied()
    }
}

/// OIDs of a list, which is freed.
///
/// # Safety
/// `list` is null or a list of OIDs, and nobody uses it any more.
pub(crate) unsafe fn oids(list: *mut pg_sys::List) -> Vec<pg_sys::Oid> {
    // SAFETY: the caller says so.
    unsafe {
        let cells = list.cast_const().as_ref().map_or(&[][..], |list| {
            let length = usize::try_from(list.length).unwrap_or(0);
            std::slice::from_raw_parts(list.elements, length)
        });
        let found = cells.iter().map(|cell| cell.oid_value).collect();
        pg_sys::list_free(list);
        found
    }
}

/// Declares look-ups that give a new list of OIDs.
macro_rules! lists {
    ($($(#[doc = $doc:literal])* fn $name:ident($($argument:ident: $type:ty),*) = $call:expr;)*) => {$(
        $(#[doc = $doc])*
        #[must_use]
        pub fn $name($($argument: $type),*) -> Vec<pg_sys::Oid> {
            // SAFETY: a look-up by OID in a transaction. The list is a new one, of OIDs.
            unsafe { oids($call) }
        }
    )*};
}

lists! {
    /// The partitioned tables that a relation is a partition of, its parent first.
    fn ancestors(relation: pg_sys::Oid) = ffi::get_partition_ancestors(relation);

    /// A table and all that inherit from it, at any level, locked in this mode.
    fn with_inheritors(table: pg_sys::Oid, mode: LockMode) =
        ffi::find_all_inheritors(table, mode.as_raw(), std::ptr::null_mut());

    /// The publications that name a table.
    fn publications_of_table(table: pg_sys::Oid) = compat::relation_publications(table);

    /// The publications for all tables that leave a table out.
    fn publications_without(table: pg_sys::Oid) = compat::excluding_publications(table);

    /// The publications that name the schema of a table. A dropped relation has no schema, so no
    /// publication names it.
    fn publications_of_schema(table: pg_sys::Oid) =
        pg_sys::GetSchemaPublications(plain::get_rel_namespace(table));
}

/// A relation, and the partitioned tables that it is a partition of.
#[must_use]
pub fn with_ancestors(relation: pg_sys::Oid) -> Vec<pg_sys::Oid> {
    let mut all = vec![relation];
    if is_partition(relation) {
        all.extend(ancestors(relation));
    }
    all
}

/// `relkind` of a relation; 0 if it is gone.
#[must_use]
pub fn relation_kind(relation: pg_sys::Oid) -> u8 {
    plain::get_rel_relkind(relation).cast_unsigned()
}

/// Whether a relation is a partition.
#[must_use]
pub fn is_partition(relation: pg_sys::Oid) -> bool {
    plain::get_rel_relispartition(relation)
}

/// Declares look-ups of a name by an OID.
macro_rules! names {
    ($($(#[doc = $doc:literal])* fn $name:ident = $symbol:ident;)*) => {$(
        $(#[doc = $doc])*
        #[must_use]
        pub fn $name(oid: pg_sys::Oid) -> Option<CString> {
            plain::$symbol(oid)
        }
    )*};
}

names! {
    /// The name of a schema, in the server's encoding; `None` if it is gone.
    fn namespace_name = get_namespace_name;
    /// The name of a relation, in the server's encoding; `None` if it is gone.
    fn raw_relation_name = get_rel_name;
    /// The name of a collation, in the server's encoding; `None` if it is gone.
    fn collation_name = get_collation_name;
    /// The name of a database, in the server's encoding; `None` if it is gone.
    fn database_name = get_database_name;
    /// Schema, name and argument types of a function, in the server's encoding.
    fn function_signature = format_procedure_qualified;
}

/// OID of a schema by its name in the server's encoding.
#[must_use]
pub fn namespace(name: &CStr) -> Option<pg_sys::Oid> {
    let oid = plain::get_namespace_oid(name, true);
    (oid != pg_sys::InvalidOid).then_some(oid)
}

/// OID of a relation by its name, in the server's encoding, and its schema.
#[must_use]
pub fn relation_named(name: &CStr, namespace: pg_sys::Oid) -> Option<pg_sys::Oid> {
    let oid = plain::get_relname_relid(name, namespace);
    (oid != pg_sys::InvalidOid).then_some(oid)
}

/// Number of a column by its name in the server's encoding; 0 if there is none.
#[must_use]
pub fn column_number(relation: pg_sys::Oid, name: &CStr) -> i16 {
    // SAFETY: a look-up by a name that ends with a zero byte.
    unsafe { pg_sys::get_attnum(relation, name.as_ptr()) }
}

/// A name in UTF-8; empty for none.
#[must_use]
pub fn utf8_or_empty(name: Option<CString>) -> String {
    name.as_deref().map_or_else(String::new, encoding::utf8)
}

/// Schema and name of a relation, in UTF-8; empty if it is gone.
#[must_use]
pub fn relation_name(relation: pg_sys::Oid) -> (String, String) {
    let schema = namespace_name(plain::get_rel_namespace(relation));
    (
        utf8_or_empty(schema),
        utf8_or_empty(raw_relation_name(relation)),
    )
}

/// `typtype` of a type; 0 if it is gone.
#[must_use]
pub fn type_kind(of: pg_sys::Oid) -> u8 {
    plain::get_typtype(of).cast_unsigned()
}

/// The type that a domain is over; any other type itself. A type that is gone is an error.
#[must_use]
pub fn base_type(of: pg_sys::Oid) -> pg_sys::Oid {
    plain::getBaseType(of)
}

/// The type of an array's elements; `None` if it is no array.
#[must_use]
pub fn element_type(of: pg_sys::Oid) -> Option<pg_sys::Oid> {
    let element = plain::get_element_type(of);
    (element != pg_sys::InvalidOid).then_some(element)
}

/// The length of a type's values, and whether they are passed by value.
#[must_use]
pub fn length_of(of: pg_sys::Oid) -> (i16, bool) {
    plain::get_typlenbyval(of)
}

/// Whether equal strings under a collation have the same bytes.
#[must_use]
pub fn is_deterministic(collation: pg_sys::Oid) -> bool {
    collation == pg_sys::InvalidOid || plain::get_collation_isdeterministic(collation)
}

/// The function of the equality operator of a btree operator family for an input type; invalid if
/// there is none.
#[must_use]
pub fn equality_operator(family: pg_sys::Oid, input: pg_sys::Oid) -> pg_sys::Oid {
    let strategy = i16::try_from(pg_sys::BTEqualStrategyNumber).unwrap_or(3);
    plain::get_opfamily_member(family, input, input, strategy)
}

/// The base type of a domain, with the modifier that the domain gives it; another type is itself.
#[must_use]
pub fn base_type_and_modifier(of: pg_sys::Oid, mut modifier: i32) -> (pg_sys::Oid, i32) {
    // SAFETY: a look-up by OID, which changes the modifier in place.
    let base = unsafe { pg_sys::getBaseTypeAndTypmod(of, &raw mut modifier) };
    (base, modifier)
}

/// A type as SQL writes it, in the server's encoding.
#[must_use]
pub fn format_type(of: pg_sys::Oid, modifier: i32) -> CString {
    plain::format_type_with_typemod(of, modifier).unwrap_or_default()
}

/// The value by which an invalidation names a row of a catalog, of a cache of rows by their OIDs.
#[must_use]
pub fn type_hash(of: pg_sys::Oid) -> u32 {
    let cache = compat::cache_number(pg_sys::SysCacheIdentifier::TYPEOID);
    let none = pg_sys::Datum::null();
    // SAFETY: the cache takes one key, an OID.
    unsafe { pg_sys::GetSysCacheHashValue(cache, of.into(), none, none, none) }
}

/// The function behind an operator; invalid if it is gone.
#[must_use]
pub fn function_of(operator: pg_sys::Oid) -> pg_sys::Oid {
    plain::get_opcode(operator)
}

/// Has this process call `handler` whenever rows of a cache may have changed, from now on: the hash
/// of their keys, or 0 for all of them.
pub fn on_change(cache: pg_sys::SysCacheIdentifier::Type, handler: fn(u32)) {
    let address = (handler as *const ()).expose_provenance();
    // SAFETY: the callback belongs to this library, which is never unloaded; it takes the address
    // of a `fn(u32)`.
    unsafe {
        pg_sys::CacheRegisterSyscacheCallback(
            compat::cache_number(cache),
            Some(at_change),
            pg_sys::Datum::from(address),
        );
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_change(handler: pg_sys::Datum, _cache: i32, hash: u32) {
    let address = std::ptr::with_exposed_provenance::<()>(handler.value());
    // SAFETY: `on_change` has registered the address of a `fn(u32)`.
    let handler = unsafe { std::mem::transmute::<*const (), fn(u32)>(address) };
    handler(hash);
}
