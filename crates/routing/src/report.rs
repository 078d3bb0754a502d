//! Bytes of what the balancer sends: the counts of a node, for the group's leader, and a decision,
//! for the group's log.
//!
//! A report begins with `braid load` (10), format (u8, 1), group (16), sender (u64) and the table;
//! then total (u64), floor (u64), and for each counter the tenant, count (u64) and error (u64). A
//! report that would be longer than [`REPORT_LIMIT`] leaves out the smallest counts; its floor is
//! then at least as large as the largest of these.
//!
//! A decision is format (u8, 1), table, time (i64), whether it adds the rule (bool), period (u64,
//! microseconds), basis (u8), total (u64), floor (u64), threshold (u32), shards (u32), spread
//! (u32), and for each tenant the tenant, amount (u64), error (u64), periods (u32) and former
//! spread (u32).
//!
//! All numbers are big-endian; tables and tenants come after their length (u32).

use std::time::Duration;

use braid_codec::{Malformed, Reader, Writer};

use crate::balancer::{Basis, Decision, Finding, Proposal};
use crate::entry::{TABLE_LIMIT, TableName};
use crate::hash::{TENANT_LIMIT, Tenant};
use crate::map::NodeId;
use crate::rules::{Shards, Spread, Time};
use crate::sketch::{COUNTERS_LIMIT, Counter, Sketch};

/// The longest report, in bytes.
pub const REPORT_LIMIT: usize = 32 * 1024;
/// The longest decision, in bytes. It fits into an entry of the group's log.
pub const DECISION_LIMIT: usize = 48 * 1024;

const MAGIC: &[u8; 10] = b"braid load";
const FORMAT: u8 = 1;
/// Bytes of a decision besides its tenants, and of a tenant besides its name, at most.
const DECISION_HEAD: usize = 64 + TABLE_LIMIT;
const FINDING: usize = 28;

/// The counts of a node for one table since its last report.
#[derive(Debug, Clone)]
pub struct Report {
    /// The group.
    pub group: [u8; 16],
    /// The node.
    pub from: NodeId,
    /// The table.
    pub table: TableName,
    /// Writes by tenant.
    pub counts: Sketch,
}

impl Report {
    /// Whether a message is a report: others are of the group's agreement.
    #[must_use]
    pub fn is_one(message: &[u8]) -> bool {
        message.starts_with(MAGIC)
    }

    /// The report's bytes: at most [`REPORT_LIMIT`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.len() + 1 + 16 + 8 + 4 + self.table.as_bytes().len() + 16 + 4;
        let counters = self.counts.largest(COUNTERS_LIMIT);
        let fits = |counter: &&&Counter| {
            bytes += 4 + counter.tenant.canonical().len() + 16;
            bytes <= REPORT_LIMIT
        };
        let sent = counters.iter().take_while(fits).count();
        let left_out = counters.get(sent).map_or(0, |counter| counter.count);
        let mut w = Writer::new();
        w.raw(MAGIC).u8(FORMAT).raw(&self.group).u64(self.from.0);
        w.bytes(self.table.as_bytes()).u64(self.counts.total());
        w.u64(self.counts.floor().max(left_out)).count(sent);
        for counter in counters.into_iter().take(sent) {
            w.bytes(counter.tenant.canonical());
            w.u64(counter.count).u64(counter.error);
        }
        w.done()
    }

    /// The report of these bytes, with room for so many counters.
    ///
    /// # Errors
    /// [`Malformed`] for bytes that are none.
    pub fn decode(bytes: &[u8], counters: usize) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "report of the balancer");
        if bytes.len() > REPORT_LIMIT || r.raw(MAGIC.len())? != MAGIC {
            return Err(r.invalid());
        }
        let version = r.u8()?;
        if version != FORMAT {
            return Err(r.unknown(version));
        }
        let group = r.array()?;
        let from = NodeId(r.u64()?);
        let table = TableName::new(r.bytes(TABLE_LIMIT)?)?;
        let (total, floor) = (r.u64()?, r.u64()?);
        let mut read = Vec::new();
        for _ in 0..r.count(COUNTERS_LIMIT)? {
            let tenant = tenant(&mut r)?;
            let (count, error) = (r.u64()?, r.u64()?);
            read.push(Counter {
                tenant,
                count,
                error,
            });
        }
        r.end()?;
        let counts = Sketch::of(counters, total, floor, read);
        Ok(Self {
            group,
            from,
            table,
            counts,
        })
    }
}

fn tenant(r: &mut Reader<'_>) -> Result<Tenant, Malformed> {
    Tenant::from_canonical(r.bytes(TENANT_LIMIT)?).map_err(|_| Malformed::Invalid("tenant"))
}

