//! Origins of transactions, and the choice which of them are sent.
//!
//! Braid's own replication origins are named `braid/<node>/<number>`, where the node is the one on
//! which the change was first committed. A node name has no slash.

/// The transactions that a subscriber requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OriginPolicy {
    /// Only transactions that were first committed on this node (`none`: without a replication
    /// origin).
    Local,
    /// Also transactions that were received from other nodes (`any`).
    Any,
}

/// The one node whose transactions are requested, from another node that has received them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Only {
    /// The node's name.
    pub node: String,
    /// The reader has the node's transactions up to this LSN of that node.
    pub after: u64,
}

impl Only {
    /// Returns whether a transaction is left out: another node's, or one that the reader already
    /// has. `origin_lsn` is its end LSN at its origin, 0 if unknown. If it is unknown, the
    /// transaction is sent, and the versions of its rows decide.
    #[must_use]
    pub fn leaves_out(&self, source: &Source<'_>, origin_lsn: u64) -> bool {
        !source.is_node(Some(&self.node)) || (origin_lsn != 0 && origin_lsn <= self.after)
    }
}

/// Origin of a transaction, as in its Begin record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source<'a> {
    /// This node, or an unknown origin.
    Here,
    /// A node with Braid, by its name.
    Node(&'a str),
    /// Another replication system, by the name of its origin.
    Foreign(&'a str),
}

impl<'a> Source<'a> {
    /// Returns the name for a Begin record: empty for this node.
    #[must_use]
    pub fn name(&self) -> &'a str {
        match self {
            Self::Here => "",
            Self::Node(name) | Self::Foreign(name) => name,
        }
    }

    /// Returns whether the transaction comes from `node`, so that it must not be sent back to it.
    #[must_use]
    pub fn is_node(&self, node: Option<&str>) -> bool {
        matches!((self, node), (Self::Node(name), Some(node)) if *name == node)
    }
}

/// Returns the source for a replication origin's name. An empty name is a dropped origin.
#[must_use]
pub fn classify(origin: &str) -> Source<'_> {
    if origin.is_empty() {
        return Source::Here;
    }
    let node = origin
        .strip_prefix("braid/")
        .and_then(|rest| rest.rsplit_once('/'))
        .filter(|(node, number)| {
            !node.is_empty()
                && !node.contains('/')
                && !number.is_empty()
                && number.bytes().all(|byte| byte.is_ascii_digit())
        })
        .map(|(node, _)| node);
    node.map_or(Source::Foreign(origin), Source::Node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(classify("braid/tokyo/12"), Source::Node("tokyo"));
        assert_eq!(classify("pg_16409"), Source::Foreign("pg_16409"));
        for foreign in [
            "braid/tokyo",
            "braid//1",
            "braid/tokyo/",
            "braid/tokyo/x",
            "braid/a/b/1",
        ] {
            assert_eq!(classify(foreign), Source::Foreign(foreign));
        }
        assert_eq!(classify("").name(), "");
    }

    #[test]
    fn one_node_is_asked_for() {
        let only = Only {
            node: "tokyo".to_owned(),
            after: 20,
        };
        let tokyo = classify("braid/tokyo/12");
        assert!(only.leaves_out(&tokyo, 19));
        assert!(only.leaves_out(&tokyo, 20));
        assert!(!only.leaves_out(&tokyo, 21));
        assert!(!only.leaves_out(&tokyo, 0), "not known: sent");
        for other in ["braid/paris/1", "", "tokyo"] {
            assert!(only.leaves_out(&classify(other), 21), "{other}");
        }
    }

    #[test]
    fn nothing_goes_back_to_its_node() {
        assert!(classify("braid/tokyo/12").is_node(Some("tokyo")));
        assert!(!classify("braid/tokyo/12").is_node(Some("paris")));
        assert!(!classify("braid/tokyo/12").is_node(None));
        assert!(!classify("tokyo").is_node(Some("tokyo")));
        assert!(!Source::Here.is_node(Some("")));
    }
}
