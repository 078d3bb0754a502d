//! Decides which tables are copied, by which worker, and when a copy is tried again. Run by the
//! leader of a subscription.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use braid_bgworker::dictionary::Entry;
use braid_bgworker::policy;
use braid_bgworker::sqlstate::SqlState;
use braid_node::settings;
use braid_node::subscription::{self, Subscription};
use braid_postgres::error::{self, PgError};
use braid_postgres::libpq::Connection;
use braid_postgres::process;
use braid_postgres::worker::{self, Handle, Status, Worker};

use super::worker::Task;
use super::{WORKER_FUNCTION, WORKER_KIND, is_permanent, try_lock};

/// Workers are not asked after more often than this.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// Until a worker that an earlier leader has left behind is looked for again, or a place for a
/// worker.
const AGAIN: Duration = Duration::from_millis(200);
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How far the initial copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Tables that wait to be copied, or to be copied again after a failure.
    pub waiting: usize,
    /// Tables that are being copied.
    pub copying: usize,
    /// Since the last call tables became ready, ceased to be, or came or went.
    pub changed: bool,
    /// Call again after this time at the latest; `None`: when the latch is set.
    pub next: Option<Duration>,
}

/// Whether changes of a table can be applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// Changes can be applied.
    Ready,
    /// The table is still to be copied.
    Waiting,
    /// Nothing was known of it when the states were last read, and they have changed since.
    Unknown,
}

/// A table's state as the catalog had it when it was last read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// To be copied. Durable; set by the SQL functions and by a worker that failed.
    Waiting,
    /// A worker has it. Durable; set by the worker.
    Copying,
    /// Copied, or agreed to be the same. Durable; set by the worker together with the rows, or by
    /// the SQL functions.
    Ready,
}

#[derive(Debug)]
struct Table {
    state: State,
    namespace: String,
    name: String,
    /// Failures in a row.
    failures: u32,
    /// Not before.
    retry_at: Option<Instant>,
    /// May be copied under the slot's own snapshot.
    adopted: bool,
}

/// The slot's own snapshot, which lives as long as its connection stays idle.
#[derive(Debug)]
struct Adopted {
    connection: Connection,
    snapshot: String,
    lsn: u64,
}

#[derive(Debug)]
struct Running {
    relation: u32,
    handle: Rc<Handle>,
}

thread_local! {
    // For the exit of a leader that an error or a signal ends without unwinding.
    static STARTED: RefCell<Vec<Rc<Handle>>> = const { RefCell::new(Vec::new()) };
}

/// The leader's process ends.
fn terminate_started() {
    STARTED.with(|started| {
        if let Ok(started) = started.try_borrow() {
            for handle in started.iter() {
                handle.terminate();
            }
        }
    });
}

/// Copies the tables of a subscription.
#[derive(Debug)]
pub struct Coordinator {
    subscription: Subscription,
    tables: HashMap<u32, Table>,
    names: HashMap<(String, String), u32>,
    /// By OID at the provider, where that is known.
    numbers: HashMap<u32, u32>,
    running: Vec<Running>,
    /// Workers that have ended while the catalog could not be read.
    unreaped: Vec<u32>,
    adopted: Option<Adopted>,
    /// The next read of the catalog finds the tables that the slot's snapshot is for.
    adopting: bool,
    stale: bool,
    looked_at: Option<Instant>,
    read_at: Option<Instant>,
    progress: Progress,
    starved: bool,
}

impl Coordinator {
    /// Knows nothing yet; the first [`poll`](Self::poll) reads the catalog.
    #[must_use]
    pub fn new(subscription: &Subscription) -> Self {
        process::before_exit(terminate_started);
        Self {
            subscription: subscription.clone(),
            tables: HashMap::new(),
            names: HashMap::new(),
            numbers: HashMap::new(),
            running: Vec::new(),
            unreaped: Vec::new(),
            adopted: None,
            adopting: false,
            stale: true,
            looked_at: None,
            read_at: None,
            progress: Progress::default(),
            starved: false,
        }
    }

