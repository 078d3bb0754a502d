"""What to measure and how often: the environment variables of `make bench`, read once, in one place."""

import os
from dataclasses import dataclass, field

DRAINS = ("single", "sysbench", "tpcb", "zipf0", "zipf1", "zipf2", "bulk", "wide")
PARTS = ("latency", "link", "dtle", "limits")
GROUPS = {"zipf": ("zipf0", "zipf1", "zipf2"), "drain": DRAINS, "all": DRAINS + PARTS}

USAGE = """
  BENCH_ONLY=single,sysbench   parts of it: single sysbench tpcb zipf0 zipf1 zipf2 bulk wide (zipf: those three, drain: all of
                               these), latency, link, dtle, limits. Default: all
  BENCH_SCALE=0.1              transactions and rows, as a share of the full size; for a quick look
  BENCH_RUNS=3                 samples of each; the median counts
  BENCH_MODES=parallel,batch   variants of Braid: parallel serial batch aggregate consolidate batch+consolidate
                               relaxed batch+relaxed. Default: those that the goals of each workload need
  BENCH_NATIVE=best,default    variants of native replication; best is what the ratios refer to
  BENCH_COMMIT=off,on          synchronous_commit of the subscriptions
  BENCH_OPTIONS="..."          more arguments of braid.create_subscription for every variant, e.g. "two_phase => false"
  BENCH_SETTINGS="a=b; c=d"    more settings of every server
  BENCH_RATES=500,2000         transactions a second of the latency measurement
  BENCH_SECONDS=10             how long each of them lasts
  BENCH_PORT=23500             the first of ten ports used on 127.0.0.1. Default: the first ten that are free from there on
""".strip("\n")


class Mistake(Exception):
    """The user asked for something that there is not."""


def words(name, default):
    return [w for w in os.environ.get(name, default).replace(",", " ").split() if w]


def number(name, default, kind):
    try:
        value = kind(os.environ.get(name) or default)
    except ValueError:
        raise Mistake(f"{name} must be a number") from None
    if value <= 0:
        raise Mistake(f"{name} must be positive")
    return value


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
        settings=tuple(s.strip() for s in os.environ.get("BENCH_SETTINGS", "").split(";") if s.strip()),
        rates=tuple(int(r) for r in words("BENCH_RATES", "500,2000")),
        seconds=number("BENCH_SECONDS", "10", float),
        port=number("BENCH_PORT", "23500", int),
        port_fixed="BENCH_PORT" in os.environ,
        profile=profile,
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