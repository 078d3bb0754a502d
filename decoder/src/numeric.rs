//! Converts PostgreSQL's stored `numeric` to its `numeric_send` form without a function call.
//!
//! The stored form (src/backend/utils/adt/numeric.c, the same in 15 to 18) follows the varlena
//! header, in the machine's byte order (little-endian). It begins with a u16 header, of one of
//! three kinds by its top bits:
//!
//! - long (00 or 01, the sign): 14 bits of display scale, followed by an i16 weight;
//! - short (10): contains sign, display scale and weight;
//! - special (11): NaN or an infinity.
//!
//! Base-10000 digits follow as i16.

use crate::hash::KeyHasher;

const SIGN_MASK: u16 = 0xC000;
const NEGATIVE: u16 = 0x4000;
const SHORT: u16 = 0x8000;
const SPECIAL: u16 = 0xC000;
const SPECIAL_MASK: u16 = 0xF000;

/// The parts of a stored `numeric`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numeric<'a> {
    sign: u16,
    weight: i16,
    scale: u16,
    digits: &'a [[u8; 2]],
}

impl<'a> Numeric<'a> {
    /// Parses the stored bytes, without their varlena header. `None` if they are not a `numeric`.
    #[must_use]
    pub fn from_stored(bytes: &'a [u8]) -> Option<Self> {
        let (fields, odd) = bytes.as_chunks::<2>();
        if !odd.is_empty() {
            return None;
        }
        let (first, rest) = fields.split_first()?;
        let header = u16::from_le_bytes(*first);
        Some(match header & SIGN_MASK {
            // numeric_send derives the scale of an infinity from its header bits.
            SPECIAL => Self {
                sign: header & SPECIAL_MASK,
                weight: 0,
                scale: (header & 0x1F80) >> 7,
                digits: rest,
            },
            SHORT => {
                let magnitude = (header & 0x3F).cast_signed();
                Self {
                    sign: if header & 0x2000 == 0 { 0 } else { NEGATIVE },
                    weight: if header & 0x40 == 0 {
                        magnitude
                    } else {
                        magnitude | !0x3F
                    },
                    scale: (header & 0x1F80) >> 7,
                    digits: rest,
                }
            }
            sign => {
                let (weight, digits) = rest.split_first()?;
                Self {
                    sign,
                    weight: i16::from_le_bytes(*weight),
                    scale: header & 0x3FFF,
                    digits,
                }
            }
        })
    }

    /// Appends the `numeric_send` form.
    pub fn send(&self, out: &mut Vec<u8>) {
        let count = u16::try_from(self.digits.len()).unwrap_or(u16::MAX);
        out.extend_from_slice(&count.to_be_bytes());
        out.extend_from_slice(&self.weight.to_be_bytes());
        out.extend_from_slice(&self.sign.to_be_bytes());
        out.extend_from_slice(&self.scale.to_be_bytes());
        for [low, high] in self.digits {
            out.extend_from_slice(&[*high, *low]);
        }
    }

    /// Adds the parts that equality compares: without the display scale, and without zero digits at
    /// either end.
    pub fn feed(&self, hasher: &mut KeyHasher) {
        let mut digits = self.digits;
        let mut weight = i64::from(self.weight);
        while let Some(([0, 0], rest)) = digits.split_first() {
            digits = rest;
            weight -= 1;
        }
        while let Some(([0, 0], rest)) = digits.split_last() {
            digits = rest;
        }
        if digits.is_empty() {
            // Zero has no sign and no weight; NaN and the infinities only have their sign word.
            hasher.word(if self.sign & SPECIAL == SPECIAL {
                u64::from(self.sign)
            } else {
                0
            });
            return;
        }
        hasher.word(u64::from(self.sign) | (weight.cast_unsigned() << 16));
        hasher.bytes(digits.as_flattened());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(stored: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        Numeric::from_stored(stored).unwrap().send(&mut out);
        out
    }

    fn hash(stored: &[u8]) -> u64 {
        let mut hasher = KeyHasher::new(0);
        Numeric::from_stored(stored).unwrap().feed(&mut hasher);
        hasher.finish()
    }

    fn short(sign: bool, scale: u16, weight: i16, digits: &[i16]) -> Vec<u8> {
        let header =
            SHORT | if sign { 0x2000 } else { 0 } | (scale << 7) | (weight.cast_unsigned() & 0x7F);
        let mut out = header.to_le_bytes().to_vec();
        digits
            .iter()
            .for_each(|digit| out.extend_from_slice(&digit.to_le_bytes()));
        out
    }

    fn long(sign: u16, scale: u16, weight: i16, digits: &[i16]) -> Vec<u8> {
        let mut out = (sign | scale).to_le_bytes().to_vec();
        out.extend_from_slice(&weight.to_le_bytes());
        digits
            .iter()
            .for_each(|digit| out.extend_from_slice(&digit.to_le_bytes()));
        out
    }

    #[test]
    fn forms() {
        // 12345.67 is 1 2345.6700
        assert_eq!(
            sent(&short(false, 2, 1, &[1, 2345, 6700])),
            [0, 3, 0, 1, 0, 0, 0, 2, 0, 1, 0x09, 0x29, 0x1A, 0x2C]
        );
        // -0.00005 has its first digit at weight -2
        assert_eq!(
            sent(&short(true, 5, -2, &[5000])),
            [0, 1, 0xFF, 0xFE, 0x40, 0, 0, 5, 0x13, 0x88]
        );
        assert_eq!(
            sent(&long(NEGATIVE, 100, 70, &[1])),
            [0, 1, 0, 70, 0x40, 0, 0, 100, 0, 1]
        );
        assert_eq!(sent(&0xC000_u16.to_le_bytes()), [0, 0, 0, 0, 0xC0, 0, 0, 0]);
        assert_eq!(
            sent(&0xD000_u16.to_le_bytes()),
            [0, 0, 0, 0, 0xD0, 0, 0, 0x20]
        );
        assert_eq!(Numeric::from_stored(&[]), None);
        assert_eq!(Numeric::from_stored(&[0, 0]), None);
        assert_eq!(Numeric::from_stored(&[0, 0x80, 1]), None);
    }

    #[test]
    fn equal_numbers_have_equal_hashes() {
        assert_eq!(
            hash(&short(false, 0, 0, &[1])),
            hash(&short(false, 9, 0, &[1]))
        );
        assert_eq!(hash(&short(false, 0, 0, &[1])), hash(&long(0, 0, 0, &[1])));
        assert_eq!(
            hash(&short(false, 0, 0, &[1])),
            hash(&long(0, 4, 1, &[0, 1, 0]))
        );
        assert_eq!(
            hash(&short(false, 0, 0, &[])),
            hash(&long(0, 10, 0, &[0, 0]))
        );
        assert_ne!(
            hash(&short(false, 0, 0, &[1])),
            hash(&short(true, 0, 0, &[1]))
        );
        assert_ne!(
            hash(&short(false, 0, 0, &[1])),
            hash(&short(false, 0, 1, &[1]))
        );
        assert_ne!(
            hash(&0xC000_u16.to_le_bytes()),
            hash(&0xD000_u16.to_le_bytes())
        );
        assert_ne!(
            hash(&0xC000_u16.to_le_bytes()),
            hash(&short(false, 0, 0, &[]))
        );
    }
}
