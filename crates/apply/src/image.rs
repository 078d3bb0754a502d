//! Makes jsonb of a row from which the row can be made again, to the bit. Run by the appliers, and
//! by sessions that call `braid.row_image`.
//!
//! If `to_jsonb` loses nothing, a column has its result: for numbers (jsonb rounds none), booleans,
//! texts, timestamps, and jsonb values that are objects or arrays. Every other value is the text of
//! its output function, as a JSON string. `to_jsonb` would lose the order of members in a json
//! value and fail at some escapes. It would lose the bounds of an array and empty parts of a
//! composite. The type of an extension may have a cast of its own.
//!
//! jsonb ends at 256 MB. So columns with large values are stored beside it, once the others reach
//! [`ROOM`].

use std::ffi::CStr;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::composite::{Composite, Formed};
use braid_postgres::error::PgError;
use braid_postgres::memory;
use braid_postgres::setting::{self, As, Level};
use braid_postgres::slot::Slot;
use braid_postgres::tuple_desc::{Attribute, TupleDesc};
use braid_postgres::value::{self, Content, Value};
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;

/// Largest number of bytes of a row's values in its jsonb. Their text may be twice as long.
const ROOM: usize = 64 * 1024 * 1024;
/// Largest number of bytes of a value that is always in the jsonb: a row has at most 1,600 columns.
const SMALL: usize = 16 * 1024;
/// `JB_FOBJECT | JB_FARRAY` and `JB_FSCALAR` of src/include/utils/jsonb.h, 15 to 18.
const JSONB_SCALAR: u32 = 0x1000_0000;

/// Settings beside [`setting::OF_TEXTS`] for the text of a stored row. With them the same row has
/// the same jsonb in every session.
const SETTINGS: [(&CStr, &CStr); 2] = [(c"search_path", c""), (c"timezone", c"UTC")];

/// Runs `work` with fixed values of all settings on which the text of values depends. After an
/// error, the abort restores them.
pub fn with_fixed_settings<T>(work: impl FnOnce() -> T) -> T {
    let level = Level::begin();
    for (name, value) in setting::OF_TEXTS.into_iter().chain(SETTINGS) {
        level.set(name, value, As::User);
    }
    let value = work();
    level.end(true);
    value
}

/// A column of a row that is stored as the text of its output function.
#[derive(Debug, Clone, Copy)]
struct Text {
    name: Value<'static>,
    value: Value<'static>,
}

/// A row, in parts for SQL. Lives as long as the memory context in which it was made.
#[derive(Debug)]
pub struct Image {
    row_type: pg_sys::Oid,
    /// A composite value, in which the columns that follow are null.
    row: Option<Value<'static>>,
    texts: Vec<Text>,
    large: Vec<Text>,
    /// Names of columns that the row does not have.
    absent: Vec<Value<'static>>,
}

/// Returns the SQL that makes jsonb of an image's arguments ([`Image::arguments`]), the first of
/// which has number `first`.
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

/// Whether `to_jsonb` loses nothing of a value.
fn is_plain(value: Value<'_>) -> bool {
    let word = value.datum().value();
    match value.as_base().type_id() {
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
        // A number in jsonb can't be -0.
        pg_sys::FLOAT4OID => word & 0xffff_ffff != 0x8000_0000,
        pg_sys::FLOAT8OID => word != 1 << 63,
        // The first word of a jsonb value has its kind.
        pg_sys::JSONBOID => value.read(|content| match content {
            Content::Bytes(bytes) => bytes
                .first_chunk()
                .is_some_and(|header| u32::from_ne_bytes(*header) & JSONB_SCALAR == 0),
            Content::Word(_) => false,
        }),
        _ => false,
    }
}

