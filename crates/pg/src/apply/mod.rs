//! Applying changes to this database. Run by the appliers, one transaction at a time.
//!
//! [`Session`] lives as long as the process and keeps what is expensive to find: schemas of the stream, how they map to
//! local tables, names of origins. What a transaction opens is closed at its end, or dropped without further ado when it is
//! rolled back.
//!
//! Invariants: nothing is written outside of the transaction that carries the source's origin, position and timestamp
//! (I1, I3); a row's version is read only after the row is locked; a change of another origin is decided by
//! `braid_bgworker::conflict` alone (I2).

mod change;
mod decode;
mod history;
mod lookup;
mod partition;
mod relation;
mod scan;
mod truncate;
pub(crate) mod user;
mod version;
mod write;

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use braid_gir::{Begin, Schema};
use pgrx::pg_sys;

use crate::error::PgError;
use crate::registry::{self, SubscriptionEntry, TableEntry};
use relation::{LocalRelation, RemoteRelation};
use user::UserSwitch;
use version::OriginNames;
use write::OpenTable;

pub use decode::EPOCH_DIFFERENCE;
pub use version::COPIED;

/// Grows with each relcache invalidation.
static GENERATION: AtomicU64 = AtomicU64::new(1);
static REGISTERED: AtomicBool = AtomicBool::new(false);

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_invalidation(_arg: pg_sys::Datum, _relation: pg_sys::Oid) {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A snapshot that sees every row version that is there.
fn any_snapshot() -> pg_sys::Snapshot {
    &raw mut pg_sys::SnapshotAnyData
}

/// ExecClearTuple of src/include/executor/tuptable.h.
///
/// # Safety
/// `slot` is valid.
unsafe fn clear_slot(slot: *mut pg_sys::TupleTableSlot) {
    // SAFETY: as the caller says; the slot's own function, behind pgrx's guard.
    unsafe {
        if let Some(clear) = (*(*slot).tts_ops).clear {
            pg_sys::ffi::pg_guard_ffi_boundary(|| clear(slot));
        }
    }
}

/// Who applies, for whom.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Subscription's id.
    pub subscription_id: u32,
    /// Subscription's name.
    pub subscription: String,
    /// User to apply as; `None`: each table's owner.
    pub run_as: Option<u32>,
    /// This node.
    pub local_node: String,
    /// The node that sends the stream.
    pub provider: String,
    /// Charset of the stream, as PostgreSQL numbers encodings.
    pub charset: i32,
}

/// Where a relation of the stream goes.
#[derive(Debug, Clone, Copy)]
struct Route {
    oid: pg_sys::Oid,
    generation: u64,
    /// Changes of transactions that committed before this are in the copy; `None`: the table is not part of the subscription.
    from_lsn: Option<u64>,
}

#[derive(Debug)]
struct Target {
    plan: LocalRelation,
    generation: u64,
    table: Option<OpenTable>,
    counters: Option<&'static TableEntry>,
}

/// The transaction in hand.
#[derive(Debug, Clone)]
struct Current {
    commit_lsn: u64,
    timestamp: i64,
    xid: u32,
    origin: Rc<str>,
    /// The sender is the origin: its order is the order of versions.
    from_origin: bool,
}

/// Rows written by a transaction, for the counters.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Inserted.
    pub inserts: u64,
    /// Updated.
    pub updates: u64,
    /// Deleted.
    pub deletes: u64,
    /// Tables truncated.
    pub truncates: u64,
    /// Conflicts met.
    pub conflicts: u64,
}

impl Counts {
    /// Changes in all.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.inserts + self.updates + self.deletes + self.truncates
    }
}

/// What an applier keeps between transactions, and the one in hand.
#[derive(Debug)]
pub struct Session {
    identity: Identity,
    provider: Rc<str>,
    schemas: HashMap<u32, Rc<RemoteRelation>>,
    routes: HashMap<u32, Route>,
    targets: HashMap<(u32, u32), Target>,
    open: Vec<(u32, u32)>,
    origins: OriginNames,
    user: UserSwitch,
    change_context: pg_sys::MemoryContext,
    current: Option<Current>,
    counts: Counts,
    table_counts: HashMap<(u32, u32), Counts>,
    /// Version of the catalog's table states that `routes` was read under.
    tables_version: u32,
    reported_unsubscribed: std::collections::HashSet<u32>,
}

fn memory_context(name: &'static std::ffi::CStr) -> pg_sys::MemoryContext {
    // SAFETY: a context below TopMemoryContext, for the life of the process.
    unsafe {
        pg_sys::AllocSetContextCreateInternal(
            pg_sys::TopMemoryContext,
            name.as_ptr(),
            0,
            8 * 1024,
            8 * 1024 * 1024,
        )
    }
}

