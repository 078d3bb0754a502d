"""The place where a run happens: a directory, servers, and helper processes. All of it is gone when the run ends, however it does.

PostgreSQL refuses to run as root, so root starts everything as the ordinary user that scripts/server.sh names.
"""

import os
import pathlib
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from .plan import Mistake

# The same for every server of a run. What happens at times of its own (checkpoints, the full pages
# that follow them, vacuum) is kept out of the samples; before PostgreSQL 16 the launcher starts one
# native subscription in each wal_retrieve_retry_interval, which would be measured. Who stops the
# processes of a run for a while finds it whole afterwards.
SETTINGS = """
listen_addresses = '127.0.0.1'
shared_buffers = 1GB
max_wal_size = 32GB
checkpoint_timeout = 1h
full_page_writes = off
autovacuum = off
wal_retrieve_retry_interval = 10ms
wal_receiver_timeout = 30min
wal_sender_timeout = 30min
max_logical_replication_workers = 16
max_locks_per_transaction = 1024
log_checkpoints = off
log_replication_commands = on
timezone = 'UTC'
"""
# Ports of one run, one after the other.
ROW = 10
FAILED = re.compile(r"^(?:psql:\S* )?(ERROR|FATAL|PANIC):  (?:([0-9A-Z]{5}): )?(.*)")


class Failed(Exception):
    """A statement or a server failed; `state` is the SQLSTATE, where there is one."""

    def __init__(self, message, state=None):
        super().__init__(message)
        self.state = state


