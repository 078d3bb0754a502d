//! Hooks of the planner for partitioned tables whose key is a call of one function, and of the
//! executor for plans that these hooks have changed. Run by every session of a server that has the
//! library preloaded.
//!
//! Example: `everywhere.orders` is partitioned by `braid.place('public.orders', tenant_id,
//! order_id, created_at)`. A query has `tenant_id = 42`. PostgreSQL does not know that the place
//! follows from the tenant, so it scans all partitions. The library knows, and says which ones it
//! needs.
//!
//! While a query is planned:
//! 1. PostgreSQL collects the conditions for the partitioned table, also those that follow from
//!    joins.
//! 2. It builds each partition, and calls `on_partition`. A partition that can have no rows of
//!    the query becomes a dummy: no plan scans it. A partition whose rows have to be checked gets a
//!    condition, which it takes from its parent; so the parent has it for that moment.
//! 3. It makes paths for the parent, and calls `on_paths`. If the tenant is only known when the
//!    plan runs, the parent gets a condition over the key itself. PostgreSQL's own pruning does the
//!    rest; no row is checked by it.
//!
//! A plan that depends on facts as of its making carries notes among its invalidation items, under
//! numbers that no catalog has. `Watch::begins` sees them when the plan starts.
//!
//! Hooks are chained as in `hook.rs`; functions that call other code have nothing with a destructor
//! on their stack.

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

use pgrx::pg_sys;

use crate::compat;
use crate::encoding::raw_name;
use crate::error::{PgError, pass_on};
use crate::ffi::raw;
use crate::parse_tree::raw_nodes;
use crate::syscache::{FunctionRow, namespace_name};
use crate::value::{Content, Value};

/// The functions and decisions of a library for such tables.
#[derive(Debug)]
pub struct Watch {
    /// Schema of its functions.
    pub schema: &'static CStr,
    /// The function that is the key: of a text that names the table, the tenant, the record and the
    /// creation.
    pub key: &'static CStr,
    /// The function that says which partition answers for a row, with the same arguments.
    pub answers: &'static CStr,
    /// A function of a partition's number, the table's name and a tenant: the number, or null if
    /// the partition has no rows of the tenant.
    pub candidate: &'static CStr,
    /// Such a function of an array of tenants.
    pub candidate_of_any: &'static CStr,
    /// Called for each partition, with the query's conditions on the tenant.
    pub decide: fn(&Asked<'_>) -> Result<Decision, PgError>,
    /// Called when a plan starts, with its note.
    pub begins: fn(Note) -> Result<(), PgError>,
}

/// The facts of a query that concern the rows of one partition.
#[derive(Debug)]
pub struct Asked<'a> {
    /// The table's name, as the key's first argument has it.
    pub table: &'a [u8],
    /// The number of the partition.
    pub partition: i32,
    /// Values, one of which is the tenant of each row; `None`: nothing is known of it.
    pub tenants: Option<Vec<Tenant>>,
}

/// A value that is not null, with its type and collation.
#[derive(Debug, Clone, Copy)]
pub struct Tenant {
    /// The value.
    pub datum: pg_sys::Datum,
    /// The value's type.
    pub of: pg_sys::Oid,
    /// The value's collation.
    pub collation: pg_sys::Oid,
}

/// A decision about a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Whether it is left out.
    pub is_left_out: bool,
    /// Whether its rows are checked: only those for which it answers count.
    pub is_checked: bool,
    /// Kept in the plan, and given to [`Watch::begins`].
    pub note: Option<Note>,
}

/// Two numbers of the library's, on which a plan depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Note {
    /// A number.
    pub version: u32,
    /// Another one.
    pub time: u32,
}

/// Numbers of caches that PostgreSQL does not have: the notes are never found invalid.
const NOTE_OF_VERSION: c_int = -0x0b7a_1d01;
const NOTE_OF_TIME: c_int = -0x0b7a_1d02;

