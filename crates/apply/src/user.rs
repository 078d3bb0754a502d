//! Applying as the table's owner: the rights, and the limits, of PostgreSQL's own `run_as_owner =
//! false`. Run by the processes that write rows of other nodes.
//!
//! Invariant: code of a relation's owner runs as that owner, or as the user whom `run_as_owner =
//! true` names. Such code is more than triggers. PostgreSQL folds constants when it builds what it
//! knows of an index, so an expression index runs its functions when the index is opened:
//!
//! 1. Owner O of table t creates `create index on t ((v || f('')))` with an immutable function `f`.
//! 2. An applier opens t. `ExecOpenIndices` folds `f('')`.
//! 3. If the applier works as itself, `f` has all rights of a superuser.
//!
//! So a table is opened for writing through an [`AsOwner`] only.

use std::marker::PhantomData;

use braid_postgres::acting_role::ActingRole;
use braid_postgres::catalog;
use braid_postgres::plain;
use braid_postgres::relation::RelationRef;
use braid_postgres::setting::Level;
use braid_postgres::table_rights;
use pgrx::pg_sys;

/// Returns whether the user whom this process works as has this right (ACL_INSERT and so on) on a
/// table, and whether row-level security applies to the user. In a transaction; the table exists.
pub fn rights(table: pg_sys::Oid, right: u32) -> (bool, bool) {
    let user = catalog::current_role();
    (
        table_rights::may(user, table, right),
        table_rights::has_policies(user, table),
    )
}

/// An open relation, while this process works as its owner, or as the user who stands for all
/// owners. The process can't switch back to its own user as long as this lives.
#[derive(Debug)]
pub struct AsOwner<'u> {
    relation: RelationRef<'u>,
    user: PhantomData<&'u mut UserSwitch>,
}

impl<'u> AsOwner<'u> {
    /// The relation.
    #[must_use]
    pub fn relation(&self) -> RelationRef<'u> {
        self.relation
    }
}

/// The user that this process works as, and the way back. Switching is cheap. The user stays until
/// another one is needed: a transaction's changes usually have one owner.
#[derive(Debug, Default)]
pub struct UserSwitch {
    saved: Option<Saved>,
}

#[derive(Debug)]
struct Saved {
    before: ActingRole,
    settings: Level,
    current: pg_sys::Oid,
}

impl UserSwitch {
    /// Switches to the owner of a relation, or to `run_as` if that is given. In a transaction,
    /// whose abort restores the user.
    pub fn as_owner<'u>(
        &'u mut self,
        relation: RelationRef<'u>,
        run_as: Option<u32>,
    ) -> AsOwner<'u> {
        self.work_as(run_as.map_or_else(|| relation.owner(), pg_sys::Oid::from));
        AsOwner {
            relation,
            user: PhantomData,
        }
    }

    /// Switches to `user`. Called in a transaction, whose abort restores the user too.
    pub fn work_as(&mut self, user: pg_sys::Oid) {
        self.work_as_limited(user, pg_sys::SECURITY_RESTRICTED_OPERATION);
    }

    /// Switches to `user`, who refreshes a materialized view. PostgreSQL runs the view's query as
    /// its owner, with limits of its own, but needs a temporary table around it.
    pub fn work_as_caller_of_refresh(&mut self, user: pg_sys::Oid) {
        self.restore();
        self.work_as_limited(user, pg_sys::SECURITY_LOCAL_USERID_CHANGE);
    }

    fn work_as_limited(&mut self, user: pg_sys::Oid, limits: u32) {
        match &self.saved {
            Some(saved) if saved.current == user => return,
            Some(_) => self.restore(),
            None => {}
        }
        let before = ActingRole::now();
        if before.role == user {
            return;
        }
        // A superuser may do everything anyway. Other users must not get this process's rights, for
        // example through something that a trigger leaves behind.
        let limits = if plain::superuser_arg(user) {
            0
        } else {
            limits
        };
        before.other(user, limits).take();
        self.saved = Some(Saved {
            before,
            settings: Level::begin(),
            current: user,
        });
    }

    /// Switches back to this process's own user.
    pub fn restore(&mut self) {
        if let Some(saved) = self.saved.take() {
            // Settings that a trigger changed go back too.
            saved.settings.end(false);
            saved.before.take();
        }
    }
}
