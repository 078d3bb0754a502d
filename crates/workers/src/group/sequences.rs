//! The sequences process: one for each database that is a member of a group; started by the
//! manager.
//!
//! The process registers sequences that no replicated statement has created, carries out what the
//! group has agreed for a sequence, asks the group for further blocks, and moves sequences to the
//! next block before the present one is used up. Of sequences of kind follow it tells other nodes
//! what was used here, and has them go on after what was used elsewhere.
//!
//! `nextval` never waits for the group. It waits for a move, which waits for transactions that have
//! used the sequence, for at most a part of a second at a time.
//!
//! | state of a sequence (`braid.sequences`) | who sets it, and when |
//! |---|---|
//! | not registered | whoever creates it outside of a replicated statement; this process registers it |
//! | `waits` | not yet as its kind asks, or behind another node: a transaction uses it |
//! | `ready` | the session or applier of the statement that created it, or this process |
//! | `low` | nobody: little is left, and the group has assigned no further block |
//! | `exhausted` | nobody: the block is used, so `nextval` fails with 2200H |
//! | `refused` | whoever carries its kind out, where the node's number does not fit |
//!
//! Not for: which numbers a block has (`braid_bgworker::sequence`).

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::sequence::{Kind, Setting, follow_up, is_due, look_after_ms, wants_reserve};
use braid_bgworker::sqlstate::SqlState;
use braid_group::{Command, MemberId};
use braid_node::registry;
use braid_node::sequence::{self, Behind, OPTION_PREFIX, Own, Sequence};
use braid_node::subscription::{execute, rows};
use braid_postgres::error::{self, PgError};
use braid_postgres::{latch, process, worker};
use pgrx::pg_sys;

use super::request;

/// Between two looks at which sequences there are.
const LISTED_EVERY: Duration = Duration::from_secs(1);
/// Between two attempts at what another transaction or the group has kept from being done.
const AGAIN: Duration = Duration::from_millis(300);
/// How long transactions that use a sequence are waited for, where nothing presses.
const IN_USE_FOR: Duration = Duration::from_millis(60);
/// Between two looks at whether this node is with a majority.
const MAJORITY_LOOKED: Duration = Duration::from_millis(500);
/// Without an answer of the group.
const NO_MAJORITY: Duration = Duration::from_secs(2);
/// How long the group is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at how many values were used of late.
const COUNTED_EVERY: Duration = Duration::from_mins(1);
/// Sequences that are looked at in one transaction, as each is locked until its end.
const AT_ONCE: usize = 200;

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = crate::connect(argument);
    let Some(entry) = registry::manager(database) else {
        pgrx::log!("braid sequences: too many databases");
        return;
    };
    entry
        .sequences_latch
        .store(process::my_latch(), Ordering::SeqCst);
    entry
        .sequences_pid
        .store(process::my_pid(), Ordering::SeqCst);
    process::before_exit(move || {
        if entry.sequences_pid.load(Ordering::SeqCst) == process::my_pid() {
            entry.sequences_latch.store(0, Ordering::SeqCst);
            entry.sequences_pid.store(0, Ordering::SeqCst);
        }
    });
    worker::report_activity("keeping the sequences of the group");
    let mut keeper = Keeper::default();
    loop {
        worker::reload_settings();
        if entry.sequences_poked.swap(false, Ordering::SeqCst) {
            keeper.list_at = None;
        }
        let wait = match keeper.turn() {
            Ok(Some(wait)) => wait,
            Ok(None) => return,
            Err(failure) => {
                keeper.complain(&failure);
                LISTED_EVERY
            }
        };
        latch::wait(Some(wait));
    }
}

#[derive(Default)]
struct Keeper {
    /// Sequences with blocks, by OID, and when each is looked at next.
    looks: HashMap<u32, Instant>,
    list_at: Option<Instant>,
    count_at: Option<Instant>,
    /// Until when the group is not asked.
    silent_until: Option<Instant>,
    /// The last error that was logged.
    complained: Option<String>,
}

fn is_past(moment: Option<Instant>) -> bool {
    moment.is_none_or(|moment| Instant::now() >= moment)
}

/// Whether another transaction holds the sequence: it is tried again without a word.
fn is_in_use(failure: &PgError) -> bool {
    failure.sqlstate == SqlState::LockNotAvailable
}

