//! Connection strings that clients get to see: where the nodes of a set are.
//!
//! A client connects as itself, so a string has a host, port and database, and never a user or a
//! password.

/// A keyword and its value.
pub type Setting = (String, String);

const SHOWN: [&str; 4] = ["host", "hostaddr", "port", "dbname"];

/// The connection string for others, of one that has these settings.
#[must_use]
pub fn public(settings: &[Setting]) -> String {
    let words = SHOWN
        .iter()
        .map(|keyword| (*keyword, value(settings, keyword)));
    written(words.map(|(keyword, value)| (keyword, value.to_owned())))
}

/// One connection string for several servers, of which libpq takes the first that answers. If their
/// databases have different names, that of the first server alone. `None` for no server.
#[must_use]
pub fn joined(servers: &[Vec<Setting>]) -> Option<String> {
    let (first, rest) = servers.split_first()?;
    let database = value(first, "dbname");
    if rest.is_empty() || rest.iter().any(|other| value(other, "dbname") != database) {
        return Some(public(first));
    }
    let all = |keyword: &str| {
        let values: Vec<&str> = servers
            .iter()
            .map(|settings| value(settings, keyword))
            .collect();
        // An empty list of hosts would be one host without a name.
        if values.iter().all(|value| value.is_empty()) {
            String::new()
        } else {
            values.join(",")
        }
    };
    Some(written(SHOWN.iter().map(|keyword| {
        let value = match *keyword {
            "dbname" => database.to_owned(),
            keyword => all(keyword),
        };
        (*keyword, value)
    })))
}

fn value<'s>(settings: &'s [Setting], keyword: &str) -> &'s str {
    let found = settings.iter().find(|setting| setting.0 == keyword);
    found.map_or("", |setting| setting.1.as_str())
}

fn written<'k>(words: impl Iterator<Item = (&'k str, String)>) -> String {
    let words: Vec<String> = words
        .filter(|(_, value)| !value.is_empty())
        .map(|(keyword, value)| format!("{keyword}={}", quoted(&value)))
        .collect();
    words.join(" ")
}

fn quoted(value: &str) -> String {
    let needs_quotes = |c: char| c.is_whitespace() || c == '\'' || c == '\\';
    if value.contains(needs_quotes) {
        format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
    } else {
        value.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::{Setting, joined, public};

    fn settings(pairs: &[(&str, &str)]) -> Vec<Setting> {
        let owned = |(keyword, value): &(&str, &str)| ((*keyword).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn nothing_secret_is_shown() {
        let given = settings(&[
            ("user", "app"),
            ("password", "secret"),
            ("dbname", "my shop"),
            ("host", "a"),
            ("port", ""),
            ("options", "-c x=y"),
        ]);
        assert_eq!(public(&given), "host=a dbname='my shop'");
        assert_eq!(public(&settings(&[("dbname", "it's")])), "dbname='it\\'s'");
        assert_eq!(public(&[]), "");
    }

    #[test]
    fn servers_of_a_set_are_one_string() {
        let a = settings(&[("host", "a"), ("dbname", "shop"), ("password", "secret")]);
        let b = settings(&[("host", "b"), ("port", "5433"), ("dbname", "shop")]);
        let other = settings(&[("host", "c"), ("dbname", "store")]);
        assert_eq!(joined(&[]), None);
        assert_eq!(
            joined(std::slice::from_ref(&a)).as_deref(),
            Some("host=a dbname=shop")
        );
        assert_eq!(
            joined(&[a.clone(), b]).as_deref(),
            Some("host=a,b port=,5433 dbname=shop")
        );
        assert_eq!(joined(&[a, other]).as_deref(), Some("host=a dbname=shop"));
    }
}
