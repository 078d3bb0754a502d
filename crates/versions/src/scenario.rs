//! The example of the crate's head, and single rules of the sequencer and of a node.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Access, Answer, Batch, Boot, Commit, Cut, EarlyRelease, Edge, End, Error, Grant, Learned,
    Local, NodeNumber, Record, Refusal, Release, Released, Report, Reports, Request, Scope,
    Sequencer, Shipped, Start, TABLES_LIMIT, TableNumber, Term, Verdict, Version, WINDOW,
};

const STOCK: TableNumber = TableNumber(1);
const ACCOUNTS: TableNumber = TableNumber(2);
const A: NodeNumber = NodeNumber(1);
const B: NodeNumber = NodeNumber(2);

fn first_cut() -> Cut {
    let report = Report {
        term: Term(0),
        ends: BTreeMap::new(),
    };
    let reports = Reports::from([(A, report.clone()), (B, report)]);
    Cut::new_sequencer(Term(0), 2, &reports, true).unwrap()
}

fn node(me: NodeNumber) -> Local {
    let mut local = Local::new(me, Boot(1));
    assert_eq!(local.learn(&first_cut()), Ok(Learned::Current));
    local
}

fn declare(tables: &[(TableNumber, Access)]) -> BTreeMap<TableNumber, Access> {
    tables.iter().copied().collect()
}

/// Asks for a transaction and carries the messages.
fn ask(local: &mut Local, sequencer: &mut Sequencer, tables: &[(TableNumber, Access)]) -> u64 {
    let number = local.ask(7, declare(tables), 0, 10).unwrap();
    exchange(local, sequencer);
    number
}

fn exchange(local: &mut Local, sequencer: &mut Sequencer) {
    if let Some(batch) = local.batch() {
        let answer = sequencer.receive(&batch, true);
        assert!(local.answer(&answer).is_empty());
    }
}

fn waits(local: &Local, number: u64) -> Vec<(TableNumber, u64)> {
    match local.start(number).unwrap() {
        Start::Wait(edges) => edges.iter().map(|e| (e.table, e.version.0)).collect(),
        other => panic!("{other:?}"),
    }
}

fn start(local: &mut Local, number: u64) {
    assert_eq!(local.started(number), Ok(Start::Ready));
}

fn commit(local: &mut Local, number: u64) -> Record {
    let Ok(Commit::Record(record)) = local.commit(number) else {
        panic!("no record");
    };
    local.committed(number).unwrap();
    record
}

fn apply(local: &mut Local, record: &Record) {
    assert_eq!(local.may_apply(record), Verdict::Apply);
    local.apply(record).unwrap();
    local.applied(record);
    assert_eq!(local.may_apply(record), Verdict::Already);
}

fn shipped(record: &Record) -> Vec<(TableNumber, u64, Option<u64>)> {
    let of = |(table, s): (&TableNumber, &Shipped)| (*table, s.seen.0, s.own.map(|own| own.0));
    record.tables.iter().map(of).collect()
}

#[test]
fn two_tables_on_two_nodes() {
    use Access::{Read, Write};
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let (mut a, mut b) = (node(A), node(B));
    let t1 = ask(&mut a, &mut sequencer, &[(STOCK, Write)]);
    start(&mut a, t1);
    let t2 = ask(&mut b, &mut sequencer, &[(STOCK, Read), (ACCOUNTS, Write)]);
    assert_eq!(waits(&b, t2), [(STOCK, 1)]);
    assert_eq!(b.waiting()[0].edges[0].holder, Some(A));
    let t3 = ask(&mut a, &mut sequencer, &[(STOCK, Write)]);
    assert_eq!(waits(&a, t3), [(STOCK, 1), (ACCOUNTS, 1)]);

    let first = commit(&mut a, t1);
    assert_eq!(shipped(&first), [(STOCK, 0, Some(1))]);
    assert_eq!(waits(&a, t3), [(ACCOUNTS, 1)]);
    apply(&mut b, &first);
    start(&mut b, t2);
    let second = commit(&mut b, t2);
    assert_eq!(shipped(&second), [(STOCK, 1, None), (ACCOUNTS, 0, Some(1))]);
    apply(&mut a, &second);
    start(&mut a, t3);

    let t4 = ask(&mut b, &mut sequencer, &[(STOCK, Write)]);
    assert_eq!(waits(&b, t4), [(STOCK, 2), (ACCOUNTS, 1)][..1]);
    a.abort(t3);
    exchange(&mut a, &mut sequencer);
    let end = End {
        committed: Version(1),
        settled: Version(2),
    };
    assert_eq!(sequencer.ends().get(&STOCK), Some(&end));
    assert!(b.announced(sequencer.term(), &sequencer.ends()));
    start(&mut b, t4);
    let third = commit(&mut b, t4);
    assert_eq!(shipped(&third)[0], (STOCK, 1, Some(3)));
    // A was not told that 2 is void.
    apply(&mut a, &third);
    assert!(a.has_reached(STOCK, Version(3)));
    exchange(&mut a, &mut sequencer);
    exchange(&mut b, &mut sequencer);
    assert_eq!(sequencer.outstanding(), 0);
    assert_eq!((a.batch(), b.batch()), (None, None));
}

