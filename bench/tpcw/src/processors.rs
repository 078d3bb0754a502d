//! The processors of one node. Processes share them as Linux has it: the process that has had
//! least runs next, for a slice. A process that was asleep gets two slices of credit at most.

use std::collections::{BTreeSet, VecDeque};

/// Nanoseconds.
pub type Time = u64;

const SLICE: Time = 500_000;

#[derive(Debug)]
struct Process<Job> {
    had: Time,
    jobs: VecDeque<(Time, Job)>,
    is_ready: bool,
}

/// The processors of one node, and the processes that share them.
#[derive(Debug)]
pub struct Processors<Job> {
    idle: usize,
    processes: Vec<Process<Job>>,
    ready: BTreeSet<(Time, usize)>,
    /// The time that the last started process has had.
    least: Time,
    /// Processor time that was used.
    pub used: Time,
}

impl<Job> Processors<Job> {
    /// With a number of processors and of processes.
    pub fn new(count: usize, processes: usize) -> Self {
        let process = || Process {
            had: 0,
            jobs: VecDeque::new(),
            is_ready: false,
        };
        Self {
            idle: count,
            processes: (0..processes).map(|_| process()).collect(),
            ready: BTreeSet::new(),
            least: 0,
            used: 0,
        }
    }

    /// Gives a process something to do, after all that it has to do already.
    pub fn give(&mut self, process: usize, work: Time, job: Job) {
        let least = self.least.saturating_sub(2 * SLICE);
        let at = &mut self.processes[process];
        at.jobs.push_back((work.max(1), job));
        if !at.is_ready {
            at.is_ready = true;
            at.had = at.had.max(least);
            self.ready.insert((at.had, process));
        }
    }

    /// Starts what can be started: processes, each with the length of its slice.
    pub fn start(&mut self) -> Vec<(usize, Time)> {
        let mut started = Vec::new();
        while self.idle > 0
            && let Some((had, process)) = self.ready.pop_first()
        {
            self.idle -= 1;
            self.least = self.least.max(had);
            let left = self.processes[process].jobs.front().map_or(0, |job| job.0);
            started.push((process, left.min(SLICE)));
        }
        started
    }

    /// A slice is over. Returns the job, if it is done.
    pub fn stop(&mut self, process: usize, slice: Time) -> Option<Job> {
        self.idle += 1;
        self.used += slice;
        let at = &mut self.processes[process];
        at.had += slice;
        let first = at.jobs.front_mut()?;
        first.0 -= slice;
        let done = (first.0 == 0).then(|| at.jobs.pop_front()).flatten();
        if at.jobs.is_empty() {
            at.is_ready = false;
        } else {
            self.ready.insert((at.had, process));
        }
        done.map(|(_, job)| job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs until nothing is left. Returns when each job is done.
    fn run(processors: &mut Processors<char>) -> Vec<(Time, char)> {
        let (mut running, mut done) = (BTreeSet::new(), Vec::new());
        let mut now = 0;
        loop {
            for (process, slice) in processors.start() {
                running.insert((now + slice, process, slice));
            }
            let Some((at, process, slice)) = running.pop_first() else {
                return done;
            };
            now = at;
            if let Some(job) = processors.stop(process, slice) {
                done.push((now, job));
            }
        }
    }

    #[test]
    fn two_share_one_processor() {
        let mut one = Processors::new(1, 2);
        one.give(0, 4 * SLICE, 'a');
        one.give(1, 2 * SLICE, 'b');
        assert_eq!(run(&mut one), [(4 * SLICE, 'b'), (6 * SLICE, 'a')]);
        assert_eq!(one.used, 6 * SLICE);
    }

    #[test]
    fn two_processors_run_two() {
        let mut two = Processors::new(2, 2);
        two.give(0, 4 * SLICE, 'a');
        two.give(1, 2 * SLICE, 'b');
        two.give(1, SLICE, 'c');
        assert_eq!(
            run(&mut two),
            [(2 * SLICE, 'b'), (3 * SLICE, 'c'), (4 * SLICE, 'a')]
        );
    }

    #[test]
    fn one_that_has_slept_is_next() {
        let mut one = Processors::new(1, 3);
        one.give(0, 9 * SLICE, 'a');
        one.give(1, 9 * SLICE, 'b');
        for _ in 0..6 {
            let started = one.start();
            assert!(one.stop(started[0].0, started[0].1).is_none());
        }
        one.give(2, SLICE, 'c');
        assert_eq!(one.start(), [(2, SLICE)]);
    }
}
