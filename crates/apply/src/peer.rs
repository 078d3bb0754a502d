//! Connections to other nodes over which an applier asks for columns of one row, and the question
//! as SQL. Run by the appliers.
//!
//! A question takes no lock on rows. It waits only for a transaction that has locked the whole
//! table at the peer, and no longer than `lock_timeout` there. Then it fails with 55P03. The error
//! says whether commits at the peer wait for this node ([`PeerLock`]): such a commit keeps its
//! locks until this node has confirmed it, and may be the one that is being applied.
//!
//! No error counts as an answer. The row is found by the operators of the peer's key, with values
//! of the key's types (`braid_bgworker::key_columns`). Example: the peer's enum lacks a label, or
//! the table that a `regclass` names was dropped at the peer. The question fails then, as the peer
//! can't read the key. So the question is put again by the text of the key, which no input function
//! reads. If that fails too, the error is raised. Only the peer's catalog tells that a table or a
//! column is gone.

use std::collections::HashMap;
use std::ffi::CString;
use std::time::{Duration, Instant};

use braid_bgworker::key_columns::{self, KeyColumn};
use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription;
use braid_postgres::encoding;
use braid_postgres::error::{PeerLock, PgError};
use braid_postgres::libpq::{Cells, Connection, Mode};
use braid_postgres::server;
use braid_postgres::wait::Wait;

/// Time after which an unused connection is closed.
const KEPT: Duration = Duration::from_secs(60);
/// Divisor of the time for an answer that gives the time to wait for a lock at the peer.
const LOCK_PART: u32 = 4;

/// A node that can be asked.
#[derive(Clone)]
pub(super) struct Source {
    /// Subscription whose provider it is.
    pub(super) subscription: u32,
    /// Name of the subscription, which the connection shows at the node.
    pub(super) name: String,
    /// Name of the node.
    pub(super) node: String,
    /// Connection string of the node. Never to be logged or shown.
    pub(super) dsn: String,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Source({})", self.name)
    }
}

/// State that an answer must show.
#[derive(Debug, Clone, Copy)]
pub(super) enum AsOf {
    /// With the writes of this transaction of the peer.
    Transaction(u32),
    /// With a version of the row that is at least this new, microseconds since 1970-01-01 UTC.
    Version(i64),
}

/// Form in which a value is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Bytes of a bytea.
    Bytes,
    /// The output function's text.
    Text,
    /// No column: the commit time of the transaction that wrote the row, microseconds since
    /// 1970-01-01 UTC.
    CommitTime,
}

/// A column to fetch.
#[derive(Debug, Clone)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) form: Form,
}

/// A question: columns of the row with this key.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
    pub(super) columns: &'a [Column],
    /// Names and values as text in this database's encoding.
    pub(super) key: &'a [(String, CString)],
    pub(super) as_of: AsOf,
}

/// Answer of a peer.
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
    /// Whether the node reads a table only with the rights of the table's owner, because a query
    /// may run the owner's code. A node that only sends changes need not have the extension.
    reads_as_owner: bool,
    /// Columns of tables, as they were at the last question, by [`Question::shape`].
    shapes: HashMap<String, Vec<KeyColumn>>,
    used: Instant,
}

