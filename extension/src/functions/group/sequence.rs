//! set_sequence, set_sequence_default, and values that hold a time.

use braid_bgworker::sequence::{Kind, Plan, Setting, Values};
use braid_bgworker::sql_text::quote_literal;
use braid_group::{Command, MemberId};
use braid_node::sequence::{self, DEFAULT_OPTION, FACTS, OPTION_PREFIX, Sequence, There};
use braid_node::snowflake::{LONG_LINE, Line, SAFE_LINE};
use braid_postgres::catalog::{current_role, query};
use braid_postgres::encoding::Text;
use braid_postgres::rows::Rows;
use pgrx::{PgSqlErrorCode, pg_extern, pg_sys};

use super::super::failure::{Failure, Outcome};
use super::super::{provider, required, run, text};
use super::{ask, check_goes_on, check_rights, require_own};

fn kind_of(word: &str) -> Outcome<Kind> {
    Kind::parse(word).ok_or_else(|| {
        Failure::parameter(format!("unknown kind \"{word}\" of sequence"))
            .hint("Kinds are range, step, snowflake, snowflake53, follow and local.")
    })
}

/// braid.set_sequence_default(kind text)
#[pg_extern(sql = false)]
fn set_sequence_default(kind: Option<Text>) {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        require_own()?;
        check_goes_on()?;
        let kind = kind_of(&required(text(kind), "kind")?)?;
        if !kind.is_native() {
            return Err(Failure::parameter(format!(
                "{} cannot be the kind of all sequences",
                kind.word()
            ))
            .hint("Its values come from a column's default. Use braid.set_sequence for a sequence that has its column."));
        }
        ask(Command::SetOption {
            name: DEFAULT_OPTION.to_owned(),
            value: Some(kind.word().to_owned()),
        })?;
        Ok(())
    });
}

/// braid.set_sequence(sequence regclass, kind text, size bigint)
#[pg_extern(sql = false)]
fn set_sequence(sequence: Option<pg_sys::Oid>, kind: Option<Text>, size: Option<i64>) {
    let caller = current_role();
    run(|| {
        check_rights(caller)?;
        let (me, _) = require_own()?;
        check_goes_on()?;
        let relation = required(sequence, "sequence")?.to_u32();
        let kind = kind_of(&required(text(kind), "kind")?)?;
        let size = check_size(kind, size)?;
        let name = check_sequence(relation, kind)?;
        let known = sequence::load(relation).ok_or_else(|| {
            Failure::state(format!("the group does not know sequence {name} yet"))
                .hint("Try again in a second. Sequences of temporary tables and of extensions stay as they are.")
        })?;
        set_defaults(relation, &name, kind)?;
        let setting = share(me, &known, &name, kind, size, caller)?;
        ask(Command::SetOption {
            name: format!("{OPTION_PREFIX}{}", known.key),
            value: Some(setting.to_string()),
        })?;
        Ok(())
    });
}

fn check_size(kind: Kind, size: Option<i64>) -> Outcome<u64> {
    let Some(size) = size else {
        return Ok(0);
    };
    if !matches!(kind, Kind::Range | Kind::Step) {
        return Err(Failure::parameter(format!("{} has no size", kind.word()))
            .hint("Of range it is how many values a block has, of step the increment."));
    }
    u64::try_from(size)
        .ok()
        .filter(|size| (1..=1 << 53).contains(size))
        .ok_or_else(|| {
            Failure::parameter(format!("size {size} is out of range"))
                .hint("Choose a size between 1 and 2^53.")
        })
}

/// Checks that a relation is a sequence that can have the kind. Returns its name.
fn check_sequence(relation: u32, kind: Kind) -> Outcome<String> {
    let found = query(
        "select c.oid::regclass::text, c.relkind, q.seqcycle, \
                (select format('%s of %s', quote_ident(a.attname), d.refobjid::regclass) from pg_depend d \
                   join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid \
                  where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.refclassid = 'pg_class'::regclass and d.deptype = 'i') \
           from pg_class c left join pg_sequence q on q.seqrelid = c.oid where c.oid = $1::oid",
        &[Some(&relation.to_string())],
    );
    let name = found
        .get(0, 0)
        .ok_or_else(|| {
            Failure::undefined("there is no such sequence")
                .hint("Name a sequence of this database.")
        })?
        .to_owned();
    if found.get(0, 1) != Some("S") {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
            format!("{name} is not a sequence"),
        )
        .hint("The function pg_get_serial_sequence returns the sequence of a column."));
    }
    if found.get(0, 2) == Some("t") && matches!(kind, Kind::Range | Kind::Step) {
        return Err(
            Failure::state(format!("sequence {name} begins anew at its end"))
                .detail("Its values would not differ from those of other nodes.")
                .hint(format!("Run ALTER SEQUENCE {name} NO CYCLE first.")),
        );
    }
    if let Some(column) = found.get(0, 3)
        && !kind.is_native()
    {
        return Err(Failure::state(format!("column {column} is an identity column"))
            .detail(format!("Values of {} come from a column's default.", kind.word()))
            .hint("Run ALTER TABLE ... ALTER COLUMN ... DROP IDENTITY, create a sequence that the column owns, and use that."));
    }
    Ok(name)
}

