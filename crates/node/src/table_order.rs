//! Finds the tables of this node that the leader has to order more strictly than by the provider's
//! key hashes, and the number by which the dependency tracker knows each.
//! `braid_bgworker::table_order` decides; this module reads the local table.
//!
//! Looked up at the first change of a relation, and again after the local table was altered. The
//! leader learns of an alteration with the first transaction that begins after it. Transactions
//! that it scheduled before may collide on this node; appliers notice this, and apply them again
//! ("Deadlocks" in the architecture).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::table_order::{
    ColumnType, HashedKey, KeyColumn, LocalTable, TableOrder, Trigger,
};
use braid_gir::{ReplicaIdentity, Schema};
use braid_postgres::error::{self, PgError};
use braid_postgres::kept_plan;
use braid_postgres::syscache::{self, ClassRow};
use braid_postgres::{plain, relation};
use pgrx::pg_sys;

use crate::{catalog_key, registry};

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
    /// Columns of the provider's replica identity; empty if it has none, or is the whole row.
    identity: Vec<String>,
    /// The local key that finds rows, if it has only some of these columns.
    narrow_key: Option<String>,
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
        let identity: Vec<&str> = self.identity.iter().map(String::as_str).collect();
        let narrow_key = table.narrow_key(&identity);
        self.narrow_key = narrow_key.map(|key| key.name.clone());
        self.relations = relations;
        self.order = Some(order);
        Ok(())
    }

    /// Says that the keys of the two nodes differ.
    fn warn(&self, narrow_key: &str) {
        let Self {
            namespace,
            name,
            identity,
            ..
        } = self;
        PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "rows of table \"{namespace}.{name}\" are found by index \"{narrow_key}\", which has only some columns of the \
                 provider's replica identity"
            ),
        )
        .with_detail(format!(
            "The provider's key is ({}). Rows that differ in it, but not in the index, are one row here. If both nodes write such \
             rows, the nodes may end with different rows, and the provider may stop at changes of this node.",
            identity.join(", ")
        ))
        .with_hint("Give the table the same primary key on all nodes.")
        .warn();
    }
}

/// The leader's knowledge of the stream's relations.
#[derive(Debug, Default)]
pub struct TableOrders {
    /// Relations of one name have one number: their changes go to one local table.
    numbers: HashMap<(String, String), u32>,
    /// By schema number.
    schemas: Vec<Known>,
    /// Numbers of the relations for which a warning about different keys was logged.
    warned: HashSet<u32>,
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
            identity: identity_columns(schema),
            narrow_key: None,
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

    /// The tracker's number for a schema's table, and how its changes are ordered; `None` for a
    /// schema that was not sent.
    ///
    /// # Errors
    /// Those of reading the catalog.
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
        // Several nodes write. That may come to be later.
        if let Some(narrow_key) = &known.narrow_key
            && registry::remembers_deletions()
            && self.warned.insert(known.number)
        {
            known.warn(narrow_key);
        }
        Ok(known.order.as_ref().map(|order| (known.number, order)))
    }

    /// Looks at a schema's table, unless it was looked at and not altered since. In a transaction.
    ///
    /// # Errors
    /// Those of reading the catalog.
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

/// Names of the columns of a replica identity that is a key.
fn identity_columns(schema: &Schema<'_>) -> Vec<String> {
    if schema.replica_identity == ReplicaIdentity::Full {
        return Vec::new();
    }
    let columns = schema.columns().filter(|column| column.flags.is_identity());
    columns.map(|column| column.name.to_owned()).collect()
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

/// The table and its partitions. They are not locked: if one changes, an invalidation has the table
/// looked up again.
const RELATIONS: &str = "select oid::text from braid.partition_tree($1::oid) t (oid)";

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

/// Reads the properties of the local table of this name, its OID and those of its partitions. To be
/// called in a transaction.
///
/// # Errors
/// Those of PostgreSQL, raised while the catalog is read. A table that does not exist is no error:
/// it has no OID.
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
