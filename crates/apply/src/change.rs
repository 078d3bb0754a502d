//! One changed row: find what is here, decide, write, record.

use std::ops::ControlFlow;
use std::rc::Rc;

use braid_bgworker::concurrency::{Writer, concurrent};
use braid_bgworker::conflict::{
    Action, Decision, Kind, Local, NO_CONFLICT, Version, decide_delete, decide_insert,
    decide_new_key, decide_update,
};
use braid_bgworker::keyless;
use braid_bgworker::resolution::Resolution;
use braid_gir::{Change, Image, Operation, Value};
use braid_node::registry;
use braid_node::settings::{self, ConflictHistory};
use braid_postgres::error::PgError;
use braid_postgres::heap_page::Place;
use pgrx::pg_sys;

use super::batch::{KnownVersions, WrittenVersions};
use super::copied;
use super::deletion::session_origin;
use super::doing::Step;
use super::history;
use super::in_the_way::Way;
use super::key_hash::{KeyHashes, key_hash};
use super::lookup::{Found, Purpose, writer};
use super::merge::ConflictInput;
use super::querier::{Fetched, Wanted, completed};
use super::relation::{LocalRelation, RemoteRelation, fill_row};
use super::removal::Without;
use super::row_context::RowContext;
use super::table::{OpenTable, RowValues};
use super::version::{OriginNames, Stamp};
use super::write::Written;
use super::{Current, Session, Target};

pub(super) type Key = (u32, u32);

/// What is under a row's new key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    /// Something newer.
    Taken,
    /// The row itself.
    Own,
    /// Nothing, or nothing any more.
    Free,
}

/// An update of one row, and what is found out about it until it is carried out.
#[derive(Debug)]
struct Update<'v> {
    /// Has the key of the row.
    old: &'v RowValues,
    after: &'v RowValues,
    /// The row as its writer saw it, if all of it is known.
    before: Option<&'v RowValues>,
    /// The row gets another key.
    moved: bool,
    /// Under the new key.
    room: Room,
    /// Large values are missing that the update left as they were.
    incomplete: bool,
    /// Large values that were asked for.
    answer: Option<Fetched>,
    /// Hashes of the key that the row leaves, until others are told of that.
    left: Option<KeyHashes>,
}

impl Update<'_> {
    /// Whether another node may be asked for large values. The whole old row is as good as an answer.
    fn may_ask(&self) -> bool {
        self.incomplete && self.before.is_none()
    }

    /// The row after it with the large values that are known; `None` where none are.
    fn whole(&self) -> Option<RowValues> {
        match (self.before, &self.answer) {
            (Some(before), _) => Some(filled_from(self.after, before)),
            (None, Some(Fetched::Columns(columns))) => Some(completed(self.after, columns)),
            (None, _) => None,
        }
    }
}

/// Whether a decision has the row of the change written.
fn writes(decision: Decision) -> bool {
    matches!(decision.action, Action::Apply | Action::Ask)
}

/// The row that is looked for.
#[derive(Clone, Copy)]
struct Sought<'v> {
    /// Have its key.
    values: &'v RowValues,
    purpose: Purpose,
    /// The row as the change's writer saw it, if all of it is known: that counts where a function is asked about conflicts of this kind.
    seen: Option<(Kind, &'v RowValues)>,
}

impl<'v> Sought<'v> {
    fn new(values: &'v RowValues, purpose: Purpose, seen: Option<(Kind, &'v RowValues)>) -> Self {
        Self {
            values,
            purpose,
            seen,
        }
    }
}

/// State of looking for a row until what is decided about it is carried out.
#[derive(Debug, Clone, Copy)]
struct Search {
    /// The row has to be locked before it is written.
    must_lock: bool,
    /// The row is locked when it is found.
    lock: bool,
}

/// What the versions of rows of a table are told by, while they are looked for.
struct RowVersions<'s> {
    plan: &'s LocalRelation,
    known: &'s mut KnownVersions,
    written: &'s WrittenVersions,
    origins: &'s mut OriginNames,
    current: Option<&'s Current>,
}

impl RowVersions<'_> {
    /// The version of the row in a slot, of which its transaction says `stamp`.
    fn of(
        &mut self,
        xid: pg_sys::TransactionId,
        slot: *mut pg_sys::TupleTableSlot,
        stamp: Stamp,
    ) -> Result<Stamp, PgError> {
        let plan = self.plan;
        let origin = match stamp {
            Stamp::Known(_, origin) => origin,
            Stamp::Own => {
                // SAFETY: as below.
                let hash = || unsafe { key_hash(plan, slot) };
                return self.known.refine(self.written, xid, stamp, hash);
            }
            // SAFETY: as below.
            Stamp::Unversioned => return unsafe { copied::refine(plan, xid, slot) },
            Stamp::Merged(..) | Stamp::OwnMerged(..) => return Ok(stamp),
        };
        // What comes straight from the origin that wrote the row is newer, whatever the row's time; unless it was merged with
        // what that had not seen. Where rows have no key, the time of one that was taken out is written down.
        let trusted = !plan.rules.may_have_merged_rows()
            && (plan.key.is_some() || !registry::remembers_deletions())
            && self.current.is_some_and(|current| {
                current.from_origin && self.origins.node(origin) == &*current.origin
            });
        if origin == 0 || trusted {
            return Ok(stamp);
        }
        // SAFETY: the slot holds a version of a row of the table, which is open.
        let hash = || unsafe { key_hash(plan, slot) };
        self.known.refine(self.written, xid, stamp, hash)
    }

    /// Whether the transaction in hand may take a row of this version out of a table without a key. By other rules than versions, or as long
    /// as it has none of its own, any is as good as another.
    fn takes(&mut self, stamp: Stamp) -> bool {
        let Some(current) = self.current else {
            return true;
        };
        let (Stamp::Known(timestamp, origin) | Stamp::Merged(timestamp, origin)) = stamp else {
            return true;
        };
        if current.unsettled || !self.plan.rules.go_by_versions() {
            return true;
        }
        let row = Version {
            timestamp,
            origin: self.origins.node(origin),
        };
        keyless::takes(row, version(current), current.from_origin)
    }
}

/// What a change says of a row that comes or changes.
#[derive(Clone, Copy)]
pub(super) struct Incoming<'a> {
    /// The row after it.
    pub(super) after: &'a RowValues,
    /// The row as its writer saw it, if all of it is known.
    pub(super) before: Option<&'a RowValues>,
    /// It is a new row.
    pub(super) is_insert: bool,
}

impl<'a> Incoming<'a> {
    fn inserted(after: &'a RowValues) -> Self {
        Self {
            after,
            before: None,
            is_insert: true,
        }
    }
}

