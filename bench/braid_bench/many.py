"""`make bench-many`: a subscription to many tables, by native replication and by Braid, on the same servers in turn.

What is measured is all that may grow with the number of tables: making the subscription, the copies, the locks of the transaction
that makes it, the memory of the walsender once each table has changed, and one table more. Tables have three indexes and a few rows.
"""

import datetime
import json
import math
import os
import time

from . import machine
from .pair import descendants, tree
from .peers import SLOT
from .processes import SUBSCRIBER, WALSENDER, children, queued, status, title
from .scene import PROVIDER, SUBSCRIBER as SUBSCRIBER_PORT, template
from .stage import Cluster, Failed

SYSTEMS = ("native", "braid")
PUBLICATION = "bench_many"
# Tables that are made, or written to, in a transaction.
STEP = 100
# Slots of the provider's own.
KEPT = "^braid_deletions_"
# A table that one system leaves untouched is not there for the other.
MORE = "more_{}"


def make(tables):
    """SQL: the tables, without rows. The first schema has one more, for a table that is made later."""
    return f"""do $$ begin
        for s in 1 .. {tables.schemas} loop execute format('create schema t%s', s); end loop;
        for i in 0 .. {tables.total} - 1 loop
            execute format('create table t%1$s.item_%2$s (id int primary key, a int unique, b int);'
                'create index on t%1$s.item_%2$s (b)', 1 + i % {tables.schemas}, i);
            if i % {STEP} = {STEP} - 1 then commit; end if;
        end loop;
    end $$"""


def change(tables, key):
    """SQL: a row with this key in each table, some tables in a transaction."""
    return f"""do $$ begin
        for i in 0 .. {tables.total} - 1 loop
            execute format('insert into t%s.item_%s values ({key}, {key}, {key})', 1 + i % {tables.schemas}, i);
            if i % {STEP} = {STEP} - 1 then commit; end if;
        end loop;
    end $$"""


def last(tables):
    """The table that is written to last."""
    return f"t{1 + (tables.total - 1) % tables.schemas}.item_{tables.total - 1}"


class Way:
    """How a system is asked."""

    def __init__(self, name):
        self.braid = name == "braid"

    def create(self, dsn, plan):
        if self.braid:
            more = f", {plan.options}" if plan.options else ""
            return f"select braid.create_subscription('{SLOT}', '{dsn}', publications => '{{{PUBLICATION}}}'{more})"
        return f"create subscription {SLOT} connection '{dsn}' publication {PUBLICATION}"

    def create_in_transaction(self, dsn, plan):
        """The same without what can't be rolled back at the provider."""
        return self.create(dsn, plan) if self.braid else self.create(dsn, plan) + " with (create_slot = false, enabled = false)"

    def refresh(self):
        return f"select count(*) from braid.refresh_subscription('{SLOT}')" if self.braid else f"alter subscription {SLOT} refresh publication"

    def ready(self, count):
        """SQL: whether so many tables are copied."""
        found = "braid.subscription_table where state" if self.braid else "pg_subscription_rel where srsubstate"
        return f"(select count(*) = {count} from {found} = '{'ready' if self.braid else 'r'}')"

    def drop(self):
        return f"select braid.drop_subscription('{SLOT}')" if self.braid else f"drop subscription {SLOT}"


class Clock:
    """Seconds, and CPU seconds of both servers, since it was made.

    On a busy machine processes wait for a processor. Then seconds pass without CPU, as they do in a wait for a lock or a timer. So it
    also has how long one process waited for a processor: the one that waited longest.
    """

    def __init__(self, *servers):
        self.postmasters = [server.postmaster for server in servers]
        self.cpu = self.used()
        self.queued = self.waits()
        self.began = time.monotonic()

    def waits(self):
        return {pid: queued(pid) or 0.0 for postmaster in self.postmasters for pid in descendants(postmaster)}

    def used(self):
        return [tree(pid) for pid in self.postmasters]

    def read(self):
        seconds = time.monotonic() - self.began
        provider, subscriber = (now - before for now, before in zip(self.used(), self.cpu))
        longest = longest_wait(self.queued, self.waits())
        return {"seconds": round(seconds, 3), "provider_cpu": round(provider, 2), "subscriber_cpu": round(subscriber, 2), "queued": round(longest, 3)}


