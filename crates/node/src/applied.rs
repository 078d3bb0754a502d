//! `braid.applied`: the transactions that each applier has committed although earlier ones are not
//! committed (`braid_bgworker::applied`). Written by the appliers, each its own row, in the commits
//! that the row describes; read by the leader when it starts.
//!
//! A row is written once a commit, in place and within its page if possible. It is looked up at the
//! place where it was written last: a scan of its index would read all its versions that some old
//! snapshot may still see.

use braid_bgworker::applied::{Applied, AppliedAhead, Range};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::parse_lsn;
use braid_postgres::compat;
use braid_postgres::error::PgError;
use braid_postgres::lock::LockMode;
use braid_postgres::names::own_table;
use pgrx::pg_sys;

use crate::subscription::{execute, rows};

/// F_INT4EQ of src/include/utils/fmgroids.h.
const INT4_EQUAL: u32 = 65;

fn ranges(cells: &[Vec<Option<String>>]) -> Result<Vec<Range>, PgError> {
    let mut ranges = Vec::new();
    for text in cells.iter().flatten().flatten() {
        let lsns: Option<Vec<u64>> = text.split(',').map(parse_lsn).collect();
        let pairs = lsns.as_deref().map(|lsns| lsns.as_chunks::<2>());
        let Some((pairs, [])) = pairs else {
            return Err(PgError::new(
                SqlState::DataCorrupted,
                "a row of braid.applied is corrupt",
            ));
        };
        ranges.extend(pairs.iter().map(|[begin, end]| (*begin, *end)));
    }
    Ok(ranges)
}

/// Returns what all appliers of a subscription have committed beyond `mark`. Rows that are not
/// beyond it are removed. In the caller's transaction, while no applier runs.
///
/// # Errors
/// Those of SPI; XX001.
pub fn ahead_of(subscription_id: u32, mark: u64) -> Result<AppliedAhead, PgError> {
    let id = i64::from(subscription_id);
    let found = rows(
        "select array_to_string(ranges, ',') from braid.applied where subscription_id = $1 and ranges <> '{}'",
        &[id.into()],
    )?;
    let ahead = AppliedAhead::new(ranges(&found)?, mark);
    if ahead.is_empty() && !found.is_empty() {
        execute(
            "delete from braid.applied where subscription_id = $1",
            &[id.into()],
        )?;
    }
    Ok(ahead)
}

/// An applier's own row.
#[derive(Debug)]
pub struct AppliedRow {
    subscription_id: u32,
    number: usize,
    /// Where it was written last.
    place: Option<pg_sys::ItemPointerData>,
}

impl AppliedRow {
    /// The row of an applier.
    #[must_use]
    pub fn new(subscription_id: u32, number: usize) -> Self {
        Self {
            subscription_id,
            number,
            place: None,
        }
    }

    /// Reads the row's ranges beyond `mark`. In the caller's transaction.
    ///
    /// # Errors
    /// Those of SPI; XX001.
    pub fn read(&self, mark: u64) -> Result<Applied, PgError> {
        let found = rows(
            "select array_to_string(ranges, ',') from braid.applied where subscription_id = $1 and applier = $2 and ranges <> '{}'",
            &[
                i64::from(self.subscription_id).into(),
                i64::try_from(self.number).unwrap_or(i64::MAX).into(),
            ],
        )?;
        Ok(Applied::resume(ranges(&found)?, mark))
    }

