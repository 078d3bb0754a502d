-- Parked transactions: the option, the functions' errors, and the contents of the views, with rows
-- inserted by hand.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
-- no node yet
select braid.retry_parked('s');
\echo :SQLSTATE
select braid.skip_parked('s', 1);
\echo :SQLSTATE
select braid.create_node('here', :'here') \g /dev/null
-- the option
select braid.create_subscription('s', :'there', enabled => false, on_error => 'ignore');
\echo :SQLSTATE
select braid.create_subscription('s', :'there', enabled => false, on_error => null);
\echo :SQLSTATE
select braid.create_subscription('s', :'there', enabled => false, on_error => 'park', disable_on_error => true);
\echo :SQLSTATE
select braid.create_subscription('s', :'there', enabled => false) is not null;
select on_error from braid.subscription_detail;
select braid.alter_subscription('s', on_error => 'park');
select on_error from braid.subscription_detail;
select braid.alter_subscription('s', disable_on_error => true);
\echo :SQLSTATE
select braid.alter_subscription('s', on_error => 'stop', disable_on_error => true);
select braid.alter_subscription('s', on_error => 'park');
\echo :SQLSTATE
select braid.alter_subscription('s', on_error => 'park', disable_on_error => false);
select on_error, disable_on_error from braid.subscription_detail;
select braid.alter_subscription('s', on_error => 'stop_always');
select on_error from braid.subscription_detail;
select braid.alter_subscription('s', on_error => 'park');
-- nothing is there
select braid.retry_parked(null);
\echo :SQLSTATE
select braid.retry_parked('nobody');
\echo :SQLSTATE
select braid.retry_parked('s', 1);
\echo :SQLSTATE
select braid.skip_parked('s', null);
\echo :SQLSTATE
select braid.skip_parked('nobody', 1);
\echo :SQLSTATE
select braid.skip_parked('s', 1);
\echo :SQLSTATE
begin isolation level repeatable read;
select braid.retry_parked('s');
\echo :SQLSTATE
rollback;
select * from braid.parked_records(1);
select * from braid.parked_records(null);
-- something is
set timezone = 'UTC';
set datestyle = 'ISO, YMD';
insert into braid.parked_transaction (subscription_id, subscription_name, state, xid, commit_lsn, end_lsn, origin_name, committed_at, changes, bytes,
    barred_tables, other_tables, keys, waits_for, error_sqlstate, error_message)
select subscription_id, subscription_name, state, '7', lsn::pg_lsn, lsn::pg_lsn + 8, 'there', '2030-01-01', 1, 100, '{public.u}', '{public.t}', '{1,-2}', waits_for, code, said
  from braid.subscription, (values ('failed', '0/80000010', null::bigint, '23514', 'no'), ('waiting', '0/80000020', 1, null, null)) v (state, lsn, waits_for, code, said);
select subscription, parked_id, state, waits_for, error, error_sqlstate, changes, bytes, relations, origin, committed_at, xid, commit_lsn, end_lsn, skipped_at is null
  from braid.parked_transactions;
select name, state, parked from braid.subscription_status;
-- records that can't be read are an error
insert into braid.parked_record values (1, 0, true, '\x00');
select * from braid.parked_changes;
\echo :SQLSTATE
delete from braid.parked_record;
select braid.drop_subscription('s');
\echo :SQLSTATE
-- a subscription that does not run takes a request for when it does
set client_min_messages = notice;
select braid.retry_parked('s', 3);
\echo :SQLSTATE
select braid.retry_parked('s', 1);
select parked_id, state from braid.parked_transactions;
set client_min_messages = warning;
-- given up, they stay, also without the subscription
select braid.rename_subscription('s', 'renamed');
select braid.skip_parked('renamed', 1);
select braid.skip_parked('renamed', 1);
\echo :SQLSTATE
select braid.skip_parked('renamed', 2);
select name, parked from braid.subscription_status;
select subscription, parked_id, state, skipped_at is not null from braid.parked_transactions;
select braid.drop_subscription('renamed');
select subscription, parked_id, state from braid.parked_transactions;
-- a publication for all tables does not stand in their way
create publication everything for all tables;
update braid.parked_transaction set attempts = 2;
delete from braid.parked_transaction;
delete from braid.parked_record;
-- not for everybody
create role braid_regress_parked;
set role braid_regress_parked;
select braid.retry_parked('s');
\echo :SQLSTATE
select braid.skip_parked('s', 1);
\echo :SQLSTATE
select * from braid.parked_transactions;
\echo :SQLSTATE
reset role;
drop role braid_regress_parked;
\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\set ECHO none
\i :postlude
