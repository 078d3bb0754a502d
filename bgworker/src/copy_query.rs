//! The queries that copy a table from a provider: its published rows, their versions, and the
//! tombstones of deleted rows.

use crate::key_columns::{self, KeyColumn};
use crate::sql_text::{quote_identifier, quote_literal};

/// The part of a table that is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Schema.
    pub namespace: String,
    /// Table.
    pub name: String,
    /// Names of the published columns.
    pub columns: Vec<String>,
    /// Published columns of the primary key, or of a replica identity that is an index.
    pub keys: Vec<String>,
    /// Row filters: a row is published if one of them is true; without filters all rows are.
    pub filters: Vec<String>,
    /// The provider's table is partitioned.
    pub partitioned: bool,
    /// The table's OID at the provider.
    pub oid: u32,
    /// Rows that are left out of the copy.
    pub own: Option<OwnRows>,
    /// If the table is routed: a condition for the rows that belong to this node. Only these are
    /// copied.
    pub routed: Option<String>,
    /// A generated column is among the columns.
    pub generated: bool,
    /// Estimated number of rows.
    pub rows: Option<i64>,
    /// Bytes on the provider's disk.
    pub bytes: Option<i64>,
}

/// Rows whose latest version after a given time was written by this node. This node has had them,
/// whatever happened to them since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnRows {
    /// Name of this node.
    pub node: String,
    /// The time, as PostgreSQL writes it in ISO style.
    pub since: String,
}

impl Published {
    /// Returns the COPY command. It names the data's encoding, since the connection's encoding is
    /// only that of names.
    #[must_use]
    pub fn command(&self, columns: &[String], encoding: &str) -> String {
        let columns: Vec<String> = columns.iter().map(|name| quote_identifier(name)).collect();
        let columns = columns.join(", ");
        let encoding = quote_literal(encoding);
        let plain = self.filters.is_empty() && self.own.is_none() && self.routed.is_none();
        if plain && !self.partitioned && !self.generated && !columns.is_empty() {
            return format!(
                "copy {} ({columns}) to stdout (encoding {encoding})",
                self.qualified()
            );
        }
        format!(
            "copy (select {columns} {}) to stdout (encoding {encoding})",
            self.rows_clause()
        )
    }

    /// Returns the query for the provider's columns ([`key_columns`]). For the columns `names` its
    /// result also says how they are compared.
    #[must_use]
    pub fn key_query(&self, names: &[&str]) -> String {
        let names: Vec<String> = names.iter().map(|name| quote_literal(name)).collect();
        key_columns::query(
            &format!("to_regclass({})", quote_literal(&self.qualified())),
            &format!("array[{}]::text[]", names.join(", ")),
        )
    }

    /// Returns the query that counts rows with these keys that local sessions of the provider have
    /// written since a snapshot, the text of a `pg_snapshot`. A key is a list of columns and
    /// values; `columns` is the result of [`Self::key_query`].
    #[must_use]
    pub fn later_query(
        &self,
        keys: &[Vec<(String, String)>],
        columns: &[KeyColumn],
        snapshot: &str,
    ) -> String {
        let literal = |(name, value): &(String, String)| (name.clone(), quote_literal(value));
        let all = |key: &Vec<(String, String)>| {
            let key: Vec<(String, String)> = key.iter().map(literal).collect();
            format!("({})", KeyColumn::all_equal(columns, "", &key))
        };
        let keys: Vec<String> = keys.iter().map(all).collect();
        let keys = if keys.is_empty() {
            "false".to_owned()
        } else {
            keys.join(" or ")
        };
        let writer = format!("{}.xmin", self.qualified());
        // The full transaction id, of which the row's xmin is the lower half.
        let newest = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
        let id =
            format!("({newest} - (({newest} - {writer}::text::bigint) & 4294967295))::text::xid8");
        let condition = format!(
            "({keys}) and not pg_visible_in_snapshot({id}, {}::pg_snapshot) \
             and exists (select from pg_xact_commit_timestamp_origin({writer}) as written where written.roident = 0)",
            quote_literal(snapshot)
        );
        format!("select count(*) {}", self.rows_clause_with(Some(condition)))
    }

