//! Names and texts between the server's encoding and UTF-8, in which GIR, and all of this code, has
//! them.
//!
//! Where the two are not the same, PostgreSQL looks for a conversion: in a transaction.

use std::ffi::{CStr, CString, c_char};

use braid_bgworker::sqlstate::SqlState;
use pgrx::callconv::{Arg, ArgAbi, BoxRet, FcInfo};
use pgrx::datum::{Datum, DatumWithOid, UnboxDatum};
use pgrx::pgrx_sql_entity_graph::metadata::{
    ArgumentError, ReturnsError, ReturnsRef, SqlMappingRef, SqlTranslatable, TypeOrigin,
};
use pgrx::{FromDatum, IntoDatum, PgSqlErrorCode, ereport, pg_sys};

use crate::error::PgError;
use crate::{plain, value};

const SQL_ASCII: i32 = pg_sys::pg_enc::PG_SQL_ASCII.cast_signed();
const UTF8: i32 = pg_sys::pg_enc::PG_UTF8.cast_signed();

/// In a database whose encoding is SQL_ASCII names and texts are any bytes. Bytes that are not
/// UTF-8 are mapped to characters from this one on, one for each byte. No other text uses them
/// (private use, plane 16). So names that differ also differ in UTF-8, and are unchanged when they
/// are mapped back.
const STRAY: u32 = 0x10_FF00;

/// A name as UTF-8; empty for a null pointer.
///
/// # Safety
/// `name` is null or a C string.
pub unsafe fn from_server(name: *const c_char) -> String {
    if name.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a C string as the caller says.
    utf8(unsafe { CStr::from_ptr(name) })
}

/// Text in the server's encoding as UTF-8.
#[must_use]
pub fn utf8(text: &CStr) -> String {
    if text.to_bytes().is_ascii() || is_utf8() {
        return text.to_string_lossy().into_owned();
    }
    if is_sql_ascii() {
        return from_any_bytes(text.to_bytes());
    }
    let converted = server_to_any(text.to_bytes(), UTF8);
    converted.unwrap_or(text).to_string_lossy().into_owned()
}

/// Declares conversions of PostgreSQL's; `None` if the bytes stay as they are. A result is in the
/// current memory context, which only unsafe functions reset.
macro_rules! conversions {
    ($($(#[doc = $doc:literal])* fn $name:ident = $symbol:ident;)*) => {$(
        $(#[doc = $doc])*
        fn $name(bytes: &[u8], encoding: i32) -> Option<&CStr> {
            let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
            // SAFETY: there are so many bytes, or more; PostgreSQL checks the encoding. The answer
            // is null, these bytes, or a new string that ends with a zero byte.
            unsafe {
                let converted = pg_sys::$symbol(bytes.as_ptr().cast(), length, encoding);
                let is_given = converted.cast_const().cast::<u8>() == bytes.as_ptr();
                (!converted.is_null() && !is_given).then(|| CStr::from_ptr(converted))
            }
        }
    )*};
}

conversions! {
    /// Text in the server's encoding in another one.
    fn server_to_any = pg_server_to_any;
    /// Text of another encoding in the server's. PostgreSQL raises an error if it is not valid.
    fn any_to_server = pg_any_to_server;
}

/// A catalog's name, in the server's encoding.
#[must_use]
pub fn raw_name(name: &pg_sys::NameData) -> &CStr {
    until_zero(&name.data)
}

/// The text in an array, which ends with a zero byte; empty if there is none.
pub(crate) fn until_zero(characters: &[c_char]) -> &CStr {
    // SAFETY: an array of so many bytes, whatever their sign.
    let bytes =
        unsafe { std::slice::from_raw_parts(characters.as_ptr().cast::<u8>(), characters.len()) };
    CStr::from_bytes_until_nul(bytes).unwrap_or_default()
}

/// A catalog's name, as UTF-8.
#[must_use]
pub fn name(name: &pg_sys::NameData) -> String {
    utf8(raw_name(name))
}

fn from_any_bytes(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    let stray = |byte: u8| char::from_u32(STRAY + u32::from(byte)).unwrap_or('?');
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            // A real character of that range is mapped byte by byte: it would stand for a byte.
            if stray_byte(character).is_some() {
                let mut utf8 = [0; 4];
                text.extend(character.encode_utf8(&mut utf8).bytes().map(stray));
            } else {
                text.push(character);
            }
        }
        text.extend(chunk.invalid().iter().copied().map(stray));
    }
    text
}

