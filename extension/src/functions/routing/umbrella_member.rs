//! The parts of `braid.add_umbrella` and `braid.remove_umbrella` that each member carries out,
//! under the role of the connection string: each in a transaction of its own.
//!
//! An umbrella has the owner of its table and, when it is made, the table's rights. A role that
//! reads or writes it connects to other nodes as itself: a user mapping never names another role.

use braid_bgworker::sql_text::{quote_identifier, quote_literal};
use braid_node::routing::{self, Agreed, Known};
use braid_node::routing_guard;
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::libpq;
use braid_postgres::syscache;
use braid_routing::{Expressions, NodeSet, RoutedTable, TableName};
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome};
use super::super::group::peer::check_peer;
use super::super::{required, run, text};
use super::look::table_of;
use super::members::{LOCK_TIMEOUT, Stage, find_table, shown, table_name, wait_for};

/// The schema of all umbrellas.
const SCHEMA: &str = "everywhere";
/// The longest name of PostgreSQL's, in bytes.
const NAME_LIMIT: usize = 63;

/// A partition of an umbrella.
#[derive(Debug)]
struct Partition {
    /// The relation, as SQL.
    relation: String,
    /// The number of its set.
    set: String,
    /// The foreign server; `None`: the plain table.
    server: Option<String>,
}

/// An umbrella of this node.
#[derive(Debug)]
pub(super) struct Umbrella {
    table: TableName,
    /// The umbrella, as SQL.
    relation: String,
    partitions: Vec<Partition>,
}

impl Umbrella {
    /// The umbrella of a table, if it has one.
    ///
    /// # Errors
    /// 42P07 if another relation has its name.
    pub(super) fn find(table: &TableName) -> Outcome<Option<Self>> {
        let (_, name) = syscache::relation_name(find_table(&table.to_string())?);
        let key = format!("place({}::text,", quote_literal(&table.to_string()));
        let found = query(
            "select c.oid, c.relkind = 'p' and pg_catalog.strpos(pg_catalog.pg_get_partkeydef(c.oid), $2) > 0 \
               from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
              where n.nspname = 'everywhere' and c.relname = $1::name",
            &[Some(&name), Some(&key)],
        );
        let Some(oid) = found.get(0, 0) else {
            return Ok(None);
        };
        let relation = format!("{SCHEMA}.{}", quote_identifier(&name));
        if found.get(0, 1) != Some("t") {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_DUPLICATE_TABLE,
                format!("{relation} exists, and is not the umbrella of table {table}"),
            )
            .hint("Two tables of one name in different schemas cannot both have an umbrella. Drop or rename what is there."));
        }
        let rows = query(
            "select pg_catalog.format('%I.%I', n.nspname, c.relname), \
                    (pg_catalog.regexp_match(pg_catalog.pg_get_expr(c.relpartbound, c.oid), '\\((\\d+)\\)'))[1], s.srvname \
               from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid \
               join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
               left join pg_catalog.pg_foreign_table f on f.ftrelid = c.oid \
               left join pg_catalog.pg_foreign_server s on s.oid = f.ftserver \
              where i.inhparent = $1::oid order by 1",
            &[Some(oid)],
        );
        let partitions = rows.iter().filter_map(|row| match row {
            [Some(relation), set, server] => Some(Partition {
                relation: relation.clone(),
                set: set.clone().unwrap_or_default(),
                server: server.clone(),
            }),
            _ => None,
        });
        Ok(Some(Self {
            table: table.clone(),
            relation,
            partitions: partitions.collect(),
        }))
    }

    fn partition(&self, set: &NodeSet) -> Option<&Partition> {
        let number = set.id.0.to_string();
        self.partitions
            .iter()
            .find(|partition| partition.set == number)
    }

    /// Whether it has the partitions that it should have.
    pub(super) fn is_in_step(&self, known: &Known) -> bool {
        let Some(routed) = known.table(&self.table) else {
            return true;
        };
        let wanted = wanted(&known.agreed, routed);
        wanted.len() == self.partitions.len()
            && wanted.iter().all(|set| self.partition(set).is_some())
    }
}

