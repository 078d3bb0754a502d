//! How appliers claim transactions in relaxed commit order, and set those with unmet dependencies
//! to wait. Connects `aside.rs` with the segment.

use crate::aside::{EDGES, Places};
use crate::layout::{CAREFUL, TRIED};
use crate::ring::Ring;
use crate::sync::{AtomicU64, Ordering};
use crate::wake::Wakes;

impl Ring {
    /// Takes a transaction that can be applied now, if there is one and this applier may: the
    /// oldest ready one. If none is ready, claims transactions in order up to the first without
    /// unmet dependencies, and enqueues those before it on wait lists. Only in relaxed order. An
    /// applier that was idle then wakes others for what is left ([`Ring::offer`]).
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
            // The applier is still idle. It has said so again before it looks again.
            if let Some(awaited) = waited {
                slot.wait.will_wait(awaited);
            }
        }
    }

    /// Enqueues a transaction that this applier has claimed on a wait list, if it has an unmet
    /// dependency. The commit of its last unmet dependency makes it ready. Returns false if it has
    /// none: then this applier keeps it.
    #[must_use]
    pub fn put_aside(&self, applier: usize, sequence: u64) -> bool {
        let slot = self.slot(applier);
        // Before another applier can take it.
        if let Some(slot) = slot {
            slot.sequence.store(0, Ordering::SeqCst);
        }
        let is_aside = self.header().aside.put(self, sequence);
        if !is_aside && let Some(slot) = slot {
            slot.sequence.store(sequence, Ordering::SeqCst);
        }
        is_aside
    }

    /// Makes a transaction that this applier has claimed wait until all before it are committed. It
    /// has failed (`careful`: with a unique violation), or must not overtake others. Not for an
    /// open transaction. Returns false if all before it are committed: then this applier keeps it.
    #[must_use]
    pub fn put_aside_until_turn(&self, applier: usize, sequence: u64, careful: bool) -> bool {
        let descriptor = self.descriptor(sequence);
        // The applier that takes it finds it through a list or a bit that is written later.
        descriptor.through.store(sequence - 1, Ordering::Relaxed);
        let flags = TRIED | if careful { CAREFUL } else { 0 };
        descriptor.flags.fetch_or(flags, Ordering::AcqRel);
        self.put_aside(applier, sequence)
    }

    /// Makes a transaction that this applier has claimed ready again: any applier can apply it. The
    /// caller then wakes others ([`Ring::offer`]).
    pub fn give_back(&self, applier: usize, sequence: u64) {
        if let Some(slot) = self.slot(applier) {
            slot.sequence.store(0, Ordering::SeqCst);
        }
        self.header().aside.give_back(self, sequence);
    }

    /// Whether this transaction is ready and not taken.
    #[must_use]
    pub fn is_ready(&self, sequence: u64) -> bool {
        self.header().aside.is_ready(self, sequence)
    }

    /// Number of transactions on wait lists.
    #[must_use]
    pub fn waiting_aside(&self) -> u64 {
        self.header().aside.waiting()
    }

    /// Returns latches of idle appliers, one for each transaction that is ready or not claimed.
    /// Only in relaxed order.
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
