//! The tables whose definition or content a utility statement changes and that it names, and the
//! setting to which a SET gives a value. Run by hooks.
//!
//! Not for: statements that name no table (DROP SCHEMA ... CASCADE): the hook of object accesses
//! sees these.

use std::ffi::CStr;

use pgrx::pg_sys::{self, NodeTag};

use crate::parse_tree::{List, Node, Part, at, nodes};

/// A table, by its schema, if it is given, and its name, in the server's encoding; and the
/// statement's effect on it.
#[derive(Debug, Clone, Copy)]
pub enum Touch<'t> {
    /// Changes its definition.
    Changes(Option<&'t CStr>, &'t CStr),
    /// Makes it a parent or child of another table.
    Joins(Option<&'t CStr>, &'t CStr),
    /// Subscribes the database to another one. No table is named.
    Subscribes,
}

/// The setting that a statement gives a value, and whether for the transaction only. Raises
/// nothing.
#[must_use]
pub fn set_statement(node: Node<'_>) -> Option<(&CStr, bool)> {
    let set = node.cast::<pg_sys::VariableSetStmt>()?;
    let gives = matches!(
        set.kind,
        pg_sys::VariableSetKind::VAR_SET_VALUE | pg_sys::VariableSetKind::VAR_SET_CURRENT
    );
    let is_local = set.is_local;
    let name = at!(set, name)?;
    gives.then_some((name, is_local))
}

/// Whether [`touched`] may find something. Raises nothing.
#[must_use]
pub fn may_touch(node: Node<'_>) -> bool {
    matches!(
        node.tag(),
        NodeTag::T_AlterTableStmt
            | NodeTag::T_RenameStmt
            | NodeTag::T_AlterObjectSchemaStmt
            | NodeTag::T_IndexStmt
            | NodeTag::T_CreateTrigStmt
            | NodeTag::T_RuleStmt
            | NodeTag::T_CreateStmt
            | NodeTag::T_CreateSubscriptionStmt
    )
}

fn name(range: Option<Part<'_, pg_sys::RangeVar>>) -> Option<(Option<&CStr>, &CStr)> {
    let range = range?;
    Some((at!(range, schemaname), at!(range, relname)?))
}

fn changes(range: Option<Part<'_, pg_sys::RangeVar>>) -> Option<Touch<'_>> {
    name(range).map(|(schema, name)| Touch::Changes(schema, name))
}

fn joins(range: Option<Part<'_, pg_sys::RangeVar>>) -> Option<Touch<'_>> {
    name(range).map(|(schema, name)| Touch::Joins(schema, name))
}

/// The tables that a statement names.
#[must_use]
pub fn touched(node: Node<'_>) -> Vec<Touch<'_>> {
    if let Some(alter) = node.cast::<pg_sys::AlterTableStmt>() {
        return altered(alter);
    }
    if let Some(rename) = node.cast::<pg_sys::RenameStmt>() {
        return changes(at!(rename, relation)).into_iter().collect();
    }
    if let Some(moved) = node.cast::<pg_sys::AlterObjectSchemaStmt>() {
        return changes(at!(moved, relation)).into_iter().collect();
    }
    if let Some(index) = node.cast::<pg_sys::IndexStmt>() {
        let index = (!index.concurrent).then_some(index);
        let touch = index.and_then(|index| changes(at!(index, relation)));
        return touch.into_iter().collect();
    }
    if let Some(trigger) = node.cast::<pg_sys::CreateTrigStmt>() {
        return changes(at!(trigger, relation)).into_iter().collect();
    }
    if let Some(rule) = node.cast::<pg_sys::RuleStmt>() {
        return changes(at!(rule, relation)).into_iter().collect();
    }
    if let Some(create) = node.cast::<pg_sys::CreateStmt>() {
        let parents: Option<List<'_>> = at!(create, inhRelations);
        let parents = parents.into_iter().flat_map(List::of::<pg_sys::RangeVar>);
        return parents.filter_map(|parent| joins(Some(parent))).collect();
    }
    if node.tag() == NodeTag::T_CreateSubscriptionStmt {
        return vec![Touch::Subscribes];
    }
    Vec::new()
}

fn altered(alter: Part<'_, pg_sys::AlterTableStmt>) -> Vec<Touch<'_>> {
    let own = || at!(alter, relation);
    let mut found: Vec<_> = changes(own()).into_iter().collect();
    for command in nodes(at!(alter, cmds)) {
        let Some(command) = command.cast::<pg_sys::AlterTableCmd>() else {
            continue;
        };
        let other = at!(command, def).and_then(|definition| {
            definition.cast::<pg_sys::RangeVar>().or_else(|| {
                let partition = definition.cast::<pg_sys::PartitionCmd>()?;
                at!(partition, name)
            })
        });
        let is_joined = matches!(
            command.subtype,
            pg_sys::AlterTableType::AT_AttachPartition | pg_sys::AlterTableType::AT_AddInherit
        );
        if is_joined {
            found.extend(joins(other));
            found.extend(joins(own()));
        }
    }
    found
}
