-- braid.ingest: records of another system, applied as a subscription's would be.
set client_min_messages = warning;
create database ingest_from template template0 encoding 'UTF8' locale 'C';
create database ingest_to template template0 encoding 'UTF8' locale 'C';
-- Some records are from the future.
alter database ingest_to set braid.max_clock_wait = 0;
\c ingest_from
set client_min_messages = warning;
create extension braid;
create type mood as enum ('sad', 'ok');
create type pair as (a int, b text);
create table v (id int primary key, b bool, i2 int2, i8 int8, f4 float4, f8 float8, n numeric, c char(5), vc varchar(9), by bytea, d date, ti time,
  tz timetz, ts timestamp, tstz timestamptz, iv interval, u uuid, j json, jb jsonb, a int[], ta text[], e mood, p pair, r int4range, m money, i inet, pt point);
create publication ingest for all tables;
select 1 from pg_create_logical_replication_slot('ingest', 'braid');
insert into v values (1, true, -5, 9007199254740993, 0.1, 1e300, 12345678901234567890.123450, 'ab', 'c', '\xdeadbeef', '2024-02-29', '12:30:00.5',
  '12:30:00+05:30', '0044-03-15 12:00 BC', '2024-02-29 12:30:00.123456+02', '1 year -3 days 04:05:06.7', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11',
  '{"a":  1}', '{"b": 1.50}', '{1,NULL,3}', '{"a b",NULL,é}', 'ok', '(1,x)', '[1,5)', '12.34', '10.0.0.1/8', '(1.5,2)');
insert into v (id, f8, n, d, ts) values (2, 'nan', 'nan', 'infinity', '-infinity'), (3, '-infinity', '-inf', '-infinity', 'infinity'), (4, -0.0, 0.000, '5874897-12-31', null);
insert into v (id, vc) values (5, 'gone'), (6, 'x');
update v set vc = 'y' where id = 6;
update v set id = 7 where id = 6;
delete from v where id = 5;
select md5(string_agg(v::text, '|' order by id)) as digest, count(*) as number from v \gset from_
select jsonb_agg(data::jsonb)::text as gir
  from pg_logical_slot_peek_changes('ingest', null, null, 'format', 'gir-json', 'publication_names', 'ingest') \gset
select pg_drop_replication_slot('ingest') \g /dev/null

\c ingest_to
set client_min_messages = warning;
create extension braid;
create type mood as enum ('sad', 'ok');
create type pair as (a int, b text);
create table v (id int primary key, b bool, i2 int2, i8 int8, f4 float4, f8 float8, n numeric, c char(5), vc varchar(9), by bytea, d date, ti time,
  tz timetz, ts timestamp, tstz timestamptz, iv interval, u uuid, j json, jb jsonb, a int[], ta text[], e mood, p pair, r int4range, m money, i inet, pt point);
\set VERBOSITY sqlstate
-- Without a node there is nobody to apply.
select * from braid.ingest(:'gir', 'shop');
select braid.create_node('here', 'dbname=ingest_to') \g /dev/null

-- Every type, from what the output plugin writes; then all of it once more.
select * from braid.ingest(:'gir', 'paris');
select md5(string_agg(v::text, '|' order by id)) = :'from_digest' as same, count(*) = :from_number as all_there from v;
select * from braid.ingest(:'gir', 'paris');
select origin, "position" > '0/0' as stands, last_at is not null as dated from braid.ingest_sources;

-- Records made by hand: t(key, value) of table shop.t at a position and a time.
create schema shop;
create table shop.t (id int primary key, v text);
create function tx(lsn text, at text, origin text default null) returns jsonb language sql as $$
  select jsonb_strip_nulls(jsonb_build_object('lsn', lsn, 'commit_time', at, 'origin', origin)) $$;
create function put(operation text, id int, v text, lsn text, at text, origin text default null, tab text default 't', ns text default 'shop') returns jsonb language sql as $$
  select jsonb_strip_nulls(jsonb_build_object('operation', operation, 'transaction', tx(lsn, at, origin),
    'schema', jsonb_build_object('namespace', ns, 'table', tab, 'columns', '[{"name": "id", "type": "int4", "identity": true}, {"name": "v", "type": "text"}]'::jsonb),
    'before', case operation when 'delete' then jsonb_build_object('id', id) end, 'before_kind', case operation when 'delete' then 'key' end,
    'after', case when operation <> 'delete' then jsonb_build_object('id', id, 'v', v) end)) $$;

