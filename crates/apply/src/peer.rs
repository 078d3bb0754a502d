//! Connections to other nodes over which an applier asks for columns of one row, and the question
//! as SQL. Run by the appliers.
//!
//! A question takes no lock on rows, so it waits for nothing but whoever has the whole table for
//! itself there, and for that not longer than `lock_timeout`. What is known by then is an error;
//! the transaction in hand is applied again.

use std::collections::HashMap;
use std::ffi::CString;
use std::time::{Duration, Instant};

use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::encoding;
use braid_postgres::error::PgError;
use braid_postgres::libpq::{Cells, Connection, Mode};
use braid_postgres::server;
use braid_postgres::wait::Wait;

/// A connection that was not used for so long is closed.
const KEPT: Duration = Duration::from_secs(60);
/// Waiting for a lock at a peer ends after this part of the time for its answer.
const LOCK_PART: u32 = 4;

/// Who is asked.
#[derive(Clone)]
pub(super) struct Source {
    /// Subscription whose provider it is.
    pub(super) subscription: u32,
    /// Name of that, which the connection shows there.
    pub(super) name: String,
    /// Name of the node.
    pub(super) node: String,
    /// Its connection string. Never to be logged or shown.
    pub(super) dsn: String,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Source({})", self.name)
    }
}

/// From when on an answer says what is asked.
#[derive(Debug, Clone, Copy)]
pub(super) enum AsOf {
    /// With what this transaction of the peer has written.
    Transaction(u32),
    /// With a row that is no older than this, microseconds since 1970-01-01 UTC.
    Version(i64),
}

/// Form in which a value is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Bytes of a bytea.
    Bytes,
    /// The output function's text.
    Text,
    /// No column: when the transaction that wrote the row was committed, microseconds since
    /// 1970-01-01 UTC.
    CommitTime,
}

/// A column that is asked for.
#[derive(Debug, Clone)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) form: Form,
}

/// What is asked: columns of the row with this key.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
    pub(super) columns: &'a [Column],
    /// Names and values as text in this database's encoding.
    pub(super) key: &'a [(String, CString)],
    pub(super) as_of: AsOf,
}

/// What a peer knows.
#[derive(Debug)]
pub(super) enum Reply {
    /// Columns of the row, in the order of the question.
    Row(Vec<Option<Vec<u8>>>),
    /// There is no such row.
    None,
    /// There is no such table, or no such column in it, any more.
    NoTable,
}

struct Peer {
    dsn: String,
    connection: Connection,
    /// The operators by which the columns of a table's replica identity are compared, by table.
    equalities: HashMap<String, Vec<(String, String)>>,
    used: Instant,
}

/// The connections of a process.
#[derive(Default)]
pub(super) struct Peers {
    by_subscription: HashMap<u32, Peer>,
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Peers({})", self.by_subscription.len())
    }
}

impl Peers {
    /// Ask. The answer comes with whether it is as of what was asked for, or may be older.
    ///
    /// # Errors
    /// The peer's; 08006 without a connection; 57014 past the deadline.
    pub(super) fn ask(
        &mut self,
        source: &Source,
        question: &Question<'_>,
        deadline: Instant,
    ) -> Result<(Reply, bool), PgError> {
        // It is put back once it has answered: what goes wrong closes it, also when this is
        // interrupted.
        let known = self.by_subscription.remove(&source.subscription);
        let fresh = known
            .as_ref()
            .is_none_or(|peer| peer.dsn != source.dsn || !peer.connection.is_open());
        let mut peer = match known {
            Some(peer) if !fresh => peer,
            _ => Peer::open(source, deadline)?,
        };
        let answer = match peer.ask(question, deadline) {
            // An old connection may have been cut while nobody looked.
            Err(error) if !fresh && error.sqlstate.is_of("08") => {
                peer = Peer::open(source, deadline)?;
                peer.ask(question, deadline)
            }
            answer => answer,
        };
        let answer = match answer {
            // undefined_table, invalid_schema_name, undefined_column, undefined_function,
            // cannot_coerce
            Err(error)
                if matches!(
                    error.sqlstate,
                    SqlState::UndefinedTable
                        | SqlState::InvalidSchemaName
                        | SqlState::UndefinedColumn
                        | SqlState::UndefinedFunction
                        | SqlState::CannotCoerce
                ) =>
            {
                return Ok((Reply::NoTable, true));
            }
            answer => answer?,
        };
        peer.used = Instant::now();
        self.by_subscription.insert(source.subscription, peer);
        Ok(answer)
    }

