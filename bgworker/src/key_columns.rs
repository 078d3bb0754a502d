//! SQL that compares a key's columns with values of a user's. Run by processes that query a server
//! for rows by their keys: appliers, copies, comparisons, and the process that fetches values for
//! decoding.
//!
//! `k = 'sad'` is wrong in three ways:
//!
//! 1. The operator `=` is searched along `search_path`, and may differ from that of the key's
//!    index.
//! 2. A domain over an enum has no such operator: PostgreSQL searches one of `anyenum`, which a
//!    domain is not.
//! 3. A parameter of a composite type is taken for an anonymous record, one of `regclass` for a
//!    number.
//!
//! So a column is compared by the operator of the key's operator class, as a value of its base
//! type, under the index's collation. The value is read as one of that base type.
//!
//! Not for: finding local rows of a change, which uses the index itself (`apply/lookup.rs`).

use crate::sql_text::quote_identifier;

/// OID of `bytea`, which is fixed.
const BYTEA: &str = "17";

/// Number of columns in the result of [`query`].
pub const CELLS: usize = 7;

/// The query, up to the table's OID.
const HEAD: &str = "with recursive \
         here (oid, identity) as (select c.oid, c.relreplident from pg_class c where c.oid = ";
/// The query from the OID to the names of the key's columns.
const MIDDLE: &str = "), \
         typed (number, name, type, is_domain, collated) as ( \
           select a.attnum, a.attname, a.atttypid, false, a.attcollation \
             from here join pg_attribute a on a.attrelid = here.oid and a.attnum > 0 and not a.attisdropped \
           union all \
           select y.number, y.name, t.typbasetype, true, y.collated \
             from typed y join pg_type t on t.oid = y.type where t.typtype = 'd'), \
         based as ( \
           select y.number, y.name, y.type, y.is_domain, y.collated, t.typtype, t.typelem <> 0 and t.typlen = -1 as is_array, \
                  n.nspname, t.typname, y.name::text = any (";
/// The rest of the query. A rank tells how well an operator class fits: first that of the replica
/// identity's index, then of the primary key, of another unique index, and the type's default.
const TAIL: &str = ") as is_key \
             from typed y join pg_type t on t.oid = y.type join pg_namespace n on n.oid = t.typnamespace where t.typtype <> 'd') \
         select b.name::text, b.type::oid::text, format('%I.%I', b.nspname, b.typname), \
                concat(case when b.is_domain then 'd' end, case when b.is_array then 'a' end, \
                       case when b.nspname = 'pg_catalog' and b.typname ~ '^reg' then 'r' end), \
                o.operator, o.operand, \
                case when c.collated <> 0 and c.collated <> b.collated then \
                  (select format('%I.%I', n.nspname, l.collname) from pg_collation l join pg_namespace n on n.oid = l.collnamespace \
                    where l.oid = c.collated) end \
           from based b \
           left join lateral ( \
             select * from ( \
               select i.indclass[p] as class, i.indcollation[p] as collated, true as is_exact, false as is_preferred, 0 as method, \
                      case when case here.identity when 'i' then i.indisreplident else i.indisprimary end then 0 \
                           when i.indisprimary then 1 else 2 end as rank, i.indexrelid as index \
                 from here join pg_index i on i.indrelid = here.oid and i.indisunique and i.indisvalid \
                 join pg_class x on x.oid = i.indexrelid join pg_am m on m.oid = x.relam and m.amname = 'btree' \
                cross join lateral generate_series(0, i.indnkeyatts - 1) p \
                where b.is_key and i.indkey[p] = b.number \
               union all \
               select k.oid, b.collated, k.opcintype = b.type, t.typispreferred, case m.amname when 'btree' then 0 else 1 end, 3, 0 \
                 from pg_opclass k join pg_am m on m.oid = k.opcmethod and m.amname in ('btree', 'hash') \
                 join pg_type t on t.oid = k.opcintype \
                where b.is_key and k.opcdefault and (k.opcintype = b.type \
                   or k.opcintype = case when b.is_array then 'anyarray'::regtype \
                        else case b.typtype when 'e' then 'anyenum'::regtype when 'c' then 'record'::regtype \
                             when 'r' then 'anyrange'::regtype when 'm' then 'anymultirange'::regtype end end \
                   or exists (select from pg_cast x where x.castsource = b.type and x.casttarget = k.opcintype \
                                 and x.castmethod = 'b' and x.castcontext = 'i'))) f \
              order by f.rank, f.is_exact desc, f.method, f.is_preferred desc, f.index limit 1) c on true \
           left join lateral ( \
             select format('operator(%I.%s)', n.nspname, o.oprname) as operator, \
                    case when t.typtype <> 'p' and t.oid <> b.type then format('%I.%I', s.nspname, t.typname) end as operand \
               from pg_opclass k join pg_am m on m.oid = k.opcmethod \
               join pg_amop w on w.amopfamily = k.opcfamily and w.amoplefttype = k.opcintype and w.amoprighttype = k.opcintype \
                and w.amoppurpose = 's' and w.amopstrategy = case m.amname when 'btree' then 3 else 1 end \
               join pg_operator o on o.oid = w.amopopr join pg_namespace n on n.oid = o.oprnamespace \
               join pg_type t on t.oid = o.oprleft join pg_namespace s on s.oid = t.typnamespace \
              where k.oid = c.class limit 1) o on true \
          order by b.number";

