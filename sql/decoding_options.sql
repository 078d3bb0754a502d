-- Options of the plugin, and their errors.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_opt;
set search_path = dec_opt, public;
create table t (id int primary key);
create publication dec_opt for table t;
select 1 from pg_create_logical_replication_slot('dec_opt', 'braid');
insert into t values (1);
\set SHOW_CONTEXT never
\set attempt :abs_srcdir '/sql/include/try_options.sql'
\i :attempt
select try('dec_opt', 'proto_version', '1', 'publication_names', 'dec_opt');
select try('dec_opt', 'proto_version', '1', 'publication_names', 'dec_opt', 'origin', 'any', 'node', 'n', 'messages', 'off');
select try('dec_opt', 'publication_names', 'dec_opt');
select try('dec_opt', 'proto_version', '1');
select try('dec_opt', 'proto_version', '2', 'publication_names', 'dec_opt');
select try('dec_opt', 'proto_version', 'x', 'publication_names', 'dec_opt');
select try('dec_opt', 'proto_version', '1', 'publication_names', '');
select try('dec_opt', 'proto_version', '1', 'publication_names', 'a b');
select try('dec_opt', 'proto_version', '1', 'publication_names', '"a');
select try('dec_opt', 'proto_version', '1', 'publication_names', 'dec_opt', 'origin', 'local');
select try('dec_opt', 'proto_version', '1', 'publication_names', 'dec_opt', 'messages', 'maybe');
select try('dec_opt', 'proto_version', '1', 'publication_names', 'dec_opt', 'streaming', 'on');
select try('dec_opt', 'proto_version', '1', 'publication_names', 'dec_opt', 'stream', 'on');
select try('dec_opt', 'proto_version', '1', 'publication_names', 'dec_missing');
-- An error leaves the session's settings as they were.
show search_path;
show datestyle;
-- Frames are binary.
select count(*) from pg_logical_slot_peek_changes('dec_opt', null, null, 'proto_version', '1', 'publication_names', 'dec_opt');
\echo :LAST_ERROR_SQLSTATE
select try('dec_opt', 'proto_version', '1', 'publication_names', 'dec_opt');

-- What is not GIR is an error.
select braid.gir_records('\x');
select braid.gir_records('\x5a');

select pg_drop_replication_slot('dec_opt');
set client_min_messages = warning;
drop publication dec_opt;
drop schema dec_opt cascade;
