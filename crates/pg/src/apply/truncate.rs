//! TRUNCATE of the transaction in hand.

use braid_gir::Truncate;
use pgrx::pg_sys;

use super::Session;
use crate::compat;
use crate::error::PgError;
use crate::ffi;

impl Session {
    /// Truncate what the provider truncated, partitions included. Tables that are not part of the subscription, or are
    /// copied from a later state, are left out; CASCADE was resolved at the provider.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn truncate(&mut self, truncate: &Truncate<'_>) -> Result<(), PgError> {
        self.flush()?;
        let Some(current) = self.current.clone() else {
            return Err(PgError::new(
                "08P01",
                "truncate outside of a transaction from the provider",
            ));
        };
        let mut oids = Vec::new();
        for schema in truncate.schemas() {
            let remote = self.remote(schema.0)?;
            let route = self.route(schema.0, &remote)?;
            if route.takes(&current) {
                oids.push(((schema.0, route.oid.to_u32()), route.oid));
            }
        }
        if oids.is_empty() {
            return Ok(());
        }
        // Open tables hold scans and slots; TRUNCATE wants to be alone with the table.
        self.close_tables();
        if let Some(user) = self.identity.run_as {
            self.user.work_as(pg_sys::Oid::from(user));
        }
        let lock = i32::try_from(pg_sys::AccessExclusiveLock).unwrap_or(8);
        // SAFETY: in a transaction; relations are opened with the lock that ExecuteTruncateGuts wants and closed after it,
        // the lists live in the transaction's context.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
            let mut relations = std::ptr::null_mut();
            let mut relation_oids = std::ptr::null_mut();
            let mut logged = std::ptr::null_mut();
            let mut opened: Vec<pg_sys::Relation> = Vec::new();
            let mut owners: Vec<pg_sys::Oid> = Vec::new();
            let mut has_triggers = false;
            let mut seen = Vec::new();
            for (_, root) in &oids {
                let below = ffi::find_all_inheritors(*root, lock);
                for position in 0..compat::list_length(below) {
                    let oid = compat::list_oid(below, position);
                    if seen.contains(&oid) {
                        continue;
                    }
                    seen.push(oid);
                    let relation = pg_sys::relation_open(oid, lock);
                    let kind = (*(*relation).rd_rel).relkind.cast_unsigned();
                    // An ordinary table's children are tables of their own in the stream.
                    if oid != *root && !(*(*relation).rd_rel).relispartition
                        || (kind != b'r' && kind != b'p')
                    {
                        pg_sys::relation_close(relation, lock);
                        continue;
                    }
                    owners.push((*(*relation).rd_rel).relowner);
                    has_triggers |= !(*relation).trigdesc.is_null();
                    opened.push(relation);
                    relations = pg_sys::lappend(relations, relation.cast());
                    relation_oids = pg_sys::lappend_oid(relation_oids, oid);
                    if (*(*relation).rd_rel).relpersistence.cast_unsigned() == b'p' {
                        logged = pg_sys::lappend_oid(logged, oid);
                    }
                }
            }
            // From 16 on PostgreSQL itself goes from owner to owner; before, a trigger would run with this process's rights.
            if self.identity.run_as.is_none()
                && let Some(first) = owners.first()
            {
                if owners.iter().all(|owner| owner == first) {
                    self.user.work_as(*first);
                } else if has_triggers && compat::TRUNCATES_AS_CALLER {
                    return Err(PgError::new(
                        "0A000",
                        "cannot truncate tables of several owners, some with triggers, in one command",
                    )
                    .with_hint(
                        "Give the tables one owner, or let the subscription apply as its owner with run_as_owner.",
                    ));
                }
            }
            self.unchecked
                .retain(|((_, oid), _)| !seen.contains(&pg_sys::Oid::from(*oid)));
            compat::execute_truncate(relations, relation_oids, logged, truncate.restart_identity);
            for relation in opened {
                pg_sys::relation_close(relation, i32::try_from(pg_sys::NoLock).unwrap_or(0));
            }
            pg_sys::MemoryContextSwitchTo(before);
            pg_sys::CommandCounterIncrement();
            pg_sys::UpdateActiveSnapshotCommandId();
        }
        self.user.restore();
        for (key, _) in oids {
            self.open.push(key);
            self.count(key, |counts| counts.truncates += 1);
        }
        Ok(())
    }
}
