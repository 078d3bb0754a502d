//! The sequences of this database, where it is a member of a group (`braid.sequence`). Sessions and
//! appliers register those that a replicated statement has created; the sequences process does the
//! rest.
//!
//! A sequence keeps to its block by its own MINVALUE and MAXVALUE, so `nextval` is PostgreSQL's,
//! and gives no value of another node's block. The sequence and its row in `braid.sequence` are
//! changed in one transaction.
//!
//! Not for: the assignment of blocks to nodes (`braid_bgworker::sequence`), further blocks (the
//! sequences process), values that hold a time (`snowflake`).

use braid_bgworker::sequence::{
    Block, Kind, Plan, Setting, Values, has_come_to, standard_block, standard_step, step_start,
};
use braid_bgworker::sqlstate::SqlState;
use braid_postgres::catalog::Rights;
use braid_postgres::error::PgError;
use braid_postgres::lock::LockMode;
use braid_postgres::rows::Rows;
use braid_postgres::transaction;
use pgrx::pg_sys;

use crate::ddl::{owners_query, owners_work};
use crate::wake;

/// Setting of a statement that has created sequences: how all nodes treat them.
pub const STATEMENT_SETTING: &str = "braid.sequences";
/// Option of the group: the kind of sequences that are created.
pub const DEFAULT_OPTION: &str = "sequence_kind";
/// Prefix of options of the group: the agreed setting of one sequence, by its key.
pub const OPTION_PREFIX: &str = "sequence:";

/// Between a statement's setting and the suffix of the keys.
const SUFFIX: &str = " #";

/// Statements that can create sequences.
const CREATING: &[&str] = &[
    "CREATE TABLE",
    "ALTER TABLE",
    "CREATE SEQUENCE",
    "CREATE SCHEMA",
];

/// The member that this database is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    /// The node's member number.
    pub member: u64,
    /// The node's number.
    pub number: u16,
    /// The node is the only member.
    pub is_alone: bool,
    /// The node has not joined yet.
    pub joins: bool,
    /// The node takes no part any more.
    pub is_stopped: bool,
}

/// The member that this database is; `None` if it is none, or does not know its number yet. In a
/// transaction.
#[must_use]
pub fn own() -> Option<Own> {
    let found = owners_query(
        "select s.member_id, m.node_number, not exists (select from braid.group_member o where o.member_id <> s.member_id and o.state <> 'removed'), \
                exists (select from braid.join_step where done_at is null), s.stopped is not null \
           from braid.group_self s join braid.group_member m on m.member_id = s.member_id",
        &[],
    );
    Some(Own {
        member: found.get(0, 0)?.parse().ok()?,
        number: found.get(0, 1)?.parse().ok()?,
        is_alone: found.get(0, 2) == Some("t"),
        joins: found.get(0, 3) == Some("t"),
        is_stopped: found.get(0, 4) == Some("t"),
    })
}

/// A sequence that `braid.sequence` does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// The sequence's OID.
    pub relation: u32,
    /// The sequence's key.
    pub key: String,
    /// The sequence's values.
    pub values: Values,
    /// The sequence begins anew when its values are used up.
    pub cycles: bool,
    /// The value that it has given last.
    pub last: Option<i64>,
    made_by: u32,
}

fn number<T: std::str::FromStr>(rows: &Rows, row: usize, column: usize) -> Option<T> {
    rows.get(row, column)?.parse().ok()
}

/// All sequences that `braid.sequence` does not have. In a transaction.
#[must_use]
pub fn unknown() -> Vec<Unknown> {
    let found = owners_query(
        "select relation, sequence_key, own_start, own_increment, own_min, own_max, cycles, last_value, made_by from braid.unknown_sequences()",
        &[],
    );
    (0..found.len())
        .filter_map(|row| {
            Some(Unknown {
                relation: number(&found, row, 0)?,
                key: found.get(row, 1)?.to_owned(),
                values: Values {
                    first: number(&found, row, 2)?,
                    increment: number(&found, row, 3)?,
                    least: number(&found, row, 4)?,
                    most: number(&found, row, 5)?,
                },
                cycles: found.get(row, 6) == Some("t"),
                last: number(&found, row, 7),
                made_by: number(&found, row, 8)?,
            })
        })
        .collect()
}

