//! A utility statement as its parse tree shows it: whether it changes the schema in a way that is
//! sent to other nodes, and which relations it names. Run by every process that runs statements, in
//! the hook of utility statements.
//!
//! Not for: handling it (`braid_node::ddl`).

use std::ffi::{CStr, CString, c_int};

use pgrx::pg_sys::{self, NodeTag, ObjectType};

use crate::catalog::utf8_string;
use crate::parse_tree::{List, Node, Part, at, nodes, tree};
use crate::role_statement::{self, RoleStatement};
use crate::{compat, plain, syscache};

/// A relation by the name that a statement has for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelationName {
    /// Schema, if the statement names it.
    pub schema: Option<CString>,
    /// Name of the relation.
    pub name: CString,
}

/// A statement that changes the schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaStatement {
    /// Command tag.
    pub tag: String,
    /// Relations that it names and may change.
    pub relations: Vec<RelationName>,
    /// The statement's form, if that counts.
    pub form: Form,
}

/// The form of a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// DROP of relations that a list names.
    Drop {
        /// `DROP TABLE`, or of another kind.
        command: &'static str,
        /// With IF EXISTS.
        if_exists: bool,
        /// With CASCADE.
        cascade: bool,
    },
    /// CREATE TABLE AS, or SELECT INTO: rows come with the table.
    CreateAs {
        /// Clauses behind the columns.
        clauses: String,
    },
    /// ALTER of a sequence, or of an identity column, that changes which values come next.
    Numbers {
        /// The statement changes more than where the sequence goes on.
        bounds: bool,
    },
    /// Each node runs it by itself, when it can: it can't run in a transaction, or takes long.
    Alone(Alone),
    /// REFRESH MATERIALIZED VIEW.
    Refresh,
    /// A statement about roles.
    Role(RoleStatement),
    /// Any other.
    Other,
}

/// The kind of a statement that each node runs by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alone {
    /// CREATE INDEX CONCURRENTLY.
    CreateIndex {
        /// The statement names the index.
        named: bool,
    },
    /// DROP INDEX CONCURRENTLY.
    DropIndex,
    /// DETACH PARTITION CONCURRENTLY.
    Detach,
    /// VALIDATE CONSTRAINT.
    Validate,
    /// REINDEX, VACUUM FULL, CLUSTER, REPACK: relations are written anew.
    Rewrite,
}

impl SchemaStatement {
    /// Whether each node runs it by itself.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        matches!(self.form, Form::Alone(_))
    }
}

/// The schema of Braid's own objects.
const OWN_SCHEMA: &CStr = c"braid";

/// The name of this extension.
const THIS: &CStr = c"braid";

impl RelationName {
    fn of(relation: Option<Part<'_, pg_sys::RangeVar>>) -> Option<Self> {
        let relation = relation?;
        Some(Self {
            schema: at!(relation, schemaname).map(CStr::to_owned),
            name: at!(relation, relname)?.to_owned(),
        })
    }

    /// The relation that has the name, by the session's search path if no schema is named.
    #[must_use]
    pub fn find(&self) -> Option<pg_sys::Oid> {
        let schema = self.schema.as_ref();
        // SAFETY: in a transaction; the node and copies of its texts are in the current context.
        let oid = unsafe {
            let copy = |text: &CString| pg_sys::pstrdup(text.as_ptr());
            let relation = pg_sys::makeRangeVar(
                schema.map_or(std::ptr::null_mut(), copy),
                copy(&self.name),
                -1,
            );
            // A schema that does not exist is no error with this flag.
            pg_sys::RangeVarGetRelidExtended(
                relation,
                0,
                pg_sys::RVROption::RVR_MISSING_OK,
                None,
                std::ptr::null_mut(),
            )
        };
        (oid != pg_sys::InvalidOid).then_some(oid)
    }
}

/// The table that an index is of, or the relation itself. In a transaction.
#[must_use]
pub fn table_of(relation: pg_sys::Oid) -> pg_sys::Oid {
    let table = plain::IndexGetRelation(relation, true);
    if table == pg_sys::InvalidOid {
        relation
    } else {
        table
    }
}

