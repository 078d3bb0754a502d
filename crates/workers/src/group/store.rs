//! The tables of a member: what its agreement stores, and what it shows of the group.
//!
//! Rows that may hold a connection string (entries and the snapshot) are written so that logical
//! decoding does not see them, as those of `braid.connection`. Each function runs in a transaction.

use std::collections::{BTreeMap, BTreeSet};

use braid_bgworker::hex;
use braid_bgworker::sqlstate::SqlState;
use braid_group::{
    Applied, Command, Continuity, GroupId, Member, MemberId, Phase, Record, Role, State, Stopped,
    Stored, Work, wording,
};
use braid_node::connection_string;
use braid_node::subscription::{execute, rows, rows_written};
use braid_node::versions::tables;
use braid_postgres::error::PgError;
use braid_postgres::names::own_table;
use braid_postgres::plain;
use braid_postgres::table_scan::{self, Cell};
use braid_versions::Bytes;

use super::links::Target;
use super::{balancing, marker, places};

/// A membership as it is stored.
pub(super) enum Found {
    /// A member.
    Member(Loaded),
    /// A member whose agreement has failed too often, and the error for those who ask.
    GivenUp(PgError),
}

/// A member as it is stored here.
pub(super) struct Loaded {
    pub(super) stored: Stored,
    pub(super) continuity: Continuity,
    /// The index of the newest entry that was shown before.
    pub(super) shown: u64,
}

fn damaged() -> PgError {
    PgError::new(
        SqlState::DataCorrupted,
        "what is stored of the group cannot be read",
    )
    .with_hint("Leave the group by braid.forget_group() and join it anew.")
}

fn text(row: &[Option<String>], index: usize) -> Result<&str, PgError> {
    row.get(index)
        .and_then(Option::as_deref)
        .ok_or_else(damaged)
}

fn number(row: &[Option<String>], index: usize) -> Result<u64, PgError> {
    text(row, index)?.parse().map_err(|_| damaged())
}

fn bytes(row: &[Option<String>], index: usize) -> Result<Vec<u8>, PgError> {
    hex::decode(text(row, index)?).ok_or_else(damaged)
}

