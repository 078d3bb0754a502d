"""The systems that keep two nodes equal: Braid, and Bucardo as Debian has it. Both are asked the same: link the nodes, say when the
links are gone and when they are back, and what the system has used beside the servers.
"""

import os
import shutil
import signal
import time

from . import peers
from .pair import NAMES, descendants, directory, tree
from .plan import Mistake
from .stage import Failed

PUBLICATION = "bench"


class Braid:
    """Subscriptions both ways."""

    # Its pauses before another attempt grow up to a minute: how long after the links are back the
    # next one comes would be chance.
    settings = ("braid.retry_interval_max = 1s",)

    def __init__(self, variant):
        self.variant = variant
        self.name, self.title = variant.name, variant.title

    def missing(self, _stage):
        return None

    def begin(self, pair):
        options = {"publications": f"'{{{PUBLICATION}}}'", "copy_data": "false", **self.variant.options}
        listed = ", ".join(f"{key} => {value}" for key, value in options.items())
        more = f", {pair.stage.plan.options}" if pair.stage.plan.options else ""
        for name, session, link in zip(NAMES, pair.sessions, pair.links):
            session.ask("create extension braid")
            session.ask(f"select braid.create_node('{name}', '{link.dsn}')")
            session.ask(f"create publication {PUBLICATION} for table reconcile, beat")
        for number, session in enumerate(pair.sessions):
            other = 1 - number
            try:
                session.ask(f"select braid.create_subscription('from_{NAMES[other]}', '{pair.links[other].dsn}', {listed}{more})")
            except Failed as failure:
                if failure.state in peers.REFUSALS and self.variant.options:
                    raise peers.NotAvailable(str(failure).partition(" (SQLSTATE")[0]) from None
                raise
        for number, session in enumerate(pair.sessions):
            session.ask(f"select braid.wait_for_subscription('from_{NAMES[1 - number]}')")

    def cut(self, pair):
        """It notices by itself."""

    def healed(self, pair):
        """This too."""

    def used(self):
        return 0.0

    def conflicts(self, pair):
        return [int(session.ask("select count(*) from braid.conflict_history where relation = 'reconcile'::regclass"))
                for session in pair.sessions]

    def close(self):
        """Its processes are the servers'."""


