"""Those who insert all the time: pgbench at a steady rate, whatever the answer times are, with a log of every transaction. The time of
one counts from when it was due, so one that waits behind another is late, as it is for users.
"""

import subprocess

from .latency import quantile
from .stage import Failed

CLIENTS = 4
APPLICATION = "bench_inserter"
SCRIPT = "insert into reconcile (node, filler) values (:node, 'a row of somebody who inserts while nodes come and go, as long as others');\n"


def entries(text):
    """(end, milliseconds) of each transaction in a pgbench log; the end in seconds since the epoch."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        # The last line of one that is killed may be a part.
        if len(fields) >= 6 and fields[2].isdigit():
            found.append((int(fields[4]) + int(fields[5]) / 1e6, int(fields[2]) / 1000))
    return found


def phase(found, began, ended):
    """Of the transactions that were due in a stretch of time, as far as they ended at all."""
    ordered = sorted(ms for end, ms in found if began <= end - ms / 1000 < ended)
    if not ordered:
        return {"transactions": 0}
    return {"transactions": len(ordered), "p50_ms": round(quantile(ordered, 0.5), 3), "p99_ms": round(quantile(ordered, 0.99), 3),
            "max_ms": round(ordered[-1], 3)}


class Inserter:
    """On one node; `seconds` or until `stop`."""

    def __init__(self, cluster, number, rate, seconds=None, clients=CLIENTS):
        self.cluster = cluster
        stage = cluster.stage
        stage.serial = getattr(stage, "serial", 0) + 1
        name = f"inserter-{stage.serial}"
        script = stage.directory / f"{name}.sql"
        script.write_text(SCRIPT)
        self.ended = seconds is not None
        self.process = stage.start(
            [stage.installation.program("pgbench"), "-h", stage.directory, "-p", cluster.port, "-U", "postgres", "-n", "-M", "prepared",
             "-c", clients, "-j", 1, "-T", round(seconds or 1_000_000), "-R", rate, "-l", f"--log-prefix={stage.directory / name}",
             f"-Dnode={number}", "-f", script, "postgres"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, environment={"PGAPPNAME": APPLICATION})
        self.log = stage.directory / f"{name}.{self.process.pid}"

    def check(self):
        if self.process.poll() is not None:
            raise Failed(f"an inserter ended\n{self.process.communicate()[0]}")

    def stop(self, session):
        """pgbench writes its log out when its last session is gone."""
        self.check()
        session.ask(f"select pg_terminate_backend(pid) from pg_stat_activity where application_name = '{APPLICATION}'")
        return self.read()

    def wait(self):
        found = self.read()
        if self.process.returncode:
            raise Failed(f"pgbench: {self.said}")
        return found

    def read(self):
        self.said = self.process.communicate()[0]
        found = entries(self.log.read_text()) if self.log.exists() else []
        if not found:
            raise Failed(f"an inserter inserted nothing\n{self.said}")
        self.log.unlink()
        return found
