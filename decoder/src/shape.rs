//! Shapes of relations: a shape is remembered after it was sent, and sent again only if it has
//! changed.

use std::collections::{HashMap, HashSet};

use braid_gir::{
    Column, ColumnFlags, ReplicaIdentity, Result, SchemaKeyColumn, SchemaNumber, Writer, WrittenKey,
};

/// Shapes of one relation that are remembered.
const REMEMBERED_SHAPES: usize = 8;

/// Relations whose shapes are remembered. Beyond this number all are forgotten.
const REMEMBERED_RELATIONS: usize = 16_384;
/// After this many new numbers, readers should check which numbers are still used.
const NEW_NUMBERS: u32 = 4_096;

/// One column of a shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeColumn {
    /// Key membership and other flags.
    pub flags: ColumnFlags,
    /// OID of the type; of the base type for a domain.
    pub type_oid: u32,
    /// Type modifier, -1 for none.
    pub type_modifier: i32,
    /// Name of the column.
    pub name: String,
    /// Schema of the type.
    pub type_namespace: String,
    /// Name of the type.
    pub type_name: String,
    /// Mark of the statement that named the column, or 0.
    pub mark: u64,
}

/// A unique key of a shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeKey {
    /// Two nulls are equal in this key.
    pub nulls_equal: bool,
    /// Indexes of the shape's columns, and the collation that compares each: empty for the type's
    /// usual equality.
    pub columns: Vec<(u16, String)>,
}

/// Content of a schema record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// OID of the relation under whose name changes are sent.
    pub relation_oid: u32,
    /// Namespace of that relation.
    pub namespace: String,
    /// Name of that relation.
    pub name: String,
    /// How rows before a change are identified.
    pub identity: ReplicaIdentity,
    /// The columns that are sent, in order.
    pub columns: Vec<ShapeColumn>,
    /// The unique keys that are hashed and whose columns are all sent.
    pub keys: Vec<ShapeKey>,
}

impl Shape {
    /// Appends the schema record.
    ///
    /// # Errors
    /// [`braid_gir::Error::TooLarge`].
    pub fn write(&self, number: SchemaNumber, writer: &mut Writer) -> Result<()> {
        let columns: Vec<Column<'_>> = self
            .columns
            .iter()
            .map(|column| Column {
                flags: column.flags,
                type_oid: column.type_oid,
                type_modifier: column.type_modifier,
                name: &column.name,
                type_namespace: &column.type_namespace,
                type_name: &column.type_name,
                mark: column.mark,
            })
            .collect();
        let keys: Vec<(bool, Vec<SchemaKeyColumn<'_>>)> = self
            .keys
            .iter()
            .map(|key| {
                let columns = key
                    .columns
                    .iter()
                    .map(|(column, comparison)| SchemaKeyColumn {
                        column: *column,
                        comparison,
                    });
                (key.nulls_equal, columns.collect())
            })
            .collect();
        let keys: Vec<WrittenKey<'_>> = keys
            .iter()
            .map(|(nulls_equal, columns)| (*nulls_equal, columns.as_slice()))
            .take(usize::from(u8::MAX))
            .collect();
        writer.schema(
            number,
            self.relation_oid,
            self.identity,
            (&self.namespace, &self.name),
            (&columns, &keys),
        )
    }
}

/// The shapes that were sent in a stream, with their numbers. Partitions that are sent under their
/// root's name share its numbers as long as all fields of their schema records are equal.
#[derive(Debug, Default)]
pub struct SchemaBook {
    next: u32,
    sent: HashMap<u32, Vec<(SchemaNumber, Shape)>>,
    /// Value of `next` when the used numbers were last requested.
    looked: u32,
}

impl SchemaBook {
    /// Returns the number of `shape`. Writes its record first if the stream does not have it.
    ///
    /// # Errors
    /// [`braid_gir::Error::TooLarge`].
    pub fn announce(&mut self, shape: &Shape, writer: &mut Writer) -> Result<SchemaNumber> {
        if self.sent.len() >= REMEMBERED_RELATIONS && !self.sent.contains_key(&shape.relation_oid) {
            self.forget();
        }
        let known = self.sent.entry(shape.relation_oid).or_default();
        if let Some((number, _)) = known.iter().find(|(_, other)| other == shape) {
            return Ok(*number);
        }
        let number = SchemaNumber(self.next);
        shape.write(number, writer)?;
        self.next = self.next.wrapping_add(1);
        if known.len() >= REMEMBERED_SHAPES {
            known.remove(0);
        }
        known.push((number, shape.clone()));
        Ok(number)
    }

