"""What processes of a server have used: CPU seconds, context switches, memory; from /proc.

CPU seconds of a role come from two sources that complete each other: what the postmaster has reaped between two moments has every
process that ended between them, however short it lived; and processes that stay (a manager, a launcher) are read at both
moments. The sessions of the bench stay open over a sample, and are in neither.
"""

import os
import re
import threading
from dataclasses import dataclass

TICK = os.sysconf("SC_CLK_TCK")
SUBSCRIBER = re.compile(r"logical replication |braid ")
STAYING = re.compile(r"logical replication launcher|braid (manager|supervisor)")
SERVICES = re.compile(r"checkpointer|background writer|walwriter|io worker|walsummarizer")
WALSENDER = re.compile(r"walsender")


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def title(pid):
    """What a server process calls itself, without the numbers that differ from one to the next."""
    line = read(f"/proc/{pid}/cmdline") or b""
    return line.replace(b"\0", b" ").decode(errors="replace").strip().removeprefix("postgres: ").strip()


def children(pid):
    found = read(f"/proc/{pid}/task/{pid}/children")
    if found is not None:
        return [int(child) for child in found.split()]
    # A kernel without that file.
    result = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            stat = read(f"/proc/{entry}/stat")
            if stat and int(stat.rpartition(b")")[2].split()[1]) == pid:
                result.append(int(entry))
    return result


def cpu(pid):
    """Seconds that a process has used: to the nanosecond where the kernel says so. None: it is gone."""
    precise = read(f"/proc/{pid}/schedstat")
    if precise and precise.strip() != b"0 0 0":
        return int(precise.split()[0]) / 1e9
    stat = read(f"/proc/{pid}/stat")
    if stat is None:
        return None
    fields = stat.rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def queued(pid):
    """Seconds that a process could have run and had no processor. None: it is gone, or the kernel does not say."""
    precise = read(f"/proc/{pid}/schedstat")
    return int(precise.split()[1]) / 1e9 if precise and precise.strip() != b"0 0 0" else None


def reaped(pid):
    """Seconds used by the children that a process has waited for."""
    stat = read(f"/proc/{pid}/stat")
    fields = stat.rpartition(b")")[2].split()
    return (int(fields[13]) + int(fields[14])) / TICK


def status(pid):
    """(voluntary switches, involuntary switches, peak resident kB, private resident kB)."""
    text = read(f"/proc/{pid}/status")
    if text is None:
        return None
    values = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)

    def value(key):
        return int(values.get(key, b"0").split()[0])

    return value(b"voluntary_ctxt_switches"), value(b"nonvoluntary_ctxt_switches"), value(b"VmHWM"), value(b"RssAnon")


@dataclass
class Seen:
    """The last that was seen of a process."""

    title: str
    cpu: float = 0.0
    voluntary: int = 0
    involuntary: int = 0
    peak_kb: int = 0
    private_kb: int = 0


class Watch:
    """Follows the processes of one role of a server from `begin` to `end`; looks every quarter of a second and at `last_look`."""

    INTERVAL = 0.25

    def __init__(self, postmaster, role):
        self.postmaster = postmaster
        self.role = role
        self.seen = {}
        self.lock = threading.Lock()
        self.over = threading.Event()

    def staying(self):
        return {pid: cpu(pid) or 0.0 for pid in children(self.postmaster) if STAYING.search(title(pid))}

    def services(self):
        return sum(cpu(pid) or 0.0 for pid in children(self.postmaster) if SERVICES.search(title(pid)))

    def begin(self):
        self.reaped = reaped(self.postmaster)
        self.stayed = self.staying() if self.role is SUBSCRIBER else {}
        self.served = self.services()
        self.look()
        self.began = {pid: seen.cpu for pid, seen in self.seen.items()}
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def follow(self):
        while not self.over.wait(self.INTERVAL):
            self.look()

    def look(self):
        with self.lock:
            for pid in children(self.postmaster):
                name = title(pid)
                if not self.role.search(name) or STAYING.search(name):
                    continue
                counts = status(pid)
                if counts is None:
                    continue
                seen = self.seen.setdefault(pid, Seen(name))
                seen.title = name
                seen.cpu = cpu(pid) or seen.cpu
                seen.voluntary, seen.involuntary, seen.peak_kb = counts[:3]
                seen.private_kb = max(seen.private_kb, counts[3])

    def last_look(self):
        """Before the role's processes are told to end."""
        self.over.set()
        self.thread.join()
        self.look()

    def end(self, seen_only=False):
        """After they have ended and were waited for: what they used. `seen_only`: where others of the server have ended too, the
        sum of what was last seen of each.
        """
        stayed = sum((cpu(pid) or before) - before for pid, before in self.stayed.items())
        seen = self.seen.values()
        if seen_only:
            used = sum(s.cpu - self.began.get(pid, 0.0) for pid, s in self.seen.items())
        else:
            used = reaped(self.postmaster) - self.reaped
        return {
            "cpu": round(used + stayed, 3),
            "cpu_services": round(self.services() - self.served, 3),
            "switches": sum(s.voluntary for s in seen),
            "preempted": sum(s.involuntary for s in seen),
            "peak_rss_mb": round(max((s.peak_kb for s in seen), default=0) / 1024, 1),
            "private_mb": round(sum(s.private_kb for s in seen) / 1024, 1),
            "processes": [
                {"title": s.title, "cpu": round(s.cpu, 3), "switches": s.voluntary, "peak_rss_mb": round(s.peak_kb / 1024, 1)}
                for s in sorted(seen, key=lambda s: -s.cpu)
            ],
        }