/// The sets for which an umbrella has partitions: those that have shards, or nodes.
fn wanted<'r>(agreed: &Agreed, routed: &'r RoutedTable) -> Vec<&'r NodeSet> {
    let map = routed.map();
    let has_shards = |set: &NodeSet| {
        let mut shards = map.shards().all();
        shards.any(|shard| map.holders(shard).any(|holder| holder == set.id))
    };
    let has_nodes = |set: &NodeSet| set.nodes.iter().any(|node| agreed.place(*node).is_some());
    let sets = map.sets().iter();
    sets.filter(|set| has_shards(set) || has_nodes(set))
        .collect()
}

/// Checks that a routed table can have an umbrella.
///
/// # Errors
/// 0A000 with a hint.
pub(super) fn check_table(relation: pg_sys::Oid) -> Outcome<()> {
    let found = query(
        "select c.relrowsecurity, \
                (select pg_catalog.string_agg(a.attname, ', ' order by a.attnum) from pg_catalog.pg_attribute a \
                  where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attidentity <> ''), \
                (select pg_catalog.string_agg(p.pubname, ', ' order by p.pubname) from pg_catalog.pg_publication p \
                  where p.pubviaroot and (p.puballtables or exists (select from pg_catalog.pg_publication_namespace s \
                    join pg_catalog.pg_namespace n on n.oid = s.pnnspid where s.pnpubid = p.oid and n.nspname = 'everywhere'))) \
           from pg_catalog.pg_class c where c.oid = $1::oid",
        &[Some(&relation.to_u32().to_string())],
    );
    let table = table_of(relation)?;
    let refuse = |why: String, hint: &str| {
        Err(Failure::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("cannot make an umbrella for table {table}: {why}"),
        )
        .hint(hint))
    };
    if found.get(0, 0) == Some("t") {
        return refuse(
            "it has row-level security".to_owned(),
            "Policies of the table would not hold for a query of the umbrella. Disable row-level security, or go without the umbrella.",
        );
    }
    if let Some(columns) = found.get(0, 1) {
        return refuse(
            format!("identity columns {columns}"),
            "PostgreSQL attaches no such table. Use a sequence as a default: ALTER TABLE .. ALTER .. DROP IDENTITY, then SET DEFAULT.",
        );
    }
    if let Some(publications) = found.get(0, 2) {
        return refuse(
            format!("publications {publications} publish partitions as their root"),
            "Changes would be sent under the umbrella's name. Run ALTER PUBLICATION .. SET (publish_via_partition_root = false).",
        );
    }
    Ok(())
}

/// braid.group_umbrella_make(relation text, users text)
///
/// Makes the umbrella of a routed table at this node, or brings it in step with the table's sets.
#[pg_extern(sql = false)]
fn group_umbrella_make(relation: Option<Text>, users: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let name = table_name(&required(text(relation), "relation")?)?;
        let users = required(text(users), "users")?;
        let known = wait_for(&name, &[Stage::Prepared, Stage::Open])?;
        let Some(routed) = known.table(&name) else {
            return Ok(());
        };
        prepare_session();
        let table = find_table(&name.to_string())?;
        check_table(table)?;
        create_fdw();
        create_schema();
        if Umbrella::find(&name)?.is_none() {
            create(table, &name, routed.expressions());
        }
        let Some(umbrella) = Umbrella::find(&name)? else {
            return Err(Failure::state(format!(
                "the umbrella of table {name} is gone"
            )));
        };
        routing_guard::allowed(|| {
            routing::attaching(|| step(&umbrella, table, &known.agreed, routed))
        })?;
        add_mappings(&users);
        Ok(())
    });
}

/// Statements that only concern this node.
fn prepare_session() {
    query(LOCK_TIMEOUT, &[]);
    query("set local braid.ddl_replication = off", &[]);
    query("set local client_min_messages = warning", &[]);
}

/// Creates the extension where a user's own statement would: the function's search path is no
/// place.
fn create_fdw() {
    let found = query("select pg_catalog.to_regnamespace('public')", &[]);
    let place = if found.get(0, 0).is_some() {
        " schema public"
    } else {
        ""
    };
    query(
        &format!("create extension if not exists postgres_fdw{place}"),
        &[],
    );
}

