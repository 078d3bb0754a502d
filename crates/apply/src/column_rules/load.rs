//! The rules for a table's columns, read with the table's plan. Run by the appliers.

use braid_bgworker::column_rule::ColumnRule;
use braid_bgworker::sqlstate::SqlState;
use braid_node::settings::{self, RememberDeletions};
use braid_postgres::error::PgError;
use braid_postgres::kept_plan;
use braid_postgres::names::own_table;
use braid_postgres::relation::RelationRef;
use braid_postgres::table_scan::{Is, Sees, has_any};

use super::{ColumnRules, RuledColumn, adds_up, has_order};
use crate::relation::LocalColumn;

const RULES: &str =
    "select column_number::text, rule from braid.column_rule where relation = $1::oid";

/// The table is in several subscriptions, and two of them may bring the same change. A subscription
/// to the changes of one node brings only those that the others do not.
const STREAMS: &str = "select (count(*) > 1 and (bool_or(s.origin = 'any') or count(distinct s.provider_id) < count(*)))::text \
    from braid.subscription s join braid.subscription_table t using (subscription_id) where t.relation = $1::oid and s.only_origin is null";

fn unsuited(table: &str, column: &str, why: &str) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("column \"{column}\" of table \"{table}\" cannot be merged by its rule"),
    )
    .with_detail(why.to_owned())
    .with_hint(
        "Correct that, or remove the rule with braid.set_column_rule(table, column, null), then run braid.enable_subscription.",
    )
}

/// Returns the rules for the columns of an open table that the stream has. In a transaction, with
/// the process's own rights.
///
/// # Errors
/// 55000 if a column, or the table, was changed so that its rule can't be kept; whatever PostgreSQL
/// raises.
pub fn load(
    relation: RelationRef<'_>,
    name: &str,
    sent: &[LocalColumn],
    has_key: bool,
    asks: bool,
) -> Result<ColumnRules, PgError> {
    let (oid, is_partition) = (relation.oid(), relation.is_partition());
    let (table, index) = (own_table("column_rule")?, own_table("column_rule_pkey")?);
    let found = if has_any(table, index, &[Is::Oid(1, oid)], Sees::Committed) {
        kept_plan::rows(RULES, &[oid.into()])?
    } else {
        Vec::new()
    };
    let mut rules = ColumnRules {
        columns: Vec::new(),
        were_set: !found.is_empty(),
    };
    for row in found {
        let [Some(number), Some(rule)] = <[_; 2]>::try_from(row).unwrap_or_default() else {
            continue;
        };
        let rule: ColumnRule = rule.parse().map_err(|_| {
            PgError::new(
                SqlState::InternalError,
                format!("\"{rule}\" in braid.column_rule is not known to this version"),
            )
        })?;
        let local = number.parse::<usize>().unwrap_or(0).wrapping_sub(1);
        let Some(attribute) = relation.descriptor().get(local) else {
            continue;
        };
        if attribute.is_dropped() || !sent.iter().any(|column| column.local == local) {
            continue;
        }
        let column = attribute.name();
        let why = match rule {
            ColumnRule::Delta if !adds_up(attribute.type_id()) => {
                Some("Its type is not one whose values add up.")
            }
            ColumnRule::Max | ColumnRule::Min if !has_order(attribute.type_id()) => {
                Some("Its type has no order.")
            }
            _ if !has_key => Some(
                "The table has no primary key, by which its rows are found whatever is in them.",
            ),
            _ if is_partition => {
                Some("The table has become a partition: column rules are for ordinary tables.")
            }
            _ if asks => Some("A conflict function is set for the table: it gives whole rows."),
            ColumnRule::LastUpdateWins
                if settings::remember_deletions() == RememberDeletions::Off =>
            {
                Some(
                    "What sessions of this node write is not collected: braid.remember_deletions is off.",
                )
            }
            _ => None,
        };
        if let Some(why) = why {
            return Err(unsuited(name, &column, why));
        }
        rules.columns.push(RuledColumn {
            local,
            rule,
            name: column,
            type_id: attribute.type_id(),
            type_modifier: attribute.type_modifier(),
            collation: attribute.collation(),
            by_value: attribute.is_by_value(),
            length: attribute.length(),
        });
    }
    if rules.has_sums() {
        let twice = kept_plan::rows(STREAMS, &[oid.into()])?;
        if twice.first().and_then(|row| row.first()?.as_deref()) == Some("true") {
            return Err(PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                format!("changes of table \"{name}\" may arrive by two paths and would be added twice"),
            )
            .with_detail("The table is in several subscriptions, of which one has origin 'any', or two have the same provider.")
            .with_hint(
                "Let each change come once: origin => 'none' in a full mesh, a single subscription otherwise. Then run braid.enable_subscription.",
            ));
        }
    }
    Ok(rules)
}
