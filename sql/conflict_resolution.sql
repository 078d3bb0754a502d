-- braid.set_conflict_resolution: what it takes, what it refuses, what the view shows.
set client_min_messages = warning;
create extension braid;
create table account (id int primary key, balance int);
create table split (id int primary key) partition by range (id);
create table split_low partition of split for values from (0) to (10);
create view shown as select 1 as one;

-- A table and a kind, a table, a kind, all; the names that DTS has are understood.
select braid.set_conflict_resolution('account', 'update_origin_differs', 'first_update_wins');
select braid.set_conflict_resolution('account', null, 'keep_local');
select braid.set_conflict_resolution(null, 'delete_missing', 'ignore');
select braid.set_conflict_resolution(null, null, 'overwrite');
select braid.set_conflict_resolution('split', null, 'interrupt');
select * from braid.conflict_resolutions;

-- The last one counts.
select braid.set_conflict_resolution('account', null, 'last_update_wins');
-- Null removes a rule; one that is not there too.
select braid.set_conflict_resolution(null, null, null);
select braid.set_conflict_resolution('split_low', 'insert_exists', null);
select * from braid.conflict_resolutions;

-- A rule goes with its table, and with the transaction that set it.
begin;
select braid.set_conflict_resolution('split', 'insert_exists', 'error');
rollback;
drop table split;
select * from braid.conflict_resolutions;

select braid.set_conflict_resolution('account', 'insert_exist', 'error');
select braid.set_conflict_resolution('account', 'insert_exists', 'newest');
select braid.set_conflict_resolution('shown', null, 'error');
select braid.set_conflict_resolution('braid.node', null, 'error');
select braid.set_conflict_resolution(4000000000::oid::regclass, null, 'error');

-- Who may.
create role clerk;
set role clerk;
select braid.set_conflict_resolution(null, null, 'error');
reset role;
drop role clerk;
drop table account;
drop view shown;
drop extension braid;
