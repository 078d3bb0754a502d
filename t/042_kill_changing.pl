# kill -9 of random processes of provider and subscriber while the subscription changes from one
# apply mode and commit order to another. Each transaction takes effect once.

use strict;
use warnings;

use Braid;
use Kill;
use Test::More;

# In all; a kill and what follows it take about a second.
my $kills = $ENV{BRAID_TEST_KILLS} // 21;
my @modes = map { [ split ' ' ] } ('parallel relaxed', 'batch source', 'aggregate relaxed', 'serial source', 'batch relaxed', 'parallel source', 'aggregate source');
kill_seed();

# A small buffer: what is large is applied while it comes.
my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.apply_buffer_size = 1MB\nbraid.appliers_per_subscription = 4\n");
ledger_tables($tokyo, $paris);
my $name = subscribe($paris, $tokyo);
start_load($tokyo, small => '-c 2 -R 200', moving => '-c 2 -R 200', large => '-c 1');
hold_up($paris);
start_checkpoints($tokyo);
for (@modes)
{
	my ($mode, $order) = @$_;
	wait_until(sub { (attempt($paris, "select braid.alter_subscription('$name', apply_mode => '$mode', commit_order => '$order')"))[0] == 0 }, 30)
	  or die "cannot change to $mode $order";
	my $tally = start_tally($paris, $name);
	kill_processes("$mode $order", between => [ $tokyo, $paris ], kinds => every_kind($tokyo, $paris), rounds => $kills / @modes, tally => $tally);
	goes_on("$mode $order", $name, $tokyo, $paris);
	is($paris->safe_psql('postgres', "select apply_mode || ' ' || commit_order from braid.subscription where subscription_name = '$name'"), "$mode $order", "in its mode, $mode $order");
	ok(wait_until(sub { look($tally); applied($tally) > 0 }, 30), "and it has applied something in it, $mode $order");
}
stop_load();
caught_up($paris, $tokyo);
each_once([ $tokyo, $paris ]);
done_testing();
