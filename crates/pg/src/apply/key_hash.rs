//! The hash by which a batch remembers a row: of its table and the stored bytes of its key. Run by the appliers.
//!
//! The same stored row always gives the same hash; rows that are equal without being the same may give others.

use braid_decoder::KeyHasher;
use pgrx::pg_sys;

use super::relation::LocalRelation;
use crate::compat;

/// Hash of the row in `slot`: by its key's columns, by all where the table has no key.
///
/// # Safety
/// The slot holds a row of the table of `plan`, which is open.
pub unsafe fn key_hash(plan: &LocalRelation, slot: *mut pg_sys::TupleTableSlot) -> u64 {
    let mut hasher = KeyHasher::new(u64::from(plan.oid.to_u32()));
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
        let mut feed = |position: usize| {
            if *(*slot).tts_isnull.add(position) {
                hasher.word(u64::MAX);
                return;
            }
            let value = *(*slot).tts_values.add(position);
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
        };
        match &plan.key {
            Some(key) => {
                for column in &key.columns {
                    feed(usize::try_from(column.attribute - 1).unwrap_or(0));
                }
            }
            None => {
                for position in 0..usize::try_from(natts).unwrap_or(0) {
                    feed(position);
                }
            }
        }
    }
    hasher.finish()
}
