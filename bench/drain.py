"""Measures how fast a subscriber drains a backlog, and what that costs; bench/run starts the two servers.

A sample: the subscription catches up and is disabled; a backlog is committed at the provider; the subscription is enabled, and
the clock runs until the backlog's last row is visible at the subscriber. Each way of replication has tables of its own,
so that its rows at the subscriber come from its own initial copy and its own changes. Each row is then updated once through the
subscription: PostgreSQL 18 takes a row that its own initial copy brought for another origin's, and reports a conflict for
the first change of each. The samples are without conflicts for either, which is checked.

CPU time is what the servers' postmasters have reaped between enabling and the end of the workers after disabling: walsender on
the one side, every worker on the other, also those that ended meanwhile. The sessions that steer are kept open: not in it.
"""

import argparse
import datetime
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import time

RUNS = int(os.environ.get("BENCH_RUNS", "3"))
TRANSACTIONS = int(os.environ.get("BENCH_TRANSACTIONS", "100000"))
ROWS = int(os.environ.get("BENCH_ROWS", "1000000"))
WAYS = os.environ.get("BENCH_WAYS", "native braid").split()
CASES = os.environ.get("BENCH_CASES", "single four").split()
OPTIONS = os.environ.get("BENCH_OPTIONS", "")
TITLES = {
    "single": "single-row transactions (1 insert)",
    "four": "four-row transactions (1 delete, 1 insert, 2 updates)",
}
TICK = os.sysconf("SC_CLK_TCK")


class Session:
    """One psql that stays connected; statements go in, rows come out."""

    def __init__(self, command, dsn):
        self.dsn = dsn
        self.process = subprocess.Popen(
            shlex.split(command) + ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", dsn],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/")

    def ask(self, sql):
        self.process.stdin.write(sql + "\n;\n\\echo :the-end:\n")
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if line == ":the-end:\n":
                return "".join(lines).strip()
            lines.append(line)
        raise SystemExit(f"bench: psql ended at\n{sql}\n{''.join(lines)}")

    def until(self, condition, what, seconds=120):
        end = time.monotonic() + seconds
        while self.ask(f"select {condition}") != "t":
            if time.monotonic() > end:
                raise SystemExit(f"bench: waited {seconds} s in vain until {what}")
            time.sleep(0.02)


class Native:
    name = "native"
    worker = "logical replication%"

    @staticmethod
    def create(subscriber, provider_dsn):
        subscriber.ask(f"create subscription native connection '{provider_dsn}' publication native")
        subscriber.until("not exists (select from pg_subscription_rel where srsubstate not in ('r', 's'))", "the copy is done")

    @staticmethod
    def switch(subscriber, on):
        subscriber.ask(f"alter subscription native {'enable' if on else 'disable'}")

    @staticmethod
    def conflicts(subscriber, major):
        if major < 18:
            return "0"
        return subscriber.ask(
            "select sum(confl_insert_exists + confl_update_origin_differs + confl_update_missing"
            " + confl_delete_origin_differs + confl_delete_missing) from pg_stat_subscription_stats")


class Braid:
    name = "braid"
    worker = "braid %"

    @staticmethod
    def create(subscriber, provider_dsn):
        options = f", {OPTIONS}" if OPTIONS else ""
        subscriber.ask(f"select braid.create_subscription('braid', '{provider_dsn}', publications => '{{braid}}'{options})")
        subscriber.ask("select braid.wait_for_subscription('braid')")

    @staticmethod
    def switch(subscriber, on):
        subscriber.ask(f"select braid.{'enable' if on else 'disable'}_subscription('braid')")

    @staticmethod
    def conflicts(subscriber, _major):
        return subscriber.ask("select count(*) from braid.conflict_history")


