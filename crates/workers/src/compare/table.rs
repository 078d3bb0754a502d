//! The part of a table that is compared, and the SQL that reads it, the same on both sides. Run by
//! the session that compares.
//!
//! Rows are hashed as text, under settings that both sides share. Compared are the published
//! columns that exist locally, in the provider's order. Rows are found by a unique key that both
//! sides have. If both order that key alike, ranges of it are compared. If they are known not to
//! (another collation, or another version of it), each side is read in its own order and the other
//! is asked for the same keys.
//!
//! If the orders differ nevertheless, ranges only cost more. Each range starts at the end of the
//! one before, from the first key to the last, so each row is in exactly one range in any order. A
//! row that is in different ranges of the two sides is looked up by its key.

use braid_apply::row_version;
use braid_bgworker::compare::{Key, LISTED, Range, Seen, Sum};
use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::Subscription;
use braid_postgres::catalog::{self, Rights, with_rights};
use braid_postgres::error::PgError;
use braid_postgres::libpq::Connection;
use braid_postgres::rows::Rows;
use braid_postgres::snapshot;
use pgrx::pg_sys;

use super::key::{self, KeyPart};
use super::shape::{common_columns, common_key, hash_expression, orders};
use crate::as_owner::AsOwner;
use crate::copy::source::published;

/// How many rows are asked for by key in one statement.
const ASKED: usize = 50;
/// Number of columns of a row as it is seen.
const SEEN: usize = 3;
/// A list that is as long as this is not whole.
const LIST_LIMIT: u64 = 20 * LISTED;

/// Settings that both sides read under: values have one text then, and one process reads.
pub const SETTINGS: [(&str, &str); 11] = [
    ("max_parallel_workers_per_gather", "0"),
    ("datestyle", "ISO"),
    ("intervalstyle", "postgres"),
    ("timezone", "UTC"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
    ("lc_monetary", "C"),
    ("row_security", "off"),
    ("xmlbinary", "base64"),
    ("xmloption", "content"),
    ("array_nulls", "on"),
];

/// A column that is compared.
#[derive(Debug, Clone)]
pub struct Column {
    /// The column's name.
    pub name: String,
    /// How it is shown in JSON: `n` as a number, `b` as a boolean, `j` as it is, anything else as
    /// text.
    pub shown: String,
}

/// A side of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// This node.
    Here,
    /// The provider.
    There,
}

/// A row as it was seen, and the texts of its columns.
pub type Row = (Seen, Vec<Option<String>>);

/// A table that is compared.
#[derive(Debug, Clone)]
pub struct Table {
    /// The local table's owner, with whose rights it is read and written.
    owner: pg_sys::Oid,
    /// Schema-qualified, quoted.
    qualified: String,
    /// Names of the key's columns.
    pub key: Vec<String>,
    /// How each side compares them.
    parts: Vec<KeyPart>,
    /// All that is compared, the key's among them.
    pub columns: Vec<Column>,
    /// Published columns that do not exist locally, and are not compared.
    pub missing: Vec<String>,
    /// Both sides order the key alike.
    pub ordered: bool,
    /// The table in FROM, local and at the provider.
    tables: [String; 2],
    /// True for the rows that are published.
    filter: String,
    hash: String,
    search_path: String,
    as_owner: AsOwner,
    /// The provider's table.
    oid_there: u32,
    /// Rows at the provider, by an estimate.
    pub rows: Option<i64>,
}

/// Elements as the text form of an array.
pub fn array(elements: &[Option<String>]) -> String {
    let quoted: Vec<String> = elements
        .iter()
        .map(|element| match element {
            Some(text) => format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")),
            None => "NULL".to_owned(),
        })
        .collect();
    format!("{{{}}}", quoted.join(","))
}

/// A question waits for a lock at the provider for so long. The commit of a transaction that has
/// the lock may wait for a subscription of this node, which may wait for a row that a repair has
/// locked.
const LOCK_TIMEOUT: &str = "10s";

