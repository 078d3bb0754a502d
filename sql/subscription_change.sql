-- Functions for an existing subscription: enable, disable, alter, rename, refresh, resync, skip,
-- drop.
\a
\t
set client_min_messages = warning;
create database braid_here;
create database braid_there;
create database braid_third;
\set server 'host=' :HOST ' port=' :PORT ' user=' :USER ' connect_timeout=10 dbname='
\set here :server 'braid_here'
\set there :server 'braid_there'
\set third :server 'braid_third'
\c braid_third
set client_min_messages = warning;
create extension braid;
select braid.create_node('third', :'third');
\c braid_there
set client_min_messages = warning;
create extension braid;
select braid.create_node('there', :'there');
create table one (id int primary key);
create table two (id int primary key);
create table three (id int primary key);
create publication braid for table one, two;
create publication more for table three;
\c braid_here
set client_min_messages = warning;
create extension braid;
select braid.create_node('here', :'here');
create table one (id int primary key);
create table two (id int primary key);
select braid.create_subscription('s', :'there', enabled => false) is not null;

-- a name that is not there, or none
select braid.enable_subscription('nope');
\echo :SQLSTATE
select braid.disable_subscription('nope');
\echo :SQLSTATE
select braid.alter_subscription('nope', origin => 'any');
\echo :SQLSTATE
select braid.rename_subscription('nope', 'other');
\echo :SQLSTATE
select braid.drop_subscription('nope');
\echo :SQLSTATE
select * from braid.refresh_subscription('nope');
\echo :SQLSTATE
select braid.resync_table('nope', 'one');
\echo :SQLSTATE
select braid.skip_transaction('nope', '0/1');
\echo :SQLSTATE
select braid.enable_subscription(null);
\echo :SQLSTATE
select braid.rename_subscription('s', null);
\echo :SQLSTATE
select braid.resync_table('s', null);
\echo :SQLSTATE
select braid.skip_transaction('s', null);
\echo :SQLSTATE

-- enable clears the error
begin;
select braid.enable_subscription('s');
select name, state from braid.subscription_status;
update braid.subscription set error_sqlstate = '23514', error_message = 'went wrong', error_detail = 'A detail.', error_hint = 'A hint.',
    error_lsn = '0/ABCD', error_at = now();
select name, state, last_error, error_lsn - '0/0', error_hint from braid.subscription_status;
select braid.disable_subscription('s');
select name, state, last_error from braid.subscription_status;
select braid.enable_subscription('s');
select name, state, last_error, error_lsn - '0/0', error_hint from braid.subscription_status;
select error_sqlstate, error_message, error_detail, error_hint, error_lsn, error_at from braid.subscription_detail;
rollback;

-- skip: only the transaction that stopped it
select braid.skip_transaction('s', '0/ABCD');
\echo :SQLSTATE
begin;
update braid.subscription set error_sqlstate = '23514', error_message = 'went wrong', error_lsn = '0/ABCD', enabled = false, disable_on_error = true;
savepoint before_skip;
select braid.skip_transaction('s', '0/ABCE');
\echo :SQLSTATE
rollback to before_skip;
select braid.skip_transaction('s', '0/ABCD');
select skip_lsn - '0/0', enabled, error_sqlstate, error_message, error_lsn from braid.subscription_detail;
rollback;

-- alter: what is not named stays
create temp view options as
    select publications, slot_name, origin, synchronous_commit, run_as_owner, disable_on_error, apply_mode, commit_order from braid.subscription_detail;
begin;
select braid.alter_subscription('s');
select * from options;
select braid.alter_subscription('s', origin => 'any', synchronous_commit => 'on', run_as_owner => true, disable_on_error => true, apply_mode => 'serial', commit_order => 'relaxed');
select * from options;
select braid.alter_subscription('s', run_as_owner => false);
select * from options;
select braid.alter_subscription('s', consolidate => true);
select apply_mode, consolidate from braid.subscription_detail;
rollback;
select braid.alter_subscription('s', origin => 'some');
\echo :SQLSTATE
select braid.alter_subscription('s', synchronous_commit => 'some');
\echo :SQLSTATE
select braid.alter_subscription('s', commit_order => 'some');
\echo :SQLSTATE
select braid.alter_subscription('s', apply_mode => 'some');
\echo :SQLSTATE
select braid.alter_subscription('s', publications => '{}');
\echo :SQLSTATE
-- the connection string: to the same provider only
select braid.alter_subscription('s', dsn => 'password=secret oops');
\echo :SQLSTATE
select braid.alter_subscription('s', dsn => :'third');
\echo :SQLSTATE
\set VERBOSITY terse
select braid.alter_subscription('s', dsn => 'host=/nonexistent password=secret');
\echo :SQLSTATE
\set VERBOSITY default
begin;
select braid.alter_subscription('s', dsn => :'there' || ' application_name=x');
select s.dsn like '%application_name=x', n.dsn like '%application_name=x'
  from braid.connection s, braid.connection n
 where s.connection_id = (select connection_id from braid.subscription where subscription_name = 's') and n.connection_id = (select connection_id from braid.node where node_name = 'there');
