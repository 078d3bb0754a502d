//! The hashes by which a row is remembered that has no place of its own. Run by the appliers, by the collector of deletions, and by who
//! copies or compares.
//!
//! Two of them, both of its table and key:
//!
//! - *of the stored bytes*: the same stored row always gives the same. For what is known of rows as they stand here: those of batches.
//!   Bytes that hold OIDs of this database, or may differ for one value, are taken apart ([`feed_portable`]), as other nodes have the hash too.
//! - *by equality*: rows with equal keys, as the index says that finds them, give the same, whatever their bytes. For deletions, which
//!   another form of the key must meet (1.0 and 1.00), and for copied rows.
//!
//! Where no key has two forms these are one. Otherwise a value's hash is that of the type's own extended hash function, under the
//! index's collation, or is made of the parts ([`feed_equal`]). It stays the same from release to release, as hash indexes and partitions do; but what a collation calls equal
//! is made of the sort keys of a library, which another node, or this one tomorrow, may have in another version. So what is told by
//! such a hash is told by that of the stored bytes as well ([`KeyHashes::each`]): then the same bytes are found everywhere, and another form of
//! them wherever the library is the same.
//!
//! A type without such a function (tsvector, say), or an index with an equality of its own, has the bytes alone.
//!
//! A row of a table without a key is remembered by all of its values ([`RowHash`]).

use braid_decoder::{KeyHasher, Numeric};
use braid_postgres::encoding::from_server;
use braid_postgres::{compat, ffi};
use pgrx::pg_sys;

use super::relation::LocalRelation;
use super::table::RowValues;

/// Types and collations below this OID come with PostgreSQL, and have it at every node.
const FIRST_OTHER_OID: u32 = 10_000;

/// What stands for all rows of a table, where one of them would have its hash: the seed of no row's.
#[must_use]
pub fn table_hash(relation: u32) -> u64 {
    KeyHasher::new(u64::from(relation) | 1 << 32).finish()
}

/// Where hashes begin of rows that came from elsewhere: above all others.
const COPIED_ROWS: u64 = 1 << 33;

/// What stands for a hash that comes from elsewhere, of a row that was copied into the table with this OID: other than all hashes that are
/// computed here, as tables elsewhere may well have the OIDs of other tables here.
#[must_use]
pub fn copied_hash(relation: u32, hash: u64) -> u64 {
    let mut hasher = KeyHasher::new(COPIED_ROWS);
    hasher.word(u64::from(relation));
    hasher.word(hash);
    hasher.finish()
}

/// Where hashes of whole rows begin: apart from those of keys, of tables, and of copied rows.
const WHOLE_ROWS: u64 = 1 << 34;

/// A row of a table without a key: of its names and stored bytes, in whatever order the columns
/// come. So it is the same at every node that stores the values alike. Values whose bytes hold OIDs
/// of this database, or have several forms, are taken apart ([`feed_portable`]).
#[derive(Debug, Clone, Copy)]
pub struct RowHash {
    table: u64,
    columns: u64,
}

impl RowHash {
    /// Of a row of an open table.
    ///
    /// # Safety
    /// The relation is open; in a transaction.
    pub unsafe fn of_table(relation: pg_sys::Relation) -> u64 {
        let mut hasher = KeyHasher::new(WHOLE_ROWS);
        // SAFETY: as the caller says; names are NUL-terminated.
        unsafe {
            let form = (*relation).rd_rel;
            let namespace = pg_sys::get_namespace_name((*form).relnamespace);
            if !namespace.is_null() {
                hasher.bytes(from_server(namespace).as_bytes());
            }
            hasher.bytes(from_server((*form).relname.data.as_ptr()).as_bytes());
        }
        hasher.finish()
    }

    /// Of a column, by its name.
    #[must_use]
    pub fn of_column(name: &str) -> u64 {
        let mut hasher = KeyHasher::new(WHOLE_ROWS);
        hasher.bytes(name.as_bytes());
        hasher.finish()
    }

