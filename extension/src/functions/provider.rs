//! Reads and checks a provider before a local transaction changes anything. Changes nothing on the
//! provider.

use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::array_literal;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use braid_bgworker::sql_text::quote_literal;
use braid_node::connection_string;
use braid_node::published::is_not_sent_as_root;
use braid_node::subscription::publication_literals;
use braid_postgres::catalog::is_superuser;
use braid_postgres::latch;
use braid_postgres::libpq::{Connection, Error, Mode, has_password};
use braid_postgres::rows::Rows;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::failure::{Failure, Outcome};
use super::local::{self, LocalNode, Subscription};
use super::server::output_plugin_setting;

/// A connection to a provider, and the node that it turned out to be.
pub struct Provider {
    connection: Connection,
    /// Name of its node.
    pub name: String,
    /// Identity of its node.
    pub id: String,
    system_identifier: String,
    database_oid: String,
}

/// A slot at the provider.
pub struct Slot {
    /// From where it would send.
    pub confirmed_flush_lsn: Option<String>,
}

/// A slot that its last reader is just leaving is waited for.
const SLOT_PATIENCE: Duration = Duration::from_secs(3);

/// A published column.
pub struct PublishedColumn {
    /// The column's name.
    pub name: String,
    /// Part of the primary key, or of a replica identity that is an index.
    pub is_key: bool,
}

/// Published tables: schema and name, and the columns.
pub type PublishedTables = BTreeMap<(String, String), Vec<PublishedColumn>>;

/// Connects on behalf of `caller`, who must bring a password unless a superuser. Workers connect as
/// the server's operating system user, who may be let in where the caller would not be.
pub fn connect(dsn: &str, caller: pg_sys::Oid) -> Outcome<Connection> {
    connect_to("the provider", dsn, caller)
}

/// As [`connect`], to a member of the group.
pub fn connect_member(name: &str, dsn: &str, caller: pg_sys::Oid) -> Outcome<Connection> {
    connect_to(&format!("node \"{name}\""), dsn, caller)
}

/// As [`connect`]; `peer`: how an error names the other side.
fn connect_to(peer: &str, dsn: &str, caller: pg_sys::Oid) -> Outcome<Connection> {
    braid_postgres::libpq::check_connection_string(dsn)
        .map_err(|error| Failure::malformed_dsn(&error))?;
    let password_required = !is_superuser(caller);
    let refused = |detail: &str, hint: &str| {
        Failure::new(
            PgSqlErrorCode::ERRCODE_S_R_E_PROHIBITED_SQL_STATEMENT_ATTEMPTED,
            "password is required",
        )
        .detail(detail)
        .hint(hint)
    };
    if password_required && !has_password(dsn) {
        return Err(refused(
            "Subscriptions of roles that are not superuser must connect with a password of their own.",
            "Add a password to the connection string.",
        ));
    }
    let mut connection = Connection::open(dsn, "braid", Mode::Sql)
        .map_err(|error| unreachable_peer(peer, &error))?;
    if password_required && !connection.used_password() {
        return Err(refused(
            "The provider let the connection in without asking for the password.",
            "Have the provider's pg_hba.conf ask this role for a password, for example with scram-sha-256.",
        ));
    }
    connection
        .query(
            "select pg_catalog.set_config('search_path', 'pg_catalog', false), \
                    pg_catalog.set_config('client_encoding', 'UTF8', false)",
        )
        .map_err(|error| unreachable_peer(peer, &error))?;
    Ok(connection)
}

fn unreachable_peer(peer: &str, error: &Error) -> Failure {
    Failure::provider(format!("could not connect to {peer}"), error).hint(format!(
        "Check the connection string, that {peer} runs, and that its pg_hba.conf lets this connection in."
    ))
}

impl Provider {
    /// Connect and find out which node answers.
    pub fn open(dsn: &str, caller: pg_sys::Oid) -> Outcome<Self> {
        Self::open_if_node(dsn, caller)?.ok_or_else(|| {
            Failure::state("the provider's database is not a node")
                .hint("Make it one there with braid.create_node(node_name, dsn).")
        })
    }

