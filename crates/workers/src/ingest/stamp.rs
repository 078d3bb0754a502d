//! The mark of the origin on the transaction in hand, and the versions of what it wrote: kept up to its commit, taken back with
//! a savepoint or the whole.
//!
//! The versions are written down just before the commit, as only then it is known which timestamp is the newest. They are kept by
//! the subtransaction that wrote the rows, whose id the rows carry.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use braid_apply::{Versions, store_versions};
use braid_node::clock;
use braid_node::origin::{self, COPIED, OriginId};
use braid_postgres::error::{self, PgError};
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use pgrx::pg_sys;

static REGISTERED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static PIECES: RefCell<Vec<Piece>> = const { RefCell::new(Vec::new()) };
}

/// What one call wrote.
#[derive(Debug)]
struct Piece {
    subtransaction: pg_sys::SubTransactionId,
    origin: OriginId,
    /// Full id of the subtransaction; 0 while nothing is known to be written.
    xid: u64,
    newest: i64,
    lsn: u64,
    versions: Versions,
}

/// A transaction that has records of two origins.
pub fn mixed() -> PgError {
    PgError::new(
        "0A000",
        "records of several origins can't be applied in one transaction",
    )
    .with_hint("Apply the records of each origin in a transaction of their own.")
}

/// Stamp the transaction in hand with `origin`; waits for another session that does.
///
/// # Errors
/// 0A000 when it has another origin; 55000 when the session has one of its own.
pub fn take(origin: OriginId) -> Result<(), PgError> {
    register();
    let is_marked = check(origin)?;
    // SAFETY: in a transaction. The lock is let go of after the callbacks of its end have run.
    unsafe {
        pg_sys::LockSharedObject(
            pg_sys::ReplicationOriginRelationId,
            pg_sys::Oid::from(u32::from(origin.0)),
            0,
            i32::try_from(pg_sys::ExclusiveLock).unwrap_or(7),
        );
    }
    if !is_marked {
        origin::use_for_commits(origin)?;
    }
    add(origin);
    Ok(())
}

/// Stamp the transaction in hand as one whose rows have no version, as what an initial copy writes.
///
/// # Errors
/// As [`take`].
pub fn take_unversioned() -> Result<(), PgError> {
    register();
    let origin = OriginId(COPIED);
    if !check(origin)? {
        // SAFETY: a variable of the process, read when the transaction writes and commits; it stands for no origin that could be
        // set up.
        unsafe { pg_sys::replorigin_session_origin = COPIED };
    }
    add(origin);
    Ok(())
}

fn register() {
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the callbacks are functions of this library, which is never unloaded.
        unsafe {
            pg_sys::RegisterXactCallback(Some(at_end), std::ptr::null_mut());
            pg_sys::RegisterSubXactCallback(Some(at_end_of_part), std::ptr::null_mut());
        }
    }
}

/// Whether the transaction has the mark already.
fn check(origin: OriginId) -> Result<bool, PgError> {
    let before = PIECES.with_borrow(|pieces| pieces.first().map(|piece| piece.origin));
    if before.is_some_and(|before| before != origin) {
        return Err(mixed());
    }
    // SAFETY: a read of a variable of the process.
    if before.is_none() && unsafe { pg_sys::replorigin_session_origin } != 0 {
        return Err(PgError::new(
            "55000",
            "this session replays for a replication origin of its own",
        )
        .with_hint("Call pg_replication_origin_session_reset() first."));
    }
    Ok(before.is_some())
}

fn add(origin: OriginId) {
    let piece = Piece {
        // SAFETY: in a transaction.
        subtransaction: unsafe { pg_sys::GetCurrentSubTransactionId() },
        origin,
        xid: 0,
        newest: i64::MIN,
        lsn: 0,
        versions: Versions::default(),
    };
    PIECES.with_borrow_mut(|pieces| pieces.push(piece));
}

/// What the call in hand wrote.
pub fn written(versions: Versions, newest: i64, lsn: u64) {
    // SAFETY: in a transaction.
    let xid = unsafe { pg_sys::GetCurrentFullTransactionId() }.value;
    PIECES.with_borrow_mut(|pieces| {
        if let Some(piece) = pieces.last_mut() {
            piece.xid = xid;
            piece.newest = newest;
            piece.lsn = lsn;
            piece.versions = versions;
        }
    });
    set_timestamp();
}