    /// Returns the COPY command for the versions of the rows that were written since `since`
    /// (seconds since 1970-01-01 UTC), and of all merged rows. Fields: hash of the key (a row with
    /// two hashes has two lines), microseconds since 1970, whether the row is merged, node.
    #[must_use]
    pub fn versions_command(&self, since: i64) -> String {
        let table = self.qualified();
        // The transaction that merged a row may be older than the row's version, and much older
        // than changes that are still to arrive.
        let lately = format!(
            "(braid.commit_timestamp({table}.xmin) >= to_timestamp({since}) or braid.has_merged_rows({table}.xmin))"
        );
        let rows = self.rows_clause_with(Some(lately));
        format!(
            "copy (select h.hash, (extract(epoch from v.committed_at) * 1000000)::bigint, v.merged, v.node \
             from (select {table}.tableoid as tableoid, {table}.ctid as ctid {rows}) as r, \
             lateral braid.row_version(r.tableoid, r.ctid) as v, \
             lateral (values (v.key_hash), (v.other_hash)) as h (hash) where h.hash is not null) to stdout (encoding 'UTF8')"
        )
    }

    /// Returns the COPY command for tombstones: hash of the key, microseconds, false, node.
    #[must_use]
    pub fn deletions_command(&self, since: i64) -> String {
        format!(
            "copy (select key_hash, deleted_at, false, node from braid.copied_deletions({}, to_timestamp({since}))) to stdout (encoding 'UTF8')",
            self.oid
        )
    }

    /// Returns the COPY command for the writers of columns that are registers of their own: hash of
    /// the key, microseconds, columns, node.
    #[must_use]
    pub fn columns_command(&self, since: i64) -> String {
        format!(
            "copy (select key_hash, written_at, columns, node from braid.copied_columns({}, to_timestamp({since}))) to stdout (encoding 'UTF8')",
            self.oid
        )
    }

    /// Returns the COPY command for rows deleted from a table without a key: hash of the row,
    /// microseconds and node of the deletion, microseconds (0: older than all) and node of the
    /// row's writer.
    #[must_use]
    pub fn taken_rows_command(&self, since: i64) -> String {
        format!(
            "copy (select row_hash, removed_at, removed_by, written_at, written_by from braid.copied_taken_rows({}, to_timestamp({since}))) to stdout (encoding 'UTF8')",
            self.oid
        )
    }

    /// Returns the query for the tables whose OIDs the provider uses in key hashes of these rows.
    #[must_use]
    pub fn tables_query(&self) -> String {
        format!(
            "select {oid}::oid union select relid from pg_partition_tree({oid})",
            oid = self.oid
        )
    }

    fn qualified(&self) -> String {
        format!(
            "{}.{}",
            quote_identifier(&self.namespace),
            quote_identifier(&self.name)
        )
    }

    /// Returns the condition for the published rows; `None`: all are published.
    #[must_use]
    pub fn filter(&self) -> Option<String> {
        let filters: Vec<String> = self
            .filters
            .iter()
            .map(|filter| format!("({filter})"))
            .collect();
        (!filters.is_empty()).then(|| format!("({})", filters.join(" or ")))
    }

    /// Returns the FROM and WHERE clauses.
    #[must_use]
    pub fn rows_clause(&self) -> String {
        self.rows_clause_with(None)
    }

