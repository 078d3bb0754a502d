//! Feeds values to a hash: their stored bytes, a form that is the same at all nodes, or one that is
//! the same for equal values. Run by all processes that hash rows.

use braid_decoder::{KeyHasher, Numeric};
use braid_postgres::composite::Composite;
use braid_postgres::encoding::utf8;
use braid_postgres::value::{Content, Value};
use braid_postgres::{ffi, syscache};
use pgrx::pg_sys;

use super::FIRST_OTHER_OID;
use super::equality::hash_of_value;

/// Whether the stored bytes of a type's values are portable: the type is built in, and each value
/// has one form.
fn is_portable(of: pg_sys::Oid) -> bool {
    of.to_u32() < FIRST_OTHER_OID && of != pg_sys::TSQUERYOID && of != pg_sys::TSQUERYARRAYOID
}

/// Feeds a value, or a marker for null. In a transaction.
pub(crate) fn feed(hasher: &mut KeyHasher, value: Option<Value<'_>>) {
    match value {
        None => hasher.word(u64::MAX),
        Some(value) if is_portable(value.type_id()) => feed_stored(hasher, value),
        Some(value) => feed_portable(hasher, value),
    }
}

/// Feeds the bytes of a value.
fn feed_stored(hasher: &mut KeyHasher, value: Value<'_>) {
    value.read(|content| match content {
        Content::Word(word) => hasher.word(word),
        Content::Bytes(bytes) => hasher.bytes(bytes),
    });
}

/// Feeds a value so that the hash is the same at all nodes with this value. In a transaction.
///
/// The bytes of an enum are an OID; a composite, an array or a range of a type that is not built in
/// holds the OID of its type. So labels and parts are fed instead. A tsquery that came as text has
/// its operands in another order than one that came in binary form, so its text is fed.
fn feed_portable(hasher: &mut KeyHasher, value: Value<'_>) {
    let of = value.type_id();
    if of == pg_sys::TSQUERYOID {
        return feed_text(hasher, value);
    }
    if is_portable(of) {
        return feed_stored(hasher, value);
    }
    match syscache::type_kind(of) {
        b'd' => feed_portable(hasher, value.as_base()),
        b'c' => feed_fields(hasher, Form::Portable, value),
        b'r' => feed_range(hasher, Form::Portable, value),
        // An enum's label, and the text of a multirange, whose parts PostgreSQL does not show.
        b'e' | b'm' => feed_text(hasher, value),
        _ => match syscache::element_type(of) {
            None => feed_stored(hasher, value),
            Some(element) => feed_elements(hasher, Form::Portable, element, value),
        },
    }
}

fn feed_text(hasher: &mut KeyHasher, value: Value<'_>) {
    hasher.bytes(utf8(&value.output()).as_bytes());
}

/// Rule for which values have the same hash.
#[derive(Clone, Copy)]
enum Form {
    /// Values with the same parts, at all nodes.
    Portable,
    /// Equal values, under this collation.
    Equal(pg_sys::Oid),
}

impl Form {
    /// Returns the form for a part that has a collation of its own.
    fn under(self, collation: pg_sys::Oid) -> Self {
        match self {
            Self::Portable => Self::Portable,
            Self::Equal(_) => Self::Equal(collation),
        }
    }
}

/// Feeds a value so that equal values have the same hash. Values that are not equal have different
/// hashes, apart from chance collisions.
///
/// PostgreSQL's hash functions leave things out: `hash_numeric` the sign, `hash_array` the bounds.
/// A hash table compares the values as well; here the hash is all that is known of a row. So
/// numbers are fed in a canonical form, and values made of parts are fed by their parts.
///
/// In a transaction.
pub(super) fn feed_equal(hasher: &mut KeyHasher, collation: pg_sys::Oid, value: Value<'_>) {
    let form = Form::Equal(collation);
    let value = value.as_base();
    match value.type_id() {
        pg_sys::NUMERICOID => return feed_numeric(hasher, value),
        pg_sys::JSONBOID => feed_json(hasher, value),
        _ => {}
    }
    match syscache::type_kind(value.type_id()) {
        b'c' => return feed_fields(hasher, form, value),
        b'r' => return feed_range(hasher, form, value),
        b'm' => return feed_multirange(hasher, value),
        _ => {}
    }
    match syscache::element_type(value.type_id()) {
        None => match hash_of_value(collation, value) {
            Some(hash) => hasher.word(hash),
            None => feed_portable(hasher, value),
        },
        Some(element) => feed_elements(hasher, form, element, value),
    }
}

fn feed_numeric(hasher: &mut KeyHasher, value: Value<'_>) {
    value.read(|content| match content {
        Content::Word(word) => hasher.word(word),
        Content::Bytes(bytes) => match Numeric::from_stored(bytes) {
            Some(number) => number.feed(hasher),
            None => hasher.bytes(bytes),
        },
    });
}

