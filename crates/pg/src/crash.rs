//! What the processes of a subscription had in hand when the server crashed: a server that crashes at one transaction must not do so for ever. Run by
//! leaders, appliers and copy workers; files are removed by sessions, too.
//!
//! A process that dies by a signal takes shared memory with it, and all others, so this is kept in small files below `pg_stat_tmp`: they outlive the
//! processes, but not the operating system, so nothing is ever synced. Base backups leave them out.
//!
//! One file a subscription, `braid.DATABASE.SUBSCRIPTION`: a head, and a slot for each process that applies. One file more for each table that is being
//! copied, `braid.DATABASE.SUBSCRIPTION.TABLE`, with a single slot. States of a slot (durable as above; the process itself moves it, and the next leader
//! frees it):
//!
//! | state | |
//! |---|---|
//! | free | nobody, or a process that has ended |
//! | runs | a process; what it has in hand is not written down |
//! | idle | a process that writes down what it has in hand, and has nothing |
//! | applies | a process that has this transaction, or table, in hand |
//! | quit | a process that was told to end as the server had crashed (SIGQUIT) |
//!
//! Slots bear the number of the server's life, as of its shared memory. A leader that starts looks at slots of earlier lives: those that run or
//! apply are of processes that died by a signal. Those that were only told to quit say nothing, whatever they were at.
//!
//! In ordinary operation a process writes when it starts and when it ends, so nothing is paid for a transaction. After a crash that a
//! process of the subscription has died in, the head says *cautious*: transactions are applied one by one ([`is_cautious`]), and each is written down before
//! it begins, and each table of it, which costs some microseconds. That ends [`CAUTIOUS`] transactions later: no more can have been in hand.
//!
//! The head counts how often in a row a process died at one transaction, or table. A process that died before things were written down counts for the next
//! one that dies.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

use braid_gir::lsn_text;
use braid_ring::MAX_APPLIERS;
use pgrx::pg_sys;

use crate::error::PgError;
use crate::{catalog, compat, registry, settings};

/// Below the data directory, in which PostgreSQL's processes work.
const DIRECTORY: &str = "pg_stat_tmp";
/// "braidcr1", as a number.
const MAGIC: u64 = 0x3172_6364_6961_7262;
/// Bytes of the head, and of a slot: words of 8.
const PLACE: usize = 64;
/// Transactions after the leader's start that are applied with caution: more than a group ever has in flight.
const CAUTIOUS: u64 = 20_000;
/// The leader's slot; appliers have those of their numbers.
const LEADER: usize = MAX_APPLIERS;

const FREE: u64 = 0;
const RUNS: u64 = 1;
const IDLE: u64 = 2;
const APPLIES: u64 = 3;
const QUIT: u64 = 4;

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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Slot {
    life: u64,
    state: u64,
    in_hand: InHand,
}

/// What a process has in hand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct InHand {
    /// The provider's transaction; 0 for a table that is copied.
    xid: u64,
    /// Its commit's position; 0 where that is not known.
    commit_lsn: u64,
    /// By which position it is skipped.
    error_lsn: u64,
    /// The table that is changed, or copied; 0 for none yet.
    relation: u64,
}

impl InHand {
    fn is_same(self, other: Self) -> bool {
        self.xid == other.xid && (self.xid != 0 || self.relation == other.relation)
    }
}

/// What is known of crashes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Head {
    is_cautious: bool,
    /// A process died at something that is not known.
    is_unknown: bool,
    /// How often in a row one died at `at`.
    count: u64,
    at: InHand,
}

type Place = [u8; PLACE];

fn pack(words: [u64; 8]) -> Place {
    let mut bytes = [0; PLACE];
    for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *place = word.to_ne_bytes();
    }
    bytes
}

fn unpack(bytes: &Place) -> [u64; 8] {
    let mut words = [0; 8];
    for (word, place) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*place);
    }
    words
}

impl Slot {
    fn pack(self) -> Place {
        let Self {
            life,
            state,
            in_hand: at,
        } = self;
        pack([
            life,
            state,
            at.xid,
            at.commit_lsn,
            at.error_lsn,
            at.relation,
            0,
            0,
        ])
    }

    fn unpack(bytes: &Place) -> Self {
        let [life, state, xid, commit_lsn, error_lsn, relation, ..] = unpack(bytes);
        Self {
            life,
            state,
            in_hand: InHand {
                xid,
                commit_lsn,
                error_lsn,
                relation,
            },
        }
    }
}