struct Chain {
    watch: &'static Watch,
    paths: pg_sys::set_rel_pathlist_hook_type,
    start: pg_sys::ExecutorStart_hook_type,
}

static CHAIN: OnceLock<Chain> = OnceLock::new();

thread_local! {
    /// The function that was last found to be the key, and one that is not.
    static KEY: Cell<(pg_sys::Oid, pg_sys::Oid)> = const { Cell::new((pg_sys::InvalidOid, pg_sys::InvalidOid)) };
}

/// Starts to watch. Called once, while the postmaster loads its libraries.
pub fn install(watch: &'static Watch) {
    // SAFETY: the variables are set in the postmaster, which has one thread and no children yet, to
    // functions of this library, which is never unloaded.
    unsafe {
        let chain = Chain {
            watch,
            paths: pg_sys::set_rel_pathlist_hook,
            start: pg_sys::ExecutorStart_hook,
        };
        if CHAIN.set(chain).is_ok() {
            pg_sys::set_rel_pathlist_hook = Some(on_paths);
            pg_sys::ExecutorStart_hook = Some(on_start);
            compat::install_relation_hook();
        }
    }
}

fn watch() -> Option<&'static Watch> {
    CHAIN.get().map(|chain| chain.watch)
}

/// A plan starts.
unsafe extern "C-unwind" fn on_start(query: *mut pg_sys::QueryDesc, flags: c_int) {
    let next = CHAIN.get().and_then(|chain| chain.start);
    let next = next.unwrap_or(raw::standard_ExecutorStart);
    // SAFETY: PostgreSQL has passed a query with its plan; the list is read only. The next hook, or
    // PostgreSQL's own function, gets PostgreSQL's arguments.
    unsafe {
        let planned = (*query).plannedstmt;
        let only_explains = flags.cast_unsigned() & pg_sys::EXEC_FLAG_EXPLAIN_ONLY != 0;
        if !planned.is_null() && !(*planned).invalItems.is_null() && !only_explains {
            check_notes((*planned).invalItems);
        }
        next(query, flags);
    }
}

/// # Safety
/// A list of PlanInvalItem nodes.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn check_notes(items: *mut pg_sys::List) {
    let Some(watch) = watch() else {
        return;
    };
    let mut version = None;
    // SAFETY: as the caller says.
    for item in unsafe { raw_nodes(items) } {
        // SAFETY: a node of the list.
        let item = unsafe { &*item.cast::<pg_sys::PlanInvalItem>() };
        match (item.cacheId, version) {
            (NOTE_OF_VERSION, _) => version = Some(item.hashValue),
            (NOTE_OF_TIME, Some(known)) => {
                let note = Note {
                    version: known,
                    time: item.hashValue,
                };
                pass_on(|| {
                    if let Err(error) = (watch.begins)(note) {
                        error.raise();
                    }
                });
            }
            _ => {}
        }
    }
}

/// The call that is the key of a partitioned table.
#[derive(Clone, Copy)]
struct Key {
    call: *mut pg_sys::FuncExpr,
}

impl Key {
    /// The key of a relation that is planned, if it is a call of the library's function.
    ///
    /// # Safety
    /// A relation of the planner's.
    unsafe fn of(relation: *mut pg_sys::RelOptInfo) -> Option<Self> {
        // SAFETY: a partitioned relation has its scheme and the expressions of its key.
        unsafe {
            let relation = relation.as_ref()?;
            let scheme = relation.part_scheme.as_ref()?;
            if scheme.partnatts != 1 || relation.partexprs.is_null() || relation.boundinfo.is_null()
            {
                return None;
            }
            let node = raw_nodes(*relation.partexprs).next()?;
            if (*node).type_ != pg_sys::NodeTag::T_FuncExpr {
                return None;
            }
            let call = node.cast::<pg_sys::FuncExpr>();
            let arguments = raw_nodes((*call).args).count();
            (arguments == 4 && is_key((*call).funcid)).then_some(Self { call })
        }
    }

