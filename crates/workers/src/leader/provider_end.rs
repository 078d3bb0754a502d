//! How far the provider's WAL reaches, for the views that show the lag. Run by the leader.
//!
//! The stream reports the end of the provider's WAL only when the provider has sent all of it:
//! earlier messages name the position that the provider has read. So while the subscription is
//! behind, the leader asks by a second connection. It never waits for an answer, and closes the
//! connection when the subscription has caught up.
//!
//! Not for applied changes: positions of this module are never confirmed, nor compared with
//! received ones.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_node::registry::SubscriptionEntry;
use braid_postgres::libpq::{Connection, Pending};
use braid_postgres::rows::Rows;
use braid_postgres::timestamp;

use super::reception::Reception;

/// If the stream has not reported the provider's end of WAL for this long, the subscription is
/// behind.
const BEHIND_MICROS: i64 = 3_000_000;
/// The pause between an answer and the next question.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause after a failed attempt.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(10);
/// An attempt fails after this time.
const LONGEST: Duration = Duration::from_secs(5);
/// An idle provider is asked for a sign of life this often: the lag counts as known for 5 s
/// (braid.subscription_status).
pub(super) const SIGN_OF_LIFE: Duration = Duration::from_secs(2);

const QUESTION: &str = "select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn() \
     else pg_catalog.pg_current_wal_flush_lsn() end";

/// The second connection.
#[derive(Debug, Default)]
enum Asking {
    #[default]
    No,
    /// The connection is being made.
    Connecting(Connection, Pending),
    /// The next question has time.
    Connected(Connection),
    /// A question was sent, of whose answer so much has come.
    Asked(Connection, Rows),
}

/// A leader's questions for the end of its provider's WAL.
#[derive(Debug)]
pub(super) struct ProviderEnd {
    asking: Asking,
    /// When the current attempt began.
    since: Instant,
    /// When the next one begins.
    next: Instant,
    /// When the last answer came (TimestampTz).
    answered_at: i64,
}

impl ProviderEnd {
    /// Nothing was asked.
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            asking: Asking::No,
            since: now,
            next: now,
            answered_at: 0,
        }
    }

    /// Whether an answer is to be looked for soon.
    pub(super) fn is_asking(&self) -> bool {
        matches!(self.asking, Asking::Connecting(..) | Asking::Asked(..))
    }
}

/// The provider has said that its WAL ended at `end` when its clock showed `there`. The message may
/// have waited to be read.
pub(super) fn told(entry: &SubscriptionEntry, end: u64, there: i64) {
    let ahead = entry.clock.get().map_or(0, |clock| clock.offset);
    let at = there.saturating_sub(ahead).min(timestamp::now());
    learnt(entry, end, at);
}

/// The provider's WAL ended at `end` at a time of this node's clock.
fn learnt(entry: &SubscriptionEntry, end: u64, at: i64) {
    entry.provider_lsn.fetch_max(end, Ordering::Relaxed);
    entry.provider_lsn_at.fetch_max(at, Ordering::Relaxed);
}

impl Reception {
    /// Ask the provider how far its WAL reaches, while the subscription is behind.
    pub(super) fn ask_for_end(&mut self) {
        let watch = &mut self.provider_end;
        let now = Instant::now();
        let known_at = self.entry.provider_lsn_at.load(Ordering::Relaxed);
        if known_at != watch.answered_at {
            // The stream has reported the end since.
            watch.answered_at = 0;
            if timestamp::now().saturating_sub(known_at) < BEHIND_MICROS {
                watch.asking = Asking::No;
                return;
            }
        }
        let in_hand = watch.is_asking();
        let asking = std::mem::take(&mut watch.asking);
        if (in_hand && watch.since.elapsed() > LONGEST) || (!in_hand && now < watch.next) {
            if in_hand {
                watch.next = now + PAUSE_AFTER_FAILURE;
            } else {
                watch.asking = asking;
            }
            return;
        }
        if !in_hand {
            watch.since = now;
        }
        let step = match asking {
            Asking::No => {
                let name = format!("{} lag", self.subscription.name);
                Connection::start_beside(&self.connection, &self.subscription.dsn, &name)
                    .map(|(connection, pending)| Asking::Connecting(connection, pending))
            }
            Asking::Connecting(mut connection, pending) => {
                connection.go_on_connecting(pending).and_then(|pending| {
                    if let Some(pending) = pending {
                        return Ok(Asking::Connecting(connection, pending));
                    }
                    connection.send_query(QUESTION)?;
                    Ok(Asking::Asked(connection, Rows::default()))
                })
            }
            Asking::Connected(mut connection) => connection
                .send_query(QUESTION)
                .map(|()| Asking::Asked(connection, Rows::default())),
            Asking::Asked(mut connection, mut rows) => {
                connection.try_finish_query(&mut rows).map(|is_all| {
                    if !is_all {
                        return Asking::Asked(connection, rows);
                    }
                    if let Some(end) = rows.get(0, 0).and_then(braid_gir::parse_lsn) {
                        let at = timestamp::now();
                        learnt(self.entry, end, at);
                        watch.answered_at = at;
                    }
                    watch.next = now + PAUSE;
                    Asking::Connected(connection)
                })
            }
        };
        // The provider may have no room for another connection. The stream itself reports problems
        // of the provider.
        watch.asking = step.unwrap_or_else(|_| {
            watch.next = now + PAUSE_AFTER_FAILURE;
            Asking::No
        });
    }
}
