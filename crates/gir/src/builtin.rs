//! OIDs of PostgreSQL's built-in types, which are the same in every database, by name
//! (src/include/catalog/pg_type.dat, 15 to 18).

/// OIDs by the names in schema records, and by SQL's names.
const TYPES: [(&str, u32); 56] = [
    ("bool", 16),
    ("boolean", 16),
    ("bytea", 17),
    ("char", 18),
    ("name", 19),
    ("int8", 20),
    ("bigint", 20),
    ("int2", 21),
    ("smallint", 21),
    ("int4", 23),
    ("int", 23),
    ("integer", 23),
    ("text", 25),
    ("oid", 26),
    ("tid", 27),
    ("xid", 28),
    ("cid", 29),
    ("json", 114),
    ("xml", 142),
    ("point", 600),
    ("lseg", 601),
    ("path", 602),
    ("box", 603),
    ("polygon", 604),
    ("line", 628),
    ("cidr", 650),
    ("float4", 700),
    ("real", 700),
    ("float8", 701),
    ("double precision", 701),
    ("circle", 718),
    ("macaddr8", 774),
    ("money", 790),
    ("macaddr", 829),
    ("inet", 869),
    ("bpchar", 1042),
    ("character", 1042),
    ("varchar", 1043),
    ("character varying", 1043),
    ("date", 1082),
    ("time", 1083),
    ("time without time zone", 1083),
    ("timestamp", 1114),
    ("timestamp without time zone", 1114),
    ("timestamptz", 1184),
    ("timestamp with time zone", 1184),
    ("interval", 1186),
    ("timetz", 1266),
    ("time with time zone", 1266),
    ("bit", 1560),
    ("varbit", 1562),
    ("bit varying", 1562),
    ("numeric", 1700),
    ("decimal", 1700),
    ("uuid", 2950),
    ("jsonb", 3802),
];

/// Returns the OID of a built-in type; `None` for any other name.
pub(crate) fn type_oid(name: &str) -> Option<u32> {
    TYPES
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(name))
        .map(|(_, oid)| *oid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_either_name() {
        for (name, oid) in [("numeric", 1700), ("DECIMAL", 1700), ("Boolean", 16)] {
            assert_eq!(type_oid(name), Some(oid), "{name}");
        }
        assert_eq!(type_oid("number"), None);
        let names: std::collections::HashSet<_> = TYPES.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), TYPES.len());
    }
}
