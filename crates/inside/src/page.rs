//! Heap pages: places, the transactions in a row version's header, and rows of a pinned page.

use braid_postgres::compat::file_of;
use braid_postgres::heap_page::{Lifetime, fetch, lifetime, place_of, tid_of};
use pgrx::pg_sys;

use crate::db::{Open, other, script, sql, value};
use crate::{Outcome, Test, check, same, test};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        test("page: places and tuple identifiers, there and back", places),
        test("page: who wrote a row", written),
        test("page: who deleted a row", deleted),
        test("page: who replaced a row", replaced),
        test("page: a frozen row has no writer", frozen),
        test("page: a row that several lock was ended by none", locked),
        test("page: a row that was cleaned away", cleaned),
        test("page: no such item or block", nothing),
        test("page: reading leaves no lock and no pin", leaves_nothing),
        test("page: a row in hand that the snapshot sees", fetched),
        test("page: a row in hand that is dead", dead),
        test("page: an item in hand that is not there", no_item),
    ]
}

fn places() -> Outcome {
    for place in [
        (0, 1),
        (1, 65_535),
        (0xFFFF, 2),
        (0x1_0000, 3),
        (0xFFFF_FFFE, 291),
    ] {
        same(&place_of(tid_of(place)), &place)?;
    }
    Ok(())
}

fn table() -> Open {
    script("create schema p;\ncreate table p.t (a int);\ninsert into p.t values (1), (2)");
    Open::new("p.t")
}

fn at(table: &Open, block: u32, item: u16) -> Option<Lifetime> {
    // SAFETY: an open table that is permanent.
    unsafe { lifetime(file_of(table.as_ptr()), block, item) }
}

fn xid(query: &str) -> Option<pg_sys::TransactionId> {
    let number: u32 = value(query)?.parse().ok()?;
    Some(pg_sys::TransactionId::from(number))
}

fn written() -> Outcome {
    let table = table();
    let found = at(&table, 0, 2).ok_or("no row")?;
    same(&found.writer, &xid("select xmin from p.t where a = 2"))?;
    same(&found.ended_by, &Some(pg_sys::InvalidTransactionId))
}

fn deleted() -> Outcome {
    let table = table();
    sql("delete from p.t where a = 1");
    let found = at(&table, 0, 1).ok_or("no row")?;
    same(&found.ended_by, &xid("select xmin from p.t where a = 2"))
}

fn replaced() -> Outcome {
    let table = table();
    sql("update p.t set a = 3 where a = 1");
    let found = at(&table, 0, 1).ok_or("no row")?;
    same(&found.ended_by, &xid("select xmin from p.t where a = 3"))
}

/// Rows that are copied into a new table are frozen at once, whatever other sessions see.
fn frozen() -> Outcome {
    other("begin");
    other("create table public.frozen (a int)");
    other("copy public.frozen from program 'echo 1' with (freeze)");
    other("commit");
    let found = at(&Open::new("public.frozen"), 0, 1).ok_or("no row")?;
    other("drop table public.frozen");
    check(found.writer.is_none(), format!("{:?}", found.writer))
}

/// Two lockers make a MultiXact, whose id is no transaction's.
fn locked() -> Outcome {
    other("create table public.locked as select 1 as a");
    other("begin");
    other("select a from public.locked for share");
    sql("select a from public.locked for share");
    let found = at(&Open::new("public.locked"), 0, 1);
    other("rollback");
    same(&found.ok_or("no row")?.ended_by, &None)
}

/// Rows of a transaction that was rolled back are cleaned away, whatever other sessions see.
fn cleaned() -> Outcome {
    other("create table public.cleaned (a int)");
    other("begin");
    other("insert into public.cleaned values (1)");
    other("rollback");
    other("insert into public.cleaned values (2)");
    other("vacuum public.cleaned");
    let table = Open::new("public.cleaned");
    let found = (at(&table, 0, 1).is_some(), at(&table, 0, 2).is_some());
    drop(table);
    other("drop table public.cleaned");
    same(&found, &(false, true))
}

fn nothing() -> Outcome {
    let table = table();
    for (block, item) in [(0, 0), (0, 3), (0, 65_535), (1, 1), (0xFFFF_FFFE, 1)] {
        check(
            at(&table, block, item).is_none(),
            format!("({block},{item})"),
        )?;
    }
    Ok(())
}

/// Whether nobody has the table's only page pinned or locked: only then can it be locked for
/// cleanup.
pub(crate) fn is_let_go(table: &Open) -> bool {
    // SAFETY: an open table, whose block can be read; the pin and the lock are given up.
    unsafe {
        let buffer = pg_sys::ReadBuffer(table.as_ptr(), 0);
        let alone = pg_sys::ConditionalLockBufferForCleanup(buffer);
        if alone {
            pg_sys::UnlockReleaseBuffer(buffer);
        } else {
            pg_sys::ReleaseBuffer(buffer);
        }
        alone
    }
}

fn leaves_nothing() -> Outcome {
    let table = table();
    at(&table, 0, 1);
    at(&table, 0, 9);
    check(is_let_go(&table), "the page is pinned or locked")
}

/// The first column of the row at an item of block 0, if it is seen.
fn in_hand(table: &Open, item: u16) -> Option<i32> {
    // SAFETY: an open table with one block; the pin goes to the slot or is given up.
    unsafe {
        let slot = pg_sys::table_slot_create(table.as_ptr(), std::ptr::null_mut());
        let snapshot = pg_sys::GetLatestSnapshot();
        let snapshot = pg_sys::RegisterSnapshot(snapshot);
        let buffer = pg_sys::ReadBuffer(table.as_ptr(), 0);
        let relation = table.as_ptr();
        let seen = pg_sys::ffi::pg_guard_ffi_boundary(|| {
            fetch(relation, buffer, (0, item), snapshot, slot)
        });
        let found = seen.then(|| {
            pg_sys::slot_getsomeattrs_int(slot, 1);
            i32::try_from((*(*slot).tts_values).value().cast_signed() & 0xFFFF_FFFF).unwrap()
        });
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        pg_sys::UnregisterSnapshot(snapshot);
        found
    }
}

fn fetched() -> Outcome {
    let table = table();
    same(&in_hand(&table, 1), &Some(1))?;
    same(&in_hand(&table, 2), &Some(2))
}

fn dead() -> Outcome {
    let table = table();
    script("update p.t set a = 7 where a = 1;\nselect 1");
    same(&in_hand(&table, 1), &None)?;
    same(&in_hand(&table, 3), &Some(7))
}

fn no_item() -> Outcome {
    let table = table();
    for item in [0, 3, 65_535] {
        same(&in_hand(&table, item), &None)?;
    }
    Ok(())
}
