//! Statements about roles: reads one from its parse tree, and runs one whose password is in no
//! text. Run by sessions, in the hook of utility statements, and by appliers.
//!
//! A statement's text without its password can be shown to everybody: the part from the word
//! PASSWORD to the next option is cut out. To run it, the stored form of the password is put into
//! the parse tree. So no error, log or view of statements has it.
//!
//! Not for: the attributes of a role, and the handling of a statement (`braid_node::ddl`).

use std::ffi::{CStr, CString};

use braid_bgworker::sql_text::{self, Edit};
use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys::{self, NodeTag, ObjectType, RoleSpecType};

use crate::encoding;
use crate::error::PgError;
use crate::parse_tree::{List, Node, NodeType, Part, at};
use crate::{plain, snapshot, top_level};

/// A statement about roles.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoleStatement {
    /// Roles whose attributes, settings or memberships it may change. One whose password it sets is
    /// the first.
    pub roles: Vec<CString>,
    /// A password is set, or removed.
    pub has_password: bool,
    /// The database whose settings are changed, if one is named.
    pub database: Option<CString>,
    /// The setting whose value is taken from the session (`SET ... FROM CURRENT`).
    pub from_current: Option<CString>,
    /// Parts of the text that mean something else on another node, or that must stay secret.
    pub edits: Vec<Edit>,
}

/// Stands in the place of a password.
const LEFT_OUT: &str = "/* password left out */ ";

const SESSION_USER: &str = "session_user";

/// Looks at a utility statement. Returns `None` if it is not about roles, or about the objects that
/// they own.
#[must_use]
pub fn look(node: Node<'_>) -> Option<RoleStatement> {
    let mut found = RoleStatement::default();
    match node.tag() {
        NodeTag::T_CreateRoleStmt => {
            let create = node.cast::<pg_sys::CreateRoleStmt>()?;
            found.roles.extend(at!(create, role).map(CStr::to_owned));
            found.options(at!(create, options));
        }
        NodeTag::T_AlterRoleStmt => {
            let alter = node.cast::<pg_sys::AlterRoleStmt>()?;
            found.role(at!(alter, role));
            found.options(at!(alter, options));
        }
        NodeTag::T_AlterRoleSetStmt => {
            let alter = node.cast::<pg_sys::AlterRoleSetStmt>()?;
            found.role(at!(alter, role));
            found.database = at!(alter, database).map(CStr::to_owned);
            let set = at!(alter, setstmt)?;
            if set.kind == pg_sys::VariableSetKind::VAR_SET_CURRENT {
                found.from_current = at!(set, name).map(CStr::to_owned);
            }
        }
        NodeTag::T_DropRoleStmt => {
            found.listed(at!(node.cast::<pg_sys::DropRoleStmt>()?, roles));
        }
        NodeTag::T_GrantRoleStmt => {
            let grant = node.cast::<pg_sys::GrantRoleStmt>()?;
            found.listed(at!(grant, grantee_roles));
            // A grantor's own memberships stay.
            let kept = found.roles.len();
            found.role(at!(grant, grantor));
            found.roles.truncate(kept);
        }
        NodeTag::T_RenameStmt => {
            let rename = node.cast::<pg_sys::RenameStmt>()?;
            is_of_role(rename.renameType)?;
            found.roles.extend(at!(rename, subname).map(CStr::to_owned));
        }
        NodeTag::T_CommentStmt => {
            let comment = node.cast::<pg_sys::CommentStmt>()?;
            is_of_role(comment.objtype)?;
            found.named(at!(comment, object));
        }
        NodeTag::T_SecLabelStmt => {
            let label = node.cast::<pg_sys::SecLabelStmt>()?;
            is_of_role(label.objtype)?;
            found.named(at!(label, object));
        }
        _ => return None,
    }
    Some(found)
}

fn is_of_role(kind: ObjectType::Type) -> Option<()> {
    (kind == ObjectType::OBJECT_ROLE).then_some(())
}

impl RoleStatement {
    fn named(&mut self, object: Option<Node<'_>>) {
        let name = object.and_then(Node::cast::<pg_sys::String>);
        let name = name.and_then(|name| at!(name, sval));
        self.roles.extend(name.map(CStr::to_owned));
    }

    fn listed(&mut self, roles: Option<List<'_>>) {
        for role in roles.into_iter().flat_map(List::of) {
            self.role(Some(role));
        }
    }

    /// Takes a role by its name. The session's user is another one where the statement comes to.
    fn role(&mut self, role: Option<Part<'_, pg_sys::RoleSpec>>) {
        let Some(role) = role else { return };
        let name = match role.roletype {
            RoleSpecType::ROLESPEC_CSTRING => at!(role, rolename).map(CStr::to_owned),
            RoleSpecType::ROLESPEC_CURRENT_ROLE | RoleSpecType::ROLESPEC_CURRENT_USER => {
                plain::GetUserNameFromId(plain::GetUserId(), true)
            }
            RoleSpecType::ROLESPEC_SESSION_USER => {
                let name = plain::GetUserNameFromId(plain::GetSessionUserId(), true);
                self.edits.extend(name.as_deref().map(|name| Edit {
                    start: role.location,
                    end: role.location.checked_add(12),
                    begins: &[SESSION_USER],
                    with: quoted(name),
                }));
                name
            }
            _ => None,
        };
        self.roles.extend(name);
    }

