//! The guard of routed tables, which is called for each row that is inserted or updated, and
//! functions that decide for a copy which rows a member gets.
//!
//! This module runs no user code. PostgreSQL evaluates the arguments before the call, as the role
//! that writes.

use std::cell::RefCell;
use std::rc::Rc;

use braid_bgworker::sqlstate::SqlState;
use braid_node::routing::{self, RowKeys};
use braid_node::routing_key::with_key;
use braid_node::umbrella;
use braid_postgres::error::PgError;
use braid_postgres::function_call::{Argument, FunctionCall};
use braid_postgres::partition_planning::array_elements;
use braid_postgres::syscache;
use braid_postgres::table_scan::low;
use braid_postgres::value::{Content, Value};
use braid_routing::{RecordHash, SetId, TableName, TenantHash, Time};
use pgrx::{pg_extern, pg_sys};

thread_local! {
    /// The name of the table that was last asked for, and in which transaction.
    static NAME: RefCell<Option<(pg_sys::Oid, i64, Rc<TableName>)>> = const { RefCell::new(None) };
}

/// The name of a table in the group's log. Names of routed tables do not change, so one look-up for
/// each transaction is enough.
fn name_of(table: pg_sys::Oid) -> Result<Rc<TableName>, PgError> {
    // SAFETY: reads a variable.
    let transaction = unsafe { pg_sys::GetCurrentTransactionStartTimestamp() };
    let known = NAME.with_borrow(|known| match known {
        Some((oid, when, name)) if (*oid, *when) == (table, transaction) => Some(Rc::clone(name)),
        _ => None,
    });
    if let Some(name) = known {
        return Ok(name);
    }
    let (schema, name) = syscache::relation_name(table);
    if name.is_empty() {
        return Err(PgError::new(
            SqlState::UndefinedTable,
            format!("relation with OID {} does not exist", table.to_u32()),
        ));
    }
    let name = Rc::new(routing::table_name(&schema, &name)?);
    NAME.set(Some((table, transaction, Rc::clone(&name))));
    Ok(name)
}

/// The arguments of a call, from a position on: table, tenant, record and creation.
struct Call {
    table: pg_sys::Oid,
    keys: RowKeys,
}

impl Call {
    /// # Safety
    /// PostgreSQL's own call of a function with these arguments.
    unsafe fn read(fcinfo: pg_sys::FunctionCallInfo, from: usize) -> Result<Self, PgError> {
        // SAFETY: as promised.
        let (table, keys) = unsafe { Self::keys(fcinfo, from)? };
        Ok(Self {
            table: pg_sys::Oid::from(u32::try_from(table.value() & 0xffff_ffff).unwrap_or(0)),
            keys,
        })
    }

    /// The relation as it was given, and the keys.
    ///
    /// # Safety
    /// PostgreSQL's own call of a function with these arguments.
    unsafe fn keys(
        fcinfo: pg_sys::FunctionCallInfo,
        from: usize,
    ) -> Result<(pg_sys::Datum, RowKeys), PgError> {
        // SAFETY: as promised.
        let (given, collation) = unsafe {
            let count = usize::try_from((*fcinfo).nargs).unwrap_or(0);
            ((*fcinfo).args.as_slice(count), (*fcinfo).fncollation)
        };
        let value = |place: usize, what: &str| {
            let found = given.get(from + place).filter(|value| !value.isnull);
            found.map(|value| value.value).ok_or_else(|| {
                PgError::new(
                    SqlState::NotNullViolation,
                    format!("{what} of a routed table's row is null"),
                )
                .with_hint("A row without it has no place. See the table's expressions in braid.routed_tables.")
            })
        };
        // SAFETY: the call has its expression, so PostgreSQL knows the types.
        let type_of = |place: usize| unsafe {
            let place = i32::try_from(from + place).unwrap_or(0);
            pg_sys::get_fn_expr_argtype((*fcinfo).flinfo, place)
        };
        let table = value(0, "the relation")?;
        let tenant = with_key(value(1, "tenant")?, type_of(1), collation, TenantHash::of)?;
        let record = with_key(value(2, "record")?, type_of(2), collation, RecordHash::of)?;
        let created = value(3, "creation")?;
        Ok((
            table,
            RowKeys {
                tenant,
                record,
                created: Time(created.value().cast_signed() as i64),
            },
        ))
    }
}