/// The slots that a recorded conflict's rows are taken from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) local: Option<*mut pg_sys::TupleTableSlot>,
    pub(super) remote: Option<*mut pg_sys::TupleTableSlot>,
    /// What the change says of the remote row, the rest of which is from elsewhere; `None`: all of it.
    pub(super) given: Option<&'a RowValues>,
    /// The index in which they meet; `None`: that of the key by which rows are found.
    pub(super) index: Option<pg_sys::Oid>,
}

impl Session {
    /// Apply one change of the transaction in hand.
    ///
    /// # Errors
    /// What PostgreSQL raises comes as an unwinding panic; errors that are found here are returned. Either way the
    /// transaction is to be rolled back.
    pub fn change(&mut self, change: &Change<'_>) -> Result<(), PgError> {
        let applied = self.apply_change(change);
        self.attempt().replaced = None;
        applied
    }

    fn apply_change(&mut self, change: &Change<'_>) -> Result<(), PgError> {
        self.does(Step::Change(change.operation), Some(change.header.schema.0));
        if change.operation == Operation::Insert && self.is_bulk_allowed() {
            return self.insert_later(change);
        }
        self.flush()?;
        let schema = change.header.schema.0;
        let writes = change.operation != Operation::Delete;
        let Some((key, remote, current)) = self.prepare(schema, writes)? else {
            return Ok(());
        };
        let context = RowContext {
            key,
            remote: &remote,
            current: &current,
        };
        match change.operation {
            Operation::Insert => self.insert_now(change, schema, context),
            Operation::Update => self.update_change(change, schema, context),
            Operation::Delete => {
                let (key, before) = self.routed(change.before.as_ref(), schema, key, &remote)?;
                self.delete(context.at(key), &before)?;
                self.spare.push(before);
                Ok(())
            }
        }
    }

    pub(super) fn insert_now(
        &mut self,
        change: &Change<'_>,
        schema: u32,
        context: RowContext<'_>,
    ) -> Result<(), PgError> {
        let (key, after) =
            self.routed_new(change.after.as_ref(), schema, context.key, context.remote)?;
        self.insert(context.at(key), &after)?;
        self.spare.push(after);
        Ok(())
    }

    /// Open the table that a relation of the stream goes to, and work as its owner. `None` when its changes are not applied: they are
    /// in its copy, or it is not part of the subscription. `writes`: the change is an insert or update.
    pub(super) fn prepare(
        &mut self,
        schema: u32,
        writes: bool,
    ) -> Result<Option<(Key, Rc<RemoteRelation>, Current)>, PgError> {
        let remote = self.remote(schema)?;
        let Some(current) = self.current().cloned() else {
            return Err(PgError::new(
                "08P01",
                "change outside of a transaction from the provider",
            ));
        };
        let key = loop {
            let route = self.route(schema, &remote)?;
            if !self.takes(&route, &current, writes)? {
                return Ok(None);
            }
            let key = self.open_table(schema, &remote, route.oid)?;
            // Taking the lock may have shown that the table was truncated and copied anew meanwhile.
            if self.is_current(&route) {
                break key;
            }
            self.close_tables();
        };
        self.work_as_owner_of(key);
        self.forget_given();
        // SAFETY: the context lives as long as the process; what was in it belongs to the change before.
        unsafe {
            pg_sys::MemoryContextSwitchTo(self.change_context);
            pg_sys::MemoryContextReset(self.change_context);
        }
        Ok(Some((key, remote, current)))
    }

    fn update_change(
        &mut self,
        change: &Change<'_>,
        schema: u32,
        context: RowContext<'_>,
    ) -> Result<(), PgError> {
        let RowContext {
            key: root,
            remote,
            current,
        } = context;
        let (new_key, after) = self.routed(change.after.as_ref(), schema, root, remote)?;
        let Some(before) = change.before.as_ref() else {
            self.update(context.at(new_key), &after, &after, false)?;
            self.spare.push(after);
            return Ok(());
        };
        let (old_key, old) = self.routed(Some(before), schema, root, remote)?;
        if old_key != new_key {
            // The row moves to another partition.
            return self.replace(context, (old_key, new_key), old, after);
        }
        let moved = match &self.target(old_key)?.plan.key {
            Some(key) => key_differs(change, key)?,
            // Nothing but a unique key can be in the way; a row that equals the new one is a row of its own.
            None => false,
        };
        if moved && current.runs {
            return Err(self.wait_for_commit("It changes a key."));
        }
        if moved && self.is_two_rows(old_key, &old, &after) {
            return self.replace(context, (old_key, new_key), old, after);
        }
        self.update(context.at(old_key), &old, &after, moved)?;
        self.spare.extend([old, after]);
        Ok(())
    }

    /// One row leaves, one comes: an update that is not about one row here.
    fn replace(
        &mut self,
        context: RowContext<'_>,
        (old_key, new_key): (Key, Key),
        old: RowValues,
        after: RowValues,
    ) -> Result<(), PgError> {
        let complete = self.complete_moved(context, (old_key, new_key), &old, after)?;
        self.bring_lacking((old_key, new_key), context.remote, &old)?;
        self.delete(context.at(old_key), &old)?;
        self.spare.push(old);
        match complete {
            Some(complete) => self.insert(context.at(new_key), &complete),
            None => Ok(()),
        }
    }

    /// Whether an update that gives a row another key is about two rows: where a function is asked, or columns have rules, which both merge what is
    /// under one key. What others do under the old key meanwhile would be merged into the new one at one node, and meet a deletion at another.
    fn is_two_rows(&self, key: Key, old: &RowValues, after: &RowValues) -> bool {
        let merges = self
            .targets
            .get(&key)
            .is_some_and(|target| target.plan.rules.asks() || target.plan.column_rules.any());
        // Another form of the same key is no other.
        merges
            && self
                .key_hashes(key, old)
                .is_none_or(|gone| self.leaves(key, gone, after))
    }