/// The state of a sequence that the only member of a group has: the values that were used are in
/// its first block, or before it. In a transaction.
#[must_use]
pub fn first_setting(unknown: &Unknown) -> Setting {
    let kind = default_kind();
    let top = owners_query(
        "select braid.sequence_top($1::oid)",
        &[Some(&unknown.relation.to_string())],
    );
    let used = number(&top, 0, 0).map_or(0, |value: i64| unknown.values.number(value));
    let size = size_of(Kind::Range, 0, &unknown.values).max(1);
    // A block that is nearly used would be left at once.
    let base = if used < size - size / 8 {
        0
    } else {
        used / size * size
    };
    Setting {
        kind,
        size: 0,
        base: if kind == Kind::Step { used } else { base },
        span: 0,
    }
}

/// A sequence as `braid.sequence` has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// The sequence's OID.
    pub relation: u32,
    /// The sequence's key.
    pub key: String,
    /// The sequence's kind.
    pub kind: Kind,
    /// The sequence's values, as its creator has defined them.
    pub values: Values,
    /// Size of a block, or of a step.
    pub size: u64,
    /// Numbers up to this one are in no block.
    pub base: u64,
    /// The block that it is in.
    pub block: Option<Block>,
    /// The next block.
    pub reserve: Option<Block>,
    /// The sequence itself is as the kind asks.
    pub is_applied: bool,
    /// The value that it has given last.
    pub last: Option<i64>,
    /// Values that it has given a second, of late.
    pub rate: f64,
}

impl Sequence {
    /// How its blocks lie.
    #[must_use]
    pub fn plan(&self) -> Plan {
        Plan {
            span: self.values.span(),
            size: self.size,
            base: self.base,
        }
    }

    /// The last number that is used, within its block.
    #[must_use]
    pub fn used_to(&self, block: Block) -> u64 {
        self.last
            .map(|value| self.values.number(value))
            .filter(|number| block.has(*number))
            .unwrap_or(block.start - 1)
    }
}

/// Columns of a [`Sequence`], of `braid.sequence s`.
const COLUMNS: &str = "s.relation, s.sequence_key, s.kind, s.own_start, s.own_increment, s.own_min, s.own_max, s.size, s.base, \
     s.block_start, s.block_end, s.reserve_start, s.reserve_end, s.is_applied, pg_sequence_last_value(s.relation), \
     greatest(s.used_before - s.old_total, 0) / greatest(extract(epoch from clock_timestamp() - s.old_at), 1)";

fn sequences(found: &Rows) -> Vec<Sequence> {
    let block = |row, start: usize| {
        Some(Block {
            start: number(found, row, start)?,
            end: number(found, row, start + 1)?,
        })
    };
    (0..found.len())
        .filter_map(|row| {
            Some(Sequence {
                relation: number(found, row, 0)?,
                key: found.get(row, 1)?.to_owned(),
                kind: Kind::parse(found.get(row, 2)?)?,
                values: Values {
                    first: number(found, row, 3)?,
                    increment: number(found, row, 4)?,
                    least: number(found, row, 5)?,
                    most: number(found, row, 6)?,
                },
                size: number(found, row, 7)?,
                base: number(found, row, 8)?,
                block: block(row, 9),
                reserve: block(row, 11),
                is_applied: found.get(row, 13) == Some("t"),
                last: number(found, row, 14),
                rate: number(found, row, 15).unwrap_or(0.0),
            })
        })
        .collect()
}

/// The sequence with an OID, if it is registered and exists. In a transaction.
#[must_use]
pub fn load(relation: u32) -> Option<Sequence> {
    let found = owners_query(
        &format!(
            "select {COLUMNS} from braid.sequence s join pg_class c on c.oid = s.relation where s.relation = $1::oid"
        ),
        &[Some(&relation.to_string())],
    );
    sequences(&found).into_iter().next()
}

/// The kind that the group has agreed on for sequences that are created.
fn default_kind() -> Kind {
    let found = owners_query(
        "select value from braid.group_option where option_name = $1",
        &[Some(DEFAULT_OPTION)],
    );
    found.get(0, 0).and_then(Kind::parse).unwrap_or(Kind::Range)
}

