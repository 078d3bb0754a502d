-- create_subscription: every reason to refuse, and that a refused call leaves nothing. Two
-- databases of one server play the nodes.
\a
\t
set client_min_messages = warning;
create database braid_here;
create database braid_there;
create database braid_empty;
\set server 'host=' :HOST ' port=' :PORT ' user=' :USER ' connect_timeout=10 dbname='
\set here :server 'braid_here'
\set there :server 'braid_there'
\c braid_there
set client_min_messages = warning;
create extension braid;
\c braid_empty
\set empty :server 'braid_empty'
\c braid_here
set client_min_messages = warning;
create extension braid;
select braid.create_node('here', :'here');

-- arguments
select braid.create_subscription(null, :'there');
\echo :SQLSTATE
select braid.create_subscription('s', null);
\echo :SQLSTATE
select braid.create_subscription('', :'there');
\echo :SQLSTATE
select braid.create_subscription('a/b', :'there');
\echo :SQLSTATE
select braid.create_subscription('s', 'password=secret oops');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', publications => '{}');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', publications => '{a,null}');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', publications => '{a,b,a}');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', slot_name => 'Capital');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', origin => 'some');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', synchronous_commit => 'maybe');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', apply_mode => 'fast');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', commit_order => 'none');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', streaming => 'sometimes');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', split_transactions_above => -1);
\echo :SQLSTATE
select braid.create_subscription('s', :'there', two_phase => true, commit_order => 'relaxed');
select braid.create_subscription('s', :'there', copy_data => null);
\echo :SQLSTATE

-- the provider: not there, no extension, no node, this node, of the same name, a copy
\set VERBOSITY terse
select braid.create_subscription('s', 'host=/nonexistent port=1 password=secret');
\echo :SQLSTATE
\set VERBOSITY default
select braid.create_subscription('s', :'empty');
\echo :SQLSTATE
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
select braid.create_subscription('s', :'here');
\echo :SQLSTATE
\c braid_there
select braid.create_node('here', :'there');
\c braid_here
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
\c braid_there
select braid.drop_node('here');
select braid.create_node('there', :'there');
update braid.node set system_identifier = '1';
\c braid_here
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
\c braid_there
select braid.drop_node('there');
select braid.create_node('there', :'there');
-- what is published, and by whom it may be read
create role braid_regress_peer login;
create schema app;
create table app.one (id int primary key, v text);
create table app.two (id int primary key, v text, sum int generated always as (id + 1) stored);
create table app."Quoted ""name""" (id int primary key);
create publication braid for table app.one, app.two, app."Quoted ""name""";
create publication nothing;
\set peer :there ' user=braid_regress_peer'
\c braid_here
set client_min_messages = warning;
select braid.create_subscription('s', :'peer');
\echo :SQLSTATE
grant braid_monitor to braid_regress_peer;
select braid.create_subscription('s', :'peer');
\echo :SQLSTATE
alter role braid_regress_peer replication;
select braid.create_subscription('s', :'peer');
\echo :SQLSTATE
select braid.create_subscription('s', :'peer', copy_data => false);
\echo :SQLSTATE

-- publications
select braid.create_subscription('s', :'there', '{nope}');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', '{nope,braid,neither}');
\echo :SQLSTATE

-- tables: not here, not a table, a column less, a generated one, rows
create schema app;
create table app.one (id int primary key, v text);
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
create table app."Quoted ""name""" (id int primary key);
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
create view app.two as select 1 as id, 'v'::text as v;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
drop view app.two;
create table app.two (id int primary key);
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
alter table app.two add v text generated always as ('v') stored;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
drop table app.two;
create table app.two (id int, v text, local_only int default 7) partition by range (id);
create table app.two_part partition of app.two default;
insert into app.two values (1);
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
-- an identity that is not sent
\c braid_there
create table app.made (id int unique, twice int generated always as (id * 2) stored primary key);
create publication made for table app.made;
create publication made_inserts for table app.made with (publish = 'insert');
\c braid_here
create table app.made (id int unique, twice int generated always as (id * 2) stored primary key);
select braid.create_subscription('s', :'there', '{made}');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', '{made_inserts}', enabled => false);
select braid.drop_subscription('s');
select braid.drop_node('there');
drop table app.made;
\c braid_there
drop table app.made;
drop publication made, made_inserts;
\c braid_here
set client_min_messages = warning;
-- row security does not hide rows from the check
delete from app.two;
insert into app.one values (1);
alter table app.one enable row level security;
alter table app.one force row level security;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
begin;
select braid.create_subscription('s', :'there', copy_data => false, enabled => false) is not null;
select subscription, relation, state, rows_copied, ready_at is not null as ready_at from braid.subscription_tables;
rollback;
delete from app.one;