    /// Copy the tables that wait at this moment under the slot's own snapshot, exported on
    /// `connection`, at `lsn`, where the slot starts. To be called before the stream is received: a
    /// change that was already applied is not in that snapshot.
    pub fn adopt(&mut self, connection: Connection, snapshot: String, lsn: u64) {
        self.adopted = Some(Adopted {
            connection,
            snapshot,
            lsn,
        });
        self.adopting = true;
        self.stale = true;
    }

    /// Read the tables' states again at the next [`poll`](Self::poll): somebody has changed them.
    pub fn rescan(&mut self) {
        self.stale = true;
    }

    /// Whether changes of a table can be applied. A table that is not part of the subscription is
    /// ready: its changes are left out anyway.
    #[must_use]
    pub fn readiness(&self, table: &Entry) -> Readiness {
        if self.progress.waiting == 0 && self.progress.copying == 0 && !self.stale {
            return Readiness::Ready;
        }
        match self.table(table) {
            Some(table) if table.state == State::Ready => Readiness::Ready,
            Some(_) => Readiness::Waiting,
            None if self.stale => Readiness::Unknown,
            None => Readiness::Ready,
        }
    }

    /// Whether a table is known to be part of the subscription, and to have been copied.
    #[must_use]
    pub fn has(&self, table: &Entry) -> bool {
        self.table(table)
            .is_some_and(|table| table.state == State::Ready)
    }

    /// Whether the catalog, as it was when it was last read, has a table of this name in the
    /// subscription, and nobody has said since that it has changed.
    #[must_use]
    pub fn knows(&self, table: &Entry) -> bool {
        !self.stale && self.table(table).is_some()
    }

    /// Whether a table of this database is known to be part of the subscription under its name.
    #[must_use]
    pub fn is_member(&self, relation: u32, namespace: &str, name: &str) -> bool {
        self.tables
            .get(&relation)
            .is_some_and(|table| table.namespace == namespace && table.name == name)
    }

    /// The state of a table as it was last read; `None`: the table is not part of the subscription.
    fn table(&self, table: &Entry) -> Option<&Table> {
        let name = || {
            self.names
                .get(&(table.namespace.clone(), table.name.clone()))
        };
        self.numbers
            .get(&table.oid)
            .or_else(name)
            .and_then(|relation| self.tables.get(relation))
    }

    /// Start and reap workers. Cheap when there is nothing to do.
    ///
    /// # Errors
    /// Always one that does not pass by itself: the first such failure of a copy, with a hint. The
    /// other workers go on.
    pub fn poll(&mut self) -> Result<Progress, PgError> {
        let now = Instant::now();
        self.progress.changed = false;
        if !self.stale
            && self
                .looked_at
                .is_some_and(|at| now.duration_since(at) < LOOK_INTERVAL)
        {
            return Ok(self.progress);
        }
        self.looked_at = Some(now);
        let mut ended = self.reap();
        ended.append(&mut self.unreaped);
        // A table that is being copied without a worker of ours belongs to one that an earlier
        // leader has left.
        let orphans = self.progress.copying > self.running.len() + ended.len()
            && self
                .read_at
                .is_none_or(|at| now.duration_since(at) >= AGAIN);
        if self.stale || !ended.is_empty() || orphans {
            self.read_catalog(&ended, self.stale || orphans, now)?;
        }
        self.start_workers(now);
        self.count(now);
        Ok(self.progress)
    }

    /// End all workers and wait for them, a few seconds at most.
    pub fn stop(&mut self) {
        for running in &self.running {
            running.handle.terminate();
        }
        let deadline = Instant::now() + STOP_LIMIT;
        for running in &self.running {
            if !running
                .handle
                .wait_ended(deadline.saturating_duration_since(Instant::now()))
            {
                pgrx::log!(
                    "a copy worker of subscription \"{}\" does not end",
                    self.subscription.name
                );
            }
        }
        self.running.clear();
        self.adopted = None;
        self.stale = true;
        STARTED.with(|started| started.borrow_mut().clear());
    }

    /// Tables whose workers have ended.
    fn reap(&mut self) -> Vec<u32> {
        let mut ended = Vec::new();
        self.running.retain(|running| {
            let over = running.handle.status() == Status::Ended;
            if over {
                ended.push(running.relation);
                STARTED.with(|started| {
                    started
                        .borrow_mut()
                        .retain(|handle| !Rc::ptr_eq(handle, &running.handle));
                });
            }
            !over
        });
        ended
    }

