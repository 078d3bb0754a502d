# braid.compare while both nodes are written to: changes on their way are no difference. Rows that
# were made to differ by hand are found.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $publication = 'for all tables with (publish_via_partition_root = true)';
my $tokyo = new_node('tokyo', publication => $publication, init => [ '--locale=C', '--encoding=UTF8' ]);
my $paris = new_node('paris', publication => $publication, init => [ '--locale=C', '--encoding=UTF8' ]);
my @nodes = ($tokyo, $paris);
system_or_bail('pgbench', '-i', '-q', '-s', '1', '-h', $_->host, '-p', $_->port, 'postgres') for $tokyo;
$paris->safe_psql('postgres', q[
	create table pgbench_accounts (aid int primary key, bid int, abalance int, filler char(84));
	create table pgbench_branches (bid int primary key, bbalance int, filler char(88));
	create table pgbench_tellers (tid int primary key, bid int, tbalance int, filler char(84));
	create table pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
]);
on_all(q[
	create table odd ("where" text, "Key ""2""" numeric, v jsonb, t timestamptz, f float8, b bytea, big text, c char(5), a text[], g int generated always as (1) stored,
		primary key ("where", "Key ""2"""));
	create table no_key (n int);
	create table empty (id uuid primary key);
	create table parts (region text, id int, v text, primary key (region, id)) partition by list (region);
	create table parts_a partition of parts for values in ('a');
	create table parts_b partition of parts default;
], @nodes);
subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');

# Makes a change on one node that the other never gets.
sub by_hand
{
	my ($node, $sql) = @_;
	$node->safe_psql('postgres', q[select pg_replication_origin_create('by hand') where not exists (select from pg_replication_origin where roname = 'by hand')]);
	$node->safe_psql('postgres', qq[
		select pg_replication_origin_session_setup('by hand');
		set session_replication_role = replica;
		$sql;
		select pg_replication_origin_session_reset();
	]);
	return;
}

