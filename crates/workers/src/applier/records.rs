//! Passes records of the current transaction to the session that applies them, with the schemas
//! that they name.

use braid_apply::{Identity, Item, Session, is_rule, is_statement, is_versions, tables_of};
use braid_bgworker::sqlstate::SqlState;
use braid_decoder::REPLACED_PREFIX;
use braid_gir::{Begin, Change, Reader, Record, StreamHeader, Tag, Truncate};
use braid_node::subscription::Subscription;
use braid_postgres::encoding;
use braid_postgres::error::{self, PgError};

use super::Applier;
use super::piece::Part;
use super::post::Trouble;

/// 08P01: a record comes where there can be none of its kind. There is a session once a stream has
/// begun.
pub(super) fn out_of_order() -> PgError {
    PgError::new(
        SqlState::ProtocolViolation,
        "records from the provider are out of order",
    )
}

/// The note of versions with which a transaction begins, whose other records follow.
fn versions_of(mut reader: Reader<'_>) -> Result<Option<Vec<u8>>, Trouble> {
    while let Some((tag, body)) = reader.next_raw()? {
        if matches!(tag, Tag::Schema | Tag::StreamHeader) {
            continue;
        }
        if tag == Tag::Message
            && let Record::Message(message) = Record::read(tag, body)?
            && is_versions(&message)
        {
            return Ok(Some(message.content.to_vec()));
        }
        return Ok(None);
    }
    Ok(None)
}

impl Applier {
    pub(super) fn frame(
        &mut self,
        frame: &[u8],
        split: Option<u64>,
        begun: &mut bool,
        end_lsn: &mut Option<u64>,
    ) -> Result<(), Trouble> {
        self.records(frame, begun, end_lsn, |applier, begin| {
            if let Some(sequence) = split {
                applier.resume(sequence, begin)?;
            }
            applier.begin(begin, false)?;
            Ok(true)
        })
    }

    /// Applies the records of a frame. `begin` handles a Begin; if it returns false, the rest of
    /// the frame is not applied.
    pub(super) fn records(
        &mut self,
        frame: &[u8],
        begun: &mut bool,
        end_lsn: &mut Option<u64>,
        mut start: impl FnMut(&mut Self, &Begin<'_>) -> Result<bool, Trouble>,
    ) -> Result<(), Trouble> {
        let mut reader = Reader::new(frame);
        let mut gathered = Vec::new();
        let mut replaced = None;
        while let Some((tag, body)) = reader.next_raw()? {
            // Schemas come through the log.
            if matches!(tag, Tag::Schema | Tag::StreamHeader) {
                continue;
            }
            match Record::read(tag, body)? {
                Record::Begin(begin) if !*begun => {
                    self.in_hand.attempt.versions = versions_of(reader.clone())?;
                    if !start(self, &begin)? {
                        return Ok(());
                    }
                    *begun = true;
                }
                Record::BeginPrepared(prepared) if !*begun => {
                    if !self.begin_prepared(&prepared)? {
                        *end_lsn = Some(prepared.end_lsn);
                        return Ok(());
                    }
                    if !start(self, &prepared.begin)? {
                        return Ok(());
                    }
                    if let Some(session) = self.session.as_mut() {
                        session.expect_prepare();
                    }
                    *begun = true;
                }
                Record::Commit(commit) | Record::Prepare(commit) if *begun => {
                    *end_lsn = Some(commit.end_lsn);
                }
                Record::CommitPrepared(prepared) if !*begun => {
                    self.end_prepared(&prepared, None)?;
                    *end_lsn = Some(prepared.end_lsn);
                }
                Record::RollbackPrepared(rollback) if !*begun => {
                    self.end_prepared(&rollback.prepared, Some(&rollback))?;
                    *end_lsn = Some(rollback.prepared.end_lsn);
                }
                Record::Change(change) if *begun => {
                    self.take_change(change, replaced.take(), &mut gathered)?;
                }
                Record::Truncate(truncate) if *begun => {
                    self.apply_consolidated(&mut gathered)?;
                    self.take_truncate(&truncate)?;
                }
                Record::Message(message) if *begun => {
                    if is_versions(&message) {
                        self.take_versions(message.content)?;
                    } else if is_rule(&message) {
                        self.apply_consolidated(&mut gathered)?;
                        let session = self.session.as_mut().ok_or_else(out_of_order)?;
                        session.take_rule(message.content)?;
                    } else if is_statement(&message) {
                        self.apply_consolidated(&mut gathered)?;
                        self.take_statement(message.content)?;
                    } else if message.prefix == REPLACED_PREFIX {
                        replaced = Some(message.content);
                    }
                }
                _ => return Err(out_of_order().into()),
            }
        }
        self.apply_consolidated(&mut gathered)
    }

    /// Takes a change of the current transaction: applies it, or gathers it first if many changes
    /// of a row are to become one. `replaced` is the content of the message that came with it.
    pub(super) fn take_change<'a>(
        &mut self,
        change: Change<'a>,
        replaced: Option<&'a [u8]>,
        gathered: &mut Vec<Item<'a>>,
    ) -> Result<(), Trouble> {
        self.know(change.header.schema.0)?;
        if let Some(pieces) = &self.in_hand.attempt.pieces {
            if pieces.is_full() {
                self.apply_consolidated(gathered)?;
            }
            if !self.take(&Part::Change(&change))? {
                return Ok(());
            }
        }
        if self.in_hand.guarding {
            let header = &change.header;
            self.guard(header.schema.0, header.barrier, header.writeset.hashes())?;
        }
        // A transaction that has failed once is applied without consolidation.
        if self.consolidate && self.in_hand.attempt.bulk && !self.in_hand.check_other_keys {
            gathered.push(Item::Change(0, change, replaced));
        } else {
            let session = self.session.as_mut().ok_or_else(out_of_order)?;
            session.replaces(change.operation, replaced);
            session.change(&change)?;
        }
        Ok(())
    }