    /// # Safety
    /// The relation is still planned.
    unsafe fn argument(self, place: usize) -> Option<*mut pg_sys::Node> {
        // SAFETY: as the caller says.
        unsafe { raw_nodes((*self.call).args).nth(place) }
    }

    /// Calls `read` with the table's name.
    ///
    /// # Safety
    /// The relation is still planned.
    unsafe fn with_table<T>(self, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        // SAFETY: the first argument is declared to be a text.
        unsafe {
            let name = constant(self.argument(0)?)?;
            let value = Value::stored(pg_sys::TEXTOID, (-1, false), (*name).constvalue);
            value.read(|content| match content {
                Content::Bytes(bytes) => Some(read(bytes)),
                Content::Word(_) => None,
            })
        }
    }
}

fn is_key(function: pg_sys::Oid) -> bool {
    let (key, other) = KEY.get();
    if function == key {
        return true;
    }
    let (Some(watch), false) = (watch(), function == other) else {
        return false;
    };
    let is_it = FunctionRow::find(function).is_some_and(|row| {
        raw_name(&row.proname) == watch.key
            && namespace_name(row.pronamespace).is_some_and(|schema| *schema == *watch.schema)
    });
    KEY.set(if is_it {
        (function, other)
    } else {
        (key, function)
    });
    is_it
}

/// A constant that is not null.
///
/// # Safety
/// A node.
unsafe fn constant(node: *mut pg_sys::Node) -> Option<*mut pg_sys::Const> {
    // SAFETY: as the caller says.
    unsafe {
        let node = without_relabel(node);
        let is_one = (*node).type_ == pg_sys::NodeTag::T_Const
            && !(*node.cast::<pg_sys::Const>()).constisnull;
        is_one.then(|| node.cast())
    }
}

/// # Safety
/// A node.
unsafe fn without_relabel(mut node: *mut pg_sys::Node) -> *mut pg_sys::Node {
    // SAFETY: as the caller says; the argument of such a node is one.
    unsafe {
        while (*node).type_ == pg_sys::NodeTag::T_RelabelType {
            node = (*node.cast::<pg_sys::RelabelType>()).arg.cast();
        }
        node
    }
}

/// Types whose values are hashed alike, and compared by operators of one family.
const INTEGERS: [pg_sys::Oid; 3] = [pg_sys::INT2OID, pg_sys::INT4OID, pg_sys::INT8OID];
/// Operators for equality of these types: of int2, int4 and int8, and from one to another.
const INTEGER_EQUALITY: [u32; 9] = [94, 96, 410, 532, 533, 1862, 1868, 15, 416];

/// Whether an operator says that two values of these types are equal, and equal values are hashed
/// alike.
fn is_equality(operator: pg_sys::Oid, one: pg_sys::Oid, other: pg_sys::Oid) -> bool {
    if INTEGERS.contains(&one) && INTEGERS.contains(&other) {
        return INTEGER_EQUALITY.contains(&operator.to_u32());
    }
    // SAFETY: looks a type up; the entry stays for as long as the process.
    let own = unsafe {
        let flags = pg_sys::TYPECACHE_EQ_OPR.cast_signed();
        (*pg_sys::lookup_type_cache(one, flags)).eq_opr
    };
    one == other && own == operator
}

/// A condition on the tenant.
#[derive(Clone, Copy)]
enum Said {
    /// The tenant is the value of this expression.
    Is(*mut pg_sys::Node),
    /// The tenant is in the array that is the value of this expression.
    IsIn(*mut pg_sys::Node),
}

impl Said {
    const fn node(self) -> *mut pg_sys::Node {
        match self {
            Self::Is(node) | Self::IsIn(node) => node,
        }
    }
}

