//! The options of a subscription, each defined once: its name, type, default, values, and the
//! effect of a change. This list determines the columns that are written and read, the check of
//! requested values, and the fingerprint that restarts a leader.
//!
//! To add an option: a line in `options!` below, a column of `braid.subscription`, an argument of
//! the two SQL functions, a row in the reference. The tests of this file name the missing parts;
//! the compiler names the places that must handle the option.

/// Type of an option's value. Its text is in the format of the column's type.
pub trait Value: Sized {
    /// Type of the column and of the argument.
    const SQL_TYPE: &'static str;
    /// The valid texts. Empty: all that the type reads.
    const CHOICES: &'static [&'static str] = &[];
    /// Returns SQL for the stored value's text; `column` is an expression for the column.
    #[must_use]
    fn select(column: &str) -> String {
        format!("{column}::text")
    }
    /// Returns SQL for the column's value; `expression` has the argument's type.
    #[must_use]
    fn store(expression: &str) -> String {
        expression.to_owned()
    }
    /// Parses a text that [`Self::select`] returned.
    fn parse(text: &str) -> Option<Self>;
    /// Returns a text that [`Self::store`] takes after a cast to [`Self::SQL_TYPE`].
    fn text(&self) -> String;
}

impl Value for bool {
    const SQL_TYPE: &'static str = "boolean";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// Name of a slot.
impl Value for String {
    const SQL_TYPE: &'static str = "name";

    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }

    fn text(&self) -> String {
        self.clone()
    }
}

/// Separator of names in a list that is sent as one text.
pub const LIST_SEPARATOR: char = '\u{1}';

/// Names of publications.
impl Value for Vec<String> {
    const SQL_TYPE: &'static str = "text[]";

    fn select(column: &str) -> String {
        format!("array_to_string({column}, E'\\x01')")
    }

    fn parse(text: &str) -> Option<Self> {
        Some(text.split(LIST_SEPARATOR).map(str::to_owned).collect())
    }

    fn text(&self) -> String {
        array_literal(self)
    }
}

/// Returns the elements as the text form of an array.
#[must_use]
pub fn array_literal(elements: &[String]) -> String {
    let quoted: Vec<String> = elements
        .iter()
        .map(|element| format!("\"{}\"", element.replace('\\', "\\\\").replace('"', "\\\"")))
        .collect();
    format!("{{{}}}", quoted.join(","))
}

/// A limit; 0 means none, and is null in the column.
impl Value for u32 {
    const SQL_TYPE: &'static str = "integer";

    fn select(column: &str) -> String {
        format!("coalesce({column}, 0)::text")
    }

    fn store(expression: &str) -> String {
        format!("nullif({expression}, 0)")
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// An enum whose values have names in SQL.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)+
        }

        impl $name {
            /// Returns the value's name in SQL.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }

        impl Value for $name {
            const SQL_TYPE: &'static str = "text";
            const CHOICES: &'static [&'static str] = &[$($text),+];

            fn parse(text: &str) -> Option<Self> {
                match text {
                    $($text => Some(Self::$variant),)+
                    _ => None,
                }
            }

            fn text(&self) -> String {
                self.name().to_owned()
            }
        }
    };
}

choice! {
    /// The origin of the transactions that are requested from the provider.
    Origin {
        /// Only transactions that were first committed at the provider.
        None = "none",
        /// Also transactions that the provider has received from other nodes.
        Any = "any",
    }
}

choice! {
    /// How durable a local commit is before it is confirmed to the provider.
    SynchronousCommit {
        /// Flushed whenever the WAL writer gets to it.
        Off = "off",
        /// Flushed to this server's disk.
        Local = "local",
        /// Flushed to the disks of its synchronous standbys, too.
        On = "on",
        /// Written by the synchronous standbys to their operating systems.
        RemoteWrite = "remote_write",
        /// Visible on the synchronous standbys.
        RemoteApply = "remote_apply",
    }
}

choice! {
    /// How transactions are applied.
    ApplyMode {
        /// In parallel, if their keys differ.
        Parallel = "parallel",
        /// One after the other.
        Serial = "serial",
        /// Several joined into one local transaction.
        Batch = "batch",
        /// As `Batch`, with the changes regrouped by table.
        Aggregate = "aggregate",
    }
}

choice! {
    /// The order in which transactions are committed locally.
    CommitOrder {
        /// The provider's order.
        Source = "source",
        /// Each transaction commits once those that it depends on are committed.
        Relaxed = "relaxed",
    }
}

