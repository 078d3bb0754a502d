//! The consensus library: how it is opened, its panics, and its snapshots.

use std::panic::{AssertUnwindSafe, catch_unwind};

use raft::RawNode;
use raft::eraftpb::{ConfState, Snapshot};

use super::Settings;
use crate::error::Error;
use crate::member::MemberId;
use crate::mirror::Mirror;
use crate::state::State;

/// The words of a panic.
pub(super) fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("the consensus library panicked").to_owned()
}

/// The snapshot of a state.
pub(crate) fn snapshot_of(state: &State) -> Snapshot {
    let (voters, learners) = state.configuration();
    let mut configuration = ConfState::default();
    configuration.set_voters(voters);
    configuration.set_learners(learners);
    let mut snapshot = Snapshot::default();
    let metadata = snapshot.mut_metadata();
    metadata.index = state.index();
    metadata.term = state.term();
    metadata.set_conf_state(configuration);
    snapshot.set_data(state.encode().into());
    snapshot
}

/// Opens the library over a stored log.
pub(super) fn open(
    me: MemberId,
    settings: Settings,
    applied: u64,
    mirror: Mirror,
) -> Result<RawNode<Mirror>, Error> {
    let election = usize::from(settings.election_ticks.max(2));
    let config = raft::Config {
        id: me.get(),
        election_tick: election,
        heartbeat_tick: usize::from(settings.heartbeat_ticks.max(1)).min(election - 1),
        // The library would draw the time of an election from its own random numbers: it never
        // comes to that.
        min_election_tick: usize::MAX / 2,
        max_election_tick: usize::MAX / 2 + 1,
        applied,
        check_quorum: true,
        pre_vote: true,
        max_size_per_msg: 256 * 1024,
        max_inflight_msgs: 64,
        max_uncommitted_size: 16 << 20,
        ..raft::Config::default()
    };
    let logger = slog::Logger::root(slog::Discard, slog::o!());
    let opened = catch_unwind(AssertUnwindSafe(|| RawNode::new(&config, mirror, &logger)));
    match opened {
        Ok(Ok(raw)) => Ok(raw),
        Ok(Err(error)) => Err(Error::Failed(error.to_string())),
        Err(panic) => Err(Error::Failed(words(&*panic))),
    }
}
