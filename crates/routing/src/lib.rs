//! Routing: which nodes of a group have a row, agreed by the group's log alone.
//!
//! A table of many tenants is spread over shards, and shards over node sets. A small tenant is on
//! one shard. A rule spreads a hot tenant over more shards: only rows that are created after the
//! rule's time, so no row moves. This crate decides, and knows no server.
//!
//! ```text
//! shard = (h1(tenant) + h2(record) mod L) mod N       N shards; L from the rules, else 1
//! ```
//!
//! # A scenario
//!
//! Nodes A, B and C route `orders` with 64 shards. Tenant 42 becomes hot. Without agreement, A
//! could place an order by the new rule, and B could look for it by the old one.
//!
//! 1. At 12:00:00.0 the group's leader appends `Close(12:00:02.0)`: no rule will ever count from a
//!    time at or before that. A, B and C apply it. All create rows dated up to 12:00:02.0 and know
//!    their places for ever.
//! 2. A user adds a rule for tenant 42 with spread 8. It gets the first time after the last
//!    `Close`: 12:00:02.000001. A and B apply it; C is cut off.
//! 3. The leader appends `Close(12:00:02.5)`. A and B apply it. Each node that applies it has the
//!    rule, because the log has the rule earlier.
//! 4. At 12:00:02.1 A inserts an order. Its time is after the rule's, so L is 8.
//! 5. C's clock shows 12:00:02.1 too. C has applied no `Close` at or after that time, so C creates
//!    no row: it waits ([`Admission::WaitForClose`]). A read on C asks all nodes
//!    ([`ReadBound::Everywhere`]) and finds A's order.
//! 6. B updates an order of 11:59. The rule's time is not before that, so L is 1, as it was when
//!    the order was inserted.
//! 7. C is back, applies the log, and does what A and B do.
//!
//! No node had to answer: a node that is down holds up no rule. If a rule competes with a `Close`,
//! the log's order decides, and a rule whose time is closed is refused ([`Refusal::Closed`]).
//!
//! # What is assumed
//!
//! - Where a row is placed relies on the log alone, not on clocks.
//! - That a read finds all rows without a bound relies on clocks being at most [`Window`]'s skew
//!   apart. The node adds it before it relies on its rules.
//! - If the leader's clock is ahead by a minute, the next rule counts a minute late. If it is
//!   behind by more than the window, rows wait and reads ask all nodes.
//! - A table's tenant, record and creation of one row never change without the row being moved.
//!   Every unique key has all columns that these three use.
//!
//! | module | holds |
//! |---|---|
//! | `key` | values, their types and canonical bytes |
//! | `hash` | `h1` and `h2` (`docs/routing-hash.md`) |
//! | `rules` | spreads, rules, the shard of a row, the shards of a read |
//! | `map` | node sets, the home of each shard, moves |
//! | `window` | what a node may create and rely on; when the leader closes |
//! | `routing` | what the log has made of all of this |
//! | `balancer`, `sketch` | which tenants get a rule, from counts of their writes |
//! | `shared_sketch` | these counts in shared memory |
//! | `mode` | whether the balancer of a table advises or adds rules |
//! | `report` | the bytes of counts and decisions |
//! | `dsn` | connection strings for clients |
//! | `entry`, `snapshot` | entries of the log, the whole state, and their bytes |
//!
//! Tests: `properties` over random values, rules, moves and bytes; `simulation` over nodes that
//! apply the log late; `model` over every schedule of a few steps, and with each guard removed;
//! `vectors` for the hash, its page and its example in Python.
#![forbid(unsafe_code)]

mod balancer;
pub mod dsn;
mod entry;
mod hash;
mod key;
mod map;
mod mode;
#[cfg(test)]
mod model;
#[cfg(test)]
mod properties;
mod report;
mod routing;
mod rules;
mod shared_sketch;
#[cfg(test)]
mod simulation;
mod sketch;
mod snapshot;
#[cfg(test)]
mod vectors;
mod window;

pub use balancer::{BadSettings, Balancer, Basis, Decision, Finding, Proposal, Settings};
pub use braid_codec::Malformed;
pub use entry::{
    ENTRY_LIMIT, EXPRESSION_LIMIT, Entry, Expressions, MoveStep, TABLE_LIMIT, TableName,
};
pub use hash::{HASH_VERSION, RecordHash, TENANT_LIMIT, Tenant, TenantHash};
pub use key::{HashError, Key, KeyType, Number};
pub use map::{
    Move, MoveError, NODES_LIMIT, NodeId, NodeSet, Phase, QueryRoute, Route, SETS_LIMIT, SetId,
    ShardMap,
};
pub use mode::{Balanced, Mode};
pub use report::{DECISION_LIMIT, Decided, REPORT_LIMIT, Report};
pub use routing::{Applied, Refusal, RoutedTable, Routing, TABLES_LIMIT};
pub use rules::{
    Invalid, Rule, RuleList, Run, SHARDS_LIMIT, STEPS_LIMIT, Shard, Shards, Spread, Time,
};
pub use shared_sketch::SharedSketch;
pub use sketch::{COUNTERS_LIMIT, Counter, Sketch};
pub use window::{Admission, Pacer, ReadBound, Window};
