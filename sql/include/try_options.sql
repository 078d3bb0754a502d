-- The output plugin's answers to options for a slot; included by the tests that need it. Errors
-- reach the top, and are not caught on the way: until then a session holds the slot.
\set SHOW_CONTEXT never
create or replace function try(slot name, variadic options text[]) returns text language sql as $$
    select 'fine' from (select count(*) from pg_logical_slot_peek_binary_changes(slot, null, null, variadic options)) c
$$;
