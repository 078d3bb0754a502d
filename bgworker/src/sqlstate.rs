//! SQLSTATEs, PostgreSQL's codes of errors. One list for the whole of Braid.

use std::{fmt, io};

macro_rules! sqlstates {
    ($($(#[$about:meta])* $name:ident = $code:literal,)+) => {
        /// An error's SQLSTATE (appendix A of PostgreSQL's documentation).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum SqlState {
            $($(#[$about])* $name,)+
            /// A code that is not in this list, as its five characters.
            Other([u8; 5]),
        }

        impl SqlState {
            /// All codes of this list.
            pub const NAMED: &[Self] = &[$(Self::$name,)+];

            /// Returns the five characters.
            #[must_use]
            pub const fn code(self) -> [u8; 5] {
                match self {
                    $(Self::$name => *$code,)+
                    Self::Other(code) => code,
                }
            }

            /// Returns the SQLSTATE of five characters.
            #[must_use]
            pub const fn from_code(code: [u8; 5]) -> Self {
                match &code {
                    $($code => Self::$name,)+
                    _ => Self::Other(code),
                }
            }
        }
    };
}

sqlstates! {
    /// warning
    Warning = b"01000",
    /// sqlclient_unable_to_establish_sqlconnection
    UnableToConnect = b"08001",
    /// connection_failure
    ConnectionFailure = b"08006",
    /// protocol_violation
    ProtocolViolation = b"08P01",
    /// feature_not_supported
    FeatureNotSupported = b"0A000",
    /// cardinality_violation
    CardinalityViolation = b"21000",
    /// string_data_right_truncation
    StringDataRightTruncation = b"22001",
    /// numeric_value_out_of_range
    NumericValueOutOfRange = b"22003",
    /// invalid_datetime_format
    InvalidDatetimeFormat = b"22007",
    /// datetime_field_overflow
    DatetimeFieldOverflow = b"22008",
    /// division_by_zero
    DivisionByZero = b"22012",
    /// character_not_in_repertoire
    CharacterNotInRepertoire = b"22021",
    /// invalid_parameter_value
    InvalidParameterValue = b"22023",
    /// invalid_text_representation
    InvalidTextRepresentation = b"22P02",
    /// invalid_binary_representation
    InvalidBinaryRepresentation = b"22P03",
    /// integrity_constraint_violation
    IntegrityConstraintViolation = b"23000",
    /// not_null_violation
    NotNullViolation = b"23502",
    /// foreign_key_violation
    ForeignKeyViolation = b"23503",
    /// unique_violation
    UniqueViolation = b"23505",
    /// check_violation
    CheckViolation = b"23514",
    /// exclusion_violation
    ExclusionViolation = b"23P01",
    /// active_sql_transaction
    ActiveSqlTransaction = b"25001",
    /// read_only_sql_transaction
    ReadOnlySqlTransaction = b"25006",
    /// no_active_sql_transaction
    NoActiveSqlTransaction = b"25P01",
    /// idle_in_transaction_session_timeout
    IdleInTransactionTimeout = b"25P03",
    /// transaction_timeout
    TransactionTimeout = b"25P04",
    /// invalid_password
    InvalidPassword = b"28P01",
    /// dependent_objects_still_exist
    DependentObjectsStillExist = b"2BP01",
    /// external_routine_exception
    ExternalRoutineException = b"38000",
    /// invalid_schema_name
    InvalidSchemaName = b"3F000",
    /// serialization_failure
    SerializationFailure = b"40001",
    /// deadlock_detected
    DeadlockDetected = b"40P01",
    /// insufficient_privilege
    InsufficientPrivilege = b"42501",
    /// syntax_error
    SyntaxError = b"42601",
    /// undefined_column
    UndefinedColumn = b"42703",
    /// undefined_object
    UndefinedObject = b"42704",
    /// duplicate_object
    DuplicateObject = b"42710",
    /// datatype_mismatch
    DatatypeMismatch = b"42804",
    /// wrong_object_type
    WrongObjectType = b"42809",
    /// cannot_coerce
    CannotCoerce = b"42846",
    /// undefined_function
    UndefinedFunction = b"42883",
    /// generated_always
    GeneratedAlways = b"428C9",
    /// undefined_table
    UndefinedTable = b"42P01",
    /// invalid_object_definition
    InvalidObjectDefinition = b"42P17",
    /// indeterminate_collation
    IndeterminateCollation = b"42P22",
    /// with_check_option_violation
    WithCheckOptionViolation = b"44000",
    /// insufficient_resources
    InsufficientResources = b"53000",
    /// disk_full
    DiskFull = b"53100",
    /// out_of_memory
    OutOfMemory = b"53200",
    /// too_many_connections
    TooManyConnections = b"53300",
    /// configuration_limit_exceeded
    ConfigurationLimitExceeded = b"53400",
    /// program_limit_exceeded
    ProgramLimitExceeded = b"54000",
    /// object_not_in_prerequisite_state
    ObjectNotInPrerequisiteState = b"55000",
    /// object_in_use
    ObjectInUse = b"55006",
    /// lock_not_available
    LockNotAvailable = b"55P03",
    /// query_canceled
    QueryCanceled = b"57014",
    /// admin_shutdown
    AdminShutdown = b"57P01",
    /// crash_shutdown
    CrashShutdown = b"57P02",
    /// cannot_connect_now
    CannotConnectNow = b"57P03",
    /// io_error
    IoError = b"58030",
    /// undefined_file
    UndefinedFile = b"58P01",
    /// raise_exception
    RaiseException = b"P0001",
    /// A row of a routed table belongs to another node: a code of Braid's own
    RowOfAnotherNode = b"RT001",
    /// internal_error
    InternalError = b"XX000",
    /// data_corrupted
    DataCorrupted = b"XX001",
    /// index_corrupted
    IndexCorrupted = b"XX002",
}

impl SqlState {
    /// Returns the SQLSTATE of a text: its first five bytes, padded with spaces.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut code = [b' '; 5];
        for (to, from) in code.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        Self::from_code(code)
    }

    /// Returns the SQLSTATE of an error of the operating system about a file or a process, as
    /// `errcode_for_file_access` of src/backend/utils/error/elog.c (15 to 18) does. Two
    /// differences: an exceeded quota is a full disk, and the errors without a class of their own
    /// are 58030.
    #[must_use]
    pub fn of_io(error: &io::Error) -> Self {
        match error.raw_os_error() {
            // fork() fails with EAGAIN at the limit of processes.
            Some(libc::ENFILE | libc::EMFILE | libc::EAGAIN) => return Self::InsufficientResources,
            Some(libc::ENOSPC | libc::EDQUOT) => return Self::DiskFull,
            Some(libc::ENOMEM) => return Self::OutOfMemory,
            _ => {}
        }
        match error.kind() {
            io::ErrorKind::NotFound => Self::UndefinedFile,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::InsufficientPrivilege
            }
            _ => Self::IoError,
        }
    }

    /// Returns a more exact SQLSTATE for an error that PostgreSQL raised with this one. PostgreSQL
    /// raises some errors of the operating system as XX000, with the system's text in the message:
    /// temporary files that cannot be created, an exceeded quota.
    #[must_use]
    pub fn refined(self, message: &str) -> Self {
        if self != Self::InternalError {
            return self;
        }
        let lacks = [
            libc::ENOSPC,
            libc::EDQUOT,
            libc::EMFILE,
            libc::ENFILE,
            libc::ENOMEM,
        ];
        let lack = lacks
            .into_iter()
            .map(io::Error::from_raw_os_error)
            .find(|error| {
                let words = error.to_string();
                // Rust appends the number to the system's text.
                let words = words.split(" (os error").next().unwrap_or_default();
                !words.is_empty() && message.contains(words)
            });
        lack.map_or(self, |error| Self::of_io(&error))
    }

    /// Returns whether the code begins like this: two characters are its class ("08"), three a
    /// group of PostgreSQL's within the class ("57P").
    #[must_use]
    pub fn is_of(self, class: &str) -> bool {
        self.code().starts_with(class.as_bytes())
    }

    /// Returns the code's class: its first two bytes.
    #[must_use]
    pub const fn class(self) -> [u8; 2] {
        let [first, second, ..] = self.code();
        [first, second]
    }

    /// Returns the code as PostgreSQL packs it: six bits a character, the first lowest
    /// (MAKE_SQLSTATE of src/include/utils/elog.h).
    #[must_use]
    pub fn packed(self) -> i32 {
        let bits = |byte: u8| (i32::from(byte) - i32::from(b'0')) & 0x3f;
        let code = self.code();
        code.iter()
            .rev()
            .fold(0, |packed, byte| packed << 6 | bits(*byte))
    }

    /// Returns the SQLSTATE that PostgreSQL has packed.
    #[must_use]
    pub fn unpack(packed: i32) -> Self {
        let mut code = [b'0'; 5];
        for (place, byte) in code.iter_mut().enumerate() {
            let bits = (packed >> (6 * place)) & 0x3f;
            *byte = b'0' + u8::try_from(bits).unwrap_or(0);
        }
        Self::from_code(code)
    }
}

impl fmt::Display for SqlState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&String::from_utf8_lossy(&self.code()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_its_code_lead_to_each_other() {
        for state in SqlState::NAMED {
            assert_eq!(SqlState::from_code(state.code()), *state);
            assert_eq!(SqlState::parse(&state.to_string()), *state);
            assert_eq!(SqlState::unpack(state.packed()), *state);
        }
        let mut codes: Vec<_> = SqlState::NAMED.iter().map(|state| state.code()).collect();
        codes.dedup();
        assert_eq!(codes.len(), SqlState::NAMED.len());
        assert!(codes.is_sorted());
    }

    #[test]
    fn a_code_without_a_name_is_kept() {
        let state = SqlState::parse("72000");
        assert_eq!(state, SqlState::Other(*b"72000"));
        assert_eq!(state.to_string(), "72000");
        assert_eq!(SqlState::unpack(state.packed()), state);
    }

    /// ERRCODE_UNIQUE_VIOLATION and ERRCODE_UNDEFINED_TABLE as a C compiler computes them.
    #[test]
    fn codes_are_packed_as_postgresql_does() {
        assert_eq!(SqlState::UniqueViolation.packed(), 83_906_754);
        assert_eq!(SqlState::UndefinedTable.packed(), 16_908_420);
    }

    #[test]
    fn errors_of_the_operating_system_have_the_classes_of_postgresql() {
        let table = [
            (libc::ENOSPC, SqlState::DiskFull),
            (libc::EDQUOT, SqlState::DiskFull),
            (libc::EMFILE, SqlState::InsufficientResources),
            (libc::ENFILE, SqlState::InsufficientResources),
            (libc::EAGAIN, SqlState::InsufficientResources),
            (libc::ENOMEM, SqlState::OutOfMemory),
            (libc::ENOENT, SqlState::UndefinedFile),
            (libc::EACCES, SqlState::InsufficientPrivilege),
            (libc::EPERM, SqlState::InsufficientPrivilege),
            (libc::EROFS, SqlState::InsufficientPrivilege),
            (libc::EIO, SqlState::IoError),
            (libc::EBADF, SqlState::IoError),
        ];
        for (number, state) in table {
            let error = io::Error::from_raw_os_error(number);
            assert_eq!(SqlState::of_io(&error), state, "{error}");
        }
        let short = io::Error::from(io::ErrorKind::UnexpectedEof);
        assert_eq!(SqlState::of_io(&short), SqlState::IoError);
    }

    #[test]
    fn an_internal_error_with_words_of_the_operating_system_gets_its_class() {
        let table = [
            (
                "could not create temporary file \"base/pgsql_tmp/pgsql_tmp1.0\": No space left on device",
                SqlState::DiskFull,
            ),
            (
                "could not extend file \"base/5/16384\": Disk quota exceeded",
                SqlState::DiskFull,
            ),
            (
                "epoll_create1 failed: Too many open files",
                SqlState::InsufficientResources,
            ),
            (
                "epoll_create1 failed: Too many open files in system",
                SqlState::InsufficientResources,
            ),
            (
                "could not create temporary file \"a\": Cannot allocate memory",
                SqlState::OutOfMemory,
            ),
            (
                "could not create temporary file \"a\": Input/output error",
                SqlState::InternalError,
            ),
            (
                "cache lookup failed for relation 16384",
                SqlState::InternalError,
            ),
        ];
        for (message, state) in table {
            assert_eq!(SqlState::InternalError.refined(message), state, "{message}");
        }
        let other = SqlState::RaiseException.refined("No space left on device");
        assert_eq!(other, SqlState::RaiseException);
    }

    #[test]
    fn classes() {
        assert!(SqlState::AdminShutdown.is_of("57P") && SqlState::AdminShutdown.is_of("57"));
        assert!(!SqlState::QueryCanceled.is_of("57P"));
        assert_eq!(SqlState::DiskFull.class(), *b"53");
    }

    #[test]
    fn texts_that_are_no_code() {
        for (text, code) in [("", "     "), ("XX", "XX   "), ("4000199", "40001")] {
            assert_eq!(SqlState::parse(text).to_string(), code);
        }
        assert!(!SqlState::parse("é").is_of("08"));
    }
}