/// Whether a relation is its node's own: temporary, or a foreign table. In a transaction. A
/// relation that is gone is not.
#[must_use]
pub fn is_of_node(relation: pg_sys::Oid) -> bool {
    plain::get_rel_persistence(relation).cast_unsigned() == b't'
        || syscache::relation_kind(relation) == pg_sys::RELKIND_FOREIGN_TABLE
}

/// Whether a relation lies in Braid's own schema. In a transaction.
#[must_use]
pub fn is_own(relation: pg_sys::Oid) -> bool {
    let schema = plain::get_rel_namespace(relation);
    schema != pg_sys::InvalidOid && Some(schema) == syscache::namespace(OWN_SCHEMA)
}

/// The text of a statement, by its place in the query string.
#[must_use]
pub fn text_of(text: &CStr, location: c_int, length: c_int) -> String {
    let bytes = text.to_bytes();
    let start = usize::try_from(location).unwrap_or(0);
    let rest = bytes.get(start..).unwrap_or_default();
    let length = usize::try_from(length).unwrap_or(0);
    let part = match length {
        0 => rest,
        _ => rest.get(..length).unwrap_or(rest),
    };
    let part = CString::new(part).unwrap_or_default();
    utf8_string(&part).trim().to_owned()
}

/// The command tag of a text that is one utility statement; `None` for another one, or several.
/// Raises the parser's errors. In a transaction.
#[must_use]
pub fn single_utility(text: &str) -> Option<String> {
    let text = crate::encoding::statement(text);
    // SAFETY: a C string; the parser returns a tree of its own, in the current context, which this
    // function does not change.
    let parsed: Option<List<'_>> = unsafe { tree(pg_sys::pg_parse_query(text.as_ptr())) };
    let statements: Vec<_> = nodes(parsed).collect();
    let [statement] = statements.as_slice() else {
        return None;
    };
    let node = at!(statement.cast::<pg_sys::RawStmt>()?, stmt)?;
    let is_query = matches!(
        node.tag(),
        NodeTag::T_SelectStmt
            | NodeTag::T_InsertStmt
            | NodeTag::T_UpdateStmt
            | NodeTag::T_DeleteStmt
            | NodeTag::T_MergeStmt
            | NodeTag::T_TransactionStmt
            | NodeTag::T_CopyStmt
    );
    (!is_query).then(|| node.command_tag())
}

/// A list of names as the name of a relation. `inside`: the last is that of a part of it.
fn listed(mut names: Vec<CString>, inside: bool) -> Option<RelationName> {
    if inside {
        names.pop();
    }
    let name = names.pop()?;
    Some(RelationName {
        schema: names.pop(),
        name,
    })
}

fn listed_in(names: Node<'_>, inside: bool) -> Option<RelationName> {
    let names = names.cast::<pg_sys::List>()?;
    listed(names.strings().map(CStr::to_owned).collect(), inside)
}

/// Whether objects of a kind belong to one node: they are not in a database, or say how a node is
/// connected to others.
fn is_local(kind: ObjectType::Type) -> bool {
    matches!(
        kind,
        ObjectType::OBJECT_DATABASE
            | ObjectType::OBJECT_ROLE
            | ObjectType::OBJECT_TABLESPACE
            | ObjectType::OBJECT_PUBLICATION
            | ObjectType::OBJECT_PUBLICATION_NAMESPACE
            | ObjectType::OBJECT_PUBLICATION_REL
            | ObjectType::OBJECT_SUBSCRIPTION
            | ObjectType::OBJECT_FDW
            | ObjectType::OBJECT_FOREIGN_SERVER
            | ObjectType::OBJECT_FOREIGN_TABLE
            | ObjectType::OBJECT_USER_MAPPING
            | ObjectType::OBJECT_LARGEOBJECT
            | ObjectType::OBJECT_PARAMETER_ACL
    )
}

/// Whether a list of names begins with a schema whose objects are nobody else's.
fn is_private(names: Option<List<'_>>) -> bool {
    let names: Vec<&CStr> = names.into_iter().flat_map(List::strings).collect();
    names.len() > 1
        && names
            .first()
            .is_some_and(|first| *first == c"pg_temp" || *first == OWN_SCHEMA)
}

