//! Parse trees, as views that are checked: a node is read as the type that its tag names, and its
//! pointers are null or lead to parts of the same tree. Run by hooks, event triggers and the output
//! plugin.
//!
//! Each tree is made a view once, by an `unsafe` function. All that is read below it is safe.
//!
//! Not for: the meaning of a statement (`schema_statement`, `drop_command`).

use std::ffi::{CStr, c_char};
use std::ops::Deref;

use pgrx::pg_sys::{self, NodeTag};

use crate::encoding;

/// A part of a parse tree that lives, and does not change, for `'t`. Its pointers are null or valid
/// as long.
#[derive(Debug)]
pub struct Part<'t, T>(&'t T);

/// Any node of a tree.
pub type Node<'t> = Part<'t, pg_sys::Node>;
/// A list, whose tag says of which kind its cells are.
pub type List<'t> = Part<'t, pg_sys::List>;

impl<T> Clone for Part<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Part<'_, T> {}

impl<T> Deref for Part<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

/// A type of nodes that a tag names.
pub trait NodeType: tagged::Sealed {
    /// The tag.
    #[must_use]
    fn tag() -> NodeTag {
        Self::TAG
    }
}

mod tagged {
    use pgrx::pg_sys;

    /// Implemented for the types below only: each has the tag of its name.
    pub trait Sealed {
        const TAG: pg_sys::NodeTag;
    }
}

macro_rules! node_types {
    ($($type:ident = $tag:ident,)*) => {$(
        impl tagged::Sealed for pg_sys::$type {
            const TAG: NodeTag = NodeTag::$tag;
        }
        impl NodeType for pg_sys::$type {}
    )*};
}

node_types! {
    AlterEnumStmt = T_AlterEnumStmt,
    AlterExtensionContentsStmt = T_AlterExtensionContentsStmt,
    AlterExtensionStmt = T_AlterExtensionStmt,
    AlterObjectDependsStmt = T_AlterObjectDependsStmt,
    AlterObjectSchemaStmt = T_AlterObjectSchemaStmt,
    AlterOwnerStmt = T_AlterOwnerStmt,
    AlterPolicyStmt = T_AlterPolicyStmt,
    AlterRoleSetStmt = T_AlterRoleSetStmt,
    AlterRoleStmt = T_AlterRoleStmt,
    AlterSeqStmt = T_AlterSeqStmt,
    AlterTableCmd = T_AlterTableCmd,
    AlterTableStmt = T_AlterTableStmt,
    CommentStmt = T_CommentStmt,
    Const = T_Const,
    CreateDomainStmt = T_CreateDomainStmt,
    CreateEnumStmt = T_CreateEnumStmt,
    CreateExtensionStmt = T_CreateExtensionStmt,
    CreateFunctionStmt = T_CreateFunctionStmt,
    CreatePolicyStmt = T_CreatePolicyStmt,
    CreateRangeStmt = T_CreateRangeStmt,
    CreateRoleStmt = T_CreateRoleStmt,
    CreateSchemaStmt = T_CreateSchemaStmt,
    CreateSeqStmt = T_CreateSeqStmt,
    CreateStatsStmt = T_CreateStatsStmt,
    CreateStmt = T_CreateStmt,
    CreateSubscriptionStmt = T_CreateSubscriptionStmt,
    CreateTableAsStmt = T_CreateTableAsStmt,
    CreateTrigStmt = T_CreateTrigStmt,
    DefElem = T_DefElem,
    DefineStmt = T_DefineStmt,
    DropOwnedStmt = T_DropOwnedStmt,
    DropRoleStmt = T_DropRoleStmt,
    DropStmt = T_DropStmt,
    EventTriggerData = T_EventTriggerData,
    ExplainStmt = T_ExplainStmt,
    FuncExpr = T_FuncExpr,
    ForeignKeyCacheInfo = T_ForeignKeyCacheInfo,
    GrantRoleStmt = T_GrantRoleStmt,
    GrantStmt = T_GrantStmt,
    IndexStmt = T_IndexStmt,
    IntoClause = T_IntoClause,
    List = T_List,
    PartitionCmd = T_PartitionCmd,
    PlannedStmt = T_PlannedStmt,
    Query = T_Query,
    RangeTblEntry = T_RangeTblEntry,
    RangeVar = T_RangeVar,
    RawStmt = T_RawStmt,
    RefreshMatViewStmt = T_RefreshMatViewStmt,
    ReindexStmt = T_ReindexStmt,
    RenameStmt = T_RenameStmt,
    ResTarget = T_ResTarget,
    RoleSpec = T_RoleSpec,
    RuleStmt = T_RuleStmt,
    SecLabelStmt = T_SecLabelStmt,
    SelectStmt = T_SelectStmt,
    String = T_String,
    TransactionStmt = T_TransactionStmt,
    VacuumRelation = T_VacuumRelation,
    VacuumStmt = T_VacuumStmt,
    VariableSetStmt = T_VariableSetStmt,
    ViewStmt = T_ViewStmt,
}

