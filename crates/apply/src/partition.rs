//! Finding the partition that a row belongs to. Run by the appliers.

use braid_postgres::{compat, ffi};
use pgrx::pg_sys;

use super::table::make_node;

/// A relation, and the partitioned tables that it is a partition of.
///
/// # Safety
/// In a transaction with a snapshot.
pub(super) unsafe fn with_ancestors(relation: pg_sys::Oid) -> Vec<pg_sys::Oid> {
    // SAFETY: as the caller says; a relation that is gone is no partition. The list is freed after its last use.
    unsafe {
        if !pg_sys::get_rel_relispartition(relation) {
            return vec![relation];
        }
        let ancestors = ffi::get_partition_ancestors(relation);
        let all = std::iter::once(relation)
            .chain(
                (0..compat::list_length(ancestors))
                    .map(|position| compat::list_oid(ancestors, position)),
            )
            .collect();
        pg_sys::list_free(ancestors);
        all
    }
}

/// Routes rows of one partitioned table, until the transaction ends.
#[derive(Debug)]
pub struct Router {
    state: *mut pg_sys::ModifyTableState,
    routing: *mut ffi::PartitionTupleRouting,
}

impl Router {
    /// Prepare routing below `target`.
    ///
    /// # Safety
    /// `target` is of an open partitioned table in `estate`, whose memory context is the current one.
    pub unsafe fn new(
        estate: *mut pg_sys::EState,
        target: *mut pg_sys::ResultRelInfo,
        relation: pg_sys::Relation,
    ) -> Self {
        // SAFETY: as the caller says; a ModifyTableState without a plan is what PostgreSQL's own apply worker uses.
        unsafe {
            let state = make_node::<pg_sys::ModifyTableState>(pg_sys::NodeTag::T_ModifyTableState);
            (*state).ps.state = estate;
            (*state).operation = pg_sys::CmdType::CMD_INSERT;
            (*state).resultRelInfo = target;
            (*state).rootResultRelInfo = target;
            let routing = ffi::exec_setup_partition_tuple_routing(estate, relation);
            Self { state, routing }
        }
    }

    /// The partition for the row in `slot`.
    ///
    /// # Safety
    /// The slot holds a row of the partitioned table; `estate` is the one of `new`.
    pub unsafe fn find(
        &self,
        estate: *mut pg_sys::EState,
        slot: *mut pg_sys::TupleTableSlot,
    ) -> pg_sys::Oid {
        // SAFETY: as the caller says.
        unsafe {
            let root = (*self.state).rootResultRelInfo;
            let leaf = ffi::exec_find_partition(self.state, root, self.routing, slot, estate);
            (*(*leaf).ri_RelationDesc).rd_id
        }
    }

    /// Close what routing has opened.
    pub fn end(self) {
        // SAFETY: ended once, before the executor state is freed.
        unsafe { ffi::exec_cleanup_tuple_routing(self.state, self.routing) };
    }
}
