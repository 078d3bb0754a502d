//! The expected texts were written by wal2json 2.5 for the same changes.

use super::*;
use crate::wal2json::{ColumnText, RelationText, State};

/// A row of given values: `None` is null, "toast" is a value that is not in WAL.
struct Row(Vec<Option<&'static str>>);

impl Image for Row {
    fn state(&self, column: usize) -> State {
        match self.0[column] {
            None => State::Null,
            Some("toast") => State::Unavailable,
            Some(_) => State::Present,
        }
    }

    fn put(&self, column: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(self.0[column].unwrap().as_bytes());
    }
}

fn column(name: &str, type_name: &str, type_oid: u32, position: i16, key: bool) -> ColumnText {
    ColumnText {
        name: name.as_bytes().to_vec(),
        type_name: type_name.as_bytes().to_vec(),
        type_oid,
        position,
        optional: !key,
        default: (name == "v").then(|| b"'x'::text".to_vec()),
        in_identity: key,
        in_primary_key: key,
    }
}

fn relation() -> RelationText {
    RelationText {
        schema: b"public".to_vec(),
        table: b"a\"b".to_vec(),
        columns: vec![
            column("id", "integer", 23, 1, true),
            column("v", "text", 25, 3, false),
        ],
        full_identity: false,
        default_identity: true,
    }
}

fn parse(given: &[(&str, &str)]) -> Wal2JsonOptions {
    let given: Vec<_> = given
        .iter()
        .map(|(name, value)| ((*name).to_owned(), Some((*value).to_owned())))
        .collect();
    Wal2JsonOptions::parse(&given).unwrap()
}

const TRANSACTION: TransactionText<'static> = TransactionText {
    xid: 758,
    timestamp: b"2026-01-01 00:00:00+00",
    origin: 0,
    commit_lsn: 0x1_0000_00AB,
    end_lsn: 0x1_0000_00CD,
};

