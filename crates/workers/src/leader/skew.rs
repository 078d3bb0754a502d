//! Measures and shows how far the provider's clock is from this node's, warns, and holds back
//! changes with times in the future.
//!
//! Before it streams, the leader asks by SQL, where each answer has its question. Then it sends
//! bursts of statuses (`Burst` of `bgworker/src/skew.rs`, which also has the computation). Only the
//! provider's clock is measured. A forwarded change carries the time of its origin's clock. So the
//! changes' own times decide what is held back: no transaction is handed to appliers whose version
//! lies ahead of this node's clock by more than `braid.clock_skew_limit`. This also holds after a
//! restart. It also holds after the provider's clock was corrected, while there is still WAL with
//! times in the future.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::skew::{Alarm, Burst, Exchange, Say, Skew};
use braid_bgworker::sqlstate::SqlState;
use braid_gir::Begin;
use braid_node::registry::{Activity, SubscriptionEntry};
use braid_node::settings::{self, SkewAction, timers};
use braid_postgres::error::PgError;
use braid_postgres::latch;
use braid_postgres::libpq::{self, Connection};
use braid_postgres::timestamp::{self, EPOCH_DIFFERENCE};
use braid_postgres::wait::Wait;

use super::End;
use super::reception::Reception;

/// Questions before streaming: the first one finds nothing prepared at the provider.
const QUESTIONS: usize = 3;
/// Microseconds until the next burst if a measurement is to be confirmed.
const SOON: i64 = 1_000_000;
/// This node's clock was set if it moves by more microseconds than the monotonic one.
const SET_HERE: i64 = 10_000;
/// Both clocks are looked at up to so many times, until it takes so many microseconds.
const LOOKS: usize = 5;
const CLOSE: i64 = 10;
/// A clock that was set is worth a line in the log from so many microseconds on.
const WORTH_A_LINE: i64 = 100_000;
/// Microseconds between two warnings of changes from the future.
const WARNING_INTERVAL: i64 = 60_000_000;
/// While the stream is held back, settings are looked at this often.
const LOOK: Duration = Duration::from_millis(100);

/// Microseconds of the clock that never steps back.
fn monotonic() -> i64 {
    i64::try_from(timestamp::monotonic_nanoseconds() / 1000).unwrap_or(i64::MAX)
}

/// The leader's knowledge of its provider's clock.
#[derive(Debug)]
pub(super) struct ClockWatch {
    skew: Skew,
    alarm: Alarm,
    burst: Option<Burst>,
    /// The next burst, by the monotonic clock.
    next: i64,
    /// This node's clock minus the monotonic one, at the last look.
    wall: i64,
    /// The last warning of a change from the future, by the monotonic clock.
    warned_of_change: Option<i64>,
}

/// This node's clock minus the monotonic one, and how far off that can be: this process may have
/// been put to sleep between two looks.
fn wall() -> (i64, i64) {
    let mut best = (0, i64::MAX);
    for _ in 0..LOOKS {
        let before = monotonic();
        let now = timestamp::now();
        let error = monotonic().saturating_sub(before) / 2 + 1;
        if error < best.1 {
            best = (now.saturating_sub(before).saturating_sub(error), error);
        }
        if best.1 <= CLOSE {
            break;
        }
    }
    best
}

impl ClockWatch {
    /// Ask by SQL, on a connection that does not stream yet.
    pub(super) fn ask(
        connection: &mut Connection,
        name: &str,
        entry: &SubscriptionEntry,
    ) -> Result<Self, End> {
        let mut clock = Self {
            skew: Skew::default(),
            alarm: Alarm::resume(entry.clock.warned_at.load(Ordering::Relaxed)),
            burst: None,
            next: 0,
            wall: wall().0,
            warned_of_change: None,
        };
        for _ in 0..QUESTIONS {
            let asked = monotonic();
            let rows = connection
                .query("select (extract(epoch from clock_timestamp()) * 1000000)::bigint")?;
            let answered = monotonic();
            let there: i64 = rows
                .get(0, 0)
                .and_then(|text| text.parse().ok())
                .ok_or(libpq::Error::Unexpected("a question for the time"))?;
            let exchange = Exchange {
                asked,
                answered,
                there: there.saturating_sub(EPOCH_DIFFERENCE),
            };
            clock.heard(&exchange, name, entry);
        }
        Ok(clock)
    }

    /// An answer has come.
    fn heard(&mut self, exchange: &Exchange, name: &str, entry: &SubscriptionEntry) {
        let now = monotonic();
        self.burst = None;
        let (wall, wall_error) = wall();
        let set_here = wall.saturating_sub(self.wall).saturating_abs() > SET_HERE;
        self.next = now.saturating_add(if set_here {
            SOON
        } else {
            timers::clock_micros()
        });
        self.wall = wall;
        if let Some(by) = self.skew.add(exchange) {
            self.next = now.saturating_add(SOON);
            if by.saturating_abs() >= WORTH_A_LINE {
                pgrx::log!(
                    "the clock of the provider of subscription \"{name}\" was set by {} ms",
                    by / 1000
                );
            }
        }
        let Some(known) = self.skew.estimate(now) else {
            return;
        };
        let offset = known.difference.saturating_sub(self.wall);
        let error = known.error.saturating_add(wall_error);
        entry.clock.show(offset, error);
        let say = self
            .alarm
            .judge(offset, error, settings::clock_skew_warning(), now);
        entry
            .clock
            .warned_at
            .store(self.alarm.warned_at(), Ordering::Relaxed);
        let (apart, error) = (in_ms(offset), in_ms(error));
        match say {
            Some(Say::Apart) => {
                let side = if offset > 0 { "ahead of" } else { "behind" };
                PgError::new(
                    SqlState::Warning,
                    format!(
                        "the clock of the provider of subscription \"{name}\" is {apart} ms {side} this node's"
                    ),
                )
                .with_detail(format!("This was measured to within {error} ms."))
                .with_hint("Synchronize the clocks of all nodes: they decide which of two changes is the newer one. The view braid.clock_skew shows all providers.")
                .warn();
            }
            Some(Say::Together) => pgrx::log!(
                "the clock of the provider of subscription \"{name}\" agrees with this node's again, to within {apart} ms"
            ),
            None => {}
        }
    }

