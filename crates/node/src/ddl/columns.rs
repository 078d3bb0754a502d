//! Former names of columns (`braid.former_column`). A statement that renames or drops a column is
//! run on one node after the other. Meanwhile a node that has run it gets rows from others under
//! the former name.
//!
//! A later column may get the name of one that was dropped or renamed. `braid.given_column` has the
//! mark of the statement that gave a column its name. The output plugin sends it, which
//! distinguishes rows of the former column from those of the later one.
//!
//! Written in the transaction of the statement, and forgotten with the table.

use std::collections::BTreeMap;

use braid_bgworker::subscription_option::array_literal;
use braid_gir::Statement;
use braid_postgres::catalog::Rights;
use braid_postgres::error::PgError;
use braid_postgres::kept_plan;
use braid_postgres::names::{find_table, own_table};
use braid_postgres::table_scan::{Sees, has_any};
use pgrx::pg_sys;

use super::facts::{owners_query, owners_work, work_as};
use crate::wake;

/// The names of the columns of some tables, and of the tables that inherit from these.
#[derive(Debug, Clone, Default)]
pub struct ColumnNames {
    /// Table, number of the column, name.
    names: Vec<(String, String, String)>,
    tables: String,
}

fn read(tables: &str) -> Vec<(String, String, String)> {
    let found = owners_query(
        "with recursive t (oid) as (select unnest($1::oid[]) union select i.inhrelid from pg_inherits i join t on t.oid = i.inhparent) \
         select a.attrelid, a.attnum, a.attname from pg_attribute a join t on t.oid = a.attrelid where a.attnum > 0 and not a.attisdropped",
        &[Some(tables)],
    );
    let cell = |row, column| found.get(row, column).unwrap_or_default().to_owned();
    (0..found.len())
        .map(|row| (cell(row, 0), cell(row, 1), cell(row, 2)))
        .collect()
}

impl ColumnNames {
    /// The names before a statement that touches these tables. In a transaction.
    #[must_use]
    pub fn of(tables: &[pg_sys::Oid]) -> Self {
        if tables.is_empty() {
            return Self::default();
        }
        let oids: Vec<String> = tables.iter().map(|oid| oid.to_u32().to_string()).collect();
        let tables = array_literal(&oids);
        Self {
            names: read(&tables),
            tables,
        }
    }

    /// Writes down the names that a statement has changed, with its mark. In a transaction.
    pub fn note_changes(&self, mark: i64) {
        if self.names.is_empty() {
            return;
        }
        let mark = mark.to_string();
        let now = read(&self.tables);
        for (table, number, name) in &self.names {
            let same = |(other, of, _): &&(String, String, String)| other == table && of == number;
            let found = now.iter().find(same).map(|(_, _, name)| name);
            if found == Some(name) || !now.iter().any(|(other, _, _)| other == table) {
                continue;
            }
            owners_query(
                "insert into braid.former_column (relation, column_name, mark, column_number, until) \
                 select $1::oid, $2::name, coalesce(g.mark, 0), $4::smallint, $5::bigint \
                 from (select) one left join braid.given_column g on g.relation = $1::oid and g.column_number = $3::smallint and g.column_name = $2::name \
                 on conflict (relation, column_name, mark) do update set column_number = excluded.column_number, until = excluded.until, recorded_at = excluded.recorded_at",
                &[
                    Some(table),
                    Some(name),
                    Some(number),
                    found.is_some().then_some(number.as_str()),
                    Some(&mark),
                ],
            );
        }
        // PostgreSQL has no ON CONFLICT for a table that is read while WAL is decoded.
        for given in &now {
            let (table, number, name) = given;
            // A table that has become a partition meanwhile had its columns before.
            if self.names.contains(given) || !self.names.iter().any(|(other, _, _)| other == table)
            {
                continue;
            }
            owners_query(
                "insert into braid.given_column (relation, column_number, column_name, mark) \
                 select $1::oid, $2::smallint, $3::name, $4::bigint where not exists (select from braid.given_column \
                   where relation = $1::oid and column_number = $2::smallint and column_name = $3::name and mark = $4::bigint)",
                &[Some(table), Some(number), Some(name), Some(&mark)],
            );
        }
        for table in ["former_column", "given_column"] {
            owners_query(
                &format!(
                    "delete from braid.{table} f where not exists (select from pg_class c where c.oid = f.relation)"
                ),
                &[],
            );
        }
    }

