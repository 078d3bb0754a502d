"""From samples to medians, ratios and goals. Works on what a results file holds, so that a report can be made from it later."""

import statistics

from . import goals

MEASURES = {
    # Not transactions: of one large one, a second sees next to nothing.
    goals.THROUGHPUT: lambda s: 1 / s["seconds"],
    goals.SUBSCRIBER_CPU: lambda s: s["subscriber"]["cpu"],
    goals.WALSENDER_CPU: lambda s: s["walsender"]["cpu"],
}


class Ratio:
    """Of two medians, with the least and the greatest ratio of samples taken next to each other."""

    def __init__(self, above, below):
        self.value = statistics.median(above) / statistics.median(below) if statistics.median(below) else float("nan")
        pairs = [a / b for a, b in zip(above, below) if b] or [self.value]
        self.low, self.high, self.pairs = min(pairs), max(pairs), len(pairs)

    def __str__(self):
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})" if self.pairs > 1 else f"{self.value:.2f}"


def drained(results, workload, variant, commit):
    """The samples that count of one drain."""
    for entry in results.get("drains", ()):
        if (entry["workload"], entry["variant"], entry["commit"]) == (workload, variant, commit):
            return [s for s in entry["samples"] if "void" not in s]
    return []


def beside(results, workload, variant, commit):
    """The samples of native that were taken in turn with those of a variant."""
    for entry in results.get("drains", ()):
        if (entry["workload"], entry["variant"], entry["commit"]) == (workload, variant, commit) and "native" in entry:
            return [s for s in entry["native"] if "void" not in s]
    return drained(results, workload, "native", commit)


def median(samples, measure):
    return statistics.median(MEASURES[measure](s) for s in samples)


def ratio(results, workload, variant, commit, measure):
    """Against native's best; None where either is missing."""
    if measure == goals.OF_DECODER:
        return of_decoder(results, workload, variant, commit)
    if measure in (goals.LATENCY_P50, goals.LATENCY_P99):
        return latency(results, workload, variant, measure)
    if measure == goals.LINK:
        return link(results, workload, variant)
    if measure in (goals.STANDBY, goals.STANDBY_NATIVE):
        return standby(results, variant, "serial" if measure == goals.STANDBY else "native")
    ours, theirs = drained(results, workload, variant, commit), beside(results, workload, variant, commit)
    if not ours or not theirs:
        return None
    of = MEASURES[measure]
    return Ratio([of(s) for s in ours], [of(s) for s in theirs])


def of_decoder(results, workload, variant, commit):
    """Against the decoder alone, whose output goes nowhere."""
    alone = results.get("limits", {}).get(workload, {}).get("decode_braid", [])
    ours = drained(results, workload, variant, commit)
    if not alone or not ours:
        return None
    return Ratio([1 / s["seconds"] for s in ours], [1 / s["seconds"] for s in alone])


def latency(results, workload, variant, measure):
    rate, quantile = int(workload.split()[1].removesuffix("/s")), measure.split()[1]

    def taken(name):
        return [s[f"{quantile}_ms"] for e in results.get("latency", ()) if (e["rate"], e["variant"]) == (rate, name)
                for s in e["samples"] if "void" not in s]

    ours, theirs = taken(variant), taken("native")
    return Ratio(ours, theirs) if ours and theirs else None


def link(results, workload, variant):
    def taken(delay):
        # Without the start, which takes some round trips.
        return [e["transactions"] / (s["seconds"] - s["first_row_s"]) for e in results.get("link", ())
                if (e["workload"], e["variant"], e["delay_ms"]) == (workload, variant, delay)
                for s in e["samples"] if "void" not in s]

    far, near = taken(20), taken(0)
    return Ratio(far, near) if far and near else None


def standby(results, variant, to):
    def taken(name):
        return [s["transactions_per_s"] for e in results.get("dtle", ()) if (e["variant"], e["delay_ms"]) == (name, 20)
                for s in e["samples"] if "void" not in s]

    ours, theirs = taken(variant), taken(to)
    return Ratio(ours, theirs) if ours and theirs else None


def judged(results):
    """(goal, ratio or None, met or None) of each goal that this run has something to say of."""
    measured = {e["workload"] for e in results.get("drains", ())} | {e["workload"] for e in results.get("link", ())}
    measured |= {f"latency {e['rate']}/s" for e in results.get("latency", ())}
    measured |= {"dtle"} if results.get("dtle") else set()
    for goal in goals.GOALS:
        if goal.workload in measured:
            found = ratio(results, goal.workload, goal.variant, goal.commit, goal.measure)
            yield goal, found, None if found is None else goal.met(found.value)


