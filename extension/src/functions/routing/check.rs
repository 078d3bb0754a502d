//! Whether a table can be routed, and the facts about it that all nodes must share.
//!
//! Example: `orders` has the primary key `(tenant_id, order_id)`, and its rows are placed by
//! `tenant_id`, `order_id` and `created_at`. The insert `(42, 4711, January)` goes to node A. A
//! rule spreads tenant 42 from February on. The insert `(42, 4711, March)` goes to node B, which
//! knows of no such key: now two rows have one primary key. So each unique key must have all
//! columns that the three expressions use.
//!
//! For the same reason two rows that are equal for an index must be equal for the hash. A collation
//! that takes `a` for `A` breaks that, and so does `tenant::text` over a `numeric`, of which `1.0`
//! and `1.00` are equal.
//!
//! Reads only. The expressions, and the functions in them that the planner folds, are read with the
//! rights of the table's owner, confined ([`TableExpression`]).

use braid_bgworker::sql_text::quote_identifier;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::array_literal;
use braid_node::{routing_guard, routing_key};
use braid_postgres::catalog::{current_role, is_superuser, query};
use braid_postgres::encoding::Text;
use braid_postgres::error::{self, PgError};
use braid_postgres::lock::LockMode;
use braid_postgres::relation::{Relation, RelationRef};
use braid_postgres::rows::Rows;
use braid_postgres::syscache;
use braid_postgres::table_expression::TableExpression;
use braid_routing::KeyType;
use pgrx::iter::SetOfIterator;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use crate::functions::failure::{Failure, Outcome};
use crate::functions::{required, run, text};

/// The expressions that place a row, as SQL over the table's columns. Names that are not of
/// `pg_catalog` have their schemas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedKeys {
    /// The tenant.
    pub tenant: String,
    /// The record within the tenant.
    pub record: String,
    /// When the row was created: a `timestamptz`.
    pub created: String,
}

/// braid.check_routable(relation regclass, tenant text, record text, created text) returns setof
/// text
#[pg_extern(sql = false)]
fn check_routable_facts(
    relation: Option<pg_sys::Oid>,
    tenant: Option<Text>,
    record: Option<Text>,
    created: Option<Text>,
) -> SetOfIterator<'static, Text> {
    let caller = current_role();
    let facts = run(|| {
        let relation = required(relation, "relation")?;
        let keys = RoutedKeys {
            tenant: required(text(tenant), "tenant")?,
            record: required(text(record), "record")?,
            created: required(text(created), "created")?,
        };
        check_owner(relation, caller)?;
        Ok(check_routable(relation, &keys)?)
    });
    SetOfIterator::new(facts.into_iter().map(Text))
}

fn check_owner(relation: pg_sys::Oid, caller: pg_sys::Oid) -> Outcome<()> {
    let numbers = [relation, caller].map(|oid| oid.to_u32().to_string());
    let [relation, role] = numbers.each_ref().map(|text| Some(text.as_str()));
    let found = query(
        "select pg_has_role($2::oid, c.relowner, 'USAGE'), c.relname from pg_class c where c.oid = $1::oid",
        &[relation, role],
    );
    if is_superuser(caller) || found.get(0, 0) != Some("f") {
        return Ok(());
    }
    let name = found.get(0, 1).unwrap_or_default();
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("must be owner of table {name}"),
    )
    .hint("Ask the owner of the table, or a superuser."))
}

/// Checks that a table can be routed by these expressions. Returns the facts that must be equal on
/// all nodes, one a line, in an order that does not depend on the node: the table, the expressions
/// as PostgreSQL writes them, the columns that they use, and the unique keys. Locks the table as
/// for a reader. In a transaction with a snapshot, with the rights of the extension's owner, under
/// the search path of the extension's functions.
///
/// # Errors
/// One reason why it can't, with a hint. 42809 and 0A000 for kinds of tables and keys that can't be
/// routed, 42P17 and PostgreSQL's own for expressions, 42804 for a type of `created`, 55000 for
/// missing properties of the table.
pub fn check_routable(relation: pg_sys::Oid, keys: &RoutedKeys) -> Result<Vec<String>, PgError> {
    let Some(open) = Relation::try_open(relation, LockMode::AccessShare) else {
        return Err(
            PgError::new(SqlState::UndefinedTable, "table does not exist")
                .with_hint("Name a table of this database."),
        );
    };
    let table = Table::of(open.view());
    table.check_kind()?;
    let expressions = Role::ALL
        .iter()
        .map(|role| table.expression(*role, keys))
        .collect::<Result<Vec<_>, _>>()?;
    let used = Used::of(&table, &expressions)?;
    let unique = table.unique_keys()?;
    for key in &unique {
        key.check(&table, &used)?;
    }
    table.check_identity(&unique)?;
    table.check_foreign_keys()?;
    table.check_publications()?;
    Ok(facts(&table, &expressions, &used, &unique))
}

