//! The provider's side of a copy: the snapshot, the published part of the table, and its rows. Run
//! by the copy workers.

use braid_bgworker::copy_query::{OwnRows, Published, planned_rows};
use braid_bgworker::reason::Reason;
use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::{provider_snapshot, routing_copy};
use braid_gir::{lsn_text, parse_lsn};
use braid_node::published;
use braid_node::subscription::{Subscription, publication_literals};
use braid_postgres::error::PgError;
use braid_postgres::libpq::{self, Connection, Mode};
use braid_postgres::rows::Rows;
use braid_postgres::server;

use super::blocked;
use crate::as_owner::AsOwner;

/// A connection to the provider in a transaction that sees the database as it was at `lsn`.
#[derive(Debug)]
pub struct Source {
    /// In the middle of the transaction.
    pub connection: Connection,
    /// Transactions whose commit lies before this are seen, later ones not.
    pub lsn: u64,
    /// The snapshot as the text of a `pg_snapshot`.
    pub snapshot: String,
    as_owner: AsOwner,
}

/// Tables of at most this many bytes are counted.
const COUNTED: i64 = 1024 * 1024;

/// SQL for the guard of the provider's table `c`, if that is routed. A provider without the
/// function has no routed tables. A guard that was copied with the table, by LIKE, depends on the
/// other table.
const GUARD: &str = "select pg_get_expr(k.conbin, k.conrelid) from pg_constraint k \
      where k.conrelid = c.oid and k.contype = 'c' and k.conname = 'braid_routing' \
        and exists (select from pg_proc f join pg_namespace s on s.oid = f.pronamespace where s.nspname = 'braid' and f.proname = 'is_at') \
        and not exists (select from pg_depend d where d.classid = 'pg_constraint'::regclass and d.objid = k.oid \
              and d.refclassid = 'pg_class'::regclass and d.refobjid <> k.conrelid)";

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
        let mut connection = connect(subscription, mode)?;
        let lsn = if snapshot.is_empty() {
            let lsn = take_snapshot(&mut connection)?;
            if connection.is_to_standby() && lsn < subscription.start_lsn {
                return Err(behind(lsn, subscription.start_lsn));
            }
            lsn
        } else {
            let import = format!("set transaction snapshot {}", quote_literal(snapshot));
            connection.query(&import).map_err(|error| {
                let error = PgError::from(error);
                if error.sqlstate.is_of("08") {
                    return error;
                }
                PgError::new(
                    SqlState::AdminShutdown,
                    "the provider no longer has the snapshot of the copy",
                )
                .with_detail(error.message)
            })?;
            lsn
        };
        Self::of(connection, lsn)
    }

    /// Connects, and sees the database as it is now, at no position: for reading the catalog.
    ///
    /// # Errors
    /// As [`Source::open`].
    pub fn look(subscription: &Subscription) -> Result<Self, PgError> {
        Self::of(connect(subscription, Mode::Sql)?, 0)
    }

    fn of(mut connection: Connection, lsn: u64) -> Result<Self, PgError> {
        let snapshot = connection
            .query("select pg_catalog.pg_current_snapshot()")?
            .get(0, 0)
            .map(provider_snapshot::ordered)
            .unwrap_or_default();
        let as_owner = AsOwner::in_transaction(&mut connection)?;
        Ok(Self {
            connection,
            lsn,
            snapshot,
            as_owner,
        })
    }

    /// Returns what the subscription's publications publish of a table, without this node's own
    /// rows. If the table is routed, these are the rows that belong to this node, `node`.
    ///
    /// # Errors
    /// The provider's; 42P01 if none publishes the table; 0A000 if they differ in columns.
    pub fn published(
        &mut self,
        publications: &[String],
        namespace: &str,
        name: &str,
        own: Option<OwnRows>,
        node: &str,
    ) -> Result<Published, PgError> {
        let as_owner = self.as_owner;
        published(
            &mut self.connection,
            as_owner,
            publications,
            namespace,
            name,
            own,
            node,
        )
    }

    /// Starts the COPY of the rows. [`Source::finish`] ends it once all rows have arrived.
    ///
    /// # Errors
    /// The provider's, with a hint.
    pub fn start(&mut self, published: &Published, columns: &[String]) -> Result<(), PgError> {
        let command = published.command(columns, &server::database_encoding());
        self.start_copy(published, &command).map_err(unreadable)
    }

    /// Starts a COPY that reads the table, as its owner. [`Source::finish`] ends it once all rows
    /// have arrived.
    ///
    /// # Errors
    /// The provider's.
    pub fn start_copy(&mut self, published: &Published, command: &str) -> libpq::Result<()> {
        self.as_owner.start(&mut self.connection, published.oid)?;
        self.connection.start_copy(command)
    }

    /// All rows have come.
    ///
    /// # Errors
    /// The provider's.
    pub fn finish(&mut self) -> libpq::Result<()> {
        self.as_owner.stop(&mut self.connection)
    }

    /// Ends the transaction, and with it the look at the database as it was. The connection stays.
    ///
    /// # Errors
    /// The provider's.
    pub fn commit(&mut self) -> libpq::Result<()> {
        self.connection.query("commit")?;
        self.as_owner = self.as_owner.after_transaction();
        Ok(())
    }

    /// Runs a query of the table, as its owner.
    ///
    /// # Errors
    /// The provider's.
    pub fn query(&mut self, published: &Published, query: &str) -> libpq::Result<Rows> {
        let table = published.oid.to_string();
        self.as_owner.query(&mut self.connection, &table, query)
    }
}