/// Has columns that draw from the sequence do so by the function of the kind. A statement for all
/// nodes.
fn set_defaults(relation: u32, name: &str, kind: Kind) -> Outcome<()> {
    let function = match kind {
        Kind::Snowflake => LONG_LINE.function,
        Kind::Snowflake53 => SAFE_LINE.function,
        _ => "nextval",
    };
    let found = query(
        "select b.adrelid::regclass::text, quote_ident(a.attname), pg_get_expr(b.adbin, b.adrelid), a.atttypid = 'bigint'::regtype \
           from pg_depend d join pg_attrdef b on d.classid = 'pg_attrdef'::regclass and d.objid = b.oid \
           join pg_attribute a on a.attrelid = b.adrelid and a.attnum = b.adnum \
          where d.refclassid = 'pg_class'::regclass and d.refobjid = $1::oid order by 1, 2",
        &[Some(&relation.to_string())],
    );
    let call = |function: &str| format!("{function}({}::regclass)", quote_literal(name));
    let wanted = call(function);
    for row in found.iter() {
        let [Some(table), Some(column), Some(default), Some(is_bigint)] = row else {
            continue;
        };
        if *default == wanted {
            continue;
        }
        let known = [
            call("nextval"),
            call(LONG_LINE.function),
            call(SAFE_LINE.function),
        ];
        let is_known = known.contains(default);
        // An expression that draws from the sequence goes on with nextval.
        if !is_known && kind.is_native() {
            continue;
        }
        if !is_known {
            return Err(Failure::state(format!(
                "column {column} of {table} has another default than {}",
                call("nextval")
            ))
            .detail(format!("Its default is {default}."))
            .hint(format!("Use {wanted} in its place.")));
        }
        if !kind.is_native() && is_bigint != "t" {
            return Err(Failure::state(format!(
                "column {column} of {table} is not of type bigint"
            ))
            .hint(format!(
                "Run ALTER TABLE {table} ALTER COLUMN {column} TYPE bigint first."
            )));
        }
        query(
            &format!("alter table {table} alter column {column} set default {wanted}"),
            &[],
        );
    }
    Ok(())
}

/// The values of a sequence up to the end that its type has now, where no other end was chosen.
fn values_now(relation: u32, known: &Values) -> Values {
    let found = query(
        "select case seqtypid when 'smallint'::regtype then 32767 when 'integer'::regtype then 2147483647 else 9223372036854775807 end \
           from pg_sequence where seqrelid = $1::oid",
        &[Some(&relation.to_string())],
    );
    let most: i64 = found
        .get(0, 0)
        .and_then(|most| most.parse().ok())
        .unwrap_or(i64::MAX);
    let ends = [i16::MAX.into(), i32::MAX.into(), i64::MAX];
    let mut values = *known;
    if values.increment > 0 && ends.contains(&values.most) {
        values.most = most;
    } else if values.increment < 0 && ends.iter().any(|end| values.least == -1 - end) {
        values.least = -1 - most;
    }
    values
}

/// Prepares the group's agreement: numbers that no member has used.
fn share(
    me: MemberId,
    known: &Sequence,
    name: &str,
    kind: Kind,
    size: u64,
    caller: pg_sys::Oid,
) -> Outcome<Setting> {
    check_numbers(known, kind, size)?;
    let mut setting = Setting {
        kind,
        size,
        base: 0,
        span: 0,
    };
    if !matches!(kind, Kind::Range | Kind::Step) {
        return Ok(setting);
    }
    let values = values_now(known.relation, &known.values);
    let span = values.span();
    let size = sequence::size_of(kind, size, &values);
    let mut top = 0;
    let mut apart = true;
    for there in of_all_members(&known.key, name, caller)? {
        top = top.max(there.top);
        apart &= there.setting.kind == Kind::Range && there.is_ready;
    }
    // Members that are not kept to blocks go on until they hear of it.
    let spare = if apart { 0 } else { size.min(span / 64) };
    let plan = Plan {
        span,
        size,
        base: 0,
    };
    let area = if kind == Kind::Range {
        plan.first_area().min(span)
    } else {
        1
    };
    let numbers = ask(Command::AssignBlock {
        sequence: known.key.clone().into_bytes(),
        holder: me,
        size: area,
        at_least: top.saturating_add(spare).saturating_add(1),
    })?;
    let base = numbers.first().copied().unwrap_or(1).saturating_sub(1);
    if base.saturating_add(area) > span {
        return Err(Failure::state(format!(
            "sequence {name} has no numbers left for blocks of {size}"
        ))
        .hint("Use smaller blocks, or a larger type: ALTER SEQUENCE ... AS bigint."));
    }
    setting.size = size;
    setting.base = base;
    setting.span = span;
    Ok(setting)
}

