//! The mode of a table's balancer: an option of the group, which all members agree on.

use std::fmt;

use crate::entry::TableName;
use crate::rules::Time;

/// The use that is made of decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Decisions are written down.
    Advise,
    /// Decisions are written down, and their rules added.
    On,
}

impl Mode {
    /// The word for users.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Advise => "advise",
            Self::On => "on",
        }
    }
}

/// The balancer of a table that is not off, and since when it has its mode. Decisions before that
/// time do not count any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Balanced {
    /// The mode.
    pub mode: Mode,
    /// The time from which the mode counts.
    pub since: Time,
}

/// How the names of the options begin.
const PREFIX: &str = "balancer ";

impl Balanced {
    /// The name of a table's option.
    #[must_use]
    pub fn option(table: &TableName) -> String {
        format!("{PREFIX}{table}")
    }

    /// Whether an option of the group is a table's balancer.
    #[must_use]
    pub fn is_option(name: &str) -> bool {
        name.starts_with(PREFIX)
    }

    /// Reads the value of a table's option: what [`fmt::Display`] writes.
    #[must_use]
    pub fn read(value: &str) -> Option<Self> {
        let (word, since) = value.split_once(' ')?;
        let mode = [Mode::Advise, Mode::On]
            .into_iter()
            .find(|mode| mode.word() == word)?;
        let since = Time(since.parse().ok()?);
        Some(Self { mode, since })
    }
}

impl fmt::Display for Balanced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.mode.word(), self.since.0)
    }
}

#[cfg(test)]
mod tests {
    use super::{Balanced, Mode};
    use crate::entry::TableName;
    use crate::rules::Time;

    #[test]
    fn options_come_back() {
        for mode in [Mode::Advise, Mode::On] {
            let since = Time(-5);
            let balanced = Balanced { mode, since };
            assert_eq!(Balanced::read(&balanced.to_string()), Some(balanced));
        }
        let wrong = ["", "on", "on ", "off 3", "on x", "On 3", "advise  3"];
        assert!(wrong.iter().all(|value| Balanced::read(value).is_none()));
        let name = Balanced::option(&TableName::of("public", "orders").unwrap());
        assert!(Balanced::is_option(&name) && !Balanced::is_option("recover 3"));
        assert_eq!(name, "balancer public.orders");
    }
}