fn ranges(list: Option<List<'_>>) -> Vec<RelationName> {
    list.into_iter()
        .flat_map(List::of)
        .filter_map(|relation| RelationName::of(Some(relation)))
        .collect()
}

/// Looks at a utility statement. Returns `None` if it changes no schema, or one that is not sent to
/// other nodes: of temporary objects, databases, other nodes.
#[must_use]
pub fn look(node: Node<'_>) -> Option<SchemaStatement> {
    let node = explained(node).unwrap_or(node);
    let (relations, form) = parts(node)?;
    Some(SchemaStatement {
        tag: node.command_tag(),
        relations,
        form,
    })
}

/// The object that a statement renames, or moves to another schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Renamed {
    /// A relation gets another name.
    Relation(RelationName),
    /// A relation gets another schema.
    Moved(RelationName),
    /// A column, by its name, gets another one.
    Column(RelationName, CString),
    /// A schema gets another name.
    Schema(CString),
}

/// Looks at a utility statement. `None` if it renames no table, column or schema.
#[must_use]
pub fn renamed(node: Node<'_>) -> Option<Renamed> {
    if let Some(moved) = node.cast::<pg_sys::AlterObjectSchemaStmt>() {
        return RelationName::of(at!(moved, relation)).map(Renamed::Moved);
    }
    let rename = node.cast::<pg_sys::RenameStmt>()?;
    let relation = RelationName::of(at!(rename, relation));
    let part = at!(rename, subname).map(CStr::to_owned);
    match rename.renameType {
        // PostgreSQL renames a table whatever kind of relation the statement says.
        ObjectType::OBJECT_TABLE
        | ObjectType::OBJECT_INDEX
        | ObjectType::OBJECT_SEQUENCE
        | ObjectType::OBJECT_VIEW
        | ObjectType::OBJECT_MATVIEW
        | ObjectType::OBJECT_FOREIGN_TABLE => relation.map(Renamed::Relation),
        ObjectType::OBJECT_COLUMN => Some(Renamed::Column(relation?, part?)),
        ObjectType::OBJECT_SCHEMA => part.map(Renamed::Schema),
        _ => None,
    }
}

/// The table that a utility statement makes unlogged. Raises nothing.
#[must_use]
pub fn made_unlogged(node: Node<'_>) -> Option<RelationName> {
    let alter = node.cast::<pg_sys::AlterTableStmt>()?;
    let commands = at!(alter, cmds).into_iter();
    let is_it = commands
        .flat_map(List::of::<pg_sys::AlterTableCmd>)
        .any(|command| command.subtype == pg_sys::AlterTableType::AT_SetUnLogged);
    is_it.then(|| RelationName::of(at!(alter, relation)))?
}

/// The statement that EXPLAIN ANALYZE runs, if it creates a table or a view: such a statement is
/// not sent to other nodes.
#[must_use]
pub fn explained(node: Node<'_>) -> Option<Node<'_>> {
    let explain = node.cast::<pg_sys::ExplainStmt>()?;
    let analyzes = |option: Part<'_, pg_sys::DefElem>| {
        let is_it = at!(option, defname).is_some_and(|name| name == c"analyze");
        // SAFETY: an option of a statement; the function looks at it only, or raises an error.
        is_it && unsafe { pg_sys::defGetBoolean(option.as_ptr()) }
    };
    let mut options = at!(explain, options).into_iter().flat_map(List::of);
    if !options.any(analyzes) {
        return None;
    }
    let query = at!(explain, query)?.cast::<pg_sys::Query>()?;
    let statement = at!(query, utilityStmt)?;
    (statement.tag() == NodeTag::T_CreateTableAsStmt).then_some(statement)
}

type Parts = (Vec<RelationName>, Form);

fn one(relation: Option<RelationName>) -> Option<Parts> {
    Some((relation.into_iter().collect(), Form::Other))
}

fn is_temporary_name(relation: Part<'_, pg_sys::RangeVar>) -> bool {
    relation.relpersistence.cast_unsigned() == b't'
}