/// Registers the sequences that the current statement has created, and gives them numbers of this
/// node's. `given`: the setting that arrived with the statement; none at its own node. Returns the
/// setting that the statement has to bring to other nodes. In the statement's transaction.
pub fn adopt_created(tag: &str, given: Option<&str>) -> Option<String> {
    if !CREATING.contains(&tag) {
        return None;
    }
    let own = own()?;
    let mut created: Vec<Unknown> = unknown()
        .into_iter()
        .filter(|sequence| transaction::is_own(sequence.made_by.into()))
        .collect();
    if created.is_empty() {
        return None;
    }
    let (words, suffix) = match given {
        Some(given) => given
            .split_once(SUFFIX)
            .map_or((Some(given), None), |(words, suffix)| {
                (Some(words), Some(suffix.to_owned()))
            }),
        None => (None, suffix_of(&created)),
    };
    let given = words.map(Setting::parse);
    // A statement of a newer version: its sequences stay as they are.
    if given == Some(None) {
        return None;
    }
    if let Some(suffix) = &suffix {
        for sequence in &mut created {
            sequence.key = format!("{}#{suffix}", sequence.key);
        }
    }
    let setting = given.flatten().unwrap_or_else(|| Setting {
        kind: default_kind(),
        size: 0,
        // A column that is added to a table with rows has values already.
        base: created.iter().map(Unknown::used_to).max().unwrap_or(0),
        span: 0,
    });
    for sequence in &created {
        sequence.register(setting, None);
        if let Some(registered) = load(sequence.relation) {
            carry_out(&registered, own.number);
        }
    }
    Some(match suffix {
        Some(suffix) => format!("{setting}{SUFFIX}{suffix}"),
        None => setting.to_string(),
    })
}

/// The place in the group's log. It distinguishes the keys of new sequences from those of dropped
/// ones for which the group has an agreed setting. `None` if there are none.
fn suffix_of(created: &[Unknown]) -> Option<String> {
    let is_agreed = |sequence: &Unknown| {
        let name = format!("{OPTION_PREFIX}{}", sequence.key);
        !owners_query(
            "select 1 from braid.group_option where option_name = $1",
            &[Some(&name)],
        )
        .is_empty()
    };
    if !created.iter().any(is_agreed) {
        return None;
    }
    let found = owners_query("select applied_index from braid.group_self", &[]);
    found.get(0, 0).map(str::to_owned)
}

impl Unknown {
    /// The last number that is used.
    #[must_use]
    pub fn used_to(&self) -> u64 {
        self.last.map_or(0, |value| self.values.number(value))
    }

    /// Writes it down. `agreed`: the option that says so. In a transaction.
    pub fn register(&self, setting: Setting, agreed: Option<&str>) {
        let setting = self.fit(setting);
        owners_query(
            "insert into braid.sequence (relation, sequence_key, kind, setting, own_start, own_increment, own_min, own_max, size, base) \
             values ($1::oid, $2, $3, $4, $5::bigint, $6::bigint, $7::bigint, $8::bigint, $9::bigint, $10::bigint) on conflict do nothing",
            &[
                Some(&self.relation.to_string()),
                Some(&self.key),
                Some(setting.kind.word()),
                agreed,
                Some(&self.values.first.to_string()),
                Some(&self.values.increment.to_string()),
                Some(&self.values.least.to_string()),
                Some(&self.values.most.to_string()),
                Some(&setting.size.to_string()),
                Some(&setting.base.to_string()),
            ],
        );
    }

    /// The setting, with a size. A cycling sequence is kept local, as its values are to be used
    /// again.
    fn fit(&self, setting: Setting) -> Setting {
        let kind = if self.cycles && matches!(setting.kind, Kind::Range | Kind::Step) {
            Kind::Local
        } else {
            setting.kind
        };
        Setting {
            kind,
            size: size_of(kind, setting.size, &self.values),
            ..setting
        }
    }
}

/// The size of blocks or steps; the standard one for 0.
#[must_use]
pub fn size_of(kind: Kind, asked: u64, values: &Values) -> u64 {
    match (kind, asked) {
        (Kind::Range, 0) => standard_block(values.span()),
        (Kind::Step, 0) => standard_step(values.span()),
        _ => asked,
    }
}

/// A statement that changes a sequence on this node alone.
fn alter(relation: u32, clauses: &str) {
    let name = owners_query(
        "select $1::oid::regclass::text",
        &[Some(&relation.to_string())],
    );
    let Some(name) = name.get(0, 0) else {
        return;
    };
    owners_work(
        &[("braid.ddl_replication", "off")],
        Rights::ExtensionOwner,
        &format!("alter sequence {name} {clauses}"),
    );
}

