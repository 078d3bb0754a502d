-- Versioned tables, as far as one session can show: what is refused, and each way to use a table
-- that was not declared. t/290_versions.pl has sessions that wait for each other.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
\set SHOW_CONTEXT never
\set VERBOSITY default
create role braid_regress_clerk;
create schema shop;
create table stock (id int primary key, amount int not null);
create table accounts (id int primary key, amount int not null);
create table shop.stock (id int primary key, v text);
create table note (v text);
create table item (id int primary key, stock_id int references stock on delete cascade);
create table part (id int primary key) partition by range (id);
create table part_1 partition of part for values from (1) to (10);
create table parent (id int);
create table child () inherits (parent);
create unlogged table unlogged (id int);
create temporary table temporary (id int);
create view stock_view as select * from stock;
create sequence numbers;
create publication filtered for table note where (v <> '');
insert into stock values (1, 100), (2, 200);
insert into accounts values (1, 10);
grant select on note, stock to braid_regress_clerk;

-- no group
select braid.version_table('stock');
\echo :SQLSTATE
select braid.unversion_table('stock');
\echo :SQLSTATE
begin isolation level repeatable read;
set local braid.versions = 'write stock';
\echo :SQLSTATE
rollback;
call braid.read_current('stock');
\echo :SQLSTATE
select braid.declare('select * from stock') = '';
select * from braid.table_versions;

select braid.create_group('shop', node_name => 'here', dsn => :'here') \g /dev/null
select braid.wait_for_group('60 s') \g /dev/null

-- tables that can't be versioned
select braid.version_table(null);
\echo :SQLSTATE
select braid.version_table(0);
\echo :SQLSTATE
select braid.version_table('stock_view');
\echo :SQLSTATE
select braid.version_table('numbers');
\echo :SQLSTATE
select braid.version_table('part');
\echo :SQLSTATE
select braid.version_table('part_1');
\echo :SQLSTATE
select braid.version_table('parent');
\echo :SQLSTATE
select braid.version_table('child');
\echo :SQLSTATE
select braid.version_table('unlogged');
\echo :SQLSTATE
\set VERBOSITY sqlstate
select braid.version_table('temporary');
\set VERBOSITY default
select braid.version_table('pg_class');
\echo :SQLSTATE
select braid.version_table('braid.node');
\echo :SQLSTATE
select braid.version_table('note');
\echo :SQLSTATE
begin;
create table fresh (id int);
select braid.version_table('fresh');
\echo :SQLSTATE
rollback;
grant braid_admin to braid_regress_clerk;
set role braid_regress_clerk;
select braid.version_table('stock');
\echo :SQLSTATE
reset role;
revoke braid_admin from braid_regress_clerk;

select braid.version_table('stock');
select braid.version_table('accounts');
select braid.version_table('shop.stock');
select braid.version_table('stock');
\echo :SQLSTATE
select braid.unversion_table('note');
\echo :SQLSTATE
select relation, table_number, last_assigned, reached, waiting_pid from braid.table_versions;
select kind, subject, result from braid.group_log where kind like '%version%table';

-- what can't be beside versioned tables
select braid.create_subscription('there', :'there');
\echo :SQLSTATE
create subscription native connection 'dbname=x' publication p with (connect = false);
\echo :SQLSTATE

-- declarations that are refused
set braid.versions = 'write stock';
\echo :SQLSTATE
set local braid.versions = 'write stock';
\echo :SQLSTATE
select set_config('braid.versions', 'write stock', true);
\echo :SQLSTATE
alter role braid_regress_clerk set braid.versions = 'write stock';
\echo :SQLSTATE
create function with_setting() returns int language sql set braid.versions = 'write stock' as 'select 1';
\echo :SQLSTATE
begin;
set local braid.versions = 'write stock';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
select 1;
set local braid.versions = 'write stock';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
do $$ begin set local braid.versions = 'write stock'; end $$;
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.versions = 'stock';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.versions = 'write nothing';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.versions = 'write stock, read note';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.versions = 'read stock, write a.b.c';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.release = 'stock';
\echo :SQLSTATE
rollback;
set braid.release = 'stock';
\echo :SQLSTATE
set role braid_regress_clerk;
begin isolation level repeatable read;
set local braid.versions = 'write stock';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.versions = 'read stock';
select * from stock;
commit;
reset role;

-- reading is allowed, writing is not
select * from stock order by id;
select * from stock where id = 1 for update;
explain (costs off) update stock set amount = 0 where id = 1;
update stock set amount = 0;
\echo :SQLSTATE
insert into shop.stock values (1, 'x');
\echo :SQLSTATE
begin isolation level serializable;
update stock set amount = 0;
\echo :SQLSTATE
rollback;

-- a versioned transaction
begin isolation level repeatable read;
set local braid.versions = 'read accounts, write stock';
show braid.versions;
update stock set amount = amount - (select amount from accounts where id = 1) where id = 1;
insert into note values ('unversioned tables are as ever');
commit;
show braid.versions;
begin isolation level serializable;
set local braid.versions = 'write stock, write public.stock, read Stock';
insert into stock values (3, 300);
commit;
select * from stock order by id;
select relation, table_number, last_assigned, reached, waiting_pid from braid.table_versions;

