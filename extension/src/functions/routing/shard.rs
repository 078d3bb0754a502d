//! The shard of a row, for clients that go to the right node by themselves.
//!
//! The function is IMMUTABLE: it reads no table, and no setting counts. So it does without the
//! owner's rights.

use braid_bgworker::sqlstate::SqlState;
use braid_node::routing_key::with_key;
use braid_postgres::error::PgError;
use braid_postgres::function_call::{Argument, FunctionCall};
use braid_postgres::table_scan::low;
use braid_routing::{Invalid, RecordHash, Shards, Spread, TenantHash};
use pgrx::{pg_extern, pg_sys};

/// braid.shard(shards integer, tenant "any", record "any", spread integer) returns integer
#[pg_extern(sql = false)]
fn shard(fcinfo: pg_sys::FunctionCallInfo) -> i32 {
    // SAFETY: PostgreSQL's own call, of a function that is declared STRICT.
    let call = unsafe { FunctionCall::new(fcinfo) };
    match shard_of(call) {
        Ok(shard) => shard,
        Err(error) => error.raise(),
    }
}

fn shard_of(call: FunctionCall<'_>) -> Result<i32, PgError> {
    let argument = |position| call.argument(position).ok_or_else(miscalled);
    let number = |position, name| -> Result<u32, PgError> {
        let value = low(argument(position)?.value).cast_signed();
        u32::try_from(value).map_err(|_| negative(name))
    };
    let shards = Shards::new(number(0, "number of shards")?).map_err(invalid)?;
    let spread = Spread::new(number(3, "spread")?).map_err(invalid)?;
    shards.check(spread).map_err(invalid)?;
    let tenant = hash(argument(1)?, "tenant", TenantHash::of)?;
    let record = hash(argument(2)?, "record", RecordHash::of)?;
    Ok(shards.place(tenant, record, spread).0.cast_signed())
}

fn hash<T>(
    argument: Argument,
    name: &str,
    of: impl FnOnce(&braid_routing::Key<'_>) -> T,
) -> Result<T, PgError> {
    if [pg_sys::InvalidOid, pg_sys::UNKNOWNOID].contains(&argument.of) {
        return Err(PgError::new(
            SqlState::FeatureNotSupported,
            format!("could not determine the type of {name}"),
        )
        .with_hint("Write the type of the column behind the value, as in 'acme'::text."));
    }
    with_key(argument.value, argument.of, argument.collation, of)
}

fn invalid(invalid: Invalid) -> PgError {
    PgError::new(SqlState::InvalidParameterValue, invalid.to_string()).with_hint(invalid.hint())
}

fn negative(name: &str) -> PgError {
    PgError::new(
        SqlState::InvalidParameterValue,
        format!("{name} must not be negative"),
    )
    .with_hint("Use the numbers that the table is routed with.")
}

/// The function is declared with fewer arguments than the library takes.
fn miscalled() -> PgError {
    PgError::new(
        SqlState::InternalError,
        "function is declared with other arguments than the library takes",
    )
    .with_hint("Run ALTER EXTENSION braid UPDATE.")
}
