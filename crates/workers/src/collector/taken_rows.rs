//! Rows that sessions have taken out of tables without a key, as the collector writes them down
//! (`braid_node::taken_row`).
//!
//! Decoded WAL has whole rows, but does not say which of several identical rows was deleted. The
//! WAL record has the place of the row, and the dead row version stays until the collector is past
//! the record.

use braid_apply::DeadRows;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{lsn_text, parse_lsn};
use braid_node::subscription::{execute_counting, rows};
use braid_node::taken_row::{TakenRow, store};
use braid_postgres::error::PgError;
use braid_postgres::memory::Scratch;
use braid_postgres::subtransaction::attempt;
use braid_postgres::wal::RecordReader;
use pgrx::pg_sys;

/// A row that a session has taken out, as WAL has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removal {
    /// The OID of the row's table.
    pub relation: u32,
    /// Where the record of its deletion or update begins.
    pub lsn: u64,
    /// Commit timestamp of that, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// Where the transaction ends.
    pub end_lsn: u64,
}

/// The rows that are collected in one transaction.
#[derive(Debug)]
pub struct Collection {
    reader: RecordReader,
    /// Memory for one row at a time.
    memory: Scratch,
    dead: DeadRows,
    /// The position up to which rows were collected before.
    from: u64,
    /// The position up to which rows are collected now.
    up_to: u64,
    /// The log already says that something could not be read.
    has_warned: bool,
}

impl Collection {
    /// Begin, in a transaction of the caller's.
    ///
    /// # Errors
    /// Those of SPI.
    pub fn begin() -> Result<Self, PgError> {
        let found = rows("select \"position\"::text from braid.taken_up_to", &[])?;
        let found = found.first().and_then(|row| row.first()?.clone());
        let from = found.and_then(|text| parse_lsn(&text)).unwrap_or(0);
        Ok(Self {
            reader: RecordReader::new()?,
            memory: Scratch::new(c"braid taken row"),
            dead: DeadRows::default(),
            from,
            up_to: from,
            has_warned: false,
        })
    }

    /// Records the rows that sessions have removed. A row in a file that is gone, as the table was
    /// rewritten or truncated since, is ignored. A row that can't be read is logged and ignored:
    /// all others wait for this process, and dead rows are kept, so it must go on.
    ///
    /// # Errors
    /// Those of PostgreSQL, raised while it is written.
    pub fn add(&mut self, removals: &[Removal]) -> Result<(), PgError> {
        let all = attempt(|| Ok((self.read(removals)?, true)));
        let taken = all.unwrap_or_else(|_| {
            // One by one, without those at which that fails.
            let each = removals.iter().flat_map(|removal| {
                let one = attempt(|| Ok((self.read(std::slice::from_ref(removal))?, true)));
                one.unwrap_or_else(|error| {
                    if !std::mem::replace(&mut self.has_warned, true) {
                        PgError::new(SqlState::Warning, format!("could not read a deleted row of a table without a key: {}", error.message))
                            .with_detail("If several nodes insert and delete identical rows at this time, they may end with different numbers of them.")
                            .warn();
                    }
                    Vec::new()
                })
            });
            each.collect()
        });
        store(&taken)
    }

    fn read(&mut self, removals: &[Removal]) -> Result<Vec<TakenRow>, PgError> {
        let mut taken = Vec::new();
        for removal in removals {
            pgrx::check_for_interrupts!();
            // The removal was collected before, and the server has crashed before the slot had
            // moved on.
            if removal.end_lsn <= self.from {
                continue;
            }
            self.up_to = self.up_to.max(removal.end_lsn);
            let Some((file, place)) = self.reader.removed_row(removal.lsn)? else {
                continue;
            };
            let table = pg_sys::Oid::from(removal.relation);
            let dead = &mut self.dead;
            let found = self.memory.run(|| dead.at(table, file, place))?;
            if let Some((hash, row)) = found {
                let own = (removal.timestamp, 0);
                // No other transaction has seen a row that one transaction has both inserted and
                // deleted.
                if row != Some(own) {
                    taken.push(TakenRow {
                        hash,
                        relation: removal.relation,
                        row,
                        removal: own,
                    });
                }
            }
        }
        Ok(taken)
    }

    /// All of it is written.
    ///
    /// # Errors
    /// Those of SPI.
    pub fn end(self) -> Result<(), PgError> {
        if self.up_to == self.from {
            return Ok(());
        }
        let position = lsn_text(self.up_to);
        let moved = execute_counting(
            "update braid.taken_up_to set \"position\" = $1::pg_lsn",
            &[position.as_str().into()],
        )?;
        if moved == 0 {
            execute_counting(
                "insert into braid.taken_up_to values ($1::pg_lsn)",
                &[position.as_str().into()],
            )?;
        }
        Ok(())
    }
}
