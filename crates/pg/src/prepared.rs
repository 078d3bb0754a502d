//! Names of transactions that are prepared here for a subscription.
//!
//! `braid_<database OID>_<subscription>_<transaction at the provider>`: all databases of a server share one list of prepared transactions, and of
//! those that are not finished each has another number at the provider.

use std::ffi::CString;

use crate::registry;

/// What the names of all of a subscription's begin with, in the database in hand.
#[must_use]
pub fn prefix(subscription_id: u32) -> String {
    format!("braid_{}_{subscription_id}_", registry::my_database())
}

/// The name of a transaction that has this id at the provider.
pub(crate) fn gid(subscription_id: u32, xid: u32) -> CString {
    CString::new(format!("{}{xid}", prefix(subscription_id))).unwrap_or_default()
}
