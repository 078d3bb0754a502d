//! The memory that readers allocate is bounded by the length of their input, whatever the input
//! claims: lengths and counts come from the peer.
//!
//! A test program of its own, as its allocator counts. Inputs are the seeds of the fuzz targets,
//! mutated seeds, and malicious lengths. `BRAID_TEST_SEED=n` repeats a run; each prints its seed.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "test code"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use braid_gir::{
    Column, ColumnFlags, Decimal, Detail, Image, JsonOptions, JsonReader, JsonWriter, Reader,
    Record, ReplicaIdentity, SchemaKeyColumn, SchemaNumber, Schemas, Value, Writer, render,
    render_to,
};
use braid_testing::Random;

/// Counts the bytes of every allocation of this thread.
struct Counting;

thread_local! {
    /// Bytes that are allocated now, and their maximum since the count began.
    static HELD: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

fn count(freed: usize, taken: usize) {
    // A thread that ends frees memory when its thread-local variables are gone.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        let now = now.saturating_sub(freed) + taken;
        held.set((now, most.max(now)));
    });
}

// SAFETY: every call goes to the system's allocator as it came; counting neither allocates nor
// unwinds.
#[expect(unsafe_code, reason = "an allocator can be had in no other way")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on, and `alloc` has asked `System`, too.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks may exist at the same time.
        count(0, size);
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on, and `alloc` has asked `System`, too.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the result of `work`, and how many bytes it held at most.
fn held_by<T>(work: impl FnOnce() -> T) -> (T, usize) {
    HELD.set((0, 0));
    let done = work();
    (done, HELD.get().1)
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
    let files = std::fs::read_dir(directory.join(target)).unwrap();
    let mut paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    // The order of a directory's entries is not the same everywhere.
    paths.sort();
    paths
        .into_iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect()
}

/// Checks the seeds, and mutations of them: for two seconds, and at least a hundred.
fn changed(target: &str, mut check: impl FnMut(&[u8])) {
    let seeds = seeds(target);
    assert!(seeds.len() > 2);
    for seed in &seeds {
        check(seed);
    }
    let mut random = Random::new(target);
    let start = Instant::now();
    let mut rounds = 0;
    while rounds <= 100 || (rounds < 200_000 && start.elapsed() < Duration::from_secs(2)) {
        let mut input = seeds[random.index(seeds.len())].clone();
        for _ in 0..=random.below(4) {
            change(&mut input, &seeds, &mut random);
        }
        check(&input);
        rounds += 1;
    }
    println!("{target}: {rounds} inputs");
    assert!(rounds > 100);
}

fn change(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = random.index(input.len().max(1));
    let byte = u8::try_from(random.below(256)).unwrap();
    match random.below(7) {
        // The largest possible length.
        0 => input
            .iter_mut()
            .skip(at)
            .take(4)
            .for_each(|byte| *byte = 0xff),
        1 if !input.is_empty() => input[at] = byte,
        2 if !input.is_empty() => input[at] ^= 1 << random.below(8),
        3 => input.insert(at, byte),
        4 => input.truncate(at),
        5 => input.extend_from_within(at..),
        _ => {
            let other = &seeds[random.index(seeds.len())];
            let from = random.index(other.len().max(1));
            let to = (from + random.index(400)).min(other.len());
            input.splice(at..at, other[from..to].iter().copied());
        }
    }
}

fn walk_image(image: &Image<'_>) -> usize {
    image
        .values()
        .filter(|value| !matches!(value, Ok(Value::None)))
        .count()
}

/// Reads everything of every record, like appliers.
fn walk(frame: &[u8]) -> usize {
    let mut reader = Reader::new(frame);
    let mut seen = 0;
    while let Ok(Some(record)) = reader.next_record() {
        seen += 1 + match record {
            Record::Schema(schema) => {
                let keys = schema.keys().map(|key| key.columns().count());
                schema.columns().count() + keys.sum::<usize>()
            }
            Record::Change(change) => {
                let images = [change.before.as_ref(), change.after.as_ref()];
                change.header.writeset.hashes().count()
                    + images.into_iter().flatten().map(walk_image).sum::<usize>()
            }
            Record::Truncate(truncate) => truncate.schemas().count(),
            _ => 0,
        };
    }
    seen
}

