//! The rows of a routed table that a member of the group gets: those of its own shards.
//!
//! A table is routed from the guard on: a CHECK constraint that calls `braid.is_here` with its
//! tenant, record and creation. The catalogs as of the change say whether it exists. Earlier
//! changes went to all members, later ones go to the members that have the row's shard.
//!
//! The place of a row is final when it is written (`crates/routing`), so the rules that the group
//! has agreed by now give the same shard as the rules of that time.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use braid_decoder::{Passed, guard_function, is_plain_guard, transform};
use braid_gir::Operation;
use braid_node::registry;
use braid_node::routing::{self, Known, RowKeys};
use braid_node::routing_guard::GUARD;
use braid_node::routing_key::with_key;
use braid_node::tenant_load::LoadTable;
use braid_postgres::error::PgError;
use braid_postgres::relation::RelationRef;
use braid_postgres::{compat, latch, server, syscache};
use braid_routing::{NodeId, RecordHash, RoutedTable, TableName, Tenant, TenantHash, Time};
use pgrx::{PgSqlErrorCode, pg_sys};

use super::report;
use super::row_slot::{Expression, RowSlot};
use super::tally::Tally;
use super::tuple::Row;

/// Pause between two looks for the agreed routing.
const SOON: Duration = Duration::from_millis(20);
/// The longest wait for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A key of a row: its type and collation.
#[derive(Debug, Clone, Copy)]
struct KeyOf {
    type_oid: pg_sys::Oid,
    collation: pg_sys::Oid,
}

/// A routed table, compiled for one member.
#[derive(Debug)]
pub(super) struct Routed {
    /// The member's name.
    member: String,
    table: TableName,
    /// The table, for the counts of its writes.
    load: LoadTable,
    expressions: [Expression; 3],
    tenant: KeyOf,
    record: KeyOf,
    slot: RowSlot,
}

impl Routed {
    /// The routing of `relation` for the subscriber that calls itself `member`. `None` if the
    /// relation is not routed. In a transaction with a snapshot for catalogs; the current memory
    /// context is the compiled relation's own.
    pub(super) fn new(relation: RelationRef<'_>, member: &str) -> Option<Self> {
        let guard = relation.check_constraint(GUARD)?;
        let text = guard.to_str().ok()?;
        let function = guard_function(text)?;
        let name = syscache::function_signature(function.into())?;
        if !name.to_bytes().starts_with(b"braid.is_here(") || !is_plain_guard(text, function) {
            return None;
        }
        let (schema, name) = relation.qualified_name();
        let table = routing::table_name(&schema, &name).ok()?;
        let sources = relation.descriptor().iter().enumerate();
        let sources = sources
            .map(|(index, column)| (!column.is_dropped()).then(|| (index, column.is_by_value())));
        let slot = RowSlot::new(relation, sources.collect());
        let [named, tenant, record, created] = arguments(&guard)?;
        // A copy of the table, made by LIKE, has a guard that calls for the other one.
        if !is_relation(named, relation.oid()) {
            return None;
        }
        // SAFETY: nodes that were just read, in the compiled relation's context.
        unsafe {
            let expand = |node| compat::expand_generated_columns(node, relation.as_ptr());
            let key = |node: *mut pg_sys::Node| KeyOf {
                type_oid: pg_sys::exprType(node),
                collation: pg_sys::exprCollation(node),
            };
            if pg_sys::exprType(created) != pg_sys::TIMESTAMPTZOID {
                return None;
            }
            Some(Self {
                member: member.to_owned(),
                load: LoadTable::of(&table),
                table,
                tenant: key(tenant),
                record: key(record),
                expressions: [tenant, record, created]
                    .map(|node| slot.compile(expand(node).cast())),
                slot,
            })
        }
    }

    /// As which operation the member gets a change, if it does. Counts the write for its tenant.
    pub(super) fn passes(
        &self,
        operation: Operation,
        old: Option<Row<'_>>,
        new: Option<Row<'_>>,
        tally: &mut Tally,
    ) -> Option<Operation> {
        let Some(known) = wait_for_routing() else {
            return Some(operation);
        };
        let routed = known.table(&self.table);
        let member = known.agreed.member_named(&self.member);
        // No member, or a table that is not routed any more: all rows.
        let (Some(table), Some(member)) = (routed, member) else {
            return Some(operation);
        };
        let mut gets = |row, fallback, counts: bool| {
            let counts = counts && tally.wants(self.load);
            // A row without a place goes to all.
            let Some((keys, tenant)) = self.keys(row, fallback, counts) else {
                return true;
            };
            let shard = routing::shard_of(table, &keys);
            // A move writes the rows of its shard again.
            let is_moved = operation == Operation::Update && table.map().moving(shard).is_some();
            if let Some(tenant) = tenant.filter(|_| !is_moved) {
                tally.note(self.load, keys.tenant, tenant);
            }
            routing::holds(table, member, shard)
        };
        match (operation, old, new) {
            (Operation::Insert, _, Some(new)) => gets(new, None, true).then_some(operation),
            (Operation::Delete, Some(old), _) => gets(old, None, true).then_some(operation),
            (Operation::Update, old, Some(new)) => {
                match transform(old.map(|old| gets(old, None, false)), gets(new, old, true)) {
                    // The member may not have the row yet.
                    Passed::As(Operation::Update) if self.is_moving_to(table, member, new, old) => {
                        Some(Operation::Insert)
                    }
                    Passed::As(operation) => Some(operation),
                    Passed::Nothing => None,
                }
            }
            _ => Some(operation),
        }
    }