/// A pointer in a node: to a node of one type, to any node, or to a text.
pub trait Pointer<'t> {
    /// The view of the node or text that it points to.
    type View;

    /// The view; `None` for null.
    ///
    /// # Safety
    /// Null, or a part of a tree that lives, and stays as it is, for `'t`.
    unsafe fn view(self) -> Option<Self::View>;
}

impl<'t, T: NodeType + 't> Pointer<'t> for *mut T {
    type View = Part<'t, T>;

    unsafe fn view(self) -> Option<Part<'t, T>> {
        // SAFETY: as the caller says.
        unsafe { self.cast_const().as_ref() }.map(Part)
    }
}

impl<'t> Pointer<'t> for *mut pg_sys::Node {
    type View = Node<'t>;

    unsafe fn view(self) -> Option<Node<'t>> {
        // SAFETY: as the caller says.
        unsafe { self.cast_const().as_ref() }.map(Part)
    }
}

/// Declares pointers to texts.
macro_rules! texts {
    ($($pointer:ty),*) => {$(
        impl<'t> Pointer<'t> for $pointer {
            type View = &'t CStr;

            unsafe fn view(self) -> Option<&'t CStr> {
                // SAFETY: as the caller says; texts of a tree end with a zero byte.
                (!self.is_null()).then(|| unsafe { CStr::from_ptr(self) })
            }
        }
    )*};
}

texts!(*mut c_char, *const c_char);

/// The node or text to which a field of a part of a tree points; `None` for null.
macro_rules! at {
    ($part:expr, $field:ident) => {{
        let part: $crate::parse_tree::Part<'_, _> = $part;
        // SAFETY: a pointer in a part of a tree is null or leads to a part of the same tree.
        unsafe { $crate::parse_tree::follow(part, |node| node.$field) }
    }};
}
pub(crate) use at;

/// For [`at!`].
///
/// # Safety
/// `field` gives a field of the node.
pub(crate) unsafe fn follow<'t, T, P: Pointer<'t>>(
    part: Part<'t, T>,
    field: impl FnOnce(&T) -> P,
) -> Option<P::View> {
    // SAFETY: a field of a part points to another part of its tree, or to nothing.
    unsafe { field(part.0).view() }
}

/// The tree below a node that PostgreSQL gives away; `None` for null.
///
/// # Safety
/// Null, or a node. It and all below it are valid, and stay as they are, for `'t`.
#[must_use]
pub unsafe fn tree<'t, P: Pointer<'t>>(root: P) -> Option<P::View> {
    // SAFETY: as the caller says.
    unsafe { root.view() }
}

/// The name of the prepared transaction that a statement commits; `None` of any other statement.
#[must_use]
pub fn committed_name(statement: Node<'_>) -> Option<&CStr> {
    let statement = statement.cast::<pg_sys::TransactionStmt>()?;
    let commits = pg_sys::TransactionStmtKind::TRANS_STMT_COMMIT_PREPARED;
    (statement.kind == commits).then_some(())?;
    at!(statement, gid)
}

