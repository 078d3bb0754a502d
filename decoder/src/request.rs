//! The requested format of a stream, and its options.
//!
//! The option `format` names the format. If it is missing, an option that only one format has
//! implies that format.

use crate::error::{Error, Result};
use crate::options::{OptionText, Options, parse_origin, split_names};
use crate::origin::OriginPolicy;
use crate::wal2json::{self, Wal2JsonOptions};

/// A format and its options. To add a format: a variant here and a name in [`Request::parse`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// GIR records in binary frames, for subscriptions (`gir`).
    Gir(Options),
    /// JSON in the format of wal2json (`wal2json`).
    Wal2Json(Selection, Box<Wal2JsonOptions>),
    /// GIR records as JSON objects, for programs (`gir-json`).
    GirJson(Options, JsonRequest),
}

/// The changes to send, for a format that does not need publications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Publications whose tables are sent (`publication_names`); all tables if none is named.
    pub publications: Option<Vec<String>>,
    /// Origin of the changes that are sent (`origin`).
    pub origin: OriginPolicy,
}

/// Content of the JSON objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JsonRequest {
    /// A change contains only the name and number of its schema, whose columns are sent once
    /// (`schema` = `once`).
    pub schema_once: bool,
    /// Changes contain their key hashes (`keys`).
    pub keys: bool,
    /// Values of unchanged TOAST columns are fetched from the table (`include-unchanged-toast` =
    /// `fetch`).
    pub fetch: bool,
}

impl Request {
    /// Parses the options. `split` parses a list of SQL identifiers, and returns `None` for other
    /// text.
    ///
    /// # Errors
    /// [`Error::UnknownOption`], [`Error::MissingOption`], [`Error::InvalidOption`],
    /// [`Error::UnsupportedVersion`].
    pub fn parse(
        mut given: Vec<OptionText>,
        split: impl Fn(&str) -> Option<Vec<String>>,
    ) -> Result<Self> {
        let mut format = None;
        given.retain_mut(|(name, value)| {
            let here = name == "format";
            if here {
                format = Some(value.take().unwrap_or_default());
            }
            !here
        });
        let implied = || {
            given
                .iter()
                .any(|(name, _)| wal2json::OPTIONS.contains(&name.as_str()))
        };
        match format.as_deref() {
            Some("wal2json") => Self::wal2json(given, split),
            None if implied() => Self::wal2json(given, split),
            None | Some("gir") => Ok(Self::Gir(Options::parse(given, split)?)),
            Some("gir-json") => {
                let json = JsonRequest::take(&mut given)?;
                // Each record has a position of its own, so records cannot wait for each other.
                if let Some((name, _)) = given.iter().find(|(name, _)| name == "join_transactions")
                {
                    return Err(Error::UnknownOption(name.clone()));
                }
                // The version defines the binary format, which gir-json does not have.
                if !given.iter().any(|(name, _)| name == "proto_version") {
                    given.push(("proto_version".to_owned(), Some("1".to_owned())));
                }
                let options = Options::parse(given, split)?;
                // A fetch does not see changes of an uncommitted transaction: it would return the
                // value from before.
                if json.fetch && (options.streaming || options.two_phase) {
                    return Err(Error::InvalidOption {
                        option: "include-unchanged-toast",
                        value: "fetch".to_owned(),
                        hint: "Values are looked up of committed transactions only: set \"streaming\" and \"two_phase\" to off, or leave it out.",
                    });
                }
                Ok(Self::GirJson(options, json))
            }
            Some(other) => Err(Error::InvalidOption {
                option: "format",
                value: other.to_owned(),
                hint: "Valid values are \"gir\", \"gir-json\" and \"wal2json\".",
            }),
        }
    }

    fn wal2json(
        given: Vec<OptionText>,
        split: impl Fn(&str) -> Option<Vec<String>>,
    ) -> Result<Self> {
        let (ours, theirs): (Vec<_>, Vec<_>) = given.into_iter().partition(|(name, _)| {
            matches!(
                name.as_str(),
                "proto_version" | "publication_names" | "origin"
            )
        });
        let options = Box::new(Wal2JsonOptions::parse(&theirs)?);
        let mut selection = Selection {
            publications: None,
            origin: OriginPolicy::Any,
        };
        for (name, value) in ours {
            let value = value.unwrap_or_default();
            match name.as_str() {
                "publication_names" => {
                    selection.publications = Some(split_names(value, &split)?);
                }
                "origin" => selection.origin = parse_origin(value)?,
                // This format has no records, so any version would do. But a client that requests
                // another version does not know that.
                _ if value == "1" => {}
                _ => return Err(Error::UnsupportedVersion(value)),
            }
        }
        Ok(Self::Wal2Json(selection, options))
    }
}

