//! Tables that a statement touches: their names, shapes and publications, by SQL with the rights of
//! the extension's owner.

use std::ffi::{CStr, CString};

use braid_bgworker::ddl::{Shape, difference};
use braid_bgworker::sql_text::quote_identifier;
use braid_bgworker::subscription_option::{LIST_SEPARATOR, array_literal};
use braid_gir::{Statement, StatementTable, TableState};
use braid_postgres::catalog::{self, Rights, query, utf8_string, with_rights, with_settings};
use braid_postgres::lock::LockMode;
use braid_postgres::names::find_table;
use braid_postgres::plain;
use braid_postgres::rows::Rows;
use braid_postgres::schema_statement::RelationName;
use braid_postgres::syscache::relation_kind;
use pgrx::pg_sys;

use super::roles;

/// Lines of a shape are separated by this: no line has it.
pub(super) const LINES: char = LIST_SEPARATOR;

/// A table as it is at a moment.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) oid: pg_sys::Oid,
    pub(super) state: TableState,
    pub(super) lines: Vec<String>,
    pub(super) publications: Vec<String>,
    pub(super) is_unlogged: bool,
}

impl Known {
    /// The table's name in SQL.
    pub(super) fn quoted(&self) -> String {
        format!(
            "{}.{}",
            quote_identifier(&self.state.namespace),
            quote_identifier(&self.state.name)
        )
    }
}

/// SQL for the names of the publications that have a table `c` of `pg_class`. PostgreSQL 19 lists
/// excepted tables among the tables of a publication.
const PUBLICATIONS_OF_TABLE: &str = "\
    select p.pubname from pg_publication p where \
      case when p.puballtables then not exists (select from pg_publication_rel r \
             where r.prpubid = p.oid and r.prrelid in (select relid from pg_partition_ancestors(c.oid) union select c.oid)) \
           else exists (select from pg_publication_rel r \
             where r.prpubid = p.oid and r.prrelid in (select relid from pg_partition_ancestors(c.oid) union select c.oid)) \
             or exists (select from pg_publication_namespace m join pg_class a on a.relnamespace = m.pnnspid \
             where m.pnpubid = p.oid and a.oid in (select relid from pg_partition_ancestors(c.oid) union select c.oid)) end";

/// Runs a query with the rights of the extension's owner, whose names are those of `pg_catalog`.
pub(crate) fn owners_query(sql: &str, parameters: &[Option<&str>]) -> Rows {
    work_as(Rights::ExtensionOwner, sql, parameters)
}

/// Runs SQL with these rights, and the search path of the extension's own statements.
pub(super) fn work_as(rights: Rights, sql: &str, parameters: &[Option<&str>]) -> Rows {
    let settings = [("search_path", "pg_catalog, pg_temp")];
    with_rights(rights, || {
        with_settings(&settings, || Ok::<_, ()>(query(sql, parameters))).unwrap_or_default()
    })
}

/// Runs a statement as [`work_as`] does, under more settings.
pub(crate) fn owners_work(settings: &[(&str, &str)], rights: Rights, sql: &str) {
    let done = with_settings(settings, || {
        work_as(rights, sql, &[]);
        Ok::<_, ()>(())
    });
    debug_assert!(done.is_ok(), "nothing else is returned");
}

/// OIDs as an array in SQL.
pub(super) fn list(oids: &[pg_sys::Oid]) -> String {
    let oids: Vec<String> = oids.iter().map(|oid| oid.to_u32().to_string()).collect();
    array_literal(&oids)
}

pub(super) fn parts(text: Option<&str>) -> Vec<String> {
    text.filter(|text| !text.is_empty())
        .map(|text| text.split(LINES).map(str::to_owned).collect())
        .unwrap_or_default()
}

/// Keeps other statements from changing a table's shape, until the end of the transaction. Writers
/// of
/// rows do not wait.
pub fn lock(table: pg_sys::Oid) {
    // A table that is gone can be locked, too.
    plain::LockRelationOid(table, LockMode::ShareUpdateExclusive.as_raw());
}

