//! The options of a subscription that create_subscription and alter_subscription have in common, and what they may be.

use braid_postgres::encoding::Text;
use pgrx::PgSqlErrorCode;

use super::failure::{Failure, Outcome};
use super::text;

/// Options that alter_subscription can change too; what is not there stays, or has its default.
#[derive(Debug, Default)]
pub struct Options {
    /// Names of publications.
    pub publications: Option<Vec<String>>,
    /// Slot at the provider.
    pub slot_name: Option<String>,
    /// 'none' or 'any'.
    pub origin: Option<String>,
    /// The setting of this name for the workers.
    pub synchronous_commit: Option<String>,
    /// 'parallel', 'serial', 'batch' or 'aggregate'.
    pub apply_mode: Option<String>,
    /// Whether changes of one row in a batch become one.
    pub consolidate: Option<bool>,
    /// 'source' or 'relaxed'.
    pub commit_order: Option<String>,
    /// 'on' or 'off': whether large transactions are sent while they run.
    pub streaming: Option<String>,
    /// Transactions with more changes are committed in pieces; 0: none are.
    pub split_transactions_above: Option<i32>,
    /// Whether changes are applied as the subscription's owner instead of the tables'.
    pub run_as_owner: Option<bool>,
    /// Whether an error disables the subscription.
    pub disable_on_error: Option<bool>,
    /// 'stop', 'park' or 'stop_always': what becomes of a transaction that can't be applied.
    pub on_error: Option<String>,
    /// 'error' or 'ignore': whether published columns that a table does not have here are left out.
    pub on_missing_column: Option<String>,
}

impl Options {
    /// That each value is one of those allowed.
    pub fn check(&self) -> Outcome<()> {
        if let Some(publications) = &self.publications {
            check_publication_names(publications)?;
        }
        one_of(
            "streaming",
            self.streaming.as_deref(),
            &["off", "on", "parallel"],
        )?;
        one_of(
            "on_error",
            self.on_error.as_deref(),
            &["stop", "park", "stop_always"],
        )?;
        one_of(
            "on_missing_column",
            self.on_missing_column.as_deref(),
            &["error", "ignore"],
        )?;
        one_of("origin", self.origin.as_deref(), &["none", "any"])?;
        one_of(
            "apply_mode",
            self.apply_mode.as_deref(),
            &["parallel", "serial", "batch", "aggregate"],
        )?;
        one_of(
            "commit_order",
            self.commit_order.as_deref(),
            &["source", "relaxed"],
        )?;
        one_of(
            "synchronous_commit",
            self.synchronous_commit.as_deref(),
            &["off", "local", "on", "remote_write", "remote_apply"],
        )?;
        if self.split_transactions_above.is_some_and(i32::is_negative) {
            return Err(
                Failure::parameter("split_transactions_above must not be negative")
                    .hint("Use 0 to commit each transaction as a whole."),
            );
        }
        self.slot_name.as_deref().map_or(Ok(()), check_slot_name)
    }
}

/// That what is to become of an error is said once.
pub fn check_on_error(on_error: Option<&str>, disable_on_error: Option<bool>) -> Outcome<()> {
    if on_error == Some("park") && disable_on_error == Some(true) {
        return Err(Failure::parameter(
            "on_error => 'park' and disable_on_error exclude each other",
        )
        .hint("With disable_on_error each error stops the subscription."));
    }
    Ok(())
}

/// That nothing is asked for that transactions which are prepared here can't do.
pub fn check_two_phase_with(options: &Options) -> Outcome<()> {
    if options.commit_order.as_deref() != Some("relaxed") {
        return Ok(());
    }
    Err(
        Failure::parameter("two_phase and commit_order => 'relaxed' exclude each other").hint(
            "Use two_phase => false: prepared transactions are sent once they have committed.",
        ),
    )
}

/// 22023 unless an option, if it is there, has one of these values.
pub fn one_of(option: &str, value: Option<&str>, allowed: &[&str]) -> Outcome<()> {
    match value {
        Some(value) if !allowed.contains(&value) => Err(Failure::parameter(format!(
            "unrecognized value for {option}: \"{value}\""
        ))
        .hint(format!("Use one of: {}.", allowed.join(", ")))),
        _ => Ok(()),
    }
}

fn check_publication_names(names: &[String]) -> Outcome<()> {
    let hint = "Name the publications as an array, like '{braid}'.";
    if names.is_empty() || names.iter().any(String::is_empty) {
        return Err(
            Failure::parameter("publications must name at least one publication").hint(hint),
        );
    }
    let mut sorted = names.to_vec();
    sorted.sort();
    sorted.dedup();
    if sorted.len() == names.len() {
        return Ok(());
    }
    Err(Failure::duplicate("a publication is named twice").hint(hint))
}

fn check_slot_name(name: &str) -> Outcome<()> {
    let valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if !name.is_empty() && name.len() < 64 && name.bytes().all(valid) {
        return Ok(());
    }
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_INVALID_NAME,
        format!("replication slot name \"{name}\" is not valid"),
    )
    .hint("Replication slot names have up to 63 lower case letters, digits and underscores."))
}

/// Elements of a text array argument; null elements are an error.
pub fn texts(array: Option<Vec<Option<Text>>>, argument: &str) -> Outcome<Option<Vec<String>>> {
    let Some(array) = array else { return Ok(None) };
    let elements: Option<Vec<String>> = array.into_iter().map(text).collect();
    elements
        .map(Some)
        .ok_or_else(|| Failure::null_argument(argument))
}

/// A truth value as PostgreSQL writes it.
pub fn flag(value: bool) -> &'static str {
    if value { "t" } else { "f" }
}
