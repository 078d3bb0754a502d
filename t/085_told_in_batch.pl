# A row loses to another one at its provider, which announces that only after it has written to that
# row again. So the later transaction of its stream has the older version. A subscriber that commits
# both as one keeps the newer row, in each way of applying.

use strict;
use warnings;

use Braid;
use Test::More;

my @nodes = my ($tokyo, $paris, $quito) = map { new_node($_) } qw(tokyo paris quito);
on_all('create table gate (id int primary key); create table account (id int primary key, email text unique, v text)', @nodes);
subscribe($paris, $quito);
my $name = subscribe($tokyo, $paris, apply_mode => "'batch'");
sub rows { return $_[0]->safe_psql('postgres', q[select string_agg(a::text, ' ' order by id) from account a]); }

# The announcement waits for the holder of this lock.
$paris->safe_psql('postgres', q[
	create function hold() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock(1); return old; end $$;
	create trigger hold before delete on braid.displacement for each row execute function hold();
	alter table braid.displacement enable always trigger hold;
]);

my $round = 0;
for my $way (q[apply_mode => 'batch'], q[consolidate => true], q[apply_mode => 'aggregate'], q[apply_mode => 'parallel', consolidate => false])
{
	$round++;
	$tokyo->safe_psql('postgres', "select braid.alter_subscription('$name', $way)");
	$paris->safe_psql('postgres', 'truncate account');
	$quito->safe_psql('postgres', 'truncate account');
	caught_up($paris, $quito);
	caught_up($tokyo, $paris);

	# Nothing is applied at tokyo until all is there.
	my $gate = $tokyo->background_psql('postgres');
	$gate->query_safe('begin; lock table gate');
	$paris->safe_psql('postgres', "insert into gate values ($round)");
	my $holder = $paris->background_psql('postgres');
	$holder->query_safe('select pg_advisory_lock(1)');
	# Paris gets the older of the two after the newer.
	$paris->safe_psql('postgres', "select braid.disable_subscription('paris_from_quito')");
	$quito->poll_query_until('postgres', q[select not exists (select from pg_stat_replication where application_name = 'paris_from_quito')]) or die;
	$quito->safe_psql('postgres', q[insert into account values (5, 'a', 'loser')]);
	$paris->safe_psql('postgres', q[insert into account values (8, 'a', 'winner')]);
	$paris->safe_psql('postgres', q[select braid.enable_subscription('paris_from_quito')]);
	$paris->poll_query_until('postgres', q[select exists (select from pg_stat_activity where backend_type = 'braid applier' and wait_event = 'advisory')]) or die;
	$paris->safe_psql('postgres', q[insert into account values (5, 'b', 'newer')]);
	$holder->query_safe('select pg_advisory_unlock(1)');
	$holder->quit;
	$paris->poll_query_until('postgres', 'select not exists (select from braid.displacement)') or die;
	caught_up($paris, $quito);
	my $lsn = $paris->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
	$paris->poll_query_until('postgres', "select sent_lsn >= '$lsn' from pg_stat_replication where application_name = '$name'") or die;
	$gate->query_safe('commit');
	$gate->quit;
	caught_up($tokyo, $paris);
	is(rows($paris), '(5,b,newer) (8,a,winner)', "$way: at the provider");
	is(rows($tokyo), '(5,b,newer) (8,a,winner)', "$way: at the subscriber");
}

$_->stop for @nodes;
done_testing();
