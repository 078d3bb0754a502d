//! The text of `braid.versions`: which tables a transaction reads and writes.
//!
//! ```text
//! declaration := item { "," item }
//! item        := ( "read" | "write" ) name
//! name        := identifier [ "." identifier ]
//! identifier  := letter { letter | digit | "$" }  |  '"' { any character, '"' as '""' } '"'
//! ```
//!
//! `read` and `write` are recognized in any case. Identifiers follow PostgreSQL's rules (its
//! manual, section 4.1.1): outside of quotes ASCII letters are folded to lower case, underscores
//! and non-ASCII characters are letters. Key words need no quotes. Identifiers above
//! [`NAME_LIMIT`] bytes are an error; PostgreSQL would cut them, and two tables could become one.
//!
//! A table that is named more than once counts once, as written if it is written anywhere. A name
//! with a schema and one without are different here, even if they turn out to be one table.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::grant::{Access, TABLES_LIMIT};

/// The longest identifier, in bytes: PostgreSQL's NAMEDATALEN - 1.
pub const NAME_LIMIT: usize = 63;
/// The longest text, in bytes.
const TEXT_LIMIT: usize = 64 << 10;

/// The name of a table, as the catalog has it (without quotes).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName {
    /// The schema. None: by the search path.
    pub schema: Option<String>,
    /// The table.
    pub table: String,
}

/// The tables that a transaction declares, at least one. Its text ([`fmt::Display`]) is canonical:
/// ordered by name, quoted only where parsing needs it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Declaration {
    tables: BTreeMap<TableName, Access>,
}

/// Why a text is no declaration.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{problem} at character {position}")]
pub struct DeclarationError {
    /// Where, in characters from 1, as PostgreSQL counts.
    pub position: usize,
    /// What is wrong there.
    pub problem: Problem,
}

/// What is wrong with a declaration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Problem {
    /// The text has no table.
    #[error("a declaration of versions names at least one table")]
    Empty,
    /// An item begins with another word, or with none.
    #[error("expected \"read\" or \"write\"")]
    ExpectedAccess,
    /// `read` or `write` without a table's name.
    #[error("expected the name of a table")]
    ExpectedName,
    /// Something else than a comma follows a name.
    #[error("expected a comma or the end of the declaration")]
    ExpectedComma,
    /// More than a schema and a table.
    #[error("a table's name has at most a schema before it")]
    TooManyParts,
    /// A quoted identifier does not end.
    #[error("unterminated quoted identifier")]
    Unterminated,
    /// Two double quotes with nothing between them.
    #[error("zero-length quoted identifier")]
    ZeroLength,
    /// An identifier is longer than [`NAME_LIMIT`] bytes.
    #[error("identifier is longer than 63 bytes")]
    TooLong,
    /// A null character, which no name has.
    #[error("a name has no null character")]
    NullCharacter,
    /// More than [`TABLES_LIMIT`] tables.
    #[error("a declaration of versions names at most 256 tables")]
    TooManyTables,
    /// The text is longer than 64 kB.
    #[error("the declaration of versions is longer than 64 kB")]
    TextTooLong,
}

impl Declaration {
    /// Makes a declaration. None if there is no table or there are too many.
    #[must_use]
    pub fn new(tables: impl IntoIterator<Item = (TableName, Access)>) -> Option<Self> {
        let mut all = BTreeMap::new();
        for (name, access) in tables {
            add(&mut all, name, access);
        }
        let fits = !all.is_empty() && all.len() <= TABLES_LIMIT;
        fits.then_some(Self { tables: all })
    }

    /// The tables and what is done with each, ordered by name.
    pub fn tables(&self) -> impl Iterator<Item = (&TableName, Access)> {
        self.tables.iter().map(|(name, access)| (name, *access))
    }
}

fn add(tables: &mut BTreeMap<TableName, Access>, name: TableName, access: Access) {
    let known = tables.entry(name).or_insert(access);
    *known = access.max(*known);
}

impl TableName {
    /// Reads names with commas between: the text of `braid.release`.
    ///
    /// # Errors
    ///
    /// [`DeclarationError`].
    pub fn list(text: &str) -> Result<Vec<Self>, DeclarationError> {
        let mut parser = Parser {
            rest: text,
            position: 1,
        };
        if text.len() > TEXT_LIMIT {
            return parser.error(Problem::TextTooLong);
        }
        let mut names = Vec::new();
        parser.skip_space();
        loop {
            if names.len() >= TABLES_LIMIT {
                return parser.error(Problem::TooManyTables);
            }
            names.push(parser.name()?);
            match parser.next_char() {
                None => return Ok(names),
                Some(',') => {
                    parser.take();
                    parser.skip_space();
                }
                Some(_) => return parser.error(Problem::ExpectedComma),
            }
        }
    }
}

impl FromStr for Declaration {
    type Err = DeclarationError;

