//! Finds the local table to which a relation's changes go, and what it needs first. Run by the
//! leader when the first change of a relation arrives, and again after the local table was altered.
//!
//! `braid_bgworker::membership` decides. This module reads the facts and carries out the verdict,
//! in one transaction. The current transaction is handed out afterwards, so appliers find the
//! outcome in the catalog. If the subscription has to stop, an applier reports it, so that the
//! transaction can be skipped.
//!
//! Not for: tables that are created after the slot, of a publication FOR ALL TABLES
//! (`Reception::adopt_table`).

use braid_bgworker::membership::{self, Here, KnownAs, Successor, Verdict};
use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::array_literal;
use braid_gir::lsn_text;
use braid_node::ddl;
use braid_node::published;
use braid_node::subscription::{self, InitialCopy, execute, execute_counting, rows};
use braid_postgres::catalog::{Rights, with_rights};
use braid_postgres::error::{self, PgError};
use braid_postgres::{names, snapshot};
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

use super::provider::open_beside;
use super::reception::Reception;
use super::{End, out_of_order};
use crate::copy;

/// Number of rows that are read to find out which node filled a table.
const LOOKED_AT: u32 = 1000;

/// A relation of the stream.
struct Relation {
    /// OID at the provider.
    number: u32,
    namespace: String,
    name: String,
    /// Names that it had earlier in this stream.
    former: Vec<(String, String)>,
}

impl Relation {
    fn shown(&self) -> String {
        format!("{}.{}", self.namespace, self.name)
    }
}

/// The state of a relation at the provider.
enum There {
    /// The relation was dropped.
    Gone,
    /// The relation is not published.
    Unpublished,
    /// The relation is published under this name.
    Named(String, String),
}

/// The relation that has the name.
fn look_here(namespace: &str, name: &str) -> Result<(Here, u32), PgError> {
    Ok(found_here(names::find_table(namespace, name)?))
}

/// Looks for a relation that may come under a name from before a statement.
fn look_here_for(id: u32, namespace: &str, name: &str) -> Result<(Here, u32), PgError> {
    match ddl::renamed(id, namespace, name)? {
        Some(oid) => Ok(found_here(Some(oid))),
        None => look_here(namespace, name),
    }
}

fn found_here(found: Option<pg_sys::Oid>) -> (Here, u32) {
    match found {
        None => (Here::Absent, 0),
        Some(oid) if braid_apply::takes_changes(oid) => (Here::Table, oid.to_u32()),
        Some(oid) => (Here::Other, oid.to_u32()),
    }
}

impl Reception {
    fn relation(&self, schema: u32) -> Result<Relation, End> {
        let entry = self.dictionary.get(schema).ok_or_else(out_of_order)?;
        Ok(Relation {
            number: entry.oid,
            namespace: entry.namespace.clone(),
            name: entry.name.clone(),
            former: self.dictionary.former_names(entry),
        })
    }

    /// Whether a relation's table is known to be the subscription's. How its changes are ordered is
    /// looked up along with that, in the transaction that this needs anyway.
    pub(super) fn is_plain_member(&mut self, schema: u32) -> Result<bool, End> {
        let table = self.dictionary.get(schema).ok_or_else(out_of_order)?;
        let (number, namespace, name) = (table.oid, &table.namespace, &table.name);
        let id = self.subscription.id;
        let by_number = self.subscription.options.replicate_ddl && number != 0;
        let (copies, scheduling) = (&self.copies, &mut self.scheduling);
        Ok(error::transaction(|| {
            let (here, oid) = if by_number {
                found_here(ddl::numbered(id, number)?)
            } else {
                look_here_for(id, namespace, name)?
            };
            let is_member =
                here == Here::Table && (by_number || copies.is_member(oid, namespace, name));
            if is_member {
                scheduling.look(schema, pg_sys::Oid::from(oid))?;
            }
            Ok(is_member)
        })?)
    }

