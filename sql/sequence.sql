-- Sequences of a group, as far as one node can show: arguments, refusals, and the first block.
-- t/193_sequences.pl and t/194_sequence_kinds.pl have several nodes.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
\set superuser :USER
\set SHOW_CONTEXT never
\set VERBOSITY default
create role braid_regress_clerk;
grant usage on schema braid to braid_regress_clerk;
create table item (id bigserial primary key, v text);
create table plain (id serial primary key, v text);
create table fixed (id bigint generated always as identity primary key);
create sequence narrow as smallint;
create sequence round maxvalue 3 cycle;
create sequence down increment by -1;
insert into item (v) select 'old' from generate_series(1, 3);

-- no group
select braid.set_sequence('item_id_seq', 'range');
\echo :SQLSTATE
select braid.set_sequence_default('step');
\echo :SQLSTATE
select braid.snowflake('item_id_seq');
\echo :SQLSTATE
select braid.snowflake53('item_id_seq');
\echo :SQLSTATE
select count(*) from braid.sequences;

select braid.create_group('shop', node_name => 'here', dsn => :'here') \g /dev/null
select braid.wait_for_group('60 s') \g /dev/null
do $$ begin
    for i in 1 .. 600 loop
        -- Numbers that the next block has are not left for others.
        exit when (select count(*) = 6 and bool_and(state = 'ready') from braid.sequences)
              and (select reserve_end is not null from braid.sequence where relation = 'narrow'::regclass);
        perform pg_sleep(0.1);
    end loop;
end $$;
select sequence, kind, block_from, block_to, used, values_left > 0, state, problem from braid.sequences;

-- arguments
select braid.set_sequence(null, 'range');
\echo :SQLSTATE
select braid.set_sequence('item_id_seq', null);
\echo :SQLSTATE
select braid.set_sequence('item_id_seq', 'wild');
\echo :SQLSTATE
select braid.set_sequence('item_id_seq', 'local', 5);
\echo :SQLSTATE
select braid.set_sequence('item_id_seq', 'range', 0);
\echo :SQLSTATE
select braid.set_sequence('item_id_seq', 'step', 9007199254740993);
\echo :SQLSTATE
select braid.set_sequence('item', 'range');
\echo :SQLSTATE
select braid.set_sequence(0, 'range');
\echo :SQLSTATE
select braid.set_sequence('nothing', 'range');
\echo :SQLSTATE
select braid.set_sequence_default(null);
\echo :SQLSTATE
select braid.set_sequence_default('wild');
\echo :SQLSTATE
select braid.set_sequence_default('snowflake53');
\echo :SQLSTATE

-- sequences that can't have a kind
select braid.set_sequence('round', 'step');
\echo :SQLSTATE
select braid.set_sequence('fixed_id_seq', 'snowflake');
\echo :SQLSTATE
select braid.set_sequence('plain_id_seq', 'snowflake53');
\echo :SQLSTATE
select braid.set_sequence('narrow', 'range', 1000);
\echo :SQLSTATE
alter sequence item_id_seq maxvalue 5;
\echo :SQLSTATE
alter table fixed alter column id set increment by 5;
\echo :SQLSTATE
select setval('item_id_seq', 1000000001);
\echo :SQLSTATE

-- rights
set role braid_regress_clerk;
select braid.set_sequence('item_id_seq', 'range');
\echo :SQLSTATE
select braid.set_sequence_default('range');
\echo :SQLSTATE
select braid.snowflake('item_id_seq');
\echo :SQLSTATE
select * from braid.sequence_told;
\echo :SQLSTATE
reset role;
grant usage on sequence item_id_seq to braid_regress_clerk;
set role braid_regress_clerk;
select braid.snowflake_node(braid.snowflake('item_id_seq')), braid.snowflake53_node(braid.snowflake53('item_id_seq'));
reset role;
select braid.snowflake(null);
\echo :SQLSTATE

-- the parts of a value
select braid.snowflake_time(0) at time zone 'UTC', braid.snowflake53_time(0) at time zone 'UTC';
select abs(extract(epoch from braid.snowflake_time(braid.snowflake('item_id_seq')) - clock_timestamp())) < 5 as near,
       braid.snowflake53('item_id_seq') < 2 ^ 53 as fits;

-- The node goes on where the sequence was, and keeps to its block.
insert into item (v) values ('new') returning id;
select nextval('narrow'), nextval('down'), nextval('round');
begin;
select setval('narrow', 500);
select nextval('narrow');
\echo :SQLSTATE
rollback;

\set ECHO none
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
