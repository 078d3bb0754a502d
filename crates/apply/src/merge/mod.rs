//! Conflicts that a user's conflict function resolves: its arguments, the meaning of its answer,
//! and the write. Run by the appliers.
//!
//! Other writes of the function belong to the transaction that is applied, and so are not sent to
//! other nodes. If they are to be sent, that transaction is rolled back, and the function is called
//! in a transaction of this node. That transaction keeps the function's writes together with a
//! record (`braid.conflict_call`) of the two rows and the answer. Then the applied transaction
//! starts again, and finds the record.

mod call;
mod row_value;

use braid_bgworker::conflict::{Action, Decision, Kind};
use braid_bgworker::merge::{Answer, MergeAction, sees, settle};
use braid_bgworker::resolution::Resolution;
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::rows;
use braid_postgres::compat::ReplOriginId;
use braid_postgres::composite::{Formed, taken_apart};
use braid_postgres::encoding;
use braid_postgres::error::PgError;
use braid_postgres::memory::Context;
use braid_postgres::slot::Slot;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::value::{self, Value};
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use crate::change::{Rows, version};
use crate::deletion::session_origin;
use crate::eviction::to_leave_first;
use crate::function::{Callee, Given, Writes};
use crate::key_hash::key_hash;
use crate::lookup::{Found, Purpose};
use crate::row_context::RowContext;
use crate::table::{OpenTable, RowValues};
use crate::target::{Key, Tables};
use crate::version::OriginNames;
use crate::write::Written;
use crate::{Current, NO_SUBSCRIPTION, Session, Target};
use call::{Note, kept};
use row_value::{first_bytes, information, read_as, same_row, whole};

pub(crate) use call::{Call, free};

/// Attributes of type braid.conflict.
const INFO_COLUMNS: usize = 8;

// Texts are passed as their bytes in the database's encoding, in hexadecimal.
const KEY: &str = "select encode(convert_to((select jsonb_object_agg(k, coalesce(r.remote, r.local) -> k) from unnest($1::text[]) k)::text, \
    getdatabaseencoding()), 'hex') from (select to_jsonb($2) as local, to_jsonb($3) as remote) r";

const ADD: &str = "select encode(convert_to((coalesce($1, '[]') || jsonb_build_array(to_jsonb($2)))::text, getdatabaseencoding()), 'hex')";

/// A conflict, as the function sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConflictInput<'a> {
    pub(crate) found: Found,
    pub(crate) kind: Kind,
    pub(crate) rows: &'a Rows<'a>,
    /// The whole row as the change's writer saw it.
    pub(crate) before: Option<&'a RowValues>,
    /// Whether the local row blocks the incoming one under another unique key: only one of them can
    /// stay.
    pub(crate) in_the_way: bool,
    /// More blocking rows.
    pub(crate) others: &'a [Slot],
}

/// A function's answer.
pub(crate) struct Asked {
    pub(crate) answer: Answer,
    values: Option<RowValues>,
}

impl Tables {
    /// Whether a function is called for this kind of conflict in the table.
    pub(crate) fn is_asked(&self, key: Key, kind: Kind) -> bool {
        self.get(key)
            .is_some_and(|target| target.plan.rules.of(kind) == Resolution::Function)
    }

    /// Whether the row that was found has the values that the change's writer saw; `None` if no row
    /// was found.
    pub(crate) fn is_as_seen(
        &mut self,
        key: Key,
        found: Found,
        before: &RowValues,
    ) -> Result<Option<bool>, PgError> {
        if !matches!(found, Found::Row(_)) {
            return Ok(None);
        }
        let Target {
            plan,
            table: Some(table),
            ..
        } = self.target(key)?
        else {
            return Ok(None);
        };
        let slot = table.local_slot();
        let same = plan.columns.iter().all(|column| {
            let seen = table.cell(before, column.local);
            seen.is_none_or(|value| slot.has(column.local, value))
        });
        Ok(Some(same))
    }

