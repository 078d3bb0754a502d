//! The options that create_subscription and alter_subscription have in common, and their valid
//! values.

use braid_bgworker::subscription_option::{Options, Value};
use braid_postgres::encoding::Text;
use pgrx::PgSqlErrorCode;

use super::failure::{Failure, Outcome};
use super::text;

/// Checks that no two options exclude each other.
pub fn check_together(options: &Options) -> Outcome<()> {
    options.exclusion().map_or(Ok(()), |found| {
        Err(Failure::parameter(found.message).hint(found.hint))
    })
}

/// The value of an option that a text stands for; 22023 if there is none.
pub fn choice<T: Value>(option: &str, text: &str) -> Outcome<T> {
    T::parse(text).ok_or_else(|| {
        Failure::parameter(format!("unrecognized value for {option}: \"{text}\""))
            .hint(format!("Use one of: {}.", T::CHOICES.join(", ")))
    })
}

/// The limit of changes in a chunk; 22023 below 0.
pub fn limit(split_transactions_above: Option<i32>) -> Outcome<Option<u32>> {
    split_transactions_above
        .map(u32::try_from)
        .transpose()
        .map_err(|_| {
            Failure::parameter("split_transactions_above must not be negative")
                .hint("Use 0 to commit each transaction as a whole.")
        })
}

/// Checks that at least one publication is named, and each only once.
pub fn check_publication_names(names: &[String]) -> Outcome<()> {
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

/// Checks that PostgreSQL accepts the name for a slot.
pub fn check_slot_name(name: &str) -> Outcome<()> {
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
