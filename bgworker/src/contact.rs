//! When the leader last heard from its provider and last reported to it, and what follows from
//! that. Run by the leader.
//!
//! A silent provider is asked for a reply, and after a while the connection is given up. A provider
//! that hears nothing does the same with this node. Not for: what a report says (`progress`).

use std::time::{Duration, Instant};

/// While the leader does not read the provider's requests, reports are at most this far apart: well
/// within any `wal_sender_timeout`.
const LONGEST_UNASKED: Duration = Duration::from_millis(500);

/// Times of the last message from and the last report to the provider.
#[derive(Debug)]
pub struct Contact {
    heard: Instant,
    reported: Instant,
    /// The provider was asked for a reply and has sent nothing since.
    has_asked: bool,
    /// A report is due at once.
    owes_report: bool,
}

/// The reason for a report.
#[derive(Debug, Clone, Copy)]
pub struct News {
    /// Positions have changed since the last report.
    pub moved: bool,
    /// Everything that was received is applied.
    pub idle: bool,
    /// Shortest time between reports while positions change.
    pub pause: Duration,
    /// Longest time between reports; `None`: no limit.
    pub longest: Option<Duration>,
}

/// The answer to a provider's silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// Do nothing.
    Bear,
    /// Ask the provider for a reply.
    Ask,
    /// Give up the connection as lost.
    GiveUp,
}

