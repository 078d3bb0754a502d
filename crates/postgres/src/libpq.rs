//! Connections to other servers, over libpq with all of its TLS and authentication.
//!
//! Used by the SQL functions (to look at a provider), the leader (to receive) and the copy workers.
//! No call blocks in libpq: every wait is a latch wait, so that a worker stops at once when asked
//! and notices the death of the postmaster. Connection strings never appear in an error: libpq's
//! message about a malformed one quotes it, and is left out.

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use braid_bgworker::reason::Reason;
use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;

use crate::error::PgError;
use crate::latch::{Interest, Woken};
use crate::plain;
use crate::rows::Rows;
use crate::wait::Wait;

#[repr(C)]
struct PGconn {
    _private: [UnsafeCell<u8>; 0],
}

#[repr(C)]
struct PGresult {
    _private: [UnsafeCell<u8>; 0],
}

#[repr(C)]
struct PQconninfoOption {
    keyword: *mut c_char,
    envvar: *mut c_char,
    compiled: *mut c_char,
    val: *mut c_char,
    label: *mut c_char,
    dispchar: *mut c_char,
    dispsize: c_int,
}

// libpq-fe.h, unchanged from PostgreSQL 9.1 to 18.
const CONNECTION_OK: c_int = 0;
const CONNECTION_BAD: c_int = 1;
const PGRES_POLLING_FAILED: c_int = 0;
const PGRES_POLLING_READING: c_int = 1;
const PGRES_POLLING_OK: c_int = 3;
const PGRES_EMPTY_QUERY: c_int = 0;
const PGRES_COMMAND_OK: c_int = 1;
const PGRES_TUPLES_OK: c_int = 2;
const PGRES_COPY_OUT: c_int = 3;
const PGRES_COPY_BOTH: c_int = 8;
const PG_DIAG_SQLSTATE: c_int = b'C' as c_int;
const PG_DIAG_MESSAGE_PRIMARY: c_int = b'M' as c_int;
const PG_DIAG_MESSAGE_DETAIL: c_int = b'D' as c_int;
const PG_DIAG_MESSAGE_HINT: c_int = b'H' as c_int;

// libpq runs no code of PostgreSQL's server, and raises no error of it: no guard is needed. A
// `safe` function asks for no more than live objects, which references to them say, and checks the
// rest.
#[link(name = "pq")]
unsafe extern "C" {
    fn PQconnectStartParams(
        keywords: *const *const c_char,
        values: *const *const c_char,
        expand_dbname: c_int,
    ) -> *mut PGconn;
    safe fn PQconnectPoll(conn: &PGconn) -> c_int;
    safe fn PQstatus(conn: &PGconn) -> c_int;
    safe fn PQsocket(conn: &PGconn) -> c_int;
    safe fn PQhost(conn: &PGconn) -> *const c_char;
    safe fn PQhostaddr(conn: &PGconn) -> *const c_char;
    safe fn PQport(conn: &PGconn) -> *const c_char;
    safe fn PQerrorMessage(conn: &PGconn) -> *const c_char;
    fn PQfinish(conn: *mut PGconn);
    safe fn PQsetnonblocking(conn: &PGconn, arg: c_int) -> c_int;
    fn PQsendQuery(conn: *mut PGconn, query: *const c_char) -> c_int;
    fn PQsendQueryParams(
        conn: *mut PGconn,
        command: *const c_char,
        n_params: c_int,
        param_types: *const std::ffi::c_uint,
        param_values: *const *const c_char,
        param_lengths: *const c_int,
        param_formats: *const c_int,
        result_format: c_int,
    ) -> c_int;
    safe fn PQconsumeInput(conn: &PGconn) -> c_int;
    safe fn PQisBusy(conn: &PGconn) -> c_int;
    safe fn PQgetResult(conn: &PGconn) -> *mut PGresult;
    safe fn PQresultStatus(res: &PGresult) -> c_int;
    safe fn PQresultErrorField(res: &PGresult, field: c_int) -> *const c_char;
    safe fn PQntuples(res: &PGresult) -> c_int;
    safe fn PQnfields(res: &PGresult) -> c_int;
    // For a cell that does not exist: null, 1 and 0.
    safe fn PQgetvalue(res: &PGresult, row: c_int, field: c_int) -> *const c_char;
    safe fn PQgetisnull(res: &PGresult, row: c_int, field: c_int) -> c_int;
    safe fn PQgetlength(res: &PGresult, row: c_int, field: c_int) -> c_int;
    fn PQclear(res: *mut PGresult);
    safe fn PQgetCopyData(conn: &PGconn, buffer: &mut *mut c_char, is_async: c_int) -> c_int;
    fn PQputCopyData(conn: *mut PGconn, buffer: *const c_char, bytes: c_int) -> c_int;
    safe fn PQflush(conn: &PGconn) -> c_int;
    fn PQfreemem(ptr: *mut std::ffi::c_void);
    fn PQconninfoParse(conninfo: *const c_char, errmsg: *mut *mut c_char) -> *mut PQconninfoOption;
    fn PQconninfoFree(options: *mut PQconninfoOption);
    safe fn PQconnectionUsedPassword(conn: &PGconn) -> c_int;
    safe fn PQserverVersion(conn: &PGconn) -> c_int;
    fn PQparameterStatus(conn: *const PGconn, name: *const c_char) -> *const c_char;
}

