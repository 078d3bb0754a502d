//! Feeds `checks/frame.rs` with arbitrary bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/frame.rs"]
mod checks;

fuzz_target!(|input: &[u8]| checks::check(input));
