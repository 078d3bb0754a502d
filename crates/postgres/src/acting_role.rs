//! The role that a process works as, and its limits. Run by processes that do something with the
//! rights of another role.
//!
//! An error leaves both as they are until the transaction or subtransaction aborts, which puts them
//! back.

use pgrx::pg_sys;

use crate::plain;

/// A role, and its limits: `SECURITY_LOCAL_USERID_CHANGE` and so on of src/include/miscadmin.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActingRole {
    /// The role.
    pub role: pg_sys::Oid,
    /// The role's limits, as flags.
    pub limits: u32,
}

impl ActingRole {
    /// The role and the limits that hold now.
    #[must_use]
    pub fn now() -> Self {
        let (role, limits) = plain::GetUserIdAndSecContext();
        Self {
            role,
            limits: limits.cast_unsigned(),
        }
    }

    /// Another role, with these limits beside those of this one.
    #[must_use]
    pub fn other(self, role: pg_sys::Oid, limits: u32) -> Self {
        Self {
            role,
            limits: self.limits | limits,
        }
    }

    /// Another role, whose rights are all that whatever it calls can get at: it can't become yet
    /// another one, nor leave anything behind in the session. As PostgreSQL's own maintenance
    /// commands have it.
    #[must_use]
    pub fn confined(self, role: pg_sys::Oid) -> Self {
        self.other(
            role,
            pg_sys::SECURITY_LOCAL_USERID_CHANGE
                | pg_sys::SECURITY_RESTRICTED_OPERATION
                | pg_sys::SECURITY_NOFORCE_RLS,
        )
    }

    /// The owner of a table, confined unless it is a superuser, who may do everything anyway.
    #[must_use]
    pub fn as_owner(self, owner: pg_sys::Oid) -> Self {
        if plain::superuser_arg(owner) {
            let limits = pg_sys::SECURITY_LOCAL_USERID_CHANGE | pg_sys::SECURITY_NOFORCE_RLS;
            return self.other(owner, limits);
        }
        self.confined(owner)
    }

    /// Whether the role is in a security-restricted operation: code of somebody else runs.
    #[must_use]
    pub fn is_restricted(self) -> bool {
        self.limits & pg_sys::SECURITY_RESTRICTED_OPERATION != 0
    }

    /// Has this process work as the role, with the limits. In a transaction.
    pub fn take(self) {
        plain::SetUserIdAndSecContext(self.role, self.limits.cast_signed());
    }
}
