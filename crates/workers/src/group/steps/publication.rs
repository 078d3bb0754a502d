//! Publications of the group: a node that joins has those of the member that it is copied from,
//! with their tables, schemas, columns, row filters and options.
//!
//! A query on the member's catalogs returns the statements that create them. At the joining node
//! the same query shows whether an existing publication differs. Objects are sorted by name, so two
//! publications with the same objects have the same statement.
//!
//! Not for: publications that the group does not name.

use braid_bgworker::sql_text::quote_literal;
use braid_bgworker::sqlstate::SqlState;
use braid_node::subscription::{execute, rows};
use braid_postgres::error::{self, PgError};
use braid_postgres::rows::Rows;
use braid_postgres::server;

use super::peer::Peer;

/// The first major version that can publish generated columns.
const PUBLISHES_GENERATED: u16 = 18;

/// A publication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// Its name.
    pub name: String,
    /// A statement that creates it.
    pub statement: String,
    /// Why it can't be created here, if it can't: a sentence.
    pub problem: Option<&'static str>,
}

/// The question for publications, an array's text. The columns are those that [`read`] expects. It
/// runs on each version of PostgreSQL that Braid supports, without Braid.
#[must_use]
pub fn question(publications: &str) -> String {
    format!(
        r#"
        select p.pubname,
               pg_catalog.format('create publication %I%s with (publish = %L, publish_via_partition_root = %s%s)', p.pubname,
                   case when p.puballtables then ' for all tables' || coalesce(' except (' || case when t.leaves_out then t.tables end || ')', '') else ' for ' || nullif(pg_catalog.concat_ws(', ', t.tables, s.schemas), '') end,
                   pg_catalog.concat_ws(', ', case when p.pubinsert then 'insert' end, case when p.pubupdate then 'update' end,
                       case when p.pubdelete then 'delete' end, case when p.pubtruncate then 'truncate' end),
                   case when p.pubviaroot then 'true' else 'false' end,
                   case when g.generated then ', publish_generated_columns = stored' end),
               g.generated, coalesce(t.leaves_out, false)
          from pg_catalog.pg_publication p
         cross join lateral (select coalesce(pg_catalog.to_jsonb(p) ->> 'pubgencols' = 's', false) as generated) g
         cross join lateral (
                select pg_catalog.string_agg(pg_catalog.format('table only %I.%I%s%s', n.nspname, c.relname,
                           ' (' || (select pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ' order by a.attname::text collate "C")
                                      from pg_catalog.unnest(r.prattrs::int2[]) k (number)
                                      join pg_catalog.pg_attribute a on a.attrelid = r.prrelid and a.attnum = k.number) || ')',
                           ' where (' || pg_catalog.pg_get_expr(r.prqual, r.prrelid) || ')'),
                           ', ' order by n.nspname::text collate "C", c.relname::text collate "C") as tables,
                       pg_catalog.bool_or(coalesce((pg_catalog.to_jsonb(r) ->> 'prexcept')::boolean, false)) as leaves_out
                  from pg_catalog.pg_publication_rel r
                  join pg_catalog.pg_class c on c.oid = r.prrelid join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                 where r.prpubid = p.oid) t
         cross join lateral (
                select pg_catalog.string_agg(pg_catalog.format('tables in schema %I', n.nspname), ', ' order by n.nspname::text collate "C") as schemas
                  from pg_catalog.pg_publication_namespace m join pg_catalog.pg_namespace n on n.oid = m.pnnspid
                 where m.pnpubid = p.oid) s
         where p.pubname = any ({publications}::pg_catalog.name[])
         order by p.pubname::text collate "C""#,
        publications = quote_literal(publications)
    )
}

/// The publications of an answer to [`question`].
#[must_use]
pub fn read<'a>(answer: impl Iterator<Item = &'a [Option<String>]>) -> Vec<Publication> {
    let major = server::major();
    answer
        .filter_map(|row| {
            let is = |place: usize| row.get(place).and_then(Option::as_deref) == Some("t");
            let problem = if is(3) {
                Some("It is for all tables but some, which Braid does not copy.")
            } else if is(2) && major < PUBLISHES_GENERATED {
                Some("It publishes generated columns, which this server's version of PostgreSQL does not support.")
            } else {
                None
            };
            Some(Publication {
                name: row.first()?.clone()?,
                statement: row.get(1)?.clone()?,
                problem,
            })
        })
        .collect()
}

/// Creates the group's publications that are missing here as the source has them.
pub(super) fn create_missing(source: &Peer, wanted: &str) -> Result<(), PgError> {
    let there: Rows = source.query(&question(wanted))?;
    error::transaction(|| {
        let missing = rows(
            "select unnest($1::text::name[])::text except select pubname::text from pg_publication",
            &[wanted.into()],
        )?;
        for name in missing
            .into_iter()
            .filter_map(|row| row.into_iter().next()?)
        {
            let found = read(there.iter()).into_iter().find(|p| p.name == name);
            let Some(found) = found else {
                return Err(missing_at_source(&name, source));
            };
            if let Some(problem) = found.problem {
                return Err(PgError::new(
                    SqlState::FeatureNotSupported,
                    format!("publication \"{name}\" cannot be created here"),
                )
                .with_detail(problem)
                .with_hint(format!(
                    "Create it here by hand, or change it at node \"{}\". It is tried again.",
                    source.name
                )));
            }
            execute(&found.statement, &[])?;
        }
        Ok(())
    })
}

fn missing_at_source(name: &str, source: &Peer) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!(
            "node \"{}\" does not have publication \"{name}\" of the group",
            source.name
        ),
    )
    .with_hint("Create it there, as the other members have it. It is tried again.")
}
