//! The versioned transaction of this session: declared with SET LOCAL, which waits; released;
//! committed in the order of versions. Run by every session.
//!
//! 1. [`before_set`] checks what can be known before the value is set.
//! 2. [`declared`] claims a slot, waits until it is *ready*, and takes the transaction's snapshot.
//! 3. [`allows`] is asked about each table that a statement uses.
//! 4. Before the commit record the session waits until it *may commit*.
//! 5. Once the commit is visible, or on any rollback, it tells the versions process. These steps
//!    raise nothing: two stores and a wake-up.
//!
//! Nothing between 1 and the snapshot may take a snapshot that the transaction would keep: no SPI.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::{PgError, pass_on};
use braid_postgres::hook::Utility;
use braid_postgres::transaction::{self as postgres, End, PartEnd};
use braid_postgres::wait::Wait;
use braid_postgres::{
    access_check, declared_tables, encoding, latch, plain, process, server, setting as settings,
    snapshot, syscache, table_rights, timestamp,
};
use braid_versions::{Access, Declaration, Record, TABLES_LIMIT, TableName};
use pgrx::pg_sys;

use super::memory::{Slot, claim, mark, problem, state};
use super::setting::{self, Acting, Set};
use super::{DECLARES, RELEASES, note, tables};
use crate::ddl::owners_query;
use crate::registry::{self, ManagerEntry};

/// Between two looks whether the versions process has started anew.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A table that the transaction has declared.
#[derive(Debug, Clone, Copy)]
struct Declared {
    relation: pg_sys::Oid,
    access: Access,
    is_used: bool,
    is_released: bool,
}

