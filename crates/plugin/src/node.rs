//! Who this node is, for the stream's header.

use braid_gir::StreamHeader;
use braid_postgres::encoding;
use pgrx::pg_sys;

use super::column;
use super::relation;
use super::stream::in_transaction;
use super::tuple::{Field, Row};

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
    /// Read them. Name and id are those of the row of `braid.node` that is the local one, as it was at the change that is
    /// decoded; empty when there is none.
    ///
    /// # Safety
    /// With a historic snapshot.
    pub(super) unsafe fn read() -> Self {
        // SAFETY: as the caller says. A logical message that is not transactional comes outside of any transaction.
        unsafe { in_transaction(|| Self::read_in_transaction()) }
    }

    unsafe fn read_in_transaction() -> Self {
        // SAFETY: in a transaction with a historic snapshot; strings are copied.
        unsafe {
            let (node_name, node_id) = local_node().unwrap_or_default();
            let version = pg_sys::GetConfigOption(c"server_version_num".as_ptr(), false, false);
            Self {
                node_name,
                node_id,
                system_identifier: pg_sys::GetSystemIdentifier(),
                server_version: encoding::from_server(version).parse().unwrap_or(0),
                database: encoding::from_server(pg_sys::get_database_name(pg_sys::MyDatabaseId)),
                charset: encoding::from_server(pg_sys::GetDatabaseEncodingName()),
            }
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

/// Name and id of the local node. `braid.node` is a user catalog table (`user_catalog_table`), else a historic snapshot could
/// not read it; its first columns are `node_name name, node_id uuid, is_local bool`.
///
/// # Safety
/// In a transaction with a historic snapshot.
unsafe fn local_node() -> Option<(String, [u8; 16])> {
    // SAFETY: as the caller says; the relation is closed and the scan ended after their last use.
    unsafe {
        let namespace = pg_sys::get_namespace_oid(c"braid".as_ptr(), true);
        if namespace == pg_sys::InvalidOid {
            return None;
        }
        let oid = pg_sys::get_relname_relid(c"node".as_ptr(), namespace);
        if oid == pg_sys::InvalidOid {
            return None;
        }
        let relation = pg_sys::RelationIdGetRelation(oid);
        if relation.is_null() {
            return None;
        }
        let found = if is_user_catalog(relation) {
            scan(relation)
        } else {
            None
        };
        pg_sys::RelationClose(relation);
        found
    }
}

/// `RelationIsUsedAsCatalogTable` of src/include/utils/rel.h, 15 to 18.
unsafe fn is_user_catalog(relation: pg_sys::Relation) -> bool {
    // SAFETY: `relation` is valid; the options of a table are StdRdOptions.
    unsafe {
        let kind = (*(*relation).rd_rel).relkind.cast_unsigned();
        let options = (*relation).rd_options.cast::<pg_sys::StdRdOptions>();
        kind == pg_sys::RELKIND_RELATION && !options.is_null() && (*options).user_catalog_table
    }
}

unsafe fn scan(relation: pg_sys::Relation) -> Option<(String, [u8; 16])> {
    // SAFETY: `relation` is valid and may be read under a historic snapshot; the row is used before the scan goes on.
    unsafe {
        let attributes = relation::attributes(relation);
        let scan = pg_sys::systable_beginscan(
            relation,
            pg_sys::InvalidOid,
            false,
            std::ptr::null_mut(),
            0,
            std::ptr::null_mut(),
        );
        let mut row = Row::default();
        let mut found = None;
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() || found.is_some() {
                break;
            }
            if row.fill(tuple, &attributes).is_err() {
                continue;
            }
            if let (Field::Stored(name), Field::Stored(id), Field::Stored([1, ..])) =
                (row.field(0), row.field(1), row.field(2))
            {
                let name = encoding::from_server(name.as_ptr().cast());
                found = Some((name, column::fixed(id)));
            }
        }
        row.clear();
        pg_sys::systable_endscan(scan);
        found
    }
}