fn parts(node: Node<'_>) -> Option<Parts> {
    /// The relation that a field of a statement of a type names.
    macro_rules! named {
        ($type:ident, $field:ident) => {
            one(RelationName::of(at!(node.cast::<pg_sys::$type>()?, $field)))
        };
    }
    /// Names a relation as `named!` does, if it is created and not temporary.
    macro_rules! created {
        ($type:ident, $field:ident) => {{
            let relation = at!(node.cast::<pg_sys::$type>()?, $field)?;
            (!is_temporary_name(relation)).then(|| one(RelationName::of(Some(relation))))?
        }};
    }
    if let Some(statement) = role_statement::look(node) {
        return Some((Vec::new(), Form::Role(statement)));
    }
    match node.tag() {
        NodeTag::T_CreateStmt => created!(CreateStmt, relation),
        NodeTag::T_CreateTableAsStmt => create_as(node.cast()?),
        NodeTag::T_CreateSchemaStmt => Some(create_schema(node.cast()?)),
        NodeTag::T_AlterTableStmt => alter_table(node.cast()?),
        NodeTag::T_DropStmt => drop(node.cast()?),
        NodeTag::T_IndexStmt => {
            let index = node.cast::<pg_sys::IndexStmt>()?;
            let relation = RelationName::of(at!(index, relation))?;
            let named = at!(index, idxname).is_some();
            let form = match index.concurrent {
                true => Form::Alone(Alone::CreateIndex { named }),
                false => Form::Other,
            };
            Some((vec![relation], form))
        }
        NodeTag::T_RenameStmt => {
            let rename = node.cast::<pg_sys::RenameStmt>()?;
            let local = is_local(rename.renameType) || is_local(rename.relationType);
            (!local).then(|| one(RelationName::of(at!(rename, relation))))?
        }
        NodeTag::T_AlterObjectSchemaStmt => {
            let moved = node.cast::<pg_sys::AlterObjectSchemaStmt>()?;
            (!is_local(moved.objectType)).then(|| one(RelationName::of(at!(moved, relation))))?
        }
        NodeTag::T_AlterOwnerStmt => {
            let owned = node.cast::<pg_sys::AlterOwnerStmt>()?;
            (!is_local(owned.objectType)).then(|| one(RelationName::of(at!(owned, relation))))?
        }
        NodeTag::T_AlterObjectDependsStmt => named!(AlterObjectDependsStmt, relation),
        NodeTag::T_CreateTrigStmt => named!(CreateTrigStmt, relation),
        NodeTag::T_RuleStmt => named!(RuleStmt, relation),
        NodeTag::T_CreatePolicyStmt => named!(CreatePolicyStmt, table),
        NodeTag::T_AlterPolicyStmt => named!(AlterPolicyStmt, table),
        NodeTag::T_ViewStmt => created!(ViewStmt, view),
        NodeTag::T_CreateSeqStmt => created!(CreateSeqStmt, sequence),
        NodeTag::T_AlterSeqStmt => {
            let altered = node.cast::<pg_sys::AlterSeqStmt>()?;
            let relation = RelationName::of(at!(altered, sequence));
            let form = numbers(at!(altered, options));
            Some((relation.into_iter().collect(), form))
        }
        NodeTag::T_RefreshMatViewStmt => {
            let refresh = node.cast::<pg_sys::RefreshMatViewStmt>()?;
            let relation = RelationName::of(at!(refresh, relation))?;
            Some((vec![relation], Form::Refresh))
        }
        NodeTag::T_CreateStatsStmt => {
            let statistics = node.cast::<pg_sys::CreateStatsStmt>()?;
            Some((ranges(at!(statistics, relations)), Form::Other))
        }
        NodeTag::T_CommentStmt => {
            let comment = node.cast::<pg_sys::CommentStmt>()?;
            labelled(comment.objtype, at!(comment, object)?)
        }
        NodeTag::T_SecLabelStmt => {
            let label = node.cast::<pg_sys::SecLabelStmt>()?;
            labelled(label.objtype, at!(label, object)?)
        }
        NodeTag::T_GrantStmt => {
            let grant = node.cast::<pg_sys::GrantStmt>()?;
            (!is_local(grant.objtype)).then(|| (ranges(at!(grant, objects)), Form::Other))
        }
        NodeTag::T_ReindexStmt => reindex(node.cast()?),
        NodeTag::T_VacuumStmt => vacuum(node.cast()?),
        _ => match compat::rewritten_by(node) {
            // Without a relation it is about all of the database, which is the node's own matter.
            Some(relation) => rewrite(RelationName::of(relation).into_iter().collect()),
            None => of_no_relation(node)?.then(|| (Vec::new(), Form::Other)),
        },
    }
}

