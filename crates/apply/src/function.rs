//! Calling a user's conflict function: `f(local t, remote t, before t, info braid.conflict) returns t`. Run by the appliers, and by
//! sessions that call `braid.ingest`.
//!
//! It runs as its owner, restricted as owners of tables are while changes are applied, in a subtransaction, for
//! `braid.conflict_function_timeout` at most. By number, not by name: neither search_path nor rights on its schema have a say.
//! PostgreSQL's call handler sees to its own settings (`SET`) and SECURITY DEFINER.
//!
//! Who decides what its answer means is `braid_bgworker::merge`; `merge.rs` carries that out.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use braid_bgworker::policy::{self, Policy};
use braid_node::settings;
use braid_postgres::error::{self, PgError};
use braid_postgres::subtransaction::Subtransaction;
use braid_postgres::{encoding, ffi, latch};
use pgrx::pg_sys;

/// external_routine_exception
const FAILED: &str = "38000";
const HINT: &str = "Correct the function, or set another rule with braid.set_conflict_resolution. Then run braid.retry_parked; or, where the \
                    subscription has stopped, braid.enable_subscription, or leave this transaction out with braid.skip_transaction.";

/// A function as the catalog has it now.
#[derive(Debug, Clone)]
pub(super) struct Callee {
    oid: pg_sys::Oid,
    /// Whose rights it has.
    pub(super) owner: pg_sys::Oid,
    /// The row type that it takes and gives.
    pub(super) row_type: pg_sys::Oid,
    info_type: pg_sys::Oid,
    name: String,
}

/// What is done with what the function writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writes {
    /// It stays.
    Keep,
    /// It is taken back; whether there was any is said.
    Undo,
}

/// A call's result.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given {
    /// The row; `None` for null. In the memory context of the caller.
    pub(super) row: Option<pg_sys::Datum>,
    /// It has written something, or locked a row.
    pub(super) wrote: bool,
}

impl Callee {
    /// Look a function up.
    ///
    /// # Errors
    /// 42883 when it is gone, or is not what it was.
    pub(super) fn find(oid: u32) -> Result<Self, PgError> {
        let oid = pg_sys::Oid::from(oid);
        let gone = |what: &str| {
            PgError::new("42883", format!("conflict function {what}")).with_hint(
                "Set the rule anew with braid.set_conflict_resolution, then run braid.enable_subscription.",
            )
        };
        // SAFETY: a look-up in the catalog cache, in a transaction; the tuple is released before anything else is done with it.
        let form = unsafe {
            let tuple = pg_sys::SearchSysCache1(
                i32::try_from(pg_sys::SysCacheIdentifier::PROCOID).unwrap_or(0),
                pg_sys::Datum::from(oid),
            );
            if tuple.is_null() {
                return Err(gone(&format!(
                    "with OID {} does not exist any more",
                    oid.to_u32()
                )));
            }
            let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_proc>();
            let count = usize::try_from((*form).pronargs).unwrap_or(0);
            let types: Vec<pg_sys::Oid> = (*form).proargtypes.values.as_slice(count).to_vec();
            let found = (
                (*form).proowner,
                (*form).prorettype,
                types,
                (*form).proisstrict || (*form).proretset,
                (*form).prokind.cast_unsigned(),
            );
            pg_sys::ReleaseSysCache(tuple);
            found
        };
        // SAFETY: the function exists; the text is copied.
        let name = unsafe { encoding::from_server(pg_sys::format_procedure_qualified(oid)) };
        let (owner, row_type, types, unusable, kind) = form;
        match types.as_slice() {
            [local, remote, before, info]
                if !unusable && kind == b'f' && [*local, *remote, *before] == [row_type; 3] =>
            {
                Ok(Self {
                    oid,
                    owner,
                    row_type,
                    info_type: *info,
                    name,
                })
            }
            _ => Err(gone(&format!("{name} is not one any more"))),
        }
    }

    /// An error in it, or about what it gave.
    pub(super) fn error(&self, what: &str) -> PgError {
        PgError::new(FAILED, format!("conflict function {} {what}", self.name))
            .with_hint(HINT)
            .of_function()
    }

    /// The type of its fourth argument.
    pub(super) fn info_type(&self) -> pg_sys::Oid {
        self.info_type
    }

