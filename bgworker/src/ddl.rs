//! Decides whether a schema change of another node is run locally: the shapes of the tables that it
//! touches decide. Run by an applier.
//!
//! A shape is a set of lines, one for each part of a table: a key (`column "a"`), a tab, and its
//! definition. A statement comes with the lines that it has removed and added, and with digests of
//! the whole shape before and after.
//!
//! Not for: statements that touch no table; these are always run.

use std::collections::BTreeMap;

use braid_gir::{StatementTable, TableState};

/// The shape of a table of this database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Digest of all lines.
    pub digest: String,
    /// Lines of the shape.
    pub lines: Vec<String>,
}

/// Verdict on a received statement. None is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Each table is as it was at the statement's node: run the statement.
    Run,
    /// Each table already has the statement's result: do not run it.
    Done,
    /// A table has other parts, and the statement changes none of them: run the statement.
    Merge,
    /// A table has another form of a part that the statement changes.
    Conflict,
}

/// Returns the key of a line.
fn key(line: &str) -> &str {
    line.split_once('\t').map_or(line, |(key, _)| key)
}

/// Decides about one table. `before` and `after`: the shapes of the local tables with the names
/// that the table had before and after the statement.
fn about(table: &StatementTable, before: Option<&Shape>, after: Option<&Shape>) -> Verdict {
    match (&table.before, &table.after) {
        (None, None) => Verdict::Run,
        (Some(_), None) if before.is_none() => Verdict::Done,
        (Some(_), None) => Verdict::Run,
        (None, Some(state)) => match after {
            None => Verdict::Run,
            Some(here) if has_all(here, state, &table.added) => Verdict::Done,
            Some(_) => Verdict::Conflict,
        },
        (Some(was), Some(is)) => {
            let renames = (&was.namespace, &was.name) != (&is.namespace, &is.name);
            match (before, after) {
                (Some(_), Some(_)) if renames => Verdict::Conflict,
                (Some(here), _) => altered(table, was, is, here),
                (None, Some(here)) if has_all(here, is, &table.added) => Verdict::Done,
                _ => Verdict::Conflict,
            }
        }
    }
}

/// Returns whether a table has the state's digest, or at least these lines.
fn has_all(here: &Shape, state: &TableState, lines: &[String]) -> bool {
    here.digest == state.digest || lines.iter().all(|line| here.lines.contains(line))
}

/// Decides about an altered table that exists locally under its old name.
fn altered(table: &StatementTable, was: &TableState, is: &TableState, here: &Shape) -> Verdict {
    // A statement that does not change the shape, such as a comment or a grant, can be run again.
    if here.digest == was.digest || (table.added.is_empty() && table.removed.is_empty()) {
        return Verdict::Run;
    }
    let renames = (&was.namespace, &was.name) != (&is.namespace, &is.name);
    let parts: BTreeMap<&str, &String> = here.lines.iter().map(|line| (key(line), line)).collect();
    let has = |line: &String| parts.get(key(line)) == Some(&line);
    let is_replaced = |line: &String| table.added.iter().any(|new| key(new) == key(line));
    let all_added = table.added.iter().all(has);
    let none_removed = |line: &String| is_replaced(line) || !parts.contains_key(key(line));
    if !renames && all_added && table.removed.iter().all(none_removed) {
        return Verdict::Done;
    }
    let is_free = |line: &String| {
        !parts.contains_key(key(line)) || table.removed.iter().any(|old| key(old) == key(line))
    };
    if table.removed.iter().all(has) && table.added.iter().all(is_free) {
        return Verdict::Merge;
    }
    Verdict::Conflict
}

/// Decides about a statement. `shape` returns the shape of the local table with a name. Returns
/// also the table of a conflict.
///
/// # Errors
/// The errors of `shape`.
pub fn decide<E>(
    tables: &[StatementTable],
    mut shape: impl FnMut(&TableState) -> Result<Option<Shape>, E>,
) -> Result<(Verdict, Option<&StatementTable>), E> {
    let (mut all_done, mut merges) = (!tables.is_empty(), false);
    for table in tables {
        let mut of = |state: &Option<TableState>| match state {
            Some(state) => shape(state),
            None => Ok(None),
        };
        let (before, after) = (of(&table.before)?, of(&table.after)?);
        match about(table, before.as_ref(), after.as_ref()) {
            Verdict::Conflict => return Ok((Verdict::Conflict, Some(table))),
            Verdict::Done => {}
            Verdict::Merge => {
                merges = true;
                all_done = false;
            }
            Verdict::Run => all_done = false,
        }
    }
    let verdict = match (all_done, merges) {
        (true, _) => Verdict::Done,
        (false, true) => Verdict::Merge,
        (false, false) => Verdict::Run,
    };
    Ok((verdict, None))
}

/// Returns the lines that only the first shape has, and those that only the second has.
#[must_use]
pub fn difference(before: &[String], after: &[String]) -> (Vec<String>, Vec<String>) {
    let only = |some: &[String], others: &[String]| -> Vec<String> {
        some.iter()
            .filter(|line| !others.contains(line))
            .cloned()
            .collect()
    };
    (only(before, after), only(after, before))
}