class Bucardo:
    """Its daemon runs beside the first node, and so does its control database; the second node is behind the link."""

    # What a user of it has: nothing of Braid.
    settings = ("shared_preload_libraries = ''",)
    name, title = "bucardo", "Bucardo"
    SCHEMA = "/usr/share/bucardo/bucardo.schema"
    SYNC = "bench"

    def __init__(self):
        self.pid = None
        self.before = 0.0
        self.stage = None

    def missing(self, stage):
        """Why it can't be measured here."""
        if not shutil.which("bucardo") or not os.path.exists(self.SCHEMA):
            return "Bucardo is not installed"
        self.title = stage.run(["bucardo", "--no-bucardorc", "--version"]).strip().replace("bucardo version", "Bucardo")
        control = os.path.join(stage.run([stage.installation.program("pg_config"), "--sharedir"]).strip(), "extension", "plperlu.control")
        return None if os.path.exists(control) else "this PostgreSQL has no PL/Perl"

    def begin(self, pair):
        self.stage = stage = pair.stage
        self.directory = directory(stage, "bucardo")
        node = pair.nodes[0]
        self.log = self.directory / "log.bucardo"
        (stage.directory / "bucardorc").write_text("\n".join((
            f"dbhost={stage.directory}", f"dbport={node.port}", "dbname=bucardo", "dbuser=bucardo", f"piddir={self.directory}",
            f"logdest={self.directory}", "sendmail=0", "")))
        stage.program("psql", "-X", "-q", "-o", "/dev/null", "-d", node.dsn, "-f", self.SCHEMA)
        self.control = session = node.session()
        session.ask("\\c bucardo")
        for name, value in {
            "piddir": self.directory, "reason_file": self.directory / "reason", "log_conflict_file": self.directory / "conflicts",
            "warning_file": self.directory / "warnings", "flatfile_dir": self.directory,
        }.items():
            session.ask(f"update bucardo.bucardo_config set setting = '{value}' where name = '{name}'")
        self.command("add", "db", NAMES[0], "dbname=postgres", f"dbhost={stage.directory}", f"dbport={node.port}", "dbuser=postgres")
        self.command("add", "db", NAMES[1], "dbname=postgres", "dbhost=127.0.0.1", f"dbport={pair.links[1].port}", "dbuser=postgres")
        self.command("add", "table", "public.reconcile", "public.beat", f"db={NAMES[0]}", "relgroup=bench")
        # The newest wins, as with Braid.
        self.command("add", "sync", self.SYNC, "relgroup=bench", f"dbs={NAMES[0]}:source,{NAMES[1]}:source",
                     "conflict_strategy=bucardo_latest")
        self.start()

    def command(self, *arguments):
        return self.stage.run(["bucardo", f"--bucardorc={self.stage.directory / 'bucardorc'}", *arguments])

    def daemon(self):
        """The process that its file names, if that is one."""
        try:
            pid = int((self.directory / "bucardo.mcp.pid").read_text().split()[0])
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return pid if b"Bucardo Master" in file.read() else None
        except (OSError, ValueError, IndexError):
            return None

    def start(self):
        """The daemon leaves the process that starts it, and forks once more after that: the last one names itself in the log."""
        at = self.log.stat().st_size if self.log.exists() else 0
        with open(self.directory / "said", "w") as said:
            self.stage.start(["bucardo", f"--bucardorc={self.stage.directory / 'bucardorc'}", "start"], stdout=said, stderr=said).wait()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if (pid := self.daemon()) and f"PID: {pid}\n" in self.log.read_text(errors="replace")[at:]:
                self.pid = pid
                return
            time.sleep(0.02)
        raise Failed(f"Bucardo does not start\n{(self.directory / 'said').read_text()}{self.tail()}")

    def stop(self):
        """As `bucardo stop` does, and for those that don't hear it, by signal."""
        if not (pid := self.pid or self.daemon()):
            return
        self.before += tree(pid)
        self.pid = None
        pids = descendants(pid)
        stop = self.directory / "fullstopbucardo"
        stop.write_text("the bench\n")
        end = time.monotonic() + 10
        while any(alive(each) for each in pids):
            if time.monotonic() > end:
                for each in pids:
                    if alive(each):
                        os.kill(each, signal.SIGKILL)
            time.sleep(0.05)
        # It refuses to start where one is.
        for file in (stop, *self.directory.glob("*.pid")):
            file.unlink(missing_ok=True)

    def tail(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:]) if self.log.exists() else ""

    def cut(self, pair):
        """A lost database makes it mark the sync as stalled, and resume at a time of its own or not at all: whoever runs it stops it."""
        self.stop()

    def healed(self, pair):
        self.control.ask("update bucardo.db set status = 'active' where status = 'stalled';"
                         " update bucardo.sync set status = 'active' where status = 'stalled'")
        self.start()

    def used(self):
        return self.before + (tree(self.pid) if self.pid else 0.0)

    def conflicts(self, pair):
        return [int(self.control.ask("select coalesce(sum(conflicts), 0) from bucardo.syncrun"))]

    def close(self):
        if self.stage:
            self.stop()
            shutil.rmtree(self.directory, ignore_errors=True)


def alive(pid):
    """A process that has ended and is not waited for is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def chosen(plan):
    if relaxed := [m for m in plan.modes if peers.BRAID[m].relaxed]:
        raise Mistake(f"BENCH_MODES: where {relaxed[0]} has one row, the rows before it need not be: what this bench measures by")
    made = []
    if "braid" in plan.systems:
        made += [Braid(peers.BRAID[m]) for m in plan.modes]
    if "bucardo" in plan.systems:
        made.append(Bucardo())
    return made
