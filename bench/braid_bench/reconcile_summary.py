"""Tables of the reconciliation bench, from what its results file holds."""

import statistics

PHASES = ("linked", "loading", "cut", "reconciling", "after")


def good(entry):
    return [s for s in entry.get("samples", ()) if "void" not in s]


def middle(samples, *path):
    """The median of what is there."""
    values = []
    for sample in samples:
        for key in path:
            sample = sample.get(key) if sample is not None else None
        if sample is not None:
            values.append(sample)
    return statistics.median(values) if values else None


def shown(value, digits=1):
    return "-" if value is None else f"{value:.{digits}f}"


def without(entry):
    """Why an entry has no figures."""
    if "not_available" in entry:
        return "not available"
    return "void" if any("void" in s for s in entry.get("samples", ())) else "not measured"


def reconcile_rows(results):
    """(times and CPU seconds, what the inserters saw)."""
    times = [("rows", "inserts on each", "system", "first row after s", "equal after s", "level after s", "lag then p50 s", "lag then max s",
              "inserting them s", "its CPU s", "CPU s until equal")]
    inserters = [("rows", "system", "ms", *PHASES)]
    for entry in results["reconciliations"]:
        samples = good(entry)
        share = f", {entry['shared']} shared" if entry["shared"] else ""
        start = (entry["rows"], f"{entry['inserts']}{share}", entry["title"])
        if not samples:
            times.append((*start, without(entry), *[""] * 7))
            continue
        times.append((*start, *(shown(middle(samples, *path), digits) for *path, digits in (
            ("first_s", 1), ("equal_s", 1), ("level_s", 1), ("lag_p50_s", 2), ("lag_max_s", 2), ("load", "seconds", 1),
            ("load", "cpu", 1), ("cpu", "sum", 1)))))
        for name in ("p50", "p99", "max"):
            inserters.append((entry["rows"], entry["title"], name,
                              *(shown(middle(samples, "inserters", phase, f"{name}_ms"), 2) for phase in PHASES)))
    return times, inserters


def highest(entry):
    """The last rate that was stable before one that was not, None where there is none."""
    found = None
    for made in entry["rates"]:
        if made["unstable"]:
            break
        found = made["rate"]
    return found


def steady_rows(results):
    rows = [("system", "inserts/s on each", "lag p50 s", "lag max s", "lag at the end s", "insert p50 ms", "insert p99 ms", "CPU s", "")]
    for entry in results["steady"]:
        void = without(entry) == "void"
        best = None if void else highest(entry)
        for made in entry["rates"]:
            verdict = made["unstable"] or ("**the highest that is stable**" if made["rate"] == best else "stable")
            rows.append((entry["title"], made["rate"], shown(made["lag_p50_s"], 2), shown(made["lag_max_s"], 2), shown(made["lag_end_s"], 2),
                         shown(made["inserters"].get("p50_ms"), 2), shown(made["inserters"].get("p99_ms"), 2), shown(made["cpu"]["sum"]),
                         verdict))
        if void or not entry["rates"]:
            rows.append((entry["title"], *[""] * 7, without(entry)))
    return rows


def printed(results, table):
    """What ends a run."""
    times, inserters = reconcile_rows(results)
    if len(times) > 1:
        yield table(times, right=(0, *range(3, 11)))
    if len(inserters) > 1:
        yield table(inserters, right=(0, *range(3, 8)))
    steady = steady_rows(results)
    if len(steady) > 1:
        yield table(steady, right=range(1, 8))
