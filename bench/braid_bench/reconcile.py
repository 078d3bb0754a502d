"""Two nodes that were cut off and meet again, after the benchmark of Mucha et al. (Computer Science 24(3), 2023): both hold the same
rows, the links between them are cut, each inserts many, somebody inserts a few on both all the time, the links are healed. How long
until both have all that was written before the links were healed; until each is less than a second behind the other; and what the
inserters notice. Then, as they do, the highest rate of inserts on both nodes that goes on for minutes without a node's falling behind.
"""

import contextlib
import datetime
import json
import os
import subprocess
import time

from . import inserters as inserting
from . import machine, peers, reconcile_summary, systems
from .beats import Beats, level, verdict
from .drain import Void
from .inserters import Inserter, phase
from .latency import quantile
from .pair import NAMES, Pair, make_base, spent
from .scene import digests, template
from .stage import Failed
from .summary import table
from .workloads import CLIENTS

TABLES = ("reconcile", "beat")
# Less than this behind is level.
LEVEL = 1.0
LIMIT = 7200
FILLER = "a row that came while the nodes could not see each other, and which the other one has to learn of later"


def wait(beats, done, what, inserters=(), system=None, seconds=LIMIT):
    """The moment when something holds, looked at often: that costs nothing, since the beats have it."""
    end = time.monotonic() + seconds
    while not done():
        for inserter in inserters:
            inserter.check()
        if time.monotonic() > end:
            raise Void(f"waited {seconds:.0f} s in vain until {what}\n{system.tail() if hasattr(system, 'tail') else ''}")
        time.sleep(0.01)
    return time.monotonic()