fn rewrite(relations: Vec<RelationName>) -> Option<Parts> {
    (!relations.is_empty()).then_some((relations, Form::Alone(Alone::Rewrite)))
}

fn reindex(statement: Part<'_, pg_sys::ReindexStmt>) -> Option<Parts> {
    match statement.kind {
        pg_sys::ReindexObjectType::REINDEX_OBJECT_INDEX
        | pg_sys::ReindexObjectType::REINDEX_OBJECT_TABLE => rewrite(
            RelationName::of(at!(statement, relation))
                .into_iter()
                .collect(),
        ),
        pg_sys::ReindexObjectType::REINDEX_OBJECT_SCHEMA => {
            let schema = at!(statement, name)?;
            let is_private = schema == OWN_SCHEMA || schema.to_bytes().starts_with(b"pg_");
            (!is_private).then_some((Vec::new(), Form::Alone(Alone::Rewrite)))
        }
        // Of the database, or of its catalogs: the node's own matter.
        _ => None,
    }
}

/// VACUUM FULL of tables that it names; any other VACUUM, and ANALYZE, stays on its node.
fn vacuum(statement: Part<'_, pg_sys::VacuumStmt>) -> Option<Parts> {
    let is_full = |option: Part<'_, pg_sys::DefElem>| {
        let is_it = at!(option, defname).is_some_and(|name| name == c"full");
        // SAFETY: an option of a statement; the function looks at it only, or raises an error.
        is_it && unsafe { pg_sys::defGetBoolean(option.as_ptr()) }
    };
    let mut options = at!(statement, options).into_iter().flat_map(List::of);
    if !statement.is_vacuumcmd || !options.any(is_full) {
        return None;
    }
    rewrite(
        at!(statement, rels)
            .into_iter()
            .flat_map(List::of::<pg_sys::VacuumRelation>)
            .filter_map(|table| RelationName::of(at!(table, relation)))
            .collect(),
    )
}

/// Whether a statement changes the schema and names no relation.
fn of_no_relation(node: Node<'_>) -> Option<bool> {
    /// Whether the names in a field of a statement are of an object that other nodes have, too.
    macro_rules! is_shared {
        ($type:ident, $field:ident) => {
            !is_private(at!(node.cast::<pg_sys::$type>()?, $field))
        };
    }
    macro_rules! is_other {
        ($type:ident) => {
            at!(node.cast::<pg_sys::$type>()?, extname).is_none_or(|name| name != THIS)
        };
    }
    Some(match node.tag() {
        NodeTag::T_DefineStmt => is_shared!(DefineStmt, defnames),
        NodeTag::T_CreateFunctionStmt => is_shared!(CreateFunctionStmt, funcname),
        NodeTag::T_CreateEnumStmt => is_shared!(CreateEnumStmt, typeName),
        NodeTag::T_CreateRangeStmt => is_shared!(CreateRangeStmt, typeName),
        NodeTag::T_CreateDomainStmt => is_shared!(CreateDomainStmt, domainname),
        NodeTag::T_AlterEnumStmt => is_shared!(AlterEnumStmt, typeName),
        NodeTag::T_CreateExtensionStmt => is_other!(CreateExtensionStmt),
        NodeTag::T_AlterExtensionStmt => is_other!(AlterExtensionStmt),
        NodeTag::T_AlterExtensionContentsStmt => is_other!(AlterExtensionContentsStmt),
        tag => matches!(
            tag,
            NodeTag::T_CompositeTypeStmt
                | NodeTag::T_AlterDomainStmt
                | NodeTag::T_AlterTypeStmt
                | NodeTag::T_AlterFunctionStmt
                | NodeTag::T_CreateCastStmt
                | NodeTag::T_CreateConversionStmt
                | NodeTag::T_CreateTransformStmt
                | NodeTag::T_CreatePLangStmt
                | NodeTag::T_CreateOpClassStmt
                | NodeTag::T_CreateOpFamilyStmt
                | NodeTag::T_AlterOpFamilyStmt
                | NodeTag::T_AlterOperatorStmt
                | NodeTag::T_AlterTSDictionaryStmt
                | NodeTag::T_AlterTSConfigurationStmt
                | NodeTag::T_AlterCollationStmt
                | NodeTag::T_AlterStatsStmt
                | NodeTag::T_AlterDefaultPrivilegesStmt
                | NodeTag::T_CreateAmStmt
                | NodeTag::T_CreateEventTrigStmt
                | NodeTag::T_AlterEventTrigStmt
                | NodeTag::T_DropOwnedStmt
                | NodeTag::T_ReassignOwnedStmt
        ),
    })
}

