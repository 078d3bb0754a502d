-- TRUNCATE, and logical messages.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_trunc;
set search_path = dec_trunc, public;
create table a (id serial primary key);
create table b (id int primary key, a int references a);
create table c (id int primary key);
create publication dec_trunc for table a, b;
create publication dec_trunc_not for table a, b, c with (publish = 'insert');
select 1 from pg_create_logical_replication_slot('dec_trunc', 'braid');

truncate a, b, c;
truncate c;
truncate a restart identity cascade;
begin; insert into c values (1); truncate b; insert into b values (1); commit;
select records('dec_trunc', 'dec_trunc');
truncate a, b, c;
select records('dec_trunc', 'dec_trunc_not');

-- Messages come when asked for.
begin;
select 1 from pg_logical_emit_message(true, 'braid test', 'in the transaction');
select 1 from pg_logical_emit_message(false, 'braid test', 'before the transaction');
insert into b values (2);
commit;
begin;
select 1 from pg_logical_emit_message(true, 'braid test', 'rolled back');
select 1 from pg_logical_emit_message(false, 'braid test', 'not rolled back'::bytea);
rollback;
select 1 from pg_logical_emit_message(true, 'braid test', '\x00ff'::bytea);
select 1 from pg_logical_emit_message(true, '', '');
select count(*) from pg_logical_slot_peek_binary_changes('dec_trunc', null, null, 'proto_version', '1', 'publication_names', 'dec_trunc');
select count(*) from pg_logical_slot_peek_binary_changes('dec_trunc', null, null, 'proto_version', '1', 'publication_names', 'dec_trunc', 'messages', 'on');
select records('dec_trunc', 'dec_trunc', 'messages', 'on');
-- A message as the first record of a stream, outside of any transaction.
select 1 from pg_logical_emit_message(false, 'braid test', 'first');
insert into c values (9);
select records('dec_trunc', 'dec_trunc', 'messages', 'on');

select pg_drop_replication_slot('dec_trunc');
set client_min_messages = warning;
drop publication dec_trunc, dec_trunc_not;
drop schema dec_trunc cascade;
