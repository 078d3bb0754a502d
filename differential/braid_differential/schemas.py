"""Random schemas: tables, what hangs on them at the provider and at the subscribers, and the publications."""

from dataclasses import dataclass, field

from .case import EVERYWHERE, PROVIDER, PUBLISH, SCHEMA, SUBSCRIBERS
from .values import LARGE, MADE, SCALARS, array_of, literal


@dataclass
class Table:
    """A table as the generator of statements sees it."""

    name: str
    unit: str
    columns: dict = field(default_factory=dict)
    # Whether rows can be updated and deleted: the table has a replica identity.
    identified: bool = True
    has_id: bool = True
    # Rows are found by all their columns: REPLICA IDENTITY FULL without a key.
    whole: bool = False
    partitioned: bool = False
    # Partition bounds allow these values of p.
    parts: tuple = ()
    leaves: list = field(default_factory=list)
    # The tables that inherit from this one, on all levels, and whether this one inherits itself.
    heirs: list = field(default_factory=list)
    inherits: bool = False
    # Columns that statements leave out: generated ones, identities.
    silent: set = field(default_factory=set)
    # The subscribers have a column of their own.
    more: bool = False
    # A publication has a row filter for it: another id may take a row into it, or out of it.
    filtered: bool = False
    # The row filters by which its own changes are published.
    filters: list = field(default_factory=list)


# Row filters, each with ids that it lets pass and ids that it does not. No other statement makes
# these ids.
FILTERS = {
    "id % 3 <> 0": ((91, 92, 94), (93, 96, 99)),
    "id > 4": ((95, 97, 98), (-1, -2, -3)),
    "id is not null and id < 20": ((-4, -5, -6), (90, 95, 98)),
}


