//! What the tracker knows of each table, and which tables the transaction in hand touches.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Spreads the numbers of tables; nobody gains by choosing bad ones but that their own stream is
/// slow.
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

/// A table.
#[derive(Debug, Clone, Copy, Default)]
pub struct Table {
    /// The transaction that changed it last; 0 for none.
    pub last_change: u64,
    /// The transaction that had a barrier on it last; 0 for none.
    pub last_barrier: u64,
    /// The transaction in hand has a barrier on it.
    pub barred: bool,
    touched: bool,
}

/// All tables.
#[derive(Debug)]
pub struct TableBook {
    places: HashMap<u32, usize, BuildHasherDefault<Spread>>,
    tables: Vec<Table>,
    /// Places of those that the transaction in hand touches.
    in_hand: Vec<usize>,
    /// Number and place of the table that was touched last: changes of a table often come together.
    last: Option<(u32, usize)>,
    capacity: usize,
}

impl TableBook {
    /// At most `capacity` tables are known at a time.
    pub fn new(capacity: usize) -> Self {
        Self {
            places: HashMap::default(),
            tables: Vec::new(),
            in_hand: Vec::new(),
            last: None,
            capacity,
        }
    }

    /// The transaction in hand changes `table`. Returns whether it has a barrier on it; `None` when
    /// there is no room.
    #[inline]
    pub fn touch(&mut self, table: u32) -> Option<bool> {
        let place = match self.last {
            Some((last, place)) if last == table => place,
            _ => self.find(table)?,
        };
        self.tables.get(place).map(|state| state.barred)
    }

    /// The transaction in hand has a barrier on `table`. False when there is no room.
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

    /// Look at each table that the transaction in hand touches.
    pub fn each_in_hand(&mut self, mut look: impl FnMut(&mut Table)) {
        for place in &self.in_hand {
            if let Some(table) = self.tables.get_mut(*place) {
                look(table);
            }
        }
    }

    /// There is no transaction in hand any more.
    pub fn let_go(&mut self) {
        for place in self.in_hand.drain(..) {
            if let Some(state) = self.tables.get_mut(place) {
                (state.touched, state.barred) = (false, false);
            }
        }
        self.last = None;
    }

    /// Whether another table would be too many.
    pub fn is_full(&self) -> bool {
        self.tables.len() >= self.capacity
    }

    /// Forget all tables.
    pub fn clear(&mut self) {
        self.let_go();
        self.places.clear();
        self.tables.clear();
    }
}
