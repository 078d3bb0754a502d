//! Results of `make bench`: throughput, and processor time by process. Costs are derived from the
//! drains with one applier; the check uses all drains.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::costs::{Apply, Batch, Commit, Costs, Price, Rows};
use crate::engine::{Flush, Mode, Order, Setup};

/// A result file of the bench; only the fields that are used.
#[derive(Debug, Deserialize)]
pub struct Results {
    at: String,
    machine: Machine,
    plan: Plan,
    drains: Vec<Drain>,
}

#[derive(Debug, Deserialize)]
struct Machine {
    braid: Option<String>,
    cpu: String,
    cores: u32,
    flush_ms: f64,
}

#[derive(Debug, Deserialize)]
struct Plan {
    settings: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Drain {
    workload: String,
    variant: String,
    commit: String,
    transactions: f64,
    rows: f64,
    samples: Vec<serde_json::Value>,
}

/// The median sample of a drain, per transaction.
#[derive(Debug, Clone, Copy)]
struct Each {
    rows: f64,
    microseconds: f64,
    walsender: f64,
    leader: f64,
    appliers: f64,
}

/// A measured point, to compare with a simulated one.
#[derive(Debug, Clone)]
pub struct Point {
    /// The simulator's name of the workload.
    pub workload: String,
    /// Setup of the measurement.
    pub setup: Setup,
    /// Whether all appliers claimed transactions, even if one was faster.
    pub always: bool,
    /// Measured throughput.
    pub transactions_per_second: f64,
}

impl Drain {
    /// Returns the median sample by time; void samples do not count.
    fn each(&self) -> Option<Each> {
        let seconds = |sample: &serde_json::Value| sample.get("seconds")?.as_f64();
        let mut samples: Vec<&serde_json::Value> = self
            .samples
            .iter()
            .filter(|sample| seconds(sample).is_some())
            .collect();
        samples.sort_by(|a, b| {
            seconds(a)
                .unwrap_or(0.0)
                .total_cmp(&seconds(b).unwrap_or(0.0))
        });
        let sample = samples.get(samples.len() / 2)?;
        let first = sample
            .get("first_row_s")
            .and_then(serde_json::Value::as_f64);
        let processes = |role: &str, name: &str| {
            let list = sample.get(role)?.get("processes")?.as_array()?;
            let of = list.iter().filter(|process| {
                let title = process.get("title").and_then(serde_json::Value::as_str);
                title.is_some_and(|title| title.contains(name))
            });
            Some(
                of.filter_map(|process| process.get("cpu")?.as_f64())
                    .sum::<f64>(),
            )
        };
        let per = 1e6 / self.transactions;
        Some(Each {
            rows: self.rows / self.transactions,
            microseconds: (seconds(sample)? - first.unwrap_or(0.0)) * per,
            walsender: sample.get("walsender")?.get("cpu")?.as_f64()? * per,
            leader: processes("subscriber", "braid leader")? * per,
            appliers: processes("subscriber", "braid applier")? * per,
        })
    }
}

/// Cost of a transaction of a batch without its rows, as a multiple of its cost alone.
const TRANSACTION_IN_BATCH: f64 = 0.1;
/// Cost of a row of a batch, if none was measured, as a multiple of its cost otherwise.
const ROW_IN_BATCH: f64 = 0.85;

/// Returns the simulator's name of a workload.
fn name(of: &str) -> String {
    match of {
        "tpcb" => "tpcb-10".to_owned(),
        "zipf0" | "zipf1" | "zipf2" => of.replace("zipf", "zipf-"),
        other => other.to_owned(),
    }
}

impl Results {
    /// Reads results from JSON.
    ///
    /// # Errors
    /// A message, if the JSON is invalid.
    pub fn read(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    fn setting(&self, wanted: &str) -> Option<&str> {
        self.plan.settings.iter().find_map(|setting| {
            let (name, value) = setting.split_once('=')?;
            (name.trim() == wanted).then(|| value.trim())
        })
    }

    fn appliers(&self) -> usize {
        let number = self.setting("braid.appliers_per_subscription");
        number.and_then(|number| number.parse().ok()).unwrap_or(2)
    }

    /// Returns the measured points.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        let points = self.drains.iter().filter_map(|drain| {
            let (mode, order) = match drain.variant.as_str() {
                "serial" => (Mode::Serial, Order::Source),
                "parallel" => (Mode::Parallel, Order::Source),
                "batch" => (Mode::Batch, Order::Source),
                "batch+consolidate" => (Mode::Consolidate, Order::Source),
                "relaxed" => (Mode::Parallel, Order::Relaxed),
                "batch+relaxed" => (Mode::Batch, Order::Relaxed),
                _ => return None,
            };
            Some(Point {
                workload: name(&drain.workload),
                setup: Setup {
                    appliers: self.appliers(),
                    cores: self.machine.cores,
                    order,
                    mode,
                    flush: if drain.commit == "on" {
                        Flush::Leader
                    } else {
                        Flush::None
                    },
                    singly: false,
                },
                always: self.setting("braid.parallel_apply") == Some("always"),
                transactions_per_second: 1e6 / drain.each()?.microseconds,
            })
        });
        points.collect()
    }

    /// Returns the drains of a variant with `synchronous_commit` off, by workload.
    fn drained(&self, variant: &str) -> BTreeMap<&str, Each> {
        let of = |drain: &&Drain| drain.variant == variant && drain.commit == "off";
        self.drains
            .iter()
            .filter(of)
            .filter_map(|drain| Some((drain.workload.as_str(), drain.each()?)))
            .collect()
    }

    /// Returns the costs that follow from measurements with one applier. The costs with several
    /// appliers follow from `with_two`, measurements with two. `quiet`: nothing else ran, so time
    /// without processor time was waiting.
    ///
    /// # Errors
    /// A message, if it was not measured with one applier, or two, or without single-row inserts.
    pub fn costs(&self, with_two: Option<&Self>, quiet: bool) -> Result<Costs, String> {
        if self.appliers() != 1 || with_two.is_some_and(|with_two| with_two.appliers() != 2) {
            return Err(
                "costs are those of one applier, then of two: braid.appliers_per_subscription=1"
                    .to_owned(),
            );
        }
        let measured = self.drained("parallel");
        let batches = self.drained("batch");
        // Cost with two appliers, as a multiple of the cost with one.
        let shared = |of: &BTreeMap<&str, Each>, variant: &str, workload: &str| {
            let two = with_two.map(|with_two| with_two.drained(variant));
            let two = two.and_then(|two| two.get(workload).copied());
            let factor = two
                .zip(of.get(workload))
                .map(|(two, one)| two.appliers / one.appliers);
            rounded(factor.unwrap_or(1.0).clamp(1.0, 5.0))
        };
        let single = measured
            .get("single")
            .ok_or("costs need the workload \"single\"")?;
        // A row of a large transaction includes no begin and no commit. Without such a measurement:
        // half.
        let row_alone = measured
            .get("bulk")
            .map_or(single.appliers / 2.0, |bulk| bulk.appliers / bulk.rows);
        let fixed =
            (single.appliers - row_alone).clamp(single.appliers * 0.2, single.appliers * 0.8);
        let small = || {
            measured
                .iter()
                .filter(|(name, _)| !matches!(**name, "bulk" | "wide"))
        };
        let mut rows: BTreeMap<String, Rows> = small()
            .map(|(workload, each)| {
                let row = ((each.appliers - fixed) / each.rows).max(0.1);
                let busiest = each.appliers.max(each.walsender).max(each.leader);
                let wait = (each.microseconds - busiest).max(0.0) / each.rows;
                let batch = batches.get(workload).map_or(ROW_IN_BATCH, |batch| {
                    (batch.appliers - fixed * TRANSACTION_IN_BATCH) / batch.rows / row
                });
                let prices = Rows {
                    insert: rounded(row),
                    update: rounded(row),
                    delete: rounded(row),
                    wait: if quiet { rounded(wait) } else { 0.0 },
                    batch: rounded(batch.clamp(0.1, 2.0)),
                    shared: shared(&measured, "parallel", workload),
                    batch_shared: shared(&batches, "batch", workload),
                    decode: Some(rounded(each.walsender)),
                    dispatch: Some(rounded(each.leader)),
                };
                (name(workload), prices)
            })
            .collect();
        if let Some(single) = rows.get("single").copied() {
            let any = Rows {
                decode: None,
                dispatch: None,
                ..single
            };
            rows.insert(String::new(), any);
        }
        Ok(Costs {
            about: format!(
                "measured at {} with Braid {} on {} ({} processors); what a transaction costs beside its rows, a commit's part of that, and \
                 what being woken costs, are assumed",
                self.at,
                self.machine
                    .braid
                    .as_deref()
                    .unwrap_or("of an unknown version"),
                self.machine.cpu,
                self.machine.cores
            ),
            decode: fitted(small().map(|(_, each)| (each.rows, each.walsender))),
            dispatch: fitted(small().map(|(_, each)| (each.rows, each.leader))),
            apply: Apply {
                transaction: rounded(fixed * 0.4),
                // As often as an applier looks before it sleeps, at 30 ns each.
                spin: 12.0,
                wake: 2.0,
                latency: 10.0,
            },
            rows,
            batch: Batch {
                transaction: rounded(fixed * TRANSACTION_IN_BATCH),
                consolidate: 0.15,
            },
            commit: Commit {
                transaction: rounded(fixed * 0.6),
                flush: rounded(self.machine.flush_ms * 1000.0),
                interval: 5000.0,
            },
            in_flight: 8192,
            pipe: 1 << 20,
        })
    }
}

