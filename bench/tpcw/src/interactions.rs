//! The fourteen interactions: their declarations as the scripts have them, and the three mixes.

use std::collections::BTreeMap;

use braid_versions::{Access, TableNumber};

/// The tables, in the order of their numbers.
pub const TABLES: [&str; 10] = [
    "country",
    "author",
    "item",
    "address",
    "customer",
    "orders",
    "order_line",
    "cc_xacts",
    "shopping_cart",
    "shopping_cart_line",
];

/// A mix of interactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// 95 % of the interactions look at items.
    Browsing,
    /// 80 % do.
    Shopping,
    /// 50 % do.
    Ordering,
}

/// The mixes, in the order of the columns of `mixes`.
pub const MIXES: [Mix; 3] = [Mix::Browsing, Mix::Shopping, Mix::Ordering];

impl Mix {
    /// Returns the mix's name in figures.
    pub const fn name(self) -> &'static str {
        ["browsing", "shopping", "ordering"][self as usize]
    }
}

/// One interaction.
#[derive(Debug, Clone)]
pub struct Interaction {
    /// The name of its script.
    pub name: String,
    /// The declared tables.
    pub tables: BTreeMap<TableNumber, Access>,
    /// The share of each mix, in hundredths of a percent.
    pub shares: [u64; 3],
    /// Statements that a client sends.
    pub statements: u64,
    /// A table that it declares as written and releases in most cases, and in how many of a
    /// hundred.
    pub releases: Option<(TableNumber, u64)>,
}

impl Interaction {
    /// Whether it may write.
    pub fn writes(&self) -> bool {
        self.tables.values().any(|access| *access == Access::Write)
    }

    /// The table that it reads, if it is a single read.
    pub fn single(&self) -> Option<TableNumber> {
        let (table, access) = self.tables.first_key_value()?;
        (self.tables.len() == 1 && *access == Access::Read).then_some(*table)
    }
}

macro_rules! scripts {
    ($($name:literal $releases:expr;)*) => {
        [$(($name, include_str!(concat!("../sql/", $name, ".sql")), $releases)),*]
    };
}

fn table(name: &str) -> TableNumber {
    let place = TABLES.iter().position(|table| *table == name);
    TableNumber(place.expect("a script declares a table that there is not") as u32)
}

fn declared(text: &str) -> BTreeMap<TableNumber, Access> {
    let line = text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("-- "));
    let mut tables = BTreeMap::new();
    for part in line.unwrap_or_default().split("; ") {
        let (access, names) = match part.split_once(' ') {
            Some(("read", names)) => (Access::Read, names),
            Some(("write", names)) => (Access::Write, names),
            _ => continue,
        };
        for name in names.split(", ") {
            tables.insert(table(name), access);
        }
    }
    tables
}

/// All interactions.
pub fn all() -> Vec<Interaction> {
    let scripts = scripts! {
        "home" None;
        "new_products" None;
        "best_sellers" None;
        "product_detail" None;
        "search_request" None;
        "search_results" None;
        "shopping_cart" None;
        "customer_registration" None;
        "buy_request" Some(("address", 80));
        "buy_confirm" Some(("address", 95));
        "order_inquiry" None;
        "order_display" None;
        "admin_request" None;
        "admin_response" None;
    };
    let mixes = include_str!("../mixes");
    let interaction = |(name, text, releases): (&str, &str, Option<(&str, u64)>)| {
        let line = mixes
            .lines()
            .find(|line| line.split_whitespace().next() == Some(name));
        let line = line.expect("each interaction has shares");
        let shares: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .map(|n| n.parse().unwrap())
            .collect();
        let tables = declared(text);
        // A client skips a branch, and begins and commits.
        let sent = text.lines().filter(|line| line.ends_with(';')).count() as u64;
        let skipped = text.matches("\\el").count() as u64;
        Interaction {
            name: name.to_owned(),
            statements: sent - skipped + if tables.is_empty() { 0 } else { 2 },
            tables,
            shares: [shares[0], shares[1], shares[2]],
            releases: releases.map(|(name, of)| (table(name), of)),
        }
    };
    scripts.into_iter().map(interaction).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Table 1 of the report: tables read, tables written.
    const REPORT: [(&str, &str, &str); 14] = [
        ("admin_request", "item author", ""),
        ("admin_response", "author orders order_line", "item"),
        ("best_sellers", "item order_line author", ""),
        (
            "buy_request",
            "shopping_cart_line country item",
            "customer address",
        ),
        (
            "buy_confirm",
            "customer country",
            "shopping_cart_line order_line item address cc_xacts orders",
        ),
        ("customer_registration", "customer", ""),
        ("home", "customer item", ""),
        ("new_products", "item author", ""),
        ("order_inquiry", "", ""),
        (
            "order_display",
            "customer order_line country item address cc_xacts orders",
            "",
        ),
        ("product_detail", "item author", ""),
        ("search_request", "item", ""),
        ("search_results", "item author", ""),
        ("shopping_cart", "item", "shopping_cart_line shopping_cart"),
    ];

    #[test]
    fn scripts_declare_what_the_report_says() {
        let all = all();
        assert_eq!(all.len(), REPORT.len());
        for (name, reads, writes) in REPORT {
            let found = all
                .iter()
                .find(|interaction| interaction.name == name)
                .unwrap();
            let reads = reads
                .split_whitespace()
                .map(|name| (table(name), Access::Read));
            let writes = writes
                .split_whitespace()
                .map(|name| (table(name), Access::Write));
            assert_eq!(found.tables, reads.chain(writes).collect(), "{name}");
        }
    }

    #[test]
    fn mixes_have_the_shares_of_the_report() {
        let looks = [
            "home",
            "new_products",
            "best_sellers",
            "product_detail",
            "search_request",
            "search_results",
        ];
        for (mix, share) in MIXES.into_iter().zip([9_500, 8_000, 5_000]) {
            let of = |interaction: &Interaction| interaction.shares[mix as usize];
            assert_eq!(all().iter().map(of).sum::<u64>(), 10_000);
            let looking = all();
            let looking = looking.iter().filter(|i| looks.contains(&i.name.as_str()));
            let sum: u64 = looking.map(of).sum();
            // The shares of the ordering mix are rounded.
            assert!(sum.abs_diff(share) <= 4, "{}: {sum}", mix.name());
        }
    }

    #[test]
    fn single_reads_read_one_table() {
        let all = all();
        let single = all
            .iter()
            .filter(|interaction| interaction.single().is_some());
        let names: Vec<&str> = single
            .map(|interaction| interaction.name.as_str())
            .collect();
        assert_eq!(names, ["search_request", "customer_registration"]);
    }
}