/// Returns what a condition says of the expression `tenant`, if it does.
///
/// # Safety
/// Nodes of the planner's.
unsafe fn said(clause: *mut pg_sys::Node, tenant: *mut pg_sys::Node) -> Option<Said> {
    // SAFETY: the caller guarantees valid nodes; a node is read as the type that its tag names.
    unsafe {
        let tenant = without_relabel(tenant);
        let is_tenant = |node| pg_sys::equal(without_relabel(node).cast(), tenant.cast());
        match (*clause).type_ {
            pg_sys::NodeTag::T_OpExpr => {
                let operation = &*clause.cast::<pg_sys::OpExpr>();
                let mut arguments = raw_nodes(operation.args);
                let (one, other) = (arguments.next()?, arguments.next()?);
                let (named, value) = match (is_tenant(one), is_tenant(other)) {
                    (true, false) => (one, other),
                    (false, true) => (other, one),
                    _ => return None,
                };
                let (named, of) = (pg_sys::exprType(named), pg_sys::exprType(value));
                is_equality(operation.opno, named, of).then_some(Said::Is(value))
            }
            pg_sys::NodeTag::T_ScalarArrayOpExpr => {
                let operation = &*clause.cast::<pg_sys::ScalarArrayOpExpr>();
                let mut arguments = raw_nodes(operation.args);
                let (named, values) = (arguments.next()?, arguments.next()?);
                if !operation.useOr || !is_tenant(named) {
                    return None;
                }
                let element = pg_sys::get_element_type(pg_sys::exprType(values));
                let named = pg_sys::exprType(named);
                is_equality(operation.opno, named, element).then_some(Said::IsIn(values))
            }
            _ => None,
        }
    }
}

/// The first condition among these that says something of the tenant, by a value that `fits`.
///
/// # Safety
/// A list of RestrictInfo nodes of the planner's.
unsafe fn find_said(
    conditions: *mut pg_sys::List,
    tenant: *mut pg_sys::Node,
    fits: impl Fn(Said) -> bool,
) -> Option<Said> {
    // SAFETY: as the caller says.
    unsafe {
        let mut clauses =
            raw_nodes(conditions).map(|info| (*info.cast::<pg_sys::RestrictInfo>()).clause);
        clauses.find_map(|clause| said(clause.cast(), tenant).filter(|said| fits(*said)))
    }
}

/// A relation of a query is built. Called by PostgreSQL's hook, after the previous one.
///
/// # Safety
/// The arguments are those that PostgreSQL has passed to the hook.
pub(crate) unsafe fn on_relation(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
) {
    // SAFETY: as the caller says. The array has an entry for each relation, null for those that are
    // no children.
    unsafe {
        let is_child = (*relation).reloptkind == pg_sys::RelOptKind::RELOPT_OTHER_MEMBER_REL
            && !(*root).append_rel_array.is_null();
        if !is_child {
            return;
        }
        let Ok(place) = usize::try_from((*relation).relid) else {
            return;
        };
        let child = *(*root).append_rel_array.add(place);
        if child.is_null() {
            return;
        }
        let Ok(place) = usize::try_from((*child).parent_relid) else {
            return;
        };
        let parent = *(*root).simple_rel_array.add(place);
        if !parent.is_null() && !(*parent).part_scheme.is_null() {
            on_partition(root, parent, relation);
        }
    }
}