    /// Fill in unchanged TOAST values of a row that gets another key, or partition. `None` when nobody knows them: the row is not here.
    fn complete_moved(
        &mut self,
        context: RowContext<'_>,
        (old_key, new_key): (Key, Key),
        old: &RowValues,
        mut after: RowValues,
    ) -> Result<Option<RowValues>, PgError> {
        let RowContext {
            remote, current, ..
        } = context;
        let gaps: Vec<(usize, usize)> = {
            let from = self.target(old_key)?.plan.columns.iter();
            let from: Vec<(usize, usize)> =
                from.map(|column| (column.remote, column.local)).collect();
            let to = self.target(new_key)?.plan.columns.iter();
            to.filter(|column| after.get(column.local).is_some_and(Option::is_none))
                .filter_map(|column| {
                    let same = from.iter().find(|(remote, _)| *remote == column.remote);
                    same.map(|(_, local)| (*local, column.local))
                })
                .collect()
        };
        if gaps.is_empty() {
            return Ok(Some(after));
        }
        if remote.identity == braid_gir::ReplicaIdentity::Full {
            for (from, to) in gaps {
                if let Some(place) = after.get_mut(to) {
                    *place = old.get(from).copied().flatten();
                }
            }
            return Ok(Some(after));
        }
        let found = self.find(old_key, remote, old, (Purpose::Change, false))?;
        if !self.knows_rest(found, current) {
            let wanted = Wanted {
                row: &after,
                before: (old_key, old),
                moved: true,
            };
            if let Fetched::Columns(columns) = self.fetch_gaps(context.at(new_key), wanted)? {
                return Ok(Some(completed(&after, &columns)));
            }
        }
        if !matches!(
            self.find(old_key, remote, old, (Purpose::Change, true))?,
            Found::Row(_)
        ) {
            return Ok(None);
        }
        let table = self.open(old_key)?;
        for (from, to) in gaps {
            let value = table.local_value(from);
            if let Some(place) = after.get_mut(to) {
                *place = Some(value);
            }
        }
        Ok(Some(after))
    }

    /// A row that gets another key, or partition, keeps the values of columns that the stream does not have.
    fn bring_lacking(
        &mut self,
        (old_key, new_key): (Key, Key),
        remote: &RemoteRelation,
        old: &RowValues,
    ) -> Result<(), PgError> {
        let defaults = |key: Key| self.targets.get(&key).map(|target| &target.plan.defaults);
        let (Some(from), Some(to)) = (defaults(old_key), defaults(new_key)) else {
            return Ok(());
        };
        let columns: Vec<(usize, usize)> = to
            .iter()
            .filter_map(|to| {
                let same = from.iter().find(|from| from.named == to.named)?;
                Some((same.local, to.local))
            })
            .collect();
        if columns.is_empty() {
            return Ok(());
        }
        if !matches!(
            self.find(old_key, remote, old, (Purpose::Change, false))?,
            Found::Row(_)
        ) {
            return Ok(());
        }
        let table = self.open(old_key)?;
        let values = columns
            .into_iter()
            .map(|(from, to)| (to, table.copied_value(from)))
            .collect();
        self.give(new_key, values)
    }

    /// Have the row that the change in hand inserts into a table take these values for columns that the stream does not have.
    fn give(
        &mut self,
        key: Key,
        values: Vec<(usize, Option<pg_sys::Datum>)>,
    ) -> Result<(), PgError> {
        self.open(key)?.given = Some(values);
        self.attempt().given_to = Some(key);
        Ok(())
    }

    /// Forget the values that were given for the change before, whose memory is about to be used again.
    pub(super) fn forget_given(&mut self) {
        if let Some(key) = self.attempt().given_to.take()
            && let Some(target) = self.targets.get_mut(&key)
            && let Some(table) = target.table.as_mut()
        {
            table.given = None;
        }
    }

    /// The values of a row that is to be inserted, for the partition that it belongs to, opened; for the table itself when it is not
    /// partitioned. The named table's defaults count, once, for where the row belongs and for what is written.
    fn routed_new(
        &mut self,
        image: Option<&Image<'_>>,
        schema: u32,
        key: Key,
        remote: &RemoteRelation,
    ) -> Result<(Key, RowValues), PgError> {
        let plan = &self.target(key)?.plan;
        let Some(image) = image.filter(|_| plan.partitioned && !plan.defaults.is_empty()) else {
            return self.routed(image, schema, key, remote);
        };
        let values = self.values(image, key, remote)?;
        let (plan, table) = self.opened(key)?;
        table.prepare_insert(plan, &values);
        let defaults: Vec<(i16, Option<pg_sys::Datum>)> = plan
            .defaults
            .iter()
            .map(|column| (column.named, table.new_value(column.local)))
            .collect();
        let oid = table.partition();
        let leaf = self.open_table(schema, remote, oid)?;
        self.work_as_owner_of(leaf);
        let given = self.target(leaf)?.plan.defaults.iter();
        let given = given
            .map(|column| {
                let value = defaults.iter().find(|(named, _)| *named == column.named);
                (column.local, value.and_then(|(_, value)| *value))
            })
            .collect();
        self.give(leaf, given)?;
        self.spare.push(values);
        Ok((leaf, self.values(image, leaf, remote)?))
    }

    /// The partition that a row belongs to, opened; the table itself when it is not partitioned.
    fn leaf(
        &mut self,
        schema: u32,
        remote: &RemoteRelation,
        key: Key,
        values: &RowValues,
    ) -> Result<Key, PgError> {
        let Some(target) = self.targets.get_mut(&key) else {
            return Ok(key);
        };
        if !target.plan.partitioned {
            return Ok(key);
        }
        let Some(table) = target.table.as_mut() else {
            return Ok(key);
        };
        let oid = table.partition_for(values);
        let leaf = self.open_table(schema, remote, oid)?;
        self.work_as_owner_of(leaf);
        Ok(leaf)
    }

    /// An image's values for the partition that they belong to, opened; for the table itself when it is not partitioned.
    fn routed(
        &mut self,
        image: Option<&Image<'_>>,
        schema: u32,
        key: Key,
        remote: &RemoteRelation,
    ) -> Result<(Key, RowValues), PgError> {
        let Some(image) = image else {
            return Err(PgError::new(
                "08P01",
                "change without a row from the provider",
            ));
        };
        let values = self.values(image, key, remote)?;
        let leaf = self.leaf(schema, remote, key, &values)?;
        if leaf == key {
            Ok((key, values))
        } else {
            Ok((leaf, self.values(image, leaf, remote)?))
        }
    }

    /// Convert an image to the values of a local row.
    pub(super) fn values(
        &mut self,
        image: &Image<'_>,
        key: Key,
        remote: &RemoteRelation,
    ) -> Result<RowValues, PgError> {
        if usize::from(image.columns()) != remote.columns.len() {
            return Err(PgError::new(
                "08P01",
                format!(
                    "row from the provider has {} columns where its schema has {}",
                    image.columns(),
                    remote.columns.len()
                ),
            ));
        }
        let Some(target) = self.targets.get_mut(&key) else {
            return Err(PgError::new("XX000", "table is not open"));
        };
        let mut row = self.spare.pop().unwrap_or_default();
        row.clear();
        row.resize(target.plan.width, None);
        fill_row(&mut row, &mut target.plan.columns, image, |_| true)?;
        Ok(row)
    }

