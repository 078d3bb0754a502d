-- The extension is not dropped while there are subscriptions, and nothing of it stays once it is
-- dropped.
\a
\t
set client_min_messages = warning;
create database braid_here;
create database braid_there;
\set server 'host=' :HOST ' port=' :PORT ' user=' :USER ' connect_timeout=10 dbname='
\set here :server 'braid_here'
\set there :server 'braid_there'
create role braid_regress_owner superuser;
\c braid_there
set client_min_messages = warning;
create extension braid;
select braid.create_node('there', :'there');
create publication braid;
\c braid_here
set client_min_messages = warning;
set role braid_regress_owner;
create extension braid;
reset role;
select braid.create_node('here', :'here');
select braid.create_subscription('s', :'there', enabled => false) is not null;
drop extension braid;
\echo :SQLSTATE
drop extension if exists braid cascade;
\echo :SQLSTATE
drop owned by braid_regress_owner;
\echo :SQLSTATE
-- what has nothing to do with it is dropped as ever
create schema other;
drop schema other;
drop extension if exists nope;
create role braid_regress_nobody;
drop owned by braid_regress_nobody;
-- its parts are not dropped one by one
drop table braid.subscription;
\echo :SQLSTATE
drop schema braid cascade;
\echo :SQLSTATE
drop event trigger braid_guard_drop;
\echo :SQLSTATE
-- the guard is no function to call
select braid.guard_drop();
\echo :SQLSTATE
-- a copy of a node may go: its slots belong to the original
begin;
update braid.node set database_oid = 1 where is_local;
drop extension braid;
rollback;
-- slots that are still to be dropped are named
begin;
update braid.subscription set slot_attempted = true;
select braid.drop_subscription('s');
drop extension braid;
select count(*) from pg_namespace where nspname = 'braid';
select count(*) from pg_event_trigger where evtname = 'braid_guard_drop';
rollback;
select braid.drop_subscription('s', drop_slot => false);
drop extension braid;
-- roles are for all databases and stay
select rolname, rolcanlogin from pg_roles where rolname in ('braid_admin', 'braid_monitor') order by 1;

\c postgres
set client_min_messages = warning;
drop database braid_here with (force);
drop database braid_there with (force);
drop role braid_regress_owner, braid_regress_nobody;
