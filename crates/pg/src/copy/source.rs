//! The provider's side of a copy: the snapshot, what of the table is published, and its rows. Run by the copy workers.

use pgrx::pg_sys;

use crate::error::PgError;
use crate::libpq::{self, Connection, Mode, Rows, quote_identifier, quote_literal};
use crate::subscription::{Subscription, parse_lsn, publication_literals};

/// A connection to the provider in a transaction that sees the database as it was at `lsn`.
#[derive(Debug)]
pub struct Source {
    /// In the middle of the transaction.
    pub connection: Connection,
    /// Transactions whose commit lies before this are seen, later ones not.
    pub lsn: u64,
    /// The same, as the text of a `pg_snapshot`.
    pub snapshot: String,
}

/// What is published of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    namespace: String,
    name: String,
    /// Names of the columns that are sent.
    pub columns: Vec<String>,
    /// Rows for which one of these is true; all rows when there is none.
    filters: Vec<String>,
    partitioned: bool,
    /// At the provider.
    oid: u32,
    /// Rows that are not copied.
    own: Option<OwnRows>,
    /// A generated column is among the columns.
    generated: bool,
    /// Rows, by an estimate.
    pub rows: Option<i64>,
    /// Bytes on the provider's disk.
    pub bytes: Option<i64>,
}

/// Tables of at most this many bytes are counted.
const COUNTED: i64 = 1024 * 1024;

/// Rows of which this node has written the latest version after a time: it has them, whatever became of them since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnRows {
    /// Name of this node.
    pub node: String,
    /// The time, as PostgreSQL writes it in ISO style.
    pub since: String,
}

const SETTINGS: &str = "set statement_timeout = 0; set lock_timeout = 0; set idle_in_transaction_session_timeout = 0; \
     set search_path = pg_catalog; set row_security = off; set client_encoding = 'UTF8'";

impl Source {
    /// Connect, and import `snapshot`, or take a new one when it is empty.
    ///
    /// # Errors
    /// The provider's, or 08006. A snapshot that is gone is 57P01: another attempt takes a new one.
    pub fn open(subscription: &Subscription, snapshot: &str, lsn: u64) -> Result<Self, PgError> {
        let mode = if snapshot.is_empty() {
            Mode::Replication
        } else {
            Mode::Sql
        };
        let application_name = format!("{} copy", subscription.name);
        let mut connection = Connection::open(&subscription.dsn, &application_name, mode)?;
        connection.query(SETTINGS)?;
        if connection.server_version() >= 170_000 {
            connection.query("set transaction_timeout = 0")?;
        }
        connection.query("begin isolation level repeatable read read only")?;
        let lsn = if snapshot.is_empty() {
            take_snapshot(&mut connection)?
        } else {
            let import = format!("set transaction snapshot {}", quote_literal(snapshot));
            connection.query(&import).map_err(|error| {
                let error = PgError::from(error);
                if error.sqlstate.starts_with("08") {
                    return error;
                }
                PgError::new(
                    "57P01",
                    "the provider no longer has the snapshot of the copy",
                )
                .with_detail(error.message)
            })?;
            lsn
        };
        let snapshot = connection
            .query("select pg_catalog.pg_current_snapshot()")?
            .get(0, 0)
            .unwrap_or_default()
            .to_owned();
        Ok(Self {
            connection,
            lsn,
            snapshot,
        })
    }

    /// What the subscription's publications publish of a table, without this node's own rows.
    ///
    /// # Errors
    /// The provider's; 42P01 when none publishes it; 0A000 when they differ in columns.
    pub fn published(
        &mut self,
        publications: &[String],
        namespace: &str,
        name: &str,
        own: Option<OwnRows>,
    ) -> Result<Published, PgError> {
        published(&mut self.connection, publications, namespace, name, own)
    }

    /// Let the rows come.
    ///
    /// # Errors
    /// The provider's, with a hint.
    pub fn start(&mut self, published: &Published, columns: &[String]) -> Result<(), PgError> {
        self.connection
            .start_copy(&published.command(columns, &local_encoding()))
            .map_err(unreadable)
    }
}