    /// Makes sure that the changes of a relation are applied, or are known to be left out, unless
    /// the subscription has to stop at them.
    ///
    /// # Errors
    /// Those of the connection to the provider, and those of reading the catalog.
    pub(super) fn look_at_table(&mut self, schema: u32) -> Result<(), End> {
        if self.is_plain_member(schema)? {
            return self.follow_name(schema);
        }
        if self.subscription.options.replicate_ddl
            && self.identify(schema)?
            && self.is_plain_member(schema)?
        {
            return Ok(());
        }
        let relation = self.relation(schema)?;
        let id = self.subscription.id;
        let all_tables = self.copies.take_all_tables();
        let (name, copy_data) = (
            self.subscription.name.clone(),
            self.subscription.options.copy_data,
        );
        let verdict = self.without_blocking(|| {
            let facts = Facts::read(id, &relation)?;
            let verdict =
                membership::decide(facts.here, facts.known_as, all_tables, facts.successor);
            facts.carry_out(id, &name, &relation, verdict)?;
            Ok(verdict)
        })?;
        match verdict {
            Verdict::Join => self.adopt_table(&relation.namespace, &relation.name)?,
            Verdict::Ask => self.ask_for(&relation, copy_data)?,
            Verdict::Member | Verdict::Stop => {}
            _ => {
                pgrx::log!(
                    "subscription \"{}\": table \"{}\" {}",
                    self.subscription.name,
                    relation.shown(),
                    said(verdict)
                );
            }
        }
        if verdict != Verdict::Member {
            self.copies.rescan(self.entry);
        }
        Ok(())
    }

    /// Handles a relation that had another name before: its earlier changes are finished before
    /// those under the new name arrive, as the tracker distinguishes tables by name. If a statement
    /// has renamed the local table as well, the subscription's table gets the new name now.
    fn follow_name(&mut self, schema: u32) -> Result<(), End> {
        let relation = self.relation(schema)?;
        if relation.former.is_empty() {
            return Ok(());
        }
        self.wait_for_all()?;
        let id = self.subscription.id;
        let is_set = error::transaction(|| match ddl::numbered(id, relation.number)? {
            Some(oid) => set_name(id, oid.to_u32(), &relation),
            None => Ok(false),
        })?;
        if is_set {
            self.copies.rescan(self.entry);
        }
        Ok(())
    }

    /// Finds out which local table takes the changes of a relation, and records the relation's OID
    /// at the provider. Names alone are not enough: each node may have run statements that the
    /// other has not, and two tables may have swapped their names. Returns whether the OID is
    /// recorded.
    fn identify(&mut self, schema: u32) -> Result<bool, End> {
        let relation = self.relation(schema)?;
        let id = self.subscription.id;
        let (since, renames) = error::transaction(|| ddl::renames(id))?;
        if !relation.former.is_empty() || !renames.is_empty() {
            // Appliers find tables by the names that are set below.
            self.wait_for_all()?;
        }
        let Some(there) = ask_for_names(self, &relation, &since, &renames)? else {
            // The provider has dropped the relation.
            return Ok(false);
        };
        let is_noted = self.without_blocking(|| {
            let theirs: Vec<String> = there.former.iter().map(|(id, _)| id.clone()).collect();
            let ahead = ddl::not_run(&theirs)?;
            let before = there.former.iter().find(|(id, _)| ahead.contains(id));
            let (namespace, name) = before.map_or(&there.name, |(_, name)| name);
            let (here, oid) = found_here(ddl::table_without(&there.lacks, namespace, name)?);
            if here != Here::Table {
                return Ok(false);
            }
            let known = rows(
                "select (n.nspname = $3::name and c.relname = $4::name)::text, \
                 exists (select from braid.former_table f where f.relation = c.oid)::text \
                 from braid.subscription_table t join pg_catalog.pg_class c on c.oid = t.relation::oid \
                 join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
                 where t.subscription_id = $1 and t.relation = $2::oid",
                &key_of(id, oid, &relation),
            )?;
            let Some(row) = known.first() else {
                return Ok(false);
            };
            let is = |place: usize| row.get(place).and_then(Option::as_deref) == Some("true");
            let (has_name, was_renamed) = (is(0), is(1));
            if !has_name && !was_renamed && before.is_none() {
                // A statement that was not replicated has renamed it.
                return Ok(false);
            }
            if was_renamed {
                set_name(id, oid, &relation)?;
            }
            execute(
                "update braid.subscription_table set provider_relation = case when relation = $2::oid then $3::oid end \
                 where subscription_id = $1 and (relation = $2::oid or provider_relation = $3::oid)",
                &[
                    i64::from(id).into(),
                    i64::from(oid).into(),
                    i64::from(relation.number).into(),
                ],
            )?;
            Ok(true)
        })?;
        if is_noted {
            self.copies.rescan(self.entry);
        }
        Ok(is_noted)
    }