/// Returns the text of an insert, an update, an update that changes the key, a delete and a
/// message; with `lines`, each part is on a line of its own.
fn transaction(given: &[(&str, &str)], relation: RelationText, lines: bool) -> String {
    let options = parse(given);
    let layout = Layout::new(relation, &options);
    let mut document = Document::new(&options);
    let mut out = Vec::new();
    let end = |out: &mut Vec<u8>| {
        if lines {
            out.push(b'\n');
        }
    };
    document.begin(&mut out, &TRANSACTION);
    end(&mut out);
    let row = |values: [Option<&'static str>; 2]| Row(values.to_vec());
    let (one, two) = (row([Some("1"), None]), row([Some("2"), Some("\"x\"")]));
    let key = row([Some("1"), None]);
    let toast = row([Some("1"), Some("toast")]);
    for (kind, old, new) in [
        (ChangeKind::Insert, None, Some(&one)),
        (ChangeKind::Update, None, Some(&toast)),
        (ChangeKind::Update, Some(&key), Some(&two)),
        (ChangeKind::Delete, Some(&two), None),
    ] {
        document.change(&mut out, &layout, kind, 0xAA, (old, new));
        end(&mut out);
    }
    let message = MessageText {
        transactional: true,
        lsn: 0xAC,
        prefix: b"p\"",
        content: b"c\n",
    };
    document.message(&mut out, &message);
    end(&mut out);
    document.commit(&mut out, &TRANSACTION);
    String::from_utf8(out).unwrap()
}

#[test]
fn version_1() {
    assert_eq!(
        transaction(&[], relation(), false),
        concat!(
            r#"{"change":[{"kind":"insert","schema":"public","table":"a\"b","columnnames":["id","v"],"columntypes":["integer","text"],"columnvalues":[1,null]},"#,
            r#"{"kind":"update","schema":"public","table":"a\"b","columnnames":["id"],"columntypes":["integer"],"columnvalues":[1],"oldkeys":{"keynames":["id"],"keytypes":["integer"],"keyvalues":[1]}},"#,
            r#"{"kind":"update","schema":"public","table":"a\"b","columnnames":["id","v"],"columntypes":["integer","text"],"columnvalues":[2,"x"],"oldkeys":{"keynames":["id"],"keytypes":["integer"],"keyvalues":[1]}},"#,
            r#"{"kind":"delete","schema":"public","table":"a\"b","oldkeys":{"keynames":["id","v"],"keytypes":["integer","text"],"keyvalues":[2,"x"]}},"#,
            r#"{"kind":"message","transactional":true,"prefix":"p\"","content":"c\n"}]}"#,
        )
    );
}

#[test]
fn version_1_with_everything() {
    let given = [
        ("include-xids", "1"),
        ("include-lsn", "1"),
        ("include-timestamp", "1"),
        ("include-origin", "1"),
        ("include-pk", "1"),
        ("include-type-oids", "1"),
        ("include-column-positions", "1"),
        ("include-not-null", "1"),
        ("include-default", "1"),
        ("write-in-chunks", "1"),
        ("include-unchanged-toast-marker", "1"),
    ];
    assert_eq!(
        transaction(&given, relation(), true),
        concat!(
            r#"{"xid":758,"nextlsn":"1/CD","timestamp":"2026-01-01 00:00:00+00","origin":0,"change":["#,
            "\n",
            r#"{"kind":"insert","schema":"public","table":"a\"b","columnnames":["id","v"],"columntypes":["integer","text"],"columntypeoids":[23,25],"columnpositions":[1,3],"columnoptionals":[false,true],"columndefaults":[null,"'x'::text"],"columnvalues":[1,null],"pk":{"pknames":["id"],"pktypes":["integer"]}}"#,
            "\n",
            r#",{"kind":"update","schema":"public","table":"a\"b","columnnames":["id"],"columntypes":["integer"],"columntypeoids":[23],"columnpositions":[1],"columnoptionals":[false],"columndefaults":[null],"columnvalues":[1],"columnsunchanged":["v"],"pk":{"pknames":["id"],"pktypes":["integer"]},"oldkeys":{"keynames":["id"],"keytypes":["integer"],"keytypeoids":[23],"keyvalues":[1]}}"#,
            "\n",
            r#",{"kind":"update","schema":"public","table":"a\"b","columnnames":["id","v"],"columntypes":["integer","text"],"columntypeoids":[23,25],"columnpositions":[1,3],"columnoptionals":[false,true],"columndefaults":[null,"'x'::text"],"columnvalues":[2,"x"],"pk":{"pknames":["id"],"pktypes":["integer"]},"oldkeys":{"keynames":["id"],"keytypes":["integer"],"keytypeoids":[23],"keyvalues":[1]}}"#,
            "\n",
            r#",{"kind":"delete","schema":"public","table":"a\"b","pk":{"pknames":["id"],"pktypes":["integer"]},"oldkeys":{"keynames":["id","v"],"keytypes":["integer","text"],"keytypeoids":[23,25],"keyvalues":[2,"x"]}}"#,
            "\n",
            r#",{"kind":"message","transactional":true,"prefix":"p\"","content":"c\n"}"#,
            "\n]}",
        )
    );
}

#[test]
fn version_1_with_little() {
    let given = [
        ("include-types", "0"),
        ("include-schemas", "0"),
        ("include-not-null", "1"),
        ("include-pk", "1"),
    ];
    let text = transaction(&given, relation(), false);
    assert!(text.starts_with(
        r#"{"change":[{"kind":"insert","table":"a\"b","columnnames":["id","v"],"columnoptionals":[],"columnvalues":[1,null],"pk":{"pknames":["id"],"pktypes":[]}},"#
    ));
}

#[test]
fn version_1_pretty() {
    let given = [("pretty-print", "1"), ("include-pk", "1")];
    let text = transaction(&given, relation(), false);
    let expected = "{
\t\"change\": [
\t\t{
\t\t\t\"kind\": \"insert\",
\t\t\t\"schema\": \"public\",
\t\t\t\"table\": \"a\\\"b\",
\t\t\t\"columnnames\": [\"id\", \"v\"],
\t\t\t\"columntypes\": [\"integer\", \"text\"],
\t\t\t\"columnvalues\": [1, null],
\t\t\t\"pk\": {
\t\t\t\t\"pknames\": [\"id\"],
\t\t\t\t\"pktypes\": [\"integer\"]
\t\t\t}
\t\t}
\t\t,{
\t\t\t\"kind\": \"update\",
\t\t\t\"schema\": \"public\",
\t\t\t\"table\": \"a\\\"b\",
\t\t\t\"columnnames\": [\"id\"],
\t\t\t\"columntypes\": [\"integer\"],
\t\t\t\"columnvalues\": [1],
\t\t\t\"pk\": {
\t\t\t\t\"pknames\": [\"id\"],
\t\t\t\t\"pktypes\": [\"integer\"]
\t\t\t},
\t\t\t\"oldkeys\": {
\t\t\t\t\"keynames\": [\"id\"],
\t\t\t\t\"keytypes\": [\"integer\"],
\t\t\t\t\"keyvalues\": [1]
\t\t\t}
\t\t}
";
    assert!(text.starts_with(expected), "{text}");
    let end = "\t\t,{
