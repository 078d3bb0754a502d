//! The user's rules for conflicts, by table and kind, and how they change the decision of
//! last-update-wins (`conflict.rs`). Run by the appliers; the names are also checked when rules are
//! set.
//!
//! Only `last_update_wins` and `first_update_wins` depend on the versions alone, so that all nodes
//! end with the same row. The others define what one node does.

use std::str::FromStr;

use crate::conflict::{Action, Decision, Kind, Local, Version};

/// How a conflict is resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Resolution {
    /// The larger version stays.
    #[default]
    LastUpdateWins,
    /// The smaller version stays.
    FirstUpdateWins,
    /// The incoming change is applied.
    ApplyRemote,
    /// The local state is kept.
    KeepLocal,
    /// The transaction is not applied: the subscription stops.
    Error,
    /// A user's function returns the row to keep.
    Function,
}

/// A user's function that resolves conflicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function {
    /// OID of the function.
    pub oid: u32,
    /// Other writes of the function are replicated, as changes of this node.
    pub replicates: bool,
}

impl Resolution {
    /// All resolutions.
    pub const ALL: [Self; 6] = [
        Self::LastUpdateWins,
        Self::FirstUpdateWins,
        Self::ApplyRemote,
        Self::KeepLocal,
        Self::Error,
        Self::Function,
    ];

    /// Returns the resolution's name in SQL.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LastUpdateWins => "last_update_wins",
            Self::FirstUpdateWins => "first_update_wins",
            Self::ApplyRemote => "apply_remote",
            Self::KeepLocal => "keep_local",
            Self::Error => "error",
            Self::Function => "function",
        }
    }
}

/// The name of no resolution, or no kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("unknown name")]
pub struct UnknownName;

impl FromStr for Resolution {
    type Err = UnknownName;

    /// Parses a resolution's name, or the one in Alibaba's DTS (PVLDB 17(12), 2024, section 5).
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let meant = match name {
            "overwrite" => "apply_remote",
            "ignore" => "keep_local",
            "interrupt" => "error",
            other => other,
        };
        Self::ALL
            .into_iter()
            .find(|resolution| resolution.name() == meant)
            .ok_or(UnknownName)
    }
}

impl FromStr for Kind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or(UnknownName)
    }
}

/// How far from a table a rule was set; the nearest counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// For all tables.
    Default,
    /// For a partitioned table, of which the table is a partition this many levels down, at least
    /// 1.
    Ancestor(u32),
    /// For the table itself.
    Table,
}

/// A rule that may concern a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Where the rule was set.
    pub level: Level,
    /// The kind of conflict; `None` for all kinds.
    pub kind: Option<Kind>,
    /// The resolution.
    pub resolution: Resolution,
    /// The function to call, if the resolution is a function.
    pub function: Option<Function>,
}

/// The resolution of each kind of conflict in one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rules {
    resolutions: [(Resolution, Option<Function>); Kind::ALL.len()],
    /// Some kind is resolved by a function.
    asks: bool,
    /// The table may have merged rows.
    has_merged: bool,
}

impl Rules {
    /// Selects for each kind the nearest rule; at the same level a rule for the kind comes before
    /// one for all kinds.
    #[must_use]
    pub fn new(rules: &[Rule]) -> Self {
        let rank = |rule: &Rule| {
            let (near, steps) = match rule.level {
                Level::Default => (0, 0),
                Level::Ancestor(steps) => (1, u32::MAX - steps),
                Level::Table => (2, 0),
            };
            (near, steps, rule.kind.is_some())
        };
        let resolutions = Kind::ALL.map(|kind| {
            rules
                .iter()
                .filter(|rule| rule.kind.is_none_or(|of| of == kind))
                .max_by_key(|rule| rank(rule))
                .map(|rule| (rule.resolution, rule.function))
                .unwrap_or_default()
        });
        Self {
            resolutions,
            asks: resolutions
                .iter()
                .any(|(resolution, _)| *resolution == Resolution::Function),
            has_merged: false,
        }
    }