/// The provider is asked under the same settings, and finds names in the same schemas.
fn prepare(connection: &mut Connection, search_path: &str) -> Result<(), PgError> {
    let mut sql = format!("set statement_timeout = 0; set lock_timeout = '{LOCK_TIMEOUT}'; ");
    for (name, value) in SETTINGS {
        sql.push_str(&format!("set {name} = {}; ", quote_literal(value)));
    }
    sql.push_str("set client_encoding = 'UTF8'; set search_path = ");
    sql.push_str(search_path);
    connection.query(&sql)?;
    connection.lift_transaction_timeout()?;
    Ok(())
}

impl Table {
    /// Look at the table on both sides.
    ///
    /// # Errors
    /// The provider's; 42P01 when it is not published; 55000 when there is no key to find rows by.
    pub fn find(
        subscription: &Subscription,
        relation: u32,
        connection: &mut Connection,
    ) -> Result<Self, PgError> {
        prepare(connection, "pg_catalog")?;
        let oid = relation.to_string();
        let facts = catalog::query(
            "select n.nspname, c.relname, c.relkind, c.relowner::oid from pg_class c \
               join pg_namespace n on n.oid = c.relnamespace where c.oid = $1::oid",
            &[Some(&oid)],
        );
        let (Some(namespace), Some(name)) = (facts.get(0, 0), facts.get(0, 1)) else {
            return Err(
                PgError::new(SqlState::UndefinedTable, "table does not exist any more")
                    .with_hint("Create it and run braid.refresh_subscription."),
            );
        };
        let owner = facts
            .get(0, 3)
            .and_then(|oid| oid.parse().ok())
            .unwrap_or(0);
        let as_owner = AsOwner::outside(connection)?;
        let there = published(
            connection,
            as_owner,
            &subscription.options.publications,
            namespace,
            name,
            None,
            "",
        )?;
        if there.routed.is_some() {
            return Err(PgError::new(
                SqlState::FeatureNotSupported,
                format!(
                    "cannot compare table \"{namespace}.{name}\", which is routed at the provider"
                ),
            )
            .with_detail("Each node has other rows of a routed table.")
            .with_hint(
                "Unroute the table with braid.unroute_table, or compare what a query gives.",
            ));
        }
        let (columns, missing) = common_columns(&there, &oid);
        let key = common_key(connection, &columns, &oid, namespace, name)?;
        let orders = orders(connection, &key, &oid, namespace, name)?;
        let qualified = format!("{}.{}", quote_identifier(namespace), quote_identifier(name));
        // Tables that inherit from an ordinary one are replicated on their own.
        let only = |partitioned: bool| if partitioned { "" } else { "only " };
        let tables = [facts.get(0, 2) == Some("p"), there.partitioned]
            .map(|partitioned| format!("{}{qualified}", only(partitioned)));
        prepare(connection, &orders.search_path)?;
        let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
        Ok(Self {
            owner: pg_sys::Oid::from(owner),
            qualified,
            key,
            parts: orders.parts,
            tables,
            filter: there.filter().unwrap_or_else(|| "true".to_owned()),
            hash: hash_expression(connection, &names)?,
            columns,
            missing,
            ordered: orders.alike,
            search_path: orders.search_path,
            as_owner,
            oid_there: there.oid,
            rows: there.rows,
        })
    }

    /// Runs SQL on one side. On this node it has no more rights than the table's owner: the filters
    /// come from the provider.
    fn run(&self, at: At, connection: &mut Connection, sql: &str) -> Result<Rows, PgError> {
        match at {
            At::There => self.run_there(connection, sql),
            At::Here => Ok(self.run_here(sql)),
        }
    }

    /// Runs SQL that reads the provider's table, with the rights of that table's owner.
    ///
    /// # Errors
    /// The provider's.
    pub fn run_there(&self, connection: &mut Connection, sql: &str) -> Result<Rows, PgError> {
        let table = self.oid_there.to_string();
        Ok(self.as_owner.query(connection, &table, sql)?)
    }

    /// The text that [`Table::run_there`] sends.
    #[must_use]
    pub fn text_there(&self, sql: &str) -> String {
        self.as_owner.text(&self.oid_there.to_string(), sql)
    }

    /// Runs SQL on this node.
    pub fn run_here(&self, sql: &str) -> Rows {
        let path = [("search_path", self.search_path.as_str())];
        let outcome: Result<Rows, PgError> = catalog::with_settings(&path, || {
            Ok(with_rights(Rights::Confined(self.owner), || {
                catalog::query(sql, &[])
            }))
        });
        outcome.unwrap_or_default()
    }