fn facts(
    table: &Table<'_>,
    expressions: &[(Role, TableExpression)],
    used: &Used,
    unique: &[UniqueKey],
) -> Vec<String> {
    let mut facts = vec![format!("table {}", table.quoted)];
    let words = |(role, expression): &(Role, TableExpression)| {
        format!("{} {}", role.name(), expression.text)
    };
    facts.extend(expressions.iter().map(words));
    facts.extend(used.columns.iter().map(UsedColumn::fact));
    let mut keys: Vec<String> = unique.iter().map(UniqueKey::fact).collect();
    keys.sort();
    keys.dedup();
    facts.extend(keys);
    facts
}

/// The purpose of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Tenant,
    Record,
    Created,
}

impl Role {
    const ALL: [Self; 3] = [Self::Tenant, Self::Record, Self::Created];

    const fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Record => "record",
            Self::Created => "created",
        }
    }

    fn of(self, keys: &RoutedKeys) -> &str {
        match self {
            Self::Tenant => &keys.tenant,
            Self::Record => &keys.record,
            Self::Created => &keys.created,
        }
    }
}

fn unsupported(message: String) -> PgError {
    PgError::new(SqlState::FeatureNotSupported, message)
}

fn lacking(message: String) -> PgError {
    PgError::new(SqlState::ObjectNotInPrerequisiteState, message)
}

/// An open table.
struct Table<'a> {
    view: RelationRef<'a>,
    /// The table's OID as text.
    oid: String,
    /// For messages.
    shown: String,
    /// As SQL writes it.
    quoted: String,
}

impl<'a> Table<'a> {
    fn of(view: RelationRef<'a>) -> Self {
        let (schema, name) = view.qualified_name();
        Self {
            view,
            oid: view.oid().to_u32().to_string(),
            shown: format!("\"{schema}.{name}\""),
            quoted: format!("{}.{}", quote_identifier(&schema), quote_identifier(&name)),
        }
    }

    /// Runs a query whose first parameter is the table's OID.
    fn query(&self, sql: &str, more: &[Option<&str>]) -> Rows {
        let mut parameters = vec![Some(self.oid.as_str())];
        parameters.extend(more);
        query(sql, &parameters)
    }

    /// Checks that it is an ordinary table of users.
    fn check_kind(&self) -> Result<(), PgError> {
        let shown = &self.shown;
        let wrong = |what: &str| {
            PgError::new(
                SqlState::WrongObjectType,
                format!("cannot route {shown}, which is {what}"),
            )
            .with_hint("Only ordinary tables of users can be routed.")
        };
        let schema = self.view.namespace().unwrap_or_default();
        let is_of_system = self.view.oid().to_u32() < pg_sys::FirstNormalObjectId
            || schema == "information_schema"
            || schema.starts_with("pg_");
        match self.view.kind() {
            _ if self.view.persistence() == b't' => {
                let name = self.view.name();
                return Err(
                    unsupported(format!("cannot route temporary table \"{name}\""))
                        .with_hint("Only permanent tables are replicated."),
                );
            }
            _ if is_of_system => return Err(wrong("a table of PostgreSQL's own")),
            _ if schema == "braid" => return Err(wrong("a table of Braid's own")),
            b'r' => {}
            b'p' => {
                return Err(unsupported(format!("cannot route partitioned table {shown}"))
                    .with_hint("Route an ordinary table. Its rows are spread over nodes, so it need not be partitioned."));
            }
            b'f' => return Err(wrong("a foreign table")),
            _ => return Err(wrong("not a table")),
        }
        if self.view.persistence() != b'p' {
            return Err(unsupported(format!("cannot route unlogged table {shown}"))
                .with_hint("Run ALTER TABLE .. SET LOGGED first."));
        }
        if self.view.is_partition() {
            return Err(unsupported(format!("cannot route partition {shown}"))
                .with_hint("Detach the partition first."));
        }
        let related = self.query(
            "select exists (select from pg_inherits where inhrelid = $1::oid), exists (select from pg_inherits where inhparent = $1::oid)",
            &[],
        );
        let relation = match (related.get(0, 0), related.get(0, 1)) {
            (Some("t"), _) => "which inherits from another table",
            (_, Some("t")) => "from which other tables inherit",
            _ => return Ok(()),
        };
        Err(
            unsupported(format!("cannot route table {shown}, {relation}"))
                .with_hint("Run ALTER TABLE .. NO INHERIT first."),
        )
    }

