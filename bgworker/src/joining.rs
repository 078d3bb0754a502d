//! Decides by its dependencies whether a transaction can join a batch. Run by the appliers.
//!
//! A batch is a run of transactions that follow each other and are committed as one. Each
//! transaction that joins adds its own dependencies to those of the batch. Dependencies inside the
//! batch are always met: they are applied earlier in the same local transaction.

/// Returns up to which transaction all must be committed before a transaction can join a batch that
/// starts with `first`; `None` if it can join. The transaction depends on all up to `through`, and
/// on `edges`; 0 is none. All up to `committed` are committed, and those of which `is_done` says
/// so.
///
/// The latest dependency alone does not suffice: that one may be in the batch, and another one
/// before it.
#[must_use]
pub fn missing(
    (through, edges): (u64, impl IntoIterator<Item = u64>),
    first: u64,
    committed: u64,
    is_done: impl Fn(u64) -> bool,
) -> Option<u64> {
    let missing = edges
        .into_iter()
        .filter(|edge| *edge != 0 && *edge < first && !is_done(*edge))
        .fold(through.min(first.saturating_sub(1)), u64::max);
    (committed < missing).then_some(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_the_batch_is_not_missing() {
        let done = |number| number == 7;
        assert_eq!(missing((0, []), 5, 2, done), None);
        assert_eq!(missing((0, [6, 5]), 5, 2, done), None);
        assert_eq!(missing((2, [0]), 5, 2, done), None);
        // One dependency before the batch, and a later one in it.
        assert_eq!(missing((0, [6, 4, 0]), 5, 2, done), Some(4));
        assert_eq!(missing((3, [6]), 5, 2, done), Some(3));
        assert_eq!(missing((6, []), 5, 2, done), Some(4));
        // Committed, although an earlier transaction is not.
        assert_eq!(missing((0, [7]), 8, 2, done), None);
        assert_eq!(missing((0, [7, 6]), 8, 2, done), Some(6));
    }
}
