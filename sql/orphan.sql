-- Rows whose referenced row is missing: found as PostgreSQL's own checks compare, for every form of
-- foreign key.
set client_min_messages = warning;
drop extension if exists braid cascade;
create extension braid;
\set VERBOSITY sqlstate
\pset null '-'
create schema orphan;
set search_path = orphan, public;
create view found as select referencing, constraint_name, key, referenced, referenced_key from braid.orphans() where referencing::text !~ '^braid' order by constraint_name, referencing::text, key::text;

create table city (name text collate "C", zip bigint, primary key (name, zip), unique (zip));
create table person (id int primary key, city text, zip int,
    boss int constraint person_boss references person deferrable,
    constraint person_simple foreign key (city, zip) references city (name, zip),
    constraint person_zip foreign key (zip) references city (zip));
create table strict_person (id int primary key, city text, zip int,
    constraint strict_full foreign key (city, zip) references city (name, zip) match full);
insert into city values ('kyoto', 1), ('Oslo', 2), ('oslo', 3);
insert into person values (1, 'kyoto', 1, null), (2, 'Oslo', 2, 1), (3, null, 2, 3), (4, 'kyoto', null, 2), (5, null, null, 2);
insert into strict_person values (1, 'kyoto', 1), (2, null, null), (3, 'oslo', 3);
select * from found;
set session_replication_role = replica;
delete from city where zip in (2, 3);
insert into strict_person values (4, null, 1);
update person set id = 12 where id = 2;
reset session_replication_role;
select * from found;
select referencing, constraint_name, key, "row" from braid.orphans('strict_person') order by key::text;

-- Types that differ, and bytes that differ where the values do not.
create collation nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
create domain amount as numeric;
create table price (n amount primary key, label text collate nocase unique, tags int[] unique);
create table sale (id int, n numeric constraint sale_n references price, label text collate nocase constraint sale_label references price (label),
    tags int[] constraint sale_tags references price (tags));
insert into price values (1.0, 'one', '{1}'), (2.50, 'two', '{2}'), (3, 'three', '{3}');
insert into sale values (1, 1.000, 'ONE', '{1}'), (2, 2.5, 'Two', '{2}'), (3, 3, 'three', '{3}');
select * from found where referencing::text = 'sale';
set session_replication_role = replica;
delete from price where n > 2.6;
reset session_replication_role;
select * from found where referencing::text = 'sale';

-- Partitions on both sides, also with the columns in another order; a key of a single partition.
create table owner (id int primary key) partition by range (id);
create table owner_low partition of owner for values from (0) to (10);
create table owner_high (filler text, id int not null);
alter table owner_high drop column filler;
alter table owner attach partition owner_high for values from (10) to (20);
create table pet (id int, owner int constraint pet_owner references owner, primary key (id, owner)) partition by list (owner);
create table pet_a (owner int not null, id int not null);
alter table pet attach partition pet_a for values in (1, 2, 3);
create table pet_b partition of pet default;
create table tag (id int primary key);
alter table pet add tag int;
alter table pet_b add constraint pet_b_tag foreign key (tag) references tag;
insert into tag values (1);
insert into owner values (1), (2), (11), (12);
insert into pet values (1, 1, 9), (2, 2, null), (3, 11, 1), (4, 12, null);
select * from found where referencing::text ~ '^pet';
set session_replication_role = replica;
delete from owner where id in (2, 12);
delete from tag;
reset session_replication_role;
select * from found where referencing::text ~ '^pet';
select referencing, constraint_name, key from braid.orphans('pet') order by constraint_name, key::text;
select referencing, constraint_name, key from braid.orphans('pet_a') order by constraint_name, key::text;
select referencing, constraint_name, key from braid.orphans('pet_b') order by constraint_name, key::text;

-- Names that SQL would read as something else.
create table "Or'phan %s" ("orphan$child" int primary key, "a""b" int constraint "c'%" references "Or'phan %s");
set session_replication_role = replica;
insert into "Or'phan %s" values (1, 7);
reset session_replication_role;
select constraint_name, key, referenced_key, "row" from braid.orphans('"Or''phan %s"');

-- The caller's rights, and nothing that row-level security hides.
create role orphan_reader in role braid_monitor;
grant usage on schema orphan to orphan_reader;
grant select on person to orphan_reader;
set role orphan_reader;
select * from braid.orphans('person');
reset role;
grant select on city to orphan_reader;
set role orphan_reader;
select constraint_name, key from braid.orphans('person') order by 1, 2;
reset role;
alter table city enable row level security;
set role orphan_reader;
select * from braid.orphans('person');
select braid.set_foreign_key_rule('person', null, 'record');
reset role;

-- Rules.
select braid.set_foreign_key_rule('person', 'person_boss', 'keep');
select braid.set_foreign_key_rule('person', 'nothing', 'record');
select braid.set_foreign_key_rule('tag', null, 'record');
select braid.set_foreign_key_rule('found', null, 'record');
select braid.set_foreign_key_rule(null, null, 'record');
select braid.set_foreign_key_rule('person', null, 'record');
select braid.set_foreign_key_rule('person', 'person_boss', 'delete');
select braid.set_foreign_key_rule('person', 'person_zip', 'restore');
select * from braid.foreign_key_rules;
select braid.set_foreign_key_rule('person', null, null);
select count(*) from braid.foreign_key_rules;
\set VERBOSITY default
drop owned by orphan_reader;
drop role orphan_reader;
set client_min_messages = warning;
drop schema orphan cascade;
drop extension braid;