def tables(way):
    """The tables of one way, on either node, and the procedures that commit a backlog at the provider."""
    return f"""
        create table single_{way} (id bigint primary key, k int not null, c text not null);
        create table four_{way} (id int primary key, k int not null, c char(120) not null, pad char(60) not null);
        create index on four_{way} (k);
        create table sentinel_{way} (id int primary key);
        create procedure backlog_single_{way}(n int) language plpgsql as $$
        declare
            first bigint := (select coalesce(max(id), 0) from single_{way});
        begin
            for i in 1 .. n loop
                insert into single_{way} values (first + i, i, 'a row of a single-row transaction');
                commit;
            end loop;
        end $$;
        create procedure backlog_four_{way}(n int) language plpgsql as $$
        declare
            text_c text := repeat('0123456789-', 10);
            key_a int;
            key_b int;
            key_c int;
        begin
            for i in 1 .. n loop
                -- Into variables first: random() in a condition would be computed for every row.
                key_a := 1 + floor(random() * {ROWS});
                key_b := 1 + floor(random() * {ROWS});
                key_c := 1 + floor(random() * {ROWS});
                update four_{way} set k = k + 1 where id = key_a;
                update four_{way} set c = i || text_c where id = key_b;
                delete from four_{way} where id = key_c;
                insert into four_{way} values (key_c, i, text_c, 'inserted again');
                commit;
            end loop;
        end $$;
    """