fn check_frame(frame: &[u8]) {
    let (_, held) = held_by(|| walk(frame));
    assert_eq!(held, 0, "records are read in place: {frame:?}");
    let (_, held) = held_by(|| {
        let mut schemas = Schemas::new();
        let mut reader = Reader::new(frame);
        while let Ok(Some(record)) = reader.next_record() {
            if let Record::Schema(schema) = record {
                schemas.remember(&schema);
            }
        }
    });
    // A column of a schema has at least 12 bytes in the record. With quotes its name and type may
    // be longer.
    assert!(
        held <= 16 * frame.len() + 4096,
        "{held} bytes for {} of a frame",
        frame.len()
    );
}

#[test]
fn records_are_read_without_allocation() {
    changed("frame", check_frame);
}

#[test]
fn a_record_with_any_length_is_read_without_allocation() {
    let claims = [u32::MAX, u32::MAX / 2, 0x7fff_fffe, 1 << 30, 65_536, 1];
    for tag in b"HSBCIUDTMGEXAFPQJKR" {
        for claim in claims {
            for filler in [0x00, 0x01, 0x09, 0x7f, 0x80, 0xff] {
                for len in [0, 1, 7, 64, 4096] {
                    // Lengths within the body are as large as its filler makes them.
                    let head = [&[*tag][..], &claim.to_le_bytes()].concat();
                    check_frame(&[&head[..], &vec![filler; len]].concat());
                    let whole = u32::try_from(len).unwrap().to_le_bytes();
                    check_frame(&[&[*tag][..], &whole, &vec![filler; len]].concat());
                }
            }
        }
    }
    // An insert of 65,535 columns without values, and one whose string has every length.
    let insert = |body: &[u8]| {
        let len = u32::try_from(body.len()).unwrap().to_le_bytes();
        check_frame(&[&b"I"[..], &len, body].concat());
    };
    insert(&[0, 0, 0, 0, 0, 0, 0xff, 0xff]);
    for shift in 0..64 {
        let mut body = vec![0, 0, 0, 0, 0, 0, 1, 0, 9];
        let mut rest = 1_u64 << shift;
        while rest >= 0x80 {
            body.push(u8::try_from(rest & 0x7f).unwrap() | 0x80);
            rest >>= 7;
        }
        body.push(u8::try_from(rest).unwrap());
        body.extend_from_slice(b"short");
        insert(&body);
    }
}

/// Reads lines of gir-json with a bound on the bytes for each, and on what is allocated once: the
/// columns of the two current images.
fn check_json_within(most: usize, texts: &[u8]) {
    let (_, held) = held_by(|| {
        let (mut reader, mut out) = (JsonReader::new(), Writer::new());
        for text in texts.split(|byte| *byte == b'\n') {
            if reader.read(text, &mut out).is_err() {
                break;
            }
        }
        let _ = reader.finish(&mut out);
    });
    assert!(
        held <= most * texts.len() + 150_000,
        "{held} bytes for {} of text: {}",
        texts.len(),
        String::from_utf8_lossy(&texts[..texts.len().min(2000)])
    );
}

fn check_json(texts: &[u8]) {
    check_json_within(8, texts);
}

#[test]
fn gir_json_is_read_within_a_multiple_of_its_length() {
    changed("json", check_json);
}

