//! Finding a row by all of its values, in a scan of the whole table: for tables that no unique key identifies. Run by the appliers.
//!
//! The provider's old row is looked for byte for byte first. Rows that are equal without being the
//! same (1.0 and 1.00) are different rows there, and types that have no equality (json) are values
//! like any other. If no row is identical, an equal one is looked for: some values have several
//! byte forms, which one depends on how they came (tsquery, as text or as binary). Values are equal
//! where the type's own equality says so; those of a type without one (json, point, xml, arrays and
//! rows of these), if they have the same text. Columns that only this node has are not looked at.

use braid_postgres::compat;
use braid_postgres::error::PgError;
use braid_postgres::heap_page::{Place, place_of};
use pgrx::pg_sys;

use super::lookup::lock_row;
use super::table::RowValues;
use super::version::Stamp;

/// When a row is the one that is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Likeness {
    /// Byte for byte.
    Identical,
    /// Value for value.
    Equal,
}

/// Find and lock a row that is like `values`, into `slot`, other than those at `passed_over`.
/// `None`: there is none.
///
/// # Errors
/// Whatever PostgreSQL raises.
///
/// # Safety
/// `table` is open and locked; `slot` is one of its own kind (`table_slot_create`).
pub unsafe fn find_like(
    table: pg_sys::Relation,
    slot: *mut pg_sys::TupleTableSlot,
    values: &RowValues,
    passed_over: &[Place],
    likeness: Likeness,
) -> Result<Option<Stamp>, PgError> {
    loop {
        let mut dirty: Box<pg_sys::SnapshotData> = Box::default();
        dirty.snapshot_type = pg_sys::SnapshotType::SNAPSHOT_DIRTY;
        // SAFETY: the boxed snapshot outlives the scan, which ends below.
        unsafe {
            let scan = begin(table, &raw mut *dirty)?;
            let mut writer = pg_sys::InvalidTransactionId;
            let mut found = Ok(None);
            let mut changed = false;
            // For what comparing one row leaves. Below the current context, it goes with that after
            // an error.
            let memory = pg_sys::AllocSetContextCreateInternal(
                pg_sys::CurrentMemoryContext,
                c"braid scan".as_ptr(),
                pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
                pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
                pg_sys::ALLOCSET_SMALL_MAXSIZE as usize,
            );
            while next(table, scan, slot) {
                pgrx::check_for_interrupts!();
                if passed_over.contains(&place_of((*slot).tts_tid)) {
                    continue;
                }
                let before = pg_sys::MemoryContextSwitchTo(memory);
                let is_like = is_like(slot, values, likeness);
                pg_sys::MemoryContextSwitchTo(before);
                if !is_like {
                    if likeness == Likeness::Equal {
                        pg_sys::MemoryContextReset(memory);
                    }
                    continue;
                }
                writer = [dirty.xmin, dirty.xmax]
                    .into_iter()
                    .find(|xid| *xid != pg_sys::InvalidTransactionId)
                    .unwrap_or(pg_sys::InvalidTransactionId);
                if writer == pg_sys::InvalidTransactionId {
                    // Before the scan ends: the slot's row is the scan's until locking puts it in anew.
                    found = lock_row(table, slot);
                    changed = matches!(found, Ok(None));
                }
                break;
            }
            pg_sys::MemoryContextDelete(memory);
            if !matches!(found, Ok(Some(_))) {
                super::clear_slot(slot);
            }
            end(table, scan);
            if writer != pg_sys::InvalidTransactionId {
                pg_sys::XactLockTableWait(
                    writer,
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    pg_sys::XLTW_Oper::XLTW_None,
                );
            } else if !changed {
                return found;
            }
        }
    }
}

/// `table_beginscan` of src/include/access/tableam.h.
///
/// # Safety
/// `table` is open and locked; the snapshot outlives the scan.
pub(super) unsafe fn begin(
    table: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
) -> Result<pg_sys::TableScanDesc, PgError> {
    let flags = pg_sys::ScanOptions::SO_TYPE_SEQSCAN
        | pg_sys::ScanOptions::SO_ALLOW_STRAT
        | pg_sys::ScanOptions::SO_ALLOW_SYNC
        | pg_sys::ScanOptions::SO_ALLOW_PAGEMODE;
    // SAFETY: the table is open; the access method's function is called behind pgrx's guard.
    unsafe {
        let Some(begin) = (*(*table).rd_tableam).scan_begin else {
            return Err(PgError::new("0A000", "table access method cannot scan"));
        };
        let none = std::ptr::null_mut();
        Ok(pg_sys::ffi::pg_guard_ffi_boundary(|| {
            begin(table, snapshot, 0, none, std::ptr::null_mut(), flags)
        }))
    }
}

/// The next row, into `slot`; false at the end.
///
/// # Safety
/// `scan` is one of `table`, and `slot` is of the table's own kind.
pub(super) unsafe fn next(
    table: pg_sys::Relation,
    scan: pg_sys::TableScanDesc,
    slot: *mut pg_sys::TupleTableSlot,
) -> bool {
    // SAFETY: as in `begin`; the slot is of the table's kind.
    unsafe {
        (*(*table).rd_tableam).scan_getnextslot.is_some_and(|next| {
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                next(scan, pg_sys::ScanDirection::ForwardScanDirection, slot)
            })
        })
    }
}

