//! Parses JSON texts (RFC 8259) in place: nothing is built, and a value is a slice of the text.
//!
//! The whole text is checked once, when a [`Node`] is made of it. Walking it afterwards allocates
//! only for strings with escapes. So memory is bounded by the length of the text, and time by a
//! small multiple of it.

use std::borrow::Cow;

use super::error::{JsonError, JsonErrorKind, Result};

/// Deepest nesting of objects and arrays. A record needs six.
const MAX_DEPTH: usize = 16;

/// A JSON value: its text, without white space around it, and its position.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node<'a> {
    text: &'a str,
    offset: usize,
}

impl<'a> Node<'a> {
    /// Parses a text with exactly one value.
    pub(super) fn parse(text: &'a [u8]) -> Result<Self> {
        let text = std::str::from_utf8(text)
            .map_err(|error| JsonError::new(error.valid_up_to(), JsonErrorKind::NotUtf8))?;
        let mut scan = Scan::new(text, 0);
        let node = scan.value(0)?;
        scan.skip_space();
        if scan.at < text.len() {
            return Err(scan.expected("end of the text"));
        }
        Ok(node)
    }

    pub(super) fn error(&self, kind: JsonErrorKind) -> JsonError {
        JsonError::new(self.offset, kind)
    }

    fn wrong<T>(&self, expected: &'static str) -> Result<T> {
        Err(self.error(JsonErrorKind::WrongType(expected)))
    }

    /// Returns the value's text.
    pub(super) fn text(&self) -> &'a str {
        self.text
    }

    fn first(&self) -> u8 {
        self.text.as_bytes().first().copied().unwrap_or_default()
    }

    pub(super) fn is_null(&self) -> bool {
        self.text == "null"
    }

    pub(super) fn is_object(&self) -> bool {
        self.first() == b'{'
    }

    pub(super) fn is_array(&self) -> bool {
        self.first() == b'['
    }

    pub(super) fn is_string(&self) -> bool {
        self.first() == b'"'
    }

    pub(super) fn is_number(&self) -> bool {
        matches!(self.first(), b'-' | b'0'..=b'9')
    }

    pub(super) fn boolean(&self) -> Result<bool> {
        match self.text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => self.wrong("true or false"),
        }
    }

    pub(super) fn string(&self) -> Result<Cow<'a, str>> {
        if !self.is_string() {
            return self.wrong("a string");
        }
        Scan::new(self.text, self.offset).string()
    }

    /// Returns a number's text.
    pub(super) fn number(&self) -> Result<&'a str> {
        if self.is_number() {
            Ok(self.text)
        } else {
            self.wrong("a number")
        }
    }

    /// Parses a whole number of type `T`, without fraction or exponent.
    pub(super) fn integer<T: std::str::FromStr>(&self, what: &'static str) -> Result<T> {
        let text = self.number()?;
        if text.contains(['.', 'e', 'E']) {
            return Err(self.error(JsonErrorKind::Malformed(what)));
        }
        text.parse()
            .map_err(|_| self.error(JsonErrorKind::OutOfRange(what)))
    }

    /// Returns the members of an object in their order.
    pub(super) fn members(&self) -> Result<Members<'a>> {
        if !self.is_object() {
            return self.wrong("an object");
        }
        Ok(Members(Items::new(self)))
    }

    /// Returns the elements of an array.
    pub(super) fn elements(&self) -> Result<Elements<'a>> {
        if !self.is_array() {
            return self.wrong("an array");
        }
        Ok(Elements(Items::new(self)))
    }
}

/// The items between brackets.
#[derive(Debug)]
struct Items<'a> {
    scan: Scan<'a>,
    done: bool,
}

impl<'a> Items<'a> {
    fn new(node: &Node<'a>) -> Self {
        let mut scan = Scan::new(node.text, node.offset);
        scan.at = 1;
        Self { scan, done: false }
    }

    /// Moves to the next item; returns false at the end. The text was checked, so separators are in
    /// their places.
    fn advance(&mut self) -> bool {
        if self.done {
            return false;
        }
        self.scan.skip_space();
        if self.scan.peek() == Some(b',') {
            self.scan.at += 1;
            self.scan.skip_space();
        }
        if matches!(self.scan.peek(), None | Some(b'}' | b']')) {
            self.done = true;
        }
        !self.done
    }
}

/// Iterator over an object's members: name, value. Names may repeat.
#[derive(Debug)]
pub(super) struct Members<'a>(Items<'a>);

impl<'a> Iterator for Members<'a> {
    type Item = Result<(Cow<'a, str>, Node<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.0.advance() {
            return None;
        }
        let member = self.0.scan.member(0);
        self.0.done |= member.is_err();
        Some(member)
    }
}

/// Iterator over an array's elements.
#[derive(Debug)]
pub(super) struct Elements<'a>(Items<'a>);

impl<'a> Iterator for Elements<'a> {
    type Item = Result<Node<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.0.advance() {
            return None;
        }
        let element = self.0.scan.value(0);
        self.0.done |= element.is_err();
        Some(element)
    }
}

#[derive(Debug)]
struct Scan<'a> {
    text: &'a str,
    /// Position of this text in the text that was given.
    offset: usize,
    at: usize,
}

