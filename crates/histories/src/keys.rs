//! Numbers for keys.

use std::collections::HashMap;

use crate::value::Value;

/// The keys of a history, numbered in the order in which they are met.
#[derive(Default)]
pub(crate) struct Keys<'h> {
    numbers: HashMap<&'h Value, u32>,
    names: Vec<&'h Value>,
}

impl<'h> Keys<'h> {
    /// Returns the number of a key.
    pub fn number(&mut self, key: &'h Value) -> u32 {
        let next = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        *self.numbers.entry(key).or_insert_with(|| {
            self.names.push(key);
            next
        })
    }

    /// Returns the key with a number.
    pub fn name(&self, number: u32) -> Option<&'h Value> {
        self.names.get(number as usize).copied()
    }

    /// Returns how many keys there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }
}
