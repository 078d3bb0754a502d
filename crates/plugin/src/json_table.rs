//! Compiles what a change of a relation needs in the format `wal2json`: how its tuples are stored,
//! how its columns are written, all bytes around the values, and which changes are wanted.

use std::ffi::{CStr, CString};

use braid_decoder::wal2json::{ColumnText, Layout, RelationText, Wal2JsonOptions};
use braid_decoder::{Actions, Publication, Publishing};
use braid_gir::ReplicaIdentity;
use braid_postgres::relation::RelationRef;
use braid_postgres::syscache::{self, TypeRow};
use braid_postgres::tuple_desc::Attribute as Column;
use pgrx::pg_sys;

use super::invalidation::Notes;
use super::json_value::Renderer;
use super::own_table;
use super::publications::Catalogs;
use super::relation::{self, AttributeMap, Identity};
use super::relation_cache::Compilation;
use super::report;
use super::row_filter::RowFilters;
use super::scratch::{PartMemory, StreamMemory};
use super::tuple::Attribute;
use super::type_facts::TypeFacts;

/// A column that is written.
#[derive(Debug)]
pub(super) struct JsonColumn {
    /// Index of the attribute in the changed relation.
    pub(super) attribute: usize,
    pub(super) renderer: Renderer,
}

/// A relation of which something is written.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) actions: Actions,
    pub(super) layout: Layout,
    /// Attributes up to the last one that is needed.
    pub(super) attributes: Vec<Attribute>,
    pub(super) columns: Vec<JsonColumn>,
    pub(super) filters: Option<RowFilters>,
    /// Holds functions and filters; deleted by [`Table::release`].
    context: PartMemory,
    /// The relation under whose name changes are written.
    named_after: u32,
    /// The types on which this depends, by hash value.
    type_hashes: Vec<u32>,
}

impl Table {
    /// Compile `relation`. `None` if nothing of it is wanted. Without publications, all relations
    /// are.
    pub(super) fn new(
        relation: RelationRef<'_>,
        publications: Option<&[Publication]>,
        options: &Wal2JsonOptions,
        parent: StreamMemory,
    ) -> Option<Self> {
        let Some(publications) = publications else {
            return Self::compile(relation, relation, None, options, parent);
        };
        if !relation.is_publishable() {
            return None;
        }
        let facts = relation::facts(relation);
        let decision = report::or_raise(braid_decoder::publishing(
            &facts,
            publications,
            &mut Catalogs::new(),
        ));
        if decision.actions == Actions::default() {
            return None;
        }
        if decision.publish_as == facts.oid {
            return Self::compile(relation, relation, Some(&decision), options, parent);
        }
        let ancestor = relation::open_ancestor(decision.publish_as);
        Self::compile(relation, ancestor.view(), Some(&decision), options, parent)
    }

    fn compile(
        relation: RelationRef<'_>,
        ancestor: RelationRef<'_>,
        decision: Option<&Publishing>,
        options: &Wal2JsonOptions,
        parent: StreamMemory,
    ) -> Option<Self> {
        let (schema, table) = ancestor.qualified_name();
        let wanted = if own_table::is_own(relation) || own_table::is_own(ancestor) {
            options.wants_own_table(&schema, &table)
        } else {
            options.wants_table(&schema, &table)
        };
        if !wanted {
            return None;
        }
        let context = PartMemory::below(parent, c"braid relation");
        let identity = Identity::of(relation);
        let map = AttributeMap { relation, ancestor };
        let numbers = match decision {
            Some(decision) => decision.columns.clone(),
            None => relation::live_numbers(relation),
        };
        let mut compiler = Compiler {
            options,
            context: context.get(),
            identity: &identity,
            map: &map,
            text: RelationText {
                schema: bytes(syscache::namespace_name(ancestor.namespace_oid())),
                table: ancestor.raw_name().to_bytes().to_vec(),
                columns: Vec::with_capacity(numbers.len()),
                full_identity: identity.kind == ReplicaIdentity::Full,
                default_identity: identity.kind == ReplicaIdentity::Default,
            },
            columns: Vec::with_capacity(numbers.len()),
            type_hashes: Vec::new(),
        };
        for number in numbers {
            compiler.add_column(number);
        }
        let Compiler {
            text,
            columns,
            type_hashes,
            ..
        } = compiler;

        let filters = context.get().run(|| {
            decision.and_then(|decision| RowFilters::new(decision, ancestor, || map.sources()))
        });
        let mut attributes = relation::attributes(relation);
        if filters.is_none() {
            let last = columns.iter().map(|column| column.attribute).max();
            attributes.truncate(last.map_or(0, |last| last + 1));
        }
        let wanted = options.actions;
        let published = decision.map_or(ALL, |decision| decision.actions);
        Some(Self {
            actions: Actions {
                insert: wanted.insert && published.insert,
                update: wanted.update && published.update,
                delete: wanted.delete && published.delete,
                // An ancestor under whose name changes are written is in a truncate's list itself
                // if it was truncated.
                truncate: wanted.truncate && published.truncate && relation.oid() == ancestor.oid(),
            },
            layout: Layout::new(text, options),
            attributes,
            columns,
            filters,
            context,
            named_after: ancestor.oid().to_u32(),
            type_hashes,
        })
    }
}

