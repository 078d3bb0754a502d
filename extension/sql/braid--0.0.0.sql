-- Braid: install script. Everything lives in schema braid, which belongs to the extension and goes with it.
\echo Use "CREATE EXTENSION braid" to load this file. \quit

------------------------------------------------------------------------------------------------------------------------
-- Roles
------------------------------------------------------------------------------------------------------------------------

-- Cluster-wide: another database may have made them, and they stay when the extension goes.
do $$
declare
    wanted name;
begin
    foreach wanted in array array['braid_admin', 'braid_monitor'] loop
        begin
            execute format('create role %I nologin', wanted);
        exception when duplicate_object or unique_violation then
            null;
        end;
    end loop;
end
$$;

create schema braid;
comment on schema braid is 'multi-primary replication';
grant usage on schema braid to braid_admin, braid_monitor;

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
    -- Set by the leader before it creates the slot, having seen that there is none of that name: from then on the slot is this
    -- subscription's. Cleared when somebody else was faster.
    slot_attempted boolean not null default false,
    copy_data boolean not null,
    enabled boolean not null,
    synchronous_commit text not null,
    run_as_owner boolean not null,
    disable_on_error boolean not null,
    -- What becomes of a transaction that can't be applied: it stops the subscription, or is parked.
    on_error text not null default 'stop' check (on_error in ('stop', 'park', 'stop_always')),
    apply_mode text not null check (apply_mode in ('serial', 'parallel', 'batch', 'aggregate')),
    consolidate boolean not null default false,
    commit_order text not null default 'source' check (commit_order in ('source', 'relaxed')),
    streaming text not null default 'parallel' check (streaming in ('off', 'on', 'parallel')),
    -- Transactions with more changes are committed in pieces; null: none are.
    split_transactions_above integer check (split_transactions_above > 0),
    -- Transactions that are prepared at the provider are prepared here.
    two_phase boolean not null default false check (not (two_phase and commit_order = 'relaxed')),
    -- How fast it is read at most; null: no limit.
    rows_per_second bigint check (rows_per_second > 0),
    bytes_per_second bigint check (bytes_per_second > 0),
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
    created_at timestamptz not null default now(),
    -- Noted by the manager once a minute: all had come that was committed at the provider before this; it was connected then. The latter is also
    -- set by enable_subscription, for one that was given up.
    caught_up_at timestamptz,
    connected_at timestamptz,
    -- Since when nothing is remembered for its sake: it was away for too long. Set by the manager, cleared by enable_subscription.
    given_up_at timestamptz
);
comment on table braid.subscription is 'subscriptions of this node; connection strings are in here: not for everybody''s eyes';

create table braid.subscription_table (
    subscription_id integer not null references braid.subscription on delete cascade,
    relation regclass not null,
    -- 'waiting' (to be copied), 'copying', 'ready'. Moved by the leader and the copy workers.
    state text not null check (state in ('waiting', 'copying', 'ready')),
    -- Position of the snapshot that was copied: changes of transactions that committed before it are in the copy. Until the table is
    -- ready, that of the first attempt's snapshot.
    copy_lsn pg_lsn,
    -- The provider's snapshot of that position: a transaction that was prepared before it is in the copy if it had ended by then.
    copy_snapshot pg_snapshot,
    -- When the table was found empty and its copy began; null again once it is ready or somebody has to look after it.
    copy_began_at timestamptz,
    rows_copied bigint,
    bytes_copied bigint,
    -- What the provider estimates that there is to copy.
    rows_total bigint,
    bytes_total bigint,
    -- Whether the copy worker truncates the table in the transaction that copies it. That transaction carries the provider's
    -- origin, so that the truncation is not sent on to other nodes.
    truncate_first boolean not null default false,
    -- It has joined with its first change, and is copied only if it is empty then: all of its changes are in the stream, which waits.
    unless_filled boolean not null default false,
    -- Why the last attempt failed; written by the copy worker together with state 'waiting'.
    copy_error text,
    copy_error_sqlstate text,
    copy_error_detail text,
    copy_error_hint text,
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
    -- The source, if it is one of braid.ingest's: never another's.
    source_name name,
    -- The process of the subscription that uses it: two never use one.
    place integer,
    unique (node_name, number),
    unique (source_name, node_name),
    unique (subscription_id, node_name, place)
);
-- How far the sources of braid.ingest have come; moved in the transaction that applies their records.
create table braid.ingest_source (
    source_name name primary key,
    "position" pg_lsn not null default '0/0',
    last_at timestamptz,
    -- The newest commit time that came: versions of batches are kept as long as a source may bring something older.
    newest_at timestamptz
);
comment on table braid.ingest_source is 'sources of braid.ingest and how far each has come';
-- Versions of rows that were written by a batch: transactions of one origin that were committed here as one. The commit carries
-- the newest timestamp; "versions" has, for each row that is older, a hash of table and key and the timestamp, as pairs of
-- little-endian 64-bit numbers. Purged when nothing older can arrive any more.
create table braid.batch (
    xid bigint primary key,
    newest bigint not null,
    versions bytea not null,
    -- Rows that a conflict function made of two: hash, timestamp, and 16 bits for the origin's number. Also of transactions that are
    -- no batch; then "newest" is later, so that they are kept for longer.
    merged bytea
);
alter table braid.batch alter column versions set storage external;
alter table braid.batch alter column merged set storage external;
comment on table braid.batch is 'true row versions of transactions that were applied as one';

-- Transactions of this node whose version is not the time of their commit, as the clock was behind what they may have seen: "xid" with its epoch, "committed_at" the version,
-- microseconds since 1970-01-01 UTC. Under 0: up to where changes from elsewhere have come, where that is ahead of the clock. Purged when
-- nothing older can arrive any more, and no slot needs it.
create table braid.local_version (
    xid bigint not null,
    committed_at bigint not null
);
create index local_version_xid on braid.local_version (xid);
alter table braid.local_version replica identity full;
comment on table braid.local_version is 'versions of transactions of this node, where the clock was behind what they may have seen';

-- Commit timestamps that PostgreSQL may forget before all older changes of other nodes are here: of so many transactions in a row from "first_xid" on, which has
-- its epoch; "newest" is the newest of their versions, microseconds since 1970-01-01 UTC. One row without them says up to which transaction it was looked.
create table braid.kept_commit (
    first_xid bigint primary key,
    newest bigint,
    commits bytea
);
comment on table braid.kept_commit is 'commit timestamps of transactions, kept for longer than PostgreSQL has them';

-- Rows that were deleted: "key_hash" is a hash of table and key (one that equal keys share; where that may be another one elsewhere, that of the
-- stored bytes has a row of its own), "deleted_at" the commit timestamp of the deletion at its origin in
-- microseconds since 1970-01-01 UTC (0: the time at which the transaction that wrote the row has committed here, which was prepared),
-- "origin_id" that origin, 0 for this node. Of several for one row the newest counts. Purged when
-- nothing older can arrive any more.
create table braid.tombstone (
    key_hash bigint not null,
    deleted_at bigint not null,
    relation oid not null,
    origin_id integer not null
);
create index tombstone_key_hash on braid.tombstone (key_hash);
create index tombstone_deleted_at on braid.tombstone using brin (deleted_at) with (pages_per_range = 16, autosummarize = on);
-- A publication for all tables would otherwise forbid to purge it.
alter table braid.tombstone replica identity full;
comment on table braid.tombstone is 'rows that were deleted, as long as older changes of them may still arrive';

-- Rows that were taken out of tables without a key, each with what took it: of identical rows an older removal that comes late has the row of a newer one, which needs
-- another one then. "row_hash" is that of the whole row; "removed_at" and "removed_by", and "written_at" and "written_by" of the row itself, are as in braid.tombstone (0 at "removed_at": the
-- time at which the transaction that wrote this has committed here, which was prepared; at "written_at": older than all). Purged when nothing older can arrive any more.
create table braid.taken_row (
    row_hash bigint not null,
    removed_at bigint not null,
    relation oid not null,
    removed_by integer not null,
    written_at bigint not null,
    written_by integer not null
);
create index taken_row_row_hash on braid.taken_row (row_hash);
create index taken_row_removed_at on braid.taken_row using brin (removed_at) with (pages_per_range = 16, autosummarize = on);
alter table braid.taken_row replica identity full;
comment on table braid.taken_row is 'rows of tables without a key that were taken out, and by what, as long as older changes of them may still arrive';

-- Where the last transaction of this node's ends, in WAL, of which the collector of deletions has written rows of braid.taken_row: each counts, so none is to be there twice.
create table braid.taken_up_to (
    "position" pg_lsn not null
);
alter table braid.taken_up_to replica identity full;
comment on table braid.taken_up_to is 'how far rows that sessions have taken out of tables without a key are collected';

-- Who wrote which columns of a row, where the rule for columns is last_update_wins: "key_hash" as in braid.tombstone, "written_at" the commit timestamp of the change at its
-- origin in microseconds since 1970-01-01 UTC, "origin_id" that origin, 0 for this node, "columns" the numbers of the columns with the rule that it has given its values; null for all.
-- Purged when nothing older can arrive any more.
create table braid.column_write (
    key_hash bigint not null,
    written_at bigint not null,
    relation oid not null,
    origin_id integer not null,
    columns smallint[]
);
create index column_write_key_hash on braid.column_write (key_hash);
create index column_write_written_at on braid.column_write using brin (written_at) with (pages_per_range = 16, autosummarize = on);
alter table braid.column_write replica identity full;
comment on table braid.column_write is 'who wrote which columns, where each is a register of its own, as long as older changes of them may still arrive';

-- Versions of rows that an initial copy has brought, which its commit does not tell, as far as older changes of them may still arrive: by a hash of
-- the table here and of the hashes that the row's key has where it was copied from (as in braid.tombstone, one or two). "version_at" is microseconds since 1970-01-01 UTC, "origin_id" the origin that stands for the
-- node that wrote it, 0 for this one. "merged" says that the row was made of several there, and that who wrote that version has not seen all of it: this is known for
-- 30 days longer. A copy brings deletions along, too: into braid.tombstone.
create table braid.copied_version (
    key_hash bigint not null,
    version_at bigint not null,
    relation oid not null,
    origin_id integer not null,
    merged boolean not null
);
create index copied_version_key_hash on braid.copied_version (key_hash);
alter table braid.copied_version replica identity full;
comment on table braid.copied_version is 'versions of copied rows, as long as older changes of them may still arrive';

-- The tables at the provider, by OID, of which rows of "relation" were copied with their versions, up to "newest".
create table braid.copied_table (
    relation oid not null,
    table_id oid not null,
    newest bigint not null,
    primary key (relation, table_id)
);
comment on table braid.copied_table is 'where rows were copied from whose versions are remembered';

