-- Generated columns, of which PostgreSQL 18 can publish the stored ones. The test ends here for
-- older versions: decoding_generated_1.out.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
select current_setting('server_version_num')::int < 180000 as old \gset
\if :old
\quit
\endif
create schema dec_gen;
set search_path = dec_gen, public;
create table t (id int primary key, s int generated always as (id * 2) stored, v int generated always as (id * 3) virtual);
create publication dec_gen_stored for table t with (publish_generated_columns = stored);
create publication dec_gen_none for table t;
create publication dec_gen_list for table t (id, s);
create publication dec_gen_filter for table t where (v > 100);
select 1 from pg_create_logical_replication_slot('dec_gen', 'braid');
insert into t values (1);
select changes('dec_gen', 'dec_gen_stored');
insert into t values (2);
select changes('dec_gen', 'dec_gen_none');
insert into t values (3);
select changes('dec_gen', 'dec_gen_list');
-- A list of all columns is none.
insert into t values (4);
select changes('dec_gen', 'dec_gen_stored,dec_gen_list');
insert into t values (5);
\set SHOW_CONTEXT never
select changes('dec_gen', 'dec_gen_stored,dec_gen_none');
\echo :LAST_ERROR_SQLSTATE
select changes('dec_gen', 'dec_gen_none,dec_gen_list');
insert into t values (33), (34);
select changes('dec_gen', 'dec_gen_filter');
select pg_drop_replication_slot('dec_gen');
set client_min_messages = warning;
drop publication dec_gen_stored, dec_gen_none, dec_gen_list, dec_gen_filter;
drop schema dec_gen cascade;
