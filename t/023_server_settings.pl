# If a server lacks something, creating a node or a subscription reports it with an SQLSTATE, the
# setting's name, and the remedy.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_server('paris');
on_all('create table item (id int primary key, v text)', $tokyo, $paris);
my $dsn = $tokyo->connstr('postgres');
my $create_node = "select braid.create_node('paris', '" . $paris->connstr('postgres') =~ s/'/''/gr . "')";
my $subscribe = "select braid.create_subscription('s', \$dsn\$$dsn\$dsn\$)";

# Tests that a statement is refused with this SQLSTATE, message and hint.
sub refused
{
	my ($sql, $state, $message, $hint, $why) = @_;
	my ($code, undef, $error) = $paris->psql('postgres', $sql, extra_params => [ '-v', 'VERBOSITY=verbose' ], timeout => 30);
	isnt($code, 0, "$why: refused");
	like($error, qr/ERROR:  $state: $message/, "$why: SQLSTATE and message");
	like($error, qr/HINT:  $hint/, "$why: hint");
	return;
}

# Restart a server with other settings, have something checked, and take the settings back.
my %conf = map { $_->name => slurp_file($_->data_dir . '/postgresql.conf') } $tokyo, $paris;

sub with_settings
{
	my ($node, $settings, $check) = @_;
	$node->append_conf('postgresql.conf', $settings);
	$node->restart;
	$check->();
	unlink $node->data_dir . '/postgresql.conf';
	append_to_file($node->data_dir . '/postgresql.conf', $conf{ $node->name });
	return;
}

# From 19 on a server raises its level by itself.
my $raises = $paris->safe_psql('postgres', "select count(*) from pg_settings where name = 'effective_wal_level'");

# A node.
$paris->safe_psql('postgres', 'create extension braid');
my @for_node = (
	[ 'wal_level = replica', 'wal_level must be logical', 'Set wal_level = logical .*restart' ],
	[ 'track_commit_timestamp = off', 'track_commit_timestamp must be on', 'Set track_commit_timestamp = on .*restart' ],
	[ "shared_preload_libraries = ''", 'braid must be loaded when the server starts', 'Add braid to shared_preload_libraries .*restart' ],
	[ 'max_replication_slots = 0', 'max_replication_slots must be greater than zero', 'Set max_replication_slots .*restart' ],
	[ 'max_wal_senders = 0', 'max_wal_senders must be greater than zero', 'Set max_wal_senders .*restart' ],
);
my $knows_plugins = $paris->safe_psql('postgres', "select count(*) from pg_settings where name = 'output_plugin_libraries'");
push @for_node, [ "output_plugin_libraries = 'pgoutput'", 'output_plugin_libraries does not list braid', "To allow them, run ALTER SYSTEM SET output_plugin_libraries = 'pgoutput', 'braid'; .*reload" ]
  if $knows_plugins;
for my $case (@for_node)
{
	my ($settings, $message, $hint) = @$case;
	next if $raises && $settings eq 'wal_level = replica';
	with_settings($paris, "$settings\n", sub { refused($create_node, '55000', $message, $hint, "node with $settings") });
}
$paris->restart;
is($paris->safe_psql('postgres', 'select count(*) from braid.nodes'), '0', 'nothing was stored');
$paris->safe_psql('postgres', $create_node);

