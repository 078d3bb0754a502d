//! Records of the current transactions of a subscription's processes, which outlive a crash of the
//! server: a server that crashes at one transaction must not do so for ever. Run by leaders,
//! appliers and copy workers; sessions remove the files, too. `braid_bgworker::crash` decides.
//!
//! A process that dies by a signal takes shared memory and all other processes with it. So the
//! notes are small files below `pg_stat_tmp`. They outlive the processes, but not the operating
//! system, and are never synced. Base backups leave them out.
//!
//! A subscription has one file, `braid.DATABASE.SUBSCRIPTION`: a head, and a slot for each process
//! that applies. Each table that is being copied has a file of one slot, named
//! `braid.DATABASE.SUBSCRIPTION.TABLE`. A manager removes the files of subscriptions and databases
//! that are gone.
//!
//! A slot bears the number of the server's life: the time at which shared memory was set up. A
//! leader that starts looks at slots of earlier lives. A slot in state runs or applies belongs to a
//! process that died by a signal. A process that is asked to end because another one crashed
//! (SIGQUIT) says so in its slot.
//!
//! In ordinary operation a process writes when it starts and when it ends. A transaction costs
//! nothing. If a process of the subscription has died by a signal, the head says *cautious*:
//! transactions are applied one by one ([`is_cautious`]). Each of them, and each of its tables, is
//! recorded before it is touched, which costs some microseconds. Caution ends 20,000 transactions
//! later: no more can have been in flight.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

use braid_bgworker::crash::{Head, InHand, PLACE, Place, Slot, State};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::lsn_text;
use braid_postgres::error::PgError;
use braid_postgres::{catalog, compat, process};
use braid_ring::MAX_APPLIERS;

use crate::{registry, settings};

/// Below the data directory, in which PostgreSQL's processes work.
const DIRECTORY: &str = "pg_stat_tmp";
/// Transactions after the leader's start that are applied with caution: more than a group ever has
/// in flight.
const CAUTIOUS: u64 = 20_000;
/// The leader's slot; appliers have those of their numbers.
const LEADER: usize = MAX_APPLIERS;

/// The file of this process's slot, for its signal handler; -1: none.
static FILE: AtomicI32 = AtomicI32::new(-1);
/// Where in it the slot's state is.
static STATE_AT: AtomicI64 = AtomicI64::new(0);

thread_local! {
    static OWN: Cell<Option<Own>> = const { Cell::new(None) };
}

/// This process's slot.
#[derive(Debug, Clone, Copy)]
struct Own {
    subscription: u32,
    is_cautious: bool,
    slot: Slot,
}

fn name(database: u32, subscription: u32) -> String {
    format!("braid.{database}.{subscription}")
}

fn path(name: &str) -> PathBuf {
    [DIRECTORY, name].iter().collect()
}

fn open(name: &str) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path(name))
}

fn offset(slot: usize) -> u64 {
    (PLACE * (slot + 1)) as u64
}

/// Reads a head or a slot; zeros where there is none.
fn read(file: &File, at: u64) -> Place {
    let mut bytes = [0; PLACE];
    match file.read_exact_at(&mut bytes, at) {
        Ok(()) => bytes,
        Err(_) => [0; PLACE],
    }
}