fn batch(node: NodeNumber, low: u64, numbers: &[u64]) -> Batch {
    let request = |number: &u64| Request {
        number: *number,
        tables: declare(&[(STOCK, Access::Write)]),
    };
    Batch {
        term: Term(1),
        node,
        boot: Boot(1),
        low,
        requests: numbers.iter().map(request).collect(),
        releases: Vec::new(),
    }
}

fn releases(node: NodeNumber, low: u64, number: u64, released: Released) -> Batch {
    Batch {
        releases: vec![Release { number, released }],
        ..batch(node, low, &[])
    }
}

fn numbers(answer: &Answer) -> Vec<u64> {
    let own = |grant: &Grant| grant.tables[&STOCK].own.unwrap().0;
    answer.grants.iter().map(own).collect()
}

#[test]
fn a_repeat_takes_effect_once() {
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let both = batch(A, 1, &[1, 2]);
    let answer = sequencer.receive(&both, true);
    assert_eq!(numbers(&answer), [1, 2]);
    // A repeat is answered alike, even when nothing new may be granted.
    assert_eq!(sequencer.receive(&both, false), answer);
    // A release that overtakes its request cancels it.
    let cancel = releases(A, 1, 3, Released::Void);
    assert_eq!(sequencer.receive(&cancel, true).confirmed, cancel.releases);
    assert_eq!(
        sequencer.receive(&batch(A, 1, &[3]), true),
        Answer::default()
    );
    let done = releases(A, 1, 1, Released::Committed(BTreeSet::from([STOCK])));
    assert_eq!(sequencer.receive(&done, true).confirmed, done.releases);
    assert_eq!(sequencer.receive(&done, true).confirmed, done.releases);
    // Late repeats of what has ended, known by the lowest number that is still needed.
    assert_eq!(numbers(&sequencer.receive(&batch(A, 4, &[4]), true)), [3]);
    assert_eq!(sequencer.receive(&both, true), Answer::default());
    let answer = sequencer.receive(&batch(A, 4, &[4 + WINDOW]), true);
    assert_eq!(answer.refused, [(4 + WINDOW, Refusal::Window)]);
    assert_eq!(sequencer.counter(STOCK).0, Version(3));
}

#[test]
fn a_sequencer_refuses() {
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let refused = |answer: Answer| answer.refused.first().map(|(_, refusal)| *refusal);
    let answer = sequencer.receive(&batch(A, 1, &[1]), false);
    assert_eq!(refused(answer), Some(Refusal::NotActing));
    for term in [Term(0), Term(2)] {
        let other = Batch {
            term,
            ..batch(A, 1, &[1])
        };
        let answer = sequencer.receive(&other, true);
        assert_eq!(refused(answer), Some(Refusal::OtherTerm));
    }
    let mut many = batch(A, 1, &[1]);
    let table = |number| TableNumber(u32::try_from(number).unwrap());
    many.requests[0].tables = (0..=TABLES_LIMIT)
        .map(|number| (table(number), Access::Read))
        .collect();
    let answer = sequencer.receive(&many, true);
    assert_eq!(refused(answer), Some(Refusal::Tables));
    // The group's tables are limited too.
    many.requests[0].tables.pop_last();
    assert_eq!(sequencer.receive(&many, true).grants.len(), 1);
    many.requests[0].tables = declare(&[(table(TABLES_LIMIT), Access::Read)]);
    let answer = sequencer.receive(&many, true);
    assert_eq!(refused(answer), Some(Refusal::TooMany));

    let reports = |nodes: &[u16], term| {
        let report = Report {
            term: Term(term),
            ends: BTreeMap::new(),
        };
        let nodes = nodes.iter();
        nodes
            .map(|node| (NodeNumber(*node), report.clone()))
            .collect::<Reports>()
    };
    let cut = |nodes: &[u16], term, over| {
        Cut::new_sequencer(Term(1), 4, &reports(nodes, term), over).map(|cut| cut.term)
    };
    assert_eq!(cut(&[1, 2, 3], 1, true), Ok(Term(2)));
    assert_eq!(cut(&[1, 2, 3], 1, false), Err(Refusal::NotActing));
    assert_eq!(cut(&[1, 2], 1, true), Err(Refusal::NoMajority));
    assert_eq!(cut(&[1, 2, 3], 0, true), Err(Refusal::NoMajority));
}