/// Returns the text of a value's output function.
fn text_of(value: Value<'_>) -> Value<'static> {
    value::text(value.output().to_bytes())
}

impl Image {
    /// Returns an image without a row, of this type.
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

    /// Returns the image of a row with these values, without columns, from 0, for which `is_absent`
    /// returns true. The shape is that of a named type or a registered one.
    fn new<'v>(
        shape: TupleDesc<'_>,
        cells: impl Iterator<Item = (Attribute<'v>, Option<Value<'v>>)>,
        is_absent: impl Fn(usize) -> bool,
    ) -> Self {
        let mut image = Self::none(shape.row_type());
        let mut kept: Vec<Option<Value<'v>>> = vec![None; shape.len()];
        let mut total = 0;
        for (attribute, value) in cells {
            let index = usize::try_from(attribute.number() - 1).unwrap_or(usize::MAX);
            let name = || value::text(attribute.raw_name().to_bytes());
            if attribute.is_dropped() {
            } else if is_absent(index) || attribute.is_virtual() {
                image.absent.push(name());
            } else if let Some(value) = value {
                let size = if attribute.is_varlena() {
                    value.size()
                } else {
                    0
                };
                let text = || Text {
                    name: name(),
                    value: text_of(value),
                };
                if size > SMALL && total + size > ROOM {
                    image.absent.push(name());
                    image.large.push(text());
                    continue;
                }
                total += size;
                if !is_plain(value) {
                    image.texts.push(text());
                } else if let Some(place) = kept.get_mut(index) {
                    *place = Some(value);
                }
            }
        }
        let row = Formed::new(shape, |index| kept.get(index).copied().flatten());
        image.row = Some(row.value());
        image
    }

    /// Returns the image of the row in a slot.
    #[must_use]
    pub fn of_slot(slot: &Slot, is_absent: impl Fn(usize) -> bool) -> Self {
        let shape = slot.descriptor();
        let columns = shape.iter().enumerate();
        let cells = columns.map(|(index, column)| (column, slot.cell(index)));
        Self::new(shape, cells, is_absent)
    }

    /// Returns the image of a composite value.
    #[must_use]
    pub fn of_composite(row: &Composite) -> Self {
        Self::new(row.shape(), row.cells(), |_| false)
    }

    /// Returns the four arguments that [`to_jsonb`] refers to.
    #[must_use]
    pub fn arguments(&self) -> [DatumWithOid<'static>; 4] {
        let row = match self.row {
            Some(row) => row.argument(),
            None => DatumWithOid::null_oid(self.row_type),
        };
        let texts = self.texts.iter();
        [
            row,
            value::texts(self.absent.iter().copied()).argument(),
            value::texts(texts.clone().map(|text| text.name)).argument(),
            value::texts(texts.map(|text| text.value)).argument(),
        ]
    }

    /// Returns the row; `None` if there is none.
    #[must_use]
    pub fn row(&self) -> Option<Value<'static>> {
        self.row
    }

    /// Returns names and texts of the columns that are too large for the jsonb, as two arguments.
    /// Returns `None` if there are none.
    #[must_use]
    pub fn large(&self) -> Option<[DatumWithOid<'static>; 2]> {
        let large = self.large.iter();
        (!self.large.is_empty()).then(|| {
            [
                value::texts(large.clone().map(|text| text.name)).argument(),
                value::texts(large.map(|text| text.value)).argument(),
            ]
        })
    }
}

/// Returns a composite value as jsonb, for SQL, in the current memory context. Large columns are
/// left out.
///
/// Raises whatever PostgreSQL raises.
#[must_use]
pub fn row_image(row: pg_sys::Datum) -> Option<pg_sys::Datum> {
    let made = memory::with_current(|memory| {
        with_fixed_settings(|| {
            // SAFETY: the argument of an SQL function that takes a record.
            let image = Image::of_composite(&unsafe { Composite::open(row) });
            pgrx::Spi::connect(|client| {
                let sql = format!("select {}", to_jsonb(1));
                let found = client.select(&sql, Some(1), &image.arguments())?.first();
                let value = found.get_datum_by_ordinal(1)?;
                // SAFETY: a jsonb in SPI's memory, copied into the caller's before that goes.
                let value = value.map(|value| unsafe { Value::of_type(pg_sys::JSONBOID, value) });
                Ok(value.map(|value| memory.run(|| value.copy().datum())))
            })
        })
    });
    match made {
        Ok(value) => value,
        Err(error) => {
            let error: pgrx::spi::SpiError = error;
            PgError::new(
                SqlState::InternalError,
                format!("could not show a row: {error}"),
            )
            .raise()
        }
    }
}