fn newest() -> i64 {
    PIECES.with_borrow(|pieces| pieces.iter().map(|piece| piece.newest).max().unwrap_or(0))
}

/// The commit carries the newest timestamp.
fn set_timestamp() {
    // SAFETY: a variable of the process, read when the transaction commits.
    unsafe {
        pg_sys::replorigin_session_origin_timestamp = newest().saturating_sub(EPOCH_DIFFERENCE);
    }
}

/// Take the mark away.
fn reset() {
    let had = PIECES.with_borrow_mut(|pieces| !std::mem::take(pieces).is_empty());
    if had {
        // SAFETY: set up in `take`.
        unsafe {
            let origin = pg_sys::replorigin_session_origin;
            pg_sys::replorigin_session_origin = 0;
            if origin != 0 && origin != COPIED {
                pg_sys::replorigin_session_reset();
            }
            pg_sys::replorigin_session_origin_lsn = 0;
            pg_sys::replorigin_session_origin_timestamp = 0;
        }
    }
}

/// Write the versions down. Rows of one subtransaction have one entry, whichever call wrote them.
fn before_commit() {
    let newest = newest();
    clock::seen(newest.saturating_sub(EPOCH_DIFFERENCE));
    let (mut parts, lsn) = PIECES.with_borrow_mut(|pieces| {
        let lsn = pieces.iter().map(|piece| piece.lsn).max().unwrap_or(0);
        let mut parts: Vec<(u64, Versions)> = Vec::new();
        for piece in pieces.iter_mut().filter(|piece| piece.xid != 0) {
            let versions = std::mem::take(&mut piece.versions);
            match parts.iter_mut().find(|(xid, _)| *xid == piece.xid) {
                Some((_, all)) => all.extend(versions),
                None => parts.push((piece.xid, versions)),
            }
        }
        (parts, lsn)
    });
    // SAFETY: before the commit of the transaction that has written; the snapshot is for values that are stored out of line.
    unsafe {
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
    }
    for (xid, versions) in parts.drain(..) {
        if let Err(error) = store_versions(|| xid, versions, newest) {
            error.raise();
        }
    }
    // SAFETY: as above. The position is for those who look at the origin; an abort from here on may leave it ahead, and nothing
    // goes by it.
    unsafe {
        pg_sys::PopActiveSnapshot();
        pg_sys::replorigin_session_origin_lsn = lsn;
    }
    set_timestamp();
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_end(event: pg_sys::XactEvent::Type, _arg: *mut std::ffi::c_void) {
    if PIECES.with_borrow(Vec::is_empty) {
        return;
    }
    match event {
        pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT => error::pass_on(before_commit),
        pg_sys::XactEvent::XACT_EVENT_PRE_PREPARE => PgError::new(
            "0A000",
            "cannot PREPARE a transaction that has applied records of another system",
        )
        .with_hint("Commit it instead.")
        .raise(),
        pg_sys::XactEvent::XACT_EVENT_COMMIT | pg_sys::XactEvent::XACT_EVENT_ABORT => reset(),
        _ => {}
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn at_end_of_part(
    event: pg_sys::SubXactEvent::Type,
    mine: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _arg: *mut std::ffi::c_void,
) {
    if PIECES.with_borrow(Vec::is_empty) {
        return;
    }
    match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => PIECES.with_borrow_mut(|pieces| {
            for piece in pieces
                .iter_mut()
                .filter(|piece| piece.subtransaction == mine)
            {
                piece.subtransaction = parent;
            }
        }),
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => {
            let rest = PIECES
                .with_borrow(|pieces| pieces.iter().any(|piece| piece.subtransaction != mine));
            if rest {
                PIECES.with_borrow_mut(|pieces| {
                    pieces.retain(|piece| piece.subtransaction != mine);
                });
                set_timestamp();
            } else {
                reset();
            }
        }
        _ => {}
    }
}
