//! Expressions over the columns of one table, given as text. Run by sessions, in a transaction.
//!
//! PostgreSQL's own parser and planner read the text, under the session's search path. Only
//! functions of constants are executed, when the planner folds them. These can be the table's
//! owner's, so all of it runs with the owner's rights, confined.
//!
//! Not for: evaluating an expression, and its purpose.

use std::ptr::null_mut;

use braid_bgworker::sqlstate::SqlState;
use pgrx::pg_sys::{self, NodeTag, RawParseMode};

use crate::catalog::{Rights, with_rights};
use crate::encoding;
use crate::error::PgError;
use crate::parse_tree::{List, Node, Part, at, nodes, tree};
use crate::relation::RelationRef;

/// An expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableExpression {
    /// As PostgreSQL writes it, in UTF-8.
    pub text: String,
    /// The expression's type.
    pub of: pg_sys::Oid,
    /// The expression's collation; invalid for none.
    pub collation: pg_sys::Oid,
    /// Numbers of the columns that it uses, in their order: 0 for the whole row, below that for
    /// system columns.
    pub columns: Vec<i16>,
    /// The expression is a column, and nothing else.
    pub is_column: bool,
    /// The expression has the same result for the same row at any time, under any setting.
    pub is_immutable: bool,
}

impl TableExpression {
    /// Reads an expression as a CHECK constraint of the table could have it: without subqueries,
    /// aggregates, window functions, and functions that return sets.
    ///
    /// Raises PostgreSQL's errors.
    ///
    /// # Errors
    /// 42601 for a text that is no expression, or more than one.
    pub fn read(table: RelationRef<'_>, text: &str) -> Result<Self, PgError> {
        with_rights(Rights::OwnerOf(table.oid()), || read(table, text))
    }
}

fn read(table: RelationRef<'_>, text: &str) -> Result<TableExpression, PgError> {
    let statement = encoding::statement(&format!("select {text}\n"));
    // SAFETY: a C string. The parser gives a tree of its own in the current context; nobody changes
    // it before it is transformed.
    let parsed: Option<List<'_>> = unsafe {
        tree(pg_sys::raw_parser(
            statement.as_ptr(),
            RawParseMode::RAW_PARSE_DEFAULT,
        ))
    };
    let raw = only_expression(parsed).ok_or_else(|| {
        PgError::new(
            SqlState::SyntaxError,
            "text is not one expression over the columns of the table",
        )
    })?;
    // SAFETY: in a transaction, with the table open. All nodes are in the current context; the
    // planner gets a copy of its own.
    unsafe {
        let state = pg_sys::make_parsestate(null_mut());
        let lock = pg_sys::AccessShareLock.cast_signed();
        let item = pg_sys::addRangeTableEntryForRelation(
            state,
            table.as_ptr(),
            lock,
            null_mut(),
            false,
            true,
        );
        pg_sys::addNSItemToQuery(state, item, true, true, true);
        let kind = pg_sys::ParseExprKind::EXPR_KIND_CHECK_CONSTRAINT;
        let expression = pg_sys::transformExpr(state, raw.as_ptr(), kind);
        pg_sys::assign_expr_collations(state, expression);
        pg_sys::free_parsestate(state);
        let copy = pg_sys::copyObjectImpl(expression.cast());
        let planned = pg_sys::expression_planner(copy.cast());
        let context = pg_sys::deparse_context_for(table.raw_name().as_ptr(), table.oid());
        let written = pg_sys::deparse_expression(expression, context, false, false);
        Ok(TableExpression {
            text: encoding::from_server(written),
            of: pg_sys::exprType(expression),
            collation: pg_sys::exprCollation(expression),
            columns: columns_of(expression),
            is_column: (*expression).type_ == NodeTag::T_Var,
            is_immutable: !pg_sys::contain_mutable_functions(planned.cast()),
        })
    }
}

/// The expression of a statement `select EXPRESSION` with nothing else.
fn only_expression(parsed: Option<List<'_>>) -> Option<Node<'_>> {
    let statements: Vec<Node<'_>> = nodes(parsed).collect();
    let [statement] = statements.as_slice() else {
        return None;
    };
    let select = at!(statement.cast::<pg_sys::RawStmt>()?, stmt)?;
    let select: Part<'_, pg_sys::SelectStmt> = select.cast()?;
    let lists = [
        select.distinctClause,
        select.fromClause,
        select.groupClause,
        select.windowClause,
        select.valuesLists,
        select.sortClause,
        select.lockingClause,
    ];
    let conditions = [
        select.whereClause,
        select.havingClause,
        select.limitOffset,
        select.limitCount,
    ];
    let is_alone = lists.iter().all(|list| list.is_null())
        && conditions.iter().all(|condition| condition.is_null())
        && select.intoClause.is_null()
        && select.withClause.is_null()
        && select.op == pg_sys::SetOperation::SETOP_NONE;
    let targets: Vec<Node<'_>> = nodes(at!(select, targetList)).collect();
    let [target] = targets.as_slice() else {
        return None;
    };
    let target = target.cast::<pg_sys::ResTarget>()?;
    let is_plain = target.name.is_null() && target.indirection.is_null();
    (is_alone && is_plain).then(|| at!(target, val)).flatten()
}

/// Numbers of the columns of the only table that an expression uses, in their order.
///
/// # Safety
/// An expression, in which the table is number 1.
pub(crate) unsafe fn columns_of(expression: *mut pg_sys::Node) -> Vec<i16> {
    let mut set = null_mut();
    let mut columns = Vec::new();
    // SAFETY: the function adds the columns to a set, which is walked through from its beginning.
    unsafe {
        pg_sys::pull_varattnos(expression, 1, &raw mut set);
        let mut member = pg_sys::bms_next_member(set, -1);
        while member >= 0 {
            let number = member + pg_sys::FirstLowInvalidHeapAttributeNumber;
            columns.extend(i16::try_from(number));
            member = pg_sys::bms_next_member(set, member);
        }
    }
    columns
}