/// Keeps the sequence to a block. Goes on in it where it is in it already.
fn keep_to(sequence: &Sequence, block: Block) {
    let values = &sequence.values;
    let (first, last) = (values.value(block.start), values.value(block.end));
    let is_inside = sequence
        .last
        .is_some_and(|value| block.has(values.number(value)));
    let restart = if is_inside {
        String::new()
    } else {
        format!(" restart with {first}")
    };
    alter(
        sequence.relation,
        &format!(
            "increment by {} minvalue {} maxvalue {} start with {first}{restart}",
            values.increment,
            first.min(last),
            first.max(last),
        ),
    );
}

/// Has the sequence give nothing any more: SQLSTATE 2200H.
fn close(sequence: &Sequence) {
    let values = &sequence.values;
    let end = if values.increment < 0 {
        values.least
    } else {
        values.most
    };
    alter(
        sequence.relation,
        &format!("minvalue {end} maxvalue {end} start with {end} restart with {end}"),
    );
    owners_query(
        "select setval($1::oid::regclass, $2::bigint)",
        &[Some(&sequence.relation.to_string()), Some(&end.to_string())],
    );
}

/// Makes the sequence as its kind asks at the node with this number. In a transaction.
pub fn carry_out(sequence: &Sequence, node: u16) {
    let values = &sequence.values;
    let mut block = None;
    let mut problem: Option<(String, &str)> = None;
    match sequence.kind {
        Kind::Range => {
            block = sequence.block.or_else(|| sequence.plan().first_block(node));
            match block {
                Some(block) => keep_to(sequence, block),
                None => {
                    close(sequence);
                    problem = Some((
                        format!("the sequence has no numbers left for node number {node}"),
                        "Make its type larger, or use another kind with braid.set_sequence.",
                    ));
                }
            }
        }
        Kind::Step => {
            let start = step_start(sequence.base, sequence.size, node)
                .filter(|start| *start <= values.span());
            match start {
                Some(start) => {
                    let first = values.value(start);
                    let size = i128::from(sequence.size) * i128::from(values.increment.signum());
                    alter(
                        sequence.relation,
                        &format!(
                            "increment by {size} minvalue {} maxvalue {} start with {first} restart with {first}",
                            values.least, values.most
                        ),
                    );
                }
                None => {
                    close(sequence);
                    problem = Some((
                        format!(
                            "node number {node} does not fit into steps of {}",
                            sequence.size
                        ),
                        "Use larger steps, or another kind, with braid.set_sequence.",
                    ));
                }
            }
        }
        // As it was made; it goes on from where it is.
        Kind::Snowflake | Kind::Snowflake53 | Kind::Follow | Kind::Local => {
            if sequence.block.is_some() || sequence.is_changed() {
                alter(
                    sequence.relation,
                    &format!(
                        "increment by {} minvalue {} maxvalue {} start with {}",
                        values.increment, values.least, values.most, values.first
                    ),
                );
            }
        }
    }
    let text = |number: Option<u64>| number.map(|number| number.to_string());
    let (start, end) = (
        text(block.map(|block| block.start)),
        text(block.map(|block| block.end)),
    );
    owners_query(
        "update braid.sequence set is_applied = true, block_start = $2::bigint, block_end = $3::bigint, problem = $4, hint = $5 where relation = $1::oid",
        &[
            Some(&sequence.relation.to_string()),
            start.as_deref(),
            end.as_deref(),
            problem.as_ref().map(|(words, _)| words.as_str()),
            problem.as_ref().map(|(_, hint)| *hint),
        ],
    );
}

impl Sequence {
    /// Whether the sequence itself differs from its creator's definition.
    fn is_changed(&self) -> bool {
        let found = owners_query(
            "select 1 from pg_sequence where seqrelid = $1::oid \
             and (seqincrement, seqmin, seqmax, seqstart) is distinct from ($2::bigint, $3::bigint, $4::bigint, $5::bigint)",
            &[
                Some(&self.relation.to_string()),
                Some(&self.values.increment.to_string()),
                Some(&self.values.least.to_string()),
                Some(&self.values.most.to_string()),
                Some(&self.values.first.to_string()),
            ],
        );
        !found.is_empty()
    }
}

/// Notes the next block of a sequence. In a transaction.
pub fn note_reserve(sequence: &Sequence, reserve: Block) {
    owners_query(
        "update braid.sequence set reserve_start = $2::bigint, reserve_end = $3::bigint where relation = $1::oid and kind = 'range' and reserve_start is null",
        &[
            Some(&sequence.relation.to_string()),
            Some(&reserve.start.to_string()),
            Some(&reserve.end.to_string()),
        ],
    );
}

