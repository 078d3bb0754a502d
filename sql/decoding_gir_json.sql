-- The format gir-json: the form of records, values of every kind, publications, filters, lists,
-- messages, options.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_json;
set search_path = dec_json, public;
-- Without what differs from run to run; the keys of an object come in jsonb's order.
create function objects(slot name, publications text, variadic options text[] default '{}') returns setof jsonb language sql as $$
  select data::jsonb #- '{transaction,xid}' #- '{transaction,lsn}' #- '{transaction,commit_time}' #- '{schema,oid}' #- '{schema,database}' #- '{schemas,0,oid}'
      #- '{schemas,0,database}' #- '{lsn}' #- '{end_lsn}' #- '{commit_time}' #- '{node_id}' #- '{system_identifier}' #- '{server_version}' #- '{database}'
  from pg_logical_slot_get_changes(slot, null, null, variadic array['format', 'gir-json', 'publication_names', publications] || options) $$;
-- Only the images.
create function images(slot name, publications text, variadic options text[] default '{}') returns table (operation text, before jsonb, after jsonb) language sql as $$
  select r->>'operation', r->'before', r->'after' from objects(slot, publications, variadic options) r where r ? 'after' $$;
create table t (id int primary key, note text);
create publication dec_json for tables in schema dec_json;
select 1 from pg_create_logical_replication_slot('dec_json', 'braid');

