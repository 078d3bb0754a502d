//! The text of records.

use braid_gir::{
    BeforeKind, Begin, Column, ColumnFlags, Commit, Detail, Error, ImageWriter, Message,
    ReplicaIdentity, Result, SchemaKeyColumn, SchemaNumber, Schemas, StreamHeader, Value, Writer,
    render_frame,
};
use proptest::prelude::*;

use crate::model::{config, record};

fn column<'a>(flags: u8, name: &'a str, type_name: &'a str, type_modifier: i32) -> Column<'a> {
    let flags = ColumnFlags(flags);
    Column {
        flags,
        type_oid: 25,
        type_modifier,
        name,
        type_namespace: "pg_catalog",
        type_name,
        mark: 0,
    }
}

fn row<'v>(values: &'v [Value<'v>]) -> impl FnOnce(&mut ImageWriter<'_>) -> Result<()> + 'v {
    move |image| {
        for value in values {
            image.put(value);
        }
        Ok(())
    }
}

fn sample() -> Writer {
    let mut writer = Writer::new();
    let header = StreamHeader {
        node_id: [0xab; 16],
        system_identifier: 7,
        server_version: 150_020,
        node_name: "tokyo",
        database: "shop",
        charset: "UTF8",
    };
    writer.stream_header(&header).unwrap();
    let (at, lsn) = (1_709_209_800_000_000, 0x0000_0001_0156_18a0);
    let begin = Begin {
        commit_lsn: lsn,
        commit_timestamp: at,
        xid: 9,
        origin: "",
        origin_lsn: 0,
    };
    writer.begin(&begin).unwrap();
    writer
        .begin(&Begin {
            origin: "it's",
            origin_lsn: 16,
            ..begin
        })
        .unwrap();
    let (t, odd) = (SchemaNumber(0), SchemaNumber(1));
    let columns = [column(1, "id", "int4", -1), column(0, "v", "text", -1)];
    writer
        .schema(
            t,
            5,
            ReplicaIdentity::Default,
            ("public", "t"),
            (&columns, &[]),
        )
        .unwrap();
    let columns = [
        column(7, "Id", "int4", -1),
        column(8, "a\n\"b\"", "varchar", 14),
    ];
    let key_column = |column, comparison| SchemaKeyColumn { column, comparison };
    let both = [key_column(0, ""), key_column(1, "Any case")];
    let keys = [(true, &both[..]), (false, &both[..1])];
    writer
        .schema(
            odd,
            6,
            ReplicaIdentity::Index,
            ("public", "select me"),
            (&columns, &keys),
        )
        .unwrap();
    let one = [
        Value::Integer(1),
        Value::String(b"it's \\ \n\x7f \xff \xc3\xa9"),
    ];
    writer.insert(t, false, &[1], row(&one)).unwrap();
    let key = [Value::Integer(1), Value::None];
    let two = [Value::Integer(2), Value::None];
    writer
        .update(t, BeforeKind::Key, false, &[1, 2], row(&key), row(&two))
        .unwrap();
    writer
        .update(t, BeforeKind::Absent, false, &[2], row(&key), row(&two))
        .unwrap();
    let whole = [Value::Null, Value::None];
    writer
        .delete(odd, BeforeKind::Row, true, &[], row(&whole))
        .unwrap();
    let unknown = [
        Value::Binary(&[1, 0xab]),
        Value::BinaryText(b"(1)"),
        Value::Double(0.5),
    ];
    writer
        .delete(SchemaNumber(9), BeforeKind::Key, false, &[3], row(&unknown))
        .unwrap();
    writer.truncate(true, true, &[t, odd]).unwrap();
    writer.truncate(false, false, &[SchemaNumber(9)]).unwrap();
    let message = Message {
        transactional: true,
        lsn,
        prefix: "p",
        content: b"hello",
    };
    writer.message(&message).unwrap();
    writer
        .message(&Message {
            transactional: false,
            ..message
        })
        .unwrap();
    let commit = Commit {
        commit_lsn: lsn,
        end_lsn: lsn + 0x30,
        commit_timestamp: at,
    };
    writer.commit(&commit).unwrap();
    writer
}

