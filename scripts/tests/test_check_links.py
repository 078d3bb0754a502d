"""What scripts/check-links takes for a broken link. Run by `make lint`."""

import importlib.machinery
import importlib.util
import os
import unittest

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "check-links")
LOADER = importlib.machinery.SourceFileLoader("check_links", PATH)
check_links = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_links", LOADER))
LOADER.exec_module(check_links)


def broken(text, **others):
    files = {"docs/a.md": text, **{f"docs/{name}.md": of for name, of in others.items()}}
    return [target for _, target in check_links.broken("docs/a.md", text, files.get)]


class Links(unittest.TestCase):
    def test_files(self):
        self.assertEqual(broken("[x](b.md) [y](c.md)", b=""), ["c.md"])
        self.assertEqual(broken("![x](no.svg)"), ["no.svg"])

    def test_headings(self):
        page = "# Title\n\n## f(a int) → void\n\n## Two `words`\n"
        self.assertEqual(broken("[x](b.md#title) [y](b.md#fa-int--void) [z](b.md#two-words) [w](b.md#two)", b=page), ["b.md#two"])
        self.assertEqual(broken("# Here\n\n[x](#here) [y](#there)"), ["#there"])

    def test_equal_headings_have_numbers(self):
        self.assertEqual(broken("# A\n# A\n[x](#a-1) [y](#a-2)"), ["#a-2"])

    def test_named_anchors(self):
        self.assertEqual(broken('<a id="old"></a>\n[x](#old)'), [])

    def test_code_has_no_links(self):
        self.assertEqual(broken("`[x](no.md)`\n\n```\n[x](no.md)\n# not a heading\n```\n\n[y](#not-a-heading)"), ["#not-a-heading"])

    def test_other_sites(self):
        self.assertEqual(broken("[x](https://www.postgresql.org/docs/) [y](mailto:a@b.example)"), [])


if __name__ == "__main__":
    unittest.main()
