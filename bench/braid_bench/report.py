"""`bench/report`: charts and the tables of docs/PERFORMANCE.md from results files. Several complete each other; of what is in more
than one, the later counts. Without arguments: the newest in bench/results. What was reported is kept as bench/results/pgNN.json, which
can be completed in the same way. Results of `make bench-reconcile` fill marks of their own, and are kept as bench/results/reconcile-pgNN.json,
those of its steady test alone as steady-pgNN.json.
"""

import json
import pathlib
import re
import sys

from . import charts, goals, reconcile_summary, summary

TOP = pathlib.Path(__file__).parents[2]
DOCUMENT = TOP / "docs" / "PERFORMANCE.md"
CHARTS = TOP / "bench" / "charts"
RESULTS = TOP / "bench" / "results"
IDENTITY = {
    "drains": ("workload", "variant", "commit"), "latency": ("rate", "variant"), "link": ("workload", "variant", "delay_ms"),
    "dtle": ("variant", "delay_ms"),
}


def merge(files):
    merged = None
    for path in files:
        found = json.loads(path.read_text())
        sign(found)
        if merged is None:
            merged = found
            continue
        for key in ("scale", "options", "settings"):
            if found["plan"][key] != merged["plan"][key]:
                raise SystemExit(f"report: {path} was taken with another {key}: {found['plan'][key]}, not {merged['plan'][key]}")
        merged["loads"].update(found["loads"])
        merged["limits"].update(found["limits"])
        merged["machine"], merged["at"] = found["machine"], found["at"]
        merged["plan"]["runs"] = min(merged["plan"]["runs"], found["plan"]["runs"])
        keep_beside_native(merged["drains"], found["drains"])
        for part, keys in IDENTITY.items():
            entries = {tuple(e[k] for k in keys): e for e in [*merged.get(part, ()), *found.get(part, ())]}
            merged[part] = list(entries.values())
    return merged


def sign(results):
    """Each entry says itself when and of which version it was taken, as it may come to stand beside others."""
    taken = f"{results['at'][:10]} {results['machine']['braid'][:7]}"
    for part in IDENTITY:
        for entry in results.get(part, ()):
            entry.setdefault("taken", taken)


def keep_beside_native(before, later):
    """What is not measured again keeps the samples of native that were taken in turn with its own: `native` of its entry."""
    again = {(e["workload"], e["variant"], e["commit"]) for e in later}
    native = {(e["workload"], e["commit"]): e["samples"] for e in before if e["variant"] == "native"}
    for entry in before:
        workload, variant, commit = entry["workload"], entry["variant"], entry["commit"]
        if (workload, "native", commit) in again and (workload, variant, commit) not in again:
            entry.setdefault("native", native.get((workload, commit), []))


def markdown(rows, right=()):
    def line(cells):
        return "| " + " | ".join(str(c) for c in cells) + " |"

    return "\n".join([line(rows[0]), "|" + "|".join("---:" if n in right else "---" for n in range(len(rows[0]))) + "|",
                      *map(line, rows[1:])])


def sections(results, kept):
    """Name of a mark in the document -> what stands there."""
    m = results["machine"]
    scale = results["plan"]["scale"]
    yield "machine", "\n".join([
        f"- {m['cpu']}, {m['cores']} cores, {m['memory_gb']} GB, Linux {m['kernel']}; a flush of 8 kB takes {m['flush_ms']} ms",
        f"- PostgreSQL {m['postgresql']}, Braid {m['braid']}, {results['at'][:10]}; median of {results['plan']['runs']} samples",
        f"- load average before {', '.join(map(str, m['load_average']))}; {m.get('stolen_percent', 0)} % of the CPU time was taken by the host",
        *([f"- **At {scale:g} of the full size**: a look, no result"] if scale != 1 else []),
        *([f"- settings: `{'; '.join(results['plan']['settings'])}`"] if results["plan"]["settings"] else []),
        f"- samples: [`{kept.relative_to(TOP)}`](../{kept.relative_to(TOP)})",
    ])
    yield "goals", markdown(summary.goal_rows(results), right=(4, 5))
    drains = summary.drain_rows(results)
    if len(drains) > 1:
        yield "drains", markdown(drains, right=range(3, 11))
    limits, times, far = summary.other_rows(results)
    for name, rows, right in (("limits", limits, range(2, 5)), ("latency", times, (0, *range(2, 9))), ("distance", far, range(2, 6))):
        if len(rows) > 1:
            yield name, markdown(rows, right)


