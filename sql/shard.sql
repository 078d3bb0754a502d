-- braid.shard: the vectors of docs/routing-hash.md, values that are equal, and values without a
-- shard. The same on each major.
\a
\t
set client_min_messages = warning;
set timezone = 'UTC';
create extension braid;

-- h1 and h2 of each value: with 32,768 shards, and the record or the tenant the same
create temp table vector (type, value, of_tenant, of_record, h1, h2) as values
    ('smallint', '1', braid.shard(32768, smallint '1', 1), braid.shard(32768, 1, smallint '1', 32768), '24ecaf38f168a127', '7dc83a23377bd778'),
    ('bigint', '1', braid.shard(32768, bigint '1', 1), braid.shard(32768, 1, bigint '1', 32768), '24ecaf38f168a127', '7dc83a23377bd778'),
    ('numeric', '1', braid.shard(32768, numeric '1', 1), braid.shard(32768, 1, numeric '1', 32768), '24ecaf38f168a127', '7dc83a23377bd778'),
    ('numeric', '1.00', braid.shard(32768, numeric '1.00', 1), braid.shard(32768, 1, numeric '1.00', 32768), '24ecaf38f168a127', '7dc83a23377bd778'),
    ('bigint', '0', braid.shard(32768, bigint '0', 1), braid.shard(32768, 1, bigint '0', 32768), 'abea8ec17e26709c', '82bf012abb2d3c34'),
    ('bigint', '42', braid.shard(32768, bigint '42', 1), braid.shard(32768, 1, bigint '42', 32768), 'a381e1c96887b6a8', '03e1b59b02c89e5e'),
    ('bigint', '-42', braid.shard(32768, bigint '-42', 1), braid.shard(32768, 1, bigint '-42', 32768), 'ec2e43251f8db559', 'ce5c35d61a660a16'),
    ('bigint', '9223372036854775807', braid.shard(32768, bigint '9223372036854775807', 1), braid.shard(32768, 1, bigint '9223372036854775807', 32768), 'eb336609dfbd7c30', 'd918351daa3379c6'),
    ('bigint', '-9223372036854775808', braid.shard(32768, bigint '-9223372036854775808', 1), braid.shard(32768, 1, bigint '-9223372036854775808', 32768), '2a786c2ba7297305', 'b4f527c12b5f33fd'),
    ('numeric', '42.50', braid.shard(32768, numeric '42.50', 1), braid.shard(32768, 1, numeric '42.50', 32768), '3d3ee9559ad0ab77', '53140a7b7d1324b8'),
    ('numeric', '-0.001', braid.shard(32768, numeric '-0.001', 1), braid.shard(32768, 1, numeric '-0.001', 32768), '447dee6be30b1a77', '5b6258d46cc7215c'),
    ('numeric', '1000000000000000000000000000000', braid.shard(32768, numeric '1000000000000000000000000000000', 1), braid.shard(32768, 1, numeric '1000000000000000000000000000000', 32768), 'c79005ec6c2a4b7f', 'a9317206c7248a29'),
    ('numeric', 'NaN', braid.shard(32768, numeric 'NaN', 1), braid.shard(32768, 1, numeric 'NaN', 32768), '6dcb7b22c2decb96', '720236e7d3223b14'),
    ('numeric', '-Infinity', braid.shard(32768, numeric '-Infinity', 1), braid.shard(32768, 1, numeric '-Infinity', 32768), '11f9c9a61000db6d', '13e9a6b4dc0658bd'),
    ('text', '', braid.shard(32768, text '', 1), braid.shard(32768, 1, text '', 32768), '0ba5a1b9a0bce384', 'c8a2223f3dfa8ace'),
    ('text', '42', braid.shard(32768, text '42', 1), braid.shard(32768, 1, text '42', 32768), '28cb418bb21c95c1', 'b6e9fc0ae1716287'),
    ('text', 'Straße', braid.shard(32768, text 'Straße', 1), braid.shard(32768, 1, text 'Straße', 32768), 'f07a88161c6b7a71', 'b2492fb42d91d673'),
    ('text', '東京 ', braid.shard(32768, text '東京 ', 1), braid.shard(32768, 1, text '東京 ', 32768), 'd8ac803cc43a473d', '6b3396523fa4f20a'),
    ('varchar', 'acme', braid.shard(32768, varchar 'acme', 1), braid.shard(32768, 1, varchar 'acme', 32768), 'd05b49e779adb8b0', '372d6cc4745bc598'),
    ('name', 'acme', braid.shard(32768, name 'acme', 1), braid.shard(32768, 1, name 'acme', 32768), 'd05b49e779adb8b0', '372d6cc4745bc598'),
    ('char', 'acme  ', braid.shard(32768, bpchar 'acme  ', 1), braid.shard(32768, 1, bpchar 'acme  ', 32768), 'd05b49e779adb8b0', '372d6cc4745bc598'),
    ('uuid', '0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a', braid.shard(32768, uuid '0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a', 1), braid.shard(32768, 1, uuid '0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a', 32768), 'd7f92e5c48328052', 'bb64becde1866dcf'),
    ('boolean', 'true', braid.shard(32768, boolean 'true', 1), braid.shard(32768, 1, boolean 'true', 32768), '5632e24d29828f7c', 'e11cb65b466ad7f5'),
    ('boolean', 'false', braid.shard(32768, boolean 'false', 1), braid.shard(32768, 1, boolean 'false', 32768), 'f9750a842487b07b', '1463f77c2e0dd717'),
    ('date', '2024-02-29', braid.shard(32768, date '2024-02-29', 1), braid.shard(32768, 1, date '2024-02-29', 32768), '9c7c5f10c7bf2497', '473d1f6e17879e9f'),
    ('timestamp', '2024-02-29 00:00:00', braid.shard(32768, timestamp '2024-02-29 00:00:00', 1), braid.shard(32768, 1, timestamp '2024-02-29 00:00:00', 32768), '9c7c5f10c7bf2497', '473d1f6e17879e9f'),
    ('timestamp', '2024-02-29 12:34:56.789012', braid.shard(32768, timestamp '2024-02-29 12:34:56.789012', 1), braid.shard(32768, 1, timestamp '2024-02-29 12:34:56.789012', 32768), '27cf7a89ffc67ee4', '4b5eae11310747d8'),
    ('date', '1999-12-31', braid.shard(32768, date '1999-12-31', 1), braid.shard(32768, 1, date '1999-12-31', 32768), 'f72380b894f1f71e', '775974bb9a9295a6'),
    ('date', 'infinity', braid.shard(32768, date 'infinity', 1), braid.shard(32768, 1, date 'infinity', 32768), '8acfc0661757e36b', 'ffe5a1f3e56ff187'),
    ('timestamp', 'infinity', braid.shard(32768, timestamp 'infinity', 1), braid.shard(32768, 1, timestamp 'infinity', 32768), '8acfc0661757e36b', 'ffe5a1f3e56ff187'),
    ('timestamp', '-infinity', braid.shard(32768, timestamp '-infinity', 1), braid.shard(32768, 1, timestamp '-infinity', 32768), 'bbb03322a2c85852', '919767bd2531c32a'),
    ('timestamptz', '2024-02-29 12:34:56.789012+00:00', braid.shard(32768, timestamptz '2024-02-29 12:34:56.789012+00:00', 1), braid.shard(32768, 1, timestamptz '2024-02-29 12:34:56.789012+00:00', 32768), '31a08ff4e6b30413', '8d6c7338adfdf82c'),
    ('timestamptz', '2024-02-29 21:34:56.789012+09:00', braid.shard(32768, timestamptz '2024-02-29 21:34:56.789012+09:00', 1), braid.shard(32768, 1, timestamptz '2024-02-29 21:34:56.789012+09:00', 32768), '31a08ff4e6b30413', '8d6c7338adfdf82c'),
    ('timestamptz', 'infinity', braid.shard(32768, timestamptz 'infinity', 1), braid.shard(32768, 1, timestamptz 'infinity', 32768), 'cd3dc1d3a391fb43', 'fbb97ad17cf60052'),
    ('bytea', '\x', braid.shard(32768, bytea '\x', 1), braid.shard(32768, 1, bytea '\x', 32768), '28f1ae66f26756a2', 'af565e134cef00f6'),
    ('bytea', '\x00ff42', braid.shard(32768, bytea '\x00ff42', 1), braid.shard(32768, 1, bytea '\x00ff42', 32768), 'bfb12d9dcb3542d8', '0ad0ac325d5821a4');
