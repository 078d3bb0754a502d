-- braid.check_routable: the facts about a table that can be routed, and every reason why one can't.
\a
\t
create database braid_routable template template0 encoding 'UTF8' lc_collate 'C' lc_ctype 'C';
\c braid_routable
set client_min_messages = warning;
create extension braid;
create publication braid for all tables;
\set SHOW_CONTEXT never
\set VERBOSITY default
create schema shop;
create collation shop.folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
create function shop.tenant_of(id bigint) returns bigint language sql immutable as 'select id >> 20';
create function shop.born(id bigint) returns timestamptz language plpgsql immutable as $$ begin return timestamptz '2025-01-01 00:00:00+00' + id * interval '1 ms'; end $$;
create function shop.stable_of(id bigint) returns bigint language plpgsql stable as $$ begin return id; end $$;
create function shop.hidden(id bigint, at timestamptz default now()) returns bigint language plpgsql immutable as $$ begin return id; end $$;

create table shop.orders (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null, total numeric, name text not null default '',
    primary key (tenant_id, order_id, created_at), unique (created_at, order_id, tenant_id, name));
-- facts: plain columns, and expressions over an id
select braid.check_routable('shop.orders', 'tenant_id', 'order_id', 'created_at');
create table shop.event (id bigint primary key, "Mixed ""name""" varchar(20) collate "C" not null);
select braid.check_routable('shop.event', 'shop.tenant_of(id)', 'id', 'shop.born(id)');
-- in another form, the same
select braid.check_routable('shop.event', ' shop.tenant_of ( event.id ) -- the tenant', '(id)', 'shop.born(id) /* born */')
    except select braid.check_routable('shop.event', 'shop.tenant_of(id)', 'id', 'shop.born(id)');
create table shop.named (tenant text not null, id uuid not null, at timestamp not null, unique (id, tenant, at), unique (tenant, at, id));
alter table shop.named replica identity using index named_id_tenant_at_key;
select braid.check_routable('shop.named', 'lower(tenant)', 'id', 'at at time zone ''UTC''');
alter table shop.named replica identity full;
select count(*) from braid.check_routable('shop.named', 'lower(tenant)', 'id', 'at at time zone ''UTC''');

