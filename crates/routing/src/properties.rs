//! Properties of values, rules, maps and entries, over random ones.

use std::collections::BTreeSet;

use braid_testing::Random;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::{
    Admission, Entry, Expressions, Key, Malformed, MoveStep, NodeId, NodeSet, Number, Phase,
    ReadBound, RecordHash, Refusal, Routing, Rule, RuleList, SetId, Shard, ShardMap, Shards,
    Spread, TableName, Tenant, TenantHash, Time, Window,
};

/// A value of PostgreSQL, owned, and what it is equal to.
#[derive(Debug, Clone)]
enum Sample {
    Integer(i64),
    /// Ten thousandths, and how many zeros are printed that mean nothing, in front and behind.
    Numeric(i64, usize, usize),
    Text(String),
    /// How many spaces are behind it.
    Padded(String, usize),
    Uuid([u8; 16]),
    Bool(bool),
    Date(i32),
    Timestamp(i64),
    TimestampTz(i64),
    Bytes(Vec<u8>),
}

/// What PostgreSQL's `=` compares.
#[derive(Debug, PartialEq)]
enum Meaning {
    /// Ten thousandths.
    Number(i128),
    Text(String),
    Uuid([u8; 16]),
    Bool(bool),
    /// Microseconds.
    Local(i128),
    Instant(i64),
    Bytes(Vec<u8>),
}

const DAY: i64 = 86_400_000_000;

impl Sample {
    fn meaning(&self) -> Meaning {
        match self {
            Self::Integer(value) => Meaning::Number(i128::from(*value) * 10_000),
            Self::Numeric(value, ..) => Meaning::Number(i128::from(*value)),
            Self::Text(text) => Meaning::Text(text.clone()),
            Self::Padded(text, _) => Meaning::Text(text.trim_end_matches(' ').to_owned()),
            Self::Uuid(bytes) => Meaning::Uuid(*bytes),
            Self::Bool(value) => Meaning::Bool(*value),
            Self::Date(days) => Meaning::Local(i128::from(*days) * i128::from(DAY)),
            Self::Timestamp(micros) => Meaning::Local(i128::from(*micros)),
            Self::TimestampTz(micros) => Meaning::Instant(*micros),
            Self::Bytes(bytes) => Meaning::Bytes(bytes.clone()),
        }
    }

