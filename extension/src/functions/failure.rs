//! Errors of the SQL functions: an SQLSTATE, a message, and a hint for whatever a user can cause.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::libpq;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::{PgLogLevel, PgSqlErrorCode};

/// Result of a function's work.
pub type Outcome<T> = Result<T, Failure>;

/// An error that is still to be raised.
#[derive(Debug)]
pub struct Failure(Box<ErrorReport>);

impl From<PgError> for Failure {
    fn from(error: PgError) -> Self {
        let mut failure = Self::new(sqlstate_code(error.sqlstate), error.message);
        if let Some(detail) = error.detail {
            failure = failure.detail(detail);
        }
        match error.hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl Failure {
    /// An error with a message.
    #[track_caller]
    pub fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Self {
        Self(Box::new(ErrorReport::new(code, message.into(), "braid")))
    }

    /// 55000: something must be done or be so first.
    #[track_caller]
    pub fn state(message: impl Into<String>) -> Self {
        Self::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            message,
        )
    }

    /// 42704: no such object.
    #[track_caller]
    pub fn undefined(message: impl Into<String>) -> Self {
        Self::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, message)
    }

    /// 42710: an object of this name exists.
    #[track_caller]
    pub fn duplicate(message: impl Into<String>) -> Self {
        Self::new(PgSqlErrorCode::ERRCODE_DUPLICATE_OBJECT, message)
    }

    /// 22023: a value that is not among those allowed.
    #[track_caller]
    pub fn parameter(message: impl Into<String>) -> Self {
        Self::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, message)
    }

    /// 22004: a required argument is null.
    #[track_caller]
    pub fn null_argument(argument: &str) -> Self {
        Self::new(
            PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
            format!("{argument} must not be null"),
        )
        .hint("Give it a value.")
    }

    /// An error that a provider or the connection to it reported, as the detail of `message`.
    #[track_caller]
    pub fn provider(message: impl Into<String>, error: &libpq::Error) -> Self {
        match error {
            libpq::Error::MalformedConnectionString | libpq::Error::UnknownOption(_) => {
                Self::malformed_dsn(error)
            }
            libpq::Error::Server {
                sqlstate,
                message: words,
                ..
            } => {
                let code = sqlstate_code(*sqlstate);
                Self::new(code, message).detail(words.clone())
            }
            _ => {
                let code = match error.sqlstate() {
                    SqlState::ProtocolViolation => PgSqlErrorCode::ERRCODE_PROTOCOL_VIOLATION,
                    _ => PgSqlErrorCode::ERRCODE_CONNECTION_FAILURE,
                };
                Self::new(code, message).detail(error.to_string())
            }
        }
    }

    /// 22023 for a connection string. Quotes nothing of it but an option's name.
    #[track_caller]
    pub fn malformed_dsn(error: &libpq::Error) -> Self {
        Self::parameter(error.to_string()).hint(
            "Write it as keywords and values, like 'host=node1 dbname=app user=braid', or as a postgresql:// URI.",
        )
    }

    /// Add a detail: sentences.
    pub fn detail(self, detail: impl Into<String>) -> Self {
        Self(Box::new(self.0.set_detail(detail)))
    }

    /// Add a hint: sentences.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self(Box::new(self.0.set_hint(hint)))
    }

    /// Adds a sentence to the detail and to the hint.
    pub fn elsewhere(self, detail: &str, hint: &str) -> Self {
        let join = |have: Option<&str>, more: &str| match have {
            Some(have) => format!("{have} {more}"),
            None => more.to_owned(),
        };
        let (detail, hint) = (join(self.0.detail(), detail), join(self.0.hint(), hint));
        self.detail(detail).hint(hint)
    }

    /// Turns it into the detail of a warning with another message.
    #[track_caller]
    pub fn into_warning(self, message: impl Into<String>) -> Self {
        let reason = match self.0.detail() {
            Some(detail) => detail.to_owned(),
            None => self.0.message().to_owned(),
        };
        Self::new(PgSqlErrorCode::ERRCODE_WARNING, message).detail(reason)
    }

    /// Message and detail, for a row of a result.
    pub fn words(&self) -> String {
        match self.0.detail() {
            Some(detail) => format!("{}: {detail}", self.0.message()),
            None => self.0.message().to_owned(),
        }
    }

    /// The hint, if there is one.
    pub fn hint_words(&self) -> Option<String> {
        self.0.hint().map(str::to_owned)
    }

    /// Raise it as an ERROR.
    pub fn raise(self) -> ! {
        self.0.report(PgLogLevel::ERROR);
        unreachable!("an ERROR does not return")
    }

    /// Send it to the client as a WARNING.
    pub fn warn(self) {
        self.0.report(PgLogLevel::WARNING);
    }

    /// Send it to the client as a NOTICE.
    pub fn notice(self) {
        self.0.report(PgLogLevel::NOTICE);
    }
}

/// The code of an error of another server; for a malformed one 58000, an error of an external
/// system.
fn sqlstate_code(sqlstate: SqlState) -> PgSqlErrorCode {
    let is_code = |byte: &u8| byte.is_ascii_digit() || byte.is_ascii_uppercase();
    if sqlstate.code().iter().all(is_code) {
        PgSqlErrorCode::from(sqlstate.packed())
    } else {
        PgSqlErrorCode::ERRCODE_SYSTEM_ERROR
    }
}

/// A message for the client that is no error.
pub fn notice(message: impl Into<String>) {
    Failure::new(PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message).notice();
}
