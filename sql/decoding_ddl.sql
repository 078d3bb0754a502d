-- Tables that change between changes.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_ddl;
set search_path = dec_ddl, public;
create table t (id int primary key, a text, b int);
create publication dec_ddl for tables in schema dec_ddl;
select 1 from pg_create_logical_replication_slot('dec_ddl', 'braid');

insert into t values (1, 'a', 1);
alter table t add c text default 'new';
-- Rows from before the column have its default.
update t set b = 2;
insert into t values (2, 'a', 2, null);
alter table t drop column a;
update t set b = 3 where id = 1;
alter table t rename b to bb;
insert into t values (3, 3, 'c');
alter table t alter bb type numeric(10, 2);
insert into t values (4, 4, 'c');
alter table t alter id type bigint;
update t set id = 5 where id = 4;
alter table t add d int not null default 7;
insert into t values (6, 6, 'c', 8);
select changes('dec_ddl', 'dec_ddl');

-- In one transaction, with rows before and after.
begin;
insert into t values (7, 7, 'c', 1);
alter table t drop column d;
insert into t values (8, 8, 'c');
alter table t add e int[] default '{1,2}';
insert into t values (9, 9, 'c');
savepoint s;
alter table t add f int;
insert into t values (10, 10, 'c', null, 1);
rollback to s;
insert into t values (11, 11, 'c', null);
commit;
select changes('dec_ddl', 'dec_ddl');

-- A schema record is not sent again for what changes nothing of it.
insert into t values (20);
analyze t;
create index on t (bb);
insert into t values (21);
vacuum t;
grant select on t to public;
insert into t values (22);
alter table t set (fillfactor = 50);
create table unrelated (id int primary key);
insert into t values (23);
select changes('dec_ddl', 'dec_ddl');
-- A new unique index gives a new key, and a barrier to changes without it; a rewritten table is the
-- same one.
delete from t;
create unique index t_bb on t (bb);
insert into t values (30, 30);
drop index t_bb;
insert into t values (31, 31);
truncate t;
insert into t values (32, 32);
select changes('dec_ddl', 'dec_ddl');
-- A materialized view's rows, and those of a table that is rewritten, are not changes.
create materialized view mv as select id from t;
refresh materialized view mv;
alter table t alter bb type text;
select changes('dec_ddl', 'dec_ddl');
-- Dropped and made anew under the same name.
insert into t values (40, 'x');
drop materialized view mv;
drop table t;
create table t (id text primary key);
insert into t values ('new');
select changes('dec_ddl', 'dec_ddl');

select pg_drop_replication_slot('dec_ddl');
set client_min_messages = warning;
drop publication dec_ddl;
drop schema dec_ddl cascade;