#[test]
fn gir_json_that_means_ill_is_read_within_a_multiple_of_its_length() {
    let value = |value: &str| {
        check_json(
            format!(
                r#"{{"operation":"insert","transaction":{{"lsn":"0/1","commit_time":"2024-02-29T12:30:00Z"}},"schema":{{"namespace":"s","table":"t","columns":[{{"name":"a","type":"x"}}]}},"after":{{"a":{value}}}}}"#
            )
            .as_bytes(),
        );
    };
    for kind in [
        "decimal",
        "big_integer",
        "integer",
        "double",
        "single",
        "datetime",
        "timestamp",
    ] {
        for text in [
            "1e1000000000",
            "1e-1000000000",
            "9999999999999999999999",
            "1E131071",
            "294276-12-31T23:59:59Z",
        ] {
            value(&format!(r#"{{"{kind}":"{text}"}}"#));
            value(&format!(r#"{{"{kind}":{text}}}"#));
            value(text);
        }
        for len in [100, 5_000, 150_000] {
            let digits = "9".repeat(len);
            value(&format!(r#"{{"{kind}":"{digits}"}}"#));
            value(&format!(r#"{{"{kind}":"0.{digits}"}}"#));
            value(&format!(r#"{{"{kind}":{digits}.{digits}}}"#));
        }
    }
    for kind in [
        "binary",
        "string_bytes",
        "text_bytes",
        "decimal_bytes",
        "big_integer_bytes",
    ] {
        for bytes in [
            "ff".repeat(8),
            "ffff000000000000".to_owned(),
            "00".repeat(50_000),
        ] {
            value(&format!(r#"{{"{kind}":"{bytes}"}}"#));
        }
    }
    for nested in ["[", r#"{"a":"#, r#"{"fetched":"#] {
        check_json(nested.repeat(50_000).as_bytes());
        value(&nested.repeat(50_000));
    }
    for escape in ["\\u0041", "\\n", "\\ud83d\\ude00", "é"] {
        value(&format!(r#""{}""#, escape.repeat(30_000)));
        check_json(format!(r#"{{"operation":"{}"}}"#, escape.repeat(30_000)).as_bytes());
        check_json(format!(r#"{{"{}":1,"operation":"commit"}}"#, escape.repeat(30_000)).as_bytes());
    }
}

#[test]
fn a_wide_schema_does_not_make_short_changes_dear() {
    let columns: Vec<_> = (0..1_664)
        .map(|i| format!(r#"{{"name":"c{i}","type":"x"}}"#))
        .collect();
    let schema = format!(
        r#"{{"operation":"schema","schema":{{"number":0,"namespace":"s","table":"t","columns":[{}]}}}}"#,
        columns.join(",")
    );
    let begin =
        r#"{"operation":"begin","transaction":{"lsn":"0/1","commit_time":"2024-02-29T12:30:00Z"}}"#;
    let change = r#"{"operation":"update","schema":{"number":0,"namespace":"s","table":"t"},"before":{},"after":{}}"#;
    // An omitted column of 1,664 takes a byte in each record; buffers grow by doubling.
    for changes in [1, 100, 1_000] {
        let text = format!("{schema}\n{begin}\n{}", vec![change; changes].join("\n"));
        check_json_within(160, text.as_bytes());
    }
    // One column more is refused, for any number of them.
    let columns = vec![r#"{"name":"c","type":"x"}"#; 20_000].join(",");
    check_json(format!(r#"{{"operation":"schema","schema":{{"namespace":"s","table":"t","columns":[{columns}]}}}}"#).as_bytes());
    // Many schemas.
    let schemas: Vec<_> = (0..3_000)
        .map(|i| format!(r#"{{"operation":"schema","schema":{{"namespace":"s","table":"t{i}","columns":[{{"name":"c","type":"x"}}]}}}}"#))
        .collect();
    check_json(schemas.join("\n").as_bytes());
}

/// Writes a schema of `columns` columns with this name. Each key has as many columns as `keys`
/// says, all of them the first one.
fn put_schema(writer: &mut Writer, name: &str, columns: usize, keys: &[usize]) {
    let column = Column {
        flags: ColumnFlags(0),
        type_oid: 1700,
        type_modifier: -1,
        name,
        type_namespace: "pg_catalog",
        type_name: "numeric",
        mark: 0,
    };
    // JSON refuses columns of the same name.
    let names: Vec<_> = (0..columns).map(|i| format!("{name}{i}")).collect();
    let columns: Vec<_> = names.iter().map(|name| Column { name, ..column }).collect();
    let first = SchemaKeyColumn {
        column: 0,
        comparison: "",
    };
    let keys: Vec<_> = keys.iter().map(|count| vec![first; *count]).collect();
    let keys: Vec<_> = keys.iter().map(|key| (false, key.as_slice())).collect();
    let identity = ReplicaIdentity::Full;
    writer
        .schema(SchemaNumber(0), 1, identity, ("s", name), (&columns, &keys))
        .unwrap();
}

/// Counts text without keeping it.
#[derive(Default)]
struct Length(usize);

impl std::fmt::Write for Length {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 += text.len();
        Ok(())
    }
}

/// Returns a row of as many such decimals as fit into a frame of a walsender.
fn decimals(weight: i16, scale: u16, digits: &[u16]) -> Writer {
    let count = u16::try_from(digits.len()).unwrap();
    let head = [count, weight.cast_unsigned(), 0x4000, scale];
    let bytes: Vec<u8> = head
        .iter()
        .chain(digits)
        .flat_map(|field| field.to_be_bytes())
        .collect();
    let value = Value::Decimal(Decimal::new(&bytes).unwrap());
    let values = 256 * 1024 / bytes.len();
    let mut writer = Writer::new();
    put_schema(&mut writer, "n", values, &[]);
    writer
        .insert::<braid_gir::Error>(SchemaNumber(0), false, &[], |image| {
            (0..values).for_each(|_| image.put(&value));
            Ok(())
        })
        .unwrap();
    writer
}

#[test]
fn text_and_json_of_decimals_are_made_within_a_multiple_of_their_length() {
    let long = vec![1_234; 5_000];
    let shapes: [(i16, u16, &[u16]); 7] = [
        (i16::MAX, 0, &[1]),
        (i16::MAX, Decimal::MAX_SCALE, &[9_999]),
        (i16::MIN, Decimal::MAX_SCALE, &[1]),
        (0, Decimal::MAX_SCALE, &[]),
        (254, 0, &[1]),
        (i16::MAX, Decimal::MAX_SCALE, &long),
        (4_999, 0, &long),
    ];
    for (weight, scale, digits) in shapes {
        let frame = decimals(weight, scale, digits);
        let (_, held) = held_by(|| {
            let mut schemas = Schemas::new();
            let mut json = JsonWriter::new(JsonOptions::default());
            let mut reader = Reader::new(frame.frame());
            while let Some(record) = reader.next_record().unwrap() {
                if let Record::Schema(schema) = &record {
                    schemas.remember(schema);
                }
                assert!(!render(&record, &schemas, Detail::Full).is_empty());
                let mut line = String::new();
                json.record(&record, &mut line).unwrap();
            }
        });
        // 1,024 digits for 8 bytes, and buffers grow by doubling.
        assert!(
            held <= 300 * frame.len(),
            "{held} bytes for {} of a frame, weight {weight}, scale {scale}",
            frame.len()
        );
    }
}

#[test]
fn text_is_written_within_a_multiple_of_the_frame() {
    let long = "x".repeat(100_000);
    let mut keys = Writer::new();
    put_schema(&mut keys, &long, 1, &[200; 3]);
    let mut truncate = Writer::new();
    put_schema(&mut truncate, &long, 1, &[]);
    truncate
        .truncate(false, false, &[SchemaNumber(0); 600])
        .unwrap();
    let row = decimals(i16::MAX, Decimal::MAX_SCALE, &[1]);
    for frame in [keys, truncate, row] {
        let (written, held) = held_by(|| {
            let mut schemas = Schemas::new();
            let mut reader = Reader::new(frame.frame());
            let mut out = Length::default();
            while let Some(record) = reader.next_record().unwrap() {
                if let Record::Schema(schema) = &record {
                    schemas.remember(schema);
                }
                render_to(&record, &schemas, Detail::Full, &mut out).unwrap();
            }
            out.0
        });
        assert!(
            held <= 24 * frame.len() + 4096,
            "{held} bytes for {} of a frame, {written} of text",
            frame.len()
        );
    }
}
