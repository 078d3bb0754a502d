//! Finds the local table of a relation of the stream. Run by the appliers.
//!
//! A table belongs to a subscription by its name. If another table gets the name, the leader
//! decides what follows (`workers/leader/membership.rs`) before it hands out a transaction. An
//! applier that finds such a table earlier makes the leader look at it.
//!
//! Invariant: changes are only left out if `braid.left_out_table` has their relation, never because
//! something is not known.

use std::ffi::CString;
use std::ops::ControlFlow;
use std::rc::Rc;

use braid_bgworker::copied_position::CopiedPosition;
use braid_bgworker::provider_snapshot::ProviderSnapshot;
use braid_bgworker::sqlstate::SqlState;
use braid_gir::Operation;
use braid_node::{ddl, subscription};
use braid_postgres::error::PgError;
use braid_postgres::names::{self, own_table};
use braid_postgres::syscache::with_ancestors;
use braid_postgres::table_scan::{self, Is, Sees, low};
use braid_postgres::{encoding, kept_plan, snapshot};
use pgrx::pg_sys;

use super::relation::{self, RemoteRelation};
use super::{Current, FIRST_NORMAL_OBJECT, NO_SUBSCRIPTION, Session, generation};

/// Columns of `braid.subscription_table`.
const COLUMNS: usize = 25;
// Some of these, from 0.
const SCHEMA_NAME: usize = 2;
const TABLE_NAME: usize = 3;
const STATE: usize = 4;
const COPY_LSN: usize = 5;
const COPY_SNAPSHOT: usize = 6;
const COPIED_RELATION: usize = 22;
const COPIED_LSN: usize = 23;

/// Value in place of the position from which a table's changes are applied: the table is still to
/// be copied.
const NOT_COPIED: u64 = u64::MAX;

/// Message about a table that the leader has to look at again.
pub const NOT_KNOWN: &str = "a table was made anew while its changes were applied";

/// Route of a relation of the stream.
#[derive(Debug, Clone)]
pub(super) struct Route {
    pub(super) oid: pg_sys::Oid,
    pub(super) generation: u64,
    /// Changes of transactions that committed before this position are in the copy. `None`: the
    /// table is not part of the subscription.
    pub(super) from_lsn: Option<u64>,
    /// Snapshot of the copy: changes of transactions that were prepared before it are in the copy
    /// if the snapshot sees them; `None`: all are.
    snapshot: Option<Rc<ProviderSnapshot>>,
    /// Set if the copy came from another node, and has some of this provider's transactions.
    copy_from_elsewhere: Option<Rc<CopyFromElsewhere>>,
    /// Rows that were written before this position are left out. The table was copied as of this
    /// position, when another table had taken the relation's place at the provider.
    superseded_before: Option<u64>,
}

/// Effect of a change on a row, as far as a route depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// After the change, a row of it is here: an insert or an update.
    Write,
    /// After the change, no row of it is here: a delete; also used to check a table before anything
    /// is written.
    Remove,
}

impl Effect {
    pub(super) fn of(operation: Operation) -> Self {
        match operation {
            Operation::Insert | Operation::Update => Self::Write,
            Operation::Delete => Self::Remove,
        }
    }
}

/// Transactions of this provider that a copy from another node has.
#[derive(Debug)]
struct CopyFromElsewhere {
    position: CopiedPosition,
    /// Also transactions that the provider forwards.
    forwards: bool,
}

impl CopyFromElsewhere {
    /// Whether the copy has a transaction. `None`: only its commit tells.
    fn has(&self, current: &Current) -> Option<bool> {
        if !current.from_origin && !self.forwards {
            return Some(false);
        }
        if current.unsettled {
            // The transaction commits later than this position.
            return self
                .position
                .ends_before(current.commit_lsn)
                .then_some(false);
        }
        Some(self.position.has(current.commit_lsn))
    }
}

impl Route {
    /// Whether the changes of a transaction are to be applied. `None`: only its commit tells
    /// whether they are in a copy.
    pub(super) fn decides(&self, current: &Current, effect: Effect) -> Option<bool> {
        let is_left_out = effect == Effect::Write && self.is_superseded(current);
        if !self.takes(current) || is_left_out {
            return (!current.runs).then_some(false);
        }
        match &self.copy_from_elsewhere {
            Some(copy) => copy.has(current).map(|has| !has),
            None => Some(true),
        }
    }

    /// Whether the table is still to be copied.
    pub(super) fn waits_for_copy(&self) -> bool {
        self.from_lsn == Some(NOT_COPIED)
    }

    /// Whether nothing was invalidated since the route was found.
    pub(super) fn is_current(&self) -> bool {
        generation::is_current(self.generation)
    }

    /// Whether the rows that a transaction wrote were dropped with their table before the copy, or
    /// moved into the table that was copied. For a transaction in progress: whether that is
    /// possible. A deletion still counts, because rows of other nodes are not in the copy.
    fn is_superseded(&self, current: &Current) -> bool {
        self.superseded_before
            .is_some_and(|position| current.commit_lsn < position)
    }