/// How long a change of a sequence waits for transactions that use it. Nobody else gets a value
/// meanwhile.
fn hold_for(wait: Duration) -> Result<(), PgError> {
    execute(
        "select pg_catalog.set_config('lock_timeout', $1, true)",
        &[format!("{}ms", wait.as_millis()).into()],
    )
}

fn oids(found: Vec<Vec<Option<String>>>) -> Vec<u32> {
    let oid = |row: Vec<Option<String>>| row.into_iter().next()??.parse().ok();
    found.into_iter().filter_map(oid).collect()
}

impl Keeper {
    /// Does all that is to be done now. Returns how long there is nothing to do; none if this is no
    /// member.
    fn turn(&mut self) -> Result<Option<Duration>, PgError> {
        let Some(own) = error::transaction(|| Ok(sequence::own()))? else {
            // The group's log has not come yet, or the database has left.
            let is_member =
                error::transaction(|| rows("select 1::text from braid.group_self", &[]))?;
            return Ok((!is_member.is_empty()).then_some(LISTED_EVERY));
        };
        if own.is_stopped {
            return Ok(Some(LISTED_EVERY));
        }
        if is_past(self.list_at) {
            self.list_at = Some(Instant::now() + LISTED_EVERY);
            if !own.joins {
                register_unknown(own)?;
            }
            self.list()?;
            self.carry_out_settings(own)?;
            self.catch_up()?;
            if !own.joins {
                announce()?;
            }
        }
        if is_past(self.count_at) {
            self.count_at = Some(Instant::now() + COUNTED_EVERY);
            error::transaction(count)?;
        }
        let due: Vec<u32> = self
            .looks
            .iter()
            .filter(|(_, at)| is_past(Some(**at)))
            .map(|(relation, _)| *relation)
            .collect();
        let mut lacking = Vec::new();
        for some in due.chunks(AT_ONCE) {
            let found = error::transaction(|| {
                Ok(some
                    .iter()
                    .map(|relation| (*relation, sequence::load(*relation)))
                    .collect::<Vec<_>>())
            })?;
            for (relation, sequence) in found {
                match sequence {
                    Some(sequence) => self.look(&sequence, &mut lacking),
                    None => drop(self.looks.remove(&relation)),
                }
            }
        }
        if !own.joins {
            self.ask_for(own, lacking)?;
        }
        let now = Instant::now();
        let next = self.looks.values().copied().chain(self.list_at).min();
        let wait = next.map_or(LISTED_EVERY, |next| next.saturating_duration_since(now));
        Ok(Some(wait.max(Duration::from_millis(10))))
    }

    /// Logs an error once in a row.
    fn complain(&mut self, failure: &PgError) {
        if self.complained.as_ref() != Some(&failure.message) {
            failure.log("braid sequences");
            self.complained = Some(failure.message.clone());
        }
    }

    /// Notes which sequences have blocks, and forgets those that are gone.
    fn list(&mut self) -> Result<(), PgError> {
        let found = error::transaction(|| {
            // A statement that may write takes a transaction id, also if it finds nothing to write.
            let gone = rows(
                "select s.relation::text from braid.sequence s where not exists (select from pg_class c where c.oid = s.relation)",
                &[],
            )?;
            if !gone.is_empty() {
                execute(
                    "delete from braid.sequence s where not exists (select from pg_class c where c.oid = s.relation)",
                    &[],
                )?;
            }
            rows(
                "select relation::text from braid.sequence where kind = 'range' and is_applied and block_start is not null",
                &[],
            )
        })?;
        let found = oids(found);
        self.looks.retain(|relation, _| found.contains(relation));
        for relation in found {
            self.looks.entry(relation).or_insert_with(Instant::now);
        }
        Ok(())
    }