rollback;
-- the slot: one that is there, while disabled
select braid.alter_subscription('s', slot_name => 'not-valid');
\echo :SQLSTATE
select braid.alter_subscription('s', slot_name => 'braid_regress_nope');
\echo :SQLSTATE
begin;
select braid.enable_subscription('s');
select braid.alter_subscription('s', slot_name => 'braid_regress_nope');
\echo :SQLSTATE
rollback;
-- publications: those that exist; the tables follow
select braid.alter_subscription('s', publications => '{nope}');
\echo :SQLSTATE
select braid.alter_subscription('s', publications => '{braid,more}');
\echo :SQLSTATE
create table three (id int primary key);
begin;
select braid.alter_subscription('s', publications => '{braid,more}');
select subscription, relation, state from braid.subscription_tables;
select publications from options;
select braid.alter_subscription('s', publications => '{more}');
select subscription, relation, state from braid.subscription_tables;
rollback;

-- refresh
select * from braid.refresh_subscription('s');
\c braid_there
alter publication braid add table three;
alter publication braid drop table one;
\c braid_here
set client_min_messages = warning;
begin;
select * from braid.refresh_subscription('s');
select subscription, relation, state, ready_at is not null as ready_at from braid.subscription_tables;
rollback;
insert into three values (1);
select * from braid.refresh_subscription('s');
\echo :SQLSTATE
begin;
select * from braid.refresh_subscription('s', copy_data => false);
select subscription, relation, state, ready_at is not null as ready_at from braid.subscription_tables;
rollback;
drop table three;
select * from braid.refresh_subscription('s');
\echo :SQLSTATE
select * from braid.refresh_subscription('s', copy_data => null);
\echo :SQLSTATE

-- resync
set client_min_messages = notice;
select braid.resync_table('s', 'pg_class');
\echo :SQLSTATE
begin;
update braid.subscription_table set state = 'ready', rows_copied = 3, bytes_copied = 30, ready_at = now(), copy_error = 'x';
select braid.resync_table('s', 'one');
select braid.resync_table('s', 'two', truncate_first => false);
select relation, state, truncate_first, rows_copied, bytes_copied, ready_at, copy_error from braid.subscription_table order by relation::text;
rollback;
begin;
update braid.subscription_table set state = 'copying';
select braid.resync_table('s', 'one');
\echo :SQLSTATE
rollback;
insert into one values (1);
select braid.resync_table('s', 'one', truncate_first => false);
\echo :SQLSTATE
select 'one'::regclass::oid as one \gset
drop table one;
\set VERBOSITY sqlstate
select braid.resync_table('s', :one::oid::regclass);
\set VERBOSITY default
-- a table that is gone here leaves the subscription when it is not published any more
\c braid_there
alter publication braid drop table three;
\c braid_here
set client_min_messages = warning;
select relation::oid = :one as was_one, action from braid.refresh_subscription('s');
select subscription, relation, state from braid.subscription_tables;

-- how fast it is read: null and 0 are no limit
select braid.set_rate_limit('nope', 1);
\echo :SQLSTATE
select braid.set_rate_limit(null, 1);
\echo :SQLSTATE
select braid.set_rate_limit('s', rows_per_second => -1);
\echo :SQLSTATE
select braid.set_rate_limit('s', bytes_per_second => -1);
\echo :SQLSTATE
begin;
select braid.set_rate_limit('s', 1000);
select row_limit, byte_limit, throttled from braid.subscription_detail;
rollback;
select braid.set_rate_limit('s', 1000, 1048576);
select row_limit, byte_limit from braid.subscription_detail;
select braid.set_rate_limit('s', rows_per_second => 0, bytes_per_second => 9223372036854775807);
select row_limit, byte_limit from braid.subscription_detail;
select braid.set_rate_limit('s');
select row_limit, byte_limit from braid.subscription_detail;

-- rename: the slot keeps its name
select braid.create_subscription('other', :'there', enabled => false, copy_data => false) is not null;
select braid.rename_subscription('s', 'other');
\echo :SQLSTATE
select braid.rename_subscription('s', 'x/y');
\echo :SQLSTATE
select braid.rename_subscription('s', 'renamed');
select name, slot_name from braid.subscription_detail;
select braid.rename_subscription('renamed', 's');

-- drop: a slot that no worker has tried to create is nobody's to drop
begin;
select braid.drop_subscription('other');
select count(*) from braid.pending_cleanup;
rollback;
-- another is left to be dropped after commit
update braid.subscription set slot_attempted = true;
begin;
select braid.drop_subscription('other');
select slot_name, provider, attempts, last_error from braid.pending_cleanup;
select name, subscriptions from braid.nodes;
-- its name can be used again at once, its slot's name later
select braid.create_subscription('other', :'there', enabled => false, copy_data => false) is not null;
select name, slot_name from braid.subscription_detail;
rollback;
set client_min_messages = notice;
begin;
select braid.drop_subscription('other', drop_slot => false);
select count(*) from braid.pending_cleanup;
rollback;
select braid.drop_subscription('other', drop_slot => null);
\echo :SQLSTATE
-- a provider that cannot be reached does not hold it up
begin;
update braid.connection set dsn = 'host=/nonexistent port=1 password=secret' where connection_id = (select connection_id from braid.subscription where subscription_name = 's');
\set VERBOSITY terse
select braid.drop_subscription('s');
\set VERBOSITY default
select slot_name, provider from braid.pending_cleanup;
select name from braid.subscription_status;
rollback;
select name from braid.subscription_status;

\c postgres
set client_min_messages = warning;
drop database braid_here with (force);
drop database braid_there with (force);
drop database braid_third with (force);