    /// Call it with these arguments, rows of its types or null, as the user that this process works as. `about` says which
    /// conflict it is, for errors; `is_untouched`, whether the row that it was asked about is as it was.
    ///
    /// # Errors
    /// 38000 with the function's own error as the detail; errors that may pass by themselves are given as they are.
    pub(super) fn call(
        &self,
        arguments: [Option<pg_sys::Datum>; 4],
        writes: Writes,
        about: &str,
        is_untouched: &mut dyn FnMut() -> Result<bool, PgError>,
    ) -> Result<Given, PgError> {
        // What it does, and for how long, is its own affair.
        latch::may_wait()?;
        // SAFETY: reads a variable of the process.
        let context = unsafe { pg_sys::CurrentMemoryContext };
        let subtransaction = Subtransaction::begin();
        let timer = Timer::start();
        let outcome = error::catch(|| {
            // SAFETY: in a transaction; the snapshot is popped here, or by the rollback.
            unsafe {
                pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
                let row = invoke(self.oid, arguments).map(|row| {
                    pg_sys::MemoryContextSwitchTo(context);
                    pg_sys::Datum::from(pg_sys::pg_detoast_datum_copy(row.cast_mut_ptr()))
                });
                pg_sys::PopActiveSnapshot();
                row
            }
        });
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
            // Also one that goes on when it is told to end, and answers, has not kept to its time.
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
            Err(error) => match policy::for_apply(&error.sqlstate) {
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

/// Call a function of four arguments by its number.
///
/// # Safety
/// In a transaction with a snapshot; the arguments are of the function's types.
unsafe fn invoke(oid: pg_sys::Oid, arguments: [Option<pg_sys::Datum>; 4]) -> Option<pg_sys::Datum> {
    // SAFETY: the call's record has room for its four arguments behind it, as LOCAL_FCINFO of src/include/fmgr.h makes it; it lives
    // in the current memory context for longer than the call.
    unsafe {
        let function = pg_sys::palloc0(size_of::<pg_sys::FmgrInfo>()).cast::<pg_sys::FmgrInfo>();
        pg_sys::fmgr_info(oid, function);
        let size = size_of::<pg_sys::FunctionCallInfoBaseData>()
            + arguments.len() * size_of::<pg_sys::NullableDatum>();
        let call = pg_sys::palloc0(size).cast::<pg_sys::FunctionCallInfoBaseData>();
        (*call).flinfo = function;
        (*call).fncollation = pg_sys::InvalidOid;
        (*call).nargs = 4;
        let places = (*call).args.as_mut_ptr();
        for (position, argument) in arguments.into_iter().enumerate() {
            *places.add(position) = pg_sys::NullableDatum {
                value: argument.unwrap_or_else(pg_sys::Datum::null),
                isnull: argument.is_none(),
            };
        }
        let address = (*function).fn_addr?;
        let value = pg_sys::ffi::pg_guard_ffi_boundary(|| address(call));
        (!(*call).isnull).then_some(value)
    }
}

/// Milliseconds after which a function that goes on is told again to end.
const REPEATED: i32 = 100;

static TIMER: OnceLock<i32> = OnceLock::new();
static FIRED: AtomicBool = AtomicBool::new(false);

/// As PostgreSQL's own handler for a statement that takes too long, without the way round through a signal to oneself.
unsafe extern "C-unwind" fn on_timeout() {
    FIRED.store(true, Ordering::Relaxed);
    // SAFETY: what a signal handler may do: set two flags and a latch.
    unsafe {
        pg_sys::QueryCancelPending = 1;
        pg_sys::InterruptPending = 1;
        pg_sys::SetLatch(pg_sys::MyLatch);
    }
}

/// A function whose time is over has caught that, and rolled back what it was about: it is told again, before it does anything else, where
/// that is caught no more, or by what is around it.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_subtransaction(
    event: pg_sys::SubXactEvent::Type,
    _own: pg_sys::SubTransactionId,
    _parent: pg_sys::SubTransactionId,
    _argument: *mut std::ffi::c_void,
) {
    if event == pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB && FIRED.load(Ordering::Relaxed) {
        // SAFETY: flags of the process, which the next check for interrupts reads.
        unsafe {
            pg_sys::QueryCancelPending = 1;
            pg_sys::InterruptPending = 1;
        }
    }
}

/// The time that a function has.
struct Timer(Option<i32>);

impl Timer {
    fn start() -> Self {
        let Some(limit) = settings::conflict_function_timeout_ms() else {
            return Self(None);
        };
        // SAFETY: the handler is a function of this library, which is never unloaded; registered once in this process.
        let timer = *TIMER.get_or_init(|| unsafe {
            pg_sys::RegisterSubXactCallback(Some(on_subtransaction), std::ptr::null_mut());
            ffi::register_timeout(on_timeout)
        });
        FIRED.store(false, Ordering::Relaxed);
        // Again and again: a function may catch what it is told to end with.
        // SAFETY: registered above.
        unsafe { ffi::enable_timeout(timer, limit, REPEATED) };
        Self(Some(timer))
    }

    /// Whether the time was over.
    fn stop(self) -> bool {
        let Some(timer) = self.0 else { return false };
        // SAFETY: registered by this process. A cancellation that nobody has served yet was this timer's.
        unsafe {
            ffi::disable_timeout(timer);
            let late = FIRED.swap(false, Ordering::Relaxed);
            if late {
                pg_sys::QueryCancelPending = 0;
            }
            late
        }
    }
}