#[test]
fn a_start_of_a_node_ends_what_it_was_granted_before() {
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    sequencer.receive(&batch(A, 1, &[1, 2, 3]), true);
    let has = BTreeMap::from([(STOCK, Version(2))]);
    assert_eq!(sequencer.restarted(Term(1), A, Boot(2), &has), Ok(()));
    let end = End {
        committed: Version(2),
        settled: Version(3),
    };
    assert_eq!(sequencer.counter(STOCK), (Version(3), end));
    let late = sequencer.receive(&batch(A, 1, &[4]), true);
    assert_eq!(late.refused, [(4, Refusal::OtherBoot)]);
    assert_eq!(
        sequencer.restarted(Term(1), A, Boot(1), &has),
        Err(Refusal::OtherBoot)
    );
    assert_eq!(sequencer.restarted(Term(1), A, Boot(2), &has), Ok(()));
}

#[test]
fn a_fenced_node_keeps_what_the_others_have() {
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    sequencer.receive(&batch(B, 1, &[1, 2]), true);
    let report = |version| Report {
        term: Term(1),
        ends: BTreeMap::from([(
            STOCK,
            End {
                committed: Version(version),
                settled: Version(version),
            },
        )]),
    };
    let one = Reports::from([(A, report(1))]);
    let members: BTreeSet<_> = (1..=3).map(NodeNumber).collect();
    let fence = |sequencer: &mut Sequencer, reports| sequencer.fence(B, Boot(1), &members, reports);
    assert_eq!(fence(&mut sequencer, &one), Err(Refusal::NoMajority));
    let fenced_too = Reports::from([(A, report(1)), (B, report(0))]);
    assert_eq!(fence(&mut sequencer, &fenced_too), Err(Refusal::NotAll));
    let two = Reports::from([(A, report(1)), (NodeNumber(3), report(0))]);
    let cut = fence(&mut sequencer, &two).unwrap();
    let void = BTreeSet::from([(STOCK, Version(2))]);
    let scope = Scope::Node {
        node: B,
        boot: Boot(1),
        void,
    };
    assert_eq!((cut.term, &cut.scope), (Term(2), &scope));
    // From now on the node is not heard, nor is its next start before the group has agreed.
    let answer = sequencer.receive(&batch(B, 1, &[3]), true);
    assert_eq!(answer.refused, [(3, Refusal::Fenced)]);
    let has = BTreeMap::from([(STOCK, Version(2))]);
    assert_eq!(
        sequencer.restarted(Term(1), B, Boot(2), &has),
        Err(Refusal::Fenced)
    );
    assert!(sequencer.learn(&cut));
    let end = End {
        committed: Version(1),
        settled: Version(2),
    };
    assert_eq!(sequencer.counter(STOCK), (Version(2), end));
    assert_eq!(sequencer.restarted(Term(2), B, Boot(2), &has), Ok(()));
    assert_eq!(sequencer.counter(STOCK), (Version(2), end));
}