-- What the copy of a table without a key has of the transactions of another node than that which was copied, whose own stream brings them too: those that commit
-- before "position" in the other node's WAL, and in the ranges of "beyond" (pairs), without those that commit at "missing". "forwards" says that this goes for what the other node
-- passes on, too. Removed when nothing of it can come any more.
create table braid.copied_position (
    relation oid not null,
    node_id uuid not null,
    "position" pg_lsn not null,
    beyond pg_lsn[] not null,
    missing pg_lsn[] not null,
    forwards boolean not null,
    primary key (relation, node_id)
);
comment on table braid.copied_position is 'how much of other nodes'' transactions copies have that came from elsewhere';

-- Rows that have lost to another one under a further unique key, as long as the other nodes are not told. To tell them a row here is
-- deleted, in a transaction of this node's own: the output plugin makes of that the deletion of the row that lost, with the version that
-- stands here, "version_at" microseconds since 1970-01-01 UTC by the node "origin". "displaced" is a heap tuple of the relation, of which
-- at least the key is there; so no one but the extension may write here.
create table braid.displacement (
    relation oid not null,
    version_at bigint not null,
    origin text not null,
    displaced bytea not null
);
alter table braid.displacement replica identity full;
comment on table braid.displacement is 'rows that have lost to another one under a further unique key, of which the other nodes are not told yet';

-- Deletions of rows that are not here, and truncates that were carried out row by row, for nodes that read from this one what others wrote: a row
-- is inserted and deleted in the transaction that is applied, and of the insertion the output plugin makes what is passed on. "unfound" is a
-- heap tuple of the relation, of which at least the key is there; null for a truncate. So no one but the extension may write here.
create table braid.unfound (
    relations oid[] not null,
    unfound bytea,
    restart_identity boolean not null
);
alter table braid.unfound replica identity full;
comment on table braid.unfound is 'what found nothing here, on its way to the nodes behind this one';

-- What each applier has committed beyond the position of the subscription's origins, where commits may overtake each other. Written in
-- those commits, in place of what was there before; read when a leader starts. "ranges" is pairs: where the commit record of a
-- transaction starts at the provider, and where that of it, or of a later one in one piece with it, ends. What is not beyond
-- the position says nothing any more.
create table braid.applied (
    subscription_id integer not null references braid.subscription on delete cascade,
    applier integer not null,
    ranges pg_lsn[] not null,
    primary key (subscription_id, applier)
) with (fillfactor = 30);
alter table braid.applied alter column ranges set storage plain;
comment on table braid.applied is 'transactions that are committed although earlier ones are not';

-- What is committed here of a transaction that is committed in pieces: how many changes, and a digest of what they hold. Written in the
-- commits of its pieces, and removed in that of the last one; read when it comes again.
create table braid.split_progress (
    subscription_id integer primary key references braid.subscription on delete cascade,
    -- Where its commit record starts at the provider.
    commit_lsn pg_lsn not null,
    changes bigint not null,
    digest bigint not null
) with (fillfactor = 30);
comment on table braid.split_progress is 'transactions of which only the first pieces are committed';

-- Transactions that are set aside since they can't be applied, or have to wait for one that can't. Written by the applier that has one in
-- hand, in the commit that moves the subscription's position past it; removed in the commit that applies it. One that was given up stays for
-- as long as conflicts are kept; that of a dropped subscription too, hence no foreign key.
create table braid.parked_transaction (
    parked_id bigint generated always as identity primary key,
    subscription_id integer not null,
    subscription_name name not null,
    -- 'failed' (with an error of its own), 'waiting' (for an earlier one), 'skipped' (given up).
    state text not null check (state in ('failed', 'waiting', 'skipped')),
    -- At the provider.
    xid xid not null,
    commit_lsn pg_lsn not null,
    end_lsn pg_lsn not null,
    origin_name name not null,
    committed_at timestamptz not null,
    changes bigint not null,
    bytes bigint not null,
    -- Changes before these that are committed here, in pieces.
    committed_changes bigint not null default 0,
    -- What it holds: tables as a whole, other tables of which it holds rows, and hashes of these rows' keys.
    barred_tables text[] not null,
    other_tables text[] not null,
    keys bigint[] not null,
    -- The one that it waits for.
    waits_for bigint,
    error_sqlstate text,
    error_message text,
    error_detail text,
    error_hint text,
    attempts integer not null default 0,
    parked_at timestamptz not null default clock_timestamp(),
    tried_at timestamptz,
    skipped_at timestamptz
);
create index parked_transaction_subscription on braid.parked_transaction (subscription_id, parked_id);
comment on table braid.parked_transaction is 'transactions that are set aside since they cannot be applied';

-- Their records, in pieces of bounded size. Part 0 is the stream's header and the schemas of the relations; "ends" says that a frame ends with
-- the part.
create table braid.parked_record (
    parked_id bigint not null,
    part integer not null,
    ends boolean not null,
    records bytea not null,
    primary key (parked_id, part)
);
alter table braid.parked_record alter column records set storage external;
comment on table braid.parked_record is 'records of parked transactions';

-- Transactions that are prepared at the provider and could not be prepared here, or could not stay so: they come once more when they have committed there.
-- Written with the position of their PREPARE, 0/0 for those that were prepared; the leader asks the provider for them by number, and removes them when they are over.
create table braid.unprepared (
    subscription_id integer not null references braid.subscription on delete cascade,
    -- The transaction's id at the provider.
    xid bigint not null,
    prepare_lsn pg_lsn not null,
    reason text not null,
    noted_at timestamptz not null default clock_timestamp(),
    -- A position at the provider when it was not prepared any more.
    over_lsn pg_lsn,
    primary key (subscription_id, xid)
);
comment on table braid.unprepared is 'transactions that are prepared at the provider and are applied here only once they have committed';

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

create table braid.conflict_record (
    conflict_id bigint generated always as identity primary key,
    recorded_at timestamptz not null default now(),
    subscription_name name not null,
    relation regclass not null,
    -- Its name at the time.
    table_name text,
    kind text not null,
    resolution text not null,
    winner text not null check (winner in ('local', 'remote', 'merged', 'none')),
    reason text not null,
    key jsonb,
    local_row jsonb,
    remote_row jsonb,
    -- Columns of the remote row that the change did not carry: large values that it left as they were.
    remote_unknown text[],
    local_timestamp timestamptz,
    remote_timestamp timestamptz,
    local_origin name,
    remote_origin name,
    remote_xid xid,
    remote_lsn pg_lsn
);
create index conflict_recorded_at on braid.conflict_record (recorded_at);
comment on table braid.conflict_record is 'conflicts as they were resolved, with both rows';
-- jsonb ends at 256 MB.
create table braid.conflict_value (
    conflict_id bigint not null,
    side text not null check (side in ('local', 'remote')),
    column_name name not null,
    value text not null,
    primary key (conflict_id, side, column_name)
);
comment on table braid.conflict_value is 'values of rows in conflicts that are too large to stand in the row';

-- How many conflicts there were. Appliers only add rows to conflict_count, one for each transaction, table and kind, so that none waits for
-- another; the manager adds them up in conflict_total.
create table braid.conflict_count (
    subscription_name name not null,
    relation regclass not null,
    kind text not null,
    resolution text not null,
    winner text not null,
    conflicts bigint not null,
    counted_at timestamptz not null default now()
);
-- Without an index, and yet to be deleted from while a publication of all tables has it.
alter table braid.conflict_count replica identity full;
comment on table braid.conflict_count is 'conflicts of single transactions that are not in conflict_total yet';
create table braid.conflict_total (
    subscription_name name not null,
    relation regclass not null,
    kind text not null,
    resolution text not null,
    winner text not null,
    conflicts bigint not null,
    first_at timestamptz not null,
    last_at timestamptz not null,
    primary key (subscription_name, relation, kind, resolution, winner)
);
comment on table braid.conflict_total is 'how many conflicts there were, by subscription, table and kind';

-- What a conflict function is told besides the rows.
create type braid.conflict as (
    kind text,
    relation regclass,
    key jsonb,
    local_timestamp timestamptz,
    local_origin name,
    remote_timestamp timestamptz,
    remote_origin name,
    -- Rows in the way of the remote one besides the local one, as a jsonb array; null where there are none.
    others jsonb
);
comment on type braid.conflict is 'what a conflict function is told besides the rows: the kind, the key, both versions, further rows in the way';

-- Calls of conflict functions that were committed by themselves, because what they wrote goes to other nodes, before the transaction
-- with the conflict is applied: which rows met. Goes in that transaction.
create table braid.conflict_call (
    call_id bigint generated always as identity primary key,
    subscription_id integer not null references braid.subscription on delete cascade,
    commit_lsn pg_lsn not null,
    relation oid not null,
    key_hash bigint not null,
    local_timestamp bigint,
    local_origin oid,
    -- How often the row was asked about before in the same transaction.
    times bigint not null,
    -- The row that it gave, as text; null for none.
    given text
);
create index conflict_call_commit_lsn on braid.conflict_call (subscription_id, commit_lsn);
comment on table braid.conflict_call is 'calls of conflict functions that were committed ahead of the transactions that they belong to';

-- What is done about conflicts; null stands for all tables, or all kinds.
create table braid.conflict_rule (
    rule_id integer generated always as identity primary key,
    relation regclass,
    kind text,
    -- Null: there is no rule any more.
    resolution text,
    -- The conflict function, and whether what it writes goes to other nodes.
    function_id oid,
    replicates boolean not null default false,
    -- A function was asked at some time: rows that it made may still be there.
    has_asked boolean not null default false,
    -- When and at which node it was set: of two that are set for all nodes the newer one counts on all of them.
    set_at timestamptz,
    set_by name collate "C",
    -- It counts on all nodes, or the word that there is none does: a node that joins is told.
    on_all_nodes boolean not null default false,
    unique nulls not distinct (relation, kind),
    check ((resolution = 'function') = (function_id is not null))
);
comment on table braid.conflict_rule is 'what is done about conflicts, by table and kind';

-- Rules that are to count on all nodes: a row that is inserted is a message to those that receive from this one. It is deleted at once.
create table braid.rule_change (content text not null);
alter table braid.rule_change replica identity full;
comment on table braid.rule_change is 'rules for conflicts, and for columns, on their way to the other nodes';

create table braid.column_rule (
    relation regclass not null,
    -- Of a column, which keeps it when it is renamed, and takes it along when it is dropped.
    column_number smallint not null,
    -- Null: there was a rule, and rows may be there that it has made.
    rule text check (rule in ('delta', 'max', 'min', 'last_update_wins')),
    -- As in braid.conflict_rule.
    set_at timestamptz,
    set_by name collate "C",
    on_all_nodes boolean not null default false,
    primary key (relation, column_number)
);
comment on table braid.column_rule is 'what becomes of single columns where a change meets a row';