    fn with<T>(&self, use_it: impl FnOnce(&Key<'_>) -> T) -> T {
        let text;
        let key = match self {
            Self::Integer(value) => Key::Integer(*value),
            Self::Numeric(value, before, behind) => {
                let size = value.unsigned_abs();
                text = format!(
                    "{}{}{}.{:04}{}",
                    if *value < 0 { "-" } else { "" },
                    "0".repeat(*before),
                    size / 10_000,
                    size % 10_000,
                    "0".repeat(*behind)
                );
                Key::Numeric(Number::parse(&text).unwrap())
            }
            Self::Text(text) => Key::Text(text),
            Self::Padded(start, spaces) => {
                text = format!("{start}{}", " ".repeat(*spaces));
                Key::PaddedText(&text)
            }
            Self::Uuid(bytes) => Key::Uuid(*bytes),
            Self::Bool(value) => Key::Bool(*value),
            Self::Date(days) => Key::Date(*days),
            Self::Timestamp(micros) => Key::Timestamp(*micros),
            Self::TimestampTz(micros) => Key::TimestampTz(*micros),
            Self::Bytes(bytes) => Key::Bytes(bytes),
        };
        use_it(&key)
    }
}

/// Values of which many are equal.
fn sample() -> impl Strategy<Value = Sample> {
    prop_oneof![
        (-3..3_i64).prop_map(Sample::Integer),
        any::<i64>().prop_map(Sample::Integer),
        (-30_000..30_000_i64, 0..3_usize, 0..3_usize)
            .prop_map(|(value, before, behind)| Sample::Numeric(value, before, behind)),
        (-3..3_i64, 0..3_usize, 0..3_usize).prop_map(|(value, before, behind)| Sample::Numeric(
            value * 10_000,
            before,
            behind
        )),
        "[nab1 ]{0,2}".prop_map(Sample::Text),
        any::<String>().prop_map(Sample::Text),
        ("[nab1 ]{0,2}", 0..3_usize).prop_map(|(text, spaces)| Sample::Padded(text, spaces)),
        any::<[u8; 16]>().prop_map(Sample::Uuid),
        any::<bool>().prop_map(Sample::Bool),
        (-2..2_i32).prop_map(Sample::Date),
        (-2..2_i64).prop_map(|days| Sample::Timestamp(days * DAY)),
        any::<i64>().prop_map(Sample::Timestamp),
        (-2..2_i64).prop_map(|days| Sample::TimestampTz(days * DAY)),
        vec(any::<u8>(), 0..3).prop_map(Sample::Bytes),
    ]
}

fn spread() -> impl Strategy<Value = Spread> {
    (0..6_u32).prop_map(|power| Spread::new(1 << power).unwrap())
}

fn rule() -> impl Strategy<Value = Rule> {
    (-20..20_i64, spread(), vec(0..6_u64, 1..5)).prop_map(|(time, spread, tenants)| Rule {
        time: Time(time),
        spread,
        tenants: tenants.into_iter().map(TenantHash).collect(),
    })
}

/// L as the paper has it.
fn plain_spread(rules: &[Rule], tenant: TenantHash, created: Time) -> Spread {
    rules
        .iter()
        .filter(|rule| rule.time < created && rule.tenants.contains(&tenant))
        .map(|rule| rule.spread)
        .max()
        .unwrap_or(Spread::ONE)
}

fn list(rules: &[Rule]) -> RuleList {
    let mut list = RuleList::new();
    for rule in rules {
        list.add(rule).unwrap();
    }
    list
}

fn one_node_sets(count: u32) -> Vec<NodeSet> {
    (0..count)
        .map(|id| NodeSet {
            id: SetId(id),
            nodes: vec![NodeId(u64::from(id) + 1)],
        })
        .collect()
}

fn table(name: u8) -> TableName {
    TableName::new(&[name]).unwrap()
}

fn entry() -> impl Strategy<Value = Entry> {
    let name = prop_oneof![Just(b'a'), Just(b'b')].prop_map(table);
    let tenants = vec(any::<i64>(), 1..4).prop_map(|tenants| {
        let tenant = |value: i64| Tenant::new(&Key::Integer(value % 4)).unwrap();
        tenants.into_iter().map(tenant).collect()
    });
    prop_oneof![
        1 => (name.clone(), 1..40_u32, 1..5_u32).prop_map(|(table, shards, sets)| Entry::Route {
            table,
            expressions: Expressions::of_orders(),
            shards: Shards::new(shards).unwrap(),
            sets: one_node_sets(sets),
        }),
        1 => name.clone().prop_map(|table| Entry::Open { table }),
        2 => (name.clone(), 0..6_u32, 0..4_u8, 0..8_u32).prop_map(|(table, shard, step, to)| Entry::Move {
            table,
            shard: Shard(shard),
            step: match step {
                0 => MoveStep::Begin(SetId(to)),
                1 => MoveStep::Switch,
                2 => MoveStep::Finish,
                _ => MoveStep::Cancel,
            },
        }),
        1 => (name.clone(), 0..8_u32).prop_map(|(table, set)| Entry::AddSet {
            table,
            set: NodeSet { id: SetId(set), nodes: vec![NodeId(u64::from(set) + 100)] },
        }),
        1 => name.clone().prop_map(|table| Entry::Shut { table }),
        1 => name.clone().prop_map(|table| Entry::Unroute { table }),
        3 => (-20..20_i64).prop_map(|time| Entry::Close { time: Time(time) }),
        6 => (name, -20..20_i64, spread(), tenants).prop_map(|(table, time, spread, tenants)| {
            Entry::Rule { table, time: Time(time), spread, tenants }
        }),
    ]
}

#[derive(Debug, Clone)]
enum Step {
    Begin(u32, u32),
    Switch(u32),
    Finish(u32),
    Cancel(u32),
}

impl Step {
    fn carry_out(&self, map: &mut ShardMap) -> Result<(), crate::MoveError> {
        match *self {
            Self::Begin(shard, to) => map.begin_move(Shard(shard), SetId(to)),
            Self::Switch(shard) => map.switch(Shard(shard)),
            Self::Finish(shard) => map.finish_move(Shard(shard)),
            Self::Cancel(shard) => map.cancel_move(Shard(shard)),
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..9_u32, 0..4_u32).prop_map(|(shard, set)| Step::Begin(shard, set)),
        (0..9_u32).prop_map(Step::Switch),
        (0..9_u32).prop_map(Step::Finish),
        (0..9_u32).prop_map(Step::Cancel),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn canonical_bytes_are_equal_just_for_equal_values(one in sample(), other in sample()) {
        let equal = one.with(|key| key.canonical()) == other.with(|key| key.canonical());
        prop_assert_eq!(equal, one.meaning() == other.meaning());
        prop_assert_eq!(equal, one.with(TenantHash::of) == other.with(TenantHash::of));
        prop_assert_eq!(equal, one.with(RecordHash::of) == other.with(RecordHash::of));
    }

    #[test]
    fn a_tenant_of_an_entry_has_the_hash_of_its_value(sample in sample()) {
        let tenant = sample.with(Tenant::new).unwrap();
        prop_assert_eq!(tenant.tenant_hash(), sample.with(TenantHash::of));
        let copy = Tenant::from_canonical(tenant.canonical()).unwrap();
        prop_assert_eq!(copy, tenant);
    }

    #[test]
    fn the_largest_spread_of_earlier_rules_counts_in_any_order(
        mut rules in vec(rule(), 0..12),
        at in 0..12_usize,
    ) {
        let one = list(&rules);
        for tenant in (0..7).map(TenantHash) {
            for created in (-22..22).map(Time) {
                let plain = plain_spread(&rules, tenant, created);
                prop_assert_eq!(one.spread(tenant, created), plain);
            }
            prop_assert_eq!(
                one.largest_spread(tenant),
                plain_spread(&rules, tenant, Time::MAX)
            );
        }
        let turn = at % rules.len().max(1);
        rules.rotate_left(turn);
        prop_assert_eq!(&list(&rules), &one);
        prop_assert_eq!(&list(&one.rules()), &one);
        prop_assert_eq!(&RuleList::of(&rules).unwrap(), &one);
        prop_assert!(one.rules().is_sorted_by_key(|rule| (rule.time, rule.spread)));
    }

    #[test]
    fn a_rule_says_how_many_tenants_it_widens(rules in vec(rule(), 0..8), last in rule()) {
        let mut list = list(&rules);
        let after = Time(last.time.0 + 1);
        let mut tenants = last.tenants.clone();
        tenants.sort();
        tenants.dedup();
        let narrower = |tenant: &&TenantHash| list.spread(**tenant, after) < last.spread;
        let expected = tenants.iter().filter(narrower).count();
        prop_assert_eq!(list.add(&last), Ok(expected));
        prop_assert_eq!(list.add(&last), Ok(0));
    }

    #[test]
    fn reads_ask_exactly_the_shards_that_can_hold_rows(
        rules in vec(rule(), 0..8),
        count in 32..70_u32,
        tenant in 0..6_u64,
        upto in option::of(-22..22_i64),
    ) {
        let (rules, tenant) = (list(&rules), TenantHash(tenant));
        let shards = Shards::new(count).unwrap();
        let asked = rules.candidates(shards, tenant, upto.map(Time));
        // All residues of all spreads.
        let records = || (0..64).map(RecordHash);
        let holding: BTreeSet<Shard> = (-22..=upto.unwrap_or(22))
            .flat_map(|created| records().map(move |record| (record, Time(created))))
            .map(|(record, created)| rules.placement(shards, tenant, record, created))
            .collect();
        prop_assert_eq!(&holding, &asked.iter().collect::<BTreeSet<_>>());
        prop_assert_eq!(u32::try_from(holding.len()).unwrap(), asked.count());
        for shard in (0..80).map(Shard) {
            prop_assert_eq!(asked.contains(shard), holding.contains(&shard));
        }
    }

    #[test]
    fn a_closed_place_never_changes(
        entries in vec(entry(), 0..40),
        record in 0..64_u64,
        created in -20..20_i64,
    ) {
        let begin = [
            Entry::Route {
                table: table(b'a'),
                expressions: Expressions::of_orders(),
                shards: Shards::new(37).unwrap(),
                sets: one_node_sets(3),
            },
            Entry::Open { table: table(b'a') },
        ];
        let unroutes = |entry: &&Entry| {
            matches!(entry, Entry::Unroute { table: name } if *name == table(b'a'))
        };
        let mut routing = Routing::new();
        let mut places = vec![None; 5];
        for entry in begin.iter().chain(entries.iter().filter(|entry| !unroutes(entry))) {
            let before = routing.clone();
            let result = routing.apply(entry);
            if result.is_err() {
                prop_assert_eq!(&routing, &before);
            }
            if let (Entry::Rule { table, time, .. }, Ok(_)) = (entry, &result) {
                let table = routing.table(table).unwrap();
                prop_assert!(*time > table.closed());
            }
            prop_assert_eq!(&Routing::decode(&routing.encode()).unwrap(), &routing);
            let table = routing.table(&table(b'a')).unwrap();
            for (value, place) in (-1..4).zip(&mut places) {
                let tenant = TenantHash::of(&Key::Integer(value));
                let found = table.placement(tenant, RecordHash(record), Time(created));
                if place.is_some() {
                    prop_assert_eq!(*place, Some(found));
                }
                if Time(created) <= table.closed() {
                    *place = Some(found);
                }
            }
        }
    }

    #[test]
    fn each_shard_is_answered_by_one_set_whatever_moves(
        shards in 1..9_u32,
        sets in 1..4_u32,
        steps in vec(step(), 0..30),
    ) {
        let shards = Shards::new(shards).unwrap();
        let mut map = ShardMap::distribute(shards, one_node_sets(sets)).unwrap();
        for step in steps {
            let before = map.clone();
            let result = step.carry_out(&mut map);
            if result.is_err() {
                prop_assert_eq!(&map, &before);
            }
            let routes = map.route_query(crate::Run::all(shards));
            let mut answered: Vec<Shard> =
                routes.iter().flat_map(|route| route.shards.clone()).collect();
            answered.sort();
            prop_assert_eq!(answered, shards.all().collect::<Vec<_>>());
            for route in &routes {
                prop_assert!(!route.nodes.is_empty());
                prop_assert_eq!(map.set_of(route.nodes[0]), Some(route.set));
            }
            for shard in shards.all() {
                let route = map.route(shard).unwrap();
                let holders: Vec<SetId> = map.holders(shard).collect();
                prop_assert!(holders.contains(&route.set));
                prop_assert!(map.takes_writes(route.set, shard));
                let writers: Vec<SetId> = (0..4)
                    .map(SetId)
                    .filter(|set| map.takes_writes(*set, shard))
                    .collect();
                prop_assert!(writers.iter().all(|set| holders.contains(set)));
                let phase = map.moving(shard).map(|moving| moving.phase);
                let expected = match phase {
                    None => (1, 1),
                    Some(Phase::Copying) => (2, 1),
                    Some(Phase::Switched) => (2, 2),
                };
                prop_assert_eq!((holders.len(), writers.len()), expected);
                // From one step to the next there is a set that answers in both.
                let earlier = before.holders(shard).collect::<Vec<_>>();
                prop_assert!(earlier.contains(&route.set));
            }
        }
    }

    #[test]
    fn shards_are_distributed_evenly(shards in 1..600_u32, sets in 1..40_u32) {
        let shards = Shards::new(shards).unwrap();
        let map = ShardMap::distribute(shards, one_node_sets(sets)).unwrap();
        let mut counts = vec![0_u32; usize::try_from(sets).unwrap()];
        for shard in shards.all() {
            counts[usize::try_from(map.route(shard).unwrap().set.0).unwrap()] += 1;
        }
        prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
    }

    #[test]
    fn an_entry_comes_back_and_each_part_of_it_is_refused(entry in entry()) {
        let bytes = entry.encode().unwrap();
        prop_assert_eq!(Entry::decode(&bytes), Ok(entry));
        for len in 0..bytes.len() {
            prop_assert!(Entry::decode(&bytes[..len]).is_err());
        }
        let mut longer = bytes;
        longer.push(0);
        prop_assert_eq!(Entry::decode(&longer), Err(Malformed::Trailing("entry of routing")));
    }

    #[test]
    fn any_bytes_are_an_entry_or_an_error(
        bytes in vec(any::<u8>(), 0..200),
        entry in entry(),
        changes in vec((any::<usize>(), any::<u8>()), 1..4),
    ) {
        let _ = Entry::decode(&bytes);
        let tagged = [&[1, bytes.first().copied().unwrap_or(0) % 6], bytes.as_slice()].concat();
        let _ = Entry::decode(&tagged);
        let mut changed = entry.encode().unwrap();
        for (at, byte) in changes {
            let at = at % changed.len();
            changed[at] = byte;
        }
        if let Ok(entry) = Entry::decode(&changed) {
            prop_assert_eq!(entry.encode().unwrap(), changed);
            let _ = Routing::new().apply(&entry);
        }
    }

    #[test]
    fn a_state_comes_back_and_changed_bytes_are_another_or_an_error(
        entries in vec(entry(), 0..20),
        steps in vec(step(), 0..8),
        changes in vec((any::<usize>(), any::<u8>()), 1..4),
        bytes in vec(any::<u8>(), 0..200),
    ) {
        let mut routing = Routing::new();
        for entry in &entries {
            let _ = routing.apply(entry);
        }
        if let Some(table) = routing.table_mut(&table(b'a')) {
            for step in steps {
                let _ = step.carry_out(table.map_mut());
            }
        }
        let encoded = routing.encode();
        prop_assert_eq!(Routing::decode(&encoded), Ok(routing));
        for len in 0..encoded.len() {
            prop_assert!(Routing::decode(&encoded[..len]).is_err());
        }
        let _ = Routing::decode(&bytes);
        let mut changed = encoded;
        for (at, byte) in changes {
            let at = at % changed.len();
            changed[at] = byte;
        }
        if let Ok(routing) = Routing::decode(&changed) {
            prop_assert_eq!(routing.encode(), changed);
        }
    }

    #[test]
    fn any_text_is_a_number_or_an_error(text in "[-0-9.aN]{0,6}|.{0,6}") {
        let _ = Number::parse(&text);
    }

    #[test]
    fn a_node_admits_what_is_closed_and_not_far_ahead(
        created in any::<i64>(),
        now in -50..50_i64,
        closed in -50..50_i64,
        near in any::<bool>(),
    ) {
        let created = Time(if near { created % 60 } else { created });
        let (now, closed) = (Time(now), Time(closed));
        let window = Window::new(20, 5, 3, 4).unwrap();
        let admission = window.admission(created, now, closed);
        match admission {
            Admission::Now => prop_assert!(created <= closed && created <= now.plus(3)),
            Admission::WaitForClose => prop_assert!(created > closed && created <= now.plus(20)),
            Admission::WaitUntil(time) => {
                prop_assert!(created <= closed && now < time);
                // Then it is admitted, and not before.
                prop_assert_eq!(window.admission(created, time, closed), Admission::Now);
                let early = window.admission(created, time.plus(-1), closed);
                prop_assert_eq!(early, Admission::WaitUntil(time));
            }
            Admission::TooFarAhead => prop_assert!(created > now.plus(20)),
        }
        let bound = window.read_bound(Some(created), now, closed);
        let relies = now.plus(7) <= closed;
        prop_assert_eq!(bound == ReadBound::Upto(created), created <= closed || relies);
        let bound = window.read_bound(None, now, closed);
        prop_assert_eq!(bound, if relies { ReadBound::Known } else { ReadBound::Everywhere });
    }
}

/// How far counts are from even: 1 for each degree of freedom is what chance gives.
fn chi_square(counts: &[u32]) -> f64 {
    let mean = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
    let sum: f64 = counts
        .iter()
        .map(|count| (f64::from(*count) - mean).powi(2) / mean)
        .sum();
    sum / (counts.len() - 1) as f64
}

/// The kinds of keys that tables have: numbers in a row, numbers with steps, texts, UUIDs of
/// version 7 in a row, times.
fn kinds(random: &mut Random) -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let keys = 64_000_i64;
    let canonical = |key: &dyn Fn(i64) -> Vec<u8>| (0..keys).map(key).collect::<Vec<_>>();
    let seed = random.next();
    vec![
        ("numbers", canonical(&|at| Key::Integer(at).canonical())),
        (
            "steps",
            canonical(&|at| Key::Integer(at * 1024).canonical()),
        ),
        (
            "snowflakes",
            canonical(&|at| Key::Integer((at << 22) | (7 << 12)).canonical()),
        ),
        (
            "texts",
            canonical(&|at| Key::Text(&format!("tenant-{at:06}")).canonical()),
        ),
        (
            "uuids",
            canonical(&|at| {
                let mut low = Random::from_seed(seed ^ at.unsigned_abs());
                let high = (0x0190_a6e2_7c5b_7000 + (at.unsigned_abs() << 16)) | 0x7000;
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&high.to_be_bytes());
                bytes[8..].copy_from_slice(&low.next().to_be_bytes());
                Key::Uuid(bytes).canonical()
            }),
        ),
        (
            "times",
            canonical(&|at| Key::TimestampTz(at * 1_000_000).canonical()),
        ),
    ]
}

