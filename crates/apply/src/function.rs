//! Calling a user's conflict function: `f(local t, remote t, before t, info braid.conflict) returns
//! t`. Run by the appliers, and by sessions that call `braid.ingest`.
//!
//! A function runs as its owner, under the restrictions that owners of tables have while changes
//! are applied, in a subtransaction, for at most `braid.conflict_function_timeout`. It is called by
//! OID, so neither search_path nor rights on its schema matter. PostgreSQL's call handler handles
//! the function's own settings (`SET`) and SECURITY DEFINER.
//!
//! `braid_bgworker::merge` decides what an answer means; `merge` carries that out.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use braid_bgworker::policy::{self, Policy};
use braid_bgworker::sqlstate::SqlState;
use braid_node::settings;
use braid_postgres::error::{self, PgError};
use braid_postgres::memory::{self, Callers};
use braid_postgres::subtransaction::Subtransaction;
use braid_postgres::syscache::{FunctionRow, utf8_or_empty};
use braid_postgres::transaction::PartEnd;
use braid_postgres::value::Value;
use braid_postgres::{ffi, latch, plain, process, snapshot, syscache, transaction};
use pgrx::pg_sys;

/// external_routine_exception
const FAILED: SqlState = SqlState::ExternalRoutineException;
const HINT: &str = "Correct the function, or set another rule with braid.set_conflict_resolution. Then run braid.retry_parked; or, where the \
                    subscription has stopped, braid.enable_subscription, or leave this transaction out with braid.skip_transaction.";

/// A function as the catalog has it at present.
#[derive(Debug, Clone)]
pub(super) struct Callee {
    oid: pg_sys::Oid,
    /// User with whose rights it runs.
    pub(super) owner: pg_sys::Oid,
    /// The row type that it takes and returns.
    pub(super) row_type: pg_sys::Oid,
    info_type: pg_sys::Oid,
    name: String,
}

/// Treatment of the function's writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writes {
    /// The writes stay.
    Keep,
    /// The writes are rolled back; the result says whether there were any.
    Undo,
}

/// Result of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given {
    /// The row; `None` for null. In the caller's memory context.
    pub(super) row: Option<Value<'static>>,
    /// Whether the function has written something, or locked a row.
    pub(super) wrote: bool,
}

impl Callee {
    /// Looks a function up.
    ///
    /// # Errors
    /// 42883 if it was dropped, or has another signature now.
    pub(super) fn find(oid: u32) -> Result<Self, PgError> {
        let oid = pg_sys::Oid::from(oid);
        let gone = |what: &str| {
            PgError::new(SqlState::UndefinedFunction, format!("conflict function {what}")).with_hint(
                "Set the rule anew with braid.set_conflict_resolution, then run braid.enable_subscription.",
            )
        };
        let Some(row) = FunctionRow::find(oid) else {
            return Err(gone(&format!(
                "with OID {} does not exist any more",
                oid.to_u32()
            )));
        };
        let name = utf8_or_empty(syscache::function_signature(oid));
        let row_type = row.prorettype;
        let is_usable = !row.proisstrict && !row.proretset && row.prokind.cast_unsigned() == b'f';
        match row.arguments() {
            [local, remote, before, info]
                if is_usable && [*local, *remote, *before] == [row_type; 3] =>
            {
                Ok(Self {
                    oid,
                    owner: row.proowner,
                    row_type,
                    info_type: *info,
                    name,
                })
            }
            _ => Err(gone(&format!("{name} is not one any more"))),
        }
    }

    /// Returns an error of the function, or about its result.
    pub(super) fn error(&self, what: &str) -> PgError {
        PgError::new(FAILED, format!("conflict function {} {what}", self.name))
            .with_hint(HINT)
            .of_function()
    }

    /// Returns the type of its fourth argument.
    pub(super) fn info_type(&self) -> pg_sys::Oid {
        self.info_type
    }

    /// Calls the function with these arguments, rows of its types or null, as the user that this
    /// process works as. `about` names the conflict, for errors. `is_untouched` says whether the
    /// row of the conflict is unchanged after the call.
    ///
    /// # Errors
    /// 38000 with the function's own error as the detail; errors that may pass by themselves are
    /// returned unchanged.
    pub(super) fn call(
        &self,
        arguments: [Option<Value<'static>>; 4],
        writes: Writes,
        about: &str,
        is_untouched: &mut dyn FnMut() -> Result<bool, PgError>,
    ) -> Result<Given, PgError> {
        // The function may wait, for any time.
        latch::may_wait()?;
        let subtransaction = Subtransaction::begin();
        let timer = Timer::start();
        let invoke = |memory: Callers<'_>| {
            let row = self.invoke(arguments)?;
            Ok(row.map(|row| memory.run(|| row.copy())))
        };
        let outcome = memory::with_current(|memory| {
            error::catch(|| snapshot::of_transaction(|| invoke(memory)))
        });
        let outcome = outcome.flatten();
        let late = timer.stop();
        let wrote = subtransaction.has_written();
        let touched = match &outcome {
            Ok(_) if wrote => error::catch(|| Ok(!is_untouched()?)),
            _ => Ok(Ok(false)),
        };
        let touched = touched.and_then(|inner: Result<bool, PgError>| inner);
        let stays = outcome.is_ok() && !late && matches!(touched, Ok(false));
        subtransaction.end(stays && writes == Writes::Keep);
        if late {
            // A function that catches the cancellation, and answers late, has exceeded its time
            // too.
            let limit = settings::conflict_function_timeout_ms().unwrap_or(0);
            let detail = format!(
                "It took longer than {limit} ms (braid.conflict_function_timeout). {about}"
            );
            return Err(self.error("was stopped").with_detail(detail));
        }
        let touched = touched?;
        match outcome {
            Ok(_) if touched => {
                let detail = format!(
                    "What becomes of that row is what it returns, null where it is to go. {about}"
                );
                Err(self
                    .error("changed the row that it was asked about")
                    .with_detail(detail))
            }
            Ok(row) => Ok(Given { row, wrote }),
            Err(error) => match policy::for_apply(error.sqlstate) {
                Policy::Retry | Policy::Reconnect => Err(error),
                Policy::Conflict | Policy::Stop => {
                    let detail =
                        format!("{}: {} {about}", error.sqlstate, sentence(&error.message));
                    Err(self.error("failed").with_detail(detail).caused_by(&error))
                }
            },
        }
    }
}

