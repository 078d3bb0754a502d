//! Reactions to errors, from the SQLSTATE and the typed reason alone. One table.

use crate::reason::Reason;
use crate::sqlstate::SqlState;

/// Reaction to an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Roll back and apply the transaction again.
    Retry,
    /// End the workers; the manager restarts them after a pause.
    Reconnect,
    /// A constraint was violated: try again, as another session may have been faster; then stop.
    Conflict,
    /// Somebody has to intervene: the subscription stops and keeps its position.
    Stop,
}

/// Returns the policy for an error while a transaction was applied.
#[must_use]
pub fn for_apply(sqlstate: SqlState) -> Policy {
    match sqlstate {
        // serialization_failure, deadlock_detected, lock_not_available, query_canceled
        SqlState::SerializationFailure
        | SqlState::DeadlockDetected
        | SqlState::LockNotAvailable
        | SqlState::QueryCanceled => Policy::Retry,
        // too_many_connections, out_of_memory, disk_full, insufficient_resources: may pass;
        // object_in_use: a replication origin is still held by a process that is ending
        SqlState::TooManyConnections
        | SqlState::OutOfMemory
        | SqlState::DiskFull
        | SqlState::InsufficientResources
        | SqlState::ObjectInUse => Policy::Reconnect,
        // admin_shutdown, crash_shutdown, cannot_connect_now, database_dropped
        _ if sqlstate.is_of("57P") || sqlstate.is_of("08") => Policy::Reconnect,
        // internal_error: a concurrent ALTER TABLE (a cache look-up that fails), seen under load
        SqlState::InternalError => Policy::Conflict,
        _ if sqlstate.is_of("23") => Policy::Conflict,
        _ => Policy::Stop,
    }
}

/// Fate of a subscription that was stopped by an error, while a transaction was applied or a table
/// copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterStop {
    /// Try again, with growing pauses: a change of tables, data, functions or privileges on this
    /// node may remove the cause.
    TryAgain,
    /// Wait for a person's decision.
    Wait,
}

/// Returns what happens to a subscription after a stop with this error.
#[must_use]
pub fn after_stop(sqlstate: SqlState) -> AfterStop {
    match sqlstate {
        // integrity_constraint_violation as such: a conflict whose resolution is 'error'
        SqlState::IntegrityConstraintViolation => AfterStop::Wait,
        // internal_error: an ALTER TABLE that took long
        SqlState::InternalError => AfterStop::TryAgain,
        _ => match &sqlstate.class() {
            // feature_not_supported, cardinality_violation, data_exception, integrity constraints,
            // dependent objects, errors of routines and triggers, invalid_schema_name,
            // syntax_error_or_access_rule_violation, WITH CHECK OPTION, program limits, what
            // PL/pgSQL raises
            b"0A" | b"21" | b"22" | b"23" | b"2B" | b"2F" | b"38" | b"39" | b"3F" | b"42"
            | b"44" | b"54" | b"P0" => AfterStop::TryAgain,
            // 08P01 (the stream), 55000 (WAL or the rest of a transaction is gone), XX001, XX002
            // (damaged data), and others
            _ => AfterStop::Wait,
        },
    }
}

/// Says what becomes of a subscription that the provider has refused with this error. A right, a
/// setting, a library or a publication can be put right there, and then the subscription goes on.
/// A slot that is gone is different: one that somebody makes anew lacks what came in between.
#[must_use]
pub fn after_refusal(sqlstate: SqlState, reason: Option<Reason>) -> AfterStop {
    let may_be_cured = match sqlstate {
        SqlState::UndefinedObject => reason == Some(Reason::PublicationMissing),
        // undefined_file: the library is not installed
        SqlState::UndefinedFile => reason != Some(Reason::WalRemoved),
        // insufficient_privilege, undefined_function, undefined_table, ...
        _ => matches!(&sqlstate.class(), b"28" | b"3D" | b"3F" | b"42"),
    };
    if may_be_cured {
        AfterStop::TryAgain
    } else {
        AfterStop::Wait
    }
}

