//! The rows of a query's result, as text. Of queries to other servers and in this database.

/// Text rows of a query's result.
#[derive(Debug, Default, Clone)]
pub struct Rows {
    columns: usize,
    cells: Vec<Option<String>>,
}

impl Rows {
    /// Rows of `columns` cells each, row by row.
    pub(crate) fn new(columns: usize, cells: Vec<Option<String>>) -> Self {
        Self { columns, cells }
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cells.len().checked_div(self.columns).unwrap_or(0)
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A cell; `None` if it is null or does not exist.
    #[must_use]
    pub fn get(&self, row: usize, column: usize) -> Option<&str> {
        if column >= self.columns {
            return None;
        }
        self.cells
            .get(row.checked_mul(self.columns)?.checked_add(column)?)?
            .as_deref()
    }

    /// Rows as slices of cells.
    pub fn iter(&self) -> impl Iterator<Item = &[Option<String>]> {
        self.cells.chunks(self.columns.max(1))
    }
}
