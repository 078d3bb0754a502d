//! The limits on how fast a subscription is read (braid.set_rate_limit), as the processes keep them
//! that read: the leader, and the workers that copy tables. They share two buckets in the registry,
//! so that the limits hold for all of them together.
//!
//! Messages that are not read stay in the socket, and hold the provider's walsender back. The
//! manager writes the limits to the registry as it sees them in the catalog, when the transaction
//! that set them has committed.

use std::sync::atomic::Ordering;
use std::time::Duration;

use braid_bgworker::rate::Price;
use braid_postgres::latch;
use braid_postgres::timestamp::{self, monotonic_nanoseconds};
use braid_postgres::wait::Wait;

use crate::registry::{self, SubscriptionEntry};

/// Nobody sleeps longer than this before looking whether the limits are still the same.
const LOOK: Duration = Duration::from_millis(100);

/// One process's part in keeping a subscription's limits.
#[derive(Debug)]
pub struct Limiter {
    entry: Option<&'static SubscriptionEntry>,
    rows: Option<Price>,
    bytes: Option<Price>,
}

impl Limiter {
    /// Of a subscription of this database.
    #[must_use]
    pub fn new(subscription: u32) -> Self {
        Self {
            entry: registry::subscription(subscription),
            rows: None,
            bytes: None,
        }
    }

    /// How long nothing may be read; `None`: now.
    #[must_use]
    pub fn pause(&self) -> Option<Duration> {
        let limit = &self.entry?.rate_limit;
        let mut pause = 0;
        for limit in [&limit.rows, &limit.bytes] {
            if limit.get().is_some() {
                pause = limit.bucket.ready_in(monotonic_nanoseconds()).max(pause);
            }
        }
        (pause > 0).then(|| Duration::from_nanos(pause))
    }

    /// Counts rows and bytes that were read.
    pub fn take(&mut self, rows: u64, bytes: u64) {
        let Some(entry) = self.entry else { return };
        let limit = &entry.rate_limit;
        for (limit, price, units) in [
            (&limit.rows, &mut self.rows, rows),
            (&limit.bytes, &mut self.bytes, bytes),
        ] {
            let Some(per_second) = limit.get() else {
                continue;
            };
            if price
                .as_ref()
                .is_none_or(|price| price.per_second() != per_second)
            {
                *price = Some(Price::new(per_second));
            }
            if let Some(price) = price {
                limit.bucket.take(monotonic_nanoseconds(), price.of(units));
            }
        }
    }

    /// Wait out a pause, or a part of it: until the latch is set, or it is time to look again.
    pub fn wait(&self, pause: Duration) {
        if let Some(entry) = self.entry {
            entry
                .rate_limit
                .held_at
                .store(timestamp::now(), Ordering::Relaxed);
        }
        latch::wait_as(Wait::RateLimit, pause.min(LOOK));
    }
}
