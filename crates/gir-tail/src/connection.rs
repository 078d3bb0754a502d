//! A replication connection through libpq, with its connection strings, environment, password file,
//! TLS and authentication.
//!
//! This module has all unsafe code of the program. Connecting and commands block; reading the
//! stream does not.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::time::Duration;

use pq_sys::{ConnStatusType, ExecStatusType};

/// Reason why the server could not be reached, or did not do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection could not be made, or was lost.
    #[error("{0}")]
    Connection(String),
    /// The server reported an error.
    #[error("{message}{}", hint.as_deref().map(|hint| format!("\ngir-tail: hint: {hint}")).unwrap_or_default())]
    Server {
        /// SQLSTATE, five characters.
        sqlstate: String,
        /// Message of the server.
        message: String,
        /// Hint of the server.
        hint: Option<String>,
    },
}

impl Error {
    /// Returns whether another try may succeed: after an error of the connection, while a server
    /// stops or starts, or while another process still holds the slot.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Connection(_) => true,
            Self::Server { sqlstate, .. } => {
                sqlstate == OBJECT_IN_USE
                    || ["08", "53", "57"]
                        .iter()
                        .any(|class| sqlstate.starts_with(class))
            }
        }
    }
}

/// SQLSTATE of a slot that another process holds (object_in_use).
const OBJECT_IN_USE: &str = "55006";

/// SQLSTATE of a slot that exists already (duplicate_object).
pub const DUPLICATE_OBJECT: &str = "42710";

/// Result of an operation on the connection.
pub type Result<T> = std::result::Result<T, Error>;

/// Result of reading from the stream.
pub enum Received {
    /// One message of the stream.
    Message(Vec<u8>),
    /// No message is available now.
    Nothing,
    /// The server ended the stream.
    End,
}

/// An open connection.
pub struct Connection {
    raw: *mut pq_sys::PGconn,
}

/// libpq's text without line breaks.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn one_line(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller says.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    text.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Connection("text has a zero byte".to_owned()))
}

impl Connection {
    /// Connects to a database for replication; `dbname` may be a connection string.
    pub fn open(dbname: &str) -> Result<Self> {
        let dbname = c_string(dbname)?;
        // Later keywords override the connection string, but not dbname itself.
        let keywords = [
            c"fallback_application_name",
            c"dbname",
            c"replication",
            c"client_encoding",
            c"connect_timeout",
        ];
        let values = [c"gir-tail", &dbname, c"database", c"UTF8", c"15"];
        let mut keyword_list: Vec<*const c_char> = keywords.iter().map(|k| k.as_ptr()).collect();
        let mut value_list: Vec<*const c_char> = values.iter().map(|v| v.as_ptr()).collect();
        keyword_list.push(std::ptr::null());
        value_list.push(std::ptr::null());
        // SAFETY: both lists end with a null and outlive the call.
        let raw =
            unsafe { pq_sys::PQconnectdbParams(keyword_list.as_ptr(), value_list.as_ptr(), 1) };
        if raw.is_null() {
            return Err(Error::Connection("out of memory".to_owned()));
        }
        let connection = Self { raw };
        // SAFETY: a connection that libpq made.
        if unsafe { pq_sys::PQstatus(raw) } != ConnStatusType::CONNECTION_OK {
            return Err(connection.lost());
        }
        Ok(connection)
    }

    /// Returns libpq's error message of the connection.
    fn lost(&self) -> Error {
        // SAFETY: a connection that libpq made; the text is copied.
        let message = unsafe { one_line(pq_sys::PQerrorMessage(self.raw)) };
        Error::Connection(if message.is_empty() {
            "connection lost".to_owned()
        } else {
            message
        })
    }

    /// Runs a command whose result is not needed, or that starts the stream.
    pub fn command(&mut self, command: &str) -> Result<()> {
        let command = c_string(command)?;
        // SAFETY: a C string; the result is freed once.
        unsafe {
            let result = pq_sys::PQexec(self.raw, command.as_ptr());
            let status = pq_sys::PQresultStatus(result);
            let done = match status {
                ExecStatusType::PGRES_COMMAND_OK
                | ExecStatusType::PGRES_TUPLES_OK
                | ExecStatusType::PGRES_COPY_BOTH => Ok(()),
                _ => Err(self.failure(result)),
            };
            pq_sys::PQclear(result);
            done
        }
    }

