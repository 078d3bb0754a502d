//! Tells whether an incoming change and the row that it conflicts with are concurrent: the change's
//! writer had not seen that row. Run by the appliers, for the conflict history only. The result
//! never decides which of the two stays.
//!
//! A writer that updates or deletes a row replaces the newest version on its node. The provider
//! reads that version from its table, and sends it if another node wrote it. If the local row has
//! exactly that version, the writer has seen the row. All other answers rest on causality: a commit
//! never gets a version older than the rows that it replaces (`crates/node/src/clock.rs`).

use crate::conflict::{Kind, Local, Version};

/// The writer of a change, as far as known.
#[derive(Debug, Clone, Copy)]
pub struct Writer<'a> {
    /// The change's version.
    pub version: Version<'a>,
    /// Version of the row that the change replaced, if another node wrote that row.
    pub replaced: Option<Version<'a>>,
    /// Every node decides by versions alone which row stays.
    pub by_versions: bool,
}

/// Returns whether the change and the local row are concurrent. `None` if that is not known;
/// `Some(false)` only if the writer has seen this very row.
#[must_use]
pub fn concurrent(kind: Kind, local: Local<'_>, writer: Writer<'_>) -> Option<bool> {
    let here = match local {
        Local::Present(version) | Local::Merged(version) | Local::Deleted(version) => version,
        Local::Missing | Local::Own | Local::Unversioned | Local::OwnMerged(_) => return None,
    };
    if here > writer.version {
        return Some(true);
    }
    match kind {
        Kind::UpdateOriginDiffers | Kind::DeleteOriginDiffers => {
            let replaced = writer.replaced?;
            match local {
                Local::Present(_) if replaced == here => Some(false),
                // The writer's node did not yet have the local row.
                _ if writer.by_versions && replaced < here => Some(true),
                _ => None,
            }
        }
        // At the writer, the row existed, or the key was free. Locally neither is the case.
        Kind::InsertExists
        | Kind::UpdateExists
        | Kind::UpdateDeleted
        | Kind::DeleteMissing
        | Kind::MultipleUniqueConflicts => writer.by_versions.then_some(true),
        Kind::UpdateMissing => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(timestamp: i64, origin: &str) -> Version<'_> {
        Version { timestamp, origin }
    }

    fn writer<'a>(version: Version<'a>, replaced: Option<Version<'a>>) -> Writer<'a> {
        Writer {
            version,
            replaced,
            by_versions: true,
        }
    }

    #[test]
    fn a_writer_that_replaced_what_is_here_has_seen_it() {
        let here = version(10, "a");
        let saw = writer(version(20, "b"), Some(here));
        for kind in [Kind::UpdateOriginDiffers, Kind::DeleteOriginDiffers] {
            assert_eq!(concurrent(kind, Local::Present(here), saw), Some(false));
            // Part of a merged row was written elsewhere.
            assert_eq!(concurrent(kind, Local::Merged(here), saw), None);
        }
    }

    #[test]
    fn only_the_very_version_that_is_here_was_seen() {
        let saw = writer(version(20, "b"), Some(version(10, "a")));
        let kind = Kind::UpdateOriginDiffers;
        for (here, expected) in [
            (version(11, "a"), Some(true)),
            (version(10, "c"), Some(true)),
            (version(9, "a"), None),
            (version(21, "a"), Some(true)),
        ] {
            assert_eq!(
                concurrent(kind, Local::Present(here), saw),
                expected,
                "{here:?}"
            );
        }
        let other_rules = Writer {
            by_versions: false,
            ..saw
        };
        let here = Local::Present(version(11, "a"));
        assert_eq!(concurrent(kind, here, other_rules), None);
        let unknown = writer(version(20, "b"), None);
        assert_eq!(concurrent(kind, here, unknown), None);
    }

    #[test]
    fn what_is_newer_here_was_seen_by_nobody_who_wrote_before() {
        let change = writer(version(20, "b"), None);
        let here = version(21, "a");
        for kind in Kind::ALL {
            for local in [
                Local::Present(here),
                Local::Merged(here),
                Local::Deleted(here),
            ] {
                assert_eq!(concurrent(kind, local, change), Some(true), "{kind:?}");
            }
        }
    }

    #[test]
    fn no_kind_is_called_seen_without_the_replaced_version() {
        for kind in Kind::ALL {
            for timestamp in [5, 20, 30] {
                for local in [
                    Local::Present(version(timestamp, "a")),
                    Local::Deleted(version(timestamp, "a")),
                    Local::Missing,
                    Local::Unversioned,
                ] {
                    for by_versions in [true, false] {
                        let change = Writer {
                            version: version(20, "b"),
                            replaced: None,
                            by_versions,
                        };
                        assert_ne!(concurrent(kind, local, change), Some(false));
                    }
                }
            }
        }
    }
}
