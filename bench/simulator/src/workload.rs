//! Traces: for each transaction, its size in bytes and its changes' tables, operations and key
//! hashes. Generated for the workloads of the benchmarks, or read from a file that was recorded at
//! a provider.
//!
//! A line of text is a transaction: bytes, then each change as `operation:table:hash[,hash]`,
//! separated by blanks. The operation is `i`, `u` or `d`; `U` and `D` have a barrier on their
//! table. Hashes are hexadecimal. The first one is of the key that finds the row.

use std::fmt::Write;

/// Operation of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Inserts a row.
    Insert,
    /// Updates one.
    Update,
    /// Deletes one.
    Delete,
}

/// A change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Number of the table.
    pub table: u32,
    /// Operation.
    pub operation: Operation,
    /// Whether the change is ordered with every other change of its table.
    pub barrier: bool,
    /// Hashes of the row's keys (the writeset).
    pub hashes: Vec<u64>,
}

/// A transaction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction {
    /// Changes, in order.
    pub changes: Vec<Change>,
    /// Bytes that are sent.
    pub bytes: u32,
}

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Workload {
    /// Inserts of one row.
    Single,
    /// sysbench's `oltp_write_only`: delete, insert, two updates, uniform over a million rows.
    Sysbench,
    /// pgbench's TPC-B, at this scale factor.
    TpcB(u32),
    /// Updates of one row, by a Zipf distribution with this exponent over ten tables of 100,000
    /// rows.
    Zipf(f64),
}

impl Workload {
    /// The workloads that are simulated.
    pub const ALL: [Self; 6] = [
        Self::Single,
        Self::Sysbench,
        Self::TpcB(10),
        Self::Zipf(0.0),
        Self::Zipf(1.0),
        Self::Zipf(2.0),
    ];

    /// Returns the name of the workload.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Single => "single".to_owned(),
            Self::Sysbench => "sysbench".to_owned(),
            Self::TpcB(scale) => format!("tpcb-{scale}"),
            Self::Zipf(exponent) => format!("zipf-{exponent}"),
        }
    }

    /// Returns the workload of a name: one of the above, with any scale and exponent.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        match name.split_once('-') {
            None if name == "single" => Some(Self::Single),
            None if name == "sysbench" => Some(Self::Sysbench),
            Some(("tpcb", scale)) => scale
                .parse()
                .ok()
                .filter(|scale| *scale > 0)
                .map(Self::TpcB),
            Some(("zipf", exponent)) => exponent.parse().ok().map(Self::Zipf),
            _ => None,
        }
    }

    /// Returns a trace of `transactions` transactions, the same each time.
    #[must_use]
    pub fn trace(self, transactions: usize) -> Vec<Transaction> {
        let mut random = Random(1);
        match self {
            Self::Single => (0..transactions)
                .map(|row| of(vec![change(Operation::Insert, 0, row as u64)], 126))
                .collect(),
            Self::Sysbench => (0..transactions)
                .map(|_| {
                    let mut row = || random.below(1_000_000);
                    let (deleted, first, second) = (row(), row(), row());
                    let changes = vec![
                        change(Operation::Update, 0, first),
                        change(Operation::Update, 0, second),
                        change(Operation::Delete, 0, deleted),
                        change(Operation::Insert, 0, deleted),
                    ];
                    of(changes, 726)
                })
                .collect(),
            Self::TpcB(scale) => {
                let scale = u64::from(scale);
                (0..transactions)
                    .map(|row| {
                        let changes = vec![
                            change(Operation::Update, 0, random.below(scale * 100_000)),
                            change(Operation::Update, 1, random.below(scale * 10)),
                            change(Operation::Update, 2, random.below(scale)),
                            keyless(3, row),
                        ];
                        of(changes, 272)
                    })
                    .collect()
            }
            Self::Zipf(exponent) => {
                let rows = Zipf::new(100_000, exponent);
                (0..transactions)
                    .map(|_| {
                        let table = u32::try_from(random.below(10)).unwrap_or(0);
                        let row = rows.row(&mut random);
                        of(vec![change(Operation::Update, table, row)], 273)
                    })
                    .collect()
            }
        }
    }
}

fn of(changes: Vec<Change>, bytes: u32) -> Transaction {
    Transaction { changes, bytes }
}