-- kinds of tables
select braid.check_routable(null, 'a', 'b', 'c');
\echo :SQLSTATE
select braid.check_routable(0, 'a', 'b', 'c');
\echo :SQLSTATE
create temp table gone (like shop.orders including all);
select braid.check_routable('gone', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
create unlogged table shop.unlogged (like shop.orders including all);
select braid.check_routable('shop.unlogged', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
create table shop.parted (like shop.orders including all) partition by list (tenant_id);
create table shop.part partition of shop.parted for values in (1);
select braid.check_routable('shop.parted', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.part', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
create table shop.parent (like shop.orders including all);
create table shop.child () inherits (shop.parent);
select braid.check_routable('shop.parent', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.child', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
create foreign data wrapper nothing;
create server nowhere foreign data wrapper nothing;
create foreign table shop.far (tenant_id bigint) server nowhere;
select braid.check_routable('shop.far', 'tenant_id', 'tenant_id', 'now()');
\echo :SQLSTATE
create view shop.view as select * from shop.orders;
select braid.check_routable('shop.view', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('pg_class', 'oid', 'oid', 'now()');
\echo :SQLSTATE
select braid.check_routable('information_schema.sql_features', 'feature_id', 'feature_id', 'now()');
\echo :SQLSTATE
select braid.check_routable('braid.node', 'node_name', 'node_id', 'now()');
\echo :SQLSTATE

-- expressions
select braid.check_routable('shop.orders', null, 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', '', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id +', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id, order_id', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id as t', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id from shop.orders', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id where true', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', '1 union select 2', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', '1; drop table shop.orders', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'event.id', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_of(order_id)', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', '(select max(id) from shop.event)', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'max(tenant_id)', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'row_number() over ()', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'generate_series(1, tenant_id)', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id / 0', 'order_id / (1 / 0)', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id + (random() * 0)::bigint', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id', 'shop.stable_of(order_id)', 'created_at');
\echo :SQLSTATE
-- what a call does not show: an argument with a default that is not immutable
select braid.check_routable('shop.orders', 'tenant_id', 'shop.hidden(order_id)', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id', 'order_id', 'now()');
\echo :SQLSTATE
select braid.check_routable('shop.orders', '42', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id', 'orders::text', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id', 'tableoid::bigint', 'created_at');
\echo :SQLSTATE

-- types and collations
select braid.check_routable('shop.orders', 'tenant_id::float8', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id', 'array[order_id]', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'name collate shop.folded', 'order_id', 'created_at');
\echo :SQLSTATE
create table shop.two_collations (a text collate "C" not null, b text collate "POSIX" not null, at timestamptz not null, primary key (a, b, at));
select braid.check_routable('shop.two_collations', 'a || b', 'a', 'at');
\echo :SQLSTATE
create table shop.folding (name text collate shop.folded not null, id bigint not null, at timestamptz not null, primary key (name, id, at));
select braid.check_routable('shop.folding', 'name', 'id', 'at');
\echo :SQLSTATE
-- of a column that an expression uses
select braid.check_routable('shop.folding', 'md5(name collate "C")', 'id', 'at');
\echo :SQLSTATE
select braid.check_routable('shop.orders', 'tenant_id', 'order_id', 'order_id');
\echo :SQLSTATE
select braid.check_routable('shop.named', 'tenant', 'id', 'at');
\echo :SQLSTATE

-- null
create table shop.nullable (tenant_id bigint not null, order_id bigint, created_at timestamptz, unique (tenant_id, order_id, created_at));
select braid.check_routable('shop.nullable', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter table shop.nullable alter created_at set not null;
select braid.check_routable('shop.nullable', 'tenant_id', 'coalesce(order_id, 0)', 'created_at');
\echo :SQLSTATE

-- keys
create table shop.keys (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null, code text not null, price numeric not null, slot int4range not null);
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter table shop.keys add primary key (tenant_id, order_id);
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
select braid.check_routable('shop.keys', 'tenant_id', 'code', 'created_at');
\echo :SQLSTATE
alter table shop.keys drop constraint keys_pkey, add primary key (tenant_id, order_id) include (created_at);
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter table shop.keys drop constraint keys_pkey, add primary key (tenant_id, order_id, created_at);
select count(*) from braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
create unique index by_code on shop.keys (code);
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
drop index shop.by_code;
create unique index by_part on shop.keys (tenant_id, order_id, created_at) where code <> '';
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
drop index shop.by_part;
create unique index by_expression on shop.keys (tenant_id, order_id, created_at, lower(code));
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
drop index shop.by_expression;
alter table shop.keys add constraint apart exclude using gist (slot with &&);
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter table shop.keys drop constraint apart;
-- a key under another collation, and one over numbers that an expression takes apart
create table shop.equal (code text not null, price numeric not null, at timestamptz not null);
create unique index by_folded on shop.equal (code collate shop.folded, price, at);
select braid.check_routable('shop.equal', 'code', 'price', 'at');
\echo :SQLSTATE
drop index shop.by_folded;
alter table shop.equal add primary key (code, price, at);
select count(*) from braid.check_routable('shop.equal', 'code', 'price', 'at');
select braid.check_routable('shop.equal', 'code', 'price::text', 'at');
\echo :SQLSTATE
create table shop.padded (code char(9) not null, id int not null, at timestamptz not null, primary key (code, id, at));
select count(*) from braid.check_routable('shop.padded', 'code', 'id', 'at');
select braid.check_routable('shop.padded', 'md5(code)', 'id', 'at');
\echo :SQLSTATE
-- what finds rows
create table shop.late (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null, unique (tenant_id, order_id, created_at) deferrable);
select braid.check_routable('shop.late', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
create table shop.unnamed (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null, unique (tenant_id, order_id, created_at));
select braid.check_routable('shop.unnamed', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter table shop.unnamed replica identity full;
select count(*) from braid.check_routable('shop.unnamed', 'tenant_id', 'order_id', 'created_at');
alter table shop.orders replica identity nothing;
select braid.check_routable('shop.orders', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter table shop.orders replica identity default;

-- foreign keys: to others is fine, to this one and to routed ones is not
create table shop.tenant (id bigint primary key);
alter table shop.orders add foreign key (tenant_id) references shop.tenant;
select count(*) from braid.check_routable('shop.orders', 'tenant_id', 'order_id', 'created_at');
create table shop.line (tenant_id bigint not null, order_id bigint not null, created_at timestamptz not null, number int not null,
    primary key (tenant_id, order_id, created_at, number), foreign key (tenant_id, order_id, created_at) references shop.orders);
select braid.check_routable('shop.orders', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
create function braid.is_here(relation regclass, tenant bigint, record bigint, created timestamptz) returns boolean language sql immutable as 'select true';
select braid.is_routed('shop.orders'::regclass);
alter table shop.orders add constraint braid_routing check (braid.is_here('shop.orders'::regclass, tenant_id, order_id, created_at)) not valid;
select braid.is_routed('shop.orders'::regclass), braid.is_routed('shop.line'::regclass), braid.is_routed(0);
select braid.check_routable('shop.line', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter table shop.line drop constraint line_tenant_id_order_id_created_at_fkey;
select count(*) from braid.check_routable('shop.line', 'tenant_id', 'order_id', 'created_at');
alter table shop.line add column parent int, add foreign key (tenant_id, order_id, created_at, parent) references shop.line;
select braid.check_routable('shop.line', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
-- a constraint of the name that is something else, and the guard of another table
create table shop.alike (like shop.orders including all);
create table shop.other (id int constraint braid_routing check (id > 0));
select braid.is_routed('shop.alike'::regclass), braid.is_routed('shop.other'::regclass);

-- publications
drop publication braid;
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
create publication braid for table shop.tenant;
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter publication braid add table shop.keys;
alter publication braid set (publish = 'insert, update');
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter publication braid set (publish = 'insert, update, delete, truncate');
select count(*) from braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
alter publication braid set table shop.keys where (order_id > 0);
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter publication braid set table shop.keys (tenant_id, order_id, created_at);
select braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
alter publication braid set table shop.keys;

-- whose code runs, and as whom: the functions that the planner folds, with the rights of the
-- table's owner, confined
create role braid_regress_owner;
create role braid_regress_other;
grant usage on schema shop to braid_regress_owner, braid_regress_other;
create function shop.folds() returns bigint language plpgsql immutable as $$
begin
    raise notice 'as %', current_user;
    perform set_config('role', 'none', false);
    return 1;
exception when others then
    raise notice '%', sqlerrm;
    return 1;
end $$;
alter table shop.keys owner to braid_regress_owner;
set client_min_messages = notice;
select count(*) from braid.check_routable('shop.keys', 'tenant_id + shop.folds()', 'order_id', 'created_at');
set client_min_messages = warning;
-- the owner, and nobody else
set role braid_regress_owner;
select count(*) from braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
set role braid_regress_other;
select count(*) from braid.check_routable('shop.keys', 'tenant_id', 'order_id', 'created_at');
\echo :SQLSTATE
reset role;
\c postgres
drop database braid_routable with (force);
drop role braid_regress_owner, braid_regress_other;
