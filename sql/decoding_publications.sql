-- Which relations and which operations are published.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_pub;
create schema dec_pub_other;
set search_path = dec_pub, public;
create table a (id int primary key);
create table b (id int primary key);
create table dec_pub_other.c (id int primary key);
create table braid.own (id int primary key);
create unlogged table u (id int primary key);
create publication dec_pub_a for table a;
create publication dec_pub_schema for tables in schema dec_pub_other;
create publication dec_pub_all for all tables;
create publication dec_pub_insert for table a with (publish = 'insert');
create publication dec_pub_delete for table a with (publish = 'delete');
select 1 from pg_create_logical_replication_slot('dec_pub', 'braid');
create procedure write() language sql as $$
  insert into dec_pub.a values (1); update dec_pub.a set id = 2; delete from dec_pub.a; truncate dec_pub.a;
  insert into dec_pub.b values (1); delete from dec_pub.b;
  insert into dec_pub_other.c values (1); delete from dec_pub_other.c;
  insert into braid.own values (1); delete from braid.own;
  insert into dec_pub.u values (1); delete from dec_pub.u;
$$;
create temp table tt (id int primary key);
insert into tt values (1);

call write();
select changes('dec_pub', 'dec_pub_a');
call write();
select changes('dec_pub', 'dec_pub_schema');
-- The extension's own tables are never published.
call write();
select changes('dec_pub', 'dec_pub_all');
call write();
select changes('dec_pub', 'dec_pub_insert');
call write();
select changes('dec_pub', 'dec_pub_insert,dec_pub_delete');

-- Membership is that of the moment of the change.
insert into a values (10);
alter publication dec_pub_a drop table a;
insert into a values (11);
alter publication dec_pub_a add table a;
insert into a values (12);
alter publication dec_pub_a set (publish = 'update');
insert into a values (13);
alter publication dec_pub_a set (publish = 'insert');
insert into a values (14);
select changes('dec_pub', 'dec_pub_a');
create table dec_pub_other.d (id int primary key);
insert into dec_pub_other.d values (1);
alter table dec_pub_other.d set schema dec_pub;
insert into dec_pub.d values (2);
select changes('dec_pub', 'dec_pub_schema');
-- Renamed tables and schemas.
insert into dec_pub_other.c values (1);
alter table dec_pub_other.c rename to e;
insert into dec_pub_other.e values (2);
alter schema dec_pub_other rename to dec_pub_third;
insert into dec_pub_third.e values (3);
select changes('dec_pub', 'dec_pub_schema');

-- A publication that does not exist is an error, also when another does.
insert into a values (20);
\set SHOW_CONTEXT never
select changes('dec_pub', 'dec_pub_a,dec_pub_missing');
\echo :LAST_ERROR_SQLSTATE
-- Also one that did not exist at the moment of the change. Names are identifiers.
create publication "Dec ""Pub" for table a;
select changes('dec_pub', '"Dec ""Pub"');
select changes('dec_pub', 'dec_pub_a');
insert into a values (21);
select changes('dec_pub', '"Dec ""Pub", DEC_PUB_DELETE');

select pg_drop_replication_slot('dec_pub');
set client_min_messages = warning;
drop publication dec_pub_a, dec_pub_schema, dec_pub_all, dec_pub_insert, dec_pub_delete, "Dec ""Pub";
drop table braid.own;
drop schema dec_pub, dec_pub_third cascade;