/// # Safety
/// A partition that is planned, and its parent.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_partition(
    root: *mut pg_sys::PlannerInfo,
    parent: *mut pg_sys::RelOptInfo,
    relation: *mut pg_sys::RelOptInfo,
) {
    // SAFETY: as the caller says.
    pass_on(|| unsafe {
        let (Some(watch), Some(key)) = (watch(), Key::of(parent)) else {
            return;
        };
        take_back(parent, watch);
        let Some(partition) = number_of(root, parent, relation) else {
            return;
        };
        let decision = key.with_table(|table| {
            (watch.decide)(&Asked {
                table,
                partition,
                tenants: constants(parent, key),
            })
        });
        let decision = match decision {
            Some(Ok(decision)) => decision,
            Some(Err(error)) => error.raise(),
            None => return,
        };
        if let Some(note) = decision.note {
            add_note((*root).glob, note);
        }
        if decision.is_left_out {
            pg_sys::mark_dummy_rel(relation);
        } else if decision.is_checked {
            let Some(condition) = answers(key, watch, partition) else {
                return;
            };
            let info = compat::simple_restriction(root, condition);
            (*parent).baserestrictinfo = pg_sys::lappend((*parent).baserestrictinfo, info.cast());
        }
    });
}

/// The tenants that the conditions of a relation name by constants.
///
/// # Safety
/// A relation that is planned, and its key.
unsafe fn constants(parent: *mut pg_sys::RelOptInfo, key: Key) -> Option<Vec<Tenant>> {
    // SAFETY: as the caller says. The elements of an array are read as its type says.
    unsafe {
        let tenant = key.argument(1)?;
        let said = find_said((*parent).baserestrictinfo, tenant, |said| {
            constant(said.node()).is_some()
        })?;
        let value = &*constant(said.node())?;
        let collation = pg_sys::exprCollation(tenant);
        if let Said::Is(_) = said {
            return Some(vec![Tenant {
                datum: value.constvalue,
                of: value.consttype,
                collation,
            }]);
        }
        let of = pg_sys::get_element_type(value.consttype);
        let elements = array_elements(value.constvalue, of);
        Some(
            elements
                .into_iter()
                .map(|datum| Tenant {
                    datum,
                    of,
                    collation,
                })
                .collect(),
        )
    }
}

/// The elements of an array that are not null.
///
/// # Safety
/// An array, and the type of its elements.
pub unsafe fn array_elements(array: pg_sys::Datum, of: pg_sys::Oid) -> Vec<pg_sys::Datum> {
    // SAFETY: as the caller says. PostgreSQL allocates both arrays, of so many entries, in the
    // current memory context.
    unsafe {
        let (mut length, mut by_value, mut align) = (0_i16, false, 0);
        pg_sys::get_typlenbyvalalign(of, &raw mut length, &raw mut by_value, &raw mut align);
        let array = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        let (mut values, mut nulls, mut count) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        pg_sys::deconstruct_array(
            array,
            of,
            length.into(),
            by_value,
            align,
            &raw mut values,
            &raw mut nulls,
            &raw mut count,
        );
        let count = usize::try_from(count).unwrap_or(0);
        (0..count)
            .filter(|place| !*nulls.add(*place))
            .map(|place| *values.add(place))
            .collect()
    }
}

/// The number of a partition. `None` for one of several numbers, or of none.
///
/// # Safety
/// A partition that is planned, and its parent.
unsafe fn number_of(
    root: *mut pg_sys::PlannerInfo,
    parent: *mut pg_sys::RelOptInfo,
    relation: *mut pg_sys::RelOptInfo,
) -> Option<i32> {
    // SAFETY: as the caller says. PostgreSQL has locked the parent, and has put its partitions in
    // the directory; the bounds of the parent are those of the directory.
    unsafe {
        let entry = |relation: *mut pg_sys::RelOptInfo| {
            let place = usize::try_from((*relation).relid).ok()?;
            (*root).simple_rte_array.add(place).read().as_ref()
        };
        let (table, child) = (entry(parent)?.relid, entry(relation)?.relid);
        let open = pg_sys::RelationIdGetRelation(table);
        if open.is_null() {
            return None;
        }
        let directory = (*(*root).glob).partition_directory;
        let found = pg_sys::PartitionDirectoryLookup(directory, open);
        pg_sys::RelationClose(open);
        let partitions = usize::try_from((*found).nparts).ok()?;
        let place = (0..partitions).find(|place| *(*found).oids.add(*place) == child)?;
        let place = i32::try_from(place).ok()?;
        let bounds = &*(*parent).boundinfo;
        let values = usize::try_from(bounds.ndatums).ok()?;
        let mut numbers = (0..values).filter(|value| *bounds.indexes.add(*value) == place);
        let first = numbers.next()?;
        if numbers.next().is_some() {
            return None;
        }
        let datum = **bounds.datums.add(first);
        i32::try_from(datum.value().cast_signed()).ok()
    }
}

