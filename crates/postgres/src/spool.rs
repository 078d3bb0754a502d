//! A temporary file of this server's for the changes of one transaction. The leader keeps in it
//! what a transaction has sent so far, until it commits; the collector of deletions, what a large
//! one has deleted.
//!
//! PostgreSQL's own temporary files count against `temp_file_limit`, lie in the default tablespace,
//! and are removed with the process, or when the server starts again. Their contents are not needed
//! then: the provider sends each unconfirmed transaction again. Another process of this server may
//! read what was handed to the file ([`Spool::path`], [`Frames`]).
//!
//! The rollback of a subtransaction takes with it all changes since its first one: they belong to
//! it, or to its own subtransactions. So only the place to go back to is kept of it. If another
//! process reads the file, nothing is removed: marks say where a subtransaction begins and that one
//! is rolled back, and the reader skips the changes that do not count.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use braid_bgworker::reason::Reason;
use braid_bgworker::sqlstate::SqlState;

use crate::error::PgError;
use crate::temporary_file::TemporaryFile;

/// Number of bytes that are gathered before they are handed to the file, and that are read from it
/// at once.
const CHUNK: usize = 128 * 1024;

/// Bit in the length of a written block: it is a mark, not records.
const MARK: u32 = 1 << 31;
const BEGINS: u32 = 0;
const ROLLED_BACK: u32 = 1;

/// A subtransaction.
#[derive(Debug)]
struct Begun {
    xid: u32,
    /// Where it begins.
    place: u64,
    /// Changes before it.
    changes: u32,
}

/// The records of a transaction that has not ended.
#[derive(Debug)]
pub struct Spool {
    file: TemporaryFile,
    /// Bytes not yet handed to the file, which ends at `handed`.
    buffer: Vec<u8>,
    handed: u64,
    /// Subtransactions in the order in which they began.
    subtransactions: Vec<Begun>,
    /// Where a subtransaction is in that list.
    known: HashMap<u32, usize>,
    /// Another process may read the file.
    is_shared: bool,
    /// Ranges of the file that do not count, in order.
    dead: Vec<(u64, u64)>,
    /// Where it is read, and the next of the dead ranges.
    reading: u64,
    next_dead: usize,
}

impl Spool {
    /// An empty one.
    pub fn create() -> Self {
        Self {
            file: TemporaryFile::create(),
            buffer: Vec::new(),
            handed: 0,
            subtransactions: Vec::new(),
            known: HashMap::new(),
            is_shared: false,
            dead: Vec::new(),
            reading: 0,
            next_dead: 0,
        }
    }