class Stage:
    """A directory of the server user's own, short enough for a socket's path, and what runs in it."""

    def __init__(self, installation, plan):
        self.installation = installation
        self.plan = plan
        self.port, self.guard = claim_ports(plan.port, plan.port_fixed)
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="braid-bench.", dir="/tmp"))
        self.root = os.geteuid() == 0
        if self.root:
            account = pwd.getpwnam(installation.user)
            os.chown(self.directory, account.pw_uid, account.pw_gid)
        self.processes = []
        self.clusters = []

    def dsn(self, offset):
        """Of the server on that port, counted from the plan's first."""
        return f"host={self.directory} port={self.port + offset} dbname=postgres user=postgres"

    def owner(self):
        """How Popen changes to the server user, where it has to."""
        if not self.root:
            return {}
        return {"user": self.installation.user, "group": pwd.getpwnam(self.installation.user).pw_gid, "extra_groups": []}

    def start(self, command, **options):
        """A process as the server user, in a session of its own: Ctrl-C reaches this process alone, which then ends all.
        With as_server=False it stays the bench's own user: what is not PostgreSQL's.
        """
        environment = {k: v for k, v in os.environ.items() if k != "RUST_BACKTRACE" and not k.startswith(("PG", "BENCH_"))}
        environment.update(TZ="UTC", LC_ALL="C.UTF-8", **options.pop("environment", {}))
        if options.pop("as_server", True):
            environment.update(HOME=str(self.directory))
            options.update(self.owner())
        process = subprocess.Popen(
            [str(c) for c in command], cwd=self.directory, env=environment, start_new_session=True, **options)
        self.processes = [p for p in self.processes if p.poll() is None] + [process]
        return process

    def run(self, command, **options):
        """Run to the end; what it wrote. An exit status is an error."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        out, err = process.communicate()
        if process.returncode:
            raise Failed(f"{' '.join(map(str, command))}: {err.strip() or out.strip()}")
        return out

    def program(self, name, *arguments, **options):
        return self.run([self.installation.program(name), *arguments], **options)

    def copy(self, source, target):
        """A data directory, copied and on disk: what is written back later would be measured."""
        shutil.rmtree(self.directory / target, ignore_errors=True)
        self.run(["cp", "-a", self.directory / source, self.directory / target])
        self.run(["sync", "-f", self.directory])

    def remove(self, name):
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        for cluster in self.clusters:
            cluster.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.guard.close()


class Cluster:
    """A server: a data directory of the stage, a port."""

    def __init__(self, stage, name, offset):
        self.stage = stage
        self.name = name
        self.port = stage.port + offset
        self.directory = stage.directory / name
        self.log = stage.directory / f"{name}.log"
        self.sessions = []
        self.read_to = 0
        stage.clusters.append(self)

    @property
    def dsn(self):
        return self.stage.dsn(self.port - self.stage.port)

    def create(self):
        self.stage.program("initdb", "-D", self.directory, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")

    def configure(self, *settings):
        lines = [
            self.stage.installation.settings, SETTINGS, *self.stage.plan.settings,
            f"unix_socket_directories = '{self.stage.directory}'", f"port = {self.port}", *settings,
        ]
        # initdb has made the file, as the server user.
        (self.directory / "postgresql.conf").write_text("\n".join(lines) + "\n")

    def start(self, *settings):
        self.configure(*settings)
        self.read_to = self.log.stat().st_size if self.log.exists() else 0
        try:
            self.stage.program("pg_ctl", "-D", self.directory, "-l", self.log, "-w", "-t", "120", "start")
        except Failed as failure:
            raise Failed(f"{failure}\n{self.tail()}") from None
        return self

    def stop(self, mode="fast"):
        for session in self.sessions:
            session.close()
        self.sessions = []
        self.stage.program("pg_ctl", "-D", self.directory, "-m", mode, "-w", "-t", "120", "stop")

    def kill(self):
        """For the end of a run: whatever state it is in. Its own children follow a postmaster that quits."""
        try:
            pid = self.postmaster
            os.kill(pid, signal.SIGQUIT)
        except (OSError, ValueError, IndexError):
            return
        end = time.monotonic() + 15
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
            time.sleep(0.02)

    @property
    def postmaster(self):
        return int((self.directory / "postmaster.pid").read_text().split("\n")[0])

    def session(self):
        session = Session(self.stage, self.dsn)
        self.sessions.append(session)
        return session

    def logged(self, wanted):
        """Lines since the start of this server that match."""
        if not self.log.exists():
            return []
        with open(self.log, encoding="utf-8", errors="replace") as log:
            log.seek(self.read_to)
            return [line.rstrip() for line in log if re.search(wanted, line)]

    def tail(self, lines=8):
        """The errors among them, and what was said before and after; nothing when there are none."""
        if not self.logged(r" (ERROR|FATAL|PANIC): "):
            return ""
        return "\n".join(self.logged(r" (LOG|WARNING|ERROR|FATAL|PANIC|DETAIL|HINT): ")[-lines:])


class Session:
    """One psql that stays connected: statements go in, rows come out."""

    def __init__(self, stage, dsn):
        self.process = stage.start(
            [stage.installation.program("psql"), "-X", "-q", "-A", "-t", "-v", "VERBOSITY=verbose", "-d", dsn],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        # For the sessions that steer; workers and pgbench have their own.
        self.ask("set synchronous_commit = off; set client_min_messages = warning; set max_parallel_workers_per_gather = 0")

    def ask(self, sql):
        try:
            self.process.stdin.write(sql + "\n;\n\\echo :the-end:\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"psql is gone at\n{sql}") from None
        lines, failure = [], None
        for line in self.process.stdout:
            if line == ":the-end:\n":
                if failure:
                    raise Failed(f"{failure[3]} (SQLSTATE {failure[2]}) at\n{sql}", failure[2])
                return "".join(lines).strip()
            failure = failure or FAILED.match(line)
            lines.append(line)
        raise Failed(f"psql ended at\n{sql}\n{''.join(lines)}")

    def until(self, condition, what, seconds=120):
        end = time.monotonic() + seconds
        while self.ask(f"select {condition}") != "t":
            if time.monotonic() > end:
                raise Failed(f"waited {seconds} s in vain until {what}")
            time.sleep(0.02)

    def close(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def claim_ports(first, fixed):
    """(first of a row of ports that are free, a socket that keeps other benches off the row for as long as it is open)."""
    for base in [first] if fixed else range(first, first + 10 * ROW, ROW):
        guard = socket.socket()
        try:
            guard.bind(("127.0.0.1", base + ROW - 1))
            guard.listen()
        except OSError:
            guard.close()
            continue
        if all(free(port) for port in range(base, base + ROW - 1)):
            return base, guard
        guard.close()
    raise Mistake(f"ports from {first} on are in use on 127.0.0.1: choose others with BENCH_PORT")