    /// Whether the row's shard is moved to the member.
    fn is_moving_to(
        &self,
        table: &RoutedTable,
        member: NodeId,
        row: Row<'_>,
        fallback: Option<Row<'_>>,
    ) -> bool {
        if !table.map().has_moves() {
            return false;
        }
        let keys = self.keys(row, fallback, false);
        keys.is_some_and(|(keys, _)| {
            let moving = table.map().moving(routing::shard_of(table, &keys));
            moving.is_some_and(|moving| table.map().set_of(member) == Some(moving.to))
        })
    }

    /// The keys that place a row; `None` if a value is null, which the guard and the keys rule out.
    /// With the tenant itself if `named`, and if a rule can have it.
    fn keys(
        &self,
        row: Row<'_>,
        fallback: Option<Row<'_>>,
        named: bool,
    ) -> Option<(RowKeys, Option<Tenant>)> {
        self.slot.put(row, fallback);
        self.slot.evaluate(self.expressions, |values| match values {
            [Some(tenant), Some(record), Some(created)] => Some(
                self.read(tenant, record, created, named)
                    .unwrap_or_else(|error| error.raise()),
            ),
            _ => None,
        })
    }

    fn read(
        &self,
        tenant: pg_sys::Datum,
        record: pg_sys::Datum,
        created: pg_sys::Datum,
        named: bool,
    ) -> Result<(RowKeys, Option<Tenant>), PgError> {
        let KeyOf {
            type_oid,
            collation,
        } = self.tenant;
        let (tenant, name) = with_key(tenant, type_oid, collation, |key| {
            let name = named.then(|| Tenant::new(key).ok()).flatten();
            (TenantHash::of(key), name)
        })?;
        let KeyOf {
            type_oid,
            collation,
        } = self.record;
        let record = with_key(record, type_oid, collation, RecordHash::of)?;
        let created = Time(created.value().cast_signed() as i64);
        let keys = RowKeys {
            tenant,
            record,
            created,
        };
        Ok((keys, name))
    }
}

/// The agreed routing; waits for it after a start of the server, when nobody may know yet
/// whether the database is a member. `None` in a database that is in no group.
///
/// A standby does not know it, and an answer without it would send rows to nodes that must not have
/// them: an error.
fn wait_for_routing() -> Option<Known> {
    let since = Instant::now();
    loop {
        if let Some(known) = routing::known() {
            return Some(known);
        }
        if registry::is_no_member() || !registry::is_preloaded() {
            return None;
        }
        if server::is_in_recovery() || since.elapsed() > PATIENCE {
            report::fail(
                PgSqlErrorCode::ERRCODE_CANNOT_CONNECT_NOW,
                "this node does not know which rows of a routed table a member gets".to_owned(),
                Some(
                    "Its group worker says so; see braid.group_nodes. A standby does not know it before its promotion.",
                ),
            );
        }
        latch::wait(Some(SOON));
    }
}

/// The arguments of the guard's call, read into the current memory context.
fn arguments(guard: &CStr) -> Option<[*mut pg_sys::Node; 4]> {
    // SAFETY: PostgreSQL wrote the text; it is a function's call, as its beginning says.
    unsafe {
        let call = pg_sys::stringToNode(guard.as_ptr()).cast::<pg_sys::FuncExpr>();
        let arguments = (*call).args;
        let count = (!arguments.is_null()).then(|| (*arguments).length)?;
        if count != 4 {
            return None;
        }
        let elements = (*arguments).elements;
        Some([0, 1, 2, 3].map(|place| (*elements.add(place)).ptr_value.cast()))
    }
}

/// Whether an expression is the constant that names a relation.
fn is_relation(node: *mut pg_sys::Node, relation: pg_sys::Oid) -> bool {
    // SAFETY: an expression that was just read; it is a constant if its tag says so.
    unsafe {
        if (*node).type_ != pg_sys::NodeTag::T_Const {
            return false;
        }
        let constant = &*node.cast::<pg_sys::Const>();
        constant.consttype == pg_sys::REGCLASSOID
            && !constant.constisnull
            && constant.constvalue.value() & 0xffff_ffff
                == usize::try_from(relation.to_u32()).unwrap_or(0)
    }
}