/// Takes back the condition that the previous partition was to inherit.
///
/// # Safety
/// A relation that is planned.
unsafe fn take_back(parent: *mut pg_sys::RelOptInfo, watch: &Watch) {
    // SAFETY: as the caller says.
    unsafe {
        let ours = raw_nodes((*parent).baserestrictinfo).find(|info| {
            let clause = (*info.cast::<pg_sys::RestrictInfo>())
                .clause
                .cast::<pg_sys::Node>();
            is_answers(clause, watch)
        });
        if let Some(ours) = ours {
            (*parent).baserestrictinfo =
                pg_sys::list_delete_ptr((*parent).baserestrictinfo, ours.cast());
        }
    }
}

/// Whether a condition is one that [`answers`] has made.
///
/// # Safety
/// A node.
unsafe fn is_answers(clause: *mut pg_sys::Node, watch: &Watch) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        if (*clause).type_ != pg_sys::NodeTag::T_OpExpr {
            return false;
        }
        let Some(first) = raw_nodes((*clause.cast::<pg_sys::OpExpr>()).args).next() else {
            return false;
        };
        (*first).type_ == pg_sys::NodeTag::T_FuncExpr
            && raw_nodes((*first.cast::<pg_sys::FuncExpr>()).args).count() == 4
            && (*first.cast::<pg_sys::FuncExpr>()).funcid
                == function(watch, watch.answers, &ANSWERS)
    }
}

/// Types of arguments.
const ANSWERS: [pg_sys::Oid; 4] = [
    pg_sys::TEXTOID,
    pg_sys::ANYOID,
    pg_sys::ANYOID,
    pg_sys::TIMESTAMPTZOID,
];
const CANDIDATE: [pg_sys::Oid; 3] = [pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::ANYOID];
const CANDIDATE_OF_ANY: [pg_sys::Oid; 3] = [pg_sys::INT4OID, pg_sys::TEXTOID, pg_sys::ANYARRAYOID];

/// One of the library's functions; invalid if it does not exist, as after an update of the library
/// alone.
fn function(watch: &Watch, name: &CStr, arguments: &[pg_sys::Oid]) -> pg_sys::Oid {
    // SAFETY: names that end with a zero byte, and the types of so many arguments.
    unsafe {
        let string = |text: &CStr| pg_sys::makeString(text.as_ptr().cast_mut());
        let mut names = std::ptr::null_mut();
        for text in [watch.schema, name] {
            names = pg_sys::lappend(names, string(text).cast());
        }
        let count = c_int::try_from(arguments.len()).unwrap_or(0);
        pg_sys::LookupFuncName(names, count, arguments.as_ptr().cast_mut(), true)
    }
}

/// A condition: the partition with this number answers for the row.
///
/// # Safety
/// The key of a relation that is planned.
unsafe fn answers(key: Key, watch: &Watch, partition: i32) -> Option<*mut pg_sys::Expr> {
    let function = function(watch, watch.answers, &ANSWERS);
    if function == pg_sys::InvalidOid {
        return None;
    }
    // SAFETY: as the caller says; new nodes of copies.
    unsafe {
        let call = key.call;
        let arguments = pg_sys::copyObjectImpl((*call).args.cast()).cast::<pg_sys::List>();
        let found = pg_sys::makeFuncExpr(
            function,
            pg_sys::INT4OID,
            arguments,
            pg_sys::InvalidOid,
            (*call).inputcollid,
            pg_sys::CoercionForm::COERCE_EXPLICIT_CALL,
        );
        let condition = pg_sys::make_opclause(
            pg_sys::Oid::from(pg_sys::Int4EqualOperator),
            pg_sys::BOOLOID,
            false,
            found.cast(),
            number(partition).cast(),
            pg_sys::InvalidOid,
            pg_sys::InvalidOid,
        );
        pg_sys::set_opfuncid(condition.cast());
        Some(condition)
    }
}

