//! Intents: statements that each node runs by itself, since they can't run in a transaction or take
//! long. The applier that receives one notes it and goes on (`record`); a worker of the database
//! runs it (`braid_workers::intent`). Its state is that of the row in `braid.ddl_entry`:
//!
//! | state | set by |
//! |---|---|
//! | `done` at its own node | the session, in the statement's last transaction |
//! | `waiting` | the applier; the worker, if a later statement interrupts it; `retry_ddl` |
//! | `running` | the worker, before it runs it. Without a worker, it is due again |
//! | `done`, `skipped` | the worker, afterwards |
//! | `failed` | the worker; it is due again after a pause |
//! | `cancelled` | `cancel_ddl`; an applier, if a later statement drops what the intent creates |
//!
//! Other statements of the stream count an intent as done when they compare shapes (`expected`). A
//! statement that needs its result waits for it, and one that drops its result cancels it
//! (`make_way`).

use braid_bgworker::ddl::Shape;
use braid_bgworker::hex;
use braid_bgworker::sql_text::quote_identifier;
use braid_bgworker::sqlstate::SqlState;
use braid_bgworker::subscription_option::array_literal;
use braid_gir::{Statement, StatementTable, TableState};
use braid_postgres::error::PgError;
use braid_postgres::rows::Rows;
use braid_postgres::schema_statement::Alone;

use super::facts::{list, oids_of, owners_query, shape_of};
use super::store::{Entry, note};
use crate::wake;

/// The setting of a statement that says that it is an intent, and of which kind.
const SETTING: &str = "braid.intent";

const CREATE_INDEX: &str = "create index";
const DROP_INDEX: &str = "drop index";
const DETACH: &str = "detach";
const VALIDATE: &str = "validate";
const REWRITE: &str = "rewrite";

/// States of an intent that is still to be run.
const OPEN: &str = "e.state in ('waiting', 'running', 'failed')";

/// At least one of the tables that an intent is about exists: `i` is its row.
const IS_ABOUT: &str =
    "(i.relations = '{}' or exists (select from pg_class c where c.oid = any (i.relations)))";

/// The tables of `$4`, and all that inherit from them.
const BELOW: &str = "array(with recursive below (oid) as (select unnest($4::oid[]) union \
    select inhrelid from pg_inherits join below on inhparent = oid) select oid from below)";

/// Processes that run intents: the number of one that was killed may be somebody else's.
const WORKERS: &str = "(select pid from pg_stat_activity where backend_type = 'braid intent' and datname = current_database())";

/// The setting by which a statement is sent as an intent.
pub(super) fn setting(what: Alone) -> (String, String) {
    let kind = match what {
        Alone::CreateIndex { .. } => CREATE_INDEX,
        Alone::DropIndex => DROP_INDEX,
        Alone::Detach => DETACH,
        Alone::Validate => VALIDATE,
        Alone::Rewrite => REWRITE,
    };
    (SETTING.to_owned(), kind.to_owned())
}

/// The settings that a statement is run under. The bodies of functions were checked at the
/// statement's node, as far as its user wanted: on that node they may name temporary tables.
pub fn settings_of(statement: &Statement) -> impl Iterator<Item = (&str, &str)> {
    let all = statement.settings.iter();
    all.filter(|(name, _)| !name.starts_with("braid."))
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .chain([("check_function_bodies", "off")])
}

fn kind_of(statement: &Statement) -> Option<&str> {
    let mut settings = statement.settings.iter();
    let found = settings.find(|(name, _)| name == SETTING);
    found.map(|(_, kind)| kind.as_str())
}

/// Whether a statement is one.
#[must_use]
pub fn is_intent(statement: &Statement) -> bool {
    kind_of(statement).is_some()
}

/// Keeps those lines that the statement itself has changed: no lock kept others away meanwhile.
pub(super) fn keep_own_lines(what: Alone, tables: &mut [StatementTable]) {
    let prefix = match what {
        Alone::CreateIndex { .. } | Alone::DropIndex => "index ",
        Alone::Detach => "parent ",
        Alone::Validate => "constraint ",
        Alone::Rewrite => "-",
    };
    for table in tables {
        table.removed.retain(|line| line.starts_with(prefix));
        table.added.retain(|line| line.starts_with(prefix));
    }
}

