//! SQL for tests: in the test's own transaction, and in a second session that commits.

use std::cell::RefCell;

use braid_postgres::catalog;
use braid_postgres::libpq::{Connection, Mode};
use braid_postgres::lock::LockMode;
use braid_postgres::relation::{Relation, RelationRef};
use braid_postgres::rows::Rows;
use pgrx::pg_sys;

/// Runs SQL in the transaction of the test.
pub(crate) fn sql(statement: &str) -> Rows {
    catalog::query(statement, &[])
}

/// Runs several statements, separated by a semicolon at the end of a line.
pub(crate) fn script(statements: &str) {
    for statement in statements.split(";\n") {
        if !statement.trim().is_empty() {
            sql(statement);
        }
    }
}

/// The single value of a query; `None` for null or no row.
pub(crate) fn value(query: &str) -> Option<String> {
    sql(query).get(0, 0).map(str::to_owned)
}

/// The first column of a query.
pub(crate) fn column(query: &str) -> Vec<String> {
    column_of(&sql(query))
}

fn column_of(rows: &Rows) -> Vec<String> {
    let first = |row: &[Option<String>]| row[0].clone().unwrap_or_else(|| "null".to_owned());
    rows.iter().map(first).collect()
}

thread_local! {
    static OTHER: RefCell<Option<Connection>> = const { RefCell::new(None) };
}

fn open() -> Connection {
    let dsn = value(
        "select format('host=%s port=%s dbname=%s user=%s', current_setting('unix_socket_directories'), \
         current_setting('port'), current_database(), current_user)",
    );
    Connection::open(&dsn.unwrap(), "inside", Mode::Sql).expect("another session")
}

/// Runs SQL in a second session, which commits. Gives the first column.
pub(crate) fn other(statement: &str) -> Vec<String> {
    OTHER.with_borrow_mut(|place| {
        let connection = place.get_or_insert_with(open);
        match connection.query(statement) {
            Ok(rows) => column_of(&rows),
            Err(error) => panic!("{error} in: {statement}"),
        }
    })
}

/// Runs SQL in a session of its own, which is to end by that. Gives the server's last words.
pub(crate) fn ended(statement: &str) -> String {
    let mut connection = open();
    match connection.query(statement) {
        Ok(rows) => format!("{:?}", column_of(&rows)),
        Err(error) => error.to_string(),
    }
}

/// A relation that is open until this is dropped.
pub(crate) struct Open(Option<Relation>);

impl Open {
    /// Opens a table or index by its name.
    pub(crate) fn new(name: &str) -> Self {
        let oid: u32 = value(&format!("select '{name}'::regclass::oid"))
            .unwrap()
            .parse()
            .unwrap();
        let relation = Relation::open(pg_sys::Oid::from(oid), LockMode::AccessShare);
        Self(Some(relation))
    }

    /// The relation, for who only looks at it.
    pub(crate) fn view(&self) -> RelationRef<'_> {
        self.0.as_ref().expect("an open relation").view()
    }

    /// PostgreSQL's own pointer, valid as long as `self` is.
    pub(crate) fn as_ptr(&self) -> pg_sys::Relation {
        self.view().as_ptr()
    }

    /// The relation's OID.
    pub(crate) fn oid(&self) -> pg_sys::Oid {
        self.view().oid()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // After an error the rollback closes the relation.
        if !std::thread::panicking()
            && let Some(relation) = self.0.take()
        {
            relation.close(LockMode::AccessShare);
        }
    }
}

/// Bytes from PostgreSQL's hex digits.
pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let digits = text.strip_prefix("\\x").unwrap_or(text).as_bytes();
    let digit = |byte: u8| u8::try_from(char::from(byte).to_digit(16).unwrap()).unwrap();
    digits
        .as_chunks::<2>()
        .0
        .iter()
        .map(|[high, low]| digit(*high) << 4 | digit(*low))
        .collect()
}
