//! The tracker's state of each table, and the tables that the current transaction touches.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Hashes table numbers. A provider that chose bad numbers would only slow down its own stream.
#[derive(Debug, Default, Clone)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        let product = (self.0 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
}

/// State of a table.
#[derive(Debug, Clone, Copy, Default)]
pub struct Table {
    /// The last transaction that changed the table; 0 for none.
    pub last_change: u64,
    /// The last transaction with a barrier on the table; 0 for none.
    pub last_barrier: u64,
    /// The current transaction has a barrier on the table.
    pub barred: bool,
    touched: bool,
}

/// States of all tables.
#[derive(Debug)]
pub struct TableBook {
    places: HashMap<u32, usize, BuildHasherDefault<Spread>>,
    tables: Vec<Table>,
    /// Indices of the tables that the current transaction touches.
    in_hand: Vec<usize>,
    /// Number and index of the last touched table: changes of one table often follow each other.
    last: Option<(u32, usize)>,
    capacity: usize,
}

impl TableBook {
    /// Returns an empty book for at most `capacity` tables.
    pub fn new(capacity: usize) -> Self {
        Self {
            places: HashMap::default(),
            tables: Vec::new(),
            in_hand: Vec::new(),
            last: None,
            capacity,
        }
    }

    /// Adds `table` to the tables that the current transaction changes. Returns whether the
    /// transaction has a barrier on it; `None` if there is no room.
    #[inline]
    pub fn touch(&mut self, table: u32) -> Option<bool> {
        let place = match self.last {
            Some((last, place)) if last == table => place,
            _ => self.find(table)?,
        };
        self.tables.get(place).map(|state| state.barred)
    }

    /// Gives the current transaction a barrier on `table`. Returns false if there is no room.
    #[inline]
    pub fn bar(&mut self, table: u32) -> bool {
        if self.touch(table).is_none() {
            return false;
        }
        if let Some((_, place)) = self.last
            && let Some(state) = self.tables.get_mut(place)
        {
            state.barred = true;
        }
        true
    }

    fn find(&mut self, table: u32) -> Option<usize> {
        let place = match self.places.get(&table) {
            Some(place) => *place,
            None if self.is_full() => return None,
            None => {
                self.tables.push(Table::default());
                self.places.insert(table, self.tables.len() - 1);
                self.tables.len() - 1
            }
        };
        let state = self.tables.get_mut(place)?;
        if !state.touched {
            state.touched = true;
            self.in_hand.push(place);
        }
        self.last = Some((table, place));
        Some(place)
    }

    /// Calls `look` for each table that the current transaction touches.
    pub fn each_in_hand(&mut self, mut look: impl FnMut(&mut Table)) {
        for place in &self.in_hand {
            if let Some(table) = self.tables.get_mut(*place) {
                look(table);
            }
        }
    }

    /// Ends the current transaction.
    pub fn let_go(&mut self) {
        for place in self.in_hand.drain(..) {
            if let Some(state) = self.tables.get_mut(place) {
                (state.touched, state.barred) = (false, false);
            }
        }
        self.last = None;
    }

    /// Returns whether there is no room for another table.
    pub fn is_full(&self) -> bool {
        self.tables.len() >= self.capacity
    }

    /// Forgets all tables.
    pub fn clear(&mut self) {
        self.let_go();
        self.places.clear();
        self.tables.clear();
    }
}