/// Why a peer could not be reached or did not do as asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The connection string can't be read. Says nothing of its content, which may hold a password.
    #[error("connection string is malformed")]
    MalformedConnectionString,
    /// The connection string has an option that libpq does not know.
    #[error("connection string is malformed: there is no option \"{0}\"")]
    UnknownOption(String),
    /// The connection could not be made or was lost.
    #[error("{0}")]
    Connection(String),
    /// The peer reported an error.
    #[error("{message}")]
    Server {
        /// The error's code.
        sqlstate: SqlState,
        /// Primary message.
        message: String,
        /// Detail, if any.
        detail: Option<String>,
        /// Hint, if any.
        hint: Option<String>,
        /// The peer was in recovery when it was last heard of that: a standby, or a server that
        /// is about to be promoted.
        in_recovery: bool,
    },
    /// The peer ended the stream in order.
    #[error("the provider ended the stream")]
    EndOfStream,
    /// The peer did not answer in time.
    #[error("timeout expired while waiting for an answer of the remote server")]
    Timeout,
    /// Nothing came from the peer, which should have answered.
    #[error("the provider has been silent for longer than wal_receiver_timeout")]
    Silent,
    /// The peer answered with something that was not asked for.
    #[error("unexpected answer from the remote server to {0}")]
    Unexpected(&'static str),
}

impl Error {
    /// SQLSTATE as the peer or the connection gives it; 08006 for a lost connection, 08P01 for a
    /// broken protocol.
    #[must_use]
    pub fn sqlstate(&self) -> SqlState {
        match self {
            Self::MalformedConnectionString | Self::UnknownOption(_) => {
                SqlState::InvalidParameterValue
            }
            Self::Connection(_) | Self::EndOfStream | Self::Timeout | Self::Silent => {
                SqlState::ConnectionFailure
            }
            Self::Server { sqlstate, .. } => *sqlstate,
            Self::Unexpected(_) => SqlState::ProtocolViolation,
        }
    }
}

impl Error {
    /// The peer's own detail, if it gave one.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Server { detail, .. } => detail.as_deref(),
            _ => None,
        }
    }
}

impl From<Error> for PgError {
    fn from(error: Error) -> Self {
        let sqlstate = error.sqlstate();
        let message = error.to_string();
        match error {
            Error::Server {
                detail,
                hint,
                in_recovery,
                ..
            } => Self {
                detail,
                hint,
                in_recovery,
                reason: Reason::of_provider(sqlstate, &message),
                ..Self::new(sqlstate, message)
            },
            _ => Self::new(sqlstate, message),
        }
    }
}

/// Result of talking to a peer.
pub type Result<T> = std::result::Result<T, Error>;

/// How long to wait for a connection when the connection string does not say.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// `wal_receiver_timeout`; `None` when it is 0.
#[must_use]
pub fn receiver_timeout() -> Option<Duration> {
    let milliseconds = plain::wal_receiver_timeout();
    u64::try_from(milliseconds)
        .ok()
        .filter(|time| *time > 0)
        .map(Duration::from_millis)
}

/// The result of looking for stream data.
#[derive(Debug)]
pub enum CopyData {
    /// One message.
    Message(CopyMessage),
    /// Nothing has arrived now.
    Pending,
    /// The peer ended the copy.
    End,
}

/// A message's bytes, owned by libpq's allocator.
#[derive(Debug)]
pub struct CopyMessage {
    bytes: *mut c_char,
    len: usize,
}

impl std::ops::Deref for CopyMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: PQgetCopyData gave `len` bytes at `bytes`, which stay until `drop`.
        unsafe { std::slice::from_raw_parts(self.bytes.cast::<u8>(), self.len) }
    }
}

impl Drop for CopyMessage {
    fn drop(&mut self) {
        // SAFETY: allocated by libpq, freed once. No PostgreSQL code runs, so this is right while
        // unwinding too.
        unsafe { PQfreemem(self.bytes.cast()) }
    }
}

/// The kind of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Ordinary SQL.
    Sql,
    /// A walsender for logical replication, which also takes SQL.
    Replication,
}

/// The event on its socket that a connection in the making waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// Data to read.
    Read,
    /// Room to write.
    Write,
}

/// The action if a peer that should say something is silent for as long as `wal_receiver_timeout`.
/// An acknowledgement of the network is no sign of life: a middlebox may send it, or the kernel of
/// a stopped process.
#[derive(Debug)]
enum Silence {
    /// The peer is waited for, until the query is cancelled.
    Borne,
    /// The connection is given up.
    GivenUp,
    /// The question may take the peer hours. Another connection looks whether it is at work on it.
    LookedInto(Backend),
}

