"""A case: steps that a seed gives, and what is left of them when units are taken away."""

from dataclasses import dataclass, field, replace

# Where a step runs.
PROVIDER, SUBSCRIBERS, EVERYWHERE = "provider", "subscribers", "everywhere"
# When it runs: before the publications, after the schema, with publications made, with
# subscriptions streaming.
SCHEMA, FILL, PUBLISH, STREAM = range(4)


@dataclass(frozen=True)
class Sql:
    """A statement as text; COPY has its data besides."""

    text: str
    copy: str | None = None

    def render(self, _live):
        """The statement, whatever columns there are."""
        return self.text


@dataclass(frozen=True)
class Insert:
    """Rows for a table, each a mapping of columns to expressions; columns that are no longer there are left out."""

    table: str
    rows: tuple
    suffix: str = ""

    def render(self, live):
        """The statement for the columns that are left."""
        columns = [name for name in self.rows[0] if f"{self.table}.{name}" in live]
        if not columns:
            return f"insert into {self.table} default values{self.suffix}"
        rows = ", ".join("(" + ", ".join(row[name] for name in columns) + ")" for row in self.rows)
        return f"insert into {self.table} ({', '.join(columns)}) values {rows}{self.suffix}"


@dataclass(frozen=True)
class Update:
    """Sets columns of rows that a condition names; None when no column is left."""

    table: str
    columns: dict
    where: str

    def render(self, live):
        """The statement for the columns that are left."""
        settings = [f"{name} = {value}" for name, value in self.columns.items() if f"{self.table}.{name}" in live]
        return f"update {self.table} set {', '.join(settings)} where {self.where}" if settings else None


@dataclass(frozen=True)
class Step:
    """One statement. Steps of one unit are taken away together; a step without what it needs goes too."""

    unit: str
    place: str
    phase: int
    statement: object
    needs: frozenset = frozenset()
    defines: frozenset = frozenset()


@dataclass
class Case:
    """What a seed gives: the steps, the publications' names and the options of both subscriptions."""

    seed: int
    steps: list = field(default_factory=list)
    publications: list = field(default_factory=list)
    braid_options: dict = field(default_factory=dict)
    native_options: dict = field(default_factory=dict)

    def add(self, unit, place, phase, statement, needs=(), defines=()):
        """Appends a step."""
        if isinstance(statement, str):
            statement = Sql(statement)
        self.steps.append(Step(unit, place, phase, statement, frozenset(needs), frozenset(defines)))

    def units(self):
        """The units in the order in which they first appear."""
        return list(dict.fromkeys(step.unit for step in self.steps))

    def without(self, units):
        """The case with these units taken away, and with whatever needed them."""
        gone = set(units)
        steps = [step for step in self.steps if step.unit not in gone]
        while True:
            live = _defined(steps)
            kept = [step for step in steps if step.needs <= live]
            if len(kept) == len(steps):
                return replace(self, steps=kept)
            steps = kept

    def rendered(self):
        """(place, phase, SQL, data for COPY) of each step, in order."""
        live = _defined(self.steps)
        for step in sorted(self.steps, key=lambda step: step.phase):
            text = step.statement.render(live)
            if text is not None:
                yield step.place, step.phase, text, getattr(step.statement, "copy", None)

    def script(self):
        """The case for a reader: each statement with where it runs."""
        lines = []
        phase_names = ["schema", "rows before", "publications", "stream"]
        last = None
        for place, phase, text, copy in self.rendered():
            if phase != last:
                lines.append(f"--- {phase_names[phase]}")
                last = phase
            lines.append(f"{place + ':':<13}{text};" + (f"\n{copy}\\." if copy is not None else ""))
        lines.append(f"--- native: {self.native_options}, braid: {self.braid_options}")
        return "\n".join(lines)


def _defined(steps):
    live = set()
    for step in steps:
        live |= step.defines
    return live