fn to_any_bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for character in text.chars() {
        match stray_byte(character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

/// The byte that a character stands for.
fn stray_byte(character: char) -> Option<u8> {
    u32::from(character)
        .checked_sub(STRAY)
        .and_then(|byte| u8::try_from(byte).ok())
        .filter(|byte| !byte.is_ascii())
}

/// Returns PostgreSQL's number for an encoding by its name.
#[must_use]
pub fn number_of(name: &str) -> Option<i32> {
    let mut padded = pg_sys::NameData::default();
    for (place, byte) in padded.data.iter_mut().take(63).zip(name.as_bytes()) {
        *place = byte.cast_signed();
    }
    // SAFETY: the SQL function, which all versions have, takes a NameData, and looks nothing up in
    // a catalog.
    let number = unsafe {
        pgrx::direct_function_call::<i32>(
            pg_sys::PG_char_to_encoding,
            &[Some(pg_sys::Datum::from(&raw mut padded))],
        )
    };
    number.filter(|number| *number >= 0)
}

/// Makes an encoding this process's `client_encoding`, which types' receive functions convert from.
/// Run in a transaction, where the conversion can be looked up. Returns false if there is none.
#[must_use]
pub fn set_client_encoding(encoding: i32) -> bool {
    plain::PrepareClientEncoding(encoding) >= 0 && plain::SetClientEncoding(encoding) >= 0
}

/// A name for PostgreSQL, in the server's encoding; `None` if it has a zero byte.
pub fn to_server(name: &str) -> Option<CString> {
    let utf8 = CString::new(name).ok()?;
    if name.is_ascii() || is_utf8() {
        return Some(utf8);
    }
    if is_sql_ascii() {
        return CString::new(to_any_bytes(name)).ok();
    }
    let converted = any_to_server(utf8.to_bytes(), UTF8).map(CStr::to_owned);
    Some(converted.unwrap_or(utf8))
}

/// Text for PostgreSQL, in the server's encoding, without a zero byte at the end. A character that
/// the encoding does not have becomes a question mark: for texts that people read.
pub(crate) fn text_to_server(text: &str) -> Vec<u8> {
    convert(text).0
}

/// The name of an object that may exist in this database; `None` if no object can have the name,
/// since the server's encoding lacks one of its characters or it has a zero byte.
pub fn name_here(name: &str) -> Option<CString> {
    let (name, whole) = convert(name);
    CString::new(name).ok().filter(|_| whole)
}

/// A text in the server's encoding, and whether that has all of its characters.
fn convert(text: &str) -> (Vec<u8>, bool) {
    if text.is_ascii() || is_utf8() {
        return (text.as_bytes().to_vec(), true);
    }
    if is_sql_ascii() {
        return (to_any_bytes(text), true);
    }
    let mut whole = true;
    let mut converted = Vec::with_capacity(text.len());
    let encoding = plain::GetDatabaseEncoding();
    let procedure = plain::FindDefaultConversionProc(UTF8, encoding);
    let mut room = [0_u8; 16];
    for character in text.chars() {
        let mut utf8 = [0_u8; 4];
        let bytes = character.encode_utf8(&mut utf8);
        let len = i32::try_from(bytes.len()).unwrap_or_default();
        if character.is_ascii() {
            converted.extend_from_slice(bytes.as_bytes());
            continue;
        }
        if procedure == pg_sys::InvalidOid {
            converted.push(b'?');
            whole = false;
            continue;
        }
        room.fill(0);
        // SAFETY: a character of that length; the room is that of the longest of any encoding, and
        // more, with its zero byte.
        let taken = unsafe {
            pg_sys::pg_do_encoding_conversion_buf(
                procedure,
                UTF8,
                encoding,
                bytes.as_mut_ptr(),
                len,
                room.as_mut_ptr(),
                16,
                true,
            )
        };
        let here = CStr::from_bytes_until_nul(&room).map_or(&[][..], CStr::to_bytes);
        if taken == len && !here.is_empty() {
            converted.extend_from_slice(here);
        } else {
            converted.push(b'?');
            whole = false;
        }
    }
    (converted, whole)
}

/// A statement for PostgreSQL. The text after a zero byte, which no valid statement has, is left
/// out.
pub fn statement(sql: &str) -> CString {
    to_server(sql.split('\0').next().unwrap_or_default()).unwrap_or_default()
}

/// A text in UTF-8 as an argument of a statement.
pub fn text_argument(text: &str) -> DatumWithOid<'static> {
    // SAFETY: a bytea is made like a text.
    unsafe { DatumWithOid::new(text_to_server(text), pg_sys::TEXTOID) }
}

/// Texts in UTF-8 as one argument of type text[].
pub fn texts_argument(texts: &[String]) -> DatumWithOid<'static> {
    let texts = texts.iter().map(|text| value::text(&text_to_server(text)));
    value::texts(texts).argument()
}