/// A decision, as the group's log has it: one rule, and what it was decided from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decided {
    /// The table.
    pub table: TableName,
    /// When it was decided.
    pub time: Time,
    /// Whether the rule is added; else it is advice.
    pub adds: bool,
    /// How long writes were counted, in microseconds; 0 for storage.
    pub period: u64,
    /// The decision, with one rule, and without the time on its maker's clock.
    pub decision: Decision,
}

impl Decided {
    /// The entries of a decision: one for each rule, and several for a rule with very many tenants.
    #[must_use]
    pub fn of(
        table: &TableName,
        time: Time,
        adds: bool,
        period: Duration,
        decision: &Decision,
    ) -> Vec<Self> {
        let period = match decision.basis {
            Basis::Storage => 0,
            Basis::Writes => u64::try_from(period.as_micros()).unwrap_or(u64::MAX),
        };
        let mut entries = Vec::new();
        for rule in &decision.rules {
            let mut parts: Vec<Vec<Finding>> = Vec::new();
            let mut bytes = 0;
            for finding in &rule.findings {
                let more = FINDING + finding.tenant.canonical().len();
                match parts.last_mut() {
                    Some(part) if bytes + more <= DECISION_LIMIT - DECISION_HEAD => {
                        bytes += more;
                        part.push(finding.clone());
                    }
                    _ => {
                        bytes = more;
                        parts.push(vec![finding.clone()]);
                    }
                }
            }
            entries.extend(parts.into_iter().map(|findings| Self {
                table: table.clone(),
                time,
                adds,
                period,
                decision: Decision {
                    at: Duration::ZERO,
                    rules: vec![Proposal {
                        spread: rule.spread,
                        findings,
                    }],
                    ..decision.clone()
                },
            }));
        }
        entries
    }

    /// The rule.
    #[must_use]
    pub fn rule(&self) -> Option<&Proposal> {
        self.decision.rules.first()
    }

