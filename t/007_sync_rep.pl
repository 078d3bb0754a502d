# A subscription named in synchronous_standby_names makes commits wait for it, as a native one does.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
on_all('create table item (id int primary key)', $tokyo, $paris);
# As with native subscriptions: the subscriber flushes at once, without waiting for the WAL writer.
my $name = subscribe($paris, $tokyo, synchronous_commit => q['on']);

$tokyo->safe_psql('postgres', "alter system set synchronous_standby_names = '$name'");
$tokyo->reload;
ok(wait_until(sub { $tokyo->safe_psql('postgres', "select sync_state from pg_stat_replication where application_name = '$name'") eq 'sync' }, 10),
	'the subscription is the synchronous standby');

# A commit at the provider is durable here at once; with remote_apply, it is visible too.
for my $level (qw(on remote_apply))
{
	my $late = 0;
	for my $i (1 .. 20)
	{
		my $id = $level eq 'on' ? $i : 100 + $i;
		$tokyo->safe_psql('postgres', "set synchronous_commit = $level; insert into item values ($id)");
		$late++ if $paris->safe_psql('postgres', "select count(*) from item where id = $id") ne '1';
	}
	is($late, 0, "synchronous_commit = $level: each row is on the subscriber when the commit returns");
}

# Commits one after another do not wait for a timer of any process.
my $start = time;
$tokyo->safe_psql('postgres', join '', map { "insert into item values ($_);" } 1001 .. 1050);
cmp_ok(time - $start, '<', 50, '50 commits in a row take ' . sprintf('%.2f s', time - $start));

# No subscriber, no commit.
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
ok(wait_until(sub { !worker_pids($paris, 'braid leader') }, 30), 'disabled');
my $session = $tokyo->background_psql('postgres');
$session->query_until(qr/started/, "\\echo started\ninsert into item values (2000);\n\\echo finished\n");
ok(wait_until(sub { $tokyo->safe_psql('postgres', q[select count(*) from pg_stat_activity where wait_event = 'SyncRep']) eq '1' }, 10),
	'a commit waits while the subscriber is away');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
ok(wait_until(sub { $tokyo->safe_psql('postgres', q[select count(*) from pg_stat_activity where wait_event = 'SyncRep']) eq '0' }, 30),
	'and goes on when it is back');
$session->quit;
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');

done_testing();
