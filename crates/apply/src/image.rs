//! A row as jsonb from which it can be made again, to the bit. Run by the appliers, and by sessions that call `braid.row_image`.
//!
//! A column is what `to_jsonb` makes of it where that is all of it: numbers (jsonb rounds none), booleans, texts, moments, a jsonb value
//! that is an object or an array. Everything else is the text that PostgreSQL writes for it, as a JSON string: of a json value
//! `to_jsonb` would forget the order of members and fail at some escapes, of an array its bounds, of a composite its empty
//! parts, and a type of an extension may bring a cast of its own.
//!
//! jsonb ends at 256 MB: columns with large values are kept beside it, once the others come to [`ROOM`].

use std::ffi::{CStr, c_char};

use braid_postgres::compat;
use braid_postgres::error::PgError;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

/// Bytes of a row's values that go into its jsonb at most. Their text may be twice as much.
const ROOM: usize = 64 * 1024 * 1024;
/// Bytes of a value that goes into the jsonb whatever the others are: there are 1,600 columns at most.
const SMALL: usize = 16 * 1024;
/// `ATTRIBUTE_GENERATED_VIRTUAL` of src/include/catalog/pg_attribute.h, 18: a column that no stored
/// row has a value of.
const VIRTUAL: c_char = b'v'.cast_signed();
/// `JB_FOBJECT | JB_FARRAY` and `JB_FSCALAR` of src/include/utils/jsonb.h, 15 to 18.
const JSONB_SCALAR: u32 = 0x1000_0000;

/// What the text of values may depend on, and what it is while a row is written down: the same row is the same jsonb, whoever looks.
const SETTINGS: [(&CStr, &CStr); 7] = [
    (c"search_path", c""),
    (c"datestyle", c"ISO"),
    (c"intervalstyle", c"postgres"),
    (c"timezone", c"UTC"),
    (c"lc_monetary", c"C"),
    (c"bytea_output", c"hex"),
    (c"extra_float_digits", c"3"),
];

/// Do `work` with all settings that values' text depends on at fixed values. An error leaves it to the abort to put them back.
pub fn with_fixed_settings<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: a nest level of settings of its own; the strings are copied.
    let level = unsafe { pg_sys::NewGUCNestLevel() };
    for (name, value) in SETTINGS {
        // SAFETY: as above.
        unsafe {
            pg_sys::set_config_option(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_USERSET,
                pg_sys::GucSource::PGC_S_SESSION,
                pg_sys::GucAction::GUC_ACTION_SAVE,
                true,
                0,
                false,
            );
        }
    }
    let value = work();
    // SAFETY: the level that was made above.
    unsafe { pg_sys::AtEOXact_GUC(true, level) };
    value
}

/// A column of a row whose value is the text that PostgreSQL writes for it.
#[derive(Debug, Clone, Copy)]
struct Text {
    name: pg_sys::Datum,
    value: pg_sys::Datum,
}

/// A row, in pieces for SQL. Lives as long as the memory context that it was made in.
#[derive(Debug)]
pub struct Image {
    row_type: pg_sys::Oid,
    /// A composite value, in which the columns that follow are null.
    row: Option<pg_sys::Datum>,
    texts: Vec<Text>,
    large: Vec<Text>,
    /// Names of columns that are not part of it.
    absent: Vec<pg_sys::Datum>,
}

/// The SQL that makes jsonb of an image's arguments ([`Image::arguments`]), the first of which is number `first`.
#[must_use]
pub fn to_jsonb(first: usize) -> String {
    format!(
        "(pg_catalog.to_jsonb(${}) - ${}::text[]) || pg_catalog.jsonb_object(${}::text[], ${}::text[])",
        first,
        first + 1,
        first + 2,
        first + 3
    )
}

/// Whether `to_jsonb` of a value says all of it.
///
/// # Safety
/// `value` is of the type.
unsafe fn is_plain(type_oid: pg_sys::Oid, value: pg_sys::Datum) -> bool {
    // SAFETY: a catalog look-up in a transaction.
    match unsafe { pg_sys::getBaseType(type_oid) } {
        pg_sys::BOOLOID
        | pg_sys::INT2OID
        | pg_sys::INT4OID
        | pg_sys::INT8OID
        | pg_sys::NUMERICOID
        | pg_sys::TEXTOID
        | pg_sys::VARCHAROID
        | pg_sys::BPCHAROID
        | pg_sys::NAMEOID
        | pg_sys::BYTEAOID
        | pg_sys::UUIDOID
        | pg_sys::DATEOID
        | pg_sys::TIMEOID
        | pg_sys::TIMETZOID
        | pg_sys::TIMESTAMPOID
        | pg_sys::TIMESTAMPTZOID
        | pg_sys::INTERVALOID => true,
        // A number in jsonb has no -0.
        pg_sys::FLOAT4OID => value.value() & 0xffff_ffff != 0x8000_0000,
        pg_sys::FLOAT8OID => value.value() != 1 << 63,
        // SAFETY: the first word of a jsonb value says what it is.
        pg_sys::JSONBOID => unsafe {
            let plain = pg_sys::pg_detoast_datum(value.cast_mut_ptr());
            let header = plain
                .cast::<u8>()
                .add(pg_sys::VARHDRSZ)
                .cast::<u32>()
                .read_unaligned();
            header & JSONB_SCALAR == 0
        },
        _ => false,
    }
}

