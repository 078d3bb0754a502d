//! Leader and appliers as threads, which sleep without time-outs. A lost wake-up stops everything,
//! and the watchdog then fails the test.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use braid_ring::{
    Awaited, Complete, EDGES, FrameRead, Geometry, Grain, Leader, Ring, Transaction, Wakes,
};

use crate::memory::{Memory, Random, ring};

/// Latches by address: 1 is the leader's, 2 and on the appliers'. A thread's token is as sticky as
/// a latch.
struct Latches {
    threads: Vec<Mutex<Option<Thread>>>,
    moves: AtomicU64,
    failed: AtomicBool,
}

impl Latches {
    fn new(appliers: usize) -> Self {
        Self {
            threads: (0..=appliers).map(|_| Mutex::new(None)).collect(),
            moves: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        }
    }

    fn own(&self, latch: usize) {
        *self.threads[latch - 1].lock().unwrap() = Some(thread::current());
    }

    fn set(&self, wakes: &Wakes) {
        for latch in wakes.iter() {
            if let Some(thread) = &*self.threads[latch - 1].lock().unwrap() {
                thread.unpark();
            }
        }
    }

    fn sleep(&self) {
        thread::park();
        assert!(
            !self.failed.load(Ordering::Relaxed),
            "the watchdog has barked"
        );
    }

    fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// Until `done`, fails if nothing moves for half a minute.
    fn watch(&self, memory: &Memory, done: &AtomicBool) {
        let ring = memory.attach().unwrap();
        let mut last = (0, Instant::now());
        while !done.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
            let moves = self.moves.load(Ordering::Relaxed);
            if moves != last.0 {
                last = (moves, Instant::now());
            } else if last.1.elapsed() > Duration::from_secs(30) {
                eprintln!(
                    "nothing moves: published {}, claimed {}, committed {}, tail {}",
                    ring.published(),
                    ring.claimed(),
                    ring.committed(),
                    ring.tail()
                );
                self.failed.store(true, Ordering::Relaxed);
                for thread in &self.threads {
                    if let Some(thread) = &*thread.lock().unwrap() {
                        thread.unpark();
                    }
                }
                return;
            }
        }
    }
}

/// The frames of transaction `number` are a function of the seed and the number.
fn content(seed: u64, number: u64, buffer: usize) -> (Vec<Vec<u8>>, Complete) {
    let mut random = Random::from_seed(seed ^ number.wrapping_mul(0x1234_5678_9abc_def1));
    let kind = random.index(1000);
    let (most, frames) = match kind {
        0..=4 => (buffer * 3, 2),   // larger than the ring in one frame
        5..=9 => (buffer / 20, 60), // larger than the ring in many
        10..=59 => (buffer / 4, 3), // pieces
        60..=99 => (10, 0),
        _ => (200, 5),
    };
    let frames: Vec<_> = (0..random.index(frames + 1))
        .map(|_| {
            let len = random.index(most);
            random.bytes(len)
        })
        .collect();
    let complete = Complete {
        depends_on: if random.index(3) == 0 {
            number.saturating_sub(1 + random.next() % 10)
        } else {
            0
        },
        through: 0,
        edges: {
            let mut edges = [0; EDGES];
            let count = random.index(EDGES + 1);
            for edge in edges.iter_mut().take(count) {
                *edge = number.saturating_sub(1 + random.next() % 12);
            }
            edges
        },
        commit_lsn: number * 10,
        end_lsn: number * 10 + 5,
        commit_timestamp: number.cast_signed(),
        changes: 1,
        skip: random.index(50) == 0,
        split: random.index(10) == 0,
        wide: random.index(10) == 0,
        alone: false,
        elsewhere: false,
    };
    (frames, complete)
}

struct Producer<'a> {
    leader: Leader,
    latches: &'a Latches,
    collected: u64,
    random: Random,
}

