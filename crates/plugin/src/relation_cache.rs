//! Relations that a stream has used, compiled for its format, until an invalidation says that they
//! may differ. Run by processes that decode WAL.
//!
//! Not for: how a relation is compiled, which is the format's.

use std::collections::HashMap;

use braid_decoder::Publication;

use super::invalidation::Notes;
use super::publications;
use super::report::or_raise;

/// How many relations are remembered. Beyond it all are forgotten and compiled anew when they come.
const REMEMBERED_RELATIONS: usize = 16_384;

/// A relation as a format needs it.
pub(super) trait Compilation {
    /// Whether the noted invalidations concern the relation, beyond its own OID.
    fn is_touched(&self, notes: &Notes) -> bool;

    /// Frees PostgreSQL's allocations. Not done by dropping: when the plugin's own context goes,
    /// the memory of the compilation has gone before.
    fn release(self);
}

/// A relation, compiled or known to be of no interest; and the format's data that stays when it is
/// compiled again.
#[derive(Debug)]
pub(super) struct Entry<C, K> {
    stale: bool,
    pub(super) compiled: Option<C>,
    pub(super) kept: K,
}

/// The relations of one stream, by their OIDs.
#[derive(Debug)]
pub(super) struct RelationCache<C, K = ()> {
    entries: HashMap<u32, Entry<C, K>>,
    /// Loaded with the first change, and again after an invalidation.
    publications: Option<Vec<Publication>>,
}

impl<C: Compilation, K: Default> RelationCache<C, K> {
    /// None yet.
    pub(super) fn new() -> Self {
        Self {
            entries: HashMap::new(),
            publications: None,
        }
    }

    /// Marks the entries that an invalidation concerns.
    pub(super) fn forget(&mut self, notes: &Notes) {
        if notes.everything {
            self.publications = None;
        }
        for (relation, entry) in &mut self.entries {
            let compiled = entry.compiled.as_ref();
            entry.stale |= notes.everything
                || notes.relations.contains(relation)
                || compiled.is_some_and(|compiled| compiled.is_touched(notes));
        }
    }

    /// The entry of a relation, if there is one.
    #[inline]
    pub(super) fn get(&mut self, oid: u32) -> Option<&mut Entry<C, K>> {
        self.entries.get_mut(&oid)
    }

    /// All entries.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry<C, K>> {
        self.entries.values()
    }

    /// Whether a relation need not be compiled.
    #[inline]
    pub(super) fn is_current(&self, oid: u32) -> bool {
        self.entries.get(&oid).is_some_and(|entry| !entry.stale)
    }

    /// Forgets all if too many are remembered. Whether it has.
    pub(super) fn make_room(&mut self) -> bool {
        let is_full = self.entries.len() >= REMEMBERED_RELATIONS;
        if is_full {
            let compiled = self.entries.drain().filter_map(|(_, entry)| entry.compiled);
            compiled.for_each(C::release);
        }
        is_full
    }

    /// The publications with these names. A missing one is an error.
    pub(super) fn publications(&mut self, names: &[String]) -> &[Publication] {
        self.publications
            .get_or_insert_with(|| or_raise(publications::load(names)))
    }

    /// Remembers a relation as it was compiled just now. `None`: it is of no interest.
    pub(super) fn remember(&mut self, oid: u32, compiled: Option<C>) -> &mut Entry<C, K> {
        let entry = self.entries.entry(oid).or_insert_with(|| Entry {
            stale: false,
            compiled: None,
            kept: K::default(),
        });
        entry.stale = false;
        if let Some(before) = std::mem::replace(&mut entry.compiled, compiled) {
            before.release();
        }
        entry
    }
}