    /// Forgets the sent shapes, which will be sent again under new numbers.
    pub fn forget(&mut self) {
        self.sent.clear();
    }

    /// Returns whether there are so many new numbers that a caller who stores something for each
    /// should call [`Self::in_use`].
    #[must_use]
    pub fn has_many_new(&self) -> bool {
        self.next.wrapping_sub(self.looked) >= NEW_NUMBERS
    }

    /// Returns the numbers that later records may refer to: those of the book, and `kept`, which
    /// the caller uses without asking the book. No other earlier number will be used again.
    pub fn in_use(&mut self, kept: impl Iterator<Item = SchemaNumber>) -> HashSet<SchemaNumber> {
        self.looked = self.next;
        let known = self.sent.values().flatten().map(|(number, _)| *number);
        known.chain(kept).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_gir::{Reader, Tag};

    fn shape(relation_oid: u32, name: &str) -> Shape {
        Shape {
            relation_oid,
            namespace: "public".to_owned(),
            name: name.to_owned(),
            identity: ReplicaIdentity::Default,
            columns: Vec::new(),
            keys: Vec::new(),
        }
    }

    #[test]
    fn a_shape_is_sent_once_and_a_number_never_means_two() {
        let (mut book, mut writer) = (SchemaBook::default(), Writer::new());
        let mut announce = |shape: &Shape| book.announce(shape, &mut writer).unwrap().0;
        assert_eq!(announce(&shape(1, "a")), 0);
        assert_eq!(announce(&shape(1, "a")), 0);
        assert_eq!(announce(&shape(2, "a")), 1);
        assert_eq!(announce(&shape(1, "b")), 2);
        assert_eq!(announce(&shape(1, "a")), 0);
        for other in 0..10 {
            assert_eq!(announce(&shape(1, &format!("x{other}"))), 3 + other);
        }
        assert_eq!(announce(&shape(1, "a")), 13);
        book.forget();
        assert_eq!(book.announce(&shape(2, "a"), &mut writer).unwrap().0, 14);
        let mut reader = Reader::new(writer.frame());
        let mut records = 0;
        while let Some((tag, _)) = reader.next_raw().unwrap() {
            assert_eq!(tag, Tag::Schema);
            records += 1;
        }
        assert_eq!(records, 15);
    }

    /// A reader's data for each number, fed by a stream.
    #[derive(Default)]
    struct Kept {
        book: SchemaBook,
        numbers: HashSet<SchemaNumber>,
        most: usize,
    }

    impl Kept {
        fn announce(&mut self, shape: &Shape, used: &[SchemaNumber]) -> SchemaNumber {
            let mut writer = Writer::new();
            let number = self.book.announce(shape, &mut writer).unwrap();
            if !writer.is_empty() {
                self.numbers.insert(number);
            }
            assert!(self.numbers.contains(&number), "{number:?} is known");
            self.most = self.most.max(self.numbers.len());
            if self.book.has_many_new() {
                let used = used.iter().copied().chain([number]);
                let in_use = self.book.in_use(used);
                self.numbers.retain(|number| in_use.contains(number));
            }
            number
        }
    }

    #[test]
    fn tables_that_come_and_go_leave_nothing_behind() {
        let mut kept = Kept::default();
        let lasting = kept.announce(&shape(1, "lasting"), &[]);
        for oid in 2..100_000 {
            kept.announce(&shape(oid, "one of many"), &[lasting]);
        }
        assert!(
            kept.most <= REMEMBERED_RELATIONS + NEW_NUMBERS as usize + 1,
            "{}",
            kept.most
        );
        assert!(kept.book.sent.len() <= REMEMBERED_RELATIONS);
        assert!(
            kept.numbers.contains(&lasting),
            "what is used is not forgotten"
        );
    }

    #[test]
    fn shapes_that_a_table_had_leave_nothing_behind() {
        let mut kept = Kept::default();
        for version in 0..100_000 {
            kept.announce(&shape(1, &format!("version {version}")), &[]);
            kept.announce(&shape(2, "lasting"), &[]);
        }
        assert!(
            kept.most <= 2 * REMEMBERED_SHAPES + NEW_NUMBERS as usize,
            "{}",
            kept.most
        );
        assert_eq!(kept.announce(&shape(2, "lasting"), &[]), SchemaNumber(1));
    }
}