    /// That of a row, of which nothing is known yet but the table's ([`Self::of_table`]).
    #[must_use]
    pub fn new(table: u64) -> Self {
        Self { table, columns: 0 }
    }

    /// Take in a value; `name` is its column's ([`Self::of_column`]).
    ///
    /// # Safety
    /// `value` is one of the column at `position`, from 0; in a transaction.
    pub unsafe fn feed(
        &mut self,
        name: u64,
        descriptor: pg_sys::TupleDesc,
        position: usize,
        value: Option<pg_sys::Datum>,
    ) {
        let mut hasher = KeyHasher::new(self.table);
        hasher.word(name);
        // SAFETY: as the caller says.
        unsafe { feed(&mut hasher, descriptor, position, value) };
        self.columns = self.columns.wrapping_add(hasher.finish());
    }

    /// The hash.
    #[must_use]
    pub fn finish(self) -> u64 {
        let mut hasher = KeyHasher::new(self.table);
        hasher.word(self.columns);
        hasher.finish()
    }
}

/// Whether the bytes of a type's values are fed as they are: the type is built in, and each value has
/// one form.
fn is_portable(of: pg_sys::Oid) -> bool {
    of.to_u32() < FIRST_OTHER_OID && of != pg_sys::TSQUERYOID && of != pg_sys::TSQUERYARRAYOID
}

/// Feed a value so that the hash is equal at all nodes with this value.
///
/// The bytes of an enum are an OID, and a composite, an array or a range of a type that is not built
/// in holds the OID of its type. So labels and parts are fed instead. A tsquery that came as text
/// has another order of its operands than one that came in binary form, so its text is fed.
///
/// # Safety
/// `value` is of the type; in a transaction.
unsafe fn feed_portable(hasher: &mut KeyHasher, of: pg_sys::Oid, value: pg_sys::Datum) {
    // SAFETY: as the caller says; catalog look-ups.
    unsafe {
        if of == pg_sys::TSQUERYOID {
            return feed_text(hasher, of, value);
        }
        if is_portable(of) {
            return feed_bytes(hasher, of, value);
        }
        match pg_sys::get_typtype(of).cast_unsigned() {
            b'd' => feed_portable(hasher, pg_sys::getBaseType(of), value),
            b'c' => feed_fields(hasher, Form::Portable, value),
            b'r' => feed_range(hasher, Form::Portable, of, value),
            // An enum's label, and the text of a multirange, whose parts PostgreSQL does not show.
            b'e' | b'm' => feed_text(hasher, of, value),
            _ => match pg_sys::get_element_type(of) {
                pg_sys::InvalidOid => feed_bytes(hasher, of, value),
                element => feed_elements(hasher, Form::Portable, element, value),
            },
        }
    }
}

/// # Safety
/// As [`feed_portable`].
unsafe fn feed_bytes(hasher: &mut KeyHasher, of: pg_sys::Oid, value: pg_sys::Datum) {
    // SAFETY: as the caller says.
    unsafe {
        let (mut length, mut by_value) = (0, false);
        pg_sys::get_typlenbyval(of, &raw mut length, &raw mut by_value);
        feed_stored(hasher, (length, by_value), value);
    }
}

/// # Safety
/// As [`feed_portable`].
unsafe fn feed_text(hasher: &mut KeyHasher, of: pg_sys::Oid, value: pg_sys::Datum) {
    // SAFETY: as the caller says; the output function is the type's own, and its text ends with a
    // zero byte.
    unsafe {
        let mut output = pg_sys::InvalidOid;
        let mut is_varlena = false;
        pg_sys::getTypeOutputInfo(of, &raw mut output, &raw mut is_varlena);
        let text = pg_sys::OidOutputFunctionCall(output, value);
        hasher.bytes(from_server(text).as_bytes());
        pg_sys::pfree(text.cast());
    }
}

/// Which values have the same hash.
#[derive(Clone, Copy)]
enum Form {
    /// Those with the same parts, at all nodes.
    Portable,
    /// Equal ones, under this collation.
    Equal(pg_sys::Oid),
}