choice! {
    /// When large transactions are sent.
    Streaming {
        /// Once they have committed.
        Off = "off",
        /// While they run; they are applied once they have committed.
        On = "on",
        /// While they run; they are applied at the same time.
        Parallel = "parallel",
    }
}

choice! {
    /// Reaction to a transaction that cannot be applied.
    OnError {
        /// The subscription stops, except if a conflict function fails: then the transaction is
        /// parked.
        Stop = "stop",
        /// The transaction is parked.
        Park = "park",
        /// The subscription stops on every error.
        StopAlways = "stop_always",
    }
}

choice! {
    /// Reaction to a published column that the local table lacks.
    OnMissingColumn {
        /// The subscription stops.
        Error = "error",
        /// The column's values are left out.
        Ignore = "ignore",
    }
}

/// Properties of an option apart from its value.
#[derive(Debug, Clone, Copy)]
pub struct Description {
    /// Name of the column and of the argument.
    pub name: &'static str,
    /// Default of `create_subscription`, as SQL.
    pub default: &'static str,
    /// Whether `alter_subscription` changes the option.
    pub is_alterable: bool,
    /// Whether another value restarts the leader.
    pub restarts_leader: bool,
    /// [`Value::SQL_TYPE`].
    pub sql_type: &'static str,
    /// [`Value::CHOICES`].
    pub choices: &'static [&'static str],
    select: fn(&str) -> String,
    store: fn(&str) -> String,
}

impl Description {
    /// Returns SQL for the value of parameter `$number` as the column stores it.
    #[must_use]
    pub fn parameter(&self, number: usize) -> String {
        (self.store)(&format!("${number}::{}", self.sql_type))
    }

    /// Returns an assignment of UPDATE: parameter `$number`, or the old value if the parameter is
    /// null.
    #[must_use]
    pub fn assignment(&self, number: usize) -> String {
        let new = format!("coalesce(${number}::{}, {})", self.sql_type, self.name);
        format!("{} = {}", self.name, (self.store)(&new))
    }
}

