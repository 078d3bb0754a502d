//! The parts of `braid.check` that SQL can't do: asking another node, and looking into connection
//! strings.
//!
//! `braid.facts()` in the install script has the questions, so both ends answer the same ones.
//! Reads only.

use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::subscription_option::array_literal;
use braid_node::secrecy;
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::libpq::{self, Connection, Error};
use braid_postgres::{server, timestamp};
use pgrx::iter::TableIterator;
use pgrx::{name, pg_extern};

use super::failure::Failure;
use super::options::texts;
use super::{provider, required, run, text};

/// Facts whose queries lock their objects until they are answered: the last value of a sequence
/// can't be read otherwise.
const LOCKING: [&str; 1] = ["sequences"];
/// Number of tables in one such query.
const LOCKED_TABLES: usize = 200;

/// One query and its answer.
struct Answer {
    fact: String,
    /// JSON.
    answer: Option<String>,
    /// Why there is no answer, and the user's next step.
    problem: Option<String>,
    hint: Option<String>,
    /// When the query was sent, and when the answer had arrived: microseconds since 1970.
    asked_at: i64,
    answered_at: i64,
}

impl Answer {
    fn new(fact: &str) -> Self {
        Self {
            fact: fact.to_owned(),
            answer: None,
            problem: None,
            hint: None,
            asked_at: 0,
            answered_at: 0,
        }
    }
}

/// braid.peer_facts(dsn text, facts text[], tables text[])
///
/// A peer that can't be asked is the problem of fact `connection`, no error.
#[pg_extern(sql = false)]
#[expect(clippy::type_complexity, reason = "the columns of an SQL function")]
fn peer_facts(
    dsn: Option<Text>,
    facts: Option<Vec<Option<Text>>>,
    tables: Option<Vec<Option<Text>>>,
) -> TableIterator<
    'static,
    (
        name!(fact, Text),
        name!(answer, Option<Text>),
        name!(problem, Option<Text>),
        name!(hint, Option<Text>),
        name!(asked_at, i64),
        name!(answered_at, i64),
    ),
> {
    secrecy::note_call();
    let caller = current_role();
    let answers = run(|| {
        let dsn = required(text(dsn), "dsn")?;
        libpq::check_connection_string(&dsn).map_err(|error| Failure::malformed_dsn(&error))?;
        let facts = required(texts(facts, "facts")?, "facts")?;
        let tables = required(texts(tables, "tables")?, "tables")?;
        match provider::connect(&dsn, caller) {
            Ok(connection) => Ok(ask(connection, &facts, &tables)),
            Err(failure) => Ok(vec![unreachable(&failure)]),
        }
    });
    TableIterator::new(answers.into_iter().map(|answer| {
        (
            Text(answer.fact),
            answer.answer.map(Text),
            answer.problem.map(Text),
            answer.hint.map(Text),
            answer.asked_at,
            answer.answered_at,
        )
    }))
}

fn unreachable(failure: &Failure) -> Answer {
    Answer {
        problem: Some(failure.words()),
        hint: failure.hint_words(),
        ..Answer::new("connection")
    }
}

/// Runs the queries. One that fails does not affect the others; a lost connection ends it.
fn ask(mut connection: Connection, facts: &[String], tables: &[String]) -> Vec<Answer> {
    connection.give_up_when_silent();
    let mut answers = vec![Answer::new("connection")];
    let prepared = connection.query(
        "select pg_catalog.set_config('default_transaction_read_only', 'on', false), \
                pg_catalog.set_config('statement_timeout', '30s', false), \
                pg_catalog.set_config('jit', 'off', false), \
                exists (select from pg_catalog.pg_namespace n where n.nspname = 'braid' and pg_catalog.has_schema_privilege(n.oid, 'usage'))",
    );
    let has_braid = match prepared {
        Ok(rows) => rows.get(0, 3).map(str::to_owned),
        Err(error) => return vec![lost(&error)],
    };
    let questions = query(
        "select fact, query from braid.facts() where fact = any ($1::text[]) and (not needs_braid or $2::boolean)",
        &[Some(&array_literal(facts)), has_braid.as_deref()],
    );
    for row in questions.iter() {
        let [Some(fact), Some(question)] = row else {
            continue;
        };
        let mut answer = Answer::new(fact);
        answer.asked_at = now();
        let outcome = put_by_parts(&mut connection, fact, question, tables);
        answer.answered_at = now();
        match outcome {
            Ok(found) => answer.answer = found,
            Err(Error::Server { message, hint, .. }) => {
                answer.problem = Some(message);
                answer.hint = hint;
            }
            Err(error) => {
                answers.push(lost(&error));
                break;
            }
        }
        answers.push(answer);
    }
    answers
}

fn lost(error: &Error) -> Answer {
    unreachable(
        &Failure::provider("lost the connection", error)
            .hint("Check that the server runs and that the connection is stable."),
    )
}

/// Asks a question about the tables, of so many at a time that the locks that it takes are few.
fn put_by_parts(
    connection: &mut Connection,
    fact: &str,
    question: &str,
    tables: &[String],
) -> libpq::Result<Option<String>> {
    let most = if LOCKING.contains(&fact) {
        LOCKED_TABLES
    } else {
        tables.len()
    };
    let (first, others) = tables.split_at(tables.len().min(most));
    let mut answer = put(connection, question, &literal(first))?;
    for part in others.chunks(LOCKED_TABLES) {
        let further = put(connection, question, &literal(part))?;
        // Each answer is an object by names.
        let both = query(
            "select $1::jsonb || $2::jsonb",
            &[answer.as_deref(), further.as_deref()],
        );
        answer = both.get(0, 0).map(str::to_owned);
    }
    Ok(answer)
}

fn literal(tables: &[String]) -> String {
    quote_literal(&array_literal(tables))
}

fn put(
    connection: &mut Connection,
    question: &str,
    arguments: &str,
) -> libpq::Result<Option<String>> {
    connection.query("deallocate all")?;
    connection.query(&format!("prepare braid_fact (text[]) as {question}"))?;
    let rows = connection.query(&format!("execute braid_fact ({arguments})"))?;
    Ok(rows.get(0, 0).map(str::to_owned))
}

fn now() -> i64 {
    timestamp::now().saturating_add(timestamp::EPOCH_DIFFERENCE)
}

/// braid.dsn_role(dsn text) returns text
///
/// The role that a connection string names. Nothing else of the string leaves this function.
#[pg_extern(sql = false)]
fn dsn_role(dsn: Text) -> Option<Text> {
    secrecy::note_call();
    libpq::connection_keyword(&dsn.0, "user").map(Text)
}

/// braid.workers_elsewhere() returns integer
#[pg_extern(sql = false)]
fn workers_elsewhere() -> i32 {
    i32::try_from(braid_node::registry::workers_elsewhere()).unwrap_or(i32::MAX)
}

/// braid.wal_free_bytes() returns bigint
#[pg_extern(sql = false)]
fn wal_free_bytes() -> Option<i64> {
    server::free_bytes(c"pg_wal").and_then(|bytes| i64::try_from(bytes).ok())
}
