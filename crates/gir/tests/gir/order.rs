//! Order of records, and the place where a reader stands.

use braid_gir::{
    Abort, BeforeKind, Begin, Column, ColumnFlags, Commit, Error, Message, OrderError, Prepared,
    Reader, Record, ReplicaIdentity, RollbackPrepared, SchemaNumber, SegmentStart, StreamHeader,
    StreamOrder, StreamedCommit, Tag, Value, Writer,
};
use braid_testing::Random;

/// Records one by one, each as its bytes.
#[derive(Default)]
struct Stream {
    records: Vec<Vec<u8>>,
    lsn: u64,
    schemas: u32,
}

impl Stream {
    fn put(&mut self, write: impl FnOnce(&mut Writer) -> braid_gir::Result<()>) {
        let mut writer = Writer::new();
        write(&mut writer).unwrap();
        self.records.push(writer.frame().to_vec());
    }

    fn header(&mut self) {
        let header = StreamHeader {
            node_id: [0; 16],
            system_identifier: 1,
            server_version: 150_000,
            node_name: "tokyo",
            database: "shop",
            charset: "UTF8",
        };
        self.put(|writer| writer.stream_header(&header));
    }

    /// Adds a schema of a table whose number of columns is its own number plus one.
    fn schema(&mut self) {
        let number = SchemaNumber(self.schemas);
        self.schemas += 1;
        let column = Column {
            flags: ColumnFlags(0),
            type_oid: 23,
            type_modifier: -1,
            name: "a",
            type_namespace: "pg_catalog",
            type_name: "int4",
            mark: 0,
        };
        let columns = vec![column; usize::try_from(self.schemas).unwrap()];
        let identity = ReplicaIdentity::Default;
        self.put(|writer| writer.schema(number, 1, identity, ("s", "t"), (&columns, &[])));
    }

