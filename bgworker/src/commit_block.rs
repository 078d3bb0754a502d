//! Encoding of commit timestamps and origins of transactions with consecutive ids. Braid keeps them
//! in its own table for longer than PostgreSQL does.
//!
//! Each transaction has one or two numbers. The first is its origin: 0 if nothing is known or it
//! was rolled back, otherwise the origin's number plus one. If it committed, the second is the
//! difference in microseconds to the previous commit of the block, with the sign in the lowest bit.
//! Both are in base 128, the lowest seven bits first. That makes three to five bytes if
//! transactions follow each other.

/// Transactions in a block. A block starts at a multiple of this number.
pub const TRANSACTIONS: u64 = 1 << 14;

/// Commit of one transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commit {
    /// Commit timestamp in microseconds, from any epoch of the caller.
    pub timestamp: i64,
    /// Number of the replication origin; 0: this node.
    pub origin: u16,
}

/// Returns the first transaction of the block that a transaction belongs to, and its index in the
/// block.
#[must_use]
pub fn place_of(transaction: u64) -> (u64, usize) {
    let place = transaction % TRANSACTIONS;
    (
        transaction - place,
        usize::try_from(place).unwrap_or(usize::MAX),
    )
}

/// Encodes a block.
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

/// Decodes what [`encode`] wrote. `None` if the bytes are not exactly `count` transactions.
#[must_use]
pub fn decode(mut bytes: &[u8], count: usize) -> Option<Vec<Option<Commit>>> {
    // Each transaction takes a byte at least.
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
