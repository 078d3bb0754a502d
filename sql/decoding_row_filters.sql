-- Row filters: rows that enter and leave, several publications, nulls, TOAST.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_filter;
set search_path = dec_filter, public;
create table t (id int primary key, v int, s text);
create publication dec_filter_10 for table t where (id > 10);
create publication dec_filter_even for table t where (id % 2 = 0);
create publication dec_filter_ins for table t where (v > 100) with (publish = 'insert');
create publication dec_filter_none for table t with (publish = 'delete');
select 1 from pg_create_logical_replication_slot('dec_filter', 'braid');
create procedure write() language plpgsql as $$ begin
  insert into t values (1, 1, 'a'), (11, 1, 'b'), (20, 1, 'c'), (2, 1000, 'd'), (3, null, 'e');
  update t set v = v + 1;
  update t set id = 5 where id = 11;      -- leaves "> 10"
  update t set id = 15 where id = 1;      -- enters
  update t set id = 31 where id = 20;     -- stays
  update t set id = 7 where id = 5;       -- stays outside
  delete from t;
end $$;

call write();
select changes('dec_filter', 'dec_filter_10');
-- One of several is enough.
call write();
select changes('dec_filter', 'dec_filter_10,dec_filter_even');
-- A filter counts for the operations of its publication; null is false.
call write();
select changes('dec_filter', 'dec_filter_ins');
-- One without a filter lifts it for its operations.
call write();
select changes('dec_filter', 'dec_filter_10,dec_filter_none');
-- A changed filter counts from there on.
insert into t values (12, 1, 'x');
alter publication dec_filter_10 set table t where (id > 100);
insert into t values (13, 1, 'x'), (113, 1, 'y');
select changes('dec_filter', 'dec_filter_10');

-- An unchanged key that is stored out of line is taken from the old row, also when the update
-- becomes an insert.
create table wide (id int, k text, v text, primary key (id, k));
alter table wide alter k set storage external;
create publication dec_filter_wide for table wide where (id > 10 and length(k) > 1000);
insert into wide values (1, repeat('k', 2500), 'v');
update wide set id = 11;
update wide set id = 12;
update wide set id = 2;
select regexp_replace(line, 'k{200,}', '<long>', 'g') from changes('dec_filter', 'dec_filter_wide') as line;

-- The whole row is there with REPLICA IDENTITY FULL.
alter table t replica identity full;
create publication dec_filter_full for table t where (s = 'in');
truncate t;
insert into t values (1, 1, 'in');
update t set s = 'out';
update t set s = 'in';
update t set v = null;
delete from t;
select changes('dec_filter', 'dec_filter_full');

select pg_drop_replication_slot('dec_filter');
set client_min_messages = warning;
drop publication dec_filter_10, dec_filter_even, dec_filter_ins, dec_filter_none, dec_filter_wide, dec_filter_full;
drop schema dec_filter cascade;
