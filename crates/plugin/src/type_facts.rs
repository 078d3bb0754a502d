//! What a type's catalog row says, as far as encoders want to know.

use braid_postgres::encoding;
use pgrx::pg_sys;

/// Types below this OID have the same OID in every database of every version. (Those from here to 16383 get theirs when a
/// cluster is made.)
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
    /// Hash values by which an invalidation names the types on which this depends; empty for built-in ones.
    pub(super) hashes: Vec<u32>,
}

impl TypeFacts {
    /// Look the type up.
    ///
    /// # Safety
    /// In a transaction with a snapshot for catalogs.
    pub(super) unsafe fn look_up(declared: pg_sys::Oid, mut modifier: i32) -> Self {
        // SAFETY: as the caller says; the tuple is released after its last use.
        unsafe {
            let oid = pg_sys::getBaseTypeAndTypmod(declared, &raw mut modifier);
            let cache = pg_sys::SysCacheIdentifier::TYPEOID.cast_signed();
            let tuple = pg_sys::SearchSysCache1(cache, oid.into());
            if tuple.is_null() {
                super::report::fail(
                    pgrx::PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
                    format!("cache lookup failed for type {}", oid.to_u32()),
                    None,
                );
            }
            let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_type>();
            let mut hashes = Vec::new();
            for user in [declared, oid] {
                if user.to_u32() >= FIRST_UNSTABLE_OID {
                    let zero = pg_sys::Datum::from(0_usize);
                    hashes.push(pg_sys::GetSysCacheHashValue(
                        cache,
                        user.into(),
                        zero,
                        zero,
                        zero,
                    ));
                }
            }
            let element = if (*form).typlen == -1 {
                (*form).typelem
            } else {
                pg_sys::InvalidOid
            };
            let facts = Self {
                oid,
                modifier,
                namespace: encoding::from_server(pg_sys::get_namespace_name((*form).typnamespace)),
                name: encoding::from_server((*form).typname.data.as_ptr()),
                kind: (*form).typtype.cast_unsigned(),
                element,
                send: if element == pg_sys::InvalidOid || has_send(element) {
                    (*form).typsend
                } else {
                    pg_sys::InvalidOid
                },
                output: (*form).typoutput,
                hashes,
            };
            pg_sys::ReleaseSysCache(tuple);
            facts
        }
    }

    /// The type has the same OID and binary form everywhere.
    pub(super) fn is_built_in(&self) -> bool {
        self.oid.to_u32() < FIRST_UNSTABLE_OID
    }
}

/// Whether a type has a function that sends it in binary form.
///
/// # Safety
/// As [`TypeFacts::look_up`].
unsafe fn has_send(type_id: pg_sys::Oid) -> bool {
    // SAFETY: as the caller says; the tuple is released after its last use.
    unsafe {
        let cache = pg_sys::SysCacheIdentifier::TYPEOID.cast_signed();
        let tuple = pg_sys::SearchSysCache1(cache, type_id.into());
        if tuple.is_null() {
            return false;
        }
        let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_type>();
        let has = (*form).typsend != pg_sys::InvalidOid;
        pg_sys::ReleaseSysCache(tuple);
        has
    }
}