    /// As [`Self::open`]; `None` if the database is not a node.
    pub fn open_if_node(dsn: &str, caller: pg_sys::Oid) -> Outcome<Option<Self>> {
        let mut connection = connect(dsn, caller)?;
        let extension = connection
            .query("select 1 from pg_extension where extname = 'braid'")
            .map_err(|error| failed(&error))?;
        if extension.is_empty() {
            return Err(Failure::undefined("the provider's database does not have extension braid")
                .hint("Run create extension braid and braid.create_node there, or correct dbname in the connection string."));
        }
        let rows = connection
            .query("select node_name, node_id, identity_valid, system_identifier, database_oid from braid.node_info()")
            .map_err(|error| match &error {
                Error::Server { sqlstate, .. } if *sqlstate == SqlState::InsufficientPrivilege => {
                    Failure::provider("no permission to read which node the provider is", &error)
                        .hint("At the provider, grant braid_monitor to the role of the connection string.")
                }
                _ => failed(&error),
            })?;
        let text = |column| rows.get(0, column).unwrap_or_default().to_owned();
        if rows.is_empty() {
            return Ok(None);
        }
        if rows.get(0, 2) != Some("t") {
            return Err(Failure::state(format!(
                "the provider's database is a copy of node \"{}\" and not that node",
                text(0)
            ))
            .hint(
                "There, run braid.drop_node and then braid.create_node with a name of its own.",
            ));
        }
        Ok(Some(Self {
            name: text(0),
            id: text(1),
            system_identifier: text(3),
            database_oid: text(4),
            connection,
        }))
    }

    /// The connection, for more than looking.
    pub fn into_connection(self) -> Connection {
        self.connection
    }

    /// The version of the server, as a number: 150003.
    pub fn server_version(&self) -> i32 {
        self.connection.server_version()
    }

    /// Checks that the provider is another node than this one, and the node that this one knows by
    /// that name.
    pub fn check_identity(&self, local: &LocalNode) -> Outcome<()> {
        if self.id == local.id {
            return Err(Failure::parameter("a node cannot subscribe to itself")
                .detail(format!(
                    "The connection string leads to this node, \"{}\".",
                    local.name
                ))
                .hint("Give the connection string of another node."));
        }
        if self.name == local.name {
            return Err(Failure::duplicate(format!(
                "the provider also is named \"{}\"",
                self.name
            ))
            .hint(
                "Nodes need different names: drop one of the two and create it with another name.",
            ));
        }
        let known = braid_postgres::catalog::query(
            "select node_name, node_id from braid.node where node_name = $1::name or node_id = $2::uuid",
            &[Some(&self.name), Some(&self.id)],
        );
        for row in known.iter() {
            let (name, id) = (
                row.first().and_then(Option::as_deref),
                row.get(1).and_then(Option::as_deref),
            );
            if name != Some(self.name.as_str()) || id != Some(self.id.as_str()) {
                let name = name.unwrap_or_default();
                return Err(Failure::state(format!(
                    "the provider is node \"{}\", but not the one that is known here as \"{name}\"",
                    self.name
                ))
                .hint(format!(
                    "If the node was dropped and created anew, forget the old one with braid.drop_node('{name}')."
                )));
            }
        }
        Ok(())
    }

    /// Checks that it still is the provider of a subscription.
    pub fn check_is(&self, subscription: &Subscription) -> Outcome<()> {
        if self.id == subscription.provider_id {
            return Ok(());
        }
        Err(Failure::state(format!(
            "the connection string of subscription \"{}\" does not lead to its provider",
            subscription.name
        ))
        .detail(format!("Its provider is node \"{}\"; the node that answers is \"{}\", another one.", subscription.provider_name, self.name))
        .hint("Correct the connection string with braid.alter_subscription, or drop the subscription and create it anew."))
    }