/// The error for a snapshot of a standby that has not replayed all WAL before the stream:
/// transactions in between would be in neither.
fn behind(lsn: u64, start: u64) -> PgError {
    PgError::new(
        SqlState::CannotConnectNow,
        format!(
            "the provider is a standby that has replayed WAL up to {}, before {}, where the stream begins",
            lsn_text(lsn),
            lsn_text(start)
        ),
    )
    .with_hint("The table is copied again by itself.")
}

fn connect(subscription: &Subscription, mode: Mode) -> Result<Connection, PgError> {
    let application_name = format!("{} copy", subscription.name);
    let mut connection = Connection::open(&subscription.dsn, &application_name, mode)?;
    connection.look_into_silence(&subscription.dsn)?;
    blocked::watch(&mut connection, subscription)?;
    connection.query(SETTINGS)?;
    connection.lift_transaction_timeout()?;
    connection.query("begin isolation level repeatable read read only")?;
    Ok(connection)
}

/// Returns what publications publish of a table, without the rows that are `own`. If the table is
/// routed, these are the rows that belong to a node.
///
/// # Errors
/// Those of [`Source::published`].
pub(crate) fn published(
    connection: &mut Connection,
    as_owner: AsOwner,
    publications: &[String],
    namespace: &str,
    name: &str,
    own: Option<OwnRows>,
    node: &str,
) -> Result<Published, PgError> {
    let table = format!("{namespace}.{name}");
    let quoted = format!("{}.{}", quote_identifier(namespace), quote_identifier(name));
    // A table of the snapshot that is another one by now is not the one that would be read.
    let rows = connection.query(&format!(
        "select c.oid, c.relkind, {}::text, pg_get_expr(g.qual, c.oid), ({GUARD}) \
           from pg_class c join pg_namespace n on n.oid = c.relnamespace, lateral {} g \
          where n.nspname = {} and c.relname = {} and c.oid = to_regclass({}) order by g.pubname",
        published::column_names(connection.server_version()),
        published::of_table(publications),
        quote_literal(namespace),
        quote_literal(name),
        quote_literal(&quoted)
    ))?;
    // A table without columns has no names, and not an empty list of them.
    let no_names = "{}";
    let (Some(oid), names) = (rows.get(0, 0), rows.get(0, 2).unwrap_or(no_names)) else {
        return Err(unpublished(connection, publications, namespace, name)?);
    };
    if rows
        .iter()
        .any(|row| row.get(2).and_then(Option::as_deref).unwrap_or(no_names) != names)
    {
        return Err(PgError::new(
            SqlState::FeatureNotSupported,
            format!(
                "cannot use different column lists for table \"{table}\" in different publications"
            ),
        )
        .with_hint(
            "Give the table the same column list in all publications of the subscription.",
        ));
    }
    let filters = filters(&rows);
    // A constraint of that name that is no guard does not make the table a routed one.
    let guard = rows.get(0, 4).filter(|guard| routing_copy::is_guard(guard));
    let routed = guard
        .map(|guard| {
            routing_copy::condition(guard, node).ok_or_else(|| {
                // Without it all rows would come, and some belong to other nodes.
                PgError::new(
                    SqlState::FeatureNotSupported,
                    format!("the constraint braid_routing of table \"{table}\" cannot be read"),
                )
                .with_detail(format!("At the provider it is: {guard}."))
                .with_hint("Drop the constraint there, and route the table with braid.route_table.")
            })
        })
        .transpose()?;
    let partitioned = rows.get(0, 1) == Some("p");
    let (oid, names) = (oid.to_owned(), names.to_owned());
    // Before 18, generated columns are listed in some cases but never sent.
    let sent = if connection.server_version() < 180_000 {
        "and attgenerated = ''"
    } else {
        ""
    };
    let columns = connection.query(&format!(
        "select attname, attgenerated <> '', exists (select from pg_index i where i.indrelid = attrelid \
                and (i.indisprimary or i.indisreplident) and attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])) \
           from pg_attribute \
          where attrelid = {oid} and attnum > 0 and not attisdropped {sent} and attname = any ({}::name[]) \
          order by attnum",
        quote_literal(&names)
    ))?;
    let is_true = |row: &[Option<String>], place: usize| {
        row.get(place).and_then(Option::as_deref) == Some("t")
    };
    let mut published = Published {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        columns: columns
            .iter()
            .filter_map(|row| row.first().cloned().flatten())
            .collect(),
        keys: columns
            .iter()
            .filter(|row| is_true(row, 2))
            .filter_map(|row| row.first().cloned().flatten())
            .collect(),
        filters,
        partitioned,
        oid: oid.parse().unwrap_or(0),
        own,
        routed,
        generated: columns.iter().any(|row| is_true(row, 1)),
        rows: None,
        bytes: None,
    };
    measure(connection, as_owner, &oid, &mut published).map_err(unreadable)?;
    Ok(published)
}

