-- The format wal2json: the output of both versions, and options that wal2json does not have.
-- t/032_wal2json.pl compares with wal2json.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_w2j;
set search_path = dec_w2j, public;
create table t (id int primary key, v varchar(20) default 'none', n numeric(6,2), b bool, d float8, x bytea, gone int);
alter table t drop column gone;
create table nokey (a int, v text);
create table wide (id int primary key, big text, n int);
alter table wide alter big set storage external;
select 1 from pg_create_logical_replication_slot('dec_w2j', 'braid');
begin;
insert into t values (1, E'q"\\\n', 1.5, true, 'NaN', '\x00ff');
update t set v = null where id = 1;
update t set id = 2;
delete from t;
select pg_logical_emit_message(true, 'pre', 'con"tent') is not null;
commit;
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'pretty-print', '1', 'include-pk', '1', 'actions', 'insert,delete');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'write-in-chunks', '1', 'include-types', '0', 'actions', 'insert,delete');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'actions', 'insert', 'include-transaction', '0',
  'include-type-oids', '1', 'include-not-null', '1', 'include-column-positions', '1', 'include-default', '1', 'include-pk', '1', 'filter-msg-prefixes', 'pre');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'actions', 'insert', 'include-transaction', '0',
  'numeric-data-types-as-string', '1', 'add-msg-prefixes', 'other');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'numeric-data-types-as-string', '1', 'actions', 'update,delete');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'numeric-data-types-as-string', '1', 'actions', 'update,delete', 'include-transaction', '0');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'numeric-data-types-as-string', 'maybe');
create table numbers (i2 int2, i8 int8 primary key, n numeric, f4 float4, f8 float8, o oid, m money, d date);
insert into numbers values (-1, 9007199254740993, 1.50, 'nan', '-infinity', 7, 12.5, '2024-02-29'), (null, 2, 'nan', 1e-20, 0.1, null, null, null);
delete from numbers where i8 = 2;
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'numeric-data-types-as-string', '1', 'add-tables', '*.numbers', 'add-msg-prefixes', 'none') where data like '%numbers%';
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'numeric-data-types-as-string', '0', 'add-tables', '*.numbers', 'add-msg-prefixes', 'none') where data like '%numbers%';
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'numeric-data-types-as-string', '1', 'add-tables', '*.numbers', 'include-transaction', '0', 'add-msg-prefixes', 'none');
-- Bytes are the same through the binary function.
select convert_from(data, 'UTF8') = '{"action":"B"}' from pg_logical_slot_peek_binary_changes('dec_w2j', null, null, 'format-version', '2') limit 1;
-- The session's settings count, and stay.
set datestyle = 'German';
create table stamped (id int primary key, at timestamp, raw bytea);
insert into stamped values (1, '2024-02-29 12:00:00', '\xff');
set bytea_output = 'escape';
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'add-tables', '*.stamped', 'include-transaction', '0', 'add-msg-prefixes', 'none');
show datestyle;
show bytea_output;
reset datestyle;
reset bytea_output;
select count(*) from pg_logical_slot_get_changes('dec_w2j', null, null, 'format', 'wal2json');

-- No key: a warning, and nothing.
begin; insert into nokey values (1, 'x'); update nokey set v = 'y'; delete from nokey; commit;
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json');
select data from pg_logical_slot_get_changes('dec_w2j', null, null, 'format-version', '2');

-- Values that did not change and are not in WAL.
insert into wide values (1, repeat('x', 5000), 1);
select count(*) from pg_logical_slot_get_changes('dec_w2j', null, null, 'format', 'wal2json');
update wide set n = 2;
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'include-unchanged-toast-marker', '1');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'include-unchanged-toast-marker', '1', 'format-version', '2', 'include-not-null', '1');
select count(*) from pg_logical_slot_get_changes('dec_w2j', null, null, 'format', 'wal2json');

