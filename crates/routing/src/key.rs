//! A value of the tenant or record expression, and its canonical bytes.
//!
//! Example: `tenant_id` is a `bigint`, and a client passes the parameter as `int4`, or a query says
//! `tenant_id = 42.0`. PostgreSQL calls all three values equal, so all must lead to one shard.
//! Equal values of one class have equal canonical bytes; different values have different bytes.
//!
//! Canonical bytes are a letter for the class, then the value (`docs/routing-hash.md`). The format
//! belongs to [`crate::HASH_VERSION`] and never changes within a version.
//!
//! Not for: reading a datum, which the server side does.

use thiserror::Error;

/// Microseconds of a day.
const DAY: i128 = 86_400_000_000;

/// Why a value or a type has no hash.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HashError {
    /// The type has no canonical bytes.
    #[error("type {0} is not supported by routing")]
    UnsupportedType(String),
    /// Under the collation, texts with different bytes can be equal.
    #[error("collation \"{0}\" is not supported by routing: it is not deterministic")]
    Collation(String),
    /// The text is not of a form that `numeric_out` gives.
    #[error("invalid number for routing")]
    Number,
    /// The canonical bytes are not of a known class, or too many for an entry of the log.
    #[error("invalid tenant for a routing rule")]
    Tenant,
}

impl HashError {
    /// The hint for the user: a sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::UnsupportedType(_) => {
                "Use smallint, integer, bigint, numeric, text, varchar, char, name, uuid, boolean, date, timestamp, timestamptz or bytea."
            }
            Self::Collation(_) => "Use a column or an expression with a deterministic collation.",
            Self::Number => "Pass the number in plain decimal digits, without an exponent.",
            Self::Tenant => "A tenant of a rule takes at most 512 bytes.",
        }
    }
}

/// Types that routing supports. Each belongs to a class; values of one class can be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyType {
    /// `smallint`, `integer`, `bigint`: numbers.
    Integer,
    /// `numeric`: a number.
    Numeric,
    /// `text`, `varchar`, `name`: texts.
    Text,
    /// `char(n)`: a text without its trailing spaces.
    PaddedText,
    /// `uuid`.
    Uuid,
    /// `boolean`.
    Bool,
    /// `date`: a local time, equal to a `timestamp` at midnight.
    Date,
    /// `timestamp`: a local time.
    Timestamp,
    /// `timestamptz`: an instant.
    TimestampTz,
    /// `bytea`.
    Bytes,
}

impl KeyType {
    /// The type with this OID, which is a type of PostgreSQL's own; a domain is resolved by the
    /// caller. `name` is the type's name for the error.
    ///
    /// OIDs are those of PostgreSQL's `pg_type.dat`, the same in all major versions.
    ///
    /// # Errors
    /// [`HashError::UnsupportedType`] for all other types.
    pub fn of_type(oid: u32, name: &str) -> Result<Self, HashError> {
        Ok(match oid {
            20 | 21 | 23 => Self::Integer,
            1700 => Self::Numeric,
            19 | 25 | 1043 => Self::Text,
            1042 => Self::PaddedText,
            2950 => Self::Uuid,
            16 => Self::Bool,
            1082 => Self::Date,
            1114 => Self::Timestamp,
            1184 => Self::TimestampTz,
            17 => Self::Bytes,
            _ => return Err(HashError::UnsupportedType(name.to_owned())),
        })
    }

    /// Checks the collation of a text; other types have none.
    ///
    /// # Errors
    /// [`HashError::Collation`] if the collation is not deterministic.
    pub fn check_collation(self, name: &str, deterministic: bool) -> Result<(), HashError> {
        if deterministic || !matches!(self, Self::Text | Self::PaddedText) {
            Ok(())
        } else {
            Err(HashError::Collation(name.to_owned()))
        }
    }
}

/// A number in the text form of PostgreSQL's `numeric_out`, without zeros that mean nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number<'a>(Form<'a>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form<'a> {
    Finite {
        negative: bool,
        whole: &'a str,
        fraction: &'a str,
    },
    /// NaN and the infinities, as PostgreSQL prints them.
    Special(&'static str),
}

impl<'a> Number<'a> {
    /// The number that this text shows: an optional minus, digits, and optionally a point with
    /// digits; or `NaN`, `Infinity`, `-Infinity`.
    ///
    /// # Errors
    /// [`HashError::Number`] for other texts. An exponent is one: `numeric_out` prints none.
    pub fn parse(text: &'a str) -> Result<Self, HashError> {
        match text {
            "NaN" => return Ok(Self(Form::Special("NaN"))),
            "Infinity" => return Ok(Self(Form::Special("Infinity"))),
            "-Infinity" => return Ok(Self(Form::Special("-Infinity"))),
            _ => {}
        }
        let (negative, digits) = match text.strip_prefix('-') {
            Some(digits) => (true, digits),
            None => (false, text),
        };
        let (whole, fraction) = match digits.split_once('.') {
            Some((_, "")) => return Err(HashError::Number),
            Some(parts) => parts,
            None => (digits, ""),
        };
        let all_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || !all_digits(whole) || !all_digits(fraction) {
            return Err(HashError::Number);
        }
        let whole = whole.trim_start_matches('0');
        let fraction = fraction.trim_end_matches('0');
        Ok(Self(Form::Finite {
            negative: negative && !(whole.is_empty() && fraction.is_empty()),
            whole,
            fraction,
        }))
    }

