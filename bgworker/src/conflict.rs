//! The conflict rules: what an incoming change does to the row that it conflicts with. Run by the
//! appliers.
//!
//! Each primary key is one last-writer-wins register. A row version is (commit timestamp, origin),
//! compared in that order, the origin's name in byte order; it is the *row's* origin, never the
//! sender or the applying node. Merging two versions keeps the larger one, so it is commutative,
//! associative and idempotent, and nodes agree whatever the order of arrival.
//!
//! Names of the kinds are PostgreSQL 19's (src/include/replication/conflict.h).

use std::cmp::Ordering;

/// A row version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version<'a> {
    /// Commit timestamp at the origin, microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// Name of the origin node.
    pub origin: &'a str,
}

impl Ord for Version<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.timestamp
            .cmp(&other.timestamp)
            .then_with(|| self.origin.as_bytes().cmp(other.origin.as_bytes()))
    }
}

impl PartialOrd for Version<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Local state under the key of an incoming change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local<'a> {
    /// No row, and no tombstone.
    Missing,
    /// No row, but a tombstone of a deletion by another transaction. A row that this very
    /// transaction deleted counts as `Missing`.
    Deleted(Version<'a>),
    /// A row that the current transaction wrote.
    Own,
    /// A row without a known version: it is frozen, or was part of the initial copy. Older than any
    /// streamed change.
    Unversioned,
    /// A row with this version.
    Present(Version<'a>),
    /// A row that the user's function merged locally from several. Its version is the largest of
    /// theirs, whose writer has not seen the others.
    Merged(Version<'a>),
    /// A merged row that the current transaction or batch made. Even a change with its version is
    /// not a repetition.
    OwnMerged(Version<'a>),
}

/// A conflict's kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// An insert conflicts with a row that has its key.
    InsertExists,
    /// An update conflicts with a row that another node changed last.
    UpdateOriginDiffers,
    /// The new key of an update belongs to another row.
    UpdateExists,
    /// The row of an update does not exist locally.
    UpdateMissing,
    /// The row of an update (or insert) was deleted locally.
    UpdateDeleted,
    /// A delete conflicts with a row that another node changed last.
    DeleteOriginDiffers,
    /// The row of a delete does not exist locally.
    DeleteMissing,
    /// A row conflicts with several others through different unique keys.
    MultipleUniqueConflicts,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::InsertExists,
        Self::UpdateOriginDiffers,
        Self::UpdateExists,
        Self::UpdateMissing,
        Self::UpdateDeleted,
        Self::DeleteOriginDiffers,
        Self::DeleteMissing,
        Self::MultipleUniqueConflicts,
    ];

    /// Returns PostgreSQL 19's name of the kind.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::InsertExists => "insert_exists",
            Self::UpdateOriginDiffers => "update_origin_differs",
            Self::UpdateExists => "update_exists",
            Self::UpdateMissing => "update_missing",
            Self::UpdateDeleted => "update_deleted",
            Self::DeleteOriginDiffers => "delete_origin_differs",
            Self::DeleteMissing => "delete_missing",
            Self::MultipleUniqueConflicts => "multiple_unique_conflicts",
        }
    }
}

/// Action for the incoming change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Apply the change: insert, update or delete.
    Apply,
    /// Keep the local state.
    Keep,
    /// Call the user's function. Only from [`crate::resolution::Rules::resolve`].
    Ask,
    /// Write the row that the user's function merged from both.
    Merge,
    /// Delete the row, as the user's function wants neither.
    Remove,
}

/// The decision about one incoming change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Action for the change.
    pub action: Action,
    /// The conflict to count and record, if there is one.
    pub conflict: Option<Kind>,
    /// The reason, in words for the history.
    pub reason: &'static str,
}

/// The decision for a change that conflicts with nothing.
pub const NO_CONFLICT: Decision = Decision {
    action: Action::Apply,
    conflict: None,
    reason: "",
};

const REMOTE_NEWER: &str = "the remote version is newer";
const LOCAL_NEWER: &str = "the local version is newer";
const DELETED_NEWER: &str = "the row was deleted here by a newer transaction";
const SAME_VERSION: &str = "both are the same version";

