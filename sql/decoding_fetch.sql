-- include-unchanged-toast = fetch: values that are not in WAL come from the table, and say so.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_fetch;
set search_path = dec_fetch, public;
create function short(image jsonb) returns text language sql as $$
  select regexp_replace(image::text, '(a{100,}|b{100,}|c{100,}|d{100,}|e{100,}|g{100,}|p{100,}|v{100,}|x{100,}|y{100,}|z{100,})', '<long>', 'g') $$;
create function fetched(slot name) returns table (operation text, before text, after text) language sql as $$
  select r->>'operation', short(r->'before'), short(r->'after')
  from (select data::jsonb as r from pg_logical_slot_get_changes(slot, null, null, 'format', 'gir-json', 'publication_names', 'dec_fetch', 'include-unchanged-toast', 'fetch')) as records
  where r ? 'after' $$;
create table t (id int primary key, n int, big text, packed text);
alter table t alter big set storage external, alter packed set storage external;
create publication dec_fetch for tables in schema dec_fetch;
select 1 from pg_create_logical_replication_slot('dec_fetch', 'braid');

insert into t values (1, 1, repeat('a', 5000), repeat('b', 5000)), (2, 1, repeat('c', 5000), null), (3, 1, repeat('d', 5000), 'e');
select * from fetched('dec_fetch');
-- Both unchanged; one changed; a key that changes; nothing to ask for.
update t set n = 2 where id = 1;
update t set n = 3, packed = repeat('z', 5000) where id = 1;
update t set id = 4 where id = 2;
update t set big = 'small' where id = 3;
select * from fetched('dec_fetch');
-- The value of now, not of then; a row that is gone has none.
update t set n = 5 where id in (1, 3, 4);
update t set big = repeat('y', 5000) where id = 1;
delete from t where id = 4;
select * from fetched('dec_fetch');
-- A value that is null by now is fetched too.
update t set n = 6 where id = 1;
update t set big = null where id = 1;
select * from fetched('dec_fetch');

-- With the whole row in WAL nothing has to be asked for.
alter table t replica identity full;
update t set n = 7 where id = 1;
select operation, after from fetched('dec_fetch');
alter table t replica identity default;

-- Keys of several columns and types, quoted names, every kind of value; keys that are stored out of
-- line.
create table "Odd" ("Id" text collate "C", at timestamptz, by bytea, u uuid, d numeric, primary key ("Id", at, by, u, d), "v""1" text, n int, j jsonb, a int[], num numeric, b bytea);
alter table "Odd" alter "v""1" set storage external, alter j set storage external, alter a set storage external, alter num set storage external, alter b set storage external;
insert into "Odd" values (E'it''s \\ "é"', '2024-02-29 12:30:00.5+05:30', '\xdead', '00112233-4455-6677-8899-aabbccddeeff', 1.50, repeat('v', 5000), 1, jsonb_build_object('k', repeat('j', 5000)),
  array_fill(7, array[2000]), ('1' || repeat('1', 9000))::numeric, decode(repeat('ab', 5000), 'hex'));
select count(*) from fetched('dec_fetch');
update "Odd" set n = 2;
select k, length(v::text), left(v::text, 45)
from pg_logical_slot_get_changes('dec_fetch', null, null, 'format', 'gir-json', 'publication_names', 'dec_fetch', 'include-unchanged-toast', 'fetch'), jsonb_each(data::jsonb->'after') as e(k, v)
where data like '{"operation":"update"%' order by k;
create table k (k text, n int, m int, v text, primary key (k, n));
alter table k alter k set storage external, alter v set storage external;
insert into k values (repeat('a', 2500), 1, 1, repeat('v', 5000));
select count(*) from fetched('dec_fetch');
update k set m = 2;
update k set n = 2;
select * from fetched('dec_fetch');

-- Keys that SQL does not compare by just any operator, or not as just any type. A value of a key
-- may not be readable any more.
create type mood as enum ('sad', 'ok');
create domain some_mood as mood;
create type pair as (a int, b text);
create table named (id int);
create table typed (k some_mood, p pair, c regclass, l int[], primary key (k, p, c, l), n int, v text);
alter table typed alter v set storage external;
insert into typed values ('sad', '(1,"a b")', 'pg_class', '{1,2}', 1, repeat('v', 5000)), ('ok', '(2,)', 'named', '{}', 1, repeat('v', 5000));
select count(*) from fetched('dec_fetch');
update typed set n = 2;
select operation, after from fetched('dec_fetch');
update typed set n = 3;
drop table named;
select operation, after from fetched('dec_fetch');
drop table typed;

-- Tables that inherit, partitions under their root's name.
create table child (extra int) inherits (t);
alter table child add primary key (id);
insert into child values (1, 1, repeat('x', 5000), null, 1);
update t set n = 8;
select operation, after from fetched('dec_fetch') where operation = 'update';
create table part (id int, n int, v text, primary key (id)) partition by range (id);
create table part1 partition of part for values from (0) to (10);
alter table part alter v set storage external; alter table part1 alter v set storage external;
alter publication dec_fetch set (publish_via_partition_root = true);
insert into part values (1, 1, repeat('p', 5000));
update part set n = 2;
select operation, after from fetched('dec_fetch') where operation = 'update';

-- A table that changed meanwhile, or is gone.
update t set n = 9 where id = 1;
update k set m = 3;
update part set n = 3;
alter table part drop column v;
alter table t rename to t_renamed;
alter table t_renamed alter packed type bytea using null, alter packed set storage external;
drop table k;
select operation, after from fetched('dec_fetch') where operation = 'update';

-- A lock that is not to be had: the value stays away.
update t_renamed set n = 10 where id = 3;
update t_renamed set big = repeat('g', 5000) where id = 3;
update t_renamed set n = 11 where id = 3;
begin;
lock table t_renamed;
select operation, after from fetched('dec_fetch') where operation = 'update';
rollback;

-- Rows are read with the rights of who streams.
create role regress_dec_fetch replication;
grant usage on schema dec_fetch to regress_dec_fetch;
\set SHOW_CONTEXT never
update t_renamed set n = 12 where id = 3;
set role regress_dec_fetch;
select * from fetched('dec_fetch');
reset role;
grant select on t_renamed to regress_dec_fetch;
set role regress_dec_fetch;
select operation, after from fetched('dec_fetch') where operation = 'update';
reset role;
alter table t_renamed enable row level security;
update t_renamed set n = 13 where id = 3;
set role regress_dec_fetch;
select operation, after from fetched('dec_fetch') where operation = 'update';
reset role;
-- No worker is left behind.
do $$ begin
  for attempt in 1 .. 100 loop
    exit when not exists (select from pg_stat_activity where backend_type = 'braid fetcher');
    perform pg_sleep(0.1), pg_stat_clear_snapshot();
  end loop;
end $$;
select count(*) from pg_stat_activity where backend_type = 'braid fetcher';

select pg_drop_replication_slot('dec_fetch');
set client_min_messages = warning;
drop publication dec_fetch;
drop schema dec_fetch cascade;
drop role regress_dec_fetch;
