//! Maps by small numbers that this process or the stream assigns. They are looked up for every
//! change, so one multiplication hashes them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by numbers.
pub type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Hasher of whole numbers. Not for keys that an attacker could choose to collide.
#[derive(Debug, Default, Clone, Copy)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u16(&mut self, number: u16) {
        self.write_u64(u64::from(number));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        // The multiplier of Fibonacci hashing; the rotation brings its well-mixed upper bits down,
        // where tables look.
        self.0 = (self.0.rotate_left(5) ^ number)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(26);
    }
}
