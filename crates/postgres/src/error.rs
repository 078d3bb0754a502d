//! PostgreSQL errors as values: caught at the top of a unit of work, classified by SQLSTATE.

mod fields;
mod held;

use std::panic::AssertUnwindSafe;

use crate::{compat, lock, memory, plain, snapshot};
use braid_bgworker::policy;
use braid_bgworker::reason::Reason;
use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;

pub use fields::Fields;
use fields::Watch;
use held::Held;

/// A lock at another node, or a commit at it, that a question to that node has waited for in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerLock {
    /// No commit at that node waits for this node to confirm it.
    Held,
    /// Commits at that node wait for this node to confirm them, or may do so. The lock may be held
    /// by one of them.
    ByCommit,
}

/// An error that PostgreSQL or our own code raised, after it was caught.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PgError {
    /// The error's code.
    pub sqlstate: SqlState,
    /// Primary message.
    pub message: String,
    /// Detail, if any.
    pub detail: Option<String>,
    /// Hint, if any.
    pub hint: Option<String>,
    /// All other fields, if PostgreSQL raised the error; and the context added since.
    pub fields: Option<Box<Fields>>,
    /// A user's conflict function has failed, or returned an invalid result.
    pub by_function: bool,
    /// A server in recovery has reported it, so it may pass when that server is promoted.
    pub in_recovery: bool,
    /// The lock at another node that the error is about, if it is about one.
    pub peer_lock: Option<PeerLock>,
    /// Why it is handled differently from others of its SQLSTATE.
    pub reason: Option<Reason>,
}

impl PgError {
    /// An error of our own.
    #[must_use]
    pub fn new(sqlstate: SqlState, message: impl Into<String>) -> Self {
        Self {
            sqlstate,
            message: message.into(),
            detail: None,
            hint: None,
            fields: None,
            by_function: false,
            in_recovery: false,
            peer_lock: None,
            reason: None,
        }
    }

    /// As one of a user's conflict function.
    #[must_use]
    pub fn of_function(mut self) -> Self {
        self.by_function = true;
        self
    }

    /// With the reason for handling it differently.
    #[must_use]
    pub fn for_reason(mut self, reason: Reason) -> Self {
        self.reason = Some(reason);
        self
    }

    /// With a hint, unless it is empty.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        let hint = hint.into();
        self.hint = (!hint.is_empty()).then_some(hint);
        self
    }

    /// Adds a hint for causes that are typical of replication, if PostgreSQL gives no hint; `then`
    /// is the user's next step.
    #[must_use]
    pub fn with_hint_of_cause(mut self, then: &str) -> Self {
        let fields = self.fields.as_deref().filter(|_| self.hint.is_none());
        if let Some(((schema, table), function)) =
            fields.and_then(|fields| Some((fields.table()?, fields.function()?)))
            && let Some(hint) =
                policy::cause_hint(self.sqlstate, &function, &format!("{schema}.{table}"))
        {
            self.hint = Some(format!("{hint} {then}"));
        }
        self
    }

    /// With a detail.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// CONTEXT, if any: PostgreSQL's, and the lines added since.
    #[must_use]
    pub fn context(&self) -> Option<&str> {
        self.fields.as_deref()?.context()
    }

    /// Adds one more line of CONTEXT, after the existing ones.
    #[must_use]
    pub fn with_context(mut self, line: &str) -> Self {
        self.fields.get_or_insert_default().add_context(line);
        self
    }

    /// With the context and the fields of the error that it stands for.
    #[must_use]
    pub fn caused_by(mut self, cause: &Self) -> Self {
        self.fields.clone_from(&cause.fields);
        self
    }

    fn from_caught(caught: CaughtError, seen: Option<Box<Fields>>) -> Self {
        let report = match caught {
            CaughtError::PostgresError(report)
            | CaughtError::ErrorReport(report)
            | CaughtError::RustPanic {
                ereport: report, ..
            } => report,
        };
        let code = report.sql_error_code() as i32;
        // If a handler in between raised an older error again, the error that was seen last is
        // another one.
        let fields = seen.filter(|fields| fields.are_of(code, report.message()));
        let raised = SqlState::unpack(fields.as_ref().map_or(code, |fields| fields.code()));
        Self {
            sqlstate: raised.refined(report.message()),
            message: report.message().to_owned(),
            detail: report.detail().map(str::to_owned),
            hint: report.hint().map(str::to_owned),
            fields,
            by_function: false,
            in_recovery: false,
            peer_lock: None,
            reason: None,
        }
    }

    /// The error with the SQLSTATE that PostgreSQL gave it, without [`SqlState::refined`].
    #[must_use]
    pub fn as_raised(mut self) -> Self {
        if let Some(fields) = &self.fields {
            let raised = SqlState::unpack(fields.code());
            if raised.refined(&self.message) == self.sqlstate {
                self.sqlstate = raised;
            }
        }
        self
    }

    /// Raises it as a PostgreSQL error, with its SQLSTATE, and with all its fields if PostgreSQL
    /// had raised it.
    pub fn raise(self) -> ! {
        if self.fields.is_some() || !is_named(self.sqlstate) {
            fields::raise(self);
        }
        report(pgrx::PgLogLevel::ERROR, &self);
        unreachable!("ereport(ERROR) does not return")
    }

    /// Send it to the client, and to the server's log, as a WARNING.
    pub fn warn(&self) {
        report(pgrx::PgLogLevel::WARNING, self);
    }

    /// Write it to the server's log.
    pub fn log(&self, context: &str) {
        let with_context = Self {
            message: format!("{context}: {}", self.message),
            ..self.clone()
        };
        report(pgrx::PgLogLevel::LOG, &with_context);
    }

    /// Writes it to the server's log at the level ERROR, and goes on: for errors that end a service
    /// on which somebody depends.
    pub fn log_as_error(&self, context: &str) {
        fields::log_as_error(&Self {
            message: format!("{context}: {}", self.message),
            ..self.clone()
        });
    }

    /// Write it to the server's log, and to no client whatever that has asked for.
    pub fn log_to_server(&self) {
        report(pgrx::PgLogLevel::LOG_SERVER_ONLY, self);
    }

    /// Report it as fatal, which ends the process.
    pub fn end_process(&self) -> ! {
        report(pgrx::PgLogLevel::FATAL, self);
        unreachable!("ereport(FATAL) does not return")
    }
}

