//! Types in PostgreSQL's type cache: their operator families, and functions that compare and hash
//! their values. Run by processes that compare or hash values, in a transaction.
//!
//! Not for: the equality of values between nodes.

use std::cmp::Ordering;
use std::ptr::NonNull;

use pgrx::pg_sys;

use crate::table_scan::low;
use crate::value::Value;

/// A type in the cache. Entries live as long as the process, and so does the memory of their
/// functions.
#[derive(Debug, Clone, Copy)]
pub struct CachedType(NonNull<pg_sys::TypeCacheEntry>);

/// A function of a type's that the cache may have.
#[derive(Debug, Clone, Copy)]
enum Function {
    Comparison,
    Equality,
    Hash,
}

impl CachedType {
    /// Finds a type, and has the cache look up the fields of the flags: `TYPECACHE_EQ_OPR` and so
    /// on of src/include/utils/typcache.h. A dropped type is an error.
    #[must_use]
    pub fn find(of: pg_sys::Oid, flags: u32) -> Self {
        // SAFETY: a look-up by OID, which never gives null.
        Self(unsafe { NonNull::new_unchecked(pg_sys::lookup_type_cache(of, flags.cast_signed())) })
    }

    fn get(&self) -> &pg_sys::TypeCacheEntry {
        // SAFETY: entries live as long as the process. PostgreSQL changes one only in look-ups,
        // during which nobody holds this.
        unsafe { self.0.as_ref() }
    }

    /// The type's equality operator; invalid if it has none, or was not looked up.
    #[must_use]
    pub fn equality(self) -> pg_sys::Oid {
        self.get().eq_opr
    }

    /// The type's default B-tree operator family; invalid if it has none, or was not looked up.
    #[must_use]
    pub fn btree_family(self) -> pg_sys::Oid {
        self.get().btree_opf
    }

    /// The type's extended hash function; invalid if it has none, or was not looked up.
    #[must_use]
    pub fn hash_function(self) -> pg_sys::Oid {
        self.get().hash_extended_proc
    }

    /// Whether it has a comparison, which was looked up.
    #[must_use]
    pub fn has_comparison(self) -> bool {
        self.get().cmp_proc_finfo.fn_oid != pg_sys::InvalidOid
    }

    /// Compares two values of the type; `None` if its comparison was not found, or not looked up.
    #[must_use]
    pub fn compare(
        self,
        collation: pg_sys::Oid,
        one: Value<'_>,
        other: Value<'_>,
    ) -> Option<Ordering> {
        let order = self.call(Function::Comparison, collation, one, Some(other))?;
        Some(low(order).cast_signed().cmp(&0))
    }

    /// Whether two values of the type are equal; `None` if its equality was not found, or not
    /// looked up.
    #[must_use]
    pub fn equals(self, collation: pg_sys::Oid, one: Value<'_>, other: Value<'_>) -> Option<bool> {
        let is_equal = self.call(Function::Equality, collation, one, Some(other))?;
        Some(is_equal.value() & 0xFF != 0)
    }

    /// The extended hash of a value of the type, with seed 0, which makes it the plain hash; `None`
    /// if its hash function was not found, or not looked up.
    #[must_use]
    pub fn hash(self, collation: pg_sys::Oid, value: Value<'_>) -> Option<u64> {
        let hash = self.call(Function::Hash, collation, value, None)?;
        Some(hash.value() as u64)
    }

    /// Calls a function with a value of the type and another one, or the number 0. Returns `None`
    /// if the function does not exist, or a value is of another type.
    fn call(
        self,
        function: Function,
        collation: pg_sys::Oid,
        one: Value<'_>,
        other: Option<Value<'_>>,
    ) -> Option<pg_sys::Datum> {
        let of = self.get().type_id;
        if one.type_id() != of || other.is_some_and(|other| other.type_id() != of) {
            return None;
        }
        let entry = self.0.as_ptr();
        let other = other.map_or(pg_sys::Datum::from(0_i64), Value::datum);
        // SAFETY: the entry lives as long as the process, and nobody holds a reference to it. The
        // comparison and the equality take two values of the type, and the hash function one and a
        // seed. The cache does not set a function without its OID.
        unsafe {
            let function = match function {
                Function::Comparison => &raw mut (*entry).cmp_proc_finfo,
                Function::Equality => &raw mut (*entry).eq_opr_finfo,
                Function::Hash => &raw mut (*entry).hash_extended_proc_finfo,
            };
            if (*function).fn_oid == pg_sys::InvalidOid {
                return None;
            }
            Some(pg_sys::FunctionCall2Coll(
                function,
                collation,
                one.datum(),
                other,
            ))
        }
    }
}
