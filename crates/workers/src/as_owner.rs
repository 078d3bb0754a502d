//! Reading users' tables at another node as their owners. Run by processes that copy, compare and
//! take over.
//!
//! A table's owner can have own code run by any role that plans a query of the table: an index on
//! `(v || f(''))` is enough, as the planner folds constants. The role in the connection string is
//! often a superuser. So the other node is asked to act as the owner before it plans such a query.
//! That lasts until the transaction, or the savepoint, is rolled back (`braid.read_as_owner`).
//!
//! Not for: the tables of this node (`catalog::with_rights`).

use braid_postgres::libpq::{Connection, Result};
use braid_postgres::rows::Rows;

/// Reads tables over one connection.
#[derive(Debug, Clone, Copy)]
pub struct AsOwner {
    /// The other node has the function, and lets this one call it. A node that only sends changes
    /// need not have the extension.
    is_offered: bool,
    /// The connection is in a transaction, which goes on.
    in_transaction: bool,
}

impl AsOwner {
    /// Reads over a connection that is in a read-only transaction.
    ///
    /// # Errors
    /// The other node's.
    pub fn in_transaction(connection: &mut Connection) -> Result<Self> {
        Ok(Self {
            is_offered: is_offered(connection)?,
            in_transaction: true,
        })
    }

    /// Reads over a connection that is in no transaction.
    ///
    /// # Errors
    /// The other node's.
    pub fn outside(connection: &mut Connection) -> Result<Self> {
        Ok(Self {
            is_offered: is_offered(connection)?,
            in_transaction: false,
        })
    }

    /// Reads over the same connection once the transaction has ended.
    #[must_use]
    pub fn after_transaction(self) -> Self {
        Self {
            in_transaction: false,
            ..self
        }
    }

    /// Runs a query of a table, which is given as SQL that makes an OID of it. One round trip.
    /// After an error of the other node a transaction goes on as though nothing had been asked.
    ///
    /// # Errors
    /// The other node's.
    pub fn query(self, connection: &mut Connection, table: &str, query: &str) -> Result<Rows> {
        let found = connection.query(&self.text(table, query));
        if self.in_block() && found.is_err() && connection.is_open() {
            connection.query(&self.end())?;
        }
        found
    }

    /// The text that [`AsOwner::query`] sends. After an error in it a connection that was in no
    /// transaction is in one that has failed.
    #[must_use]
    pub fn text(self, table: &str, query: &str) -> String {
        if !self.in_block() {
            return query.to_owned();
        }
        format!("{}; {query}; {}", self.begin(table), self.end())
    }

    /// Has the other node work as the owner of a table until [`AsOwner::stop`]. In a transaction.
    ///
    /// # Errors
    /// The other node's.
    pub fn start(self, connection: &mut Connection, table: u32) -> Result<()> {
        if self.in_block() {
            connection.query(&self.begin(&table.to_string()))?;
        }
        Ok(())
    }

    /// Has the other node work as the role of the connection again.
    ///
    /// # Errors
    /// The other node's.
    pub fn stop(self, connection: &mut Connection) -> Result<()> {
        if self.in_block() {
            connection.query(&self.end())?;
        }
        Ok(())
    }

    /// Whether a query is in a savepoint, or a transaction, of its own.
    fn in_block(self) -> bool {
        self.is_offered || self.in_transaction
    }

    fn begin(self, table: &str) -> String {
        let begin = if self.in_transaction {
            "savepoint braid_owner"
        } else {
            "begin isolation level read committed read only"
        };
        if self.is_offered {
            format!("{begin}; select braid.read_as_owner({table})")
        } else {
            begin.to_owned()
        }
    }

    fn end(self) -> String {
        if self.in_transaction {
            "rollback to savepoint braid_owner; release savepoint braid_owner".to_owned()
        } else {
            "rollback".to_owned()
        }
    }
}

fn is_offered(connection: &mut Connection) -> Result<bool> {
    let found = connection.query(
        "select pg_catalog.has_schema_privilege(n.oid, 'usage') and pg_catalog.has_function_privilege(p.oid, 'execute') \
           from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace \
          where n.nspname = 'braid' and p.proname = 'read_as_owner'",
    )?;
    Ok(found.get(0, 0) == Some("t"))
}