/// Returns the query for the columns of a table. `relation` is an SQL expression for the table's
/// OID, null if the table is gone. `keys` is one for an array of texts: the names of the compared
/// columns. It must run with only `pg_catalog` in `search_path`.
///
/// The result has a row for each column; [`KeyColumn::read`] reads it. A column that is in no
/// unique index is compared by its type's default.
#[must_use]
pub fn query(relation: &str, keys: &str) -> String {
    format!("{HEAD}{relation}{MIDDLE}{keys}{TAIL}")
}

/// A column of a table, and how it is compared if it belongs to a key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeyColumn {
    /// Name of the column.
    pub name: String,
    /// The base type is `bytea`.
    pub is_bytea: bool,
    /// The base type is an array, so there is no array of it.
    pub is_array: bool,
    /// The base type is a `reg*` type: its texts are names of objects, and its values OIDs.
    pub is_reference: bool,
    /// The column's type is a domain.
    is_domain: bool,
    /// The base type.
    base: String,
    /// The operator; `None`: the type has no equality.
    operator: Option<String>,
    /// The type that the operator takes, if that is not the base type.
    operand: Option<String>,
    /// The index's collation, if that is not the column's.
    collation: Option<String>,
}

impl KeyColumn {
    /// Reads a column from a result row of [`query`]; `None` if a cell is missing.
    #[must_use]
    pub fn read<'c>(cell: impl Fn(usize) -> Option<&'c str>) -> Option<Self> {
        let kinds = cell(3)?;
        let text = |place: usize| cell(place).map(str::to_owned);
        Some(Self {
            name: text(0)?,
            is_bytea: cell(1)? == BYTEA,
            is_array: kinds.contains('a'),
            is_reference: kinds.contains('r'),
            is_domain: kinds.contains('d'),
            base: text(2)?,
            operator: text(4),
            operand: text(5),
            collation: text(6),
        })
    }

    /// Returns SQL for the column as its base type, by which it is ordered. `column` is SQL for it.
    #[must_use]
    pub fn of_base(&self, column: &str) -> String {
        if self.is_domain {
            format!("{column}::{}", self.base)
        } else {
            column.to_owned()
        }
    }

    /// Returns SQL for a value of the base type. `value` is SQL for its text: a literal or a
    /// parameter.
    #[must_use]
    pub fn value_of_base(&self, value: &str) -> String {
        format!("{value}::{}", self.base)
    }

    /// Returns SQL for the column as the operator takes it.
    fn operand(&self, column: &str) -> String {
        format!("{}{}", self.of_base(column), self.cast())
    }

    /// Returns SQL for a value as the operator takes it.
    fn value(&self, value: &str) -> String {
        format!("{}{}", self.value_of_base(value), self.cast())
    }

    fn cast(&self) -> String {
        let operand = self.operand.as_ref();
        operand.map_or_else(String::new, |operand| format!("::{operand}"))
    }

    fn collate(&self) -> String {
        let collation = self.collation.as_ref();
        collation.map_or_else(String::new, |collation| format!(" collate {collation}"))
    }

    /// Returns the condition that the column has this value. Without an equality operator, texts
    /// are compared.
    #[must_use]
    pub fn equals(&self, column: &str, value: &str) -> String {
        match &self.operator {
            None => Self::equals_as_text(column, value),
            Some(operator) => format!(
                "{} {operator} {}{}",
                self.operand(column),
                self.value(value),
                self.collate()
            ),
        }
    }

    /// Returns the condition that the column has this value, by the text that its type writes. No
    /// input function reads the value, so no value makes it fail.
    #[must_use]
    pub fn equals_as_text(column: &str, value: &str) -> String {
        format!(
            "pg_catalog.concat({column}) operator(pg_catalog.=) {value}::pg_catalog.text collate pg_catalog.\"C\""
        )
    }

    /// Returns the condition that two columns of this one's type are equal.
    #[must_use]
    pub fn equals_column(&self, one: &str, other: &str) -> String {
        match &self.operator {
            None => format!(
                "pg_catalog.concat({one}) operator(pg_catalog.=) pg_catalog.concat({other}) collate pg_catalog.\"C\""
            ),
            Some(operator) => format!(
                "{} {operator} {}{}",
                self.operand(one),
                self.operand(other),
                self.collate()
            ),
        }
    }

    /// Returns the condition that the column has one of these values, as one expression; `None` if
    /// SQL has no such expression for the type.
    #[must_use]
    pub fn is_among(&self, column: &str, values: &[String]) -> Option<String> {
        let operator = self.operator.as_ref().filter(|_| !self.is_array)?;
        let values: Vec<String> = values.iter().map(|value| self.value(value)).collect();
        Some(format!(
            "{} {operator} any (array[{}]{})",
            self.operand(column),
            values.join(", "),
            self.collate()
        ))
    }

    /// Returns the condition that a row has this key: names and values, where values are SQL for
    /// texts. `prefix` stands before each name. A column that is not in `columns` is compared by
    /// its text.
    #[must_use]
    pub fn all_equal(columns: &[Self], prefix: &str, key: &[(String, String)]) -> String {
        let conditions: Vec<String> = key
            .iter()
            .map(|(name, value)| {
                let column = format!("{prefix}{}", quote_identifier(name));
                match columns.iter().find(|column| column.name == *name) {
                    Some(known) => known.equals(&column, value),
                    None => Self::equals_as_text(&column, value),
                }
            })
            .collect();
        conditions.join(" and ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(cells: [Option<&'static str>; CELLS]) -> KeyColumn {
        KeyColumn::read(|place| cells[place]).unwrap()
    }

    #[test]
    fn a_domain_is_compared_as_its_base_type() {
        let mood = column([
            Some("k"),
            Some("16400"),
            Some("public.mood"),
            Some("d"),
            Some("operator(pg_catalog.=)"),
            None,
            None,
        ]);
        assert_eq!(
            mood.equals("t.\"k\"", "$1"),
            "t.\"k\"::public.mood operator(pg_catalog.=) $1::public.mood"
        );
        let among = mood.is_among("k", &["'a'".to_owned(), "'b'".to_owned()]);
        assert_eq!(
            among.as_deref(),
            Some(
                "k::public.mood operator(pg_catalog.=) any (array['a'::public.mood, 'b'::public.mood])"
            )
        );
    }

    #[test]
    fn a_value_is_read_as_its_own_type_and_compared_as_the_operator_takes_it() {
        let table = column([
            Some("k"),
            Some("2205"),
            Some("pg_catalog.regclass"),
            Some("r"),
            Some("operator(pg_catalog.=)"),
            Some("pg_catalog.oid"),
            None,
        ]);
        assert_eq!(
            table.equals("k", "'t'"),
            "k::pg_catalog.oid operator(pg_catalog.=) 't'::pg_catalog.regclass::pg_catalog.oid"
        );
    }

    #[test]
    fn the_indexs_collation_counts() {
        let text = column([
            Some("k"),
            Some("25"),
            Some("pg_catalog.text"),
            Some(""),
            Some("operator(pg_catalog.=)"),
            None,
            Some("public.ci"),
        ]);
        assert_eq!(
            text.equals("k", "$1"),
            "k operator(pg_catalog.=) $1::pg_catalog.text collate public.ci"
        );
    }

    #[test]
    fn there_is_no_array_of_arrays() {
        let list = column([
            Some("k"),
            Some("1007"),
            Some("pg_catalog._int4"),
            Some("a"),
            Some("operator(pg_catalog.=)"),
            None,
            None,
        ]);
        assert_eq!(list.is_among("k", &["'{1}'".to_owned()]), None);
    }

    #[test]
    fn a_type_without_equality_is_compared_by_its_text() {
        let key = [("k".to_owned(), "$1".to_owned())];
        let json = column([
            Some("k"),
            Some("114"),
            Some("pg_catalog.json"),
            Some(""),
            None,
            None,
            None,
        ]);
        let expected = "pg_catalog.concat(t.\"k\") operator(pg_catalog.=) $1::pg_catalog.text collate pg_catalog.\"C\"";
        assert_eq!(KeyColumn::all_equal(&[json], "t.", &key), expected);
        assert_eq!(KeyColumn::all_equal(&[], "t.", &key), expected);
    }
}