    fn begin_at(lsn: u64, xid: u32) -> Begin<'static> {
        Begin {
            commit_lsn: lsn,
            commit_timestamp: 0,
            xid,
            origin: "",
            origin_lsn: 0,
        }
    }

    fn prepared_at(lsn: u64, xid: u32) -> Prepared<'static> {
        Prepared {
            begin: Self::begin_at(lsn, xid),
            end_lsn: lsn + 8,
            gid: "g",
        }
    }

    fn commit_at(lsn: u64) -> Commit {
        Self::prepared_at(lsn, 0).commit()
    }

    fn message(&mut self, transactional: bool, prefix: &str) {
        let message = Message {
            transactional,
            lsn: self.lsn,
            prefix,
            content: b"",
        };
        self.put(|writer| writer.message(&message));
    }

    fn change(&mut self, number: u32, columns: u32) {
        let number = SchemaNumber(number);
        self.put(|writer| {
            let row = |image: &mut braid_gir::ImageWriter<'_>| {
                (0..columns).for_each(|_| image.put(&Value::Null));
                Ok::<_, Error>(())
            };
            writer.update(number, BeforeKind::Row, false, &[], row, row)
        });
    }

    /// Adds records that may stand in a transaction or segment.
    fn content(&mut self, random: &mut Random) {
        for _ in 0..random.below(5) {
            match random.below(5) {
                0 => self.schema(),
                1 if self.schemas > 0 => {
                    let numbers: Vec<_> = (0..self.schemas).map(SchemaNumber).collect();
                    self.put(|writer| writer.truncate(false, false, &numbers));
                }
                2 => self.message(random.one_in(2), "p"),
                _ if self.schemas > 0 => {
                    let number = u32::try_from(random.below(u64::from(self.schemas))).unwrap();
                    self.change(number, number + 1);
                }
                _ => {}
            }
        }
    }

    /// Returns a random stream that a server could send.
    fn random(random: &mut Random) -> Self {
        let mut stream = Self::default();
        if random.one_in(3) {
            stream.message(false, "braid.position");
        }
        stream.header();
        let mut running: Vec<u32> = Vec::new();
        let mut xid = 100;
        for _ in 0..random.below(30) {
            stream.lsn += 16;
            let lsn = stream.lsn;
            xid += 1;
            let chosen = running.get(random.index(running.len().max(1))).copied();
            match (random.below(12), chosen) {
                (0, _) => stream.schema(),
                (1, _) => stream.message(false, "p"),
                (2 | 3, _) => {
                    let first = random.one_in(2) || chosen.is_none();
                    let of = chosen.filter(|_| !first).unwrap_or(xid);
                    if first {
                        running.push(xid);
                    }
                    stream.put(|writer| writer.segment_start(SegmentStart { first, xid: of }));
                    stream.content(random);
                    stream.put(|writer| writer.subtransaction(of + 1));
                    stream.content(random);
                    stream.put(Writer::segment_stop);
                }
                (4, Some(of)) => {
                    stream.put(|writer| writer.abort(Abort { xid: of, subxid: 1 }));
                }
                (5, Some(of)) => {
                    running.retain(|other| *other != of);
                    stream.put(|writer| {
                        writer.abort(Abort {
                            xid: of,
                            subxid: of,
                        })
                    });
                }
                (6, Some(of)) => {
                    running.retain(|other| *other != of);
                    stream.put(|writer| {
                        writer.streamed_commit(&StreamedCommit {
                            begin: Self::begin_at(lsn, of),
                            end_lsn: lsn + 8,
                        })
                    });
                }
                (7, Some(of)) => {
                    running.retain(|other| *other != of);
                    stream.put(|writer| writer.streamed_prepare(&Self::prepared_at(lsn, of)));
                }
                (8, _) => stream.put(|writer| writer.commit_prepared(&Self::prepared_at(lsn, xid))),
                (9, _) => stream.put(|writer| {
                    writer.rollback_prepared(&RollbackPrepared {
                        prepared: Self::prepared_at(lsn, xid),
                        prepare_end_lsn: 8,
                        prepare_timestamp: 0,
                    })
                }),
                (10, _) => {
                    stream.put(|writer| writer.begin_prepared(&Self::prepared_at(lsn, xid)));
                    stream.content(random);
                    stream.put(|writer| writer.prepare(&Self::commit_at(lsn)));
                }
                _ => {
                    stream.put(|writer| writer.begin(&Self::begin_at(lsn, xid)));
                    stream.content(random);
                    stream.put(|writer| writer.commit(&Self::commit_at(lsn)));
                }
            }
        }
        stream
    }
}

/// Returns the first misplaced record, and whether anything is open at the end.
fn check(records: &[Vec<u8>]) -> (Option<(usize, OrderError)>, bool) {
    let mut order = StreamOrder::new();
    for (index, bytes) in records.iter().enumerate() {
        let record = Reader::new(bytes).next_record().unwrap().unwrap();
        assert_eq!(record.tag() as u8, bytes[0]);
        if let Err(error) = order.see(&record) {
            assert!(!error.to_string().is_empty());
            return (Some((index, error)), order.is_open());
        }
    }
    (None, order.is_open())
}

const CASES: usize = 400;

#[test]
fn what_a_server_sends_is_accepted() {
    let mut random = Random::new("order: accepted");
    for _ in 0..CASES {
        let stream = Stream::random(&mut random);
        assert_eq!(check(&stream.records), (None, false));
        let end = random.index(stream.records.len() + 1);
        assert_eq!(check(&stream.records[..end]).0, None);
    }
}

#[test]
fn what_comes_twice_is_refused() {
    let mut random = Random::new("order: twice");
    for _ in 0..CASES {
        let mut stream = Stream::random(&mut random);
        let at = random.index(stream.records.len());
        let copy = stream.records[at].clone();
        // A repetition of these records, or of a partial rollback, cannot be distinguished from a
        // further record of its kind.
        let is_told = match copy[0] {
            b'U' | b'T' | b'M' | b'X' => false,
            b'A' => copy[5..9] == copy[9..13],
            _ => true,
        };
        stream.records.insert(at, copy);
        let found = check(&stream.records).0;
        assert_eq!(found.map(|(index, _)| index), is_told.then_some(at + 1));
    }
}

