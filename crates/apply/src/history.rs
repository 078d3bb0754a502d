//! Records conflicts in `braid.conflict_record`, and counts them in `braid.conflict_count`, in the
//! transaction that resolves them. Run by the appliers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry as Place;
use std::mem::ManuallyDrop;

use braid_bgworker::conflict::{Action, Decision, Kind};
use braid_bgworker::resolution::Resolution;
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::execute;
use braid_postgres::encoding;
use braid_postgres::error::PgError;
use pgrx::PgOid;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;
use pgrx::spi::OwnedPreparedStatement;

use super::change::Rows;
use super::image::{Image, to_jsonb, with_fixed_settings};
use super::relation::{LocalRelation, RemoteRelation};
use super::table::OpenTable;

/// Data of a conflict besides its rows.
#[derive(Debug)]
pub struct Entry<'a> {
    /// Name of the subscription.
    pub subscription: &'a str,
    /// The decision.
    pub decision: Decision,
    /// Further explanation, appended to the reason of the decision.
    pub words: &'a str,
    /// The rule that was applied.
    pub resolution: Resolution,
    /// Version of the local row: Unix microseconds and node; `None` if there is none.
    pub local: Option<(i64, String)>,
    /// Version of the incoming change.
    pub remote: (i64, &'a str),
    /// Transaction at the provider.
    pub xid: u32,
    /// Position of the transaction at the provider.
    pub lsn: u64,
    /// Whether the change's writer had not seen the local row; `None` if that is not known.
    pub concurrent: Option<bool>,
    /// The index that has the conflict; `None`: the one by which rows are found.
    pub index: Option<pg_sys::Oid>,
}

/// Number of the first argument of each image; the others follow it.
const LOCAL: usize = 18;
const REMOTE: usize = 22;

fn insert() -> String {
    format!(
        "insert into braid.conflict_record (subscription_name, relation, table_name, kind, resolution, winner, reason, \
         key, local_row, remote_row, remote_unknown, local_timestamp, remote_timestamp, local_origin, remote_origin, \
         remote_xid, remote_lsn, concurrent, constraint_name, columns) \
         select $1, $2::oid::regclass, $2::oid::regclass::text, $3, $14, $4, $5, \
         (select jsonb_object_agg(k, coalesce(r.remote -> k, r.local -> k)) from unnest($6::text[]) k), r.local, r.remote, \
         nullif($13::text[], '{{}}'), \
         to_timestamp(($7 / 1000000)::double precision) + ($7 % 1000000) * interval '1 microsecond', \
         to_timestamp(($8 / 1000000)::double precision) + ($8 % 1000000) * interval '1 microsecond', \
         $9, $10, $11::text::xid, '0/0'::pg_lsn + $12::numeric, \
         $15, (select c.relname from pg_catalog.pg_class c where c.oid = $16::oid), \
         case when r.local is not null and r.remote is not null then \
         (select array_agg(u.n::name order by u.o) from unnest($17::text[]) with ordinality u (n, o) \
         where not (r.local ? u.n and r.remote ? u.n) or r.local -> u.n <> r.remote -> u.n) end \
         from (select {} as local, {} as remote) r returning conflict_id",
        to_jsonb(LOCAL),
        to_jsonb(REMOTE)
    )
}

const INSERT_LARGE: &str = "insert into braid.conflict_value (conflict_id, side, column_name, value) \
    select $1, $2, n, v from unnest($3::text[], $4::text[]) u (n, v)";

const INSERT_COUNT: &str = "insert into braid.conflict_count \
    (subscription_name, relation, kind, resolution, winner, conflicts) values ($1, $2::oid::regclass, $3, $4, $5, $6)";

/// Kind of a conflict, for counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Met {
    relation: u32,
    kind: Kind,
    resolution: Resolution,
    winner: &'static str,
}

/// Conflicts of the current transaction, by table and kind. They are added up here and written
/// once, as rows of their own. If appliers raised a common counter, they would wait for each other
/// until the commit. The manager adds the rows up later.
#[derive(Debug, Default)]
pub struct Tally(Vec<(Met, i64)>);

impl Tally {
    /// Counts a conflict.
    pub fn add(&mut self, relation: pg_sys::Oid, decision: Decision, resolution: Resolution) {
        let Some(kind) = decision.conflict else {
            return;
        };
        let met = Met {
            relation: relation.to_u32(),
            kind,
            resolution,
            winner: winner(decision),
        };
        match self.0.iter_mut().find(|(other, _)| *other == met) {
            Some((_, count)) => *count += 1,
            None => self.0.push((met, 1)),
        }
    }

    /// Stores the counts, in the current transaction, with the process's own rights.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn store(&mut self, subscription: &str) -> Result<(), PgError> {
        for (met, count) in self.0.drain(..) {
            execute(
                INSERT_COUNT,
                &[
                    subscription.into(),
                    i64::from(met.relation).into(),
                    met.kind.name().into(),
                    met.resolution.name().into(),
                    met.winner.into(),
                    count.into(),
                ],
            )?;
        }
        Ok(())
    }
}

fn winner(decision: Decision) -> &'static str {
    match decision.action {
        Action::Apply => "remote",
        Action::Keep => "local",
        Action::Merge => "merged",
        Action::Remove | Action::Ask => "none",
    }
}

