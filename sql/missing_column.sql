-- braid.set_missing_column_rule: its arguments, its errors, and the view of the rules.
set client_min_messages = warning;
drop extension if exists braid cascade;
create extension braid;
create table item (id int primary key);
create table day (id int, at date) partition by range (at);
create view seen as select * from item;
select braid.set_missing_column_rule('item', 'skip');
\echo :SQLSTATE
select braid.set_missing_column_rule(null, 'ignore');
\echo :SQLSTATE
select braid.set_missing_column_rule('seen', 'ignore');
\echo :SQLSTATE
select braid.set_missing_column_rule(1::regclass, 'ignore');
\echo :SQLSTATE
select braid.set_missing_column_rule('braid.node', 'ignore');
\echo :SQLSTATE
select braid.set_missing_column_rule('item', 'ignore'), braid.set_missing_column_rule('day', 'error');
select * from braid.missing_column_rules;
select braid.set_missing_column_rule('item', 'error'), braid.set_missing_column_rule('day', null);
select * from braid.missing_column_rules;
-- The rule goes with its table.
drop view seen;
drop table item;
select * from braid.missing_column_rules;
select braid.set_missing_column_rule('day', 'ignore');
select count(*) from braid.missing_column_rule;
select * from braid.missing_columns;
