-- braid.set_column_rule: what it takes, what it refuses and what it says then, what the view shows.
set client_min_messages = warning;
create extension braid;
create domain positive as integer check (value > 0);
create table stock (
    id int primary key,
    s smallint, i integer, b bigint, n numeric(12,2), f double precision, m money, p positive, t timestamptz, j json, k text unique,
    g int generated always as (i + 1) stored
);

-- Old values are needed for sums alone.
select braid.set_column_rule('stock', 'i', 'delta');
\echo :SQLSTATE
select braid.set_column_rule('stock', 't', 'max');
select braid.set_column_rule('stock', 'p', 'min');
create unique index stock_k on stock (k);
alter table stock alter k set not null, replica identity using index stock_k;
select braid.set_column_rule('stock', 'i', 'delta');
alter table stock replica identity full;
select braid.set_column_rule('stock', c, 'delta') from unnest('{s,i,b,n}'::name[]) c;
select * from braid.column_rules;

-- A register of its own may be of any type.
select braid.set_column_rule('stock', c, 'last_update_wins') from unnest('{j,m,t}'::name[]) c;
select column_name, rule from braid.column_rules where rule = 'last_update_wins';
select braid.set_column_rule('stock', c, null) from unnest('{j,m}'::name[]) c;
select braid.set_column_rule('stock', 't', 'max');
-- What has no sums, or no order.
select braid.set_column_rule('stock', 'f', 'delta');
select braid.set_column_rule('stock', 'm', 'delta');
select braid.set_column_rule('stock', 'p', 'delta');
select braid.set_column_rule('stock', 't', 'delta');
select braid.set_column_rule('stock', 'j', 'max');
select braid.set_column_rule('stock', 'f', 'max');
-- Keys, and what each node computes.
select braid.set_column_rule('stock', 'id', 'delta');
select braid.set_column_rule('stock', 'k', 'max');
select braid.set_column_rule('stock', 'k', 'last_update_wins');
select braid.set_column_rule('stock', 'g', 'delta');
select braid.set_column_rule('stock', 'g', 'last_update_wins');
-- Names.
select braid.set_column_rule('stock', 'i', 'sum');
select braid.set_column_rule('stock', 'missing', 'delta');
select braid.set_column_rule('stock', 'missing', null);
select braid.set_column_rule('stock', 'ctid', 'delta');
select braid.set_column_rule(null, 'i', 'delta');
select braid.set_column_rule('stock', null, 'delta');
-- Tables.
create table split (id int primary key, n int) partition by range (id);
create table split_low partition of split for values from (0) to (10);
create table bag (n int);
alter table bag replica identity full;
create table late (id int primary key deferrable, n int);
create view shown as select 1 as one;
select braid.set_column_rule('split', 'n', 'delta');
select braid.set_column_rule('split', 'n', 'last_update_wins');
select braid.set_column_rule('split_low', 'n', 'max');
select braid.set_column_rule('bag', 'n', 'delta');
select braid.set_column_rule('bag', 'n', 'last_update_wins');
select braid.set_column_rule('late', 'n', 'max');
select braid.set_column_rule('shown', 'one', 'max');
select braid.set_column_rule('braid.node', 'dsn', 'max');

-- A function gives whole rows.
create table account (id int primary key, n int);
alter table account replica identity full;
create function merge_account(local account, remote account, before account, info braid.conflict) returns account language sql as 'select local';
select braid.set_conflict_resolution('account', 'insert_exists', 'function', 'merge_account');
select braid.set_column_rule('account', 'n', 'delta');
select braid.set_conflict_resolution('account', 'insert_exists', null);
select braid.set_column_rule('account', 'n', 'delta');
select braid.set_conflict_resolution('account', 'insert_exists', 'function', 'merge_account');

-- Rows that begin to pass a filter come with all that was added before.
create table filtered (id int primary key, n int);
alter table filtered replica identity full;
create publication positive_only for table filtered where (n > 0);
select braid.set_column_rule('filtered', 'n', 'delta');
select braid.set_column_rule('filtered', 'n', 'last_update_wins');
drop publication positive_only;

-- A rule goes with its column: renamed, of another identity, dropped, with its table.
alter table stock rename i to pieces;
select column_name, rule from braid.column_rules where relation = 'stock'::regclass;
alter table stock replica identity default;
select braid.set_column_rule('stock', 'j', 'last_update_wins');
select column_name, rule, problem from braid.column_rules where relation = 'stock'::regclass;
alter table stock drop pieces cascade;
alter table stock add pieces int;
select column_name, rule from braid.column_rules where relation = 'stock'::regclass;
select braid.set_column_rule('stock', 't', null), braid.set_column_rule('stock', 'p', null), braid.set_column_rule('stock', 'pieces', null);
select column_name, rule from braid.column_rules where relation = 'stock'::regclass;
drop table stock;
select braid.set_column_rule('account', 'n', 'max');
select relation, column_number, rule from braid.column_rule;

-- Who may.
create role clerk;
set role clerk;
select braid.set_column_rule('account', 'n', 'delta');
reset role;
drop role clerk;
select braid.set_conflict_resolution('account', 'insert_exists', null), braid.set_column_rule('account', 'n', 'last_update_wins');
select braid.set_conflict_resolution('account', 'insert_exists', 'function', 'merge_account');
drop function merge_account;
drop view shown;
drop table account, split, bag, late, filtered;
drop domain positive;
drop extension braid;
