-- The balancer of routing, as far as one node can show: refusals, mode, decisions from storage.
-- t/340_balancer.pl and t/341_balancer_counts.pl have several nodes.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
\set superuser :USER
\set SHOW_CONTEXT never
\set VERBOSITY default
create role braid_regress_clerk;
grant usage on schema braid to braid_regress_clerk;
create table orders (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null default now(),
    primary key (tenant_id, order_id, created_at));
create table plain (id bigint primary key);

-- no group
select braid.set_balancer('orders', 'advise');
\echo :SQLSTATE
select count(*) from braid.tenant_load;
select count(*) from braid.balancer_decisions;

set client_min_messages = warning;
select braid.create_group('shop', node_name => 'here', dsn => :'here') \g /dev/null
select braid.wait_for_group('60 s') \g /dev/null
reset client_min_messages;
-- arguments
select braid.set_balancer('orders', 'advise');
\echo :SQLSTATE
select braid.route_table('orders', 'tenant_id', 'order_id', 'created_at', shards => 16);
select braid.set_balancer(null, 'advise');
\echo :SQLSTATE
select braid.set_balancer('orders', null);
\echo :SQLSTATE
select braid.set_balancer('orders', 'ADVISE');
\echo :SQLSTATE
select braid.set_balancer('plain', 'on');
\echo :SQLSTATE
select braid.set_balancer('orders', 'off');
-- rights
set role braid_regress_clerk;
select braid.set_balancer('orders', 'on');
\echo :SQLSTATE
select braid.group_route_storage('public.orders');
\echo :SQLSTATE
select * from braid.tenant_load;
\echo :SQLSTATE
select * from braid.balancer_decisions;
\echo :SQLSTATE
reset role;
grant execute on function braid.set_balancer, braid.group_route_storage to braid_regress_clerk;
set role braid_regress_clerk;
select braid.set_balancer('orders', 'on');
\echo :SQLSTATE
select braid.group_route_storage('public.orders');
\echo :SQLSTATE
reset role;

-- storage: a tenant with a quarter of all rows, and one that has less than a shard's even part
insert into orders select case when i <= 1000 then 7 when i <= 1050 then 8 else i end, i from generate_series(1, 4000) i;
select split_part(s, E'\n', 1), split_part(split_part(s, E'\n', 2), ' ', 2), split_part(split_part(s, E'\n', 3), ' ', 2)
  from braid.group_route_storage('public.orders') s;
select braid.set_balancer('orders', 'advise');
select relation, mode, basis, tenant, amount, error, total, floor, share, threshold, periods, period, spread_before, spread, reason, effect, decided_by
  from braid.balancer_decisions;
select balancer from braid.routed_tables;
-- the same again is nothing new; advice is no rule
select braid.set_balancer('orders', 'advise');
select count(*) from braid.balancer_decisions;
select count(*) from braid.routing_rules;
-- on: the rule is added, soon
select braid.set_balancer('orders', 'on');
do $$ begin
    for i in 1 .. 600 loop
        exit when exists (select from braid.routing_rules);
        perform pg_sleep(0.1);
    end loop;
end $$;
select relation, spread, tenants from braid.routing_rules;
select mode, tenant, spread_before, spread from braid.balancer_decisions;
select kind, subject, result from braid.group_log where kind in ('balancer', 'routing') and subject ~ 'rule|advice' and result = 'done' order by log_index;
-- a tenant that has its rule gets no other one
select braid.set_balancer('orders', 'off');
select balancer from braid.routed_tables;
select braid.set_balancer('orders', 'on');
select count(*) from braid.balancer_decisions;
-- the routing ends, and its balancer
select braid.unroute_table('orders', rows => 'keep');
select count(*) from braid.group_option where option_name like 'balancer%';
select braid.leave_group() \g /dev/null
do $$ begin
    for i in 1 .. 600 loop
        exit when not exists (select from braid.group_self);
        perform pg_sleep(0.1);
    end loop;
end $$;
select count(*) from braid.balancer_decisions;

drop owned by braid_regress_clerk;
drop role braid_regress_clerk;
\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\set ECHO none
\i :postlude