impl<'a> Scan<'a> {
    fn new(text: &'a str, offset: usize) -> Self {
        Self {
            text,
            offset,
            at: 0,
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn fail(&self, kind: JsonErrorKind) -> JsonError {
        JsonError::new(self.offset + self.at, kind)
    }

    fn expected(&self, what: &'static str) -> JsonError {
        self.fail(JsonErrorKind::Expected(what))
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8, what: &'static str) -> Result<()> {
        if self.peek() == Some(byte) {
            self.at += 1;
            Ok(())
        } else {
            Err(self.expected(what))
        }
    }

    /// Checks the next value and returns its text.
    fn value(&mut self, depth: usize) -> Result<Node<'a>> {
        self.skip_space();
        let start = self.at;
        match self.peek() {
            Some(b'"') => self.skip_string()?,
            Some(b'{') => self.skip_items(depth, b'}', |scan, depth| {
                scan.skip_string()?;
                scan.skip_space();
                scan.take(b':', "\":\"")?;
                scan.value(depth).map(drop)
            })?,
            Some(b'[') => {
                self.skip_items(depth, b']', |scan, depth| scan.value(depth).map(drop))?
            }
            Some(b'-' | b'0'..=b'9') => self.skip_number()?,
            Some(b't') => self.word("true")?,
            Some(b'f') => self.word("false")?,
            Some(b'n') => self.word("null")?,
            _ => return Err(self.expected("a JSON value")),
        }
        Ok(Node {
            text: self.text.get(start..self.at).unwrap_or_default(),
            offset: self.offset + start,
        })
    }

    fn member(&mut self, depth: usize) -> Result<(Cow<'a, str>, Node<'a>)> {
        let name = self.string()?;
        self.skip_space();
        self.take(b':', "\":\"")?;
        Ok((name, self.value(depth)?))
    }

    fn skip_items(
        &mut self,
        depth: usize,
        close: u8,
        item: impl Fn(&mut Self, usize) -> Result<()>,
    ) -> Result<()> {
        if depth >= MAX_DEPTH {
            return Err(self.fail(JsonErrorKind::TooDeep));
        }
        self.at += 1;
        self.skip_space();
        if self.peek() == Some(close) {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.skip_space();
            item(self, depth + 1)?;
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(byte) if byte == close => {
                    self.at += 1;
                    return Ok(());
                }
                _ if close == b'}' => return Err(self.expected("\",\" or \"}\"")),
                _ => return Err(self.expected("\",\" or \"]\"")),
            }
        }
    }

    fn word(&mut self, word: &'static str) -> Result<()> {
        let rest = self.text.get(self.at..).unwrap_or_default();
        if !rest.starts_with(word) {
            return Err(self.expected("a JSON value"));
        }
        self.at += word.len();
        Ok(())
    }

    fn digits(&mut self) -> Result<()> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start {
            return Err(self.expected("a digit"));
        }
        Ok(())
    }

    fn skip_number(&mut self) -> Result<()> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    /// Checks a string without building it.
    fn skip_string(&mut self) -> Result<()> {
        self.take(b'"', "a string")?;
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => {
                    self.escape()?;
                }
                Some(byte) if byte >= 0x20 => self.at += 1,
                Some(_) => return Err(self.expected("an escape for a control character")),
                None => return Err(self.expected("the end of a string")),
            }
        }
    }

    fn string(&mut self) -> Result<Cow<'a, str>> {
        let start = self.at;
        self.skip_string()?;
        let inner = self
            .text
            .get(start + 1..self.at.saturating_sub(1))
            .unwrap_or_default();
        if !inner.contains('\\') {
            return Ok(Cow::Borrowed(inner));
        }
        let mut text = String::with_capacity(inner.len());
        let mut scan = Scan::new(inner, self.offset + start + 1);
        while let Some(byte) = scan.peek() {
            if byte == b'\\' {
                text.push(scan.escape()?);
                continue;
            }
            let from = scan.at;
            while scan.peek().is_some_and(|byte| byte != b'\\') {
                scan.at += 1;
            }
            text.push_str(inner.get(from..scan.at).unwrap_or_default());
        }
        Ok(Cow::Owned(text))
    }

    /// Returns the character of an escape.
    fn escape(&mut self) -> Result<char> {
        let bad = self.fail(JsonErrorKind::BadEscape);
        self.at += 1;
        let letter = self.peek();
        self.at += 1;
        Ok(match letter {
            Some(plain @ (b'"' | b'\\' | b'/')) => char::from(plain),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                let unit = self.hex4().ok_or_else(|| bad.clone())?;
                let code = if (0xd800..0xdc00).contains(&unit) {
                    let low = self.low_surrogate().ok_or_else(|| bad.clone())?;
                    0x1_0000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
                } else {
                    unit
                };
                return char::from_u32(code).ok_or(bad);
            }
            _ => return Err(bad),
        })
    }

    fn low_surrogate(&mut self) -> Option<u32> {
        for byte in [b'\\', b'u'] {
            if self.peek() != Some(byte) {
                return None;
            }
            self.at += 1;
        }
        self.hex4().filter(|unit| (0xdc00..0xe000).contains(unit))
    }

    fn hex4(&mut self) -> Option<u32> {
        let digits = self.text.get(self.at..self.at + 4)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        self.at += 4;
        u32::from_str_radix(digits, 16).ok()
    }
}
