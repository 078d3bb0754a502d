//! Arithmetic and comparison of values of a column that has a rule. Run by the appliers.

use std::cmp::Ordering;

use braid_bgworker::column_rule::Values;
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::table_scan::low;
use braid_postgres::type_cache::CachedType;
use braid_postgres::value::Value;
use pgrx::pg_sys;

use super::{Datum, RuledColumn};

// src/include/utils/fmgroids.h, 15 to 18.
const NUMERIC_ADD: u32 = 1724;

const NUMERIC_SUB: u32 = 1725;

const NUMERIC_CMP: u32 = 1769;

/// numeric(numeric, int4): applies a type modifier.
const NUMERIC_SCALED: u32 = 1703;

/// Number type of a column whose values are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Int2,
    Int4,
    Int8,
    Numeric,
}

impl Number {
    fn of(type_id: pg_sys::Oid) -> Option<Self> {
        match type_id {
            pg_sys::INT2OID => Some(Self::Int2),
            pg_sys::INT4OID => Some(Self::Int4),
            pg_sys::INT8OID => Some(Self::Int8),
            pg_sys::NUMERICOID => Some(Self::Numeric),
            _ => None,
        }
    }
}

/// Whether values of a type can be added up.
#[must_use]
pub fn adds_up(type_id: pg_sys::Oid) -> bool {
    Number::of(type_id).is_some()
}

/// Whether values of a type have an order.
#[must_use]
pub fn has_order(type_id: pg_sys::Oid) -> bool {
    CachedType::find(type_id, ORDER).has_comparison()
}

/// Flag with which the type cache looks a type's order up.
const ORDER: u32 = pg_sys::TYPECACHE_CMP_PROC_FINFO;

/// Converts the result of a comparison function.
fn order_of(result: Datum) -> Ordering {
    low(result).cast_signed().cmp(&0)
}

/// Values of a column.
pub(super) struct Cells<'a>(pub(super) &'a RuledColumn);

impl Cells<'_> {
    fn out_of_range(&self) -> PgError {
        PgError::new(
            SqlState::NumericValueOutOfRange,
            format!("sum of column \"{}\" is out of range", self.0.name),
        )
        .with_detail("Changes that were in range where they were made are not when they are added up.")
        .with_hint(
            "Make the column's type larger on all nodes, or remove its rule with braid.set_column_rule, then run braid.enable_subscription.",
        )
    }

    /// Converts a value of an integer type; null is 0.
    fn whole(&self, value: Option<Datum>) -> i128 {
        let Some(value) = value else { return 0 };
        match self.0.type_id {
            pg_sys::INT2OID => {
                let [low, high, ..] = low(value).to_le_bytes();
                i128::from(i16::from_le_bytes([low, high]))
            }
            pg_sys::INT4OID => i128::from(low(value).cast_signed()),
            _ => i128::from((value.value() as u64).cast_signed()),
        }
    }

    fn numeric(&self, value: Option<Datum>) -> Result<Datum, PgError> {
        // SAFETY: a numeric, whose copy in one piece is in the memory of the change.
        unsafe {
            let Some(value) = value else {
                return Ok(Datum::from(pg_sys::int64_to_numeric(0)));
            };
            let plain = pg_sys::pg_detoast_datum(value.cast_mut_ptr());
            let number: pg_sys::Numeric = plain.cast();
            if pg_sys::numeric_is_nan(number) || pg_sys::numeric_is_inf(number) {
                return Err(PgError::new(
                    SqlState::InvalidParameterValue,
                    format!("column \"{}\" cannot be added up: it is NaN or infinite", self.0.name),
                )
                .with_hint(
                    "Set it to a number where it is none; to let the change pass, remove the rule with braid.set_column_rule, and run braid.enable_subscription.",
                ));
            }
            Ok(Datum::from(plain))
        }
    }

    fn sum_of_numerics(
        &self,
        base: Option<Datum>,
        new: Option<Datum>,
        old: Option<Datum>,
    ) -> Result<(Datum, bool), PgError> {
        let [base, new, old] = [self.numeric(base)?, self.numeric(new)?, self.numeric(old)?];
        let call = |function: u32, one, other| {
            // SAFETY: functions of two numerics, or of a numeric and a modifier.
            unsafe {
                pg_sys::OidFunctionCall2Coll(
                    pg_sys::Oid::from(function),
                    pg_sys::InvalidOid,
                    one,
                    other,
                )
            }
        };
        let mut sum = call(NUMERIC_ADD, base, call(NUMERIC_SUB, new, old));
        if self.0.type_modifier >= 0 {
            sum = call(NUMERIC_SCALED, sum, Datum::from(self.0.type_modifier));
        }
        let zero = self.numeric(None)?;
        let order = order_of(call(NUMERIC_CMP, sum, zero));
        Ok((sum, order == Ordering::Equal))
    }

    /// Returns two of the values that are merged, with their type.
    fn both<'v>(&self, one: Datum, other: Datum) -> [Value<'v>; 2] {
        let (of, how) = (self.0.type_id, (self.0.length, self.0.by_value));
        // SAFETY: only values of the column are merged by this, while they are in the memory of the
        // change.
        [one, other].map(|datum| unsafe { Value::stored(of, how, datum) })
    }
}

impl Values for Cells<'_> {
    type Value = Datum;
    type Error = PgError;

    fn sum(
        &mut self,
        base: Option<Datum>,
        new: Option<Datum>,
        old: Option<Datum>,
    ) -> Result<(Datum, bool), PgError> {
        let sum = self.whole(base) + self.whole(new) - self.whole(old);
        let made = match Number::of(self.0.type_id) {
            Some(Number::Int2) => i16::try_from(sum).map(Datum::from).ok(),
            Some(Number::Int4) => i32::try_from(sum).map(Datum::from).ok(),
            Some(Number::Int8) => i64::try_from(sum).map(Datum::from).ok(),
            Some(Number::Numeric) => return self.sum_of_numerics(base, new, old),
            None => None,
        };
        made.map(|made| (made, sum == 0))
            .ok_or_else(|| self.out_of_range())
    }

    fn is_same(&mut self, one: Datum, other: Datum) -> bool {
        let [one, other] = self.both(one, other);
        one.is_same(other)
    }

    fn is_after(&mut self, one: Datum, other: Datum) -> bool {
        let [of_one, of_other] = self.both(one, other);
        let cached = CachedType::find(self.0.type_id, ORDER);
        match cached.compare(self.0.collation, of_one, of_other) {
            None | Some(Ordering::Less) => false,
            Some(Ordering::Greater) => true,
            // Equal, but not identical: of 1.0 and 1.00 all nodes take the same one.
            Some(Ordering::Equal) if self.0.by_value => one.value() > other.value(),
            Some(Ordering::Equal) => of_one.read(|one| of_other.read(|other| one > other)),
        }
    }
}
