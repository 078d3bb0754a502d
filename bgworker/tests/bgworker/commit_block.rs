//! Encoded commit timestamps are decoded unchanged, and bytes that are not a block are refused.

use braid_bgworker::commit_block::{Commit, TRANSACTIONS, decode, encode, place_of};
use proptest::prelude::*;

fn commits() -> impl Strategy<Value = Vec<Option<Commit>>> {
    let timestamp = prop_oneof![any::<i64>(), 800_000_000_000_000_i64..800_000_000_100_000];
    let commit =
        (timestamp, any::<u16>()).prop_map(|(timestamp, origin)| Commit { timestamp, origin });
    prop::collection::vec(prop::option::of(commit), 0..200)
}

proptest! {
    #[test]
    fn what_is_read_is_what_was_written(commits in commits()) {
        prop_assert_eq!(decode(&encode(&commits), commits.len()), Some(commits));
    }

    #[test]
    fn a_block_that_was_cut_is_refused(commits in commits(), cut in any::<prop::sample::Index>()) {
        let bytes = encode(&commits);
        prop_assume!(!bytes.is_empty());
        prop_assert_eq!(decode(&bytes[..cut.index(bytes.len())], commits.len()), None);
    }

    #[test]
    fn anything_is_a_block_of_the_same_commits_or_none(bytes in prop::collection::vec(any::<u8>(), 0..100), count in 0_usize..50) {
        if let Some(commits) = decode(&bytes, count) {
            prop_assert_eq!(decode(&encode(&commits), count), Some(commits));
        }
    }
}

#[test]
fn a_transaction_that_follows_another_takes_few_bytes() {
    let commits: Vec<_> = (0..1000)
        .map(|i| {
            Some(Commit {
                timestamp: 800_000_000_000_000 + i * 200,
                origin: 0,
            })
        })
        .collect();
    let bytes = encode(&commits);
    assert!(bytes.len() < 3 * 1000 + 10, "{} bytes", bytes.len());
}

#[test]
fn blocks_start_at_multiples_of_their_length() {
    assert_eq!(place_of(0), (0, 0));
    assert_eq!(place_of(TRANSACTIONS - 1), (0, 16_383));
    assert_eq!(place_of((7 << 32) + 5), (7 << 32, 5));
}
