//! Copying the schema of a member into this database, which has no tables of users yet.
//!
//! `pg_dump --schema-only` of this server's own installation reads it, and one transaction here
//! runs what it writes. So after a crash nothing of it is here, or all. Connection strings go to
//! pg_dump by a service file that nobody else can read, and never by its arguments.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::rows;
use braid_postgres::error::{self, PgError};
use braid_postgres::{catalog, latch, libpq, process};

use super::peer::Peer;

const INSTALL: &str = "Install PostgreSQL's client programs on this server, or make the schema by hand and join with mode => 'schema'.";
const HINT: &str = "pg_dump reads servers of its own version and older: join newer nodes first, or make the schema by hand and join with mode => 'schema'.";
/// Whether schema `everywhere` is that of umbrellas.
const HAS_UMBRELLAS: &str = "select exists (select from pg_catalog.pg_class c where c.relkind = 'p' \
    and c.relnamespace = pg_catalog.to_regnamespace('everywhere') and pg_catalog.pg_get_partkeydef(c.oid) like 'LIST (braid.place(%')";
/// How often pg_dump is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Files that are there for as long as pg_dump runs.
struct Files {
    service: PathBuf,
    output: PathBuf,
    messages: PathBuf,
}

impl Files {
    /// Their names: within the directory that the server empties when it starts.
    fn new() -> Result<Self, PgError> {
        let directory = Path::new("base/pgsql_tmp");
        fs::create_dir_all(directory).map_err(|error| of_file(&error))?;
        let name = |kind: &str| {
            let pid = process::my_pid();
            directory.join(format!("pgsql_tmp{pid}.braid_{kind}"))
        };
        Ok(Self {
            service: name("service"),
            output: name("schema"),
            messages: name("messages"),
        })
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for file in [&self.service, &self.output, &self.messages] {
            let _ = fs::remove_file(file);
        }
    }
}

/// Ends pg_dump if the wait for it is broken off.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn of_file(error: &std::io::Error) -> PgError {
    PgError::new(
        SqlState::of_io(error),
        format!("could not copy the schema: {error}"),
    )
    .with_hint("It is tried again. See the server's data directory for room and rights.")
}

/// A file that only this server's user can read.
fn private(path: &Path) -> Result<File, PgError> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| of_file(&error))
}

/// Makes what [`dump`] has read, and does `within` in the same transaction.
pub(super) fn make(
    source: &Peer,
    text: &str,
    within: impl FnOnce() -> Result<(), PgError>,
) -> Result<(), PgError> {
    error::transaction(|| {
        catalog::run_script(text);
        within()
    })
    .map_err(|error| {
        error
            .with_context(&format!("copying the schema of node \"{}\"", source.name))
            .with_hint_of_cause("Then it is tried again by itself.")
    })
}

/// What pg_dump writes of the source's schema, without psql's own commands.
pub(super) fn dump(source: &Peer) -> Result<String, PgError> {
    let files = Files::new()?;
    write_service(&files.service, &source.dsn)?;
    let program = error::transaction(program)?;
    let has_umbrellas = source.ask(HAS_UMBRELLAS)?.as_deref() == Some("t");
    let child = Command::new(&program)
        .args([
            "--schema-only",
            "--no-publications",
            "--no-subscriptions",
            "--exclude-schema=braid",
        ])
        .args(has_umbrellas.then_some("--exclude-schema=everywhere"))
        .args(["--dbname", "service=braid"])
        .env_clear()
        .env(
            "PGSERVICEFILE",
            fs::canonicalize(&files.service).map_err(|error| of_file(&error))?,
        )
        .env("PGCLIENTENCODING", "UTF8")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(private(&files.output)?)
        .stderr(private(&files.messages)?)
        .spawn()
        .map_err(|error| not_run(&program, &error))?;
    let mut running = Running(child);
    let status = loop {
        match running.0.try_wait().map_err(|error| of_file(&error))? {
            Some(status) => break status,
            None => latch::wait(Some(LOOK)),
        };
    };
    if !status.success() {
        let said = fs::read_to_string(&files.messages).unwrap_or_default();
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "pg_dump could not read the schema of node \"{}\"",
                source.name
            ),
        )
        .with_detail(said.trim().to_owned())
        .with_hint(HINT));
    }
    let text = fs::read_to_string(&files.output).map_err(|error| of_file(&error))?;
    let text = without_meta_commands(&text);
    Ok(if has_umbrellas {
        without_umbrellas(&text)
    } else {
        text
    })
}

