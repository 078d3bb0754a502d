# The number of appliers follows the load between its limits, without restarts. Each change has a
# recorded reason.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '',
	conf => "braid.appliers_per_subscription = 4\nbraid.min_appliers_per_subscription = 1\n");
on_all('create table item (id int primary key, n int not null)', $tokyo, $paris);
# Each row takes five milliseconds here, without using a processor.
$paris->safe_psql('postgres', q[
	create function dawdle() returns trigger immutable language plpgsql as $$ begin perform pg_sleep(0.005); return new; end $$;
	create trigger dawdle before insert or update on item for each row execute function dawdle();
	alter table item enable always trigger dawdle;
]);
my $name = subscribe($paris, $tokyo);

sub appliers
{
	return $paris->safe_psql('postgres', q[select count(*) from pg_stat_activity where backend_type = 'braid applier']);
}

sub changes
{
	return map { /has (\d+) appliers instead of (\d+): (.*)/ ? [ $2, $1, $3 ] : () } split /\n/, slurp_file($paris->logfile);
}

my $leader = $paris->safe_psql('postgres', q[select pid from pg_stat_activity where backend_type = 'braid leader']);
is(appliers(), 1, 'it starts with the fewest');
# Of three rows each: smaller ones are taken many at a time, one after the other.
$tokyo->safe_psql('postgres', 'do $$ begin for i in 1 .. 1700 loop insert into item select 3 * i + k, 0 from generate_series(0, 2) k; commit; end loop; end $$');
ok(wait_until(sub { appliers() == 4 }, 60), 'a backlog makes them more') or diag(explain([ changes() ]));
like($paris->safe_psql('postgres', q[select query from pg_stat_activity where backend_type = 'braid leader']),
	qr/^subscription $name: \d appliers, \w/, 'the leader says what it thinks');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');
my @up = changes();
is_deeply([ map { [ @$_[ 0, 1 ] ] } @up ], [ [ 1, 2 ], [ 2, 4 ] ], 'twice doubled');
like($_->[2], qr/^doubled: the load is \d+ % of the appliers' time$/, "because: $_->[2]") for @up;

# Nothing to do: after half a minute half as many appliers, with a little load.
for my $i (1 .. 60)
{
	$tokyo->safe_psql('postgres', "update item set n = n + 1 where id = $i");
	last if appliers() < 4;
	sleep 1;
}
is(appliers(), 2, 'they become fewer');
like((changes())[-1][2], qr/^halved: the load is \d+ % of the appliers' time, and was low for 3\d s$/, 'because: ' . (changes())[-1][2]);
# The limits move.
$paris->safe_psql('postgres', 'alter system set braid.min_appliers_per_subscription = 3');
$paris->reload;
ok(wait_until(sub { appliers() == 3 }, 20), 'the smallest number counts at once');
is((changes())[-1][2], 'moved between the limits, which are 3 and 4', 'because: ' . (changes())[-1][2]);
$tokyo->safe_psql('postgres', 'update item set n = n + 1 where id <= 200');
$tokyo->safe_psql('postgres', 'do $$ begin for i in 1 .. 300 loop update item set n = n + 1 where id = i; commit; end loop; end $$');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], 'item');
is($paris->safe_psql('postgres', q[select pid from pg_stat_activity where backend_type = 'braid leader']), $leader, 'the leader is the same all the while');
is($paris->safe_psql('postgres', "select failures || ' ' || retries from braid.subscription_detail where name = '$name'"), '0 0', 'nothing failed');

# The view has the same, and what was decided against more.
my $decisions = $paris->safe_psql('postgres', q[
	select appliers_before || ' ' || appliers_after || ' ' || reason from braid.scaling_decisions
	 where subscription = '] . $name . q[' and appliers_before <> appliers_after order by at]);
is($decisions, join("\n", map { join ' ', @$_ } changes()), 'braid.scaling_decisions has what the log has');
is($paris->safe_psql('postgres', q[select count(*) from braid.scaling_decisions where reason like 'doubled: %' and (utilisation_percent < 90 or rows_per_s = 0)]), '0', 'with the load that it was decided by');

done_testing();
