//! wal2json's options, and a few additional ones.

use super::list;
use super::selection::{Patterns, Prefixes};
use crate::options::OptionText;

/// Result of reading an option.
type Result<T> = std::result::Result<T, Error>;

/// Options that only this format has: any of them implies the format.
pub const OPTIONS: [&str; 27] = [
    "include-xids",
    "include-timestamp",
    "include-schemas",
    "include-types",
    "include-typmod",
    "include-type-oids",
    "include-domain-data-type",
    "include-column-positions",
    "include-origin",
    "include-not-null",
    "include-default",
    "include-pk",
    "numeric-data-types-as-string",
    "pretty-print",
    "write-in-chunks",
    "include-lsn",
    "include-transaction",
    "include-unchanged-toast",
    "include-unchanged-toast-marker",
    "filter-origins",
    "filter-tables",
    "add-tables",
    "filter-msg-prefixes",
    "add-msg-prefixes",
    "format-version",
    "actions",
    "max-message-size",
];

/// Default of the most bytes of one transaction that version 1 puts into one message. Close to 1
/// GB, the limit of a message and of a value of an SQL function.
const MAX_MESSAGE_BYTES: usize = (1 << 30) - (64 << 10);
/// Smallest value that may be requested.
const MIN_MESSAGE_BYTES: usize = 8 << 10;

/// Errors in options, with wal2json's messages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The format has no such option (SQLSTATE 22023).
    #[error("option \"{name}\" = \"{value}\" is unknown")]
    Unknown {
        /// The option.
        name: String,
        /// Value of the option; `(null)` if it has none.
        value: String,
    },
    /// The option cannot have this value (SQLSTATE 22023).
    #[error("could not parse value \"{value}\" for parameter \"{option}\"")]
    Value {
        /// The option.
        option: &'static str,
        /// The value.
        value: String,
    },
    /// The option's value is not a valid list (SQLSTATE 42602).
    #[error("could not parse value \"{value}\" for parameter \"{option}\"")]
    List {
        /// The option.
        option: &'static str,
        /// The value.
        value: String,
    },
    /// An option that was removed (SQLSTATE 42602).
    #[error("parameter \"{0}\" was deprecated")]
    Deprecated(&'static str),
    /// A format version before the first (SQLSTATE 0A000).
    #[error("client sent format_version={0} but we only support format 1 or higher")]
    VersionTooLow(i32),
    /// A format version after the last (SQLSTATE 0A000).
    #[error("client sent format_version={0} but we only support format 2 or lower")]
    VersionTooHigh(i32),
}

/// wal2json's format versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One object for each transaction.
    One,
    /// One object for each row.
    Two,
}

/// The operations that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one for each operation, as in a publication"
)]
pub struct Actions {
    /// INSERT.
    pub insert: bool,
    /// UPDATE.
    pub update: bool,
    /// DELETE.
    pub delete: bool,
    /// TRUNCATE; version 1 has none.
    pub truncate: bool,
}

impl Actions {
    const fn all(on: bool) -> Self {
        Self {
            insert: on,
            update: on,
            delete: on,
            truncate: on,
        }
    }
}