    /// Reads an expression, and checks all of it but its columns.
    fn expression(
        &self,
        role: Role,
        keys: &RoutedKeys,
    ) -> Result<(Role, TableExpression), PgError> {
        let subject = format!("{} expression for table {}", role.name(), self.shown);
        let read = error::catch(|| TableExpression::read(self.view, role.of(keys))).flatten();
        let expression = read.map_err(|error| {
            PgError::new(error.sqlstate, format!("invalid {subject}"))
                .with_detail(sentence(&error.message))
                .with_hint("Write one expression over the columns of the table, such as tenant_id. Functions and types outside of pg_catalog need their schema.")
        })?;
        let invalid = |problem: &str| {
            PgError::new(
                SqlState::InvalidObjectDefinition,
                format!("{subject} {problem}"),
            )
        };
        if !expression.is_immutable {
            return Err(invalid("is not immutable").with_hint(
                "Use functions and operators that are IMMUTABLE: no setting, and no other row, may change where a row belongs.",
            ));
        }
        if expression.columns.is_empty() {
            return Err(invalid("uses no column").with_hint("Name a column of the table."));
        }
        if expression.columns.iter().any(|number| *number <= 0) {
            return Err(invalid("uses the whole row or a system column")
                .with_hint("Name columns of the table, one by one."));
        }
        self.check_type(role, &expression, &subject)?;
        Ok((role, expression))
    }

    fn check_type(
        &self,
        role: Role,
        expression: &TableExpression,
        subject: &str,
    ) -> Result<(), PgError> {
        if role != Role::Created {
            let of = routing_key::check_type(expression.of, expression.collation)
                .map_err(|error| error.with_detail(format!("It is that of the {subject}.")))?;
            let is_text = matches!(of, KeyType::Text | KeyType::PaddedText);
            if is_text && expression.collation == pg_sys::InvalidOid {
                return Err(PgError::new(
                    SqlState::IndeterminateCollation,
                    format!("could not determine which collation the {subject} has"),
                )
                .with_hint("Add a COLLATE clause with a deterministic collation."));
            }
            return Ok(());
        }
        let base = syscache::base_type(expression.of);
        if base == pg_sys::TIMESTAMPTZOID {
            return Ok(());
        }
        let hint = if base == pg_sys::TIMESTAMPOID {
            format!(
                "Use {} at time zone 'UTC', or the time zone that the values are in.",
                expression.text
            )
        } else {
            "Use a column, or an expression, of type timestamp with time zone.".to_owned()
        };
        Err(PgError::new(
            SqlState::DatatypeMismatch,
            format!("{subject} is not of type timestamp with time zone"),
        )
        .with_hint(hint))
    }