    /// Tables whose new columns have got a value for each row: another node would compute other
    /// values. PostgreSQL keeps the one value of a constant default apart from the rows. A table
    /// without a replica identity is left out, as its rows are not found.
    #[must_use]
    pub fn filled(&self) -> Vec<Filled> {
        let mut before: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (table, number, _) in &self.names {
            before.entry(table).or_default().push(number.clone());
        }
        before
            .into_iter()
            .filter_map(|(table, numbers)| {
                let found = owners_query(FILL, &[Some(table), Some(&array_literal(&numbers))]);
                Some(Filled {
                    relation: pg_sys::Oid::from(table.parse::<u32>().ok()?),
                    name: found.get(0, 0)?.to_owned(),
                    column: found.get(0, 1)?.to_owned(),
                })
            })
            .collect()
    }
}

/// A table for whose rows a statement has computed values.
#[derive(Debug, Clone)]
pub struct Filled {
    relation: pg_sys::Oid,
    /// Name of the relation in SQL, and of one of its columns.
    name: String,
    column: String,
}

impl Filled {
    /// Writes all rows again, which sends their values. No trigger sees it, as none sees the
    /// statement that has computed the values.
    pub(super) fn write_again(&self) {
        let Self { name, column, .. } = self;
        owners_work(
            &[("session_replication_role", "replica")],
            Rights::OwnerOf(self.relation),
            &format!("update only {name} set {column} = {column}"),
        );
    }

    /// Records which rows have values of this node's from now on, after another node's statement
    /// was run in the current transaction: those that are not updated before the transaction ends.
    pub fn note(&self) {
        let newest = work_as(
            Rights::OwnerOf(self.relation),
            &format!("select xmin::text from only {} limit 1", self.name),
            &[],
        );
        if let Some(xid) = newest.get(0, 0) {
            owners_query(
                "insert into braid.own_value (relation, xid) values ($1::oid, $2::bigint) on conflict do nothing",
                &[Some(&self.relation.to_u32().to_string()), Some(xid)],
            );
        }
        wake::manager_at_commit();
    }
}

/// Records that the transaction `xid`, or this subtransaction, has rewritten a table. Rows with
/// values of this node's that are not sent to the others yet are among those that it has written.
/// In that transaction.
///
/// # Errors
/// Those of PostgreSQL.
pub fn note_rewritten(relation: pg_sys::Oid, xid: pg_sys::TransactionId) -> Result<(), PgError> {
    let table = find_table("braid", "own_value")?;
    if !table.is_some_and(|table| has_any(table, pg_sys::InvalidOid, &[], Sees::Active)) {
        return Ok(());
    }
    owners_query(
        "with former as (delete from braid.own_value where relation = $1::oid returning relation) \
         insert into braid.own_value (relation, xid) select relation, $2::bigint from former limit 1",
        &[
            Some(&relation.to_u32().to_string()),
            Some(&xid.into_inner().to_string()),
        ],
    );
    Ok(())
}

/// SQL for the name of a table `c` of `pg_class`, and of some column that can be updated.
macro_rules! name_and_column {
    () => {
        "quote_ident(n.nspname) || '.' || quote_ident(c.relname), \
         (select quote_ident(a.attname) from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped \
            and a.attgenerated = '' and a.attidentity <> 'a' order by a.attnum limit 1)"
    };
}

/// Name of a table, and of some column of it, if it has new columns whose values differ from row to
/// row: these are not among the numbers that columns had before.
const FILL: &str = concat!(
    "select ",
    name_and_column!(),
    " from pg_class c join pg_namespace n on n.oid = c.relnamespace \
     where c.oid = $1::oid and c.relkind = 'r' and c.relpersistence = 'p' \
       and (c.relreplident = 'f' or exists (select from pg_index i where i.indrelid = c.oid \
         and case c.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident end)) \
       and exists (select from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and a.attnum <> all ($2::smallint[]) \
         and not a.attisdropped and not a.atthasmissing and a.attgenerated = '' and (a.atthasdef or a.attidentity <> ''))"
);

/// SQL for tables with values of this node's that are not sent to the others yet: OID, transaction,
/// name, some column, file.
pub const OWN_VALUES: &str = concat!(
    "select o.relation::text, o.xid::text, ",
    name_and_column!(),
    ", c.relfilenode::text from braid.own_value o join pg_catalog.pg_class c on c.oid = o.relation \
     join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
);

