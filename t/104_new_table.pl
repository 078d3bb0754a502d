# A table that is created while a subscription runs, of a publication FOR ALL TABLES, joins with its
# first change. A session that waits for a position of the provider also waits for the first copy of
# such a table.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '');
my $name = subscribe($paris, $tokyo);

sub event { return $tokyo->safe_psql('postgres', 'select braid.sync_event()'); }
sub reached
{
	my ($position, $limit) = @_;
	my ($status, undef, $stderr) = $paris->psql('postgres', "select braid.wait_for_event('tokyo', '$position', '$limit')");
	return $status == 0 || diag($stderr) && 0;
}
sub state_of { return $paris->safe_psql('postgres', "select state from braid.subscription_tables where relation::text = '$_[0]'"); }

# One whose copy can't begin here.
on_all('create table held (k int primary key, v int)', $tokyo, $paris);
my $session = $paris->background_psql('postgres', on_error_die => 1);
$session->query_safe('begin; lock table held in share mode');
$tokyo->safe_psql('postgres', 'insert into held values (1, 1)');
my $position = event();
ok(wait_until(sub { state_of('held') ne '' }, 30), 'the table joins');
my ($status, undef, $stderr) = $paris->psql('postgres', "select braid.wait_for_event('tokyo', '$position', '2 s')");
isnt($status, 0, 'with its rows not here, the position is not reached');
like($stderr, qr/has not been reached|not reached|time/, 'which is said') or diag $stderr;
is($paris->safe_psql('postgres', 'select count(*) from held'), '0', 'they are not here');
$session->query_safe('commit');
$session->quit;
ok(reached($position, '180 s'), 'without the lock it is');
is($paris->safe_psql('postgres', 'select k, v from held'), '1|1', 'and there they are');
is(state_of('held'), 'ready', 'the table is ready');

# Many, each looked at the moment its position is reached; some have rows here, and are not copied.
for my $round (1 .. 12)
{
	my $table = "made_$round";
	on_all("create table $table (k int primary key, v int)", $tokyo, $paris);
	$paris->safe_psql('postgres', "insert into $table values (0, 0)") if $round % 3 == 0;
	$tokyo->safe_psql('postgres', "insert into $table values (1, $round); insert into $table values (2, $round)");
	reached(event(), '180 s') or fail("round $round");
	is($paris->safe_psql('postgres', "select count(*), min(v), max(v) from $table where k > 0"), "2|$round|$round", "$table has what it had at the position");
}

# A subscription that is stopped as soon as it has caught up goes on where it was: changes that come
# meanwhile do not count as copied.
on_all('create table line (k int primary key, v int)', $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into line values (0, 0)');
caught_up($paris, $tokyo);
is(state_of('line'), 'ready', 'caught up: the new table is ready');
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
$tokyo->safe_psql('postgres', 'insert into line select k, k from generate_series(1, 100) k');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'line', 'held');

# Both ways at once, and from a third node: no node stops because of the others' changes while the
# table joins.
my $quito = new_node('quito');
$paris->safe_psql('postgres', 'create publication braid for all tables');
my @all = ($tokyo, $paris, $quito);
$quito->safe_psql('postgres', join ';', map { "create table $_ (k int primary key, v int)" } split /\n/, $tokyo->safe_psql('postgres', q[select relname from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace]));
subscribe($tokyo, $paris, copy_data => 'false');
subscribe($quito, $tokyo);
for ([ $quito, $paris ], [ $tokyo, $quito ], [ $paris, $quito ])
{
	my ($subscriber, $provider) = @$_;
	my $joined = subscribe($subscriber, $provider, copy_data => 'false');
	# As they would be if their copies had not been done by others.
	$subscriber->safe_psql('postgres', "update braid.subscription set copy_data = true where subscription_name = '$joined'; select braid.disable_subscription('$joined')");
	$subscriber->safe_psql('postgres', "select braid.enable_subscription('$joined'); select braid.wait_for_subscription('$joined', '180 s')");
}
for my $round (1 .. 6)
{
	my $table = "both_$round";
	on_all("create table $table (k int primary key, v text)", @all);
	my @sessions = map { $_->background_psql('postgres', on_error_die => 1) } @all;
	for my $i (0 .. $#all)
	{
		my $who = $all[$i]->name;
		$sessions[$i]->query_safe("begin; insert into $table select $i + 3 * k, '$who' from generate_series(1, 50) k; insert into $table values (0, '$who')");
	}
	$_->query_safe('commit') for @sessions;
	$_->quit for @sessions;
	# An announced deletion is a change of the announcing node's own.
	converged(@all) for 1 .. 2;
	is($tokyo->safe_psql('postgres', "select count(*) from $table"), '151', "$table has the rows of all");
	same_tables(\@all, $table);
}
for my $node (@all)
{
	becomes($node, q[select count(*) from braid.subscription_status where state <> 'streaming' or last_error <> ''], '0', 'no subscription of ' . $node->name . ' has stopped');
}

# Where each node's commits wait until the other has them, the copies do not wait for these.
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', synchronous_commit => 'local')");
$tokyo->safe_psql('postgres', "select braid.alter_subscription('tokyo_from_paris', synchronous_commit => 'local')");
for ([ $tokyo, $name ], [ $paris, 'tokyo_from_paris' ])
{
	my ($node, $standby) = @$_;
	$node->safe_psql('postgres', "alter system set synchronous_standby_names = '$standby'");
	$node->reload;
	ok(wait_until(sub { $node->safe_psql('postgres', "select sync_state from pg_stat_replication where application_name = '$standby'") eq 'sync' }, 30), "$standby is synchronous");
}
for my $node (@all)
{
	$node->safe_psql('postgres', 'set synchronous_commit = local; create table waits (k int primary key, v text)');
}
my @sessions = map { $_->background_psql('postgres', on_error_die => 1) } $tokyo, $paris;
$sessions[0]->query_safe(q[begin; insert into waits values (1, 'tokyo')]);
$sessions[1]->query_safe(q[begin; insert into waits values (2, 'paris')]);
my $began = time;
$_->query_until(qr/started/, "\\echo started\ncommit;\n\\echo finished\n") for @sessions;
for my $i (0, 1)
{
	ok(wait_until(sub { $all[$i]->safe_psql('postgres', q[select count(*) from pg_stat_activity where wait_event = 'SyncRep']) eq '0' }, 60), 'the commit of ' . $all[$i]->name . ' returns');
}
note('after ' . (time - $began) . ' s');
$_->quit for @sessions;
converged(@all);
is($quito->safe_psql('postgres', 'select count(*) from waits'), '2', 'both rows are everywhere');
same_tables(\@all, 'waits');

done_testing();