select * from braid.ingest(jsonb_build_array(
  put('insert', 1, 'one', '0/10', '2024-01-01T00:00:10Z'), put('insert', 2, 'two', '0/10', '2024-01-01T00:00:10Z'),
  put('insert', 3, 'three', '0/20', '2024-01-01T00:00:20Z'), put('update', 1, 'uno', '0/20', '2024-01-01T00:00:20Z'),
  put('delete', 2, null, '0/20', '2024-01-01T00:00:20Z')), 'shop');
select * from shop.t order by id;
-- One record, and what is at or below the position.
select * from braid.ingest(put('update', 3, 'drei', '0/30', '2024-01-01T00:00:30Z'), 'shop');
select * from braid.ingest(jsonb_build_array(put('update', 3, 'again', '0/30', '2024-01-01T00:00:30Z'), put('update', 3, 'again', '0/25', '2024-01-01T00:00:30Z'),
  put('insert', 4, 'four', '0/40', '2024-01-01T00:00:40Z')), 'shop');
select * from braid.ingest('[]', 'shop');
select * from shop.t order by id;
select "position" - '0/0' as "position" from braid.ingest_sources where origin = 'shop';

-- The commit is the source's, with its time; the next one of this session is this node's own.
select (pg_xact_commit_timestamp_origin(xmin)).timestamp = '2024-01-01 00:00:40Z' as its_time,
  (select roname like 'braid/shop/%' from pg_replication_origin where roident = (pg_xact_commit_timestamp_origin(t.xmin)).roident) as its_origin from shop.t where id = 4;
insert into shop.t values (100, 'own');
select (pg_xact_commit_timestamp_origin(xmin)).roident as origin from shop.t where id = 100;
show session_replication_role;
show client_encoding;

-- Conflicts, decided by the records' own times: of rows that came in one call each has its own.
select * from braid.ingest(jsonb_build_array(put('insert', 10, 'old', '0/50', '2024-01-01T00:00:50Z'), put('insert', 11, 'new', '0/60', '2024-01-01T00:01:00Z')), 'shop');
select * from braid.ingest(jsonb_build_array(put('update', 10, 'from depot', '0/1', '2024-01-01T00:00:55Z'), put('update', 11, 'from depot', '0/1', '2024-01-01T00:00:55Z'),
  put('insert', 100, 'loses to own', '0/1', '2024-01-01T00:00:55Z'), put('update', 999, 'missing', '0/1', '2024-01-01T00:00:55Z')), 'depot');
select * from shop.t where id >= 10 order by id;
select subscription, relation, kind, resolution, winner, key, local_row->>'v' as local, remote_row->>'v' as remote, local_origin, remote_origin, remote_lsn - '0/0' as remote_lsn
from braid.conflict_history order by key->>'id', kind;

-- Two calls in one transaction, savepoints, exceptions: what is rolled back has not come.
begin;
select * from braid.ingest(put('insert', 20, 'first', '0/70', '2024-01-01T00:01:10Z'), 'shop');
select * from braid.ingest(put('insert', 21, 'second', '0/80', '2024-01-01T00:01:20Z'), 'shop');
savepoint s;
select * from braid.ingest(put('insert', 22, 'third', '0/90', '2024-01-01T00:01:30Z'), 'shop');
rollback to s;
select * from braid.ingest(put('insert', 23, 'fourth', '0/90', '2024-01-01T00:01:30Z'), 'shop');
commit;
begin; select * from braid.ingest(put('insert', 24, 'gone', '0/A0', '2024-01-01T00:01:40Z'), 'shop'); rollback;
begin; savepoint s; select * from braid.ingest(put('insert', 24, 'gone', '0/A0', '2024-01-01T00:01:40Z'), 'shop'); rollback to s;
insert into shop.t values (101, 'own'); commit;
select id, v, (pg_xact_commit_timestamp_origin(xmin)).roident = 0 as own from shop.t where id between 20 and 29 or id = 101 order by id;
do $$ begin
  perform braid.ingest(put('insert', 25, 'in a block', '0/A0', '2024-01-01T00:01:40Z'), 'shop');
  begin
    perform braid.ingest(jsonb_build_array(put('insert', 26, 'undone', '0/B0', '2024-01-01T00:01:50Z'), put('insert', 27, 'no table', '0/B0', '2024-01-01T00:01:50Z', null, 'nowhere')), 'shop');
  exception when undefined_table then raise info 'caught %', sqlerrm;
  end;
  perform braid.ingest(put('insert', 28, 'after it', '0/B0', '2024-01-01T00:01:50Z'), 'shop');
