//! Equality of values of a key's column, and the type's own hash for it. Run by all processes that
//! hash rows.

use braid_postgres::bytewise::Bytewise;
use braid_postgres::syscache::{self, ColumnOperators};
use braid_postgres::type_cache::CachedType;
use braid_postgres::value::Value;
use pgrx::pg_sys;

use super::FIRST_OTHER_OID;

/// Rule for when two values of a key's column are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Equality {
    /// If their bytes are equal. Also used if no hash function fits the index's equality.
    Bytes,
    /// If the type says so. The type has a hash function that agrees.
    Type {
        /// The type; the base type of a domain.
        of: pg_sys::Oid,
        /// The index's collation.
        collation: pg_sys::Oid,
        /// Another node with the same values computes the same hashes.
        everywhere: bool,
    },
}

impl Equality {
    /// Returns the equality of values of type `declared` in a key column of an index with these
    /// operators. In a transaction with a snapshot for catalogs.
    #[must_use]
    pub fn of(column: ColumnOperators, declared: pg_sys::Oid) -> Self {
        let ColumnOperators {
            family,
            input,
            collation,
        } = column;
        let equal = || syscache::equality_operator(family, input);
        Self::by(syscache::base_type(declared), collation, equal)
    }

    /// Returns the equality of values of type `declared` in a key column of an index with the
    /// type's default operators. In a transaction with a snapshot for catalogs.
    #[must_use]
    pub fn by_default(declared: pg_sys::Oid, collation: pg_sys::Oid) -> Self {
        let of = syscache::base_type(declared);
        let equal = || CachedType::find(of, pg_sys::TYPECACHE_EQ_OPR).equality();
        Self::by(of, collation, equal)
    }

    /// Returns the equality of a type that is no domain, whose values the operator `equal`
    /// compares.
    fn by(of: pg_sys::Oid, collation: pg_sys::Oid, equal: impl FnOnce() -> pg_sys::Oid) -> Self {
        let is_deterministic = syscache::is_deterministic(collation);
        if Bytewise::of(of).is_some() && is_deterministic {
            return Self::Bytes;
        }
        let equal = equal();
        let flags = pg_sys::TYPECACHE_EQ_OPR | HASH_FLAGS;
        let known = CachedType::find(of, flags);
        // The type cache has a hash function only if it agrees with the type's usual equality.
        if equal == pg_sys::InvalidOid
            || known.equality() != equal
            || known.hash_function() == pg_sys::InvalidOid
        {
            return Self::Bytes;
        }
        Self::Type {
            of,
            collation,
            // The equality of an extension's type, or of one made of other types, may depend on a
            // collation too.
            everywhere: is_deterministic && of.to_u32() < FIRST_OTHER_OID,
        }
    }
}

const HASH_FLAGS: u32 =
    pg_sys::TYPECACHE_HASH_EXTENDED_PROC | pg_sys::TYPECACHE_HASH_EXTENDED_PROC_FINFO;

/// Returns the type's own hash of a value; `None` if the type has none any more. In a transaction.
pub(super) fn hash_of_value(collation: pg_sys::Oid, value: Value<'_>) -> Option<u64> {
    CachedType::find(value.type_id(), HASH_FLAGS).hash(collation, value)
}