#[test]
fn a_reader_with_a_later_write_in_its_snapshot_asks_again() {
    use Access::{Read, Write};
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let (mut a, mut b) = (node(A), node(B));
    let reader = ask(&mut b, &mut sequencer, &[(STOCK, Read), (ACCOUNTS, Read)]);
    let writer = ask(&mut a, &mut sequencer, &[(STOCK, Write)]);
    start(&mut a, writer);
    let record = commit(&mut a, writer);
    // A reader that needs nothing more is waited for: it is about to take its snapshot.
    assert_eq!(b.may_apply(&record), Verdict::Later);
    start(&mut b, reader);
    assert_eq!(b.commit(reader), Ok(Commit::ReadOnly));
    assert_eq!(b.may_apply(&record), Verdict::Apply);
    b.abort(reader);
    assert_eq!(b.batch(), None);

    // One that waits for another table is overtaken.
    let first = ask(&mut a, &mut sequencer, &[(ACCOUNTS, Write)]);
    let reader = ask(&mut b, &mut sequencer, &[(STOCK, Read), (ACCOUNTS, Read)]);
    let second = ask(&mut a, &mut sequencer, &[(STOCK, Write)]);
    start(&mut a, second);
    let later = commit(&mut a, second);
    apply(&mut b, &record);
    b.apply(&later).unwrap();
    // It is visible and not published.
    assert_eq!(b.start(reader), Ok(Start::Overtaken));
    b.applied(&later);
    let reader = b.ask_again(reader).unwrap();
    exchange(&mut b, &mut sequencer);
    assert_eq!(waits(&b, reader), [(ACCOUNTS, 1)]);
    start(&mut a, first);
    apply(&mut b, &commit(&mut a, first));
    start(&mut b, reader);
}

#[test]
fn a_table_is_released_early_if_it_was_not_used() {
    use Access::{Read, Write};
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let mut a = node(A);
    let tables = [(STOCK, Write), (ACCOUNTS, Write), (TableNumber(3), Read)];
    let number = ask(&mut a, &mut sequencer, &tables);
    start(&mut a, number);
    let next = ask(&mut a, &mut sequencer, &[(STOCK, Write)]);
    assert_eq!(waits(&a, next), [(STOCK, 1)]);
    let release = |a: &mut Local, table, used| a.release(number, table, used, false);
    assert_eq!(release(&mut a, STOCK, true), Ok(EarlyRelease::AtEnd));
    let third = TableNumber(3);
    assert_eq!(release(&mut a, third, false), Ok(EarlyRelease::AtEnd));
    assert_eq!(release(&mut a, STOCK, false), Ok(EarlyRelease::Released));
    exchange(&mut a, &mut sequencer);
    a.announced(sequencer.term(), &sequencer.ends());
    start(&mut a, next);
    let record = commit(&mut a, number);
    assert_eq!(shipped(&record)[0], (STOCK, 0, None));
    exchange(&mut a, &mut sequencer);
    assert_eq!(sequencer.counter(ACCOUNTS).1.committed, Version(1));
    assert_eq!(sequencer.counter(STOCK).1.committed, Version(0));
    // A transaction that turns out to read only has nothing to commit.
    let number = ask(&mut a, &mut sequencer, &[(ACCOUNTS, Write)]);
    start(&mut a, number);
    let released = a.release(number, ACCOUNTS, true, true);
    assert_eq!(released, Ok(EarlyRelease::Released));
    assert_eq!(a.commit(number), Ok(Commit::ReadOnly));
    a.abort(number);
    exchange(&mut a, &mut sequencer);
    assert_eq!(sequencer.counter(ACCOUNTS).1.settled, Version(2));
}

#[test]
fn waiting_transactions_say_since_when_and_for_whom() {
    use Access::{Read, Write};
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let (mut a, mut b) = (node(A), node(B));
    ask(&mut a, &mut sequencer, &[(STOCK, Write)]);
    let number = b.ask(42, declare(&[(STOCK, Read)]), 100, 200).unwrap();
    let waiting = b.waiting();
    assert_eq!((waiting[0].owner, waiting[0].edges.len()), (42, 0));
    exchange(&mut b, &mut sequencer);
    let waiting = b.waiting();
    assert_eq!((waiting[0].since, waiting[0].deadline), (100, 200));
    let edge = Edge {
        table: STOCK,
        version: Version(1),
        holder: Some(A),
    };
    assert_eq!(waiting[0].edges, [edge]);
    // A single read waits for what the node has heard of.
    assert_eq!(b.read_current(STOCK), Version(1));
    assert!(!b.has_reached(STOCK, Version(1)));
    b.abort(number);
    assert!(b.waiting().is_empty());
    assert_eq!(b.ask(1, BTreeMap::new(), 0, 0), Err(Error::Tables));
}

