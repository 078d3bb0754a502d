-- The views: their columns, and that the one looked at most fits on a screen.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
select table_name, string_agg(column_name || ' ' || data_type, ', ' order by ordinal_position)
  from information_schema.columns where table_schema = 'braid'
   and table_name in (select viewname from pg_views where schemaname = 'braid') group by 1 order by table_name collate "C";
-- the signatures
select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
  from pg_proc p where pronamespace = 'braid'::regnamespace order by p.proname collate "C", 2;
\a
\t
select braid.create_node('here', :'here');
select braid.create_subscription('from_there', :'there', enabled => false) is not null;
select * from braid.subscription_status;
select * from braid.subscription_tables;
select * from braid.clock_skew;
-- conflicts
insert into braid.conflict_record (recorded_at, subscription_name, relation, kind, resolution, winner, reason, key, local_row, remote_row,
    local_timestamp, remote_timestamp, local_origin, remote_origin, remote_xid, remote_lsn)
select '2030-01-01 00:00:00Z'::timestamptz + n * interval '1 minute', 'from_there', 't', kind, 'last_update_wins', 'remote', 'newer',
    '{"id": 1}', '{"id": 1}', '{"id": 1}', '2030-01-01', '2030-01-02', 'here', 'there', '7', '0/AB'
  from (values (1, 'insert_exists'), (2, 'delete_missing'), (3, 'insert_exists')) v (n, kind);
insert into braid.conflict_count (subscription_name, relation, kind, resolution, winner, conflicts, counted_at)
select subscription_name, relation, kind, resolution, winner, 1, recorded_at from braid.conflict_record;
insert into braid.conflict_total values ('from_there', 't', 'insert_exists', 'last_update_wins', 'remote', 40, '2029-01-01 00:00:00Z', '2030-01-01 00:02:00Z');
set timezone = 'UTC';
set datestyle = 'ISO, YMD';
select subscription, relation, kind, resolution, winner, reason, key, local_row, remote_row from braid.conflict_history;
select * from braid.conflict_stats;
-- what the catalog does not take
\set VERBOSITY sqlstate
insert into braid.conflict_record (subscription_name, relation, kind, resolution, winner, reason) values ('s', 't', 'k', 'r', 'nobody', 'x');
update braid.subscription set origin = 'some';
update braid.subscription set phase = 'some';
update braid.subscription_table set state = 'some';
insert into braid.node values ('second', gen_random_uuid(), true, null, '1', '1');
\set VERBOSITY default
-- nothing travels in a dump
select count(*) from pg_extension where extname = 'braid' and extconfig is not null;

\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\set ECHO none
\i :postlude