    /// Why the rows of a table are not passed over that has another name at the provider by now.
    fn has_other_name(
        &self,
        relation: &Relation,
        namespace: &str,
        name: &str,
    ) -> Result<PgError, PgError> {
        let error = PgError::new(
            SqlState::UndefinedTable,
            format!("table \"{}\" does not exist here", relation.shown()),
        )
        .with_detail(format!(
            "At the provider its name is \"{namespace}.{name}\" by now."
        ));
        let subscription = quote_literal(&self.subscription.name);
        let found = error::transaction(|| {
            rows(
                "select quote_ident(n.nspname) || '.' || quote_ident(c.relname), \
                 exists (select from pg_catalog.pg_index i where i.indrelid = c.oid and i.indisprimary)::text \
                 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
                 where n.nspname = $1 and c.relname = $2 and c.relkind in ('r', 'p')",
                &[namespace.into(), name.into()],
            )
        })?;
        let cell = |place: usize| {
            found
                .first()
                .and_then(|row| row.get(place).cloned().flatten())
        };
        let (here, is_keyed) = (cell(0).map(|here| quote_literal(&here)), cell(1));
        let create = |name: &str| format!("Create table {name} as it is at the provider");
        Ok(error.with_hint(match here {
            // Two nodes that copy a table from each other would wait for each other.
            Some(here) if is_keyed.as_deref() == Some("true") => format!(
                "{}, and run braid.enable_subscription({subscription}). Once it streams, run braid.compare({subscription}, {here}) and \
                 braid.repair({subscription}, {here}, side => 'provider').",
                create(&relation.shown())
            ),
            Some(here) => format!(
                "Run braid.refresh_subscription({subscription}, copy_data => false), braid.resync_table({subscription}, {here}) and then \
                 braid.enable_subscription({subscription})."
            ),
            None => format!(
                "{}, then run braid.refresh_subscription({subscription}) and braid.enable_subscription({subscription}).",
                create(&format!("{namespace}.{name}"))
            ),
        }))
    }

    /// Handles a relation without a local table of its name. If the provider does not have or
    /// publish it any more, its changes are left out.
    fn ask_for(&mut self, relation: &Relation, copy_data: bool) -> Result<(), End> {
        let id = self.subscription.id;
        let names = (&*relation.namespace, &*relation.name);
        let left_out = || subscription::is_left_out(id, names.0, names.1, relation.number);
        if error::transaction(left_out)? {
            return Ok(());
        }
        self.hand_out();
        let reason = match ask(self, relation)? {
            There::Gone => "gone",
            There::Unpublished => "not published",
            There::Named(namespace, name) if (&*namespace, &*name) != names => {
                let position = self
                    .in_hand
                    .as_ref()
                    .map_or(0, |in_hand| in_hand.begin_commit_lsn);
                let comes = self.without_blocking(|| {
                    comes_renamed(id, (&namespace, &name), position, copy_data)
                })?;
                // A subscription that parks failing transactions need not stop.
                if !comes && self.subscription.options.parks() {
                    return Ok(());
                }
                if !comes {
                    let error = self.has_other_name(relation, &namespace, &name)?;
                    return Err(End::Permanent(error, position));
                }
                "renamed"
            }
            There::Named(..) => return Ok(()),
        };
        error::transaction(|| subscription::leave_out(id, names, Some(relation.number), reason))?;
        pgrx::log!(
            "subscription \"{}\" skips changes of table \"{}\", which does not exist here: at the provider it is {reason}",
            self.subscription.name,
            relation.shown()
        );
        Ok(())
    }
}

