//! Counts how often in a row the server crashed at one transaction, from the work that its
//! processes were doing. Pure; `crash` of `crates/node` keeps the bytes in files, and its head says
//! when and why.
//!
//! If a process died before it had recorded its work, the death is added to that of the next
//! process that dies.

/// Size of a head, and of a slot: eight machine words.
pub const PLACE: usize = 64;
/// "braidcr1", as a number.
const MAGIC: u64 = 0x3172_6364_6961_7262;

/// The bytes of a head or a slot.
pub type Place = [u8; PLACE];

/// State of a slot. Its process sets it, and the next leader frees it. It outlives the server's
/// processes, but not the operating system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u64)]
pub enum State {
    /// No process, or one that has ended.
    #[default]
    Free = 0,
    /// A process that does not record its current work.
    Runs = 1,
    /// A process that records its current work, and has none.
    Idle = 2,
    /// A process that works on the recorded transaction, or table.
    Applies = 3,
    /// A process that ended by SIGQUIT, as another one had crashed.
    Quit = 4,
}

impl State {
    fn of(word: u64) -> Self {
        match word {
            1 => Self::Runs,
            2 => Self::Idle,
            3 => Self::Applies,
            4 => Self::Quit,
            _ => Self::Free,
        }
    }
}

/// Current work of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InHand {
    /// The provider's transaction; 0 for a table that is copied.
    pub xid: u64,
    /// Remote LSN of its commit record; 0 if unknown.
    pub commit_lsn: u64,
    /// Remote LSN by which the transaction can be skipped.
    pub error_lsn: u64,
    /// OID of the table that is changed, or copied; 0 for none yet.
    pub relation: u64,
}

impl InHand {
    fn words(self) -> Work {
        [self.xid, self.commit_lsn, self.error_lsn, self.relation]
    }

    fn of([xid, commit_lsn, error_lsn, relation]: Work) -> Self {
        Self {
            xid,
            commit_lsn,
            error_lsn,
            relation,
        }
    }

    fn is_same(self, other: Self) -> bool {
        self.xid == other.xid && (self.xid != 0 || self.relation == other.relation)
    }
}

/// Record of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Slot {
    /// Number of the server start in which the slot was written.
    pub life: u64,
    /// State of the process.
    pub state: State,
    /// Work of the process.
    pub in_hand: InHand,
}

/// Known deaths of a subscription's processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Head {
    /// Processes record their current work.
    pub is_cautious: bool,
    /// A process died at unknown work.
    pub is_unknown: bool,
    /// Deaths in a row at `at`.
    pub count: u64,
    /// The transaction, or table, of the last known death.
    pub at: InHand,
}

/// Words of an [`InHand`].
type Work = [u64; 4];

fn pack(words: [u64; 8]) -> Place {
    let mut bytes = [0; PLACE];
    for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *place = word.to_ne_bytes();
    }
    bytes
}

fn unpack(bytes: &Place) -> [u64; 8] {
    let mut words = [0; 8];
    for (word, place) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*place);
    }
    words
}

impl Slot {
    /// Returns the slot's bytes; the state is the second word.
    #[must_use]
    pub fn pack(self) -> Place {
        let [xid, commit_lsn, error_lsn, relation] = self.in_hand.words();
        let state = self.state as u64;
        pack([self.life, state, xid, commit_lsn, error_lsn, relation, 0, 0])
    }

    /// Reads a slot from any bytes.
    #[must_use]
    pub fn unpack(bytes: &Place) -> Self {
        let [life, state, xid, commit_lsn, error_lsn, relation, ..] = unpack(bytes);
        Self {
            life,
            state: State::of(state),
            in_hand: InHand::of([xid, commit_lsn, error_lsn, relation]),
        }
    }

    /// Returns whether the process died by a crash of its own, before the server start `now`.
    #[must_use]
    pub fn has_died(&self, now: u64) -> bool {
        self.life != now && matches!(self.state, State::Runs | State::Applies)
    }
}

impl Head {
    /// Returns the head's bytes.
    #[must_use]
    pub fn pack(self) -> Place {
        let [xid, commit_lsn, error_lsn, relation] = self.at.words();
        let flags = u64::from(self.is_cautious) | u64::from(self.is_unknown) << 1;
        pack([
            MAGIC, flags, self.count, xid, commit_lsn, error_lsn, relation, 0,
        ])
    }

