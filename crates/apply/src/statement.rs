//! Statements that changed the schema at another node, run here at their place in the current
//! transaction, with the rights of the same role and under the same settings. Run by the processes
//! that apply changes. The leader makes sure that nothing else of the subscription is applied
//! meanwhile.
//!
//! `braid_bgworker::ddl` decides by the shapes of the tables whether a statement is run.
//!
//! Not for: capturing statements (`braid_node::ddl`).

use braid_bgworker::ddl::{self as rule, Verdict, shortened};
use braid_bgworker::sql_text::quote_identifier;
use braid_bgworker::sqlstate::SqlState;
use braid_decoder::KeyHasher;
use braid_gir::{DDL_PREFIX, Message, Statement, StatementTable, TableState};
use braid_node::ddl::{self, ColumnNames, Entry, intent, roles};
use braid_node::sequence;
use braid_node::subscription::{self as catalog_subscription, Subscription, rows};
use braid_postgres::error::PgError;
use braid_postgres::{catalog, schema_statement, snapshot, transaction};
use pgrx::pg_sys;

use super::Session;
use super::doing::Step;
use super::target::to_be_copied;

/// Number of characters of a statement that an error shows.
const SHOWN: usize = 500;

/// A statement that is being run, with its transaction at the provider.
#[derive(Debug)]
pub struct StatementInHand {
    statement: Statement,
    commit_lsn: u64,
    xid: u32,
}

impl StatementInHand {
    /// Returns its text, for an error.
    pub(super) fn shown(&self) -> String {
        shortened(&self.statement.text, SHOWN)
    }

    /// Records that it has failed here. In a transaction.
    pub fn note_failed(&self, subscription: &str, error: &PgError) {
        let entry = Entry {
            subscription: Some(subscription),
            remote: Some((self.commit_lsn, self.xid)),
            state: "failed",
            reason: Some(&error.message),
        };
        ddl::note(&self.statement, &entry);
    }
}

/// Whether a message is a statement that changes the schema.
#[must_use]
pub fn is_statement(message: &Message<'_>) -> bool {
    message.transactional && message.prefix == DDL_PREFIX
}

/// Returns the names of the tables that a statement touches, in the form of the stream's relations.
///
/// # Errors
/// 08P01 for invalid content.
pub fn tables_of(content: &[u8]) -> Result<Vec<String>, PgError> {
    let statement = Statement::read(content)?;
    let states = statement
        .tables
        .iter()
        .flat_map(|table| table.before.iter().chain(&table.after));
    Ok(states
        .map(|state| format!("{}.{}", state.namespace, state.name))
        .collect())
}

/// Returns the digest of a statement among the changes of a transaction that is committed in
/// chunks.
#[must_use]
pub fn content_of_statement(content: &[u8]) -> u64 {
    let mut hasher = KeyHasher::new(5);
    hasher.bytes(content);
    hasher.finish()
}

/// Returns the role that a statement runs as. The subscription's owner must be able to become it.
///
/// # Errors
/// 42704 without the role; 42501 if the owner may not become the role.
pub fn role_of(name: &str, owner: u32, subscription: &str) -> Result<pg_sys::Oid, PgError> {
    let found = rows(
        "select r.oid::text, pg_has_role($2::oid, r.oid, \
           case when current_setting('server_version_num')::integer >= 160000 then 'SET' else 'MEMBER' end)::text \
         from pg_catalog.pg_roles r where r.rolname = $1",
        &[name.into(), i64::from(owner).into()],
    )?;
    let cell = |place: usize| found.first().and_then(|row| row.get(place)?.as_deref());
    let Some(oid) = cell(0).and_then(|oid| oid.parse::<u32>().ok()) else {
        return Err(PgError::new(
            SqlState::UndefinedObject,
            format!("role \"{name}\" of a statement from the provider does not exist here"),
        )
        .with_hint(format!(
            "Run CREATE ROLE {} and then braid.enable_subscription.",
            quote_identifier(name)
        )));
    };
    if cell(1) != Some("true") {
        return Err(PgError::new(
            SqlState::InsufficientPrivilege,
            format!(
                "the owner of subscription \"{subscription}\" may not become role \"{name}\" of a statement from the provider"
            ),
        )
        .with_hint(format!(
            "Grant role {} to the subscription's owner, or give the subscription to a superuser with \
             braid.set_subscription_owner. Then run braid.enable_subscription.",
            quote_identifier(name)
        )));
    }
    Ok(pg_sys::Oid::from(oid))
}

/// Whether a statement refreshes a materialized view, and does nothing else.
fn is_refresh(statement: &Statement) -> bool {
    schema_statement::single_utility(&statement.text).as_deref()
        == Some("REFRESH MATERIALIZED VIEW")
}

/// Returns the setting that a statement brings for the sequences that it creates.
fn setting_of_sequences(statement: &Statement) -> Option<&str> {
    let mut settings = statement.settings.iter();
    let found = settings.find(|(name, _)| name == sequence::STATEMENT_SETTING);
    found.map(|(_, value)| value.as_str())
}

