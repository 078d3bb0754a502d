"""`make bench-profile BENCH_ONLY=latency`: which process a commit waits for on its way to the other node, and how long.

At a steady rate the processors have nothing to do most of the time, and samples of their stacks say little. What counts is when one
process wakes the next, how long that takes to run, and what it does until it sleeps again: perf records the scheduler's own events, for
all processes, while the load lasts.
"""

import collections
import re
import subprocess
import time

from .latency import quantile
from .processes import STAYING, SUBSCRIBER, WALSENDER, children, title
from .profile import refused, role
from .stage import Failed

RECORD = ("-a", "--event=sched:sched_switch", "--event=sched:sched_waking")
LINE = re.compile(r"^\s*(\d+)\s+(\d+\.\d+): sched:sched_(\w+): (.*)$")
SWITCH = re.compile(r"prev_pid=(\d+) prev_prio=-?\d+ prev_state=(\S+) ==> .*next_pid=(\d+) ")
WAKING = re.compile(r" pid=(\d+) ")
SESSION = "session that commits"


def missing():
    """Why there is nothing to record with, or None."""
    return refused(RECORD, "the scheduler's events here")


class Observer:
    """Given to latency.sample: records from `begin` to `end`."""

    def __init__(self, stage, path):
        self.stage = stage
        self.path = path
        self.roles = {}

    def begin(self, cluster, scene):
        self.servers = ((cluster.postmaster, SUBSCRIBER), (scene.provider.postmaster, WALSENDER))
        self.before = {pid for postmaster, _ in self.servers for pid in children(postmaster)}
        self.perf = self.stage.start(
            ["perf", "record", "-q", "-m", "8M", *RECORD, "-o", self.path], as_server=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(1)
        if self.perf.poll() is not None:
            raise Failed(f"perf: {self.perf.stderr.read().strip()}")

    def look(self):
        """While the load lasts: its sessions are gone afterwards."""
        for postmaster, wanted in self.servers:
            for pid in children(postmaster):
                name = title(pid)
                if wanted.search(name) and not STAYING.search(name):
                    self.roles[pid] = role(name)
                elif wanted is WALSENDER and pid not in self.before and "[local]" in name:
                    self.roles[pid] = SESSION

    def end(self):
        self.perf.send_signal(2)
        _, said = self.perf.communicate()
        if not self.path.exists():
            raise Failed(f"perf left nothing: {said}")


class Hops:
    """Follows the events in their order; times in microseconds."""

    def __init__(self, roles):
        self.roles = roles
        self.running = {}   # pid -> since when, awake but for being preempted
        self.woken = {}     # pid -> (when, by which role)
        self.before = collections.defaultdict(list)     # (waker, woken) -> from the waker's start to its waking the other
        self.delay = collections.defaultdict(list)      # (waker, woken) -> from there until it runs
        self.ran = collections.defaultdict(list)        # role -> from its start until it sleeps again

    def waking(self, at, waker, pid):
        if pid not in self.roles or pid in self.running or pid in self.woken:
            return
        by = self.roles.get(waker)
        self.woken[pid] = (at, by)
        if by and waker in self.running:
            self.before[(by, self.roles[pid])].append(at - self.running[waker])

    def switch(self, at, left, state, entered):
        # R: preempted, and goes on later.
        if left in self.roles and not state.startswith("R") and (since := self.running.pop(left, None)) is not None:
            self.ran[self.roles[left]].append(at - since)
        if entered in self.roles and entered not in self.running:
            self.running[entered] = at
            when, by = self.woken.pop(entered, (None, None))
            if when is not None:
                self.delay[(by or "else", self.roles[entered])].append(at - when)


def follow(lines, roles):
    hops = Hops(roles)
    for line in lines:
        if not (match := LINE.match(line)):
            continue
        at = float(match[2]) * 1e6
        if match[3] == "waking":
            if found := WAKING.search(match[4]):
                hops.waking(at, int(match[1]), int(found[1]))
        elif found := SWITCH.search(match[4]):
            hops.switch(at, int(found[1]), found[2], int(found[3]))
    return hops


def column(times):
    if not times:
        return f"{'':>15}"
    ordered = sorted(times)
    return f"{quantile(ordered, 0.5):7.0f} {quantile(ordered, 0.99):7.0f}"


def text(hops, label, least):
    """A line for each pair of processes of which one woke the other at least `least` times."""
    out = [f"{label}: microseconds, p50 and p99", f"{'wakes':24} {'whom':28} {'times':>7}  {'its work before':>15}  {'until that runs':>15}  {'until it sleeps':>15}"]
    for (by, whom), delays in sorted(hops.delay.items(), key=lambda item: -len(item[1])):
        if len(delays) >= least:
            out.append(f"{by:24} {whom:28} {len(delays):7}  {column(hops.before[(by, whom)])}  {column(delays)}  {column(hops.ran[whom])}")
    return "\n".join(out)


def report(observer, directory, label, commits):
    script = subprocess.Popen(["perf", "script", "-i", str(observer.path), "-F", "tid,time,event,trace"], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, errors="replace")
    hops = follow(script.stdout, observer.roles)
    script.wait()
    observer.path.unlink()
    if not hops.delay:
        raise Failed("perf saw none of the processes")
    summary = text(hops, label, commits / 50)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{label.replace(' ', '-').replace('/', '-')}.txt").write_text(summary + "\n")
    return summary
