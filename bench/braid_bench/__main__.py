"""`make bench`: makes the scenes, takes the samples in turn, writes the results file, prints the table."""

import datetime
import json
import os
import pathlib
import signal
import sys
import time

from . import dtle, goals, group, machine, many, peers, reconcile, summary, traces
from . import latency as timing
from . import limits as limit
from . import plan as planning
from . import profile as profiling
from . import scene as scenes
from . import wakeups
from .drain import Void, sample
from .link import proxy
from .plan import Installation, Mistake
from .stage import Failed, Stage
from .workloads import workload

RESULTS = pathlib.Path(__file__).parents[1] / "results"
LINKED = ("single", "sysbench")
# How long a drain may take in which each commit waits for a flush, one after the other.
FLUSHING_SECONDS = 30


def say(*what):
    print(*what, flush=True)


def variants(plan, name, commit):
    """Those to be drained in turn; native's best first, since ratios refer to it."""
    chosen = [peers.NATIVE[n] for n in plan.native if n == "best" or commit == "off"]
    modes = plan.modes or [m for m in goals.MODES[name] if commit == "off" or m in goals.MODES_COMMIT_ON]
    return chosen + [peers.BRAID[m] for m in modes]


def latency_variants(plan):
    return [peers.NATIVE["best"], *(peers.BRAID[m] for m in plan.modes or ("parallel",))]


def warm_up(scene):
    """The first reader of a backlog finds everything cold, and would be native: so a drain that does not count comes before."""
    sample(scene, peers.NATIVE["best"], "off")


