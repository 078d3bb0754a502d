//! Errors of the decisions about what to emit.

/// Result of a decision.
pub type Result<T> = std::result::Result<T, Error>;

/// Reason why nothing can be emitted. `crates/plugin` gives each its SQLSTATE and hint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An option that this plugin does not have (SQLSTATE 22023).
    #[error("unrecognized option \"{0}\" of output plugin \"braid\"")]
    UnknownOption(String),
    /// A required option is missing (SQLSTATE 22023).
    #[error("option \"{0}\" of output plugin \"braid\" is missing")]
    MissingOption(&'static str),
    /// An option has an invalid value (SQLSTATE 22023).
    #[error("invalid value for option \"{option}\" of output plugin \"braid\": \"{value}\"")]
    InvalidOption {
        /// The option.
        option: &'static str,
        /// The value that was given.
        value: String,
        /// The valid values, as a sentence.
        hint: &'static str,
    },
    /// A protocol version that this build does not support (SQLSTATE 22023).
    #[error("protocol version {0} is not supported by output plugin \"braid\"")]
    UnsupportedVersion(String),
    /// An option of the format `wal2json`, with wal2json's own message and SQLSTATE.
    #[error(transparent)]
    Wal2Json(#[from] crate::wal2json::Error),
    /// A publication that does not exist (SQLSTATE 42704).
    #[error("publication \"{0}\" does not exist")]
    MissingPublication(String),
    /// Two publications with different column lists (SQLSTATE 0A000).
    #[error(
        "cannot use different column lists for table \"{namespace}.{name}\" in different publications"
    )]
    ColumnLists {
        /// Namespace of the table.
        namespace: String,
        /// Name of the table.
        name: String,
    },
    /// Two publications with different settings for generated columns (SQLSTATE 0A000).
    #[error(
        "cannot use different values of publish_generated_columns for table \"{namespace}.{name}\" in different publications"
    )]
    GeneratedColumns {
        /// Namespace of the table.
        namespace: String,
        /// Name of the table.
        name: String,
    },
    /// A record is too large (SQLSTATE 54000).
    #[error(transparent)]
    Gir(#[from] braid_gir::Error),
}
