//! A transaction in chunks, and crashes anywhere between them: each change takes effect once, in
//! order.

use braid_bgworker::split::{Progress, Split};

use crate::random::{Budget, Random};

/// Applies `contents` after what is committed, in chunks of at most `most`, until a crash after
/// `crash_after` changes. Returns the contents of the committed chunks, with the progress recorded
/// in each.
fn run(
    contents: &[u64],
    most: u64,
    committed: Progress,
    crash_after: usize,
) -> (Vec<(Vec<u64>, Progress)>, bool) {
    let mut split = Split::new(most, committed);
    let mut pieces = Vec::new();
    let mut piece = Vec::new();
    for content in contents.iter().take(crash_after) {
        if split.is_full() {
            pieces.push((std::mem::take(&mut piece), split.seen()));
            split.commit();
        }
        if split.take(*content).unwrap() {
            piece.push(*content);
        }
        assert!(most == 0 || piece.len() as u64 <= most);
    }
    if crash_after <= contents.len() {
        return (pieces, false);
    }
    split.finish().unwrap();
    pieces.push((piece, Progress::default()));
    (pieces, true)
}

#[test]
fn i1_whatever_a_crash_leaves_each_change_takes_effect_once() {
    let mut random = Random::new("i1_whatever_a_crash_leaves_each_change_takes_effect_once");
    let mut budget = Budget::new();
    while budget.round(200).is_some() {
        let contents: Vec<u64> = (0..=random.index(60)).map(|_| random.next() % 5).collect();
        let mut committed = Progress::default();
        let mut applied = Vec::new();
        loop {
            // Another size each time, as the option may be altered.
            let most = random.next() % 8;
            let crash_after = random.index(contents.len() + 10);
            let (pieces, done) = run(&contents, most, committed, crash_after);
            // Chunks that were not flushed are lost.
            let kept = if done {
                pieces.len()
            } else {
                random.index(pieces.len() + 1)
            };
            for (piece, progress) in pieces.into_iter().take(kept) {
                applied.extend(piece);
                committed = progress;
            }
            if done {
                break;
            }
        }
        assert_eq!(applied, contents);
    }
}

#[test]
fn what_comes_otherwise_is_refused() {
    let mut random = Random::new("what_comes_otherwise_is_refused");
    let mut budget = Budget::new();
    while budget.round(200).is_some() {
        let contents: Vec<u64> = (0..20 + random.index(20)).map(|_| random.next()).collect();
        let most = 1 + random.next() % 6;
        let (pieces, _) = run(&contents, most, Progress::default(), contents.len());
        let (_, committed) = pieces.last().unwrap();
        let place = random.index(usize::try_from(committed.changes).unwrap());
        let mut other = contents.clone();
        match random.index(4) {
            0 => {
                other.remove(place);
            }
            1 => other.insert(place, random.next()),
            2 => other[place] ^= 1 << random.index(64),
            _ => other.truncate(place),
        }
        let mut split = Split::new(most, *committed);
        let refused = other.iter().any(|content| split.take(*content).is_err());
        assert!(refused || split.finish().is_err());
    }
}

#[test]
fn a_piece_ends_before_the_next_change() {
    let mut split = Split::new(2, Progress::default());
    for content in [7, 8] {
        assert!(!split.is_full());
        assert_eq!(split.take(content), Ok(true));
    }
    assert!(split.is_full(), "only if another change comes");
    assert_eq!(split.committed(), Progress::default());
    split.commit();
    assert!(!split.is_full());
    assert_eq!(split.committed().changes, 2);
    let rest = Split::new(0, split.committed());
    assert_eq!(rest.finish().unwrap_err().committed, 2);
}

#[test]
fn the_digest_is_what_it_was() {
    // The digest is stored, so its values are fixed.
    let mut split = Split::new(0, Progress::default());
    for content in [1, 2, 3] {
        split.take(content).unwrap();
    }
    assert_eq!(split.seen().digest, 0xf83c_4718_2bf1_554f);
}