    /// Returns the FROM and WHERE clauses with one more condition.
    fn rows_clause_with(&self, more: Option<String>) -> String {
        // Tables that inherit from an ordinary table are published, and copied, separately.
        let only = if self.partitioned { "" } else { "only " };
        let published = self.filter();
        let foreign = self
            .own
            .as_ref()
            .map(|own| own.condition(&self.qualified()));
        let routed = self.routed.as_ref().map(|here| format!("({here})"));
        let conditions = published.into_iter().chain(routed).chain(foreign);
        let conditions: Vec<String> = conditions.chain(more).collect();
        let condition = if conditions.is_empty() { "" } else { " where " };
        format!(
            "from {only}{}{condition}{}",
            self.qualified(),
            conditions.join(" and ")
        )
    }
}

impl OwnRows {
    /// Returns the condition for all other rows. Replication origins are named
    /// `braid/<node>/<number>`. A commit keeps the timestamp of the node where it was made, so both
    /// times are by this node's clock.
    fn condition(&self, table: &str) -> String {
        let origin = format!("braid/{}/", self.node);
        let digits = origin.chars().count() + 1;
        format!(
            "not exists (select from pg_xact_commit_timestamp_origin({table}.xmin) as written \
             join pg_replication_origin as origin on origin.roident = written.roident \
             where written.timestamp >= {} and starts_with(origin.roname, {}) \
             and substr(origin.roname, {digits}) ~ '^[0-9]+$')",
            quote_literal(&self.since),
            quote_literal(&origin),
        )
    }
}

/// Returns the estimate in the first line of a plan: `Seq Scan on t  (cost=0.00..1.00 rows=100
/// width=4)`.
#[must_use]
pub fn planned_rows(line: &str) -> Option<i64> {
    let (_, rest) = line.split_once(" rows=")?;
    rest.split(' ').next()?.parse().ok()
}

/// A row's version, as the provider sends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowVersion {
    /// Hash of table and key.
    pub hash: u64,
    /// Microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// The row was merged from several.
    pub merged: bool,
    /// Name of the node that wrote the row.
    pub node: String,
}

/// Parses a row's version, a line in COPY's text format: hash, microseconds, `t` if merged, name of
/// a node.
#[must_use]
pub fn parse_version(line: &[u8]) -> Option<RowVersion> {
    let line = std::str::from_utf8(line).ok()?;
    let mut fields = line.splitn(4, '\t');
    let hash: i64 = fields.next()?.parse().ok()?;
    let timestamp = fields.next()?.parse().ok()?;
    let merged = match fields.next()? {
        "t" => true,
        "f" => false,
        _ => return None,
    };
    let node = name(fields.next()?);
    Some(RowVersion {
        hash: hash.cast_unsigned(),
        timestamp,
        merged,
        node,
    })
}

/// A row that was deleted from a table without a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenRow {
    /// Hash of the whole row.
    pub hash: u64,
    /// Time of the deletion in microseconds since 1970-01-01 UTC, and its node.
    pub removed: (i64, String),
    /// Time and node of the row's writer; `None`: older than all.
    pub written: Option<(i64, String)>,
}

/// Parses a line of [`Published::taken_rows_command`]: hash, microseconds and node of the deletion,
/// microseconds and node of the writer.
#[must_use]
pub fn parse_taken_row(line: &[u8]) -> Option<TakenRow> {
    let line = std::str::from_utf8(line).ok()?;
    let fields: Vec<&str> = line.split('\t').collect();
    let [hash, removed_at, removed_by, written_at, written_by] = <[_; 5]>::try_from(fields).ok()?;
    let hash: i64 = hash.parse().ok()?;
    let written_at = written_at.parse().ok()?;
    Some(TakenRow {
        hash: hash.cast_unsigned(),
        removed: (removed_at.parse().ok()?, name(removed_by)),
        written: (written_at != 0).then(|| (written_at, name(written_by))),
    })
}

/// Undoes COPY's escapes in a name, which can only contain backslashes.
fn name(field: &str) -> String {
    field.replace("\\\\", "\\")
}

