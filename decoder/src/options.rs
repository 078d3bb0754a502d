//! The plugin's options, from START_REPLICATION or `pg_logical_slot_get_binary_changes`.

use crate::error::{Error, Result};
use crate::origin::{Only, OriginPolicy};

/// Name and value of one option; the value is optional.
pub type OptionText = (String, Option<String>);

/// The options of a subscriber's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Publications whose tables are sent (`publication_names`).
    pub publications: Vec<String>,
    /// Origin of the changes that are sent (`origin`).
    pub origin: OriginPolicy,
    /// Name of the subscriber's node, which gets none of its own changes back (`node`).
    pub node: Option<String>,
    /// Only transactions of one other node are sent, after a position (`only_origin`,
    /// `only_after`).
    pub only: Option<Only>,
    /// Logical messages are sent (`messages`).
    pub messages: bool,
    /// Several small transactions may be sent in one message, and positions as separate messages
    /// (`join_transactions`).
    pub join_transactions: bool,
    /// An update or delete of a row that another node wrote is sent with the version of that row
    /// (`replaced_versions`).
    pub replaced_versions: bool,
    /// Large transactions may be sent in segments while they run (`streaming`).
    pub streaming: bool,
    /// Prepared transactions are sent when they are prepared (`two_phase`).
    pub two_phase: bool,
    /// Ids of prepared transactions that are nevertheless sent when they have committed
    /// (`unprepared`).
    pub unprepared: Vec<u32>,
    /// Statements that change the schema are sent (`ddl`).
    pub ddl: bool,
}

impl Options {
    /// Parses the options. `split` parses a list of SQL identifiers, and returns `None` for other
    /// text.
    ///
    /// # Errors
    /// [`Error::UnknownOption`], [`Error::MissingOption`], [`Error::InvalidOption`],
    /// [`Error::UnsupportedVersion`].
    pub fn parse(
        given: Vec<OptionText>,
        split: impl Fn(&str) -> Option<Vec<String>>,
    ) -> Result<Self> {
        let mut version = None;
        let mut publications = None;
        let (mut only_origin, mut only_after) = (None, None);
        let mut options = Self {
            publications: Vec::new(),
            origin: OriginPolicy::Local,
            node: None,
            only: None,
            messages: false,
            join_transactions: false,
            replaced_versions: false,
            streaming: false,
            two_phase: false,
            unprepared: Vec::new(),
            ddl: false,
        };
        for (name, value) in given {
            let value = value.unwrap_or_default();
            match name.as_str() {
                "proto_version" => version = Some(value),
                "publication_names" => publications = Some(split_names(value, &split)?),
                "origin" => options.origin = parse_origin(value)?,
                "node" => options.node = Some(value).filter(|node| !node.is_empty()),
                "only_origin" => only_origin = Some(value).filter(|node| !node.is_empty()),
                "only_after" => only_after = Some(parse_position("only_after", value)?),
                "messages" => options.messages = parse_switch("messages", value)?,
                "join_transactions" => {
                    options.join_transactions = parse_switch("join_transactions", value)?;
                }
                "replaced_versions" => {
                    options.replaced_versions = parse_switch("replaced_versions", value)?;
                }
                "streaming" => options.streaming = parse_switch("streaming", value)?,
                "two_phase" => options.two_phase = parse_switch("two_phase", value)?,
                "unprepared" => options.unprepared = parse_ids("unprepared", value)?,
                "ddl" => options.ddl = parse_switch("ddl", value)?,
                _ => return Err(Error::UnknownOption(name)),
            }
        }
        match version {
            None => return Err(Error::MissingOption("proto_version")),
            Some(version) if version != "1" => return Err(Error::UnsupportedVersion(version)),
            Some(_) => {}
        }
        options.only = only(only_origin, only_after, &options)?;
        options.publications = publications.ok_or(Error::MissingOption("publication_names"))?;
        Ok(options)
    }
}

/// Returns the one origin node that is requested. Not possible with streaming: segments are sent
/// before the end position of their transaction at its origin is known.
fn only(node: Option<String>, after: Option<u64>, options: &Options) -> Result<Option<Only>> {
    let refused = |option, value: &str, hint| {
        Err(Error::InvalidOption {
            option,
            value: value.to_owned(),
            hint,
        })
    };
    match node {
        None => after.map_or(Ok(None), |after| {
            refused(
                "only_after",
                &braid_gir::lsn_text(after),
                "Give \"only_origin\" with it, or leave it out.",
            )
        }),
        Some(node) if options.origin != OriginPolicy::Any => {
            refused("only_origin", &node, "Set \"origin\" to \"any\".")
        }
        Some(node) if options.streaming || options.two_phase => refused(
            "only_origin",
            &node,
            "Set \"streaming\" and \"two_phase\" to \"off\".",
        ),
        Some(node) => Ok(Some(Only {
            node,
            after: after.unwrap_or(0),
        })),
    }
}

fn parse_position(option: &'static str, value: String) -> Result<u64> {
    braid_gir::parse_lsn(&value).ok_or(Error::InvalidOption {
        option,
        value,
        hint: "Give a position in WAL, as 0/15E3F40.",
    })
}