    /// A keepalive that asks for nothing, of a position and a time at the provider.
    pub(super) fn keepalive(
        &mut self,
        position: u64,
        there: i64,
        name: &str,
        entry: &SubscriptionEntry,
    ) {
        if let Some(burst) = self.burst.as_mut()
            && let Some(exchange) = burst.keepalive(position, there, monotonic())
        {
            self.heard(&exchange, name, entry);
        }
    }

    /// Whether a burst is on its way.
    pub(super) fn is_asking(&self) -> bool {
        self.burst.is_some()
    }

    /// Any other message.
    pub(super) fn other(&mut self) {
        if let Some(burst) = self.burst.as_mut() {
            burst.other();
        }
    }

    /// Whether it is time for a burst: a while after the last answer, or as soon as this node's
    /// clock was set. For so long nothing has come.
    fn is_due(&mut self, quiet: Duration) -> bool {
        let now = monotonic();
        let quiet = i64::try_from(quiet.as_micros()).unwrap_or(i64::MAX);
        if (self.burst.as_ref()).is_some_and(|burst| burst.is_lost(now, quiet)) {
            self.burst = None;
            self.next = now;
        }
        self.burst.is_none()
            && (now >= self.next || wall().0.saturating_sub(self.wall).saturating_abs() > SET_HERE)
    }
}

/// Milliseconds for people, without a sign.
fn in_ms(micros: i64) -> String {
    let micros = micros.saturating_abs();
    if micros >= 10_000 {
        format!("{}", micros / 1000)
    } else {
        format!("{}.{}", micros / 1000, micros % 1000 / 100)
    }
}

impl Reception {
    /// Asks for the provider's time, when it is due.
    pub(super) fn ask_for_time(&mut self) -> Result<(), End> {
        // While the stream is held back nothing is read, and that is not taken for silence:
        // `last_message` moves on.
        if !self
            .clock_watch
            .is_due(self.contact.silence(Instant::now()))
        {
            return Ok(());
        }
        let status = self.status_for_reply();
        let mut burst = Vec::new();
        for _ in 0..Burst::LENGTH {
            burst.push(status.as_slice());
        }
        self.clock_watch.burst = Some(Burst::new(monotonic()));
        Ok(self.connection.put_copy_messages(&burst)?)
    }

    /// A transaction is about to be taken in: hold the stream while its version lies too far ahead
    /// of this node's clock, if that is asked for.
    pub(super) fn wait_for_its_time(&mut self, begin: &Begin<'_>) -> Result<(), End> {
        let timestamp = begin.commit_timestamp.saturating_sub(EPOCH_DIFFERENCE);
        let ahead = || timestamp.saturating_sub(timestamp::now());
        let exceeds = || settings::clock_skew_limit().is_some_and(|limit| ahead() > limit);
        if !exceeds() {
            return Ok(());
        }
        let node = if begin.origin.is_empty() {
            &self.subscription.provider
        } else {
            begin.origin
        };
        let error = PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            format!(
                "a transaction of node \"{node}\" was committed {} ms ahead of this node's clock",
                in_ms(ahead())
            ),
        );
        if settings::clock_skew_action() == SkewAction::Warning {
            self.warn_of_change(error);
            return Ok(());
        }
        let error = error
            .with_detail("It is applied when this node's clock is within braid.clock_skew_limit of its commit time.")
            .with_hint("Synchronize the clocks of all nodes; the view braid.clock_skew shows all providers. To apply it at once, raise braid.clock_skew_limit or set it to 0.");
        error.log(&format!(
            "subscription \"{}\" is paused",
            self.subscription.name
        ));
        let entry = self.entry;
        entry.set_failure(&error, begin.commit_lsn);
        entry.set_activity(Activity::Paused);
        while exceeds() && settings::clock_skew_action() == SkewAction::Pause {
            // Nobody looks at the socket meanwhile; the provider is not to take this for the end.
            self.contact.looked_away(Instant::now());
            self.report_while_held();
            self.tend()?;
            let left = u64::try_from(ahead()).unwrap_or(0);
            latch::wait_as(Wait::Ahead, LOOK.min(Duration::from_micros(left.max(1000))));
        }
        self.contact.looked_away(Instant::now());
        entry.clear_failure();
        entry.set_activity(Activity::CatchingUp);
        pgrx::log!("subscription \"{}\" goes on", self.subscription.name);
        Ok(())
    }

    fn warn_of_change(&mut self, error: PgError) {
        let now = monotonic();
        let recent = |at: i64| now.saturating_sub(at) < WARNING_INTERVAL;
        if self.clock_watch.warned_of_change.is_some_and(recent) {
            return;
        }
        self.clock_watch.warned_of_change = Some(now);
        error
            .with_detail(format!("Subscription \"{}\" applies it.", self.subscription.name))
            .with_hint("Synchronize the clocks of all nodes; the view braid.clock_skew shows all providers. braid.clock_skew_action says what is done.")
            .warn();
    }
}
