//! What the user wants done about a conflict, by table and kind, and what that makes of the
//! decision that last-update-wins (`conflict.rs`) comes to. Run by the appliers; the names are also
//! checked where rules are set.
//!
//! Only `last_update_wins` and `first_update_wins` go by the versions alone, so that all nodes come
//! to the same row. The others say what one node does.

use std::str::FromStr;

use crate::conflict::{Action, Decision, Kind, Local, Version};

/// What is done about a conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Resolution {
    /// The larger version stays.
    #[default]
    LastUpdateWins,
    /// The smaller version stays.
    FirstUpdateWins,
    /// The incoming change is carried out.
    ApplyRemote,
    /// Nothing is done here.
    KeepLocal,
    /// The transaction is not applied: the subscription stops.
    Error,
    /// A function of the user says what becomes of both rows.
    Function,
}

/// A function of the user that is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function {
    /// Its OID.
    pub oid: u32,
    /// What it writes besides goes to the other nodes, as a change of this one.
    pub replicates: bool,
}

impl Resolution {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::LastUpdateWins,
        Self::FirstUpdateWins,
        Self::ApplyRemote,
        Self::KeepLocal,
        Self::Error,
        Self::Function,
    ];

    /// Its name in SQL.
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

/// A name that is none of a resolution, or of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("unknown name")]
pub struct UnknownName;

impl FromStr for Resolution {
    type Err = UnknownName;

    /// By its name, or by the one that Alibaba's DTS has for it (PVLDB 17(12), 2024, section 5).
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

/// How far away from a table a rule was set: what is nearer counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// For all tables.
    Default,
    /// For a table of which it is a partition, so many levels up, at least 1.
    Ancestor(u32),
    /// For the table itself.
    Table,
}

/// A rule that may concern a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// For what it was set.
    pub level: Level,
    /// For which kind; `None` for all.
    pub kind: Option<Kind>,
    /// What is to be done.
    pub resolution: Resolution,
    /// Who is asked, if that is it.
    pub function: Option<Function>,
}

/// What is done about each kind of conflict in one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rules {
    resolutions: [(Resolution, Option<Function>); Kind::ALL.len()],
    /// A function is asked about some kind.
    asks: bool,
    /// Rows may be there that were made of several.
    has_merged: bool,
}

impl Rules {
    /// The nearest rule counts for each kind, and of the rules for one table that for the kind
    /// alone.
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

    /// The same, and rows may be there that were made of several, by functions that were asked
    /// before or by rules for columns.
    #[must_use]
    pub fn with_merged_rows(self, may_be: bool) -> Self {
        Self {
            has_merged: self.has_merged || may_be,
            ..self
        }
    }

    /// Whether a row may be one that was made of several.
    #[must_use]
    pub fn may_have_merged_rows(&self) -> bool {
        self.has_merged || self.asks
    }

    /// Whether the newer version wins whatever meets.
    #[must_use]
    pub fn go_by_versions(&self) -> bool {
        self.resolutions
            .iter()
            .all(|(resolution, _)| *resolution == Resolution::LastUpdateWins)
    }

    /// Whether a function is asked about some kind.
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

    /// Who is asked about a kind.
    #[must_use]
    pub fn function(&self, kind: Kind) -> Option<Function> {
        self.find(kind).1
    }

    /// What is done about a kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> Resolution {
        self.find(kind).0
    }

    /// The decision on a change of version `remote` that meets `local`, given that of
    /// last-update-wins. What is no conflict stays as it is.
    ///
    /// # Errors
    /// The kind, when the rule for it is `error`.
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
            // Where there is no row, nothing can be deleted.
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
            // There is no row that it could say anything about.
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

    /// Two rows that meet on two nodes, each being local on one: both nodes keep the same one, the
    /// older.
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
