//! Names of replication origins.

/// Returns the node of a replication origin's name: `braid/<node>/<number>`. Other names are
/// returned as they are.
#[must_use]
pub fn node_of_origin(name: &str) -> &str {
    name.strip_prefix("braid/")
        .and_then(|rest| rest.rsplit_once('/'))
        .map_or(name, |(node, _)| node)
}

/// Fewest digits of an origin's number, which follows the OID of its database.
const NUMBER_DIGITS: usize = 4;
/// Most digits: a server has fewer than 65,536 origins.
const MOST_DIGITS: usize = 5;

/// Returns the digits behind the node in the name of one of Braid's origins: the OID of its
/// database, and its number. `None` for other names.
fn digits(name: &str) -> Option<&str> {
    let (node, digits) = name.strip_prefix("braid/")?.rsplit_once('/')?;
    let is_number = digits.len() > NUMBER_DIGITS
        && !digits.starts_with('0')
        && digits.bytes().all(|digit| digit.is_ascii_digit());
    (!node.is_empty() && is_number).then_some(digits)
}

/// Returns the number in the digits of an origin's name if they begin with the OID of this
/// database.
fn number_below(digits: &str, database: u32) -> Option<&str> {
    let number = digits.strip_prefix(&database.to_string())?;
    let is_usual =
        number.len() == NUMBER_DIGITS || (number.len() == MOST_DIGITS && !number.starts_with('0'));
    is_usual.then_some(number)
}

/// Returns whether an origin's name has the form of Braid's origins.
#[must_use]
pub fn is_ours(name: &str) -> bool {
    digits(name).is_some()
}

/// Returns whether an origin belongs to this database: `braid/<node>/<OID><four digits>`. False if
/// the number has more digits, as these may belong to another database's OID.
#[must_use]
pub fn is_of_database(name: &str, database: u32) -> bool {
    digits(name)
        .and_then(|digits| number_below(digits, database))
        .is_some_and(|number| number.len() == NUMBER_DIGITS)
}

/// Returns whether one of Braid's origins belongs to none of these databases.
#[must_use]
pub fn is_left_behind(name: &str, databases: &[u32]) -> bool {
    digits(name).is_some_and(|digits| {
        let mut databases = databases.iter();
        !databases.any(|database| number_below(digits, *database).is_some())
    })
}

#[cfg(test)]
mod tests {
    use super::{is_left_behind, is_of_database, node_of_origin};

    #[test]
    fn origins_belong_to_databases() {
        for (name, database, is_own) in [
            ("braid/paris/163940000", 16_394, true),
            ("braid/paris/163940012", 16_394, true),
            ("braid/paris/163940000", 16_395, false),
            // Number 10,000 of database 16394, or number 0 of database 1639410?
            ("braid/paris/1639410000", 16_394, false),
            ("braid/paris/50000", 5, true),
            ("braid/paris/500010000", 5, false),
            ("braid/paris/16394", 16_394, false),
            ("braid/osaka/1", 1, false),
            ("braid/number/0", 5, false),
            ("braid/163940000", 16_394, false),
            ("pg_16394", 16_394, false),
        ] {
            assert_eq!(is_of_database(name, database), is_own, "{name} {database}");
        }
    }

    #[test]
    fn origins_of_databases_that_are_gone() {
        let databases = [1, 5, 16_394];
        for (name, is_left) in [
            ("braid/paris/163940000", false),
            ("braid/paris/1639410000", false),
            ("braid/paris/163950000", true),
            ("braid/a/b/163950000", true),
            ("braid/paris/50000", false),
            ("braid/paris/500010000", true),
            // Not in the form of Braid's origins.
            ("braid/paris/16395", false),
            ("braid/osaka/1", false),
            ("braid/paris/16395000x", false),
            ("braid/number/163950000x", false),
            ("by hand", false),
            ("pg_16395", false),
        ] {
            assert_eq!(is_left_behind(name, &databases), is_left, "{name}");
        }
        assert!(is_left_behind("braid/paris/163940000", &[]));
    }

    #[test]
    fn origins_stand_for_nodes() {
        assert_eq!(node_of_origin("braid/paris/0"), "paris");
        assert_eq!(node_of_origin("pg_16394"), "pg_16394");
    }
}
