"""Runs a case: makes the schema, both subscriptions and the statements, and reads what has come of it."""

import re
import time
from collections import Counter
from dataclasses import dataclass, field

from .case import EVERYWHERE, FILL, PROVIDER, PUBLISH, SCHEMA, STREAM, SUBSCRIBERS
from .libpq import ConnectionLost, SqlError
from .server import faults

PLACES = {PROVIDER: ("provider",), SUBSCRIBERS: ("native", "braid"), EVERYWHERE: ("native", "braid", "provider")}
GOES_ON, STOPPED, STUCK, CRASHED = "goes on", "stopped", "stuck", "crashed"


@dataclass
class Outcome:
    """What one subscription has come to: its state, its error, and the rows of each table as a multiset of texts."""

    state: str = GOES_ON
    error: str = ""
    # Whether all tables were copied when it stopped: before that, what is here depends on timing.
    copied: bool = False
    rows: dict = field(default_factory=dict)


@dataclass(frozen=True)
class NumberedLeaf:
    """A partition whose rows get numbers of the subscriber's: the row as it is compared, the root, and the column."""

    row: str
    root: str
    column: str


class Runner:
    """Runs cases one after the other on one server."""

    def __init__(self, server, seconds=60):
        self.server = server
        self.seconds = seconds
        self.sessions = {}
        # Subscriptions of each run have names of their own: slots of earlier ones may still be
        # there.
        self.runs = 0

    def run(self, case):
        """The outcomes of both subscriptions, by name."""
        native, braid = Outcome(), Outcome()
        self.runs += 1
        self.server.new_log()
        try:
            self._connect()
            self._prepare()
            self._run(case, native, braid)
            self._read_rows(native, braid)
        except ConnectionLost as lost:
            native.state = braid.state = CRASHED
            braid.error = str(lost)
        log = self.server.new_log()
        found = faults(log)
        if found:
            braid.state = CRASHED
            braid.error = found[0].split("|")[-1]
        if native.state == STOPPED:
            errors = re.findall(r"^[^|]*\|logical replication[^|]*\|ERROR:  (.*)$", log, re.MULTILINE)
            native.error = errors[0] if errors else native.error
        self._clean_up(braid.state == CRASHED)
        return {"native": native, "braid": braid}

    def _connect(self):
        for database in ("provider", "native", "braid"):
            if database not in self.sessions:
                self.sessions[database] = self.server.connect(database)

    def _prepare(self):
        for database, session in self.sessions.items():
            session.execute("drop schema if exists s cascade")
            session.execute("create schema s; grant all on schema s to app")
            if database == "native":
                session.execute("do $$ declare t regclass; begin for t in select oid from pg_class where relnamespace = 'braid'::regnamespace "
                                "and relkind = 'r' loop execute 'truncate ' || t; end loop; end $$")
            if database == "provider":
                for (name,) in session.execute("select pubname from pg_publication"):
                    session.execute(f"drop publication {name}")

    def _try(self, database, sql, copy=None):
        """Runs a statement that may fail: an error is part of the case."""
        try:
            self.sessions[database].execute(sql, copy)
            return True
        except SqlError:
            return False

    def _run(self, case, native, braid):
        steps = list(case.rendered())
        for place, phase, sql, copy in steps:
            if phase in (SCHEMA, FILL, PUBLISH):
                for database in PLACES[place]:
                    self._try(database, sql, copy)
        for session in self.sessions.values():
            self._end_transaction(session)
        self._subscribe(case, native, braid)
        self._wait(native, braid, self._ready)
        native.copied, braid.copied = native.state == GOES_ON, braid.state == GOES_ON
        for place, phase, sql, copy in steps:
            if phase != STREAM:
                continue
            if place != PROVIDER:
                self._end_transaction(self.sessions["provider"])
                self._wait(native, braid, self._replayed)
            for database in PLACES[place]:
                self._try(database, sql, copy)
        self._end_transaction(self.sessions["provider"])
        self._wait(native, braid, self._replayed)

    @staticmethod
    def _end_transaction(session):
        try:
            session.execute("commit")
        except SqlError:
            pass

    def _subscribe(self, case, native, braid):
        publications = ", ".join(case.publications)
        self.sessions["provider"].execute(f"select pg_create_logical_replication_slot('n{self.runs}', 'pgoutput')")
        options = "".join(f", {name} = {value}" for name, value in case.native_options.items())
        try:
            self.sessions["native"].execute(
                f"create subscription n{self.runs} connection '{self.server.conninfo('provider')}' publication {publications} "
                f"with (create_slot = false, slot_name = n{self.runs}, disable_on_error = true{options})")
        except SqlError as error:
            native.state, native.error = STOPPED, str(error)
        options = "".join(f", {name} => {value}" for name, value in case.braid_options.items())
        try:
            self.sessions["braid"].execute(
                f"select braid.create_subscription('b{self.runs}', '{self.server.conninfo('provider')}', publications => '{{{publications}}}'{options})")
        except SqlError as error:
            braid.state, braid.error = STOPPED, str(error)

    def _wait(self, native, braid, done):
        """Waits until both subscriptions that still go on are done or stop."""
        lsn = self._end_of_wal()
        end = time.monotonic() + self.seconds
        waiting = [(name, outcome) for name, outcome in (("native", native), ("braid", braid)) if outcome.state == GOES_ON]
        while waiting:
            waiting = [(name, outcome) for name, outcome in waiting if not done(name, lsn) and not self._stops(name, outcome)]
            if waiting and time.monotonic() > end:
                for name, outcome in waiting:
                    outcome.state, outcome.error = STUCK, self._position(name, lsn)
                return
            if waiting:
                time.sleep(0.02)

    def _position(self, name, lsn):
        """What there is to say of a subscription that does not arrive at a position."""
        said = self.sessions["provider"].execute(
            f"select state, replay_lsn from pg_stat_replication where application_name = '{name[0]}{self.runs}'")
        if name == "braid":
            said += self.sessions[name].execute("select state, last_error, received_lsn, applied_lsn from braid.subscription_status")
            said += self.sessions[name].execute("select relation::text, copy_error from braid.subscription_tables where copy_error is not null")
        return f"waits for {lsn}: {said}"

    def _end_of_wal(self):
        session = self.sessions["provider"]
        # A commit that waits for its flush has all before it written.
        session.execute("select pg_logical_emit_message(true, 'end', '')")
        return session.value("select pg_current_wal_lsn()")

    def _ready(self, name, _lsn):
        if name == "native":
            return self.sessions[name].value(
                "select not exists (select from pg_subscription_rel where srsubstate <> 'r') "
                f"and exists (select from pg_stat_subscription where subname = 'n{self.runs}' and pid is not null)") == "t"
        return self.sessions[name].value(f"select state from braid.subscription_status where name = 'b{self.runs}'") == "streaming"

    def _replayed(self, name, lsn):
        return self.sessions["provider"].value(
            f"select replay_lsn >= '{lsn}' from pg_stat_replication where application_name = '{name[0]}{self.runs}' and state = 'streaming'") == "t"

    def _stops(self, name, outcome):
        session = self.sessions[name]
        if name == "native":
            if session.value(f"select subenabled from pg_subscription where subname = 'n{self.runs}'") != "t":
                outcome.state = STOPPED
        else:
            rows = session.execute(
                f"select state, coalesce(last_error, '') from braid.subscription_status where name = 'b{self.runs}'")
            if rows and (rows[0][0] == "error" or rows[0][1] and rows[0][0] == "stopped"):
                outcome.state, outcome.error = STOPPED, rows[0][1]
        return outcome.state == STOPPED

    def _read_rows(self, native, braid):
        tables = [name for (name,) in self.sessions["native"].execute(
            "select format('%I.%I', nspname, relname) from pg_class c join pg_namespace n on n.oid = relnamespace "
            "where nspname = 's' and relkind = 'r' order by 1")]
        numbered = self._numbered_leaves()
        for name, outcome in (("native", native), ("braid", braid)):
            for table in tables:
                row = numbered[table].row if table in numbered else "t"
                try:
                    rows = self.sessions[name].execute(f"select {row}::text from only {table} t")
                except SqlError as error:
                    rows = [(str(error),)]
                outcome.rows[table] = Counter(row for (row,) in rows)
            for root, column in sorted({(leaf.root, leaf.column) for leaf in numbered.values()}):
                again = self.sessions[name].value(f"select count({column}) - count(distinct {column}) from {root}")
                outcome.rows[f"{root}.{column}"] = Counter({f"{again} numbers given again": 1})

    def _numbered_leaves(self):
        """Leaves with an identity column that only the subscribers have, by name.

        The leaves share the sequence of their root. They are copied one by one, by native beside
        each other, so it is a matter of time which row gets which number. Rows are compared with
        a sign in the place of the number. Whether there is a number, and that no other row has it,
        is compared all the same.
        """
        columns = self.sessions["native"].execute(
            "select attrelid::regclass, quote_ident(attname), attidentity <> '', pg_partition_root(attrelid)::regclass from pg_attribute "
            "join pg_class c on c.oid = attrelid where relnamespace = 's'::regnamespace and relkind = 'r' and relispartition "
            "and attnum > 0 and not attisdropped order by attrelid, attnum")
        there = {(table, column) for table, column in self.sessions["provider"].execute(
            "select attrelid::regclass, quote_ident(attname) from pg_attribute where attnum > 0 and not attisdropped")}
        leaves = {}
        for table, column, identity, root in columns:
            if identity == "t" and (table, column) not in there:
                fields = [f"case when t.{name} is not null then '#' end" if name == column else f"t.{name}"
                          for of, name, _identity, _root in columns if of == table]
                leaves[table] = NumberedLeaf(f"row({', '.join(fields)})", root, column)
        return leaves

    def _clean_up(self, crashed):
        """Drops both subscriptions, or makes the server anew where it cannot be trusted."""
        if not crashed:
            try:
                self._drop()
                return
            except (ConnectionLost, SqlError, TimeoutError):
                pass
        for session in self.sessions.values():
            session.close()
        self.sessions = {}
        self.server.make()

    def _drop(self):
        native, braid, provider = (self.sessions[name] for name in ("native", "braid", "provider"))
        for (name,) in native.execute("select subname from pg_subscription"):
            native.execute(f"alter subscription {name} disable")
            native.execute(f"alter subscription {name} set (slot_name = none)")
            native.execute(f"drop subscription {name}")
        for (name,) in braid.execute("select name from braid.subscription_status"):
            braid.execute(f"select braid.drop_subscription('{name}')")
        # Those that still end are dropped after a later case.
        self._try("provider", "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
                  "where not active and database = 'provider' and plugin = 'pgoutput'")
        end = time.monotonic() + 20
        while int(provider.value("select count(*) from pg_replication_slots")) > 12:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.1)