    /// Reads a function's result.
    fn understand(
        &mut self,
        key: Key,
        input: ConflictInput<'_>,
        callee: &Callee,
        given: Given,
    ) -> Result<Asked, PgError> {
        let Some(row) = given.row else {
            return Ok(Asked {
                answer: Answer::Nothing,
                values: None,
            });
        };
        let (plan, table) = self.opened(key)?;
        let new_slot = table.new_slot();
        let values = taken_apart(row, new_slot.descriptor());
        let slots = [input.rows.local.as_ref(), input.rows.remote.as_ref()];
        let is = slots.map(|slot| slot.is_some_and(|slot| same_row(slot, &values)));
        let answer = match is {
            [true, true] => Answer::Both,
            [true, false] => Answer::Local,
            [false, true] => Answer::Remote,
            [false, false] => Answer::Merged,
        };
        let keeps_key = slots.iter().flatten().any(|slot| {
            let mut identity = plan.key.iter().flat_map(|key| &key.identity);
            identity.all(|column| {
                let position = usize::try_from(column.attribute - 1).unwrap_or(usize::MAX);
                slot.has(position, values.get(position).copied().flatten())
            })
        });
        if answer == Answer::Merged && !keeps_key {
            return Err(callee.error("changed the key of a row").with_detail(
                "The row that it returns must have the key of the conflicting rows.",
            ));
        }
        Ok(Asked {
            answer,
            values: (answer == Answer::Merged || answer == Answer::Local).then(|| whole(&values)),
        })
    }
}

impl OriginNames {
    /// Returns the decision about the row that was found, given whether it is as the change's
    /// writer saw it.
    pub(crate) fn compare_with_seen(
        &mut self,
        current: &Current,
        found: Found,
        decision: Decision,
        (kind, same): (Kind, bool),
    ) -> Decision {
        sees(decision, kind, self.local(found), version(current), same)
    }
}

impl Session {
    /// Calls the function for a row that was found, or for a missing row. Carries out its answer,
    /// and records the conflict.
    pub(crate) fn settle_by_function(
        &mut self,
        context: RowContext<'_>,
        input: ConflictInput<'_>,
    ) -> Result<Written, PgError> {
        let RowContext { key, current, .. } = context;
        if current.unsettled {
            return Err(self
                .hints
                .wait_for_commit("It meets a conflict that a function decides."));
        }
        let asked = self.ask(context, input)?;
        let found = input.found;
        let mut settled = settle(asked.answer, self.origins.local(found), context.version());
        if asked.answer == Answer::Nothing && input.rows.remote.is_none() {
            settled.action = match settled.merge_action {
                MergeAction::Nothing => Action::Keep,
                MergeAction::Write | MergeAction::Delete => Action::Apply,
            };
        }
        let decision = Decision {
            action: settled.action,
            conflict: Some(input.kind),
            reason: reason(asked.answer),
        };
        self.record(context, found, decision, input.rows)?;
        let own = (current.timestamp, session_origin());
        let stamp = match found {
            Found::Row(stamp) | Found::Missing(Some(stamp)) => stamp.known(),
            Found::Missing(None) => None,
        };
        let larger = stamp.filter(|_| settled.keeps_version).unwrap_or(own);
        let mut slot: fn(&OpenTable) -> Slot = OpenTable::new_slot;
        match settled.merge_action {
            MergeAction::Nothing => return Ok(Written::Done),
            MergeAction::Delete => {
                slot = OpenTable::local_slot;
                if self.tables.open(key)?.delete()? == Written::Changed {
                    return Ok(Written::Changed);
                }
                self.note_version(key, current, slot);
                self.deletions().remember_as(key, larger, slot)?;
                self.count(key, |counts| counts.deletes += 1);
            }
            MergeAction::Write => {
                if let Some(values) = &asked.values {
                    self.tables.open(key)?.prepare_update(values);
                }
                if self.write_new(context, found)? == Written::Changed {
                    return Ok(Written::Changed);
                }
            }
        }
        if settled.marked {
            self.note_merged(key, larger, slot)?;
        }
        Ok(Written::Done)
    }

    /// Calls the function for a row that has the new key of another row, and carries out its
    /// answer.
    pub(crate) fn ask_about_new_key(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        kind: Kind,
        after: &RowValues,
    ) -> Result<(), PgError> {
        let RowContext { key, .. } = context;
        if self.tables.has_gaps(key, after) {
            return Err(PgError::new(
                SqlState::FeatureNotSupported,
                "the new row for a conflict function lacks large values that its change left as they were",
            )
            .with_hint("Give the table REPLICA IDENTITY FULL at the provider, or set another rule for update_exists."));
        }
        let exists = matches!(found, Found::Row(_));
        let (plan, table) = self.tables.opened(key)?;
        if exists {
            table.prepare_update(after);
        } else {
            table.prepare_insert(plan, after);
        }
        let rows = Rows {
            local: exists.then_some(table.local_slot()),
            remote: Some(table.new_slot()),
            given: Some(after),
            index: None,
        };
        let input = ConflictInput {
            found,
            kind,
            rows: &rows,
            before: None,
            in_the_way: false,
            others: &[],
        };
        // The row that was found is locked.
        match self.settle_by_function(context, input)? {
            Written::Done => Ok(()),
            Written::Changed => Err(PgError::new(
                SqlState::SerializationFailure,
                "a locked row has changed",
            )),
        }
    }

