//! Feeds `checks/json.rs` with arbitrary bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/json.rs"]
mod checks;

fuzz_target!(|input: &[u8]| checks::check(input));
