//! Decides by its name how a relation of the stream belongs to a subscription. Run by the leader
//! when the first change of a relation arrives, and again after the local table was altered.
//!
//! Changes find their table by name. `braid.subscription_table` remembers the name together with
//! the table that had it. If another table has the name now, the former one was rebuilt, recreated
//! or swapped. The verdict then depends on whether the new table has all rows of the former one.
//!
//! Invariant: a change is applied, or its table is recorded as left out, or the subscription stops.
//! Pure.

/// The local relation that has the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Here {
    /// There is none.
    Absent,
    /// An ordinary or a partitioned table.
    Table,
    /// A view, a sequence or another relation without writable rows of its own.
    Other,
}

/// The subscription's entry for the local table that has the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KnownAs {
    /// There is no entry.
    Unknown,
    /// The table belongs to the subscription under this name.
    ThisName,
    /// The table belongs to the subscription under another name: it was renamed locally.
    OtherName {
        /// Earlier in the stream the provider's relation had that other name, so it was renamed
        /// too.
        renamed_there: bool,
    },
}

/// A table that has taken over the name of another one, which belongs to the subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own, read from a catalog"
)]
pub struct Successor {
    /// The initial copy of the former table was complete.
    pub was_ready: bool,
    /// The table has no rows.
    pub is_empty: bool,
    /// The transaction that created the table also gave it the name.
    pub made_with_name: bool,
    /// The transaction that created the table also filled it.
    pub filled_when_made: bool,
    /// Rows are found by a key.
    pub is_keyed: bool,
    /// Other nodes send changes as well.
    pub others_write: bool,
}

/// The verdict on a relation's changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Apply the changes.
    Member,
    /// Apply the changes, and record the table's new name.
    Rename,
    /// Add the new table to the subscription.
    Join,
    /// Leave the changes out: the publication has gained the table, but the subscription was not
    /// refreshed.
    LeaveOut,
    /// Apply the changes: the table was rebuilt with the rows of the former one.
    CarryOn,
    /// Copy the table, keeping its rows, then apply the changes.
    Copy {
        /// Do not copy the table if somebody writes to it first.
        unless_filled: bool,
    },
    /// Stop the subscription: it is unknown which rows the table lacks.
    Stop,
    /// Ask the provider for the reason, as there is no table to apply the changes to.
    Ask,
}

/// Decides about a relation. `successor` is required if another table belongs to the subscription
/// under the name.
#[must_use]
pub fn decide(
    here: Here,
    known_as: KnownAs,
    all_tables: bool,
    successor: Option<Successor>,
) -> Verdict {
    match here {
        Here::Absent => return Verdict::Ask,
        Here::Other => return Verdict::Stop,
        Here::Table => {}
    }
    match (known_as, successor) {
        (KnownAs::ThisName, _) => Verdict::Member,
        (KnownAs::OtherName { .. }, None) => Verdict::Rename,
        (KnownAs::OtherName { renamed_there }, Some(_)) if renamed_there => Verdict::Rename,
        (KnownAs::Unknown, None) if all_tables => Verdict::Join,
        (KnownAs::Unknown, None) => Verdict::LeaveOut,
        (_, Some(successor)) => succeed(known_as, successor),
    }
}

fn succeed(known_as: KnownAs, table: Successor) -> Verdict {
    if table.is_empty {
        // Two nodes that recreate such a table would wait for each other during the copies.
        let unless_filled = !table.is_keyed && table.others_write;
        return Verdict::Copy { unless_filled };
    }
    // A swapped-in table may lack rows that were written to the former one after it was filled.
    if known_as != KnownAs::Unknown || !table.made_with_name {
        return Verdict::Stop;
    }
    if table.filled_when_made {
        // The former table could not be written any more: the name was free, or locked.
        return if table.was_ready {
            Verdict::CarryOn
        } else {
            Verdict::Stop
        };
    }
    if table.is_keyed || !table.others_write {
        Verdict::Copy {
            unless_filled: false,
        }
    } else {
        Verdict::Stop
    }
}

#[cfg(test)]
mod tests {
    use super::{Here, KnownAs, Successor, Verdict, decide};

    const FILLED: Successor = Successor {
        was_ready: true,
        is_empty: false,
        made_with_name: true,
        filled_when_made: true,
        is_keyed: true,
        others_write: true,
    };
    const COPY: Verdict = Verdict::Copy {
        unless_filled: false,
    };

    fn unknown(successor: Successor) -> Verdict {
        decide(Here::Table, KnownAs::Unknown, false, Some(successor))
    }

    #[test]
    fn a_table_without_a_predecessor() {
        let table = |known, all| decide(Here::Table, known, all, None);
        assert_eq!(table(KnownAs::ThisName, false), Verdict::Member);
        assert_eq!(table(KnownAs::Unknown, true), Verdict::Join);
        assert_eq!(table(KnownAs::Unknown, false), Verdict::LeaveOut);
        for renamed_there in [false, true] {
            let known = KnownAs::OtherName { renamed_there };
            assert_eq!(table(known, false), Verdict::Rename);
        }
    }

    #[test]
    fn nothing_is_applied_to_what_is_no_table() {
        for known in [KnownAs::Unknown, KnownAs::ThisName] {
            for successor in [None, Some(FILLED)] {
                assert_eq!(decide(Here::Absent, known, true, successor), Verdict::Ask);
                assert_eq!(decide(Here::Other, known, true, successor), Verdict::Stop);
            }
        }
    }

    #[test]
    fn a_rebuilt_table_goes_on() {
        assert_eq!(unknown(FILLED), Verdict::CarryOn);
        let was_ready = false;
        assert_eq!(
            unknown(Successor {
                was_ready,
                ..FILLED
            }),
            Verdict::Stop
        );
    }

    #[test]
    fn a_table_that_was_made_anew_is_copied() {
        let anew = Successor {
            filled_when_made: false,
            ..FILLED
        };
        assert_eq!(unknown(anew), COPY);
        let is_keyed = false;
        assert_eq!(unknown(Successor { is_keyed, ..anew }), Verdict::Stop);
        let alone = Successor {
            is_keyed,
            others_write: false,
            ..anew
        };
        assert_eq!(unknown(alone), COPY);
        for was_ready in [false, true] {
            let empty = Successor {
                is_empty: true,
                made_with_name: false,
                was_ready,
                ..anew
            };
            assert_eq!(unknown(empty), COPY);
            let unless_filled = true;
            let keyless = Successor { is_keyed, ..empty };
            assert_eq!(unknown(keyless), Verdict::Copy { unless_filled });
        }
    }

    #[test]
    fn a_table_that_was_swapped_in_needs_somebody_who_knows() {
        let made_with_name = false;
        let swapped = Successor {
            made_with_name,
            ..FILLED
        };
        assert_eq!(unknown(swapped), Verdict::Stop);
        let known = |renamed_there| {
            let known = KnownAs::OtherName { renamed_there };
            decide(Here::Table, known, true, Some(FILLED))
        };
        assert_eq!(known(false), Verdict::Stop);
        assert_eq!(known(true), Verdict::Rename);
    }
}
