//! The arguments of a function that PostgreSQL calls, with their types and collations: for
//! functions that are declared to take values of any type.

use std::marker::PhantomData;

use pgrx::pg_sys;

use crate::parse_tree::{List, Node, at, tree};

/// A call of a function that is declared STRICT: no argument is null.
#[derive(Debug, Clone, Copy)]
pub struct FunctionCall<'c> {
    call: pg_sys::FunctionCallInfo,
    lives: PhantomData<&'c pg_sys::FunctionCallInfoBaseData>,
}

/// An argument of a call.
#[derive(Debug, Clone, Copy)]
pub struct Argument {
    /// The value.
    pub value: pg_sys::Datum,
    /// The value's type; invalid if the caller has not given it.
    pub of: pg_sys::Oid,
    /// The value's collation; invalid for none.
    pub collation: pg_sys::Oid,
}

impl FunctionCall<'_> {
    /// A call.
    ///
    /// # Safety
    /// `call` is the call that PostgreSQL made, of a function that is declared STRICT. It lasts as
    /// long as this.
    #[must_use]
    pub unsafe fn new(call: pg_sys::FunctionCallInfo) -> Self {
        Self {
            call,
            lives: PhantomData,
        }
    }

    /// An argument by its position, from 0; `None` if there are fewer.
    #[must_use]
    pub fn argument(self, position: usize) -> Option<Argument> {
        let number = i32::try_from(position).ok()?;
        // SAFETY: the call has as many arguments as it says. PostgreSQL sets its function up before
        // it calls it, with the expression of the call, or null.
        unsafe {
            let call = self.call.as_ref()?;
            let count = usize::try_from(call.nargs).unwrap_or(0);
            let argument = call.args.as_slice(count).get(position)?;
            Some(Argument {
                value: argument.value,
                of: pg_sys::get_fn_expr_argtype(call.flinfo, number),
                collation: self.collation_of(position).unwrap_or(call.fncollation),
            })
        }
    }

    /// The collation of an argument's expression; `None` if the call is not written as one.
    fn collation_of(self, position: usize) -> Option<pg_sys::Oid> {
        // SAFETY: as in `argument`. The expression stays as it is while the function runs.
        let expression: Node<'_> = unsafe {
            let function = (*self.call).flinfo.as_ref()?;
            tree(function.fn_expr.cast::<pg_sys::Node>())?
        };
        let arguments: List<'_> = at!(expression.cast::<pg_sys::FuncExpr>()?, args)?;
        let argument = arguments.nodes().nth(position)?;
        // SAFETY: the function looks at the node only.
        Some(unsafe { pg_sys::exprCollation(argument.as_ptr()) })
    }
}
