//! The other members, and what the steps ask of them by SQL.

use std::time::Duration;

use braid_bgworker::slot_name;
use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::{execute, rows, rows_written};
use braid_postgres::error::{self, PgError};
use braid_postgres::libpq::{Connection, Mode};
use braid_postgres::rows::Rows;

/// A member that can't be reached within this time is tried again later.
const PATIENCE: Duration = Duration::from_secs(5);

/// Another member.
pub(super) struct Peer {
    pub(super) id: u64,
    pub(super) name: String,
    /// Never to be logged or shown.
    pub(super) dsn: String,
    pub(super) has_data: bool,
    pub(super) state: String,
    /// The index of the entry that added it.
    pub(super) since: u64,
    /// The subscription of this node to it.
    pub(super) subscription: Option<String>,
    /// Whether that one is enabled.
    is_enabled: bool,
    /// The member that holds back for this node what it confirms to this one, which was away when
    /// this node joined; the slot there that is copied once it is back.
    pub(super) held_by: Option<u64>,
    pub(super) held_slot: Option<String>,
    /// Of a removed one: its last transactions are to reach all.
    pub(super) recover: bool,
    /// Of a removed one: nothing of it is left here.
    pub(super) forgotten: bool,
    /// Of a removed one: another member has its name by now.
    pub(super) is_back: bool,
    /// The slot here that its subscription reads, if that was noted: it may have been made by hand.
    pub(super) slot: Option<String>,
}

/// How a subscription to a member begins.
#[derive(Debug, Clone, Copy)]
pub(super) enum Start<'a> {
    /// By a copy, with a slot that is made for it.
    Copy,
    /// At this slot, which is there. Nothing is copied.
    Slot(&'a str),
    /// The same, but not before it is enabled.
    SlotLater(&'a str),
}

impl<'a> Start<'a> {
    const fn slot(self) -> Option<&'a str> {
        match self {
            Self::Copy => None,
            Self::Slot(slot) | Self::SlotLater(slot) => Some(slot),
        }
    }

    const fn is_at_once(self) -> bool {
        !matches!(self, Self::SlotLater(_))
    }
}

/// All other members, removed ones too.
pub(super) fn all(own: u64) -> Result<Vec<Peer>, PgError> {
    let found = rows(
        "select m.member_id::text, m.node_name::text, c.dsn, m.role, m.state, m.since_index::text, \
                s.subscription_name::text, s.enabled::text, m.held_by::text, m.held_slot::text, m.recover::text, m.forgotten::text, \
                exists (select from braid.group_member o where m.state = 'removed' and o.node_name = m.node_name and o.state <> 'removed')::text, \
                m.slot_name::text \
           from braid.group_member m left join braid.connection c using (connection_id) \
           left join lateral (select u.subscription_name, u.enabled from braid.subscription u \
                               where u.provider_id = m.node_id and u.only_origin is null order by u.subscription_id limit 1) s on true \
          where m.member_id <> $1 order by m.member_id",
        &[i64::try_from(own).unwrap_or(0).into()],
    )?;
    Ok(found
        .into_iter()
        .filter_map(|row| {
            let [
                id,
                name,
                dsn,
                role,
                state,
                since,
                subscription,
                enabled,
                held_by,
                held_slot,
                recover,
                forgotten,
                is_back,
                slot,
            ] = <[Option<String>; 14]>::try_from(row).ok()?;
            Some(Peer {
                id: id?.parse().ok()?,
                name: name?,
                dsn: dsn.unwrap_or_default(),
                has_data: role? == "data",
                state: state?,
                since: since?.parse().ok()?,
                subscription,
                is_enabled: enabled.as_deref() == Some("true"),
                held_by: held_by.and_then(|id| id.parse().ok()),
                held_slot,
                recover: recover.as_deref() == Some("true"),
                forgotten: forgotten.as_deref() == Some("true"),
                is_back: is_back.as_deref() == Some("true"),
                slot,
            })
        })
        .collect())
}