    /// Has sequences be as the group has agreed.
    fn carry_out_settings(&mut self, own: Own) -> Result<(), PgError> {
        let found = error::transaction(|| {
            rows(
                "select s.relation::text, o.value from braid.sequence s \
                   left join braid.group_option o on o.option_name = $1 || s.sequence_key \
                  where not s.is_applied or o.value <> coalesce(s.setting, '')",
                &[OPTION_PREFIX.into()],
            )
        })?;
        for row in found {
            let [Some(relation), agreed] = <[_; 2]>::try_from(row).unwrap_or_default() else {
                continue;
            };
            let relation: u32 = relation.parse().unwrap_or(0);
            let done = error::transaction(|| {
                hold_for(Duration::from_millis(200))?;
                let Some(mut sequence) = sequence::load(relation) else {
                    return Ok(());
                };
                if let Some(agreed) = &agreed {
                    let setting = Setting::parse(agreed).ok_or_else(|| {
                        PgError::new(
                            SqlState::FeatureNotSupported,
                            format!(
                                "\"{agreed}\" for sequence {} is not known to this version",
                                sequence.key
                            ),
                        )
                        .with_hint("Update Braid on this node.")
                    })?;
                    sequence::note_setting(&sequence, setting, agreed);
                    let Some(changed) = sequence::load(relation) else {
                        return Ok(());
                    };
                    sequence = changed;
                }
                sequence::carry_out(&sequence, own.number);
                Ok(())
            });
            match done {
                Ok(()) => drop(self.looks.remove(&relation)),
                Err(failure) if is_in_use(&failure) => {}
                Err(failure) => self.complain(&failure),
            }
        }
        Ok(())
    }

    /// Has sequences go on after values that other nodes have used. One that is in use is tried
    /// again, for as long as it takes.
    fn catch_up(&mut self) -> Result<(), PgError> {
        for behind in error::transaction(|| Ok(sequence::behind()))? {
            if let Err(failure) = caught_up(&behind) {
                self.complain(&failure);
            }
        }
        Ok(())
    }

    /// Looks at a sequence with blocks, moves it on if it is time, and notes if it lacks a block.
    fn look(&mut self, sequence: &Sequence, lacking: &mut Vec<Sequence>) {
        let Some(block) = sequence.block.filter(|_| sequence.kind == Kind::Range) else {
            self.looks.remove(&sequence.relation);
            return;
        };
        let left = block.end - sequence.used_to(block).min(block.end);
        let mut after = Duration::from_millis(look_after_ms(left));
        if is_due(block, left, sequence.rate) && sequence.reserve.is_some() {
            let patience = if left == 0 {
                Duration::from_secs(2)
            } else if left < block.size() / 32 {
                AGAIN
            } else {
                IN_USE_FOR
            };
            let moved = error::transaction(|| {
                hold_for(patience)?;
                sequence::move_on(sequence);
                Ok(())
            });
            after = AGAIN;
            match moved {
                Ok(()) => {
                    // The next block may be used up quickly, too.
                    after = Duration::ZERO;
                }
                Err(failure) if is_in_use(&failure) => {}
                Err(failure) => self.complain(&failure),
            }
        } else if sequence.reserve.is_none() && wants_reserve(block, left) {
            lacking.push(sequence.clone());
        }
        self.looks.insert(sequence.relation, Instant::now() + after);
    }

    /// Asks the group for blocks.
    fn ask_for(&mut self, own: Own, lacking: Vec<Sequence>) -> Result<(), PgError> {
        let Some(holder) = MemberId::new(own.member) else {
            return Ok(());
        };
        for sequence in lacking {
            if !is_past(self.silent_until) {
                return Ok(());
            }
            if !has_majority()? {
                self.silent_until = Some(Instant::now() + MAJORITY_LOOKED);
                return Ok(());
            }
            let plan = sequence.plan();
            let known = sequence.block.map_or(0, |block| block.end);
            let at_least = plan.first_area().max(known).saturating_add(1);
            let Some(size) = plan.next_size(at_least) else {
                self.postpone(&sequence);
                continue;
            };
            let asked = request::ask(
                Command::AssignBlock {
                    sequence: sequence.key.clone().into_bytes(),
                    holder,
                    size,
                    at_least,
                },
                PATIENCE,
            );
            let numbers = match asked {
                Ok(numbers) => numbers,
                Err(failure) => {
                    self.complain(&failure);
                    self.silent_until = Some(Instant::now() + NO_MAJORITY);
                    return Ok(());
                }
            };
            let [start, size] = numbers.as_slice() else {
                continue;
            };
            match plan.assigned(*start, *size) {
                Some(block) => {
                    error::transaction(|| {
                        sequence::note_reserve(&sequence, block);
                        Ok(())
                    })?;
                    self.looks.insert(sequence.relation, Instant::now());
                }
                None => self.postpone(&sequence),
            }
        }
        Ok(())
    }

    /// No number is left for this sequence: it is not asked for with each look.
    fn postpone(&mut self, sequence: &Sequence) {
        self.looks
            .insert(sequence.relation, Instant::now() + NO_MAJORITY * 5);
    }
}