/// The decision for a change that is already applied and arrives again by another way. Writing it
/// again would also send it again, endlessly if nodes forward to each other.
const KNOWN: Decision = Decision {
    action: Action::Keep,
    conflict: None,
    reason: SAME_VERSION,
};

fn newer_wins(kind: Kind, local: Version<'_>, remote: Version<'_>) -> Decision {
    let (action, reason) = match remote.cmp(&local) {
        Ordering::Greater => (Action::Apply, REMOTE_NEWER),
        Ordering::Less => (Action::Keep, LOCAL_NEWER),
        Ordering::Equal => return KNOWN,
    };
    Decision {
        action,
        conflict: Some(kind),
        reason,
    }
}

/// Decides about a row that was merged with an earlier change of the current transaction.
fn over_merged(kind: Kind, merged: Version<'_>, remote: Version<'_>) -> Decision {
    let (action, reason) = if remote < merged {
        (Action::Keep, LOCAL_NEWER)
    } else {
        (Action::Apply, REMOTE_NEWER)
    };
    Decision {
        action,
        conflict: Some(kind),
        reason,
    }
}

/// Decides between a row and a change of the same origin, which are no conflict. Changes that
/// arrive straight from their origin have its commit order, whatever its clock did; two
/// transactions of one microsecond are ordered by it too. By other ways the version decides.
fn same_origin(local: Version<'_>, remote: Version<'_>, from_origin: bool) -> Decision {
    match remote.cmp(&local) {
        _ if from_origin => NO_CONFLICT,
        Ordering::Greater => NO_CONFLICT,
        Ordering::Less => Decision {
            action: Action::Keep,
            conflict: None,
            reason: LOCAL_NEWER,
        },
        Ordering::Equal => KNOWN,
    }
}

/// Returns whether a transaction can be committed together with those before it, the last of which
/// is `before`. Each has `from_origin` as in [`decide_update`]. A row that the same commit wrote is
/// [`Local::Own`]: versions are not compared, as the later change is newer. That holds for the
/// changes that an origin sends as its own. An exception is the announced deletion of a row that
/// lost a conflict: it has that row's version but is sent later, so writes to the row in between
/// are newer.
#[must_use]
pub fn joins(before: (Version<'_>, bool), next: (Version<'_>, bool)) -> bool {
    let ((before, from_origin), (next, next_from_origin)) = (before, next);
    before.origin == next.origin
        && from_origin == next_from_origin
        && (from_origin || next > before)
}

/// Decides about a row that is written where one was deleted.
fn over_deletion(
    deleted: Version<'_>,
    remote: Version<'_>,
    from_origin: bool,
    reason: &'static str,
) -> Decision {
    if deleted.origin == remote.origin {
        return same_origin(deleted, remote, from_origin);
    }
    if deleted < remote {
        return NO_CONFLICT;
    }
    Decision {
        action: Action::Keep,
        conflict: Some(Kind::UpdateDeleted),
        reason,
    }
}

/// Decides about an insert by last update wins. `from_origin` as in [`decide_update`].
#[must_use]
pub fn decide_insert(local: Local<'_>, remote: Version<'_>, from_origin: bool) -> Decision {
    match local {
        Local::Missing | Local::Own => NO_CONFLICT,
        Local::Deleted(deleted) => over_deletion(deleted, remote, from_origin, DELETED_NEWER),
        Local::Unversioned => Decision {
            action: Action::Apply,
            conflict: Some(Kind::InsertExists),
            reason: "the local row is older than anything that is replicated",
        },
        Local::Present(version) | Local::Merged(version) => {
            newer_wins(Kind::InsertExists, version, remote)
        }
        Local::OwnMerged(version) => over_merged(Kind::InsertExists, version, remote),
    }
}

