-- sync_event, wait_for_event and wait_for_subscription, as far as they go without a provider that
-- sends anything.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
select braid.create_node('here', :'here');

-- a position behind what is committed and not before what is to come, and flushed
insert into t values (1);
select pg_current_wal_insert_lsn() as before \gset
select braid.sync_event() as event \gset
select :'event'::pg_lsn > :'before', :'event'::pg_lsn <= pg_current_wal_flush_lsn();
-- also while commits do not wait for a flush
set synchronous_commit = off;
insert into t values (2);
select pg_current_wal_insert_lsn() as before \gset
select braid.sync_event() as event \gset
select :'event'::pg_lsn > :'before', :'event'::pg_lsn <= pg_current_wal_flush_lsn();
reset synchronous_commit;
-- it takes no transaction number, so that it holds nobody up
begin;
select braid.sync_event() is not null;
select pg_current_xact_id_if_assigned();
rollback;

-- waiting for what is not there
select braid.wait_for_event('there', '0/1');
\echo :SQLSTATE
select braid.wait_for_event(null, '0/1');
\echo :SQLSTATE
select braid.wait_for_event('there', null);
\echo :SQLSTATE
select braid.wait_for_subscription('nope');
\echo :SQLSTATE
select braid.wait_for_subscription(null);
\echo :SQLSTATE

-- a subscription that does not run never gets there: an error at once
select braid.create_subscription('s', :'there', enabled => false, copy_data => false) is not null;
select braid.wait_for_subscription('s');
\echo :SQLSTATE
select braid.wait_for_event('there', '0/1');
\echo :SQLSTATE
-- the same when an error has stopped it
update braid.subscription set error_sqlstate = '23514', error_message = 'new row violates check constraint';
select braid.wait_for_subscription('s');
\echo :SQLSTATE
select braid.wait_for_event('there', '0/1');
\echo :SQLSTATE
update braid.subscription set error_sqlstate = null, error_message = null;

-- not in the transaction that changed it, nor in one that will never see a change
begin;
select braid.enable_subscription('s');
select braid.wait_for_subscription('s');
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
select braid.wait_for_subscription('s');
\echo :SQLSTATE
rollback;
begin isolation level serializable;
select braid.wait_for_event('there', '0/1');
\echo :SQLSTATE
rollback;

-- a time that is over, and one that is none
begin;
update braid.subscription set enabled = true;
select braid.wait_for_event('there', 'FFFFFFFF/0', timeout => '0.1 s');
\echo :SQLSTATE
rollback;
select braid.wait_for_event('there', '0/1', timeout => '-1 s');
\echo :SQLSTATE
-- it can be cancelled
begin;
update braid.subscription set enabled = true;
set local statement_timeout = '100ms';
select braid.wait_for_event('there', 'FFFFFFFF/0');
\echo :SQLSTATE
rollback;

\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\set ECHO none
\i :postlude