impl Form {
    /// The form of a part that has a collation of its own.
    fn under(self, collation: pg_sys::Oid) -> Self {
        match self {
            Self::Portable => Self::Portable,
            Self::Equal(_) => Self::Equal(collation),
        }
    }
}

/// Feed a value so that equal ones have the same hash, and no others by rule.
///
/// PostgreSQL's hash functions leave things out: `hash_numeric` the sign, `hash_array` the bounds.
/// A hash table compares the values as well; here nothing else is known of a row. So numbers are
/// fed in a canonical form, and what is made of parts is taken apart.
///
/// # Safety
/// As [`feed_portable`].
unsafe fn feed_equal(
    hasher: &mut KeyHasher,
    declared: pg_sys::Oid,
    collation: pg_sys::Oid,
    value: pg_sys::Datum,
) {
    let form = Form::Equal(collation);
    // SAFETY: as the caller says; catalog look-ups.
    unsafe {
        let of = pg_sys::getBaseType(declared);
        match of {
            pg_sys::NUMERICOID => return feed_numeric(hasher, value),
            pg_sys::JSONBOID => feed_json(hasher, value),
            _ => {}
        }
        match pg_sys::get_typtype(of).cast_unsigned() {
            b'c' => return feed_fields(hasher, form, value),
            b'r' => return feed_range(hasher, form, of, value),
            b'm' => return feed_multirange(hasher, of, value),
            _ => {}
        }
        match pg_sys::get_element_type(of) {
            pg_sys::InvalidOid => match hash_of_value(of, collation, value) {
                Some(hash) => hasher.word(hash),
                None => feed_portable(hasher, of, value),
            },
            element => feed_elements(hasher, form, element, value),
        }
    }
}

/// # Safety
/// `value` is a numeric.
unsafe fn feed_numeric(hasher: &mut KeyHasher, value: pg_sys::Datum) {
    // SAFETY: as the caller says.
    unsafe {
        let packed = pg_sys::pg_detoast_datum_packed(value.cast_mut_ptr());
        let bytes = pgrx::varlena_to_byte_slice(packed);
        match Numeric::from_stored(bytes) {
            Some(number) => number.feed(hasher),
            None => hasher.bytes(bytes),
        }
    }
}

/// Feed the numbers and the structure of a jsonb, which equal ones share. `jsonb_hash_extended` has
/// all else: keys, strings and booleans.
///
/// # Safety
/// `value` is a jsonb.
unsafe fn feed_json(hasher: &mut KeyHasher, value: pg_sys::Datum) {
    // SAFETY: as the caller says. The iterator reads the value, which stays in memory; a number
    // is a numeric within it.
    unsafe {
        let json = pg_sys::pg_detoast_datum(value.cast_mut_ptr()).cast::<pg_sys::Jsonb>();
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
                    feed_numeric(hasher, pg_sys::Datum::from(part.val.numeric));
                }
                _ => {}
            }
        }
    }
}

/// Feed a part of a value.
///
/// # Safety
/// As [`feed_portable`].
unsafe fn feed_part(
    hasher: &mut KeyHasher,
    form: Form,
    of: pg_sys::Oid,
    part: Option<pg_sys::Datum>,
) {
    match (part, form) {
        // SAFETY: as the caller says.
        (Some(part), Form::Portable) => unsafe { feed_portable(hasher, of, part) },
        // SAFETY: as the caller says.
        (Some(part), Form::Equal(collation)) => unsafe {
            feed_equal(hasher, of, collation, part);
        },
        (None, _) => hasher.word(u64::MAX),
    }
}