-- Comparisons of tables with their providers: the last one of each table, and what it found.
create table braid.comparison (
    comparison_id bigint generated always as identity primary key,
    subscription_name name not null,
    relation regclass not null,
    started_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    -- Null while it runs, and when it was interrupted: the CALL is known by its process and when it began.
    finished_at timestamptz,
    started_by name not null,
    pid integer not null,
    statement_at timestamptz not null,
    -- 'reading' and 'settling' (rows that differed are looked at again), then 'done', or 'limit' where max_differences ended it.
    phase text not null check (phase in ('reading', 'settling', 'done', 'limit')),
    walk text not null check (walk in ('ranges', 'keys', 'given keys')),
    rows_total bigint,
    rows_compared bigint not null default 0,
    ranges bigint not null default 0,
    ranges_differed bigint not null default 0,
    looked_at bigint not null default 0,
    differences bigint not null default 0,
    unsettled bigint not null default 0
) with (fillfactor = 50);
create index comparison_table on braid.comparison (relation);
comment on table braid.comparison is 'comparisons of tables with their providers';

create table braid.difference (
    difference_id bigint generated always as identity primary key,
    comparison_id bigint not null references braid.comparison on delete cascade,
    -- Texts of the key's columns.
    key_values text[] not null,
    key jsonb not null,
    kind text not null check (kind in ('missing_here', 'only_here', 'differs')),
    columns text[],
    local_row jsonb,
    provider_row jsonb,
    local_timestamp timestamptz,
    local_origin name,
    provider_timestamp timestamptz,
    provider_origin name,
    -- The transaction that wrote the row and a hash of it: as long as they are the same, so is the row.
    local_state text,
    provider_state text,
    repaired_by bigint
);
create index difference_comparison on braid.difference (comparison_id, key_values);
comment on table braid.difference is 'rows that differ from the provider''s, as the last comparison of their table has found them';

create sequence braid.repair_number;
comment on sequence braid.repair_number is 'numbers of repairs';

create table braid.repair_entry (
    entry_id bigint generated always as identity primary key,
    repair_id bigint not null,
    done_at timestamptz not null default clock_timestamp(),
    done_by name not null,
    subscription_name name not null,
    relation regclass not null,
    side text not null check (side in ('provider', 'newest')),
    dry_run boolean not null,
    -- 'inserted', 'updated', 'deleted'; 'kept' (what is here is right, or nobody knows), 'left' (written meanwhile), 'failed'.
    action text not null,
    reason text,
    key jsonb not null,
    kind text not null,
    local_row jsonb,
    provider_row jsonb,
    local_timestamp timestamptz,
    local_origin name,
    provider_timestamp timestamptz,
    provider_origin name
);
create index repair_entry_repair on braid.repair_entry (repair_id);
comment on table braid.repair_entry is 'what repairs did, with both rows as they were before';

-- None of these travels in a dump: a restored database must not act as the node that it was copied from, nor take over its
-- subscriptions' slots. Hence no pg_extension_config_dump.
revoke all on braid.applied, braid.comparison, braid.difference, braid.repair_entry, braid.repair_number, braid.node, braid.subscription,
    braid.subscription_table, braid.origin, braid.slot_cleanup, braid.conflict_record, braid.ingest_source, braid.conflict_rule, braid.rule_change, braid.column_rule, braid.conflict_value,
    braid.conflict_count, braid.conflict_total, braid.conflict_call, braid.batch, braid.local_version, braid.kept_commit, braid.tombstone, braid.taken_row, braid.taken_up_to, braid.column_write, braid.copied_version, braid.copied_table, braid.copied_position, braid.displacement, braid.unfound,
    braid.split_progress, braid.parked_transaction, braid.parked_record, braid.unprepared from public;

------------------------------------------------------------------------------------------------------------------------
-- Nodes
------------------------------------------------------------------------------------------------------------------------

create function braid.create_node(node_name name, dsn text) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'create_node_wrapper';
comment on function braid.create_node is 'makes this database a node, under a name that no other node has; peers reach it at the connection string';

create function braid.drop_node(node_name name) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'drop_node_wrapper';
comment on function braid.drop_node is 'makes this database no node any more, or forgets a peer';

------------------------------------------------------------------------------------------------------------------------
-- Subscriptions
------------------------------------------------------------------------------------------------------------------------

create function braid.create_subscription(
    subscription_name name,
    dsn text,
    publications text[] default '{braid}',
    copy_data boolean default true,
    enabled boolean default true,
    create_slot boolean default true,
    slot_name name default null,
    origin text default 'none',
    synchronous_commit text default 'off',
    run_as_owner boolean default false,
    disable_on_error boolean default false,
    apply_mode text default 'parallel',
    consolidate boolean default false,
    commit_order text default 'source',
    streaming text default 'parallel',
    two_phase boolean default false,
    split_transactions_above integer default null,
    on_error text default 'stop'
) returns integer
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'create_subscription_wrapper';
comment on function braid.create_subscription is 'subscribes this node to publications of another; takes effect at commit; returns the number of the subscription';

create function braid.alter_subscription(
    subscription_name name,
    dsn text default null,
    publications text[] default null,
    slot_name name default null,
    origin text default null,
    synchronous_commit text default null,
    run_as_owner boolean default null,
    disable_on_error boolean default null,
    apply_mode text default null,
    consolidate boolean default null,
    commit_order text default null,
    streaming text default null,
    split_transactions_above integer default null,
    on_error text default null,
    two_phase boolean default null
) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'alter_subscription_wrapper';
comment on function braid.alter_subscription is 'changes a subscription; what is not named stays as it is';

create function braid.enable_subscription(subscription_name name, after_away boolean default false) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'enable_subscription_wrapper';
comment on function braid.enable_subscription is 'lets a subscription run, also one that an error stopped';

create function braid.disable_subscription(subscription_name name) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'disable_subscription_wrapper';
comment on function braid.disable_subscription is 'stops a subscription; its slot keeps its place';

create function braid.set_rate_limit(
    subscription_name name,
    rows_per_second bigint default null,
    bytes_per_second bigint default null
) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'set_rate_limit_wrapper';
comment on function braid.set_rate_limit is 'how fast a subscription is read at most, while it runs; null or 0 is no limit';

create function braid.set_conflict_resolution(
    relation regclass,
    kind text,
    resolution text,
    function regproc default null,
    replicate boolean default false,
    on_all_nodes boolean default false
) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'set_conflict_resolution_wrapper';
comment on function braid.set_conflict_resolution is
    'what is done about conflicts here, or on all nodes: in a table or, with null, in all that have no rule; of one kind or, with null, of all; with null as before';

-- What an applier, and a leader, does with such a rule of another node: JSON in UTF-8, as hexadecimal digits.
create function braid.take_conflict_resolution(content text) returns void
    language c volatile strict parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'take_conflict_resolution_wrapper';
comment on function braid.take_conflict_resolution is 'sets a rule for conflicts that another node has set for all of them, unless a newer one is there';

-- As they are told, and asked for.
create function braid.rules_for_all_nodes(out relation regclass, out kind text, out column_name name, out content text) returns setof record
    language sql stable security definer set search_path = pg_catalog, pg_temp