    /// Close what was not used for a while.
    pub(super) fn close_unused(&mut self) {
        self.by_subscription
            .retain(|_, peer| peer.used.elapsed() < KEPT);
    }
}

impl Peer {
    fn open(source: &Source, deadline: Instant) -> Result<Self, PgError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let name = format!("{} querier", source.name);
        let mut connection = Connection::open_within(&source.dsn, &name, Mode::Sql, left)?;
        let encoding = CString::new(server::database_encoding()).unwrap_or_default();
        let milliseconds =
            |time: Duration| CString::new(time.as_millis().max(1).to_string()).unwrap_or_default();
        let limit = braid_node::settings::querier_timeout();
        connection.ask(
            c"select pg_catalog.set_config('statement_timeout', $1, false), pg_catalog.set_config('lock_timeout', $2, false), \
              pg_catalog.set_config('client_encoding', $3, false), pg_catalog.set_config('search_path', 'pg_catalog', false), \
              pg_catalog.set_config('row_security', 'off', false), pg_catalog.set_config('default_transaction_read_only', 'on', false)",
            &[
                milliseconds(limit),
                milliseconds(limit / LOCK_PART),
                encoding,
            ],
            deadline,
            Wait::Querier,
        )?;
        Ok(Self {
            dsn: source.dsn.clone(),
            connection,
            equalities: HashMap::new(),
            used: Instant::now(),
        })
    }

    fn ask(
        &mut self,
        question: &Question<'_>,
        deadline: Instant,
    ) -> Result<(Reply, bool), PgError> {
        let table = question.table();
        if !self.equalities.contains_key(&table) {
            let found = self.find_equalities(&table, deadline)?;
            self.equalities.insert(table.clone(), found);
        }
        let equalities = self
            .equalities
            .get(&table)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let sql = in_local_encoding(&question.sql(equalities))?;
        let parameters: Vec<CString> = question.key.iter().map(|(_, text)| text.clone()).collect();
        let cells = self
            .connection
            .ask(&sql, &parameters, deadline, Wait::Querier)?;
        let flag = |column| cells.get(0, column) == Some(b"t");
        let current = flag(0);
        if cells.is_empty() || !flag(1) {
            return Ok((Reply::None, current));
        }
        Ok((
            Reply::Row(values(&cells, 2, question.columns.len())),
            current,
        ))
    }

    /// The operators of the table's replica identity: those of its index, wherever they are.
    fn find_equalities(
        &mut self,
        table: &str,
        deadline: Instant,
    ) -> Result<Vec<(String, String)>, PgError> {
        let table = in_local_encoding(table)?;
        let cells = self.connection.ask(
            c"select a.attname::text, n.nspname::text, o.oprname::text from pg_class c \
              join pg_index i on i.indrelid = c.oid and case c.relreplident when 'i' then i.indisreplident else i.indisprimary end \
              cross join lateral generate_series(0, i.indnkeyatts - 1) p \
              join pg_attribute a on a.attrelid = c.oid and a.attnum = i.indkey[p] \
              join pg_opclass k on k.oid = i.indclass[p] \
              join pg_amop m on m.amopfamily = k.opcfamily and m.amoplefttype = k.opcintype and m.amoprighttype = k.opcintype \
                and m.amopstrategy = 3 \
              join pg_operator o on o.oid = m.amopopr join pg_namespace n on n.oid = o.oprnamespace \
              where c.oid = pg_catalog.to_regclass($1)",
            &[table],
            deadline,
            Wait::Querier,
        )?;
        let text = |row, column| {
            let bytes: &[u8] = cells.get(row, column).unwrap_or_default();
            from_local_encoding(bytes)
        };
        Ok((0..cells.len())
            .map(|row| {
                let (schema, operator) = (text(row, 1), text(row, 2));
                let schema = quote_identifier(&schema);
                (text(row, 0), format!("operator({schema}.{operator})"))
            })
            .collect())
    }
}

