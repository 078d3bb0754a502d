//! Tables without a key, of which changes say whole rows (REPLICA IDENTITY FULL): a table is a bag
//! of rows, and nothing tells two that are identical apart. Run by the appliers.
//!
//! A change adds a row to the bag, takes one out of it (a *removal*), or both. What is added and
//! what is taken out may arrive in any order: a removal takes a row that is older than itself, and
//! where there is none yet it is remembered, with its version, for the row that it was meant for.
//! That one is older than the removal, so it is told from a row that was added again later. Each
//! removal counts once.
//!
//! How many identical rows there are is what is left when all that was added and all removals are
//! gone through in the order of their versions: one more for each that is added, one less for each
//! removal that meets any; none after a truncate. So it is the same in whatever order they arrive,
//! and whichever of them a session has taken. Not matched are the rows that are here, and removals
//! that are remembered for none. Each other removal has taken a row that is older than itself:
//! which one is remembered too ([`Taken`]), since an older removal may come that was to have it.
//! That leaves the removal which it had without a row, and so on ([`handed_on`]); the last one
//! takes a row that is here, or is the one that is remembered for a row to come. Where a truncate
//! comes late, removals that are newer and have taken rows that are older are without one, too.
//! What a transaction adds and takes out again itself is left out of this: it takes its own row
//! before any other one.

use crate::conflict::Version;

/// Whether a change takes out an identical row that is here. `from_origin` as in
/// [`crate::conflict::decide_update`].
#[must_use]
pub fn takes(row: Version<'_>, change: Version<'_>, from_origin: bool) -> bool {
    (from_origin && row.origin == change.origin) || row < change
}

/// Whether a removal that has found no row was meant for the one that comes now.
#[must_use]
pub fn was_meant_for(removal: Version<'_>, row: Version<'_>, from_origin: bool) -> bool {
    // Straight from its origin everything comes in order: what comes after the removal was added
    // after it.
    let in_order = from_origin && removal.origin == row.origin;
    !in_order && row < removal
}

/// Of removals that have found no row, the one that counts for a row that comes now: the oldest
/// that was meant for it.
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

/// A row that was taken out, and what took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken<'a> {
    /// The version of the row; `None`: older than all.
    pub row: Option<Version<'a>>,
    /// That of the removal.
    pub removal: Version<'a>,
}

/// A removal finds no older row here: places in `taken`, of identical rows, of those that change
/// hands. The first one's row goes to the removal, each other one's to the removal that has lost
/// its row before it. That of the last has none then. Where there is no place, the removal itself
/// has none. Each time it is the newest removal of those whose row is older than the one without.
/// Takes as long as to sort them.
#[must_use]
pub fn handed_on(taken: &[Taken<'_>], removal: Version<'_>) -> Vec<usize> {
    let mut by_row: Vec<(usize, &Taken<'_>)> = taken.iter().enumerate().collect();
    by_row.sort_unstable_by_key(|(_, taken)| taken.row);
    let mut later = by_row.into_iter().peekable();
    let mut newest: Option<(usize, Version<'_>)> = None;
    let mut hands = Vec::new();
    let mut without = removal;
    loop {
        let is_older = |(_, taken): &(usize, &Taken<'_>)| taken.row.is_none_or(|row| row < without);
        while let Some((place, taken)) = later.next_if(is_older) {
            if newest.is_none_or(|(_, known)| taken.removal > known) {
                newest = Some((place, taken.removal));
            }
        }
        match newest {
            Some((place, next)) if next > without => {
                without = next;
                hands.push(place);
            }
            _ => return hands,
        }
    }
}

/// How many of `hands` change hands when a row is here that is older than the last one's removal:
/// up to the first removal that may take the row.
#[must_use]
pub fn hands_up_to(taken: &[Taken<'_>], hands: &[usize], row: Option<Version<'_>>) -> usize {
    let may_take = |place: &usize| {
        let removal = taken.get(*place).map(|taken| taken.removal);
        removal.is_some_and(|removal| row.is_none_or(|row| row < removal))
    };
    hands
        .iter()
        .position(may_take)
        .map_or(hands.len(), |at| at + 1)
}