/// Decides about an update by last update wins. `from_origin`: the sender of the stream is the
/// change's origin. Then the commit order is the order of its versions, whatever its clock did.
#[must_use]
pub fn decide_update(local: Local<'_>, remote: Version<'_>, from_origin: bool) -> Decision {
    match local {
        Local::Own | Local::Unversioned => NO_CONFLICT,
        Local::Present(version) if version.origin == remote.origin => {
            same_origin(version, remote, from_origin)
        }
        Local::Present(version) | Local::Merged(version) => {
            newer_wins(Kind::UpdateOriginDiffers, version, remote)
        }
        Local::OwnMerged(version) => over_merged(Kind::UpdateOriginDiffers, version, remote),
        Local::Missing => Decision {
            action: Action::Apply,
            conflict: Some(Kind::UpdateMissing),
            reason: "there is no trace of the row here",
        },
        Local::Deleted(deleted) if remote > deleted => Decision {
            action: Action::Apply,
            conflict: Some(Kind::UpdateDeleted),
            reason: "the deletion here is older",
        },
        Local::Deleted(_) => Decision {
            action: Action::Keep,
            conflict: Some(Kind::UpdateDeleted),
            reason: DELETED_NEWER,
        },
    }
}

/// Decides about a delete by last update wins. `from_origin` as in [`decide_update`]. For nodes to
/// agree, the caller must remember the deletion's version even if there is nothing to delete: an
/// older insert or update may still arrive by another stream.
#[must_use]
pub fn decide_delete(local: Local<'_>, remote: Version<'_>, from_origin: bool) -> Decision {
    match local {
        Local::Own | Local::Unversioned => NO_CONFLICT,
        Local::Present(version) if version.origin == remote.origin => {
            same_origin(version, remote, from_origin)
        }
        Local::Present(version) | Local::Merged(version) => {
            newer_wins(Kind::DeleteOriginDiffers, version, remote)
        }
        Local::OwnMerged(version) => over_merged(Kind::DeleteOriginDiffers, version, remote),
        Local::Missing | Local::Deleted(_) => Decision {
            action: Action::Keep,
            conflict: Some(Kind::DeleteMissing),
            reason: "there is no row to delete",
        },
    }
}

/// Of a transaction that comes after all that is here, whatever the clocks say: versioned
/// transactions are applied in one order on all nodes. `decision` is that by versions of rows.
#[must_use]
pub fn in_order(decision: Decision, local: Local<'_>) -> Decision {
    match local {
        Local::Own
        | Local::Unversioned
        | Local::Present(_)
        | Local::Merged(_)
        | Local::OwnMerged(_) => NO_CONFLICT,
        // An insert after a deletion.
        Local::Deleted(_) if decision.conflict == Some(Kind::UpdateDeleted) => NO_CONFLICT,
        // What is to be updated or deleted is not here: that is said.
        Local::Missing | Local::Deleted(_) => decision,
    }
}

/// Decides about a row in a table that is truncated. `decision` is the decision about the row's
/// deletion, by [`decide_delete`] and the rules for the table. The user's function is not called:
/// the row stays if it is newer.
///
/// Deleting an older row is no conflict. Usually the truncating node has seen the row. If not, the
/// row arrives at the truncating node later, conflicts with the truncate, and is recorded on that
/// node. The truncating node cannot have seen a newer row, so deleting one is recorded locally as
/// a conflict.
#[must_use]
pub fn decide_truncated(decision: Decision, local: Local<'_>, remote: Version<'_>) -> Decision {
    let is_newer = match local {
        Local::Present(version) | Local::Merged(version) | Local::OwnMerged(version) => {
            version > remote
        }
        Local::Missing | Local::Deleted(_) | Local::Own | Local::Unversioned => false,
    };
    let (action, reason) = match decision.action {
        Action::Apply | Action::Keep => (decision.action, decision.reason),
        Action::Ask | Action::Merge | Action::Remove if is_newer => (Action::Keep, LOCAL_NEWER),
        Action::Ask | Action::Merge | Action::Remove => (Action::Apply, REMOTE_NEWER),
    };
    Decision {
        action,
        conflict: decision
            .conflict
            .filter(|_| is_newer || action == Action::Keep),
        reason,
    }
}