end $$;
select id, v from shop.t where id between 25 and 29 order by id;
-- The versions of rows of both calls are their own: an update in between wins over one of them
-- only.
select * from braid.ingest(jsonb_build_array(put('update', 20, 'between', '0/2', '2024-01-01T00:01:15Z'), put('update', 21, 'between', '0/2', '2024-01-01T00:01:15Z'),
  put('update', 25, 'between', '0/3', '2024-01-01T00:01:45Z'), put('update', 28, 'between', '0/3', '2024-01-01T00:01:45Z')), 'depot');
select id, v from shop.t where id in (20, 21, 25, 28) order by id;

-- Triggers as for a subscription, and the owner's rights.
create table shop.log (who text, id int);
create function shop.note() returns trigger language plpgsql as $$ begin insert into shop.log values (current_user, new.id); return new; end $$;
create trigger plain before insert on shop.t for each row execute function shop.note();
create role ingest_owner;
grant usage on schema shop to ingest_owner;
grant insert on shop.log to ingest_owner;
select * from braid.ingest(put('insert', 30, 'silent', '0/C0', '2024-01-01T00:02:00Z'), 'shop');
alter table shop.t owner to ingest_owner;
alter table shop.t enable always trigger plain;
select * from braid.ingest(put('insert', 31, 'heard', '0/D0', '2024-01-01T00:02:10Z'), 'shop');
select * from shop.log;
alter table shop.t disable trigger plain;

-- Not with PREPARE: the mark goes with the session.
begin; select * from braid.ingest(put('insert', 32, 'x', '0/D1', '2024-01-01T00:02:10Z'), 'shop'); prepare transaction 'ingest';
-- The error of a mistake, and its place.
create function refused(gir jsonb) returns text language plpgsql as $$
declare detail text;
begin
  perform braid.ingest(gir, 'shop');
  return 'taken';
exception when others then
  get stacked diagnostics detail = pg_exception_detail;
  return sqlstate || ': ' || detail;
end $$;
\set VERBOSITY default
select * from braid.ingest(null, 'shop');
select * from braid.ingest('3', 'shop');
select * from braid.ingest('{"operation": "upsert"}', 'shop');
-- Nothing of a transaction that has not committed, alone or with what was said before.
select operation, error from unnest(array['segment_start', 'segment_end', 'subtransaction', 'abort', 'streamed_commit', 'begin_prepared', 'prepare', 'streamed_prepare', 'commit_prepared',
  'rollback_prepared']) operation, refused(jsonb_build_object('operation', operation)) error;