def reaped(pid):
    """Seconds of CPU time of the children that this process has waited for."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / TICK


def stop(way, provider, subscriber):
    """Disable the subscription; back when its processes on either side have ended and been waited for."""
    workers = (f"select pid from pg_stat_activity where backend_type like '{way.worker}'"
               " and backend_type not in ('braid manager', 'braid supervisor', 'logical replication launcher')")
    walsenders = "select pid from pg_stat_activity where backend_type = 'walsender'"
    pids = subscriber.ask(workers).split() + provider.ask(walsenders).split()
    way.switch(subscriber, False)
    subscriber.until(f"not exists ({workers})", f"the workers of {way.name} are gone")
    provider.until(f"not exists ({walsenders})", "the walsender is gone")
    # A process that leaves pg_stat_activity may still be giving its memory back.
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)


def drain(way, case, transactions, number, provider, subscriber, postmasters):
    """One sample."""
    def sentinel(i):
        provider.ask(f"insert into sentinel_{way.name} values ({i})")

    wait = """do $$ begin
        while not exists (select from sentinel_{way} where id = {id}) loop perform pg_sleep(0.005); end loop; end $$"""

    # Past everything that was written for the other way; from here on there is only this backlog to decode.
    way.switch(subscriber, True)
    sentinel(2 * number)
    subscriber.ask(wait.format(way=way.name, id=2 * number))
    provider.until(
        f"coalesce(bool_and(replay_lsn >= '{provider.ask('select pg_current_wal_lsn()')}'), false) from pg_stat_replication",
        f"{way.name} has confirmed")
    stop(way, provider, subscriber)

    provider.ask(f"call backlog_{case}_{way.name}({transactions})")
    sentinel(2 * number + 1)

    before = {side: reaped(pid) for side, pid in postmasters.items()}
    start = time.monotonic()
    way.switch(subscriber, True)
    subscriber.ask(wait.format(way=way.name, id=2 * number + 1))
    seconds = time.monotonic() - start
    stop(way, provider, subscriber)
    cpu = {side: round(reaped(pid) - before[side], 2) for side, pid in postmasters.items()}
    return {"seconds": round(seconds, 3), "per_second": round(transactions / seconds), "cpu": cpu}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--psql", required=True)
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    ways = [way for way in (Native, Braid) if way.name in WAYS]

    def connect(port):
        session = Session(arguments.psql, f"host={arguments.directory} port={port} dbname=postgres user=postgres")
        # For the sessions that write backlogs and wait; workers have their own.
        session.ask("set synchronous_commit = off; set statement_timeout = '10min'; set client_min_messages = warning")
        return session

    provider, subscriber = connect(5511), connect(5512)
    postmasters = {
        side: int(pathlib.Path(arguments.directory, side, "postmaster.pid").read_text().split("\n")[0])
        for side in ("provider", "subscriber")
    }
    version = provider.ask("show server_version").split()[0]
    print(f"PostgreSQL {version}, {os.cpu_count()} cores, {TRANSACTIONS} transactions, {ROWS} rows, median of {RUNS}", flush=True)

    if Braid in ways:
        for session, name in ((provider, "provider"), (subscriber, "subscriber")):
            session.ask(f"create extension braid; select braid.create_node('{name}', '{session.dsn}')")
    for way in ways:
        for session in (provider, subscriber):
            session.ask(tables(way.name))
        if "four" in CASES:
            provider.ask(
                f"insert into four_{way.name} select i, random() * {ROWS}, repeat(i::text, 10), 'pad' from generate_series(1, {ROWS}) i")
        provider.ask(f"create publication {way.name} for table single_{way.name}, four_{way.name}, sentinel_{way.name}")
        way.create(subscriber, provider.dsn)
        if "four" in CASES:
            for first in range(0, ROWS, 20000):
                provider.ask(f"update four_{way.name} set k = k where id > {first} and id <= {first + 20000}")
        provider.ask(f"insert into sentinel_{way.name} values (0)")
        subscriber.until(f"exists (select from sentinel_{way.name})", f"{way.name} has touched each row")
        stop(way, provider, subscriber)
        if way is Native:
            subscriber.ask("select pg_stat_reset_subscription_stats(oid) from pg_subscription")
    for session in (provider, subscriber):
        session.ask("vacuum analyze")

    samples = {}
    number = 0
    for case in CASES:
        # A small one of each first, to warm caches and the code up; not counted.
        for run in range(RUNS + 1):
            for way in ways:
                number += 1
                transactions = TRANSACTIONS if run else max(TRANSACTIONS // 20, 1)
                sample = drain(way, case, transactions, number, provider, subscriber, postmasters)
                if run:
                    samples.setdefault(case, {}).setdefault(way.name, []).append(sample)
                    print(f"  {case} {way.name}: {sample['per_second']}/s, CPU {sample['cpu']}", flush=True)

    # A fast way to a wrong answer is no result.
    for way in ways:
        for case in CASES:
            digest = f"select count(*), sum(hashtextextended(t::text, 0)::numeric) from {case}_{way.name} t"
            if provider.ask(digest) != subscriber.ask(digest):
                raise SystemExit(f"bench: {case}_{way.name} differs between the nodes")
    for way in ways:
        conflicts = way.conflicts(subscriber, int(version.split(".")[0]))
        if conflicts != "0":
            raise SystemExit(f"bench: {way.name} saw {conflicts} conflicts where there are none to be: not a fair measure")

    medians, ratios = {}, {}
    for case, by_way in samples.items():
        medians[case] = {
            name: {
                "per_second": statistics.median(s["per_second"] for s in taken),
                **{f"cpu_{side}": statistics.median(s["cpu"][side] for s in taken) for side in postmasters},
            }
            for name, taken in by_way.items()
        }
        print(f"\n{TRANSACTIONS} {TITLES[case]}")
        print(f"  {'':8}{'transactions/s':>16}{'CPU s, walsender':>18}{'CPU s, subscriber':>19}")
        for name, m in medians[case].items():
            print(f"  {name:8}{m['per_second']:16.0f}{m['cpu_provider']:18.2f}{m['cpu_subscriber']:19.2f}")
        if {"native", "braid"} <= set(by_way):
            native, braid = medians[case]["native"], medians[case]["braid"]
            ratios[case] = {key: round(braid[key] / native[key], 3) if native[key] else None for key in native}
            r = ratios[case]
            print(f"  {'ratio':8}{r['per_second']:16.2f}{r['cpu_provider'] or 0:18.2f}{r['cpu_subscriber'] or 0:19.2f}")

    now = datetime.datetime.now(datetime.timezone.utc)
    path = arguments.results / f"{now:%Y%m%d-%H%M%S}-pg{version.split('.')[0]}.json"
    path.write_text(json.dumps({
        "at": now.isoformat(timespec="seconds"), "server_version": version, "cores": os.cpu_count(),
        "transactions": TRANSACTIONS, "rows": ROWS, "options": OPTIONS,
        "samples": samples, "medians": medians, "ratios": ratios,
    }, indent=2) + "\n")
    print(f"\nsamples: {os.path.relpath(path)}")


if __name__ == "__main__":
    sys.exit(main())