    /// Runs a command and returns the columns of its first row; an empty list if there is no row.
    pub fn row(&mut self, command: &str) -> Result<Vec<Option<String>>> {
        let command = c_string(command)?;
        // SAFETY: a C string; values are copied from within the result's bounds, which is freed
        // once.
        unsafe {
            let result = pq_sys::PQexec(self.raw, command.as_ptr());
            let row = if pq_sys::PQresultStatus(result) == ExecStatusType::PGRES_TUPLES_OK {
                let columns = match pq_sys::PQntuples(result) {
                    0 => 0,
                    _ => pq_sys::PQnfields(result),
                };
                Ok((0..columns)
                    .map(|column| {
                        (pq_sys::PQgetisnull(result, 0, column) == 0)
                            .then(|| one_line(pq_sys::PQgetvalue(result, 0, column)))
                    })
                    .collect())
            } else {
                Err(self.failure(result))
            };
            pq_sys::PQclear(result);
            row
        }
    }

    /// # Safety
    /// `result` is null or one of libpq's.
    unsafe fn failure(&self, result: *const pq_sys::PGresult) -> Error {
        let field = |code: u8| {
            // SAFETY: as the caller says; the text is copied.
            unsafe {
                let text = pq_sys::PQresultErrorField(result, c_int::from(code));
                (!text.is_null()).then(|| one_line(text))
            }
        };
        match field(b'C') {
            Some(sqlstate) => Error::Server {
                sqlstate,
                message: field(b'M').unwrap_or_default(),
                hint: field(b'H'),
            },
            None => self.lost(),
        }
    }

    /// Returns the next message of the stream, if one is available.
    pub fn receive(&mut self) -> Result<Received> {
        // SAFETY: the connection is in a stream; the buffer is libpq's, copied and freed once.
        unsafe {
            if pq_sys::PQconsumeInput(self.raw) != 1 {
                return Err(self.lost());
            }
            let mut buffer = std::ptr::null_mut();
            match pq_sys::PQgetCopyData(self.raw, &raw mut buffer, 1) {
                0 => Ok(Received::Nothing),
                -1 => {
                    let result = pq_sys::PQgetResult(self.raw);
                    let fine = result.is_null()
                        || matches!(
                            pq_sys::PQresultStatus(result),
                            ExecStatusType::PGRES_COMMAND_OK | ExecStatusType::PGRES_COPY_IN
                        );
                    let ended = if fine {
                        Ok(Received::End)
                    } else {
                        Err(self.failure(result))
                    };
                    pq_sys::PQclear(result);
                    ended
                }
                len => match usize::try_from(len) {
                    Ok(len) => {
                        let bytes = std::slice::from_raw_parts(buffer.cast::<u8>(), len).to_vec();
                        pq_sys::PQfreemem(buffer.cast());
                        Ok(Received::Message(bytes))
                    }
                    Err(_) => Err(self.lost()),
                },
            }
        }
    }

    /// Sends a message in the stream.
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        let len = c_int::try_from(message.len()).unwrap_or(c_int::MAX);
        // SAFETY: as many bytes as said, which libpq copies.
        unsafe {
            let sent = pq_sys::PQputCopyData(self.raw, message.as_ptr().cast(), len);
            if sent != 1 || pq_sys::PQflush(self.raw) < 0 {
                return Err(self.lost());
            }
        }
        Ok(())
    }

    /// Ends the stream in order: afterwards the server has read everything that was sent.
    pub fn end(mut self) -> Result<()> {
        // SAFETY: the connection is in a stream.
        unsafe {
            if pq_sys::PQputCopyEnd(self.raw, std::ptr::null()) != 1
                || pq_sys::PQflush(self.raw) < 0
            {
                return Err(self.lost());
            }
        }
        // Messages under way are dropped; a server that does not answer is not waited for.
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while std::time::Instant::now() < deadline {
            match self.receive()? {
                Received::End => break,
                Received::Message(_) => {}
                Received::Nothing => self.wait(Duration::from_millis(100)),
            }
        }
        Ok(())
    }

    /// Waits until data or a signal arrives, or the time is over.
    pub fn wait(&self, time: Duration) {
        // SAFETY: one descriptor, which stays open during the call.
        unsafe {
            let mut socket = libc::pollfd {
                fd: pq_sys::PQsocket(self.raw),
                events: libc::POLLIN,
                revents: 0,
            };
            let time = c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX);
            libc::poll(&raw mut socket, 1, time);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: made by libpq, let go once.
        unsafe { pq_sys::PQfinish(self.raw) };
    }
}
