# A server with busy subscriptions stops promptly in each of the three modes, and then goes on where
# it was. Workers follow changes of their subscription's state at once.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris');
my @nodes = ($tokyo, $paris);
on_all('create table item (id bigint primary key, node text); create sequence item_id', @nodes);
my $to_paris = subscribe($paris, $tokyo, copy_data => 'false');
my $to_tokyo = subscribe($tokyo, $paris, copy_data => 'false');

my $dir = PostgreSQL::Test::Utils::tempdir();
for my $node (@nodes)
{
	my ($name, $offset) = ($node->name, $node == $tokyo ? 0 : 1_000_000_000);
	PostgreSQL::Test::Utils::append_to_file("$dir/$name.sql", "insert into item values ($offset + nextval('item_id'), '$name');\n");
}

# Writers on the other node keep the workers busy during each stop.
for my $mode (qw(fast immediate smart))
{
	for my $node (@nodes)
	{
		my ($other) = grep { $_ != $node } @nodes;
		my $arrived = "select count(*) from item where node = '" . $other->name . "'";
		my $before = $node->safe_psql('postgres', $arrived);
		my $bench = start_pgbench($other, '-c', '2', '-R', '500', '-T', '2', '-f', "$dir/" . $other->name . '.sql');
		wait_until(sub { $node->safe_psql('postgres', $arrived) > $before + 100 }, 30);
		my $start = time;
		# A smart stop of a server that feeds a subscriber waits for it to confirm: neither may keep
		# it from stopping.
		$node->stop($mode);
		my $took = time - $start;
		cmp_ok($took, '<', 60, sprintf '%s stops (%s) in %.1f s', $node->name, $mode, $took);
		$node->start;
		finish_pgbench($bench);
	}
	converged(@nodes);
	same_tables(\@nodes, 'item');
}

# Disabling, enabling and dropping take effect at commit, and not when rolled back.
# A subscription to nothing is created after it: when the manager has started its leader, it has
# looked at the other one, too.
my @leader = worker_pids($paris, 'braid leader');
is(scalar(@leader), 1, 'a leader');
$paris->safe_psql('postgres', "begin; select braid.disable_subscription('$to_paris'); rollback");
$tokyo->safe_psql('postgres', 'create publication nothing');
my $later = "'later', \$dsn\$" . $tokyo->connstr('postgres') . '$dsn$';
$paris->safe_psql('postgres', "select braid.create_subscription($later, publications => '{nothing}', copy_data => false); select braid.wait_for_subscription('later')");
is(scalar(grep { $_ == $leader[0] } worker_pids($paris, 'braid leader')), 1, 'disabling that is rolled back stops nothing');
$paris->safe_psql('postgres', "select braid.drop_subscription('later')");
ok(wait_until(sub { my @now = worker_pids($paris, 'braid leader'); "@now" eq "@leader" }, 30), 'one leader again');
$paris->safe_psql('postgres', "select braid.disable_subscription('$to_paris')");
ok(wait_until(sub { !worker_pids($paris, 'braid leader') && !worker_pids($paris, 'braid applier') }, 10), 'disabled: the workers are gone');
$paris->safe_psql('postgres', "select braid.enable_subscription('$to_paris')");
ok(wait_until(sub { scalar worker_pids($paris, 'braid leader') }, 30), 'enabled: they are back');
caught_up($paris, $tokyo);

# The postmaster alone dies: no worker outlives it.
my @pids = map { worker_pids($paris, $_) } 'braid supervisor', 'braid manager', 'braid leader', 'braid applier';
cmp_ok(scalar(@pids), '>=', 4, 'supervisor, manager, leader and appliers are there');
$paris->kill9;
ok(wait_until(sub { !grep { kill 0, $_ } @pids }, 30), 'workers notice that the postmaster is dead');
restart_crashed($paris);
$tokyo->safe_psql('postgres', q[insert into item values (nextval('item_id'), 'last')]);
converged(@nodes);
same_tables(\@nodes, 'item');

# Dropping leaves no slot behind at the provider.
$paris->safe_psql('postgres', "select braid.drop_subscription('$to_paris')");
ok(wait_until(sub { $tokyo->safe_psql('postgres', q[select count(*) from pg_replication_slots where plugin = 'braid' and slot_name not like 'braid_deletions%']) eq '0' }, 30), 'the slot is dropped with the subscription');
is(scalar(worker_pids($paris, 'braid leader')), 0, 'and its workers are gone');

done_testing();
