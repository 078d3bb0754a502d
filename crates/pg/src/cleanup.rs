//! The cleanup process: drops the slots that dropped subscriptions left at their providers, and ends. The manager starts it
//! again for those whose provider could not be reached.

use pgrx::pg_sys;

use crate::error::{self, PgError};
use crate::libpq::{Connection, Mode, quote_identifier};
use crate::subscription::{execute, rows};
use crate::worker;

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    worker::connect(u32::try_from(argument.value()).unwrap_or(0));
    let slots = error::transaction(|| {
        rows(
            "select slot_name::text, provider_name::text, dsn from braid.slot_cleanup order by since",
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
    for row in slots {
        let text = |index: usize| row.get(index).cloned().flatten().unwrap_or_default();
        let (slot, provider, dsn) = (text(0), text(1), text(2));
        let outcome = error::catch(|| drop_slot(&slot, &dsn)).and_then(|outcome| outcome);
        let noted = error::transaction(|| match &outcome {
            Ok(()) => execute(
                "delete from braid.slot_cleanup where slot_name = $1::name and provider_name = $2::name",
                &[slot.as_str().into(), provider.as_str().into()],
            ),
            Err(failure) => execute(
                "update braid.slot_cleanup set attempts = attempts + 1, last_error = $3 \
                 where slot_name = $1::name and provider_name = $2::name",
                &[
                    slot.as_str().into(),
                    provider.as_str().into(),
                    failure.message.as_str().into(),
                ],
            ),
        });
        if let Err(failure) = noted {
            failure.log("braid cleanup");
        }
        match outcome {
            Ok(()) => pgrx::log!("dropped replication slot \"{slot}\" at node \"{provider}\""),
            Err(failure) => {
                failure.log(&format!(
                    "could not drop replication slot \"{slot}\" at node \"{provider}\""
                ));
            }
        }
    }
}

/// Drop a slot; one that is not there is fine.
fn drop_slot(slot: &str, dsn: &str) -> Result<(), PgError> {
    let mut connection = Connection::open(dsn, "braid cleanup", Mode::Replication)?;
    match connection.query(&format!(
        "DROP_REPLICATION_SLOT {} WAIT",
        quote_identifier(slot)
    )) {
        Ok(_) => Ok(()),
        Err(error) if error.sqlstate() == "42704" => Ok(()),
        Err(error) => Err(error.into()),
    }
}