def table(rows, right=()):
    """Text in columns; those in `right` are numbers."""
    widths = [max(len(str(row[c])) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [str(cell).rjust(w) if c in right else str(cell).ljust(w) for c, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join(lines)


def drain_rows(results):
    """One row a workload, commit and variant: medians, and ratios to native's best."""
    rows = [("workload", "commit", "variant", "seconds", "tx/s", "rows/s", "sub CPU", "ws CPU", "throughput", "sub CPU ratio",
             "ws CPU ratio", "taken")]
    for entry in results.get("drains", ()):
        key = (entry["workload"], entry["variant"], entry["commit"])
        samples = drained(results, *key)
        if not samples:
            why = "not available" if "not_available" in entry else "void"
            rows.append((key[0], key[2], key[1], why, *[""] * 8))
            continue
        ratios = [ratio(results, *key, m) for m in MEASURES] if key[1] != "native" else [None] * 3
        rows.append((
            key[0], key[2], key[1],
            f"{statistics.median(s['seconds'] for s in samples):.2f}",
            f"{entry['transactions'] / statistics.median(s['seconds'] for s in samples):.0f}",
            f"{entry['rows'] / statistics.median(s['seconds'] for s in samples):.0f}",
            f"{median(samples, goals.SUBSCRIBER_CPU):.2f}", f"{median(samples, goals.WALSENDER_CPU):.2f}",
            *(str(r) if r else "" for r in ratios), entry.get("taken", "")))
    return rows


def goal_rows(results):
    rows = [("goal", "variant", "commit", "measure", "reached", "wanted", "")]
    for goal, found, met in judged(results):
        verdict = {None: "not measured", True: "met", False: "NOT MET"}[met]
        rows.append((goal.workload, goal.variant, goal.commit, goal.measure, str(found) if found else "", str(goal), verdict))
    return rows


def other_rows(results):
    """Limits, latency, link and standby: medians."""
    def of(samples, key):
        return statistics.median(s[key] for s in samples)

    limits = [("workload", "limit", "seconds", "rows/s", "CPU")]
    names = {"copy": "COPY of the rows", "standby": "physical standby", "decode_native": "pgoutput alone", "decode_braid": "decoder alone"}
    for workload, taken in results.get("limits", {}).items():
        load = results["loads"][workload]
        limits.append((workload, "statements run locally", f"{load['seconds']:.2f}", f"{load['rows'] / load['seconds']:.0f}",
                       f"{load['cpu']:.2f}"))
        for name, samples in taken.items():
            used = statistics.median(s["walsender"]["cpu"] if "walsender" in s else s["cpu"] for s in samples)
            limits.append((workload, names[name], f"{of(samples, 'seconds'):.2f}", f"{of(samples, 'rows_per_s'):.0f}", f"{used:.2f}"))
    times = [("rate/s", "variant", "reached/s", "p50 ms", "p99 ms", "p99.9 ms", "sub CPU", "ws CPU", "unseen ms at most")]
    for entry in results.get("latency", ()):
        samples = [s for s in entry["samples"] if "void" not in s]
        if samples:
            times.append((entry["rate"], entry["variant"], f"{of(samples, 'reached_per_s'):.0f}",
                          *(f"{of(samples, k):.2f}" for k in ("p50_ms", "p99_ms", "p999_ms")),
                          f"{statistics.median(s['subscriber']['cpu'] for s in samples):.2f}",
                          f"{statistics.median(s['walsender']['cpu'] for s in samples):.2f}",
                          f"{max(s['unseen_ms'] for s in samples):.2f}"))
    far = [("workload", "variant", "delay ms", "seconds", "first row after", "tx/s from there")]
    for entry in [*results.get("link", ()), *results.get("dtle", ())]:
        samples = [s for s in entry["samples"] if "void" not in s]
        if samples:
            far.append((entry["workload"], entry["variant"], entry["delay_ms"], f"{of(samples, 'seconds'):.2f}",
                        f"{of(samples, 'first_row_s'):.2f}",
                        f"{statistics.median(entry['transactions'] / (s['seconds'] - s['first_row_s']) for s in samples):.0f}"))
    return limits, times, far


def printed(results):
    """The tables that end a run."""
    drains = drain_rows(results)
    if len(drains) > 1:
        yield table(drains, right=range(3, 8))
        yield "ratios: to native (best settings), of medians; in brackets the least and the greatest of samples taken in turn"
    limits, times, far = other_rows(results)
    for rows, right in ((limits, range(2, 5)), (times, (0, *range(2, 9))), (far, range(2, 6))):
        if len(rows) > 1:
            yield table(rows, right=right)
    found = goal_rows(results)
    if len(found) > 1:
        yield table(found)