/// # Safety
/// `scan` is one of `table`, and is ended once.
pub(super) unsafe fn end(table: pg_sys::Relation, scan: pg_sys::TableScanDesc) {
    // SAFETY: as in `begin`; each scan is ended once.
    unsafe {
        if let Some(end) = (*(*table).rd_tableam).scan_end {
            pg_sys::ffi::pg_guard_ffi_boundary(|| end(scan));
        }
    }
}

/// Whether the row in `slot` has these values; what is not given may be anything.
unsafe fn is_like(
    slot: *mut pg_sys::TupleTableSlot,
    values: &RowValues,
    likeness: Likeness,
) -> bool {
    // SAFETY: the slot holds a row; its arrays have a place for each of the table's columns.
    unsafe {
        let descriptor = (*slot).tts_tupleDescriptor;
        let natts = (*descriptor).natts;
        if i32::from((*slot).tts_nvalid) < natts {
            pg_sys::slot_getsomeattrs_int(slot, natts);
        }
        let columns = values
            .iter()
            .take(usize::try_from(natts).unwrap_or(0))
            .enumerate();
        for (position, value) in columns {
            let Some(value) = value else { continue };
            let here = *(*slot).tts_values.add(position);
            let same = match (value, *(*slot).tts_isnull.add(position)) {
                (None, is_null) => is_null,
                (Some(_), true) => false,
                (Some(value), false) => {
                    let attribute = &*compat::TupleDescAttr(descriptor, position);
                    same_datum(*value, here, attribute.attbyval, attribute.attlen)
                        || (likeness == Likeness::Equal && equal(attribute, *value, here))
                }
            };
            if !same {
                return false;
            }
        }
        true
    }
}

/// Whether two values of a column, which are not null, are equal: by the type's own equality if it
/// has one, else by their text.
///
/// # Safety
/// Both are values of the column; in a transaction.
unsafe fn equal(
    attribute: &pg_sys::FormData_pg_attribute,
    one: pg_sys::Datum,
    other: pg_sys::Datum,
) -> bool {
    // SAFETY: as the caller says. The type cache's entry lives as long as the process, and what the
    // function keeps as long as the entry. Arrays and rows have an equality there if all that they
    // are made of has one.
    unsafe {
        let flags = pg_sys::TYPECACHE_EQ_OPR_FINFO.cast_signed();
        let known = pg_sys::lookup_type_cache(attribute.atttypid, flags);
        let function = &raw mut (*known).eq_opr_finfo;
        if (*function).fn_oid != pg_sys::InvalidOid {
            let is_equal = pg_sys::FunctionCall2Coll(function, attribute.attcollation, one, other);
            return is_equal.value() & 0xFF != 0;
        }
        let mut output = pg_sys::InvalidOid;
        let mut is_varlena = false;
        pg_sys::getTypeOutputInfo(attribute.atttypid, &raw mut output, &raw mut is_varlena);
        let texts = [one, other].map(|value| pg_sys::OidOutputFunctionCall(output, value));
        let [one, other] = texts.map(|text| std::ffi::CStr::from_ptr(text));
        let is_equal = one == other;
        for text in texts {
            pg_sys::pfree(text.cast());
        }
        is_equal
    }
}

/// `datum_image_eq` of src/backend/utils/adt/datum.c, which the bindings lack.
unsafe fn same_datum(
    one: pg_sys::Datum,
    other: pg_sys::Datum,
    by_value: bool,
    length: i16,
) -> bool {
    if by_value {
        return one == other;
    }
    // SAFETY: both are values of the type that `length` belongs to.
    unsafe {
        match length {
            -1 => {
                if pg_sys::toast_raw_datum_size(one) != pg_sys::toast_raw_datum_size(other) {
                    return false;
                }
                let (one, free_one) = detoasted(one);
                let (other, free_other) = detoasted(other);
                let same = pgrx::varlena_to_byte_slice(one) == pgrx::varlena_to_byte_slice(other);
                for (value, free) in [(one, free_one), (other, free_other)] {
                    if free {
                        pg_sys::pfree(value.cast());
                    }
                }
                same
            }
            -2 => {
                std::ffi::CStr::from_ptr(one.cast_mut_ptr())
                    == std::ffi::CStr::from_ptr(other.cast_mut_ptr())
            }
            _ => {
                let length = usize::try_from(length).unwrap_or(0);
                std::slice::from_raw_parts(one.cast_mut_ptr::<u8>(), length)
                    == std::slice::from_raw_parts(other.cast_mut_ptr::<u8>(), length)
            }
        }
    }
}

/// The plain value, and whether it was made for this.
unsafe fn detoasted(value: pg_sys::Datum) -> (*mut pg_sys::varlena, bool) {
    let stored = value.cast_mut_ptr::<pg_sys::varlena>();
    // SAFETY: the caller gives a variable-length value.
    let plain = unsafe { pg_sys::pg_detoast_datum_packed(stored) };
    (plain, plain != stored)
}