    fn unique_keys(&self) -> Result<Vec<UniqueKey>, PgError> {
        let rows = self.query(
            "select c.relname, i.indisexclusion, i.indexprs is not null, i.indpred is not null, \
                    i.indisvalid and i.indimmediate, i.indisprimary, i.indisreplident, a.attname, \
                    coalesce(l.collisdeterministic, true), o.opcdefault, \
                    o.opcintype <> 'bpchar'::regtype and exists (select from pg_amproc p where p.amprocfamily = o.opcfamily \
                      and p.amproclefttype = o.opcintype and p.amprocrighttype = o.opcintype and p.amprocnum = 4) \
               from pg_index i join pg_class c on c.oid = i.indexrelid \
              cross join unnest((i.indkey::int2[])[0:i.indnkeyatts - 1], (i.indclass::oid[])[0:i.indnkeyatts - 1], \
                                (i.indcollation::oid[])[0:i.indnkeyatts - 1]) with ordinality as k (number, opclass, collated, place) \
               left join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number \
               left join pg_collation l on l.oid = k.collated join pg_opclass o on o.oid = k.opclass \
              where i.indrelid = $1::oid and (i.indisunique or i.indisexclusion) order by c.relname, k.place",
            &[],
        );
        let mut keys: Vec<UniqueKey> = Vec::new();
        for row in rows.iter() {
            let cell = |place: usize| row.get(place).and_then(Option::as_deref);
            let is = |place: usize| cell(place) == Some("t");
            let name = cell(0).unwrap_or_default();
            if is(1) {
                return Err(unsupported(format!(
                    "cannot route table {}, which has the exclusion constraint \"{name}\"",
                    self.shown
                ))
                .with_hint(
                    "Drop the constraint: rows that exclude each other can be at different nodes.",
                ));
            }
            if is(2) || is(3) {
                let what = if is(2) { "expressions" } else { "a predicate" };
                return Err(unsupported(format!(
                    "cannot route table {}, whose unique index \"{name}\" has {what}",
                    self.shown
                ))
                .with_hint("Drop the index, or make it one of all rows over plain columns."));
            }
            if keys.last().is_none_or(|key| key.name != name) {
                keys.push(UniqueKey {
                    name: name.to_owned(),
                    finds_rows: is(4),
                    is_primary: is(5),
                    is_identity: is(6),
                    columns: Vec::new(),
                });
            }
            if let Some(key) = keys.last_mut() {
                key.columns.push(KeyColumn {
                    name: cell(7).unwrap_or_default().to_owned(),
                    is_deterministic: is(8),
                    is_default: is(9),
                    is_exact: is(10),
                });
            }
        }
        Ok(keys)
    }

    /// Checks that rows can be found by a key, and that changes say where they belong.
    fn check_identity(&self, unique: &[UniqueKey]) -> Result<(), PgError> {
        let shown = &self.shown;
        let nullable = self.query(
            &format!("select attname from pg_attribute where attrelid = $1::oid and attnum > 0 and not attisdropped and not ({NOT_NULL})"),
            &[],
        );
        let is_nullable = |column: &KeyColumn| {
            nullable
                .iter()
                .any(|row| row.first().and_then(Option::as_ref) == Some(&column.name))
        };
        let finds = |key: &&UniqueKey| key.finds_rows && !key.columns.iter().any(is_nullable);
        if !unique.iter().any(|key| finds(&key)) {
            return Err(lacking(format!("table {shown} has no key to be routed by"))
                .with_hint("Add a primary key that has all columns of the three expressions."));
        }
        let has = match self.view.replica_identity() {
            b'f' => return Ok(()),
            b'd' => unique.iter().any(|key| key.is_primary && finds(&key)),
            b'i' => unique.iter().any(|key| key.is_identity && finds(&key)),
            _ => false,
        };
        if has {
            return Ok(());
        }
        Err(lacking(format!("table {shown} has no replica identity"))
            .with_detail("An update or a deletion would not say where its row belongs.")
            .with_hint(
                "Add a primary key, or run ALTER TABLE .. REPLICA IDENTITY USING INDEX or FULL.",
            ))
    }

