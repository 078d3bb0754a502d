//! Decides when applied commits count as durable, and may be confirmed to the provider. Run by the
//! leader.
//!
//! Appliers commit asynchronously, whatever `synchronous_commit` a subscription has, except with
//! `apply_mode => 'serial'`. Commits are in order, so a wait in each commit, for the disk or a
//! standby, would delay the next one. Instead the leader waits before it confirms, once for all
//! commits since the last wait. Commits that are lost in a crash were never confirmed, and are
//! received again.

use braid_bgworker::subscription_option::SynchronousCommit;
use braid_postgres::wal;
use pgrx::pg_sys;

/// The condition for confirming a local commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// On the local disk, some time soon.
    Lazy,
    /// On the local disk, at once.
    Local,
    /// Also received, flushed or applied by the synchronous standbys of this server, if it has any:
    /// index of the position in `WalSndCtl`.
    Standbys(usize),
}

impl Durability {
    /// The durability that an option asks for.
    #[must_use]
    pub fn of(option: SynchronousCommit) -> Self {
        let standbys = |mode: u32| Self::Standbys(usize::try_from(mode).unwrap_or(usize::MAX));
        match option {
            SynchronousCommit::Local => Self::Local,
            SynchronousCommit::RemoteWrite => standbys(pg_sys::SYNC_REP_WAIT_WRITE),
            SynchronousCommit::RemoteApply => standbys(pg_sys::SYNC_REP_WAIT_APPLY),
            SynchronousCommit::On => standbys(pg_sys::SYNC_REP_WAIT_FLUSH),
            SynchronousCommit::Off => Self::Lazy,
        }
    }

    /// Whether somebody wants it at once.
    #[must_use]
    pub fn is_eager(self) -> bool {
        self != Self::Lazy
    }

    /// Up to where this server's WAL is durable in this sense.
    #[must_use]
    pub fn durable_up_to(self) -> u64 {
        let flushed = wal::flushed();
        match self {
            Self::Standbys(mode) => wal::at_standbys(mode).map_or(flushed, |at| flushed.min(at)),
            Self::Lazy | Self::Local => flushed,
        }
    }
}