#[test]
fn what_is_missing_is_noticed() {
    let mut random = Random::new("order: missing");
    for _ in 0..CASES {
        let mut stream = Stream::random(&mut random);
        let last = stream.records.len() - 1;
        let at = random.index(stream.records.len());
        let gone = stream.records.remove(at);
        let (found, open) = check(&stream.records);
        let noticed = found.is_some() || open;
        match gone[0] {
            b'B' | b'P' | b'G' | b'C' | b'Q' | b'E' => assert!(noticed),
            b'H' => assert!(noticed || at == last),
            b'U' | b'T' | b'M' | b'X' | b'K' | b'R' => assert!(!noticed),
            // Other records matter only if they are referred to.
            _ => {}
        }
    }
}

#[test]
fn transactions_that_change_places_are_refused() {
    let mut random = Random::new("order: places");
    for _ in 0..CASES {
        let (mut stream, first, second) = (Stream::default(), 16, 32);
        let one = |stream: &mut Stream, lsn, random: &mut Random| match random.below(3) {
            0 => stream.put(|writer| writer.commit_prepared(&Stream::prepared_at(lsn, 1))),
            1 => {
                stream.put(|writer| writer.begin_prepared(&Stream::prepared_at(lsn, 1)));
                stream.content(random);
                stream.put(|writer| writer.prepare(&Stream::commit_at(lsn)));
            }
            _ => {
                stream.put(|writer| writer.begin(&Stream::begin_at(lsn, 1)));
                stream.content(random);
                stream.put(|writer| writer.commit(&Stream::commit_at(lsn)));
            }
        };
        stream.header();
        one(&mut stream, first, &mut random);
        let split = stream.records.len();
        one(&mut stream, second, &mut random);
        assert_eq!(check(&stream.records), (None, false));
        stream.records[1..].rotate_left(split - 1);
        assert!(check(&stream.records).0.is_some());
    }
}

/// A function that fills a stream, and the error of its last record.
type Case<'c> = (&'c dyn Fn(&mut Stream), &'c str);