    pub(super) fn target(&mut self, key: Key) -> Result<&mut Target, PgError> {
        self.targets
            .get_mut(&key)
            .ok_or_else(|| PgError::new("XX000", "table is not open"))
    }

    /// The table, if the row that is found in it need not be locked before it is written.
    pub(super) fn needs_lock(&self, key: Key) -> bool {
        self.hints.check_other_keys
            || self
                .targets
                .get(&key)
                .and_then(|target| target.table.as_ref())
                .is_none_or(|table| !(table.is_plain() && table.has_key()))
    }

    /// Find the row that `values` identify for a purpose, and lock it if that is wanted. Where it is to be inserted, a deletion that is older than it
    /// need not be known.
    pub(super) fn find(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        values: &RowValues,
        how: (Purpose, bool),
    ) -> Result<Found, PgError> {
        match self.find_here(key, remote, values, how)? {
            Found::Missing(stamp) => {
                self.recall(key, values, stamp, matches!(how, (Purpose::Insert, _)))
            }
            found @ Found::Row(_) => Ok(found),
        }
    }

    pub(super) fn find_here(
        &mut self,
        key: Key,
        remote: &RemoteRelation,
        values: &RowValues,
        how: (Purpose, bool),
    ) -> Result<Found, PgError> {
        // What a transaction has added to a table without a key, and takes out again, nobody else has seen.
        let mut prefers_own = self.may_have_added(key, values);
        let Self {
            targets,
            known_versions,
            origins,
            attempt,
            ..
        } = self;
        let attempt = attempt.get_or_insert_default();
        let Some(Target {
            plan,
            table: Some(table),
            ..
        }) = targets.get_mut(&key)
        else {
            return Err(PgError::new("XX000", "table is not open"));
        };
        let mut versions = RowVersions {
            plan,
            known: known_versions,
            written: &attempt.written,
            origins,
            current: attempt.current.as_ref(),
        };
        if let Some(index) = &plan.key
            && table.has_key()
        {
            return table.find(values, index, how, &mut |xid, slot, stamp| {
                versions.of(xid, slot, stamp)
            });
        }
        if remote.identity == braid_gir::ReplicaIdentity::Full {
            // Rows that are newer than the change, and were put there by others.
            let mut passed_over = Vec::new();
            let mut older = None;
            loop {
                let found = table.find_by_scan(values, &passed_over)?;
                let Found::Row(stamp) = found else {
                    let Some(place) = older.take() else {
                        return Ok(found);
                    };
                    // It is locked, and so still there.
                    prefers_own = false;
                    passed_over.retain(|passed| *passed != place);
                    continue;
                };
                let slot = table.local_slot();
                // SAFETY: the slot holds the row that was found.
                let xid = unsafe { writer(slot) };
                let stamp = versions.of(xid, slot, stamp)?;
                if plan.key.is_some() || versions.takes(stamp) {
                    if !prefers_own || matches!(stamp, Stamp::Own | Stamp::OwnMerged(..)) {
                        return Ok(Found::Row(stamp));
                    }
                    older.get_or_insert(table.found_at());
                }
                passed_over.push(table.found_at());
            }
        }
        Err(PgError::new(
            "55000",
            format!(
                "table \"{}\" has no unique index here on the provider's replica identity",
                remote.qualified_name()
            ),
        )
        .with_hint("Create the primary key or unique index that the provider's table has."))
    }

    /// Begin to look for a row. A row that must be locked is locked at once, unless another node
    /// may be asked about it first: nobody is to wait for a row meanwhile.
    fn search(&self, key: Key, may_ask: bool) -> Search {
        let must_lock = self.needs_lock(key);
        Search {
            must_lock,
            lock: must_lock && !may_ask,
        }
    }

