//! The readers of this database: whether a node receives changes that this one has from others
//! (`origin => 'any'`).
//!
//! A reader registers when its stream starts, and is known by its slot from then on, until the
//! server stops. A slot that has not registered yet may be such a reader. So work for forwarded
//! changes is done from the slot's first position on.
//!
//! A transaction must ask once it has an id. A slot exists, with its plugin, before PostgreSQL
//! determines the running transactions, and it sends none of these. So each transaction that a slot
//! sends has asked later, and finds the slot.

use std::ffi::CStr;
use std::sync::atomic::Ordering;

pub use braid_bgworker::reader::Reader;
use braid_bgworker::reader::word;
use braid_bgworker::slot_name;
use braid_postgres::{plain, process};
use pgrx::pg_sys;

use crate::registry;

/// The bytes of a name up to its end.
fn text(name: &pg_sys::NameData) -> Vec<u8> {
    let bytes = name.data.iter().map(|byte| byte.cast_unsigned());
    bytes.take_while(|byte| *byte != 0).collect()
}

/// Stores the wishes of the reader of this process's slot, by the slot's place and name.
pub fn note(place: usize, name: &CStr, reader: Reader) {
    if let Some(known) = registry::readers().and_then(|readers| readers.get(place)) {
        known.store(word(name.to_bytes(), reader), Ordering::SeqCst);
    }
}

/// Whether a node that reads from this one may receive changes that this one has from others.
#[must_use]
pub fn passes_on() -> bool {
    passing().next().is_some()
}

/// Names of the slots through which it may receive them.
#[must_use]
pub fn passing_slots() -> Vec<String> {
    let names = passing().map(|name| String::from_utf8_lossy(&name).into_owned());
    names.collect()
}

fn passing() -> impl Iterator<Item = Vec<u8>> {
    // The array is set when shared memory is.
    let slots = plain::ReplicationSlotCtl();
    let count = usize::try_from(plain::max_replication_slots()).unwrap_or(0);
    let count = if slots.is_null() { 0 } else { count };
    let here = process::my_database();
    let own = slot_name::of_collector(here);
    (0..count).filter_map(move |place| {
        // SAFETY: there are so many. Other processes may write meanwhile. A slot's description is
        // complete before it is in use, but for its plugin, and then does not change. A slot that
        // is created or dropped at this moment is none through which this transaction is sent.
        let (database, name, plugin) = unsafe {
            let slot = (&raw mut (*slots).replication_slots)
                .cast::<pg_sys::ReplicationSlot>()
                .add(place);
            if !(&raw const (*slot).in_use).read_volatile() {
                return None;
            }
            let data = &raw const (*slot).data;
            (
                (&raw const (*data).database).read_volatile(),
                (&raw const (*data).name).read_volatile(),
                (&raw const (*data).plugin).read_volatile(),
            )
        };
        if database.to_u32() != here || text(&plugin) != b"braid" {
            return None;
        }
        let name = text(&name);
        let known = registry::readers().and_then(|readers| readers.get(place));
        let known = known.map_or(0, |known| known.load(Ordering::SeqCst));
        (name != own.as_bytes() && known != word(&name, Reader::Rest)).then_some(name)
    })
}
