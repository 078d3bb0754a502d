//! Records in temporary files.

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::spool::{Frame, Frames, Spool};

use crate::{Outcome, Test, same, test};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        test("spool: what is written is read", there_and_back),
        test("spool: what was rolled back is not read", rolled_back),
        test("spool: more than fits into memory", large),
        test("spool: another process reads while more is written", shared),
        test("spool: an empty one", empty),
        test("spool: a file that is not there", missing),
    ]
}

fn read(spool: &mut Spool) -> Result<Vec<Vec<u8>>, String> {
    spool.rewind().map_err(|error| error.message)?;
    let mut all = Vec::new();
    let mut records = Vec::new();
    while spool.read(&mut records).map_err(|error| error.message)? {
        all.push(std::mem::take(&mut records));
    }
    Ok(all)
}

fn write(spool: &mut Spool, records: &[u8]) -> Outcome {
    spool.write(records).map_err(|error| error.message)
}

fn there_and_back() -> Outcome {
    let mut spool = Spool::create();
    for records in [&b"one"[..], b"two", &[0; 5]] {
        write(&mut spool, records)?;
    }
    same(&read(&mut spool)?.concat(), &b"onetwo\0\0\0\0\0".to_vec())
}

fn rolled_back() -> Outcome {
    let mut spool = Spool::create();
    write(&mut spool, b"kept ")?;
    spool.subtransaction(10, 1);
    write(&mut spool, b"gone ")?;
    spool.subtransaction(11, 2);
    write(&mut spool, b"gone too ")?;
    same(&spool.roll_back(10), &Some(1))?;
    write(&mut spool, b"later")?;
    same(&spool.roll_back(99), &None)?;
    same(&read(&mut spool)?.concat(), &b"kept later".to_vec())
}

fn large() -> Outcome {
    let mut spool = Spool::create();
    let mut wanted = Vec::new();
    for number in 0..3000_u32 {
        let records = vec![u8::try_from(number % 251).unwrap(); 1000];
        write(&mut spool, &records)?;
        wanted.extend(records);
    }
    let got = read(&mut spool)?.concat();
    crate::check(
        got == wanted,
        format!("{} bytes of {}", got.len(), wanted.len()),
    )
}

fn shared() -> Outcome {
    let mut spool = Spool::create();
    let path = spool.path();
    let mut frames = Frames::open(&path).map_err(|error| error.message)?;
    let mut seen = Vec::new();
    for round in 0..3_u32 {
        spool.subtransaction(round, 0);
        write(&mut spool, format!("round {round}").as_bytes())?;
        let end = spool.hand_over().map_err(|error| error.message)?;
        while let Some(frame) = frames.next(end).map_err(|error| error.message)? {
            seen.push(match frame {
                Frame::Records(records) => String::from_utf8_lossy(records).into_owned(),
                Frame::Begins(xid) => format!("begins {xid}"),
                Frame::RolledBack(xid) => format!("rolled back {xid}"),
            });
        }
    }
    let wanted = [
        "begins 0", "round 0", "begins 1", "round 1", "begins 2", "round 2",
    ];
    same(&seen, &wanted.map(str::to_owned).to_vec())
}

fn empty() -> Outcome {
    same(&read(&mut Spool::create())?, &Vec::new())
}

fn missing() -> Outcome {
    let opened = Frames::open("base/pgsql_tmp/no such file").map(|_| ());
    same(
        &opened.map_err(|error| error.sqlstate),
        &Err(SqlState::UndefinedFile),
    )
}