def fill(text, name, content):
    """What stands between `<!-- bench: NAME -->` and `<!-- end -->`."""
    marked = re.compile(rf"(<!-- bench: {name} -->\n).*?(<!-- end -->)", re.S)
    if not marked.search(text):
        raise SystemExit(f"report: {DOCUMENT} has no mark for {name}")
    return marked.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def reconciliation(files, text):
    """The document with the newest of them in it; they don't complete each other."""
    results = json.loads(files[-1].read_text())
    # The steady test alone, which may have been made elsewhere, or later, takes nothing away.
    name = "reconcile" if results["reconciliations"] else "steady"
    kept = RESULTS / f"{name}-pg{results['machine']['postgresql'].split('.')[0]}.json"
    for name, content in reconcile_sections(results, kept):
        text = fill(text, name, content)
    kept.write_text(json.dumps(results, indent=1) + "\n")
    return text


def reconcile_sections(results, kept):
    m, plan = results["machine"], results["plan"]
    facts = [
        f"{m['cpu']}, {m['cores']} cores, PostgreSQL {m['postgresql']}, Braid {m['braid']}, {results['at'][:10]};"
        f" load average before {', '.join(map(str, m['load_average']))}; samples:"
        f" [`{kept.relative_to(TOP)}`](../{kept.relative_to(TOP)})."
        + (f" {plan['batch']} rows in each transaction of those that insert while cut off." if plan.get("batch", 1) != 1 else "")
        + (f" **Scale {plan['scale']:g}: a look, no result.**" if plan["scale"] != 1 else "")]
    times, inserters = reconcile_summary.reconcile_rows(results)
    if len(inserters) > 1:
        yield "reconcile", "\n\n".join([*facts, markdown(times, right=(0, *range(3, 11))), markdown(inserters, right=(0, *range(3, 8)))])
    steady = reconcile_summary.steady_rows(results)
    if len(steady) > 1:
        yield "steady", "\n\n".join([*facts, markdown(steady, right=range(1, 8))])


def main(arguments):
    files = [pathlib.Path(a) for a in arguments]
    if not files:
        files = sorted(RESULTS.glob("20*.json"))[-1:] + sorted(RESULTS.glob("reconcile-20*.json"))[-1:]
    if not files:
        raise SystemExit("report: there are no results yet: make bench")
    meetings = [f for f in files if json.loads(f.read_text()).get("kind") == "reconcile"]
    files = [f for f in files if f not in meetings]
    RESULTS.mkdir(exist_ok=True)
    if meetings:
        DOCUMENT.write_text(reconciliation(meetings, DOCUMENT.read_text()))
        print(f"{DOCUMENT.relative_to(TOP)}: reconciliation from {meetings[-1].name}")
    if files:
        drained(files)


def drained(files):
    results = merge(files)
    # What the document shows is kept with it, whole.
    kept = RESULTS / f"pg{results['machine']['postgresql'].split('.')[0]}.json"
    text = DOCUMENT.read_text()
    for name, content in sections(results, kept):
        text = fill(text, name, content)
    DOCUMENT.write_text(text)
    kept.write_text(json.dumps(results, indent=1) + "\n")
    CHARTS.mkdir(exist_ok=True)
    drawn = charts.draw(results)
    for name, svg in drawn.items():
        (CHARTS / name).write_text(svg)
    missed = [f"{goal.workload}, {goal.variant}, {goal.measure}" for goal, _, met in summary.judged(results) if met is False]
    print(f"{DOCUMENT.relative_to(TOP)} and {len(drawn)} charts in {CHARTS.relative_to(TOP)} from {', '.join(f.name for f in files)};"
          f" {len(goals.GOALS)} goals, {len(missed)} measured and not met")


if __name__ == "__main__":
    main(sys.argv[1:])