/// Goes on to the next block. Does nothing if that was done before. In a transaction.
pub fn move_on(sequence: &Sequence) {
    let (Some(block), Some(reserve)) = (sequence.block, sequence.reserve) else {
        return;
    };
    let used = sequence.used_to(block).saturating_sub(block.start - 1);
    let noted = owners_query(
        "update braid.sequence set block_start = reserve_start, block_end = reserve_end, reserve_start = null, reserve_end = null, \
                used_before = used_before + $4::bigint \
          where relation = $1::oid and block_start = $2::bigint and reserve_start = $3::bigint returning 1",
        &[
            Some(&sequence.relation.to_string()),
            Some(&block.start.to_string()),
            Some(&reserve.start.to_string()),
            Some(&used.to_string()),
        ],
    );
    if !noted.is_empty() {
        keep_to(sequence, reserve);
    }
}

/// Stores the setting that the group has agreed for a sequence, and that is to be carried out. In a
/// transaction.
pub fn note_setting(sequence: &Sequence, setting: Setting, agreed: &str) {
    let values = sequence.values.with_span(setting.span);
    owners_query(
        "update braid.sequence set kind = $2, size = $3::bigint, base = $4::bigint, setting = $5, own_min = $6::bigint, own_max = $7::bigint, \
                block_start = null, block_end = null, reserve_start = null, reserve_end = null, taken = null, announced = null, is_applied = false, problem = null, hint = null \
          where relation = $1::oid",
        &[
            Some(&sequence.relation.to_string()),
            Some(setting.kind.word()),
            Some(&size_of(setting.kind, setting.size, &values).to_string()),
            Some(&setting.base.to_string()),
            Some(agreed),
            Some(&values.least.to_string()),
            Some(&values.most.to_string()),
        ],
    );
}

/// Records that another node has used values of a sequence of kind follow up to this one, or may
/// have by now. The sequence may be in use, or not created on this node yet. In a transaction.
pub fn note_told(key: &str, value: i64) {
    owners_query(
        "insert into braid.sequence_told as t (sequence_key, least, most) values ($1, $2::bigint, $2::bigint) \
         on conflict (sequence_key) do update set least = least(t.least, excluded.least), most = greatest(t.most, excluded.most) \
          where excluded.least < t.least or excluded.most > t.most",
        &[Some(key), Some(&value.to_string())],
    );
    wake::sequences_at_commit();
}

/// A sequence of kind follow that is behind another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Behind {
    /// The sequence's OID.
    pub relation: u32,
    /// The sequence's name, quoted.
    pub name: String,
    key: String,
    /// The values that other nodes have sent, from the least to the most.
    told: [i64; 2],
    goes_down: bool,
}

/// All sequences of kind follow with values of other nodes that they have not reached yet. In a
/// transaction.
#[must_use]
pub fn behind() -> Vec<Behind> {
    let found = owners_query(
        "select s.relation, s.relation::regclass, t.sequence_key, t.least, t.most, s.own_increment < 0 \
           from braid.sequence_told t join braid.sequence s using (sequence_key) join pg_class c on c.oid = s.relation \
          where s.kind = 'follow' and s.is_applied",
        &[],
    );
    (0..found.len())
        .filter_map(|row| {
            Some(Behind {
                relation: number(&found, row, 0)?,
                name: found.get(row, 1)?.to_owned(),
                key: found.get(row, 2)?.to_owned(),
                told: [number(&found, row, 3)?, number(&found, row, 4)?],
                goes_down: found.get(row, 5) == Some("t"),
            })
        })
        .collect()
}

impl Behind {
    /// Has the sequence continue after the values that other nodes have sent. Waits for
    /// transactions that have drawn from it, as long as `lock_timeout` allows: a value that is
    /// drawn between the query and `setval` would be given again. In a transaction.
    pub fn catch_up(&self) {
        LockMode::ShareRowExclusive.on_relation(pg_sys::Oid::from(self.relation));
        let [least, most] = self.told;
        let (told, increment) = if self.goes_down {
            (least, -1)
        } else {
            (most, 1)
        };
        let (relation, told) = (self.relation.to_string(), told.to_string());
        let found = owners_query(
            "select pg_sequence_last_value(seqrelid::regclass), least(greatest($2::bigint, seqmin), seqmax) \
               from pg_sequence where seqrelid = $1::oid",
            &[Some(&relation), Some(&told)],
        );
        let last: Option<i64> = number(&found, 0, 0);
        if let Some(value) = number::<i64>(&found, 0, 1)
            && last.is_none_or(|last| !has_come_to(last, value, increment))
        {
            owners_query(
                "with moved as (select setval($1::oid::regclass, $2::bigint) as value) \
                 update braid.sequence s set taken = m.value from moved m where s.relation = $1::oid",
                &[Some(&relation), Some(&value.to_string())],
            );
        }
        // Another value may have come meanwhile.
        owners_query(
            "delete from braid.sequence_told where sequence_key = $1 and least = $2::bigint and most = $3::bigint",
            &[
                Some(&self.key),
                Some(&least.to_string()),
                Some(&most.to_string()),
            ],
        );
    }
}