begin atomic
    select a.relation, a.kind, a.column_name, encode(convert_to(a.rule::text, 'UTF8'), 'hex')
      from (select r.relation, r.kind, null::name as column_name, r.set_at, r.rule_id as place,
                   jsonb_build_object('schema', n.nspname, 'table', c.relname, 'kind', r.kind, 'resolution', r.resolution,
                       'function_schema', m.nspname, 'function', p.proname, 'replicate', r.replicates,
                       'set_at', to_char(r.set_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US"+00"'), 'set_by', r.set_by) as rule
              from braid.conflict_rule r
              left join pg_class c on c.oid = r.relation
              left join pg_namespace n on n.oid = c.relnamespace
              left join pg_proc p on p.oid = r.function_id
              left join pg_namespace m on m.oid = p.pronamespace
             where r.on_all_nodes and (r.relation is null or c.oid is not null)
            union all
            select r.relation, null, t.attname, r.set_at, r.column_number,
                   jsonb_build_object('schema', n.nspname, 'table', c.relname, 'column', t.attname, 'rule', r.rule,
                       'set_at', to_char(r.set_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US"+00"'), 'set_by', r.set_by)
              from braid.column_rule r
              join pg_class c on c.oid = r.relation
              join pg_namespace n on n.oid = c.relnamespace
              join pg_attribute t on t.attrelid = c.oid and t.attnum = r.column_number and not t.attisdropped
             where r.on_all_nodes) a
     order by a.set_at, a.place;
end;
comment on function braid.rules_for_all_nodes is
    'the rules for conflicts and for columns that count on all nodes, and which of them were removed, as a node that joins is told';

-- As take_conflict_resolution; without "required" a table that is not here is only warned of.
create function braid.take_column_rule(content text, required boolean) returns void
    language c volatile strict parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'take_column_rule_wrapper';
comment on function braid.take_column_rule is 'sets a rule for a column that another node has set for all of them, unless a newer one is there';

create function braid.set_column_rule(relation regclass, column_name name, rule text, on_all_nodes boolean default false) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'set_column_rule_wrapper';
comment on function braid.set_column_rule is
    'what becomes of a column where a change meets a row, here or on all nodes, whichever wins: delta adds both up, max and min keep the largest or smallest value, last_update_wins that of the newest change of the column; null: it goes with the row';

-- Calls the function with rows of the table, each with the key of the first, and takes back what it writes. An update is tried with a
-- third row as the one before it where WAL would have that.
create function braid.check_conflict_function(
    relation regclass,
    function regproc,
    sample_rows integer default 10,
    out law text,
    out kind text,
    out arguments jsonb,
    out one_result jsonb,
    out other_result jsonb
) returns setof record
    language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp
as $$
declare
    row_type text;
    whole boolean;
    key_names text[];
    asked text;
    n integer;
    sample jsonb[];
    key jsonb;
    counter jsonb := '[]';
    orders integer[] := '{{1,2,3},{1,3,2},{2,1,3},{2,3,1},{3,1,2},{3,2,1}}';
    picked integer[];
    before jsonb;
    first_fold jsonb;
    fold jsonb;
    one jsonb;
    other jsonb;
    at timestamptz[] := array['2001-01-01', '2001-01-02', '2001-01-03'];
    latest integer;
begin
    select t.oid::regtype::text, c.relreplident = 'f',
           array(select a.attname from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any (i.indkey)
                  where i.indrelid = c.oid and i.indisprimary)
      into row_type, whole, key_names
      from pg_class c join pg_type t on t.oid = c.reltype
      join pg_proc p on p.oid = function and p.prorettype = t.oid
       and p.proargtypes = concat_ws(' ', t.oid, t.oid, t.oid, 'braid.conflict'::regtype::oid)::oidvector
     where c.oid = relation;
    if row_type is null then
        raise exception using errcode = 'invalid_function_definition',
            message = format('%s is not a conflict function for table %s', function, relation),
            hint = 'It has to be declared as f(local t, remote t, before t, info braid.conflict) returns t, where t is the table.';
    end if;
    execute format('select array_agg(r) from (select to_jsonb(s) as r from (select * from %s limit 10000) s order by random() limit $1) s', relation)
       into sample using greatest(sample_rows, 0);
    n := coalesce(cardinality(sample), 0);
    if n < 3 then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('table %s has fewer than three rows to try the function on', relation),
            hint = 'Fill the table, or a copy of it, with rows like those that will meet.';
    end if;
    key := (select coalesce(jsonb_object_agg(k, sample[1] -> k), '{}') from unnest(key_names) k);
    sample := array(select r || key from unnest(sample) r);
    asked := format('select to_jsonb(%s(jsonb_populate_record(null::%s, $1), jsonb_populate_record(null::%2$s, $2), '
                   'jsonb_populate_record(null::%2$s, $3), row($4, $5, $6, $7, $8, $9, $10, null)::braid.conflict))',
                   (select format('%I.%I', m.nspname, p.proname) from pg_proc p join pg_namespace m on m.oid = p.pronamespace
                     where p.oid = function), row_type);
    begin
        foreach kind in array '{insert_exists,update_origin_differs}'::text[] loop
            for i in 1 .. n loop
                for j in 1 .. n loop
                    -- The row before: another one, where there is one to be had.
                    before := case when whole and kind <> 'insert_exists' then sample[1 + (i + j) % n] end;
                    execute asked into one using sample[i], sample[j], before, kind, relation, key, at[1], 'one'::name, at[2], 'two'::name;
                    execute asked into other using sample[i], sample[j], before, kind, relation, key, at[1], 'one'::name, at[2], 'two'::name;
                    if one is distinct from other then
                        counter := counter || jsonb_build_object('law', 'the same arguments give the same row', 'kind', kind,
                            'arguments', jsonb_build_array(sample[i], sample[j], before), 'one', one, 'other', other);
                    end if;
                    execute asked into other using sample[j], sample[i], before, kind, relation, key, at[2], 'two'::name, at[1], 'one'::name;
                    if one is distinct from other then
                        counter := counter || jsonb_build_object('law', 'local and remote may be exchanged', 'kind', kind,
                            'arguments', jsonb_build_array(sample[i], sample[j], before), 'one', one, 'other', other);
                    end if;
                end loop;
                if whole and kind <> 'insert_exists' then
                    for j in 1 .. n loop
                        execute asked into one using sample[i], sample[j], sample[i], kind, relation, key, at[1], 'one'::name, at[2], 'two'::name;
                        if one is distinct from sample[j] then
                            counter := counter || jsonb_build_object('law', 'a row that its writer saw is replaced', 'kind', kind,
                                'arguments', jsonb_build_array(sample[i], sample[j], sample[i]), 'one', one, 'other', sample[j]);
                        end if;
                    end loop;
                else
                    execute asked into one using sample[i], sample[i], null::jsonb, kind, relation, key, at[1], 'one'::name, at[2], 'two'::name;
                    if one is distinct from sample[i] then
                        counter := counter || jsonb_build_object('law', 'a row with itself is that row', 'kind', kind,
                            'arguments', jsonb_build_array(sample[i], sample[i], null), 'one', one, 'other', sample[i]);
                    end if;
                end if;
            end loop;
            -- Three rows, in every order in which they can arrive.
            for i in 1 .. n loop
                for j in i + 1 .. n loop
                    for k in j + 1 .. n loop
                        picked := array[i, j, k];
                        before := case when whole and kind <> 'insert_exists' then sample[1 + (i + j + k) % n] end;
                        for o in 1 .. 6 loop
                            fold := sample[picked[orders[o][1]]];
                            latest := orders[o][1];
                            for s in 2 .. 3 loop
                                execute asked into fold using fold, sample[picked[orders[o][s]]], before, kind, relation, key,
                                    at[latest], format('node %s', latest)::name, at[orders[o][s]], format('node %s', orders[o][s])::name;
                                latest := greatest(latest, orders[o][s]);
                            end loop;
                            if o = 1 then
                                first_fold := fold;
                            elsif fold is distinct from first_fold then
                                counter := counter || jsonb_build_object('law', 'rows may come in any order', 'kind', kind,
                                    'arguments', jsonb_build_array(sample[i], sample[j], sample[k], before), 'one', first_fold, 'other', fold);
                                exit;
                            end if;
                        end loop;
                    end loop;
                    exit when jsonb_array_length(counter) > 100;
                end loop;
            end loop;
        end loop;
        -- What the function has written goes; what it gave stays in the variables.
        raise exception using errcode = 'BR000', message = 'done';
    exception when sqlstate 'BR000' then
        null;
    end;
    return query
        select c ->> 'law', c ->> 'kind', c -> 'arguments', c -> 'one', c -> 'other'
          from jsonb_array_elements(counter) c limit 100;
end
$$;
comment on function braid.check_conflict_function is
    'tries a conflict function on rows of its table in all orders, and gives those for which nodes would come to differ';

create function braid.retry_parked(subscription_name name, parked_id bigint default null) returns bigint
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'retry_parked_wrapper';
comment on function braid.retry_parked is
    'applies parked transactions, all or one of them, and what waited for them, in the order of the source; returns how many were applied';

create function braid.skip_parked(subscription_name name, parked_id bigint) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'skip_parked_wrapper';
comment on function braid.skip_parked is 'gives a parked transaction up; what waited for it is applied';

create function braid.parked_records(parked_id bigint) returns table (number integer, record text)
    language c stable parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'parked_records_wrapper';
comment on function braid.parked_records is 'the changes of a parked transaction, as gir-json';

create function braid.rename_subscription(subscription_name name, new_name name) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'rename_subscription_wrapper';
comment on function braid.rename_subscription is 'renames a subscription; its slot keeps its name';

create function braid.drop_subscription(subscription_name name, drop_slot boolean default true) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'drop_subscription_wrapper';
comment on function braid.drop_subscription is 'drops a subscription, and its replication slot at the provider once that can be reached';

create function braid.refresh_subscription(subscription_name name, copy_data boolean default true, out relation regclass, out action text) returns setof record
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'refresh_subscription_wrapper';
comment on function braid.refresh_subscription is 'brings the tables of a subscription in step with its publications; returns what was added and removed';

create function braid.resync_table(subscription_name name, relation regclass, truncate_first boolean default true) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'resync_table_wrapper';
comment on function braid.resync_table is 'copies a table of a subscription anew';

create function braid.skip_transaction(subscription_name name, lsn pg_lsn) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'skip_transaction_wrapper';
comment on function braid.skip_transaction is 'leaves out the transaction that stopped a subscription';

------------------------------------------------------------------------------------------------------------------------
-- Positions and waiting
------------------------------------------------------------------------------------------------------------------------

create function braid.wait_for_subscription(subscription_name name, timeout interval default null) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'wait_for_subscription_wrapper';
comment on function braid.wait_for_subscription is 'waits until a subscription has copied its tables and is streaming';

create function braid.sync_event() returns pg_lsn
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'sync_event_wrapper';
comment on function braid.sync_event is 'returns a position of this node that lies behind everything committed so far';

create function braid.wait_for_event(origin_node name, "position" pg_lsn, timeout interval default null) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'wait_for_event_wrapper';
comment on function braid.wait_for_event is 'waits until everything up to a position of another node is applied here';

------------------------------------------------------------------------------------------------------------------------
-- What a peer asks
------------------------------------------------------------------------------------------------------------------------

-- Subscribers look at this before they subscribe. It runs with the owner's rights because the settings of output plugins are not for
-- every role to see.
create function braid.node_info(
    out node_name name,
    out node_id uuid,
    out identity_valid boolean,
    out system_identifier text,
    out database_oid oid,
    out extension_version text,
    out wal_level text,
    out track_commit_timestamp boolean,
    out output_plugin_libraries text,
    out output_plugin_allowed boolean,
    out free_slots integer,
    out free_walsenders integer
) returns setof record
    language sql stable parallel restricted security definer set search_path = pg_catalog, pg_temp
as $$
    select n.node_name,
           n.node_id,
           n.system_identifier = c.system_identifier::text and n.database_oid = d.oid,
           n.system_identifier,
           n.database_oid,
           e.extversion,
           current_setting('wal_level'),
           current_setting('track_commit_timestamp')::boolean,
           l.libraries,
           -- Servers that do not know the setting allow every plugin.
           l.libraries is null or l.libraries ~ '(^|,)\s*"?braid"?\s*(,|$)',
           current_setting('max_replication_slots')::integer - (select count(*) from pg_replication_slots)::integer,
           current_setting('max_wal_senders')::integer
               - (select count(*) from pg_stat_activity where backend_type = 'walsender')::integer
      from braid.node n,
           pg_control_system() c,
           pg_database d,
           pg_extension e,
           current_setting('output_plugin_libraries', true) as l (libraries)
     where n.is_local and d.datname = current_database() and e.extname = 'braid'
$$;
comment on function braid.node_info is 'which node this database is, and whether it can be subscribed to';

create function braid.ingest(gir jsonb, origin name default null, out applied bigint, out skipped bigint) returns setof record
    language c volatile parallel unsafe rows 1 set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'ingest_wrapper';
comment on function braid.ingest is 'applies records in gir-json, as though a subscription to the origin had delivered them; those that came before are skipped';

create function braid.forget_source(source_name name) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'forget_source_wrapper';
comment on function braid.forget_source is 'forgets a source of braid.ingest and how far it has come';

create function braid.gir_records(frame bytea) returns setof text
    language c immutable strict parallel safe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'gir_records_wrapper';
comment on function braid.gir_records is 'the records of a GIR frame, one a line, without what differs from run to run';

------------------------------------------------------------------------------------------------------------------------
-- Comparing and repairing
------------------------------------------------------------------------------------------------------------------------

-- The steps of the procedures below, which commit between them: a procedure with a search_path of its own could not.
create function braid.compare_begin(subscription_name name, relation regclass, rows_per_second bigint, max_differences bigint, keys text) returns bigint
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'compare_begin_wrapper';
comment on function braid.compare_begin is 'a part of braid.compare';

create function braid.compare_step(comparison_id bigint) returns boolean
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'compare_step_wrapper';
comment on function braid.compare_step is 'a part of braid.compare';

create function braid.repair_begin(subscription_name name, relation regclass, side text, keys text, dry_run boolean) returns bigint
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'repair_begin_wrapper';
comment on function braid.repair_begin is 'a part of braid.repair';

create function braid.repair_step(repair_id bigint) returns boolean
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'repair_step_wrapper';
comment on function braid.repair_step is 'a part of braid.repair';

create function braid.repair_failed(repair_id bigint, reason text) returns void
    language c volatile parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'repair_failed_wrapper';
comment on function braid.repair_failed is 'a part of braid.repair';

create function braid.compare_result(comparison_id bigint, out differences bigint, out unsettled bigint, out rows_compared bigint) returns setof record
    language sql stable parallel restricted security definer rows 1 set search_path = pg_catalog, pg_temp
as $$
    select c.differences, c.unsettled, c.rows_compared from braid.comparison c where c.comparison_id = $1
$$;
comment on function braid.compare_result is 'a part of braid.compare';

create function braid.repair_result(repair_id bigint, out repaired bigint, out left_alone bigint) returns setof record
    language sql stable parallel restricted security definer rows 1 set search_path = pg_catalog, pg_temp
as $$
    select count(*) filter (where e.action in ('inserted', 'updated', 'deleted')),
           count(*) filter (where e.action not in ('inserted', 'updated', 'deleted'))
      from braid.repair_entry e where e.repair_id = $1
$$;
comment on function braid.repair_result is 'a part of braid.repair';

-- Whether the CALL that compares still runs.
create function braid.compare_activity() returns table (comparison_id bigint, is_running boolean)
    language sql stable parallel restricted security definer set search_path = pg_catalog, pg_temp
as $$
    select c.comparison_id,
           c.finished_at is null and exists (select from pg_stat_get_activity(c.pid) a
               where a.state = 'active' and a.query_start = c.statement_at)
      from braid.comparison c
$$;
comment on function braid.compare_activity is 'which comparisons are running';

create procedure braid.compare(
    subscription_name name,
    relation regclass,
    rows_per_second bigint default null,
    max_differences bigint default 10000,
    keys jsonb default null,
    inout comparison_id bigint default null,
    inout differences bigint default null,
    inout unsettled bigint default null,
    inout rows_compared bigint default null
) language plpgsql as $$
begin
    comparison_id := braid.compare_begin(subscription_name, relation, rows_per_second, max_differences, keys::text);
    loop
        commit;
        exit when braid.compare_step(comparison_id);
    end loop;
    commit;
    select r.differences, r.unsettled, r.rows_compared into differences, unsettled, rows_compared
      from braid.compare_result(comparison_id) r;
end
$$;
comment on procedure braid.compare is 'finds the rows of a table that differ from the provider''s, while both are written to; braid.differences shows them';

create procedure braid.repair(
    subscription_name name,
    relation regclass,
    side text default 'newest',
    keys jsonb default null,
    dry_run boolean default false,
    inout repair_id bigint default null,
    inout repaired bigint default null,
    inout left_alone bigint default null
) language plpgsql as $$
declare
    is_done boolean := false;
begin
    repair_id := braid.repair_begin(subscription_name, relation, side, keys::text, dry_run);
    while not is_done loop
        commit;
        begin
            is_done := braid.repair_step(repair_id);
        exception when integrity_constraint_violation or data_exception or generated_always or raise_exception then
            perform braid.repair_failed(repair_id, sqlerrm);
        end;
    end loop;
    commit;
    select r.repaired, r.left_alone into repaired, left_alone from braid.repair_result(repair_id) r;
end
$$;
comment on procedure braid.repair is 'mends what the last comparison of a table has found; braid.repair_log shows what was done';

------------------------------------------------------------------------------------------------------------------------
-- Activity of the workers
------------------------------------------------------------------------------------------------------------------------

create function braid.subscription_activity() returns table (
    subscription_id integer, state text, leader_pid integer, applier_pids integer[], received_lsn pg_lsn, applied_lsn pg_lsn,
    flushed_lsn pg_lsn, provider_lsn pg_lsn, last_message_at timestamptz, last_commit_at timestamptz, transactions bigint,
    inserts bigint, updates bigint, deletes bigint, truncates bigint, bytes bigint, conflicts bigint, retries bigint,
    transactions_per_second double precision, rows_per_second double precision, is_throttled boolean, started_at timestamptz,
    stats_since timestamptz,
    last_error_sqlstate text, last_error text, last_error_detail text, last_error_hint text, last_error_lsn pg_lsn,
    last_error_at timestamptz, failures integer, leader_wait text, caught_up_at timestamptz
) language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'subscription_activity_wrapper';
comment on function braid.subscription_activity is 'what the leader of each running subscription is doing';

create function braid.applier_activity() returns table (
    subscription_id integer, number integer, pid integer, state text, commit_lsn pg_lsn, transactions bigint, changes bigint,
    retries bigint, busy_fraction double precision, wait text, taken_at timestamptz
) language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'applier_activity_wrapper';
comment on function braid.applier_activity is 'what each applier is doing';

create function braid.table_activity() returns table (
    subscription_id integer, relation oid, inserts bigint, updates bigint, deletes bigint, truncates bigint, conflicts bigint,
    copy_rows bigint, copy_bytes bigint
) language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'table_activity_wrapper';
comment on function braid.table_activity is 'what was applied to each table since its subscription started';

create function braid.schedule_activity() returns table (
    subscription_id integer, scheduled bigint, dependent bigint, edges bigint, keys bigint, keys_forgotten bigint,
    table_barriers bigint, all_barriers bigint, barriers_truncate bigint, barriers_unkeyed bigint, barriers_index bigint,
    barriers_trigger bigint, barriers_size bigint, large bigint, in_flight bigint, width bigint, width_mean double precision,
    width_max bigint, batches bigint, batched bigint, batch_max bigint, consolidated bigint, sought_ahead bigint, pieces bigint,
    applied_while_running bigint, given_up_while_running bigint, applied_by_leader bigint, taking integer, rate_one double precision, rate_all double precision,
    questions bigint, fetched_columns bigint
) language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'schedule_activity_wrapper';
comment on function braid.schedule_activity is 'how the transactions of each running subscription depend on each other, and how they were joined';

create function braid.scaling_activity() returns table (
    subscription_id integer, at timestamptz, appliers_before integer, appliers_after integer, utilisation double precision,
    rows_per_second double precision, reason text
) language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'scaling_activity_wrapper';
comment on function braid.scaling_activity is 'the last decisions on how many appliers each subscription has';

create function braid.passing_slots() returns setof text language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'passing_slots_wrapper';
comment on function braid.passing_slots is 'the slots through which another node reads, or may read, what this one has received from others';

create function braid.clock_activity() returns table (newest timestamptz, waits bigint, wait_micros bigint, exceeded bigint)
    language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'clock_activity_wrapper';
comment on function braid.clock_activity is 'the newest change that was seen here, and the commits that had to wait for the clock';

create function braid.skew_activity() returns table (
    subscription_id integer, offset_micros bigint, error_micros bigint, measured_at timestamptz
) language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'skew_activity_wrapper';
comment on function braid.skew_activity is 'how far the clock of each subscription''s provider is ahead of this node''s, as measured last';

create function braid.deletion_activity() returns table (
    remembered boolean, collector_pid integer, collected_lsn pg_lsn
) language c volatile strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'deletion_activity_wrapper';
comment on function braid.deletion_activity is 'whether deletions are remembered, and how far local ones are collected';

create function braid.row_version("relation" oid, "row" tid) returns table (key_hash bigint, committed_at timestamptz, node text, other_hash bigint, merged boolean)
    language c stable strict parallel restricted rows 1 set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'row_version_wrapper';
comment on function braid.row_version is 'the version of a row, given its tableoid and ctid: when and at which node it was last written, and whether it was merged with what that node had not seen';

create function braid.has_merged_rows(xid) returns boolean
    language c stable strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'has_merged_rows_wrapper';
comment on function braid.has_merged_rows is 'whether a transaction, given by the xmin of a row, has written rows that were merged';

create function braid.commit_timestamp(xid) returns timestamptz
    language c stable strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'commit_timestamp_wrapper';
comment on function braid.commit_timestamp is 'the version of what a transaction wrote: its commit timestamp, but where this node''s clock was behind';

-- What another node asks for that copies a table from here.
create function braid.copied_deletions("relation" oid, since timestamptz, out key_hash bigint, out deleted_at bigint, out node name) returns setof record
    language sql stable strict parallel restricted security definer set search_path = pg_catalog, pg_temp
as $$
    with tables as (select $1 as oid union select relid from pg_partition_tree($1)),
         deletions as (
             select t.key_hash, t.origin_id,
                    case when t.deleted_at <> 0 then t.deleted_at
                         else (extract(epoch from coalesce(pg_xact_commit_timestamp(t.xmin), now())) * 1000000)::bigint end as deleted_at
               from braid.tombstone t join tables on tables.oid = t.relation)
    select d.key_hash, d.deleted_at, coalesce(o.node_name, n.node_name)
      from deletions d
      left join braid.origin o on o.origin_id = d.origin_id::oid
      left join braid.node n on n.is_local and d.origin_id = 0
     where d.deleted_at >= extract(epoch from $2) * 1000000 and coalesce(o.node_name, n.node_name) is not null
$$;
comment on function braid.copied_deletions is 'a part of the initial copy at another node: what was deleted from a table';

create function braid.copied_taken_rows("relation" oid, since timestamptz, out row_hash bigint, out removed_at bigint, out removed_by name, out written_at bigint, out written_by name) returns setof record
    language sql stable strict parallel restricted security definer set search_path = pg_catalog, pg_temp
as $$
    with tables as (select $1 as oid union select relid from pg_partition_tree($1)),
         nodes as (select origin_id::integer as origin_id, node_name from braid.origin union all select 0, node_name from braid.node where is_local),
         taken as (
             select t.*, case when t.removed_at <> 0 then t.removed_at
                              else (extract(epoch from coalesce(pg_xact_commit_timestamp(t.xmin), now())) * 1000000)::bigint end as at
               from braid.taken_row t join tables on tables.oid = t.relation)
    select t.row_hash, t.at, r.node_name, t.written_at, w.node_name
      from taken t
      join nodes r on r.origin_id = t.removed_by
      join nodes w on w.origin_id = t.written_by
     where t.at >= extract(epoch from $2) * 1000000
$$;
comment on function braid.copied_taken_rows is 'a part of the initial copy at another node: rows that were taken out of a table without a key, and by what';

-- For the copy of a table without a key, of which nothing but positions tells what it has. The lock makes that exact: nobody is in the middle of writing to it.
create function braid.hold_table("relation" oid) returns void
    language c volatile strict parallel unsafe set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'hold_table_wrapper';
comment on function braid.hold_table is 'a part of the initial copy at another node: keeps writers from a table until the transaction ends';

create function braid.applied_positions("relation" oid, out node_id uuid, out node name, out "position" pg_lsn, out beyond pg_lsn[], out missing pg_lsn[],
                                        out forwards boolean, out is_ready boolean, out in_pieces boolean, out is_stopped boolean, out last_lsn pg_lsn) returns setof record
    language sql volatile strict parallel restricted security definer set search_path = pg_catalog, pg_temp
as $$
    with tables as (select $1 as oid union select relid from pg_partition_tree($1) union select relid from pg_partition_ancestors($1)),
         subscribed as (
             select t.subscription_id, max(t.copy_lsn) as copy_lsn, bool_and(t.state = 'ready') as is_ready
               from braid.subscription_table t join tables on tables.oid = t.relation::oid group by t.subscription_id)
    select s.provider_id, s.provider_name, greatest(r.lsn, d.copy_lsn, c."position", '0/0'),
           array(select lsn from braid.applied b cross join unnest(b.ranges) with ordinality as r (lsn, place)
                  where b.subscription_id = s.subscription_id order by b.applier, place) || coalesce(c.beyond, '{}'),
           array(select k.commit_lsn from braid.parked_transaction k where k.subscription_id = s.subscription_id and k.state <> 'skipped')
               || array(select m from unnest(c.missing) as m where m >= coalesce(r.lsn, '0/0')),
           s.origin = 'any', d.is_ready,
           exists (select from braid.split_progress p where p.subscription_id = s.subscription_id),
           not s.enabled or s.error_sqlstate is not null or s.given_up_at is not null,
           greatest(r.last_lsn, d.copy_lsn, '0/0')
      from subscribed d
      join braid.subscription s using (subscription_id)
      left join braid.copied_position c on c.node_id = s.provider_id and c.relation = $1
     cross join lateral (
         -- Read after the rows above became visible: what is said there to be beyond it may be before it by now, and nothing is left out.
         select greatest(last_lsn, (select a.applied_lsn from braid.subscription_activity() a where a.subscription_id = s.subscription_id)) as lsn, last_lsn
           from (select max(p.remote_lsn) as last_lsn from braid.origin o join pg_replication_origin_status p on p.local_id = o.origin_id
                  where o.subscription_id = s.subscription_id and o.node_name = s.provider_name) as o) as r
$$;
comment on function braid.applied_positions is 'a part of the initial copy at another node: how far the transactions of each provider of a table are applied';

-- The same for who wrote which columns: their names in UTF-8 and hexadecimal, null for all.
create function braid.copied_columns("relation" oid, since timestamptz, out key_hash bigint, out written_at bigint, out columns text, out node name) returns setof record
    language sql stable strict parallel restricted security definer set search_path = pg_catalog, pg_temp
as $$
    select w.key_hash, w.written_at,
           case when w.columns is not null then
               coalesce((select string_agg(encode(convert_to(a.attname::text, 'UTF8'), 'hex'), ',')
                           from pg_attribute a where a.attrelid = w.relation and a.attnum = any (w.columns) and not a.attisdropped), '') end,
           coalesce(o.node_name, n.node_name)
      from braid.column_write w
      left join braid.origin o on o.origin_id = w.origin_id::oid
      left join braid.node n on n.is_local and w.origin_id = 0
     where w.relation = $1 and w.written_at >= extract(epoch from $2) * 1000000 and coalesce(o.node_name, n.node_name) is not null
$$;
comment on function braid.copied_columns is 'a part of the initial copy at another node: who wrote which columns of a table';

------------------------------------------------------------------------------------------------------------------------
-- Views
------------------------------------------------------------------------------------------------------------------------

create view braid.subscription_status as
select s.subscription_name as name,
       s.provider_name as provider,
       case when s.error_sqlstate is not null or s.given_up_at is not null then 'error'
            when not s.enabled then 'disabled'
            else coalesce(a.state, 'starting') end as state,
       case when a.provider_lsn is not null and a.applied_lsn is not null
            then least(greatest(a.provider_lsn - a.applied_lsn, 0), 9223372036854775807)::bigint end as lag_bytes,
       case when r.follows and a.applied_lsn >= a.provider_lsn then interval '0'
            when r.reached is not null
            then date_trunc('milliseconds', greatest(clock_timestamp() - r.reached, interval '0')) end as lag_time,
       (select count(*) filter (where t.state = 'ready') || '/' || count(*)
          from braid.subscription_table t where t.subscription_id = s.subscription_id) as tables,
       round(a.transactions_per_second)::bigint as tx_per_s,
       round(a.rows_per_second)::bigint as rows_per_s,
       a.is_throttled as throttled,
       a.received_lsn,
       a.applied_lsn,
       case when s.error_sqlstate is not null then s.error_message when r.is_retrying then a.last_error end as last_error,
       case when s.error_sqlstate is not null then s.error_lsn when r.is_retrying then a.last_error_lsn end as error_lsn,
       case when s.error_sqlstate is not null then s.error_hint when r.is_retrying then a.last_error_hint end as error_hint,
       (select count(*) from braid.parked_transaction p
         where p.subscription_id = s.subscription_id and p.state <> 'skipped') as parked
  from braid.subscription s
  left join braid.subscription_activity() a on a.subscription_id = s.subscription_id
 cross join lateral (select s.enabled and a.failures > 0 and a.state <> 'streaming',
                            s.enabled and s.error_sqlstate is null and s.given_up_at is null and a.state = 'streaming',
                            greatest(a.last_commit_at, a.caught_up_at, s.caught_up_at)) as r (is_retrying, follows, reached)
 order by s.subscription_name;
comment on view braid.subscription_status is 'state, lag and last error of each subscription';

create view braid.subscription_detail as
select s.subscription_id,
       s.subscription_name as name,
       s.subscription_owner as owner,
       s.provider_name as provider,
       s.provider_id,
       s.publications,
       s.slot_name,
       s.enabled,
       s.phase,
       s.start_lsn,
       s.origin,
       s.apply_mode,
       s.consolidate,
       s.commit_order,
       s.streaming,
       s.split_transactions_above,
       s.two_phase,
       s.synchronous_commit,
       s.run_as_owner,
       s.disable_on_error,
       s.on_error,
       s.copy_data,
       s.rows_per_second as row_limit,
       s.bytes_per_second as byte_limit,
       a.is_throttled as throttled,
       s.created_at,
       a.state as activity,
       a.leader_pid,
       a.applier_pids,
       a.received_lsn,
       a.applied_lsn,
       a.flushed_lsn,
       a.provider_lsn,
       a.last_message_at,
       a.last_commit_at,
       greatest(a.caught_up_at, s.caught_up_at) as caught_up_at,
       c.offset_micros * interval '1 microsecond' as clock_offset,
       c.error_micros * interval '1 microsecond' as clock_error,
       c.measured_at as clock_measured_at,
       a.transactions,
       a.inserts,
       a.updates,
       a.deletes,
       a.truncates,
       a.bytes,
       a.conflicts,
       d.questions,
       d.fetched_columns,
       a.retries,
       a.started_at,
       a.stats_since,
       a.failures,
       a.last_error_sqlstate as last_failure_sqlstate,
       a.last_error as last_failure,
       a.last_error_detail as last_failure_detail,
       a.last_error_hint as last_failure_hint,
       a.last_error_lsn as last_failure_lsn,
       a.last_error_at as last_failure_at,
       s.error_sqlstate,
       s.error_message,
       s.error_detail,
       s.error_hint,
       s.error_lsn,
       s.error_at,
       s.skip_lsn,
       p.commit_lsn as half_applied_lsn,
       p.changes as half_applied_changes
  from braid.subscription s
  left join braid.subscription_activity() a on a.subscription_id = s.subscription_id
  left join braid.schedule_activity() d on d.subscription_id = s.subscription_id
  left join braid.skew_activity() c on c.subscription_id = s.subscription_id
  left join braid.split_progress p on p.subscription_id = s.subscription_id
 order by s.subscription_name;
comment on view braid.subscription_detail is 'options, positions, counters and last error of each subscription';

create view braid.subscription_tables as
select s.subscription_name as subscription,
       t.relation,
       t.state,
       coalesce(t.rows_copied, a.copy_rows) as rows_copied,
       t.rows_total,
       coalesce(t.bytes_copied, a.copy_bytes) as bytes_copied,
       t.bytes_total,
       a.inserts,
       a.updates,
       a.deletes,
       a.truncates,
       a.conflicts,
       t.ready_at,
       t.copy_error,
       t.copy_error_hint
  from braid.subscription_table t
  join braid.subscription s on s.subscription_id = t.subscription_id
  left join braid.table_activity() a on a.subscription_id = t.subscription_id and a.relation = t.relation
 order by s.subscription_name, t.relation::text;
comment on view braid.subscription_tables is 'tables of each subscription: how far each is copied and what was applied to it';

create view braid.parked_transactions as
select coalesce(s.subscription_name, p.subscription_name) as subscription,
       p.parked_id,
       p.state,
       p.waits_for,
       p.error_message as error,
       p.error_sqlstate,
       p.error_detail,
       p.error_hint,
       p.attempts,
       p.changes,
       p.committed_changes + 1 as from_change,
       p.bytes,
       p.barred_tables || p.other_tables as relations,
       p.origin_name as origin,
       p.committed_at,
       p.xid,
       p.commit_lsn,
       p.end_lsn,
       p.parked_at,
       p.tried_at,
       p.skipped_at
  from braid.parked_transaction p
  left join braid.subscription s on s.subscription_id = p.subscription_id
 order by p.parked_id;
comment on view braid.parked_transactions is 'transactions that were set aside since they could not be applied, and why';

create view braid.parked_changes as
select coalesce(s.subscription_name, p.subscription_name) as subscription,
       p.parked_id,
       p.committed_changes + c.number as number,
       c.record::json as record
  from braid.parked_transaction p
  left join braid.subscription s on s.subscription_id = p.subscription_id
 cross join lateral braid.parked_records(p.parked_id) c;
comment on view braid.parked_changes is 'the changes of parked transactions, as gir-json';

create view braid.apply_workers as
select s.subscription_name as subscription,
       w.worker,
       w.pid,
       w.state,
       w.busy_percent,
       w.transactions,
       w.changes,
       w.retries,
       w.commit_lsn,
       w.taken_at,
       w.wait as wait_event
  from (select subscription_id, 0 as number, 'leader' as worker, leader_pid as pid, state, null::integer as busy_percent,
               transactions, inserts + updates + deletes + truncates as changes, retries, applied_lsn as commit_lsn,
               null::timestamptz as taken_at, leader_wait as wait
          from braid.subscription_activity()
         union all
        select subscription_id, number, 'applier ' || number, pid, state, round(busy_fraction * 100)::integer,
               transactions, changes, retries, commit_lsn, taken_at, wait
          from braid.applier_activity()) w
  join braid.subscription s on s.subscription_id = w.subscription_id
 order by s.subscription_name, w.worker <> 'leader', w.number;
comment on view braid.apply_workers is 'leader and appliers of each running subscription';

create view braid.dependency_stats as
select s.subscription_name as subscription,
       d.scheduled,
       d.scheduled - d.dependent as without_edge,
       d.edges,
       d.in_flight,
       d.width,
       round(d.width_mean::numeric, 1) as width_mean,
       d.width_max,
       d.taking as appliers_taking,
       round(d.rate_one::numeric) as rate_one,
       round(d.rate_all::numeric) as rate_all,
       d.table_barriers,
       d.all_barriers,
       d.barriers_truncate,
       d.barriers_unkeyed,
       d.barriers_index,
       d.barriers_trigger,
       d.barriers_size,
       a.transactions - d.batched + d.batches + d.pieces as local_commits,
       d.batches,
       round(d.batched::numeric / nullif(d.batches, 0), 1) as batch_mean,
       d.batch_max,
       case when s.apply_mode in ('batch', 'aggregate') then
           (select array_agg(p::name order by p) from braid.passing_slots() p)
       end as not_joined_for,
       d.pieces,
       d.consolidated,
       d.sought_ahead,
       a.retries,
       d.large,
       d.applied_while_running,
       d.given_up_while_running,
       d.applied_by_leader,
       d.keys,
       d.keys_forgotten,
       a.stats_since
  from braid.schedule_activity() d
  join braid.subscription_activity() a on a.subscription_id = d.subscription_id
  join braid.subscription s on s.subscription_id = d.subscription_id
 order by s.subscription_name;
comment on view braid.dependency_stats is 'how much of each running subscription could be applied side by side, what held it back, and what was joined';

create view braid.scaling_decisions as
select s.subscription_name as subscription,
       d.at,
       d.appliers_before,
       d.appliers_after,
       round(d.utilisation * 100)::integer as utilisation_percent,
       round(d.rows_per_second)::bigint as rows_per_s,
       d.reason
  from braid.scaling_activity() d
  join braid.subscription s on s.subscription_id = d.subscription_id
 order by s.subscription_name, d.at;
comment on view braid.scaling_decisions is 'the last decisions on how many appliers each subscription has, oldest first';

create view braid.clock_status as
select newest as newest_seen,
       greatest(newest - clock_timestamp(), interval '0') as behind,
       waits,
       wait_micros * interval '1 microsecond' as waited,
       exceeded
  from braid.clock_activity();
comment on view braid.clock_status is 'whether this node''s clock is behind what it has seen, and the commits that had to wait for it since the server started';

create view braid.clock_skew as
select s.subscription_name as subscription,
       s.provider_name as provider,
       c.offset_micros * interval '1 microsecond' as ahead,
       c.error_micros * interval '1 microsecond' as error,
       date_trunc('second', greatest(clock_timestamp(), c.measured_at) - c.measured_at) as age,
       case when c.offset_micros is null or w.micros = 0 then null
            when abs(c.offset_micros) - c.error_micros > w.micros then 'apart'
            when abs(c.offset_micros) + c.error_micros <= w.micros then 'ok'
            else 'unclear' end as state
  from braid.subscription s
  left join braid.skew_activity() c on c.subscription_id = s.subscription_id
 cross join (select setting::bigint * 1000 as micros from pg_settings where name = 'braid.clock_skew_warning') w
 order by s.subscription_name;
comment on view braid.clock_skew is 'how far each provider''s clock is ahead of this node''s, and how exactly that is known';

create view braid.deletions as
select d.remembered,
       d.collector_pid,
       d.collected_lsn,
       case when d.collector_pid is not null
            then greatest(pg_current_wal_insert_lsn() - d.collected_lsn, 0)::bigint end as behind_bytes,
       t.rows,
       to_timestamp(t.oldest / 1000000.0) as oldest,
       to_timestamp(t.newest / 1000000.0) as newest
  from braid.deletion_activity() d,
       (select count(*) as rows, min(nullif(deleted_at, 0)) as oldest, max(deleted_at) as newest from braid.tombstone) t;
comment on view braid.deletions is 'whether deletions are remembered, how far local ones are collected, and how many there are';

create view braid.conflict_history as
select recorded_at,
       subscription_name as subscription,
       relation,
       kind,
       resolution,
       winner,
       reason,
       key,
       local_row,
       remote_row,
       local_timestamp,
       local_origin,
       remote_timestamp,
       remote_origin,
       remote_lsn,
       remote_xid,
       conflict_id,
       table_name,
       remote_unknown
  from braid.conflict_record
 order by conflict_id;
comment on view braid.conflict_history is 'conflicts as they were resolved, with both rows and both versions, oldest first';

create view braid.conflict_stats as
select subscription_name as subscription,
       relation,
       kind,
       resolution,
       winner,
       sum(conflicts)::bigint as conflicts,
       min(first_at) as first_at,
       max(last_at) as last_at
  from (select * from braid.conflict_total
        union all
        select subscription_name, relation, kind, resolution, winner, conflicts, counted_at, counted_at from braid.conflict_count) c
 group by subscription_name, relation, kind, resolution, winner
 order by subscription_name, relation::text, kind, resolution, winner;
comment on view braid.conflict_stats is 'how many conflicts of each kind there were, whether they are in the history or not';

create view braid.conflict_resolutions as
select r.relation,
       r.kind,
       r.resolution,
       r.function_id::regprocedure as function,
       case p.provolatile when 'i' then 'immutable' when 's' then 'stable' when 'v' then 'volatile' end as volatility,
       case when r.function_id is not null then r.replicates end as replicates,
       r.on_all_nodes
  from braid.conflict_rule r
  left join pg_class c on c.oid = r.relation
  left join pg_proc p on p.oid = r.function_id
 where (r.relation is null or c.oid is not null) and r.resolution is not null
 order by r.relation is not null, r.relation::text, r.kind is not null, r.kind;
comment on view braid.conflict_resolutions is 'what is done about conflicts, where it is not last_update_wins; null stands for all';

create view braid.column_rules as
select r.relation,
       a.attname as column_name,
       r.rule,
       case when r.rule not in ('delta', 'last_update_wins') then null
            when c.relreplident <> 'f' then 'updates made here lack the old values: the table has not REPLICA IDENTITY FULL'
            when current_setting('server_version_num')::int >= 180000 and exists (
                select from pg_attribute g, pg_publication_tables t
                 where g.attrelid = c.oid and g.attnum > 0 and not g.attisdropped and g.attgenerated <> ''
                   and t.schemaname = (select n.nspname from pg_namespace n where n.oid = c.relnamespace) and t.tablename = c.relname and g.attname <> all (t.attnames))
            then 'updates are refused here: a publication leaves out a generated column, and the table has REPLICA IDENTITY FULL'
       end as problem,
       r.on_all_nodes
  from braid.column_rule r
  join pg_class c on c.oid = r.relation
  join pg_attribute a on a.attrelid = c.oid and a.attnum = r.column_number and not a.attisdropped
 where r.rule is not null
 order by r.relation::text, a.attnum;
comment on view braid.column_rules is 'columns whose values are merged where a change meets a row, and how';

create view braid.compare_progress as
select c.comparison_id,
       c.subscription_name as subscription,
       c.relation,
       case when c.finished_at is null and not a.is_running then 'interrupted' else c.phase end as phase,
       c.walk,
       c.rows_compared,
       c.rows_total,
       c.ranges,
       c.ranges_differed,
       c.looked_at,
       c.differences,
       c.unsettled,
       c.started_at,
       coalesce(c.finished_at, c.updated_at) - c.started_at as took,
       c.started_by,
       case when a.is_running then c.pid end as pid
  from braid.comparison c
  join braid.compare_activity() a on a.comparison_id = c.comparison_id
 order by c.comparison_id;
comment on view braid.compare_progress is 'how far the comparisons of tables are, or what they came to';

create view braid.differences as
select c.subscription_name as subscription,
       c.relation,
       d.key,
       d.kind,
       d.columns,
       d.local_row,
       d.provider_row,
       d.local_timestamp,
       d.local_origin,
       d.provider_timestamp,
       d.provider_origin,
       d.repaired_by,
       d.comparison_id
  from braid.difference d
  join braid.comparison c on c.comparison_id = d.comparison_id
 order by d.difference_id;
comment on view braid.differences is 'rows that differ from the provider''s, as the last comparison of their table has found them';

create view braid.repair_log as
select repair_id,
       done_at,
       done_by,
       subscription_name as subscription,
       relation,
       side,
       dry_run,
       action,
       reason,
       key,
       kind,
       local_row,
       provider_row,
       local_timestamp,
       local_origin,
       provider_timestamp,
       provider_origin
  from braid.repair_entry
 order by entry_id;
comment on view braid.repair_log is 'what repairs did, with both rows and both versions as they were before';

create view braid.ingest_sources as
select source_name as origin,
       "position",
       last_at,
       newest_at
  from braid.ingest_source
 order by source_name;
comment on view braid.ingest_sources is 'sources of braid.ingest and how far each has come';

create view braid.nodes as
select n.node_name as name,
       n.is_local,
       n.node_id,
       array(select s.subscription_name from braid.subscription s where s.provider_name = n.node_name order by 1) as subscriptions,
       n.created_at
  from braid.node n
 order by n.is_local desc, n.node_name;
comment on view braid.nodes is 'this node and the peers that are known here';

create view braid.pending_cleanup as
select slot_name,
       provider_name as provider,
       since,
       attempts,
       last_error
  from braid.slot_cleanup
 order by since, slot_name;
comment on view braid.pending_cleanup is 'slots of dropped subscriptions that are still to be dropped at their providers';

------------------------------------------------------------------------------------------------------------------------
-- Putting back what lost a conflict
------------------------------------------------------------------------------------------------------------------------

create function braid.row_image("row" record) returns jsonb
    language c stable strict parallel restricted set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'row_image_wrapper';
comment on function braid.row_image is 'a row as braid.conflict_history shows it: nothing of it is lost, whatever the settings';

-- Reads with the caller's rights what the caller may see of the history, and writes with them. The statement that writes runs under the
-- caller's search_path, as any statement of the caller's would, since the table's triggers may depend on it: the only function that
-- does not pin it. It does so for itself until then; what stands before that is qualified.
create function braid.restore_conflict(
    conflict_id bigint,
    side text default null,
    out action text,
    out relation regclass,
    out key jsonb,
    out old_row jsonb,
    out new_row jsonb
) returns record
    language plpgsql volatile parallel unsafe
as $$
declare
    callers_path text := pg_catalog.current_setting('search_path');
    conflict record;
    target regclass;
    only_this text;
    lost jsonb;
    other jsonb;
    is_delete boolean;
    key_names text[];
    key_index oid;
    found_by jsonb;
    condition text;
    place tid;
    part oid;
    has_changed boolean;
    columns text[] := '{}';
    texts text[] := '{}';
    types text[] := '{}';
    missing text[];
    gone text[];
    attribute record;
    statement text;
begin
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    select h.* into conflict from braid.conflict_history h where h.conflict_id = restore_conflict.conflict_id;
    if not found then
        raise exception 'conflict % is not in the history', coalesce(restore_conflict.conflict_id::text, 'null') using
            errcode = 'undefined_object',
            hint = 'Look for it in braid.conflict_history. Conflicts are removed when they are older than braid.conflict_history_retention.';
    end if;
    if side is null then
        side := case conflict.winner when 'remote' then 'local' when 'local' then 'remote' end;
        if side is null then
            raise exception 'conflict % has no loser', conflict.conflict_id using
                errcode = 'object_not_in_prerequisite_state',
                detail = format('The winner is "%s": %s.', conflict.winner, conflict.reason),
                hint = 'Say which row is to be put back: ''local'' or ''remote'', as the second argument.';
        end if;
    elsif side not in ('local', 'remote') then
        raise exception 'side "%" is not one of a conflict', side using
            errcode = 'invalid_parameter_value',
            hint = 'Sides are local and remote; null stands for the loser.';
    end if;
    lost := case side when 'local' then conflict.local_row else conflict.remote_row end;
    other := case side when 'local' then conflict.remote_row else conflict.local_row end;
    is_delete := case side
        when 'local' then conflict.kind = 'update_deleted' and conflict.local_row is null
        else conflict.kind in ('delete_origin_differs', 'delete_missing') end;
    if lost is null and not is_delete then
        raise exception 'conflict % has no % row to put back', conflict.conflict_id, side using
            errcode = 'object_not_in_prerequisite_state',
            detail = format('%s: %s.', conflict.kind, conflict.reason),
            hint = 'Nothing was lost on that side.';
    end if;

    -- The table: a partition's rows are written through its root, which knows where they belong now.
    if not exists (select from pg_class c where c.oid = conflict.relation) then
        raise exception 'table % of conflict % is gone', coalesce(conflict.table_name, conflict.relation::text), conflict.conflict_id using
            errcode = 'undefined_table',
            hint = format('Its row is in braid.conflict_history, column %s_row: insert it where it belongs now.', side);
    end if;
    target := coalesce(pg_partition_root(conflict.relation), conflict.relation);
    relation := target;
    only_this := case when (select c.relkind from pg_class c where c.oid = target) = 'p' then '' else 'only ' end;

    -- The key by which the row was found, and an index on it now.
    key_names := array(select k from jsonb_object_keys(conflict.key) k order by k);
    select i.indexrelid into key_index
      from pg_index i
     where i.indrelid = target and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null and i.indexprs is null
       and key_names = array(select a.attname::text from pg_attribute a
                              where a.attrelid = i.indrelid and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1]) order by 1)
     order by i.indisprimary desc limit 1;
    if key_index is null or key_names = '{}' then
        raise exception 'table % has no key that finds the row of conflict %', target, conflict.conflict_id using
            errcode = 'object_not_in_prerequisite_state',
            detail = format('The conflict was recorded with %s; now the table has %s.',
                case key_names when '{}' then 'no key' else 'the key (' || array_to_string(key_names, ', ') || ')' end,
                coalesce((select 'the unique ' || case count(*) when 1 then 'key ' else 'keys ' end || string_agg(d.columns, ' and ')
                            from (select '(' || string_agg(a.attname, ', ' order by a.attname) || ')' as columns
                                    from pg_index i
                                    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                                   where i.indrelid = target and i.indisunique group by i.indexrelid) d), 'none')),
            hint = format('Its row is in braid.conflict_history, column %s_row: write it by hand.', side);
    end if;
    -- An update that lost, or won, may have had another key: then the row is where the winner is.
    found_by := case when conflict.kind = 'update_origin_differs' then other else lost end;
    if found_by is null or not found_by ?& key_names then
        found_by := coalesce(case when lost ?& key_names then lost end, conflict.key);
    end if;
    select string_agg(format('t.%I operator(%I.%s) %L::%s', a.attname, n.nspname, o.oprname, found_by ->> a.attname::text,
                             format_type(a.atttypid, -1)), ' and ')
      into condition
      from pg_index i
     cross join unnest((i.indkey::int2[])[0:i.indnkeyatts - 1], (i.indclass::oid[])[0:i.indnkeyatts - 1]) as k (attnum, opclass)
      join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
      join pg_opclass c on c.oid = k.opclass
      join pg_amop m on m.amopfamily = c.opcfamily and m.amoplefttype = c.opcintype and m.amoprighttype = c.opcintype
                    and m.amopstrategy = 3 and m.amoppurpose = 's'
      join pg_operator o on o.oid = m.amopopr
      join pg_namespace n on n.oid = o.oprnamespace
     where i.indexrelid = key_index;
    execute format('select t.ctid, t.tableoid, braid.row_image(t.*) from %s%s as t where %s for update', only_this, target, condition)
       into place, part, old_row;
    key := (select jsonb_object_agg(k, found_by -> k) from unnest(key_names) k);
    has_changed := place is not null and (other is null or exists (
        select from jsonb_each(other) e where old_row ? e.key and old_row -> e.key is distinct from e.value));

    if is_delete then
        if place is null then
            action := 'nothing';
            return;
        end if;
        if has_changed then
            raise notice 'the row has changed since the conflict' using detail = 'What was there is in the result, as old_row.';
        end if;
        perform pg_catalog.set_config('search_path', callers_path, true);
        execute pg_catalog.format('delete from %s%s as t where t.ctid operator(pg_catalog.=) $1 and t.tableoid operator(pg_catalog.=) $2',
            only_this, target) using place, part;
        get diagnostics action = row_count;
        action := case action when '0' then 'nothing' else 'delete' end;
        return;
    end if;

    -- An update's columns that were not sent are as they are; where there is no row, as they were in the one that was there.
    if place is null and side = 'remote' and conflict.kind like 'update%' and conflict.local_row is not null then
        lost := conflict.local_row || lost;
    end if;
    for attribute in
        select a.attname::text as name, format_type(a.atttypid, -1) as type, a.attidentity = 'a' as is_always,
               v.value is not null as is_large,
               case when v.value is not null then v.value else lost ->> a.attname::text end as value,
               old_row -> a.attname::text is distinct from lost -> a.attname::text or v.value is not null as differs
          from pg_attribute a
          left join braid.conflict_value v
            on v.conflict_id = conflict.conflict_id and v.side = restore_conflict.side and v.column_name = a.attname
         where a.attrelid = target and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
           and (lost ? a.attname::text or v.value is not null)
           -- What was merged has not lost. Of a register of its own the older value has.
           and (place is null or not exists (
               select from braid.column_rules r where r.relation = target and r.column_name = a.attname and r.rule <> 'last_update_wins'))
         order by a.attnum
    loop
        if place is not null then
            continue when not attribute.differs;
            if attribute.is_always then
                raise exception 'column "%" of table % is generated always and has another value now', attribute.name, target using
                    errcode = 'generated_always',
                    hint = 'Delete the row, then call this again: it is inserted with the value that it had.';
            end if;
        end if;
        columns := columns || attribute.name;
        types := types || attribute.type;
        texts := texts || attribute.value;
    end loop;
    gone := array(select k from jsonb_object_keys(lost) k where not exists (
        select from pg_attribute a where a.attrelid = target and a.attname = k and a.attnum > 0 and not a.attisdropped));
    if gone <> '{}' then
        raise notice 'table % has no column %: left out', target, array_to_string(gone, ', ');
    end if;
    if place is null then
        missing := array(select u from unnest(conflict.remote_unknown) u where side = 'remote' and not lost ? u and not u = any (columns));
        if missing <> '{}' then
            raise exception 'conflict % does not have the whole row', conflict.conflict_id using
                errcode = 'object_not_in_prerequisite_state',
                detail = format('The change left %s unchanged and did not carry it, and the row is not here.', array_to_string(missing, ', ')),
                hint = 'Take these values from the node that made the change, and insert the row by hand.';
        end if;
        statement := format('insert into %s as t (%s) overriding system value values (%s) returning braid.row_image(t.*)', target,
            (select string_agg(format('%I', c), ', ' order by i) from unnest(columns) with ordinality u (c, i)),
            (select string_agg(format('($1)[%s]::%s', i, c), ', ' order by i) from unnest(types) with ordinality u (c, i)));
    elsif columns = '{}' then
        action := 'nothing';
        new_row := old_row;
        return;
    else
        if has_changed then
            raise notice 'the row has changed since the conflict' using detail = 'What was there is in the result, as old_row.';
        end if;
        statement := format('update %s%s as t set %s where t.ctid operator(pg_catalog.=) $2 and t.tableoid operator(pg_catalog.=) $3 returning braid.row_image(t.*)',
            only_this, target,
            (select string_agg(format('%I = ($1)[%s]::%s', c, i, types[i]), ', ' order by i) from unnest(columns) with ordinality u (c, i)));
    end if;
    perform pg_catalog.set_config('search_path', callers_path, true);
    execute statement into new_row using texts, place, part;
    action := case when new_row is null then 'nothing' when place is null then 'insert' else 'update' end;
    if new_row is not null then
        key := (select pg_catalog.jsonb_object_agg(k, pg_catalog.jsonb_object_field(new_row, k)) from pg_catalog.unnest(key_names) k);
    end if;
end
$$;
comment on function braid.restore_conflict is
    'puts the row that lost a conflict back, as a change of the caller''s own: updates, inserts or deletes it; returns what it did';

------------------------------------------------------------------------------------------------------------------------
-- Dropping the extension
------------------------------------------------------------------------------------------------------------------------

create function braid.guard_drop() returns event_trigger
    language c set search_path = pg_catalog, pg_temp
    as 'MODULE_PATHNAME', 'guard_drop_wrapper';
comment on function braid.guard_drop is 'refuses to drop the extension while there are subscriptions';

create event trigger braid_guard_drop on ddl_command_start
    when tag in ('DROP EXTENSION', 'DROP OWNED')
    execute function braid.guard_drop();
comment on event trigger braid_guard_drop is 'refuses to drop extension braid while there are subscriptions';

------------------------------------------------------------------------------------------------------------------------
-- Privileges
------------------------------------------------------------------------------------------------------------------------

revoke all on all routines in schema braid from public;

grant execute on function
    braid.create_node,
    braid.drop_node,
    braid.create_subscription,
    braid.alter_subscription,
    braid.enable_subscription,
    braid.disable_subscription,
    braid.rename_subscription,
    braid.set_rate_limit,
    braid.set_conflict_resolution,
    braid.set_column_rule,
    braid.check_conflict_function,
    braid.restore_conflict,
    braid.row_image,
    braid.drop_subscription,
    braid.refresh_subscription,
    braid.resync_table,
    braid.skip_transaction,
    braid.retry_parked,
    braid.skip_parked,
    braid.ingest,
    braid.forget_source,
    braid.gir_records,
    braid.compare_begin,
    braid.compare_step,
    braid.compare_result,
    braid.repair_begin,
    braid.repair_step,
    braid.repair_failed,
    braid.repair_result
    to braid_admin;
grant execute on procedure
    braid.compare,
    braid.repair
    to braid_admin;
grant execute on function
    braid.wait_for_subscription,
    braid.sync_event,
    braid.wait_for_event,
    braid.node_info,
    braid.subscription_activity,
    braid.applier_activity,
    braid.table_activity,
    braid.schedule_activity,
    braid.scaling_activity,
    braid.passing_slots,
    braid.clock_activity,
    braid.skew_activity,
    braid.deletion_activity,
    braid.row_version,
    braid.has_merged_rows,
    braid.commit_timestamp,
    braid.copied_deletions,
    braid.copied_columns,
    braid.copied_taken_rows,
    braid.hold_table,
    braid.applied_positions,
    braid.rules_for_all_nodes,
    braid.parked_records,
    braid.compare_activity
    to braid_admin, braid_monitor;

grant select on
    braid.subscription_status,
    braid.subscription_detail,
    braid.subscription_tables,
    braid.parked_transactions,
    braid.parked_changes,
    braid.apply_workers,
    braid.dependency_stats,
    braid.scaling_decisions,
    braid.clock_status,
    braid.clock_skew,
    braid.deletions,
    braid.conflict_history,
    braid.conflict_stats,
    braid.conflict_value,
    braid.conflict_resolutions,
    braid.column_rules,
    braid.compare_progress,
    braid.differences,
    braid.repair_log,
    braid.ingest_sources,
    braid.nodes,
    braid.pending_cleanup
    to braid_admin, braid_monitor;