fn record(row: &[Option<String>]) -> Result<Record, PgError> {
    Ok(Record {
        index: number(row, 0)?,
        term: number(row, 1)?,
        bytes: bytes(row, 2)?,
    })
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// What this database has stored of its group; none if it is in none, or was removed. Notes which
/// files these are.
pub(super) fn load() -> Result<Option<Found>, PgError> {
    // Another start of the server may come with another Braid, or on a mended disk.
    execute(
        "update braid.group_self set failures = 0, stopped = null, stopped_hint = null \
          where failures > 0 and failed_server is distinct from pg_postmaster_start_time()",
        &[],
    )?;
    let found = rows(
        "select encode(group_id, 'hex'), member_id::text, encode(core, 'hex'), files, applied_index::text, \
                case when failures > 0 then stopped end, stopped_hint \
           from braid.group_self",
        &[],
    )?;
    let Some(own) = found.first() else {
        return Ok(None);
    };
    if let Some(why) = own.get(5).cloned().flatten() {
        let failure = PgError::new(SqlState::ObjectNotInPrerequisiteState, why);
        let hint = own.get(6).cloned().flatten().unwrap_or_default();
        return Ok(Some(Found::GivenUp(failure.with_hint(hint))));
    }
    let group = GroupId(bytes(own, 0)?.try_into().map_err(|_| damaged())?);
    let me = MemberId::new(number(own, 1)?).ok_or_else(damaged)?;
    let core = own.get(2).cloned().flatten();
    let (continuity, files) = marker::compare(own.get(3).cloned().flatten().as_deref())?;
    let shown = number(own, 4)?;
    execute(
        "update braid.group_self set files = $1 where files is distinct from $1",
        &[files.as_str().into()],
    )?;
    let snapshot = rows(
        "select s.log_index::text, s.term::text, encode(s.content, 'hex') from braid.group_snapshot s order by s.log_index desc limit 1",
        &[],
    )?;
    // By number: an output column of the name would have the order of text.
    let entries = rows(
        "select e.log_index::text, e.term::text, encode(e.content, 'hex') from braid.group_entry e order by e.log_index",
        &[],
    )?;
    let known = rows(
        "select member_id::text, encode(content, 'hex') from braid.group_known",
        &[],
    )?;
    let stored = Stored {
        group,
        me,
        core: core
            .map(|digits| hex::decode(&digits).ok_or_else(damaged))
            .transpose()?,
        snapshot: snapshot.first().map(|row| record(row)).transpose()?,
        entries: entries
            .iter()
            .map(|row| record(row))
            .collect::<Result<_, _>>()?,
        known: known
            .iter()
            .map(|row| {
                let id = MemberId::new(number(row, 0)?).ok_or_else(damaged)?;
                Ok((id, bytes(row, 1)?))
            })
            .collect::<Result<_, PgError>>()?,
    };
    Ok(Some(Found::Member(Loaded {
        stored,
        continuity,
        shown,
    })))
}

/// So many failures in a row, at one place of the log, are no accident.
const FAILURES: &str = "3";
/// The hint for a member that was given up.
const FAILED_HINT: &str = "Data is replicated as ever. Call braid.retry_membership(), or restart the server, to try again. If that fails too, have another node remove this one, call braid.forget_group() here, and join with an empty database.";

/// Counts a failure of the agreement, and gives the membership up if it is one too many. `index`:
/// the entry that was applied last. A failure after a steady time is the first one again, and so is
/// one at another index, or since another start of the server.
pub(super) fn note_failure(failure: &PgError, index: u64, was_steady: bool) -> Result<(), PgError> {
    execute(
        "update braid.group_self \
            set failures = case when failed_index = $1 and failed_server = pg_postmaster_start_time() and not $2 then failures + 1 else 1 end, \
                failed_index = $1, failed_server = pg_postmaster_start_time() \
          where stopped is null",
        &[signed(index).into(), was_steady.into()],
    )?;
    let hint = match &failure.hint {
        Some(hint) => format!("{hint} {FAILED_HINT}"),
        None => FAILED_HINT.to_owned(),
    };
    execute(
        &format!(
            "update braid.group_self set stopped = $1, stopped_hint = $2 where stopped is null and failures >= {FAILURES}"
        ),
        &[
            format!("this node takes no part in the group: {}", failure.message)
                .as_str()
                .into(),
            hint.as_str().into(),
        ],
    )
}

/// Whether the membership is given up for failures.
pub(super) fn is_given_up() -> Result<bool, PgError> {
    let found = rows(
        "select 1::text from braid.group_self where stopped is not null and failures > 0",
        &[],
    )?;
    Ok(!found.is_empty())
}

/// Locks the membership that this process acts for until its transaction ends: whoever deletes it
/// waits, and then deletes all that the transaction has written. First in each transaction that
/// writes for a running member. Else what is written while the node leaves stays, and is taken for
/// the log of its next membership.
///
/// # Errors
/// 55000 if the membership is gone.
pub(super) fn hold(group: &GroupId, me: MemberId) -> Result<(), PgError> {
    let found = rows_written(
        "select 1::text from braid.group_self where group_id = decode($1, 'hex') and member_id = $2 for key share",
        &[hex::encode(&group.0).into(), signed(me.get()).into()],
    )?;
    if found.is_empty() {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "this node has left the group",
        ));
    }
    Ok(())
}

/// Writes a member's work, or all that a new member stores first.
///
/// # Errors
/// [`PgError`] if a table is not there.
pub fn write(work: &Work) -> Result<(), PgError> {
    if !work.flush {
        execute("set local synchronous_commit = off", &[])?;
    }
    if let Some(core) = &work.core {
        execute(
            "update braid.group_self set core = decode($1, 'hex')",
            &[hex::encode(core).into()],
        )?;
    }
    if let Some(snapshot) = &work.snapshot {
        execute("delete from braid.group_snapshot", &[])?;
        insert("group_snapshot", snapshot)?;
    }
    if let Some(through) = work.delete_through {
        execute(
            "delete from braid.group_entry where log_index <= $1",
            &[signed(through).into()],
        )?;
    }
    if let Some(from) = work.delete_from {
        execute(
            "delete from braid.group_entry where log_index >= $1",
            &[signed(from).into()],
        )?;
    }
    for entry in &work.entries {
        insert("group_entry", entry)?;
    }
    for (member, content) in &work.known {
        execute(
            "insert into braid.group_known (member_id, content) values ($1, decode($2, 'hex')) \
             on conflict (member_id) do update set content = excluded.content",
            &[signed(member.get()).into(), hex::encode(content).into()],
        )?;
    }
    Ok(())
}

