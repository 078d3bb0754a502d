"""Every block of SQL of the pages for starting and of the guide says on which nodes it runs, and a TAP test runs the page. Run by
`make lint`."""

import glob
import os
import re
import unittest

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
# These are no pages to type from.
REFERENCE = {"PROTOCOL.md", "PERFORMANCE.md", "REFERENCE.md"}


def read(path):
    with open(os.path.join(TOP, path), encoding="utf-8") as file:
        return file.read()


def pages():
    for path in sorted(glob.glob("docs/*.md", root_dir=TOP) + glob.glob("docs/guide/*.md", root_dir=TOP)):
        blocks = re.findall(r"^```sql\n(.*?)^```$", read(path), flags=re.M | re.S)
        if blocks and os.path.basename(path) not in REFERENCE:
            yield path, blocks


class Pages(unittest.TestCase):
    def test_each_block_says_where_it_runs(self):
        for path, blocks in pages():
            for block in blocks:
                self.assertRegex(block, r"^-- on \w", path)

    def test_no_block_is_indented(self):
        for path, _ in pages():
            self.assertIsNone(re.search(r"^ +```sql", read(path), flags=re.M), path)

    def test_a_tap_test_runs_each_page(self):
        tests = "".join(read(path) for path in glob.glob("t/*.pl", root_dir=TOP) if "parts(" in read(path))
        lists = " ".join(re.findall(r"qw\(([^)]*)\)", tests)).split()
        for path, _ in pages():
            name = os.path.splitext(os.path.basename(path))[0]
            self.assertTrue(path in tests or name in lists, f"no test runs {path}")


if __name__ == "__main__":
    unittest.main()
