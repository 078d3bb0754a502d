//! Where rows of routed tables live, as the group has agreed. The group worker shows it to all
//! processes of its database.
//!
//! The worker writes the agreed rules into a segment of shared memory, a new one for each change,
//! and stores in its manager's entry which one counts. The last `Close` arrives each half second
//! while routed tables are written to, so it has a place of its own in that entry. A process keeps
//! the rules that it has read, and reads again when the number has changed.
//!
//! Invariant: the rules that a process reads are those of the log up to its `Close` or of a longer
//! part of the log. So a process reads the `Close` first, and the worker writes it last. If a new
//! worker knows less of the log than the one before, it takes the `Close` back first. All nodes
//! place a row under a `Close` alike (`crates/routing`).
//!
//! The segment outlives the worker: rows are placed while it is restarted. If nothing is known yet,
//! after a start of the server, rows wait.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use braid_bgworker::sqlstate::SqlState;
use braid_codec::{Malformed, Reader, Writer};
use braid_postgres::error::PgError;
use braid_postgres::wait::Wait;
use braid_postgres::{compat, latch, libpq, plain, process, timestamp, worker};
use braid_routing::{
    Admission, NodeId, ReadBound, RecordHash, Route, RoutedTable, Routing, SetId, Shard, TableName,
    TenantHash, Time, Window, dsn,
};
use pgrx::pg_sys;

use crate::registry::{self, ManagerEntry};
use crate::settings;

/// Between two looks of a session that waits for a `Close`.
const SOON: Duration = Duration::from_millis(5);
/// A name or connection string that is shown, in bytes.
const TEXT_LIMIT: usize = 16 * 1024;
const MEMBERS_LIMIT: usize = 65_536;
const FORMAT: u8 = 1;

/// The routing part of a manager's entry.
#[repr(C)]
#[derive(Debug)]
pub struct RoutingEntry {
    /// Grows by two with all that is shown, and is odd meanwhile; 0: nothing yet.
    generation: AtomicU64,
    /// The segment that has it.
    segment: AtomicU32,
    /// The length of the segment's content, in bytes.
    length: AtomicU64,
    /// The last `Close` (TimestampTz); `i64::MIN`: none.
    closed: AtomicI64,
    /// When a routed table was last used by a process that needs a `Close` (TimestampTz).
    used_at: AtomicI64,
    /// Rows that waited for a `Close`, since the server started.
    waits: AtomicU64,
    /// The longest such wait, in microseconds.
    longest_wait: AtomicU64,
    /// The longest time that the group took to agree on a `Close` of this node, in microseconds.
    longest_agreement: AtomicU64,
    /// The segment with writes by tenant (`crate::tenant_load`); 0: no table has had a balancer.
    load_segment: AtomicU32,
}

impl RoutingEntry {
    pub(crate) fn clear(&self) {
        self.closed.store(i64::MIN, Ordering::SeqCst);
        self.generation.store(0, Ordering::SeqCst);
        self.segment.store(0, Ordering::SeqCst);
        self.length.store(0, Ordering::SeqCst);
        self.used_at.store(0, Ordering::SeqCst);
        self.waits.store(0, Ordering::SeqCst);
        self.longest_wait.store(0, Ordering::SeqCst);
        self.longest_agreement.store(0, Ordering::SeqCst);
        self.load_segment.store(0, Ordering::SeqCst);
    }

    /// The segment with writes by tenant; 0: none.
    pub(crate) fn load_segment(&self) -> u32 {
        self.load_segment.load(Ordering::Acquire)
    }

    pub(crate) fn show_load_segment(&self, handle: u32) {
        self.load_segment.store(handle, Ordering::Release);
    }

    /// When a `Close` was last needed (TimestampTz); 0: never.
    pub fn used_at(&self) -> i64 {
        self.used_at.load(Ordering::Relaxed)
    }

    /// Notes how long the group took to agree on a `Close`.
    pub fn note_agreement(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.longest_agreement.fetch_max(micros, Ordering::Relaxed);
    }

    /// Rows that waited, the longest wait and the longest agreement in microseconds.
    #[must_use]
    pub fn activity(&self) -> [u64; 3] {
        [&self.waits, &self.longest_wait, &self.longest_agreement]
            .map(|counter| counter.load(Ordering::Relaxed))
    }
}

/// A member, as clients are to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The member's number in the log.
    pub node: NodeId,
    /// The member's name.
    pub name: String,
    /// Host, port and database of its connection string: nothing secret.
    pub dsn: String,
}