    /// Find the row that is sought, and decide.
    fn find_and_decide(
        &mut self,
        context: RowContext<'_>,
        sought: Sought<'_>,
        lock: bool,
        decide: impl Fn(Local<'_>, Version<'_>, bool) -> Decision,
    ) -> Result<(Found, Decision), PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let found = self.find(key, remote, sought.values, (sought.purpose, lock))?;
        let decision = self.decide(context, found, decide)?;
        let seen = sought
            .seen
            .filter(|(kind, _)| !current.is_displacement_notice && self.is_asked(key, *kind));
        let decision = match seen {
            Some(seen) => self.compare_with_seen(key, current, found, decision, seen)?,
            None => decision,
        };
        Ok((found, decision))
    }

    /// Whether the row that was found has to be locked, and decided about once more, before the
    /// decision is carried out: there is a conflict to record, or its version may change.
    fn must_lock_first(
        &mut self,
        key: Key,
        search: &mut Search,
        found: Found,
        decision: Decision,
    ) -> Result<bool, PgError> {
        let lockable = search.must_lock
            || decision.conflict.is_some()
            || self.may_lose(key, found, decision)?;
        if search.lock || !lockable || !matches!(found, Found::Row(_)) {
            return Ok(false);
        }
        search.lock = true;
        Ok(true)
    }

    /// What the versions say of a change that meets what was found, and then the rules for the table.
    pub(super) fn decide(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decide: impl Fn(Local<'_>, Version<'_>, bool) -> Decision,
    ) -> Result<Decision, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let rules = self.target(key)?.plan.rules;
        if current.unsettled && self.may_yet_be_older(current, found) {
            return Err(self.wait_for_commit(
                "It meets a row that was written after it had been prepared: which is newer its commit will say.",
            ));
        }
        let local = self.local(found);
        let decision = decide(local, context.version(), current.from_origin);
        if current.runs && decision.conflict.is_some() {
            return Err(self.wait_for_commit("It meets a conflict."));
        }
        if current.is_displacement_notice {
            return Ok(match found {
                // It is gone here too: nothing to speak of.
                Found::Missing(_) => Decision {
                    conflict: None,
                    ..decision
                },
                Found::Row(_) => Decision {
                    reason: if decision.action == Action::Apply {
                        "another row has its values under a unique key, and is newer"
                    } else {
                        decision.reason
                    },
                    ..decision
                },
            });
        }
        rules
            .resolve(decision, local, context.version())
            .map_err(|kind| refused(kind, remote))
    }

    /// Whether what is here may turn out to be newer than the transaction in hand, whose commit will be later than its PREPARE, or older.
    pub(super) fn may_yet_be_older(&mut self, current: &Current, found: Found) -> bool {
        let (Found::Missing(Some(stamp)) | Found::Row(stamp)) = found else {
            return false;
        };
        match stamp {
            Stamp::Own | Stamp::Unversioned | Stamp::OwnMerged(..) => false,
            Stamp::Known(timestamp, origin) => {
                timestamp >= current.timestamp
                    && !(current.from_origin && self.origins.node(origin) == &*current.origin)
            }
            Stamp::Merged(timestamp, _) => timestamp >= current.timestamp,
        }
    }

    pub(super) fn local<'a>(&'a mut self, found: Found) -> Local<'a> {
        match found {
            Found::Missing(None) => Local::Missing,
            // One of this transaction's own is not remembered.
            Found::Missing(Some(Stamp::OwnMerged(..))) => Local::Missing,
            Found::Missing(Some(
                Stamp::Known(timestamp, origin) | Stamp::Merged(timestamp, origin),
            )) => Local::Deleted(Version {
                timestamp,
                origin: self.origins.node(origin),
            }),
            // Deleted by this transaction itself, or by one that nobody remembers.
            Found::Missing(Some(Stamp::Own | Stamp::Unversioned)) => Local::Missing,
            Found::Row(Stamp::Own) => Local::Own,
            Found::Row(Stamp::Unversioned) => Local::Unversioned,
            Found::Row(Stamp::Known(timestamp, origin)) => Local::Present(Version {
                timestamp,
                origin: self.origins.node(origin),
            }),
            Found::Row(Stamp::Merged(timestamp, origin)) => Local::Merged(Version {
                timestamp,
                origin: self.origins.node(origin),
            }),
            Found::Row(Stamp::OwnMerged(timestamp, origin)) => Local::OwnMerged(Version {
                timestamp,
                origin: self.origins.node(origin),
            }),
        }
    }

    pub(super) fn insert(
        &mut self,
        context: RowContext<'_>,
        after: &RowValues,
    ) -> Result<(), PgError> {
        let RowContext { key, current, .. } = context;
        if self.target(key)?.plan.key.is_none() {
            if let Some(met) = self.removal_of(context, after)? {
                let (found, decision) = (met.found(), met.decision);
                self.stay_away(key, current, met)?;
                let incoming = Incoming::inserted(after);
                return self
                    .write_row(context, found, decision, incoming)
                    .map(|_| ());
            }
            // Else nothing but a truncate may have taken it.
            let found = self.recall(key, after, None, true)?;
            let mut decision = self.decide(context, found, decide_insert)?;
            if decision.action == Action::Ask {
                let local = self.local(found);
                decision = decide_insert(local, context.version(), current.from_origin);
            }
            let incoming = Incoming::inserted(after);
            return self
                .write_row(context, found, decision, incoming)
                .map(|_| ());
        }
        let sought = Sought::new(after, Purpose::Insert, None);
        let mut search = self.search(key, false);
        loop {
            let (found, decision) =
                self.find_and_decide(context, sought, search.lock, decide_insert)?;
            if self.must_lock_first(key, &mut search, found, decision)? {
                continue;
            }
            let incoming = Incoming::inserted(after);
            if self.write_row(context, found, decision, incoming)? == Written::Done {
                return self.settle_late(context, found, decision, (after, after));
            }
            search.lock = true;
        }
    }

    /// Write what comes over what was found, or into the gap, as decided; record the conflict.
    fn write_row(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        incoming: Incoming<'_>,
    ) -> Result<Written, PgError> {
        let RowContext { key, current, .. } = context;
        let after = incoming.after;
        let exists = matches!(found, Found::Row(_));
        {
            let (plan, table) = self.opened(key)?;
            if exists {
                table.prepare_update(after);
            } else {
                table.prepare_insert(plan, after);
            }
        }
        if let (Action::Ask, Some(kind)) = (decision.action, decision.conflict) {
            let rows = self.rows(key, exists, Some(after))?;
            let input = ConflictInput {
                found,
                kind,
                rows,
                before: incoming.before,
                in_the_way: false,
                others: &[],
            };
            return self.settle_by_function(context, input);
        }
        let merged = self.merge_columns(key, current, found, decision, incoming)?;
        if decision.conflict.is_some() {
            let rows = self.rows(key, exists, Some(after))?;
            let words = merged.as_ref().map_or("", |merged| &merged.words);
            self.record_in_words(context, found, decision, (rows, words))?;
        }
        if decision.action == Action::Keep {
            let Some(merged) = merged else {
                return Ok(Written::Done);
            };
            let written = self.write_merged(key, found, &merged)?;
            if written == Written::Done {
                let row = incoming.before.unwrap_or(after);
                self.remember_columns(key, current, &merged, row)?;
            }
            return Ok(written);
        }
        if let Some(merged) = &merged {
            let values = Self::with_merged(after, merged);
            let (plan, table) = self.opened(key)?;
            if exists {
                table.prepare_update(&values);
            } else {
                table.prepare_insert(plan, &values);
            }
        }
        let written = self.write_new(context, found)?;
        if written == Written::Done {
            self.check_not_removed(key, current, after)?;
            self.note_added(key, after);
            if let Some(merged) = &merged {
                self.remember_columns(key, current, merged, after)?;
            }
        }
        Ok(written)
    }

    /// Write the row in the new slot over what was found, or into the gap.
    pub(super) fn write_new(
        &mut self,
        context: RowContext<'_>,
        found: Found,
    ) -> Result<Written, PgError> {
        let RowContext { key, current, .. } = context;
        let exists = matches!(found, Found::Row(_));
        if self.hints.check_other_keys {
            match self.make_way(context, found)? {
                Way::Clear => {}
                Way::Leave if exists => {
                    if self.open(key)?.delete()? == Written::Changed {
                        return Ok(Written::Changed);
                    }
                    self.note_gone(key, current);
                    self.remember_deletion(key, current.timestamp, OpenTable::local_slot)?;
                    self.remember_taken(key, current, found)?;
                    self.count(key, |counts| counts.deletes += 1);
                    return Ok(Written::Done);
                }
                Way::Leave | Way::Stay => return Ok(Written::Done),
            }
        }
        let table = self.open(key)?;
        if exists {
            if table.update()? == Written::Changed {
                return Ok(Written::Changed);
            }
            self.remember_taken(key, current, found)?;
            self.count(key, |counts| counts.updates += 1);
        } else {
            table.insert();
            let slot = table.new_slot();
            if !self.is_over_newer(found, current) {
                self.check_not_deleted(key, current, slot)?;
            }
            self.count(key, |counts| counts.inserts += 1);
        }
        self.let_in(key);
        self.note_version(key, current, OpenTable::new_slot);
        Ok(Written::Done)
    }

    /// Whether a rule has a row come although its deletion is newer.
    fn is_over_newer(&mut self, found: Found, current: &Current) -> bool {
        matches!(self.local(found), Local::Deleted(deleted) if deleted >= version(current))
    }

    /// Remember the version of the row in a slot, which was just written or deleted, if this is a batch.
    pub(super) fn note_version(
        &mut self,
        key: Key,
        current: &Current,
        slot: impl Fn(&OpenTable) -> *mut pg_sys::TupleTableSlot,
    ) {
        let Self {
            targets, attempt, ..
        } = self;
        let versions = &mut attempt.get_or_insert_default().written;
        if !versions.is_making() && !versions.has_merged() {
            return;
        }
        if let Some(Target {
            plan,
            table: Some(table),
            ..
        }) = targets.get(&key)
        {
            // SAFETY: the slot holds the row.
            let hash = unsafe { key_hash(plan, slot(table)) };
            versions.note(hash, current.timestamp);
            if plan.key.is_none() && registry::remembers_deletions() {
                versions.note_alike(hash, current.timestamp);
            }
        }
    }

    /// The same of the row in the local slot, which was just deleted. Where rows have no key, nobody asks for the version of one that is gone.
    pub(super) fn note_gone(&mut self, key: Key, current: &Current) {
        let has_key = |target: &Target| target.plan.key.is_some();
        if self.targets.get(&key).is_some_and(has_key) {
            self.note_version(key, current, OpenTable::local_slot);
        }
    }

    /// A table that is open, and what is known of it.
    pub(super) fn opened(
        &mut self,
        key: Key,
    ) -> Result<(&mut LocalRelation, &mut OpenTable), PgError> {
        let target = self.target(key)?;
        match &mut target.table {
            Some(table) => Ok((&mut target.plan, table)),
            None => Err(PgError::new("XX000", "table is not open")),
        }
    }

    pub(super) fn open(&mut self, key: Key) -> Result<&mut OpenTable, PgError> {
        self.opened(key).map(|(_, table)| table)
    }

    /// Apply an update of one row: find it, decide, and carry that out; anew as long as it changes meanwhile.
    fn update(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
        after: &RowValues,
        moved: bool,
    ) -> Result<(), PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let before = (remote.identity == braid_gir::ReplicaIdentity::Full
            && !std::ptr::eq(old, after))
        .then_some(old);
        self.check_before(key, remote, before)?;
        let filled = before.and_then(|before| self.filled(key, after, before));
        let after = filled.as_ref().unwrap_or(after);
        let room = self.room(context, (old, after), moved)?;
        if room == Room::Taken {
            // The row under the new key is newer: this row only leaves its old key.
            return self.delete(context, old);
        }
        let gone = moved.then(|| self.key_hashes(key, old)).flatten();
        let mut update = Update {
            old,
            after,
            before,
            moved,
            room,
            incomplete: self.has_gaps(key, after),
            answer: None,
            left: gone.filter(|gone| self.leaves(key, *gone, after)),
        };
        let seen = before.map(|before| (Kind::UpdateOriginDiffers, before));
        let sought = Sought::new(old, Purpose::Change, seen);
        let mut search = self.search(key, update.may_ask());
        loop {
            let (found, decision) =
                self.find_and_decide(context, sought, search.lock, decide_update)?;
            if self.ask_for_gaps(context, &mut update, found, decision)? {
                // An answer may take long. A row that was not here may have come since, and may be
                // gone again.
                continue;
            }
            if self.must_lock_first(key, &mut search, found, decision)? {
                continue;
            }
            if self.carry_out_update(context, &mut update, found, decision)? == Written::Done {
                break;
            }
            search.lock = true;
        }
        gone.map_or(Ok(()), |gone| {
            self.remember_left(key, current, gone, update.left)
        })
    }

    /// Ask another node for large values that an update leaves as they were, if the update is to be
    /// written and the row here may have others. Whether the node was asked.
    fn ask_for_gaps(
        &mut self,
        context: RowContext<'_>,
        update: &mut Update<'_>,
        found: Found,
        decision: Decision,
    ) -> Result<bool, PgError> {
        let is_wanted = update.may_ask()
            && update.answer.is_none()
            && (writes(decision) || update.moved)
            && !self.knows_rest(found, context.current);
        if is_wanted {
            let wanted = Wanted {
                row: update.after,
                before: (context.key, update.old),
                moved: update.moved,
            };
            update.answer = Some(self.fetch_gaps(context, wanted)?);
        }
        Ok(is_wanted)
    }

    /// Do what was decided about an update.
    fn carry_out_update(
        &mut self,
        context: RowContext<'_>,
        update: &mut Update<'_>,
        mut found: Found,
        mut decision: Decision,
    ) -> Result<Written, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let (old, after) = (update.old, update.after);
        let missing = matches!(found, Found::Missing(_));
        // Nobody waits for a row that is not here. Another stream may be about to insert an older state of it under the key that it leaves.
        if missing && update.left.take().is_some() {
            if self.has_come(key, remote, current.timestamp, old)? {
                return Ok(Written::Changed);
            }
            self.pass_on_deletion(key, current, found, old)?;
        }
        let writes = writes(decision);
        if missing && writes && self.is_keyless(key) {
            match self.leave_keyless(context, (old, after))? {
                ControlFlow::Break(written) => return Ok(written),
                ControlFlow::Continue(Some(served)) => (found, decision) = served,
                ControlFlow::Continue(None) => {}
            }
        }
        let foreign = update.incomplete && !self.knows_rest(found, current);
        let whole = (foreign && (writes || update.moved))
            .then(|| update.whole())
            .flatten();
        let row = whole.as_ref().unwrap_or(after);
        let incomplete = self.has_gaps(key, row);
        if missing && writes && incomplete {
            decision.action = Action::Keep;
            decision.reason =
                "the row is not here, and the change does not carry its unchanged large values";
        }
        let incoming = Incoming {
            after: row,
            before: update.before,
            is_insert: false,
        };
        let written = self.write_row(context, found, decision, incoming)?;
        if written == Written::Changed {
            return Ok(written);
        }
        if decision.action == Action::Apply
            && foreign
            && matches!(update.answer, Some(Fetched::Gone))
        {
            self.mark_unverified(key, (current.timestamp, session_origin()))?;
        }
        if decision.action != Action::Keep {
            return Ok(written);
        }
        if !update.moved {
            self.settle_late(context, found, decision, (after, old))?;
        }
        if update.room != Room::Free || incomplete || !self.newest_wins(key, decision)? {
            return Ok(written);
        }
        self.write_under_new_key(context, incoming)
    }

    /// The old row of an update is not in a table without a key. What to go on with where another row is gone for it; or what has become of the update.
    fn leave_keyless(
        &mut self,
        context: RowContext<'_>,
        (old, after): (&RowValues, &RowValues),
    ) -> Result<ControlFlow<Written, Option<(Found, Decision)>>, PgError> {
        let RowContext { key, current, .. } = context;
        let served = match self.remove_without_row(context, old)? {
            Without::Changed => return Ok(ControlFlow::Break(Written::Changed)),
            // As if it had been found.
            Without::Served => Some((Found::Missing(None), NO_CONFLICT)),
            Without::Remembered => None,
        };
        // What is without a row now may be newer than this, and the new row identical.
        match self.removal_of(context, after)? {
            Some(met) => {
                self.stay_away(key, current, met)?;
                Ok(ControlFlow::Break(Written::Done))
            }
            None => Ok(ControlFlow::Continue(served)),
        }
    }

    /// What is under the new key of a row that gets another one; where rows have no key, whether the new row was taken out before it came.
    fn room(
        &mut self,
        context: RowContext<'_>,
        (old, after): (&RowValues, &RowValues),
        moved: bool,
    ) -> Result<Room, PgError> {
        let RowContext { key, current, .. } = context;
        if moved {
            return self.make_room(context, old, after);
        }
        if !self.is_keyless(context.key) {
            return Ok(Room::Own);
        }
        let Some(met) = self.removal_of(context, after)? else {
            return Ok(Room::Own);
        };
        self.stay_away(key, current, met)?;
        Ok(Room::Taken)
    }

    /// Something newer has happened under the row's old key, which says nothing about the new one.
    fn write_under_new_key(
        &mut self,
        context: RowContext<'_>,
        incoming: Incoming<'_>,
    ) -> Result<Written, PgError> {
        let nothing = Found::Missing(None);
        let incoming = Incoming {
            is_insert: true,
            ..incoming
        };
        self.write_row(context, nothing, NO_CONFLICT, incoming)
    }

    /// Whether a row with the key of these hashes has another with these values. Another form of the same key is no other.
    fn leaves(&self, key: Key, gone: KeyHashes, after: &RowValues) -> bool {
        self.key_hashes(key, after)
            .is_none_or(|here| here.equal != gone.equal)
    }

    /// The row that had the key of these hashes was given another form of it, or another, `left`. Nor may an older change bring it back under the
    /// one that it has left, or the time of a whole batch keep out a newer one.
    fn remember_left(
        &mut self,
        key: Key,
        current: &Current,
        gone: KeyHashes,
        left: Option<KeyHashes>,
    ) -> Result<(), PgError> {
        if let Some(left) = left.filter(|_| self.remembers(key)) {
            self.record_tombstones(key, left, (current.timestamp, session_origin()))?;
        }
        self.attempt()
            .written
            .note_gone(gone.stored, current.timestamp);
        Ok(())
    }

    /// Whether versions have decided, and no other rule.
    fn newest_wins(&mut self, key: Key, decision: Decision) -> Result<bool, PgError> {
        let Some(kind) = decision.conflict else {
            return Ok(true);
        };
        let resolution = self.target(key)?.plan.rules.of(kind);
        Ok(resolution == Resolution::LastUpdateWins)
    }

    /// `after` with what a function, or a sum, would miss in it: large values that were left unchanged, which the whole old row has.
    /// `None` when nobody asks for them.
    fn filled(&self, key: Key, after: &RowValues, before: &RowValues) -> Option<RowValues> {
        let plan = &self.targets.get(&key)?.plan;
        if !(plan.rules.asks() || plan.column_rules.any()) || !self.has_gaps(key, after) {
            return None;
        }
        Some(filled_from(after, before))
    }

    /// Where the row that was found last is.
    fn found_at(&self, key: Key) -> Option<Place> {
        let target = self.targets.get(&key)?;
        target.table.as_ref().map(OpenTable::found_at)
    }

    /// Whether a column that the stream has is not available in `values`.
    pub(super) fn has_gaps(&self, key: Key, values: &RowValues) -> bool {
        self.targets.get(&key).is_some_and(|target| {
            target
                .plan
                .columns
                .iter()
                .any(|column| values.get(column.local).is_some_and(Option::is_none))
        })
    }

    /// Remove what stands under a row's new key, unless it is newer.
    fn make_room(
        &mut self,
        context: RowContext<'_>,
        old: &RowValues,
        after: &RowValues,
    ) -> Result<Room, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let own = match self.find(key, remote, old, (Purpose::Change, true))? {
            Found::Row(_) => Some(self.found_at(key)),
            Found::Missing(_) => None,
        };
        let found = self.find(key, remote, after, (Purpose::Change, true))?;
        if matches!(found, Found::Row(_)) && own == Some(self.found_at(key)) {
            // The keys differ in their bytes only (1.0 and 1.00): a row is not in its own way.
            return Ok(Room::Own);
        }
        let decision = self.decide(context, found, decide_new_key)?;
        let exists = matches!(found, Found::Row(_));
        if let (Action::Ask, Some(kind)) = (decision.action, decision.conflict) {
            // What it gives is written over the row that is there; what was to come only leaves its old key.
            self.ask_about_new_key(context, found, kind, after)?;
            return Ok(Room::Taken);
        }
        if decision.conflict.is_some() {
            if let Some(table) = self.target(key)?.table.as_mut()
                && exists
            {
                table.prepare_update(after);
            }
            let rows = self.rows(key, exists, exists.then_some(after))?;
            self.record(context, found, decision, rows)?;
        }
        if decision.action == Action::Keep {
            self.settle_late(context, found, decision, (after, after))?;
            return Ok(Room::Taken);
        }
        if exists {
            // Locked since it was found, so it has not changed.
            self.open(key)?.delete()?;
            self.note_version(key, current, OpenTable::local_slot);
            self.count(key, |counts| counts.deletes += 1);
        }
        Ok(Room::Free)
    }

    fn delete(&mut self, context: RowContext<'_>, before: &RowValues) -> Result<(), PgError> {
        let RowContext { key, remote, .. } = context;
        let whole = remote.identity == braid_gir::ReplicaIdentity::Full;
        let seen = whole.then_some((Kind::DeleteOriginDiffers, before));
        let sought = Sought::new(before, Purpose::Delete, seen);
        let mut search = self.search(key, false);
        loop {
            let (found, decision) =
                self.find_and_decide(context, sought, search.lock, decide_delete)?;
            if self.must_lock_first(key, &mut search, found, decision)? {
                continue;
            }
            if self.delete_row(context, found, decision, before)? == Written::Done {
                return Ok(());
            }
            search.lock = true;
        }
    }

    /// Delete what was found, as decided; record the conflict.
    fn delete_row(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        before: &RowValues,
    ) -> Result<Written, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let exists = matches!(found, Found::Row(_));
        if !exists {
            if self.has_come(key, remote, current.timestamp, before)? {
                return Ok(Written::Changed);
            }
            match self.remove_without_row(context, before)? {
                Without::Changed => return Ok(Written::Changed),
                // As if it had been found.
                Without::Served => return Ok(Written::Done),
                Without::Remembered => {}
            }
            self.pass_on_deletion(key, current, found, before)?;
        }
        if let (Action::Ask, Some(kind)) = (decision.action, decision.conflict) {
            let rows = self.rows(key, exists, None)?;
            let whole = remote.identity == braid_gir::ReplicaIdentity::Full;
            let input = ConflictInput {
                found,
                kind,
                rows,
                before: whole.then_some(before),
                in_the_way: false,
                others: &[],
            };
            return self.settle_by_function(context, input);
        }
        if decision.conflict.is_some() {
            if !exists
                && let Target {
                    plan,
                    table: Some(table),
                    ..
                } = self.target(key)?
            {
                // Shows at least the key of what was to be deleted.
                table.prepare_insert(plan, before);
            }
            let rows = self.rows(key, exists, (!exists).then_some(before))?;
            self.record(context, found, decision, rows)?;
        }
        if decision.action == Action::Apply && exists {
            if self.open(key)?.delete()? == Written::Changed {
                return Ok(Written::Changed);
            }
            self.note_gone(key, current);
            self.remember_deletion(key, current.timestamp, OpenTable::local_slot)?;
            self.remember_taken(key, current, found)?;
            self.count(key, |counts| counts.deletes += 1);
        }
        Ok(Written::Done)
    }

    /// The row that was found, and the one that is to be written, if they are there.
    pub(super) fn rows<'a>(
        &mut self,
        key: Key,
        local: bool,
        given: Option<&'a RowValues>,
    ) -> Result<Rows<'a>, PgError> {
        let table = self.open(key)?;
        Ok(Rows {
            local: local.then(|| table.local_slot()),
            remote: given.map(|_| table.new_slot()),
            given,
            index: None,
        })
    }

    /// Count a conflict, and record it with its rows if that is wanted.
    pub(super) fn record(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        rows: Rows<'_>,
    ) -> Result<(), PgError> {
        self.record_in_words(context, found, decision, (rows, ""))
    }

    /// The same, with more words on why.
    fn record_in_words(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decision: Decision,
        (rows, words): (Rows<'_>, &str),
    ) -> Result<(), PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        if decision.conflict == Some(Kind::UpdateDeleted)
            && rows.remote.is_some()
            && self.is_displaced(key, current)
        {
            // Recorded when it was displaced.
            return Ok(());
        }
        self.count(key, |counts| counts.conflicts += 1);
        let resolution = match decision.conflict {
            Some(kind) => self.target(key)?.plan.rules.of(kind),
            None => return Ok(()),
        };
        let oid = self.target(key)?.plan.oid;
        self.attempt().tally.add(oid, decision, resolution);
        let history = settings::conflict_history();
        if history == ConflictHistory::Off {
            return Ok(());
        }
        let concurrent = self.is_concurrent(key, current, found, decision)?;
        if history == ConflictHistory::On && concurrent == Some(false) {
            return Ok(());
        }
        let stamp = match found {
            Found::Row(stamp) | Found::Missing(Some(stamp)) => stamp.known(),
            Found::Missing(None) => None,
        };
        let local =
            stamp.map(|(timestamp, origin)| (timestamp, self.origins.node(origin).to_owned()));
        self.work_as_self();
        let entry = history::Entry {
            subscription: &self.identity.subscription,
            decision,
            words,
            resolution,
            local,
            remote: (current.timestamp, &current.origin),
            xid: current.xid,
            lsn: current.commit_lsn,
            concurrent,
            index: rows.index,
        };
        if let Some(Target {
            plan,
            table: Some(table),
            ..
        }) = self.targets.get(&key)
        {
            history::record(&entry, remote, plan, table, rows)?;
        }
        self.work_as_owner_of(key);
        // SAFETY: SPI leaves the context that it was called in as the current one; to be sure.
        unsafe { pg_sys::MemoryContextSwitchTo(self.change_context) };
        Ok(())
    }
}

