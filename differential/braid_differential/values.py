"""Types and values of them: every built-in type that a column can have, with values at its edges."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Type:
    """A type by name, with values as SQL expressions. A type without equality cannot be in a key."""

    name: str
    values: tuple
    key: bool = False
    equality: bool = True
    # The text of a value is stored with other bytes than its binary form.
    forms: bool = False
    since: int = 15


def _of(name, *texts, **options):
    return Type(name, tuple("'" + text.replace("'", "''") + "'" for text in texts), **options)


_LONG = "(select string_agg(md5(i::text), '') from generate_series(1, 200) i)"

SCALARS = [
    _of("bool", "t", "f", key=True),
    _of("int2", "0", "-32768", "32767", key=True),
    _of("int4", "0", "-2147483648", "2147483647", "7", key=True),
    _of("int8", "0", "-9223372036854775808", "9223372036854775807", key=True),
    _of("float4", "0", "-0", "NaN", "Infinity", "-Infinity", "1e-45", "3.1415927", key=True),
    _of("float8", "0", "-0", "NaN", "Infinity", "5e-324", "0.1", "1e308", key=True),
    _of("numeric", "0", "0.00", "NaN", "Infinity", "-Infinity", "1e100", "1.500", "-12345678901234567890.123456789", key=True),
    _of("numeric(8,2)", "0", "1.5", "-999999.99", "NaN"),
    _of("money", "0", "-1.23", "92233720368547758.07", key=True),
    Type("text", ("''", "'a'", "'ä\U0001f600'", "E'\\\\N\\t\\n'", "'NULL'", _LONG), key=True),
    _of("varchar(20)", "", "x", "with space  ", key=True),
    _of("char(5)", "", "ab", "ab   ", key=True),
    _of("bpchar", "z", "z  ", key=True),
    _of('"char"', "a", "", "\\377", key=True),
    _of("name", "", "somebody", key=True),
    Type("bytea", ("''", "'\\x00ff'", "decode(repeat('ab', 3000), 'hex')"), key=True),
    _of("date", "2000-01-01", "infinity", "-infinity", "0044-03-15 BC", "5874897-12-31", key=True),
    _of("time", "00:00", "24:00", "12:34:56.789012", key=True),
    _of("timetz", "00:00+00", "24:00-15:59", "12:34:56.789012+05:30", key=True),
    _of("timestamp", "2000-01-01", "infinity", "-infinity", "4713-01-01 BC", "294276-12-31 23:59:59.999999", key=True),
    _of("timestamptz", "2000-01-01 00:00+00", "infinity", "-infinity", "2024-02-29 12:00+05:30", key=True),
    _of("interval", "0", "1 mon", "30 days", "-1 year 2 mons -3 days 04:05:06.7", "1 day -24:00", key=True),
    _of("uuid", "00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", key=True),
    _of("inet", "0.0.0.0/0", "192.168.1.5/24", "::1", "fe80::1/64", key=True),
    _of("cidr", "10.0.0.0/8", "::/0", key=True),
    _of("macaddr", "08:00:2b:01:02:03", key=True),
    _of("macaddr8", "08:00:2b:01:02:03:04:05", key=True),
    _of("bit(5)", "10101", "00000", key=True),
    _of("varbit", "", "1", "101010101010101", key=True),
    _of("json", '{"b": 1, "a":2, "a": 3}', "[]", "null", equality=False),
    _of("jsonb", '{"b": 1, "a": 2}', "[]", "null", '"x"', key=True),
    _of("jsonpath", "$.a[*] ? (@ > 1)", "strict $", equality=False),
    _of("point", "(0,0)", "(1e300,-0)", "(NaN,1)", equality=False),
    _of("line", "{1,-1,0}", equality=False),
    _of("lseg", "[(0,0),(1,1)]", equality=False),
    _of("box", "(1,1),(0,0)", "(2,1),(0,0)", "(1,2),(0,0)", equality=False),
    _of("path", "((0,0),(1,1),(2,0))", "[(0,0),(1,1)]", equality=False),
    _of("polygon", "((0,0),(1,1),(2,0))", "((0,0))", equality=False),
    _of("circle", "<(0,0),1>", "<(1,1),0.5642>", equality=False),
    _of("tsvector", "a:1A fat:2B cat", "", "'it''s' x", key=True),
    _of("tsquery", "fat & (rat | cat)", "!a <-> b:*AB", "'x' & 'y'", "cat & (dog:* | !bird)", forms=True, key=True),
    _of("pg_lsn", "0/0", "FFFFFFFF/FFFFFFFF", key=True),
    _of("xid", "3", "4294967295"),
    _of("xid8", "18446744073709551615", key=True),
    _of("cid", "0"),
    _of("tid", "(0,1)", "(4294967295,65535)", key=True),
    _of("oid", "0", "4294967295", key=True),
    _of("pg_snapshot", "10:20:10,14,15", equality=False),
    _of("txid_snapshot", "10:20:10,14,15", equality=False),
    _of("refcursor", "c", equality=False),
    _of("regtype", "integer", "text", key=True),
    _of("regclass", "pg_class", "pg_catalog.pg_type", key=True),
    _of("regproc", "pg_catalog.now", "-"),
    _of("regrole", "pg_monitor", key=True),
    _of("regnamespace", "pg_catalog"),
    _of("regconfig", "english"),
    _of("regdictionary", "simple"),
    _of("regoperator", "+(integer,integer)"),
    _of("regcollation", '"C"'),
    _of("int4range", "empty", "[1,5)", "(,)", "[3,3]", key=True),
    _of("int8range", "empty", "[1,)"),
    _of("numrange", "[1.0,2.00]", "empty", key=True),
    _of("daterange", "[2000-01-01,2000-02-01)", "(,2000-01-01]", key=True),
    _of("tsrange", "[2000-01-01,infinity)", key=True),
    _of("tstzrange", "[2000-01-01 00:00+00,2001-01-01 00:00+00)"),
    _of("int4multirange", "{}", "{[1,2),[5,9)}", key=True),
    _of("nummultirange", "{[1.0,2.0]}"),
    _of("datemultirange", "{[2000-01-01,2000-02-01)}"),
    _of("int2vector", "1 2 3", ""),
    _of("oidvector", "1 2", "", key=True),
    _of("aclitem", "=r/postgres"),
    _of("xml", "<a>x</a>", "<b/>", equality=False),
]

# Values that are stored out of line, each other than the others, in a column whose storage is
# external.
LARGE = Type("text", tuple(f"repeat('{letter}', 3000)" for letter in "abc") + ("'small'",))

# Types that the schema of a case makes, in the order in which they need one another.
MADE = [
    ("create type s.mood as enum ('sad', 'ok', 'happy')", Type("s.mood", ("'sad'", "'ok'", "'happy'"), key=True)),
    ("create domain s.small as int check (value < 100)", Type("s.small", ("'1'", "'99'", "'-5'"), key=True)),
    ("create domain s.word as text collate \"C\" not null default 'w'", Type("s.word", ("'w'", "'x'", "''"), key=True)),
    ("create domain s.state as s.mood", Type("s.state", ("'sad'", "'happy'"), key=True)),
    ("create type s.pair as (a int, b text)", Type("s.pair", ("row(1, 'x')", "row(null, null)", "'(2,\"a,b\")'"), key=True)),
    ("create type s.nested as (p s.pair, l int[], m s.mood)", Type("s.nested", ("row(row(1, 'x'), '{1,2}', 'ok')", "row(null, null, null)"))),
    ("create domain s.pairs as s.pair[]", Type("s.pairs", ("array[row(1, 'x')::s.pair]", "'{}'"))),
    ("create type s.floats as range (subtype = float8)", Type("s.floats", ("'[1,2)'", "'empty'", "'(,)'"))),
    ("create domain s.doc as json", Type("s.doc", ("'{\"a\":1}'", "'[]'"), equality=False)),
]


def array_of(of):
    """The type's array type, with empty, nested, null-holding and shifted values."""
    one = f"{of.values[0]}::{of.name}"
    last = f"{of.values[-1]}::{of.name}"
    return Type(
        of.name + "[]",
        ("'{}'", f"array[{one}]", f"array[{one}, null, {last}]", f"array[array[{one}, {last}], array[{last}, {one}]]"),
        equality=of.equality,
        forms=of.forms,
    )


def literal(rng, of):
    """A value of the type as an SQL expression; now and then null."""
    return "null" if rng.random() < 0.15 else f"{rng.choice(of.values)}::{of.name}"
