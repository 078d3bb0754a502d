//! The one map from the decoder's errors to SQLSTATEs and hints.

use braid_decoder::Error;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::panic::ErrorReport;

/// Raise `error`; it leaves by unwinding.
#[cold]
pub(super) fn raise(error: &Error) -> ! {
    let (code, hint) = match error {
        Error::UnknownOption(_) => (
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "Valid options are \"proto_version\", \"publication_names\", \"origin\", \"node\" and \"messages\".",
        ),
        Error::MissingOption("proto_version") | Error::UnsupportedVersion(_) => (
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "This server speaks protocol version 1: set \"proto_version\" to '1'.",
        ),
        Error::MissingOption(_) => (
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "Name the publications in option \"publication_names\".",
        ),
        Error::InvalidOption { hint, .. } => {
            (PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, *hint)
        }
        Error::MissingPublication(_) => (
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            "The publication must have existed when the change was made. Name other publications with braid.alter_subscription, or drop the subscription and create it again.",
        ),
        Error::ColumnLists { .. } => (
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "Give the table the same column list in all publications of the subscription.",
        ),
        Error::GeneratedColumns { .. } => (
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "Set publish_generated_columns to the same value in all publications of the subscription.",
        ),
        Error::Gir(_) => (
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            "A row must fit a single record.",
        ),
    };
    fail(code, error.to_string(), Some(hint))
}

/// Raise an error that has no variant of its own.
#[cold]
#[expect(
    clippy::panic,
    reason = "the guard around each callback makes PostgreSQL's error of it"
)]
pub(super) fn fail(code: PgSqlErrorCode, message: String, hint: Option<&str>) -> ! {
    let mut report = ErrorReport::new(code, message, "braid output plugin");
    if let Some(hint) = hint {
        report = report.set_hint(hint);
    }
    std::panic::panic_any(report)
}

/// The value of a decision, or its error raised.
#[inline]
pub(super) fn or_raise<T, E: Into<Error>>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => raise(&error.into()),
    }
}