/// Connections of a process.
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
    /// Asks a node. Returns the answer, and whether it shows the state that was asked for; if not,
    /// it may be older.
    ///
    /// # Errors
    /// The peer's; 08006 without a connection; 57014 past the deadline.
    pub(super) fn ask(
        &mut self,
        source: &Source,
        question: &Question<'_>,
        deadline: Instant,
    ) -> Result<(Reply, bool), PgError> {
        // The connection is put back once it has answered. Any error, or an interrupt, closes it.
        let known = self.by_subscription.remove(&source.subscription);
        let fresh = known
            .as_ref()
            .is_none_or(|peer| peer.dsn != source.dsn || !peer.connection.is_open());
        let mut peer = match known {
            Some(peer) if !fresh => peer,
            _ => Peer::open(source, deadline)?,
        };
        let answer = match peer.ask(question, deadline) {
            // An idle connection may have been cut.
            Err(error) if !fresh && error.sqlstate.is_of("08") => {
                peer = Peer::open(source, deadline)?;
                peer.ask(question, deadline)
            }
            answer => answer,
        };
        let answer = answer.map_err(|error| peer.about_lock(error, source, deadline))?;
        peer.used = Instant::now();
        self.by_subscription.insert(source.subscription, peer);
        Ok(answer)
    }

    /// Whether commits at a node that was asked before wait for this node to confirm them. False if
    /// the node can't say.
    pub(super) fn commits_wait(&mut self, source: &Source, deadline: Instant) -> bool {
        let peer = self.by_subscription.get_mut(&source.subscription);
        peer.and_then(|peer| peer.kept_by(source, deadline)) == Some(PeerLock::ByCommit)
    }

    /// Closes connections that were not used for a while.
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
        let settled = connection.ask(
            c"select pg_catalog.set_config('statement_timeout', $1, false), pg_catalog.set_config('lock_timeout', $2, false), \
              pg_catalog.set_config('client_encoding', $3, false), pg_catalog.set_config('search_path', 'pg_catalog', false), \
              pg_catalog.set_config('row_security', 'off', false), pg_catalog.set_config('default_transaction_read_only', 'on', false), \
              exists (select from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) p.pronamespace \
                       where n.nspname operator(pg_catalog.=) 'braid' and p.proname operator(pg_catalog.=) 'rows_as_owner' \
                         and pg_catalog.has_schema_privilege(n.oid, 'usage') and pg_catalog.has_function_privilege(p.oid, 'execute'))",
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
            reads_as_owner: settled.get(0, 6) == Some(&[1]),
            shapes: HashMap::new(),
            used: Instant::now(),
        })
    }

    /// Adds to an error about a lock whether commits at the peer wait for this node.
    fn about_lock(&mut self, mut error: PgError, source: &Source, deadline: Instant) -> PgError {
        if error.sqlstate == SqlState::LockNotAvailable {
            error.peer_lock = self.kept_by(source, deadline);
        }
        error
    }

    /// Whether commits at the peer wait for this node. `None` if it can't say.
    fn kept_by(&mut self, source: &Source, deadline: Instant) -> Option<PeerLock> {
        if !self.connection.is_open() {
            return None;
        }
        let name = CString::new(source.name.as_str()).unwrap_or_default();
        let condition = subscription::commits_wait_for("$1");
        let is_synchronous = CString::new(format!("select {condition}")).unwrap_or_default();
        let asked = self
            .connection
            .ask(&is_synchronous, &[name], deadline, Wait::Querier);
        asked.ok().map(|cells| match cells.get(0, 0) {
            Some(&[0]) => PeerLock::Held,
            _ => PeerLock::ByCommit,
        })
    }

    fn ask(
        &mut self,
        question: &Question<'_>,
        deadline: Instant,
    ) -> Result<(Reply, bool), PgError> {
        let mut last = None;
        for by in [FoundBy::Value, FoundBy::Text] {
            let Some(sql) = self.sql(question, by, deadline)? else {
                return Ok((Reply::NoTable, true));
            };
            match self.put(question, &sql, deadline) {
                // The table may have been replaced since its columns were read.
                Err(error) if is_of_statement(&error) => {
                    self.shapes.remove(&question.shape());
                    last = Some(error);
                }
                answer => return answer,
            }
        }
        match (last, self.sql(question, FoundBy::Text, deadline)?) {
            (Some(error), Some(_)) => Err(error),
            _ => Ok((Reply::NoTable, true)),
        }
    }

    /// Returns the question as SQL; `None` if the peer lacks the table or a column of it.
    fn sql(
        &mut self,
        question: &Question<'_>,
        by: FoundBy,
        deadline: Instant,
    ) -> Result<Option<String>, PgError> {
        let name = question.shape();
        let known = self.shapes.get(&name);
        if let Some(sql) = known.and_then(|shape| question.sql(shape, by)) {
            return Ok(Some(sql));
        }
        // Not known, or a column was added since.
        let shape = self.read_shape(question, deadline)?;
        let sql = question.sql(&shape, by);
        self.shapes.insert(name, shape);
        Ok(sql)
    }

    fn put(
        &mut self,
        question: &Question<'_>,
        sql: &str,
        deadline: Instant,
    ) -> Result<(Reply, bool), PgError> {
        let sql = if self.reads_as_owner {
            question.as_owner(sql)
        } else {
            rendered(sql, |number| format!("${number}"), str::to_owned)
        };
        let sql = in_local_encoding(&sql)?;
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

    /// Reads the columns of the peer's table, and the equality operators of those of the key.
    fn read_shape(
        &mut self,
        question: &Question<'_>,
        deadline: Instant,
    ) -> Result<Vec<KeyColumn>, PgError> {
        let relation = format!("to_regclass({})", quote_literal(&question.table()));
        let sql = in_local_encoding(&key_columns::query(&relation, &question.keys()))?;
        let cells = self.connection.ask(&sql, &[], deadline, Wait::Querier)?;
        let read = |row| {
            let texts: Vec<Option<String>> = (0..key_columns::CELLS)
                .map(|column| cells.get(row, column).map(from_local_encoding))
                .collect();
            KeyColumn::read(|place| texts.get(place)?.as_deref())
        };
        Ok((0..cells.len()).filter_map(read).collect())
    }
}

/// Way in which the row is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FoundBy {
    /// By values of the key's types.
    Value,
    /// By the text forms of these values.
    Text,
}