#[test]
fn keys_of_all_kinds_are_distributed_evenly() {
    let hash = |domain: u8, canonical: &[u8]| {
        let mut fnv = crate::hash::Fnv::new(domain);
        crate::key::Sink::put(&mut fnv, canonical);
        fnv.finish()
    };
    let count = |keys: &[Vec<u8>], cells: usize, cell: &dyn Fn(&[u8]) -> u64| {
        let mut counts = vec![0; cells];
        for key in keys {
            counts[usize::try_from(cell(key)).unwrap()] += 1;
        }
        chi_square(&counts)
    };
    for (name, keys) in kinds(&mut Random::from_seed(1)) {
        // With 63 and more degrees of freedom, chance exceeds 1.75 once in ten thousand times.
        let even = |what: &str, chi: f64| {
            println!("{name}, {what}: {chi:.3}");
            assert!(chi < 1.75, "{name}, {what}: {chi}");
            assert!(chi > 0.4, "{name}, {what}: {chi} is too even to be a hash");
        };
        for shards in [64, 100, 512] {
            let cells = usize::try_from(shards).unwrap();
            even("h1", count(&keys, cells, &|key| hash(b'T', key) % shards));
            even("h2", count(&keys, cells, &|key| hash(b'R', key) % shards));
        }
        // A tenant's and a record's hash of one value have nothing to do with each other.
        let both = |key: &[u8]| hash(b'T', key) % 8 * 8 + hash(b'R', key) % 8;
        even("h1 and h2", count(&keys, 64, &both));
    }
}

