//! Statements that change the schema: a written statement is read back, and nothing else is
//! accepted.

use braid_gir::{DDL_PREFIX, Error, PASSWORD_SETTING, Statement, StatementTable, TableState};
use proptest::prelude::*;

fn text() -> impl Strategy<Value = String> {
    "[^\0]{0,12}"
}

fn texts() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(text(), 0..4)
}

fn state() -> impl Strategy<Value = Option<TableState>> {
    prop::option::of(
        (text(), text(), text()).prop_map(|(namespace, name, digest)| TableState {
            namespace,
            name,
            digest,
        }),
    )
}

fn table() -> impl Strategy<Value = StatementTable> {
    (state(), state(), texts(), texts(), texts()).prop_map(
        |(before, after, removed, added, publications)| StatementTable {
            before,
            after,
            removed,
            added,
            publications,
        },
    )
}

fn statement() -> impl Strategy<Value = Statement> {
    (
        any::<[u8; 16]>(),
        (text(), text(), text(), text()),
        prop::collection::vec((text(), text()), 0..4),
        texts(),
        prop::collection::vec(table(), 0..3),
    )
        .prop_map(
            |(id, (node, tag, text, role), settings, publications, tables)| Statement {
                id,
                node,
                tag,
                text,
                role,
                settings,
                publications,
                tables,
            },
        )
}

fn written(statement: &Statement) -> Vec<u8> {
    let mut bytes = Vec::new();
    statement.write(&mut bytes).unwrap();
    bytes
}

proptest! {
    #[test]
    fn a_statement_is_read_as_it_was_written(statement in statement()) {
        prop_assert_eq!(Statement::read(&written(&statement)), Ok(statement));
    }

    #[test]
    fn a_part_of_a_statement_is_none(statement in statement()) {
        let bytes = written(&statement);
        for end in 0..bytes.len() {
            prop_assert!(Statement::read(&bytes[..end]).is_err());
        }
        let mut more = bytes;
        more.push(0);
        prop_assert!(Statement::read(&more).is_err());
    }

    #[test]
    fn garbage_is_an_error_or_the_one_form_of_a_statement(
        bytes in prop::collection::vec(any::<u8>(), 0..64)
    ) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = 1;
        }
        if let Ok(statement) = Statement::read(&bytes) {
            prop_assert_eq!(written(&statement), bytes);
        }
    }
}

#[test]
fn another_version_is_named() {
    let mut bytes = written(&Statement::default());
    bytes[0] = 2;
    assert_eq!(
        Statement::read(&bytes),
        Err(Error::UnsupportedVersion {
            found: 2,
            supported: 1
        })
    );
}

#[test]
fn a_text_with_a_zero_byte_is_not_written() {
    let statement = Statement {
        text: "select\0".to_owned(),
        ..Statement::default()
    };
    assert_eq!(
        statement.write(&mut Vec::new()),
        Err(Error::NulInName("statement's text"))
    );
}

#[test]
fn a_password_is_shown_to_nobody() {
    let setting = |name: &str| (name.to_owned(), "stored".to_owned());
    let with_settings = |names: &[&str]| {
        written(&Statement {
            settings: names.iter().map(|name| setting(name)).collect(),
            ..Statement::default()
        })
    };
    let bytes = with_settings(&["search_path", PASSWORD_SETTING, "TimeZone"]);
    let rest = with_settings(&["search_path", "TimeZone"]);
    assert_eq!(Statement::shown(DDL_PREFIX, &bytes), rest);
    assert_eq!(Statement::shown(DDL_PREFIX, &rest), rest);
    assert_eq!(Statement::shown("mine", &bytes), bytes);
    assert_eq!(Statement::shown(DDL_PREFIX, b"mine"), b"mine".as_slice());
}

#[test]
fn publications_say_who_gets_it() {
    let names = |names: &[&str]| {
        names
            .iter()
            .map(|name| (*name).to_owned())
            .collect::<Vec<_>>()
    };
    let statement = Statement {
        id: [0xab; 16],
        publications: names(&["a", "b"]),
        tables: vec![StatementTable {
            publications: names(&["a"]),
            ..StatementTable::default()
        }],
        ..Statement::default()
    };
    assert!(statement.concerns(&names(&["x", "b"])));
    assert!(!statement.concerns(&names(&["x"])));
    assert!(!statement.concerns(&[]));
    assert!(!statement.tables[0].is_published(&names(&["b"])));
    assert_eq!(statement.uuid(), "abababab-abab-abab-abab-abababababab");
}
