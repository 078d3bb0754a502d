//! Updates whose row enters or leaves a publication's row filter.

use braid_gir::Operation;

/// The operation that is sent for an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// Nothing: neither row is published.
    Nothing,
    /// This operation.
    As(Operation),
}

/// Returns the operation for an update, given whether the old and the new row match the filter. A
/// row that enters becomes an insert, a row that leaves becomes a delete. Without an old row (its
/// key did not change) only the new one counts.
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
