-- Statements that change the schema: which are captured, with which text and tables, the rights for
-- that, and where they are sent; braid.replicate_ddl.
\a
\t
set client_min_messages = warning;
drop extension if exists braid cascade;
create extension braid;
create role braid_regress_ddl;
create schema ddl;
grant all on schema ddl to braid_regress_ddl;
set search_path = ddl, public;
create view log as select state, command_tag, statement, case role when session_user then 'me' else role end as role, tables, publications from braid.ddl_log order by recorded_at, ddl_id;

-- Not a node yet, then nobody to tell.
set braid.ddl_replication = on;
create table before_node (id int primary key);
select braid.create_node('here', 'dbname=nowhere');
create table before_publication (id int primary key);
select count(*) from braid.ddl_log;
select braid.replicate_ddl('create table ddl.by_hand (id int)');
select count(*) from braid.ddl_log;
drop table by_hand;

-- A publication of one table: statements about it.
create table listed (id int primary key, note text);
create table unlisted (id int primary key);
create publication ddl_one for table listed;
alter table listed add column n int;
alter table unlisted add column n int;
create index on listed (n);
comment on index listed_n_idx is 'x';
create function f() returns int language sql as 'select 1';
drop table unlisted;
select * from log;
set braid.ddl_replication = off;
delete from braid.ddl_entry;
set braid.ddl_replication = on;

-- A publication of a schema: what is made in it.
create publication ddl_schema for tables in schema ddl;
create table made (id serial primary key);
create table public.elsewhere (id int);
create type mood as enum ('a');
select * from log;
delete from braid.ddl_entry;
drop table public.elsewhere;

-- All tables: everything.
create publication ddl_all for all tables;
create type other_mood as enum ('a');
alter table listed rename to renamed;
alter table renamed rename note to text;
begin; create table gone (id int); savepoint s; create table gone2 (id int); rollback to s; create table kept (id int); rollback;
do $$ begin
    begin execute 'create table gone3 (id int)'; raise exception 'x'; exception when raise_exception then null; end;
    execute 'create table stays (id int)';
end $$;
create table one (id int); create table two (id int) ;
select 1 as a, 'b'::text as b into asked;
create table as_two with (fillfactor = 50) as select * from asked with no data;
create temp table t (id int);
create index on t (id);
drop table t, two;
set braid.ddl_replication = off;
create table quiet (id int);
reset braid.ddl_replication;
create table quiet2 (id int);
set braid.ddl_replication = on;
set role braid_regress_ddl;
create table ddl.owned (id int);
set braid.ddl_replication = off;
\echo :SQLSTATE
select count(*) from braid.ddl_log;
\echo :SQLSTATE
insert into braid.ddl_message values ('00');
\echo :SQLSTATE
select braid.replicate_ddl('create table x (id int)');
\echo :SQLSTATE
reset role;
select state, command_tag, statement, role, tables from log;
select column_name, column_number from braid.former_column;
select table_name, relation::regclass from braid.former_table;
select count(*) from braid.ddl_message;

-- What runs inside of a statement follows it.
create function on_end() returns event_trigger language plpgsql as $$ begin
    if tg_tag = 'CREATE TABLE' then execute 'comment on table ddl.watched is ''seen'''; end if; end $$;
create event trigger braid_regress_end on ddl_command_end when tag in ('CREATE TABLE') execute function on_end();
delete from braid.ddl_entry;
create table watched (id int);
drop event trigger braid_regress_end;
select command_tag, statement from log;

-- What is sent: to whom asks, of the publications that concern it.
select 1 from pg_create_logical_replication_slot('ddl_slot', 'braid');
create function messages(variadic options text[]) returns bigint language sql as $$
  select count(*) from pg_logical_slot_peek_changes('ddl_slot', null, null, variadic array['format', 'gir-json'] || options) where data like '%"braid.ddl"%' $$;
alter table renamed add column sent int;
create domain sent as int;
select messages('publication_names', 'ddl_all', 'ddl', 'on'), messages('publication_names', 'ddl_one', 'ddl', 'on'),
       messages('publication_names', 'ddl_all'), messages('publication_names', 'ddl_all', 'ddl', 'on', 'node', 'here');
select messages('publication_names', 'ddl_all', 'ddl', 'maybe');
\echo :SQLSTATE
select pg_drop_replication_slot('ddl_slot');

-- By hand.
select braid.replicate_ddl(null);
\echo :SQLSTATE
select braid.replicate_ddl('select 1');
\echo :SQLSTATE
select braid.replicate_ddl('create table a (id int); create table b (id int)');
\echo :SQLSTATE
-- Its words are PostgreSQL's, and differ between majors.
\set VERBOSITY sqlstate
select braid.replicate_ddl('vacuum');
\set VERBOSITY default
\echo :SQLSTATE
select braid.replicate_ddl('create tabel');
\echo :SQLSTATE
delete from braid.ddl_entry;
select braid.replicate_ddl('create table by_hand (id int)');
select * from log;

-- Shapes.
create table shaped (id int generated always as identity primary key, a numeric(5, 2) default 1 not null, t text collate "C", g int generated always as (id + 1) stored,
    constraint positive check (a > 0), unique (t) deferrable);
create index on shaped (lower(t)) where a > 1;
alter table shaped replica identity full, enable row level security;
create policy p on shaped for select to braid_regress_ddl using (id > 1);
select unnest(braid.table_shape('shaped'));
create table parted (id int, at date) partition by range (at);
create table parted_24 partition of parted for values from ('2024-01-01') to ('2025-01-01');
select unnest(braid.table_shape('parted'));
select unnest(braid.table_shape('parted_24'));

set braid.ddl_replication = off;
drop publication ddl_one, ddl_schema, ddl_all;
select braid.drop_node('here');
drop schema ddl cascade;
drop role braid_regress_ddl;
drop extension braid;
