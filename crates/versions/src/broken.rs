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
    /// A candidate proposes its cut once a majority has reported.
    MajorityReports,
    /// A node that promises goes on giving versions.
    PromiseKeepsSequencer,
    /// A node that promises lets its writes commit.
    PromiseHoldsNothing,
    /// A promise outlives the cut that it was made for.
    PromiseOutlivesCut,
    /// A node reports while a write is between its mark and its commit.
    ReportsWhileBusy,
    /// A grant of an old term commits.
    OldGrantCommits,
    /// The group agrees on two cuts that follow one term.
    TwoCuts,
    /// A transaction that may take its snapshot takes it in the next term.
    ReadyOutlivesCut,
    /// A request is sent once, and not again after a cut.
    AskOnce,
    /// A node that waited in an earlier term counts as one that waits, even if it was removed.
    RemovedWaits,
    /// The report of a node that was removed counts.
    RemovedCounts,
    /// A process begins as sequencer with the last cut that is stored.
    BeginsWithStored,
    /// A table is drained without other nodes' notes.
    DrainsAlone,
}