/// The agreed routing, and which member this node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    /// This node.
    pub me: NodeId,
    /// The members that are not removed.
    pub places: Vec<Place>,
    /// Removed members that the agreed routing may still name, with their last names.
    pub removed: Vec<(NodeId, String)>,
    /// The routed tables.
    pub routing: Routing,
}

impl Agreed {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(FORMAT).u64(self.me.0).count(self.places.len());
        for place in &self.places {
            w.u64(place.node.0).text(&place.name).text(&place.dsn);
        }
        w.count(self.removed.len());
        for (node, name) in &self.removed {
            w.u64(node.0).text(name);
        }
        w.raw(&self.routing.encode());
        w.done()
    }

    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::versioned(bytes, "routing in shared memory", FORMAT)?;
        let me = NodeId(r.u64()?);
        let mut places = Vec::new();
        for _ in 0..r.count(MEMBERS_LIMIT)? {
            places.push(Place {
                node: NodeId(r.u64()?),
                name: r.text(TEXT_LIMIT)?,
                dsn: r.text(TEXT_LIMIT)?,
            });
        }
        let mut removed = Vec::new();
        for _ in 0..r.count(MEMBERS_LIMIT)? {
            removed.push((NodeId(r.u64()?), r.text(TEXT_LIMIT)?));
        }
        let routing = Routing::decode(r.rest())?;
        Ok(Self {
            me,
            places,
            removed,
            routing,
        })
    }

    /// A member.
    #[must_use]
    pub fn place(&self, node: NodeId) -> Option<&Place> {
        self.places.iter().find(|place| place.node == node)
    }

    /// The member of a name.
    #[must_use]
    pub fn member_named(&self, name: &str) -> Option<NodeId> {
        let found = self.places.iter().find(|place| place.name == name);
        found.map(|place| place.node)
    }

    /// The names of some members, for people: a removed one is marked as such.
    #[must_use]
    pub fn names(&self, nodes: &[NodeId]) -> Vec<String> {
        nodes.iter().map(|node| self.name(*node)).collect()
    }

    fn name(&self, node: NodeId) -> String {
        if let Some(place) = self.place(node) {
            return place.name.clone();
        }
        match self.removed.iter().find(|removed| removed.0 == node) {
            Some((_, name)) => format!("{name} (removed)"),
            None => format!("member {}", node.0),
        }
    }

    /// One connection string for some members: libpq takes the first that answers.
    #[must_use]
    pub fn dsn(&self, nodes: &[NodeId]) -> Option<String> {
        let places = nodes.iter().filter_map(|node| self.place(*node));
        let settings: Vec<_> = places
            .map(|place| libpq::connection_settings(&place.dsn))
            .collect();
        dsn::joined(&settings)
    }
}

/// The part of a connection string that others may see.
#[must_use]
pub fn public_dsn(dsn: &str) -> String {
    dsn::public(&libpq::connection_settings(dsn))
}

/// Publishes the agreed rules. For the group worker.
///
/// # Errors
/// 53200 and the like from PostgreSQL.
pub fn show(entry: &ManagerEntry, agreed: &Agreed) -> Result<(), PgError> {
    let place = &entry.routing;
    let closed = agreed.routing.closed().0;
    if closed < place.closed.load(Ordering::SeqCst) {
        place.closed.store(closed, Ordering::SeqCst);
    }
    let bytes = agreed.encode();
    let segment = plain::dsm_create(bytes.len().max(1), 0);
    if segment.is_null() {
        return Err(PgError::new(
            SqlState::OutOfMemory,
            "no shared memory for routing",
        ));
    }
    // SAFETY: the segment is fresh, mapped, and as long as the bytes. Pinned, it stays until it is
    // unpinned or the server ends, also when this process ends.
    let handle = unsafe {
        let address = pg_sys::dsm_segment_address(segment).cast::<u8>();
        address.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        pg_sys::dsm_pin_segment(segment);
        let handle = pg_sys::dsm_segment_handle(segment);
        pg_sys::dsm_detach(segment);
        handle
    };
    place.generation.fetch_add(1, Ordering::SeqCst);
    let before = place.segment.swap(handle, Ordering::SeqCst);
    let length = u64::try_from(bytes.len()).unwrap_or(0);
    place.length.store(length, Ordering::SeqCst);
    place.generation.fetch_add(1, Ordering::SeqCst);
    if before != 0 {
        // SAFETY: pinned by a worker of this database, and unpinned once.
        unsafe { pg_sys::dsm_unpin_segment(before) };
    }
    show_close(entry, agreed.routing.closed());
    Ok(())
}