/// Returns the first `most` characters of a text, for messages.
#[must_use]
pub fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(lines: &[&str]) -> Shape {
        Shape {
            digest: lines.join(";"),
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
        }
    }

    fn state(name: &str, lines: &[&str]) -> TableState {
        TableState {
            namespace: "public".to_owned(),
            name: name.to_owned(),
            digest: lines.join(";"),
        }
    }

    fn statement(before: Option<&[&str]>, after: Option<&[&str]>) -> StatementTable {
        let all = |lines: Option<&[&str]>| shape(lines.unwrap_or_default()).lines;
        let (removed, added) = difference(&all(before), &all(after));
        StatementTable {
            before: before.map(|lines| state("t", lines)),
            after: after.map(|lines| state("t", lines)),
            removed,
            added,
            publications: Vec::new(),
        }
    }

    /// Returns the verdict on a statement if table t has these lines.
    fn at(table: &StatementTable, here: Option<&[&str]>) -> Verdict {
        let tables = [table.clone()];
        let found = decide(&tables, |_| Ok::<_, ()>(here.map(shape)));
        found.unwrap().0
    }

    const A: &str = "column a\tinteger";
    const A_BIG: &str = "column a\tbigint";
    const B: &str = "column b\ttext";
    const B_OTHER: &str = "column b\tinteger";
    const C: &str = "column c\ttext";

    #[test]
    fn a_column_is_added_once() {
        let add_b = statement(Some(&[A]), Some(&[A, B]));
        assert_eq!(at(&add_b, Some(&[A])), Verdict::Run);
        assert_eq!(at(&add_b, Some(&[A, B])), Verdict::Done);
        assert_eq!(at(&add_b, Some(&[A, C])), Verdict::Merge);
        assert_eq!(at(&add_b, Some(&[A, C, B])), Verdict::Done);
        assert_eq!(at(&add_b, Some(&[A, B_OTHER])), Verdict::Conflict);
        assert_eq!(at(&add_b, None), Verdict::Conflict);
    }

    #[test]
    fn two_nodes_that_add_different_columns_end_alike() {
        let (add_b, add_c) = (
            statement(Some(&[A]), Some(&[A, B])),
            statement(Some(&[A]), Some(&[A, C])),
        );
        assert_eq!(at(&add_b, Some(&[A, C])), Verdict::Merge);
        assert_eq!(at(&add_c, Some(&[A, B])), Verdict::Merge);
    }

    #[test]
    fn a_type_is_changed_once_and_from_what_it_was() {
        let widen = statement(Some(&[A]), Some(&[A_BIG]));
        assert_eq!(at(&widen, Some(&[A])), Verdict::Run);
        assert_eq!(at(&widen, Some(&[A_BIG])), Verdict::Done);
        assert_eq!(at(&widen, Some(&[A_BIG, B])), Verdict::Done);
        assert_eq!(at(&widen, Some(&[A, B])), Verdict::Merge);
        assert_eq!(at(&widen, Some(&["column a\ttext"])), Verdict::Conflict);
        assert_eq!(at(&widen, Some(&[B])), Verdict::Conflict);
    }

    #[test]
    fn a_column_is_dropped_once() {
        let drop_b = statement(Some(&[A, B]), Some(&[A]));
        assert_eq!(at(&drop_b, Some(&[A, B])), Verdict::Run);
        assert_eq!(at(&drop_b, Some(&[A])), Verdict::Done);
        assert_eq!(at(&drop_b, Some(&[A, C])), Verdict::Done);
        assert_eq!(at(&drop_b, Some(&[A, B, C])), Verdict::Merge);
        assert_eq!(at(&drop_b, Some(&[A, B_OTHER])), Verdict::Conflict);
    }

    #[test]
    fn a_table_is_created_and_dropped_once() {
        let create = statement(None, Some(&[A, B]));
        assert_eq!(at(&create, None), Verdict::Run);
        assert_eq!(at(&create, Some(&[A, B])), Verdict::Done);
        assert_eq!(at(&create, Some(&[A, B, C])), Verdict::Done);
        assert_eq!(at(&create, Some(&[A])), Verdict::Conflict);
        let drop = statement(Some(&[A]), None);
        assert_eq!(at(&drop, Some(&[A, C])), Verdict::Run);
        assert_eq!(at(&drop, None), Verdict::Done);
    }

    #[test]
    fn a_table_is_renamed_once() {
        let mut rename = statement(Some(&[A]), Some(&[A]));
        rename.after = Some(state("u", &[A]));
        let tables = [rename];
        let verdict = |t: Option<&[&str]>, u: Option<&[&str]>| {
            let found = decide(&tables, |state| {
                Ok::<_, ()>(if state.name == "t" { t } else { u }.map(shape))
            });
            found.unwrap().0
        };
        assert_eq!(verdict(Some(&[A]), None), Verdict::Run);
        assert_eq!(verdict(Some(&[A, B]), None), Verdict::Run);
        assert_eq!(verdict(None, Some(&[A])), Verdict::Done);
        assert_eq!(verdict(Some(&[A]), Some(&[A])), Verdict::Conflict);
        assert_eq!(verdict(None, None), Verdict::Conflict);
    }

    #[test]
    fn what_leaves_the_shape_as_it_is_runs() {
        let comment = statement(Some(&[A]), Some(&[A]));
        assert_eq!(at(&comment, Some(&[A, B])), Verdict::Run);
        assert_eq!(decide(&[], |_| Ok::<_, ()>(None)), Ok((Verdict::Run, None)));
    }

    #[test]
    fn of_several_tables_each_counts() {
        let (done, run) = (
            statement(Some(&[A]), Some(&[A, B])),
            statement(None, Some(&[C])),
        );
        let tables = [done, run];
        let verdict = decide(&tables, |state| {
            Ok::<_, ()>(state.digest.contains(A).then(|| shape(&[A, B])))
        });
        assert_eq!(verdict, Ok((Verdict::Run, None)));
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(shortened("äöü", 2), "äö...");
        assert_eq!(shortened("äöü", 3), "äöü");
    }
}
