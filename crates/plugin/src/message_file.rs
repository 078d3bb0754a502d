//! A message in the making that is too large to be kept in memory: a temporary file of this server's. Run by the walsender.
//!
//! It counts against `temp_file_limit`, is not bound to a transaction, and goes with this value, or with the process.

use braid_postgres::compat;
use braid_postgres::error::{self, PgError};
use pgrx::pg_sys;

/// What was written of a message.
#[derive(Debug)]
pub(super) struct MessageFile {
    file: pg_sys::File,
    length: u64,
}

impl MessageFile {
    /// An empty one.
    pub(super) fn create() -> Self {
        Self {
            // SAFETY: a file that is not bound to a transaction; errors unwind.
            file: unsafe { pg_sys::OpenTemporaryFile(true) },
            length: 0,
        }
    }

    /// How many bytes it has.
    pub(super) fn len(&self) -> usize {
        usize::try_from(self.length).unwrap_or(usize::MAX)
    }

    /// Append some.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (file, end) = (self.file, self.length);
            // PostgreSQL raises that it would be too large before it has done anything.
            let written = match error::catch(|| compat::file_write(file, rest, end)) {
                Ok(Some(written)) if written > 0 => written,
                Ok(_) => failed("write"),
                Err(error) if error.sqlstate == "53400" => PgError::new(
                    "53400",
                    "a message to the client does not fit into temporary files",
                )
                .with_detail(error.message)
                .with_hint("Set the option \"max-message-size\" to less, or raise temp_file_limit.")
                .raise(),
                Err(error) => error.raise(),
            };
            self.length += written as u64;
            rest = rest.get(written..).unwrap_or_default();
        }
    }

    /// Read what is at `place`, as many bytes as there is room for.
    pub(super) fn read(&self, place: usize, bytes: &mut [u8]) {
        let mut place = place as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let count = match compat::file_read(self.file, rest, place) {
                Some(0) => PgError::new("58030", "a temporary file is too short").raise(),
                Some(count) => count,
                None => failed("read"),
            };
            place += count as u64;
            rest = rest.get_mut(count..).unwrap_or_default();
        }
    }
}

fn failed(what: &str) -> ! {
    let reason = std::io::Error::last_os_error();
    PgError::new("58030", format!("could not {what} a temporary file"))
        .with_detail(reason.to_string())
        .raise()
}

impl Drop for MessageFile {
    /// While an error unwinds it is left to the end of the process.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the file is open, and is not used after this.
            unsafe { pg_sys::FileClose(self.file) };
        }
    }
}
