-- Column lists, and what is done about generated and dropped columns.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_cols;
set search_path = dec_cols, public;
create table t (id int primary key, a text, gone int, b text, g int generated always as (id * 2) stored, c text);
alter table t drop column gone;
create publication dec_cols_all for table t;
create publication dec_cols_list for table t (b, id);
create publication dec_cols_same for table t (id, b);
create publication dec_cols_other for table t (id, c);
create publication dec_cols_each for table t (id, a, b, c);
select 1 from pg_create_logical_replication_slot('dec_cols', 'braid');

insert into t values (1, 'a', 'b', default, 'c');
update t set id = 2, a = 'A';
delete from t;
select changes('dec_cols', 'dec_cols_all');
insert into t values (1, 'a', 'b', default, 'c');
update t set id = 2, a = 'A';
delete from t;
select changes('dec_cols', 'dec_cols_list,dec_cols_same');
-- The before image has no other columns either.
alter table t replica identity full;
create publication dec_cols_insert for table t (id, b) with (publish = 'insert');
insert into t values (1, 'a', 'b', default, 'c');
select changes('dec_cols', 'dec_cols_insert');
alter table t replica identity default;
truncate t;
-- A list of all columns is none; others must agree.
insert into t values (1, 'a', 'b', default, 'c');
select changes('dec_cols', 'dec_cols_all,dec_cols_each');
insert into t values (2, 'a', 'b', default, 'c');
\set SHOW_CONTEXT never
select changes('dec_cols', 'dec_cols_list,dec_cols_other');
\echo :LAST_ERROR_SQLSTATE
select changes('dec_cols', 'dec_cols_list,dec_cols_all');
select changes('dec_cols', 'dec_cols_list');

select pg_drop_replication_slot('dec_cols');
set client_min_messages = warning;
drop publication dec_cols_all, dec_cols_list, dec_cols_same, dec_cols_other, dec_cols_each, dec_cols_insert;
drop schema dec_cols cascade;
