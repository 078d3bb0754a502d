//! Statements in the catalog: `braid.ddl_message`, of which the output plugin makes messages, and
//! `braid.ddl_entry`, where users can read the outcome.

use std::ffi::CString;

use braid_bgworker::hex;
use braid_bgworker::subscription_option::array_literal;
use braid_gir::{Statement, StatementTable, TableState, lsn_text};
use braid_postgres::catalog::{query, with_settings};
use braid_postgres::encoding;
use braid_postgres::error::PgError;
use braid_postgres::names::find_table;
use braid_postgres::schema_statement::Alone;
use braid_postgres::setting;

use crate::{sequence, wake};

use super::columns::Filled;
use super::facts::{owners_query, publications_of_all_tables};
use super::intent;
use super::open::role;
use super::roles;
use super::tables::note_renames;

/// Settings that a statement's meaning, or the values of its constants, depend on.
const SETTINGS: &[&str] = &[
    "search_path",
    "standard_conforming_strings",
    "backslash_quote",
    "array_nulls",
    "transform_null_equals",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "xmloption",
    "bytea_output",
    "default_table_access_method",
    "default_toast_compression",
];

/// A statement that is to be sent.
#[derive(Debug, Clone)]
pub(super) struct Captured {
    pub(super) tag: String,
    pub(super) text: String,
    pub(super) tables: Vec<StatementTable>,
    /// Tables for whose rows it has computed values, which are sent.
    pub(super) filled: Vec<Filled>,
    /// Each node runs it by itself.
    pub(super) intent: Option<Alone>,
    /// The statement's identity, once it was needed.
    id: Option<[u8; 16]>,
    role: String,
    pub(super) settings: Vec<(String, String)>,
}

/// Runs a statement with the rights of the session's user and has the other nodes do so, whatever
/// `braid.ddl_replication` says. Raises the errors of the statement.
pub fn run_everywhere(tag: &str, text: &str) {
    let captured = Captured::begin(tag, text.to_owned());
    let alone = [("braid.ddl_replication", "off")];
    let done = with_settings(&alone, || {
        query(text, &[]);
        Ok::<_, ()>(())
    });
    if done.is_ok() {
        captured.store();
    }
}

/// If this database is a node, and may send statements: the OID of the session's schema of
/// temporary objects, 0 if there is none. In a transaction.
#[must_use]
pub(super) fn temporary_schema_of_node() -> Option<u32> {
    // A server may be newer than the extension in this database.
    if !matches!(find_table("braid", "ddl_message"), Ok(Some(_))) {
        return None;
    }
    let found = owners_query(
        "select pg_my_temp_schema() from braid.node where is_local",
        &[],
    );
    found.get(0, 0)?.parse().ok()
}

/// Whether this database is a node, and may send statements. In a transaction.
#[must_use]
pub fn is_a_node() -> bool {
    temporary_schema_of_node().is_some()
}

fn setting(name: &str) -> Option<(String, String)> {
    let c_name = CString::new(name).ok()?;
    let value = setting::find(&c_name)?;
    Some((name.to_owned(), encoding::utf8(&value)))
}

impl Captured {
    /// The statement that this session is about to execute.
    pub(super) fn begin(tag: &str, text: String) -> Self {
        Self {
            tag: tag.to_owned(),
            text,
            tables: Vec::new(),
            filled: Vec::new(),
            intent: None,
            id: None,
            role: role(),
            settings: SETTINGS.iter().filter_map(|name| setting(name)).collect(),
        }
    }

    /// Identity of the statement: a UUID of version 7, so that its first 8 bytes grow with the time
    /// (RFC 9562, 5.7). The identity of a role statement is larger than that of each statement
    /// which this node knows, also if another node's clock is ahead. In a transaction.
    pub(super) fn id(&mut self) -> [u8; 16] {
        // Other statements are not compared: of two serializable transactions that both read and
        // write the log, one fails.
        let is_of_role = ["CREATE ROLE", "ALTER ROLE"].contains(&self.tag.as_str());
        *self.id.get_or_insert_with(|| {
            let found = owners_query(
                "select lpad(to_hex(t / 1000), 12, '0') || '7' || lpad(to_hex(t % 1000 * 4096 / 1000), 3, '0') \
                   || substr(replace(gen_random_uuid()::text, '-', ''), 17) \
                 from (select greatest((extract(epoch from clock_timestamp()) * 1000000)::bigint, \
                   (select ('x' || substr(d, 1, 12))::bit(48)::bigint * 1000 + ('x' || substr(d, 14, 3))::bit(12)::integer * 1000 / 4096 + 2 \
                     from (select replace(ddl_id::text, '-', '') as d from braid.ddl_entry order by ddl_id desc limit 1) last where $1::boolean)) as t) now",
                &[Some(if is_of_role { "t" } else { "f" })],
            );
            let digits = found.get(0, 0).unwrap_or_default();
            u128::from_str_radix(digits, 16)
                .unwrap_or_default()
                .to_be_bytes()
        })
    }

