//! The captured statements that a session executes at this moment, the outermost first.
//!
//! A statement that fails leaves PostgreSQL's functions by a long jump. This module only learns of
//! the end of its transaction or subtransaction. So each entry has the nest level in which it
//! began, and is removed with that level.

use std::cell::RefCell;

use braid_gir::StatementTable;
use braid_postgres::schema_statement::{Alone, Form, RelationName, SchemaStatement};
use braid_postgres::{encoding, plain, schema_statement, transaction};
use pgrx::pg_sys;

use crate::sequence;

use super::columns::ColumnNames;
use super::facts::{self, IndexName, Known};
use super::intent;
use super::roles;
use super::store::{self, Captured};

/// A statement that is being executed.
#[derive(Debug)]
struct Open {
    level: i32,
    found: SchemaStatement,
    captured: Captured,
    /// The tables that it names, as they were before.
    before: Vec<Known>,
    names: ColumnNames,
    /// Statements that have run inside of this one, with the level at which each counts.
    inside: Vec<(i32, Captured)>,
    /// The table of CREATE TABLE AS exists.
    is_stored: bool,
    /// Invalid indexes of the tables that are written anew: other nodes do not have these.
    invalid: Vec<IndexName>,
    /// The schema of temporary objects, or 0, and lasting objects that depend on such ones.
    temporary: (u32, Vec<String>),
}

thread_local! {
    static OPEN: RefCell<Vec<Open>> = const { RefCell::new(Vec::new()) };
}

/// Forgets all.
pub(super) fn clear() {
    OPEN.with_borrow_mut(Vec::clear);
}

/// Forgets all but statements that commit on their way, in whose last transaction they are sent.
pub(super) fn keep_alone() {
    OPEN.with_borrow_mut(|open| open.retain(|statement| statement.found.is_alone()));
}

/// The innermost subtransaction is rolled back.
pub(super) fn level_aborted() {
    let level = transaction::nest_level();
    OPEN.with_borrow_mut(|open| {
        open.retain(|statement| statement.level < level);
        for statement in open {
            statement.inside.retain(|(inner, _)| *inner < level);
        }
    });
}

/// Makes the innermost subtransaction a part of its parent.
pub(super) fn level_committed() {
    let level = transaction::nest_level();
    OPEN.with_borrow_mut(|open| {
        for (inner, _) in open.iter_mut().flat_map(|statement| &mut statement.inside) {
            *inner = (*inner).min(level - 1);
        }
    });
}

/// Whether CREATE TABLE AS is being executed, and its table does not exist yet.
pub(super) fn awaits_table() -> bool {
    OPEN.with_borrow(|open| {
        open.last().is_some_and(|statement| {
            !statement.is_stored && matches!(statement.found.form, Form::CreateAs { .. })
        })
    })
}

/// A statement is about to be executed. Returns whether it is captured. In its transaction.
pub(super) fn begin(found: SchemaStatement, text: String) -> bool {
    let Some(schema) = store::temporary_schema_of_node() else {
        return false;
    };
    let there: Vec<pg_sys::Oid> = found
        .relations
        .iter()
        .filter_map(RelationName::find)
        .collect();
    if there.iter().any(|oid| schema_statement::is_own(*oid)) {
        return false;
    }
    if let Form::Numbers { bounds } = found.form
        && let Some(name) = there.iter().find_map(|oid| sequence::shared(*oid))
    {
        if bounds {
            sequence::is_kept(&name).raise();
        }
        // Where a sequence goes on within its node's numbers is no concern of others.
        return false;
    }
    let is_rewrite = matches!(found.form, Form::Alone(Alone::Rewrite));
    let invalid = facts::invalid_indexes(&there, is_rewrite);
    let is_drop = matches!(
        found.form,
        Form::Drop { .. } | Form::Alone(Alone::DropIndex)
    );
    if !invalid.is_empty() && !is_rewrite && !is_drop {
        // CREATE INDEX CONCURRENTLY has failed: no other node has received the index.
        return false;
    }
    let (own, lasting): (Vec<_>, Vec<_>) = there
        .into_iter()
        .partition(|oid| schema_statement::is_of_node(*oid));
    let mut text = text;
    if !own.is_empty() {
        // Of several, some may be of the schema.
        match drop_of_lasting(&found) {
            Some(rest) if !lasting.is_empty() => text = rest,
            _ => return false,
        }
    }
    let tables: Vec<_> = lasting
        .iter()
        .map(|oid| schema_statement::table_of(*oid))
        .collect();
    let is_alone = found.is_alone();
    if is_alone && tables.iter().any(|oid| is_of_system(*oid)) {
        return false;
    }
    // A statement that runs for long takes the locks that it needs by itself.
    let before = match &found.form {
        Form::Role(role) => roles::known(&roles::names(role), &[]),
        _ => facts::of_tables(&tables, !is_alone),
    };
    let statement = Open {
        level: transaction::nest_level(),
        captured: Captured::begin(&found.tag, text),
        found,
        before,
        names: ColumnNames::of(if is_alone { &[] } else { &tables }),
        inside: Vec::new(),
        is_stored: false,
        invalid,
        temporary: (schema, facts::on_temporary(schema)),
    };
    OPEN.with_borrow_mut(|open| open.push(statement));
    true
}

/// Whether PostgreSQL itself has brought a relation.
fn is_of_system(relation: pg_sys::Oid) -> bool {
    relation.to_u32() < pg_sys::FirstNormalObjectId
}