/// Feed the fields of a composite, in their order. Dropped ones are no part of it.
///
/// # Safety
/// `value` is a composite; in a transaction.
unsafe fn feed_fields(hasher: &mut KeyHasher, form: Form, value: pg_sys::Datum) {
    // SAFETY: as the caller says: its header names its type. The descriptor is a copy, which is
    // freed when nothing refers to it any more; one value and one mark a field.
    unsafe {
        let header =
            pg_sys::pg_detoast_datum(value.cast_mut_ptr()).cast::<pg_sys::HeapTupleHeaderData>();
        let row = (*header).t_choice.t_datum;
        let descriptor = pg_sys::lookup_rowtype_tupdesc_copy(row.datum_typeid, row.datum_typmod);
        let mut tuple = pg_sys::HeapTupleData {
            t_len: u32::try_from(pgrx::varsize_any(header.cast())).unwrap_or(0),
            t_data: header,
            ..Default::default()
        };
        let count = usize::try_from((*descriptor).natts).unwrap_or(0);
        let mut values = vec![pg_sys::Datum::null(); count];
        let mut nulls = vec![true; count];
        pg_sys::heap_deform_tuple(
            &raw mut tuple,
            descriptor,
            values.as_mut_ptr(),
            nulls.as_mut_ptr(),
        );
        for (position, (value, is_null)) in values.into_iter().zip(nulls).enumerate() {
            let field = compat::TupleDescAttr(descriptor, position);
            if !(*field).attisdropped {
                let form = form.under((*field).attcollation);
                feed_part(hasher, form, (*field).atttypid, (!is_null).then_some(value));
            }
        }
        pg_sys::FreeTupleDesc(descriptor);
    }
}

/// Feed the bounds and elements of an array.
///
/// # Safety
/// `value` is an array of the element type; in a transaction.
unsafe fn feed_elements(
    hasher: &mut KeyHasher,
    form: Form,
    element: pg_sys::Oid,
    value: pg_sys::Datum,
) {
    // SAFETY: as the caller says. An array's header is followed by its dimensions and then their
    // lower bounds (ARR_DIMS, ARR_LBOUND of src/include/utils/array.h, 15 to 18).
    unsafe {
        let array = pg_sys::pg_detoast_datum(value.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
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
            let part = (!is_null).then(|| values.add(place).read());
            feed_part(hasher, form, element, part);
        }
    }
}

/// Feed the bounds of a range.
///
/// # Safety
/// `value` is of the range type; in a transaction.
unsafe fn feed_range(hasher: &mut KeyHasher, form: Form, of: pg_sys::Oid, value: pg_sys::Datum) {
    // SAFETY: as the caller says; a range type's entry has that of its subtype.
    unsafe {
        let flags = pg_sys::TYPECACHE_RANGE_INFO.cast_signed();
        let known = pg_sys::lookup_type_cache(of, flags);
        let form = form.under((*known).rng_collation);
        let range = pg_sys::pg_detoast_datum(value.cast_mut_ptr()).cast::<pg_sys::RangeType>();
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
            feed_part(hasher, form, subtype, is_given.then_some(bound.val));
        }
    }
}

/// Feed the ranges of a multirange, for equality.
///
/// # Safety
/// `value` is of the multirange type; in a transaction.
unsafe fn feed_multirange(hasher: &mut KeyHasher, of: pg_sys::Oid, value: pg_sys::Datum) {
    // SAFETY: as the caller says; a multirange type's entry has that of its range type.
    unsafe {
        let flags = pg_sys::TYPECACHE_MULTIRANGE_INFO.cast_signed();
        let known = (*pg_sys::lookup_type_cache(of, flags)).rngtype;
        let form = Form::Equal((*known).rng_collation);
        let multirange = pg_sys::pg_detoast_datum(value.cast_mut_ptr());
        let (ranges, count) = ffi::multirange_deserialize(known, multirange);
        hasher.word(count as u64);
        for place in 0..count {
            let range = pg_sys::Datum::from(ranges.add(place).read());
            feed_range(hasher, form, (*known).type_id, range);
        }
    }
}

/// The hash by which a row of a table without a key is known everywhere, of all its columns but those that are generated.
///
/// # Safety
/// The slot holds a row of the table, which is open; in a transaction.
pub unsafe fn row_hash(table: pg_sys::Relation, slot: *mut pg_sys::TupleTableSlot) -> u64 {
    // SAFETY: as the caller says; one value and one mark a column.
    unsafe {
        let descriptor = (*table).rd_att;
        let mut hash = RowHash::new(RowHash::of_table(table));
        for (position, value) in super::image::fields(slot).into_iter().enumerate() {
            let attribute = compat::TupleDescAttr(descriptor, position);
            if !(*attribute).attisdropped && (*attribute).attgenerated == 0 {
                let name = from_server((*attribute).attname.data.as_ptr());
                hash.feed(RowHash::of_column(&name), descriptor, position, value);
            }
        }
        hash.finish()
    }
}

