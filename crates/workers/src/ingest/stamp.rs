//! The replication origin of the current transaction, and the versions of the rows that it wrote.
//! Both are kept until its commit, and discarded with a savepoint or the whole transaction.
//!
//! The versions are stored just before the commit, as only then it is known which timestamp is the
//! newest. They are kept per subtransaction that wrote the rows, as rows carry its id.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use braid_apply::{Versions, store_versions};
use braid_bgworker::sqlstate::SqlState;
use braid_node::clock;
use braid_node::origin::{self, COPIED, OriginId};
use braid_postgres::error::{self, PgError};
use braid_postgres::lock::{self, LockMode};
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::transaction::{self, End, PartEnd};
use braid_postgres::{session_origin, snapshot};
use pgrx::pg_sys;

static REGISTERED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static PIECES: RefCell<Vec<Piece>> = const { RefCell::new(Vec::new()) };
}

/// The writes of one call.
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
        SqlState::FeatureNotSupported,
        "records of several origins cannot be applied in one transaction",
    )
    .with_hint("Apply the records of each origin in a transaction of their own.")
}

/// Gives the current transaction the origin `origin`. Waits for another session that uses it.
///
/// # Errors
/// 0A000 if it has another origin; 55000 if the session has one of its own.
pub fn take(origin: OriginId) -> Result<(), PgError> {
    register();
    let is_marked = check(origin)?;
    // PostgreSQL lets go of the lock after the callbacks of the transaction's end have run.
    lock::lock_shared_object(
        pg_sys::ReplicationOriginRelationId,
        u32::from(origin.0),
        LockMode::Exclusive,
    );
    if !is_marked {
        origin::use_for_commits(origin)?;
    }
    add(origin);
    Ok(())
}

/// Marks the current transaction as one whose rows have no version, as in an initial copy.
///
/// # Errors
/// As [`take`].
pub fn take_unversioned() -> Result<(), PgError> {
    register();
    let origin = OriginId(COPIED);
    if !check(origin)? {
        // `COPIED` is no origin that could be set up.
        session_origin::set(COPIED);
    }
    add(origin);
    Ok(())
}

fn register() {
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        transaction::on_end(at_end);
        transaction::on_part_end(at_end_of_part);
    }
}

/// Whether the transaction has the mark already.
fn check(origin: OriginId) -> Result<bool, PgError> {
    let before = PIECES.with_borrow(|pieces| pieces.first().map(|piece| piece.origin));
    if before.is_some_and(|before| before != origin) {
        return Err(mixed());
    }
    if before.is_none() && session_origin::get() != 0 {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "this session replays for a replication origin of its own",
        )
        .with_hint("Call pg_replication_origin_session_reset() first."));
    }
    Ok(before.is_some())
}

fn add(origin: OriginId) {
    let piece = Piece {
        subtransaction: transaction::subtransaction(),
        origin,
        xid: 0,
        newest: i64::MIN,
        lsn: 0,
        versions: Versions::default(),
    };
    PIECES.with_borrow_mut(|pieces| pieces.push(piece));
}

/// Records what the running call wrote.
pub fn written(versions: Versions, newest: i64, lsn: u64) {
    let xid = transaction::assign_full_id();
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
    session_origin::set_timestamp(newest().saturating_sub(EPOCH_DIFFERENCE));
}

/// Take the mark away.
fn reset() {
    let had = PIECES.with_borrow_mut(|pieces| !std::mem::take(pieces).is_empty());
    if had {
        session_origin::leave(COPIED);
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
    // The snapshot is for values that are stored out of line.
    let stored = snapshot::of_transaction(|| {
        parts
            .drain(..)
            .try_for_each(|(xid, versions)| store_versions(|| xid, versions, newest))
    });
    if let Err(error) = stored {
        error.raise();
    }
    // The position is only for display of the origin; an abort after this may leave it ahead, and
    // nothing depends on it.
    session_origin::set_position(lsn);
    set_timestamp();
}

fn at_end(end: End) {
    if PIECES.with_borrow(Vec::is_empty) {
        return;
    }
    match end {
        End::BeforeCommit => error::pass_on(before_commit),
        End::BeforePrepare => PgError::new(
            SqlState::FeatureNotSupported,
            "cannot PREPARE a transaction that has applied records of another system",
        )
        .with_hint("Commit it instead.")
        .raise(),
        End::Committed | End::Prepared | End::RolledBack => reset(),
    }
}

fn at_end_of_part(end: PartEnd) {
    if PIECES.with_borrow(Vec::is_empty) {
        return;
    }
    if end.stays {
        PIECES.with_borrow_mut(|pieces| {
            for piece in pieces
                .iter_mut()
                .filter(|piece| piece.subtransaction == end.part)
            {
                piece.subtransaction = end.parent;
            }
        });
        return;
    }
    let rest =
        PIECES.with_borrow(|pieces| pieces.iter().any(|piece| piece.subtransaction != end.part));
    if rest {
        PIECES.with_borrow_mut(|pieces| {
            pieces.retain(|piece| piece.subtransaction != end.part);
        });
        set_timestamp();
    } else {
        reset();
    }
}
