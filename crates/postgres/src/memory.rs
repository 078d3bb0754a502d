//! Memory contexts: the current one, kept over a call, one for data that is used only during a
//! call, and calls in other contexts.

use std::ffi::CStr;
use std::marker::PhantomData;

use pgrx::pg_sys;

use crate::plain;

/// The memory context that was the current one at some moment.
#[derive(Debug, Clone, Copy)]
pub struct Current(pg_sys::MemoryContext);

impl Current {
    /// The current context.
    #[must_use]
    pub fn now() -> Self {
        Self(plain::CurrentMemoryContext())
    }

    /// Runs `work` with it as the current context.
    ///
    /// # Safety
    /// The context still exists.
    #[inline]
    pub unsafe fn run<T>(self, work: impl FnOnce() -> T) -> T {
        Context(self.0).run(work)
    }
}

/// The context that was the current one as [`with_current`] was called.
#[derive(Debug, Clone, Copy)]
pub struct Callers<'c> {
    context: Context,
    lives: PhantomData<fn(&'c ()) -> &'c ()>,
}

impl Callers<'_> {
    /// Runs `work` with it as the current context.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> T {
        self.context.run(work)
    }
}

/// Runs `work` with the current context at hand, whatever other one `work` makes the current one.
/// The context is the caller's, which outlives the call.
pub fn with_current<T>(work: impl for<'c> FnOnce(Callers<'c>) -> T) -> T {
    work(Callers {
        context: Context(plain::CurrentMemoryContext()),
        lives: PhantomData,
    })
}

/// Runs `work`; afterwards the caller's memory context is the current one again. If `work` unwinds,
/// the code that catches the error sets the current context.
pub fn keep_current<T>(work: impl FnOnce() -> T) -> T {
    // The caller allocates in this context, so it exists, and outlives the call.
    Context(plain::CurrentMemoryContext()).run(work)
}

/// ALLOCSET_DEFAULT_INITSIZE and ALLOCSET_DEFAULT_MAXSIZE of src/include/utils/memutils.h, 15 to
/// 18.
const INITIAL_SIZE: usize = 8 * 1024;
const LARGEST_BLOCK: usize = 8 * 1024 * 1024;

/// The context that another one is below, with which it goes.
#[derive(Debug, Clone, Copy)]
enum Parent {
    Top,
    Current,
    Other(Context),
}

/// Bytes of a context's first block, and of its largest one.
type Blocks = (usize, usize);

const USUAL: Blocks = (INITIAL_SIZE, LARGEST_BLOCK);
const SMALL: Blocks = (
    pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
    pg_sys::ALLOCSET_SMALL_MAXSIZE as usize,
);

/// A memory context of this process's own. It lives until it is deleted.
#[derive(Debug, Clone, Copy)]
pub struct Context(pub(crate) pg_sys::MemoryContext);

impl Context {
    /// A context below TopMemoryContext.
    #[must_use]
    pub fn new(name: &'static CStr) -> Self {
        Self::create(Parent::Top, name, USUAL)
    }

    /// A context below this one, with which it goes.
    #[must_use]
    pub fn below(self, name: &'static CStr) -> Self {
        Self::create(Parent::Other(self), name, USUAL)
    }

    /// The context that exists as long as the process.
    #[must_use]
    pub fn of_process() -> Self {
        Self(plain::TopMemoryContext())
    }

    /// The context of the current transaction or subtransaction.
    ///
    /// # Safety
    /// The result and its copies are used only until the transaction or subtransaction ends.
    #[must_use]
    pub unsafe fn of_transaction() -> Self {
        Self(plain::CurTransactionContext())
    }

    fn create(parent: Parent, name: &'static CStr, (first, largest): Blocks) -> Self {
        // SAFETY: TopMemoryContext and the current context always exist, and another one until it
        // is deleted. The name is a constant.
        Self(unsafe {
            let parent = match parent {
                Parent::Top => pg_sys::TopMemoryContext,
                Parent::Current => pg_sys::CurrentMemoryContext,
                Parent::Other(context) => context.0,
            };
            pg_sys::AllocSetContextCreateInternal(parent, name.as_ptr(), 0, first, largest)
        })
    }

