//! The group worker: one for each database that is a member of a group; started by the manager.
//!
//! It drives the member's agreement (`braid_group`): brings it messages, questions and the time,
//! writes what it has to remember, and only then sends and shows what came of it. No change of data
//! ever waits for it. If it ends, the manager starts it again, and it goes on from what is stored.
//!
//! | module | holds |
//! |---|---|
//! | `store` | its tables |
//! | `links` | connections to other members |
//! | `request` | questions of sessions, and answers |
//! | `marker` | whether the files are those that it wrote |
//! | `places` | what it shows of routed tables, and when it has times closed |
//! | `balancing` | writes by tenant of routed tables, and rules for hot tenants |
//! | `steps` | another process: joining and leaving, and subscriptions of the group |
//! | `sequences` | another process: blocks of sequences |
//!
//! Not for: what is agreed and how, which is `crates/group`.

mod balancing;
pub(crate) mod links;
mod marker;
mod places;
pub mod request;
pub mod sequences;
pub mod steps;
pub mod store;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bgworker::sqlstate::SqlState;
use braid_group::{
    Agreement, Command, Effects, Error, GroupId, MemberId, Monotonic, ProposalId, Settings, Sight,
    State, Stopped, Value, Version,
};
use braid_node::mailbox::{Mailbox, Ticket};
use braid_node::registry::{self, ManagerEntry};
use braid_node::subscription::{execute, rows};
use braid_node::umbrella;
use braid_node::versions::tables;
use braid_postgres::error::{self, PgError};
use braid_postgres::{latch, process, server, timestamp, worker};
use pgrx::pg_sys;

use balancing::{Balancing, Standing};
use links::{Links, Target, Way};
use places::Places;
use request::Question;
use store::Found;

/// The mode in which a node joins that only votes.
pub const WITNESS: &str = "witness";
/// How its messages go to the other members.
const WAY: Way = Way {
    name: "braid group",
    function: "braid.group_receive",
};
/// Between two looks while another member's answer is awaited.
const SOON: Duration = Duration::from_millis(10);
/// The view is shown again after this.
const SHOWN_EVERY: Duration = Duration::from_millis(500);
/// A question that waits for a majority is answered with what is missing after this.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest error of a connection that is shown, in characters.
const SHOWN_ERROR: usize = 200;
/// A failure of the agreement counts as the first one if it went well for so long before.
const STEADY: Duration = Duration::from_secs(60);
/// A session commits a letter within this time after it has announced it.
const LETTERS: Duration = Duration::from_secs(5);

