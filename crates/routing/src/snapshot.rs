//! Bytes of the whole state, for nodes that get it in place of the entries that made it.
//!
//! The bytes: format (u8, 1), last `Close` (i64), number of tables (u32). For each table: name,
//! expressions, whether it is open (u8), its last `Close` (i64), version of the hash (u8), number
//! of shards (u32), sets, home of each shard, tenants of rules, rules by time and spread with the
//! hashes of their tenants.

use std::collections::BTreeMap;

use crate::entry::{self, Expressions};
use crate::hash::{HASH_VERSION, TenantHash};
use crate::map::ShardMap;
use crate::routing::{RoutedTable, Routing, TABLES_LIMIT};
use crate::rules::{Rule, RuleList, STEPS_LIMIT, Spread, Time};
use braid_codec::{Malformed, Reader, Writer};

const FORMAT: u8 = 1;
/// The state's name in errors.
const WHAT: &str = "state of routing";

impl Routing {
    /// The state's bytes. Equal states have equal bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u8(FORMAT)
            .i64(self.closed().0)
            .count(self.tables().count());
        for (name, table) in self.tables() {
            w.bytes(name.as_bytes());
            table.expressions.write(&mut w);
            w.u8(u8::from(table.is_open()))
                .i64(table.closed().0)
                .u8(HASH_VERSION)
                .u32(table.map().shards().get());
            table.map().write(&mut w);
            w.count(table.tenants.len());
            for tenant in table.tenants.values() {
                w.bytes(tenant.canonical());
            }
            let rules = table.rules().rules();
            w.count(rules.len());
            for rule in rules {
                w.i64(rule.time.0).u32(rule.spread.get());
                w.count(rule.tenants.len());
                for tenant in rule.tenants {
                    w.u64(tenant.0);
                }
            }
        }
        w.done()
    }

    /// The state with these bytes.
    ///
    /// # Errors
    /// [`Malformed::UnknownVersion`] if a newer Braid wrote them, or has routed a table with
    /// another hash; others for bad bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::versioned(bytes, WHAT, FORMAT)?;
        let mut routing = Self::closed_at(Time(r.i64()?));
        for _ in 0..r.count(TABLES_LIMIT)? {
            let name = entry::table(&mut r)?;
            let expressions = Expressions::read(&mut r)?;
            let open = r.bool()?;
            let closed = Time(r.i64()?);
            let shards = entry::shards(&mut r)?;
            let map = ShardMap::read(shards, &mut r)?;
            let mut tenants = BTreeMap::new();
            for _ in 0..r.count(STEPS_LIMIT)? {
                let tenant = entry::tenant(&mut r)?;
                tenants.insert(tenant.tenant_hash(), tenant);
            }
            let rules = rules(&mut r)?;
            let table = RoutedTable {
                expressions,
                open,
                closed,
                rules,
                tenants,
                map,
            };
            routing.put(name, table);
        }
        r.end()?;
        // Order, repeats and what follows from other values: there is one form of a state.
        if routing.encode() == bytes {
            Ok(routing)
        } else {
            Err(Malformed::Invalid("order"))
        }
    }
}

fn rules(r: &mut Reader<'_>) -> Result<RuleList, Malformed> {
    let mut rules = Vec::new();
    for _ in 0..r.count(STEPS_LIMIT)? {
        let time = entry::time(r)?;
        let spread = Spread::new(r.u32()?).map_err(|_| Malformed::Invalid("spread"))?;
        let tenants = (0..r.count(STEPS_LIMIT)?)
            .map(|_| r.u64().map(TenantHash))
            .collect::<Result<_, _>>()?;
        rules.push(Rule {
            time,
            spread,
            tenants,
        });
    }
    RuleList::of(&rules).map_err(|_| Malformed::TooMany {
        what: WHAT,
        limit: STEPS_LIMIT,
    })
}
