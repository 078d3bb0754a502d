"""The workloads: tables, what is in them at the start, and what is committed at the provider to be replicated.

Each is committed once, into the WAL of one provider; every sample then drains that same WAL into a copy of the same subscriber.
"""

import bisect
import itertools
import random
from dataclasses import dataclass

from . import plan as plans

CLIENTS = 4
SEED = 20240817


@dataclass
class Workload:
    """One workload at one scale. `transactions` and `rows` are what the load commits and changes."""

    name: str
    title: str
    transactions: int
    rows: int
    # Row-wise COPY of what the load wrote is a limit only where all it does is insert.
    inserted: tuple = ()

    def tables(self):
        """SQL that creates them."""
        raise NotImplementedError

    def fill(self, cluster, session):
        """The rows that are there before."""

    def load(self, cluster, session, transactions=None):
        """Commits the backlog."""
        raise NotImplementedError

    def dumped(self, tables):
        """Which of the provider's objects a subscriber is made of: arguments of pg_dump."""
        return [f"--table={table}" for table in [*tables, "bench_done"]]

    def published(self, session):
        """Tables, in the order of their names; `bench_done` has the row that comes last."""
        names = session.ask("select c.relname from pg_class c where c.relnamespace = 'public'::regnamespace and relkind = 'r'"
                            " and relname !~ '^bench_' order by 1")
        return names.split()