/// Arguments of a statement whose texts are UTF-8, as PostgreSQL takes them.
pub fn arguments<'a>(given: &[DatumWithOid<'a>]) -> Vec<DatumWithOid<'a>> {
    let convert = !is_utf8();
    let one = |argument: &DatumWithOid<'a>| {
        // SAFETY: the datum is of the type that goes with it; a text that was made for a statement
        // is not compressed or stored out of line.
        unsafe {
            match argument.datum() {
                Some(datum) if convert && argument.oid() == pg_sys::TEXTOID => {
                    let bytes =
                        pgrx::varlena::varlena_to_byte_slice(datum.sans_lifetime().cast_mut_ptr());
                    text_argument(&String::from_utf8_lossy(bytes))
                }
                datum => DatumWithOid::new_from_datum(datum, argument.oid()),
            }
        }
    };
    given.iter().map(one).collect()
}

/// Arguments of a statement as SPI takes them: an entry for each.
pub(crate) struct Unpacked {
    pub(crate) types: Vec<pg_sys::Oid>,
    pub(crate) values: Vec<pg_sys::Datum>,
    /// A space, or `n` for null.
    pub(crate) nulls: Vec<c_char>,
}

impl Unpacked {
    /// Unpacks arguments that [`arguments`] has converted. They outlive the result.
    pub(crate) fn new(arguments: &[DatumWithOid<'_>]) -> Self {
        let mut nulls: Vec<c_char> = Vec::with_capacity(arguments.len());
        let mut values = Vec::with_capacity(arguments.len());
        for argument in arguments {
            let datum = argument.datum();
            nulls.push(if datum.is_some() { b' ' } else { b'n' }.cast_signed());
            values.push(datum.map_or(pg_sys::Datum::null(), |datum| datum.sans_lifetime()));
        }
        Self {
            types: arguments.iter().map(DatumWithOid::oid).collect(),
            values,
            nulls,
        }
    }
}

/// Text of a value as UTF-8; `None` where a conversion can't be had.
pub fn text_from_server(text: &[u8]) -> Option<String> {
    if text.is_ascii() {
        return String::from_utf8(text.to_vec()).ok();
    }
    let converted = server_to_any(text, UTF8).map_or(text, CStr::to_bytes);
    std::str::from_utf8(converted).ok().map(str::to_owned)
}

/// Text of a value as UTF-8, without a copy if the bytes are UTF-8 already; `None` if they are not
/// valid. A converted copy is in the current memory context. PostgreSQL raises an error if there is
/// no conversion, or a character has none.
#[inline]
#[must_use]
pub fn checked_utf8(text: &[u8]) -> Option<&str> {
    if let Ok(text) = std::str::from_utf8(text)
        && (is_utf8() || text.is_ascii())
    {
        return Some(text);
    }
    if is_utf8() || is_sql_ascii() {
        // Without a conversion the bytes count.
        return std::str::from_utf8(text).ok();
    }
    let converted = server_to_any(text, UTF8).map_or(text, CStr::to_bytes);
    std::str::from_utf8(converted).ok()
}

/// An SQL function's argument or result of type text: UTF-8 in Rust, the server's encoding in SQL.
/// A text that can't be converted to UTF-8 raises 22021.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text(pub String);

impl Text {
    /// # Safety
    /// A value of type text that exists.
    unsafe fn of(datum: pg_sys::Datum) -> Self {
        // SAFETY: as the caller says; the copy, if there is one, goes with the call's memory.
        let bytes = unsafe {
            pgrx::varlena::varlena_to_byte_slice(pg_sys::pg_detoast_datum_packed(
                datum.cast_mut_ptr(),
            ))
        };
        let Some(text) = text_from_server(bytes) else {
            ereport!(
                ERROR,
                PgSqlErrorCode::ERRCODE_CHARACTER_NOT_IN_REPERTOIRE,
                "text is not valid UTF-8, and cannot be converted to it"
            );
        };
        Self(text)
    }
}

impl FromDatum for Text {
    unsafe fn from_polymorphic_datum(
        datum: pg_sys::Datum,
        is_null: bool,
        _: pg_sys::Oid,
    ) -> Option<Self> {
        // SAFETY: the caller has a value of type text, or none.
        (!is_null).then(|| unsafe { Self::of(datum) })
    }
}

// SAFETY: the result refers to no memory of the value.
unsafe impl UnboxDatum for Text {
    type As<'src> = Self;

