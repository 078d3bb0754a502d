//! The counters of the published algorithm, for comparison: they count reads too.
//!
//! Distributed Versioning (Amza, Cox, Zwaenepoel, Middleware 2003), as a project report tells it,
//! sections 2.2 and 2.3. One counter a table:
//!
//! - A read waits for the version that the last write *produced*, and adds one to the counter.
//!   (The report's text says "the last version number assigned to a write". Its figure 1 shows the
//!   produced version, and only that lets a read see the write.)
//! - A write waits for the whole counter, so for all reads before it too, and adds one.
//!
//! Braid counts writes only; [`crate::Grant`] says why. Nothing but tests and documents uses this
//! module.

use crate::grant::Access;

/// The counter of one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReportCounter {
    version: u64,
    written: u64,
}

/// What one transaction gets for the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportVersion {
    /// The version that a replica of the table must have reached.
    pub assigned: u64,
    /// The version of the table once all transactions up to this one have ended.
    pub produced: u64,
}

impl ReportCounter {
    /// Returns the next transaction's versions, and the counter after it.
    #[must_use]
    pub const fn assign(self, access: Access) -> (ReportVersion, Self) {
        let produced = self.version.saturating_add(1);
        let (assigned, written) = match access {
            Access::Read => (self.written, self.written),
            Access::Write => (self.version, produced),
        };
        let counter = Self {
            version: produced,
            written,
        };
        (ReportVersion { assigned, produced }, counter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figure 1. It names eight operations and prints nine columns: the column (4, 7) is there
    /// twice. No operation produces a version that was produced before, so one of them is a
    /// misprint.
    #[test]
    fn figure_1() {
        use Access::{Read as R, Write as W};
        let mut counter = ReportCounter::default();
        let (mut assigned, mut produced) = (Vec::new(), Vec::new());
        for access in [W, W, R, W, R, R, R, W] {
            let (version, next) = counter.assign(access);
            assigned.push(version.assigned);
            produced.push(version.produced);
            counter = next;
        }
        assert_eq!(assigned, [0, 1, 2, 3, 4, 4, 4, 7]);
        assert_eq!(produced, [1, 2, 3, 4, 5, 6, 7, 8]);
        let mut printed: Vec<(u64, u64)> = [0, 1, 2, 3, 4, 4, 4, 4, 7]
            .into_iter()
            .zip([1, 2, 3, 4, 5, 6, 7, 7, 8])
            .collect();
        printed.dedup();
        let ours: Vec<(u64, u64)> = assigned.into_iter().zip(produced).collect();
        assert_eq!(ours, printed);
    }
}
