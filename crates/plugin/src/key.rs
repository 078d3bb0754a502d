//! Hashes a key's columns in their canonical form: values that are equal under the index have the same.

use braid_decoder::{Fed, KeyHasher, KeyValues, Numeric};
use braid_postgres::encoding;
use pgrx::pg_sys;

use super::column::{self, Tools};
use super::running::Unwatched;
use super::tuple::{Field, Row};
use super::type_facts::TypeFacts;

/// Operator families that compare characters bytewise whatever the collation.
const PATTERN_FAMILIES: [pg_sys::Oid; 2] = [
    pg_sys::TEXT_PATTERN_BTREE_FAM_OID,
    pg_sys::BPCHAR_PATTERN_BTREE_FAM_OID,
];

/// A column of a unique index, as that index compares it.
#[derive(Debug)]
pub(super) struct KeyColumn {
    /// Index of the attribute (from 0).
    pub(super) attribute: usize,
    /// OID of the type: values of another type have other hashes.
    pub(super) type_oid: u32,
    /// What sets this comparison apart from the type's usual one; empty if nothing does.
    pub(super) comparison: String,
    form: Form,
}

/// How values are made canonical.
#[derive(Debug)]
enum Form {
    /// Integers of any width: as 64 bits, so that int4 here and int8 elsewhere agree.
    Signed,
    /// OIDs, among them those of an enum's values: a label may be renamed between two changes.
    Unsigned,
    /// Equal exactly if bytewise equal, of fixed length.
    Fixed,
    Float4,
    Float8,
    Numeric,
    /// Characters or bytes.
    Content,
    /// Characters without the blanks at their end.
    Padded,
    CString,
    /// The type's own extended hash function, under the index's collation.
    Function {
        info: *mut pg_sys::FmgrInfo,
        collation: pg_sys::Oid,
        by_value: bool,
    },
}

impl KeyColumn {
    /// The canonical form of `attribute`, which is of type `facts`, for an index with `family` and `collation`. `None` when
    /// there is no hash that agrees with that index's equality.
    ///
    /// # Safety
    /// In a transaction with a snapshot for catalogs.
    pub(super) unsafe fn new(
        attribute: usize,
        facts: &TypeFacts,
        by_value: bool,
        (family, collation): (pg_sys::Oid, pg_sys::Oid),
    ) -> Option<Self> {
        let flags = pg_sys::TYPECACHE_BTREE_OPFAMILY | pg_sys::TYPECACHE_HASH_EXTENDED_PROC_FINFO;
        let unwatched = Unwatched::enter();
        // SAFETY: the entry lives as long as the process.
        let cached = unsafe { &mut *pg_sys::lookup_type_cache(facts.oid, flags.cast_signed()) };
        drop(unwatched);
        let pattern = PATTERN_FAMILIES.contains(&family);
        if family != cached.btree_opf && !pattern {
            return None;
        }
        // SAFETY: a catalog look-up in a transaction.
        let bytewise = pattern
            || collation == pg_sys::InvalidOid
            || unsafe { pg_sys::get_collation_isdeterministic(collation) };
        let form = match facts.oid {
            pg_sys::BOOLOID
            | pg_sys::CHAROID
            | pg_sys::INT2OID
            | pg_sys::INT4OID
            | pg_sys::INT8OID => Form::Signed,
            pg_sys::OIDOID => Form::Unsigned,
            pg_sys::FLOAT4OID => Form::Float4,
            pg_sys::FLOAT8OID => Form::Float8,
            pg_sys::NUMERICOID => Form::Numeric,
            pg_sys::DATEOID
            | pg_sys::TIMEOID
            | pg_sys::TIMESTAMPOID
            | pg_sys::TIMESTAMPTZOID
            | pg_sys::MONEYOID
            | pg_sys::PG_LSNOID
            | pg_sys::XID8OID
            | pg_sys::MACADDROID
            | pg_sys::MACADDR8OID
            | pg_sys::UUIDOID => Form::Fixed,
            pg_sys::TEXTOID | pg_sys::VARCHAROID if bytewise => Form::Content,
            pg_sys::BPCHAROID if bytewise => Form::Padded,
            pg_sys::BYTEAOID => Form::Content,
            pg_sys::NAMEOID if bytewise => Form::CString,
            _ if facts.kind == pg_sys::TYPTYPE_ENUM => Form::Unsigned,
            _ if cached.hash_extended_proc != pg_sys::InvalidOid => Form::Function {
                info: &raw mut cached.hash_extended_proc_finfo,
                collation,
                by_value,
            },
            _ => return None,
        };
        let comparison = if bytewise {
            String::new()
        } else {
            // SAFETY: as the caller says; the name is in the current memory context.
            unsafe { encoding::from_server(pg_sys::get_collation_name(collation)) }
        };
        Some(Self {
            attribute,
            type_oid: facts.oid.to_u32(),
            comparison,
            form,
        })
    }

    #[inline]
    fn feed(&self, bytes: &[u8], hasher: &mut KeyHasher, tools: &Tools) {
        match &self.form {
            Form::Signed => hasher.word(column::signed(bytes).cast_unsigned()),
            Form::Unsigned => hasher.word(u64::from(u32::from_le_bytes(column::fixed(bytes)))),
            Form::Fixed => hasher.bytes(bytes),
            Form::Float4 => {
                hasher.word(canonical(f64::from(f32::from_le_bytes(column::fixed(
                    bytes,
                )))));
            }
            Form::Float8 => hasher.word(canonical(f64::from_le_bytes(column::fixed(bytes)))),
            Form::Numeric => column::with_content(bytes, tools, |stored| {
                if let Some(numeric) = Numeric::from_stored(stored) {
                    numeric.feed(hasher);
                }
            }),
            Form::Content => column::with_content(bytes, tools, |content| hasher.bytes(content)),
            Form::Padded => column::with_content(bytes, tools, |content| {
                let len = content
                    .iter()
                    .rposition(|byte| *byte != b' ')
                    .map_or(0, |last| last + 1);
                hasher.bytes(content.get(..len).unwrap_or_default());
            }),
            Form::CString => hasher.bytes(column::until_zero(bytes)),
            Form::Function {
                info,
                collation,
                by_value,
            } => {
                let value = column::to_datum(bytes, *by_value);
                // SAFETY: the type's own hash function and a value of the type; a seed of 0 is the plain hash.
                let hash = tools.scratch.run(|| unsafe {
                    pg_sys::FunctionCall2Coll(*info, *collation, value, pg_sys::Datum::from(0_i64))
                });
                hasher.word(hash.value() as u64);
            }
        }
    }
}

/// Bits of a float: zero has no sign, and all NaNs are equal.
#[inline]
fn canonical(value: f64) -> u64 {
    if value == 0.0 {
        0
    } else if value.is_nan() {
        u64::MAX
    } else {
        value.to_bits()
    }
}

/// A row's keys.
pub(super) struct RowKeys<'r> {
    pub(super) row: &'r Row,
    pub(super) columns: &'r [KeyColumn],
    pub(super) tools: &'r Tools,
}

impl KeyValues for RowKeys<'_> {
    #[inline]
    fn feed(&mut self, column: usize, hasher: &mut KeyHasher) -> Fed {
        let Some(key) = self.columns.get(column) else {
            return Fed::Unavailable;
        };
        match self.row.field(key.attribute) {
            Field::Null => Fed::Null,
            Field::Unavailable => Fed::Unavailable,
            Field::Stored(bytes) => {
                key.feed(bytes, hasher, self.tools);
                Fed::Value
            }
        }
    }
}