/// Returns the names of files that begin so.
fn names(prefix: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(DIRECTORY) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| {
            name.strip_prefix(prefix)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
        .collect()
}

/// Forgets crashes of a subscription: it was enabled, or a transaction of it is to be skipped,
/// or it is gone.
pub fn forget(subscription: u32) {
    for name in names(&name(process::my_database(), subscription)) {
        let _ = std::fs::remove_file(path(&name));
    }
}

/// Forgets crashes of subscriptions of this database that are not among these.
pub fn forget_others(subscriptions: &[u32]) {
    let prefix = format!("braid.{}", process::my_database());
    for found in names(&prefix) {
        let id = found.split('.').nth(2).and_then(|text| text.parse().ok());
        if id.is_some_and(|id: u32| !subscriptions.contains(&id)) {
            let _ = std::fs::remove_file(path(&found));
        }
    }
}

/// Forgets crashes of all subscriptions of these databases.
pub fn forget_databases(is_gone: impl Fn(u32) -> bool) {
    for found in names("braid") {
        let database = found.split('.').nth(1).and_then(|text| text.parse().ok());
        if database.is_some_and(&is_gone) {
            let _ = std::fs::remove_file(path(&found));
        }
    }
}

/// Looks at the work that processes of the server's earlier lives were doing. A leader calls it
/// before it starts other processes.
///
/// # Errors
/// 57P02, with the position by which a transaction is skipped, when the subscription is to stop.
pub fn look_back(subscription: u32, subscription_name: &str) -> Result<(), (PgError, u64)> {
    let limit = settings::max_crashes();
    if limit == 0 {
        forget(subscription);
        return Ok(());
    }
    let own = name(process::my_database(), subscription);
    let mut died = Vec::new();
    let life = registry::life();
    for found in names(&own) {
        let Ok(file) = open(&found) else { continue };
        let is_copy = found != own;
        let slots = if is_copy { 0..1 } else { 0..LEADER + 1 };
        for number in slots {
            let slot = Slot::unpack(&read(&file, offset(number)));
            if slot.life == life || slot.state == State::Free {
                continue;
            }
            if slot.has_died(life) {
                died.push(slot);
            }
            let _ = file.write_all_at(&Slot::default().pack(), offset(number));
        }
        if is_copy && Slot::unpack(&read(&file, offset(0))).life != life {
            let _ = std::fs::remove_file(path(&found));
        }
    }
    let Ok(file) = open(&own) else {
        return Ok(());
    };
    let mut head = Head::unpack(&read(&file, 0));
    head.take_in(&died);
    let _ = file.write_all_at(&head.pack(), 0);
    if died.is_empty() || head.count == 0 {
        return Ok(());
    }
    let (what, detail) = describe(head.at);
    pgrx::log!(
        "subscription \"{subscription_name}\": the server has crashed while {what}, {} of {limit} times",
        head.count
    );
    if head.count < limit {
        return Ok(());
    }
    let error = PgError::new(
        SqlState::CrashShutdown,
        format!("{what} has crashed the server {} times in a row", head.count),
    )
    .with_detail(&detail)
    .with_hint(if head.at.xid == 0 {
        "Look for the cause in the server's log; a trigger or a type's function may be it. Then run braid.enable_subscription."
    } else {
        "Look for the cause in the server's log; a trigger or a type's function may be it. Then run braid.enable_subscription, or leave this \
         transaction out with braid.skip_transaction."
    });
    Err((error, head.at.error_lsn))
}

/// Names the work of a slot for people, and describes it in a sentence.
fn describe(at: InHand) -> (String, String) {
    let relation = at.relation.to_string();
    let table = braid_postgres::error::transaction(|| {
        let found = catalog::query(
            "select n.nspname || '.' || c.relname from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
             where c.oid = $1::oid",
            &[Some(&relation)],
        );
        Ok(found.get(0, 0).map(str::to_owned))
    });
    let table = table.ok().flatten();
    if at.xid == 0 {
        let table = table.unwrap_or(relation);
        return (
            format!("copying table \"{table}\""),
            "Its copy was rolled back each time.".to_owned(),
        );
    }
    let what = if at.commit_lsn == 0 {
        format!("applying transaction {}", at.xid)
    } else {
        format!(
            "applying transaction {} with its commit at {}",
            at.xid,
            lsn_text(at.commit_lsn)
        )
    };
    let detail = match table {
        Some(table) => format!("The last change that was begun is one of table \"{table}\"."),
        None => "None of its changes had been begun.".to_owned(),
    };
    (what, detail)
}

/// Notes that this process applies: the applier of this number, or the leader (`None`).
pub fn enter(subscription: u32, applier: Option<usize>) {
    let Some(number) = applier.map_or(Some(LEADER), |number| {
        (number < MAX_APPLIERS).then_some(number)
    }) else {
        return;
    };
    let file = name(process::my_database(), subscription);
    show(subscription, &file, number, |head| Slot {
        life: registry::life(),
        state: if head.is_cautious {
            State::Idle
        } else {
            State::Runs
        },
        in_hand: InHand::default(),
    });
}

/// Notes that this process copies a table.
pub fn enter_copying(subscription: u32, relation: u32) {
    let file = format!("{}.{relation}", name(process::my_database(), subscription));
    show(subscription, &file, 0, |_| Slot {
        life: registry::life(),
        state: State::Applies,
        in_hand: InHand {
            relation: u64::from(relation),
            ..InHand::default()
        },
    });
}

fn show(subscription: u32, file: &str, number: usize, slot: impl Fn(&Head) -> Slot) {
    if settings::max_crashes() == 0 || OWN.get().is_some() {
        return;
    }
    let Ok(file) = open(file) else {
        return;
    };
    let head = Head::unpack(&read(&file, 0));
    let slot = slot(&head);
    if file.write_all_at(&slot.pack(), offset(number)).is_err() {
        return;
    }
    OWN.set(Some(Own {
        subscription,
        is_cautious: head.is_cautious,
        slot,
    }));
    let at = i64::try_from(offset(number)).unwrap_or(0);
    STATE_AT.store(at, Ordering::Relaxed);
    FILE.store(file.into_raw_fd(), Ordering::Release);
    // SAFETY: the handler does what a signal handler may.
    unsafe { compat::on_quit(on_quit) };
    process::before_exit(on_exit);
}

unsafe extern "C" {
    #[link_name = "pwrite"]
    fn libc_pwrite(file: i32, bytes: *const u8, count: usize, offset: i64) -> isize;
    /// Ends the process, and touches no memory of it.
    #[link_name = "_exit"]
    safe fn libc_exit(status: i32) -> !;
}

/// Writes these bytes into this process's slot, from the byte `skip` on.
fn write(bytes: &[u8], skip: i64) {
    let file = FILE.load(Ordering::Acquire);
    if file >= 0 {
        let at = STATE_AT.load(Ordering::Relaxed) + skip;
        // SAFETY: an open file of this process's own. If the write fails, the only loss is this
        // record.
        unsafe { libc_pwrite(file, bytes.as_ptr(), bytes.len(), at) };
    }
}

/// Ends the process at once, as PostgreSQL's own handler does (SignalHandlerForCrashExit of
/// src/backend/postmaster/interrupt.c, 15 to 18). The slot says first that this process has not
/// crashed.
fn on_quit() {
    write(&(State::Quit as u64).to_ne_bytes(), 8);
    // Without any of the process's callbacks, as shared memory may be corrupt.
    libc_exit(2)
}

fn on_exit() {
    write(&(State::Free as u64).to_ne_bytes(), 8);
    if let Some(own) = OWN.take()
        && own.slot.in_hand.xid == 0
        && own.slot.in_hand.relation != 0
    {
        let file = name(process::my_database(), own.subscription);
        let _ = std::fs::remove_file(path(&format!("{file}.{}", own.slot.in_hand.relation)));
    }
}

/// Returns whether transactions are applied one by one, as one of them may crash the server.
pub fn is_cautious() -> bool {
    OWN.get().is_some_and(|own| own.is_cautious)
}

fn note(change: impl FnOnce(&mut Slot) -> bool) {
    let Some(mut own) = OWN.get().filter(|own| own.is_cautious) else {
        return;
    };
    if change(&mut own.slot) {
        OWN.set(Some(own));
        write(&own.slot.pack(), 0);
    }
}

/// Records that a transaction becomes the current one. `error_lsn` is the position by which it is
/// skipped.
pub fn take(commit_lsn: u64, error_lsn: u64) {
    // `begin` writes the note.
    if let Some(mut own) = OWN.get().filter(|own| own.is_cautious) {
        own.slot.in_hand = InHand {
            commit_lsn,
            error_lsn,
            ..InHand::default()
        };
        OWN.set(Some(own));
    }
}

/// Records that the current transaction begins.
pub fn begin(xid: u32, commit_lsn: u64) {
    note(|slot| {
        slot.state = State::Applies;
        if slot.in_hand.commit_lsn != commit_lsn {
            // A parked transaction was not taken from the stream.
            slot.in_hand.commit_lsn = commit_lsn;
            slot.in_hand.error_lsn = 0;
        }
        slot.in_hand.xid = u64::from(xid);
        slot.in_hand.relation = 0;
        true
    });
}

/// Notes that it changes a table.
pub fn change(relation: u32) {
    note(|slot| {
        let relation = u64::from(relation);
        let is_new = slot.state == State::Applies && slot.in_hand.relation != relation;
        slot.in_hand.relation = relation;
        is_new
    });
}

/// Records that there is no current transaction. The last was the `sequence`th since the leader
/// started.
pub fn done(sequence: u64) {
    note(|slot| std::mem::replace(&mut slot.state, State::Idle) != State::Idle);
    if sequence > CAUTIOUS {
        relax();
    }
}

/// Ends caution.
fn relax() {
    let Some(mut own) = OWN.get().filter(|own| own.is_cautious) else {
        return;
    };
    own.is_cautious = false;
    own.slot.state = State::Runs;
    OWN.set(Some(own));
    write(&own.slot.pack(), 0);
    if let Ok(file) = open(&name(process::my_database(), own.subscription)) {
        let _ = file.write_all_at(&Head::default().pack(), 0);
    }
}