/// Decides by last update wins about an update that moves a row to a key that another row has.
/// `from_origin` as in [`decide_update`].
#[must_use]
pub fn decide_new_key(local: Local<'_>, remote: Version<'_>, from_origin: bool) -> Decision {
    match local {
        Local::Missing | Local::Own => NO_CONFLICT,
        Local::Deleted(deleted) => {
            let reason = "the row under the new key was deleted here by a newer transaction";
            over_deletion(deleted, remote, from_origin, reason)
        }
        Local::Unversioned => Decision {
            action: Action::Apply,
            conflict: Some(Kind::UpdateExists),
            reason: "the local row is older than anything that is replicated",
        },
        Local::Present(version) | Local::Merged(version) => {
            newer_wins(Kind::UpdateExists, version, remote)
        }
        Local::OwnMerged(version) => over_merged(Kind::UpdateExists, version, remote),
    }
}

/// Decides by last update wins between a row that is to be written and a blocking row: one with an
/// equal value of another unique key than the one by which rows are found. Only one of them can
/// stay; the other is deleted.
#[must_use]
pub fn decide_in_the_way(kind: Kind, local: Local<'_>, remote: Version<'_>) -> Decision {
    match local {
        Local::Present(version) | Local::Merged(version) if version != remote => {
            newer_wins(kind, version, remote)
        }
        // Two rows with the same version: the order in which their origin wrote them decides.
        Local::Present(_) | Local::Merged(_) | Local::Unversioned => Decision {
            action: Action::Apply,
            conflict: Some(kind),
            reason: "the row in the way is older than anything that is replicated",
        },
        Local::Missing | Local::Deleted(_) | Local::Own | Local::OwnMerged(_) => NO_CONFLICT,
    }
}

