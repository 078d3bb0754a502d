//! This side of a copy: the table is checked and filled by PostgreSQL's own COPY. Run by the copy
//! workers, in the transaction that also makes the table ready.

use std::ffi::CString;

use braid_apply::missing::{self, MissingColumn};
use braid_apply::user::UserSwitch;
use braid_bgworker::copy_query::Published;
use braid_bgworker::key_columns::{self, KeyColumn};
use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_bgworker::sqlstate::SqlState;
use braid_node::rate_limit::Limiter;
use braid_node::registry::TableEntry;
use braid_node::subscription::{self, Subscription};
use braid_postgres::catalog::{Rights, with_rights};
use braid_postgres::copy_from::copy_from;
use braid_postgres::error::PgError;
use braid_postgres::lock::LockMode;
use braid_postgres::relation::Relation;
use braid_postgres::subtransaction::attempt;
use braid_postgres::{catalog, snapshot, transaction};
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use super::feed::{self, Copied};
use super::source::Source;

/// The table where copied rows wait until they are merged with the local ones.
const STAGING: &str = "pg_temp.braid_copied";
/// Time limit of a wait for sessions that have locked rows.
const LOCKERS_TIMEOUT: &str = "2s";
/// A local table, locked.
#[derive(Debug)]
pub struct Target {
    oid: pg_sys::Oid,
    /// The table's schema.
    pub namespace: String,
    /// The table's name.
    pub name: String,
    owner: pg_sys::Oid,
    partitioned: bool,
}

/// Why a table is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To find out that it is empty while nobody writes.
    CheckEmpty,
    /// To copy into it while others may write.
    Fill,
    /// To empty it first.
    Truncate,
}

/// The contents of the table that is to be filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filling {
    /// No rows. If other sessions write rows with equal keys meanwhile, that is an error.
    Empty,
    /// Rows that are removed first.
    Truncate,
    /// Rows that were written on this node since the first attempt, and stay.
    Beside,
}

/// The result of filling a table.
pub struct Filled {
    /// Number of rows and bytes.
    pub copied: Copied,
    /// The source that was passed in, its transaction still open.
    pub source: Source,
    /// The columns that were filled.
    pub columns: Vec<String>,
}

fn quoted_list(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| quote_identifier(name)).collect();
    quoted.join(", ")
}

