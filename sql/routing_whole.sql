-- Work on whole tables leaves routed tables out: each node has other rows of these.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
\set SHOW_CONTEXT never
\set VERBOSITY default
\c braid_there
set client_min_messages = warning;
create table orders (tenant bigint, id bigint, at timestamptz, primary key (tenant, id, at));
insert into orders values (1, 1, '2026-01-01');
create publication listed for table orders, t;
\c braid_here
set client_min_messages = warning;
create table orders (tenant bigint, id bigint, at timestamptz, primary key (tenant, id, at));
select braid.create_node('here', :'here') \g /dev/null
select braid.create_subscription('s', :'there', publications => '{listed}') \g /dev/null
select braid.wait_for_subscription('s', '60 s');
select * from orders;
call braid.compare('s', 'orders') \g /dev/null
create function braid.is_here(relation regclass, tenant bigint, record bigint, created timestamptz) returns boolean language sql immutable as 'select true';
alter table orders add constraint braid_routing check (braid.is_here('orders'::regclass, tenant, id, at)) not valid;
call braid.compare('s', 'orders');
\echo :SQLSTATE
call braid.repair('s', 'orders');
\echo :SQLSTATE
select braid.resync_table('s', 'orders');
\echo :SQLSTATE
select braid.resync_table('s', 'orders', truncate_first => false);
\echo :SQLSTATE
select * from orders;
-- a table that is in the subscription, and one that is not
call braid.compare('s', 't') \g /dev/null
-- one that comes later: its changes come, and nothing is copied
\c braid_there
set client_min_messages = warning;
create table later (tenant bigint, id bigint, at timestamptz, primary key (tenant, id, at));
create table plain (id int primary key);
\c braid_here
set client_min_messages = warning;
create table later (tenant bigint, id bigint, at timestamptz, primary key (tenant, id, at));
create table plain (id int primary key);
\c braid_there
insert into later values (1, 1, '2026-01-01');
insert into plain values (1);
alter publication listed add table later, plain;
\c braid_here
set client_min_messages = warning;
insert into later values (2, 2, '2026-01-01');
alter table later add constraint braid_routing check (braid.is_here('later'::regclass, tenant, id, at)) not valid;
set client_min_messages = notice;
select * from braid.refresh_subscription('s') order by relation::text;
set client_min_messages = warning;
select braid.wait_for_subscription('s', '60 s');
select relation, state from braid.subscription_tables order by relation::text;
select * from plain;
\c braid_there
insert into later values (3, 3, '2026-01-01');
select braid.sync_event() as event \gset
\c braid_here
select braid.wait_for_event('there', :'event', '60 s');
select * from later order by id;
-- all of them are there
select * from braid.refresh_subscription('s', copy_data => false);

-- routed at the provider alone
\c braid_there
create function braid.is_here(relation regclass, tenant bigint, record bigint, created timestamptz) returns boolean language sql immutable as 'select true';
create function braid.is_at(node text, relation regclass, tenant bigint, record bigint, created timestamptz) returns boolean language sql immutable as 'select true';
alter table orders add constraint braid_routing check (braid.is_here('orders'::regclass, tenant, id, at)) not valid;
\c braid_here
alter table orders drop constraint braid_routing;
call braid.compare('s', 'orders');
\echo :SQLSTATE
set client_min_messages = warning;
select braid.drop_subscription('s');
\c postgres
set client_min_messages = warning;
drop database braid_here with (force);
drop database braid_there with (force);