    /// The decision's bytes.
    ///
    /// # Errors
    /// [`Malformed`] if it does not have one rule, or is too long.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        let Decision {
            basis,
            total,
            floor,
            threshold,
            shards,
            rules,
            ..
        } = &self.decision;
        let [rule] = rules.as_slice() else {
            return Err(Malformed::Invalid("number of rules"));
        };
        let mut w = Writer::new();
        w.u8(FORMAT).bytes(self.table.as_bytes()).i64(self.time.0);
        w.bool(self.adds).u64(self.period);
        w.u8(match basis {
            Basis::Storage => 1,
            Basis::Writes => 2,
        });
        w.u64(*total).u64(*floor).u32(*threshold).u32(shards.get());
        w.u32(rule.spread.get()).count(rule.findings.len());
        for finding in &rule.findings {
            w.bytes(finding.tenant.canonical());
            w.u64(finding.amount).u64(finding.error);
            w.u32(finding.periods).u32(finding.had.get());
        }
        let bytes = w.done();
        if bytes.len() > DECISION_LIMIT {
            return Err(Malformed::TooLong {
                what: "decision of the balancer",
                limit: DECISION_LIMIT,
            });
        }
        Ok(bytes)
    }

    /// The decision of these bytes.
    ///
    /// # Errors
    /// [`Malformed`] for bytes that are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::versioned(bytes, "decision of the balancer", FORMAT)?;
        if bytes.len() > DECISION_LIMIT {
            return Err(r.invalid());
        }
        let spread = |spread| Spread::new(spread).map_err(|_| Malformed::Invalid("spread"));
        let table = TableName::new(r.bytes(TABLE_LIMIT)?)?;
        let time = Time(r.i64()?);
        let (adds, period) = (r.bool()?, r.u64()?);
        let basis = match r.u8()? {
            1 => Basis::Storage,
            2 => Basis::Writes,
            other => return Err(r.unknown(other)),
        };
        let (total, floor, threshold) = (r.u64()?, r.u64()?, r.u32()?);
        let shards = Shards::new(r.u32()?).map_err(|_| Malformed::Invalid("shards"))?;
        let wanted = spread(r.u32()?)?;
        let mut findings = Vec::new();
        for _ in 0..r.count(COUNTERS_LIMIT)? {
            findings.push(Finding {
                tenant: tenant(&mut r)?,
                amount: r.u64()?,
                error: r.u64()?,
                periods: r.u32()?,
                had: spread(r.u32()?)?,
            });
        }
        r.end()?;
        Ok(Self {
            table,
            time,
            adds,
            period,
            decision: Decision {
                at: Duration::ZERO,
                basis,
                total,
                floor,
                threshold,
                shards,
                rules: vec![Proposal {
                    spread: wanted,
                    findings,
                }],
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::{DECISION_LIMIT, Decided, REPORT_LIMIT, Report};
    use crate::balancer::{Basis, Decision, Finding, Proposal};
    use crate::entry::TableName;
    use crate::hash::{TENANT_LIMIT, Tenant};
    use crate::key::Key;
    use crate::map::NodeId;
    use crate::rules::{Shards, Spread, Time};
    use crate::sketch::Sketch;

    fn tenant(number: usize, length: usize) -> Tenant {
        Tenant::new(&Key::Text(&format!("{number:0length$}"))).unwrap()
    }

    fn report(count: usize, length: usize) -> Report {
        let mut counts = Sketch::new(2_048);
        for number in 0..count {
            let tenant = tenant(number, length);
            let writes = u64::try_from(number % 100 + 1).unwrap();
            counts.add(tenant.tenant_hash(), writes, || tenant);
        }
        Report {
            group: [7; 16],
            from: NodeId(3),
            table: TableName::of("public", "orders").unwrap(),
            counts,
        }
    }

    fn decision(tenants: usize, length: usize, spreads: &[u32]) -> Decision {
        let rules = spreads.iter().map(|spread| Proposal {
            spread: Spread::new(*spread).unwrap(),
            findings: (0..tenants)
                .map(|number| Finding {
                    tenant: tenant(number, length),
                    amount: 100,
                    error: 3,
                    periods: 2,
                    had: Spread::ONE,
                })
                .collect(),
        });
        Decision {
            at: Duration::ZERO,
            basis: Basis::Writes,
            total: 1_000,
            floor: 4,
            threshold: 500,
            shards: Shards::new(64).unwrap(),
            rules: rules.collect(),
        }
    }

    #[test]
    fn reports_come_back() {
        for (count, length) in [(0, 1), (1, 1), (100, 8), (2_048, 8), (300, 500)] {
            let report = report(count, length);
            let bytes = report.encode();
            assert!(Report::is_one(&bytes));
            assert!(bytes.len() <= REPORT_LIMIT);
            let read = Report::decode(&bytes, 2_048).unwrap();
            assert_eq!((read.group, read.from), (report.group, report.from));
            assert_eq!(read.table, report.table);
            assert_eq!(read.counts.total(), report.counts.total());
            for (hash, counter) in report.counts.counters() {
                match read.counts.counter(hash) {
                    Some(came) => assert_eq!(came, counter),
                    None => assert!(counter.count <= read.counts.floor()),
                }
            }
            assert_eq!(read.encode(), bytes);
            for length in 0..bytes.len().min(300) {
                assert!(Report::decode(&bytes[..length], 10).is_err());
            }
        }
        assert!(!Report::is_one(b"braid group"));
    }

    #[test]
    fn decisions_come_back() {
        let table = TableName::of("public", "orders").unwrap();
        let period = Duration::from_secs(1);
        for (tenants, length, spreads, least) in [
            (1, 1, &[8][..], 1),
            (3, 4, &[64, 8], 2),
            (5_000, 8, &[8], 2),
            (200, TENANT_LIMIT - 1, &[8, 4], 4),
        ] {
            let decision = decision(tenants, length, spreads);
            let entries = Decided::of(&table, Time(5), true, period, &decision);
            assert!(entries.len() >= least);
            let mut count = 0;
            for entry in entries {
                let bytes = entry.encode().unwrap();
                assert!(bytes.len() <= DECISION_LIMIT);
                assert_eq!(Decided::decode(&bytes).unwrap(), entry);
                count += entry.rule().unwrap().findings.len();
                for length in 0..bytes.len().min(200) {
                    assert!(Decided::decode(&bytes[..length]).is_err());
                }
            }
            assert_eq!(count, tenants * spreads.len());
        }
        let two = Decided {
            decision: decision(1, 1, &[4, 2]),
            ..Decided::of(&table, Time(5), true, period, &decision(1, 1, &[4])).remove(0)
        };
        assert!(two.encode().is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..200), flip in any::<usize>(), to in any::<u8>()) {
            let _ = Report::decode(&bytes, 10);
            let _ = Decided::decode(&bytes);
            let mut report = report(5, 3).encode();
            let place = flip % report.len();
            report[place] = to;
            let _ = Report::decode(&report, 10);
            let table = TableName::of("public", "orders").unwrap();
            let entry = Decided::of(&table, Time(5), true, Duration::from_secs(1), &decision(3, 3, &[4])).remove(0);
            let mut bytes = entry.encode().unwrap();
            let place = flip % bytes.len();
            bytes[place] = to;
            let _ = Decided::decode(&bytes);
        }
    }
}
