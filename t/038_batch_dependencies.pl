# Apply mode batch: a transaction depends on one of its own batch, and on an earlier one that
# another applier has not committed yet. It waits for that one, in either commit order.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 2\n");
on_all('create table held (k int primary key, n int); create table kv (k int primary key, n int not null); create table filler (id int primary key)',
	$tokyo, $paris);
$tokyo->safe_psql('postgres', 'insert into held values (1, 0)');
my $name = subscribe($paris, $tokyo, apply_mode => "'batch'");

for my $mode ('source', 'relaxed')
{
	# Nothing is said of an order where there is none to choose.
	$paris->safe_psql('postgres', "select braid.alter_subscription('$name', commit_order => '$mode')") if $mode ne 'source';
	for my $consolidate ('false', 'true')
	{
		$paris->safe_psql('postgres', "select braid.alter_subscription('$name', consolidate => $consolidate)");
		disable($paris, $name);
		on_all('truncate kv, filler', $tokyo);
		my $psql = '';
		# Too large for a batch, so an applier claims it alone. It waits for a lock here before it
		# has inserted anything.
		$psql .= "begin; update held set n = n + 1; insert into filler select -i from generate_series(1, 200) i; insert into kv values (1, 0); commit;\n";
		# The other applier takes all of these at once.
		$psql .= "insert into kv values (2, 0);\n";
		$psql .= "insert into filler values ($_);\n" for 1 .. 300;
		$psql .= "begin; delete from kv where k = 1; update kv set n = n + 1 where k = 2; commit;\n";
		$psql .= "insert into filler values ($_);\n" for 301 .. 1500;
		$tokyo->safe_psql('postgres', $psql);
		my $locker = $paris->background_psql('postgres', on_error_stop => 1);
		$locker->query_safe('begin; select from held for update');
		$paris->safe_psql('postgres', "select braid.enable_subscription('$name')");
		ok(wait_until(sub {
			$paris->safe_psql('postgres', q[select count(*) from pg_stat_activity where backend_type = 'braid applier' and wait_event_type = 'Lock']) eq '1'
		}, 20), "one is held up, $mode, consolidate $consolidate");
		$paris->safe_psql('postgres', 'select pg_sleep(0.5)');
		$locker->query_safe('commit');
		$locker->quit;
		caught_up($paris, $tokyo);
		same_tables([ $tokyo, $paris ], 'kv', 'held', 'filler');
		is($paris->safe_psql('postgres', 'select count(*) from braid.conflict_record'), '0', 'no conflict');
	}
}

done_testing();
