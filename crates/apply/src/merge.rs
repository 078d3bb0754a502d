//! Conflicts that a function of the user settles: what it is given, what its answer means for the row, and what is written. Run by
//! the appliers.
//!
//! What the function writes besides belongs to the transaction that is applied, and so does not go to other nodes. Where it is to,
//! that transaction is rolled back, the function is called in one of this node's own, which keeps what it wrote together with a note
//! (`braid.conflict_call`) of which rows met and what it gave; then the transaction is applied once more, and finds the note.

use braid_bgworker::conflict::{Action, Decision, Kind};
use braid_bgworker::merge::{Answer, MergeAction, sees, settle};
use braid_bgworker::resolution::{Function, Resolution};
use braid_node::subscription::{execute, rows, rows_written};
use braid_postgres::error::PgError;
use braid_postgres::timestamp::EPOCH_DIFFERENCE;
use braid_postgres::{compat, encoding, ffi};
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use super::change::{Key, Rows, version};
use super::deletion::session_origin;
use super::eviction::copy_tuple;
use super::function::{Callee, Given, Writes};
use super::key_hash::key_hash;
use super::lookup::{Found, Purpose};
use super::row_context::RowContext;
use super::table::{OpenTable, RowValues};
use super::write::Written;
use super::{Current, NO_SUBSCRIPTION, Session, Target};

/// Attributes of type braid.conflict.
const INFO_COLUMNS: usize = 8;
/// `NAMEDATALEN` of src/include/pg_config_manual.h.
const NAME_LENGTH: usize = 64;

// Texts come as the bytes that they are in the database's encoding, in hexadecimal.
const KEY: &str = "select encode(convert_to((select jsonb_object_agg(k, coalesce(r.remote, r.local) -> k) from unnest($1::text[]) k)::text, \
    getdatabaseencoding()), 'hex') from (select to_jsonb($2) as local, to_jsonb($3) as remote) r";
const ADD: &str = "select encode(convert_to((coalesce($1, '[]') || jsonb_build_array(to_jsonb($2)))::text, getdatabaseencoding()), 'hex')";

type Slot = *mut pg_sys::TupleTableSlot;

/// What meets.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConflictInput<'a> {
    pub(super) found: Found,
    pub(super) kind: Kind,
    pub(super) rows: Rows<'a>,
    /// The row as the change's writer saw it, whole.
    pub(super) before: Option<&'a RowValues>,
    /// The local row is equal under another unique key than that by which rows are found: only one of them can stay.
    pub(super) in_the_way: bool,
    /// More rows in the way.
    pub(super) others: &'a [Slot],
}

/// A call that is to be made in a transaction of this node's own.
#[derive(Debug)]
pub(super) struct Call {
    function: Function,
    /// In memory of the process: the row type's and the information's.
    arguments: [Option<pg_sys::Datum>; 4],
    about: String,
    /// To be noted when it is made.
    note: Option<Note>,
}

/// Which rows met.
#[derive(Debug, Clone, Copy)]
struct Note {
    lsn: u64,
    relation: u32,
    hash: u64,
    local: Option<(i64, pg_sys::RepOriginId)>,
    /// How often the row was asked about before in the transaction: its version is the same after the first time.
    times: i64,
}

/// A function's answer.
pub(super) struct Asked {
    pub(super) answer: Answer,
    values: Option<RowValues>,
}

impl Session {
    /// Whether a function is asked about this kind of conflict in the table.
    pub(super) fn is_asked(&self, key: Key, kind: Kind) -> bool {
        self.targets
            .get(&key)
            .is_some_and(|target| target.plan.rules.of(kind) == Resolution::Function)
    }