/// Publishes the last `Close`. For the group worker, after the rules that were agreed before it.
pub fn show_close(entry: &ManagerEntry, closed: Time) {
    entry.routing.closed.store(closed.0, Ordering::SeqCst);
}

/// Takes all back. For the group worker of a member that takes no part any more.
pub fn hide(entry: &ManagerEntry) {
    let place = &entry.routing;
    place.closed.store(i64::MIN, Ordering::SeqCst);
    place.generation.fetch_add(1, Ordering::SeqCst);
    let before = place.segment.swap(0, Ordering::SeqCst);
    place.generation.fetch_add(1, Ordering::SeqCst);
    if before != 0 {
        // SAFETY: pinned by a worker of this database, and unpinned once.
        unsafe { pg_sys::dsm_unpin_segment(before) };
    }
}

thread_local! {
    /// The state that this process has read, and as of which number.
    static READ: RefCell<Option<(u64, Rc<Agreed>)>> = const { RefCell::new(None) };
}

/// The state as this process knows it.
#[derive(Debug, Clone)]
pub struct Known {
    /// The agreed routing.
    pub agreed: Rc<Agreed>,
    /// A number that changes with `agreed`.
    pub version: u64,
    /// The last `Close`; the rules in `agreed` are those of the log up to it, or more.
    pub closed: Time,
}

impl Known {
    /// A routed table.
    #[must_use]
    pub fn table(&self, name: &TableName) -> Option<&RoutedTable> {
        self.agreed.routing.table(name)
    }

    /// The bound that a read may rely on.
    #[must_use]
    pub fn read_bound(&self, table: &RoutedTable, upto: Option<Time>) -> ReadBound {
        if table.is_open() {
            window().read_bound(upto, now(), self.closed)
        } else {
            ReadBound::Everywhere
        }
    }
}

/// The window: how far ahead of clocks the group closes times.
#[must_use]
pub fn window() -> Window {
    Window::default()
}

fn now() -> Time {
    Time(timestamp::now())
}

/// The agreed routing, as far as this database knows. `None`: nothing is known, or the database is
/// in no group.
#[must_use]
pub fn known() -> Option<Known> {
    let place = &registry::my_manager()?.routing;
    // A segment goes when a newer one is shown.
    for _ in 0..100 {
        let closed = Time(place.closed.load(Ordering::SeqCst));
        let generation = place.generation.load(Ordering::SeqCst);
        if generation == 0 {
            return None;
        }
        if !generation.is_multiple_of(2) {
            std::thread::yield_now();
            continue;
        }
        let read = READ.with_borrow(|read| match read {
            Some((known, agreed)) if *known == generation => Some(Rc::clone(agreed)),
            _ => None,
        });
        if let Some(agreed) = read {
            return Some(Known {
                agreed,
                version: generation,
                closed,
            });
        }
        let handle = place.segment.load(Ordering::SeqCst);
        if handle == 0 {
            return None;
        }
        let length = usize::try_from(place.length.load(Ordering::SeqCst)).unwrap_or(0);
        let bytes = copy_of(handle, length);
        if place.generation.load(Ordering::SeqCst) != generation {
            continue;
        }
        let agreed = Rc::new(Agreed::decode(&bytes?).ok()?);
        READ.set(Some((generation, Rc::clone(&agreed))));
        return Some(Known {
            agreed,
            version: generation,
            closed,
        });
    }
    None
}

fn copy_of(handle: u32, length: usize) -> Option<Vec<u8>> {
    let segment = plain::dsm_attach(handle);
    if segment.is_null() {
        return None;
    }
    // SAFETY: mapped, at least as long as it is read, and not written any more.
    unsafe {
        let has = pg_sys::dsm_segment_map_length(segment);
        let address = pg_sys::dsm_segment_address(segment).cast::<u8>();
        let bytes = (length <= has).then(|| std::slice::from_raw_parts(address, length).to_vec());
        pg_sys::dsm_detach(segment);
        bytes
    }
}

/// Whether somebody has needed a `Close` within the last two seconds, in which it would have come.
#[must_use]
pub fn is_in_use() -> bool {
    let used_at = registry::my_manager().map_or(0, |entry| entry.routing.used_at());
    timestamp::now().saturating_sub(used_at) < 2_000_000
}

/// Says that a `Close` is needed, so that the group worker sees to it.
pub fn note_use() {
    let Some(entry) = registry::my_manager() else {
        return;
    };
    let now = timestamp::now();
    let before = entry.routing.used_at.load(Ordering::Relaxed);
    // One write to the shared line each tenth of a second is enough.
    if now - before > 100_000 || now < before {
        entry.routing.used_at.store(now, Ordering::Relaxed);
        if now - before > 400_000 || now < before {
            process::set_latch(entry.group_latch.load(Ordering::Acquire));
        }
    }
}

