"""Which charts there are. Each is drawn from a results file where that has what it shows, and left out where not."""

import statistics

from . import goals, summary
from .svg import Bar, bars

NAMES = {
    "single": "single-row inserts", "sysbench": "sysbench write-only", "tpcb": "TPC-B", "zipf0": "updates, Zipf 0",
    "zipf1": "updates, Zipf 1", "zipf2": "updates, Zipf 2", "bulk": "one bulk transaction", "wide": "rows of 100 kB",
}
# Name, label, colour: the same in every chart.
SERIES = (
    ("native", "native", 0), ("parallel", "Braid", 1), ("batch", "batch", 2), ("batch+consolidate", "batch, consolidate", 3),
    ("aggregate", "aggregate", 4), ("serial", "serial", 5), ("consolidate", "consolidate", 6), ("relaxed", "relaxed order", 7),
)


def setting(results):
    m = results["machine"]
    scale = results["plan"]["scale"]
    shrunk = f", at {scale:g} of the full size" if scale != 1 else ""
    return f"PostgreSQL {m['postgresql']}, {m['cores']} cores; median of {results['plan']['runs']}, least and greatest{shrunk}"


def compared(results, measure, commit, title, variants):
    groups = []
    for workload, name in NAMES.items():
        values = {}
        for variant, label, _ in SERIES:
            if variant in variants and variant != "native":
                if found := summary.ratio(results, workload, variant, commit, measure):
                    values[label] = Bar(found.value, found.low, found.high)
        if values:
            groups.append((name, values))
    if not groups:
        return None
    return bars(title, setting(results), groups, [(label, colour) for v, label, colour in SERIES if v in variants], (1, "native"))


def absolute(results, workloads, title, of="rows_per_s"):
    groups = []
    for workload in workloads:
        values = {}
        for variant, label, _ in SERIES:
            if samples := summary.drained(results, workload, variant, "off"):
                taken = [s[of] for s in samples]
                values[label] = Bar(statistics.median(taken), min(taken), max(taken))
        if values:
            groups.append((NAMES[workload], values))
    return bars(title, setting(results), groups, [(label, colour) for _, label, colour in SERIES]) if groups else None


def latency(results):
    groups = []
    for entry in results.get("latency", ()):
        samples = [s for s in entry["samples"] if "void" not in s]
        label = next((label for v, label, _ in SERIES if v == entry["variant"]), None)
        if not samples or not label:
            continue
        for quantile in ("p50", "p99"):
            name = f"{entry['rate']}/s, {quantile}"
            values = next((v for n, v in groups if n == name), None)
            if values is None:
                values = {}
                groups.append((name, values))
            taken = [s[f"{quantile}_ms"] for s in samples]
            values[label] = Bar(statistics.median(taken), min(taken), max(taken))
    if not groups:
        return None
    return bars("Commit to visible, milliseconds", setting(results), groups, [(label, colour) for _, label, colour in SERIES])


def limits(results):
    """Rows a second of everything that was measured of a workload, as a share of native's."""
    labels = {"decode_braid": ("decoder alone", 3), "copy": ("COPY", 4), "standby": ("physical standby", 5)}
    groups = []
    for workload, taken in results.get("limits", {}).items():
        native = summary.drained(results, workload, "native", "off")
        if not native:
            continue
        base = statistics.median(s["rows_per_s"] for s in native)
        values = {}
        for variant in ("parallel", "batch"):
            if samples := summary.drained(results, workload, variant, "off"):
                label = next(label for v, label, _ in SERIES if v == variant)
                values[label] = Bar(statistics.median(s["rows_per_s"] for s in samples) / base)
        load = results["loads"][workload]
        values["run locally"] = Bar(load["rows"] / load["seconds"] / base)
        for key, (label, _) in labels.items():
            if samples := taken.get(key):
                values[label] = Bar(statistics.median(s["rows_per_s"] for s in samples) / base)
        groups.append((NAMES[workload], values))
    if not groups:
        return None
    series = [("Braid", 1), ("batch", 2), ("run locally", 6), *labels.values()]
    return bars("Throughput against what the machine can do, native = 1", setting(results), groups, series, (1, "native"))


def draw(results):
    """File name -> SVG."""
    main = ("parallel", "batch", "batch+consolidate")
    drawn = {
        "throughput.svg": compared(results, goals.THROUGHPUT, "off", "Throughput, synchronous_commit off, native = 1", main),
        "throughput-commit-on.svg": compared(results, goals.THROUGHPUT, "on", "Throughput, synchronous_commit on, native = 1", main),
        "cpu-subscriber.svg": compared(
            results, goals.SUBSCRIBER_CPU, "off", "CPU seconds of the subscriber, native = 1 (less is better)", main),
        "cpu-walsender.svg": compared(
            results, goals.WALSENDER_CPU, "off", "CPU seconds of the walsender, native = 1 (less is better)", main),
        "zipf.svg": absolute(results, ("zipf0", "zipf1", "zipf2"), "Hot rows: updates a second by apply mode"),
        "latency.svg": latency(results),
        "limits.svg": limits(results),
    }
    return {name: svg for name, svg in drawn.items() if svg}