\t\t\t\"kind\": \"message\",
\t\t\t\"transactional\": true,
\t\t\t\"prefix\": \"p\\\"\",
\t\t\t\"content\": \"c\\n\"
\t\t}
\t]
}";
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn version_1_alone() {
    let message = MessageText {
        transactional: false,
        lsn: 1,
        prefix: b"p",
        content: b"c",
    };
    for (given, expected) in [
        (
            vec![("write-in-chunks", "1"), ("include-xids", "1")],
            r#"{"change":[{"kind":"message","transactional":false,"prefix":"p","content":"c"}]}"#,
        ),
        (
            vec![("pretty-print", "1"), ("write-in-chunks", "1")],
            "{\n\t\"change\": [\n\t\t{\n\t\t\t\"kind\": \"message\",\n\t\t\t\"transactional\": false,\n\t\t\t\"prefix\": \"p\",\n\t\t\t\"content\": \"c\"\n\t\t}\n\t]\n}",
        ),
    ] {
        let mut out = Vec::new();
        let mut document = Document::new(&parse(&given));
        // The number of changes in the previous transaction does not matter.
        document.changes = 5;
        document.message(&mut out, &message);
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
    for (given, expected) in [
        (vec![], r#"{"change":[]}"#),
        (vec![("pretty-print", "1")], "{\n\t\"change\": [\n\t]\n}"),
    ] {
        let mut out = Vec::new();
        let mut document = Document::new(&parse(&given));
        document.begin(&mut out, &TRANSACTION);
        document.commit(&mut out, &TRANSACTION);
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}

#[test]
fn version_2() {
    assert_eq!(
        transaction(&[("format-version", "2"), ("pretty-print", "1")], relation(), true),
        [
            r#"{"action":"B"}"#,
            r#"{"action":"I","schema":"public","table":"a\"b","columns":[{"name":"id","type":"integer","value":1},{"name":"v","type":"text","value":null}]}"#,
            r#"{"action":"U","schema":"public","table":"a\"b","columns":[{"name":"id","type":"integer","value":1}],"identity":[{"name":"id","type":"integer","value":1}]}"#,
            r#"{"action":"U","schema":"public","table":"a\"b","columns":[{"name":"id","type":"integer","value":2},{"name":"v","type":"text","value":"x"}],"identity":[{"name":"id","type":"integer","value":1}]}"#,
            r#"{"action":"D","schema":"public","table":"a\"b","identity":[{"name":"id","type":"integer","value":2}]}"#,
            r#"{"action":"M","transactional":true,"prefix":"p\"","content":"c\n"}"#,
            r#"{"action":"C"}"#,
        ]
        .join("\n")
    );
}

#[test]
fn version_2_with_everything() {
    let given = [
        ("format-version", "2"),
        ("include-xids", "1"),
        ("include-lsn", "1"),
        ("include-timestamp", "1"),
        ("include-origin", "1"),
        ("include-pk", "1"),
        ("include-type-oids", "1"),
        ("include-column-positions", "1"),
        ("include-not-null", "1"),
        ("include-default", "1"),
        ("include-unchanged-toast-marker", "1"),
    ];
    let mut relation = relation();
    relation.full_identity = true;
    relation.default_identity = false;
    let text = transaction(&given, relation.clone(), true);
    let lines: Vec<_> = text.lines().collect();
    let of = r#""xid":758,"timestamp":"2026-01-01 00:00:00+00","origin":0,"lsn":"#;
    assert_eq!(
        lines[0],
        format!(r#"{{"action":"B",{of}"1/AB","nextlsn":"1/CD"}}"#)
    );
    assert_eq!(
        lines[1],
        format!(
            r#"{{"action":"I",{of}"0/AA","schema":"public","table":"a\"b","columns":[{{"name":"id","type":"integer","typeoid":23,"value":1,"optional":false,"position":1,"default":null}},{{"name":"v","type":"text","typeoid":25,"value":null,"optional":true,"position":3,"default":"'x'::text"}}],"pk":[{{"name":"id","type":"integer","typeoid":23}}]}}"#
        )
    );
    assert!(lines[2].contains(
        r#"{"name":"v","type":"text","typeoid":25,"unchanged":true,"optional":true,"position":3,"default":"'x'::text"}],"identity":[{"name":"id""#
    ));
    // A whole row includes its nulls.
    assert!(lines[3].contains(
        r#""identity":[{"name":"id","type":"integer","typeoid":23,"value":1},{"name":"v","type":"text","typeoid":25,"value":null}],"pk":["#
    ));
    assert_eq!(
        lines[6],
        format!(r#"{{"action":"C",{of}"1/AB","nextlsn":"1/CD"}}"#)
    );

    let options = parse(&given);
    let mut document = Document::new(&options);
    let mut out = Vec::new();
    document.begin(&mut out, &TRANSACTION);
    out.clear();
    document.truncate(&mut out, &Layout::new(relation, &options), 0xAD);
    document.message(
        &mut out,
        &MessageText {
            transactional: false,
            lsn: 0xAE,
            prefix: b"",
            content: b"",
        },
    );
    assert_eq!(
        String::from_utf8(out).unwrap(),
        format!(
            r#"{{"action":"T",{of}"0/AD","schema":"public","table":"a\"b"}}{{"action":"M","xid":null,"timestamp":null,"origin":null,"lsn":"0/AE","transactional":false,"prefix":"","content":""}}"#
        )
    );
}

#[test]
fn no_identity() {
    let mut relation = relation();
    let options = parse(&[]);
    assert!(Layout::new(relation.clone(), &options).has_identity());
    relation.columns[0].in_identity = false;
    assert!(!Layout::new(relation.clone(), &options).has_identity());
    relation.full_identity = true;
    assert!(Layout::new(relation, &options).has_identity());
}

#[test]
fn an_insert_names_what_it_lacks() {
    for (version, expected) in [
        (
            "1",
            r#""columnnames":["id"],"columntypes":["integer"],"columnvalues":[11],"columnsunchanged":["v"]}]}"#,
        ),
        (
            "2",
            r#""columns":[{"name":"id","type":"integer","value":11},{"name":"v","type":"text","unchanged":true}]}"#,
        ),
    ] {
        let given = [("format-version", version), ("include-transaction", "0")];
        let options = parse(&given);
        let layout = Layout::new(relation(), &options);
        let mut document = Document::new(&options);
        let mut out = Vec::new();
        document.begin(&mut out, &TRANSACTION);
        out.clear();
        let entered = Row(vec![Some("11"), Some("toast")]);
        let rows = (None, Some(&entered));
        document.change(&mut out, &layout, ChangeKind::Insert, 0xAA, rows);
        if version == "1" {
            document.commit(&mut out, &TRANSACTION);
        }
        let text = String::from_utf8(out).unwrap();
        assert!(text.ends_with(expected), "{text}");
    }
}
