//! CHECK constraints of tables that consist of one call of a function. Run by sessions that execute
//! statements, and by walsenders, in a transaction.
//!
//! A constraint is read from the caches, as it was before the statement that runs, until that
//! statement's commands count.
//!
//! Not for: the meaning of the function and of the constraint.

use std::ffi::{CStr, CString};

use pgrx::pg_sys;

use crate::encoding::raw_name;
use crate::parse_tree::{List, Node, at, tree};
use crate::syscache::{ConstraintRow, FunctionRow, namespace_name};
use crate::table_expression::columns_of;
use crate::table_scan::low;

/// A CHECK constraint that is a call of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckCall {
    /// The constraint.
    pub constraint: pg_sys::Oid,
    /// The constraint's table.
    pub table: pg_sys::Oid,
    /// Schema of the function, in the server's encoding.
    pub schema: CString,
    /// Name of the function, in the server's encoding.
    pub function: CString,
    /// The relation that its first argument is, if that is a constant of type regclass.
    pub relation: Option<pg_sys::Oid>,
    /// Numbers of the columns that it uses, in their order.
    pub columns: Vec<i16>,
}

impl CheckCall {
    /// The constraint of a table that has a name, in the server's encoding; `None` if there is
    /// none, or it is something else.
    #[must_use]
    pub fn of_table(table: pg_sys::Oid, name: &CStr) -> Option<Self> {
        // SAFETY: a look-up by a name that ends with a zero byte; without such a constraint it
        // gives an invalid OID.
        let oid = unsafe { pg_sys::get_relation_constraint_oid(table, name.as_ptr(), true) };
        Self::find(oid, name)
    }

    /// The constraint with an OID, if it has this name, in the server's encoding.
    #[must_use]
    pub fn find(constraint: pg_sys::Oid, name: &CStr) -> Option<Self> {
        if constraint == pg_sys::InvalidOid {
            return None;
        }
        let row = ConstraintRow::find(constraint)?;
        let is_it = raw_name(&row.conname) == name
            && row.contype.cast_unsigned() == b'c'
            && row.conrelid != pg_sys::InvalidOid;
        if !is_it {
            return None;
        }
        let text = row.expression()?;
        // SAFETY: PostgreSQL has written the text of the tree, which is in the current context.
        let expression: Node<'_> =
            unsafe { tree(pg_sys::stringToNode(text.as_ptr()).cast::<pg_sys::Node>()) }?;
        let call = expression.cast::<pg_sys::FuncExpr>()?;
        let function = FunctionRow::find(call.funcid)?;
        let arguments: Option<List<'_>> = at!(call, args);
        let first = arguments.and_then(|arguments| arguments.nodes().next());
        let first = first.and_then(Node::cast::<pg_sys::Const>);
        let relation = first
            .filter(|first| first.consttype == pg_sys::REGCLASSOID && !first.constisnull)
            .map(|first| pg_sys::Oid::from(low(first.constvalue)));
        Some(Self {
            constraint,
            table: row.conrelid,
            schema: namespace_name(function.pronamespace)?,
            function: raw_name(&function.proname).to_owned(),
            relation,
            // SAFETY: the expression of a CHECK constraint, in which its table is number 1.
            columns: unsafe { columns_of(expression.as_ptr()) },
        })
    }
}