-- what was not declared, by each way to a table
begin isolation level repeatable read;
set local braid.versions = 'read accounts, write shop.stock';
savepoint a;
select * from stock;
\echo :SQLSTATE
rollback to a;
select * from stock_view;
\echo :SQLSTATE
rollback to a;
select * from accounts for update;
update accounts set amount = 0;
\echo :SQLSTATE
rollback to a;
with gone as (delete from accounts returning *) select * from gone;
\echo :SQLSTATE
rollback to a;
insert into note select amount from stock;
\echo :SQLSTATE
rollback to a;
merge into stock s using accounts a on s.id = a.id when matched then update set amount = 0;
\echo :SQLSTATE
rollback to a;
do $$ begin perform * from stock; end $$;
\echo :SQLSTATE
rollback to a;
do $$ begin execute 'delete from accounts'; end $$;
\echo :SQLSTATE
rollback to a;
copy stock to '/dev/null';
\echo :SQLSTATE
rollback to a;
copy accounts from '/dev/null';
\echo :SQLSTATE
rollback to a;
truncate accounts;
\echo :SQLSTATE
rollback to a;
truncate stock cascade;
\echo :SQLSTATE
rollback to a;
explain (costs off) select * from stock;
explain (costs off, analyze, timing off, summary off) select * from stock;
\echo :SQLSTATE
rollback to a;
copy accounts from '/dev/null';
\echo :SQLSTATE
rollback to a;
insert into shop.stock values (1, 'declared');
commit;

-- triggers and cascades
create function counts() returns trigger language plpgsql as $$ begin update accounts set amount = amount + 1; return new; end $$;
create trigger counts after insert on note for each row execute function counts();
insert into note values ('x');
\echo :SQLSTATE
begin isolation level repeatable read;
set local braid.versions = 'write accounts';
insert into note values ('x');
commit;
select amount from accounts;
drop trigger counts on note;
insert into item values (1, 1);
begin isolation level repeatable read;
set local braid.versions = 'write stock';
delete from stock where id = 1;
commit;
select count(*) from item;
select braid.version_table('item');
begin isolation level repeatable read;
set local braid.versions = 'write item';
insert into item values (2, 2);
commit;
begin isolation level repeatable read;
set local braid.versions = 'write stock';
delete from stock where id = 2;
\echo :SQLSTATE
rollback;

-- statements about tables
alter table stock add v text;
\echo :SQLSTATE
alter table stock rename to stock_2;
\echo :SQLSTATE
create index on stock (amount);
\echo :SQLSTATE
create trigger counts after insert on stock for each row execute function counts();
\echo :SQLSTATE
create rule nothing as on insert to stock do instead nothing;
\echo :SQLSTATE
alter table stock set schema shop;
\echo :SQLSTATE
truncate stock;
\echo :SQLSTATE
drop table stock cascade;
\echo :SQLSTATE
drop schema shop cascade;
\echo :SQLSTATE
create table another () inherits (stock);
\echo :SQLSTATE
create table another (id int primary key, amount int not null);
alter table stock inherit another;
\echo :SQLSTATE
drop table another;
vacuum stock;
begin isolation level repeatable read;
set local braid.versions = 'write stock';
alter table stock add v text;
create index on stock (v);
alter table stock rename to store;
commit;
select relation from braid.table_versions order by 1;
begin isolation level repeatable read;
set local braid.versions = 'write store';
truncate store cascade;
\echo :SQLSTATE
rollback;

-- prepared transactions
begin isolation level repeatable read;
set local braid.versions = 'write store';
prepare transaction 'braid';
\echo :SQLSTATE

-- early release
begin isolation level repeatable read;
set local braid.versions = 'write store, write accounts';
set local braid.release = 'read accounts';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.versions = 'write store, write accounts';
set local braid.release = 'shop.stock';
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.versions = 'write store, write accounts';
set local braid.release = 'accounts';
select * from accounts;
\echo :SQLSTATE
rollback;
begin isolation level repeatable read;
set local braid.versions = 'write store, write accounts';
set local braid.release = 'accounts';
update store set amount = amount + 1;
commit;
select relation, last_assigned, reached from braid.table_versions where relation = 'accounts'::regclass;

-- declarations, from PostgreSQL's plan
select braid.declare($$update store set amount = store.amount - a.amount from accounts a where a.id = store.id$$);
select braid.declare($$select * from stock_view where id = $1$$);
select braid.declare($$insert into note select v from shop.stock$$);
select braid.declare($$with gone as (delete from item returning stock_id) select * from store where id in (table gone)$$);
select braid.declare($$merge into accounts a using store s on a.id = s.id when matched then delete$$);
select braid.declare('select 1') = '';
select braid.declare(null) is null;
select braid.declare('select 1; select 2');
\echo :SQLSTATE
select braid.declare('truncate store');
\echo :SQLSTATE
select braid.declare('select from nothing');
\echo :SQLSTATE
set search_path = shop, public;
select braid.declare('select * from stock, public.store');
reset search_path;
set role braid_regress_clerk;
select braid.declare('select * from note, store');
reset role;

-- current reads
call braid.read_current('store');
call braid.read_current('note');
\echo :SQLSTATE
call braid.read_current(null);
\echo :SQLSTATE
begin isolation level repeatable read;
call braid.read_current('store');
\echo :SQLSTATE
rollback;

-- unversioned, tables are as before
select braid.unversion_table('store');
update store set amount = 0;
select braid.unversion_table('store');
\echo :SQLSTATE
begin isolation level repeatable read;
set local braid.versions = 'write store';
\echo :SQLSTATE
rollback;
drop table item;
\echo :SQLSTATE
select braid.unversion_table(relation) from braid.table_versions \g /dev/null
select count(*) from braid.table_versions;
drop table item, store cascade;

\set ECHO none
drop owned by braid_regress_clerk;
select braid.leave_group() \g /dev/null
do $$ begin
    for i in 1 .. 600 loop
        exit when not exists (select from braid.group_self);
        perform pg_sleep(0.1);
    end loop;
end $$;
\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\i :postlude
drop role braid_regress_clerk;
