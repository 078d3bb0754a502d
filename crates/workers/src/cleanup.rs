//! The cleanup process: drops the slots that dropped subscriptions left at their providers, and ends. The manager starts it
//! again for those whose provider could not be reached, or whose slot somebody still reads.
//!
//! No slot waits for another: each is tried once, then those again that are only about to be let go.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use braid_bgworker::sql_text::quote_identifier;
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
    worker::connect(u32::try_from(argument.value()).unwrap_or(0));
    let slots = error::transaction(|| {
        // In a copy of a node these are slots of the original's.
        if standing::refusal()?.is_some() {
            return Ok(Vec::new());
        }
        rows(
            &format!(
                "select slot_name::text, provider_name::text, {DSN} from braid.slot_cleanup s order by attempts, since"
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
            Slot {
                name: text(0),
                provider: text(1),
                dsn: row.get(2).cloned().flatten(),
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
    /// `None` if somebody has taken it away.
    dsn: Option<String>,
}

impl Slot {
    /// Try to drop it, and note down what came of it. False when somebody still reads it and there is time to try again.
    fn clean_up(&self, last: bool, unreachable: &mut HashSet<String>) -> bool {
        let outcome = error::catch(|| match &self.dsn {
            Some(dsn) => drop_slot(&self.name, dsn),
            None => Err(PgError::new(
                "55000",
                "its connection string is gone".to_owned(),
            )),
        })
        .and_then(|outcome| outcome);
        match &outcome {
            Err(failure) if failure.sqlstate == "55006" && !last => return false,
            Err(failure) if failure.sqlstate.starts_with("08") => {
                unreachable.extend(self.dsn.clone());
            }
            _ => {}
        }
        let (slot, provider) = (self.name.as_str(), self.provider.as_str());
        let noted = error::transaction(|| {
            match &outcome {
            Ok(()) => execute(
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
            Ok(()) => pgrx::log!("dropped replication slot \"{slot}\" at node \"{provider}\""),
            Err(failure) => failure.log(&format!(
                "could not drop replication slot \"{slot}\" at node \"{provider}\""
            )),
        }
        true
    }
}

/// Drop a slot; one that is not there is fine. One that is read from is an error at once: to wait for it would hold up the others.
fn drop_slot(slot: &str, dsn: &str) -> Result<(), PgError> {
    let mut connection = Connection::open(dsn, "braid cleanup", Mode::Replication)?;
    connection.give_up_when_silent();
    match connection.query(&format!("DROP_REPLICATION_SLOT {}", quote_identifier(slot))) {
        Ok(_) => Ok(()),
        Err(error) if error.sqlstate() == "42704" => Ok(()),
        Err(error) => Err(error.into()),
    }
}