/// braid.is_here(relation regclass, tenant "any", record "any", created timestamptz)
///
/// True, or an error. The name of the table is looked up once for each transaction.
#[pg_extern(sql = false)]
fn is_here(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    // SAFETY: PostgreSQL's own call, passed on as it came.
    let checked = unsafe { Call::read(fcinfo, 0) }
        .and_then(|call| routing::check_here(name_of(call.table)?.as_ref(), &call.keys));
    match checked {
        Ok(()) => true,
        Err(error) => error.raise(),
    }
}

/// The text of a table's name, and the name.
type Placed = (Box<[u8]>, Rc<TableName>);

thread_local! {
    /// The name that was last given to `braid.place`.
    static PLACED: RefCell<Option<Placed>> = const { RefCell::new(None) };
}

/// A table by its name in the group's log. `datum` is a text.
fn named(datum: pg_sys::Datum) -> Result<Rc<TableName>, PgError> {
    // SAFETY: the caller has an argument of type text, which is not null.
    let value = unsafe { Value::stored(pg_sys::TEXTOID, (-1, false), datum) };
    value.read(|content| {
        let Content::Bytes(bytes) = content else {
            return Err(not_named());
        };
        let known = PLACED.with_borrow(|known| match known {
            Some((text, name)) if **text == *bytes => Some(Rc::clone(name)),
            _ => None,
        });
        if let Some(name) = known {
            return Ok(name);
        }
        let name = Rc::new(TableName::new(bytes).map_err(|_| not_named())?);
        PLACED.set(Some((bytes.into(), Rc::clone(&name))));
        Ok(name)
    })
}

fn not_named() -> PgError {
    PgError::new(
        SqlState::InvalidParameterValue,
        "the first argument is not the name of a routed table",
    )
    .with_hint("The view braid.routed_tables lists the routed tables.")
}

/// braid.place(relation text, tenant "any", record "any", created timestamptz) returns integer
///
/// The key of an umbrella's partitions.
#[pg_extern(sql = false)]
fn place(fcinfo: pg_sys::FunctionCallInfo) -> i32 {
    // SAFETY: PostgreSQL's own call, passed on as it came.
    let found = unsafe { Call::keys(fcinfo, 0) }
        .and_then(|(name, keys)| routing::place_of(named(name)?.as_ref(), &keys));
    match found {
        Ok(set) => i32::try_from(set.0).unwrap_or(i32::MAX),
        Err(error) => error.raise(),
    }
}

/// braid.answering_set(relation text, tenant "any", record "any", created timestamptz) returns
/// integer
#[pg_extern(sql = false)]
fn answering_set(fcinfo: pg_sys::FunctionCallInfo) -> Option<i32> {
    // SAFETY: PostgreSQL's own call, passed on as it came.
    let found = unsafe { Call::keys(fcinfo, 0) }
        .and_then(|(name, keys)| umbrella::answering_set(named(name)?.as_ref(), &keys));
    match found {
        Ok(set) => set.and_then(|set| i32::try_from(set.0).ok()),
        Err(error) => error.raise(),
    }
}

/// braid.candidate_set(node_set integer, relation text, tenant "any") returns integer
///
/// The set, if it can have rows of the tenant.
#[pg_extern(sql = false)]
fn candidate_set(fcinfo: pg_sys::FunctionCallInfo) -> Option<i32> {
    // SAFETY: PostgreSQL's own call of a strict function with these arguments.
    let call = unsafe { FunctionCall::new(fcinfo) };
    candidate(call, |tenant| {
        let hash = with_key(tenant.value, tenant.of, tenant.collation, TenantHash::of)?;
        Ok(vec![hash])
    })
}

