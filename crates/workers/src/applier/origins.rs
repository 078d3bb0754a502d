//! The replication origins that an applier stamps its commits with: one for each node whose changes
//! it applies. Outside of transactions.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use braid_bgworker::sqlstate::SqlState;
use braid_gir::Begin;
use braid_node::origin::{self, OriginId};
use braid_node::registry::SubscriptionEntry;
use braid_postgres::error::{self, PgError};

/// The origins that were looked up.
pub(super) struct Origins {
    subscription_id: u32,
    provider: String,
    /// Number of the applier.
    number: usize,
    entry: &'static SubscriptionEntry,
    /// This applier's, by node.
    own: HashMap<String, OriginId>,
    /// All of the subscription's for nodes; as of a version of the tables' states.
    all: (u32, HashMap<String, Rc<[OriginId]>>),
}

impl Origins {
    /// None was looked up.
    pub(super) fn new(
        (subscription_id, provider): (u32, &str),
        number: usize,
        entry: &'static SubscriptionEntry,
    ) -> Self {
        Self {
            subscription_id,
            provider: provider.to_owned(),
            number,
            entry,
            own: HashMap::new(),
            all: (0, HashMap::new()),
        }
    }

    /// Stamps the next commit with the origin that stands for the node of `begin`.
    pub(super) fn use_that_of(&mut self, begin: &Begin<'_>) -> Result<(), PgError> {
        let node = if begin.origin.is_empty() {
            self.provider.as_str()
        } else {
            begin.origin
        };
        if let Some(origin) = self.own.get(node) {
            return origin::use_for_commits(*origin);
        }
        let node = node.to_owned();
        let origin = self.find(&node)?;
        self.own.insert(node, origin);
        origin::use_for_commits(origin)
    }

    /// Stamps the next commit with the origin that stands for the provider.
    pub(super) fn use_that_of_provider(&mut self) -> Result<(), PgError> {
        let provider = std::mem::take(&mut self.provider);
        let found = match self.own.get(&provider) {
            Some(origin) => Ok(*origin),
            None => self.find(&provider),
        };
        self.provider = provider;
        let origin = found?;
        self.own.insert(self.provider.clone(), origin);
        origin::use_for_commits(origin)
    }

    /// This applier's origin for a node; made when it is the first change of that node.
    fn find(&self, node: &str) -> Result<OriginId, PgError> {
        let (id, number) = (self.subscription_id, self.number);
        let found = error::transaction(|| {
            origin::ensure(id, node, number + 1)?;
            origin::at_place(id, node, number)?
                .ok_or_else(|| PgError::new(SqlState::InternalError, "no replication origin"))
        })?;
        // Then the other appliers read all origins again.
        self.entry.tables_version.fetch_add(1, Ordering::AcqRel);
        Ok(found)
    }

    /// The origins of rows that the stream has brought before, of the node of `begin`.
    pub(super) fn all_of(
        &mut self,
        begin: &Begin<'_>,
        tables_version: u32,
    ) -> Result<Rc<[OriginId]>, PgError> {
        let node = if begin.origin.is_empty() {
            self.provider.as_str()
        } else {
            begin.origin
        };
        let (as_of, known) = &mut self.all;
        if *as_of != tables_version {
            known.clear();
            *as_of = tables_version;
        }
        if let Some(origins) = known.get(node) {
            return Ok(Rc::clone(origins));
        }
        let id = self.subscription_id;
        let origins: Rc<[OriginId]> = Rc::from(error::transaction(|| origin::all_of(id, node))?);
        known.insert(node.to_owned(), Rc::clone(&origins));
        Ok(origins)
    }
}
