# Either one applier claims the transactions or all do, whichever is faster, and the view shows it.

use strict;
use warnings;

use Braid;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $tokyo = new_node('tokyo');
my $paris = new_node('paris', publication => '', conf => "braid.appliers_per_subscription = 4\nbraid.parallel_apply = auto\n");
on_all(q[
	create table item (id int primary key, n int not null);
	create table hot (id int primary key, n int not null);
], $tokyo, $paris);
# Each row takes two milliseconds here, without using a processor, as if it came from a disk.
$paris->safe_psql('postgres', q[
	create function dawdle() returns trigger immutable language plpgsql as $$ begin perform pg_sleep(0.002); return new; end $$;
	create trigger dawdle before insert or update on item for each row execute function dawdle();
	create trigger dawdle before insert or update on hot for each row execute function dawdle();
	alter table item enable always trigger dawdle;
	alter table hot enable always trigger dawdle;
]);
$tokyo->safe_psql('postgres', 'insert into hot values (1, 0)');
my $name = subscribe($paris, $tokyo);

sub stats
{
	return $paris->safe_psql('postgres', "select $_[0] from braid.dependency_stats where subscription = '$name'");
}

# How many have committed something that was not there before.
sub had_work
{
	my ($work) = @_;
	my $transactions = 'select worker, transactions from braid.apply_workers where worker <> $$leader$$ order by worker';
	my %before = map { split /\|/ } split /\n/, $paris->safe_psql('postgres', $transactions);
	$work->();
	caught_up($paris, $tokyo);
	my %after = map { split /\|/ } split /\n/, $paris->safe_psql('postgres', $transactions);
	return scalar grep { $after{$_} > $before{$_} } keys %after;
}

sub each_of
{
	my ($from, $to, $sql) = @_;
	$tokyo->safe_psql('postgres', "do \$\$ begin for i in $from .. $to loop $sql; commit; end loop; end \$\$");
	return;
}

ok(wait_until(sub { stats(q[concat_ws(' ', appliers_taking, rate_one, rate_all)]) eq '1' }, 20), 'at first one takes transactions, and nothing was tried');
is(had_work(sub { $tokyo->safe_psql('postgres', "insert into item values ($_, 0)") for 1 .. 20 }), 1, 'while nothing waits one does everything');
is(stats('rate_one is null'), 't', 'and nothing is tried');

# The decision holds until the next trial, and a trial takes place only while transactions wait. So
# transactions are added until it has taken place.
sub found
{
	my ($condition, $from, $count, $sql) = @_;
	for my $round (0 .. 11)
	{
		each_of($from + $round * $count, $from + $round * $count + $count - 1, $sql);
		next unless wait_until(sub { stats($condition) eq 't' }, 5);
		# The remaining transactions may be enough for the next trial, whose result stays then.
		caught_up($paris, $tokyo);
		return 1 if stats($condition) eq 't';
	}
	return 0;
}

# A backlog of what can be applied side by side, a row each.
ok(found('appliers_taking = 4 and rate_all > 1.1 * rate_one', 100_001, 3000, 'insert into item values (i, 0)'), 'all take transactions, which is faster: ' . stats('rate_one, rate_all'));
my $found = stats('appliers_taking, rate_one, rate_all');
$tokyo->safe_psql('postgres', "insert into item values ($_, 0)") for 21 .. 40;
caught_up($paris, $tokyo);
is(stats('appliers_taking, rate_one, rate_all'), $found, 'that is kept while nothing waits');

# One of what can't: each waits for the one before.
ok(found('appliers_taking = 1 and rate_all < 1.1 * rate_one', 1, 1500, 'update hot set n = n + 1 where id = 1'), 'one takes transactions, as all are no faster: ' . stats('rate_one, rate_all'));

# The setting counts at once.
$paris->safe_psql('postgres', 'alter system set braid.parallel_apply = always');
$paris->reload;
ok(wait_until(sub { stats('appliers_taking') == 4 }, 20), 'always all');
cmp_ok(had_work(sub { each_of(5001, 5400, 'insert into item values (3 * i, 0), (3 * i + 1, 0), (3 * i + 2, 0)') }), '>', 1, 'several have work');
$paris->safe_psql('postgres', 'alter system set braid.parallel_apply = auto');
$paris->reload;
ok(wait_until(sub { stats('appliers_taking') == 1 }, 20), 'and one again');

# An attempt at a parked transaction that waits for a lock delays nothing else.
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', on_error => 'park'); alter table hot add constraint few check (n < 0) not valid");
$tokyo->safe_psql('postgres', 'update hot set n = n + 1 where id = 1');
caught_up($paris, $tokyo);
is($paris->safe_psql('postgres', 'select state from braid.parked_transactions'), 'failed', 'parked');
$paris->safe_psql('postgres', 'alter table hot drop constraint few');
my ($holder, $retry) = map { $paris->background_psql('postgres') } 1 .. 2;
$holder->query_safe('begin; lock table hot in exclusive mode');
$retry->query_until(qr/asked/, "\\echo asked\nselect braid.retry_parked('$name');\n");
ok(wait_until(sub { $paris->safe_psql('postgres', q[select count(*) from pg_locks where relation = 'hot'::regclass and not granted]) > 0 }, 20), 'it is tried, and waits');
each_of(5501, 5510, 'insert into item values (3 * i, 0)');
ok(wait_until(sub { $paris->safe_psql('postgres', 'select count(*) from item where id between 3 * 5501 and 3 * 5510') == 10 }, 20), 'others go on');
is(stats('appliers_taking'), 1, 'with one applier');
$holder->query_safe('commit');
ok(wait_until(sub { $paris->safe_psql('postgres', 'select count(*) from braid.parked_transactions') == 0 }, 20), 'then it is applied');
$_->quit for $holder, $retry;

# Where commits do not wait for each other there is nothing to choose.
$paris->safe_psql('postgres', "select braid.alter_subscription('$name', commit_order => 'relaxed')");
ok(wait_until(sub { stats('appliers_taking') eq '4' }, 20), 'all in relaxed order');
each_of(6001, 6200, 'insert into item values (3 * i, 0), (3 * i + 1, 0), (3 * i + 2, 0)');
caught_up($paris, $tokyo);
same_tables([ $tokyo, $paris ], qw(item hot));
is($paris->safe_psql('postgres', "select failures from braid.subscription_detail where name = '$name'"), '0', 'nothing failed but what was parked');

done_testing();