    /// Has the statement sent, if any publication concerns it.
    pub(super) fn store(mut self) {
        let mut publications: Vec<String> = self
            .tables
            .iter()
            .flat_map(|table| table.publications.clone())
            .collect();
        if self.tables.is_empty() {
            publications = publications_of_all_tables();
        }
        publications.sort();
        publications.dedup();
        if publications.is_empty() {
            return;
        }
        let found = owners_query("select node_name from braid.node where is_local", &[]);
        let Some(node) = found.get(0, 0) else {
            return;
        };
        let id = self.id();
        let mut settings = self.settings;
        settings.extend(
            sequence::adopt_created(&self.tag, None)
                .map(|setting| (sequence::STATEMENT_SETTING.to_owned(), setting)),
        );
        settings.extend(self.intent.map(intent::setting));
        let entry = match self.intent {
            Some(_) => Entry::DONE,
            None => Entry::SENT,
        };
        let statement = Statement {
            id,
            node: node.to_owned(),
            tag: self.tag,
            text: self.text,
            role: self.role,
            settings,
            publications,
            tables: self.tables,
        };
        note(&statement, &entry);
        pass_on(&statement).unwrap_or_else(|error| error.raise());
        leave_subscriptions(&statement);
        note_renames(&statement);
        join_subscriptions(&statement);
        for table in &self.filled {
            table.write_again();
        }
    }
}

/// A statement's fate at this node.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// Subscription that has brought it; `None` at its own node.
    pub subscription: Option<&'a str>,
    /// Where its transaction commits at the provider, and its transaction id at the provider.
    pub remote: Option<(u64, u32)>,
    /// `sent`, `applied`, `merged`, `done already` or `failed`; those of an [`intent`].
    pub state: &'static str,
    /// Why.
    pub reason: Option<&'a str>,
}

impl Entry<'_> {
    /// A statement of this node.
    const SENT: Self = Entry {
        subscription: None,
        remote: None,
        state: "sent",
        reason: None,
    };
    /// A statement of this node that each node runs by itself.
    const DONE: Self = Entry {
        state: "done",
        ..Self::SENT
    };
}

/// The name of a table, or of a role, in `braid.ddl_entry`.
pub(super) fn label(state: &TableState) -> String {
    if roles::is_role(state) {
        return roles::label(&state.name);
    }
    format!("{}.{}", state.namespace, state.name)
}

/// Writes down what became of a statement, in place of an attempt that failed. In a transaction.
pub fn note(statement: &Statement, entry: &Entry<'_>) {
    let names: Vec<String> = statement
        .tables
        .iter()
        .filter_map(|table| table.after.as_ref().or(table.before.as_ref()))
        .map(label)
        .chain(roles::label_of_password(statement))
        .collect();
    let search_path = statement
        .settings
        .iter()
        .find(|(name, _)| name == "search_path");
    let search_path = search_path.map_or("", |(_, value)| value.as_str());
    let lsn = entry.remote.map(|(lsn, _)| lsn_text(lsn));
    let xid = entry.remote.map(|(_, xid)| xid.to_string());
    // At its own node no attempt has failed before, and a serializable transaction reads nothing
    // that others write.
    if entry.subscription.is_some() {
        owners_query(
            "delete from braid.ddl_entry where ddl_id = $1::uuid and state = 'failed'",
            &[Some(&statement.uuid())],
        );
    }
    owners_query(
        "insert into braid.ddl_entry (ddl_id, node_name, subscription_name, remote_lsn, remote_xid, command_tag, statement, role_name, \
           search_path, table_names, publications, state, reason) \
         values ($1::uuid, $2::name, $3::name, $4::pg_lsn, $5::xid, $6, $7, $8::name, $9, $10::text[], $11::text[], $12, $13)",
        &[
            Some(&statement.uuid()),
            Some(&statement.node),
            entry.subscription,
            lsn.as_deref(),
            xid.as_deref(),
            Some(&statement.tag),
            Some(&statement.text),
            Some(&statement.role),
            Some(search_path),
            Some(&array_literal(&names)),
            Some(&array_literal(&statement.publications)),
            Some(entry.state),
            entry.reason,
        ],
    );
}

