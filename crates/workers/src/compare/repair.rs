//! Mending what a comparison has found: each row as an applier would write it, under the origin and
//! the version that it has at the provider. Run by the session that calls `braid.repair`, which
//! commits after each step.
//!
//! A step repairs rows of one version, as a commit has one origin and one timestamp. The provider
//! is asked first. Then each local row is locked, and must still be as it was compared.
//! Transactions that the provider commits afterwards arrive later by the subscription.

use std::cell::RefCell;

use braid_apply::{KeyHashes, OriginNames, Versions, key_hashes_at, table_hash};
use braid_bgworker::compare::{Key, Repair, Side, Sight, as_version, repair};
use braid_bgworker::sqlstate::SqlState;
use braid_node::origin;
use braid_node::subscription::Subscription;
use braid_node::tombstone::{self, Seen};
use braid_postgres::catalog::{query, with_settings};
use braid_postgres::error::PgError;
use braid_postgres::libpq::Connection;
use braid_postgres::rows::Rows;
use braid_postgres::subtransaction;
use pgrx::pg_sys;

use super::explained;
use super::table::{At, Row, SETTINGS, Table, read_place};
use crate::ingest::stamp;

/// Rows of a step.
const STEP_ROWS: usize = 50;
/// Stands for repairs among the sources that have origins: no source of `braid.ingest` can have a
/// slash in its name.
const SOURCE: &str = "braid/repair";

const KEPT_BY_TRIGGER: &str = "a trigger of the table kept it";
const DELETED: &str = "deleted here later: to be repaired at the provider";

/// A request to repair a table.
#[derive(Debug)]
pub struct Repairing {
    /// The subscription from whose provider rows are taken.
    pub subscription: Subscription,
    /// The local table's OID.
    pub relation: u32,
    /// This node.
    pub local_node: String,
    /// The side that is right.
    pub side: Side,
    /// Only differences of rows with these keys: a jsonb array of objects.
    pub keys: Option<String>,
    /// Only report what would be done.
    pub dry_run: bool,
}

/// A difference that is to be mended.
#[derive(Debug, Clone)]
struct Difference {
    id: String,
    key: Key,
    here: Option<String>,
    there: Option<String>,
}

/// Differences whose rows at the provider have one version.
#[derive(Debug, Clone)]
struct Group {
    /// `None`: not known. Of rows that the provider does not have, the provider and its time.
    version: Option<(i64, String)>,
    is_deletion: bool,
    rows: Vec<Difference>,
}

#[derive(Debug)]
struct State {
    id: i64,
    request: Repairing,
    connection: Connection,
    table: Table,
    groups: Vec<Group>,
    next: usize,
}

thread_local! {
    /// The repair of the running CALL. It stays if a step fails, as the next step may go on.
    static REPAIR: RefCell<Option<State>> = const { RefCell::new(None) };
}

fn not_in_hand(id: i64) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("repair {id} is not running in this session"),
    )
    .with_hint("Run it with call braid.repair(subscription_name, relation).")
}

/// Begins to repair. Returns the repair's number.
///
/// # Errors
/// 55000 if the table was not compared; those of `Table::find`.
pub fn start_repair(request: Repairing, mut connection: Connection) -> Result<i64, PgError> {
    REPAIR.take();
    let relation = request.relation.to_string();
    let found = query(
        "select c.comparison_id, nextval('braid.repair_number') from braid.comparison c \
          where c.subscription_name = $1::name and c.relation = $2::oid order by c.comparison_id desc limit 1",
        &[Some(&request.subscription.name), Some(&relation)],
    );
    let (Some(comparison), Some(id)) = (
        found.get(0, 0).map(str::to_owned),
        found.get(0, 1).and_then(|id| id.parse().ok()),
    ) else {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "the table was not compared",
        )
        .with_hint("Run call braid.compare(subscription_name, relation) first."));
    };
    let table = with_settings(&SETTINGS, || {
        Table::find(&request.subscription, request.relation, &mut connection)
    })?;
    let groups = groups(&table, &comparison, request.keys.as_deref());
    REPAIR.set(Some(State {
        id,
        request,
        connection,
        table,
        groups,
        next: 0,
    }));
    Ok(id)
}

