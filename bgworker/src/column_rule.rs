//! Rules for single columns: what becomes of a column's value where a change meets a row, whichever
//! of them wins the rest. Run by the appliers; the names are also checked where rules are set.
//!
//! **A sum** (`delta`) is what all inserts and updates of the row add to it: an insert its value,
//! an update the difference between its row and the one that its writer saw, which WAL has under
//! REPLICA IDENTITY FULL. Each change comes once, and addition does not mind the order, so no
//! version is asked. That is why an insert that meets a row adds too: were the newer one to replace
//! the older, what was added to the older one since would count on one node only. And why an update
//! that comes before its insert leaves its difference in the row that it makes: the insert brings
//! the rest. Null counts as 0. A sum of 0 is null where the value of the row that wins is.
//!
//! **A largest or smallest value** (`max`, `min`) is that of all values written; null loses. Local
//! writers are to do what the rule does: a value that one of them lowers (raises) is so on its own
//! node only.
//!
//! **A register of its own** (`last_update_wins`) has the value of the newest change that wrote the
//! column, whoever wrote the rest of the row. An insert writes it, an update where its row has
//! another value than the one that its writer saw. Who wrote the columns of a row is remembered for
//! as long as an older change can still come ([`takes`]): all that is newer than what comes is
//! among that, or the row's version tells that there is none.
//!
//! **A deletion** ends all of them: it wins or loses by version, like the whole row. What an older
//! change adds to a row that was deleted and inserted anew is not for that row, and does not count.
//! A newer update brings a deleted row back as its writer saw it, where a node that had the update
//! first still has what others added: there nodes can come to differ.

use std::str::FromStr;

use crate::conflict::{Action, Decision, Local, Version};
use crate::resolution::UnknownName;

/// What becomes of a column's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ColumnRule {
    /// The value of the newest change that wrote the column.
    LastUpdateWins,
    /// Differences add up.
    Delta,
    /// The largest of all.
    Max,
    /// The smallest of all.
    Min,
}

impl ColumnRule {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Delta, Self::Max, Self::Min, Self::LastUpdateWins];

    /// Its name in SQL.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LastUpdateWins => "last_update_wins",
            Self::Delta => "delta",
            Self::Max => "max",
            Self::Min => "min",
        }
    }
}

impl FromStr for ColumnRule {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .into_iter()
            .find(|rule| rule.name() == name)
            .ok_or(UnknownName)
    }
}

/// A column's values, of which this module knows nothing else. Null is none of them.
pub trait Values {
    /// A value.
    type Value: Copy;
    /// Why there is no sum.
    type Error;

    /// `base + (new - old)`, null counting as 0; and whether that is 0.
    ///
    /// # Errors
    /// When the sum is not in the column's range, or is none.
    fn sum(
        &mut self,
        base: Option<Self::Value>,
        new: Option<Self::Value>,
        old: Option<Self::Value>,
    ) -> Result<(Self::Value, bool), Self::Error>;

    /// Whether both are the same, to the last bit.
    fn is_same(&mut self, one: Self::Value, other: Self::Value) -> bool;

    /// Whether `one` comes after `other`, in an order in which only values that are the same are
    /// equal.
    fn is_after(&mut self, one: Self::Value, other: Self::Value) -> bool;
}

/// What a change meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Here<V> {
    /// A row, with this in the column.
    Row(Option<V>),
    /// The same, of a row whose version is not known: whatever was inserted is in it.
    Unversioned(Option<V>),
    /// No row, and no trace of one: what made it is still to come.
    Nothing,
    /// An older deletion.
    Deleted,
}

/// What a change says of the column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Came<V> {
    /// A row with this value.
    Insert(Option<V>),
    /// This value instead of the other one.
    Update {
        /// After the change.
        new: Option<V>,
        /// As its writer saw it before; of no meaning but for sums.
        old: Option<V>,
    },
}

/// Whether a change writes the column.
pub fn writes<P: Values>(values: &mut P, came: Came<P::Value>) -> bool {
    match came {
        Came::Insert(_) => true,
        Came::Update {
            new: Some(new),
            old: Some(old),
        } => !values.is_same(new, old),
        Came::Update { new, old } => new.is_some() || old.is_some(),
    }
}