    unsafe fn unbox<'src>(datum: Datum<'src>) -> Self
    where
        Self: 'src,
    {
        // SAFETY: the caller has a value of type text.
        unsafe { Self::of(datum.sans_lifetime()) }
    }
}

// SAFETY: an argument of type text is one value.
unsafe impl<'fcx> ArgAbi<'fcx> for Text {
    unsafe fn unbox_arg_unchecked(argument: Arg<'_, 'fcx>) -> Self {
        // SAFETY: the function is declared with an argument of type text at this place, and reads
        // the value only if there is one.
        unsafe { argument.unbox_arg_using_from_datum() }.unwrap_or(Self(String::new()))
    }
}

impl IntoDatum for Text {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        text_to_server(&self.0).into_datum()
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::TEXTOID
    }
}

// SAFETY: the value of a function's result of type text.
unsafe impl BoxRet for Text {
    unsafe fn box_into<'fcx>(self, call: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        match self.into_datum() {
            // SAFETY: in the memory that the call's result is expected in.
            Some(datum) => unsafe { call.return_raw_datum(datum) },
            None => call.return_null(),
        }
    }
}

// SAFETY: it is text in SQL.
unsafe impl SqlTranslatable for Text {
    const TYPE_IDENT: &'static str = <String as SqlTranslatable>::TYPE_IDENT;
    const TYPE_ORIGIN: TypeOrigin = <String as SqlTranslatable>::TYPE_ORIGIN;
    const ARGUMENT_SQL: Result<SqlMappingRef, ArgumentError> =
        <String as SqlTranslatable>::ARGUMENT_SQL;
    const RETURN_SQL: Result<ReturnsRef, ReturnsError> = <String as SqlTranslatable>::RETURN_SQL;
}

/// Checks that bytes are text in the server's encoding. PostgreSQL raises an error if not, or if
/// there is a zero byte.
#[inline]
pub fn check(bytes: &[u8]) {
    let length = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
    // SAFETY: there are so many bytes.
    unsafe {
        pg_sys::pg_verify_mbstr(
            pg_sys::GetDatabaseEncoding(),
            bytes.as_ptr().cast(),
            length,
            false,
        );
    }
}

/// Text of another encoding, as PostgreSQL numbers them, in the server's. A converted copy is in
/// the current memory context. PostgreSQL raises an error if the bytes are not valid.
#[must_use]
pub fn of_charset(bytes: &[u8], charset: i32) -> &[u8] {
    if u32::try_from(charset).map_or(true, |charset| {
        charset >= pg_sys::pg_enc::_PG_LAST_ENCODING_
    }) {
        PgError::new(SqlState::InternalError, "encoding of a stream is not known").raise();
    }
    any_to_server(bytes, charset).map_or(bytes, CStr::to_bytes)
}

/// Whether the server's encoding is UTF8.
pub fn is_utf8() -> bool {
    plain::GetDatabaseEncoding() == UTF8
}

fn is_sql_ascii() -> bool {
    plain::GetDatabaseEncoding() == SQL_ASCII
}

/// JSON in ASCII, which is the same in every server encoding. Other characters, which only strings
/// have, are escaped.
pub fn json_in_ascii(json: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(json.len());
    let mut units = [0; 2];
    for character in json.chars() {
        if character.is_ascii() {
            out.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut units) {
            // Writing to a String can't fail.
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
    out
}