/// A writer of some columns of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Hash of table and key.
    pub hash: u64,
    /// Microseconds since 1970-01-01 UTC.
    pub timestamp: i64,
    /// Names of columns, in UTF-8 and hexadecimal; `None`: all.
    pub columns: Option<Vec<String>>,
    /// Name of the node that wrote them.
    pub node: String,
}

/// Parses a line of [`Published::columns_command`].
#[must_use]
pub fn parse_written(line: &[u8]) -> Option<Written> {
    let line = std::str::from_utf8(line).ok()?;
    let mut fields = line.splitn(4, '\t');
    let hash: i64 = fields.next()?.parse().ok()?;
    let timestamp = fields.next()?.parse().ok()?;
    let columns = match fields.next()? {
        "\\N" => None,
        names => Some(names.split(',').map(str::to_owned).collect()),
    };
    Some(Written {
        hash: hash.cast_unsigned(),
        timestamp,
        columns,
        node: fields.next()?.replace("\\\\", "\\"),
    })
}

#[cfg(test)]
mod tests {
    use super::{OwnRows, Published, RowVersion, parse_version, parse_written, planned_rows};
    use crate::key_columns::KeyColumn;

    fn published() -> Published {
        Published {
            namespace: "public".to_owned(),
            name: "odd \"one\"".to_owned(),
            columns: vec!["a".to_owned(), "B".to_owned()],
            keys: vec!["a".to_owned()],
            filters: Vec::new(),
            partitioned: false,
            oid: 16384,
            own: None,
            routed: None,
            generated: false,
            rows: None,
            bytes: None,
        }
    }

    #[test]
    fn a_plain_table_is_copied_without_a_query() {
        let published = published();
        assert_eq!(
            published.command(&published.columns, "LATIN1"),
            r#"copy "public"."odd ""one""" ("a", "B") to stdout (encoding 'LATIN1')"#
        );
    }

    #[test]
    fn filters_are_alternatives_and_children_stay_out() {
        let mut published = published();
        published.filters = vec!["a > 1".to_owned(), "(b IS NULL)".to_owned()];
        assert_eq!(
            published.command(&published.columns, "UTF8"),
            r#"copy (select "a", "B" from only "public"."odd ""one""" where ((a > 1) or ((b IS NULL)))) to stdout (encoding 'UTF8')"#
        );
        published.partitioned = true;
        published.filters.clear();
        assert_eq!(
            published.command(&published.columns, "UTF8"),
            r#"copy (select "a", "B" from "public"."odd ""one""") to stdout (encoding 'UTF8')"#
        );
    }

    #[test]
    fn versions_are_those_of_the_rows_that_are_copied() {
        let mut published = published();
        published.name = "a where b".to_owned();
        let command = published.versions_command(7);
        assert!(command.contains(
            r#"from only "public"."a where b" where (braid.commit_timestamp("public"."a where b".xmin) >= to_timestamp(7) or braid.has_merged_rows("public"."a where b".xmin))) as r"#
        ));
        published.filters = vec!["a > 1".to_owned()];
        let command = published.versions_command(7);
        assert!(command.contains(
            r#"where ((a > 1)) and (braid.commit_timestamp("public"."a where b".xmin) >= to_timestamp(7) or "#
        ));
    }

    #[test]
    fn rows_that_come_later_are_told_by_a_snapshot() {
        let mut published = published();
        published.name = "t".to_owned();
        let key = vec![
            ("a".to_owned(), "1".to_owned()),
            ("B".to_owned(), "x'y".to_owned()),
        ];
        let cells = ["a", "23", "pg_catalog.int4", "", "operator(pg_catalog.=)"];
        let columns = KeyColumn::read(|place| cells.get(place).copied());
        let columns: Vec<KeyColumn> = columns.into_iter().collect();
        let query = published.later_query(&[key], &columns, "10:12:11");
        let condition = concat!(
            r#"from only "public"."t" where (("a" operator(pg_catalog.=) '1'::pg_catalog.int4 and "#,
            r#"pg_catalog.concat("B") operator(pg_catalog.=) 'x''y'::pg_catalog.text collate pg_catalog."C")) "#,
            "and not pg_visible_in_snapshot("
        );
        assert!(query.contains(condition), "{query}");
        assert!(query.contains(", '10:12:11'::pg_snapshot)"), "{query}");
        assert!(
            published
                .later_query(&[], &[], "1:1:")
                .contains("(false) and")
        );
    }