/// Facts about those of the relations that are tables. `locked`: until the end of the transaction,
/// no other session changes the shape of a table that the user owns.
pub(super) fn of_tables(oids: &[pg_sys::Oid], locked: bool) -> Vec<Known> {
    if oids.is_empty() {
        return Vec::new();
    }
    let oids = list(oids);
    if locked {
        let role = catalog::current_role().to_u32().to_string();
        let own = owners_query(
            "select c.oid from pg_class c where c.oid = any ($1::oid[]) and c.relkind in ('r', 'p') \
             and pg_has_role($2::oid, c.relowner, 'USAGE') order by c.oid",
            &[Some(&oids), Some(&role)],
        );
        for row in own.iter() {
            let oid = row
                .first()
                .and_then(|oid| oid.as_deref()?.parse::<u32>().ok());
            if let Some(oid) = oid {
                lock(pg_sys::Oid::from(oid));
            }
        }
    }
    let found = owners_query(
        &format!(
            "select c.oid, n.nspname, c.relname, array_to_string(s.lines, E'\\x01'), md5(array_to_string(s.lines, E'\\n')), \
               array_to_string(array({PUBLICATIONS_OF_TABLE}), E'\\x01'), c.relpersistence = 'u' \
             from pg_class c join pg_namespace n on n.oid = c.relnamespace, lateral braid.table_shape(c.oid) s (lines) \
             where c.oid = any ($1::oid[]) and c.relkind in ('r', 'p') order by c.oid"
        ),
        &[Some(&oids)],
    );
    (0..found.len())
        .filter_map(|row| {
            Some(Known {
                oid: pg_sys::Oid::from(found.get(row, 0)?.parse::<u32>().ok()?),
                state: TableState {
                    namespace: found.get(row, 1)?.to_owned(),
                    name: found.get(row, 2)?.to_owned(),
                    digest: found.get(row, 4)?.to_owned(),
                },
                lines: parts(found.get(row, 3)),
                publications: parts(found.get(row, 5)),
                is_unlogged: found.get(row, 6) == Some("t"),
            })
        })
        .collect()
}

/// Adds the publications of this node that have the tables of a statement now, by the names before
/// the statement or after it: publications may have other names on this node than on the
/// statement's. In a transaction.
pub fn add_publications(statement: &mut Statement) {
    let mut all = Vec::new();
    for table in &mut statement.tables {
        for state in [&table.before, &table.after].into_iter().flatten() {
            let found = owners_query(
                &format!(
                    "select p.pubname from pg_class c join pg_namespace n on n.oid = c.relnamespace, \
                       lateral ({PUBLICATIONS_OF_TABLE}) p where n.nspname = $1::name and c.relname = $2::name and c.relkind in ('r', 'p')"
                ),
                &[Some(&state.namespace), Some(&state.name)],
            );
            table.publications.extend(names(&found));
            if roles::is_role(state) {
                table.publications.extend(publications_of_all_tables());
            }
        }
        table.publications.sort();
        table.publications.dedup();
        all.extend(table.publications.iter().cloned());
    }
    if statement.tables.is_empty() {
        all = publications_of_all_tables();
    }
    statement.publications.extend(all);
    statement.publications.sort();
    statement.publications.dedup();
}

/// An index by its table and its name: REINDEX CONCURRENTLY gives it another OID.
#[derive(Debug, Clone)]
pub(super) struct IndexName {
    table: String,
    name: String,
}

/// Returns the invalid indexes among the relations, with those of tables if these count as well: a
/// failed CREATE INDEX CONCURRENTLY of this node has left them. In a transaction.
pub(super) fn invalid_indexes(relations: &[pg_sys::Oid], of_tables: bool) -> Vec<IndexName> {
    let is_index = |oid: &pg_sys::Oid| relation_kind(*oid) == pg_sys::RELKIND_INDEX;
    if !of_tables && !relations.iter().any(is_index) {
        return Vec::new();
    }
    let found = owners_query(
        "select t.oid, c.relname from pg_index i join pg_class c on c.oid = i.indexrelid \
           join pg_class t on t.oid = i.indrelid join pg_namespace n on n.oid = t.relnamespace \
         where (c.oid = any ($1::oid[]) or $2::boolean and t.oid = any ($1::oid[])) and c.relkind = 'i' and not i.indisvalid \
           and not exists (select from braid.ddl_intent o join braid.ddl_entry e using (ddl_id) \
             where o.creates and e.state in ('waiting', 'running', 'failed') \
               and format('%s.%s index %I', n.nspname, t.relname, c.relname) = any (o.objects))",
        &[Some(&list(relations)), Some(&of_tables.to_string())],
    );
    (0..found.len())
        .filter_map(|row| {
            Some(IndexName {
                table: found.get(row, 0)?.to_owned(),
                name: found.get(row, 1)?.to_owned(),
            })
        })
        .collect()
}

