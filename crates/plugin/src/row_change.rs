//! One row's change: whether it passes the row filters and as what, its writeset, its images.
//!
//! Runs between the filling of the rows and the end of the change; allocates in the change's memory
//! only.

use braid_decoder::{Images, Outbox, Passed, collect, transform};
use braid_gir::{BeforeKind, ImageWriter, Operation, ReplicaIdentity, SchemaNumber, Value};

use super::column::Tools;
use super::key::RowKeys;
use super::relation::{Compiled, SentColumn};
use super::report::or_raise;
use super::row_filter::{Of, RowFilters};
use super::tally::Tally;
use super::tuple::{Field, Row};

/// One change of a row that was taken apart.
pub struct RowChange<'c> {
    pub compiled: &'c Compiled,
    pub tools: &'c Tools,
    pub operation: Operation,
    pub old: Option<Row<'c>>,
    pub new: Option<Row<'c>>,
}

impl RowChange<'_> {
    /// As which operation the change passes the row filters, if it does. Writes of a routed table
    /// are counted.
    #[inline]
    pub(super) fn passes(&self, tally: &mut Tally) -> Option<Operation> {
        let passed = match &self.compiled.filters {
            Some(filters) => passes(filters, self.operation, self.old, self.new),
            None => Some(self.operation),
        };
        match &self.compiled.routed {
            Some(routed) => routed.passes(passed?, self.old, self.new, tally),
            None => passed,
        }
    }

    fn kind(&self) -> BeforeKind {
        match (self.old, self.compiled.shape.identity) {
            (None, _) => BeforeKind::Absent,
            (Some(_), ReplicaIdentity::Full) => BeforeKind::Row,
            (Some(_), _) => BeforeKind::Key,
        }
    }

    /// The writeset of the change as it was made: a row filter that turns it into another kind of
    /// change does not reduce the keys.
    #[inline]
    pub fn collect_keys(&self, keys: &mut Vec<u64>) -> bool {
        let of = |row| RowKeys {
            row,
            columns: &self.compiled.key_columns,
            tools: self.tools,
        };
        let (mut before, mut after) = (self.old.map(of), self.new.map(of));
        let images = Images {
            operation: self.operation,
            kind: self.kind(),
            before: before.as_mut(),
            after: after.as_mut(),
        };
        collect(&self.compiled.keys, images, keys)
    }

    #[inline]
    pub fn write(
        &self,
        operation: Operation,
        outbox: &mut Outbox,
        schema: SchemaNumber,
        barrier: bool,
        keys: &[u64],
    ) {
        let (kind, writer) = (self.kind(), outbox.writer());
        let before = |image: &mut ImageWriter<'_>| self.put_old(image);
        // A row that enters a filter has to be whole: unchanged values are taken from the old row,
        // as far as that has them.
        let fallback = if operation == Operation::Insert {
            self.old
        } else {
            None
        };
        let after = |image: &mut ImageWriter<'_>| self.put_new(image, fallback);
        or_raise(match operation {
            Operation::Insert => writer.insert(schema, barrier, keys, after),
            Operation::Update => writer.update(schema, kind, barrier, keys, before, after),
            Operation::Delete => writer.delete(schema, kind, barrier, keys, before),
        });
    }

    /// Writes the former key of a row that an update has brought into the row filter, where the
    /// change lacks values of it: the subscriber asks for these by that key as long as it does not
    /// see the new one.
    pub fn put_former_key(&self, out: &mut Vec<u8>) {
        if self.operation == Operation::Update && self.old.is_some() && self.lacks_values() {
            or_raise(ImageWriter::write_alone(out, |image| self.put_old(image)));
        }
    }

    /// Whether neither the new nor the old row has the value of a column that is sent.
    fn lacks_values(&self) -> bool {
        let is_stored = |row: Row<'_>, attribute| matches!(row.field(attribute), Field::Stored(_));
        self.new.is_some_and(|new| {
            self.compiled.columns.iter().any(|column| {
                matches!(new.field(column.attribute), Field::Unavailable)
                    && !self.old.is_some_and(|old| is_stored(old, column.attribute))
            })
        })
    }

    fn put_old(&self, image: &mut ImageWriter<'_>) -> braid_gir::Result<()> {
        let whole = self.kind() == BeforeKind::Row;
        for column in &self.compiled.columns {
            match self.old {
                Some(old) if whole || column.in_identity => {
                    self.put(column, old.field(column.attribute), image);
                }
                _ => image.put(&Value::None),
            }
        }
        Ok(())
    }

    #[inline]
    fn put_new(
        &self,
        image: &mut ImageWriter<'_>,
        fallback: Option<Row<'_>>,
    ) -> braid_gir::Result<()> {
        let Some(new) = self.new else { return Ok(()) };
        for column in &self.compiled.columns {
            let mut field = new.field(column.attribute);
            if let (Field::Unavailable, Some(fallback)) = (field, fallback)
                && let stored @ Field::Stored(_) = fallback.field(column.attribute)
            {
                field = stored;
            }
            self.put(column, field, image);
        }
        Ok(())
    }

    #[inline]
    fn put(&self, column: &SentColumn, field: Field<'_>, image: &mut ImageWriter<'_>) {
        match field {
            Field::Null => image.put(&Value::Null),
            Field::Unavailable => image.put(&Value::None),
            Field::Stored(bytes) => column.encoder.put(bytes, image, self.tools),
        }
    }
}

/// As which operation a change passes row filters, if it does.
pub(super) fn passes(
    filters: &RowFilters,
    operation: Operation,
    old: Option<Row<'_>>,
    new: Option<Row<'_>>,
) -> Option<Operation> {
    match (operation, old, new) {
        (Operation::Insert, _, Some(new)) => filters
            .matches(Of::Insert, new, None)
            .then_some(Operation::Insert),
        (Operation::Delete, Some(old), _) => filters
            .matches(Of::Delete, old, None)
            .then_some(Operation::Delete),
        (Operation::Update, old, Some(new)) => {
            let old_matches = old.map(|old| filters.matches(Of::Update, old, None));
            let new_matches = filters.matches(Of::Update, new, old);
            match transform(old_matches, new_matches) {
                Passed::As(operation) => Some(operation),
                Passed::Nothing => None,
            }
        }
        _ => None,
    }
}
