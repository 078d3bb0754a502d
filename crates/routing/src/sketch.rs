//! Counts by tenant with bounded memory: a space-saving sketch (Metwally, Agrawal and El Abbadi,
//! ICDT 2005). The balancer uses it for writes.
//!
//! Example of what a plain table of counts does. A node writes for ten million tenants. A table
//! with a count for each takes a gigabyte, and a table that drops the smallest counts forgets a
//! tenant that becomes hot slowly. A sketch of 2,048 counters takes at most 1.3 MB. It has each
//! tenant with more than 1/2,048 of all writes, and knows how wrong each of its counts can be.
//!
//! Invariants, with `m` counters and `floor` ([`Sketch::floor`]):
//! - A tenant without a counter has at most `floor` writes.
//! - A tenant with a counter has at most `count` writes, and at least `count - error`.
//! - `floor` and each `error` are at most all writes divided by `m`. This stays so if sketches with
//!   as many counters are merged ([`Sketch::absorb`]).
//!
//! Each step is deterministic: of several counters with the smallest count, the one with the
//! smallest hash is replaced.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::hash::{Tenant, TenantHash};

/// The largest number of counters.
pub const COUNTERS_LIMIT: usize = 65_536;

/// A tenant's hash is a hash already.
#[derive(Debug, Clone, Copy, Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// A tenant with a counter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counter {
    /// The tenant.
    pub tenant: Tenant,
    /// At least as many writes as the tenant has.
    pub count: u64,
    /// By how much `count` can be too large.
    pub error: u64,
}

impl Counter {
    /// Writes that the tenant has for certain.
    #[must_use]
    pub const fn certain(&self) -> u64 {
        self.count.saturating_sub(self.error)
    }
}

#[derive(Debug, Clone)]
struct Slot {
    hash: TenantHash,
    counter: Counter,
}

/// Counts by tenant.
#[derive(Debug, Clone)]
pub struct Sketch {
    limit: usize,
    /// A heap: the smallest count first, then the smallest hash.
    slots: Vec<Slot>,
    places: HashMap<TenantHash, usize, BuildHasherDefault<Identity>>,
    total: u64,
    floor: u64,
}

impl Sketch {
    /// An empty sketch with so many counters: at least 1, at most [`COUNTERS_LIMIT`].
    #[must_use]
    pub fn new(counters: usize) -> Self {
        Self {
            limit: counters.clamp(1, COUNTERS_LIMIT),
            slots: Vec::new(),
            places: HashMap::default(),
            total: 0,
            floor: 0,
        }
    }

    /// The sketch with these counters: the largest ones if they are more than the limit.
    ///
    /// `floor` is the most that a tenant without a counter can have. Of two counters of one tenant
    /// the larger one counts.
    #[must_use]
    pub fn of(limit: usize, total: u64, floor: u64, counters: Vec<Counter>) -> Self {
        let mut sketch = Self::new(limit);
        sketch.total = total;
        sketch.floor = floor;
        let slots = counters.into_iter().map(|counter| Slot {
            hash: counter.tenant.tenant_hash(),
            counter,
        });
        let mut slots: Vec<Slot> = slots.collect();
        slots.sort_by_key(|slot| (slot.hash, std::cmp::Reverse(slot.counter.count)));
        slots.dedup_by_key(|slot| slot.hash);
        sketch.keep_largest(slots);
        sketch
    }

    /// The counters with the largest counts, the largest first: so many at most.
    #[must_use]
    pub fn largest(&self, limit: usize) -> Vec<&Counter> {
        let mut slots: Vec<&Slot> = self.slots.iter().collect();
        slots.sort_by_key(|slot| (std::cmp::Reverse(slot.counter.count), slot.hash));
        slots.truncate(limit);
        slots.into_iter().map(|slot| &slot.counter).collect()
    }

    /// All writes that were counted.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// The most writes that a tenant without a counter can have.
    #[must_use]
    pub const fn floor(&self) -> u64 {
        self.floor
    }

    /// The number of tenants with a counter.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether no tenant has a counter.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The tenants with a counter, in no order that means anything.
    pub fn counters(&self) -> impl Iterator<Item = (TenantHash, &Counter)> {
        self.slots.iter().map(|slot| (slot.hash, &slot.counter))
    }

