//! Providers that stay away. Deletions, and versions that differ from commit times, are recorded as
//! long as older changes may still arrive. For a provider that is not reached they would be kept
//! for ever; past `braid.peer_away_limit` the provider is given up. Run by the manager.
//!
//! Its subscription stops before anything is forgotten: its outstanding changes are older than the
//! records that are left then. The user decides whether it goes on nevertheless, or is created
//! again with a copy.
//!
//! | `given_up_at` | the leader | deletions |
//! |---|---|---|
//! | null | may run | are kept for it |
//! | set, by the manager, while the provider is not connected | is ended | are kept for it |
//! | the same | has ended | are forgotten |
//! | null again, by `enable_subscription` | may run | are kept for it from now on |

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use braid_bgworker::sqlstate::SqlState;
use braid_node::registry::{self, Activity};
use braid_node::settings;
use braid_node::subscription::{LIMIT_LOCK_WAITS, execute_lazily, rows, rows_lazily};
use braid_postgres::error::{self, PgError};
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};
use braid_postgres::{server, xid};

/// For so long after the start of the server nobody is given up.
const GRACE: Duration = Duration::from_secs(300);

/// A time in the catalog is noted anew once it is this old.
const NOTED_EVERY: Duration = Duration::from_secs(60);
/// The longest such time for a connected provider while the server is idle.
const NOTED_EVERY_IDLE: Duration = Duration::from_secs(3600);
/// The server is idle if fewer transactions have taken an id since the last note. Managers of other
/// databases note times as well: one note must not cause the next.
const IDLE: u64 = 100;

/// The full id of the next transaction after the last note.
static NEXT_XID: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// When each subscription's provider was last connected, microseconds since 1970-01-01 UTC.
    static SEEN: RefCell<HashMap<u32, i64>> = RefCell::default();
}

/// A hint for a subscription that was given up.
pub const HINT: &str = "Drop the subscription, create it again with copy_data => false, and copy its tables with braid.resync_table; or go on all the same with \
    braid.enable_subscription(name, after_away => true) and look for differences with braid.compare.";

/// The subscriptions for which records are to be kept.
#[derive(Debug)]
pub struct Peers {
    /// Subscriptions.
    pub awaited: Vec<u32>,
    /// When to look again, if that is soon.
    pub again: Option<Duration>,
}

/// Note how far each provider was heard and that it is connected, and give up those that were away
/// for too long. Outside of a transaction.
#[must_use]
pub fn peers(subscriptions: &[u32]) -> Peers {
    error::transaction(|| look(subscriptions)).unwrap_or_else(|failure| {
        // Somebody is changing a subscription, and has not committed yet: then all are waited for,
        // and it is looked again later.
        if failure.sqlstate != SqlState::LockNotAvailable {
            failure.log("could not look which providers are away");
        }
        Peers {
            awaited: subscriptions.to_vec(),
            again: None,
        }
    })
}

fn look(subscriptions: &[u32]) -> Result<Peers, PgError> {
    execute_lazily(LIMIT_LOCK_WAITS, &[]);
    let limit = settings::peer_away_limit();
    note(subscriptions, limit);
    let again = limit.and_then(grace);
    if let (Some(limit), None) = (limit, again) {
        let away: Vec<String> = subscriptions
            .iter()
            .filter(|id| !is_connected(**id))
            .map(u32::to_string)
            .collect();
        let given_up = rows_lazily(
            "update braid.subscription set given_up_at = now(), error_at = coalesce(error_at, now()), \
             error_hint = case when error_sqlstate is null then $3 else error_hint end, \
             error_message = coalesce(error_message, format('provider \"%s\" was away for longer than braid.peer_away_limit: \
             what was deleted here since %s is no longer remembered for its sake', provider_name, date_trunc('second', coalesce(caught_up_at, created_at)))), \
             error_sqlstate = coalesce(error_sqlstate, $4) \
             where given_up_at is null and phase = 'stream' and subscription_id::text = any (string_to_array($1, ',')) \
             and coalesce(connected_at, created_at) < now() - make_interval(secs => $2) \
             returning subscription_name::text, provider_name::text",
            &[
                away.join(",").as_str().into(),
                i64::from(limit).into(),
                HINT.into(),
                SqlState::ObjectNotInPrerequisiteState
                    .to_string()
                    .as_str()
                    .into(),
            ],
        );
        for row in given_up {
            let text = |index: usize| row.get(index).cloned().flatten().unwrap_or_default();
            PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                format!(
                    "provider \"{}\" of subscription \"{}\" was away for longer than braid.peer_away_limit",
                    text(1),
                    text(0)
                ),
            )
            .with_detail("The subscription has stopped. What was deleted here is no longer remembered for its sake.")
            .with_hint(HINT)
            .warn();
        }
    }
    // Of this transaction's nothing is forgotten yet: their leaders may be about to connect.
    let gone = rows(
        "select subscription_id::text from braid.subscription where given_up_at < now()",
        &[],
    )?;
    let gone: Vec<u32> = gone
        .iter()
        .filter_map(|row| row.first()?.as_ref()?.parse().ok())
        .filter(|id| {
            registry::subscription(*id)
                .is_none_or(|entry| entry.leader_pid.load(Ordering::Acquire) <= 0)
        })
        .collect();
    let awaited = subscriptions.iter().copied();
    Ok(Peers {
        awaited: awaited.filter(|id| !gone.contains(id)).collect(),
        again,
    })
}

