//! Puts referenced rows back that other nodes have deleted, for the rule `restore`: from their
//! images in `braid.deleted_parent` (`apply/deleted_parent.rs`). Run by the process that looks for
//! orphans.
//!
//! A row is put back by an INSERT of this node's own, which goes to all nodes. Its version is newer
//! than the deletion. Several nodes may put a row back: the newest insert stays everywhere.
//!
//! A row may still refer to another one although both were deleted: the other's deletion may be on
//! its way. So a row is put back only once everything has arrived that was committed up to its
//! deletion: the writer of that deletion had seen the deletions of the rows that referred to it.
//!
//! An image is found by the values of the referenced columns as it has them, member by member:
//! `{"id": {"a": 1}}` also contains, as jsonb says it, what is in the image of `{"a": 1, "b": 2}`.
//! Once the row is put back, the row that refers to it is looked at: if it is an orphan still, by
//! the constraint's own operators, the row was another one, and is not put back.
//!
//! Not for: rows of which this node has no image. Another node may have one. So their referring
//! rows are recorded as orphans only after a while.

use std::collections::HashMap;

use braid_node::clock;
use braid_node::settings;
use braid_node::subscription::{execute, execute_counting, execute_lazily, rows_written};
use braid_postgres::catalog::{Rights, with_rights, with_settings};
use braid_postgres::error::PgError;
use braid_postgres::subtransaction::attempt;
use pgrx::pg_sys;

use super::{MISSING, Orphan, Verdict, Watched, is_settled, orphan_query, record};

/// How long other nodes have to put a row back, in microseconds, besides two looks for orphans.
const PATIENCE_MICROS: i64 = 2_000_000;

/// The newest image of a row whose referenced columns have just the values of $2, by the deletion's
/// version against $3. Images are passed over that are older than what a session of this node has
/// deleted: the row had come back then, with other contents.
const NEWEST: &str = "\
    select d.image_id::text, (v.deleted_at <= $3)::text, d.\"row\"::text, d.large_values::text, \
           p.relowner::oid::text, \
           case when exists (select from pg_catalog.pg_index i where not i.indimmediate and (i.indrelid = p.oid \
                    or i.indrelid in (select t.relid from pg_catalog.pg_partition_tree(p.oid) t))) then 'origin' else 'replica' end, \
           (select format('insert into %1$s (%2$s) overriding system value \
                           select %3$s from (select $1::pg_catalog.jsonb) r (image)', \
                       p.oid::regclass, string_agg(format('%I', a.attname), ', ' order by a.attnum), \
                       string_agg(case when d.\"row\" ? a.attname::text then format('(r.image operator(pg_catalog.->>) %L)::%s', a.attname, format_type(a.atttypid, -1)) \
                           else format('(($2::pg_catalog.text[])[%s])::%s', array_position(d.large_names, a.attname::text), format_type(a.atttypid, -1)) \
                           end, ', ' order by a.attnum)) \
            from pg_catalog.pg_attribute a \
            where a.attrelid = p.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = '' \
              and (d.\"row\" ? a.attname::text or a.attname::text = any (d.large_names))) \
    from pg_catalog.pg_constraint n join pg_catalog.pg_class p on p.oid = n.confrelid cross join braid.deleted_parent d \
    cross join lateral (select coalesce(extract(epoch from pg_catalog.pg_xact_commit_timestamp(d.xmin)) * 1000000, 0)) v (deleted_at) \
    where n.oid = $1::oid and d.\"row\" @> $2::jsonb \
      and not exists (select from pg_catalog.jsonb_each($2::jsonb) k where d.\"row\" -> k.key is distinct from k.value) \
      and (d.relation = p.oid or d.relation in (select t.relid::oid from pg_catalog.pg_partition_tree(p.oid) t)) \
      and not exists (select from braid.tombstone s where s.key_hash = d.key_hash and s.origin_id = 0 and s.deleted_at > v.deleted_at) \
    order by d.image_id desc limit 1";

/// An image of a referenced row.
struct Image {
    id: i64,
    /// Everything has arrived that was committed up to the deletion.
    is_settled: bool,
    row: String,
    large_values: Option<String>,
    owner: pg_sys::Oid,
    /// For `session_replication_role`. `replica`: foreign keys are not checked, which have rules of
    /// their own, and triggers fire as for rows of other nodes. But deferrable unique constraints
    /// would not be checked either.
    role: &'static str,
    statement: String,
}

/// The outcome for a referenced row.
enum Outcome {
    PutBack,
    /// To be tried again.
    Later,
    NoImage,
    /// The image can't be put back, and why.
    Failed(i64, String),
}

/// Puts back the rows that these rows refer to, and records that; or that it can't be done. In a
/// transaction.
pub(super) fn put_back(watched: &Watched, orphans: &[Orphan], before: i64) -> Result<(), PgError> {
    // A deferrable constraint must report a violation at once.
    execute_lazily("set constraints all immediate", &[]);
    let mut outcomes: HashMap<&str, Outcome> = HashMap::new();
    let mut count = 0_u64;
    for orphan in orphans {
        let key = orphan.referenced_image.as_str();
        if !outcomes.contains_key(key) {
            let outcome = restore(watched, orphan, before)?;
            count += u64::from(matches!(outcome, Outcome::PutBack));
            outcomes.insert(key, outcome);
        }
    }
    let mut helpless = Vec::new();
    let mut restored = Vec::new();
    for orphan in orphans {
        let given = outcomes.get(orphan.referenced_image.as_str());
        match given {
            Some(Outcome::PutBack) => restored.push(orphan),
            Some(outcome @ (Outcome::NoImage | Outcome::Failed(..))) => {
                if is_settled(orphan, before.saturating_sub(patience()))? {
                    helpless.push((orphan, outcome));
                }
            }
            Some(Outcome::Later) | None => {}
        }
    }
    record(watched, &restored, &RESTORED)?;
    if !helpless.is_empty() {
        give_up(watched, &helpless)?;
    }
    if count > 0 {
        pgrx::log!(
            "put back {count} rows that other nodes have deleted, as rows refer to them under {}",
            watched.name
        );
        clock::before_own_commit();
    }
    Ok(())
}

