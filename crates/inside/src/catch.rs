//! Errors as values, and what an error must not leave behind: locks, buffers, snapshots, held
//! interrupts, open relations.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::compat;
use braid_postgres::error::{PgError, catch};
use braid_postgres::memory::Context;
use braid_postgres::subtransaction::{Subtransaction, attempt};
use braid_postgres::{plain, snapshot};
use pgrx::pg_sys;

use crate::db::{Open, script, sql, value};
use crate::{Outcome, Test, check, page, same, test};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        test("catch: an error of PostgreSQL, with its parts", parts),
        test("catch: an error of our own, raised and caught", own),
        test("catch: a Rust panic", panic),
        test("catch: an error within a caught error", nested),
        test("catch: SQLSTATEs, there and back", states),
        test(
            "catch: a SQLSTATE of a user's own, through a function of ours",
            through,
        ),
        test(
            "catch: an internal error that tells of a full disk",
            refined,
        ),
        test("catch: context lines add up", context),
        test("catch: the table and column of an error", fields),
        test("catch: no error at all", none),
        test("catch: a lightweight lock is released", lightweight_lock),
        test("catch: only locks taken within are released", outer_lock),
        test("catch: held interrupts are as before", interrupts),
        test(
            "catch: interrupts held by a panic are as before",
            interrupts_after_panic,
        ),
        test("catch: a pinned and locked buffer is let go of", buffer),
        test("catch: pushed snapshots are popped", snapshots),
        test("catch: a lock on a table is released", table_lock),
        test(
            "catch: memory context and resource owner are put back",
            context_and_owner,
        ),
        test("catch: an open relation is closed", open_relation),
        test("subtransaction: what is kept, and what is not", kept),
        test("subtransaction: an error undoes what it wrote", undone),
        test("subtransaction: whether it has written", has_written),
        test("subtransaction: one within another", inner),
    ]
}

fn failed<T>(outcome: Result<T, PgError>) -> Result<PgError, String> {
    outcome.err().ok_or_else(|| "no error".to_owned())
}

/// Raises a division by zero, in a subtransaction.
fn error_in<T>(work: impl FnOnce() -> T) -> Result<PgError, String> {
    failed(attempt(|| {
        let made = work();
        sql("select 1 / 0");
        Ok((made, true))
    }))
}

/// Such an error counts as a full disk. When it is raised again for a user, it is unchanged.
fn refined() -> Outcome {
    let error = failed(attempt(|| {
        sql("do $$ begin raise exception using errcode = 'XX000', \
             message = 'could not create temporary file: No space left on device'; end $$");
        Ok(((), true))
    }))?;
    same(&error.sqlstate, &SqlState::DiskFull)?;
    same(&error.as_raised().sqlstate, &SqlState::InternalError)
}

fn parts() -> Outcome {
    let error = failed(attempt(|| {
        sql(
            "do $$ begin raise exception 'no %', 1 using errcode = 'AB123', detail = 'the detail', hint = 'the hint'; end $$",
        );
        Ok(((), true))
    }))?;
    same(&error.sqlstate, &SqlState::Other(*b"AB123"))?;
    same(&error.message.as_str(), &"no 1")?;
    same(&error.detail.as_deref(), &Some("the detail"))?;
    same(&error.hint.as_deref(), &Some("the hint"))?;
    let context = error.context().unwrap_or_default();
    check(context.contains("inline_code_block line 1"), context)
}

fn own() -> Outcome {
    let raised = PgError::new(SqlState::LockNotAvailable, "could not get it")
        .with_detail("A detail.")
        .with_hint("A hint.");
    let again = raised.clone();
    let error = failed(catch(|| -> () { raised.raise() }))?;
    same(
        &(error.sqlstate, error.message),
        &(again.sqlstate, again.message),
    )?;
    same(&(error.detail, error.hint), &(again.detail, again.hint))
}

fn panic() -> Outcome {
    let error = failed(catch(|| -> () { panic!("an index was wrong") }))?;
    same(&error.sqlstate, &SqlState::InternalError)?;
    check(error.message.contains("an index was wrong"), error.message)
}

fn nested() -> Outcome {
    let error = failed(attempt(|| {
        let inner = failed(attempt(|| Ok((sql("select 1 / 0"), true))));
        same(
            &inner.map(|error| error.sqlstate),
            &Ok(SqlState::DivisionByZero),
        )
        .map_err(|message| PgError::new(SqlState::InternalError, message))?;
        sql("select 'x'::int");
        Ok(((), true))
    }))?;
    same(&error.sqlstate, &SqlState::InvalidTextRepresentation)
}

