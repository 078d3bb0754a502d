//! The cleanup process: drops the slots that dropped subscriptions left at their providers, and
//! ends. The manager starts it again for those whose provider could not be reached, or whose slot
//! somebody still reads.
//!
//! No slot waits for another: each is tried once, then those again that are only about to be let
//! go.
//!
//! A former member of the group may be back, or another node of its name. This node subscribes to
//! its slot of the same name next, so the slot stays. Not dropped are a slot of another node, and
//! that of a subscription that the group wants.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use braid_bgworker::slot_name;
use braid_bgworker::sql_text::quote_identifier;
use braid_bgworker::sqlstate::SqlState;
use braid_node::connection_string::{self, DSN};
use braid_node::standing;
use braid_node::subscription::{execute, rows};
use braid_postgres::error::{self, PgError};
use braid_postgres::libpq::{Connection, Mode};
use braid_postgres::{latch, worker};
use pgrx::pg_sys;

/// A walsender takes a moment to notice that its leader is gone.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(100);

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    crate::connect(argument);
    let slots = error::transaction(|| {
        // In a copy of a node these are slots of the original's.
        if standing::refusal()?.is_some() {
            return Ok(Vec::new());
        }
        rows(
            &format!(
                "select slot_name::text, provider_name::text, s.provider_id::text, (select n.node_name::text from braid.node n where n.is_local), \
                        exists (select from braid.group_member m where m.node_name = s.provider_name and m.state in ('joining', 'active', 'in maintenance'))::text, \
                        {DSN} from braid.slot_cleanup s order by attempts, since"
            ),
            &[],
        )
    });
    let slots = match slots {
        Ok(slots) => slots,
        Err(failure) => {
            failure.log("braid cleanup");
            return;
        }
    };
    let mut slots: Vec<Slot> = slots
        .iter()
        .map(|row| {
            let text = |index: usize| row.get(index).cloned().flatten().unwrap_or_default();
            let (name, provider) = (text(0), text(1));
            Slot {
                is_wanted: text(4) == "true" && name == slot_name::between(&text(3), &provider).1,
                name,
                provider,
                provider_id: row.get(2).cloned().flatten(),
                dsn: row.get(5).cloned().flatten(),
            }
        })
        .collect();
    let deadline = Instant::now() + PATIENCE;
    let mut unreachable = HashSet::new();
    loop {
        let last = Instant::now() >= deadline;
        slots.retain(|slot| {
            !slot
                .dsn
                .as_ref()
                .is_some_and(|dsn| unreachable.contains(dsn))
                && !slot.clean_up(last, &mut unreachable)
        });
        if slots.is_empty() || last {
            return;
        }
        latch::wait(Some(PAUSE));
    }
}

struct Slot {
    name: String,
    provider: String,
    /// A UUID; `None` if it was not noted.
    provider_id: Option<String>,
    /// The group wants a subscription that reads a slot of this name.
    is_wanted: bool,
    /// `None` if somebody has taken it away.
    dsn: Option<String>,
}

impl Slot {
    /// Tries to drop it, and records the outcome. Returns false if it is still read from and there
    /// is time to try again.
    fn clean_up(&self, last: bool, unreachable: &mut HashSet<String>) -> bool {
        let outcome = error::catch(|| match &self.dsn {
            _ if self.is_wanted => Ok(false),
            Some(dsn) => self.drop(dsn),
            None => Err(PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                "its connection string is gone".to_owned(),
            )),
        })
        .and_then(|outcome| outcome);
        match &outcome {
            Err(failure) if failure.sqlstate == SqlState::ObjectInUse && !last => return false,
            Err(failure) if failure.sqlstate.is_of("08") => {
                unreachable.extend(self.dsn.clone());
            }
            _ => {}
        }
        let (slot, provider) = (self.name.as_str(), self.provider.as_str());
        let noted = error::transaction(|| {
            match &outcome {
            Ok(_) => execute(
                "delete from braid.slot_cleanup where slot_name = $1::name and provider_name = $2::name",
                &[slot.into(), provider.into()],
            )
            .map(|()| connection_string::forget_unused()),
            Err(failure) => execute(
                "update braid.slot_cleanup set attempts = attempts + 1, last_error = $3 \
                 where slot_name = $1::name and provider_name = $2::name",
                &[
                    slot.into(),
                    provider.into(),
                    failure.message.as_str().into(),
                ],
            ),
        }
        });
        if let Err(failure) = noted {
            failure.log("braid cleanup");
        }
        match outcome {
            Ok(true) => pgrx::log!("dropped replication slot \"{slot}\" at node \"{provider}\""),
            Ok(false) => pgrx::log!(
                "replication slot \"{slot}\" at node \"{provider}\" stays: it is not the one that was left"
            ),
            Err(failure) => failure.log(&format!(
                "could not drop replication slot \"{slot}\" at node \"{provider}\""
            )),
        }
        true
    }

    /// Drops it; a missing slot is fine. A slot that is read from is an error at once: waiting for
    /// it would delay the others. Returns false if the provider is another node now.
    fn drop(&self, dsn: &str) -> Result<bool, PgError> {
        let mut connection = Connection::open(dsn, "braid cleanup", Mode::Replication)?;
        connection.give_up_when_silent();
        if let Some(id) = &self.provider_id
            && is_another(&mut connection, id)?
        {
            return Ok(false);
        }
        let name = quote_identifier(&self.name);
        match connection.query(&format!("DROP_REPLICATION_SLOT {name}")) {
            Ok(_) => Ok(true),
            // A standby need not have the slots of its primary.
            Err(error)
                if error.sqlstate() == SqlState::UndefinedObject && !connection.is_to_standby() =>
            {
                Ok(true)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether the database is a node with another identity, as far as the role may know.
fn is_another(connection: &mut Connection, id: &str) -> Result<bool, PgError> {
    let may = connection.query(
        "SELECT 1 FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regprocedure('braid.node_info()') \
         AND pg_catalog.has_function_privilege(oid, 'execute') \
         AND pg_catalog.has_schema_privilege(pg_catalog.to_regnamespace('braid'), 'usage')",
    )?;
    if may.is_empty() {
        return Ok(false);
    }
    let found = connection.query("SELECT node_id FROM braid.node_info()")?;
    Ok(found.get(0, 0).is_some_and(|there| there != id))
}
