-- Equal keys have equal hashes, under the type's own equality.
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/decoding.sql'
\set ECHO none
\i :prelude
\set ECHO all
\pset format unaligned
\pset tuples_only on
create schema dec_keys;
set search_path = dec_keys, public;
create publication dec_keys for tables in schema dec_keys;
select 1 from pg_create_logical_replication_slot('dec_keys', 'braid');
create collation nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false);

-- The hashes of a frame's only change: behind the header of its record.
create function writesets(out relation text, out hashes bytea) returns setof record language plpgsql as $$
declare frame bytea; pos int; len int; tag text; names text[] := '{}'; count int; oid int;
begin
  for frame in select data from pg_logical_slot_get_binary_changes('dec_keys', null, null, 'proto_version', '1', 'publication_names', 'dec_keys') loop
    pos := 1;
    while pos <= length(frame) loop
      tag := chr(get_byte(frame, pos - 1));
      len := get_byte(frame, pos) + 256 * get_byte(frame, pos + 1) + 65536 * get_byte(frame, pos + 2);
      if tag = 'S' then
        oid := get_byte(frame, pos + 8) + 256 * get_byte(frame, pos + 9) + 65536 * get_byte(frame, pos + 10);
        names[get_byte(frame, pos + 4) + 1] := oid::regclass::text;
      elsif tag = 'I' then
        count := get_byte(frame, pos + 9);
        relation := names[get_byte(frame, pos + 4) + 1];
        hashes := substring(frame from pos + 11 for count * 8);
        return next;
      end if;
      pos := pos + 5 + len;
    end loop;
  end loop;
end $$;

-- In each table all rows are equal, one after the other; then one that differs.
create table k_numeric (k numeric primary key);
create table k_float8 (k float8 primary key);
create table k_float4 (k float4 primary key);
create table k_bpchar (k char(8) primary key);
create table k_nocase (k text collate nocase primary key);
create table k_interval (k interval primary key);
create table k_timetz (k timetz primary key);
create table k_jsonb (k jsonb primary key);
create table k_array (k numeric[] primary key);
create table k_text (k text primary key);
create table k_inet (k inet primary key);
create table k_pattern (k text collate "C", j int);
create unique index on k_pattern (k text_pattern_ops);
create type color as enum ('red', 'green');
create table k_enum (k color primary key);
create domain code as varchar(10);
create table k_domain (k code primary key);
create procedure twice(relation text, variadic keys text[]) language plpgsql as $$
declare key text;
begin
  foreach key in array keys loop
    execute format('truncate %s', relation);
    execute format('insert into %s (k) values (%L)', relation, key);
    commit;
  end loop;
end $$;
call twice('k_numeric', '1', '1.0', '1.0000000000', '2');
call twice('k_float8', '0', '-0', '1');
call twice('k_float4', '0', '-0', '1');
call twice('k_bpchar', 'a', 'a   ', 'b');
call twice('k_nocase', 'abc', 'ABC', 'abd');
call twice('k_interval', '1 month', '30 days', '31 days');
call twice('k_timetz', '12:00+00', '12:00+00', '13:00+01');
call twice('k_jsonb', '{"a": 1, "b": 2}', '{"b":2,"a":1.0}', '{"a": 1}');
call twice('k_array', '{1,2}', '{1.0,2.00}', '{2,1}');
call twice('k_text', repeat('x', 300), repeat('x', 300), repeat('x', 301));
call twice('k_inet', '10.0.0.1', '10.0.0.1/32', '10.0.0.2');
call twice('k_pattern', 'a', 'a', 'A');
call twice('k_enum', 'red', 'red', 'green');
call twice('k_domain', 'a', 'a', 'b');
select relation, max(length(hashes)) / 8 as keys, count(*) as changes, count(distinct hashes) as hashes from writesets() group by 1 order by 1;

-- Relations and indexes have their own.
create table m1 (a int primary key, b int unique, c int, unique (b, c), unique (c, b));
create table m2 (a int primary key);
insert into m1 values (1, 1, 1);
insert into m2 values (1);
-- Two indexes on a column that compare it differently are two keys, else one.
create table m3 (a text primary key);
create unique index on m3 (a collate nocase);
create unique index on m3 (a text_pattern_ops);
insert into m3 values ('a');
select relation, length(hashes) / 8 as keys, substring(hashes for 8) = substring(hashes from 9 for 8) as same from writesets();

select pg_drop_replication_slot('dec_keys');
set client_min_messages = warning;
drop publication dec_keys;
drop schema dec_keys cascade;