class Run:
    """One run: what was measured so far is in `results`."""

    def __init__(self, stage, plan, major, version):
        self.stage = stage
        self.plan = plan
        self.major = major
        self.void = 0
        self.results = {
            "format": 1,
            "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine.facts(stage.directory, version),
            "plan": {"scale": plan.scale, "runs": plan.runs, "options": plan.options, "settings": list(plan.settings)},
            "loads": {}, "drains": [], "limits": {},
        }
        self.stolen = machine.stolen()

    def taken(self, entry, take):
        """One sample into an entry; a void one is kept, and fails the run at its end."""
        if "not_available" in entry:
            return
        label = " ".join(str(entry[k]) for k in ("workload", "variant", "commit", "rate", "delay_ms") if k in entry)
        try:
            made = take()
        except peers.NotAvailable as reason:
            entry["not_available"] = str(reason)
            say(f"  {label}: not available ({reason})")
            return
        except Void as reason:
            self.void += 1
            made = {"void": str(reason)}
            say(f"  {label}: VOID: {reason}")
        else:
            say(f"  {label}: {describe(made)}")
        entry["samples"].append(made)

    def workload(self, name):
        """Everything that is measured with one backlog."""
        plan = self.plan
        alone = not plan.drains
        drains = name in plan.drains
        limits = "limits" in plan.parts and (drains or alone)
        link = "link" in plan.parts and name in LINKED and (drains or alone)
        if not (drains or limits or link):
            return
        full = workload(name, plan)
        commits = [c for c in plan.commit if drains]
        slow = []
        # Where a flush takes long, a backlog of which native's every commit waits for one is made
        # shorter.
        flushed = int(FLUSHING_SECONDS * 1000 / machine.flush_ms(self.stage.directory))
        if "on" in commits and full.transactions > flushed:
            commits.remove("on")
            slow = ["on"]
        if commits or limits or link:
            scene = self.scene(name, full, standby=limits)
            warm_up(scene)
            self.drains(scene, commits)
            if limits:
                self.results["limits"][name] = limit.measure(scene, plan.runs, say)
            if link:
                self.link(scene)
            scene.close()
        if slow:
            scene = self.scene(name, workload(name, plan, at_most=flushed))
            warm_up(scene)
            self.drains(scene, slow)
            scene.close()

    def scene(self, name, load, standby=False):
        say(f"\n{name}: {load.title}; {load.transactions} transactions, {load.rows} rows")
        scene = scenes.Scene(self.stage, load, self.major, standby)
        scene.prepare()
        cost = {"title": load.title, "transactions": load.transactions, "rows": load.rows, **scene.load()}
        self.results["loads"].setdefault(name, cost)
        say(f"  committed at the provider in {cost['seconds']} s, {cost['wal_mb']} MB of WAL")
        return scene

    def entries(self, part, scene, chosen, **more):
        """(variant, entry) of what is sampled in turn."""
        made = [(variant, {"workload": scene.workload.name, "variant": variant.name, "title": variant.title,
                           "transactions": scene.workload.transactions, "rows": scene.workload.rows, **extra, **more, "samples": []})
                for variant, extra in chosen]
        self.results.setdefault(part, []).extend(entry for _, entry in made)
        return made

    def drains(self, scene, commits):
        chosen = [(v, {"commit": c}) for c in commits for v in variants(self.plan, scene.workload.name, c)]
        entries = self.entries("drains", scene, chosen)
        for _ in range(self.plan.runs):
            for variant, entry in entries:
                self.taken(entry, lambda v=variant, e=entry: sample(scene, v, e["commit"]))

    def link(self, scene):
        """The same drain through a proxy: without delay, and with 10 ms each way."""
        plan = self.plan
        modes = [m for m in plan.modes or ("parallel", "batch") if m in goals.MODES[scene.workload.name]]
        chosen = [(v, {"delay_ms": delay}) for delay in (0, 20)
                  for v in [peers.NATIVE["best"], *(peers.BRAID[m] for m in modes)]]
        port = self.stage.port + scenes.LINK
        dsn = f"host=127.0.0.1 port={port} dbname=postgres user=postgres"
        entries = self.entries("link", scene, chosen)

        def through(variant, entry):
            with proxy(self.stage, port, scene.provider.port, entry["delay_ms"]):
                return sample(scene, variant, "off", dsn=dsn)

        for _ in range(plan.runs):
            for variant, entry in entries:
                self.taken(entry, lambda v=variant, e=entry: through(v, e))

    def latency(self):
        plan = self.plan
        seconds = max(plan.seconds * min(plan.scale, 1), 3)
        scene = scenes.Scene(self.stage, timing.Beat("latency", "single-row inserts at a steady rate", 0, 0), self.major)
        say(f"\nlatency: commit to visible, {seconds:g} s each")
        scene.prepare()
        entries = self.entries("latency", scene, [(v, {"rate": rate}) for rate in plan.rates for v in latency_variants(plan)])
        for _ in range(plan.runs):
            for variant, entry in entries:
                self.taken(entry, lambda v=variant, e=entry: timing.sample(scene, v, e["rate"], seconds))
        scene.close()

    def dtle(self):
        scene = self.scene("dtle", workload("dtle", self.plan))
        chosen = [(v, {"delay_ms": delay, "commit": "on"}) for delay in dtle.DELAYS for v in dtle.variants(self.plan)]
        entries = self.entries("dtle", scene, chosen, workers=dtle.WORKERS)
        for _ in range(self.plan.runs):
            for variant, entry in entries:
                self.taken(entry, lambda v=variant, e=entry: sample(
                    scene, v, "on", settings=dtle.SETTINGS, beside=dtle.standby_beside(scene, e["delay_ms"])))
        scene.close()

    def write(self):
        now, before = machine.stolen(), self.stolen
        self.results["machine"]["stolen_percent"] = round(100 * (now[0] - before[0]) / max(now[1] - before[1], 1), 2)
        RESULTS.mkdir(exist_ok=True)
        stamp = self.results["at"].replace("-", "").replace(":", "").replace("T", "-")[:15]
        path = RESULTS / f"{stamp}-pg{self.major}.json"
        path.write_text(json.dumps(self.results, indent=1) + "\n")
        return path


def describe(made):
    if "seconds" in made:
        return (f"{made['seconds']:.2f} s, {made['rows_per_s']:.0f} rows/s, CPU subscriber {made['subscriber']['cpu']:.2f}"
                f" walsender {made['walsender']['cpu']:.2f}")
    return ", ".join(f"{key} {value}" for key, value in made.items() if isinstance(value, (int, float)))


