//! Frames as a receiver reads them: no input panics or hangs, and what is accepted is written again
//! byte for byte.

use braid_gir::{Detail, JsonWriter, Reader, Record, Result, Schemas, Writer, render};

/// Text is up to 150,000 times as long as a value, so it is made of the first few records only.
const RENDERED: usize = 2;

fn read(frame: &[u8]) -> Result<()> {
    let mut reader = Reader::new(frame);
    let mut schemas = Schemas::new();
    let mut copy = Writer::new();
    let mut json = JsonWriter::default();
    let mut count = 0;
    while let Some((tag, body)) = reader.next_raw()? {
        let _ = Record::read_change_header(body);
        let record = Record::read(tag, body)?;
        copy.clear(usize::MAX);
        copy.copy(&record).expect("what was read can be written");
        assert_eq!(copy.frame().first(), Some(&(tag as u8)));
        assert_eq!(copy.frame().get(5..), Some(body));
        if let Record::Schema(schema) = &record {
            schemas.remember(schema);
        }
        if count < RENDERED {
            let mut object = String::new();
            if json.record(&record, &mut object).is_ok() {
                assert!(!object.contains(|c: char| c < ' '));
            }
        }
        if count < RENDERED {
            let line = render(&record, &schemas, Detail::Full);
            assert!(!line.contains(char::is_control));
        }
        count += 1;
    }
    Ok(())
}

/// Reads one frame.
///
/// # Panics
/// Where what the head of this file says does not hold.
pub fn check(frame: &[u8]) {
    if let Err(error) = read(frame) {
        assert!(!error.to_string().is_empty());
    }
}
