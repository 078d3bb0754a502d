//! Remembers, in bounded memory, the row versions of other nodes that changes in WAL have replaced.
//! Run by the walsender, which reads the versions from its tables (`crates/plugin`).
//!
//! Invariant: [`ReplacedVersions`] gets its LSNs in ascending order, as WAL is read. Not for:
//! deciding whether a change and a row are concurrent (`bgworker`).

use std::collections::VecDeque;

/// Commit timestamp (PostgreSQL's) and origin number of the transaction that wrote a row.
pub type Written = (i64, u16);

/// Versions that changes have replaced, until the changes are sent.
#[derive(Debug)]
pub struct ReplacedVersions {
    /// LSN of each change, and the version that it replaced. Once taken, the origin is set to 0,
    /// which is never another node's.
    kept: VecDeque<(u64, i64, u16)>,
    /// Number of versions that are not taken.
    waiting: usize,
    limit: usize,
}

impl ReplacedVersions {
    /// Number of entries that stay allocated.
    const SMALL: usize = 4_096;

    /// Keeps at most `limit` versions: the newest of those that were not taken.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self {
            kept: VecDeque::new(),
            waiting: 0,
            limit,
        }
    }

    /// Records which version the change at `lsn` has replaced. Ignores a change that is not later
    /// than the last one.
    pub fn keep(&mut self, lsn: u64, version: Written) {
        let (timestamp, origin) = version;
        if origin == 0 || self.kept.back().is_some_and(|(last, ..)| *last >= lsn) {
            return;
        }
        if self.kept.len() >= self.limit {
            self.make_room();
        }
        self.kept.push_back((lsn, timestamp, origin));
        self.waiting += 1;
    }

    /// Returns the version that the change at `lsn` has replaced, once.
    #[inline]
    pub fn take(&mut self, lsn: u64) -> Option<Written> {
        if self.waiting == 0 {
            return None;
        }
        let at = self.kept.binary_search_by_key(&lsn, |(at, ..)| *at).ok()?;
        let (_, timestamp, origin) = self.kept.get_mut(at)?;
        let version = (*timestamp, std::mem::take(origin));
        if version.1 == 0 {
            return None;
        }
        self.waiting -= 1;
        if self.waiting == 0 {
            self.kept.clear();
            // A large transaction was sent: shrink the buffer.
            self.kept.shrink_to(Self::SMALL);
        }
        while matches!(self.kept.front(), Some((.., 0))) {
            self.kept.pop_front();
        }
        Some(version)
    }

    /// Drops the taken versions, and at least an eighth of all if that frees less, so that this is
    /// rare.
    fn make_room(&mut self) {
        self.kept.retain(|(.., origin)| *origin != 0);
        let most = self.limit - self.limit / 8 - 1;
        if self.kept.len() > most {
            self.kept.drain(..self.kept.len() - most);
        }
        self.waiting = self.kept.len();
    }
}

/// Cache of commit timestamps and origins of transactions.
#[derive(Debug, Default)]
pub struct Writers {
    /// Full transaction id, and the transaction's version. The id's last bits determine its place.
    places: Vec<(u64, Written)>,
}

impl Writers {
    /// Number of cached transactions, a power of two.
    const PLACES: usize = 4_096;

    /// Returns the version of the transaction with this full id, from the cache or from `ask`. Only
    /// an answer is cached, not the lack of one.
    #[inline]
    pub fn get(&mut self, id: u64, ask: impl FnOnce() -> Option<Written>) -> Option<Written> {
        if self.places.is_empty() {
            // No transaction has the id 0.
            self.places = vec![(0, (0, 0)); Self::PLACES];
        }
        let at = usize::try_from(id % Self::PLACES as u64).unwrap_or(0);
        let place = self.places.get_mut(at)?;
        if place.0 != id {
            *place = (id, ask()?);
        }
        Some(place.1)
    }
}

/// Returns the full id of transaction `xid`: the one with these low 32 bits that is nearest to
/// `near`. Transactions in rows are less than 2^31 away from the next one.
#[must_use]
pub const fn full_id(xid: u32, near: u64) -> u64 {
    let low = (near & 0xFFFF_FFFF) as u32;
    let distance = xid.wrapping_sub(low).cast_signed();
    near.wrapping_add_signed(distance as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_given_once_and_by_its_change_only() {
        let mut versions = ReplacedVersions::new(10);
        versions.keep(5, (50, 1));
        versions.keep(7, (70, 2));
        versions.keep(9, (90, 3));
        assert_eq!(versions.take(6), None);
        assert_eq!(versions.take(7), Some((70, 2)));
        assert_eq!(versions.take(7), None);
        assert_eq!(versions.take(9), Some((90, 3)));
        assert_eq!(versions.take(5), Some((50, 1)));
        assert!(versions.kept.is_empty());
    }

    #[test]
    fn no_more_than_the_limit_is_kept_and_the_oldest_go_first() {
        let mut versions = ReplacedVersions::new(64);
        for lsn in 1..=1_000 {
            versions.keep(lsn, (0, 1));
            assert!(versions.kept.len() <= 64);
        }
        assert_eq!(versions.take(1), None);
        assert!((1_000 - 55..=1_000).all(|lsn| versions.take(lsn).is_some()));
    }

    #[test]
    fn what_waits_long_is_not_driven_out_by_what_is_taken_at_once() {
        let mut versions = ReplacedVersions::new(64);
        versions.keep(1, (1, 1));
        for lsn in 2..=10_000 {
            versions.keep(lsn, (0, 1));
            assert!(versions.take(lsn).is_some());
            assert!(versions.kept.len() <= 64);
        }
        assert_eq!(versions.take(1), Some((1, 1)));
    }

    #[test]
    fn writers_are_told_apart_across_a_wraparound() {
        let mut writers = Writers::default();
        let first = full_id(7, 1 << 32);
        assert_eq!(writers.get(first, || Some((1, 1))), Some((1, 1)));
        assert_eq!(writers.get(first, || None), Some((1, 1)));
        let second = full_id(7, 2 << 32);
        assert_eq!(writers.get(second, || None), None);
        assert_eq!(writers.get(second, || Some((2, 2))), Some((2, 2)));
        assert_eq!(writers.get(first, || None), None);
    }

    #[test]
    fn a_full_id_is_the_nearest_one() {
        let near = (3 << 32) + 10;
        assert_eq!(full_id(10, near), near);
        assert_eq!(full_id(12, near), near + 2);
        assert_eq!(full_id(u32::MAX, near), (3 << 32) - 1);
        assert_eq!(full_id(3, (3 << 32) - 5), (3 << 32) + 3);
    }
}