fn has_majority() -> Result<bool, PgError> {
    let found = error::transaction(|| {
        rows(
            "select coalesce(bool_or(majority), false)::text from braid.group_activity()",
            &[],
        )
    })?;
    Ok(found
        .first()
        .is_some_and(|row| row.first().cloned().flatten().as_deref() == Some("true")))
}

/// Registers sequences that no replicated statement has created. The only member of a group shares
/// their numbers with those to come. Of several members each may have used other values, so there
/// they stay as they are.
fn register_unknown(own: Own) -> Result<(), PgError> {
    let found = error::transaction(|| Ok(sequence::unknown()))?;
    for unknown in found {
        error::transaction(|| {
            let adopts = rows(
                "select 1::text from braid.group_self where join_mode <> 'adopt'",
                &[],
            )?;
            let setting = if own.is_alone && !adopts.is_empty() {
                sequence::first_setting(&unknown)
            } else {
                Setting::LOCAL
            };
            unknown.register(setting, None);
            Ok(())
        })?;
    }
    Ok(())
}

/// Has a sequence go on after values that other nodes have used. Returns false if a transaction
/// uses it.
pub(super) fn caught_up(behind: &Behind) -> Result<bool, PgError> {
    let moved = error::transaction(|| {
        hold_for(IN_USE_FOR)?;
        behind.catch_up();
        Ok(())
    });
    match moved {
        Ok(()) => Ok(true),
        Err(failure) if is_in_use(&failure) => Ok(false),
        Err(failure) => Err(failure),
    }
}

/// Tells other nodes which values of sequences were used here, and some that are to come: what is
/// used until the next time is known ahead. What was told is written down with it, for members that
/// join.
fn announce() -> Result<(), PgError> {
    error::transaction(|| {
        let found = rows(
            "select s.relation::text, s.sequence_key, pg_sequence_last_value(s.relation)::text, q.seqincrement::text, \
                    s.announced::text, s.taken::text \
               from braid.sequence s join pg_sequence q on q.seqrelid = s.relation \
              where s.kind = 'follow' and s.is_applied and pg_sequence_last_value(s.relation) is distinct from s.taken",
            &[],
        )?;
        let mut positions = Vec::new();
        for row in found {
            let [relation, key, last, increment, told, taken] =
                <[Option<String>; 6]>::try_from(row).unwrap_or_default();
            let number = |text: Option<String>| text?.parse::<i64>().ok();
            let (Some(relation), Some(key), Some(last), Some(increment)) =
                (relation, key, number(last), number(increment))
            else {
                continue;
            };
            if let Some(next) = follow_up(last, increment, number(told), number(taken)) {
                execute(
                    "update braid.sequence set announced = $2 where relation = $1::text::oid",
                    &[relation.into(), next.into()],
                )?;
                positions.push(format!("{key}\t{next}"));
            }
        }
        if positions.is_empty() {
            return Ok(());
        }
        execute(
            "insert into braid.rule_change (content) \
             select encode(convert_to(jsonb_build_object('positions', jsonb_object_agg(split_part(p, E'\\t', 1), split_part(p, E'\\t', 2)::bigint))::text, 'UTF8'), 'hex') \
               from unnest(string_to_array($1, E'\\n')) p",
            &[positions.join("\n").into()],
        )?;
        execute("delete from braid.rule_change", &[])
    })
}

/// Notes how many values were used, so that a day's rate can be told.
fn count() -> Result<(), PgError> {
    let due = rows(
        "select 1::text from braid.sequence s where s.new_at < clock_timestamp() - interval '12 hours' limit 1",
        &[],
    )?;
    if due.is_empty() {
        return Ok(());
    }
    execute(
        "update braid.sequence s \
            set old_total = s.new_total, old_at = s.new_at, new_at = clock_timestamp(), \
                new_total = floor((s.used_before + case when s.kind <> 'range' or pg_sequence_last_value(s.relation) is null then 0 \
                    else greatest((pg_sequence_last_value(s.relation)::numeric - s.own_start) * sign(s.own_increment) + 2 - s.block_start, 0) end) \
                    / abs(s.own_increment)) \
          where s.new_at < clock_timestamp() - interval '12 hours' \
            and exists (select from pg_class c where c.oid = s.relation)",
        &[],
    )
}
