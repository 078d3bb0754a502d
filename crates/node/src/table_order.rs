//! Which tables of this node the leader has to order more strictly than by the provider's key hashes, and the number by which
//! the dependency tracker knows each. `braid_bgworker::table_order` decides; this finds out what the local table has.
//!
//! Looked up when a change of a relation comes for the first time, and again after the local table was altered. The leader hears of
//! an alteration with the first transaction that begins after it; what it scheduled before may collide here, which
//! appliers notice, and apply again ("Deadlocks" in the architecture).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

use braid_bgworker::table_order::{
    ColumnType, HashedKey, KeyColumn, LocalTable, TableOrder, Trigger,
};
use braid_gir::Schema;
use braid_postgres::error::{self, PgError};
use braid_postgres::kept_plan;
use braid_postgres::syscache::{self, ClassRow};
use braid_postgres::{plain, relation};
use pgrx::pg_sys;

use crate::catalog_key;

/// More relations than this altered at a time mean all.
const NOTES: usize = 64;

static REGISTERED: AtomicBool = AtomicBool::new(false);
static ALTERED: [AtomicU32; NOTES] = [const { AtomicU32::new(0) }; NOTES];
static ALTERED_COUNT: AtomicUsize = AtomicUsize::new(0);

/// PostgreSQL calls in the middle of anything: only take a note. 0 stands for all relations.
fn note(relation: u32) {
    let count = ALTERED_COUNT.load(Relaxed);
    if let Some(place) = ALTERED.get(count) {
        place.store(relation, Relaxed);
    }
    ALTERED_COUNT.store((count + 1).min(NOTES + 1), Relaxed);
}

fn on_relation(relation: pg_sys::Oid) {
    note(relation.to_u32());
}

/// A function may have become IMMUTABLE, or have ceased to be.
fn on_function(_hash: u32) {
    note(0);
}

/// A relation of the stream, and the table that it goes to.
#[derive(Debug)]
struct Known {
    number: u32,
    namespace: String,
    name: String,
    hashed: Vec<HashedKey>,
    /// `None` until it is needed.
    order: Option<TableOrder>,
    /// The local table and its partitions; empty while there is none.
    relations: Vec<u32>,
}

impl Known {
    /// Finds out how its changes are ordered, by its name or by the table that is known to take
    /// them. In a transaction.
    fn look(&mut self, oid: Option<pg_sys::Oid>) -> Result<(), PgError> {
        let (relations, table) = match oid {
            None => look_up(&self.namespace, &self.name)?,
            Some(oid) => look_into(oid)?,
        };
        let order = TableOrder::of(&table, &self.hashed);
        if order != TableOrder::Keys {
            pgrx::log!(
                "changes of table \"{}.{}\" are {order}",
                self.namespace,
                self.name
            );
        }
        self.relations = relations;
        self.order = Some(order);
        Ok(())
    }
}

/// What the leader knows of the stream's relations.
#[derive(Debug, Default)]
pub struct TableOrders {
    /// Relations of one name have one number: their changes go to one table here.
    numbers: HashMap<(String, String), u32>,
    /// By schema number.
    schemas: Vec<Known>,
}

impl TableOrders {
    /// Nothing is known yet.
    #[must_use]
    pub fn new() -> Self {
        if !REGISTERED.swap(true, Relaxed) {
            relation::on_invalidation(on_relation);
            syscache::on_change(pg_sys::SysCacheIdentifier::PROCOID, on_function);
        }
        Self::default()
    }

    /// Learn the next schema of the stream; its number is that of those that are known.
    pub fn learn(&mut self, schema: &Schema<'_>) {
        let next = u32::try_from(self.numbers.len()).unwrap_or(u32::MAX);
        let key = (schema.namespace.to_owned(), schema.name.to_owned());
        let number = *self.numbers.entry(key).or_insert(next);
        self.schemas.push(Known {
            number,
            namespace: schema.namespace.to_owned(),
            name: schema.name.to_owned(),
            hashed: hashed_keys(schema),
            order: None,
            relations: Vec::new(),
        });
    }

    /// Take note of local tables that were altered. To be called outside of a transaction.
    pub fn refresh(&mut self) {
        plain::AcceptInvalidationMessages();
        let count = ALTERED_COUNT.swap(0, Relaxed);
        if count == 0 {
            return;
        }
        let altered: Vec<u32> = ALTERED
            .iter()
            .take(count)
            .map(|relation| relation.load(Relaxed))
            .collect();
        let all = count > NOTES || altered.contains(&0);
        for known in &mut self.schemas {
            // A table that was not there may have come.
            let concerned = known.relations.is_empty()
                || known.relations.iter().any(|own| altered.contains(own));
            if all || concerned {
                known.order = None;
            }
        }
    }