/// Handles a table that was renamed at the provider and is missing locally under the former name.
/// Returns whether its rows, as of the commit at `position`, arrive with a copy of the table of the
/// new name.
fn comes_renamed(
    id: u32,
    (namespace, name): (&str, &str),
    position: u64,
    copy_data: bool,
) -> Result<bool, PgError> {
    if subscription::has_table(id, namespace, name)? {
        let copied = rows(
            "select 1::text from braid.subscription_table where subscription_id = $1 and schema_name = $2 and table_name = $3 \
             and not unless_filled and (state <> 'ready' or copy_lsn > $4::pg_lsn)",
            &[
                i64::from(id).into(),
                namespace.into(),
                name.into(),
                lsn_text(position).into(),
            ],
        )?;
        return Ok(!copied.is_empty());
    }
    Ok(copy_data
        && subscription::is_empty(namespace, name)?
        && subscription::add_table(id, namespace, name, InitialCopy::Yes)?)
}

/// Asks the provider for the state of a relation.
fn ask(reception: &Reception, relation: &Relation) -> Result<There, End> {
    let subscription = &reception.subscription;
    let mut connection = open_beside(&reception.connection, subscription)?;
    let publishes = published::of_table(&subscription.options.publications);
    let found = connection.query(&format!(
        "SELECT n.nspname, c.relname, EXISTS {publishes} \
         FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = {}",
        relation.number
    ))?;
    let (Some(namespace), Some(name)) = (found.get(0, 0), found.get(0, 1)) else {
        return Ok(There::Gone);
    };
    if found.get(0, 2) != Some("t") {
        return Ok(There::Unpublished);
    }
    Ok(There::Named(namespace.to_owned(), name.to_owned()))
}

/// Name of a table, with its schema.
type QualifiedName = (String, String);

/// The names that a relation has had at the provider.
struct NamesThere {
    /// The one that it has now.
    name: QualifiedName,
    /// Statements of this node that the provider has not run.
    lacks: Vec<String>,
    /// Statements that have renamed it at the provider, the oldest first, with the former names.
    former: Vec<(String, QualifiedName)>,
}

/// Asks the provider for the names of a relation since a time, in seconds since 1970, and which of
/// these statements it has not run. `None` if the relation is gone.
fn ask_for_names(
    reception: &Reception,
    relation: &Relation,
    since: &str,
    statements: &[String],
) -> Result<Option<NamesThere>, End> {
    let subscription = &reception.subscription;
    let mut connection = open_beside(&reception.connection, subscription)?;
    // All as of one snapshot: a statement and the name that it gives are seen together.
    let found = connection.query(&format!(
        "SELECT n.nspname, c.relname, pg_catalog.array_to_string(ARRAY(SELECT s FROM pg_catalog.unnest({}::uuid[]) s \
           WHERE NOT EXISTS (SELECT FROM braid.former_table o WHERE o.ddl_id = s) \
           AND NOT EXISTS (SELECT FROM braid.ddl_log l WHERE l.ddl_id = s AND l.state <> 'failed')), ','), \
           f.ddl_id, f.schema_name, f.table_name \
         FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         LEFT JOIN braid.former_table f ON f.relation = c.oid AND f.recorded_at > pg_catalog.to_timestamp({}) WHERE c.oid = {} ORDER BY f.recorded_at",
        quote_literal(&array_literal(statements)),
        quote_literal(since),
        relation.number
    ))?;
    let text = |row, column| found.get(row, column).unwrap_or_default().to_owned();
    if found.get(0, 0).is_none() {
        return Ok(None);
    }
    let former = (0..found.len())
        .filter(|row| found.get(*row, 3).is_some())
        .map(|row| (text(row, 3), (text(row, 4), text(row, 5))));
    let lacks = text(0, 2);
    let lacks = lacks.split(',').filter(|id| !id.is_empty());
    Ok(Some(NamesThere {
        name: (text(0, 0), text(0, 1)),
        lacks: lacks.map(str::to_owned).collect(),
        former: former.collect(),
    }))
}