/// When two values of a key's column are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Equality {
    /// When their bytes are, or nothing is known that would tell.
    Bytes,
    /// When the type says so, which has a hash function for that.
    Type {
        /// The type; of a domain, what it is made of.
        of: pg_sys::Oid,
        /// The index's.
        collation: pg_sys::Oid,
        /// Another node with the same values has the same hashes.
        everywhere: bool,
    },
}

impl Equality {
    /// That of values of type `declared` in the column at `position`, from 0, of an index.
    ///
    /// # Safety
    /// The index is open, and has such a column; in a transaction with a snapshot for catalogs.
    pub unsafe fn of(index: pg_sys::Relation, position: usize, declared: pg_sys::Oid) -> Self {
        // SAFETY: as the caller says; an index has an operator family, an input type and a collation for each of its key columns.
        unsafe {
            let collation = *(*index).rd_indcollation.add(position);
            let of = pg_sys::getBaseType(declared);
            let is_deterministic =
                collation == pg_sys::InvalidOid || pg_sys::get_collation_isdeterministic(collation);
            if is_bytewise(of) && is_deterministic {
                return Self::Bytes;
            }
            let family = *(*index).rd_opfamily.add(position);
            let input = *(*index).rd_opcintype.add(position);
            let strategy = i16::try_from(pg_sys::BTEqualStrategyNumber).unwrap_or(3);
            let equal = pg_sys::get_opfamily_member(family, input, input, strategy);
            let flags = pg_sys::TYPECACHE_EQ_OPR | HASH_FLAGS;
            let known = pg_sys::lookup_type_cache(of, flags.cast_signed());
            // The type cache has a hash function only where that agrees with the type's usual equality.
            if equal == pg_sys::InvalidOid
                || (*known).eq_opr != equal
                || (*known).hash_extended_proc == pg_sys::InvalidOid
            {
                return Self::Bytes;
            }
            Self::Type {
                of,
                collation,
                // What an extension's type, or one that is made of others, calls equal may hang on a collation, too.
                everywhere: is_deterministic && of.to_u32() < FIRST_OTHER_OID,
            }
        }
    }
}

const HASH_FLAGS: u32 =
    pg_sys::TYPECACHE_HASH_EXTENDED_PROC | pg_sys::TYPECACHE_HASH_EXTENDED_PROC_FINFO;

/// Whether values of a built-in type are equal exactly if their bytes are, under a deterministic collation.
fn is_bytewise(of: pg_sys::Oid) -> bool {
    matches!(
        of,
        pg_sys::BOOLOID
            | pg_sys::CHAROID
            | pg_sys::INT2OID
            | pg_sys::INT4OID
            | pg_sys::INT8OID
            | pg_sys::OIDOID
            | pg_sys::DATEOID
            | pg_sys::TIMEOID
            | pg_sys::TIMESTAMPOID
            | pg_sys::TIMESTAMPTZOID
            | pg_sys::MONEYOID
            | pg_sys::PG_LSNOID
            | pg_sys::XID8OID
            | pg_sys::MACADDROID
            | pg_sys::MACADDR8OID
            | pg_sys::UUIDOID
            | pg_sys::TEXTOID
            | pg_sys::VARCHAROID
            | pg_sys::BYTEAOID
            | pg_sys::NAMEOID
    )
}

/// A column of the key by which rows are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyPart {
    /// Its number in the table, from 1.
    pub attribute: i16,
    /// When its values are equal.
    pub equality: Equality,
}

/// By what a row is known that has a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyHashes {
    /// That of the stored bytes.
    pub stored: u64,
    /// The same for equal keys.
    pub equal: u64,
    everywhere: bool,
}

