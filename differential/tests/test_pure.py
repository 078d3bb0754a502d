"""What needs no server: seeds, taking units away, shrinking, comparing."""

import unittest
from collections import Counter

from braid_differential.case import EVERYWHERE, PROVIDER, SCHEMA, STREAM, Case, Insert, Update
from braid_differential.compare import difference
from braid_differential.generate import generate
from braid_differential.runner import CRASHED, GOES_ON, STOPPED, Outcome
from braid_differential.shrink import shrink


def small_case():
    case = Case(1)
    case.add("t", EVERYWHERE, SCHEMA, "create table t (id int)", defines=["t", "t.id"])
    case.add("t.a", EVERYWHERE, SCHEMA, "alter table t add column a int", needs=["t"], defines=["t.a"])
    case.add("insert", PROVIDER, STREAM, Insert("t", ({"id": "1", "a": "2"},)), needs=["t"])
    case.add("update", PROVIDER, STREAM, Update("t", {"a": "3"}, "true"), needs=["t"])
    return case


def statements(case):
    return [sql for _place, _phase, sql, _copy in case.rendered()]


class Seeds(unittest.TestCase):
    def test_a_seed_gives_one_case(self):
        for seed in range(50):
            self.assertEqual(generate(seed, 18).script(), generate(seed, 18).script())

    def test_seeds_give_other_cases(self):
        self.assertEqual(len({generate(seed, 15).script() for seed in range(50)}), 50)

    def test_all_that_a_step_needs_comes_before_it(self):
        for seed in range(200):
            live = set()
            for step in sorted(generate(seed, 18).steps, key=lambda step: step.phase):
                self.assertLessEqual(step.needs, live, (seed, step))
                live |= step.defines

    def test_every_kind_of_thing_comes_up(self):
        text = "\n".join(generate(seed, 18).script() for seed in range(300))
        for word in ["security definer", "set search_path", "inherits", "partition by hash", "attach partition", "replica identity full", "using index",
                     "generated always as", "as identity", "initially deferred", "referencing new table", "enable always", "enable replica", "truncate",
                     "savepoint", "rollback", "copy s.", "vacuum full", "tables in schema", "for all tables", "publish_via_partition_root", "where (id",
                     "create table s.t0 ()", "tsquery", "point", "json", "on conflict", "only s.", "(id, c"]:
            self.assertTrue(word in text, word)


class TakingAway(unittest.TestCase):
    def test_a_column_leaves_the_statements(self):
        self.assertEqual(statements(small_case().without(["t.a"])), ["create table t (id int)", "alter table t add column a int"][:1]
                         + ["insert into t (id) values (1)"])

    def test_a_table_takes_along_what_needs_it(self):
        self.assertEqual(statements(small_case().without(["t"])), [])

    def test_shrinking_finds_the_one_statement(self):
        case = generate(7, 18)
        wanted = next(step.unit for step in case.steps if step.unit.startswith("statement"))
        small = shrink(case, lambda smaller: wanted in smaller.units(), seconds=20)
        needed = {step.unit for step in small.steps}
        self.assertIn(wanted, needed)
        self.assertLess(len(needed), 4)


class Comparing(unittest.TestCase):
    def test_equal_outcomes(self):
        rows = {"s.t": Counter(["(1)"])}
        self.assertIsNone(difference({"native": Outcome(rows=rows), "braid": Outcome(rows=dict(rows))}))

    def test_a_row_more(self):
        found = difference({"native": Outcome(rows={"s.t": Counter(["(1)"])}), "braid": Outcome(rows={"s.t": Counter(["(1)", "(2)"])})})
        self.assertEqual(found[0], "goes on: rows differ")
        self.assertIn("only braid:  (2)", found[1])

    def test_one_stops(self):
        self.assertIsNotNone(difference({"native": Outcome(), "braid": Outcome(STOPPED, "no")}))
        self.assertIsNotNone(difference({"native": Outcome(STOPPED, "no"), "braid": Outcome()}))

    def test_a_crash_is_never_explained(self):
        native = Outcome(STOPPED, "could not identify an equality operator for type json")
        self.assertIsNone(difference({"native": native, "braid": Outcome(GOES_ON)}))
        self.assertEqual(difference({"native": native, "braid": Outcome(CRASHED)})[0], "crash")

    def test_both_stop_while_copying(self):
        self.assertIsNone(difference({"native": Outcome(STOPPED, rows={"s.t": Counter(["(1)"])}), "braid": Outcome(STOPPED, rows={"s.t": Counter()})}))


if __name__ == "__main__":
    unittest.main()