    /// Whether a schema's table was looked at, and not altered since.
    #[must_use]
    pub fn is_known(&self, schema: u32) -> bool {
        usize::try_from(schema)
            .ok()
            .and_then(|schema| self.schemas.get(schema))
            .is_some_and(|known| known.order.is_some())
    }

    /// The tracker's number for a schema's table, and how its changes are ordered; `None` for a schema that was not sent.
    ///
    /// # Errors
    /// What reading the catalog raises.
    pub fn of(&mut self, schema: u32) -> Result<Option<(u32, &TableOrder)>, PgError> {
        let Some(known) = usize::try_from(schema)
            .ok()
            .and_then(|schema| self.schemas.get_mut(schema))
        else {
            return Ok(None);
        };
        if known.order.is_none() {
            error::transaction(|| known.look(None))?;
        }
        Ok(known.order.as_ref().map(|order| (known.number, order)))
    }

    /// Looks at a schema's table, unless it was looked at and not altered since. In a transaction.
    ///
    /// # Errors
    /// What reading the catalog raises.
    pub fn look(&mut self, schema: u32, table: pg_sys::Oid) -> Result<(), PgError> {
        match usize::try_from(schema)
            .ok()
            .and_then(|schema| self.schemas.get_mut(schema))
        {
            Some(known) if known.order.is_none() => known.look(Some(table)),
            _ => Ok(()),
        }
    }
}

/// The unique keys that the provider hashes.
pub fn hashed_keys(schema: &Schema<'_>) -> Vec<HashedKey> {
    let columns: Vec<_> = schema.columns().collect();
    schema
        .keys()
        .map(|key| HashedKey {
            nulls_equal: key.nulls_equal,
            columns: key
                .columns()
                .filter_map(|column| {
                    let shape = columns.get(usize::from(column.column))?;
                    Some(KeyColumn {
                        name: shape.name.to_owned(),
                        column_type: ColumnType {
                            name: (shape.type_namespace.to_owned(), shape.type_name.to_owned()),
                            modifier: shape.type_modifier,
                        },
                        comparison: column.comparison.to_owned(),
                    })
                })
                .collect(),
        })
        .collect()
}

/// The table and its partitions.
const RELATIONS: &str = "\
    select relid::oid::text from pg_catalog.pg_partition_tree($1::oid) where $1::oid <> relid::oid \
    union all select $1::oid::text";

/// Triggers of these relations that fire while changes are applied.
const TRIGGERS: &str = "\
    select distinct t.tgname::text, (p.provolatile = 'i')::text \
    from pg_catalog.pg_trigger t join pg_catalog.pg_proc p on p.oid = t.tgfoid \
    where t.tgrelid = any ($1::text::oid[]) and t.tgenabled in ('A', 'R') order by 1";

/// Whether a relation is partitioned, and whether it may have triggers.
/// In a transaction.
fn facts(oid: pg_sys::Oid) -> (bool, bool) {
    // A relation that is gone by now has no row.
    ClassRow::find(oid).map_or((false, false), |row| {
        (row.relkind.cast_unsigned() == b'p', row.relhastriggers)
    })
}

/// What the local table of this name has, and its OID and those of its partitions. To be called in a transaction.
///
/// # Errors
/// Whatever PostgreSQL raises while the catalog is read. A table that does not exist is none: it has no OID.
pub fn look_up(namespace: &str, name: &str) -> Result<(Vec<u32>, LocalTable), PgError> {
    let Some(oid) = braid_postgres::names::find_table(namespace, name)? else {
        return Ok((Vec::new(), LocalTable::default()));
    };
    look_into(oid)
}

fn look_into(oid: pg_sys::Oid) -> Result<(Vec<u32>, LocalTable), PgError> {
    let text = |cell: Option<&Option<String>>| cell.cloned().flatten();
    let (partitioned, has_triggers) = facts(oid);
    let relations: Vec<u32> = if partitioned {
        kept_plan::rows(RELATIONS, &[oid.into()])?
            .iter()
            .filter_map(|row| text(row.first())?.parse().ok())
            .collect()
    } else {
        vec![oid.to_u32()]
    };
    let mut table = LocalTable::default();
    for relation in &relations {
        catalog_key::read((*relation).into(), &mut table.keys);
    }
    if !partitioned && !has_triggers {
        return Ok((relations, table));
    }
    let list: Vec<String> = relations.iter().map(u32::to_string).collect();
    let list = format!("{{{}}}", list.join(","));
    for row in kept_plan::rows(TRIGGERS, &[list.as_str().into()])? {
        table.triggers.push(Trigger {
            name: text(row.first()).unwrap_or_default(),
            immutable: text(row.get(1)).as_deref() == Some("true"),
        });
    }
    Ok((relations, table))
}