#[test]
fn a_node_gives_up_what_a_cut_refuses() {
    use Access::Write;
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let (mut a, mut b) = (node(A), node(B));
    let number = ask(&mut b, &mut sequencer, &[(STOCK, Write)]);
    start(&mut b, number);
    let waiting = ask(&mut b, &mut sequencer, &[(ACCOUNTS, Write)]);
    let running = ask(&mut b, &mut sequencer, &[(TableNumber(3), Write)]);
    start(&mut b, running);
    let record = commit(&mut b, number);
    a.promise(None);
    assert_eq!(a.may_apply(&record), Verdict::Later);
    let reports = Reports::from([(A, a.report().unwrap())]);
    let cut = Cut::new_sequencer(Term(1), 1, &reports, true).unwrap();
    assert_eq!(a.learn(&cut), Ok(Learned::Current));
    assert_eq!(a.learn(&cut), Ok(Learned::Known));
    assert_eq!(a.may_apply(&record), Verdict::Refused);
    assert_eq!(b.learn(&cut), Ok(Learned::Diverged));
    assert_eq!(b.report(), Err(Error::Diverged));
    assert_eq!(b.commit(running), Err(Error::Diverged));
    b.repaired(&BTreeMap::new());
    assert_eq!(b.start(waiting), Ok(Start::OldTerm));
    assert_eq!(b.commit(running), Err(Error::OldTerm));
    let missing = Cut {
        term: Term(4),
        follows: Term(3),
        ..cut
    };
    assert_eq!(a.learn(&missing), Err(Error::Missing));
}

/// A node that starts anew knows from its rows what it has, and from the cuts what counts.
#[test]
fn a_node_starts_anew_with_what_it_has_stored() {
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let mut a = node(A);
    let number = ask(&mut a, &mut sequencer, &[(STOCK, Access::Write)]);
    start(&mut a, number);
    let shipped = a.shipped(number).unwrap().unwrap();
    let record = commit(&mut a, number);
    assert_eq!(record, shipped);

    let again = Local::stored(A, Boot(2), std::slice::from_ref(&record), &[first_cut()]).unwrap();
    assert_eq!(again.has(), a.has());
    assert_eq!(again.identity(), (A, Boot(2), Term(1)));
    assert!(!again.is_diverged());
    assert_eq!(again.may_apply(&record), Verdict::Already);

    // The group has decided without it: its write is void.
    let second = Cut {
        term: Term(2),
        follows: Term(1),
        scope: Scope::Everyone {
            ends: BTreeMap::new(),
        },
    };
    let cuts = [first_cut(), second.clone()];
    let again = Local::stored(A, Boot(2), std::slice::from_ref(&record), &cuts).unwrap();
    assert!(again.is_diverged());
    // Of a later term, it is none that the cut speaks of, also if older cuts are forgotten.
    let later = Record {
        term: Term(2),
        ..record.clone()
    };
    let again = Local::stored(A, Boot(2), &[record, later], std::slice::from_ref(&second));
    assert!(again.unwrap().is_diverged());
    let third = Cut {
        term: Term(4),
        follows: Term(3),
        ..second.clone()
    };
    let gap = Local::stored(A, Boot(2), &[], &[second, third]);
    assert_eq!(gap, Err(Error::Missing));
}

#[test]
fn only_a_writer_that_may_start_has_a_record() {
    let mut sequencer = Sequencer::begin(&first_cut()).unwrap();
    let mut a = node(A);
    let first = ask(&mut a, &mut sequencer, &[(STOCK, Access::Write)]);
    let second = ask(&mut a, &mut sequencer, &[(STOCK, Access::Write)]);
    assert_eq!(a.shipped(second), Err(Error::Step));
    let reader = ask(&mut a, &mut sequencer, &[(ACCOUNTS, Access::Read)]);
    assert_eq!(a.shipped(reader), Ok(None));
    start(&mut a, first);
    let shipped = a.shipped(first).unwrap();
    assert_eq!(shipped.as_ref().map(|r| r.id.number), Some(first));
    assert_eq!(commit(&mut a, first), shipped.unwrap());
}
