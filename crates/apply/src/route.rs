//! Where a relation of the stream goes. Run by the appliers.
//!
//! A table belongs to a subscription by its name. Whenever another table has the name, the leader decides what that means
//! (`workers/leader/membership.rs`) before it hands out a transaction; an applier that meets such a table earlier has it looked at again.
//!
//! Invariant: changes are left out if `braid.left_out_table` has their relation, and never because nothing is known.

use std::ffi::{CStr, CString, c_char};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use braid_bgworker::copied_position::CopiedPosition;
use braid_bgworker::provider_snapshot::ProviderSnapshot;
use braid_node::subscription;
use braid_postgres::error::PgError;
use braid_postgres::names::{self, own_table};
use braid_postgres::table_scan::{self, Is, Sees, low};
use braid_postgres::{encoding, kept_plan};
use pgrx::pg_sys;

use super::partition::with_ancestors;
use super::relation::{self, RemoteRelation};
use super::{Current, FIRST_NORMAL_OBJECT, GENERATION, NO_SUBSCRIPTION, Session};

// Columns of braid.subscription_table, from 1.
const SCHEMA_NAME: usize = 3;
const TABLE_NAME: usize = 4;
const STATE: usize = 5;
const COPY_LSN: usize = 6;
const COPY_SNAPSHOT: usize = 7;
const COPIED_RELATION: usize = 23;
const COPIED_LSN: usize = 24;
/// F_PG_SNAPSHOT_OUT of src/include/utils/fmgroids.h, 15 to 18.
const SNAPSHOT_OUT: u32 = 5056;

/// The message of a table that the leader has to look at again.
pub const NOT_KNOWN: &str = "a table was made anew while its changes were applied";

/// Where a relation of the stream goes.
#[derive(Debug, Clone)]
pub(super) struct Route {
    pub(super) oid: pg_sys::Oid,
    pub(super) generation: u64,
    /// Changes of transactions that committed before this are in the copy; `None`: the table is not part of the subscription.
    pub(super) from_lsn: Option<u64>,
    /// What of those that were prepared before it is in the copy; `None`: everything.
    snapshot: Option<Rc<ProviderSnapshot>>,
    /// What of this provider's transactions is in a copy that came from another node.
    copied: Option<Rc<CopiedFrom>>,
    /// Another table had taken the relation's place at the provider when that one was copied, as of this position.
    replaced_at: Option<u64>,
}

/// What a copy from elsewhere has of this provider's transactions.
#[derive(Debug)]
struct CopiedFrom {
    position: CopiedPosition,
    /// Of those that it forwards, too.
    forwards: bool,
}

impl CopiedFrom {
    /// Whether it has a transaction. `None`: its commit says that.
    fn has(&self, current: &Current) -> Option<bool> {
        if !current.from_origin && !self.forwards {
            return Some(false);
        }
        if current.unsettled {
            // It commits later than here.
            return self
                .position
                .ends_before(current.commit_lsn)
                .then_some(false);
        }
        Some(self.position.has(current.commit_lsn))
    }
}

impl Route {
    /// Whether the changes of a transaction are to be applied. `None`: its commit says whether they are in a copy.
    /// `writes`: they are inserts and updates.
    pub(super) fn decides(&self, current: &Current, writes: bool) -> Option<bool> {
        if !self.takes(current) || (writes && self.is_superseded(current)) {
            return (!current.runs).then_some(false);
        }
        match &self.copied {
            Some(copied) => copied.has(current).map(|has| !has),
            None => Some(true),
        }
    }

    /// Whether the rows that a transaction wrote were dropped with their table before the copy, or moved on into the table
    /// that was copied. Of a transaction that runs: whether that may be. A deletion still counts: of rows that came here from
    /// other nodes, the copy says nothing.
    fn is_superseded(&self, current: &Current) -> bool {
        self.replaced_at
            .is_some_and(|position| current.commit_lsn < position)
    }

    fn takes(&self, current: &Current) -> bool {
        self.from_lsn.is_some_and(|from| {
            current.commit_lsn >= from
                || (current.unsettled
                    && from != u64::MAX
                    && self
                        .snapshot
                        .as_ref()
                        .is_some_and(|snapshot| !snapshot.sees(current.xid)))
        })
    }
}

/// How a table of this database belongs to a subscription.
struct Membership {
    from_lsn: u64,
    snapshot: Option<ProviderSnapshot>,
    /// The provider's table that was copied, and as of which position.
    copied: Option<(u32, u64)>,
    /// Under the name by which the table was found.
    is_current: bool,
}

