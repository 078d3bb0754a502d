//! Decision about a change whose row was found or not: by versions (`braid_bgworker::conflict`),
//! and then by the table's rules. Run by the appliers.

use braid_bgworker::conflict::{Action, Decision, Kind, Local, Version, in_order};
use braid_bgworker::resolution::Resolution;
use braid_bgworker::sqlstate::SqlState;
use braid_node::versions;
use braid_postgres::error::PgError;
use pgrx::pg_sys;

use crate::lookup::Found;
use crate::relation::RemoteRelation;
use crate::row_context::RowContext;
use crate::target::{Key, Tables};
use crate::version::{OriginNames, Stamp};
use crate::{Current, Session};

pub(crate) fn version(current: &Current) -> Version<'_> {
    Version {
        timestamp: current.timestamp,
        origin: &current.origin,
    }
}

/// Whether a decision makes the change's row be written.
pub(super) fn writes(decision: Decision) -> bool {
    matches!(decision.action, Action::Apply | Action::Ask)
}

/// Returns the error for a conflict whose rule is `error`.
pub(crate) fn refused(kind: Kind, remote: &RemoteRelation) -> PgError {
    PgError::new(
        SqlState::IntegrityConstraintViolation,
        format!(
            "conflict {} in table \"{}\"",
            kind.name(),
            remote.qualified_name()
        ),
    )
    .with_detail("The rule for conflicts of this kind is error.")
    .with_hint(
        "Change one of the rows, or the rule with braid.set_conflict_resolution, and run braid.enable_subscription; or leave this \
         transaction out with braid.skip_transaction.",
    )
}

impl Tables {
    /// Whether versions have decided, and no other rule.
    pub(super) fn newest_wins(&mut self, key: Key, decision: Decision) -> Result<bool, PgError> {
        let Some(kind) = decision.conflict else {
            return Ok(true);
        };
        let resolution = self.target(key)?.plan.rules.of(kind);
        Ok(resolution == Resolution::LastUpdateWins)
    }
}

impl OriginNames {
    /// Whether a local row, or its deletion, may turn out to be newer than the current transaction,
    /// or older: it will commit later than its PREPARE.
    pub(crate) fn may_yet_be_older(&mut self, current: &Current, found: Found) -> bool {
        let (Found::Missing(Some(stamp)) | Found::Row(stamp)) = found else {
            return false;
        };
        match stamp {
            Stamp::Own | Stamp::Unversioned | Stamp::OwnMerged(..) => false,
            Stamp::Known(timestamp, origin) => {
                timestamp >= current.timestamp
                    && !(current.from_origin && self.node(origin) == &*current.origin)
            }
            Stamp::Merged(timestamp, _) => timestamp >= current.timestamp,
        }
    }

    pub(crate) fn local<'a>(&'a mut self, found: Found) -> Local<'a> {
        match found {
            Found::Missing(None) => Local::Missing,
            // A row that was deleted because it lost does not block its own key.
            Found::Missing(Some(Stamp::Known(timestamp, origin)))
                if self
                    .alone
                    .is_some_and(|alone| alone.has_evicted(timestamp, origin)) =>
            {
                Local::Missing
            }
            // A deletion of this transaction itself is not remembered.
            Found::Missing(Some(Stamp::OwnMerged(..))) => Local::Missing,
            Found::Missing(Some(
                Stamp::Known(timestamp, origin) | Stamp::Merged(timestamp, origin),
            )) => Local::Deleted(Version {
                timestamp,
                origin: self.node(origin),
            }),
            // Deleted by this transaction itself, or by one whose version is not known.
            Found::Missing(Some(Stamp::Own | Stamp::Unversioned)) => Local::Missing,
            Found::Row(Stamp::Own) => Local::Own,
            Found::Row(Stamp::Unversioned) => match self.alone {
                Some(alone) => Local::Present(Version {
                    timestamp: alone.unversioned_at,
                    origin: self.node(0),
                }),
                None => Local::Unversioned,
            },
            Found::Row(Stamp::Known(timestamp, origin)) => Local::Present(Version {
                timestamp,
                origin: self.node(origin),
            }),
            Found::Row(Stamp::Merged(timestamp, origin)) => Local::Merged(Version {
                timestamp,
                origin: self.node(origin),
            }),
            Found::Row(Stamp::OwnMerged(timestamp, origin)) => Local::OwnMerged(Version {
                timestamp,
                origin: self.node(origin),
            }),
        }
    }

    /// Whether a rule makes a row be written although its deletion is newer.
    pub(super) fn is_over_newer(&mut self, found: Found, current: &Current) -> bool {
        matches!(self.local(found), Local::Deleted(deleted) if deleted >= version(current))
    }
}

impl Session {
    /// Decides about a change and the row that was found: by versions, then by the table's rules.
    pub(crate) fn decide(
        &mut self,
        context: RowContext<'_>,
        found: Found,
        decide: impl Fn(Local<'_>, Version<'_>, bool) -> Decision,
    ) -> Result<Decision, PgError> {
        let RowContext {
            key,
            remote,
            current,
        } = context;
        let rules = self.tables.target(key)?.plan.rules;
        if current.unsettled && self.origins.may_yet_be_older(current, found) {
            return Err(self.hints.wait_for_commit(
                "It meets a row that was written after it had been prepared: which is newer its commit will say.",
            ));
        }
        let local = self.origins.local(found);
        let decision = decide(local, context.version(), current.from_origin);
        if versions::is_in_order(pg_sys::Oid::from(key.1)) {
            return Ok(in_order(decision, local));
        }
        if current.runs && decision.conflict.is_some() {
            return Err(self.hints.wait_for_commit("It meets a conflict."));
        }
        if current.is_displacement_notice {
            return Ok(match found {
                // The row is gone here too: no conflict.
                Found::Missing(_) => Decision {
                    conflict: None,
                    ..decision
                },
                Found::Row(_) => Decision {
                    reason: if decision.action == Action::Apply {
                        "another row has its values under a unique key, and is newer"
                    } else {
                        decision.reason
                    },
                    ..decision
                },
            });
        }
        let resolved = rules
            .resolve(decision, local, context.version())
            .map_err(|kind| refused(kind, remote))?;
        // A function would be called in a transaction of its own, before this one is applied again.
        if self.origins.alone.is_some() && resolved.action == Action::Ask {
            return Ok(decision);
        }
        Ok(resolved)
    }
}