/// A table by its schema and name.
///
/// # Errors
/// 54000 if the name is too long.
pub fn table_name(schema: &str, name: &str) -> Result<TableName, PgError> {
    TableName::of(schema, name).map_err(|_| {
        PgError::new(
            SqlState::ProgramLimitExceeded,
            format!("the name of table \"{schema}\".\"{name}\" is too long for routing"),
        )
    })
}

/// A row, as far as its place goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowKeys {
    /// The row's tenant.
    pub tenant: TenantHash,
    /// The row's record.
    pub record: RecordHash,
    /// When it was created.
    pub created: Time,
}

/// Where a row is that is stored already, or may be stored now.
#[must_use]
pub fn shard_of(table: &RoutedTable, row: &RowKeys) -> Shard {
    table.placement(row.tenant, row.record, row.created)
}

/// Waits until the place of a row is final, and checks that this node has such rows.
///
/// # Errors
/// RT001 if the row belongs to other nodes; 22008 if it is dated too far ahead; 55P03 if the group
/// does not agree in time; 55000 if the table is not routed, or nothing is known of it.
pub fn check_here(name: &TableName, row: &RowKeys) -> Result<(), PgError> {
    if is_from_elsewhere() {
        return Ok(());
    }
    when_final(name, row, |known, table| {
        check_home(&known.agreed, name, table, row)
    })
}

/// Waits until the place of a row is final, and returns the set of nodes that it is written at:
/// this node's own, if it takes the row.
///
/// # Errors
/// As [`check_here`], but for RT001.
pub fn place_of(name: &TableName, row: &RowKeys) -> Result<SetId, PgError> {
    if ATTACHING.get() || is_from_elsewhere() {
        return own_set(name, row);
    }
    when_final(name, row, |known, table| Ok(place_in(known, table, row)))
}

thread_local! {
    /// All rows of a table are taken for rows of this node's set.
    static ATTACHING: Cell<bool> = const { Cell::new(false) };
}

/// Attaches a table to its umbrella. PostgreSQL looks at each row then. A row of a shard that moves
/// may be on two sets, and must not keep the table from being attached.
pub fn attaching<T>(work: impl FnOnce() -> T) -> T {
    struct Inside;
    impl Drop for Inside {
        fn drop(&mut self) {
            ATTACHING.set(false);
        }
    }
    ATTACHING.set(true);
    let _inside = Inside;
    work()
}

/// Rows of another node were checked on that node. A shard that moves arrives before this is its
/// home.
fn is_from_elsewhere() -> bool {
    worker::is_worker() || compat::session_origin() != 0
}

fn own_set(name: &TableName, row: &RowKeys) -> Result<SetId, PgError> {
    let known = known();
    let table = known.as_ref().and_then(|known| known.table(name));
    let (Some(known), Some(table)) = (&known, table) else {
        return Err(not_routed(name));
    };
    let own = table.map().set_of(known.agreed.me);
    Ok(own.unwrap_or_else(|| place_in(known, table, row)))
}

fn place_in(known: &Known, table: &RoutedTable, row: &RowKeys) -> SetId {
    let shard = shard_of(table, row);
    let map = table.map();
    let own = map.set_of(known.agreed.me);
    own.filter(|set| map.takes_writes(*set, shard))
        .or_else(|| map.route(shard).map(|route| route.set))
        .unwrap_or(SetId(0))
}

/// Does something with a row whose place is final, and waits until it is.
fn when_final<T>(
    name: &TableName,
    row: &RowKeys,
    work: impl FnOnce(&Known, &RoutedTable) -> Result<T, PgError>,
) -> Result<T, PgError> {
    let mut waiting = Waiting::default();
    loop {
        let why = match known() {
            None => Why::Unknown,
            Some(known) => match known.table(name) {
                None => return Err(not_routed(name)),
                Some(table) if !table.is_open() => Why::Prepared,
                Some(table) => match window().admission(row.created, now(), known.closed) {
                    Admission::Now => {
                        note_use();
                        waiting.end();
                        return work(&known, table);
                    }
                    Admission::WaitForClose => Why::Close,
                    Admission::WaitUntil(time) => {
                        let ahead = time.0.saturating_sub(now().0).max(0);
                        waiting.sleep(
                            name,
                            Duration::from_micros(ahead.unsigned_abs()),
                            Why::Time,
                        )?;
                        continue;
                    }
                    Admission::TooFarAhead => return Err(too_far_ahead(name)),
                },
            },
        };
        note_use();
        waiting.sleep(name, SOON, why)?;
    }
}

