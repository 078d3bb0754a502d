"""What is reached for, in one table; all of it against native replication with its best settings, in the same run."""

from dataclasses import dataclass

AT_MOST, AT_LEAST = "<=", ">="
THROUGHPUT, SUBSCRIBER_CPU, WALSENDER_CPU = "throughput", "subscriber CPU", "walsender CPU"
OF_DECODER = "throughput of the decoder alone"
LATENCY_P50, LATENCY_P99 = "latency p50", "latency p99"
LINK = "throughput with 20 ms between the nodes"
# To serial, and to native, which waits for the standby once in each commit.
STANDBY, STANDBY_NATIVE = "20 ms to a standby, against serial", "20 ms to a standby, against native"


@dataclass(frozen=True)
class Goal:
    """`measure` is a ratio: Braid's variant to native, unless the measure's name says to what."""

    workload: str
    variant: str
    commit: str
    measure: str
    sense: str
    value: float

    def met(self, ratio):
        return ratio <= self.value if self.sense == AT_MOST else ratio >= self.value

    def __str__(self):
        return f"{'≤' if self.sense == AT_MOST else '≥'} {self.value:g}"


def _goals():
    every = ("single", "sysbench", "tpcb", "zipf0", "zipf1", "zipf2", "bulk", "wide")
    for w in every:
        yield Goal(w, "parallel", "off", SUBSCRIBER_CPU, AT_MOST, 0.6 if w == "bulk" else 1.1)
        # One write for a small transaction instead of one for each message shows where transactions
        # have one row.
        yield Goal(w, "parallel", "off", WALSENDER_CPU, AT_MOST, 0.65 if w in ("single", "zipf0", "zipf1", "zipf2") else 1.0)
    # The first change of a table costs a look at the catalog, for native too: at most one and a
    # half times its time.
    for w in ("tables100", "tables1000", "tables10000", "tenants"):
        yield Goal(w, "parallel", "off", THROUGHPUT, AT_LEAST, 0.67)
    yield Goal("single", "batch", "off", SUBSCRIBER_CPU, AT_MOST, 0.5)
    yield Goal("sysbench", "batch", "off", SUBSCRIBER_CPU, AT_MOST, 0.6)
    yield Goal("zipf2", "batch+consolidate", "off", SUBSCRIBER_CPU, AT_MOST, 0.25)

    yield Goal("single", "parallel", "off", THROUGHPUT, AT_LEAST, 1.6)
    yield Goal("single", "parallel", "off", OF_DECODER, AT_LEAST, 0.85)
    for w in ("sysbench", "tpcb"):
        yield Goal(w, "parallel", "off", THROUGHPUT, AT_LEAST, 1.4)
        yield Goal(w, "batch", "off", THROUGHPUT, AT_LEAST, 2.0)
    yield Goal("bulk", "parallel", "off", THROUGHPUT, AT_LEAST, 2.0)
    yield Goal("wide", "parallel", "off", THROUGHPUT, AT_LEAST, 1.5)
    for w in ("single", "sysbench"):
        yield Goal(w, "parallel", "on", THROUGHPUT, AT_LEAST, 3.0)
        yield Goal(w, "batch", "on", THROUGHPUT, AT_LEAST, 10.0)

    for rate in (500, 2000):
        yield Goal(f"latency {rate}/s", "parallel", "off", LATENCY_P50, AT_MOST, 1.0)
        yield Goal(f"latency {rate}/s", "parallel", "off", LATENCY_P99, AT_MOST, 1.0)
    for w in ("single", "sysbench"):
        yield Goal(w, "parallel", "off", LINK, AT_LEAST, 0.9)
    # DTLE's own table: 41 against 1140.
    yield Goal("dtle", "parallel", "on", STANDBY, AT_LEAST, 28.0)
    yield Goal("dtle", "parallel", "on", STANDBY_NATIVE, AT_LEAST, 28.0)


# Workload by workload, in the order in which they first come.
_order = list(dict.fromkeys(goal.workload for goal in _goals()))
GOALS = tuple(sorted(_goals(), key=lambda goal: _order.index(goal.workload)))

# What is drained where BENCH_MODES does not say: what the goals need, and for Zipf every mode, as
# in figure 8 of the DTS paper (PVLDB 17(12), 2024).
MODES = {
    "single": ("parallel", "batch", "aggregate"),
    "sysbench": ("parallel", "batch"),
    "tpcb": ("parallel", "batch"),
    "zipf0": ("serial", "parallel", "batch", "batch+consolidate", "aggregate"),
    "zipf1": ("serial", "parallel", "batch", "batch+consolidate", "aggregate"),
    "zipf2": ("serial", "parallel", "batch", "batch+consolidate", "aggregate"),
    "bulk": ("parallel", "kept", "whole", "batch", "aggregate"),
    "wide": ("parallel",),
    "tables100": ("parallel",),
    "tables1000": ("parallel",),
    "tables10000": ("parallel",),
    "tenants": ("parallel",),
}
# With every commit waiting for the disk, the plain and the batched suffice.
MODES_COMMIT_ON = ("parallel", "batch")
