//! Comparing a table of a subscription with the provider's, and mending it. Run by the session that
//! calls `braid.compare` or `braid.repair`, which commits between the steps: neither side ever has
//! a long transaction.
//!
//! `braid_bgworker::compare` decides how ranges are cut, what a difference is and which side is
//! right. A step reads a range on both sides at the same time: while this node reads one range, the
//! provider still works on the one before.
//!
//! Invariants: a row is a difference only if it was found twice, unchanged on both sides. In
//! between this node has applied everything that the provider had at the first look, and the
//! provider what this node had (if it subscribes to this node). Memory is bounded by the longest
//! list, `GATHERED` keys and `WHOLE` rows. The table is read with its owner's rights, as the
//! provider's filters are SQL from another node.
//!
//! Not for: deciding conflicts, which needs no comparison.

mod key;
mod repair;
mod shape;
mod store;
pub(crate) mod table;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use braid_bgworker::compare::{
    Key, LISTED, LOOKS, Outcome, Pace, Range, Ranges, Seen, Sight, Sum, Verdict, differing, verdict,
};
use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::Subscription;
use braid_postgres::catalog::{query, with_settings};
use braid_postgres::error::PgError;
use braid_postgres::latch;
use braid_postgres::libpq::Connection;
use braid_postgres::rows::Rows;

pub use repair::{Repairing, repair_failed, repair_step, start_repair};

use table::{At, SETTINGS, Table};

/// Keys of rows that may differ, before they are looked at.
const GATHERED: usize = 1_000;
/// How long a step lasts about.
const STEP: Duration = Duration::from_millis(500);
/// Whole rows of each side in memory.
const WHOLE: usize = 20;
/// How often it is looked whether positions are reached.
const POLL: Duration = Duration::from_millis(50);

/// A request to compare a table.
#[derive(Debug)]
pub struct Request {
    /// The subscription whose provider is compared with this node.
    pub subscription: Subscription,
    /// The local table's OID.
    pub relation: u32,
    /// This node.
    pub local_node: String,
    /// At most so many rows a second.
    pub per_second: Option<NonZeroU64>,
    /// Stop when so many differences are found.
    pub limit: u64,
    /// Only the rows with these keys: a jsonb array of objects.
    pub keys: Option<String>,
}

/// The comparison that is running.
#[derive(Debug)]
struct Comparison {
    id: i64,
    request: Request,
    connection: Connection,
    table: Table,
    pace: Pace,
    walk: Walk,
    gathered: Vec<Key>,
    round: Option<Round>,
    counts: Counts,
    warned: bool,
    shown: Instant,
}

/// The part of the table that is still to be read.
#[derive(Debug)]
enum Walk {
    Ranges {
        ranges: Ranges,
        /// The range that the provider is computing, and the local answer.
        asked: Option<(Range, Sum)>,
    },
    /// In the order of one side, behind a key.
    Keys {
        at: At,
        after: Option<Key>,
    },
    Done,
}

/// Rows that differed when they were read, and the position that each side has to reach before they
/// are read again.
#[derive(Debug)]
struct Round {
    looks: u32,
    rows: Vec<(Key, Sight)>,
    here: Position,
    there: Position,
    not_before: Instant,
}

/// Where a node was when rows were looked at.
#[derive(Debug, Clone)]
struct Position {
    lsn: String,
    /// By its clock.
    time: String,
}

/// The counts that views show of a comparison.
#[derive(Debug, Default, Clone)]
struct Counts {
    phase: &'static str,
    rows: u64,
    ranges: u64,
    differed: u64,
    looked_at: u64,
    differences: u64,
    unsettled: u64,
}

thread_local! {
    /// The comparison of the running CALL. An error drops it, and with it the connection.
    static COMPARISON: RefCell<Option<Comparison>> = const { RefCell::new(None) };
}

/// Begin to compare. Gives the comparison's number.
///
/// # Errors
/// As `Table::find` says.
pub fn start(request: Request, mut connection: Connection) -> Result<i64, PgError> {
    COMPARISON.take();
    let table = with_settings(&SETTINGS, || {
        Table::find(&request.subscription, request.relation, &mut connection)
    })?;
    for column in &table.missing {
        pgrx::warning!("column \"{column}\" is not compared, as the table does not have it here");
    }
    let gathered = match &request.keys {
        Some(keys) => store::keys(&table, keys)?,
        None => Vec::new(),
    };
    let walk = match (&request.keys, table.ordered) {
        (Some(_), _) => Walk::Done,
        (None, true) => Walk::Ranges {
            ranges: Ranges::default(),
            asked: None,
        },
        (None, false) => Walk::Keys {
            at: At::Here,
            after: None,
        },
    };
    let id = store::begin(&request, &table)?;
    let comparison = Comparison {
        id,
        connection,
        table,
        pace: Pace::new(request.per_second),
        walk,
        gathered,
        round: None,
        counts: Counts {
            phase: "reading",
            ..Counts::default()
        },
        warned: false,
        shown: Instant::now(),
        request,
    };
    COMPARISON.set(Some(comparison));
    Ok(id)
}