/// This session's versioned transaction.
struct Current {
    slot: &'static Slot,
    tables: Vec<Declared>,
    /// The part of the transaction in which it was declared.
    part: pg_sys::SubTransactionId,
    /// The note is written, or an applier applies it: the transaction waits before its commit.
    is_noted: bool,
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

pub(super) fn install() {
    postgres::on_end(at_end);
    postgres::on_part_end(at_part_end);
}

fn state_error(message: impl Into<String>) -> PgError {
    PgError::new(SqlState::ObjectNotInPrerequisiteState, message)
}

/// A table's name for messages.
pub(super) fn name_of(relation: pg_sys::Oid) -> String {
    let name = syscache::utf8_or_empty(plain::get_rel_name(relation));
    if declared_tables::is_visible(relation) {
        return name;
    }
    let (schema, name) = syscache::relation_name(relation);
    format!("{schema}.{name}")
}

/// A statement is about to set one of the settings.
pub(super) fn before_set(statement: Utility<'_>, set: Set) -> u8 {
    if let Err(error) = check_set(statement, set) {
        error.raise();
    }
    setting::allow(true);
    match set.setting {
        Acting::Versions => DECLARES,
        Acting::Release => RELEASES,
    }
}

fn check_set(statement: Utility<'_>, set: Set) -> Result<(), PgError> {
    let name = match set.setting {
        Acting::Versions => "braid.versions",
        Acting::Release => "braid.release",
    };
    if !set.is_local {
        return Err(PgError::new(
            SqlState::FeatureNotSupported,
            format!("parameter \"{name}\" can only be set with SET LOCAL"),
        )
        .with_hint("A declaration counts for one transaction. Use SET LOCAL."));
    }
    if !statement.is_in_block() {
        return Err(PgError::new(
            SqlState::NoActiveSqlTransaction,
            format!("SET LOCAL {name} can only be used in transaction blocks"),
        )
        .with_hint("Begin a transaction with BEGIN ISOLATION LEVEL REPEATABLE READ."));
    }
    if server::is_in_recovery() {
        return Err(PgError::new(
            SqlState::FeatureNotSupported,
            "versioned transactions cannot run on a standby",
        )
        .with_hint("Run them on the primary. Versioned tables can be read here without."));
    }
    if set.setting == Acting::Release {
        let is_versioned = CURRENT.with_borrow(Option::is_some);
        return if is_versioned {
            Ok(())
        } else {
            Err(state_error("there is no versioned transaction")
                .with_hint("SET LOCAL braid.versions makes the transaction a versioned one."))
        };
    }
    if !postgres::keeps_its_snapshot() {
        return Err(PgError::new(
            SqlState::FeatureNotSupported,
            "versioned transactions need isolation level REPEATABLE READ or SERIALIZABLE",
        )
        .with_detail("At isolation level READ COMMITTED each statement would see other versions.")
        .with_hint("Begin the transaction with BEGIN ISOLATION LEVEL REPEATABLE READ."));
    }
    if declared_tables::has_snapshot() {
        return Err(PgError::new(
            SqlState::ActiveSqlTransaction,
            "braid.versions must be set before the transaction has its snapshot",
        )
        .with_detail("SELECT, CALL, DO, PREPARE and functions take it.")
        .with_hint("Make SET LOCAL braid.versions the first statement of the transaction."));
    }
    Ok(())
}

/// `braid.versions` was set: waits for what the transaction is to see, and takes its snapshot.
pub(super) fn declared() {
    setting::allow(false);
    let declared = settings::get(c"braid.versions").unwrap_or_default();
    if declared.is_empty() {
        return;
    }
    if let Err(error) = begin(&encoding::utf8(&declared)) {
        error.raise();
    }
}

fn begin(declared: &str) -> Result<(), PgError> {
    let declaration = declared.parse::<Declaration>().map_err(|error| {
        PgError::new(SqlState::InvalidParameterValue, error.problem.to_string())
    })?;
    let found = look_up(&declaration)?;
    let numbers: Vec<(u32, Access)> = found
        .iter()
        .map(|(number, d)| (*number, d.access))
        .collect();
    let slot = ask(&numbers, false)?;
    let tables = found.into_iter().map(|(_, declared)| declared).collect();
    CURRENT.set(Some(Current {
        slot,
        tables,
        part: postgres::subtransaction(),
        is_noted: false,
    }));
    slot.state.store(state::ASKED, Ordering::SeqCst);
    wait_for(slot, state::READY)?;
    // Until the slot says *running*, no later write of these tables becomes visible.
    snapshot::push();
    snapshot::pop();
    if !slot.advance(state::READY, state::RUNNING) {
        return Err(refusal(slot));
    }
    wake_process();
    let shipped = slot.note();
    if shipped.is_empty() {
        return Ok(());
    }
    if postgres::is_read_only() {
        return Err(PgError::new(
            SqlState::ReadOnlySqlTransaction,
            "a read-only transaction cannot declare tables as written",
        )
        .with_hint("Declare them as read, or begin the transaction with READ WRITE."));
    }
    note::write(&shipped)?;
    CURRENT.with_borrow_mut(|current| {
        if let Some(current) = current {
            current.is_noted = true;
        }
    });
    Ok(())
}

/// Waits until all is visible here that a remote transaction had seen, and has the next transaction
/// of this process be that one: it commits in the order of versions. `goes_on` is asked now and
/// then whether to go on. Outside of a transaction: nothing is held meanwhile.
///
/// # Errors
/// 57P01 if `goes_on` says no; 55000 for a transaction that can't be applied; 40001 to try again.
pub fn follow(
    shipped: &[u8],
    record: &Record,
    goes_on: impl FnMut() -> bool,
) -> Result<(), PgError> {
    leave(state::ENDED);
    entry()?;
    let tables: Vec<(u32, Access)> = record
        .tables
        .iter()
        .map(|(table, shipped)| match shipped.own {
            Some(_) => (table.0, Access::Write),
            None => (table.0, Access::Read),
        })
        .collect();
    let slot = claim(&tables, false, timestamp::now(), i64::MAX).ok_or_else(too_many)?;
    slot.applies.store(1, Ordering::Release);
    let fits = slot.set_note(shipped);
    CURRENT.set(Some(Current {
        slot,
        tables: Vec::new(),
        // TopSubTransactionId of src/include/c.h: rolled back with the whole only.
        part: 1,
        is_noted: true,
    }));
    let followed = if fits {
        slot.state.store(state::ASKED, Ordering::SeqCst);
        wait_while(slot, state::READY, goes_on)
    } else {
        Err(state_error(
            "the versions of a remote transaction are too long",
        ))
    };
    match followed {
        Ok(()) if slot.advance(state::READY, state::RUNNING) => {
            wake_process();
            Ok(())
        }
        Ok(()) => {
            let error = refusal(slot);
            leave(state::ENDED);
            Err(error)
        }
        Err(error) => {
            leave(state::ENDED);
            Err(error)
        }
    }
}

/// Finds the tables of the remote transaction that this process follows. In its transaction.
pub fn find_tables() {
    let known = tables::all();
    CURRENT.with_borrow_mut(|current| {
        let Some(current) = current.as_mut().filter(|current| current.is_noted) else {
            return;
        };
        let cells = current.slot.tables();
        let of = |number: u32| known.iter().find(|table| table.number == number);
        current.tables = cells
            .filter_map(|cell| {
                let cell = cell.load(Ordering::Acquire);
                let access = if cell & mark::WRITES == 0 {
                    Access::Read
                } else {
                    Access::Write
                };
                Some(Declared {
                    relation: of(cell & mark::NUMBER)?.relation,
                    access,
                    is_used: false,
                    is_released: false,
                })
            })
            .collect();
    });
}

/// Whether this process applies a remote versioned transaction that writes the table: then it comes
/// after all that is here.
#[must_use]
pub fn is_in_order(relation: pg_sys::Oid) -> bool {
    CURRENT.with_borrow(|current| {
        let applies = |current: &&Current| {
            current.is_noted && current.slot.applies.load(Ordering::Acquire) != 0
        };
        let written =
            |declared: &Declared| declared.relation == relation && declared.access == Access::Write;
        let current = current.as_ref().filter(applies);
        current.is_some_and(|current| current.tables.iter().any(written))
    })
}

/// An applier's attempt is over: what it followed is not the next transaction's.
pub fn forget() {
    leave(state::ENDED);
}

fn too_many() -> PgError {
    PgError::new(
        SqlState::InsufficientResources,
        "too many versioned transactions at once",
    )
    .with_hint("A server has at most 512. Try again, or use fewer connections.")
}

/// The tables that names stand for, with their numbers, each once; and those that foreign keys of
/// written ones reference: PostgreSQL 19 reads them below the executor.
fn look_up(declaration: &Declaration) -> Result<Vec<(u32, Declared)>, PgError> {
    let mut found: Vec<(u32, Declared)> = Vec::new();
    for (name, access) in declaration.tables() {
        let (number, relation) = find(name)?;
        check_rights(relation, access)?;
        add(&mut found, number, relation, access);
    }
    let written: Vec<pg_sys::Oid> = found
        .iter()
        .filter(|(_, declared)| declared.access == Access::Write)
        .map(|(_, declared)| declared.relation)
        .collect();
    for referenced in written.into_iter().flat_map(declared_tables::referenced) {
        if let Some(number) = tables::number_of(referenced) {
            add(&mut found, number, referenced, Access::Read);
        }
    }
    if found.len() > TABLES_LIMIT {
        return Err(PgError::new(
            SqlState::ProgramLimitExceeded,
            "a versioned transaction declares at most 256 tables",
        )
        .with_detail("Tables that foreign keys reference count, too."));
    }
    Ok(found)
}

fn add(found: &mut Vec<(u32, Declared)>, number: u32, relation: pg_sys::Oid, access: Access) {
    let same = |(known, _): &&mut (u32, Declared)| *known == number;
    if let Some((_, known)) = found.iter_mut().find(same) {
        known.access = known.access.max(access);
        return;
    }
    let declared = Declared {
        relation,
        access,
        is_used: false,
        is_released: false,
    };
    found.push((number, declared));
}

/// The number and OID of a versioned table.
fn find(name: &TableName) -> Result<(u32, pg_sys::Oid), PgError> {
    let relation = declared_tables::find(name.schema.as_deref(), &name.table);
    let relation = relation.ok_or_else(|| {
        PgError::new(
            SqlState::UndefinedTable,
            format!("relation \"{name}\" does not exist"),
        )
        .with_hint("Names are looked up by search_path. Give the schema, as in 'write shop.stock'.")
    })?;
    let table = tables::of(relation).ok_or_else(|| {
        state_error(format!("table {name} is not versioned")).with_hint(format!(
            "Leave it out of the declaration, or call braid.version_table('{name}')."
        ))
    })?;
    if table.phase != tables::COUNTS {
        return Err(moves(relation, table.phase));
    }
    Ok((table.number, relation))
}

/// A table is about to be versioned, or to be an ordinary one.
fn moves(relation: pg_sys::Oid, phase: u32) -> PgError {
    let what = if phase == tables::BEGINS {
        "is about to be versioned"
    } else {
        "is about to be an ordinary table"
    };
    state_error(format!("table {} {what}", name_of(relation)))
        .with_detail("Meanwhile nobody writes it: all nodes have to get what was written before.")
        .with_hint(
            "Try again. If it takes long, look at braid.group_nodes for a node that is away.",
        )
}

/// Checks for a right to use the table: declaring it makes others wait.
fn check_rights(relation: pg_sys::Oid, access: Access) -> Result<(), PgError> {
    if table_rights::has_any(relation, access == Access::Write) {
        return Ok(());
    }
    Err(PgError::new(
        SqlState::InsufficientPrivilege,
        format!("permission denied for table {}", name_of(relation)),
    )
    .with_hint(
        "Declaring a table needs the right to read it, or to write it if it is declared so.",
    ))
}

/// This database's entry, once a versions process is wanted.
fn entry() -> Result<&'static ManagerEntry, PgError> {
    registry::my_manager().ok_or_else(|| {
        state_error("versioned transactions need Braid's background processes").with_hint(
            "Add braid to shared_preload_libraries in postgresql.conf and restart the server.",
        )
    })
}