/// The text that PostgreSQL writes for a value, as a text Datum.
///
/// # Safety
/// `value` is of the type.
unsafe fn text_of(type_oid: pg_sys::Oid, value: pg_sys::Datum) -> pg_sys::Datum {
    let mut output = pg_sys::InvalidOid;
    let mut is_varlena = false;
    // SAFETY: as the caller says; all is allocated in the current context.
    unsafe {
        pg_sys::getTypeOutputInfo(type_oid, &raw mut output, &raw mut is_varlena);
        let text = pg_sys::OidOutputFunctionCall(output, value);
        pg_sys::Datum::from(pg_sys::cstring_to_text(text))
    }
}

/// All columns of the row in a slot; `None` for null.
///
/// # Safety
/// The slot holds a row.
pub unsafe fn fields(slot: *mut pg_sys::TupleTableSlot) -> Vec<Option<pg_sys::Datum>> {
    // SAFETY: as the caller says; the arrays have a place for each column once all are read.
    unsafe {
        let natts = (*(*slot).tts_tupleDescriptor).natts;
        if i32::from((*slot).tts_nvalid) < natts {
            pg_sys::slot_getsomeattrs_int(slot, natts);
        }
        (0..usize::try_from(natts).unwrap_or(0))
            .map(|index| (!*(*slot).tts_isnull.add(index)).then(|| *(*slot).tts_values.add(index)))
            .collect()
    }
}

impl Image {
    /// No row of this type.
    #[must_use]
    pub fn none(row_type: pg_sys::Oid) -> Self {
        Self {
            row_type,
            row: None,
            texts: Vec::new(),
            large: Vec::new(),
            absent: Vec::new(),
        }
    }

    /// The row with these values, which have a place for each column; without those columns, from 0, for which `is_absent`.
    ///
    /// # Safety
    /// The values are of the descriptor's columns; the descriptor is that of a named type or a registered one.
    pub unsafe fn new(
        descriptor: pg_sys::TupleDesc,
        values: &[Option<pg_sys::Datum>],
        is_absent: impl Fn(usize) -> bool,
    ) -> Self {
        // SAFETY: as the caller says.
        let mut image = Self::none(unsafe { (*descriptor).tdtypeid });
        let mut kept: Vec<pg_sys::Datum> = Vec::with_capacity(values.len());
        let mut nulls: Vec<bool> = Vec::with_capacity(values.len());
        let mut total = 0;
        for (index, value) in values.iter().enumerate() {
            // SAFETY: there are as many values as columns. Names are NUL-terminated.
            unsafe {
                let attribute = compat::TupleDescAttr(descriptor, index);
                let name = || {
                    let name = (*attribute).attname.data.as_ptr();
                    pg_sys::Datum::from(pg_sys::cstring_to_text(name))
                };
                let mut place = None;
                if (*attribute).attisdropped {
                } else if is_absent(index) || (*attribute).attgenerated == VIRTUAL {
                    image.absent.push(name());
                } else if let Some(value) = *value {
                    let size = if (*attribute).attlen == -1 {
                        pg_sys::toast_raw_datum_size(value)
                    } else {
                        0
                    };
                    let is_large = size > SMALL && total + size > ROOM;
                    if is_large {
                        let value = text_of((*attribute).atttypid, value);
                        image.absent.push(name());
                        image.large.push(Text {
                            name: name(),
                            value,
                        });
                    } else if is_plain((*attribute).atttypid, value) {
                        total += size;
                        place = Some(value);
                    } else {
                        total += size;
                        let value = text_of((*attribute).atttypid, value);
                        image.texts.push(Text {
                            name: name(),
                            value,
                        });
                    }
                }
                nulls.push(place.is_none());
                kept.push(place.unwrap_or_else(pg_sys::Datum::null));
            }
        }
        // SAFETY: one value and one mark a column.
        image.row = unsafe {
            let tuple = pg_sys::heap_form_tuple(descriptor, kept.as_mut_ptr(), nulls.as_mut_ptr());
            Some(pg_sys::heap_copy_tuple_as_datum(tuple, descriptor))
        };
        image
    }

