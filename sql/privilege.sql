-- Who may do what: nobody, braid_monitor, braid_admin. Connection strings are for superusers.
\a
\t
set client_min_messages = warning;
create database braid_here;
create database braid_there;
\set server 'host=' :HOST ' port=' :PORT ' user=' :USER ' connect_timeout=10 dbname='
\set here :server 'braid_here'
\set there :server 'braid_there'
\set superuser :USER
create role braid_regress_nobody login;
create role braid_regress_admin login;
create role braid_regress_monitor login;
\c braid_there
set client_min_messages = warning;
create extension braid;
select braid.create_node('there', :'there');
create table public.t (id int primary key);
create publication braid for all tables;
\c braid_here
set client_min_messages = warning;
-- superusers only
set role braid_regress_admin;
create extension braid;
\echo :SQLSTATE
reset role;
create extension braid;
grant braid_admin to braid_regress_admin;
grant braid_monitor to braid_regress_monitor;

-- PUBLIC: what defaults of columns call, and what is asked of rows that the caller may read
select count(*) from pg_proc p where pronamespace = 'braid'::regnamespace and has_function_privilege('braid_regress_nobody', p.oid, 'execute');
select count(*) from pg_class c where relnamespace = 'braid'::regnamespace and relkind in ('r', 'v')
   and has_any_column_privilege('braid_regress_nobody', c.oid, 'select, insert, update, references');
select has_schema_privilege('braid_regress_nobody', 'braid', 'usage'), has_schema_privilege('braid_admin', 'braid', 'create');
-- every function has its search_path pinned, but the one that writes as the caller does, and those
-- of each row of a routed table, and a comment, like every table and view; procedures that commit
-- can't pin theirs, and name schemas
select p.oid::regprocedure from pg_proc p where pronamespace = 'braid'::regnamespace
   and (('search_path=pg_catalog, pg_temp' = any (proconfig)) is not true and prokind <> 'p' and proname not in ('restore_conflict', 'replicate_ddl', 'declare', 'is_here', 'is_at', 'place', 'answering_set', 'candidate_set', 'candidate_set_of_any', 'shard_of', 'routing_key') or obj_description(oid, 'pg_proc') is null);
select oid::regclass from pg_class where relnamespace = 'braid'::regnamespace and relkind in ('r', 'v') and obj_description(oid, 'pg_class') is null;
-- functions, and the roles that may call them
select p.proname, has_function_privilege('braid_admin', p.oid, 'execute') as admin, has_function_privilege('braid_monitor', p.oid, 'execute') as monitor
  from pg_proc p where pronamespace = 'braid'::regnamespace order by 1, 2, 3;
-- tables and views, and the roles that may read or write them
select c.relname, has_any_column_privilege('braid_admin', c.oid, 'select') as admin, has_any_column_privilege('braid_monitor', c.oid, 'select') as monitor,
       has_table_privilege('braid_admin', c.oid, 'insert, update, delete, truncate') as admin_writes
  from pg_class c where relnamespace = 'braid'::regnamespace and relkind in ('r', 'v', 'S') order by 1;
-- no view has a connection string
select count(*) from information_schema.columns c join information_schema.views v using (table_schema, table_name)
 where table_schema = 'braid' and column_name ~ 'dsn|conn|password';

-- braid_admin is enough, from the node to its end
create table public.t (id int primary key);
\c braid_here braid_regress_admin
select braid.create_node('here', :'here');
select name, is_local from braid.nodes;
select braid.sync_event() is not null;
select node_id from braid.node;
\echo :SQLSTATE
-- a superuser's subscription: to be run, but not to be turned elsewhere
\c braid_here :superuser
set client_min_messages = warning;
select braid.create_subscription('s', :'there' || ' password=topsecret', enabled => false) is not null;
\c braid_here braid_regress_admin
select name, provider, state from braid.subscription_status;
select braid.disable_subscription('s');
begin;
select braid.enable_subscription('s');
select braid.alter_subscription('s', disable_on_error => true);
select count(*) from braid.refresh_subscription('s');
select braid.rename_subscription('s', 'renamed');
select braid.set_rate_limit('renamed', 1000);
rollback;
select braid.alter_subscription('s', run_as_owner => true);
\echo :SQLSTATE
select braid.alter_subscription('s', dsn => :'there' || ' password=other');
\echo :SQLSTATE
-- nor does any view show the password
select count(*) from (
    select to_jsonb(v)::text as line from braid.subscription_status v union all
    select to_jsonb(v)::text from braid.subscription_detail v union all
    select to_jsonb(v)::text from braid.subscription_tables v union all
    select to_jsonb(v)::text from braid.apply_workers v union all
    select to_jsonb(v)::text from braid.dependency_stats v union all
    select to_jsonb(v)::text from braid.scaling_decisions v union all
    select to_jsonb(v)::text from braid.clock_skew v union all
    select to_jsonb(v)::text from braid.nodes v union all
    select to_jsonb(v)::text from braid.pending_cleanup v) l
 where line like '%topsecret%' or line like '%password%';
begin;
select braid.drop_subscription('s', drop_slot => false);
rollback;

-- braid_monitor reads and waits
\c braid_here braid_regress_monitor
select name, provider, state from braid.subscription_status;
select count(*) from braid.subscription_detail;
select count(*) from braid.subscription_tables;
select count(*) from braid.apply_workers;
select count(*) from braid.dependency_stats;
select count(*) from braid.scaling_decisions;
select count(*) from braid.deletions;
select count(*) from braid.clock_skew;
select count(*) from braid.conflict_history;
select count(*) from braid.conflict_stats;
select count(*) from braid.nodes;
select count(*) from braid.pending_cleanup;
select node_name from braid.node_info();
select braid.wait_for_subscription('s');
\echo :SQLSTATE
select braid.disable_subscription('s');
\echo :SQLSTATE
select braid.set_rate_limit('s', 1);
\echo :SQLSTATE
select dsn from braid.connection;
\echo :SQLSTATE
select connection_id from braid.slot_cleanup;
\echo :SQLSTATE
select count(*) from braid.compare_progress;
select count(*) from braid.differences;
select count(*) from braid.repair_log;
call braid.compare('s', 't');
\echo :SQLSTATE
call braid.repair('s', 't');
\echo :SQLSTATE
select braid.repair_begin('s', 't', 'newest', null, false);
\echo :SQLSTATE
select key from braid.conflict_record;
\echo :SQLSTATE

-- nobody
\c braid_here braid_regress_nobody
select * from braid.subscription_status;
\echo :SQLSTATE
select braid.sync_event();
\echo :SQLSTATE

-- what a caller has in its search_path is not what functions use
\c braid_here :superuser
create schema hijack;
grant usage on schema hijack to public;
create function hijack.current_database() returns name language sql as $$ select 'hijacked'::name $$;
create function hijack.current_setting(text) returns text language sql as $$ select 'hijacked' $$;
\c braid_here braid_regress_admin
set search_path = hijack, pg_catalog;
select current_database();
select braid.sync_event() is not null, wal_level from braid.node_info();

\c postgres :superuser
set client_min_messages = warning;
drop database braid_here with (force);
drop database braid_there with (force);
drop role braid_regress_nobody, braid_regress_admin, braid_regress_monitor;