/// The tables of those indexes that are valid now, each as a statement would change it that
/// creates the index. In a transaction.
pub(super) fn indexes_made_valid(indexes: &[IndexName]) -> Vec<StatementTable> {
    let made = |index: &IndexName| {
        let found = owners_query(
            "select format(E'index %I\\t%s', c.relname, pg_get_indexdef(c.oid)) from pg_index i join pg_class c on c.oid = i.indexrelid \
             where i.indrelid = $1::oid and c.relname = $2::name and i.indisvalid",
            &[Some(&index.table), Some(&index.name)],
        );
        let table = pg_sys::Oid::from(index.table.parse::<u32>().ok()?);
        let known = of_tables(&[table], false);
        let mut change = changes(&known, &known).pop()?;
        change.added = vec![found.get(0, 0)?.to_owned()];
        Some(change)
    };
    indexes.iter().filter_map(made).collect()
}

/// SQL for the schema of a dependent object of `pg_depend d`.
const SCHEMA_OF_DEPENDENT: &str = "\
    case d.classid \
      when 'pg_class'::regclass then (select relnamespace from pg_class where oid = d.objid) \
      when 'pg_type'::regclass then (select typnamespace from pg_type where oid = d.objid) \
      when 'pg_proc'::regclass then (select pronamespace from pg_proc where oid = d.objid) \
      when 'pg_constraint'::regclass then (select connamespace from pg_constraint where oid = d.objid) \
      when 'pg_rewrite'::regclass then (select relnamespace from pg_rewrite r join pg_class c on c.oid = r.ev_class where r.oid = d.objid) \
      when 'pg_attrdef'::regclass then (select relnamespace from pg_attrdef r join pg_class c on c.oid = r.adrelid where r.oid = d.objid) \
      when 'pg_trigger'::regclass then (select relnamespace from pg_trigger r join pg_class c on c.oid = r.tgrelid where r.oid = d.objid) \
      when 'pg_policy'::regclass then (select relnamespace from pg_policy r join pg_class c on c.oid = r.polrelid where r.oid = d.objid) \
      when 'pg_statistic_ext'::regclass then (select relnamespace from pg_statistic_ext r join pg_class c on c.oid = r.stxrelid where r.oid = d.objid) \
    end";

/// Lasting objects that depend on temporary ones of this session, in the given schema; none if that
/// is 0. PostgreSQL drops both together. In a transaction.
pub(super) fn on_temporary(schema: u32) -> Vec<String> {
    if schema == 0 {
        return Vec::new();
    }
    let found = owners_query(
        &format!(
            "select distinct d.classid::text || ' ' || d.objid || ' ' || t.oid \
             from (select 'pg_class'::regclass, oid from pg_class where relnamespace = $1::oid \
               union all select 'pg_type'::regclass, oid from pg_type where typnamespace = $1::oid \
               union all select 'pg_proc'::regclass, oid from pg_proc where pronamespace = $1::oid) t (class, oid) \
             join pg_depend d on d.refclassid = t.class and d.refobjid = t.oid \
             where d.deptype in ('n', 'a') and ({SCHEMA_OF_DEPENDENT}) is distinct from $1::oid order by 1"
        ),
        &[Some(&schema.to_string())],
    );
    names(&found).collect()
}

/// The publications of all tables.
pub(super) fn publications_of_all_tables() -> Vec<String> {
    let found = owners_query(
        "select pubname from pg_publication where puballtables order by 1",
        &[],
    );
    names(&found).collect()
}

/// The first column of rows.
fn names(found: &Rows) -> impl Iterator<Item = String> {
    (0..found.len()).filter_map(|row| found.get(row, 0).map(str::to_owned))
}

/// The changes of tables between two moments.
pub(super) fn changes(before: &[Known], after: &[Known]) -> Vec<StatementTable> {
    let of = |all: &[Known], oid| all.iter().find(|known| known.oid == oid).cloned();
    let mut oids: Vec<pg_sys::Oid> = before.iter().map(|known| known.oid).collect();
    oids.extend(
        after
            .iter()
            .map(|known| known.oid)
            .filter(|oid| of(before, *oid).is_none()),
    );
    oids.into_iter()
        .map(|oid| {
            let (before, after) = (of(before, oid), of(after, oid));
            let lines = |known: &Option<Known>| {
                known
                    .as_ref()
                    .map_or_else(Vec::new, |known| known.lines.clone())
            };
            let (removed, added) = difference(&lines(&before), &lines(&after));
            let mut publications: Vec<String> = [&before, &after]
                .into_iter()
                .flatten()
                .flat_map(|known| known.publications.clone())
                .collect();
            publications.sort();
            publications.dedup();
            StatementTable {
                // A table that is dropped is dropped whatever it has.
                removed: if after.is_some() { removed } else { Vec::new() },
                added,
                before: before.map(|known| known.state),
                after: after.map(|known| known.state),
                publications,
            }
        })
        .collect()
}