impl Session {
    /// A session that knows nothing yet.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        if !REGISTERED.swap(true, Ordering::Relaxed) {
            // SAFETY: the callback belongs to this library, which is never unloaded.
            unsafe {
                pg_sys::CacheRegisterRelcacheCallback(Some(on_invalidation), pg_sys::Datum::null());
            }
        }
        Self {
            provider: Rc::from(identity.provider.as_str()),
            origins: OriginNames::new(&identity.local_node),
            identity,
            schemas: HashMap::new(),
            routes: HashMap::new(),
            targets: HashMap::new(),
            open: Vec::new(),
            user: UserSwitch::default(),
            change_context: memory_context(c"braid change"),
            current: None,
            counts: Counts::default(),
            table_counts: HashMap::new(),
            tables_version: 0,
            reported_unsubscribed: std::collections::HashSet::new(),
        }
    }

    /// Learn a schema of the stream.
    pub fn learn(&mut self, schema: &Schema<'_>) {
        self.schemas
            .insert(schema.number.0, Rc::new(RemoteRelation::new(schema)));
    }

    /// Whether a schema is known.
    #[must_use]
    pub fn knows(&self, schema: u32) -> bool {
        self.schemas.contains_key(&schema)
    }

    /// Open a transaction for what follows `begin`.
    pub fn begin(&mut self, begin: &Begin<'_>, tables_version: u32) {
        if tables_version != self.tables_version {
            self.routes.clear();
            self.tables_version = tables_version;
        }
        let from_origin = begin.origin.is_empty();
        self.current = Some(Current {
            commit_lsn: begin.commit_lsn,
            timestamp: begin.commit_timestamp,
            xid: begin.xid,
            origin: if from_origin {
                Rc::clone(&self.provider)
            } else {
                Rc::from(begin.origin)
            },
            from_origin,
        });
        self.counts = Counts::default();
        self.table_counts.clear();
        // SAFETY: outside of a transaction until here.
        unsafe {
            pg_sys::SetCurrentStatementStartTimestamp();
            pg_sys::StartTransactionCommand();
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            pg_sys::MemoryContextSwitchTo(self.change_context);
        }
    }

    /// Commit as the source's transaction that ends at `end_lsn`. Returns the end of the local commit record; 0 when nothing was
    /// written.
    pub fn commit(&mut self, end_lsn: u64) -> u64 {
        self.close_tables();
        let timestamp = self.current.as_ref().map_or(0, |current| current.timestamp);
        // SAFETY: the transaction was opened in `begin`; the origin is set up for this process. The values are read by
        // RecordTransactionCommit.
        unsafe {
            pg_sys::PopActiveSnapshot();
            pg_sys::replorigin_session_origin_lsn = end_lsn;
            pg_sys::replorigin_session_origin_timestamp =
                timestamp.saturating_sub(EPOCH_DIFFERENCE);
            pg_sys::XactLastCommitEnd = 0;
            pg_sys::CommitTransactionCommand();
            pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            pg_sys::MemoryContextReset(self.change_context);
            self.current = None;
            pg_sys::XactLastCommitEnd
        }
    }

    /// Close what the transaction has opened, before it commits or waits to.
    pub fn close_tables(&mut self) {
        self.user.restore();
        for key in std::mem::take(&mut self.open) {
            if let Some(table) = self
                .targets
                .get_mut(&key)
                .and_then(|target| target.table.take())
            {
                table.close();
            }
        }
    }

    /// The transaction was rolled back: forget what it had open, which is gone.
    pub fn forget_transaction(&mut self) {
        self.user.forget();
        for key in std::mem::take(&mut self.open) {
            if let Some(target) = self.targets.get_mut(&key) {
                target.table = None;
            }
        }
        self.current = None;
        // SAFETY: nothing of the rolled-back transaction is used any more.
        unsafe {
            pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
            pg_sys::MemoryContextReset(self.change_context);
        }
    }

    /// Whether the transaction in hand has written anything.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Add what the committed transaction did to the shared counters.
    pub fn publish_counts(&mut self, entry: &SubscriptionEntry) {
        let add = |counter: &std::sync::atomic::AtomicU64, count: u64| {
            if count > 0 {
                counter.fetch_add(count, Ordering::Relaxed);
            }
        };
        add(&entry.transactions, 1);
        add(&entry.inserts, self.counts.inserts);
        add(&entry.updates, self.counts.updates);
        add(&entry.deletes, self.counts.deletes);
        add(&entry.truncates, self.counts.truncates);
        add(&entry.conflicts, self.counts.conflicts);
        for (key, counts) in self.table_counts.drain() {
            let subscription = self.identity.subscription_id;
            let Some(target) = self.targets.get_mut(&key) else {
                continue;
            };
            if target.counters.is_none() {
                target.counters = registry::table(subscription, key.1);
            }
            if let Some(table) = target.counters {
                add(&table.inserts, counts.inserts);
                add(&table.updates, counts.updates);
                add(&table.deletes, counts.deletes);
                add(&table.truncates, counts.truncates);
                add(&table.conflicts, counts.conflicts);
            }
        }
    }

    fn remote(&self, schema: u32) -> Result<Rc<RemoteRelation>, PgError> {
        self.schemas.get(&schema).cloned().ok_or_else(|| {
            PgError::new(
                "08P01",
                format!("change of unknown schema {schema} from the provider"),
            )
        })
    }

    /// Where a relation of the stream goes, and from which position on.
    fn route(&mut self, schema: u32, remote: &RemoteRelation) -> Result<Route, PgError> {
        let generation = GENERATION.load(Ordering::Relaxed);
        if let Some(route) = self.routes.get(&schema)
            && route.generation == generation
        {
            return Ok(*route);
        }
        self.user.restore();
        let Some(oid) = relation::find(&remote.namespace, &remote.name)? else {
            return Err(PgError::new(
                "42P01",
                format!("table \"{}\" does not exist here", remote.qualified_name()),
            )
            .with_hint(
                "Create it as it is at the provider, or take it out of the publication, then run \
                 braid.enable_subscription.",
            ));
        };
        let from_lsn = table_position(self.identity.subscription_id, oid)?;
        let route = Route {
            oid,
            generation,
            from_lsn,
        };
        self.routes.insert(schema, route);
        if from_lsn.is_none() && self.reported_unsubscribed.insert(oid.to_u32()) {
            pgrx::log!(
                "subscription \"{}\" leaves out table \"{}\", which it does not have: braid.refresh_subscription adds it",
                self.identity.subscription,
                remote.qualified_name()
            );
        }
        Ok(route)
    }

    /// Whether nothing was invalidated since a route was found.
    fn is_current(&self, route: &Route) -> bool {
        route.generation == GENERATION.load(Ordering::Relaxed)
    }

    /// Make sure that a table is open under the current plan.
    fn open_table(
        &mut self,
        schema: u32,
        remote: &RemoteRelation,
        oid: pg_sys::Oid,
    ) -> Result<(u32, u32), PgError> {
        let key = (schema, oid.to_u32());
        if let Some(target) = self.targets.get(&key)
            && target.table.is_some()
        {
            return Ok(key);
        }
        // SAFETY: opened in this transaction, which has not ended; the lock makes the shape stable until it does.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
            let lock = i32::try_from(pg_sys::RowExclusiveLock).unwrap_or(3);
            let relation = pg_sys::try_relation_open(oid, lock);
            if relation.is_null() {
                return Err(PgError::new(
                    "42P01",
                    "table was dropped while changes were applied",
                ));
            }
            // After the lock: a change of the table that committed before it is known by now.
            let generation = GENERATION.load(Ordering::Relaxed);
            let stale = self
                .targets
                .get(&key)
                .is_none_or(|target| target.generation != generation);
            if stale {
                let plan = LocalRelation::new(remote, relation, self.identity.charset)?;
                self.targets.insert(
                    key,
                    Target {
                        plan,
                        generation,
                        table: None,
                        counters: None,
                    },
                );
            }
            if let Some(target) = self.targets.get_mut(&key) {
                target.table = Some(OpenTable::open(relation, &target.plan)?);
                self.open.push(key);
            }
            pg_sys::MemoryContextSwitchTo(before);
        }
        Ok(key)
    }

    fn work_as_owner_of(&mut self, key: (u32, u32)) {
        let owner = match (self.identity.run_as, self.targets.get(&key)) {
            (Some(user), _) => pg_sys::Oid::from(user),
            (None, Some(target)) => target.plan.owner,
            (None, None) => return,
        };
        self.user.work_as(owner);
    }

    fn count(&mut self, key: (u32, u32), add: impl Fn(&mut Counts)) {
        add(&mut self.counts);
        add(self.table_counts.entry(key).or_default());
    }
}

/// From which position on a table's changes are applied; `None` when it is not part of the subscription. Of a table that is still
/// to be copied, nothing is: the leader lets through only what is older than the copy will be.
fn table_position(subscription_id: u32, oid: pg_sys::Oid) -> Result<Option<u64>, PgError> {
    let subscription = i64::from(subscription_id);
    let relation = i64::from(oid.to_u32());
    pgrx::Spi::connect(|client| {
        let rows = client.select(
            "select case when state = 'ready' then (coalesce(copy_lsn, '0/0'::pg_lsn) - '0/0'::pg_lsn)::text \
             else '18446744073709551615' end \
             from braid.subscription_table where subscription_id = $1 and relation = $2::oid",
            Some(1),
            &[subscription.into(), relation.into()],
        )?;
        let Some(row) = rows.into_iter().next() else { return Ok(None) };
        let text: Option<String> = row.get(1)?;
        Ok(Some(text.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0)))
    })
    .map_err(|error: pgrx::spi::SpiError| {
        PgError::new("XX000", format!("could not read the catalog: {error}"))
    })
}
