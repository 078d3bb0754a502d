//! Writes the changes of the format `gir`: rows, truncates, and the messages in rows of the
//! extension's own tables.

use braid_bgworker::hex;
use braid_decoder::{OriginPolicy, Outbox, REPLACED_PREFIX, RULE_PREFIX, VERSIONS_PREFIX};
use braid_gir::{DDL_PREFIX, Message, Operation, Statement};
use braid_postgres::relation::Described;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::displacement;
use super::format::{Change, Truncation};
use super::node::Identity;
use super::own_table::{self, OwnTable};
use super::relations::announce;
use super::report::{self, or_raise};
use super::row_change::RowChange;
use super::running::Unwatched;
use super::session::ServerEncoding;
use super::stream::GirStream;
use super::unfound::{self, Unfound};

/// In a transaction with a historic snapshot.
impl GirStream {
    /// Write a row's change, unless nothing of it is published. Returns whether something was
    /// written.
    pub(super) fn put_row(&mut self, change: &Change<'_>) -> bool {
        let &Change {
            relation,
            action,
            old,
            new,
            lsn,
            author,
        } = change;
        let oid = self.refresh(relation);
        // Filters, hashes and output functions may ask the type cache.
        let _unwatched = self.may_be_rolled_back().then(Unwatched::enter);
        let Self {
            outbox,
            relations,
            tools,
            old: old_slots,
            new: new_slots,
            keys,
            replaced,
            replaced_now,
            tally,
            ..
        } = self;
        let Some((entry, book)) = relations.get(oid) else {
            return false;
        };
        if let Some(own) = entry.kept.own {
            // An own table's row has no replaced version of the row that it describes.
            replaced_now.clear();
            return self.put_own(own, change);
        }
        let Some(compiled) = &entry.compiled else {
            return false;
        };
        let (operation, published) = match action {
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT => {
                (Operation::Insert, compiled.actions.insert)
            }
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_UPDATE => {
                (Operation::Update, compiled.actions.update)
            }
            pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE => {
                (Operation::Delete, compiled.actions.delete)
            }
            _ => return false,
        };
        // A delete without an old row can't be identified: PostgreSQL refuses such a delete when
        // the table is published at that moment, so it was not, and pgoutput leaves it out as well.
        // An update or insert always has its new row.
        let old = old.filter(|_| operation != Operation::Insert);
        let new = new.filter(|_| operation != Operation::Delete);
        let (has_old, has_new) = (old.is_some(), new.is_some());
        if !published || (operation == Operation::Delete) == has_new || !(has_old || has_new) {
            return false;
        }
        let (Ok(old), Ok(new)) = (
            old_slots.fill_any(old, &compiled.attributes),
            new_slots.fill_any(new, &compiled.attributes),
        ) else {
            report::fail(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!(
                    "decoded tuple of table \"{}\" is not valid",
                    compiled.shape.name
                ),
                None,
            );
        };
        let change = RowChange {
            compiled,
            tools,
            operation,
            old,
            new,
        };
        let Some(operation) = change.passes(tally) else {
            return false;
        };
        let barrier = change.collect_keys(keys) | entry.kept.fence;
        if outbox.wants_header() {
            let identity = tools.scratch.run(Identity::read);
            or_raise(outbox.writer().stream_header(&identity.header()));
            outbox.header_written();
        }
        let schema = announce(outbox, book, &mut entry.kept.number, &compiled.shape);
        or_raise(outbox.ensure_begun(author.xid));
        let text = compiled.sends_text.then(ServerEncoding::enter);
        let _encoding = text.flatten();
        if operation == Operation::Insert {
            replaced_now.clear();
            if replaced.is_some() {
                change.put_former_key(replaced_now);
            }
        }
        tell_before(outbox, lsn, replaced_now);
        change.write(operation, outbox, schema, barrier, keys);
        // Not before: of a transaction that is rolled back while it is decoded, this may have ended
        // in an error that is none.
        entry.kept.fence = false;
        true
    }

    /// Writes the message of a row of the extension's own tables. Returns whether something was
    /// written.
    fn put_own(&mut self, own: OwnTable, change: &Change<'_>) -> bool {
        match own {
            OwnTable::DdlMessage => self.put_statement(change),
            OwnTable::Displacement => self.put_displacement(change),
            OwnTable::RuleChange => self.put_rule_change(change),
            OwnTable::Unfound => self.put_unfound(change),
            OwnTable::VersionRecord => self.put_versions(change),
        }
    }

    /// Writes the deletion that a deleted row of `braid.displacement` announces, with the version
    /// in that row: the transaction has nothing else. Returns whether something was written.
    #[cold]
    fn put_displacement(&mut self, change: &Change<'_>) -> bool {
        if change.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE
            || !change.has_old()
        {
            return false;
        }
        let Some(displaced) = self.tools.scratch.run(|| displacement::read(change)) else {
            return false;
        };
        let Some(relation) = Described::find(displaced.relation) else {
            // Dropped since, with all of its rows.
            return false;
        };
        if !self.outbox.begun() && !self.outbox.in_segment() {
            let transaction = self.outbox.transaction();
            transaction.commit_timestamp = displaced.timestamp;
            transaction.origin = displaced.origin;
        }
        self.put_row(&Change {
            relation: relation.view(),
            old: Some(displaced.row.view()),
            ..*change
        })
    }