/// Parameters: a subscription, a local table, and a relation's name.
fn key_of<'a>(id: u32, oid: u32, relation: &'a Relation) -> [DatumWithOid<'a>; 4] {
    [
        i64::from(id).into(),
        i64::from(oid).into(),
        (&*relation.namespace).into(),
        (&*relation.name).into(),
    ]
}

/// Stores the relation's name for a table of the subscription, if a statement has renamed the local
/// table. Another table that has the name gets this one's: if two tables have swapped their names,
/// neither leaves the subscription. Returns whether anything has changed. In a transaction.
fn set_name(id: u32, oid: u32, relation: &Relation) -> Result<bool, PgError> {
    let changed = execute_counting(
        "update braid.subscription_table t set \
           schema_name = case when t.relation = $2::oid then $3::name else o.schema_name end, \
           table_name = case when t.relation = $2::oid then $4::name else o.table_name end \
         from braid.subscription_table o \
         where o.subscription_id = $1 and o.relation = $2::oid and (o.schema_name, o.table_name) <> ($3::name, $4::name) \
           and exists (select from braid.former_table f where f.relation = o.relation::oid) \
           and t.subscription_id = $1 and (t.relation = $2::oid or (t.schema_name = $3::name and t.table_name = $4::name))",
        &key_of(id, oid, relation),
    )?;
    Ok(changed > 0)
}

/// Facts in this database about a relation.
struct Facts {
    here: Here,
    oid: u32,
    known_as: KnownAs,
    successor: Option<Successor>,
    /// When the table got its name, if that is known.
    named_at: Option<String>,
    /// The quoted name.
    quoted: String,
}

impl Facts {
    fn read(id: u32, relation: &Relation) -> Result<Self, PgError> {
        let (here, oid) = look_here_for(id, &relation.namespace, &relation.name)?;
        let found = rows(
            "select (relation = $2::oid)::text, (schema_name = $3 and table_name = $4)::text, state, schema_name::text, table_name::text \
             from braid.subscription_table \
             where subscription_id = $1 and (relation = $2::oid or (schema_name = $3 and table_name = $4))",
            &[
                i64::from(id).into(),
                i64::from(oid).into(),
                (&*relation.namespace).into(),
                (&*relation.name).into(),
            ],
        )?;
        let mut facts = Self {
            here,
            oid,
            known_as: KnownAs::Unknown,
            successor: None,
            named_at: None,
            quoted: String::new(),
        };
        let mut former = None;
        for row in found {
            let cell = |place: usize| row.get(place).and_then(Option::as_deref);
            match (cell(0) == Some("true"), cell(1) == Some("true")) {
                (true, true) => facts.known_as = KnownAs::ThisName,
                (true, false) => {
                    let names = (
                        cell(3).unwrap_or_default().to_owned(),
                        cell(4).unwrap_or_default().to_owned(),
                    );
                    let renamed_there = relation.former.contains(&names);
                    facts.known_as = KnownAs::OtherName { renamed_there };
                }
                (false, _) => former = Some(cell(2) == Some("ready")),
            }
        }
        if here == Here::Table
            && facts.known_as != KnownAs::ThisName
            && let Some(was_ready) = former
        {
            facts.look_at_successor(id, was_ready)?;
        }
        Ok(facts)
    }

