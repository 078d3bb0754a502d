//! Decides which row and version remain after the user's function has answered for a conflict. Run
//! by the appliers.
//!
//! On every node the version is the larger of the two in conflict, regardless of which was there
//! first. So it does not show that its writer had not seen the other row. If a row's content is not
//! that of its version alone, the row gets a *merge marker*: for the next change of the same origin
//! it is [`Local::Merged`], and the function is called again. Without the marker that change would
//! replace the row, and the other half would be lost on this node only.
//!
//! If WAL has the whole row before the change, it shows exactly which row the writer had seen
//! ([`sees`]).

use crate::conflict::{Action, Decision, Kind, Local, Version};

/// Answer of the user's function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The local row.
    Local,
    /// The incoming row.
    Remote,
    /// The local row, which equals the incoming one.
    Both,
    /// A third row.
    Merged,
    /// No row.
    Nothing,
}

/// Action on the local row, or on its absence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeAction {
    /// Do nothing.
    Nothing,
    /// Write the row that the function returned.
    Write,
    /// Delete the row.
    Delete,
}

/// Result of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// Action on the local row.
    pub merge_action: MergeAction,
    /// Action for the history: whose row remains.
    pub action: Action,
    /// The row keeps its local version, which is the larger one, although the incoming transaction
    /// writes it.
    pub keeps_version: bool,
    /// The row gets a merge marker with its version.
    pub marked: bool,
}

/// Returns what follows from `answer`, if a change of version `remote` conflicts with `local`.
#[must_use]
pub fn settle(answer: Answer, local: Local<'_>, remote: Version<'_>) -> Settled {
    let (exists, here) = match local {
        Local::Present(version) | Local::Merged(version) | Local::OwnMerged(version) => {
            (true, Some(version))
        }
        Local::Own | Local::Unversioned => (true, None),
        Local::Deleted(version) => (false, Some(version)),
        Local::Missing => (false, None),
    };
    let keeps_version = here.is_some_and(|here| remote < here);
    let (merge_action, action, marked) = match answer {
        Answer::Nothing if !exists => (MergeAction::Nothing, Action::Keep, false),
        Answer::Nothing => (MergeAction::Delete, Action::Remove, keeps_version),
        Answer::Local | Answer::Both if keeps_version => {
            (MergeAction::Nothing, Action::Keep, false)
        }
        // Only the row's version changes.
        Answer::Local => (MergeAction::Write, Action::Keep, true),
        Answer::Remote | Answer::Both => (MergeAction::Write, Action::Apply, keeps_version),
        Answer::Merged => (MergeAction::Write, Action::Merge, true),
    };
    Settled {
        merge_action,
        action,
        keeps_version: keeps_version && merge_action != MergeAction::Nothing,
        marked,
    }
}

/// Corrects the decision about an update or a delete of an existing row. `same` tells whether the
/// row is exactly as the change's writer saw it. If it is, the change replaces it. Otherwise the
/// row has something that the writer had not seen, whatever the versions say, and the function is
/// asked about `kind`.
#[must_use]
pub fn sees(
    decision: Decision,
    kind: Kind,
    local: Local<'_>,
    remote: Version<'_>,
    same: bool,
) -> Decision {
    let newer = match local {
        Local::Present(version) | Local::Merged(version) => remote > version,
        Local::OwnMerged(version) => remote >= version,
        _ => true,
    };
    match decision.action {
        Action::Ask if same && newer => Decision {
            action: Action::Apply,
            conflict: None,
            reason: "",
        },
        Action::Apply if !same && decision.conflict.is_none() => Decision {
            action: Action::Ask,
            conflict: Some(kind),
            reason: "the function is asked",
        },
        _ => decision,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Version<'_> = Version {
        timestamp: 10,
        origin: "a",
    };
    const NEW: Version<'_> = Version {
        timestamp: 11,
        origin: "b",
    };

    #[test]
    fn the_version_is_the_larger_one_wherever_the_rows_meet() {
        for answer in [Answer::Merged, Answer::Local, Answer::Remote] {
            let here = settle(answer, Local::Present(NEW), OLD);
            assert_eq!(
                here.keeps_version,
                here.merge_action != MergeAction::Nothing,
                "{answer:?}"
            );
            assert!(!settle(answer, Local::Present(OLD), NEW).keeps_version);
        }
    }

    #[test]
    fn nothing_is_written_for_a_row_that_stays_as_it_is() {
        for answer in [Answer::Local, Answer::Both] {
            let settled = settle(answer, Local::Present(NEW), OLD);
            assert_eq!(
                (settled.merge_action, settled.action),
                (MergeAction::Nothing, Action::Keep)
            );
        }
        let settled = settle(Answer::Local, Local::Present(OLD), NEW);
        assert_eq!(
            (settled.merge_action, settled.marked),
            (MergeAction::Write, true)
        );
        assert_eq!(
            settle(Answer::Nothing, Local::Missing, OLD).merge_action,
            MergeAction::Nothing
        );
    }

    #[test]
    fn a_change_of_a_row_that_its_writer_saw_is_no_conflict() {
        let ask = Decision {
            action: Action::Ask,
            conflict: Some(Kind::UpdateOriginDiffers),
            reason: "",
        };
        let apply = Decision {
            action: Action::Apply,
            conflict: None,
            reason: "",
        };
        let by = |decision, local, remote, same| {
            let seen = sees(decision, Kind::UpdateOriginDiffers, local, remote, same);
            seen.action
        };
        assert_eq!(by(ask, Local::Present(OLD), NEW, true), Action::Apply);
        assert_eq!(by(ask, Local::Present(NEW), OLD, true), Action::Ask);
        assert_eq!(by(ask, Local::Present(OLD), NEW, false), Action::Ask);
        assert_eq!(by(apply, Local::Own, NEW, false), Action::Ask);
        assert_eq!(by(apply, Local::Present(OLD), NEW, true), Action::Apply);
    }
}