/// The differences that are to be repaired, grouped by version.
fn groups(table: &Table, comparison: &str, keys: Option<&str>) -> Vec<Group> {
    let columns: Vec<String> = (1..=table.key.len())
        .map(|place| format!("d.key_values[{place}]"))
        .collect();
    let rows = query(
        &format!(
            "select d.difference_id, d.local_state, d.provider_state, \
                    (extract(epoch from d.provider_timestamp) * 1000000)::bigint, d.provider_origin, {} \
               from braid.difference d \
              where d.comparison_id = $1::bigint and d.repaired_by is null \
                and ($2 is null or exists (select from jsonb_array_elements(case jsonb_typeof($2::jsonb) when 'array' then $2::jsonb \
                    else jsonb_build_array($2::jsonb) end) k \
                    where jsonb_typeof(k.value) = 'object' and not exists (select from jsonb_each(case jsonb_typeof(k.value) when 'object' then k.value end) e \
                          where d.key -> e.key is distinct from e.value))) \
              order by d.provider_state is null, d.provider_origin, d.provider_timestamp, d.difference_id",
            columns.join(", ")
        ),
        &[Some(comparison), keys],
    );
    let mut groups: Vec<Group> = Vec::new();
    for row in rows.iter() {
        let text = |index: usize| row.get(index).cloned().flatten();
        let version = text(3).and_then(|text| text.parse().ok()).zip(text(4));
        let difference = Difference {
            id: text(0).unwrap_or_default(),
            key: row
                .get(5..)
                .unwrap_or_default()
                .iter()
                .map(|value| value.clone().unwrap_or_default())
                .collect(),
            here: text(1),
            there: text(2),
        };
        let is_deletion = difference.there.is_none();
        match groups.last_mut() {
            Some(group)
                if group.version == version
                    && group.is_deletion == is_deletion
                    && group.rows.len() < STEP_ROWS =>
            {
                group.rows.push(difference);
            }
            _ => groups.push(Group {
                version,
                is_deletion,
                rows: vec![difference],
            }),
        }
    }
    groups
}

/// Mend the next rows. True when there are none.
///
/// # Errors
/// 55006 if another session repairs the table; the provider's; those of writing a row.
pub fn repair_step(id: i64) -> Result<bool, PgError> {
    REPAIR.with_borrow_mut(|state| {
        let state = state
            .as_mut()
            .filter(|state| state.id == id)
            .ok_or_else(|| not_in_hand(id))?;
        let at = state.next;
        state.next += 1;
        with_settings(&SETTINGS, || state.mend(at)).map_err(explained)
    })
}

/// Handles a step that was rolled back. Its rows are tried one by one; a row that was alone stays
/// as it is.
///
/// # Errors
/// 55000 when there is no such repair.
pub fn repair_failed(id: i64, reason: &str) -> Result<(), PgError> {
    REPAIR.with_borrow_mut(|state| {
        let state = state
            .as_mut()
            .filter(|state| state.id == id)
            .ok_or_else(|| not_in_hand(id))?;
        let Some(at) = state.next.checked_sub(1) else {
            return Ok(());
        };
        let Some(group) = state.groups.get(at).cloned() else {
            return Ok(());
        };
        if let [difference] = group.rows.as_slice() {
            state.log(difference, "failed", Some(reason))?;
        } else {
            let single = |row: &Difference| Group {
                version: group.version.clone(),
                is_deletion: group.is_deletion,
                rows: vec![row.clone()],
            };
            let singles: Vec<Group> = group.rows.iter().map(single).collect();
            state.groups.splice(at..=at, singles);
            state.next = at;
        }
        Ok(())
    })
}