/// Claims a slot. The caller makes it known to the callbacks before it goes on.
fn ask(tables: &[(u32, Access)], reads_current: bool) -> Result<&'static Slot, PgError> {
    entry()?;
    let since = timestamp::now();
    let deadline = setting::timeout().map_or(i64::MAX, |timeout| {
        let micros = i64::try_from(timeout.as_micros()).unwrap_or(i64::MAX);
        since.saturating_add(micros)
    });
    claim(tables, reads_current, since, deadline).ok_or_else(too_many)
}

/// Waits until the versions process has moved a slot to a state. Serves interrupts.
fn wait_for(slot: &Slot, wanted: u32) -> Result<(), PgError> {
    wait_while(slot, wanted, || true)
}

fn wait_while(slot: &Slot, wanted: u32, mut goes_on: impl FnMut() -> bool) -> Result<(), PgError> {
    let entry = entry()?;
    wake_process();
    loop {
        if !goes_on() {
            return Err(PgError::new(
                SqlState::AdminShutdown,
                "a wait for versions has ended",
            ));
        }
        match slot.state() {
            reached if reached == wanted => return Ok(()),
            state::REFUSED => return Err(refusal(slot)),
            _ => {}
        }
        let left = slot
            .deadline
            .load(Ordering::Acquire)
            .saturating_sub(timestamp::now());
        if left <= 0 {
            return Err(too_late(slot, entry));
        }
        if entry.versions_pid.load(Ordering::Acquire) == 0 {
            // The first versioned transaction, or the process has ended.
            registry::wake_manager(process::my_database());
        }
        let left = Duration::from_micros(u64::try_from(left).unwrap_or(0));
        latch::wait_as(Wait::Versions, left.min(LOOK_EVERY));
    }
}

