-- create_subscription when this server has no room for it.
\a
\t
set client_min_messages = warning;
create database braid_here;
create database braid_there;
\set server 'host=' :HOST ' port=' :PORT ' user=' :USER ' connect_timeout=10 dbname='
\set here :server 'braid_here'
\set there :server 'braid_there'
\c braid_there
set client_min_messages = warning;
create extension braid;
select braid.create_node('there', :'there');
create table t (id int primary key);
create publication braid for all tables;
\c braid_here
set client_min_messages = warning;
create extension braid;
select braid.create_node('here', :'here');
create table t (id int primary key);
-- each subscription needs as many replication origins as it has appliers
insert into braid.subscription (subscription_name, subscription_owner, dsn, provider_name, provider_id, publications, origin, slot_name,
    create_slot, copy_data, enabled, synchronous_commit, run_as_owner, disable_on_error, apply_mode, phase)
select 'filler ' || n, current_role::regrole, '', 'there', gen_random_uuid(), '{braid}', 'none', 'filler_' || n, true, true, false, 'off',
    false, false, 'parallel', 'slot' from generate_series(1, 40) n;
-- (the hint names another setting before PostgreSQL 18)
\set VERBOSITY terse
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
\set VERBOSITY default
-- and there can be only so many
insert into braid.subscription (subscription_name, subscription_owner, dsn, provider_name, provider_id, publications, origin, slot_name,
    create_slot, copy_data, enabled, synchronous_commit, run_as_owner, disable_on_error, apply_mode, phase)
select 'more ' || n, current_role::regrole, '', 'there', gen_random_uuid(), '{braid}', 'none', 'more_' || n, true, true, false, 'off',
    false, false, 'parallel', 'slot' from generate_series(1, 60) n;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE

\c postgres
set client_min_messages = warning;
drop database braid_here with (force);
drop database braid_there with (force);
