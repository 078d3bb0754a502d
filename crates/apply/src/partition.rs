//! Finds the partition that a row belongs to. Run by the appliers.

use braid_postgres::ffi;
use braid_postgres::memory::within;
use braid_postgres::slot::Slot;
use pgrx::pg_sys;

use super::table::make_node;

/// Router for rows of one partitioned table, until the transaction ends.
#[derive(Debug)]
pub struct Router {
    estate: *mut pg_sys::EState,
    state: *mut pg_sys::ModifyTableState,
    routing: *mut ffi::PartitionTupleRouting,
}

impl Router {
    /// Prepares routing below `target`.
    ///
    /// # Safety
    /// `target` is of the open partitioned table `relation` in `estate`. All are there until the
    /// router ends. Its slots hold rows of that table.
    pub unsafe fn new(
        estate: *mut pg_sys::EState,
        target: *mut pg_sys::ResultRelInfo,
        relation: pg_sys::Relation,
    ) -> Self {
        // SAFETY: as the caller says; a ModifyTableState without a plan is what PostgreSQL's own
        // apply worker uses.
        unsafe {
            within((*estate).es_query_cxt, || {
                let tag = pg_sys::NodeTag::T_ModifyTableState;
                let state = make_node::<pg_sys::ModifyTableState>(tag);
                (*state).ps.state = estate;
                (*state).operation = pg_sys::CmdType::CMD_INSERT;
                (*state).resultRelInfo = target;
                (*state).rootResultRelInfo = target;
                let routing = ffi::exec_setup_partition_tuple_routing(estate, relation);
                Self {
                    estate,
                    state,
                    routing,
                }
            })
        }
    }

    /// Returns the partition for the row in `slot`.
    pub fn find(&self, slot: &Slot) -> pg_sys::Oid {
        // SAFETY: as the caller of `new` says.
        unsafe {
            let estate = self.estate;
            let oid = within((*estate).es_query_cxt, || {
                let root = (*self.state).rootResultRelInfo;
                let slot = slot.as_ptr();
                let leaf = ffi::exec_find_partition(self.state, root, self.routing, slot, estate);
                (*(*leaf).ri_RelationDesc).rd_id
            });
            // Frees the value of a key that is an expression.
            let context = (*estate).es_per_tuple_exprcontext;
            pg_sys::MemoryContextReset((*context).ecxt_per_tuple_memory);
            oid
        }
    }

    /// Closes what routing has opened.
    pub fn end(self) {
        // SAFETY: ended once, before the executor state is freed.
        unsafe { ffi::exec_cleanup_tuple_routing(self.state, self.routing) };
    }
}
