"""`make bench-profile`: where the CPU seconds of a drain go, by function, for each of its processes. perf records both servers
from before the subscription is enabled; what ran under a process of the subscription or its walsender is kept.

Written to bench/results/profile-*: stacks folded to one line each (for other tools), a drawing of them, and a summary in text.
"""

import collections
import os
import re
import shutil
import subprocess
import time

from .processes import STAYING, SUBSCRIBER, WALSENDER, children, title
from .stage import Failed
from .svg import flames

# Stacks by unwinding: neither PostgreSQL nor Rust keep frame pointers. Not a multiple of the
# clock's rate.
RECORD = ("-F", "299", "--call-graph", "dwarf,16384", "-e", "cpu-clock:u" if os.geteuid() else "cpu-clock")
FRAME = re.compile(r"^\s+([0-9a-f]+) (.*?)(?: \(([^()]*)\))?$")
# From the start of the process to what it is for: the same in each stack.
WAY_IN = re.compile(r"_start$|__libc_start|main$|PostmasterMain|ServerLoop|maybe_start_bgworker|StartBackgroundWorker|do_start_bgworker|"
                    r"postmaster_child_launch|BackgroundWorkerMain|BackendMain|BackendStartup|PostgresMain|BackendRun")
HASH = re.compile(r"::h[0-9a-f]{16}$")
OFFSET = re.compile(r"\+0x[0-9a-f]+$")


def missing():
    """Why there is nothing to profile with, or None."""
    if not shutil.which("perf"):
        return "perf is not installed (Debian: linux-perf): no profile"
    return refused(["-e", RECORD[-1]], "here")


def refused(options, what):
    """Why perf does not record with these options, or None."""
    tried = subprocess.run(["perf", "record", "-q", "-o", "/dev/null", *options, "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"perf can't record {what}: {(tried.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    return None


class Observer:
    """Given to drain.sample: records while it runs."""

    def __init__(self, stage, path):
        self.stage = stage
        self.path = path
        self.roles = {}

    def prepare(self, cluster, scene):
        self.postmasters = [cluster.postmaster, scene.provider.postmaster]
        # New workers are children of the postmasters, and are recorded with them.
        self.perf = self.stage.start(
            ["perf", "record", "-q", *RECORD, "-m", "4M", "-o", self.path, "-p", ",".join(map(str, self.postmasters))], as_server=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(1)
        if self.perf.poll() is not None:
            raise Failed(f"perf: {self.perf.stderr.read().strip()}")

    def look(self):
        for postmaster in self.postmasters:
            for pid in children(postmaster):
                name = title(pid)
                if (SUBSCRIBER.search(name) or WALSENDER.search(name)) and not STAYING.search(name):
                    self.roles[pid] = role(name)

    def end(self):
        self.look()
        self.perf.send_signal(2)
        _, said = self.perf.communicate()
        if not self.path.exists():
            raise Failed(f"perf left nothing: {said}")


def role(name):
    """'braid applier 0 of subscription bench' -> 'braid applier 0'; 'walsender postgres postgres [local] ...' -> 'walsender'."""
    return re.sub(r"( worker)? (of|for) subscription.*", "", re.sub(r"^walsender.*", "walsender", name))


def stacks(path, roles):
    """Folded stacks: (role, outermost, .., innermost) -> samples."""
    script = subprocess.Popen(
        ["perf", "script", "-i", str(path), "--no-inline", "-F", "pid,ip,sym,dso"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, errors="replace")
    folded = collections.Counter()
    pid, frames = None, []

    def finish():
        if pid in roles and frames:
            folded[(roles[pid], *(f for f in reversed(frames) if not WAY_IN.match(f)))] += 1

    for line in script.stdout:
        if not line.strip():
            finish()
            pid, frames = None, []
        elif pid is None:
            pid = int(line.split("/")[0].split()[0])
        elif match := FRAME.match(line.rstrip("\n")):
            frames.append(symbol(match[2], match[3] or ""))
    finish()
    script.wait()
    return folded


def symbol(name, library):
    name = HASH.sub("", OFFSET.sub("", name))
    library = os.path.basename(library).removesuffix(" (deleted)")
    if name == "[unknown]":
        return library if library.startswith("[") else f"[{library}]"
    return name + "_[k]" if "kernel" in library else name


def tree(folded, name):
    root = [name, 0, {}]
    for stack, count in folded.items():
        node = root
        node[1] += count
        for frame in stack:
            node = node[2].setdefault(frame, [frame, 0, {}])
            node[1] += count
    return root


def text(folded, label, lines=30):
    """For each role: the functions in which it was found, and those on whose account."""
    total = sum(folded.values()) or 1
    out = [f"{label}: {total} samples", ""]
    for name in sorted({stack[0] for stack in folded}):
        own, with_callees, mine = collections.Counter(), collections.Counter(), 0
        for stack, count in folded.items():
            if stack[0] == name:
                mine += count
                own[stack[-1]] += count
                for frame in set(stack[1:]):
                    with_callees[frame] += count
        out.append(f"{name}: {100 * mine / total:.1f} % of all")
        out.append(f"  {'itself':>7}  {'function':60}  {'with what it calls':>18}  function")
        for (a, x), (b, y) in list(zip(own.most_common(lines), with_callees.most_common(lines))):
            out.append(f"  {100 * x / mine:6.1f}%  {a[:60]:60}  {100 * y / mine:17.1f}%  {b[:70]}")
        out.append("")
    return "\n".join(out)


def report(observer, directory, label):
    folded = stacks(observer.path, observer.roles)
    observer.path.unlink()
    if not folded:
        raise Failed("perf saw none of the processes")
    directory.mkdir(parents=True, exist_ok=True)
    name = label.replace(" ", "-")
    (directory / f"{name}.folded").write_text("".join(f"{';'.join(s)} {n}\n" for s, n in sorted(folded.items())))
    (directory / f"{name}.svg").write_text(flames(f"{label}: CPU samples, outermost function above", tree(folded, "all")))
    summary = text(folded, label)
    (directory / f"{name}.txt").write_text(summary + "\n")
    return summary
