//! Compiles what a change of a relation needs in the format `wal2json`: how its tuples are stored, how its columns are
//! written, all bytes around the values, and which changes are wanted.

use std::ffi::CStr;

use braid_decoder::wal2json::{ColumnText, Layout, RelationText, Wal2JsonOptions};
use braid_decoder::{Actions, Publication, Publishing};
use braid_gir::ReplicaIdentity;
use pgrx::pg_sys;

use super::invalidation::Notes;
use super::json_value::Renderer;
use super::own_table;
use super::publications::Catalogs;
use super::relation::{self, AttributeMap, Identity};
use super::report;
use super::row_filter::RowFilters;
use super::scratch;
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
    context: pg_sys::MemoryContext,
    /// The relation under whose name changes are written.
    named_after: u32,
    /// The types on which this depends, by hash value.
    type_hashes: Vec<u32>,
}

impl Table {
    /// Compile `relation`. `None` if nothing of it is wanted. Without publications, all relations are.
    ///
    /// # Safety
    /// In a transaction with a historic snapshot; `relation` is valid; `parent` outlives the result, and the current memory
    /// context is freed soon.
    pub(super) unsafe fn new(
        relation: pg_sys::Relation,
        publications: Option<&[Publication]>,
        options: &Wal2JsonOptions,
        parent: pg_sys::MemoryContext,
    ) -> Option<Self> {
        // SAFETY: as the caller says. The ancestor is closed after its last use.
        unsafe {
            let Some(publications) = publications else {
                return Self::compile(relation, relation, None, options, parent);
            };
            if !pg_sys::is_publishable_relation(relation) {
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
            let table = Self::compile(relation, ancestor, Some(&decision), options, parent);
            pg_sys::RelationClose(ancestor);
            table
        }
    }

    unsafe fn compile(
        relation: pg_sys::Relation,
        ancestor: pg_sys::Relation,
        decision: Option<&Publishing>,
        options: &Wal2JsonOptions,
        parent: pg_sys::MemoryContext,
    ) -> Option<Self> {
        // SAFETY: both relations are valid; the context is a new one.
        unsafe {
            let form = &*(*ancestor).rd_rel;
            let (schema, table) = braid_postgres::encoding::of_relation(ancestor);
            let wanted = if own_table::is_own(relation) || own_table::is_own(ancestor) {
                options.wants_own_table(&schema, &table)
            } else {
                options.wants_table(&schema, &table)
            };
            if !wanted {
                return None;
            }
            let context = pg_sys::AllocSetContextCreateInternal(
                parent,
                c"braid relation".as_ptr(),
                pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
                pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
                pg_sys::ALLOCSET_SMALL_MAXSIZE as usize,
            );
            let identity = Identity::of(relation);
            let map = AttributeMap { relation, ancestor };
            let numbers = match decision {
                Some(decision) => decision.columns.clone(),
                None => relation::live_numbers(relation),
            };
            let mut compiler = Compiler {
                options,
                context,
                identity: &identity,
                map: &map,
                text: RelationText {
                    schema: bytes(pg_sys::get_namespace_name(form.relnamespace)),
                    table: bytes(form.relname.data.as_ptr()),
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

            let filters = scratch::within(context, || {
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
                    // An ancestor under whose name changes are written is in a truncate's list itself if it was truncated.
                    truncate: wanted.truncate && published.truncate && relation == ancestor,
                },
                layout: Layout::new(text, options),
                attributes,
                columns,
                filters,
                context,
                named_after: (*ancestor).rd_id.to_u32(),
                type_hashes,
            })
        }
    }

    /// Whether what was noted concerns this.
    pub(super) fn is_touched(&self, notes: &Notes) -> bool {
        notes.relations.contains(&self.named_after)
            || notes
                .types
                .iter()
                .any(|hash| self.type_hashes.contains(hash))
    }

    /// Free what PostgreSQL allocated. Not done by dropping: when the plugin's own context goes, this one has gone before.
    pub(super) fn release(self) {
        // SAFETY: the context is this value's own, and nothing refers to it any more.
        unsafe { pg_sys::MemoryContextDelete(self.context) };
    }
}

/// What a stream without publications publishes.
const ALL: Actions = Actions {
    insert: true,
    update: true,
    delete: true,
    truncate: true,
};

/// A table in the making.
struct Compiler<'c> {
    options: &'c Wal2JsonOptions,
    context: pg_sys::MemoryContext,
    identity: &'c Identity,
    map: &'c AttributeMap,
    text: RelationText,
    columns: Vec<JsonColumn>,
    type_hashes: Vec<u32>,
}

impl Compiler<'_> {
    unsafe fn add_column(&mut self, number: i16) {
        // SAFETY: the relations of the map are valid; the context lives as long as the table; what is allocated besides is in
        // memory that is freed soon.
        unsafe {
            let Some((shown, own)) = self.map.find(number) else {
                return;
            };
            let facts = TypeFacts::look_up(shown.atttypid, shown.atttypmod);
            let written_as = if self.options.unwraps_domains() {
                base_of((shown.atttypid, shown.atttypmod)).0
            } else {
                shown.atttypid
            };
            let renderer = Renderer::new(
                written_as,
                &facts,
                shown.attbyval,
                self.options.numeric_as_string,
                self.context,
            );
            let default = if self.options.defaults {
                default_of(self.map.ancestor, shown)
            } else {
                None
            };
            self.text.columns.push(ColumnText {
                name: bytes(shown.attname.data.as_ptr()),
                type_name: self.type_name(shown),
                type_oid: written_as.to_u32(),
                position: shown.attnum,
                optional: !shown.attnotnull,
                default,
                in_identity: self.identity.columns.contains(&own.attnum),
                in_primary_key: self.identity.primary_key.contains(&own.attnum),
            });
            self.columns.push(JsonColumn {
                attribute: relation::index(own.attnum),
                renderer,
            });
            self.type_hashes.extend(facts.hashes);
        }
    }

