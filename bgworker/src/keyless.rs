//! Tables without a key, of which changes say whole rows (REPLICA IDENTITY FULL): a table is a bag of rows, and nothing tells two that are
//! identical apart. Run by the appliers.
//!
//! A change adds a row to the bag, takes one out of it (a *removal*), or both. What is added and what is taken out may arrive in any
//! order: a removal takes a row that is older than itself, and where there is none yet it is remembered, with its version, for the row that it was
//! meant for. That one is older than the removal, so it is told from a row that was added again later. Each removal counts once.
//!
//! Which of several identical rows a session takes out is not in WAL. Nodes agree about how many there are unless identical rows
//! are added and taken out at different nodes at the same time.

use crate::conflict::Version;

/// Whether a change takes out an identical row that is here. `from_origin` as in [`crate::conflict::decide_update`].
#[must_use]
pub fn takes(row: Version<'_>, change: Version<'_>, from_origin: bool) -> bool {
    (from_origin && row.origin == change.origin) || row < change
}

/// Whether a removal that has found no row was meant for the one that comes now.
#[must_use]
pub fn was_meant_for(removal: Version<'_>, row: Version<'_>, from_origin: bool) -> bool {
    // Straight from its origin everything comes in order: what comes after the removal was added after it.
    let in_order = from_origin && removal.origin == row.origin;
    !in_order && row < removal
}

/// Of removals that have found no row, the one that counts for a row that comes now: the oldest that was meant for it.
#[must_use]
pub fn removal_of(removals: &[Version<'_>], row: Version<'_>, from_origin: bool) -> Option<usize> {
    let meant = removals
        .iter()
        .enumerate()
        .filter(|(_, removal)| was_meant_for(**removal, row, from_origin));
    meant
        .min_by_key(|(_, removal)| **removal)
        .map(|(place, _)| place)
}