const RESTORED: Verdict<'_> = Verdict {
    resolution: "restore",
    winner: "local",
    words: ("the referenced row was put back in", ""),
};

fn patience() -> i64 {
    let interval = settings::orphan_check_interval().map_or(0, |interval| {
        i64::try_from(interval.as_micros()).unwrap_or(i64::MAX)
    });
    interval.saturating_mul(2).saturating_add(PATIENCE_MICROS)
}

/// Puts back the row that this one refers to.
fn restore(watched: &Watched, orphan: &Orphan, before: i64) -> Result<Outcome, PgError> {
    let Some(image) = newest(watched, &orphan.referenced_image, before)? else {
        return Ok(Outcome::NoImage);
    };
    if !image.is_settled {
        return Ok(Outcome::Later);
    }
    let inserted = attempt(|| {
        let count = with_settings(&[("session_replication_role", image.role)], || {
            with_rights(Rights::Confined(image.owner), || {
                execute_counting(
                    &image.statement,
                    &[
                        image.row.as_str().into(),
                        image.large_values.as_deref().into(),
                    ],
                )
            })
        })?;
        let is_it = count > 0 && !is_orphan(watched, orphan)?;
        Ok(((count, is_it), is_it))
    });
    match inserted {
        Ok((0, _)) => Ok(Outcome::Failed(
            image.id,
            "a trigger kept the row out".to_owned(),
        )),
        Ok((_, false)) => Ok(Outcome::NoImage),
        Ok((_, true)) => {
            forget(image.id)?;
            Ok(Outcome::PutBack)
        }
        Err(failure) if passes(&failure) => Err(failure),
        Err(failure) => Ok(Outcome::Failed(image.id, failure.message)),
    }
}

/// Whether a row's referenced row is missing still.
fn is_orphan(watched: &Watched, orphan: &Orphan) -> Result<bool, PgError> {
    let Some(query) = orphan_query(watched)? else {
        return Ok(false);
    };
    let query = format!(
        "select 1::text from ({query} and orphan$child.tableoid = $1::pg_catalog.oid and orphan$child.ctid = $2::pg_catalog.tid) q"
    );
    let found = with_rights(Rights::Confined(watched.owner), || {
        rows_written(
            &query,
            &[
                orphan.relation.as_str().into(),
                orphan.place.as_str().into(),
            ],
        )
    })?;
    Ok(!found.is_empty())
}

/// Whether an error says nothing of the row: the next look may go well.
fn passes(failure: &PgError) -> bool {
    ["40", "53", "55", "57", "58", "XX"]
        .iter()
        .any(|class| failure.sqlstate.is_of(class))
}

fn newest(watched: &Watched, key: &str, before: i64) -> Result<Option<Image>, PgError> {
    let found = rows_written(
        NEWEST,
        &[
            i64::from(watched.constraint).into(),
            key.into(),
            before.into(),
        ],
    )?;
    Ok(found.into_iter().next().and_then(|row| {
        let [id, is_settled, row, large_values, owner, role, statement] =
            <[_; 7]>::try_from(row).ok()?;
        Some(Image {
            id: id?.parse().ok()?,
            is_settled: is_settled.as_deref() == Some("true"),
            row: row?,
            large_values,
            owner: pg_sys::Oid::from_u32(owner?.parse().ok()?),
            role: if role.as_deref() == Some("origin") {
                "origin"
            } else {
                "replica"
            },
            statement: statement?,
        })
    }))
}

/// An image has been used, or can't be.
fn forget(id: i64) -> Result<(), PgError> {
    execute(
        "delete from braid.deleted_parent where image_id = $1",
        &[id.into()],
    )
}

/// Records those of these rows that are orphans still: a referenced row that has arrived meanwhile
/// may have kept its image out.
fn give_up(watched: &Watched, helpless: &[(&Orphan, &Outcome)]) -> Result<(), PgError> {
    let Some(query) = orphan_query(watched)? else {
        return Ok(());
    };
    let places: Vec<String> = helpless
        .iter()
        .map(|(orphan, _)| format!("{} {}", orphan.relation, orphan.place))
        .collect();
    let query = format!(
        "select q.relation::oid::text || ' ' || q.place from ({query}) q where q.relation::oid::text || ' ' || q.place = any ($1)"
    );
    let still = with_rights(Rights::Confined(watched.owner), || {
        rows_written(&query, &[places.clone().into()])
    })?;
    let still: Vec<String> = still
        .into_iter()
        .filter_map(|row| row.into_iter().next()?)
        .collect();
    for ((orphan, outcome), place) in helpless.iter().zip(&places) {
        if !still.contains(place) {
            continue;
        }
        let why = match outcome {
            Outcome::Failed(image, why) => {
                forget(*image)?;
                format!(", and cannot be put back: {why}")
            }
            _ => ", and cannot be put back: no image of it is here".to_owned(),
        };
        record(
            watched,
            &[orphan],
            &Verdict {
                resolution: "record",
                winner: "local",
                words: (MISSING, &why),
            },
        )?;
    }
    Ok(())
}