impl KeyHashes {
    /// All by which what is to be found by an equal key is remembered, and looked for.
    pub fn each(self) -> impl Iterator<Item = u64> {
        let stored = (!self.everywhere).then_some(self.stored);
        std::iter::once(self.equal).chain(stored)
    }

    /// Beside [`Self::equal`], the one that does not hang on this node; `None` where that is the only one.
    #[must_use]
    pub fn other(self) -> Option<u64> {
        self.each().nth(1)
    }
}

/// Both hashes in the making.
struct Hashing {
    stored: KeyHasher,
    equal: KeyHasher,
    everywhere: bool,
}

impl Hashing {
    fn new(seed: u32) -> Self {
        let hasher = KeyHasher::new(u64::from(seed));
        Self {
            stored: hasher,
            equal: hasher,
            everywhere: true,
        }
    }

    /// # Safety
    /// `value` is one of the column at `position`, from 0; in a transaction.
    unsafe fn feed(
        &mut self,
        equality: Equality,
        descriptor: pg_sys::TupleDesc,
        position: usize,
        value: Option<pg_sys::Datum>,
    ) {
        // SAFETY: as the caller says.
        unsafe {
            feed(&mut self.stored, descriptor, position, value);
            match (equality, value) {
                (Equality::Type { of, collation, .. }, Some(value)) => {
                    feed_equal(&mut self.equal, of, collation, value);
                }
                _ => feed(&mut self.equal, descriptor, position, value),
            }
        }
        self.everywhere &= !matches!(
            equality,
            Equality::Type {
                everywhere: false,
                ..
            }
        );
    }

    fn finish(self) -> KeyHashes {
        KeyHashes {
            stored: self.stored.finish(),
            equal: self.equal.finish(),
            everywhere: self.everywhere,
        }
    }
}

/// The type's own hash of a value, which is not null; `None` when the type has none any more.
///
/// # Safety
/// The value is one of the type; in a transaction.
unsafe fn hash_of_value(
    of: pg_sys::Oid,
    collation: pg_sys::Oid,
    value: pg_sys::Datum,
) -> Option<u64> {
    // SAFETY: as the caller says. The entry lives as long as the process, and was brought up to date just now; a seed of 0.
    unsafe {
        let known = pg_sys::lookup_type_cache(of, HASH_FLAGS.cast_signed());
        if (*known).hash_extended_proc_finfo.fn_oid == pg_sys::InvalidOid {
            return None;
        }
        let function = &raw mut (*known).hash_extended_proc_finfo;
        let hash =
            pg_sys::FunctionCall2Coll(function, collation, value, pg_sys::Datum::from(0_i64));
        Some(hash.value() as u64)
    }
}

/// Hash of the stored bytes of the row in `slot`: of its key's columns, of all where the table has no key.
///
/// # Safety
/// The slot holds a row of the table of `plan`, which is open.
pub unsafe fn key_hash(plan: &LocalRelation, slot: *mut pg_sys::TupleTableSlot) -> u64 {
    let mut hasher = KeyHasher::new(u64::from(plan.oid.to_u32()));
    // SAFETY: as the caller says.
    unsafe {
        each_column(plan, slot, |_, descriptor, position, value| {
            feed(&mut hasher, descriptor, position, value);
        });
    }
    hasher.finish()
}

/// The same of all columns, as [`key_hash`] has it where the table has no key.
///
/// # Safety
/// The slot holds a row of the table with this OID; in a transaction.
pub unsafe fn stored_row_hash(table: u32, slot: *mut pg_sys::TupleTableSlot) -> u64 {
    let mut hasher = KeyHasher::new(u64::from(table));
    // SAFETY: as the caller says.
    unsafe {
        let descriptor = (*slot).tts_tupleDescriptor;
        for (position, value) in super::image::fields(slot).into_iter().enumerate() {
            feed(&mut hasher, descriptor, position, value);
        }
    }
    hasher.finish()
}

