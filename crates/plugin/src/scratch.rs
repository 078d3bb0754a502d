//! Memory for the calls of one change.

use std::cell::Cell;

use pgrx::pg_sys;

/// A memory context that is only reset when something used it.
pub(super) struct Scratch {
    context: pg_sys::MemoryContext,
    used: Cell<bool>,
}

impl Scratch {
    /// Over `context`, which outlives this value.
    pub(super) fn new(context: pg_sys::MemoryContext) -> Self {
        Self {
            context,
            used: Cell::new(false),
        }
    }

    /// The memory itself.
    pub(super) fn context(&self) -> pg_sys::MemoryContext {
        self.context
    }

    /// Run `f` with this as the current memory context. After an error, which unwinds, PostgreSQL sets the context itself.
    #[inline]
    pub(super) fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        self.used.set(true);
        // SAFETY: the context lives as long as the plugin, and is only reset between changes.
        unsafe { within(self.context, f) }
    }

    /// Free what was allocated.
    #[inline]
    pub(super) fn reset(&self) {
        if self.used.replace(false) {
            // SAFETY: nobody keeps a pointer into the context beyond a change.
            unsafe { pg_sys::MemoryContextReset(self.context) };
        }
    }
}

/// Run `f` with `context` as the current memory context. After an error, which unwinds, PostgreSQL sets the context itself.
///
/// # Safety
/// `context` is valid.
#[inline]
pub(super) unsafe fn within<T>(context: pg_sys::MemoryContext, f: impl FnOnce() -> T) -> T {
    // SAFETY: a backend has one thread; the context from before is still there afterwards.
    unsafe {
        let current = &raw mut pg_sys::CurrentMemoryContext;
        let before = current.replace(context);
        let value = f();
        current.write(before);
        value
    }
}
