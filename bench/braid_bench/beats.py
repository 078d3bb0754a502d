"""How far each of two nodes is behind the other: about ten times a second a row of its own is written at both, and looked for at the
other. One clock, that of this process, for all of it.

The lag of a direction at a moment is the age of the oldest such row that is not there yet; 0 where all are. Both systems that are
measured show rows in the order of their commits or together, so where a beat is, all that was committed before it is too.
"""

import math
import threading
import time

INTERVAL = 0.1
TABLE = "create table beat (node int, n bigint, primary key (node, n))"


def lag(written, seen, now):
    """`written`: when beat 1, 2, ... was committed; `seen`: the last that is at the other node."""
    return max(now - written[seen], 0.0) if seen < len(written) else 0.0


def level(series, since, at_most):
    """Seconds from `since` to the first moment at which neither lag is above `at_most`. None: there is none. What a system that works in
    rounds falls behind afterwards, between two of them, is not looked at.
    """
    return next((moment - since for moment, *lags in series if moment >= since and max(lags) <= at_most), None)


# A lag that grows by less from the second third of the time to the last is none that grows: in
# systems that work in rounds it goes up and down.
GROWTH = 1.0
BOUND = 5.0


def verdict(series, began, ended, reached, rate):
    """Whether a rate was stable: '' or why not."""
    # pgbench draws when each is due.
    chance = 3 * math.sqrt(rate / (ended - began))
    short = [r for r in reached if r < 0.95 * rate - chance]
    if short:
        return f"{min(short):.0f}/s inserted"
    third = (ended - began) / 3
    middle = [max(lags) for moment, *lags in series if began + third <= moment < began + 2 * third]
    last = [max(lags) for moment, *lags in series if began + 2 * third <= moment <= ended]
    if not middle or not last:
        return "too short to tell"
    if max(last) > BOUND:
        return f"{max(last):.1f} s behind"
    before, after = sum(middle) / len(middle), sum(last) / len(last)
    if after > before + GROWTH:
        return f"falls behind: {before:.1f} s, then {after:.1f} s"
    return ""


class Beats:
    """From `start` to `stop`."""

    def __init__(self, nodes):
        self.sessions = [node.session() for node in nodes]
        self.written = ([], [])
        # What node 0 has of node 1, and the other way round.
        self.seen = [0, 0]
        self.series = []
        self.over = threading.Event()
        self.failure = None

    def start(self):
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()
        return self

    def follow(self):
        due = time.monotonic()
        try:
            while not self.over.is_set():
                self.beat()
                due = max(due + INTERVAL, time.monotonic())
                self.over.wait(due - time.monotonic())
        except Exception as failure:  # noqa: BLE001: whoever waits for a beat raises it
            self.failure = failure

    def beat(self):
        lags = []
        for own, session in enumerate(self.sessions):
            other = 1 - own
            session.ask(f"insert into beat values ({own}, {len(self.written[own]) + 1})")
            self.written[own].append(time.monotonic())
            self.seen[own] = int(session.ask(f"select coalesce(max(n), 0) from beat where node = {other}"))
            lags.append(lag(self.written[other], self.seen[own], time.monotonic()))
        self.series.append((time.monotonic(), *lags))

    def check(self):
        if self.failure:
            raise self.failure

    def marks(self):
        """The last beat of each node so far."""
        self.check()
        return [len(written) for written in self.written]

    def has(self, marks):
        """Whether each node has the other's mark."""
        self.check()
        return self.seen[0] >= marks[1] and self.seen[1] >= marks[0]

    def now(self):
        """The larger lag, as last seen."""
        self.check()
        return max(self.series[-1][1:]) if self.series else float("inf")

    def stop(self):
        self.over.set()
        self.thread.join()
        self.check()
