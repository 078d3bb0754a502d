//! Names of replication origins.

/// Node of a replication origin's name: `braid/<node>/<number>`. Other names stand for themselves.
#[must_use]
pub fn node_of_origin(name: &str) -> &str {
    name.strip_prefix("braid/")
        .and_then(|rest| rest.rsplit_once('/'))
        .map_or(name, |(node, _)| node)
}

#[cfg(test)]
mod tests {
    use super::node_of_origin;

    #[test]
    fn origins_stand_for_nodes() {
        assert_eq!(node_of_origin("braid/paris/0"), "paris");
        assert_eq!(node_of_origin("pg_16394"), "pg_16394");
    }
}
