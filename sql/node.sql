-- create_node, drop_node, and a database that is a copy of a node.
\set VERBOSITY default
\a
\t
create database braid_node;
\c braid_node
set client_min_messages = warning;
create extension braid;
\set dsn 'host=' :HOST ' port=' :PORT ' user=' :USER ' dbname=braid_node'

-- what a node is called
select braid.create_node('', :'dsn');
\echo :SQLSTATE
select braid.create_node('left/right', :'dsn');
\echo :SQLSTATE
select braid.create_node(E'two\nlines', :'dsn');
\echo :SQLSTATE
select braid.create_node(null, :'dsn');
\echo :SQLSTATE

-- connection strings are not quoted in errors
select braid.create_node('tokyo', null);
\echo :SQLSTATE
select braid.create_node('tokyo', 'password=secret password');
\echo :SQLSTATE

-- functions that need a node say so
select braid.create_subscription('s', :'dsn');
\echo :SQLSTATE
select braid.sync_event();
\echo :SQLSTATE
select braid.wait_for_event('paris', '0/1');
\echo :SQLSTATE
select braid.wait_for_subscription('s');
\echo :SQLSTATE
select braid.enable_subscription('s');
\echo :SQLSTATE
select count(*) from braid.node_info();
select braid.drop_node('tokyo');
\echo :SQLSTATE

-- nothing stays of a transaction that is rolled back
begin;
select braid.create_node('tokyo', :'dsn');
select name, is_local, subscriptions from braid.nodes;
rollback;
select count(*) from braid.nodes;

-- one node a database
select braid.create_node('tokyo', :'dsn');
select name, is_local, subscriptions from braid.nodes;
select braid.create_node('osaka', :'dsn');
\echo :SQLSTATE
select node_name, identity_valid, wal_level, track_commit_timestamp, output_plugin_allowed,
       free_slots > 0 as slots, free_walsenders > 0 as walsenders, database_oid = (select oid from pg_database where datname = 'braid_node') as database
  from braid.node_info();

-- a node keeps its identity until it is dropped
select node_id as before from braid.nodes \gset
select braid.drop_node('tokyo');
select braid.create_node('tokyo', :'dsn');
select node_id <> :'before' from braid.nodes;

-- a database that was copied is not the node it was copied from
update braid.node set database_oid = 1 where is_local;
select identity_valid from braid.node_info();
select braid.sync_event();
\echo :SQLSTATE
select braid.create_subscription('s', :'dsn');
\echo :SQLSTATE
update braid.node set database_oid = (select oid from pg_database where datname = 'braid_node'), system_identifier = '1' where is_local;
select braid.enable_subscription('s');
\echo :SQLSTATE
-- its subscriptions go with it, and their slots stay where they are
insert into braid.node select 'paris', gen_random_uuid(), false, connection_id, '2', '2' from braid.node;
insert into braid.subscription (subscription_name, subscription_owner, provider_name, provider_id, publications, origin, slot_name,
    create_slot, copy_data, enabled, synchronous_commit, run_as_owner, disable_on_error, apply_mode, phase)
select 's' || n, current_role::regrole, 'paris', gen_random_uuid(), '{braid}', 'none', 'braid_tokyo_s' || n, true, true, false, 'off',
    false, false, 'parallel', 'stream' from generate_series(1, 2) n;
set client_min_messages = notice;
select braid.drop_subscription('s1');
select braid.drop_subscription('s1');
\echo :SQLSTATE
select braid.drop_node('tokyo');
select (select count(*) from braid.nodes), (select count(*) from braid.subscription), (select count(*) from braid.pending_cleanup);

-- a peer that is not in use is forgotten, one that is in use is not
set client_min_messages = warning;
select braid.create_node('tokyo', :'dsn');
insert into braid.node select 'paris', gen_random_uuid(), false, connection_id, '2', '2' from braid.node;
insert into braid.subscription (subscription_name, subscription_owner, provider_name, provider_id, publications, origin, slot_name,
    create_slot, copy_data, enabled, synchronous_commit, run_as_owner, disable_on_error, apply_mode, phase)
values ('s', current_role::regrole, 'paris', gen_random_uuid(), '{braid}', 'none', 'braid_tokyo_s', true, true, false, 'off',
    false, false, 'parallel', 'stream');
select braid.drop_node('paris');
\echo :SQLSTATE
select braid.drop_node('tokyo');
\echo :SQLSTATE
delete from braid.subscription;
select braid.drop_node('paris');
select braid.drop_node('paris');
\echo :SQLSTATE
select braid.drop_node(null);
\echo :SQLSTATE
-- a peer's name is taken
select braid.drop_node('tokyo');
insert into braid.node values ('paris', gen_random_uuid(), false, null, '2', '2');
select braid.create_node('paris', :'dsn');
\echo :SQLSTATE

\c postgres
drop database braid_node with (force);