#[test]
fn errors_say_what_is_wrong_and_what_to_do() {
    let spread = Spread::new(6).unwrap_err();
    assert_eq!(spread.to_string(), "spread 6 is not a power of two");
    let shards = Shards::new(12).unwrap();
    let large = shards.check(Spread::new(16).unwrap()).unwrap_err();
    assert_eq!(
        large.to_string(),
        "spread 16 is larger than the table's 12 shards"
    );
    let errors = [
        (spread.to_string(), spread.hint()),
        (large.to_string(), large.hint()),
        (
            Shards::new(0).unwrap_err().to_string(),
            Shards::new(32_769).unwrap_err().hint(),
        ),
        (
            Refusal::NotRouted.to_string(),
            Refusal::Closed { next: Time(1) }.hint(),
        ),
    ];
    for (message, hint) in errors {
        let lower = |text: &str| text.starts_with(char::is_lowercase);
        assert!(lower(&message) && !message.ends_with('.'), "{message}");
        assert!(!lower(hint) && hint.ends_with('.'), "{hint}");
    }
}

#[test]
fn sets_that_do_not_fit_together_are_refused() {
    let shards = Shards::new(8).unwrap();
    let set = |id: u32, nodes: &[u64]| NodeSet {
        id: SetId(id),
        nodes: nodes.iter().copied().map(NodeId).collect(),
    };
    for sets in [
        vec![],
        vec![set(1, &[])],
        vec![set(1, &[1]), set(1, &[2])],
        vec![set(1, &[1, 2]), set(2, &[2])],
        vec![set(1, &[1, 1])],
        (0..1_025).map(|id| set(id, &[u64::from(id)])).collect(),
        vec![set(1, &(0..65).collect::<Vec<_>>())],
    ] {
        assert!(
            ShardMap::distribute(shards, sets.clone()).is_err(),
            "{sets:?}"
        );
    }
    assert!(ShardMap::distribute(shards, vec![set(1, &[1, 2]), set(2, &[3])]).is_ok());
}

#[test]
fn a_time_is_due_once_nobody_has_closed_one_for_a_period() {
    let window = Window::default();
    let closed = Time(1_000_000_000);
    // It was closed two seconds ahead.
    let at = |after: i64| Time(closed.0 - 2_000_000 + after);
    let leader = std::time::Duration::ZERO;
    let other = std::time::Duration::from_millis(150);
    assert!(!window.is_due(at(499_999), closed, leader));
    assert!(window.is_due(at(500_000), closed, leader));
    assert!(!window.is_due(at(649_999), closed, other));
    assert!(window.is_due(at(650_000), closed, other));
    assert!(window.is_due(Time(0), Time::MIN, other));
}
