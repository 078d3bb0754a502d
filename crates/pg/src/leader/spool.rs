//! Where the leader keeps what a transaction has sent so far, until it commits, and the collector of deletions what a large one has
//! deleted: a temporary file of this server's.
//!
//! PostgreSQL's own temporary files count against `temp_file_limit`, lie in the default tablespace, and go
//! with the process, or when the server starts again. Nothing in them is needed then: the provider sends all of a transaction again
//! that is not confirmed. Another process of this server may read what was handed to the file ([`Spool::path`], [`Frames`]).
//!
//! A rolled back subtransaction takes with it whatever came since its first change: it was in hand all that time, or a
//! subtransaction of its own that goes with it. So a place to go back to is all that is kept of it.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::os::unix::fs::FileExt;

use pgrx::pg_sys;

use crate::compat;
use crate::error::{self, PgError};

/// What does not fit into `temp_file_limit`.
pub(crate) const NO_ROOM: &str = "a transaction does not fit into temporary files";

/// What is gathered before it is handed to the file, and read from it at once.
const CHUNK: usize = 128 * 1024;

/// The records of a transaction that has not ended.
#[derive(Debug)]
pub(crate) struct Spool {
    file: pg_sys::File,
    /// What is yet to be handed to the file, which ends at `handed`.
    buffer: Vec<u8>,
    handed: u64,
    /// Subtransactions in the order in which they began, and where.
    subtransactions: Vec<(u32, u64)>,
    /// Where a subtransaction is in that list.
    known: HashMap<u32, usize>,
    /// Where it is read.
    reading: u64,
}

fn failed(what: &str) -> PgError {
    let reason = std::io::Error::last_os_error();
    PgError::new("58030", format!("could not {what} a temporary file"))
        .with_detail(reason.to_string())
}

impl Spool {
    /// An empty one.
    pub(crate) fn create() -> Self {
        Self {
            // SAFETY: a file that is not bound to a transaction; errors unwind.
            file: unsafe { pg_sys::OpenTemporaryFile(true) },
            buffer: Vec::new(),
            handed: 0,
            subtransactions: Vec::new(),
            known: HashMap::new(),
            reading: 0,
        }
    }

    /// Where the file is, for other processes of this server.
    pub(crate) fn path(&self) -> String {
        // SAFETY: the file is open, and its name lives as long.
        let path = unsafe { CStr::from_ptr(pg_sys::FilePathName(self.file)) };
        path.to_string_lossy().into_owned()
    }

    fn place(&self) -> u64 {
        self.handed + self.buffer.len() as u64
    }

    fn go_to(&mut self, place: u64) {
        if let Some(kept) = place.checked_sub(self.handed) {
            self.buffer
                .truncate(usize::try_from(kept).unwrap_or(usize::MAX));
        } else {
            self.buffer.clear();
            self.handed = place;
        }
    }

    /// What is written next belongs to this subtransaction.
    pub(crate) fn subtransaction(&mut self, xid: u32) {
        if self.known.contains_key(&xid) {
            return;
        }
        let place = self.place();
        self.known.insert(xid, self.subtransactions.len());
        self.subtransactions.push((xid, place));
    }

    /// Append whole records.
    pub(crate) fn write(&mut self, records: &[u8]) -> Result<(), PgError> {
        let len = u32::try_from(records.len())
            .map_err(|_| PgError::new("54000", "frame from the provider is too large"))?
            .to_ne_bytes();
        self.buffer.extend_from_slice(&len);
        self.buffer.extend_from_slice(records);
        if self.buffer.len() >= CHUNK {
            self.hand_over()?;
        }
        Ok(())
    }

    /// Hand what was written to the file, for whoever reads it. How long it is then.
    pub(crate) fn hand_over(&mut self) -> Result<u64, PgError> {
        let mut rest = self.buffer.as_slice();
        while !rest.is_empty() {
            let (file, end) = (self.file, self.handed);
            // PostgreSQL raises that it would be too large before it has done anything.
            let written = error::catch(|| compat::file_write(file, rest, end))
                .map_err(|error| match error.sqlstate.as_str() {
                    "53400" => PgError::new("53400", NO_ROOM).with_detail(error.message),
                    _ => error,
                })?
                .filter(|written| *written > 0)
                .ok_or_else(|| failed("write"))?;
            self.handed += written as u64;
            rest = rest.get(written..).unwrap_or_default();
        }
        self.buffer.clear();
        self.buffer.shrink_to(2 * CHUNK);
        Ok(self.handed)
    }

