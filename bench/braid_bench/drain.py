"""The drain: how long a subscriber takes for a backlog, and what that costs on either side.

The clock runs from enabling the subscription to the last row's being visible, so the start of the workers is in it, as it is for
users; when the first row was visible is noted too. With synchronous_commit on, it runs until the subscriber has confirmed to the provider
that all is durable: a row may be seen before that. Afterwards the tables are compared with the provider's: a sample that differs is void.
"""

import contextlib
import os
import time

from . import peers
from .processes import SUBSCRIBER, WALSENDER, Watch
from .scene import digests, prewarm
from .stage import Failed

LIMIT = 1800


class Void(Exception):
    """A sample that is none: rows differ, or the subscription failed."""


def pause(elapsed):
    """Looking costs CPU on the machine that is measured: less often, the longer it takes. Half a per cent of resolution."""
    return min(max(elapsed * 0.005, 0.002), 0.05)


def wait_until(done, session, cluster, limit=LIMIT):
    """The moment when an SQL condition holds in that session. Errors in the subscriber's log end the wait."""
    began = time.monotonic()
    look_at_log = began + 2
    session.ask(f"prepare done as select {done}")
    while session.ask("execute done") != "t":
        now = time.monotonic()
        if now > look_at_log:
            if errors := cluster.tail():
                raise Void(f"the subscriber reports\n{errors}")
            look_at_log = now + 2
        if now > began + limit:
            raise Void(f"not done after {limit} s")
        time.sleep(pause(now - began))
    session.ask("deallocate done")
    return time.monotonic()


def visible(row):
    return f"exists (select from bench_done where n = {row})"


def last_row(variant, position):
    done = visible(1)
    return f"{done} and {peers.caught_up(variant, position)}" if variant.relaxed else done


def confirmed(position):
    """At the provider: the subscriber has said that everything up to there is durable."""
    return f"coalesce((select bool_or(flush_lsn >= '{position}') from pg_stat_replication), false)"


def role_pids(session, provider_session, variant):
    """Process ids of the subscription's workers and of its walsender."""
    kind = "logical replication%" if variant.native else "braid %"
    workers = session.ask(f"select pid from pg_stat_activity where backend_type like '{kind}' and backend_type not in"
                          " ('braid manager', 'braid supervisor', 'logical replication launcher')")
    senders = provider_session.ask("select pid from pg_stat_activity where backend_type = 'walsender'")
    return workers.split(), senders.split()


def stop(variant, session, provider_session):
    """Disable the subscription; back when its processes on either side have ended and been waited for."""
    workers, senders = role_pids(session, provider_session, variant)
    peers.switch(variant, session, False)
    end = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in workers + senders):
        if time.monotonic() > end:
            raise Failed("the workers did not end within 30 s")
        time.sleep(0.01)


def sample(scene, variant, commit, dsn=None, observer=None, settings=(), beside=None):
    """One drain by a fresh subscriber. `dsn` leads to the provider by another way; `observer` records what runs; `beside` is
    a context around it, given the subscriber.
    """
    cluster = scene.subscriber(variant, *settings)
    companion = contextlib.ExitStack()
    try:
        if beside:
            companion.enter_context(beside(cluster))
        session = cluster.session()
        prewarm(session)
        scene.slot(variant.peer)
        peers.create(variant, commit, session, dsn or scene.provider.dsn, scene.stage.plan, scene.major)
        session.ask("checkpoint")
        scene.stage.run(["sync", "-f", scene.stage.directory])

        watches = {"subscriber": Watch(cluster.postmaster, SUBSCRIBER), "walsender": Watch(scene.provider.postmaster, WALSENDER)}
        for watch in watches.values():
            watch.begin()
        load = os.getloadavg()[0]
        if observer:
            observer.prepare(cluster, scene)
        began = time.monotonic()
        peers.switch(variant, session, True)
        first = wait_until(visible(0), session, cluster) - began
        if observer:
            observer.look()
        shown = seconds = wait_until(last_row(variant, scene.end_lsn), session, cluster) - began
        if commit == "on":
            seconds = wait_until(confirmed(scene.end_lsn), scene.session, cluster) - began
        if observer:
            observer.end()
        for watch in watches.values():
            watch.last_look()
        stop(variant, session, scene.session)
        used = {side: watch.end() for side, watch in watches.items()}

        found = digests(session, scene.tables)
        differing = [table for table in scene.tables if found[table] != scene.digests[table]]
        if differing:
            raise Void("; ".join(f"{t}: {found[t]} here, {scene.digests[t]} at the provider" for t in differing))
        if seen := peers.conflicts(variant, session, scene.major):
            raise Void(f"{seen} conflicts where there are none to be: not a fair measure")
        return {
            "seconds": round(seconds, 3),
            "first_row_s": round(first, 3),
            "visible_s": round(shown, 3),
            "transactions_per_s": round(scene.workload.transactions / seconds, 1),
            "rows_per_s": round(scene.workload.rows / seconds, 1),
            "load_before": round(load, 2),
            **used,
        }
    finally:
        companion.close()
        scene.discard(cluster)
        scene.drop_slot()