/// Go on with a comparison. True when it is done.
///
/// # Errors
/// The provider's, 08006 when it is gone; 55000 when the subscription stops. The comparison is over
/// then.
pub fn step(id: i64) -> Result<bool, PgError> {
    let Some(mut comparison) = COMPARISON.take().filter(|found| found.id == id) else {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!("comparison {id} is not running in this session"),
        )
        .with_hint("Run it with call braid.compare(subscription_name, relation)."));
    };
    let is_done = with_settings(&SETTINGS, || comparison.step()).map_err(explained)?;
    if !is_done {
        COMPARISON.set(Some(comparison));
    }
    Ok(is_done)
}

/// Adds a hint to an error about a lost connection.
fn explained(error: PgError) -> PgError {
    match error.sqlstate {
        SqlState::ConnectionFailure | SqlState::AdminShutdown | SqlState::CrashShutdown | SqlState::CannotConnectNow => {
            PgError::new(SqlState::ConnectionFailure, "connection to the provider was lost")
                .with_detail(error.message)
                .with_hint("Start again once the provider can be reached. What was found so far is in braid.differences.")
        }
        SqlState::InsufficientPrivilege => error.with_hint(
            "At the provider, grant the connecting role USAGE on the schema, SELECT on the table, and BYPASSRLS if the \
             table has row-level security.",
        ),
        SqlState::LockNotAvailable => error.with_hint(
            "A transaction at the provider may have locked the table. Start again once it has ended: pg_locks shows it there.",
        ),
        _ => error,
    }
}

impl Comparison {
    fn step(&mut self) -> Result<bool, PgError> {
        let begin = Instant::now();
        loop {
            let is_full = self.gathered.len() >= GATHERED;
            let at_end = matches!(self.walk, Walk::Done);
            if self.round.is_some() {
                self.counts.phase = "settling";
                if !self.settle()? {
                    break;
                }
            } else if is_full || (at_end && !self.gathered.is_empty()) {
                self.begin_round()?;
            } else if at_end || self.counts.differences >= self.request.limit {
                self.counts.phase = if at_end { "done" } else { "limit" };
                store::show(self.id, &self.counts, true)?;
                return Ok(true);
            } else {
                self.counts.phase = "reading";
                self.read()?;
            }
            if begin.elapsed() >= STEP {
                break;
            }
        }
        if self.shown.elapsed() >= Duration::from_secs(1) || self.round.is_some() {
            self.shown = Instant::now();
            store::show(self.id, &self.counts, false)?;
        }
        Ok(false)
    }

