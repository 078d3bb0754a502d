"""`make bench-group`: how many entries a group agrees on in a second, and how long a node takes to join, beside a subscription's copy of the
same rows.

Servers keep what they have committed (`fsync`, `synchronous_commit`): an entry is on the disks of a majority before it is answered. Each
proposal is a call of `set_sequence_default`. Entries are counted in the log, not in what the callers saw.
"""

import datetime
import json
import os
import re
import subprocess
import time

from . import machine
from .many import median
from .stage import Cluster, Failed

# Ports, counted from the plan's first.
ONE, TWO, THREE, COPY, JOIN, TEMPLATE = range(6)
SUBSCRIPTION = "bench_copy"
PROPOSAL = "select braid.set_sequence_default('range');\n"
# Tables that the rows are in, and bytes of a row's value.
TABLES, VALUE = 4, 1000
# Of a join: when each step was done, in seconds after the first began.
STEPS = "select json_object_agg(name, round(extract(epoch from done_at - began), 2) order by step) from braid.join_progress cross join" \
    " (select min(started_at) as began from braid.join_progress) b"
AGREED = "select coalesce(max(log_index), 0) from braid.group_log"


def make():
    """SQL: the tables, without rows."""
    return "; ".join(f"create table item_{n} (id bigint primary key, v text)" for n in range(TABLES))


