//! Rules that tests break on purpose, to see that their checks notice. Nothing else can.

/// A rule that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests break rules"))]
pub(crate) enum Broken {
    /// A snapshot is compared with the published writes, not with the coming ones.
    SeenFromReached,
    /// A record is applied before what its transaction had read.
    ApplyWithoutSeen,
    /// A record is applied before the write before it.
    ApplyOutOfOrder,
    /// The counters of a new term begin where one member is, not the furthest of a majority.
    CountersTooLow,
    /// A record of an old term is taken by a node that knows the new one.
    OldTermAccepted,
    /// Grants of a node that is only cut off are void, though nobody has fenced it.
    VoidWithoutFencing,
    /// A snapshot with a later write than the grant's is taken for right.
    LaterIsSound,
    /// Void numbers are not announced.
    VoidsUntold,
    /// A repeated request gets a second number.
    RepeatsCount,
    /// A transaction is acknowledged before a majority has it.
    AcknowledgeAlone,
}