    fn from_str(text: &str) -> Result<Self, DeclarationError> {
        let mut parser = Parser {
            rest: text,
            position: 1,
        };
        if text.len() > TEXT_LIMIT {
            return parser.error(Problem::TextTooLong);
        }
        let mut tables = BTreeMap::new();
        parser.skip_space();
        if parser.rest.is_empty() {
            return parser.error(Problem::Empty);
        }
        loop {
            let begin = parser.position;
            let access = parser.access()?;
            let name = parser.name()?;
            add(&mut tables, name, access);
            if tables.len() > TABLES_LIMIT {
                return Err(DeclarationError {
                    position: begin,
                    problem: Problem::TooManyTables,
                });
            }
            match parser.next_char() {
                None => return Ok(Self { tables }),
                Some(',') => {
                    parser.take();
                    parser.skip_space();
                }
                Some(_) => return parser.error(Problem::ExpectedComma),
            }
        }
    }
}

struct Parser<'a> {
    rest: &'a str,
    position: usize,
}

impl Parser<'_> {
    fn error<T>(&self, problem: Problem) -> Result<T, DeclarationError> {
        Err(DeclarationError {
            position: self.position,
            problem,
        })
    }

    fn next_char(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let taken = chars.next()?;
        self.rest = chars.as_str();
        self.position = self.position.saturating_add(1);
        Some(taken)
    }

    /// PostgreSQL's white space (scan.l).
    fn skip_space(&mut self) {
        while matches!(
            self.next_char(),
            Some(' ' | '\t' | '\n' | '\r' | '\u{b}' | '\u{c}')
        ) {
            self.take();
        }
    }

    fn access(&mut self) -> Result<Access, DeclarationError> {
        let (begin, rest) = (self.position, self.rest);
        let word = if self.next_char() == Some('"') {
            None
        } else {
            self.word()
        };
        let access = match word.as_deref() {
            Some("read") => Some(Access::Read),
            Some("write") => Some(Access::Write),
            _ => None,
        };
        if let Some(access) = access {
            self.skip_space();
            return Ok(access);
        }
        (self.position, self.rest) = (begin, rest);
        self.error(Problem::ExpectedAccess)
    }

    fn name(&mut self) -> Result<TableName, DeclarationError> {
        let first = self.identifier()?;
        self.skip_space();
        if self.next_char() != Some('.') {
            return Ok(TableName {
                schema: None,
                table: first,
            });
        }
        self.take();
        self.skip_space();
        let table = self.identifier()?;
        self.skip_space();
        if self.next_char() == Some('.') {
            return self.error(Problem::TooManyParts);
        }
        Ok(TableName {
            schema: Some(first),
            table,
        })
    }

    fn identifier(&mut self) -> Result<String, DeclarationError> {
        let begin = self.position;
        let at = |problem| DeclarationError {
            position: begin,
            problem,
        };
        let name = if self.next_char() == Some('"') {
            let name = self.quoted().map_err(at)?;
            if name.is_empty() {
                return Err(at(Problem::ZeroLength));
            }
            name
        } else {
            self.word().ok_or_else(|| at(Problem::ExpectedName))?
        };
        if name.len() > NAME_LIMIT {
            return Err(at(Problem::TooLong));
        }
        Ok(name)
    }

    /// An unquoted identifier, folded.
    fn word(&mut self) -> Option<String> {
        let mut word = String::new();
        while let Some(next) = self.next_char() {
            let fits = if word.is_empty() {
                begins_word(next)
            } else {
                continues_word(next)
            };
            if !fits {
                break;
            }
            word.push(next.to_ascii_lowercase());
            self.take();
        }
        (!word.is_empty()).then_some(word)
    }

    fn quoted(&mut self) -> Result<String, Problem> {
        self.take();
        let mut name = String::new();
        loop {
            match self.take() {
                None => return Err(Problem::Unterminated),
                Some('\0') => return Err(Problem::NullCharacter),
                Some('"') if self.next_char() == Some('"') => {
                    self.take();
                    name.push('"');
                }
                Some('"') => return Ok(name),
                Some(other) => name.push(other),
            }
        }
    }
}

const fn begins_word(c: char) -> bool {
    c.is_ascii_alphabetic() || c == '_' || !c.is_ascii()
}

const fn continues_word(c: char) -> bool {
    begins_word(c) || c.is_ascii_digit() || c == '$'
}

impl fmt::Display for Declaration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (name, access)) in self.tables.iter().enumerate() {
            let word = match access {
                Access::Read => "read",
                Access::Write => "write",
            };
            let separator = if number == 0 { "" } else { ", " };
            write!(f, "{separator}{word} {name}")?;
        }
        Ok(())
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(schema) = &self.schema {
            print_identifier(schema, f)?;
            f.write_str(".")?;
        }
        print_identifier(&self.table, f)
    }
}

