//! The provider's transactions that had ended when a table was copied.
//!
//! The position of a commit tells whether a table's copy contains it: the copy has everything that
//! committed before its own position. A transaction that was prepared before the copy's position
//! may have committed before or after it, which is not known when it is applied. The provider's
//! snapshot, under which the table was copied, tells: the copy does not contain transactions that
//! were in progress then. A transaction is in progress, without a gap, from when it gets its id
//! until the record of its end is written. `pg_prepared_xacts` does not suffice: it shows a
//! transaction only some time after its PREPARE was written, which may have been decoded by then.
//! Transaction ids are compared as in PostgreSQL, modulo 2^32.

/// A snapshot of the provider, from the text form of `pg_snapshot`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderSnapshot {
    xmin: u32,
    xmax: u32,
    running: Vec<u32>,
}

fn low(text: &str) -> Option<u32> {
    let full: u64 = text.parse().ok()?;
    u32::try_from(full & 0xffff_ffff).ok()
}

/// TransactionIdPrecedes of src/backend/access/transam/transam.c, for normal ids.
fn precedes(one: u32, other: u32) -> bool {
    one.wrapping_sub(other).cast_signed() < 0
}

/// Returns a snapshot's text in a form that `pg_snapshot` accepts as input.
///
/// The snapshot of a new slot may have an xmax below its xmin (`SnapBuildInitialSnapshot` of
/// src/backend/replication/logical/snapbuild.c), since xmax only follows transactions that changed
/// catalogs. Everything before xmin is visible; nothing was in progress.
#[must_use]
pub fn ordered(text: &str) -> String {
    let mut parts = text.splitn(3, ':');
    let mut full = || parts.next()?.parse::<u64>().ok();
    match (full(), full(), parts.next()) {
        (Some(xmin), Some(xmax), Some(_)) if xmax < xmin => format!("{xmin}:{xmin}:"),
        _ => text.to_owned(),
    }
}

impl ProviderSnapshot {
    /// Parses `xmin:xmax:xip_list`; `None` for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, ':');
        let (xmin, xmax) = (low(parts.next()?)?, low(parts.next()?)?);
        let running = parts
            .next()?
            .split(',')
            .filter(|id| !id.is_empty())
            .map(low)
            .collect::<Option<Vec<_>>>()?;
        Some(Self {
            xmin,
            xmax,
            running,
        })
    }

    /// Returns whether this transaction had ended when the snapshot was taken: the record of its
    /// end was written.
    #[must_use]
    pub fn sees(&self, xid: u32) -> bool {
        precedes(xid, self.xmin) || (precedes(xid, self.xmax) && !self.running.contains(&xid))
    }
}

#[cfg(test)]
mod tests {
    use super::{ProviderSnapshot, ordered};

    #[test]
    fn what_ran_is_not_seen() {
        let snapshot = ProviderSnapshot::parse("10:20:10,14,15").unwrap();
        for (xid, seen) in [
            (9, true),
            (10, false),
            (11, true),
            (14, false),
            (15, false),
            (19, true),
            (20, false),
            (21, false),
        ] {
            assert_eq!(snapshot.sees(xid), seen, "{xid}");
        }
    }

    #[test]
    fn ids_wrap_around() {
        // 2^32 + 5 appears as 5 in the stream.
        let snapshot = ProviderSnapshot::parse("4294967290:4294967301:4294967295").unwrap();
        assert!(snapshot.sees(4_294_967_289));
        assert!(!snapshot.sees(u32::MAX));
        assert!(snapshot.sees(4));
        assert!(!snapshot.sees(5));
    }

    #[test]
    fn one_that_ends_before_it_begins_is_put_right() {
        assert_eq!(ordered("12716:12715:"), "12716:12716:");
        for text in ["10:20:10,14,15", "3:3:", "", "1:0"] {
            assert_eq!(ordered(text), text);
        }
        let snapshot = ProviderSnapshot::parse(&ordered("12716:12715:")).unwrap();
        assert!(snapshot.sees(12715));
        assert!(!snapshot.sees(12716));
    }

    #[test]
    fn anything_else_is_refused() {
        assert!(ProviderSnapshot::parse("3:3:").is_some());
        for text in ["", "1", "1:2", "a:2:", "1:2:x", "1:2:3,,x", "-1:2:"] {
            assert_eq!(ProviderSnapshot::parse(text), None, "{text}");
        }
    }
}