    /// The counter of a tenant.
    #[must_use]
    pub fn counter(&self, tenant: TenantHash) -> Option<&Counter> {
        let place = self.places.get(&tenant)?;
        self.slots.get(*place).map(|slot| &slot.counter)
    }

    /// Counts writes of a tenant. `name` is called only if the tenant gets a counter.
    ///
    /// Takes time logarithmic in the number of counters.
    pub fn add(&mut self, tenant: TenantHash, writes: u64, name: impl FnOnce() -> Tenant) {
        if writes == 0 {
            return;
        }
        self.total = self.total.saturating_add(writes);
        if let Some(place) = self.places.get(&tenant).copied() {
            if let Some(slot) = self.slots.get_mut(place) {
                slot.counter.count = slot.counter.count.saturating_add(writes);
            }
            self.sink(place);
            return;
        }
        let full = self.slots.len() >= self.limit;
        if let (true, Some(smallest)) = (full, self.slots.first()) {
            self.floor = self.floor.max(smallest.counter.count);
        }
        let slot = Slot {
            hash: tenant,
            counter: Counter {
                tenant: name(),
                count: self.floor.saturating_add(writes),
                error: self.floor,
            },
        };
        match self.slots.first_mut() {
            Some(smallest) if full => {
                self.places.remove(&smallest.hash);
                *smallest = slot;
                self.places.insert(tenant, 0);
                self.sink(0);
            }
            _ => {
                let place = self.slots.len();
                self.slots.push(slot);
                self.places.insert(tenant, place);
                self.rise(place);
            }
        }
    }

    /// Adds the counts of another sketch, of another node for example. Keeps the largest counts.
    pub fn absorb(&mut self, other: &Self) {
        let mut slots = std::mem::take(&mut self.slots);
        for slot in &mut slots {
            let (count, error) = other
                .counter(slot.hash)
                .map_or((other.floor, other.floor), |counter| {
                    (counter.count, counter.error)
                });
            slot.counter.count = slot.counter.count.saturating_add(count);
            slot.counter.error = slot.counter.error.saturating_add(error);
        }
        for slot in &other.slots {
            if !self.places.contains_key(&slot.hash) {
                let mut slot = slot.clone();
                slot.counter.count = slot.counter.count.saturating_add(self.floor);
                slot.counter.error = slot.counter.error.saturating_add(self.floor);
                slots.push(slot);
            }
        }
        self.total = self.total.saturating_add(other.total);
        self.floor = self.floor.saturating_add(other.floor);
        self.keep_largest(slots);
    }

    /// Takes these slots: the largest ones if they are more than the limit.
    fn keep_largest(&mut self, mut slots: Vec<Slot>) {
        slots.sort_by_key(|slot| (std::cmp::Reverse(slot.counter.count), slot.hash));
        if let Some(dropped) = slots.get(self.limit) {
            self.floor = self.floor.max(dropped.counter.count);
        }
        slots.truncate(self.limit);
        // In rising order an array is a heap.
        slots.reverse();
        self.places = slots.iter().map(|slot| slot.hash).zip(0..).collect();
        self.slots = slots;
        for place in (0..self.slots.len() / 2).rev() {
            self.sink(place);
        }
    }

