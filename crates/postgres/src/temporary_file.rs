//! Temporary files of this server. Run by processes that keep more than memory has room for.
//!
//! PostgreSQL's own temporary files count against `temp_file_limit`, lie in the default tablespace,
//! and go with the process, or when the server starts again.
//!
//! Not for: the contents of a file.

use std::ffi::CStr;
use std::io;

use crate::owned::frees;
use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys;

use crate::compat;
use crate::error::{self, PgError};

/// A temporary file that is not bound to a transaction. It goes when it is dropped; if the process
/// unwinds, with the process.
#[derive(Debug)]
pub struct TemporaryFile(pg_sys::File);

impl TemporaryFile {
    /// Creates an empty one. Raises PostgreSQL's errors.
    #[must_use]
    pub fn create() -> Self {
        // SAFETY: a file that is not bound to a transaction; errors unwind.
        Self(unsafe { pg_sys::OpenTemporaryFile(true) })
    }

    /// Where the file is, for other processes of this server.
    #[must_use]
    pub fn path(&self) -> String {
        // SAFETY: the file is open, and its name lives as long.
        let path = unsafe { CStr::from_ptr(pg_sys::FilePathName(self.0)) };
        path.to_string_lossy().into_owned()
    }

    /// Writes all of the bytes at a place.
    ///
    /// # Errors
    /// 53400 beyond `temp_file_limit`; 53100 if the disk is full; another class of
    /// [`SqlState::of_io`] if the file can't be written; errors that PostgreSQL raises.
    pub fn write(&self, bytes: &[u8], at: u64) -> Result<(), PgError> {
        let (mut rest, mut place) = (bytes, at);
        while !rest.is_empty() {
            // PostgreSQL raises that it would be too large before it has done anything.
            let written = error::catch(|| compat::file_write(self.0, rest, place))?
                .map_err(|reason| failed("write", &reason))?;
            place += written as u64;
            rest = rest.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// Reads as many bytes from a place as there is room for.
    ///
    /// # Errors
    /// A class of [`SqlState::of_io`] if the file can't be read; 58030 if it ends before.
    pub fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), PgError> {
        let (mut rest, mut place) = (bytes, at);
        while !rest.is_empty() {
            let read =
                compat::file_read(self.0, rest, place).map_err(|reason| failed("read", &reason))?;
            if read == 0 {
                return Err(PgError::new(
                    SqlState::IoError,
                    "a temporary file is too short",
                ));
            }
            place += read as u64;
            rest = rest.get_mut(read..).unwrap_or_default();
        }
        Ok(())
    }
}

fn failed(what: &str, reason: &io::Error) -> PgError {
    PgError::new(
        SqlState::of_io(reason),
        format!("could not {what} a temporary file"),
    )
    .with_detail(reason.to_string())
}

frees! {
    TemporaryFile: |value| pg_sys::FileClose(value.0);
}
