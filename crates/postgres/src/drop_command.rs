//! What a DROP command that is about to run would drop, as an event trigger sees it.

use std::ffi::CStr;

use pgrx::pg_sys;

use crate::catalog::utf8_string;

/// What is to be dropped, as far as it can take an extension along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DropCommand {
    /// DROP EXTENSION of these names.
    Extensions(Vec<String>),
    /// DROP OWNED BY these roles.
    OwnedBy(Vec<pg_sys::Oid>),
    /// Something else.
    Other,
}

/// Look at the command that an event trigger was called for. `None` when the caller is not an event trigger.
///
/// # Safety
/// `fcinfo` is the call that PostgreSQL made.
#[must_use]
pub unsafe fn from_event_trigger(fcinfo: pg_sys::FunctionCallInfo) -> Option<DropCommand> {
    // SAFETY: the caller passes a live call; PostgreSQL sets `context` to null or to a node, whose tag says what it is.
    unsafe {
        let context = (*fcinfo).context;
        if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_EventTriggerData {
            return None;
        }
        let parsetree = (*context.cast::<pg_sys::EventTriggerData>()).parsetree;
        if parsetree.is_null() {
            return Some(DropCommand::Other);
        }
        Some(match (*parsetree).type_ {
            pg_sys::NodeTag::T_DropStmt => {
                let statement = parsetree.cast::<pg_sys::DropStmt>();
                match (*statement).removeType {
                    pg_sys::ObjectType::OBJECT_EXTENSION => {
                        DropCommand::Extensions(strings((*statement).objects))
                    }
                    _ => DropCommand::Other,
                }
            }
            pg_sys::NodeTag::T_DropOwnedStmt => {
                let statement = parsetree.cast::<pg_sys::DropOwnedStmt>();
                let roles = elements((*statement).roles)
                    .map(|role| pg_sys::get_rolespec_oid(role.cast(), true))
                    .collect();
                DropCommand::OwnedBy(roles)
            }
            _ => DropCommand::Other,
        })
    }
}

/// Pointers of a list; none for NIL.
///
/// # Safety
/// `list` is null or a list of pointers that lives as long as the iterator.
unsafe fn elements(list: *mut pg_sys::List) -> impl Iterator<Item = *mut pg_sys::Node> {
    // SAFETY: `length` cells are there.
    let len = if list.is_null() {
        0
    } else {
        unsafe { (*list).length }
    };
    // SAFETY: as above.
    (0..usize::try_from(len).unwrap_or(0))
        .map(move |index| unsafe { (*(*list).elements.add(index)).ptr_value.cast() })
}

/// The strings of a list of String nodes.
///
/// # Safety
/// As `elements`, of nodes.
unsafe fn strings(list: *mut pg_sys::List) -> Vec<String> {
    // SAFETY: the tag is looked at before the node is read as a String.
    unsafe {
        elements(list)
            .filter(|node| (**node).type_ == pg_sys::NodeTag::T_String)
            .map(|node| utf8_string(CStr::from_ptr((*node.cast::<pg_sys::String>()).sval)))
            .collect()
    }
}
