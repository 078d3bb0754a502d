//! This side of a copy: the table is checked and filled by PostgreSQL's own COPY. Run by the copy workers, in the
//! transaction that also makes the table ready.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use braid_apply::identity_key;
use braid_apply::missing::{self, MissingColumn};
use braid_apply::user::{self, UserSwitch};
use braid_bgworker::copy_query::Published;
use braid_bgworker::sql_text::quote_identifier;
use braid_node::rate_limit::Limiter;
use braid_node::registry::TableEntry;
use braid_node::subscription::{self, Subscription};
use braid_postgres::compat;
use braid_postgres::encoding::from_server;
use braid_postgres::error::PgError;
use braid_postgres::libpq::{CopyData, CopyMessage};
use pgrx::pg_sys;

use super::source::Source;

/// Where rows wait that are merged with those that are here.
const STAGING: &str = "pg_temp.braid_copied";
/// Bytes that are read at a time where only rows count.
const DRAINED: usize = 64 * 1024;
// src/include/storage/lockdefs.h, 15 to 18.
const NO_LOCK: i32 = 0;

/// A local table, locked.
#[derive(Debug)]
pub struct Target {
    oid: pg_sys::Oid,
    /// Its schema.
    pub namespace: String,
    /// Its name.
    pub name: String,
    owner: pg_sys::Oid,
    partitioned: bool,
}

/// What a table is locked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To find out that it is empty while nobody writes.
    CheckEmpty,
    /// To copy into it while others may write.
    Fill,
    /// To empty it first.
    Truncate,
}

/// What is in the table that is to be filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filling {
    /// Nothing; what others write meanwhile has other keys, or is an error.
    Empty,
    /// Rows that go first.
    Truncate,
    /// Rows that were written here since the first attempt, and stay.
    Beside,
}

/// How much was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Rows.
    pub rows: u64,
    /// Bytes received.
    pub bytes: u64,
}

/// What came of filling a table.
pub struct Filled {
    /// How much it was.
    pub copied: Copied,
    /// As it was given, in its transaction.
    pub source: Source,
    /// The columns that were filled.
    pub columns: Vec<String>,
}

/// Where COPY's rows come from. COPY's callback has no argument of its own.
struct Feed {
    source: Source,
    message: Option<CopyMessage>,
    /// Bytes of `message` that COPY has.
    taken: usize,
    ended: bool,
    copied: Copied,
    counters: Option<&'static TableEntry>,
    limiter: Limiter,
}

thread_local! {
    static FEED: RefCell<Option<Feed>> = const { RefCell::new(None) };
}

fn quoted_list(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| quote_identifier(name)).collect();
    quoted.join(", ")
}

fn gone() -> PgError {
    PgError::new("42P01", "a table of the subscription does not exist any more").with_hint(
        "Create it again, or take it out of the publication there; run braid.refresh_subscription and then \
         braid.enable_subscription.",
    )
}

impl Target {
    /// Lock a table for the transaction.
    ///
    /// # Errors
    /// 42P01 when it was dropped, 42809 when it is not a table.
    pub fn lock(oid: u32, purpose: Purpose) -> Result<Self, PgError> {
        let oid = pg_sys::Oid::from(oid);
        let mode = match purpose {
            Purpose::CheckEmpty => pg_sys::ShareLock,
            Purpose::Fill => pg_sys::RowExclusiveLock,
            Purpose::Truncate => pg_sys::AccessExclusiveLock,
        };
        // SAFETY: in a transaction; the relation is closed again, the lock stays.
        unsafe {
            let relation = pg_sys::try_relation_open(oid, i32::try_from(mode).unwrap_or(8));
            if relation.is_null() {
                return Err(gone());
            }
            let form = (*relation).rd_rel;
            let kind = (*form).relkind.cast_unsigned();
            let namespace = pg_sys::get_namespace_name((*form).relnamespace);
            if namespace.is_null() {
                return Err(gone());
            }
            let target = Self {
                oid,
                namespace: from_server(namespace),
                name: from_server((*form).relname.data.as_ptr()),
                owner: (*form).relowner,
                partitioned: kind == b'p',
            };
            let checked = braid_apply::check_kind(relation);
            pg_sys::relation_close(relation, NO_LOCK);
            checked?;
            // COPY itself would write to a foreign partition, where no change is applied.
            if target.partitioned {
                braid_apply::check_partitions(oid)?;
            }
            Ok(target)
        }
    }

