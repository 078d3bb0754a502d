//! Indexes of a table that is open for writing, as the executor has them. Run by processes that
//! write rows.

use std::marker::PhantomData;
use std::ptr::NonNull;

use pgrx::pg_sys;

use crate::plain;
use crate::relation::{IndexRef, RelationRef};
use crate::scan_key;
use crate::syscache::ColumnOperators;

/// `SK_ISNULL | SK_SEARCHNULL` of src/include/access/skey.h.
const SEARCH_NULL: i32 = 0x0001 | 0x0040;
/// `BTEqualStrategyNumber` of src/include/access/stratnum.h.
const EQUAL: i16 = 3;

/// An index that is open for writing, with the executor's description of it.
#[derive(Debug, Clone, Copy)]
pub struct TargetIndex<'t> {
    index: IndexRef<'t>,
    info: NonNull<pg_sys::IndexInfo>,
    lives: PhantomData<&'t pg_sys::IndexInfo>,
}

impl<'t> TargetIndex<'t> {
    /// The indexes of a table.
    ///
    /// # Safety
    /// The table and its indexes are open, and stay so for `'t`.
    #[must_use]
    pub unsafe fn all(target: *mut pg_sys::ResultRelInfo) -> Vec<Self> {
        // SAFETY: as the caller says; the arrays have as many members as there are indexes.
        unsafe {
            let count = usize::try_from((*target).ri_NumIndices).unwrap_or(0);
            let one = |position| {
                let index = *(*target).ri_IndexRelationDescs.add(position);
                let info = *(*target).ri_IndexRelationInfo.add(position);
                Some(Self {
                    index: RelationRef::from_ptr(index)?.index()?,
                    info: NonNull::new(info)?,
                    lives: PhantomData,
                })
            };
            (0..count).filter_map(one).collect()
        }
    }

    /// The index.
    #[must_use]
    pub fn index(self) -> IndexRef<'t> {
        self.index
    }

    /// PostgreSQL's own pointer to the executor's description, valid for `'t`.
    #[must_use]
    pub fn info(self) -> *mut pg_sys::IndexInfo {
        self.info.as_ptr()
    }

    fn known(&self) -> &pg_sys::IndexInfo {
        // SAFETY: it exists for `'t`. It changes in calls, during which nobody holds this
        // reference.
        unsafe { self.info.as_ref() }
    }

    /// Whether it belongs to an exclusion constraint.
    #[must_use]
    pub fn excludes(self) -> bool {
        !self.known().ii_ExclusionOps.is_null()
    }

    /// Whether it is unique.
    #[must_use]
    pub fn is_unique(self) -> bool {
        self.known().ii_Unique
    }

    /// Whether its constraint is checked at once, and not when the transaction ends.
    #[must_use]
    pub fn is_immediate(self) -> bool {
        self.index.indimmediate
    }

    /// Whether it keeps rows out of the table.
    #[must_use]
    pub fn is_constraint(self) -> bool {
        self.known().ii_ReadyForInserts
            && (self.excludes() || (self.is_unique() && self.index.is_btree()))
    }

    /// Whether a row is entered into it by its columns alone, and if it is unique, checked at once.
    #[must_use]
    pub fn is_plain(self) -> bool {
        let known = self.known();
        (self.index.is_btree() || self.index.is_hash())
            && known.ii_Expressions.is_null()
            && known.ii_Predicate.is_null()
            && !self.excludes()
            && (!self.is_unique() || self.is_immediate())
    }

    /// How many of its columns are the key.
    #[must_use]
    pub fn key_length(self) -> usize {
        usize::try_from(self.known().ii_NumIndexKeyAttrs).unwrap_or(0)
    }

    /// Keys for a search, column by column, that finds rows that conflict under the constraint with
    /// a row with these values. Returns `None` if none can: a null conflicts with nothing.
    ///
    /// # Safety
    /// The values are of the index's key columns, and exist as long as the keys are used.
    #[must_use]
    pub unsafe fn keys(
        self,
        values: &[pg_sys::Datum],
        nulls: &[bool],
    ) -> Option<Vec<pg_sys::ScanKeyData>> {
        let mut keys = Vec::with_capacity(values.len());
        let columns = values.iter().zip(nulls).zip(self.index.operators());
        for (position, ((value, is_null), operators)) in columns.enumerate() {
            if *is_null && !self.known().ii_NullsNotDistinct {
                return None;
            }
            let (strategy, procedure) = self.comparison(position, operators);
            let (flags, procedure) = if *is_null {
                (SEARCH_NULL, pg_sys::InvalidOid)
            } else {
                (0, procedure)
            };
            let how = (strategy, procedure, operators.collation);
            keys.push(scan_key::new(position, flags, how, *value));
        }
        Some(keys)
    }

    /// The strategy and the function by which a column is compared.
    fn comparison(self, position: usize, operators: ColumnOperators) -> (u16, pg_sys::Oid) {
        if self.excludes() {
            let known = self.known();
            // SAFETY: an exclusion constraint has a strategy and a function for each key column.
            return unsafe {
                (
                    *known.ii_ExclusionStrats.add(position),
                    *known.ii_ExclusionProcs.add(position),
                )
            };
        }
        let (family, input) = (operators.family, operators.input);
        let operator = plain::get_opfamily_member(family, input, input, EQUAL);
        (EQUAL.cast_unsigned(), plain::get_opcode(operator))
    }
}