impl Session {
    /// Whether the change in hand and what was found are concurrent; `None` where that is not known.
    fn is_concurrent(
        &mut self,
        key: Key,
        current: &Current,
        found: Found,
        decision: Decision,
    ) -> Result<Option<bool>, PgError> {
        let Some(kind) = decision
            .conflict
            .filter(|_| !current.is_displacement_notice)
        else {
            return Ok(None);
        };
        let by_versions = self.target(key)?.plan.rules.go_by_versions();
        let replaced = self.attempt().replaced.take();
        let writer = Writer {
            version: version(current),
            replaced: replaced.as_ref().map(|(timestamp, origin)| Version {
                timestamp: *timestamp,
                origin,
            }),
            by_versions,
        };
        let concurrent = concurrent(kind, self.local(found), writer);
        self.attempt().replaced = replaced;
        Ok(concurrent)
    }
}

/// The rule for this kind of conflict is `error`.
pub(super) fn refused(kind: Kind, remote: &RemoteRelation) -> PgError {
    PgError::new(
        "23000",
        format!(
            "conflict {} in table \"{}\"",
            kind.name(),
            remote.qualified_name()
        ),
    )
    .with_detail("The rule for conflicts of this kind is error.")
    .with_hint(
        "Change one of the rows, or the rule with braid.set_conflict_resolution, and run braid.enable_subscription; or leave this \
         transaction out with braid.skip_transaction.",
    )
}

/// A row, and what it lacks from the whole old one.
fn filled_from(after: &RowValues, before: &RowValues) -> RowValues {
    let filled = after.iter().zip(before);
    filled.map(|(new, old)| new.or(*old)).collect()
}

pub(super) fn version(current: &Current) -> Version<'_> {
    Version {
        timestamp: current.timestamp,
        origin: &current.origin,
    }
}

/// Whether the columns of the key by which rows are found differ between the images.
fn key_differs(change: &Change<'_>, key: &super::relation::Key) -> Result<bool, PgError> {
    let (Some(before), Some(after)) = (&change.before, &change.after) else {
        return Ok(false);
    };
    for (index, (old, new)) in before.values().zip(after.values()).enumerate() {
        let (old, new) = (old?, new?);
        let in_key = key.columns.iter().any(|column| column.remote == index);
        if in_key && new != Value::None && old != new {
            return Ok(true);
        }
    }
    Ok(false)
}