/// What publications publish of a table, without the rows that are `own`.
///
/// # Errors
/// As [`Source::published`].
pub(crate) fn published(
    connection: &mut Connection,
    publications: &[String],
    namespace: &str,
    name: &str,
    own: Option<OwnRows>,
) -> Result<Published, PgError> {
    let table = format!("{namespace}.{name}");
    let rows = connection.query(&format!(
        "select c.oid, c.relkind, t.attnames::text, t.rowfilter \
           from pg_publication_tables t \
           join pg_namespace n on n.nspname = t.schemaname \
           join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename \
          where t.pubname in ({}) and t.schemaname = {} and t.tablename = {} order by t.pubname",
        publication_literals(publications),
        quote_literal(namespace),
        quote_literal(name)
    ))?;
    let (Some(oid), Some(names)) = (rows.get(0, 0), rows.get(0, 2)) else {
        return Err(PgError::new("42P01", format!("the provider does not publish table \"{table}\""))
            .with_hint(
                "Publish it there, or take it out of the subscription with braid.refresh_subscription, then run \
                 braid.enable_subscription.",
            ));
    };
    if rows
        .iter()
        .any(|row| row.get(2).and_then(Option::as_deref) != Some(names))
    {
        return Err(PgError::new(
            "0A000",
            format!(
                "cannot use different column lists for table \"{table}\" in different publications"
            ),
        )
        .with_hint(
            "Give the table the same column list in all publications of the subscription.",
        ));
    }
    let filters = filters(&rows);
    let partitioned = rows.get(0, 1) == Some("p");
    let (oid, names) = (oid.to_owned(), names.to_owned());
    // Before 18, generated columns are listed in some cases but never sent.
    let sent = if connection.server_version() < 180_000 {
        "and attgenerated = ''"
    } else {
        ""
    };
    let columns = connection.query(&format!(
        "select attname, attgenerated <> '' from pg_attribute \
          where attrelid = {oid} and attnum > 0 and not attisdropped {sent} and attname = any ({}::name[]) \
          order by attnum",
        quote_literal(&names)
    ))?;
    let mut published = Published {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        columns: columns
            .iter()
            .filter_map(|row| row.first().cloned().flatten())
            .collect(),
        filters,
        partitioned,
        oid: oid.parse().unwrap_or(0),
        own,
        generated: columns
            .iter()
            .any(|row| row.get(1).and_then(Option::as_deref) == Some("t")),
        rows: None,
        bytes: None,
    };
    measure(connection, &oid, &mut published).map_err(unreadable)?;
    Ok(published)
}

/// How much there is to copy: counted in a small table, else as the provider's planner estimates it, which knows the table's
/// size and filters also when it was never analyzed.
fn measure(connection: &mut Connection, oid: &str, published: &mut Published) -> libpq::Result<()> {
    let sizes = connection.query(&format!(
        "select sum(pg_table_size(oid))::bigint, sum(pg_relation_size(oid))::bigint from pg_class \
          where relkind <> 'p' and (oid = {oid} or oid in (select relid from pg_partition_tree({oid})))"
    ))?;
    let number = |column| sizes.get(0, column).and_then(|text| text.parse().ok());
    published.bytes = number(0);
    let rows = published.rows_clause();
    published.rows = if number(1).unwrap_or(0) <= COUNTED {
        let count = connection.query(&format!("select count(*) {rows}"))?;
        count.get(0, 0).and_then(|text| text.parse().ok())
    } else {
        let plan = connection.query(&format!("explain select {rows}"))?;
        plan.get(0, 0).and_then(planned_rows)
    };
    Ok(())
}

fn unreadable(error: libpq::Error) -> PgError {
    let error = PgError::from(error);
    match error.sqlstate.as_str() {
        "42501" => error.with_hint(
            "At the provider, grant the connecting role USAGE on the schema, SELECT on the table, and BYPASSRLS if the \
             table has row-level security; then run braid.enable_subscription.",
        ),
        _ => error,
    }
}

/// A temporary slot is only made for the snapshot that comes with it, and for the position that belongs to that.
fn take_snapshot(connection: &mut Connection) -> Result<u64, PgError> {
    // SAFETY: reads shared state that is set when the server starts.
    let system = unsafe { pg_sys::GetSystemIdentifier() };
    // Many nodes may copy from one provider.
    let slot = quote_identifier(&format!(
        "braid_tmp_{system:x}_{}",
        crate::registry::my_pid()
    ));
    let rows = connection.query(&format!(
        "CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL braid (SNAPSHOT 'use')"
    ))?;
    let lsn = rows.get(0, 1).and_then(parse_lsn).ok_or_else(|| {
        PgError::new(
            "08P01",
            "unexpected answer from the provider to CREATE_REPLICATION_SLOT",
        )
    })?;
    // The transaction keeps the snapshot; the slot would only keep WAL.
    connection.query(&format!("DROP_REPLICATION_SLOT {slot}"))?;
    Ok(lsn)
}

