-- Values stored out of line: changed, unchanged, in keys, with REPLICA IDENTITY FULL.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_toast;
set search_path = dec_toast, public;
create table t (id int primary key, n int, big text, packed text);
alter table t alter big set storage external;
create publication dec_toast for tables in schema dec_toast;
select 1 from pg_create_logical_replication_slot('dec_toast', 'braid');
create function short(slot name) returns setof text language sql as $$
  select regexp_replace(regexp_replace(line, '(a{100,}|b{100,}|(abc){100,})', '<long>', 'g'), '[0-9a-f]{200,}', '<long hex>', 'g')
  from changes(slot, 'dec_toast') as line $$;

insert into t values (1, 1, repeat('a', 5000), repeat('abc', 50000));
-- Compressed in line.
insert into t values (2, 1, 'short', repeat('abc', 1000));
update t set n = 2;
update t set big = repeat('b', 6000) where id = 1;
update t set packed = null where id = 1;
update t set id = 3 where id = 1;
delete from t;
select short('dec_toast');
select count(*) from changes('dec_toast', 'dec_toast');

-- The value is whole.
insert into t values (4, 1, repeat('a', 5000), repeat('abc', 50000));
select position(convert_to(repeat('abc', 50000), 'UTF8') in data) > 0 as packed, position(convert_to(repeat('a', 5000), 'UTF8') in data) > 0 as big
from pg_logical_slot_get_binary_changes('dec_toast', null, null, 'proto_version', '1', 'publication_names', 'dec_toast');
-- Through send functions, output functions and in composites.
create type pair as (a text, b text);
create table calls (id int primary key, j jsonb, arr text[], c pair, by bytea, num numeric, n int);
alter table calls alter arr set storage external;
alter table calls alter c set storage external;
alter table calls alter num set storage external;
insert into calls values (1, jsonb_build_object('k', repeat('a', 9000)), array[repeat('a', 9000)], row(repeat('a', 9000), 'z'), decode(repeat('ab', 9000), 'hex'),
  repeat('1', 9000)::numeric, 1);
update calls set n = 2;
select regexp_replace(line, '1{200,}', '<long number>') from short('dec_toast') as line;

alter table t replica identity full;
update t set n = 3;
delete from t;
select short('dec_toast');

-- A key that is stored out of line and does not change.
create table k (k text, n int, m int, primary key (k, n));
alter table k alter k set storage external;
insert into k values (repeat('a', 2500), 1, 1);
update k set m = 2;
update k set n = 2;
delete from k;
select short('dec_toast');

select pg_drop_replication_slot('dec_toast');
set client_min_messages = warning;
drop publication dec_toast;
drop schema dec_toast cascade;
