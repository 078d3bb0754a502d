//! Records which entries of the caches are invalid.
//!
//! PostgreSQL calls back whenever a catalog changed, in the middle of anything, also while a
//! relation is being compiled. The callbacks only take notes, without allocating; the plugin reads
//! them before it uses an entry again. A callback can't be unregistered, so the notes belong to the
//! process and outlive a stream.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

use braid_postgres::{relation, syscache};
use pgrx::pg_sys;

/// Notes beyond this number mean "everything".
const QUEUE: usize = 64;

/// Any note at all.
static PENDING: AtomicBool = AtomicBool::new(false);
static EVERYTHING: AtomicBool = AtomicBool::new(false);
static ENUMS: AtomicBool = AtomicBool::new(false);
static ORIGINS: AtomicBool = AtomicBool::new(false);
static RELATIONS: Queue = Queue::new();
static TYPES: Queue = Queue::new();

struct Queue {
    items: [AtomicU32; QUEUE],
    len: AtomicUsize,
}

impl Queue {
    const fn new() -> Self {
        Self {
            items: [const { AtomicU32::new(0) }; QUEUE],
            len: AtomicUsize::new(0),
        }
    }

    fn push(&self, item: u32) {
        let len = self.len.load(Relaxed);
        match self.items.get(len) {
            Some(slot) => {
                slot.store(item, Relaxed);
                self.len.store(len + 1, Relaxed);
            }
            None => EVERYTHING.store(true, Relaxed),
        }
        PENDING.store(true, Relaxed);
    }

    fn take(&self) -> Vec<u32> {
        let len = self.len.swap(0, Relaxed);
        self.items
            .iter()
            .take(len)
            .map(|item| item.load(Relaxed))
            .collect()
    }
}

/// The invalidations since the last call.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Publications, schemas or too much to list: every relation is to be compiled again.
    pub(super) everything: bool,
    /// Labels of enums.
    pub(super) enums: bool,
    /// Names of replication origins.
    pub(super) origins: bool,
    /// Relations, by OID.
    pub(super) relations: Vec<u32>,
    /// Types, by the hash value of their entry in the type cache.
    pub(super) types: Vec<u32>,
}

/// Take the notes, if there are any.
#[inline]
pub(super) fn take() -> Option<Notes> {
    if !PENDING.load(Relaxed) {
        return None;
    }
    PENDING.store(false, Relaxed);
    Some(Notes {
        everything: EVERYTHING.swap(false, Relaxed),
        enums: ENUMS.swap(false, Relaxed),
        origins: ORIGINS.swap(false, Relaxed),
        relations: RELATIONS.take(),
        types: TYPES.take(),
    })
}

/// Register the callbacks, once in the life of a process.
pub(super) fn listen() {
    static LISTENING: AtomicBool = AtomicBool::new(false);
    if LISTENING.swap(true, Relaxed) {
        return;
    }
    relation::on_invalidation(relation_changed);
    for cache in [
        pg_sys::SysCacheIdentifier::PUBLICATIONOID,
        pg_sys::SysCacheIdentifier::PUBLICATIONRELMAP,
        pg_sys::SysCacheIdentifier::PUBLICATIONNAMESPACEMAP,
        pg_sys::SysCacheIdentifier::NAMESPACEOID,
    ] {
        syscache::on_change(cache, |_| note(&EVERYTHING));
    }
    syscache::on_change(pg_sys::SysCacheIdentifier::TYPEOID, type_changed);
    syscache::on_change(pg_sys::SysCacheIdentifier::ENUMOID, |_| note(&ENUMS));
    syscache::on_change(pg_sys::SysCacheIdentifier::REPLORIGIDENT, |_| {
        note(&ORIGINS);
    });
}

fn note(change: &AtomicBool) {
    change.store(true, Relaxed);
    PENDING.store(true, Relaxed);
}

/// Called by PostgreSQL; an OID of 0 stands for all relations.
fn relation_changed(relation: pg_sys::Oid) {
    if relation == pg_sys::InvalidOid {
        note(&EVERYTHING);
    } else {
        RELATIONS.push(relation.to_u32());
    }
}

/// Called by PostgreSQL; a hash value of 0 stands for the whole catalog.
fn type_changed(hash: u32) {
    if hash == 0 {
        note(&EVERYTHING);
    } else {
        TYPES.push(hash);
    }
}
