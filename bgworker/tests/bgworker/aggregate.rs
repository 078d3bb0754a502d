//! Changes that are regrouped by table have the same result as one after the other, in the model of
//! the tests of net changes: with tables that keep their order, with and without conflicts.

use braid_bgworker::aggregate::{Aggregate, Freedom, Step};

use crate::consolidate::{Made, Subscriber, Tally, changed, equals_serial};
use crate::random::Random;

fn carry_out(
    subscriber: &mut Subscriber,
    aggregate: Aggregate<(u64, u64), u64>,
    batch: &[Made],
    unique: bool,
    tally: &mut Tally,
) {
    for (relation, steps) in aggregate.finish(Ord::cmp) {
        for step in steps {
            match step {
                Step::One(number) => {
                    tally.nets += 1;
                    let made = &batch[number as usize];
                    assert_eq!(made.relation, relation);
                    subscriber.apply(made);
                }
                Step::Nets(nets) => {
                    tally.nets += nets.len();
                    for net in &nets {
                        assert_eq!(net.relation, relation);
                        let parts: Vec<&Made> = net
                            .parts
                            .iter()
                            .map(|part| &batch[*part as usize])
                            .collect();
                        let before = subscriber.history.len();
                        subscriber.apply_net(net, &parts);
                        let met = subscriber.history.len() > before && parts.len() > 1;
                        tally.parts_replayed += usize::from(met);
                        if unique {
                            assert_eq!(subscriber.collision(), None, "{net:?}");
                        }
                    }
                }
            }
        }
    }
}

fn regrouped(
    subscriber: &mut Subscriber,
    batch: &[Made],
    unique: bool,
    random: &mut Random,
    tally: &mut Tally,
) {
    let freedoms: [Freedom; 2] = std::array::from_fn(|_| match random.below(8) {
        0 => Freedom::Everything,
        1 => Freedom::Table,
        _ => Freedom::Rows,
    });
    let mut aggregate = Aggregate::default();
    tally.changes += batch.len();
    for (made, number) in batch.iter().zip(0..) {
        let freedom = freedoms[made.relation as usize];
        // A truncate of one table is one of its changes; a truncate of several would order with
        // everything.
        let is_truncate = made.operation.is_none();
        if freedom == Freedom::Everything || (is_truncate && random.one_in(2)) {
            let before = std::mem::take(&mut aggregate);
            carry_out(subscriber, before, batch, unique, tally);
            subscriber.apply(made);
            tally.nets += 1;
        } else if freedom == Freedom::Table || is_truncate {
            aggregate.keep(number, made.relation);
        } else {
            aggregate.take(number, changed(made));
        }
    }
    carry_out(subscriber, aggregate, batch, unique, tally);
}

#[test]
fn i2_regrouped_changes_are_serial_where_nobody_else_writes() {
    let test = "i2_regrouped_changes_are_serial_where_nobody_else_writes";
    let tally = equals_serial(test, false, regrouped);
    assert!(
        tally.nets * 10 < tally.changes * 9,
        "something was joined: {tally:?}"
    );
}

#[test]
fn i2_regrouped_changes_are_serial_where_others_write_too() {
    let test = "i2_regrouped_changes_are_serial_where_others_write_too";
    let tally = equals_serial(test, true, regrouped);
    assert!(
        tally.nets * 10 < tally.changes * 9,
        "something was joined: {tally:?}"
    );
    assert!(tally.parts_replayed > 100, "conflicts were met: {tally:?}");
}
