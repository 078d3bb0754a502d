# A table that is made while a subscription runs, of a publication FOR ALL TABLES, joins with its first change. Whoever waits for a position of
# the provider finds what was committed before it, in such a table too: its first copy is waited for.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

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
ok(reached($position, '30 s'), 'without the lock it is');
is($paris->safe_psql('postgres', 'select k, v from held'), '1|1', 'and there they are');
is(state_of('held'), 'ready', 'the table is ready');

# Many, each looked at the moment its position is reached; some have rows here, and are not copied.
for my $round (1 .. 12)
{
	my $table = "made_$round";
	on_all("create table $table (k int primary key, v int)", $tokyo, $paris);
	$paris->safe_psql('postgres', "insert into $table values (0, 0)") if $round % 3 == 0;
	$tokyo->safe_psql('postgres', "insert into $table values (1, $round); insert into $table values (2, $round)");
	reached(event(), '30 s') or fail("round $round");
	is($paris->safe_psql('postgres', "select count(*), min(v), max(v) from $table where k > 0"), "2|$round|$round", "$table has what it had at the position");
}

# A subscription that is stopped the moment it has caught up goes on where it was: nothing of what comes meanwhile is taken for copied.
on_all('create table line (k int primary key, v int)', $tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into line values (0, 0)');
caught_up($paris, $tokyo);
is(state_of('line'), 'ready', 'caught up: the new table is ready');
$paris->safe_psql('postgres', "select braid.disable_subscription('$name')");
$tokyo->safe_psql('postgres', 'insert into line select k, k from generate_series(1, 100) k');
$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'line', 'held');

done_testing();