    /// The path of the file, for other processes of this server. From now on the bytes that were
    /// handed to it do not change.
    pub fn path(&mut self) -> String {
        self.is_shared = true;
        self.file.path()
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

    fn mark(&mut self, kind: u32, xid: u32) {
        for number in [MARK | 8, kind, xid] {
            self.buffer.extend_from_slice(&number.to_ne_bytes());
        }
    }

    /// The next writes belong to this subtransaction; so many changes came before.
    pub fn subtransaction(&mut self, xid: u32, changes: u32) {
        if self.known.contains_key(&xid) {
            return;
        }
        let place = self.place();
        self.known.insert(xid, self.subtransactions.len());
        self.subtransactions.push(Begun {
            xid,
            place,
            changes,
        });
        self.mark(BEGINS, xid);
    }

    /// Append whole records.
    ///
    /// # Errors
    /// 54000 for records of 2 GB and more; those of [`Self::hand_over`].
    pub fn write(&mut self, records: &[u8]) -> Result<(), PgError> {
        let len = u32::try_from(records.len())
            .ok()
            .filter(|len| len & MARK == 0)
            .ok_or_else(|| {
                PgError::new(
                    SqlState::ProgramLimitExceeded,
                    "frame from the provider is too large",
                )
            })?
            .to_ne_bytes();
        self.buffer.extend_from_slice(&len);
        self.buffer.extend_from_slice(records);
        if self.buffer.len() >= CHUNK {
            self.hand_over()?;
        }
        Ok(())
    }

    /// Hands the written bytes to the file, so that others can read them. Returns the file's
    /// length.
    ///
    /// # Errors
    /// As [`TemporaryFile::write`]: 53400 beyond `temp_file_limit`, 53100 if the disk is full.
    pub fn hand_over(&mut self) -> Result<u64, PgError> {
        self.file
            .write(&self.buffer, self.handed)
            .map_err(|error| match error.sqlstate {
                SqlState::ConfigurationLimitExceeded => PgError::new(
                    SqlState::ConfigurationLimitExceeded,
                    "a transaction does not fit into temporary files",
                )
                .with_detail(error.message)
                .for_reason(Reason::SpoolFull),
                _ => error,
            })?;
        self.handed += self.buffer.len() as u64;
        self.buffer.clear();
        self.buffer.shrink_to(2 * CHUNK);
        Ok(self.handed)
    }

    /// Forgets all since the first change of a subtransaction. Returns how many changes are left,
    /// if it had any.
    pub fn roll_back(&mut self, xid: u32) -> Option<u32> {
        let index = *self.known.get(&xid)?;
        let place = self.subtransactions.get(index)?.place;
        let changes = self.subtransactions.get(index)?.changes;
        for gone in self.subtransactions.drain(index..) {
            self.known.remove(&gone.xid);
        }
        if self.is_shared {
            self.mark(ROLLED_BACK, xid);
            self.dead.retain(|(from, _)| *from < place);
            self.dead.push((place, self.place()));
        } else {
            self.go_to(place);
        }
        Some(changes)
    }

    /// Read from the start. Nothing is written any more.
    ///
    /// # Errors
    /// Those of [`Self::hand_over`].
    pub fn rewind(&mut self) -> Result<(), PgError> {
        self.hand_over()?;
        self.reading = 0;
        self.next_dead = 0;
        Ok(())
    }

    /// Append the records that were written at once to `records`. False at the end.
    ///
    /// # Errors
    /// As [`TemporaryFile::read`].
    pub fn read(&mut self, records: &mut Vec<u8>) -> Result<bool, PgError> {
        let len = loop {
            if let Some((from, to)) = self.dead.get(self.next_dead)
                && *from == self.reading
            {
                self.reading = *to;
                self.next_dead += 1;
                continue;
            }
            if self.reading >= self.handed {
                return Ok(false);
            }
            let mut len = [0; 4];
            self.fill(&mut len)?;
            let len = u32::from_ne_bytes(len);
            if len & MARK == 0 {
                break len;
            }
            self.reading += u64::from(len & !MARK);
        };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let before = records.len();
        records.resize(before.saturating_add(len), 0);
        self.fill(records.get_mut(before..).unwrap_or_default())?;
        Ok(true)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), PgError> {
        self.file.read(bytes, self.reading)?;
        self.reading += bytes.len() as u64;
        Ok(())
    }
}

/// A block that was written at once.
#[derive(Debug)]
pub enum Frame<'a> {
    /// Whole records.
    Records(&'a [u8]),
    /// The blocks that follow are part of a subtransaction that begins at this mark.
    Begins(u32),
    /// This subtransaction is rolled back: all since it began does not count.
    RolledBack(u32),
}

/// The blocks of a file, read by another process while more are written.
#[derive(Debug)]
pub struct Frames {
    file: File,
    chunk: Vec<u8>,
    /// Number of bytes of the chunk that were taken.
    taken: usize,
    /// Where the chunk ends in the file.
    at: u64,
}

impl Frames {
    /// From the start of the file of a [`Spool`].
    ///
    /// # Errors
    /// A class of [`SqlState::of_io`] if the file can't be opened.
    pub fn open(path: &str) -> Result<Self, PgError> {
        let file = File::open(path).map_err(|error| {
            PgError::new(
                SqlState::of_io(&error),
                format!("could not open {path}: {error}"),
            )
        })?;
        Ok(Self {
            file,
            chunk: Vec::new(),
            taken: 0,
            at: 0,
        })
    }

    /// The position of the next block in the file.
    pub fn place(&self) -> u64 {
        self.at - (self.chunk.len() - self.taken) as u64
    }

    /// The next records that were written at once; `None` where there are none before `end`, up to
    /// which the file was handed over.
    ///
    /// # Errors
    /// A class of [`SqlState::of_io`] if the file can't be read; 58030 if it ends before `end`.
    pub fn next(&mut self, end: u64) -> Result<Option<Frame<'_>>, PgError> {
        if self.place() >= end {
            return Ok(None);
        }
        self.have(4, end)?;
        let head = self.number(self.taken);
        let len = usize::try_from(head & !MARK).unwrap_or(usize::MAX);
        self.have(len.saturating_add(4), end)?;
        let from = self.taken + 4;
        self.taken = from + len;
        if head & MARK == 0 {
            return Ok(self.chunk.get(from..from + len).map(Frame::Records));
        }
        let xid = self.number(from + 4);
        Ok(Some(match self.number(from) {
            BEGINS => Frame::Begins(xid),
            _ => Frame::RolledBack(xid),
        }))
    }

    fn number(&self, at: usize) -> u32 {
        let raw = self.chunk.get(at..).and_then(<[u8]>::first_chunk::<4>);
        raw.map_or(0, |raw| u32::from_ne_bytes(*raw))
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
            return Err(PgError::new(
                SqlState::IoError,
                "a temporary file is too short",
            ));
        }
        self.chunk.resize(before + more, 0);
        self.file
            .read_exact_at(self.chunk.get_mut(before..).unwrap_or_default(), self.at)
            .map_err(|error| {
                PgError::new(
                    SqlState::of_io(&error),
                    format!("could not read a temporary file: {error}"),
                )
            })?;
        self.at += more as u64;
        Ok(())
    }
}