create temp table hashed as select v.*, (('x' || v.h1)::bit(64)::bigint & 32767)::int as h1_mod, (('x' || v.h2)::bit(64)::bigint & 32767)::int as h2_mod from vector v;
select count(*) from hashed;
select type, value, of_tenant, h1_mod from hashed where of_tenant <> h1_mod;
select type, value, of_record, (one.h1_mod + h.h2_mod) % 32768 as wanted from hashed h, (select h1_mod from hashed where type = 'bigint' and value = '1') one
 where of_record <> (one.h1_mod + h.h2_mod) % 32768;
-- shards
select * from (values
    (40, braid.shard(64, bigint '42', bigint '4711', 1)),
    (45, braid.shard(64, bigint '42', bigint '4711', 8)),
    (40, braid.shard(64, bigint '42', bigint '4712', 8)),
    (53, braid.shard(64, bigint '42', bigint '4711', 64)),
    (191, braid.shard(512, text 'acme', uuid '0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a', 16)),
    (17, braid.shard(100, uuid '0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a', uuid '0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a', 4)),
    (0, braid.shard(3, numeric '42.0', smallint '7', 2)),
    (0, braid.shard(1, bigint '1', text 'a', 1)),
    (3, braid.shard(48, bigint '7', bigint '8', 32))) as v (wanted, found);

-- the same of columns, which no planner folds, compressed and out of line too
create temp table value (one smallint, two integer, three bigint, four numeric, five text, six varchar(9), seven char(6), eight name, nine uuid, ten boolean, eleven date,
    twelve timestamp, thirteen timestamptz, fourteen bytea, long text, far text);
