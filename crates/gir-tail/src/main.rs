//! `gir-tail`: follows a slot of the output plugin `braid` over an ordinary replication connection
//! and writes the changes.
//!
//! A program of its own, with libpq as its client library and without any other part of PostgreSQL.
//! Output is reported to the server only once it is on disk (or accepted by the reader of standard
//! output). So each transaction arrives at least once, whatever is killed at whatever time. After a
//! failure the program reconnects and resumes at the position that the server has confirmed.
#![warn(missing_docs)]

mod connection;
mod format;
mod options;
mod output;
mod protocol;
mod tail;

use std::process::ExitCode;

use options::{Command, HELP};

fn main() -> ExitCode {
    let command = match options::parse(std::env::args().skip(1)) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("gir-tail: {error}");
            eprintln!("gir-tail: hint: Try \"gir-tail --help\".");
            return ExitCode::from(2);
        }
    };
    let done = match command {
        Command::Help => {
            print!("{HELP}");
            Ok(())
        }
        Command::Version => {
            println!("gir-tail {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Command::DropSlot(options) => tail::drop_slot(&options),
        Command::Tail(options) => tail::run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gir-tail: {error}");
            ExitCode::FAILURE
        }
    }
}