fn refusal(slot: &Slot) -> PgError {
    match slot.problem.load(Ordering::Acquire) {
        problem::TOO_MANY => PgError::new(
            SqlState::InsufficientResources,
            "too many versioned transactions wait",
        )
        .with_hint("Try again."),
        problem::TOO_LONG => PgError::new(
            SqlState::ProgramLimitExceeded,
            "the versions of this transaction are of too many tables",
        )
        .with_hint("Declare fewer tables."),
        problem::GIVEN_UP => state_error(
            "the group has given up the versions of a remote transaction, or they are here already",
        )
        .with_hint("Look into the server's log for messages of braid versions."),
        problem::DIVERGED => {
            state_error("this node has versioned writes that the group has given up")
                .with_hint("Remove this node from the group, and join it anew.")
        }
        problem::INTERNAL => PgError::new(
            SqlState::InternalError,
            "versions of this transaction contradict each other",
        )
        .with_hint("Try again, and report the server's log if it happens again."),
        _ => PgError::new(
            SqlState::SerializationFailure,
            "the process that gives versions has started anew",
        )
        .with_detail("Versions that it has given before are void.")
        .with_hint("Run the transaction again."),
    }
}

/// 55P03, with what was waited for.
fn too_late(slot: &Slot, entry: &ManagerEntry) -> PgError {
    let waits = slot.waits();
    let mut words = Vec::new();
    for wait in &waits {
        let relation = tables::all()
            .into_iter()
            .find(|table| table.number == wait.table)
            .map(|table| name_of(table.relation));
        let table = relation.unwrap_or_else(|| format!("number {}", wait.table));
        let holder = match (wait.holder, wait.node) {
            (0, 0) => String::new(),
            (0, node) => format!(" of node {}", node_name(node)),
            (pid, _) => format!(" of process {pid}"),
        };
        words.push(format!("write {}{holder} of table {table}", wait.version));
    }
    let missing = missing_nodes(entry);
    let lacks = entry.versions_lack.load(Ordering::Acquire);
    let detail = if !missing.is_empty() && (lacks || words.is_empty()) {
        format!("Versions wait for these nodes: {}.", missing.join(", "))
    } else if lacks {
        "The group is about to choose who gives versions.".to_owned()
    } else if !words.is_empty() {
        format!("The transaction waits for {}.", words.join(", "))
    } else if entry.versions_pid.load(Ordering::Acquire) == 0 {
        "The versions process of this database does not run.".to_owned()
    } else if slot.state() == state::COMMIT_ASKED {
        "A transaction that reads the same tables is about to take its snapshot.".to_owned()
    } else {
        "The versions process of this database has not answered.".to_owned()
    };
    let hint = if missing.is_empty() {
        "The view braid.table_versions shows who waits for whom. A larger braid.version_timeout waits longer.".to_owned()
    } else {
        format!(
            "Versions go on by themselves once the nodes can be reached again. If a node does not come back, call braid.remove_node. Away: {}.",
            missing.join(", ")
        )
    };
    PgError::new(
        SqlState::LockNotAvailable,
        "timeout expired while waiting for versions",
    )
    .with_detail(detail)
    .with_hint(hint)
}