    fn options(&mut self, options: Option<List<'_>>) {
        let mut options = options
            .into_iter()
            .flat_map(List::of::<pg_sys::DefElem>)
            .peekable();
        while let Some(option) = options.next() {
            let listed = at!(option, arg).and_then(Node::cast::<pg_sys::List>);
            match at!(option, defname) {
                Some(name) if name == c"password" => {
                    self.has_password = true;
                    self.edits.push(Edit {
                        start: option.location,
                        end: options.peek().map(|next| next.location),
                        begins: &["password", "encrypted"],
                        with: LEFT_OUT.as_bytes().to_vec(),
                    });
                }
                Some(name) if name == c"rolemembers" || name == c"adminmembers" => {
                    self.listed(listed);
                }
                Some(name) if name == c"addroleto" => {
                    let kept = self.roles.len();
                    self.listed(listed);
                    self.roles.truncate(kept);
                }
                _ => {}
            }
        }
    }
}

/// A role's name in SQL, in the server's encoding.
fn quoted(name: &CStr) -> Vec<u8> {
    // SAFETY: the function gives the name itself, or a copy in the current context.
    let name = unsafe { CStr::from_ptr(pg_sys::quote_identifier(name.as_ptr())) };
    name.to_bytes().to_vec()
}

/// A statement's text, with its edits. `place` is where it begins in what `edits` count in.
///
/// # Errors
/// 0A000 where a part is not where the statement says.
pub(crate) fn edited(text: &[u8], place: usize, edits: &[Edit]) -> Result<CString, PgError> {
    let edited = sql_text::edited(text, place, edits).and_then(|text| CString::new(text).ok());
    edited.ok_or_else(misplaced)
}

fn misplaced() -> PgError {
    PgError::new(
        SqlState::FeatureNotSupported,
        "this statement cannot be sent to other nodes, as its text does not show its password or a role",
    )
    .with_hint("Run the statement by itself, or with braid.replicate_roles off on each node.")
}

/// Runs a statement about roles in the current transaction: with a password in the form in which it
/// is stored, or with none (`Some(None)`). Settings for a database are set for this one.
///
/// # Errors
/// 42601 for another number of statements; 08P01 for a statement that takes no password. Raises the
/// errors of the statement.
pub fn run(text: &str, password: Option<Option<&str>>) -> Result<(), PgError> {
    let (planned, text) = top_level::planned(text)?;
    // SAFETY: a tree of its own, in the current context, of which nobody has a view.
    unsafe { complete((*planned).utilityStmt, password) }?;
    snapshot::push();
    top_level::execute_within(planned, text);
    snapshot::pop();
    Ok(())
}

/// # Safety
/// The tree of a statement that nobody else looks at. In a transaction.
unsafe fn complete(node: *mut pg_sys::Node, password: Option<Option<&str>>) -> Result<(), PgError> {
    // SAFETY: no other code looks at the tree; a node is of the type that its tag says. The
    // additions are copies in the current context, as the tree is.
    unsafe {
        if let Some(drop) = typed::<pg_sys::DropRoleStmt>(node) {
            // Of several, some may be gone.
            (*drop).missing_ok = true;
        }
        if let Some(set) = typed::<pg_sys::AlterRoleSetStmt>(node)
            && !(*set).database.is_null()
        {
            (*set).database = pg_sys::get_database_name(pg_sys::MyDatabaseId);
        }
        let Some(password) = password else {
            return Ok(());
        };
        let options = match (
            typed::<pg_sys::CreateRoleStmt>(node),
            typed::<pg_sys::AlterRoleStmt>(node),
        ) {
            (Some(create), _) => &raw mut (*create).options,
            (None, Some(alter)) => &raw mut (*alter).options,
            (None, None) => {
                return Err(PgError::new(
                    SqlState::ProtocolViolation,
                    "a statement from the provider takes no password",
                ));
            }
        };
        let value = password.map_or(std::ptr::null_mut(), |password| {
            let password = encoding::statement(password);
            pg_sys::makeString(pg_sys::pstrdup(password.as_ptr())).cast::<pg_sys::Node>()
        });
        let option = pg_sys::makeDefElem(pg_sys::pstrdup(c"password".as_ptr()), value, -1);
        *options = pg_sys::lappend(*options, option.cast());
    }
    Ok(())
}

/// A node as one of a type; `None` if it is of another.
///
/// # Safety
/// A node.
unsafe fn typed<T: NodeType>(node: *mut pg_sys::Node) -> Option<*mut T> {
    // SAFETY: as the caller says.
    unsafe { (*node).type_ == T::tag() }.then(|| node.cast())
}
