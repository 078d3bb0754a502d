//! Keeping writers from a table for a moment, for a copy at another node.

use braid_postgres::catalog::{current_role, query};
use pgrx::pg_extern;
use pgrx::pg_sys;
use pgrx::prelude::PgSqlErrorCode;

use super::failure::Failure;
use super::run;

/// braid.hold_table("relation" oid) returns void
///
/// With its partitions. A role that could copy a table may hold it: it may connect for replication,
/// and read the table.
#[pg_extern(sql = false)]
fn hold_table(relation: pg_sys::Oid) {
    let caller = current_role();
    run(|| {
        let [oid, caller] = [relation, caller].map(|oid| oid.to_u32().to_string());
        let found = query(
            "select (r.rolsuper or r.rolreplication) and has_table_privilege(r.oid, c.oid, 'select'), \
                    format('%s%I.%I', case c.relkind when 'r' then 'only ' end, n.nspname, c.relname) \
               from pg_class c join pg_namespace n on n.oid = c.relnamespace, pg_roles r \
              where c.oid = $1::oid and c.relkind in ('r', 'p') and r.oid = $2::oid",
            &[Some(&oid), Some(&caller)],
        );
        let Some(name) = found.get(0, 1) else {
            return Err(Failure::undefined(format!(
                "there is no table with OID {oid}"
            )));
        };
        if found.get(0, 0) != Some("t") {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                "a table is held only by roles that may read it, and connect for replication",
            ));
        }
        query(&format!("lock table {name} in share mode"), &[]);
        Ok(())
    });
}