impl State {
    fn mend(&mut self, at: usize) -> Result<bool, PgError> {
        let Some(group) = self.groups.get(at).cloned() else {
            return Ok(true);
        };
        self.lock_table()?;
        let version = if group.is_deletion {
            // A later change of the key is newer than this.
            Some((
                clock(&mut self.connection)?,
                self.request.subscription.provider.clone(),
            ))
        } else {
            group.version.clone()
        };
        let keys: Vec<&Key> = group.rows.iter().map(|row| &row.key).collect();
        let theirs = self.table.whole(At::There, &keys, &mut self.connection)?;
        if !self.request.dry_run {
            match &version {
                Some((_, node)) => stamp::take(origin::ensure_for_source(SOURCE, node)?)?,
                None => stamp::take_unversioned()?,
            }
        }
        for (difference, there) in group.rows.iter().zip(theirs) {
            let here = if self.request.dry_run {
                let keys = [&difference.key];
                let rows = self.table.whole(At::Here, &keys, &mut self.connection)?;
                rows.into_iter().next().flatten()
            } else {
                self.table.lock(&difference.key)?
            };
            let (action, reason) = self.mend_row(difference, here, there)?;
            self.log(difference, action, reason)?;
        }
        if !self.request.dry_run {
            let newest = version.map_or(0, |(timestamp, _)| timestamp);
            stamp::written(Versions::default(), newest, 0);
        }
        Ok(false)
    }

    /// One repair of a table at a time.
    fn lock_table(&self) -> Result<(), PgError> {
        // 0xb41e: next to that of the copy workers.
        let relation = self.request.relation.to_string();
        let taken = query(
            "select pg_try_advisory_xact_lock(46110, $1::bigint::bit(32)::integer)",
            &[Some(&relation)],
        );
        if taken.get(0, 0) == Some("t") {
            return Ok(());
        }
        Err(PgError::new(
            SqlState::ObjectInUse,
            "the table is being repaired by another session",
        )
        .with_hint("Wait until that is done, compare again and repair what is left."))
    }

    fn mend_row(
        &self,
        difference: &Difference,
        here: Option<Row>,
        there: Option<Row>,
    ) -> Result<(&'static str, Option<&'static str>), PgError> {
        let state = |row: &Option<Row>| row.as_ref().map(|(seen, _)| seen.state());
        if state(&here) != difference.here || state(&there) != difference.there {
            return Ok(("left", Some("written meanwhile: compare again")));
        }
        let seen = |row: &Option<Row>| row.as_ref().map(|(seen, _)| seen.clone());
        let sight = Sight {
            here: seen(&here),
            there: seen(&there),
        };
        let values = |row: Option<Row>| row.map(|(_, values)| values).unwrap_or_default();
        let (here, there) = (values(here), values(there));
        let (action, sql) = match repair(self.request.side, &sight) {
            Repair::Keep(reason) => return Ok(("kept", Some(reason))),
            Repair::Insert => return self.insert(&there, &sight),
            Repair::Delete => ("deleted", Some(self.table.delete_sql(&difference.key))),
            Repair::Update => (
                "updated",
                self.table.update_sql(&difference.key, &here, &there),
            ),
        };
        let Some(sql) = sql.filter(|_| !self.request.dry_run) else {
            return Ok((action, None));
        };
        let rows = self.write(&format!("{sql} returning 1"))?;
        Ok(if rows.is_empty() {
            ("left", Some(KEPT_BY_TRIGGER))
        } else {
            (action, None)
        })
    }

    fn write(&self, sql: &str) -> Result<Rows, PgError> {
        let role = [("session_replication_role", "replica")];
        with_settings(&role, || Ok(self.table.run_here(sql)))
    }