    /// The type as wal2json shows it.
    unsafe fn type_name(&self, attribute: &pg_sys::FormData_pg_attribute) -> Vec<u8> {
        let declared = (attribute.atttypid, attribute.atttypmod);
        // SAFETY: in a transaction; the tuple is released after its last use.
        unsafe {
            let (oid, modifier) = if self.options.domain_data_type {
                base_of(declared)
            } else {
                declared
            };
            if self.options.formats_types() {
                return bytes(pg_sys::format_type_with_typemod(oid, modifier));
            }
            let cache = pg_sys::SysCacheIdentifier::TYPEOID.cast_signed();
            let tuple = pg_sys::SearchSysCache1(cache, oid.into());
            if tuple.is_null() {
                return Vec::new();
            }
            let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_type>();
            let name = bytes(form.typname.data.as_ptr());
            pg_sys::ReleaseSysCache(tuple);
            name
        }
    }
}

/// What a domain is directly over, with its modifier; another type is itself.
unsafe fn base_of(declared: (pg_sys::Oid, i32)) -> (pg_sys::Oid, i32) {
    // SAFETY: in a transaction; the tuple is released after its last use.
    unsafe {
        let cache = pg_sys::SysCacheIdentifier::TYPEOID.cast_signed();
        let tuple = pg_sys::SearchSysCache1(cache, declared.0.into());
        if tuple.is_null() {
            return declared;
        }
        let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_type>();
        let base = if form.typtype.cast_unsigned() == pg_sys::TYPTYPE_DOMAIN {
            (form.typbasetype, form.typtypmod)
        } else {
            declared
        };
        pg_sys::ReleaseSysCache(tuple);
        base
    }
}

/// A C string's bytes; none for null.
unsafe fn bytes(text: *const std::ffi::c_char) -> Vec<u8> {
    if text.is_null() {
        return Vec::new();
    }
    // SAFETY: not null, so a C string as the caller says.
    unsafe { CStr::from_ptr(text) }.to_bytes().to_vec()
}

/// The default of a column as an expression; what it is generated from is none.
unsafe fn default_of(
    relation: pg_sys::Relation,
    attribute: &pg_sys::FormData_pg_attribute,
) -> Option<Vec<u8>> {
    if !attribute.atthasdef || attribute.attgenerated != 0 {
        return None;
    }
    // SAFETY: the relation is valid; its defaults belong to its descriptor; what is allocated is freed soon.
    unsafe {
        let constraints = (*(*relation).rd_att).constr.as_ref()?;
        let defaults =
            std::slice::from_raw_parts(constraints.defval, usize::from(constraints.num_defval));
        let default = defaults
            .iter()
            .find(|default| default.adnum == attribute.attnum)?;
        let text = pg_sys::cstring_to_text(default.adbin);
        let shown = pg_sys::OidFunctionCall2Coll(
            pg_sys::Oid::from(F_PG_GET_EXPR),
            pg_sys::InvalidOid,
            pg_sys::Datum::from(text),
            (*relation).rd_id.into(),
        );
        Some(bytes(pg_sys::text_to_cstring(shown.cast_mut_ptr())))
    }
}

/// `pg_get_expr(pg_node_tree, oid)` (src/include/catalog/pg_proc.dat).
const F_PG_GET_EXPR: u32 = 1716;
