//! Connections of the group worker, and of the versions process, to the other members, by which
//! their messages go.
//!
//! Nothing here waits: a member that does not answer must not keep the worker from its clock.
//! Messages may be lost, repeated or late, so a member that can't be reached just loses them. Only
//! a host name that has to be looked up may take its time.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use braid_bgworker::hex;
use braid_group::MemberId;
use braid_postgres::latch::Interest;
use braid_postgres::libpq::{self, Connection, Pending};
use braid_postgres::rows::Rows;

/// Messages that wait for one member; older ones are dropped.
const WAITING_LIMIT: usize = 256;
/// Bytes of messages that are sent in one query.
const QUERY_BYTES: usize = 512 * 1024;
/// A member that has not connected or answered by then is tried anew.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two attempts to connect.
const PAUSE: Duration = Duration::from_secs(1);
/// A connection that was not needed for so long is closed: it leads to a member that was removed,
/// as others are pinged more often.
const IDLE: Duration = Duration::from_secs(10);

/// The process whose messages go by these connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    /// How the process shows at the other members, and in the log.
    pub(crate) name: &'static str,
    /// The function that takes messages there.
    pub(crate) function: &'static str,
}

enum Phase {
    /// Not connected; not tried again before then.
    Away(Instant),
    Connecting(Connection, Pending, Instant),
    Ready(Connection),
    /// Waits for the answer to a query.
    Sent(Connection, Rows, Instant),
}

struct Link {
    /// The member's name, for messages.
    name: String,
    dsn: String,
    phase: Phase,
    waiting: VecDeque<Vec<u8>>,
    /// The last message.
    used: Instant,
    /// Why its last messages were lost, as it was logged. None once one has arrived.
    failure: Option<String>,
}

/// A member to be reached.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) id: MemberId,
    /// The name, for messages.
    pub(crate) name: String,
    /// The connection string: never to be logged or shown.
    pub(crate) dsn: String,
}

/// All connections, by member.
pub(crate) struct Links {
    way: Way,
    links: BTreeMap<MemberId, Link>,
}

impl Links {
    /// Has no connection yet.
    pub(crate) const fn new(way: Way) -> Self {
        Self {
            way,
            links: BTreeMap::new(),
        }
    }

    /// The sockets on which something is awaited.
    pub(crate) fn sockets(&self) -> Vec<(i32, Interest)> {
        let awaited = |link: &Link| match &link.phase {
            Phase::Connecting(connection, Pending::Write, _) => {
                Some((connection.socket(), Interest::Write))
            }
            Phase::Connecting(connection, Pending::Read, _) | Phase::Sent(connection, ..) => {
                Some((connection.socket(), Interest::Read))
            }
            Phase::Away(_) | Phase::Ready(_) => None,
        };
        self.links.values().filter_map(awaited).collect()
    }

    /// Keeps to these members and connection strings.
    pub(crate) fn keep(&mut self, peers: Vec<Target>) {
        self.links.retain(|id, link| {
            peers
                .iter()
                .any(|peer| peer.id == *id && peer.dsn == link.dsn)
        });
        for Target { id, name, dsn } in peers {
            self.links.entry(id).or_insert_with(|| Link {
                name,
                dsn,
                phase: Phase::Away(Instant::now()),
                waiting: VecDeque::new(),
                used: Instant::now(),
                failure: None,
            });
        }
    }

    /// Why no message reaches a member. `None`: they do, or nothing was sent yet.
    pub(crate) fn failure(&self, member: MemberId) -> Option<&str> {
        self.links.get(&member)?.failure.as_deref()
    }

    /// Has a message sent. False if the member is not known.
    pub(crate) fn send(&mut self, to: MemberId, message: Vec<u8>) -> bool {
        let Some(link) = self.links.get_mut(&to) else {
            return false;
        };
        if link.waiting.len() >= WAITING_LIMIT {
            link.waiting.pop_front();
        }
        link.waiting.push_back(message);
        link.used = Instant::now();
        true
    }

    /// Takes each connection a step further. Returns the members that have just become unreachable.
    pub(crate) fn tend(&mut self) -> Vec<MemberId> {
        let mut lost = Vec::new();
        for (id, link) in &mut self.links {
            if let Err(error) = link.step(self.way) {
                let words = error.to_string();
                if link.failure.as_ref() != Some(&words) {
                    pgrx::log!(
                        "{}: node \"{}\" cannot be reached: {words}",
                        self.way.name,
                        link.name
                    );
                    link.failure = Some(words);
                }
                link.phase = Phase::Away(Instant::now() + PAUSE);
                link.waiting.clear();
                lost.push(*id);
            }
        }
        lost
    }

    /// Whether an answer or a connection is awaited, so that the next look comes soon.
    pub(crate) fn are_busy(&self) -> bool {
        self.links
            .values()
            .any(|link| matches!(link.phase, Phase::Connecting(..) | Phase::Sent(..)))
    }
}

impl Link {
    /// Goes on as far as it can without waiting.
    fn step(&mut self, way: Way) -> libpq::Result<()> {
        loop {
            let phase = std::mem::replace(&mut self.phase, Phase::Away(Instant::now()));
            let (next, again) = self.advance(phase, way)?;
            self.phase = next;
            if !again {
                return Ok(());
            }
        }
    }

    /// The next phase, and whether that one can go on at once.
    fn advance(&mut self, phase: Phase, way: Way) -> libpq::Result<(Phase, bool)> {
        Ok(match phase {
            Phase::Away(until) if Instant::now() < until || self.waiting.is_empty() => {
                (Phase::Away(until), false)
            }
            Phase::Away(_) => {
                let (connection, pending) = Connection::start_by_itself(&self.dsn, way.name)?;
                let deadline = Instant::now() + PATIENCE;
                (Phase::Connecting(connection, pending, deadline), true)
            }
            Phase::Connecting(mut connection, pending, deadline) => {
                match connection.go_on_connecting(pending)? {
                    None => (Phase::Ready(connection), true),
                    Some(_) if Instant::now() > deadline => return Err(libpq::Error::Timeout),
                    Some(pending) => (Phase::Connecting(connection, pending, deadline), false),
                }
            }
            Phase::Ready(_) if self.waiting.is_empty() && self.used.elapsed() > IDLE => {
                (Phase::Away(Instant::now()), false)
            }
            Phase::Ready(connection) if self.waiting.is_empty() => {
                (Phase::Ready(connection), false)
            }
            Phase::Ready(mut connection) => {
                connection.start_query(&self.query(way))?;
                let deadline = Instant::now() + PATIENCE;
                (Phase::Sent(connection, Rows::default(), deadline), true)
            }
            Phase::Sent(mut connection, mut rows, deadline) => {
                if connection.try_finish_query(&mut rows)? {
                    self.failure = None;
                    (Phase::Ready(connection), true)
                } else if Instant::now() > deadline {
                    return Err(libpq::Error::Timeout);
                } else {
                    (Phase::Sent(connection, rows, deadline), false)
                }
            }
        })
    }

    /// A query that delivers what waits.
    fn query(&mut self, way: Way) -> String {
        let mut bytes = 0;
        let mut messages = Vec::new();
        while let Some(next) = self.waiting.front() {
            bytes += next.len();
            if bytes > QUERY_BYTES && !messages.is_empty() {
                break;
            }
            messages.extend(self.waiting.pop_front());
        }
        let quoted: Vec<String> = messages
            .iter()
            .map(|message| format!("'\\x{}'::pg_catalog.bytea", hex::encode(message)))
            .collect();
        format!("select {}(array[{}])", way.function, quoted.join(","))
    }
}