fn create_schema() {
    let found = query("select pg_catalog.to_regnamespace('everywhere')", &[]);
    if found.get(0, 0).is_some() {
        return;
    }
    query("create schema everywhere", &[]);
    query(
        "comment on schema everywhere is 'umbrellas of routed tables, which Braid has made'",
        &[],
    );
    // The rights of each table decide.
    query("grant usage on schema everywhere to public", &[]);
}

fn create(table: pg_sys::Oid, name: &TableName, expressions: &Expressions) {
    let Expressions {
        tenant,
        record,
        created,
    } = expressions;
    let plain = shown(table);
    let (_, short) = syscache::relation_name(table);
    let umbrella = format!("{SCHEMA}.{}", quote_identifier(&short));
    query(
        &format!(
            "create table {umbrella} (like {plain} including defaults including generated including comments) \
               partition by list (braid.place({}, ({tenant}), ({record}), ({created})))",
            quote_literal(&name.to_string())
        ),
        &[],
    );
    query(
        &format!(
            "comment on table {umbrella} is {}",
            quote_literal(&format!("rows of {name} at all nodes"))
        ),
        &[],
    );
    own_as(table, "table", &umbrella);
    copy_rights(table, &umbrella);
}

/// Gives a relation the owner of a table.
fn own_as(table: pg_sys::Oid, kind: &str, relation: &str) {
    let found = query(
        "select pg_catalog.pg_get_userbyid(relowner) from pg_catalog.pg_class where oid = $1::oid",
        &[Some(&table.to_u32().to_string())],
    );
    if let Some(owner) = found.get(0, 0) {
        query(
            &format!(
                "alter {kind} {relation} owner to {}",
                quote_identifier(owner)
            ),
            &[],
        );
    }
}

/// Grants the rights to an umbrella that a table and its columns have.
fn copy_rights(table: pg_sys::Oid, umbrella: &str) {
    let found = query(
        "select pg_catalog.format('grant %s%s on %s to %s%s', g.privilege_type, ' (' || pg_catalog.quote_ident(g.attname) || ')', $2, \
                  case g.grantee when 0 then 'public' else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(g.grantee)) end, \
                  case when g.is_grantable then ' with grant option' else '' end) \
           from (select x.*, null::name as attname, c.relowner from pg_catalog.pg_class c, pg_catalog.aclexplode(c.relacl) x where c.oid = $1::oid \
                 union all \
                 select x.*, a.attname, c.relowner from pg_catalog.pg_class c join pg_catalog.pg_attribute a on a.attrelid = c.oid, pg_catalog.aclexplode(a.attacl) x \
                  where c.oid = $1::oid and not a.attisdropped) g \
          where g.grantee <> g.relowner",
        &[Some(&table.to_u32().to_string()), Some(umbrella)],
    );
    for row in found.iter() {
        if let [Some(grant)] = row {
            query(grant, &[]);
        }
    }
}

/// Attaches the partitions that are missing, detaches others, and sets where the servers are.
fn step(
    umbrella: &Umbrella,
    table: pg_sys::Oid,
    agreed: &Agreed,
    routed: &RoutedTable,
) -> Outcome<()> {
    let wanted = wanted(agreed, routed);
    let own = routed.map().set_of(agreed.me);
    let is_wanted = |partition: &&Partition| {
        let mut sets = wanted.iter();
        sets.any(|set| {
            let is_own = Some(set.id) == own;
            set.id.0.to_string() == partition.set && is_own == partition.server.is_none()
        })
    };
    for partition in umbrella
        .partitions
        .iter()
        .filter(|partition| !is_wanted(partition))
    {
        remove_partition(umbrella, partition);
    }
    let kept: Vec<&Partition> = umbrella.partitions.iter().filter(is_wanted).collect();
    for set in wanted {
        let number = set.id.0.to_string();
        let there = kept.iter().find(|partition| partition.set == number);
        if Some(set.id) == own {
            if there.is_none() {
                query(
                    &format!(
                        "alter table {} attach partition {} for values in ({number})",
                        umbrella.relation,
                        shown(table)
                    ),
                    &[],
                );
            }
            continue;
        }
        let Some(settings) = way_to(agreed, set) else {
            continue;
        };
        let server = match there.and_then(|partition| partition.server.clone()) {
            Some(server) => server,
            None => server_name(agreed, set),
        };
        see_to_server(&server, &settings);
        if there.is_none() {
            create_partition(umbrella, table, set, &server, agreed);
        }
    }
    drop_unused_servers();
    Ok(())
}