/// The name of a node of the group. In a transaction that is about to fail.
fn node_name(number: u16) -> String {
    let found = owners_query(
        "select m.node_name from braid.group_member m where m.node_number = $1::integer",
        &[Some(&number.to_string())],
    );
    let name = found.get(0, 0).map(|name| format!("\"{name}\""));
    name.unwrap_or_else(|| number.to_string())
}

/// The names of the nodes that the versions process has not heard of for a while.
fn missing_nodes(entry: &ManagerEntry) -> Vec<String> {
    let numbers = entry.versions_missing.iter();
    let numbers = numbers.map(|missing| missing.load(Ordering::Acquire));
    numbers
        .filter_map(|number| u16::try_from(number).ok())
        .filter(|number| *number != 0)
        .map(node_name)
        .collect()
}

fn wake_process() {
    if let Some(entry) = registry::my_manager() {
        process::set_latch(entry.versions_latch.load(Ordering::Acquire));
    }
}

/// Whether the transaction may use a versioned table. Notes that it does.
pub(super) fn allows(relation: pg_sys::Oid, writes: bool) -> Result<(), PgError> {
    enum Found {
        Nothing,
        Undeclared,
        Table(Declared),
    }
    let found = CURRENT.with_borrow_mut(|current| {
        let Some(current) = current else {
            return Found::Nothing;
        };
        let of = |declared: &&mut Declared| declared.relation == relation;
        match current.tables.iter_mut().find(of) {
            Some(declared) => {
                declared.is_used |= !declared.is_released;
                Found::Table(*declared)
            }
            None => Found::Undeclared,
        }
    });
    let word = if writes { "write" } else { "read" };
    let name = || name_of(relation);
    if writes
        && let Some(table) = tables::of(relation)
        && table.phase != tables::COUNTS
    {
        return Err(moves(relation, table.phase));
    }
    match found {
        Found::Nothing if !writes => Ok(()),
        Found::Nothing => Err(state_error(format!(
            "table {} is versioned and can only be written in a versioned transaction",
            name()
        ))
        .with_hint(format!(
            "Begin with isolation level REPEATABLE READ and SET LOCAL braid.versions = 'write {}'.",
            name()
        ))),
        Found::Undeclared => Err(state_error(format!(
            "versioned table {} was not declared by this transaction",
            name()
        ))
        .with_hint(format!(
            "Add '{word} {}' to braid.versions. braid.declare tells the tables of a query; functions, triggers and cascades use others.",
            name()
        ))),
        Found::Table(declared) if declared.is_released => Err(state_error(format!(
            "versioned table {} was released by this transaction",
            name()
        ))
        .with_hint("Release a table once nothing uses it any more, deferred triggers included.")),
        Found::Table(declared) if writes && declared.access != Access::Write => {
            Err(state_error(format!(
                "versioned table {} was declared as read, and is written",
                name()
            ))
            .with_hint(format!("Declare 'write {}'.", name())))
        }
        Found::Table(_) => Ok(()),
    }
}