def pgbench(cluster, script, transactions, clients=CLIENTS, definitions=()):
    """The script's transactions, evenly over the clients; the same every time."""
    stage = cluster.stage
    path = stage.directory / "script.sql"
    path.write_text(script)
    clients = min(clients, transactions)
    return stage.program(
        "pgbench", "-h", stage.directory, "-p", str(cluster.port), "-U", "postgres", "-n", "-M", "prepared",
        "-c", str(clients), "-j", "1", "-t", str(-(-transactions // clients)), f"--random-seed={SEED}", "-f", path,
        *(f"-D{name}={value}" for name, value in {"clients": clients, **dict(definitions)}.items()), "postgres",
        environment={"PGOPTIONS": "-c synchronous_commit=off"})


class Single(Workload):
    def tables(self):
        return "create table single (id bigint generated always as identity primary key, k int not null, c text not null)"

    def load(self, cluster, session, transactions=None):
        script = "\\set k random(1, 1000000)\ninsert into single (k, c) values (:k, 'a row of a single-row transaction');\n"
        pgbench(cluster, script, transactions or self.transactions)


class Sysbench(Workload):
    """oltp_write_only: an update that changes an indexed column, one that does not, a delete, and the same key inserted again."""

    def tables(self):
        return """create table sbtest1 (id int primary key, k int not null default 0, c char(120) not null default '',
                                        pad char(60) not null default '');
                  create index k_1 on sbtest1 (k)"""

    size = 1_000_000

    def fill(self, cluster, session):
        # sysbench's texts are groups of random digits: here each is a window of two hundred such
        # groups.
        session.ask(f"""select setseed(0.5);
            insert into sbtest1
            select i, 1 + floor(random() * {self.size}), substr(noise, 1 + 12 * floor(random() * 190)::int, 119),
                   substr(noise, 1 + 12 * floor(random() * 195)::int, 59)
            from (select string_agg(lpad(floor(random() * 1e11)::bigint::text, 11, '0'), '-') as noise from generate_series(1, 200)) n,
                 generate_series(1, {self.size}) i""")

    def load(self, cluster, session, transactions=None):
        # Each client has keys of its own, so that one's delete and insert never meet another's:
        # which would be an error.
        keys = "".join(
            f"\\set {name} 1 + :client_id + :clients * random(0, :size / :clients - 1)\n" for name in ("a", "b", "d"))
        # Groups of digits, two of them new each time: what a text is costs the same, and pgbench
        # has no text of its own.
        text = "rpad(:g::text || '-' || :h::text, {length}, '-68487932199')"
        script = f"""{keys}\\set k random(1, :size)
\\set g random(10000000000, 99999999999)
\\set h random(10000000000, 99999999999)
begin;
update sbtest1 set k = k + 1 where id = :a;
update sbtest1 set c = {text.format(length=119)} where id = :b;
delete from sbtest1 where id = :d;
insert into sbtest1 (id, k, c, pad) values (:d, :k, {text.format(length=119)}, {text.format(length=59)});
commit;
"""
        pgbench(cluster, script, transactions or self.transactions, definitions={"size": self.size})


class TpcB(Workload):
    branches = 10

    def tables(self):
        return ""

    def fill(self, cluster, session):
        stage = cluster.stage
        stage.program("pgbench", "-h", stage.directory, "-p", str(cluster.port), "-U", "postgres", "-q", "-i",
                      "-s", str(self.branches), "postgres")

    def load(self, cluster, session, transactions=None):
        script = """\\set aid random(1, 100000 * :scale)
\\set bid random(1, :scale)
\\set tid random(1, 10 * :scale)
\\set delta random(-5000, 5000)
begin;
update pgbench_accounts set abalance = abalance + :delta where aid = :aid;
select abalance from pgbench_accounts where aid = :aid;
update pgbench_tellers set tbalance = tbalance + :delta where tid = :tid;
update pgbench_branches set bbalance = bbalance + :delta where bid = :bid;
insert into pgbench_history (tid, bid, aid, delta, mtime) values (:tid, :bid, :aid, :delta, current_timestamp);
end;
"""
        pgbench(cluster, script, transactions or self.transactions, definitions={"scale": self.branches})


class Zipf(Workload):
    """Each transaction updates one row of one of ten tables; the table is chosen uniformly, the row with P(rank) ~ rank^-theta."""

    theta = 0
    size = 100_000

    def tables(self):
        return ";".join(
            f"create table zipf_{t} (id int primary key, n bigint not null, a text not null, b text not null)" for t in range(10))

    def fill(self, cluster, session):
        for t in range(10):
            session.ask(f"insert into zipf_{t} select i, 0, repeat('a', 90), repeat('b', 90) from generate_series(1, {self.size}) i")
        # pgbench's own Zipf has no theta of 0 or 1. Ranks are spread over the table, so that hot
        # rows are not neighbours.
        draw = random.Random(SEED)
        weights = list(itertools.accumulate((rank + 1) ** -self.theta for rank in range(self.size)))
        spread = list(range(1, self.size + 1))
        draw.shuffle(spread)
        session.ask("create table bench_keys (n int primary key, t int not null, id int not null)")
        keys = (
            f"({n},{draw.randrange(10)},{spread[min(bisect.bisect_left(weights, draw.random() * weights[-1]), self.size - 1)]})"
            for n in range(self.transactions))
        while part := list(itertools.islice(keys, 10_000)):
            session.ask("insert into bench_keys values " + ",".join(part))
        session.ask("""create procedure bench_update(wanted int) language plpgsql as $$
            declare
                chosen bench_keys[] := array(select k from bench_keys k where k.n < wanted order by k.n);
                k bench_keys;
            begin
                foreach k in array chosen loop
                    execute format('update zipf_%s set n = n + 1, a = $2 where id = $1', k.t) using k.id, rpad(k.n::text, 90, 'x');
                    commit;
                end loop;
            end $$""")

    def load(self, cluster, session, transactions=None):
        session.ask(f"call bench_update({transactions or self.transactions})")


class Bulk(Workload):
    def tables(self):
        return "create table bulk (id bigint primary key, k int not null, c text not null, pad text not null)"

    def load(self, cluster, session, transactions=None):
        session.ask(f"""insert into bulk select i, (i::bigint * 7919) % 1000003, rpad(md5(i::text), 96, md5(i::text)), repeat('p', 60)
                        from generate_series(1, {self.rows}) i""")


class Wide(Workload):
    """Rows of 100 kB that don't compress, one a transaction: they go out of line, in some fifty pieces each."""

    def tables(self):
        return "create table wide (id int primary key, k int not null, name text not null, body bytea not null)"

    def fill(self, cluster, session):
        # A megabyte of noise, of which each row is a window.
        session.ask("""create table bench_noise as
            select string_agg(decode(md5(i::text || 'noise'), 'hex'), '') as noise from generate_series(1, 65536) i;
            create procedure bench_wide(n int) language plpgsql as $$
            declare
                all_noise bytea := (select noise from bench_noise);
            begin
                for i in 1 .. n loop
                    insert into wide values (i, i % 97, 'document ' || i, substr(all_noise, 1 + (i * 7919) % 900000, 102400));
                    commit;
                end loop;
            end $$""")

    def load(self, cluster, session, transactions=None):
        session.ask(f"call bench_wide({transactions or self.transactions})")


class Tables(Workload):
    """A row for each of many tables, one a transaction, and then another one for each: the first change of a table costs what either
    way of replication has to look up, the second one what it has kept.
    """

    schemas = 1
    ROUNDS = 2

    def tables(self):
        # A commit now and then keeps the number of locks down.
        return f"""create procedure bench_make(schemas int, count int) language plpgsql as $$
            begin
                for s in 1 .. schemas loop
                    execute format('create schema tenant_%s', s);
                    for t in 1 .. count loop
                        execute format('create table tenant_%s.t%s (id bigint primary key, name text not null default %L,'
                                       ' amount numeric(12, 2) check (amount >= 0), at timestamptz default now())', s, t, 'none');
                        execute format('create index on tenant_%s.t%s (name)', s, t);
                        if t % 200 = 0 then commit; end if;
                    end loop;
                    commit;
                end loop;
            end $$;
            call bench_make({self.schemas}, {self.count()});
            create procedure bench_rows(schemas int, count int, rounds int) language plpgsql as $$
            begin
                for r in 1 .. rounds loop
                    for t in 1 .. count loop
                        for s in 1 .. schemas loop
                            execute format('insert into tenant_%s.t%s values ($1, ''a name'', 12.50)', s, t) using r;
                            commit;
                        end loop;
                    end loop;
                end loop;
            end $$"""

    def count(self):
        """Tables in each schema."""
        return self.transactions // self.ROUNDS // self.schemas

    def dumped(self, tables):
        # All of them: a pattern for each of ten thousand tables would take pg_dump minutes.
        return []

    def published(self, session):
        names = session.ask("select n.nspname || '.' || c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
                            " where n.nspname like 'tenant\\_%' and c.relkind = 'r' order by 1")
        return names.split()

    def load(self, cluster, session, transactions=None):
        session.ask(f"call bench_rows({self.schemas}, {self.count()}, {self.ROUNDS})")


def workload(name, plan, at_most=None):
    """By its name in the plan, at the plan's scale, or with a backlog of at most so many transactions. Those of pgbench come in
    whole numbers for each client.
    """
    def scaled(full, at_least=1):
        return min(plan.scaled(full, at_least), at_most or full)

    def even(full):
        return -(-scaled(full) // CLIENTS) * CLIENTS

    if name == "single":
        n = even(200_000)
        return Single(name, "single-row inserts", n, n, inserted=("single",))
    if name == "sysbench":
        n = even(100_000)
        made = Sysbench(name, "sysbench oltp_write_only", n, 4 * n)
        made.size = plan.scaled(1_000_000, 1000)
        return made
    if name == "tpcb":
        n = even(100_000)
        made = TpcB(name, "pgbench TPC-B", n, 4 * n)
        made.branches = plan.scaled(10)
        return made
    if name.startswith("zipf"):
        n = scaled(100_000)
        made = Zipf(name, f"single-row updates, Zipf {name[4:]}", n, n)
        made.theta = int(name[4:])
        made.size = plan.scaled(100_000, 100)
        return made
    if name == "bulk":
        return Bulk(name, "one transaction, 200-byte rows", 1, plan.scaled(2_000_000), inserted=("bulk",))
    if name == "wide":
        n = scaled(5_000)
        return Wide(name, "rows of 100 kB", n, n, inserted=("wide",))
    if name in plans.TABLES:
        schemas, tables = {"tables100": (1, 100), "tables1000": (1, 1_000), "tables10000": (1, 10_000), "tenants": (200, 20)}[name]
        # Whole schemas: at a smaller scale each has fewer tables.
        n = schemas * scaled(tables) * Tables.ROUNDS
        made = Tables(name, f"{schemas * tables:,} tables{f' in {schemas} schemas' if schemas > 1 else ''}, a row twice into each", n, n)
        made.schemas = schemas
        return made
    if name == "dtle":
        # Serial replay at 20 ms is fifty commits a second at best.
        made = Sysbench(name, "sysbench oltp_write_only, each commit waiting for a standby", even(2_000), 4 * even(2_000))
        made.size = plan.scaled(100_000, 1000)
        return made
    raise KeyError(name)