/// The text without lines that are for psql: PostgreSQL's minor releases of August 2025 and later
/// begin and end with one.
fn without_meta_commands(text: &str) -> String {
    let is_meta = |line: &&str| line.starts_with("\\restrict") || line.starts_with("\\unrestrict");
    let lines: Vec<&str> = text.lines().filter(|line| !is_meta(line)).collect();
    lines.join("\n")
}

/// The text without the lines that attach tables to umbrellas, which it does not create. Umbrellas
/// of this node are made once it has joined.
fn without_umbrellas(text: &str) -> String {
    let attaches = |line: &&str| {
        line.starts_with("ALTER TABLE ONLY everywhere.") && line.contains(" ATTACH PARTITION ")
    };
    let lines: Vec<&str> = text.lines().filter(|line| !attaches(line)).collect();
    lines.join("\n")
}

/// A service named `braid` with all that a connection string says.
fn write_service(path: &Path, dsn: &str) -> Result<(), PgError> {
    let mut file = private(path)?;
    let mut lines = "[braid]\n".to_owned();
    for (keyword, value) in libpq::connection_settings(dsn) {
        if value.contains(['\n', '\r']) {
            return Err(PgError::new(
                SqlState::InvalidParameterValue,
                format!("option {keyword} of the connection string has a line break"),
            ));
        }
        if !value.is_empty() && !["service", "client_encoding"].contains(&keyword.as_str()) {
            lines.push_str(&format!("{keyword}={value}\n"));
        }
    }
    file.write_all(lines.as_bytes())
        .map_err(|error| of_file(&error))
}

/// Checks that this server has a pg_dump which reads a server of this major version. In a
/// transaction.
///
/// # Errors
/// 55000 if there is none, or an older one.
pub fn check_program(source_major: u16) -> Result<(), PgError> {
    let program = program()?;
    let said = Command::new(&program)
        .arg("--version")
        .env_clear()
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|error| not_run(&program, &error))?;
    let words = String::from_utf8_lossy(&said.stdout);
    match major_of(&words) {
        Some(major) if major >= source_major => Ok(()),
        Some(major) => Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!("pg_dump {major} cannot read the schema of PostgreSQL {source_major}"),
        )
        .with_detail(format!("It is {}.", program.display()))
        .with_hint(HINT)),
        None => Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "could not determine the version of pg_dump",
        )
        .with_detail(format!("It is {}.", program.display()))
        .with_hint(INSTALL)),
    }
}

/// The major version in what `pg_dump --version` says: `pg_dump (PostgreSQL) 18.6 (Debian ...)`.
fn major_of(words: &str) -> Option<u16> {
    let version = words.split(')').nth(1)?.trim_start();
    let digits = version.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

fn not_run(program: &Path, error: &std::io::Error) -> PgError {
    let sqlstate = match SqlState::of_io(error) {
        // There is no such program, or it is not to be run.
        SqlState::UndefinedFile | SqlState::InsufficientPrivilege => {
            SqlState::ObjectNotInPrerequisiteState
        }
        sqlstate => sqlstate,
    };
    PgError::new(sqlstate, format!("could not run pg_dump: {error}"))
        .with_detail(format!("It is looked for as {}.", program.display()))
        .with_hint(INSTALL)
}

/// Where this server's own pg_dump is.
fn program() -> Result<PathBuf, PgError> {
    let found = rows("select setting from pg_config where name = 'BINDIR'", &[])?;
    found
        .into_iter()
        .next()
        .and_then(|row| row.into_iter().next()?)
        .map(|directory| Path::new(&directory).join("pg_dump"))
        .ok_or_else(|| PgError::new(SqlState::InternalError, "no directory of programs is known"))
}
