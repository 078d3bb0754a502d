//! Boundaries of transactions and of segments: which one is open, which objects are allowed, and
//! the records of boundaries.

use super::{JsonReader, Member, Node, read_lsn, text};
use crate::json::error::{Inside, JsonErrorKind, Result};
use crate::json::value::read_timestamp;
use crate::prepared::{Prepared, RollbackPrepared};
use crate::record::Writer;
use crate::segment::{Abort, SegmentStart, StreamedCommit};
use crate::transaction::{Begin, Commit};

/// Operations that only occur in a stream with uncommitted transactions.
const UNCOMMITTED: [&str; 10] = [
    "segment_start",
    "segment_end",
    "subtransaction",
    "abort",
    "streamed_commit",
    "begin_prepared",
    "prepare",
    "streamed_prepare",
    "commit_prepared",
    "rollback_prepared",
];

/// The open transaction or segment.
#[derive(Debug, Default)]
pub(super) enum Open {
    /// None is open.
    #[default]
    Nothing,
    /// A committed transaction.
    Transaction {
        transaction: Transaction,
        /// There was no begin object, so there need not be a commit object either.
        implied: bool,
    },
    /// A transaction that is prepared with this global id.
    Prepared {
        transaction: Transaction,
        gid: String,
    },
    /// A segment of a transaction that may still run.
    Segment(Running),
}

/// Fields of a transaction in its objects.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Transaction {
    xid: u32,
    lsn: u64,
    commit_time: i64,
    origin: String,
    origin_lsn: u64,
}

impl Transaction {
    fn begin(&self) -> Begin<'_> {
        Begin {
            commit_lsn: self.lsn,
            commit_timestamp: self.commit_time,
            xid: self.xid,
            origin: &self.origin,
            origin_lsn: self.origin_lsn,
        }
    }
}

/// The transaction and subtransaction whose changes a segment contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Running {
    xid: u32,
    subxid: u32,
}

/// The members that tell which transaction an object belongs to.
pub(super) struct Within<'m, 'a> {
    pub(super) transaction: &'m Member<'a>,
    pub(super) prepared: &'m Member<'a>,
    pub(super) running: &'m Member<'a>,
}

impl Within<'_, '_> {
    /// Refuses these members, in an object that belongs to no transaction.
    pub(super) fn refuse(&self, why: &'static str) -> Result<()> {
        let kind = JsonErrorKind::OutOfOrder(why);
        self.refuse_of(&["transaction", "prepared", "running"], &kind)
    }

    fn refuse_of(&self, names: &[&str], kind: &JsonErrorKind) -> Result<()> {
        for (name, member) in [
            ("transaction", self.transaction),
            ("prepared", self.prepared),
            ("running", self.running),
        ] {
            if let Some(given) = member.given().filter(|_| names.contains(&name)) {
                return Err(given.error(kind.clone()).inside(name));
            }
        }
        Ok(())
    }
}

/// Reports an error for the whole object.
fn whole<T>(node: &Node<'_>, result: std::result::Result<T, JsonErrorKind>) -> Result<T> {
    result.map_err(|kind| node.error(kind))
}

fn written(node: &Node<'_>, result: crate::Result<()>) -> Result<()> {
    whole(node, result.map_err(JsonErrorKind::Record))
}

impl JsonReader {
    /// Returns whether the operation is one of a boundary, which this module reads.
    pub(super) fn is_boundary(word: &str) -> bool {
        matches!(word, "begin" | "commit") || UNCOMMITTED.contains(&word)
    }

    /// Refuses operations of uncommitted transactions if the reader accepts only committed ones.
    pub(super) fn check_committed(&self, word: &str) -> std::result::Result<(), JsonErrorKind> {
        if self.committed_only && UNCOMMITTED.contains(&word) {
            return Err(JsonErrorKind::Uncommitted);
        }
        Ok(())
    }

    /// Ends the text, and with it a transaction without a begin object.
    pub(super) fn close(&mut self, out: &mut Writer) -> std::result::Result<(), JsonErrorKind> {
        self.end_implied(out)?;
        match self.open {
            Open::Nothing => Ok(()),
            Open::Segment(_) => Err(JsonErrorKind::OutOfOrder("segment has no end")),
            Open::Transaction { .. } | Open::Prepared { .. } => {
                Err(JsonErrorKind::OutOfOrder("transaction has no end"))
            }
        }
    }

