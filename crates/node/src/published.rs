//! Queries for the provider about the contents of its publications, as SQL. Run by leaders, copy
//! workers and sessions.
//!
//! The view `pg_publication_tables` computes all tables of a publication for each question, and
//! from PostgreSQL 16 on it locks each of them. Example: at tokyo T has locked a published table,
//! and its commit waits until paris has confirmed it. If paris asked the view about any table, the
//! question would wait for T, and T for paris. So these questions read the catalogs of publications
//! for one table, as `pg_get_publication_tables` does for all (`pg_publication.c`, 15 to 19).
//!
//! The catalogs are read under the snapshot of the query; the view sees them as they are now.

use crate::subscription::publication_literals;

/// Returns a condition: publication `p` lists the relation with OID `oid`, or its schema.
fn lists(oid: &str) -> String {
    // Only PostgreSQL 19 has the column `prexcept`.
    format!(
        "(exists (select from pg_catalog.pg_publication_rel l where l.prpubid = p.oid and l.prrelid = {oid} \
             and not coalesce((pg_catalog.to_jsonb(l) ->> 'prexcept')::bool, false)) \
          or exists (select from pg_catalog.pg_publication_namespace s join pg_catalog.pg_class m on m.relnamespace = s.pnnspid \
             where s.pnpubid = p.oid and m.oid = {oid} and pg_catalog.pg_relation_is_publishable(m.oid)))"
    )
}

/// The partitioned tables that `c` is a partition of, at any depth.
const ANCESTORS: &str = "(with recursive up (oid) as ( \
        select i.inhparent from pg_catalog.pg_inherits i where i.inhrelid = c.oid and c.relispartition and not i.inhdetachpending \
        union all \
        select i.inhparent from up join pg_catalog.pg_class m on m.oid = up.oid and m.relispartition \
          join pg_catalog.pg_inherits i on i.inhrelid = up.oid and not i.inhdetachpending) \
      select oid from up)";

/// Returns a subquery with a row for each of these publications that publishes the table `c`, a row
/// of `pg_class`: name (`pubname`), whether as its root (`pubviaroot`), numbers of the columns that
/// it lists (`attrs`), null for all, the row filter (`qual`), and `gencols`, as in `pg_publication`
/// from PostgreSQL 18 on.
#[must_use]
pub fn of_table(publications: &[String]) -> String {
    let (listed, ancestor_listed) = (lists("c.oid"), lists("up.oid"));
    format!(
        "(select p.pubname, p.pubviaroot, r.prattrs as attrs, r.prqual as qual, pg_catalog.to_jsonb(p) ->> 'pubgencols' as gencols \
            from pg_catalog.pg_publication p \
            left join pg_catalog.pg_publication_rel r on r.prpubid = p.oid and r.prrelid = c.oid and not p.puballtables \
             and not exists (select from pg_catalog.pg_publication_namespace s where s.pnpubid = p.oid and s.pnnspid = c.relnamespace) \
           where p.pubname in ({}) and case \
             when p.puballtables then pg_catalog.pg_relation_is_publishable(c.oid) \
                  and case when p.pubviaroot then not c.relispartition else c.relkind = 'r' end \
                  and not exists (select from pg_catalog.pg_publication_rel e where e.prpubid = p.oid \
                    and (e.prrelid = c.oid or e.prrelid in {ANCESTORS}) and (pg_catalog.to_jsonb(e) ->> 'prexcept')::bool) \
             when p.pubviaroot then {listed} and not exists (select from {ANCESTORS} up where {ancestor_listed}) \
             else c.relkind <> 'p' and ({listed} or exists (select from {ANCESTORS} up where {ancestor_listed})) end)",
        publication_literals(publications)
    )
}

/// Returns an expression: the names of the columns that a row `g` of [`of_table`] publishes of the
/// table `c`, as the view shows them on a server of this version; null for a table without columns.
#[must_use]
pub fn column_names(server_version: i32) -> String {
    let without_list = match server_version {
        // Generated columns are listed, and never sent.
        ..160_000 => "true",
        160_000..180_000 => "a.attgenerated = ''",
        _ => "(a.attgenerated = '' or a.attgenerated = 's' and g.gencols = 's')",
    };
    format!(
        "(select pg_catalog.array_agg(a.attname order by a.attnum) from pg_catalog.pg_attribute a \
           where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped \
             and case when g.attrs is null then {without_list} else a.attnum = any (g.attrs::int2[]) end)"
    )
}

/// Returns a condition: none of these publications publishes an ancestor of the table `c` under
/// whose name the table's changes are sent. One publication may publish a partition and another one
/// its root with `publish_via_partition_root`. Then changes and copy are those of the root.
#[must_use]
pub fn is_not_sent_as_root(publications: &[String]) -> String {
    format!(
        "not exists (select from {ANCESTORS} up join pg_catalog.pg_publication p on p.pubviaroot and p.pubname in ({}) \
           where case when p.puballtables then not exists (select from pg_catalog.pg_publication_rel e \
               where e.prpubid = p.oid and e.prrelid = up.oid and (pg_catalog.to_jsonb(e) ->> 'prexcept')::bool) \
             else {} end)",
        publication_literals(publications),
        lists("up.oid")
    )
}