def longest_wait(before, after):
    """The most seconds that one process has waited between two accounts, as far as it is there still."""
    return max((now - before.get(pid, 0.0) for pid, now in after.items()), default=0.0)


def memory_kb(server, role):
    """Private memory of the processes of a role: of each."""
    found = [status(pid) for pid in children(server.postmaster) if role.search(title(pid))]
    return [counts[3] for counts in found if counts]


class Scene:
    """A provider with its tables, and a data directory that subscribers are copies of."""

    def __init__(self, stage, plan, tables):
        self.stage, self.plan, self.tables = stage, plan, tables
        self.rows = plan.rows
        self.samples = 0

    def prepare(self):
        stage = self.stage
        stage.copy("template", "provider")
        self.provider = Cluster(stage, "provider", PROVIDER).start()
        self.session = session = self.provider.session()
        schemas = ", ".join(f"t{s}" for s in range(1, self.tables.schemas + 1))
        session.ask(make(self.tables))
        for row in range(self.rows):
            session.ask(change(self.tables, -row))
        session.ask("create extension braid")
        session.ask(f"select braid.create_node('provider', '{self.provider.dsn}')")
        session.ask(f"create publication {PUBLICATION} for tables in schema {schemas}")
        stage.copy("template", "base")
        base = Cluster(stage, "base", SUBSCRIBER_PORT).start()
        session = base.session()
        session.ask(make(self.tables))
        session.ask("create extension braid")
        session.ask(f"select braid.create_node('subscriber', '{base.dsn}')")
        # Both know their catalogs, as servers do that have run for a minute.
        for one in (session, self.session):
            one.ask("analyze")
        base.stop()
        stage.clusters.remove(base)
        return self

    def sample(self, name):
        self.samples += 1
        way, tables, plan = Way(name), self.tables, self.plan
        self.stage.copy("base", "subscriber")
        subscriber = Cluster(self.stage, "subscriber", SUBSCRIBER_PORT).start()
        session = subscriber.session()
        dsn = self.provider.dsn
        made = {"load_average": [round(x, 2) for x in os.getloadavg()]}
        try:
            locks = "select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'relation'"
            session.ask(f"begin; {way.create_in_transaction(dsn, plan)}")
            made["locks"] = int(session.ask(locks))
            session.ask("rollback")
            clock = Clock(self.provider, subscriber)
            session.ask(way.create(dsn, plan))
            made["create"] = clock.read()
            session.until(way.ready(tables.total), "all tables are copied", plan.patience)
            made["ready"] = clock.read()
            made["changes"] = self.change(way, subscriber, session)
            made["walsender_kb"] = max(memory_kb(self.provider, WALSENDER), default=0)
            made["workers_kb"] = sum(memory_kb(subscriber, SUBSCRIBER))
            more = f"t1.{MORE.format(self.samples)}"
            for one in (self.session, session):
                one.ask(f"create table {more} (id int primary key, a int)")
            clock = Clock(self.provider, subscriber)
            session.ask(way.refresh())
            made["refresh"] = clock.read()
            session.until(way.ready(tables.total + 1), "one table more is copied", plan.patience)
            made["refreshed"] = clock.read()
            session.ask(way.drop())
            self.session.ask(f"drop table {more}")
            # Braid drops its slot a moment later.
            self.session.until(f"not exists (select from pg_replication_slots where slot_name !~ '{KEPT}')", "its slot is dropped")
        finally:
            self.discard(subscriber)
        return made

    def change(self, way, subscriber, session):
        """From the first commit until the last row is there."""
        key = 1000 + self.samples
        clock = Clock(self.provider, subscriber)
        self.session.ask(change(self.tables, key))
        session.until(f"exists (select from {last(self.tables)} where id = {key})", "the last change is there", self.plan.patience)
        return clock.read()

    def discard(self, subscriber):
        try:
            subscriber.stop("immediate")
        except Failed:
            subscriber.kill()
        self.stage.clusters.remove(subscriber)
        self.stage.remove(subscriber.name)
        self.session.until("not exists (select from pg_replication_slots where active)", "no slot is in use")
        self.session.ask("select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                         f" where slot_name !~ '{KEPT}'")

    def close(self):
        self.provider.stop("immediate")
        self.stage.clusters.remove(self.provider)
        for name in ("provider", "base"):
            self.stage.remove(name)


FIGURES = (
    ("create", lambda s: s["create"]["seconds"]), ("ready", lambda s: s["ready"]["seconds"]),
    ("CPU until ready: provider", lambda s: s["ready"]["provider_cpu"]), ("subscriber", lambda s: s["ready"]["subscriber_cpu"]),
    ("locks", lambda s: s["locks"]), ("changes", lambda s: s["changes"]["seconds"]),
    ("walsender MB", lambda s: s["walsender_kb"] / 1024), ("workers MB", lambda s: s["workers_kb"] / 1024),
    ("refresh", lambda s: s["refresh"]["seconds"]),
)


def median(values):
    values = sorted(values)
    return values[len(values) // 2] if len(values) % 2 else sum(values[len(values) // 2 - 1:len(values) // 2 + 1]) / 2


def growth(sizes):
    """By which power of the number of tables a figure grows, from the smallest to the largest: 1 is linear, 2 the square. None: not known.
    `sizes` are pairs of a number of tables and a figure.
    """
    known = sorted((n, figure) for n, figure in sizes if figure > 0)
    if len(known) < 2 or known[0][0] == known[-1][0]:
        return None
    (few, least), (many, most) = known[0], known[-1]
    return math.log(most / least) / math.log(many / few)


def summary(results):
    """The table that is printed: a line for each set and system, and below it how each figure grows."""
    lines = ["| tables | system | " + " | ".join(name for name, _ in FIGURES) + " |", "|---:|---|" + "---:|" * len(FIGURES)]
    found = {}
    for entry in results["many"]:
        samples = [s for s in entry["samples"] if "void" not in s]
        if not samples:
            continue
        cells = []
        for name, figure in FIGURES:
            value = median([figure(s) for s in samples])
            if entry["schemas"] == 1:
                found.setdefault((entry["system"], name), []).append((entry["tables"], value))
            cells.append(f"{value:.0f}" if name == "locks" else f"{value:.2f}")
        shown = entry["tables"] if entry["schemas"] == 1 else f"{entry['tables']} in {entry['schemas']} schemas"
        lines.append(f"| {shown} | {entry['system']} | {' | '.join(cells)} |")
    for system in SYSTEMS:
        powers = [growth(found.get((system, name), [])) for name, _ in FIGURES]
        if any(power is not None for power in powers):
            cells = ["" if power is None else f"{power:.2f}" for power in powers]
            lines.append(f"| grows by the power | {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(stage, plan, directory, say):
    major, version = template(stage)
    results = {
        "format": 1, "kind": "many", "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.facts(stage.directory, version),
        "plan": {"runs": plan.runs, "rows": plan.rows, "options": plan.options, "settings": list(plan.settings)}, "many": [],
    }
    stolen = machine.stolen()
    m = results["machine"]
    say(f"PostgreSQL {m['postgresql']}, Braid {m['braid']}, {m['cores']} cores ({m['cpu']}); load average {m['load_average'][0]}")
    void = 0
    try:
        for tables in plan.sets:
            scene = Scene(stage, plan, tables).prepare()
            entries = {name: {"system": name, "tables": tables.total, "schemas": tables.schemas, "samples": []} for name in SYSTEMS}
            results["many"] += entries.values()
            for _ in range(plan.runs):
                for name, entry in entries.items():
                    try:
                        made = scene.sample(name)
                    except Failed as reason:
                        void += 1
                        made = {"void": str(reason)}
                    say(f"  {tables}, {name}: {made}")
                    entry["samples"].append(made)
            scene.close()
    finally:
        if results["many"]:
            now, of_all = (after - before for after, before in zip(machine.stolen(), stolen))
            results["machine"]["stolen"] = round(now / of_all, 4) if of_all else 0
            results["machine"]["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
            path = directory / f"many-{datetime.datetime.now():%Y%m%d-%H%M%S}-pg{major}.json"
            path.write_text(json.dumps(results, indent=1) + "\n")
            say("\n" + summary(results))
            say(f"\nsamples: {os.path.relpath(path)}")
    if void:
        raise Failed(f"{void} samples are void")