impl Session {
    /// Where a relation of the stream goes, and from which position on.
    ///
    /// # Errors
    /// 42P01 and 42809 where no table has the name, 55000 where the table may lack rows, 55006 where the leader has to look at the table. 40001 of a
    /// transaction that runs: once it has committed, the leader has looked.
    pub(super) fn route(&mut self, schema: u32, remote: &RemoteRelation) -> Result<Route, PgError> {
        let generation = GENERATION.load(Ordering::Relaxed);
        if let Some(route) = self.routes.get(&schema)
            && route.generation == generation
        {
            return Ok(route.clone());
        }
        self.work_as_self();
        let found = names::find_table(&remote.namespace, &remote.name)?;
        let route = if self.identity.subscription_id == NO_SUBSCRIPTION {
            Route {
                oid: takes_records(found, remote)?,
                generation,
                from_lsn: Some(0),
                snapshot: None,
                copied: None,
                replaced_at: None,
            }
        } else {
            // As of now, not of when the transaction began: a copy may have ended since then.
            // SAFETY: pushed and popped around the queries; an error in between rolls the transaction back.
            unsafe { pg_sys::PushActiveSnapshot(pg_sys::GetLatestSnapshot()) };
            let route = self.route_of_subscription(found, remote, generation);
            // SAFETY: as above.
            unsafe { pg_sys::PopActiveSnapshot() };
            route?
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
        remote: &RemoteRelation,
        generation: u64,
    ) -> Result<Route, PgError> {
        let id = self.identity.subscription_id;
        if let Some(oid) = found
            && relation::takes_changes(oid)
            && let Some(member) = membership(id, oid, remote)?
            && member.is_current
        {
            let replaced_at = member
                .copied
                .filter(|(there, _)| remote.oid != 0 && *there != remote.oid)
                .map(|(_, position)| position);
            return Ok(Route {
                oid,
                generation,
                replaced_at,
                from_lsn: Some(member.from_lsn),
                snapshot: member.snapshot.map(Rc::new),
                copied: copied_position(id, oid)?.map(Rc::new),
            });
        }
        if subscription::is_left_out(id, &remote.namespace, &remote.name, remote.oid)? {
            return Ok(Route {
                oid: found.unwrap_or(pg_sys::InvalidOid),
                generation,
                from_lsn: None,
                snapshot: None,
                copied: None,
                replaced_at: None,
            });
        }
        if self.is_running() {
            return Err(self.wait_for_commit("It changes a table that is not known."));
        }
        let name = remote.qualified_name();
        let Some(oid) = found else {
            let known = subscription::has_table(id, &remote.namespace, &remote.name)?;
            return Err(absent(&name, known));
        };
        relation::check_kind_of(oid)?;
        Err(replaced(id, oid)?.unwrap_or_else(|| {
            PgError::new("55006", NOT_KNOWN)
                .with_detail(format!("The table is \"{name}\"."))
                .with_hint("The subscription goes on by itself.")
        }))
    }
}

/// The table that records of a source go to.
fn takes_records(
    found: Option<pg_sys::Oid>,
    remote: &RemoteRelation,
) -> Result<pg_sys::Oid, PgError> {
    let name = remote.qualified_name();
    let Some(oid) = found else {
        return Err(
            PgError::new("42P01", format!("table \"{name}\" does not exist here"))
                .with_hint("Create it, or leave its records out."),
        );
    };
    if remote.namespace == "braid" || oid.to_u32() < FIRST_NORMAL_OBJECT {
        return Err(
            PgError::new("42501", format!("table \"{name}\" takes no records"))
                .with_hint("Records are applied to tables of users only."),
        );
    }
    Ok(oid)
}

/// A table that the subscription knows by its name needs no refresh: the leader finds out what another one of the name lacks.
fn absent(name: &str, known: bool) -> PgError {
    PgError::new("42P01", format!("table \"{name}\" does not exist here")).with_hint(if known {
        "Create it as it is at the provider, or take it out of the publication there; then run braid.enable_subscription."
    } else {
        "Create it as it is at the provider and run braid.refresh_subscription, or take it out of the publication there; \
         then run braid.enable_subscription."
    })
}

/// From which position on a table's changes are applied; `None` when it is not part of the subscription. Of a table that is still
/// to be copied, nothing is: the leader lets through only what is older than the copy will be.
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
    // SAFETY: in a transaction with an active snapshot; the columns have the types of the install script.
    unsafe {
        table_scan::find(table, index, &key, Sees::Active, |row| {
            let value = |column: usize| row.get(column - 1).copied().flatten();
            let is_name = |column, name: &Option<CString>| {
                value(column).is_some_and(|here| {
                    name.as_deref() == Some(CStr::from_ptr(here.cast_mut_ptr::<c_char>()))
                })
            };
            let is_ready =
                value(STATE).is_some_and(|state| table_scan::with_bytes(state, |s| s == b"ready"));
            let [namespace, name] = &names;
            member = Some(Membership {
                from_lsn: match value(COPY_LSN) {
                    _ if !is_ready => u64::MAX,
                    Some(position) => position.value() as u64,
                    None => 0,
                },
                snapshot: value(COPY_SNAPSHOT).and_then(|snapshot| {
                    let text = pg_sys::OidOutputFunctionCall(SNAPSHOT_OUT.into(), snapshot);
                    ProviderSnapshot::parse(&CStr::from_ptr(text).to_string_lossy())
                }),
                copied: value(COPIED_RELATION)
                    .zip(value(COPIED_LSN))
                    .map(|(there, position)| (low(there), position.value() as u64)),
                is_current: is_name(SCHEMA_NAME, namespace) && is_name(TABLE_NAME, name),
            });
            ControlFlow::Break(())
        });
    }
    Ok(member)
}

/// Why changes are not applied to a table that has the name of another one, if the leader has said so.
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
        PgError::new("55000", message.unwrap_or_default()).with_hint(hint.unwrap_or_default())
    }))
}

/// What a copy of a table, or of one of which it is a partition, has of the transactions of a subscription's provider.
fn copied_position(subscription_id: u32, oid: pg_sys::Oid) -> Result<Option<CopiedFrom>, PgError> {
    let (table, index) = (
        own_table("copied_position")?,
        own_table("copied_position_pkey")?,
    );
    // SAFETY: in a transaction with an active snapshot; the key begins with the relation.
    let is_known = unsafe {
        with_ancestors(oid)
            .into_iter()
            .any(|oid| table_scan::has_any(table, index, &[Is::Oid(1, oid)], Sees::Active))
    };
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
    let position = CopiedPosition::parse(text(0), text(1), text(2))
        .ok_or_else(|| PgError::new("XX001", "a row of braid.copied_position is corrupt"))?;
    Ok(Some(CopiedFrom {
        position,
        forwards: text(3) == "true",
    }))
}