impl JsonRequest {
    /// Removes the options that only this format has, and reads them.
    fn take(given: &mut Vec<OptionText>) -> Result<Self> {
        let mut request = Self::default();
        let mut refused = None;
        given.retain_mut(|(name, value)| {
            let (option, on, off, place) = match name.as_str() {
                "schema" => ("schema", "once", "each", &mut request.schema_once),
                "keys" => ("keys", "on", "off", &mut request.keys),
                "include-unchanged-toast" => (
                    "include-unchanged-toast",
                    "fetch",
                    "off",
                    &mut request.fetch,
                ),
                _ => return true,
            };
            let value = value.take().unwrap_or_default();
            if value == on || value == off {
                *place = value == on;
            } else {
                refused = Some((option, value));
            }
            false
        });
        match refused {
            None => Ok(request),
            Some((option, value)) => Err(Error::InvalidOption {
                option,
                value,
                hint: match option {
                    "schema" => "Valid values are \"each\" and \"once\".",
                    "keys" => "Valid values are \"on\" and \"off\".",
                    _ => "Valid values are \"off\" and \"fetch\".",
                },
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(given: &[(&str, &str)]) -> Result<Request> {
        let given = given
            .iter()
            .map(|(name, value)| ((*name).to_owned(), Some((*value).to_owned())));
        Request::parse(given.collect(), |list| Some(vec![list.to_owned()]))
    }

    #[test]
    fn gir_is_the_default() {
        let (version, names) = (("proto_version", "1"), ("publication_names", "a"));
        let plain = parse(&[version, names]).unwrap();
        assert!(matches!(&plain, Request::Gir(options) if options.publications == ["a"]));
        assert_eq!(parse(&[version, ("format", "gir"), names]), Ok(plain));
    }

    #[test]
    fn what_only_one_format_has_asks_for_it() {
        let Ok(Request::Wal2Json(selection, options)) = parse(&[("format-version", "2")]) else {
            panic!("not wal2json");
        };
        assert_eq!(options.version, crate::wal2json::Version::Two);
        assert_eq!(selection.publications, None);
        assert_eq!(selection.origin, OriginPolicy::Any);
        let all = [
            ("proto_version", "1"),
            ("publication_names", "a"),
            ("origin", "none"),
            ("format", "wal2json"),
        ];
        let Ok(Request::Wal2Json(selection, options)) = parse(&all) else {
            panic!("not wal2json");
        };
        assert_eq!(*options, Wal2JsonOptions::default());
        assert_eq!(selection.publications, Some(vec!["a".to_owned()]));
        assert_eq!(selection.origin, OriginPolicy::Local);
        // Requested by name, the other format does not know the option.
        assert_eq!(
            parse(&[("format", "gir"), ("include-xids", "1")]),
            Err(Error::UnknownOption("include-xids".to_owned()))
        );
        assert!(matches!(
            parse(&[("format", "wal2json"), ("node", "x")]),
            Err(Error::Wal2Json(_))
        ));
        assert!(parse(&[("pretty-print", "1"), ("proto_version", "2")]).is_err());
        assert!(parse(&[("pretty-print", "1"), ("origin", "x")]).is_err());
    }

    #[test]
    fn gir_json_has_options_of_its_own() {
        let (format, names) = (("format", "gir-json"), ("publication_names", "a"));
        let Ok(Request::GirJson(options, json)) = parse(&[names, format]) else {
            panic!("not gir-json");
        };
        assert_eq!(options.publications, ["a"]);
        assert_eq!(json, JsonRequest::default());
        let all = [
            names,
            ("schema", "once"),
            ("keys", "on"),
            ("include-unchanged-toast", "fetch"),
            ("origin", "any"),
            format,
            ("proto_version", "1"),
        ];
        let expected = JsonRequest {
            schema_once: true,
            keys: true,
            fetch: true,
        };
        assert!(matches!(parse(&all), Ok(Request::GirJson(_, json)) if json == expected));
        for name in ["schema", "keys", "include-unchanged-toast"] {
            assert!(matches!(
                parse(&[format, names, (name, "yes")]),
                Err(Error::InvalidOption { option, .. }) if option == name
            ));
            assert_eq!(
                parse(&[
                    ("format", "gir"),
                    names,
                    ("proto_version", "1"),
                    (name, "on")
                ]),
                Err(Error::UnknownOption(name.to_owned()))
            );
        }
        assert_eq!(
            parse(&[format, names, ("join_transactions", "off")]),
            Err(Error::UnknownOption("join_transactions".to_owned()))
        );
        assert_eq!(
            parse(&[format, names, ("proto_version", "2")]),
            Err(Error::UnsupportedVersion("2".to_owned()))
        );
        assert_eq!(
            parse(&[format]),
            Err(Error::MissingOption("publication_names"))
        );
    }

    #[test]
    fn gir_json_of_what_has_not_committed() {
        let (format, names) = (("format", "gir-json"), ("publication_names", "a"));
        let fetch = ("include-unchanged-toast", "fetch");
        let all = [
            format,
            names,
            ("streaming", "on"),
            ("two_phase", "on"),
            ("unprepared", "751"),
        ];
        let Ok(Request::GirJson(options, _)) = parse(&all) else {
            panic!("not gir-json");
        };
        assert!(options.streaming && options.two_phase);
        assert_eq!(options.unprepared, [751]);
        // Values cannot be fetched for a transaction that has not committed.
        for name in ["streaming", "two_phase"] {
            assert!(matches!(
                parse(&[format, names, fetch, (name, "on")]),
                Err(Error::InvalidOption { option: "include-unchanged-toast", value, .. }) if value == "fetch"
            ));
            assert!(parse(&[format, names, (name, "off"), fetch]).is_ok());
            let off = ("include-unchanged-toast", "off");
            assert!(parse(&[format, names, (name, "on"), off]).is_ok());
        }
    }

    #[test]
    fn an_unknown_format_is_refused() {
        for name in ["", "json", "GIR"] {
            assert!(matches!(
                parse(&[("format", name)]),
                Err(Error::InvalidOption { option: "format", value, .. }) if value == name
            ));
        }
    }
}
