//! Applying as the table's owner: the rights, and the limits, of PostgreSQL's own `run_as_owner = false`.

use pgrx::pg_sys;

// src/include/miscadmin.h, 15 to 18.
const SECURITY_RESTRICTED_OPERATION: i32 = 0x0002;

/// What the user whom this process works as may do with a table: whether it has this right (ACL_INSERT and so on), and whether row-level security
/// applies to it.
///
/// # Safety
/// In a transaction; the table exists.
pub unsafe fn rights(table: pg_sys::Oid, right: u32) -> (bool, bool) {
    // SAFETY: catalog look-ups, as the caller says.
    unsafe {
        let rights =
            pg_sys::pg_class_aclcheck(table, pg_sys::GetUserId(), pg_sys::AclMode::from(right));
        let policies = pg_sys::check_enable_rls(table, pg_sys::InvalidOid, true);
        (
            rights == pg_sys::AclResult::ACLCHECK_OK,
            u32::try_from(policies).ok() == Some(pg_sys::CheckEnableRlsResult::RLS_ENABLED),
        )
    }
}

/// The user that this process works as, and how to go back. Switching is cheap, and stays until somebody else is needed: a
/// transaction's changes usually have one owner.
#[derive(Debug, Default)]
pub struct UserSwitch {
    saved: Option<Saved>,
}

#[derive(Debug)]
struct Saved {
    user: pg_sys::Oid,
    context: i32,
    nest_level: i32,
    current: pg_sys::Oid,
}

impl UserSwitch {
    /// Work as `user` from here on. To be called in a transaction.
    pub fn work_as(&mut self, user: pg_sys::Oid) {
        match &self.saved {
            Some(saved) if saved.current == user => return,
            Some(_) => self.restore(),
            None => {}
        }
        // SAFETY: process-local user state; restored by `restore`, or by the transaction's abort.
        unsafe {
            let mut before = pg_sys::InvalidOid;
            let mut context = 0;
            pg_sys::GetUserIdAndSecContext(&raw mut before, &raw mut context);
            if before == user {
                return;
            }
            // A superuser may do everything anyway; anybody else must not reach what this process may, through a trigger that
            // leaves something behind.
            let limited = if pg_sys::superuser_arg(user) {
                0
            } else {
                SECURITY_RESTRICTED_OPERATION
            };
            pg_sys::SetUserIdAndSecContext(user, context | limited);
            let nest_level = pg_sys::NewGUCNestLevel();
            self.saved = Some(Saved {
                user: before,
                context,
                nest_level,
                current: user,
            });
        }
    }

    /// Work as this process's own user again.
    pub fn restore(&mut self) {
        if let Some(saved) = self.saved.take() {
            // SAFETY: the counterparts of `work_as`; settings that a trigger changed go back too.
            unsafe {
                pg_sys::AtEOXact_GUC(false, saved.nest_level);
                pg_sys::SetUserIdAndSecContext(saved.user, saved.context);
            }
        }
    }
}
