//! A reader of EDN text, for histories: all of EDN's forms, read one at a time.
//!
//! Any input gives a form or an error with its place. Nesting is bounded by [`MAX_DEPTH`].

use std::fmt;

use crate::value::is_name;

/// How deep forms may be nested.
pub const MAX_DEPTH: usize = 64;

/// An error in a history's text, with its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct EdnError {
    /// The line, from 1.
    pub line: usize,
    /// The character in the line, from 1.
    pub column: usize,
    /// The problem.
    pub problem: String,
}

/// A form, with the byte that it begins at.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Form {
    pub at: usize,
    pub is: Datum,
}

/// The kinds of forms that histories are made of. Others are kept as [`Datum::Other`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Datum {
    Nil,
    Bool(bool),
    Integer(i64),
    Keyword(String),
    Text(String),
    /// A vector or a list.
    Sequence(Vec<Form>),
    Map(Vec<(Form, Form)>),
    /// A symbol, a character, another number, a set.
    Other,
}

impl fmt::Display for Datum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nil => "nil",
            Self::Bool(_) => "a boolean",
            Self::Integer(_) => "an integer",
            Self::Keyword(_) => "a keyword",
            Self::Text(_) => "a string",
            Self::Sequence(_) => "a sequence",
            Self::Map(_) => "a map",
            Self::Other => "another form",
        })
    }
}

