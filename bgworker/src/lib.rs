//! The decisions of the background workers: dependencies, conflicts, reactions to errors, progress.
//!
//! The processes are in `crates/workers`, which carries the decisions out together with
//! `crates/apply`. This crate is pure Rust. Everything in it is a function of its arguments and is
//! tested without a server.
#![forbid(unsafe_code)]

pub mod aggregate;
pub mod applied;
pub mod breadth;
pub mod busy_time;
pub mod column_rule;
pub mod commit_block;
pub mod commit_sequence;
pub mod compare;
pub mod concurrency;
pub mod conflict;
pub mod consolidate;
pub mod contact;
pub mod copied_position;
pub mod copy_query;
pub mod crash;
pub mod ddl;
pub mod dependency;
pub mod dictionary;
pub mod hex;
pub mod joining;
pub mod keeping;
pub mod key_columns;
pub mod keyless;
pub mod lease;
pub mod lock_circle;
pub mod membership;
pub mod merge;
pub mod origin_name;
pub mod parked;
pub mod policy;
pub mod progress;
pub mod provider_snapshot;
pub mod publishing;
pub mod rate;
pub mod reader;
pub mod reason;
pub mod remedy;
pub mod resolution;
pub mod resumption;
pub mod routing_copy;
pub mod running;
pub mod scaling;
pub mod sequence;
pub mod skew;
pub mod slot_name;
pub mod snowflake;
pub mod split;
pub mod sql_text;
pub mod sqlstate;
pub mod subscription_option;
pub mod table_order;
pub mod taking;
pub mod throughput;