fn rounded(price: f64) -> f64 {
    (price * 100.0).round() / 100.0
}

/// Returns the line through (rows, cost) that fits best, without a negative price.
fn fitted(points: impl Iterator<Item = (f64, f64)>) -> Price {
    let (mut n, mut x, mut y, mut xx, mut xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (rows, cost) in points {
        n += 1.0;
        x += rows;
        y += cost;
        xx += rows * rows;
        xy += rows * cost;
    }
    let spread = n * xx - x * x;
    let row = if spread > 1e-9 {
        ((n * xy - x * y) / spread).max(0.0)
    } else {
        0.0
    };
    let transaction = if n > 0.0 { (y - row * x) / n } else { 0.0 };
    Price {
        transaction: rounded(transaction.max(0.0)),
        row: rounded(row),
        byte: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::simulate;
    use crate::workload::Workload;

    /// With two appliers work costs half as much again; a row of a batch costs half.
    fn results(appliers: usize) -> Results {
        let more = if appliers == 2 { 1.5 } else { 1.0 };
        let process = |title: &str, cpu: f64| serde_json::json!({ "title": title, "cpu": cpu });
        let drain = |workload: &str,
                     variant: &str,
                     transactions: f64,
                     rows: f64,
                     seconds: f64,
                     applier: f64| {
            serde_json::json!({
                "workload": workload, "variant": variant, "commit": "off",
                "transactions": transactions, "rows": rows,
                "samples": [ { "void": "for some reason" }, {
                    "seconds": seconds, "first_row_s": 0.0,
                    "walsender": { "cpu": 0.2 + rows * 1e-6, "processes": [] },
                    "subscriber": { "cpu": 1.0, "processes": [
                        process("braid applier 0 of subscription bench", applier * more),
                        process("braid leader of subscription bench", 0.1),
                    ] },
                } ],
            })
        };
        let text = serde_json::json!({
            "at": "2024-01-01", "machine": { "cpu": "any", "cores": 2, "flush_ms": 0.1 },
            "plan": { "settings": [format!("braid.appliers_per_subscription={appliers}")] },
            "drains": [
                drain("single", "parallel", 100_000.0, 100_000.0, 1.0, 0.8),
                drain("sysbench", "parallel", 100_000.0, 400_000.0, 4.0, 2.8),
                drain("sysbench", "batch", 100_000.0, 400_000.0, 2.44, 1.24),
                drain("bulk", "parallel", 1.0, 1_000_000.0, 4.0, 4.0),
            ],
        });
        Results::read(&text.to_string()).unwrap()
    }

    #[test]
    fn costs_give_back_what_they_were_made_of() {
        let results = results(1);
        let costs = results.costs(None, true).unwrap();
        assert_eq!((costs.decode.transaction, costs.decode.row), (2.0, 1.0));
        assert!(
            (costs.rows_of("single").insert - 4.0).abs() < 0.01,
            "{costs:?}"
        );
        assert!(
            (costs.rows_of("sysbench").update - 6.0).abs() < 0.01,
            "{costs:?}"
        );
        for point in results.points() {
            let Some(workload) = Workload::by_name(&point.workload) else {
                continue;
            };
            let rows = costs.rows_of(&point.workload);
            let outcome = simulate(&workload.trace(20_000), &costs, rows, point.setup);
            let ratio = outcome.transactions_per_second / point.transactions_per_second;
            assert!((0.97..1.03).contains(&ratio), "{point:?} {outcome:?}");
        }
    }

    #[test]
    fn only_one_applier_has_costs() {
        assert!(results(2).costs(None, true).is_err());
        assert_eq!(results(2).points().len(), 4);
    }

    #[test]
    fn what_batches_and_a_second_applier_change_is_measured() {
        let rows = |costs: &Costs, workload| {
            let rows = costs.rows_of(workload);
            (rows.batch, rows.shared, rows.batch_shared)
        };
        let alone = results(1).costs(None, true).unwrap();
        assert_eq!(rows(&alone, "sysbench"), (0.5, 1.0, 1.0));
        let two = results(1).costs(Some(&results(2)), true).unwrap();
        assert_eq!(rows(&two, "sysbench"), (0.5, 1.5, 1.5));
        // No batch was measured.
        assert_eq!(rows(&two, "single"), (ROW_IN_BATCH, 1.5, 1.0));
        assert!(results(1).costs(Some(&results(1)), true).is_err());
    }
}