/// Feeds the numbers and the structure of a jsonb, which are the same in equal values.
/// `jsonb_hash_extended` covers the rest: keys, strings and booleans.
///
/// Does nothing for a value of another type.
fn feed_json(hasher: &mut KeyHasher, value: Value<'_>) {
    if value.type_id() != pg_sys::JSONBOID {
        return;
    }
    // SAFETY: a jsonb. The iterator reads the value, which stays in memory; a number is a numeric
    // within it.
    unsafe {
        let json = pg_sys::pg_detoast_datum(value.datum().cast_mut_ptr()).cast::<pg_sys::Jsonb>();
        let mut iterator = pg_sys::JsonbIteratorInit(&raw mut (*json).root);
        let mut part = std::mem::zeroed::<pg_sys::JsonbValue>();
        loop {
            let token = pg_sys::JsonbIteratorNext(&raw mut iterator, &raw mut part, false);
            hasher.word(u64::from(token));
            match (token, part.type_) {
                (pg_sys::JsonbIteratorToken::WJB_DONE, _) => break,
                // A scalar is stored as the only element of an array.
                (pg_sys::JsonbIteratorToken::WJB_BEGIN_ARRAY, _) => {
                    hasher.word(u64::from(part.val.array.rawScalar));
                }
                (_, pg_sys::jbvType::jbvNumeric) => {
                    let number = pg_sys::Datum::from(part.val.numeric);
                    feed_numeric(hasher, Value::of_type(pg_sys::NUMERICOID, number));
                }
                _ => {}
            }
        }
    }
}

/// Feeds a part of a value.
fn feed_part(hasher: &mut KeyHasher, form: Form, part: Option<Value<'_>>) {
    match (part, form) {
        (Some(part), Form::Portable) => feed_portable(hasher, part),
        (Some(part), Form::Equal(collation)) => feed_equal(hasher, collation, part),
        (None, _) => hasher.word(u64::MAX),
    }
}

/// Feeds the fields of a composite, in their order, without dropped ones.
fn feed_fields(hasher: &mut KeyHasher, form: Form, value: Value<'_>) {
    // SAFETY: the type is a composite one. The row is closed before the memory context is reset.
    let row = unsafe { Composite::open(value.datum()) };
    for (field, value) in row.cells() {
        feed_part(hasher, form.under(field.collation()), value);
    }
}

/// Feeds the bounds and elements of an array with elements of type `element`.
fn feed_elements(hasher: &mut KeyHasher, form: Form, element: pg_sys::Oid, value: Value<'_>) {
    // SAFETY: an array of such elements. An array's header is followed by its dimensions and then
    // their lower bounds (ARR_DIMS, ARR_LBOUND of src/include/utils/array.h, 15 to 18).
    unsafe {
        let array =
            pg_sys::pg_detoast_datum(value.datum().cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        let bounds = array.add(1).cast::<std::ffi::c_int>();
        let dimensions = usize::try_from((*array).ndim).unwrap_or(0);
        hasher.word(dimensions as u64);
        for place in 0..2 * dimensions {
            let bound = bounds.add(place).read();
            hasher.word(i64::from(bound).cast_unsigned());
        }
        let (mut length, mut by_value, mut alignment) = (0, false, 0);
        pg_sys::get_typlenbyvalalign(
            element,
            &raw mut length,
            &raw mut by_value,
            &raw mut alignment,
        );
        let (mut values, mut nulls) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut count = 0;
        pg_sys::deconstruct_array(
            array,
            element,
            i32::from(length),
            by_value,
            alignment,
            &raw mut values,
            &raw mut nulls,
            &raw mut count,
        );
        for place in 0..usize::try_from(count).unwrap_or(0) {
            let is_null = nulls.add(place).read();
            let part = (!is_null).then(|| Value::of_type(element, values.add(place).read()));
            feed_part(hasher, form, part);
        }
    }
}

/// Feeds the bounds of a range.
fn feed_range(hasher: &mut KeyHasher, form: Form, value: Value<'_>) {
    // SAFETY: the value's type is a range type, whose entry has that of its subtype.
    unsafe {
        let flags = pg_sys::TYPECACHE_RANGE_INFO.cast_signed();
        let known = pg_sys::lookup_type_cache(value.type_id(), flags);
        let form = form.under((*known).rng_collation);
        let range =
            pg_sys::pg_detoast_datum(value.datum().cast_mut_ptr()).cast::<pg_sys::RangeType>();
        let (mut lower, mut upper) = (pg_sys::RangeBound::default(), pg_sys::RangeBound::default());
        let mut is_empty = false;
        pg_sys::range_deserialize(
            known,
            range,
            &raw mut lower,
            &raw mut upper,
            &raw mut is_empty,
        );
        hasher.word(u64::from(is_empty));
        for bound in [lower, upper] {
            hasher.word(u64::from(bound.inclusive));
            let is_given = !is_empty && !bound.infinite;
            let subtype = (*(*known).rngelemtype).type_id;
            let bound = is_given.then(|| Value::of_type(subtype, bound.val));
            feed_part(hasher, form, bound);
        }
    }
}

/// Feeds the ranges of a multirange, for equality.
fn feed_multirange(hasher: &mut KeyHasher, value: Value<'_>) {
    // SAFETY: the value's type is a multirange type, whose entry has that of its range type.
    unsafe {
        let flags = pg_sys::TYPECACHE_MULTIRANGE_INFO.cast_signed();
        let known = (*pg_sys::lookup_type_cache(value.type_id(), flags)).rngtype;
        let form = Form::Equal((*known).rng_collation);
        let multirange = pg_sys::pg_detoast_datum(value.datum().cast_mut_ptr());
        let (mut count, mut ranges) = (0, std::ptr::null_mut());
        ffi::multirange_deserialize(known, multirange, &raw mut count, &raw mut ranges);
        let count = usize::try_from(count).unwrap_or(0);
        hasher.word(count as u64);
        for place in 0..count {
            let range = pg_sys::Datum::from(ranges.add(place).read());
            feed_range(hasher, form, Value::of_type((*known).type_id, range));
        }
    }
}
