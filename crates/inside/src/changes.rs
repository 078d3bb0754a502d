//! Changes of a made-up provider, applied to a table in the test's transaction by `braid_apply`.

use braid_apply::{Identity, NO_SUBSCRIPTION, Session};
use braid_gir::{
    BeforeKind, Begin, Column, ColumnFlags, Reader, Record, ReplicaIdentity, SchemaNumber, Value,
    Writer,
};
use braid_postgres::error::PgError;
use braid_postgres::memory;
use braid_postgres::subtransaction;
use pgrx::pg_sys;

use crate::db::sql;

/// One change, with a value for each column.
pub(crate) enum Row<'a> {
    Insert(&'a [Value<'a>]),
    Update(&'a [Value<'a>]),
    /// With the key or row before it.
    UpdateFrom(BeforeKind, &'a [Value<'a>], &'a [Value<'a>]),
    Delete(BeforeKind, &'a [Value<'a>]),
}

/// A column as the provider describes it.
#[derive(Clone)]
pub(crate) struct Described {
    pub(crate) name: String,
    pub(crate) type_oid: u32,
    pub(crate) type_name: String,
    pub(crate) flags: u8,
}

/// Describes a table of this database, as its provider would.
pub(crate) fn describe(table: &str) -> (ReplicaIdentity, Vec<Described>) {
    let rows = sql(&format!(
        "select a.attname, a.atttypid::oid, t.typname, c.relreplident, \
           exists (select from pg_index i where i.indrelid = c.oid and a.attnum = any ((i.indkey::int2[])[0 : i.indnkeyatts - 1]) and i.indisprimary), \
           exists (select from pg_index i where i.indrelid = c.oid and a.attnum = any ((i.indkey::int2[])[0 : i.indnkeyatts - 1]) and i.indisreplident) \
         from pg_attribute a join pg_class c on c.oid = a.attrelid join pg_type t on t.oid = a.atttypid \
         where c.oid = '{table}'::regclass and a.attnum > 0 and not a.attisdropped order by a.attnum"
    ));
    let mut identity = ReplicaIdentity::Default;
    let mut columns = Vec::new();
    for row in rows.iter() {
        let cell = |place: usize| row[place].clone().unwrap();
        identity = ReplicaIdentity::from_byte(cell(3).as_bytes()[0]).unwrap();
        let (primary, replica) = (cell(4) == "t", cell(5) == "t");
        let identifies = match identity {
            ReplicaIdentity::Default => primary,
            ReplicaIdentity::Index => replica,
            ReplicaIdentity::Full => true,
            ReplicaIdentity::Nothing => false,
        };
        let mut flags = 0;
        if identifies {
            flags |= ColumnFlags::IDENTITY;
        }
        if primary {
            flags |= ColumnFlags::PRIMARY_KEY;
        }
        columns.push(Described {
            name: cell(0),
            type_oid: cell(1).parse().unwrap(),
            type_name: cell(2),
            flags,
        });
    }
    (identity, columns)
}

/// Applies changes to a table. Each has a newer version than all rows that are here.
pub(crate) fn apply(table: &str, changes: &[Row<'_>]) -> Result<(), PgError> {
    let (identity, columns) = describe(table);
    apply_as(table, identity, &columns, changes)
}

/// As [`apply`], for a provider whose table has these columns.
pub(crate) fn apply_as(
    table: &str,
    identity: ReplicaIdentity,
    columns: &[Described],
    changes: &[Row<'_>],
) -> Result<(), PgError> {
    let frame = frame(table, identity, columns, changes)?;
    apply_frame(&frame)
}

/// The records of changes, the schema first.
fn frame(
    table: &str,
    identity: ReplicaIdentity,
    columns: &[Described],
    changes: &[Row<'_>],
) -> Result<Vec<u8>, PgError> {
    let number = SchemaNumber(0);
    let described: Vec<Column<'_>> = columns
        .iter()
        .map(|column| Column {
            flags: ColumnFlags(column.flags),
            type_oid: column.type_oid,
            type_modifier: -1,
            name: &column.name,
            type_namespace: "pg_catalog",
            type_name: &column.type_name,
            mark: 0,
        })
        .collect();
    let (namespace, name) = table.split_once('.').unwrap();
    let name = name.trim_matches('"');
    let mut writer = Writer::new();
    writer.schema(number, 1, identity, (namespace, name), (&described, &[]))?;
    let image = |values: &[Value<'_>], out: &mut braid_gir::ImageWriter<'_>| {
        for value in values {
            out.put(value);
        }
        Ok::<(), braid_gir::Error>(())
    };
    for change in changes {
        match change {
            Row::Insert(after) => {
                writer.insert(number, false, &[], |out| image(after, out))?;
            }
            Row::Update(after) => {
                let absent = BeforeKind::Absent;
                let before = |_: &mut braid_gir::ImageWriter<'_>| Ok(());
                writer.update(number, absent, false, &[], before, |out| image(after, out))?;
            }
            Row::UpdateFrom(kind, before, after) => writer.update(
                number,
                *kind,
                false,
                &[],
                |out| image(before, out),
                |out| image(after, out),
            )?,
            Row::Delete(kind, before) => {
                writer.delete(number, *kind, false, &[], |out| image(before, out))?;
            }
        }
    }
    Ok(writer.frame().to_vec())
}

/// Applies the schemas and changes of a frame, in a subtransaction that an error rolls back.
pub(crate) fn apply_frame(frame: &[u8]) -> Result<(), PgError> {
    let mut session = Session::new(Identity {
        subscription_id: NO_SUBSCRIPTION,
        subscription: "tests".to_owned(),
        run_as: None,
        local_node: "here".to_owned(),
        provider: "there".to_owned(),
        charset: pg_sys::pg_enc::PG_UTF8.cast_signed(),
        ignores_missing: false,
    });
    let outcome = subtransaction::attempt(|| {
        memory::keep_current(|| {
            session.attach(&Begin {
                commit_lsn: 1,
                commit_timestamp: 4_102_444_800_000_000,
                xid: 1,
                origin: "",
                origin_lsn: 0,
            });
            let mut reader = Reader::new(frame);
            while let Some(record) = reader.next_record()? {
                match record {
                    Record::Schema(schema) => session.learn(&schema),
                    Record::Change(change) => session.change(&change)?,
                    _ => {}
                }
            }
            session.detach()?;
            Ok(((), true))
        })
    });
    session.discard();
    outcome
}
