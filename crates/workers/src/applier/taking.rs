//! How much an applier takes at once, and whether transactions are joined, of a subscription.

use braid_bgworker::taking::Mode;
use braid_node::subscription::Subscription;
use braid_ring::Grain;

/// The mode of a subscription.
pub(super) fn mode(subscription: &Subscription) -> Mode {
    Mode::of(
        subscription.options.apply_mode,
        subscription.options.consolidate,
    )
}

/// Whether transactions are committed together.
#[must_use]
pub(crate) fn joins(subscription: &Subscription) -> bool {
    mode(subscription).joins()
}

/// How much an applier of a subscription claims at once.
#[must_use]
pub(crate) fn grain(subscription: &Subscription, singly: bool) -> Grain {
    mode(subscription).grain(subscription.options.is_relaxed(), singly)
}
