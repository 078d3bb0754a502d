//! The seeds of the fuzz targets, each once: `scripts/fuzz` starts from them.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "test code"
)]

use std::fs;
use std::path::Path;

#[path = "../../fuzz/checks/frame.rs"]
mod frame;
#[path = "../../fuzz/checks/json.rs"]
mod json;
#[path = "../../fuzz/checks/options.rs"]
mod options;
#[path = "../../fuzz/checks/statement.rs"]
mod statement;

/// Runs a check on each seed, and on each seed cut off at every 97th byte.
fn feed(target: &str, check: fn(&[u8])) {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/seeds")
        .join(target);
    let mut count = 0;
    for entry in fs::read_dir(seeds).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        println!("{}", path.display());
        check(&bytes);
        for end in (0..bytes.len()).step_by(97) {
            check(&bytes[..end]);
        }
        count += 1;
    }
    assert!(count > 0, "no seeds of {target}");
}

#[test]
fn frames() {
    feed("frame", frame::check);
}

#[test]
fn json_texts() {
    feed("json", json::check);
}

#[test]
fn option_lists() {
    feed("options", options::check);
}

#[test]
fn statements() {
    feed("statement", statement::check);
}
