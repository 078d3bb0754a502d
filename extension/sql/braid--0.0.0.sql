-- Braid: install script. Everything lives in schema braid, which this script creates through the control file.
\echo Use "CREATE EXTENSION braid" to load this file. \quit

------------------------------------------------------------------------------------------------------------------------
-- Roles
------------------------------------------------------------------------------------------------------------------------

------------------------------------------------------------------------------------------------------------------------
-- Catalog
------------------------------------------------------------------------------------------------------------------------

-- The first three columns are read by the output plugin, by position, with a historic snapshot: hence user_catalog_table.
create table braid.node (
    node_name name primary key,
    node_id uuid not null,
    is_local boolean not null,
    dsn text,
    system_identifier text not null,
    database_oid oid not null,
    created_at timestamptz not null default now()
) with (user_catalog_table = true);
create unique index node_local on braid.node (is_local) where is_local;
comment on table braid.node is 'this node, and the peers that it subscribes to';

create table braid.subscription (
    subscription_id integer generated always as identity primary key,
    subscription_name name not null unique,
    subscription_owner regrole not null,
    dsn text not null,
    provider_name name not null,
    provider_id uuid not null,
    publications text[] not null,
    origin text not null check (origin in ('none', 'any')),
    slot_name name not null,
    create_slot boolean not null,
    copy_data boolean not null,
    enabled boolean not null,
    synchronous_commit text not null,
    run_as_owner boolean not null,
    disable_on_error boolean not null,
    apply_mode text not null check (apply_mode in ('serial', 'parallel')),
    -- What is left to do before changes are applied; moved only by the leader, in one direction:
    -- 'slot' (the provider's slot is still to be created), 'copy' (tables are still to be copied), 'stream'.
    phase text not null check (phase in ('slot', 'copy', 'stream')),
    -- Where the slot starts: what was committed at the provider before it is in the initial copy.
    start_lsn pg_lsn,
    -- Set by the leader when it stops for good, cleared by enable_subscription.
    error_sqlstate text,
    error_message text,
    error_detail text,
    error_hint text,
    -- End of the transaction at the provider that could not be applied, if that is what failed.
    error_lsn pg_lsn,
    error_at timestamptz,
    -- The transaction to leave out: one whose commit ends at this position.
    skip_lsn pg_lsn,
    created_at timestamptz not null default now()
);
comment on table braid.subscription is 'subscriptions of this node; connection strings are in here: not for everybody''s eyes';

create table braid.subscription_table (
    subscription_id integer not null references braid.subscription on delete cascade,
    relation regclass not null,
    -- 'waiting' (to be copied), 'copying', 'ready'. Moved by the leader and the copy workers.
    state text not null check (state in ('waiting', 'copying', 'ready')),
    -- Position of the snapshot that was copied: changes of transactions that committed before it are in the copy.
    copy_lsn pg_lsn,
    rows_copied bigint,
    bytes_copied bigint,
    copy_error text,
    ready_at timestamptz,
    primary key (subscription_id, relation)
);
comment on table braid.subscription_table is 'tables of each subscription and whether they are copied';

-- Replication origins are named braid/<node>/<number> and belong to the node where transactions were first committed. They are
-- never dropped: rows keep their origin's number for as long as they live. Those of a dropped subscription are used again for the same node.
create table braid.origin (
    origin_id oid primary key,
    node_name name not null,
    number integer not null,
    subscription_id integer references braid.subscription on delete set null,
    unique (node_name, number)
);
comment on table braid.origin is 'replication origins, the nodes they stand for and the subscriptions that use them';

-- Slots of dropped subscriptions that the provider still has. The manager drops them and removes the rows.
create table braid.slot_cleanup (
    slot_name name not null,
    dsn text not null,
    provider_name name not null,
    since timestamptz not null default now(),
    attempts integer not null default 0,
    last_error text,
    primary key (slot_name, provider_name)
);
comment on table braid.slot_cleanup is 'slots left at providers by dropped subscriptions';

create table braid.conflict (
    conflict_id bigint generated always as identity primary key,
    recorded_at timestamptz not null default now(),
    subscription_name name not null,
    relation regclass not null,
    kind text not null,
    resolution text not null,
    winner text not null check (winner in ('local', 'remote', 'merged', 'none')),
    reason text not null,
    key jsonb,
    local_row jsonb,
    remote_row jsonb,
    local_timestamp timestamptz,
    remote_timestamp timestamptz,
    local_origin name,
    remote_origin name,
    remote_xid xid,
    remote_lsn pg_lsn
);
create index conflict_recorded_at on braid.conflict (recorded_at);
comment on table braid.conflict is 'conflicts as they were resolved, with both rows';