impl<'t> Node<'t> {
    /// The kind of the node.
    #[must_use]
    pub fn tag(self) -> NodeTag {
        self.0.type_
    }

    /// The node as one of a type; `None` if it is of another.
    #[must_use]
    pub fn cast<T: NodeType>(self) -> Option<Part<'t, T>> {
        let same = self.tag() == <T as tagged::Sealed>::TAG;
        // SAFETY: a node whose tag is that of the type is one of it.
        same.then(|| Part(unsafe { &*std::ptr::from_ref(self.0).cast::<T>() }))
    }

    /// PostgreSQL's own pointer, for functions that only look at the node.
    #[must_use]
    pub fn as_ptr(self) -> *mut pg_sys::Node {
        std::ptr::from_ref(self.0).cast_mut()
    }

    /// Command tag of a statement.
    #[must_use]
    pub fn command_tag(self) -> String {
        // SAFETY: both functions look at the statement only; the name is a constant.
        let name = unsafe {
            CStr::from_ptr(pg_sys::GetCommandTagName(pg_sys::CreateCommandTag(
                self.as_ptr(),
            )))
        };
        crate::catalog::utf8_string(name)
    }
}

impl<'t, T: NodeType> Part<'t, T> {
    /// PostgreSQL's own pointer, for functions that only look at the node.
    #[must_use]
    pub fn as_ptr(self) -> *mut T {
        std::ptr::from_ref(self.0).cast_mut()
    }
}

impl<'t> List<'t> {
    fn cells(self) -> &'t [pg_sys::ListCell] {
        let count = usize::try_from(self.length).unwrap_or(0);
        // SAFETY: a list has so many cells, as long as it lives.
        unsafe { std::slice::from_raw_parts(self.elements, count) }
    }

    /// The list's nodes; none if it is a list of numbers.
    pub fn nodes(self) -> impl Iterator<Item = Node<'t>> {
        let is_of_nodes = self.type_ == NodeTag::T_List;
        self.cells().iter().filter_map(move |cell| {
            // SAFETY: a cell of such a list of a tree is null or a node of the tree.
            is_of_nodes
                .then(|| unsafe { cell.ptr_value.cast::<pg_sys::Node>().view() })
                .flatten()
        })
    }

    /// The list's nodes of one type.
    pub fn of<T: NodeType + 't>(self) -> impl Iterator<Item = Part<'t, T>> {
        self.nodes().filter_map(Node::cast)
    }

    /// The texts of its String nodes.
    pub fn strings(self) -> impl Iterator<Item = &'t CStr> {
        self.of::<pg_sys::String>()
            .filter_map(|string| at!(string, sval))
    }
}

impl<'t> Part<'t, pg_sys::DefElem> {
    /// Name of the option, in UTF-8, and its value, if that is a string.
    #[must_use]
    pub fn name_and_string(self) -> (String, Option<String>) {
        let value = at!(self, arg).and_then(Node::cast::<pg_sys::String>);
        let value = value.and_then(|string| at!(string, sval));
        (
            at!(self, defname).map_or_else(String::new, encoding::utf8),
            value.map(encoding::utf8),
        )
    }
}

/// Nodes of a list; none for an empty one, which PostgreSQL has as null.
pub(crate) fn nodes<'t>(list: Option<List<'t>>) -> impl Iterator<Item = Node<'t>> {
    list.into_iter().flat_map(List::nodes)
}

/// The nodes of a list, for code that changes them; none of a null list.
///
/// # Safety
/// Null, or a list of nodes that stays as it is for `'l`.
pub(crate) unsafe fn raw_nodes<'l>(
    list: *mut pg_sys::List,
) -> impl Iterator<Item = *mut pg_sys::Node> + 'l {
    // SAFETY: as the caller says.
    let cells = unsafe { list.as_ref().map_or(&[][..], |list| Part(list).cells()) };
    // SAFETY: a list of nodes has pointers in its cells.
    cells
        .iter()
        .map(|cell| unsafe { cell.ptr_value.cast::<pg_sys::Node>() })
}
