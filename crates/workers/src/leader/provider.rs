//! Asks the provider before streaming: creates a slot, reads which tables are published, and checks
//! the provider's state.

use braid_bgworker::policy;
use braid_bgworker::reason::Reason;
use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::{lsn_text, parse_lsn};
use braid_node::published;
use braid_node::subscription::{self, Subscription};
use braid_postgres::error::{self, PgError};
use braid_postgres::libpq::{self, Connection, Mode};
use braid_postgres::transaction;

use crate::copy::source::without_snapshot;

use super::End;

/// Creates the slot. An existing one of the same name may be dropped only if it is left over from
/// an earlier attempt that was cut off before the catalog recorded the slot. So each attempt first
/// records that there was none.
pub(super) fn create_slot(
    connection: &mut Connection,
    subscription: &Subscription,
) -> Result<(u64, String), End> {
    let slot = quote_identifier(&subscription.options.slot_name);
    let in_recovery = connection.is_to_standby();
    let taken = || {
        let error = PgError::new(
            SqlState::DuplicateObject,
            format!(
                "replication slot \"{}\" at the provider is not this subscription's",
                subscription.options.slot_name
            ),
        );
        End::at_provider(
            error
                .with_detail("Somebody else created it after this subscription had chosen the name.")
                .with_hint(
                    "Drop the subscription and create it with another slot_name, or, if nobody needs the slot, drop it at the \
                     provider and run braid.enable_subscription.",
                ),
            in_recovery,
        )
    };
    let there = !connection
        .query(&format!(
            "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = {}",
            quote_literal(&subscription.options.slot_name)
        ))?
        .is_empty();
    if there && !subscription.slot_attempted {
        return Err(taken());
    }
    if there {
        connection.query(&format!("DROP_REPLICATION_SLOT {slot} WAIT"))?;
    }
    let noted = error::transaction(|| {
        // Without synchronous_commit a crash could forget it, and keep the slot.
        transaction::flush_at_commit();
        subscription::set_slot_attempted(subscription.id, true)
    })?;
    if !noted {
        return Err(End::Quiet);
    }
    let two_phase = if subscription.options.two_phase {
        ", TWO_PHASE"
    } else {
        ""
    };
    let create =
        format!("CREATE_REPLICATION_SLOT {slot} LOGICAL braid (SNAPSHOT 'export'{two_phase})");
    let rows = match connection.query(&create) {
        Ok(rows) => rows,
        Err(error) => {
            // If the connection broke, or the server stops, the slot may have been created; after
            // any other error it was not.
            if !["08", "57"]
                .iter()
                .any(|class| error.sqlstate().is_of(class))
            {
                error::transaction(|| subscription::set_slot_attempted(subscription.id, false))?;
            }
            return Err(match error.sqlstate() {
                SqlState::DuplicateObject => taken(),
                SqlState::InternalError => without_snapshot(error.into()).into(),
                _ => error.into(),
            });
        }
    };
    let lsn = rows.get(0, 1).and_then(parse_lsn);
    let snapshot = rows.get(0, 2).map(str::to_owned);
    match (lsn, snapshot) {
        (Some(lsn), Some(snapshot)) => Ok((lsn, snapshot)),
        _ => Err(libpq::Error::Unexpected("CREATE_REPLICATION_SLOT").into()),
    }
}

/// Opens another connection, for SQL, to the provider that `first` leads to.
///
/// # Errors
/// Those of the connection. 57P03 if it leads to a standby and `first` does not: during a failover
/// the address may lead to another server, and a standby may lag behind what the primary has sent.
pub(super) fn open_beside(
    first: &Connection,
    subscription: &Subscription,
) -> Result<Connection, End> {
    let mut connection = Connection::open(&subscription.dsn, &subscription.name, Mode::Sql)?;
    connection.give_up_when_silent();
    if connection.is_to_standby() && !first.is_to_standby() {
        let error = PgError::new(
            SqlState::CannotConnectNow,
            "the connection string leads to a standby now, and no longer to its primary",
        );
        return Err(End::at_provider(error, true));
    }
    Ok(connection)
}