/// Makes the tables that a statement has created part of the subscriptions that bring their rows,
/// and forgets those that are gone. None is copied: a node has their rows from this statement on.
/// In
/// a transaction.
pub fn join_subscriptions(statement: &Statement) {
    for table in &statement.tables {
        if let (None, Some(state)) = (&table.before, &table.after) {
            owners_query(
                "insert into braid.subscription_table (subscription_id, relation, schema_name, table_name, state, unless_filled, ready_at) \
                 select s.subscription_id, c.oid, n.nspname, c.relname, 'ready', false, clock_timestamp() \
                 from pg_class c join pg_namespace n on n.oid = c.relnamespace, braid.subscription s \
                 where s.replicate_ddl and s.publications && $3::text[] \
                   and n.nspname = $1::name and c.relname = $2::name and c.relkind in ('r', 'p') and c.relpersistence = 'p' \
                 on conflict do nothing",
                &[
                    Some(&state.namespace),
                    Some(&state.name),
                    Some(&array_literal(&table.publications)),
                ],
            );
        }
    }
}

/// Forgets tables of subscriptions that are dropped, so that others can have their names. In a
/// transaction.
pub fn leave_subscriptions(statement: &Statement) {
    wake::manager_at_commit();
    if !statement.tag.starts_with("DROP") {
        return;
    }
    owners_query(
        "delete from braid.subscription_table t using braid.subscription s where s.subscription_id = t.subscription_id and s.replicate_ddl \
         and not exists (select from pg_class c where c.oid = t.relation)",
        &[],
    );
}

/// Has a subscription know the tables that statements have renamed by the names that they have
/// now. In a transaction.
pub fn rename_in_subscription(subscription_id: u32) {
    owners_query(
        "update braid.subscription_table t set schema_name = n.nspname, table_name = c.relname \
         from pg_class c join pg_namespace n on n.oid = c.relnamespace \
         where t.subscription_id = $1::integer and c.oid = t.relation::oid and (t.schema_name, t.table_name) <> (n.nspname, c.relname) \
           and exists (select from braid.former_table f where f.relation = c.oid)",
        &[Some(&subscription_id.to_string())],
    );
}

/// Whether a statement is done on this node already: it has arrived by another stream. In a
/// transaction.
#[must_use]
pub fn is_known(statement: &Statement) -> bool {
    !owners_query(
        "select 1 from braid.ddl_entry e where ddl_id = $1::uuid \
           and (state <> 'failed' or exists (select from braid.ddl_intent i where i.ddl_id = e.ddl_id))",
        &[Some(&statement.uuid())],
    )
    .is_empty()
}

/// The last statement that is noted about a table, or a role, with its node. In a transaction.
#[must_use]
pub fn last_of(state: &TableState) -> Option<(String, String)> {
    let found = owners_query(
        "select statement, node_name from braid.ddl_entry where $1 = any (table_names) and state <> 'failed' order by recorded_at desc limit 1",
        &[Some(&label(state))],
    );
    Some((found.get(0, 0)?.to_owned(), found.get(0, 1)?.to_owned()))
}

/// Has the output plugin send a statement, by inserting a row. The origin of the transaction
/// decides to which nodes. In a transaction.
///
/// # Errors
/// [`PgError`] for a statement that can't be written.
pub fn pass_on(statement: &Statement) -> Result<(), PgError> {
    let mut content = Vec::new();
    statement.write(&mut content)?;
    let found = owners_query(
        "insert into braid.ddl_message (content) values ($1) returning ctid",
        &[Some(&hex::encode(&content))],
    );
    // By its place: of two serializable transactions, the one that looked at the whole table would
    // fail.
    owners_query(
        "delete from braid.ddl_message where ctid = $1::tid",
        &[found.get(0, 0)],
    );
    Ok(())
}