select * from braid.ingest('[{"operation": "segment_start", "xid": 7, "first": true}, {"operation": "segment_end"}, {"operation": "abort", "xid": 7, "subxid": 7}]', 'shop');
select * from braid.ingest(jsonb_build_array(put('insert', 42, 'x', '0/E0', '2024-01-01T00:02:20Z'), '{"operation": "commit_prepared",
  "transaction": {"lsn": "0/E1", "commit_time": "2024-01-01T00:02:20Z"}, "end_lsn": "0/E2", "gid": "two"}'::jsonb), 'shop');
select * from braid.ingest(put('insert', 43, 'x', '0/E0', '2024-01-01T00:02:20Z') - 'transaction' || '{"running": {"xid": 7, "subxid": 7}}', 'shop');
select * from braid.ingest(put('insert', 44, 'x', '0/E0', '2024-01-01T00:02:20Z') || '{"prepared": "two"}', 'shop');
select * from braid.ingest(jsonb_build_array(put('insert', 40, 'x', '0/E0', '2024-01-01T00:02:20Z'), put('insert', 41, 'x', '0/E0', 'yesterday')), 'shop');
select * from braid.ingest(jsonb_build_array(put('insert', 40, 'x', '0/E0', '2024-01-01T00:02:20Z'), jsonb_set(put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z'), '{after,price}', '1')), 'shop');
select * from braid.ingest(jsonb_build_array(put('insert', 40, 'x', '0/E0', '2024-01-01T00:02:20Z'), put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z', null, 'nowhere')), 'shop');
create table shop.narrow (id int primary key);
select * from braid.ingest(put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z', null, 'narrow'), 'shop');
create table shop.checked (id int primary key, v text check (v <> 'bad'));
select * from braid.ingest(jsonb_build_array(put('insert', 1, 'good', '0/E0', '2024-01-01T00:02:20Z', null, 'checked'), put('insert', 2, 'bad', '0/E0', '2024-01-01T00:02:20Z', null, 'checked')), 'shop');
select * from braid.ingest(jsonb_build_array(put('insert', 40, 'x', '0/E0', '2024-01-01T00:02:20Z'), put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:21Z')), 'shop');
select * from braid.ingest(put('insert', 41, 'x', '0/0', '2024-01-01T00:02:20Z'), 'shop');
select * from braid.ingest(put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z'), 'here');
select * from braid.ingest(put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z'));
select * from braid.ingest(put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z'), 'no/name');
select * from braid.ingest(put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z', null, 'node', 'braid'), 'shop');
select * from braid.ingest(put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z', null, 'pg_class', 'pg_catalog'), 'shop');
select * from braid.ingest(jsonb_build_array(put('insert', 41, 'x', '0/E0', '2024-01-01T00:02:20Z', 'rome'), put('insert', 42, 'x', '0/E1', '2024-01-01T00:02:20Z')), 'shop');
begin isolation level repeatable read; select * from braid.ingest('[]', 'shop'); rollback;
begin read only; select * from braid.ingest('[]', 'shop'); rollback;
select count(*) from shop.t where id >= 40 and id < 100;
-- Forwarded for another node: its version is that node's. A change that was first committed on this
-- node is refused.
select * from braid.ingest(put('insert', 50, 'via shop', '0/E0', '2024-01-01T00:02:20Z', 'rome'), 'shop');
select * from braid.ingest(put('insert', 51, 'ours', '0/E1', '2024-01-01T00:02:20Z', 'here'), 'shop');
select node_name from braid.origin where source_name = 'shop' order by 1;
-- TRUNCATE: of rows that are older. From the second source on deletions are remembered.
do $$ begin while not (select remembered from braid.deletions) loop perform pg_sleep(0.01); end loop; end $$;
select * from braid.ingest(jsonb_build_object('operation', 'truncate', 'transaction', tx('0/F0', '2024-01-01T00:02:30Z'),
  'schemas', jsonb_build_array(put('insert', 1, 'x', '0/1', '2024-01-01T00:02:20Z')->'schema'), 'cascade', false, 'restart_identity', false), 'shop');
select id, v, (pg_xact_commit_timestamp(xmin) > '2024-01-01T00:02:30Z') as newer from shop.t order by id;

-- Decoded here: not of this node's origin.
create publication ingest for table shop.t;
select 1 from pg_create_logical_replication_slot('ingest', 'braid');
select * from braid.ingest(put('insert', 60, 'theirs', '0/100', '2024-01-01T00:03:00Z'), 'shop');
insert into shop.t values (61, 'own');
select data::jsonb->'after'->>'v' as v from pg_logical_slot_peek_changes('ingest', null, null, 'format', 'gir-json', 'publication_names', 'ingest', 'origin', 'none') where data::jsonb ? 'after';
select data::jsonb->'after'->>'v' as v, data::jsonb->'transaction'->>'origin' as origin from pg_logical_slot_peek_changes('ingest', null, null, 'format', 'gir-json', 'publication_names', 'ingest', 'origin', 'any') where data::jsonb ? 'after';
select pg_drop_replication_slot('ingest') \g /dev/null

-- Forgotten: later records under its name are new, and still newer than its earlier ones.
select * from braid.ingest(put('insert', 80, 'once', '0/10', '2024-01-01T00:05:00Z'), 'gone');
select * from braid.ingest(put('insert', 80, 'once', '0/10', '2024-01-01T00:05:00Z'), 'gone');
select origin, "position" - '0/0' as "position", newest_at = '2024-01-01T00:05:00Z' as newest from braid.ingest_sources where origin = 'gone';
begin; select braid.forget_source('gone'); rollback;
select braid.forget_source('gone');
select count(*) from braid.ingest_sources where origin = 'gone';
select * from braid.ingest(put('update', 80, 'twice', '0/10', '2024-01-01T00:05:01Z'), 'gone');
select v, (select count(*) from braid.conflict_history where subscription = 'gone') as conflicts from shop.t where id = 80;
select count(*) from braid.origin where node_name = 'gone';
select braid.forget_source('gone');
select braid.forget_source('gone');
select braid.forget_source(null);
-- A clock that is ahead.
select * from braid.ingest(put('insert', 81, 'later', '0/10', '9999-01-01T00:00:00Z'), 'ahead');
select newest_at <= now() as sane from braid.ingest_sources where origin = 'ahead';

-- Columns whose type has a name and no number: the name says what values mean. If the name is
-- unknown, the column takes them as it takes text.
create table shop.loose (id int primary key, n numeric(10,2), r numeric, b bytea, f text, g text, o text, i float8);
select * from braid.ingest('{"operation": "insert", "transaction": {"lsn": "0/10", "commit_time": "2024-01-01T00:00:10Z"}, "schema": {"namespace": "shop", "table": "loose",
  "columns": [{"name": "id", "type": "int4", "identity": true}, {"name": "n", "type": "numeric"}, {"name": "r", "type": "NUMBER"}, {"name": "b", "type": "bytea"},
    {"name": "f", "type": "boolean"}, {"name": "g", "type": "LOGICAL"}, {"name": "o", "type": "numeric"}, {"name": "i", "type": "NUMBER"}]},
  "after": {"id": 1, "n": {"decimal": "9.90"}, "r": {"decimal": "NaN"}, "b": {"binary": "dead"}, "f": true, "g": true, "o": {"decimal": "1.50"}, "i": {"decimal": "1.50"}}}', 'erp');
select * from braid.ingest('{"operation": "insert", "transaction": {"lsn": "0/20", "commit_time": "2024-01-01T00:00:20Z"}, "schema": {"namespace": "shop", "table": "loose",
  "columns": [{"name": "id", "type": "int4", "identity": true}, {"name": "b", "type": "RAW"}, {"name": "n", "type": "money", "type_namespace": "erp"}]},
  "after": {"id": 2, "b": {"binary": "beef"}, "n": "12.5"}}', 'erp');
select * from shop.loose order by id;
-- An insert that lacks values of its columns, and has no local row to take them from. A value that
-- was looked up for it counts as its own.
select * from braid.ingest('{"operation": "insert", "transaction": {"lsn": "0/30", "commit_time": "2024-01-01T00:00:30Z"}, "schema": {"namespace": "shop", "table": "loose",
  "columns": [{"name": "id", "type": "int4", "identity": true}, {"name": "b", "type": "bytea"}, {"name": "f", "type": "text"}]}, "after": {"id": 3, "b": {"binary": "beef"}}, "unavailable": ["f"]}', 'erp');
select * from braid.ingest('{"operation": "insert", "transaction": {"lsn": "0/40", "commit_time": "2024-01-01T00:00:40Z"}, "schema": {"namespace": "shop", "table": "loose",
  "columns": [{"name": "id", "type": "int4", "identity": true}, {"name": "b", "type": "bytea"}, {"name": "f", "type": "text"}]}, "after": {"id": 4, "b": {"binary": "beef"}, "f": {"fetched": "looked up"}}}', 'erp');
select id, f from shop.loose where id > 2 order by id;
-- In one call, an earlier transaction after a later one would be left out, if it is new; a
-- transaction that is sent twice is skipped.
select refused(jsonb_build_array(put('insert', 90, 'x', '0/10B', '2024-01-01T00:05:30Z'), put('insert', 91, 'x', '0/10A', '2024-01-01T00:05:20Z')));
select * from shop.t where id >= 90;
select * from braid.ingest(jsonb_build_array(put('insert', 90, 'x', '0/10A', '2024-01-01T00:05:20Z'), put('insert', 91, 'x', '0/10B', '2024-01-01T00:05:30Z'),
  put('insert', 90, 'x', '0/10A', '2024-01-01T00:05:20Z'), put('insert', 91, 'x', '0/10B', '2024-01-01T00:05:30Z'), put('insert', 60, 'x', '0/100', '2024-01-01T00:03:00Z')), 'shop');
select refused(jsonb_build_array(jsonb_build_array(put('insert', 92, 'x', '0/10C', '2024-01-01T00:05:40Z'))));

-- Who may.
create role ingest_nobody;
create role ingest_admin in role braid_admin;
\set VERBOSITY sqlstate
set role ingest_nobody;
select * from braid.ingest('[]', 'shop');
set role ingest_admin;
select * from braid.ingest('[]', 'shop');
reset role;
grant usage on schema shop to ingest_admin;
set role ingest_admin;
select * from braid.ingest('[{"operation": "insert", "transaction": {"lsn": "0/110", "commit_time": "2024-01-01T00:04:00Z"}, "schema": {"namespace": "shop", "table": "t", "columns": [{"name": "id", "type": "int4", "identity": true}]}, "after": {"id": 70}}]', 'shop');
select * from shop.t;
reset role;
select * from shop.t where id = 70;

\c postgres
set client_min_messages = warning;
drop database ingest_from with (force);
\c ingest_to
set client_min_messages = warning;
select braid.drop_node('here') \g /dev/null
drop schema shop cascade;
\c postgres
drop database ingest_to with (force);
drop role ingest_owner, ingest_nobody, ingest_admin;
