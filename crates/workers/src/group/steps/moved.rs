//! A member that is reached by another connection string than before, as agreed.

use braid_node::connection_string;
use braid_node::registry;
use braid_node::subscription::{execute, rows};
use braid_postgres::error::{self, PgError};
use braid_postgres::process;

/// Tables of what leads to a node, and their columns with that node.
const TABLES: [(&str, &str); 3] = [
    ("node", "node_id"),
    ("subscription", "provider_id"),
    ("slot_cleanup", "provider_id"),
];

/// Has whatever leads to a member by the string that it had in the group go by its new one. Rows
/// with another string have got one of their own, and keep it.
pub(super) fn follow() -> Result<(), PgError> {
    let moved = error::transaction(|| {
        rows(
            "select member_id::text from braid.group_member where moved_from is not null",
            &[],
        )
    })?;
    for member in moved.iter().filter_map(|row| row.first()?.as_deref()) {
        let member: i64 = member.parse().unwrap_or(0);
        error::transaction(|| {
            for (table, column) in TABLES {
                execute(
                    &format!(
                        "update braid.{table} t set connection_id = m.connection_id \
                           from braid.group_member m join braid.connection before on before.connection_id = m.moved_from, \
                                braid.connection own \
                          where m.member_id = $1 and t.{column} = m.node_id \
                            and own.connection_id = t.connection_id and own.dsn = before.dsn"
                    ),
                    &[member.into()],
                )?;
            }
            execute(
                "update braid.group_member set moved_from = null where member_id = $1",
                &[member.into()],
            )?;
            connection_string::forget_unused();
            Ok(())
        })?;
    }
    if !moved.is_empty() {
        registry::wake_manager(process::my_database());
    }
    Ok(())
}
