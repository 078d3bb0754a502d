//! Conversion of rows to values for functions, and back. Run by the appliers.

use std::ffi::CString;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::composite;
use braid_postgres::error::PgError;
use braid_postgres::slot::Slot;
use braid_postgres::type_function;
use braid_postgres::value::Value;
use pgrx::pg_sys;

use super::INFO_COLUMNS;
use crate::table::RowValues;

/// Returns the bytes that the first cell of a result has in hexadecimal.
pub(super) fn first_bytes(rows: Vec<Vec<Option<String>>>) -> Option<Vec<u8>> {
    let text = rows.into_iter().next()?.into_iter().next()??;
    let (pairs, _) = text.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    pairs
        .iter()
        .map(|[high, low]| u8::try_from(digit(*high)? << 4 | digit(*low)?).ok())
        .collect()
}

/// Returns a value of a type, from its text in the database's encoding, in the current memory
/// context.
pub(super) fn read_as(type_id: pg_sys::Oid, value: Vec<u8>) -> Result<Value<'static>, PgError> {
    let value = CString::new(value)
        .map_err(|_| PgError::new(SqlState::InternalError, "text with a zero byte"))?;
    Ok(type_function::read(type_id, &value))
}

/// Returns a row of type braid.conflict.
pub(super) fn information(
    info_type: pg_sys::Oid,
    values: [Option<Value<'_>>; INFO_COLUMNS],
) -> Result<Value<'static>, PgError> {
    composite::of_type(info_type, &values).ok_or_else(|| {
        PgError::new(
            SqlState::InternalError,
            "type braid.conflict is not that of this version",
        )
    })
}

/// Returns values for a whole row.
pub(super) fn whole(values: &[Option<Value<'_>>]) -> RowValues {
    let values = values.iter();
    values.map(|value| Some(value.map(Value::datum))).collect()
}

/// Whether a row has just these values. Generated columns are not compared.
pub(super) fn same_row(slot: &Slot, values: &[Option<Value<'_>>]) -> bool {
    let columns = slot.descriptor().iter().zip(values).enumerate();
    columns.into_iter().all(|(position, (attribute, value))| {
        attribute.is_dropped() || attribute.is_generated() || slot.has(position, *value)
    })
}
