"""The server of the tests: one cluster with the databases provider, native and braid."""

import os
import re
import subprocess
import time

from .libpq import Connection, ConnectionLost

DATABASES = ("provider", "native", "braid")
FAULTS = re.compile(r"TRAP:|PANIC:|terminated by signal (?:4|6|7|8|11)\b|(?:reference|refcount) leak|resource was not closed")
# Native's apply worker leaves partitions open on some minor versions (18.6: one with a trigger,
# below a published root).
NATIVE_WARNING = re.compile(r"^[^|]*\|logical replication [^|]*\|WARNING:")

SETTINGS = """
listen_addresses = ''
unix_socket_directories = '{stage}'
fsync = off
shared_buffers = 64MB
max_connections = 60
max_prepared_transactions = 10
max_logical_replication_workers = 10
max_sync_workers_per_subscription = 6
logical_decoding_work_mem = 64kB
wal_retrieve_retry_interval = 50ms
log_line_prefix = '%d|%b|'
log_min_messages = warning
statement_timeout = 60s
braid.parallel_apply = always
braid.retry_interval = 100ms
braid.retry_interval_max = 1s
"""


def faults(log):
    """The lines of a server's log that tell of a fault, but for warnings of native's workers, which are not Braid's to answer for."""
    return [line for line in log.splitlines() if FAULTS.search(line) and not NATIVE_WARNING.match(line)]


class Server:
    """Makes, starts and replaces the cluster below the directory `stage`, as the server's user."""

    def __init__(self, environment=os.environ):
        self.stage = environment["DIFFERENTIAL_STAGE"]
        self.bindir = environment["DIFFERENTIAL_BINDIR"]
        self.user = environment["DIFFERENTIAL_USER"]
        self.node_settings = environment["DIFFERENTIAL_NODE_SETTINGS"]
        self.data = os.path.join(self.stage, "data")
        self.logfile = os.path.join(self.stage, "server.log")
        self._read = 0

    def make(self):
        """A new cluster with a node in the databases that are nodes, started."""
        self.stop()
        self._as_server("rm", "-rf", self.data)
        self._as_server(f"{self.bindir}/initdb", "-D", self.data, "-N", "--no-locale", "-E", "UTF8", "-A", "trust", "-U", "postgres")
        with open(os.path.join(self.data, "postgresql.conf"), "a", encoding="utf-8") as conf:
            conf.write(self.node_settings + SETTINGS.format(stage=self.stage))
        self._as_server(f"{self.bindir}/pg_ctl", "-D", self.data, "-l", self.logfile, "-w", "start")
        admin = self.connect("postgres")
        admin.execute("create role app")
        for database in DATABASES:
            admin.execute(f"create database {database}")
        admin.close()
        for database in ("provider", "braid"):
            connection = self.connect(database)
            connection.execute("create extension braid")
            connection.execute(f"select braid.create_node('{database}', '{self.conninfo(database)}')")
            connection.close()
        self._tables_of_the_node()
        self.new_log()

    def _tables_of_the_node(self):
        """Native replicates FOR ALL TABLES with the extension's own tables, so its database has tables of their names."""
        provider, native = self.connect("provider"), self.connect("native")
        native.execute("create schema braid")
        for (statement,) in provider.execute("""
            select format('create table %s (%s%s)', c.oid::regclass,
                string_agg(format('%I %s', attname, case when t.typnamespace = c.relnamespace then 'text' else format_type(atttypid, atttypmod) end), ', '
                    order by attnum),
                (select ', ' || pg_get_constraintdef(k.oid) from pg_constraint k where conrelid = c.oid and contype = 'p'))
            from pg_class c join pg_attribute a on attrelid = c.oid and attnum > 0 and not attisdropped join pg_type t on t.oid = atttypid
            where c.relnamespace = 'braid'::regnamespace and relkind = 'r' group by c.oid, c.relnamespace"""):
            native.execute(statement)
        provider.close()
        native.close()

    def stop(self):
        """Ends the cluster at once, if there is one."""
        if os.path.exists(os.path.join(self.data, "postmaster.pid")):
            self._as_server(f"{self.bindir}/pg_ctl", "-D", self.data, "-m", "immediate", "-w", "stop", check=False)

    def conninfo(self, database):
        """The connection string for a database."""
        return f"host={self.stage} dbname={database} user=postgres"

    def connect(self, database, seconds=30):
        """A session; waits while the server starts again."""
        end = time.monotonic() + seconds
        while True:
            try:
                return Connection(self.conninfo(database))
            except ConnectionLost:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def new_log(self):
        """What the server has logged since the last call."""
        try:
            with open(self.logfile, encoding="utf-8", errors="replace") as log:
                log.seek(self._read)
                text = log.read()
                self._read = log.tell()
                return text
        except FileNotFoundError:
            return ""

    def _as_server(self, *command, check=True):
        if os.geteuid() == 0:
            command = ("runuser", "-u", self.user, "--", "env", "-u", "RUST_BACKTRACE", f"HOME={self.stage}", *command)
        # A server that starts keeps what it inherits open, so nothing is read from a pipe.
        with open(os.path.join(self.stage, "command.log"), "w+", encoding="utf-8", errors="replace") as output:
            done = subprocess.run(command, cwd=self.stage, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
            output.seek(0)
            said = output.read()
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {said}")
