//! The objects that a DROP command would drop, seen before it runs, as by an event trigger.

use pgrx::pg_sys;

use crate::catalog::utf8_string;
use crate::parse_tree::{List, Node, at, tree};

/// A DROP command, as far as it can take an extension along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DropCommand {
    /// DROP EXTENSION of these names.
    Extensions(Vec<String>),
    /// DROP OWNED BY these roles.
    OwnedBy(Vec<pg_sys::Oid>),
    /// Something else.
    Other,
}

/// Look at the command that an event trigger was called for. `None` when the caller is not an event
/// trigger.
///
/// # Safety
/// `fcinfo` is the call that PostgreSQL made.
#[must_use]
pub unsafe fn from_event_trigger(fcinfo: pg_sys::FunctionCallInfo) -> Option<DropCommand> {
    // SAFETY: the caller passes a live call; PostgreSQL sets `context` to null or to a node, and
    // the tree of the command stays as it is while the trigger runs.
    let context: Node<'_> = unsafe { tree((*fcinfo).context) }?;
    let command = at!(context.cast::<pg_sys::EventTriggerData>()?, parsetree);
    Some(command.map_or(DropCommand::Other, of_statement))
}

/// The kind of DROP command of a statement. Looks roles up, in a transaction.
#[must_use]
pub fn of_statement(statement: Node<'_>) -> DropCommand {
    look(statement).unwrap_or(DropCommand::Other)
}

/// Whether a statement is a DROP EXTENSION. Raises nothing.
#[must_use]
pub fn may_drop_extension(statement: Node<'_>) -> bool {
    let dropped = statement.cast::<pg_sys::DropStmt>();
    dropped.is_some_and(|dropped| dropped.removeType == pg_sys::ObjectType::OBJECT_EXTENSION)
}

fn look(command: Node<'_>) -> Option<DropCommand> {
    if let Some(statement) = command.cast::<pg_sys::DropStmt>() {
        let names = at!(statement, objects).into_iter().flat_map(List::strings);
        let is_of_extensions = statement.removeType == pg_sys::ObjectType::OBJECT_EXTENSION;
        return is_of_extensions.then(|| DropCommand::Extensions(names.map(utf8_string).collect()));
    }
    let roles = at!(command.cast::<pg_sys::DropOwnedStmt>()?, roles);
    let roles = roles.into_iter().flat_map(List::of::<pg_sys::RoleSpec>);
    // SAFETY: a look-up of the role that a node names; the node is only looked at.
    let oid = |role| unsafe { pg_sys::get_rolespec_oid(role, true) };
    let oids = roles.map(|role| oid(role.as_ptr().cast_const()));
    Some(DropCommand::OwnedBy(oids.collect()))
}
