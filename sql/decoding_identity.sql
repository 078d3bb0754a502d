-- Replica identities, before images, and the keys by which changes are ordered.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_ident;
set search_path = dec_ident, public;
create publication dec_ident for tables in schema dec_ident;
create publication dec_ident_insert for tables in schema dec_ident with (publish = 'insert, truncate');
select 1 from pg_create_logical_replication_slot('dec_ident', 'braid');

-- Default: the primary key, with it only when it changes.
create table pk (a int, v text, b int, primary key (b, a));
insert into pk values (1, 'x', 2);
update pk set v = 'y';
update pk set a = 3;
delete from pk;
select changes('dec_ident', 'dec_ident');

-- A chosen index.
create table idx (a int primary key, u text not null, v text);
create unique index idx_u on idx (u);
alter table idx replica identity using index idx_u;
insert into idx values (1, 'u', 'x');
update idx set v = 'y';
update idx set u = 'w';
delete from idx;
select changes('dec_ident', 'dec_ident');

-- The whole row, with and without a primary key.
create table whole (a int, v text);
alter table whole replica identity full;
insert into whole values (1, 'x');
update whole set v = 'y';
delete from whole;
select changes('dec_ident', 'dec_ident');
create table whole_pk (a int primary key, v text unique);
alter table whole_pk replica identity full;
insert into whole_pk values (1, 'x'), (2, null);
update whole_pk set v = 'y' where a = 1;
update whole_pk set a = 3 where a = 2;
delete from whole_pk;
select changes('dec_ident', 'dec_ident');

-- None: PostgreSQL refuses updates and deletes of what is published that way, and nothing else.
create table none (a int);
insert into none values (1);
update none set a = 2;
delete from none;
alter publication dec_ident drop tables in schema dec_ident;
update none set a = 3;
delete from none;
insert into none values (4);
select changes('dec_ident', 'dec_ident_insert');
alter publication dec_ident add tables in schema dec_ident;

-- Changing the identity changes the schema record.
create table changing (a int primary key, b int not null unique);
insert into changing values (1, 2);
alter table changing replica identity full;
update changing set b = 3;
alter table changing replica identity using index changing_b_key;
update changing set b = 4;
alter table changing replica identity nothing;
insert into changing values (5, 5);
select changes('dec_ident', 'dec_ident');

-- A second unique key: an update or delete gives up a key that WAL does not have, so it orders with
-- the whole table.
create table two (a int primary key, b text unique, c text);
insert into two values (1, 'b', 'c'), (2, null, 'c');
update two set c = 'd' where a = 1;
delete from two;
-- Nulls that are not distinct are a key.
create table nnd (a int primary key, b int unique nulls not distinct);
insert into nnd values (1, null);
-- An index within the replica identity is known; a partial one is taken as if it were whole.
create table within (a int, b int, primary key (a, b), unique (b, a));
create unique index within_a on within (a) where b > 0;
insert into within values (1, 1);
create table only_within (a int, b int, c int, primary key (a, b));
create unique index only_within_b on only_within (b);
insert into only_within values (1, 1, 1);
update only_within set c = 2;
update only_within set a = 2;
-- What can't be computed orders with the whole table.
create table expr (a int primary key, b text);
create unique index expr_b on expr (lower(b));
insert into expr values (1, 'x');
create table excl (a int primary key, r int4range, exclude using gist (r with &&));
insert into excl values (1, '[1,2)');
create table point_key (a int primary key, p int, unique (p) include (a));
insert into point_key values (1, 1);
select line from changes('dec_ident', 'dec_ident') as line where line !~ '^SCHEMA';

select pg_drop_replication_slot('dec_ident');
set client_min_messages = warning;
drop publication dec_ident, dec_ident_insert;
drop schema dec_ident cascade;