-- A transaction larger than a message goes on in another one; put together they are what one would
-- have been.
begin; insert into t (id, v) select i, 'row ' || i from generate_series(1, 2000) i; commit;
select md5(string_agg(data, '')) as whole from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json') \gset
select count(*) > 10, max(length(data)) <= 10240, md5(string_agg(data, '')) = :'whole', (string_agg(data, '')::jsonb -> 'change' -> 1999 -> 'columnvalues') ->> 1
from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json', 'max-message-size', '10kB');
select count(*) > 1, max(length(data)) between 90000 and 102400, md5(string_agg(data, '')) = :'whole'
from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json', 'max-message-size', '100kB');
select count(*) from pg_logical_slot_get_changes('dec_w2j', null, null, 'format', 'wal2json');

-- Publications choose tables, operations, rows and columns.
create publication dec_w2j for table t (id, v) where (id > 10) with (publish = 'insert, update');
delete from t;
select count(*) from pg_logical_slot_get_changes('dec_w2j', null, null, 'format', 'wal2json');
insert into t (id, v, n) values (5, 'no', 1), (15, 'yes', 1); insert into nokey values (2, 'z'); delete from t where id = 15; update t set id = 20 where id = 5;
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json', 'publication_names', 'dec_w2j');
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'publication_names', 'dec_w2j', 'include-transaction', '0');
select count(*) from pg_logical_slot_get_changes('dec_w2j', null, null, 'format', 'wal2json');
create table parted (id int primary key) partition by range (id);
create table parted_1 partition of parted for values from (0) to (100);
create publication dec_w2j_root for table parted with (publish_via_partition_root);
insert into parted values (1);
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json', 'publication_names', 'dec_w2j_root', 'add-tables', '*.parted');
select data from pg_logical_slot_get_changes('dec_w2j', null, null, 'format', 'wal2json', 'add-tables', '*.parted_1');

-- Origins.
select pg_replication_origin_create('dec_w2j') > 0;
select pg_replication_origin_session_setup('dec_w2j');
insert into t (id) values (100);
select pg_replication_origin_session_reset();
insert into t (id) values (101);
select data from pg_logical_slot_peek_changes('dec_w2j', null, null, 'origin', 'none', 'format-version', '2', 'include-transaction', '0', 'add-tables', '*.t', 'include-types', '0', 'actions', 'insert');
select roident as origin from pg_replication_origin where roname = 'dec_w2j' \gset
select count(*) from pg_logical_slot_peek_changes('dec_w2j', null, null, 'filter-origins', :'origin');
select count(*) from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format', 'wal2json', 'origin', 'any');

-- A list that is given again is added to, but for add-tables.
select count(*) from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'include-transaction', '0', 'filter-tables', '*.t', 'filter-tables', '*.nokey');
select count(*) from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'include-transaction', '0', 'filter-origins', :'origin', 'filter-origins', '');
select count(*) from pg_logical_slot_peek_changes('dec_w2j', null, null, 'format-version', '2', 'include-transaction', '0', 'add-tables', '*.t', 'add-tables', '*.nokey');

-- Errors.
\set SHOW_CONTEXT never
\set attempt :abs_srcdir '/sql/include/try_options.sql'
\i :attempt
select try('dec_w2j', 'format', 'jason');
select try('dec_w2j', 'format', 'wal2json', 'foo', 'bar');
select try('dec_w2j', 'include-xids', 'maybe');
select try('dec_w2j', 'format-version', '3');
select try('dec_w2j', 'format-version', '0');
select try('dec_w2j', 'format-version', 'x');
select try('dec_w2j', 'actions', 'insert,upsert');
select try('dec_w2j', 'actions', 'insert update');
select try('dec_w2j', 'add-tables', 't');
select try('dec_w2j', 'filter-msg-prefixes', 'a b');
select try('dec_w2j', 'include-unchanged-toast', '1');
select try('dec_w2j', 'include-unchanged-toast-marker', 'x');
select try('dec_w2j', 'max-message-size', 'much');
select try('dec_w2j', 'format-version', '2', 'publication_names', 'a b');
select try('dec_w2j', 'format-version', '2', 'publication_names', 'dec_missing');
select try('dec_w2j', 'format-version', '2', 'origin', 'me');
select try('dec_w2j', 'format', 'gir', 'proto_version', '1', 'publication_names', 'dec_w2j', 'include-xids', '1');

select pg_drop_replication_slot('dec_w2j');
select pg_replication_origin_drop('dec_w2j');
set client_min_messages = warning;
drop publication dec_w2j, dec_w2j_root;
drop schema dec_w2j cascade;
