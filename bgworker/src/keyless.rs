//! Tables without a key, whose changes carry whole rows (REPLICA IDENTITY FULL). Such a table is a
//! multiset of rows: identical rows cannot be distinguished. Run by the appliers.
//!
//! Example: A inserts a row, and B, which has received it, deletes it. The deletion reaches C
//! before the insert. If C did not remember the deletion, C alone would end with the row.
//!
//! A change adds a row, removes one (a *removal*), or both. Additions and removals may arrive in
//! any order. A removal takes a row that is older than itself. If there is none yet, the removal is
//! remembered with its version, until the row that it was meant for arrives. That row is older than
//! the removal, which distinguishes it from a row that was added again later. Each removal counts
//! once.
//!
//! The number of identical rows is defined by replaying all additions and removals in version
//! order: an addition adds one, a removal deletes one if there is one, a truncate deletes all. So
//! the number does not depend on the order of arrival, nor on which of the identical rows a session
//! deleted. Rows in the table and removals that are remembered for no row are unmatched. Every
//! other removal has taken a row that is older than itself. That match is remembered too
//! ([`Taken`]), since an older removal may arrive later that should have had the row. Then the
//! later removal loses its row and takes another one's, and so on ([`handed_on`]). The last removal
//! of this chain takes a row of the table, or is remembered for a row to come. If a truncate
//! arrives late, newer removals that have taken older rows lose their rows, too.
//!
//! A transaction that adds and removes a row itself is left out of all this: it removes its own row
//! before any other one.

use crate::conflict::Version;

/// Returns whether a change removes an identical local row. `from_origin` as in
/// [`crate::conflict::decide_update`].
#[must_use]
pub fn takes(row: Version<'_>, change: Version<'_>, from_origin: bool) -> bool {
    (from_origin && row.origin == change.origin) || row < change
}

/// Returns whether a removal that has found no row was meant for a row that arrives now.
#[must_use]
pub fn was_meant_for(removal: Version<'_>, row: Version<'_>, from_origin: bool) -> bool {
    // Straight from their origin, changes arrive in order: a row that arrives after the removal was
    // added after it.
    let in_order = from_origin && removal.origin == row.origin;
    !in_order && row < removal
}

/// Returns the index of the removal that counts for a row that arrives now: the oldest of those
/// that have found no row and were meant for it.
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

/// A row that was removed, and the removal that took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken<'a> {
    /// Version of the row; `None`: older than all.
    pub row: Option<Version<'a>>,
    /// Version of the removal.
    pub removal: Version<'a>,
}

/// Resolves a removal R that finds no older row in the table. Returns indices into `taken` (matches
/// of identical rows): the removals that give up their rows. The first one's row goes to R, each
/// other one's to the removal before it in the list. The last removal is then without a row; R
/// itself is if the list is empty. Each removal in the list is the newest whose row is older than
/// the removal that needs one. Takes as long as sorting `taken`.
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

/// Returns how many of `hands` give up their rows if the table has this row: those up to the first
/// removal that may take it.
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
