//! The format of a frame in the buffer: 8 bytes of header, the bytes, padding to a multiple of 8.

use crate::layout::ALIGN;

/// Bytes before a frame: u32 length, u32 kind.
pub(crate) const FRAME_HEADER: u64 = 8;
pub(crate) const WHOLE: u32 = 1;
/// The rest of the buffer is unused; the next frame is at its start.
pub(crate) const WRAP: u32 = 2;
/// Part of a frame that is too large to lie in one piece. More parts follow.
pub(crate) const PART: u32 = 3;
/// Last part.
pub(crate) const LAST_PART: u32 = 4;

/// Returns the number of bytes of the buffer that a frame of `len` bytes takes.
pub(crate) fn footprint(len: u32) -> u64 {
    (FRAME_HEADER + u64::from(len)).next_multiple_of(ALIGN)
}
