//! gir-json as a reader takes it from elsewhere, one text a line: no input panics or hangs, memory
//! stays within a multiple of the input, and what is accepted is written as JSON that is read as
//! the same records.

use braid_gir::{JsonError, JsonOptions, JsonReader, JsonWriter, Reader, Writer};

/// Bytes of records for a byte of text, at most: an image of few columns stands for one of 1,664.
const GROWTH: usize = 64;

fn read<'t>(texts: impl Iterator<Item = &'t [u8]>) -> Result<Writer, JsonError> {
    let (mut reader, mut out) = (JsonReader::new(), Writer::new());
    for text in texts {
        reader.read(text, &mut out).inspect_err(|error| {
            assert!(error.offset <= text.len());
            assert!(!error.to_string().is_empty());
        })?;
    }
    reader.finish(&mut out)?;
    Ok(out)
}

/// Reads one input, a text a line.
///
/// # Panics
/// Where what the head of this file says does not hold.
pub fn check(input: &[u8]) {
    let Ok(records) = read(input.split(|byte| *byte == b'\n')) else {
        return;
    };
    assert!(records.len() <= GROWTH * input.len() + 100);
    let keys = JsonOptions {
        keys: true,
        ..JsonOptions::default()
    };
    let mut writer = JsonWriter::new(keys);
    let mut lines = Vec::new();
    let mut reader = Reader::new(records.frame());
    while let Some(record) = reader.next_record().expect("written records are valid") {
        let mut line = String::new();
        writer
            .record(&record, &mut line)
            .expect("schemas were announced");
        lines.push(line);
    }
    let again = read(lines.iter().map(String::as_bytes)).expect("what was written can be read");
    assert_eq!(again.frame(), records.frame());
}