/// The text of CREATE INDEX CONCURRENTLY for an index whose name PostgreSQL has chosen.
pub(super) fn with_name(tables: &[StatementTable]) -> Option<String> {
    let mut lines = tables.iter().flat_map(|table| &table.added);
    let definition = lines.next()?.split_once('\t')?.1;
    let (before, after) = definition.split_once(" INDEX ")?;
    Some(format!("{before} INDEX CONCURRENTLY {after}"))
}

/// The object that a line of a table's shape is about, with the table. Statements about one object
/// are run in their order.
fn object(state: &TableState, line: &str) -> String {
    let key = key(line);
    // A table leaves one parent before it gets another.
    let key = if key.starts_with("parent ") {
        "parent"
    } else {
        key
    };
    format!("{}.{} {key}", state.namespace, state.name)
}

fn objects(table: &StatementTable, lines: &[String]) -> Vec<String> {
    let state = table.before.as_ref().or(table.after.as_ref());
    state.map_or_else(Vec::new, |state| {
        lines.iter().map(|line| object(state, line)).collect()
    })
}

/// A table's name in SQL.
fn quoted(state: &TableState) -> String {
    format!(
        "{}.{}",
        quote_identifier(&state.namespace),
        quote_identifier(&state.name)
    )
}

fn tables_of(statement: &Statement) -> Vec<String> {
    let states = statement.tables.iter();
    states
        .flat_map(|table| table.before.iter().chain(&table.after))
        .map(|state| format!("{}.{}", state.namespace, state.name))
        .collect()
}

fn read(digits: &str) -> Option<Statement> {
    Statement::read(&hex::decode(digits)?).ok()
}

/// Notes an intent that has come. In a transaction.
pub fn record(statement: &Statement, content: &[u8], mut entry: Entry<'_>) {
    let about: Vec<String> = statement
        .tables
        .iter()
        .flat_map(|table| [objects(table, &table.removed), objects(table, &table.added)])
        .flatten()
        .collect();
    if kind_of(statement) == Some(DROP_INDEX) {
        cancel_those_that_create(&about);
    }
    entry.state = "waiting";
    note(statement, &entry);
    owners_query(
        "insert into braid.ddl_intent (ddl_id, content, objects, relations, creates) values ($1::uuid, $2, $3::text[], $4::oid[], $5::boolean)",
        &[
            Some(&statement.uuid()),
            Some(&hex::encode(content)),
            Some(&array_literal(&about)),
            Some(&list(&oids_of(&statement.tables))),
            Some(&(kind_of(statement) == Some(CREATE_INDEX)).to_string()),
        ],
    );
    wake::manager_at_commit();
}

/// Cancels intents whose index a later statement drops.
fn cancel_those_that_create(about: &[String]) {
    owners_query(
        &format!(
            "with gone as (update braid.ddl_entry e set state = 'cancelled', reason = 'a later statement drops the index' \
               from braid.ddl_intent i where i.ddl_id = e.ddl_id and {OPEN} and i.creates and i.objects && $1::text[] returning i.pid) \
             select pg_cancel_backend(a.pid) from gone join {WORKERS} a using (pid)"
        ),
        &[Some(&array_literal(about))],
    );
}

/// Whether PostgreSQL refuses a statement while constraints of its tables, or of the tables below
/// them, are to be validated. It makes no primary key and no identity of a column whose NOT NULL is
/// to be validated, nor another NOT NULL. A table that becomes a child or a partition must have
/// valid constraints; a foreign key that is not valid would get a second one beside it.
fn needs_valid(statement: &Statement, table: &StatementTable) -> bool {
    table.added.iter().any(|line| {
        line.contains("\tPRIMARY KEY") || line.contains(" identity ") || line.starts_with("parent ")
    }) || statement.tag == "ALTER TABLE" && statement.text.to_lowercase().contains("not null")
}

