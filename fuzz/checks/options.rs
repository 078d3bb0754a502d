//! Options as a client gives them: no input panics, an error says which option it is about, and
//! what is accepted is accepted again.
//!
//! An input is lines of `name=value`, or `name` alone for an option without a value.

use braid_decoder::wal2json::{Document, Layout, RelationText, TransactionText, Wal2JsonOptions};
use braid_decoder::{OptionText, Request};

fn read(text: &str) -> Vec<OptionText> {
    let lines = text.lines().take(64);
    lines
        .map(|line| match line.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (line.to_owned(), None),
        })
        .collect()
}

/// Near enough to SplitIdentifierString, which is PostgreSQL's.
fn split(list: &str) -> Option<Vec<String>> {
    let members: Vec<_> = list
        .split(',')
        .map(|member| member.trim().to_owned())
        .collect();
    members
        .iter()
        .all(|member| !member.is_empty())
        .then_some(members)
}

/// Uses the choices of accepted options, which must be safe.
fn use_them(options: &Wal2JsonOptions) {
    let _ = options.wants_table("public", "t");
    let _ = options.wants_prefix(b"p");
    let relation = RelationText {
        schema: b"public".to_vec(),
        table: b"t".to_vec(),
        columns: Vec::new(),
        full_identity: false,
        default_identity: true,
    };
    let layout = Layout::new(relation, options);
    let mut out = Vec::new();
    let mut document = Document::new(options);
    let transaction = TransactionText {
        xid: 1,
        timestamp: b"",
        origin: 0,
        commit_lsn: 1,
        end_lsn: 2,
    };
    document.begin(&mut out, &transaction);
    document.truncate(&mut out, &layout, 1);
    document.commit(&mut out, &transaction);
    assert!(!out.is_empty());
}

/// Parses one input, an option a line.
///
/// # Panics
/// Where what the head of this file says does not hold.
pub fn check(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let given = read(text);
    match Request::parse(given.clone(), split) {
        Ok(request) => {
            assert_eq!(Request::parse(given, split).as_ref(), Ok(&request));
            if let Request::Wal2Json(_, options) = &request {
                use_them(options);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