/// The process at the other end.
#[derive(Debug)]
struct Backend {
    dsn: String,
    pid: String,
    /// When its server was started.
    server_started: String,
}

impl Backend {
    /// Whether the peer works on its query, as far as can be found out. A backend that is gone,
    /// idle, or waits for this side to read has answered, and the answer will not arrive.
    fn is_at_work(&self) -> bool {
        let sql = format!(
            "select pg_catalog.pg_postmaster_start_time() operator(pg_catalog.=) {} and exists ( \
               select from pg_catalog.pg_stat_activity \
                where pid operator(pg_catalog.=) {} and state in ('active', 'disabled') \
                  and wait_event_type is distinct from 'Client')",
            quote_literal(&self.server_started),
            self.pid
        );
        let answer = Connection::open(&self.dsn, "braid", Mode::Sql).and_then(|mut other| {
            other.give_up_when_silent();
            other.query(&sql)
        });
        // If no further connection can be made, nothing is known.
        answer.map_or(true, |rows| rows.get(0, 0) == Some("t"))
    }
}

/// The action while the peer is silent although it should answer.
struct Watch {
    /// The first look after this time.
    first: Duration,
    /// Further looks after this time each.
    every: Duration,
    /// The next look; `None`: the peer is not silent.
    due: Option<Instant>,
    has_looked: bool,
    look: Box<dyn FnMut(Watched)>,
}

/// An observation of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// The peer has been silent for a while.
    Silent,
    /// The peer has said something, after it was silent.
    Heard,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Watch({:?})", self.due)
    }
}

impl Watch {
    /// Time until the next look.
    fn left(&mut self) -> Duration {
        let first = self.first;
        let due = self.due.get_or_insert_with(|| Instant::now() + first);
        due.saturating_duration_since(Instant::now())
    }

    /// Nothing has come so far.
    fn is_silent(&mut self) {
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.has_looked = true;
            (self.look)(Watched::Silent);
            self.due = Some(Instant::now() + self.every);
        }
    }

    /// Something has come.
    fn is_heard(&mut self) {
        self.due = None;
        if std::mem::take(&mut self.has_looked) {
            (self.look)(Watched::Heard);
        }
    }
}

/// A connection to another server.
#[derive(Debug)]
pub struct Connection {
    raw: NonNull<PGconn>,
    silence: Silence,
    watch: Option<Watch>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: `raw` came from PQconnectStartParams and is finished once. libpq neither raises
        // PostgreSQL errors nor needs PostgreSQL's state, so the socket is closed while unwinding
        // too.
        unsafe { PQfinish(self.raw.as_ptr()) }
    }
}

fn text(raw: *const c_char) -> Option<String> {
    if raw.is_null() {
        return None;
    }
    // SAFETY: libpq gives NUL-terminated strings that live as long as the object that gave them;
    // copied at once.
    Some(
        unsafe { CStr::from_ptr(raw) }
            .to_string_lossy()
            .trim_end()
            .to_owned(),
    )
}

/// Checks the form of a connection string, and that it does not set options that Braid sets itself.
///
/// # Errors
/// [`Error::MalformedConnectionString`].
pub fn check_connection_string(dsn: &str) -> Result<()> {
    let dsn = CString::new(dsn).map_err(|_| Error::MalformedConnectionString)?;
    let mut message = std::ptr::null_mut();
    // SAFETY: `dsn` is NUL-terminated and outlives the call; the result and the message are freed
    // by libpq.
    unsafe {
        let options = PQconninfoParse(dsn.as_ptr(), &raw mut message);
        let unknown = unknown_option(&dsn.to_string_lossy(), text(message).as_deref());
        if !message.is_null() {
            PQfreemem(message.cast());
        }
        if options.is_null() {
            return Err(unknown.map_or(Error::MalformedConnectionString, Error::UnknownOption));
        }
        PQconninfoFree(options);
    }
    Ok(())
}

/// The option that libpq does not know, by its message. Nothing where it may be a part of a
/// password: a value that should have been quoted is read as options, too.
fn unknown_option(dsn: &str, message: Option<&str>) -> Option<String> {
    let name = message?.split('"').nth(1)?;
    let is_word = !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let before = dsn
        .find(name)
        .and_then(|at| dsn.get(..at))
        .unwrap_or_default();
    let is_keyword = dsn.contains(&format!("{name}="));
    (is_word
        && is_keyword
        && !before.to_ascii_lowercase().contains("pass")
        && !before.contains("://"))
    .then(|| name.to_owned())
}

/// Value of one keyword of a connection string, if it is set in it; never a password.
#[must_use]
pub fn connection_keyword(dsn: &str, keyword: &str) -> Option<String> {
    if keyword == "password" {
        None
    } else {
        keyword_value(dsn, keyword)
    }
}

/// Whether the connection string itself has a password that is not empty.
#[must_use]
pub fn has_password(dsn: &str) -> bool {
    keyword_value(dsn, "password").is_some_and(|password| !password.is_empty())
}