begin;
insert into t values (1, 'one'), (2, null);
update t set note = E'a\nb"c\\d\u0001é' where id = 1;
update t set id = 3 where id = 2;
delete from t where id = 3;
commit;
truncate t restart identity cascade;
select objects('dec_json', 'dec_json');
select objects('dec_json', 'dec_json');
-- It is text, and JSON to the last byte; the binary function gives the same.
insert into t values (1, 'x');
select (select string_agg(data, '|') from pg_logical_slot_peek_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json'))
     = (select string_agg(convert_from(data, 'UTF8'), '|') from pg_logical_slot_peek_binary_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json')) as same;
-- The binary format is not text.
\set VERBOSITY sqlstate
select pg_logical_slot_peek_changes('dec_json', null, null, 'format', 'gir', 'proto_version', '1', 'publication_names', 'dec_json');
\set VERBOSITY default
-- The records in it are those of the format gir.
select count(*), count(*) filter (where data::jsonb->'transaction'->>'lsn' = (select data::jsonb->>'lsn' from pg_logical_slot_peek_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json') where data like '{"operation":"commit"%'))
from pg_logical_slot_peek_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json');
-- What a client confirms on the way lies before the end of the transaction.
select data::jsonb->>'operation', lsn < (select max(lsn) from pg_logical_slot_peek_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json')) as before
from pg_logical_slot_peek_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json');
select count(*) from objects('dec_json', 'dec_json');

-- Options of its own.
insert into t values (2, 'y');
select r->'schema', r->'keys' is not null as keys, r->'barrier' from objects('dec_json', 'dec_json', 'schema', 'once', 'keys', 'on') r where r->>'operation' in ('schema', 'insert');
insert into t values (3, 'y');
select r->'schema' ? 'columns' as columns, r ? 'keys' as keys, r ? 'barrier' as barrier from objects('dec_json', 'dec_json', 'schema', 'each', 'keys', 'off') r where r->>'operation' = 'insert';

-- Values of every kind.
create type mood as enum ('sad', 'ok');
create type pair as (a int, b text);
create domain posint as int check (value > 0);
create table v (id int primary key, b bool, i2 int2, i8 int8, f4 float4, f8 float8, n numeric, c char(5), vc varchar(9), by bytea, d date, ti time, tz timetz,
  ts timestamp, tstz timestamptz, iv interval, u uuid, j json, jb jsonb, a int[], ta text[], e mood, p pair, dom posint, r int4range, m money, inet inet, o oid, ch "char", pt point);
insert into v values (1, true, -5, 9007199254740993, 0.1, 1e300, 12345678901234567890.123450, 'ab', 'c', '\xdeadbeef', '2024-02-29', '12:30:00.5', '12:30:00+05:30',
  '2024-02-29 12:30:00', '2024-02-29 12:30:00+00', '1 year 2 days 03:04:05', '00112233-4455-6677-8899-aabbccddeeff', '{"a": 1.0}', '{"a": 1.0}', '{1,null,3}', '{"a b",c}', 'ok', row(1, 'x,y'), 7, '[1,5)', 12.5,
  '10.0.0.1', 4294967295, 'q', '(1,2)'),
 (2, false, 32767, -9223372036854775808, 'NaN', '-Infinity', 'NaN', '', '', '', '0044-03-15 BC', '24:00', '00:00:00-15:59',
  'infinity', '-infinity', '0', null, 'null', 'null', '{}', '{}', 'sad', row(null, null), 1, 'empty', 0, '::1', 0, '', null),
 (3, null, null, 9007199254740991, '-0', '-0', 'Infinity', null, null, null, 'infinity', null, null, '294276-12-31 23:59:59.999999', '294276-12-31 23:59:59.999999+00', null, null, null, null, null, null, null, null, null, null, null, null, null, null, null);
select jsonb_pretty(after) from images('dec_json', 'dec_json');

-- Old rows and keys.
alter table t replica identity full;
update t set note = 'z' where id = 3;
delete from t where id = 3;
select r->>'operation', r->>'before_kind', r->'before', r->'after' from objects('dec_json', 'dec_json') r where r ? 'after';
alter table t replica identity default;

-- Unchanged TOAST columns are not there; null is.
create table big (id int primary key, n int, doc text);
alter table big alter doc set storage external;
insert into big values (1, 1, repeat('a', 5000)), (2, 1, null);
select count(*) from objects('dec_json', 'dec_json');
update big set n = 2;
select * from images('dec_json', 'dec_json');
drop table big, v;

-- Row filters, column lists, operations.
create table f (id int primary key, region text, secret text);
create publication dec_json_filtered for table f (id, region) where (id > 10) with (publish = 'insert, delete');
insert into f values (1, 'eu', 's'), (11, 'us', 's');
update f set region = 'jp';
delete from f;
select r->'schema'->'columns', r->'before', r->'after' from objects('dec_json', 'dec_json_filtered') r where r ? 'after';

-- Origins: nothing that came from elsewhere, unless asked for.
select 1 from pg_replication_origin_create('braid/osaka/1');
select pg_replication_origin_session_setup('braid/osaka/1');
begin;
select pg_replication_origin_xact_setup('0/1234', '2024-02-29 12:30:00+00');
insert into f values (20, 'eu', 's');
commit;
select pg_replication_origin_session_reset();
select count(*) from pg_logical_slot_peek_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json');
select data::jsonb->'transaction'->'origin', data::jsonb->'transaction'->'origin_lsn', data::jsonb->'transaction'->'commit_time'
  from pg_logical_slot_peek_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json', 'origin', 'any') where data like '{"operation":"insert"%';
select count(*) from pg_logical_slot_get_changes('dec_json', null, null, 'format', 'gir-json', 'publication_names', 'dec_json', 'origin', 'any', 'node', 'osaka');
select pg_replication_origin_drop('braid/osaka/1');

-- Messages.
begin;
select 1 from pg_logical_emit_message(true, 'app', 'inside');
select 1 from pg_logical_emit_message(false, 'app', '\xff00'::bytea);
insert into t values (50, 'm');
commit;
select r->>'operation', r->'transactional', r->'prefix', r->'content', r ? 'transaction' from objects('dec_json', 'dec_json', 'messages', 'on') r where r->>'operation' in ('message', 'insert');

-- Transactions in progress, in segments. Their number is up to the server; ids are numbered in
-- their order.
set logical_decoding_work_mem = '64kB';
create table w (id int primary key, v text, pad text);
alter table w alter pad set storage plain;
create publication dec_json_running for table w (id, v), table t;
select count(*) >= 0 from objects('dec_json', 'dec_json');
begin;
insert into w select i, 'own', repeat('p', 7000) from generate_series(1, 12) i;
savepoint a;
insert into w select i, 'kept', repeat('p', 7000) from generate_series(101, 112) i;
release a;
savepoint b;
insert into w select i, 'gone', repeat('p', 7000) from generate_series(201, 212) i;
rollback to b;
select 1 from pg_logical_emit_message(true, 'app', 'inside');
insert into w select i, 'own again', repeat('p', 7000) from generate_series(301, 312) i;
truncate t;
commit;
begin; insert into w select i, 'undone', repeat('p', 7000) from generate_series(401, 424) i; rollback;
insert into t values (60, 'small');
create function running(variadic options text[] default '{}') returns table (n bigint, r jsonb, xid bigint, subxid bigint) language sql as $$
  with o as materialized (select row_number() over () as n, data::jsonb as r
    from pg_logical_slot_peek_changes('dec_json', null, null, variadic array['format', 'gir-json', 'publication_names', 'dec_json_running', 'schema', 'once', 'messages', 'on'] || options)),
  ids as (select n, r, (coalesce(r->'xid', r#>'{running,xid}', r#>'{transaction,xid}'))::bigint as xid, (coalesce(r->'subxid', r#>'{running,subxid}'))::bigint as subxid from o),
  names as (select id, row_number() over (order by id) as name from (select xid as id from ids union select subxid from ids) i where id is not null)
  select n, r, (select name from names where id = xid), (select name from names where id = subxid) from ids $$;
-- In PostgreSQL 18 and later nothing is sent of a transaction that is known to be rolled back,
-- which has a number before.
create temp table streamed as select * from running('streaming', 'on') where not (r->>'operation' = 'insert' and coalesce(r#>>'{after,v}', '') in ('gone', 'undone'));
select r->>'operation' as operation, case when r->>'operation' <> 'begin' and r#>>'{after,note}' is distinct from 'small' then xid end as xid, subxid = xid as own, coalesce(r#>>'{after,v}', r#>>'{after,note}') as v, count(*) from streamed
  where r->>'operation' in ('insert', 'truncate', 'message', 'streamed_commit', 'begin', 'commit') group by 1, 2, 3, 4 order by min(n);
-- What is said of each.
select distinct r->>'operation' as operation, string_agg(key, ' ' order by key) from streamed, jsonb_object_keys(r) key where r->>'operation' not in ('stream', 'schema', 'abort') group by n, r order by 1, 2;
select distinct r->'running' ?& array['xid', 'subxid'] as running, r ? 'transaction' as transaction from streamed where r->'running' is not null;
-- Segments start and end in turn; the first of a transaction says so. A record names the
-- transaction of the following changes wherever it changes.
select count(*) > 2 as several, bool_and(next = 'segment_end') as in_turn, count(distinct r->'xid') = count(*) filter (where (r->>'first')::bool) as first
  from (select r, lead(r->>'operation') over (order by n) as next from streamed where r->>'operation' in ('segment_start', 'segment_end')) s where r->>'operation' = 'segment_start';
select bool_and(subxid = said) as told
  from (select *, (select m.xid from streamed m where m.n < s.n and m.r->>'operation' in ('segment_start', 'subtransaction') order by m.n desc limit 1) as said
    from streamed s) s where r ? 'running';
-- The same rows as without it.
select (select jsonb_agg(r->'after' order by r#>'{after,id}') from streamed where r->>'operation' = 'insert')
     = (select jsonb_agg(r->'after' order by r#>'{after,id}') from running() where r->>'operation' = 'insert') as same;
select count(*) from running() where r->>'operation' in ('segment_start', 'segment_end', 'subtransaction', 'abort', 'streamed_commit') or r ? 'running';
reset logical_decoding_work_mem;

-- Errors.
\set SHOW_CONTEXT never
\set attempt :abs_srcdir '/sql/include/try_options.sql'
\i :attempt
select try('dec_json', 'format', 'gir-json');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'schema', 'never');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'keys', '1');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'include-unchanged-toast', 'on');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'proto_version', '2');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'proto_version', '1');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'join_transactions', 'on');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'streaming', 'maybe');
-- Who looks a value up does not see what has not committed.
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'streaming', 'on', 'include-unchanged-toast', 'fetch');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'include-unchanged-toast', 'fetch', 'two_phase', 'on');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'streaming', 'off', 'two_phase', 'off', 'include-unchanged-toast', 'fetch');
select try('dec_json', 'format', 'gir-json', 'publication_names', 'dec_json', 'streaming', 'on', 'messages', 'on', 'unprepared', '1');

select pg_drop_replication_slot('dec_json');
set client_min_messages = warning;
drop publication dec_json, dec_json_filtered, dec_json_running;
drop schema dec_json cascade;