    /// What was decided about the row that was found, given the one that the change's writer saw.
    pub(super) fn compare_with_seen(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
        decision: Decision,
        (kind, before): (Kind, &RowValues),
    ) -> Result<Decision, PgError> {
        if !matches!(found, Found::Row(_)) {
            return Ok(decision);
        }
        let Target {
            plan,
            table: Some(table),
            ..
        } = self.target(key)?
        else {
            return Ok(decision);
        };
        let slot = table.local_slot();
        // SAFETY: the slot holds the row that was found; the values are of the same columns.
        let same = unsafe {
            plan.columns.iter().all(|column| {
                before
                    .get(column.local)
                    .copied()
                    .flatten()
                    .is_none_or(|value| same_value(slot, column.local, value))
            })
        };
        let local = self.local(found);
        Ok(sees(decision, kind, local, version(current), same))
    }

    /// Ask the function about a row that was found, or a gap, and do what it says; record the conflict.
    pub(super) fn settle_by_function(
        &mut self,
        context: RowContext<'_>,
        input: ConflictInput<'_>,
    ) -> Result<Written, PgError> {
        let RowContext { key, current, .. } = context;
        if current.unsettled {
            return Err(self.wait_for_commit("It meets a conflict that a function decides."));
        }
        let asked = self.ask(context, input)?;
        let found = input.found;
        let mut settled = settle(asked.answer, self.local(found), context.version());
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
                if self.open(key)?.delete()? == Written::Changed {
                    return Ok(Written::Changed);
                }
                self.note_version(key, current, slot);
                self.remember_deletion_of(key, larger, slot)?;
                self.count(key, |counts| counts.deletes += 1);
            }
            MergeAction::Write => {
                if let Some(values) = &asked.values {
                    self.open(key)?.prepare_update(values);
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

    /// Ask the function about a row that stands under the new key of another, and do what it says there.
    pub(super) fn ask_about_new_key(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        kind: Kind,
        after: &RowValues,
    ) -> Result<(), PgError> {
        let RowContext { key, .. } = context;
        if self.has_gaps(key, after) {
            return Err(PgError::new(
                "0A000",
                "the new row for a conflict function lacks large values that its change left as they were",
            )
            .with_hint("Give the table REPLICA IDENTITY FULL at the provider, or set another rule for update_exists."));
        }
        let exists = matches!(found, Found::Row(_));
        let (plan, table) = self.opened(key)?;
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
            rows,
            before: None,
            in_the_way: false,
            others: &[],
        };
        // The row that is there is locked.
        match self.settle_by_function(context, input)? {
            Written::Done => Ok(()),
            Written::Changed => Err(PgError::new("40001", "a locked row has changed")),
        }
    }

    /// Remember the version of the row in a slot, which was just written or deleted.
    pub(super) fn note_merged(
        &mut self,
        key: Key,
        (timestamp, origin): (i64, pg_sys::RepOriginId),
        slot: fn(&OpenTable) -> Slot,
    ) -> Result<(), PgError> {
        let (plan, table) = self.opened(key)?;
        // SAFETY: the slot holds the row.
        let hash = unsafe { key_hash(plan, slot(table)) };
        self.attempt().written.note_merged(hash, timestamp, origin);
        Ok(())
    }

    /// Ask the function that the rule names.
    pub(super) fn ask(
        &mut self,
        context: RowContext<'_>,
        input: ConflictInput<'_>,
    ) -> Result<Asked, PgError> {
        let RowContext { key, current, .. } = context;
        let target = self.target(key)?;
        let Some(function) = target.plan.rules.function(input.kind) else {
            return Err(PgError::new("XX000", "no function to be asked"));
        };
        let callee = Callee::find(function.oid)?;
        let (arguments, about) = self.arguments(context, input, &callee)?;
        let replicates = function.replicates && self.identity.subscription_id != NO_SUBSCRIPTION;
        let note = self.note_of(key, current, input)?;
        self.attempt().asked_about.push(note.hash);
        if replicates && let Some(row) = self.noted(key, note, &callee)? {
            let given = Given { row, wrote: false };
            return self.understand(key, input, &callee, given);
        }
        let writes = if replicates || input.in_the_way {
            Writes::Undo
        } else {
            Writes::Keep
        };
        let given = self.call_as_owner(context, input, &callee, (arguments, writes), &about)?;
        let asked = self.understand(key, input, &callee, given)?;
        if input.in_the_way {
            if !matches!(asked.answer, Answer::Local | Answer::Remote) {
                return Err(callee
                    .error("gave neither of two rows")
                    .with_detail(format!(
                        "Of rows that are equal under another unique key only one can stay. {about}"
                    )));
            }
            // Where rows leave, it is called once more with them, in the same transaction.
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
                self.hints.forget_calls();
                self.hints.calls.push(Call {
                    function,
                    arguments: kept(arguments),
                    about,
                    note: Some(note),
                });
                return Err(PgError::new(
                    "40001",
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
        (arguments, writes): ([Option<pg_sys::Datum>; 4], Writes),
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

    /// Whether the row that the function is asked about, or the gap, is what it was.
    fn is_untouched(
        &mut self,
        RowContext { key, remote, .. }: RowContext<'_>,
        input: ConflictInput<'_>,
    ) -> Result<bool, PgError> {
        match (input.rows.local, input.rows.given) {
            (Some(local), _) => Ok(self.open(key)?.is_there(local)),
            (None, Some(given)) => Ok(matches!(
                self.find_here(key, remote, given, (Purpose::Change, false))?,
                Found::Missing(_)
            )),
            (None, None) => Ok(true),
        }
    }

    /// The function's arguments, in the current memory context; and what they are about, for errors.
    fn arguments(
        &mut self,
        context: RowContext<'_>,
        input: ConflictInput<'_>,
        callee: &Callee,
    ) -> Result<([Option<pg_sys::Datum>; 4], String), PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let (plan, table) = self.opened(key)?;
        let relation = table.relation();
        let key_names: Vec<String> = plan
            .key
            .iter()
            .flat_map(|key| &key.columns)
            .filter_map(|column| Some(remote.columns.get(column.remote)?.name.clone()))
            .collect();
        // SAFETY: the slots hold rows of the open table, whose row type is that of the Datums; the descriptors are its own.
        let (own_type, [local, incoming, before]) = unsafe {
            let own_type = (*(*relation).rd_rel).reltype;
            let descriptor = (*table.new_slot()).tts_tupleDescriptor;
            let of = |slot: Option<Slot>| {
                slot.map(|slot| converted(copy_tuple(slot), descriptor, callee.row_type))
            };
            let before = input
                .before
                .map(|values| converted(form(descriptor, values), descriptor, callee.row_type));
            (
                own_type,
                [of(input.rows.local), of(input.rows.remote), before],
            )
        };
        let json = |slot: Option<Slot>| {
            // SAFETY: as above.
            unsafe {
                match slot {
                    Some(slot) => {
                        DatumWithOid::new(pg_sys::ExecFetchSlotHeapTupleDatum(slot), own_type)
                    }
                    None => DatumWithOid::null_oid(own_type),
                }
            }
        };
        // With the rights of the table's owner, whose types these may be.
        let found = rows(
            KEY,
            &[
                encoding::texts_argument(&key_names),
                json(input.rows.local),
                json(input.rows.remote),
            ],
        )?;
        let key_text = first_bytes(found);
        let mut others = None;
        for other in input.others {
            // SAFETY: SPI leaves the context that it was called in as the current one; to be sure.
            unsafe { pg_sys::MemoryContextSwitchTo(self.change_context) };
            // SAFETY: a jsonb, or null.
            let so_far = unsafe {
                match others {
                    Some(datum) => DatumWithOid::new(datum, pg_sys::JSONBOID),
                    None => DatumWithOid::null_oid(pg_sys::JSONBOID),
                }
            };
            let found = rows(ADD, &[so_far, json(Some(*other))])?;
            others = first_bytes(found)
                .map(|text| read_as(pg_sys::JSONBOID, text))
                .transpose()?;
        }
        let stamp = match input.found {
            Found::Row(stamp) | Found::Missing(Some(stamp)) => stamp.known(),
            Found::Missing(None) => None,
        };
        let local_origin = stamp.map(|(_, origin)| self.origins.node(origin).to_owned());
        let about = format!(
            "Table \"{}\", key {}, conflict {}.",
            remote.qualified_name(),
            key_text
                .as_deref()
                .map_or("unknown".into(), String::from_utf8_lossy),
            input.kind.name()
        );
        // SAFETY: SPI leaves the context that it was called in as the current one; to be sure.
        unsafe { pg_sys::MemoryContextSwitchTo(self.change_context) };
        let timestamp = |micros: i64| pg_sys::Datum::from(micros.saturating_sub(EPOCH_DIFFERENCE));
        let values: [Option<pg_sys::Datum>; INFO_COLUMNS] = [
            Some(text(input.kind.name())),
            Some(pg_sys::Datum::from(pg_sys::Oid::from(key.1))),
            key_text
                .map(|key| read_as(pg_sys::JSONBOID, key))
                .transpose()?,
            stamp.map(|(micros, _)| timestamp(micros)),
            local_origin.map(|origin| name(&origin)),
            Some(timestamp(current.timestamp)),
            Some(name(&current.origin)),
            others,
        ];
        // SAFETY: the values are of the type's attributes.
        let info = unsafe { information(callee.info_type(), values)? };
        Ok(([local, incoming, before, Some(info)], about))
    }

    /// What a function's result says.
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
        // SAFETY: the row is of the function's row type; the slots hold rows of the table.
        unsafe {
            let descriptor = (*table.new_slot()).tts_tupleDescriptor;
            let values = taken_apart(row, callee.row_type, descriptor, own_type(table));
            let is = |slot: Option<Slot>| slot.is_some_and(|slot| same_row(slot, &values));
            let answer = match (is(input.rows.local), is(input.rows.remote)) {
                (true, true) => Answer::Both,
                (true, false) => Answer::Local,
                (false, true) => Answer::Remote,
                (false, false) => Answer::Merged,
            };
            let slots = [input.rows.local, input.rows.remote];
            let keeps_key = slots.iter().flatten().any(|slot| {
                plan.key.iter().flat_map(|key| &key.columns).all(|column| {
                    let position = usize::try_from(column.attribute - 1).unwrap_or(usize::MAX);
                    let value = values.get(position).copied().flatten().flatten();
                    same_value(*slot, position, value)
                })
            });
            if answer == Answer::Merged && !keeps_key {
                return Err(callee
                    .error("changed the key of a row")
                    .with_detail("The row that it gives must have the key of those that meet."));
            }
            Ok(Asked {
                answer,
                values: (answer == Answer::Merged || answer == Answer::Local).then_some(values),
            })
        }
    }

    fn note_of(
        &mut self,
        key: Key,
        current: &Current,
        input: ConflictInput<'_>,
    ) -> Result<Note, PgError> {
        let plan = &self.target(key)?.plan;
        let hash = match (input.rows.remote, input.rows.local) {
            // SAFETY: the slot holds a row of the table.
            (Some(slot), _) | (None, Some(slot)) => unsafe { key_hash(plan, slot) },
            (None, None) => 0,
        };
        let times = self
            .attempt()
            .asked_about
            .iter()
            .filter(|asked| **asked == hash);
        Ok(Note {
            times: i64::try_from(times.count()).unwrap_or(i64::MAX),
            lsn: current.commit_lsn,
            relation: key.1,
            hash,
            local: match input.found {
                Found::Row(stamp) | Found::Missing(Some(stamp)) => stamp.known(),
                Found::Missing(None) => None,
            },
        })
    }

    /// What the function gave when it was called for these rows by itself, if it was. The note goes with the transaction in hand.
    fn noted(
        &mut self,
        key: Key,
        note: Note,
        callee: &Callee,
    ) -> Result<Option<Option<pg_sys::Datum>>, PgError> {
        self.work_as_self();
        let found = rows_written(
            "delete from braid.conflict_call where subscription_id = $1 and commit_lsn = '0/0'::pg_lsn + $2::numeric \
             and relation = $3::oid and key_hash = $4 and local_timestamp is not distinct from $5 \
             and local_origin is not distinct from $6::oid and times = $7 \
             returning encode(convert_to(given, getdatabaseencoding()), 'hex')",
            &self.note_arguments(note),
        )?;
        self.work_as_owner_of(key);
        // SAFETY: SPI leaves the context that it was called in as the current one; to be sure.
        unsafe { pg_sys::MemoryContextSwitchTo(self.change_context) };
        if found.is_empty() {
            return Ok(None);
        }
        let row = first_bytes(found).map(|text| read_as(callee.row_type, text));
        Ok(Some(row.transpose()?))
    }

    fn note_arguments(&self, note: Note) -> [DatumWithOid<'static>; 7] {
        [
            i64::from(self.identity.subscription_id).into(),
            i64::try_from(note.lsn).unwrap_or(i64::MAX).into(),
            i64::from(note.relation).into(),
            note.hash.cast_signed().into(),
            note.local.map(|(timestamp, _)| timestamp).into(),
            note.local.map(|(_, origin)| i64::from(origin)).into(),
            note.times.into(),
        ]
    }

    /// Make the calls that wait, in the open transaction of this node's own. What a function writes that is not to be sent on has
    /// its records marked with `origin`: the commit has none.
    pub(super) fn make_calls(
        &mut self,
        calls: &[Call],
        origin: pg_sys::RepOriginId,
    ) -> Result<(), PgError> {
        for call in calls {
            let callee = Callee::find(call.function.oid)?;
            self.work_as_self();
            self.work_as(callee.owner);
            if !call.function.replicates {
                set_session_origin(origin);
            }
            let outcome = callee.call(call.arguments, Writes::Keep, &call.about, &mut || Ok(true));
            set_session_origin(0);
            let given = outcome?;
            self.work_as_self();
            if let Some(note) = call.note {
                // SAFETY: the row is of the function's row type.
                let row = unsafe {
                    match given.row {
                        Some(row) => DatumWithOid::new(row, callee.row_type),
                        None => DatumWithOid::null_oid(callee.row_type),
                    }
                };
                let mut arguments = Vec::from(self.note_arguments(note));
                arguments.push(row);
                execute(
                    "insert into braid.conflict_call (subscription_id, commit_lsn, relation, key_hash, local_timestamp, local_origin, times, given) \
                     values ($1, '0/0'::pg_lsn + $2::numeric, $3::oid, $4, $5, $6::oid, $7, $8::text)",
                    &arguments,
                )?;
            }
        }
        Ok(())
    }
}

/// Free what a call holds.
pub(super) fn free(call: Call) {
    for argument in call.arguments.into_iter().flatten() {
        // SAFETY: copied by `kept`, and used by nobody else.
        unsafe { pg_sys::pfree(argument.cast_mut_ptr()) };
    }
}

/// Copies of rows that outlive the transaction.
fn kept(arguments: [Option<pg_sys::Datum>; 4]) -> [Option<pg_sys::Datum>; 4] {
    // SAFETY: the arguments are composite values in one piece.
    unsafe {
        let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        let copies = arguments.map(|argument| {
            argument.map(|value| {
                pg_sys::Datum::from(pg_sys::pg_detoast_datum_copy(value.cast_mut_ptr()))
            })
        });
        pg_sys::MemoryContextSwitchTo(before);
        copies
    }
}

fn set_session_origin(origin: pg_sys::RepOriginId) {
    // SAFETY: a variable of the process, with which WAL records are marked from now on.
    unsafe { pg_sys::replorigin_session_origin = origin };
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

fn own_type(table: &OpenTable) -> pg_sys::Oid {
    // SAFETY: the table is open.
    unsafe { (*(*table.relation()).rd_rel).reltype }
}

fn text(value: &str) -> pg_sys::Datum {
    use pgrx::IntoDatum;
    value.into_datum().unwrap_or_else(pg_sys::Datum::null)
}

fn name(value: &str) -> pg_sys::Datum {
    // SAFETY: fresh zeroed memory of a name's size, of which the last byte stays zero.
    unsafe {
        let place = pg_sys::palloc0(NAME_LENGTH).cast::<u8>();
        let length = value.len().min(NAME_LENGTH - 1);
        place.copy_from_nonoverlapping(value.as_ptr(), length);
        pg_sys::Datum::from(place)
    }
}

/// The bytes that the first cell of a result gives in hexadecimal.
fn first_bytes(rows: Vec<Vec<Option<String>>>) -> Option<Vec<u8>> {
    let text = rows.into_iter().next()?.into_iter().next()??;
    let (pairs, _) = text.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    pairs
        .iter()
        .map(|[high, low]| u8::try_from(digit(*high)? << 4 | digit(*low)?).ok())
        .collect()
}

/// A value of a type, from its text in the database's encoding.
fn read_as(type_id: pg_sys::Oid, value: Vec<u8>) -> Result<pg_sys::Datum, PgError> {
    let value = std::ffi::CString::new(value)
        .map_err(|_| PgError::new("XX000", "text with a zero byte"))?;
    let (mut function, mut parameter) = (pg_sys::InvalidOid, pg_sys::InvalidOid);
    // SAFETY: the type's own input function reads a string.
    unsafe {
        pg_sys::getTypeInputInfo(type_id, &raw mut function, &raw mut parameter);
        Ok(pg_sys::OidInputFunctionCall(
            function,
            value.as_ptr().cast_mut(),
            parameter,
            -1,
        ))
    }
}

/// A row of type braid.conflict.
///
/// # Safety
/// The values are of its attributes' types.
unsafe fn information(
    info_type: pg_sys::Oid,
    values: [Option<pg_sys::Datum>; INFO_COLUMNS],
) -> Result<pg_sys::Datum, PgError> {
    // SAFETY: the descriptor is a copy, of as many attributes as there are values.
    unsafe {
        let descriptor = pg_sys::lookup_rowtype_tupdesc_copy(info_type, -1);
        if usize::try_from((*descriptor).natts).ok() != Some(INFO_COLUMNS) {
            return Err(PgError::new(
                "XX000",
                "type braid.conflict is not that of this version",
            ));
        }
        let mut datums = values.map(|value| value.unwrap_or_else(pg_sys::Datum::null));
        let mut nulls = values.map(|value| value.is_none());
        let tuple = pg_sys::heap_form_tuple(descriptor, datums.as_mut_ptr(), nulls.as_mut_ptr());
        Ok(pg_sys::heap_copy_tuple_as_datum(tuple, descriptor))
    }
}

/// A row of the descriptor with these values; null where there is none.
///
/// # Safety
/// The values are of the descriptor's attributes.
unsafe fn form(descriptor: pg_sys::TupleDesc, values: &RowValues) -> pg_sys::HeapTuple {
    // SAFETY: as many values as attributes.
    unsafe {
        let natts = usize::try_from((*descriptor).natts).unwrap_or(0);
        let value = |position: usize| values.get(position).copied().flatten().flatten();
        let mut datums: Vec<pg_sys::Datum> = (0..natts)
            .map(|position| value(position).unwrap_or_else(pg_sys::Datum::null))
            .collect();
        let mut nulls: Vec<bool> = (0..natts)
            .map(|position| value(position).is_none())
            .collect();
        pg_sys::heap_form_tuple(descriptor, datums.as_mut_ptr(), nulls.as_mut_ptr())
    }
}

/// A row of `descriptor` as one of `row_type`: the table's own, or that of a table of which it is a partition.
///
/// # Safety
/// The tuple is of the descriptor.
unsafe fn converted(
    tuple: pg_sys::HeapTuple,
    descriptor: pg_sys::TupleDesc,
    row_type: pg_sys::Oid,
) -> pg_sys::Datum {
    // SAFETY: as the caller says; the wanted descriptor is a copy.
    unsafe {
        if (*descriptor).tdtypeid == row_type {
            return pg_sys::heap_copy_tuple_as_datum(tuple, descriptor);
        }
        let wanted = pg_sys::lookup_rowtype_tupdesc_copy(row_type, -1);
        let map = pg_sys::convert_tuples_by_name(descriptor, wanted);
        let tuple = if map.is_null() {
            tuple
        } else {
            pg_sys::execute_attr_map_tuple(tuple, map)
        };
        pg_sys::heap_copy_tuple_as_datum(tuple, wanted)
    }
}

/// The values of a row of `row_type` in the order of `descriptor`, whose row type is `own`.
///
/// # Safety
/// The row is of the type, in one piece.
unsafe fn taken_apart(
    row: pg_sys::Datum,
    row_type: pg_sys::Oid,
    descriptor: pg_sys::TupleDesc,
    own: pg_sys::Oid,
) -> RowValues {
    // SAFETY: as the caller says; the arrays have as many places as the descriptor attributes.
    unsafe {
        let header = row.cast_mut_ptr::<pg_sys::HeapTupleHeaderData>();
        let mut data = pg_sys::HeapTupleData {
            t_len: u32::try_from(pgrx::varsize_4b(header.cast())).unwrap_or(0),
            t_data: header,
            ..Default::default()
        };
        let mut tuple = &raw mut data;
        if row_type != own {
            let given = pg_sys::lookup_rowtype_tupdesc_copy(row_type, -1);
            let map = pg_sys::convert_tuples_by_name(given, descriptor);
            if !map.is_null() {
                tuple = pg_sys::execute_attr_map_tuple(tuple, map);
            }
        }
        let natts = usize::try_from((*descriptor).natts).unwrap_or(0);
        let mut values = vec![pg_sys::Datum::null(); natts];
        let mut nulls = vec![true; natts];
        pg_sys::heap_deform_tuple(tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
        values
            .into_iter()
            .zip(nulls)
            .map(|(value, is_null)| Some((!is_null).then_some(value)))
            .collect()
    }
}

/// Whether a row's column, from 0, has just this value.
///
/// # Safety
/// The slot holds a row that has the column, of the value's type.
pub(super) unsafe fn same_value(slot: Slot, position: usize, value: Option<pg_sys::Datum>) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        let descriptor = (*slot).tts_tupleDescriptor;
        let natts = (*descriptor).natts;
        if position >= usize::try_from(natts).unwrap_or(0) {
            return false;
        }
        if i32::from((*slot).tts_nvalid) < natts {
            pg_sys::slot_getsomeattrs_int(slot, natts);
        }
        let is_null = *(*slot).tts_isnull.add(position);
        let Some(value) = value else { return is_null };
        let attribute = compat::TupleDescAttr(descriptor, position);
        !is_null
            && ffi::datum_image_eq(
                value,
                *(*slot).tts_values.add(position),
                (*attribute).attbyval,
                (*attribute).attlen,
            )
    }
}

/// Whether a row has just these values. Generated columns follow from the others.
///
/// # Safety
/// The slot holds a row of the values' shape.
unsafe fn same_row(slot: Slot, values: &RowValues) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        values.iter().enumerate().all(|(position, value)| {
            let attribute = compat::TupleDescAttr((*slot).tts_tupleDescriptor, position);
            (*attribute).attisdropped
                || (*attribute).attgenerated != 0
                || same_value(slot, position, value.flatten())
        })
    }
}
