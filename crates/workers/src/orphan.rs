//! Rows whose referenced row is missing under a foreign key: looked for in tables for which a rule
//! was set with `braid.set_foreign_key_rule`, recorded in the history, and deleted if the rule says
//! so; or the referenced row is put back (`parent.rs`). Run by a process of its own, which the
//! manager starts every `braid.orphan_check_interval` and which ends when it has looked at each
//! table once.
//!
//! Appliers check no foreign keys, so a row may stay whose referenced row lost a conflict, or was
//! deleted at another node at the same time. A referenced row may also only be late, as it comes by
//! another stream. So a row counts only once everything has arrived that was committed up to its
//! own version: a writer's node has the referenced row when the row is written, so the version of
//! the referenced row is older.
//!
//! A deletion is one of this node's own: it goes to all nodes and is judged by versions, as any
//! other. So nodes agree, whichever of them delete the row. Statements run as the table's owner and
//! may do no more than that role may.

mod parent;

use braid_apply::with_fixed_settings;
use braid_node::clock;
use braid_node::settings::{self, ConflictHistory};
use braid_node::subscription::{execute, execute_counting, rows, rows_lazily, rows_written};
use braid_postgres::catalog::{Rights, with_rights};
use braid_postgres::error::{self, PgError};
use braid_postgres::worker;
use pgrx::pg_sys;

use crate::purge;

/// How much later than its own version everything has to have arrived, in microseconds: a commit is
/// in WAL a moment after its time.
const MARGIN_MICROS: i64 = 1_000_000;
/// How many rows are looked at in a transaction.
const STEP: usize = 1_000;

/// The action for rows whose referenced row is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Record,
    Delete,
    Restore,
}

impl Rule {
    fn named(name: &str) -> Option<Self> {
        match name {
            "record" => Some(Self::Record),
            "delete" => Some(Self::Delete),
            "restore" => Some(Self::Restore),
            _ => None,
        }
    }
}

/// A foreign key for which there is a rule, in a table whose rows it is about.
struct Watched {
    relation: u32,
    constraint: u32,
    rule: Rule,
    owner: pg_sys::Oid,
    name: String,
}

/// A row whose referenced row is missing.
struct Orphan {
    relation: String,
    place: String,
    key: Option<String>,
    referenced_key: String,
    /// The referenced columns' values as they are in an image of the referenced row.
    referenced_image: String,
    row: String,
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    crate::connect(argument);
    // Does not wait for a session that has locked a table. Row-level security must not hide
    // referenced rows.
    worker::set("lock_timeout", "1s");
    worker::set("row_security", "off");
    let found = error::transaction(|| {
        let subscriptions = rows(
            "select subscription_id::text from braid.subscription where given_up_at is null",
            &[],
        )?;
        let ids: Vec<u32> = subscriptions
            .into_iter()
            .filter_map(|row| row.into_iter().next()??.parse().ok())
            .collect();
        Ok((purge::arrived(&ids)?, watched()?))
    });
    match found {
        Ok((Some(arrived), watched)) => {
            let before = arrived.saturating_sub(MARGIN_MICROS);
            for one in watched {
                if let Err(failure) = settle(&one, before) {
                    failure.log(&format!("could not look for orphans under {}", one.name));
                }
            }
        }
        Ok((None, _)) => {}
        Err(failure) => failure.log("could not look for orphans"),
    }
}

fn watched() -> Result<Vec<Watched>, PgError> {
    let found = rows(
        "select k.relation::text, k.constraint::text, f.rule, c.relowner::oid::text, format('foreign key %I of table %s', f.constraint_name, f.relation) \
         from braid.foreign_key_rule f join pg_catalog.pg_class c on c.oid = f.relation::oid \
         cross join lateral braid.foreign_keys(f.relation::oid) k \
         join pg_catalog.pg_constraint n on n.oid = k.constraint and n.conname = f.constraint_name",
        &[],
    )?;
    let number = |cell: Option<String>| cell.and_then(|text| text.parse::<u32>().ok());
    Ok(found
        .into_iter()
        .filter_map(|row| {
            let [relation, constraint, rule, owner, name] = <[_; 5]>::try_from(row).ok()?;
            Some(Watched {
                relation: number(relation)?,
                constraint: number(constraint)?,
                rule: Rule::named(rule.as_deref()?)?,
                owner: pg_sys::Oid::from_u32(number(owner)?),
                name: name?,
            })
        })
        .collect())
}