impl Producer<'_> {
    fn collect(&mut self) {
        while self.collected < self.leader.ring().committed() {
            self.collected += 1;
            let number = self.collected;
            let (remote, local, timestamp) = self.leader.committed_at(number);
            assert_eq!(
                (remote, local, timestamp),
                (number * 10 + 5, number * 3, number.cast_signed())
            );
        }
    }

    fn wait_until(&mut self, mut ready: impl FnMut(&mut Leader) -> bool) {
        loop {
            self.collect();
            if ready(&mut self.leader) {
                return;
            }
            self.leader.ring().leader_will_wait(0);
            self.collect();
            if ready(&mut self.leader) {
                return;
            }
            self.latches.sleep();
        }
    }

    fn send(&mut self, frames: &[Vec<u8>], complete: &Complete) {
        self.wait_until(|leader| leader.has_descriptor());
        for frame in frames {
            let piece = self.leader.piece();
            let (mut rest, mut first) = (&frame[..], true);
            loop {
                let (now, later) = rest.split_at(rest.len().min(piece));
                self.wait_until(|leader| leader.store(now, first, later.is_empty()));
                self.latches.moved();
                if self.leader.should_open() {
                    self.leader.publish_open(0, false);
                    self.latches
                        .set(&self.leader.ring().idle_appliers(Grain::ONE));
                }
                if self.leader.is_open() {
                    self.leader.extend();
                    self.latches.set(&self.leader.ring().all_appliers());
                }
                if later.is_empty() {
                    break;
                }
                (rest, first) = (later, false);
            }
        }
        let open = self.leader.is_open();
        self.leader.publish(complete);
        let ring = self.leader.ring();
        if self.random.index(20) == 0 {
            ring.set_taking(1 + self.random.index(4));
            self.latches.set(&ring.all_appliers());
        }
        self.latches.set(&if open {
            ring.all_appliers()
        } else {
            ring.idle_appliers(Grain::ONE)
        });
        self.latches.moved();
    }
}

struct Applier<'a> {
    ring: Ring,
    number: usize,
    latches: &'a Latches,
    seed: u64,
    order: &'a Mutex<Vec<u64>>,
    random: Random,
    /// Uses wait lists; else waits with a transaction for its dependencies.
    asides: bool,
}

impl Applier<'_> {
    fn run(&mut self) {
        self.latches.own(self.number + 2);
        while let Some(mut transaction) = self.next() {
            if self.random.index(8) == 0 {
                thread::yield_now();
            }
            let sequence = transaction.sequence;
            if self.asides {
                if !transaction.is_open()
                    && !transaction.is_tried()
                    && (transaction.is_skipped() || self.random.index(30) == 0)
                    && self.ring.put_aside_until_turn(self.number, sequence, false)
                {
                    continue;
                }
                let (through, edges) = transaction.needs(sequence);
                self.wait_for(through);
                for edge in edges {
                    self.wait_for_one(edge);
                }
            } else {
                self.wait_for(transaction.depends_on);
            }
            if self.ring.is_relaxed() && transaction.is_open() {
                self.wait_for(sequence - 1);
            }
            self.check(&mut transaction);
            if !transaction.is_open() && self.random.index(10) == 0 {
                transaction.rewind();
                self.check(&mut transaction);
            }
            if self.ring.is_relaxed() {
                for edge in transaction.needs(sequence).1 {
                    self.wait_for_one(edge);
                }
                if transaction.is_skipped() {
                    self.wait_for(sequence - 1);
                }
                let (mark, end) = self.ring.mark();
                assert_eq!(end, if mark == 0 { 3 } else { mark * 10 + 5 });
                self.order.lock().unwrap().push(sequence);
            } else {
                self.wait_for(sequence - 1);
                let mut order = self.order.lock().unwrap();
                assert_eq!(
                    self.ring.committed(),
                    sequence - 1,
                    "its turn, and nobody else's"
                );
                order.push(sequence);
            }
            self.latches
                .set(&self.ring.commit(self.number, sequence, sequence * 3, 0));
            self.latches.moved();
        }
    }

    fn next(&self) -> Option<Transaction> {
        loop {
            let all = self.ring.published();
            let end = if self.asides {
                self.ring.committed()
            } else {
                self.ring.claimed()
            };
            if self.ring.stop_requested() && end == all {
                return None;
            }
            if self.asides {
                // The first time as an applier that comes from a commit: it looks before it is
                // idle.
                if let Some(sequence) = self.ring.take(self.number) {
                    return Some(self.ring.transaction(sequence));
                }
                self.ring
                    .applier_will_wait(self.number, Awaited::Transaction);
                if let Some(sequence) = self.ring.take(self.number) {
                    self.ring.applier_awake(self.number);
                    self.latches.set(&self.ring.offer());
                    return Some(self.ring.transaction(sequence));
                }
            } else {
                self.ring
                    .applier_will_wait(self.number, Awaited::Transaction);
            }
            if !self.asides
                && let Some(transaction) = self.ring.claim(self.number)
            {
                self.ring.applier_awake(self.number);
                return Some(transaction);
            }
            if !self.ring.takers().contains(&self.number) {
                self.latches.set(&self.ring.left_behind());
            }
            self.latches.sleep();
            self.ring.applier_awake(self.number);
        }
    }

    fn wait_for(&self, sequence: u64) {
        while self.ring.committed() < sequence {
            self.ring
                .applier_will_wait(self.number, Awaited::Commit(sequence));
            if self.ring.committed() < sequence {
                self.latches.sleep();
            }
            self.ring.applier_awake(self.number);
        }
    }

    fn wait_for_one(&self, sequence: u64) {
        while !self.ring.is_done(sequence) {
            self.ring.applier_will_wait_for(self.number, sequence);
            if !self.ring.is_done(sequence) {
                self.latches.sleep();
            }
            self.ring.applier_awake(self.number);
        }
    }

    /// Checks that every byte is there, once.
    fn check(&self, transaction: &mut Transaction) {
        let buffer = usize::try_from(self.ring.geometry().buffer).unwrap();
        let (frames, complete) = content(self.seed, transaction.sequence, buffer);
        let mut expected = frames.iter();
        let mut assembled = Vec::new();
        loop {
            let read = transaction
                .next_frame(&mut assembled, |wakes| self.latches.set(wakes))
                .unwrap();
            match read {
                FrameRead::Frame(frame) => assert!(expected.next().unwrap() == frame),
                FrameRead::Assembled => assert!(expected.next().unwrap() == &assembled),
                FrameRead::Pending => self.latches.sleep(),
                FrameRead::End => break,
            }
            self.latches.moved();
        }
        assert!(expected.next().is_none());
        assert_eq!(transaction.is_skipped(), complete.skip);
        assert_eq!(transaction.is_wide(), complete.wide);
        assert_eq!(transaction.end_lsn(), complete.end_lsn);
    }
}