/// Runs a statement, and returns how many rows it has written.
fn counted(sql: &str, arguments: &[DatumWithOid<'_>]) -> Result<u64, PgError> {
    subscription::execute_counting(sql, arguments).map(|rows| u64::try_from(rows).unwrap_or(0))
}

/// Returns `None`, with nothing written, if a constraint keeps a row out.
fn unless_kept_out(insert: impl FnOnce() -> Result<u64, PgError>) -> Result<Option<u64>, PgError> {
    match attempt(|| insert().map(|rows| (rows, true))) {
        Ok(rows) => Ok(Some(rows)),
        Err(failure)
            if [SqlState::UniqueViolation, SqlState::ExclusionViolation]
                .contains(&failure.sqlstate) =>
        {
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

fn gone() -> PgError {
    PgError::new(SqlState::UndefinedTable, "a table of the subscription does not exist any more").with_hint(
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
            Purpose::CheckEmpty => LockMode::Share,
            Purpose::Fill => LockMode::RowExclusive,
            Purpose::Truncate => LockMode::AccessExclusive,
        };
        let relation = Relation::try_open(oid, mode).ok_or_else(gone)?;
        let target = Self {
            oid,
            namespace: relation.namespace().ok_or_else(gone)?,
            name: relation.name(),
            owner: relation.owner(),
            partitioned: relation.is_partitioned(),
        };
        // COPY itself would write to a foreign partition, where no change is applied.
        braid_apply::check_target(&relation)?;
        Ok(target)
    }

    /// The table's OID.
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
    /// Those of PostgreSQL.
    pub fn is_empty(&self) -> Result<bool, PgError> {
        // The transaction's first snapshot is older than the lock.
        let question = format!("select 1::text from {} limit 1", self.quoted());
        let owner = Rights::OwnerOf(self.oid);
        let rows =
            snapshot::of_transaction(|| with_rights(owner, || subscription::rows(&question, &[])))?;
        Ok(rows.is_empty())
    }

    /// Checks that the table has no rows.
    ///
    /// # Errors
    /// 55000 if it has.
    pub fn check_empty(&self) -> Result<(), PgError> {
        if self.is_empty()? {
            return Ok(());
        }
        Err(PgError::new(SqlState::ObjectNotInPrerequisiteState, format!("table \"{}\" already contains rows", self.shown()))
            .with_detail("The initial copy would conflict with existing rows.")
            .with_hint(
                "Run braid.resync_table, which empties it on this node only and copies it, and then braid.enable_subscription. \
                 A TRUNCATE would also empty it on the nodes that subscribe to this one.",
            ))
    }

    /// Remove all rows, as the user that this process works as.
    fn clear(&self) -> Result<(), PgError> {
        // TRUNCATE is refused where foreign keys refer to the table, which are not checked while
        // rows are deleted.
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

    /// Checks that this process's current user may insert what COPY writes.
    fn check_rights(&self) -> Result<(), PgError> {
        let table = Relation::open(self.oid, LockMode::None);
        let (allowed, has_policies) = braid_apply::may_insert(&table);
        if !allowed {
            return Err(PgError::new(
                SqlState::InsufficientPrivilege,
                format!("permission denied for table {}", self.name),
            )
            .with_hint("Grant INSERT on the table to the role that changes are applied as."));
        }
        // COPY does not look at policies, so it must not be a way around them.
        if has_policies {
            return Err(PgError::new(
                SqlState::InsufficientPrivilege,
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
    /// Those of the provider and of COPY; 42703 if a published column does not exist locally and is
    /// not left out.
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
        let (columns, names) = self.map_columns(published, subscription)?;
        let staging = match filling {
            Filling::Beside if !columns.is_empty() => Some(self.create_staging(&columns, user_id)?),
            Filling::Beside | Filling::Empty | Filling::Truncate => None,
        };
        let mut user = UserSwitch::default();
        user.work_as(user_id);
        self.check_rights()?;
        if filling == Filling::Truncate {
            self.clear()?;
        }
        source.start(published, &columns)?;
        feed::open(source, counters, limiter);
        let rows = if columns.is_empty() {
            self.insert_defaults(feed::drain()?)?
        } else {
            let into = staging.unwrap_or(self.oid);
            let rows = copy_from(
                &Relation::open(into, LockMode::RowExclusive),
                &names,
                feed::read,
            );
            transaction::next_command();
            if staging.is_some() {
                self.merge(&columns)?
            } else {
                rows
            }
        };
        user.restore();
        let (mut source, came) = feed::close()
            .ok_or_else(|| PgError::new(SqlState::InternalError, "the copy has lost its source"))?;
        source.finish()?;
        let copied = Copied {
            rows,
            bytes: came.bytes,
        };
        Ok(Filled {
            copied,
            source,
            columns,
        })
    }

    /// The role that writes the rows.
    fn writer(&self, subscription: &Subscription) -> pg_sys::Oid {
        if subscription.options.run_as_owner {
            pg_sys::Oid::from(subscription.owner)
        } else {
            self.owner
        }
    }

    /// Creates the staging table for rows that are to be merged. It is created with this process's
    /// own rights, which read no row, for the role that fills it.
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
                SqlState::UndefinedObject,
                format!("the owner of table \"{}\" does not exist", self.shown()),
            ));
        };
        subscription::execute(&format!("grant select, insert on {STAGING} to {role}"), &[])?;
        Ok(pg_sys::Oid::from(oid))
    }

    /// Locks writers out of the table until the transaction ends, and waits for the current ones.
    ///
    /// # Errors
    /// Those of PostgreSQL.
    pub fn lock_out_writers(&self) -> Result<(), PgError> {
        let command = format!("lock table {} in share row exclusive mode", self.quoted());
        subscription::execute(&command, &[])
    }

    /// Locks writers out of the table, and sessions that lock rows. The check of a foreign key
    /// waits before it looks, so it does not see a row disappear and reappear. Other sessions wait
    /// behind this lock, so it is not waited for longer than two seconds.
    ///
    /// # Errors
    /// 55P03 if a transaction does not end in time; those of PostgreSQL.
    pub fn lock_out_lockers(&self) -> Result<(), PgError> {
        let command = format!("lock table {} in exclusive mode", self.quoted());
        catalog::with_settings(&[("lock_timeout", LOCKERS_TIMEOUT)], || {
            subscription::execute(&command, &[])
        })
    }

    /// The tables that hold its rows.
    ///
    /// # Errors
    /// Those of PostgreSQL.
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
    /// Those of PostgreSQL.
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
    /// Those of PostgreSQL.
    pub fn is_keyless(&self) -> Result<bool, PgError> {
        Ok(self.identity()?.is_none())
    }

    /// Merges once more, after blocking rows were removed. Returns the number of rows added.
    ///
    /// # Errors
    /// Those of PostgreSQL.
    pub fn merge_again(&self, columns: &[String], run_as: Option<u32>) -> Result<u64, PgError> {
        let mut user = UserSwitch::default();
        user.work_as(run_as.map_or(self.owner, pg_sys::Oid::from));
        let rows = self.merge(columns)?;
        user.restore();
        Ok(rows)
    }

    /// Returns the keys of rows that were to be merged and are not in the local table: names and
    /// values of their columns. At most `most` + 1 of them.
    ///
    /// # Errors
    /// Those of PostgreSQL.
    pub fn missing_keys(&self, most: usize) -> Result<Vec<Vec<(String, String)>>, PgError> {
        let Some(names) = self.identity()? else {
            return Ok(Vec::new());
        };
        let texts: Vec<String> = names
            .iter()
            .map(|name| format!("pg_catalog.concat(s.{})", quote_identifier(name)))
            .collect();
        let question = format!(
            "select {} from {STAGING} s where not exists (select from {}.{} t where {}) limit {}",
            texts.join(", "),
            quote_identifier(&self.namespace),
            quote_identifier(&self.name),
            self.is_same_key(&names)?,
            most.saturating_add(1)
        );
        let mut user = UserSwitch::default();
        user.work_as(self.owner);
        let found = subscription::rows(&question, &[])?;
        user.restore();
        let key = |row: Vec<Option<String>>| {
            let values = row.into_iter().map(Option::unwrap_or_default);
            names.iter().cloned().zip(values).collect()
        };
        Ok(found.into_iter().map(key).collect())
    }

    /// Returns an error that counts the rows that were to be merged and that a further unique key
    /// keeps out: neither they nor other rows of their keys are in the table. `None` if there are
    /// none.
    ///
    /// # Errors
    /// Those of PostgreSQL.
    pub fn rows_kept_out(&self) -> Result<Option<PgError>, PgError> {
        let Some(names) = self.identity()? else {
            return Ok(None);
        };
        let question = format!(
            "select count(*)::text from {STAGING} s where not exists (select from {}.{} t where {})",
            quote_identifier(&self.namespace),
            quote_identifier(&self.name),
            self.is_same_key(&names)?
        );
        let mut user = UserSwitch::default();
        user.work_as(self.owner);
        let found = subscription::rows(&question, &[])?;
        user.restore();
        let missing = found.first().and_then(|row| row.first()?.clone());
        Ok(match missing.as_deref() {
            Some("0") => None,
            missing => Some(PgError::new(
                SqlState::UniqueViolation,
                format!(
                    "rows in table \"{}\" conflict with {} of the provider's rows under a unique key or an exclusion constraint",
                    self.shown(),
                    missing.unwrap_or("some")
                ),
            )),
        })
    }

    /// Returns the condition that a row `t` of the table has the key of a row `s` that was to be
    /// merged.
    fn is_same_key(&self, names: &[String]) -> Result<String, PgError> {
        let quoted: Vec<String> = names.iter().map(|name| quote_literal(name)).collect();
        let query = key_columns::query("$1::oid", &format!("array[{}]::text[]", quoted.join(", ")));
        let found = subscription::rows(&query, &[i64::from(self.oid.to_u32()).into()])?;
        let columns = found
            .iter()
            .filter_map(|row| KeyColumn::read(|place| row.get(place)?.as_deref()));
        let equal: Vec<String> = columns
            .filter(|column| names.contains(&column.name))
            .map(|column| {
                let name = quote_identifier(&column.name);
                column.equals_column(&format!("t.{name}"), &format!("s.{name}"))
            })
            .collect();
        Ok(equal.join(" and "))
    }

    /// The columns of the key that identifies its rows.
    fn identity(&self) -> Result<Option<Vec<String>>, PgError> {
        let Some(key) = braid_apply::key_of(&Relation::open(self.oid, LockMode::None)) else {
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

    /// Inserts rows of which the provider sends no column: all that is known of them is how many
    /// there are. To COPY, no list means all columns.
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

    /// Rows whose keys exist locally already are left to the changes that follow: these have made
    /// the rows what they are at the provider.
    fn merge(&self, columns: &[String]) -> Result<u64, PgError> {
        // Rows without columns were not staged.
        if columns.is_empty() {
            return Ok(0);
        }
        let columns = quoted_list(columns);
        let table = format!(
            "{}.{}",
            quote_identifier(&self.namespace),
            quote_identifier(&self.name)
        );
        let insert = format!(
            "insert into {table} ({columns}) overriding system value select {columns} from {STAGING} s"
        );
        if self.has_rules()? {
            return self.merge_past_rules(&table, &insert);
        }
        counted(&format!("{insert} on conflict do nothing"), &[])
    }

    /// Whether the table has rules for INSERT or UPDATE, enabled or not. PostgreSQL refuses ON
    /// CONFLICT then.
    fn has_rules(&self) -> Result<bool, PgError> {
        let found = subscription::rows(
            "select 1::text from pg_catalog.pg_rewrite where ev_class = $1::oid limit 1",
            &[i64::from(self.oid.to_u32()).into()],
        )?;
        Ok(!found.is_empty())
    }

    /// Merges without ON CONFLICT: all rows whose key is not here at once. If a further constraint
    /// keeps one of them out, each by itself.
    fn merge_past_rules(&self, table: &str, insert: &str) -> Result<u64, PgError> {
        let absent = match self.identity()? {
            Some(names) => format!(
                "not exists (select from {table} t where {})",
                self.is_same_key(&names)?
            ),
            None => "true".to_owned(),
        };
        let insert = format!("{insert} where {absent}");
        if let Some(rows) = unless_kept_out(|| counted(&insert, &[]))? {
            return Ok(rows);
        }
        let places = subscription::rows(
            &format!("select ctid::text from {STAGING} s where {absent}"),
            &[],
        )?;
        let one = format!("{insert} and s.ctid = $1::tid");
        let mut rows = 0_u64;
        for place in places.into_iter().flatten().flatten() {
            pgrx::check_for_interrupts!();
            let came = unless_kept_out(|| counted(&one, &[place.as_str().into()]))?;
            rows = rows.saturating_add(came.unwrap_or(0));
        }
        Ok(rows)
    }

    /// Returns the published columns that are filled, and their local names in the server's
    /// encoding, for COPY. Columns that are generated locally are left out. Columns that do not
    /// exist locally are an error, or are left out and recorded.
    fn map_columns(
        &self,
        published: &Published,
        subscription: &Subscription,
    ) -> Result<(Vec<String>, Vec<CString>), PgError> {
        let here = Relation::open(self.oid, LockMode::None).columns();
        let mut columns = Vec::with_capacity(published.columns.len());
        let mut names = Vec::with_capacity(published.columns.len());
        let mut missing = Vec::new();
        for name in &published.columns {
            match here.iter().find(|column| column.name == *name) {
                Some(column) if column.is_generated => {}
                Some(column) => {
                    names.push(column.raw_name.clone());
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
