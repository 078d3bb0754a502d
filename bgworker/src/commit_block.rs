//! Commit timestamps and origins of transactions with consecutive ids, as they are kept in a table
//! of Braid's own for longer than PostgreSQL has them.
//!
//! Each transaction is a number for its origin (0: nothing is known of it, it was rolled back;
//! otherwise the origin's own plus one) and, where it committed, by how many microseconds that was
//! after the one before it in the block. Both in base 128, the lowest seven bits first, the
//! difference with its sign in the lowest bit: three to five bytes where transactions follow each
//! other.

/// Transactions in a block. A block starts at a multiple of it.
pub const TRANSACTIONS: u64 = 1 << 14;

/// What is known of a transaction that has committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commit {
    /// Its time, microseconds; from where on they count is the caller's.
    pub timestamp: i64,
    /// Its replication origin's number; 0: this node.
    pub origin: u16,
}

/// The block that has a transaction, and its place there.
#[must_use]
pub fn place_of(transaction: u64) -> (u64, usize) {
    let place = transaction % TRANSACTIONS;
    (
        transaction - place,
        usize::try_from(place).unwrap_or(usize::MAX),
    )
}

/// A block's bytes.
#[must_use]
pub fn encode(commits: &[Option<Commit>]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(commits.len() * 4);
    let mut before = 0_i64;
    for commit in commits {
        let Some(Commit { timestamp, origin }) = commit else {
            bytes.push(0);
            continue;
        };
        put(&mut bytes, u64::from(*origin) + 1);
        let difference = timestamp.wrapping_sub(before);
        put(
            &mut bytes,
            (difference << 1 ^ difference >> 63).cast_unsigned(),
        );
        before = *timestamp;
    }
    bytes
}

/// What [`encode`] was given; `None` where the bytes are not those of so many transactions.
#[must_use]
pub fn decode(mut bytes: &[u8], count: usize) -> Option<Vec<Option<Commit>>> {
    // Each takes a byte at least.
    if bytes.len() < count {
        return None;
    }
    let mut commits = Vec::with_capacity(count);
    let mut before = 0_i64;
    for _ in 0..count {
        let Some(origin) = take(&mut bytes)?.checked_sub(1) else {
            commits.push(None);
            continue;
        };
        let difference = take(&mut bytes)?;
        let difference = (difference >> 1).cast_signed() ^ -(difference & 1).cast_signed();
        before = before.wrapping_add(difference);
        commits.push(Some(Commit {
            timestamp: before,
            origin: u16::try_from(origin).ok()?,
        }));
    }
    bytes.is_empty().then_some(commits)
}

fn put(bytes: &mut Vec<u8>, mut value: u64) {
    while value > 0x7F {
        bytes.push((value & 0x7F) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push((value & 0x7F) as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7F);
        let shifted = bits << shift;
        if shifted >> shift != bits {
            return None;
        }
        value |= shifted;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}
