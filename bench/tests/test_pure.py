"""What the bench computes, without a server: `make bench-check`."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import xml.etree.ElementTree as xml

import decode
from braid_bench import beats, charts, goals, group, inserters, latency, limits, many, pair, plan, processes, profile, reconcile, reconcile_summary, report, summary, svg, wakeups


def drained(workload, variant, seconds, cpu=(1.0, 1.0), commit="off"):
    samples = [{"seconds": s, "first_row_s": 0.1, "transactions_per_s": 1000 / s, "rows_per_s": 1000 / s,
                "subscriber": {"cpu": cpu[0]}, "walsender": {"cpu": cpu[1]}} for s in seconds]
    return {"workload": workload, "variant": variant, "commit": commit, "transactions": 1000, "rows": 1000, "samples": samples}


def results(**parts):
    machine = {"postgresql": "18.6", "cores": 2, "cpu": "a processor", "memory_gb": 1, "kernel": "6", "flush_ms": 0.1,
               "braid": "abc", "load_average": [0, 0, 0]}
    return {"at": "2026-01-02T03:04:05+00:00", "machine": machine, "plan": {"scale": 1.0, "runs": 3, "options": "", "settings": []},
            "loads": {}, "limits": {}, "drains": [], **parts}


def met_again():
    watched = {name: {"transactions": 9, "p50_ms": 1.0, "p99_ms": 2.0, "max_ms": 3.0} for name in reconcile.PHASES}
    sample = {"equal_s": 4.0, "level_s": None, "first_s": 1.0, "lag_p50_s": 0.1, "lag_max_s": 0.2, "load": {"seconds": 9.0, "cpu": 8.0},
              "cpu": {"sum": 5.0}, "inserters": watched}
    rate = {"lag_p50_s": 0.1, "lag_max_s": 0.2, "lag_end_s": 0.1, "inserters": watched["after"], "cpu": {"sum": 3.0}}
    size = {"rows": 100, "inserts": 10, "shared": 0}
    return results(kind="reconcile", reconciliations=[
        {"system": "parallel", "title": "Braid, default settings", **size, "samples": [sample, {"void": "rows differ"}, {**sample, "equal_s": 6.0}]},
        {"system": "bucardo", "title": "Bucardo 5.6", **size, "samples": [], "not_available": "it is not there"}],
        steady=[{"system": "parallel", "title": "Braid, default settings", "rates": [
            {**rate, "rate": 250, "unstable": ""}, {**rate, "rate": 500, "unstable": ""}, {**rate, "rate": 1000, "unstable": "6.0 s behind"}]}])


class Many(unittest.TestCase):
    def test_sets(self):
        self.assertEqual(plan.Tables.read("1000"), plan.Tables(1000, 1))
        self.assertEqual(plan.Tables.read("200x10"), plan.Tables(2000, 200))
        for wrong in ("x10", "0", "0x5", "many", "-1x-5"):
            self.assertRaises(plan.Mistake, plan.Tables.read, wrong)

    def test_the_last_table_is_made_and_changed(self):
        for tables in (plan.Tables(100), plan.Tables(2000, 200), plan.Tables(7, 3)):
            schema, table = many.last(tables).split(".")
            number = int(table.removeprefix("item_"))
            self.assertEqual((number, schema), (tables.total - 1, f"t{1 + number % tables.schemas}"))
            self.assertIn(f"0 .. {tables.total} - 1", many.make(tables))
            self.assertIn(f"0 .. {tables.total} - 1", many.change(tables, 5))

    def test_growth(self):
        self.assertAlmostEqual(many.growth([(100, 2.0), (1000, 20.0)]), 1)
        self.assertAlmostEqual(many.growth([(1000, 30.0), (10, 0.003), (100, 0.3)]), 2)
        self.assertIsNone(many.growth([(100, 2.0)]))
        self.assertIsNone(many.growth([(100, 0.0), (1000, 2.0)]))

    def test_the_longest_wait_is_of_one_process_that_is_there(self):
        self.assertEqual(many.longest_wait({1: 5.0, 2: 1.0, 3: 0.0}, {1: 6.0, 2: 3.5, 4: 2.0}), 2.5)
        self.assertEqual(many.longest_wait({}, {}), 0.0)

    def test_summary(self):
        def sample(n, power):
            took = {"seconds": (n / 100) ** power, "provider_cpu": 1.0, "subscriber_cpu": 2.0}
            return {"locks": n + 2, "walsender_kb": 2048, "workers_kb": 1024, **dict.fromkeys(("create", "ready", "changes", "refresh"), took)}

        entries = [{"system": system, "tables": n, "schemas": 1, "samples": [sample(n, power), {"void": "late"}]}
                   for system, power in (("native", 2), ("braid", 1)) for n in (100, 1000)]
        entries.append({"system": "braid", "tables": 2000, "schemas": 200, "samples": [sample(2000, 1)]})
        entries.append({"system": "native", "tables": 2000, "schemas": 200, "samples": [{"void": "late"}]})
        lines = many.summary({"many": entries}).splitlines()
        self.assertEqual(len({line.count("|") for line in lines}), 1)
        self.assertIn("| 1000 | native | 100.00 | 100.00 | 1.00 | 2.00 | 1002 | 100.00 | 2.00 | 1.00 | 100.00 |", lines)
        self.assertIn("| 2000 in 200 schemas | braid | 20.00 | 20.00 | 1.00 | 2.00 | 2002 | 20.00 | 2.00 | 1.00 | 20.00 |", lines)
        self.assertEqual([line.split("|")[3].strip() for line in lines[-2:]], ["2.00", "1.00"])


class Groups(unittest.TestCase):
    def test_flushes(self):
        said = "5 seconds per test\nCompare:\n        open_datasync   812.345 ops/sec\n        fdatasync        1234.500 ops/sec     810 usecs/op\n        fdatasync   9.0 ops/sec\n"
        self.assertEqual(group.fsyncs(said), 1234.5)
        self.assertIsNone(group.fsyncs("n/a"))

    def test_rows(self):
        self.assertIn(f"generate_series(1, {100 * 1024 * 1024 // (group.TABLES * group.VALUE)})", group.fill(100))
        self.assertEqual(group.make().count("create table"), group.TABLES)

    def test_summary(self):
        made = {"entries": [{"nodes": 1, "at": 1, "clients": 1, "a_second": 10.2}, {"nodes": 3, "at": 3, "clients": 16, "a_second": 200.0}],
                "copies": [{"system": "subscription", "seconds": 10}, {"system": "join", "seconds": 12}], "plan": {"megabytes": 5}}
        lines = group.summary(made).splitlines()
        self.assertIn("| 3 | 16 | each member | 200 |", lines)
        self.assertEqual(lines[-1], "| join | 12.0 | 1.20 |")
        self.assertEqual(group.rate((5, 105), 10), 10)


class Wakeups(unittest.TestCase):
    def test_hops(self):
        def switch(at, left, state, entered):
            return (f"  {left}  {at / 1e6:.6f}: sched:sched_switch: prev_comm=a b prev_pid={left} prev_prio=120 prev_state={state} ==> "
                    f"next_comm=c next_pid={entered} next_prio=120")

        def waking(at, waker, pid):
            return f"  {waker}  {at / 1e6:.6f}: sched:sched_waking: comm=c pid={pid} prio=120 target_cpu=001"

        hops = wakeups.follow([
            "no event", switch(1000, 0, "R", 1), waking(1010, 1, 2), switch(1015, 0, "R", 2),
            # Preempted, not asleep; and who is awake can't be woken.
            switch(1020, 2, "R+", 9), waking(1022, 1, 2), switch(1030, 9, "S", 2), switch(1045, 2, "S", 0), switch(1050, 1, "S", 0),
            # By something that is not followed.
            waking(1100, 9, 2), switch(1107, 0, "R", 2)], {1: "leader", 2: "applier"})
        self.assertEqual({hop: [round(t) for t in times] for hop, times in hops.delay.items()},
                         {("leader", "applier"): [5], ("else", "applier"): [7]})
        self.assertEqual([round(t) for t in hops.before[("leader", "applier")]], [10])
        self.assertEqual({name: [round(t) for t in times] for name, times in hops.ran.items()}, {"applier": [30], "leader": [50]})
        shown = wakeups.text(hops, "label", 1).splitlines()
        self.assertEqual(shown[2].split(), ["leader", "applier", "1", "10", "10", "5", "5", "30", "30"])


class Reconciliation(unittest.TestCase):
    def test_lag_is_the_age_of_the_oldest_that_is_missing(self):
        written = [10.0, 10.1, 10.2]
        self.assertEqual([round(beats.lag(written, seen, 10.5), 3) for seen in (0, 2, 3)], [0.5, 0.3, 0.0])

    def test_level(self):
        series = [(1.0, 0.0, 0.0), (5.0, 4.0, 4.0), (6.0, 0.1, 5.0), (7.0, 0.1, 0.9), (8.0, 0.1, 1.4)]
        self.assertEqual(beats.level(series, 4.0, 1.0), 3.0)
        self.assertIsNone(beats.level(series[:3], 4.0, 1.0))

    def test_lags_of_a_time_without_a_look(self):
        series = [(1.0, 0.0, 3.0), (2.0, 0.2, 0.1), (3.0, 0.5, 0.4)]
        self.assertEqual(reconcile.lags_between(series, 1.5, 3.0), [0.2, 0.5])
        self.assertEqual(reconcile.lags_between(series, 2.5, 2.9), [0.2])

    def test_stable(self):
        def judged(lag, reached=(100, 100)):
            return beats.verdict([(t / 10, 0.0, lag(t / 10)) for t in range(301)], 0.0, 30.0, reached, 100)

        self.assertEqual(judged(lambda t: 0.2), "")
        self.assertEqual(judged(lambda t: t % 3), "")
        self.assertIn("falls behind", judged(lambda t: t / 7))
        self.assertIn("s behind", judged(lambda t: t))
        self.assertIn("85/s", judged(lambda t: 0.2, (100, 85)))
        self.assertEqual(judged(lambda t: 0.2, (100, 94)), "")
        # A bad start is none.
        self.assertEqual(judged(lambda t: 9 if t < 5 else 0.1), "")

    def test_inserters(self):
        log = "0 0 1500 0 1700000000 500000 20\n1 0 2500000 0 1700000009 0 100\n0 1 99"
        found = inserters.entries(log)
        self.assertEqual(found, [(1700000000.5, 1.5), (1700000009.0, 2500.0)])
        # It counts where it was due.
        self.assertEqual(inserters.phase(found, 1700000006, 1700000007)["max_ms"], 2500.0)
        self.assertEqual(inserters.phase(found, 1700000007, 1700000010), {"transactions": 0})

    def test_sizes(self):
        with unittest.mock.patch.dict(os.environ, {"BENCH_ROWS": "1000000", "BENCH_CONFLICTS": "0.01", "BENCH_SCALE": "0.1"}):
            chosen = plan.read_reconciliation()
        self.assertEqual(chosen.counts(1), (100_000, 10_000, 100))
        self.assertEqual(chosen.scaled(30, 5), 5)
        with unittest.mock.patch.dict(os.environ, {"BENCH_ROWS": "30000", "BENCH_BATCH": "100"}):
            self.assertEqual(plan.read_reconciliation().counts(0.1), (3000, 400, 0))
        with unittest.mock.patch.dict(os.environ, {"BENCH_SYSTEMS": "xdb"}), self.assertRaises(plan.Mistake):
            plan.read_reconciliation()

    def test_accounts(self):
        self.assertEqual(pair.spent({"a": 1.0}, {"a": 2.5, "b": 0.5}), {"a": 1.5, "b": 0.5, "sum": 2.0})
        self.assertGreater(pair.tree(os.getpid()), 0.0)
        self.assertIn(os.getpid(), pair.descendants(os.getpid()))

    def test_tables(self):
        times, watched = reconcile_summary.reconcile_rows(met_again())
        self.assertEqual(times[1][:6], (100, "10", "Braid, default settings", "1.0", "5.0", "-"))
        self.assertIn("not available", times[2])
        self.assertEqual({len(row) for row in times}, {len(times[0])})
        self.assertEqual([row[2] for row in watched], ["ms", "p50", "p99", "max"])
        self.assertEqual(reconcile_summary.highest(met_again()["steady"][0]), 500)
        rows = reconcile_summary.steady_rows(met_again())
        self.assertEqual({len(row) for row in rows}, {9})
        self.assertEqual([row[1] for row in rows if "highest" in row[-1]], [500])

    def test_what_is_void_has_no_highest_rate(self):
        r = met_again()
        r["steady"][0]["samples"] = [{"void": "rows differ"}]
        rows = reconcile_summary.steady_rows(r)
        self.assertFalse([row for row in rows if "highest" in row[-1]])
        self.assertEqual(rows[-1][-1], "void")


class Ratios(unittest.TestCase):
    def test_medians_and_neighbours(self):
        found = summary.Ratio([3, 30, 6], [1, 2, 3])
        self.assertEqual((found.value, found.low, found.high), (3, 2, 15))

    def test_a_void_sample_does_not_count(self):
        braid = drained("single", "parallel", [1, 2, 1])
        braid["samples"][1] = {"void": "rows differ"}
        r = results(drains=[drained("single", "native", [2, 2, 2]), braid])
        self.assertEqual(summary.ratio(r, "single", "parallel", "off", goals.THROUGHPUT).value, 2)

    def test_one_large_transaction_has_a_throughput(self):
        native, braid = drained("bulk", "native", [40]), drained("bulk", "parallel", [20])
        for sample in native["samples"] + braid["samples"]:
            sample["transactions_per_s"] = 0.0
        self.assertEqual(summary.ratio(results(drains=[native, braid]), "bulk", "parallel", "off", goals.THROUGHPUT).value, 2)

    def test_goals(self):
        r = results(drains=[drained("single", "native", [2] * 3), drained("single", "parallel", [1] * 3, (1.2, 0.5))])
        verdicts = {g.measure: met for g, _, met in summary.judged(r) if (g.variant, g.commit) == ("parallel", "off")}
        self.assertIs(verdicts[goals.THROUGHPUT], True)
        self.assertIs(verdicts[goals.SUBSCRIBER_CPU], False)
        self.assertIs(verdicts[goals.WALSENDER_CPU], True)
        self.assertIsNone(verdicts[goals.OF_DECODER])

    def test_the_link_is_judged_without_its_start(self):
        far, near = drained("single", "parallel", [2.0]), drained("single", "parallel", [1.1])
        far["samples"][0]["first_row_s"] = 1.0
        r = results(link=[{**far, "delay_ms": 20}, {**near, "delay_ms": 0}])
        self.assertAlmostEqual(summary.ratio(r, "single", "parallel", "off", goals.LINK).value, 1.0)


class DecodingGoals(unittest.TestCase):
    def test_a_goal_that_is_missed_at_full_size_is_a_failure(self):
        def ratio(above_floor, total):
            return {"against": "another", "above_floor": above_floor, "cpu_above_floor": 9, "total": total}
        reached = {"single": {"braid gir": ratio(1.0, 0.9)}, "wide": {"braid wal2json v1": ratio(0.5, 1.0)}}
        self.assertEqual(decode.verdict(reached, 1), ("all goals reached", 0))
        self.assertEqual(decode.verdict({"single": {}}, 1), ("no goal could be looked at", 0))
        for missed in (ratio(0.51, 0.5), ratio(0.1, 1.01)):
            by_case = reached | {"large": {"braid wal2json v2": missed}}
            self.assertEqual(decode.verdict(by_case, 1), ("goals missed: large: braid wal2json v2", 1))
            self.assertEqual(decode.verdict(by_case, 0.5), ("goals missed, at less than full size: large: braid wal2json v2", 0))


class Latency(unittest.TestCase):
    LINE = ("rmgr: Transaction len (rec/tot):     65/    65, tx:        745, lsn: 0/0155D2A0, prev 0/0155D260, "
            "desc: COMMIT 2026-01-02 03:04:05.678901 UTC; subxacts: 746 747; origin: node 1, lsn 0/0, at 2026-01-02 03:04:05.6 UTC")

    def test_commit_records(self):
        match = latency.COMMIT.search(self.LINE)
        self.assertEqual((match[1], latency.microseconds(match[2])), ("745", 1767323045678901))
        self.assertEqual(latency.SUBXACTS.search(match[3])[1].split(), ["746", "747"])
        self.assertEqual(latency.microseconds("1970-01-01 00:00:01"), 1_000_000)

    def test_quantiles(self):
        self.assertEqual([latency.quantile(list(range(1, 101)), s) for s in (0.5, 0.99, 1.0)], [50, 99, 100])

    def test_snapshots(self):
        looks = latency.Snapshots()
        looks.taken = [(1000, "12:14:12")]
        # 12 was still running 400 us after its record; 13 was visible, 14 had not begun.
        self.assertEqual(looks.compare({11: 100, 12: 600, 13: 900}), (400, 0))
        self.assertEqual(looks.compare({13: 1200}), (0, 1))
        self.assertEqual(looks.compare({14: 950}), (50, 0))


class Processes(unittest.TestCase):
    def test_a_child_is_seen_and_then_reaped(self):
        before = processes.reaped(os.getpid())
        child = subprocess.Popen([sys.executable, "-c", "import time\nend = time.process_time() + .2\nwhile time.process_time() < end: pass"])
        self.assertIn(child.pid, processes.children(os.getpid()))
        child.wait()
        self.assertGreaterEqual(processes.reaped(os.getpid()) - before, 0.18)
        self.assertIsNone(processes.cpu(child.pid))

    def test_roles(self):
        for title in ("logical replication apply worker for subscription 16400", "braid applier 1 of subscription bench",
                      "logical replication parallel apply worker for subscription 16400"):
            self.assertTrue(processes.SUBSCRIBER.search(title) and not processes.STAYING.search(title), title)
        for title in ("logical replication launcher ", "braid supervisor ", "braid manager of database 5 "):
            self.assertTrue(processes.STAYING.search(title), title)


class Options(unittest.TestCase):
    def test_what_a_subscriber_asks_for(self):
        class Scene:
            class provider:
                @staticmethod
                def logged(wanted):
                    line = """2026 [1] LOG:  received replication command: START_REPLICATION SLOT "bench" LOGICAL 0/1 (""" \
                           """proto_version '1', publication_names '"bench"', "origin" 'none', node 'it''s')"""
                    return [line] if re.search(wanted, line) else []

        self.assertEqual(limits.asked(Scene), {
            "proto_version": "1", "publication_names": '"bench"', "origin": "none", "node": "it's"})


class Link(unittest.TestCase):
    def test_bytes_arrive_whole_and_late(self):
        import socket

        target = socket.create_server(("127.0.0.1", 0))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        proxy = subprocess.Popen([sys.executable, "-m", "braid_bench.link", str(port), str(target.getsockname()[1]), "20"])
        try:
            end = time.monotonic() + 10
            while True:
                try:
                    near = socket.create_connection(("127.0.0.1", port))
                    break
                except ConnectionRefusedError:
                    self.assertLess(time.monotonic(), end)
                    time.sleep(0.02)
            far, _ = target.accept()
            for sender, receiver in ((near, far), (far, near)):
                began = time.monotonic()
                sender.sendall(b"x")
                self.assertEqual(receiver.recv(1), b"x")
                self.assertGreaterEqual(time.monotonic() - began, 0.020)
                self.assertLess(time.monotonic() - began, 0.5)
            # More than is on its way at once, read only after it was all offered.
            much = os.urandom(1 << 20) * 100
            writer = subprocess.Popen([sys.executable, "-c", "import sys, socket\ns = socket.socket(fileno=int(sys.argv[1]))\n"
                                       "s.sendall(sys.stdin.buffer.read())\ns.shutdown(socket.SHUT_WR)", str(near.fileno())],
                                      pass_fds=[near.fileno()], stdin=subprocess.PIPE)
            writer.stdin.write(much)
            writer.stdin.close()
            got = bytearray()
            while chunk := far.recv(1 << 20):
                got += chunk
            self.assertEqual(len(got), len(much))
            self.assertEqual(bytes(got), much)
            writer.wait()
            # The other direction is open still, until it ends too.
            far.sendall(b"and back")
            far.close()
            self.assertEqual(near.recv(100), b"and back")
            self.assertEqual(near.recv(100), b"")
            near.close()
        finally:
            proxy.kill()
            proxy.wait()
            target.close()


class Drawings(unittest.TestCase):
    def test_charts_are_well_formed_and_have_both_faces(self):
        r = results(drains=[drained("single", "native", [2] * 3), drained("single", "parallel", [1, 2, 3]),
                            drained("zipf2", "native", [2] * 3), drained("zipf2", "batch", [1] * 3)],
                    loads={"single": {"rows": 1000, "seconds": 1.0, "cpu": 1}},
                    limits={"single": {"copy": [{"rows_per_s": 5000.0, "seconds": 1, "cpu": 1}]}},
                    latency=[{"rate": 500, "variant": "native", "samples": [{"p50_ms": 1.0, "p99_ms": 2.0}]}])
        drawn = charts.draw(r)
        self.assertEqual(set(drawn), {"throughput.svg", "cpu-subscriber.svg", "cpu-walsender.svg", "zipf.svg", "latency.svg", "limits.svg"})
        for name, picture in drawn.items():
            xml.fromstring(picture)
            self.assertIn("prefers-color-scheme:dark", picture, name)
        # Nothing is drawn beyond the edge.
        for x, width in re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawn["limits.svg"]):
            self.assertLessEqual(float(x) + float(width), svg.WIDTH)

    def test_scale(self):
        for top in (0.3, 1, 1.7, 9, 45, 800, 123_456):
            self.assertLessEqual(top / svg.nice(top), 6)
            self.assertGreaterEqual(top / svg.nice(top), 2)

    def test_flames(self):
        folded = {("leader", "main", "<read>"): 3, ("leader", "main", "write"): 1}
        picture = svg.flames("a & b", profile.tree(folded, "all"))
        xml.fromstring(picture)
        self.assertIn("&lt;read&gt;: 75.0 %", picture)
        self.assertIn("75.0%  <read>", profile.text(folded, "a drain"))


class Report(unittest.TestCase):
    def test_what_is_not_measured_again_keeps_its_native(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = pathlib.Path(folder, "1.json"), pathlib.Path(folder, "2.json")
            first.write_text(json.dumps(results(drains=[
                drained("single", "native", [2.0]), drained("single", "parallel", [1.0]), drained("single", "batch", [0.5])])))
            second.write_text(json.dumps(results(drains=[drained("single", "native", [4.0]), drained("single", "parallel", [1.0])])))
            merged = report.merge([first, second, second])
        ratios = [summary.ratio(merged, "single", variant, "off", goals.THROUGHPUT).value for variant in ("parallel", "batch")]
        self.assertEqual(ratios, [4.0, 4.0])

    def test_what_is_not_measured_again_keeps_its_date(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = pathlib.Path(folder, "1.json"), pathlib.Path(folder, "2.json")
            old = results(drains=[drained("single", "native", [2.0]), drained("single", "batch", [0.5])])
            new = results(drains=[drained("single", "native", [4.0])])
            old["at"], new["at"] = "2026-01-01T00:00:00", "2026-02-02T00:00:00"
            first.write_text(json.dumps(old))
            second.write_text(json.dumps(new))
            rows = summary.drain_rows(report.merge([first, second]))
        self.assertEqual({row[2]: row[-1][:10] for row in rows[1:]}, {"native": "2026-02-02", "batch": "2026-01-01"})

    def test_the_document_has_every_mark(self):
        text = report.DOCUMENT.read_text()
        r = results(drains=[drained("single", "native", [2] * 3)],
                    limits={"single": {"copy": [{"rows_per_s": 5000.0, "seconds": 1, "cpu": 1}]}},
                    loads={"single": {"rows": 1000, "seconds": 1.0, "cpu": 1}},
                    link=[{**drained("single", "native", [2]), "delay_ms": 20}],
                    latency=[{"rate": 500, "variant": "native", "samples": [
                        {"reached_per_s": 500, "p50_ms": 1.0, "p99_ms": 2.0, "p999_ms": 3.0, "unseen_ms": 0.1,
                         "subscriber": {"cpu": 1}, "walsender": {"cpu": 1}}]}])
        names = [name for name, _ in report.sections(r, report.RESULTS / "pg18.json")]
        names += [name for name, _ in report.reconcile_sections(met_again(), report.RESULTS / "reconcile-pg15.json")]
        self.assertEqual(set(names), set(re.findall(r"<!-- bench: (\w+) -->", text)))
        filled = report.fill(text, "goals", r"a \1 table")
        self.assertIn("<!-- bench: goals -->\na \\1 table\n<!-- end -->", filled)

    def test_charts_of_the_document_exist_in_the_code(self):
        named = {pathlib.Path(p).name for p in re.findall(r"bench/charts/(\S+\.svg)", report.DOCUMENT.read_text())}
        import inspect

        drawn = set(re.findall(r'"(\S+\.svg)"', inspect.getsource(charts.draw)))
        self.assertEqual(named, drawn)


if __name__ == "__main__":
    unittest.main()
