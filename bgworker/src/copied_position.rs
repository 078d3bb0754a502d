//! The transactions of a third node that a table's copy contains, if that node's own stream
//! delivers them too.
//!
//! The provider reports three things at a moment when nobody can write to the table: how far it has
//! applied the third node's transactions, which later ones it has applied, and which ones it has
//! parked. Positions are those of the third node's WAL, and mean the same to everyone who reads it.
//! So the start of a transaction's commit record tells whether the copy contains it.

use braid_gir::parse_lsn;

/// The transactions of one node that a copy contains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopiedPosition {
    /// The copy contains all transactions whose commit records start before this LSN,
    up_to: u64,
    /// and those that start in one of these half-open intervals,
    beyond: Vec<(u64, u64)>,
    /// without those that start at one of these LSNs.
    missing: Vec<u64>,
}

impl CopiedPosition {
    /// Parses LSNs in PostgreSQL's format: `up_to` is one, `beyond` are pairs, `missing` is any
    /// number. The lists are separated by commas. `None` for anything else.
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

    /// Returns whether the copy contains the transaction whose commit record starts at
    /// `commit_lsn`.
    #[must_use]
    pub fn has(&self, commit_lsn: u64) -> bool {
        let is_applied = commit_lsn < self.up_to
            || self
                .beyond
                .iter()
                .any(|(begin, end)| (*begin..*end).contains(&commit_lsn));
        is_applied && !self.missing.contains(&commit_lsn)
    }

    /// Returns whether the copy contains no transaction that commits at `lsn` or later.
    #[must_use]
    pub fn ends_before(&self, lsn: u64) -> bool {
        self.end() <= lsn
    }

    /// Returns the LSN from which on the copy contains no transaction.
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
