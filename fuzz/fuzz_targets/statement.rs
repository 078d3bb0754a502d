//! Statements that change the schema, as a receiver reads them: no input panics, and what is
//! accepted is written again byte for byte.
#![no_main]

use braid_gir::Statement;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Statement::read(bytes) {
        Ok(statement) => {
            let mut copy = Vec::new();
            statement.write(&mut copy).expect("what was read can be written");
            assert_eq!(copy, bytes);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
