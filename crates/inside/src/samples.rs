//! A value or more of every built-in type whose values can be stored and sent.

use braid_postgres::subtransaction;

use crate::db::sql;

/// Types and literals: both signs, zero, the ends of the type's range and its special values.
pub(crate) const SAMPLES: &[(&str, &[&str])] = &[
    ("boolean", &["true", "false"]),
    ("smallint", &["0", "-32768", "32767"]),
    ("integer", &["0", "-2147483648", "2147483647"]),
    (
        "bigint",
        &["0", "-9223372036854775808", "9223372036854775807"],
    ),
    (
        "real",
        &[
            "0",
            "-0",
            "1.5",
            "3.4028235e38",
            "1e-45",
            "NaN",
            "Infinity",
            "-Infinity",
        ],
    ),
    (
        "double precision",
        &[
            "0",
            "-0",
            "0.1",
            "1.7976931348623157e308",
            "5e-324",
            "NaN",
            "Infinity",
            "-Infinity",
        ],
    ),
    (
        "numeric",
        &[
            "0",
            "1.00",
            "-12345678901234567890.000010",
            "1e-16383",
            "9e131071",
            "NaN",
            "Infinity",
            "-Infinity",
        ],
    ),
    ("money", &["0", "-92233720368547758.08", "12.34"]),
    ("text", &["", "abc", "é𝄞", "a'\"\\b\n\tc", " trailing  "]),
    ("varchar", &["", "é"]),
    ("bpchar", &["a  ", "é"]),
    ("name", &["", "a name"]),
    ("\"char\"", &["", "a"]),
    ("bytea", &["", "\\x00ff27225c0a"]),
    (
        "date",
        &[
            "2000-01-01",
            "4714-11-24 BC",
            "5874897-12-31",
            "infinity",
            "-infinity",
        ],
    ),
    ("time", &["00:00:00", "24:00:00", "12:34:56.789012"]),
    ("timetz", &["00:00:00+15:59", "12:34:56.789012-15:59"]),
    (
        "timestamp",
        &[
            "1969-12-31 23:59:59.999999",
            "4714-11-24 00:00:00 BC",
            "294276-12-31 23:59:59.999999",
            "infinity",
            "-infinity",
        ],
    ),
    (
        "timestamptz",
        &[
            "2020-02-29 12:34:56.789012+05:45",
            "4714-11-24 00:00:00+00 BC",
            "294276-12-31 23:59:59.999999+00",
            "infinity",
            "-infinity",
        ],
    ),
    (
        "interval",
        &[
            "0",
            "1 year 2 mons -3 days 04:05:06.7",
            "-178000000 years",
            "-1 us",
        ],
    ),
    ("uuid", &["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    ("json", &["{\"a\":  1}", "\"é\"", "null"]),
    (
        "jsonb",
        &["{\"b\": 1.50, \"a\": [null, \"\\\\u0001\"]}", "0"],
    ),
    ("jsonpath", &["$.\"a\"[*]?(@ > 3)"]),
    ("xml", &["<a b=\"c\">d</a>"]),
    ("inet", &["10.0.0.1/8", "::1", "fe80::1/64"]),
    ("cidr", &["10.0.0.0/8", "2001:db8::/32"]),
    ("macaddr", &["08:00:2b:01:02:03"]),
    ("macaddr8", &["08:00:2b:01:02:03:04:05"]),
    ("bit(3)", &["101"]),
    ("varbit", &["", "1010101010101"]),
    ("point", &["(1.5,-2)", "(NaN,Infinity)"]),
    ("line", &["{1,2,3}"]),
    ("lseg", &["[(0,0),(1,1)]"]),
    ("box", &["(1,1),(0,0)"]),
    ("path", &["((0,0),(1,1))", "[(0,0)]"]),
    ("polygon", &["((0,0),(1,1),(2,0))"]),
    ("circle", &["<(1,2),3>"]),
    ("tsvector", &["", "'a':1A 'b c':2,3"]),
    ("tsquery", &["'a' & !'b'"]),
    ("oid", &["0", "4294967295"]),
    ("xid", &["0", "4294967295"]),
    ("xid8", &["0", "18446744073709551615"]),
    ("cid", &["4294967295"]),
    ("tid", &["(0,1)", "(4294967295,65535)"]),
    ("pg_lsn", &["0/0", "FFFFFFFF/FFFFFFFF"]),
    ("txid_snapshot", &["10:20:10,14,15"]),
    ("pg_snapshot", &["10:20:10,14,15"]),
    ("int4range", &["empty", "[1,5)", "(,)"]),
    ("int8range", &["[1,5)"]),
    ("numrange", &["(1.0,2.00]", "[NaN,]"]),
    ("daterange", &["[2000-01-01,infinity)"]),
    ("tsrange", &["[-infinity,2000-01-01 00:00:00)"]),
    ("tstzrange", &["(2000-01-01 00:00:00+00,)"]),
    ("int4multirange", &["{}", "{[1,2),[4,6)}"]),
    ("nummultirange", &["{(,1.0],[2,)}"]),
    (
        "integer[]",
        &["{}", "{1,NULL,-3}", "[-1:0]={7,8}", "{{1,2},{3,4}}"],
    ),
    (
        "text[]",
        &["{\"a b\",NULL,\"NULL\",\"\",\"\\\"\\\\\"}", "{{é},{ü}}"],
    ),
    ("numeric[]", &["{1.0,NaN}"]),
    ("timestamptz[]", &["{infinity,\"2020-02-29 00:00:00+00\"}"]),
    ("int4range[]", &["{\"[1,5)\",empty}"]),
    ("bytea[]", &["{\"\\\\x00ff\"}"]),
    ("jsonb[]", &["{\"{\\\"a\\\": 1}\"}"]),
    ("int2vector", &["1 2 3"]),
    ("oidvector", &["1 2"]),
    ("regclass", &["pg_class"]),
    ("regtype", &["integer"]),
    ("regproc", &["now"]),
];

/// False for xml if the server was built without libxml.
pub(crate) fn is_known(of: &str) -> bool {
    let look = || Ok((sql("select xml '<a/>'").len(), false));
    of != "xml" || subtransaction::attempt(look).is_ok()
}

/// A literal for SQL.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