fn insert(table: &str, record: &Record) -> Result<(), PgError> {
    table_scan::insert_undecoded(
        own_table(table)?,
        [
            Cell::Bigint(signed(record.index)),
            Cell::Bigint(signed(record.term)),
            Cell::Bytes(&record.bytes),
        ],
    );
    Ok(())
}

/// Takes out the messages that were too long for the mailbox.
pub(super) fn take_letters() -> Result<Vec<Vec<u8>>, PgError> {
    let found = rows(
        "select encode(content, 'hex') from braid.group_letter order by letter_id",
        &[],
    )?;
    execute("delete from braid.group_letter", &[])?;
    Ok(found
        .iter()
        .filter_map(|row| hex::decode(row.first()?.as_deref()?))
        .collect())
}

/// Makes `braid.group_member` and `braid.group_option` say what is agreed.
///
/// # Errors
/// [`PgError`] if a table is not there.
pub fn show(state: &State) -> Result<(), PgError> {
    show_since(None, state).map(drop)
}

/// Changes of the tables that say what is agreed.
pub(super) struct Shown {
    /// Whether a member has changed.
    pub(super) members: bool,
    /// Whether anything has changed that sessions and processes act upon.
    pub(super) anything: bool,
}

/// The same where the tables say what was agreed before, if that is given: only what has changed
/// since is written.
pub(super) fn show_since(before: Option<&State>, state: &State) -> Result<Shown, PgError> {
    let recovers = |state: &State, id| state.option(&recovery_option(id)).is_some();
    let mut shown = Shown {
        members: false,
        anything: false,
    };
    for member in state.members() {
        let recover = recovers(state, member.id);
        let is_shown = before.is_some_and(|before| {
            before.member(member.id) == Some(member) && recovers(before, member.id) == recover
        });
        if !is_shown {
            show_member(member, recover)?;
            shown.members = true;
        }
    }
    shown.anything = shown.members;
    if before.is_none_or(|before| !before.options().eq(state.options())) {
        show_options(state)?;
        shown.anything = true;
    }
    let versioned = |state: &State| -> Vec<_> {
        let tables = state.versioned_tables();
        tables
            .map(|(number, name)| (number, name.clone(), state.phase_of(number).map(|of| of.0)))
            .collect()
    };
    if before.is_none_or(|before| versioned(before) != versioned(state)) {
        show_versioned(state)?;
        shown.anything = true;
    }
    let last_cut = |state: &State| state.cuts().last().map(|cut| cut.term);
    if before.is_none_or(|before| last_cut(before) != last_cut(state)) {
        show_cuts(state)?;
    }
    execute(
        "update braid.group_self set applied_index = $1, group_name = $2::name \
          where (applied_index, group_name) is distinct from ($1, $2::name)",
        &[signed(state.index()).into(), state.name().into()],
    )?;
    if shown.members {
        connection_string::forget_unused();
    }
    Ok(shown)
}

/// How many entries `braid.group_log` shows at most.
const LOGGED: u64 = 10_000;

/// Notes entries for `braid.group_log`. After a restart some come again, and count once. Renewals
/// of leases and closed times say nothing to people, and are left out.
///
/// # Errors
/// [`PgError`] if the table is not there.
pub(super) fn log(applied: &[Applied], state: &State) -> Result<(), PgError> {
    for entry in applied {
        let Applied {
            index,
            term,
            proposal,
            outcome,
        } = entry;
        if matches!(proposal.command, Command::RenewLease { .. }) || places::only_closes(entry) {
            continue;
        }
        execute(
            "insert into braid.group_logged (log_index, term, proposer_id, kind, subject, result) \
             values ($1, $2, $3, $4, $5, $6) on conflict (log_index) do nothing",
            &[
                signed(*index).into(),
                signed(*term).into(),
                signed(proposal.id.member.get()).into(),
                proposal.command.name().into(),
                wording::subject(&proposal.command, state).into(),
                wording::result(outcome).into(),
            ],
        )?;
        if let (Command::Decide(decided), Ok(_)) = (&proposal.command, outcome) {
            balancing::write(*index, proposal.id.member, decided)?;
        }
        if index.is_multiple_of(100) {
            execute(
                "delete from braid.group_logged where log_index <= $1",
                &[signed(index.saturating_sub(LOGGED)).into()],
            )?;
        }
    }
    Ok(())
}

