//! Names of replication slots: a subscription's slot at the provider, unless its creator names it,
//! the collector's own, and a group's.
//!
//! `braid_NODE_SUBSCRIPTION` is readable. It must also differ if node or subscription differ: all
//! subscribers of a provider share one list of slots, and a node may drop an orphaned slot with its
//! own name.

/// Longest slot name in bytes (NAMEDATALEN - 1).
const LIMIT: usize = 63;

/// Bytes of the suffix that makes names unique: `_`, 40 bits of a hash, `_` and a number of five
/// digits.
const SUFFIX: usize = 17;

fn plain(letter: char) -> bool {
    letter.is_ascii_lowercase() || letter.is_ascii_digit()
}

fn folded(name: &str) -> String {
    name.chars()
        .map(|letter| letter.to_ascii_lowercase())
        .map(|letter| if plain(letter) { letter } else { '_' })
        .collect()
}

/// Returns the slot name of the `attempt`th attempt (from 1): later ones have a number at the end.
///
/// Slot names allow `a`-`z`, `0`-`9` and `_`; other characters are folded. If folding, the length,
/// or a `_` in the node's name could give two pairs of node and subscription the same name, 40 bits
/// of a hash of both follow.
#[must_use]
pub fn for_subscription(node: &str, subscription: &str, attempt: usize) -> String {
    let mut name = folded(&format!("braid_{node}_{subscription}"));
    let mut suffix = String::new();
    let unchanged = node.chars().all(plain) && subscription.chars().all(|l| plain(l) || l == '_');
    // Room for a number of up to five digits, so that no attempt cuts the name differently.
    if !unchanged || name.len() > LIMIT - 6 {
        suffix = format!("_{:010x}", hash(node, subscription) >> 24);
    }
    if attempt > 1 {
        suffix = format!("{suffix}_{attempt}");
    }
    name.truncate(LIMIT - suffix.len().min(LIMIT));
    name + &suffix
}

/// Returns the subscription by which a node of a group subscribes to another: its name, like
/// `paris_from_tokyo`, and the name of its slot at the provider. Names that are too long are
/// shortened.
#[must_use]
pub fn between(subscriber: &str, provider: &str) -> (String, String) {
    let name = fitted(format!("{subscriber}_from_{provider}"));
    let slot = for_subscription(subscriber, &name, 1);
    (name, slot)
}

/// Returns the prefix of the slots of a node's subscriptions, unless their creator has named them.
/// Other nodes' slots may have the same prefix.
#[must_use]
pub fn prefix_of(node: &str) -> String {
    let mut prefix = folded(&format!("braid_{node}_"));
    prefix.truncate(LIMIT - SUFFIX);
    prefix
}

/// Returns the name of the slot by which the collector of a database, given by its OID, reads WAL.
#[must_use]
pub fn of_collector(database: u32) -> String {
    format!("braid_deletions_{database}")
}

/// Returns the name of the slot by which a group's member keeps WAL that other members may lack.
#[must_use]
pub fn of_kept(database: u32) -> String {
    format!("braid_kept_{database}")
}

/// Returns the subscription by which a node gets a removed node's transactions from another one:
/// its name, and the name of its slot at the provider.
#[must_use]
pub fn recovering(subscriber: &str, removed: &str) -> (String, String) {
    let name = fitted(format!("{subscriber}_recovers_{removed}"));
    let slot = for_subscription(subscriber, &name, 1);
    (name, slot)
}

/// Returns the name; of one that is too long its beginning, and 40 bits of a hash of the whole.
fn fitted(mut name: String) -> String {
    if name.len() <= LIMIT {
        return name;
    }
    let suffix = format!("_{:010x}", hash("", &name) >> 24);
    while name.len() + suffix.len() > LIMIT {
        name.pop();
    }
    name + &suffix
}

/// Returns the FNV-1a hash of both, separated by a byte that no UTF-8 text has.
fn hash(node: &str, subscription: &str) -> u64 {
    node.bytes()
        .chain([0xff])
        .chain(subscription.bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

#[cfg(test)]
mod tests {
    use super::{between, for_subscription, prefix_of, recovering};
    use proptest::prelude::*;

    #[test]
    fn plain_names_stay_readable() {
        assert_eq!(
            for_subscription("tokyo", "from_paris", 1),
            "braid_tokyo_from_paris"
        );
        assert_eq!(
            for_subscription("tokyo", "from_paris", 2),
            "braid_tokyo_from_paris_2"
        );
    }

    #[test]
    fn members_follow_each_other_by_names_that_fit() {
        let (name, slot) = between("paris", "tokyo");
        assert_eq!(name, "paris_from_tokyo");
        assert_eq!(slot, "braid_paris_paris_from_tokyo");
        let long = "ü".repeat(31);
        let (name, slot) = between(&long, "tokyo");
        assert_eq!((name.len(), slot.len()), (63, 63));
    }

    #[test]
    fn members_with_long_names_have_subscriptions_of_their_own() {
        let own = "a".repeat(60);
        for pair in [between, recovering] {
            let (first, second) = (pair(&own, "paris"), pair(&own, "oslo"));
            assert_ne!(first.0, second.0);
            assert_ne!(first.1, second.1);
        }
        let longer = format!("{own}b");
        assert_ne!(between(&own, "paris").0, between(&longer, "paris").0);
    }

    #[test]
    fn names_begin_with_the_nodes_prefix() {
        let long = "y".repeat(80);
        for node in ["tokyo", "a_b", "Zürich", &long] {
            for subscription in ["from_paris", "x", &long] {
                for attempt in [1, 2, 99_999] {
                    let name = for_subscription(node, subscription, attempt);
                    assert!(name.starts_with(&prefix_of(node)), "{name}");
                }
            }
        }
    }

    #[test]
    fn what_folds_to_the_same_stays_apart() {
        let pairs = [
            ("a_b", "c"),
            ("a", "b_c"),
            ("a-b", "c"),
            ("A_B", "c"),
            ("a", "b-c"),
            ("a", "B_C"),
        ];
        let names: std::collections::HashSet<String> = pairs
            .iter()
            .map(|(node, sub)| for_subscription(node, sub, 1))
            .collect();
        assert_eq!(names.len(), pairs.len(), "{names:?}");
        let long = "x".repeat(80);
        assert_ne!(
            for_subscription("a", &format!("{long}1"), 1),
            for_subscription("a", &format!("{long}2"), 1)
        );
    }

    proptest! {
        #[test]
        fn every_name_is_valid_and_its_own(
            pairs in proptest::collection::hash_set(("[ab_A\\-é]{1,6}", "[ab_A\\-é]{1,60}"), 2..20),
            attempt in 1_usize..99_999,
        ) {
            let mut seen = std::collections::HashSet::new();
            for (node, subscription) in pairs {
                let name = for_subscription(&node, &subscription, attempt);
                prop_assert!(name.len() <= 63, "{}", name);
                prop_assert!(
                    name.chars().all(|l| l.is_ascii_lowercase() || l.is_ascii_digit() || l == '_'),
                    "{}", name
                );
                prop_assert!(seen.insert(name));
            }
        }
    }
}
