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
            "Valid options are \"format\", \"proto_version\", \"publication_names\", \"origin\", \"node\", \"messages\", \"replaced_versions\", \"streaming\", \"two_phase\", \"unprepared\" and \"ddl\"; with format \"gir\" also \"join_transactions\"; with format \"gir-json\" also \"schema\", \"keys\" and \"include-unchanged-toast\".",
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
        Error::Wal2Json(error) => wal2json(error),
        Error::MissingPublication(_) => (
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            "The publication must have existed when the change was made. Name others (those of a subscription with braid.alter_subscription), or drop the subscription, or the slot, and create it again.",
        ),
        Error::ColumnLists { .. } => (
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "Give the table the same column list in all publications of the subscription. Changes made meanwhile are sent to one that names only one of them, see braid.alter_subscription.",
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

/// wal2json's own SQLSTATEs.
fn wal2json(error: &braid_decoder::wal2json::Error) -> (PgSqlErrorCode, &'static str) {
    use braid_decoder::wal2json::Error;
    match error {
        Error::Unknown { .. } => (
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "Options of output plugin \"braid\" are listed in its reference, under \"Output formats\".",
        ),
        Error::Value {
            option: "format-version",
            ..
        } => (
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "Valid values are 1 and 2.",
        ),
        Error::Value {
            option: "actions", ..
        } => (
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "Valid values are insert, update, delete and truncate.",
        ),
        Error::Value {
            option: "max-message-size",
            ..
        } => (
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "Give a number of bytes, or one with a unit: kB, MB or GB.",
        ),
        Error::Value { .. } => (
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            "Valid values are true and false.",
        ),
        Error::List {
            option: "filter-tables" | "add-tables",
            ..
        } => (
            PgSqlErrorCode::ERRCODE_INVALID_NAME,
            "Separate tables by commas, name each with its schema, and put a backslash before special characters.",
        ),
        Error::List { .. } => (
            PgSqlErrorCode::ERRCODE_INVALID_NAME,
            "Separate the values by commas.",
        ),
        Error::Deprecated(_) => (
            PgSqlErrorCode::ERRCODE_INVALID_NAME,
            "Values that have not changed and are not in WAL are left out; \"include-unchanged-toast-marker\" says which.",
        ),
        Error::VersionTooLow(_) | Error::VersionTooHigh(_) => (
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "Set \"format-version\" to 1 or 2.",
        ),
    }
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
