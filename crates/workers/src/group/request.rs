//! Questions of sessions to the group worker, and its answers, as bytes in the mailbox.
//!
//! A question is an entry of the log ([`Proposal`]) whose proposer counts for nothing, or names a
//! member that this one's start need not be confirmed by. An answer is
//! text in UTF-8: `ok` and its numbers, or `no`, an SQLSTATE, and a message, detail and hint, each
//! in a line of its own.

use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use braid_group::{Command, MemberId, Outcome, Proposal, ProposalId, Value};
use braid_node::mailbox;
use braid_postgres::error::PgError;

/// The bytes of a question.
///
/// # Errors
/// 22023 if a value is too long.
pub fn question(command: Command) -> Result<Vec<u8>, PgError> {
    let id = ProposalId {
        member: MemberId::FIRST,
        boot: 0,
        counter: 0,
    };
    Proposal { id, command }
        .encode()
        .map_err(|error| PgError::new(SqlState::InvalidParameterValue, error.to_string()))
}

/// How a question begins that is no entry.
const VOUCH: &[u8] = b"vouch ";

/// A question, read.
pub(super) enum Question {
    /// For an entry of the log.
    Command(Command),
    /// For this member alone: it is not to wait until that one confirms its start.
    Vouch(MemberId),
}

/// Reads a question.
pub(super) fn read_question(question: &[u8]) -> Result<Question, braid_group::Malformed> {
    let absent = question
        .strip_prefix(VOUCH)
        .and_then(|id| std::str::from_utf8(id).ok()?.parse().ok())
        .and_then(MemberId::new);
    match absent {
        Some(absent) => Ok(Question::Vouch(absent)),
        None => Proposal::decode(question).map(|proposal| Question::Command(proposal.command)),
    }
}

/// The answer for what an entry came to.
pub(super) fn answer(outcome: &Outcome) -> Vec<u8> {
    let numbers: Vec<u64> = match outcome {
        Ok(Value::Done) => Vec::new(),
        Ok(Value::Member { id, number }) => vec![id.get(), u64::from(number.get())],
        Ok(Value::Lock { token }) => vec![token.term, token.index],
        Ok(Value::Block { start, size }) => vec![*start, *size],
        Ok(Value::Lease { token, wait }) => vec![token.term, token.index, *wait],
        Err(refusal) => {
            let error = PgError::new(SqlState::ObjectNotInPrerequisiteState, refusal.to_string());
            return failure(&error.with_hint(refusal.hint()));
        }
    };
    let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
    format!("ok\n{}", numbers.join(" ")).into_bytes()
}

/// The answer for an error.
pub(super) fn failure(error: &PgError) -> Vec<u8> {
    let line = |text: &str| text.replace('\n', " ");
    let of = |text: &Option<String>| text.as_deref().map_or_else(String::new, line);
    format!(
        "no\n{}\n{}\n{}\n{}",
        String::from_utf8_lossy(&error.sqlstate.code()),
        line(&error.message),
        of(&error.detail),
        of(&error.hint),
    )
    .into_bytes()
}

/// The numbers of an answer.
fn read(answer: &[u8]) -> Result<Vec<u64>, PgError> {
    let text = String::from_utf8_lossy(answer);
    let mut lines = text.split('\n');
    if lines.next() == Some("ok") {
        let numbers = lines.next().unwrap_or_default().split_whitespace();
        return Ok(numbers.filter_map(|number| number.parse().ok()).collect());
    }
    let mut next = || lines.next().unwrap_or_default();
    let (state, message, detail, hint) = (next(), next(), next(), next());
    let mut error = PgError::new(SqlState::parse(state), message);
    if !detail.is_empty() {
        error = error.with_detail(detail);
    }
    if !hint.is_empty() {
        error = error.with_hint(hint);
    }
    Err(error)
}

/// Asks the group for something, and waits until it is agreed. Returns the numbers of the value:
/// those of a member, a token, or a block.
///
/// # Errors
/// Whatever the group refused it with; 55000 without a majority or without a group worker; 57014.
pub fn ask(command: Command, timeout: Duration) -> Result<Vec<u64>, PgError> {
    ask_encoded(&question(command)?, timeout)
}

/// Has this member not wait until another one confirms its start.
///
/// # Errors
/// 55000 if it does not wait for that one, or without a group worker; 57014.
pub fn vouch(absent: MemberId, timeout: Duration) -> Result<(), PgError> {
    let question = [VOUCH, absent.to_string().as_bytes()].concat();
    ask_encoded(&question, timeout).map(drop)
}

/// As [`ask`], for a question that came as bytes.
///
/// # Errors
/// As [`ask`].
pub fn ask_encoded(question: &[u8], timeout: Duration) -> Result<Vec<u64>, PgError> {
    read(&mailbox::ask(question, timeout)?)
}