    pub(super) fn boundary(&mut self, word: &str, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        match word {
            "begin" => self.begin(node, out),
            "commit" => self.commit(node, out),
            "segment_start" => self.segment_start(node, out),
            "segment_end" => self.segment_end(node, out),
            "subtransaction" => self.subtransaction(node, out),
            "abort" => self.abort(node, out),
            "streamed_commit" => self.streamed_commit(node, out),
            "begin_prepared" => self.begin_prepared(node, out),
            "prepare" => self.prepare(node, out),
            "rollback_prepared" => self.rollback_prepared(node, out),
            _ => self.step(word, node, out),
        }
    }

    /// Checks that an object stands outside of all transactions and segments.
    fn outside(&mut self, node: &Node<'_>, why: &'static str, out: &mut Writer) -> Result<()> {
        whole(node, self.end_implied(out))?;
        if matches!(self.open, Open::Nothing) {
            return Ok(());
        }
        Err(node.error(JsonErrorKind::OutOfOrder(why)))
    }

    fn begin(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "transaction" => transaction);
        let transaction = required_transaction(&transaction, node)?;
        self.outside(node, "transaction begins inside another", out)?;
        whole(node, self.start(transaction, false, out))
    }

    fn start(
        &mut self,
        transaction: Transaction,
        implied: bool,
        out: &mut Writer,
    ) -> std::result::Result<(), JsonErrorKind> {
        out.begin(&transaction.begin())
            .map_err(JsonErrorKind::Record)?;
        self.open = Open::Transaction {
            transaction,
            implied,
        };
        Ok(())
    }

    fn end_implied(&mut self, out: &mut Writer) -> std::result::Result<(), JsonErrorKind> {
        if let Open::Transaction {
            transaction: Transaction {
                lsn, commit_time, ..
            },
            implied: true,
        } = self.open
        {
            self.open = Open::Nothing;
            out.commit(&Commit {
                commit_lsn: lsn,
                end_lsn: lsn,
                commit_timestamp: commit_time,
            })
            .map_err(JsonErrorKind::Record)?;
        }
        Ok(())
    }

    fn commit(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "lsn" => lsn, "end_lsn" => end,
            "commit_time" => time);
        let Open::Transaction {
            transaction: Transaction { lsn: open, .. },
            implied: false,
        } = self.open
        else {
            return Err(node.error(JsonErrorKind::OutOfOrder("commit outside of a transaction")));
        };
        self.open = Open::Nothing;
        let time = (&time, "commit_time");
        let why = "commit is of another transaction";
        let commit = read_end(node, (&lsn, &end), time, (open, why))?;
        written(node, out.commit(&commit))
    }

    fn begin_prepared(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        let (transaction, end_lsn, gid) = read_step(node)?;
        self.outside(node, "transaction begins inside another", out)?;
        let prepared = Prepared {
            begin: transaction.begin(),
            end_lsn,
            gid: &gid,
        };
        written(node, out.begin_prepared(&prepared))?;
        self.open = Open::Prepared { transaction, gid };
        Ok(())
    }

    fn prepare(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "lsn" => lsn, "end_lsn" => end,
            "prepare_time" => time);
        let Open::Prepared {
            transaction: Transaction { lsn: open, .. },
            ..
        } = self.open
        else {
            let kind = JsonErrorKind::OutOfOrder("prepare outside of a prepared transaction");
            return Err(node.error(kind));
        };
        self.open = Open::Nothing;
        let time = (&time, "prepare_time");
        let why = "prepare is of another transaction";
        let prepare = read_end(node, (&lsn, &end), time, (open, why))?;
        written(node, out.prepare(&prepare))
    }

    fn segment_start(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "xid" => xid, "first" => first);
        let given = first.required(node, "first")?;
        let first = given.boolean().inside("first")?;
        let xid = read_xid(&xid, node, "xid")?;
        let why = "segment starts inside a transaction or another segment";
        self.outside(node, why, out)?;
        if first != self.running.insert(xid) {
            let kind = JsonErrorKind::OutOfOrder(if first {
                "segments of this transaction came before"
            } else {
                "no segment of this transaction came before"
            });
            return Err(given.error(kind).inside("first"));
        }
        self.open = Open::Segment(Running { xid, subxid: xid });
        written(node, out.segment_start(SegmentStart { first, xid }))
    }

    fn segment_end(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation);
        if !matches!(self.open, Open::Segment(_)) {
            let kind = JsonErrorKind::OutOfOrder("segment ends that has not started");
            return Err(node.error(kind));
        }
        self.open = Open::Nothing;
        written(node, out.segment_stop())
    }

    fn subtransaction(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "xid" => xid);
        let subxid = read_xid(&xid, node, "xid")?;
        let Open::Segment(running) = &mut self.open else {
            let kind = JsonErrorKind::OutOfOrder("subtransaction outside of a segment");
            return Err(node.error(kind));
        };
        running.subxid = subxid;
        written(node, out.subtransaction(subxid))
    }

    fn abort(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "xid" => xid, "subxid" => subxid);
        let abort = Abort {
            xid: read_xid(&xid, node, "xid")?,
            subxid: read_xid(&subxid, node, "subxid")?,
        };
        let why = "abort stands inside a transaction or segment";
        self.outside(node, why, out)?;
        if abort.xid == abort.subxid {
            self.streamed(abort.xid, node)?;
        } else if !self.running.contains(&abort.xid) {
            return Err(no_segment(node));
        }
        written(node, out.abort(abort))
    }

    fn streamed_commit(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "transaction" => transaction, "end_lsn" => end);
        let transaction = required_transaction(&transaction, node)?;
        let end_lsn = read_lsn(&end.required(node, "end_lsn")?).inside("end_lsn")?;
        let why = "commit stands inside a transaction or segment";
        self.outside(node, why, out)?;
        self.streamed(transaction.xid, node)?;
        let begin = transaction.begin();
        written(
            node,
            out.streamed_commit(&StreamedCommit { begin, end_lsn }),
        )
    }

    /// Reads a step of a prepared transaction, except its rollback.
    fn step(&mut self, word: &str, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        let (transaction, end_lsn, gid) = read_step(node)?;
        let prepared = Prepared {
            begin: transaction.begin(),
            end_lsn,
            gid: &gid,
        };
        if word == "streamed_prepare" {
            let why = "prepare stands inside a transaction or segment";
            self.outside(node, why, out)?;
            self.streamed(transaction.xid, node)?;
            return written(node, out.streamed_prepare(&prepared));
        }
        let why = "commit stands inside a transaction or segment";
        self.outside(node, why, out)?;
        // After its PREPARE was confirmed, segments of the transaction may have come once more.
        self.running.remove(&transaction.xid);
        written(node, out.commit_prepared(&prepared))
    }

    fn rollback_prepared(&mut self, node: &Node<'_>, out: &mut Writer) -> Result<()> {
        members!(node, "operation" => _operation, "transaction" => transaction, "end_lsn" => end,
            "gid" => gid, "prepare_end_lsn" => prepare_end, "prepare_time" => time);
        let (transaction, end_lsn, gid) = read_prepared(node, (&transaction, &end, &gid))?;
        let prepare_end = prepare_end.required(node, "prepare_end_lsn")?;
        let time = time.required(node, "prepare_time")?;
        let rollback = RollbackPrepared {
            prepared: Prepared {
                begin: transaction.begin(),
                end_lsn,
                gid: &gid,
            },
            prepare_end_lsn: read_lsn(&prepare_end).inside("prepare_end_lsn")?,
            prepare_timestamp: read_timestamp(&time).inside("prepare_time")?,
        };
        let why = "rollback stands inside a transaction or segment";
        self.outside(node, why, out)?;
        self.running.remove(&transaction.xid);
        written(node, out.rollback_prepared(&rollback))
    }

    /// Ends a transaction that came in segments.
    fn streamed(&mut self, xid: u32, node: &Node<'_>) -> Result<()> {
        if self.running.remove(&xid) {
            return Ok(());
        }
        Err(no_segment(node))
    }

    /// Enters the transaction of an object: the current one, or the one that its member names.
    pub(super) fn enter(
        &mut self,
        node: &Node<'_>,
        within: &Within<'_, '_>,
        out: &mut Writer,
    ) -> Result<()> {
        if self.committed_only {
            within.refuse_of(&["prepared", "running"], &JsonErrorKind::Uncommitted)?;
        }
        let refuse = |names: &[&str], why| within.refuse_of(names, &JsonErrorKind::OutOfOrder(why));
        let other = || JsonErrorKind::OutOfOrder("record is of another transaction");
        if let Open::Segment(open) = &self.open {
            refuse(&["transaction", "prepared"], "record is inside a segment")?;
            return match within.running.given() {
                Some(given) if read_running(&given).inside("running")? != *open => {
                    Err(given.error(other()).inside("running"))
                }
                _ => Ok(()),
            };
        }
        refuse(&["running"], "record is outside of a segment")?;
        let given = match within.transaction.given() {
            Some(given) => Some((given, read_transaction(&given).inside("transaction")?)),
            None => None,
        };
        if let Open::Prepared {
            transaction: open,
            gid,
        } = &self.open
        {
            return match (given, within.prepared.given()) {
                (Some(_), None) => Err(node.error(JsonErrorKind::Missing("prepared"))),
                (Some((given, transaction)), _) if transaction != *open => {
                    Err(given.error(other()).inside("transaction"))
                }
                (_, Some(name)) if name.string().inside("prepared")? != *gid => {
                    Err(name.error(other()).inside("prepared"))
                }
                _ => Ok(()),
            };
        }
        refuse(&["prepared"], "record is outside of a prepared transaction")?;
        let Some((given, transaction)) = given else {
            return match self.open {
                Open::Transaction { implied: false, .. } => Ok(()),
                _ => Err(node.error(JsonErrorKind::Missing("transaction"))),
            };
        };
        match &self.open {
            Open::Transaction {
                transaction: open, ..
            } if *open == transaction => return Ok(()),
            Open::Transaction { implied: false, .. } => {
                return Err(given.error(other()).inside("transaction"));
            }
            _ => {}
        }
        let started = self
            .end_implied(out)
            .and_then(|()| self.start(transaction, true, out));
        whole(node, started)
    }
}

