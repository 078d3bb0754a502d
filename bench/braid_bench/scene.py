"""A scene: the two nodes of one workload, from their making to the last sample.

The provider commits the workload once. Before that, its state went to a second server by dump and restore: the *base*, of which
each sample gets a copy of its own. Also before, one slot for each output plugin was made that is never read from: each sample reads
from a copy of it. So every sample of every variant drains the same WAL from the same state, and no sample leaves a trace.

Rows get to the base while it keeps no commit timestamps, and are frozen: they have no version there, as rows have that have been
at rest for long. A row with a version of the subscriber's own would be a conflict at its first change, for either way of replication,
and recording it would be what is measured.
"""

import subprocess
import time

from . import peers
from .processes import cpu, reaped
from .stage import Cluster, Failed

KEPT = {"native": ("bench_kept_native", "pgoutput"), "braid": ("bench_kept_braid", "braid")}
STANDBY_SLOT = "bench_kept_standby"
# Ports, counted from the plan's first.
PROVIDER, BASE, SUBSCRIBER, STANDBY, LINK, STANDBY_LINK = range(6)


def template(stage):
    """A data directory as initdb leaves it, for all others to start from."""
    cluster = Cluster(stage, "template", PROVIDER)
    cluster.create()
    cluster.start("wal_level = minimal", "max_wal_senders = 0", "track_commit_timestamp = off")
    session = cluster.session()
    if session.ask("select count(*) from pg_available_extensions where name = 'pg_prewarm'") == "1":
        session.ask("create extension pg_prewarm")
    major = int(session.ask("show server_version_num")) // 10000
    version = session.ask("show server_version")
    cluster.stop()
    return major, version


def prewarm(session):
    """All rows and indexes into shared buffers: what is measured is not the first look at a file."""
    if session.ask("select count(*) from pg_extension where extname = 'pg_prewarm'") == "1":
        session.ask("""select sum(pg_prewarm(c.oid)) from pg_class c where relkind in ('r', 'i', 't')
                       and (relnamespace = 'public'::regnamespace or relkind in ('i', 't') and c.oid >= 16384)""")


class Scene:
    """Provider with its backlog, and the base."""

    def __init__(self, stage, workload, major, standby=False):
        self.stage = stage
        self.workload = workload
        self.major = major
        self.provider = Cluster(stage, "provider", PROVIDER)
        self.standby = standby
        # Variant -> options of the output plugin that its subscriber asked for.
        streaming = {"proto_version": "4", "streaming": "parallel"} if major >= 16 else {"proto_version": "3", "streaming": "on"}
        self.asked = {"native": {**streaming, "binary": "true", "publication_names": "bench"}}

    def prepare(self):
        stage, workload = self.stage, self.workload
        stage.copy("template", "provider")
        self.provider.start()
        self.session = session = self.provider.session()
        if tables := workload.tables():
            session.ask(tables)
        workload.fill(self.provider, session)
        session.ask("create table bench_done (n int primary key)")
        session.ask("vacuum (freeze, analyze)")
        self.tables = workload.published(session)
        self.make_base()
        session.ask("create extension braid")
        session.ask(f"select braid.create_node('provider', '{self.provider.dsn}')")
        session.ask(f"create publication bench for table {', '.join([*self.tables, 'bench_done'])}")
        if self.standby:
            self.make_standby_base()
            session = self.session
        session.ask("checkpoint")
        for slot, plugin in KEPT.values():
            session.ask(f"select pg_create_logical_replication_slot('{slot}', '{plugin}')")
        self.start_lsn = session.ask("select pg_current_wal_insert_lsn()")
        return self

    def make_base(self):
        stage = self.stage
        stage.copy("template", "base")
        base = Cluster(stage, "base", BASE).start("track_commit_timestamp = off")
        dump = stage.start(
            [stage.installation.program("pg_dump"), "-d", self.provider.dsn, "--no-publications",
             *self.workload.dumped(self.tables)],
            stdout=subprocess.PIPE)
        restore = stage.start(
            [stage.installation.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-d", base.dsn],
            stdin=dump.stdout)
        dump.stdout.close()
        if restore.wait() or dump.wait():
            raise Failed("the subscriber's rows could not be copied")
        session = base.session()
        session.ask("vacuum (freeze, analyze)")
        base.stop()
        # From here on commit timestamps are kept, of what comes.
        base.start()
        session = base.session()
        session.ask("create extension braid")
        session.ask(f"select braid.create_node('subscriber', '{self.stage.dsn(SUBSCRIBER)}')")
        base.stop()
        self.stage.clusters.remove(base)

    def make_standby_base(self):
        """A physical copy of the provider as it is before the backlog."""
        self.session.ask(f"select pg_create_physical_replication_slot('{STANDBY_SLOT}', true)")
        self.provider.stop()
        self.stage.copy("provider", "standby_base")
        self.stage.run(["find", self.stage.directory / "standby_base" / "pg_replslot", "-mindepth", "1", "-delete"])
        self.provider.start()
        self.session = self.provider.session()

    def load(self):
        """The backlog. What it took is what the same statements cost without replication."""
        postmaster = self.provider.postmaster
        own = int(self.session.ask("select pg_backend_pid()"))
        # When this one is visible at a subscriber, its workers have started.
        self.session.ask("insert into bench_done values (0)")
        before, began = reaped(postmaster) + cpu(own), time.monotonic()
        self.workload.load(self.provider, self.session)
        seconds = time.monotonic() - began
        used = reaped(postmaster) + cpu(own) - before
        self.session.ask("insert into bench_done values (1)")
        # Past this the last row is confirmed.
        self.end_lsn = self.session.ask("select pg_current_wal_insert_lsn()")
        self.session.ask("checkpoint")
        self.digests = digests(self.session, self.tables)
        return {"seconds": round(seconds, 3), "cpu": round(used, 3),
                "wal_mb": round(int(self.session.ask(f"select '{self.end_lsn}'::pg_lsn - '{self.start_lsn}'::pg_lsn")) / 2**20, 1)}

    def slot(self, peer):
        """A slot of the name that subscriptions use, as it was before the backlog."""
        self.drop_slot()
        self.session.ask(f"select pg_copy_logical_replication_slot('{KEPT[peer][0]}', '{peers.SLOT}')")

    def slot_now(self, peer):
        """A slot of that name, from here on."""
        self.drop_slot()
        self.session.ask(f"select pg_create_logical_replication_slot('{peers.SLOT}', '{KEPT[peer][1]}')")

    def drop_slot(self):
        self.session.until(f"not exists (select from pg_replication_slots where slot_name = '{peers.SLOT}' and active)",
                           "the slot is free")
        self.session.ask(f"select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = '{peers.SLOT}'")

    def subscriber(self, variant, *settings):
        """A fresh one."""
        self.stage.copy("base", "subscriber")
        cluster = Cluster(self.stage, "subscriber", SUBSCRIBER)
        cluster.start(*variant.settings, *settings)
        return cluster

    def discard(self, cluster):
        try:
            cluster.stop("immediate")
        except Failed:
            cluster.kill()
        self.stage.clusters.remove(cluster)
        self.stage.remove(cluster.name)

    def close(self):
        self.discard(self.provider)
        for name in ("base", "standby_base"):
            self.stage.remove(name)


def digests(session, tables):
    """Row count and checksum of each table."""
    return {
        table: session.ask(f"select count(*) || ' rows, checksum ' || coalesce(sum(hashtextextended(t::text, 0)::numeric), 0)"
                           f" from {table} t")
        for table in tables
    }
