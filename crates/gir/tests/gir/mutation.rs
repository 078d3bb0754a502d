//! No input panics, hangs or is read as something that would be written differently.
//!
//! The stable counterpart of fuzz/, for every run of the tests. Bounded by count and by time, with
//! a printed seed.

use std::time::{Duration, Instant};

use braid_gir::{Detail, Reader, Record, Result, Schemas, Writer, render};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngSeed, TestRunner};

/// The tags of all records.
const TAGS: &[u8] = b"HSBCIUDTMGEXAFPQJKR";
const ROUNDS: usize = 300_000;
const TIME: Duration = Duration::from_secs(5);

/// xorshift64*; good enough to pick bytes, and the same everywhere.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() >> 33).unwrap() % limit.max(1)
    }

    pub fn byte(&mut self) -> u8 {
        // Small numbers, flags and lengths hit more than evenly spread bytes do.
        let spread = (self.next() >> 56) as u8;
        if self.below(2) == 0 {
            spread & 0x13
        } else {
            spread
        }
    }
}

/// Reads a frame as receivers do; every record that is accepted must be written again byte for
/// byte.
fn read(frame: &[u8], schemas: &mut Schemas) -> Result<usize> {
    let mut raw = Reader::new(frame);
    let mut copy = Writer::new();
    let mut accepted = 0;
    while let Some((tag, body)) = raw.next_raw()? {
        let _ = Record::read_change_header(body);
        let record = Record::read(tag, body)?;
        if let Record::Schema(schema) = &record {
            schemas.remember(schema);
        }
        let start = copy.len();
        copy.copy(&record).unwrap();
        let again = &copy.frame()[start..];
        assert_eq!((again[0], &again[5..]), (tag as u8, body));
        // Rendering takes longer than everything else in this test, so it is done only now and
        // then.
        if accepted == 0 && frame.len().is_multiple_of(16) {
            for detail in [Detail::Stable, Detail::Full] {
                let line = render(&record, schemas, detail);
                assert!(!line.contains(char::is_control), "{line:?}");
            }
        }
        accepted += 1;
    }
    Ok(accepted)
}

#[test]
fn random_bytes_never_panic() {
    let mut random = Random(crate::model::seed() | 1);
    let mut schemas = Schemas::new();
    let start = Instant::now();
    let mut refused = 0;
    for _ in 0..ROUNDS / 3 {
        let mut frame: Vec<u8> = (0..random.below(120)).map(|_| random.byte()).collect();
        // Half of the frames get past the record's own header.
        if frame.len() > 5 && random.below(2) == 0 {
            let len = u32::try_from(frame.len() - 5).unwrap();
            frame[0] = TAGS[random.below(TAGS.len())];
            frame[1..5].copy_from_slice(&len.to_le_bytes());
        }
        refused += usize::from(read(&frame, &mut schemas).is_err());
        if start.elapsed() > TIME {
            break;
        }
    }
    assert!(refused > 0);
}

#[test]
fn mutated_frames_never_panic() {
    let seed = crate::model::seed();
    let mut random = Random(seed | 1);
    let config = Config {
        rng_seed: RngSeed::Fixed(seed),
        ..Config::default()
    };
    let mut runner = TestRunner::new(config);
    let some = proptest::collection::vec(crate::model::record(), 1..4);
    let seeds: Vec<Vec<u8>> = (0..400)
        .map(|_| {
            let records = some.new_tree(&mut runner).unwrap().current();
            records
                .iter()
                .flat_map(crate::model::OwnedRecord::frame)
                .collect()
        })
        .collect();
    let mut schemas = Schemas::new();
    let start = Instant::now();
    let (mut refused, mut accepted) = (0_usize, 0_usize);
    for _ in 0..ROUNDS {
        let mut frame = seeds[random.below(seeds.len())].clone();
        for _ in 0..=random.below(3) {
            mutate(&mut frame, &seeds, &mut random);
        }
        match read(&frame, &mut schemas) {
            Ok(count) => accepted += count,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refused += 1;
            }
        }
        if start.elapsed() > TIME {
            break;
        }
    }
    println!(
        "{accepted} records accepted, {refused} frames refused in {:?}",
        start.elapsed()
    );
    // Mutations that are always or never refused would test nothing.
    assert!(accepted > 0 && refused > 0);
}

fn mutate(frame: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = random.below(frame.len());
    match random.below(6) {
        0 if !frame.is_empty() => frame[at] ^= 1 << random.below(8),
        1 if !frame.is_empty() => frame[at] = random.byte(),
        2 => frame.insert(at, random.byte()),
        3 if !frame.is_empty() => {
            frame.remove(at);
        }
        4 => frame.truncate(at),
        _ => {
            let other = &seeds[random.below(seeds.len())];
            let from = random.below(other.len());
            let to = (from + random.below(12)).min(other.len());
            frame.splice(at..at, other[from..to].iter().copied());
        }
    }
}