/// A publication without a filter publishes all rows, whatever the others filter.
fn filters(rows: &Rows) -> Vec<String> {
    let all: Option<Vec<String>> = rows
        .iter()
        .map(|row| row.get(3).cloned().flatten())
        .collect();
    let mut filters = all.unwrap_or_default();
    filters.sort();
    filters.dedup();
    filters
}

fn local_encoding() -> String {
    // SAFETY: a static string of PostgreSQL's.
    unsafe { std::ffi::CStr::from_ptr(pg_sys::GetDatabaseEncodingName()) }
        .to_string_lossy()
        .into_owned()
}

impl Published {
    /// The COPY command. Its encoding is given apart from the connection's, in which names travel.
    fn command(&self, columns: &[String], encoding: &str) -> String {
        let columns: Vec<String> = columns.iter().map(|name| quote_identifier(name)).collect();
        let columns = columns.join(", ");
        let encoding = quote_literal(encoding);
        let plain = self.filters.is_empty() && self.own.is_none();
        if plain && !self.partitioned && !self.generated && !columns.is_empty() {
            return format!(
                "copy {} ({columns}) to stdout (encoding {encoding})",
                self.qualified()
            );
        }
        format!(
            "copy (select {columns} {}) to stdout (encoding {encoding})",
            self.rows_clause()
        )
    }

    /// The COPY command for the versions of the rows that were written since `since` (seconds since 1970-01-01 UTC): hash of the key, each
    /// of them where there are two, microseconds since then, node.
    pub(crate) fn versions_command(&self, since: i64) -> String {
        let table = self.qualified();
        let lately = format!("braid.commit_timestamp({table}.xmin) >= to_timestamp({since})");
        let rows = self.rows_clause_with(Some(lately));
        format!(
            "copy (select h.hash, (extract(epoch from v.committed_at) * 1000000)::bigint, v.node \
             from (select {table}.tableoid as tableoid, {table}.ctid as ctid {rows}) as r, \
             lateral braid.row_version(r.tableoid, r.ctid) as v, \
             lateral (values (v.key_hash), (v.other_hash)) as h (hash) where h.hash is not null) to stdout (encoding 'UTF8')"
        )
    }

    /// The same for what was deleted: hash of the key, microseconds, node.
    pub(crate) fn deletions_command(&self, since: i64) -> String {
        format!(
            "copy (select key_hash, deleted_at, node from braid.copied_deletions({}, to_timestamp({since}))) to stdout (encoding 'UTF8')",
            self.oid
        )
    }

    /// The query for the tables by whose OIDs the provider knows the keys of these rows.
    pub(crate) fn tables_query(&self) -> String {
        format!(
            "select {oid}::oid union select relid from pg_partition_tree({oid})",
            oid = self.oid
        )
    }

    fn qualified(&self) -> String {
        format!(
            "{}.{}",
            quote_identifier(&self.namespace),
            quote_identifier(&self.name)
        )
    }

    /// Whether the provider's table is partitioned.
    pub(crate) fn is_partitioned(&self) -> bool {
        self.partitioned
    }

    /// True for the rows that are published; `None`: all are.
    pub(crate) fn filter(&self) -> Option<String> {
        let filters: Vec<String> = self
            .filters
            .iter()
            .map(|filter| format!("({filter})"))
            .collect();
        (!filters.is_empty()).then(|| format!("({})", filters.join(" or ")))
    }

    /// FROM and WHERE.
    fn rows_clause(&self) -> String {
        self.rows_clause_with(None)
    }