    fn check_foreign_keys(&self) -> Result<(), PgError> {
        let rows = self.query(
            "select k.conname, k.confrelid = $1::oid, k.conrelid::regclass::text, k.confrelid::regclass::text, k.confrelid::oid \
               from pg_constraint k where k.contype = 'f' and k.conparentid = 0 and (k.conrelid = $1::oid or k.confrelid = $1::oid) \
              order by k.conname, 3",
            &[],
        );
        for row in rows.iter() {
            let cell = |place: usize| {
                row.get(place)
                    .and_then(Option::as_deref)
                    .unwrap_or_default()
            };
            let referenced = pg_sys::Oid::from(cell(4).parse::<u32>().unwrap_or(0));
            if cell(1) != "t" && !routing_guard::is_routed(referenced) {
                continue;
            }
            return Err(unsupported(format!(
                "foreign key \"{}\" of table {} refers to table {}, which {} routed",
                cell(0),
                cell(2),
                cell(3),
                if cell(1) == "t" { "would be" } else { "is" }
            ))
            .with_detail("The row that a foreign key refers to can be at another node.")
            .with_hint("Drop the foreign key."));
        }
        Ok(())
    }

    fn check_publications(&self) -> Result<(), PgError> {
        let shown = &self.shown;
        let parts = self.query(
            "select p.pubname, r.prqual is not null from pg_publication_rel r join pg_publication p on p.oid = r.prpubid \
              where r.prrelid = $1::oid and (r.prqual is not null or r.prattrs is not null) order by 1",
            &[],
        );
        if let (Some(name), is_filter) = (parts.get(0, 0), parts.get(0, 1) == Some("t")) {
            let what = if is_filter {
                "a row filter"
            } else {
                "a column list"
            };
            return Err(unsupported(format!(
                "publication \"{name}\" publishes table {shown} with {what}"
            ))
            .with_hint(
                "Publish all rows and columns of the table: routing decides which node gets a row.",
            ));
        }
        let found = self.query(
            "with wanted as (select unnest(coalesce((select publications from braid.group_self), '{braid}')) as name) \
             select coalesce(bool_or(p.pubinsert), false) and coalesce(bool_or(p.pubupdate), false) and coalesce(bool_or(p.pubdelete), false), \
                    (select string_agg(quote_ident(name), ', ' order by name) from wanted) \
               from wanted w join pg_publication p on p.pubname = w.name \
               join pg_publication_tables t on t.pubname = p.pubname \
               join pg_class c on c.oid = $1::oid and c.relname = t.tablename \
               join pg_namespace n on n.oid = c.relnamespace and n.nspname = t.schemaname",
            &[],
        );
        if found.get(0, 0) == Some("t") {
            return Ok(());
        }
        let names = found.get(0, 1).unwrap_or_default();
        Err(lacking(format!(
            "table {shown} is not published with its inserts, updates and deletions"
        ))
        .with_detail(format!(
            "Nodes of a group subscribe to these publications: {names}."
        ))
        .with_hint("Add the table with ALTER PUBLICATION .. ADD TABLE."))
    }
}

/// Whether a column of `pg_attribute` has a NOT NULL constraint that holds for all rows. From
/// PostgreSQL 18 on there can be one that was never validated.
const NOT_NULL: &str = "attnotnull and not exists (select from pg_constraint z where z.conrelid = attrelid and z.contype = 'n' \
     and z.conkey = array[attnum] and not z.convalidated)";

/// A message of PostgreSQL's as a sentence.
fn sentence(message: &str) -> String {
    let mut characters = message.chars();
    let first = characters.next().map(|first| first.to_ascii_uppercase());
    let mut sentence: String = first.into_iter().chain(characters).collect();
    sentence.push('.');
    sentence
}

/// The columns that the expressions use, by name.
struct Used {
    columns: Vec<UsedColumn>,
}

struct UsedColumn {
    name: String,
    type_name: String,
    collation: Option<String>,
    /// The column is a part of an expression somewhere, not only an expression by itself.
    is_inside: bool,
}

impl UsedColumn {
    fn fact(&self) -> String {
        let collation = match &self.collation {
            Some(collation) => format!(" collate {collation}"),
            None => String::new(),
        };
        format!(
            "column {} {}{collation} not null",
            quote_identifier(&self.name),
            self.type_name
        )
    }
}