/// DROP of those relations of a list that are not temporary; `None` if the statement is another.
fn drop_of_lasting(found: &SchemaStatement) -> Option<String> {
    let Form::Drop {
        command,
        if_exists,
        cascade,
    } = found.form
    else {
        return None;
    };
    let names: Vec<String> = found
        .relations
        .iter()
        .filter(|name| !name.find().is_some_and(schema_statement::is_of_node))
        .map(facts::quoted)
        .collect();
    Some(format!(
        "{command} {}{}{}",
        if if_exists { "IF EXISTS " } else { "" },
        names.join(", "),
        if cascade { " CASCADE" } else { "" }
    ))
}

/// The table of the innermost statement, CREATE TABLE AS, is created; its rows are not inserted
/// yet.
pub(super) fn table_created(relation: pg_sys::Oid) {
    let taken = OPEN.with_borrow_mut(|open| {
        let statement = open.last_mut()?;
        let name = statement.found.relations.first()?.name.clone();
        let Form::CreateAs { clauses } = &statement.found.form else {
            return None;
        };
        Some((name, clauses.clone(), statement.captured.clone()))
    });
    let Some((name, clauses, mut captured)) = taken else {
        return;
    };
    // TOAST tables, and tables that functions of the query create, have other names.
    let Some(columns) = facts::columns_of(relation, &name) else {
        return;
    };
    transaction::next_command();
    let tables = facts::of_tables(&[relation], false);
    let Some(table) = tables.first() else {
        return;
    };
    let unlogged = if table.is_unlogged { "UNLOGGED " } else { "" };
    captured.tag = "CREATE TABLE".to_owned();
    captured.text = format!(
        "CREATE {unlogged}TABLE {} ({}){clauses}",
        table.quoted(),
        columns.join(", ")
    );
    OPEN.with_borrow_mut(|open| {
        if let Some(statement) = open.last_mut() {
            statement.is_stored = true;
        }
    });
    captured.tables = facts::changes(&[], &tables);
    captured.store();
}

/// The innermost statement has succeeded.
pub(super) fn finish() {
    let Some(statement) = OPEN.with_borrow_mut(Vec::pop) else {
        return;
    };
    let Open {
        found,
        mut captured,
        before,
        names,
        mut inside,
        temporary: (schema, dependent),
        invalid,
        ..
    } = statement;
    if matches!(found.form, Form::CreateAs { .. }) {
        // The table was sent when it was created, and statements inside of it by themselves.
        return;
    }
    transaction::next_command();
    let named: Vec<pg_sys::Oid> = found
        .relations
        .iter()
        .filter_map(RelationName::find)
        .collect();
    let is_left_out =
        |oid: &pg_sys::Oid| schema_statement::is_of_node(*oid) || schema_statement::is_own(*oid);
    // An object that depends on a temporary one can't be created on other nodes.
    if named.iter().any(is_left_out) || facts::on_temporary(schema) != dependent {
        return send(None, inside);
    }
    let mut tables: Vec<pg_sys::Oid> = before.iter().map(|known| known.oid).collect();
    for oid in named {
        let table = schema_statement::table_of(oid);
        if !tables.contains(&table) {
            tables.push(table);
        }
    }
    names.note_changes(braid_gir::mark_of(captured.id()));
    captured.tables = match &found.form {
        Form::Role(role) => {
            captured.settings.extend(roles::settings(role));
            facts::changes(&before, &roles::known(&roles::names(role), &tables))
        }
        _ => facts::changes(&before, &facts::of_tables(&tables, false)),
    };
    captured.filled = names.filled();
    if let Form::Alone(what) = found.form {
        intent::keep_own_lines(what, &mut captured.tables);
        if what == (Alone::CreateIndex { named: false })
            && let Some(text) = intent::with_name(&captured.tables)
        {
            captured.text = text;
        }
        captured.intent = Some(what);
    }
    let level = transaction::nest_level();
    inside.extend(
        facts::indexes_made_valid(&invalid)
            .into_iter()
            .filter_map(|table| Some((level, created_index(table)?))),
    );
    send(Some(captured), inside);
}

/// CREATE INDEX CONCURRENTLY of an index that has failed, and that REINDEX has made valid.
fn created_index(table: StatementTable) -> Option<Captured> {
    let tables = vec![table];
    let text = intent::with_name(&tables)?;
    let mut captured = Captured::begin("CREATE INDEX", text);
    captured.tables = tables;
    captured.intent = Some(Alone::CreateIndex { named: true });
    Some(captured)
}

/// Sends a statement that has succeeded, unless it is local, and those that have run inside of it.
/// If it is part of another statement, they follow that one.
fn send(captured: Option<Captured>, inside: Vec<(i32, Captured)>) {
    let level = transaction::nest_level();
    let own = captured.map(|captured| (level, captured));
    let all: Vec<_> = own.into_iter().chain(inside).collect();
    let rest = OPEN.with_borrow_mut(|open| match open.last_mut() {
        Some(outer) if !matches!(outer.found.form, Form::CreateAs { .. }) => {
            outer.inside.extend(all);
            Vec::new()
        }
        _ => all,
    });
    for (_, statement) in rest {
        statement.store();
    }
}

/// The role that a statement runs as.
pub(super) fn role() -> String {
    let name = plain::GetUserNameFromId(plain::GetUserId(), false);
    name.map_or_else(String::new, |name| encoding::utf8(&name))
}