    /// Forget what came since the first change of a subtransaction. Whether there was any.
    pub(crate) fn roll_back(&mut self, xid: u32) -> bool {
        let Some(&(_, place)) = self
            .known
            .get(&xid)
            .and_then(|index| self.subtransactions.get(*index))
        else {
            return false;
        };
        while let Some((last, _)) = self.subtransactions.pop() {
            self.known.remove(&last);
            if last == xid {
                break;
            }
        }
        self.go_to(place);
        true
    }

    /// Read from the start. Nothing is written any more.
    pub(crate) fn rewind(&mut self) -> Result<(), PgError> {
        self.hand_over()?;
        self.reading = 0;
        Ok(())
    }

    /// Append the records that were written at once to `records`. False at the end.
    pub(crate) fn read(&mut self, records: &mut Vec<u8>) -> Result<bool, PgError> {
        if self.reading >= self.handed {
            return Ok(false);
        }
        let mut len = [0; 4];
        self.fill(&mut len)?;
        let len = usize::try_from(u32::from_ne_bytes(len)).unwrap_or(usize::MAX);
        let before = records.len();
        records.resize(before.saturating_add(len), 0);
        self.fill(records.get_mut(before..).unwrap_or_default())?;
        Ok(true)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), PgError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let read =
                compat::file_read(self.file, rest, self.reading).ok_or_else(|| failed("read"))?;
            if read == 0 {
                return Err(PgError::new("58030", "a temporary file is too short"));
            }
            self.reading += read as u64;
            rest = rest.get_mut(read..).unwrap_or_default();
        }
        Ok(())
    }
}

impl Drop for Spool {
    /// After an error the process ends, and the file with it.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the file is open, and is not used after this.
            unsafe { pg_sys::FileClose(self.file) };
        }
    }
}

/// What was written at once, read by another process while more is written.
#[derive(Debug)]
pub(crate) struct Frames {
    file: File,
    chunk: Vec<u8>,
    /// What of the chunk was taken.
    taken: usize,
    /// Where the chunk ends in the file.
    at: u64,
}

impl Frames {
    /// From the start of the file of a [`Spool`].
    pub(crate) fn open(path: &str) -> Result<Self, PgError> {
        let file = File::open(path)
            .map_err(|error| PgError::new("58030", format!("could not open {path}: {error}")))?;
        Ok(Self {
            file,
            chunk: Vec::new(),
            taken: 0,
            at: 0,
        })
    }

    /// How far in the file what comes next is.
    pub(crate) fn place(&self) -> u64 {
        self.at - (self.chunk.len() - self.taken) as u64
    }

    /// The next records that were written at once; `None` where there are none before `end`, up to which the file was handed over.
    pub(crate) fn next(&mut self, end: u64) -> Result<Option<&[u8]>, PgError> {
        if self.place() >= end {
            return Ok(None);
        }
        self.have(4, end)?;
        let len = self
            .chunk
            .get(self.taken..)
            .and_then(<[u8]>::first_chunk::<4>)
            .map_or(0, |raw| u32::from_ne_bytes(*raw));
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.have(len.saturating_add(4), end)?;
        let from = self.taken + 4;
        self.taken = from + len;
        Ok(self.chunk.get(from..from + len))
    }

    /// Have so many bytes in the chunk that were not taken.
    fn have(&mut self, wanted: usize, end: u64) -> Result<(), PgError> {
        if self.chunk.len() - self.taken >= wanted {
            return Ok(());
        }
        self.chunk.drain(..self.taken);
        self.taken = 0;
        let left = usize::try_from(end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let before = self.chunk.len();
        let more = CHUNK.max(wanted - before).min(left);
        if before + more < wanted {
            return Err(PgError::new("58030", "a temporary file is too short"));
        }
        self.chunk.resize(before + more, 0);
        self.file
            .read_exact_at(self.chunk.get_mut(before..).unwrap_or_default(), self.at)
            .map_err(|error| {
                PgError::new("58030", format!("could not read a temporary file: {error}"))
            })?;
        self.at += more as u64;
        Ok(())
    }
}