    /// Writes the message that a new row of `braid.ddl_message` is, if the reader wants statements
    /// and has a publication that the statement concerns. Returns whether something was written.
    #[cold]
    fn put_statement(&mut self, change: &Change<'_>) -> bool {
        if change.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT
            || !change.has_new()
            || !self.options.ddl
        {
            return false;
        }
        let read = || own_table::message(change);
        let Some(content) = self
            .tools
            .scratch
            .run(read)
            .and_then(|digits| hex::decode(&digits))
        else {
            return false;
        };
        let Ok(statement) = Statement::read(&content) else {
            report::fail(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                "a row of braid.ddl_message is not valid".to_owned(),
                None,
            );
        };
        if !statement.concerns(&self.options.publications)
            || Some(statement.node.as_str()) == self.options.node.as_deref()
        {
            return false;
        }
        self.ensure_header();
        or_raise(self.outbox.ensure_begun(change.author.xid));
        or_raise(self.outbox.writer().message(&Message {
            transactional: true,
            lsn: change.lsn,
            prefix: DDL_PREFIX,
            content: &content,
        }));
        true
    }

    /// Write the message that a new row of `braid.rule_change` is, to another node. Returns whether
    /// something was written.
    #[cold]
    fn put_rule_change(&mut self, change: &Change<'_>) -> bool {
        if change.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT
            || !change.has_new()
            || self.options.node.is_none()
        {
            return false;
        }
        let Some(content) = self.tools.scratch.run(|| own_table::message(change)) else {
            return false;
        };
        self.ensure_header();
        or_raise(self.outbox.ensure_begun(change.author.xid));
        or_raise(self.outbox.writer().message(&Message {
            transactional: true,
            lsn: change.lsn,
            prefix: RULE_PREFIX,
            content: content.as_bytes(),
        }));
        true
    }

    /// Writes the message that a new row of `braid.version_record` is, to another node. Returns
    /// whether something was written.
    #[cold]
    fn put_versions(&mut self, change: &Change<'_>) -> bool {
        if change.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT
            || !change.has_new()
            || self.options.node.is_none()
        {
            return false;
        }
        let read = || own_table::message(change);
        let Some(digits) = self.tools.scratch.run(read) else {
            return false;
        };
        let Some(content) = hex::decode(&digits) else {
            report::fail(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                "a row of braid.version_record is not valid".to_owned(),
                None,
            );
        };
        self.ensure_header();
        or_raise(self.outbox.ensure_begun(change.author.xid));
        or_raise(self.outbox.writer().message(&Message {
            transactional: true,
            lsn: change.lsn,
            prefix: VERSIONS_PREFIX,
            content: &content,
        }));
        true
    }

    /// Writes the deletion, or the truncate, that a new row of `braid.unfound` describes, for a
    /// node that wants changes of other nodes. Returns whether something was written.
    #[cold]
    fn put_unfound(&mut self, change: &Change<'_>) -> bool {
        if change.action != pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_INSERT
            || !change.has_new()
            || self.options.node.is_none()
            || self.options.origin != OriginPolicy::Any
        {
            return false;
        }
        match self.tools.scratch.run(|| unfound::read(change)) {
            None => false,
            Some(Unfound::Deletion(oid, row)) => {
                let Some(relation) = Described::find(oid) else {
                    // Dropped since, with all of its rows.
                    return false;
                };
                self.put_row(&Change {
                    relation: relation.view(),
                    action: pg_sys::ReorderBufferChangeType::REORDER_BUFFER_CHANGE_DELETE,
                    old: Some(row.view()),
                    new: None,
                    ..*change
                })
            }
            Some(Unfound::Truncate {
                relations,
                restart_identity,
            }) => {
                let opened: Vec<_> = relations.into_iter().filter_map(Described::find).collect();
                let views: Vec<_> = opened.iter().map(Described::view).collect();
                self.put_truncation(&Truncation {
                    relations: &views,
                    cascade: false,
                    restart_identity,
                    lsn: change.lsn,
                    author: change.author,
                })
            }
        }
    }

    /// Write a truncate of those relations that are published. Returns whether there is one.
    pub(super) fn put_truncation(&mut self, truncation: &Truncation<'_>) -> bool {
        let mut numbers = Vec::new();
        for relation in truncation.relations {
            let oid = self.refresh(*relation);
            let entry = self.relations.get(oid);
            let concerned = entry.and_then(|(entry, _)| entry.compiled.as_ref());
            // An ancestor under whose name changes are sent is in the list itself if it was
            // truncated.
            if !concerned.is_some_and(|compiled| compiled.actions.truncate && !compiled.by_ancestor)
            {
                continue;
            }
            self.ensure_header();
            if let Some((entry, book)) = self.relations.get(oid)
                && let Some(compiled) = &entry.compiled
            {
                let number = &mut entry.kept.number;
                numbers.push(announce(&mut self.outbox, book, number, &compiled.shape));
            }
        }
        if numbers.is_empty() {
            return false;
        }
        or_raise(self.outbox.ensure_begun(truncation.author.xid));
        let (cascade, restart) = (truncation.cascade, truncation.restart_identity);
        or_raise(self.outbox.writer().truncate(cascade, restart, &numbers));
        true
    }
}

/// Writes a message that belongs to the next change, unless it is empty: the version of the row
/// that an update or a delete has replaced, or the former key of a row that is sent as an insert.
fn tell_before(outbox: &mut Outbox, lsn: u64, content: &[u8]) {
    if content.is_empty() {
        return;
    }
    or_raise(outbox.writer().message(&Message {
        transactional: true,
        lsn,
        prefix: REPLACED_PREFIX,
        content,
    }));
}