impl From<braid_gir::Error> for PgError {
    fn from(error: braid_gir::Error) -> Self {
        Self::new(
            SqlState::ProtocolViolation,
            format!("invalid data from the provider: {error}"),
        )
    }
}

/// SQLSTATE of all errors for which pgrx has no name.
const INTERNAL_ERROR: i32 = pg_sys::errcodes::PgSqlErrorCode::ERRCODE_INTERNAL_ERROR as i32;

/// Whether pgrx has a name for this SQLSTATE. It takes all others, which users can raise, for
/// XX000.
fn is_named(sqlstate: SqlState) -> bool {
    let code = sqlstate.packed();
    pg_sys::errcodes::PgSqlErrorCode::from(code) as i32 == code
}

fn report(level: pgrx::PgLogLevel, error: &PgError) {
    let needs_all = error.context().is_some() || !is_named(error.sqlstate);
    if needs_all && (level as i32) < fields::ERROR {
        fields::report(level as i32, error);
        return;
    }
    let code = pg_sys::errcodes::PgSqlErrorCode::from(error.sqlstate.packed());
    let mut report = pg_sys::panic::ErrorReport::new(code, error.message.clone(), "braid");
    if let Some(detail) = &error.detail {
        report = report.set_detail(detail.clone());
    }
    if let Some(hint) = &error.hint {
        report = report.set_hint(hint.clone());
    }
    report.report(level);
}

/// Runs `work`, and returns a PostgreSQL error or a panic in it as a value. The caller rolls back:
/// this function only ends locks and waits that no rollback would end.
///
/// # Errors
/// The raised error.
pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, PgError> {
    let held = Held::now();
    let mut watch = Watch::new();
    watch.begin();
    let outcome = pgrx::PgTryBuilder::new(AssertUnwindSafe(|| Ok(work())))
        .catch_others(|caught| Err(Box::new(caught)))
        .catch_rust_panic(|caught| Err(Box::new(caught)))
        .execute();
    let seen = watch.end();
    outcome.map_err(|caught| {
        held.let_go();
        PgError::from_caught(*caught, seen)
    })
}

/// Runs the work of a function that PostgreSQL calls, and raises its error unchanged: pgrx's own
/// guard would strip the error of all but four texts.
pub fn pass_on<T>(work: impl FnOnce() -> T) -> T {
    match catch(work) {
        Ok(value) => value,
        Err(error) => error.as_raised().raise(),
    }
}

/// Run `work` in a transaction of its own: commit when it returns a value, roll back when it raises
/// or returns an error. Leaves TopMemoryContext as the current one.
///
/// # Errors
/// The error that `work` raised or returned.
pub fn transaction<T>(work: impl FnOnce() -> Result<T, PgError>) -> Result<T, PgError> {
    let outcome = catch(|| {
        crate::transaction::start();
        lock::take_first();
        snapshot::push();
        let value = work()?;
        // The snapshot is the active one: `work` leaves the stack as it found it.
        snapshot::pop();
        plain::CommitTransactionCommand();
        Ok(value)
    });
    match outcome {
        Ok(Ok(value)) => {
            memory::Context::of_process().enter();
            Ok(value)
        }
        Ok(Err(error)) | Err(error) => {
            abort();
            Err(error)
        }
    }
}

/// Roll back whatever is open.
pub fn abort() {
    // SAFETY: AbortOutOfAnyTransaction is right in any transaction state. Interrupts are held as
    // PostgreSQL's own error handlers hold them.
    unsafe {
        // A commit that failed may have left its position in this variable (`origin::stands_for`).
        compat::set_session_origin_lsn(0);
        pg_sys::InterruptHoldoffCount += 1;
        pg_sys::AbortOutOfAnyTransaction();
        pg_sys::InterruptHoldoffCount -= 1;
        pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
    }
}