    /// Writes `applied` into the row, in the current transaction, which is committed next.
    ///
    /// # Errors
    /// Those of PostgreSQL.
    pub fn write(&mut self, applied: &Applied) -> Result<(), PgError> {
        let oid = own_table("applied")?;
        let keys = [
            pg_sys::Datum::from(self.subscription_id.cast_signed()),
            pg_sys::Datum::from(i32::try_from(self.number).unwrap_or(i32::MAX)),
        ];
        let mut lsns: Vec<pg_sys::Datum> = applied
            .ranges()
            .iter()
            .flat_map(|(begin, end)| [*begin, *end])
            .map(|lsn| pg_sys::Datum::from(lsn.cast_signed()))
            .collect();
        // SAFETY: in a transaction with an active snapshot, as the process's own user; the values
        // have the types of the table's columns, and pg_lsn is an 8-byte value that is passed by
        // value and aligned as a double. The row that is updated is one that was found under the
        // lock which is held to the end.
        unsafe {
            let relation = pg_sys::table_open(oid, lock());
            let array = pg_sys::construct_array(
                lsns.as_mut_ptr(),
                i32::try_from(lsns.len()).unwrap_or(0),
                pg_sys::PG_LSNOID,
                8,
                true,
                b'd'.cast_signed(),
            );
            let [subscription, number] = keys;
            let mut values = [subscription, number, pg_sys::Datum::from(array)];
            let mut nulls = [false; 3];
            let tuple = pg_sys::heap_form_tuple(
                (*relation).rd_att,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            match self.find(relation, keys) {
                Some(mut place) => pg_sys::CatalogTupleUpdate(relation, &raw mut place, tuple),
                None => pg_sys::CatalogTupleInsert(relation, tuple),
            }
            self.place = Some((*tuple).t_self);
            pg_sys::heap_freetuple(tuple);
            pg_sys::table_close(relation, LockMode::None.as_raw());
        }
        Ok(())
    }

    /// Where the row is.
    ///
    /// # Safety
    /// `relation` is the table, locked to the end of the transaction, which has an active snapshot.
    unsafe fn find(
        &self,
        relation: pg_sys::Relation,
        keys: [pg_sys::Datum; 2],
    ) -> Option<pg_sys::ItemPointerData> {
        // SAFETY: as the caller says.
        unsafe {
            match self.place {
                // The last write may have been rolled back, or the table may have been rewritten.
                Some(place) if is_at(relation, place, keys) => Some(place),
                _ => look_up(relation, keys),
            }
        }
    }
}

fn lock() -> i32 {
    LockMode::RowExclusive.as_raw()
}

/// Whether the row with these keys is visible at this place.
unsafe fn is_at(
    relation: pg_sys::Relation,
    mut place: pg_sys::ItemPointerData,
    keys: [pg_sys::Datum; 2],
) -> bool {
    // SAFETY: the table is open; the block is one that it has; the slot is of the table's kind and
    // freed in this function. A line pointer that holds no row gives none.
    unsafe {
        let blocks =
            pg_sys::RelationGetNumberOfBlocksInFork(relation, pg_sys::ForkNumber::MAIN_FORKNUM);
        if pgrx::itemptr::item_pointer_get_block_number_no_check(place) >= blocks {
            return false;
        }
        let Some(fetch) = (*(*relation).rd_tableam).tuple_fetch_row_version else {
            return false;
        };
        let slot = pg_sys::table_slot_create(relation, std::ptr::null_mut());
        let snapshot = pg_sys::GetActiveSnapshot();
        let there =
            pg_sys::ffi::pg_guard_ffi_boundary(|| fetch(relation, &raw mut place, snapshot, slot));
        let mut same = there;
        if there {
            pg_sys::slot_getsomeattrs_int(slot, 2);
            for (column, key) in keys.iter().enumerate() {
                // Both are integers: the bytes above their four do not count.
                let difference = (*(*slot).tts_values.add(column)).value() ^ key.value();
                same &= difference & 0xffff_ffff == 0;
            }
        }
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        same
    }
}

/// The place of the row with these keys, through the index.
unsafe fn look_up(
    relation: pg_sys::Relation,
    keys: [pg_sys::Datum; 2],
) -> Option<pg_sys::ItemPointerData> {
    // SAFETY: the scan ends in this function; the tuple's place is read before that.
    unsafe {
        let index = compat::primary_key_index(relation);
        let mut scan_keys = [pg_sys::ScanKeyData::default(); 2];
        for ((scan_key, key), column) in scan_keys.iter_mut().zip(keys).zip(1..) {
            pg_sys::ScanKeyInit(
                scan_key,
                column,
                3, // BTEqualStrategyNumber
                pg_sys::Oid::from(INT4_EQUAL),
                key,
            );
        }
        let scan = pg_sys::systable_beginscan(
            relation,
            index,
            true,
            pg_sys::GetActiveSnapshot(),
            2,
            scan_keys.as_mut_ptr(),
        );
        let tuple = pg_sys::systable_getnext(scan);
        let place = (!tuple.is_null()).then(|| (*tuple).t_self);
        pg_sys::systable_endscan(scan);
        place
    }
}