    /// The row in a slot.
    ///
    /// # Safety
    /// The slot holds a row.
    pub unsafe fn of_slot(
        slot: *mut pg_sys::TupleTableSlot,
        is_absent: impl Fn(usize) -> bool,
    ) -> Self {
        // SAFETY: as the caller says.
        unsafe { Self::new((*slot).tts_tupleDescriptor, &fields(slot), is_absent) }
    }

    /// The row that a composite value is.
    ///
    /// # Safety
    /// `row` is a composite value.
    #[must_use]
    pub unsafe fn of_composite(row: pg_sys::Datum) -> Self {
        // SAFETY: as the caller says: its header names its type. The descriptor is given back when nothing refers to it any more.
        unsafe {
            let header =
                pg_sys::pg_detoast_datum(row.cast_mut_ptr()).cast::<pg_sys::HeapTupleHeaderData>();
            let fields = (*header).t_choice.t_datum;
            let descriptor =
                pg_sys::lookup_rowtype_tupdesc_copy(fields.datum_typeid, fields.datum_typmod);
            let mut tuple = pg_sys::HeapTupleData {
                t_len: u32::try_from(pgrx::varsize_any(header.cast())).unwrap_or(0),
                t_data: header,
                ..Default::default()
            };
            let natts = usize::try_from((*descriptor).natts).unwrap_or(0);
            let mut values = vec![pg_sys::Datum::null(); natts];
            let mut nulls = vec![true; natts];
            pg_sys::heap_deform_tuple(
                &raw mut tuple,
                descriptor,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            let values: Vec<Option<pg_sys::Datum>> = values
                .into_iter()
                .zip(nulls)
                .map(|(value, is_null)| (!is_null).then_some(value))
                .collect();
            Self::new(descriptor, &values, |_| false)
        }
    }

    /// The four arguments that [`to_jsonb`] stands for.
    #[must_use]
    pub fn arguments(&self) -> [DatumWithOid<'static>; 4] {
        // SAFETY: the values are of these types, and live in the context that the image was made in.
        unsafe {
            let row = match self.row {
                Some(row) => DatumWithOid::new(row, self.row_type),
                None => DatumWithOid::null_oid(self.row_type),
            };
            [
                row,
                text_array(self.absent.iter().copied()),
                text_array(self.texts.iter().map(|text| text.name)),
                text_array(self.texts.iter().map(|text| text.value)),
            ]
        }
    }

    /// Names and texts of the columns that are not in the jsonb because they are large, as two arguments. `None` when there are none.
    #[must_use]
    pub fn large(&self) -> Option<[DatumWithOid<'static>; 2]> {
        // SAFETY: as above.
        (!self.large.is_empty()).then(|| unsafe {
            [
                text_array(self.large.iter().map(|text| text.name)),
                text_array(self.large.iter().map(|text| text.value)),
            ]
        })
    }
}

/// An array of texts.
///
/// # Safety
/// The values are texts.
unsafe fn text_array(values: impl Iterator<Item = pg_sys::Datum>) -> DatumWithOid<'static> {
    let mut values: Vec<pg_sys::Datum> = values.collect();
    // SAFETY: as the caller says; `text` is of variable length, by reference, aligned as an int.
    unsafe {
        let array = pg_sys::construct_array(
            values.as_mut_ptr(),
            i32::try_from(values.len()).unwrap_or(0),
            pg_sys::TEXTOID,
            -1,
            false,
            b'i'.cast_signed(),
        );
        DatumWithOid::new(pg_sys::Datum::from(array), pg_sys::TEXTARRAYOID)
    }
}

/// A composite value as jsonb, for SQL, in the current memory context. Large columns are left out.
///
/// Raises whatever PostgreSQL raises.
#[must_use]
pub fn row_image(row: pg_sys::Datum) -> Option<pg_sys::Datum> {
    // SAFETY: reads a variable of the process.
    let context = unsafe { pg_sys::CurrentMemoryContext };
    let made = with_fixed_settings(|| {
        // SAFETY: the argument of an SQL function that takes a record.
        let image = unsafe { Image::of_composite(row) };
        pgrx::Spi::connect(|client| {
            let sql = format!("select {}", to_jsonb(1));
            let found = client.select(&sql, Some(1), &image.arguments())?.first();
            let value = found.get_datum_by_ordinal(1)?;
            // SAFETY: copied into the caller's memory before SPI's goes.
            Ok(value.map(|value| unsafe {
                let before = pg_sys::MemoryContextSwitchTo(context);
                let copy = pg_sys::pg_detoast_datum_copy(value.cast_mut_ptr());
                pg_sys::MemoryContextSwitchTo(before);
                pg_sys::Datum::from(copy)
            }))
        })
    });
    match made {
        Ok(value) => value,
        Err(error) => {
            let error: pgrx::spi::SpiError = error;
            PgError::new("XX000", format!("could not show a row: {error}")).raise()
        }
    }
}