/// Whether a change that writes a column with a register of its own gives it its value, where there
/// is a row: unless what wrote it here is newer. That is the `newest` that is remembered, and
/// `None` where nothing is that may be newer.
#[must_use]
pub fn takes(newest: Option<Version<'_>>, remote: Version<'_>) -> bool {
    newest.is_none_or(|newest| newest <= remote)
}

/// The column's value after a change that is to be written, or, where there is a row, loses. Of a
/// register of its own `wins` says whether the change gives it its value.
///
/// # Errors
/// As [`Values::sum`].
pub fn merge<P: Values>(
    values: &mut P,
    rule: ColumnRule,
    here: Here<P::Value>,
    came: Came<P::Value>,
    wins: bool,
) -> Result<Option<P::Value>, P::Error> {
    let (Came::Insert(new) | Came::Update { new, .. }) = came;
    let local = match here {
        Here::Row(local) | Here::Unversioned(local) => Some(local),
        Here::Nothing | Here::Deleted => None,
    };
    match (rule, local) {
        (ColumnRule::LastUpdateWins, Some(local)) => Ok(if wins { new } else { local }),
        (ColumnRule::Max, Some(local)) => {
            Ok(pick(local, new, |one, other| values.is_after(one, other)))
        }
        (ColumnRule::Min, Some(local)) => {
            Ok(pick(local, new, |one, other| values.is_after(other, one)))
        }
        (ColumnRule::LastUpdateWins | ColumnRule::Max | ColumnRule::Min, None) => Ok(new),
        (ColumnRule::Delta, _) => add(values, here, came, wins),
    }
}

/// The value that is better, and any rather than none.
fn pick<V: Copy>(
    local: Option<V>,
    new: Option<V>,
    mut is_better: impl FnMut(V, V) -> bool,
) -> Option<V> {
    match (local, new) {
        (Some(local), Some(new)) => Some(if is_better(new, local) { new } else { local }),
        (local, new) => local.or(new),
    }
}

fn add<P: Values>(
    values: &mut P,
    here: Here<P::Value>,
    came: Came<P::Value>,
    wins: bool,
) -> Result<Option<P::Value>, P::Error> {
    let (local, new, old) = match (here, came) {
        (Here::Unversioned(local), Came::Insert(_)) => return Ok(local),
        (Here::Nothing | Here::Deleted, Came::Insert(new))
        | (Here::Deleted, Came::Update { new, .. }) => return Ok(new),
        (Here::Row(local), Came::Insert(new)) => (local, new, None),
        (Here::Row(local) | Here::Unversioned(local), Came::Update { new, old }) => {
            (local, new, old)
        }
        (Here::Nothing, Came::Update { new, old }) => (None, new, old),
    };
    let mut same = |one: Option<P::Value>, other: Option<P::Value>| match (one, other) {
        (Some(one), Some(other)) => values.is_same(one, other),
        (one, other) => one.is_none() && other.is_none(),
    };
    // Not only quicker: of numbers that are equal there may be several.
    let is_left = same(new, old) && !matches!(here, Here::Nothing);
    if is_left && (!wins || local.is_some() == new.is_some()) {
        return Ok(local);
    }
    if wins && same(local, old) {
        return Ok(new);
    }
    let (sum, is_zero) = values.sum(local, new, old)?;
    let winner = if wins { new } else { local };
    Ok((!is_zero || winner.is_some()).then_some(sum))
}

/// Whether a change that meets a row is the very one that made it, by another way: then it adds
/// nothing.
#[must_use]
pub fn is_again(decision: Decision, local: Local<'_>, remote: Version<'_>) -> bool {
    let known =
        matches!(local, Local::Present(version) | Local::Merged(version) if version == remote);
    known && decision.action == Action::Keep && decision.conflict.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for rule in ColumnRule::ALL {
            assert_eq!(rule.name().parse(), Ok(rule));
        }
        assert_eq!("sum".parse::<ColumnRule>(), Err(UnknownName));
    }
}