fn change(operation: Operation, table: u32, row: u64) -> Change {
    Change {
        table,
        operation,
        barrier: false,
        hashes: vec![mixed((u64::from(table) << 40) ^ row)],
    }
}

/// Returns an insert into a table without a unique key.
fn keyless(table: u32, _row: usize) -> Change {
    Change {
        table,
        operation: Operation::Insert,
        barrier: false,
        hashes: Vec::new(),
    }
}

/// A splitmix64 generator.
#[derive(Debug)]
struct Random(u64);

fn mixed(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Zipf distribution of rows: the n-th is used in proportion to n to the power of minus the
/// exponent.
#[derive(Debug)]
struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    fn new(rows: u32, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weights = (1..=rows).map(|rank| {
            sum += f64::from(rank).powf(-exponent);
            sum
        });
        Self {
            cumulative: weights.collect(),
        }
    }

    fn row(&self, random: &mut Random) -> u64 {
        let all = self.cumulative.last().copied().unwrap_or(0.0);
        let at = random.unit() * all;
        self.cumulative.partition_point(|up_to| *up_to <= at) as u64
    }
}

/// Returns a trace as text.
#[must_use]
pub fn write(trace: &[Transaction]) -> String {
    let mut text = String::new();
    for transaction in trace {
        let _ = write!(text, "{}", transaction.bytes);
        for change in &transaction.changes {
            let letter = match (change.operation, change.barrier) {
                (Operation::Insert, _) => 'i',
                (Operation::Update, false) => 'u',
                (Operation::Update, true) => 'U',
                (Operation::Delete, false) => 'd',
                (Operation::Delete, true) => 'D',
            };
            let hashes: Vec<String> = change
                .hashes
                .iter()
                .map(|hash| format!("{hash:x}"))
                .collect();
            let _ = write!(text, " {letter}:{}:{}", change.table, hashes.join(","));
        }
        text.push('\n');
    }
    text
}

/// Reads a trace from text.
///
/// # Errors
/// A message with the first invalid line.
pub fn read(text: &str) -> Result<Vec<Transaction>, String> {
    let lines = text.lines().enumerate();
    lines
        .map(|(number, line)| {
            transaction(line).ok_or_else(|| format!("line {}: not a transaction", number + 1))
        })
        .collect()
}

fn transaction(line: &str) -> Option<Transaction> {
    let mut words = line.split(' ');
    let bytes = words.next()?.parse().ok()?;
    let changes = words.map(|word| {
        let mut parts = word.split(':');
        let (operation, barrier) = match parts.next()? {
            "i" => (Operation::Insert, false),
            "u" => (Operation::Update, false),
            "U" => (Operation::Update, true),
            "d" => (Operation::Delete, false),
            "D" => (Operation::Delete, true),
            _ => return None,
        };
        let table = parts.next()?.parse().ok()?;
        let hashes = parts.next()?.split(',').filter(|hash| !hash.is_empty());
        let hashes = hashes.map(|hash| u64::from_str_radix(hash, 16).ok());
        Some(Change {
            table,
            operation,
            barrier,
            hashes: hashes.collect::<Option<_>>()?,
        })
    });
    Some(Transaction {
        bytes,
        changes: changes.collect::<Option<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn a_trace_goes_through_text_unchanged() {
        for workload in Workload::ALL {
            let trace = workload.trace(200);
            assert_eq!(read(&write(&trace)), Ok(trace));
            assert_eq!(Workload::by_name(&workload.name()), Some(workload));
        }
        assert_eq!(read("12 u:1"), Err("line 1: not a transaction".to_owned()));
        assert_eq!(Workload::by_name("other"), None);
    }

    #[test]
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn zipf_has_the_hot_rows_that_it_should() {
        for (exponent, share) in [(0.0, 0.000_01), (1.0, 0.0827), (2.0, 0.608)] {
            let trace = Workload::Zipf(exponent).trace(50_000);
            let mut hits: HashMap<(u32, u64), usize> = HashMap::new();
            for transaction in &trace {
                let change = &transaction.changes[0];
                *hits.entry((change.table, change.hashes[0])).or_default() += 1;
            }
            let hottest = *hits.values().max().unwrap() as f64 / 5_000.0;
            assert!((hottest - share).abs() < 0.02, "{exponent}: {hottest}");
        }
    }
}
