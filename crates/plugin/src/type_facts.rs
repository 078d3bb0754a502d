//! A type's catalog row, as far as encoders need it.

use braid_postgres::encoding;
use braid_postgres::syscache::{self, TypeRow, utf8_or_empty};
use pgrx::pg_sys;

/// Types below this OID have the same OID in every database of every version. (Types from this one
/// to 16383 get theirs when a cluster is created.)
const FIRST_UNSTABLE_OID: u32 = 10_000;

/// A type; of a domain, its base type.
#[derive(Debug, Clone)]
pub(super) struct TypeFacts {
    pub(super) oid: pg_sys::Oid,
    pub(super) modifier: i32,
    pub(super) namespace: String,
    pub(super) name: String,
    /// `typtype`.
    pub(super) kind: u8,
    /// `typelem`, of a true array.
    pub(super) element: pg_sys::Oid,
    /// `typsend`; none of an array whose elements have none, as that of aclitem.
    pub(super) send: pg_sys::Oid,
    pub(super) output: pg_sys::Oid,
    /// Hash values by which an invalidation names the types on which this depends; empty for
    /// built-in ones.
    pub(super) hashes: Vec<u32>,
}

impl TypeFacts {
    /// Look the type up. In a transaction with a snapshot for catalogs.
    pub(super) fn look_up(declared: pg_sys::Oid, modifier: i32) -> Self {
        let (oid, modifier) = syscache::base_type_and_modifier(declared, modifier);
        let Some(row) = TypeRow::find(oid) else {
            super::report::fail(
                pgrx::PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
                format!("cache lookup failed for type {}", oid.to_u32()),
                None,
            );
        };
        let users = [declared, oid].into_iter();
        let hashes = users
            .filter(|user| user.to_u32() >= FIRST_UNSTABLE_OID)
            .map(syscache::type_hash);
        let element = if row.typlen == -1 {
            row.typelem
        } else {
            pg_sys::InvalidOid
        };
        Self {
            oid,
            modifier,
            namespace: utf8_or_empty(syscache::namespace_name(row.typnamespace)),
            name: encoding::name(&row.typname),
            kind: row.typtype.cast_unsigned(),
            element,
            send: if element == pg_sys::InvalidOid || has_send(element) {
                row.typsend
            } else {
                pg_sys::InvalidOid
            },
            output: row.typoutput,
            hashes: hashes.collect(),
        }
    }

    /// The type has the same OID and binary form everywhere.
    pub(super) fn is_built_in(&self) -> bool {
        self.oid.to_u32() < FIRST_UNSTABLE_OID
    }
}

/// Whether a type has a function that sends it in binary form.
fn has_send(type_id: pg_sys::Oid) -> bool {
    TypeRow::find(type_id).is_some_and(|row| row.typsend != pg_sys::InvalidOid)
}