/// Defines the options, one line for each: its doc comment, name and type; `= default` of
/// create_subscription as SQL; `altered` or `kept` by alter_subscription; whether another value
/// `restarts` the leader, or it `runs_on`.
macro_rules! options {
    (@altered altered) => { true };
    (@altered kept) => { false };
    (@restarts restarts) => { true };
    (@restarts runs_on) => { false };
    ($($(#[$doc:meta])* $name:ident: $type:ty = $default:literal, $altered:ident, $restarts:ident;)+) => {
        /// The options of a subscription.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Options {
            $($(#[$doc])* pub $name: $type,)+
        }

        /// The options that somebody asks to change; missing ones keep their values.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Request {
            $($(#[$doc])* pub $name: Option<$type>,)+
        }

        /// Properties of each option, in the order of the arguments of `create_subscription`.
        pub const DESCRIPTIONS: &[Description] = &[
            $(Description {
                name: stringify!($name),
                default: $default,
                is_alterable: options!(@altered $altered),
                restarts_leader: options!(@restarts $restarts),
                sql_type: <$type as Value>::SQL_TYPE,
                choices: <$type as Value>::CHOICES,
                select: <$type as Value>::select,
                store: <$type as Value>::store,
            },)+
        ];

        impl Options {
            /// Reads the options from a row of [`select_list`]: `read` returns the text of a column
            /// of that list.
            ///
            /// # Errors
            /// The name of the first option whose text is not a valid value.
            pub fn read(mut read: impl FnMut(usize) -> Option<String>) -> Result<Self, &'static str> {
                let mut index = 0;
                let mut next = || {
                    index += 1;
                    read(index - 1)
                };
                Ok(Self {
                    $($name: next().as_deref().and_then(Value::parse).ok_or(stringify!($name))?,)+
                })
            }

            /// Returns the text of each option in the order of [`DESCRIPTIONS`].
            #[must_use]
            pub fn texts(&self) -> Vec<String> {
                vec![$(Value::text(&self.$name),)+]
            }

            /// Replaces the values that are requested.
            pub fn change(&mut self, request: &Request) {
                $(if let Some(value) = &request.$name {
                    self.$name.clone_from(value);
                })+
            }
        }

        impl Request {
            /// Returns the text of each option in the order of [`DESCRIPTIONS`]; `None` for missing
            /// ones.
            #[must_use]
            pub fn texts(&self) -> Vec<Option<String>> {
                vec![$(self.$name.as_ref().map(Value::text),)+]
            }
        }
    };
}

options! {
    /// Names of the provider's publications.
    publications: Vec<String> = "'{braid}'", altered, restarts;
    /// Tables are copied before their changes are applied.
    copy_data: bool = "true", kept, runs_on;
    /// The subscription's workers run.
    enabled: bool = "true", kept, runs_on;
    /// The slot is created at the provider.
    create_slot: bool = "true", kept, runs_on;
    /// Slot at the provider. If none is given, the name is derived from those of node and
    /// subscription.
    slot_name: String = "null", altered, restarts;
    /// The origin of the requested transactions.
    origin: Origin = "'none'", altered, restarts;
    /// How durable a local commit is before it is confirmed.
    synchronous_commit: SynchronousCommit = "'off'", altered, restarts;
    /// Changes are applied as the subscription's owner instead of the tables'.
    run_as_owner: bool = "false", altered, restarts;
    /// Any error stops the subscription.
    disable_on_error: bool = "false", altered, restarts;
    /// How transactions are applied.
    apply_mode: ApplyMode = "'parallel'", altered, restarts;
    /// Many changes of one row in a batch become one.
    consolidate: bool = "false", altered, restarts;
    /// The order in which transactions are committed.
    commit_order: CommitOrder = "'source'", altered, restarts;
    /// When large transactions are sent.
    streaming: Streaming = "'parallel'", altered, restarts;
    /// Transactions that are prepared at the provider are prepared locally.
    two_phase: bool = "false", kept, restarts;
    /// Transactions with more changes are committed in chunks of this many; 0: never.
    split_transactions_above: u32 = "null", altered, restarts;
    /// Reaction to a transaction that cannot be applied.
    on_error: OnError = "'stop'", altered, restarts;
    /// Reaction to a published column that the local table lacks.
    on_missing_column: OnMissingColumn = "'error'", altered, restarts;
    /// Statements that change the schema at the provider are run locally.
    replicate_ddl: bool = "false", altered, restarts;
}

/// Returns SQL that reads all options of a row of `braid.subscription` as texts; `alias` is the
/// row's.
#[must_use]
pub fn select_list(alias: &str) -> String {
    let columns: Vec<String> = DESCRIPTIONS
        .iter()
        .map(|option| (option.select)(&format!("{alias}.{}", option.name)))
        .collect();
    columns.join(", ")
}

/// Returns the columns whose change restarts a leader.
#[must_use]
pub fn fingerprint_columns() -> String {
    let columns: Vec<&str> = DESCRIPTIONS
        .iter()
        .filter(|option| option.restarts_leader)
        .map(|option| option.name)
        .collect();
    columns.join(", ")
}

/// Two options that exclude each other: message and hint for a request of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exclusion {
    /// Message that names the two options.
    pub message: &'static str,
    /// Hint with a way out.
    pub hint: &'static str,
}

impl Options {
    /// Returns whether commits may overtake each other.
    #[must_use]
    pub fn is_relaxed(&self) -> bool {
        self.commit_order == CommitOrder::Relaxed
    }

    /// Returns whether a transaction that cannot be applied is parked instead of stopping the
    /// subscription.
    #[must_use]
    pub fn parks(&self) -> bool {
        self.on_error == OnError::Park
    }

    /// Returns whether a transaction is parked if a conflict function fails, whatever happens after
    /// other errors.
    #[must_use]
    pub fn parks_functions(&self) -> bool {
        self.on_error != OnError::StopAlways && !self.disable_on_error
    }

    /// Returns whether published columns that the local table lacks are left out, unless a rule of
    /// the table says otherwise.
    #[must_use]
    pub fn ignores_missing(&self) -> bool {
        self.on_missing_column == OnMissingColumn::Ignore
    }

    /// Returns two of these options that exclude each other.
    #[must_use]
    pub fn exclusion(&self) -> Option<Exclusion> {
        if self.parks() && self.disable_on_error {
            return Some(Exclusion {
                message: "on_error => 'park' and disable_on_error exclude each other",
                hint: "With disable_on_error each error stops the subscription.",
            });
        }
        (self.two_phase && self.is_relaxed()).then_some(Exclusion {
            message: "two_phase and commit_order => 'relaxed' exclude each other",
            hint: "Use two_phase => false: prepared transactions are sent once they have committed.",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INSTALL: &str = include_str!("../../extension/sql/braid--0.0.0.sql");
    const REFERENCE: &str = include_str!("../../docs/reference/subscription-options.md");

    /// Returns the text after `start`, up to `end`.
    fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
        let (_, rest) = text.split_once(start).expect(start);
        rest.split_once(end).expect(end).0
    }

    fn lines(text: &str) -> Vec<&str> {
        text.lines()
            .map(|line| line.trim().trim_end_matches(','))
            .filter(|line| !line.is_empty() && !line.starts_with("--"))
            .collect()
    }

    fn described(name: &str) -> &'static Description {
        DESCRIPTIONS
            .iter()
            .find(|option| option.name == name)
            .expect(name)
    }

    /// Returns the texts of a row in which each option has its first choice, or some value of its
    /// type.
    fn some_texts() -> Vec<Option<String>> {
        DESCRIPTIONS
            .iter()
            .map(|option| {
                let text = match option.sql_type {
                    "boolean" => "false",
                    "integer" => "0",
                    _ => option.choices.first().copied().unwrap_or("braid"),
                };
                Some(text.to_owned())
            })
            .collect()
    }

    fn read(texts: &[Option<String>]) -> Result<Options, &'static str> {
        Options::read(|index| texts.get(index).cloned().flatten())
    }

    fn nothing() -> Request {
        Request {
            publications: None,
            copy_data: None,
            enabled: None,
            create_slot: None,
            slot_name: None,
            origin: None,
            synchronous_commit: None,
            run_as_owner: None,
            disable_on_error: None,
            apply_mode: None,
            consolidate: None,
            commit_order: None,
            streaming: None,
            two_phase: None,
            split_transactions_above: None,
            on_error: None,
            on_missing_column: None,
            replicate_ddl: None,
        }
    }

    #[test]
    fn create_subscription_takes_each_option_with_its_default() {
        let arguments = lines(between(
            INSTALL,
            "create function braid.create_subscription(",
            ")",
        ));
        let expected: Vec<String> = ["subscription_name name".to_owned(), "dsn text".to_owned()]
            .into_iter()
            .chain(DESCRIPTIONS.iter().map(|option| {
                format!(
                    "{} {} default {}",
                    option.name, option.sql_type, option.default
                )
            }))
            .collect();
        assert_eq!(arguments, expected);
    }

    #[test]
    fn alter_subscription_takes_each_option() {
        let mut arguments = lines(between(
            INSTALL,
            "create function braid.alter_subscription(",
            ")",
        ));
        arguments.sort_unstable();
        // The function itself explains why two_phase cannot be changed.
        let mut expected: Vec<String> = [
            "subscription_name name".to_owned(),
            "dsn text default null".to_owned(),
        ]
        .into_iter()
        .chain(
            DESCRIPTIONS
                .iter()
                .filter(|option| option.is_alterable || option.name == "two_phase")
                .map(|option| format!("{} {} default null", option.name, option.sql_type)),
        )
        .collect();
        expected.sort_unstable();
        assert_eq!(arguments, expected);
    }

    #[test]
    fn each_option_has_a_column_that_takes_its_choices() {
        let columns = lines(between(
            INSTALL,
            "create table braid.subscription (",
            "\n);",
        ));
        for option in DESCRIPTIONS {
            let start = format!("{} {}", option.name, option.sql_type);
            let column = columns
                .iter()
                .find(|column| column.starts_with(&start))
                .unwrap_or_else(|| panic!("no column {start}"));
            // If the column has a list of values, it is the same list.
            if let Some((_, list)) = column.split_once(" in (") {
                let mut values: Vec<&str> = list
                    .trim_end_matches(')')
                    .split(", ")
                    .map(|value| value.trim_matches('\''))
                    .collect();
                let mut choices = option.choices.to_vec();
                values.sort_unstable();
                choices.sort_unstable();
                assert_eq!(values, choices, "{}", option.name);
            }
        }
    }

    #[test]
    fn the_view_shows_each_option_and_the_reference_explains_it() {
        let view = between(INSTALL, "create view braid.subscription_detail as", ";");
        for option in DESCRIPTIONS {
            // The view shows the slot, or the phase tells that it is to be created.
            assert!(
                option.name == "create_slot" || view.contains(&format!("s.{}", option.name)),
                "braid.subscription_detail does not show {}",
                option.name
            );
            let start = format!("| `{} {}` | ", option.name, option.sql_type);
            let row = REFERENCE
                .lines()
                .find(|line| line.starts_with(&start))
                .unwrap_or_else(|| panic!("the reference has no row for {}", option.name));
            if option.name != "slot_name" {
                assert!(
                    row.starts_with(&format!("{start}`{}` | ", option.default)),
                    "{row}"
                );
            }
            for choice in option.choices {
                assert!(
                    row.contains(&format!("`'{choice}'`")) || row.contains(&format!("`{choice}`")),
                    "the reference does not explain {choice} of {}",
                    option.name
                );
            }
        }
    }

    #[test]
    fn a_default_is_one_of_the_choices() {
        for option in DESCRIPTIONS
            .iter()
            .filter(|option| !option.choices.is_empty())
        {
            assert!(
                option.choices.contains(&option.default.trim_matches('\'')),
                "{}",
                option.name
            );
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let mut texts = some_texts();
        for (index, option) in DESCRIPTIONS.iter().enumerate() {
            for choice in option.choices {
                texts[index] = Some((*choice).to_owned());
                let options = read(&texts).expect("readable");
                let request = Request {
                    publications: Some(options.publications.clone()),
                    copy_data: Some(options.copy_data),
                    enabled: Some(options.enabled),
                    create_slot: Some(options.create_slot),
                    slot_name: Some(options.slot_name.clone()),
                    origin: Some(options.origin),
                    synchronous_commit: Some(options.synchronous_commit),
                    run_as_owner: Some(options.run_as_owner),
                    disable_on_error: Some(options.disable_on_error),
                    apply_mode: Some(options.apply_mode),
                    consolidate: Some(options.consolidate),
                    commit_order: Some(options.commit_order),
                    streaming: Some(options.streaming),
                    two_phase: Some(options.two_phase),
                    split_transactions_above: Some(options.split_transactions_above),
                    on_error: Some(options.on_error),
                    on_missing_column: Some(options.on_missing_column),
                    replicate_ddl: Some(options.replicate_ddl),
                };
                let mut written = options.texts().into_iter().map(Some).collect::<Vec<_>>();
                assert_eq!(written, request.texts());
                // A list is written as an array and read as elements.
                written[0] = Some("braid".to_owned());
                assert_eq!(written, texts, "{} {choice}", option.name);
                let mut changed = read(&some_texts()).expect("readable");
                changed.change(&request);
                assert_eq!(changed, options);
            }
        }
    }

    #[test]
    fn a_text_that_stands_for_no_value_is_named() {
        for (index, option) in DESCRIPTIONS.iter().enumerate() {
            if option.choices.is_empty() {
                continue;
            }
            let mut texts = some_texts();
            texts[index] = Some("no such value".to_owned());
            assert_eq!(read(&texts), Err(option.name));
            texts[index] = None;
            assert_eq!(read(&texts), Err(option.name));
        }
    }

    #[test]
    fn a_request_of_nothing_changes_nothing() {
        let before = read(&some_texts()).expect("readable");
        let mut after = before.clone();
        after.change(&nothing());
        assert_eq!(after, before);
        assert!(nothing().texts().iter().all(Option::is_none));
    }

    #[test]
    fn names_of_publications_are_an_array() {
        let names = vec!["a".to_owned(), "b \"c\" \\d".to_owned()];
        assert_eq!(names.text(), r#"{"a","b \"c\" \\d"}"#);
        assert_eq!(
            Vec::<String>::parse("a\u{1}b c"),
            Some(vec!["a".to_owned(), "b c".to_owned()])
        );
    }

    #[test]
    fn sql_of_a_limit_keeps_null_for_none() {
        let split = described("split_transactions_above");
        assert_eq!(split.parameter(3), "nullif($3::integer, 0)");
        assert_eq!(
            split.assignment(3),
            "split_transactions_above = nullif(coalesce($3::integer, split_transactions_above), 0)"
        );
        let origin = described("origin");
        assert_eq!(origin.parameter(2), "$2::text");
        assert_eq!(origin.assignment(2), "origin = coalesce($2::text, origin)");
        assert!(select_list("s").contains("coalesce(s.split_transactions_above, 0)::text"));
    }

    #[test]
    fn what_excludes_each_other_is_told() {
        let mut options = read(&some_texts()).expect("readable");
        assert_eq!(options.exclusion(), None);
        options.two_phase = true;
        options.commit_order = CommitOrder::Relaxed;
        assert!(
            options
                .exclusion()
                .is_some_and(|found| found.message.starts_with("two_phase"))
        );
        options.two_phase = false;
        options.on_error = OnError::Park;
        assert_eq!(options.exclusion(), None);
        options.disable_on_error = true;
        assert!(
            options
                .exclusion()
                .is_some_and(|found| found.message.starts_with("on_error"))
        );
    }
}
