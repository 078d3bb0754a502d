//! The decisions of the output plugin: which changes are published, how a row is identified, which
//! keys order it.
//!
//! Pure Rust, called through ports that `crates/plugin` implements: [`Catalog`] for publications,
//! [`KeyValues`] for the values of keys, [`FrameSink`] for finished frames. The process is the
//! provider's walsender, or the backend that calls `pg_logical_slot_get_binary_changes`.
//!
//! Not for: reading tuples or catalogs (`crates/plugin`), the bytes of a record (`crates/gir`),
//! applying (`bgworker`).
#![forbid(unsafe_code)]

mod calendar;
mod error;
mod guard;
mod hash;
mod numeric;
mod options;
mod origin;
mod outbox;
mod publication;
mod replaced;
mod request;
mod row_filter;
mod shape;
pub mod wal2json;
mod writeset;

pub use calendar::{date_to_datetime, timestamp_to_datetime, timestamptz_to_value, to_unix_micros};
pub use error::{Error, Result};
pub use guard::{guard_function, is_plain_guard};
pub use hash::KeyHasher;
pub use numeric::Numeric;
pub use options::{OptionText, Options};
pub use origin::{Only, OriginPolicy, Source, classify};
pub use outbox::{
    FrameSink, Outbox, POSITION_PREFIX, REPLACED_PREFIX, RULE_PREFIX, Transaction, VERSIONS_PREFIX,
};
pub use publication::{
    Actions, Catalog, Columns, Filter, GeneratedColumns, Publication, Publishing, RelationFacts,
    publishing,
};
pub use replaced::{ReplacedVersions, Writers, Written, full_id};
pub use request::{JsonRequest, Request, Selection};
pub use row_filter::{Passed, transform};
pub use shape::{SchemaBook, Shape, ShapeColumn, ShapeKey};
pub use writeset::{Fed, Images, KeyPlan, KeyValues, UniqueKey, collect};