/// Before a statement is run that is no intent: cancels intents whose result it drops, has those
/// that run about its tables begin anew later, and waits for those whose result it needs. In a
/// transaction that has not locked the tables yet.
///
/// # Errors
/// 40001 if it has to wait.
pub fn make_way(statement: &Statement) -> Result<(), PgError> {
    if owners_query("select 1 from braid.ddl_intent limit 1", &[]).is_empty() {
        return Ok(());
    }
    let found = detached_before(statement);
    if let (Some(text), Some(state)) = (found.get(0, 0), found.get(0, 1)) {
        return Err(waits_for(text, state));
    }
    for table in &statement.tables {
        let (removed, added) = (objects(table, &table.removed), objects(table, &table.added));
        if table.after.is_some() && added.is_empty() {
            cancel_those_that_create(&removed);
        }
        let needed: Vec<String> = if added.is_empty() {
            Vec::new()
        } else {
            removed.into_iter().chain(added).collect()
        };
        // Constraints that a child has already are merged with the parent's.
        let constraints: Vec<String> = table
            .added
            .iter()
            .filter_map(|line| Some(key(line).strip_prefix("constraint ")?.to_owned()))
            .collect();
        // A statement has the name that the table had at its time.
        let renamed = match (&table.before, &table.after) {
            (Some(was), Some(is)) if (&was.namespace, &was.name) != (&is.namespace, &is.name) => {
                Some(quoted(was))
            }
            _ => None,
        };
        let found = owners_query(
            &format!(
                "select e.statement, e.state from braid.ddl_entry e join braid.ddl_intent i using (ddl_id) \
                 where {OPEN} and {IS_ABOUT} and (i.objects && $1::text[] or to_regclass($2)::oid = any (i.relations) \
                   or not i.creates and exists (select from pg_constraint c \
                     where c.conrelid = any (i.relations) and not c.convalidated and c.conrelid = any ({BELOW}) \
                       and ($3::boolean or format('%I', c.conname) = any ($5::text[])))) \
                 order by i.place limit 1"
            ),
            &[
                Some(&array_literal(&needed)),
                renamed.as_deref(),
                Some(&needs_valid(statement, table).to_string()),
                Some(&list(&oids_of(&statement.tables))),
                Some(&array_literal(&constraints)),
            ],
        );
        if let (Some(text), Some(state)) = (found.get(0, 0), found.get(0, 1)) {
            return Err(waits_for(text, state));
        }
    }
    // A statement may name an index and leave its definition as it is, as ALTER INDEX ATTACH
    // PARTITION does.
    let found = owners_query(
        &format!(
            "select e.statement, e.state from braid.ddl_entry e join braid.ddl_intent i using (ddl_id) \
             where {OPEN} and i.creates and i.relations && $1::oid[] and exists (select from unnest(i.objects) o \
               where position(lower(trim(both '\"' from split_part(o, ' index ', 2))) in lower($2)) > 0) \
             order by i.place limit 1"
        ),
        &[
            Some(&list(&oids_of(&statement.tables))),
            Some(&statement.text),
        ],
    );
    if let (Some(text), Some(state)) = (found.get(0, 0), found.get(0, 1)) {
        return Err(waits_for(text, state));
    }
    owners_query(
        &format!(
            "select pg_cancel_backend(a.pid) from braid.ddl_entry e join braid.ddl_intent i using (ddl_id) join {WORKERS} a using (pid) \
             where e.state = 'running' and e.table_names && $1::text[]"
        ),
        &[Some(&array_literal(&tables_of(statement)))],
    );
    Ok(())
}

fn waits_for(text: &str, state: &str) -> PgError {
    PgError::new(
        SqlState::SerializationFailure,
        "a statement from the provider waits for an earlier one that this node runs by itself",
    )
    .with_detail(format!("The earlier one is {state}: {text}"))
    .with_hint("See braid.ddl_log. braid.retry_ddl runs the earlier one now.")
}

/// Returns the statement that is still to detach a partition on this node, and its state, if a
/// later statement changes, drops or adds to the same tables. A partition that is still attached
/// would be altered or dropped with its parent, or would prevent another one from being attached.
fn detached_before(statement: &Statement) -> Rows {
    let changes = |table: &&StatementTable| {
        table.after.is_none() || !(table.added.is_empty() && table.removed.is_empty())
    };
    let changed: Vec<StatementTable> = statement.tables.iter().filter(changes).cloned().collect();
    let lines = changed.iter().flat_map(|table| &table.added);
    let parents: Vec<String> = lines
        .filter_map(|line| Some(key(line).strip_prefix("parent ")?.to_owned()))
        .collect();
    // Statements that drop tables without naming them.
    let drops = [
        "DROP SCHEMA",
        "DROP OWNED",
        "DROP EXTENSION",
        "DROP TYPE",
        "DROP ACCESS METHOD",
    ];
    owners_query(
        &format!(
            "select e.statement, e.state from braid.ddl_entry e join braid.ddl_intent i using (ddl_id) \
             where {OPEN} and {IS_ABOUT} and not i.creates and exists (select from unnest(i.objects) o where o like '% parent') \
               and ($3::boolean or i.relations && ($1::oid[] || array(select to_regclass(p)::oid from unnest($2::text[]) p))) \
             order by i.place limit 1"
        ),
        &[
            Some(&list(&oids_of(&changed))),
            Some(&array_literal(&parents)),
            Some(&drops.contains(&statement.tag.as_str()).to_string()),
        ],
    )
}

