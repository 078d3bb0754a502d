//! Statements that change the schema, as a receiver reads them: no input panics, and what is
//! accepted is written again byte for byte.

use braid_gir::Statement;

/// Reads one statement.
///
/// # Panics
/// Where what the head of this file says does not hold.
pub fn check(bytes: &[u8]) {
    match Statement::read(bytes) {
        Ok(statement) => {
            let mut copy = Vec::new();
            statement
                .write(&mut copy)
                .expect("what was read can be written");
            assert_eq!(copy, bytes);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