/// Returns whether the local row can supply the columns that an update of this version left
/// unchanged. That requires the row that the update's writer had, as far as versions tell. Only a
/// row that the same node wrote last qualifies, as that node's changes arrive in order.
#[must_use]
pub fn completes(local: Local<'_>, remote: Version<'_>) -> bool {
    match local {
        Local::Own | Local::Unversioned => true,
        Local::Present(version) => version.origin == remote.origin,
        // Part of a merged row was written elsewhere.
        Local::Merged(_) | Local::OwnMerged(_) | Local::Missing | Local::Deleted(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Version<'_> = Version {
        timestamp: 10,
        origin: "a",
    };
    const B: Version<'_> = Version {
        timestamp: 10,
        origin: "b",
    };
    const LATER: Version<'_> = Version {
        timestamp: 11,
        origin: "a",
    };

    #[test]
    fn transactions_join_where_the_later_is_the_newer() {
        assert!(joins((LATER, true), (A, true)), "whatever its clock did");
        assert!(joins((A, false), (LATER, false)), "by another node");
        assert!(!joins((LATER, false), (A, false)), "not as written");
        assert!(!joins((A, false), (A, false)), "the same once more");
        assert!(!joins((LATER, true), (A, false)), "what is told");
        assert!(!joins((A, false), (LATER, true)), "nor after it");
        assert!(!joins((A, true), (B, true)), "two nodes");
    }

    #[test]
    fn versions_order_by_time_then_by_origin_bytes() {
        assert!(A < B && B < LATER);
        assert!(
            Version {
                timestamp: 0,
                origin: "B"
            } < Version {
                timestamp: 0,
                origin: "a"
            }
        );
    }

    #[test]
    fn equal_timestamps_have_one_winner_on_every_node() {
        assert_eq!(
            decide_update(Local::Present(A), B, true).action,
            Action::Apply
        );
        assert_eq!(
            decide_update(Local::Present(B), A, true).action,
            Action::Keep
        );
    }

    #[test]
    fn a_row_of_the_same_origin_is_no_conflict() {
        assert_eq!(decide_update(Local::Present(A), LATER, true), NO_CONFLICT);
        assert_eq!(decide_delete(Local::Present(A), LATER, true), NO_CONFLICT);
        // The origin's clock stepped back: the order of its stream decides.
        assert_eq!(decide_update(Local::Present(LATER), A, true), NO_CONFLICT);
        // The change arrives again by another way.
        assert_eq!(
            decide_update(Local::Present(LATER), A, false).action,
            Action::Keep
        );
    }

    #[test]
    fn a_newer_delete_is_not_undone() {
        let insert = decide_insert(Local::Deleted(LATER), B, true);
        assert_eq!(
            (insert.action, insert.conflict),
            (Action::Keep, Some(Kind::UpdateDeleted))
        );
        assert_eq!(
            decide_update(Local::Deleted(LATER), B, true).action,
            Action::Keep
        );
        assert_eq!(
            decide_update(Local::Deleted(A), LATER, true).action,
            Action::Apply
        );
    }

    #[test]
    fn a_transaction_in_order_comes_after_all_that_is_here() {
        let newer = Version {
            timestamp: 20,
            origin: "paris",
        };
        let remote = Version {
            timestamp: 10,
            origin: "tokyo",
        };
        for local in [Local::Present(newer), Local::Merged(newer)] {
            for decide in [decide_insert, decide_update, decide_delete] {
                let decision = decide(local, remote, true);
                assert_eq!(decision.action, Action::Keep);
                assert_eq!(in_order(decision, local), NO_CONFLICT);
            }
        }
        let deleted = Local::Deleted(newer);
        let insert = decide_insert(deleted, remote, true);
        assert_eq!(in_order(insert, deleted), NO_CONFLICT);
        let delete = decide_delete(deleted, remote, true);
        assert_eq!(in_order(delete, deleted), delete);
        let update = decide_update(Local::Missing, remote, true);
        assert_eq!(in_order(update, Local::Missing), update);
    }

    #[test]
    fn a_truncate_takes_what_is_older_without_a_word() {
        let truncate = |local, remote| {
            let decision = decide_delete(local, remote, true);
            let decision = decide_truncated(decision, local, remote);
            (decision.action, decision.conflict)
        };
        let gone = (Action::Apply, None);
        assert_eq!(truncate(Local::Present(A), B), gone);
        assert_eq!(truncate(Local::Merged(A), B), gone);
        assert_eq!(truncate(Local::Unversioned, A), gone);
        assert_eq!(truncate(Local::Own, A), gone);
        // The truncating node's own rows are deleted, whatever its clock did.
        assert_eq!(truncate(Local::Present(LATER), A), gone);
        let stays = (Action::Keep, Some(Kind::DeleteOriginDiffers));
        assert_eq!(truncate(Local::Present(LATER), B), stays);
        assert_eq!(truncate(Local::Merged(LATER), A), stays);
    }

    #[test]
    fn what_a_rule_says_of_a_truncate_is_a_conflict_where_something_newer_meets_it() {
        let conflict = Some(Kind::DeleteOriginDiffers);
        let by = |action, local, remote| {
            let reason = "";
            let ruled = Decision {
                action,
                conflict,
                reason,
            };
            let decision = decide_truncated(ruled, Local::Present(local), remote);
            (decision.action, decision.conflict)
        };
        assert_eq!(by(Action::Apply, LATER, B), (Action::Apply, conflict));
        assert_eq!(by(Action::Apply, A, B), (Action::Apply, None));
        assert_eq!(by(Action::Keep, A, B), (Action::Keep, conflict));
        assert_eq!(by(Action::Ask, A, B), (Action::Apply, None));
        assert_eq!(by(Action::Ask, LATER, B), (Action::Keep, conflict));
    }

    #[test]
    fn only_a_row_of_the_same_origin_completes_an_update() {
        assert!(completes(Local::Present(A), LATER));
        assert!(completes(Local::Own, A));
        assert!(completes(Local::Unversioned, A));
        for other in [
            Local::Present(B),
            Local::Merged(A),
            Local::OwnMerged(A),
            Local::Deleted(A),
            Local::Missing,
        ] {
            assert!(!completes(other, LATER), "{other:?}");
        }
    }

    #[test]
    fn every_meeting_of_two_origins_has_a_kind() {
        assert_eq!(
            decide_insert(Local::Present(A), B, true).conflict,
            Some(Kind::InsertExists)
        );
        assert_eq!(
            decide_update(Local::Missing, A, true).conflict,
            Some(Kind::UpdateMissing)
        );
        assert_eq!(
            decide_delete(Local::Missing, A, true).conflict,
            Some(Kind::DeleteMissing)
        );
        assert_eq!(
            decide_delete(Local::Present(LATER), B, true),
            Decision {
                action: Action::Keep,
                conflict: Some(Kind::DeleteOriginDiffers),
                reason: LOCAL_NEWER
            }
        );
    }
}
