//! Relations that a stream of the format `gir` has used, and the numbers under which their shapes
//! were sent. Run by processes that decode WAL.

use std::collections::HashSet;

use braid_decoder::{Options, Outbox, SchemaBook, Shape};
use braid_gir::SchemaNumber;
use braid_postgres::relation::RelationRef;

use super::invalidation;
use super::own_table::OwnTable;
use super::relation::{Compiled, Hashed};
use super::relation_cache::{self, RelationCache};
use super::report::or_raise;
use super::scratch::{Scratch, StreamMemory};

/// A relation, compiled or known not to be published.
pub(super) type Entry = relation_cache::Entry<Compiled, Sent>;

/// The part of a relation's description that was sent.
#[derive(Debug, Default)]
pub(super) struct Sent {
    /// Under which number the shape was sent.
    pub(super) number: Option<SchemaNumber>,
    /// The sources of the key hashes of the last changes.
    hashed: Option<Hashed>,
    /// The relation has other keys than before, so hashes from before and after can't be compared:
    /// the next change is a barrier.
    pub(super) fence: bool,
    /// The relation is one of Braid's tables whose rows are messages.
    pub(super) own: Option<OwnTable>,
}

/// The relations of one stream.
pub(super) struct Relations {
    cache: RelationCache<Compiled, Sent>,
    book: SchemaBook,
    /// Relations were forgotten for want of room, which costs a schema record each.
    forgot: bool,
    /// Types without a portable form are written in their text form.
    text_forms: bool,
    /// Parent of the memory contexts of compiled relations.
    context: StreamMemory,
}

impl Relations {
    /// None yet.
    pub(super) fn new(text_forms: bool, context: StreamMemory) -> Self {
        Self {
            cache: RelationCache::new(),
            book: SchemaBook::default(),
            forgot: false,
            text_forms,
            context,
        }
    }

    /// Marks the entries that an invalidation concerns.
    pub(super) fn forget(&mut self, notes: &invalidation::Notes) {
        self.cache.forget(notes);
    }

    /// The entry of a relation, if there is one, and the book of the schemas that were announced.
    #[inline]
    pub(super) fn get(&mut self, oid: u32) -> Option<(&mut Entry, &mut SchemaBook)> {
        let entry = self.cache.get(oid)?;
        Some((entry, &mut self.book))
    }

    /// Once in a while, if nothing waits that refers to others: the schemas that may come again.
    #[inline]
    pub(super) fn schemas_in_use(&mut self, outbox: &mut Outbox) -> Option<HashSet<SchemaNumber>> {
        if !self.book.has_many_new() || !outbox.writer().is_empty() {
            return None;
        }
        let numbers = self.cache.entries().filter_map(|entry| entry.kept.number);
        Some(self.book.in_use(numbers))
    }

    /// Bring the relation's entry up to date. Returns its OID. In a transaction with a historic
    /// snapshot.
    #[inline]
    pub(super) fn refresh(
        &mut self,
        relation: RelationRef<'_>,
        options: &Options,
        scratch: &Scratch,
    ) -> u32 {
        let oid = relation.oid().to_u32();
        if !self.cache.is_current(oid) {
            self.compile(relation, oid, options, scratch);
        }
        oid
    }

    #[cold]
    fn compile(
        &mut self,
        relation: RelationRef<'_>,
        oid: u32,
        options: &Options,
        scratch: &Scratch,
    ) {
        if self.cache.make_room() {
            self.book.forget();
            self.forgot = true;
        }
        // Temporary allocations are in the scratch memory.
        let compiled = scratch.run(|| {
            if !relation.is_publishable() {
                return None;
            }
            let publications = self.cache.publications(&options.publications);
            let member = options.node.as_deref();
            let mut compiled = Compiled::new(
                relation,
                publications,
                member,
                self.text_forms,
                self.context,
            )?;
            if options.ddl {
                compiled.add_marks();
            }
            Some(compiled)
        });
        let own = match compiled {
            Some(_) => None,
            None => OwnTable::of(relation),
        };
        let entry = self.cache.remember(oid, compiled);
        let sent = &mut entry.kept;
        sent.own = own;
        sent.number = None;
        let hashed = entry.compiled.as_ref().map(Compiled::hashed);
        if hashed.is_some() && sent.hashed != hashed {
            // A forgotten relation may have had any keys.
            sent.fence |= sent.hashed.is_some() || self.forgot;
            sent.hashed = hashed;
        }
    }
}

/// The number of the relation's schema, announced before its first use.
#[inline]
pub(super) fn announce(
    outbox: &mut Outbox,
    book: &mut SchemaBook,
    number: &mut Option<SchemaNumber>,
    shape: &Shape,
) -> SchemaNumber {
    *number.get_or_insert_with(|| or_raise(book.announce(shape, outbox.writer())))
}
