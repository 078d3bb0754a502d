//! What becomes of an update whose row enters or leaves a publication's row filter.

use braid_gir::Operation;

/// What of an update is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// Nothing: neither row is published.
    Nothing,
    /// As this operation.
    As(Operation),
}

/// The operation for an update, given whether the old and the new row match the filter: a row that
/// enters becomes an insert, one that leaves a delete. Without an old row (its key did not change)
/// only the new one is asked.
#[must_use]
pub fn transform(old: Option<bool>, new: bool) -> Passed {
    match (old, new) {
        (None | Some(true), true) => Passed::As(Operation::Update),
        (Some(false), true) => Passed::As(Operation::Insert),
        (Some(true), false) => Passed::As(Operation::Delete),
        (None | Some(false), false) => Passed::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case() {
        assert_eq!(transform(None, true), Passed::As(Operation::Update));
        assert_eq!(transform(None, false), Passed::Nothing);
        assert_eq!(transform(Some(false), false), Passed::Nothing);
        assert_eq!(transform(Some(true), true), Passed::As(Operation::Update));
        assert_eq!(transform(Some(false), true), Passed::As(Operation::Insert));
        assert_eq!(transform(Some(true), false), Passed::As(Operation::Delete));
    }
}