class Schema:
    """Builds the schema of one case, step by step."""

    def __init__(self, rng, case, major):
        self.rng, self.case, self.major = rng, case, major
        self.tables = []
        # Names of all tables, parents and partitions among them, which publications may name.
        self.names = []
        self.types = self._types()

    def build(self):
        """Adds the steps of phases SCHEMA and PUBLISH; returns the tables."""
        self._audit()
        rng = self.rng
        makers = [self._plain, self._plain, self._plain, self._plain, self._inheritance, self._partitioned, self._partitioned,
                  *rng.choice([[self._empty], []])]
        for number in range(self.rng.randint(2, 5)):
            self.rng.choice(makers)(f"s.t{number}")
        # Besides those above, which are then as frequent as without it.
        if rng.random() < 0.5:
            self._inheritance("s.family")
        for table in list(self.tables):
            self._at_subscribers(table)
        self._foreign_keys()
        self._publications()
        return self.tables

    def _types(self):
        rng = self.rng
        for number, (sql, _type) in enumerate(MADE):
            self.case.add(f"type{number}", EVERYWHERE, SCHEMA, sql, defines=[_type.name])
        return SCALARS + [array_of(of) for of in SCALARS if rng.random() < 0.3] + [made for _sql, made in MADE] * 3 + [
            array_of(made) for _sql, made in MADE]

    def _audit(self):
        self.case.add("audit", SUBSCRIBERS, SCHEMA, "create table s.audit (what text); grant all on s.audit to app", defines=["audit"])

    def _needs(self, of):
        name = of.name.removesuffix("[]")
        return [name] if name.startswith("s.") else []

    def _column(self, table, number, places=(EVERYWHERE,), clause="", of=None):
        """One more column, of a random type unless one is given."""
        rng = self.rng
        of = of or rng.choice(self.types)
        name = f"c{number}"
        if not clause:
            if rng.random() < 0.2:
                clause = f" default {rng.choice(of.values)}::{of.name}"
                if rng.random() < 0.4:
                    clause += " not null"
            if of.name.startswith(("text", "varchar")) and rng.random() < 0.3:
                clause += " collate \"C\""
        unit = f"{table.name}.{name}"
        for place in places:
            self.case.add(unit, place, SCHEMA, f"alter table {table.name} add column {name} {of.name}{_no_query(clause)}",
                          needs=[table.name, *self._needs(of)], defines=[unit])
        table.columns[name] = of
        return name

    def _columns(self, table, numbers):
        """Columns in an order of the provider's own and one of the subscribers' own, sometimes with a hole."""
        rng = self.rng
        if rng.random() < 0.5:
            for number in numbers:
                self._column(table, number)
            return
        state = rng.getstate()
        orders = {}
        for place in (PROVIDER, SUBSCRIBERS):
            order = list(numbers)
            rng.shuffle(order)
            orders[place] = order
        del state
        # The types are drawn once; the steps are then put into each place's order.
        first = len(self.case.steps)
        for number in numbers:
            self._column(table, number, places=(PROVIDER, SUBSCRIBERS))
        made = self.case.steps[first:]
        del self.case.steps[first:]
        for place, order in orders.items():
            for number in order:
                self.case.steps += [step for step in made if step.place == place and step.unit == f"{table.name}.c{number}"]
        if rng.random() < 0.5:
            place = rng.choice([PROVIDER, SUBSCRIBERS, EVERYWHERE])
            self.case.add(f"{table.name}.hole", place, SCHEMA,
                          f"alter table {table.name} add column hole int default 1; alter table {table.name} drop column hole", needs=[table.name])

    def _create(self, table, clause):
        self.case.add(table.unit, EVERYWHERE, SCHEMA, f"create table {table.name} {clause}", defines=[table.name, f"{table.name}.id", f"{table.name}.p"])
        self.tables.append(table)
        self.names.append(table.name)

    def _identity(self, table):
        """A replica identity of any kind for a table with a column id and others."""
        rng, case, name = self.rng, self.case, table.name
        kind = rng.choice(["primary", "primary", "primary", "wide", "wide", "wide", "full", "full", "full", "full with key", "index", "none"])
        keys = [column for column, of in table.columns.items() if of.key and column not in table.silent]
        if kind == "wide" and rng.random() < 0.7:
            # A type that few columns have by chance.
            keys = [self._column(table, 21, of=rng.choice([of for of in self.types if of.key]))]
        unit = f"{name}.identity"
        # Native stops where a type has no equality: not too often, as nothing is compared after
        # that.
        if kind == "full" and not all(of.equality for of in table.columns.values()) and rng.random() < 0.7:
            kind = "primary"
        # Whole rows are found by equality, where their bytes differ.
        if kind == "full" and rng.random() < 0.7:
            by = rng.choice([lambda of: of.forms, lambda of: of.forms, lambda of: not of.equality])
            self._column(table, 20, of=rng.choice([of for of in self.types if by(of)]))
        if kind == "wide" and not keys:
            kind = "primary"
        if kind in ("primary", "full with key"):
            case.add(unit, EVERYWHERE, SCHEMA, f"alter table {name} add primary key (id)", needs=[name])
        if kind == "wide":
            key = rng.choice(keys)
            case.add(unit, EVERYWHERE, SCHEMA, f"alter table {name} add primary key (id, {key})", needs=[name, f"{name}.{key}"])
        if kind in ("full", "full with key"):
            case.add(f"{name}.full", EVERYWHERE, SCHEMA, f"alter table {name} replica identity full", needs=[name])
        if kind == "index":
            index = f"{name.removeprefix('s.')}_key"
            case.add(unit, EVERYWHERE, SCHEMA, f"alter table {name} alter id set not null; create unique index {index} on {name} (id); "
                     f"alter table {name} replica identity using index {index}", needs=[name])
        table.identified = kind != "none"
        table.whole = kind == "full"

    def _plain(self, name):
        rng = self.rng
        table = Table(name, name)
        self._create(table, "(id int)")
        self._columns(table, range(rng.randint(1, 7)))
        self._large(table)
        self._special_columns(table)
        self._identity(table)
        self._indexes(table)

    def _large(self, table):
        """A column whose values are mostly out of line, and not sent where an update leaves them."""
        if self.rng.random() < 0.5:
            unit = f"{table.name}.big"
            self.case.add(unit, EVERYWHERE, SCHEMA, f"alter table {table.name} add column big text; alter table {table.name} alter big set storage external",
                          needs=[table.name], defines=[unit])
            table.columns["big"] = LARGE

    def _special_columns(self, table):
        """Generated columns, identities and serial defaults."""
        rng, name = self.rng, table.name
        if rng.random() < 0.25:
            where = rng.choice([EVERYWHERE, SUBSCRIBERS])
            stored = "" if self.major >= 18 and rng.random() < 0.5 else " stored"
            expression = rng.choice(["id * 2", "abs(id) % 5", "case when id > 3 then null else id end"])
            self.case.add(f"{name}.g", where, SCHEMA, f"alter table {name} add column g int generated always as ({expression}){stored}", needs=[name])
        if rng.random() < 0.2:
            always = rng.choice(["always", "by default"])
            self.case.add(f"{name}.i", EVERYWHERE, SCHEMA, f"alter table {name} add column i int generated {always} as identity", needs=[name])
        if rng.random() < 0.15:
            self.case.add(f"{name}.check", EVERYWHERE, SCHEMA, f"alter table {name} add check (id < 1000)", needs=[name])

    def _indexes(self, table):
        rng, name = self.rng, table.name
        keys = [column for column, of in table.columns.items() if of.key]
        if keys and rng.random() < 0.3:
            column = rng.choice(keys)
            self.case.add(f"{name}.partial", EVERYWHERE, SCHEMA, f"create unique index on {name} (id, {column}) where id > 5",
                          needs=[name, f"{name}.{column}"])
        if rng.random() < 0.3:
            expression = rng.choice(["(id + 0)", "(id::text)", "(-id)"])
            unique = "unique " if table.identified and rng.random() < 0.5 else ""
            self.case.add(f"{name}.expression", EVERYWHERE, SCHEMA, f"create {unique}index on {name} ({expression})", needs=[name])

    def _empty(self, name):
        """A table without columns."""
        table = Table(name, name, identified=False, has_id=False)
        self._create(table, "()")

    def _inheritance(self, name):
        """A parent with children and perhaps a grandchild, each with a key of its own."""
        rng = self.rng
        parent = Table(name, name)
        self._create(parent, "(id int primary key)")
        self._columns(parent, range(rng.randint(1, 2)))
        family = [parent]
        above = {name: []}
        for number in range(rng.randint(1, 3)):
            of = rng.choice(family)
            child = Table(f"{name}c{number}", f"{name}c{number}", dict(of.columns), inherits=True)
            above[child.name] = [of, *above[of.name]]
            for ancestor in above[child.name]:
                ancestor.heirs.append(child)
            self.case.add(child.unit, EVERYWHERE, SCHEMA, f"create table {child.name} (primary key (id)) inherits ({of.name})",
                          needs=[of.name], defines=[child.name, f"{child.name}.id", *(f"{child.name}.{column}" for column in of.columns)])
            self.tables.append(child)
            self.names.append(child.name)
            self._column(child, 10 + number)
            family.append(child)

    def _partitioned(self, name):
        """A partitioned table, perhaps of two levels, with partitions that were attached with columns in another order."""
        rng = self.rng
        method = rng.choice(["list", "range", "hash"])
        table = Table(name, name, partitioned=True, parts=(0, 1, 2, 3))
        table.columns["p"] = next(of for of in SCALARS if of.name == "int4")
        self._create(table, f"(id int, p int not null) partition by {method} (p)")
        self._columns(table, range(rng.randint(1, 4)))
        table.whole = rng.random() < 0.3
        if not table.whole and rng.random() < 0.12:
            # Before 17 a partition does not have its root's identity: a row that comes by the
            # partition's name has no value.
            table.more = True
            always = rng.choice(["always", "by default"])
            # From 19 on native copies a partitioned table in the order of its partitions' OIDs, so
            # rows get other numbers.
            column = f"generated {always} as identity" if self.major < 19 else "generated always as (id * 5) stored"
            self.case.add(f"{name}.more", SUBSCRIBERS, SCHEMA, f"alter table {name} add column more int {column}", needs=[name])
        bounds = {
            "list": ["in (0, 1)", "in (2)", "in (3)"],
            "range": ["from (minvalue) to (1)", "from (1) to (3)", "from (3) to (maxvalue)"],
            "hash": [f"with (modulus 3, remainder {n})" for n in range(3)],
        }[method]
        for number, bound in enumerate(bounds):
            self._partition(table, number, bound)
        if not table.whole:
            self.case.add(f"{name}.identity", EVERYWHERE, SCHEMA, f"alter table {name} add primary key (id, p)", needs=[name])
        else:
            for full in [name, *table.leaves]:
                self.case.add(f"{name}.identity", EVERYWHERE, SCHEMA, f"alter table {full} replica identity full", needs=[full])

    def _partition(self, table, number, bound):
        rng, case = self.rng, self.case
        leaf = f"{table.name}p{number}"
        clause = f"for values {bound}"
        kind = rng.choice(["create", "attach", "deep"])
        if kind == "create":
            case.add(leaf, EVERYWHERE, SCHEMA, f"create table {leaf} partition of {table.name} {clause}", needs=[table.name], defines=[leaf])
        elif kind == "attach":
            # Other columns first, and one that is gone.
            case.add(leaf, EVERYWHERE, SCHEMA,
                     f"create table {leaf} (gone int, like {table.name}); alter table {leaf} drop column gone; "
                     f"alter table {leaf} drop column id, add column id int; alter table {table.name} attach partition {leaf} {clause}",
                     needs=[table.name], defines=[leaf])
        else:
            case.add(leaf, EVERYWHERE, SCHEMA, f"create table {leaf} partition of {table.name} {clause} partition by range (id); "
                     f"create table {leaf}d partition of {leaf} default", needs=[table.name], defines=[leaf, f"{leaf}d"])
            self.names.append(f"{leaf}d")
            table.leaves.append(f"{leaf}d")
        self.names.append(leaf)
        table.leaves.append(leaf)

    def _at_subscribers(self, table):
        """What only the subscribers have: more columns, defaults of partitions, checks, triggers."""
        rng, case, name = self.rng, self.case, table.name
        # Native compares the columns that only the subscriber has, too, and finds no row by all its
        # columns then. It copies no table without columns into one with columns, either.
        if table.leaves and not table.whole and not table.more and rng.random() < 0.15:
            table.more = True
            case.add(f"{name}.more", SUBSCRIBERS, SCHEMA, f"alter table {name} add column more int generated always as (id * 3) stored", needs=[name])
        if rng.random() < (0.6 if table.leaves else 0.3) and "c10" not in table.columns and not table.whole and not table.more and table.has_id:
            table.more = True
            of = rng.choice(self.types)
            value = _no_query(rng.choice(of.values))
            null = rng.choice([" not null", ""])
            case.add(f"{name}.more", SUBSCRIBERS, SCHEMA, f"alter table {name} add column more {of.name} default {value}::{of.name}{null}",
                     needs=[name, *self._needs(of)])
            if table.leaves and rng.random() < 0.7:
                leaf = rng.choice(table.leaves)
                other = rng.choice(["drop default", f"set default {_no_query(rng.choice(of.values))}::{of.name}"])
                case.add(f"{name}.more.leaf", SUBSCRIBERS, SCHEMA, f"alter table {leaf} alter more {other}", needs=[leaf, *self._needs(of)])
        if rng.random() < 0.03:
            case.add(f"{name}.limit", SUBSCRIBERS, SCHEMA, f"alter table {name} add constraint few check (id < 28)", needs=[name])
        if rng.random() < 0.2:
            case.add(f"{name}.owner", SUBSCRIBERS, SCHEMA, f"alter table {name} owner to app", needs=[name])
        for number in range(rng.choice([0, 0, 1, 1, 2])):
            self._trigger(table, number)

    def _trigger(self, table, number):
        rng, case, name = self.rng, self.case, table.name
        target = rng.choice([name, name, *table.leaves])
        trigger = f"{name.removeprefix('s.')}_{number}"
        function = f"s.f_{trigger}"
        unit = f"{name}.trigger{number}"
        # As another role than its own, a session may neither set roles nor defer triggers.
        restricted = case.braid_options["run_as_owner"] == "false"
        attributes = " ".join(rng.sample(["security definer", "set search_path = s, pg_temp", "set work_mem = '1MB'", "strict", "cost 7", "parallel safe",
                                          "set client_min_messages = error", *([] if restricted else ["set role to app"])], rng.choice([0, 1, 1, 2])))
        if "security definer" in attributes:
            attributes = attributes.replace("set role to app", "")
        level = rng.choice(["row", "row", "row", "statement"])
        timing = rng.choice(["before", "after"])
        events = rng.sample(["insert", "update", "delete"], rng.choice([1, 1, 2, 3]))
        if level == "statement" and rng.random() < 0.6:
            events = ["truncate"]
        transition, constraint, deferred, when = "", "", "", ""
        if timing == "after" and level == "row" and rng.random() < 0.3:
            constraint = "constraint "
            deferred = "" if restricted else rng.choice([" deferrable initially deferred", ""])
        if level == "statement" and timing == "after" and len(events) == 1 and events != ["truncate"] and not table.leaves:
            transition = {"insert": " referencing new table as n", "update": " referencing old table as o new table as n",
                          "delete": " referencing old table as o"}[events[0]]
        if events == ["update"] and level == "row" and table.columns and not constraint and rng.random() < 0.4:
            column = rng.choice(list(table.columns))
            events = [f"update of {column}"]
        if level == "row" and events == ["insert"] and table.has_id and rng.random() < 0.4:
            when = " when (new.id % 2 = 0)"
        body = ("insert into s.audit values (concat_ws(' ', tg_name, tg_when, tg_level, tg_op, tg_table_name, tg_nargs, tg_argv[0], current_user, "
                "current_setting('session_replication_role'), current_setting('work_mem'), pg_trigger_depth(), 'old', to_jsonb(old), 'new', to_jsonb(new)));")
        if level == "statement":
            body = ("insert into s.audit values (concat_ws(' ', tg_name, tg_when, tg_level, tg_op, tg_table_name, current_user, "
                    "current_setting('session_replication_role')));")
        if transition:
            body += f" insert into s.audit select 'rows ' || count(*) from {'n' if 'new table' in transition else 'o'};"
        change = ""
        if timing == "before" and level == "row" and table.has_id and rng.random() < 0.3:
            change = rng.choice(["if tg_op = 'INSERT' and new.id % 7 = 3 then return null; end if;", "perform new.id + 1;"]) if events == ["insert"] else "perform count(*) from s.audit;"
        result = "return null;" if level == "statement" else "if tg_op = 'DELETE' then return old; end if; return new;"
        enable = rng.choice(["always", "always", "replica", "replica", "origin"])
        enabling = f"alter table {target} enable {enable} trigger {trigger}" if enable != "origin" else f"alter table {target} enable trigger {trigger}"
        of_columns = [f"{name}.{events[0].split()[-1]}"] if events[0].startswith("update of") else []
        case.add(unit, SUBSCRIBERS, SCHEMA,
                 f"create function {function}() returns trigger language plpgsql {attributes} as $$ begin {change} {body} {result} end $$; "
                 f"create {constraint}trigger {trigger} {timing} {' or '.join(events)} on {target}{deferred}{transition} "
                 f"for each {level}{when} execute function {function}('x'); {enabling}; "
                 + ("" if "set role" in attributes else f"alter function {function} owner to {rng.choice(['app', 'current_user'])}"),
                 needs=[name, target, "audit", *of_columns])

    def _foreign_keys(self):
        rng = self.rng
        referenced = [table for table in self.tables if table.has_id and not table.partitioned]
        for table in self.tables:
            if table.has_id and referenced and rng.random() < 0.25:
                to = rng.choice(referenced)
                action = rng.choice(["", " on delete cascade", " on delete set null", " on update cascade", " deferrable initially deferred"])
                # Without a primary key there this fails everywhere alike.
                self.case.add(f"{table.name}.reference", EVERYWHERE, SCHEMA,
                              f"alter table {table.name} add column r int references {to.name} (id){action}",
                              needs=[table.name, to.name], defines=[f"{table.name}.r"])

    def _publications(self):
        rng, case = self.rng, self.case
        options = []
        if rng.random() < 0.4:
            options.append("publish_via_partition_root = true")
        if rng.random() < 0.15:
            # Where inserts are not published, Braid inserts the rows of updates (update_missing),
            # and native leaves them out.
            options.append("publish = '" + ", ".join(["insert", *rng.sample(["update", "delete", "truncate"], rng.randint(0, 3))]) + "'")
        clause = f" with ({', '.join(options)})" if options else ""
        form = rng.choice(["all", "all", "schema", "tables", "tables", "two"])
        if form in ("all", "schema"):
            case.add("publication", PROVIDER, PUBLISH, f"create publication p for {'all tables' if form == 'all' else 'tables in schema s'}{clause}")
            case.publications = ["p"]
            return
        # A table is added by a step of its own, so that taking a table away leaves the publication.
        case.publications = ["p"] if form == "tables" else ["p", "q"]
        for name in case.publications:
            case.add(f"publication {name}", PROVIDER, PUBLISH, f"create publication {name}{clause}")
        by_name = {table.name: table for table in self.tables}
        for name in self.names:
            if rng.random() < 0.15:
                continue
            in_these = [rng.choice(case.publications)] if rng.random() < 0.8 else case.publications
            table = by_name.get(name)
            columns = self._column_list(table) if table and len(in_these) == 1 else ""
            for publication in in_these:
                where = ""
                if table and table.has_id and rng.random() < 0.5:
                    row_filter = rng.choice(list(FILTERS))
                    for of in (table, *table.heirs):
                        of.filtered = True
                    # By default a partition's changes are not those of its root.
                    if "publish =" not in clause and (not table.partitioned or "via_partition_root" in clause):
                        table.filters.append(row_filter)
                    where = f" where ({row_filter})"
                only = rng.choice(["", "", "only "])
                case.add(f"publish {name}", PROVIDER, PUBLISH, f"alter publication {publication} add table {only}{name}{columns}{where}", needs=[name])

    def _column_list(self, table):
        rng = self.rng
        if not table.has_id or table.partitioned or rng.random() > 0.2:
            return ""
        chosen = ["id", *(name for name in table.columns if rng.random() < 0.6)]
        return f" ({', '.join(chosen)})"


def _no_query(value):
    """A default holds no subquery."""
    return value.replace("(select string_agg(md5(i::text), '') from generate_series(1, 200) i)", "repeat('long', 900)")


def rows_of(rng, table, how_many):
    """Random rows of a table, as mappings of columns to expressions."""
    rows = []
    for _ in range(how_many):
        row = {"id": str(rng.randint(1, 30))} if table.has_id else {}
        for name, of in table.columns.items():
            row[name] = str(rng.choice(table.parts)) if name == "p" and table.parts else literal(rng, of)
        rows.append(row)
    return tuple(rows)