fn states() -> Outcome {
    for state in [
        *b"00001", *b"22P02", *b"40P01", *b"57P03", *b"F0001", *b"HV00R", *b"ZZZZZ", *b"XX000",
    ]
    .map(SqlState::from_code)
    {
        let error = failed(catch(|| -> () { PgError::new(state, "m").raise() }))?;
        same(&error.sqlstate, &state)?;
    }
    Ok(())
}

/// pgrx has no name for it, where the function's error becomes one of PostgreSQL.
fn through() -> Outcome {
    let error = failed(attempt(|| Ok((sql("select inside.fail('AB123')"), true))))?;
    same(
        &(error.sqlstate, error.message.as_str()),
        &(SqlState::Other(*b"AB123"), "so it failed"),
    )
}

fn context() -> Outcome {
    let error = PgError::new(SqlState::InternalError, "m")
        .with_context("first")
        .with_context("second");
    let error = failed(catch(|| -> () { error.raise() }))?;
    let context = error.context().unwrap_or_default();
    check(context.starts_with("first\nsecond"), context)
}

fn fields() -> Outcome {
    script("create schema c;\ncreate table c.t (a int not null)");
    let error = failed(attempt(|| Ok((sql("insert into c.t values (null)"), true))))?;
    let fields = error.fields.ok_or("no fields")?;
    same(&fields.table(), &Some(("c".to_owned(), "t".to_owned())))?;
    same(&fields.column().as_deref(), &Some("a"))
}

fn none() -> Outcome {
    same(&catch(|| 7).map_err(|error| error.message), &Ok(7))
}

/// A lock that no server process takes.
fn lock() -> *mut pg_sys::LWLock {
    let lock = Box::leak(Box::<pg_sys::LWLock>::default());
    // SAFETY: fresh memory that lives as long as the process; the tranche is PostgreSQL's own.
    unsafe { pg_sys::LWLockInitialize(lock, 1) };
    lock
}

fn is_held(lock: *mut pg_sys::LWLock) -> bool {
    // SAFETY: reads a list of the process.
    unsafe { pg_sys::LWLockHeldByMe(lock) }
}

fn take(lock: *mut pg_sys::LWLock) {
    // SAFETY: made by `lock`.
    unsafe { pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE) };
}

fn release(lock: *mut pg_sys::LWLock) {
    // SAFETY: made by `lock`. One that is not held is an error.
    unsafe { pg_sys::LWLockRelease(lock) };
}

fn lightweight_lock() -> Outcome {
    let lock = lock();
    let error = failed(catch(|| -> () {
        take(lock);
        PgError::new(SqlState::InternalError, "with a lock").raise()
    }))?;
    same(&error.message.as_str(), &"with a lock")?;
    check(!is_held(lock), "it is held")?;
    // One that is still taken would stand still here.
    take(lock);
    release(lock);
    let by_panic = failed(catch(|| -> () {
        take(lock);
        panic!("with a lock")
    }));
    check(
        by_panic.is_ok() && !is_held(lock),
        "it is held after a panic",
    )
}

fn outer_lock() -> Outcome {
    if compat::LISTS_LOCKS {
        return error_with_lock();
    }
    let ended = crate::db::ended("select inside.error_with_lock()");
    check(ended.contains("lightweight locks differ"), ended)?;
    let all = "select count(*) from pg_stat_activity where query like '%inside.error_with%' and pid <> pg_backend_pid()";
    same(&value(all).as_deref(), &Some("0"))
}

/// An error where two locks are held, and caught where one was.
pub(crate) fn error_with_lock() -> Outcome {
    let (outer, inner) = (lock(), lock());
    take(outer);
    let caught = catch(|| -> () {
        take(inner);
        PgError::new(SqlState::InternalError, "with two locks").raise()
    });
    let held = (is_held(outer), is_held(inner));
    release(outer);
    check(caught.is_err(), "no error")?;
    same(&held, &(true, false))
}

fn holdoffs() -> (u32, u32) {
    (
        plain::InterruptHoldoffCount(),
        plain::QueryCancelHoldoffCount(),
    )
}