/// Returns the tables that the publications publish now.
pub(super) fn published_tables(
    connection: &mut Connection,
    subscription: &Subscription,
) -> Result<Vec<(String, String)>, End> {
    let publications = &subscription.options.publications;
    let rows = connection.query(&format!(
        "SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE EXISTS {} AND n.nspname <> 'braid' AND {}",
        published::of_table(publications),
        published::is_not_sent_as_root(publications)
    ))?;
    Ok((0..rows.len())
        .filter_map(|row| Some((rows.get(row, 0)?.to_owned(), rows.get(row, 1)?.to_owned())))
        .collect())
}

/// Returns the rules for conflicts and columns that count on all nodes, as the provider has them,
/// and whether each concerns changes from the provider. Rules set before the slot was created are
/// not in the stream. They are read once the slot exists; a rule that is set meanwhile arrives
/// twice, which is harmless.
pub(super) fn rules_for_all_nodes(
    connection: &mut Connection,
    subscription: &Subscription,
) -> Result<Vec<(String, bool)>, End> {
    let may = connection.query(
        "SELECT 1 FROM pg_catalog.pg_proc WHERE oid = to_regprocedure('braid.rules_for_all_nodes()') \
         AND has_function_privilege(oid, 'execute') AND has_schema_privilege(pg_catalog.to_regnamespace('braid'), 'usage')",
    )?;
    if may.is_empty() {
        PgError::new(
            SqlState::Warning,
            "rules that were set on all nodes before now do not come along: the role that connects to the provider may not ask for them",
        )
        .with_hint("Grant braid_monitor to it there, or set here what braid.conflict_resolutions and braid.column_rules show at the provider.")
        .warn();
        return Ok(Vec::new());
    }
    let publishes = published::of_table(&subscription.options.publications);
    let rows = connection.query(&format!(
        "SELECT r.content, EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = r.relation AND EXISTS {publishes}) \
         FROM braid.rules_for_all_nodes() WITH ORDINALITY r (relation, kind, column_name, content, place) ORDER BY r.place"
    ))?;
    Ok((0..rows.len())
        .filter_map(|row| Some((rows.get(row, 0)?.to_owned(), rows.get(row, 1) == Some("t"))))
        .collect())
}

/// Facts about a provider, read before it streams.
pub(super) struct Provider {
    /// One of the publications is FOR ALL TABLES.
    pub(super) all_tables: bool,
    /// The end of its WAL.
    pub(super) end: u64,
    /// Where the slot begins: earlier commits are not sent.
    pub(super) slot_begins: u64,
    /// The provider is a standby.
    pub(super) in_recovery: bool,
}

impl Provider {
    /// Checks that the provider's WAL reaches `start`, up to where its changes are applied. If the
    /// provider was restored to an earlier state, as from a backup, it writes other WAL at
    /// positions up to `start`. START_REPLICATION would leave that out. Once its WAL has grown
    /// beyond `start` again, this can't be detected.
    ///
    /// # Errors
    /// The subscription stops. If the provider is a standby, it may only lag behind, and the leader
    /// retries.
    pub(super) fn check_reaches(&self, start: u64) -> Result<(), End> {
        if self.end >= start {
            return Ok(());
        }
        let error = PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "the provider's WAL ends at {}, before {}, up to where its transactions are applied here",
                lsn_text(self.end),
                lsn_text(start)
            ),
        )
        .with_detail("It was put back to an earlier state, or another server has taken its place that does not have all of its WAL. What it commits up to that position would not be sent.")
        .with_hint(
            "Drop the subscription and create it again with copy_data => false. What the provider has lost is still here: braid.compare finds it. Run it and \
             braid.repair there, where the provider subscribes to this node, or here with side => 'provider'.",
        );
        Err(End::at_provider(error, self.in_recovery))
    }
}