    pub(super) fn take_truncate(&mut self, truncate: &Truncate<'_>) -> Result<(), Trouble> {
        for schema in truncate.schemas() {
            self.know(schema.0)?;
        }
        if self.in_hand.attempt.pieces.is_some() && !self.take(&Part::Truncate(truncate))? {
            return Ok(());
        }
        if self.in_hand.guarding {
            for schema in truncate.schemas() {
                self.guard(schema.0, true, [])?;
            }
        }
        let session = self.session.as_mut().ok_or_else(out_of_order)?;
        session.truncate(truncate)?;
        Ok(())
    }

    /// Takes a statement that changes the schema.
    fn take_statement(&mut self, content: &[u8]) -> Result<(), Trouble> {
        if self.in_hand.attempt.pieces.is_some() && !self.take(&Part::Statement(content))? {
            return Ok(());
        }
        if self.in_hand.guarding {
            self.guard_tables(&tables_of(content)?)?;
        }
        let Self {
            session,
            subscription,
            ..
        } = self;
        let session = session.as_mut().ok_or_else(out_of_order)?;
        session.statement(content, subscription)?;
        Ok(())
    }

    /// Applies the gathered changes of the current transaction.
    pub(super) fn apply_consolidated(
        &mut self,
        gathered: &mut Vec<Item<'_>>,
    ) -> Result<(), Trouble> {
        if !gathered.is_empty() {
            let session = self.session.as_mut().ok_or_else(out_of_order)?;
            session.consolidate(gathered)?;
        }
        gathered.clear();
        Ok(())
    }

    /// Read the schema log on if a schema is not known yet.
    pub(super) fn know(&mut self, schema: u32) -> Result<(), PgError> {
        if self
            .session
            .as_ref()
            .is_some_and(|session| session.knows(schema))
        {
            return Ok(());
        }
        self.read_log()
    }

    pub(super) fn read_log(&mut self) -> Result<(), PgError> {
        let Self {
            group,
            log,
            session,
            subscription,
            local_node,
            ..
        } = self;
        group.read_log(log, |entry| {
            let mut reader = Reader::new(entry);
            while let Some(record) = reader.next_record()? {
                match record {
                    Record::StreamHeader(header) => {
                        *session = Some(new_session(subscription, local_node, &header)?);
                    }
                    Record::Schema(schema) => {
                        if let Some(session) = session.as_mut() {
                            session.learn(&schema);
                        }
                    }
                    _ => {}
                }
            }
            Ok(())
        })
    }
}

/// A session of a stream, whose encoding becomes this process's `client_encoding`.
pub(super) fn new_session(
    subscription: &Subscription,
    local_node: &str,
    header: &StreamHeader<'_>,
) -> Result<Session, PgError> {
    let charset = encoding::number_of(header.charset).ok_or_else(|| {
        PgError::new(
            SqlState::ProtocolViolation,
            format!(
                "charset \"{}\" of the stream is not known here",
                header.charset
            ),
        )
    })?;
    // Outside of a transaction the conversion could not be looked up.
    error::transaction(|| {
        if encoding::set_client_encoding(charset) {
            return Ok(());
        }
        Err(PgError::new(
            SqlState::FeatureNotSupported,
            format!(
                "no conversion from the provider's encoding \"{}\"",
                header.charset
            ),
        ))
    })?;
    Ok(Session::new(Identity {
        subscription_id: subscription.id,
        subscription: subscription.name.clone(),
        run_as: subscription
            .options
            .run_as_owner
            .then_some(subscription.owner),
        local_node: local_node.to_owned(),
        provider: subscription.provider.clone(),
        charset,
        ignores_missing: subscription.options.ignores_missing(),
    }))
}