impl Used {
    /// Looks the columns up, and checks them.
    fn of(table: &Table<'_>, expressions: &[(Role, TableExpression)]) -> Result<Self, PgError> {
        let numbers = |inside: bool| {
            let used = expressions.iter().map(|(_, expression)| expression);
            let used = used.filter(|expression| !(inside && expression.is_column));
            let numbers = used.flat_map(|expression| &expression.columns);
            array_literal(&numbers.map(i16::to_string).collect::<Vec<_>>())
        };
        let rows = table.query(
            &format!(
                "select attname, format_type(atttypid, atttypmod), {NOT_NULL}, \
                        case when c.oid is not null then format('%I.%I', n.nspname, c.collname) end, \
                        coalesce(c.collisdeterministic, true), attnum = any ($3::int2[]) \
                   from pg_attribute left join pg_collation c on c.oid = attcollation \
                   left join pg_namespace n on n.oid = c.collnamespace \
                  where attrelid = $1::oid and attnum = any ($2::int2[]) order by attname"
            ),
            &[Some(&numbers(false)), Some(&numbers(true))],
        );
        let mut columns = Vec::new();
        for row in rows.iter() {
            let cell = |place: usize| row.get(place).and_then(Option::as_deref);
            let name = cell(0).unwrap_or_default().to_owned();
            if cell(2) != Some("t") {
                return Err(lacking(format!(
                    "column \"{name}\" of table {} could be null",
                    table.shown
                ))
                .with_detail("A row belongs to a node by its tenant, its record and the time when it was created.")
                .with_hint(format!("Run ALTER TABLE .. ALTER COLUMN {} SET NOT NULL.", quote_identifier(&name))));
            }
            if cell(4) != Some("t") {
                return Err(unsupported(format!(
                    "collation of column \"{name}\" of table {} is not deterministic",
                    table.shown
                ))
                .with_detail(
                    "Values that a unique key takes for equal could belong to different nodes.",
                )
                .with_hint("Give the column a deterministic collation."));
            }
            columns.push(UsedColumn {
                name,
                type_name: cell(1).unwrap_or_default().to_owned(),
                collation: cell(3).map(str::to_owned),
                is_inside: cell(5) == Some("t"),
            });
        }
        Ok(Self { columns })
    }
}

/// A unique index over columns, of all rows.
struct UniqueKey {
    name: String,
    /// The key is valid, and not deferrable.
    finds_rows: bool,
    is_primary: bool,
    is_identity: bool,
    columns: Vec<KeyColumn>,
}

struct KeyColumn {
    name: String,
    is_deterministic: bool,
    /// The column's operator class is the default one of the type.
    is_default: bool,
    /// Values that are equal for the index have the same bytes, so expressions over them are equal.
    is_exact: bool,
}

impl UniqueKey {
    fn fact(&self) -> String {
        let mut names: Vec<String> = self
            .columns
            .iter()
            .map(|column| quote_identifier(&column.name))
            .collect();
        names.sort();
        format!("key ({})", names.join(", "))
    }

    /// Checks that two rows with one key belong to the same node.
    fn check(&self, table: &Table<'_>, used: &Used) -> Result<(), PgError> {
        let (name, shown) = (&self.name, &table.shown);
        let of = |wanted: &UsedColumn| {
            self.columns
                .iter()
                .find(|column| column.name == wanted.name)
        };
        let missing: Vec<String> = used
            .columns
            .iter()
            .filter(|column| of(column).is_none())
            .map(|column| quote_identifier(&column.name))
            .collect();
        if !missing.is_empty() {
            return Err(unsupported(format!(
                "unique index \"{name}\" of table {shown} lacks columns that the routing expressions use"
            ))
            .with_detail("Two rows with one key could be at different nodes.")
            .with_hint(format!(
                "Add {} to its key, or drop it.",
                missing.join(", ")
            )));
        }
        for column in &used.columns {
            let Some(key) = of(column) else {
                continue;
            };
            let is_alike = key.is_exact || (key.is_default && !column.is_inside);
            if key.is_deterministic && is_alike {
                continue;
            }
            let place = if column.is_inside {
                ", which is used inside of an expression"
            } else {
                ""
            };
            return Err(unsupported(format!(
                "unique index \"{name}\" of table {shown} can take different values of column \"{}\" for equal{place}",
                column.name
            ))
            .with_detail("Two rows with one key could be at different nodes.")
            .with_hint("Use a column by itself, with the default operator class of its type and a deterministic collation; inside of an expression, use a type whose equal values look the same."));
        }
        Ok(())
    }
}
