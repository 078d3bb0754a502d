-- Frames, transactions and what a stream starts with.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_stream;
set search_path = dec_stream, public;
create table t (id int primary key, v text);
create publication dec_stream for table t;
select 1 from pg_create_logical_replication_slot('dec_stream', 'braid');

-- A transaction is one frame, whatever it did; each call is a stream of its own.
insert into t values (1, 'one');
begin; insert into t values (2, 'two'); savepoint s; insert into t values (3, 'gone'); rollback to s;
savepoint s; update t set v = 'zwei' where id = 2; release s; delete from t where id = 1; commit;
select count(*) from pg_logical_slot_peek_binary_changes('dec_stream', null, null, 'proto_version', '1', 'publication_names', 'dec_stream');
select records('dec_stream', 'dec_stream');
-- Nothing is left, and what is not published sends nothing at all.
create table other (id int primary key);
insert into other values (1);
begin; insert into t values (9, 'aborted'); rollback;
select count(*) from pg_logical_slot_get_binary_changes('dec_stream', null, null, 'proto_version', '1', 'publication_names', 'dec_stream');
insert into t values (3, 'three');
select records('dec_stream', 'dec_stream');

-- A large transaction is cut into frames of whole records; strung together they are the
-- transaction.
begin; insert into t select i, repeat('x', 1000) from generate_series(1000, 1999) i; commit;
select count(*) between 3 and 6 as cut, max(length(data)) < 300000 as bounded
from pg_logical_slot_peek_binary_changes('dec_stream', null, null, 'proto_version', '1', 'publication_names', 'dec_stream');
select substring(line for 6) as record, count(*) from records('dec_stream', 'dec_stream') as line group by 1 order by 2, 1;

-- A single row beyond that is one frame, and the next ones are small again.
insert into t values (5000, repeat('y', 3000000));
insert into t values (5001, 'small');
select length(data) > 3000000 as huge from pg_logical_slot_get_binary_changes('dec_stream', null, null, 'proto_version', '1', 'publication_names', 'dec_stream');

-- Transactions with their first change in a table of another schema than the search path's, and
-- quoted names.
create table "Odd ""name" ("Id" int primary key, "select" text);
alter publication dec_stream add table "Odd ""name";
insert into "Odd ""name" values (1, 'x');
select records('dec_stream', 'dec_stream');

select pg_drop_replication_slot('dec_stream');
set client_min_messages = warning;
drop publication dec_stream;
drop schema dec_stream cascade;

-- The stream says which node speaks, once there is one.
create database dec_stream;
\c dec_stream
\set ECHO none
\i :prelude
\set ECHO all
\set dsn 'host=' :HOST ' port=' :PORT ' user=' :USER ' dbname=dec_stream'
set client_min_messages = warning;
select braid.create_node('tokyo', :'dsn') is not null as created;
create table t (id int primary key);
create publication dec_stream for all tables;
select 1 from pg_create_logical_replication_slot('dec_stream', 'braid');
insert into t values (1);
select records('dec_stream', 'dec_stream');
select pg_drop_replication_slot('dec_stream');
\c regression
drop database dec_stream with (force);