    fn write(self, sink: &mut impl Sink) {
        match self.0 {
            Form::Special(text) => sink.put(text.as_bytes()),
            Form::Finite {
                negative,
                whole,
                fraction,
            } => {
                if negative {
                    sink.put(b"-");
                }
                sink.put(if whole.is_empty() {
                    b"0"
                } else {
                    whole.as_bytes()
                });
                if !fraction.is_empty() {
                    sink.put(b".");
                    sink.put(fraction.as_bytes());
                }
            }
        }
    }
}

/// A value that is not null.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key<'a> {
    /// An integer of any width.
    Integer(i64),
    /// A `numeric`.
    Numeric(Number<'a>),
    /// A `text`, `varchar` or `name` in UTF-8, under a deterministic collation. The caller converts
    /// texts of databases with another encoding.
    Text(&'a str),
    /// A `char(n)` in UTF-8.
    PaddedText(&'a str),
    /// The 16 bytes of a `uuid`.
    Uuid([u8; 16]),
    /// A `boolean`.
    Bool(bool),
    /// Days since 2000-01-01; the smallest and largest value are the infinities.
    Date(i32),
    /// Microseconds since 2000-01-01 00:00; the smallest and largest value are the infinities.
    Timestamp(i64),
    /// Microseconds since 2000-01-01 00:00 UTC; the smallest and largest value are the infinities.
    TimestampTz(i64),
    /// A `bytea`.
    Bytes(&'a [u8]),
}

/// Letters of the classes: number, text, uuid, boolean, local time, instant, bytes.
const CLASSES: &[u8] = b"nsubdzx";

impl Key<'_> {
    /// The canonical bytes: the class's letter, then the value.
    #[must_use]
    pub fn canonical(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes);
        bytes
    }

    pub(crate) fn write(&self, sink: &mut impl Sink) {
        match *self {
            Self::Integer(value) => {
                sink.put(b"n");
                put_decimal(sink, value.into());
            }
            Self::Numeric(number) => {
                sink.put(b"n");
                number.write(sink);
            }
            Self::Text(text) => {
                sink.put(b"s");
                sink.put(text.as_bytes());
            }
            Self::PaddedText(text) => {
                sink.put(b"s");
                sink.put(text.trim_end_matches(' ').as_bytes());
            }
            Self::Uuid(bytes) => {
                sink.put(b"u");
                sink.put(&bytes);
            }
            Self::Bool(value) => sink.put(if value { b"bt" } else { b"bf" }),
            Self::Date(days) => {
                let infinite = [i32::MIN, i32::MAX].contains(&days);
                put_time(sink, b"d", i128::from(days) * DAY, infinite);
            }
            Self::Timestamp(micros) => {
                let infinite = [i64::MIN, i64::MAX].contains(&micros);
                put_time(sink, b"d", micros.into(), infinite);
            }
            Self::TimestampTz(micros) => {
                let infinite = [i64::MIN, i64::MAX].contains(&micros);
                put_time(sink, b"z", micros.into(), infinite);
            }
            Self::Bytes(bytes) => {
                sink.put(b"x");
                sink.put(bytes);
            }
        }
    }
}

/// Whether the bytes begin with a class's letter.
pub(crate) fn has_class(canonical: &[u8]) -> bool {
    canonical
        .first()
        .is_some_and(|class| CLASSES.contains(class))
}

/// Takes canonical bytes, part by part.
pub(crate) trait Sink {
    fn put(&mut self, bytes: &[u8]);
}

impl Sink for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

fn put_time(sink: &mut impl Sink, class: &[u8], micros: i128, infinite: bool) {
    sink.put(class);
    match (infinite, micros < 0) {
        (true, true) => sink.put(b"-infinity"),
        (true, false) => sink.put(b"infinity"),
        (false, _) => put_decimal(sink, micros),
    }
}

fn put_decimal(sink: &mut impl Sink, value: i128) {
    if value < 0 {
        sink.put(b"-");
    }
    let mut rest = value.unsigned_abs();
    let mut digits = [b'0'; 39];
    let mut used = 0;
    for digit in digits.iter_mut().rev() {
        // Division of 64 bits is much cheaper, and nearly all values fit.
        let last = if let Ok(small) = u64::try_from(rest) {
            rest = (small / 10).into();
            u8::try_from(small % 10)
        } else {
            let last = u8::try_from(rest % 10);
            rest /= 10;
            last
        };
        *digit += last.unwrap_or(0);
        used += 1;
        if rest == 0 {
            break;
        }
    }
    let (_, shown) = digits.split_at(digits.len() - used);
    sink.put(shown);
}
