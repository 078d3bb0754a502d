"""DTLE's table (Aikesheng's measurement of MTS, oltp_write_only over a million rows, 32 workers): serial against parallel replay where
each commit takes a round trip of 20 ms. There the target is a remote server; here every commit of the subscriber waits for a
synchronous standby of its own, a physical one behind a link of 20 ms.
"""

import contextlib
import time

from . import peers
from .link import proxy
from .scene import STANDBY, STANDBY_LINK, SUBSCRIBER
from .stage import Cluster, Failed

DELAYS = (0, 20)
WORKERS = 32
NAME = "bench_standby"
SETTINGS = (
    f"synchronous_standby_names = '{NAME}'",
    f"braid.appliers_per_subscription = {WORKERS}",
    f"max_worker_processes = {WORKERS + 32}",
    f"max_replication_slots = {WORKERS + 32}",
)


def standby_beside(scene, delay_ms):
    """A context for drain.sample: the subscriber has a synchronous standby at that distance."""
    @contextlib.contextmanager
    def beside(cluster):
        stage = scene.stage
        stage.copy("base", "standby")
        standby = Cluster(stage, "standby", STANDBY)
        stage.run(["touch", standby.directory / "standby.signal"])
        port = stage.port + STANDBY_LINK
        try:
            with proxy(stage, port, stage.port + SUBSCRIBER, delay_ms):
                standby.start(*SETTINGS[1:], f"primary_conninfo = 'host=127.0.0.1 port={port} user=postgres application_name={NAME}'")
                watcher = cluster.session()
                end = time.monotonic() + 60
                while watcher.ask("select count(*) from pg_stat_replication where sync_state = 'sync'") != "1":
                    if time.monotonic() > end:
                        raise Failed(f"the synchronous standby did not connect\n{standby.tail()}")
                    time.sleep(0.05)
                yield
        finally:
            scene.discard(standby)

    return beside


def variants(plan):
    """Native for comparison, and the two of the table."""
    return ([peers.NATIVE["best"]] if "best" in plan.native else []) + [peers.BRAID["serial"], peers.BRAID["parallel"]]
