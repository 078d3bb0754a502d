"""Measures what output plugins cost; bench/decode starts the server.

A sample: pg_recvlogical decodes a stretch of WAL through one plugin and format, to nowhere. All formats have a slot at the same
position, and take turns, so that what else the machine does falls on all alike. Part of the time is PostgreSQL's own: the floor
is pgoutput with a publication that holds none of the tables, which reads and reorders all changes and sends none. What counts
is the time above it. CPU seconds are those of the walsender, as the postmaster has reaped them.

The exit status is 1 when a goal is missed at full size (BENCH_SCALE of 1 or more); a smaller run only says so, for its times are too
short to tell. Goals against what is not installed or not among BENCH_FORMATS are not looked at.
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

import decode_chart

RUNS = int(os.environ.get("BENCH_RUNS", "5"))
SCALE = float(os.environ.get("BENCH_SCALE", "1"))
TICK = os.sysconf("SC_CLK_TCK")

PGOUTPUT = ["proto_version=1", "publication_names=bench"]
# Name: plugin, options.
FORMATS = {
    "floor": ("pgoutput", ["proto_version=1", "publication_names=nothing"]),
    "test_decoding": ("test_decoding", []),
    "pgoutput": ("pgoutput", PGOUTPUT),
    "pgoutput binary": ("pgoutput", [*PGOUTPUT, "binary=true"]),
    "wal2json v1": ("wal2json", []),
    "wal2json v2": ("wal2json", ["format-version=2"]),
    "braid gir": ("braid", PGOUTPUT),
    # As a subscription asks: with the versions that changes have replaced.
    "braid gir replaced": ("braid", [*PGOUTPUT, "replaced_versions=on"]),
    "braid wal2json v1": ("braid", ["format=wal2json"]),
    "braid wal2json v2": ("braid", ["format=wal2json", "format-version=2"]),
    "braid gir-json": ("braid", ["format=gir-json", *PGOUTPUT]),
}
# Our format and what it is measured against, how much of its time it may take.
GOALS = {
    "braid gir": ("pgoutput binary", 1.0),
    "braid wal2json v1": ("wal2json v1", 0.5),
    "braid wal2json v2": ("wal2json v2", 0.5),
}

# 50 columns: ten types, five of each.
WIDE = ["int", "bigint", "text", "varchar(40)", "numeric(12,2)", "timestamptz", "boolean", "double precision", "date", "uuid"]
VALUES = ["i", "i * 1000000007::bigint", "'some text of number ' || i", "'short ' || i", "i * 1.25", "'2024-01-01 00:00:00+00'::timestamptz + i * interval '1 s'",
          "i % 2 = 0", "i * 0.37", "'2024-01-01'::date + i % 1000", "md5(i::text)::uuid"]


def count(number):
    return max(int(number * SCALE), 1)


def single_rows(table, rows, values):
    """Transactions of one row each, from a procedure: the session is not what is measured."""
    return f"do $$ begin for i in 1..{count(rows)} loop insert into {table} select {values}; commit; end loop; end $$"


def wide_values():
    return ", ".join(["i", *[VALUES[column % 10] for column in range(49)]])


CASES = {
    "single": ("single-row transactions, 4 columns",
               "create table single (id int primary key, k int, v text, pad text)",
               single_rows("single", 200_000, "i, i * 7, 'value ' || i, 'pad'")),
    "wide": ("single-row transactions, 50 columns of mixed types",
             "create table wide (id int primary key, " + ", ".join(f"c{n} {WIDE[n % 10]}" for n in range(49)) + ")",
             single_rows("wide", 40_000, wide_values())),
    "thousand": ("transactions of 1,000 rows, 4 columns",
                 "create table thousand (id int primary key, k int, v text, pad text)",
                 f"do $$ begin for i in 1..{count(300)} loop insert into thousand select i * 1000 + j, j * 7, 'value ' || j, 'pad' "
                 "from generate_series(0, 999) j; commit; end loop; end $$"),
    "large": ("rows of 100 kB",
              "create table large (id int primary key, v text); alter table large alter v set storage external",
              single_rows("large", 2_000, "i, repeat(md5(i::text), 3200)")),
    # Less than 64 MB of WAL: further behind, replaced versions are not looked for.
    "update": ("single-row updates, in a database that subscribes to another one",
               f"create table updated (id int primary key, k int, v text, pad text); "
               f"insert into updated select i, i * 7, 'value ' || i, 'pad' from generate_series(1, {count(100_000)}) i",
               f"do $$ begin for i in 1..{count(100_000)} loop update updated set k = k + 1 where id = i; commit; end loop; end $$"),
}
# Cases in a database that has a subscription: where there is none, all rows are its own.
SUBSCRIBED = ("update",)


class Server:
    def __init__(self, arguments):
        self.prefix = shlex.split(arguments.prefix)
        self.bindir = arguments.bindir
        self.connection = ["-h", arguments.directory, "-p", arguments.port, "-U", "postgres", "-d", "postgres"]
        pid_file = subprocess.run([*self.prefix, "cat", f"{arguments.directory}/server/postmaster.pid"],
                                  check=True, capture_output=True, text=True, cwd="/").stdout
        self.postmaster = int(pid_file.split("\n", 1)[0])

    def ask(self, sql, database="postgres"):
        done = subprocess.run([*self.prefix, f"{self.bindir}/psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", *self.connection[:-1], database, "-c", sql],
                              capture_output=True, text=True, cwd="/")
        if done.returncode:
            raise SystemExit(f"bench: {sql}\n{done.stderr}")
        return done.stdout.strip()

    def subscribe(self):
        """Makes the database a node that subscribes to another one, and writes nothing by that."""
        host, port = self.connection[1], self.connection[3]
        self.ask("create database other")
        for database in ("other", "postgres"):
            dsn = f"host={host} port={port} user=postgres dbname={database}"
            self.ask(f"create extension braid; select braid.create_node('{database}', '{dsn}')", database)
        self.ask("create publication braid for all tables", "other")
        self.ask(f"select braid.create_subscription('from_other', 'host={host} port={port} user=postgres dbname=other')")
        self.ask("select braid.wait_for_subscription('from_other')")
        self.ask("select braid.disable_subscription('from_other')")

    def reaped(self):
        """CPU seconds of the server's processes that have ended."""
        fields = pathlib.Path(f"/proc/{self.postmaster}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[13]) + int(fields[14])) / TICK

    def receive(self, slot, options, end):
        """Seconds, and CPU seconds of the walsender."""
        command = [*self.prefix, f"{self.bindir}/pg_recvlogical", *self.connection, "-S", slot, "--start", "--no-loop",
                   "--endpos", end, "-f", "/dev/null", "--fsync-interval=0"]
        for option in options:
            command += ["-o", option]
        before = self.reaped()
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
        seconds = time.monotonic() - start
        if done.returncode:
            raise SystemExit(f"bench: {slot}: {done.stderr}")
        # The walsender ends after its client has.
        for _ in range(500):
            if self.ask(f"select active from pg_replication_slots where slot_name = '{slot}'") == "f":
                break
            time.sleep(0.01)
        time.sleep(0.05)
        return seconds, self.reaped() - before


def wanted_formats(server, wal2json):
    names = [name for name in FORMATS if name in os.environ.get("BENCH_FORMATS", ",".join(FORMATS)).split(",")]
    if not wal2json:
        names = [name for name in names if not name.startswith("wal2json")]
        print("wal2json is not installed: not measured", flush=True)
    server.ask("select pg_create_logical_replication_slot('probe', 'braid')")
    try:
        for name in [name for name in names if name == "braid gir-json"]:
            end = server.ask("select pg_current_wal_insert_lsn()")
            server.ask("select pg_logical_emit_message(false, '', '')")
            try:
                server.receive("probe", FORMATS[name][1], end)
            except SystemExit:
                names.remove(name)
    finally:
        server.ask("select pg_drop_replication_slot('probe')")
    return list(dict.fromkeys(["floor", *names]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", required=True, help="command before each of the server's programs, to run them as its user; may be empty")
    parser.add_argument("--bindir", required=True, help="where these programs are")
    parser.add_argument("--directory", required=True, help="of the server's socket, with its data in 'server' below")
    parser.add_argument("--port", required=True)
    parser.add_argument("--wal2json", required=True, choices=("yes", "no"), help="whether wal2json is installed")
    parser.add_argument("--results", required=True, type=pathlib.Path, help="directory for samples and chart")
    arguments = parser.parse_args()
    server = Server(arguments)
    version = server.ask("show server_version").split()[0]
    server.ask("create publication bench for all tables")
    server.ask("create table apart (id int primary key); create publication nothing for table apart")
    formats = wanted_formats(server, arguments.wal2json == "yes")
    cases = os.environ.get("BENCH_CASES", " ".join(CASES)).split()

    samples = {}
    for case in cases:
        title, tables, work = CASES[case]
        if case in SUBSCRIBED:
            server.subscribe()
        server.ask(tables)
        server.ask("select pg_create_logical_replication_slot('start', 'test_decoding')")
        server.ask(work)
        end = server.ask("select pg_current_wal_insert_lsn()")
        # Something beyond the end, so that it is reached.
        server.ask("select pg_logical_emit_message(false, '', ''); select pg_switch_wal()")
        print(f"{title}", flush=True)
        # The first run warms caches up and is not counted.
        for run in range(RUNS + 1):
            for name in formats:
                plugin, options = FORMATS[name]
                server.ask(f"select pg_copy_logical_replication_slot('start', 'taken', false, '{plugin}')")
                seconds, cpu = server.receive("taken", options, end)
                server.ask("select pg_drop_replication_slot('taken')")
                if run:
                    samples.setdefault(case, {}).setdefault(name, []).append({"seconds": round(seconds, 4), "cpu": round(cpu, 2)})
        server.ask("select pg_drop_replication_slot('start')")
        show(samples[case])

    now = datetime.datetime.now(datetime.timezone.utc)
    path = arguments.results / f"decode-{now:%Y%m%d-%H%M%S}-pg{version.split('.')[0]}.json"
    medians = {case: {name: medians_of(taken) for name, taken in by_name.items()} for case, by_name in samples.items()}
    result = {
        "at": now.isoformat(timespec="seconds"), "server_version": version, "cores": os.cpu_count(), "runs": RUNS, "scale": SCALE,
        "titles": {case: CASES[case][0] for case in cases}, "samples": samples, "medians": medians,
        "ratios": {case: ratios(of) for case, of in medians.items()},
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    chart = path.with_suffix(".svg")
    chart.write_text(decode_chart.draw(result))
    print(f"\nsamples: {os.path.relpath(path)}, chart: {os.path.relpath(chart)}")
    text, status = verdict(result["ratios"], SCALE)
    print(text)
    return status


def verdict(by_case, scale):
    """What to say of the goals, and the exit status."""
    looked_at = [(case, name, r) for case, of in by_case.items() for name, r in of.items()]
    missed = [f"{case}: {name}" for case, name, r in looked_at if r["above_floor"] > GOALS[name][1] or r["total"] > 1]
    if not missed:
        return "all goals reached" if looked_at else "no goal could be looked at", 0
    if scale < 1:
        return f"goals missed, at less than full size: {', '.join(missed)}", 0
    return f"goals missed: {', '.join(missed)}", 1


def medians_of(taken):
    return {key: round(statistics.median(sample[key] for sample in taken), 4) for key in ("seconds", "cpu")}


def ratios(medians):
    floor = medians["floor"]
    found = {}
    for name, (other, _) in GOALS.items():
        if name in medians and other in medians:
            above = {key: (medians[name][key] - floor[key]) / max(medians[other][key] - floor[key], 0.001) for key in floor}
            found[name] = {"against": other, "above_floor": round(above["seconds"], 3), "cpu_above_floor": round(above["cpu"], 3),
                           "total": round(medians[name]["seconds"] / medians[other]["seconds"], 3)}
    return found


def show(by_name):
    medians = {name: medians_of(taken) for name, taken in by_name.items()}
    floor = medians["floor"]
    print(f"  {'':20}{'seconds':>10}{'above floor':>13}{'CPU':>8}{'above floor':>13}")
    for name, m in medians.items():
        print(f"  {name:20}{m['seconds']:10.3f}{m['seconds'] - floor['seconds']:13.3f}{m['cpu']:8.2f}{m['cpu'] - floor['cpu']:13.2f}")
    for name, r in ratios(medians).items():
        print(f"  {name} / {r['against']}: {r['above_floor']:.2f} above the floor ({r['cpu_above_floor']:.2f} of CPU), {r['total']:.2f} in total", flush=True)


if __name__ == "__main__":
    sys.exit(main())
