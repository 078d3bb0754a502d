//! Follows a slot: connects, reads the stream, writes, reports, and starts over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use braid_gir::{lsn_text, parse_lsn};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::connection::{self, Connection, Received};
use crate::format::{self, Renderer};
use crate::options::{Format, Options};
use crate::output::Output;
use crate::protocol::{self, Message};

/// Pause before reconnecting; doubled with each failure in a row.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Longest wait for a message before other work, such as signals and reports, is checked.
const LOOK: Duration = Duration::from_millis(500);

/// Reason why following has ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of the connection, or of the server.
    #[error(transparent)]
    Connection(#[from] connection::Error),
    /// Writing to the output failed.
    #[error("could not write: {0}")]
    Output(#[from] std::io::Error),
    /// A message is invalid, or could not be written.
    #[error(transparent)]
    Format(#[from] format::Error),
    /// A message does not belong to the replication protocol.
    #[error("invalid message from the server")]
    Message,
    /// The server ended the stream.
    #[error("the server ended the stream")]
    Ended,
}

impl Error {
    fn may_pass(&self) -> bool {
        match self {
            Self::Connection(error) => error.may_pass(),
            Self::Ended => true,
            Self::Output(_) | Self::Format(_) | Self::Message => false,
        }
    }
}

#[derive(Default)]
struct Signals {
    stop: Arc<AtomicBool>,
    reopen: Arc<AtomicBool>,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        let signals = Self::default();
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&signals.stop))?;
        }
        signal_hook::flag::register(SIGHUP, Arc::clone(&signals.reopen))?;
        Ok(signals)
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Drops the slot.
pub fn drop_slot(options: &Options) -> Result<(), Error> {
    let mut connection = Connection::open(&options.dbname)?;
    connection.command(&format!(
        "DROP_REPLICATION_SLOT {}",
        quoted(&options.slot, '"')
    ))?;
    Ok(())
}

