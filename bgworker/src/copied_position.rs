//! What the copy of a table has of another node's transactions, where that node's own stream brings
//! them here as well.
//!
//! The provider says it at a moment when nobody can write to the table: how far it has applied the
//! other node's transactions, which ones beyond that, and which ones it has set aside. Positions
//! are those of the other node's WAL, the same for all who read it. So each transaction is known by
//! where its commit record starts, and is in the copy or is not.

use braid_gir::parse_lsn;

/// Of one node's transactions, those that a copy has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopiedPosition {
    /// All whose commit records start before this.
    up_to: u64,
    /// And those that start in one of these: from the first position to before the second.
    beyond: Vec<(u64, u64)>,
    /// Without those that start at one of these.
    missing: Vec<u64>,
}

impl CopiedPosition {
    /// From positions as PostgreSQL writes them: one; pairs; any number. The lists are separated by
    /// commas. `None` for anything else.
    #[must_use]
    pub fn parse(up_to: &str, beyond: &str, missing: &str) -> Option<Self> {
        let list = |text: &str| -> Option<Vec<u64>> {
            let each = text.split(',').filter(|lsn| !lsn.is_empty());
            each.map(parse_lsn).collect()
        };
        let beyond = list(beyond)?;
        let (pairs, rest) = beyond.as_chunks::<2>();
        rest.is_empty().then_some(Self {
            up_to: parse_lsn(up_to)?,
            beyond: pairs.iter().map(|[begin, end]| (*begin, *end)).collect(),
            missing: list(missing)?,
        })
    }

    /// Whether a transaction is in the copy whose commit record starts at `commit_lsn`.
    #[must_use]
    pub fn has(&self, commit_lsn: u64) -> bool {
        let is_applied = commit_lsn < self.up_to
            || self
                .beyond
                .iter()
                .any(|(begin, end)| (*begin..*end).contains(&commit_lsn));
        is_applied && !self.missing.contains(&commit_lsn)
    }

    /// No transaction that commits at `lsn` or later is in the copy.
    #[must_use]
    pub fn ends_before(&self, lsn: u64) -> bool {
        self.end() <= lsn
    }

    /// Up to where it says anything.
    #[must_use]
    pub fn end(&self) -> u64 {
        let beyond = self.beyond.iter().map(|(_, end)| *end).max().unwrap_or(0);
        self.up_to.max(beyond)
    }
}

#[cfg(test)]
mod tests {
    use super::CopiedPosition;

    #[test]
    fn a_transaction_is_known_by_where_its_commit_record_starts() {
        let copied =
            CopiedPosition::parse("0/100", "0/120,0/130,0/150,0/160", "0/80,0/125").unwrap();
        for (lsn, has) in [
            (0x00, true),
            (0x80, false),
            (0xff, true),
            (0x100, false),
            (0x11f, false),
            (0x120, true),
            (0x125, false),
            (0x12f, true),
            (0x130, false),
            (0x150, true),
            (0x160, false),
        ] {
            assert_eq!(copied.has(lsn), has, "{lsn:x}");
        }
        assert_eq!(copied.end(), 0x160);
        assert!(copied.ends_before(0x160) && !copied.ends_before(0x15f));
    }

    #[test]
    fn lists_may_be_empty_and_pairs_are_whole() {
        let copied = CopiedPosition::parse("1/0", "", "").unwrap();
        assert!(copied.has(u64::from(u32::MAX)) && !copied.has(1 << 32));
        assert_eq!(CopiedPosition::parse("1/0", "1/1", ""), None);
        assert_eq!(CopiedPosition::parse("", "", ""), None);
        assert_eq!(CopiedPosition::parse("1/0", "", "x"), None);
    }
}