    /// Reads the tables' states, and the results of workers that have ended. If no other process
    /// can have changed a state, only the tables of these workers are read: a subscription may have
    /// ten thousand.
    fn read_catalog(&mut self, ended: &[u32], all: bool, now: Instant) -> Result<(), PgError> {
        if all {
            self.read_at = Some(now);
        }
        let rows = match error::transaction(|| self.load_rows((!all).then_some(ended))) {
            Ok(rows) => rows,
            Err(error) if is_permanent(&error, false) => return Err(error),
            Err(error) => {
                error.log("could not read the states of tables");
                self.unreaped.extend_from_slice(ended);
                return Ok(());
            }
        };
        let mut before = self.forget(ended, all);
        let mut failed = None;
        for row in rows {
            let old = before.remove(&row.relation);
            if let Some(error) = self.learn(row, old.as_ref(), ended, now) {
                failed.get_or_insert(error);
            }
        }
        if all {
            self.stale = false;
            self.adopting = false;
        }
        self.progress.changed |= !before.is_empty();
        // A worker whose table has left the subscription finds that out only when it is done.
        for running in &self.running {
            if before.contains_key(&running.relation) {
                running.handle.terminate();
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Take out the tables that are read anew.
    fn forget(&mut self, ended: &[u32], all: bool) -> HashMap<u32, Table> {
        if all {
            self.names.clear();
            self.numbers.clear();
            return std::mem::take(&mut self.tables);
        }
        let mut before = HashMap::new();
        for relation in ended {
            if let Some(table) = self.tables.remove(relation) {
                self.names
                    .remove(&(table.namespace.clone(), table.name.clone()));
                before.insert(*relation, table);
            }
        }
        before
    }

    /// Takes over the catalog's row of one table. Returns the error of a copy that needs a person.
    fn learn(
        &mut self,
        row: CatalogRow,
        old: Option<&Table>,
        ended: &[u32],
        now: Instant,
    ) -> Option<PgError> {
        self.progress.changed |=
            old.is_none_or(|old| (old.state == State::Ready) != (row.state == State::Ready));
        let mut table = Table {
            state: row.state,
            namespace: row.namespace,
            name: row.name,
            failures: old.map_or(0, |old| old.failures),
            retry_at: old.and_then(|old| old.retry_at),
            adopted: old.is_some_and(|old| old.adopted),
        };
        if self.adopting && table.state == State::Waiting {
            table.adopted = true;
        }
        let mut failed = None;
        if table.state == State::Ready {
            table.failures = 0;
            table.retry_at = None;
            table.adopted = false;
        } else if ended.contains(&row.relation) {
            table.failures = table.failures.saturating_add(1);
            table.retry_at = Some(now + pause(table.failures));
            failed = row
                .error
                .filter(|error| is_permanent(error, self.subscription.options.disable_on_error));
        }
        let names = (table.namespace.clone(), table.name.clone());
        self.names.insert(names, row.relation);
        if let Some(number) = row.number {
            self.numbers.insert(number, row.relation);
        }
        self.tables.insert(row.relation, table);
        failed
    }

    /// Rows of all tables, or of these.
    fn load_rows(&self, only: Option<&[u32]>) -> Result<Vec<CatalogRow>, PgError> {
        let only = only.map(|relations| {
            let list: Vec<String> = relations.iter().map(u32::to_string).collect();
            format!("{{{}}}", list.join(","))
        });
        let rows = subscription::rows(
            "select relation::oid::text, schema_name::text, table_name::text, \
             state, copy_error_sqlstate, copy_error, copy_error_detail, copy_error_hint, provider_relation::text \
             from braid.subscription_table \
             where subscription_id = $1 and ($2::oid[] is null or relation = any ($2::oid[])) \
             and exists (select from pg_catalog.pg_class c where c.oid = relation::oid)",
            &[
                i64::from(self.subscription.id).into(),
                only.as_deref().into(),
            ],
        )?;
        Ok(rows.iter().filter_map(|row| self.read_row(row)).collect())
    }

    fn read_row(&self, row: &[Option<String>]) -> Option<CatalogRow> {
        let text = |index: usize| row.get(index).cloned().flatten();
        let relation = text(0)?.parse().ok()?;
        let state = match text(3).as_deref() {
            Some("ready") => State::Ready,
            Some("copying") if self.is_copied(relation) => State::Copying,
            // A table in state 'copying' without a worker was left by a worker that has died.
            _ => State::Waiting,
        };
        let error = text(4).map(|sqlstate| PgError {
            detail: text(6),
            hint: text(7),
            ..PgError::new(SqlState::parse(&sqlstate), text(5).unwrap_or_default())
        });
        let (namespace, name) = (text(1)?, text(2)?);
        Some(CatalogRow {
            relation,
            number: text(8).and_then(|number| number.parse().ok()),
            state,
            namespace,
            name,
            error,
        })
    }

    /// Whether a worker, of ours or left behind by an earlier leader, copies a table. In a
    /// transaction.
    fn is_copied(&self, relation: u32) -> bool {
        self.running
            .iter()
            .any(|running| running.relation == relation)
            || !try_lock(self.subscription.id, relation, false)
    }

    fn start_workers(&mut self, now: Instant) {
        let limit = settings::copy_workers_per_subscription();
        if self.running.len() >= limit {
            return;
        }
        self.starved = false;
        let mut due: Vec<u32> = self
            .tables
            .iter()
            .filter(|(relation, table)| {
                table.state == State::Waiting
                    && table.retry_at.is_none_or(|at| at <= now)
                    && !self
                        .running
                        .iter()
                        .any(|running| running.relation == **relation)
            })
            .map(|(relation, _)| *relation)
            .collect();
        due.sort_unstable();
        for relation in due.into_iter().take(limit - self.running.len()) {
            let Some(handle) = self.start_worker(relation) else {
                self.starved = true;
                break;
            };
            let handle = Rc::new(handle);
            STARTED.with(|started| started.borrow_mut().push(Rc::clone(&handle)));
            self.running.push(Running { relation, handle });
        }
    }

    fn start_worker(&self, relation: u32) -> Option<Handle> {
        let table = self.tables.get(&relation)?;
        // After a failure the snapshot itself may be the cause: the provider forgets it when the
        // connection breaks.
        let adopted = self
            .adopted
            .as_ref()
            .filter(|adopted| table.adopted && table.failures == 0 && adopted.connection.is_open());
        let task = Task {
            subscription: self.subscription.id,
            relation,
            snapshot: adopted
                .map(|adopted| adopted.snapshot.clone())
                .unwrap_or_default(),
            lsn: adopted.map_or(0, |adopted| adopted.lsn),
            failures: table.failures,
        };
        worker::start(&Worker {
            name: &format!(
                "braid copy {} {}.{}",
                self.subscription.name, table.namespace, table.name
            ),
            kind: WORKER_KIND,
            function: WORKER_FUNCTION,
            argument: process::my_database(),
            extra: task.pack(),
        })
    }

    fn count(&mut self, now: Instant) {
        let unready = self
            .tables
            .iter()
            .filter(|(_, table)| table.state != State::Ready);
        let (mut waiting, mut copying, mut next) = (0, 0, None::<Duration>);
        let mut sooner = |time: Duration| {
            next = Some(next.map_or(time, |next| next.min(time)));
        };
        for (relation, table) in unready {
            let ours = self
                .running
                .iter()
                .any(|running| running.relation == *relation);
            if ours || table.state == State::Copying {
                copying += 1;
                if !ours {
                    sooner(AGAIN);
                }
            } else {
                waiting += 1;
                if let Some(at) = table.retry_at.filter(|at| *at > now) {
                    sooner(at.duration_since(now));
                }
            }
        }
        if self.starved {
            sooner(AGAIN);
        }
        if waiting == 0 && copying == 0 {
            self.adopted = None;
        }
        self.progress.waiting = waiting;
        self.progress.copying = copying;
        self.progress.next = next;
    }
}

struct CatalogRow {
    relation: u32,
    /// The table's OID at the provider.
    number: Option<u32>,
    state: State,
    namespace: String,
    name: String,
    error: Option<PgError>,
}

fn pause(failures: u32) -> Duration {
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(policy::backoff_ms(
        failures,
        milliseconds(settings::retry_interval()),
        milliseconds(settings::retry_interval_max()),
    ))
}