/// Notes in the catalog when each provider was connected last, and how far it was heard. In a
/// transaction.
///
/// An idle server would write nothing but these notes. So it notes less often while a provider is
/// connected. The manager remembers the last moment, and notes it once the provider is gone. After
/// a restart only the catalog is known: a provider may be given up a tenth of the limit too early.
fn note(subscriptions: &[u32], limit: Option<i32>) {
    let is_idle = xid::next_full().saturating_sub(NEXT_XID.load(Ordering::Relaxed)) < IDLE;
    let rarely = limit.map_or(NOTED_EVERY_IDLE, |limit| {
        let part = Duration::from_secs(u64::try_from(limit / 10).unwrap_or(0));
        part.clamp(NOTED_EVERY, NOTED_EVERY_IDLE)
    });
    let mut noted = 0;
    for id in subscriptions {
        let is_connected = is_connected(*id);
        if is_connected {
            let now = timestamp::now().saturating_add(EPOCH_DIFFERENCE);
            SEEN.with_borrow_mut(|seen| seen.insert(*id, now));
        }
        let connected = SEEN.with_borrow(|seen| seen.get(id).copied());
        let every = if is_idle && is_connected {
            rarely
        } else {
            NOTED_EVERY
        };
        noted += execute_lazily(
            "update braid.subscription set caught_up_at = coalesce(to_timestamp($2::bigint / 1000000.0), caught_up_at), \
             connected_at = greatest(connected_at, to_timestamp($3::bigint / 1000000.0)) \
             where subscription_id = $1 \
             and ((caught_up_at < to_timestamp($2::bigint / 1000000.0) - make_interval(secs => $4)) is not false and $2::bigint is not null \
             or (connected_at < to_timestamp($3::bigint / 1000000.0) - make_interval(secs => $4)) is not false and $3::bigint is not null)",
            &[
                i64::from(*id).into(),
                caught_up(*id).into(),
                connected.into(),
                every.as_secs_f64().into(),
            ],
        );
    }
    SEEN.with_borrow_mut(|seen| seen.retain(|id, _| subscriptions.contains(id)));
    if noted > 0 {
        NEXT_XID.store(xid::next_full(), Ordering::Relaxed);
    }
}

/// How long a server that has just been started still waits for providers to be reached: it was
/// away itself.
fn grace(limit: i32) -> Option<Duration> {
    let limit = Duration::from_secs(u64::try_from(limit).unwrap_or(0));
    let runs = timestamp::now().saturating_sub(server::started_at());
    let runs = Duration::from_micros(u64::try_from(runs).unwrap_or(0));
    let left = limit.min(GRACE).checked_sub(runs)?;
    (!left.is_zero()).then_some(left)
}

/// The provider's time up to which all its commits had arrived, microseconds since 1970-01-01 UTC;
/// since the server started.
fn caught_up(id: u32) -> Option<i64> {
    let at = registry::subscription(id)?
        .caught_up_at
        .load(Ordering::Relaxed);
    (at > 0).then(|| at.saturating_add(EPOCH_DIFFERENCE))
}

/// The time at which a subscription had caught up last, as it was stored before this run.
///
/// # Errors
/// Those of SPI.
pub fn caught_up_before(id: u32) -> Result<Option<i64>, PgError> {
    let found = rows(
        "select floor(extract(epoch from caught_up_at) * 1000000)::bigint::text from braid.subscription where subscription_id = $1",
        &[i64::from(id).into()],
    )?;
    Ok(found
        .first()
        .and_then(|row| row.first()?.as_ref()?.parse().ok()))
}

fn is_connected(id: u32) -> bool {
    registry::subscription(id).is_some_and(|entry| match entry.activity() {
        Activity::Copying | Activity::CatchingUp | Activity::Streaming | Activity::Paused => true,
        Activity::Stopped | Activity::Starting | Activity::Retrying => false,
    })
}