def measure(stage, plan):
    major, version = scenes.template(stage)
    run = Run(stage, plan, major, version)
    m = run.results["machine"]
    say(f"PostgreSQL {m['postgresql']}, Braid {m['braid']}, {m['cores']} cores ({m['cpu']}), a flush takes {m['flush_ms']} ms;"
        f" scale {plan.scale:g}, median of {plan.runs}")
    began = time.monotonic()
    try:
        for name in planning.DRAINS:
            run.workload(name)
        if "latency" in plan.parts:
            run.latency()
        if "dtle" in plan.parts:
            run.dtle()
    finally:
        if any(run.results.get(part) for part in ("drains", "latency", "link", "dtle", "limits")):
            path = run.write()
            for text in summary.printed(run.results):
                say("\n" + text)
            if plan.scale != 1:
                say(f"\nscale {plan.scale:g}: goals are for the full size")
            say(f"\n{time.monotonic() - began:.0f} s; samples: {os.path.relpath(path)}")
    if run.void:
        raise Failed(f"{run.void} samples are void")


def profile(stage, plan):
    """One drain of each variant under perf, and the latency under it."""
    if reason := profiling.missing():
        say(f"bench: {reason}")
        return
    major, _ = scenes.template(stage)
    directory = RESULTS / f"profile-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for name in plan.drains:
        scene = scenes.Scene(stage, workload(name, plan), major).prepare()
        scene.load()
        warm_up(scene)
        for commit in plan.commit:
            for variant in variants(plan, name, commit):
                label = f"{name} {variant.name} commit {commit}"
                observer = profiling.Observer(stage, stage.directory / "perf.data")
                try:
                    made = sample(scene, variant, commit, observer=observer)
                except peers.NotAvailable as reason:
                    say(f"{label}: not available ({reason})")
                    continue
                say(profiling.report(observer, directory, label))
                say(f"{describe(made)} (under perf)\n")
        scene.close()
    if "latency" in plan.parts:
        profile_latency(stage, plan, major, directory)
    say(f"stacks, drawings and these summaries: {os.path.relpath(directory)}")


def profile_latency(stage, plan, major, directory):
    """Which process wakes which, and when that runs, at each rate."""
    if reason := wakeups.missing():
        say(f"bench: {reason}")
        return
    scene = scenes.Scene(stage, timing.Beat("latency", "single-row inserts at a steady rate", 0, 0), major).prepare()
    for rate in plan.rates:
        for variant in latency_variants(plan):
            label = f"latency {rate} a second {variant.name}"
            observer = wakeups.Observer(stage, stage.directory / "perf.data")
            made = timing.sample(scene, variant, rate, plan.seconds, observer=observer)
            say(wakeups.report(observer, directory, label, made["commits"]))
            say(f"{describe(made)} (under perf)\n")
    scene.close()


HELP = f"""make bench: native logical replication and Braid in turn, between servers of their own on this machine.
make bench-profile: one drain of each variant under perf; for the latency, which process wakes which, and when that runs.
make bench-traces: no drain; what the output plugin sends of each workload, for the simulator.

{planning.USAGE}

make bench-reconcile: two nodes that were cut off meet again, with Braid and with Bucardo; and how many inserts both can take for long.

{planning.RECONCILE_USAGE}

make bench-many: a subscription to many tables: how long it takes, and what it holds.

{planning.MANY_USAGE}

make bench-group: entries that a group agrees on in a second, and a join beside a subscription's copy.

{planning.GROUP_USAGE}"""


def main():
    arguments = sys.argv[1:]
    if arguments not in ([], ["profile"], ["reconcile"], ["many"], ["group"], ["traces"]):
        print(HELP)
        return 0 if arguments in (["--help"], ["-h"]) else 2

    def stop(number, _frame):
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    stage = None
    try:
        if arguments == ["reconcile"]:
            plan = planning.read_reconciliation()
            peers.check(plan)
            stage = Stage(Installation.read(), plan)
            reconcile.measure(stage, plan, RESULTS, say)
            return 0
        if arguments == ["many"]:
            plan = planning.read_many()
            stage = Stage(Installation.read(), plan)
            many.measure(stage, plan, RESULTS, say)
            return 0
        if arguments == ["group"]:
            plan = planning.read_group()
            stage = Stage(Installation.read(), plan)
            group.measure(stage, plan, RESULTS, say)
            return 0
        plan = planning.read(profile=arguments == ["profile"])
        peers.check(plan)
        stage = Stage(Installation.read(), plan)
        if arguments == ["traces"]:
            traces.record(stage, plan, scenes.template(stage)[0], RESULTS / "traces", say)
        else:
            (profile if arguments else measure)(stage, plan)
    except Mistake as mistake:
        print(f"bench: {mistake}", file=sys.stderr)
        return 2
    except (Failed, Void) as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if stage:
            stage.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
