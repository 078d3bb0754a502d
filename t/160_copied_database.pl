# A database that is a copy of a node has the node's catalog, and must not act as the node: it runs
# none of its subscriptions, uses none of its slots, sends nothing in its name, and moves none of
# its replication origins.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @both = ($tokyo, $paris);
on_all('create table item (id int primary key, v text)', @both);
my $name = subscribe($paris, $tokyo);
subscribe($tokyo, $paris, copy_data => 'false');
$tokyo->safe_psql('postgres', q[insert into item values (1, 'before the copy')]);
converged(@both);

# A copy is made while no session is connected to the original.
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
$tokyo->safe_psql('postgres', q[select braid.disable_subscription('tokyo_from_paris')]);
$paris->stop;
$paris->append_conf('postgresql.conf', "shared_preload_libraries = ''\n");
$paris->start;
$paris->safe_psql('template1', 'create database shop template postgres');
$paris->stop;
$paris->append_conf('postgresql.conf', "shared_preload_libraries = 'braid'\n");
$paris->start;

sub refused
{
	my ($sql) = @_;
	my ($status, undef, $err) = $paris->psql('shop', $sql);
	return $status == 0 ? '' : $err;
}

# The original has to leave the slot alone while the copy could take it.
my $in_copy = sub { $paris->safe_psql('shop', $_[0]) };
$in_copy->("update braid.subscription set enabled = true");
my $log = -s $paris->logfile;
$paris->restart;
ok(wait_until(sub { slurp_file($paris->logfile, $log) =~ /braid manager: nothing runs here: node "paris" was created on another server or in another database/ }, 30),
	'the copy\'s manager says that nothing runs');
my $shown = $in_copy->(q[select state, last_error, error_hint from braid.subscription_status]);
like($shown, qr/^error\|node "paris" was created on another server or in another database\|Run braid\.drop_node\('paris'\) and then braid\.create_node/, 'the view says so, and what to do');
$tokyo->safe_psql('postgres', q[insert into item values (2, 'after the copy')]);
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
$tokyo->safe_psql('postgres', q[select braid.enable_subscription('tokyo_from_paris')]);
caught_up($paris, $tokyo);
same_tables(\@both, 'item');
is($in_copy->('select count(*) from item'), 1, 'the copy has received nothing');
is($in_copy->(q[select count(*) from pg_stat_activity where datname = 'shop' and backend_type in ('braid leader', 'braid applier', 'braid collector', 'braid cleanup')]), 0,
	'and has no workers but its manager');

# Calls that would act as the node.
for my $call ("braid.enable_subscription('$name')", 'braid.sync_event()', "braid.refresh_subscription('$name')")
{
	like(refused("select $call"), qr/node "paris" was created on another server or in another database/, "$call is refused");
}
$in_copy->(q[select pg_create_logical_replication_slot('of_copy', 'braid')]);
$in_copy->(q[insert into item values (7, 'in the copy')]);
for my $format ("'proto_version', '1', 'publication_names', 'braid'", "'format', 'gir-json', 'publication_names', 'braid'")
{
	like(refused("select count(*) from pg_logical_slot_peek_binary_changes('of_copy', null, null, $format)"),
		qr/node "paris" was created on another server/, "no stream in its name with $format");
}
# Streams that do not name a node are allowed.
is($in_copy->(q[select count(*) > 0 from pg_logical_slot_get_changes('of_copy', null, null, 'format-version', '2')]), 't', 'a stream that names no node is sent');
$in_copy->(q[select pg_drop_replication_slot('of_copy')]);

# A node of its own has origins of its own: the original's stay where they are.
my $positions = q[select string_agg(external_id || ' ' || remote_lsn, ', ' order by external_id) from pg_replication_origin_status where external_id like 'braid/%'];
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
ok(wait_until(sub { status($paris, $name)->{state} eq 'disabled' && !worker_pids($paris, 'braid applier') }, 30), 'the original is at rest');
my $before = $paris->safe_psql('postgres', $positions);
my $dsn = $paris->connstr('shop');
$in_copy->("select braid.drop_node('paris'); select braid.create_node('shop', \$dsn\$$dsn\$dsn\$)");
my $tokyo_dsn = $tokyo->connstr('postgres');
$in_copy->("truncate item");
$in_copy->("select braid.create_subscription('shop_from_tokyo', \$dsn\$$tokyo_dsn\$dsn\$)");
$in_copy->(q[select braid.wait_for_subscription('shop_from_tokyo', '180 s')]);
my %before = map { split / / } split /, /, $before;
my %after = map { split / / } split /, /, $paris->safe_psql('postgres', $positions);
is($after{$_}, $before{$_}, "origin $_ of the original has not moved") for sort keys %before;
$tokyo->safe_psql('postgres', q[insert into item values (3, 'for all three')]);
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables(\@both, 'item');
ok(wait_until(sub { $in_copy->('select count(*) from item') == 3 }, 30), 'and the copy is a node of its own');
done_testing();