/// Least number of transactions of a run.
const LEAST: u64 = 10;
/// Time that a run may take until it has seen everything that it is to show.
const BUSY: Duration = Duration::from_secs(60);

/// Returns how often a transaction was committed after a later one.
fn overtaken(order: &[u64]) -> usize {
    order.windows(2).filter(|pair| pair[0] > pair[1]).count()
}

/// Runs transactions for a while. Returns how many.
fn run(seed: u64, geometry: Geometry, time: Duration, relaxed: bool, asides: bool) -> u64 {
    let (memory, leader) = ring(geometry);
    if relaxed {
        leader.ring().relax(3);
    }
    let latches = Latches::new(geometry.appliers);
    let order = Mutex::new(Vec::new());
    let done = AtomicBool::new(false);
    let main = memory.attach().unwrap();
    let count = thread::scope(|scope| {
        let watchdog = scope.spawn(|| latches.watch(&memory, &done));
        let appliers: Vec<_> = (0..geometry.appliers)
            .map(|number| {
                let (memory, latches, order) = (&memory, &latches, &order);
                scope.spawn(move || {
                    let ring = memory.attach().unwrap();
                    let random = Random::from_seed(seed ^ number as u64);
                    Applier {
                        ring,
                        number,
                        latches,
                        seed,
                        order,
                        random,
                        asides,
                    }
                    .run();
                })
            })
            .collect();
        let producer = scope.spawn(|| {
            // A ring can't be sent to another thread; a second view of the same memory can be made
            // there.
            let leader = Leader::new(memory.attach().unwrap());
            latches.own(1);
            let mut producer = Producer {
                leader,
                latches: &latches,
                collected: 0,
                random: Random::from_seed(seed),
            };
            let buffer = usize::try_from(geometry.buffer).unwrap();
            let (start, mut number) = (Instant::now(), 0);
            let mut random = Random::from_seed(seed);
            // A busy machine gets through fewer in the time.
            let has_seen = |number| {
                let overtakes = relaxed && geometry.appliers > 1;
                number > LEAST && (!overtakes || overtaken(&order.lock().unwrap()) > 0)
            };
            while start.elapsed() < time || start.elapsed() < BUSY && !has_seen(number) {
                number += 1;
                let (frames, complete) = content(seed, number, buffer);
                producer.send(&frames, &complete);
                if random.index(200) == 0 {
                    // Lets all threads fall asleep.
                    producer.wait_until(|leader| leader.ring().committed() == number);
                }
            }
            producer.wait_until(|leader| leader.ring().committed() == number);
            // The last ones may have been committed after it had collected and before it looked.
            producer.collect();
            assert_eq!(producer.collected, number);
            number
        });
        let count = producer.join();
        main.request_stop();
        latches.set(&main.all_appliers());
        let appliers: Vec<_> = appliers
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect();
        done.store(true, Ordering::Relaxed);
        watchdog.join().unwrap();
        for applier in appliers {
            applier.unwrap();
        }
        count.unwrap()
    });
    assert!(!latches.failed.load(Ordering::Relaxed));
    let mut order = order.into_inner().unwrap();
    if relaxed {
        let overtaken = overtaken(&order);
        println!("{overtaken} overtaken");
        assert!(overtaken > 0 || geometry.appliers == 1);
        order.sort_unstable();
    }
    assert_eq!(
        order,
        (1..=count).collect::<Vec<_>>(),
        "i5: commits in order; i1: each once"
    );
    assert_eq!(main.tail() % 8, 0);
    count
}