fn remove_partition(umbrella: &Umbrella, partition: &Partition) {
    query(
        &format!(
            "alter table {} detach partition {}",
            umbrella.relation, partition.relation
        ),
        &[],
    );
    if partition.server.is_some() {
        query(&format!("drop foreign table {}", partition.relation), &[]);
    }
}

/// How to connect to the first node of a set that answers. `None` if all have been removed.
fn way_to(agreed: &Agreed, set: &NodeSet) -> Option<Vec<(String, String)>> {
    let dsn = agreed.dsn(&set.nodes)?;
    Some(libpq::connection_settings(&dsn))
}

/// The names of a set's nodes.
fn names(agreed: &Agreed, set: &NodeSet) -> Vec<String> {
    let there = set
        .nodes
        .iter()
        .copied()
        .filter(|node| agreed.place(*node).is_some());
    agreed.names(&there.collect::<Vec<_>>())
}

fn server_name(agreed: &Agreed, set: &NodeSet) -> String {
    let name = format!("{SCHEMA}_{}", names(agreed, set).join("_"));
    if name.len() <= NAME_LIMIT {
        return name;
    }
    let numbers: Vec<String> = set.nodes.iter().map(|node| node.0.to_string()).collect();
    let mut name = format!("{SCHEMA}_member_{}", numbers.join("_"));
    name.truncate(NAME_LIMIT);
    name
}

fn see_to_server(server: &str, settings: &[(String, String)]) {
    let quoted = quote_identifier(server);
    let found = query(
        "select coalesce(srvoptions, '{}') from pg_catalog.pg_foreign_server where srvname = $1::name",
        &[Some(server)],
    );
    if found.is_empty() {
        query(
            &format!(
                "create server {quoted} foreign data wrapper postgres_fdw options (async_capable 'true', connect_timeout '10')"
            ),
            &[],
        );
    }
    for keyword in ["host", "hostaddr", "port", "dbname"] {
        let value = settings
            .iter()
            .find(|setting| setting.0 == keyword && !setting.1.is_empty())
            .map(|setting| setting.1.as_str());
        let before = query(
            "select o.option_value from pg_catalog.pg_foreign_server s, pg_catalog.pg_options_to_table(s.srvoptions) o \
              where s.srvname = $1::name and o.option_name = $2",
            &[Some(server), Some(keyword)],
        );
        let change = match (before.get(0, 0), value) {
            (before, value) if before == value => continue,
            (None, Some(value)) => format!("add {keyword} {}", quote_literal(value)),
            (Some(_), Some(value)) => format!("set {keyword} {}", quote_literal(value)),
            (_, None) => format!("drop {keyword}"),
        };
        query(&format!("alter server {quoted} options ({change})"), &[]);
    }
}

fn create_partition(
    umbrella: &Umbrella,
    table: pg_sys::Oid,
    set: &NodeSet,
    server: &str,
    agreed: &Agreed,
) {
    let (schema, name) = syscache::relation_name(table);
    let nodes = names(agreed, set).join("+");
    let mut short = format!("{name}@{nodes}");
    if short.len() > NAME_LIMIT {
        let end = format!("@set {}", set.id.0);
        short = encoding_prefix(&name, NAME_LIMIT.saturating_sub(end.len())).to_owned() + &end;
    }
    let relation = format!("{SCHEMA}.{}", quote_identifier(&short));
    query(
        &format!(
            "create foreign table {relation} partition of {} for values in ({}) server {} options (schema_name {}, table_name {})",
            umbrella.relation,
            set.id.0,
            quote_identifier(server),
            quote_literal(&schema),
            quote_literal(&name)
        ),
        &[],
    );
    own_as(table, "foreign table", &relation);
}