    fn takes(&self, current: &Current) -> bool {
        self.from_lsn.is_some_and(|from| {
            current.commit_lsn >= from
                || (current.unsettled
                    && from != NOT_COPIED
                    && self
                        .snapshot
                        .as_ref()
                        .is_some_and(|snapshot| !snapshot.sees(current.xid)))
        })
    }
}

/// How a local table belongs to a subscription.
struct Membership {
    from_lsn: u64,
    snapshot: Option<ProviderSnapshot>,
    /// The provider's table that was copied, and the position of the copy.
    source: Option<(u32, u64)>,
    /// Whether the table has the name under which it was found.
    is_current: bool,
}

impl Session {
    /// Returns the route of a relation of the stream.
    ///
    /// # Errors
    /// 42P01 and 42809 if no table has the name, 55000 if the table may lack rows, 55006 if the
    /// leader has to look at the table. 40001 for a transaction in progress: once it has committed,
    /// the leader has looked.
    pub(super) fn route(&mut self, schema: u32, remote: &RemoteRelation) -> Result<Route, PgError> {
        let generation = generation::now();
        if let Some(route) = self.routes.get(&schema)
            && route.generation == generation
        {
            return Ok(route.clone());
        }
        self.work_as_self();
        let (id, name) = (self.identity.subscription_id, &remote.name);
        let numbered = if id == NO_SUBSCRIPTION {
            None
        } else {
            snapshot::latest(|| ddl::numbered(id, remote.oid))?
        };
        let former = if id == NO_SUBSCRIPTION || numbered.is_some() {
            numbered
        } else {
            snapshot::latest(|| ddl::renamed(id, &remote.namespace, name))?
        };
        let found = match former {
            None => names::find_table(&remote.namespace, name)?,
            former => former,
        };
        let route = if self.identity.subscription_id == NO_SUBSCRIPTION {
            Route {
                oid: takes_records(found, remote)?,
                generation,
                from_lsn: Some(0),
                snapshot: None,
                copy_from_elsewhere: None,
                superseded_before: None,
            }
        } else {
            // With a new snapshot: a copy may have ended since the transaction began.
            snapshot::latest(|| {
                self.route_of_subscription(found, numbered.is_some(), remote, generation)
            })?
        };
        self.routes.insert(schema, route.clone());
        if route.from_lsn.is_none() && self.reported_unsubscribed.insert(schema) {
            pgrx::log!(
                "subscription \"{}\" leaves out table \"{}\": braid.left_out_tables says why",
                self.identity.subscription,
                remote.qualified_name()
            );
        }
        Ok(route)
    }

    fn route_of_subscription(
        &mut self,
        found: Option<pg_sys::Oid>,
        is_numbered: bool,
        remote: &RemoteRelation,
        generation: u64,
    ) -> Result<Route, PgError> {
        let id = self.identity.subscription_id;
        if let Some(oid) = found
            && relation::takes_changes(oid)
            && let Some(member) = membership(id, oid, remote)?
            && (is_numbered || member.is_current)
        {
            let superseded_before = member
                .source
                .filter(|(there, _)| remote.oid != 0 && *there != remote.oid)
                .map(|(_, position)| position);
            return Ok(Route {
                oid,
                generation,
                superseded_before,
                from_lsn: Some(member.from_lsn),
                snapshot: member.snapshot.map(Rc::new),
                copy_from_elsewhere: copied_position(id, oid)?.map(Rc::new),
            });
        }
        if subscription::is_left_out(id, &remote.namespace, &remote.name, remote.oid)? {
            return Ok(Route {
                oid: found.unwrap_or(pg_sys::InvalidOid),
                generation,
                from_lsn: None,
                snapshot: None,
                copy_from_elsewhere: None,
                superseded_before: None,
            });
        }
        if self.current().is_some_and(|now| now.runs) {
            return Err(self
                .hints
                .wait_for_commit("It changes a table that is not known."));
        }
        let name = remote.qualified_name();
        let Some(oid) = found else {
            let known = subscription::has_table(id, &remote.namespace, &remote.name)?;
            return Err(absent(&name, known));
        };
        relation::check_kind_of(oid)?;
        Err(replaced(id, oid)?.unwrap_or_else(|| {
            PgError::new(SqlState::ObjectInUse, NOT_KNOWN)
                .with_detail(format!("The table is \"{name}\"."))
                .with_hint("The subscription goes on by itself.")
        }))
    }
}

/// Returns the table that records of a source go to.
fn takes_records(
    found: Option<pg_sys::Oid>,
    remote: &RemoteRelation,
) -> Result<pg_sys::Oid, PgError> {
    let name = remote.qualified_name();
    let Some(oid) = found else {
        return Err(PgError::new(
            SqlState::UndefinedTable,
            format!("table \"{name}\" does not exist here"),
        )
        .with_hint("Create it, or leave its records out."));
    };
    if remote.namespace == "braid" || oid.to_u32() < FIRST_NORMAL_OBJECT {
        return Err(PgError::new(
            SqlState::InsufficientPrivilege,
            format!("table \"{name}\" takes no records"),
        )
        .with_hint("Records are applied to tables of users only."));
    }
    Ok(oid)
}

