//! Quoting and parsing of SQL text.

/// Quotes an SQL string literal.
#[must_use]
pub fn quote_literal(value: &str) -> String {
    let escape = if value.contains('\\') { " E" } else { "" };
    format!(
        "{escape}'{}'",
        value.replace('\\', "\\\\").replace('\'', "''")
    )
}

/// Quotes a value in a replication command. A backslash is not escaped there: the grammar of these
/// commands has no `E''`.
#[must_use]
pub fn quote_option(value: &str) -> String {
    format!("'{}'", value.replace('\'', "''"))
}

/// Quotes an SQL identifier.
#[must_use]
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Returns the statement in the text of an EXPLAIN, a single statement that PostgreSQL has
/// accepted.
#[must_use]
pub fn explained(text: &str) -> &str {
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        rest = if let Some(comment) = rest.strip_prefix("--") {
            after(comment, comment.find('\n'))
        } else if let Some(comment) = rest.strip_prefix("/*") {
            after(comment, end_of_comment(comment))
        } else if let Some(options) = rest.strip_prefix('(') {
            after(options, options.find(')').map(|at| at + 1))
        } else {
            let word = rest.split(|c: char| !c.is_ascii_alphabetic()).next();
            let word = word.unwrap_or_default();
            let words = ["explain", "analyze", "analyse", "verbose"];
            if !words.iter().any(|known| word.eq_ignore_ascii_case(known)) {
                return rest;
            }
            after(rest, Some(word.len()))
        };
    }
}

fn after(text: &str, place: Option<usize>) -> &str {
    place.and_then(|at| text.get(at..)).unwrap_or_default()
}

/// Returns the end of a comment that has begun; comments can be nested.
fn end_of_comment(text: &str) -> Option<usize> {
    let mut depth = 1;
    let mut at = 0;
    while depth > 0 {
        let rest = text.get(at..)?;
        let (open, close) = (rest.find("/*"), rest.find("*/")?);
        let opens = open.is_some_and(|open| open < close);
        depth = if opens { depth + 1 } else { depth - 1 };
        at += 2 + open.filter(|_| opens).unwrap_or(close);
    }
    Some(at)
}

/// A part of a statement's text, and its replacement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// First byte of the part, as the parser counts; -1 if it is unknown.
    pub start: i32,
    /// The byte behind the part, as the parser counts; `None`: the part ends with the statement.
    pub end: Option<i32>,
    /// Words of which the part must begin with one, in upper or lower case.
    pub begins: &'static [&'static str],
    /// The replacement, in the statement's encoding.
    pub with: Vec<u8>,
}

/// Returns a statement's text with the edits applied. `place` is where the statement begins in the
/// text that the parser has read. `None` if a part does not begin as its edit says, or if parts
/// overlap.
#[must_use]
pub fn edited(text: &[u8], place: usize, edits: &[Edit]) -> Option<Vec<u8>> {
    let within = |position: i32| usize::try_from(position).ok()?.checked_sub(place);
    let mut sorted: Vec<&Edit> = edits.iter().collect();
    sorted.sort_by_key(|edit| edit.start);
    let (mut out, mut done) = (Vec::new(), 0);
    for edit in sorted {
        let start = within(edit.start)?;
        let end = match edit.end {
            Some(end) => within(end)?,
            None => text.len(),
        };
        let part = text.get(start..end)?;
        let begins_with = |word: &&str| {
            part.get(..word.len())
                .is_some_and(|first| first.eq_ignore_ascii_case(word.as_bytes()))
        };
        if !edit.begins.iter().any(begins_with) {
            return None;
        }
        out.extend_from_slice(text.get(done..start)?);
        out.extend_from_slice(&edit.with);
        done = end;
    }
    out.extend_from_slice(text.get(done..)?);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(start: i32, end: Option<i32>) -> Edit {
        Edit {
            start,
            end,
            begins: &["password", "encrypted"],
            with: b"- ".to_vec(),
        }
    }

    #[test]
    fn parts_of_a_statement_are_replaced() {
        let text = b"create role a PASSWORD 'x' login";
        let cut = |edits: &[Edit]| {
            edited(text, 10, edits).map(|text| String::from_utf8_lossy(&text).into_owned())
        };
        assert_eq!(
            cut(&[]).as_deref(),
            Some("create role a PASSWORD 'x' login")
        );
        let whole = edit(24, Some(37));
        assert_eq!(
            cut(std::slice::from_ref(&whole)).as_deref(),
            Some("create role a - login")
        );
        assert_eq!(cut(&[edit(24, None)]).as_deref(), Some("create role a - "));
        for wrong in [
            edit(23, None),
            edit(-1, None),
            edit(9, None),
            edit(24, Some(-1)),
            edit(24, Some(20)),
            edit(24, Some(28)),
            edit(24, Some(99)),
        ] {
            assert_eq!(cut(std::slice::from_ref(&wrong)), None, "{wrong:?}");
        }
        assert_eq!(cut(&[whole.clone(), whole]), None);
    }

    #[test]
    fn values_are_quoted_for_who_reads_them() {
        assert_eq!(quote_literal("it's"), "'it''s'");
        assert_eq!(quote_literal("a\\b"), " E'a\\\\b'");
        assert_eq!(quote_option("it's"), "'it''s'");
        assert_eq!(quote_option("a\\b"), "'a\\b'");
        assert_eq!(quote_identifier("a\"b\\"), "\"a\"\"b\\\"");
    }

    #[test]
    fn explain_is_taken_off() {
        for text in [
            "explain analyze create table t as select 1",
            "EXPLAIN (ANALYZE, FORMAT 'text')\n create table t as select 1",
            "/* a /* b */ */ explain -- c\n analyze verbose create table t as select 1",
            "create table t as select 1",
        ] {
            assert_eq!(explained(text), "create table t as select 1");
        }
        assert_eq!(explained("explain (analyze"), "");
        assert_eq!(explained("/* a"), "");
    }
}