    /// Its OID.
    #[must_use]
    pub fn oid(&self) -> u32 {
        self.oid.to_u32()
    }

    /// Name for messages.
    #[must_use]
    pub fn shown(&self) -> String {
        format!("{}.{}", self.namespace, self.name)
    }

    fn quoted(&self) -> String {
        let only = if self.partitioned { "" } else { "only " };
        format!(
            "{only}{}.{}",
            quote_identifier(&self.namespace),
            quote_identifier(&self.name)
        )
    }

    /// Whether it has no rows, as of now.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn is_empty(&self) -> Result<bool, PgError> {
        // The transaction's first snapshot is older than the lock.
        // SAFETY: pushed and popped around the query; an error in between rolls the transaction back.
        unsafe { pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot()) };
        let rows = subscription::rows(
            &format!("select 1::text from {} limit 1", self.quoted()),
            &[],
        )?;
        // SAFETY: as above.
        unsafe { pg_sys::PopActiveSnapshot() };
        Ok(rows.is_empty())
    }

    /// That it has no rows.
    ///
    /// # Errors
    /// 55000 when it has.
    pub fn check_empty(&self) -> Result<(), PgError> {
        if self.is_empty()? {
            return Ok(());
        }
        Err(PgError::new("55000", format!("table \"{}\" already contains rows", self.shown()))
            .with_detail("The initial copy would meet rows that are already here.")
            .with_hint(
                "Run braid.resync_table, which empties it on this node only and copies it, and then braid.enable_subscription. \
                 A TRUNCATE would also empty it on the nodes that subscribe to this one.",
            ))
    }

    /// Remove all rows, as the user that this process works as.
    fn clear(&self) -> Result<(), PgError> {
        // TRUNCATE is refused where foreign keys refer to the table, which are not checked while rows are deleted.
        let referenced = !subscription::rows(
            "select 1::text from pg_catalog.pg_constraint where contype = 'f' and confrelid = $1::oid limit 1",
            &[i64::from(self.oid.to_u32()).into()],
        )?
        .is_empty();
        let command = if referenced {
            "delete from"
        } else {
            "truncate"
        };
        subscription::execute(&format!("{command} {}", self.quoted()), &[])
    }

    /// That the user whom this process works as may insert what COPY writes.
    fn check_rights(&self) -> Result<(), PgError> {
        // SAFETY: in a transaction; the table is there.
        let (allowed, has_policies) = unsafe { user::rights(self.oid, pg_sys::ACL_INSERT) };
        if !allowed {
            return Err(PgError::new(
                "42501",
                format!("permission denied for table {}", self.name),
            )
            .with_hint("Grant INSERT on the table to the role that changes are applied as."));
        }
        // COPY does not look at policies, so it must not be a way around them.
        if has_policies {
            return Err(PgError::new(
                "42501",
                format!(
                    "cannot copy into table \"{}\", whose row-level security applies to its owner",
                    self.shown()
                ),
            )
            .with_hint(
                "Turn FORCE ROW LEVEL SECURITY off, or let the owner bypass row-level security.",
            ));
        }
        Ok(())
    }

    /// Fill the table from the provider. Ends with the process's own user again.
    ///
    /// # Errors
    /// Those of the provider and of COPY; 42703 when a published column is missing here and not left
    /// out.
    pub fn fill(
        &self,
        mut source: Source,
        published: &Published,
        filling: Filling,
        subscription: &Subscription,
        counters: Option<&'static TableEntry>,
        limiter: Limiter,
    ) -> Result<Filled, PgError> {
        let user_id = self.writer(subscription);
        // SAFETY: the table is locked since `lock`; what is opened here is closed here, in the same transaction.
        unsafe {
            let relation = pg_sys::relation_open(self.oid, NO_LOCK);
            let (columns, names) = self.map_columns(relation, published, subscription)?;
            pg_sys::relation_close(relation, NO_LOCK);
            let staging = match filling {
                Filling::Beside if !columns.is_empty() => {
                    Some(self.create_staging(&columns, user_id)?)
                }
                Filling::Beside | Filling::Empty | Filling::Truncate => None,
            };
            let mut user = UserSwitch::default();
            user.work_as(user_id);
            self.check_rights()?;
            if filling == Filling::Truncate {
                self.clear()?;
            }
            source.start(published, &columns)?;
            let feed = Feed {
                source,
                message: None,
                taken: 0,
                ended: false,
                copied: Copied::default(),
                counters,
                limiter,
            };
            FEED.with(|cell| cell.replace(Some(feed)));
            let rows = if columns.is_empty() {
                self.insert_defaults(drain_feed()?)?
            } else {
                let lock = i32::try_from(pg_sys::RowExclusiveLock).unwrap_or(3);
                let relation = pg_sys::relation_open(staging.unwrap_or(self.oid), lock);
                let rows = copy_from(relation, names);
                pg_sys::relation_close(relation, NO_LOCK);
                pg_sys::CommandCounterIncrement();
                if staging.is_some() {
                    self.merge(&columns)?
                } else {
                    rows
                }
            };
            user.restore();
            let feed = FEED
                .with(|cell| cell.take())
                .ok_or_else(|| PgError::new("XX000", "the copy has lost its source"))?;
            let copied = Copied {
                rows,
                bytes: feed.copied.bytes,
            };
            Ok(Filled {
                copied,
                source: feed.source,
                columns,
            })
        }
    }

    /// The user who writes the rows.
    fn writer(&self, subscription: &Subscription) -> pg_sys::Oid {
        if subscription.options.run_as_owner {
            pg_sys::Oid::from(subscription.owner)
        } else {
            self.owner
        }
    }

    /// A place for what is to be merged. Made with this process's own rights, which read no row, for the user who fills it.
    fn create_staging(
        &self,
        columns: &[String],
        user: pg_sys::Oid,
    ) -> Result<pg_sys::Oid, PgError> {
        subscription::execute(
            &format!(
                "create temporary table {STAGING} on commit drop as select {} from {} with no data",
                quoted_list(columns),
                self.quoted()
            ),
            &[],
        )?;
        let found = subscription::rows(
            &format!(
                "select '{STAGING}'::regclass::oid::text, quote_ident(rolname) from pg_roles where oid = $1::oid"
            ),
            &[i64::from(user.to_u32()).into()],
        )?;
        let text = |index: usize| {
            found
                .first()
                .and_then(|row| row.get(index).cloned().flatten())
        };
        let (Some(oid), Some(role)) = (text(0).and_then(|oid| oid.parse::<u32>().ok()), text(1))
        else {
            return Err(PgError::new(
                "42704",
                format!("the owner of table \"{}\" does not exist", self.shown()),
            ));
        };
        subscription::execute(&format!("grant select, insert on {STAGING} to {role}"), &[])?;
        Ok(pg_sys::Oid::from(oid))
    }

    /// Keep whoever writes to the table from it until the transaction ends, and wait for those who are at it.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn lock_out_writers(&self) -> Result<(), PgError> {
        let command = format!("lock table {} in share row exclusive mode", self.quoted());
        subscription::execute(&command, &[])
    }

    /// The tables that hold its rows.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn leaves(&self) -> Result<Vec<u32>, PgError> {
        if !self.partitioned {
            return Ok(vec![self.oid.to_u32()]);
        }
        let found = subscription::rows(
            "select p.relid::oid::text from pg_partition_tree($1::oid::regclass) p, pg_class c \
             where p.isleaf and c.oid = p.relid and c.relkind = 'r'",
            &[i64::from(self.oid.to_u32()).into()],
        )?;
        let oid = |row: Vec<Option<String>>| row.first()?.as_ref()?.parse().ok();
        Ok(found.into_iter().filter_map(oid).collect())
    }

    /// Remove rows of one of the tables that hold them, by their places.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn remove(&self, leaf: u32, places: &[String]) -> Result<(), PgError> {
        if places.is_empty() {
            return Ok(());
        }
        let name = subscription::rows(
            "select quote_ident(nspname) || '.' || quote_ident(relname) from pg_class c \
             join pg_namespace n on n.oid = relnamespace where c.oid = $1::oid",
            &[i64::from(leaf).into()],
        )?;
        let Some(name) = name.first().and_then(|row| row.first()?.clone()) else {
            return Err(gone());
        };
        let mut user = UserSwitch::default();
        user.work_as(self.owner);
        for piece in places.chunks(1000) {
            let places = format!("{{\"{}\"}}", piece.join("\",\""));
            subscription::execute(
                &format!("delete from only {name} where ctid = any ($1::tid[])"),
                &[places.into()],
            )?;
        }
        user.restore();
        Ok(())
    }

    /// Whether it has no key by which rows are found.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn is_keyless(&self) -> Result<bool, PgError> {
        Ok(self.identity()?.is_none())
    }

    /// Merge once more, when rows have left of which there were others. How many came.
    ///
    /// # Errors
    /// Whatever PostgreSQL raises.
    pub fn merge_again(&self, columns: &[String], run_as: Option<u32>) -> Result<u64, PgError> {
        let mut user = UserSwitch::default();
        user.work_as(run_as.map_or(self.owner, pg_sys::Oid::from));
        let rows = self.merge(columns)?;
        user.restore();
        Ok(rows)
    }

    /// That each row that was to be merged is here, or another one of its key. What a further unique key keeps out is not.
    ///
    /// # Errors
    /// 23505 when one is missing.
    pub fn check_all_came(&self) -> Result<(), PgError> {
        let Some(key) = self.identity()? else {
            return Ok(());
        };
        let key: Vec<String> = key
            .iter()
            .map(|name| quote_identifier(name))
            .map(|name| format!("t.{name} = s.{name}"))
            .collect();
        let question = format!(
            "select count(*)::text from {STAGING} s where not exists (select from {}.{} t where {})",
            quote_identifier(&self.namespace),
            quote_identifier(&self.name),
            key.join(" and ")
        );
        let mut user = UserSwitch::default();
        user.work_as(self.owner);
        let found = subscription::rows(&question, &[])?;
        user.restore();
        let missing = found.first().and_then(|row| row.first()?.clone());
        match missing.as_deref() {
            Some("0") => Ok(()),
            missing => Err(PgError::new(
                "23505",
                format!(
                    "rows that are in table \"{}\" here keep {} of the provider's out, by a unique key or an exclusion constraint",
                    self.shown(),
                    missing.unwrap_or("some")
                ),
            )),
        }
    }

    /// The columns of the key that identifies its rows.
    fn identity(&self) -> Result<Option<Vec<String>>, PgError> {
        // SAFETY: the table is locked since `lock`.
        let key = unsafe {
            let relation = pg_sys::relation_open(self.oid, NO_LOCK);
            let key = identity_key(relation);
            pg_sys::relation_close(relation, NO_LOCK);
            key
        };
        let Some(key) = key else {
            return Ok(None);
        };
        let columns: Vec<i16> = key.iter().map(|part| part.attribute).collect();
        let found = subscription::rows(
            "select attname::text from pg_attribute where attrelid = $1::oid and attnum = any ($2::int2[])",
            &[
                i64::from(self.oid.to_u32()).into(),
                format!("{columns:?}")
                    .replace('[', "{")
                    .replace(']', "}")
                    .into(),
            ],
        )?;
        let name = |row: Vec<Option<String>>| row.into_iter().next().flatten();
        Ok(Some(found.into_iter().filter_map(name).collect()))
    }

    /// Inserts rows of which the provider sends no column: all that is known of them is how many there are. To COPY, no list means all columns.
    fn insert_defaults(&self, rows: u64) -> Result<u64, PgError> {
        subscription::execute(
            &format!(
                "insert into {}.{} select from pg_catalog.generate_series(1, $1)",
                quote_identifier(&self.namespace),
                quote_identifier(&self.name)
            ),
            &[i64::try_from(rows).unwrap_or(i64::MAX).into()],
        )?;
        Ok(rows)
    }

    /// Rows whose keys are here already are left to the changes that follow, which made them what they are at the provider.
    fn merge(&self, columns: &[String]) -> Result<u64, PgError> {
        // Rows without columns were not put aside.
        if columns.is_empty() {
            return Ok(0);
        }
        let columns = quoted_list(columns);
        let table = format!(
            "{}.{}",
            quote_identifier(&self.namespace),
            quote_identifier(&self.name)
        );
        subscription::execute_counting(
            &format!(
                "insert into {table} ({columns}) overriding system value select {columns} from {STAGING} \
                 on conflict do nothing"
            ),
            &[],
        )
        .map(|rows| u64::try_from(rows).unwrap_or(0))
    }

    /// The published columns that are filled, and their names here as a List for COPY. Columns that
    /// are generated here are left out. Columns that are missing here are an error, or left out and
    /// written down.
    ///
    /// # Safety
    /// `relation` is open.
    unsafe fn map_columns(
        &self,
        relation: pg_sys::Relation,
        published: &Published,
        subscription: &Subscription,
    ) -> Result<(Vec<String>, *mut pg_sys::List), PgError> {
        // SAFETY: the caller keeps the relation open; the List and its strings are in the current memory context.
        unsafe {
            let descriptor = (*relation).rd_att;
            let mut here = Vec::new();
            for index in 0..usize::try_from((*descriptor).natts).unwrap_or(0) {
                let attribute = compat::TupleDescAttr(descriptor, index);
                if !(*attribute).attisdropped {
                    here.push((from_server((*attribute).attname.data.as_ptr()), attribute));
                }
            }
            let mut columns = Vec::with_capacity(published.columns.len());
            let mut missing = Vec::new();
            let mut names = std::ptr::null_mut();
            for name in &published.columns {
                match here.iter().find(|(known, _)| known == name) {
                    Some((_, attribute)) if (**attribute).attgenerated != 0 => {}
                    Some((_, attribute)) => {
                        let copy = pg_sys::pstrdup((**attribute).attname.data.as_ptr());
                        names = pg_sys::lappend(names, pg_sys::makeString(copy).cast());
                        columns.push(name.clone());
                    }
                    None => missing.push(MissingColumn {
                        name: name.clone(),
                        is_key: published.keys.contains(name),
                    }),
                }
            }
            let ignores = subscription.options.ignores_missing();
            let left_out = missing::left_out(self.oid, &self.shown(), ignores, &missing)?;
            missing::note((subscription.id, None), self.oid, &left_out)?;
            Ok((columns, names))
        }
    }
}