/// The form of a statement with these options of a sequence.
fn numbers(options: Option<List<'_>>) -> Form {
    let options = options
        .into_iter()
        .flat_map(List::of::<pg_sys::DefElem>)
        .filter_map(|option| at!(option, defname));
    let names: Vec<&CStr> = options.collect();
    let is_bound =
        |name: &&CStr| [c"minvalue", c"maxvalue", c"increment", c"start", c"cycle"].contains(name);
    if names.iter().any(is_bound) {
        return Form::Numbers { bounds: true };
    }
    if names.contains(&c"restart") {
        return Form::Numbers { bounds: false };
    }
    Form::Other
}

/// The object of a comment or a label.
fn labelled(kind: ObjectType::Type, object: Node<'_>) -> Option<Parts> {
    match kind {
        kind if is_local(kind) => None,
        ObjectType::OBJECT_TABLE
        | ObjectType::OBJECT_VIEW
        | ObjectType::OBJECT_MATVIEW
        | ObjectType::OBJECT_INDEX
        | ObjectType::OBJECT_SEQUENCE => one(listed_in(object, false)),
        ObjectType::OBJECT_COLUMN
        | ObjectType::OBJECT_TRIGGER
        | ObjectType::OBJECT_RULE
        | ObjectType::OBJECT_POLICY
        | ObjectType::OBJECT_TABCONSTRAINT => one(listed_in(object, true)),
        _ => one(None),
    }
}

fn create_as(statement: Part<'_, pg_sys::CreateTableAsStmt>) -> Option<Parts> {
    let into = at!(statement, into)?;
    let relation = at!(into, rel)?;
    if is_temporary_name(relation) {
        return None;
    }
    let relation = RelationName::of(Some(relation));
    if statement.objtype != ObjectType::OBJECT_TABLE {
        return one(relation);
    }
    let mut clauses = String::new();
    if let Some(method) = at!(into, accessMethod) {
        clauses.push_str(&format!(" USING {}", quoted(method)));
    }
    let options: Vec<String> = at!(into, options)
        .into_iter()
        .flat_map(List::of)
        .map(storage_option)
        .collect();
    if !options.is_empty() {
        clauses.push_str(&format!(" WITH ({})", options.join(", ")));
    }
    Some((relation.into_iter().collect(), Form::CreateAs { clauses }))
}

fn quoted(name: &CStr) -> String {
    // SAFETY: the function gives the name itself, or a copy in the current context.
    utf8_string(unsafe { CStr::from_ptr(pg_sys::quote_identifier(name.as_ptr())) })
}

