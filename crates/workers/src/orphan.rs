//! Rows whose referenced row is missing under a foreign key: looked for in tables for which a rule was set with
//! `braid.set_foreign_key_rule`, recorded in the history, and deleted if the rule says so; or the referenced row is put back (`parent.rs`). Run by a process of its own, which the manager
//! starts every `braid.orphan_check_interval` and which ends when it has looked at each table once.
//!
//! Appliers check no foreign keys, so a row may stay whose referenced row lost a conflict, or was deleted at another node at the same time.
//! A referenced row may also only be late, as it comes by another stream. So a row counts only once everything has arrived that was committed up
//! to its own version: a writer's node has the referenced row when the row is written, so the version of the referenced row is older.
//!
//! A deletion is one of this node's own: it goes to all nodes and is judged by versions, as any other. So nodes agree whoever
//! deletes, and however many do. Statements run as the table's owner and may do no more than that role may.

mod parent;

use braid_apply::with_fixed_settings;
use braid_node::clock;
use braid_node::settings::{self, ConflictHistory};
use braid_node::subscription::{execute, execute_counting, rows, rows_written};
use braid_postgres::catalog::{Rights, with_rights};
use braid_postgres::error::{self, PgError};
use braid_postgres::worker;
use pgrx::pg_sys;

use crate::manager;

/// How much later than its own version everything has to have arrived, in microseconds: a commit is in WAL a moment after its time.
const MARGIN_MICROS: i64 = 1_000_000;

/// What is done about rows whose referenced row is missing.
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
    row: String,
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    worker::connect(u32::try_from(argument.value()).unwrap_or(0));
    // Whoever has a table locked is not waited for; nor is row-level security to hide referenced rows.
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
        Ok((manager::arrived(&ids)?, watched()?))
    });
    match found {
        Ok((Some(arrived), watched)) => {
            let before = arrived.saturating_sub(MARGIN_MICROS);
            for one in watched {
                if let Err(failure) = error::transaction(|| settle_one(&one, before)) {
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

/// In a transaction, which it may leave with something written.
fn settle_one(watched: &Watched, before: i64) -> Result<(), PgError> {
    let locks = watched.rule != Rule::Record;
    let Some(query) = orphan_query(watched, locks)? else {
        return Ok(());
    };
    let confined = Rights::Confined(watched.owner);
    let query = format!(
        "select q.relation::oid::text, q.place, q.key::text, q.referenced_key::text, q.row::text from ({query} limit 1000) q"
    );
    // So that a key is written as it is in an image of the referenced row.
    let found = with_fixed_settings(|| with_rights(confined, || rows_written(&query, &[])))?;
    let mut orphans = Vec::new();
    for row in found {
        let [
            Some(relation),
            Some(place),
            key,
            Some(referenced_key),
            Some(row),
        ] = <[Option<String>; 5]>::try_from(row).unwrap_or_default()
        else {
            continue;
        };
        let orphan = Orphan {
            relation,
            place,
            key,
            referenced_key,
            row,
        };
        if is_settled(&orphan, before)? {
            orphans.push(orphan);
        }
    }
    match watched.rule {
        Rule::Record => {
            for orphan in &orphans {
                record(watched, orphan, &STAYS)?;
            }
            Ok(())
        }
        Rule::Delete => delete(watched, &orphans),
        Rule::Restore => parent::put_back(watched, &orphans, before),
    }
}

/// The query that finds the rows, and locks them if it is to.
fn orphan_query(watched: &Watched, locks: bool) -> Result<Option<String>, PgError> {
    let (relation, constraint) = (i64::from(watched.relation), i64::from(watched.constraint));
    let query = rows(
        "select braid.orphan_query($1::oid, $2::oid, $3)",
        &[relation.into(), constraint.into(), locks.into()],
    )?;
    Ok(query
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()?))
}

fn delete(watched: &Watched, orphans: &[Orphan]) -> Result<(), PgError> {
    let confined = Rights::Confined(watched.owner);
    for orphan in orphans {
        record(watched, orphan, &IS_DELETED)?;
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
        let place = orphan.place.as_str();
        with_rights(confined, || {
            let delete = format!("delete from only {table} where ctid = $1::pg_catalog.tid");
            execute_counting(&delete, &[place.into()])
        })?;
    }
    if !orphans.is_empty() {
        pgrx::log!(
            "deleted {} rows under {} whose referenced rows are missing",
            orphans.len(),
            watched.name
        );
        clock::before_own_commit();
    }
    Ok(())
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

/// What the history says of a row.
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

/// Once for each row, as it is.
fn record(watched: &Watched, orphan: &Orphan, verdict: &Verdict<'_>) -> Result<(), PgError> {
    if settings::conflict_history() == ConflictHistory::Off {
        return Ok(());
    }
    execute(
        "insert into braid.conflict_record (relation, table_name, kind, resolution, winner, reason, key, local_row, constraint_name, columns) \
         select $1::oid::regclass, $1::oid::regclass::text, 'foreign_key', $2, $3, $4 || ' ' || c.confrelid::regclass::text || ' ' || $5 || $9, \
         $6::jsonb, $7::jsonb, c.conname, \
         (select array_agg(a.attname order by u.position) from unnest(c.conkey) with ordinality u (number, position) \
          join pg_catalog.pg_attribute a on a.attrelid = c.conrelid and a.attnum = u.number) \
         from pg_catalog.pg_constraint c where c.oid = $8::oid and not exists \
         (select from braid.conflict_record r where r.kind = 'foreign_key' and r.resolution = $2 and r.relation = $1::oid::regclass \
          and r.constraint_name = c.conname and r.key is not distinct from $6::jsonb and r.local_row = $7::jsonb)",
        &[
            orphan.relation.as_str().into(),
            verdict.resolution.into(),
            verdict.winner.into(),
            verdict.words.0.into(),
            orphan.referenced_key.as_str().into(),
            orphan.key.as_deref().into(),
            orphan.row.as_str().into(),
            i64::from(watched.constraint).into(),
            verdict.words.1.into(),
        ],
    )
}