/// Makes `braid.group_option` have the group's options.
fn show_options(state: &State) -> Result<(), PgError> {
    let shown = rows("select option_name, value from braid.group_option", &[])?;
    let mut shown: BTreeMap<String, String> = shown
        .into_iter()
        .filter_map(|row| {
            let [name, value] = <[Option<String>; 2]>::try_from(row).ok()?;
            Some((name?, value?))
        })
        .collect();
    for (name, value) in state.options() {
        if shown.remove(name).as_deref() != Some(value) {
            execute(
                "insert into braid.group_option (option_name, value) values ($1, $2) \
                 on conflict (option_name) do update set value = excluded.value",
                &[name.into(), value.into()],
            )?;
        }
    }
    for name in shown.keys() {
        execute(
            "delete from braid.group_option where option_name = $1",
            &[name.as_str().into()],
        )?;
    }
    Ok(())
}

/// Makes `braid.versioned_table` have the versioned tables. A table is found by its name once, when
/// it is versioned; it may be renamed later.
fn show_versioned(state: &State) -> Result<(), PgError> {
    let shown = rows("select table_number::text from braid.versioned_table", &[])?;
    let number = |row: Vec<Option<String>>| row.into_iter().next()??.parse::<u32>().ok();
    let mut shown: BTreeSet<u32> = shown.into_iter().filter_map(number).collect();
    for (number, name) in state.versioned_tables() {
        let phase = match state.phase_of(number) {
            Some((Phase::Begins, _)) => tables::BEGINS,
            Some((Phase::Ends, _)) => tables::ENDS,
            _ => tables::COUNTS,
        };
        let phase = i32::try_from(phase).unwrap_or(i32::MAX);
        if shown.remove(&number.0) {
            execute(
                "update braid.versioned_table set phase = $2 where table_number = $1 and phase <> $2",
                &[
                    i32::try_from(number.0).unwrap_or(i32::MAX).into(),
                    phase.into(),
                ],
            )?;
            continue;
        }
        let relations = rows_written(
            "insert into braid.versioned_table (table_number, schema_name, table_name, phase, relation) \
             values ($1, $2::name, $3::name, $4, \
                     (select c.oid from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
                       where n.nspname = $2::name and c.relname = $3::name)) returning relation::text",
            &[
                i32::try_from(number.0).unwrap_or(i32::MAX).into(),
                name.schema.as_deref().unwrap_or_default().into(),
                name.table.as_str().into(),
                phase.into(),
            ],
        )?;
        // Processes that apply changes have set the table up, and look again.
        for row in relations {
            let relation = row.into_iter().next().flatten();
            if let Some(relation) = relation.and_then(|oid| oid.parse::<u32>().ok()) {
                plain::CacheInvalidateRelcacheByRelid(relation.into());
            }
        }
    }
    for number in shown {
        execute(
            "delete from braid.versioned_table where table_number = $1",
            &[i32::try_from(number).unwrap_or(i32::MAX).into()],
        )?;
    }
    Ok(())
}

/// Makes `braid.version_cut` have the decisions about versioned writes.
fn show_cuts(state: &State) -> Result<(), PgError> {
    let first = state.cuts().next().map_or(u64::MAX, |cut| cut.term.0);
    let shown = rows(
        "select coalesce(max(term), 0)::text from braid.version_cut",
        &[],
    )?;
    let shown = shown.first().map_or(Ok(0), |row| number(row, 0))?;
    execute(
        "delete from braid.version_cut where term < $1",
        &[signed(first).into()],
    )?;
    let holder = state.sequencing();
    for cut in state.cuts().filter(|cut| cut.term.0 > shown) {
        execute(
            "insert into braid.version_cut (term, content, holder_id, holder_boot) values ($1, decode($2, 'hex'), $3, $4)",
            &[
                signed(cut.term.0).into(),
                hex::encode(&cut.encode()).into(),
                signed(holder.map_or(0, |holder| holder.holder.get())).into(),
                signed(holder.map_or(0, |holder| holder.boot)).into(),
            ],
        )?;
    }
    Ok(())
}