    /// Stores the version of the row in a slot, which was just written or deleted.
    pub(crate) fn note_merged(
        &mut self,
        key: Key,
        (timestamp, origin): (i64, ReplOriginId),
        slot: fn(&OpenTable) -> Slot,
    ) -> Result<(), PgError> {
        let (plan, table) = self.tables.opened(key)?;
        let hash = key_hash(plan, &slot(table));
        self.attempt().written.note_merged(hash, timestamp, origin);
        Ok(())
    }

    /// Calls the function that the rule names.
    pub(crate) fn ask(
        &mut self,
        context: RowContext<'_>,
        input: ConflictInput<'_>,
    ) -> Result<Asked, PgError> {
        let RowContext { key, current, .. } = context;
        let target = self.tables.target(key)?;
        let Some(function) = target.plan.rules.function(input.kind) else {
            return Err(PgError::new(
                SqlState::InternalError,
                "no function to be asked",
            ));
        };
        let callee = Callee::find(function.oid)?;
        let memory = self.change_context.context();
        let given = (&mut self.tables, &mut self.origins, memory);
        let (arguments, about) = arguments(given, context, input, &callee)?;
        let replicates = function.replicates && self.identity.subscription_id != NO_SUBSCRIPTION;
        let asked_about = &mut self.attempt.get_or_insert_default().asked_about;
        let note = Note::of((key, self.tables.plan(key)?), current, input, asked_about);
        asked_about.push(note.hash);
        let subscription = self.identity.subscription_id;
        if replicates && let Some(row) = note.take(subscription, self.rights(), (key, &callee))? {
            let given = Given { row, wrote: false };
            return self.tables.understand(key, input, &callee, given);
        }
        let writes = if replicates || input.in_the_way {
            Writes::Undo
        } else {
            Writes::Keep
        };
        let given = self.call_as_owner(context, input, &callee, (arguments, writes), &about)?;
        let asked = self.tables.understand(key, input, &callee, given)?;
        if input.in_the_way {
            if !matches!(asked.answer, Answer::Local | Answer::Remote) {
                return Err(callee
                    .error("gave neither of two rows")
                    .with_detail(format!(
                        "Of rows that are equal under another unique key only one can stay. {about}"
                    )));
            }
            // If rows are deleted, the function is called again in the transaction that deletes
            // them.
            if asked.answer == Answer::Remote {
                self.hints.calls.push(Call {
                    function,
                    arguments: kept(arguments),
                    about,
                    note: None,
                });
                return Ok(asked);
            }
        }
        if given.wrote && writes == Writes::Undo {
            if replicates {
                // Rows that were deleted within this attempt are deleted for good first, with the
                // calls for them.
                if self.attempt().is_to_be_repeated {
                    return Err(to_leave_first());
                }
                self.hints.forget_calls();
                self.hints.calls.push(Call {
                    function,
                    arguments: kept(arguments),
                    about,
                    note: Some(note),
                });
                return Err(PgError::new(
                    SqlState::SerializationFailure,
                    "what a conflict function writes is to be committed here first",
                ));
            } else {
                let call = (arguments, Writes::Keep);
                self.call_as_owner(context, input, &callee, call, &about)?;
            }
        }
        Ok(asked)
    }