fn keyword_value(dsn: &str, keyword: &str) -> Option<String> {
    let given = connection_settings(dsn);
    given.into_iter().find(|pair| pair.0 == keyword)?.1.into()
}

/// Keywords and values of a connection string, passwords included: never to be shown or logged.
/// Empty if the string is malformed.
#[must_use]
pub fn connection_settings(dsn: &str) -> Vec<(String, String)> {
    let Ok(dsn) = CString::new(dsn) else {
        return Vec::new();
    };
    let mut message = std::ptr::null_mut();
    let mut found = Vec::new();
    // SAFETY: the array that PQconninfoParse returns ends with a null keyword; freed below.
    unsafe {
        let options = PQconninfoParse(dsn.as_ptr(), &raw mut message);
        if !message.is_null() {
            PQfreemem(message.cast());
        }
        if options.is_null() {
            return found;
        }
        let mut option = options;
        while !(*option).keyword.is_null() {
            found.extend(text((*option).keyword).zip(text((*option).val)));
            option = option.add(1);
        }
        PQconninfoFree(options);
    }
    found
}

impl Connection {
    /// Connects to `dsn` under `application_name`. Sets options that make text forms independent of
    /// both servers' settings, and removes the limits that a role may have for sessions of people:
    /// a snapshot is held for as long as a copy takes.
    ///
    /// # Errors
    /// [`Error::MalformedConnectionString`], [`Error::Connection`].
    pub fn open(dsn: &str, application_name: &str, mode: Mode) -> Result<Self> {
        Self::open_within(dsn, application_name, mode, Duration::MAX)
    }

    /// Opens a connection, in no more than this time.
    ///
    /// # Errors
    /// Those of [`Connection::open`].
    pub fn open_within(
        dsn: &str,
        application_name: &str,
        mode: Mode,
        most: Duration,
    ) -> Result<Self> {
        let connection = Self::start(dsn, application_name, mode, &[])?;
        let timeout = connection_keyword(dsn, "connect_timeout")
            .and_then(|seconds| seconds.trim().parse::<u64>().ok())
            .filter(|seconds| *seconds > 0)
            .map_or(CONNECT_TIMEOUT, Duration::from_secs)
            .min(most);
        connection.finish_connecting(timeout)?;
        connection.be_nonblocking()?;
        Ok(connection)
    }

    /// Starts to connect by SQL to the server at the other end of `live`, and does not wait.
    /// [`Connection::go_on_connecting`] goes on.
    ///
    /// Looks no name up: the address is that of `live`.
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn start_beside(live: &Self, dsn: &str, application_name: &str) -> Result<(Self, Pending)> {
        let place = [
            ("host", text(PQhost(live.live()))),
            ("hostaddr", text(PQhostaddr(live.live()))),
            ("port", text(PQport(live.live()))),
        ];
        let place: Vec<(&str, &str)> = place
            .iter()
            .filter_map(|(key, value)| Some((*key, value.as_deref()?)))
            .filter(|(_, value)| !value.is_empty())
            .collect();
        Self::start_pending(dsn, application_name, &place)
    }

    /// Starts to connect by SQL, and does not wait but for a name that has to be looked up.
    /// [`Connection::go_on_connecting`] goes on.
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn start_by_itself(dsn: &str, application_name: &str) -> Result<(Self, Pending)> {
        Self::start_pending(dsn, application_name, &[])
    }

    fn start_pending(
        dsn: &str,
        application_name: &str,
        overriding: &[(&str, &str)],
    ) -> Result<(Self, Pending)> {
        let connection = Self::start(dsn, application_name, Mode::Sql, overriding)?;
        if PQstatus(connection.live()) == CONNECTION_BAD {
            return Err(connection.lost());
        }
        // libpq asks to assume this before the first poll.
        Ok((connection, Pending::Write))
    }