fn print_identifier(name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let begins = name.chars().next().is_some_and(begins_word);
    let plain = |c: char| continues_word(c) && !c.is_ascii_uppercase();
    if begins && name.chars().all(plain) {
        f.write_str(name)
    } else {
        write!(f, "\"{}\"", name.replace('"', "\"\""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(text: &str) -> String {
        text.parse::<Declaration>().unwrap().to_string()
    }

    fn problem(text: &str) -> (usize, Problem) {
        let error = text.parse::<Declaration>().unwrap_err();
        (error.position, error.problem)
    }

    #[test]
    fn names_are_read_as_postgresql_reads_them() {
        assert_eq!(
            canonical("read accounts, write stock"),
            "read accounts, write stock"
        );
        assert_eq!(
            canonical("  WRITE\n Stock ,Read\tShop . Accounts"),
            "write stock, read shop.accounts"
        );
        assert_eq!(
            canonical("read \"Stock\", read \"a\"\"b\".\"c d\""),
            "read \"Stock\", read \"a\"\"b\".\"c d\""
        );
        assert_eq!(canonical("read \"stock\""), "read stock");
        assert_eq!(canonical("read a$1, read _b"), "read _b, read a$1");
        assert_eq!(canonical("read Größe"), "read größe");
        assert_eq!(canonical("read ÄB"), "read Äb");
        assert_eq!(
            canonical("read read, write write"),
            "read read, write write"
        );
        assert_eq!(canonical("write\"1\""), "write \"1\"");
        assert_eq!(
            canonical("read a.b, read \"a.b\""),
            "read \"a.b\", read a.b"
        );
    }

    #[test]
    fn a_table_counts_once_and_a_write_wins() {
        assert_eq!(canonical("read a, write A, read a"), "write a");
        assert_eq!(canonical("read a, read a"), "read a");
        assert_eq!(canonical("read s.a, write a"), "write a, read s.a");
    }

    #[test]
    fn lists_of_names_are_read_as_declarations_are() {
        let names = |text: &str| {
            let names = TableName::list(text).map_err(|e| (e.position, e.problem))?;
            let names: Vec<_> = names.iter().map(TableName::to_string).collect();
            Ok(names.join(", "))
        };
        assert_eq!(
            names(" Accounts, shop . \"S\" "),
            Ok("accounts, shop.\"S\"".to_owned())
        );
        assert_eq!(names(""), Err((1, Problem::ExpectedName)));
        assert_eq!(names("a,"), Err((3, Problem::ExpectedName)));
        assert_eq!(names("read a"), Err((6, Problem::ExpectedComma)));
        let many = vec!["a"; TABLES_LIMIT + 1].join(",");
        assert_eq!(names(&many).map_err(|e| e.1), Err(Problem::TooManyTables));
    }

    #[test]
    fn errors_say_what_and_where() {
        use Problem as P;
        let long = "x".repeat(NAME_LIMIT + 1);
        let cases: [(&str, usize, Problem); 19] = [
            ("", 1, P::Empty),
            (" \n ", 4, P::Empty),
            ("stock", 1, P::ExpectedAccess),
            ("\"read\" stock", 1, P::ExpectedAccess),
            ("readstock", 1, P::ExpectedAccess),
            ("read a, b", 9, P::ExpectedAccess),
            ("read a,", 8, P::ExpectedAccess),
            (", read a", 1, P::ExpectedAccess),
            ("read", 5, P::ExpectedName),
            ("read 1a", 6, P::ExpectedName),
            ("read a.", 8, P::ExpectedName),
            ("read .a", 6, P::ExpectedName),
            ("read a b", 8, P::ExpectedComma),
            ("read a; drop table a", 7, P::ExpectedComma),
            ("read a.b.c", 9, P::TooManyParts),
            ("read \"a", 6, P::Unterminated),
            ("read \"\"", 6, P::ZeroLength),
            ("read \"a\0\"", 6, P::NullCharacter),
            ("read ä, write $", 15, P::ExpectedName),
        ];
        for (text, position, expected) in cases {
            assert_eq!(problem(text), (position, expected), "{text:?}");
        }
        assert_eq!(problem(&format!("read {long}")), (6, P::TooLong));
        assert_eq!(problem(&format!("read \"{long}\"")), (6, P::TooLong));
        let list = |count: usize| -> String {
            let items: Vec<String> = (0..count).map(|n| format!("read t{n}")).collect();
            items.join(",")
        };
        assert!(list(TABLES_LIMIT).parse::<Declaration>().is_ok());
        assert_eq!(problem(&list(TABLES_LIMIT + 1)).1, P::TooManyTables);
        assert_eq!(problem(&" ".repeat(TEXT_LIMIT + 1)), (1, P::TextTooLong));
        let error = "read a.b.c".parse::<Declaration>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "a table's name has at most a schema before it at character 9"
        );
    }
}