/// Follows the slot until a signal or the end position.
pub fn run(options: &Options) -> Result<(), Error> {
    let signals = Signals::listen()?;
    let mut output = Output::open(options.file.as_deref())?;
    let mut pause = FIRST_PAUSE;
    let mut slot = Slot {
        may_create: options.create_slot,
        is_new: false,
    };
    let mut progress = Progress::default();
    loop {
        let before = progress.complete;
        let ended = follow(options, &signals, &mut output, &mut progress, &mut slot);
        let error = match ended {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        // Keep the whole part durable: it need not be sent again, whatever happens next.
        if let Err(error) = output.cut().and_then(|()| output.flush()) {
            slot.give_up(options);
            return Err(error.into());
        }
        progress.flushed = progress.complete;
        if !error.may_pass() || options.no_loop {
            slot.give_up(options);
            return Err(error);
        }
        if progress.complete > before {
            pause = FIRST_PAUSE;
        }
        eprintln!(
            "gir-tail: {error}; connecting again in {} s",
            pause.as_secs_f32()
        );
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if signals.stops() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// State of the slot in this run.
struct Slot {
    /// The slot is created if it does not exist.
    may_create: bool,
    /// This run has created the slot, and has written nothing of it.
    is_new: bool,
}

impl Slot {
    /// Drops the slot after a failure if this run has created it for nothing: it would retain WAL
    /// for ever.
    fn give_up(&self, options: &Options) {
        if !self.is_new {
            return;
        }
        let name = &options.slot;
        let dropped = Connection::open(&options.dbname).and_then(|mut connection| {
            connection.command(&format!("DROP_REPLICATION_SLOT {} WAIT", quoted(name, '"')))
        });
        match dropped {
            Ok(()) => eprintln!("gir-tail: replication slot \"{name}\" was dropped again"),
            Err(error) => eprintln!(
                "gir-tail: replication slot \"{name}\", which was created, could not be dropped: {error}\n\
                 gir-tail: hint: Drop it with --drop-slot: it holds back WAL."
            ),
        }
    }
}

/// Positions, over all connections.
#[derive(Default)]
struct Progress {
    /// The server of these positions: its system identifier and timeline.
    server: Option<(String, String)>,
    /// Everything before this position was written.
    complete: u64,
    /// Everything before this position is durable, and reported.
    flushed: u64,
}

impl Progress {
    /// Records that everything before `lsn` was written. The position counts only if everything
    /// written is whole, so that confirmed data is never cut. While something is open, the previous
    /// position stays: confirming late loses nothing.
    fn reach(&mut self, lsn: u64, output: &Output) {
        if output.is_whole() {
            self.complete = self.complete.max(lsn);
        }
    }

    /// Returns where to resume: at this run's position, or 0 for the slot's. A restarted server may
    /// have forgotten what was confirmed, as it saves slots only at checkpoints. A position is
    /// discarded if the server is another one, or was reset to a time before it.
    fn start(&mut self, identity: Vec<Option<String>>) -> u64 {
        let mut fields = identity.into_iter().map(Option::unwrap_or_default);
        let server = (
            fields.next().unwrap_or_default(),
            fields.next().unwrap_or_default(),
        );
        let end = fields.next().and_then(|text| parse_lsn(&text)).unwrap_or(0);
        if self.server.as_ref() != Some(&server) || end < self.flushed {
            *self = Self {
                server: Some(server),
                ..Self::default()
            };
        }
        self.complete = self.flushed;
        self.flushed
    }

    /// Makes the written data durable and reports it.
    fn report(&mut self, output: &mut Output, connection: &mut Connection) -> Result<(), Error> {
        output.flush()?;
        self.flushed = self.complete;
        connection.send(&protocol::status(self.complete, self.flushed))?;
        Ok(())
    }
}

fn follow(
    options: &Options,
    signals: &Signals,
    output: &mut Output,
    progress: &mut Progress,
    slot: &mut Slot,
) -> Result<(), Error> {
    let say = |text: &str| {
        if options.verbose {
            eprintln!("gir-tail: {text}");
        }
    };
    let mut connection = Connection::open(&options.dbname)?;
    let start = progress.start(connection.row("IDENTIFY_SYSTEM")?);
    if slot.may_create {
        slot.is_new = create_slot(&mut connection, &options.slot)?;
        slot.may_create = false;
    }
    connection.command(&start_command(options, start))?;
    say(&match start {
        0 => "streaming".to_owned(),
        start => format!("streaming from {}", lsn_text(start)),
    });
    let mut renderer = Renderer::new(options.format);
    let mut reported = Instant::now();
    loop {
        if signals.stops() {
            break;
        }
        if output.is_whole() && signals.reopen.swap(false, Ordering::Relaxed) {
            output.reopen()?;
        }
        if reported.elapsed() >= options.status_interval {
            progress.report(output, &mut connection)?;
            reported = Instant::now();
        }
        let message = match connection.receive()? {
            Received::Message(message) => message,
            Received::Nothing => {
                // Flush, so that a reader of the output sees everything.
                if progress.complete > progress.flushed {
                    progress.report(output, &mut connection)?;
                    reported = Instant::now();
                }
                connection.wait(LOOK.min(options.status_interval));
                continue;
            }
            Received::End => return Err(Error::Ended),
        };
        match protocol::read(&message).ok_or(Error::Message)? {
            Message::Data { lsn, body } => {
                slot.is_new = false;
                let outcome = renderer.message(lsn, body, options.until, output)?;
                if let Some(complete) = outcome.complete {
                    progress.reach(complete, output);
                }
                if outcome.past_end {
                    break;
                }
            }
            Message::Keepalive { lsn, reply } => {
                // Keepalives also arrive within a large transaction; then their position lies
                // before it.
                progress.reach(lsn, output);
                if reply {
                    progress.report(output, &mut connection)?;
                    reported = Instant::now();
                }
            }
        }
        if options
            .until
            .is_some_and(|until| progress.complete >= until)
        {
            break;
        }
    }
    output.cut()?;
    progress.report(output, &mut connection)?;
    say(&format!(
        "everything up to {} is written",
        lsn_text(progress.flushed)
    ));
    connection.end()?;
    Ok(())
}

/// Creates the slot. Returns false if it already exists.
fn create_slot(connection: &mut Connection, slot: &str) -> Result<bool, Error> {
    let command = format!(
        "CREATE_REPLICATION_SLOT {} LOGICAL braid NOEXPORT_SNAPSHOT",
        quoted(slot, '"')
    );
    match connection.command(&command) {
        Err(connection::Error::Server { sqlstate, .. })
            if sqlstate == connection::DUPLICATE_OBJECT =>
        {
            Ok(false)
        }
        other => Ok(other.map(|()| true)?),
    }
}

/// Returns the command that starts the stream. The server resumes at the last confirmed position,
/// or at `start` if that is later.
fn start_command(options: &Options, start: u64) -> String {
    let mut given: Vec<(&str, Option<&str>)> = Vec::new();
    match options.format {
        Format::Text => given.push(("proto_version", Some("1"))),
        Format::Json => given.push(("format", Some("gir-json"))),
        Format::Wal2json => given.push(("format", Some("wal2json"))),
    }
    if let Some(publications) = &options.publications {
        given.push(("publication_names", Some(publications)));
    }
    for (name, value) in &options.plugin {
        given.push((name, value.as_deref()));
    }
    let list: Vec<_> = given
        .iter()
        .map(|(name, value)| match value {
            Some(value) => format!("{} {}", quoted(name, '"'), quoted(value, '\'')),
            None => quoted(name, '"'),
        })
        .collect();
    format!(
        "START_REPLICATION SLOT {} LOGICAL {} ({})",
        quoted(&options.slot, '"'),
        lsn_text(start),
        list.join(", ")
    )
}

/// Returns quoted text for a replication command: only the quote is special, and is doubled.
fn quoted(text: &str, quote: char) -> String {
    let doubled = text.replace(quote, &format!("{quote}{quote}"));
    format!("{quote}{doubled}{quote}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "test code")]
mod tests {
    use super::*;
    use crate::format::Lines as _;

    #[test]
    fn a_run_goes_on_where_it_is_on_the_server_that_it_knows() {
        let identity = |system: &str, timeline: &str, end: &str| {
            [system, timeline, end]
                .map(|text| Some(text.to_owned()))
                .to_vec()
        };
        let mut progress = Progress::default();
        assert_eq!(progress.start(identity("7", "1", "0/30")), 0);
        (progress.complete, progress.flushed) = (0x30, 0x20);
        assert_eq!(progress.start(identity("7", "1", "0/30")), 0x20);
        assert_eq!(progress.complete, 0x20);
        for other in [
            ("8", "1", "0/30"),
            ("7", "2", "0/30"),
            ("7", "1", "0/1F"),
            ("7", "1", ""),
        ] {
            let mut progress = Progress {
                server: progress.server.clone(),
                ..progress
            };
            let (system, timeline, end) = other;
            assert_eq!(
                progress.start(identity(system, timeline, end)),
                0,
                "{other:?}"
            );
            assert_eq!((progress.complete, progress.flushed), (0, 0));
        }
    }

    #[test]
    fn no_position_is_reached_past_what_a_cut_would_take() {
        let mut output = Output::open(None).unwrap();
        let mut progress = Progress::default();
        progress.reach(10, &output);
        assert_eq!(progress.complete, 10);
        output.write(b"").unwrap();
        progress.reach(20, &output);
        assert_eq!(progress.complete, 20);
        output.write(b"\n").unwrap();
        progress.reach(30, &output);
        assert_eq!(progress.complete, 20);
        output.mark_whole();
        progress.reach(15, &output);
        assert_eq!(progress.complete, 20);
        progress.reach(30, &output);
        assert_eq!(progress.complete, 30);
    }
}