/// Why nothing is published of a table. The transaction sees the catalog as of its snapshot,
/// functions see it as it is now.
fn unpublished(
    connection: &mut Connection,
    publications: &[String],
    namespace: &str,
    name: &str,
) -> Result<PgError, PgError> {
    let table = format!("{namespace}.{name}");
    let quoted = format!("{}.{}", quote_identifier(namespace), quote_identifier(name));
    let now = format!("to_regclass({})", quote_literal(&quoted));
    let found = connection.query(&format!(
        "select {now} is not null, exists (select from pg_publication p, pg_get_publication_tables(p.pubname::text) g \
         where p.pubname in ({}) and g.relid = {now})",
        publication_literals(publications)
    ))?;
    if found.get(0, 0) != Some("t") {
        return Ok(PgError::new(
            SqlState::UndefinedTable,
            "the provider has no such table any more",
        )
        .with_detail(format!("The table is \"{table}\"."))
        .for_reason(Reason::TableDropped));
    }
    if found.get(0, 1) == Some("t") {
        return Ok(PgError::new(
            SqlState::SerializationFailure,
            format!("table \"{table}\" was created again at the provider"),
        )
        .with_hint("The table is copied again by itself."));
    }
    Ok(PgError::new(SqlState::UndefinedTable, format!("the provider does not publish table \"{table}\"")).with_hint(
        "Publish it there, or take it out of the subscription with braid.refresh_subscription, then run \
         braid.enable_subscription.",
    ))
}

/// The size of the copy: counted in a small table, else as the provider's planner estimates it. The
/// planner knows the table's size and filters also if the table was never analyzed. If that fails,
/// the size is not known: the copy itself need not plan a query, and reports the error if it has
/// the same one.
fn measure(
    connection: &mut Connection,
    as_owner: AsOwner,
    oid: &str,
    published: &mut Published,
) -> libpq::Result<()> {
    let sizes = connection.query(&format!(
        "select sum(pg_table_size(oid))::bigint, sum(pg_relation_size(oid))::bigint from pg_class \
          where relkind <> 'p' and (oid = {oid} or oid in (select relid from pg_partition_tree({oid})))"
    ))?;
    let number = |column| sizes.get(0, column).and_then(|text| text.parse().ok());
    published.bytes = number(0);
    let rows = published.rows_clause();
    published.rows = if number(1).unwrap_or(0) <= COUNTED {
        let count = known(as_owner.query(connection, oid, &format!("select count(*) {rows}")))?;
        count.get(0, 0).and_then(|text| text.parse().ok())
    } else {
        let plan = known(as_owner.query(connection, oid, &format!("explain select {rows}")))?;
        plan.get(0, 0).and_then(planned_rows)
    };
    Ok(())
}

/// No rows if the other node refuses the query.
fn known(found: libpq::Result<Rows>) -> libpq::Result<Rows> {
    match found {
        Err(libpq::Error::Server { .. }) => Ok(Rows::default()),
        found => found,
    }
}

fn unreadable(error: libpq::Error) -> PgError {
    let error = PgError::from(error);
    match error.sqlstate {
        SqlState::InsufficientPrivilege => error.with_hint(
            "At the provider, grant the connecting role USAGE on the schema, SELECT on the table, and BYPASSRLS if the \
             table has row-level security; then run braid.enable_subscription.",
        ),
        // The next attempt finds out whether it was made anew.
        SqlState::UndefinedTable => PgError::new(SqlState::SerializationFailure, "a table was dropped at the provider while it was copied")
            .with_detail(error.message)
            .with_hint("The table is copied again by itself."),
        _ => error,
    }
}

/// The error of creating a slot, for a provider that has no snapshot to give: another attempt gets
/// one. PostgreSQL 15 has none if its configuration was loaded again while it waited for running
/// transactions: checking the settings takes a snapshot of the catalogs. The error is XX000.
pub(crate) fn without_snapshot(error: PgError) -> PgError {
    if error.sqlstate != SqlState::InternalError {
        return error;
    }
    PgError::new(
        SqlState::SerializationFailure,
        "the provider could not take a snapshot",
    )
    .with_detail(format!("The provider reported: {}.", error.message))
    .with_hint("The next attempt is made by itself.")
}

/// A temporary slot is only made for the snapshot that comes with it, and for the position that
/// belongs to that.
fn take_snapshot(connection: &mut Connection) -> Result<u64, PgError> {
    let system = server::system_identifier();
    // Many nodes may copy from one provider.
    let slot = quote_identifier(&format!(
        "braid_tmp_{system:x}_{}",
        braid_postgres::process::my_pid()
    ));
    let created = connection.query(&format!(
        "CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL braid (SNAPSHOT 'use')"
    ));
    let rows = created.map_err(|error| without_snapshot(error.into()))?;
    let lsn = rows.get(0, 1).and_then(parse_lsn).ok_or_else(|| {
        PgError::new(
            SqlState::ProtocolViolation,
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