/// Returns whether a statement failed for a name, a type or a value in it. An error for lack of
/// rights, or for the state of the peer, is none of these.
fn is_of_statement(error: &PgError) -> bool {
    let sqlstate = error.sqlstate;
    let is_said = ["0A", "22", "3F", "42"]
        .iter()
        .any(|class| sqlstate.is_of(class));
    is_said && sqlstate != SqlState::InsufficientPrivilege
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

    /// Returns the statement that makes the peer run the question's SQL as the table's owner.
    fn as_owner(&self, sql: &str) -> String {
        let query = rendered(
            sql,
            |number| format!("%{number}$L"),
            |text| text.replace('%', "%%"),
        );
        let columns: String = self
            .columns
            .iter()
            .zip(1..)
            .map(|(column, number)| match column.form {
                Form::Bytes => format!(", c{number} bytea"),
                Form::Text | Form::CommitTime => format!(", c{number} text"),
            })
            .collect();
        let parameters: Vec<String> = (1..=self.key.len()).map(|n| format!("${n}")).collect();
        format!(
            "select * from braid.rows_as_owner({}::regclass, {}, array[{}]::text[]) as r (is_current text, is_there text{columns})",
            quote_literal(&self.table()),
            quote_literal(&query),
            parameters.join(", ")
        )
    }

    /// Returns the names of the key's columns, as an array in SQL.
    fn keys(&self) -> String {
        let names: Vec<String> = self
            .key
            .iter()
            .map(|(name, _)| quote_literal(name))
            .collect();
        format!("array[{}]::text[]", names.join(", "))
    }

    /// Returns the key under which the peer's columns for this question are kept.
    fn shape(&self) -> String {
        format!("{} {}", self.table(), self.keys())
    }

    /// Returns the question's SQL. Its result is one row, in any case: whether it shows the state
    /// that was asked for, whether the row exists, and its columns. All is of one snapshot. Rows of
    /// tables that inherit from the table are not its own; those of partitions are. Returns `None`
    /// if `shape`, which has the peer's columns, lacks one. The number of a parameter stands
    /// between two [`PARAMETER`]s.
    fn sql(&self, shape: &[KeyColumn], by: FoundBy) -> Option<String> {
        let known = |name: &str| shape.iter().find(|column| column.name == name);
        let columns: Option<String> = self
            .columns
            .iter()
            .map(|column| match column.form {
                Form::CommitTime => Some(COMMIT_TIME.to_owned()),
                form => {
                    let is_bytea = form == Form::Bytes;
                    known(&column.name).map(|there| column.sql(there, is_bytea))
                }
            })
            .collect();
        let columns = columns?;
        let conditions: Option<Vec<String>> = self
            .key
            .iter()
            .zip(1..)
            .map(|((name, _), number)| {
                let column = format!("t.{}", quote_identifier(name));
                let value = format!("{PARAMETER}{number}{PARAMETER}");
                let there = known(name)?;
                Some(match by {
                    FoundBy::Value => there.equals(&column, &value),
                    FoundBy::Text => KeyColumn::equals_as_text(&column, &value),
                })
            })
            .collect();
        let conditions = conditions?;
        let table = self.table();
        let literal = quote_literal(&table);
        let (current, from) = match self.as_of {
            // The transaction id with its epoch: of all ids with these lower bits the one nearest
            // to the next id.
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
        Some(format!(
            "select case when {current} then 't' else 'f' end, case when t.tableoid is null then 'f' else 't' end{columns} \
             from {from} left join {table} t on {conditions} and (t.tableoid = s.oid or s.relkind = 'p')",
            conditions = conditions.join(" and "),
        ))
    }
}

impl Column {
    /// Returns the column for the list of a SELECT. `there` is the peer's column.
    fn sql(&self, there: &KeyColumn, is_bytea: bool) -> String {
        let name = format!("t.{}", quote_identifier(&self.name));
        // The text of the type's output function, whatever casts the type has.
        let text = format!("case num_nulls({name}) when 0 then concat({name}) end");
        match (is_bytea, there.is_bytea) {
            (true, true) => format!(", {name}::bytea"),
            // The peer's column has another type, whose text is read as a bytea.
            (true, false) => format!(", ({text})::bytea"),
            (false, _) => format!(", {text}"),
        }
    }
}

/// Marks the number of a parameter, before and after it. SQL has this character nowhere else.
const PARAMETER: char = '\0';

/// Time at which the row was written, in microseconds since 1970-01-01 UTC, for the list of a
/// SELECT.
const COMMIT_TIME: &str = ", case when current_setting('track_commit_timestamp')::bool \
    then (extract(epoch from pg_xact_commit_timestamp(t.xmin)) * 1000000)::int8::text end";

/// Returns a question's SQL: `parameter` converts the number of each parameter, `text` the parts
/// between them.
fn rendered(
    sql: &str,
    parameter: impl Fn(&str) -> String,
    text: impl Fn(&str) -> String,
) -> String {
    sql.split(PARAMETER)
        .enumerate()
        .map(|(place, part)| {
            if place % 2 == 1 {
                parameter(part)
            } else {
                text(part)
            }
        })
        .collect()
}

/// Returns SQL in this database's encoding, which is that of the connection.
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