    /// Stores the node in the local catalog.
    pub fn record(&self, dsn: &str) -> Outcome<()> {
        // The local node's row is locked, so no other session inserts; ON CONFLICT is not for
        // tables that a decoder reads.
        let connection = connection_string::store(dsn)?;
        let known = [
            Some(self.name.as_str()),
            Some(connection.as_str()),
            Some(self.system_identifier.as_str()),
            Some(self.database_oid.as_str()),
        ];
        let updated = braid_postgres::catalog::query(
            "update braid.node set connection_id = $2::bigint, system_identifier = $3, database_oid = $4::oid \
              where node_name = $1::name returning 1",
            &known,
        );
        if updated.is_empty() {
            let [name, connection, system_identifier, database_oid] = known;
            braid_postgres::catalog::query(
                "insert into braid.node (node_name, node_id, is_local, connection_id, system_identifier, database_oid) \
                 values ($1::name, $2::uuid, false, $3::bigint, $4, $5::oid)",
                &[
                    name,
                    Some(&self.id),
                    connection,
                    system_identifier,
                    database_oid,
                ],
            );
        }
        Ok(())
    }

    /// Checks the settings, room and permission that a subscription needs at the provider.
    pub fn check_server(&mut self, needs_slot: bool) -> Outcome<()> {
        let rows = self.query(
            "select wal_level, output_plugin_libraries, output_plugin_allowed, free_slots, free_walsenders, \
                    (select rolreplication or rolsuper from pg_roles where rolname = current_user), current_user \
               from braid.node_info()",
        )?;
        if rows.get(0, 0) != Some("logical") {
            return Err(Failure::state("the provider's wal_level is not logical")
                .hint("At the provider, set wal_level = logical in postgresql.conf and restart."));
        }
        if rows.get(0, 2) != Some("t") {
            return Err(Failure::state(
                "the provider's output_plugin_libraries does not list braid",
            )
            .hint(format!(
                "At the provider, {}",
                output_plugin_setting(rows.get(0, 1).unwrap_or_default())
            )));
        }
        if rows.get(0, 5) != Some("t") {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                format!("role \"{}\" may not replicate from the provider", rows.get(0, 6).unwrap_or_default()),
            )
            .hint("At the provider, give the role the REPLICATION attribute: alter role ... replication."));
        }
        let none_left = |column| {
            rows.get(0, column)
                .and_then(|n| n.parse::<i64>().ok())
                .is_none_or(|n| n <= 0)
        };
        let full = |message: &str, hint: &str| {
            Err(Failure::new(
                PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
                message,
            )
            .hint(hint))
        };
        if needs_slot && none_left(3) {
            return full(
                "all replication slots of the provider are in use",
                "At the provider, drop slots that nobody needs or increase max_replication_slots.",
            );
        }
        if none_left(4) {
            return full(
                "all walsenders of the provider are in use",
                "At the provider, increase max_wal_senders.",
            );
        }
        Ok(())
    }

    /// Checks that all publications exist at the provider.
    pub fn check_publications(&mut self, publications: &[String]) -> Outcome<()> {
        let rows = self.query(&format!(
            "select pubname from pg_publication where pubname = any ({}::name[])",
            quote_literal(&array_literal(publications))
        ))?;
        let there = local::column(&rows);
        let missing: Vec<String> = publications
            .iter()
            .filter(|name| !there.contains(name))
            .map(|name| format!("\"{name}\""))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let (noun, verb) = if missing.len() == 1 {
            ("publication", "does")
        } else {
            ("publications", "do")
        };
        Err(Failure::undefined(format!("{noun} {} {verb} not exist at the provider", missing.join(", ")))
            .hint("Create them there, for example with create publication braid for all tables, or name others in publications."))
    }

    /// Checks that no table has different column lists in the publications: its stream would stop.
    fn check_column_lists(&mut self, publications: &[String]) -> Outcome<()> {
        let differing = self.query(&format!(
            "select t.schemaname, t.tablename, string_agg(quote_ident(t.pubname), ', ' order by t.pubname) from pg_publication_tables t \
               join pg_namespace n on n.nspname = t.schemaname \
               join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename \
              where t.pubname in ({}) and {} group by 1, 2 \
             having count(distinct coalesce(t.attnames, '{{}}')) > 1 order by 1, 2 limit 1",
            publication_literals(publications),
            is_not_sent_as_root(publications)
        ))?;
        let (Some(schema), Some(table)) = (differing.get(0, 0), differing.get(0, 1)) else {
            return Ok(());
        };
        Err(Failure::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("cannot use different column lists for table \"{schema}.{table}\" in different publications"),
        )
        .detail(format!(
            "Publications with the table: {}.",
            differing.get(0, 2).unwrap_or_default()
        ))
        .hint("Give the table the same column list in all publications of the subscription."))
    }

    /// Checks that changes of rows identify the rows: no replica identity has a generated column
    /// that is not sent.
    fn check_identities(&mut self, publications: &[String]) -> Outcome<()> {
        // Before version 18, generated columns are listed in some cases but never sent.
        let unsent = if self.connection.server_version() < 180_000 {
            ""
        } else {
            "and a.attname <> all (coalesce(t.attnames, '{}'))"
        };
        let found = self.query(&format!(
            "select t.schemaname, t.tablename, string_agg(distinct quote_ident(a.attname), ', ') from pg_publication_tables t \
               join pg_publication p on p.pubname = t.pubname and (p.pubupdate or p.pubdelete) \
               join pg_namespace n on n.nspname = t.schemaname \
               join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename \
               join pg_index i on i.indrelid = c.oid \
                and case c.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident else false end \
               join pg_attribute a on a.attrelid = c.oid and a.attgenerated <> '' {unsent} \
                and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1]) \
              where t.pubname in ({}) and {} group by 1, 2 order by 1, 2 limit 1",
            publication_literals(publications),
            is_not_sent_as_root(publications)
        ))?;
        let (Some(schema), Some(table)) = (found.get(0, 0), found.get(0, 1)) else {
            return Ok(());
        };
        Err(Failure::state(format!(
            "replica identity of table \"{schema}.{table}\" has generated columns, which are not published: {}",
            found.get(0, 2).unwrap_or_default()
        ))
        .detail("Updates and deletes do not say which row they are about.")
        .hint(
            "At the provider, run ALTER TABLE ... REPLICA IDENTITY USING INDEX with a unique index of ordinary columns, which the table here has too. \
             Or leave updates and deletes of the table out of the publication.",
        ))
    }

    /// Tables and columns of the publications. With `to_copy`, also that the role may read them.
    pub fn published_tables(
        &mut self,
        publications: &[String],
        to_copy: bool,
    ) -> Outcome<PublishedTables> {
        // Before version 18, generated columns are listed in some cases but never sent.
        let generated = if self.connection.server_version() < 180_000 {
            "and a.attgenerated = ''"
        } else {
            ""
        };
        self.check_column_lists(publications)?;
        self.check_identities(publications)?;
        let rows = self.query(&format!(
            "select distinct t.schemaname, t.tablename, a.attname, a.attnum, \
                    has_schema_privilege(n.oid, 'USAGE') \
                    and (has_table_privilege(c.oid, 'SELECT') or has_column_privilege(c.oid, a.attnum, 'SELECT')), \
                    exists (select from pg_index i where i.indrelid = c.oid and (i.indisprimary or i.indisreplident) \
                        and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])) \
               from pg_publication_tables t \
               join pg_namespace n on n.nspname = t.schemaname \
               join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename \
               left join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped \
                    and a.attname = any (t.attnames) {generated} \
              where t.pubname in ({}) and {} \
                and not exists (select 1 from pg_depend d, pg_extension e where d.classid = 'pg_class'::regclass \
                    and d.objid = c.oid and d.deptype = 'e' and d.refclassid = 'pg_extension'::regclass \
                    and d.refobjid = e.oid and e.extname = 'braid') \
              order by 1, 2, 4",
            publication_literals(publications),
            is_not_sent_as_root(publications)
        ))?;
        let mut tables = PublishedTables::new();
        for row in rows.iter() {
            let [Some(schema), Some(table), name, _, readable, key] = row else {
                continue;
            };
            if to_copy && readable.as_deref() == Some("f") {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                    format!("no permission to copy table \"{schema}.{table}\" from the provider"),
                )
                .hint("At the provider, grant the role of the connection string USAGE on the schema and SELECT on the table, or use copy_data => false."));
            }
            let columns = tables.entry((schema.clone(), table.clone())).or_default();
            columns.extend(name.clone().map(|name| PublishedColumn {
                name,
                is_key: key.as_deref() == Some("t"),
            }));
        }
        Ok(tables)
    }

    /// Asks something that only members of a group ask. An error there is the node's own, with its
    /// hint.
    pub fn ask(&mut self, sql: &str) -> Outcome<Rows> {
        self.connection.query(sql).map_err(|error| match &error {
            Error::Server { message, hint, .. } => {
                let words = format!("node \"{}\" refuses: {message}", self.name);
                let failure = Failure::provider(words, &error);
                let failure = match error.detail() {
                    Some(detail) => failure.detail(detail),
                    None => failure,
                };
                failure.hint(
                    hint.clone()
                        .unwrap_or_else(|| "See the log of that node.".to_owned()),
                )
            }
            _ => failed(&error),
        })
    }

    /// Names of all slots of the provider.
    pub fn slot_names(&mut self) -> Outcome<Vec<String>> {
        Ok(local::column(
            &self.query("select slot_name from pg_replication_slots")?,
        ))
    }

    /// A slot of the provider by name. It must exist, be one that Braid can read, and have no other
    /// reader.
    pub fn require_slot(&mut self, name: &str) -> Outcome<Slot> {
        let deadline = Instant::now() + SLOT_PATIENCE;
        loop {
            let rows = self.query(&format!(
                "select confirmed_flush_lsn, plugin, database = current_database(), active_pid, wal_status \
                   from pg_replication_slots where slot_name = {}",
                quote_literal(name)
            ))?;
            if rows.is_empty() {
                return Err(Failure::undefined(format!("replication slot \"{name}\" does not exist at the provider"))
                    .hint(format!("Create it there with pg_create_logical_replication_slot('{name}', 'braid'), or use create_slot => true.")));
            }
            if rows.get(0, 1) != Some("braid") || rows.get(0, 2) != Some("t") {
                return Err(Failure::state(format!(
                    "replication slot \"{name}\" is not one of output plugin braid in the provider's database"
                ))
                .hint("Name another slot."));
            }
            if rows.get(0, 4) == Some("lost") {
                return Err(Failure::state(format!(
                    "the provider has removed WAL that replication slot \"{name}\" needs"
                ))
                .hint("Drop the slot there, and use create_slot => true."));
            }
            let Some(reader) = rows.get(0, 3) else {
                return Ok(Slot {
                    confirmed_flush_lsn: rows.get(0, 0).map(str::to_owned),
                });
            };
            if Instant::now() > deadline {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
                    format!("replication slot \"{name}\" is in use at the provider"),
                )
                .detail(format!("Process {reader} there reads from it."))
                .hint("End that reader, or name another slot."));
            }
            latch::wait(Some(Duration::from_millis(50)));
        }
    }

    fn query(&mut self, sql: &str) -> Outcome<Rows> {
        self.connection.query(sql).map_err(|error| failed(&error))
    }
}

fn failed(error: &Error) -> Failure {
    Failure::provider("could not look at the provider", error)
        .hint("Check that the same version of Braid is installed there and that the connection is stable.")
}
