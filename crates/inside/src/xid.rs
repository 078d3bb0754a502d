//! Transaction ids and their times. `scripts/test inside` starts its server with epoch 3.

use braid_postgres::plain;
use braid_postgres::timestamp::{EPOCH_DIFFERENCE, monotonic_nanoseconds, now};
use braid_postgres::xid::{full, still_known};
use pgrx::pg_sys;

use crate::db::{other, sql, value};
use crate::{Outcome, Test, check, same, test};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        test("xid: the full id of the transaction in hand", own),
        test(
            "xid: an id above the next one is of the epoch before",
            before,
        ),
        test(
            "xid: ids that stand for no transaction are not known",
            special,
        ),
        test("xid: the time of a commit", time),
        test(
            "xid: a transaction that was rolled back has no time",
            aborted,
        ),
        test("timestamp: PostgreSQL's epoch", epoch),
        test("timestamp: the clock is PostgreSQL's", clock),
        test("timestamp: the monotonic clock grows", monotonic),
    ]
}

fn own() -> Outcome {
    sql("create table x ()");
    let xid = plain::GetTopTransactionId();
    let wanted = value("select pg_current_xact_id()::text");
    same(&Some(full(xid).to_string()), &wanted)?;
    check(full(xid) >> 32 == 3, "the epoch is not 3")
}

fn before() -> Outcome {
    same(
        &full(pg_sys::TransactionId::from(u32::MAX)),
        &(2 << 32 | 0xFFFF_FFFF),
    )?;
    let next = plain::ReadNextFullTransactionId().value;
    let next = u32::try_from(next & 0xFFFF_FFFF).unwrap();
    let (just, above) = (full((next - 1).into()), full((next + 1).into()));
    same(&(just >> 32, above >> 32), &(3, 2))
}

fn special() -> Outcome {
    for xid in [0_u32, 1, 2] {
        same(&still_known(xid.into()), &None)?;
    }
    Ok(())
}

fn time() -> Outcome {
    let row = other(
        "create table public.time_of as select 1; \
         drop table public.time_of; \
         select xid || ' ' || (extract(epoch from \"timestamp\") * 1000000)::bigint \
         from pg_last_committed_xact()",
    );
    let (xid, micros) = row[0].split_once(' ').unwrap();
    let (xid, micros): (u32, i64) = (xid.parse().unwrap(), micros.parse().unwrap());
    same(
        &still_known(xid.into()),
        &Some((micros - EPOCH_DIFFERENCE, 0)),
    )
}

fn aborted() -> Outcome {
    other("begin");
    let xid: u32 = other("select pg_current_xact_id()::xid")[0]
        .parse()
        .unwrap();
    other("rollback");
    same(&still_known(xid.into()), &None)
}

fn epoch() -> Outcome {
    let wanted = value(
        "select (extract(epoch from timestamptz '2000-01-01 00:00:00+00') * 1000000)::bigint",
    );
    same(&Some(EPOCH_DIFFERENCE.to_string()), &wanted)
}

fn clock() -> Outcome {
    let micros = "(extract(epoch from clock_timestamp()) * 1000000)::bigint";
    let read = || {
        value(&format!("select {micros}"))
            .unwrap()
            .parse::<i64>()
            .unwrap()
    };
    let (first, between, last) = (read(), now() + EPOCH_DIFFERENCE, read());
    check(
        first <= between && between <= last,
        format!("{first} {between} {last}"),
    )
}

fn monotonic() -> Outcome {
    let first = monotonic_nanoseconds();
    sql("select pg_sleep(0.002)");
    let passed = monotonic_nanoseconds() - first;
    check(
        (2_000_000..60_000_000_000).contains(&passed),
        format!("{passed} ns"),
    )
}
