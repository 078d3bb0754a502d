//! The command line.

use std::time::Duration;

use braid_gir::parse_lsn;

/// Text of `--help`.
pub const HELP: &str = "\
gir-tail follows a logical slot of the output plugin \"braid\".

Usage: gir-tail --slot NAME --publication NAMES [OPTION]...

  -d, --dbname CONNINFO      connection string or database (default: as with psql)
  -S, --slot NAME            the slot to follow
      --create-slot          create the slot first if it does not exist
      --drop-slot            drop the slot and do nothing else
  -p, --publication NAMES    publications whose tables are sent, separated by commas
  -F, --format FORMAT        text (default), json (gir-json, one object a line) or wal2json
  -f, --file FILE            append to FILE instead of standard output (- for that)
      --origin ORIGIN        none (default): only what was first committed there; any: all
      --messages             logical messages too
  -o, --option NAME[=VALUE]  pass an option to the plugin
  -E, --until-lsn LSN        end once everything up to LSN was written
      --no-loop              end when the connection is lost instead of connecting again
  -s, --status-interval SECS how often the position is reported, at least (default 10)
  -v, --verbose              say on standard error what is done
  -V, --version
  -?, --help
";

/// Format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A line of text for each record.
    Text,
    /// A gir-json object for each record.
    Json,
    /// The server's output in the format wal2json.
    Wal2json,
}

/// The requested action.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// Print the help.
    Help,
    /// Print the version.
    Version,
    /// Drop the slot.
    DropSlot(Options),
    /// Follow the slot.
    Tail(Options),
}

/// Options of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Connection string or database name; empty: libpq's defaults.
    pub dbname: String,
    /// Name of the slot.
    pub slot: String,
    /// Create the slot if it does not exist.
    pub create_slot: bool,
    /// Publications, as given.
    pub publications: Option<String>,
    /// Format of the output.
    pub format: Format,
    /// Path of the output; `None` for standard output.
    pub file: Option<String>,
    /// Options for the plugin.
    pub plugin: Vec<(String, Option<String>)>,
    /// LSN at which to end.
    pub until: Option<u64>,
    /// End when the connection is lost.
    pub no_loop: bool,
    /// Time between reports to the server.
    pub status_interval: Duration,
    /// Report progress on standard error.
    pub verbose: bool,
}

/// Parses the arguments, without the program's name.
///
/// # Errors
/// A message for the user.
pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Command, String> {
    let mut options = Options {
        dbname: String::new(),
        slot: String::new(),
        create_slot: false,
        publications: None,
        format: Format::Text,
        file: None,
        plugin: Vec::new(),
        until: None,
        no_loop: false,
        status_interval: Duration::from_secs(10),
        verbose: false,
    };
    let mut drop_slot = false;
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        // The value of a long option may follow "=".
        let (name, attached) = match argument.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
            _ => (argument.as_str(), None),
        };
        let is_flag = attached.is_none();
        let mut value = || {
            attached
                .clone()
                .or_else(|| arguments.next())
                .ok_or_else(|| format!("option \"{name}\" needs a value"))
        };
        match name {
            "-d" | "--dbname" => options.dbname = value()?,
            "-S" | "--slot" => options.slot = value()?,
            "-p" | "--publication" => options.publications = Some(value()?),
            "-F" | "--format" => options.format = format(&value()?)?,
            "-f" | "--file" => options.file = Some(value()?).filter(|file| file != "-"),
            "--origin" => options.plugin.push(("origin".to_owned(), Some(value()?))),
            "-o" | "--option" => options.plugin.push(plugin_option(&value()?)),
            "-E" | "--until-lsn" => {
                let text = value()?;
                let lsn = parse_lsn(&text).ok_or_else(|| format!("invalid LSN \"{text}\""))?;
                options.until = Some(lsn);
            }
            "-s" | "--status-interval" => options.status_interval = seconds(&value()?)?,
            "--create-slot" if is_flag => options.create_slot = true,
            "--drop-slot" if is_flag => drop_slot = true,
            "--messages" if is_flag => options
                .plugin
                .push(("messages".to_owned(), Some("on".to_owned()))),
            "--no-loop" if is_flag => options.no_loop = true,
            "-v" | "--verbose" if is_flag => options.verbose = true,
            "-V" | "--version" => return Ok(Command::Version),
            "-?" | "--help" => return Ok(Command::Help),
            _ => return Err(format!("unrecognized option \"{name}\"")),
        }
    }
    if options.slot.is_empty() {
        return Err("no slot was named: give --slot".to_owned());
    }
    // With that option, keepalives do not account for delayed transactions, but this program relies
    // on them.
    let joins = |(name, _): &(String, Option<String>)| name == "join_transactions";
    if options.plugin.iter().any(joins) {
        return Err("option \"join_transactions\" is not for this program".to_owned());
    }
    // Messages are parsed in the format of --format, which also determines what is confirmed.
    if options.plugin.iter().any(|(name, _)| name == "format") {
        return Err("option \"format\" is what --format is for".to_owned());
    }
    if drop_slot {
        return Ok(Command::DropSlot(options));
    }
    if options.publications.is_none() && options.format != Format::Wal2json {
        return Err("no publication was named: give --publication".to_owned());
    }
    Ok(Command::Tail(options))
}