/// A constant.
///
/// # Safety
/// In a planner's memory context.
unsafe fn number(value: i32) -> *mut pg_sys::Const {
    // SAFETY: a value of the type.
    unsafe {
        pg_sys::makeConst(
            pg_sys::INT4OID,
            -1,
            pg_sys::InvalidOid,
            4,
            pg_sys::Datum::from(value),
            false,
            true,
        )
    }
}

/// A node of a type, whose fields are zero.
///
/// # Safety
/// The tag is the type's.
unsafe fn make_node<T>(tag: pg_sys::NodeTag) -> *mut T {
    // SAFETY: PostgreSQL allocates and clears so many bytes; each node begins with its tag.
    unsafe {
        let node = pg_sys::palloc0(size_of::<T>());
        *node.cast::<pg_sys::NodeTag>() = tag;
        node.cast()
    }
}

/// Makes this session plan its prepared statements anew.
pub fn forget_plans() {
    // SAFETY: marks plans as invalid, which are made anew when they are used next.
    unsafe { pg_sys::ResetPlanCache() };
}

/// Puts a note into the plan, once.
///
/// # Safety
/// The planner's state.
unsafe fn add_note(global: *mut pg_sys::PlannerGlobal, note: Note) {
    // SAFETY: as the caller says.
    unsafe {
        let known = |cache, value| {
            raw_nodes((*global).invalItems).any(|item| {
                let item = &*item.cast::<pg_sys::PlanInvalItem>();
                (item.cacheId, item.hashValue) == (cache, value)
            })
        };
        if known(NOTE_OF_VERSION, note.version) && known(NOTE_OF_TIME, note.time) {
            return;
        }
        for (cache, value) in [(NOTE_OF_VERSION, note.version), (NOTE_OF_TIME, note.time)] {
            let item = make_node::<pg_sys::PlanInvalItem>(pg_sys::NodeTag::T_PlanInvalItem);
            (*item).cacheId = cache;
            (*item).hashValue = value;
            (*global).invalItems = pg_sys::lappend((*global).invalItems, item.cast());
        }
    }
}

/// Paths of a relation are made.
unsafe extern "C-unwind" fn on_paths(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
    place: pg_sys::Index,
    entry: *mut pg_sys::RangeTblEntry,
) {
    // SAFETY: the previous hook gets PostgreSQL's arguments.
    unsafe {
        if let Some(next) = CHAIN.get().and_then(|chain| chain.paths) {
            next(root, relation, place, entry);
        }
        let is_parent = (*relation).reloptkind == pg_sys::RelOptKind::RELOPT_BASEREL
            && (*entry).rtekind == pg_sys::RTEKind::RTE_RELATION
            && !(*relation).part_scheme.is_null();
        if is_parent {
            on_parent(root, relation);
        }
    }
}

