"""Random statements: rows that are there before, and the transactions that are replicated."""

from .case import EVERYWHERE, FILL, PROVIDER, STREAM, SUBSCRIBERS, Insert, Sql, Update
from .schemas import FILTERS, rows_of
from .values import literal


class Statements:
    """Adds the steps of phases FILL and STREAM for the tables of a schema."""

    def __init__(self, rng, case, tables):
        self.rng, self.case, self.tables = rng, case, tables
        self.count = 0

    def build(self):
        """Rows before the copy, then transactions."""
        rng = self.rng
        for table in self.tables:
            if rng.random() < 0.6:
                for _ in range(rng.randint(1, 4)):
                    self._add(FILL, self._insert(table), [table.name])
        for _ in range(rng.randint(8, 20)):
            self._transaction()
        # Nothing comes after these that could delete what is left of them.
        for table in self._crossed():
            if rng.random() < 0.7:
                self._cross(table)

    def _add(self, phase, statement, needs=(), place=PROVIDER, unit=None):
        if unit is None:
            self.count += 1
            unit = f"statement{self.count}"
        self.case.add(unit, place, phase, statement, needs=needs)

    def _transaction(self):
        rng = self.rng
        if rng.random() < 0.12:
            self._rewrite()
            return
        whole = [table for table in self.tables if table.whole and table.identified]
        if whole and rng.random() < 0.25:
            self._drift(rng.choice(whole))
            return
        families = [table for table in self.tables if table.heirs] * 2 + [table for table in self.tables if table.leaves]
        if families and rng.random() < 0.25:
            self._empty_family(rng.choice(families))
            return
        crossed = self._crossed()
        if crossed and rng.random() < 0.2:
            self._cross(rng.choice(crossed))
            return
        if rng.random() < 0.4:
            self._statement()
            return
        self._add(STREAM, "begin")
        for _ in range(rng.randint(1, 6)):
            kind = rng.random()
            if kind < 0.12:
                self._add(STREAM, "savepoint a")
            elif kind < 0.2:
                self._add(STREAM, "rollback to a")
            else:
                self._statement()
        self._add(STREAM, rng.choice(["commit"] * 5 + ["rollback"]))

    def _statement(self):
        rng = self.rng
        table = rng.choice(self.tables)
        if table.inherits:
            # A family has several tables, and the others get as many statements as without it.
            table = rng.choice(self.tables)
        kinds = [self._insert] * 5 + [self._copy, self._truncate, self._many]
        if table.identified:
            kinds += [self._update] * 5 + [self._delete] * 2 + [self._upsert, self._move, self._toast]
        statement = rng.choice(kinds)(table)
        if statement is not None:
            self._add(STREAM, statement, [table.name])

    def _insert(self, table):
        if not table.has_id:
            return Sql(f"insert into {table.name} default values")
        return Insert(table.name, rows_of(self.rng, table, self.rng.choice([1, 1, 1, 2, 5])))

    def _upsert(self, table):
        return Insert(table.name, rows_of(self.rng, table, 1), " on conflict do nothing")

    def _many(self, table):
        if not table.has_id:
            return Sql(f"insert into {table.name} select from generate_series(1, 3)")
        first = self.rng.randint(100, 900)
        columns = "id, p" if table.partitioned else "id"
        values = "i, i % 4" if table.partitioned else "i"
        return Sql(f"insert into {table.name} ({columns}) select {values} from generate_series({first}, {first + self.rng.choice([5, 50, 99])}) i")

    def _copy(self, table):
        if not table.has_id:
            return Sql(f"copy {table.name} from stdin", "\n\n")
        ids = self.rng.sample(range(40, 90), 3)
        columns = "id, p" if table.partitioned else "id"
        return Sql(f"copy {table.name} ({columns}) from stdin", "".join(f"{i}\t{i % 4}\n" if table.partitioned else f"{i}\n" for i in ids))

    def _where(self):
        rng = self.rng
        return rng.choice([f"id = {rng.randint(1, 30)}", f"id between {rng.randint(1, 15)} and {rng.randint(15, 30)}", f"id % 3 = {rng.randint(0, 2)}", "true"])

    def _update(self, table):
        rng = self.rng
        if not table.columns:
            return Sql(f"update {table.name} set id = id where {self._where()}")
        chosen = rng.sample(list(table.columns), rng.randint(1, min(3, len(table.columns))))
        columns = {name: str(rng.choice(table.parts)) if name == "p" and table.parts else literal(rng, table.columns[name]) for name in chosen}
        return Update(table.name, columns, self._where())

    def _move(self, table):
        """Another key."""
        if table.filtered and not table.whole:
            # Native loses the large values that an update leaves in a row that comes into a row
            # filter: all get new ones.
            row = rows_of(self.rng, table, 1)[0]
            return Update(table.name, {**row, "id": f"id + {self.rng.choice([1000, 31, 1, 2])}"}, f"id = {self.rng.randint(1, 30)}")
        return Sql(f"update {table.name} set id = id + {self.rng.choice([1000, 31])} where id = {self.rng.randint(1, 30)}")

    def _toast(self, table):
        """A change that leaves large values as they are."""
        return Sql(f"update {table.name} set id = id where {self._where()}")

    def _delete(self, table):
        rng = self.rng
        only = rng.choice(["", "", "only "])
        return Sql(f"delete from {only if not table.partitioned else ''}{table.name} where {self._where()}")

    def _truncate(self, table):
        rng = self.rng
        if rng.random() < 0.4:
            return None
        names = [table.name]
        if rng.random() < 0.3:
            names.append(rng.choice(self.tables).name)
        if table.leaves and rng.random() < 0.3:
            names = [rng.choice(table.leaves)]
        only = "only " if not table.partitioned and len(names) == 1 and rng.random() < 0.2 else ""
        clause = rng.choice(["", "", " cascade", " restart identity", " restart identity cascade"])
        return Sql(f"truncate {only}{', '.join(dict.fromkeys(names))}{clause}")

    def _empty_family(self, table):
        """All of a family get rows, and a part of it is emptied: by the name of its head, of some below it, or both in any order."""
        rng = self.rng
        below = table.leaves or [heir.name for heir in table.heirs]
        filled = [table.name] if table.partitioned else [table.name, *below]
        rng.shuffle(filled)
        together = rng.random() < 0.3
        if together:
            self._add(STREAM, "begin")
        for name in filled:
            first = rng.randint(100, 900)
            columns, values = ("id, p", "i, i % 4") if table.partitioned else ("id", "i")
            rows = f"insert into {name} ({columns}) select {values} from generate_series({first}, {first + rng.choice([4, 9])}) i on conflict do nothing"
            self._add(STREAM, rows, [table.name, name])
        if together and rng.random() < 0.5:
            self._add(STREAM, "commit")
            together = False
        chosen = rng.sample(below, rng.randint(1, len(below)))
        head = table.name
        # A partitioned table has no rows for ONLY.
        only = head if table.partitioned else f"only {head}"
        names = rng.choice([[head], [head], [head], [head, *chosen], [head, *chosen], [*chosen, head], [only], [*chosen, only], chosen])
        clause = rng.choice(["", " cascade", " cascade", " restart identity cascade"])
        self._add(STREAM, f"truncate {', '.join(names)}{clause}", [head, *chosen])
        if together:
            self._add(STREAM, "commit")

    def _crossed(self):
        return [table for table in self.tables if table.filters and table.identified]

    def _cross(self, table):
        """A row that is there leaves a row filter, or enters it; some change in between, come back or are deleted."""
        rng = self.rng
        inside, outside = FILTERS[rng.choice(table.filters)]
        first, then = (inside, outside) if rng.random() < 0.6 else (outside, inside)
        here, there = rng.choice(first), rng.choice(then)
        together = rng.random() < 0.3
        if together:
            self._add(STREAM, "begin")
        self._add(STREAM, Insert(table.name, ({**rows_of(rng, table, 1)[0], "id": str(here)},)), [table.name])
        moves = [(here, there)]
        if rng.random() < 0.4:
            moves.append((there, rng.choice(first)))
        for old, new in moves:
            if rng.random() < 0.3:
                self._add(STREAM, self._toast_of(table, old), [table.name])
            # Native loses the large values that an update leaves in a row that enters: all get
            # new ones. A row that leaves keeps them.
            row = rows_of(rng, table, 1)[0] if new in inside and not table.whole else {}
            self._add(STREAM, Update(table.name, {**row, "id": str(new)}, f"id = {old}"), [table.name])
        if together:
            self._add(STREAM, "commit")
        if rng.random() < 0.3:
            self._add(STREAM, Sql(f"delete from {table.name} where id = {moves[-1][1]}"), [table.name])

    @staticmethod
    def _toast_of(table, row):
        return Sql(f"update {table.name} set id = id where id = {row}")

    def _drift(self, table):
        """The subscribers' rows get other bytes, by which the provider's deletions do not find them: other values, or equal ones."""
        rng = self.rng
        hard = [name for name, of in table.columns.items() if of.forms or not of.equality]
        soft = [name for name in table.columns if name != "p"]
        names = hard or soft
        if not names:
            return
        name = rng.choice(names)
        where = rng.choice(["id % 2 = 0", "id % 2 = 1", "id > 10", "true"])
        self.count += 1
        unit = f"statement{self.count}"
        of = table.columns[name]
        rows = rows_of(rng, table, 3)
        for row in rows:
            row[name] = f"{rng.choice(of.values)}::{of.name}"
        self._add(STREAM, Insert(table.name, rows), [table.name], PROVIDER, unit)
        # The bytes of what was sent in binary form are not those of its text.
        value = f"{name}::text::{of.name}" if of.forms and rng.random() < 0.8 else literal(rng, of)
        changed = Update(table.name, {name: value}, where)
        self._add(STREAM, changed, [table.name], SUBSCRIBERS, unit)
        self._add(STREAM, Sql(f"delete from {table.name} where {where}"), [table.name], PROVIDER, unit)

    def _rewrite(self):
        """A table gets new files, at the provider, at the subscribers or everywhere."""
        rng = self.rng
        table = rng.choice(self.tables)
        place = rng.choice([PROVIDER, SUBSCRIBERS, EVERYWHERE])
        statement = rng.choice([
            f"vacuum full {table.name}",
            f"alter table {table.name} alter id type bigint",
            f"alter table {table.name} add column w{self.count} int default 5",
            f"cluster {table.name} using {table.name.removeprefix('s.')}_pkey",
            f"reindex table {table.name}",
            f"analyze {table.name}",
        ])
        # A column that the provider alone has stops both.
        if "add column" in statement or "bigint" in statement:
            place = rng.choice([SUBSCRIBERS, EVERYWHERE])
        # Native finds no row by all its columns where the subscriber has one more.
        if "add column" in statement and table.whole:
            place = EVERYWHERE
        self._add(STREAM, statement, [table.name], place)
