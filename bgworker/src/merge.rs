//! What becomes of a row when the user's function has been asked about a conflict, and which
//! version it then has. Run by the appliers.
//!
//! The version is the larger of the two that met, on every node, whichever of them was here first:
//! so it does not tell that the one who wrote it had not seen the other. A row whose version says
//! more than it holds is *marked*: the next change of the same origin meets [`Local::Merged`], and
//! the function is asked again. Without the mark that change would take the row's place, and the
//! other half would be gone here alone.
//!
//! Where the whole row before the change is in WAL, it tells for certain what its writer had seen
//! ([`sees`]).

use crate::conflict::{Action, Decision, Kind, Local, Version};

/// What the function gave back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The row that is here.
    Local,
    /// The row that comes.
    Remote,
    /// Both are the same, and so is this.
    Both,
    /// Another row.
    Merged,
    /// None.
    Nothing,
}

/// What is to be done to the row that is here, or to the gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeAction {
    /// Nothing.
    Nothing,
    /// Write the row that the function gave.
    Write,
    /// Delete the row.
    Delete,
}

/// What comes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// To be done.
    pub merge_action: MergeAction,
    /// For the history: whose row it is.
    pub action: Action,
    /// The row keeps the version of what was here, which is the larger one, although the incoming
    /// transaction writes it.
    pub keeps_version: bool,
    /// The row's version is to be remembered, and that it was merged.
    pub marked: bool,
}

/// What comes of `answer`, where a change of version `remote` met `local`.
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
        // Only its version changes.
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

/// What was decided about an update or a delete of a row that is here, given whether it is just as
/// the change's writer saw it. Then the change takes its place; else there is something that the
/// writer had not seen, whatever the versions say. `kind` is that which a function is asked about.
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
