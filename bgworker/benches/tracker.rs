//! Cost of the dependency tracker for the leader, with 1 to 100,000 waiting transactions: `make
//! bench-tracker`.
//!
//! An element is a key. Keys are hashes like the decoder's. Transactions are generated in advance,
//! so many that they and the tracker's memory exceed a processor's caches.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::hint::black_box;

use braid_bgworker::dependency::DependencyTracker;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// The leader's capacity.
const CAPACITY: usize = 200_000;
const TRANSACTIONS: usize = 1 << 18;

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        spread(self.0)
    }

    #[allow(clippy::cast_precision_loss, reason = "53 bits fit")]
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn spread(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A change: table and key.
type Change = (u32, u64);

fn key(table: u32, row: u64) -> Change {
    (table, spread((u64::from(table) << 40) ^ row))
}

/// New rows of one table.
fn single_row() -> Vec<Change> {
    (0..TRANSACTIONS as u64).map(|row| key(1, row)).collect()
}

/// sysbench's oltp_write_only: delete, insert, two updates, uniform over a million rows.
fn four_rows() -> Vec<Change> {
    let mut random = Random(1);
    (0..TRANSACTIONS * 4)
        .map(|_| key(1, random.next() % 1_000_000))
        .collect()
}

/// Updates of one row, Zipf 1 over 10,000 rows in each of ten tables.
#[allow(clippy::cast_possible_truncation, reason = "ten tables")]
fn zipf() -> Vec<Change> {
    let mut sum = 0.0;
    let cumulative: Vec<f64> = (1..=10_000_u32)
        .map(|rank| {
            sum += 1.0 / f64::from(rank);
            sum
        })
        .collect();
    let mut random = Random(2);
    (0..TRANSACTIONS)
        .map(|_| {
            let table = random.next() % 10;
            let at = random.unit() * sum;
            let row = cumulative.partition_point(|up_to| *up_to < at);
            key(table as u32, row as u64)
        })
        .collect()
}

fn schedule(criterion: &mut Criterion) {
    let workloads: [(&str, usize, Vec<Change>); 3] = [
        ("single-row", 1, single_row()),
        ("four-row", 4, four_rows()),
        ("zipf-1", 1, zipf()),
    ];
    for (name, keys, changes) in &workloads {
        let mut group = criterion.benchmark_group(*name);
        group.throughput(Throughput::Elements(*keys as u64));
        for waiting in [1, 10, 1_000, 100_000] {
            let id = BenchmarkId::from_parameter(waiting);
            group.bench_with_input(id, &waiting, |bencher, waiting: &u64| {
                let mut tracker = DependencyTracker::new(CAPACITY);
                let mut transactions = changes.chunks_exact(*keys).cycle();
                let mut sequence = 0;
                let mut enter = || {
                    sequence += 1;
                    tracker.begin(sequence, u64::saturating_sub(sequence, *waiting));
                    for (table, hash) in transactions.next().unwrap_or_default() {
                        tracker.change(*table, std::iter::once(*hash));
                    }
                    tracker.finish().latest
                };
                for _ in 0..*waiting {
                    enter();
                }
                bencher.iter(|| black_box(enter()));
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(50);
    targets = schedule
}
criterion_main!(benches);