/// This Braid's version.
#[must_use]
pub fn version() -> Version {
    let mut parts = env!("CARGO_PKG_VERSION")
        .split('.')
        .map(|part| part.parse().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    Version::new(next(), next(), next())
}

/// The process's main function.
pub fn main(argument: pg_sys::Datum) {
    worker::initialize();
    let database = crate::connect(argument);
    let Some(entry) = registry::manager(database) else {
        pgrx::log!("braid group: too many databases");
        return;
    };
    if let Err(failure) = run(entry) {
        failure.log("braid group");
    }
}

fn run(entry: &'static ManagerEntry) -> Result<(), PgError> {
    let loaded = match error::transaction(store::load) {
        Ok(Some(Found::Member(loaded))) => loaded,
        Ok(Some(Found::GivenUp(failure))) => return wait_for_retry(entry, &failure),
        Ok(None) => return Ok(()),
        Err(failure) if failure.sqlstate == SqlState::DataCorrupted => {
            return Err(count_failure(failure, 0, false));
        }
        Err(failure) => return Err(failure),
    };
    let random = error::transaction(random)?;
    let settings = Settings::default();
    let started = Instant::now();
    // After what is stored was read: waits for earlier leases count from here.
    let began = timestamp::sleepless_microseconds();
    let agreement = Agreement::start(
        &loaded.stored,
        settings,
        loaded.continuity,
        random,
        Monotonic(0),
    );
    let agreement = match agreement {
        Ok(agreement) => agreement,
        Err(error) => return Err(count_failure(of_agreement(error), loaded.shown, false)),
    };
    let mailbox = enter(entry)?;
    worker::report_activity("agreeing with the group");
    let mut member = Member {
        entry,
        group: loaded.stored.group,
        agreement,
        mailbox,
        links: Links::new(WAY),
        asked: BTreeMap::new(),
        began,
        shown: None,
        tick: Duration::from_micros(settings.tick),
        next_tick: started,
        next_view: started,
        letters_until: None,
        reached: BTreeMap::new(),
        moved: BTreeMap::new(),
        complained: None,
        places: Places::new(entry),
        balancing: Balancing::new(entry),
        shown_index: loaded.shown,
    };
    match member.go_on(loaded.shown) {
        Err(failure) => match member.agreement.stopped() {
            Some(Stopped::Failed(_)) => {
                let index = member.agreement.state().map_or(0, State::index);
                Err(count_failure(failure, index, started.elapsed() > STEADY))
            }
            _ => Err(failure),
        },
        Ok(never) => match never {},
    }
}

/// Makes this process the database's group worker, whom sessions ask.
fn enter(entry: &'static ManagerEntry) -> Result<Mailbox, PgError> {
    let mailbox = Mailbox::create(entry)?;
    entry
        .group_latch
        .store(process::my_latch(), Ordering::SeqCst);
    entry.group_pid.store(process::my_pid(), Ordering::SeqCst);
    process::before_exit(move || leave(entry));
    Ok(mailbox)
}

/// Notes that the agreement has failed, in a transaction of its own. If it did so too often at this
/// place of the log, the member takes no part any more. Returns the error to be logged.
fn count_failure(failure: PgError, index: u64, was_steady: bool) -> PgError {
    match error::transaction(|| store::note_failure(&failure, index, was_steady)) {
        Ok(()) => failure,
        Err(second) => {
            failure.log("braid group");
            second
        }
    }
}

/// The agreement has failed too often. Answers sessions that ask, until somebody has it tried again
/// or ends the membership.
fn wait_for_retry(entry: &'static ManagerEntry, failure: &PgError) -> Result<(), PgError> {
    let mailbox = enter(entry)?;
    worker::report_activity("takes no part in the group");
    failure.log("braid group");
    braid_node::routing::hide(entry);
    let answer = request::failure(failure);
    mailbox.show(failure.message.as_bytes());
    registry::wake_manager(process::my_database());
    while error::transaction(store::is_given_up)? {
        worker::reload_settings();
        for (ticket, _) in mailbox.take_questions() {
            mailbox.answer(ticket, &answer);
        }
        drop(mailbox.take_mail());
        mailbox.sweep();
        latch::wait(Some(Duration::from_secs(1)));
    }
    Ok(())
}

/// The process ends.
fn leave(entry: &ManagerEntry) {
    if entry.group_pid.load(Ordering::SeqCst) == process::my_pid() {
        entry.group_mailbox.store(0, Ordering::SeqCst);
        entry.group_latch.store(0, Ordering::SeqCst);
        entry.group_pid.store(0, Ordering::SeqCst);
    }
}

fn random() -> Result<u64, PgError> {
    let found = rows(
        "select encode(substr(uuid_send(gen_random_uuid()), 9), 'hex')",
        &[],
    )?;
    found
        .first()
        .and_then(|row| u64::from_str_radix(row.first()?.as_deref()?, 16).ok())
        .ok_or_else(|| PgError::new(SqlState::InternalError, "no random number came"))
}

/// The error of a function, for an error of the agreement.
fn of_agreement(error: Error) -> PgError {
    let state = match &error {
        Error::Damaged(_) | Error::Malformed(_) | Error::UnknownEntry { .. } => {
            SqlState::DataCorrupted
        }
        Error::TooManyProposals => SqlState::InsufficientResources,
        _ => SqlState::ObjectNotInPrerequisiteState,
    };
    let failure = PgError::new(state, error.to_string());
    match error.hint() {
        Some(hint) => failure.with_hint(hint),
        None => failure,
    }
}

struct Asked {
    ticket: Ticket,
    since: Instant,
}

struct Member {
    entry: &'static ManagerEntry,
    group: GroupId,
    agreement: Agreement,
    mailbox: Mailbox,
    links: Links,
    /// Proposals of sessions that wait for an answer.
    asked: BTreeMap<ProposalId, Asked>,
    /// What the clock showed when the worker started.
    began: u64,
    /// What the tables show.
    shown: Option<State>,
    tick: Duration,
    next_tick: Instant,
    next_view: Instant,
    /// Until when a letter that was announced is looked for.
    letters_until: Option<Instant>,
    /// Since when each member has been reachable without a break: a timestamptz's number.
    reached: BTreeMap<MemberId, i64>,
    /// Connection strings that a session has found right, and the group has not agreed on yet.
    /// Without them there may be no majority that could.
    moved: BTreeMap<MemberId, String>,
    /// The last message of another member that was refused, and when.
    complained: Option<(String, Instant)>,
    places: Places,
    balancing: Balancing,
    /// The index of the newest entry that is shown. An older state is never shown after it: rows
    /// are placed by what it says.
    shown_index: u64,
}

impl Member {
    /// The time since the start, that in which the machine slept included: a lease that was over
    /// meanwhile must not be believed in.
    fn now(&self) -> Monotonic {
        Monotonic(timestamp::sleepless_microseconds().saturating_sub(self.began))
    }

    /// Works until an error ends it. `shown`: the index of the newest entry that was shown before.
    fn go_on(&mut self, shown: u64) -> Result<std::convert::Infallible, PgError> {
        // The log behind the snapshot is applied in the first turn.
        if let Some(state) = self.agreement.state().cloned()
            && state.index() >= shown
        {
            self.write(|| store::show(&state))?;
            tables::changed(state.versioned_tables().next().is_some());
            self.places.show(&state, self.agreement.me())?;
            self.balancing.follow(&state)?;
            self.shown = Some(state);
        }
        self.note_version()?;
        self.keep_links()?;
        loop {
            worker::reload_settings();
            self.turn()?;
            let now = Instant::now();
            let mut wait = self.next_tick.saturating_duration_since(now);
            if self.links.are_busy() {
                wait = wait.min(SOON);
            }
            latch::wait(Some(wait.max(Duration::from_millis(1))));
        }
    }

    /// Does all that there is to do now.
    fn turn(&mut self) -> Result<(), PgError> {
        self.receive()?;
        self.take_questions();
        if Instant::now() >= self.next_tick {
            let now = self.now();
            self.pass(|agreement| agreement.tick(now))?;
            self.close_times()?;
            self.balance()?;
            self.next_tick = Instant::now() + self.tick;
            self.tell_waiting();
        }
        self.work()?;
        for lost in self.links.tend() {
            self.pass(|agreement| agreement.unreachable(lost))?;
        }
        if let Some(why) = self.agreement.stopped().cloned() {
            self.rest(&why)?;
        }
        if Instant::now() >= self.next_view {
            self.show();
            self.mailbox.sweep();
            self.next_view = Instant::now() + SHOWN_EVERY;
        }
        Ok(())
    }

    /// Runs a call that brings the agreement something. An error that ends it ends the process.
    fn pass<T>(
        &mut self,
        call: impl FnOnce(&mut Agreement) -> Result<T, Error>,
    ) -> Result<Option<T>, PgError> {
        match call(&mut self.agreement) {
            Ok(value) => Ok(Some(value)),
            // Shown, and rested upon, by `turn`.
            Err(Error::Stopped(_)) => Ok(None),
            Err(error) if error.is_final() => Err(of_agreement(error)),
            Err(error) => {
                self.complain(&error);
                Ok(None)
            }
        }
    }

    /// Logs an error of a message: each at most once a minute.
    fn complain(&mut self, error: &Error) {
        let words = error.to_string();
        let is_new = self
            .complained
            .as_ref()
            .is_none_or(|(last, at)| *last != words || at.elapsed() > Duration::from_secs(60));
        if is_new {
            pgrx::log!("braid group: {words}");
            self.complained = Some((words, Instant::now()));
        }
    }

    fn receive(&mut self) -> Result<(), PgError> {
        let mut messages = self.mailbox.take_mail();
        // A letter is announced just before its commit.
        if self.mailbox.take_letters() {
            self.letters_until = Some(Instant::now() + LETTERS);
        }
        if let Some(until) = self.letters_until {
            let letters = error::transaction(store::take_letters)?;
            if !letters.is_empty() || Instant::now() > until {
                self.letters_until = None;
            }
            messages.extend(letters);
        }
        for message in messages {
            if braid_routing::Report::is_one(&message) {
                let standing = self.standing();
                if let Some(state) = self.agreement.state() {
                    let group = &self.group;
                    self.balancing.receive(&message, group, state, standing);
                }
                continue;
            }
            let now = self.now();
            self.pass(|agreement| agreement.receive(&message, now))?;
        }
        Ok(())
    }

    fn take_questions(&mut self) {
        for (ticket, question) in self.mailbox.take_questions() {
            let now = self.now();
            let read = request::read_question(&question);
            if let Ok(Question::Command(Command::SetConnection { member, connection })) = &read {
                self.use_at_once(*member, connection.expose());
            }
            let proposed = match read {
                Ok(Question::Vouch(absent)) => {
                    let answer = self.vouch(absent);
                    self.mailbox.answer(ticket, &answer);
                    continue;
                }
                Ok(Question::Command(command)) => self.agreement.propose(command, now),
                Err(error) => Err(error.into()),
            };
            match proposed {
                Ok(id) => {
                    let since = Instant::now();
                    self.asked.insert(id, Asked { ticket, since });
                }
                Err(error) => {
                    let answer = request::failure(&of_agreement(error));
                    self.mailbox.answer(ticket, &answer);
                }
            }
        }
    }

    /// Sends to a member by this connection string, before the group has agreed on it.
    fn use_at_once(&mut self, member: MemberId, dsn: &str) {
        self.moved.insert(member, dsn.to_owned());
        if let Err(failure) = self.keep_links() {
            failure.log("braid group");
        }
    }

    /// Does not wait until a member confirms this one's start. Returns the answer.
    fn vouch(&mut self, absent: MemberId) -> Vec<u8> {
        if self.agreement.vouch(absent) {
            pgrx::log!(
                "braid group: this node's start counts without a word of member {absent}, as braid.start_without was called"
            );
            return request::answer(&Ok(Value::Done));
        }
        request::failure(
            &PgError::new(
                SqlState::ObjectNotInPrerequisiteState,
                format!("this node does not wait for member {absent} to confirm its start"),
            )
            .with_hint("The view braid.group_nodes says for whom it waits."),
        )
    }

    /// Has the next time closed, if routed tables are used.
    fn close_times(&mut self) -> Result<(), PgError> {
        let Some(state) = self.agreement.state() else {
            return Ok(());
        };
        let (closed, now) = (state.routing().closed(), self.now());
        let leads = self.agreement.leads();
        let step = self.places.tick(closed, leads);
        if let Some(before) = step.withdraw {
            self.agreement.withdraw(before);
        }
        if let Some(entry) = step.propose {
            let command = Command::Route(entry);
            let proposed = self.pass(|agreement| agreement.propose(command, now))?;
            self.places.proposed(proposed);
        }
        Ok(())
    }

    fn standing(&self) -> Standing {
        Standing {
            me: self.agreement.me(),
            leader: self.agreement.leader(),
            leads: self.agreement.leads(),
        }
    }

    /// Has hot tenants of routed tables spread.
    fn balance(&mut self) -> Result<(), PgError> {
        let (standing, now) = (self.standing(), self.now());
        let Some(state) = self.agreement.state() else {
            return Ok(());
        };
        let step = self.balancing.tick(&self.group, state, standing);
        for (to, report) in step.send {
            self.links.send(to, report);
        }
        for command in step.propose {
            self.pass(|agreement| agreement.propose(command, now))?;
        }
        Ok(())
    }

    /// Answers those that have waited for long: nobody waits for a majority without knowing.
    fn tell_waiting(&mut self) {
        let late = |asked: &Asked| asked.since.elapsed() > PATIENCE;
        if !self.asked.values().any(late) {
            return;
        }
        let failure = PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "the group has not agreed in time",
        )
        .with_detail(format!("{}.", self.agreement.diagnosis(self.now())))
        .with_hint("The request takes effect if a majority is there later. See braid.group_nodes.");
        let answer = request::failure(&failure);
        let (mailbox, agreement) = (&self.mailbox, &mut self.agreement);
        self.asked.retain(|id, asked| {
            if late(asked) {
                mailbox.answer(asked.ticket, &answer);
                agreement.withdraw(*id);
                return false;
            }
            true
        });
    }

    /// Runs `what` in a transaction, as long as this node is the member that it was.
    fn write(&self, what: impl FnOnce() -> Result<(), PgError>) -> Result<(), PgError> {
        error::transaction(|| {
            store::hold(&self.group, self.agreement.me())?;
            what()
        })
    }

    /// Writes what is to be remembered, then lets its effects out.
    fn work(&mut self) -> Result<(), PgError> {
        while let Some(Some(work)) = self.pass(Agreement::work)? {
            if !work.is_empty() {
                self.write(|| store::write(&work))?;
            }
            let number = work.number;
            if let Some(effects) = self.pass(|agreement| agreement.persisted(number))? {
                self.let_out(effects)?;
            }
        }
        Ok(())
    }

    fn let_out(&mut self, effects: Effects) -> Result<(), PgError> {
        // An entry that only closes a time comes twice a second, and changes no table.
        let is_first = !self.places.is_shown();
        let changed =
            is_first || effects.replaced || !effects.applied.iter().all(places::only_closes);
        let index = self.agreement.state().map_or(0, State::index);
        let is_newer = index >= self.shown_index;
        if is_newer
            && !changed
            && let Some(state) = self.agreement.state()
        {
            self.places.show_close(state.routing().closed());
        }
        if is_newer
            && changed
            && let Some(state) = self.agreement.state().cloned()
        {
            self.shown_index = index;
            let shown = self.shown.take();
            let mut members_changed = false;
            self.write(|| {
                let changes = store::show_since(shown.as_ref(), &state)?;
                members_changed = changes.members;
                // The entries are on disk, and applied again after a crash. But that takes a
                // majority. Without one the member would go back behind an answer that it gave:
                // one that takes no writes would take them again.
                if !changes.anything {
                    execute("set local synchronous_commit = off", &[])?;
                }
                store::log(&effects.applied, &state)
            })?;
            if is_first || effects.replaced || effects.applied.iter().any(places::concerns_routing)
            {
                self.places.show(&state, self.agreement.me())?;
                plan_anew(&state);
            } else {
                self.places.show_close(state.routing().closed());
            }
            if is_first || effects.replaced || effects.applied.iter().any(balancing::concerns) {
                self.balancing.follow(&state)?;
            }
            for entry in &effects.applied {
                if let (Command::Decide(decided), Ok(_)) = (&entry.proposal.command, &entry.outcome)
                {
                    self.balancing.note(decided);
                }
            }
            // Before the answer: who asked counts on it.
            tables::changed(state.versioned_tables().next().is_some());
            let own = state.member(self.agreement.me());
            if own.is_some_and(|own| own.read_only)
                && let Some(entry) = registry::my_manager()
            {
                // The manager does it as well, a moment later: for both values, and after a start.
                entry
                    .membership
                    .store(registry::READ_ONLY, Ordering::Release);
            }
            for entry in &effects.applied {
                if let Command::SetConnection { member, .. } = &entry.proposal.command {
                    self.moved.remove(member);
                }
            }
            if members_changed {
                self.keep_links()?;
            }
            registry::wake_manager(process::my_database());
            registry::wake_sequences(process::my_database());
            self.shown = Some(state);
        }
        for (to, message) in effects.send {
            self.links.send(to, message);
        }
        for (id, outcome) in effects.answered {
            self.places.answered(id);
            if let Some(asked) = self.asked.remove(&id) {
                self.mailbox
                    .answer(asked.ticket, &request::answer(&outcome));
            }
        }
        Ok(())
    }

    fn keep_links(&mut self) -> Result<(), PgError> {
        let me = self.agreement.me();
        let mut targets: Vec<Target> = error::transaction(|| store::peers(me))?;
        for target in &mut targets {
            if let Some(dsn) = self.moved.get(&target.id) {
                target.dsn.clone_from(dsn);
            }
        }
        self.links.keep(targets);
        Ok(())
    }

    /// Tells the group of this node's versions, if they are other ones than it knows.
    fn note_version(&mut self) -> Result<(), PgError> {
        let (braid, postgres) = (version(), server::major());
        let me = self.agreement.me();
        let known = self.agreement.state().and_then(|state| state.member(me));
        if known.is_some_and(|own| (own.about.braid, own.about.postgres) != (braid, postgres)) {
            let now = self.now();
            self.pass(|agreement| {
                agreement.propose(
                    Command::SetVersion {
                        member: me,
                        braid,
                        postgres,
                    },
                    now,
                )
            })?;
        }
        Ok(())
    }

    /// The member takes no part any more: says so, and waits until somebody ends it.
    fn rest(&mut self, why: &Stopped) -> Result<(), PgError> {
        if let Stopped::Failed(_) = why {
            return Err(of_agreement(Error::Stopped(why.clone())));
        }
        let failure = of_agreement(Error::Stopped(why.clone()));
        let hint = failure.hint.clone().unwrap_or_default();
        self.write(|| store::stop(why, &hint))?;
        failure.log("braid group");
        self.places.hide();
        self.balancing.hide();
        let answer = request::failure(&failure);
        for asked in std::mem::take(&mut self.asked).into_values() {
            self.mailbox.answer(asked.ticket, &answer);
        }
        registry::wake_manager(process::my_database());
        loop {
            worker::reload_settings();
            self.show();
            for (ticket, _) in self.mailbox.take_questions() {
                self.mailbox.answer(ticket, &answer);
            }
            drop(self.mailbox.take_mail());
            latch::wait(Some(Duration::from_secs(1)));
        }
    }

    /// Why a member looks as if it could not be reached: for people. Empty if it can be.
    fn problem_of(&self, sight: &Sight) -> String {
        match self.links.failure(sight.id) {
            Some(error) => shortened(error),
            None if sight.reachable || sight.id == self.agreement.me() => String::new(),
            None => "it takes messages of this node, but none comes from it".to_owned(),
        }
    }

    /// Shows how the group looks from here.
    fn show(&mut self) {
        let diagnosis = self.agreement.diagnosis(self.now());
        let mut lines = vec![
            diagnosis.to_string(),
            diagnosis
                .leader
                .as_ref()
                .map_or_else(String::new, |leader| leader.0.to_string()),
            diagnosis.term.to_string(),
            diagnosis.committed.to_string(),
            diagnosis.majority.to_string(),
        ];
        let mut is_news = false;
        for sight in &diagnosis.members {
            let since = if sight.reachable {
                is_news |= !self.reached.contains_key(&sight.id);
                let since = self.reached.entry(sight.id).or_insert_with(timestamp::now);
                since.to_string()
            } else {
                self.reached.remove(&sight.id);
                String::new()
            };
            let problem = self.problem_of(sight);
            lines.push(format!(
                "{} {} {} {} {since} {problem}",
                sight.id, sight.reachable, sight.silent, sight.applied
            ));
        }
        self.mailbox.show(lines.join("\n").as_bytes());
        if is_news {
            self.entry.members_reached.fetch_add(1, Ordering::AcqRel);
            registry::wake_manager(process::my_database());
        }
    }
}

/// The beginning of an error of a connection, in one line.
fn shortened(error: &str) -> String {
    let words: Vec<&str> = error.split_whitespace().collect();
    words.join(" ").chars().take(SHOWN_ERROR).collect()
}

/// Has sessions plan anew what depends on the nodes of routed tables. If it fails, each plan finds
/// by itself that it is too old.
fn plan_anew(state: &State) {
    if state.routing().tables().next().is_some() {
        let _ = error::transaction(umbrella::plan_anew);
    }
}