alter table value alter far set storage external;
insert into value values (1, 1, 1, 1.00, 'acme', 'acme', 'acme', 'acme', '0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a', true, '2024-02-29', '2024-02-29', '2024-02-29 12:34:56.789012+00', '\x00ff42',
    repeat('x', 100000), repeat('x', 100000));
select one.shards = array[1] as numbers, text.shards = array[1] as texts, long.shards = array[1] as large, day.shards = array[1] as days from value v,
    lateral (select array_agg(distinct s - braid.shard(32768, 1::bigint, 9) + 1) from unnest(array[braid.shard(32768, v.one, 9), braid.shard(32768, v.two, 9), braid.shard(32768, v.three, 9), braid.shard(32768, v.four, 9)]) s) one (shards),
    lateral (select array_agg(distinct s - braid.shard(32768, 'acme'::text, 9) + 1) from unnest(array[braid.shard(32768, v.five, 9), braid.shard(32768, v.six, 9), braid.shard(32768, v.seven, 9), braid.shard(32768, v.eight, 9)]) s) text (shards),
    lateral (select array_agg(distinct s - braid.shard(32768, repeat('x', 100000), 9) + 1) from unnest(array[braid.shard(32768, v.long, 9), braid.shard(32768, v.far, 9)]) s) long (shards),
    lateral (select array_agg(distinct s - braid.shard(32768, '2024-02-29'::date, 9) + 1) from unnest(array[braid.shard(32768, v.eleven, 9), braid.shard(32768, v.twelve, 9)]) s) day (shards);
select braid.shard(32768, v.nine, 9) = braid.shard(32768, '0190a6e2-7c5b-7d3e-9a40-1f2e3d4c5b6a'::uuid, 9), braid.shard(32768, v.ten, 9) = braid.shard(32768, true, 9),
       braid.shard(32768, v.thirteen, 9) = braid.shard(32768, '2024-02-29 21:34:56.789012+09'::timestamptz, 9), braid.shard(32768, v.fourteen, 9) = braid.shard(32768, '\x00ff42'::bytea, 9) from value v;
-- the lowest numbers, which are narrower than the word that they come in
select braid.shard(32768, '-1'::smallint, 9) = braid.shard(32768, '-1'::bigint, 9), braid.shard(32768, '-1'::int, 9) = braid.shard(32768, '-1'::bigint, 9),
       braid.shard(32768, '-32768'::smallint, 9) = braid.shard(32768, '-32768'::bigint, 9), braid.shard(32768, '-2147483648'::int, 9) = braid.shard(32768, '-2147483648'::bigint, 9);
-- one spread on one shard, and a tenant's rows on as many as its spread
select count(distinct braid.shard(64, 42, i)), count(distinct braid.shard(64, 42, i, 8)), count(distinct braid.shard(64, 42, i, 64)) from generate_series(1, 10000) i;
-- domains count as their base type; null has no shard
create domain tenant as bigint;
create domain tenant_of_shop as tenant check (value > 0);
select braid.shard(64, 42::tenant_of_shop, 4711) = braid.shard(64, 42, 4711), braid.shard(64, null::int, 1) is null, braid.shard(64, 1, null::int) is null;

-- collations: deterministic ones do not count, others have no shard
create collation german (provider = icu, locale = 'de-DE');
create collation folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
create temp table word (plain text, c text collate "C", german text collate german, folded text collate folded);
insert into word values ('Straße', 'Straße', 'Straße', 'Straße');
select braid.shard(512, c, 1) = braid.shard(512, plain, 1), braid.shard(512, german, 1) = braid.shard(512, plain, 1), braid.shard(512, german, c) = braid.shard(512, c, german) from word;
\set VERBOSITY default
select braid.shard(512, folded, 1) from word;
\echo :SQLSTATE
select braid.shard(512, 1, folded) from word;
\echo :SQLSTATE
-- whatever the other argument has
select braid.shard(512, plain, folded) from word;
\echo :SQLSTATE
select braid.shard(512, folded collate "C", 1) = braid.shard(512, plain, 1) from word;

-- what is refused
select braid.shard(64, 1.5::float8, 1);
\echo :SQLSTATE
select braid.shard(64, 1, '{}'::jsonb);
\echo :SQLSTATE
select braid.shard(64, array[1], 1);
\echo :SQLSTATE
select braid.shard(64, 'acme', 1);
\echo :SQLSTATE
select braid.shard(0, 1, 1);
\echo :SQLSTATE
select braid.shard(-1, 1, 1);
\echo :SQLSTATE
select braid.shard(32769, 1, 1);
\echo :SQLSTATE
select braid.shard(64, 1, 1, 3);
\echo :SQLSTATE
select braid.shard(64, 1, 1, 0);
\echo :SQLSTATE
select braid.shard(64, 1, 1, -2147483648);
\echo :SQLSTATE
select braid.shard(48, 1, 1, 64);
\echo :SQLSTATE

-- anybody may call it, in indexes and in parallel
select provolatile, proparallel, proisstrict, has_function_privilege('public', oid, 'execute') from pg_proc where oid = 'braid.shard'::regproc;