impl Compilation for Table {
    fn is_touched(&self, notes: &Notes) -> bool {
        let has_type = |hash| self.type_hashes.contains(hash);
        notes.relations.contains(&self.named_after) || notes.types.iter().any(has_type)
    }

    fn release(self) {
        self.context.release();
    }
}

/// The actions that a stream without publications publishes.
const ALL: Actions = Actions {
    insert: true,
    update: true,
    delete: true,
    truncate: true,
};

/// A table in the making.
struct Compiler<'c> {
    options: &'c Wal2JsonOptions,
    context: StreamMemory,
    identity: &'c Identity,
    map: &'c AttributeMap<'c>,
    text: RelationText,
    columns: Vec<JsonColumn>,
    type_hashes: Vec<u32>,
}

impl Compiler<'_> {
    fn add_column(&mut self, number: i16) {
        let Some((shown, own)) = self.map.find(number) else {
            return;
        };
        let facts = TypeFacts::look_up(shown.type_id(), shown.type_modifier());
        let written_as = if self.options.unwraps_domains() {
            base_of((shown.type_id(), shown.type_modifier())).0
        } else {
            shown.type_id()
        };
        let renderer = Renderer::new(
            written_as,
            &facts,
            shown.is_by_value(),
            self.options.numeric_as_string,
            self.context,
        );
        let default = if self.options.defaults {
            default_of(self.map.ancestor, shown)
        } else {
            None
        };
        self.text.columns.push(ColumnText {
            name: shown.raw_name().to_bytes().to_vec(),
            type_name: self.type_name(shown),
            type_oid: written_as.to_u32(),
            position: shown.number(),
            optional: !shown.is_not_null(),
            default,
            in_identity: self.identity.columns.contains(&own.number()),
            in_primary_key: self.identity.primary_key.contains(&own.number()),
        });
        self.columns.push(JsonColumn {
            attribute: relation::index(own.number()),
            renderer,
        });
        self.type_hashes.extend(facts.hashes);
    }

    /// The type as wal2json shows it.
    fn type_name(&self, attribute: Column<'_>) -> Vec<u8> {
        let declared = (attribute.type_id(), attribute.type_modifier());
        let (oid, modifier) = if self.options.domain_data_type {
            base_of(declared)
        } else {
            declared
        };
        if self.options.formats_types() {
            return syscache::format_type(oid, modifier).into_bytes();
        }
        TypeRow::find(oid).map_or_else(Vec::new, |row| row.raw_name().to_bytes().to_vec())
    }
}

/// The type directly below a domain, with its modifier; another type is itself.
fn base_of(declared: (pg_sys::Oid, i32)) -> (pg_sys::Oid, i32) {
    match TypeRow::find(declared.0) {
        Some(row) if row.typtype.cast_unsigned() == pg_sys::TYPTYPE_DOMAIN => {
            (row.typbasetype, row.typtypmod)
        }
        _ => declared,
    }
}

/// A name's bytes; none for none.
fn bytes(name: Option<CString>) -> Vec<u8> {
    name.unwrap_or_default().into_bytes()
}

/// The default of a column as an expression; the expression of a generated column is none.
fn default_of(relation: RelationRef<'_>, attribute: Column<'_>) -> Option<Vec<u8>> {
    if !attribute.has_default() || attribute.is_generated() {
        return None;
    }
    let stored = relation.descriptor().stored_default(attribute)?;
    // SAFETY: the function takes a node tree, which has the form of a text, and an OID, and returns
    // text. The copies are freed soon.
    unsafe {
        let shown = pg_sys::OidFunctionCall2Coll(
            pg_sys::Oid::from(F_PG_GET_EXPR),
            pg_sys::InvalidOid,
            pg_sys::Datum::from(pg_sys::cstring_to_text(stored.as_ptr())),
            relation.oid().into(),
        );
        let text = CStr::from_ptr(pg_sys::text_to_cstring(shown.cast_mut_ptr()));
        Some(text.to_bytes().to_vec())
    }
}

/// `pg_get_expr(pg_node_tree, oid)` (src/include/catalog/pg_proc.dat).
const F_PG_GET_EXPR: u32 = 1716;