    fn call_as_owner(
        &mut self,
        context: RowContext<'_>,
        input: ConflictInput<'_>,
        callee: &Callee,
        (arguments, writes): ([Option<Value<'static>>; 4], Writes),
        about: &str,
    ) -> Result<Given, PgError> {
        self.work_as_self();
        self.work_as(callee.owner);
        let given = callee.call(arguments, writes, about, &mut || {
            self.is_untouched(context, input)
        })?;
        self.work_as_self();
        self.work_as_owner_of(context.key);
        Ok(given)
    }

    /// Whether the row that the function is called for, found or missing, is unchanged.
    fn is_untouched(
        &mut self,
        RowContext { key, remote, .. }: RowContext<'_>,
        input: ConflictInput<'_>,
    ) -> Result<bool, PgError> {
        match (&input.rows.local, input.rows.given) {
            (Some(local), _) => Ok(self.tables.open(key)?.is_there(local)),
            (None, Some(given)) => Ok(matches!(
                self.find_here(key, remote, given, (Purpose::Change, false))?,
                Found::Missing(_)
            )),
            (None, None) => Ok(true),
        }
    }
}

/// Returns the function's arguments, in the memory of the change, which is the current one; and a
/// description of the conflict, for errors.
fn arguments(
    (tables, origins, memory): (&mut Tables, &mut OriginNames, Context),
    context: RowContext<'_>,
    input: ConflictInput<'_>,
    callee: &Callee,
) -> Result<([Option<Value<'static>>; 4], String), PgError> {
    let RowContext {
        key,
        remote,
        current,
    } = context;
    let (plan, table) = tables.opened(key)?;
    let relation = table.relation();
    let key_names: Vec<String> = plan
        .key
        .iter()
        .flat_map(|key| &key.columns)
        .filter_map(|column| Some(remote.columns.get(column.remote)?.name.clone()))
        .collect();
    let own_type = relation.row_type();
    let new_slot = table.new_slot();
    let shape = new_slot.descriptor();
    let of = |slot: &Option<Slot>| {
        let row = Formed::of_slot(slot.as_ref()?)?;
        Some(row.as_type(callee.row_type))
    };
    let before = input
        .before
        .map(|values| Formed::new(shape, |column| table.cell(values, column).flatten()));
    let local = of(&input.rows.local);
    let incoming = of(&input.rows.remote);
    let before = before.map(|before| before.as_type(callee.row_type));
    let json = |slot: Option<&Slot>| match slot {
        Some(slot) => slot.composite_value().copy().argument(),
        None => DatumWithOid::null_oid(own_type),
    };
    // With the rights of the table's owner, who may own these types.
    let found = rows(
        KEY,
        &[
            encoding::texts_argument(&key_names),
            json(input.rows.local.as_ref()),
            json(input.rows.remote.as_ref()),
        ],
    )?;
    let key_text = first_bytes(found);
    let mut others: Option<Value<'static>> = None;
    for other in input.others {
        // SPI leaves the memory context in which it was called as the current one. This makes sure.
        memory.enter();
        let so_far = match others {
            Some(others) => others.argument(),
            None => DatumWithOid::null_oid(pg_sys::JSONBOID),
        };
        let found = rows(ADD, &[so_far, json(Some(other))])?;
        others = first_bytes(found)
            .map(|text| read_as(pg_sys::JSONBOID, text))
            .transpose()?;
    }
    let stamp = match input.found {
        Found::Row(stamp) | Found::Missing(Some(stamp)) => stamp.known(),
        Found::Missing(None) => None,
    };
    let local_origin = stamp.map(|(_, origin)| origins.node(origin).to_owned());
    let about = format!(
        "Table \"{}\", key {}, conflict {}.",
        remote.qualified_name(),
        key_text
            .as_deref()
            .map_or("unknown".into(), String::from_utf8_lossy),
        input.kind.name()
    );
    // SPI leaves the memory context in which it was called as the current one. This makes sure.
    memory.enter();
    let timestamp = |micros: i64| value::timestamptz(micros.saturating_sub(EPOCH_DIFFERENCE));
    let values: [Option<Value<'_>>; INFO_COLUMNS] = [
        Some(value::text(input.kind.name().as_bytes())),
        Some(value::relation(pg_sys::Oid::from(key.1))),
        key_text
            .map(|key| read_as(pg_sys::JSONBOID, key))
            .transpose()?,
        stamp.map(|(micros, _)| timestamp(micros)),
        local_origin.map(|origin| value::name(origin.as_bytes())),
        Some(timestamp(current.timestamp)),
        Some(value::name(current.origin.as_bytes())),
        others,
    ];
    let info = information(callee.info_type(), values)?;
    Ok(([local, incoming, before, Some(info)], about))
}

fn reason(answer: Answer) -> &'static str {
    match answer {
        Answer::Local => "the function keeps the local row",
        Answer::Remote => "the function takes the remote row",
        Answer::Both => "both are the same to the function",
        Answer::Merged => "the function made one row of both",
        Answer::Nothing => "the function keeps neither row",
    }
}