/// Both hashes of the row in `slot`, as in the table with OID `seed`.
///
/// # Safety
/// As [`key_hash`]; in a transaction.
pub unsafe fn key_hashes_as(
    seed: u32,
    plan: &LocalRelation,
    slot: *mut pg_sys::TupleTableSlot,
) -> KeyHashes {
    let mut hashing = Hashing::new(seed);
    // SAFETY: as the caller says.
    unsafe {
        each_column(plan, slot, |equality, descriptor, position, value| {
            hashing.feed(equality, descriptor, position, value);
        });
    }
    hashing.finish()
}

/// Hash of the row in `slot` by which it is known everywhere, of the stream's columns, where the table has no key.
///
/// # Safety
/// As [`key_hash`]; in a transaction.
pub unsafe fn row_hash_by(plan: &LocalRelation, slot: *mut pg_sys::TupleTableSlot) -> u64 {
    let mut hash = RowHash::new(plan.row_hash);
    // SAFETY: as the caller says; the columns' numbers are those of the table.
    unsafe {
        let descriptor = (*slot).tts_tupleDescriptor;
        let natts = (*descriptor).natts;
        if i32::from((*slot).tts_nvalid) < natts {
            pg_sys::slot_getsomeattrs_int(slot, natts);
        }
        for column in &plan.columns {
            let is_null = *(*slot).tts_isnull.add(column.local);
            let value = (!is_null).then(|| *(*slot).tts_values.add(column.local));
            hash.feed(column.name_hash, descriptor, column.local, value);
        }
    }
    hash.finish()
}

/// Hand on the columns that are hashed.
///
/// # Safety
/// As [`key_hash`].
unsafe fn each_column(
    plan: &LocalRelation,
    slot: *mut pg_sys::TupleTableSlot,
    mut hand_on: impl FnMut(Equality, pg_sys::TupleDesc, usize, Option<pg_sys::Datum>),
) {
    // SAFETY: as the caller says; the columns' numbers are those of the table, and slots have its descriptor.
    unsafe {
        let descriptor = (*slot).tts_tupleDescriptor;
        let natts = (*descriptor).natts;
        let last = match &plan.key {
            Some(key) => key
                .columns
                .iter()
                .map(|column| i32::from(column.attribute))
                .max()
                .unwrap_or(natts),
            None => natts,
        };
        if i32::from((*slot).tts_nvalid) < last {
            pg_sys::slot_getsomeattrs_int(slot, last);
        }
        let mut column = |equality, position: usize| {
            let is_null = *(*slot).tts_isnull.add(position);
            let value = (!is_null).then(|| *(*slot).tts_values.add(position));
            hand_on(equality, descriptor, position, value);
        };
        match &plan.key {
            Some(key) => {
                for place in &key.columns {
                    let position = usize::try_from(place.attribute - 1).unwrap_or(0);
                    column(place.equality, position);
                }
            }
            None => {
                for position in 0..usize::try_from(natts).unwrap_or(0) {
                    column(Equality::Bytes, position);
                }
            }
        }
    }
}

/// The same of the row that has these values, as in the table with OID `seed`. `None` where the table has no key, or the values lack some of it.
///
/// # Safety
/// The values are those of columns of the table of `plan`, whose descriptor this is; in a transaction.
pub unsafe fn key_hashes_of_values(
    seed: u32,
    plan: &LocalRelation,
    descriptor: pg_sys::TupleDesc,
    values: &RowValues,
) -> Option<KeyHashes> {
    let mut hashing = Hashing::new(seed);
    for place in &plan.key.as_ref()?.columns {
        let position = usize::try_from(place.attribute - 1).ok()?;
        let value = values.get(position).copied().flatten().flatten()?;
        // SAFETY: as the caller says.
        unsafe { hashing.feed(place.equality, descriptor, position, Some(value)) };
    }
    Some(hashing.finish())
}