/// The shape that a table of this database will have when its intents are done; `None` if no table
/// has the name.
#[must_use]
pub fn expected(state: &TableState) -> Option<Shape> {
    let mut shape = shape_of(state)?;
    let name = format!("{}.{}", state.namespace, state.name);
    let found = owners_query(
        &format!(
            "select i.content from braid.ddl_entry e join braid.ddl_intent i using (ddl_id) \
             where {OPEN} and $1 = any (e.table_names) \
               and (i.relations = '{{}}' or to_regclass($2)::oid = any (i.relations)) order by i.place"
        ),
        &[Some(&name), Some(&quoted(state))],
    );
    if found.is_empty() {
        return Some(shape);
    }
    let intents = (0..found.len()).filter_map(|row| read(found.get(row, 0)?));
    for table in intents.flat_map(|statement| statement.tables) {
        let is_it =
            |known: &TableState| known.namespace == state.namespace && known.name == state.name;
        if table.after.as_ref().is_some_and(is_it) {
            shape.lines.retain(|line| !table.removed.contains(line));
            for line in table.added {
                if !shape.lines.contains(&line) {
                    shape.lines.push(line);
                }
            }
        }
    }
    // As table_shape sorts them.
    shape.lines.sort();
    let found = owners_query("select md5($1)", &[Some(&shape.lines.join("\n"))]);
    shape.digest = found.get(0, 0).unwrap_or_default().to_owned();
    Some(shape)
}

/// An intent that is to be run.
#[derive(Debug)]
pub struct Due {
    /// The intent's statement.
    pub statement: Statement,
    /// Subscription that has brought it.
    pub subscription: String,
    /// An attempt of this node has begun to create the index: it is not somebody else's.
    pub tried: bool,
}