    #[test]
    fn of_a_routed_table_only_the_rows_of_this_node_are_copied() {
        let mut published = published();
        let here = "braid.is_at('tokyo', 'public.orders'::regclass, a, b, c)";
        published.routed = Some(here.to_owned());
        assert_eq!(
            published.command(&published.columns, "UTF8"),
            format!(
                r#"copy (select "a", "B" from only "public"."odd ""one""" where ({here})) to stdout (encoding 'UTF8')"#
            )
        );
        // Combined with all other conditions.
        published.filters = vec!["a > 1".to_owned(), "a < 0".to_owned()];
        published.own = Some(OwnRows {
            node: "tokyo".to_owned(),
            since: "2026-01-01 00:00:00+00".to_owned(),
        });
        let expected = format!("where ((a > 1) or (a < 0)) and ({here}) and not exists (");
        let others = [
            published.command(&published.columns, "UTF8"),
            published.versions_command(7),
            published.later_query(&[], &[], "1:1:"),
        ];
        for command in others {
            assert!(command.contains(&expected), "{command}");
        }
    }

    #[test]
    fn own_rows_are_told_by_time_and_origin() {
        let mut published = published();
        published.filters = vec!["a > 1".to_owned()];
        published.own = Some(OwnRows {
            node: "pa'ris".to_owned(),
            since: "2026-01-01 00:00:00+00".to_owned(),
        });
        let command = published.command(&published.columns, "UTF8");
        assert!(command.contains(r#"where ((a > 1)) and not exists (select from pg_xact_commit_timestamp_origin("public"."odd ""one""".xmin)"#));
        assert!(command.contains("starts_with(origin.roname, 'braid/pa''ris/')"));
        assert!(command.contains("substr(origin.roname, 14)"));
    }

    #[test]
    fn the_planner_estimates() {
        let line = "Seq Scan on pgbench_accounts  (cost=0.00..26394.00 rows=1000000 width=97)";
        assert_eq!(planned_rows(line), Some(1_000_000));
        assert_eq!(planned_rows("Seq Scan on t"), None);
    }

    #[test]
    fn a_line_is_a_hash_a_time_a_mark_and_a_node() {
        assert_eq!(
            parse_version(b"-1\t1709209800000000\tf\ttokyo"),
            Some(RowVersion {
                hash: u64::MAX,
                timestamp: 1_709_209_800_000_000,
                merged: false,
                node: "tokyo".to_owned(),
            })
        );
        let merged = parse_version(b"7\t1\tt\ta\\\\b").unwrap();
        assert!(merged.merged);
        assert_eq!(merged.node, "a\\b");
        assert_eq!(parse_version(b"7\t1\tt"), None);
        assert_eq!(parse_version(b"7\t1\ttokyo\tt"), None);
        assert_eq!(parse_version(b"x\t1\tf\ttokyo"), None);
    }

    #[test]
    fn written_columns_are_read() {
        let written = parse_written(b"-1\t7\t61,62\ttokyo").unwrap();
        assert_eq!((written.hash, written.timestamp), (u64::MAX, 7));
        assert_eq!(
            written.columns,
            Some(vec!["61".to_owned(), "62".to_owned()])
        );
        assert_eq!(written.node, "tokyo");
        let all = parse_written(b"1\t7\t\\N\ta\\\\b").unwrap();
        assert_eq!((all.columns, all.node.as_str()), (None, "a\\b"));
        assert_eq!(parse_written(b"1\t7\t61"), None);
    }
}
