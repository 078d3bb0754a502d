//! Types whose values are equal exactly if their stored bytes are. Run by processes that hash keys:
//! a node that sends changes and one that applies them have to agree.

use pgrx::pg_sys;

/// How such a type stores its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bytewise {
    /// An integer of 1 ("char" and boolean), 2, 4 or 8 bytes.
    Integer,
    /// An OID.
    Oid,
    /// Bytes of a fixed number.
    Fixed,
    /// Characters, which a collation may compare otherwise.
    Characters,
    /// Bytes of any number.
    Bytes,
    /// A name, which a collation may compare otherwise.
    Name,
}

impl Bytewise {
    /// The way of a built-in type; `None` for a type whose values may be equal with other bytes.
    #[must_use]
    pub const fn of(built_in: pg_sys::Oid) -> Option<Self> {
        Some(match built_in {
            pg_sys::BOOLOID
            | pg_sys::CHAROID
            | pg_sys::INT2OID
            | pg_sys::INT4OID
            | pg_sys::INT8OID => Self::Integer,
            pg_sys::OIDOID => Self::Oid,
            pg_sys::DATEOID
            | pg_sys::TIMEOID
            | pg_sys::TIMESTAMPOID
            | pg_sys::TIMESTAMPTZOID
            | pg_sys::MONEYOID
            | pg_sys::PG_LSNOID
            | pg_sys::XID8OID
            | pg_sys::MACADDROID
            | pg_sys::MACADDR8OID
            | pg_sys::UUIDOID => Self::Fixed,
            pg_sys::TEXTOID | pg_sys::VARCHAROID => Self::Characters,
            pg_sys::BYTEAOID => Self::Bytes,
            pg_sys::NAMEOID => Self::Name,
            _ => return None,
        })
    }
}