/// A place in the text, and what follows.
pub(crate) struct Reader<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Reader<'t> {
    pub fn new(text: &'t str) -> Self {
        Self { text, at: 0 }
    }

    /// Returns the place of the next byte.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Makes an error for the byte `at`.
    pub fn error(&self, at: usize, problem: impl Into<String>) -> EdnError {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = before.rsplit('\n').next().unwrap_or("");
        EdnError {
            line: before.bytes().filter(|byte| *byte == b'\n').count() + 1,
            column: line.chars().count() + 1,
            problem: problem.into(),
        }
    }

    fn peek(&self) -> Option<char> {
        self.text
            .get(self.at..)
            .and_then(|rest| rest.chars().next())
    }

    fn bump(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    /// Consumes the character if it is next.
    fn accept(&mut self, c: char) -> bool {
        let is = self.peek() == Some(c);
        if is {
            self.at += c.len_utf8();
        }
        is
    }

    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'t str {
        let from = self.at;
        while self.peek().is_some_and(&wanted) {
            self.bump();
        }
        self.text.get(from..self.at).unwrap_or("")
    }

    /// Skips white space, commas, comments and discarded forms.
    pub fn skip(&mut self, depth: usize) -> Result<(), EdnError> {
        loop {
            self.take_while(|c| c.is_whitespace() || c == ',');
            if self.peek() == Some(';') {
                self.take_while(|c| c != '\n');
            } else if self
                .text
                .get(self.at..)
                .is_some_and(|rest| rest.starts_with("#_"))
            {
                let at = self.at;
                self.at += 2;
                if self.form(depth + 1)?.is_none() {
                    return Err(self.error(at, "nothing follows #_"));
                }
            } else {
                return Ok(());
            }
        }
    }

    /// Consumes an opening bracket of a vector or list, and returns the one that closes it.
    pub fn open_sequence(&mut self) -> Option<char> {
        if self.accept('[') {
            Some(']')
        } else if self.accept('(') {
            Some(')')
        } else {
            None
        }
    }

    /// Consumes the bracket `close` if it is next, after what is skipped.
    pub fn close(&mut self, close: char, depth: usize) -> Result<bool, EdnError> {
        self.skip(depth)?;
        Ok(self.accept(close))
    }

    /// Reads the next form. `None` at the end of the text.
    pub fn form(&mut self, depth: usize) -> Result<Option<Form>, EdnError> {
        if depth > MAX_DEPTH {
            return Err(self.error(self.at, "forms are nested too deeply"));
        }
        self.skip(depth)?;
        let at = self.at;
        let Some(c) = self.peek() else {
            return Ok(None);
        };
        let is = match c {
            '[' | '(' => {
                self.bump();
                Datum::Sequence(self.forms(at, if c == '[' { ']' } else { ')' }, depth)?)
            }
            '{' => {
                self.bump();
                self.map(at, depth)?
            }
            '#' => return self.dispatch(at, depth).map(Some),
            '"' => {
                self.bump();
                Datum::Text(self.string(at)?)
            }
            '\\' => {
                self.bump();
                self.bump();
                self.take_while(|c| c.is_alphanumeric());
                Datum::Other
            }
            ':' => {
                self.bump();
                let name = self.take_while(|c| is_name(c) || c == ':' || c == '#');
                if name.is_empty() {
                    return Err(self.error(at, "keyword has no name"));
                }
                Datum::Keyword(name.to_owned())
            }
            c if is_name(c) => self.atom(at)?,
            ']' | ')' | '}' => return Err(self.error(at, format!("unexpected \"{c}\""))),
            c => return Err(self.error(at, format!("unexpected character {c:?}"))),
        };
        Ok(Some(Form { at, is }))
    }

    /// Reads forms up to the bracket `close`.
    fn forms(&mut self, from: usize, close: char, depth: usize) -> Result<Vec<Form>, EdnError> {
        let mut forms = Vec::new();
        while !self.close(close, depth)? {
            match self.form(depth + 1)? {
                Some(form) => forms.push(form),
                None => return Err(self.error(from, format!("missing \"{close}\""))),
            }
        }
        Ok(forms)
    }

    fn map(&mut self, at: usize, depth: usize) -> Result<Datum, EdnError> {
        let mut forms = self.forms(at, '}', depth)?.into_iter();
        let mut pairs = Vec::with_capacity(forms.len() / 2);
        while let Some(key) = forms.next() {
            let Some(value) = forms.next() else {
                return Err(self.error(key.at, "map has a key without a value"));
            };
            pairs.push((key, value));
        }
        Ok(Datum::Map(pairs))
    }

    /// Reads what begins with `#`: a set, a tagged form, or a symbolic number.
    fn dispatch(&mut self, at: usize, depth: usize) -> Result<Form, EdnError> {
        self.bump();
        if self.accept('{') {
            self.forms(at, '}', depth)?;
            return Ok(Form {
                at,
                is: Datum::Other,
            });
        }
        let symbolic = self.accept('#');
        if self.take_while(is_name).is_empty() {
            return Err(self.error(at, "tag has no name"));
        }
        if symbolic {
            return Ok(Form {
                at,
                is: Datum::Other,
            });
        }
        // A record is a map with a tag: the tag says nothing that its keys do not.
        match self.form(depth + 1)? {
            Some(form) => Ok(form),
            None => Err(self.error(at, "nothing follows a tag")),
        }
    }

    fn string(&mut self, from: usize) -> Result<String, EdnError> {
        let mut text = String::new();
        loop {
            let at = self.at;
            match self.bump() {
                None => return Err(self.error(from, "string has no end")),
                Some('"') => return Ok(text),
                Some('\\') => match self.bump() {
                    Some('n') => text.push('\n'),
                    Some('r') => text.push('\r'),
                    Some('t') => text.push('\t'),
                    Some('b') => text.push('\u{8}'),
                    Some('f') => text.push('\u{c}'),
                    Some('u') => text.push(self.unicode(at)?),
                    Some(c @ ('"' | '\\' | '\'')) => text.push(c),
                    _ => return Err(self.error(at, "unknown escape in string")),
                },
                Some(c) => text.push(c),
            }
        }
    }

    /// Reads the four digits of `\uXXXX`, or the two escapes of a surrogate pair.
    fn unicode(&mut self, at: usize) -> Result<char, EdnError> {
        let high = self.hex(at)?;
        let mut code = high;
        if (0xd800..0xdc00).contains(&high) && self.accept('\\') && self.accept('u') {
            let low = self.hex(at)?;
            if (0xdc00..0xe000).contains(&low) {
                code = 0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00);
            }
        }
        char::from_u32(code).ok_or_else(|| self.error(at, "escape is not a character"))
    }

    fn hex(&mut self, at: usize) -> Result<u32, EdnError> {
        let digits = self.text.get(self.at..self.at + 4).unwrap_or("");
        if digits.len() != 4 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(self.error(at, "\\u needs four hexadecimal digits"));
        }
        self.at += 4;
        u32::from_str_radix(digits, 16).map_err(|_| self.error(at, "escape is not a character"))
    }

    /// Reads a number, a symbol, `nil`, `true` or `false`.
    fn atom(&mut self, at: usize) -> Result<Datum, EdnError> {
        let token = self.take_while(|c| is_name(c) || c == ':' || c == '#');
        let unsigned = token.strip_prefix(['+', '-']).unwrap_or(token);
        if unsigned.starts_with(|c: char| c.is_ascii_digit()) {
            let digits = token.strip_suffix('N').unwrap_or(token);
            if unsigned
                .strip_suffix('N')
                .unwrap_or(unsigned)
                .bytes()
                .all(|b| b.is_ascii_digit())
            {
                return digits
                    .parse()
                    .map(Datum::Integer)
                    .map_err(|_| self.error(at, "integer does not fit into 64 bits"));
            }
            return Ok(Datum::Other);
        }
        Ok(match token {
            "nil" => Datum::Nil,
            "true" => Datum::Bool(true),
            "false" => Datum::Bool(false),
            _ => Datum::Other,
        })
    }
}