impl Peer {
    /// Whether it is a member that will go on being one.
    pub(super) fn stays(&self) -> bool {
        ["joining", "active", "in maintenance"].contains(&self.state.as_str())
    }

    /// Whether its changes come here.
    pub(super) const fn is_followed(&self) -> bool {
        self.subscription.is_some() && self.is_enabled
    }

    /// This node's subscription to it: its name, and its slot's there.
    pub(super) fn subscription_to(&self, own: &str) -> (String, String) {
        slot_name::between(own, &self.name)
    }

    /// The slot here that its subscription to this node reads.
    pub(super) fn slot_here(&self, own: &str) -> String {
        match &self.slot {
            Some(slot) => slot.clone(),
            None => slot_name::between(&self.name, own).1,
        }
    }

    /// Notes the slot here that its subscription reads, which may have been made by hand. Outside
    /// of a transaction. False if it has not subscribed.
    pub(super) fn note_slot(&self, own: &str) -> Result<bool, PgError> {
        let asked = self.ask(&format!(
            "select d.slot_name from braid.subscription_detail d where d.provider = {}",
            quote_literal(own)
        ))?;
        let Some(slot) = asked else {
            return Ok(false);
        };
        error::transaction(|| {
            execute(
                "update braid.group_member set slot_name = $2::name where member_id = $1",
                &[
                    i64::try_from(self.id).unwrap_or(0).into(),
                    slot.as_str().into(),
                ],
            )
        })?;
        Ok(true)
    }

    /// Asks it something. Outside of a transaction.
    pub(super) fn ask(&self, sql: &str) -> Result<Option<String>, PgError> {
        Ok(self.query(sql)?.get(0, 0).map(str::to_owned))
    }

    /// Asks it for rows. Outside of a transaction.
    pub(super) fn query(&self, sql: &str) -> Result<Rows, PgError> {
        let asked = error::catch(|| {
            let mut connection =
                Connection::open_within(&self.dsn, "braid group steps", Mode::Sql, PATIENCE)?;
            connection.give_up_when_silent();
            Ok::<_, PgError>(connection.query(sql)?)
        });
        asked
            .and_then(|outcome| outcome)
            .map_err(|error| self.explain(&error))
    }

    /// An error that says which member it is of.
    fn explain(&self, error: &PgError) -> PgError {
        let mut explained = PgError::new(
            error.sqlstate,
            format!("node \"{}\": {}", self.name, error.message),
        );
        explained.detail.clone_from(&error.detail);
        explained.hint = error.hint.clone().or_else(|| {
            Some(
                "Check that the node runs and lets this one connect. It is tried again.".to_owned(),
            )
        });
        explained
    }

    /// Creates a slot there, if it is not there yet.
    pub(super) fn create_slot(&self, name: &str) -> Result<(), PgError> {
        let slot = quote_literal(name);
        let there = self.ask(&format!(
            "select confirmed_flush_lsn is not null from pg_catalog.pg_replication_slots where slot_name = {slot}"
        ))?;
        match there.as_deref() {
            Some("t") => {}
            Some(_) => return Err(unfinished(name)),
            None => {
                self.ask(&format!(
                    "select pg_catalog.pg_create_logical_replication_slot({slot}, 'braid')"
                ))?;
            }
        }
        Ok(())
    }

    /// Whether all of these publications, an array's text, are there.
    pub(super) fn has_publications(&self, publications: &str) -> Result<bool, PgError> {
        let publications = quote_literal(publications);
        let missing = self.ask(&format!(
            "select 1 from pg_catalog.unnest({publications}::name[]) p \
             where not exists (select from pg_catalog.pg_publication o where o.pubname = p) limit 1"
        ))?;
        Ok(missing.is_none())
    }

    /// Whether a slot is there, and finished.
    pub(super) fn has_slot(&self, slot: &str) -> Result<bool, PgError> {
        let slot = quote_literal(slot);
        let there = self.ask(&format!(
            "select 1 from pg_catalog.pg_replication_slots where slot_name = {slot} and confirmed_flush_lsn is not null"
        ))?;
        Ok(there.is_some())
    }