def load(pair, rows, inserts, shared):
    """Both nodes at the same time; seconds and CPU seconds of both."""
    stage = pair.stage
    script = stage.directory / "bulk.sql"
    script.write_text(
        "insert into reconcile (id, node, filler) select :first + 2 * i + case when i < :shared then 0 else :node end, :node,"
        f" '{FILLER}' from (select nextval('bulk') i from generate_series(1, {stage.plan.batch})) n;\n")
    began, before = time.monotonic(), pair.used()
    loaders = [
        stage.start(
            [stage.installation.program("pgbench"), "-h", stage.directory, "-p", node.port, "-U", "postgres", "-n", "-M", "prepared",
             "-c", CLIENTS, "-j", 1, "-t", inserts // CLIENTS // stage.plan.batch, f"-Dfirst={rows + 1}", f"-Dshared={shared}", f"-Dnode={number}",
             "-f", script, "postgres"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, environment={"PGOPTIONS": "-c synchronous_commit=off"})
        for number, node in enumerate(pair.nodes)]
    for loader in loaders:
        said = loader.communicate()[0]
        if loader.returncode:
            raise Failed(f"pgbench: {said}")
    return {"seconds": round(time.monotonic() - began, 2), "cpu": spent(before, pair.used())["sum"]}


class Moments:
    """What happened when, by the clock of this process and by that of the inserters' logs."""

    def __init__(self):
        self.monotonic, self.epoch = {}, {}

    def note(self, name):
        self.monotonic[name], self.epoch[name] = time.monotonic(), time.time()
        return self.monotonic[name]

    def between(self, first, second):
        return round(self.monotonic[second] - self.monotonic[first], 3)


# Name of a stretch -> the moments at which it begins and ends.
PHASES = {"linked": ("inserting", "cut"), "loading": ("loading", "loaded"), "cut": ("loaded", "healed"), "reconciling": ("healed", "equal"),
          "after": ("equal", "end")}


def reconcile(stage, system, rows, inserts, shared):
    """One reconciliation on fresh copies of the base."""
    plan = stage.plan
    seconds = plan.scaled(plan.phase, 5)
    taken = contextlib.ExitStack()
    with taken:
        pair = Pair(stage, system.settings, rows + 2 * inserts + 1)
        taken.callback(pair.close)
        taken.callback(system.close)
        pair.heal()
        system.begin(pair)
        beats = Beats(pair.nodes).start()
        taken.callback(beats.over.set)
        marks = beats.marks()
        wait(beats, lambda: beats.has([max(m, 1) for m in marks]), "both nodes are linked", system=system, seconds=120)
        wait(beats, lambda: beats.now() < LEVEL, "both nodes are level", system=system, seconds=120)
        moments = Moments()

        def account():
            return {**pair.used(), system.name: system.used()}

        inserters = [Inserter(node, number, plan.inserters) for number, node in enumerate(pair.nodes)]
        moments.note("inserting")
        time.sleep(seconds)
        load_before = os.getloadavg()[0]
        moments.note("cut")
        pair.cut()
        system.cut(pair)
        moments.note("loading")
        loading = load(pair, rows, inserts, shared)
        moments.note("loaded")
        time.sleep(seconds)

        marks = beats.marks()
        known = list(beats.seen)
        before = account()
        healed = moments.note("healed")
        pair.heal()
        system.healed(pair)
        first = wait(beats, lambda: beats.seen[0] > known[0] or beats.seen[1] > known[1], "anything comes", inserters, system)
        wait(beats, lambda: beats.has(marks), "both have all", inserters, system)
        moments.note("equal")
        used = spent(before, account())
        # What the beats say of the rows is looked at.
        wanted = 2 * inserts - shared
        for name, session in zip(NAMES, pair.sessions):
            there = int(session.ask(f"select count(*) from reconcile where id > {rows} and id <= {rows + 2 * inserts}"))
            if there != wanted:
                raise Void(f"{name} has {there} of {wanted} rows when it should have all")
        time.sleep(seconds)
        with contextlib.suppress(Void):
            wait(beats, lambda: level(beats.series, healed, LEVEL) is not None, "both are level", inserters, system, seconds=max(2 * seconds, 60))
        moments.note("end")
        logs = [inserter.stop(session) for inserter, session in zip(inserters, pair.sessions)]
        marks = beats.marks()
        wait(beats, lambda: beats.has([m + 1 for m in marks]), "both have the last", system=system, seconds=1800)
        beats.stop()
        arrived(pair, beats)
        check(pair, rows, wanted, logs, len(logs) * inserting.CLIENTS)
        level_s = level(beats.series, healed, LEVEL)
        ended = moments.monotonic["end"]
        settled = min(healed + (level_s or 0), ended)
        after = lags_between(beats.series, settled, ended)
        return {
            "equal_s": moments.between("healed", "equal"),
            "level_s": level_s and round(max(level_s, moments.monotonic["equal"] - healed), 3),
            "first_s": round(first - healed, 3),
            "lag_p50_s": round(quantile(after, 0.5), 3),
            "lag_max_s": round(after[-1], 3),
            "cut_s": moments.between("cut", "healed"),
            "load": loading,
            "cpu": used,
            "conflicts": system.conflicts(pair),
            "inserters": {
                name: phase([e for log in logs for e in log], moments.epoch[begin], moments.epoch[end])
                for name, (begin, end) in PHASES.items()},
            "load_before": round(load_before, 2),
        }


def lags_between(series, begin, end):
    """Seconds that the further node was behind at each look in this time, sorted; the last one before its end where there was none."""
    looks = [(moment, max(lags)) for moment, *lags in series if moment <= end]
    return sorted(lag for moment, lag in looks if moment >= begin) or [lag for _, lag in looks[-1:]]


def arrived(pair, beats):
    """The beats that were written last are there too."""
    for number, session in enumerate(pair.sessions):
        session.until(f"(select count(*) from beat where node = {1 - number}) = {len(beats.written[1 - number])}", "the last beat is there", 120)


def check(pair, rows, wanted, logs=(), unsaid=0):
    """Both nodes are equal row by row, and nothing is lost. A session that is ended may have committed what its log does not say: at most
    `unsaid` have.
    """
    found = [digests(session, TABLES) for session in pair.sessions]
    if found[0] != found[1]:
        raise Void("; ".join(f"{t}: {found[0][t]} at {NAMES[0]}, {found[1][t]} at {NAMES[1]}" for t in TABLES if found[0][t] != found[1][t]))
    there = int(found[0]["reconcile"].split()[0])
    logged = sum(len(log) for log in logs)
    if not rows + wanted + logged <= there <= rows + wanted + logged + unsaid:
        raise Void(f"{there} rows, where {rows} were, {wanted} came while cut off and {logged} by the inserters")


def steady(stage, system, rows, found, say):
    """Rates one after the other, until one is not stable, into `found`."""
    plan = stage.plan
    seconds = plan.scaled(plan.steady, 10)
    with contextlib.ExitStack() as taken:
        pair = Pair(stage, system.settings, rows + 1)
        taken.callback(pair.close)
        taken.callback(system.close)
        pair.heal()
        system.begin(pair)
        beats = Beats(pair.nodes).start()
        taken.callback(beats.over.set)
        total = 0
        for rate in plan.rates:
            wait(beats, lambda: beats.series and beats.now() < 2 * LEVEL, "both nodes are level", system=system, seconds=max(seconds, 120))
            before = {**pair.used(), system.name: system.used()}
            began = time.monotonic()
            inserters = [Inserter(node, number, rate, seconds, 8) for number, node in enumerate(pair.nodes)]
            end = time.monotonic() + seconds
            while time.monotonic() < end and all(i.process.poll() is None for i in inserters):
                beats.check()
                time.sleep(0.1)
            ended = time.monotonic()
            logs = [inserter.wait() for inserter in inserters]
            used = spent(before, {**pair.used(), system.name: system.used()})
            series = [s for s in beats.series if began <= s[0] <= ended]
            reached = [len(log) / seconds for log in logs]
            total += sum(len(log) for log in logs)
            lags = sorted(max(each) for _, *each in series)
            made = {"rate": rate, "seconds": round(ended - began, 1), "reached_per_s": [round(r, 1) for r in reached],
                    "lag_p50_s": round(quantile(lags, 0.5), 3), "lag_max_s": round(lags[-1], 3),
                    "lag_end_s": round(max(series[-1][1:]), 3),
                    "inserters": phase([e for log in logs for e in log], 0, float("inf")), "cpu": used,
                    "unstable": verdict(series, began, ended, reached, rate)}
            found.append(made)
            say(f"  {system.name} {rate}/s on each: {made['unstable'] or 'stable'}; lag p50 {made['lag_p50_s']} s, at most"
                f" {made['lag_max_s']} s, at the end {made['lag_end_s']} s; insert p99 {made['inserters']['p99_ms']} ms; CPU {used['sum']}")
            if made["unstable"]:
                break
        marks = beats.marks()
        wait(beats, lambda: beats.has([m + 1 for m in marks]), "both have the last", system=system, seconds=1800)
        beats.stop()
        arrived(pair, beats)
        wait_rows(pair, rows + total)
        check(pair, rows, total)


def wait_rows(pair, rows):
    for session in pair.sessions:
        session.until(f"(select count(*) from reconcile) = {rows}", "all rows are there", 60)


def describe(made):
    inserters = made["inserters"]
    return (f"equal after {made['equal_s']} s, level after {made['level_s']} s, first row after {made['first_s']} s, CPU {made['cpu']['sum']};"
            " inserters' p99 " + ", ".join(f"{name} {inserters[name].get('p99_ms', '-')} ms" for name in PHASES))


class Run:
    """What was measured so far is in `results`."""

    def __init__(self, stage, plan, major, version, say):
        self.stage, self.plan, self.major, self.say = stage, plan, major, say
        self.void = 0
        self.results = {
            "format": 1, "kind": "reconcile",
            "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine.facts(stage.directory, version),
            "plan": {"scale": plan.scale, "runs": plan.runs, "options": plan.options, "settings": list(plan.settings),
                     "inserters": plan.inserters, "batch": plan.batch, "phase": plan.scaled(plan.phase, 5), "steady": plan.scaled(plan.steady, 10)},
            "reconciliations": [], "steady": [],
        }
        self.stolen = machine.stolen()

    def taken(self, label, entry, take):
        try:
            made = take()
        except peers.NotAvailable as reason:
            entry["not_available"] = str(reason)
            self.say(f"  {label}: not available ({reason})")
            return None
        except (Void, Failed) as reason:
            # Of one system; the others are measured all the same.
            self.void += 1
            entry.setdefault("samples", []).append({"void": str(reason)})
            self.say(f"  {label}: VOID: {reason}")
            return None
        return made

    def able(self, entry, system):
        reason = system.missing(self.stage)
        entry["title"] = system.title
        if reason:
            entry["not_available"] = reason
            self.say(f"  {system.name}: not available ({reason})")
        return not reason

    def size(self, size, chosen):
        rows, inserts, shared = self.plan.counts(size)
        self.say(f"\n{rows} rows, {inserts} inserts on each of two nodes, {shared} of them with the same key,"
                 f" {self.plan.inserters:g} a second meanwhile")
        make_base(self.stage, rows)
        entries = [(system, {"system": system.name, "title": system.title, "size": size, "rows": rows, "inserts": inserts,
                             "shared": shared, "samples": []})
                   for system in chosen if system.name != "bucardo" or size <= self.plan.bucardo]
        self.results["reconciliations"] += [entry for _, entry in entries]
        entries = [(system, entry) for system, entry in entries if self.able(entry, system)]
        for _ in range(self.plan.runs):
            for system, entry in entries:
                if made := self.taken(system.name, entry, lambda s=system: reconcile(self.stage, s, rows, inserts, shared)):
                    entry["samples"].append(made)
                    self.say(f"  {system.name}: {describe(made)}")

    def steady(self, rows, chosen):
        self.say(f"\nsteady inserts on both nodes, {self.results['plan']['steady']:g} s of each rate, on top of {rows} rows")
        for system in chosen:
            entry = {"system": system.name, "title": system.title, "rows": rows, "rates": []}
            self.results["steady"].append(entry)
            # What was measured before a sample that is void is kept.
            if self.able(entry, system):
                self.taken(system.name, entry, lambda s=system, e=entry: steady(self.stage, s, rows, e["rates"], self.say))

    def write(self, directory):
        now, before = machine.stolen(), self.stolen
        self.results["machine"]["stolen_percent"] = round(100 * (now[0] - before[0]) / max(now[1] - before[1], 1), 2)
        directory.mkdir(exist_ok=True)
        stamp = self.results["at"].replace("-", "").replace(":", "").replace("T", "-")[:15]
        path = directory / f"reconcile-{stamp}-pg{self.major}.json"
        path.write_text(json.dumps(self.results, indent=1) + "\n")
        return path


def measure(stage, plan, directory, say):
    major, version = template(stage)
    run = Run(stage, plan, major, version, say)
    m = run.results["machine"]
    say(f"PostgreSQL {m['postgresql']}, Braid {m['braid']}, {m['cores']} cores ({m['cpu']}), a flush takes {m['flush_ms']} ms;"
        f" load average {m['load_average'][0]}, scale {plan.scale:g}")
    chosen = systems.chosen(plan)
    began = time.monotonic()
    try:
        for size in plan.sizes:
            run.size(size, chosen)
        if plan.steady:
            # On top of the smallest of the sizes, which is the last base unless they were asked for
            # in another order.
            rows = plan.counts(plan.sizes[-1])[0]
            run.steady(rows, chosen)
    finally:
        if run.results["reconciliations"] or run.results["steady"]:
            path = run.write(directory)
            for text in reconcile_summary.printed(run.results, table):
                say("\n" + text)
            if plan.scale != 1:
                say(f"\nscale {plan.scale:g}: a look, no result")
            say(f"\n{time.monotonic() - began:.0f} s; samples: {os.path.relpath(path)}")
    if run.void:
        raise Failed(f"{run.void} samples are void")
