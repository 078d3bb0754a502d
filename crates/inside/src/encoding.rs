//! Names and texts between the server's encoding and UTF-8, and settings and rights that are lent.

use std::ffi::CString;

use braid_bgworker::sqlstate::SqlState;
use braid_postgres::catalog::{Rights, query, with_rights, with_settings};
use braid_postgres::encoding::{
    from_server, is_utf8, json_in_ascii, name_here, text_from_server, to_server, utf8,
};
use braid_postgres::error::PgError;
use braid_postgres::kept_plan;
use pgrx::pg_sys;

use crate::db::{sql, value};
use crate::{Outcome, Test, check, same, test};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        test("encoding: names, there and back", names),
        test("encoding: a zero byte has no form here", zero),
        test("encoding: bytes that are no text", no_text),
        test("encoding: no name at all", null),
        test("encoding: JSON in ASCII", ascii),
        test("encoding: parameters and results of a query", parameters),
        test("setting: lent ones are given back", settings),
        test(
            "setting: an error leaves them to the rollback",
            settings_after_error,
        ),
        test(
            "setting: lent ones are given back with a returned error",
            settings_after_returned_error,
        ),
        test("rights: lent ones are given back", rights),
        test("kept plan: sees what the transaction has written", kept),
        test("kept plan: outlives a change of its table", kept_changed),
    ]
}

const TEXTS: [&str; 4] = ["", "a name", "é 𝄞", "\u{fffd}\t\n"];

fn names() -> Outcome {
    check(is_utf8(), "the database's encoding is not UTF8")?;
    for text in TEXTS {
        let there = to_server(text).ok_or("no form")?;
        same(&utf8(&there), &text.to_owned())?;
        same(&name_here(text), &Some(there))?;
    }
    Ok(())
}

fn zero() -> Outcome {
    same(&to_server("a\0b"), &None)?;
    same(&name_here("a\0b"), &None)
}

fn no_text() -> Outcome {
    same(&text_from_server("é".as_bytes()), &Some("é".to_owned()))?;
    same(&text_from_server(b"a\xff"), &None)?;
    let broken = CString::new(b"a\xffb".to_vec()).unwrap();
    same(&utf8(&broken), &"a\u{fffd}b".to_owned())
}

fn null() -> Outcome {
    // SAFETY: null is allowed.
    same(&unsafe { from_server(std::ptr::null()) }, &String::new())
}

fn ascii() -> Outcome {
    let json = "{\"é\": \"𝄞 \\\" x\"}";
    let ascii = json_in_ascii(json);
    check(ascii.is_ascii(), ascii.clone())?;
    let equal = query("select $1::jsonb = $2::jsonb", &[Some(json), Some(&ascii)]);
    same(&equal.get(0, 0), &Some("t"))
}

fn parameters() -> Outcome {
    let rows = query(
        "select $1, $2, $3 union all select null, 'x', $3 order by 1",
        &[Some("é'\"\\"), None, Some("")],
    );
    same(
        &(rows.len(), rows.get(0, 0), rows.get(0, 1)),
        &(2, Some("é'\"\\"), None),
    )?;
    same(
        &(rows.get(1, 0), rows.get(1, 1), rows.get(1, 2)),
        &(None, Some("x"), Some("")),
    )?;
    same(&(rows.get(2, 0), rows.get(0, 3)), &(None, None))
}

fn settings() -> Outcome {
    sql("set local datestyle = 'SQL, DMY'");
    let inside = with_settings(&[("datestyle", "ISO")], || {
        Ok::<_, PgError>(value("select date '2000-12-31'::text"))
    });
    same(&inside.unwrap().as_deref(), &Some("2000-12-31"))?;
    same(
        &value("select date '2000-12-31'::text").as_deref(),
        &Some("31/12/2000"),
    )
}

fn settings_after_error() -> Outcome {
    sql("set local datestyle = 'SQL, DMY'");
    let outcome = braid_postgres::subtransaction::attempt(|| {
        with_settings(&[("datestyle", "ISO")], || {
            sql("select 1 / 0");
            Ok(((), true))
        })
    });
    check(outcome.is_err(), "no error")?;
    same(
        &value("select date '2000-12-31'::text").as_deref(),
        &Some("31/12/2000"),
    )
}

fn settings_after_returned_error() -> Outcome {
    sql("set local datestyle = 'SQL, DMY'");
    let outcome = with_settings(&[("datestyle", "ISO")], || Err::<(), ()>(()));
    check(outcome.is_err(), "no error")?;
    same(
        &value("select date '2000-12-31'::text").as_deref(),
        &Some("31/12/2000"),
    )
}

fn rights() -> Outcome {
    sql("create role inside_nobody");
    let oid: u32 = value("select 'inside_nobody'::regrole::oid")
        .unwrap()
        .parse()
        .unwrap();
    let confined = Rights::Confined(pg_sys::Oid::from(oid));
    let inside = with_rights(confined, || value("select current_user"));
    same(&inside.as_deref(), &Some("inside_nobody"))?;
    same(
        &value("select current_user = session_user").as_deref(),
        &Some("t"),
    )?;
    // The role may not leave by itself.
    let outcome = braid_postgres::subtransaction::attempt(|| {
        with_rights(confined, || sql("reset role"));
        Ok(((), true))
    });
    same(
        &outcome.map_err(|error| error.sqlstate),
        &Err(SqlState::InsufficientPrivilege),
    )
}

const COUNT: &str = "select count(*)::text from kept_rows";

fn count() -> String {
    let rows = kept_plan::rows(COUNT, &[]).unwrap();
    rows[0][0].clone().unwrap()
}

fn kept() -> Outcome {
    sql("create temporary table kept_rows (a int)");
    same(&count(), &"0".to_owned())?;
    sql("insert into kept_rows values (1)");
    same(&count(), &"1".to_owned())
}

fn kept_changed() -> Outcome {
    sql("create temporary table kept_rows (a int)");
    same(&count(), &"0".to_owned())?;
    sql("drop table kept_rows");
    sql("create temporary table kept_rows (b text, c text)");
    sql("insert into kept_rows values ('x', 'y'), ('z', null)");
    same(&count(), &"2".to_owned())
}