    fn from(&self, at: At) -> String {
        let [here, there] = &self.tables;
        let table = match at {
            At::Here => here,
            At::There => there,
        };
        format!("from {table} where {}", self.filter)
    }

    /// The key's columns, as rows are selected and ordered by them.
    fn key_list(&self) -> String {
        key::list(&self.parts)
    }

    fn condition(&self, at: At, range: &Range) -> String {
        let beyond =
            |comparison, key| format!(" and {}", key::beyond(&self.parts, at, comparison, key));
        let after = range.after.as_ref().map(|key| beyond(">", key));
        let upto = range.upto.as_ref().map(|key| beyond("<=", key));
        after.into_iter().chain(upto).collect()
    }

    /// The key of row number `rows` of a range, if it has as many: from the index alone, where that
    /// is possible.
    pub fn bound_sql(&self, at: At, range: &Range, rows: u64) -> String {
        let keys = self.key_list();
        format!(
            "select {keys} {}{} order by {keys} offset {} limit 1",
            self.from(at),
            self.condition(at, range),
            rows.saturating_sub(1)
        )
    }

    /// The answer to [`Table::bound_sql`].
    pub fn bound(rows: &Rows) -> Option<Key> {
        rows.iter().next()?.iter().cloned().collect()
    }

    /// How many rows a range has, the first so many of them with `limit`, and the sum of their
    /// hashes.
    pub fn sum_sql(&self, at: At, range: &Range, limit: Option<u64>) -> String {
        let limit = limit.map_or_else(String::new, |limit| {
            format!(" order by {} limit {limit}", self.key_list())
        });
        format!(
            "select count(*), coalesce(sum(r.h), 0) from (select {} as h {}{}{limit}) r",
            self.hash,
            self.from(at),
            self.condition(at, range),
        )
    }

    /// The answer to [`Table::sum_sql`].
    pub fn sum(rows: &Rows) -> Sum {
        Sum {
            rows: rows
                .get(0, 0)
                .and_then(|text| text.parse().ok())
                .unwrap_or(0),
            hash: rows.get(0, 1).unwrap_or_default().to_owned(),
            last: None,
        }
    }

    /// Keys and hashes of a range's rows; `None` when they are too many by now.
    ///
    /// # Errors
    /// The provider's.
    pub fn list(
        &self,
        at: At,
        range: &Range,
        connection: &mut Connection,
    ) -> Result<Option<Vec<(Key, String)>>, PgError> {
        let sql = format!(
            "select {}, {} {}{} limit {LIST_LIMIT}",
            self.hash,
            self.key_list(),
            self.from(at),
            self.condition(at, range)
        );
        let rows = listed(&self.run(at, connection, &sql)?);
        Ok((rows.len() as u64 != LIST_LIMIT).then_some(rows))
    }

    /// Keys and hashes of the first rows behind a key, in this side's own order.
    ///
    /// # Errors
    /// The provider's.
    pub fn walk(
        &self,
        at: At,
        after: Option<&Key>,
        limit: u64,
        connection: &mut Connection,
    ) -> Result<Vec<(Key, String)>, PgError> {
        let range = Range {
            after: after.cloned(),
            ..Range::default()
        };
        let sql = format!(
            "select {}, {} {}{} order by {} limit {limit}",
            self.hash,
            self.key_list(),
            self.from(at),
            self.condition(at, &range),
            self.key_list()
        );
        Ok(listed(&self.run(at, connection, &sql)?))
    }