/// The same of a row that was taken apart, by the columns of its key in the order in which the index has them.
/// `None` where one of them is null, or not in the row but elsewhere.
///
/// # Safety
/// `values` and `nulls` are a row of the relation with this OID and descriptor; in a transaction.
pub unsafe fn key_hashes_of_row(
    relation: pg_sys::Oid,
    descriptor: pg_sys::TupleDesc,
    key: &[KeyPart],
    values: &[pg_sys::Datum],
    nulls: &[bool],
) -> Option<KeyHashes> {
    let mut hashing = Hashing::new(relation.to_u32());
    for part in key {
        let position = usize::try_from(part.attribute - 1).ok()?;
        if *nulls.get(position)? {
            return None;
        }
        let value = *values.get(position)?;
        // SAFETY: as the caller says.
        unsafe {
            let is_varlena = (*compat::TupleDescAttr(descriptor, position)).attlen == -1;
            if is_varlena && pgrx::varatt_is_1b_e(value.cast_mut_ptr()) {
                return None;
            }
            hashing.feed(part.equality, descriptor, position, Some(value));
        }
    }
    Some(hashing.finish())
}

/// Feed a value, or that there is none.
///
/// # Safety
/// `value` is one of the column at `position`, from 0; in a transaction.
pub(super) unsafe fn feed(
    hasher: &mut KeyHasher,
    descriptor: pg_sys::TupleDesc,
    position: usize,
    value: Option<pg_sys::Datum>,
) {
    let Some(value) = value else {
        hasher.word(u64::MAX);
        return;
    };
    // SAFETY: as the caller says.
    unsafe {
        let attribute = compat::TupleDescAttr(descriptor, position);
        let of = (*attribute).atttypid;
        if is_portable(of) {
            let stored = ((*attribute).attlen, (*attribute).attbyval);
            feed_stored(hasher, stored, value);
        } else {
            feed_portable(hasher, of, value);
        }
    }
}

/// Feed the bytes of a value of a type with this length, passed by value or not.
///
/// # Safety
/// `value` is of such a type.
unsafe fn feed_stored(
    hasher: &mut KeyHasher,
    (length, by_value): (i16, bool),
    value: pg_sys::Datum,
) {
    // SAFETY: as the caller says.
    unsafe {
        match length {
            _ if by_value => hasher.word(value.value() as u64),
            -1 => {
                let packed = pg_sys::pg_detoast_datum_packed(value.cast_mut_ptr());
                hasher.bytes(pgrx::varlena_to_byte_slice(packed));
            }
            -2 => hasher.bytes(std::ffi::CStr::from_ptr(value.cast_mut_ptr()).to_bytes()),
            length => hasher.bytes(std::slice::from_raw_parts(
                value.cast_mut_ptr::<u8>(),
                usize::try_from(length).unwrap_or(0),
            )),
        }
    }
}

/// The columns of the key that identifies a table's rows, in the key's order: that of the replica
/// identity, or else the primary key.
///
/// # Safety
/// The relation is open; in a transaction with a snapshot for catalogs.
pub unsafe fn identity_key(relation: pg_sys::Relation) -> Option<Vec<KeyPart>> {
    // SAFETY: as the caller says; the index is open while it is read, and its columns are the relation's.
    unsafe {
        let replica = pg_sys::RelationGetReplicaIndex(relation);
        let index = if replica == pg_sys::InvalidOid {
            compat::primary_key_index(relation)
        } else {
            replica
        };
        if index == pg_sys::InvalidOid {
            return None;
        }
        let index = pg_sys::RelationIdGetRelation(index);
        if index.is_null() {
            return None;
        }
        let shape = (*index).rd_index;
        let count = usize::try_from((*shape).indnkeyatts).unwrap_or(0);
        let columns = (*shape).indkey.values.as_slice(count).iter().enumerate();
        let part = |(position, attribute): (usize, &i16)| {
            // An expression has number 0; such an index is nobody's identity.
            let column = usize::try_from(*attribute).ok()?.checked_sub(1)?;
            let declared = (*compat::TupleDescAttr((*relation).rd_att, column)).atttypid;
            Some(KeyPart {
                attribute: *attribute,
                equality: Equality::of(index, position, declared),
            })
        };
        let parts = columns.map(part).collect();
        pg_sys::RelationClose(index);
        parts
    }
}
