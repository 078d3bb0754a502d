//! Rules for single columns: which value a column gets if a change conflicts with a row, whichever
//! of them wins the rest. Run by the appliers; the names are also checked when rules are set.
//!
//! **A sum** (`delta`) adds up what all inserts and updates of the row contribute. An insert
//! contributes its value. An update contributes the difference between its new row and the row that
//! its writer saw, which WAL has under REPLICA IDENTITY FULL. Each change arrives once, and
//! addition is commutative, so versions play no part. So an insert that conflicts with a row adds
//! too. If the newer insert replaced the older one, later additions to the older one would count on
//! one node only. And an update that arrives before its insert leaves its difference in the row
//! that it creates; the insert adds the rest. Null counts as 0. If a sum is 0, it is null if the
//! winning row has null.
//!
//! **A largest or smallest value** (`max`, `min`) is that of all values written; any value beats
//! null. Local writers are expected to follow the rule: a value that one of them lowers (raises)
//! stays changed on its own node only.
//!
//! **A register of its own** (`last_update_wins`) has the value of the newest change that wrote the
//! column, even if another change wrote the rest of the row. An insert writes the column. An update
//! writes it if the new value differs from the one that its writer saw. The writers of a row's
//! columns are remembered as long as an older change can still arrive ([`takes`]). A column without
//! such a record has no newer writer than the row's version.
//!
//! **A deletion** ends all of them: it wins or loses by version, like the whole row. If a row was
//! deleted and inserted anew, older changes of the deleted row add nothing to the new one. A newer
//! update brings a deleted row back as its writer saw it. A node that applied the update first
//! still has what others added, so nodes can come to differ in this case.

use std::str::FromStr;

use crate::conflict::{Action, Decision, Local, Version};
use crate::resolution::UnknownName;

/// The rule that decides a column's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ColumnRule {
    /// The value of the newest change that wrote the column.
    LastUpdateWins,
    /// The sum of all differences.
    Delta,
    /// The largest of all values written.
    Max,
    /// The smallest of all values written.
    Min,
}

impl ColumnRule {
    /// All rules.
    pub const ALL: [Self; 4] = [Self::Delta, Self::Max, Self::Min, Self::LastUpdateWins];

    /// Returns the rule's name in SQL.
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

/// Operations on a column's values, which this module treats as opaque. Null is not among them.
pub trait Values {
    /// A value.
    type Value: Copy;
    /// The error if there is no sum.
    type Error;

    /// Returns `base + (new - old)`, null counting as 0, and whether the result is 0.
    ///
    /// # Errors
    /// If the sum is outside the column's range or is not a number.
    fn sum(
        &mut self,
        base: Option<Self::Value>,
        new: Option<Self::Value>,
        old: Option<Self::Value>,
    ) -> Result<(Self::Value, bool), Self::Error>;

    /// Returns whether both are equal, to the last bit.
    fn is_same(&mut self, one: Self::Value, other: Self::Value) -> bool;

    /// Returns whether `one` comes after `other`, in an order in which only identical values are
    /// equal.
    fn is_after(&mut self, one: Self::Value, other: Self::Value) -> bool;
}

/// The local state that a change is merged with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Here<V> {
    /// A row with this value in the column.
    Row(Option<V>),
    /// A row with this value whose version is unknown: it already contains everything that was
    /// inserted.
    Unversioned(Option<V>),
    /// No row and no tombstone: the change that creates the row is still to arrive.
    Nothing,
    /// A tombstone of an older deletion.
    Deleted,
}

/// The change's part for the column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Came<V> {
    /// An insert with this value.
    Insert(Option<V>),
    /// An update of the column.
    Update {
        /// Value after the change.
        new: Option<V>,
        /// Value before the change as its writer saw it; used for sums only.
        old: Option<V>,
    },
}

/// Returns whether a change writes the column.
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

/// Returns whether a change that writes a column with a register of its own sets the value of an
/// existing row. It does unless a newer change wrote the column. `newest` is the remembered version
/// of the column's last writer; `None` if nothing remembered can be newer.
#[must_use]
pub fn takes(newest: Option<Version<'_>>, remote: Version<'_>) -> bool {
    newest.is_none_or(|newest| newest <= remote)
}

/// Returns the column's value after a change that is to be written, or that loses against an
/// existing row. For a register of its own, `wins` says whether the change sets the value.
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

/// Returns the better value; any value is better than null.
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
    // Not only faster: equal numbers may have several representations.
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

/// Returns whether the change that conflicts with a row is the one that made it, arriving by
/// another way: then it adds nothing.
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