/// The options of this format, with wal2json's defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the options are what they are"
)]
pub struct Wal2JsonOptions {
    /// `format-version`.
    pub version: Version,
    /// `include-xids`.
    pub xids: bool,
    /// `include-timestamp`.
    pub timestamp: bool,
    /// `include-schemas`.
    pub schemas: bool,
    /// `include-types`.
    pub types: bool,
    /// `include-typmod`.
    pub typmod: bool,
    /// `include-type-oids`.
    pub type_oids: bool,
    /// `include-domain-data-type`.
    pub domain_data_type: bool,
    /// `include-column-positions`.
    pub column_positions: bool,
    /// `include-origin`.
    pub origin: bool,
    /// `include-not-null`.
    pub not_null: bool,
    /// `include-default`.
    pub defaults: bool,
    /// `include-pk`.
    pub primary_key: bool,
    /// `numeric-data-types-as-string`.
    pub numeric_as_string: bool,
    /// `pretty-print`; version 2 ignores it.
    pub pretty: bool,
    /// `write-in-chunks`; version 2 ignores it.
    pub chunks: bool,
    /// `include-lsn`.
    pub lsn: bool,
    /// `include-transaction`; version 1 ignores it.
    pub transaction: bool,
    /// `include-unchanged-toast-marker`: name the columns that are left out because WAL does not
    /// have their value.
    pub unchanged_marker: bool,
    /// `filter-origins`: numbers of replication origins whose transactions are not written.
    pub filter_origins: Vec<u32>,
    /// `filter-tables`: tables whose changes are not written.
    pub filter_tables: Patterns,
    /// `add-tables`: only changes of these tables are written.
    pub add_tables: Option<Patterns>,
    /// `filter-msg-prefixes`: prefixes of messages that are not written.
    pub filter_prefixes: Prefixes,
    /// `add-msg-prefixes`: only messages with these prefixes are written, unless it is empty.
    pub add_prefixes: Prefixes,
    /// `actions`.
    pub actions: Actions,
    /// `max-message-size`: number of bytes from which version 1 continues in another message.
    pub max_message_bytes: usize,
}

impl Default for Wal2JsonOptions {
    fn default() -> Self {
        Self {
            version: Version::One,
            xids: false,
            timestamp: false,
            schemas: true,
            types: true,
            typmod: true,
            type_oids: false,
            domain_data_type: false,
            column_positions: false,
            origin: false,
            not_null: false,
            defaults: false,
            primary_key: false,
            numeric_as_string: false,
            pretty: false,
            chunks: false,
            lsn: false,
            transaction: true,
            unchanged_marker: false,
            filter_origins: Vec::new(),
            filter_tables: Patterns::default(),
            add_tables: None,
            filter_prefixes: Prefixes::default(),
            add_prefixes: Prefixes::default(),
            actions: Actions::all(true),
            max_message_bytes: MAX_MESSAGE_BYTES,
        }
    }
}

impl Wal2JsonOptions {
    /// Reads the options; the first invalid one is the error. If a name is given several times, the
    /// last one counts, except where wal2json accumulates. The members of `filter-tables`,
    /// `filter-origins`, `filter-msg-prefixes` and `add-msg-prefixes` are joined, until one without
    /// a value clears the list. `pretty-print` stays on.
    ///
    /// # Errors
    /// [`Error`] for the first invalid option.
    pub fn parse(given: &[OptionText]) -> Result<Self> {
        let mut options = Self::default();
        for (name, value) in given {
            options.read(name, value.as_deref())?;
        }
        Ok(options)
    }