/// Looks at all orphans under a foreign key, some in each transaction, in the order of their
/// places. So none of them hides those behind it, however many stay.
fn settle(watched: &Watched, before: i64) -> Result<(), PgError> {
    let mut after = None;
    loop {
        pgrx::check_for_interrupts!();
        after = error::transaction(|| settle_some(watched, before, after.as_ref()))?;
        if after.is_none() {
            return Ok(());
        }
    }
}

/// Handles the first orphans behind a row, given by table and place. Returns the last one; `None`
/// if there are no more. In a transaction, in which it may write.
fn settle_some(
    watched: &Watched,
    before: i64,
    after: Option<&(String, String)>,
) -> Result<Option<(String, String)>, PgError> {
    let Some(query) = orphan_query(watched)? else {
        return Ok(None);
    };
    let behind = match after {
        None => "true",
        // In a single table PostgreSQL reads only the rows behind that place.
        Some((table, _)) if *table == watched.relation.to_string() => {
            "$1::pg_catalog.oid is not null and orphan$child.ctid > $2::pg_catalog.tid"
        }
        Some(_) => {
            "(orphan$child.tableoid, orphan$child.ctid) > ($1::pg_catalog.oid, $2::pg_catalog.tid)"
        }
    };
    let locks = if watched.rule == Rule::Record {
        ""
    } else {
        "for update of orphan$child skip locked"
    };
    let query = format!(
        "select q.relation::oid::text, q.place, q.key::text, q.referenced_key::text, q.referenced_image::text, q.row::text from \
         ({query} and {behind} order by orphan$child.tableoid, orphan$child.ctid limit {STEP} {locks}) q"
    );
    let arguments = after.map(|(table, place)| [table.as_str().into(), place.as_str().into()]);
    let arguments = arguments.as_ref().map_or(&[][..], |arguments| arguments);
    let confined = Rights::Confined(watched.owner);
    // So that a key is written as it is in an image of the referenced row.
    let found = with_fixed_settings(|| with_rights(confined, || rows_lazily(&query, arguments)));
    let is_last = found.len() < STEP;
    let mut last = None;
    let mut orphans = Vec::new();
    for row in found {
        let [
            Some(relation),
            Some(place),
            key,
            Some(referenced_key),
            Some(referenced_image),
            Some(row),
        ] = <[Option<String>; 6]>::try_from(row).unwrap_or_default()
        else {
            continue;
        };
        last = Some((relation.clone(), place.clone()));
        let orphan = Orphan {
            relation,
            place,
            key,
            referenced_key,
            referenced_image,
            row,
        };
        if is_settled(&orphan, before)? {
            orphans.push(orphan);
        }
    }
    match watched.rule {
        Rule::Record => {
            record(watched, &orphans.iter().collect::<Vec<_>>(), &STAYS)?;
        }
        Rule::Delete => delete(watched, &orphans)?,
        Rule::Restore => parent::put_back(watched, &orphans, before)?,
    }
    Ok(last.filter(|_| !is_last))
}

/// The query that finds the rows. It ends with its conditions.
fn orphan_query(watched: &Watched) -> Result<Option<String>, PgError> {
    let (relation, constraint) = (i64::from(watched.relation), i64::from(watched.constraint));
    let query = rows(
        "select braid.orphan_query($1::oid, $2::oid)",
        &[relation.into(), constraint.into()],
    )?;
    Ok(query
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()?))
}

/// Deletes rows. A row that a trigger or a rule of the table keeps is recorded as one that stays.
fn delete(watched: &Watched, orphans: &[Orphan]) -> Result<(), PgError> {
    let (mut deleted, mut kept) = (Vec::new(), Vec::new());
    for orphan in orphans {
        let table = rows(
            "select $1::oid::regclass::text",
            &[orphan.relation.as_str().into()],
        )?;
        let Some(Some(table)) = table
            .into_iter()
            .next()
            .and_then(|row| row.into_iter().next())
        else {
            continue;
        };
        if delete_row(watched, &table, &orphan.place)? {
            deleted.push(orphan);
        } else {
            kept.push(orphan);
        }
    }
    record(watched, &deleted, &IS_DELETED)?;
    record(watched, &kept, &IS_KEPT)?;
    if !deleted.is_empty() {
        pgrx::log!(
            "deleted {} rows under {} whose referenced rows are missing",
            deleted.len(),
            watched.name
        );
        clock::before_own_commit();
    }
    Ok(())
}