/// Checks that the provider is the node that its catalog names, as far as the role may ask. A node
/// that was moved by `pg_upgrade` is not, until a user has finished the upgrade; then its slots are
/// created again. So the leader waits for that.
fn check_standing(connection: &mut Connection) -> Result<(), End> {
    let may = connection.query(
        "SELECT 1 FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regprocedure('braid.node_standing()') \
         AND has_function_privilege(oid, 'execute') AND has_schema_privilege(pg_catalog.to_regnamespace('braid'), 'usage')",
    )?;
    if may.is_empty() {
        return Ok(());
    }
    let rows = connection
        .query("SELECT message, detail, hint FROM braid.node_standing() WHERE NOT holds")?;
    let Some(message) = rows.get(0, 0) else {
        return Ok(());
    };
    let mut error = PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("the provider reported: {message}"),
    );
    error.detail = rows.get(0, 1).map(str::to_owned);
    error.hint = rows
        .get(0, 2)
        .map(|hint| format!("At the provider: {hint}"));
    Err(End::Transient(error, 0))
}

/// Checks the provider before streaming, for problems that START_REPLICATION would report less
/// clearly.
pub(super) fn check_provider(
    connection: &mut Connection,
    subscription: &Subscription,
) -> Result<Provider, End> {
    check_standing(connection)?;
    let rows = connection.query(&format!(
        "SELECT plugin, wal_status, \
         CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END, \
         pg_catalog.pg_is_in_recovery(), confirmed_flush_lsn, pg_catalog.to_jsonb(s) OPERATOR(pg_catalog.->>) 'invalidation_reason' \
         FROM pg_catalog.pg_replication_slots s WHERE slot_name = {}",
        quote_literal(&subscription.options.slot_name)
    ))?;
    let end = rows.get(0, 2).and_then(parse_lsn).unwrap_or(0);
    let in_recovery = rows
        .get(0, 3)
        .map_or_else(|| connection.is_to_standby(), |answer| answer == "t");
    let slot_begins = rows.get(0, 4).and_then(parse_lsn).unwrap_or(0);
    let permanent = |sqlstate: SqlState, message: String, hint: &str| -> Result<Provider, End> {
        Err(End::at_provider(
            PgError::new(sqlstate, message).with_hint(hint),
            in_recovery,
        ))
    };
    if rows.is_empty() {
        return permanent(
            SqlState::UndefinedObject,
            format!(
                "replication slot \"{}\" does not exist at the provider",
                subscription.options.slot_name
            ),
            policy::provider_hint(SqlState::UndefinedObject, Some(Reason::SlotMissing)),
        );
    }
    if rows.get(0, 0) != Some("braid") {
        return permanent(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "replication slot \"{}\" at the provider is not braid's",
                subscription.options.slot_name
            ),
            "Drop the subscription and create it with another slot_name.",
        );
    }
    if let Some(reason) = rows.get(0, 5)
        && let Some((what, hint)) = policy::invalidated(reason)
    {
        return permanent(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "the provider has invalidated slot \"{}\": {what}",
                subscription.options.slot_name
            ),
            hint,
        );
    }
    if rows.get(0, 1) == Some("lost") {
        return permanent(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "the provider has removed WAL that slot \"{}\" needs",
                subscription.options.slot_name
            ),
            policy::provider_hint(
                SqlState::ObjectNotInPrerequisiteState,
                Some(Reason::SlotInvalidated),
            ),
        );
    }
    let names = subscription::publication_literals(&subscription.options.publications);
    let rows = connection.query(&format!(
        "SELECT p FROM unnest(ARRAY[{names}]::text[]) p \
         WHERE p NOT IN (SELECT pubname FROM pg_catalog.pg_publication)"
    ))?;
    if let Some(missing) = rows.get(0, 0) {
        return permanent(
            SqlState::UndefinedObject,
            format!("publication \"{missing}\" does not exist at the provider"),
            policy::provider_hint(SqlState::UndefinedObject, Some(Reason::PublicationMissing)),
        );
    }
    let rows = connection.query(&format!(
        "SELECT 1 FROM pg_catalog.pg_publication WHERE puballtables AND pubname IN ({names})"
    ))?;
    Ok(Provider {
        all_tables: !rows.is_empty(),
        end,
        slot_begins,
        in_recovery,
    })
}
