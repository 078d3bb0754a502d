//! The atomics that the ring is made of: the standard library's, or loom's when loom checks the
//! ring.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
