//! Memory of a stream, and for the calls of one change.

use std::cell::Cell;
use std::ffi::CStr;

use braid_postgres::decoding::Context;
use braid_postgres::memory;
use pgrx::pg_sys;

/// A memory context of a stream. It is kept only in the state of the decoding context, with whose
/// memory it is freed.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamMemory(memory::Context);

impl StreamMemory {
    /// A new one below the decoding context's.
    pub(super) fn new(ctx: Context<'_>, name: &'static CStr) -> Self {
        Self(ctx.memory_below(name))
    }

    /// Wraps a context that exists as long as the users of this value.
    pub(super) fn over(context: memory::Context) -> Self {
        Self(context)
    }

    /// A new one below this one.
    pub(super) fn below(self, name: &'static CStr) -> Self {
        Self(self.0.below(name))
    }

    /// PostgreSQL's own pointer.
    pub(super) fn as_ptr(self) -> pg_sys::MemoryContext {
        self.0.as_ptr()
    }

    /// Runs `f` with this as the current memory context. After an error, which unwinds, PostgreSQL
    /// sets the context itself.
    #[inline]
    pub(super) fn run<T>(self, f: impl FnOnce() -> T) -> T {
        self.0.run(f)
    }
}

/// A part of a stream's memory, for its owner's data. It is freed with the stream's, or before.
#[derive(Debug)]
pub(super) struct PartMemory(StreamMemory);

impl PartMemory {
    /// A new one below the stream's.
    pub(super) fn below(stream: StreamMemory, name: &'static CStr) -> Self {
        Self(stream.below(name))
    }

    /// The memory itself, for data that is freed with the owner.
    pub(super) fn get(&self) -> StreamMemory {
        self.0
    }

    /// Gives it back before the stream ends. Not done by dropping: when the memory of the stream
    /// goes, this has gone before.
    pub(super) fn release(self) {
        let StreamMemory(context) = self.0;
        // SAFETY: its owner, which had all that refers to it, gives it away. It is not the current
        // context, as nothing of the owner's runs.
        unsafe { context.delete() };
    }
}

/// A memory context that is only reset when something used it.
pub(super) struct Scratch {
    memory: StreamMemory,
    used: Cell<bool>,
}

impl Scratch {
    /// Over `memory`, which nobody else resets.
    pub(super) fn new(memory: StreamMemory) -> Self {
        Self {
            memory,
            used: Cell::new(false),
        }
    }

    /// The memory itself.
    pub(super) fn memory(&self) -> StreamMemory {
        self.memory
    }

    /// Run `f` with this as the current memory context.
    #[inline]
    pub(super) fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        self.used.set(true);
        self.memory.run(f)
    }

    /// Frees all allocations.
    #[inline]
    pub(super) fn reset(&self) {
        if self.used.replace(false) {
            // SAFETY: nobody keeps a pointer into the context beyond a change.
            unsafe { self.memory.0.reset() };
        }
    }
}