/// Whether the session is in a versioned transaction.
pub(super) fn is_versioned() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// `braid.release` was set.
pub(super) fn released() {
    setting::allow(false);
    let released = settings::get(c"braid.release").unwrap_or_default();
    if released.is_empty() {
        return;
    }
    if let Err(error) = release(&encoding::utf8(&released)) {
        error.raise();
    }
}

fn release(released: &str) -> Result<(), PgError> {
    let names = TableName::list(released).map_err(|error| {
        PgError::new(SqlState::InvalidParameterValue, error.problem.to_string())
    })?;
    let mut found = Vec::new();
    for name in &names {
        found.push((name, find(name)?));
    }
    CURRENT.with_borrow_mut(|current| {
        let Some(current) = current else {
            return Err(state_error("there is no versioned transaction"));
        };
        for (name, (_, relation)) in &found {
            if !current.tables.iter().any(|d| d.relation == *relation) {
                return Err(state_error(format!(
                    "versioned table {name} was not declared by this transaction"
                ))
                .with_hint("Only declared tables can be released."));
            }
        }
        for (_, (number, relation)) in &found {
            for declared in &mut current.tables {
                if declared.relation != *relation || declared.is_released {
                    continue;
                }
                declared.is_released = true;
                let used = if declared.is_used { mark::USED } else { 0 };
                for cell in current.slot.tables() {
                    if cell.load(Ordering::Acquire) & mark::NUMBER == *number {
                        cell.fetch_or(mark::RELEASED | used, Ordering::AcqRel);
                    }
                }
            }
        }
        Ok(())
    })?;
    wake_process();
    Ok(())
}

/// Waits for the writes of a table that are known at this moment. The next statement sees them.
///
/// # Errors
/// 55P03 past `braid.version_timeout`; 55000 for a table that is not versioned; 25001 where the
/// transaction keeps the snapshot that it has.
pub fn read_current(relation: pg_sys::Oid) -> Result<(), PgError> {
    if server::is_in_recovery() {
        return Err(PgError::new(
            SqlState::FeatureNotSupported,
            "a standby does not know which writes are current",
        )
        .with_hint("Call it on the primary."));
    }
    if postgres::keeps_its_snapshot() {
        return Err(PgError::new(
            SqlState::ActiveSqlTransaction,
            "braid.read_current needs isolation level READ COMMITTED",
        )
        .with_detail(
            "The transaction has its snapshot already, and would not see what was waited for.",
        )
        .with_hint("Use SET LOCAL braid.versions in this transaction instead."));
    }
    let Some(number) = tables::number_of(relation) else {
        return Err(
            state_error(format!("table {} is not versioned", name_of(relation)))
                .with_hint("The view braid.table_versions lists the versioned tables."),
        );
    };
    let slot = ask(&[(number, Access::Read)], true)?;
    CURRENT.set(Some(Current {
        slot,
        tables: Vec::new(),
        part: postgres::subtransaction(),
        is_noted: false,
    }));
    slot.state.store(state::ASKED, Ordering::SeqCst);
    wait_for(slot, state::READY)?;
    leave(state::ENDED);
    Ok(())
}

