"""What scripts/check-prose finds, and how it compares that with its exceptions. Run by `make lint`."""

import importlib.machinery
import importlib.util
import os
import unittest

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "check-prose")
LOADER = importlib.machinery.SourceFileLoader("check_prose", PATH)
check_prose = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_prose", LOADER))
LOADER.exec_module(check_prose)


def rules(path, text):
    return [(rule, number) for rule, number, _ in check_prose.findings(path, text)]


class Width(unittest.TestCase):
    def test_a_comment_of_100_columns_is_allowed(self):
        line = "// " + ("word " * 18).strip()
        self.assertEqual(rules("a.rs", line.ljust(100, "x")), [])
        self.assertEqual(rules("a.rs", line.ljust(101, "x")), [("width", 1)])

    def test_indentation_counts(self):
        self.assertEqual(rules("a.rs", " " * 50 + "// some words " + "x" * 40), [("width", 1)])

    def test_code_and_single_words_do_not_count(self):
        self.assertEqual(rules("a.rs", "let x = 1; // " + "word " * 40), [])
        self.assertEqual(rules("a.rs", "// https://" + "x" * 120), [])

    def test_each_language_has_its_mark(self):
        wide = "some words " * 12
        for path, mark in (("a.sql", "--"), ("t/a.pl", "#"), ("a.py", "#"), ("Makefile", "#"), ("a.yaml", "#")):
            self.assertEqual(rules(path, f"{mark} {wide}"), [("width", 1)], path)
        self.assertEqual(rules("scripts/run", f"#!/bin/sh\n# {wide}"), [("width", 2)])
        self.assertEqual(rules("LICENSE", f"# {wide}"), [])


class Pronoun(unittest.TestCase):
    def test_the_beginning_of_a_doc_comment(self):
        self.assertEqual(rules("a.rs", "/// What it holds.\nx\n//! It is.\n/// The same of a row."), [("pronoun", 1), ("pronoun", 3), ("pronoun", 4)])

    def test_nothing_else(self):
        self.assertEqual(rules("a.rs", "/// Returns a row.\n/// It is new.\n// What is this\n/// Itself.\n/// Whatsoever"), [])


class Sentence(unittest.TestCase):
    def test_35_words_are_allowed(self):
        self.assertEqual(rules("a.md", "word " * 34 + "end."), [])
        self.assertEqual(rules("a.md", "word " * 35 + "end."), [("sentence", 1)])

    def test_a_paragraph_of_several_lines(self):
        self.assertEqual(rules("a.md", "# Title\n\n" + "word " * 20 + "\n" + "word " * 20), [("sentence", 3)])
        self.assertEqual(rules("a.md", "word " * 20 + "end. And\n" + "word " * 20), [])

    def test_items_and_cells_are_apart(self):
        self.assertEqual(rules("a.md", ("- " + "word " * 20 + "\n") * 3), [])
        self.assertEqual(rules("a.md", "| " + "word " * 20 + " | " + "word " * 20 + " |"), [])
        self.assertEqual(rules("a.md", "| a | " + "word " * 40 + " |"), [("sentence", 1)])

    def test_code_is_one_word_or_none(self):
        self.assertEqual(rules("a.md", "```sql\n" + "word " * 60 + "\n```"), [])
        self.assertEqual(rules("a.md", "word " * 30 + "`" + "word " * 20 + "`"), [])
        self.assertEqual(rules("a.md", "| `" + "a | " * 40 + "` | word |"), [])

    def test_abbreviations_end_nothing(self):
        self.assertEqual(rules("a.md", "word " * 20 + "e.g. " + "word " * 20), [("sentence", 1)])
        self.assertEqual(rules("a.md", "word " * 20 + "R. " + "Word " * 20), [])

    def test_links_count_by_their_text(self):
        self.assertEqual(rules("a.md", "[a](b.md#c) " * 35), [])
        self.assertEqual(rules("a.md", "[a b](b.md) " * 18), [("sentence", 1)])

    def test_the_mean_is_of_sentences(self):
        lengths = [len(words) for _, words, ended in check_prose.sentences("Two words. Now three words. As follows:\n\n| cell |\n") if ended]
        self.assertEqual(lengths, [2, 3])


class Word(unittest.TestCase):
    def test_words_of_the_list(self):
        self.assertEqual(rules("a.rs", "// what is in hand is told\nlet told = 1;"), [("word", 1), ("word", 1)])
        self.assertEqual(rules("a.md", "It hung on.\n\n    It was put aside.\n"), [("word", 1), ("word", 3)])

    def test_names_of_code_are_none(self):
        self.assertEqual(rules("a.rs", "// Calls `told`."), [])
        self.assertEqual(rules("a.md", "`told`\n\n```\ntold\n```\n"), [])


class Exceptions(unittest.TestCase):
    def test_neither_more_nor_fewer_than_listed(self):
        key = ("word", "a.md")
        self.assertEqual(check_prose.compare({key: 2}, {key: 2}), [])
        self.assertRegex(check_prose.compare({key: 3}, {key: 2})[0], "a.md: word: 3 found, 2 allowed")
        self.assertRegex(check_prose.compare({key: 1}, {key: 2})[0], "a.md: word: 1 found, 2 listed")
        self.assertRegex(check_prose.compare({key: 1}, {})[0], "1 found, 0 allowed")
        self.assertRegex(check_prose.compare({}, {key: 1})[0], "0 found, 1 listed")

    def test_lowering_raises_nothing(self):
        found = {("word", "a.md"): 5, ("word", "b.md"): 1, ("width", "c.rs"): 1}
        listed = {("word", "a.md"): 3, ("word", "b.md"): 4, ("word", "gone.md"): 2}
        self.assertEqual(check_prose.lowered(found, listed), {("word", "a.md"): 3, ("word", "b.md"): 1, ("word", "gone.md"): 0})
        self.assertNotIn("gone.md", check_prose.written(check_prose.lowered(found, listed)))

    def test_the_list_is_read_as_it_is_written(self):
        listed = {("word", "a b.md"): 3, ("width", "c.rs"): 1}
        self.assertEqual(check_prose.parse(check_prose.written(listed)), listed)

    def test_a_broken_list_is_refused(self):
        for text in ("word a.md 3", "words 3 a.md", "word 0 a.md", "word 3", "word 3 a.md\nword 3 a.md"):
            with self.assertRaises(ValueError, msg=text):
                check_prose.parse(text)


if __name__ == "__main__":
    unittest.main()