/// A storage parameter as SQL writes it.
fn storage_option(option: Part<'_, pg_sys::DefElem>) -> String {
    let mut text = String::new();
    if let Some(namespace) = at!(option, defnamespace) {
        text.push_str(&quoted(namespace));
        text.push('.');
    }
    text.push_str(&at!(option, defname).map_or_else(String::new, quoted));
    if at!(option, arg).is_some() {
        // SAFETY: an option with a value; both functions give strings in the current context.
        let value = unsafe {
            let value = pg_sys::defGetString(option.as_ptr());
            CStr::from_ptr(pg_sys::quote_literal_cstr(value))
        };
        text.push('=');
        text.push_str(&utf8_string(value));
    }
    text
}

fn create_schema(statement: Part<'_, pg_sys::CreateSchemaStmt>) -> Parts {
    let schema = at!(statement, schemaname).map(CStr::to_owned);
    let tables = at!(statement, schemaElts)
        .into_iter()
        .flat_map(List::of::<pg_sys::CreateStmt>)
        .filter_map(|table| RelationName::of(at!(table, relation)))
        .map(|mut table| {
            table.schema = table.schema.or_else(|| schema.clone());
            table
        })
        .collect();
    (tables, Form::Other)
}

fn alter_table(statement: Part<'_, pg_sys::AlterTableStmt>) -> Option<Parts> {
    if is_local(statement.objtype) {
        return None;
    }
    let mut relations: Vec<_> = RelationName::of(at!(statement, relation))
        .into_iter()
        .collect();
    let mut form = Form::Other;
    let mut others = false;
    let mut only_validates = true;
    let commands = at!(statement, cmds).into_iter();
    for command in commands.flat_map(List::of::<pg_sys::AlterTableCmd>) {
        only_validates &= command.subtype == pg_sys::AlterTableType::AT_ValidateConstraint;
        let definition = at!(command, def);
        let options = definition.and_then(Node::cast::<pg_sys::List>);
        let changed = match options {
            Some(_) if command.subtype == pg_sys::AlterTableType::AT_SetIdentity => {
                numbers(options)
            }
            _ => Form::Other,
        };
        match changed {
            Form::Other => others = true,
            _ if form == (Form::Numbers { bounds: true }) => {}
            changed => form = changed,
        }
        if let Some(partition) = definition.and_then(Node::cast::<pg_sys::PartitionCmd>) {
            relations.extend(RelationName::of(at!(partition, name)));
            if partition.concurrent {
                // PostgreSQL takes no other command beside it.
                return Some((relations, Form::Alone(Alone::Detach)));
            }
        }
    }
    if only_validates {
        form = Form::Alone(Alone::Validate);
    }
    // The rest of the statement is for all nodes.
    if others && form == (Form::Numbers { bounds: false }) {
        form = Form::Numbers { bounds: true };
    }
    Some((relations, form))
}

fn drop(statement: Part<'_, pg_sys::DropStmt>) -> Option<Parts> {
    if is_local(statement.removeType) {
        return None;
    }
    let command = match statement.removeType {
        ObjectType::OBJECT_TABLE => "DROP TABLE",
        ObjectType::OBJECT_VIEW => "DROP VIEW",
        ObjectType::OBJECT_MATVIEW => "DROP MATERIALIZED VIEW",
        ObjectType::OBJECT_SEQUENCE => "DROP SEQUENCE",
        ObjectType::OBJECT_INDEX => "DROP INDEX",
        _ => "",
    };
    let inside = matches!(
        statement.removeType,
        ObjectType::OBJECT_TRIGGER | ObjectType::OBJECT_RULE | ObjectType::OBJECT_POLICY
    );
    let objects = at!(statement, objects);
    let is_this = statement.removeType == ObjectType::OBJECT_EXTENSION
        && objects
            .into_iter()
            .flat_map(List::strings)
            .any(|name| name == THIS);
    if is_this {
        return None;
    }
    let relations = if command.is_empty() && !inside {
        Vec::new()
    } else {
        nodes(objects)
            .filter_map(|names| listed_in(names, inside))
            .collect()
    };
    let form = if statement.concurrent {
        Form::Alone(Alone::DropIndex)
    } else if command.is_empty() {
        Form::Other
    } else {
        Form::Drop {
            command,
            if_exists: statement.missing_ok,
            cascade: statement.behavior == pg_sys::DropBehavior::DROP_CASCADE,
        }
    };
    Some((relations, form))
}