fn values(cells: &Cells, first: usize, count: usize) -> Vec<Option<Vec<u8>>> {
    (first..first + count)
        .map(|column| cells.get(0, column).map(<[u8]>::to_vec))
        .collect()
}

impl Question<'_> {
    fn table(&self) -> String {
        format!(
            "{}.{}",
            quote_identifier(self.namespace),
            quote_identifier(self.name)
        )
    }

    /// One row, whether there is such a row or not: is it as of what was asked for, is there one,
    /// and its columns. All of one snapshot. Rows of tables that inherit from the table are not its
    /// own; a partitioned table's are its partitions'.
    fn sql(&self, equalities: &[(String, String)]) -> String {
        let columns: String = self
            .columns
            .iter()
            .map(|column| {
                let name = quote_identifier(&column.name);
                match column.form {
                    Form::Bytes => format!(", t.{name}::bytea"),
                    // What its output function writes, whatever casts its type has.
                    Form::Text => format!(", case num_nulls(t.{name}) when 0 then concat(t.{name}) end"),
                    Form::CommitTime => ", case when current_setting('track_commit_timestamp')::bool \
                         then (extract(epoch from pg_xact_commit_timestamp(t.xmin)) * 1000000)::int8::text end"
                        .to_owned(),
                }
            })
            .collect();
        let conditions: Vec<String> = self
            .key
            .iter()
            .zip(1..)
            .map(|((name, _), number)| {
                let equal = equalities
                    .iter()
                    .find(|(column, _)| column == name)
                    .map_or("operator(pg_catalog.=)", |(_, operator)| operator);
                format!("t.{} {equal} ${number}", quote_identifier(name))
            })
            .collect();
        let table = self.table();
        let literal = quote_literal(&table);
        let (current, from) = match self.as_of {
            // The number with its epoch: of all that end like this the one that is nearest to the
            // next.
            AsOf::Transaction(xid) => (
                "pg_visible_in_snapshot(greatest(s.next - case when s.behind > 2147483648 then s.behind - 4294967296 \
                 when s.behind < -2147483648 then s.behind + 4294967296 else s.behind end, 0)::text::xid8, s.snapshot)"
                    .to_owned(),
                format!(
                    "(select *, (next & 4294967295) - {xid}::int8 as behind from \
                     (select *, pg_snapshot_xmax(snapshot)::text::int8 as next from \
                     (select pg_current_snapshot() as snapshot, oid, relkind from pg_class where oid = {literal}::regclass) a) b) s"
                ),
            ),
            AsOf::Version(micros) => (
                format!(
                    "case when current_setting('track_commit_timestamp')::bool then coalesce(pg_xact_commit_timestamp(t.xmin) >= \
                     timestamptz '1970-01-01 00:00:00+00' + {micros}::int8 * interval '1 microsecond', true) else true end"
                ),
                format!("(select oid, relkind from pg_class where oid = {literal}::regclass) s"),
            ),
        };
        format!(
            "select case when {current} then 't' else 'f' end, case when t.tableoid is null then 'f' else 't' end{columns} \
             from {from} left join {table} t on {conditions} and (t.tableoid = s.oid or s.relkind = 'p')",
            conditions = conditions.join(" and "),
        )
    }
}

/// SQL in this database's encoding, which is that of the connection.
fn in_local_encoding(sql: &str) -> Result<CString, PgError> {
    encoding::to_server(sql).ok_or_else(|| {
        PgError::new(
            SqlState::ProtocolViolation,
            "name from the provider has a zero byte",
        )
    })
}

fn from_local_encoding(bytes: &[u8]) -> String {
    encoding::text_from_server(bytes).unwrap_or_else(|| String::from_utf8_lossy(bytes).into_owned())
}
