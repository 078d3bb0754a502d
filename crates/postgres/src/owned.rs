//! Drops of values that own an object of PostgreSQL's. Run by every process.
//!
//! While the process unwinds a guard does nothing: the rollback frees the object.

/// Declares how values free what they own.
macro_rules! frees {
    ($($type:ty: |$value:ident| $free:expr;)*) => {$(
        impl Drop for $type {
            fn drop(&mut self) {
                if !std::thread::panicking() {
                    let $value = self;
                    // SAFETY: the value has opened or allocated the object, is its only owner, and
                    // is not used any more.
                    unsafe { $free };
                }
            }
        }
    )*};
}

pub(crate) use frees;