/// Deletes the row at a place. Returns whether it is gone: an earlier deletion of the transaction
/// may have taken it along.
fn delete_row(watched: &Watched, table: &str, place: &str) -> Result<bool, PgError> {
    with_rights(Rights::Confined(watched.owner), || {
        let there = format!("from only {table} where ctid = $1::pg_catalog.tid");
        if execute_counting(&format!("delete {there}"), &[place.into()])? > 0 {
            return Ok(true);
        }
        let left = rows_written(&format!("select 1::text {there}"), &[place.into()])?;
        Ok(left.is_empty())
    })
}

/// Whether the referenced row would have come by now.
fn is_settled(orphan: &Orphan, before: i64) -> Result<bool, PgError> {
    let found = rows(
        "select 1::text from braid.row_version($1::oid, $2::tid) v \
         where coalesce(extract(epoch from v.committed_at) * 1000000, 0) <= $3",
        &[
            orphan.relation.as_str().into(),
            orphan.place.as_str().into(),
            before.into(),
        ],
    )?;
    Ok(!found.is_empty())
}

/// The history's record of a row.
struct Verdict<'a> {
    resolution: &'a str,
    winner: &'a str,
    /// Before the referenced row's table and key, and after them.
    words: (&'a str, &'a str),
}

const MISSING: &str = "the referenced row is missing in";
const STAYS: Verdict<'_> = Verdict {
    resolution: "record",
    winner: "local",
    words: (MISSING, ""),
};
const IS_DELETED: Verdict<'_> = Verdict {
    resolution: "delete",
    winner: "none",
    words: (MISSING, ""),
};

const IS_KEPT: Verdict<'_> = Verdict {
    words: (
        MISSING,
        ", and a trigger or a rule keeps the row from being deleted",
    ),
    ..STAYS
};

/// Records rows, each once as it is.
fn record(watched: &Watched, orphans: &[&Orphan], verdict: &Verdict<'_>) -> Result<(), PgError> {
    if orphans.is_empty() || settings::conflict_history() == ConflictHistory::Off {
        return Ok(());
    }
    let column = |of: fn(&Orphan) -> &str| -> Vec<String> {
        orphans.iter().map(|orphan| of(orphan).to_owned()).collect()
    };
    execute(
        "insert into braid.conflict_record (relation, table_name, kind, resolution, winner, reason, key, local_row, constraint_name, columns) \
         select o.relation::regclass, o.relation::regclass::text, 'foreign_key', $2, $3, $4 || ' ' || c.confrelid::regclass::text || ' ' || o.referenced_key || $9, \
         o.key, o.\"row\", c.conname, \
         (select array_agg(a.attname order by u.position) from unnest(c.conkey) with ordinality u (number, position) \
          join pg_catalog.pg_attribute a on a.attrelid = c.conrelid and a.attnum = u.number) \
         from pg_catalog.pg_constraint c cross join \
         (select distinct u.relation::oid, u.referenced_key, nullif(u.key, '')::jsonb, u.\"row\"::jsonb \
          from unnest($1::text[], $5::text[], $6::text[], $7::text[]) u (relation, referenced_key, key, \"row\")) o (relation, referenced_key, key, \"row\") \
         where c.oid = $8::oid and not exists \
         (select from braid.conflict_record r where r.kind = 'foreign_key' and r.resolution = $2 and r.relation = o.relation::regclass \
          and r.constraint_name = c.conname and r.key is not distinct from o.key and r.local_row = o.\"row\")",
        &[
            column(|orphan| &orphan.relation).into(),
            verdict.resolution.into(),
            verdict.winner.into(),
            verdict.words.0.into(),
            column(|orphan| &orphan.referenced_key).into(),
            column(|orphan| orphan.key.as_deref().unwrap_or_default()).into(),
            column(|orphan| &orphan.row).into(),
            i64::from(watched.constraint).into(),
            verdict.words.1.into(),
        ],
    )
}
