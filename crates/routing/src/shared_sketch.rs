//! A space-saving sketch in words of shared memory: counts by tenant of a fixed size, in which the
//! walsenders of a node count writes, and which its group worker reads and clears.
//!
//! It has the invariants of [`Sketch`]. It has no heap: of the counters with the smallest count
//! the next one in turn is replaced. A round over all counters finds each of them, so a write costs
//! a few steps on average, and one round at most.
//!
//! One process at a time may call it: the caller has a lock. All values are read as they are, so
//! that bad memory gives wrong counts, not a wrong access.
//!
//! | words | content |
//! |---|---|
//! | 4 | total, floor, number of counters, and the place at which the next round begins |
//! | 2 to 4 for each counter | places by hash: a counter's number and one, 0 if free |
//! | 4 for each counter | hash, count, error, length of the name |
//! | 64 for each counter | the name: the tenant's canonical bytes |

use std::sync::atomic::{AtomicU64, Ordering};

use crate::hash::{TENANT_LIMIT, Tenant, TenantHash};
use crate::sketch::{Counter, Sketch};

const HEAD: usize = 4;
const NAME: usize = TENANT_LIMIT / 8;

/// A sketch in words that somebody else owns.
#[derive(Debug, Clone, Copy)]
pub struct SharedSketch<'m> {
    total: &'m AtomicU64,
    floor: &'m AtomicU64,
    length: &'m AtomicU64,
    turn: &'m AtomicU64,
    places: &'m [AtomicU64],
    hashes: &'m [AtomicU64],
    counts: &'m [AtomicU64],
    errors: &'m [AtomicU64],
    lengths: &'m [AtomicU64],
    names: &'m [AtomicU64],
}

fn get(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

fn put(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Relaxed);
}

