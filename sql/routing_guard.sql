-- Statements that a member of a group refuses for routed tables, known by their guard; and
-- statements that it allows. Without a group, nothing is refused.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
\set SHOW_CONTEXT never
\set VERBOSITY default
create function braid.is_here(relation regclass, tenant bigint, record bigint, created timestamptz) returns boolean language sql immutable as 'select true';
create schema shop;
create schema other;
create table shop.tenant (id bigint primary key);
create table shop.orders (tenant_id bigint not null references shop.tenant, order_id bigint not null, created_at timestamptz not null, total integer, note text,
    primary key (tenant_id, order_id, created_at));
create table shop.number (n integer primary key);
create table shop.base (order_id bigint not null);
alter table shop.orders inherit shop.base;
alter table shop.orders add constraint braid_routing check (braid.is_here('shop.orders'::regclass, tenant_id, order_id, created_at)) not valid;
insert into shop.tenant values (1);
insert into shop.number values (1);
insert into shop.orders values (1, 1, '2026-01-01', 1, 'one');
-- what must pass and what must not, each by itself
create procedure try(statement text) language plpgsql as $$
declare
    said text;
    detail text;
    hint text;
begin
    execute statement;
    raise exception 'it passes' using errcode = '00009';
exception when others then
    get stacked diagnostics said = message_text, detail = pg_exception_detail, hint = pg_exception_hint;
    if sqlstate = '00009' then
        raise notice '% -- passes', statement;
    else
        raise notice '%: % % [%] [%]', statement, sqlstate, said, detail, hint;
    end if;
end $$;
create function statements() returns setof text language sql as $$ values
    ('truncate shop.orders'),
    ('truncate shop.tenant cascade'),
    ('truncate shop.base'),
    ('alter table shop.orders drop constraint braid_routing'),
    ('alter table shop.orders rename constraint braid_routing to was'),
    ('alter table shop.orders validate constraint braid_routing'),
    ('alter table shop.orders drop column created_at'),
    ('alter table shop.orders alter column created_at type timestamptz(0)'),
    ('alter table shop.orders rename column tenant_id to tenant'),
    ('alter table shop.orders rename to was'),
    ('alter index shop.orders rename to was'),
    ('alter table shop.orders set schema other'),
    ('alter schema shop rename to was'),
    ('drop table shop.orders'),
    ('drop table shop.base cascade'),
    ('drop schema shop cascade'),
    ('drop function braid.is_here(regclass, bigint, bigint, timestamptz) cascade'),
    ('create unique index on shop.orders (total)'),
    ('create unique index on shop.orders (tenant_id, order_id)'),
    ('create unique index on shop.orders (tenant_id, order_id, created_at) where total > 0'),
    ('create unique index on shop.orders (tenant_id, order_id, created_at, lower(note))'),
    ('alter table shop.orders add unique (note, tenant_id)'),
    ('alter table shop.orders add column code text unique'),
    ('alter table shop.orders add exclude using btree (total with =)'),
    ('alter table shop.orders set unlogged'),
    ('create table shop.item (tenant_id bigint, order_id bigint, created_at timestamptz, foreign key (tenant_id, order_id, created_at) references shop.orders)'),
    ('create schema later create table item (t bigint, o bigint, c timestamptz, foreign key (t, o, c) references shop.orders)'),
    ('alter table shop.orders add column parent_at timestamptz, add foreign key (tenant_id, order_id, parent_at) references shop.orders'),
    ('alter table shop.orders add foreign key (total) references shop.number') $$;
set client_min_messages = notice;

-- no group: a restored dump, say
do $$ declare s text; begin for s in select statements() loop call try(s); end loop; end $$;

set client_min_messages = warning;
select braid.create_group('shop', node_name => 'here', dsn => :'here') \g /dev/null
select braid.wait_for_group('60 s') \g /dev/null
set client_min_messages = notice;
do $$ declare s text; begin for s in select statements() loop call try(s); end loop; end $$;
-- by the ways around
set client_min_messages = warning;
create role braid_regress_owner;
alter table shop.orders owner to braid_regress_owner;
drop owned by braid_regress_owner cascade;
\echo :SQLSTATE
alter table shop.orders owner to current_user;
create unique index concurrently by_total on shop.orders (total);
\echo :SQLSTATE
create function shop.truncates() returns void language sql as 'truncate shop.orders';
select shop.truncates();
\echo :SQLSTATE
select * from shop.orders;
select conname from pg_constraint where conrelid = 'shop.orders'::regclass and contype in ('c', 'p') order by 1;
select indexrelid::regclass from pg_index where indrelid = 'shop.orders'::regclass;

-- what passes: other columns, keys that have all columns of the guard, and other tables
alter table shop.orders no inherit shop.base;
alter table shop.orders drop column note;
alter table shop.orders rename column total to amount;
alter table shop.orders alter column amount type bigint, add column code text;
create index on shop.orders (code);
create unique index on shop.orders (code, created_at, order_id, tenant_id);
alter table shop.orders add constraint positive check (amount > 0), add constraint by_id unique (created_at, tenant_id, order_id);
alter table shop.orders drop constraint positive, drop constraint by_id;
truncate shop.base;
create table shop.alike (like shop.orders including all);
select braid.is_routed('shop.alike'::regclass), braid.is_routed('shop.orders'::regclass);
truncate shop.alike;
alter table shop.alike drop constraint braid_routing;
alter table shop.alike rename to was;
drop table shop.was;
create temp table gone (like shop.orders including all);
truncate gone;
drop table gone;
create table other.plain (id int primary key, v text);
truncate other.plain;
alter table other.plain rename to renamed;
drop schema other cascade;
-- the whole table can be read and written
update shop.orders set amount = 2;
select amount from shop.orders;

-- a row that lost a conflict can belong to another node by now
insert into braid.conflict_record (relation, kind, resolution, winner, reason, key, local_row, remote_row)
    select 'shop.orders'::regclass, 'update_origin_differs', 'last_update_wins', 'local', 'newer', to_jsonb(o) - 'amount' - 'code', to_jsonb(o), to_jsonb(o) || '{"amount": 3}'
      from shop.orders o;
select action from braid.restore_conflict((select max(conflict_id) from braid.conflict_history where relation = 'shop.orders'::regclass));
\echo :SQLSTATE
select amount from shop.orders;

-- the extension goes, and its guards with it
begin;
drop extension braid cascade;
select count(*) from pg_constraint where conname = 'braid_routing';
rollback;
select braid.is_routed('shop.orders'::regclass);
truncate shop.orders;
\echo :SQLSTATE
\c postgres
drop database braid_here with (force);
drop database braid_there with (force);
drop role braid_regress_owner;
