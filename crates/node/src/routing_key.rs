//! Values of the tenant and record expressions, read for routing. Run by sessions that write routed
//! tables, by walsenders that send them, and by `braid.shard`.
//!
//! Example: `tenant_id` is a `bigint`, the guard of a routed table is called for each row that is
//! inserted, and each call needs the hash of one `bigint`. So the value is read by its type's
//! number, which the caller knows, without a look-up in the catalogs. Domains, and collations that
//! are not PostgreSQL's own, are looked up.
//!
//! Not for: the hashed bytes and the hash (`braid_routing`).

use std::cell::Cell;
use std::ffi::CStr;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::value::{Content, Value};
use braid_postgres::{encoding, syscache};
use braid_routing::{HashError, Key, KeyType, Number};
use pgrx::pg_sys;

thread_local! {
    /// The collation that was last found to be deterministic. That property of a collation never
    /// changes.
    static DETERMINISTIC: Cell<pg_sys::Oid> = const { Cell::new(pg_sys::InvalidOid) };
}

/// Calls `use_key` with the key that a value is. In a transaction.
///
/// `datum` is a value of the type, not null. The type may be a domain, which costs a look-up. The
/// collation is that of the expression; invalid for none. Texts and numbers that have to be
/// converted or decompressed are in the current memory context.
///
/// # Errors
/// 0A000 if the type or the collation is not supported, 22021 if a text is not valid UTF-8, and
/// PostgreSQL's errors while it converts or fetches the value.
#[inline]
pub fn with_key<T>(
    datum: pg_sys::Datum,
    type_oid: pg_sys::Oid,
    collation: pg_sys::Oid,
    use_key: impl FnOnce(&Key<'_>) -> T,
) -> Result<T, PgError> {
    let (of, base) = match KeyType::of_type(type_oid.to_u32(), "") {
        Ok(of) => (of, type_oid),
        Err(_) => of_domain(type_oid)?,
    };
    if matches!(of, KeyType::Text | KeyType::PaddedText) {
        check_collation(of, collation)?;
    }
    // SAFETY: the caller has a value of the type, whose length and passing are PostgreSQL's.
    let value = unsafe { Value::stored(base, form(of, base), datum) };
    if of == KeyType::Numeric {
        let digits = value.digits().map(CStr::to_str).and_then(Result::ok);
        let number = Number::parse(digits.unwrap_or_default()).map_err(refused)?;
        return Ok(use_key(&Key::Numeric(number)));
    }
    value.read(|content| match content {
        Content::Word(word) => Ok(use_key(&of_word(of, base, word))),
        Content::Bytes(bytes) => of_bytes(of, base, bytes).map(|key| use_key(&key)),
    })
}

/// Checks that values of a type, with a collation, have keys. Both are those of an expression; the
/// type may be a domain. In a transaction.
///
/// # Errors
/// 0A000 with a hint if not.
pub fn check_type(type_oid: pg_sys::Oid, collation: pg_sys::Oid) -> Result<KeyType, PgError> {
    let (of, _) = of_domain(type_oid)?;
    check_collation(of, collation)?;
    Ok(of)
}

#[cold]
fn of_domain(type_oid: pg_sys::Oid) -> Result<(KeyType, pg_sys::Oid), PgError> {
    let base = syscache::base_type(type_oid);
    KeyType::of_type(base.to_u32(), "")
        .map(|of| (of, base))
        .map_err(|_| {
            let name = encoding::utf8(&syscache::format_type(type_oid, -1));
            refused(HashError::UnsupportedType(name))
        })
}

#[inline]
fn check_collation(of: KeyType, collation: pg_sys::Oid) -> Result<(), PgError> {
    // PostgreSQL's own: the database's default, and that of `name`. Both are deterministic.
    let own = [
        pg_sys::InvalidOid,
        pg_sys::DEFAULT_COLLATION_OID,
        pg_sys::C_COLLATION_OID,
    ];
    if own.contains(&collation) || DETERMINISTIC.get() == collation {
        return Ok(());
    }
    look_up_collation(of, collation)
}

#[cold]
fn look_up_collation(of: KeyType, collation: pg_sys::Oid) -> Result<(), PgError> {
    let is_deterministic = syscache::is_deterministic(collation);
    let name = syscache::utf8_or_empty(syscache::collation_name(collation));
    of.check_collation(&name, is_deterministic)
        .map_err(refused)?;
    if is_deterministic {
        DETERMINISTIC.set(collation);
    }
    Ok(())
}

fn refused(error: HashError) -> PgError {
    let hint = error.hint();
    PgError::new(SqlState::FeatureNotSupported, error.to_string()).with_hint(hint)
}

/// Length and passing of values of a type, as in pg_type of 15 to 19.
#[inline]
fn form(of: KeyType, base: pg_sys::Oid) -> (i16, bool) {
    match of {
        KeyType::Integer if base == pg_sys::INT2OID => (2, true),
        KeyType::Integer if base == pg_sys::INT4OID => (4, true),
        KeyType::Integer | KeyType::Timestamp | KeyType::TimestampTz => (8, true),
        KeyType::Date => (4, true),
        KeyType::Bool => (1, true),
        KeyType::Uuid => (16, false),
        KeyType::Text if base == pg_sys::NAMEOID => (NAME_LENGTH, false),
        KeyType::Text | KeyType::PaddedText | KeyType::Numeric | KeyType::Bytes => (-1, false),
    }
}

/// NAMEDATALEN.
const NAME_LENGTH: i16 = 64;

/// The key of a value that is passed by value. Of a narrower type, the higher bytes are anything.
#[inline]
fn of_word(of: KeyType, base: pg_sys::Oid, word: u64) -> Key<'static> {
    let [a, b, c, d, ..] = word.to_le_bytes();
    let long = word.cast_signed();
    let int = i32::from_le_bytes([a, b, c, d]);
    match of {
        KeyType::Bool => Key::Bool(a != 0),
        KeyType::Date => Key::Date(int),
        KeyType::Timestamp => Key::Timestamp(long),
        KeyType::TimestampTz => Key::TimestampTz(long),
        _ if base == pg_sys::INT2OID => Key::Integer(i16::from_le_bytes([a, b]).into()),
        _ if base == pg_sys::INT4OID => Key::Integer(int.into()),
        _ => Key::Integer(long),
    }
}

/// The key of a value that is passed by reference.
#[inline]
fn of_bytes(of: KeyType, base: pg_sys::Oid, bytes: &[u8]) -> Result<Key<'_>, PgError> {
    let text = |bytes| encoding::checked_utf8(bytes).ok_or_else(not_utf8);
    Ok(match of {
        KeyType::Uuid => Key::Uuid(<[u8; 16]>::try_from(bytes).unwrap_or_default()),
        KeyType::PaddedText => Key::PaddedText(text(bytes)?),
        KeyType::Text if base == pg_sys::NAMEOID => {
            let name = CStr::from_bytes_until_nul(bytes).map_or(bytes, CStr::to_bytes);
            Key::Text(text(name)?)
        }
        KeyType::Text => Key::Text(text(bytes)?),
        _ => Key::Bytes(bytes),
    })
}

#[cold]
fn not_utf8() -> PgError {
    PgError::new(
        SqlState::CharacterNotInRepertoire,
        "text is not valid UTF-8, so it has no shard",
    )
    .with_hint("In a database with the encoding SQL_ASCII, write texts of routed tables in UTF-8.")
}