    /// Finds out whether a successor table has the rows of the former one.
    fn look_at_successor(&mut self, id: u32, was_ready: bool) -> Result<(), PgError> {
        let (is_empty, is_keyless) = copy::look_into(self.oid)?;
        // The row of a system column is never updated; the row of the row type is, when the table
        // is renamed.
        let made = rows(
            "select a.xmin::text, y.xmin::text, \
             case when y.xmin::text::bigint >= 3 then pg_catalog.pg_xact_commit_timestamp(y.xmin)::text end, \
             quote_ident(n.nspname) || '.' || quote_ident(c.relname) \
             from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
             join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = -1 \
             join pg_catalog.pg_type y on y.oid = c.reltype where c.oid = $1::oid",
            &[i64::from(self.oid).into()],
        )?;
        let cell = |place: usize| {
            made.first()
                .and_then(|row| row.get(place).cloned().flatten())
        };
        let made_by = cell(0);
        let made_with_name = made_by.is_some() && made_by == cell(1);
        let filled_when_made = match (&made_by, cell(3)) {
            (Some(xid), Some(name)) if made_with_name && !is_empty => {
                // The snapshot of the transaction is older than the lock.
                let question = format!(
                    "select 1::text from (select xmin as writer from {name} limit {LOOKED_AT}) r where writer = {}::xid limit 1",
                    quote_literal(xid)
                );
                let owner = Rights::OwnerOf(self.oid.into());
                let found = snapshot::latest(|| with_rights(owner, || rows(&question, &[])))?;
                !found.is_empty()
            }
            _ => false,
        };
        self.named_at = cell(2);
        self.quoted = cell(3).unwrap_or_default();
        self.successor = Some(Successor {
            was_ready,
            is_empty,
            made_with_name,
            filled_when_made,
            is_keyed: !is_keyless,
            others_write: copy::others_write(id)?,
        });
        Ok(())
    }

