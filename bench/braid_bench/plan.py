"""What to measure and how often: the environment variables of `make bench`, read once, in one place."""

import os
from dataclasses import dataclass, field

TABLES = ("tables100", "tables1000", "tables10000", "tenants")
DRAINS = ("single", "sysbench", "tpcb", "zipf0", "zipf1", "zipf2", "bulk", "wide", *TABLES)
PARTS = ("latency", "link", "dtle", "limits")
GROUPS = {"zipf": ("zipf0", "zipf1", "zipf2"), "tables": TABLES, "drain": DRAINS, "all": DRAINS + PARTS}

USAGE = """
  BENCH_ONLY=single,sysbench   parts of it: single sysbench tpcb zipf0 zipf1 zipf2 bulk wide tables100 tables1000 tables10000
                               tenants (zipf: those three, tables: the last four, drain: all of these), latency, link, dtle,
                               limits. Default: all
  BENCH_SCALE=0.1              transactions and rows, as a share of the full size; for a quick look
  BENCH_RUNS=3                 samples of each; the median counts
  BENCH_MODES=parallel,batch   variants of Braid: parallel serial batch aggregate consolidate batch+consolidate
                               kept whole relaxed batch+relaxed. Default: those that the goals of each workload need
  BENCH_NATIVE=best,default    variants of native replication; best is what the ratios refer to
  BENCH_COMMIT=off,on          synchronous_commit of the subscriptions
  BENCH_OPTIONS="..."          more arguments of braid.create_subscription for every variant, e.g. "two_phase => false"
  BENCH_SETTINGS="a=b; c=d"    more settings of every server
  BENCH_RATES=500,2000         transactions a second of the latency measurement
  BENCH_SECONDS=10             how long each of them lasts
  BENCH_PORT=23500             the first of ten ports used on 127.0.0.1. Default: the first ten that are free from there on
""".strip("\n")


RECONCILE_USAGE = """
  BENCH_ROWS=10000000          rows that both nodes have before
  BENCH_INSERTS=1000000        rows that each node inserts while it is cut off. Default: a tenth of BENCH_ROWS
  BENCH_SIZES=1,0.1            shares of both, each measured
  BENCH_SCALE=0.002            all of it smaller, and the times too; for a quick look
  BENCH_CONFLICTS=0.01         share of the inserted keys that are the same on both nodes. Default: 0
  BENCH_BATCH=1                how many of them are inserted in one transaction
  BENCH_SYSTEMS=braid,bucardo  who is measured
  BENCH_BUCARDO=0.1            the largest of the sizes at which Bucardo is
  BENCH_MODES=parallel,batch   variants of Braid, as in `make bench`. Default: parallel, which is its default
  BENCH_INSERTERS=50           inserts a second on each node, all the time
  BENCH_PHASE=30               seconds of each stretch in which the inserters are watched: linked, cut off, linked again
  BENCH_STEADY=120             seconds of each rate of the steady test; 0: without it
  BENCH_RATES=250,500,...      its rates, inserts a second on each node
  BENCH_RUNS=1                 reconciliations of each; the median counts
  BENCH_OPTIONS, BENCH_SETTINGS, BENCH_PORT    as in `make bench`
""".strip("\n")


MANY_USAGE = """
  BENCH_SETS=100,1000,200x10   numbers of tables, each measured; 200x10 is 200 schemas with ten tables each.
                               Default: 100, 1000, 10000 and 200x10
  BENCH_ROWS=2                 rows of each table
  BENCH_RUNS=3                 samples of each; the median counts
  BENCH_PATIENCE=7200          seconds after which a sample is void
  BENCH_OPTIONS, BENCH_SETTINGS, BENCH_PORT    as in `make bench`
""".strip("\n")


GROUP_USAGE = """
  BENCH_CLIENTS=1,16           callers at a member, each number measured; a member takes 16 questions at a time
  BENCH_SECONDS=10             how long they call
  BENCH_MEGABYTES=1024         what a node gets that joins; 0: none joins
  BENCH_RUNS=3                 joins, and copies of a subscription, in turn; the medians count
  BENCH_PATIENCE=7200          seconds that each may take
  BENCH_SETTINGS, BENCH_PORT   as in `make bench`
""".strip("\n")


