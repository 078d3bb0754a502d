"""How long a commit at the provider takes to be visible at the subscriber, under a steady load.

Both moments are taken from the servers' own records, after the load, so that nothing looks while it lasts. The commit: its commit
timestamp at the provider. Its being visible: the time in the commit record that the subscriber's applying process wrote into
its own WAL; each row's xmin there says in which local transaction it came, also when several came in one.

A commit record is written a little before its transaction is visible to others. How much that is gets measured too: a hundred times a
second a session at the subscriber notes the clock and its snapshot; `unseen_ms` is the longest that any transaction whose record was
written was still missing from a snapshot, and a transaction that is in a snapshot before its record's time would void the sample.
"""

import bisect
import calendar
import math
import re
import subprocess
import time

from . import peers
from .drain import Void, stop, visible, wait_until
from .processes import SUBSCRIBER, WALSENDER, Watch
from .stage import Failed
from .workloads import SEED, Workload

CLIENTS = 8
# Commits on either side of a moment that are looked for in its snapshot.
NEAR = 500
COMMIT = re.compile(r"tx: +(\d+),.* desc: COMMIT(?:_PREPARED)? (?:\d+: )?(\S+ \S+) UTC(.*)")
SUBXACTS = re.compile(r"; subxacts:((?: \d+)+)")


class Beat(Workload):
    """Rows that come in while it is measured."""

    def tables(self):
        return "create table beat (id bigint generated always as identity primary key, filler text not null)"

    def load(self, cluster, session, transactions=None):
        pass


def microseconds(text):
    """'2026-11-21 08:21:04.123456' since the epoch."""
    whole, _, fraction = text.partition(".")
    return calendar.timegm(time.strptime(whole, "%Y-%m-%d %H:%M:%S")) * 1_000_000 + int(fraction.ljust(6, "0") or 0)


def commits(cluster, session, start, end):
    """Local transaction id -> when its commit record was written, in microseconds."""
    dump = cluster.stage.program("pg_waldump", "-p", cluster.directory / "pg_wal", "-r", "Transaction", "-s", start, "-e", end)
    found = {}
    for line in dump.splitlines():
        if match := COMMIT.search(line):
            moment = microseconds(match[2])
            found[int(match[1])] = moment
            if sub := SUBXACTS.search(match[3]):
                found.update((int(xid), moment) for xid in sub[1].split())
    return found


class Snapshots:
    """What a session saw, and when."""

    def __init__(self):
        self.taken = []

    def look(self, session):
        clock, snapshot = session.ask(
            "select (extract(epoch from clock_timestamp()) * 1000000)::bigint, pg_current_snapshot()").split("|")
        self.taken.append((int(clock), snapshot))

    def compare(self, found):
        """(longest time from a commit's record to its being visible, how many were visible before their records)."""
        unseen, early = 0, 0
        in_order = sorted(found.items(), key=lambda item: item[1])
        moments = [moment for _, moment in in_order]
        for clock, snapshot in self.taken:
            low, high, running = snapshot.split(":")
            low, high = int(low) % 2**32, int(high) % 2**32
            running = {int(x) % 2**32 for x in running.split(",") if x}
            at = bisect.bisect_right(moments, clock)
            for xid, moment in in_order[max(at - NEAR, 0):at + NEAR]:
                visible = xid < low or (xid < high and xid not in running)
                if moment <= clock and not visible:
                    unseen = max(unseen, clock - moment)
                elif moment > clock and visible:
                    early += 1
        return unseen, early


def quantile(ordered, share):
    return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]


def sample(scene, variant, rate, seconds, observer=None):
    cluster = scene.subscriber(variant)
    stage = scene.stage
    try:
        session = cluster.session()
        scene.session.ask("truncate beat, bench_done; insert into bench_done values (1)")
        scene.slot_now(variant.peer)
        peers.create(variant, "off", session, scene.provider.dsn, stage.plan, scene.major)
        peers.switch(variant, session, True)
        # Streaming, and warm.
        scene.session.ask("insert into bench_done values (2)")
        wait_until(visible(2), session, cluster, 60)
        start = session.ask("select pg_current_wal_insert_lsn()")

        watches = {"subscriber": Watch(cluster.postmaster, SUBSCRIBER), "walsender": Watch(scene.provider.postmaster, WALSENDER)}
        for watch in watches.values():
            watch.begin()
        script = stage.directory / "beat.sql"
        script.write_text("insert into beat (filler) values ('a row whose journey is timed');\n")
        if observer:
            observer.begin(cluster, scene)
        load = stage.start(
            [stage.installation.program("pgbench"), "-h", stage.directory, "-p", scene.provider.port, "-U", "postgres", "-n",
             "-M", "prepared", "-c", CLIENTS, "-j", 1, "-T", math.ceil(seconds), "-R", rate, f"--random-seed={SEED}", "-f", script,
             "postgres"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        looks = Snapshots()
        while load.poll() is None:
            looks.look(session)
            if observer:
                observer.look()
            time.sleep(0.01)
        if observer:
            observer.end()
        said = load.communicate()[0]
        if load.returncode:
            raise Failed(f"pgbench: {said}")
        session.until(f"(select count(*) from beat) = {scene.session.ask('select count(*) from beat')}", "all rows are there", 60)
        for watch in watches.values():
            watch.last_look()
        # An asynchronous commit's record may not be on disk yet.
        session.ask("checkpoint")
        end = session.ask("select pg_current_wal_flush_lsn()")
        stop(variant, session, scene.session)
        # pgbench's sessions have ended meanwhile too.
        used = {side: watch.end(seen_only=True) for side, watch in watches.items()}
        return {**evaluate(scene, cluster, session, looks, start, end), **used}
    finally:
        scene.discard(cluster)
        scene.drop_slot()


def evaluate(scene, cluster, session, looks, start, end):
    found = commits(cluster, session, start, end)
    here = dict(map(int, line.split("|")) for line in session.ask("select id, xmin from beat").splitlines())
    there = dict(map(int, line.split("|")) for line in scene.session.ask(
        "select id, (extract(epoch from pg_xact_commit_timestamp(xmin)) * 1000000)::bigint from beat").splitlines())
    if here.keys() != there.keys():
        raise Void(f"{len(there)} rows at the provider, {len(here)} at the subscriber")
    lost = [i for i in here if here[i] not in found]
    if lost:
        raise Void(f"no commit record for {len(lost)} of {len(here)} rows")
    unseen, early = looks.compare(found)
    if early:
        raise Void(f"{early} times a transaction was visible before the time of its commit record: that time can't be trusted")
    # The first second warms caches up.
    first = min(there.values())
    warm = 1_000_000 if max(there.values()) - first > 3_000_000 else 0
    ordered = sorted((found[here[i]] - there[i]) / 1000 for i in here if there[i] - first >= warm)
    span = (max(there.values()) - first) / 1e6
    return {
        "commits": len(ordered), "reached_per_s": round(len(there) / span, 1),
        **{name: round(quantile(ordered, share), 3) for name, share in
           (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99), ("p999_ms", 0.999), ("max_ms", 1.0))},
        "unseen_ms": round(unseen / 1000, 3), "looks": len(looks.taken),
    }