/// The session's transaction takes no part any more. Raises nothing.
fn leave(last: u32) {
    let Some(current) = CURRENT.take() else {
        return;
    };
    current.slot.state.store(last, Ordering::SeqCst);
    wake_process();
}

/// Whether a running transaction may write a table, of those that it has not released.
fn may_write() -> Option<&'static Slot> {
    CURRENT.with_borrow(|current| {
        let current = current.as_ref()?;
        let writes = |d: &Declared| d.access == Access::Write && (d.is_used || !d.is_released);
        current.tables.iter().any(writes).then_some(current.slot)
    })
}

fn before_commit() {
    let noted = CURRENT.with_borrow(|current| {
        let current = current.as_ref().filter(|current| current.is_noted)?;
        Some((
            current.slot,
            current.slot.applies.load(Ordering::Acquire) != 0,
        ))
    });
    // Without an id nothing was written.
    let writes = || may_write().filter(|_| postgres::top_id() != pg_sys::InvalidTransactionId);
    let Some(slot) = noted.map(|(slot, _)| slot).or_else(writes) else {
        return;
    };
    if noted.is_some_and(|(_, applies)| !applies) {
        // The others hear that it is here: a crash must not undo it.
        postgres::flush_at_commit();
    }
    if let Err(error) = ask_to_commit(slot) {
        error.raise();
    }
}

fn ask_to_commit(slot: &'static Slot) -> Result<(), PgError> {
    let entry = entry()?;
    if slot.start.load(Ordering::Acquire) != entry.versions_start.load(Ordering::SeqCst) {
        return Err(refusal(slot));
    }
    let now = timestamp::now();
    let timeout = setting::timeout().filter(|_| slot.applies.load(Ordering::Acquire) == 0);
    let deadline = timeout.map_or(i64::MAX, |timeout| {
        now.saturating_add(i64::try_from(timeout.as_micros()).unwrap_or(i64::MAX))
    });
    slot.since.store(now, Ordering::Release);
    slot.deadline.store(deadline, Ordering::Release);
    if !slot.advance(state::RUNNING, state::COMMIT_ASKED) {
        return Err(refusal(slot));
    }
    wait_for(slot, state::MAY_COMMIT)
}

fn at_end(end: End) {
    match end {
        End::BeforeCommit if is_versioned() => pass_on(before_commit),
        End::BeforePrepare if is_versioned() => {
            PgError::new(
                SqlState::FeatureNotSupported,
                "a versioned transaction cannot be prepared",
            )
            .with_detail("Others would wait for it for as long as it stays prepared.")
            .with_hint("Commit it with COMMIT.")
            .raise();
        }
        End::Committed => {
            let committing = CURRENT.with_borrow(|current| {
                current
                    .as_ref()
                    .is_some_and(|current| current.slot.state() == state::MAY_COMMIT)
            });
            leave(if committing {
                state::COMMITTED
            } else {
                state::ENDED
            });
            setting::allow(false);
        }
        End::RolledBack | End::Prepared => {
            leave(state::ENDED);
            setting::allow(false);
            access_check::forget_explain();
        }
        End::BeforeCommit | End::BeforePrepare => {}
    }
}

fn at_part_end(end: PartEnd) {
    if end.stays {
        CURRENT.with_borrow_mut(|current| {
            if let Some(current) = current
                && current.part == end.part
            {
                current.part = end.parent;
            }
        });
        return;
    }
    setting::allow(false);
    access_check::forget_explain();
    let declared_there = CURRENT.with_borrow(|current| {
        current
            .as_ref()
            .is_some_and(|current| current.part == end.part)
    });
    if declared_there {
        leave(state::ENDED);
    }
}

/// Whether this process checks what statements use. Raises nothing.
pub(super) fn checks() -> bool {
    // A parallel worker reads for a leader that was checked, by the same plan.
    plain::ParallelWorkerNumber() < 0 && tables::may_be()
}