impl Contact {
    /// Starts with a new connection. The first report is due at once, so that the provider learns
    /// how far this node is.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            heard: now,
            reported: now,
            has_asked: false,
            owes_report: true,
        }
    }

    /// Records that a message has arrived.
    pub fn heard(&mut self, now: Instant) {
        self.heard = now;
        self.has_asked = false;
    }

    /// Restarts the provider's silence: the leader has not read messages up to now.
    pub fn looked_away(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Returns how long the provider has been silent.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard)
    }

    /// Makes a report due, as the provider wants one.
    pub fn owe_report(&mut self) {
        self.owes_report = true;
    }

    /// Makes a report due after some time, in case the provider has asked for one while the leader
    /// did not read.
    pub fn report_unasked(&mut self, now: Instant) {
        self.owes_report |= now.saturating_duration_since(self.reported) > LONGEST_UNASKED;
    }

    /// Returns whether a report is due.
    #[must_use]
    pub fn is_due(&self, now: Instant, news: News) -> bool {
        let since = now.saturating_duration_since(self.reported);
        self.owes_report
            || (news.moved && (news.idle || since > news.pause))
            || news.longest.is_some_and(|longest| since > longest)
    }

    /// Records that a report was sent.
    pub fn reported(&mut self, now: Instant) {
        self.reported = now;
        self.owes_report = false;
    }

    /// Judges the provider's silence: gives up after `timeout`, if there is one, and asks after
    /// `patience`. Returns [`Silence::Ask`] once for each silence.
    pub fn judge(
        &mut self,
        now: Instant,
        timeout: Option<Duration>,
        patience: Duration,
    ) -> Silence {
        let silence = self.silence(now);
        if timeout.is_some_and(|timeout| silence > timeout) {
            Silence::GiveUp
        } else if silence > patience && !std::mem::replace(&mut self.has_asked, true) {
            Silence::Ask
        } else {
            Silence::Bear
        }
    }

    /// Returns how long neither a question, nor the timeout, nor a report is due if nothing
    /// arrives; `None`: for ever. The arguments are those of `judge` and `is_due`.
    #[must_use]
    pub fn time_to_rest(
        &self,
        now: Instant,
        timeout: Option<Duration>,
        patience: Duration,
        longest: Option<Duration>,
    ) -> Option<Duration> {
        let limit = if self.has_asked {
            timeout
        } else {
            Some(patience)
        };
        let silence = limit.map(|limit| limit.saturating_sub(self.silence(now)));
        let report = longest
            .map(|longest| longest.saturating_sub(now.saturating_duration_since(self.reported)));
        silence.into_iter().chain(report).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const QUIET: News = News {
        moved: false,
        idle: true,
        pause: SECOND,
        longest: None,
    };

    fn reported(now: Instant) -> Contact {
        let mut contact = Contact::new(now);
        contact.reported(now);
        contact
    }

    #[test]
    fn the_first_report_is_due_at_once() {
        let now = Instant::now();
        let mut contact = Contact::new(now);
        assert!(contact.is_due(now, QUIET));
        contact.reported(now);
        assert!(!contact.is_due(now + SECOND * 60, QUIET));
        contact.owe_report();
        assert!(contact.is_due(now, QUIET));
    }

    #[test]
    fn positions_that_move_are_reported_at_once_only_if_nothing_is_in_flight() {
        let now = Instant::now();
        let contact = reported(now);
        let moved = News {
            moved: true,
            ..QUIET
        };
        assert!(contact.is_due(now, moved));
        let busy = News {
            idle: false,
            ..moved
        };
        assert!(!contact.is_due(now + SECOND, busy));
        assert!(contact.is_due(now + SECOND * 2, busy));
    }

    #[test]
    fn reports_are_no_further_apart_than_asked_for() {
        let now = Instant::now();
        let contact = reported(now);
        let news = News {
            longest: Some(SECOND * 10),
            ..QUIET
        };
        assert!(!contact.is_due(now + SECOND * 10, news));
        assert!(contact.is_due(now + SECOND * 11, news));
    }

    #[test]
    fn a_report_that_nobody_can_ask_for_is_made_all_the_same() {
        let now = Instant::now();
        let mut contact = reported(now);
        contact.report_unasked(now + LONGEST_UNASKED);
        assert!(!contact.is_due(now + SECOND, QUIET));
        contact.report_unasked(now + SECOND);
        assert!(contact.is_due(now + SECOND, QUIET));
    }

    #[test]
    fn a_silent_provider_is_asked_once_and_then_given_up() {
        let now = Instant::now();
        let mut contact = Contact::new(now);
        let timeout = Some(SECOND * 60);
        let mut judge = |seconds: u32| contact.judge(now + SECOND * seconds, timeout, SECOND * 30);
        assert_eq!(judge(30), Silence::Bear);
        assert_eq!(judge(31), Silence::Ask);
        assert_eq!(judge(32), Silence::Bear);
        assert_eq!(judge(60), Silence::Bear);
        assert_eq!(judge(61), Silence::GiveUp);
        contact.heard(now + SECOND * 61);
        assert_eq!(
            contact.judge(now + SECOND * 92, timeout, SECOND * 30),
            Silence::Ask
        );
    }

    #[test]
    fn looking_away_neither_counts_as_silence_nor_answers_a_question() {
        let now = Instant::now();
        let mut contact = Contact::new(now);
        let later = |seconds: u32| now + SECOND * seconds;
        assert_eq!(contact.judge(later(31), None, SECOND * 30), Silence::Ask);
        contact.looked_away(later(31));
        assert_eq!(contact.silence(later(32)), SECOND);
        assert_eq!(contact.judge(later(90), None, SECOND * 30), Silence::Bear);
    }

    #[test]
    fn it_rests_until_the_first_of_what_is_due() {
        let now = Instant::now();
        let mut contact = reported(now);
        let timeout = Some(SECOND * 60);
        let rest = |contact: &Contact, longest| {
            contact.time_to_rest(now + SECOND, timeout, SECOND * 30, longest)
        };
        assert_eq!(rest(&contact, None), Some(SECOND * 29));
        assert_eq!(rest(&contact, Some(SECOND * 10)), Some(SECOND * 9));
        assert_eq!(
            contact.judge(now + SECOND * 31, timeout, SECOND * 30),
            Silence::Ask
        );
        assert_eq!(rest(&contact, None), Some(SECOND * 59));
        assert_eq!(
            contact.time_to_rest(now + SECOND, None, SECOND * 30, None),
            None
        );
        assert_eq!(
            contact.time_to_rest(now + SECOND * 99, timeout, SECOND * 30, None),
            Some(Duration::ZERO)
        );
    }
}