    /// The same, with one condition more.
    fn rows_clause_with(&self, more: Option<String>) -> String {
        // Tables that inherit from an ordinary table are published, and copied, on their own.
        let only = if self.partitioned { "" } else { "only " };
        let published = self.filter();
        let foreign = self
            .own
            .as_ref()
            .map(|own| own.condition(&self.qualified()));
        let conditions: Vec<String> = published.into_iter().chain(foreign).chain(more).collect();
        let condition = if conditions.is_empty() { "" } else { " where " };
        format!(
            "from {only}{}{condition}{}",
            self.qualified(),
            conditions.join(" and ")
        )
    }
}

impl OwnRows {
    /// True for other rows. Replication origins are named `braid/<node>/<number>`; a commit keeps the timestamp that it had where it
    /// was made, so that all of this is by this node's clock.
    fn condition(&self, table: &str) -> String {
        let origin = format!("braid/{}/", self.node);
        let digits = origin.chars().count() + 1;
        format!(
            "not exists (select from pg_xact_commit_timestamp_origin({table}.xmin) as written \
             join pg_replication_origin as origin on origin.roident = written.roident \
             where written.timestamp >= {} and starts_with(origin.roname, {}) \
             and substr(origin.roname, {digits}) ~ '^[0-9]+$')",
            quote_literal(&self.since),
            quote_literal(&origin),
        )
    }
}

/// The estimate in the first line of a plan: `Seq Scan on t  (cost=0.00..1.00 rows=100 width=4)`.
fn planned_rows(line: &str) -> Option<i64> {
    let (_, rest) = line.split_once(" rows=")?;
    rest.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{OwnRows, Published, planned_rows};

    fn published() -> Published {
        Published {
            namespace: "public".to_owned(),
            name: "odd \"one\"".to_owned(),
            columns: vec!["a".to_owned(), "B".to_owned()],
            filters: Vec::new(),
            partitioned: false,
            oid: 16384,
            own: None,
            generated: false,
            rows: None,
            bytes: None,
        }
    }

    #[test]
    fn a_plain_table_is_copied_without_a_query() {
        let published = published();
        assert_eq!(
            published.command(&published.columns, "LATIN1"),
            r#"copy "public"."odd ""one""" ("a", "B") to stdout (encoding 'LATIN1')"#
        );
    }

    #[test]
    fn filters_are_alternatives_and_children_stay_out() {
        let mut published = published();
        published.filters = vec!["a > 1".to_owned(), "(b IS NULL)".to_owned()];
        assert_eq!(
            published.command(&published.columns, "UTF8"),
            r#"copy (select "a", "B" from only "public"."odd ""one""" where ((a > 1) or ((b IS NULL)))) to stdout (encoding 'UTF8')"#
        );
        published.partitioned = true;
        published.filters.clear();
        assert_eq!(
            published.command(&published.columns, "UTF8"),
            r#"copy (select "a", "B" from "public"."odd ""one""") to stdout (encoding 'UTF8')"#
        );
    }

    #[test]
    fn versions_are_those_of_the_rows_that_are_copied() {
        let mut published = published();
        published.name = "a where b".to_owned();
        let command = published.versions_command(7);
        assert!(command.contains(
            r#"from only "public"."a where b" where braid.commit_timestamp("public"."a where b".xmin) >= to_timestamp(7)) as r"#
        ));
        published.filters = vec!["a > 1".to_owned()];
        let command = published.versions_command(7);
        assert!(command.contains(
            r#"where ((a > 1)) and braid.commit_timestamp("public"."a where b".xmin) >= to_timestamp(7)) as r"#
        ));
    }

    #[test]
    fn own_rows_are_told_by_time_and_origin() {
        let mut published = published();
        published.filters = vec!["a > 1".to_owned()];
        published.own = Some(OwnRows {
            node: "pa'ris".to_owned(),
            since: "2026-01-01 00:00:00+00".to_owned(),
        });
        let command = published.command(&published.columns, "UTF8");
        assert!(command.contains(r#"where ((a > 1)) and not exists (select from pg_xact_commit_timestamp_origin("public"."odd ""one""".xmin)"#));
        assert!(command.contains("starts_with(origin.roname, 'braid/pa''ris/')"));
        assert!(command.contains("substr(origin.roname, 14)"));
    }

    #[test]
    fn the_planner_estimates() {
        let line = "Seq Scan on pgbench_accounts  (cost=0.00..26394.00 rows=1000000 width=97)";
        assert_eq!(planned_rows(line), Some(1_000_000));
        assert_eq!(planned_rows("Seq Scan on t"), None);
    }
}
