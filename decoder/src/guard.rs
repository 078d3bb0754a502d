//! The guard of a routed table: a CHECK constraint whose expression is a call of `braid.is_here`
//! with the table's tenant, record and creation (`crates/routing`).
//!
//! The owner of a table can write any expression into a constraint. The output plugin evaluates the
//! three arguments for each row, with the privileges of the connection. So it evaluates only
//! expressions that consist of columns, constants, and PostgreSQL's own functions. This module
//! checks the text of the stored expression, before any of it is parsed or constant-folded.

/// Functions and operators with smaller OIDs are PostgreSQL's own
/// (`FirstUnpinnedObjectId` of src/include/access/transam.h, 15 to 19).
const FIRST_OTHER: u32 = 12_000;

/// Beginning of a stored function call.
const CALL: &str = "{FUNCEXPR :funcid ";

/// Nodes that call no function besides those that their fields name.
const NODES: [&str; 6] = [
    "FUNCEXPR",
    "OPEXPR",
    "VAR",
    "CONST",
    "RELABELTYPE",
    "COALESCEEXPR",
];

/// Returns the function that an expression calls, if it is a call. `text` is the form in which
/// PostgreSQL stores it (`pg_node_tree`).
#[must_use]
pub fn guard_function(text: &str) -> Option<u32> {
    number(text.strip_prefix(CALL)?).0
}

/// Returns whether an expression is a call of the function `guard` and otherwise evaluates only
/// PostgreSQL's own code. `text` is the stored form (`pg_node_tree`).
#[must_use]
pub fn is_plain_guard(text: &str, guard: u32) -> bool {
    let Some(rest) = text.strip_prefix(CALL) else {
        return false;
    };
    let (first, rest) = number(rest);
    first == Some(guard) && is_plain(rest)
}

/// Returns whether the rest of an expression has only allowed nodes and functions.
fn is_plain(text: &str) -> bool {
    let nodes_are_known = text.split('{').skip(1).all(|node| {
        let name = node.split([' ', '}']).next().unwrap_or_default();
        NODES.contains(&name)
    });
    let calls_are_own = [":funcid ", ":opfuncid ", ":opno "].iter().all(|field| {
        text.split(field)
            .skip(1)
            .all(|value| number(value).0.is_some_and(|oid| oid < FIRST_OTHER))
    });
    nodes_are_known && calls_are_own
}

fn number(text: &str) -> (Option<u32>, &str) {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    (digits.parse().ok(), rest)
}

#[cfg(test)]
mod tests {
    use super::is_plain_guard;

    const GUARD: u32 = 16_500;

    fn call(arguments: &str) -> String {
        format!(
            "{{FUNCEXPR :funcid {GUARD} :funcresulttype 16 :funcretset false :args ({arguments}) :location 7}}"
        )
    }

    const TABLE: &str =
        "{CONST :consttype 2205 :constbyval true :constvalue 4 [ 1 2 0 0 0 0 0 0 ]}";
    const COLUMN: &str = "{VAR :varno 1 :varattno 1 :vartype 20 :location 30}";

    #[test]
    fn columns_and_own_functions_are_plain() {
        let lower = "{FUNCEXPR :funcid 870 :args ({RELABELTYPE :arg {VAR :varno 1}})}";
        let sum = "{OPEXPR :opno 551 :opfuncid 177 :args ({VAR :varno 1} {CONST :consttype 23})}";
        for argument in [COLUMN, lower, sum] {
            assert!(is_plain_guard(&call(&format!("{TABLE} {argument}")), GUARD));
        }
    }

    #[test]
    fn code_of_others_is_not() {
        for argument in [
            "{FUNCEXPR :funcid 16384 :args ()}",
            "{OPEXPR :opno 20001 :opfuncid 0 :args ()}",
            "{OPEXPR :opno 96 :opfuncid 20001 :args ()}",
            "{COERCETODOMAIN :arg {VAR :varno 1} :resulttype 16700}",
            "{COERCEVIAIO :arg {VAR :varno 1} :resulttype 16700}",
            "{SUBLINK :subselect {QUERY}}",
            "{FUNCEXPR :funcid x :args ()}",
        ] {
            let text = call(&format!("{TABLE} {COLUMN} {argument}"));
            assert!(!is_plain_guard(&text, GUARD), "{argument}");
        }
    }

    #[test]
    fn another_expression_is_no_guard() {
        assert!(!is_plain_guard(&call(COLUMN), GUARD + 1));
        assert!(!is_plain_guard("{CONST :consttype 16}", GUARD));
        assert!(!is_plain_guard("", GUARD));
        let hidden = format!("{{BOOLEXPR :args ({})}}", call(COLUMN));
        assert!(!is_plain_guard(&hidden, GUARD));
    }
}