/// Number of kept plans of the statement that records a conflict: planning costs more than
/// executing it. There is one for each table, because the tables' row types are among the argument
/// types.
const KEPT_PLANS: usize = 256;

thread_local! {
    /// Never dropped: when the process ends, plans can't be freed any more.
    static PLANS: RefCell<ManuallyDrop<HashMap<Vec<pg_sys::Oid>, OwnedPreparedStatement>>> = RefCell::default();
}

/// Records a conflict with its rows.
///
/// # Errors
/// Whatever PostgreSQL raises.
pub fn record(
    entry: &Entry<'_>,
    remote: &RemoteRelation,
    local: &LocalRelation,
    table: &OpenTable,
    rows: &Rows<'_>,
) -> Result<(), PgError> {
    with_fixed_settings(|| write_down(entry, remote, local, table, rows))
}

fn write_down(
    entry: &Entry<'_>,
    remote: &RemoteRelation,
    local: &LocalRelation,
    table: &OpenTable,
    rows: &Rows<'_>,
) -> Result<(), PgError> {
    let Some(kind) = entry.decision.conflict else {
        return Ok(());
    };
    let key_names: Vec<String> = local
        .key
        .iter()
        .flat_map(|key| &key.columns)
        .filter_map(|column| Some(remote.columns.get(column.remote)?.name.clone()))
        .collect();
    // Columns that the change itself does not carry are not part of its row.
    let is_given = |column: usize| {
        rows.given
            .is_none_or(|given| given.get(column).is_some_and(Option::is_some))
    };
    let is_delete = matches!(kind, Kind::DeleteMissing | Kind::DeleteOriginDiffers);
    let unknown: Vec<String> = local
        .columns
        .iter()
        .filter(|column| !is_delete && !is_given(column.local))
        .filter_map(|column| Some(remote.columns.get(column.remote)?.name.clone()))
        .collect();
    let given: Vec<String> = local
        .columns
        .iter()
        .filter(|column| !is_delete && is_given(column.local))
        .filter_map(|column| Some(remote.columns.get(column.remote)?.name.clone()))
        .collect();
    let met = matches!(
        kind,
        Kind::InsertExists | Kind::UpdateExists | Kind::MultipleUniqueConflicts
    );
    let key_index = || Some(local.key.as_ref()?.index);
    let index = entry.index.or_else(key_index).filter(|_| met);
    let row_type = table.relation().row_type();
    let none = || Image::none(row_type);
    let local_row = rows.local.as_ref();
    let local_row = local_row.map_or_else(none, |slot| Image::of_slot(slot, |_| false));
    let remote_row = rows.remote.as_ref().map_or_else(none, |slot| {
        Image::of_slot(slot, |column| !is_given(column))
    });
    let local_version = entry.local.clone();
    let mut arguments = vec![
        DatumWithOid::from(entry.subscription),
        DatumWithOid::from(i64::from(local.oid.to_u32())),
        DatumWithOid::from(kind.name()),
        DatumWithOid::from(winner(entry.decision)),
        encoding::text_argument(&format!("{}{}", entry.decision.reason, entry.words)),
        encoding::texts_argument(&key_names),
        DatumWithOid::from(local_version.as_ref().map(|(timestamp, _)| *timestamp)),
        DatumWithOid::from(entry.remote.0),
        DatumWithOid::from(local_version.map(|(_, origin)| origin)),
        DatumWithOid::from(entry.remote.1),
        DatumWithOid::from(entry.xid.to_string()),
        DatumWithOid::from(i64::try_from(entry.lsn).unwrap_or(i64::MAX)),
        DatumWithOid::from(unknown),
        DatumWithOid::from(entry.resolution.name()),
        DatumWithOid::from(entry.concurrent),
        DatumWithOid::from(index.map(|index| i64::from(index.to_u32()))),
        encoding::texts_argument(&given),
    ];
    arguments.extend(local_row.arguments());
    arguments.extend(remote_row.arguments());
    pgrx::Spi::connect_mut(|client| {
        let types: Vec<pg_sys::Oid> = arguments.iter().map(DatumWithOid::oid).collect();
        let id = PLANS.with_borrow_mut(|plans| {
            if plans.len() >= KEPT_PLANS {
                plans.clear();
            }
            let plan = match plans.entry(types) {
                Place::Occupied(plan) => plan.into_mut(),
                Place::Vacant(free) => {
                    let types: Vec<PgOid> = free.key().iter().copied().map(PgOid::from).collect();
                    free.insert(client.prepare_mut(insert().as_str(), &types)?.keep())
                }
            };
            client
                .update(&*plan, None, &arguments)?
                .first()
                .get_one::<i64>()
        })?;
        for (side, image) in [("local", &local_row), ("remote", &remote_row)] {
            if let Some([names, values]) = image.large() {
                let large = [id.into(), side.into(), names, values];
                client.update(INSERT_LARGE, None, &large)?;
            }
        }
        Ok(())
    })
    .map_err(|error: pgrx::spi::SpiError| {
        PgError::new(
            SqlState::InternalError,
            format!("could not record a conflict: {error}"),
        )
    })
}
