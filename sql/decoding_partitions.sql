-- Partitions, published as themselves or as their root.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_part;
set search_path = dec_part, public;
create table root (id int, region text, v text, primary key (id, region)) partition by list (region);
create table north partition of root for values in ('north');
-- Another order of columns, and a dropped one.
create table south (v text, gone int, region text not null, id int not null, primary key (id, region));
alter table south drop column gone;
alter table root attach partition south for values in ('south');
create table east (id int not null, region text not null, v text, primary key (id, region)) partition by range (id);
create table east_low partition of east for values from (0) to (100);
alter table root attach partition east for values in ('east');
create publication dec_part_leaf for table root;
create publication dec_part_root for table root with (publish_via_partition_root = true);
create publication dec_part_east for table east with (publish_via_partition_root = true);
create publication dec_part_filter for table root (id, region) where (id < 10) with (publish_via_partition_root = true);
create publication dec_part_all for all tables with (publish_via_partition_root = true);
select 1 from pg_create_logical_replication_slot('dec_part', 'braid');
create procedure write() language sql as $$
  insert into dec_part.root values (1, 'north', 'a'), (2, 'south', 'b'), (3, 'east', 'c');
  update dec_part.root set v = 'x' where id = 2;
  update dec_part.root set region = 'south' where id = 1;
  update dec_part.root set id = 22 where id = 2;
  delete from dec_part.root;
  truncate dec_part.root;
$$;

call write();
select changes('dec_part', 'dec_part_leaf');
call write();
select changes('dec_part', 'dec_part_root');
call write();
select changes('dec_part', 'dec_part_east');
-- The topmost ancestor of all publications counts.
call write();
select changes('dec_part', 'dec_part_root,dec_part_east');
call write();
select changes('dec_part', 'dec_part_filter');
insert into root values (1, 'east', 'a');
select changes('dec_part', 'dec_part_all');
-- A partition that is detached is a table of its own.
insert into root values (4, 'south', 'in');
alter table root detach partition south;
insert into south (id, region, v) values (5, 'south', 'out');
select changes('dec_part', 'dec_part_root');
-- Truncated partitions are not sent under the root's name.
truncate north;
select changes('dec_part', 'dec_part_root');
truncate north;
select changes('dec_part', 'dec_part_leaf');

select pg_drop_replication_slot('dec_part');
set client_min_messages = warning;
drop publication dec_part_leaf, dec_part_root, dec_part_east, dec_part_filter, dec_part_all;
drop schema dec_part cascade;