    /// A position behind all that is committed there now.
    pub(super) fn position(&self) -> Result<String, PgError> {
        self.ask("select braid.sync_event()")?.ok_or_else(|| {
            self.explain(&PgError::new(
                SqlState::ProtocolViolation,
                "no position was returned",
            ))
        })
    }

    /// Subscribes this node to it.
    pub(super) fn subscribe(
        &self,
        name: &str,
        publications: &str,
        start: Start<'_>,
    ) -> Result<(), PgError> {
        error::transaction(|| self.create_subscription(name, publications, start))
    }

    /// The same, in a transaction of the caller's.
    pub(super) fn create_subscription(
        &self,
        name: &str,
        publications: &str,
        start: Start<'_>,
    ) -> Result<(), PgError> {
        rows_written(
            "select braid.create_subscription($1::name, $2, publications => $3::text[], copy_data => $4::name is null, \
                    create_slot => $4::name is null, slot_name => $4::name, enabled => $5, replicate_ddl => true)::text",
            &[
                name.into(),
                self.dsn.as_str().into(),
                publications.into(),
                start.slot().into(),
                start.is_at_once().into(),
            ],
        )
        .map(drop)
    }

    /// Lets its changes come, if there is a subscription to it.
    pub(super) fn follow(&self) -> Result<(), PgError> {
        self.with_subscription("select braid.enable_subscription($1::name)::text")
    }

    /// Drops this node's subscription to it, if there is one.
    pub(super) fn unsubscribe(&self) -> Result<(), PgError> {
        self.with_subscription("select braid.drop_subscription($1::name)::text")
    }

    /// Runs a statement about this node's subscription to it, if there is one.
    fn with_subscription(&self, sql: &str) -> Result<(), PgError> {
        let Some(subscription) = &self.subscription else {
            return Ok(());
        };
        error::transaction(|| rows_written(sql, &[subscription.as_str().into()]).map(drop))
    }
}

/// Whether this node has applied all of a member up to a position, as far as it is known.
pub(super) fn has_applied(subscription: &str, position: &str) -> Result<bool, PgError> {
    let found = error::transaction(|| {
        rows(
            "select (coalesce(greatest(a.applied_lsn, \
                        (select max(p.remote_lsn) from braid.origin o join pg_replication_origin_status p on p.local_id = o.origin_id \
                          where o.subscription_id = s.subscription_id and o.node_name = s.provider_name)) >= $2::text::pg_lsn, false))::text \
               from braid.subscription s \
               left join braid.subscription_activity() a on a.subscription_id = s.subscription_id \
              where s.subscription_name = $1::name",
            &[subscription.into(), position.into()],
        )
    })?;
    Ok(found
        .first()
        .is_some_and(|row| row.first().cloned().flatten().as_deref() == Some("true")))
}

/// The error for a slot that is being created. If its creation fails, it goes.
fn unfinished(slot: &str) -> PgError {
    PgError::new(
        SqlState::ObjectInUse,
        format!("replication slot \"{slot}\" is still being created"),
    )
    .with_hint("It waits for transactions that ran when its creation began.")
}

/// Creates a slot here, if it is not there yet. It takes a transaction of its own.
pub(super) fn create_slot_here(slot: &str) -> Result<(), PgError> {
    error::transaction(|| make_slot_here(slot))
}

/// As [`create_slot_here`], in a transaction of the caller's that has written nothing.
pub(super) fn make_slot_here(slot: &str) -> Result<(), PgError> {
    let there = rows(
        "select (confirmed_flush_lsn is not null)::text from pg_replication_slots where slot_name = $1::name",
        &[slot.into()],
    )?;
    match there
        .first()
        .map(|row| row.first().cloned().flatten().as_deref() == Some("true"))
    {
        Some(true) => {}
        Some(false) => return Err(unfinished(slot)),
        None => {
            rows(
                "select slot_name::text from pg_create_logical_replication_slot($1::name, 'braid')",
                &[slot.into()],
            )?;
        }
    }
    Ok(())
}
