-- Whose transactions are sent: origins.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_origin;
set search_path = dec_origin, public;
create table t (id int primary key, v text);
create publication dec_origin for table t;
select 1 from pg_create_logical_replication_slot('dec_origin', 'braid');
select 1 from pg_replication_origin_create('braid/tokyo/1');
select 1 from pg_replication_origin_create('braid/tokyo/x');
select 1 from pg_replication_origin_create('elsewhere');
create procedure write_as(origin text, row_id int) language plpgsql as $$ begin
  if origin is not null then perform pg_replication_origin_session_setup(origin);
    perform pg_replication_origin_xact_setup('AA/11', '2020-01-01 00:00:00+00'); end if;
  insert into dec_origin.t values (row_id, origin);
  commit;
  if origin is not null then perform pg_replication_origin_session_reset(); end if;
end $$;
create procedure write(first int) language plpgsql as $$ begin
  call dec_origin.write_as(null, first);
  call dec_origin.write_as('braid/tokyo/1', first + 1);
  call dec_origin.write_as('braid/tokyo/x', first + 2);
  call dec_origin.write_as('elsewhere', first + 3);
end $$;

-- By default only what was first committed here.
call write(10);
select records('dec_origin', 'dec_origin');
call write(20);
select records('dec_origin', 'dec_origin', 'origin', 'none');
call write(30);
select records('dec_origin', 'dec_origin', 'origin', 'any');
-- Nothing goes back to its own node.
call write(40);
select records('dec_origin', 'dec_origin', 'origin', 'any', 'node', 'tokyo');
-- The commit's LSN and time are the origin's.
call write_as('braid/tokyo/1', 50);
create function little_endian(n int8) returns bytea language sql as $$
  select string_agg(substring(int8send(n) from i for 1), '' order by i desc) from generate_series(1, 8) i $$;
select position('\x11000000aa000000'::bytea in data) > 0 as lsn,
  position(little_endian((extract(epoch from timestamptz '2020-01-01 00:00:00+00') * 1000000)::int8) in data) > 0 as timestamp
from pg_logical_slot_peek_binary_changes('dec_origin', null, null, 'proto_version', '1', 'publication_names', 'dec_origin', 'origin', 'any');
-- One other node's alone, behind a position in its WAL.
call write(70);
select records('dec_origin', 'dec_origin', 'origin', 'any', 'only_origin', 'tokyo', 'only_after', 'AA/10');
call write(80);
select records('dec_origin', 'dec_origin', 'origin', 'any', 'only_origin', 'tokyo', 'only_after', 'AA/11');
call write(90);
select records('dec_origin', 'dec_origin', 'origin', 'any', 'only_origin', 'paris');
call write(100);
select records('dec_origin', 'dec_origin', 'origin', 'any', 'only_origin', 'tokyo');
select records('dec_origin', 'dec_origin', 'only_origin', 'tokyo');
select records('dec_origin', 'dec_origin', 'origin', 'any', 'only_after', 'AA/11');
-- An origin that is gone by now is still known at its time.
select pg_replication_origin_drop('braid/tokyo/1');
select records('dec_origin', 'dec_origin', 'origin', 'any');
-- One that the very transaction has made is known, and so is what follows it.
begin;
select pg_replication_origin_create('braid/lima/1') > 0;
select pg_replication_origin_session_setup('braid/lima/1');
select pg_replication_origin_xact_setup('AA/22', '2020-01-01 00:00:00+00');
insert into t values (60, 'lima');
commit;
select pg_replication_origin_session_reset();
call write_as('braid/lima/1', 61);
select records('dec_origin', 'dec_origin', 'origin', 'any');
select pg_replication_origin_drop('braid/lima/1');
select pg_replication_origin_drop('braid/tokyo/x');
select pg_replication_origin_drop('elsewhere');

select pg_drop_replication_slot('dec_origin');
set client_min_messages = warning;
drop publication dec_origin;
drop schema dec_origin cascade;
