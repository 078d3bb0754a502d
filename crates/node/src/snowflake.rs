//! Values of this node that hold a time (`braid_bgworker::snowflake`). Run by sessions.
//!
//! The last tick is in shared memory, and a session takes the next one without a lock. Ticks are
//! written down ahead of use: a sequence of Braid's own, one for each layout, says up to which one
//! they may be used, and its WAL is flushed before. So after a crash, a restart or a step of the
//! clock no tick is used again. All sequences of a database draw from one line of ticks for each
//! layout.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use braid_bgworker::snowflake::{LONG, Layout, SAFE};
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::catalog::flush_all;
use braid_postgres::error::PgError;
use braid_postgres::lock::Advisory;
use braid_postgres::{process, server, timestamp};

use crate::ddl::owners_query;
use crate::registry::{self, ManagerEntry};
use crate::sequence;

/// A session looks again at which node this is after this time.
const KNOWN_FOR: Duration = Duration::from_secs(1);
/// The class of the lock under which ticks are written down.
const LOCK_CLASS: u16 = 23;

/// A layout, with where its ticks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    layout: Layout,
    place: usize,
    sequence: &'static str,
    /// The function that gives its values.
    pub function: &'static str,
}

/// 63 bits.
pub const LONG_LINE: Line = Line {
    layout: LONG,
    place: 0,
    sequence: "braid.snowflake_tick",
    function: "braid.snowflake",
};

/// 53 bits.
pub const SAFE_LINE: Line = Line {
    layout: SAFE,
    place: 1,
    sequence: "braid.snowflake53_tick",
    function: "braid.snowflake53",
};

thread_local! {
    static NUMBER: Cell<Option<(u16, Instant)>> = const { Cell::new(None) };
}

/// This node's number. In a transaction.
fn node_number() -> Result<u16, PgError> {
    if let Some((number, since)) = NUMBER.get()
        && since.elapsed() < KNOWN_FOR
    {
        return Ok(number);
    }
    NUMBER.set(None);
    let own = sequence::own().filter(|own| !own.is_stopped);
    let Some(own) = own else {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "this database has no node number by which its values would differ from those of other nodes",
        )
        .with_detail("Only a member of a group that takes part in it has one.")
        .with_hint("Create a group with braid.create_group, or join one with braid.join_group. See braid.group_nodes."));
    };
    NUMBER.set(Some((own.number, Instant::now())));
    Ok(own.number)
}

/// Milliseconds from 1970 to 2000, from where PostgreSQL counts.
const UNTIL_2000_MS: u64 = 946_684_800_000;

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    u64::try_from(timestamp::now() / 1000)
        .unwrap_or(0)
        .saturating_add(UNTIL_2000_MS)
}

impl Line {
    /// The largest node number.
    #[must_use]
    pub const fn most_nodes(self) -> u16 {
        self.layout.most_nodes()
    }

    /// The next value. In a transaction.
    ///
    /// # Errors
    /// 55000 if this is no member of a group, or the library is not preloaded; 22003 if the node
    /// number or the time has too many bits.
    pub fn next(self) -> Result<i64, PgError> {
        let node = node_number()?;
        let entry = registry::my_manager().ok_or_else(|| {
            PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "braid is not preloaded",
            )
            .with_hint("Add braid to shared_preload_libraries and restart the server.")
        })?;
        let (Some(last), Some(limit)) = (
            entry.ticks.get(self.place),
            entry.tick_limits.get(self.place),
        ) else {
            return Err(PgError::new(SqlState::InternalError, "no such layout"));
        };
        loop {
            let known = last.load(Ordering::Acquire);
            let tick = self.layout.next(known, now_ms());
            if known == 0 || tick > limit.load(Ordering::Acquire) {
                self.write_down(last, limit, entry)?;
                continue;
            }
            let taken =
                last.compare_exchange_weak(known, tick, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() {
                return self.layout.value(tick, node).ok_or_else(|| {
                    PgError::new(
                        SqlState::NumericValueOutOfRange,
                        format!("node number {node} is too large for {}", self.function),
                    )
                    .with_hint(format!(
                        "Node numbers up to {} fit. Use another kind of sequence.",
                        self.most_nodes()
                    ))
                });
            }
        }
    }

    /// Makes more ticks durable than are used.
    fn write_down(
        self,
        last: &AtomicU64,
        limit: &AtomicU64,
        entry: &ManagerEntry,
    ) -> Result<(), PgError> {
        let lock = Advisory {
            database: entry.database.load(Ordering::Acquire),
            key: (0, u32::try_from(self.place).unwrap_or(0)),
            class: LOCK_CLASS,
        };
        debug_assert_eq!(lock.database, process::my_database());
        if server::is_in_recovery() {
            return Err(PgError::new(
                SqlState::ReadOnlySqlTransaction,
                format!("{} gives no values on a standby", self.function),
            )
            .with_hint("Call the function at the primary, or promote this server."));
        }
        lock.hold(|| {
            let known = last.load(Ordering::Acquire);
            let tick = self.layout.next(known, now_ms());
            if known != 0 && tick <= limit.load(Ordering::Acquire) {
                return Ok(());
            }
            let found = owners_query(
                "select coalesce(pg_sequence_last_value($1::regclass), 0)",
                &[Some(self.sequence)],
            );
            let durable: u64 = found
                .get(0, 0)
                .and_then(|value| value.parse().ok())
                .ok_or_else(|| {
                    PgError::new(
                        SqlState::UndefinedTable,
                        format!("{} does not exist", self.sequence),
                    )
                    .with_hint("Update the extension with ALTER EXTENSION braid UPDATE.")
                })?;
            let next = self.layout.next(durable.max(known), now_ms());
            let ahead = self.layout.ahead(next);
            owners_query(
                "select setval($1::regclass, $2::bigint)",
                &[Some(self.sequence), Some(&ahead.to_string())],
            );
            let _end = flush_all();
            limit.fetch_max(ahead, Ordering::AcqRel);
            // After a restart nobody knows which of those that were written down are used.
            if known == 0 {
                last.fetch_max(durable.max(1), Ordering::AcqRel);
            }
            Ok(())
        })
    }
}