/// Returns the error for a statement that is not run, because a table has another form of what the
/// statement changes.
fn conflict(statement: &Statement, table: &StatementTable) -> PgError {
    let state = table.before.as_ref().or(table.after.as_ref());
    let (namespace, name) = state.map_or(("", ""), |state| (&state.namespace, &state.name));
    let is_role = state.is_some_and(roles::is_role);
    let mut detail = format!(
        "The statement of node \"{}\" is: {}",
        statement.node,
        shortened(&statement.text, SHOWN)
    );
    if let Some((text, node)) = state.and_then(ddl::last_of) {
        let object = if is_role { "role" } else { "table" };
        detail.push_str(&format!(
            "\nThe last statement about the {object} here, of node \"{node}\", is: {}",
            shortened(&text, SHOWN)
        ));
    }
    if is_role {
        return PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!("role \"{name}\" does not have the attributes here that a statement from the provider was made for"),
        )
        .with_detail(detail)
        .with_hint(
            "Give the role the attributes that it has at the provider, with braid.replicate_roles off, and run braid.enable_subscription: \
             the statement counts as done then.",
        );
    }
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!(
            "table \"{namespace}.{name}\" does not have the shape here that a statement from the provider was made for"
        ),
    )
    .with_detail(detail)
    .with_hint(
        "Give the table the shape that it has at the provider and run braid.enable_subscription: the statement counts as done then.",
    )
}

/// Settings under which `braid.table_shape` writes constants.
const SHAPE_SETTINGS: [(&str, &str); 4] = [
    ("search_path", "pg_catalog, pg_temp"),
    ("DateStyle", "ISO, MDY"),
    ("IntervalStyle", "postgres"),
    ("TimeZone", "UTC"),
];

/// Gives partitions the bounds that they have at the statement's node. A bound such as
/// `current_timestamp` would have another value here. As the statement's role, after the statement.
fn give_bounds(statement: &Statement) -> Result<(), PgError> {
    transaction::next_command();
    for (state, wanted) in statement.tables.iter().filter_map(bound_of) {
        let Some(here) = ddl::shape_of(state) else {
            continue;
        };
        if here.lines.contains(wanted) {
            continue;
        }
        let Some((parent, bound)) = wanted.split_once('\t') else {
            continue;
        };
        let has_parent =
            |line: &String| line.split_once('\t').is_some_and(|(key, _)| key == parent);
        if !here.lines.iter().any(has_parent) {
            continue;
        }
        let parent = parent.strip_prefix(PARENT).unwrap_or_default();
        let partition = format!(
            "{}.{}",
            quote_identifier(&state.namespace),
            quote_identifier(&state.name)
        );
        catalog::with_settings(&SHAPE_SETTINGS, || {
            for command in ["DETACH", "ATTACH"] {
                let bound = if command == "ATTACH" { bound } else { "" };
                catalog::query(
                    &format!("ALTER TABLE {parent} {command} PARTITION {partition} {bound}"),
                    &[],
                );
            }
            Ok::<_, PgError>(())
        })?;
    }
    Ok(())
}

/// Begins the line of a table's shape that names its parent.
const PARENT: &str = "parent ";

/// Returns a table that a statement makes a partition, with the line of its bound.
fn bound_of(table: &StatementTable) -> Option<(&TableState, &String)> {
    let mut added = table.added.iter();
    let line = added.find(|line| line.starts_with(PARENT) && !line.ends_with('\t'))?;
    Some((table.after.as_ref()?, line))
}

impl Session {
    /// Checks that none of a statement's tables is still to be copied, if this process parks
    /// transactions that change such a table: the worker that copies it may have locked it.
    fn check_copies(
        &self,
        statement: &Statement,
        subscription: &Subscription,
    ) -> Result<(), PgError> {
        if !self.parks_for_copies() {
            return Ok(());
        }
        let tables = statement.tables.iter();
        for state in tables.filter_map(|table| table.before.as_ref()) {
            let (schema, name) = (&state.namespace, &state.name);
            if catalog_subscription::is_to_be_copied(subscription.id, schema, name)? {
                return Err(to_be_copied(&format!("{schema}.{name}")));
            }
        }
        Ok(())
    }

