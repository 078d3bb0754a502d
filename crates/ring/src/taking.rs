//! How appliers take transactions where commits may overtake each other, and put aside what can't
//! be applied yet: `aside.rs` over the segment.

use crate::aside::{EDGES, Places};
use crate::layout::{CAREFUL, TRIED};
use crate::ring::Ring;
use crate::sync::{AtomicU64, Ordering};
use crate::wake::Wakes;

impl Ring {
    /// Take a transaction that can be applied now, if there is one and this applier may: the oldest
    /// of those that were put aside and are ready, else the next in order of which nothing is
    /// missing; those before it are put aside. Only when commits may overtake each other. An
    /// applier that was idle then hands on what is left ([`Ring::offer`]).
    #[must_use]
    pub fn take(&self, applier: usize) -> Option<u64> {
        if !self.takers().contains(&applier) {
            return None;
        }
        let slot = self.slot(applier)?;
        let header = self.header();
        let waited = slot.wait.waited();
        let show = |sequence| slot.sequence.store(sequence, Ordering::SeqCst);
        loop {
            if let Some(sequence) = header.aside.take(self) {
                show(sequence);
                return Some(sequence);
            }
            let (sequence, _) = header.counters.claim(&slot.wait, show, |first, _| first)?;
            if !self.put_aside(applier, sequence) {
                return Some(sequence);
            }
            // It is idle still, and looks again after it has said so.
            if let Some(awaited) = waited {
                slot.wait.will_wait(awaited);
            }
        }
    }

    /// Put a transaction aside that this applier has taken, if anything that it depends on is
    /// missing: whoever commits the last of that makes it ready. False: nothing is missing, and it
    /// stays in hand.
    #[must_use]
    pub fn put_aside(&self, applier: usize, sequence: u64) -> bool {
        let slot = self.slot(applier);
        // Before it can be in somebody else's hands.
        if let Some(slot) = slot {
            slot.sequence.store(0, Ordering::SeqCst);
        }
        let is_aside = self.header().aside.put(self, sequence);
        if !is_aside && let Some(slot) = slot {
            slot.sequence.store(sequence, Ordering::SeqCst);
        }
        is_aside
    }

    /// Put a transaction aside that this applier has taken until all before it are committed: it
    /// has failed, `careful` with a unique violation, or is nothing that could overtake others. Not
    /// one that is open. False: all are, and it stays in hand.
    #[must_use]
    pub fn put_aside_until_turn(&self, applier: usize, sequence: u64, careful: bool) -> bool {
        let descriptor = self.descriptor(sequence);
        // Whoever takes it finds it through a list or a bit that is written later.
        descriptor.through.store(sequence - 1, Ordering::Relaxed);
        let flags = TRIED | if careful { CAREFUL } else { 0 };
        descriptor.flags.fetch_or(flags, Ordering::AcqRel);
        self.put_aside(applier, sequence)
    }

    /// Give a transaction back that this applier has taken and that anybody can apply. Then
    /// [`Ring::offer`].
    pub fn give_back(&self, applier: usize, sequence: u64) {
        if let Some(slot) = self.slot(applier) {
            slot.sequence.store(0, Ordering::SeqCst);
        }
        self.header().aside.give_back(self, sequence);
    }

    /// Whether this transaction was put aside, is ready, and nobody has taken it.
    #[must_use]
    pub fn is_ready(&self, sequence: u64) -> bool {
        self.header().aside.is_ready(self, sequence)
    }

    /// How many transactions are put aside and wait for others.
    #[must_use]
    pub fn waiting_aside(&self) -> u64 {
        self.header().aside.waiting()
    }

    /// Latches of idle appliers that are to take what is left to take, as many as there is of it.
    /// Only when commits may overtake each other.
    #[must_use]
    pub fn offer(&self) -> Wakes {
        let mut wakes = Wakes::default();
        self.offer_but(0, &mut wakes);
        wakes
    }

    pub(crate) fn offer_but(&self, but: u64, wakes: &mut Wakes) {
        let header = self.header();
        let takers = self.waits(self.takers());
        header.counters.offer(takers, &header.aside, but, wakes);
    }
}

impl Places for Ring {
    fn waiters(&self, sequence: u64) -> &AtomicU64 {
        &self.place(sequence).waiters
    }

    fn next(&self, sequence: u64) -> &AtomicU64 {
        &self.place(sequence).next
    }

    fn needs(&self, sequence: u64) -> (u64, [u64; EDGES]) {
        let descriptor = self.descriptor(sequence);
        let mut edges = [0; EDGES];
        for (to, from) in edges.iter_mut().zip(&descriptor.edges) {
            *to = from.load(Ordering::Acquire);
        }
        (descriptor.through.load(Ordering::Acquire), edges)
    }

    fn ready(&self, word: usize) -> &AtomicU64 {
        self.ready_word(word)
    }

    fn count(&self) -> u64 {
        self.geometry().descriptors
    }

    fn committed(&self) -> u64 {
        self.header().counters.committed()
    }
}