    /// Reads a head from any bytes. If they are not a head's, no death is known.
    #[must_use]
    pub fn unpack(bytes: &Place) -> Self {
        let [magic, flags, count, xid, commit_lsn, error_lsn, relation, _] = unpack(bytes);
        if magic != MAGIC {
            return Self::default();
        }
        Self {
            is_cautious: flags & 1 != 0,
            is_unknown: flags & 2 != 0,
            count,
            at: InHand::of([xid, commit_lsn, error_lsn, relation]),
        }
    }

    /// Counts the slots of processes that have died.
    pub fn take_in(&mut self, died: &[Slot]) {
        if died.is_empty() {
            return;
        }
        self.is_cautious = true;
        let known = || died.iter().filter(|slot| slot.state == State::Applies);
        let again = known().find(|slot| self.count > 0 && slot.in_hand.is_same(self.at));
        let Some(slot) = again.or_else(|| known().next()) else {
            self.is_unknown = true;
            self.count = 0;
            return;
        };
        self.count = if again.is_some() {
            self.count.saturating_add(1)
        } else {
            1 + u64::from(self.is_unknown)
        };
        self.is_unknown = false;
        self.at = slot.in_hand;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(state: State, xid: u64, relation: u64) -> Slot {
        Slot {
            life: 1,
            state,
            in_hand: InHand {
                xid,
                commit_lsn: xid * 100,
                error_lsn: xid * 100 + 8,
                relation,
            },
        }
    }

    fn after(deaths: &[&[Slot]]) -> Head {
        let mut head = Head::default();
        for died in deaths {
            head = Head::unpack(&head.pack());
            head.take_in(died);
        }
        head
    }

    #[test]
    fn deaths_at_one_transaction_are_counted_in_a_row() {
        let at = slot(State::Applies, 7, 1);
        // The table may differ each time.
        let again = slot(State::Applies, 7, 2);
        assert_eq!(after(&[&[at], &[again], &[at]]).count, 3);
        assert_eq!(after(&[&[at], &[again]]).at.relation, 2);
    }

    #[test]
    fn another_transaction_begins_the_count_anew() {
        let (one, other) = (slot(State::Applies, 7, 1), slot(State::Applies, 8, 1));
        assert_eq!(after(&[&[one], &[one], &[other]]).count, 1);
        assert_eq!(after(&[&[one], &[one], &[other], &[one]]).count, 1);
    }

    #[test]
    fn of_two_that_died_the_one_that_did_so_before_counts() {
        let (one, other) = (slot(State::Applies, 7, 1), slot(State::Applies, 8, 1));
        let head = after(&[&[one], &[other, one]]);
        assert_eq!((head.count, head.at.xid), (2, 7));
    }

    #[test]
    fn a_death_that_was_not_written_down_counts_for_the_next_one() {
        let (unknown, at) = (slot(State::Runs, 0, 0), slot(State::Applies, 7, 1));
        let head = after(&[&[unknown]]);
        assert!(head.is_cautious);
        assert_eq!(head.count, 0);
        assert_eq!(after(&[&[unknown], &[at]]).count, 2);
        assert_eq!(after(&[&[unknown], &[unknown], &[at]]).count, 2);
    }

    #[test]
    fn tables_that_are_copied_are_told_apart() {
        let (one, other) = (slot(State::Applies, 0, 1), slot(State::Applies, 0, 2));
        assert_eq!(after(&[&[one], &[one]]).count, 2);
        assert_eq!(after(&[&[one], &[other]]).count, 1);
    }

    #[test]
    fn nobody_has_died_who_was_told_to_quit_or_is_there() {
        assert!(slot(State::Applies, 7, 1).has_died(2));
        assert!(slot(State::Runs, 0, 0).has_died(2));
        assert!(!slot(State::Applies, 7, 1).has_died(1));
        for state in [State::Free, State::Idle, State::Quit] {
            assert!(!slot(state, 7, 1).has_died(2));
        }
        let head = after(&[&[slot(State::Applies, 7, 1)], &[]]);
        assert_eq!(head.count, 1, "a restart without a death changes nothing");
    }

    #[test]
    fn bytes_come_back_and_any_bytes_are_read() {
        let at = slot(State::Applies, 7, 9);
        assert_eq!(Slot::unpack(&at.pack()), at);
        assert_eq!(Slot::unpack(&[0xFF; PLACE]).state, State::Free);
        assert_eq!(Head::unpack(&[0xFF; PLACE]), Head::default());
        assert_eq!(Head::unpack(&[0; PLACE]), Head::default());
    }
}
