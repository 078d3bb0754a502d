-- What the decoding tests share; included by each, so that each can run alone.
set client_min_messages = warning;
create extension if not exists braid;

-- The slot's decoded changes since the last call, as lines. Options come after those that every
-- caller gives.
create or replace function records(slot name, publications text, variadic options text[] default '{}')
returns setof text language sql as $$
    select braid.gir_records(string_agg(data, ''::bytea))
    from pg_logical_slot_get_binary_changes(slot, null, null,
        variadic array['proto_version', '1', 'publication_names', publications] || options)
$$;

-- The same without the lines that say nothing about rows.
create or replace function changes(slot name, publications text, variadic options text[] default '{}')
returns setof text language sql as $$
    select line from records(slot, publications, variadic options) as line
    where line !~ '^(STREAM|BEGIN|COMMIT)'
$$;
reset client_min_messages;