    /// Takes the next step of [`Connection::start_beside`] if the socket is ready for it. `None`:
    /// the connection is established.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn go_on_connecting(&mut self, pending: Pending) -> Result<Option<Pending>> {
        let mut ready = libc::pollfd {
            fd: self.socket(),
            events: match pending {
                Pending::Read => libc::POLLIN,
                Pending::Write => libc::POLLOUT,
            },
            revents: 0,
        };
        // SAFETY: one descriptor is passed; a timeout of 0 returns at once.
        if unsafe { libc::poll(&raw mut ready, 1, 0) } <= 0 {
            return Ok(Some(pending));
        }
        match PQconnectPoll(self.live()) {
            PGRES_POLLING_OK => {
                self.be_nonblocking()?;
                Ok(None)
            }
            PGRES_POLLING_FAILED => Err(self.lost()),
            PGRES_POLLING_READING => Ok(Some(Pending::Read)),
            _ => Ok(Some(Pending::Write)),
        }
    }

    fn live(&self) -> &PGconn {
        // SAFETY: the object exists until `self` is dropped.
        unsafe { self.raw.as_ref() }
    }

    fn be_nonblocking(&self) -> Result<()> {
        if PQsetnonblocking(self.live(), 1) != 0 {
            return Err(self.lost());
        }
        Ok(())
    }

    /// Starts to connect. The keywords in `overriding` take precedence over `dsn`.
    fn start(
        dsn: &str,
        application_name: &str,
        mode: Mode,
        overriding: &[(&str, &str)],
    ) -> Result<Self> {
        check_connection_string(dsn)?;
        // The search_path of the provider's database does not count on this connection: it would
        // choose the functions that are called.
        let own_options = "-c search_path=pg_catalog -c datestyle=ISO -c intervalstyle=postgres -c timezone=UTC -c extra_float_digits=3 \
                           -c lc_monetary=C -c bytea_output=hex -c statement_timeout=0 \
                           -c idle_in_transaction_session_timeout=0 -c idle_session_timeout=0 -c lock_timeout=0 \
                           -c standard_conforming_strings=on -c quote_all_identifiers=off -c transform_null_equals=off -c array_nulls=on \
                           -c xmloption=content -c default_transaction_isolation=read\\ committed \
                           -c default_transaction_read_only=off -c default_transaction_deferrable=off";
        let options = match connection_keyword(dsn, "options") {
            Some(user) if !user.is_empty() => format!("{user} {own_options}"),
            _ => own_options.to_owned(),
        };
        let mut pairs = vec![
            // A provider behind a network that has gone silent is noticed within a minute, unless
            // the string says otherwise: later options override.
            ("keepalives_idle", "30"),
            ("keepalives_interval", "10"),
            ("keepalives_count", "3"),
            ("dbname", dsn),
            ("fallback_application_name", application_name),
            ("application_name", application_name),
            ("options", options.as_str()),
        ];
        if mode == Mode::Replication {
            pairs.push(("replication", "database"));
        }
        pairs.extend(overriding);
        let owned: Vec<(CString, CString)> = pairs
            .into_iter()
            .filter_map(|(key, value)| Some((CString::new(key).ok()?, CString::new(value).ok()?)))
            .collect();
        let mut keywords: Vec<*const c_char> = owned.iter().map(|(key, _)| key.as_ptr()).collect();
        let mut values: Vec<*const c_char> =
            owned.iter().map(|(_, value)| value.as_ptr()).collect();
        keywords.push(std::ptr::null());
        values.push(std::ptr::null());
        // SAFETY: both arrays end with null and their strings outlive the call; libpq copies them.
        let raw = unsafe { PQconnectStartParams(keywords.as_ptr(), values.as_ptr(), 1) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::Connection("out of memory".to_owned()))?;
        Ok(Self {
            raw,
            silence: Silence::Borne,
            watch: None,
        })
    }

    /// From now on a peer that says nothing for `wal_receiver_timeout` where it should answer is
    /// [`Error::Silent`].
    pub fn give_up_when_silent(&mut self) {
        self.silence = Silence::GivenUp;
    }

    /// Has the connection given up when the peer is silent, except as long as the peer works on its
    /// query. Another connection to `dsn` finds that out.
    ///
    /// # Errors
    /// Those of [`Connection::query`].
    pub fn look_into_silence(&mut self, dsn: &str) -> Result<()> {
        self.silence = Silence::GivenUp;
        let rows = self
            .query("select pg_catalog.pg_backend_pid(), pg_catalog.pg_postmaster_start_time()")?;
        let (Some(pid), Some(server_started)) = (rows.get(0, 0), rows.get(0, 1)) else {
            return Err(Error::Unexpected("a query"));
        };
        // The text becomes part of a query.
        let pid: i32 = pid.parse().map_err(|_| Error::Unexpected("a query"))?;
        self.silence = Silence::LookedInto(Backend {
            dsn: dsn.to_owned(),
            pid: pid.to_string(),
            server_started: server_started.to_owned(),
        });
        Ok(())
    }

    /// From now on calls `look` whenever the peer has been silent for `first`, and `every` so often
    /// from then on, where it should answer; and once it has answered.
    pub fn watch_silence(
        &mut self,
        first: Duration,
        every: Duration,
        look: impl FnMut(Watched) + 'static,
    ) {
        self.watch = Some(Watch {
            first,
            every,
            due: None,
            has_looked: false,
            look: Box::new(look),
        });
    }

    /// Waits for the peer, which has been silent since then, and reads its message.
    fn await_peer(&mut self, interest: Interest, since: &mut Instant) -> Result<()> {
        let limit = match self.silence {
            Silence::Borne => None,
            _ => receiver_timeout(),
        };
        let left = limit.map(|limit| limit.saturating_sub(since.elapsed()));
        let heard = if left.is_some_and(|left| left.is_zero()) {
            let is_at_work = match &self.silence {
                Silence::LookedInto(backend) => backend.is_at_work(),
                _ => false,
            };
            // The peer may have said something just now.
            if !is_at_work && !self.wait(interest, Some(Duration::from_millis(100))).socket {
                return Err(Error::Silent);
            }
            true
        } else {
            let until_look = self.watch.as_mut().map(Watch::left);
            let step = [left, until_look].into_iter().flatten().min();
            self.wait(interest, step).socket
        };
        if heard {
            *since = Instant::now();
            self.consume()?;
        }
        match &mut self.watch {
            Some(watch) if heard => watch.is_heard(),
            Some(watch) => watch.is_silent(),
            None => {}
        }
        Ok(())
    }

    fn finish_connecting(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let mut poll = 2; // PGRES_POLLING_WRITING: what libpq asks to assume before the first poll
        loop {
            if PQstatus(self.live()) == CONNECTION_BAD {
                return Err(self.lost());
            }
            match poll {
                PGRES_POLLING_OK => return Ok(()),
                PGRES_POLLING_FAILED => return Err(self.lost()),
                _ => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Connection(
                    "timeout expired while connecting".to_owned(),
                ));
            }
            let interest = if poll == PGRES_POLLING_READING {
                Interest::Read
            } else {
                Interest::Write
            };
            if self
                .wait(interest, Some(left.min(Duration::from_secs(1))))
                .socket
            {
                poll = PQconnectPoll(self.live());
            }
        }
    }

    /// Wait for the socket, this process's latch or the time to pass. The latch is reset when it
    /// was set, and interrupts are processed.
    pub fn wait(&self, interest: Interest, timeout: Option<Duration>) -> Woken {
        let socket = PQsocket(self.live());
        crate::latch::wait_for_socket(socket, interest, timeout)
    }

    /// The socket, for waiting in other code.
    #[must_use]
    pub fn socket(&self) -> i32 {
        PQsocket(self.live())
    }

    /// `server_version_num` of the peer.
    #[must_use]
    pub fn server_version(&self) -> i32 {
        PQserverVersion(self.live())
    }

    /// Whether the peer was in recovery when it last said so: as the connection began, or when a
    /// later command has ended. A peer that was promoted since may still count as a standby.
    #[must_use]
    pub fn is_to_standby(&self) -> bool {
        let name = c"in_hot_standby";
        // SAFETY: `raw` is live; the name ends with a zero byte. libpq gives null, or a string that
        // lives until the connection is used again, and is copied at once.
        let value = text(unsafe { PQparameterStatus(self.raw.as_ptr(), name.as_ptr()) });
        value.as_deref() == Some("on")
    }

    /// Whether the peer asked for a password: it did not let this server's operating system user
    /// in, or just anybody.
    #[must_use]
    pub fn used_password(&self) -> bool {
        PQconnectionUsedPassword(self.live()) != 0
    }

    fn lost(&self) -> Error {
        let message = text(PQerrorMessage(self.live())).unwrap_or_default();
        if message.is_empty() {
            Error::Connection("connection to the provider was lost".to_owned())
        } else {
            Error::Connection(message)
        }
    }

    fn send(&mut self, sql: &str) -> Result<()> {
        self.start_query(sql)?;
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        let mut since = Instant::now();
        loop {
            match PQflush(self.live()) {
                0 => return Ok(()),
                1 => self.await_peer(Interest::Both, &mut since)?,
                _ => return Err(self.lost()),
            }
        }
    }

    fn consume(&mut self) -> Result<()> {
        if PQconsumeInput(self.live()) == 0 {
            Err(self.lost())
        } else {
            Ok(())
        }
    }

    fn next_result(&mut self) -> Result<Option<ResultHandle>> {
        let mut since = Instant::now();
        while PQisBusy(self.live()) != 0 {
            self.await_peer(Interest::Read, &mut since)?;
        }
        // Not busy, so this does not block; the handle clears the result.
        Ok(NonNull::new(PQgetResult(self.live())).map(|raw| ResultHandle { raw }))
    }

    /// Lifts `transaction_timeout` for this session: it is meant for sessions of users. Of peers
    /// older than 17 no such setting is known, so the options of the connection can't have it.
    ///
    /// # Errors
    /// As [`Connection::query`].
    pub fn lift_transaction_timeout(&mut self) -> Result<()> {
        if self.server_version() >= 170_000 {
            self.query("set transaction_timeout = 0")?;
        }
        Ok(())
    }

    /// Run SQL, or a replication command, and collect the last result's rows as text.
    ///
    /// # Errors
    /// [`Error::Server`] with the peer's words, [`Error::Connection`].
    pub fn query(&mut self, sql: &str) -> Result<Rows> {
        self.send_query(sql)?;
        self.finish_query()
    }

    /// Send SQL whose rows [`Connection::finish_query`] collects; nothing else may be asked before
    /// that.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn send_query(&mut self, sql: &str) -> Result<()> {
        self.send(sql)
    }

    /// Begins to send SQL, and does not wait. [`Connection::try_finish_query`] goes on.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn start_query(&mut self, sql: &str) -> Result<()> {
        let sql = CString::new(sql).map_err(|_| Error::Unexpected("a query with a zero byte"))?;
        // SAFETY: `raw` is live, `sql` NUL-terminated; libpq copies it.
        if unsafe { PQsendQuery(self.raw.as_ptr(), sql.as_ptr()) } == 0 {
            return Err(self.lost());
        }
        Ok(())
    }

    /// Returns the rows of the sent query.
    ///
    /// # Errors
    /// Those of [`Connection::query`].
    pub fn finish_query(&mut self) -> Result<Rows> {
        let mut rows = Rows::default();
        let mut failed = None;
        while let Some(result) = self.next_result()? {
            match result.status() {
                PGRES_TUPLES_OK => rows = result.rows(),
                PGRES_COMMAND_OK | PGRES_EMPTY_QUERY => {}
                PGRES_COPY_OUT | PGRES_COPY_BOTH => return Err(Error::Unexpected("a query")),
                _ => {
                    let error = self.server_error(&result);
                    failed.get_or_insert(error);
                }
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(rows),
        }
    }

    /// Reads the received rows of the sent query, without waiting. Returns true once these are all.
    ///
    /// # Errors
    /// Those of [`Connection::query`]. Then the connection can't be used any more.
    pub fn try_finish_query(&mut self, rows: &mut Rows) -> Result<bool> {
        if PQflush(self.live()) < 0 {
            return Err(self.lost());
        }
        self.consume()?;
        while PQisBusy(self.live()) == 0 {
            match self.next_result()? {
                None => return Ok(true),
                Some(result) if result.status() == PGRES_TUPLES_OK => *rows = result.rows(),
                Some(result) => return Err(self.server_error(&result)),
            }
        }
        Ok(false)
    }

    fn server_error(&self, result: &ResultHandle) -> Error {
        match result.field(PG_DIAG_SQLSTATE) {
            Some(sqlstate) => Error::Server {
                sqlstate: SqlState::parse(&sqlstate),
                message: result.field(PG_DIAG_MESSAGE_PRIMARY).unwrap_or_default(),
                detail: result.field(PG_DIAG_MESSAGE_DETAIL),
                hint: result.field(PG_DIAG_MESSAGE_HINT),
                in_recovery: self.is_to_standby(),
            },
            None => self.lost(),
        }
    }

    /// Runs one statement with parameters in text form, and collects its rows in binary form. After
    /// [`Error::Server`] the connection may be used again, if it is open. After any other error it
    /// is of no use: an answer may still come.
    ///
    /// # Errors
    /// [`Error::Server`] with the peer's words, [`Error::Connection`], [`Error::Timeout`] past
    /// `deadline`.
    pub fn ask(
        &mut self,
        sql: &CStr,
        parameters: &[CString],
        deadline: Instant,
        shown: Wait,
    ) -> Result<Cells> {
        let values: Vec<*const c_char> = parameters.iter().map(|value| value.as_ptr()).collect();
        let count = c_int::try_from(values.len()).map_err(|_| Error::Unexpected("a query"))?;
        // SAFETY: `raw` is live; the strings are NUL-terminated and copied by libpq. No types: the
        // peer infers them. No lengths and formats: all is text. The result is to be binary.
        let sent = unsafe {
            PQsendQueryParams(
                self.raw.as_ptr(),
                sql.as_ptr(),
                count,
                std::ptr::null(),
                values.as_ptr(),
                std::ptr::null(),
                std::ptr::null(),
                1,
            )
        };
        if sent == 0 {
            return Err(self.lost());
        }
        let mut answer = None;
        loop {
            let unsent = PQflush(self.live());
            if unsent < 0 {
                return Err(self.lost());
            }
            if unsent == 0 && PQisBusy(self.live()) == 0 {
                // Not busy, so this does not block; the handle clears the result.
                let Some(raw) = NonNull::new(PQgetResult(self.live())) else {
                    return answer.unwrap_or(Err(Error::Unexpected("a query")));
                };
                let result = ResultHandle { raw };
                // The next statement may be sent once there is no result any more.
                if matches!(answer, Some(Err(_))) {
                    continue;
                }
                answer = Some(if result.status() == PGRES_TUPLES_OK {
                    Ok(Cells(result))
                } else {
                    Err(self.server_error(&result))
                });
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout);
            }
            let interest = if unsent == 0 {
                Interest::Read
            } else {
                Interest::Both
            };
            if crate::latch::wait_for_socket_as(self.socket(), interest, left, shown).socket {
                self.consume()?;
            }
        }
    }

    /// Start a COPY ... TO STDOUT or START_REPLICATION.
    ///
    /// # Errors
    /// [`Error::Server`], [`Error::Connection`].
    pub fn start_copy(&mut self, command: &str) -> Result<()> {
        self.send(command)?;
        match self.next_result()? {
            Some(result) => match result.status() {
                PGRES_COPY_OUT | PGRES_COPY_BOTH => Ok(()),
                PGRES_COMMAND_OK | PGRES_TUPLES_OK | PGRES_EMPTY_QUERY => {
                    Err(Error::Unexpected("a copy command"))
                }
                _ => {
                    let error = self.server_error(&result);
                    drop(result);
                    while self.next_result()?.is_some() {}
                    Err(error)
                }
            },
            None => Err(Error::Unexpected("a copy command")),
        }
    }

    /// The next message of a running copy, without waiting.
    ///
    /// # Errors
    /// [`Error::Server`] when the peer ended the copy with an error, [`Error::Connection`].
    pub fn try_copy_data(&mut self) -> Result<CopyData> {
        let mut bytes = std::ptr::null_mut();
        let mut count = PQgetCopyData(self.live(), &mut bytes, 1);
        if count == 0 {
            self.consume()?;
            count = PQgetCopyData(self.live(), &mut bytes, 1);
        }
        match usize::try_from(count) {
            Ok(0) => Ok(CopyData::Pending),
            Ok(len) => Ok(CopyData::Message(CopyMessage { bytes, len })),
            Err(_) if count == -1 => {
                // The copy is over; the results that follow say whether with success.
                let mut failed = None;
                while let Some(result) = self.next_result()? {
                    match result.status() {
                        PGRES_COMMAND_OK | PGRES_TUPLES_OK => {}
                        PGRES_COPY_BOTH | PGRES_COPY_OUT => break,
                        _ => {
                            let error = self.server_error(&result);
                            failed.get_or_insert(error);
                        }
                    }
                }
                match failed {
                    Some(error) => Err(error),
                    None => Ok(CopyData::End),
                }
            }
            Err(_) => Err(self.lost()),
        }
    }

    /// The next message of a running copy; waits for it. `None` at the end.
    ///
    /// # Errors
    /// As [`Connection::try_copy_data`].
    pub fn copy_data(&mut self) -> Result<Option<CopyMessage>> {
        let mut since = Instant::now();
        loop {
            match self.try_copy_data()? {
                CopyData::Message(message) => return Ok(Some(message)),
                CopyData::End => return Ok(None),
                CopyData::Pending => self.await_peer(Interest::Read, &mut since)?,
            }
        }
    }

    /// Send a message into a running CopyBoth.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn put_copy_data(&mut self, message: &[u8]) -> Result<()> {
        self.put_copy_messages(&[message])
    }

    /// Send messages into a running CopyBoth, in one write as long as they are few.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn put_copy_messages(&mut self, messages: &[&[u8]]) -> Result<()> {
        for message in messages {
            let len = c_int::try_from(message.len()).map_err(|_| Error::Unexpected("a message"))?;
            loop {
                // SAFETY: `raw` is live; libpq copies `len` bytes.
                match unsafe { PQputCopyData(self.raw.as_ptr(), message.as_ptr().cast(), len) } {
                    1 => break,
                    0 => self.flush()?,
                    _ => return Err(self.lost()),
                }
            }
        }
        self.flush()
    }

    /// Whether libpq still thinks that the connection stands.
    #[must_use]
    pub fn is_open(&self) -> bool {
        PQstatus(self.live()) == CONNECTION_OK
    }
}

