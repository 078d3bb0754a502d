"""What no replication on this machine can beat, measured beside it: the decoder alone, COPY of the same rows, a physical standby
that replays the same WAL. (The same statements without replication are measured where the backlog is committed.)
"""

import re
import time

from . import drain, peers
from .processes import WALSENDER, Watch, children, cpu, title
from .scene import STANDBY, prewarm
from .stage import Cluster, Failed

OPTION = re.compile(r"\"?(\w+)\"? '((?:[^']|'')*)'")


def asked(scene):
    """What the last subscriber that read from the provider asked of the output plugin: option -> value."""
    commands = scene.provider.logged(rf"received replication command: START_REPLICATION SLOT \"?{peers.SLOT}\"? LOGICAL")
    if not commands:
        raise Failed("no subscriber has read from the provider")
    return {name: value.replace("''", "'") for name, value in OPTION.findall(commands[-1].partition(" (")[2])}


def decode(scene, variant):
    """The output plugin's whole output, as this variant asks for it, sent to pg_recvlogical and from there to nowhere."""
    if variant.name not in scene.asked:
        # Braid's leader and its plugin settle that between them: let it ask once.
        drain.sample(scene, variant, "off")
        scene.asked[variant.name] = asked(scene)
    options = scene.asked[variant.name]
    peer = variant.peer
    scene.slot(peer)
    postmaster = scene.provider.postmaster
    others = set(children(postmaster))
    watch = Watch(postmaster, WALSENDER)
    watch.begin()
    began = time.monotonic()
    scene.stage.program(
        "pg_recvlogical", "-d", scene.provider.dsn, "-S", peers.SLOT, "--start", "--no-loop", "-f", "/dev/null",
        f"--endpos={scene.end_lsn}", *(f"--option={key}={value}" for key, value in options.items()))
    seconds = time.monotonic() - began
    watch.last_look()
    # Its walsender counts once it has been waited for.
    end = time.monotonic() + 30
    while set(children(postmaster)) - others and time.monotonic() < end:
        time.sleep(0.01)
    used = watch.end()
    scene.drop_slot()
    return {"seconds": round(seconds, 3), "transactions_per_s": round(scene.workload.transactions / seconds, 1),
            "rows_per_s": round(scene.workload.rows / seconds, 1), "walsender": used}


def copy(scene):
    """COPY of the rows that the workload inserts, into the empty tables of a subscriber."""
    cluster = scene.subscriber(peers.NATIVE["best"])
    try:
        session = cluster.session()
        seconds = used = 0.0
        own = int(session.ask("select pg_backend_pid()"))
        for table in scene.workload.inserted:
            path = scene.stage.directory / "rows"
            scene.session.ask(f"copy {table} to '{path}' (format binary)")
            scene.stage.run(["sync", "-f", path])
            before, began = cpu(own), time.monotonic()
            session.ask(f"copy {table} from '{path}' (format binary)")
            seconds += time.monotonic() - began
            used += cpu(own) - before
            path.unlink()
        return {"seconds": round(seconds, 3), "rows_per_s": round(scene.workload.rows / seconds, 1), "cpu": round(used, 3)}
    finally:
        scene.discard(cluster)


def replay(scene):
    """A physical standby, from the provider's state before the backlog to the end of it."""
    stage = scene.stage
    stage.copy("standby_base", "standby")
    cluster = Cluster(stage, "standby", STANDBY)
    stage.run(["touch", cluster.directory / "standby.signal"])
    try:
        cluster.start()
        session = cluster.session()
        prewarm(session)
        sender = Watch(scene.provider.postmaster, WALSENDER)
        sender.begin()

        def used():
            return sum(cpu(pid) or 0.0 for pid in children(cluster.postmaster) if title(pid).startswith(("startup", "walreceiver")))

        session.ask(f"alter system set primary_conninfo = '{scene.provider.dsn}'")
        before, began = used(), time.monotonic()
        session.ask("select pg_reload_conf()")
        session.ask(f"prepare done as select coalesce(pg_last_wal_replay_lsn() >= '{scene.end_lsn}', false)")
        while session.ask("execute done") != "t":
            if time.monotonic() > began + 600:
                raise Failed(f"the standby did not catch up\n{cluster.tail()}")
            time.sleep(0.005)
        seconds = time.monotonic() - began
        spent = used() - before
        sender.last_look()
        walsender = sum(seen.cpu for seen in sender.seen.values())
        return {"seconds": round(seconds, 3), "transactions_per_s": round(scene.workload.transactions / seconds, 1),
                "rows_per_s": round(scene.workload.rows / seconds, 1), "cpu": round(spent, 3), "cpu_walsender": round(walsender, 3)}
    finally:
        scene.discard(cluster)


def measure(scene, runs, say):
    """All that apply to this workload, `runs` times in turn."""
    taken = {"decode_native": [], "decode_braid": [], "standby": []}
    if scene.workload.inserted:
        taken["copy"] = []
    for _ in range(runs):
        for name, samples in taken.items():
            made = {"decode_native": lambda: decode(scene, peers.NATIVE["best"]),
                    "decode_braid": lambda: decode(scene, peers.BRAID["parallel"]),
                    "standby": lambda: replay(scene), "copy": lambda: copy(scene)}[name]()
            samples.append(made)
            used = made["walsender"]["cpu"] if "walsender" in made else made["cpu"]
            say(f"  {scene.workload.name} {name}: {made['seconds']:.2f} s, {made['rows_per_s']:.0f} rows/s, CPU {used:.2f}")
    return taken
