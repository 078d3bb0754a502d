//! Aggregation: applies the changes of a batch's transactions, regrouped by table
//! (`braid_bgworker::aggregate`). Run by the appliers in apply mode `aggregate`.
//!
//! New rows are inserted in bulk, in the order of their keys. Changed and deleted rows are looked
//! up in that order too.

use std::collections::hash_map::Entry;

use braid_bgworker::aggregate::{Aggregate, Freedom, Step};
use braid_bgworker::consolidate::Action;
use braid_bgworker::table_order::TableOrder;
use braid_gir::Begin;
use braid_node::table_order;
use braid_postgres::error::PgError;

use super::consolidate::{ExactKey, Item, Joined, part};
use super::number_map::NumberMap;
use super::relation::RemoteRelation;
use super::route::Effect;
use super::{Session, generation};

/// A table of the current batch.
#[derive(Debug)]
struct Place {
    /// Number of the table.
    relation: u32,
    freedom: Freedom,
    /// Columns of its key.
    columns: Vec<usize>,
}

impl Session {
    /// Applies the records of a batch whose transactions began with `begins`. The batch is open.
    ///
    /// # Errors
    /// As [`Session::change`].
    pub fn apply_aggregated(
        &mut self,
        begins: &[Begin<'_>],
        items: &[Item<'_>],
    ) -> Result<(), PgError> {
        let mut places: NumberMap<u32, Place> = NumberMap::default();
        let mut hashes = Vec::new();
        let mut gathered = Aggregate::default();
        for (item, number) in items.iter().zip(0..) {
            let Item::Change(transaction, change, _) = item else {
                self.carry_out(std::mem::take(&mut gathered), begins, items)?;
                self.apply_item(begins, item)?;
                continue;
            };
            let Some(begin) = begins.get(*transaction) else {
                continue;
            };
            let schema = change.header.schema.0;
            let place = match places.entry(schema) {
                Entry::Occupied(place) => place.into_mut(),
                Entry::Vacant(free) => {
                    self.show_part(begins, *transaction);
                    free.insert(self.place(schema)?)
                }
            };
            let part = match place.freedom {
                Freedom::Everything => {
                    self.carry_out(std::mem::take(&mut gathered), begins, items)?;
                    self.apply_item(begins, item)?;
                    continue;
                }
                Freedom::Table => None,
                Freedom::Rows => part(begin, change, place.relation, &place.columns, &mut hashes)?,
            };
            match part {
                Some(part) => gathered.take(number, part),
                None => gathered.keep(number, place.relation),
            }
        }
        self.carry_out(gathered, begins, items)
    }

    fn carry_out(
        &mut self,
        gathered: Aggregate<ExactKey<'_>, ()>,
        begins: &[Begin<'_>],
        items: &[Item<'_>],
    ) -> Result<(), PgError> {
        for (_, steps) in gathered.finish(ExactKey::order) {
            for step in steps {
                match step {
                    Step::One(number) => {
                        if let Some(item) = items.get(number as usize) {
                            self.apply_item(begins, item)?;
                        }
                    }
                    Step::Nets(nets) => self.apply_nets(&nets, begins, items)?,
                }
            }
        }
        self.flush()
    }

    fn apply_nets(
        &mut self,
        nets: &[Joined<'_>],
        begins: &[Begin<'_>],
        items: &[Item<'_>],
    ) -> Result<(), PgError> {
        for net in nets {
            if !matches!(net.action, Action::Insert(_)) {
                self.flush()?;
            }
            // Rows that are held back meanwhile have other keys.
            if net.parts.len() > 1 && self.apply_net(net, begins, items)? {
                continue;
            }
            for number in &net.parts {
                if let Some(item) = items.get(*number as usize) {
                    self.apply_item(begins, item)?;
                }
            }
        }
        // The next change may have the key of a row that is held back.
        self.flush()
    }

    /// Returns the properties of the table that a relation of the stream goes to.
    fn place(&mut self, schema: u32) -> Result<Place, PgError> {
        let Some((key, remote, _)) = self.prepare(schema, Effect::Remove)? else {
            // Changes that are not applied have no order. They may be applied from a later
            // transaction on.
            return Ok(Place {
                relation: u32::MAX - schema,
                freedom: Freedom::Table,
                columns: Vec::new(),
            });
        };
        let target = self.tables.target(key)?;
        let (plain, one_key) = target.table.as_ref().map_or((false, false), |table| {
            (table.is_plain(), table.has_one_key())
        });
        let columns: Option<Vec<usize>> = target
            .plan
            .key
            .as_ref()
            .map(|key| key.columns.iter().map(|column| column.remote).collect());
        // A function is called for each change by itself, and the writer of each register is stored
        // for each change.
        let one_key = one_key
            && columns.is_some()
            && !target.plan.rules.asks()
            && !target.plan.column_rules.has_registers();
        let freedom = Freedom::of(&self.table_order(schema, &remote)?, plain, one_key);
        Ok(Place {
            relation: key.1,
            freedom,
            columns: columns.unwrap_or_default(),
        })
    }

    /// Returns the order of the table's changes, as the leader determines it.
    pub(super) fn table_order(
        &mut self,
        schema: u32,
        remote: &RemoteRelation,
    ) -> Result<TableOrder, PgError> {
        let generation = generation::now();
        if let Some((known, order)) = self.orders.get(&schema)
            && *known == generation
        {
            return Ok(order.clone());
        }
        self.work_as_self();
        let (_, table) = table_order::look_up(&remote.namespace, &remote.name)?;
        let order = TableOrder::of(&table, &remote.hashed);
        self.orders.insert(schema, (generation, order.clone()));
        Ok(order)
    }
}
