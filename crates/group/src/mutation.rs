//! Rules that tests break on purpose, to see that their checks notice. Nothing else can.

/// A rule that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests break rules"))]
pub(crate) enum Mutation {
    /// A boot is taken for in order, whatever is known of the member.
    BelieveAnyBoot,
    /// A member that is not proven takes part without being welcomed.
    TrustUnproven,
    /// Several changes of the configuration are under way at once.
    ReconfigureAnyTime,
    /// A repeated proposal takes effect again.
    #[cfg(test)]
    ApplyRepeats,
    /// A lock that is held is given again.
    #[cfg(test)]
    LockTwice,
    /// A block that was assigned is assigned again.
    #[cfg(test)]
    BlockTwice,
    /// The next holder of a lease does not wait.
    LeaseWithoutWait,
    /// The next holder of a lease waits without regard to the clocks' drift.
    LeaseWithoutDrift,
    /// A lease counts from when its renewal is applied, not from when it was asked for.
    LeaseFromAnswer,
    /// A lease counts for a member that has not asked for it since it started.
    LeaseOutlivesRestart,
    /// The server side does not write the vote.
    #[cfg(test)]
    ForgetVote,
    /// The server side sends before it has written.
    #[cfg(test)]
    SendEarly,
}
