//! Checks a history in a file, in Elle's format: `check-history [--model MODEL] FILE`.
//!
//! Prints the report. Exits with 0 if there is no anomaly, 1 if there is one that the model
//! forbids, 2 if the file cannot be checked.
#![forbid(unsafe_code)]

use std::io::Read as _;
use std::process::ExitCode;

use braid_histories::{MODELS, Model, Options, check_with, read};

fn main() -> ExitCode {
    match check_file() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(problem) => {
            eprintln!("check-history: {problem}");
            ExitCode::from(2)
        }
    }
}

fn check_file() -> Result<bool, String> {
    let mut options = Options::new(Model::StrictSerializable);
    let mut file = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--model" => {
                let name = arguments.next().ok_or_else(usage)?;
                options.model = name
                    .parse()
                    .map_err(|problem| format!("{problem}\n{}", usage()))?;
            }
            "--limit" => {
                let limit = arguments.next().and_then(|limit| limit.parse().ok());
                options.limit = limit.ok_or_else(usage)?;
            }
            "--sequential-keys" => options.sequential_keys = true,
            "--linearizable-keys" => options.linearizable_keys = true,
            _ if file.is_none() && (argument == "-" || !argument.starts_with('-')) => {
                file = Some(argument);
            }
            _ => return Err(usage()),
        }
    }
    let file = file.ok_or_else(usage)?;
    let text = if file == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(&file)
    };
    let text = text.map_err(|problem| format!("{file}: {problem}"))?;
    let history = read(&text).map_err(|problem| format!("{file}: {problem}"))?;
    drop(text);
    let report = check_with(&history, options).map_err(|problem| format!("{file}: {problem}"))?;
    print!("{report}");
    Ok(report.is_valid())
}

fn usage() -> String {
    let models: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
    format!(
        "usage: check-history [--model MODEL] [--limit NUMBER] [--sequential-keys] \
         [--linearizable-keys] FILE\nmodels: {}",
        models.join(", ")
    )
}