/// Rows of a result in binary form.
#[derive(Debug)]
pub struct Cells(ResultHandle);

impl Cells {
    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::try_from(PQntuples(self.0.live())).unwrap_or(0)
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of a cell; `None` if it is null or does not exist.
    #[must_use]
    pub fn get(&self, row: usize, column: usize) -> Option<&[u8]> {
        let (row, column) = (c_int::try_from(row).ok()?, c_int::try_from(column).ok()?);
        self.0.cell(row, column)
    }
}

#[derive(Debug)]
struct ResultHandle {
    raw: NonNull<PGresult>,
}

impl Drop for ResultHandle {
    fn drop(&mut self) {
        // SAFETY: from PQgetResult, cleared once; pure libpq.
        unsafe { PQclear(self.raw.as_ptr()) }
    }
}

impl ResultHandle {
    fn live(&self) -> &PGresult {
        // SAFETY: the object exists until `self` is dropped.
        unsafe { self.raw.as_ref() }
    }

    fn status(&self) -> c_int {
        PQresultStatus(self.live())
    }

    fn field(&self, field: c_int) -> Option<String> {
        text(PQresultErrorField(self.live(), field))
    }

    /// The bytes of a cell; `None` if it is null or does not exist.
    fn cell(&self, row: c_int, column: c_int) -> Option<&[u8]> {
        let result = self.live();
        if row >= PQntuples(result)
            || column >= PQnfields(result)
            || PQgetisnull(result, row, column) != 0
        {
            return None;
        }
        let length = usize::try_from(PQgetlength(result, row, column)).ok()?;
        let bytes = PQgetvalue(result, row, column).cast::<u8>();
        // SAFETY: the cell exists and is not null, so it has so many bytes, as long as the result.
        Some(unsafe { std::slice::from_raw_parts(bytes, length) })
    }

    /// All rows, whose cells are text.
    fn rows(&self) -> Rows {
        let (rows, columns) = (PQntuples(self.live()), PQnfields(self.live()));
        let cells = (0..rows).flat_map(|row| {
            (0..columns).map(move |column| {
                let bytes = self.cell(row, column)?;
                Some(String::from_utf8_lossy(bytes).into_owned())
            })
        });
        Rows::new(usize::try_from(columns).unwrap_or(0), cells.collect())
    }
}
