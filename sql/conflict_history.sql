-- A losing row is kept whole, counted, and can be put back: with braid.ingest in the role of the
-- other node, whose clock the records set.
set client_min_messages = warning;
create database history template template0 encoding 'UTF8' locale 'C';
\c history
set client_min_messages = notice;
\set SHOW_CONTEXT never
create extension braid;
select braid.create_node('here', 'dbname=history') \g /dev/null
-- The records below are far ahead of the clock.
set braid.max_clock_wait = 0;
set timezone = 'Asia/Tokyo';
set datestyle = 'German';
create schema shop;
-- A record of table shop.T at a time, without one later than all before, as of a node: columns and
-- their types, the row before, the row after.
create sequence position;
create function put(operation text, tab text, columns jsonb, after jsonb, at text default null) returns void language sql as $$
  select braid.ingest(jsonb_strip_nulls(jsonb_build_object('operation', operation,
    'transaction', jsonb_build_object('lsn', ('0/0'::pg_lsn + nextval('position'))::text,
      'commit_time', coalesce(at, 2099 + currval('position') || '-01-01T00:00:00Z')),
    'schema', jsonb_build_object('namespace', 'shop', 'table', tab, 'columns', columns))
    || case operation when 'delete' then jsonb_build_object('before', after, 'before_kind', 'key') else jsonb_build_object('after', after) end), 'paris') $$;
create view latest as select * from braid.conflict_history where conflict_id = (select max(conflict_id) from braid.conflict_record);
create function restore(side text default null) returns table (action text, relation regclass, key jsonb, old_row jsonb, new_row jsonb) language sql as $$
  select * from braid.restore_conflict((select conflict_id from latest), side) $$;
\set id_v '[{"name": "id", "type": "int4", "identity": true}, {"name": "v", "type": "text"}]'

-- Every type that jsonb would not have whole, and numbers that other readers of JSON would round.
create type pair as (a int, b text);
create domain document as json;
create table shop.kinds (id int primary key, n numeric, i8 int8, f4 float4, f8 float8, c char(5), by bytea, d date, ts timestamp, tz timestamptz, iv interval,
  m money, j json, jd document, js json[], jb jsonb, jn jsonb, jt jsonb, a int[], b int[], ta text[], p pair, pn pair, r tstzrange, rc regclass,
  dropped text, g numeric generated always as (n * 2) stored, local_only text default 'here');
alter table shop.kinds drop column dropped;
insert into shop.kinds values (1, 12345678901234567890123456789.012345678901234567890, 9007199254740993, 0.1, 0.1::float8 + 0.2, 'ab', '\x00ff', '2024-02-29',
  '0044-03-15 12:00 BC', '2024-02-29 12:30:00.123456+02', '1 year -3 days 04:05:06.7', '12.34', '{"b":  1, "a": "\u0000", "b": 1e999999}', '[ 1 ]', array['{"k": "\ud800"}'::json],
  '{"n": 1.500}', 'null', '"text"', '{1,NULL,3}', '[0:1]={4,5}', '{NULL,"NULL","a,b"}', '(1,)', '(,)', '[2024-01-01 00:00+00,infinity)', 'shop.kinds', default, 'own');