# id of the comparison, differences, rows that kept moving, rows compared.
sub compare
{
	my ($node, $table, $options) = @_;
	my $from = $node->name eq 'paris' ? 'paris_from_tokyo' : 'tokyo_from_paris';
	my $out = $node->safe_psql('postgres', "call braid.compare('$from', '$table'" . ($options // '') . ')');
	my %got;
	@got{qw(id differences unsettled rows)} = split /\|/, $out;
	return \%got;
}

sub found
{
	my ($node, $table) = @_;
	return $node->safe_psql('postgres', "select kind, key, columns, local_row, provider_row from braid.differences where relation = '$table'::regclass order by key::text");
}

$tokyo->safe_psql('postgres', q[
	insert into odd select 'k''\\' || i, i + 0.50, jsonb_build_object('i', i), '2024-01-01 00:00:00Z', i / 3.0, decode('00ff', 'hex'), repeat(md5(i::text), 500), 'x', array['a', null, 'b"c'] from generate_series(1, 2500) i;
	insert into parts select case when i % 2 = 0 then 'a' else 'b' end, i, 'v' from generate_series(1, 1000) i;
	insert into no_key values (1);
	insert into pgbench_accounts values (100001, 1, 0, ''), (100002, 1, 0, ''), (100003, 1, 0, ''), (100004, 1, 0, '');
]);
converged(@nodes);

# At rest.
for my $table (qw(pgbench_accounts odd parts empty))
{
	my $got = compare($paris, $table);
	is($got->{differences}, 0, "$table: no difference");
	is($got->{rows}, $tokyo->safe_psql('postgres', "select count(*) from $table"), "$table: all rows were compared");
}
is($paris->safe_psql('postgres', q[select walk, phase, ranges_differed, looked_at, pid is null, rows_total > 90000 from braid.compare_progress where relation = 'pgbench_accounts'::regclass]),
	'ranges|done|0|0|t|t', 'nothing was looked at more than once');

# By hand, in several ways.
by_hand($paris, q[update pgbench_accounts set abalance = 7 where aid = 100002]);
by_hand($paris, q[delete from pgbench_accounts where aid = 100003]);
by_hand($tokyo, q[delete from pgbench_accounts where aid = 100001]);
by_hand($paris, q[update odd set v = '{"i": 0}', big = big || 'x', a = null where "where" = 'k''\\7']);
by_hand($paris, q[update parts set v = 'other' where id = 500]);
by_hand($tokyo, q[insert into empty values ('6f1ed002-ab55-4c4d-9a0c-4d1c1f4f1d2e')]);
my $got = compare($paris, 'pgbench_accounts');
is($got->{differences}, 3, 'three were made');
is($paris->safe_psql('postgres', q[select kind, key, columns, local_row->'abalance', provider_row->'abalance', local_origin, provider_origin, local_timestamp is null, provider_timestamp is null
	from braid.differences where relation = 'pgbench_accounts'::regclass order by (key->>'aid')::int]), <<'EXPECTED' =~ s/\n\z//r, 'and are found');
only_here|{"aid": 100001}||0||tokyo||f|t
differs|{"aid": 100002}|{abalance}|7|0|by hand|tokyo|f|f
missing_here|{"aid": 100003}|||0||tokyo|t|f
EXPECTED
compare($paris, $_) for qw(odd parts empty);
is($paris->safe_psql('postgres', q[select kind, key, columns, local_row->'v' from braid.differences where relation = 'odd'::regclass]),
	q[differs|{"where": "k'\\\\7", "Key \"2\"": 7.50}|{v,big,a}|{"i": 0}], 'in a table with odd names and large values');
is(found($paris, 'parts'), q[differs|{"id": 500, "region": "a"}|{v}|{"v": "other", "id": 500, "region": "a"}|{"v": "v", "id": 500, "region": "a"}], 'in a partitioned table');
is(found($paris, 'empty'), q[missing_here|{"id": "6f1ed002-ab55-4c4d-9a0c-4d1c1f4f1d2e"}|||{"id": "6f1ed002-ab55-4c4d-9a0c-4d1c1f4f1d2e"}], 'in a table that is empty here');
is(compare($tokyo, 'pgbench_accounts')->{differences}, 3, 'the other node sees the same from its side');
is($tokyo->safe_psql('postgres', q[select string_agg(kind, ',' order by key->>'aid') from braid.differences]), 'missing_here,differs,only_here', 'turned around');

# Given keys only.
$got = compare($paris, 'pgbench_accounts', q[, keys => '[{"aid": 100002}, {"aid": 5}]']);
is("$got->{differences} $got->{rows}", '1 0', 'of two given keys one differs');
is($paris->safe_psql('postgres', q[select walk, looked_at from braid.compare_progress where relation = 'pgbench_accounts'::regclass]), 'given keys|2', 'and nothing else was read');
# No more than so many.
by_hand($paris, q[update pgbench_accounts set filler = 'y' where aid between 20001 and 20400]);
$got = compare($paris, 'pgbench_accounts', q[, max_differences => 100]);
cmp_ok($got->{differences}, '>=', 100, 'the limit is reached');
is(compare($paris, 'pgbench_accounts')->{differences}, 403, 'all of them');

# While both are written to.
my @bench = map { start_pgbench($_, '-c', '4', '-T', '20') } @nodes;
sleep 1;
for my $round (1 .. 3)
{
	$got = compare($paris, 'pgbench_accounts');
	my $false = $paris->safe_psql('postgres', q[select count(*) from braid.differences where relation = 'pgbench_accounts'::regclass and (key->>'aid')::int not in (100001, 100002, 100003) and (key->>'aid')::int not between 20001 and 20400]);
	is($false, '0', "round $round: nothing on its way is taken for a difference");
	# Of the others pgbench mends one with each row that it writes.
	is($paris->safe_psql('postgres', q[select count(*) from braid.differences where relation = 'pgbench_accounts'::regclass and (key->>'aid')::int in (100001, 100002, 100003)]),
		'3', "round $round: those that nobody writes are found; $got->{differences} in all, $got->{unsettled} kept moving");
	note($paris->safe_psql('postgres', q[select phase, rows_compared, ranges, ranges_differed, looked_at, took from braid.compare_progress where relation = 'pgbench_accounts'::regclass]));
}
is(compare($tokyo, 'pgbench_tellers')->{differences}, 0, 'nor in a small table where every row is hot');
finish_pgbench($_) for @bench;
converged(@nodes);
is(compare($paris, 'pgbench_tellers')->{differences}, 0, 'at rest again');

# A node of another encoding and another order.
my $quito = new_node('quito', publication => '', init => [ '--locale=C', '--encoding=LATIN1' ]);
$tokyo->safe_psql('postgres', q[insert into odd ("where", "Key ""2""", big) values (U&'caf\00e9', 1, U&'\00fcber')]);
$quito->safe_psql('postgres', $paris->safe_psql('postgres', q[select string_agg(format('create table %I (%s);', t, c), '') from (values
	('odd', '"where" text, "Key ""2""" numeric, v jsonb, t timestamptz, f float8, b bytea, big text, c char(5), a text[], primary key ("where", "Key ""2""")')) v (t, c)]));
$tokyo->safe_psql('postgres', 'create publication text_key for table odd ("where", "Key ""2""", v, t, f, b, big, c, a) where ("Key ""2""" < 2000)');
my $dsn = $tokyo->connstr('postgres');
$quito->safe_psql('postgres', "select braid.create_subscription('quito_from_tokyo', \$dsn\$$dsn\$dsn\$, publications => '{text_key}')");
$quito->safe_psql('postgres', q[select braid.wait_for_subscription('quito_from_tokyo', '180 s')]);
is(join(' ', (split /\|/, $quito->safe_psql('postgres', q[call braid.compare('quito_from_tokyo', 'odd')]))[ 1, 2, 3 ]), '0 0 2000', 'rows of a filter, in another encoding');
is($quito->safe_psql('postgres', 'select walk, phase from braid.compare_progress'), 'keys|done', 'are compared key by key');
by_hand($quito, q[update odd set big = U&'\00e4' where "Key ""2""" = 1]);
by_hand($quito, q[delete from odd where "Key ""2""" in (1.5, 1999.5)]);
by_hand($quito, q[insert into odd ("where", "Key ""2""") values ('here', 3), ('outside of the filter', 3000)]);
$quito->safe_psql('postgres', q[call braid.compare('quito_from_tokyo', 'odd')]);
is($quito->safe_psql('postgres', q[select kind, length(key->>'where'), columns, ascii(local_row->>'big'), ascii(provider_row->>'big') from braid.differences where kind <> 'missing_here' order by key->>'where']),
	"differs|4|{big}|228|252\nonly_here|4|||", 'what differs is found');
is($quito->safe_psql('postgres', q[select string_agg(key->>'Key "2"', ' ' order by key) from braid.differences where kind = 'missing_here']), '1.50 1999.50', 'what is missing too');

# Slowly, seen from another session, and cancelled.
my $session = $paris->background_psql('postgres', on_error_stop => 0);
$session->query_until(qr/begun/, "\\echo begun\ncall braid.compare('paris_from_tokyo', 'pgbench_accounts', rows_per_second => 5000);\n");
ok($paris->poll_query_until('postgres', q[select rows_compared > 5000 and phase in ('reading', 'settling') and pid is not null and rows_total > 90000 from braid.compare_progress where relation = 'pgbench_accounts'::regclass]),
	'it is seen how far it is');
is($paris->safe_psql('postgres', q[select count(*) from pg_stat_activity where query like 'call braid.compare%' and backend_xid is not null and xact_start < now() - interval '3 s']), '0', 'no transaction is long');
$paris->safe_psql('postgres', q[select pg_cancel_backend(pid) from braid.compare_progress where pid is not null]);
ok($paris->poll_query_until('postgres', q[select phase = 'interrupted' and pid is null from braid.compare_progress where relation = 'pgbench_accounts'::regclass]), 'cancelled');
$session->quit;

# Calls that are refused.
sub refused
{
	my ($sql, $state, $words, $what) = @_;
	my ($status, $out, $err) = $paris->psql('postgres', "\\set VERBOSITY verbose\n$sql", on_error_stop => 0);
	like($err, qr/ERROR:\s+$state: .*$words.*HINT:/s, $what);
	return;
}
refused(q[call braid.compare('paris_from_tokyo', 'no_key')], '55000', 'no unique key', 'a table without a key');
refused(q[call braid.compare('nobody', 'parts')], '42704', 'does not exist', 'no such subscription');
refused(q[call braid.compare('paris_from_tokyo', 'parts_a')], '42704', 'is not in subscription', 'a table that is not in it');
refused(q[call braid.compare('paris_from_tokyo', 'parts', keys => '[{"id": 1}]')], '22023', 'a key lacks a column', 'half a key');
refused(q[call braid.compare('paris_from_tokyo', 'parts', rows_per_second => 0)], '22023', 'greater than zero', 'a rate of zero');
refused(q[call braid.repair('paris_from_tokyo', 'pgbench_branches')], '55000', 'was not compared', 'a repair of what was not compared');
refused(q[select braid.compare_step(1)], '55000', 'not in hand', 'a step by itself');
$tokyo->stop;
refused(q[call braid.compare('paris_from_tokyo', 'parts')], '08006', 'could not connect', 'a provider that is gone');
$tokyo->start;

done_testing();