    /// Returns the rules for a table that may have merged rows (if `may_be`), from functions that
    /// were called before or from rules for columns.
    #[must_use]
    pub fn with_merged_rows(self, may_be: bool) -> Self {
        Self {
            has_merged: self.has_merged || may_be,
            ..self
        }
    }

    /// Returns whether a row may be a merged one.
    #[must_use]
    pub fn may_have_merged_rows(&self) -> bool {
        self.has_merged || self.asks
    }

    /// Returns whether the newer version wins in every conflict.
    #[must_use]
    pub fn go_by_versions(&self) -> bool {
        self.resolutions
            .iter()
            .all(|(resolution, _)| *resolution == Resolution::LastUpdateWins)
    }

    /// Returns whether some kind is resolved by a function.
    #[must_use]
    pub fn asks(&self) -> bool {
        self.asks
    }

    fn find(&self, kind: Kind) -> (Resolution, Option<Function>) {
        Kind::ALL
            .into_iter()
            .zip(self.resolutions)
            .find(|(candidate, _)| *candidate == kind)
            .map(|(_, found)| found)
            .unwrap_or_default()
    }

    /// Returns the function for a kind.
    #[must_use]
    pub fn function(&self, kind: Kind) -> Option<Function> {
        self.find(kind).1
    }

