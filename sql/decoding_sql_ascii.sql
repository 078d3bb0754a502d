-- A database in SQL_ASCII, where names and texts are any bytes: names that are not UTF-8 differ all
-- the same.
set client_min_messages = warning;
create database decoding_sql_ascii template template0 encoding 'SQL_ASCII' locale 'C';
\c decoding_sql_ascii
set client_min_messages = warning;
set client_encoding = 'SQL_ASCII';
do $$ begin
  execute format('create table %I (id int primary key, %I text, %I text)', E't\xff', E'c\xff', E'c\xfe');
  execute format('create table %I (id int primary key)', E't\xfe');
  execute format('create table %I (id int primary key)', E't\xc3\xa9');
end $$;
create publication bytes for all tables;
select 1 from pg_create_logical_replication_slot('sql_ascii', 'braid');
do $$ begin
  execute format('insert into %I values (1, %L, %L)', E't\xff', E'v\xff', 'v');
  execute format('insert into %I values (2)', E't\xfe');
  execute format('insert into %I values (3)', E't\xc3\xa9');
  perform pg_logical_emit_message(true, E'p\xe9', 'one');
  perform pg_logical_emit_message(true, E'p\xe8', 'two');
  perform pg_logical_emit_message(true, 'p', 'three');
end $$;

-- What is seen of it with these options.
create function seen(variadic options text[]) returns table (rows text, messages text) language sql as $$
  select string_agg(substring(data from '"value":(\d)'), ',') filter (where data like '{"action":"I"%'),
         string_agg(substring(data from '"content":"(\w+)"'), ',') filter (where data like '{"action":"M"%')
    from pg_logical_slot_peek_changes('sql_ascii', null, null, variadic options || '{format-version,2}') $$;
select * from seen('include-transaction', 'off');
select * from seen('add-tables', E'public.t\xff');
select * from seen('filter-tables', E'public.t\xff');
select * from seen('filter-tables', E'public.t\xc3\xa9');
select * from seen('add-tables', E'public.t\xc3\xa9, public.t\xfe');
select * from seen('add-msg-prefixes', E'p\xe9');
select * from seen('filter-msg-prefixes', E'p\xe9');
select * from seen('filter-msg-prefixes', E'p\xe8, p');
-- As gir-json: two columns whose names differ in such a byte are two, and each has the same name in
-- all records.
select substring(data from '"after":.*') as after from pg_logical_slot_peek_changes('sql_ascii', null, null, 'format', 'gir-json', 'publication_names', 'bytes')
 where data like '%"operation":"insert"%';
select pg_drop_replication_slot('sql_ascii') \g /dev/null
\c postgres
set client_min_messages = warning;
drop database decoding_sql_ascii with (force);