    /// Write a verdict down, in the transaction that has read the facts.
    fn carry_out(
        &self,
        id: u32,
        subscription: &str,
        relation: &Relation,
        verdict: Verdict,
    ) -> Result<(), PgError> {
        let key = || {
            [
                i64::from(id).into(),
                i64::from(self.oid).into(),
                (&*relation.namespace).into(),
                (&*relation.name).into(),
            ]
        };
        match verdict {
            Verdict::Member | Verdict::Join | Verdict::Ask => Ok(()),
            Verdict::LeaveOut => {
                let names = (&*relation.namespace, &*relation.name);
                subscription::leave_out(id, names, None, "not refreshed")
            }
            Verdict::Rename => {
                // Where the names of two tables were exchanged, the other one has this one's former
                // name.
                execute(
                    "update braid.subscription_table t set schema_name = n.nspname, table_name = c.relname \
                     from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
                     where c.oid = t.relation::oid and t.subscription_id = $1 and t.relation <> $2::oid \
                     and t.schema_name = $3 and t.table_name = $4",
                    &key(),
                )?;
                execute(
                    "delete from braid.subscription_table where subscription_id = $1 and relation <> $2::oid \
                     and schema_name = $3 and table_name = $4",
                    &key(),
                )?;
                execute(
                    "update braid.subscription_table set schema_name = $3, table_name = $4, replaced_by = null \
                     where subscription_id = $1 and relation = $2::oid",
                    &key(),
                )
            }
            Verdict::CarryOn => {
                execute(
                    "update braid.copied_position p set relation = $2::oid from braid.subscription_table t \
                     where t.subscription_id = $1 and t.schema_name = $3 and t.table_name = $4 and p.relation = t.relation::oid",
                    &key(),
                )?;
                execute(
                    "update braid.subscription_table set relation = $2::oid, replaced_by = null, copy_error = null, copy_error_sqlstate = null, \
                     copy_error_detail = null, copy_error_hint = null, copy_error_context = null \
                     where subscription_id = $1 and schema_name = $3 and table_name = $4",
                    &key(),
                )
            }
            Verdict::Copy { unless_filled } => {
                // The table was empty when it got its name: rows that this node has written since
                // then stay.
                let is_empty = self.successor.is_some_and(|table| table.is_empty);
                let since = self.named_at.as_deref().filter(|_| !is_empty);
                let [subscription, oid, namespace, name] = key();
                execute(
                    "delete from braid.subscription_table where subscription_id = $1 and relation = $2::oid",
                    &[i64::from(id).into(), i64::from(self.oid).into()],
                )?;
                execute(
                    "update braid.subscription_table set relation = $2::oid, state = 'waiting', copy_lsn = null, copy_snapshot = null, \
                     copy_began_at = case when not $6 then coalesce($5::timestamptz, clock_timestamp()) end, rows_copied = null, bytes_copied = null, \
                     rows_total = null, bytes_total = null, truncate_first = false, unless_filled = $6, made_anew = not $6, copy_error = null, copy_error_sqlstate = null, \
                     copy_error_detail = null, copy_error_hint = null, copy_error_context = null, ready_at = null, replaced_by = null \
                     where subscription_id = $1 and schema_name = $3 and table_name = $4",
                    &[
                        subscription,
                        oid,
                        namespace,
                        name,
                        since.into(),
                        unless_filled.into(),
                    ],
                )
            }
            Verdict::Stop => self.stop(subscription, relation, key()),
        }
    }

    /// Has the copy of the table stop with what to do. `key`: the subscription's number, the
    /// table's OID, and its schema and name.
    fn stop(
        &self,
        subscription: &str,
        relation: &Relation,
        key: [DatumWithOid<'_>; 4],
    ) -> Result<(), PgError> {
        if self.here != Here::Table {
            return Ok(());
        }
        let [number, oid, namespace, name] = key;
        let table = quote_literal(&self.quoted);
        let subscription = quote_literal(subscription);
        let message = format!(
            "table \"{}\" has taken the place of another one and may lack rows of the provider",
            relation.shown()
        );
        // Two nodes that copy a table from each other would wait for each other.
        let hint = if self.successor.is_some_and(|table| table.is_keyed) {
            format!(
                "Run braid.refresh_subscription({subscription}, copy_data => false) and braid.enable_subscription({subscription}). Once it \
                 streams, run braid.compare({subscription}, {table}) and braid.repair({subscription}, {table}, side => 'provider')."
            )
        } else {
            format!(
                "Run braid.refresh_subscription({subscription}, copy_data => false), braid.resync_table({subscription}, {table}) and then \
                 braid.enable_subscription({subscription})."
            )
        };
        execute(
            "update braid.subscription_table set replaced_by = $2::oid, copy_error = $5, copy_error_sqlstate = $7, copy_error_detail = null, \
             copy_error_hint = $6, copy_error_context = null where subscription_id = $1 and schema_name = $3 and table_name = $4",
            &[
                number,
                oid,
                namespace,
                name,
                message.into(),
                hint.into(),
                SqlState::ObjectNotInPrerequisiteState
                    .to_string()
                    .as_str()
                    .into(),
            ],
        )
    }
}

fn said(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Rename => "is known under its new name",
        Verdict::LeaveOut => "is left out until braid.refresh_subscription brings it in",
        Verdict::CarryOn => "was rebuilt here; its changes are applied to the new table",
        Verdict::Copy { .. } => "was made anew here and is copied",
        Verdict::Member | Verdict::Join | Verdict::Stop | Verdict::Ask => "is known",
    }
}