/// braid.candidate_set_of_any(node_set integer, relation text, tenants anyarray) returns integer
///
/// The set, if it can have rows of one of the tenants.
#[pg_extern(sql = false)]
fn candidate_set_of_any(fcinfo: pg_sys::FunctionCallInfo) -> Option<i32> {
    // SAFETY: PostgreSQL's own call of a strict function with these arguments.
    let call = unsafe { FunctionCall::new(fcinfo) };
    candidate(call, |tenants| {
        let of = syscache::element_type(tenants.of).unwrap_or(pg_sys::InvalidOid);
        // SAFETY: the argument is an array of this type.
        let elements = unsafe { array_elements(tenants.value, of) };
        let hash = |datum| with_key(datum, of, tenants.collation, TenantHash::of);
        elements.into_iter().map(hash).collect()
    })
}

fn candidate(
    call: FunctionCall<'_>,
    hashes: impl FnOnce(Argument) -> Result<Vec<TenantHash>, PgError>,
) -> Option<i32> {
    let (set, name, tenant) = (call.argument(0)?, call.argument(1)?, call.argument(2)?);
    let set = low(set.value).cast_signed();
    let number = u32::try_from(set).ok()?;
    let found = named(name.value).and_then(|name| {
        let tenants = hashes(tenant)?;
        Ok(umbrella::is_candidate(&name, SetId(number), &tenants))
    });
    match found {
        Ok(is_candidate) => is_candidate.then_some(set),
        Err(error) => error.raise(),
    }
}

/// braid.is_at(node text, relation regclass, tenant "any", record "any", created timestamptz)
#[pg_extern(sql = false)]
fn is_at(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    // SAFETY: PostgreSQL's own call of the function with these arguments.
    match unsafe { holds(fcinfo) } {
        Ok(holds) => holds,
        Err(error) => error.raise(),
    }
}

/// # Safety
/// PostgreSQL's own call of `braid.is_at`.
unsafe fn holds(fcinfo: pg_sys::FunctionCallInfo) -> Result<bool, PgError> {
    // SAFETY: as promised; the first argument is of type text.
    let (node, call) = unsafe {
        let first = (*fcinfo).args.as_slice(1);
        let node = first
            .first()
            .filter(|value| !value.isnull)
            .and_then(|value| <String as pgrx::FromDatum>::from_datum(value.value, false));
        (node.unwrap_or_default(), Call::read(fcinfo, 1)?)
    };
    let known = routing::known().ok_or_else(nothing_known)?;
    let name = name_of(call.table)?;
    let (Some(table), Some(member)) = (known.table(&name), known.agreed.member_named(&node)) else {
        // A table that is not routed any more, or a node outside of the group: all rows.
        return Ok(true);
    };
    Ok(routing::holds(
        table,
        member,
        routing::shard_of(table, &call.keys),
    ))
}

/// braid.shard_of(relation regclass, tenant "any", record "any", created timestamptz)
#[pg_extern(sql = false)]
fn shard_of(fcinfo: pg_sys::FunctionCallInfo) -> i32 {
    // SAFETY: PostgreSQL's own call of the function with these arguments.
    let shard = unsafe { Call::read(fcinfo, 0) }.and_then(|call| {
        let known = routing::known().ok_or_else(nothing_known)?;
        let name = name_of(call.table)?;
        let table = known
            .table(&name)
            .ok_or_else(|| routing::not_routed(&name))?;
        Ok(routing::shard_of(table, &call.keys))
    });
    match shard {
        Ok(shard) => i32::try_from(shard.0).unwrap_or(i32::MAX),
        Err(error) => error.raise(),
    }
}

fn nothing_known() -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        "this node knows nothing of its group's routing",
    )
    .with_hint("See in braid.group_nodes whether the node takes part in its group.")
}

/// braid.routing_key(value "any")
///
/// The canonical bytes of a tenant or record.
#[pg_extern(sql = false)]
fn routing_key(fcinfo: pg_sys::FunctionCallInfo) -> Vec<u8> {
    // SAFETY: PostgreSQL's own call of a strict function with one argument.
    let bytes = unsafe {
        let value = (*fcinfo).args.as_slice(1).first().map(|value| value.value);
        let type_oid = pg_sys::get_fn_expr_argtype((*fcinfo).flinfo, 0);
        let collation = (*fcinfo).fncollation;
        value.map(|value| with_key(value, type_oid, collation, |key| key.canonical()))
    };
    match bytes {
        Some(Ok(bytes)) => bytes,
        Some(Err(error)) => error.raise(),
        None => Vec::new(),
    }
}