-- slots
select slot_name from pg_create_physical_replication_slot('braid_regress_taken');
select braid.create_subscription('s', :'there', slot_name => 'braid_regress_taken');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', slot_name => 'braid_regress_taken', create_slot => false);
\echo :SQLSTATE
select braid.create_subscription('s', :'there', slot_name => 'braid_regress_free', create_slot => false);
\echo :SQLSTATE
select pg_drop_replication_slot('braid_regress_taken');
-- none left
select count(pg_create_physical_replication_slot('braid_regress_' || n)) > 0
  from generate_series(1, current_setting('max_replication_slots')::int - (select count(*)::int from pg_replication_slots)) n;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
select count(pg_drop_replication_slot(slot_name)) > 0 from pg_replication_slots where slot_name ~ '^braid_regress_[0-9]+$';

-- a role that is no superuser brings a password, and the provider must ask for it
create role braid_regress_admin;
grant braid_admin to braid_regress_admin;
set role braid_regress_admin;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
\set secret :there ' password=secret'
select braid.create_subscription('s', :'secret');
\echo :SQLSTATE
reset role;

-- no trace of all these
select (select count(*) from braid.subscription) + (select count(*) from braid.subscription_table) + (select count(*) from braid.slot_cleanup);
select name from braid.nodes;

-- nothing stays of a transaction that is rolled back, here and there
begin;
select braid.create_subscription('s', :'there', enabled => false) is not null;
select name, provider, state, tables from braid.subscription_status;
rollback;
select (select count(*) from braid.subscription) + (select count(*) from braid.subscription_table) + (select count(*) from braid.slot_cleanup);
select name from braid.nodes;
select count(*) from pg_replication_slots where slot_name like 'braid_here%';

-- all options, and what is stored
set client_min_messages = notice;
select braid.create_subscription('nothing here', :'there', '{nothing}', enabled => false) is not null;
set client_min_messages = warning;
begin;
select braid.create_subscription('All Options', :'there', publications => '{nothing,braid}', copy_data => true, enabled => false,
    create_slot => true, slot_name => 'regress_own_name', origin => 'any', synchronous_commit => 'local', run_as_owner => true,
    disable_on_error => true, apply_mode => 'serial', commit_order => 'relaxed', streaming => 'off', two_phase => false,
    split_transactions_above => 1000) is not null;
\x
select name, owner = current_role::regrole as owned, provider, publications, slot_name, enabled, phase, start_lsn, origin, apply_mode, commit_order,
       split_transactions_above, synchronous_commit, run_as_owner, disable_on_error, copy_data, activity, error_sqlstate
  from braid.subscription_detail order by name;
\x
select subscription, relation, state from braid.subscription_tables;
select name, is_local, subscriptions from braid.nodes;
-- names are unique, slots as well
select braid.create_subscription('nothing here', :'there', '{nothing}');
\echo :SQLSTATE
rollback;
select braid.create_subscription('other', :'there', '{nothing}', slot_name => 'braid_here_nothing_here_2963225cf7');
\echo :SQLSTATE
-- folded names that would meet stay apart
select braid.create_subscription('Nothing_Here', :'there', '{nothing}', enabled => false) is not null;
select braid.create_subscription(repeat('long', 15), :'there', '{nothing}', enabled => false) is not null;
select name, slot_name, length(slot_name) from braid.subscription_detail order by 1;

-- a node that was dropped and created anew is another node
\c braid_there
select braid.drop_node('there');
select braid.create_node('there', :'there');
\c braid_here
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
select count(*) from braid.refresh_subscription('nothing here');
\echo :SQLSTATE

\c postgres
set client_min_messages = warning;
drop database braid_here with (force);
drop database braid_there with (force);
drop database braid_empty with (force);
drop role braid_regress_peer;
drop role braid_regress_admin;