    /// Runs a statement in the current transaction, unless it was run here already.
    ///
    /// # Errors
    /// 08P01 for invalid content; 40001 for a transaction that has not committed yet; 42704 without
    /// its role, 42501 if the subscription's owner may not become that; 55000 if a table has
    /// another shape; whatever the statement raises.
    pub fn statement(
        &mut self,
        content: &[u8],
        subscription: &Subscription,
    ) -> Result<(), PgError> {
        self.flush()?;
        let statement = Statement::read(content)?;
        self.does(Step::Statement, None);
        let Some(current) = self.current().cloned() else {
            return Err(PgError::new(
                SqlState::ProtocolViolation,
                "statement outside of a transaction from the provider",
            ));
        };
        if current.unsettled {
            return Err(self.hints.wait_for_commit("It changes the schema."));
        }
        self.statement_in_hand = Some(Box::new(StatementInHand {
            statement: statement.clone(),
            commit_lsn: current.commit_lsn,
            xid: current.xid,
        }));
        self.work_as_self();
        // Open tables hold state that the statement may change.
        self.close_tables();
        transaction::next_command();
        if ddl::is_known(&statement) {
            return Ok(());
        }
        self.check_copies(&statement, subscription)?;
        // Readers of this node's publications that have its tables, before it or after it, get the
        // statement too.
        let mut onward = statement.clone();
        ddl::add_publications(&mut onward);
        if intent::is_intent(&statement) {
            let entry = Entry {
                subscription: Some(&subscription.name),
                remote: Some((current.commit_lsn, current.xid)),
                state: "waiting",
                reason: None,
            };
            intent::record(&statement, content, entry);
            ddl::hand_on(&onward)?;
            self.statement_in_hand = None;
            return Ok(());
        }
        intent::make_way(&statement)?;
        // A session of this node may be about to commit a statement about the same table.
        for table in ddl::oids_of(&statement.tables) {
            ddl::lock(table);
        }
        let passed_over = roles::passed_over(&statement);
        let (verdict, table) = match passed_over {
            Some(_) => (Verdict::Done, None),
            None => rule::decide(&statement.tables, |state| {
                Ok::<_, PgError>(roles::expected(state))
            })?,
        };
        let mut entry = Entry {
            subscription: Some(&subscription.name),
            remote: Some((current.commit_lsn, current.xid)),
            state: "applied",
            reason: None,
        };
        match (verdict, table) {
            (Verdict::Conflict, Some(table)) => return Err(conflict(&statement, table)),
            (Verdict::Done, _) => {
                entry.state = "done already";
                entry.reason = match passed_over {
                    Some(_) => passed_over,
                    None => Some(self.take_done(&statement, subscription)?),
                };
                pgrx::log!(
                    "subscription \"{}\" skips a statement of node \"{}\" that is done here already: {}",
                    subscription.name,
                    statement.node,
                    shortened(&statement.text, SHOWN)
                );
            }
            (Verdict::Run | Verdict::Merge | Verdict::Conflict, _) => {
                if verdict == Verdict::Merge {
                    entry.state = "merged";
                    entry.reason = Some("a table has other parts that the statement leaves alone");
                }
                self.execute(&statement, subscription)?;
                ddl::add_publications(&mut onward);
            }
        }
        if let Some(given) = setting_of_sequences(&statement) {
            sequence::adopt_created(&statement.tag, Some(given));
        }
        ddl::note(&statement, &entry);
        ddl::hand_on(&onward)?;
        ddl::leave_subscriptions(&statement);
        ddl::note_renames(&statement);
        ddl::join_subscriptions(&statement);
        ddl::rename_in_subscription(subscription.id);
        snapshot::show_own();
        self.statement_in_hand = None;
        Ok(())
    }

    /// Returns the statement that was being run when an attempt failed; `None` if it failed
    /// elsewhere.
    pub fn failed_statement(&mut self) -> Option<Box<StatementInHand>> {
        let statement = self.statement_in_hand.take();
        statement.filter(|_| self.doing.step == Step::Statement)
    }

    /// Runs a statement, and records how it has changed columns.
    fn execute(
        &mut self,
        statement: &Statement,
        subscription: &Subscription,
    ) -> Result<(), PgError> {
        let names = ColumnNames::of(&ddl::oids_of(&statement.tables));
        self.as_role(statement, subscription, || {
            if roles::is_about(statement) {
                return roles::run(statement);
            }
            catalog::query(&statement.text, &[]);
            give_bounds(statement)
        })?;
        names.note_changes(statement.mark());
        for table in names.filled() {
            table.note();
        }
        Ok(())
    }

    /// Accepts a statement without running it, if its tables, or roles, have the state after it
    /// already. Returns the reason.
    fn take_done(
        &mut self,
        statement: &Statement,
        subscription: &Subscription,
    ) -> Result<&'static str, PgError> {
        ddl::note_given(statement);
        if roles::sets_password(statement) {
            self.as_role(statement, subscription, || roles::set_password(statement))?;
            return Ok("the role was there already, and got the password");
        }
        Ok(if roles::is_about(statement) {
            "the roles have what the statement brings"
        } else {
            "the tables have what the statement brings"
        })
    }

    /// Does the work of a statement, with the rights of its role and under its settings.
    fn as_role(
        &mut self,
        statement: &Statement,
        subscription: &Subscription,
        work: impl FnOnce() -> Result<(), PgError>,
    ) -> Result<(), PgError> {
        let role = role_of(&statement.role, subscription.owner, &subscription.name)?;
        if is_refresh(statement) {
            self.attempt().user.work_as_caller_of_refresh(role);
        } else {
            self.work_as(role);
        }
        let settings: Vec<(&str, &str)> = intent::settings_of(statement).collect();
        catalog::with_settings(&settings, work)?;
        self.work_as_self();
        transaction::next_command();
        Ok(())
    }
}