    /// Inserts a row that is missing on this node, unless it was deleted locally later than its
    /// version says. A deletion is identified by the row as it is stored, in whichever partition.
    /// So the row is inserted first and rolled back again if needed, also in a dry run.
    fn insert(
        &self,
        values: &[Option<String>],
        sight: &Sight,
    ) -> Result<(&'static str, Option<&'static str>), PgError> {
        let sql = self.table.insert_sql(values);
        let theirs = sight.there.as_ref().and_then(|row| row.version.as_ref());
        subtransaction::attempt(|| {
            let rows = self.write(&format!("{sql} returning tableoid::oid::text, ctid::text"))?;
            let Some((relation, place)) = rows
                .get(0, 0)
                .and_then(|oid| oid.parse::<u32>().ok())
                .zip(rows.get(0, 1).and_then(read_place))
            else {
                return Ok((("left", Some(KEPT_BY_TRIGGER)), false));
            };
            let deleted = match self.request.side {
                Side::Newest => self.deletion(relation.into(), place)?,
                Side::Provider => None,
            };
            // A row without a version is older than any recorded deletion.
            let is_newer =
                |deleted: &_| theirs.is_none_or(|theirs| as_version(deleted) > as_version(theirs));
            if deleted.as_ref().is_some_and(is_newer) {
                return Ok((("kept", Some(DELETED)), false));
            }
            Ok((("inserted", None), !self.request.dry_run))
        })
    }

    /// The newest deletion that is remembered of the row at this place, or of all rows of its
    /// table.
    fn deletion(
        &self,
        relation: pg_sys::Oid,
        place: pg_sys::ItemPointerData,
    ) -> Result<Option<(i64, String)>, PgError> {
        let row = key_hashes_at(relation, place)?.into_iter();
        let hashes = row
            .flat_map(KeyHashes::each)
            .chain([table_hash(relation.to_u32())]);
        let mut names = OriginNames::new(&self.request.local_node);
        let mut newest = None;
        for hash in hashes {
            let found = tombstone::find(hash, Seen::Committed)?;
            let found = found.map(|(at, origin)| (at, names.node(origin).to_owned()));
            newest = newest.max(found);
        }
        Ok(newest)
    }

    /// Records the repair of a row, with both rows as they were compared.
    fn log(
        &self,
        difference: &Difference,
        action: &str,
        reason: Option<&str>,
    ) -> Result<(), PgError> {
        let id = self.id.to_string();
        let side = match self.request.side {
            Side::Provider => "provider",
            Side::Newest => "newest",
        };
        let relation = self.request.relation.to_string();
        let logged = query(
            "insert into braid.repair_entry (repair_id, done_by, subscription_name, relation, side, dry_run, action, reason, key, kind, \
                    local_row, provider_row, local_timestamp, local_origin, provider_timestamp, provider_origin) \
             select $1::bigint, session_user, $2::name, $3::oid, $4, $5::boolean, $6, $7, d.key, d.kind, \
                    d.local_row, d.provider_row, d.local_timestamp, d.local_origin, d.provider_timestamp, d.provider_origin \
               from braid.difference d where d.difference_id = $8::bigint returning 1",
            &[
                Some(&id),
                Some(&self.request.subscription.name),
                Some(&relation),
                Some(side),
                Some(if self.request.dry_run { "t" } else { "f" }),
                Some(action),
                reason,
                Some(&difference.id),
            ],
        );
        if logged.is_empty() {
            return Err(PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "the table was compared again meanwhile",
            )
            .with_hint("Repair what that comparison has found."));
        }
        if !self.request.dry_run && matches!(action, "inserted" | "updated" | "deleted") {
            query(
                "update braid.difference set repaired_by = $1::bigint where difference_id = $2::bigint",
                &[Some(&id), Some(&difference.id)],
            );
        }
        Ok(())
    }
}

/// The provider's time.
fn clock(connection: &mut Connection) -> Result<i64, PgError> {
    connection
        .query("select (extract(epoch from clock_timestamp()) * 1000000)::bigint")?
        .get(0, 0)
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| {
            PgError::new(
                SqlState::ProtocolViolation,
                "unexpected answer from the provider to a query",
            )
        })
}
