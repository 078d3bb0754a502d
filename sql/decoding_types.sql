-- Values of every built-in type and of the user's types.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_types;
set search_path = dec_types, public;
create publication dec_types for tables in schema dec_types;
select 1 from pg_create_logical_replication_slot('dec_types', 'braid');
-- Text forms must not depend on any of these.
set datestyle = 'SQL, DMY';
set intervalstyle = 'iso_8601';
set extra_float_digits = -10;
set bytea_output = 'escape';
set timezone = 'Asia/Kathmandu';
set client_encoding = 'LATIN1';

-- Integers and floats.
create table numbers (id int primary key, b bool, c "char", i2 int2, i4 int4, i8 int8, o oid, x xid, f4 float4, f8 float8, n numeric);
insert into numbers values
  (1, true, 'a', -32768, -2147483648, -9223372036854775808, 4294967295, '4294967295', 0.1, 0.1, 0),
  (2, false, '\377', 32767, 2147483647, 9223372036854775807, 0, '0', '-0', '-0', -12345678901234567890.000010),
  (3, null, null, null, null, null, null, null, 'infinity', '-infinity', 'NaN'),
  (4, true, '', 0, 0, 0, 1, '1', 'nan', 'nan', 'infinity'),
  (5, true, 'z', 1, 1, 1, 1, '1', 3.4028235e38, 5e-324, '-infinity'),
  (6, null, null, null, null, null, null, null, null, null, 1e-130),
  (7, null, null, null, null, null, null, null, null, null, 123e1000);
select regexp_replace(line, '0{50,}', '<zeros>', 'g') from changes('dec_types', 'dec_types') as line;

-- The stored form of numeric becomes numeric_send's, byte by byte.
create table numerics (id int primary key, n numeric);
insert into numerics select row_number() over (), n from unnest(array[0, 0.0, 1, -1, 10000, 99999999, 0.00001, -0.000012340, 1e-16383,
  'NaN', 'Infinity', '-Infinity', 1e131071, 1.5e-70, 12345678901234567890123456789012345678901234567890.123456789]::numeric[]) n;
select count(*) as equal from numerics, pg_logical_slot_peek_binary_changes('dec_types', null, null, 'proto_version', '1', 'publication_names', 'dec_types')
where position(numeric_send(n) in data) > 0;
select count(*) from changes('dec_types', 'dec_types') as line where line like 'INSERT%';

-- Dates and times: instants, calendar values, infinities, BC, far years.
create table times (id int primary key, tz timestamptz, ts timestamp, d date, t time, ttz timetz, i interval);
insert into times values
  (1, '2020-02-29 12:34:56.789012+05:45', '2020-02-29 12:34:56.789012', '2020-02-29', '24:00:00', '12:34:56.5+05:45', '1 year 2 mons -3 days 04:05:06.7'),
  (2, 'infinity', 'infinity', 'infinity', '00:00:00', '00:00:00-15:59', '0'),
  (3, '-infinity', '-infinity', '-infinity', null, null, null),
  (4, '4714-11-24 00:00:00+00 BC', '4714-11-24 00:00:00 BC', '4714-11-24 BC', null, null, null),
  (5, '294276-12-31 23:59:59.999999+00', '294276-12-31 23:59:59.999999', '5874897-12-31', null, null, null),
  (6, '1969-12-31 23:59:59.999999+00', '1999-12-31 23:59:59.999999', '1999-12-31', null, null, null);
select changes('dec_types', 'dec_types');

-- Characters are in the server's encoding, whatever the client's; bpchar keeps its blanks.
create table characters (id int primary key, t text, vc varchar(10), bp char(5), n name, j json, jb jsonb, a text[], ts tsvector);
insert into characters values (1, E'\u00e9', E'\u00e9', E'\u00e9', E'\u00e9', E'"\u00e9"', E'{"\u00e9": 1}', array[E'\u00e9'], E'\u00e9');
insert into characters values (2, '', '', '', '', '""', '[]', '{}', '');
create temp table lines as select line from changes('dec_types', 'dec_types') as line where line like 'INSERT%';
show client_encoding;
reset client_encoding;
select line from lines;

-- Everything else that is built in travels in its binary form.
create table others (id int primary key, by bytea, u uuid, ip inet, net cidr, m macaddr, b bit(5), vb varbit, p point, bx box, ra int4range, mr int4multirange,
  nr numrange[], mo money, l pg_lsn, tid tid, x8 xid8, q tsquery, jp jsonpath, oids oid[], ov oidvector, ids int[]);
insert into others values (1, '\x00ff', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '10.0.0.1/8', '10.0.0.0/8', '08:00:2b:01:02:03', '10101', '1', '(1,2)', '(3,4),(1,2)',
  '[1,5)', '{[1,3),[5,8)}', array[numrange(1.5, null)], 12.34, '16/B374D848', '(1,2)', '99', 'a & b', '$.a', '{1,2}', '1 2', '{{1,2},{3,null}}');
select changes('dec_types', 'dec_types');

-- Values that name objects, or have a user's own type, are sent as text that any session reads the
-- same way.
create type mood as enum ('sad', 'ok', E'hap\u0070y');
create type pair as (a int, b timestamptz, c bytea, d float8);
create domain positive as int check (value > 0);
create domain moods as mood;
create domain pairs as pair;
create type floats as range (subtype = float8, multirange_type_name = manyfloats);
create table mine (id positive primary key, e mood, ea mood[], c pair, ca pair[], dm moods, dp pairs, r floats, mr manyfloats, rc regclass, rp regprocedure, rt regtype[], acl aclitem, i interval[]);
insert into mine values (1, 'ok', '{sad,happy}', row(1, '2020-01-01 00:00:00+00', '\x00', 0.1), array[row(1, null, null, 0.30000000000000004)::pair], 'sad',
  row(2, null, null, null), floats(0.1, 0.2), manyfloats(floats(0.1, 0.2)), 'dec_types.mine', 'pg_catalog.now()', '{dec_types.mood,int4}', null, '{1 day}');
select changes('dec_types', 'dec_types');
-- A label that is renamed is the new one from there on.
insert into mine (id, e) values (2, 'ok');
alter type mood rename value 'ok' to 'fine';
insert into mine (id, e) values (3, 'fine');
select substring(line from '^.*?dm=') from changes('dec_types', 'dec_types') as line;

-- Settings are the session's own again.
show datestyle;
show intervalstyle;
show extra_float_digits;
show bytea_output;
show search_path;
show timezone;

select pg_drop_replication_slot('dec_types');
set client_min_messages = warning;
drop publication dec_types;
drop schema dec_types cascade;