fn interrupts() -> Outcome {
    let before = holdoffs();
    // SAFETY: taken back below.
    unsafe { pg_sys::InterruptHoldoffCount += 2 };
    let held = holdoffs();
    let caught = failed(catch(|| -> () {
        PgError::new(SqlState::InternalError, "m").raise()
    }));
    let after = holdoffs();
    // SAFETY: the number that was there before the test.
    unsafe { pg_sys::InterruptHoldoffCount = before.0 };
    check(caught.is_ok(), "no error")?;
    same(&after, &held)
}

fn interrupts_after_panic() -> Outcome {
    let before = holdoffs();
    let caught = failed(catch(|| -> () {
        // SAFETY: a variable of the process, which `catch` puts back.
        unsafe {
            pg_sys::InterruptHoldoffCount += 3;
            pg_sys::QueryCancelHoldoffCount += 1;
        }
        panic!("with interrupts held")
    }));
    check(caught.is_ok(), "no error")?;
    same(&holdoffs(), &before)
}

fn buffer() -> Outcome {
    script("create schema c;\ncreate table c.t (a int);\ninsert into c.t values (1)");
    let table = Open::new("c.t");
    let relation = table.as_ptr();
    error_in(|| {
        // SAFETY: an open table with one block.
        unsafe {
            let buffer = pg_sys::ReadBuffer(relation, 0);
            compat::lock_exclusive(buffer);
        }
    })?;
    check(page::is_let_go(&table), "it is pinned or locked")
}

fn snapshots() -> Outcome {
    // SAFETY: in a transaction with a snapshot.
    let active = || unsafe { (pg_sys::ActiveSnapshotSet(), pg_sys::GetActiveSnapshot()) };
    let before = active();
    error_in(|| {
        // The rollback pops them.
        snapshot::push();
        snapshot::push();
    })?;
    check(active() == before, "another snapshot is active")
}

fn table_lock() -> Outcome {
    script("create schema c;\ncreate table c.t (a int)");
    let locks = "select count(*) from pg_locks where pid = pg_backend_pid() and relation = 'c.t'::regclass and mode = 'ShareLock'";
    error_in(|| {
        sql("lock table c.t in share mode");
        assert_eq!(value(locks).as_deref(), Some("1"));
    })?;
    same(&value(locks).as_deref(), &Some("0"))
}

fn context_and_owner() -> Outcome {
    let now = || (plain::CurrentMemoryContext(), plain::CurrentResourceOwner());
    let before = now();
    error_in(|| {
        // The end of the subtransaction puts the former back.
        Context::of_process().enter();
    })?;
    check(now() == before, "another one is current")
}

/// A table that is open can't be dropped by the same session.
fn open_relation() -> Outcome {
    script("create schema c;\ncreate table c.t (a int)");
    error_in(|| std::mem::forget(Open::new("c.t")))?;
    sql("drop table c.t");
    same(&value("select to_regclass('c.t')"), &None)
}

fn count() -> Option<String> {
    value("select count(*) from c.t")
}

fn kept() -> Outcome {
    script("create schema c;\ncreate table c.t (a int)");
    for (keep, wanted) in [(true, "1"), (false, "1"), (true, "2")] {
        let made = attempt(|| Ok((sql("insert into c.t values (1)").len(), keep)));
        same(&made.map_err(|error| error.message), &Ok(0))?;
        same(&count().as_deref(), &Some(wanted))?;
    }
    Ok(())
}

fn undone() -> Outcome {
    script("create schema c;\ncreate table c.t (a int)");
    error_in(|| sql("insert into c.t values (1)"))?;
    let returned: Result<(), PgError> = attempt(|| {
        sql("insert into c.t values (1)");
        Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "not so",
        ))
    });
    same(
        &failed(returned)?.sqlstate,
        &SqlState::ObjectNotInPrerequisiteState,
    )?;
    same(&count().as_deref(), &Some("0"))
}

fn has_written() -> Outcome {
    script("create schema c;\ncreate table c.t (a int)");
    let subtransaction = Subtransaction::begin();
    sql("select * from c.t");
    let before = subtransaction.has_written();
    sql("insert into c.t values (1)");
    let after = subtransaction.has_written();
    subtransaction.end(true);
    same(&(before, after), &(false, true))
}

fn inner() -> Outcome {
    script("create schema c;\ncreate table c.t (a int)");
    let outer = attempt(|| {
        sql("insert into c.t values (1)");
        let inner = attempt(|| Ok((sql("insert into c.t values (2)").len(), true)));
        assert!(inner.is_ok());
        Ok(((), false))
    });
    check(outer.is_ok(), "an error")?;
    same(&count().as_deref(), &Some("0"))
}