#[test]
fn i5_i6_every_transaction_arrives_whole_once_and_in_order() {
    let mut random = Random::new("i5_i6_every_transaction_arrives_whole_once_and_in_order");
    for (appliers, buffer, descriptors) in [(1, 0, 16), (2, 0, 64), (4, 0, 16), (8, 1 << 20, 1024)]
    {
        let geometry = Geometry::new(appliers, buffer, descriptors);
        let count = run(
            random.next(),
            geometry,
            Duration::from_millis(700),
            false,
            false,
        );
        println!("{appliers} appliers: {count} transactions");
        assert!(count > LEAST);
    }
}

#[test]
fn i1_i6_every_transaction_arrives_whole_once_when_commits_overtake_each_other() {
    let mut random =
        Random::new("i1_i6_every_transaction_arrives_whole_once_when_commits_overtake_each_other");
    for (appliers, buffer, descriptors) in [(1, 0, 16), (2, 0, 64), (4, 0, 16), (8, 1 << 20, 1024)]
    {
        let geometry = Geometry::new(appliers, buffer, descriptors);
        let count = run(
            random.next(),
            geometry,
            Duration::from_millis(700),
            true,
            false,
        );
        println!("{appliers} appliers: {count} transactions");
        assert!(count > LEAST);
    }
}

#[test]
fn i1_i6_every_transaction_arrives_whole_once_when_some_are_put_aside() {
    let mut random =
        Random::new("i1_i6_every_transaction_arrives_whole_once_when_some_are_put_aside");
    for (appliers, buffer, descriptors) in [(1, 0, 16), (2, 0, 64), (4, 0, 16), (8, 1 << 20, 1024)]
    {
        let geometry = Geometry::new(appliers, buffer, descriptors);
        let count = run(
            random.next(),
            geometry,
            Duration::from_millis(700),
            true,
            true,
        );
        println!("{appliers} appliers: {count} transactions");
        assert!(count > LEAST);
    }
}

#[test]
fn an_open_transaction_several_times_the_ring_streams_through() {
    let (memory, leader) = ring(Geometry::new(1, 0, 16));
    let latches = Latches::new(1);
    let view = leader.ring();
    let mut random = Random::new("an_open_transaction_several_times_the_ring_streams_through");
    let total = 20 * 65_536;
    let bytes = random.bytes(total);
    thread::scope(|scope| {
        let (memory, latches, expected) = (&memory, &latches, &bytes);
        let applier = scope.spawn(move || {
            latches.own(2);
            let ring = memory.attach().unwrap();
            let mut transaction = loop {
                ring.applier_will_wait(0, Awaited::Transaction);
                match ring.claim(0) {
                    Some(transaction) => break transaction,
                    None => latches.sleep(),
                }
                ring.applier_awake(0);
            };
            assert!(transaction.is_open());
            let (mut assembled, mut read) = (Vec::new(), 0);
            loop {
                match transaction
                    .next_frame(&mut assembled, |wakes| latches.set(wakes))
                    .unwrap()
                {
                    FrameRead::Frame(frame) => {
                        assert!(frame == &expected[read..read + frame.len()]);
                        read += frame.len();
                    }
                    FrameRead::Assembled => {
                        assert!(assembled == expected[read..read + assembled.len()]);
                        read += assembled.len();
                    }
                    FrameRead::Pending => latches.sleep(),
                    FrameRead::End => break,
                }
            }
            let _ = ring.commit(0, 1, 1, 0);
            read
        });
        latches.own(1);
        let mut producer = Producer {
            leader: Leader::new(view),
            latches,
            collected: 0,
            random: Random::from_seed(1),
        };
        // Frames of 100 bytes to four times the ring.
        let mut frames = Vec::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let len = if random.index(50) == 0 {
                random.index(4 * 65_536)
            } else {
                100
            };
            let (now, later) = rest.split_at(len.min(rest.len()));
            frames.push(now.to_vec());
            rest = later;
        }
        producer.send(
            &frames,
            &Complete {
                commit_lsn: 10,
                end_lsn: 15,
                commit_timestamp: 1,
                ..Complete::default()
            },
        );
        assert_eq!(applier.join().unwrap(), total);
    });
    assert_eq!(view.committed(), 1);
    assert!(view.tail() > total as u64);
}