    fn read(&mut self, name: &str, value: Option<&str>) -> Result<()> {
        if let Some((option, switch)) = self.switch(name) {
            // wal2json never switches `pretty-print` off again.
            let stays = *switch && option == "pretty-print";
            *switch = read_switch(option, value)? || stays;
            return Ok(());
        }
        match (name, value) {
            ("include-unchanged-toast", _) => {
                return Err(Error::Deprecated("include-unchanged-toast"));
            }
            ("filter-origins", None) => self.filter_origins.clear(),
            ("filter-origins", Some(text)) => {
                let members = read_list("filter-origins", text, list::split_loosely)?;
                self.filter_origins
                    .extend(members.into_iter().map(leading_number));
            }
            ("filter-tables", None) => self.filter_tables = Patterns::default(),
            ("filter-tables", Some(text)) => {
                let more = read_list("filter-tables", text, Patterns::parse)?;
                self.filter_tables.append(more);
            }
            // Selects no tables at all, unlike a missing option.
            ("add-tables", None) => self.add_tables = Some(Patterns::default()),
            ("add-tables", Some(text)) => {
                self.add_tables = Some(read_list("add-tables", text, Patterns::parse)?);
            }
            ("filter-msg-prefixes", None) => self.filter_prefixes = Prefixes::default(),
            ("filter-msg-prefixes", Some(text)) => {
                let more = read_list("filter-msg-prefixes", text, Prefixes::parse)?;
                self.filter_prefixes.append(more);
            }
            ("add-msg-prefixes", None) => self.add_prefixes = Prefixes::default(),
            ("add-msg-prefixes", Some(text)) => {
                let more = read_list("add-msg-prefixes", text, Prefixes::parse)?;
                self.add_prefixes.append(more);
            }
            // Without a value, the latest version is meant.
            ("format-version", None) => self.version = Version::Two,
            ("format-version", Some(text)) => self.version = read_version(text)?,
            // Without a value, an earlier setting stays.
            ("actions", None) => {}
            ("actions", Some(text)) => self.actions = read_actions(text)?,
            ("max-message-size", value) => {
                self.max_message_bytes = read_size("max-message-size", value.unwrap_or(""))?;
            }
            _ => {
                return Err(Error::Unknown {
                    name: name.to_owned(),
                    value: value.unwrap_or("(null)").to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Returns the boolean option with this name.
    fn switch(&mut self, name: &str) -> Option<(&'static str, &mut bool)> {
        Some(match name {
            "include-xids" => ("include-xids", &mut self.xids),
            "include-timestamp" => ("include-timestamp", &mut self.timestamp),
            "include-schemas" => ("include-schemas", &mut self.schemas),
            "include-types" => ("include-types", &mut self.types),
            "include-typmod" => ("include-typmod", &mut self.typmod),
            "include-type-oids" => ("include-type-oids", &mut self.type_oids),
            "include-domain-data-type" => ("include-domain-data-type", &mut self.domain_data_type),
            "include-column-positions" => ("include-column-positions", &mut self.column_positions),
            "include-origin" => ("include-origin", &mut self.origin),
            "include-not-null" => ("include-not-null", &mut self.not_null),
            "include-default" => ("include-default", &mut self.defaults),
            "include-pk" => ("include-pk", &mut self.primary_key),
            "numeric-data-types-as-string" => {
                ("numeric-data-types-as-string", &mut self.numeric_as_string)
            }
            "pretty-print" => ("pretty-print", &mut self.pretty),
            "write-in-chunks" => ("write-in-chunks", &mut self.chunks),
            "include-lsn" => ("include-lsn", &mut self.lsn),
            "include-transaction" => ("include-transaction", &mut self.transaction),
            "include-unchanged-toast-marker" => {
                ("include-unchanged-toast-marker", &mut self.unchanged_marker)
            }
            _ => return None,
        })
    }

    /// Returns whether types are shown with their modifiers; version 2 always does.
    #[must_use]
    pub const fn formats_types(&self) -> bool {
        self.typmod || matches!(self.version, Version::Two)
    }

    /// Returns whether values of a domain are written like its base type's. Version 1 does so if it
    /// shows that type, version 2 never.
    #[must_use]
    pub const fn unwraps_domains(&self) -> bool {
        self.types && self.domain_data_type && matches!(self.version, Version::One)
    }

    /// Returns whether changes of a table are written.
    #[must_use]
    pub fn wants_table(&self, schema: &str, table: &str) -> bool {
        !self.filter_tables.matches(schema, table)
            && self
                .add_tables
                .as_ref()
                .is_none_or(|patterns| patterns.matches(schema, table))
    }

    /// Returns whether changes of one of the extension's tables are written: only if `add-tables`
    /// has its schema by name. Statements for other nodes, and received from them, can contain
    /// passwords, so their tables are never written.
    #[must_use]
    pub fn wants_own_table(&self, schema: &str, table: &str) -> bool {
        !matches!(table, "ddl_message" | "parked_record")
            && self.wants_table(schema, table)
            && self
                .add_tables
                .as_ref()
                .is_some_and(|patterns| patterns.name_schema_of(schema, table))
    }

    /// Converts the prefixes, which are compared with bytes of messages, from UTF-8 to the
    /// messages' encoding. `encode` returns `None` for a text that this encoding cannot represent.
    pub fn encode(&mut self, encode: impl Fn(&str) -> Option<Vec<u8>>) {
        self.filter_prefixes.encode(&encode);
        self.add_prefixes.encode(&encode);
    }

    /// Returns whether messages with a prefix are written.
    #[must_use]
    pub fn wants_prefix(&self, prefix: &[u8]) -> bool {
        !self.filter_prefixes.has(prefix)
            && (self.add_prefixes.is_empty() || self.add_prefixes.has(prefix))
    }
}

/// Reads a boolean as PostgreSQL does; an option without a value is on.
fn read_switch(option: &'static str, value: Option<&str>) -> Result<bool> {
    let Some(text) = value else { return Ok(true) };
    let is = |word: &str, least: usize| {
        text.len() >= least
            && word
                .get(..text.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(text))
    };
    if is("true", 1) || is("yes", 1) || is("on", 2) || text == "1" {
        Ok(true)
    } else if is("false", 1) || is("no", 1) || is("off", 2) || text == "0" {
        Ok(false)
    } else {
        Err(Error::Value {
            option,
            value: text.to_owned(),
        })
    }
}

fn read_list<'t, T>(
    option: &'static str,
    text: &'t str,
    parse: impl FnOnce(&'t str) -> Option<T>,
) -> Result<T> {
    parse(text).ok_or_else(|| Error::List {
        option,
        value: text.to_owned(),
    })
}

fn read_version(text: &str) -> Result<Version> {
    match read_integer(text) {
        None => Err(Error::Value {
            option: "format-version",
            value: text.to_owned(),
        }),
        Some(1) => Ok(Version::One),
        Some(2) => Ok(Version::Two),
        Some(low @ ..1) => Err(Error::VersionTooLow(low)),
        Some(high) => Err(Error::VersionTooHigh(high)),
    }
}

fn read_actions(text: &str) -> Result<Actions> {
    let mut actions = Actions::all(false);
    for action in read_list("actions", text, list::split)? {
        match action {
            "insert" => actions.insert = true,
            "update" => actions.update = true,
            "delete" => actions.delete = true,
            "truncate" => actions.truncate = true,
            _ => {
                return Err(Error::Value {
                    option: "actions",
                    value: action.to_owned(),
                });
            }
        }
    }
    Ok(actions)
}

/// Reads a number of bytes, optionally with a unit: `64MB`.
fn read_size(option: &'static str, text: &str) -> Result<usize> {
    let digits = text.trim_end_matches(|character: char| character.is_ascii_alphabetic());
    let unit = match text.get(digits.len()..) {
        Some("" | "B") => Some(1),
        Some("kB") => Some(1 << 10),
        Some("MB") => Some(1 << 20),
        Some("GB") => Some(1 << 30),
        _ => None,
    };
    let bytes = digits.trim().parse::<usize>().ok();
    bytes
        .zip(unit)
        .and_then(|(count, unit)| count.checked_mul(unit))
        .map(|bytes| bytes.clamp(MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES))
        .ok_or_else(|| Error::Value {
            option,
            value: text.to_owned(),
        })
}

/// Returns the number at the start of a text, 0 if there is none: the result of C's `atoi` with
/// 64-bit longs, as an unsigned number.
fn leading_number(text: &str) -> u32 {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut number = 0_i64;
    for digit in digits.bytes().take_while(u8::is_ascii_digit) {
        let digit = i64::from(digit - b'0');
        let signed = if negative { -digit } else { digit };
        // Like `strtol`, saturate at the limits of a long.
        number = number.saturating_mul(10).saturating_add(signed);
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "C keeps the lower 32 bits, too"
    )]
    let number = number as u32;
    number
}

/// Reads an integer as PostgreSQL does in a setting without a unit (`parse_int` of
/// src/backend/utils/misc/guc.c, 15): decimal, octal after 0, hexadecimal after 0x, or a decimal
/// fraction that is rounded; white space around it is ignored.
fn read_integer(text: &str) -> Option<i32> {
    let text = text.trim_matches(|character| u8::try_from(character).is_ok_and(list::is_space));
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if !digits.starts_with(|first: char| first.is_ascii_digit() || first == '.') {
        return None;
    }
    let hexadecimal = digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"));
    let whole = match hexadecimal {
        Some(digits) if !digits.starts_with(['+', '-']) => i64::from_str_radix(digits, 16).ok(),
        Some(_) => None,
        None if digits.len() > 1
            && digits.starts_with('0')
            && digits.bytes().all(|b| b.is_ascii_digit()) =>
        {
            i64::from_str_radix(digits, 8).ok()
        }
        None => digits.parse().ok(),
    };
    if let Some(whole) = whole {
        return i32::try_from(if negative { -whole } else { whole }).ok();
    }
    if hexadecimal.is_some() || !digits.contains(['.', 'e', 'E']) {
        return None;
    }
    let fraction: f64 = digits.parse().ok()?;
    let rounded = if negative { -fraction } else { fraction }.round_ties_even();
    if (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&rounded) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a whole number in the range of the type"
        )]
        return Some(rounded as i32);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(given: &[(&str, &str)]) -> Result<Wal2JsonOptions> {
        let given: Vec<_> = given
            .iter()
            .map(|(name, value)| ((*name).to_owned(), Some((*value).to_owned())))
            .collect();
        Wal2JsonOptions::parse(&given)
    }

    #[test]
    fn every_option_is_known() {
        for name in OPTIONS {
            let result = Wal2JsonOptions::parse(&[(name.to_owned(), None)]);
            match name {
                "include-unchanged-toast" => {
                    assert_eq!(result, Err(Error::Deprecated("include-unchanged-toast")));
                }
                "max-message-size" => assert!(result.is_err()),
                _ => assert!(result.is_ok(), "{name}"),
            }
        }
        assert_eq!(
            parse(&[("include_xids", "1")]).unwrap_err().to_string(),
            "option \"include_xids\" = \"1\" is unknown"
        );
        assert_eq!(
            Wal2JsonOptions::parse(&[("foo".to_owned(), None)])
                .unwrap_err()
                .to_string(),
            "option \"foo\" = \"(null)\" is unknown"
        );
    }

    #[test]
    fn switches() {
        for on in ["1", "on", "oN", "t", "tru", "TRUE", "y", "yes"] {
            assert!(parse(&[("include-xids", on)]).unwrap().xids, "{on}");
        }
        for off in ["0", "of", "off", "f", "False", "n", "no"] {
            assert!(
                !parse(&[("include-schemas", off)]).unwrap().schemas,
                "{off}"
            );
        }
        for wrong in ["", "o", "2", " on", "on ", "trues", "é", "01"] {
            let error = parse(&[("include-lsn", wrong)]).unwrap_err();
            let message =
                format!("could not parse value \"{wrong}\" for parameter \"include-lsn\"");
            assert_eq!(error.to_string(), message);
        }
        assert!(
            !parse(&[("include-xids", "1"), ("include-xids", "0")])
                .unwrap()
                .xids
        );
    }

    #[test]
    fn versions() {
        for (text, version) in [
            ("1", Version::One),
            ("2.0", Version::Two),
            (" 2", Version::Two),
            ("2 ", Version::Two),
            ("+2", Version::Two),
            ("02", Version::Two),
            ("0x2", Version::Two),
            ("1e0", Version::One),
            ("2.5", Version::Two),
            ("0.6", Version::One),
        ] {
            let options = parse(&[("format-version", text)]).unwrap();
            assert_eq!(options.version, version, "{text}");
        }
        for (text, low) in [("0", 0), ("-1", -1), (".5", 0), ("-0x10", -16)] {
            let expected = Err(Error::VersionTooLow(low));
            assert_eq!(parse(&[("format-version", text)]), expected, "{text}");
        }
        for (text, high) in [("3", 3), ("010", 8), ("1.5e3", 1500)] {
            let expected = Err(Error::VersionTooHigh(high));
            assert_eq!(parse(&[("format-version", text)]), expected, "{text}");
        }
        for wrong in [
            "",
            "x",
            "1x",
            "0x",
            "08x",
            "4294967298",
            "99999999999999999999",
            "1e99",
            "nan",
            "inf",
            "- 1",
            "0x-1",
            ".",
            "--1",
        ] {
            assert!(
                matches!(
                    parse(&[("format-version", wrong)]),
                    Err(Error::Value { .. })
                ),
                "{wrong}"
            );
        }
    }

    #[test]
    fn lists() {
        let actions = parse(&[("actions", " insert,truncate")]).unwrap().actions;
        assert!(actions.insert && actions.truncate && !actions.update && !actions.delete);
        assert_eq!(
            parse(&[("actions", "")]).unwrap().actions,
            Actions::all(false)
        );
        assert_eq!(
            parse(&[("actions", "insert,foo")]),
            Err(Error::Value {
                option: "actions",
                value: "foo".to_owned()
            })
        );
        for (option, value) in [
            ("actions", "insert update"),
            ("filter-tables", "t"),
            ("add-tables", "public.t,"),
            ("filter-msg-prefixes", "a b"),
            ("add-msg-prefixes", ","),
            ("filter-origins", "1 2"),
        ] {
            assert!(
                matches!(parse(&[(option, value)]), Err(Error::List { option: of, value: was }) if of == option && was == value)
            );
        }
    }

    #[test]
    fn origins() {
        for (text, numbers) in [
            ("2, 1x,x", vec![2, 1, 0]),
            ("\x0b1\x0b,\t2", vec![1, 2]),
            (",01,", vec![0, 1, 0]),
            ("", vec![]),
            ("+1,-1,++1,+-1,--1,+", vec![1, u32::MAX, 0, 0, 0, 0]),
            // Modulo 2^32, saturated at the limits of a long.
            ("4294967297,-4294967295", vec![1, 1]),
            (
                "9223372036854775807,18446744073709551617",
                vec![u32::MAX, u32::MAX],
            ),
            ("-9223372036854775808,-99999999999999999999", vec![0, 0]),
            ("0x1,1e3,\\1", vec![0, 1, 0]),
        ] {
            let parsed = parse(&[("filter-origins", text)]).map(|options| options.filter_origins);
            assert_eq!(parsed, Ok(numbers), "{text}");
        }
    }

    /// Repeated options, as wal2json 2.5 handles them.
    #[test]
    fn repeated() {
        let parse = |lines: &str| {
            let given: Vec<_> = lines
                .split(' ')
                .map(|line| match line.split_once('=') {
                    Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                    None => (line.to_owned(), None),
                })
                .collect();
            Wal2JsonOptions::parse(&given)
        };
        let tables = |lines: &str| {
            let options = parse(lines).unwrap();
            let wanted = ["a", "b", "c"].map(|table| options.wants_table("s", table));
            wanted.map(u8::from)
        };
        assert_eq!(tables("filter-tables=s.a filter-tables=s.b"), [0, 0, 1]);
        assert_eq!(tables("filter-tables=s.a filter-tables="), [0, 1, 1]);
        assert_eq!(tables("filter-tables=s.a filter-tables"), [1, 1, 1]);
        assert_eq!(
            tables("filter-tables=s.a filter-tables filter-tables=s.b"),
            [1, 0, 1]
        );
        assert_eq!(tables("add-tables=s.a add-tables=s.b"), [0, 1, 0]);
        assert_eq!(tables("add-tables=s.a add-tables="), [0, 0, 0]);
        assert_eq!(tables("add-tables=s.a add-tables"), [0, 0, 0]);
        assert_eq!(
            tables("add-tables=*.* filter-tables=s.b add-tables=s.b,s.c"),
            [0, 0, 1]
        );
        let prefixes = |lines: &str| {
            let options = parse(lines).unwrap();
            let wanted = ["p", "q", "r"].map(|prefix| options.wants_prefix(prefix.as_bytes()));
            wanted.map(u8::from)
        };
        for (wanted, option) in [(1, "add-msg-prefixes"), (0, "filter-msg-prefixes")] {
            let other = 1 - wanted;
            let both = format!("{option}=p {option}=q");
            assert_eq!(prefixes(&both), [wanted, wanted, other]);
            let kept = format!("{option}=p {option}=");
            assert_eq!(prefixes(&kept), [wanted, other, other]);
            let cleared = format!("{option}=p {option}");
            assert_eq!(prefixes(&cleared), [1, 1, 1]);
        }
        let origins = |lines: &str| parse(lines).unwrap().filter_origins;
        assert_eq!(
            origins("filter-origins=1 filter-origins=2,3 filter-origins="),
            [1, 2, 3]
        );
        assert_eq!(
            origins("filter-origins=1 filter-origins filter-origins=2"),
            [2]
        );
        let actions = |lines: &str| parse(lines).unwrap().actions;
        assert_eq!(
            actions("actions=insert actions=update"),
            actions("actions=update")
        );
        assert_eq!(actions("actions=insert actions"), actions("actions=insert"));
        assert_eq!(actions("actions=insert actions="), Actions::all(false));
        assert_eq!(actions("actions"), Actions::all(true));
        let version = |lines: &str| parse(lines).unwrap().version;
        assert_eq!(version("format-version=2 format-version=1"), Version::One);
        assert_eq!(version("format-version=1 format-version"), Version::Two);
        assert!(parse("pretty-print=1 pretty-print=0").unwrap().pretty);
        assert!(parse("pretty-print=0 pretty-print").unwrap().pretty);
        assert!(!parse("write-in-chunks write-in-chunks=0").unwrap().chunks);
        // An invalid option is an error in any position.
        assert!(parse("filter-tables=t filter-tables").is_err());
        assert!(parse("filter-tables=s.t filter-tables=t").is_err());
        assert!(parse("pretty-print=1 pretty-print=x").is_err());
    }

    #[test]
    fn tables_and_prefixes() {
        let options = parse(&[
            ("add-tables", "*.a,public.b"),
            ("filter-tables", "secret.*"),
            ("filter-msg-prefixes", "x"),
        ])
        .unwrap();
        assert!(options.wants_table("public", "a"));
        assert!(!options.wants_table("secret", "a"));
        assert!(!options.wants_table("public", "c"));
        assert!(options.wants_prefix(b"y") && !options.wants_prefix(b"x"));
        // A table of the extension must be requested by name.
        for (add, filter, wanted) in [
            (None, None, false),
            (Some("*.*"), None, false),
            (Some("*.node"), None, false),
            (Some("braid.*"), None, true),
            (Some("*.*,braid.node"), None, true),
            (Some("braid.other"), None, false),
            (Some("braid.*"), Some("*.node"), false),
        ] {
            let add = add.map(|text| ("add-tables", text));
            let filter = filter.map(|text| ("filter-tables", text));
            let given: Vec<_> = add.into_iter().chain(filter).collect();
            let options = parse(&given).unwrap();
            assert_eq!(
                options.wants_own_table("braid", "node"),
                wanted,
                "{given:?}"
            );
        }
        let all = parse(&[("add-tables", "braid.*")]).unwrap();
        assert!(all.wants_own_table("braid", "ddl_entry"));
        assert!(!all.wants_own_table("braid", "ddl_message"));
        assert!(!all.wants_own_table("braid", "parked_record"));
        // An empty list of tables selects none; an empty list of prefixes selects all.
        let empty = parse(&[("add-tables", ""), ("add-msg-prefixes", "")]).unwrap();
        assert!(!empty.wants_table("public", "a"));
        assert!(empty.wants_prefix(b"y"));
    }

    #[test]
    fn sizes() {
        let bytes =
            |text| parse(&[("max-message-size", text)]).map(|options| options.max_message_bytes);
        assert_eq!(bytes("16MB"), Ok(16 << 20));
        assert_eq!(bytes("100000"), Ok(100_000));
        assert_eq!(bytes("1"), Ok(MIN_MESSAGE_BYTES));
        assert_eq!(bytes("8GB"), Ok(MAX_MESSAGE_BYTES));
        for wrong in ["", "MB", "1TB", "-1", "99999999999999999999GB", "1 0"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