fn no_segment(node: &Node<'_>) -> crate::json::JsonError {
    node.error(JsonErrorKind::OutOfOrder(
        "no segment of this transaction came before",
    ))
}

/// Reads the end of the open transaction, which is the one at `open`.
fn read_end(
    node: &Node<'_>,
    (lsn, end): (&Member<'_>, &Member<'_>),
    (time, time_name): (&Member<'_>, &'static str),
    (open, why): (u64, &'static str),
) -> Result<Commit> {
    let time = time.required(node, time_name)?;
    let lsn = lsn.required(node, "lsn")?;
    let commit = Commit {
        commit_lsn: read_lsn(&lsn).inside("lsn")?,
        end_lsn: read_lsn(&end.required(node, "end_lsn")?).inside("end_lsn")?,
        commit_timestamp: read_timestamp(&time).inside(time_name)?,
    };
    if commit.commit_lsn != open {
        return Err(lsn.error(JsonErrorKind::OutOfOrder(why)).inside("lsn"));
    }
    Ok(commit)
}

/// Reads the transaction, end LSN and global id of an object.
fn read_step(node: &Node<'_>) -> Result<(Transaction, u64, String)> {
    members!(node, "operation" => _operation, "transaction" => transaction, "end_lsn" => end,
        "gid" => gid);
    read_prepared(node, (&transaction, &end, &gid))
}

fn read_prepared(
    node: &Node<'_>,
    (transaction, end, gid): (&Member<'_>, &Member<'_>, &Member<'_>),
) -> Result<(Transaction, u64, String)> {
    Ok((
        required_transaction(transaction, node)?,
        read_lsn(&end.required(node, "end_lsn")?).inside("end_lsn")?,
        text(gid, node, "gid")?.into_owned(),
    ))
}

fn read_xid(member: &Member<'_>, within: &Node<'_>, name: &'static str) -> Result<u32> {
    member
        .required(within, name)?
        .integer("transaction id")
        .inside(name)
}

fn read_running(node: &Node<'_>) -> Result<Running> {
    members!(node, "xid" => xid, "subxid" => subxid, "node" => name);
    if let Some(name) = name.given() {
        name.string().inside("node")?;
    }
    Ok(Running {
        xid: read_xid(&xid, node, "xid")?,
        subxid: read_xid(&subxid, node, "subxid")?,
    })
}

fn required_transaction(member: &Member<'_>, within: &Node<'_>) -> Result<Transaction> {
    let given = member.required(within, "transaction")?;
    read_transaction(&given).inside("transaction")
}

fn read_transaction(node: &Node<'_>) -> Result<Transaction> {
    members!(node, "xid" => xid, "lsn" => lsn, "commit_time" => time, "node" => name,
        "origin" => origin, "origin_lsn" => origin_lsn);
    if let Some(name) = name.given() {
        name.string().inside("node")?;
    }
    let time = time.required(node, "commit_time")?;
    Ok(Transaction {
        xid: match xid.given() {
            Some(xid) => xid.integer("xid").inside("xid")?,
            None => 0,
        },
        lsn: read_lsn(&lsn.required(node, "lsn")?).inside("lsn")?,
        commit_time: read_timestamp(&time).inside("commit_time")?,
        origin: match origin.given() {
            Some(origin) => origin.string().inside("origin")?.into_owned(),
            None => String::new(),
        },
        origin_lsn: match origin_lsn.given() {
            Some(lsn) => read_lsn(&lsn).inside("origin_lsn")?,
            None => 0,
        },
    })
}