fn refused(cases: &[Case<'_>]) {
    for (fill, expected) in cases {
        let mut stream = Stream::default();
        stream.header();
        fill(&mut stream);
        let (index, error) = check(&stream.records).0.unwrap();
        assert_eq!(error.to_string(), *expected);
        assert_eq!(index, stream.records.len() - 1, "{error}");
    }
}

fn begin(stream: &mut Stream, lsn: u64) {
    stream.put(|writer| writer.begin(&Stream::begin_at(lsn, 7)));
}

fn commit(stream: &mut Stream, lsn: u64) {
    stream.put(|writer| writer.commit(&Stream::commit_at(lsn)));
}

fn segment(stream: &mut Stream, first: bool) {
    stream.put(|writer| writer.segment_start(SegmentStart { first, xid: 7 }));
}

#[test]
fn errors_say_what_was_expected() {
    refused(&[
        (
            &|s| s.header(),
            "Stream header where something outside of a transaction was expected",
        ),
        (
            &|s| commit(s, 16),
            "Commit where something outside of a transaction was expected",
        ),
        (
            &|s| s.change(0, 1),
            "Update where something outside of a transaction was expected",
        ),
        (
            &|s| s.message(true, "p"),
            "Message where a message that is not transactional was expected",
        ),
        (
            &|s| {
                begin(s, 16);
                begin(s, 32);
            },
            "Begin where a change or the Commit of the open transaction was expected",
        ),
        (
            &|s| {
                begin(s, 16);
                s.put(|w| w.prepare(&Stream::commit_at(16)));
            },
            "Prepare where a change or the Commit of the open transaction was expected",
        ),
        (
            &|s| {
                s.put(|w| w.begin_prepared(&Stream::prepared_at(16, 7)));
                commit(s, 16);
            },
            "Commit where a change or the Prepare of the open transaction was expected",
        ),
        (
            &|s| {
                begin(s, 16);
                commit(s, 0x1_0000_0020);
            },
            "end of the transaction at 1/20 where that of the transaction at 0/10 was expected",
        ),
        (
            &|s| {
                begin(s, 16);
                commit(s, 16);
                begin(s, 16);
            },
            "transaction at 0/10 after one that ends at 0/18",
        ),
        (
            &|s| {
                begin(s, 16);
                s.change(3, 1);
            },
            "schema 3 was not announced",
        ),
        (
            &|s| {
                s.schema();
                begin(s, 16);
                s.change(0, 2);
            },
            "image has 2 columns, its schema 1",
        ),
        (
            &|s| {
                s.schemas = 1;
                s.schema();
            },
            "schema 1 where schema 0 was expected",
        ),
    ]);
    let mut order = StreamOrder::new();
    let refused = order.see(&Record::SegmentStop);
    let expected = "the stream header";
    let found = Tag::SegmentStop;
    assert_eq!(refused, Err(OrderError::Unexpected { found, expected }));
}

#[test]
fn errors_of_segments_say_what_was_expected() {
    refused(&[
        (
            &|s| s.put(Writer::segment_stop),
            "Segment end where something outside of a transaction was expected",
        ),
        (
            &|s| {
                segment(s, true);
                begin(s, 16);
            },
            "Begin where a change or the end of the open segment was expected",
        ),
        (
            &|s| segment(s, false),
            "transaction 7, of which no segment came",
        ),
        (
            &|s| {
                segment(s, true);
                s.put(Writer::segment_stop);
                segment(s, true);
            },
            "first segment of transaction 7, of which segments came before",
        ),
        (
            &|s| s.put(|w| w.abort(Abort { xid: 8, subxid: 9 })),
            "transaction 8, of which no segment came",
        ),
    ]);
}

#[test]
fn a_reader_says_where_it_stands() {
    let mut random = Random::new("order: position");
    for _ in 0..CASES {
        let stream = Stream::random(&mut random);
        let frame = stream.records.concat();
        let mut reader = Reader::new(&frame);
        assert_eq!(reader.position().to_string(), "record 0 (none, at byte 0)");
        let mut offset = 0;
        for (index, bytes) in stream.records.iter().enumerate() {
            reader.next_record().unwrap().unwrap();
            let position = reader.position();
            assert_eq!((position.record, position.offset), (index + 1, offset));
            assert_eq!(position.tag, Some(bytes[0]));
            offset += bytes.len();
        }
        let last = reader.position();
        assert_eq!(reader.next_record(), Ok(None));
        assert_eq!(reader.position(), last);
        // Cut within the last record.
        let mut reader = Reader::new(&frame[..frame.len() - 1]);
        let error = loop {
            match reader.next_record() {
                Ok(record) => assert!(record.is_some()),
                Err(error) => break error,
            }
        };
        let text = reader.position().error(error.clone()).to_string();
        assert_eq!(text, format!("{last}: {error}"));
    }
}

#[test]
fn the_record_of_an_error_is_named() {
    let mut stream = Stream::default();
    stream.header();
    stream.schema();
    let mut frame = stream.records.concat();
    let offset = frame.len();
    frame.extend_from_slice(b"U\x02\0\0\0\0\0rest");
    let mut reader = Reader::new(&frame);
    let error = loop {
        if let Err(error) = reader.next_record() {
            break reader.position().error(error);
        }
    };
    assert_eq!(
        error.to_string(),
        format!("record 3 (Update, at byte {offset}): record ends inside schema number")
    );
    let mut reader = Reader::new(b"z");
    let error = reader.next_record().unwrap_err();
    assert_eq!(
        reader.position().error(error).to_string(),
        "record 1 (tag 0x7a, at byte 0): unknown record tag 0x7a"
    );
}