/// The next step of an intent.
#[derive(Debug)]
pub enum Verdict {
    /// The catalog has the intent's result.
    Done(&'static str),
    /// The object of the intent is gone.
    Skipped(&'static str),
    /// This statement is to be run.
    Run(String),
}

/// How many milliseconds from now the next intent is due; `None` if there is none to run. In a
/// transaction.
#[must_use]
pub fn due_in() -> Option<u64> {
    next()?.1.parse().ok()
}

/// The next intent, and how long it waits. One waits for earlier ones about the same object.
fn next() -> Option<(String, String)> {
    let open_before = OPEN.replace("e.", "e2.");
    let found = owners_query(
        &format!(
            "select i.ddl_id, ceil(greatest(0, coalesce(extract(epoch from i.retry_at - clock_timestamp()) * 1000, 0)))::bigint \
             from braid.ddl_entry e join braid.ddl_intent i using (ddl_id) where {OPEN} \
               and not exists (select from braid.ddl_intent i2 join braid.ddl_entry e2 using (ddl_id) \
                 where i2.place < i.place and i2.objects && i.objects and {open_before}) \
             order by 2, i.place limit 1"
        ),
        &[],
    );
    Some((found.get(0, 0)?.to_owned(), found.get(0, 1)?.to_owned()))
}

/// Takes the next intent that is due. In a transaction, by the only worker that runs intents.
#[must_use]
pub fn take() -> Option<Due> {
    let (id, _) = next().filter(|(_, wait)| wait == "0")?;
    let found = owners_query(
        &format!(
            "with taken as (update braid.ddl_entry e set state = 'running' where ddl_id = $1::uuid and {OPEN} returning ddl_id, subscription_name) \
             update braid.ddl_intent i set attempts = attempts + 1, since = clock_timestamp(), pid = pg_backend_pid() from taken t \
             where i.ddl_id = t.ddl_id returning i.content, t.subscription_name, i.tried"
        ),
        &[Some(&id)],
    );
    Some(Due {
        statement: read(found.get(0, 0)?)?,
        subscription: found.get(0, 1).unwrap_or_default().to_owned(),
        tried: found.get(0, 2) == Some("t"),
    })
}

fn key(line: &str) -> &str {
    line.split_once('\t').map_or(line, |(key, _)| key)
}

/// The table that an intent changes, with its name before the intent. If an intent changes no
/// shape, the first one.
fn changed_table(statement: &Statement) -> Option<(&StatementTable, &TableState)> {
    let changes = |table: &&StatementTable| !(table.added.is_empty() && table.removed.is_empty());
    let mut tables = statement.tables.iter();
    let table = tables.clone().find(changes).or_else(|| tables.next())?;
    Some((table, table.before.as_ref().or(table.after.as_ref())?))
}

/// The index that an intent creates or drops: its name in SQL, with its schema.
fn index_of(statement: &Statement) -> Option<String> {
    let (table, state) = changed_table(statement)?;
    let line = table.added.iter().chain(&table.removed).next()?;
    let name = key(line).strip_prefix("index ")?;
    Some(format!("{}.{name}", quote_identifier(&state.namespace)))
}

/// Whether an index is valid; `None` if no relation has the name. In a transaction.
fn is_valid(index: &str) -> Option<bool> {
    let found = owners_query(
        "select coalesce(i.indisvalid, true) from pg_class c left join pg_index i on i.indexrelid = c.oid where c.oid = to_regclass($1)",
        &[Some(index)],
    );
    found.get(0, 0).map(|valid| valid == "t")
}

/// Drops the index that an attempt at an intent has left; `None` if there is none. In a
/// transaction.
#[must_use]
pub fn drop_of_rest(due: &Due) -> Option<String> {
    let creates = due.tried && kind_of(&due.statement) == Some(CREATE_INDEX);
    let index = index_of(&due.statement).filter(|_| creates)?;
    (is_valid(&index) == Some(false)).then(|| format!("DROP INDEX CONCURRENTLY IF EXISTS {index}"))
}

/// Decides about an intent by the catalog. In a transaction.
#[must_use]
pub fn judge(due: &mut Due) -> Verdict {
    let statement = &due.statement;
    let Some((table, state)) = changed_table(statement) else {
        return Verdict::Run(statement.text.clone());
    };
    if is_about_nothing(statement) {
        return Verdict::Skipped("the table is gone");
    }
    let Some(here) = shape_of(state) else {
        // A table that has another name now is no reason to leave the statement out: it fails.
        return Verdict::Run(statement.text.clone());
    };
    let has = |line: &String| here.lines.contains(line);
    let has_key = |line: &String| here.lines.iter().any(|other| key(other) == key(line));
    let run = Verdict::Run(statement.text.clone());
    match kind_of(statement) {
        Some(CREATE_INDEX) => match index_of(statement) {
            None => run,
            Some(index) => match is_valid(&index) {
                Some(true) if table.added.iter().all(has) => {
                    Verdict::Done("the index was there already")
                }
                Some(_) => run,
                None => {
                    // An object that has the name afterwards was created by this attempt.
                    let id = statement.uuid();
                    owners_query(
                        "update braid.ddl_intent set tried = true where ddl_id = $1::uuid",
                        &[Some(&id)],
                    );
                    due.tried = true;
                    run
                }
            },
        },
        Some(DROP_INDEX) if !table.removed.iter().any(has_key) => {
            Verdict::Done("the index was gone already")
        }
        // A NOT NULL constraint has a line only until it is validated.
        Some(VALIDATE) if table.added.is_empty() && table.removed.is_empty() => run,
        Some(VALIDATE) if table.added.is_empty() && !table.removed.iter().any(has_key) => {
            Verdict::Done("the constraint was validated already")
        }
        Some(VALIDATE) if !table.added.is_empty() && table.added.iter().all(has) => {
            Verdict::Done("the constraint was validated already")
        }
        Some(VALIDATE) if !table.added.iter().all(has_key) => {
            Verdict::Skipped("the constraint is gone")
        }
        Some(DETACH) if !table.removed.iter().any(has_key) => {
            Verdict::Done("the partition was detached already")
        }
        Some(DETACH) => half_detached(table, state).map_or(run, Verdict::Run),
        _ => run,
    }
}

/// Whether the tables that an intent is about are gone.
fn is_about_nothing(statement: &Statement) -> bool {
    let id = statement.uuid();
    let found = owners_query(
        &format!("select 1 from braid.ddl_intent i where ddl_id = $1::uuid and not {IS_ABOUT}"),
        &[Some(&id)],
    );
    !found.is_empty()
}

/// The statement that ends a detachment which was cut off.
fn half_detached(table: &StatementTable, state: &TableState) -> Option<String> {
    let partition = quoted(state);
    let pending = owners_query(
        "select 1 from pg_inherits where inhrelid = to_regclass($1) and inhdetachpending",
        &[Some(&partition)],
    );
    let parent = key(table.removed.first()?).strip_prefix("parent ")?;
    (!pending.is_empty())
        .then(|| format!("ALTER TABLE {parent} DETACH PARTITION {partition} FINALIZE"))
}

/// Whether an error of an intent says that its object is gone.
#[must_use]
pub fn is_gone(statement: &Statement, error: &PgError) -> bool {
    matches!(kind_of(statement), Some(REWRITE | VALIDATE))
        && matches!(
            error.sqlstate,
            SqlState::UndefinedTable | SqlState::UndefinedObject | SqlState::InvalidSchemaName
        )
}

/// Whether an intent runs in one transaction, under the limits that a replicated statement has.
#[must_use]
pub fn is_confined(statement: &Statement) -> bool {
    kind_of(statement) == Some(VALIDATE)
}

/// Writes down that an intent is `done` or `skipped`, unless somebody has cancelled it. In a
/// transaction.
pub fn finish(id: &str, state: &str, reason: Option<&str>) {
    owners_query(
        "with ended as (update braid.ddl_entry set state = $2, reason = $3 where ddl_id = $1::uuid and (state = 'running' or $2 = 'done') returning ddl_id) \
         update braid.ddl_intent i set pid = null, retry_at = null, since = clock_timestamp() from ended e where i.ddl_id = e.ddl_id",
        &[Some(id), Some(state), reason],
    );
}

/// Writes down that an attempt has failed. `interrupted`: by a statement that waits for its locks.
/// Returns whether it is to be tried again; not if somebody has cancelled the intent. In a
/// transaction.
#[must_use]
pub fn fail(id: &str, error: &str, interrupted: bool) -> bool {
    let (state, most) = if interrupted {
        ("waiting", "1")
    } else {
        ("failed", "300")
    };
    let found = owners_query(
        "update braid.ddl_entry set state = $2, reason = $3 where ddl_id = $1::uuid and state = 'running' returning 1",
        &[Some(id), Some(state), Some(error)],
    );
    owners_query(
        "update braid.ddl_intent set pid = null, since = clock_timestamp(), \
           retry_at = clock_timestamp() + make_interval(secs => least($2::float8, power(2, least(attempts, 20) - 1))) where ddl_id = $1::uuid",
        &[Some(id), Some(most)],
    );
    !found.is_empty()
}

/// Cancels an intent. Returns its state from before; `None` if this node does not know it as one.
/// In a transaction.
#[must_use]
pub fn cancel(id: &str) -> Option<String> {
    let before = state_of(id)?;
    if matches!(before.as_str(), "waiting" | "running" | "failed") {
        owners_query(
            &format!(
                "with gone as (update braid.ddl_entry set state = 'cancelled', reason = null where ddl_id = $1::uuid returning ddl_id), \
                   noted as (update braid.ddl_intent i set since = clock_timestamp() from gone g where i.ddl_id = g.ddl_id returning i.pid) \
                 select pg_cancel_backend(a.pid) from noted join {WORKERS} a using (pid)"
            ),
            &[Some(id)],
        );
    }
    Some(before)
}

/// Has an intent that has failed, or was cancelled, run at once. Returns its state from before, as
/// `cancel` does. In a transaction.
#[must_use]
pub fn retry(id: &str) -> Option<String> {
    let before = state_of(id)?;
    if matches!(before.as_str(), "waiting" | "cancelled" | "failed") {
        owners_query(
            "with due as (update braid.ddl_entry set state = 'waiting' where ddl_id = $1::uuid returning ddl_id) \
             update braid.ddl_intent i set since = clock_timestamp(), retry_at = null from due d where i.ddl_id = d.ddl_id",
            &[Some(id)],
        );
        wake::manager_at_commit();
    }
    Some(before)
}

/// The state of an intent, which nobody else changes until the transaction ends.
fn state_of(id: &str) -> Option<String> {
    let found = owners_query(
        "select e.state from braid.ddl_entry e join braid.ddl_intent i using (ddl_id) where ddl_id = $1::uuid for update",
        &[Some(id)],
    );
    found.get(0, 0).map(str::to_owned)
}