/// The longest part of a text that has so many bytes.
fn encoding_prefix(text: &str, limit: usize) -> &str {
    let mut end = limit.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// Drops servers of umbrellas that no table uses any more, with their user mappings.
fn drop_unused_servers() {
    let found = query(
        "select s.srvname from pg_catalog.pg_foreign_server s join pg_catalog.pg_foreign_data_wrapper w on w.oid = s.srvfdw \
          where s.srvname like 'everywhere\\_%' and w.fdwname = 'postgres_fdw' \
            and not exists (select from pg_catalog.pg_foreign_table f where f.ftserver = s.oid)",
        &[],
    );
    for row in found.iter() {
        if let [Some(server)] = row {
            query(
                &format!("drop server {} cascade", quote_identifier(server)),
                &[],
            );
        }
    }
}

/// The servers of umbrellas.
const SERVERS: &str = "select s.oid, s.srvname from pg_catalog.pg_foreign_server s \
      join pg_catalog.pg_foreign_data_wrapper w on w.oid = s.srvfdw \
     where s.srvname like 'everywhere\\_%' and w.fdwname = 'postgres_fdw'";

/// Creates the user mappings that are missing, for roles of this node.
fn add_mappings(users: &str) {
    let found = query(
        &format!(
            "select pg_catalog.format('create user mapping for %I server %I options (%s)', r.rolname, s.srvname, \
                      (select pg_catalog.string_agg(pg_catalog.format('%I %L', pg_catalog.split_part(o, '=', 1), \
                               pg_catalog.substr(o, pg_catalog.strpos(o, '=') + 1)), ', ') \
                         from pg_catalog.jsonb_array_elements_text(u -> 'options') o)) \
               from pg_catalog.jsonb_array_elements($1::jsonb) u join pg_catalog.pg_roles r on r.rolname = u ->> 'role' \
              cross join ({SERVERS}) s \
              where not exists (select from pg_catalog.pg_user_mapping m where m.umuser = r.oid and m.umserver = s.oid) \
                and exists (select from pg_catalog.jsonb_array_elements_text(u -> 'options') o where o = 'user=' || r.rolname)"
        ),
        &[Some(users)],
    );
    for row in found.iter() {
        if let [Some(statement)] = row {
            query(statement, &[]);
        }
    }
}

/// braid.group_umbrella_drop(relation text)
#[pg_extern(sql = false)]
fn group_umbrella_drop(relation: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let name = table_name(&required(text(relation), "relation")?)?;
        let Some(umbrella) = Umbrella::find(&name)? else {
            return Ok(());
        };
        prepare_session();
        routing_guard::allowed(|| {
            let plain = |partition: &&Partition| partition.server.is_none();
            for partition in umbrella.partitions.iter().filter(plain) {
                remove_partition(&umbrella, partition);
            }
            query(&format!("drop table {}", umbrella.relation), &[]);
        });
        drop_unused_servers();
        let left = query(
            "select 1 from pg_catalog.pg_class where relnamespace = pg_catalog.to_regnamespace('everywhere')",
            &[],
        );
        if left.is_empty() {
            query("drop schema if exists everywhere", &[]);
        }
        Ok(())
    });
}

/// braid.group_umbrella_user(role text, password text)
///
/// Lets a role connect to the other nodes as itself, with a password or as their pg_hba.conf lets
/// it in without one.
#[pg_extern(sql = false)]
fn group_umbrella_user(role: Option<Text>, password: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let role = required(text(role), "role")?;
        prepare_session();
        forget_user(&role);
        let way = match text(password) {
            Some(password) => format!("password {}", quote_literal(&password)),
            None => "password_required 'false'".to_owned(),
        };
        for row in query(SERVERS, &[]).iter() {
            if let [_, Some(server)] = row {
                query(
                    &format!(
                        "create user mapping for {} server {} options (user {}, {way})",
                        quote_identifier(&role),
                        quote_identifier(server),
                        quote_literal(&role)
                    ),
                    &[],
                );
            }
        }
        Ok(())
    });
}

fn forget_user(role: &str) {
    for row in query(SERVERS, &[]).iter() {
        if let [_, Some(server)] = row {
            query(
                &format!(
                    "drop user mapping if exists for {} server {}",
                    quote_identifier(role),
                    quote_identifier(server)
                ),
                &[],
            );
        }
    }
}

/// braid.group_umbrella_forget(role text)
#[pg_extern(sql = false)]
fn group_umbrella_forget(role: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_peer(caller)?;
        let role = required(text(role), "role")?;
        prepare_session();
        forget_user(&role);
        Ok(())
    });
}