impl Head {
    fn pack(self) -> Place {
        let at = self.at;
        let flags = u64::from(self.is_cautious) | u64::from(self.is_unknown) << 1;
        pack([
            MAGIC,
            flags,
            self.count,
            at.xid,
            at.commit_lsn,
            at.error_lsn,
            at.relation,
            0,
        ])
    }

    fn unpack(bytes: &Place) -> Self {
        let [magic, flags, count, xid, commit_lsn, error_lsn, relation, _] = unpack(bytes);
        if magic != MAGIC {
            return Self::default();
        }
        Self {
            is_cautious: flags & 1 != 0,
            is_unknown: flags & 2 != 0,
            count,
            at: InHand {
                xid,
                commit_lsn,
                error_lsn,
                relation,
            },
        }
    }

    /// Take in what processes that died by a signal had in hand.
    fn take_in(&mut self, died: &[Slot]) {
        if died.is_empty() {
            return;
        }
        self.is_cautious = true;
        let known = || died.iter().filter(|slot| slot.state == APPLIES);
        let again = known().find(|slot| self.count > 0 && slot.in_hand.is_same(self.at));
        let Some(slot) = again.or_else(|| known().next()) else {
            self.is_unknown = true;
            self.count = 0;
            return;
        };
        self.count = if again.is_some() {
            self.count.saturating_add(1)
        } else {
            1 + u64::from(self.is_unknown)
        };
        self.is_unknown = false;
        self.at = slot.in_hand;
    }
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

/// Nothing there is as good as zeros.
fn read(file: &File, at: u64) -> Place {
    let mut bytes = [0; PLACE];
    match file.read_exact_at(&mut bytes, at) {
        Ok(()) => bytes,
        Err(_) => [0; PLACE],
    }
}

/// The names of a subscription's files, or, for no subscription, of a database's.
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

/// Forget what is known of a subscription: it was enabled, or a transaction of it is to be skipped, or it is gone.
pub fn forget(subscription: u32) {
    for name in names(&name(registry::my_database(), subscription)) {
        // It may be gone by now.
        let _ = std::fs::remove_file(path(&name));
    }
}

/// Forget subscriptions of this database that are not among these.
pub fn forget_others(subscriptions: &[u32]) {
    let prefix = format!("braid.{}", registry::my_database());
    for found in names(&prefix) {
        let id = found.split('.').nth(2).and_then(|text| text.parse().ok());
        if id.is_some_and(|id: u32| !subscriptions.contains(&id)) {
            let _ = std::fs::remove_file(path(&found));
        }
    }
}

/// Look at what processes that are no more had in hand. To be called by a leader before there are others.
///
/// # Errors
/// 57P02, with the position by which a transaction is skipped, when the subscription is to stop.
pub fn look_back(subscription: u32, subscription_name: &str) -> Result<bool, (PgError, u64)> {
    let limit = settings::max_crashes();
    if limit == 0 {
        forget(subscription);
        return Ok(false);
    }
    let own = name(registry::my_database(), subscription);
    let mut died = Vec::new();
    let life = registry::life();
    for found in names(&own) {
        let Ok(file) = open(&found) else { continue };
        let is_copy = found != own;
        let slots = if is_copy { 0..1 } else { 0..LEADER + 1 };
        for number in slots {
            let slot = Slot::unpack(&read(&file, offset(number)));
            if slot.life == life || slot.state == FREE {
                continue;
            }
            if matches!(slot.state, RUNS | APPLIES) {
                died.push(slot);
            }
            let _ = file.write_all_at(&Slot::default().pack(), offset(number));
        }
        if is_copy && Slot::unpack(&read(&file, offset(0))).life != life {
            let _ = std::fs::remove_file(path(&found));
        }
    }
    let Ok(file) = open(&own) else {
        return Ok(false);
    };
    let mut head = Head::unpack(&read(&file, 0));
    head.take_in(&died);
    let _ = file.write_all_at(&head.pack(), 0);
    if died.is_empty() || head.count == 0 {
        return Ok(head.is_cautious);
    }
    let (what, detail) = describe(head.at);
    pgrx::log!(
        "subscription \"{subscription_name}\": the server has crashed while {what}, {} of {limit} times",
        head.count
    );
    if head.count < limit {
        return Ok(true);
    }
    let error = PgError::new(
        "57P02",
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

/// For people: what it was, and a sentence about it.
fn describe(at: InHand) -> (String, String) {
    let relation = at.relation.to_string();
    let table = crate::error::transaction(|| {
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

/// Show the process that applies, by its number, or the leader (`None`).
pub fn enter(subscription: u32, applier: Option<usize>) {
    let Some(number) = applier.map_or(Some(LEADER), |number| {
        (number < MAX_APPLIERS).then_some(number)
    }) else {
        return;
    };
    let file = name(registry::my_database(), subscription);
    show(subscription, &file, number, |head| Slot {
        life: registry::life(),
        state: if head.is_cautious { IDLE } else { RUNS },
        in_hand: InHand::default(),
    });
}

/// Show that this process copies a table.
pub fn enter_copying(subscription: u32, relation: u32) {
    let file = format!("{}.{relation}", name(registry::my_database(), subscription));
    show(subscription, &file, 0, |_| Slot {
        life: registry::life(),
        state: APPLIES,
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
    // SAFETY: the handler does what a signal handler may; the callback writes to a file of this process's own.
    unsafe {
        compat::pqsignal(SIGQUIT, Some(on_quit));
        pg_sys::before_shmem_exit(Some(on_exit), pg_sys::Datum::null());
    }
}

const SIGQUIT: i32 = 3;

unsafe extern "C" {
    #[link_name = "pwrite"]
    fn libc_pwrite(file: i32, bytes: *const u8, count: usize, offset: i64) -> isize;
    #[link_name = "_exit"]
    fn libc_exit(status: i32) -> !;
}

/// Write the first words of this process's slot: as many bytes as there are.
fn write(bytes: &[u8], skip: i64) {
    let file = FILE.load(Ordering::Acquire);
    if file >= 0 {
        let at = STATE_AT.load(Ordering::Relaxed) + skip;
        // SAFETY: an open file of this process's own. What can't be written is not known after a crash, no more.
        unsafe { libc_pwrite(file, bytes.as_ptr(), bytes.len(), at) };
    }
}

/// As PostgreSQL's own handler (SignalHandlerForCrashExit of src/backend/postmaster/interrupt.c, 15 to 18), which ends the process at once; before that the
/// slot says that it is not this process that has crashed.
unsafe extern "C-unwind" fn on_quit(_signal: i32) {
    write(&QUIT.to_ne_bytes(), 8);
    // SAFETY: ends the process, without any of its callbacks, as shared memory may be corrupt.
    unsafe { libc_exit(2) }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: i32, _argument: pg_sys::Datum) {
    write(&FREE.to_ne_bytes(), 8);
    if let Some(own) = OWN.take()
        && own.slot.in_hand.xid == 0
        && own.slot.in_hand.relation != 0
    {
        let file = name(registry::my_database(), own.subscription);
        let _ = std::fs::remove_file(path(&format!("{file}.{}", own.slot.in_hand.relation)));
    }
}

/// Whether transactions are applied one by one, as one of them may crash the server.
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

/// A transaction is taken in hand. `error_lsn` is the position by which it is skipped.
pub fn take(commit_lsn: u64, error_lsn: u64) {
    // Its Begin writes it down.
    if let Some(mut own) = OWN.get().filter(|own| own.is_cautious) {
        own.slot.in_hand = InHand {
            commit_lsn,
            error_lsn,
            ..InHand::default()
        };
        OWN.set(Some(own));
    }
}

/// It begins.
pub fn begin(xid: u32, commit_lsn: u64) {
    note(|slot| {
        slot.state = APPLIES;
        if slot.in_hand.commit_lsn != commit_lsn {
            // One that was not taken from the stream: it was parked.
            slot.in_hand.commit_lsn = commit_lsn;
            slot.in_hand.error_lsn = 0;
        }
        slot.in_hand.xid = u64::from(xid);
        slot.in_hand.relation = 0;
        true
    });
}

/// It changes a table.
pub fn change(relation: u32) {
    note(|slot| {
        let relation = u64::from(relation);
        let is_new = slot.state == APPLIES && slot.in_hand.relation != relation;
        slot.in_hand.relation = relation;
        is_new
    });
}

/// It is no longer in hand: the `sequence`th since the leader has started.
pub fn done(sequence: u64) {
    note(|slot| std::mem::replace(&mut slot.state, IDLE) != IDLE);
    if sequence > CAUTIOUS {
        relax();
    }
}

/// The crash is past.
fn relax() {
    let Some(mut own) = OWN.get().filter(|own| own.is_cautious) else {
        return;
    };
    own.is_cautious = false;
    own.slot.state = RUNS;
    OWN.set(Some(own));
    write(&own.slot.pack(), 0);
    if let Ok(file) = open(&name(registry::my_database(), own.subscription)) {
        let _ = file.write_all_at(&Head::default().pack(), 0);
    }
}
