//! Adds arguments to the calls that a hint names, so that a user can run them directly. Pure; used
//! when a subscription's failure is recorded, as the subscription is known then.

use crate::sql_text::quote_literal;

/// The failure that a hint is about.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Name of the subscription.
    pub subscription: &'a str,
    /// Commit position of the failed transaction, as text; `None` if there is none.
    pub position: Option<&'a str>,
    /// The table that was copied, quoted as in SQL; `None` if the failure is not about a copy.
    pub table: Option<&'a str>,
}

impl Subject<'_> {
    fn arguments(self, function: &str) -> Option<String> {
        let name = || quote_literal(self.subscription);
        match function {
            "enable_subscription" | "disable_subscription" | "refresh_subscription" => Some(name()),
            "skip_transaction" => Some(format!("{}, {}", name(), quote_literal(self.position?))),
            "resync_table" => Some(format!("{}, {}", name(), quote_literal(self.table?))),
            _ => None,
        }
    }
}

/// Returns the hint with arguments after function names that lack them, as far as the arguments are
/// known. Calls with arguments are left as they are.
#[must_use]
pub fn with_arguments(hint: &str, subject: Subject<'_>) -> String {
    const SCHEMA: &str = "braid.";
    let mut full = String::with_capacity(hint.len() + 64);
    let mut rest = hint;
    while let Some(at) = rest.find(SCHEMA) {
        let (before, from) = rest.split_at(at);
        let after = from.get(SCHEMA.len()..).unwrap_or_default();
        let end = after
            .find(|letter: char| !letter.is_ascii_lowercase() && letter != '_')
            .unwrap_or(after.len());
        let (function, behind) = after.split_at(end);
        full.push_str(before);
        full.push_str(SCHEMA);
        full.push_str(function);
        if !behind.starts_with('(')
            && let Some(arguments) = subject.arguments(function)
        {
            full.push('(');
            full.push_str(&arguments);
            full.push(')');
        }
        rest = behind;
    }
    full.push_str(rest);
    full
}

#[cfg(test)]
mod tests {
    use super::{Subject, with_arguments};

    const SUBJECT: Subject<'_> = Subject {
        subscription: "paris_from_tokyo",
        position: Some("0/1A2B"),
        table: None,
    };

    #[test]
    fn calls_get_what_is_known() {
        let hint = "Remove the cause and run braid.enable_subscription, or leave this transaction \
                    out with braid.skip_transaction.";
        assert_eq!(
            with_arguments(hint, SUBJECT),
            "Remove the cause and run braid.enable_subscription('paris_from_tokyo'), or leave this \
             transaction out with braid.skip_transaction('paris_from_tokyo', '0/1A2B')."
        );
        let table = Some("public.\"Order\"");
        assert_eq!(
            with_arguments("Run braid.resync_table", Subject { table, ..SUBJECT }),
            "Run braid.resync_table('paris_from_tokyo', 'public.\"Order\"')"
        );
    }

    #[test]
    fn what_is_not_known_stays() {
        let subject = Subject {
            position: None,
            ..SUBJECT
        };
        for hint in [
            "braid.skip_transaction",
            "Copy it with braid.resync_table; look at braid.subscription_status.",
            "Run braid.enable_subscription(name, after_away => true).",
            "braid.set_column_rule and braid.alter_subscription",
            "braid.",
            "nothing to run",
            "",
        ] {
            assert_eq!(with_arguments(hint, subject), hint);
        }
    }

    #[test]
    fn a_name_is_quoted() {
        let subject = Subject {
            subscription: "o'hare \\ ü",
            ..SUBJECT
        };
        assert!(
            with_arguments("braid.refresh_subscription.", subject)
                .starts_with("braid.refresh_subscription(")
        );
        assert!(with_arguments("braid.enable_subscription", subject).contains("o''hare"));
    }
}