/// Reads the feed to its end. Returns the number of rows.
fn drain_feed() -> Result<u64, PgError> {
    let mut passed_over = vec![0; DRAINED];
    FEED.with(|cell| {
        let mut feed = cell.borrow_mut();
        let Some(feed) = feed.as_mut() else {
            return Ok(0);
        };
        while feed.read(&mut passed_over, 1)? > 0 {
            pgrx::check_for_interrupts!();
        }
        Ok(feed.copied.rows)
    })
}

/// COPY relation (names) FROM the feed. Gives the number of rows.
///
/// # Safety
/// In a transaction with an active snapshot; `relation` is open and locked; `names` is a List of Strings.
unsafe fn copy_from(relation: pg_sys::Relation, names: *mut pg_sys::List) -> u64 {
    let share = i32::try_from(pg_sys::AccessShareLock).unwrap_or(1);
    // SAFETY: as the caller says; everything is allocated in the transaction's memory.
    unsafe {
        let state = pg_sys::make_parsestate(std::ptr::null_mut());
        let _ = pg_sys::addRangeTableEntryForRelation(
            state,
            relation,
            share,
            std::ptr::null_mut(),
            false,
            false,
        );
        let encoding = pg_sys::pstrdup(pg_sys::GetDatabaseEncodingName());
        let option = pg_sys::makeDefElem(
            pg_sys::pstrdup(c"encoding".as_ptr()),
            pg_sys::makeString(encoding).cast(),
            -1,
        );
        let copy = pg_sys::BeginCopyFrom(
            state,
            relation,
            std::ptr::null_mut(),
            std::ptr::null(),
            false,
            Some(read_feed),
            names,
            pg_sys::lappend(std::ptr::null_mut(), option.cast()),
        );
        let rows = pg_sys::CopyFrom(copy);
        pg_sys::EndCopyFrom(copy);
        pg_sys::free_parsestate(state);
        rows
    }
}