/// Returns the policy for an error that the provider reported with this reason, or that occurred on
/// the connection to it.
#[must_use]
pub fn for_refusal(sqlstate: SqlState, reason: Option<Reason>) -> Policy {
    match reason {
        Some(Reason::ResourcesExhausted) => Policy::Reconnect,
        _ => for_provider(sqlstate),
    }
}

/// Returns the policy for an error that the provider reported, or that occurred on the connection
/// to it, from its SQLSTATE.
#[must_use]
pub fn for_provider(sqlstate: SqlState) -> Policy {
    match sqlstate {
        // object_in_use: a walsender that has not noticed yet still holds the slot;
        // idle_in_transaction_session_timeout, transaction_timeout: the provider was slow
        SqlState::ObjectInUse
        | SqlState::IdleInTransactionTimeout
        | SqlState::TransactionTimeout => Policy::Reconnect,
        _ if sqlstate.is_of("57")
            || sqlstate.is_of("53")
            || (sqlstate.is_of("08") && sqlstate != SqlState::ProtocolViolation) =>
        {
            Policy::Reconnect
        }
        // 42704 (slot or publication gone), 55000 (WAL removed, wal_level), 42501, 22023 (options),
        // 58P01 (plugin), XX000 ...
        _ => Policy::Stop,
    }
}

/// Hint for an error of a provider in recovery. The error is retried: during a failover the address
/// may still be that of a standby that is not promoted yet.
pub const STANDBY_HINT: &str = "The connection string leads to a standby. The subscription goes on by itself once that server is promoted, or once the \
     connection string leads to the primary again. If neither happens, change the connection string with braid.alter_subscription.";

/// Returns whether an error counts as a failure for `disable_on_error`. A slot or an origin in use
/// does not: when a leader restarts, the processes of the previous one may still hold them.
#[must_use]
pub fn is_failure(sqlstate: SqlState) -> bool {
    sqlstate != SqlState::ObjectInUse
}

/// Returns a hint for an error of the provider that has no good one of its own.
#[must_use]
pub fn provider_hint(sqlstate: SqlState, reason: Option<Reason>) -> &'static str {
    match (reason, sqlstate) {
        (Some(Reason::SlotMissing), _) => {
            "The slot is gone, and with it what was not received yet. Drop the subscription and create it again; or make a slot of that name \
             with plugin braid at the provider, then copy each table anew with braid.resync_table and enable the subscription."
        }
        (Some(Reason::PublicationMissing), _) => {
            "Create the publication at the provider, or name others with braid.alter_subscription, then enable the \
             subscription again."
        }
        (Some(Reason::WalRemoved | Reason::SlotInvalidated), _) => {
            "The provider has removed WAL that this subscription still needs (max_slot_wal_keep_size). Drop the \
             subscription and create it again."
        }
        (_, SqlState::InsufficientPrivilege) => {
            "Grant the connecting role REPLICATION and read access to the published tables at the provider."
        }
        (Some(Reason::BraidMissing), _) | (_, SqlState::UndefinedFile) => {
            "Install braid at the provider."
        }
        _ => "",
    }
}

/// Returns the meaning and the remedy of a slot's `invalidation_reason` at the provider (PostgreSQL
/// 17 and later). `None` for removed WAL, which is handled as in earlier versions.
#[must_use]
pub fn invalidated(reason: &str) -> Option<(&'static str, &'static str)> {
    Some(match reason {
        "wal_removed" => return None,
        "idle_timeout" => (
            "nobody has read it for longer than idle_replication_slot_timeout",
            "Set idle_replication_slot_timeout at the provider to more than this node is ever away, or to 0. Drop the subscription and create it again.",
        ),
        "rows_removed" => (
            "rows of the catalog that it needs were removed",
            "Set hot_standby_feedback, if the provider is a standby. Drop the subscription and create it again.",
        ),
        "wal_level_insufficient" => (
            "wal_level was lower than logical",
            "Set wal_level = logical at the provider. Drop the subscription and create it again.",
        ),
        _ => (
            "its invalidation_reason in pg_replication_slots says why",
            "Drop the subscription and create it again.",
        ),
    })
}

