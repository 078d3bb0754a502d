//! A message in the making that is too large to be kept in memory: a temporary file of this
//! server's. Run by the walsender.
//!
//! It counts against `temp_file_limit`, is not bound to a transaction, and goes with this value, or
//! with the process.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::error::PgError;
use braid_postgres::temporary_file::TemporaryFile;

/// The written part of a message.
#[derive(Debug)]
pub(super) struct MessageFile {
    file: TemporaryFile,
    length: u64,
}

impl MessageFile {
    /// An empty one.
    pub(super) fn create() -> Self {
        Self {
            file: TemporaryFile::create(),
            length: 0,
        }
    }

    /// How many bytes it has.
    pub(super) fn len(&self) -> usize {
        usize::try_from(self.length).unwrap_or(usize::MAX)
    }

    /// Append some.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        match self.file.write(bytes, self.length) {
            Ok(()) => self.length += bytes.len() as u64,
            Err(error) if error.sqlstate == SqlState::ConfigurationLimitExceeded => PgError::new(
                SqlState::ConfigurationLimitExceeded,
                "a message to the client does not fit into temporary files",
            )
            .with_detail(error.message)
            .with_hint("Set the option \"max-message-size\" to less, or raise temp_file_limit.")
            .raise(),
            Err(error) => error.raise(),
        }
    }

    /// Reads the bytes at `place`, as many as there is room for.
    pub(super) fn read(&self, place: usize, bytes: &mut [u8]) {
        if let Err(error) = self.file.read(bytes, place as u64) {
            error.raise();
        }
    }
}