def fill(megabytes):
    """SQL: so many megabytes of values in all tables together."""
    rows = max(1, megabytes * 1024 * 1024 // (TABLES * VALUE))
    value = f"(select string_agg(md5(i::text || k), '') from generate_series(1, {VALUE // 32}) k)"
    return "; ".join(f"insert into item_{n} select i, {value} from generate_series(1, {rows}) i" for n in range(TABLES))


def rate(counts, seconds):
    """Entries a second, of the log's end before and after."""
    before, after = counts
    return (after - before) / seconds if seconds > 0 else 0.0


def fsyncs(text):
    """Flushes a second, as pg_test_fsync says of fdatasync in its first table; None if it does not."""
    found = re.search(r"^\s+fdatasync\s+([0-9.]+) ops/sec", text, re.MULTILINE)
    return float(found[1]) if found else None


class Bench:
    def __init__(self, stage, plan, say):
        self.stage, self.plan, self.say = stage, plan, say
        self.script = stage.directory / "proposal.sql"
        self.script.write_text(PROPOSAL)
        self.script.chmod(0o644)

    def server(self, name, port):
        """Each by an initdb of its own: servers that begin as copies of one are not believed to be several."""
        cluster = Cluster(self.stage, name, port)
        cluster.create()
        cluster.start("fsync = on", "synchronous_commit = on")
        session = cluster.session()
        session.ask("create extension braid")
        return cluster, session

    def gone(self, cluster):
        cluster.stop("immediate")
        self.stage.clusters.remove(cluster)
        self.stage.remove(cluster.name)

    def join(self, cluster, session, member):
        session.ask(f"select braid.join_group('{member.dsn}', node_name => '{cluster.name}', dsn => '{cluster.dsn}')")
        session.ask(f"select braid.wait_for_group('{self.plan.patience} s')")

    def agree(self, nodes, clients):
        """Entries a second, with so many callers at each of the nodes (server and session)."""
        before, began = int(nodes[0][1].ask(AGREED)), time.monotonic()
        callers = [self.stage.start(
            [self.stage.installation.program("pgbench"), "-n", "-c", clients, "-j", 1, "-T", self.plan.seconds, "-f", self.script, cluster.dsn],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for cluster, _ in nodes]
        for caller in callers:
            if caller.wait():
                raise Failed("pgbench failed: a proposal was refused")
        seconds = time.monotonic() - began
        return round(rate((before, int(nodes[0][1].ask(AGREED))), seconds), 1)

    def entries(self, results):
        nodes = [self.server("one", ONE)]
        one, session = nodes[0]
        session.ask(make())
        session.ask(f"select braid.create_group('bench', node_name => 'one', dsn => '{one.dsn}')")
        session.ask("select braid.wait_for_group('60 s')")
        for clients in self.plan.clients:
            self.note(results, "entries", {"nodes": 1, "at": 1, "clients": clients, "a_second": self.agree(nodes, clients)})
        for name, port in (("two", TWO), ("three", THREE)):
            cluster, other = self.server(name, port)
            self.join(cluster, other, one)
            nodes.append((cluster, other))
        leader = session.ask("select name from braid.group_nodes where leads")
        nodes.sort(key=lambda node: node[0].name != leader)
        for clients in self.plan.clients:
            for at in (1, len(nodes)):
                self.note(results, "entries", {"nodes": 3, "at": at, "clients": clients, "a_second": self.agree(nodes[:at], clients)})
        for cluster, _ in nodes:
            self.gone(cluster)

    def copies(self, results):
        one, session = self.server("one", ONE)
        session.ask(make())
        session.ask(fill(self.plan.megabytes))
        session.ask("vacuum (freeze, analyze)")
        session.ask(f"select braid.create_group('bench', node_name => 'one', dsn => '{one.dsn}')")
        session.ask("select braid.wait_for_group('60 s')")
        session.ask("checkpoint")
        for run in range(self.plan.runs):
            for system in ("subscription", "join") if run % 2 == 0 else ("join", "subscription"):
                self.note(results, "copies", {"system": system, **self.copy(one, session, system)})
        self.gone(one)

    def copy(self, one, session, system):
        name = "copy" if system == "subscription" else "joiner"
        cluster, other = self.server(name, COPY if system == "subscription" else JOIN)
        began = time.monotonic()
        if system == "join":
            self.join(cluster, other, one)
            made = {"seconds": round(time.monotonic() - began, 2), "steps": json.loads(other.ask(STEPS))}
            other.ask("select braid.leave_group()")
            session.until("count(*) = 1 from braid.group_nodes", "the node has left")
        else:
            # Also what a join does besides: the node, and the tables.
            other.ask(f"select braid.create_node('{name}', '{cluster.dsn}')")
            other.ask(make())
            other.ask(f"select braid.create_subscription('{SUBSCRIPTION}', '{one.dsn}')")
            other.ask(f"select braid.wait_for_subscription('{SUBSCRIPTION}', '{self.plan.patience} s')")
            made = {"seconds": round(time.monotonic() - began, 2)}
            other.ask(f"select braid.drop_subscription('{SUBSCRIPTION}')")
        session.until("not exists (select from pg_replication_slots where slot_name !~ '^braid_(kept|deletions)_')", "its slot is dropped")
        self.gone(cluster)
        return made

    def note(self, results, kind, made):
        made["load_average"] = round(os.getloadavg()[0], 1)
        results[kind].append(made)
        self.say(f"  {kind}: {made}")


def summary(results):
    """The tables that are printed."""
    lines = ["| members | callers | at | entries a second |", "|---:|---:|---|---:|"]
    for made in results["entries"]:
        where = "one" if made["nodes"] == 1 else "the leader" if made["at"] == 1 else "each member"
        lines.append(f"| {made['nodes']} | {made['clients']} | {where} | {made['a_second']:.0f} |")
    seconds = {system: [m["seconds"] for m in results["copies"] if m["system"] == system] for system in ("subscription", "join")}
    if all(seconds.values()):
        lines += ["", f"| {results['plan']['megabytes']} MB by | s | of the subscription's |", "|---|---:|---:|"]
        base = median(seconds["subscription"])
        lines += [f"| {system} | {median(found):.1f} | {median(found) / base:.2f} |" for system, found in seconds.items()]
    return "\n".join(lines)


def measure(stage, plan, directory, say):
    # For the version, which the machine's facts have.
    first = Cluster(stage, "template", TEMPLATE)
    first.create()
    first.start()
    session = first.session()
    major, version = int(session.ask("show server_version_num")) // 10000, session.ask("show server_version")
    first.stop()
    stage.clusters.remove(first)
    results = {
        "format": 1, "kind": "group", "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.facts(stage.directory, version),
        "plan": {"clients": list(plan.clients), "seconds": plan.seconds, "megabytes": plan.megabytes, "runs": plan.runs, "settings": list(plan.settings)},
        "flushes_a_second": fsyncs(stage.program("pg_test_fsync", "-s", "1", "-f", stage.directory / "flush")), "entries": [], "copies": [],
    }
    m = results["machine"]
    say(f"PostgreSQL {m['postgresql']}, Braid {m['braid']}, {m['cores']} cores ({m['cpu']}); load average {m['load_average'][0]};"
        f" the disk flushes {results['flushes_a_second']} times a second")
    bench = Bench(stage, plan, say)
    try:
        bench.entries(results)
        if plan.megabytes:
            bench.copies(results)
    finally:
        if results["entries"]:
            results["machine"]["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
            path = directory / f"group-{datetime.datetime.now():%Y%m%d-%H%M%S}-pg{major}.json"
            path.write_text(json.dumps(results, indent=1) + "\n")
            say("\n" + summary(results))
            say(f"\nsamples: {os.path.relpath(path)}")
