-- create_subscription when this server has no room for it.
\a
\t
\getenv abs_srcdir PG_ABS_SRCDIR
\set prelude :abs_srcdir '/sql/include/two_nodes.sql'
\set ECHO none
\i :prelude
\set ECHO all
select braid.create_node('here', :'here');
-- each subscription needs as many replication origins as it has appliers
insert into braid.subscription (subscription_name, subscription_owner, provider_name, provider_id, publications, origin, slot_name,
    create_slot, copy_data, enabled, synchronous_commit, run_as_owner, disable_on_error, apply_mode, phase)
select 'filler ' || n, current_role::regrole, 'there', gen_random_uuid(), '{braid}', 'none', 'filler_' || n, true, true, false, 'off',
    false, false, 'parallel', 'slot' from generate_series(1, 40) n;
-- (the hint names another setting before PostgreSQL 18)
\set VERBOSITY terse
select braid.create_subscription('s', :'there');
\echo :SQLSTATE
\set VERBOSITY default
-- and there can be only so many
insert into braid.subscription (subscription_name, subscription_owner, provider_name, provider_id, publications, origin, slot_name,
    create_slot, copy_data, enabled, synchronous_commit, run_as_owner, disable_on_error, apply_mode, phase)
select 'more ' || n, current_role::regrole, 'there', gen_random_uuid(), '{braid}', 'none', 'more_' || n, true, true, false, 'off',
    false, false, 'parallel', 'slot' from generate_series(1, 60) n;
select braid.create_subscription('s', :'there');
\echo :SQLSTATE

\set postlude :abs_srcdir '/sql/include/drop_two_nodes.sql'
\set ECHO none
\i :postlude
