//! Whether a member's files are those that it wrote last: what a restored or copied data directory
//! is known by, as far as the file system tells.
//!
//! The marker is the number of `global/pg_control` in its file system, and the boot of the machine.
//! PostgreSQL writes that file in place for as long as the data directory lives, so any copy has
//! another number. A disk that was put back as a whole has the same one: then the machine has
//! started anew since, and the other members are asked.

use std::os::unix::fs::MetadataExt;

use braid_bgworker::sqlstate::SqlState;
use braid_group::Continuity;
use braid_postgres::error::PgError;

/// Compares the marker that was noted with that of the files in use. Returns what to note now.
pub(super) fn compare(noted: Option<&str>) -> Result<(Continuity, String), PgError> {
    // The server's working directory is its data directory.
    let control = std::fs::metadata("global/pg_control").map_err(|error| {
        PgError::new(
            SqlState::of_io(&error),
            format!("could not look at file \"global/pg_control\": {error}"),
        )
    })?;
    let file = control.ino().to_string();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned());
    let now = format!("{file} {boot}");
    let continuity = match noted.and_then(|noted| noted.split_once(' ')) {
        None => Continuity::Proven,
        Some((noted_file, _)) if noted_file != file => Continuity::Broken,
        Some((_, noted_boot)) if noted_boot != boot || boot == "unknown" => Continuity::Unproven,
        Some(_) => Continuity::Proven,
    };
    // A copy keeps the original's marker, so that it stays a copy.
    let kept = match (continuity, noted) {
        (Continuity::Broken, Some(noted)) => noted.to_owned(),
        _ => now,
    };
    Ok((continuity, kept))
}