# A subscription: what the provider lacks.
my @at_provider = (
	[ 'wal_level = replica', '55000', q(the provider's wal_level is not logical), 'At the provider, set wal_level = logical .*restart' ],
	[ 'max_replication_slots = 0', '53400', 'all replication slots of the provider are in use', 'At the provider, .*increase max_replication_slots' ],
	[ 'max_wal_senders = 0', '53400', 'all walsenders of the provider are in use', 'At the provider, increase max_wal_senders' ],
);
push @at_provider, [ "output_plugin_libraries = 'pgoutput'", '55000', q(the provider's output_plugin_libraries does not list braid),
	"At the provider, run ALTER SYSTEM SET output_plugin_libraries = 'pgoutput', 'braid'; .*reload" ]
  if $knows_plugins;
for my $case (@at_provider)
{
	my ($settings, $state, $message, $hint) = @$case;
	next if $raises && $settings eq 'wal_level = replica';
	with_settings($tokyo, "$settings\n", sub { refused($subscribe, $state, $message, $hint, "provider with $settings") });
}
$tokyo->restart;

# One slot, and it is in use.
with_settings($tokyo, "max_replication_slots = 1\n", sub {
	$tokyo->safe_psql('postgres', "select pg_create_physical_replication_slot('somebody_else')");
	refused($subscribe, '53400', 'all replication slots of the provider are in use', 'At the provider, drop slots that nobody needs or increase max_replication_slots', 'last slot taken');
	$tokyo->safe_psql('postgres', "select pg_drop_replication_slot('somebody_else')");
});
$tokyo->restart;

# Settings that this server lacks, also if it was made a node before.
my $origins = $paris->safe_psql('postgres', "select name from pg_settings where name in ('max_active_replication_origins', 'max_replication_slots') order by 1 limit 1");
my @here = (
	[ 'track_commit_timestamp = off', '55000', 'track_commit_timestamp must be on', 'Set track_commit_timestamp = on .*restart' ],
	[ "shared_preload_libraries = ''", '55000', 'braid must be loaded when the server starts', 'Add braid to shared_preload_libraries .*restart' ],
	[ "$origins = 1", '53400', 'not enough replication origins for another subscription', "Set $origins to at least 2 .*restart" ],
	# The launcher of native replication, supervisor, manager, leader, two appliers, a copy worker.
	[ 'max_worker_processes = 6', '53400', 'not enough worker processes for another subscription', 'Set max_worker_processes to at least 7 .*restart' ],
);
for my $case (@here)
{
	my ($settings, $state, $message, $hint) = @$case;
	with_settings($paris, "$settings\n", sub { refused($subscribe, $state, $message, $hint, "subscriber with $settings") });
}

# The smallest values that are accepted are enough.
with_settings($paris, "max_worker_processes = 7\n$origins = 2\n", sub {
	is($paris->safe_psql('postgres', 'select count(*) from braid.subscription'), '0', 'nothing was stored');
	is($tokyo->safe_psql('postgres', 'select count(*) from pg_replication_slots'), '0', 'nor left at the provider');
	$tokyo->safe_psql('postgres', q[insert into item values (1, 'one')]);
	subscribe($paris, $tokyo, name => 's');
	$tokyo->safe_psql('postgres', q[insert into item values (2, 'two')]);
	caught_up($paris, $tokyo);
	same_tables([ $tokyo, $paris ], 'item');
	refused($subscribe =~ s/'s'(.*)\)/'another'$1, copy_data => false)/r, '53400', 'not enough (replication origins|worker processes) for another subscription', 'Set ', 'no room for a second one');
});

# A server that no longer loads the library: no session has to wait for an event that can't come.
with_settings($paris, "shared_preload_libraries = ''\n", sub {
	refused("select braid.$_", '55000', 'braid must be loaded when the server starts', 'Add braid to shared_preload_libraries', $_)
	  for "wait_for_subscription('s')", "wait_for_event('tokyo', 'FFFFFFFF/0')", "enable_subscription('s')", "refresh_subscription('s')", 'sync_event()',
		"ingest('[]', 'shop')", "alter_subscription('s', apply_mode => 'batch')", "retry_parked('s')";
	my @missing = ('braid must be loaded when the server starts', 'Add braid to shared_preload_libraries in postgresql.conf and restart the server.');
	is($paris->safe_psql('postgres', 'select state, last_error, error_hint from braid.subscription_status'), join('|', 'error', @missing), 'the view says so');
	is($paris->safe_psql('postgres', 'select holds, message, hint from braid.node_standing()'), join('|', 'f', @missing), 'and the node');
	is($paris->safe_psql('postgres', 'select name, activity from braid.subscription_detail'), 's|', 'no activity is shown');
	for my $view (split /\n/, $paris->safe_psql('postgres', q[select viewname from pg_views where schemaname = 'braid' order by 1]))
	{
		is(($paris->psql('postgres', "select * from braid.$view"))[0], 0, "the view $view can be read");
	}
	$paris->safe_psql('postgres', qq[begin; select braid.$_; rollback]) for "disable_subscription('s')", "drop_subscription('s', false)";
});
$paris->restart;

# If a provider no longer loads the library, its subscribers report that, and go on by themselves
# later.
with_settings($tokyo, "shared_preload_libraries = ''\n", sub {
	ok(wait_until(sub { status($paris, 's')->{last_error} eq 'the provider reported: braid must be loaded when the server starts' }, 30), 'subscribers say that it is not loaded')
	  or diag(status($paris, 's')->{last_error});
	like(status($paris, 's')->{error_hint}, qr/^At the provider: Add braid to shared_preload_libraries/, 'and what to do there');
});
$tokyo->restart;
$tokyo->safe_psql('postgres', q[insert into item values (3, 'three')]);
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

done_testing();