/// The reason why a row waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Unknown,
    Prepared,
    Close,
    Time,
}

#[derive(Default)]
struct Waiting {
    since: Option<Instant>,
}

impl Waiting {
    fn sleep(&mut self, name: &TableName, pause: Duration, why: Why) -> Result<(), PgError> {
        let limit = settings::routing_wait();
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > limit {
            return Err(late(name, why));
        }
        latch::may_wait()?;
        // The latch may be set for other reasons; interrupts are taken.
        latch::wait_as(Wait::Routing, pause.max(Duration::from_millis(1)).min(SOON));
        Ok(())
    }

    /// Counts the wait, if there was one.
    fn end(&self) {
        if let (Some(since), Some(entry)) = (self.since, registry::my_manager()) {
            let micros = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
            entry.routing.waits.fetch_add(1, Ordering::Relaxed);
            entry
                .routing
                .longest_wait
                .fetch_max(micros, Ordering::Relaxed);
        }
    }
}

fn late(name: &TableName, why: Why) -> PgError {
    let (state, detail, hint) = match why {
        Why::Unknown => (
            SqlState::ObjectNotInPrerequisiteState,
            "This node knows nothing of its group's routing.".to_owned(),
            "See in braid.group_nodes whether the node takes part in its group. In a database that belongs to no group, drop the table's constraint braid_routing.",
        ),
        Why::Prepared => (
            SqlState::LockNotAvailable,
            "The table is being prepared for routing.".to_owned(),
            "If braid.route_table has failed, call it again, or take the table out with braid.unroute_table.",
        ),
        Why::Close | Why::Time => (
            SqlState::LockNotAvailable,
            "No majority of the group has confirmed that the routing rules known here are all that count for the row's time.".to_owned(),
            "See braid.group_nodes: a member that is cut off from the majority creates no rows of routed tables. The setting braid.routing_wait says how long a row waits.",
        ),
    };
    PgError::new(
        state,
        format!("rows of routed table {name} cannot be created now"),
    )
    .with_detail(detail)
    .with_hint(hint)
}

/// 55000: the table has the guard, and the group does not route it.
#[must_use]
pub fn not_routed(name: &TableName) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("table {name} is not routed by the group"),
    )
    .with_detail("The table has the constraint braid_routing, which refuses its rows.")
    .with_hint("Drop the constraint, or route the table with braid.route_table.")
}

fn too_far_ahead(name: &TableName) -> PgError {
    PgError::new(
        SqlState::DatetimeFieldOverflow,
        format!("row of routed table {name} is dated in the future"),
    )
    .with_detail("Its place cannot be known before that time, as a routing rule may come.")
    .with_hint(
        "Create the row with the present time, and keep a date in the future in another column.",
    )
}

fn check_home(
    agreed: &Agreed,
    name: &TableName,
    table: &RoutedTable,
    row: &RowKeys,
) -> Result<(), PgError> {
    let shard = shard_of(table, row);
    let map = table.map();
    let own = map.set_of(agreed.me);
    if own.is_some_and(|set| map.takes_writes(set, shard)) {
        return Ok(());
    }
    let route = map.route(shard);
    let nodes = route.as_ref().map_or(&[][..], |route| route.nodes);
    Err(elsewhere(agreed, name, shard, nodes))
}

/// RT001: another node has such rows.
fn elsewhere(agreed: &Agreed, name: &TableName, shard: Shard, nodes: &[NodeId]) -> PgError {
    let names = agreed.names(nodes).join(", ");
    let error = PgError::new(
        SqlState::RowOfAnotherNode,
        format!("row of routed table {name} belongs to node {names}"),
    )
    .with_detail(format!("Its shard is {shard}."));
    match agreed.dsn(nodes) {
        Some(dsn) => error.with_hint(format!(
            "Write it there: {dsn}. The function braid.route gives the node of a row."
        )),
        None => error.with_hint("The function braid.route gives the node of a row."),
    }
}

/// Whether a member has the rows of this shard, or gets them.
#[must_use]
pub fn holds(table: &RoutedTable, node: NodeId, shard: Shard) -> bool {
    let map = table.map();
    map.set_of(node)
        .is_some_and(|set| map.holders(shard).any(|holder| holder == set))
}

/// The route of a shard.
#[must_use]
pub fn route(table: &RoutedTable, shard: Shard) -> Option<Route<'_>> {
    table.map().route(shard)
}