    /// Read on, and pause as the pace says.
    fn read(&mut self) -> Result<(), PgError> {
        let begin = Instant::now();
        let rows = match self.walk {
            Walk::Ranges { .. } => self.read_range()?,
            Walk::Keys { .. } => self.read_keys()?,
            Walk::Done => 0,
        };
        let pause = self.pace.took(rows, begin.elapsed());
        let until = Instant::now() + pause;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            latch::wait(Some(left));
        }
    }

    /// Reads the next range on this node while the provider computes the one before; then compares
    /// the one before.
    fn read_range(&mut self) -> Result<u64, PgError> {
        let Walk::Ranges { ranges, .. } = &mut self.walk else {
            return Ok(0);
        };
        let next = ranges.take().map(|range| {
            let rows = range.rows.unwrap_or(self.pace.rows());
            let bound = self.table.bound_sql(At::Here, &range, rows);
            let last = Table::bound(&self.table.run_here(&bound));
            let range = ranges.cut(range, rows, last.as_ref());
            let sum = self.table.sum_sql(At::Here, &range, None);
            (range, Table::sum(&self.table.run_here(&sum)))
        });
        let read = next.as_ref().map_or(0, |(_, here)| here.rows);
        self.answer()?;
        let Walk::Ranges { ranges, asked } = &mut self.walk else {
            return Ok(read);
        };
        if let Some((range, here)) = next {
            let sql = self
                .table
                .sum_sql(At::There, &range, Some(Ranges::ask(&range)));
            self.connection.send_query(&self.table.text_there(&sql))?;
            *asked = Some((range, here));
        } else if ranges.is_empty() {
            self.walk = Walk::Done;
        }
        Ok(read)
    }

    /// Take the provider's answer, if it was asked for a range, and compare it with this side's.
    fn answer(&mut self) -> Result<(), PgError> {
        let Walk::Ranges { ranges, asked } = &mut self.walk else {
            return Ok(());
        };
        let Some((range, here)) = asked.take() else {
            return Ok(());
        };
        let mut there = Table::sum(&self.connection.finish_query()?);
        if there.rows >= Ranges::ask(&range) {
            let bound = self.table.bound_sql(At::There, &range, there.rows);
            there.last = Table::bound(&self.table.run_there(&mut self.connection, &bound)?);
        }
        self.counts.ranges += 1;
        let range = match ranges.compare(range, &here, &there) {
            Outcome::Equal => {
                self.counts.rows += here.rows;
                return Ok(());
            }
            Outcome::Cut => {
                self.counts.differed += 1;
                return Ok(());
            }
            Outcome::List(range) => range,
        };
        self.counts.differed += 1;
        let here = self.table.list(At::Here, &range, &mut self.connection)?;
        let there = self.table.list(At::There, &range, &mut self.connection)?;
        if let (Some(here), Some(there)) = (here, there) {
            self.counts.rows += here.len().max(there.len()) as u64;
            self.gathered.extend(differing(here, there));
        } else {
            ranges.again(range, LISTED);
        }
        Ok(())
    }

    /// Walk one side in its own order, and ask the other for the same keys.
    fn read_keys(&mut self) -> Result<u64, PgError> {
        let Walk::Keys { at, after } = &mut self.walk else {
            return Ok(0);
        };
        let (one, other) = match at {
            At::Here => (At::Here, At::There),
            At::There => (At::There, At::Here),
        };
        let limit = self.pace.rows().min(LISTED);
        let rows = self
            .table
            .walk(one, after.as_ref(), limit, &mut self.connection)?;
        let count = rows.len() as u64;
        let keys: Vec<Key> = rows.iter().map(|(key, _)| key.clone()).collect();
        let found = self.table.with_keys(other, &keys, &mut self.connection)?;
        self.counts.ranges += 1;
        let differing = differing(rows, found);
        if !differing.is_empty() {
            self.counts.differed += 1;
        }
        self.gathered.extend(differing);
        if one == At::Here {
            self.counts.rows += count;
        }
        match keys.into_iter().next_back() {
            Some(last) if count >= limit => *after = Some(last),
            _ if one == At::Here => {
                self.walk = Walk::Keys {
                    at: At::There,
                    after: None,
                }
            }
            _ => self.walk = Walk::Done,
        }
        Ok(count)
    }

    /// Reads the gathered rows for the first time.
    fn begin_round(&mut self) -> Result<(), PgError> {
        // The range that the provider still computes comes first.
        self.answer()?;
        let keys = std::mem::take(&mut self.gathered);
        self.counts.looked_at += keys.len() as u64;
        let rows = self.look(keys)?;
        self.wait_for(
            1,
            rows.into_iter()
                .filter(|(_, sight)| !sight.is_equal())
                .collect(),
        )
    }

    fn look(&mut self, keys: Vec<Key>) -> Result<Vec<(Key, Sight)>, PgError> {
        let wanted: Vec<&Key> = keys.iter().collect();
        let there = self.table.look(At::There, &wanted, &mut self.connection)?;
        let here = self.table.look(At::Here, &wanted, &mut self.connection)?;
        Ok(keys
            .into_iter()
            .zip(here.into_iter().zip(there))
            .map(|(key, (here, there))| (key, Sight { here, there }))
            .collect())
    }

    /// Reads these rows again once each side has replicated what the other has written by now.
    fn wait_for(&mut self, looks: u32, rows: Vec<(Key, Sight)>) -> Result<(), PgError> {
        if rows.is_empty() {
            return Ok(());
        }
        const POSITION: &str = "select braid.sync_event(), clock_timestamp()";
        let position = |found: &Rows| Position {
            lsn: found.get(0, 0).unwrap_or_default().to_owned(),
            time: found.get(0, 1).unwrap_or_default().to_owned(),
        };
        self.round = Some(Round {
            looks,
            rows,
            there: position(&self.connection.query(POSITION)?),
            here: position(&query(POSITION, &[])),
            not_before: Instant::now() + POLL * looks,
        });
        Ok(())
    }

    /// Reads the rows again that differed. Returns false if it is too early.
    fn settle(&mut self) -> Result<bool, PgError> {
        if !self.is_reached()? {
            latch::wait(Some(POLL));
            return Ok(false);
        }
        let Some(round) = self.round.take() else {
            return Ok(true);
        };
        let keys = round.rows.iter().map(|(key, _)| key.clone()).collect();
        let now = self.look(keys)?;
        let (mut moving, mut differing) = (Vec::new(), Vec::new());
        for ((key, before), (_, now)) in round.rows.into_iter().zip(now) {
            match verdict(&before, &now) {
                Verdict::Equal => {}
                Verdict::Moves => moving.push((key, now)),
                Verdict::Differs => differing.push((key, now)),
            }
        }
        for rows in differing.chunks(WHOLE) {
            moving.extend(self.keep(rows)?);
        }
        if round.looks >= LOOKS {
            self.counts.unsettled += moving.len() as u64;
            return Ok(true);
        }
        self.wait_for(round.looks + 1, moving)?;
        Ok(true)
    }

    /// Write differences down with both rows. Gives those that have changed just now.
    fn keep(&mut self, rows: &[(Key, Sight)]) -> Result<Vec<(Key, Sight)>, PgError> {
        let keys: Vec<&Key> = rows.iter().map(|(key, _)| key).collect();
        let there = self.table.whole(At::There, &keys, &mut self.connection)?;
        let here = self.table.whole(At::Here, &keys, &mut self.connection)?;
        let mut moving = Vec::new();
        for ((key, sight), (here, there)) in rows.iter().zip(here.into_iter().zip(there)) {
            let now = Sight {
                here: here.as_ref().map(|(seen, _)| seen.clone()),
                there: there.as_ref().map(|(seen, _)| seen.clone()),
            };
            if now != *sight {
                moving.push((key.clone(), now));
            } else if store::keep(self.id, &self.table, key, sight, here, there) {
                self.counts.differences += 1;
            }
        }
        Ok(moving)
    }

    /// Whether this node has applied everything that the provider had at the last look, and the
    /// provider what this node had.
    fn is_reached(&mut self) -> Result<bool, PgError> {
        let Some(round) = self.round.take() else {
            return Ok(true);
        };
        let is_reached = self.has_come(&round);
        self.round = Some(round);
        is_reached
    }

    fn has_come(&mut self, round: &Round) -> Result<bool, PgError> {
        if Instant::now() < round.not_before
            || !store::is_applied_here(&self.request.subscription, &round.there.lsn)?
        {
            return Ok(false);
        }
        // Changes of a third node reach each of the two sides separately.
        for (node, time) in self.thirds(round, |sight| sight.there.as_ref()) {
            let sql = third_sql(&node, time, &round.here.time);
            if query(&sql, &[]).get(0, 0) == Some("f") {
                return Ok(false);
            }
        }
        for (node, time) in self.thirds(round, |sight| sight.here.as_ref()) {
            let sql = third_sql(&node, time, &round.there.time);
            if self.connection.query(&sql)?.get(0, 0) == Some("f") {
                return Ok(false);
            }
        }
        let sql = format!(
            "select state, coalesce(applied_lsn >= {}::pg_lsn, false) from braid.subscription_status where provider = {}",
            quote_literal(&round.here.lsn),
            quote_literal(&self.request.local_node)
        );
        for row in self.connection.query(&sql)?.iter() {
            let cell = |index: usize| row.get(index).and_then(Option::as_deref);
            let is_stopped = matches!(cell(0), Some("disabled" | "error" | "stopped"));
            if is_stopped && !self.warned {
                self.warned = true;
                pgrx::warning!(
                    "the provider's subscription from this node does not run: what was changed here and is not applied there counts as a \
                     difference"
                );
            }
            if !is_stopped && cell(1) != Some("t") {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Nodes other than the two whose versions one side has, with the newest of each.
    fn thirds(&self, round: &Round, of: impl Fn(&Sight) -> Option<&Seen>) -> BTreeMap<String, i64> {
        let mut newest: BTreeMap<String, i64> = BTreeMap::new();
        for (_, sight) in &round.rows {
            if let Some((time, node)) = of(sight).and_then(|seen| seen.version.as_ref())
                && *node != self.request.local_node
                && *node != self.request.subscription.provider
            {
                let known = newest.entry(node.clone()).or_insert(*time);
                *known = (*known).max(*time);
            }
        }
        newest
    }
}

/// Whether a node has applied what a third one had committed by `time`, or has applied all that it
/// heard of after `since`.
fn third_sql(node: &str, time: i64, since: &str) -> String {
    format!(
        "select bool_and(coalesce(d.last_commit_at >= timestamptz 'epoch' + {time} * interval '1 us' \
                or (d.applied_lsn >= d.provider_lsn and d.last_message_at > {}::timestamptz), false)) \
           from braid.subscription_detail d where d.provider = {} and d.enabled and d.error_sqlstate is null",
        quote_literal(since),
        quote_literal(node)
    )
}