select t::text as before from shop.kinds t \gset
set array_nulls = off;
select put('update', 'kinds', :'id_v'::jsonb #- '{1}' || '[{"name": "n", "type": "numeric"}]', '{"id": 1, "n": "1"}');
select kind, winner, n.count, local_row -> 'n' as n, local_row -> 'i8' as i8, local_row -> 'f8' as f8, local_row -> 'j' as j, local_row -> 'jn' as jn, local_row -> 'jt' as jt,
  local_row -> 'jb' as jb, local_row -> 'b' as b, local_row -> 'tz' as tz, local_row -> 'r' as r, local_row -> 'rc' as rc, local_row ? 'dropped' as dropped, remote_row, remote_unknown
  from latest, lateral (select count(*) from jsonb_each(local_row)) n \gx
select action, relation, key, old_row -> 'n' as old, new_row -> 'n' as new from restore();
select t::text = :'before' as whole from shop.kinds t;
-- As good when the row is gone.
delete from shop.kinds;
select action from restore();
select t::text = :'before' as whole from shop.kinds t;
select action from restore();
select t::text = :'before' as whole from shop.kinds t;

reset array_nulls;

-- Each way to lose. The row that is here loses an update, an insert, and to a delete.
create table shop.t (id int primary key, v text);
create function put(operation text, after jsonb, at text default null) returns void language sql as $$
  select put(operation, 't', '[{"name": "id", "type": "int4", "identity": true}, {"name": "v", "type": "text"}]', after, at) $$;
insert into shop.t select i, 'own' from generate_series(1, 12) i;
select put('update', '{"id": 1, "v": "theirs"}');
select * from restore();
select put('insert', '{"id": 2, "v": "theirs"}');
select * from restore();
select put('delete', '{"id": 3}');
select * from restore();
-- What came loses: an update, an insert, a delete.
select put('update', '{"id": 4, "v": "theirs"}', '2000-01-01T00:00:00Z');
select * from restore();
select put('insert', '{"id": 5, "v": "theirs"}', '2000-01-01T00:00:00Z');
select * from restore();
select put('delete', '{"id": 6}', '2000-01-01T00:00:00Z');
select * from restore();
select * from restore();
select * from shop.t where id <= 6 order by id;
-- It is a change of this node's own, with a version of now.
select (pg_xact_commit_timestamp_origin(xmin)).roident as origin, (pg_xact_commit_timestamp_origin(xmin)).timestamp > now() - interval '1 minute' as new
  from shop.t where id = 5;
-- Changed since, and back: the winner can be put back too.
select put('update', '{"id": 7, "v": "theirs"}');
update shop.t set v = 'later' where id = 7;
select * from restore();
select * from restore('remote');
select * from restore('remote');
-- There is nothing to put back.
select put('update', '{"id": 99, "v": "theirs"}');
select * from restore();
select * from restore('nobody');
select * from braid.restore_conflict(4711);
select * from braid.restore_conflict(null);

-- A new key: the row is where the winner is.
update shop.t set v = 'own' where id = 8;
create function move(old int, new int, v text, at text) returns void language sql as $$
  select braid.ingest(jsonb_build_object('operation', 'update', 'transaction', jsonb_build_object('lsn', ('0/0'::pg_lsn + nextval('position'))::text,
      'commit_time', coalesce(at, 2099 + currval('position') || '-01-01T00:00:00Z')),
    'schema', jsonb_build_object('namespace', 'shop', 'table', 't', 'columns', '[{"name": "id", "type": "int4", "identity": true}, {"name": "v", "type": "text"}]'::jsonb),
    'before', jsonb_build_object('id', old), 'before_kind', 'key', 'after', jsonb_build_object('id', new, 'v', v)), 'paris') $$;
select move(8, 80, 'theirs', null);
select * from restore();
-- Each key is decided by itself: nothing is to be put back.
select move(9, 90, 'theirs', '2000-01-01T00:00:00Z');
select * from shop.t where id in (8, 80, 9, 90) order by id;

-- The table's own rules hold: constraints, triggers, row by row as usual; under the caller's
-- search_path.
create schema app;
create table app.audit (v text);
create function app.note() returns trigger language plpgsql as $$ begin insert into audit values (tg_op || ' ' || new.v); new.v := upper(new.v); return new; end $$;
create trigger note before insert or update on shop.t for each row execute function app.note();
set search_path = app, public;
select put('update', '{"id": 10, "v": "theirs"}');
select * from public.restore();
select * from app.audit;
show search_path;
set search_path = public;
drop trigger note on shop.t;
alter table shop.t add constraint short check (length(v) < 3) not valid;
select put('update', '{"id": 11, "v": "no"}');
select * from restore();
alter table shop.t drop constraint short;

-- Identity and generated columns.
create table shop.counted (id int generated always as identity primary key, v text, l int generated always as (length(v)) stored, other int generated by default as identity);
insert into shop.counted (v) values ('own'), ('own');
select put('update', 'counted', :'id_v', '{"id": 1, "v": "theirs"}');
select action, new_row from restore();
select put('delete', 'counted', :'id_v', '{"id": 2}');
select action, new_row from restore();

-- Another table than it was: columns that came and went, another type, a partition.
create table shop.changing (id int primary key, v text, w text);
insert into shop.changing values (1, '10', 'own'), (2, '20', 'own');
select put('delete', 'changing', :'id_v', '{"id": 1}');
alter table shop.changing drop column w, add column z int not null default 7;
alter table shop.changing alter column v type int using v::int;
select action, new_row from restore();
alter table shop.changing rename column id to number;
select action from restore();
alter table shop.changing drop constraint changing_pkey;
select action from restore();
drop table shop.changing;
select action from restore();
create table shop.split (id int primary key, v text) partition by range (id);
create table shop.split_low partition of shop.split for values from (0) to (10);
create table shop.split_high partition of shop.split for values from (10) to (20);
insert into shop.split values (1, 'own');
select put('update', 'split', :'id_v', '{"id": 1, "v": "theirs"}');
select relation from latest;
select action, relation, new_row from restore();

-- Values that the change did not carry.
create table shop.large (id int primary key, v text, w text);
\set id_v_w '[{"name": "id", "type": "int4", "identity": true}, {"name": "v", "type": "text"}, {"name": "w", "type": "text"}]'
insert into shop.large values (1, 'own', 'large');
select put('update', 'large', :'id_v_w', '{"id": 1, "v": "theirs"}', '2000-01-01T00:00:00Z');
select kind, winner, remote_row, remote_unknown from latest;
select action, new_row from restore();
delete from shop.large;
select action, new_row from restore();
select put('update', 'large', :'id_v_w', '{"id": 2, "v": "theirs"}', '2000-01-01T00:00:00Z');
select kind, winner, remote_row, remote_unknown from latest;
select action, new_row from restore();

-- A row that jsonb has no room for.
insert into shop.large values (3, repeat('x', 40000000), repeat('y', 40000000));
select put('update', 'large', :'id_v_w', '{"id": 3, "v": "theirs", "w": "theirs"}');
select length(local_row ->> 'v') as v, local_row ? 'w' as w, remote_row from latest;
select side, column_name, length(value) from braid.conflict_value;
select action from restore();
select id, length(v), md5(v) = md5(repeat('x', 40000000)) as v, md5(w) = md5(repeat('y', 40000000)) as w from shop.large where id = 3;

-- A table without a key.
create table shop.bare (id int, v text);
alter table shop.bare replica identity full;
insert into braid.conflict_record (subscription_name, relation, kind, resolution, winner, reason, local_row) values ('paris', 'shop.bare', 'insert_exists', 'r', 'remote', 'x', '{"id": 1, "v": "own"}');
select * from restore();

-- Counted, by table and kind, whatever becomes of the history; when the history is off, too.
select relation, kind, winner, conflicts, last_at >= first_at as ordered from braid.conflict_stats where relation in ('shop.t'::regclass, 'shop.kinds');
delete from braid.conflict_record;
select sum(conflicts) > 0 as still from braid.conflict_stats;

-- Rights: a role needs those to call it, and to write the table.
create role clerk;
grant usage on schema shop to clerk;
grant select on shop.t to clerk;
set role clerk;
select * from braid.restore_conflict(1);
reset role;
grant braid_admin to clerk;
select put('update', '{"id": 12, "v": "theirs"}');
select max(conflict_id) as conflict from braid.conflict_history \gset
set role clerk;
select * from braid.restore_conflict(:conflict);
reset role;
grant update on shop.t to clerk;
set role clerk;
select * from braid.restore_conflict(:conflict);
reset role;
\c postgres
set client_min_messages = warning;
drop database history with (force);
drop role clerk;