fn sentence(message: &str) -> String {
    let end = if message.ends_with(['.', '!', '?']) {
        ""
    } else {
        "."
    };
    format!("{message}{end}")
}

impl Callee {
    /// Invokes the function. In a transaction with a snapshot.
    fn invoke(
        &self,
        arguments: [Option<Value<'static>>; 4],
    ) -> Result<Option<Value<'static>>, PgError> {
        let types = [self.row_type, self.row_type, self.row_type, self.info_type];
        let given = arguments.iter().zip(types);
        if !given
            .into_iter()
            .all(|(value, of)| value.is_none_or(|value| value.type_id() == of))
        {
            return Err(self.error("is called with values of other types than it takes"));
        }
        // SAFETY: the call's record has room for its four arguments behind it, as LOCAL_FCINFO of
        // src/include/fmgr.h makes it; it lives in the current memory context for longer than the
        // call. `find` has seen that the function takes these types and gives a row of that one.
        unsafe {
            let function =
                pg_sys::palloc0(size_of::<pg_sys::FmgrInfo>()).cast::<pg_sys::FmgrInfo>();
            pg_sys::fmgr_info(self.oid, function);
            let size = size_of::<pg_sys::FunctionCallInfoBaseData>()
                + arguments.len() * size_of::<pg_sys::NullableDatum>();
            let call = pg_sys::palloc0(size).cast::<pg_sys::FunctionCallInfoBaseData>();
            (*call).flinfo = function;
            (*call).fncollation = pg_sys::InvalidOid;
            (*call).nargs = 4;
            let places = (*call).args.as_mut_ptr();
            for (position, argument) in arguments.into_iter().enumerate() {
                *places.add(position) = pg_sys::NullableDatum {
                    value: argument.map_or(pg_sys::Datum::null(), Value::datum),
                    isnull: argument.is_none(),
                };
            }
            let Some(address) = (*function).fn_addr else {
                return Ok(None);
            };
            let value = pg_sys::ffi::pg_guard_ffi_boundary(|| address(call));
            let is_null = (*call).isnull;
            Ok((!is_null).then(|| Value::stored(self.row_type, (-1, false), value)))
        }
    }
}

/// Milliseconds after which a function that goes on is cancelled again.
const REPEATED: i32 = 100;

static TIMER: OnceLock<i32> = OnceLock::new();
static FIRED: AtomicBool = AtomicBool::new(false);

/// As PostgreSQL's own handler of statement_timeout, without a signal to the process itself.
unsafe extern "C-unwind" fn on_timeout() {
    FIRED.store(true, Ordering::Relaxed);
    // A signal handler may set flags and a latch.
    process::cancel_query();
    process::set_latch(process::my_latch());
}

/// A function whose time is over may have caught the cancellation, and rolled a subtransaction
/// back. It is cancelled again before it does anything else, so that the code around it fails too.
fn on_subtransaction(end: PartEnd) {
    if !end.stays && FIRED.load(Ordering::Relaxed) {
        process::cancel_query();
    }
}

/// Timer for the time that a function may take.
struct Timer(Option<i32>);

impl Timer {
    fn start() -> Self {
        let Some(limit) = settings::conflict_function_timeout_ms() else {
            return Self(None);
        };
        let timer = *TIMER.get_or_init(|| {
            transaction::on_part_end(on_subtransaction);
            // SAFETY: the handler is a function of this library, which is never unloaded, and does
            // what a signal handler may.
            unsafe { ffi::register_timeout(ffi::ANY_USER_TIMEOUT, on_timeout) }
        });
        FIRED.store(false, Ordering::Relaxed);
        let first = plain::GetCurrentTimestamp() + i64::from(limit) * 1000;
        // Repeatedly: a function may catch the cancellation.
        // SAFETY: registered above.
        unsafe { ffi::enable_timeout_every(timer, first, REPEATED) };
        Self(Some(timer))
    }

    /// Stops the timer. Returns whether the time was over.
    fn stop(self) -> bool {
        let Some(timer) = self.0 else { return false };
        // SAFETY: registered by this process. A cancellation that nobody has served yet was this
        // timer's.
        unsafe {
            ffi::disable_timeout(timer, false);
            let late = FIRED.swap(false, Ordering::Relaxed);
            if late {
                pg_sys::QueryCancelPending = 0;
            }
            late
        }
    }
}
