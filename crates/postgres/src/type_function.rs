//! The functions with which a type's values are read and written: looked up once, and called often.
//! Run by processes that convert values, in a transaction.
//!
//! Results are in the current memory context, which only unsafe functions reset.

use std::ffi::CStr;

use pgrx::pg_sys;

use crate::memory::Context;
use crate::plain;
use crate::syscache::TypeRow;
use crate::value::Value;

/// A function that was looked up. Memory that it keeps outlives it.
#[derive(Debug)]
struct Function(pg_sys::FmgrInfo);

impl Function {
    fn new(function: pg_sys::Oid, memory: Context) -> Self {
        let mut found = pg_sys::FmgrInfo::default();
        // SAFETY: fills in the place; a dropped function is an error. The context exists until it
        // is deleted, and the code that deletes it guarantees that it is not used any more.
        unsafe { pg_sys::fmgr_info_cxt(function, &raw mut found, memory.as_ptr()) };
        Self(found)
    }
}

/// The functions of a type that read and write text, and the parameter of the first.
fn text_functions(of: pg_sys::Oid) -> (pg_sys::Oid, pg_sys::Oid, pg_sys::Oid) {
    let (input, parameter) = plain::getTypeInputInfo(of);
    let (output, _) = plain::getTypeOutputInfo(of);
    (input, parameter, output)
}

/// A type's input function.
#[derive(Debug)]
pub struct Input {
    of: pg_sys::Oid,
    function: Function,
    parameter: pg_sys::Oid,
    modifier: i32,
}

impl Input {
    /// Looks it up, for values with this modifier. Its memory is in `memory`.
    #[must_use]
    pub fn of(of: pg_sys::Oid, modifier: i32, memory: Context) -> Self {
        let (input, parameter, _) = text_functions(of);
        Self {
            of,
            function: Function::new(input, memory),
            parameter,
            modifier,
        }
    }

    /// The value with this text, in the server's encoding. PostgreSQL raises an error if there is
    /// none.
    #[inline]
    #[must_use]
    pub fn read(&mut self, text: &CStr) -> Value<'static> {
        let text = text.as_ptr().cast_mut();
        // SAFETY: the type's input function, which does not change the text.
        unsafe {
            let value = pg_sys::InputFunctionCall(
                &raw mut self.function.0,
                text,
                self.parameter,
                self.modifier,
            );
            Value::of_type(self.of, value)
        }
    }
}

/// The value of a type, without a modifier, with this text, as [`Input::read`] makes it. The
/// look-up's memory is in the current memory context, too.
#[must_use]
pub fn read(of: pg_sys::Oid, text: &CStr) -> Value<'static> {
    Input::of(of, -1, Context(plain::CurrentMemoryContext())).read(text)
}

/// A type's output function.
#[derive(Debug)]
pub struct Output {
    of: pg_sys::Oid,
    function: Function,
}

impl Output {
    /// Looks it up. Its memory is in `memory`.
    #[must_use]
    pub fn of(of: pg_sys::Oid, memory: Context) -> Self {
        let (_, _, output) = text_functions(of);
        Self {
            of,
            function: Function::new(output, memory),
        }
    }

    /// The text of a value, in the server's encoding; `None` for a value of another type.
    #[must_use]
    pub fn write(&mut self, value: Value<'_>) -> Option<&CStr> {
        if value.type_id() != self.of {
            return None;
        }
        // SAFETY: the type's output function, and a value of the type. The text ends with a zero
        // byte.
        unsafe {
            let text = pg_sys::OutputFunctionCall(&raw mut self.function.0, value.datum());
            Some(CStr::from_ptr(text))
        }
    }
}

/// A type's binary input function.
#[derive(Debug)]
pub struct Receive {
    of: pg_sys::Oid,
    function: Function,
    parameter: pg_sys::Oid,
}

impl Receive {
    /// Looks it up; `None` if there is no such type, or it has no such function. Its memory is in
    /// `memory`.
    #[must_use]
    pub fn find(of: pg_sys::Oid, memory: Context) -> Option<Self> {
        let (function, element) = {
            let row = TypeRow::find(of)?;
            (row.typreceive, row.typelem)
        };
        if function == pg_sys::InvalidOid {
            return None;
        }
        Some(Self {
            of,
            function: Function::new(function, memory),
            parameter: if element == pg_sys::InvalidOid {
                of
            } else {
                element
            },
        })
    }

    /// The type that it is called with beside the bytes: its own, or its elements'.
    #[must_use]
    pub fn parameter(&self) -> pg_sys::Oid {
        self.parameter
    }

    /// The value with this binary form, in the client's encoding; `None` if something is left of
    /// the bytes. PostgreSQL raises an error if they have no value.
    #[must_use]
    pub fn read(&mut self, modifier: i32, bytes: &[u8]) -> Option<Value<'static>> {
        let len = i32::try_from(bytes.len())
            .ok()
            .filter(|len| *len < i32::MAX)?;
        // A copy, with the zero byte behind it that receive functions may rely on.
        let mut copy = Vec::with_capacity(bytes.len() + 1);
        copy.extend_from_slice(bytes);
        copy.push(0);
        let mut buffer = pg_sys::StringInfoData {
            data: copy.as_mut_ptr().cast(),
            len,
            maxlen: len + 1,
            cursor: 0,
        };
        // SAFETY: the type's function; the buffer outlives the call, which only reads it.
        let value = unsafe {
            let value = pg_sys::ReceiveFunctionCall(
                &raw mut self.function.0,
                &raw mut buffer,
                self.parameter,
                modifier,
            );
            Value::of_type(self.of, value)
        };
        (buffer.cursor == buffer.len).then_some(value)
    }
}
