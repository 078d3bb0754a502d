//! Where the leader keeps what a transaction has sent so far, until it commits, and the collector of deletions what a large one has
//! deleted: a temporary file of this server's.
//!
//! PostgreSQL's own temporary files (`BufFile`) count against `temp_file_limit`, lie in the default tablespace, and go
//! with the process, or when the server starts again. Nothing in them is needed then: the provider sends all of a transaction again
//! that is not confirmed.
//!
//! A rolled back subtransaction takes with it whatever came since its first change: it was in hand all that time, or a
//! subtransaction of its own that goes with it. So a place to go back to is all that is kept of it.

use std::collections::HashMap;

use pgrx::pg_sys;

use crate::error::PgError;

/// A place in a file, or in one of the files that a large one is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    file: i32,
    offset: pg_sys::off_t,
}

/// Of POSIX.
const SEEK_SET: i32 = 0;
const START: Place = Place { file: 0, offset: 0 };

/// The records of a transaction that has not ended.
#[derive(Debug)]
pub(crate) struct Spool {
    file: *mut pg_sys::BufFile,
    /// Subtransactions in the order in which they began, and where.
    subtransactions: Vec<(u32, Place)>,
    /// Where a subtransaction is in that list.
    known: HashMap<u32, usize>,
    /// What was written ends here; only known while it is read.
    end: Place,
}

impl Spool {
    /// An empty one.
    pub(crate) fn create() -> Self {
        // SAFETY: the file's own memory has to live until it is closed; it is not bound to a transaction.
        let file = unsafe {
            let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            let file = pg_sys::BufFileCreateTemp(true);
            pg_sys::MemoryContextSwitchTo(before);
            file
        };
        Self {
            file,
            subtransactions: Vec::new(),
            known: HashMap::new(),
            end: START,
        }
    }

    fn place(&self) -> Place {
        let mut place = START;
        // SAFETY: the file is open.
        unsafe {
            pg_sys::BufFileTell(self.file, &raw mut place.file, &raw mut place.offset);
        }
        place
    }

    fn go_to(&mut self, place: Place) -> Result<(), PgError> {
        // SAFETY: the file is open.
        let failed = unsafe { pg_sys::BufFileSeek(self.file, place.file, place.offset, SEEK_SET) };
        if failed == 0 {
            return Ok(());
        }
        Err(PgError::new(
            "58030",
            "could not go to a place in a temporary file",
        ))
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
        for bytes in [&len[..], records] {
            // SAFETY: the file is open, and `bytes` are read only, whatever the older declaration says.
            unsafe {
                pg_sys::BufFileWrite(self.file, bytes.as_ptr().cast_mut().cast(), bytes.len());
            }
        }
        Ok(())
    }

    /// Forget what came since the first change of a subtransaction, if there was any.
    pub(crate) fn roll_back(&mut self, xid: u32) -> Result<(), PgError> {
        let Some(&(_, place)) = self
            .known
            .get(&xid)
            .and_then(|index| self.subtransactions.get(*index))
        else {
            return Ok(());
        };
        while let Some((last, _)) = self.subtransactions.pop() {
            self.known.remove(&last);
            if last == xid {
                break;
            }
        }
        self.go_to(place)
    }

    /// Read from the start. Nothing is written any more.
    pub(crate) fn rewind(&mut self) -> Result<(), PgError> {
        self.end = self.place();
        self.go_to(START)
    }

    /// Append the records that were written at once to `records`. False at the end.
    pub(crate) fn read(&mut self, records: &mut Vec<u8>) -> Result<bool, PgError> {
        if self.place() >= self.end {
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
        // SAFETY: the file is open, and `bytes` has this length.
        let read =
            unsafe { pg_sys::BufFileRead(self.file, bytes.as_mut_ptr().cast(), bytes.len()) };
        if read == bytes.len() {
            return Ok(());
        }
        Err(PgError::new("58030", "a temporary file is too short"))
    }
}

impl Drop for Spool {
    /// After an error the process ends, and the file with it.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the file is open, and is not used after this.
            unsafe { pg_sys::BufFileClose(self.file) };
        }
    }
}