/// COPY's data source (src/include/commands/copy.h, `copy_data_source_cb`): at least `minimum` bytes unless the data ends.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn read_feed(out: *mut c_void, minimum: c_int, maximum: c_int) -> c_int {
    let room = usize::try_from(maximum).unwrap_or(0);
    // SAFETY: COPY gives `maximum` bytes of room.
    let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), room) };
    let minimum = usize::try_from(minimum).unwrap_or(0).max(1);
    let read = FEED.with(|cell| match cell.borrow_mut().as_mut() {
        Some(feed) => feed.read(out, minimum),
        None => Ok(0),
    });
    match read {
        Ok(count) => c_int::try_from(count).unwrap_or(0),
        Err(error) => error.raise(),
    }
}

impl Feed {
    /// Fill `out` with what is there; wait only while it has less than `minimum` bytes.
    fn read(&mut self, out: &mut [u8], minimum: usize) -> Result<usize, PgError> {
        let mut filled = 0;
        while let Some(room) = out.get_mut(filled..).filter(|room| !room.is_empty()) {
            if let Some(message) = &self.message {
                let rest = message.get(self.taken..).unwrap_or_default();
                let count = rest.len().min(room.len());
                for (to, from) in room.iter_mut().zip(rest) {
                    *to = *from;
                }
                filled += count;
                self.taken += count;
                if count == rest.len() {
                    self.message = None;
                }
                continue;
            }
            if self.ended {
                break;
            }
            if let Some(pause) = self.limiter.pause() {
                if filled >= minimum {
                    break;
                }
                self.limiter.wait(pause);
                continue;
            }
            let next = match self.source.connection.try_copy_data()? {
                CopyData::Message(message) => Some(message),
                CopyData::Pending if filled >= minimum => break,
                CopyData::Pending => self.source.connection.copy_data()?,
                CopyData::End => None,
            };
            match next {
                Some(message) => self.accept(message),
                None => self.ended = true,
            }
        }
        if let Some(counters) = self.counters {
            counters
                .copy_rows
                .store(self.copied.rows, Ordering::Relaxed);
            counters
                .copy_bytes
                .store(self.copied.bytes, Ordering::Relaxed);
        }
        Ok(filled)
    }

    fn accept(&mut self, message: CopyMessage) {
        // In COPY's text form a line feed inside a value is escaped, so each one ends a row.
        let rows = message.iter().filter(|byte| **byte == b'\n').count();
        let rows = u64::try_from(rows).unwrap_or(0);
        let bytes = u64::try_from(message.len()).unwrap_or(0);
        self.copied.rows += rows;
        self.copied.bytes += bytes;
        self.limiter.take(rows, bytes);
        self.message = Some(message);
        self.taken = 0;
    }
}
