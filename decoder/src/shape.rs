//! A relation's shape as it is sent, kept so that it is only sent again when it really changed.

use braid_gir::{Column, ColumnFlags, ReplicaIdentity, Result, SchemaNumber, Writer};

/// One column of a shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeColumn {
    /// Key membership and the like.
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
}

/// What a schema record says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// OID of the relation under whose name changes are sent.
    pub relation_oid: u32,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// How old rows are identified.
    pub identity: ReplicaIdentity,
    /// The columns that are sent, in order.
    pub columns: Vec<ShapeColumn>,
}

impl Shape {
    /// Append the schema record.
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
            })
            .collect();
        writer.schema(
            number,
            self.relation_oid,
            self.identity,
            (&self.namespace, &self.name),
            &columns,
        )
    }
}
