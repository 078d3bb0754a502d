//! An earlier transaction of the stream may wait for one that is prepared on this node
//! (`braid_bgworker::lock_circle`). Then the prepared one is given up.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use braid_node::prepared;
use braid_postgres::error;

use super::End;
use super::reception::Reception;

/// How long nothing is committed before it is looked, and between two looks, both of which have to
/// find it.
const INTERVAL: Duration = Duration::from_secs(1);
const REASON: &str = "What comes before its end waits for rows, or tables, that it has locked.";

pub(super) struct Tangle {
    looked_at: Instant,
    /// Transactions that were committed then.
    committed: u64,
    /// The transactions that were found then.
    found: BTreeSet<u32>,
}

impl Tangle {
    pub(super) fn new() -> Self {
        Self {
            looked_at: Instant::now(),
            committed: 0,
            found: BTreeSet::new(),
        }
    }
}

impl Reception {
    /// Gives up prepared transactions for which a transaction waits that comes before their end.
    pub(super) fn untangle(&mut self) -> Result<(), End> {
        if !self.subscription.options.two_phase
            || !self.in_flight()
            || self.tangle.looked_at.elapsed() < INTERVAL
        {
            return Ok(());
        }
        self.tangle.looked_at = Instant::now();
        let committed = self.group.ring.committed();
        if committed != self.tangle.committed {
            self.tangle.committed = committed;
            self.tangle.found.clear();
            return Ok(());
        }
        let id = self.subscription.id;
        let found = error::transaction(|| prepared::in_a_circle(id))?;
        let both: Vec<u32> = found.intersection(&self.tangle.found).copied().collect();
        self.tangle.found = found;
        if both.is_empty() {
            return Ok(());
        }
        error::transaction(|| {
            both.iter()
                .try_for_each(|xid| prepared::note(id, *xid, 0, REASON))
        })?;
        for xid in &both {
            pgrx::log!(
                "subscription \"{}\" rolls back transaction {xid} of the provider, which is prepared here, and applies it once it has committed: {REASON}",
                self.subscription.name
            );
        }
        Err(End::Transient(prepared::to_be_sent_whole(REASON), 0))
    }
}