/// Returns a hint for an error about `table` that this function of PostgreSQL's source raised, if
/// the cause is a difference between the local and the provider's table (15 to 18).
#[must_use]
pub fn cause_hint(sqlstate: SqlState, function: &str, table: &str) -> Option<String> {
    match (sqlstate, function) {
        (SqlState::CheckViolation, "ExecFindPartition") => Some(format!(
            "Create a partition of table \"{table}\" here that takes the row."
        )),
        (SqlState::CheckViolation, "ExecPartitionCheckEmitError") => Some(format!(
            "Give partition \"{table}\" here the bounds that it has at the provider."
        )),
        _ => None,
    }
}

/// Returns a hint for a transient error without one: what to check if the error persists.
#[must_use]
pub fn transient_hint(sqlstate: SqlState) -> &'static str {
    match sqlstate {
        // object_in_use: the slot at the provider, or a local replication origin
        SqlState::ObjectInUse => {
            "A process of an earlier connection still holds it and will let go. If none does, look for the slot's active_pid in \
             pg_replication_slots at the provider, or for another subscriber that uses the same slot."
        }
        SqlState::DiskFull => "Free disk space.",
        SqlState::IdleInTransactionTimeout | SqlState::TransactionTimeout => {
            "It is tried again. If it does not pass, raise this setting for the role of the connection string."
        }
        SqlState::OutOfMemory => "Free memory, or lower braid.apply_buffer_size.",
        SqlState::TooManyConnections => {
            "Increase max_connections, or max_wal_senders at the provider."
        }
        _ if sqlstate.is_of("08") => {
            "It goes on by itself once the provider can be reached: check that it runs, the network, its pg_hba.conf, and the \
             connection string, which braid.alter_subscription changes."
        }
        _ if sqlstate.is_of("57") => {
            "It goes on by itself once the server accepts connections and its processes are left alone; the servers' logs say \
             who ended them."
        }
        _ if sqlstate.is_of("53") => "Raise the limit that was reached, or free what it counts.",
        _ if sqlstate.is_of("40") || sqlstate == SqlState::LockNotAvailable => {
            "It is tried again. If it does not pass, look for sessions that hold locks for long."
        }
        _ => "It is tried again. The server's log may say more.",
    }
}