/// The shape of a table of this database, by its name; `None` if no table has it.
#[must_use]
pub fn shape_of(state: &TableState) -> Option<Shape> {
    let found = owners_query(
        "select array_to_string(s.lines, E'\\x01'), md5(array_to_string(s.lines, E'\\n')) \
         from pg_class c join pg_namespace n on n.oid = c.relnamespace, lateral braid.table_shape(c.oid) s (lines) \
         where n.nspname = $1::name and c.relname = $2::name and c.relkind in ('r', 'p')",
        &[Some(&state.namespace), Some(&state.name)],
    );
    Some(Shape {
        digest: found.get(0, 1)?.to_owned(),
        lines: parts(found.get(0, 0)),
    })
}

/// The tables of this database that a statement from another node touches and that exist before it.
/// Not roles.
#[must_use]
pub fn oids_of(tables: &[StatementTable]) -> Vec<pg_sys::Oid> {
    tables
        .iter()
        .filter_map(|table| table.before.as_ref())
        .filter(|state| !roles::is_role(state))
        .filter_map(|state| find_table(&state.namespace, &state.name).ok().flatten())
        .collect()
}

/// The columns of a table of this name that is being created, as CREATE TABLE takes them; `None`
/// for another relation. The relation cache has the table, the catalogs need not.
pub(super) fn columns_of(relation: pg_sys::Oid, name: &CStr) -> Option<Vec<String>> {
    // SAFETY: the relation is created by this transaction, and is closed below; its descriptor is
    // valid until then. Texts are in the current context.
    unsafe {
        let opened = pg_sys::RelationIdGetRelation(relation);
        let table = opened.as_ref()?;
        let form = &*table.rd_rel;
        let is_it = CStr::from_ptr(form.relname.data.as_ptr()) == name
            && form.relkind.cast_unsigned() == pg_sys::RELKIND_RELATION
            && form.relpersistence.cast_unsigned() != b't';
        let columns = is_it.then(|| {
            let attributes = usize::try_from((*table.rd_att).natts).unwrap_or(0);
            (0..attributes)
                .map(|place| {
                    let attribute = &*braid_postgres::compat::TupleDescAttr(table.rd_att, place);
                    column(attribute)
                })
                .collect()
        });
        pg_sys::RelationClose(opened);
        columns
    }
}

/// # Safety
/// A valid attribute. In a transaction.
unsafe fn column(attribute: &pg_sys::FormData_pg_attribute) -> String {
    // SAFETY: as the caller says.
    unsafe {
        let name = utf8_string(CStr::from_ptr(attribute.attname.data.as_ptr()));
        let flags = pg_sys::FORMAT_TYPE_TYPEMOD_GIVEN | pg_sys::FORMAT_TYPE_FORCE_QUALIFY;
        // The type of the flags differs between majors.
        let flags = flags.try_into().unwrap_or_default();
        let kind = pg_sys::format_type_extended(attribute.atttypid, attribute.atttypmod, flags);
        let mut text = format!(
            "{} {}",
            quote_identifier(&name),
            utf8_string(CStr::from_ptr(kind))
        );
        let collation = attribute.attcollation;
        if collation != pg_sys::InvalidOid
            && collation != pg_sys::get_typcollation(attribute.atttypid)
        {
            let found = owners_query(
                "select n.nspname, c.collname from pg_collation c join pg_namespace n on n.oid = c.collnamespace where c.oid = $1::oid",
                &[Some(&collation.to_u32().to_string())],
            );
            if let (Some(schema), Some(name)) = (found.get(0, 0), found.get(0, 1)) {
                text.push_str(&format!(
                    " COLLATE {}.{}",
                    quote_identifier(schema),
                    quote_identifier(name)
                ));
            }
        }
        text
    }
}

/// A relation's name in SQL, as the statement has it.
pub(super) fn quoted(name: &RelationName) -> String {
    let quote = |text: &CString| quote_identifier(&utf8_string(text));
    match &name.schema {
        Some(schema) => format!("{}.{}", quote(schema), quote(&name.name)),
        None => quote(&name.name),
    }
}
