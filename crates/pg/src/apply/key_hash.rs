//! The hash by which a row is remembered that has no place of its own: one of a batch, or one that was deleted. Of its table and
//! the stored bytes of its key. Run by the appliers, and by the collector of deletions.
//!
//! The same stored row always gives the same hash; rows that are equal without being the same may give others.

use braid_decoder::KeyHasher;
use pgrx::pg_sys;

use super::relation::LocalRelation;
use super::table::RowValues;
use crate::compat;

/// What stands for all rows of a table, where one of them would have its hash: the seed of no row's.
#[must_use]
pub fn table_hash(relation: u32) -> u64 {
    KeyHasher::new(u64::from(relation) | 1 << 32).finish()
}

/// Where hashes begin of rows that came from elsewhere: above all others.
const COPIED_ROWS: u64 = 1 << 33;

/// Hash of the row in `slot`: by its key's columns, by all where the table has no key.
///
/// # Safety
/// The slot holds a row of the table of `plan`, which is open.
pub unsafe fn key_hash(plan: &LocalRelation, slot: *mut pg_sys::TupleTableSlot) -> u64 {
    // SAFETY: as the caller says.
    unsafe { key_hash_as(plan.oid.to_u32(), plan, slot) }
}

/// The same, as in the table with OID `seed`.
///
/// # Safety
/// As [`key_hash`].
pub unsafe fn key_hash_as(
    seed: u32,
    plan: &LocalRelation,
    slot: *mut pg_sys::TupleTableSlot,
) -> u64 {
    let mut hasher = KeyHasher::new(u64::from(seed));
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
        let mut column = |position: usize| {
            let is_null = *(*slot).tts_isnull.add(position);
            let value = (!is_null).then(|| *(*slot).tts_values.add(position));
            feed(&mut hasher, descriptor, position, value);
        };
        match &plan.key {
            Some(key) => {
                for place in &key.columns {
                    column(usize::try_from(place.attribute - 1).unwrap_or(0));
                }
            }
            None => {
                for position in 0..usize::try_from(natts).unwrap_or(0) {
                    column(position);
                }
            }
        }
    }
    hasher.finish()
}

/// What stands for a hash that comes from elsewhere, of a row that was copied into the table with this OID: other than all hashes that are
/// computed here, as tables elsewhere may well have the OIDs of other tables here.
#[must_use]
pub fn copied_hash(relation: u32, hash: u64) -> u64 {
    let mut hasher = KeyHasher::new(COPIED_ROWS);
    hasher.word(u64::from(relation));
    hasher.word(hash);
    hasher.finish()
}

/// The same of the row that has these values, as in the table with OID `seed`. `None` where the table has no key, or the values lack some of it.
///
/// # Safety
/// The values are those of columns of the table of `plan`, whose descriptor this is.
pub unsafe fn key_hash_of_values(
    seed: u32,
    plan: &LocalRelation,
    descriptor: pg_sys::TupleDesc,
    values: &RowValues,
) -> Option<u64> {
    let mut hasher = KeyHasher::new(u64::from(seed));
    for place in &plan.key.as_ref()?.columns {
        let position = usize::try_from(place.attribute - 1).ok()?;
        let value = values.get(position).copied().flatten().flatten()?;
        // SAFETY: as the caller says.
        unsafe { feed(&mut hasher, descriptor, position, Some(value)) };
    }
    Some(hasher.finish())
}

/// The same of a row that was taken apart. `key` is the numbers of its key's columns, in the order in which the index has them.
/// `None` where one of them is null, or not in the row but elsewhere.
///
/// # Safety
/// `values` and `nulls` are a row of the relation with this OID and descriptor.
pub unsafe fn key_hash_of_row(
    relation: pg_sys::Oid,
    descriptor: pg_sys::TupleDesc,
    key: &[i16],
    values: &[pg_sys::Datum],
    nulls: &[bool],
) -> Option<u64> {
    let mut hasher = KeyHasher::new(u64::from(relation.to_u32()));
    for attribute in key {
        let position = usize::try_from(attribute - 1).ok()?;
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
            feed(&mut hasher, descriptor, position, Some(value));
        }
    }
    Some(hasher.finish())
}

/// # Safety
/// `value` is one of the column at `position`, from 0.
unsafe fn feed(
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
        match (*attribute).attlen {
            _ if (*attribute).attbyval => hasher.word(value.value() as u64),
            -1 => {
                let packed = pg_sys::pg_detoast_datum_packed(value.cast_mut_ptr());
                hasher.bytes(pgrx::varlena_to_byte_slice(packed));
            }
            -2 => hasher.bytes(std::ffi::CStr::from_ptr(value.cast_mut_ptr()).to_bytes()),
            len => hasher.bytes(std::slice::from_raw_parts(
                value.cast_mut_ptr::<u8>(),
                usize::try_from(len).unwrap_or(0),
            )),
        }
    }
}
