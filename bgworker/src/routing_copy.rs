//! The rows of a routed table that a copy contains: those that belong to the subscriber.
//!
//! Example: the guard of `orders` at the provider is `braid.is_here('public.orders'::regclass,
//! tenant_id, order_id, created_at)`. It says which rows belong to the provider. Node `tokyo`
//! copies the rows for which `braid.is_at('tokyo', 'public.orders'::regclass, tenant_id, order_id,
//! created_at)` is true.
//!
//! The text is PostgreSQL's own (`pg_get_expr` under `search_path = pg_catalog`), so its names are
//! qualified and quoted. A string in it may contain anything, even the text of a call. So the text
//! is read token by token to find the arguments.

use crate::sql_text::quote_literal;

/// Beginning of a guard's text.
const CALL: &str = "braid.is_here(";

/// Returns whether a constraint's expression begins like a guard.
#[must_use]
pub fn is_guard(expression: &str) -> bool {
    expression.trim_start().starts_with(CALL)
}

/// Returns the condition for the rows of a table that belong to a node, from the expression of the
/// table's constraint. `None` if the expression is not a single call of `braid.is_here`, so no
/// guard.
#[must_use]
pub fn condition(expression: &str, node: &str) -> Option<String> {
    let arguments = arguments(expression.trim())?;
    let node = quote_literal(node);
    Some(format!("braid.is_at({}, {arguments})", node.trim_start()))
}

/// Returns the text of the call's arguments if the call is the whole expression.
fn arguments(expression: &str) -> Option<&str> {
    let rest = expression.strip_prefix(CALL)?;
    let end = closing(rest)?;
    let (arguments, behind) = rest.split_at(end);
    let is_all = behind == ")" && !arguments.trim().is_empty();
    is_all.then_some(arguments)
}

/// Returns the position of the parenthesis that closes the one opened before the text.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    let mut characters = text.char_indices().peekable();
    let mut previous = ' ';
    while let Some((at, character)) = characters.next() {
        match character {
            // In E'..' a backslash precedes an escaped character. Two quotes stand for one, and the
            // string continues.
            '\'' | '"' => {
                let escapes = character == '\'' && matches!(previous, 'E' | 'e');
                loop {
                    let (_, inside) = characters.next()?;
                    if escapes && inside == '\\' {
                        characters.next()?;
                    } else if inside == character
                        && characters.next_if(|(_, next)| *next == character).is_none()
                    {
                        break;
                    }
                }
            }
            '(' => depth += 1,
            ')' => match depth.checked_sub(1) {
                Some(less) => depth = less,
                None => return Some(at),
            },
            _ => {}
        }
        previous = character;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::condition;

    #[test]
    fn the_call_is_made_for_the_subscriber() {
        let guard = "braid.is_here('public.orders'::regclass, tenant_id, order_id, created_at)";
        assert_eq!(
            condition(guard, "tokyo").as_deref(),
            Some(
                "braid.is_at('tokyo', 'public.orders'::regclass, tenant_id, order_id, created_at)"
            )
        );
    }

    #[test]
    fn names_are_quoted() {
        let guard = "braid.is_here('o'::regclass, a, b, c)";
        for (node, literal) in [
            ("o'brien", "'o''brien'"),
            (r"a\b", r"E'a\\b'"),
            (r"\'", r"E'\\'''"),
            ("a, b)", "'a, b)'"),
        ] {
            let expected = format!("braid.is_at({literal}, 'o'::regclass, a, b, c)");
            assert_eq!(condition(guard, node), Some(expected), "{node}");
        }
    }

    #[test]
    fn strings_and_names_may_hold_anything() {
        for arguments in [
            r#"'public."a)b"'::regclass, lower("odd ""(name"), (b + (1)), c"#,
            r"'o'::regclass, replace(a, 'braid.is_here('::text, ''')'''::text), b, c",
            r"'o'::regclass, replace(a, E'\\\'('::text, ''::text), b, c",
            r#"'o'::regclass, "E", ('E'::text || 'x\'::text), c"#,
            r#"'o'::regclass, "ö(", 'ü)'::text, c"#,
        ] {
            let guard = format!("braid.is_here({arguments})");
            let expected = format!("braid.is_at('n', {arguments})");
            assert_eq!(condition(&guard, "n"), Some(expected), "{arguments}");
        }
    }

    #[test]
    fn other_expressions_are_no_guards() {
        for other in [
            "",
            "(a > 0)",
            "is_here('o'::regclass, a, b, c)",
            "public.is_here('o'::regclass, a, b, c)",
            "braid.is_here()",
            "braid.is_here('o'::regclass, a, b, c) OR true",
            "(braid.is_here('o'::regclass, a, b, c) OR (a = 1))",
            "braid.is_here('o'::regclass, a) AND braid.is_here('o'::regclass, b)",
            "braid.is_here('o'::regclass, a",
            "braid.is_here('o'::regclass, 'a)",
            "braid.is_here_too('o'::regclass, a)",
            r"braid.is_here(E'a\')",
        ] {
            assert_eq!(condition(other, "n"), None, "{other}");
        }
    }
}