fn wide(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

fn narrow(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

const fn places(counters: usize) -> usize {
    (2 * counters).next_power_of_two()
}

impl<'m> SharedSketch<'m> {
    /// The number of words for so many counters.
    #[must_use]
    pub const fn words(counters: usize) -> usize {
        HEAD + places(counters) + counters * (4 + NAME)
    }

    /// The sketch with so many counters in these words. Zeroed words are an empty one. `None` if
    /// the words are too few, or there is no counter.
    #[must_use]
    pub fn over(words: &'m [AtomicU64], counters: usize) -> Option<Self> {
        if counters == 0 {
            return None;
        }
        let (head, rest) = words.split_at_checked(HEAD)?;
        let (places, rest) = rest.split_at_checked(places(counters))?;
        let (hashes, rest) = rest.split_at_checked(counters)?;
        let (counts, rest) = rest.split_at_checked(counters)?;
        let (errors, rest) = rest.split_at_checked(counters)?;
        let (lengths, rest) = rest.split_at_checked(counters)?;
        let (names, _) = rest.split_at_checked(counters * NAME)?;
        let [total, floor, length, turn] = head else {
            return None;
        };
        Some(Self {
            total,
            floor,
            length,
            turn,
            places,
            hashes,
            counts,
            errors,
            lengths,
            names,
        })
    }

    /// Whether nothing was counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        get(self.total) == 0
    }

    /// Counts writes of a tenant. `canonical` is its canonical bytes; a longer name than a rule can
    /// have is counted in the total alone.
    pub fn add(&self, tenant: TenantHash, writes: u64, canonical: &[u8]) {
        put(self.total, get(self.total).saturating_add(writes));
        if writes == 0 || canonical.len() > TENANT_LIMIT {
            return;
        }
        if let Some((_, slot)) = self.find(tenant) {
            if let Some(count) = self.counts.get(slot) {
                put(count, get(count).saturating_add(writes));
            }
            return;
        }
        let length = narrow(get(self.length));
        let slot = if length < self.counts.len() {
            put(self.length, wide(length + 1));
            length
        } else {
            self.free_smallest()
        };
        let floor = get(self.floor);
        self.fill(slot, tenant, floor.saturating_add(writes), floor, canonical);
    }

    /// Adds the counts of a sketch.
    pub fn absorb(&self, counts: &Sketch) {
        if counts.floor() > 0 {
            let mut merged = self.read();
            merged.absorb(counts);
            self.write(&merged);
            return;
        }
        for (hash, counter) in counts.counters() {
            self.add(hash, counter.count, counter.tenant.canonical());
        }
    }

    /// Has the counts of a sketch: the largest ones if they are more than there are counters.
    fn write(&self, counts: &Sketch) {
        self.clear();
        let counters = counts.largest(self.counts.len() + 1);
        let left_out = counters.get(self.counts.len());
        let left_out = left_out.map_or(0, |counter| counter.count);
        put(self.total, counts.total());
        put(self.floor, counts.floor().max(left_out));
        for (slot, counter) in counters.into_iter().take(self.counts.len()).enumerate() {
            let Counter {
                tenant,
                count,
                error,
            } = counter;
            self.fill(
                slot,
                tenant.tenant_hash(),
                *count,
                *error,
                tenant.canonical(),
            );
            put(self.length, wide(slot + 1));
        }
    }

    /// Where a tenant's counter is: its place, and its number.
    fn find(&self, tenant: TenantHash) -> Option<(usize, usize)> {
        for place in self.probe(tenant) {
            let slot = narrow(get(self.places.get(place)?)).checked_sub(1)?;
            if get(self.hashes.get(slot)?) == tenant.0 {
                return Some((place, slot));
            }
        }
        None
    }

    /// The places at which a tenant can be, in order.
    fn probe(&self, tenant: TenantHash) -> impl Iterator<Item = usize> + use<> {
        let count = self.places.len();
        let home = self.home(tenant.0);
        (home..count).chain(0..home)
    }

    fn home(&self, hash: u64) -> usize {
        narrow(hash % wide(self.places.len()).max(1))
    }

    fn fill(&self, slot: usize, tenant: TenantHash, count: u64, error: u64, canonical: &[u8]) {
        let free = self
            .probe(tenant)
            .filter_map(|place| self.places.get(place))
            .find(|place| get(place) == 0);
        let Some(free) = free else { return };
        put(free, wide(slot + 1));
        let fields = [
            (self.hashes, tenant.0),
            (self.counts, count),
            (self.errors, error),
            (self.lengths, wide(canonical.len())),
        ];
        for (column, value) in fields {
            if let Some(word) = column.get(slot) {
                put(word, value);
            }
        }
        let name = self.names.get(slot * NAME..).unwrap_or_default();
        for (word, bytes) in name.iter().zip(canonical.chunks(8)) {
            let mut eight = [0; 8];
            for (to, from) in eight.iter_mut().zip(bytes) {
                *to = *from;
            }
            put(word, u64::from_be_bytes(eight));
        }
    }

    /// Frees a counter with the smallest count, and raises the floor to it. Returns its number.
    fn free_smallest(&self) -> usize {
        let count = self.counts.len();
        let turn = narrow(get(self.turn)).min(count);
        // No count is below the floor once all counters are in use.
        let floor = get(self.floor);
        let mut smallest = (u64::MAX, 0);
        for slot in (turn..count).chain(0..turn) {
            let value = self.counts.get(slot).map_or(u64::MAX, get);
            if value < smallest.0 {
                smallest = (value, slot);
            }
            if value <= floor {
                break;
            }
        }
        let (value, slot) = smallest;
        put(self.turn, wide(slot + 1));
        put(self.floor, floor.max(value));
        let tenant = self.hashes.get(slot).map_or(0, get);
        if let Some((place, _)) = self.find(TenantHash(tenant)) {
            self.free_place(place);
        }
        slot
    }

    /// Frees a place, and moves those behind it up that would not be found any more.
    fn free_place(&self, place: usize) {
        let count = self.places.len();
        let mut hole = place;
        for behind in (place + 1..count).chain(0..place) {
            let number = self.places.get(behind).map_or(0, get);
            let Some(slot) = narrow(number).checked_sub(1) else {
                break;
            };
            let home = self.home(self.hashes.get(slot).map_or(0, get));
            let from_home = |to: usize| (to + count - home) % count;
            if from_home(hole) < from_home(behind) {
                if let Some(word) = self.places.get(hole) {
                    put(word, number);
                }
                hole = behind;
            }
        }
        if let Some(word) = self.places.get(hole) {
            put(word, 0);
        }
    }

    /// The counts as they are.
    #[must_use]
    pub fn read(&self) -> Sketch {
        let length = narrow(get(self.length)).min(self.counts.len());
        let mut floor = get(self.floor);
        let mut counters = Vec::with_capacity(length);
        for slot in 0..length {
            let [count, error, bytes] = [self.counts, self.errors, self.lengths]
                .map(|column| column.get(slot).map_or(0, get));
            let words = self.names.get(slot * NAME..(slot + 1) * NAME);
            let words = words.unwrap_or_default().iter().map(get);
            let mut name: Vec<u8> = words.flat_map(u64::to_be_bytes).collect();
            name.truncate(narrow(bytes));
            match Tenant::from_canonical(&name) {
                Ok(tenant) => counters.push(Counter {
                    tenant,
                    count,
                    error,
                }),
                Err(_) => floor = floor.max(count),
            }
        }
        Sketch::of(self.counts.len(), get(self.total), floor, counters)
    }

    /// Forgets all counts.
    pub fn clear(&self) {
        for word in [self.total, self.floor, self.length, self.turn] {
            put(word, 0);
        }
        for word in self.places {
            put(word, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicU64;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::SharedSketch;
    use crate::hash::{TENANT_LIMIT, Tenant, TenantHash};
    use crate::key::Key;
    use crate::sketch::Sketch;

    fn words(counters: usize) -> Vec<AtomicU64> {
        let zeroes = std::iter::repeat_with(|| AtomicU64::new(0));
        zeroes.take(SharedSketch::words(counters)).collect()
    }

    fn tenant(number: u64) -> Tenant {
        Tenant::new(&Key::Integer(i64::try_from(number).unwrap())).unwrap()
    }

    fn add(sketch: SharedSketch<'_>, number: u64, writes: u64) -> TenantHash {
        let tenant = tenant(number);
        sketch.add(tenant.tenant_hash(), writes, tenant.canonical());
        tenant.tenant_hash()
    }

    proptest! {
        /// The counts are within their errors, and the errors within the bound, at each step.
        #[test]
        fn counts_are_within_the_error(
            counters in 1..40_usize,
            writes in vec((0..60_u64, 0..60_u64, 1..20_u64), 0..300),
        ) {
            let words = words(counters);
            let sketch = SharedSketch::over(&words, counters).unwrap();
            for _ in 0..2 {
                let mut truth = BTreeMap::<TenantHash, u64>::new();
                for (one, other, writes) in &writes {
                    let hash = add(sketch, one * other / 60, *writes);
                    *truth.entry(hash).or_default() += writes;
                }
                let read = sketch.read();
                let total: u64 = truth.values().sum();
                let bound = total / u64::try_from(counters).unwrap();
                prop_assert_eq!(read.total(), total);
                prop_assert!(read.floor() <= bound);
                prop_assert_eq!(read.len(), truth.len().min(counters));
                for (hash, count) in &truth {
                    match read.counter(*hash) {
                        Some(counter) => {
                            prop_assert!(counter.count >= *count);
                            prop_assert!(counter.certain() <= *count);
                            prop_assert!(counter.error <= bound);
                        }
                        None => prop_assert!(*count <= read.floor()),
                    }
                }
                prop_assert_eq!(sketch.is_empty(), truth.is_empty());
                sketch.clear();
                prop_assert!(sketch.is_empty() && sketch.read().is_empty());
            }
        }

        /// So they are if whole sketches are added, which had more tenants than counters.
        #[test]
        fn sketches_are_added(
            counters in 1..40_usize,
            streams in vec(vec((0..60_u64, 1..20_u64), 0..100), 1..5),
        ) {
            let words = words(counters);
            let shared = SharedSketch::over(&words, counters).unwrap();
            let mut truth = BTreeMap::<TenantHash, u64>::new();
            for writes in &streams {
                let mut one = Sketch::new(counters);
                for (number, writes) in writes {
                    let tenant = tenant(*number);
                    *truth.entry(tenant.tenant_hash()).or_default() += writes;
                    one.add(tenant.tenant_hash(), *writes, || tenant);
                }
                shared.absorb(&one);
            }
            let read = shared.read();
            let total: u64 = truth.values().sum();
            prop_assert_eq!(read.total(), total);
            prop_assert!(read.floor() <= total / u64::try_from(counters).unwrap());
            for (hash, count) in &truth {
                match read.counter(*hash) {
                    Some(counter) => {
                        prop_assert!(counter.count >= *count && counter.certain() <= *count);
                    }
                    None => prop_assert!(*count <= read.floor()),
                }
            }
        }

        /// Words of any content are read without an error, and can be cleared.
        #[test]
        fn bad_memory_is_harmless(content in vec(any::<u64>(), SharedSketch::words(3))) {
            let words: Vec<AtomicU64> = content.into_iter().map(AtomicU64::new).collect();
            let sketch = SharedSketch::over(&words, 3).unwrap();
            for number in 0..20 {
                add(sketch, number, 1);
            }
            let _ = sketch.read();
            sketch.clear();
            let hash = add(sketch, 1, 5);
            prop_assert_eq!(sketch.read().counter(hash).unwrap().count, 5);
        }
    }

    #[test]
    fn names_come_back() {
        let words = words(4);
        let sketch = SharedSketch::over(&words, 4).unwrap();
        let names = [
            "",
            "a",
            "eight888",
            "nine nine",
            &"x".repeat(TENANT_LIMIT - 1),
        ];
        for name in names {
            let tenant = Tenant::new(&Key::Text(name)).unwrap();
            sketch.clear();
            sketch.add(tenant.tenant_hash(), 2, tenant.canonical());
            let read = sketch.read();
            assert_eq!(read.counter(tenant.tenant_hash()).unwrap().tenant, tenant);
        }
        sketch.add(TenantHash(9), 3, &[b't'; TENANT_LIMIT + 1]);
        assert_eq!((sketch.read().total(), sketch.read().len()), (5, 1));
    }

    #[test]
    fn too_few_words_are_no_sketch() {
        let words = words(4);
        assert!(SharedSketch::over(&words, 5).is_none());
        assert!(SharedSketch::over(&words, 0).is_none());
        assert!(SharedSketch::over(&[], 1).is_none());
    }
}
