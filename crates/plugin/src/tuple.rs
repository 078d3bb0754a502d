//! Takes a heap tuple apart, once, without a call into PostgreSQL.
//!
//! The layout is that of src/include/access/htup_details.h and src/include/varatt.h (15 to 18) on a
//! little-endian machine.

use braid_postgres::decoding::Tuple;

#[cfg(target_endian = "big")]
compile_error!("the layout of varlena headers is that of a little-endian machine");

/// `HEAP_HASNULL` of `t_infomask`.
const HAS_NULL: u16 = 0x0001;
/// `HEAP_NATTS_MASK` of `t_infomask2`.
const NATTS_MASK: u16 = 0x07FF;
/// `offsetof(HeapTupleHeaderData, t_bits)`.
const BITS_OFFSET: usize = 23;

/// First byte of a value that is stored out of line (`VARATT_IS_1B_E`).
const EXTERNAL: u8 = 0x01;
/// `VARTAG_INDIRECT`: a pointer in memory.
pub(super) const TAG_INDIRECT: u8 = 1;
/// `VARTAG_ONDISK`: a TOAST pointer.
const TAG_ON_DISK: u8 = 18;

/// How one attribute of a relation is stored.
#[derive(Debug)]
pub(super) struct Attribute {
    /// `attlen`: bytes, -1 for a varlena, -2 for a C string.
    pub(super) len: i16,
    /// Alignment in bytes: 1, 2, 4 or 8.
    pub(super) align: usize,
    /// The stored form of the value that rows have which are older than the attribute.
    pub(super) missing: Option<Box<[u8]>>,
}

/// A tuple does not fit its relation's attributes.
#[derive(Debug)]
pub(super) struct Corrupt;

/// Where a field is.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Null,
    Unavailable,
    /// In the tuple: from this offset on, so many bytes.
    Stored {
        start: usize,
        len: usize,
    },
    /// The row is older than the attribute.
    Missing,
}

/// One field of a row.
#[derive(Debug, Clone, Copy)]
pub(super) enum Field<'r> {
    /// Null.
    Null,
    /// An unchanged TOAST value, which is not in WAL.
    Unavailable,
    /// The bytes as they are stored, a varlena with its header.
    Stored(&'r [u8]),
}

/// Room for the fields of a tuple that is taken apart. Reused from change to change.
#[derive(Debug, Default)]
pub(super) struct Slots(Vec<Slot>);

/// A tuple that was taken apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'r> {
    slots: &'r [Slot],
    bytes: &'r [u8],
    attributes: &'r [Attribute],
}

impl<'r> Row<'r> {
    /// Field `index` (from 0); null if there is none.
    #[inline]
    pub(super) fn field(self, index: usize) -> Field<'r> {
        let stored = match self.slots.get(index) {
            Some(Slot::Stored { start, len }) => self.bytes.get(*start..*start + *len),
            Some(Slot::Missing) => self
                .attributes
                .get(index)
                .and_then(|attribute| attribute.missing.as_deref()),
            Some(Slot::Unavailable) => return Field::Unavailable,
            Some(Slot::Null) | None => None,
        };
        stored.map_or(Field::Null, Field::Stored)
    }
}

impl Slots {
    /// Takes `tuple` apart.
    #[inline]
    pub(super) fn fill<'r>(
        &'r mut self,
        tuple: Tuple<'r>,
        attributes: &'r [Attribute],
    ) -> Result<Row<'r>, Corrupt> {
        let slots = &mut self.0;
        slots.clear();
        let (bytes, header) = (tuple.bytes(), tuple.header());
        let nulls = if header.t_infomask & HAS_NULL == 0 {
            None
        } else {
            Some(bytes.get(BITS_OFFSET..).ok_or(Corrupt)?)
        };
        let stored = usize::from(header.t_infomask2 & NATTS_MASK);
        let mut rest = usize::from(header.t_hoff);
        for (index, attribute) in attributes.iter().enumerate() {
            if index >= stored {
                slots.push(Slot::Missing);
                continue;
            }
            if let Some(nulls) = nulls {
                let byte = nulls.get(index / 8).ok_or(Corrupt)?;
                if byte & (1 << (index % 8)) == 0 {
                    slots.push(Slot::Null);
                    continue;
                }
            }
            let start = match attribute.len {
                // A varlena with a short header is not aligned; padding is zero, a short header
                // never is.
                -1 if *bytes.get(rest).ok_or(Corrupt)? != 0 => rest,
                _ => rest.next_multiple_of(attribute.align),
            };
            let value = bytes.get(start..).ok_or(Corrupt)?;
            let len = match usize::try_from(attribute.len) {
                Ok(len) => len,
                Err(_) if attribute.len == -1 => varlena_len(value).ok_or(Corrupt)?,
                Err(_) => value.iter().position(|byte| *byte == 0).ok_or(Corrupt)? + 1,
            };
            let value = value.get(..len).ok_or(Corrupt)?;
            let on_disk = attribute.len == -1 && matches!(value, [EXTERNAL, TAG_ON_DISK, ..]);
            slots.push(if on_disk {
                Slot::Unavailable
            } else {
                Slot::Stored { start, len }
            });
            rest = start + len;
        }
        Ok(Row {
            slots,
            bytes,
            attributes,
        })
    }

    /// Takes a tuple apart, if there is one.
    #[inline]
    pub(super) fn fill_any<'r>(
        &'r mut self,
        tuple: Option<Tuple<'r>>,
        attributes: &'r [Attribute],
    ) -> Result<Option<Row<'r>>, Corrupt> {
        tuple.map(|tuple| self.fill(tuple, attributes)).transpose()
    }
}

/// `VARSIZE_ANY`: bytes of a varlena, its header included. `None` if the bytes are none.
#[inline]
pub(super) fn varlena_len(bytes: &[u8]) -> Option<usize> {
    let first = *bytes.first()?;
    if first == EXTERNAL {
        return match *bytes.get(1)? {
            TAG_ON_DISK => Some(18),
            // Pointers in memory: indirect, or an expanded object.
            1..=3 => Some(10),
            _ => None,
        };
    }
    if first & 1 == 1 {
        return Some(usize::from(first >> 1));
    }
    let header = u32::from_le_bytes(*bytes.first_chunk::<4>()?);
    usize::try_from(header >> 2).ok().filter(|len| *len >= 4)
}

/// The kind of a varlena's bytes.
#[derive(Debug)]
pub(super) enum Varlena<'v> {
    /// The varlena's content, in place.
    Plain(&'v [u8]),
    /// A pointer to another varlena in memory.
    Indirect(*const u8),
    /// Compressed, or something else that has to be fetched by PostgreSQL.
    Fetch,
}

/// Look at a varlena's header; `bytes` are the whole of it.
#[inline]
pub(super) fn open(bytes: &[u8]) -> Varlena<'_> {
    match *bytes {
        [EXTERNAL, TAG_INDIRECT, ref pointer @ ..] => match pointer.first_chunk::<8>() {
            Some(raw) => Varlena::Indirect(std::ptr::with_exposed_provenance(
                usize::from_ne_bytes(*raw),
            )),
            None => Varlena::Fetch,
        },
        [EXTERNAL, ..] => Varlena::Fetch,
        [short, ref content @ ..] if short & 1 == 1 => Varlena::Plain(content),
        [long, _, _, _, ref content @ ..] if long & 3 == 0 => Varlena::Plain(content),
        _ => Varlena::Fetch,
    }
}