/// The option of the group that has a member's last transactions recovered once it is removed.
#[must_use]
pub fn recovery_option(member: MemberId) -> String {
    format!("recover {member}")
}

fn show_member(member: &Member, recover: bool) -> Result<(), PgError> {
    let about = &member.about;
    let role = match about.role {
        Role::Data => "data",
        Role::Witness => "witness",
    };
    let known = rows(
        "select c.dsn, m.connection_id::text from braid.group_member m \
           left join braid.connection c using (connection_id) where m.member_id = $1",
        &[signed(member.id.get()).into()],
    )?;
    let known = known.first();
    let dsn = about.connection.expose();
    let connection = match known.map(|row| (row.first(), row.get(1))) {
        Some((Some(Some(same)), Some(Some(id)))) if same == dsn => id.clone(),
        Some((Some(Some(_)), Some(Some(before)))) => {
            // The steps process does the rest. It may have to wait for sessions.
            execute(
                "update braid.group_member set moved_from = coalesce(moved_from, $2) where member_id = $1",
                &[
                    signed(member.id.get()).into(),
                    before.parse::<i64>().unwrap_or(0).into(),
                ],
            )?;
            connection_string::store(dsn)?
        }
        _ => connection_string::store(dsn)?,
    };
    let connection: i64 = connection.parse().unwrap_or(0);
    let node = hex::encode(&about.identity.node);
    execute(
        "insert into braid.group_member as m (member_id, node_number, node_name, node_id, role, state, read_only, connection_id, \
                 braid_version, postgres_version, since_index, system_identifier, recover) \
         values ($1, $2, $3::name, $4::uuid, $5, $6, $7, $8, $9, $10, $11, $12, $13) \
         on conflict (member_id) do update set (node_number, node_name, node_id, role, state, read_only, connection_id, \
                 braid_version, postgres_version, since_index, system_identifier, recover) \
              = (excluded.node_number, excluded.node_name, excluded.node_id, excluded.role, excluded.state, excluded.read_only, \
                 excluded.connection_id, excluded.braid_version, excluded.postgres_version, excluded.since_index, excluded.system_identifier, excluded.recover) \
          where (m.node_number, m.node_name, m.node_id, m.role, m.state, m.read_only, m.connection_id, m.braid_version, \
                 m.postgres_version, m.since_index, m.system_identifier, m.recover) \
                is distinct from (excluded.node_number, excluded.node_name, excluded.node_id, excluded.role, excluded.state, \
                 excluded.read_only, excluded.connection_id, excluded.braid_version, excluded.postgres_version, excluded.since_index, \
                 excluded.system_identifier, excluded.recover)",
        &[
            signed(member.id.get()).into(),
            i32::from(member.number.get()).into(),
            about.name.as_str().into(),
            node.into(),
            role.into(),
            member.state.word().into(),
            member.read_only.into(),
            connection.into(),
            about.braid.to_string().into(),
            i32::from(about.postgres).into(),
            signed(member.since).into(),
            about.identity.system.to_string().into(),
            recover.into(),
        ],
    )
}

/// Connection strings of the other members. Removed ones too: they are told so when they ask.
pub(super) fn peers(me: MemberId) -> Result<Vec<Target>, PgError> {
    let found = rows(
        "select m.member_id::text, m.node_name::text, c.dsn from braid.group_member m join braid.connection c using (connection_id) \
          where m.member_id <> $1",
        &[signed(me.get()).into()],
    )?;
    Ok(found
        .into_iter()
        .filter_map(|row| {
            let [id, name, dsn] = <[Option<String>; 3]>::try_from(row).ok()?;
            Some(Target {
                id: MemberId::new(id?.parse().ok()?)?,
                name: name?,
                dsn: dsn?,
            })
        })
        .collect())
}

/// Notes why the member takes no part any more.
pub(super) fn stop(why: &Stopped, hint: &str) -> Result<(), PgError> {
    execute(
        "update braid.group_self set stopped = $1, stopped_hint = $2, failures = 0 where stopped is distinct from $1",
        &[why.to_string().into(), hint.into()],
    )
}