#[test]
fn the_stable_text_leaves_out_what_varies() {
    let lines = render_frame(sample().frame(), &mut Schemas::new(), Detail::Stable).unwrap();
    let expected = [
        r"STREAM version=1 node='tokyo'",
        r"BEGIN",
        r"BEGIN origin='it''s'",
        r"SCHEMA 0 public.t identity=d (id pg_catalog.int4 key, v pg_catalog.text)",
        concat!(
            r#"SCHEMA 1 public."select me" identity=i ("Id" pg_catalog.int4 key primary not null, "#,
            r#""a\x0a""b""" pg_catalog.varchar typmod=14 generated)"#
        ),
        r"INSERT 0 public.t keys=1 after(id=1, v='it''s \\ \x0a\x7f \xff é')",
        r"UPDATE 0 public.t keys=2 before key(id=1) after(id=2, v=<none>)",
        r"UPDATE 0 public.t keys=1 after(id=2, v=<none>)",
        r#"DELETE 1 public."select me" keys=0 barrier before row("Id"=null, "a\x0a""b"""=<none>)"#,
        r"DELETE 9 ? keys=1 before key($1=x'01ab', $2=text'(1)', $3=0.5)",
        r#"TRUNCATE public.t, public."select me" cascade restart_identity"#,
        r"TRUNCATE 9 ?",
        r"MESSAGE transactional prefix='p' content='hello'",
        r"MESSAGE prefix='p' content='hello'",
        r"COMMIT",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn the_full_text_has_everything() {
    let lines = render_frame(sample().frame(), &mut Schemas::new(), Detail::Full).unwrap();
    let expected = [
        concat!(
            "STREAM version=1 node='tokyo' database='shop' charset='UTF8' ",
            "node_id=abababababababababababababababab system_identifier=7 server_version=150020"
        ),
        "BEGIN xid=9 commit_lsn=1/15618A0 at='2024-02-29 12:30:00+00' origin_lsn=0/0",
        "BEGIN xid=9 commit_lsn=1/15618A0 at='2024-02-29 12:30:00+00' origin='it''s' origin_lsn=0/10",
        concat!(
            "SCHEMA 0 public.t oid=5 identity=d ",
            "(id pg_catalog.int4 oid=25 key, v pg_catalog.text oid=25)"
        ),
    ];
    assert_eq!(&lines[..4], expected);
    assert_eq!(
        lines[6],
        "UPDATE 0 public.t keys=[0000000000000001 0000000000000002] before key(id=1) after(id=2, v=<none>)"
    );
    assert_eq!(
        lines[12],
        "MESSAGE transactional lsn=1/15618A0 prefix='p' content='hello'"
    );
    let commit = "COMMIT commit_lsn=1/15618A0 end_lsn=1/15618D0 at='2024-02-29 12:30:00+00'";
    assert_eq!(lines[14], commit);
}

#[test]
fn names_last_beyond_the_frame_and_errors_pass_through() {
    let mut schemas = Schemas::new();
    render_frame(sample().frame(), &mut schemas, Detail::Stable).unwrap();
    assert_eq!(
        schemas.relation(SchemaNumber(1)),
        Some("public.\"select me\"")
    );
    assert_eq!(schemas.relation(SchemaNumber(2)), None);
    let mut writer = Writer::new();
    writer.truncate(false, false, &[SchemaNumber(0)]).unwrap();
    let lines = render_frame(writer.frame(), &mut schemas, Detail::Stable).unwrap();
    assert_eq!(lines, ["TRUNCATE public.t"]);
    let refused = render_frame(b"Z", &mut schemas, Detail::Stable);
    assert_eq!(
        refused,
        Err(Error::UnknownTag {
            what: "record",
            tag: b'Z'
        })
    );
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn any_record_is_one_line(record in record()) {
        for detail in [Detail::Stable, Detail::Full] {
            let lines = render_frame(&record.frame(), &mut Schemas::new(), detail).unwrap();
            prop_assert_eq!(lines.len(), 1);
            prop_assert!(!lines[0].contains(char::is_control));
        }
    }
}
