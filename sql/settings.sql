-- The settings: names, units, limits and when they take effect. This test does not change them, so
-- that no running worker notices.
\a
\t
select name, setting, unit, vartype, min_val, max_val, context, boot_val, category
  from pg_settings where name like 'braid.%' order by name collate "C";
-- each says what changes
select name from pg_settings where name like 'braid.%' and short_desc = '';
-- settings for tests are in no list; SHOW knows them
show braid.parallel_apply;
show braid.leader_applies;
show braid.max_table_counters;
show braid.max_transaction_crashes;
show braid.purge_interval;
-- not for a session to change
set braid.appliers_per_subscription = 4;
\echo :SQLSTATE
set braid.max_subscriptions = 4;
\echo :SQLSTATE
set braid.conflict_history = off;
\echo :SQLSTATE
-- no such setting
set braid.nonsense = 1;
\echo :SQLSTATE
-- limits
\set VERBOSITY sqlstate
alter system set braid.appliers_per_subscription = 0;
alter system set braid.appliers_per_subscription = 65;
alter system set braid.min_appliers_per_subscription = -1;
alter system set braid.min_appliers_per_subscription = 65;
alter system set braid.rows_per_applier = -1;
alter system set braid.copy_workers_per_subscription = 0;
alter system set braid.apply_buffer_size = 0;
alter system set braid.max_subscriptions = 0;
alter system set braid.conflict_history_retention = -1;
alter system set braid.clock_skew_warning = -1;
alter system set braid.clock_skew_limit = -1;
alter system set braid.clock_skew_action = 'error';
alter system set braid.parallel_apply = 'never';
alter system set braid.max_parked = 0;
alter system set braid.max_parked_size = 0;
alter system set braid.retry_interval = 1;
alter system set braid.retry_interval_max = 1;
alter system set braid.conflict_history = 'perhaps';
alter system set braid.clock_behind_action = 'perhaps';
alter system set braid.conflict_function_timeout = -1;
alter system set braid.max_clock_wait = -1;
alter system set braid.peer_away_limit = -1;
alter system set braid.querier_timeout = 99;
alter system set braid.remember_deletions = 'perhaps';
\set VERBOSITY default
