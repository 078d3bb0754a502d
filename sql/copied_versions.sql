-- The queries of another node that copies a table: read by index, so that the copies of many tables
-- read each deletion once.
\a
\t
set client_min_messages = warning;
drop extension if exists braid cascade;
create extension braid;
select braid.create_node('shop', 'dbname=' || current_database());
create table public.many (id int primary key);
create table public.parted (id int primary key) partition by range (id);
create table public.part_1 partition of public.parted for values from (0) to (10);
create table public.part_2 partition of public.parted for values from (10) to (20);
-- what is known of two hundred other tables
insert into braid.tombstone select h, 1000000 * h, r, 0 from generate_series(1, 100) h, generate_series(1, 200) r;
insert into braid.tombstone values (1, 5000000, 'public.many'::regclass, 0), (2, 50000000, 'public.many'::regclass, 0),
    (3, 60000000, 'public.part_1'::regclass, 0), (4, 70000000, 'public.part_2'::regclass, 0);
insert into braid.taken_row select h, 1000000 * h, r, 0, 0, 0 from generate_series(1, 100) h, generate_series(1, 200) r;
insert into braid.taken_row values (5, 50000000, 'public.many'::regclass, 0, 40000000, 0);
insert into braid.column_write select h, 1000000 * h, r, 0, null from generate_series(1, 100) h, generate_series(1, 200) r;
insert into braid.column_write values (6, 50000000, 'public.many'::regclass, 0, '{1}');
analyze braid.tombstone, braid.taken_row, braid.column_write;
create view public.looks as select relname, seq_scan, idx_tup_fetch from pg_stat_xact_all_tables
 where relid in ('braid.tombstone'::regclass, 'braid.taken_row'::regclass, 'braid.column_write'::regclass);
begin;
create temporary table before as select * from public.looks;
select * from braid.copied_deletions('public.many'::regclass, to_timestamp(10)) order by 1;
select * from braid.copied_deletions('public.parted'::regclass, to_timestamp(10)) order by 1;
select * from braid.copied_taken_rows('public.many'::regclass, to_timestamp(10));
select * from braid.copied_columns('public.many'::regclass, to_timestamp(10));
-- how often each was read as a whole, and how many rows were looked at
select relname, l.seq_scan - b.seq_scan, l.idx_tup_fetch - b.idx_tup_fetch from public.looks l join before b using (relname) order by relname collate "C";
commit;
drop view public.looks;
drop extension braid cascade;
drop table public.many, public.parted;