    /// Keys and hashes of the rows with these keys.
    ///
    /// # Errors
    /// The provider's.
    pub fn with_keys(
        &self,
        at: At,
        keys: &[Key],
        connection: &mut Connection,
    ) -> Result<Vec<(Key, String)>, PgError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let sql = format!(
            "select {}, {} {}{}",
            self.hash,
            self.key_list(),
            self.from(at),
            self.among(at, keys)
        );
        Ok(listed(&self.run(at, connection, &sql)?))
    }

    /// The provider's rows with these keys, in one statement; of each, its version if that is
    /// known.
    ///
    /// # Errors
    /// The provider's.
    pub fn whole_there(
        &self,
        keys: &[Key],
        connection: &mut Connection,
    ) -> Result<Vec<Row>, PgError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let names = self.columns.iter().map(|column| &*column.name);
        let columns: Vec<String> = names.map(quote_identifier).collect();
        let question = format!(
            "select {}, {} {}{}",
            self.seen(At::There),
            columns.join(", "),
            self.from(At::There),
            self.among(At::There, keys)
        );
        let rows = self.run_there(connection, &question)?;
        rows.iter()
            .map(|row| {
                let values = row.get(SEEN..).unwrap_or_default().to_vec();
                Ok((self.as_seen(At::There, row)?, values))
            })
            .collect()
    }

    /// Condition for rows with one of these keys.
    fn among(&self, at: At, keys: &[Key]) -> String {
        format!(" and {}", key::is_among(&self.parts, at, keys))
    }

    /// Condition for the row with a key.
    fn is(&self, at: At, key: &Key) -> String {
        key::is(&self.parts, at, key)
    }

    /// Returns the row of one side under each of these keys, as seen.
    ///
    /// # Errors
    /// The provider's.
    pub fn look(
        &self,
        at: At,
        keys: &[&Key],
        connection: &mut Connection,
    ) -> Result<Vec<Option<Seen>>, PgError> {
        let rows = self.rows(at, keys, "", connection)?;
        Ok(rows
            .into_iter()
            .map(|row| row.map(|(seen, _)| seen))
            .collect())
    }

    /// Returns the row of one side under each of these keys, as seen and with its columns.
    ///
    /// # Errors
    /// The provider's.
    pub fn whole(
        &self,
        at: At,
        keys: &[&Key],
        connection: &mut Connection,
    ) -> Result<Vec<Option<Row>>, PgError> {
        let columns: Vec<String> = self
            .columns
            .iter()
            .map(|column| quote_identifier(&column.name))
            .collect();
        self.rows(at, keys, &format!(", {}", columns.join(", ")), connection)
    }

    fn rows(
        &self,
        at: At,
        keys: &[&Key],
        columns: &str,
        connection: &mut Connection,
    ) -> Result<Vec<Option<Row>>, PgError> {
        let mut found: Vec<Option<Row>> = vec![None; keys.len()];
        for (part, keys) in keys.chunks(ASKED).enumerate() {
            let branches: Vec<String> = keys
                .iter()
                .enumerate()
                .map(|(index, key)| {
                    format!(
                        "(select {}, {}{columns} {} and {})",
                        part * ASKED + index,
                        self.seen(at),
                        self.from(at),
                        self.is(at, key)
                    )
                })
                .collect();
            let rows = self.run(at, connection, &branches.join(" union all "))?;
            for row in rows.iter() {
                let index = row
                    .first()
                    .and_then(|text| text.as_deref()?.parse::<usize>().ok());
                if let Some(place) = index.and_then(|index| found.get_mut(index)) {
                    let values = row.get(1 + SEEN..).unwrap_or_default().to_vec();
                    let seen = self.as_seen(at, row.get(1..).unwrap_or_default())?;
                    *place = Some((seen, values));
                }
            }
        }
        Ok(found)
    }

    /// The columns that [`Table::as_seen`] reads, [`SEEN`] of them. A row's version is not always
    /// that of the transaction that wrote it (batches, copies), so it is read by the row's place.
    /// The provider reads it together with the row. This node reads it afterwards, since that takes
    /// more rights than the table's owner may have.
    fn seen(&self, at: At) -> String {
        let version = match at {
            At::There => {
                "(select (extract(epoch from v.committed_at) * 1000000)::bigint::text || ' ' || v.node \
                 from braid.row_version(tableoid, ctid) v)"
            }
            At::Here => "tableoid::oid::text || ' ' || ctid::text",
        };
        format!("xmin::text, {}, {version}", self.hash)
    }

    fn as_seen(&self, at: At, row: &[Option<String>]) -> Result<Seen, PgError> {
        let text = |index: usize| row.get(index).cloned().flatten();
        let version = match (at, text(2)) {
            (_, None) => None,
            (At::There, Some(version)) => read_version(&version),
            (At::Here, Some(row)) => match row.split_once(' ') {
                Some((relation, place)) => self.version_at(relation, place)?,
                None => None,
            },
        };
        Ok(Seen {
            xid: text(0).unwrap_or_default(),
            hash: text(1).unwrap_or_default(),
            version,
        })
    }

    /// Returns the version of the local row at a place.
    fn version_at(&self, relation: &str, place: &str) -> Result<Option<(i64, String)>, PgError> {
        let (Ok(relation), Some(place)) = (relation.parse::<u32>(), read_place(place)) else {
            return Ok(None);
        };
        let found = with_rights(Rights::ExtensionOwner, || {
            // The snapshot of the running statement may be older than the row.
            snapshot::latest(|| row_version(relation.into(), place, self.owner))
        })?;
        Ok(found.map(|version| (version.timestamp, version.node)))
    }

    /// Returns the local row with a key, locked until the transaction ends.
    ///
    /// # Errors
    /// Those of reading its version.
    pub fn lock(&self, key: &Key) -> Result<Option<Row>, PgError> {
        let columns: Vec<String> = self
            .columns
            .iter()
            .map(|column| quote_identifier(&column.name))
            .collect();
        let rows = self.run_here(&format!(
            "select {}, {} {} and {} for update",
            self.seen(At::Here),
            columns.join(", "),
            self.from(At::Here),
            self.is(At::Here, key),
        ));
        let Some(row) = rows.iter().next() else {
            return Ok(None);
        };
        let values = row.get(SEEN..).unwrap_or_default().to_vec();
        Ok(Some((self.as_seen(At::Here, row)?, values)))
    }

    /// SQL that inserts a local row.
    pub fn insert_sql(&self, values: &[Option<String>]) -> String {
        let columns: Vec<String> = self
            .columns
            .iter()
            .map(|column| quote_identifier(&column.name))
            .collect();
        let values: Vec<String> = values.iter().map(literal).collect();
        format!(
            "insert into {} ({}) overriding system value values ({})",
            self.qualified,
            columns.join(", "),
            values.join(", ")
        )
    }

    /// SQL that deletes the local row with a key.
    pub fn delete_sql(&self, key: &Key) -> String {
        format!(
            "delete {} and {}",
            self.from(At::Here),
            self.is(At::Here, key)
        )
    }

    /// SQL that updates the local row with a key. Only columns that differ are written.
    pub fn update_sql(
        &self,
        key: &Key,
        here: &[Option<String>],
        there: &[Option<String>],
    ) -> Option<String> {
        let changed: Vec<String> = self
            .columns
            .iter()
            .zip(here.iter().zip(there))
            .filter(|(_, (here, there))| here != there)
            .map(|(column, (_, there))| {
                format!("{} = {}", quote_identifier(&column.name), literal(there))
            })
            .collect();
        let [table, _] = &self.tables;
        (!changed.is_empty()).then(|| {
            format!(
                "update {table} set {} where {} and {}",
                changed.join(", "),
                self.filter,
                self.is(At::Here, key)
            )
        })
    }
}

/// Of a time in microseconds and a node's name.
fn read_version(text: &str) -> Option<(i64, String)> {
    let (timestamp, node) = text.split_once(' ')?;
    Some((timestamp.parse().ok()?, node.to_owned()))
}

/// Of the text `(block,number)`.
pub(super) fn read_place(text: &str) -> Option<pg_sys::ItemPointerData> {
    let (block, number) = text.strip_prefix('(')?.strip_suffix(')')?.split_once(',')?;
    let mut place = pg_sys::ItemPointerData::default();
    pgrx::itemptr::item_pointer_set_all(&mut place, block.parse().ok()?, number.parse().ok()?);
    Some(place)
}

fn literal(value: &Option<String>) -> String {
    value
        .as_deref()
        .map_or_else(|| "null".to_owned(), quote_literal)
}

/// Rows of a hash and a key.
fn listed(rows: &Rows) -> Vec<(Key, String)> {
    rows.iter()
        .filter_map(|row| {
            let hash = row.first()?.clone()?;
            let key: Option<Key> = row.get(1..)?.iter().cloned().collect();
            Some((key?, hash))
        })
        .collect()
}