/// Returns the pause before start number `attempt` (from 1), in milliseconds: it doubles from
/// `first` up to `most`.
#[must_use]
pub fn backoff_ms(attempt: u32, first: u64, most: u64) -> u64 {
    let doubled = first.saturating_mul(1 << attempt.saturating_sub(1).min(63));
    doubled.clamp(first.min(most), most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_that_is_missing_has_a_hint() {
        let hint = |sqlstate, function| cause_hint(sqlstate, function, "public.t");
        let missing = hint(SqlState::CheckViolation, "ExecFindPartition").unwrap_or_default();
        assert!(missing.starts_with("Create a partition of table \"public.t\""));
        let bounds =
            hint(SqlState::CheckViolation, "ExecPartitionCheckEmitError").unwrap_or_default();
        assert!(bounds.contains("\"public.t\"") && bounds.contains("bounds"));
        assert_eq!(hint(SqlState::CheckViolation, "ExecConstraints"), None);
        assert_eq!(hint(SqlState::UniqueViolation, "ExecFindPartition"), None);
    }

    #[test]
    fn a_refusal_is_tried_again_where_the_provider_can_be_put_right() {
        let after = |sqlstate: [u8; 5], message| {
            let sqlstate = SqlState::from_code(sqlstate);
            after_refusal(sqlstate, Reason::of_provider(sqlstate, message))
        };
        let right = "permission denied for table t";
        assert_eq!(after(*b"42501", right), AfterStop::TryAgain);
        assert_eq!(after(*b"28000", "role can't log in"), AfterStop::TryAgain);
        assert_eq!(after(*b"58P01", "no such file"), AfterStop::TryAgain);
        let publication = "publication \"shop\" does not exist";
        assert_eq!(after(*b"42704", publication), AfterStop::TryAgain);
        let slot = "replication slot \"s\" does not exist";
        assert_eq!(after(*b"42704", slot), AfterStop::Wait);
        let removed = "requested WAL segment 0001 has already been removed";
        assert_eq!(after(*b"58P01", removed), AfterStop::Wait);
        assert_eq!(
            after(*b"55000", "the slot was invalidated"),
            AfterStop::Wait
        );
        assert_eq!(after(*b"22023", "an option is unknown"), AfterStop::Wait);
    }

    #[test]
    fn apply_policy_by_class() {
        let table = [
            (SqlState::SerializationFailure, Policy::Retry),
            (SqlState::DeadlockDetected, Policy::Retry),
            (SqlState::LockNotAvailable, Policy::Retry),
            (SqlState::AdminShutdown, Policy::Reconnect),
            (SqlState::ConnectionFailure, Policy::Reconnect),
            (SqlState::ObjectInUse, Policy::Reconnect),
            (SqlState::UniqueViolation, Policy::Conflict),
            (SqlState::NotNullViolation, Policy::Conflict),
            (SqlState::UndefinedTable, Policy::Stop),
            (SqlState::InvalidTextRepresentation, Policy::Stop),
            (SqlState::InternalError, Policy::Conflict),
            (SqlState::DataCorrupted, Policy::Stop),
        ];
        for (sqlstate, policy) in table {
            assert_eq!(for_apply(sqlstate), policy, "{sqlstate}");
        }
    }

    #[test]
    fn what_a_change_of_tables_cures_is_tried_again_after_a_stop() {
        let again = [
            SqlState::FeatureNotSupported,
            SqlState::CardinalityViolation,
            SqlState::StringDataRightTruncation,
            SqlState::NumericValueOutOfRange,
            SqlState::InvalidTextRepresentation,
            SqlState::NotNullViolation,
            SqlState::ForeignKeyViolation,
            SqlState::UniqueViolation,
            SqlState::CheckViolation,
            SqlState::ExclusionViolation,
            SqlState::ExternalRoutineException,
            SqlState::InvalidSchemaName,
            SqlState::InsufficientPrivilege,
            SqlState::UndefinedColumn,
            SqlState::UndefinedObject,
            SqlState::DatatypeMismatch,
            SqlState::UndefinedFunction,
            SqlState::UndefinedTable,
            SqlState::GeneratedAlways,
            SqlState::WithCheckOptionViolation,
            SqlState::ProgramLimitExceeded,
            SqlState::RaiseException,
            SqlState::InternalError,
        ];
        for sqlstate in again {
            assert_eq!(after_stop(sqlstate), AfterStop::TryAgain, "{sqlstate}");
        }
        for sqlstate in [
            SqlState::ProtocolViolation,
            SqlState::IntegrityConstraintViolation,
            SqlState::ObjectNotInPrerequisiteState,
            SqlState::UndefinedFile,
            SqlState::DataCorrupted,
            SqlState::IndexCorrupted,
            SqlState::parse(""),
            SqlState::parse("2"),
            SqlState::parse("é"),
        ] {
            assert_eq!(after_stop(sqlstate), AfterStop::Wait, "{sqlstate}");
        }
    }

    #[test]
    fn provider_policy_by_class() {
        let table = [
            (SqlState::ConnectionFailure, Policy::Reconnect),
            (SqlState::ProtocolViolation, Policy::Stop),
            (SqlState::CannotConnectNow, Policy::Reconnect),
            (SqlState::TooManyConnections, Policy::Reconnect),
            (SqlState::ObjectInUse, Policy::Reconnect),
            (SqlState::UndefinedObject, Policy::Stop),
            (SqlState::ObjectNotInPrerequisiteState, Policy::Stop),
            (SqlState::InvalidPassword, Policy::Stop),
        ];
        for (sqlstate, policy) in table {
            assert_eq!(for_provider(sqlstate), policy, "{sqlstate}");
        }
    }

    #[test]
    fn wal_that_is_gone_is_told_from_a_file_that_is_not_there() {
        let removed = "requested WAL segment 000000010000000000000005 has already been removed";
        let hint =
            |sqlstate, message| provider_hint(sqlstate, Reason::of_provider(sqlstate, message));
        for sqlstate in [SqlState::UndefinedFile, SqlState::InternalError] {
            assert!(hint(sqlstate, removed).contains("max_slot_wal_keep_size"));
        }
        let plugin = "could not access file \"braid\": No such file or directory";
        assert!(hint(SqlState::UndefinedFile, plugin).contains("Install braid"));
    }

    #[test]
    fn a_provider_without_room_is_tried_again() {
        let full = "could not create temporary file \"a\": No space left on device";
        let policy = |message| {
            let reason = Reason::of_provider(SqlState::InternalError, message);
            for_refusal(SqlState::InternalError, reason)
        };
        assert_eq!(policy(full), Policy::Reconnect);
        assert_eq!(policy("cache lookup failed for relation 1"), Policy::Stop);
        assert_eq!(
            for_refusal(SqlState::TooManyConnections, None),
            Policy::Reconnect
        );
    }

    #[test]
    fn a_slot_that_was_idle_is_not_called_one_without_wal() {
        let (what, hint) = invalidated("idle_timeout").unwrap_or_default();
        assert!(what.contains("idle_replication_slot_timeout"));
        assert!(!hint.contains("max_slot_wal_keep_size"));
        assert_eq!(invalidated("wal_removed"), None);
        assert!(invalidated("something new").is_some());
    }

    #[test]
    fn whatever_is_tried_again_has_a_hint() {
        let states = [
            SqlState::UnableToConnect,
            SqlState::ConnectionFailure,
            SqlState::SerializationFailure,
            SqlState::DeadlockDetected,
            SqlState::InsufficientResources,
            SqlState::DiskFull,
            SqlState::OutOfMemory,
            SqlState::TooManyConnections,
            SqlState::ConfigurationLimitExceeded,
            SqlState::ObjectInUse,
            SqlState::IdleInTransactionTimeout,
            SqlState::TransactionTimeout,
            SqlState::LockNotAvailable,
            SqlState::QueryCanceled,
            SqlState::AdminShutdown,
            SqlState::CrashShutdown,
            SqlState::CannotConnectNow,
            SqlState::UniqueViolation,
        ];
        for sqlstate in states {
            let retried = [for_apply(sqlstate), for_provider(sqlstate)]
                .iter()
                .any(|policy| *policy != Policy::Stop);
            assert!(retried, "{sqlstate}");
            assert!(transient_hint(sqlstate).ends_with('.'), "{sqlstate}");
        }
        assert!(transient_hint(SqlState::TooManyConnections).contains("max_wal_senders"));
        assert!(transient_hint(SqlState::ConnectionFailure).contains("alter_subscription"));
        assert!(transient_hint(SqlState::ObjectInUse).contains("active_pid"));
    }

    #[test]
    fn backoff_doubles_and_is_bounded() {
        assert_eq!(backoff_ms(1, 1000, 60_000), 1000);
        assert_eq!(backoff_ms(3, 1000, 60_000), 4000);
        assert_eq!(backoff_ms(7, 1000, 60_000), 60_000);
        assert_eq!(backoff_ms(u32::MAX, 1000, 60_000), 60_000);
        assert_eq!(backoff_ms(1, 5000, 1000), 1000);
    }
}
