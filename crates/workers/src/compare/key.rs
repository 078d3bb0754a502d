//! The columns of the key by which rows are compared, as SQL at each side. Run by the session that
//! compares.
//!
//! Both sides have a key of these columns, each with types and operators of its own
//! (`braid_bgworker::key_columns`). Some texts of one side can't be read at the other: names of
//! objects that only one side has, labels that only one side's enum has. Such a column is compared
//! by its text at both.

use braid_bgworker::compare::Key;
use braid_bgworker::key_columns::KeyColumn;
use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_postgres::rows::Rows;

use super::table::At;

/// A column of the key.
#[derive(Debug, Clone)]
pub(super) struct KeyPart {
    /// Quoted.
    name: String,
    here: KeyColumn,
    there: KeyColumn,
    /// The column is compared by its text.
    by_text: bool,
}

/// The columns that a side has, from the rows of its query.
pub(super) fn columns(rows: &Rows) -> Vec<KeyColumn> {
    rows.iter()
        .filter_map(|row| KeyColumn::read(|place| row.get(place)?.as_deref()))
        .collect()
}

impl KeyPart {
    /// The column with this name; `None` if a side does not have it. `words` say how each side
    /// orders it (`shape::ORDER`).
    pub(super) fn new(
        name: &str,
        sides: [&[KeyColumn]; 2],
        words: [Option<&str>; 2],
    ) -> Option<Self> {
        let [here, there] = sides.map(|side| side.iter().find(|column| column.name == *name));
        let (here, there) = (here?.clone(), there?.clone());
        let differ = |word: &str| word.starts_with("enum ") && words != [Some(word); 2];
        Some(Self {
            name: quote_identifier(name),
            by_text: here.is_reference
                || there.is_reference
                || words.into_iter().flatten().any(differ),
            here,
            there,
        })
    }

    /// Whether it is compared by its text.
    pub(super) fn is_by_text(&self) -> bool {
        self.by_text
    }

    fn at(&self, at: At) -> &KeyColumn {
        match at {
            At::Here => &self.here,
            At::There => &self.there,
        }
    }

    /// Returns the column as rows are selected and ordered by it.
    fn shown(&self) -> String {
        if self.by_text {
            format!("{}::text collate \"C\"", self.name)
        } else {
            self.name.clone()
        }
    }

    fn ordered(&self, at: At) -> String {
        if self.by_text {
            self.shown()
        } else {
            self.at(at).of_base(&self.name)
        }
    }

    fn value(&self, at: At, text: &str) -> String {
        let literal = quote_literal(text);
        if self.by_text {
            format!("{literal}::text")
        } else {
            self.at(at).value_of_base(&literal)
        }
    }

    fn equals(&self, at: At, text: &str) -> String {
        if self.by_text {
            format!("{} = {}", self.shown(), self.value(at, text))
        } else {
            self.at(at).equals(&self.name, &quote_literal(text))
        }
    }
}

/// The columns, as rows are selected and ordered by them.
pub(super) fn list(parts: &[KeyPart]) -> String {
    let shown: Vec<String> = parts.iter().map(KeyPart::shown).collect();
    shown.join(", ")
}

/// The condition that a row is behind, or before, a key in this side's order.
pub(super) fn beyond(parts: &[KeyPart], at: At, comparison: &str, key: &Key) -> String {
    let columns: Vec<String> = parts.iter().map(|part| part.ordered(at)).collect();
    let values: Vec<String> = parts
        .iter()
        .zip(key)
        .map(|(part, text)| part.value(at, text))
        .collect();
    format!(
        "({}) {comparison} ({})",
        columns.join(", "),
        values.join(", ")
    )
}

/// The condition that a row has a key.
pub(super) fn is(parts: &[KeyPart], at: At, key: &Key) -> String {
    let equal: Vec<String> = parts
        .iter()
        .zip(key)
        .map(|(part, text)| part.equals(at, text))
        .collect();
    equal.join(" and ")
}

/// The condition that a row has one of these keys.
pub(super) fn is_among(parts: &[KeyPart], at: At, keys: &[Key]) -> String {
    let single = match parts {
        [part] if !part.by_text => {
            let literals: Vec<String> = keys
                .iter()
                .flatten()
                .map(|text| quote_literal(text))
                .collect();
            part.at(at).is_among(&part.name, &literals)
        }
        _ => None,
    };
    single.unwrap_or_else(|| {
        let each: Vec<String> = keys
            .iter()
            .map(|key| format!("({})", is(parts, at, key)))
            .collect();
        format!("({})", each.join(" or "))
    })
}