/// # Safety
/// A partitioned relation that is planned.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn on_parent(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
) {
    // SAFETY: as the caller says.
    pass_on(|| unsafe {
        let (Some(watch), Some(key)) = (watch(), Key::of(relation)) else {
            return;
        };
        take_back(relation, watch);
        let Some(tenant) = key.argument(1) else {
            return;
        };
        let runs = |said: Said| {
            !pg_sys::contain_volatile_functions(said.node()) && !names(root, relation, said.node())
        };
        let conditions = (*relation).baserestrictinfo;
        let is_constant = |said: Said| constant(said.node()).is_some();
        if find_said(conditions, tenant, is_constant).is_none()
            && let Some(said) = find_said(conditions, tenant, runs)
            && let Some(condition) = candidates(root, relation, key, watch, said)
        {
            (*relation).baserestrictinfo = pg_sys::lappend(conditions, condition.cast());
        }
        for info in raw_nodes((*relation).ppilist) {
            let info = info.cast::<pg_sys::ParamPathInfo>();
            if let Some(said) = find_said((*info).ppi_clauses, tenant, runs)
                && let Some(condition) = candidates(root, relation, key, watch, said)
            {
                (*info).ppi_clauses = pg_sys::lappend((*info).ppi_clauses, condition.cast());
            }
        }
    });
}

/// Whether an expression uses columns of a relation.
///
/// # Safety
/// A relation that is planned, and an expression of its query.
unsafe fn names(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
    node: *mut pg_sys::Node,
) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        let place = c_int::try_from((*relation).relid).unwrap_or(0);
        pg_sys::bms_is_member(place, pg_sys::pull_varnos(root, node))
    }
}

/// A condition over the key that only pruning sees: the key is one of the partitions that can have
/// rows of the tenant.
///
/// # Safety
/// A relation that is planned, its key, and what a condition of it says.
unsafe fn candidates(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
    key: Key,
    watch: &Watch,
    said: Said,
) -> Option<*mut pg_sys::RestrictInfo> {
    // SAFETY: as the caller says; new nodes of copies. The bounds have so many values.
    unsafe {
        let (name, types) = match said {
            Said::Is(_) => (watch.candidate, CANDIDATE),
            Said::IsIn(_) => (watch.candidate_of_any, CANDIDATE_OF_ANY),
        };
        let function = function(watch, name, &types);
        if function == pg_sys::InvalidOid {
            return None;
        }
        let tenant = key.argument(1)?;
        let array = make_node::<pg_sys::ArrayExpr>(pg_sys::NodeTag::T_ArrayExpr);
        (*array).array_typeid = pg_sys::INT4ARRAYOID;
        (*array).element_typeid = pg_sys::INT4OID;
        (*array).location = -1;
        let bounds = &*(*relation).boundinfo;
        for value in 0..usize::try_from(bounds.ndatums).ok()? {
            let datum = **bounds.datums.add(value);
            let mut arguments = std::ptr::null_mut();
            let partition = i32::try_from(datum.value().cast_signed()).ok()?;
            let copies = [
                number(partition).cast::<std::ffi::c_void>(),
                pg_sys::copyObjectImpl(key.argument(0)?.cast()),
                pg_sys::copyObjectImpl(said.node().cast()),
            ];
            for copy in copies {
                arguments = pg_sys::lappend(arguments, copy);
            }
            let call = pg_sys::makeFuncExpr(
                function,
                pg_sys::INT4OID,
                arguments,
                pg_sys::InvalidOid,
                pg_sys::exprCollation(tenant),
                pg_sys::CoercionForm::COERCE_EXPLICIT_CALL,
            );
            (*array).elements = pg_sys::lappend((*array).elements, call.cast());
        }
        let condition =
            make_node::<pg_sys::ScalarArrayOpExpr>(pg_sys::NodeTag::T_ScalarArrayOpExpr);
        (*condition).opno = pg_sys::Oid::from(pg_sys::Int4EqualOperator);
        (*condition).opfuncid = pg_sys::Oid::from(pg_sys::F_INT4EQ);
        (*condition).useOr = true;
        (*condition).location = -1;
        let copy = pg_sys::copyObjectImpl(key.call.cast());
        (*condition).args = pg_sys::lappend(std::ptr::null_mut(), copy);
        (*condition).args = pg_sys::lappend((*condition).args, array.cast());
        Some(compat::simple_restriction(root, condition.cast()))
    }
}