/// Returns the error for a missing table. If the subscription knows the name, no refresh is needed:
/// the leader finds out what another table of that name lacks.
fn absent(name: &str, known: bool) -> PgError {
    PgError::new(SqlState::UndefinedTable, format!("table \"{name}\" does not exist here")).with_hint(if known {
        "Create it as it is at the provider, or take it out of the publication there; then run braid.enable_subscription."
    } else {
        "Create it as it is at the provider and run braid.refresh_subscription, or take it out of the publication there; \
         then run braid.enable_subscription."
    })
}

/// Returns the position from which a table's changes are applied; `None` if it is not part of the
/// subscription. If the table is still to be copied, none are applied: the leader hands out only
/// transactions that are older than the copy.
fn membership(
    subscription_id: u32,
    oid: pg_sys::Oid,
    remote: &RemoteRelation,
) -> Result<Option<Membership>, PgError> {
    let (table, index) = (
        own_table("subscription_table")?,
        own_table("subscription_table_pkey")?,
    );
    let names = [&remote.namespace, &remote.name].map(|name| encoding::name_here(name));
    let key = [Is::Integer(1, subscription_id), Is::Oid(2, oid)];
    let mut member = None;
    table_scan::find::<COLUMNS>(table, index, &key, Sees::Active, |row| {
        let is_name = |column, name: &Option<CString>| {
            let here = row.name(column);
            here.is_some() && name.as_deref() == here
        };
        let is_ready = row.text(STATE).as_deref() == Some("ready");
        let [namespace, name] = &names;
        member = Some(Membership {
            from_lsn: match row.value(COPY_LSN) {
                _ if !is_ready => NOT_COPIED,
                Some(position) => position.value() as u64,
                None => 0,
            },
            snapshot: row
                .output(COPY_SNAPSHOT)
                .and_then(|text| ProviderSnapshot::parse(&text.to_string_lossy())),
            source: row
                .value(COPIED_RELATION)
                .zip(row.value(COPIED_LSN))
                .map(|(there, position)| (low(there), position.value() as u64)),
            is_current: is_name(SCHEMA_NAME, namespace) && is_name(TABLE_NAME, name),
        });
        ControlFlow::Break(())
    });
    Ok(member)
}

/// Returns why changes are not applied to a table that has taken the name of another one, if the
/// leader has recorded a reason.
fn replaced(subscription_id: u32, oid: pg_sys::Oid) -> Result<Option<PgError>, PgError> {
    let found = kept_plan::rows_in_snapshot(
        "select copy_error, copy_error_hint from braid.subscription_table where subscription_id = $1 and replaced_by = $2::oid",
        &[
            i64::from(subscription_id).into(),
            i64::from(oid.to_u32()).into(),
        ],
    )?;
    Ok(found.into_iter().next().map(|row| {
        let [message, hint] = <[_; 2]>::try_from(row).unwrap_or_default();
        PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            message.unwrap_or_default(),
        )
        .with_hint(hint.unwrap_or_default())
    }))
}

/// Returns which transactions of a subscription's provider are in the copy of a table, or of one of
/// which it is a partition.
fn copied_position(
    subscription_id: u32,
    oid: pg_sys::Oid,
) -> Result<Option<CopyFromElsewhere>, PgError> {
    let (table, index) = (
        own_table("copied_position")?,
        own_table("copied_position_pkey")?,
    );
    let is_known = with_ancestors(oid)
        .into_iter()
        .any(|oid| table_scan::has_any(table, index, &[Is::Oid(1, oid)], Sees::Active));
    if !is_known {
        return Ok(None);
    }
    let found = kept_plan::rows_in_snapshot(
        "select c.\"position\"::text, array_to_string(c.beyond, ','), array_to_string(c.missing, ','), c.forwards::text \
         from braid.copied_position c join braid.subscription s on s.provider_id = c.node_id \
         where s.subscription_id = $1 and (c.relation = $2::oid or c.relation in (select relid from pg_catalog.pg_partition_ancestors($2::oid))) limit 1",
        &[
            i64::from(subscription_id).into(),
            i64::from(oid.to_u32()).into(),
        ],
    )?;
    let Some(row) = found.into_iter().next() else {
        return Ok(None);
    };
    let text = |index: usize| {
        row.get(index)
            .and_then(Option::as_deref)
            .unwrap_or_default()
    };
    let position = CopiedPosition::parse(text(0), text(1), text(2)).ok_or_else(|| {
        PgError::new(
            SqlState::DataCorrupted,
            "a row of braid.copied_position is corrupt",
        )
    })?;
    Ok(Some(CopyFromElsewhere {
        position,
        forwards: text(3) == "true",
    }))
}
