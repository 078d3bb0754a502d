//! Hashes a key's columns in their canonical form: values that are equal under the index have the
//! same.

use braid_decoder::{Fed, KeyHasher, KeyValues, Numeric};
use braid_postgres::bytewise::Bytewise;
use braid_postgres::plain;
use braid_postgres::syscache;
use braid_postgres::type_cache::CachedType;
use braid_postgres::value::Value;
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
    /// The difference of this comparison from the type's usual one; empty if there is none.
    pub(super) comparison: String,
    form: Form,
}

/// How values are made canonical.
#[derive(Debug)]
enum Form {
    /// Integers of any width: as 64 bits, so that int4 on one node and int8 on another agree.
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
        cached: CachedType,
        of: pg_sys::Oid,
        collation: pg_sys::Oid,
        by_value: bool,
    },
}

impl KeyColumn {
    /// The canonical form of `attribute`, which is of type `facts`, for an index with `family` and
    /// `collation`. `None` when there is no hash that agrees with that index's equality.
    ///
    /// In a transaction with a snapshot for catalogs.
    pub(super) fn new(
        attribute: usize,
        facts: &TypeFacts,
        by_value: bool,
        (family, collation): (pg_sys::Oid, pg_sys::Oid),
    ) -> Option<Self> {
        let flags = pg_sys::TYPECACHE_BTREE_OPFAMILY | pg_sys::TYPECACHE_HASH_EXTENDED_PROC_FINFO;
        let unwatched = Unwatched::enter();
        let cached = CachedType::find(facts.oid, flags);
        drop(unwatched);
        let pattern = PATTERN_FAMILIES.contains(&family);
        if family != cached.btree_family() && !pattern {
            return None;
        }
        let bytewise = pattern
            || collation == pg_sys::InvalidOid
            || plain::get_collation_isdeterministic(collation);
        let known = Bytewise::of(facts.oid);
        let form = match facts.oid {
            _ if let Some(form) = known.and_then(|known| bytewise_form(known, bytewise)) => form,
            pg_sys::FLOAT4OID => Form::Float4,
            pg_sys::FLOAT8OID => Form::Float8,
            pg_sys::NUMERICOID => Form::Numeric,
            pg_sys::BPCHAROID if bytewise => Form::Padded,
            _ if facts.kind == pg_sys::TYPTYPE_ENUM => Form::Unsigned,
            _ if cached.hash_function() != pg_sys::InvalidOid => Form::Function {
                cached,
                of: facts.oid,
                collation,
                by_value,
            },
            _ => return None,
        };
        let comparison = if bytewise {
            String::new()
        } else {
            syscache::utf8_or_empty(syscache::collation_name(collation))
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
                cached,
                of,
                collation,
                by_value,
            } => {
                // SAFETY: the bytes are a value of the type, as it is stored.
                let value = unsafe { Value::of_type(*of, column::to_datum(bytes, *by_value)) };
                let hash = tools.scratch.run(|| cached.hash(*collation, value));
                hasher.word(hash.unwrap_or(0));
            }
        }
    }
}

/// The form of a type whose values are equal exactly if their bytes are; `None` if the index's
/// collation compares them otherwise.
fn bytewise_form(known: Bytewise, by_bytes: bool) -> Option<Form> {
    Some(match known {
        Bytewise::Integer => Form::Signed,
        Bytewise::Oid => Form::Unsigned,
        Bytewise::Fixed => Form::Fixed,
        Bytewise::Bytes => Form::Content,
        Bytewise::Characters if by_bytes => Form::Content,
        Bytewise::Name if by_bytes => Form::CString,
        Bytewise::Characters | Bytewise::Name => return None,
    })
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
    pub(super) row: Row<'r>,
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
