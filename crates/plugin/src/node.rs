//! Name and identity of this node, for the stream's header.

use std::ffi::CStr;

use braid_gir::StreamHeader;
use braid_postgres::relation::Described;
use braid_postgres::syscache::{self, utf8_or_empty};
use braid_postgres::{catalog_scan, encoding, plain, server};

use super::column;
use super::relation;
use super::transaction::in_transaction;
use super::tuple::{Field, Slots};

/// The facts of a stream header.
#[derive(Debug, Default)]
pub(super) struct Identity {
    node_name: String,
    node_id: [u8; 16],
    system_identifier: u64,
    server_version: u32,
    database: String,
    charset: String,
}

impl Identity {
    /// Read them. Name and id are those of the row of `braid.node` that is the local one, as it was
    /// at the change that is decoded; empty when there is none. With a historic snapshot.
    pub(super) fn read() -> Self {
        // A logical message that is not transactional comes outside of any transaction.
        in_transaction(Self::read_in_transaction)
    }

    fn read_in_transaction() -> Self {
        let (node_name, node_id) = local_node().unwrap_or_default();
        Self {
            node_name,
            node_id,
            system_identifier: plain::GetSystemIdentifier(),
            server_version: server::version(),
            database: utf8_or_empty(syscache::database_name(plain::MyDatabaseId())),
            charset: server::database_encoding(),
        }
    }

    /// The header record.
    pub(super) fn header(&self) -> StreamHeader<'_> {
        StreamHeader {
            node_id: self.node_id,
            system_identifier: self.system_identifier,
            server_version: self.server_version,
            node_name: &self.node_name,
            database: &self.database,
            charset: &self.charset,
        }
    }
}

/// Name and id of the local node. `braid.node` is a user catalog table (`user_catalog_table`), else
/// a historic snapshot could not read it; its first columns are
/// `node_name name, node_id uuid, is_local bool`. In a transaction with a historic snapshot.
fn local_node() -> Option<(String, [u8; 16])> {
    let namespace = syscache::namespace(c"braid")?;
    let relation = Described::find(syscache::relation_named(c"node", namespace)?)?;
    if !relation.view().is_user_catalog() {
        return None;
    }
    let attributes = relation::attributes(relation.view());
    let mut slots = Slots::default();
    catalog_scan::find(relation.view(), |tuple| {
        let row = slots.fill(tuple, &attributes).ok()?;
        match (row.field(0), row.field(1), row.field(2)) {
            (Field::Stored(name), Field::Stored(id), Field::Stored([1, ..])) => {
                let name = CStr::from_bytes_until_nul(name).ok()?;
                Some((encoding::utf8(name), column::fixed(id)))
            }
            _ => None,
        }
    })
}