fn format(name: &str) -> Result<Format, String> {
    match name {
        "text" => Ok(Format::Text),
        "json" | "gir-json" => Ok(Format::Json),
        "wal2json" => Ok(Format::Wal2json),
        _ => Err(format!(
            "unknown format \"{name}\": valid ones are \"text\", \"json\" and \"wal2json\""
        )),
    }
}

fn plugin_option(text: &str) -> (String, Option<String>) {
    match text.split_once('=') {
        Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
        None => (text.to_owned(), None),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .filter(|seconds| (1..=86_400).contains(seconds))
        .map(Duration::from_secs)
        .ok_or_else(|| format!("invalid number of seconds \"{text}\": give 1 to 86400"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "test code")]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(line.split(' ').map(str::to_owned))
    }

    #[test]
    fn everything_given() {
        let line = "-d dbname=shop --slot=s --create-slot -p a,b --format json -f out.jsonl --origin any --messages -o keys=on -o plain --until-lsn 1/F0 --no-loop -s 3 -v";
        let Ok(Command::Tail(options)) = parsed(line) else {
            panic!("not parsed");
        };
        let pair = |name: &str, value: Option<&str>| (name.to_owned(), value.map(str::to_owned));
        assert_eq!(
            options,
            Options {
                dbname: "dbname=shop".to_owned(),
                slot: "s".to_owned(),
                create_slot: true,
                publications: Some("a,b".to_owned()),
                format: Format::Json,
                file: Some("out.jsonl".to_owned()),
                plugin: vec![
                    pair("origin", Some("any")),
                    pair("messages", Some("on")),
                    pair("keys", Some("on")),
                    pair("plain", None),
                ],
                until: Some(0x1_0000_00f0),
                no_loop: true,
                status_interval: Duration::from_secs(3),
                verbose: true,
            }
        );
    }

    #[test]
    fn refusals() {
        for (line, expected) in [
            ("-p a", "no slot was named: give --slot"),
            ("-S s", "no publication was named: give --publication"),
            (
                "-S s -p a -o join_transactions=on",
                "option \"join_transactions\" is not for this program",
            ),
            (
                "-S s -p a -o format=wal2json",
                "option \"format\" is what --format is for",
            ),
            ("-S s --bogus", "unrecognized option \"--bogus\""),
            ("-S s --no-loop=1", "unrecognized option \"--no-loop\""),
            ("-S", "option \"-S\" needs a value"),
            ("-S s -E 12", "invalid LSN \"12\""),
            (
                "-S s -s 0",
                "invalid number of seconds \"0\": give 1 to 86400",
            ),
            (
                "-S s -F xml",
                "unknown format \"xml\": valid ones are \"text\", \"json\" and \"wal2json\"",
            ),
        ] {
            assert_eq!(parsed(line), Err(expected.to_owned()));
        }
        assert!(matches!(parsed("-S s -F wal2json"), Ok(Command::Tail(_))));
        assert!(matches!(
            parsed("-S s --drop-slot"),
            Ok(Command::DropSlot(_))
        ));
    }
}