class Mistake(Exception):
    """The user asked for something that there is not."""


def words(name, default):
    return [w for w in os.environ.get(name, default).replace(",", " ").split() if w]


def number(name, default, kind, zero=False):
    try:
        value = kind(os.environ.get(name) or default)
    except ValueError:
        raise Mistake(f"{name} must be a number") from None
    if value < 0 or (value == 0 and not zero):
        raise Mistake(f"{name} must be positive")
    return value


def numbers(name, default, kind):
    try:
        values = tuple(kind(w) for w in words(name, default))
    except ValueError:
        raise Mistake(f"{name} must be numbers") from None
    if not values or min(values) <= 0:
        raise Mistake(f"{name} must be positive")
    return values


def settings():
    return tuple(s.strip() for s in os.environ.get("BENCH_SETTINGS", "").split(";") if s.strip())


@dataclass(frozen=True)
class Plan:
    """One run of the bench, as asked for."""

    parts: tuple
    scale: float
    runs: int
    modes: tuple
    native: tuple
    commit: tuple
    options: str
    settings: tuple
    rates: tuple
    seconds: float
    port: int
    port_fixed: bool
    profile: bool = field(default=False)

    @property
    def drains(self):
        return [name for name in DRAINS if name in self.parts]

    def scaled(self, full, at_least=1):
        return max(int(full * self.scale), at_least)


def read(profile=False):
    parts = []
    for word in words("BENCH_ONLY", "all"):
        parts += GROUPS.get(word, (word,))
    unknown = [p for p in parts if p not in DRAINS + PARTS]
    if unknown:
        raise Mistake(f"BENCH_ONLY: there is no {', '.join(unknown)}")
    commit = words("BENCH_COMMIT", "off" if profile else "off,on")
    if not set(commit) <= {"off", "on"}:
        raise Mistake("BENCH_COMMIT: off and on are what there is")
    return Plan(
        parts=tuple(dict.fromkeys(parts)),
        scale=number("BENCH_SCALE", "1", float),
        runs=number("BENCH_RUNS", "1" if profile else "3", int),
        modes=tuple(words("BENCH_MODES", "")),
        native=tuple(words("BENCH_NATIVE", "best" if profile else "best,default")),
        commit=tuple(commit),
        options=os.environ.get("BENCH_OPTIONS", ""),
        settings=settings(),
        rates=tuple(int(r) for r in words("BENCH_RATES", "500,2000")),
        seconds=number("BENCH_SECONDS", "10", float),
        port=number("BENCH_PORT", "23500", int),
        port_fixed="BENCH_PORT" in os.environ,
        profile=profile,
    )


SYSTEMS = ("braid", "bucardo")