/// Checks that the node numbers of all members fit.
fn check_numbers(known: &Sequence, kind: Kind, size: u64) -> Outcome<()> {
    let most = match kind {
        Kind::Step => sequence::size_of(kind, size, &known.values),
        Kind::Snowflake => LONG_LINE.most_nodes().into(),
        Kind::Snowflake53 => SAFE_LINE.most_nodes().into(),
        _ => return Ok(()),
    };
    let found = query(
        "select node_name, node_number from braid.group_member where state <> 'removed' order by node_number desc limit 1",
        &[],
    );
    let number: u64 = found
        .get(0, 1)
        .and_then(|number| number.parse().ok())
        .unwrap_or(0);
    if number > most {
        let node = found.get(0, 0).unwrap_or_default();
        return Err(Failure::state(format!(
            "node \"{node}\" has number {number}, and {} has room for {most}",
            kind.word()
        ))
        .hint("Values of different nodes would collide. Use larger steps, or another kind."));
    }
    Ok(())
}

/// The sequence at each member with data. All have to answer: a silent member may have used any
/// value.
fn of_all_members(key: &str, name: &str, caller: pg_sys::Oid) -> Outcome<Vec<There>> {
    let mut all = vec![find_there(&query(FACTS, &[]), key, name, "this node")?];
    let others = query(
        "select m.node_name, c.dsn from braid.group_self s join braid.group_member m on m.member_id <> s.member_id \
           join braid.connection c using (connection_id) \
          where m.role = 'data' and m.state <> 'removed' order by m.member_id",
        &[],
    );
    for row in others.iter() {
        let [Some(node), Some(dsn)] = row else {
            continue;
        };
        let words = format!("node \"{node}\" does not say which values of {name} it has used");
        let mut connection = provider::connect_member(node, dsn, caller)
            .map_err(|failure| failure.into_warning(words.clone()))?;
        let found = connection.query(FACTS).map_err(|error| {
            Failure::provider(words, &error).hint(
                "Values of all nodes have to be known. Try again when the node runs, or remove it.",
            )
        })?;
        all.push(find_there(&found, key, name, &format!("node \"{node}\""))?);
    }
    Ok(all)
}

fn find_there(found: &Rows, key: &str, name: &str, node: &str) -> Outcome<There> {
    sequence::facts(found)
        .into_iter()
        .find(|there| there.key == key)
        .ok_or_else(|| {
            Failure::state(format!("{node} does not have sequence {name}")).hint(
                "Create it there, or wait until the statement that created it has come there.",
            )
        })
}

fn next(sequence: Option<pg_sys::Oid>, line: Line) -> i64 {
    let caller = current_role();
    run(|| {
        let sequence = required(sequence, "sequence")?.to_u32().to_string();
        let found = query(
            "select has_sequence_privilege($1::oid, $2::oid, 'usage, update'), $2::oid::regclass::text",
            &[Some(&caller.to_u32().to_string()), Some(&sequence)],
        );
        if found.get(0, 0) != Some("t") {
            let name = found.get(0, 1).unwrap_or_default();
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                format!("permission denied for sequence {name}"),
            )
            .hint(format!("Run GRANT USAGE ON SEQUENCE {name} TO the role.")));
        }
        Ok(line.next()?)
    })
}

/// braid.snowflake(sequence regclass) returns bigint
#[pg_extern(sql = false)]
fn snowflake(sequence: Option<pg_sys::Oid>) -> i64 {
    next(sequence, LONG_LINE)
}

/// braid.snowflake53(sequence regclass) returns bigint
#[pg_extern(sql = false)]
fn snowflake53(sequence: Option<pg_sys::Oid>) -> i64 {
    next(sequence, SAFE_LINE)
}

/// braid.take_sequence_positions(content text): takes over positions of another node, for an
/// applier. JSON in UTF-8, as hexadecimal digits.
#[pg_extern(sql = false)]
fn take_sequence_positions(content: Option<Text>) {
    run(|| {
        let content = required(text(content), "content")?;
        let found = query(
            "select p.key, p.value::bigint from jsonb_each_text(convert_from(decode($1, 'hex'), 'UTF8')::jsonb -> 'positions') p order by p.key",
            &[Some(&content)],
        );
        // The sequences process carries it out: a transaction of this node may draw just now.
        for row in found.iter() {
            if let [Some(key), Some(value)] = row {
                sequence::note_told(key, value.parse().unwrap_or_default());
            }
        }
        Ok(())
    });
}
