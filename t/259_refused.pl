# The provider refuses a subscription because of a right or a setting. Once that is put right there,
# the subscription goes on by itself; nobody has to enable it.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = "braid.stopped_retry_interval = 500ms\nbraid.retry_interval = 100ms";
my ($tokyo, $paris) = my @nodes = map { new_node($_, conf => $conf) } qw(tokyo paris);
on_all('create table item (id int primary key, v text)', @nodes);
$tokyo->safe_psql('postgres', q[create role replicator login replication superuser; insert into item values (1, 'first')]);
my $dsn = $tokyo->connstr('postgres') . ' user=replicator';
$paris->safe_psql('postgres', "select braid.create_subscription('paris_from_tokyo', \$d\$$dsn\$d\$)");
$tokyo->wait_for_catchup('paris_from_tokyo');
my $id = 1;

# The provider comes to refuse, and is put right.
sub refused
{
	my ($what, $refuse, $state, $expected, $cure) = @_;
	$tokyo->safe_psql('postgres', $_) for @$refuse;
	$tokyo->safe_psql('postgres', q[select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'walsender']);
	$id++;
	$tokyo->safe_psql('postgres', "insert into item values ($id, 'next')");
	becomes($paris, "select last_error ~ '$expected' and (state = 'retrying' or retry_at is not null) from braid.subscription_status where state = '$state'",
		't', "$what: the view says what it is and that it is tried again") or diag explain status($paris, 'paris_from_tokyo');
	$tokyo->safe_psql('postgres', $_) for @$cure;
	becomes($paris, "select v from item where id = $id", 'next', "$what: it goes on by itself");
	becomes($paris, q[select state || coalesce(last_error, '') from braid.subscription_status], 'streaming', "$what: and streams");
	return;
}

refused('login', ['alter role replicator nologin'], 'retrying', 'not permitted to log in', ['alter role replicator login']);
if ($tokyo->safe_psql('postgres', q[select count(*) from pg_settings where name = 'output_plugin_libraries']))
{
	my $before = $tokyo->safe_psql('postgres', 'show output_plugin_libraries');
	refused('setting', ['alter system set output_plugin_libraries = pgoutput', 'select pg_reload_conf()'],
		'error', 'output plugin', ["alter system set output_plugin_libraries = $before", 'select pg_reload_conf()']);
}

# A slot that is gone is not: one that somebody makes anew lacks what came in between.
my $slot = $tokyo->safe_psql('postgres', 'select slot_name from pg_replication_slots');
$paris->safe_psql('postgres', q[select braid.disable_subscription('paris_from_tokyo')]);
ok($tokyo->poll_query_until('postgres', 'select not active from pg_replication_slots'), 'the slot is free');
$tokyo->safe_psql('postgres', "select pg_drop_replication_slot('$slot')");
$paris->safe_psql('postgres', q[select braid.enable_subscription('paris_from_tokyo')]);
becomes($paris, 'select state from braid.subscription_status', 'error', 'without its slot it stops');
is(status($paris, 'paris_from_tokyo')->{retry_at}, '', 'and is not tried again');

$_->stop for @nodes;
done_testing();