/// Registers a sequence as another member has it. In a transaction.
pub fn register_as_there(found: &Unknown, there: &There) {
    let mut copied = found.clone();
    copied.key.clone_from(&there.key);
    copied.values = there.values;
    copied.cycles = false;
    copied.register(there.setting, there.agreed.as_deref());
}

/// A sequence at another member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct There {
    /// Schema and name, quoted.
    pub name: String,
    /// The sequence's key.
    pub key: String,
    /// The sequence's values, as its creator has defined them.
    pub values: Values,
    /// The setting that the sequence is kept to.
    pub setting: Setting,
    /// The option that says so.
    pub agreed: Option<String>,
    /// The last number that is used at the member, or may be by now.
    pub top: u64,
    /// The sequence is as its kind asks.
    pub is_ready: bool,
}

/// The name of a sequence that keeps to numbers of its node: the relation itself, or that of an
/// identity column of a table. In a transaction.
#[must_use]
pub fn shared(relation: pg_sys::Oid) -> Option<String> {
    let found = owners_query(
        "select s.relation::regclass::text from braid.sequence s where s.kind in ('range', 'step') \
           and (s.relation = $1::oid or exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = s.relation \
             and d.refclassid = 'pg_class'::regclass and d.refobjid = $1::oid and d.deptype = 'i'))",
        &[Some(&relation.to_u32().to_string())],
    );
    found.get(0, 0).map(str::to_owned)
}

/// The error of a statement that would have a sequence leave its node's numbers.
#[must_use]
pub fn is_kept(name: &str) -> PgError {
    PgError::new(
        SqlState::ObjectNotInPrerequisiteState,
        format!("sequence {name} keeps to numbers of this node"),
    )
    .with_detail("In a group the bounds and the increment of a sequence keep values of nodes apart.")
    .with_hint(format!(
        "Use braid.set_sequence to share its numbers otherwise. After braid.set_sequence('{name}', 'local') they may be changed. RESTART goes by itself."
    ))
}

/// The relation of a name that is quoted. In a transaction.
#[must_use]
pub fn find(name: &str) -> Option<u32> {
    let found = owners_query("select to_regclass($1)::oid", &[Some(name)]);
    number(&found, 0, 0)
}

/// Query for the sequences of another member, to be run there.
pub const FACTS: &str = "select sequence_name, sequence_key, kind, setting, own_start, own_increment, own_min, own_max, size, base, top, is_ready from braid.sequence_facts()";

/// The sequences in an answer to [`FACTS`]. Sequences that the member does not know yet are left
/// out.
#[must_use]
pub fn facts(found: &Rows) -> Vec<There> {
    (0..found.len())
        .filter_map(|row| {
            Some(There {
                name: found.get(row, 0)?.to_owned(),
                key: found.get(row, 1)?.to_owned(),
                values: Values {
                    first: number(found, row, 4)?,
                    increment: number(found, row, 5)?,
                    least: number(found, row, 6)?,
                    most: number(found, row, 7)?,
                },
                setting: Setting {
                    kind: Kind::parse(found.get(row, 2)?)?,
                    size: number(found, row, 8)?,
                    base: number(found, row, 9)?,
                    span: 0,
                },
                agreed: found.get(row, 3).map(str::to_owned),
                top: number::<i64>(found, row, 10)
                    .and_then(|top| u64::try_from(top).ok())
                    .unwrap_or(0),
                is_ready: found.get(row, 11) == Some("t"),
            })
        })
        .collect()
}

/// The name of a sequence in an answer to [`FACTS`] that is not as its kind asks yet.
#[must_use]
pub fn unready(found: &Rows) -> Option<&str> {
    (0..found.len())
        .find(|row| found.get(*row, 11) != Some("t"))
        .and_then(|row| found.get(row, 0))
}