    /// Returns the resolution of a kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> Resolution {
        self.find(kind).0
    }

    /// Applies the rules to the decision of last-update-wins about a change of version `remote`
    /// that conflicts with `local`. A decision without a conflict is returned as it is.
    ///
    /// # Errors
    /// The kind, if its rule is `error`.
    pub fn resolve(
        &self,
        decision: Decision,
        local: Local<'_>,
        remote: Version<'_>,
    ) -> Result<Decision, Kind> {
        let Some(kind) = decision.conflict else {
            return Ok(decision);
        };
        let decided = |action, reason| Decision {
            // Without a row, nothing can be deleted.
            action: if kind == Kind::DeleteMissing {
                Action::Keep
            } else {
                action
            },
            conflict: Some(kind),
            reason,
        };
        match self.of(kind) {
            Resolution::LastUpdateWins => Ok(decision),
            Resolution::FirstUpdateWins => Ok(match local {
                Local::Present(version)
                | Local::Merged(version)
                | Local::OwnMerged(version)
                | Local::Deleted(version) => {
                    if remote < version {
                        decided(Action::Apply, "the remote version is older")
                    } else {
                        decided(Action::Keep, "the local version is older")
                    }
                }
                Local::Unversioned => decided(
                    Action::Keep,
                    "the local row is older than anything that is replicated",
                ),
                Local::Missing | Local::Own => decision,
            }),
            Resolution::ApplyRemote => Ok(decided(
                Action::Apply,
                "what comes from other nodes is applied",
            )),
            Resolution::KeepLocal => Ok(decided(Action::Keep, "what is here is kept")),
            Resolution::Error => Err(kind),
            // There is no row to call the function with.
            Resolution::Function if kind == Kind::DeleteMissing => Ok(decision),
            Resolution::Function => Ok(Decision {
                action: Action::Ask,
                conflict: Some(kind),
                reason: "the function is asked",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conflict::{decide_delete, decide_insert, decide_new_key, decide_update};

    const OLD: Version<'_> = Version {
        timestamp: 10,
        origin: "a",
    };
    const NEW: Version<'_> = Version {
        timestamp: 10,
        origin: "b",
    };

    fn all(resolution: Resolution) -> Rules {
        Rules::new(&[Rule {
            level: Level::Default,
            kind: None,
            resolution,
            function: None,
        }])
    }

    type Decide = fn(Local<'_>, Version<'_>, bool) -> Decision;
    const DECIDES: [Decide; 4] = [decide_insert, decide_update, decide_delete, decide_new_key];

    fn meetings() -> impl Iterator<Item = (Decide, Local<'static>, Version<'static>)> {
        let locals = |version| {
            [
                Local::Missing,
                Local::Deleted(version),
                Local::Own,
                Local::Unversioned,
                Local::Present(version),
            ]
        };
        DECIDES.into_iter().flat_map(move |decide| {
            [(OLD, NEW), (NEW, OLD), (OLD, OLD)]
                .into_iter()
                .flat_map(move |(local, remote)| {
                    locals(local).map(move |local| (decide, local, remote))
                })
        })
    }

    #[test]
    fn names_go_both_ways_and_those_of_dts_are_understood() {
        for resolution in Resolution::ALL {
            assert_eq!(resolution.name().parse(), Ok(resolution));
        }
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert_eq!("overwrite".parse(), Ok(Resolution::ApplyRemote));
        assert_eq!("ignore".parse(), Ok(Resolution::KeepLocal));
        assert_eq!("interrupt".parse(), Ok(Resolution::Error));
        assert_eq!("newest".parse::<Resolution>(), Err(UnknownName));
    }

    #[test]
    fn the_nearest_rule_counts_and_then_that_for_the_kind() {
        let rule = |level, kind, resolution| Rule {
            level,
            kind,
            resolution,
            function: None,
        };
        let kind = Some(Kind::InsertExists);
        let rules = [
            rule(Level::Default, kind, Resolution::Error),
            rule(Level::Ancestor(2), kind, Resolution::ApplyRemote),
            rule(Level::Ancestor(1), None, Resolution::FirstUpdateWins),
            rule(Level::Ancestor(1), kind, Resolution::KeepLocal),
        ];
        let found = Rules::new(&rules);
        assert_eq!(found.of(Kind::InsertExists), Resolution::KeepLocal);
        assert_eq!(found.of(Kind::UpdateMissing), Resolution::FirstUpdateWins);
        let own = [
            rules.as_slice(),
            &[rule(Level::Table, None, Resolution::Error)],
        ]
        .concat();
        assert_eq!(Rules::new(&own).of(Kind::InsertExists), Resolution::Error);
        assert_eq!(
            Rules::new(&rules[..1]).of(Kind::UpdateMissing),
            Resolution::LastUpdateWins
        );
    }

    #[test]
    fn without_rules_and_without_a_conflict_nothing_changes() {
        for (decide, local, remote) in meetings() {
            let decision = decide(local, remote, true);
            assert_eq!(
                Rules::default().resolve(decision, local, remote),
                Ok(decision)
            );
            if decision.conflict.is_none() {
                for resolution in Resolution::ALL {
                    assert_eq!(
                        all(resolution).resolve(decision, local, remote),
                        Ok(decision)
                    );
                }
            }
        }
    }

    #[test]
    fn one_side_always_stays_and_a_conflict_is_never_hidden() {
        for (decide, local, remote) in meetings() {
            let decision = decide(local, remote, true);
            let Some(kind) = decision.conflict else {
                continue;
            };
            let by = |resolution| all(resolution).resolve(decision, local, remote);
            assert_eq!(by(Resolution::Error), Err(kind));
            let kept = by(Resolution::KeepLocal).unwrap();
            assert_eq!((kept.action, kept.conflict), (Action::Keep, Some(kind)));
            let applied = by(Resolution::ApplyRemote).unwrap();
            let wanted = if kind == Kind::DeleteMissing {
                Action::Keep
            } else {
                Action::Apply
            };
            assert_eq!((applied.action, applied.conflict), (wanted, Some(kind)));
        }
    }

    /// Two rows conflict on two nodes, each being local on one: both nodes keep the older one.
    #[test]
    fn first_update_wins_keeps_one_row_on_both_nodes() {
        let rules = all(Resolution::FirstUpdateWins);
        for decide in [decide_insert, decide_update, decide_new_key] {
            let resolve = |local, remote| {
                let local = Local::Present(local);
                rules
                    .resolve(decide(local, remote, true), local, remote)
                    .unwrap()
                    .action
            };
            assert_eq!(resolve(OLD, NEW), Action::Keep);
            assert_eq!(resolve(NEW, OLD), Action::Apply);
        }
    }
}