    /// Forgets all counts.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.places.clear();
        self.total = 0;
        self.floor = 0;
    }

    fn is_below(&self, one: usize, other: usize) -> bool {
        let key = |place: usize| {
            self.slots
                .get(place)
                .map(|slot| (slot.counter.count, slot.hash))
        };
        match (key(one), key(other)) {
            (Some(one), Some(other)) => one < other,
            _ => false,
        }
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.slots.swap(one, other);
        for place in [one, other] {
            if let Some(slot) = self.slots.get(place) {
                self.places.insert(slot.hash, place);
            }
        }
    }

    /// Moves a slot whose count has grown away from the heap's top.
    fn sink(&mut self, mut place: usize) {
        loop {
            let (left, right) = (2 * place + 1, 2 * place + 2);
            let child = if self.is_below(right, left) {
                right
            } else {
                left
            };
            if !self.is_below(child, place) {
                return;
            }
            self.swap(child, place);
            place = child;
        }
    }

    /// Moves a new slot towards the heap's top.
    fn rise(&mut self, mut place: usize) {
        while let Some(above) = place.checked_sub(1).map(|below| below / 2) {
            if !self.is_below(place, above) {
                return;
            }
            self.swap(place, above);
            place = above;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::{COUNTERS_LIMIT, Sketch};
    use crate::hash::{TENANT_LIMIT, Tenant, TenantHash};
    use crate::key::Key;

    fn tenant(number: u64) -> Tenant {
        Tenant::new(&Key::Integer(i64::try_from(number).unwrap())).unwrap()
    }

    type Truth = BTreeMap<TenantHash, u64>;

    fn count(sketch: &mut Sketch, truth: &mut Truth, writes: &[(u64, u64)]) {
        for (number, writes) in writes {
            let tenant = tenant(*number);
            let hash = tenant.tenant_hash();
            *truth.entry(hash).or_default() += writes;
            sketch.add(hash, *writes, || tenant);
        }
    }

    fn check(sketch: &Sketch, truth: &Truth, counters: usize) {
        let total: u64 = truth.values().sum();
        let bound = total / u64::try_from(counters).unwrap();
        assert_eq!(sketch.total(), total);
        assert!(sketch.floor() <= bound, "{} > {bound}", sketch.floor());
        assert!(sketch.len() <= counters);
        assert_eq!(sketch.counters().count(), sketch.len());
        for (hash, counter) in sketch.counters() {
            let true_count = truth.get(&hash).copied().unwrap_or(0);
            assert_eq!(counter.tenant.tenant_hash(), hash);
            assert!(counter.count >= true_count);
            assert!(counter.certain() <= true_count);
            assert!(counter.error <= bound);
            assert_eq!(sketch.counter(hash), Some(counter));
        }
        for (hash, true_count) in truth {
            assert!(sketch.counter(*hash).is_some() || *true_count <= sketch.floor());
        }
    }

    /// Tenants with low numbers come often.
    fn stream() -> impl Strategy<Value = Vec<(u64, u64)>> {
        let tenant = (0..60_u64, 0..60_u64).prop_map(|(one, other)| one * other / 60);
        vec((tenant, 1..20_u64), 0..300)
    }

    proptest! {
        #[test]
        fn counts_are_within_the_error(counters in 1..40_usize, writes in stream()) {
            let (mut sketch, mut truth) = (Sketch::new(counters), Truth::new());
            for part in writes.chunks(25) {
                count(&mut sketch, &mut truth, part);
                check(&sketch, &truth, counters);
            }
        }

        #[test]
        fn merged_counts_are_within_the_error(
            counters in 1..40_usize,
            streams in vec(stream(), 1..5),
            after in stream(),
        ) {
            let (mut merged, mut truth) = (Sketch::new(counters), Truth::new());
            for writes in &streams {
                let mut one = Sketch::new(counters);
                count(&mut one, &mut truth, writes);
                merged.absorb(&one);
                check(&merged, &truth, counters);
            }
            count(&mut merged, &mut truth, &after);
            check(&merged, &truth, counters);
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut sketch = Sketch::new(2_048);
        let mut names = 0;
        for number in 0..200_000_u64 {
            let tenant = tenant(number);
            sketch.add(tenant.tenant_hash(), 1, || {
                names += 1;
                tenant
            });
        }
        assert_eq!(sketch.len(), 2_048);
        assert!(sketch.slots.capacity() <= 2 * 2_048);
        assert!(sketch.places.capacity() <= 4 * 2_048);
        assert_eq!(names, 200_000);
        // The doc comment's number: slots, names, and a map at most twice as large as needed.
        let slot = size_of::<super::Slot>() + TENANT_LIMIT;
        assert!(2_048 * (slot + 2 * 17) <= 1_300_000);
        assert_eq!(Sketch::new(0).limit, 1);
        assert_eq!(Sketch::new(usize::MAX).limit, COUNTERS_LIMIT);
    }

    #[test]
    fn a_name_is_asked_for_only_once() {
        let mut sketch = Sketch::new(4);
        sketch.add(TenantHash(1), 1, || tenant(1));
        sketch.add(TenantHash(1), 1, || panic!("known"));
        sketch.add(TenantHash(2), 0, || panic!("no writes"));
        assert_eq!((sketch.len(), sketch.total()), (1, 2));
        sketch.clear();
        assert_eq!((sketch.len(), sketch.total(), sketch.floor()), (0, 0, 0));
    }
}
