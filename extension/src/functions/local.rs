//! This database as a node: its identity, whether that still holds, and the rows of its
//! subscriptions.

use braid_bgworker::subscription_option::{self, Options};
use braid_node::connection_string::{self, DSN};
use braid_node::subscription::unreadable;
use braid_postgres::catalog::query;
use braid_postgres::rows::Rows;

use super::failure::{Failure, Outcome};

/// The local node.
#[derive(Debug, Clone)]
pub struct LocalNode {
    /// The node's name.
    pub name: String,
    /// The node's identity, a UUID.
    pub id: String,
    /// Whether the server and database are still those that the node was created on. In a database
    /// that was restored from a dump or created from a template they are not: that is a copy and
    /// must not act as the node.
    pub identity_valid: bool,
}

/// The local node if there is one, whatever its identity.
pub fn find_node() -> Option<LocalNode> {
    find("")
}

/// The local node, its row locked until the transaction ends, so that commands that create and drop
/// nodes and subscriptions run one after the other.
pub fn lock_node() -> Option<LocalNode> {
    find("for update of n")
}

fn find(locking: &str) -> Option<LocalNode> {
    let rows = query(
        &format!(
            "select n.node_name, n.node_id, \
                    n.system_identifier = (select c.system_identifier::text from pg_control_system() c) \
                    and n.database_oid = (select d.oid from pg_database d where d.datname = current_database()) \
               from braid.node n where n.is_local {locking}"
        ),
        &[],
    );
    Some(LocalNode {
        name: rows.get(0, 0)?.to_owned(),
        id: rows.get(0, 1)?.to_owned(),
        identity_valid: rows.get(0, 2) == Some("t"),
    })
}

/// The local node, which must exist and have its own identity.
pub fn require_node() -> Outcome<LocalNode> {
    check_node(find_node())
}

/// Checks that a node was found, and that its server and database are the node's own.
pub fn check_node(node: Option<LocalNode>) -> Outcome<LocalNode> {
    let Some(node) = node else {
        return Err(Failure::state("this database is not a node")
            .hint("Make it one with braid.create_node(node_name, dsn)."));
    };
    let refusal = query(
        "select message, detail, hint from braid.node_standing() where not holds",
        &[],
    );
    let Some(message) = refusal.get(0, 0) else {
        return Ok(node);
    };
    Err(Failure::state(message)
        .detail(refusal.get(0, 1).unwrap_or_default())
        .hint(refusal.get(0, 2).unwrap_or_default()))
}

/// A row of braid.subscription, as the functions need it.
#[derive(Debug, Clone)]
pub struct Subscription {
    /// Key.
    pub id: String,
    /// Name.
    pub name: String,
    /// Connection string: never in a message. `None` if somebody has taken it away.
    dsn: Option<String>,
    /// Name of the provider's node.
    pub provider_name: String,
    /// Identity of the provider's node.
    pub provider_id: String,
    /// The slot exists, or a worker has tried to create it: it belongs to this subscription, which
    /// may drop it.
    pub has_slot: bool,
    /// The slot is still to be created.
    pub awaits_slot: bool,
    /// Where the transaction ends that could not be applied.
    pub error_lsn: Option<String>,
    /// Owner, a role's number.
    pub owner: u32,
    /// The subscription's options, as created or last changed.
    pub options: Options,
}

impl Subscription {
    /// Connection string: never in a message.
    ///
    /// # Errors
    /// 55000 if there is none.
    pub fn dsn(&self) -> Outcome<&str> {
        self.dsn
            .as_deref()
            .ok_or_else(|| connection_string::missing(&self.name).into())
    }
}

/// A subscription by name, its row locked until the transaction ends.
pub fn lock_subscription(name: &str) -> Outcome<Subscription> {
    let rows = query(
        &format!(
            "select s.subscription_id, s.subscription_name, {DSN}, s.provider_name, s.provider_id, s.error_lsn, s.subscription_owner::oid, \
                s.phase, (s.phase <> 'slot' or s.slot_attempted) and not s.former_member, {} \
               from braid.subscription s where s.subscription_name = $1::name for update of s",
            subscription_option::select_list("s")
        ),
        &[Some(name)],
    );
    let text = |column| rows.get(0, column).unwrap_or_default().to_owned();
    if rows.is_empty() {
        return Err(undefined_subscription(name));
    }
    // Behind the columns before.
    let options = Options::read(|index| rows.get(0, 9 + index).map(str::to_owned))
        .map_err(|option| unreadable(name, option))?;
    Ok(Subscription {
        id: text(0),
        name: text(1),
        dsn: rows.get(0, 2).map(str::to_owned),
        provider_name: text(3),
        provider_id: text(4),
        error_lsn: rows.get(0, 5).map(str::to_owned),
        owner: rows.get(0, 6).and_then(|oid| oid.parse().ok()).unwrap_or(0),
        has_slot: rows.get(0, 8) == Some("t"),
        awaits_slot: rows.get(0, 7) == Some("slot"),
        options,
    })
}

/// 42704 for a subscription.
pub fn undefined_subscription(name: &str) -> Failure {
    Failure::undefined(format!("subscription \"{name}\" does not exist"))
        .hint("The view braid.subscription_status lists the subscriptions of this node.")
}

/// First column of rows, without nulls.
pub fn column(rows: &Rows) -> Vec<String> {
    rows.iter().filter_map(|row| row.first()?.clone()).collect()
}

/// A setting's value; `None` when there is no such setting.
pub fn setting(name: &str) -> Option<String> {
    query("select current_setting($1, true)", &[Some(name)])
        .get(0, 0)
        .map(str::to_owned)
}

/// A setting that is a number; `default` when there is no such setting.
pub fn number_setting(name: &str, default: i64) -> i64 {
    let rows = query(
        "select setting from pg_settings where name = $1",
        &[Some(name)],
    );
    rows.get(0, 0)
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}
