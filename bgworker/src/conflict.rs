//! The conflict rules: what an incoming change does to what it meets. Run by the appliers.
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

/// What is here under the key of an incoming change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local<'a> {
    /// No row, and no trace of one.
    Missing,
    /// No row, but a trace of its deletion by another transaction than this very one (then it is
    /// missing).
    Deleted(Version<'a>),
    /// A row that this very transaction wrote.
    Own,
    /// A row whose version is not known: it is frozen, or came by the initial copy. Older than
    /// anything that streams.
    Unversioned,
    /// A row.
    Present(Version<'a>),
    /// A row that was made here of several by the user's function. Its version is the largest of
    /// theirs: whoever wrote that one has not seen the others.
    Merged(Version<'a>),
    /// As that, made by this very transaction or batch: never the same change again, whatever the
    /// version.
    OwnMerged(Version<'a>),
}

/// A conflict's kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// An insert meets a row with its key.
    InsertExists,
    /// An update meets a row that another node changed last.
    UpdateOriginDiffers,
    /// An update's new key is taken by another row.
    UpdateExists,
    /// An update's row is not here.
    UpdateMissing,
    /// An update's (or insert's) row was deleted here.
    UpdateDeleted,
    /// A delete meets a row that another node changed last.
    DeleteOriginDiffers,
    /// A delete's row is not here.
    DeleteMissing,
    /// A row meets several others through different unique keys.
    MultipleUniqueConflicts,
}

impl Kind {
    /// All of them.
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

    /// PostgreSQL 19's name.
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

/// What to do with the incoming change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Write it: insert where there is no row, change or delete where there is one.
    Apply,
    /// Leave things as they are.
    Keep,
    /// The user's function is to say. Only from [`crate::resolution::Rules::resolve`].
    Ask,
    /// It has made a row of both, which is written.
    Merge,
    /// It wants neither: the row goes.
    Remove,
}

/// What was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// What to do.
    pub action: Action,
    /// The conflict to count and record, if it is one.
    pub conflict: Option<Kind>,
    /// Why, in words for the history.
    pub reason: &'static str,
}

/// A change that meets nothing of another origin.
pub const NO_CONFLICT: Decision = Decision {
    action: Action::Apply,
    conflict: None,
    reason: "",
};

const REMOTE_NEWER: &str = "the remote version is newer";
const LOCAL_NEWER: &str = "the local version is newer";
const DELETED_NEWER: &str = "the row was deleted here by a newer transaction";
const SAME_VERSION: &str = "both are the same version";

/// The same change again, by another way: it is here already. To write it again would also send it
/// on again, and around for ever where nodes forward to each other.
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

/// A row that was merged with an earlier change of the transaction in hand.
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

/// A row and a change of the same origin are no conflict. Straight from their origin they come in
/// its commit order, whatever its clock did, and two transactions of one microsecond are told apart
/// by that; by other ways the version decides.
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

/// Whether a transaction can be committed as one with those before it, of which the last is
/// `before`; each with `from_origin` as in [`decide_update`]. What the same commit has written is
/// [`Local::Own`]: it is not compared, as the later change is the newer one. That holds for what
/// its origin sends as its own. But a deletion of a row that has lost to another one has that row's
/// version, and is sent when that is found: what was written to the row in between is newer.
#[must_use]
pub fn joins(before: (Version<'_>, bool), next: (Version<'_>, bool)) -> bool {
    let ((before, from_origin), (next, next_from_origin)) = (before, next);
    before.origin == next.origin
        && from_origin == next_from_origin
        && (from_origin || next > before)
}

/// A row comes where one was deleted.
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

/// Last update wins, for an insert. `from_origin` as in [`decide_update`].
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

/// Last update wins, for an update. `from_origin` says that the sender of the stream is the
/// change's origin, whose commit order then is the order of its versions, whatever its clock did.
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

/// Last update wins, for a delete. `from_origin` as in [`decide_update`]. For nodes to agree, the
/// deletion's version has to be remembered also where there is nothing to delete: an older insert
/// or update may still come, by another stream.
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

/// What becomes of a row in a table that is truncated, given what is decided about its deletion: by
/// [`decide_delete`] and the rules for the table. No function is asked: it stays if it is newer.
///
/// A row that goes because it is older is no conflict. Mostly the truncating node has seen it; if
/// not, the row comes there later, meets the truncate, and is recorded. One that goes although it
/// is newer can't have been seen, and is a conflict here.
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

/// Last update wins, for an update that moves a row to a key under which there is another row.
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

/// Last update wins, between a row that is to be written and one that stands in its way under
/// another unique key than that by which rows are found. Only one of them can stay: the other
/// leaves its table.
#[must_use]
pub fn decide_in_the_way(kind: Kind, local: Local<'_>, remote: Version<'_>) -> Decision {
    match local {
        Local::Present(version) | Local::Merged(version) if version != remote => {
            newer_wins(kind, version, remote)
        }
        // Two rows of one version are told apart by the order in which their origin wrote them.
        Local::Present(_) | Local::Merged(_) | Local::Unversioned => Decision {
            action: Action::Apply,
            conflict: Some(kind),
            reason: "the row in the way is older than anything that is replicated",
        },
        Local::Missing | Local::Deleted(_) | Local::Own | Local::OwnMerged(_) => NO_CONFLICT,
    }
}

/// Whether what an update of this version has left as it was can be taken from the row that is
/// here: it is the one that the update's writer had, as far as versions tell. Only a row that the
/// same node wrote last can be, as its changes come in their order.
#[must_use]
pub fn completes(local: Local<'_>, remote: Version<'_>) -> bool {
    match local {
        Local::Own | Local::Unversioned => true,
        Local::Present(version) => version.origin == remote.origin,
        // One half of such a row is from elsewhere.
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
        // Its clock stepped back: the order of its stream decides.
        assert_eq!(decide_update(Local::Present(LATER), A, true), NO_CONFLICT);
        // The same change again by another way.
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
        // Its own rows, whatever its clock did.
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
