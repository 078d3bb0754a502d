"""What scripts/check-errors finds. Run by `make lint`."""

import importlib.machinery
import importlib.util
import os
import unittest

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "check-errors")
LOADER = importlib.machinery.SourceFileLoader("check_errors", PATH)
check_errors = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_errors", LOADER))
LOADER.exec_module(check_errors)


def rules(text, path="a.rs"):
    return [(rule, number) for rule, number, _ in check_errors.findings(path, text)]


class Text(unittest.TestCase):
    def test_conditions_on_a_message_are_found(self):
        for code in (
            "if error.message == GONE {}",
            "if GONE != failure.message {}",
            "let is = [A, B].contains(&error.message.as_str());",
            'message.contains("publication")',
            "error.message.as_str().starts_with(PREFIX)",
            "match error.message.as_str() {",
            "matches!(error.message.as_str(), GONE)",
            'failure.to_string().contains("lock")',
            'report.message().strip_prefix("could not ")',
        ):
            self.assertEqual(rules(code), [("text", 1)], code)

    def test_a_condition_on_several_lines_is_found(self):
        self.assertEqual(rules('x\n    && error\n        .message\n        .contains("a")'), [("text", 3)])

    def test_other_uses_of_a_message_are_allowed(self):
        for code in (
            'error.message = format!("the provider: {}", error.message);',
            "if self.said.as_ref() != Some(&failure.message) {}",
            "match message.first() {",
            "sum(error.message.len())",
            "// if error.message == GONE",
        ):
            self.assertEqual(rules(code), [], code)

    def test_unit_tests_may_read_a_message(self):
        self.assertEqual(rules('#[cfg(test)]\nmod tests {\n    assert!(error.message == "a");\n}'), [])

    def test_an_allowed_file_may_read_a_message(self):
        self.assertEqual(rules('message.contains("a")', "bgworker/src/reason.rs"), [])


class Code(unittest.TestCase):
    def test_codes_as_text_are_found(self):
        for code in (
            'SqlState::Other(*b"25001")',
            'if sqlstate == "42710" {}',
            'SqlState::parse("55006")',
            "\"set error_sqlstate = coalesce(error_sqlstate, '55000')\"",
        ):
            self.assertEqual(rules(code), [("code", 1)], code)

    def test_names_and_classes_are_allowed(self):
        for code in ("SqlState::LockNotAvailable", 'sqlstate.is_of("57P")', "SqlState::parse(&text)"):
            self.assertEqual(rules(code), [], code)


class Style(unittest.TestCase):
    def test_messages_that_are_no_sentences_are_right(self):
        for code in (
            'PgError::new(SqlState::DiskFull, "could not write")',
            'PgError::new(SqlState::DiskFull, format!("table \\"{name}\\" is full"))',
            'Failure::state("Braid {own} is too old")',
            'Failure::new(CODE, "SELECT is not supported")',
            'x.with_hint("Free disk space.")',
            'x.hint("braid.ddl_log shows the statements.")',
            'x.detail(format!("{}: {}", a, b))',
            'x.hint("Write a postgresql:// URI.") // "a comment',
        ):
            self.assertEqual(rules(code), [], code)

    def test_messages_against_the_style_guide_are_found(self):
        for code in (
            'PgError::new(SqlState::DiskFull, "Could not write")',
            'PgError::new(SqlState::DiskFull, "could not write.")',
            'Failure::state(format!("{name} can\'t be read"))',
            'x.with_hint("free disk space")',
            'x.hint("Free disk space")',
            'x.detail("it is full.")',
        ):
            self.assertEqual(rules(code), [("style", 1)], code)


if __name__ == "__main__":
    unittest.main()