    /// PostgreSQL's own pointer, valid until the context is deleted.
    #[must_use]
    pub fn as_ptr(self) -> pg_sys::MemoryContext {
        self.0
    }

    /// Makes this the current context.
    pub fn enter(self) {
        // SAFETY: the context lives until it is deleted, and the code that deletes it guarantees
        // that it is not used any more.
        unsafe { pg_sys::MemoryContextSwitchTo(self.0) };
    }

    /// Runs `work` with this as the current context.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> T {
        // SAFETY: the context lives until it is deleted, and the code that deletes it guarantees
        // that it is not used any more.
        unsafe { within(self.0, work) }
    }

    /// Frees all memory in it.
    ///
    /// # Safety
    /// Nothing in it is used any more.
    #[inline]
    pub unsafe fn reset(self) {
        // SAFETY: the caller says so. A context without children that nothing was taken from since
        // its last reset is as that left it.
        unsafe {
            if !(*self.0).isReset || !(*self.0).firstchild.is_null() {
                pg_sys::MemoryContextReset(self.0);
            }
        }
    }

    /// Frees it.
    ///
    /// # Safety
    /// Nothing in it is used any more, it is not the current context, and no copy of this value is
    /// used any more.
    pub unsafe fn delete(self) {
        // SAFETY: the caller says so.
        unsafe { pg_sys::MemoryContextDelete(self.0) };
    }
}

/// A memory context that is emptied before each use. If the process unwinds it stays until the
/// process ends.
#[derive(Debug)]
pub struct Scratch(Context);

impl Scratch {
    /// Makes one; `name` is shown in dumps of memory.
    #[must_use]
    pub fn new(name: &'static CStr) -> Self {
        Self(Context::new(name))
    }

    /// Makes one below the current memory context, with which it goes if the process unwinds.
    ///
    /// # Safety
    /// The result is dropped before the current memory context is reset or deleted.
    #[must_use]
    pub unsafe fn below_current(name: &'static CStr) -> Self {
        Self(Context::create(Parent::Current, name, SMALL))
    }

    /// Creates a context of small blocks, for data that is kept as long as it.
    #[must_use]
    pub fn small(name: &'static CStr) -> Self {
        Self(Context::create(Parent::Top, name, SMALL))
    }

    /// The context, which exists as long as `self`.
    #[must_use]
    pub fn context(&self) -> Context {
        self.0
    }

    /// Runs `work` with this memory. A value that `work` returns must not refer to it.
    pub fn run<T>(&mut self, work: impl FnOnce() -> T) -> T {
        // SAFETY: memory of the last call is not used any more, as its value does not refer to it.
        unsafe { self.0.reset() };
        self.0.run(work)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            if plain::CurrentMemoryContext() == self.0.0 {
                Context::of_process().enter();
            }
            // SAFETY: the holder of this value holds all values in it, and it is not the current
            // context.
            unsafe { self.0.delete() };
        }
    }
}

/// Runs `work` with another current context. After an error, which unwinds, PostgreSQL sets the
/// context itself.
///
/// # Safety
/// The context exists.
#[inline]
pub unsafe fn within<T>(context: pg_sys::MemoryContext, work: impl FnOnce() -> T) -> T {
    // SAFETY: the caller says that it exists; the one before is the caller's own.
    unsafe {
        let before = pg_sys::MemoryContextSwitchTo(context);
        let done = work();
        pg_sys::MemoryContextSwitchTo(before);
        done
    }
}

/// Declares work in memory that PostgreSQL keeps.
macro_rules! kept {
    ($($(#[doc = $doc:literal])* fn $name:ident = $context:ident;)*) => {$(
        $(#[doc = $doc])*
        pub fn $name<T>(work: impl FnOnce() -> T) -> T {
            // PostgreSQL makes this context, and sets it aside when it deletes it.
            Context(plain::$context()).run(work)
        }
    )*};
}

kept! {
    /// Runs `work` in the memory of the current transaction, or subtransaction. In a transaction.
    fn in_transaction = CurTransactionContext;

    /// Runs `work` in memory that lives as long as the top transaction. In a transaction.
    fn in_top_transaction = TopTransactionContext;

    /// Runs `work` in memory that lives as long as the process.
    fn in_process = TopMemoryContext;
}
