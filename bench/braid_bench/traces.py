"""Traces of the workloads, for the simulator: what the output plugin sends of each."""

import os
import subprocess

from .scene import KEPT, Scene
from .stage import Failed
from .workloads import workload

# As the simulator calls them; those of one or a few large rows are not simulated.
NAMES = {"single": "single", "sysbench": "sysbench", "tpcb": "tpcb-10", "zipf0": "zipf-0", "zipf1": "zipf-1", "zipf2": "zipf-2"}
FRAMES = f"""copy (select encode(data, 'hex') from pg_logical_slot_peek_binary_changes('{KEPT["braid"][0]}', null, null,
              'proto_version', '1', 'publication_names', 'bench')) to stdout"""


def record(stage, plan, major, directory, say):
    """A file in `directory` for each of the plan's workloads that is simulated."""
    simulator = os.environ.get("BRAID_SIMULATOR")
    if not simulator:
        raise Failed("start this with make bench-traces, which builds the simulator")
    directory.mkdir(exist_ok=True)
    for name in filter(NAMES.get, plan.drains):
        scene = Scene(stage, workload(name, plan), major).prepare()
        scene.load()
        path = directory / f"{NAMES[name]}.txt"
        with open(path, "w", encoding="ascii") as out:
            frames = stage.start([stage.installation.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1",
                                  "-d", scene.provider.dsn, "-c", FRAMES], stdout=subprocess.PIPE)
            reader = stage.start([simulator, "record"], stdin=frames.stdout, stdout=out, as_server=False)
            frames.stdout.close()
            if reader.wait() or frames.wait():
                raise Failed(f"{name} could not be recorded")
        with open(path, encoding="ascii") as lines:
            say(f"{name}: {sum(1 for _ in lines)} transactions in {os.path.relpath(path)}")
        scene.close()