pub(crate) fn split_names(
    value: String,
    split: impl Fn(&str) -> Option<Vec<String>>,
) -> Result<Vec<String>> {
    match split(&value) {
        Some(names) if !names.is_empty() => Ok(names),
        _ => Err(Error::InvalidOption {
            option: "publication_names",
            value,
            hint: "Give a list of publication names, separated by commas.",
        }),
    }
}

pub(crate) fn parse_origin(value: String) -> Result<OriginPolicy> {
    match value.as_str() {
        "none" => Ok(OriginPolicy::Local),
        "any" => Ok(OriginPolicy::Any),
        _ => Err(Error::InvalidOption {
            option: "origin",
            value,
            hint: "Valid values are \"none\" and \"any\".",
        }),
    }
}

fn parse_ids(option: &'static str, value: String) -> Result<Vec<u32>> {
    let ids: std::result::Result<Vec<u32>, _> = value.split(',').map(str::parse).collect();
    ids.map_err(|_| Error::InvalidOption {
        option,
        value,
        hint: "Give a list of transaction ids, separated by commas.",
    })
}

fn parse_switch(option: &'static str, value: String) -> Result<bool> {
    match value.as_str() {
        "on" | "true" => Ok(true),
        "off" | "false" => Ok(false),
        _ => Err(Error::InvalidOption {
            option,
            value,
            hint: "Valid values are \"on\" and \"off\".",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(given: &[(&str, &str)]) -> Result<Options> {
        let given = given
            .iter()
            .map(|(name, value)| ((*name).to_owned(), Some((*value).to_owned())));
        Options::parse(given.collect(), |list| {
            (!list.contains(' ')).then(|| {
                list.split(',')
                    .filter(|name| !name.is_empty())
                    .map(str::to_owned)
                    .collect()
            })
        })
    }

    #[test]
    fn defaults() {
        let options = parse(&[("proto_version", "1"), ("publication_names", "a,b")]).unwrap();
        assert_eq!(options.publications, ["a", "b"]);
        assert_eq!(options.origin, OriginPolicy::Local);
        assert_eq!(options.node, None);
        assert!(!options.messages);
        assert!(!options.join_transactions);
        assert!(!options.replaced_versions);
        assert!(!options.streaming);
        assert!(!options.two_phase);
    }

    #[test]
    fn all_given() {
        let options = parse(&[
            ("messages", "on"),
            ("join_transactions", "on"),
            ("replaced_versions", "on"),
            ("streaming", "on"),
            ("two_phase", "on"),
            ("unprepared", "751,4294967295"),
            ("ddl", "on"),
            ("node", "tokyo"),
            ("origin", "any"),
            ("publication_names", "a"),
            ("proto_version", "1"),
        ])
        .unwrap();
        assert_eq!(options.origin, OriginPolicy::Any);
        assert_eq!(options.node.as_deref(), Some("tokyo"));
        assert!(options.messages);
        assert!(options.join_transactions);
        assert!(options.replaced_versions);
        assert!(options.streaming);
        assert!(options.two_phase);
        assert_eq!(options.unprepared, [751, u32::MAX]);
        assert!(options.ddl);
    }

    #[test]
    fn one_other_node() {
        let asked = [
            ("proto_version", "1"),
            ("publication_names", "a"),
            ("origin", "any"),
            ("only_origin", "tokyo"),
            ("only_after", "1/A"),
        ];
        let only = Only {
            node: "tokyo".to_owned(),
            after: 0x1_0000_000A,
        };
        assert_eq!(parse(&asked).unwrap().only, Some(only));
        for unsuited in ["streaming", "two_phase"] {
            let mut asked = asked.to_vec();
            asked.push((unsuited, "on"));
            assert!(
                matches!(parse(&asked), Err(Error::InvalidOption { option, .. }) if option == "only_origin")
            );
        }
    }

    #[test]
    fn refusals() {
        let version = ("proto_version", "1");
        let names = ("publication_names", "a");
        assert_eq!(parse(&[names]), Err(Error::MissingOption("proto_version")));
        assert_eq!(
            parse(&[version]),
            Err(Error::MissingOption("publication_names"))
        );
        assert_eq!(
            parse(&[("proto_version", "2"), names]),
            Err(Error::UnsupportedVersion("2".to_owned()))
        );
        assert_eq!(
            parse(&[version, names, ("binary", "on")]),
            Err(Error::UnknownOption("binary".to_owned()))
        );
        for wrong in [
            ("origin", "all"),
            ("messages", ""),
            ("streaming", "parallel"),
            ("two_phase", "yes"),
            ("ddl", "1"),
            ("only_origin", "tokyo"),
            ("only_after", "0/1"),
            ("only_after", "x"),
            ("unprepared", ""),
            ("unprepared", "1 2"),
            ("publication_names", ""),
            ("publication_names", "a b"),
        ] {
            assert!(
                matches!(parse(&[version, names, wrong]), Err(Error::InvalidOption { option, .. }) if option == wrong.0)
            );
        }
    }
}