@dataclass(frozen=True)
class Reconciliation:
    """One run of the reconciliation bench, as asked for."""

    rows: int
    inserts: int
    sizes: tuple
    scale: float
    conflicts: float
    batch: int
    systems: tuple
    bucardo: float
    modes: tuple
    inserters: float
    phase: float
    steady: float
    rates: tuple
    runs: int
    options: str
    settings: tuple
    port: int
    port_fixed: bool

    def counts(self, size):
        """(rows before, rows that each node inserts, of them with a key that the other one uses too)."""
        rows = max(int(self.rows * size * self.scale), 1000)
        # Whole transactions, evenly over the loader's clients.
        step = 4 * self.batch
        inserts = max(int(self.inserts * size * self.scale) // step, -(-100 // step)) * step
        return rows, inserts, int(inserts * self.conflicts)

    def scaled(self, seconds, at_least):
        """A time, which nobody wants longer at a larger scale."""
        return max(seconds * min(self.scale, 1), min(at_least, seconds))


def read_reconciliation():
    rows = number("BENCH_ROWS", "10000000", int)
    systems = tuple(words("BENCH_SYSTEMS", ",".join(SYSTEMS)))
    if unknown := [s for s in systems if s not in SYSTEMS]:
        raise Mistake(f"BENCH_SYSTEMS: there is no {', '.join(unknown)}; there is {', '.join(SYSTEMS)}")
    conflicts = number("BENCH_CONFLICTS", "0", float, zero=True)
    if conflicts > 1:
        raise Mistake("BENCH_CONFLICTS is a share, at most 1")
    return Reconciliation(
        rows=rows,
        inserts=number("BENCH_INSERTS", str(max(rows // 10, 1)), int),
        sizes=numbers("BENCH_SIZES", "1,0.1", float),
        scale=number("BENCH_SCALE", "1", float),
        conflicts=conflicts,
        batch=number("BENCH_BATCH", "1", int),
        systems=systems,
        bucardo=number("BENCH_BUCARDO", "0.1", float),
        modes=tuple(words("BENCH_MODES", "parallel")),
        inserters=number("BENCH_INSERTERS", "50", float),
        phase=number("BENCH_PHASE", "30", float),
        steady=number("BENCH_STEADY", "120", float, zero=True),
        rates=tuple(sorted(numbers("BENCH_RATES", "250,500,1000,2000,3000,4000,6000", int))),
        runs=number("BENCH_RUNS", "1", int),
        options=os.environ.get("BENCH_OPTIONS", ""),
        settings=settings(),
        port=number("BENCH_PORT", "23500", int),
        port_fixed="BENCH_PORT" in os.environ,
    )


@dataclass(frozen=True)
class Tables:
    """A number of tables, evenly in schemas."""

    total: int
    schemas: int = 1

    def __str__(self):
        return f"{self.total} tables" if self.schemas == 1 else f"{self.total} tables in {self.schemas} schemas"

    @staticmethod
    def read(word):
        schemas, times, each = word.rpartition("x")
        try:
            count = int(schemas) if times else 1
            made = Tables(int(each) * count, count)
        except ValueError:
            made = None
        if made is None or made.schemas < 1 or made.total < 1:
            raise Mistake(f"BENCH_SETS: {word} is neither a number of tables nor schemas x tables, like 200x10")
        return made


@dataclass(frozen=True)
class Many:
    """One run of the bench of many tables, as asked for."""

    sets: tuple
    rows: int
    runs: int
    patience: float
    options: str
    settings: tuple
    port: int
    port_fixed: bool


def read_many():
    return Many(
        sets=tuple(Tables.read(word) for word in words("BENCH_SETS", "100,1000,10000,200x10")),
        rows=number("BENCH_ROWS", "2", int, zero=True),
        runs=number("BENCH_RUNS", "3", int),
        patience=number("BENCH_PATIENCE", "7200", float),
        options=os.environ.get("BENCH_OPTIONS", ""),
        # A copy worker takes one of these for a moment; the locks of native's transactions are as
        # many as the tables.
        settings=("max_worker_processes = 64", "max_replication_slots = 64", "max_wal_senders = 64", *settings()),
        port=number("BENCH_PORT", "23500", int),
        port_fixed="BENCH_PORT" in os.environ,
    )


@dataclass(frozen=True)
class Group:
    """One run of the bench of groups, as asked for."""

    clients: tuple
    seconds: int
    megabytes: int
    runs: int
    patience: int
    settings: tuple
    port: int
    port_fixed: bool


def read_group():
    return Group(
        clients=numbers("BENCH_CLIENTS", "1,16", int),
        seconds=number("BENCH_SECONDS", "10", int),
        megabytes=number("BENCH_MEGABYTES", "1024", int, zero=True),
        runs=number("BENCH_RUNS", "3", int),
        patience=number("BENCH_PATIENCE", "7200", int),
        settings=("max_worker_processes = 64", *settings()),
        port=number("BENCH_PORT", "23600", int),
        port_fixed="BENCH_PORT" in os.environ,
    )


@dataclass(frozen=True)
class Installation:
    """The PostgreSQL that is measured, and whom its servers run as; scripts/server.sh finds both."""

    bindir: str
    user: str
    settings: str

    @staticmethod
    def read():
        try:
            return Installation(os.environ["BENCH_BINDIR"], os.environ["BENCH_OS_USER"], os.environ["BENCH_NODE_SETTINGS"])
        except KeyError:
            raise Mistake("start the bench with bench/run, or make bench") from None

    def program(self, name):
        return os.path.join(self.bindir, name)