/// Marks the columns to which a statement gives names that they have on this node already: another
/// node has run an equal statement. In a transaction.
pub fn note_given(statement: &Statement) {
    let mark = statement.mark().to_string();
    for table in &statement.tables {
        let (Some(_), Some(after)) = (&table.before, &table.after) else {
            continue;
        };
        let names = |lines: &[String]| -> Vec<String> {
            let columns = lines.iter().filter_map(|line| line.strip_prefix("column "));
            let names = columns.filter_map(|line| line.split('\t').next());
            names.map(str::to_owned).collect()
        };
        let former = names(&table.removed);
        let mut given = names(&table.added);
        given.retain(|name| !former.contains(name));
        if given.is_empty() {
            continue;
        }
        owners_query(
            "with recursive t (oid) as (select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace \
               where n.nspname = $1::name and c.relname = $2::name union select i.inhrelid from pg_inherits i join t on t.oid = i.inhparent) \
             insert into braid.given_column (relation, column_number, column_name, mark) \
             select a.attrelid, a.attnum, a.attname, $4::bigint from pg_attribute a join t on t.oid = a.attrelid \
             where a.attnum > 0 and not a.attisdropped and quote_ident(a.attname) = any ($3::text[]) \
               and not exists (select from braid.given_column g where g.relation = a.attrelid and g.column_number = a.attnum \
                 and g.column_name = a.attname and g.mark = $4::bigint)",
            &[
                Some(&after.namespace),
                Some(&after.name),
                Some(&array_literal(&given)),
                Some(&mark),
            ],
        );
    }
}

/// The local column that a column of the stream stands for. Another local column may have its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnPlace {
    /// In the column that has the name, if one has.
    ByName,
    /// In the column with this number, which has another name now.
    Renamed(i16),
    /// Nowhere: the column is dropped.
    Dropped,
    /// Nowhere yet: the statement that gives the name has not come.
    NotYet,
}

/// Finds the column that a subscription's stream means by a name and a mark. `number`: the local
/// column that has the name, or 0. Names count alone for statements from before the subscription.
/// In a transaction.
///
/// # Errors
/// 42P01 when the extension is older than the library; those of PostgreSQL.
pub fn column_place(
    subscription_id: u32,
    relation: pg_sys::Oid,
    name: &str,
    number: i16,
    mark: u64,
) -> Result<ColumnPlace, PgError> {
    let table = own_table("former_column")?;
    if mark == 0 && !has_any(table, pg_sys::InvalidOid, &[], Sees::Active) {
        return Ok(ColumnPlace::ByName);
    }
    let found = kept_plan::rows_in_snapshot(
        "select exists (select from braid.given_column g where g.relation = $1::oid and g.column_number = $3 and g.column_name = $2::name \
             and g.mark = $4)::text, \
           exists (select from braid.given_column g where g.relation = $1::oid and g.column_number = $3 and g.column_name = $2::name)::text, \
           (f.relation is not null)::text, f.column_number::text, ($4 > s.since and f.relation is null)::text, (f.until > s.since)::text \
         from (select coalesce((select (extract(epoch from created_at) * 1000)::bigint << 16 from braid.subscription \
           where subscription_id = $5 and replicate_ddl), 9223372036854775807) as since) s \
         left join braid.former_column f on f.relation = $1::oid and f.column_name = $2::name and f.mark = $4",
        &[
            i64::from(relation.to_u32()).into(),
            name.into(),
            i64::from(number).into(),
            mark.cast_signed().into(),
            i64::from(subscription_id).into(),
        ],
    )?;
    let row = found.into_iter().next().unwrap_or_default();
    let cell = |place: usize| row.get(place).and_then(Option::as_deref);
    let is = |place: usize| cell(place) == Some("true");
    let (has_mark, is_marked, is_former, is_newer, since) = (is(0), is(1), is(2), is(4), is(5));
    if has_mark || (mark == 0 && number != 0 && !is_marked) {
        return Ok(ColumnPlace::ByName);
    }
    if is_former && (since || number == 0) {
        let number = cell(3).and_then(|number| number.parse().ok());
        return Ok(number.map_or(ColumnPlace::Dropped, ColumnPlace::Renamed));
    }
    Ok(if is_newer {
        ColumnPlace::NotYet
    } else {
        ColumnPlace::ByName
    })
}
