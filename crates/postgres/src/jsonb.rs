//! A jsonb value of the caller of an SQL function, as an argument of a statement.

use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

/// A jsonb value that is not null.
#[derive(Debug, Clone, Copy)]
pub struct Jsonb(pg_sys::Datum);

impl Jsonb {
    /// Takes the value of an SQL function's argument.
    ///
    /// # Safety
    /// `value` is a jsonb, which outlives the result.
    #[must_use]
    pub unsafe fn new(value: pg_sys::Datum) -> Self {
        Self(value)
    }

    /// Returns the value as an argument of a statement.
    #[must_use]
    pub fn argument(&self) -> DatumWithOid<'_> {
        // SAFETY: the caller of `new` vouches for the type.
        unsafe { DatumWithOid::new(self.0, pg_sys::JSONBOID) }
    }
}
